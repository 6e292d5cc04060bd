"""Model arguments as a pytree that :func:`jax.jit` can take.

A user calls ``mcmc.run(key, X, y, batch_size=256)``: arrays beside integers that determine shapes.
The leaves of :class:`Arguments` are the arrays, and its structure holds the rest. A compiled
function therefore serves every data set of the same shapes, and is compiled again for another
``batch_size``. :class:`DeviceArrayCache` keeps large arrays out of the compiled programs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.data.host_array import (
    HostArray,
    RowArray,
    compute_checksum,
    exceeds_integer_range,
)
from numpyro_sgmcmc.data.sharded_array import ShardedArray, as_sharded
from numpyro_sgmcmc.errors import InvalidArgumentError

# Bytes of all arrays together above which they are held in references. Below, the time to compile
# them as constants is negligible.
MAX_CONSTANT_BYTES = 2**25
# Bytes below which an array is a constant nevertheless.
_MIN_CACHED_ARRAY_BYTES = 2**20


def is_array(x: Any) -> bool:
    """Return whether ``x`` is a JAX array, or a NumPy array of a type that JAX supports."""
    if isinstance(x, jax.Array):
        return True
    return isinstance(x, np.ndarray) and (x.dtype.kind in "biufc" or "bfloat" in x.dtype.name)


def is_traced(tree: Any) -> bool:
    """Return whether an array in the pytree is traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def as_jax_arrays(tree: Any) -> Any:
    """Return ``tree`` with JAX arrays for NumPy arrays, which a traced index cannot index."""
    return jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, tree)


