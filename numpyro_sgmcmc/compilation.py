"""Compilation by JAX: compare traced programs, compile ahead of time, and bound the cache.

:func:`fingerprint_jaxpr` gives a value that is equal for two programs only if they compute the
same, by which kernels on one model share a potential. :func:`aot_compile` compiles in a thread
while Python goes on, because compilation is most of a short run and the stages of the warm-up
follow each other. :func:`clear_compilation_cache_if_full` clears JAX's caches before Linux ends the
process: JAX keeps some ten programs per model, and every run of a kernel, NUTS included, adds one.
Each holds memory mappings, of which Linux allows a process 65,530; they are used up after some
eighty models or two hundred runs.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_sgmcmc.data.arguments import IdentityKey, is_array

# A bound on time: hashing as many bytes of constants takes 0.1 s.
_MAX_CONSTANT_BYTES = 2**26
# Parameters that hold derivative rules, new at every tracing. They need not be compared, because a
# fingerprinted program calls all derivatives that will be computed of it.
_DERIVATIVE_PARAMETERS = {"bwd", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "out_trees"}
# Types whose repr determines the value.
_REPR_TYPES = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, Enum)

_COMPILATION_EXECUTOR = ThreadPoolExecutor(1, thread_name_prefix="numpyro_sgmcmc-compiler")
_MEMORY_MAPS_FILE = Path("/proc/self/maps")
_MAX_MEMORY_MAPS_FILE = Path("/proc/sys/vm/max_map_count")
# Fraction of the allowed mappings: one fit takes hundreds, and the process needs others.
_MAX_MEMORY_MAPS_FRACTION = 0.5


def fingerprint_jaxpr(
    closed_jaxpr: ClosedJaxpr, max_constant_bytes: int = _MAX_CONSTANT_BYTES
) -> Hashable:
    """Return a value that is equal for two programs only if they compute the same.

    :param closed_jaxpr: the program, with all derivatives that will be computed of it.
    """
    hasher = _JaxprHasher(max_constant_bytes)
    digest = hasher.hash_jaxpr(closed_jaxpr.jaxpr, closed_jaxpr.consts)
    return digest, tuple(hasher.opaque_objects)


class _JaxprHasher:
    """Hashes programs; objects that cannot be hashed by content are kept, to be compared."""

    def __init__(self, max_constant_bytes: int) -> None:
        self.opaque_objects: dict[Hashable, int] = {}
        self._hashes_by_id: dict[int, tuple[Any, bytes]] = {}
        self._num_bytes_left = max_constant_bytes

    def hash_jaxpr(self, jaxpr: Jaxpr, constants: Iterable[Any] = ()) -> bytes:
        """Return the hash of a program and its constants."""
        if id(jaxpr) not in self._hashes_by_id:
            # The program is kept beside its hash, so that no other object gets its id.
            self._hashes_by_id[id(jaxpr)] = jaxpr, self._hash_equations(jaxpr)
        digest = self._hashes_by_id[id(jaxpr)][1]
        return hashlib.sha256(digest + b"".join(map(self._hash_array, constants))).digest()

    def _hash_equations(self, jaxpr: Jaxpr) -> bytes:
        """Return the hash of all equations, with variables numbered as they are defined."""
        digest = hashlib.sha256()
        numbers: dict[Any, int] = {}

        def define(variables: Iterable[Any]) -> list[str]:
            for v in variables:
                numbers[v] = len(numbers)
            return [repr(v.aval) for v in variables]

        def use_one(atom: Any) -> Any:
            if not isinstance(atom, Literal):
                return numbers[atom]
            value = self._hash_array(atom.val) if is_array(atom.val) else repr(atom.val)
            return repr(atom.aval), value

        def use(atoms: Iterable[Any]) -> list[Any]:
            return list(map(use_one, atoms))

        digest.update(repr((define(jaxpr.constvars), define(jaxpr.invars))).encode())
        for eqn in jaxpr.eqns:
            parameters = [
                (name, self._describe_parameter(value))
                for name, value in sorted(eqn.params.items())
                if name not in _DERIVATIVE_PARAMETERS
            ]
            parts = (eqn.primitive.name, use(eqn.invars), parameters, define(eqn.outvars))
            digest.update(repr(parts).encode())
        digest.update(repr(use(jaxpr.outvars)).encode())
        return digest.digest()

    def _describe_parameter(self, x: Any) -> Any:
        """Return an object whose ``repr`` determines an equation's parameter."""
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
        self._num_bytes_left -= x.nbytes
        if self._num_bytes_left < 0:
            raise ValueError("The program has too many constants to compare.")
        header = f"{x.dtype} {x.shape}".encode()
        return hashlib.sha256(header + np.ascontiguousarray(x).tobytes()).digest()


def jit_low_optimization(fn: Callable, static_argnames: Sequence[str] = ()) -> Any:
    """Compile a function that runs a few times, so that compilation is most of its cost."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(fn, static_argnames=static_argnames, compiler_options=options)


def aot_compile(fn: Any, *args: Any, **static_kwargs: Any) -> None:
    """Compile a jitted function in a thread; a call with such arguments waits for the result.

    The function is traced here, because NumPyro's handlers are one stack for all threads. An error
    of compilation is raised by the call.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return  # inside shard_map, where JAX cannot lower a function by itself
    _COMPILATION_EXECUTOR.submit(fn.lower(*args, **static_kwargs).compile)


def clear_compilation_cache_if_full(max_num_maps: int | None = None) -> None:
    """Clear JAX's caches where the process nears the limit on memory mappings (Linux only)."""
    if not (_MEMORY_MAPS_FILE.exists() and _MAX_MEMORY_MAPS_FILE.exists()):
        return
    if max_num_maps is None:
        max_num_maps = int(_MAX_MEMORY_MAPS_FILE.read_text())
    if _count_memory_maps(int(time.monotonic())) > _MAX_MEMORY_MAPS_FRACTION * max_num_maps:
        _count_memory_maps.cache_clear()
        jax.clear_caches()
        gc.collect()


@lru_cache(1)
def _count_memory_maps(second: int) -> int:
    """Return the process's mappings, once a second: to read tens of thousands takes 0.03 s."""
    return _MEMORY_MAPS_FILE.read_bytes().count(b"\n")
