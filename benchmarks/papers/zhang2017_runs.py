"""Samplers of Zhang et al. (2017) on a model, Adam beside them, and what their draws predict."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import output
from jax import Array, lax, random
from numpyro.handlers import seed
from numpyro.infer.util import log_density
from side_by_side import side_by_side
from standard_errors import mean

Weights = dict[str, np.ndarray]
Predict = Callable[[Weights], Any]
"""Log probabilities of what may come, ``(things, choices)``, or of what came, ``(things, 1)``."""


class Sampler(NamedTuple):
    """
    - **kernel** - its class.
    - **options** - its own settings.
    - **step_sizes** - of the grid.
    - **printed** - the paper's step size.
    """

    kernel: Callable
    options: Mapping[str, Any]
    step_sizes: tuple[float, ...]
    printed: float


class Task(NamedTuple):
    """
    - **model** - of all arguments.
    - **arguments** - the last is the batch size.
    - **starts** - the weights at first, one for each run.
    - **predict** - see :data:`Predict`.
    - **outcomes** - what came, shape ``(things,)``, by its place among the choices.
    """

    model: Callable
    arguments: tuple[Any, ...]
    starts: Sequence[Weights]
    predict: Predict
    outcomes: np.ndarray

    @property
    def steps_a_pass(self) -> int:
        return max(1, len(self.arguments[0]) // self.arguments[-1])


class Scores(NamedTuple):
    """Scores of one run after each pass, shape ``(passes,)``.

    - **nll** - negative log probability of a thing that came, by the mean prediction of the later
      half of the draws so far.
    - **error** - share of things that the mean prediction gets wrong.
    - **single** - the negative log probability by the last draw alone.
    - **diverging** - whether a step left the finite numbers in the pass.
    """

    nll: np.ndarray
    error: np.ndarray
    single: np.ndarray
    diverging: np.ndarray


Runs = dict[float, list[Scores]]
"""By step size, one of each start."""


def scores(
    path: Sequence[Weights], diverging: np.ndarray, task: Task, averages: bool = True
) -> Scores:
    """Return the scores of the weights after each pass.

    :param averages: whether predictions are averaged; else each stands for itself.
    """
    predicted = np.stack([np.asarray(task.predict(weights)) for weights in path])
    places = np.arange(len(task.outcomes)), task.outcomes
    rows = []
    for k, last in enumerate(predicted):
        kept = predicted[(k + 1) // 2 : k + 1] if averages else last[None]
        mean = np.logaddexp.reduce(kept, axis=0) - np.log(len(kept))
        wrong = mean.argmax(-1) != task.outcomes
        rows.append((-mean[places].mean(), wrong.mean(), -last[places].mean()))
    return Scores(*np.transpose(rows), diverging)


def on_grid(sampler: Sampler, task: Task, passes: int, decay: float = 1.0) -> Runs:
    """A run from each start at each step size; one draw a pass.

    :param decay: by what step sizes are divided after each pass.
    """
    kernel = sampler.kernel(
        task.model,
        step_size=sampler.printed,
        num_steps=task.steps_a_pass,
        gradient_estimator="minibatch",
        subsampling="shuffled",
        adapt_mass_matrix=False,
        **sampler.options,
    )
    lanes = list(itertools.product(sampler.step_sizes, range(len(task.starts))))
    steps, starts = [h for h, _ in lanes], [task.starts[run] for _, run in lanes]
    states = side_by_side(kernel, steps, starts, task.arguments, passes, 0, decay)
    kept = [(jax.tree.map(np.asarray, s.z), np.asarray(s.diverging)) for s in states]
    found: Runs = {h: [] for h in sampler.step_sizes}
    for lane, (h, _) in enumerate(lanes):
        path = [{name: x[lane] for name, x in z.items()} for z, _ in kept]
        found[h].append(scores(path, np.array([d[lane] for _, d in kept]), task))
    return found


def adam(task: Task, rate: float, passes: int) -> list[Scores]:
    """Run Adam on minibatches from each start towards the posterior mode."""
    optimizer = optax.adam(rate)

    def loss(weights: Any, key: Array) -> Array:
        return -log_density(seed(task.model, key), task.arguments, {}, weights)[0]

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        weights, state = carry
        updates, state = optimizer.update(jax.grad(loss)(weights, key), state)
        return (optax.apply_updates(weights, updates), state), None

    def one_pass(carry: Any, key: Array) -> tuple[Any, Any]:
        carry, _ = lax.scan(step, carry, random.split(key, task.steps_a_pass))
        return carry, carry[0]

    @jax.jit
    def run(weights: Any, key: Array) -> Any:
        start = weights, optimizer.init(weights)
        return lax.scan(one_pass, start, random.split(key, passes))[1]

    found = []
    for number, start in enumerate(task.starts):
        weights = run({name: jnp.asarray(x) for name, x in start.items()}, random.key(number))
        path = [{name: np.asarray(x[k]) for name, x in weights.items()} for k in range(passes)]
        found.append(scores(path, np.zeros(passes, bool), task, averages=False))
    return found


def all_runs(
    samplers: Mapping[str, Sampler], task: Task, passes: int, rate: float
) -> dict[str, Runs]:
    """All samplers at all their step sizes, and Adam at one rate."""
    found = {}
    for name in (*samplers, "Adam"):
        began = time.process_time()
        if name == "Adam":
            found[name] = {rate: adam(task, rate, passes)}
        else:
            found[name] = on_grid(samplers[name], task, passes)
        print(f"{name}: {time.process_time() - began:.0f} s CPU", flush=True)
    return found


def row_of(runs: Sequence[Scores], has_classes: bool) -> list[str]:
    """The last scores, and those by the passes so far; means over runs and standard errors."""
    passes = len(runs[0].nll)
    often = np.mean([r.diverging for r in runs])
    early = (passes // 10 or 1, passes // 3 or 1)
    cells = [f"{mean([r.nll[k - 1] for r in runs]):.3f}" for k in (*early, passes)]
    cells.append(f"{mean([r.single[-1] for r in runs]):.3f}")
    if has_classes:
        cells.append(f"{mean([100.0 * r.error[-1] for r in runs]):.2f}")
    return [*cells, f"{often:.0%}"]


def header(passes: int, has_classes: bool) -> list[str]:
    """Return the header of the columns of :func:`row_of`."""
    counts = (passes // 10 or 1, passes // 3 or 1, passes)
    columns = [f"NLL after {k} passes" for k in counts] + ["last draw's NLL"]
    return [*columns, *(["error, %"] if has_classes else []), "passes that diverge"]


def print_results(
    found: Mapping[str, Runs], samplers: Mapping[str, Sampler], caption: str, has_classes: bool
) -> None:
    """A table of all runs; the paper's step sizes have a star."""
    rows, passes = [], 1
    for name, runs in found.items():
        for h, of_seeds in runs.items():
            passes = len(of_seeds[0].nll)
            is_printed = name in samplers and h == samplers[name].printed
            rows.append((name, f"{h:g}" + " *" * is_printed, *row_of(of_seeds, has_classes)))
    output.print_table(caption, ("sampler", "h", *header(passes, has_classes)), rows)
