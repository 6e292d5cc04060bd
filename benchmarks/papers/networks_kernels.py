"""The kernels on a task: with no arguments, and with given steps from optimised initial values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from networks_data import Data
from networks_rivals import Training, train
from networks_task import Scores, Task, of_classes, of_numbers
from numpyro.infer import MCMC


class Run(NamedTuple):
    """
    - **kernel** - its class.
    - **batch** - rows of a minibatch.
    - **chains** - each with a different initial value.
    - **warmup** - draws that are left out.
    - **draws** - of each chain.
    - **step_size** - None for a kernel with no arguments.
    - **num_steps** - from one draw to the next, where a step size is given.
    - **start** - how Adam goes on from a draw of the prior to a chain's start; None for a kernel
      with no arguments.
    - **temperature** - of the posterior, prior and likelihood.
    - **gain** - of the prior, where it is not the task's.
    """

    kernel: Callable
    batch: int
    chains: int
    warmup: int
    draws: int
    step_size: float | None = None
    num_steps: int = 60
    start: Training | None = None
    temperature: float = 1.0
    gain: float | None = None

    def of(self, task: Task) -> Task:
        """The task with the run's temperature and prior."""
        return _with(task, self.temperature, task.gain if self.gain is None else self.gain)


@cache
def _with(task: Task, temperature: float, gain: float) -> Task:
    # One object for all splits: programs are compiled anew for each object's model.
    return task._replace(temperature=temperature, gain=gain)


def sample(
    task: Task, data: Data, run: Run, seed: int, begun: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Draws of all chains by site.

    :param task: the run's, see :meth:`Run.of`.
    :param begun: where :func:`starts` has come to; None to call it.
    """
    if run.start is not None and begun is None:
        begun = starts(task, data, run, seed)
    given: dict[str, Any] = {}
    if run.step_size is not None:
        given = {
            "step_size": run.step_size,
            "num_steps": run.num_steps,
            "adapt_mass_matrix": False,
            "gradient_estimator": "minibatch",
            "subsampling": "shuffled",
        }
    mcmc = MCMC(
        run.kernel(task.model, **given),
        num_warmup=run.warmup,
        num_samples=run.draws,
        num_chains=run.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings():
        # About the missing dominant mode, and larger minibatches that would save time.
        warnings.simplefilter("ignore", UserWarning)
        mcmc.run(
            random.key(seed),
            jnp.asarray(data.x),
            jnp.asarray(data.y),
            batch_size=min(run.batch, len(data.y)),
            init_params=begun,
        )
    draws: dict[str, Any] = mcmc.get_samples()
    return draws


def starts(task: Task, data: Data, run: Run, seed: int) -> dict[str, Any]:
    """Run Adam from draws of the prior and return one unconstrained position per chain."""
    assert run.start is not None
    found = [train(task, data, run.start, 1000 + 100 * seed + c) for c in range(run.chains)]
    each: dict[str, Any] = jax.tree.map(lambda *w: jnp.stack(w), *found)
    if not task.has_classes:
        each["sd"] = jnp.full(run.chains, math.log(0.5))
    return each if run.chains > 1 else jax.tree.map(lambda w: w[0], each)


def tune(task: Task, data: Data, among: Sequence[Run]) -> Run:
    """The run that does best on held-out rows, a tenth of those to learn from.

    :param among: those with the same start and prior begin at the same networks.
    """
    if len(among) == 1:
        return among[0]
    held_out = data.held_out()
    begun: dict[Any, Any] = {}
    found = []
    for run in among:
        own, start = run.of(task), (run.start, run.gain)
        if run.start and start not in begun:
            begun[start] = starts(own, held_out, run, 0)
        draws = sample(own, held_out, run, 0, begun.get(start))
        nll = score(own, draws, held_out).nll
        print(f"held out: NLL {nll:.4f}, {run[1:]}", flush=True)
        found.append(nll if math.isfinite(nll) else math.inf)
    return among[int(np.argmin(found))]


def score(task: Task, draws: dict[str, Any], data: Data) -> Scores:
    """Return the scores of the mean prediction over draws."""
    weights = {name: w for name, w in draws.items() if name != "sd"}
    outputs = partial(task.outputs, weights)
    if not task.has_classes:
        return of_numbers(outputs(data.x_test), np.asarray(draws["sd"]), data)
    others = None if data.x_other is None else outputs(data.x_other)
    return of_classes(outputs(data.x_test), data, others)
