r"""Block-arrow matrices: the Hessian of a hierarchical model, and a factor of its inverse.

In a model with effects of many groups, each row depends on the effects of one group. With k effects
:math:`e_g` of each of G groups and s shared parameters :math:`\psi`, the Hessian of the potential
has a block :math:`D_g` (k, k) for each group, a strip :math:`B_g` (k, s) that couples the group
with the shared parameters, and a corner C (s, s); all else is zero. It takes
:math:`O(Gk(k + s))` numbers, and k + s products with vectors determine it: one vector has an entry
of one in the same effect of every group (:meth:`BlockArrowLayout.make_probes`).

Of several groupings (users and items), each row depends on the effects of one group of each. The
groups of all groupings are then the groups of the matrix, which also has a block (k, k) for each
pair of groups that have rows in common (:class:`GroupPairs`). Groups with fewer than k effects have
further ones that nothing depends on.

:class:`BlockArrowMatrix` is such a matrix, :class:`BlockArrowFactor` a factor L of its inverse:

.. math:: S = C - \sum_g B_g^\top D_g^{-1} B_g, \quad
   \delta_\psi = S^{-1/2} q_\psi, \quad
   \delta_{e_g} = D_g^{-1/2} q_{e_g} - D_g^{-1} B_g \delta_\psi

:func:`find_block_arrow_layout` finds the effects of a model from the gradients of single rows.

Arrays have the groups as their last axis, and vectors may have leading axes. All functions take
NumPy arrays in the warm-up and JAX arrays in compiled code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from scipy import sparse

from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.trace import site_slices

# Rows whose gradients show the structure. A site is mistaken for effects of groups if none of these
# rows uses two of its entries but others do; the fit then finds that the Hessian has another form.
_NUM_PROBED_ROWS = 24
# Groups from which on the blocks are worth their cost; fewer are shared parameters.
_MIN_GROUPS = 30
# Bounds on shared parameters, and on effects per group: products that determine the matrix.
_MAX_SHARED, _MAX_EFFECTS_PER_GROUP = 100, 50
_TINY, _UNBOUNDED = 1e-30, 1e30  # in place of zero and of infinity
# Entries of a difference of strips, relative to the largest of the minuend, that are rounding.
_MAX_ROUNDING = 1e-5
_MAX_UNROLLED_EFFECTS = 8  # effects per group up to which compiled products have no loop
_EFFECTS_PER_ITERATION = 4  # of that loop: with 20 effects, twice as fast as 1, and faster than 10
# Effects from which on a CPU multiplies the blocks of some groups at a time, so that sums stay in
# its cache: 100,000 groups of 20 effects take two thirds of the time, with 2,000 groups at a time
# as with 1,000 and 4,000; 10,000 groups take longer.
_MIN_EFFECTS_OF_PARTS, _GROUPS_PER_PART = 500_000, 2_000
# Groups whose terms are summed at once on a CPU: of 20 x 20 and smaller blocks 500 to 5,000 take
# the same time.
_GROUPS_PER_CHUNK = 1_000
_GROUPS_PER_THREAD = 1_000  # at a time: with 20 x 20 blocks faster than 250 and 4,000
_MIN_THREADED_PRODUCTS = 2**22  # numbers to multiply, below which threads are not worth their start
_PAIRS_PER_LINE = 8  # blocks of pairs of groups: fastest of 4, 8, 16 and 32 on CPUs
_PROBED_POSITION_SD = 0.3  # about zero in unconstrained space, where gradients are rarely zero


@dataclass(frozen=True)
class EffectSite:
    """A site with values of groups, as a part of the flat coordinates."""

    start: int  # its first coordinate
    shape: tuple[int, ...]
    group_axes: tuple[int, ...]  # axes that select a group
    grouping: int = 0  # number of the grouping to which its groups belong

    @property
    def num_groups(self) -> int:
        """Number of groups G."""
        return math.prod(self.shape[axis] for axis in self.group_axes)

    @property
    def stop(self) -> int:
        """The coordinate after its last one."""
        return self.start + math.prod(self.shape)

    @property
    def effects_per_group(self) -> int:
        """Number of values of a group."""
        return (self.stop - self.start) // self.num_groups

    @property
    def _axis_order(self) -> list[int]:
        other_axes = [axis for axis in range(len(self.shape)) if axis not in self.group_axes]
        return [*other_axes, *self.group_axes]

    def take(self, v: Any) -> Any:
        """Return the site's entries of flat vectors, shape ``(..., k, G)``."""
        batch_shape = v.shape[:-1]
        x = v[..., self.start : self.stop].reshape(*batch_shape, *self.shape)
        num = len(batch_shape)
        x = x.transpose(*range(num), *(num + axis for axis in self._axis_order))
        return x.reshape(*batch_shape, self.effects_per_group, self.num_groups)

    def flatten(self, x: Any) -> Any:
        """Return entries of shape ``(..., k, G)`` in the order of flat vectors."""
        batch_shape, order = x.shape[:-2], self._axis_order
        x = x.reshape(*batch_shape, *(self.shape[axis] for axis in order))
        num = len(batch_shape)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        x = x.transpose(*range(num), *(num + axis for axis in inverse))
        return x.reshape(*batch_shape, self.stop - self.start)


