"""What the user is told of the gradient's noise, and which minibatch would serve better.

The variance of the noise, and with it how far the means move, is inversely proportional to the
number of rows: so it is known what a draw would cost with more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.minibatch import MinibatchScheme
from numpyro_sgmcmc.dynamics import Underdamped
from numpyro_sgmcmc.posterior.estimators import Estimator
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.noise import NO_NOISE, Noise
from numpyro_sgmcmc.warmup.step_size import MAX_NUM_STEPS, choose_num_steps, choose_step_size

__all__ = [
    "SHIFT_SHARE",
    "Limits",
    "Shifts",
    "is_thermostat_at_work",
    "larger_sizes",
    "tell_of_sorted_rows",
    "warn",
]

SHIFT_SHARE = 1.2  # of the target: how far noise may move a mean, in sds
_CLEARLY_LESS = 2 / 3  # of the work: worth a word
_FEW_STEPS = 50  # no word where a draw takes no more
_LARGER = 2.0 ** np.arange(1, 21)
_ROWS_A_STEP = 100  # whose gradients cost about what a step does besides


def tell_of_sorted_rows(times: float) -> None:
    """Tell that random rows are used in place of blocks.

    :param times: how much noisier blocks are.
    """
    notify(
        f"Blocks of consecutive rows seem {times:.1f} times as noisy as random rows, as if these "
        "were sorted by something that matters. Random rows are used instead, which cost more a "
        "step; to spare that, shuffle the data once: i = numpy.random.permutation(len(y)); "
        "X, y = X[i], y[i]."
    )


class Shifts(NamedTuple):
    """How far the posterior's means are predicted to be off, in sds.

    - **by_noise** - by the gradient's noise, over the step size, shape ``(d,)``.
    - **by_step** - by the step's own error, over the relative excess of variance that it makes.
    - **step_excess** - maps a step size to that excess.
    """

    by_noise: np.ndarray
    by_step: np.ndarray
    step_excess: Callable[[float], float]

    @classmethod
    def none(cls) -> Shifts:
        """Means that stay."""
        return cls(np.zeros(1), np.zeros(1), lambda step_size: 0.0)

    def at(self, step_size: float, times: float = 1.0) -> float:
        """The largest, with minibatches so many times as large."""
        by_step = self.by_step * self.step_excess(step_size)
        return float(np.abs(self.by_noise * step_size / times + by_step).max())

    def longest(self, step_size: float, shortest: float, allowed: float, times: float) -> float:
        """The longest step size from one to another at which no mean is further off than allowed;
        the shortest where there is none.
        """
        while step_size > shortest and self.at(step_size, times) > allowed:
            step_size = max(0.97 * step_size, shortest)
        return step_size


@dataclass(frozen=True)
class Limits:
    """What limits the step size.

    - **estimator** - the gradient's.
    - **noise** - its noise.
    - **curvature** - the largest, whitened.
    - **longest** - step size that suits an exact gradient.
    - **shifts** - how far the posterior's means are off.
    - **start** - the step size before these shortened it.
    """

    estimator: Estimator
    noise: Noise
    curvature: float
    longest: float
    shifts: Shifts
    start: float


class _Draw(NamedTuple):
    """
    - **sizes** - rows of a minibatch, by plate.
    - **num_steps** - steps a draw.
    - **work** - gradients of single rows, those of an estimator by their cost, from one draw to one
      that is about independent, which may be further than a draw's steps.
    - **is_right** - whether noise stays within the target.
    """

    sizes: dict[str, int]
    num_steps: int
    work: float
    is_right: bool


def _draw(context: Context, limits: Limits, times: float) -> _Draw:
    """What a draw takes with minibatches so many times as large, at most all rows."""
    settings, dynamics = context.settings, context.settings.dynamics
    sizes = _sizes(context, times)
    is_independent = settings.minibatch is not None and settings.minibatch.is_independent
    is_all = all(sizes[p.name] == p.size for p in context.target.plates) and not is_independent
    of_estimator, noise = limits.estimator.cost, limits.noise
    noise = noise._replace(
        variance=noise.variance / times,
        mean=noise.mean / times,
        per_epoch=math.ceil(noise.per_epoch / times),
    )
    if is_all:
        of_estimator, noise = 1.0, NO_NOISE
    bias = settings.target_bias
    step_size, inflation = choose_step_size(
        dynamics, limits.longest, noise, limits.curvature, bias, settings.noise_compensation
    )
    shortest = min(step_size, dynamics.relaxation_time(step_size) / MAX_NUM_STEPS)
    times = math.inf if is_all else times
    allowed = SHIFT_SHARE * bias
    shorter = limits.shifts.longest(step_size, shortest, allowed, times)
    time = dynamics.relaxation_time(shorter, noise.variance)
    num_steps, needed = choose_num_steps(time, shorter), max(1.0, time / shorter)
    is_right = inflation <= bias and limits.shifts.at(shorter, times) <= allowed
    work = needed * (_ROWS_A_STEP + sum(sizes.values()) * of_estimator)
    return _Draw(sizes, num_steps, work, is_right)


def _times(number: int, times: float, most: int) -> int:
    """To two significant digits, upwards."""
    unit = 10 ** max(0, math.floor(math.log10(number * times)) - 1)
    return min(most, math.ceil(number * times / unit) * unit)


def _sizes(context: Context, times: float) -> dict[str, int]:
    """Rows of minibatches so many times as large, by plate; at most all."""
    return {p.name: _times(p.subsample_size, times, p.most) for p in context.target.plates}


def _named(context: Context, sizes: dict[str, int]) -> str:
    """Rows of a minibatch by plate, in words."""
    return " and ".join(
        f"of '{p.name}' {'all' if sizes[p.name] == p.size else 'about'} {sizes[p.name]}"
        for p in context.target.plates
    )


def larger_sizes(context: Context, times: float) -> str:
    """Rows of minibatches so many times as large, in words."""
    return _named(context, _sizes(context, times))


def _better(context: Context, limits: Limits) -> _Draw:
    """Of larger minibatches with which noise stays within the target that of least work."""
    draws = [_draw(context, limits, float(times)) for times in _LARGER]
    return min((d for d in draws if d.is_right), key=lambda d: d.work, default=draws[-1])


def warn(
    context: Context,
    limits: Limits,
    scheme: MinibatchScheme,
    step_size: float,
    num_steps: int,
    inflation: float,
) -> None:
    """Say where the target cannot be met or is dear, or a thermostat would be misled.

    :param step_size: with which the chains run.
    :param num_steps: steps a draw.
    :param inflation: excess of the posterior variance predicted at that step size.
    """
    settings, target = context.settings, context.target
    if settings.step_size is None and target.plates:
        shift = limits.shifts._replace(by_step=np.zeros(1)).at(step_size)
        if inflation > 2.0 * settings.target_bias:
            _warn_of_sds(context, limits, inflation)
        elif shift > 2.0 * SHIFT_SHARE * settings.target_bias:
            _warn_of_means(context, limits, shift)
        elif _is_all_left_to_choose(context) and num_steps > _FEW_STEPS:
            _advise(context, limits, num_steps)
    if settings.step_size is None:
        _advise_of_integrator(context, limits, step_size)
    if not scheme.is_independent and is_thermostat_at_work(context, limits.noise, step_size):
        way_out = (
            "a larger subsample_size, or a kernel without a thermostat"
            if target.locals is not None
            else "minibatch='iid', or leave it out"
        )
        notify(
            f"minibatch={scheme.name!r} makes noise that cancels over an epoch, which the "
            f"thermostat takes for heat: posterior sds may be too narrow. Use {way_out}."
        )


def _is_all_left_to_choose(context: Context) -> bool:
    """Whether nothing but noise and means, which are the same for all, shortens steps."""
    settings = context.settings
    is_left = settings.num_steps is None and settings.gradient is None
    return is_left and context.target.locals is None and settings.dynamics.has_default_settings


def is_thermostat_at_work(context: Context, noise: Noise, step_size: float) -> bool:
    """Whether a thermostat must take away more noise than may be left."""
    dynamics = context.settings.dynamics
    inflation = dynamics.noise_inflation(noise.variance, step_size)
    return dynamics.has_thermostat and inflation > context.settings.target_bias


def _warn_of_sds(context: Context, limits: Limits, inflation: float) -> None:
    """Say that the target cannot be met, by how much, and what would meet it."""
    excess, allowed = float(np.sqrt(1 + inflation) - 1), context.settings.target_bias
    warning = ": do not trust them" if excess > 2.0 * allowed else ""
    notify(
        f"The minibatch gradient is so noisy that posterior sds are predicted to be "
        f"{100 * excess:.2g} % too wide, where target_bias allows {100 * allowed:.2g} %, at "
        f"{MAX_NUM_STEPS} steps a draw{warning}. Use {_larger(context, _better(context, limits))}."
    )


def _warn_of_means(context: Context, limits: Limits, shift: float) -> None:
    """Say that noise moves means, by how much, and what would hold them."""
    notify(
        f"The minibatch gradient is so noisy that means are predicted to be {shift:.2g} posterior "
        f"sds off at {MAX_NUM_STEPS} steps a draw: do not trust them. Use "
        f"{_larger(context, _better(context, limits))}."
    )


def _advise(context: Context, limits: Limits, num_steps: int) -> None:
    """Say where the same posterior is to be had for clearly less work."""
    better = _better(context, limits)
    rows = sum(p.subsample_size for p in context.target.plates)
    work = num_steps * (_ROWS_A_STEP + rows * limits.estimator.cost)
    if better.work > _CLEARLY_LESS * work or not better.is_right:
        return
    notify(
        f"The minibatch gradient is so noisy that a draw takes {num_steps} short steps. "
        f"{work / better.work:.1f} times less work would be {_larger(context, better)}."
    )


def _advise_of_integrator(context: Context, limits: Limits, step_size: float) -> None:
    """Say where the step's own error moves means or holds steps short: another one has none."""
    allowed = SHIFT_SHARE * context.settings.target_bias
    off = limits.shifts._replace(by_noise=np.zeros(1)).at(step_size)
    if off > 2.0 * allowed:
        notify(
            f"Means are predicted to be {off:.2g} posterior sds off by the error of steps of "
            f"{step_size:.2g}, small as it is, because many effects share it: do not trust them. "
            "SHMC(model, scheme='baoab') has no such error."
        )
        return
    held, free = (
        shifts.longest(limits.start, step_size, allowed, times=1.0)
        for shifts in (limits.shifts, limits.shifts._replace(by_step=np.zeros(1)))
    )
    if isinstance(context.settings.dynamics, Underdamped) and held < _CLEARLY_LESS * free:
        notify(
            f"The step's own error would move means that many effects share, so that steps are "
            f"{held:.2g} long and not {free:.2g}. SHMC(model, scheme='baoab') has no such error."
        )


def _larger(context: Context, draw: _Draw) -> str:
    """A larger minibatch and its steps, in words; or what spares it."""
    settings, dynamics = context.settings, context.settings.dynamics
    sizes = _named(context, draw.sizes)
    cures = [f"a larger subsample_size ({sizes}: {draw.num_steps} steps a draw)"]
    if settings.gradient is not None and not settings.gradient.has_anchor:
        cures.append("gradient='auto'")
    if settings.inverse_mass_matrix is not None:
        cures.append("no inverse_mass_matrix of your own")
    if isinstance(dynamics, Underdamped) and dynamics.friction != Underdamped.friction:
        cures.append(f"the default friction of {Underdamped.friction}")
    return ", or ".join(cures)
