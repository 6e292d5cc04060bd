"""The potential as the warm-up asks for it: compiled once, called from Python.

Small linear algebra is done by NumPy in float64: it compiles nothing, and curvature of columns in
very different units needs the digits.

Gradients on minibatches at many positions at once: the one program from which the warm-up makes
all that it must know of the potential.

What is linear in the minibatch potential is on all rows a weighted mean of its values on
minibatches (:func:`minibatches_of`), so that passes over all rows, gradients at some draws, the
gradient's noise and its curvature are all sums of what this program returns, made by NumPy in
float64. It is compiled once for a model, whatever the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.budget import HIGH_DIM, WarmupBudget, count_rows_per_gradient
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices, Plate, Subsampling
from numpyro_sgmcmc.model.potential import IncludedRows, Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = [
    "BatchedGradients",
    "JittedPotential",
    "WeightedMinibatch",
    "assemble_hessian",
    "iter_weighted_minibatches",
    "sample_minibatch_indices",
    "sample_subset",
]

_NUM_SUBSET_ROWS = 20_000


_CONTIGUOUS_RUN_BYTES = 2**14


_jitted_value = jax.jit(Potential.full_value, static_argnums=0)


_jitted_gradient = jax.jit(Potential.full_gradient, static_argnums=0)


_jitted_value_grad_hessian = jax.jit(Potential.full_value_grad_hessian, static_argnums=0)


_jitted_hessian_products = jax.jit(Potential.full_hessian_products, static_argnums=0)


def choose_run_length(potential: Potential, plate: Plate) -> int:
    """Rows that random rows are drawn in: one, or as many as share some pages of the disk."""
    widths = [x.array for x in potential.host_lookups if x.plate == plate.name]
    widths = [x.row_size * x.dtype.itemsize for x in widths]
    fitting = max(1, _CONTIGUOUS_RUN_BYTES // max(1, *widths)) if widths else 1
    return max(
        r
        for r in range(1, min(fitting, plate.subsample_size_per_shard) + 1)
        if plate.subsample_size_per_shard % r == 0
    )


def sample_subset(
    potential: Potential, seed: int, num_rows: int = _NUM_SUBSET_ROWS
) -> Indices | None:
    """Random rows that stand for all rows, ``num_rows`` a plate, and no fewer than a minibatch has.

    :return: None where no plate has more, and all rows of it are on one device.
    """
    num_rows = max([num_rows, *(p.subsample_size for p in potential.plates)])
    if all(p.size <= num_rows and p.shards is None for p in potential.plates):
        return None
    rng = np.random.default_rng(seed)
    return {
        p.name: _sample_stratified_rows(p, rng, choose_run_length(potential, p), num_rows)
        for p in potential.plates
    }


def _sample_stratified_rows(
    plate: Plate, rng: np.random.Generator, run_length: int, num_rows: int
) -> np.ndarray:
    """Sorted rows of one plate; where they are spread over devices, as many of each shard."""
    if plate.size <= num_rows and plate.shards is None:
        return np.arange(plate.size, dtype=np.int32)
    firsts, counts = plate.shard_offsets_and_sizes
    each = -(-num_rows // (run_length * len(counts)))
    starts = np.sort(rng.integers(0, counts, (len(counts), each)))
    rows = (starts[..., None] + np.arange(run_length)) % counts[..., None]
    return (firsts + rows.reshape(len(counts), -1)).reshape(-1).astype(np.int32)


class JittedPotential:
    """The full-data potential, or that of a subset of the rows, at positions of float64.

    :param potential: the posterior.
    :param arguments: the model's arguments.
    :param subset_indices: rows that stand for all, or None for all rows.
    """

    def __init__(
        self, potential: Potential, arguments: Arguments, subset_indices: Indices | None = None
    ) -> None:
        self.potential, self.arguments, self.subset_indices = potential, arguments, subset_indices
        self._cast = partial(np.asarray, dtype=potential.dtype)

    @classmethod
    def from_random_subset(cls, potential: Potential, arguments: Arguments) -> JittedPotential:
        """The potential on a fixed random subset of the rows, for work that bears its error."""
        return cls(potential, arguments, sample_subset(potential, 0))

    def value(self, position: np.ndarray) -> float:
        """The potential."""
        return float(
            _jitted_value(self.potential, self._cast(position), self.arguments, self.subset_indices)
        )

    def gradient(self, position: np.ndarray) -> np.ndarray:
        """The gradient, shape ``(d,)``."""
        g = _jitted_gradient(
            self.potential, self._cast(position), self.arguments, self.subset_indices
        )
        return np.asarray(g, np.float64)

    def value_grad_hessian(self, position: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Potential, gradient and Hessian."""
        u, g, h = _jitted_value_grad_hessian(
            self.potential, self._cast(position), self.arguments, self.subset_indices
        )
        return float(u), np.asarray(g, np.float64), np.asarray(h, np.float64)

    def hessian_products(self, position: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Products of the Hessian with the rows of ``vectors``, shape ``(k, d)``."""
        q, v = self._cast(position), self._cast(vectors)
        return np.asarray(
            _jitted_hessian_products(self.potential, q, v, self.arguments, self.subset_indices),
            np.float64,
        )


_HESSIAN_COLUMNS_PER_CALL = 64


def assemble_hessian(jitted_potential: JittedPotential, position: np.ndarray) -> np.ndarray:
    """A large Hessian, 64 columns at a time, so that memory is that of the matrix."""
    d = position.size
    columns = np.eye(-(-d // _HESSIAN_COLUMNS_PER_CALL) * _HESSIAN_COLUMNS_PER_CALL, d)
    blocks = columns.reshape(-1, _HESSIAN_COLUMNS_PER_CALL, d)
    hessian = np.concatenate([jitted_potential.hessian_products(position, v) for v in blocks])[:d]
    return (hessian + hessian.T) / 2


def sample_minibatch_indices(
    potential: Potential, rng: np.random.Generator, shape: tuple[int, ...], subsampling: Subsampling
) -> Indices:
    """Independent minibatches with rows as a scheme has them: random ones, or consecutive.

    :return: shape ``shape + (subsample_size,)`` for each plate.
    """
    if subsampling.is_contiguous:
        return {
            p.name: _sample_plate_indices(p, rng, shape, p.subsample_size_per_shard)
            for p in potential.plates
        }
    return {
        p.name: _sample_plate_indices(p, rng, shape, choose_run_length(potential, p))
        for p in potential.plates
    }


def _sample_plate_indices(
    plate: Plate, rng: np.random.Generator, shape: tuple[int, ...], run_length: int
) -> np.ndarray:
    """Runs of rows that start at random; of each shard its part, and all decisive ones."""
    if plate.included_rows:
        room = plate.random_part
        run_length = 1 if run_length == 1 else room.subsample_size_per_shard
        return plate.add_included_rows(_sample_plate_indices(room, rng, shape, run_length))
    firsts, counts = plate.shard_offsets_and_sizes
    start = rng.integers(
        0, counts, (*shape, len(counts), plate.subsample_size_per_shard // run_length)
    )
    rows = (start[..., None] + np.arange(run_length)) % counts[..., None]
    rows = firsts + rows.reshape(*shape, len(counts), plate.subsample_size_per_shard)
    return rows.reshape(*shape, plate.subsample_size).astype(np.int32)


_MAX_GRADIENT_ENTRIES_PER_CALL = 2**22  # in all slots' gradients together, at most


_MAX_ROWS_PER_CALL = 2**14  # in all slots' minibatches together, at most


_MAX_PAIRS_PER_CALL = 128


_MAX_PAIRS_PER_CALL_HIGH_DIM = (
    4  # of very many coordinates: with more, XLA multiplies matrices more slowly
)


_MAX_ROWS_PER_CHUNK = 2**20  # of minibatches whose slots are filled at once


_MAX_INDICES_PER_SLICE = 2**16  # numbers of rows that Python makes at once


_MIN_PASS_BATCH_SIZE = (
    64  # of a minibatch in a pass over many rows: with fewer, Python takes the time
)


_MAX_HESSIAN_ROW_DIRECTIONS = (
    2**20
)  # rows times directions at which products with the Hessian are taken at once


_MAX_HESSIAN_MINIBATCHES_PER_CALL = (
    32  # whose Hessians are added up in the model's type; the rest is in float64
)


class WeightedMinibatch(NamedTuple):
    """A minibatch and its weight.

    - **indices** - indices by plate, as many as the plate's ``subsample_size``.
    - **weight** - its share in the mean.
    """

    indices: Indices
    weight: float


class PairResults(NamedTuple):
    """What some of many pairs of a position and a minibatch come to.

    - **pair_slice** - which pairs.
    - **values** - potentials, shape ``(n,)``.
    - **gradients** - shape ``(n, d)``.
    """

    pair_slice: slice
    values: np.ndarray
    gradients: np.ndarray


def iter_weighted_minibatches(
    plate_groups: Sequence[Sequence[Plate]], indices: Indices | None = None
) -> Iterator[WeightedMinibatch]:
    """Minibatches whose weighted mean is the mean over all rows, exactly.

    A minibatch potential is the prior plus (rows / chosen rows) times the likelihood of the chosen
    ones. Where the rows are no multiple of a minibatch, the last one is filled up with copies of
    the first row, and a minibatch of that row alone takes these away again; the weights sum to one,
    so that the prior counts once.

    :param plate_groups: the subsampled plates, those that meet at a site together.
    :param indices: rows that stand for all rows, by plate; all rows where None.
    """
    if not plate_groups:
        yield WeightedMinibatch({}, 1.0)
        return
    first = {p.name: _first_minibatch_indices(p, indices) for group in plate_groups for p in group}
    for group in plate_groups:
        for some in _iter_crossed_minibatches(group, indices):
            yield WeightedMinibatch({**first, **some.indices}, some.weight)
    if len(plate_groups) > 1:
        # Each group is summed with the others held at their first rows.
        yield WeightedMinibatch(first, 1.0 - len(plate_groups))


def _iter_crossed_minibatches(
    plates: Sequence[Plate], indices: Indices | None
) -> Iterator[WeightedMinibatch]:
    """Minibatches of plates that meet at a site, each with each; of one alone as they come, since
    all of them have as many numbers as there are rows.
    """
    if len(plates) == 1:
        yield from _iter_plate_minibatches(plates[0], indices)
        return
    for several in product(*(list(_iter_plate_minibatches(p, indices)) for p in plates)):
        chosen = {p.name: some.indices[p.name] for p, some in zip(plates, several, strict=True)}
        yield WeightedMinibatch(chosen, math.prod(some.weight for some in several))


def _first_minibatch_indices(plate: Plate, indices: Indices | None) -> np.ndarray:
    return np.asarray(next(iter(_iter_plate_minibatches(plate, indices))).indices[plate.name])


def _iter_plate_minibatches(plate: Plate, indices: Indices | None) -> Iterator[WeightedMinibatch]:
    if plate.shards is not None:
        yield from _iter_sharded_minibatches(plate, indices)
        return
    batch = plate.subsample_size
    size = plate.size if indices is None else len(indices[plate.name])

    def take(start: int, stop: int) -> np.ndarray:
        found = np.arange(start, stop, dtype=np.int32)
        return found if indices is None else np.asarray(indices[plate.name])[found]

    whole, rest = divmod(size, batch)
    weight, many = batch / size, max(1, _MAX_INDICES_PER_SLICE // batch)
    for k in range(0, whole, many):
        for some in take(k * batch, min(k + many, whole) * batch).reshape(-1, batch):
            yield WeightedMinibatch({plate.name: some}, weight)
    if rest:
        copies = np.repeat(take(0, 1), batch)
        last = np.concatenate([take(whole * batch, size), copies[rest:]])
        yield WeightedMinibatch({plate.name: last}, weight)
        yield WeightedMinibatch({plate.name: copies}, -(batch - rest) / size)


def _iter_sharded_minibatches(plate: Plate, indices: Indices | None) -> Iterator[WeightedMinibatch]:
    """Minibatches that have their part of each shard; the rest that fills none is left out."""
    assert indices is not None
    of_shards = np.reshape(indices[plate.name], (len(plate.shard_offsets_and_sizes[0]), -1))
    num = max(1, of_shards.shape[1] // plate.subsample_size_per_shard)
    for k in range(num):
        part = (
            np.arange(k * plate.subsample_size_per_shard, (k + 1) * plate.subsample_size_per_shard)
            % of_shards.shape[1]
        )
        yield WeightedMinibatch({plate.name: of_shards[:, part].reshape(-1)}, 1.0 / num)


def _with_min_batch_size(plate: Plate) -> Plate:
    """With minibatches that are not too small."""
    if plate.shards is not None:
        return plate
    size = min(max(plate.subsample_size, _MIN_PASS_BATCH_SIZE), plate.size)
    return plate._replace(subsample_size=size)


@partial(jax.jit, static_argnames="potential")
def _evaluate_pairs(
    potential: Potential,
    arguments: Arguments,
    positions: Array,
    indices: Indices,
    rng_keys: Array | None,
) -> tuple[Array, Array]:
    """Potential and gradient of each slot's minibatch at its position."""

    def one(position: Array, rows: Indices, key: Array | None) -> tuple[Array, Array]:
        return potential.value_and_grad(position, rows, arguments, key)

    return jax.vmap(one)(positions, indices, rng_keys)


@partial(jax.jit, static_argnames="potential")
def _sum_hessian_products(
    potential: Potential,
    arguments: Arguments,
    position: Array,
    indices: Indices,
    weights: Array,
    directions: Array,
) -> Array:
    """Weighted sum of minibatches' Hessians, times each direction."""

    def add(total: Array, xs: tuple[Indices, Array]) -> tuple[Array, None]:
        rows, weight = xs

        def product(direction: Array) -> Array:
            def gradient(q: Array) -> Array:
                return potential.gradient(q, rows, arguments)

            return jax.jvp(gradient, (position,), (direction,))[1]

        return total + weight * jax.vmap(product)(directions), None

    return lax.scan(add, jnp.zeros_like(directions), (indices, weights))[0]


class BatchedGradients:
    """Potentials and gradients on minibatches, called from Python.

    :param potential: the posterior.
    :param arguments: the model's arguments, concrete.
    :param num_rows: rows of a plate that stand for all, about.
    :param included_rows: rows that are in every minibatch of a step, and always among those that stand
        for all.
    """

    def __init__(
        self,
        potential: Potential,
        arguments: Arguments,
        num_rows: int = WarmupBudget.num_representative_rows,
        included_rows: IncludedRows = (),
    ) -> None:
        self.potential, self.included_rows = potential, included_rows
        self.arguments = arguments.map_arrays(jnp.asarray)  # on the device once
        self.plate_groups = [
            [_with_min_batch_size(p) for p in g] if len(g) == 1 else g
            for g in potential.plate_groups
        ]
        """The plates, with the rows of a minibatch in a pass over many."""
        self.subset_minibatches = list(self.iter_subset_minibatches(num_rows))
        """Minibatches of rows that stand for all."""
        self._num_evaluated_pairs = (
            0  # so that each slot of a randomised likelihood gets a key of its own
        )

    def iter_subset_minibatches(self, num_rows: int) -> Iterator[WeightedMinibatch]:
        """Minibatches of about so many rows whose weighted mean stands for that over all."""
        if not self.included_rows:
            yield from iter_weighted_minibatches(
                self.plate_groups, sample_subset(self.potential, 0, num_rows)
            )
            return
        (plate,) = self.step_potential.plates
        num, places = len(plate.included_rows), np.arange(plate.random_part.size, dtype=np.int32)
        if num_rows < len(places):
            rng = np.random.default_rng(0)
            places = np.sort(rng.choice(len(places), num_rows, replace=False)).astype(np.int32)
        decisive, others = np.split(plate.add_included_rows(places), [num])
        for part, of_part in ((decisive, num), (others, plate.random_part.size)):
            for some in iter_weighted_minibatches(self.plate_groups, {plate.name: part}):
                yield WeightedMinibatch(some.indices, of_part / plate.size * some.weight)

    def evaluate_step_minibatches(
        self,
        positions: np.ndarray,
        indices: Indices,
        position_index: np.ndarray,
        minibatch_index: np.ndarray,
    ) -> Iterator[PairResults]:
        """Potentials and gradients of pairs of a position and a minibatch such as steps have.

        :param positions: shape ``(k, d)``.
        :param indices: minibatches, shape ``(m, rows)`` for each plate, the decisive rows first.
        :param position_index: each pair's position.
        :param minibatch_index: each pair's minibatch.
        :return: some pairs at a time, in their order.
        """
        return self._evaluate(
            self.step_potential, positions, indices, position_index, minibatch_index
        )

    def evaluate_pass_minibatches(
        self,
        positions: np.ndarray,
        indices: Indices,
        position_index: np.ndarray,
        minibatch_index: np.ndarray,
    ) -> Iterator[PairResults]:
        """The same of minibatches as large as those of passes over all rows (``groups``)."""
        return self._evaluate(self.potential, positions, indices, position_index, minibatch_index)

    @property
    def step_potential(self) -> Potential:
        """The posterior as steps see it."""
        return self.potential.with_included_rows(self.included_rows)

    def _evaluate(
        self,
        potential: Potential,
        positions: np.ndarray,
        indices: Indices,
        position_index: np.ndarray,
        minibatch_index: np.ndarray,
    ) -> Iterator[PairResults]:
        positions, size = positions.astype(potential.dtype), self._choose_pairs_per_call(indices)
        for first in range(0, len(position_index), size):
            some = slice(first, first + size)
            # A call's last slots may be left over: they repeat the first pair.
            filled_at, filled_of = (
                np.full(size, position_index[0]),
                np.full(size, minibatch_index[0]),
            )
            num = len(position_index[some])
            filled_at[:num], filled_of[:num] = position_index[some], minibatch_index[some]
            keys = None
            if potential.is_stochastic:
                keys = random.split(random.key(self._num_evaluated_pairs), size)
            self._num_evaluated_pairs += num
            minibatches = {name: r[filled_of] for name, r in indices.items()}
            values, gradients = _evaluate_pairs(
                potential, self.arguments, positions[filled_at], minibatches, keys
            )
            values, gradients = np.asarray(values, np.float64), np.asarray(gradients, np.float64)
            yield PairResults(some, values[:num], gradients[:num])

    def _choose_pairs_per_call(self, indices: Indices) -> int:
        """How many pairs of a position and such a minibatch a call takes."""
        batch = _count_rows_per_minibatch(indices) or count_rows_per_gradient(
            self.potential, self.arguments
        )
        fitting = min(
            _MAX_GRADIENT_ENTRIES_PER_CALL // self.potential.dim, _MAX_ROWS_PER_CALL // batch
        )
        if self.potential.dim > HIGH_DIM:
            fitting = min(fitting, _MAX_PAIRS_PER_CALL_HIGH_DIM)
        return int(np.clip(fitting, 1, _MAX_PAIRS_PER_CALL))

    def evaluate_on_subset(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Potentials and gradients on rows that stand for all, at each position."""
        return self.weighted_mean(positions, self.subset_minibatches)

    def is_finite(self, position: np.ndarray) -> bool:
        """Whether potential and gradient are finite."""
        return all(bool(np.isfinite(x).all()) for x in self.evaluate_on_subset(position[None]))

    def full_gradient(self, position: np.ndarray) -> np.ndarray:
        """The gradient on all rows, shape ``(d,)``."""
        if self.arguments.sharded_arrays:
            return JittedPotential(self.potential, self.arguments).gradient(position)
        return self.weighted_mean(position[None], iter_weighted_minibatches(self.plate_groups))[1][
            0
        ]

    def full_potentials(self, positions: np.ndarray) -> np.ndarray:
        """The potential on all rows at each position, shape ``(k,)``."""
        if self.arguments.sharded_arrays:
            potential = JittedPotential(self.potential, self.arguments)
            return np.array([potential.value(position) for position in positions])
        return self.weighted_mean(positions, iter_weighted_minibatches(self.plate_groups))[0]

    def full_hessian(self, position: np.ndarray) -> np.ndarray:
        """The Hessian on all rows, shape ``(d, d)``; a randomised likelihood has none here."""
        target = self.potential
        if self.arguments.sharded_arrays:
            return assemble_hessian(JittedPotential(target, self.arguments), position)
        together, size = self._choose_hessian_call_size()
        at, columns = position.astype(target.dtype), np.eye(target.dim, dtype=target.dtype)
        hessian = np.zeros((target.dim, target.dim))
        minibatches = iter_weighted_minibatches(self.plate_groups)
        while some := list(islice(minibatches, size)):
            filled = some + [WeightedMinibatch(some[0].indices, 0.0)] * (size - len(some))
            rows = {p.name: np.stack([m.indices[p.name] for m in filled]) for p in target.plates}
            weights = np.array([m.weight for m in filled], target.dtype)
            for first in range(0, target.dim, together):
                last = min(first + together, target.dim)
                directions = columns[last - together : last]  # as many each time: one program
                found = _sum_hessian_products(target, self.arguments, at, rows, weights, directions)
                hessian[first:last] += np.asarray(found, np.float64)[first - last :]
        return (hessian + hessian.T) / 2.0

    def precompile_hessian(self) -> None:
        """Begin to compile :meth:`hessian`."""
        target = self.potential
        if self.arguments.sharded_arrays:
            return
        together, size = self._choose_hessian_call_size()

        def some(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, target.dtype)

        first = next(iter_weighted_minibatches(self.plate_groups)).indices
        rows = {
            p.name: jax.ShapeDtypeStruct((size, *first[p.name].shape), first[p.name].dtype)
            for p in target.plates
        }
        aot_compile(
            _sum_hessian_products,
            target,
            self.arguments,
            some(target.dim),
            rows,
            some(size),
            some(together, target.dim),
        )

    def _choose_hessian_call_size(self) -> tuple[int, int]:
        """How many directions and how many minibatches a call takes."""
        batch = sum(
            p.subsample_size for group in self.plate_groups for p in group
        ) or count_rows_per_gradient(self.potential, self.arguments)
        together = int(np.clip(_MAX_HESSIAN_ROW_DIRECTIONS // batch, 1, self.potential.dim))
        return together, sum(
            1
            for _ in islice(
                iter_weighted_minibatches(self.plate_groups), _MAX_HESSIAN_MINIBATCHES_PER_CALL
            )
        )

    def estimate_full_gradients(
        self, positions: np.ndarray, preconditioner: Preconditioner, num_rows: int
    ) -> np.ndarray:
        """Gradients on all rows, from those on some and the exact one at the anchor.

        :param num_rows: rows of a plate on which to take them, about.
        """
        some = self.iter_subset_minibatches(num_rows)
        _, found = self.weighted_mean(
            np.concatenate([positions, preconditioner.center[None]]), some
        )
        return found[:-1] + (preconditioner.reference_gradient - found[-1])

    def weighted_mean(
        self, positions: np.ndarray, weighted_minibatches: Iterable[WeightedMinibatch]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weighted mean of the minibatches' potentials and gradients at each position.

        :param positions: shape ``(k, d)``.
        :return: shapes ``(k,)`` and ``(k, d)``.
        """
        num, left = len(positions), iter(weighted_minibatches)
        values, gradients = np.zeros(num), np.zeros(positions.shape)
        while first := next(left, None):
            together = max(
                1,
                _MAX_ROWS_PER_CHUNK
                // (_count_rows_per_minibatch(first.indices) or _MAX_ROWS_PER_CHUNK),
            )
            some = [first, *islice(left, together - 1)]
            rows = {name: np.stack([m.indices[name] for m in some]) for name in first.indices}
            of, at = np.divmod(np.arange(len(some) * num), num)
            weights = np.array([m.weight for m in some])[of]
            for part, u, g in self._evaluate(self.potential, positions, rows, at, of):
                _scatter_add(values, at[part], weights[part] * u)
                _scatter_add(gradients, at[part], weights[part, None] * g)
        return values, gradients


def _scatter_add(totals: np.ndarray, index: np.ndarray, terms: np.ndarray) -> None:
    """Add each term to the total at its place."""
    if terms[0].size > HIGH_DIM:  # where ``np.add.at`` takes as long as a gradient
        for place, term in zip(index, terms, strict=True):
            totals[place] += term
    else:
        np.add.at(totals, index, terms)


def _count_rows_per_minibatch(indices: Indices) -> int:
    """Rows of a minibatch, those of all plates together."""
    return sum(np.shape(r)[-1] for r in indices.values())
