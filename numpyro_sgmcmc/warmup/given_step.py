"""What is wrong with a step size that is given, told before any sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.dynamics import Dynamics, Underdamped
from numpyro_sgmcmc.warmup.advice import SHIFT_SHARE, Limits, larger_sizes
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.discretisation import draw_excess
from numpyro_sgmcmc.warmup.step_size import simulated_excess, stiff_curvature, stiff_step_size

__all__ = ["warn_of_given_step"]

_CLEARLY = 3.0  # excess of variance over the target for sds: the worst of many is overrated


def warn_of_given_step(
    context: Context,
    limits: Limits,
    dynamics: Dynamics,
    inflation: float,
    suitable: Callable[[], float],
) -> None:
    """Say where a given step size is predicted to make sds or means clearly wrong.

    Nothing is said of schedules and traced step sizes, with which chains run at other ones, nor
    where pilot chains have found no region of which to predict anything.

    :param dynamics: the SDE, for the whitened coordinates.
    :param inflation: excess of the posterior variance predicted of the gradient's noise.
    :param suitable: finds the step size that would have been chosen.
    """
    settings = context.settings
    step_size, allowed = settings.step_size, settings.target_bias
    if step_size is None or not (settings.is_step_fixed and settings.has_region):
        return
    if settings.noise_compensation:  # of which it is told where that cannot be
        inflation = 0.0
    elif inflation > _CLEARLY * allowed and dynamics.has_thermostat and not dynamics.linearised:
        # It takes away a part that no formula tells.
        heard = _simulated(context, dynamics, step_size, limits.noise.variance)
        inflation = min(inflation, heard)
    own = _own_excess(context, limits, dynamics, step_size)
    by_noise = _share_left(dynamics, limits, step_size, inflation) * limits.shifts.by_noise
    shifts = limits.shifts._replace(by_noise=by_noise)
    wrong = []
    if abs(inflation + own) > _CLEARLY * allowed:
        wrong.append(_wrong_sds(dynamics, own, inflation, allowed))
    shift, is_moving = shifts.at(step_size), -1.0 < own < math.inf
    if is_moving and shift > 2.0 * SHIFT_SHARE * allowed:
        wrong.append(f"put means up to {shift:.2g} posterior sds off")
    if not wrong:
        return
    cures = [f"about {suitable():.2g}, or leave it to the warm-up"]
    of_noise = shifts._replace(by_step=np.zeros(1)).at(step_size)
    times = max(inflation / allowed, of_noise / (SHIFT_SHARE * allowed))
    if times > 2.0:  # otherwise it is not noise that makes them wrong
        cures.append(f"a larger subsample_size ({larger_sizes(context, times)})")
        if settings.gradient is not None and not settings.gradient.has_anchor:
            cures.append("gradient='auto'")
    said = f"step_size={step_size:.3g} is predicted to {' and '.join(wrong)}."
    notify(f"{said} Use {', or '.join(cures)}.")


def _own_excess(context: Context, limits: Limits, dynamics: Dynamics, step_size: float) -> float:
    """Relative excess of variance by the step's own error; infinite where it is not stable.

    Zero where no linear form of the SDE is known, as where it changes with the position: its
    functions have yet to be checked.
    """
    if dynamics.linearised is None and not dynamics.has_thermostat:
        return 0.0
    curvature, scheme = stiff_curvature(limits.curvature), context.settings.scheme
    is_short = step_size <= stiff_step_size(dynamics, limits.longest, limits.curvature)
    if is_short and dynamics.has_default_settings:
        return 0.0
    exact = draw_excess(dynamics, scheme, step_size, curvature)
    if exact is not None:
        return exact
    return _simulated(context, dynamics, step_size * dynamics.stiffness(curvature), 0.0)


def _simulated(context: Context, dynamics: Dynamics, step_size: float, variance: float) -> float:
    """Relative excess of variance that simulated chains have, if it is clear; infinite where lost.

    :param variance: of the gradient's noise.
    """
    scheme, dim = context.settings.scheme, context.target.dim
    sd, error = simulated_excess(dynamics, scheme, step_size, variance, dim)
    if not math.isfinite(sd):
        return math.inf
    return 0.0 if abs(sd) < 2.0 * error else (1.0 + sd) ** 2 - 1.0


def _share_left(dynamics: Dynamics, limits: Limits, step_size: float, inflation: float) -> float:
    """Of what noise does, the share that does not cancel over an epoch."""
    at_once = dynamics.noise_inflation(limits.noise.variance, step_size, limits.noise.varying)
    return min(1.0, inflation / at_once) if at_once > 0.0 else 1.0


def _wrong_sds(dynamics: Dynamics, own: float, inflation: float, allowed: float) -> str:
    """What becomes of the sds, in words."""
    if math.isinf(own):
        return "be too long to be stable, so that chains leave the posterior"
    if own == -1.0:
        friction = (
            f" at friction {dynamics.friction:g}" if isinstance(dynamics, Underdamped) else ""
        )
        return f"leave chains where they are: it ends all momentum{friction}"
    excess = math.sqrt(max(0.0, 1.0 + own + inflation)) - 1.0
    kind, percent = "wide" if excess > 0.0 else "narrow", 100.0 * abs(excess)
    size = f"{percent:.2g}" if percent < 100.0 else f"{percent:.0f}"
    return (
        f"make posterior sds up to {size} % too {kind} (target_bias allows {100 * allowed:.2g} %)"
    )
