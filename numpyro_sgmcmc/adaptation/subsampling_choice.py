"""Choice of gradient estimator, subsampling, and gradients from which the bias is estimated.

The gradient noise of each candidate estimator is measured in the bulk of the posterior, with iid
and with contiguous minibatches. The estimator with the lowest cost per independent draw is chosen,
then the fastest subsampling whose noise neither shortens the step nor biases more than iid
minibatches would.

The moments from which a chain estimates its bias need gradients that are independent of the
position. Minibatches of an epoch are not: earlier ones of the same epoch have moved the position.
Where their noise matters, and where noise would dominate the estimate, the gradients come from
separate minibatches (:class:`.MonitorGradients`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions
from numpyro_sgmcmc.adaptation.gradient_noise import (
    NoiseStatsByEstimator,
    estimate_max_curvature,
    measure_noise,
    measure_noise_by_subsampling,
    measure_order_noise_ratio,
)
from numpyro_sgmcmc.adaptation.settings import (
    Candidates,
    MonitorGradients,
    SubsamplingChoice,
    WarmupInputs,
)
from numpyro_sgmcmc.adaptation.step_size import MONITOR_INTERVAL, NoiseLimit
from numpyro_sgmcmc.adaptation.warnings import is_thermostat_active, warn_sorted_data
from numpyro_sgmcmc.data.subsampling import (
    ContiguousSubsampling,
    IIDSubsampling,
    ShuffledSubsampling,
    Subsampling,
)
from numpyro_sgmcmc.model.gradient_estimators import (
    GRADIENT_ESTIMATORS,
    GradientEstimator,
    MinibatchGradient,
)

# Gradient noise variance in the noisiest preconditioned coordinate of a hierarchy, with iid
# minibatches, up to which the minibatches of an epoch may depend on each other.
_MAX_HIERARCHY_NOISE_OF_EPOCHS = 0.3
_MAX_HESSIAN_DIM = 200  # bounds the cost of the reference Hessian of an estimator
# Variance of contiguous over that of iid minibatches beyond which the data count as sorted.
_MIN_NOISE_VARIANCE_RATIO = 1.5
# Variance inflation by gradient noise up to which it may depend on the position.
_NEGLIGIBLE_VARIANCE_INFLATION = 0.025
# Variance of bias estimates from the steps over that from separate gradients, up to which the
# steps' own gradients are used.
_MIN_MONITOR_VARIANCE_RATIO = 4.0
# Dimension beyond which moments are not updated at every step: sums of longer vectors cost as much
# as the other arithmetic of a step. The interval is at most so many steps then.
_MAX_DIM_MONITORED_EACH_STEP, _MAX_STEP_GRADIENT_INTERVAL = 10_000, 5


@dataclass(frozen=True)
class NoiseMeasurement:
    """Gradient noise of each candidate estimator, and the largest preconditioned curvature."""

    iid: NoiseStatsByEstimator
    contiguous: NoiseStatsByEstimator
    max_curvature: float

    def for_subsampling(self, subsampling: Subsampling) -> NoiseStatsByEstimator:
        """Return the noise with a subsampling."""
        return self.contiguous if subsampling.is_contiguous else self.iid

    def tabulate_variances(self) -> dict[str, tuple[float, float]]:
        """Return mean noise variances with iid and contiguous minibatches by name of estimator."""
        return {
            e.name: (self.iid[e].mean_variance, self.contiguous[e].mean_variance) for e in self.iid
        }


def list_candidates(inputs: WarmupInputs) -> Candidates:
    """List the gradient estimators and the subsampling that the user leaves to the warm-up."""
    settings, potential = inputs.settings, inputs.potential
    estimators: tuple[GradientEstimator, ...]
    is_global = potential.local_latents is None
    if is_global and (not potential.has_minibatches or potential.is_stochastic):
        estimators = (MinibatchGradient(),)
    elif settings.estimator is not None:
        estimators = (settings.estimator,)
    else:
        # A reference Hessian would change with the local latents.
        has_hessian = is_global and settings.is_dense and potential.dim <= _MAX_HESSIAN_DIM
        estimators = tuple(
            e for e in GRADIENT_ESTIMATORS.values() if has_hessian or not e.needs_hessian
        )
    return Candidates(estimators, settings.subsampling, settings.estimator is None)


def measure_gradient_noise(
    bulk: BulkPositions, candidates: Candidates, rng: np.random.Generator
) -> NoiseMeasurement:
    """Measure the noise of each candidate estimator, and the largest curvature."""
    noise = measure_noise_by_subsampling(bulk, candidates.estimators, rng)
    # Over an epoch noise cancels. That of minibatch gradients is so large that their step size
    # does not rely on it.
    subsampling = candidates.subsampling or ContiguousSubsampling()
    if candidates.subsampling is None and _needs_independent_minibatches(bulk, noise[0]):
        subsampling = IIDSubsampling()
    per_epoch = bulk.batched_gradients.batches_per_epoch
    for stats_by_estimator in noise:
        for estimator, stats in stats_by_estimator.items():
            if estimator.needs_reference:
                stats_by_estimator[estimator] = stats.for_epochs(subsampling, per_epoch)
    return NoiseMeasurement(*noise, estimate_max_curvature(bulk, rng))


def _needs_independent_minibatches(bulk: BulkPositions, noise: NoiseStatsByEstimator) -> bool:
    """Return whether the gradients of a hierarchy's shared parameters need independent minibatches.

    Positions depend on the earlier minibatches of an epoch, and these on the next one, so that its
    gradient is biased given the position. The scale of the rows sums this over all effects: with
    5,000 groups of 20 effects and ten rows, noise of variance 1.2 biased it by 0.4 posterior SDs.

    :param noise: with iid minibatches.
    """
    variance = min(stats.variance for stats in noise.values())
    return bulk.preconditioner.is_block_arrow and variance > _MAX_HIERARCHY_NOISE_OF_EPOCHS


def choose_subsampling(
    inputs: WarmupInputs, candidates: Candidates, bulk: BulkPositions, noise: NoiseMeasurement
) -> SubsamplingChoice:
    """Choose the gradient estimator and the subsampling."""
    limit = NoiseLimit.from_settings(inputs.settings, noise.max_curvature)
    iid, contiguous = (
        choose_estimator(candidates.estimators, s, noise.for_subsampling(s), limit)
        for s in (IIDSubsampling(), ContiguousSubsampling())
    )
    subsampling = candidates.subsampling
    if subsampling is None:
        subsampling = _choose_subsampling(inputs, bulk, noise, iid, contiguous)
    choice = contiguous if subsampling.is_contiguous else iid
    return replace(
        choice,
        subsampling=subsampling,
        # Of what second-order control variates leave of the gradients.
        max_step_size=inputs.max_step_size if choice.estimator.needs_hessian else math.inf,
        num_factor_products=bulk.preconditioner.num_products,
    )


def choose_estimator(
    estimators: Sequence[GradientEstimator],
    subsampling: Subsampling,
    noise: NoiseStatsByEstimator,
    limit: NoiseLimit,
) -> SubsamplingChoice:
    """Choose the estimator with the lowest cost per independent draw."""
    costs = []
    for estimator in estimators:
        noise_stats = noise[estimator]
        step_size, variance_inflation = limit.limit_step_size(noise_stats)
        choice = SubsamplingChoice(
            estimator, subsampling, noise_stats, step_size, variance_inflation, limit.max_curvature
        )
        cost = estimator.relative_cost * count_equivalent_steps(choice, limit)
        costs.append((cost, estimator.name, choice))
    return min(costs, key=lambda c: c[:2])[2]


def count_equivalent_steps(choice: SubsamplingChoice, limit: NoiseLimit) -> float:
    """Return the steps per independent draw, more where the target cannot be met.

    No step is shorter then: the variance inflation counts.
    """
    penalty = max(1.0, 2.0 * choice.variance_inflation / limit.target_sd_bias)
    relaxation_time = limit.dynamics.relaxation_time(choice.step_size, choice.noise_stats.variance)
    return float(penalty * relaxation_time / choice.step_size)


def _choose_subsampling(
    inputs: WarmupInputs,
    bulk: BulkPositions,
    noise: NoiseMeasurement,
    iid: SubsamplingChoice,
    contiguous: SubsamplingChoice,
) -> Subsampling:
    """Choose contiguous minibatches, which memory reads fastest, unless their noise matters.

    Of local latents no minibatch may contain an observation twice.
    """
    settings, local_latents = inputs.settings, inputs.potential.local_latents

    def is_allowed(subsampling: Subsampling) -> bool:
        if local_latents is None:
            return True
        plate = local_latents.plate
        return subsampling.has_distinct_rows(plate.size, plate.subsample_size)

    if not is_allowed(ShuffledSubsampling()):
        return ContiguousSubsampling()
    if _needs_independent_minibatches(bulk, noise.iid):
        return IIDSubsampling()
    # Noise that cancels over an epoch changes momenta, and not positions. A thermostat would take
    # it for a kinetic temperature that is too high.
    if is_thermostat_active(inputs, iid.noise_stats, settings.step_size or iid.step_size):
        return IIDSubsampling() if is_allowed(IIDSubsampling()) else ContiguousSubsampling()
    contiguous_variance = contiguous.noise_stats.mean_variance
    iid_variance = noise.iid[contiguous.estimator].mean_variance
    shortens_step = iid.step_size > contiguous.step_size
    inflates_variance = contiguous.variance_inflation > max(
        2.0 * settings.target_sd_bias, _MIN_NOISE_VARIANCE_RATIO * iid.variance_inflation
    )
    is_noisier = contiguous_variance > _MIN_NOISE_VARIANCE_RATIO * iid_variance
    if is_noisier and (shortens_step or inflates_variance):
        # With a few influential rows the noise of either depends on which of these were sampled.
        ratio = measure_order_noise_ratio(bulk, contiguous.estimator)
        if ratio > _MIN_NOISE_VARIANCE_RATIO:
            warn_sorted_data(ratio)
            return ShuffledSubsampling()
    return ContiguousSubsampling()


def choose_monitor_gradients(
    inputs: WarmupInputs,
    bulk: BulkPositions,
    choice: SubsamplingChoice,
    noise: NoiseMeasurement,
    step_size: float,
    num_steps: int,
    mean_bias: float,
) -> MonitorGradients:
    """Choose the gradients from which the chains estimate their bias.

    :param mean_bias: largest predicted bias of a mean by gradient noise, in posterior SDs.
    """
    settings, potential, subsampling = inputs.settings, inputs.potential, choice.subsampling
    noise_stats = noise.for_subsampling(subsampling)
    own_stats = noise_stats[choice.estimator]
    variance_inflation = settings.dynamics.variance_inflation(own_stats.variance, step_size)
    # Separate gradients in few steps cost so much that a little dependence is accepted.
    negligible = _NEGLIGIBLE_VARIANCE_INFLATION * (1.0 if num_steps >= MONITOR_INTERVAL else 4.0)
    is_negligible = variance_inflation <= negligible and mean_bias <= settings.max_mean_bias
    is_independent = subsampling.is_independent or is_negligible
    if is_independent and own_stats.mean_variance <= num_steps:
        return choose_step_gradients(potential.dim, num_steps)
    if list(noise_stats) == [MinibatchGradient()] and not potential.is_stochastic:
        without_hessian = [e for e in GRADIENT_ESTIMATORS.values() if not e.needs_hessian]
        noise_stats = measure_noise(bulk, without_hessian, subsampling, inputs.rng)
    # The chains have a reference Hessian only if their estimator needs it.
    variances = {
        e: stats.mean_variance
        for e, stats in noise_stats.items()
        if e == choice.estimator or not e.needs_hessian
    }
    separate = choose_separate_gradients(variances, choice.estimator, is_independent, num_steps)
    return separate or choose_step_gradients(potential.dim, num_steps)


def choose_step_gradients(dim: int, num_steps: int) -> MonitorGradients:
    """Choose the gradients of all steps, or of some where vectors are long."""
    longest = 1 if dim <= _MAX_DIM_MONITORED_EACH_STEP else _MAX_STEP_GRADIENT_INTERVAL
    return MonitorGradients(max(k for k in range(1, longest + 1) if num_steps % k == 0))


def choose_separate_gradients(
    noise_variances: Mapping[GradientEstimator, float],
    estimator: GradientEstimator,
    is_independent: bool,
    num_steps: int,
) -> MonitorGradients | None:
    """Choose gradients on separate minibatches, or None where those of the steps serve."""
    divisors = (k for k in range(1, num_steps + 1) if num_steps % k == 0)
    interval = next(k for k in divisors if k >= min(MONITOR_INTERVAL, num_steps))
    least_noisy = min(noise_variances, key=lambda e: noise_variances[e])
    step_variance = noise_variances[estimator] / num_steps
    separate_variance = noise_variances[least_noisy] / (num_steps // interval)
    if is_independent and step_variance <= _MIN_MONITOR_VARIANCE_RATIO * separate_variance:
        return None
    return MonitorGradients(interval, least_noisy)
