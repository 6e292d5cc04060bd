"""Gradients on minibatches at many positions at once: the one program from which the warm-up makes
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

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.posterior.target import Decisive, Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.ahead import compile_ahead
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential, draw_subset
from numpyro_sgmcmc.warmup.effort import MANY_DIM, Effort, rows_a_gradient
from numpyro_sgmcmc.warmup.factors import hessian_by_products

__all__ = ["RowGradients", "WeightedRows", "minibatches_of"]

_SLOT_NUMBERS = 2**22  # in all slots' gradients together, at most
_SLOT_ROWS = 2**14  # in all slots' minibatches together, at most
_MOST_SLOTS = 128
_SLOTS_OF_MANY = 4  # of very many coordinates: with more, XLA multiplies matrices more slowly
_ROWS_TOGETHER = 2**20  # of minibatches whose slots are filled at once
_ROWS_MADE = 2**16  # numbers of rows that Python makes at once
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


class AtPairs(NamedTuple):
    """What some of many pairs of a position and a minibatch come to.

    - **part** - which pairs.
    - **values** - potentials, shape ``(n,)``.
    - **gradients** - shape ``(n, d)``.
    """

    part: slice
    values: np.ndarray
    gradients: np.ndarray


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
        for some in _together(group, rows):
            yield WeightedRows({**first, **some.rows}, some.weight)
    if len(groups) > 1:
        # Each group is summed with the others held at their first rows.
        yield WeightedRows(first, 1.0 - len(groups))


def _together(group: Sequence[Plate], rows: Indices | None) -> Iterator[WeightedRows]:
    """Minibatches of plates that meet at a site, each with each; of one alone as they come, since
    all of them have as many numbers as there are rows.
    """
    if len(group) == 1:
        yield from _of_plate(group[0], rows)
        return
    for several in product(*(list(_of_plate(p, rows)) for p in group)):
        chosen = {p.name: some.rows[p.name] for p, some in zip(group, several, strict=True)}
        yield WeightedRows(chosen, math.prod(some.weight for some in several))


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
    weight, many = batch / size, max(1, _ROWS_MADE // batch)
    for k in range(0, whole, many):
        for some in take(k * batch, min(k + many, whole) * batch).reshape(-1, batch):
            yield WeightedRows({plate.name: some}, weight)
    if rest:
        copies = np.repeat(take(0, 1), batch)
        last = np.concatenate([take(whole * batch, size), copies[rest:]])
        yield WeightedRows({plate.name: last}, weight)
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
        self, positions: np.ndarray, rows: Indices, at: np.ndarray, of: np.ndarray
    ) -> Iterator[AtPairs]:
        """Potentials and gradients of pairs of a position and a minibatch such as steps have.

        :param positions: shape ``(k, d)``.
        :param rows: minibatches, shape ``(m, rows)`` for each plate, the decisive rows first.
        :param at: each pair's position.
        :param of: each pair's minibatch.
        :return: some pairs at a time, in their order.
        """
        return self._at(self.step_target, positions, rows, at, of)

    def of_passes(
        self, positions: np.ndarray, rows: Indices, at: np.ndarray, of: np.ndarray
    ) -> Iterator[AtPairs]:
        """The same of minibatches as large as those of passes over all rows (``groups``)."""
        return self._at(self.target, positions, rows, at, of)

    @property
    def step_target(self) -> Target:
        """The posterior as steps see it."""
        return self.target.with_decisive(self.decisive)

    def _at(
        self, target: Target, positions: np.ndarray, rows: Indices, at: np.ndarray, of: np.ndarray
    ) -> Iterator[AtPairs]:
        positions, size = positions.astype(target.dtype), self._slots(rows)
        for first in range(0, len(at), size):
            some = slice(first, first + size)
            # A call's last slots may be left over: they repeat the first pair.
            filled_at, filled_of = np.full(size, at[0]), np.full(size, of[0])
            num = len(at[some])
            filled_at[:num], filled_of[:num] = at[some], of[some]
            keys = None
            if target.is_randomized:
                keys = random.split(random.key(self._asked), size)
            self._asked += num
            minibatches = {name: r[filled_of] for name, r in rows.items()}
            values, gradients = _at_slots(
                target, self.arguments, positions[filled_at], minibatches, keys
            )
            values, gradients = np.asarray(values, np.float64), np.asarray(gradients, np.float64)
            yield AtPairs(some, values[:num], gradients[:num])

    def _slots(self, rows: Indices) -> int:
        """How many pairs of a position and such a minibatch a call takes."""
        batch = _rows_each(rows) or rows_a_gradient(self.target, self.arguments)
        fitting = min(_SLOT_NUMBERS // self.target.dim, _SLOT_ROWS // batch)
        if self.target.dim > MANY_DIM:
            fitting = min(fitting, _SLOTS_OF_MANY)
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

    def potentials(self, positions: np.ndarray) -> np.ndarray:
        """The potential on all rows at each position, shape ``(k,)``."""
        if self.arguments.sharded:
            potential = EagerPotential(self.target, self.arguments)
            return np.array([potential.value(position) for position in positions])
        return self.mean(positions, minibatches_of(self.groups))[0]

    def hessian(self, position: np.ndarray) -> np.ndarray:
        """The Hessian on all rows, shape ``(d, d)``; a randomised likelihood has none here."""
        target = self.target
        if self.arguments.sharded:
            return hessian_by_products(EagerPotential(target, self.arguments), position)
        together, size = self._hessian_call()
        at, columns = position.astype(target.dtype), np.eye(target.dim, dtype=target.dtype)
        hessian = np.zeros((target.dim, target.dim))
        minibatches = minibatches_of(self.groups)
        while some := list(islice(minibatches, size)):
            filled = some + [WeightedRows(some[0].rows, 0.0)] * (size - len(some))
            rows = {p.name: np.stack([m.rows[p.name] for m in filled]) for p in target.plates}
            weights = np.array([m.weight for m in filled], target.dtype)
            for first in range(0, target.dim, together):
                last = min(first + together, target.dim)
                directions = columns[last - together : last]  # as many each time: one program
                found = _hessian_products(target, self.arguments, at, rows, weights, directions)
                hessian[first:last] += np.asarray(found, np.float64)[first - last :]
        return (hessian + hessian.T) / 2.0

    def prepare_hessian(self) -> None:
        """Begin to compile :meth:`hessian`."""
        target = self.target
        if self.arguments.sharded:
            return
        together, size = self._hessian_call()

        def some(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, target.dtype)

        first = next(minibatches_of(self.groups)).rows
        rows = {
            p.name: jax.ShapeDtypeStruct((size, *first[p.name].shape), first[p.name].dtype)
            for p in target.plates
        }
        compile_ahead(
            _hessian_products,
            target,
            self.arguments,
            some(target.dim),
            rows,
            some(size),
            some(together, target.dim),
        )

    def _hessian_call(self) -> tuple[int, int]:
        """How many directions and how many minibatches a call takes."""
        batch = sum(p.subsample_size for group in self.groups for p in group) or rows_a_gradient(
            self.target, self.arguments
        )
        together = int(np.clip(_TANGENT_ROWS // batch, 1, self.target.dim))
        return together, sum(1 for _ in islice(minibatches_of(self.groups), _MINIBATCHES_A_CALL))

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
        num, left = len(positions), iter(minibatches)
        values, gradients = np.zeros(num), np.zeros(positions.shape)
        while first := next(left, None):
            together = max(1, _ROWS_TOGETHER // (_rows_each(first.rows) or _ROWS_TOGETHER))
            some = [first, *islice(left, together - 1)]
            rows = {name: np.stack([m.rows[name] for m in some]) for name in first.rows}
            of, at = np.divmod(np.arange(len(some) * num), num)
            weights = np.array([m.weight for m in some])[of]
            for part, u, g in self._at(self.target, positions, rows, at, of):
                _add_at(values, at[part], weights[part] * u)
                _add_at(gradients, at[part], weights[part, None] * g)
        return values, gradients


def _add_at(totals: np.ndarray, at: np.ndarray, terms: np.ndarray) -> None:
    """Add each term to the total at its place."""
    if terms[0].size > MANY_DIM:  # where ``np.add.at`` takes as long as a gradient
        for place, term in zip(at, terms, strict=True):
            totals[place] += term
    else:
        np.add.at(totals, at, terms)


def _rows_each(rows: Indices) -> int:
    """Rows of a minibatch, those of all plates together."""
    return sum(np.shape(r)[-1] for r in rows.values())
