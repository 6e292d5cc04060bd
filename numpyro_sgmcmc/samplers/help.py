"""What `help` shows of a kernel: its own keywords, and those that all kernels share."""

from __future__ import annotations

import inspect
import re

from numpyro_sgmcmc.samplers.options import Options

__all__ = ["show_shared_keywords"]

_MODEL = """\
:param model: Python callable containing NumPyro primitives, with a subsampled plate around
    the data. Exclusive with ``potential_fn``.
:param potential_fn: potential energy of a pytree of unconstrained values, in place of a model.
"""
_OPTIONS = re.compile(r":param options:.*\n?( .*\n?)*")


def show_shared_keywords(kernel: type) -> None:
    """Put the shared keywords into a kernel's signature and docstring.

    In the signature they stand for ``**options``, in the docstring for ``:param options:``.
    """
    own = inspect.signature(kernel.__init__).parameters  # type: ignore[misc]
    if "options" not in own:
        return
    visible = [p for n, p in own.items() if n not in ("self", "options")]
    shared = [p for n, p in inspect.signature(Options).parameters.items() if n not in own]
    kernel.__signature__ = inspect.Signature(visible + shared)  # type: ignore[attr-defined]
    kernel.__doc__ = _with_shared_parameters(vars(kernel).get("__doc__"))


def _with_shared_parameters(text: str | None) -> str | None:
    """A docstring with the parameters that all kernels share: first the model, last the options."""
    if text is None or Options.__doc__ is None or ":param options:" not in text:
        return text
    text, shared = inspect.cleandoc(text), inspect.cleandoc(Options.__doc__)
    shared = shared[shared.index(":param") : shared.index(":raises")]
    text = _OPTIONS.sub(lambda _: shared, text)
    if ":param model:" in text:
        return text
    first = text.index(":param")
    return text[:first] + _MODEL + text[first:]
