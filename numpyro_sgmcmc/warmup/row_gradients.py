"""Gradients on minibatches at many positions at once: the one program from which the warm-up makes
all that it must know of the potential.

What is linear in the minibatch potential is on all rows a weighted mean of its values on
minibatches (:func:`minibatches_of`), so that passes over all rows, gradients at some draws, the
gradient's noise and its curvature are all sums of what this program returns, made by NumPy in
float64. It is compiled once for a model, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, product, tee
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.posterior.target import Decisive, Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential, draw_subset
from numpyro_sgmcmc.warmup.effort import MANY_DIM, Effort, rows_a_gradient
from numpyro_sgmcmc.warmup.factors import hessian_by_products

__all__ = ["RowGradients", "WeightedRows", "minibatches_of"]

_SLOT_NUMBERS = 2**22  # in all slots' gradients together, at most
_SLOT_ROWS = 2**14  # in all slots' minibatches together, at most
_MOST_SLOTS = 128
_FEWEST_ROWS = 64  # of a minibatch in a pass over many rows: with fewer, Python takes the time
_TANGENT_ROWS = 2**20  # rows times directions at which products with the Hessian are taken at once
_MINIBATCHES_A_CALL = 32  # whose Hessians are added up in the model's type; the rest is in float64


class WeightedRows(NamedTuple):
    """A minibatch and its weight.

    - **rows** - indices by plate, as many as the plate's ``subsample_size``.
    - **weight** - its share in the mean.
    """

    rows: Indices
    weight: float


def minibatches_of(
    groups: Sequence[Sequence[Plate]], rows: Indices | None = None
) -> Iterator[WeightedRows]:
    """Minibatches whose weighted mean is the mean over all rows, exactly.

    A minibatch potential is the prior plus (rows / chosen rows) times the likelihood of the chosen
    ones. Where the rows are no multiple of a minibatch, the last one is filled up with copies of
    the first row, and a minibatch of that row alone takes these away again; the weights sum to one,
    so that the prior counts once.

    :param groups: the subsampled plates, those that meet at a site together.
    :param rows: rows that stand for all rows, by plate; all rows where None.
    """
    if not groups:
        yield WeightedRows({}, 1.0)
        return
    first = {p.name: _first(p, rows) for group in groups for p in group}
    for group in groups:
        for some in product(*(list(_of_plate(p, rows)) for p in group)):
            chosen = {p.name: w.rows[p.name] for p, w in zip(group, some, strict=True)}
            weight = float(np.prod([w.weight for w in some]))
            yield WeightedRows({**first, **chosen}, weight)
    if len(groups) > 1:
        # Each group is summed with the others held at their first rows.
        yield WeightedRows(first, 1.0 - len(groups))


def _first(plate: Plate, rows: Indices | None) -> np.ndarray:
    return np.asarray(next(iter(_of_plate(plate, rows))).rows[plate.name])


def _of_plate(plate: Plate, rows: Indices | None) -> Iterator[WeightedRows]:
    if plate.shards is not None:
        yield from _of_shards(plate, rows)
        return
    batch = plate.subsample_size
    size = plate.size if rows is None else len(rows[plate.name])

    def take(start: int, stop: int) -> np.ndarray:
        found = np.arange(start, stop, dtype=np.int32)
        return found if rows is None else np.asarray(rows[plate.name])[found]

    whole, rest = divmod(size, batch)
    for k in range(whole):
        yield WeightedRows({plate.name: take(k * batch, (k + 1) * batch)}, batch / size)
    if rest:
        copies = np.repeat(take(0, 1), batch)
        last = np.concatenate([take(whole * batch, size), copies[rest:]])
        yield WeightedRows({plate.name: last}, batch / size)
        yield WeightedRows({plate.name: copies}, -(batch - rest) / size)


def _of_shards(plate: Plate, rows: Indices | None) -> Iterator[WeightedRows]:
    """Minibatches that have their part of each shard; the rest that fills none is left out."""
    assert rows is not None
    of_shards = np.reshape(rows[plate.name], (len(plate.strata[0]), -1))
    num = max(1, of_shards.shape[1] // plate.part)
    for k in range(num):
        part = np.arange(k * plate.part, (k + 1) * plate.part) % of_shards.shape[1]
        yield WeightedRows({plate.name: of_shards[:, part].reshape(-1)}, 1.0 / num)


def _in_passes(plate: Plate) -> Plate:
    """With minibatches that are not too small."""
    if plate.shards is not None:
        return plate
    size = min(max(plate.subsample_size, _FEWEST_ROWS), plate.size)
    return plate._replace(subsample_size=size)


@partial(jax.jit, static_argnames="target")
def _at_slots(
    target: Target, arguments: Arguments, positions: Array, rows: Indices, keys: Array | None
) -> tuple[Array, Array]:
    """Potential and gradient of each slot's minibatch at its position."""

    def one(position: Array, rows: Indices, key: Array | None) -> tuple[Array, Array]:
        return target.potential_and_gradient(position, rows, arguments, key)

    return jax.vmap(one)(positions, rows, keys)


