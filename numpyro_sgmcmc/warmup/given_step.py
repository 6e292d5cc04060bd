"""What is wrong with a step size that is given, told before any sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from numpyro_sgmcmc.checks import warn_user
from numpyro_sgmcmc.dynamics import Dynamics, UnderdampedLangevin
from numpyro_sgmcmc.warmup.advice import (
    MEAN_BIAS_TO_TARGET_RATIO,
    StepSizeLimits,
    describe_scaled_batch_sizes,
)
from numpyro_sgmcmc.warmup.context import WarmupContext
from numpyro_sgmcmc.warmup.discretisation import compute_draw_variance_inflation
from numpyro_sgmcmc.warmup.step_size import (
    compute_effective_curvature,
    compute_stability_limit,
    simulate_sd_inflation,
)

__all__ = ["warn_about_user_step_size"]

_MIN_WARNED_VARIANCE_INFLATION_RATIO = (
    3.0  # excess of variance over the target for sds: the worst of many is overrated
)


def warn_about_user_step_size(
    context: WarmupContext,
    limits: StepSizeLimits,
    dynamics: Dynamics,
    noise_variance_inflation: float,
    choose_default_step_size: Callable[[], float],
) -> None:
    """Say where a given step size is predicted to make sds or means clearly wrong.

    Nothing is said of schedules and traced step sizes, with which chains run at other ones, nor
    where pilot chains have found no region of which to predict anything.

    :param dynamics: the SDE, for the whitened coordinates.
    :param noise_variance_inflation: excess of the posterior variance predicted of the gradient's noise.
    :param choose_default_step_size: finds the step size that would have been chosen.
    """
    settings = context.settings
    step_size, allowed = settings.step_size, settings.target_sd_bias
    if step_size is None or not (settings.has_constant_step_size and settings.has_dominant_mode):
        return
    if settings.noise_compensation:  # of which it is told where that cannot be
        noise_variance_inflation = 0.0
    elif (
        noise_variance_inflation > _MIN_WARNED_VARIANCE_INFLATION_RATIO * allowed
        and dynamics.has_thermostat
        and not dynamics.linear_approximation
    ):
        # It takes away a part that no formula tells.
        heard = _simulate_variance_inflation(
            context, dynamics, step_size, limits.noise_stats.variance
        )
        noise_variance_inflation = min(noise_variance_inflation, heard)
    own = _compute_discretisation_inflation(context, limits, dynamics, step_size)
    by_noise = (
        _compute_uncancelled_noise_fraction(dynamics, limits, step_size, noise_variance_inflation)
        * limits.mean_bias.noise_bias_per_step_size
    )
    shifts = limits.mean_bias._replace(noise_bias_per_step_size=by_noise)
    wrong = []
    if abs(noise_variance_inflation + own) > _MIN_WARNED_VARIANCE_INFLATION_RATIO * allowed:
        wrong.append(_describe_sd_bias(dynamics, own, noise_variance_inflation, allowed))
    shift, is_moving = shifts.compute_max(step_size), -1.0 < own < math.inf
    if is_moving and shift > 2.0 * MEAN_BIAS_TO_TARGET_RATIO * allowed:
        wrong.append(f"put means up to {shift:.2g} posterior sds off")
    if not wrong:
        return
    cures = [f"about {choose_default_step_size():.2g}, or leave it to the warm-up"]
    of_noise = shifts._replace(bias_per_variance_inflation=np.zeros(1)).compute_max(step_size)
    times = max(
        noise_variance_inflation / allowed, of_noise / (MEAN_BIAS_TO_TARGET_RATIO * allowed)
    )
    if times > 2.0:  # otherwise it is not noise that makes them wrong
        cures.append(f"a larger subsample_size ({describe_scaled_batch_sizes(context, times)})")
        if settings.estimator is not None and not settings.estimator.needs_reference:
            cures.append("gradient_estimator='auto'")
    said = f"step_size={step_size:.3g} is predicted to {' and '.join(wrong)}."
    warn_user(f"{said} Use {', or '.join(cures)}.")


def _compute_discretisation_inflation(
    context: WarmupContext, limits: StepSizeLimits, dynamics: Dynamics, step_size: float
) -> float:
    """Relative excess of variance by the step's own error; infinite where it is not stable.

    Zero where no linear form of the SDE is known, as where it changes with the position: its
    functions have yet to be checked.
    """
    if dynamics.linear_approximation is None and not dynamics.has_thermostat:
        return 0.0
    curvature, scheme = (
        compute_effective_curvature(limits.max_curvature),
        context.settings.integrator,
    )
    is_short = step_size <= compute_stability_limit(
        dynamics, limits.integrator_step_size, limits.max_curvature
    )
    if is_short and dynamics.has_default_settings:
        return 0.0
    exact = compute_draw_variance_inflation(dynamics, scheme, step_size, curvature)
    if exact is not None:
        return exact
    return _simulate_variance_inflation(
        context, dynamics, step_size * dynamics.stiffness(curvature), 0.0
    )


def _simulate_variance_inflation(
    context: WarmupContext, dynamics: Dynamics, step_size: float, noise_variance: float
) -> float:
    """Relative excess of variance that simulated chains have, if it is clear; infinite where lost.

    :param noise_variance: of the gradient's noise.
    """
    scheme, dim = context.settings.integrator, context.potential.dim
    sd, error = simulate_sd_inflation(dynamics, scheme, step_size, noise_variance, dim)
    if not math.isfinite(sd):
        return math.inf
    return 0.0 if abs(sd) < 2.0 * error else (1.0 + sd) ** 2 - 1.0


def _compute_uncancelled_noise_fraction(
    dynamics: Dynamics, limits: StepSizeLimits, step_size: float, noise_variance_inflation: float
) -> float:
    """Of what noise does, the share that does not cancel over an epoch."""
    at_once = dynamics.variance_inflation(
        limits.noise_stats.variance, step_size, limits.noise_stats.position_dependent_fraction
    )
    return min(1.0, noise_variance_inflation / at_once) if at_once > 0.0 else 1.0


def _describe_sd_bias(
    dynamics: Dynamics,
    discretisation_variance_inflation: float,
    noise_variance_inflation: float,
    target_sd_bias: float,
) -> str:
    """What becomes of the sds, in words."""
    if math.isinf(discretisation_variance_inflation):
        return "be too long to be stable, so that chains leave the posterior"
    if discretisation_variance_inflation == -1.0:
        friction = (
            f" at friction {dynamics.friction:g}"
            if isinstance(dynamics, UnderdampedLangevin)
            else ""
        )
        return f"leave chains where they are: it ends all momentum{friction}"
    excess = (
        math.sqrt(max(0.0, 1.0 + discretisation_variance_inflation + noise_variance_inflation))
        - 1.0
    )
    kind, percent = "wide" if excess > 0.0 else "narrow", 100.0 * abs(excess)
    size = f"{percent:.2g}" if percent < 100.0 else f"{percent:.0f}"
    return f"make posterior sds up to {size} % too {kind} (target_sd_bias allows {100 * target_sd_bias:.2g} %)"
