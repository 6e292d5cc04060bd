r"""Statistics of the gradient noise, its effect on the posterior, and the largest curvature.

Everything is in preconditioned coordinates and estimated from minibatch gradients at positions in
the bulk of the posterior (:class:`~numpyro_sgmcmc.adaptation.batched_gradients.BulkPositions`), of
which the first few are used:

- :class:`GradientNoiseStats` holds the variance of the gradient noise and how much it depends on
  the position; from these follows the inflation of the posterior variance at a step size.
- :func:`measure_noise` measures these statistics for each gradient estimator.
- :func:`predict_mean_bias_from_noise` and :func:`predict_mean_bias_per_variance_inflation` predict
  the bias of means that a wider distribution causes where the posterior is not Gaussian.
- :func:`measure_noise_covariance` is the covariance that noise compensation subtracts.
- :func:`estimate_max_curvature` bounds the stable step size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    BulkPositions,
    sample_minibatch_indices,
    shuffle_minibatches,
)
from numpyro_sgmcmc.adaptation.coupling import NO_COUPLING, Coupling
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import (
    ContiguousSubsampling,
    IIDSubsampling,
    Indices,
    Subsampling,
)
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator, make_gradient_fn
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Smallest fraction of the variance inflation that an epoch leaves of position-dependent noise: in
# simulated epochs of 15 minibatches the prediction was off by this much.
_MIN_EPOCH_VARIANCE_FRACTION = 0.1
# Standard errors by which a coordinate's noise variance must differ between positions to count.
_NUM_STANDARD_ERRORS_OF_VARIANCE = 3.0
_NUM_STANDARD_ERRORS_OF_EFFECT = 2.0  # by which one of thousands of noise variances is shrunk
# Positions and minibatches at which the noise is measured: with fewer than 16 minibatches a
# variance has an SD of more than a third of itself, so that positions are dropped first.
_MAX_NOISE_POSITIONS, _MIN_NOISE_POSITIONS, _MIN_NOISE_MINIBATCHES = 16, 4, 16
# Minibatches in all beyond which the maximum over coordinates is no longer the maximum of the
# sampling errors.
_MIN_MINIBATCHES_FOR_MAX_VARIANCE = 128
# Bounds on computing time and memory: row gradients, and entries of the minibatch gradients.
_MAX_NOISE_ROWS, _MAX_NOISE_GRADIENT_ENTRIES = 2**20, 2**26
_MAX_ROW_GRADIENT_ENTRIES = 2**22  # of single rows at one position, a bound on memory
_NUM_COUPLING_MINIBATCHES = 4  # per draw at which the noise of coupled coordinates is measured
# Prediction of the bias of means.
_MAX_MEAN_BIAS_POSITIONS = 8
_NUM_STANDARD_ERRORS_OF_BIAS = 2.0  # by which an estimate is shrunk
_PERTURBATION_SD = 0.3  # at which third derivatives show
_UNPREDICTABLE_MEAN_BIAS_SD = 100.0  # posterior SDs, for a bias that is too large to be predicted
_MAX_CURVATURE_POSITIONS_ON_ALL_ROWS = 2  # bounds passes over the data
# Finite difference of the power iteration, in preconditioned units: a tenth of a posterior SD.
_POWER_ITERATION_STEP_LENGTH = 0.1
_NONLINEAR_STEP_LENGTH = 0.5  # the same on all rows in coordinates that are not linear


class GradientNoiseStats(NamedTuple):
    """Statistics of the gradient noise that the step size depends on.

    - **variance** - variance in the noisiest coordinate, or the mean over coordinates where
      only few minibatches were seen. Of the effects of many groups it is their mean, or the
      largest that exceeds its sampling error, since the largest of thousands of estimates is mostly
      such an error.
    - **position_dependent_fraction** - SD of the variance over positions relative to its mean,
      from 0 to 1: over all coordinates, or of one that clearly varies more.
    - **mean_variance** - variance, mean over coordinates.
    - **batches_per_epoch** - minibatches of an epoch over which the noise cancels; 0 for
      independent minibatches.
    - **noise_exponent** - power of the distance from the reference position that the noise is
      proportional to.
    - **is_palindrome** - whether every second epoch reverses the one before.
    """

    variance: float
    position_dependent_fraction: float
    mean_variance: float
    batches_per_epoch: int = 0
    noise_exponent: int = 0
    is_palindrome: bool = False

    def for_epochs(self, subsampling: Subsampling, batches_per_epoch: int) -> GradientNoiseStats:
        """Return the statistics with the noise that is left over the epochs of a subsampling."""
        return self._replace(
            batches_per_epoch=0 if subsampling.is_independent else batches_per_epoch,
            is_palindrome=subsampling.is_palindrome,
        )

    def predict_variance_inflation(self, dynamics: Dynamics, step_size: float) -> float:
        """Return the predicted relative inflation of a unit posterior variance."""
        variance_inflation = dynamics.variance_inflation(
            self.variance, step_size, self.position_dependent_fraction
        )
        # A thermostat responds to the noise of each step, before any of it has cancelled.
        if self.batches_per_epoch == 0 or dynamics.has_thermostat:
            return variance_inflation
        fraction = compute_epoch_variance_fraction(
            dynamics,
            step_size,
            self.batches_per_epoch,
            self.noise_exponent,
            is_palindrome=self.is_palindrome,
        )
        # Noise that depends on the position cancels only to first order; the second-order term is
        # a quarter of the squared inflation.
        second_order = (self.noise_exponent > 0) * variance_inflation / 4.0
        return variance_inflation * (fraction + second_order)

    @classmethod
    def from_variances(
        cls,
        variances: np.ndarray,
        num_minibatches: int,
        use_noisiest_coordinate: bool,
        layout: BlockArrowLayout | None = None,
    ) -> GradientNoiseStats:
        """Build the statistics from variances at some positions, shape ``(positions, d)``.

        :param num_minibatches: minibatches that each variance was measured on.
        :param use_noisiest_coordinate: whether **variance** is the maximum over coordinates; else
            the mean.
        :param layout: of the effects of many groups.
        """
        degrees_of_freedom = max(1, len(variances) - 1)
        mean = variances.mean(0)
        total = np.square(variances - mean).sum(0) / degrees_of_freedom
        # Sampling error: the variance of a variance v of n normals is 2 v^2 / (n - 1).
        sampling = 2.0 / (num_minibatches - 1) * np.square(variances).mean(0)
        limit = 1.0 + _NUM_STANDARD_ERRORS_OF_VARIANCE * np.sqrt(2.0 / degrees_of_freedom)
        squared_mean = np.maximum(np.square(mean), np.finfo(float).tiny)
        overall = (total - sampling).sum() / squared_mean.sum()
        largest_significant = ((total - limit * sampling) / squared_mean).max()
        fraction = float(np.sqrt(np.clip(max(overall, largest_significant), 0.0, 1.0)))
        variance = mean.max() if use_noisiest_coordinate else mean.mean()
        if layout is not None:
            effects, shared = layout.split(variances)
            errors = effects.std(0, ddof=1) / np.sqrt(len(effects))
            significant = effects.mean(0) - _NUM_STANDARD_ERRORS_OF_EFFECT * errors
            variance = max(mean.mean(), significant.max(), shared.mean(0).max(initial=0.0))
        return cls(float(variance), fraction, float(mean.mean()))


NO_NOISE = GradientNoiseStats(0.0, 0.0, 0.0)

UNKNOWN_NOISE = GradientNoiseStats(float("nan"), float("nan"), float("nan"))
"""Statistics of a run whose settings are all given, so that nothing was measured."""


NoiseStatsByEstimator: TypeAlias = dict[GradientEstimator, GradientNoiseStats]


def compute_epoch_variance_fraction(
    dynamics: Dynamics,
    step_size: float,
    batches_per_epoch: int,
    noise_exponent: int = 0,
    *,
    is_palindrome: bool = False,
) -> float:
    r"""Return the fraction of the variance inflation that is left with shuffled minibatches.

    K minibatches in random order have noise of autocovariance :math:`-(1 - k/K) V / (K - 1)` at
    lag k. Positions respond as to white noise, with their autocorrelation :math:`\rho`:

    .. math:: 1 - \frac{2}{K - 1} \sum_{k=1}^{K-1} \left(1 - \frac{k}{K}\right) \rho(kh)

    A palindrome of 2K minibatches has the autocovariance :math:`-(1 - k/2K) V / (K - 1)`, and at
    odd lags :math:`V / 2(K - 1)` more: each minibatch returns once.

    The fraction is about 0 for epochs that are short compared with the relaxation time and 1 for
    long ones. With a momentum it starts as the square of the time of an epoch, with palindromes as
    its cube; they are worse for epochs longer than about 1. Noise that grows with the distance from
    the reference position changes while the position moves and cancels less: its own correlation,
    a power of the position's, is another factor under the sum.

    :param noise_exponent: power of the distance that the noise is proportional to.
    """
    if batches_per_epoch < 2:
        return 0.0
    # Beyond ten relaxation times the correlation is zero.
    num_correlated = int(10.0 * dynamics.relaxation_time(step_size) / step_size)
    period = batches_per_epoch * (1 + is_palindrome)
    lags = np.arange(1, min(period, num_correlated + 2))
    correlation = dynamics.autocorrelation(lags * step_size, step_size)
    correlation = correlation * np.abs(correlation) ** noise_exponent
    weights = 1.0 - lags / period - is_palindrome * (lags % 2) / 2.0
    fraction = 1.0 - 2.0 / (batches_per_epoch - 1) * np.sum(weights * correlation)
    return float(np.clip(fraction, _MIN_EPOCH_VARIANCE_FRACTION * (noise_exponent > 0), 1.0))


def measure_noise_by_subsampling(
    bulk: BulkPositions, estimators: Sequence[GradientEstimator], rng: np.random.Generator
) -> tuple[NoiseStatsByEstimator, NoiseStatsByEstimator]:
    """Measure the gradient noise of each estimator with iid and with contiguous minibatches."""
    iid = measure_noise(bulk, estimators, IIDSubsampling(), rng)
    return iid, measure_noise(bulk, estimators, ContiguousSubsampling(), rng)


def measure_noise(
    bulk: BulkPositions,
    estimators: Sequence[GradientEstimator],
    subsampling: Subsampling,
    rng: np.random.Generator,
) -> NoiseStatsByEstimator:
    """Measure the gradient noise of each estimator."""
    if not bulk.batched_gradients.step_potential.has_minibatches:
        return dict.fromkeys(estimators, NO_NOISE)
    bulk, num_minibatches = _limit_noise_work(bulk)
    variances = _measure_noise_variances(bulk, num_minibatches, estimators, subsampling, rng)
    is_enough = len(bulk.q) * num_minibatches >= _MIN_MINIBATCHES_FOR_MAX_VARIANCE
    layout = bulk.preconditioner.factor.layout if bulk.preconditioner.is_block_arrow else None
    return {
        estimator: GradientNoiseStats.from_variances(
            variances[estimator], num_minibatches, is_enough, layout
        )._replace(noise_exponent=estimator.noise_exponent)
        for estimator in estimators
    }


def measure_hierarchy_noise(
    bulk: BulkPositions, estimator: GradientEstimator, rng: np.random.Generator
) -> tuple[float, np.ndarray]:
    """Measure the mean noise variance of the effects of a hierarchy, in preconditioned coordinates,
    and that in each shared parameter, in posterior SDs.
    """
    preconditioner, positions = bulk.preconditioner, bulk.preconditioner.to_position(bulk.q)
    factor = preconditioner.factor
    sds = np.linalg.norm(factor.shared_factor, axis=1)
    preconditioner = preconditioner._replace(factor=replace(factor, shared_factor=np.diag(sds)))
    q = preconditioner.from_position(positions)
    bulk, num = _limit_noise_work(replace(bulk, preconditioner=preconditioner, q=q))
    (variances,) = _measure_noise_variances(bulk, num, [estimator], IIDSubsampling(), rng).values()
    effects, shared = factor.layout.split(variances.mean(0))
    return float(effects.mean()), shared


def _measure_noise_variances(
    bulk: BulkPositions,
    num_minibatches: int,
    estimators: Sequence[GradientEstimator],
    subsampling: Subsampling,
    rng: np.random.Generator,
) -> dict[GradientEstimator, np.ndarray]:
    """Return the noise variances of each estimator at each position, shape ``(n, d)``."""
    potential = bulk.batched_gradients.step_potential
    minibatches = sample_minibatch_indices(potential, rng, (num_minibatches,), subsampling)
    estimates = _evaluate_estimates(bulk, estimators, minibatches)
    return {estimator: gradients.var(1, ddof=1) for estimator, gradients in estimates.items()}


def measure_order_noise_ratio(bulk: BulkPositions, estimator: GradientEstimator) -> float:
    """Return the noise variance of contiguous minibatches over that of the same rows shuffled.

    Both contain the same influential rows, whatever their number, so that only the order differs.
    """
    rng = np.random.default_rng(0)  # so that the warm-up's other choices do not change
    potential = bulk.batched_gradients.step_potential
    bulk, num_minibatches = _limit_noise_work(bulk)
    blocks = sample_minibatch_indices(potential, rng, (num_minibatches,), ContiguousSubsampling())
    contiguous, shuffled = (
        _evaluate_estimates(bulk, (estimator,), minibatches)[estimator].var(1).mean()
        for minibatches in (blocks, shuffle_minibatches(potential, rng, blocks))
    )
    return float(contiguous / max(shuffled, np.finfo(float).tiny))


def _limit_noise_work(bulk: BulkPositions) -> tuple[BulkPositions, int]:
    """Return the positions, and the number of minibatches, on which noise is measured."""
    potential = bulk.batched_gradients.potential
    num_positions = min(len(bulk.q), _MAX_NOISE_POSITIONS)
    batch_size = sum(p.subsample_size for p in potential.plates)
    max_gradients = min(_MAX_NOISE_ROWS // batch_size, _MAX_NOISE_GRADIENT_ENTRIES // potential.dim)
    num_minibatches = max_gradients // num_positions
    if num_minibatches < _MIN_NOISE_MINIBATCHES:
        num_positions = min(len(bulk.q), _MIN_NOISE_POSITIONS)
    max_minibatches = bulk.batched_gradients.budget.max_noise_minibatches
    num_minibatches = int(np.clip(num_minibatches, _MIN_NOISE_MINIBATCHES, max_minibatches))
    return replace(bulk, q=bulk.q[:num_positions]), num_minibatches


def _evaluate_estimates(
    bulk: BulkPositions, estimators: Sequence[GradientEstimator], minibatches: Indices
) -> dict[GradientEstimator, np.ndarray]:
    """Return preconditioned gradient estimates up to a constant, shape ``(n, minibatches, d)``."""
    potential, preconditioner = bulk.batched_gradients.step_potential, bulk.preconditioner
    num_minibatches = len(next(iter(minibatches.values())))
    eval_points = {e: [e.noise_eval_points(x, preconditioner) for x in bulk.q] for e in estimators}
    # Estimators share evaluation points: each is evaluated once.
    unique_points = {
        point.tobytes(): point
        for by_position in eval_points.values()
        for points in by_position
        for point, _ in points
    }
    pairs = np.arange(len(unique_points) * num_minibatches)
    position_index, minibatch_index = np.divmod(pairs, num_minibatches)
    unique_x = np.stack(list(unique_points.values()))
    results = bulk.batched_gradients.evaluate_minibatches(
        preconditioner.center + preconditioner.expansion_to_displacement(unique_x),
        minibatches,
        position_index,
        minibatch_index,
        potential,
    )
    shape = len(bulk.q), num_minibatches, potential.dim
    estimates = {estimator: np.zeros(shape) for estimator in estimators}
    numbers = {key: number for number, key in enumerate(unique_points)}
    # The estimates of which each point is a part, and its weight.
    uses: list[list[tuple[np.ndarray, float | np.ndarray]]] = [[] for _ in unique_points]
    for estimator, by_position in eval_points.items():
        for estimate, points in zip(estimates[estimator], by_position, strict=True):
            for point, weight in points:
                uses[numbers[point.tobytes()]].append((estimate, weight))
    for result in results:
        point, minibatch = position_index[result.pair_slice], minibatch_index[result.pair_slice]
        gradients = preconditioner.gradient_to_expansion(unique_x[point], result.gradients)
        for i, j, gradient in zip(point, minibatch, gradients, strict=True):
            for estimate, weight in uses[i]:
                estimate[j] += weight * gradient
    for of_estimator in estimates.values():  # one position at a time: a bound on memory
        for q, by_minibatch in zip(bulk.q, of_estimator, strict=True):
            by_minibatch[:] = preconditioner.pull_back_expansion(q, by_minibatch)
    return estimates


def measure_noise_at_coupled_draws(
    bulk: BulkPositions,
    estimator: GradientEstimator,
    subsampling: Subsampling,
    rng: np.random.Generator,
) -> Coupling:
    """Replace the draws of the coupling, if there is one, by the gradient noise at them."""
    potential, coupling = bulk.batched_gradients.step_potential, bulk.coupling
    if coupling is NO_COUPLING:
        return coupling
    minibatches = sample_minibatch_indices(
        potential, rng, (_NUM_COUPLING_MINIBATCHES,), subsampling
    )
    estimates = _evaluate_estimates(replace(bulk, q=coupling.q), (estimator,), minibatches)
    noise_variances = estimates[estimator].var(1, ddof=1).sum(1, keepdims=True)
    return coupling._replace(q=np.zeros((1, 0)), noise_variances=noise_variances)


def predict_mean_bias_from_noise(
    bulk: BulkPositions,
    estimator: GradientEstimator,
    subsampling: Subsampling,
    variance_inflation_per_noise_variance: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Predict the bias of posterior means from gradient noise, in posterior SDs.

    :return: mean of :func:`compute_mean_biases_by_noise` over minibatches, shrunk by two standard
        errors, zero within these; shape ``(d,)``. Biases differ more between positions than these
        standard errors say, so that the step size is too short rather than too long.
    """
    bulk = replace(bulk, q=bulk.q[:_MAX_MEAN_BIAS_POSITIONS])
    biases = compute_mean_biases_by_noise(
        bulk, estimator, subsampling, variance_inflation_per_noise_variance, rng
    )
    return shrink_mean_bias(biases.reshape(-1, biases.shape[-1]))[0]


