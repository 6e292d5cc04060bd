"""The warm-up of a run whose settings are all given.

What is decided from the noise measured at typical positions, and what the user is told of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.adaptation.context import EstimatorChoice, WarmupContext
from numpyro_sgmcmc.adaptation.gradient_noise import (
    NO_NOISE,
    UNKNOWN_NOISE,
    GradientNoiseStats,
    NoiseStatsBySubsampling,
    measure_noise_covariance,
    predict_mean_bias_from_noise,
    predict_mean_bias_per_variance_inflation,
)
from numpyro_sgmcmc.adaptation.multimodality import Mode
from numpyro_sgmcmc.adaptation.preconditioning import factorize_covariance
from numpyro_sgmcmc.adaptation.settings import (
    MONITOR_INTERVAL,
    Adaptation,
    AdaptationTrace,
    MonitorGradients,
    choose_separate_gradients,
    choose_step_gradients,
)
from numpyro_sgmcmc.adaptation.step_size import (
    MAX_NUM_STEPS,
    choose_num_steps,
    compute_kick_variance_inflation,
    compute_noise_variance_inflation,
    compute_stability_limit,
    limit_step_size_by_discretisation,
)
from numpyro_sgmcmc.adaptation.warnings import (
    MEAN_BIAS_TO_TARGET_RATIO,
    PredictedMeanBias,
    StepSizeLimits,
    is_thermostat_active,
    warn_about_gradient_noise,
    warn_about_user_step_size,
    warn_sorted_data,
)
from numpyro_sgmcmc.data.subsampling import (
    SUBSAMPLINGS,
    ContiguousSubsampling,
    IIDSubsampling,
    ShuffledSubsampling,
    Subsampling,
)
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import warn_user
from numpyro_sgmcmc.model.gradient_estimators import (
    GRADIENT_ESTIMATORS,
    GradientEstimator,
    MinibatchGradient,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = [
    "build_adaptation_from_settings",
    "choose_sampler_settings",
]


def build_adaptation_from_settings(context: WarmupContext, position: np.ndarray) -> Adaptation:
    """What the user has given, about a first position: no optimum, no chains, no measurement."""
    settings, target = context.settings, context.potential
    matrix, estimator, scheme = (
        settings.inverse_mass_matrix,
        settings.estimator,
        settings.subsampling,
    )
    step_size, num_steps = settings.step_size, settings.num_steps
    if not target.plates:  # all rows at every step
        estimator, scheme = MinibatchGradient(), scheme or IIDSubsampling()
    assert matrix is not None
    assert estimator is not None
    assert scheme is not None
    assert step_size is not None
    assert num_steps is not None
    whitening = Preconditioner(position, factorize_covariance(matrix), np.zeros_like(position))
    if estimator.needs_reference:
        whitening = context.build_preconditioner(position, factorize_covariance(matrix))
        context.check_finite_gradient(whitening)
        whitening = context.add_reference_hessian(whitening, estimator)
    # Gradients apart are worth their cost only where it is spread over many steps.
    is_free = scheme.is_independent or num_steps < MONITOR_INTERVAL
    apart = choose_separate_gradients({estimator: 0.0}, estimator, is_free, num_steps)
    return Adaptation(
        preconditioner=whitening.cast(target.dtype),
        step_size=step_size,
        num_steps=num_steps,
        estimator=estimator,
        subsampling=scheme,
        gradient_noise_covariance=None,
        noise_stats=UNKNOWN_NOISE if target.plates else NO_NOISE,
        monitor_gradients=apart or choose_step_gradients(target.dim, num_steps),
        allowed_variance_inflation=None,
        relaxation_time=float(settings.dynamics.relaxation_time(step_size)),
        uses_init_strategy=not settings.has_init_params,
    )


_MIN_NOISE_VARIANCE_RATIO = 1.5


_NEGLIGIBLE_VARIANCE_INFLATION = (
    0.025  # variance that noise adds at most, where it may depend on the position
)


_VARIANCE_INFLATION_TOLERANCE = 1.5  # times the predicted excess: less is no surprise


def choose_sampler_settings(
    context: WarmupContext, main_mode: Mode, visited_modes: Sequence[Mode] = ()
) -> Adaptation:
    """Estimator, minibatches and step size from the noise measured at typical positions.

    :param main_mode: the mode that decides.
    :param visited_modes: modes in which chains run as well: with the same estimator and minibatches, and
        steps that suit the narrowest.
    """
    adaptation = _choose_settings_at_mode(context, main_mode.preconditioner, main_mode.q)
    settings = context.settings
    context.set_settings(
        replace(settings, estimator=adaptation.estimator, subsampling=adaptation.subsampling)
    )
    each = [
        adaptation,
        *(_choose_settings_at_mode(context, mode.preconditioner, mode.q) for mode in visited_modes),
    ]
    context.set_settings(settings)
    return adaptation._replace(
        step_size=min(a.step_size for a in each),
        num_steps=max(a.num_steps for a in each),
        relaxation_time=max(a.relaxation_time for a in each),
        other_mode_preconditioners=tuple(a.preconditioner for a in each[1:]),
        trace=adaptation.trace
        and adaptation.trace._replace(
            num_pilot_windows=len(main_mode.window_medians), r_hat=main_mode.r_hat
        ),
    )


def _choose_settings_at_mode(
    context: WarmupContext, preconditioner: Preconditioner, q: np.ndarray
) -> Adaptation:
    """What suits one mode.

    :param q: whitened positions from about it.
    """
    settings, target, dynamics = context.settings, context.potential, context.settings.dynamics
    noise = _add_batches_per_epoch(context, context.measure_noise_by_subsampling(preconditioner, q))
    curvature = context.measure_max_curvature(preconditioner, q)
    largest = dynamics.integrators[settings.integrator].step_size
    random, blocks = (
        context.choose_estimator(dynamics, largest, of_rows, curvature, settings.target_sd_bias)
        for of_rows in noise
    )
    scheme = _choose_subsampling(context, noise, random, blocks)
    estimator, step_size, inflation = blocks if scheme.is_contiguous else random
    own = noise.for_subsampling(scheme)[estimator]
    by_noise = float(step_size)
    step_size, inflation = _apply_dynamics_limit(context, preconditioner, own, step_size, inflation)
    limits = StepSizeLimits(
        estimator, own, curvature, largest, PredictedMeanBias.zero(), float(step_size)
    )
    shifts = _predict_posterior_mean_bias(
        context, preconditioner, q, limits, scheme, float(step_size)
    )
    limits = replace(limits, mean_bias=shifts)
    step_size = _apply_mean_bias_limit(context, limits, step_size)
    step_sizes = _trace_step_size_limits(context, limits, by_noise, float(step_size))
    own = own._replace(
        batches_per_epoch=0 if scheme.is_independent else _find_num_batches_per_epoch(context)
    )
    if own.batches_per_epoch:
        inflation = min(inflation, own.predict_variance_inflation(dynamics, float(step_size)))
    relaxation_time = dynamics.relaxation_time(float(step_size), own.variance)
    num_steps = settings.num_steps or choose_num_steps(relaxation_time, step_size)
    warn_about_gradient_noise(context, limits, scheme, float(step_size), num_steps, inflation)
    located = settings.bind_dynamics(preconditioner.cast(target.dtype))
    suitable = partial(_choose_default_step_size, context, limits, located, by_noise)
    warn_about_user_step_size(context, limits, located, float(inflation), suitable)
    cast = context.add_reference_hessian(preconditioner, estimator).cast(target.dtype)
    gradient_noise = None
    if settings.noise_compensation and target.plates:
        gradient_noise = _measure_noise_covariance(context, cast, q, estimator, float(step_size))
    at = _SamplerSettings(estimator, scheme, float(step_size), num_steps)
    return Adaptation(
        preconditioner=cast,
        step_size=step_size,
        num_steps=num_steps,
        estimator=estimator,
        subsampling=scheme,
        gradient_noise_covariance=gradient_noise,
        noise_stats=own,
        monitor_gradients=_choose_monitor_gradients(
            context, preconditioner, q, noise.for_subsampling(scheme), at
        ),
        allowed_variance_inflation=_compute_allowed_variance_inflation(context, inflation),
        relaxation_time=float(relaxation_time),
        has_dominant_mode=settings.has_dominant_mode,
        trace=AdaptationTrace(
            step_size_limits=step_sizes,
            max_curvature=curvature,
            noise_variances=AdaptationTrace.tabulate_noise_variances(noise)
            if target.plates
            else {},
            variance_inflation=float(inflation),
            mean_bias=shifts.compute_max(float(step_size)),
        ),
    )


def _trace_step_size_limits(
    context: WarmupContext, limits: StepSizeLimits, noise_limited_step_size: float, step_size: float
) -> dict[str, float]:
    """How the step size came to be, by what limits it."""
    settings = context.settings
    if settings.step_size is not None:
        return {"given": step_size}
    return {
        "integrator": float(limits.integrator_step_size),
        "curvature": float(
            compute_stability_limit(
                settings.dynamics, limits.integrator_step_size, limits.max_curvature
            )
        ),
        "noise": noise_limited_step_size,
        "settings": limits.step_size_before_mean_bias,
        "means": step_size,
    }


@dataclass(frozen=True)
class _SamplerSettings:
    """With what the chains run."""

    estimator: GradientEstimator
    subsampling: Subsampling
    step_size: float
    num_steps: int


def _choose_subsampling(
    context: WarmupContext,
    noise_by_subsampling: NoiseStatsBySubsampling,
    iid_choice: EstimatorChoice,
    contiguous_choice: EstimatorChoice,
) -> Subsampling:
    """How to draw rows: the user's way, or the cheapest that does no harm."""
    local, asked = context.potential.local_latents, context.settings.subsampling
    if asked is not None:
        return asked
    if local is None:
        return _choose_cheapest_subsampling(
            context, noise_by_subsampling, iid_choice, contiguous_choice
        )
    size, batch = local.plate.size, local.plate.subsample_size
    # Where an epoch has a seam, a minibatch across it may hold a row twice.
    if not ShuffledSubsampling().has_distinct_rows(size, batch):
        return ContiguousSubsampling()
    chosen = _choose_cheapest_subsampling(
        context, noise_by_subsampling, iid_choice, contiguous_choice
    )
    # Independent minibatches may hold a row twice, too.
    return chosen if chosen.has_distinct_rows(size, batch) else ContiguousSubsampling()


