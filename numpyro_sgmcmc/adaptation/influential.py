r"""Detection of influential observations, which every minibatch then includes.

A covariate that is non-zero in five of 50,000 observations is informed by these alone. A minibatch
of a hundred contains one of them once in a hundred steps, with weight five hundred, and no step
size makes up for that noise. If every minibatch includes them, with weight one so that the gradient
stays unbiased, they cause no noise.

Influential (high-leverage) observations are those whose share of the potential is far from linear
over the posterior. About a reference position a, observation i has

.. math:: u_i(a + \delta) = u_i(a) + \delta \cdot \nabla u_i(a) + r_i(\delta).

Control variates take the first two terms exactly. The even part of the remainder,
:math:`\tfrac12(u_i(a + \delta) + u_i(a - \delta)) - u_i(a)`, is computed without derivatives. With
m of N observations in every minibatch of size B, the variance of the gradient noise is proportional
to

.. math:: \frac{N - m}{B - m} \sum_{i > m} \operatorname{Var} r_i,

observations in decreasing order of :math:`\operatorname{Var} r_i`. Its minimum over m is the number
of influential observations.

In a hierarchy with a skewed likelihood, such as that of counts, a variance over typical positions
is not enough. Of thousands of effects, some are three posterior SDs from their centers at every
step. There, in a group of few observations, the gradient of one that a minibatch weights by N / B
may change an effect's velocity by several of its SDs, and the chain leaves the posterior.
:func:`choose_num_included` includes the observations with the largest gradients, and the step size
is limited by the largest of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.adaptation.budget import HIGH_DIM
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.model.potential import IncludedRows, Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Pairs of positions a + delta, a - delta at which each observation is evaluated.
_NUM_ANTITHETIC_PAIRS = 6

# Observations evaluated in one call: a bound on memory, higher where a call reads all effects.
_MAX_ROWS_PER_CALL, _MAX_ROWS_PER_CALL_HIGH_DIM = 2**13, 2**17

# Observations are included in every minibatch if that at least halves the noise, and if the noise
# without them has a variance, summed over preconditioned coordinates, that shortens the step.
_MAX_REMAINING_NOISE_FRACTION = 0.5
_MIN_GRADIENT_NOISE_VARIANCE = 0.02

# Largest fraction of a minibatch that is included rather than sampled.
_MAX_INFLUENTIAL_BATCH_FRACTION = 0.5

# Distance of effects from their centers at which gradients are compared with their expansions, in
# posterior SDs: one of 370 normal draws is as far.
_TAIL_DISTANCE_SD = 3.0
# Largest change of an effect's velocity that the gradient of one sampled observation may make in
# one step, in SDs of the velocity. In a model with a location and a scale of each of 400 groups,
# such changes left no draw beyond ten posterior SDs (of 3.2 million); with changes of two SDs, some
# were hundreds of SDs away.
_MAX_VELOCITY_CHANGE_SD = 1.0
_MIN_GRADIENT = 1e-30  # in place of zero


@dataclass(frozen=True)
class InfluentialRows:
    """Observations that every minibatch includes.

    - **included** - their numbers, by plate.
    - **max_step_size** - the step size at which no other observation changes the velocity of an
      effect by more than its SD.
    """

    included: IncludedRows = ()
    max_step_size: float = math.inf


def find_influential_rows(
    potential: Potential,
    arguments: Arguments,
    variational_fit: MeanField,
    rng: np.random.Generator,
) -> IncludedRows:
    """Return the rows that every minibatch has to include, by plate.

    It takes one pass over the rows, without derivatives. Not supported (and empty) for several
    plates, rows outside of memory, randomised likelihoods, local latent variables, and very high
    dimension.
    """
    if not _is_supported(potential, arguments) or potential.dim > HIGH_DIM:
        return ()
    variances = _compute_remainder_variances(potential, arguments, variational_fit, rng)
    num_influential = choose_num_influential(variances, potential.plates[0].subsample_size)
    return _name_rows(potential, np.argsort(-variances, kind="stable")[:num_influential])


def find_influential_rows_of_groups(
    potential: Potential,
    arguments: Arguments,
    hierarchy: Preconditioner,
    rng: np.random.Generator,
    step_size: float,
) -> InfluentialRows:
    """Return the rows that every minibatch of a hierarchy has to include.

    A row depends on the effects of a few groups, so that its cost does not grow with the dimension.
    Where the effects have third derivatives, this takes a second pass.

    :param hierarchy: coordinates of the effects.
    :param step_size: the one that is wanted.
    """
    if not _is_supported(potential, arguments):
        return InfluentialRows()
    batch_size = potential.plates[0].subsample_size
    fit = MeanField(hierarchy.center, hierarchy.sds)
    variances = _compute_remainder_variances(potential, arguments, fit, rng)
    num_influential = choose_num_influential(variances, batch_size)
    by_variance = np.argsort(-variances, kind="stable")[:num_influential]
    if not _is_skewed(hierarchy):
        return InfluentialRows(_name_rows(potential, by_variance))
    gradients = _compute_tail_gradients(potential, arguments, hierarchy)
    num_large = choose_num_included(gradients, batch_size, step_size)
    by_gradient = np.argsort(-gradients, kind="stable")[:num_large]
    others = by_variance[~np.isin(by_variance, by_gradient)]
    max_included = int(_MAX_INFLUENTIAL_BATCH_FRACTION * batch_size)
    rows = np.concatenate([by_gradient, others])[:max_included]
    largest = np.delete(gradients, rows).max()
    max_step_size = _limit_step_size(largest, len(gradients), batch_size, len(rows))
    return InfluentialRows(_name_rows(potential, rows), float(max_step_size))


def _compute_remainder_variances(
    potential: Potential, arguments: Arguments, fit: MeanField, rng: np.random.Generator
) -> np.ndarray:
    """Return the variances of all observations' even remainders over draws of a normal fit."""
    plate = potential.plates[0]
    normals = rng.standard_normal((_NUM_ANTITHETIC_PAIRS, potential.dim))
    mean, deviations = fit.mean, fit.sd * normals
    positions = np.concatenate([mean[None], mean + deviations, mean - deviations])
    positions = positions.astype(potential.dtype)
    variances = np.zeros(plate.size)
    for rows in _split_rows(potential):
        variances[rows] = _evaluate_remainder_variances(
            potential, arguments, positions, {plate.name: rows}
        )
    return np.where(np.isfinite(variances), variances, 0.0)


