"""Prediction of the cost of a draw with minibatches of other sizes.

The variance of the gradient noise is proportional to ``1 / B``, minus ``1 / N`` for contiguous
minibatches, with B of the N rows in a minibatch. What the warm-up has measured at one batch
size therefore determines step size, steps per draw and bias at any other (:func:`predict_draws`).
A step costs a constant plus a multiple of B (:class:`StepCost`).
:func:`~numpyro_sgmcmc.suggest_subsample_size` measures both. The warm-up, which compiles no program
for it, counts the operations of a gradient (:func:`estimate_step_cost`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import random
from scipy.optimize import nnls

from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE
from numpyro_sgmcmc.adaptation.settings import StepSizeTrace, SubsamplingChoice, WarmupSettings
from numpyro_sgmcmc.adaptation.step_size import (
    NoiseLimit,
    PredictedMeanBias,
    choose_num_steps,
    limit_step_size_by_mean_bias,
    limit_step_size_by_observations,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.jaxpr import count_work
from numpyro_sgmcmc.model.potential import Potential

BATCH_SIZE_FACTORS = tuple(2.0**k for k in range(-4, 21))
"""Batch sizes for which draws are predicted, relative to the model's."""

# Smaller minibatches are not predicted: the noise of so few rows is far from normal.
_MIN_RANDOM_ROWS = 16
# Of the sizes whose predicted cost is within this ratio of the lowest, the largest is recommended:
# it has the least noise.
_SIMILAR_COST_RATIO = 1.2
# Seconds on a CPU, tuned on the models of benchmarks/batch_size.py and examples/flights.py: of one
# of the chains that step together and of a coordinate in it; of an operation of a gradient, for all
# of them together, and of a number that it computes.
_SECONDS_PER_STEP, _SECONDS_PER_COORDINATE = 3.5e-6, 1.2e-8
_SECONDS_PER_OPERATION = 5.5e-8
SECONDS_PER_VALUE = 1.3e-10
"""Seconds of a multiplication and addition, or of one number of an elementwise operation."""
_NUM_CHAINS = 4  # the number is not known yet


class StepCost(NamedTuple):
    """Seconds of a step of one chain, linear in the rows of its minibatch.

    - **per_step** - part that does not depend on the batch size.
    - **per_row** - with the gradient estimator that the warm-up chose.
    """

    per_step: float
    per_row: float

    @classmethod
    def fit(cls, num_rows: Sequence[float], seconds: Sequence[float]) -> StepCost:
        """Fit the seconds of steps, with equal relative errors; neither part is negative."""
        weights = 1.0 / np.array(seconds)
        design = np.stack([weights, np.array(num_rows) * weights], 1)
        per_step, per_row = nnls(design, np.ones(len(weights)))[0]
        return cls(float(per_step), float(per_row))


class DrawPrediction(NamedTuple):
    """A draw with minibatches of a size.

    - **batch_sizes** - rows of a minibatch by plate.
    - **num_rows** - rows that a step reads, with the chosen gradient estimator. All rows need no
      control variate and count as fewer.
    - **num_steps** - gradient steps per draw.
    - **steps_per_effective_draw** - more than these where draws are correlated.
    - **is_within_target** - whether the predicted biases are within the target.
    """

    batch_sizes: dict[str, int]
    num_rows: float
    num_steps: int
    steps_per_effective_draw: float
    is_within_target: bool

    def compute_seconds(self, step_cost: StepCost) -> float:
        """Return the seconds of one chain per effective draw."""
        return self.steps_per_effective_draw * (
            step_cost.per_step + step_cost.per_row * self.num_rows
        )


def estimate_gradient_seconds(
    potential: Potential, arguments: Arguments, num_together: int, batch_size_factor: int = 1
) -> float:
    """Estimate the seconds of a minibatch gradient on a CPU from the operations that it traces.

    :param num_together: gradients that one compiled operation computes.
    :param batch_size_factor: batch sizes relative to the plates'.
    """
    indices = {
        p.name: jax.ShapeDtypeStruct((batch_size_factor * p.subsample_size,), np.int32)
        for p in potential.plates
    }
    key = random.key(0) if potential.is_stochastic else None
    position = jax.ShapeDtypeStruct((potential.dim,), potential.dtype)
    jaxpr = jax.make_jaxpr(potential.gradient)(position, indices, arguments, key).jaxpr
    num_operations, num_values = count_work(jaxpr)
    return _SECONDS_PER_OPERATION * num_operations / num_together + SECONDS_PER_VALUE * num_values


def estimate_step_cost(
    potential: Potential, arguments: Arguments, choice: SubsamplingChoice
) -> StepCost:
    """Estimate the cost of a step on a CPU from the operations of a gradient.

    Accelerators compute rows faster than that, so that larger minibatches gain more there.
    """
    seconds, doubled = (
        estimate_gradient_seconds(potential, arguments, _NUM_CHAINS, factor) for factor in (1, 2)
    )
    seconds_of_rows, relative_cost = doubled - seconds, choice.estimator.relative_cost
    per_step = relative_cost * max(0.0, seconds - seconds_of_rows)
    per_step += SECONDS_PER_VALUE * choice.num_factor_products
    return StepCost(
        _SECONDS_PER_STEP + _SECONDS_PER_COORDINATE * potential.dim + per_step,
        relative_cost * seconds_of_rows / sum(p.subsample_size for p in potential.plates),
    )