@dataclass(frozen=True)
class BlockArrowLayout:
    """Coordinates that are effects of groups; all others are shared parameters."""

    dim: int
    sites: tuple[EffectSite, ...]  # in the order of the coordinates

    @cached_property
    def groupings(self) -> tuple[tuple[slice, int], ...]:
        """Columns of the groups of each grouping, and the number of their effects."""
        groupings, start = [], 0
        for j in range(1 + max(site.grouping for site in self.sites)):
            sites = [site for site in self.sites if site.grouping == j]
            stop = start + sites[0].num_groups
            groupings.append((slice(start, stop), sum(site.effects_per_group for site in sites)))
            start = stop
        return tuple(groupings)

    @property
    def num_groups(self) -> int:
        """Number of groups of all groupings, G."""
        return self.groupings[-1][0].stop

    @property
    def effects_per_group(self) -> int:
        """Number of effects of a group, k: the largest of all groupings."""
        return max(num_effects for _, num_effects in self.groupings)

    @property
    def num_effect_probes(self) -> int:
        """Number of the vectors that determine all blocks."""
        return sum(num_effects for _, num_effects in self.groupings)

    @property
    def num_shared(self) -> int:
        """Number of shared parameters, s."""
        return self.dim - sum(site.stop - site.start for site in self.sites)

    @cached_property
    def _shared_slices(self) -> list[slice]:
        starts = [0, *(site.stop for site in self.sites)]
        stops = [*(site.start for site in self.sites), self.dim]
        return [slice(a, b) for a, b in zip(starts, stops, strict=True)]

    def split(self, v: Any) -> tuple[Any, Any]:
        """Return effects ``(..., k, G)`` and shared parameters ``(..., s)`` of flat vectors."""
        xp = jnp if isinstance(v, jax.Array) else np
        parts = []
        for j, (_, num_effects) in enumerate(self.groupings):
            effects = [site.take(v) for site in self.sites if site.grouping == j]
            if num_missing := self.effects_per_group - num_effects:
                shape = (*v.shape[:-1], num_missing, effects[0].shape[-1])
                effects.append(xp.zeros(shape, v.dtype))
            parts.append(effects[0] if len(effects) == 1 else xp.concatenate(effects, -2))
        all_effects = parts[0] if len(parts) == 1 else xp.concatenate(parts, -1)
        return all_effects, self.take_shared(v)

    def take_shared(self, v: Any) -> Any:
        """Return the shared parameters of flat vectors, shape ``(..., s)``."""
        xp = jnp if isinstance(v, jax.Array) else np
        return xp.concatenate([v[..., part] for part in self._shared_slices], -1)

    def merge(self, effects: Any, shared: Any) -> Any:
        """Return flat vectors from their effects and shared parameters."""
        xp = jnp if isinstance(shared, jax.Array) else np
        parts, rows, start = [], [0] * len(self.groupings), 0
        for k, part in enumerate(self._shared_slices):
            stop = start + part.stop - part.start
            parts.append(shared[..., start:stop])
            start = stop
            if k < len(self.sites):
                site = self.sites[k]
                row, (columns, _) = rows[site.grouping], self.groupings[site.grouping]
                rows[site.grouping] += site.effects_per_group
                parts.append(site.flatten(effects[..., row : rows[site.grouping], columns]))
        return xp.concatenate(parts, -1)

    def make_probes(self, with_shared: bool = True) -> np.ndarray:
        """Return the vectors whose products determine blocks, strips and corner.

        :param with_shared: whether those of the shared parameters follow those of the effects.
        """
        num_effects, num_shared = self.num_effect_probes, self.num_shared * with_shared
        shape = num_effects + num_shared, self.effects_per_group, self.num_groups
        effects = np.zeros(shape, np.float32)
        probe = 0
        for columns, size in self.groupings:
            effects[probe + np.arange(size), np.arange(size), columns] = 1.0
            probe += size
        shared = np.eye(num_effects + num_shared, self.num_shared, -num_effects, np.float32)
        return np.asarray(self.merge(effects, shared))

    def make_blocks(self, products: Any) -> Any:
        """Return the blocks of a matrix from its products with the effects' probes."""
        xp = jnp if isinstance(products, jax.Array) else np
        effects, _ = self.split(products[: self.num_effect_probes])
        if len(self.groupings) == 1:
            return (effects + effects.swapaxes(0, 1)) / 2.0
        parts, probe = [], 0
        for columns, size in self.groupings:
            # Effects that a group does not have are independent of all others.
            missing = np.eye(self.effects_per_group, dtype=effects.dtype)[size:, :, None]
            of_grouping = effects[probe : probe + size, :, columns]
            missing = np.broadcast_to(missing, (*missing.shape[:2], of_grouping.shape[-1]))
            parts.append(xp.concatenate([of_grouping, missing], 0))
            probe += size
        blocks = xp.concatenate(parts, -1)
        return (blocks + blocks.swapaxes(0, 1)) / 2.0


_register = partial(jax.tree_util.register_dataclass, meta_fields=["layout"])


