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
"""

from __future__ import annotations

from functools import partial

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


def find_influential_rows(
    potential: Potential,
    arguments: Arguments,
    variational_fit: MeanField,
    rng: np.random.Generator,
    has_groups: bool = False,
) -> IncludedRows:
    """Return the rows that every minibatch has to include, by plate.

    It takes one pass over the rows, without derivatives. Not supported (and empty) for several
    plates, rows outside of memory, randomised likelihoods, local latent variables, and very high
    dimension without groups.

    :param has_groups: whether a row depends on the effects of a few groups, so that its cost does
        not grow with the dimension.
    """
    if not _is_supported(potential, arguments, has_groups):
        return ()
    plate = potential.plates[0]
    normals = rng.standard_normal((_NUM_ANTITHETIC_PAIRS, potential.dim))
    mean, deviations = variational_fit.mean, variational_fit.sd * normals
    positions = np.concatenate([mean[None], mean + deviations, mean - deviations])
    positions = positions.astype(potential.dtype)
    num_rows = _count_rows_per_call(potential)
    variances = np.zeros(plate.size)
    for start in range(0, plate.size, num_rows):
        start = min(start, plate.size - num_rows)  # all calls have one shape
        rows = np.arange(start, start + num_rows, dtype=np.int32)
        variances[rows] = _evaluate_remainder_variances(
            potential, arguments, positions, {plate.name: rows}
        )
    variances = np.where(np.isfinite(variances), variances, 0.0)
    num_influential = choose_num_influential(variances, plate.subsample_size)
    if not num_influential:
        return ()
    influential = np.sort(np.argsort(-variances, kind="stable")[:num_influential])
    return ((plate.name, tuple(influential.tolist())),)


def precompile_influential_rows(
    potential: Potential, arguments: Arguments, has_groups: bool = False
) -> None:
    """Start the compilation of :func:`find_influential_rows`."""
    if not _is_supported(potential, arguments, has_groups):
        return
    plate = potential.plates[0]
    num_positions = 2 * _NUM_ANTITHETIC_PAIRS + 1
    positions = jax.ShapeDtypeStruct((num_positions, potential.dim), potential.dtype)
    rows = jax.ShapeDtypeStruct((_count_rows_per_call(potential),), np.int32)
    aot_compile(_evaluate_remainder_variances, potential, arguments, positions, {plate.name: rows})


def _count_rows_per_call(potential: Potential) -> int:
    is_high_dim = potential.dim > HIGH_DIM
    max_rows = _MAX_ROWS_PER_CALL_HIGH_DIM if is_high_dim else _MAX_ROWS_PER_CALL
    return min(max_rows, potential.plates[0].size)


def _is_supported(potential: Potential, arguments: Arguments, has_groups: bool) -> bool:
    """Return True if the influence of single observations can be computed and matters."""
    return (
        not (arguments.host_arrays or arguments.sharded_arrays)
        and potential.shards is None
        and len(potential.plates) == 1
        and potential.has_minibatches
        and not potential.is_stochastic
        and potential.local_latents is None
        and (has_groups or potential.dim <= HIGH_DIM)
    )


@partial(jax.jit, static_argnames="potential")
def _evaluate_remainder_variances(
    potential: Potential, arguments: Arguments, positions: Array, indices: Indices
) -> Array:
    """Return the variances of some observations' even remainders about the first position."""
    values = jax.lax.map(lambda q: potential.pointwise_potentials(q, indices, arguments), positions)
    plus, minus = jnp.split(values[1:], 2)
    return jnp.var((plus + minus) / 2.0 - values[0], axis=0, ddof=1)


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