def predict_draws(
    settings: WarmupSettings,
    plates: Sequence[Plate],
    choice: SubsamplingChoice,
    limits: StepSizeTrace,
    mean_bias: PredictedMeanBias,
    factors: Sequence[float] = BATCH_SIZE_FACTORS,
) -> list[DrawPrediction]:
    """Predict draws with minibatches of other sizes, in increasing order.

    :param plates: the subsampled plates, with the rows that every minibatch includes.
    :param choice: gradient estimator and its noise, at the plates' batch sizes.
    :param limits: of the step size at these sizes.
    :param mean_bias: predicted at these sizes.
    :param factors: batch sizes relative to the plates'. Sizes with hardly any random rows are left
        out.
    """
    by_size: dict[tuple[int, ...], DrawPrediction] = {}
    for factor in sorted(factors):
        batch_sizes = scale_batch_sizes(plates, factor)
        num_random = min(batch_sizes[p.name] - len(p.included_rows) for p in plates)
        key = tuple(batch_sizes.values())
        if key not in by_size and (num_random >= _MIN_RANDOM_ROWS or factor >= 1.0):
            by_size[key] = _predict_draw(settings, plates, choice, limits, mean_bias, batch_sizes)
    return list(by_size.values())


def _predict_draw(
    settings: WarmupSettings,
    plates: Sequence[Plate],
    choice: SubsamplingChoice,
    limits: StepSizeTrace,
    mean_bias: PredictedMeanBias,
    batch_sizes: dict[str, int],
) -> DrawPrediction:
    """Predict a draw with minibatches of one size."""
    dynamics = settings.dynamics
    # The noise of shuffled minibatches is measured with iid ones.
    is_contiguous = choice.subsampling.is_contiguous
    noise_ratio = max(_compute_noise_ratio(p, batch_sizes[p.name], is_contiguous) for p in plates)
    batch_size_factor = math.inf if noise_ratio == 0.0 else 1.0 / noise_ratio
    noise_stats = NO_NOISE
    if noise_ratio > 0.0:
        stats = choice.noise_stats
        noise_stats = stats._replace(
            variance=stats.variance * noise_ratio,
            mean_variance=stats.mean_variance * noise_ratio,
            batches_per_epoch=math.ceil(stats.batches_per_epoch / batch_size_factor),
        )
    noise_limit = NoiseLimit.from_settings(settings, choice.max_curvature)
    step_size = settings.step_size
    if step_size is None:
        step_size = noise_limit.limit_step_size(noise_stats)[0]
        if "dynamics" in limits.binding:  # by unusual options of the kernel
            step_size = min(step_size, limits.limits["dynamics"])
        if noise_ratio > 0.0:  # some rows are sampled
            # The weight of a sampled row is inversely proportional to their number.
            num_sampled_ratio = min(
                (batch_sizes[p.name] - len(p.included_rows)) / p.random_part.subsample_size
                for p in plates
            )
            max_step_size = choice.max_step_size * num_sampled_ratio
            step_size = limit_step_size_by_observations(settings, max_step_size, step_size)
        step_size = limit_step_size_by_mean_bias(settings, mean_bias, step_size, batch_size_factor)
    relaxation_time = dynamics.relaxation_time(step_size, noise_stats.variance)
    relaxation_time *= mean_bias.coupling.relaxation_factor
    num_steps = settings.num_steps or choose_num_steps(relaxation_time, step_size)
    is_whole = all(batch_sizes[p.name] == p.size for p in plates)
    variance_inflation = noise_limit.predict_variance_inflation(noise_stats, step_size)
    max_mean_bias = mean_bias.compute_max(step_size, batch_size_factor)
    return DrawPrediction(
        batch_sizes,
        sum(batch_sizes.values()) / (choice.estimator.relative_cost if is_whole else 1.0),
        num_steps,
        max(num_steps, relaxation_time / step_size),
        variance_inflation <= settings.target_sd_bias and max_mean_bias <= settings.max_mean_bias,
    )


def choose_batch_size(draws: Sequence[DrawPrediction], step_cost: StepCost) -> DrawPrediction:
    """Choose the size of the fastest draws within the target, or the largest where none is.

    Of sizes with similar cost it is the largest.
    """
    within_target = [d for d in draws if d.is_within_target]
    if not within_target:
        return draws[-1]
    seconds = [d.compute_seconds(step_cost) for d in within_target]
    max_seconds = _SIMILAR_COST_RATIO * min(seconds)
    return [d for d, s in zip(within_target, seconds, strict=True) if s <= max_seconds][-1]


def scale_batch_sizes(plates: Sequence[Plate], batch_size_factor: float) -> dict[str, int]:
    """Return batch sizes so many times as large by plate, at most all observations.

    Other sizes than the plates' are rounded up to two significant digits.
    """
    if batch_size_factor == 1.0:
        return {p.name: p.subsample_size for p in plates}
    batch_sizes = {}
    for plate in plates:
        size = plate.subsample_size * batch_size_factor
        unit = 10 ** max(0, math.floor(math.log10(size)) - 1)
        batch_sizes[plate.name] = min(plate.max_subsample_size, math.ceil(size / unit) * unit)
    return batch_sizes


def _compute_noise_ratio(plate: Plate, batch_size: int, is_contiguous: bool) -> float:
    """Return the variance of the gradient noise at another batch size over that at the plate's."""
    if batch_size == plate.subsample_size:
        return 1.0
    if batch_size == plate.size:  # every step takes the whole data
        return 0.0
    num_rows, random_size = plate.random_part.size, plate.random_part.subsample_size
    other_size = random_size + batch_size - plate.subsample_size
    if not is_contiguous:
        return random_size / other_size
    return (1.0 / other_size - 1.0 / num_rows) / (1.0 / random_size - 1.0 / num_rows)