def _choose_cheapest_subsampling(
    context: WarmupContext,
    noise_by_subsampling: NoiseStatsBySubsampling,
    iid_choice: EstimatorChoice,
    contiguous_choice: EstimatorChoice,
) -> Subsampling:
    settings = context.settings
    estimator, longest, least = iid_choice
    # Over an epoch the noise of its minibatches cancels: it heats the momenta and not the
    # positions, which a thermostat would cool too far.
    if is_thermostat_active(
        context, noise_by_subsampling.iid[estimator], settings.step_size or longest
    ):
        return SUBSAMPLINGS["iid"]
    estimator, step_size, excess = contiguous_choice
    in_blocks, in_random = (
        noise_by_subsampling.contiguous[estimator].mean_variance,
        noise_by_subsampling.iid[estimator].mean_variance,
    )
    # Noise that neither shortens steps nor widens more does no harm, and blocks are cheaper.
    is_wide = excess > max(2.0 * settings.target_sd_bias, _MIN_NOISE_VARIANCE_RATIO * least)
    is_harmful = longest > step_size or is_wide
    if in_blocks > _MIN_NOISE_VARIANCE_RATIO * in_random and is_harmful:
        warn_sorted_data(in_blocks / in_random)
        return ShuffledSubsampling()
    return ContiguousSubsampling()


