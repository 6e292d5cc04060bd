"""What `help` shows of a kernel (its own keywords, and those that all kernels share), and what a
prompt and a notebook show of it: what differs from the defaults.
"""

from __future__ import annotations

import html
import inspect
import re
from typing import Any

from numpyro_sgmcmc.samplers.options import Options

__all__ = ["KernelReprMixin", "document_shared_options"]

_MODEL_PARAMS_DOC = """\
:param model: Python callable containing NumPyro primitives, with a subsampled plate around
    the data. Exclusive with ``potential_fn``.
:param potential_fn: potential energy of a pytree of unconstrained values, in place of a model.
"""
_KINETICS_FIELD_NAMES = {"a": "a", "m": "mass", "c": "softening"}
_MAX_REPR_CHARS = 60  # characters of a value
_OPTIONS_PARAM_PATTERN = re.compile(r":param options:.*\n?( .*\n?)*")


def document_shared_options(kernel_class: type) -> None:
    """Put the shared keywords into a kernel's signature and docstring.

    In the signature they stand for ``**options``, in the docstring for ``:param options:``.
    """
    own = inspect.signature(kernel_class.__init__).parameters  # type: ignore[misc]
    if "options" not in own:
        return
    visible = [p for n, p in own.items() if n not in ("self", "options")]
    shared = [p for n, p in inspect.signature(Options).parameters.items() if n not in own]
    kernel_class.__signature__ = inspect.Signature(visible + shared)  # type: ignore[attr-defined]
    kernel_class.__doc__ = _insert_shared_params(vars(kernel_class).get("__doc__"))


def _insert_shared_params(docstring: str | None) -> str | None:
    """A docstring with the parameters that all kernels share: first the model, last the options."""
    if docstring is None or Options.__doc__ is None or ":param options:" not in docstring:
        return docstring
    docstring, shared = inspect.cleandoc(docstring), inspect.cleandoc(Options.__doc__)
    shared = shared[shared.index(":param") : shared.index(":raises")]
    docstring = _OPTIONS_PARAM_PATTERN.sub(lambda _: shared, docstring)
    if ":param model:" in docstring:
        return docstring
    first = docstring.index(":param")
    return docstring[:first] + _MODEL_PARAMS_DOC + docstring[first:]


class KernelReprMixin:
    """A kernel that prints as the call that makes it, defaults left out."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that was chosen at construction, by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._format_arguments())})"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    def _format_arguments(self) -> list[str]:
        shown = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = self._get_setting(name, parameter.default)
            if value is parameter.default or _is_default(value, parameter.default):
                continue
            text = getattr(value, "__name__", None) or repr(value)
            text = text if "\n" not in text and len(text) <= _MAX_REPR_CHARS else "..."
            shown.append(text if name == "model" else f"{name}={text}")
        return shown

    def _get_setting(self, name: str, default: Any) -> Any:
        """What a keyword was set to: kept by the kernel, its SDE, or the SDE's kinetics."""
        settings = self.settings
        for kept in (name, f"{name}_fn"):
            if kept in settings:
                return settings[kept]
        dynamics = settings["dynamics"]
        if name in _KINETICS_FIELD_NAMES and hasattr(dynamics, "kinetics"):
            return getattr(dynamics.kinetics, _KINETICS_FIELD_NAMES[name])
        return getattr(dynamics, name, default)


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value is the default one; arrays and functions never are."""
    return (
        type(value) is type(default)
        and isinstance(value, (bool, int, float, str, tuple))
        and (value == default)
    )
