"""Programs compiled while others run, or with less effort.

Of a short run compilation is most, and the stages of the warm-up come one after the other; XLA
takes no Python to compile, so that a thread can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax

__all__ = ["aot_compile", "jit_low_optimization"]


@cache
def _compilation_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="numpyro_sgmcmc-compiler")


def aot_compile(fn: Any, *args: Any, **static_kwargs: Any) -> None:
    """Begin to compile a jitted function for such arguments: its call finds it compiled, or waits.

    It is traced here and compiled there, since NumPyro's handlers are one stack for all threads. A
    failure to compile is raised by the call.

    :param args: arrays, or :class:`jax.ShapeDtypeStruct` in their place.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return  # within a chain per device, where JAX lowers nothing apart
    _compilation_executor().submit(fn.lower(*args, **static_kwargs).compile)


def jit_low_optimization(fn: Callable, static_argnames: Sequence[str] = ()) -> Any:
    """Jitted, of a function whose few runs cost nothing beside its compilation."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(fn, static_argnames=static_argnames, compiler_options=options)
