"""Recommendation of a batch size, from measured gradient noise and measured time per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import random

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation.batch_size import (
    DrawPrediction,
    StepCost,
    choose_batch_size,
    predict_draws,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics.diagnosis import Table
from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.kernels import SGHMCSplit
from numpyro_sgmcmc.sampling.options import build_warmup_settings
from numpyro_sgmcmc.sampling.state import SGMCMCState

# Steps are timed with the smallest minibatch and with the largest one up to so many rows, or up to
# so many times the rows of the smallest. Where the longer time is no larger by this ratio, since a
# step takes time for all coordinates, minibatches of eight times as many rows follow.
_MAX_TIMED_ROWS, _MIN_TIMED_RATIO = 4_000, 4
_MIN_SECONDS_RATIO, _NEXT_TIMED_RATIO = 1.5, 8
# Iterations that are timed; fewer, but not below the second number, after so many seconds.
_NUM_TIMED_ITERATIONS, _MIN_TIMED_ITERATIONS, _MAX_TIMED_SECONDS = 50, 5, 3.0
_NOTE = (
    "Seconds of all chains together, without warm-up and compilation. Draws a relaxation time "
    "apart count as independent."
)
_BIAS_NOTE = "Sizes marked * are predicted to bias SDs or means beyond the target."


@dataclass(frozen=True)
class SubsampleSizeSuggestion:
    """The result of :func:`suggest_subsample_size`; prints as a table.

    - **subsample_sizes** - sizes in increasing order, by plate.
    - **steps_per_draw** - predicted gradient steps per draw with each size.
    - **seconds_per_draw** - predicted seconds per effective draw of all chains together.
    - **is_within_target** - whether the predicted biases are within the kernel's target.
    - **best_index** - index of the recommended size.
    """

    subsample_sizes: dict[str, tuple[int, ...]]
    steps_per_draw: tuple[int, ...]
    seconds_per_draw: tuple[float, ...]
    is_within_target: tuple[bool, ...]
    best_index: int

    @property
    def best(self) -> int | dict[str, int]:
        """The recommended size, or a dict of sizes by plate if there are several plates."""
        sizes = {name: sizes[self.best_index] for name, sizes in self.subsample_sizes.items()}
        return sizes if len(sizes) > 1 else next(iter(sizes.values()))

    def __str__(self) -> str:
        return self._make_table().to_text()

    def _repr_html_(self) -> str:
        return self._make_table().to_html()

    def _make_table(self) -> Table:
        names = list(self.subsample_sizes)
        titles = (
            [f"subsample_size of '{n}'" for n in names] if len(names) > 1 else ["subsample_size"]
        )
        table_rows = [[*titles, "steps per draw", "seconds per effective draw", ""]]
        for k, is_within_target in enumerate(self.is_within_target):
            mark = "best" if k == self.best_index else ""
            table_rows.append(
                [
                    *(f"{sizes[k]:,}" for sizes in self.subsample_sizes.values()),
                    f"{self.steps_per_draw[k]:,}",
                    f"{self.seconds_per_draw[k]:.2g}",
                    mark + "*" * (not is_within_target),
                ]
            )
        notes = [_NOTE] + [_BIAS_NOTE] * (not all(self.is_within_target))
        return Table(table_rows, notes, left_aligned=(len(titles) + 2,))


def suggest_subsample_size(
    model: Callable | SGMCMCKernel, *args: Any, num_chains: int = 4, **kwargs: Any
) -> SubsampleSizeSuggestion:
    """Predict the time per effective draw for several batch sizes, and print it as a table.

    The warm-up runs once, with the ``subsample_size`` that the arguments contain, and measures the
    gradient noise. The noise variance at other sizes is inversely proportional to the size, and
    determines step size, steps per draw and bias. The time of a step is linear in the size, and is
    measured with small and with large minibatches.

    :param model: a NumPyro model with a subsampled plate, which :class:`.SGHMCSplit` samples; or
        one of this package's kernels, which keeps the warm-up for a run with the same arguments.
    :param args: arguments of the model, as for ``MCMC.run``.
    :param num_chains: number of chains, which run together (``"vectorized"``). Default 4.
    :param kwargs: keyword arguments of the model.
    :return: the table, with the recommended size in ``best``. Of sizes with similar times it is the
        largest, which has the least gradient noise.
    :raises ValueError: for a model without a subsampled plate, with latent sites inside it, or
        without a dominant mode, and for a kernel whose settings are all given.
    """
    errors.check_positive_int("num_chains", num_chains)
    kernel = model if isinstance(model, SGMCMCKernel) else SGHMCSplit(model)
    if kernel.model is not None:
        _check_plates(kernel, Arguments(args, kwargs))
    state = kernel.init(random.split(random.key(0), num_chains), 0, None, args, kwargs)
    draws = _predict(kernel)
    step_cost = measure_step_cost(
        draws, lambda draw: _time_step(kernel, state, draw, args, kwargs) / num_chains
    )
    suggestion = SubsampleSizeSuggestion(
        {name: tuple(d.batch_sizes[name] for d in draws) for name in draws[0].batch_sizes},
        tuple(d.num_steps for d in draws),
        tuple(d.compute_seconds(step_cost) for d in draws),
        tuple(d.is_within_target for d in draws),
        draws.index(choose_batch_size(draws, step_cost)),
    )
    print(suggestion)
    return suggestion


def _check_plates(kernel: SGMCMCKernel, arguments: Arguments) -> None:
    """Check that draws with other batch sizes can be predicted, before the warm-up."""
    potential = kernel.get_potential(arguments)
    if potential.local_names:
        raise InvalidModelError(
            f"Site '{potential.local_names[0]}' is latent inside the subsampled plate, so that "
            "draws with other sizes cannot be predicted.",
            "compare short runs with several sizes. A larger size takes fewer steps per draw.",
            "suggest-subsample-size",
        )
    if not potential.plates:
        raise InvalidModelError(
            "`suggest_subsample_size` needs a model with a subsampled plate.",
            "pass any subsample_size below the number of rows, for example 256. The time with "
            "other sizes is predicted from it.",
            "suggest-subsample-size",
        )


def _predict(kernel: SGMCMCKernel) -> list[DrawPrediction]:
    """Predict draws of an initialised kernel with minibatches of several sizes."""
    adaptation, trace = kernel.adaptation, kernel.adaptation.trace
    if trace is None:
        raise InvalidArgumentError(
            "`suggest_subsample_size` got a kernel with all settings, so no noise is measured.",
            "leave out a setting, such as `step_size`.",
            "suggest-subsample-size",
        )
    if trace.choice is None or trace.predicted_mean_bias is None:
        raise InvalidModelError(
            "`suggest_subsample_size` needs a posterior with a dominant mode.",
            "compare predictions of short runs with several sizes, by predictive_summary.",
            "suggest-subsample-size",
        )
    return predict_draws(
        build_warmup_settings(kernel.options, kernel.potential, kernel.dynamics, kernel.integrator),
        kernel.potential.with_included_rows(adaptation.included_rows).plates,
        trace.choice,
        trace.step_size_limits,
        trace.predicted_mean_bias,
    )


def measure_step_cost(
    draws: Sequence[DrawPrediction], time_step: Callable[[DrawPrediction], float]
) -> StepCost:
    """Fit the seconds of steps with small and large minibatches.

    :param draws: with increasing batch sizes.
    :param time_step: maps a draw to the seconds of one of its steps.
    """
    # All rows are not timed, for which the estimator's reference is not needed.
    subsampled = [d for d in draws if d.num_rows == sum(d.batch_sizes.values())]
    num_rows, seconds = [subsampled[0].num_rows], [time_step(subsampled[0])]
    max_rows = max(_MAX_TIMED_ROWS, _MIN_TIMED_RATIO * num_rows[0])
    while larger := [d for d in subsampled if d.num_rows > num_rows[-1]]:
        large = ([d for d in larger if d.num_rows <= max_rows] or larger[:1])[-1]
        num_rows.append(large.num_rows)
        seconds.append(time_step(large))
        if seconds[-1] > _MIN_SECONDS_RATIO * seconds[0]:
            break
        max_rows = _NEXT_TIMED_RATIO * large.num_rows
    return StepCost.fit(num_rows, seconds)


def _time_step(
    kernel: SGMCMCKernel, state: SGMCMCState, draw: DrawPrediction, args: tuple, kwargs: dict
) -> float:
    """Return the seconds of a step of all chains with minibatches of a size.

    It is the shortest time, as other processes may lengthen it; on a CPU of the wall or of the
    process, which a wait for other processes and parallel threads lengthen.
    """
    kernel, state = kernel.with_batch_sizes(state, draw.batch_sizes, draw.num_steps)

    @jax.jit
    def run(state: SGMCMCState) -> SGMCMCState:
        return kernel.sample(state, args, kwargs)

    state = jax.block_until_ready(run(state))  # compiles
    clocks = [time.perf_counter]
    if jax.default_backend() == "cpu":
        clocks.append(time.process_time)
    durations: list[float] = []
    begin = time.perf_counter()
    for k in range(_NUM_TIMED_ITERATIONS):
        is_enough = time.perf_counter() - begin > _MAX_TIMED_SECONDS
        if is_enough and k >= _MIN_TIMED_ITERATIONS:
            break
        starts = [clock() for clock in clocks]
        state = jax.block_until_ready(run(state))
        durations += [clock() - start for clock, start in zip(clocks, starts, strict=True)]
    return min(durations) / kernel.adaptation.num_steps