@partial(
    jax.tree_util.register_dataclass, data_fields=["values", "sources", "targets"], meta_fields=[]
)
@dataclass(frozen=True)
class GroupPairs:
    """Blocks of a symmetric matrix that couple pairs of groups of different groupings.

    A line has up to W blocks that multiply effects of different groups, the sources, and whose
    products are added to one group, the target. XLA on CPUs scatters a line's sum in the time in
    which it gathers ten numbers.
    """

    values: Any  # shape `(k, k, W, lines)`; zeros fill up the lines
    sources: Any  # shape `(W, lines)`
    targets: Any  # shape `(lines,)`

    @classmethod
    def create(cls, first: Any, second: Any, values: Any, num_groups: int) -> GroupPairs:
        """Arrange blocks ``(k, k, P)`` and, transposed, those of the other triangle.

        :param first: groups of the blocks' rows, shape ``(P,)``.
        :param second: groups of their columns.
        """
        targets, sources = np.concatenate([first, second]), np.concatenate([second, first])
        order = np.argsort(targets, kind="stable")
        counts = np.bincount(targets, minlength=num_groups)
        lines_per_group = -(-counts // _PAIRS_PER_LINE)
        position = np.arange(len(order)) - np.repeat(counts.cumsum() - counts, counts)
        first_line = np.repeat(lines_per_group.cumsum() - lines_per_group, counts)
        place = position % _PAIRS_PER_LINE, first_line + position // _PAIRS_PER_LINE
        shape = _PAIRS_PER_LINE, lines_per_group.sum()
        line_values = np.zeros((*values.shape[:2], *shape), values.dtype)
        both = np.concatenate([values, values.swapaxes(0, 1)], -1)
        line_values[:, :, *place] = both[..., order]
        line_sources = np.zeros(shape, np.int32)
        line_sources[place] = sources[order]
        line_targets = np.repeat(np.arange(num_groups, dtype=np.int32), lines_per_group)
        return cls(line_values, line_sources, line_targets)

    def rescale(self, scales: np.ndarray) -> GroupPairs:
        """Return the blocks of effects that are divided by ``(k, G)``."""
        targets, sources = scales[:, self.targets], scales[:, self.sources]
        return replace(self, values=self.values * targets[:, None, None] * sources)

    def to_sparse(self, num_groups: int) -> Any:
        """Return the matrix of flat effects, k G rows and columns, in SciPy's format."""
        k = len(self.values)
        offsets = num_groups * np.arange(k)[:, None, None]
        rows = np.broadcast_to((offsets + self.targets)[:, None], self.values.shape)
        columns = np.broadcast_to(offsets + self.sources, self.values.shape)
        entries = self.values.ravel(), (rows.ravel(), columns.ravel())
        return sparse.csr_matrix(entries, (k * num_groups,) * 2)

    def multiply(self, effects: Any) -> Any:
        """Return the product with effects ``(..., k, G)``."""
        if not isinstance(effects, jax.Array):
            flat = effects.reshape(-1, effects.shape[-2] * effects.shape[-1])
            return (self.to_sparse(effects.shape[-1]) @ flat.T).T.reshape(effects.shape)
        # Without the barrier, XLA computes the effects again for each pair.
        effects = lax.optimization_barrier(effects)
        sums = sum(
            multiply_blocks(self.values[:, :, place], effects[..., self.sources[place]])
            for place in range(_PAIRS_PER_LINE)
        )
        return jnp.zeros_like(effects).at[..., self.targets].add(sums)


@partial(jax.tree_util.register_dataclass, data_fields=["parents", "coupling"], meta_fields=[])
@dataclass(frozen=True)
class GroupNesting:
    """Dependence of groups on the one group of another grouping that they belong to."""

    parents: Any  # that group, or the group itself, shape `(G,)`
    coupling: Any  # minus the derivative of the effects by the parent's, shape `(k, k, G)`

    def apply(self, effects: Any) -> Any:
        """Return effects from their deviations from the means given the parent."""
        return effects - multiply_blocks(self.coupling, effects[..., self.parents])

    def solve(self, effects: Any) -> Any:
        """Return the deviations; parents have no parents."""
        return effects + multiply_blocks(self.coupling, effects[..., self.parents])

    def apply_transpose(self, gradient: Any, sign: float = -1.0) -> Any:
        """Return the gradient with respect to the deviations; with a sign of 1 the inverse."""
        terms = sign * multiply_blocks(self.coupling, gradient, transpose=True)
        if isinstance(gradient, jax.Array):
            return gradient.at[..., self.parents].add(terms)
        gradient = gradient.copy()
        np.add.at(np.moveaxis(gradient, -1, 0), self.parents, np.moveaxis(terms, -1, 0))
        return gradient

    def apply_squared(self, variances: Any) -> Any:
        """Return the effects' variances from those of the deviations."""
        return variances + multiply_blocks(self.coupling**2, variances[..., self.parents])

    def rescale(self, scales: np.ndarray) -> GroupNesting:
        """Return the dependence of effects that are multiplied by ``(k, G)``."""
        ratios = scales[:, None] / scales[:, self.parents]
        return replace(self, coupling=self.coupling * ratios)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["columns", "num_shared"],
)
@dataclass(frozen=True)
class SharedStrips:
    """Strips that couple the effects of each group with the shared parameters.

    An effect depends on few of these, such as its mean and its scale, the same ones in all groups.
    All other entries are zero and left out, if there are at most eight for each effect.
    """

    values: Any  # shape `(n, k, G)`, or `(s, k, G)` with all entries
    # shared parameter of each value, n tuples of k numbers; None where all entries are stored
    columns: tuple[tuple[int, ...], ...] | None
    num_shared: int

    @classmethod
    def from_dense(cls, strips: Any) -> SharedStrips:
        """Leave out the zeros of strips ``(s, k, G)``."""
        columns = cls.choose_columns(np.asarray((strips == 0.0).all(-1)))
        if columns is None:
            return cls(strips, None, len(strips))
        return cls(strips[np.array(columns), np.arange(strips.shape[1])], columns, len(strips))

    @staticmethod
    def choose_columns(is_zero: np.ndarray) -> tuple[tuple[int, ...], ...] | None:
        """Return the columns of strips of which some entries are zero, shape ``(s, k)``."""
        num = max(1, (~is_zero).sum(0).max(initial=0))
        if num > min(_MAX_UNROLLED_EFFECTS, len(is_zero) - 1):
            return None
        columns = np.argsort(is_zero, axis=0, kind="stable")[:num]
        return tuple(map(tuple, columns.tolist()))

    def multiply(self, shared: Any) -> Any:
        """Return each group's strip times the shared parameters, shape ``(..., k, G)``."""
        if self.columns is None:
            return _multiply_shared(self.values, shared)
        shared = shared[..., np.array(self.columns)]
        if not isinstance(shared, jax.Array):
            return np.einsum("nkg,...nk->...kg", self.values, shared)
        return sum(x * shared[..., n, :, None] for n, x in enumerate(self.values))

    def sum_over_groups(self, effects: Any) -> Any:
        """Return the sum of each group's transposed strip times its effects, ``(..., s)``."""
        if self.columns is None:
            return _sum_over_groups(self.values, effects)
        if isinstance(effects, jax.Array):
            sums = sum_terms(lambda v, e: v * e[..., None, :, :], self.values, effects)
        else:
            sums = np.einsum("nkg,...kg->...nk", self.values, effects)
        one_hot = np.eye(self.num_shared, dtype=sums.dtype)[np.ravel(self.columns)]
        return sums.reshape(*sums.shape[:-2], len(one_hot)) @ one_hot

    def sum_squares(self, factors: np.ndarray) -> np.ndarray:
        """Return the sum over groups of ``B^T F F^T B``, shape ``(s, s)``.

        :param factors: F, shape ``(k, k, G)``.
        """

        # By loops of NumPy: these threads would wait for the threads of BLAS.
        def sum_all(factors: np.ndarray, values: np.ndarray) -> np.ndarray:
            products = np.einsum("acg,sag->scg", factors, values)
            return np.einsum("scg,tcg->st", products, products)[..., None]

        def sum_stored(factors: np.ndarray, values: np.ndarray) -> np.ndarray:
            covariances = np.einsum("acg,bcg->abg", factors, factors)
            return np.einsum("nag,abg,mbg->namb", values, covariances, values)[..., None]

        if self.columns is None:
            return np.asarray(map_groups(sum_all, factors, self.values).sum(-1))
        sums = map_groups(sum_stored, factors, self.values).sum(-1)
        one_hot = np.eye(self.num_shared)[np.ravel(self.columns)]
        return np.asarray(one_hot.T @ sums.reshape(len(one_hot), -1) @ one_hot)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "steps", "pairs"],
    meta_fields=["columns"],
)
@dataclass(frozen=True)
class BlockDifferences:
    r"""Central difference quotients of the blocks along some shared parameters.

    With the difference quotient :math:`\Delta_j D_g` of a block along the shared parameter j, the
    potential has the third-order term
    :math:`\frac12 \sum_g \delta_j\, e_g^\top \Delta_j D_g e_g` in the displacements of this
    parameter and of the effects; with several groupings also that of the blocks of pairs of groups.
    Its gradient is the part of second order that :meth:`BlockArrowMatrix.expand` adds. The steps
    are finite, so that a minibatch can have exactly the same differences on its rows.
    """

    values: Any  # shape `(c, k, k, G)`
    steps: Any  # of each shared parameter, to either side, shape `(c,)`
    columns: tuple[int, ...]  # these parameters, by their number
    pairs: tuple[GroupPairs, ...] = ()  # of each shared parameter, with several groupings