def _compute_tail_gradients(
    potential: Potential, arguments: Arguments, hierarchy: Preconditioner
) -> np.ndarray:
    """Return the largest gradients of all observations that their expansions do not have.

    They are those of effects in the tails, in units of the effects' inverse posterior SDs.
    """
    plate = potential.plates[0]
    center = hierarchy.center.astype(potential.dtype)
    probes = _make_unit_effects(hierarchy).astype(potential.dtype)
    gradients = np.zeros(plate.size)
    for rows in _split_rows(potential):
        gradients[rows] = _evaluate_tail_gradients(
            potential, arguments, center, probes, {plate.name: rows}
        )
    return np.where(np.isfinite(gradients), gradients, 0.0)


def _make_unit_effects(hierarchy: Preconditioner) -> np.ndarray:
    """Return displacements of each effect of all groups by one posterior SD, given the others.

    Two effects of one group are displaced along the columns of a factor of their covariance.
    """
    layout, factors = hierarchy.factor.layout, hierarchy.factor.effect_factors
    effects, shared = layout.split(layout.make_probes(with_shared=False))
    effects = np.einsum("abg,pbg->pag", factors, effects)
    return np.asarray(hierarchy.expansion_to_displacement(layout.merge(effects, shared)))


def _name_rows(potential: Potential, rows: np.ndarray) -> IncludedRows:
    return ((potential.plates[0].name, tuple(np.sort(rows).tolist())),) if rows.size else ()


def precompile_influential_rows(
    potential: Potential, arguments: Arguments, hierarchy: Preconditioner | None = None
) -> None:
    """Start the compilation of :func:`find_influential_rows`, or of that of groups."""
    is_too_large = hierarchy is None and potential.dim > HIGH_DIM
    if not _is_supported(potential, arguments) or is_too_large:
        return
    plate = potential.plates[0]
    num_positions = 2 * _NUM_ANTITHETIC_PAIRS + 1
    positions = jax.ShapeDtypeStruct((num_positions, potential.dim), potential.dtype)
    rows = jax.ShapeDtypeStruct((_count_rows_per_call(potential),), np.int32)
    indices = {plate.name: rows}
    aot_compile(_evaluate_remainder_variances, potential, arguments, positions, indices)
    if hierarchy is not None and _is_skewed(hierarchy):
        center = jax.ShapeDtypeStruct((potential.dim,), potential.dtype)
        num_probes = hierarchy.factor.layout.num_effect_probes
        probes = jax.ShapeDtypeStruct((num_probes, potential.dim), potential.dtype)
        aot_compile(_evaluate_tail_gradients, potential, arguments, center, probes, indices)


def _count_rows_per_call(potential: Potential) -> int:
    is_high_dim = potential.dim > HIGH_DIM
    max_rows = _MAX_ROWS_PER_CALL_HIGH_DIM if is_high_dim else _MAX_ROWS_PER_CALL
    return min(max_rows, potential.plates[0].size)


def _split_rows(potential: Potential) -> list[np.ndarray]:
    """Return the numbers of all rows in parts of the same length, of which the last may overlap."""
    size, num_rows = potential.plates[0].size, _count_rows_per_call(potential)
    starts = [min(start, size - num_rows) for start in range(0, size, num_rows)]
    return [np.arange(start, start + num_rows, dtype=np.int32) for start in starts]