class IdentityKey:
    """A value that is hashed and compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@jax.tree_util.register_pytree_node_class
class Arguments:
    """The positional and keyword arguments of a model call; arrays may be in references."""

    def __init__(self, args: tuple = (), kwargs: dict | None = None) -> None:
        self.args, self.kwargs = jax.tree.map(
            as_sharded,
            (tuple(args), dict(kwargs or {})),
            is_leaf=lambda x: isinstance(x, ShardedArray),
        )

    @property
    def arrays(self) -> list[jax.Array | np.ndarray]:
        """The array leaves, in pytree order."""
        return [x for x in jax.tree.leaves((self.args, self.kwargs)) if is_array(x)]

    @property
    def host_arrays(self) -> list[HostArray]:
        """Arrays whose rows are read when needed; of sharded ones, the part of this host."""
        on_host = [x for x in self._row_arrays if x.is_on_host]
        return [x.array if isinstance(x, ShardedArray) else x for x in on_host]

    @property
    def sharded_arrays(self) -> list[ShardedArray]:
        """Arrays whose rows are sharded over devices."""
        return [x for x in self._row_arrays if isinstance(x, ShardedArray)]

    @property
    def _row_arrays(self) -> list[Any]:
        leaves = jax.tree.leaves((self.args, self.kwargs), is_leaf=_is_row_array)
        return [x for x in leaves if _is_row_array(x)]

    @property
    def signature(self) -> Hashable:
        """Structure, static values, and shapes and types of the arrays."""
        leaves, structure = jax.tree.flatten(self)
        return structure, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)

    @property
    def checksums(self) -> tuple[int | None, ...]:
        """CRCs of NumPy arrays and arrays on the host, which may change; None for JAX arrays."""
        in_memory = (
            compute_checksum([x]) if isinstance(x, np.ndarray) else None for x in self.arrays
        )
        return (*in_memory, *(array.checksum() for array in self.host_arrays))

    @property
    def is_concrete(self) -> bool:
        """True where no array is traced."""
        return not is_traced(self.arrays)

    def dereference(self) -> Arguments:
        """Return the arguments with the arrays in place of their references."""
        return self._map(lambda x: x[...], lambda x: isinstance(x, jax.Ref))

    def map_arrays(self, fn: Callable) -> Arguments:
        """Return the arguments with ``fn`` applied to each array."""
        return self._map(fn, is_array)

    def map_host_arrays(self, fn: Callable[[HostArray], Any]) -> Arguments:
        """Return the arguments with ``fn`` applied to each :class:`HostArray`."""
        return self._map(fn, lambda x: isinstance(x, HostArray))

    def map_sharded_arrays(self, fn: Callable[[ShardedArray], Any]) -> Arguments:
        """Return the arguments with ``fn`` applied to each :class:`ShardedArray`."""
        return self._map(fn, lambda x: isinstance(x, ShardedArray))

    def _map(self, fn: Callable, is_mapped: Callable[[Any], bool]) -> Arguments:
        """Return the arguments with ``fn`` applied to the leaves for which ``is_mapped`` holds."""
        args, kwargs = jax.tree.map(
            lambda x: fn(x) if is_mapped(x) else x, (self.args, self.kwargs), is_leaf=is_mapped
        )
        return Arguments(args, kwargs)

    def with_kwarg(self, name: str, value: Any) -> Arguments:
        """Return the arguments with another value of a keyword argument."""
        return Arguments(self.args, {**self.kwargs, name: value})

    def without_kwarg(self, name: str) -> Arguments:
        """Return the arguments without a keyword argument."""
        return Arguments(self.args, {k: v for k, v in self.kwargs.items() if k != name})

    def by_name(self, model: Callable) -> dict[str, Any]:
        """Return the arguments by their names in the model's signature, in pytree order."""
        try:
            signature = inspect.signature(model)
        except (TypeError, ValueError):
            signature = inspect.Signature()
        # Arguments of `*args` have no names.
        parameters = [
            p.name for p in signature.parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD
        ]
        unnamed = [f"argument {k}" for k in range(len(parameters), len(self.args))]
        names = parameters[: len(self.args)] + unnamed
        return dict(zip(names, self.args, strict=True)) | dict(sorted(self.kwargs.items()))

    def named_arrays(self, model: Callable) -> list[tuple[str, jax.Array | np.ndarray]]:
        """Return the arrays with their names in the model's signature."""
        return [(name, x) for name, x in self._named_leaves(model) if is_array(x)]

    def named_host_arrays(self, model: Callable) -> list[tuple[str, HostArray]]:
        """Return :attr:`host_arrays` with their names in the model's signature."""
        named = self._named_leaves(model, _is_row_array)
        names = [name for name, x in named if _is_row_array(x) and x.is_on_host]
        return list(zip(names, self.host_arrays, strict=True))

    def _named_leaves(
        self, model: Callable, is_leaf: Callable[[Any], bool] | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield all leaves with their names in the model's signature."""
        for name, argument in self.by_name(model).items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(argument, is_leaf=is_leaf):
                # The array inside a ShardedArray has the name of the ShardedArray.
                inner = [k for k in path if not isinstance(k, jax.tree_util.FlattenedIndexKey)]
                yield f"`{name}{jax.tree_util.keystr(tuple(inner))}`", leaf

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
        for key in static:
            if key is None:
                leaves.append(next(arrays))
            else:
                leaves.append(key.value if isinstance(key, IdentityKey) else key[1])
        return cls(*jax.tree.unflatten(structure, leaves))


def _is_row_array(x: Any) -> bool:
    return isinstance(x, RowArray)


def _is_array_or_ref(x: Any) -> bool:
    return isinstance(x, jax.Ref) or is_array(x)


def _static_key(x: Any) -> Hashable:
    """Return ``x`` as a part of a pytree's structure, with its type: 1 and True differ."""
    try:
        hash(x)
    except TypeError:
        return IdentityKey(x)
    return (type(x), x)


class DeviceArrayCache:
    """Large arrays in references, one for each, for use in compiled steps.

    NumPyro compiles a kernel with the data as constants. XLA copies these (800 MB took 5 to 9 s and
    1.6 GB), and a cache of programs keeps them. References are passed as buffers instead. Their
    price: the results of such a program are committed to a device, unlike its first arguments, so
    that NumPyro's loop with a progress bar is compiled twice. Reading a reference outside a
    compiled function copies it.
    """

    def __init__(self) -> None:
        self._refs: dict[int, tuple[Any, Any]] = {}

    def cache_arrays(
        self,
        arguments: Arguments,
        min_total_bytes: int = MAX_CONSTANT_BYTES,
        min_array_bytes: int = _MIN_CACHED_ARRAY_BYTES,
    ) -> Arguments:
        """Return the arguments with their large arrays in references.

        ``pmap`` does not support references and gets constants.
        """
        if jax.sharding.get_abstract_mesh().manual_axes:
            return arguments.map_arrays(jnp.asarray)
        num_bytes = sum(x.nbytes for x in arguments.arrays if not isinstance(x, jax.core.Tracer))
        min_bytes = min_array_bytes if num_bytes >= min_total_bytes else math.inf
        return arguments.map_arrays(lambda x: self._get_ref(x, min_bytes))

    def keep_only(self, arguments: Arguments) -> None:
        """Release all arrays except those of ``arguments``."""
        ids = {id(x) for x in arguments.arrays}
        self._refs = {key: entry for key, entry in self._refs.items() if key in ids}

    def _get_ref(self, x: Any, min_bytes: float) -> Any:
        """Return a reference to an array of at least ``min_bytes``, or a smaller array itself."""
        if isinstance(x, jax.core.Tracer) or not is_array(x):
            return jnp.asarray(x)
        # An array with parts on other processes' devices cannot be a constant.
        is_sharded = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
        if x.nbytes < min_bytes and not is_sharded:
            return jnp.asarray(x)
        entry = self._refs.get(id(x))
        if entry is None or entry[0] is not x:
            with jax.ensure_compile_time_eval():
                self._refs[id(x)] = entry = (x, jax.new_ref(jnp.asarray(x)))
        return entry[1]


def check_jax_representable(arguments: Arguments, model: Callable) -> None:
    """Check that JAX can hold the NumPy arrays with the same values."""
    for name, x in arguments.named_arrays(model):
        if not isinstance(x, np.ndarray):
            continue
        if np.ma.is_masked(x):
            raise InvalidArgumentError(
                f"{name} is a masked array, but JAX would use the masked values.",
                "leave the masked rows out, or pass the mask to handlers.mask.",
                "masked-data",
            )
        if isinstance(x, np.ma.MaskedArray):
            raise InvalidArgumentError(
                f"{name} is a masked array, which JAX does not accept.",
                "pass its attribute `data`, since no value is masked.",
                "masked-data",
            )
        if not x.dtype.isnative or x.dtype.name in ("longdouble", "float128", "complex256"):
            raise InvalidArgumentError(
                f"{name} has type {x.dtype.str}, which JAX does not support.",
                "convert it, for example by .astype(np.float32).",
                "unsupported-dtype",
            )
        device_dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        if exceeds_integer_range(x, device_dtype):
            raise InvalidArgumentError(
                f"{name} has integers from {x.min()} to {x.max()}, beyond {device_dtype}'s range.",
                "switch on jax_enable_x64, or convert the data to floats.",
                "integer-range",
            )
