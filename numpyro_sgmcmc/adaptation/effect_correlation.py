r"""Correlation of the effects of several groupings, as users and items, given shared parameters.

With the blocks D of groups, :math:`FF^\top = D^{-1}`, and the blocks K of pairs of groups, the
covariance of all effects is

.. math:: (D + K)^{-1} = F (I + \tilde K)^{-1} F^\top, \quad \tilde K = F^\top K F.

:func:`sum_row_couplings` computes K from products with each row's Hessian. One vector with ones in
all groups gives an entry of a row's block, whatever its groups are, and vectors with the digits of
the groups' numbers give these digits times the entry.

:class:`EffectCorrelation` solves with :math:`I + \tilde K` by conjugate gradients. Its extreme
eigenvalues belong to directions in which groupings are nearly confounded, such as the means of
crossed effects; the preconditioner scales these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, cg, eigsh

from numpyro_sgmcmc.adaptation.effect_factors import factorize_inverse_blocks
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, GroupNesting, GroupPairs
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from numpyro_sgmcmc.model.potential import Potential

_ROWS_PER_CALL = 2**16  # a bound on memory
# Distinct pairs of rows that were read, beyond which they are summed: a bound on memory.
_MIN_MERGED_PAIRS = 2**21
_MAX_PAIR_VALUES = 2**24  # numbers of all blocks of pairs: 64 MB, which each step reads
# Base of the digits: float32 has them with errors of 1e-3. Larger errors are rounding of a block
# of zeros.
_DIGIT_BASE, _MAX_DIGIT_ERROR = 1_024, 0.1
# Conjugate gradients: relative residual and iterations.
_CG_TOLERANCE, _MAX_CG_ITERATIONS = 1e-6, 300
# Eigenvalues of I + K that are computed, their relative error, and the ratio to 1 from which a
# direction is scaled; a floor for those that rounding makes negative.
_NUM_EIGENVALUES, _EIGENVALUE_TOLERANCE, _MIN_EIGENVALUE_RATIO = 16, 0.02, 1.5
_MIN_EIGENVALUE = 1e-5


def sum_row_couplings(
    potential: Potential, arguments: Arguments, layout: BlockArrowLayout, position: np.ndarray
) -> GroupPairs | None:
    """Return the Hessian's blocks of pairs of groups on all rows; None where these are too many."""
    potential = potential.without_shards()
    (plate,) = potential.plates
    num_rows, k = min(_ROWS_PER_CALL, plate.size), layout.effects_per_group
    cast_position = jnp.asarray(position, potential.dtype)
    probes = [_PairProbes.create(layout, *pair) for pair in combinations(layout.groupings, 2)]
    left, right = (np.concatenate([p.vectors[j] for p in probes]) for j in range(2))
    vectors = left.astype(potential.dtype), right.astype(potential.dtype)
    splits = np.cumsum([len(p.vectors[0]) for p in probes])[:-1]
    total, pending = (np.zeros(0, np.int64), np.zeros((k * k, 0))), []
    for start in range(0, plate.size, num_rows):
        # The last rows are repeated, so that all calls have one shape.
        rows = np.minimum(np.arange(start, start + num_rows), plate.size - 1).astype(np.int32)
        forms = _evaluate_row_forms(potential, arguments, cast_position, rows, *vectors)
        forms = np.asarray(forms, np.float64)[:, : plate.size - start]
        pending += [p.read(x, layout) for p, x in zip(probes, np.split(forms, splits), strict=True)]
        is_last = start + num_rows >= plate.size
        num_pending = sum(len(keys) for keys, _ in pending)
        if is_last or num_pending > max(_MIN_MERGED_PAIRS, len(total[0])):
            total, pending = _sum_by_key([total, *pending]), []
            if total[1].size > _MAX_PAIR_VALUES:
                return None
    first, second = np.divmod(total[0], layout.num_groups)
    values = total[1].reshape(k, k, -1).astype(potential.dtype)
    return GroupPairs.create(first, second, values, layout.num_groups)


