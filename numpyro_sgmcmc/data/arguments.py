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

from numpyro_sgmcmc.data.host_array import HostArray
from numpyro_sgmcmc.data.sharded_array import ShardedArray, as_sharded
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = [
    "Arguments",
    "DeviceArrayCache",
    "IdentityKey",
    "as_jax_arrays",
    "check_jax_representable",
    "is_array",
    "is_traced",
]

_MIN_TOTAL_CACHE_BYTES = 2**25  # of all arrays together
_MIN_CACHED_ARRAY_BYTES = 2**20  # of an array that is a constant all the same


def is_array(x: Any) -> bool:
    """Whether ``x`` is a JAX array, or a NumPy array of a type that JAX holds."""
    if isinstance(x, jax.Array):
        return True
    return isinstance(x, np.ndarray) and (x.dtype.kind in "biufc" or "bfloat" in x.dtype.name)


def is_traced(tree: Any) -> bool:
    """Whether an array in the pytree is being traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _is_host_array(x: Any) -> bool:
    return isinstance(x, HostArray)


def _is_sharded_array(x: Any) -> bool:
    return isinstance(x, ShardedArray)


def _is_row_array(x: Any) -> bool:
    return _is_host_array(x) or _is_sharded_array(x)


def _is_array_or_ref(x: Any) -> bool:
    return isinstance(x, jax.Ref) or is_array(x)


def as_jax_arrays(tree: Any) -> Any:
    """``tree`` with its NumPy arrays as JAX arrays: a traced index cannot index a NumPy array."""
    return jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, tree)


class IdentityKey:
    """A value hashed and compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _static_key(x: Any) -> Hashable:
    """``x`` as a part of a pytree's structure; its type counts, so that 1 and True differ."""
    try:
        hash(x)
    except TypeError:
        return IdentityKey(x)
    return (type(x), x)


