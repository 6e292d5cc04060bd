"""Potentials and gradients on minibatches at many positions, called from Python.

:class:`BatchedGradients` evaluates pairs of a position and a minibatch with one compiled program.
A quantity that is linear in the minibatch potential is, on all rows, a weighted mean of its values
on minibatches (:func:`iter_weighted_minibatches`). Passes over all rows, gradients at some draws,
statistics of the gradient noise and curvature are therefore sums over the results of this program,
accumulated by NumPy in float64, and the program is compiled once per model, whatever the number of
rows.

:class:`JittedPotential` evaluates the potential and its derivatives on all rows, or on a fixed
subset, in one call each. Results are float64 arrays of NumPy: small linear algebra then compiles
nothing, and the curvature of columns in very different units needs the precision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.budget import HIGH_DIM, WarmupBudget, count_rows_per_gradient
from numpyro_sgmcmc.adaptation.coupling import NO_COUPLING, Coupling
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices, Plate, Subsampling
from numpyro_sgmcmc.model.block_arrow import differentiate_twice
from numpyro_sgmcmc.model.potential import IncludedRows, Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

_DEFAULT_BUDGET = WarmupBudget()
_CONTIGUOUS_RUN_BYTES = 2**14  # that random access to a file reads at once: a few pages
_HESSIAN_COLUMNS_PER_CALL = 64  # memory is that of the matrix, not of all products at once
# Bounds of a call, on memory and on the time of one that is not filled: entries of all gradients,
# rows of all minibatches, and numbers in these rows.
_MAX_GRADIENT_ENTRIES_PER_CALL, _MAX_ROWS_PER_CALL, _MAX_VALUES_PER_CALL = 2**22, 2**14, 2**19
# Pairs of a position and a minibatch per call. Beyond HIGH_DIM, XLA's matrix products slow down
# with more than a few.
_MAX_PAIRS_PER_CALL, _MAX_PAIRS_PER_CALL_HIGH_DIM = 128, 4
_MIN_PAIRS_PER_CALL = 2  # XLA adds the rows of a single pair one by one: 10 times the rounding
_MAX_ROWS_PER_CHUNK = 2**20  # of minibatches whose pairs are arranged at once: bounds memory
# Copies of a row that fill up a minibatch, at most: the rounding error of the sum of more is of the
# size of a row (0.3 SD of the effect of ten rows, with 10,000 copies).
_MAX_COPIES = 500
_MIN_PASS_BATCH_SIZE = 64  # of a pass over many rows: with fewer, Python's overhead dominates
# Rows times directions per Hessian product (a bound on memory), and minibatches whose products are
# summed in the model's precision before they are added in float64 (a bound on rounding errors).
_MAX_HESSIAN_ROW_DIRECTIONS, _MAX_HESSIAN_MINIBATCHES_PER_CALL = 2**20, 32
_MAX_MAPPED_DIRECTIONS = 4  # up to which products one by one are faster than all at once, on CPUs
# Rows of a minibatch, and numbers that belong to these, in passes over all rows in which each
# minibatch costs vectors of all coordinates: bounds of time and memory.
_MIN_LARGE_PASS_ROWS, _MAX_LARGE_PASS_VALUES, _LARGE_PASS_VALUES_PER_ROW = 2**15, 2**25, 32


@lru_cache
def _jit_method(method: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(method, static_argnums=0)


class JittedPotential:
    """The potential on all rows, or on a subset of them, at positions in float64.

    :param subset_indices: rows of a representative subset, for approximate work; None for all.
    """

    def __init__(
        self, potential: Potential, arguments: Arguments, subset_indices: Indices | None = None
    ) -> None:
        self.potential, self.arguments, self.subset_indices = potential, arguments, subset_indices

    def value(self, position: np.ndarray) -> float:
        """Return the potential."""
        return float(self._evaluate(Potential.full_value, position))

    def gradient(self, position: np.ndarray) -> np.ndarray:
        """Return the gradient, shape ``(d,)``."""
        return np.asarray(self._evaluate(Potential.full_gradient, position))

    def value_grad_hessian(self, position: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return potential, gradient of shape ``(d,)`` and Hessian of shape ``(d, d)``."""
        value, gradient, hessian = self._evaluate(Potential.full_value_grad_hessian, position)
        return float(value), gradient, hessian

    def hessian_products(self, position: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Return the products of the Hessian with each of ``vectors``, shape ``(k, d)``."""
        return np.asarray(self._evaluate(Potential.full_hessian_products, position, vectors))

    def _evaluate(self, method: Callable[..., Any], *vectors: np.ndarray) -> Any:
        """Return the results of a method of the potential, in float64."""
        cast = (np.asarray(v, self.potential.dtype) for v in vectors)
        results = _jit_method(method)(self.potential, *cast, self.arguments, self.subset_indices)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), results)


def assemble_hessian(jitted_potential: JittedPotential, position: np.ndarray) -> np.ndarray:
    """Return the Hessian from its products with blocks of unit vectors, shape ``(d, d)``."""
    dim, block = position.size, _HESSIAN_COLUMNS_PER_CALL
    unit_vectors = np.eye(-(-dim // block) * block, dim).reshape(-1, block, dim)
    hessian = np.concatenate([jitted_potential.hessian_products(position, v) for v in unit_vectors])
    return (hessian[:dim] + hessian[:dim].T) / 2


def sample_subset(
    potential: Potential, num_rows: int = WarmupBudget.num_representative_rows
) -> Indices | None:
    """Sample rows that represent all rows, about ``num_rows`` per plate and at least a minibatch.

    :return: sorted indices by plate, always the same; None where the subset is all rows, on one
        device.
    """
    num_rows = max([num_rows, *(p.subsample_size for p in potential.plates)])
    if all(p.size <= num_rows and p.shards is None for p in potential.plates):
        return None
    rng = np.random.default_rng(0)
    subset: dict[str, np.ndarray] = {}
    for plate in potential.plates:
        if plate.size <= num_rows and plate.shards is None:
            subset[plate.name] = np.arange(plate.size, dtype=np.int32)
        else:
            run_length = _choose_run_length(potential, plate)
            num_shards = len(plate.shard_offsets_and_sizes[0])
            num_runs = -(-num_rows // (run_length * num_shards))
            subset[plate.name] = _sample_runs(plate, rng, (), num_runs, run_length, is_sorted=True)
    return subset


def sample_minibatch_indices(
    potential: Potential, rng: np.random.Generator, shape: tuple[int, ...], subsampling: Subsampling
) -> Indices:
    """Sample independent minibatches of consecutive rows if ``subsampling`` is contiguous, else of
    random rows; shape ``shape + (subsample_size,)`` for each plate.
    """
    indices = {}
    for plate in potential.plates:
        random_part = plate.random_part
        run_length = batch_size = random_part.subsample_size_per_shard
        if not subsampling.is_contiguous:
            run_length = _choose_run_length(potential, plate)
            if plate.included_rows and run_length > 1:
                run_length = batch_size
        rows = _sample_runs(random_part, rng, shape, batch_size // run_length, run_length)
        indices[plate.name] = plate.add_included_rows(rows)
    return indices


def shuffle_minibatches(
    potential: Potential, rng: np.random.Generator, indices: Indices
) -> Indices:
    """Return minibatches that have the rows of others, each from a random one of these."""
    shuffled = {}
    for plate in potential.plates:
        rows = np.asarray(indices[plate.name])
        runs = rows.reshape(len(rows), -1, _choose_run_length(potential, plate))
        # A row keeps its place in a minibatch, so that shards and included rows keep theirs.
        order = rng.permuted(np.tile(np.arange(len(rows))[:, None], runs.shape[1]), axis=0)
        shuffled[plate.name] = runs[order, np.arange(runs.shape[1])].reshape(rows.shape)
    return shuffled


def _choose_run_length(potential: Potential, plate: Plate) -> int:
    """Return the length of runs of random rows: 1, or as many as fill some pages of the disk."""
    arrays = [x.array for x in potential.host_lookups if x.plate == plate.name]
    row_bytes = [x.row_size * x.dtype.itemsize for x in arrays]
    max_length = max(1, _CONTIGUOUS_RUN_BYTES // max(1, *row_bytes)) if row_bytes else 1
    batch_size = plate.subsample_size_per_shard
    return max(r for r in range(1, min(max_length, batch_size) + 1) if batch_size % r == 0)


def _sample_runs(
    plate: Plate,
    rng: np.random.Generator,
    shape: tuple[int, ...],
    num_runs: int,
    run_length: int,
    is_sorted: bool = False,
) -> np.ndarray:
    """Sample runs of consecutive rows, ``num_runs`` of each shard; shape ``shape + (rows,)``."""
    offsets, sizes = plate.shard_offsets_and_sizes
    first_rows = rng.integers(0, sizes, (*shape, len(sizes), num_runs))
    if is_sorted:
        first_rows = np.sort(first_rows)
    rows = (first_rows[..., None] + np.arange(run_length)) % sizes[..., None]
    rows = offsets + rows.reshape(*shape, len(sizes), num_runs * run_length)
    return rows.reshape(*shape, -1).astype(np.int32)


class WeightedMinibatch(NamedTuple):
    """A minibatch and its weight in a mean, which may be negative; weights sum to one."""

    indices: Indices
    weight: float


def iter_weighted_minibatches(
    plate_groups: Sequence[Sequence[Plate]], indices: Indices | None = None
) -> Iterator[WeightedMinibatch]:
    """Iterate over minibatches whose weighted mean is the mean over all rows, exactly.

    A minibatch potential is the prior plus (rows / minibatch rows) times the likelihood of the
    minibatch. Where the rows are no multiple of the batch size, the last minibatch is filled up
    with copies of the first row, or with the first rows, and minibatches of these alone, the first
    with a negative weight, subtract them again. The weights sum to one, so that the prior counts
    once.

    Minibatches are created one at a time: together they hold as many indices as there are rows.

    :param plate_groups: the subsampled plates; plates that meet at a site form a group.
    :param indices: rows of a representative subset, by plate; None for all rows.
    """
    if not plate_groups:
        yield WeightedMinibatch({}, 1.0)
        return
    first = {
        p.name: next(_iter_plate_minibatches(p, indices))[0]
        for group in plate_groups
        for p in group
    }
    for group in plate_groups:
        # Plates of other groups stay at their first minibatch.
        yield from _iter_crossed_minibatches(group, indices, first, 1.0)
    if len(plate_groups) > 1:
        yield WeightedMinibatch(first, 1.0 - len(plate_groups))


def _iter_crossed_minibatches(
    plates: Sequence[Plate], indices: Indices | None, chosen: Indices, weight: float
) -> Iterator[WeightedMinibatch]:
    """Iterate over the product of the plates' minibatches, added to those chosen already."""
    if not plates:
        yield WeightedMinibatch(chosen, weight)
        return
    plate, *others = plates
    for plate_indices, plate_weight in _iter_plate_minibatches(plate, indices):
        yield from _iter_crossed_minibatches(
            others, indices, {**chosen, plate.name: plate_indices}, weight * plate_weight
        )


def _iter_plate_minibatches(
    plate: Plate, indices: Indices | None
) -> Iterator[tuple[np.ndarray, float]]:
    """Iterate over the minibatches of one plate and their weights."""
    rows = None if indices is None else np.asarray(indices[plate.name])
    if plate.shards is not None:
        # Every minibatch has the same number of rows of each shard; remaining rows are left out.
        assert rows is not None
        rows_by_shard = rows.reshape(len(plate.shard_offsets_and_sizes[0]), -1)
        batch_size, shard_size = plate.subsample_size_per_shard, rows_by_shard.shape[1]
        num_minibatches = max(1, shard_size // batch_size)
        for k in range(num_minibatches):
            columns = np.arange(k * batch_size, (k + 1) * batch_size) % shard_size
            yield rows_by_shard[:, columns].reshape(-1), 1.0 / num_minibatches
        return

    batch_size = plate.subsample_size
    size = plate.size if rows is None else len(rows)

    def take(start: int, stop: int) -> np.ndarray:
        positions = np.arange(start, stop, dtype=np.int32) % size
        return positions if rows is None else rows[positions]

    def take_fill(count: int) -> np.ndarray:
        return take(0, count) if count > _MAX_COPIES else np.repeat(take(0, 1), count)

    weight = batch_size / size
    num_minibatches, remainder = divmod(size, batch_size)
    for k in range(num_minibatches):
        yield take(k * batch_size, (k + 1) * batch_size), weight
    if not remainder:
        return
    num_fill = batch_size - remainder
    yield np.concatenate([take(num_minibatches * batch_size, size), take_fill(num_fill)]), weight
    row_weight = -1.0 / size
    while num_fill > _MAX_COPIES:
        # As often as they fit, and then the first of them, which the next minibatch subtracts.
        repeats, rest = divmod(batch_size, num_fill)
        fill = np.tile(take_fill(num_fill), repeats)
        yield np.concatenate([fill, take_fill(rest)]), row_weight * batch_size / repeats
        row_weight, num_fill = -row_weight / repeats, rest
    if num_fill:
        yield np.repeat(take(0, 1), batch_size), row_weight * num_fill


class PairResults(NamedTuple):
    """Potentials ``(n,)`` and gradients ``(n, d)`` of a slice of all pairs."""

    pair_slice: slice
    values: np.ndarray
    gradients: np.ndarray


@partial(jax.jit, static_argnames="potential")
def _evaluate_pairs(
    potential: Potential,
    arguments: Arguments,
    positions: Array,
    indices: Indices,
    rng_keys: Array | None,
) -> tuple[Array, Array]:
    """Return potential and gradient of each minibatch at its position."""

    def evaluate(position: Array, indices: Indices, key: Array | None) -> tuple[Array, Array]:
        return potential.value_and_grad(position, indices, arguments, key)

    return jax.vmap(evaluate)(positions, indices, rng_keys)


@partial(jax.jit, static_argnames="potential")
# GPUs round to 10 bits otherwise, and the Hessian of correlated columns is not definite.
@jax.default_matmul_precision("highest")
def _sum_gradients_and_products(
    potential: Potential,
    arguments: Arguments,
    position: Array,
    indices: Indices,
    weights: Array,
    directions: Array,
) -> tuple[Array, Array]:
    """Return weighted sums of gradients of minibatches, and of their Hessians times directions."""

    def add_minibatch(total: Any, xs: tuple[Indices, Array]) -> tuple[Any, None]:
        indices, weight = xs
        gradient, product = jax.linearize(
            lambda q: potential.gradient(q, indices, arguments), position
        )
        # Scatters of all products at once miss the cache.
        if position.size > HIGH_DIM or len(directions) <= _MAX_MAPPED_DIRECTIONS:
            values = gradient, lax.map(product, directions)
        else:
            values = gradient, jax.vmap(product)(directions)
        return jax.tree.map(lambda t, x: t + weight * x, total, values), None

    zeros = jnp.zeros_like(position), jnp.zeros_like(directions)
    return lax.scan(add_minibatch, zeros, (indices, weights))[0]


@partial(jax.jit, static_argnames="potential")
def _sum_second_derivatives(
    potential: Potential,
    arguments: Arguments,
    position: Array,
    indices: Indices,
    weights: Array,
    directions: Array,
) -> Array:
    """Return weighted sums of second derivatives along directions of the gradients of the rows'
    part of minibatches.
    """

    def add_minibatch(total: Array, xs: tuple[Indices, Array]) -> tuple[Array, None]:
        indices, weight = xs

        def rows_gradient(q: Array) -> Array:
            return potential.rows_gradient(q, indices, arguments)

        values = lax.map(partial(differentiate_twice, rows_gradient, position), directions)
        return total + weight * values, None

    return lax.scan(add_minibatch, jnp.zeros_like(directions), (indices, weights))[0]


@partial(jax.jit, static_argnames="potential")
def _evaluate_prior_products(
    potential: Potential, arguments: Arguments, position: Array, directions: Array
) -> tuple[Array, Array]:
    """Return the gradient of the part of the potential without the rows, and products of its
    Hessian, ``(n, d)``.
    """
    potential = potential.without_shards()
    indices = {p.name: jnp.zeros(1, jnp.int32) for p in potential.plates}
    weights = {p.name: jnp.zeros(1, potential.dtype) for p in potential.plates}

    def prior(q: Array) -> Array:
        # Rows of weight zero: with a row, its terms times the number of rows would be rounded.
        z = potential.unravel(q)
        return potential.minibatch_potential(z, indices, arguments, None, weights)

    gradient = jax.grad(prior)
    products = lax.map(lambda v: jax.jvp(gradient, (position,), (v,))[1], directions)
    return gradient(position), products


def _call_ahead(
    fn: Callable[..., Any], calls: Iterable[tuple[Any, tuple[Any, ...]]]
) -> Iterator[tuple[Any, Any]]:
    """Yield keys and results of a compiled function, of which the next call runs meanwhile.

    :param calls: keys and arguments.
    """
    pending: deque[tuple[Any, Any]] = deque()
    for key, arguments in calls:
        pending.append((key, fn(*arguments)))
        if len(pending) > 1:
            yield pending.popleft()
    yield from pending


class BatchedGradients:
    """Potentials and gradients on minibatches, called from Python.

    - **budget** - work that the stages of the warm-up may spend on them.
    - **plate_groups** - the plates, with the batch size of a pass over many rows.
    - **subset_minibatches** - minibatches of a representative subset.

    :param arguments: the model's arguments, concrete.
    :param included_rows: rows that every minibatch of a step and the representative subset
        include.
    """

    def __init__(
        self,
        potential: Potential,
        arguments: Arguments,
        budget: WarmupBudget = _DEFAULT_BUDGET,
        included_rows: IncludedRows = (),
    ) -> None:
        self.potential, self.budget, self.included_rows = potential, budget, included_rows
        self.arguments = arguments.map_arrays(jnp.asarray)  # transferred to the device once
        self.plate_groups = [
            [_with_min_batch_size(p) for p in group] if len(group) == 1 else group
            for group in potential.plate_groups
        ]
        self.subset_minibatches = list(self.iter_subset_minibatches(budget.num_representative_rows))
        self._row_size = potential.compute_row_size(self.arguments)
        self._num_evaluated_pairs = 0  # seeds the keys of randomised likelihoods

    @property
    def step_potential(self) -> Potential:
        """The posterior with the minibatches of a step, which contain the included rows."""
        return self.potential.with_included_rows(self.included_rows)

    @property
    def batches_per_epoch(self) -> int:
        """Number of minibatches in an epoch; 0 without a subsampled plate."""
        return max((p.batches_per_epoch for p in self.step_potential.plates), default=0)

    def iter_subset_minibatches(self, num_rows: int) -> Iterator[WeightedMinibatch]:
        """Iterate over minibatches of about ``num_rows`` rows per plate that represent all rows."""
        if not self.included_rows:
            yield from iter_weighted_minibatches(
                self.plate_groups, sample_subset(self.potential, num_rows)
            )
            return
        # Two strata: the included rows, and a sample of all others.
        (plate,) = self.step_potential.plates
        num_included, num_others = len(plate.included_rows), plate.random_part.size
        others = np.arange(num_others, dtype=np.int32)
        if num_rows < num_others:
            rng = np.random.default_rng(0)
            others = np.sort(rng.choice(num_others, num_rows, replace=False)).astype(np.int32)
        strata = np.split(plate.add_included_rows(others), [num_included])
        for rows, stratum_size in zip(strata, (num_included, num_others), strict=True):
            for indices, weight in iter_weighted_minibatches(self.plate_groups, {plate.name: rows}):
                yield WeightedMinibatch(indices, stratum_size / plate.size * weight)

    def evaluate_minibatches(
        self,
        positions: np.ndarray,
        indices: Indices,
        position_index: np.ndarray,
        minibatch_index: np.ndarray,
        potential: Potential | None = None,
    ) -> Iterator[PairResults]:
        """Evaluate pairs of a position and a minibatch, some at a time, in their order.

        :param positions: shape ``(k, d)``.
        :param indices: minibatches, shape ``(m, rows)`` for each plate.
        :param position_index: position of each pair.
        :param minibatch_index: minibatch of each pair.
        :param potential: :attr:`step_potential` for minibatches of steps, whose first rows are the
            included ones; by default minibatches are those of a pass over many rows.
        """
        potential = potential or self.potential
        positions = positions.astype(potential.dtype)
        dim = potential.dim
        batch_size = _count_rows_per_minibatch(indices)
        batch_size = batch_size or count_rows_per_gradient(potential, self.arguments)
        pairs_per_call = min(
            max(1, _MAX_GRADIENT_ENTRIES_PER_CALL // dim),
            max(
                _MIN_PAIRS_PER_CALL,
                min(_MAX_ROWS_PER_CALL, _MAX_VALUES_PER_CALL // max(1, self._row_size))
                // batch_size,
            ),
            _MAX_PAIRS_PER_CALL_HIGH_DIM if dim > HIGH_DIM else _MAX_PAIRS_PER_CALL,
        )

        def iter_calls() -> Iterator[tuple[slice, tuple[Any, ...]]]:
            for first in range(0, len(position_index), pairs_per_call):
                num_pairs = min(pairs_per_call, len(position_index) - first)
                # The last call is filled up with the first pair, so that all calls have one shape.
                pairs = np.zeros(pairs_per_call, int)
                pairs[:num_pairs] = np.arange(first, first + num_pairs)
                keys = None
                if potential.is_stochastic:
                    keys = random.split(random.key(self._num_evaluated_pairs), pairs_per_call)
                self._num_evaluated_pairs += num_pairs
                rows = {name: rows[minibatch_index[pairs]] for name, rows in indices.items()}
                at = positions[position_index[pairs]]
                yield slice(first, first + num_pairs), (potential, self.arguments, at, rows, keys)

        for pair_slice, results in _call_ahead(_evaluate_pairs, iter_calls()):
            num_pairs = pair_slice.stop - pair_slice.start
            yield PairResults(pair_slice, *(np.asarray(x, np.float64)[:num_pairs] for x in results))

    def weighted_mean(
        self, positions: np.ndarray, weighted_minibatches: Iterable[WeightedMinibatch]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the weighted mean of the minibatches' potentials and gradients at each position,
        shapes ``(k,)`` and ``(k, d)``.
        """
        num_positions = len(positions)
        mean_values, mean_gradients = np.zeros(num_positions), np.zeros(positions.shape)
        remaining = iter(weighted_minibatches)
        while first := next(remaining, None):
            batch_size = _count_rows_per_minibatch(first.indices) or _MAX_ROWS_PER_CHUNK
            num_minibatches = max(1, _MAX_ROWS_PER_CHUNK // batch_size)
            minibatches = [first, *islice(remaining, num_minibatches - 1)]
            indices = {
                name: np.stack([m.indices[name] for m in minibatches]) for name in first.indices
            }
            pairs = np.arange(len(minibatches) * num_positions)
            minibatch_index, position_index = np.divmod(pairs, num_positions)
            weights = np.array([m.weight for m in minibatches])[minibatch_index]
            for pair_slice, values, gradients in self.evaluate_minibatches(
                positions, indices, position_index, minibatch_index
            ):
                index, weight = position_index[pair_slice], weights[pair_slice]
                _scatter_add(mean_values, index, weight * values)
                _scatter_add(mean_gradients, index, weight[:, None] * gradients)
        return mean_values, mean_gradients

    def evaluate_on_subset(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return potentials and gradients on the representative subset, at each position."""
        return self.weighted_mean(positions, self.subset_minibatches)

    def is_finite(self, position: np.ndarray) -> bool:
        """Return True if potential and gradient are finite."""
        return all(bool(np.isfinite(x).all()) for x in self.evaluate_on_subset(position[None]))

    def estimate_full_gradients(
        self, positions: np.ndarray, preconditioner: Preconditioner, num_rows: int
    ) -> np.ndarray:
        """Estimate full-data gradients on about ``num_rows`` rows per plate, shape ``(k, d)``.

        The control variate is the reference gradient at the center of the preconditioner.
        """
        _, gradients = self.weighted_mean(
            np.concatenate([positions, preconditioner.center[None]]),
            self.iter_subset_minibatches(num_rows),
        )
        return gradients[:-1] + (preconditioner.reference_gradient - gradients[-1])

    def full_gradient(self, position: np.ndarray) -> np.ndarray:
        """Return the gradient on all rows, shape ``(d,)``."""
        if self.arguments.sharded_arrays:
            return JittedPotential(self.potential, self.arguments).gradient(position)
        all_rows = iter_weighted_minibatches(self.plate_groups)
        return self.weighted_mean(position[None], all_rows)[1][0]

    def full_potentials(self, positions: np.ndarray) -> np.ndarray:
        """Return the potential on all rows at each position, shape ``(k,)``."""
        if self.arguments.sharded_arrays:
            potential = JittedPotential(self.potential, self.arguments)
            return np.array([potential.value(position) for position in positions])
        return self.weighted_mean(positions, iter_weighted_minibatches(self.plate_groups))[0]

    def full_hessian(self, position: np.ndarray, **call_limits: int) -> np.ndarray:
        """Return the Hessian on all rows, shape ``(d, d)``; undefined for a randomised likelihood.

        :param call_limits: of :meth:`_iter_product_calls`.
        """
        if self.arguments.sharded_arrays:
            return assemble_hessian(JittedPotential(self.potential, self.arguments), position)
        hessian = np.zeros((position.size, position.size))
        for columns, inputs in self._iter_product_calls(
            position, np.eye(position.size), self.plate_groups, **call_limits
        ):
            products = np.asarray(_sum_gradients_and_products(*inputs)[1], np.float64)
            hessian[columns] += products[columns.start - columns.stop :]
        return (hessian + hessian.T) / 2.0

    def precompile_hessian(self) -> None:
        """Start the compilation of :meth:`full_hessian`."""
        if not self.arguments.sharded_arrays:
            dim = self.potential.dim
            calls = self._iter_product_calls(np.zeros(dim), np.eye(dim), self.plate_groups)
            aot_compile(_sum_gradients_and_products, *next(calls)[1])

    def large_pass_products(
        self, positions: np.ndarray, directions: np.ndarray, directions_per_call: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return gradients on all rows ``(k, d)``, and Hessians times directions ``(k, n, d)``.

        Minibatches are as large as memory allows: each costs some vectors of d numbers per
        direction.

        :param positions: shape ``(k, d)``.
        :param directions_per_call: by default all, in one call.
        """
        if self.arguments.sharded_arrays:
            return self._sharded_pass_products(positions, directions)
        gradients = np.zeros(positions.shape)
        products = np.zeros((len(positions), *directions.shape))
        calls = (
            ((k, rows), inputs)
            for k, position in enumerate(positions)
            for rows, inputs in self._iter_large_pass_calls(
                position, directions, directions_per_call
            )
        )
        for (k, rows), sums in _call_ahead(_sum_gradients_and_products, calls):
            call_gradient, call_products = (np.asarray(x, np.float64) for x in sums)
            if len(directions):
                products[k, rows] += call_products[rows.start - rows.stop :]
            gradients[k] += call_gradient * (rows.start == 0)
        return gradients, products

    def _sharded_pass_products(
        self, positions: np.ndarray, directions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return :meth:`large_pass_products` of rows that are sharded over devices."""
        potential = JittedPotential(self.potential, self.arguments)
        gradients = np.stack([potential.gradient(position) for position in positions])
        products = np.zeros((len(positions), *directions.shape))
        if len(directions):
            for k, position in enumerate(positions):
                products[k] = potential.hessian_products(position, directions)
        return gradients, products

    def large_pass_gradients(self, positions: np.ndarray) -> np.ndarray:
        """Return gradients on all rows, as :meth:`large_pass_products` does."""
        return self.large_pass_products(positions, np.zeros((0, positions.shape[1])))[0]

    def large_pass_second_derivatives(
        self, position: np.ndarray, directions: np.ndarray
    ) -> np.ndarray:
        """Return second derivatives along directions of the gradient of the rows' part, ``(n, d)``.

        Not supported for sharded rows.
        """
        assert not self.arguments.sharded_arrays
        calls, total = self._iter_large_pass_calls(position, directions), np.zeros(directions.shape)
        for _, sums in _call_ahead(_sum_second_derivatives, calls):
            total += np.asarray(sums, np.float64)
        return total

    def prior_products(
        self, position: np.ndarray, directions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradient without the rows' part, and products ``(n, d)`` of its Hessian."""
        cast = (x.astype(self.potential.dtype) for x in (position, directions))
        results = _evaluate_prior_products(self.potential, self.arguments, *cast)
        gradient, products = (np.asarray(x, np.float64) for x in results)
        return gradient, products

    def precompile_large_pass(self, num_directions: int) -> None:
        """Start the compilation of :meth:`large_pass_products`, with and without directions."""
        if self.arguments.sharded_arrays:
            return
        for num in (num_directions, 0):
            position = np.zeros(self.potential.dim)
            calls = self._iter_large_pass_calls(position, np.zeros((num, position.size)))
            aot_compile(_sum_gradients_and_products, *next(calls)[1])

    def _iter_large_pass_calls(
        self, position: np.ndarray, directions: np.ndarray, directions_per_call: int = 0
    ) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        return self._iter_product_calls(
            position,
            directions,
            self._large_pass_plate_groups,
            directions_per_call=directions_per_call or len(directions),
        )

    @cached_property
    def _large_pass_plate_groups(self) -> list[list[Plate]]:
        max_num_rows = _MAX_LARGE_PASS_VALUES // (self._row_size + _LARGE_PASS_VALUES_PER_ROW)
        num_rows = min(max(_MIN_LARGE_PASS_ROWS, self.potential.dim), max_num_rows)

        def enlarge(plate: Plate) -> Plate:
            # Of equal size, so that few rows fill up the last minibatch.
            num_minibatches = -(-plate.size // max(plate.subsample_size, num_rows))
            return plate._replace(subsample_size=-(-plate.size // num_minibatches))

        return [[enlarge(p) for p in group] for group in self.plate_groups]

    def _iter_product_calls(
        self,
        position: np.ndarray,
        directions: np.ndarray,
        plate_groups: Sequence[Sequence[Plate]],
        max_row_directions: int = _MAX_HESSIAN_ROW_DIRECTIONS,
        max_minibatches_per_call: int = _MAX_HESSIAN_MINIBATCHES_PER_CALL,
        directions_per_call: int | None = None,
    ) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        """Iterate over slices of directions and arguments of :func:`_sum_gradients_and_products`.

        :param plate_groups: plates with the batch size of the pass.
        :param max_row_directions: rows of a minibatch times directions of a call, at most.
        :param directions_per_call: directions of a call, in place of that bound.
        """
        potential, num_directions = self.potential, len(directions)
        batch_size = sum(p.subsample_size for group in plate_groups for p in group)
        batch_size = batch_size or count_rows_per_gradient(potential, self.arguments)
        per_call = directions_per_call or max(1, max_row_directions // batch_size)
        per_call = min(per_call, num_directions)
        directions = directions.astype(potential.dtype)
        minibatches = iter_weighted_minibatches(plate_groups)
        chunk = list(islice(minibatches, max_minibatches_per_call))
        num_minibatches = len(chunk)
        while chunk:
            # All calls have one shape: missing minibatches get weight zero, and the last
            # directions overlap with those before.
            chunk += [chunk[0]._replace(weight=0.0)] * (num_minibatches - len(chunk))
            indices = {
                p.name: np.stack([m.indices[p.name] for m in chunk]) for p in potential.plates
            }
            weights = np.array([m.weight for m in chunk], potential.dtype)
            common = potential, self.arguments, position.astype(potential.dtype), indices, weights
            for start in range(0, max(num_directions, 1), max(per_call, 1)):
                stop = min(start + per_call, num_directions)
                yield slice(start, stop), (*common, directions[stop - per_call : stop])
            chunk = list(islice(minibatches, num_minibatches))


@dataclass(frozen=True)
class BulkPositions:
    """Positions in the bulk of the posterior, at which gradients are taken.

    - **preconditioner** - coordinates, with the reference gradient at their center.
    - **q** - the positions in these coordinates, shape ``(n, d)``.
    - **coupling** - coordinates along which the curvature in other directions changes.
    """

    batched_gradients: BatchedGradients
    preconditioner: Preconditioner
    q: np.ndarray
    coupling: Coupling = NO_COUPLING


def _with_min_batch_size(plate: Plate) -> Plate:
    """Return the plate with the batch size of a pass over many rows."""
    if plate.shards is not None:
        return plate
    batch_size = min(max(plate.subsample_size, _MIN_PASS_BATCH_SIZE), plate.size)
    return plate._replace(subsample_size=batch_size)


def _scatter_add(totals: np.ndarray, index: np.ndarray, terms: np.ndarray) -> None:
    """Add each term to the total of its index, in place."""
    if terms[0].size > HIGH_DIM:  # where `np.add.at` takes as long as a gradient
        for k, term in zip(index, terms, strict=True):
            totals[k] += term
    else:
        with np.errstate(invalid="ignore"):  # infinite terms have weights of either sign
            np.add.at(totals, index, terms)


def _count_rows_per_minibatch(indices: Indices) -> int:
    """Return the rows of a minibatch, summed over plates."""
    return sum(np.shape(rows)[-1] for rows in indices.values())