@dataclass(frozen=True)
class _PairProbes:
    """Vectors whose products with a row's Hessian give its groups in two groupings, and its block.

    - **vectors** - left and right vectors of the products, each of shape ``(5 + k1 k2, d)``: with
      digits of the groups' numbers on neither side, the left and the right, and for each entry of
      the block.
    - **sizes** - numbers of effects ``(k1, k2)``.
    - **columns** - columns of the groups of both groupings.
    """

    vectors: tuple[np.ndarray, np.ndarray]
    sizes: tuple[int, int]
    columns: tuple[slice, slice]

    @classmethod
    def create(
        cls, layout: BlockArrowLayout, first: tuple[slice, int], second: tuple[slice, int]
    ) -> _PairProbes:
        rng, sides = np.random.default_rng(0), []
        for columns, size in (first, second):
            groups = np.arange(columns.stop - columns.start)
            # Random weights of the effects: the entries of no row's block cancel.
            weights = rng.uniform(0.5, 1.5, (size, 1))
            rows = np.zeros((3 + size, layout.effects_per_group, layout.num_groups))
            digits = (np.ones(groups.size), groups // _DIGIT_BASE, groups % _DIGIT_BASE)
            for row, values in enumerate(digits):
                rows[row, :size, columns] = weights * values
            rows[3 + np.arange(size), np.arange(size), columns] = 1.0
            sides.append(layout.merge(rows, np.zeros((3 + size, layout.num_shared))))
        (_, k1), (_, k2) = first, second
        left = [0, 1, 2, 0, 0, *(3 + np.repeat(np.arange(k1), k2))]
        right = [0, 0, 0, 1, 2, *(3 + np.tile(np.arange(k2), k1))]
        return cls((sides[0][left], sides[1][right]), (k1, k2), (first[0], second[0]))

    def read(self, forms: np.ndarray, layout: BlockArrowLayout) -> tuple[np.ndarray, np.ndarray]:
        """Return a key of each pair of groups ``(n,)``, and its block ``(k * k, n)``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = forms[1:5] / forms[0]
        digits = np.rint(ratios)
        groups = _DIGIT_BASE * digits[::2] + digits[1::2]
        starts, stops = np.array([[c.start, c.stop] for c in self.columns]).T[..., None]
        # Rows without effect have no digits.
        is_valid = (np.abs(ratios - digits) < _MAX_DIGIT_ERROR).all(0)
        is_valid &= ((groups >= 0) & (groups < stops - starts)).all(0)
        first, second = starts + groups[:, is_valid].astype(np.int64)
        k, blocks = layout.effects_per_group, forms[5:, is_valid].reshape(*self.sizes, -1)
        blocks = np.pad(blocks, ((0, k - self.sizes[0]), (0, k - self.sizes[1]), (0, 0)))
        return _sum_by_key([(first * layout.num_groups + second, blocks.reshape(k * k, -1))])


def _sum_by_key(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct keys ``(n,)``, and the sums of the values ``(m, n)`` of each."""
    keys, inverse = np.unique(np.concatenate([k for k, _ in parts]), return_inverse=True)
    values = np.concatenate([v for _, v in parts], 1)
    return keys, np.stack([np.bincount(inverse, v, len(keys)) for v in values])


@partial(jax.jit, static_argnames="potential")
def _evaluate_row_forms(
    potential: Potential,
    arguments: Arguments,
    position: Array,
    rows: Array,
    left: Array,
    right: Array,
) -> Array:
    """Return each row's Hessian times left and right vectors, shape ``(n, rows)``."""
    (plate,) = potential.plates

    def row_potentials(q: Array) -> Array:
        """Return the rows' terms: derivatives of the sum by their weights."""

        def evaluate(weights: Array) -> Array:
            indices = {plate.name: rows}
            return potential.minibatch_potential(
                potential.unravel(q), indices, arguments, None, {plate.name: weights}
            )

        terms = jax.grad(evaluate)(jnp.ones(rows.shape, potential.dtype))
        return terms * (rows.size / plate.size)

    def form(v: Array, w: Array) -> Array:
        def derivative(q: Array) -> Array:
            return jax.jvp(row_potentials, (q,), (v,))[1]

        return jax.jvp(derivative, (position,), (w,))[1]

    return jax.vmap(form)(left, right)


def find_nesting(
    layout: BlockArrowLayout, pairs: GroupPairs, factors: np.ndarray, blocks: np.ndarray
) -> tuple[GroupNesting, np.ndarray, GroupPairs]:
    """Find groups that belong to one group of a coarser grouping, and eliminate them.

    :return: their dependence on it, factors of the covariances given the parents and without the
        children, and the other pairs.
    """
    is_pair = pairs.values.any((0, 1))
    targets, sources = (
        np.broadcast_to(pairs.targets, is_pair.shape)[is_pair],
        pairs.sources[is_pair],
    )
    sizes = np.array([part.stop - part.start for part, _ in layout.groupings])
    grouping, num_groups = np.repeat(np.arange(len(sizes)), sizes), layout.num_groups
    parents, values = np.arange(num_groups, dtype=np.int32), np.zeros_like(blocks)
    known_parents: set[int] = set()
    for child, parent in combinations(np.argsort(-sizes, kind="stable"), 2):
        is_child = (grouping[targets] == child) & (grouping[sources] == parent)
        children = targets[is_child]
        has_parent = (parents[grouping == child] != np.flatnonzero(grouping == child)).any()
        if child in known_parents or has_parent or np.bincount(children).max(initial=0) != 1:
            continue
        parents[children] = sources[is_child]
        values[..., children] = pairs.values[:, :, is_pair][..., is_child]
        known_parents.add(parent)
    coupling = np.einsum("abg,cbg,cdg->adg", factors, factors, values)
    schur, terms = blocks.copy(), np.einsum("cag,cbg->abg", values, coupling)
    for index in np.ndindex(blocks.shape[:2]):
        schur[index] -= np.bincount(parents, terms[index], num_groups)
    is_parent = np.isin(grouping, list(known_parents))
    factors = np.where(is_parent, factorize_inverse_blocks(schur), factors)
    is_nested = parents[pairs.targets] == pairs.sources
    is_nested |= parents[pairs.sources] == pairs.targets
    others = replace(
        pairs, values=np.where(is_nested, 0.0, pairs.values).astype(pairs.values.dtype)
    )
    return GroupNesting(parents, coupling), factors, others


@dataclass(frozen=True)
class EffectCorrelation:
    """The matrix I + K of scaled effects, flat with k G entries."""

    coupling: Any  # K, a sparse matrix

    @classmethod
    def create(cls, pairs: GroupPairs | None, factors: np.ndarray) -> EffectCorrelation | None:
        """Scale the blocks of pairs by factors F of the effects' covariances, ``(k, k, G)``."""
        if pairs is None:
            return None
        factors = factors.astype(pairs.values.dtype)
        targets = np.einsum("abl,acwl->bcwl", factors[..., pairs.targets], pairs.values)
        values = np.einsum("bcwl,cdwl->bdwl", targets, factors[..., pairs.sources])
        return cls(replace(pairs, values=values).to_sparse(factors.shape[-1]))

    @property
    def _operator(self) -> Any:
        shape = self.coupling.shape
        return LinearOperator(shape, matvec=lambda v: v + self.coupling @ v, dtype=float)

    def solve(self, v: np.ndarray) -> np.ndarray:
        """Return the inverse times each of some arrays of effects, shape ``(n, k, G)``."""
        solutions = [
            cg(self._operator, x.ravel(), rtol=_CG_TOLERANCE, maxiter=_MAX_CG_ITERATIONS)[0]
            for x in v
        ]
        return np.stack(solutions).reshape(v.shape) if len(v) else v

    def fit_low_rank(self) -> LowRankFactor | None:
        """Return a factor of the inverse along the extreme eigenvectors."""
        if not self.coupling.data.any():
            return None
        v0 = np.random.default_rng(0).standard_normal(self.coupling.shape[0])
        try:
            eigenvalues, vectors = eigsh(
                self._operator, _NUM_EIGENVALUES, which="BE", tol=_EIGENVALUE_TOLERANCE, v0=v0
            )
        except ArpackNoConvergence as error:
            eigenvalues, vectors = error.eigenvalues, error.eigenvectors
        eigenvalues = np.maximum(eigenvalues, _MIN_EIGENVALUE)
        is_kept = np.abs(np.log(eigenvalues)) > np.log(_MIN_EIGENVALUE_RATIO)
        if not is_kept.any():
            return None
        return LowRankFactor(vectors[:, is_kept], 1.0 / np.sqrt(eigenvalues[is_kept]))
