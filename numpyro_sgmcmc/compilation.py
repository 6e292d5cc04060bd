"""What JAX has traced, as a value: equal for the same operations on the same constants.

Programs compiled while others run, or with less effort.

Of a short run compilation is most, and the stages of the warm-up come one after the other; XLA
takes no Python to compile, so that a thread can.

Compiled programs that are forgotten before the system has no room for more.

JAX keeps what it has compiled: here some ten programs for each model, and with every kernel, NUTS
too, one for each run. Each holds mappings of memory, of which Linux allows a process 65,530. The
next compilation ends it then, after some eighty models or two hundred runs.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_sgmcmc.data.arguments import IdentityKey, is_array

__all__ = [
    "aot_compile",
    "clear_compilation_cache_if_full",
    "fingerprint_jaxpr",
    "jit_low_optimization",
]

# To hash as much takes 0.1 s.
_MAX_CONSTANT_BYTES = 2**26


# Functions that hold derivatives, new at every tracing. A program with all derivatives that will be
# wanted of it has called them.
_DERIVATIVE_PARAMETERS = {"bwd", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "out_trees"}


_REPR_TYPES = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, Enum)


def fingerprint_jaxpr(closed_jaxpr: ClosedJaxpr) -> Hashable:
    """A value that is equal for two programs only if they compute the same.

    :param closed_jaxpr: the program, with such derivatives as will be wanted of it.
    :raises ValueError: for a program with more than 64 MB of constants.
    """
    key = _JaxprHasher()
    return key.hash_jaxpr(closed_jaxpr.jaxpr, closed_jaxpr.consts), tuple(key.opaque_objects)


class _JaxprHasher:
    """Hashes programs; what has no text that says all of it is kept, to be compared itself."""

    def __init__(self) -> None:
        self.opaque_objects: dict[Hashable, int] = {}
        self._hashes_by_id: dict[int, tuple[Any, bytes]] = {}
        self._num_constant_bytes = 0

    def hash_jaxpr(self, jaxpr: Jaxpr, constants: Any = ()) -> bytes:
        """The hash of a program."""
        found = self._hashes_by_id.get(id(jaxpr))
        if found is None:
            # The program beside its hash: while it is alive nothing else has its id.
            self._hashes_by_id[id(jaxpr)] = found = jaxpr, self._hash_equations(jaxpr)
        return hashlib.sha256(found[1] + b"".join(map(self._hash_array, constants))).digest()

    def _hash_equations(self, jaxpr: Jaxpr) -> bytes:
        """The hash of the operations, their variables numbered in the order of their making."""
        said = hashlib.sha256()
        numbers: dict[Any, int] = {}

        def made(variables: Any) -> list[str]:
            for v in variables:
                numbers[v] = len(numbers)
            return [repr(v.aval) for v in variables]

        def used(atoms: Any) -> list[Any]:
            return [
                self._describe_literal(a) if isinstance(a, Literal) else numbers[a] for a in atoms
            ]

        said.update(repr((made(jaxpr.constvars), made(jaxpr.invars))).encode())
        for operation in jaxpr.eqns:
            parts = (
                operation.primitive.name,
                used(operation.invars),
                [
                    (name, self._describe_parameter(value))
                    for name, value in sorted(operation.params.items())
                    if name not in _DERIVATIVE_PARAMETERS
                ],
                made(operation.outvars),
            )
            said.update(repr(parts).encode())
        said.update(repr(used(jaxpr.outvars)).encode())
        return said.digest()

    def _describe_literal(self, atom: Literal) -> Any:
        value = self._hash_array(atom.val) if is_array(atom.val) else repr(atom.val)
        return repr(atom.aval), value

    def _describe_parameter(self, x: Any) -> Any:
        """An operation's parameter, as what its ``repr`` says all of."""
        if isinstance(x, _REPR_TYPES):
            return type(x).__name__, repr(x)
        if isinstance(x, (tuple, list)):
            return type(x).__name__, [self._describe_parameter(part) for part in x]
        if isinstance(x, ClosedJaxpr):
            return self.hash_jaxpr(x.jaxpr, x.consts)
        if isinstance(x, Jaxpr):
            return self.hash_jaxpr(x)
        if is_array(x):
            return self._hash_array(x)
        try:
            hash(x)
        except TypeError:
            x = IdentityKey(x)
        return "object", self.opaque_objects.setdefault(x, len(self.opaque_objects))

    def _hash_array(self, x: Any) -> bytes:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return str(x.dtype).encode() + self._hash_array(jax.random.key_data(x))
        x = np.asarray(x)
        self._num_constant_bytes += x.nbytes
        if self._num_constant_bytes > _MAX_CONSTANT_BYTES:
            raise ValueError("The program has more constants than are worth looking at.")
        form = f"{x.dtype} {x.shape}".encode()
        return hashlib.sha256(form + np.ascontiguousarray(x).tobytes()).digest()


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


_MEMORY_MAPS_FILE, _MAX_MEMORY_MAPS_FILE = (
    Path("/proc/self/maps"),
    Path("/proc/sys/vm/max_map_count"),
)


_MAX_MEMORY_MAPS_FRACTION = (
    0.5  # of those allowed: one fit takes hundreds, what else the process does some more
)


def clear_compilation_cache_if_full() -> None:
    """Have JAX forget all that it has compiled, where mappings run short; elsewhere do nothing.

    What is used again is compiled again.
    """
    if not (_MEMORY_MAPS_FILE.exists() and _MAX_MEMORY_MAPS_FILE.exists()):
        return  # not Linux
    if _MEMORY_MAPS_FILE.read_bytes().count(b"\n") > _MAX_MEMORY_MAPS_FRACTION * int(
        _MAX_MEMORY_MAPS_FILE.read_text()
    ):
        jax.clear_caches()
        gc.collect()
