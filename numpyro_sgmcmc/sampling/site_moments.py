"""Running moments of sites whose draws are not kept, in memory that does not grow with a run.

A chain adds the constrained values after each iteration to :class:`SiteMoments`: mean and sum of
squared deviations of each coordinate in batches (Welford, 1962; West, 1979, with weights), whose
means give Monte Carlo standard errors and R-hat; a covariance matrix; and markers of quantiles
(Jain and Chlamtac, 1985, *The P-square algorithm for dynamic calculation of quantiles*;
Raatikainen, 1987, for several of them). All but the markers are those of deviations from the
chain's first value, so that float32 suffices for a mean that is large relative to its SD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.local_latents import select_collected_sites
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.sampling.bias_monitor import compute_batch_index, count_moment_batches
from numpyro_sgmcmc.sampling.options import Options


class CollectedSites(NamedTuple):
    """Sites whose values a chain keeps, as draws or as running moments.

    - **local** - local sites of which ``z`` has the values of all rows.
    - **with_moments** - sites whose draws are not kept, and those of the covariance matrix.
    """

    local: tuple[str, ...] = ()
    with_moments: tuple[str, ...] = ()

    @classmethod
    def select(cls, potential: Potential, options: Options) -> CollectedSites:
        """Return the sites that the options choose.

        :raises InvalidArgumentError: for a name that is not one of the model's sites.
        """
        names = () if potential.local_latents is None else potential.local_latents.names
        local = select_collected_sites(names, options.collect_local_sites)
        if options.collect_sites is None:
            return cls(local)
        named = {
            "collect_sites": options.collect_sites,
            "running_covariances": options.running_covariances,
        }
        all_named = {name for chosen in named.values() for name in chosen}
        local = tuple(n for n in names if n in {*local, *all_named})
        deterministics = getattr(potential, "deterministics", ())
        sites = [*(s.name for s in potential.sites or ()), *local, *sorted(deterministics)]
        for option, chosen in named.items():
            if unknown := [name for name in chosen if name not in sites]:
                raise InvalidArgumentError(
                    f"`{option}` names '{unknown[0]}', which is not a site that draws can contain.",
                    f"use names from {sites}.",
                    "collect-sites",
                )
        without_draws = [n for n in sites if n not in options.collect_sites]
        return cls(local, tuple(dict.fromkeys([*without_draws, *options.running_covariances])))


class QuantileMarkers(NamedTuple):
    """Markers of the P-square algorithm, at the fractions of :func:`get_marker_fractions`.

    - **heights** - values of the markers in ascending order, shape ``(markers, ...)``.
    - **ranks** - number of values up to each marker, of the same shape.
    """

    heights: Array
    ranks: Array

    @classmethod
    def zeros(cls, num_markers: int, shape: tuple[int, ...], dtype: Any) -> QuantileMarkers:
        """Return the markers before the first value."""
        ranks = jnp.arange(1, num_markers + 1, dtype=jnp.int32)
        ranks = jnp.broadcast_to(ranks.reshape(-1, *(1,) * len(shape)), (num_markers, *shape))
        return cls(jnp.full(ranks.shape, jnp.inf, dtype), ranks)

    def add(self, x: Array, num_before: Array, fractions: np.ndarray) -> QuantileMarkers:
        """Return the markers with one more value, which ``num_before`` others precede."""
        heights, ranks = list(self.heights), list(self.ranks)
        last = len(heights) - 1
        # The first values are the markers themselves, sorted by insertion.
        below = [jnp.full_like(x, -jnp.inf), *heights[:-1]]
        inserted = [jnp.clip(x, b, h) for b, h in zip(below, heights, strict=True)]
        for i in range(1, last + 1):
            ranks[i] = ranks[i] + ((x < heights[i]) | (i == last))
        heights[0], heights[last] = jnp.minimum(heights[0], x), jnp.maximum(heights[last], x)
        for i in range(1, last):
            lower, height, upper = heights[i - 1 : i + 2]
            gap_below, gap_above = ranks[i] - ranks[i - 1], ranks[i + 1] - ranks[i]
            lag = 1.0 + num_before * float(fractions[i]) - ranks[i]
            move = jnp.where((lag >= 1.0) & (gap_above > 1), 1, 0)
            move = jnp.where((lag <= -1.0) & (gap_below > 1), -1, move)
            slope_below, slope_above = (height - lower) / gap_below, (upper - height) / gap_above
            curved = (gap_below + move) * slope_above + (gap_above - move) * slope_below
            parabolic = height + move * curved / (gap_below + gap_above)
            linear = height + move * jnp.where(move > 0, slope_above, slope_below)
            is_ordered = (lower < parabolic) & (parabolic < upper)
            heights[i] = jnp.where(move == 0, height, jnp.where(is_ordered, parabolic, linear))
            ranks[i] = ranks[i] + move
        updated = QuantileMarkers(jnp.stack(heights), jnp.stack(ranks))
        filling = QuantileMarkers(jnp.stack(inserted), self.ranks)
        return jax.tree.map(lambda a, b: jnp.where(num_before <= last, a, b), filling, updated)


def get_marker_fractions(probabilities: Sequence[float]) -> np.ndarray:
    """Return the fractions of values below the markers: 0, 1, the probabilities, and midpoints."""
    ends = [0.0, *sorted(probabilities), 1.0]
    return np.array([0.0, *(x for a, b in pairwise(ends) for x in ((a + b) / 2.0, b))])


class SiteSums(NamedTuple):
    """Sums of one site.

    - **reference** - the chain's first value after the warm-up.
    - **mean** - mean deviation from it by batch, shape ``(batches, ...)``.
    - **m2** - weighted sum of squared deviations from that mean by batch, of the same shape.
    - **markers** - markers of quantiles, or None.
    """

    reference: Array
    mean: Array
    m2: Array
    markers: QuantileMarkers | None


class JointSums(NamedTuple):
    """Mean and weighted co-moments of the deviations of several sites' coordinates.

    - **weight** - sum of the weights.
    - **mean** - shape ``(n,)``.
    - **comoment** - shape ``(n, n)``.
    """

    weight: Array
    mean: Array
    comoment: Array


class SiteMoments(NamedTuple):
    """Running moments of one chain.

    - **num_iterations** - iterations so far, without those of the warm-up.
    - **weight** - sum of the weights of each batch, shape ``(batches,)``.
    - **sites** - the sums of each site.
    - **joint** - the sums of the sites of the covariance matrix, or None.
    """

    num_iterations: Array
    weight: Array
    sites: dict[str, SiteSums]
    joint: JointSums | None

    @classmethod
    def zeros(cls, shapes: Mapping[str, Any], options: Options, dtype: Any) -> SiteMoments:
        """Return the moments of a chain before its first iteration.

        :param shapes: arrays, or their shapes, by site.
        """
        num_batches = count_moment_batches(sum(x.size for x in shapes.values()))
        num_markers = len(get_marker_fractions(options.running_quantiles))
        sites = {
            name: SiteSums(
                jnp.zeros(x.shape, dtype),
                jnp.zeros((num_batches, *x.shape), dtype),
                jnp.zeros((num_batches, *x.shape), dtype),
                QuantileMarkers.zeros(num_markers, x.shape, dtype)
                if options.running_quantiles
                else None,
            )
            for name, x in shapes.items()
        }
        joint = None
        if options.running_covariances:
            n = sum(shapes[name].size for name in options.running_covariances)
            joint = JointSums(jnp.zeros((), dtype), jnp.zeros(n, dtype), jnp.zeros((n, n), dtype))
        return cls(jnp.array(0), jnp.zeros(num_batches, dtype), sites, joint)

    def add(
        self, values: Mapping[str, Array], weight: Array, is_sampling: Array, options: Options
    ) -> SiteMoments:
        """Return the moments with the values of one more iteration.

        :param weight: weight of the iteration's draw, not negative.
        :param is_sampling: False in warm-up, whose iterations are left out.
        """
        index = compute_batch_index(self.num_iterations, len(self.weight))
        weight = jnp.where(is_sampling, weight, 0.0).astype(self.weight.dtype)
        batch_weight = self.weight[index] + weight
        fractions = get_marker_fractions(options.running_quantiles)
        sites, deviations = {}, {}
        for name, sums in self.sites.items():
            x = values[name].astype(sums.mean.dtype)
            reference = jnp.where(self.num_iterations == 0, x, sums.reference)
            deviations[name] = x - reference
            mean, m2 = _update(
                sums.mean[index], sums.m2[index], deviations[name], weight, batch_weight, jnp.square
            )
            markers = sums.markers
            if markers is not None:
                added = markers.add(x, self.num_iterations, fractions)
                markers = jax.tree.map(lambda a, b: jnp.where(weight > 0.0, a, b), added, markers)
            sites[name] = SiteSums(
                reference, sums.mean.at[index].set(mean), sums.m2.at[index].set(m2), markers
            )
        joint = self.joint
        if joint is not None:
            x = jnp.concatenate([deviations[n].ravel() for n in options.running_covariances])
            total = joint.weight + weight
            joint = JointSums(
                total,
                *_update(joint.mean, joint.comoment, x, weight, total, lambda x: jnp.outer(x, x)),
            )
        return SiteMoments(
            self.num_iterations + is_sampling, self.weight.at[index].set(batch_weight), sites, joint
        )


def _update(
    mean: Array,
    m2: Array,
    x: Array,
    weight: Array,
    total: Array,
    square: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Return mean and weighted sum of squared deviations with one more value.

    :param total: sum of the weights, this one included.
    :param square: returns the squares, or the products, of deviations.
    """
    share = weight / jnp.where(total > 0.0, total, 1.0)
    # Values that are not finite, in warm-up, have weight zero.
    delta = jnp.where(weight > 0.0, x - mean, 0.0)
    return mean + share * delta, m2 + weight * (1.0 - share) * square(delta)
