"""What JAX has traced, as a value: equal for the same operations on the same constants."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_sgmcmc.data.arguments import ByIdentity, is_array

__all__ = ["program_key"]

# To hash as much takes 0.1 s.
_MOST_BYTES = 2**26
# Functions that hold derivatives, new at every tracing. A program with all derivatives that will be
# wanted of it has called them.
_DERIVATIVES = {"bwd", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "out_trees"}
_TEXTUAL = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, Enum)


def program_key(program: ClosedJaxpr) -> Hashable:
    """A value that is equal for two programs only if they compute the same.

    :param program: the program, with such derivatives as will be wanted of it.
    :raises ValueError: for a program with more than 64 MB of constants.
    """
    key = _ProgramKey()
    return key.of(program.jaxpr, program.consts), tuple(key.objects)


class _ProgramKey:
    """Hashes programs; what has no text that says all of it is kept, to be compared itself."""

    def __init__(self) -> None:
        self.objects: dict[Hashable, int] = {}
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._num_bytes = 0

    def of(self, jaxpr: Jaxpr, constants: Any = ()) -> bytes:
        """The hash of a program."""
        found = self._known.get(id(jaxpr))
        if found is None:
            # The program beside its hash: while it is alive nothing else has its id.
            self._known[id(jaxpr)] = found = jaxpr, self._operations(jaxpr)
        return hashlib.sha256(found[1] + b"".join(map(self._array, constants))).digest()

    def _operations(self, jaxpr: Jaxpr) -> bytes:
        """The hash of the operations, their variables numbered in the order of their making."""
        said = hashlib.sha256()
        numbers: dict[Any, int] = {}

        def made(variables: Any) -> list[str]:
            for v in variables:
                numbers[v] = len(numbers)
            return [repr(v.aval) for v in variables]

        def used(atoms: Any) -> list[Any]:
            return [self._literal(a) if isinstance(a, Literal) else numbers[a] for a in atoms]

        said.update(repr((made(jaxpr.constvars), made(jaxpr.invars))).encode())
        for operation in jaxpr.eqns:
            parts = (
                operation.primitive.name,
                used(operation.invars),
                [
                    (name, self._parameter(value))
                    for name, value in sorted(operation.params.items())
                    if name not in _DERIVATIVES
                ],
                made(operation.outvars),
            )
            said.update(repr(parts).encode())
        said.update(repr(used(jaxpr.outvars)).encode())
        return said.digest()

    def _literal(self, atom: Literal) -> Any:
        value = self._array(atom.val) if is_array(atom.val) else repr(atom.val)
        return repr(atom.aval), value

    def _parameter(self, x: Any) -> Any:
        """An operation's parameter, as what its ``repr`` says all of."""
        if isinstance(x, _TEXTUAL):
            return type(x).__name__, repr(x)
        if isinstance(x, (tuple, list)):
            return type(x).__name__, [self._parameter(part) for part in x]
        if isinstance(x, ClosedJaxpr):
            return self.of(x.jaxpr, x.consts)
        if isinstance(x, Jaxpr):
            return self.of(x)
        if is_array(x):
            return self._array(x)
        try:
            hash(x)
        except TypeError:
            x = ByIdentity(x)
        return "object", self.objects.setdefault(x, len(self.objects))

    def _array(self, x: Any) -> bytes:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return str(x.dtype).encode() + self._array(jax.random.key_data(x))
        x = np.asarray(x)
        self._num_bytes += x.nbytes
        if self._num_bytes > _MOST_BYTES:
            raise ValueError("The program has more constants than are worth looking at.")
        form = f"{x.dtype} {x.shape}".encode()
        return hashlib.sha256(form + np.ascontiguousarray(x).tobytes()).digest()