def _is_skewed(hierarchy: Preconditioner) -> bool:
    """Return True if the likelihood is so skewed that the effects have third derivatives."""
    return hierarchy.reference_hessian.third_derivatives is not None


def _is_supported(potential: Potential, arguments: Arguments) -> bool:
    """Return True if the influence of single observations can be computed and matters."""
    return (
        not (arguments.host_arrays or arguments.sharded_arrays)
        and potential.shards is None
        and len(potential.plates) == 1
        and potential.has_minibatches
        and not potential.is_stochastic
        and potential.local_latents is None
    )


@partial(jax.jit, static_argnames="potential")
def _evaluate_remainder_variances(
    potential: Potential, arguments: Arguments, positions: Array, indices: Indices
) -> Array:
    """Return the variances of some observations' even remainders about the first position."""
    values = jax.lax.map(lambda q: potential.pointwise_potentials(q, indices, arguments), positions)
    plus, minus = jnp.split(values[1:], 2)
    return jnp.var((plus + minus) / 2.0 - values[0], axis=0, ddof=1)


@partial(jax.jit, static_argnames="potential")
def _evaluate_tail_gradients(
    potential: Potential,
    arguments: Arguments,
    center: Array,
    unit_effects: Array,
    indices: Indices,
) -> Array:
    """Return the largest remainders of some observations' gradients by effects in the tails.

    The remainder is that of the expansion to second order about the center: its norm over the
    effects, and the largest over displacements of each effect and of each pair of effects.
    """

    def compute_remainders(displacement: Array, unit_effect: Array) -> Array:
        """Return the remainders of derivatives along ``unit_effect``, for both directions."""

        def derive(t: Array) -> Array:
            def evaluate(q: Array) -> Array:
                return potential.pointwise_potentials(q, indices, arguments)

            return jax.jvp(evaluate, (center + t * displacement,), (unit_effect,))[1]

        def derive_twice(t: Array) -> tuple[Array, Array]:
            return jax.jvp(derive, (t,), (jnp.ones_like(t),))

        zero = jnp.zeros((), center.dtype)
        (at_center, first), (_, second) = jax.jvp(derive_twice, (zero,), (zero + 1.0,))
        distances = jnp.array([_TAIL_DISTANCE_SD, -_TAIL_DISTANCE_SD], center.dtype)
        t = distances[:, None]
        return jax.lax.map(derive, distances) - (at_center + t * first + t**2 / 2.0 * second)

    def compute_norms(displacement: Array) -> Array:
        remainders = jax.lax.map(partial(compute_remainders, displacement), unit_effects)
        return jnp.sqrt(jnp.square(remainders).sum(0)).max(0)

    pairs = [(a + sign * b) / 2**0.5 for a, b in combinations(unit_effects, 2) for sign in (1, -1)]
    return jax.lax.map(compute_norms, jnp.stack([*unit_effects, *pairs])).max(0)


def choose_num_included(gradients: np.ndarray, batch_size: int, step_size: float) -> int:
    """Return how many of the observations with the largest gradients minibatches have to include.

    It is the smallest number with which the gradients of all others allow the step size, or else
    the longest one.

    :param gradients: of an observation of weight one.
    """
    max_included = int(_MAX_INFLUENTIAL_BATCH_FRACTION * batch_size)
    largest = -np.sort(-gradients)[: max_included + 1]
    num_included = np.arange(len(largest))
    max_step_sizes = _limit_step_size(largest, len(gradients), batch_size, num_included)
    return int(np.argmax(np.minimum(max_step_sizes, step_size)))


def _limit_step_size(largest: Any, size: int, batch_size: int, num_included: Any) -> Any:
    """Return the step size that the largest gradient of an observation of weight one allows.

    The weight of a sampled observation grows with the number of those included.
    """
    weight = (size - num_included) / (batch_size - num_included)
    return _MAX_VELOCITY_CHANGE_SD / np.maximum(weight * largest, _MIN_GRADIENT)


def choose_num_influential(remainder_variances: np.ndarray, batch_size: int) -> int:
    """Return how many of the observations with these variances every minibatch has to include."""
    size = len(remainder_variances)
    max_included = int(_MAX_INFLUENTIAL_BATCH_FRACTION * batch_size)
    decreasing = -np.sort(-remainder_variances)
    included_sums = np.concatenate([[0.0], np.cumsum(decreasing[:max_included])])
    remaining = np.maximum(remainder_variances.sum() - included_sums, 0.0)
    num = np.arange(len(remaining))
    # For a quadratic remainder r = d'Hd / 2 with standard normal d, Var r = tr(H^2) / 2, and
    # tr(H^2) is the variance of its gradient Hd: hence the factor 2.
    noise = 2.0 * (size - num) / (batch_size - num) * remaining
    best = int(np.argmin(noise))
    is_worth_it = (
        noise[0] > _MIN_GRADIENT_NOISE_VARIANCE
        and noise[best] < _MAX_REMAINING_NOISE_FRACTION * noise[0]
    )
    return best if is_worth_it else 0