@partial(jax.tree_util.register_dataclass, data_fields=["values", "bounds"], meta_fields=[])
@dataclass(frozen=True)
class EffectThirdDerivatives:
    r"""Third derivatives of the potential by effects of the same group.

    With the derivatives :math:`T_g` the gradient of the effects has the part of second order
    :math:`\frac12 T_g(e_g, e_g)`. A minibatch of few rows of a group has large ones where the
    likelihood is skewed, such as Poisson counts.

    Where an effect's displacement alone decreases the rows' curvature by this effect to zero, the
    expansion of the gradient turns back, and is wrong beyond. Gradients are therefore expanded in
    displacements of the effects between bounds. Control variates remain unbiased, because all rows
    have the same bounds.
    """

    values: Any  # by pairs of effects b <= c and by one effect, shape `(k (k + 1) / 2, k, G)`
    bounds: Any = None  # the least and the largest displacement, shape `(2, k, G)`; None: unbounded

    @staticmethod
    def list_pairs(num_effects: int) -> list[tuple[int, int]]:
        """Return the pairs of effects of a group."""
        return [(b, c) for b in range(num_effects) for c in range(b, num_effects)]

    @classmethod
    def make_directions(cls, layout: BlockArrowLayout) -> np.ndarray:
        """Return vectors along which second derivatives of gradients determine all values: sums of
        two effects' probes, and single ones.
        """
        probes = layout.make_probes(with_shared=False)
        pairs = cls.list_pairs(layout.effects_per_group)
        return np.stack([probes[b] + (b != c) * probes[c] for b, c in pairs])

    @classmethod
    def from_directions(
        cls, layout: BlockArrowLayout, second_derivatives: np.ndarray
    ) -> EffectThirdDerivatives:
        """Return the values from second derivatives of the gradient along these directions."""
        effects, _ = layout.split(second_derivatives)
        pairs = cls.list_pairs(layout.effects_per_group)
        of_pair = dict(zip(pairs, effects, strict=True))
        values = [
            x if b == c else (x - of_pair[b, b] - of_pair[c, c]) / 2.0
            for (b, c), x in of_pair.items()
        ]
        return cls(np.stack(values))

    def with_bounds(self, blocks: np.ndarray) -> Self:
        """Return the derivatives with bounds at which the rows' curvature by an effect is zero.

        There is no bound where the curvature grows, or is not positive at the center.

        :param blocks: second derivatives of the rows' part of the potential, shape ``(k, k, G)``.
        """
        num_effects = len(blocks)
        own = [i for i, (b, c) in enumerate(self.list_pairs(num_effects)) if b == c]
        slopes = self.values[own, np.arange(num_effects)]
        curvatures = np.einsum("bbg->bg", blocks)
        largest = np.minimum(curvatures / np.maximum(np.abs(slopes), _TINY), _UNBOUNDED)
        largest = np.where(curvatures > 0.0, largest, _UNBOUNDED)
        lower = np.where(slopes > 0.0, largest, _UNBOUNDED)
        upper = np.where(slopes < 0.0, largest, _UNBOUNDED)
        return replace(self, bounds=np.stack([-lower, upper]))

    def expand(self, effects: Any) -> Any:
        """Return the part of second order of the effects' gradient, shape ``(..., k, G)``."""
        terms = (
            values * (effects[..., b, :] * effects[..., c, :] / (1 + (b == c)))[..., None, :]
            for values, (b, c) in zip(self.values, self.list_pairs(effects.shape[-2]), strict=True)
        )
        return sum(terms)