@partial(jax.jit, static_argnames="target")
def _hessian_products(
    target: Target,
    arguments: Arguments,
    position: Array,
    rows: Indices,
    weights: Array,
    directions: Array,
) -> Array:
    """Weighted sum of minibatches' Hessians, times each direction."""

    def add(total: Array, xs: tuple[Indices, Array]) -> tuple[Array, None]:
        rows, weight = xs

        def product(direction: Array) -> Array:
            def gradient(q: Array) -> Array:
                return target.gradient(q, rows, arguments)

            return jax.jvp(gradient, (position,), (direction,))[1]

        return total + weight * jax.vmap(product)(directions), None

    return lax.scan(add, jnp.zeros_like(directions), (rows, weights))[0]


class RowGradients:
    """Potentials and gradients on minibatches, called from Python.

    :param target: the posterior.
    :param arguments: the model's arguments, concrete.
    :param rows: rows of a plate that stand for all, about.
    :param decisive: rows that are in every minibatch of a step, and always among those that stand
        for all.
    """

    def __init__(
        self,
        target: Target,
        arguments: Arguments,
        rows: int = Effort.rows,
        decisive: Decisive = (),
    ) -> None:
        self.target, self.decisive = target, decisive
        self.arguments = arguments.map_arrays(jnp.asarray)  # on the device once
        self.groups = [[_in_passes(p) for p in g] if len(g) == 1 else g for g in target.groups]
        """The plates, with the rows of a minibatch in a pass over many."""
        self.some = list(self.standing_for_all(rows))
        """Minibatches of rows that stand for all."""
        self._asked = 0  # so that each slot of a randomised likelihood gets a key of its own

    def standing_for_all(self, rows: int) -> Iterator[WeightedRows]:
        """Minibatches of about so many rows whose weighted mean stands for that over all."""
        if not self.decisive:
            yield from minibatches_of(self.groups, draw_subset(self.target, 0, rows))
            return
        (plate,) = self.step_target.plates
        num, places = len(plate.decisive), np.arange(plate.drawn.size, dtype=np.int32)
        if rows < len(places):
            rng = np.random.default_rng(0)
            places = np.sort(rng.choice(len(places), rows, replace=False)).astype(np.int32)
        decisive, others = np.split(plate.with_decisive(places), [num])
        for part, of_part in ((decisive, num), (others, plate.drawn.size)):
            for some in minibatches_of(self.groups, {plate.name: part}):
                yield WeightedRows(some.rows, of_part / plate.size * some.weight)

    def of_steps(
        self, pairs: Iterable[tuple[np.ndarray, Indices]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """:meth:`each` for minibatches such as steps have, the decisive rows first."""
        return self._each(self.step_target, pairs)

    @property
    def step_target(self) -> Target:
        """The posterior as steps see it."""
        return self.target.with_decisive(self.decisive)

    def each(
        self, pairs: Iterable[tuple[np.ndarray, Indices]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Potential and gradient of each pair of a position and a minibatch, in their order.

        :param pairs: with as many rows each.
        """
        return self._each(self.target, pairs)

    def _each(
        self, target: Target, pairs: Iterable[tuple[np.ndarray, Indices]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        left = iter(pairs)
        if (first := next(left, None)) is None:
            return
        left, size = chain([first], left), self._slots(first[1])
        while some := list(islice(left, size)):
            filled = some + [some[0]] * (size - len(some))
            positions = np.stack([q for q, _ in filled]).astype(target.dtype)
            rows = {p.name: np.stack([r[p.name] for _, r in filled]) for p in target.plates}
            keys = None
            if target.is_randomized:
                keys = random.split(random.key(self._asked), size)
            self._asked += len(some)
            values, gradients = _at_slots(target, self.arguments, positions, rows, keys)
            values, gradients = np.asarray(values, np.float64), np.asarray(gradients, np.float64)
            yield from zip(values[: len(some)], gradients[: len(some)], strict=True)

    def _slots(self, minibatch: Indices) -> int:
        """How many pairs of a position and such a minibatch a call takes."""
        rows = sum(map(len, minibatch.values())) or rows_a_gradient(self.target, self.arguments)
        fitting = min(_SLOT_NUMBERS // self.target.dim, _SLOT_ROWS // rows)
        if self.target.dim > MANY_DIM:
            fitting = 1  # XLA multiplies many matrices at once several times as slowly
        return int(np.clip(fitting, 1, _MOST_SLOTS))

    def on_some(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Potentials and gradients on rows that stand for all, at each position."""
        return self.mean(positions, self.some)

    def is_finite(self, position: np.ndarray) -> bool:
        """Whether potential and gradient are finite."""
        return all(bool(np.isfinite(x).all()) for x in self.on_some(position[None]))

    def everywhere(self, position: np.ndarray) -> np.ndarray:
        """The gradient on all rows, shape ``(d,)``."""
        if self.arguments.sharded:
            return EagerPotential(self.target, self.arguments).gradient(position)
        return self.mean(position[None], minibatches_of(self.groups))[1][0]

    def hessian(self, position: np.ndarray) -> np.ndarray:
        """The Hessian on all rows, shape ``(d, d)``; a randomised likelihood has none here."""
        target = self.target
        if self.arguments.sharded:
            return hessian_by_products(EagerPotential(target, self.arguments), position)
        batch = sum(p.subsample_size for group in self.groups for p in group) or rows_a_gradient(
            target, self.arguments
        )
        together = int(np.clip(_TANGENT_ROWS // batch, 1, target.dim))
        at, columns = position.astype(target.dtype), np.eye(target.dim, dtype=target.dtype)
        hessian = np.zeros((target.dim, target.dim))
        minibatches = minibatches_of(self.groups)
        size = None
        while some := list(islice(minibatches, size or _MINIBATCHES_A_CALL)):
            size = size or len(some)
            filled = some + [WeightedRows(some[0].rows, 0.0)] * (size - len(some))
            rows = {p.name: np.stack([m.rows[p.name] for m in filled]) for p in target.plates}
            weights = np.array([m.weight for m in filled], target.dtype)
            for first in range(0, target.dim, together):
                last = min(first + together, target.dim)
                directions = columns[last - together : last]  # as many each time: one program
                found = _hessian_products(target, self.arguments, at, rows, weights, directions)
                hessian[first:last] += np.asarray(found, np.float64)[first - last :]
        return (hessian + hessian.T) / 2.0

    def on_all(self, positions: np.ndarray, whitening: Whitening, rows: int) -> np.ndarray:
        """Gradients on all rows, from those on some and the exact one at the anchor.

        :param rows: rows of a plate on which to take them, about.
        """
        some = self.standing_for_all(rows)
        _, found = self.mean(np.concatenate([positions, whitening.anchor[None]]), some)
        return found[:-1] + (whitening.gradient - found[-1])

    def mean(
        self, positions: np.ndarray, minibatches: Iterable[WeightedRows]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weighted mean of the minibatches' potentials and gradients at each position.

        :param positions: shape ``(k, d)``.
        :return: shapes ``(k,)`` and ``(k, d)``.
        """
        values, gradients = np.zeros(len(positions)), np.zeros(positions.shape)
        asked, weights = tee((k, m) for m in minibatches for k in range(len(positions)))
        found = self.each((positions[k], m.rows) for k, m in asked)
        for (k, m), (u, g) in zip(weights, found, strict=True):
            values[k] += m.weight * u
            gradients[k] += m.weight * g
        return values, gradients
