"""Gradients of the posterior at draws, after the run.

In a stationary chain momentum changes average to zero whatever its bias, so that sums of the
gradients that moved the chain miss some of it. Gradients at the draws themselves, on minibatches
that no step has used, do not.

The bias of means by gradient noise is in neither: the mean gradient of a stationary chain is zero
whatever the noise. Unless the posterior is Gaussian, noise that widens many coordinates moves a
coordinate that they depend on, such as the scale of hundreds of effects, by the third derivatives
of the potential. :func:`predict_noise_mean_bias` predicts it
(:func:`~numpyro_sgmcmc.adaptation.gradient_noise.compute_mean_biases_by_noise`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    BulkPositions,
    iter_weighted_minibatches,
    sample_minibatch_indices,
)
from numpyro_sgmcmc.adaptation.budget import HIGH_DIM, count_rows_per_gradient
from numpyro_sgmcmc.adaptation.gradient_noise import (
    compute_max_curvatures,
    compute_mean_biases_by_noise,
    shrink_mean_bias,
)
from numpyro_sgmcmc.adaptation.preconditioning import thin_draws
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.diagnostics.diagnosis import MEAN_BIAS_TOLERANCE
from numpyro_sgmcmc.diagnostics.predictive import get_evenly_spaced_indices
from numpyro_sgmcmc.diagnostics.run_data import RunData, make_thinning_slice
from numpyro_sgmcmc.diagnostics.stein_estimates import Estimate, GradientsAtDraws
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Draws at which gradients are taken, within the bound on rows below.
_MAX_GRADIENT_DRAWS, _MIN_GRADIENT_DRAWS = 1_024, 64
# Row gradients and minibatches of all draws together: a few seconds of computation.
_MAX_GRADIENT_ROWS, _MAX_GRADIENT_BATCHES = 2**24, 2**15
# Numbers in the gradients of all minibatches (1 GiB in float64): a bound on memory.
_MAX_GRADIENT_ENTRIES = 2**27
# Draws at which the largest curvature is computed, and power iterations at each.
_NUM_CURVATURE_DRAWS, _NUM_CURVATURE_ITERATIONS = 128, 3
# Step of finite differences of the gradient, in preconditioned coordinates (posterior SDs).
_CURVATURE_STEP = 0.01
# Draws at which the mean bias by gradient noise is predicted.
_NUM_NOISE_BIAS_POSITIONS = 32
# Standard errors by which the prediction is shrunk.
_NUM_NOISE_BIAS_ERRORS = 3.0
# Standard error of the prediction, relative to it: bounds terms of higher order in the noise.
_NOISE_BIAS_RELATIVE_ERROR = 0.25


def compute_full_gradients_at_draws(run: RunData, num_draws: int) -> GradientsAtDraws:
    """Compute gradients on all rows at evenly spaced draws, ``num_draws`` in all chains."""
    positions = run.draws[:, make_thinning_slice(run.draws, num_draws)]
    flat = positions.reshape(-1, positions.shape[-1])
    gradients = run.kernel.full_gradients(flat, run.arguments)
    return GradientsAtDraws.from_arrays(positions, gradients)


def compute_gradients_at_draws(run: RunData, draws: np.ndarray) -> GradientsAtDraws | None:
    """Compute minibatch gradients at evenly spaced draws, and the largest curvature at some.

    :return: None if that is expensive: for rows that are not in memory, a randomised likelihood
        and very many parameters.
    """
    potential, arguments = run.kernel.potential, run.arguments
    has_remote_rows = arguments.host_arrays or arguments.sharded_arrays
    if has_remote_rows or potential.is_stochastic or potential.dim > HIGH_DIM:
        return None
    included_rows = () if run.adaptation is None else run.adaptation.included_rows
    batched = BatchedGradients(potential, arguments, included_rows=included_rows)
    batch_size = count_rows_per_gradient(potential, batched.arguments)
    num_draws = int(
        np.clip(_MAX_GRADIENT_ROWS // (2 * batch_size), _MIN_GRADIENT_DRAWS, _MAX_GRADIENT_DRAWS)
    )
    positions = thin_draws(draws, num_draws)
    flat = positions.reshape(-1, potential.dim)
    chain_index = np.repeat(np.arange(len(positions)), positions.shape[1])
    gradients = _estimate_gradients(batched, run.preconditioners, flat, chain_index)
    indices = get_evenly_spaced_indices(len(flat), _NUM_CURVATURE_DRAWS)
    curvature = np.zeros(len(indices))
    for chains in _group_chains_by_center(run.preconditioners):
        in_group = np.isin(chain_index[indices], chains)
        preconditioner, group_indices = run.preconditioners[chains[0]], indices[in_group]
        curvature[in_group] = compute_max_curvatures(
            batched,
            preconditioner,
            preconditioner.from_position(flat[group_indices]),
            preconditioner.apply_transpose(gradients[group_indices]),
            _NUM_CURVATURE_ITERATIONS,
            _CURVATURE_STEP,
        )
    return GradientsAtDraws(positions, gradients.reshape(positions.shape), indices, curvature)


def _group_chains_by_center(preconditioners: Sequence[Preconditioner]) -> list[list[int]]:
    """Return the chains that share their preconditioned coordinates."""
    groups: dict[bytes, list[int]] = {}
    for chain, preconditioner in enumerate(preconditioners):
        groups.setdefault(preconditioner.center.tobytes(), []).append(chain)
    return list(groups.values())


def _estimate_gradients(
    batched: BatchedGradients,
    preconditioners: Sequence[Preconditioner],
    positions: np.ndarray,
    chain_index: np.ndarray,
) -> np.ndarray:
    """Return unbiased gradients by control variates, on independent minibatches, shape ``(n, d)``.

    They are exact for few rows.
    """
    plates, dim = batched.potential.plates, batched.potential.dim
    batch_size = sum(p.subsample_size for p in plates)
    if not batch_size:
        return batched.evaluate_on_subset(positions)[1]
    num = len(positions)
    max_batches = min(
        _MAX_GRADIENT_BATCHES, _MAX_GRADIENT_ENTRIES // dim, _MAX_GRADIENT_ROWS // batch_size
    )
    batches_per_position = max(1, max_batches // (2 * num))
    if sum(p.batches_per_epoch for p in plates) <= 2 * batches_per_position:
        all_rows = list(iter_weighted_minibatches(batched.plate_groups))
        return batched.weighted_mean(positions, all_rows)[1]
    rng = np.random.default_rng(0)
    minibatches = sample_minibatch_indices(
        batched.step_potential, rng, (num * batches_per_position,), IIDSubsampling()
    )
    # Each minibatch is evaluated twice: at the position, and at the center of its chain.
    centers = np.stack([p.center for p in preconditioners])
    minibatch_index, is_center = np.divmod(np.arange(2 * num * batches_per_position), 2)
    draw_index = minibatch_index // batches_per_position
    weight = (1 - 2 * is_center) / batches_per_position
    center_gradients = np.stack([p.reference_gradient for p in preconditioners])
    for chains in _group_chains_by_center(preconditioners):
        if not center_gradients[chains[0]].any():  # a minibatch gradient has no use for it
            center_gradients[chains] = batched.full_gradient(centers[chains[0]])
    gradients = center_gradients[chain_index]
    for part, _, part_gradients in batched.evaluate_minibatches(
        np.concatenate([positions, centers]),
        minibatches,
        np.where(is_center, num + chain_index[draw_index], draw_index),
        minibatch_index,
        batched.step_potential,
    ):
        np.add.at(gradients, draw_index[part], weight[part, None] * part_gradients)
    return gradients


def predict_noise_mean_bias(run: RunData, draws: np.ndarray) -> Estimate:
    """Predict the bias of each mean by gradient noise, in posterior SDs, shape ``(d,)``.

    Third derivatives with heavy tails, as of a horseshoe prior, differ so much between draws that
    their mean is noise.

    :return: zeros where there is none, or where it cannot be predicted; NaN with an error of zero
        where predictions at draws differ by too much.
    """
    potential, adaptation = run.kernel.potential, run.adaptation
    options = run.kernel.options
    is_known = options.noise_compensation or potential.is_stochastic
    has_noise = potential.has_minibatches and not is_known
    # Noise acts in coordinates that are preconditioned by one mode's covariance.
    if (
        not has_noise
        or potential.dim > HIGH_DIM
        or adaptation is None
        or adaptation.trace is None
        or not adaptation.has_dominant_mode
        or not options.adapt_mass_matrix
        or options.inverse_mass_matrix is not None
        or run.center_offsets.any()  # chains in several modes
    ):
        return Estimate(np.zeros(potential.dim), np.zeros(potential.dim))
    flat = draws.reshape(-1, potential.dim)
    indices = np.linspace(0, len(flat) - 1, _NUM_NOISE_BIAS_POSITIONS).astype(int)
    preconditioner = run.preconditioners[0]
    batched = BatchedGradients(potential, run.arguments, included_rows=adaptation.included_rows)
    q = preconditioner.from_position(flat[indices])
    # In an epoch a part of the noise cancels: the prediction for the measured noise includes that.
    stats, dynamics, step_size = adaptation.noise_stats, run.kernel.dynamics, run.step_size
    fraction = stats.position_dependent_fraction
    inflation_per_variance = dynamics.variance_inflation(1.0, step_size, fraction)
    measured = dynamics.variance_inflation(stats.variance, step_size, fraction)
    inflation_per_variance *= (
        stats.predict_variance_inflation(dynamics, step_size) / measured if measured > 0.0 else 0.0
    )
    biases = compute_mean_biases_by_noise(
        BulkPositions(batched, preconditioner, q),
        adaptation.estimator,
        adaptation.subsampling,
        inflation_per_variance,
        np.random.default_rng(0),
    )
    mean_bias, standard_error = shrink_mean_bias(biases.mean(1), _NUM_NOISE_BIAS_ERRORS)
    error = np.hypot(_NOISE_BIAS_RELATIVE_ERROR * mean_bias, standard_error * (mean_bias != 0.0))
    is_noise = (mean_bias == 0.0) & (standard_error > MEAN_BIAS_TOLERANCE)
    return Estimate(np.where(is_noise, np.nan, mean_bias), error)