@partial(
    _register,
    data_fields=["blocks", "strips", "corner", "pairs", "differences", "third_derivatives"],
)
@dataclass(frozen=True)
class BlockArrowMatrix:
    """A symmetric block-arrow matrix."""

    blocks: Any  # shape `(k, k, G)`
    strips: Any  # `SharedStrips`
    corner: Any  # shape `(s, s)`
    layout: BlockArrowLayout
    pairs: GroupPairs | None = None  # of several groupings
    differences: BlockDifferences | None = None
    third_derivatives: EffectThirdDerivatives | None = None  # of a single grouping

    @classmethod
    def from_products(
        cls, layout: BlockArrowLayout, products: Any, pairs: GroupPairs | None = None
    ) -> BlockArrowMatrix:
        """Build a matrix from its products with the probes."""
        effects, shared = layout.split(products[layout.num_effect_probes :])
        corner = (shared + shared.T) / 2.0
        strips = SharedStrips.from_dense(effects)
        return cls(layout.make_blocks(products), strips, corner, layout, pairs)

    def __matmul__(self, v: Any) -> Any:
        return self.layout.merge(*self._multiply(*self.layout.split(v)))

    def expand(self, displacement: Any) -> Any:
        """Return the product, with the terms of second order of :class:`BlockDifferences` and
        :class:`EffectThirdDerivatives`.
        """
        effects, shared = self.layout.split(displacement)
        of_effects, of_shared = self._multiply(effects, shared)
        if self.third_derivatives is not None and self.third_derivatives.values is not None:
            of_effects = of_effects + self.third_derivatives.expand(effects)
        if self.differences is None or self.differences.values is None:
            return self.layout.merge(of_effects, of_shared)
        columns, pairs = self.differences.columns, self.differences.pairs
        for i, (column, blocks) in enumerate(zip(columns, self.differences.values, strict=True)):
            product = multiply_blocks(blocks, effects)
            product = product + pairs[i].multiply(effects) if pairs else product
            of_effects = of_effects + shared[..., column, None, None] * product
            work = sum_terms(lambda a, b: (a * b).sum(-2), product, effects)
            of_shared = of_shared.at[..., column].add(work / 2.0)
        return self.layout.merge(of_effects, of_shared)

    def limit_displacement(self, displacement: Any) -> Any:
        """Return the displacement in which gradients are expanded: effects are within bounds."""
        if self.third_derivatives is None or self.third_derivatives.bounds is None:
            return displacement
        effects, shared = self.layout.split(displacement)
        lower, upper = self.third_derivatives.bounds
        return self.layout.merge(effects.clip(lower, upper), shared)

    def _multiply(self, effects: Any, shared: Any) -> tuple[Any, Any]:
        of_effects = multiply_blocks(self.blocks, effects) + self.strips.multiply(shared)
        if self.pairs is not None:
            of_effects = of_effects + self.pairs.multiply(effects)
        return of_effects, shared @ self.corner + self.strips.sum_over_groups(effects)

    def is_finite(self) -> bool:
        """Return whether all entries are finite; for NumPy arrays."""
        parts = self.blocks, self.strips.values, self.corner
        return all(bool(np.isfinite(x).all()) for x in parts)

    def subtract(self, other: BlockArrowMatrix) -> BlockArrowMatrix:
        """Return the matrix minus one without pairs; strips that are rounding are zero."""
        units = np.eye(self.layout.num_shared)
        strips = self.strips.multiply(units)
        size = _MAX_ROUNDING * np.abs(strips).max(-1, keepdims=True)
        strips = strips - other.strips.multiply(units)
        strips[(np.abs(strips) <= size).all(-1)] = 0.0
        return replace(
            self,
            blocks=self.blocks - other.blocks,
            strips=SharedStrips.from_dense(strips),
            corner=self.corner - other.corner,
        )

    def without_values(self) -> BlockArrowMatrix:
        """Return the structure alone: the noise of minibatches does not depend on the values."""
        differences = self.differences and BlockDifferences(None, None, self.differences.columns)
        third = self.third_derivatives and replace(self.third_derivatives, values=None)
        return BlockArrowMatrix(
            None, None, None, self.layout, differences=differences, third_derivatives=third
        )

    def subtract_second_order_of(
        self,
        rows_gradient: Callable[[Array], Array],
        gradient: Any,
        displacement: Any,
    ) -> Any:
        """Return a gradient minus a minibatch's terms of second order.

        :param rows_gradient: gradient of the part of the minibatch's potential that depends on its
            rows, a function of the displacement.
        """
        if not self.has_second_order_terms:
            return gradient
        effects, shared = self.layout.split(displacement)
        no_shared = jnp.zeros_like(shared)
        tangents = self.layout.merge(effects, no_shared)
        no_displacement = jnp.zeros(self.layout.dim, displacement.dtype)
        if self.third_derivatives is not None:
            second_derivative = partial(differentiate_twice, rows_gradient, no_displacement)
            derivatives = jnp.vectorize(second_derivative, signature="(d)->(d)")(tangents)
            of_effects, _ = self.layout.split(derivatives)
            gradient = gradient - self.layout.merge(of_effects / 2.0, no_shared)
        if self.differences is None:
            return gradient
        coordinates = self.difference_coordinates
        columns, steps = self.differences.columns, self.differences.steps
        for coordinate, column, step in zip(coordinates, columns, steps, strict=True):
            above, below = (
                jnp.vectorize(
                    jax.linearize(rows_gradient, no_displacement.at[coordinate].set(x))[1],
                    signature="(d)->(d)",
                )(tangents)
                for x in (step, -step)
            )
            product, _ = self.layout.split((above - below) / (2.0 * step))
            work = (product * effects).sum((-2, -1))
            terms = self.layout.merge(
                shared[..., column, None, None] * product,
                no_shared.at[..., column].set(work / 2.0),
            )
            gradient = gradient - terms
        return gradient

    @property
    def has_second_order_terms(self) -> bool:
        """True if :meth:`expand` has terms of second order."""
        return self.differences is not None or self.third_derivatives is not None

    @property
    def difference_coordinates(self) -> np.ndarray:
        """Coordinates of the shared parameters that have differences."""
        columns = () if self.differences is None else self.differences.columns
        return np.asarray(
            self.layout.take_shared(np.arange(self.layout.dim))[np.array(columns, int)]
        )


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["layout", "has_strips"],
    data_fields=[
        "effect_factors",
        "inverse_effect_factors",
        "coupling",
        "shared_factor",
        "correlation",
        "nesting",
        "sd_trend",
        "prior_scaling",
        "centering",
    ],
)
@dataclass(frozen=True)
class BlockArrowFactor:
    r"""A matrix L with :math:`LL^\top` approximately a covariance, for preconditioned coordinates.

    The coordinates are those of the shared parameters, and of the effects given these. Groups of
    different groupings are correlated only in the directions of a low-rank factor.

    The SDs of effects of groups with few rows change with the shared parameters, such as their
    scale. With a trend A of their logarithms the effects have coordinates
    :math:`e^{-A \delta_\psi}` times linear ones, so that they are partially non-centred, each group
    by as much as its rows require. SDs and means of effects whose scale is more uncertain are those
    of :mod:`.prior_scaling`. :meth:`to_linear` is this map. Effects that the model multiplies by
    their scale are partially centred after L, by :mod:`.partial_centering`.
    """

    effect_factors: Any  # F with F F^T the covariances given the shared, shape `(k, k, G)`
    inverse_effect_factors: Any  # their inverses, of the same shape
    coupling: SharedStrips  # W, minus the derivative of the effects' means by the shared
    shared_factor: Any  # factor of the covariance of the shared parameters, shape `(s, s)`
    layout: BlockArrowLayout
    correlation: LowRankFactor | None = None  # of the effects, in units of F
    nesting: GroupNesting | None = None  # where F is that of groups given the group they belong to
    sd_trend: Any = None  # A, `SharedStrips` of derivatives of log SDs by the shared parameters
    prior_scaling: Any = None  # a `PriorScaling`, or None
    has_strips: bool = False  # whether `coupling` has the Hessian's strips B, with W = F F^T B
    centering: Any = None  # a `Centering` of the displacements, or None

    @property
    def is_linear(self) -> bool:
        """True if the coordinates are linear functions of positions."""
        return not self.has_scales and self.centering is None

    @property
    def shared_sds(self) -> np.ndarray:
        """SDs of the shared parameters, shape ``(s,)``; for NumPy arrays."""
        return np.asarray(np.linalg.norm(self.shared_factor, axis=1))

    @property
    def has_scales(self) -> bool:
        """True if the effects' SDs change with the shared parameters: partial non-centring."""
        return self.sd_trend is not None or self.prior_scaling is not None

    def to_linear(self, q: Any) -> Any:
        """Return the coordinates that L maps to displacements."""
        if not self.has_scales:
            return q
        effects, shared = self.layout.split(q)
        if self.sd_trend is not None:
            effects = effects * self._scale_effects(shared)
        if self.prior_scaling is not None:
            effects = self.prior_scaling.to_linear(effects, shared @ self.shared_factor.T)
            effects = self._correlate(effects, LowRankFactor.solve)
        return self.layout.merge(effects, shared)

    def from_linear(self, linear: Any) -> Any:
        """Return the coordinates: the inverse of :meth:`to_linear`."""
        if not self.has_scales:
            return linear
        effects, shared = self.layout.split(linear)
        if self.prior_scaling is not None:
            effects = self._correlate(effects, LowRankFactor.apply)
            effects = self.prior_scaling.from_linear(effects, shared @ self.shared_factor.T)
        if self.sd_trend is not None:
            effects = effects / self._scale_effects(shared)
        return self.layout.merge(effects, shared)

    def pull_back(self, q: Any, gradient: Any) -> Any:
        """Return the gradient of the potential of ``q`` from one in linear coordinates.

        It includes the log Jacobian determinant.
        """
        if not self.has_scales:
            return gradient
        effects, shared = self.layout.split(q)
        of_effects, of_shared = self.layout.split(gradient)
        scales = 1.0 if self.sd_trend is None else self._scale_effects(shared)
        if self.prior_scaling is not None:
            of_effects = self._correlate(of_effects, LowRankFactor.solve)
            of_effects, by_scales = self.prior_scaling.pull_back(
                effects * scales, shared @ self.shared_factor.T, of_effects
            )
            of_shared = of_shared + by_scales @ self.shared_factor
        if self.sd_trend is not None:
            of_effects = of_effects * scales
            of_shared = of_shared + self._compute_work(of_effects * effects)
        return self.layout.merge(of_effects, of_shared)

    def push_forward(self, q: Any, gradient: Any) -> Any:
        """Return the gradient in linear coordinates, the inverse of :meth:`pull_back`, of a factor
        without :attr:`prior_scaling`.
        """
        assert self.prior_scaling is None
        if self.sd_trend is None:
            return gradient
        effects, shared = self.layout.split(q)
        of_effects, of_shared = self.layout.split(gradient)
        work = self._compute_work(of_effects * effects)
        return self.layout.merge(of_effects / self._scale_effects(shared), of_shared - work)

    def _scale_effects(self, shared: Any) -> Any:
        """Return the SDs by the trend at shared coordinates, relative to those at the center."""
        xp = jnp if isinstance(shared, jax.Array) else np
        return xp.exp(self.sd_trend.multiply(shared @ self.shared_factor.T))

    def _compute_work(self, products: Any) -> Any:
        """Return the derivative by the shared coordinates of the trend of the effects' scales.

        :param products: of coordinates and gradient, whose mean is one, shape ``(..., k, G)``.
        """
        return self.sd_trend.sum_over_groups(products - 1.0) @ self.shared_factor

    def replace_effect_factors(self, factors: np.ndarray) -> BlockArrowFactor:
        """Return the factor with other F."""
        inverse = invert_factors(factors)
        return replace(self, effect_factors=factors, inverse_effect_factors=inverse)

    def refit_shared(self, mean: np.ndarray, factor: np.ndarray) -> BlockArrowFactor:
        """Return the factor in whose coordinates the shared ones are ``mean + factor q``."""
        factors, inverse_factors = self.effect_factors, self.inverse_effect_factors
        nesting = self.nesting
        if self.sd_trend is not None:
            scales = self._scale_effects(mean)
            factors, inverse_factors = factors * scales, inverse_factors / scales[:, None]
        if self.prior_scaling is not None:
            factors = self.prior_scaling.rescale_factors(factors, self.shared_factor @ mean)
            inverse_factors = invert_factors(factors)
        if self.centering is not None:
            shared = self.shared_factor @ mean
            factors, inverse_factors = self.centering.rescale_factors(
                shared, factors, inverse_factors
            )
            if nesting is not None:
                nesting = nesting.rescale(self.centering.scale_effects(shared))
        return replace(
            self,
            shared_factor=self.shared_factor @ factor,
            effect_factors=factors,
            inverse_effect_factors=inverse_factors,
            nesting=nesting,
            prior_scaling=None,  # which is that of another center
        )

    def apply(self, q: Any) -> Any:
        """Return ``L q``."""
        effects, shared = self.layout.split(q)
        shared = shared @ self.shared_factor.T
        effects = self._correlate(effects, LowRankFactor.apply)
        shift = self.coupling.multiply(shared)
        if self.has_strips:
            effects = effects - multiply_blocks(self.effect_factors, shift, transpose=True)
        effects = multiply_blocks(self.effect_factors, effects)
        if self.nesting is not None:
            effects = self.nesting.apply(effects)
        return self.layout.merge(effects if self.has_strips else effects - shift, shared)

    def solve(self, v: Any) -> Any:
        """Return ``L^-1 v``."""
        effects, shared = self.layout.split(v)
        effects = effects + self.shift_means(shared)
        inv = jnp.linalg.inv if isinstance(shared, jax.Array) else np.linalg.inv
        if self.nesting is not None:
            effects = self.nesting.solve(effects)
        effects = multiply_blocks(self.inverse_effect_factors, effects)
        effects = self._correlate(effects, LowRankFactor.solve)
        return self.layout.merge(effects, shared @ inv(self.shared_factor).T)

    def apply_transpose(self, gradient: Any) -> Any:
        """Return ``L^T g``."""
        of_effects, shared = self.layout.split(gradient)
        effects = of_effects if self.nesting is None else self.nesting.apply_transpose(of_effects)
        effects = multiply_blocks(self.effect_factors, effects, transpose=True)
        if self.has_strips:
            of_effects = multiply_blocks(self.effect_factors, effects)
        shared = shared - self.coupling.sum_over_groups(of_effects)
        effects = self._correlate(effects, LowRankFactor.apply)
        return self.layout.merge(effects, shared @ self.shared_factor)

    def solve_transpose(self, gradient: Any) -> Any:
        """Return ``L^-T g``: the inverse of :meth:`apply_transpose`."""
        effects, shared = self.layout.split(gradient)
        inv = jnp.linalg.inv if isinstance(shared, jax.Array) else np.linalg.inv
        shared = shared @ inv(self.shared_factor)
        effects = self._correlate(effects, LowRankFactor.solve)
        effects = multiply_blocks(self.inverse_effect_factors, effects, transpose=True)
        if self.nesting is not None:
            effects = self.nesting.apply_transpose(effects, 1.0)
        of_effects = effects
        if self.has_strips:
            of_effects = multiply_blocks(self.effect_factors, effects, transpose=True)
            of_effects = multiply_blocks(self.effect_factors, of_effects)
        return self.layout.merge(effects, shared + self.coupling.sum_over_groups(of_effects))

    @property
    def has_chain_axis(self) -> bool:
        """True where each chain has its own, as in a batch of one chain."""
        return self.shared_factor.ndim > 2

    def square_shifts(self) -> Any:
        """Return squares of the derivatives of effects by shared coordinates, ``(s, k, G)``."""
        return self.shift_means(self.shared_factor.T) ** 2

    def apply_squared(self, variances: Any, squared_shifts: Any = None) -> Any:
        """Return the variances of ``L q`` from those of uncorrelated ``q``.

        :param squared_shifts: :meth:`square_shifts`, which takes most of the time.
        """
        squared_shifts = self.square_shifts() if squared_shifts is None else squared_shifts
        effects, shared = self.layout.split(variances)
        effects = self._correlate(effects, LowRankFactor.apply_squared)
        effects = multiply_blocks(self.effect_factors**2, effects)
        if self.nesting is not None:
            effects = self.nesting.apply_squared(effects)
        effects = effects + _multiply_shared(squared_shifts, shared)
        return self.layout.merge(effects, shared @ (self.shared_factor**2).T)

    @property
    def log_det(self) -> float:
        """Logarithm of the determinant of L; for NumPy arrays."""
        factors = np.moveaxis(self.effect_factors, -1, 0)
        scales = 1.0 if self.correlation is None else self.correlation.scales
        log_dets = np.linalg.slogdet(factors)[1].sum() + np.linalg.slogdet(self.shared_factor)[1]
        return float(log_dets + np.log(scales).sum())

    def shift_means(self, shared: Any) -> Any:
        """Return W times displacements of the shared parameters, shape ``(..., k, G)``: minus the
        linear change of the effects' means.
        """
        shift = self.coupling.multiply(shared)
        if not self.has_strips:
            return shift
        scaled = multiply_blocks(self.effect_factors, shift, transpose=True)
        return multiply_blocks(self.effect_factors, scaled)

    def _correlate(self, effects: Any, method: Callable[[LowRankFactor, Any], Any]) -> Any:
        """Return a method of the low-rank factor, applied to effects ``(..., k, G)``."""
        if self.correlation is None:
            return effects
        flat = effects.reshape(*effects.shape[:-2], -1)
        return method(self.correlation, flat).reshape(effects.shape)


