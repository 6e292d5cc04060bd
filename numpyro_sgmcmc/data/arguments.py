"""Model arguments as one value that :func:`jax.jit` can take.

A user calls ``mcmc.run(key, X, y, batch_size=256)``: arrays beside integers that decide shapes.
:class:`Arguments` is a pytree whose leaves are the arrays and whose structure holds the rest, so
a function compiled once serves every data set of the same shapes, and a change of ``batch_size``
compiles anew.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.sharded import ShardedArray, as_sharded

__all__ = [
    "Arguments",
    "ByIdentity",
    "HeldArrays",
    "as_jax_arrays",
    "is_array",
    "is_traced",
    "refuse_other_numbers",
]

_HOLD_BYTES = 2**25  # of all arrays together
_SMALL_BYTES = 2**20  # of an array that is a constant all the same


def is_array(x: Any) -> bool:
    """Whether ``x`` is a JAX array, or a NumPy array of a type that JAX holds."""
    if isinstance(x, jax.Array):
        return True
    return isinstance(x, np.ndarray) and (x.dtype.kind in "biufc" or "bfloat" in x.dtype.name)


def is_traced(tree: Any) -> bool:
    """Whether an array in the pytree is being traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _is_host(x: Any) -> bool:
    return isinstance(x, HostArray)


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedArray)


def _is_row_array(x: Any) -> bool:
    return _is_host(x) or _is_sharded(x)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, jax.Ref) or is_array(x)


def as_jax_arrays(tree: Any) -> Any:
    """``tree`` with its NumPy arrays as JAX arrays: a traced index cannot index a NumPy array."""
    return jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, tree)


class ByIdentity:
    """A value hashed and compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _static(x: Any) -> Hashable:
    """``x`` as a part of a pytree's structure; its type counts, so that 1 and True differ."""
    try:
        hash(x)
    except TypeError:
        return ByIdentity(x)
    return (type(x), x)


@jax.tree_util.register_pytree_node_class
class Arguments:
    """The positional and keyword arguments of one model call; arrays may be held in references.

    :param tuple args: positional arguments.
    :param dict kwargs: keyword arguments, or None for none.
    """

    def __init__(self, args: tuple = (), kwargs: dict | None = None) -> None:
        given = tuple(args), dict(kwargs or {})
        self.args, self.kwargs = jax.tree.map(as_sharded, given, is_leaf=_is_sharded)

    @property
    def arrays(self) -> list[jax.Array | np.ndarray]:
        """The array leaves, in pytree order."""
        return [x for x in jax.tree.leaves((self.args, self.kwargs)) if is_array(x)]

    @property
    def signature(self) -> Hashable:
        """Structure, static values, and the shapes and types of the arrays."""
        leaves, structure = jax.tree.flatten(self)
        return structure, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)

    @property
    def checksums(self) -> tuple[int | None, ...]:
        """Of NumPy's arrays and those on the host, which may change in place; None for others."""
        own = (
            zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
            if isinstance(x, np.ndarray)
            else None
            for x in self.arrays
        )
        return (*own, *(host.checksum() for host in self.hosts))

    @property
    def is_concrete(self) -> bool:
        """Whether no array is being traced."""
        return not is_traced(self.arrays)

    def read(self) -> Arguments:
        """These arguments with the arrays that references hold in place of the references."""
        args, kwargs = jax.tree.map(
            lambda x: x[...] if isinstance(x, jax.Ref) else x, (self.args, self.kwargs)
        )
        return Arguments(args, kwargs)

    def map_arrays(self, fn: Callable) -> Arguments:
        """These arguments with ``fn`` applied to each array."""
        args, kwargs = jax.tree.map(lambda x: fn(x) if is_array(x) else x, (self.args, self.kwargs))
        return Arguments(args, kwargs)

    @property
    def hosts(self) -> list[HostArray]:
        """The arrays whose rows are read when they are needed; of spread ones this host's part."""
        leaves = jax.tree.leaves((self.args, self.kwargs), is_leaf=_is_row_array)
        parts = (x.array if _is_sharded(x) else x for x in leaves)
        return [x for x in parts if _is_host(x)]

    def map_hosts(self, fn: Callable[[HostArray], Any]) -> Arguments:
        """These arguments with ``fn`` applied to each array whose rows are read when needed."""
        args, kwargs = jax.tree.map(
            lambda x: fn(x) if _is_host(x) else x, (self.args, self.kwargs), is_leaf=_is_host
        )
        return Arguments(args, kwargs)

    @property
    def sharded(self) -> list[ShardedArray]:
        """The arrays whose rows are spread over devices."""
        leaves = jax.tree.leaves((self.args, self.kwargs), is_leaf=_is_sharded)
        return [x for x in leaves if _is_sharded(x)]

    def map_sharded(self, fn: Callable[[ShardedArray], Any]) -> Arguments:
        """These arguments with ``fn`` applied to each array whose rows are spread over devices."""
        args, kwargs = jax.tree.map(
            lambda x: fn(x) if _is_sharded(x) else x, (self.args, self.kwargs), is_leaf=_is_sharded
        )
        return Arguments(args, kwargs)

    def named_arrays(self, model: Callable) -> list[tuple[str, jax.Array | np.ndarray]]:
        """The arrays with the names that they have in the model's signature."""
        return [(name, x) for name, x in self._named(model) if is_array(x)]

    def named_hosts(self, model: Callable) -> list[tuple[str, HostArray]]:
        """As :attr:`hosts`, with such names."""
        named = self._named(model, _is_row_array)
        parts = ((name, x.array if _is_sharded(x) else x) for name, x in named)
        return [(name, x) for name, x in parts if _is_host(x)]

    def _named(
        self, model: Callable, is_leaf: Callable[[Any], bool] | None = None
    ) -> Iterator[tuple[str, Any]]:
        """All arguments' leaves with the names that they have in the model's signature."""
        try:
            names = list(inspect.signature(model).parameters)
        except (TypeError, ValueError):
            names = []
        arguments = self.args, self.kwargs
        for path, leaf in jax.tree_util.tree_flatten_with_path(arguments, is_leaf)[0]:
            part = path[1]
            if isinstance(part, jax.tree_util.SequenceKey):
                name = names[part.idx] if part.idx < len(names) else f"argument {part.idx}"
            else:
                name = str(getattr(part, "key", part))
            # What a ShardedArray holds goes by its name.
            inside = [p for p in path[2:] if not isinstance(p, jax.tree_util.FlattenedIndexKey)]
            yield f"`{name}{jax.tree_util.keystr(tuple(inside))}`", leaf

    def tree_flatten(self) -> tuple[list[Any], Hashable]:
        leaves, structure = jax.tree.flatten((self.args, self.kwargs))
        arrays = [x for x in leaves if _is_leaf(x)]
        static = tuple(None if _is_leaf(x) else _static(x) for x in leaves)
        return arrays, (structure, static)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Arguments:
        structure, static = aux
        arrays = iter(children)
        leaves = []
        for entry in static:
            if entry is None:
                leaves.append(next(arrays))
            else:
                leaves.append(entry.value if isinstance(entry, ByIdentity) else entry[1])
        return cls(*jax.tree.unflatten(structure, leaves))