def _apply_dynamics_limit(
    context: WarmupContext,
    preconditioner: Preconditioner,
    noise_stats: GradientNoiseStats,
    step_size: float,
    variance_inflation: float,
) -> tuple[float, float]:
    """The user's step size, or the one found, shortened where the SDE's settings are unusual."""
    settings = context.settings
    if settings.step_size is not None:
        given = settings.step_size, settings.noise_compensation
        return settings.step_size, compute_noise_variance_inflation(
            settings.dynamics, noise_stats, *given
        )
    located = settings.bind_dynamics(preconditioner.cast(context.potential.dtype))
    step_size, excess = _limit_by_dynamics(context, located, noise_stats, step_size)
    return step_size, max(variance_inflation, np.square(1.0 + excess) - 1.0)


def _limit_by_dynamics(
    context: WarmupContext,
    bound_dynamics: Dynamics,
    noise_stats: GradientNoiseStats,
    step_size: float,
) -> tuple[float, float]:
    """The step size where the SDE's settings are unusual, and the error of sds left at it."""
    settings = context.settings
    if bound_dynamics.has_default_settings:
        return step_size, 0.0
    heard = 0.0 if settings.noise_compensation else noise_stats.mean_variance
    return limit_step_size_by_discretisation(
        bound_dynamics,
        settings.integrator,
        step_size,
        context.potential.dim,
        settings.target_sd_bias,
        heard,
    )