@jax.tree_util.register_pytree_node_class
class Arguments:
    """The positional and keyword arguments of one model call; arrays may be held in references.

    :param tuple args: positional arguments.
    :param dict kwargs: keyword arguments, or None for none.
    """

    def __init__(self, args: tuple = (), kwargs: dict | None = None) -> None:
        given = tuple(args), dict(kwargs or {})
        self.args, self.kwargs = jax.tree.map(as_sharded, given, is_leaf=_is_sharded_array)

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
        return (*own, *(host.checksum() for host in self.host_arrays))

    @property
    def is_concrete(self) -> bool:
        """Whether no array is being traced."""
        return not is_traced(self.arrays)

    def dereference(self) -> Arguments:
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
    def host_arrays(self) -> list[HostArray]:
        """The arrays whose rows are read when they are needed; of spread ones this host's part."""
        leaves = jax.tree.leaves((self.args, self.kwargs), is_leaf=_is_row_array)
        parts = (x.array if _is_sharded_array(x) else x for x in leaves)
        return [x for x in parts if _is_host_array(x)]

    def map_host_arrays(self, fn: Callable[[HostArray], Any]) -> Arguments:
        """These arguments with ``fn`` applied to each array whose rows are read when needed."""
        args, kwargs = jax.tree.map(
            lambda x: fn(x) if _is_host_array(x) else x,
            (self.args, self.kwargs),
            is_leaf=_is_host_array,
        )
        return Arguments(args, kwargs)

    @property
    def sharded_arrays(self) -> list[ShardedArray]:
        """The arrays whose rows are spread over devices."""
        leaves = jax.tree.leaves((self.args, self.kwargs), is_leaf=_is_sharded_array)
        return [x for x in leaves if _is_sharded_array(x)]

    def map_sharded_arrays(self, fn: Callable[[ShardedArray], Any]) -> Arguments:
        """These arguments with ``fn`` applied to each array whose rows are spread over devices."""
        args, kwargs = jax.tree.map(
            lambda x: fn(x) if _is_sharded_array(x) else x,
            (self.args, self.kwargs),
            is_leaf=_is_sharded_array,
        )
        return Arguments(args, kwargs)

    def named_arrays(self, model: Callable) -> list[tuple[str, jax.Array | np.ndarray]]:
        """The arrays with the names that they have in the model's signature."""
        return [(name, x) for name, x in self._named_leaves(model) if is_array(x)]

    def named_host_arrays(self, model: Callable) -> list[tuple[str, HostArray]]:
        """As :attr:`hosts`, with such names."""
        named = self._named_leaves(model, _is_row_array)
        parts = ((name, x.array if _is_sharded_array(x) else x) for name, x in named)
        return [(name, x) for name, x in parts if _is_host_array(x)]

    def _named_leaves(
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
        arrays = [x for x in leaves if _is_array_or_ref(x)]
        static = tuple(None if _is_array_or_ref(x) else _static_key(x) for x in leaves)
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
                leaves.append(entry.value if isinstance(entry, IdentityKey) else entry[1])
        return cls(*jax.tree.unflatten(structure, leaves))


class DeviceArrayCache:
    """Large arrays in references, one for each, as a compiled step should see them.

    NumPyro compiles a kernel with the data as constants. XLA copies these (800 MB cost 5 to 9 s and
    1.6 GB), and a cache of programs keeps them, so arrays that are large together are held in
    references, which XLA takes as buffers. It has a price: what such a program returns is committed
    to a device, as its first arguments are not, so that NumPyro's loop with a progress bar has it
    compiled twice. To read a reference outside a compiled function is to copy it.
    """

    def __init__(self) -> None:
        self._refs: dict[int, tuple[Any, Any]] = {}

    def cache_arrays(self, arguments: Arguments) -> Arguments:
        """The arguments with their large arrays in references.

        ``pmap`` knows no references and gets constants.
        """
        if jax.sharding.get_abstract_mesh().manual_axes:
            return arguments.map_arrays(jnp.asarray)
        num_bytes = sum(x.nbytes for x in arguments.arrays if not isinstance(x, jax.core.Tracer))
        least = _MIN_CACHED_ARRAY_BYTES if num_bytes >= _MIN_TOTAL_CACHE_BYTES else math.inf
        return arguments.map_arrays(lambda x: self._get_ref(x, least))

    def keep_only(self, arguments: Arguments) -> None:
        """Let go of all arrays but those of ``arguments``."""
        present = {id(x) for x in arguments.arrays}
        self._refs = {k: held for k, held in self._refs.items() if k in present}

    def _get_ref(self, x: Any, min_bytes: float) -> Any:
        """A reference to an array of so many bytes or more; a smaller one as it is."""
        if isinstance(x, jax.core.Tracer) or not is_array(x):
            return jnp.asarray(x)
        # What lies on other processes' devices cannot be a constant.
        is_spread = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
        if x.nbytes < min_bytes and not is_spread:
            return jnp.asarray(x)
        held = self._refs.get(id(x))
        if held is None or held[0] is not x:
            with jax.ensure_compile_time_eval():
                self._refs[id(x)] = held = (x, jax.new_ref(jnp.asarray(x)))
        return held[1]


def check_jax_representable(arguments: Arguments, model: Callable) -> None:
    """Refuse NumPy arrays that JAX cannot hold, or would hold with other values."""
    for name, x in arguments.named_arrays(model):
        if not isinstance(x, np.ndarray):
            continue
        if np.ma.is_masked(x):
            raise InvalidArgumentError(
                f"{name} is a masked array, of which JAX would use the values behind the mask: "
                "leave these rows out, or pass them to handlers.mask."
            )
        if isinstance(x, np.ma.MaskedArray):
            raise InvalidArgumentError(
                f"{name} is a masked array, which JAX does not take: pass its data."
            )
        if not x.dtype.isnative or x.dtype.name in ("longdouble", "float128", "complex256"):
            raise InvalidArgumentError(
                f"{name} has type {x.dtype.str}, which JAX does not have: pass it as another, for "
                "example by .astype(np.float32)."
            )
        held = jax.dtypes.canonicalize_dtype(x.dtype)
        if x.dtype.kind in "iu" and held != x.dtype and x.size:
            low, high, limits = x.min(), x.max(), np.iinfo(held)
            if low < limits.min or high > limits.max:
                raise InvalidArgumentError(
                    f"{name} has integers from {low} to {high}, which {held} cannot hold: switch "
                    "on jax_enable_x64, or pass floats."
                )