class HeldArrays:
    """Large arrays in references, one for each, as a compiled step should see them.

    NumPyro compiles a kernel with the data as constants. XLA copies these (800 MB cost 5 to 9 s and
    1.6 GB), and a cache of programs keeps them, so arrays that are large together are held in
    references, which XLA takes as buffers. It has a price: what such a program returns is committed
    to a device, as its first arguments are not, so that NumPyro's loop with a progress bar has it
    compiled twice. To read a reference outside a compiled function is to copy it.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}

    def hold(self, arguments: Arguments) -> Arguments:
        """The arguments with their large arrays in references.

        ``pmap`` knows no references and gets constants.
        """
        if jax.sharding.get_abstract_mesh().manual_axes:
            return arguments.map_arrays(jnp.asarray)
        num_bytes = sum(x.nbytes for x in arguments.arrays if not isinstance(x, jax.core.Tracer))
        least = _SMALL_BYTES if num_bytes >= _HOLD_BYTES else math.inf
        return arguments.map_arrays(lambda x: self._reference(x, least))

    def keep_only(self, arguments: Arguments) -> None:
        """Let go of all arrays but those of ``arguments``."""
        present = {id(x) for x in arguments.arrays}
        self._held = {k: held for k, held in self._held.items() if k in present}

    def _reference(self, x: Any, least: float) -> Any:
        """A reference to an array of so many bytes or more; a smaller one as it is."""
        if isinstance(x, jax.core.Tracer) or not is_array(x):
            return jnp.asarray(x)
        # What lies on other processes' devices cannot be a constant.
        is_spread = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
        if x.nbytes < least and not is_spread:
            return jnp.asarray(x)
        held = self._held.get(id(x))
        if held is None or held[0] is not x:
            with jax.ensure_compile_time_eval():
                self._held[id(x)] = held = (x, jax.new_ref(jnp.asarray(x)))
        return held[1]


def refuse_other_numbers(arguments: Arguments, model: Callable) -> None:
    """Refuse NumPy arrays that JAX cannot hold, or would hold with other values."""
    for name, x in arguments.named_arrays(model):
        if not isinstance(x, np.ndarray):
            continue
        if np.ma.is_masked(x):
            raise Refusal(
                f"{name} is a masked array, of which JAX would use the values behind the mask: "
                "leave these rows out, or pass them to handlers.mask."
            )
        if isinstance(x, np.ma.MaskedArray):
            raise Refusal(f"{name} is a masked array, which JAX does not take: pass its data.")
        if not x.dtype.isnative or x.dtype.name in ("longdouble", "float128", "complex256"):
            raise Refusal(
                f"{name} has type {x.dtype.str}, which JAX does not have: pass it as another, for "
                "example by .astype(np.float32)."
            )
        held = jax.dtypes.canonicalize_dtype(x.dtype)
        if x.dtype.kind in "iu" and held != x.dtype and x.size:
            low, high, limits = x.min(), x.max(), np.iinfo(held)
            if low < limits.min or high > limits.max:
                raise Refusal(
                    f"{name} has integers from {low} to {high}, which {held} cannot hold: switch "
                    "on jax_enable_x64, or pass floats."
                )