def _predict_posterior_mean_bias(
    context: WarmupContext,
    preconditioner: Preconditioner,
    q: np.ndarray,
    limits: StepSizeLimits,
    subsampling: Subsampling,
    step_size: float,
) -> PredictedMeanBias:
    """How far noise and the step's own error are predicted to move the posterior's means."""
    settings, rng, probes = context.settings, context.rng, context.budget.num_bias_probes
    is_unknown = context.potential.local_latents is not None or not settings.has_dominant_mode
    if is_unknown:
        return PredictedMeanBias.zero()
    by_noise = np.zeros(context.potential.dim)
    if not settings.noise_compensation:
        excess = settings.dynamics.variance_inflation(
            1.0, step_size, limits.noise_stats.position_dependent_fraction
        )
        by_noise = predict_mean_bias_from_noise(
            context.batched_gradients,
            preconditioner,
            q,
            limits.estimator,
            subsampling,
            excess,
            probes,
            rng,
        )
    dynamics, integrator = (
        settings.bind_dynamics(preconditioner.cast(context.potential.dtype)),
        settings.integrator,
    )
    # At a long step, where rounding is small beside it, and less by its order at shorter ones.
    order, longest = dynamics.integrators[integrator].order, limits.integrator_step_size
    excess = compute_kick_variance_inflation(dynamics, integrator, longest)
    by_step = np.zeros(context.potential.dim)
    if excess != 0.0:
        by_step = predict_mean_bias_per_variance_inflation(
            context.batched_gradients, preconditioner, q, probes, rng
        )
    return PredictedMeanBias(
        by_noise / step_size, by_step, lambda shorter: excess * (shorter / longest) ** order
    )


def _apply_mean_bias_limit(
    context: WarmupContext, limits: StepSizeLimits, step_size: float
) -> float:
    """The step size, shortened where the posterior's means would be too far off; not the user's."""
    if context.settings.step_size is not None:
        return step_size
    return _limit_by_mean_bias(context, limits, step_size)


def _choose_default_step_size(
    context: WarmupContext,
    limits: StepSizeLimits,
    bound_dynamics: Dynamics,
    noise_limited_step_size: float,
) -> float:
    """The step size that is chosen where none is given."""
    step_size, _ = _limit_by_dynamics(
        context, bound_dynamics, limits.noise_stats, noise_limited_step_size
    )
    return _limit_by_mean_bias(context, limits, step_size)


def _limit_by_mean_bias(context: WarmupContext, limits: StepSizeLimits, step_size: float) -> float:
    """The longest step size up to this one at which the posterior's means stay."""
    settings = context.settings
    shortest = settings.dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    allowed = MEAN_BIAS_TO_TARGET_RATIO * settings.target_sd_bias
    return limits.mean_bias.limit_step_size(
        step_size, min(step_size, shortest), allowed, batch_size_factor=1.0
    )


def _add_batches_per_epoch(
    context: WarmupContext, noise_by_subsampling: NoiseStatsBySubsampling
) -> NoiseStatsBySubsampling:
    """The noise, with the minibatches over which it cancels, unless they are to be independent.

    Plain gradients have so much of it that their step size does not count on that.
    """
    asked = context.settings.subsampling
    if asked is not None and asked.is_independent:
        return noise_by_subsampling
    per_epoch = _find_num_batches_per_epoch(context)
    return NoiseStatsBySubsampling(
        *(
            {
                e: n._replace(batches_per_epoch=per_epoch if e.needs_reference else 0)
                for e, n in of.items()
            }
            for of in noise_by_subsampling
        )
    )