def compute_mean_biases_by_noise(
    bulk: BulkPositions,
    estimator: GradientEstimator,
    subsampling: Subsampling,
    variance_inflation_per_noise_variance: float,
    rng: np.random.Generator,
) -> np.ndarray:
    r"""Compute biases of posterior means by gradient noise at positions, in posterior SDs.

    Noise of covariance V adds :math:`c V` to the posterior's covariance. The perturbations
    :math:`\zeta` of :func:`_compute_mean_biases` are deviations of the minibatch gradients
    themselves, scaled by :math:`\sqrt c`, so that all their correlations are accounted for.

    :param variance_inflation_per_noise_variance: c, the relative inflation of a unit variance by
        noise of variance one.
    :return: shape ``(n, minibatches, d)``.
    """
    potential = bulk.batched_gradients.potential
    has_noise = potential.has_minibatches and variance_inflation_per_noise_variance > 0.0
    if not has_noise or potential.is_stochastic:
        return np.zeros((len(bulk.q), 1, potential.dim))
    num = _choose_num_probes(bulk)
    step_potential, estimates = bulk.batched_gradients.step_potential, []
    for x in bulk.q:  # independent minibatches at each position
        minibatches = sample_minibatch_indices(step_potential, rng, (num,), subsampling)
        bulk_at_x = replace(bulk, q=x[None])
        estimates.append(_evaluate_estimates(bulk_at_x, (estimator,), minibatches)[estimator])
    gradients = np.concatenate(estimates)
    deviations = gradients - gradients.mean(1, keepdims=True)
    scale = np.sqrt(variance_inflation_per_noise_variance * num / (num - 1))
    return _compute_mean_biases(bulk, scale * deviations)


