"""What the user is told of the gradient's noise, and which minibatch would serve better.

The variance of the noise, and with it how far the means move, is inversely proportional to the
number of rows: so it is known what a draw would cost with more of them.

What is wrong with a step size that is given, told before any sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.context import WarmupContext
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE, GradientNoiseStats
from numpyro_sgmcmc.adaptation.step_size import (
    MAX_NUM_STEPS,
    choose_num_steps,
    compute_draw_variance_inflation,
    compute_effective_curvature,
    compute_stability_limit,
    limit_step_size_by_noise,
    simulate_sd_inflation,
)
from numpyro_sgmcmc.data.subsampling import Subsampling
from numpyro_sgmcmc.dynamics import Dynamics, UnderdampedLangevin
from numpyro_sgmcmc.errors import warn_user
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator

__all__ = [
    "MEAN_BIAS_TO_TARGET_RATIO",
    "PredictedMeanBias",
    "StepSizeLimits",
    "describe_scaled_batch_sizes",
    "is_thermostat_active",
    "warn_about_gradient_noise",
    "warn_about_user_step_size",
    "warn_sorted_data",
]

MEAN_BIAS_TO_TARGET_RATIO = 1.2  # of the target: how far noise may move a mean, in sds


_MAX_ADVISED_COST_RATIO = 2 / 3  # of the work: worth a word


_ACCEPTABLE_STEPS_PER_DRAW = 50  # no word where a draw takes no more


_BATCH_SIZE_FACTORS = 2.0 ** np.arange(1, 21)


_STEP_OVERHEAD_ROWS = 100  # whose gradients cost about what a step does besides


def warn_sorted_data(noise_variance_ratio: float) -> None:
    """Tell that random rows are used in place of blocks.

    :param noise_variance_ratio: how much noisier blocks are.
    """
    warn_user(
        f"Blocks of consecutive rows seem {noise_variance_ratio:.1f} times as noisy as random rows, as if these "
        "were sorted by something that matters. Random rows are used instead, which cost more a "
        "step; to spare that, shuffle the data once: i = numpy.random.permutation(len(y)); "
        "X, y = X[i], y[i]."
    )


class PredictedMeanBias(NamedTuple):
    """How far the posterior's means are predicted to be off, in sds.

    - **noise_bias_per_step_size** - by the gradient's noise, over the step size, shape ``(d,)``.
    - **bias_per_variance_inflation** - by the step's own error, over the relative excess of variance that it makes.
    - **discretisation_variance_inflation** - maps a step size to that excess.
    """

    noise_bias_per_step_size: np.ndarray
    bias_per_variance_inflation: np.ndarray
    discretisation_variance_inflation: Callable[[float], float]

    @classmethod
    def zero(cls) -> PredictedMeanBias:
        """Means that stay."""
        return cls(np.zeros(1), np.zeros(1), lambda step_size: 0.0)

    def compute_max(self, step_size: float, batch_size_factor: float = 1.0) -> float:
        """The largest, with minibatches so many times as large."""
        by_step = self.bias_per_variance_inflation * self.discretisation_variance_inflation(
            step_size
        )
        return float(
            np.abs(self.noise_bias_per_step_size * step_size / batch_size_factor + by_step).max()
        )

    def limit_step_size(
        self, step_size: float, min_step_size: float, max_mean_bias: float, batch_size_factor: float
    ) -> float:
        """The longest step size from one to another at which no mean is further off than allowed;
        the shortest where there is none.
        """
        while (
            step_size > min_step_size
            and self.compute_max(step_size, batch_size_factor) > max_mean_bias
        ):
            step_size = max(0.97 * step_size, min_step_size)
        return step_size


@dataclass(frozen=True)
class StepSizeLimits:
    """What limits the step size.

    - **estimator** - the gradient's.
    - **noise_stats** - its noise.
    - **max_curvature** - the largest, whitened.
    - **integrator_step_size** - step size that suits an exact gradient.
    - **mean_bias** - how far the posterior's means are off.
    - **step_size_before_mean_bias** - the step size before these shortened it.
    """

    estimator: GradientEstimator
    noise_stats: GradientNoiseStats
    max_curvature: float
    integrator_step_size: float
    mean_bias: PredictedMeanBias
    step_size_before_mean_bias: float


class _DrawCost(NamedTuple):
    """
    - **batch_sizes** - rows of a minibatch, by plate.
    - **num_steps** - steps a draw.
    - **cost** - gradients of single rows, those of an estimator by their cost, from one draw to one
      that is about independent, which may be further than a draw's steps.
    - **is_within_target** - whether noise stays within the target.
    """

    batch_sizes: dict[str, int]
    num_steps: int
    cost: float
    is_within_target: bool


def _compute_draw_cost(
    context: WarmupContext, limits: StepSizeLimits, batch_size_factor: float
) -> _DrawCost:
    """What a draw takes with minibatches so many times as large, at most all rows."""
    settings, dynamics = context.settings, context.settings.dynamics
    sizes = _scale_batch_sizes(context, batch_size_factor)
    is_independent = settings.subsampling is not None and settings.subsampling.is_independent
    is_all = all(sizes[p.name] == p.size for p in context.potential.plates) and not is_independent
    of_estimator, noise = limits.estimator.relative_cost, limits.noise_stats
    noise = noise._replace(
        variance=noise.variance / batch_size_factor,
        mean_variance=noise.mean_variance / batch_size_factor,
        batches_per_epoch=math.ceil(noise.batches_per_epoch / batch_size_factor),
    )
    if is_all:
        of_estimator, noise = 1.0, NO_NOISE
    bias = settings.target_sd_bias
    step_size, inflation = limit_step_size_by_noise(
        dynamics,
        limits.integrator_step_size,
        noise,
        limits.max_curvature,
        bias,
        settings.noise_compensation,
    )
    shortest = min(step_size, dynamics.relaxation_time(step_size) / MAX_NUM_STEPS)
    batch_size_factor = math.inf if is_all else batch_size_factor
    allowed = MEAN_BIAS_TO_TARGET_RATIO * bias
    shorter = limits.mean_bias.limit_step_size(step_size, shortest, allowed, batch_size_factor)
    time = dynamics.relaxation_time(shorter, noise.variance)
    num_steps, needed = choose_num_steps(time, shorter), max(1.0, time / shorter)
    is_right = (
        inflation <= bias and limits.mean_bias.compute_max(shorter, batch_size_factor) <= allowed
    )
    work = needed * (_STEP_OVERHEAD_ROWS + sum(sizes.values()) * of_estimator)
    return _DrawCost(sizes, num_steps, work, is_right)


def _scale_and_round_up(batch_size: int, batch_size_factor: float, max_batch_size: int) -> int:
    """To two significant digits, upwards."""
    unit = 10 ** max(0, math.floor(math.log10(batch_size * batch_size_factor)) - 1)
    return min(max_batch_size, math.ceil(batch_size * batch_size_factor / unit) * unit)


def _scale_batch_sizes(context: WarmupContext, batch_size_factor: float) -> dict[str, int]:
    """Rows of minibatches so many times as large, by plate; at most all."""
    return {
        p.name: _scale_and_round_up(p.subsample_size, batch_size_factor, p.max_subsample_size)
        for p in context.potential.plates
    }


def _describe_batch_sizes(context: WarmupContext, batch_sizes: dict[str, int]) -> str:
    """Rows of a minibatch by plate, in words."""
    return " and ".join(
        f"of '{p.name}' {'all' if batch_sizes[p.name] == p.size else 'about'} {batch_sizes[p.name]}"
        for p in context.potential.plates
    )


def describe_scaled_batch_sizes(context: WarmupContext, batch_size_factor: float) -> str:
    """Rows of minibatches so many times as large, in words."""
    return _describe_batch_sizes(context, _scale_batch_sizes(context, batch_size_factor))


def _find_cheapest_draw(context: WarmupContext, limits: StepSizeLimits) -> _DrawCost:
    """Of larger minibatches with which noise stays within the target that of least work."""
    draws = [_compute_draw_cost(context, limits, float(times)) for times in _BATCH_SIZE_FACTORS]
    return min((d for d in draws if d.is_within_target), key=lambda d: d.cost, default=draws[-1])


def warn_about_gradient_noise(
    context: WarmupContext,
    limits: StepSizeLimits,
    subsampling: Subsampling,
    step_size: float,
    num_steps: int,
    variance_inflation: float,
) -> None:
    """Say where the target cannot be met or is dear, or a thermostat would be misled.

    :param step_size: with which the chains run.
    :param num_steps: steps a draw.
    :param variance_inflation: excess of the posterior variance predicted at that step size.
    """
    settings, target = context.settings, context.potential
    if settings.step_size is None and target.plates:
        shift = limits.mean_bias._replace(bias_per_variance_inflation=np.zeros(1)).compute_max(
            step_size
        )
        if variance_inflation > 2.0 * settings.target_sd_bias:
            _warn_sd_bias(context, limits, variance_inflation)
        elif shift > 2.0 * MEAN_BIAS_TO_TARGET_RATIO * settings.target_sd_bias:
            _warn_mean_bias(context, limits, shift)
        elif _is_tuning_unrestricted(context) and num_steps > _ACCEPTABLE_STEPS_PER_DRAW:
            _advise_batch_size(context, limits, num_steps)
    if settings.step_size is None:
        _advise_integrator(context, limits, step_size)
    if not subsampling.is_independent and is_thermostat_active(
        context, limits.noise_stats, step_size
    ):
        way_out = (
            "a larger subsample_size, or a kernel without a thermostat"
            if target.local_latents is not None
            else "subsampling='iid', or leave it out"
        )
        warn_user(
            f"minibatch={subsampling.name!r} makes noise that cancels over an epoch, which the "
            f"thermostat takes for heat: posterior sds may be too narrow. Use {way_out}."
        )


def _is_tuning_unrestricted(context: WarmupContext) -> bool:
    """Whether nothing but noise and means, which are the same for all, shortens steps."""
    settings = context.settings
    is_left = settings.num_steps is None and settings.estimator is None
    return (
        is_left
        and context.potential.local_latents is None
        and settings.dynamics.has_default_settings
    )


def is_thermostat_active(
    context: WarmupContext, noise_stats: GradientNoiseStats, step_size: float
) -> bool:
    """Whether a thermostat must take away more noise than may be left."""
    dynamics = context.settings.dynamics
    inflation = dynamics.variance_inflation(noise_stats.variance, step_size)
    return dynamics.has_thermostat and inflation > context.settings.target_sd_bias


def _warn_sd_bias(
    context: WarmupContext, limits: StepSizeLimits, variance_inflation: float
) -> None:
    """Say that the target cannot be met, by how much, and what would meet it."""
    excess, allowed = float(np.sqrt(1 + variance_inflation) - 1), context.settings.target_sd_bias
    warning = ": do not trust them" if excess > 2.0 * allowed else ""
    warn_user(
        f"The minibatch gradient is so noisy that posterior sds are predicted to be "
        f"{100 * excess:.2g} % too wide, where target_sd_bias allows {100 * allowed:.2g} %, at "
        f"{MAX_NUM_STEPS} steps a draw{warning}. Use {_describe_remedies(context, _find_cheapest_draw(context, limits))}."
    )


def _warn_mean_bias(context: WarmupContext, limits: StepSizeLimits, mean_bias: float) -> None:
    """Say that noise moves means, by how much, and what would hold them."""
    warn_user(
        f"The minibatch gradient is so noisy that means are predicted to be {mean_bias:.2g} posterior "
        f"sds off at {MAX_NUM_STEPS} steps a draw: do not trust them. Use "
        f"{_describe_remedies(context, _find_cheapest_draw(context, limits))}."
    )


def _advise_batch_size(context: WarmupContext, limits: StepSizeLimits, num_steps: int) -> None:
    """Say where the same posterior is to be had for clearly less work."""
    better = _find_cheapest_draw(context, limits)
    rows = sum(p.subsample_size for p in context.potential.plates)
    work = num_steps * (_STEP_OVERHEAD_ROWS + rows * limits.estimator.relative_cost)
    if better.cost > _MAX_ADVISED_COST_RATIO * work or not better.is_within_target:
        return
    warn_user(
        f"The minibatch gradient is so noisy that a draw takes {num_steps} short steps. "
        f"{work / better.cost:.1f} times less work would be {_describe_remedies(context, better)}."
    )


def _advise_integrator(context: WarmupContext, limits: StepSizeLimits, step_size: float) -> None:
    """Say where the step's own error moves means or holds steps short: another one has none."""
    allowed = MEAN_BIAS_TO_TARGET_RATIO * context.settings.target_sd_bias
    off = limits.mean_bias._replace(noise_bias_per_step_size=np.zeros(1)).compute_max(step_size)
    if off > 2.0 * allowed:
        warn_user(
            f"Means are predicted to be {off:.2g} posterior sds off by the error of steps of "
            f"{step_size:.2g}, small as it is, because many effects share it: do not trust them. "
            "SHMC(model, integrator='baoab') has no such error."
        )
        return
    held, free = (
        shifts.limit_step_size(
            limits.step_size_before_mean_bias, step_size, allowed, batch_size_factor=1.0
        )
        for shifts in (
            limits.mean_bias,
            limits.mean_bias._replace(bias_per_variance_inflation=np.zeros(1)),
        )
    )
    if (
        isinstance(context.settings.dynamics, UnderdampedLangevin)
        and held < _MAX_ADVISED_COST_RATIO * free
    ):
        warn_user(
            f"The step's own error would move means that many effects share, so that steps are "
            f"{held:.2g} long and not {free:.2g}. SHMC(model, integrator='baoab') has no such error."
        )


def _describe_remedies(context: WarmupContext, draw_cost: _DrawCost) -> str:
    """A larger minibatch and its steps, in words; or what spares it."""
    settings, dynamics = context.settings, context.settings.dynamics
    sizes = _describe_batch_sizes(context, draw_cost.batch_sizes)
    cures = [f"a larger subsample_size ({sizes}: {draw_cost.num_steps} steps a draw)"]
    if settings.estimator is not None and not settings.estimator.needs_reference:
        cures.append("gradient_estimator='auto'")
    if settings.inverse_mass_matrix is not None:
        cures.append("no inverse_mass_matrix of your own")
    if (
        isinstance(dynamics, UnderdampedLangevin)
        and dynamics.friction != UnderdampedLangevin.friction
    ):
        cures.append(f"the default friction of {UnderdampedLangevin.friction}")
    return ", or ".join(cures)


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