def _find_num_batches_per_epoch(context: WarmupContext) -> int:
    """Minibatches in an epoch; 0 without rows to choose from."""
    return max(
        (p.batches_per_epoch for p in context.batched_gradients.step_potential.plates), default=0
    )


def _compute_allowed_variance_inflation(
    context: WarmupContext, variance_inflation: float
) -> float | None:
    """Excess of temperature that is no reason for a shorter step."""
    if context.settings.step_size is not None:
        return None
    return max(
        2.0 * context.settings.target_sd_bias, _VARIANCE_INFLATION_TOLERANCE * variance_inflation
    )


def _choose_monitor_gradients(
    context: WarmupContext,
    preconditioner: Preconditioner,
    q: np.ndarray,
    noise_stats: dict[GradientEstimator, GradientNoiseStats],
    sampler_settings: _SamplerSettings,
) -> MonitorGradients:
    """Where the moments that tell the bias come from.

    :param noise_stats: of the kind of rows with which the chains run.
    """
    dim, dynamics = context.potential.dim, context.settings.dynamics
    estimator, num_steps = sampler_settings.estimator, sampler_settings.num_steps
    excess = dynamics.variance_inflation(
        noise_stats[estimator].variance, sampler_settings.step_size
    )
    # Where gradients apart cost much, a little dependence is let pass.
    free = (
        _NEGLIGIBLE_VARIANCE_INFLATION
        if num_steps >= MONITOR_INTERVAL
        else 4.0 * _NEGLIGIBLE_VARIANCE_INFLATION
    )
    is_independent = sampler_settings.subsampling.is_independent or excess <= free
    if is_independent and noise_stats[estimator].mean_variance <= num_steps:
        return choose_step_gradients(dim, num_steps)
    # The Hessian at the anchor is there only if the chain's own estimator needs it.
    kept = [e for e in noise_stats if e == estimator or not e.needs_hessian]
    variances = {e: noise_stats[e].mean_variance for e in kept}
    if (
        context.candidate_estimators == (MinibatchGradient(),)
        and not context.potential.is_stochastic
    ):
        without_hessian = tuple(e for e in GRADIENT_ESTIMATORS.values() if not e.needs_hessian)
        kind = SUBSAMPLINGS["contiguous" if sampler_settings.subsampling.is_contiguous else "iid"]
        found = context.measure_gradient_noise(preconditioner, q, without_hessian, kind)
        variances = {e: n.mean_variance for e, n in found.items()}
    apart = choose_separate_gradients(variances, estimator, is_independent, num_steps)
    return apart or choose_step_gradients(dim, num_steps)


def _measure_noise_covariance(
    context: WarmupContext,
    preconditioner: Preconditioner,
    q: np.ndarray,
    estimator: GradientEstimator,
    step_size: float,
) -> GradientNoiseCovariance:
    """The covariance to compensate; says so where that is more than is injected."""
    target = context.potential
    covariance = measure_noise_covariance(
        context.batched_gradients.step_potential,
        context.arguments,
        preconditioner,
        context.cast(q),
        context.rng,
        estimator,
        preconditioner.is_dense,
    )
    found = GradientNoiseCovariance.from_covariance(jnp.asarray(covariance, target.dtype))
    shares = np.asarray(found.eigenvalues) * context.settings.dynamics.gradient_noise_fraction(
        step_size
    )
    if (worst := shares.max()) > 1.0:
        warn_user(
            f"Gradient noise is up to {worst:.1f} times what the sampler injects at step size "
            f"{step_size:.3g}, so that it cannot be compensated in {(shares > 1.0).sum()} of "
            f"{target.dim} directions: posterior sds will be up to "
            f"{100 * (np.sqrt(worst) - 1):.0f} % too wide. Use a shorter step_size or a larger "
            "subsample_size."
        )
    return found