def differentiate_twice(fn: Callable[[Any], Any], x: Any, direction: Any) -> Any:
    """Return the second derivative of a function along a direction."""

    def differentiate(x: Any) -> Any:
        return jax.jvp(fn, (x,), (direction,))[1]

    return jax.jvp(differentiate, (x,), (direction,))[1]


def invert_factors(factors: np.ndarray) -> np.ndarray:
    """Return the inverse of each group's factor, shape ``(k, k, G)``."""
    return np.moveaxis(np.linalg.inv(np.moveaxis(factors, 2, 0)), 0, 2)


def map_groups(fn: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """Return a function of arrays whose last axis is that of groups, some groups in each thread."""
    num_groups = arrays[0].shape[-1]
    num_chunks = -(-num_groups // _GROUPS_PER_THREAD)
    if num_chunks < 2:
        return fn(*arrays)

    def evaluate(chunk: slice) -> np.ndarray:
        return fn(*(np.ascontiguousarray(x[..., chunk]) for x in arrays))

    edges = np.linspace(0, num_groups, num_chunks + 1).astype(int)
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        return np.concatenate(list(executor.map(evaluate, map(slice, edges[:-1], edges[1:]))), -1)


def multiply_blocks(blocks: Any, effects: Any, transpose: bool = False) -> Any:
    """Return each group's block, or its transpose, times its effects."""
    if not isinstance(effects, jax.Array):
        multiply = partial(np.einsum, f"{'ba' if transpose else 'ab'}g,...bg->...ag")
        if effects.size * len(blocks) < _MIN_THREADED_PRODUCTS:
            return multiply(blocks, effects)
        return map_groups(multiply, blocks, effects)
    num, num_groups = effects.shape[-2:]
    unroll = num if num <= _MAX_UNROLLED_EFFECTS else _EFFECTS_PER_ITERATION

    def multiply_part(start: Any, size: int) -> Any:
        """Return the product of ``size`` groups from one on."""
        part = lax.dynamic_slice_in_dim(effects, start, size, -1)

        def add_product(b: Any, total: Any) -> Any:
            columns = blocks[b] if transpose else blocks[:, b]  # XLA would copy transposed blocks
            columns = lax.dynamic_slice_in_dim(columns, start, size, -1)
            return total + columns * part[..., b, None, :]

        # Tiny matrices are multiplied much faster as sums over arrays of groups than as reductions.
        return lax.fori_loop(0, num, add_product, jnp.zeros_like(part), unroll=unroll)

    def multiply_parts() -> Any:
        def multiply_next(n: Any, product: Any) -> Any:
            # The last part overlaps with the one before: slices end where the array ends.
            start = n * _GROUPS_PER_PART
            part = multiply_part(start, _GROUPS_PER_PART)
            return lax.dynamic_update_slice_in_dim(product, part, start, product.ndim - 1)

        num_parts = -(-num_groups // _GROUPS_PER_PART)
        return lax.fori_loop(0, num_parts, multiply_next, jnp.zeros_like(effects))

    if num <= _MAX_UNROLLED_EFFECTS or num * num_groups < _MIN_EFFECTS_OF_PARTS:
        return multiply_part(0, num_groups)
    return lax.platform_dependent(cpu=multiply_parts, default=partial(multiply_part, 0, num_groups))


def sum_terms(compute_terms: Callable[..., Any], *arrays: Any) -> Any:
    """Return the sum over groups of a function of arrays with the groups as their last axis.

    XLA on CPUs computes long sums along the last axis slowly, and faster as sums of chunks.
    """
    num_chunks = arrays[0].shape[-1] // _GROUPS_PER_CHUNK

    def sum_all(*arrays: Any) -> Any:
        return compute_terms(*arrays).sum(-1)

    def sum_chunks(*arrays: Any) -> Any:
        def compute_chunk(n: Any) -> Any:
            start = n * _GROUPS_PER_CHUNK
            return compute_terms(
                *(lax.dynamic_slice_in_dim(x, start, _GROUPS_PER_CHUNK, -1) for x in arrays)
            )

        total = lax.fori_loop(
            1, num_chunks, lambda n, total: total + compute_chunk(n), compute_chunk(0)
        )
        remaining = [x[..., num_chunks * _GROUPS_PER_CHUNK :] for x in arrays]
        return total.sum(-1) + sum_all(*remaining)

    if num_chunks < 2:
        return sum_all(*arrays)
    return lax.platform_dependent(*arrays, cpu=sum_chunks, default=sum_all)


def _multiply_shared(strips: Any, shared: Any) -> Any:
    """Return each group's strip times the shared parameters."""
    xp = jnp if isinstance(shared, jax.Array) else np
    return xp.tensordot(shared, strips, 1)


def _sum_over_groups(strips: Any, effects: Any) -> Any:
    """Return the sum of each group's transposed strip times its effects."""
    num = strips.shape[0]
    effects = effects.reshape(*effects.shape[:-2], 1, -1)
    if isinstance(effects, jax.Array):  # a matrix product with such a long sum is slower
        return (strips.reshape(num, -1) * effects).sum(-1)
    return (effects @ strips.reshape(num, -1).T)[..., 0, :]


def find_block_arrow_layout(potential: Potential, arguments: Arguments) -> BlockArrowLayout | None:
    """Return which coordinates of a model are effects of groups, or None without such.

    An axis of a site selects groups if each of some rows has a gradient in one place along it, or
    in none. Sites whose rows have different groups belong to different groupings.
    """
    potential, sites = potential.without_shards(), potential.sites or ()
    (plate,) = potential.plates
    if potential.forward_mode_differentiation:  # reverse mode would raise an error
        return None
    if not any(site.size >= _MIN_GROUPS and site.shape for site in sites):
        return None
    rng = np.random.default_rng(0)
    position = jnp.asarray(
        _PROBED_POSITION_SD * rng.standard_normal(potential.dim), potential.dtype
    )

    @jit_low_optimization
    def has_gradient(row: Any, position: Any, arguments: Arguments) -> Any:
        def evaluate(q: Any, weight: float) -> Any:
            weights = {plate.name: jnp.full(1, weight, potential.dtype)}
            indices = {plate.name: row[None]}
            return potential.minibatch_potential(
                potential.unravel(q), indices, arguments, None, weights
            )

        # The prior's gradient alone has weight zero.
        with_row, without = (jax.grad(evaluate)(position, weight) for weight in (1.0, 0.0))
        return with_row != without

    rows = rng.choice(plate.size, min(_NUM_PROBED_ROWS, plate.size), replace=False)
    touched = [
        np.flatnonzero(has_gradient(np.int32(row), position, arguments)) for row in np.sort(rows)
    ]
    effect_sites: list[EffectSite] = []
    # Of each grouping, its number of groups and the group of each row, None without a gradient.
    groupings: list[tuple[int, list[Any]]] = []
    for site in sites:
        part = site_slices(sites)[site.name]
        entries = [x[(x >= part.start) & (x < part.stop)] - part.start for x in touched]
        places = [np.unravel_index(x, site.shape) for x in entries] if site.shape else []
        axes = tuple(
            axis
            for axis, size in enumerate(site.shape)
            if size > 1 and all(len(np.unique(place[axis])) <= 1 for place in places)
        )
        effect_site = EffectSite(part.start, site.shape, axes)
        if not axes or effect_site.num_groups < _MIN_GROUPS:
            continue
        groups = [
            tuple(int(place[axis][0]) for axis in axes) if len(entries[row]) else None
            for row, place in enumerate(places)
        ]
        for j, (num_groups, known_groups) in enumerate(groupings):
            is_same = all(
                a == b or None in (a, b) for a, b in zip(groups, known_groups, strict=True)
            )
            if is_same and num_groups == effect_site.num_groups:
                known_groups[:] = [a or b for a, b in zip(known_groups, groups, strict=True)]
                grouping = j
                break
        else:
            grouping = len(groupings)
            groupings.append((effect_site.num_groups, groups))
        effect_sites.append(replace(effect_site, grouping=grouping))
    if not effect_sites:
        return None
    layout = BlockArrowLayout(potential.dim, tuple(sorted(effect_sites, key=lambda s: s.start)))
    # Without shared parameters the groups are independent, and need no fit of a marginal.
    is_small = 0 < layout.num_shared <= _MAX_SHARED
    return layout if is_small and layout.num_effect_probes <= _MAX_EFFECTS_PER_GROUP else None