def predict_mean_bias_per_variance_inflation(
    bulk: BulkPositions, rng: np.random.Generator
) -> np.ndarray:
    """Predict the bias of means (posterior SDs) per relative inflation of all variances.

    :return: predicted bias shrunk by two standard errors, zero within these, over the inflation;
        shape ``(d,)``.
    """
    if bulk.batched_gradients.potential.is_stochastic:
        return np.zeros(bulk.batched_gradients.potential.dim)
    bulk = replace(bulk, q=bulk.q[:_MAX_MEAN_BIAS_POSITIONS])
    num_positions, dim = bulk.q.shape
    perturbations = _PERTURBATION_SD * rng.standard_normal(
        (num_positions, _choose_num_probes(bulk), dim)
    )
    biases = _compute_mean_biases(bulk, perturbations).reshape(-1, dim)
    return shrink_mean_bias(biases)[0] / _PERTURBATION_SD**2


def _choose_num_probes(bulk: BulkPositions) -> int:
    """Return the perturbations per position: as many in all, whatever the number of positions."""
    num_probes = bulk.batched_gradients.budget.num_bias_probes
    return max(2, num_probes * _MAX_MEAN_BIAS_POSITIONS // len(bulk.q))


def _compute_mean_biases(bulk: BulkPositions, perturbations: np.ndarray) -> np.ndarray:
    r"""Compute biases of means, in posterior SDs, where perturbations are added to the posterior.

    To first order the mean moves by

    .. math:: -\tfrac12\,E[D^2 \nabla U(\zeta, \zeta)],

    which is zero for a Gaussian posterior. Many coordinates that are each hardly wider can move a
    coordinate that they have in common: the scale of hundreds of effects.

    :param perturbations: in preconditioned coordinates, shape ``(n, num, d)``.
    :return: of the same shape; not finite for perturbations out of the support.
    """
    q, preconditioner = bulk.q, bulk.preconditioner
    _, num, dim = perturbations.shape
    points = np.concatenate([q[:, None], q[:, None] + perturbations, q[:, None] - perturbations], 1)
    positions = preconditioner.to_position(points.reshape(-1, dim))
    if preconditioner.is_block_arrow:  # a subset would have few rows of each group
        gradients = bulk.batched_gradients.large_pass_gradients(positions)
        values = np.zeros(len(gradients))
    else:
        values, gradients = bulk.batched_gradients.evaluate_on_subset(positions)
    # A gradient can be finite where the density is not.
    gradients = np.where(np.isfinite(values)[:, None], gradients, np.nan)
    gradients = preconditioner.pull_back(points.reshape(-1, dim), gradients).reshape(points.shape)
    center, plus, minus = np.split(gradients, [1, 1 + num], 1)
    displacements = -0.5 * (plus + minus - 2.0 * center).reshape(-1, dim)
    in_sds = preconditioner.apply(displacements) / preconditioner.sds
    if preconditioner.is_block_arrow:
        # Among the effects of many groups, each with its own noise, some would differ by chance.
        layout = preconditioner.factor.layout
        effects, shared = layout.split(in_sds)
        in_sds = layout.merge(np.zeros_like(effects), shared)
    return in_sds.reshape(perturbations.shape)


def shrink_mean_bias(
    biases: np.ndarray, num_standard_errors: float = _NUM_STANDARD_ERRORS_OF_BIAS
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of independent predictions, shape ``(n, d)``, and its standard error.

    The mean is shrunk by so many standard errors, and zero within these. Predictions that are not
    finite are left out; where most are, the mean is 100 SDs.
    """
    is_finite = np.isfinite(biases).all(1)
    if 2 * is_finite.sum() < len(is_finite):
        dim = biases.shape[1]
        return np.full(dim, _UNPREDICTABLE_MEAN_BIAS_SD), np.zeros(dim)
    biases = biases[is_finite]
    mean, standard_error = biases.mean(0), biases.std(0) / np.sqrt(len(biases))
    shrunk = np.maximum(np.abs(mean) - num_standard_errors * standard_error, 0.0)
    return np.sign(mean) * shrunk, standard_error


def measure_noise_covariance(
    bulk: BulkPositions, estimator: GradientEstimator, rng: np.random.Generator
) -> np.ndarray:
    """Return the covariance of the gradient noise, or its diagonal if the factor is diagonal.

    For minibatches of independent rows it is the covariance of one row's gradient over the batch
    size, summed over plates, here averaged over positions.
    """
    potential = bulk.batched_gradients.step_potential
    preconditioner = bulk.preconditioner.cast(potential.dtype)
    q, is_dense = jnp.asarray(bulk.q, potential.dtype), preconditioner.is_dense
    num_rows = int(np.clip(_MAX_ROW_GRADIENT_ENTRIES // potential.dim, 16, 1024))
    shape = len(q), num_rows
    total = np.zeros((potential.dim,) * (1 + is_dense))
    for varied in potential.plates:
        # Rows of one plate vary; the others stay at one random row per position.
        indices = {
            p.name: np.broadcast_to(
                rng.integers(0, p.size, shape if p is varied else (shape[0], 1), dtype=np.int32),
                shape,
            )
            for p in potential.plates
        }
        covariance = _compute_row_gradient_covariance(
            potential, bulk.batched_gradients.arguments, preconditioner, q, indices, estimator
        )
        total += np.asarray(covariance, np.float64) / varied.subsample_size
    return total


@partial(jax.jit, static_argnames=("potential", "estimator"))
def _compute_row_gradient_covariance(
    potential: Potential,
    arguments: Arguments,
    preconditioner: Preconditioner,
    q: Array,
    indices: Indices,
    estimator: GradientEstimator,
) -> Array:
    """Return the covariance of gradients of single rows, mean over positions."""

    def covariance_at(q: Array, indices: Indices) -> Array:
        def row_gradient(row: Indices) -> Array:
            minibatch = {name: i[None] for name, i in row.items()}
            return make_gradient_fn(estimator, potential, arguments, preconditioner, minibatch)(q)

        gradients = jax.vmap(row_gradient)(dict(indices))
        if preconditioner.is_dense:
            return jnp.cov(gradients, rowvar=False)
        return gradients.var(0, ddof=1)

    return jax.lax.map(lambda x: covariance_at(*x), (q, dict(indices))).mean(0)


def estimate_max_curvature(bulk: BulkPositions, rng: np.random.Generator) -> float:
    """Estimate the largest preconditioned curvature at some positions, at least 1.

    It is 1 for a randomised likelihood, whose gradients cannot be compared.
    """
    if bulk.batched_gradients.potential.is_stochastic:
        return 1.0
    if bulk.preconditioner.is_block_arrow:
        return _estimate_max_block_arrow_curvature(bulk, rng)
    curvatures = compute_max_curvatures(
        bulk.batched_gradients,
        bulk.preconditioner,
        bulk.q,
        rng.standard_normal(bulk.q.shape),
        bulk.batched_gradients.budget.num_power_iterations,
    )
    return float(curvatures[np.isfinite(curvatures)].max(initial=1.0))


def _estimate_max_block_arrow_curvature(bulk: BulkPositions, rng: np.random.Generator) -> float:
    """Estimate the largest preconditioned curvature by power iterations on all rows."""
    preconditioner, batched_gradients = bulk.preconditioner, bulk.batched_gradients
    factor, largest = preconditioner.factor, 1.0

    def compute_gradients(q: np.ndarray) -> np.ndarray:
        gradients = batched_gradients.large_pass_gradients(preconditioner.to_position(q))
        return np.asarray(preconditioner.pull_back(q, gradients))

    def multiply_hessian(q: np.ndarray, directions: np.ndarray) -> np.ndarray:
        if factor.is_linear:
            _, (products,) = batched_gradients.large_pass_products(
                preconditioner.to_position(q[None]), preconditioner.apply(directions)
            )
            return np.asarray(preconditioner.apply_transpose(products))
        steps = _NONLINEAR_STEP_LENGTH * directions
        above, below = np.split(compute_gradients(np.concatenate([q + steps, q - steps])), 2)
        return (above - below) / (2.0 * _NONLINEAR_STEP_LENGTH)

    num_directions = factor.layout.num_effect_probes if factor.is_linear else 1
    for q in bulk.q[:_MAX_CURVATURE_POSITIONS_ON_ALL_ROWS]:
        directions = rng.standard_normal((num_directions, q.size))
        for _ in range(batched_gradients.budget.num_power_iterations):
            directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
            directions = multiply_hessian(q, directions)
        norms = np.linalg.norm(directions, axis=1)
        largest = max(largest, float(norms[np.isfinite(norms)].max(initial=1.0)))
    return largest


def compute_max_curvatures(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    directions: np.ndarray,
    num_iterations: int,
    step_length: float = _POWER_ITERATION_STEP_LENGTH,
) -> np.ndarray:
    """Return the largest preconditioned curvature at each position, by power iterations.

    Products with the Hessian are differences of gradients on the representative subset.

    :param q: preconditioned coordinates of the positions, shape ``(k, d)``.
    :param directions: initial directions in preconditioned coordinates, shape ``(k, d)``.
    :param step_length: length of the finite difference, in preconditioned units.
    :return: shape ``(k,)``; not finite where a gradient is not.
    """

    def compute_gradients(q: np.ndarray) -> np.ndarray:
        _, gradients = batched_gradients.evaluate_on_subset(preconditioner.to_position(q))
        return np.asarray(preconditioner.pull_back(q, gradients))

    gradients = compute_gradients(q)
    for _ in range(num_iterations):
        norms = np.linalg.norm(directions, axis=1, keepdims=True)
        directions = directions / np.maximum(norms, np.finfo(float).tiny)
        directions = (compute_gradients(q + step_length * directions) - gradients) / step_length
    return np.asarray(np.linalg.norm(directions, axis=1))
