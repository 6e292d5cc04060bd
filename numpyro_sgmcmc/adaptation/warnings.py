"""Warnings of the warm-up about data order, gradient noise, discretisation and step size.

They are issued before any sampling, where the predicted bias exceeds the target or minibatches of
another size would be far faster. The recommended size is that of the fastest draws within the
target, as :mod:`~numpyro_sgmcmc.adaptation.batch_size` predicts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from numpyro_sgmcmc.adaptation.batch_size import (
    BATCH_SIZE_FACTORS,
    DrawPrediction,
    StepCost,
    choose_batch_size,
    estimate_gradient_seconds,
    estimate_step_cost,
    predict_draws,
    scale_batch_sizes,
)
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import Candidates, SubsamplingChoice, WarmupInputs
from numpyro_sgmcmc.adaptation.step_size import (
    NoiseLimit,
    StepSizeChoice,
    compute_draw_variance_inflation,
    recommend_step_size,
    simulate_sd_inflation,
)
from numpyro_sgmcmc.dynamics import Dynamics, UnderdampedLangevin
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import (
    ConvergenceWarning,
    DataOrderWarning,
    DiscretisationWarning,
    GradientNoiseWarning,
    SGMCMCWarning,
    StepSizeWarning,
    SubsampleSizeWarning,
    warn_user,
)
from numpyro_sgmcmc.model.potential import get_coordinate_names

# Biases are estimated from a few positions, so that the largest of many is overestimated: a warning
# is issued from this multiple of what is allowed, for means and for variances.
_MIN_WARNED_MEAN_BIAS_RATIO, _MIN_WARNED_VARIANCE_INFLATION_RATIO = 2.0, 3.0
_MIN_WARNED_NOISE_RATIO = 2.0  # for both, where noise is named as the cause
# Shares that a recommendation must leave: of the time per effective draw, so that half is likely
# although the time of a step is estimated, and of the step size.
_MAX_ADVISED_TIME_RATIO, _MAX_ADVISED_STEP_SIZE_RATIO = 0.4, 2 / 3
# Seconds of a chain per effective draw up to which no other batch size is recommended for speed:
# thousands of draws take less time than the warm-up then.
_ACCEPTABLE_SECONDS_PER_DRAW = 5e-4
_MIN_WARNED_STEPS = 250  # of a draw; usual are 10 to 100
_MIN_WARNED_VELOCITY_CHANGE_SD = 2.0  # by the gradient of one row in a step of the user's size
_MIN_WARNED_R_HAT = 1.5  # of pilot chains: the run goes on from there and mostly converges below
_ACCEPTABLE_WARMUP_SECONDS = 120.0  # of fits and pilot chains, on a CPU


# SD inflation beyond which a prediction has no meaning but that it is too large.
_MAX_PRINTED_SD_INFLATION = 10.0


class PendingWarning(NamedTuple):
    """A warning that has not been issued yet: arguments of :func:`.warn_user`."""

    message: str
    category: type[SGMCMCWarning]
    fix: str
    entry: str


def format_sd_inflation(variance_inflation: float, digits: int = 0) -> str:
    """Return how much larger an SD is than that of the posterior, as a percentage."""
    sd_inflation = math.sqrt(1.0 + max(variance_inflation, 0.0)) - 1.0
    if not sd_inflation < _MAX_PRINTED_SD_INFLATION:
        return f"more than {100 * _MAX_PRINTED_SD_INFLATION:,.0f}%"
    return f"{100 * sd_inflation:.{digits}f}%"


def issue_once(pending: Iterable[PendingWarning]) -> None:
    """Issue the first warning of each troubleshooting entry, as modes have similar ones."""
    issued = set()
    for warning in pending:
        if warning.entry not in issued:
            warn_user(*warning)
        issued.add(warning.entry)


def warn_sorted_data(noise_variance_ratio: float) -> None:
    """Warn that minibatches are shuffled, since contiguous ones have so many times the noise."""
    warn_user(
        "The data appear to be sorted: contiguous minibatches have "
        f"{noise_variance_ratio:.1f} times the gradient-noise variance of random ones.",
        DataOrderWarning,
        "shuffle the rows once: i = numpy.random.permutation(len(y)); X, y = X[i], y[i]. Until "
        "then, the run uses shuffled minibatches, which are slower than contiguous ones.",
        "sorted-data",
    )


def warn_slow_gradients(
    inputs: WarmupInputs, acceptable_seconds: float = _ACCEPTABLE_WARMUP_SECONDS
) -> None:
    """Warn where the gradients of fits and pilot chains are predicted to take minutes on a CPU."""
    num_gradients = inputs.budget.max_gradient_evaluations
    seconds = estimate_gradient_seconds(
        inputs.potential, inputs.arguments, inputs.budget.num_pilot_chains
    )
    if jax.default_backend() != "cpu" or num_gradients * seconds <= acceptable_seconds:
        return
    plates = inputs.potential.plates
    rows = " and ".join(f"subsample_size={p.subsample_size} of '{p.name}'" for p in plates)
    fix = (
        "use a smaller subsample_size" if plates else "give the plate of the rows a subsample_size"
    )
    if local_names := inputs.potential.local_names:
        fix = f"integrate the site '{local_names[0]}' out, or sample it by `gibbs_fn`"
    warn_user(
        f"Adaptation may take {math.ceil(num_gradients * seconds / 60.0)} minutes, for up to "
        f"{num_gradients:,} gradients with {rows or 'all rows'}.",
        SubsampleSizeWarning,
        f"{fix} (a gradient now takes about {1e3 * seconds:.2g} ms). Move computations that do "
        "not depend on the previous iteration out of loops (`scan`).",
        "slow-gradients",
    )


def find_convergence_warnings(r_hat: float) -> Iterator[PendingWarning]:
    """Warn where the pilot chains were far from converged."""
    if r_hat > _MIN_WARNED_R_HAT:
        yield PendingWarning(
            f"The pilot chains of the warm-up had not converged (R-hat {r_hat:.2f}).",
            ConvergenceWarning,
            "check R-hat in `bias_report` after the run. If it is large, use informative priors "
            "for scales and correlations, or `init_params` near the bulk of the posterior.",
            "pilot-convergence",
        )


def is_thermostat_active(
    inputs: WarmupInputs, noise_stats: GradientNoiseStats, step_size: float
) -> bool:
    """Return whether a thermostat has to remove more noise than the target allows.

    The variance inflation is compared with the target for SDs, that is with half of the variance
    inflation at which SDs reach the target.
    """
    dynamics = inputs.settings.dynamics
    variance_inflation = dynamics.variance_inflation(noise_stats.variance, step_size)
    return dynamics.has_thermostat and variance_inflation > inputs.settings.target_sd_bias


def find_noise_warnings(
    inputs: WarmupInputs,
    candidates: Candidates,
    choice: SubsamplingChoice,
    step: StepSizeChoice,
) -> Iterator[PendingWarning]:
    """Yield warnings where noise or discretisation exceed the target, or are costly.

    Of a user-given step size only the effect on a thermostat is reported.
    """
    settings, potential = inputs.settings, inputs.potential
    target, step_size = settings.target_sd_bias, float(step.step_size)
    mean_bias = step.mean_bias.by_noise.compute_max(step_size)
    is_wide = step.variance_inflation > 2.0 * target
    is_biased = mean_bias > _MIN_WARNED_MEAN_BIAS_RATIO * settings.max_mean_bias
    if settings.step_size is None and potential.has_minibatches:
        if is_wide:
            sd_inflation = format_sd_inflation(step.variance_inflation)
            yield PendingWarning(
                f"Posterior SDs are predicted to be {sd_inflation} too wide because of gradient "
                f"noise (target_sd_bias: {100 * target:.2g}%).",
                GradientNoiseWarning,
                _describe_remedies(inputs, _find_fastest_draw(inputs, choice, step)),
                "gradient-noise-sds",
            )
        elif is_biased:
            yield PendingWarning(
                f"Gradient noise is predicted to bias posterior means by {mean_bias:.2g} SD.",
                GradientNoiseWarning,
                _describe_remedies(inputs, _find_fastest_draw(inputs, choice, step)),
                "gradient-noise-means",
            )
        elif (
            settings.num_steps is None
            and candidates.is_estimator_free
            and potential.local_latents is None
            and settings.dynamics.has_default_settings
        ):
            step_cost = estimate_step_cost(potential, inputs.arguments, choice)
            yield from find_batch_size_warnings(inputs, choice, step, step_cost)
    if settings.step_size is None:
        yield from _find_discretisation_warnings(inputs, step)
    is_dependent = not choice.subsampling.is_independent
    if is_dependent and is_thermostat_active(inputs, choice.noise_stats, step_size):
        yield PendingWarning(
            f"With subsampling={choice.subsampling.name!r}, gradient noise cancels over an epoch, "
            "so the thermostat damps too strongly and SDs may be too narrow.",
            GradientNoiseWarning,
            "use a larger subsample_size, or a kernel without a thermostat."
            if potential.local_latents is not None
            else "use subsampling='iid', or leave `subsampling` out.",
            "thermostat-subsampling",
        )


def find_batch_size_warnings(
    inputs: WarmupInputs,
    choice: SubsamplingChoice,
    step: StepSizeChoice,
    step_cost: StepCost,
    acceptable_seconds_per_draw: float = _ACCEPTABLE_SECONDS_PER_DRAW,
) -> Iterator[PendingWarning]:
    """Yield a warning where another batch size is predicted to halve the time per effective draw.

    :param acceptable_seconds_per_draw: seconds of a chain up to which no warning is issued.
    """
    (present,) = _predict_draws(inputs, choice, step, (1.0,))
    present_seconds = present.compute_seconds(step_cost)
    if present_seconds <= acceptable_seconds_per_draw:
        return
    # An accelerator computes small minibatches no faster than larger ones.
    min_factor = 0.0 if jax.default_backend() == "cpu" else 1.0
    factors = [f for f in BATCH_SIZE_FACTORS if f >= min_factor]
    best = choose_batch_size(_predict_draws(inputs, choice, step, factors), step_cost)
    best_seconds = best.compute_seconds(step_cost)
    if best.is_within_target and best_seconds <= _MAX_ADVISED_TIME_RATIO * present_seconds:
        sizes = " and ".join(f"{p.subsample_size} of '{p.name}'" for p in inputs.potential.plates)
        yield PendingWarning(
            f"With subsample_size {sizes}, a draw takes {present.num_steps} steps and about "
            f"{present_seconds / best_seconds:.1f} times as long as with the recommended size.",
            SubsampleSizeWarning,
            f"{_describe_remedies(inputs, best)} These times are estimates. "
            "`suggest_subsample_size` measures them.",
            "slow-subsample-size",
        )


def find_long_draw_warnings(
    inputs: WarmupInputs, choice: SubsamplingChoice, step: StepSizeChoice, num_steps: int
) -> Iterator[PendingWarning]:
    """Yield a warning where the predicted bias of a mean makes draws take very many steps."""
    is_limited = "mean_bias" in step.trace.binding and inputs.settings.num_steps is None
    if not is_limited or num_steps < _MIN_WARNED_STEPS:
        return
    coordinate, bias = step.mean_bias.find_largest(float(step.step_size))
    by_noise = step.mean_bias.by_noise.compute_max(float(step.step_size))
    site = get_coordinate_names(inputs.potential)[coordinate][1]
    cause = "discretisation"
    fix = f"reparameterise '{site}', standardise the covariates, or use NUTS."
    if by_noise > bias / 2.0:
        cause = "gradient noise"
        remedies = _describe_remedies(inputs, _find_fastest_draw(inputs, choice, step))
        fix = f"{remedies[:-1]}; or {fix}"
    yield PendingWarning(
        f"Each draw takes {num_steps} steps, because longer steps would bias the mean of '{site}' "
        f"by {cause}.",
        SubsampleSizeWarning,
        fix,
        "long-draws",
    )


def _predict_draws(
    inputs: WarmupInputs, choice: SubsamplingChoice, step: StepSizeChoice, factors: Sequence[float]
) -> list[DrawPrediction]:
    plates = inputs.batched_gradients.step_potential.plates
    return predict_draws(inputs.settings, plates, choice, step.trace, step.mean_bias, factors)


def _find_fastest_draw(
    inputs: WarmupInputs, choice: SubsamplingChoice, step: StepSizeChoice
) -> DrawPrediction:
    """Return the draw with the recommended one of larger batch sizes."""
    draws = _predict_draws(inputs, choice, step, [f for f in BATCH_SIZE_FACTORS if f > 1.0])
    return choose_batch_size(draws, estimate_step_cost(inputs.potential, inputs.arguments, choice))


def find_compensation_warnings(
    inputs: WarmupInputs, noise_covariance: GradientNoiseCovariance, step_size: float
) -> Iterator[PendingWarning]:
    """Yield a warning where gradient noise exceeds the injected noise in some directions."""
    fraction = inputs.settings.dynamics.gradient_noise_fraction(step_size)
    ratios = np.asarray(noise_covariance.eigenvalues) * fraction
    if not ratios.max() > 1.0:
        return
    yield PendingWarning(
        f"Noise compensation is incomplete in {(ratios > 1.0).sum()} of {len(ratios)} directions: "
        f"SDs will be up to {format_sd_inflation(ratios.max() - 1.0)} too wide there.",
        GradientNoiseWarning,
        f"use a step_size below {step_size:.3g} or a larger subsample_size.",
        "noise-compensation",
    )


def find_user_step_size_warnings(
    inputs: WarmupInputs, choice: SubsamplingChoice, step: StepSizeChoice, dynamics: Dynamics
) -> Iterator[PendingWarning]:
    """Yield a warning where the user's step size is predicted to make SDs or means clearly wrong.

    Not for schedules and traced step sizes, with which chains take other steps.

    :param dynamics: the SDE in preconditioned coordinates.
    """
    settings = inputs.settings
    step_size, target = settings.step_size, settings.target_sd_bias
    if step_size is None or not settings.has_constant_step_size:
        return
    noise_variance_inflation = step.variance_inflation
    if settings.noise_compensation:  # `find_compensation_warnings` covers this
        noise_variance_inflation = 0.0
    elif (
        noise_variance_inflation > _MIN_WARNED_VARIANCE_INFLATION_RATIO * target
        and dynamics.has_thermostat
        and not dynamics.linear_approximation
    ):
        # It removes a part of the noise that only a simulation shows.
        simulated = _simulate_variance_inflation(
            inputs, dynamics, step_size, choice.noise_stats.variance
        )
        noise_variance_inflation = min(noise_variance_inflation, simulated)
    discretisation_variance_inflation = _compute_discretisation_variance_inflation(
        inputs, choice.max_curvature, dynamics, step_size
    )
    # The share of the noise that does not cancel over an epoch, for means as for variances.
    iid_variance_inflation = dynamics.variance_inflation(
        choice.noise_stats.variance, step_size, choice.noise_stats.position_dependent_fraction
    )
    uncancelled = (
        min(1.0, noise_variance_inflation / iid_variance_inflation)
        if iid_variance_inflation > 0.0
        else 1.0
    )
    bias = step.mean_bias._replace(
        noise_bias_per_step_size=uncancelled * step.mean_bias.noise_bias_per_step_size,
        inflation_per_noise_variance=uncancelled * step.mean_bias.inflation_per_noise_variance,
    )
    effects = []
    allowed_mean_bias = settings.max_mean_bias
    total_variance_inflation = noise_variance_inflation + discretisation_variance_inflation
    if abs(total_variance_inflation) > _MIN_WARNED_VARIANCE_INFLATION_RATIO * target:
        effects.append(
            _describe_sd_bias(dynamics, discretisation_variance_inflation, total_variance_inflation)
        )
    max_mean_bias = bias.compute_max(step_size)
    is_moving = -1.0 < discretisation_variance_inflation < math.inf
    if is_moving and max_mean_bias > _MIN_WARNED_MEAN_BIAS_RATIO * allowed_mean_bias:
        effects.append(f"bias means by up to {max_mean_bias:.2g} SD")
    velocity_change = step_size / choice.max_step_size
    if velocity_change > _MIN_WARNED_VELOCITY_CHANGE_SD:
        effects.append(
            f"move effects far outside of the posterior (the gradient of one row changes their "
            f"velocity by up to {velocity_change:.2g} SD in a step)"
        )
    if not effects:
        return
    remedies = []
    batch_size_factor = max(
        noise_variance_inflation / target, bias.by_noise.compute_max(step_size) / allowed_mean_bias
    )
    if batch_size_factor > _MIN_WARNED_NOISE_RATIO:  # otherwise it is not noise that biases them
        sizes = scale_batch_sizes(inputs.potential.plates, batch_size_factor)
        remedies.append(_describe_batch_sizes(inputs, sizes))
        if settings.estimator is not None and not settings.estimator.needs_reference:
            remedies.append("use gradient_estimator='auto'")
    recommended = recommend_step_size(inputs, dynamics, choice, step.mean_bias)
    noise_ratio = max(
        step.noise_stats.predict_variance_inflation(dynamics, recommended) / target,
        bias.by_noise.compute_max(recommended) / allowed_mean_bias,
    )
    # It exceeds the target where a draw would take more than the largest number of steps.
    if noise_ratio <= _MIN_WARNED_NOISE_RATIO or not remedies:
        remedies.insert(0, f"use step_size={recommended:.2g}, or leave `step_size` out")
    yield PendingWarning(
        f"step_size={step_size:.3g} is predicted to {' and '.join(effects)} "
        f"(target_sd_bias: {100 * target:.2g}%).",
        StepSizeWarning,
        f"{'; or '.join(remedies)}.",
        "user-step-size",
    )


def _find_discretisation_warnings(
    inputs: WarmupInputs, step: StepSizeChoice
) -> Iterator[PendingWarning]:
    """Yield a warning where the discretisation error biases means, or shortens the step."""
    step_size, allowed = float(step.step_size), inputs.settings.max_mean_bias
    bias = step.mean_bias.by_discretisation.compute_max(step_size)
    fix = "use SGHMCSplit(model, integrator='baoab'), which does not have this error."
    if bias > _MIN_WARNED_MEAN_BIAS_RATIO * allowed:
        yield PendingWarning(
            f"Discretisation is predicted to bias posterior means by {bias:.2g} SD at step size "
            f"{step_size:.2g}.",
            DiscretisationWarning,
            fix,
            "discretisation-means",
        )
        return
    longest = step.trace.limits["observations"]
    limit = step.mean_bias.limit_step_size(longest, step_size, allowed)
    noise_limit = step.mean_bias.by_noise.limit_step_size(longest, step_size, allowed)
    is_underdamped = isinstance(inputs.settings.dynamics, UnderdampedLangevin)
    if is_underdamped and limit < _MAX_ADVISED_STEP_SIZE_RATIO * noise_limit:
        yield PendingWarning(
            f"The step size is {limit:.2g} instead of {noise_limit:.2g}, whose discretisation "
            "error would bias posterior means.",
            DiscretisationWarning,
            fix,
            "discretisation-step-size",
        )


def _describe_remedies(inputs: WarmupInputs, draw: DrawPrediction) -> str:
    """Return batch sizes with their steps per draw, and options to leave out."""
    settings, dynamics = inputs.settings, inputs.settings.dynamics
    sizes = _describe_batch_sizes(inputs, draw.batch_sizes)
    remedies = [f"{sizes} ({draw.num_steps} steps per draw)"]
    if settings.estimator is not None and not settings.estimator.needs_reference:
        remedies.append("use gradient_estimator='auto'")
    if settings.inverse_mass_matrix is not None:
        remedies.append("leave `inverse_mass_matrix` out")
    if (
        isinstance(dynamics, UnderdampedLangevin)
        and dynamics.friction != UnderdampedLangevin.friction
    ):
        remedies.append(f"use the default friction of {UnderdampedLangevin.friction}")
    return f"{'; or '.join(remedies)}."


def _describe_batch_sizes(inputs: WarmupInputs, batch_sizes: dict[str, int]) -> str:
    """Return the batch sizes of all plates as arguments of a user, or NUTS for the whole data."""
    sizes = " and ".join(
        f"subsample_size={batch_sizes[p.name]} of plate '{p.name}'"
        + " (the whole data)" * (batch_sizes[p.name] == p.size)
        for p in inputs.potential.plates
    )
    is_whole = all(batch_sizes[p.name] == p.size for p in inputs.potential.plates)
    if not is_whole or inputs.potential.is_stochastic:
        return f"use {sizes}"
    sampler = "NUTS" if inputs.potential.local_latents is None else "numpyro.infer.HMCGibbs"
    return f"use {sampler}, since the recommended minibatch is {sizes}"


def _compute_discretisation_variance_inflation(
    inputs: WarmupInputs, max_curvature: float, dynamics: Dynamics, step_size: float
) -> float:
    """Return the relative increase of variances by the discretisation error; infinite if unstable.

    Zero where the linear form of the SDE is not known, as for a position-dependent metric, whose
    functions have not been checked yet.
    """
    integrator = inputs.settings.integrator
    if dynamics.linear_approximation is None and not dynamics.has_thermostat:
        return 0.0
    limit = replace(NoiseLimit.from_settings(inputs.settings, max_curvature), dynamics=dynamics)
    if step_size <= limit.stability_limit and dynamics.has_default_settings:
        return 0.0
    curvature = limit.effective_curvature
    exact = compute_draw_variance_inflation(dynamics, integrator, step_size, curvature)
    if exact is not None:
        return exact
    scaled_step_size = step_size * dynamics.stiffness(curvature)
    return _simulate_variance_inflation(inputs, dynamics, scaled_step_size, 0.0)


def _simulate_variance_inflation(
    inputs: WarmupInputs, dynamics: Dynamics, step_size: float, noise_variance: float
) -> float:
    """Return the simulated relative increase of variances beyond two standard errors.

    Infinite where chains diverge.
    """
    sd_inflation, error = simulate_sd_inflation(
        dynamics, inputs.settings.integrator, step_size, noise_variance, inputs.potential.dim
    )
    if not math.isfinite(sd_inflation):
        return math.inf
    return 0.0 if abs(sd_inflation) < 2.0 * error else (1.0 + sd_inflation) ** 2 - 1.0


def _describe_sd_bias(
    dynamics: Dynamics, discretisation_variance_inflation: float, total_variance_inflation: float
) -> str:
    """Return the effect of a step size on posterior SDs, as a verb phrase."""
    if math.isinf(discretisation_variance_inflation):
        return "be unstable, so that chains diverge"
    if discretisation_variance_inflation == -1.0:
        if isinstance(dynamics, UnderdampedLangevin):
            return f"stop chains at friction {dynamics.friction:g}"
        return "stop chains"
    sd_inflation = math.sqrt(max(0.0, 1.0 + total_variance_inflation)) - 1.0
    percent, direction = 100.0 * abs(sd_inflation), "wide" if sd_inflation > 0.0 else "narrow"
    percent_text = f"{percent:.2g}" if percent < 100.0 else f"{percent:.0f}"
    return f"make SDs up to {percent_text}% too {direction}"
