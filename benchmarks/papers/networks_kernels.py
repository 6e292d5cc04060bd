"""The kernels on a task: with no arguments, and with steps of one's own from optimised starts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
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
    - **chains** - each with a start of its own.
    - **warmup** - draws that are left out.
    - **draws** - of each chain.
    - **step_size** - None for a kernel with no arguments.
    - **num_steps** - from one draw to the next, where a step size is given.
    - **start** - how Adam goes on from a draw of the prior to a chain's start; None for a kernel
      with no arguments.
    - **temperature** - of the posterior, prior and likelihood.
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

    def of(self, task: Task) -> Task:
        """The task at the run's temperature."""
        return task._replace(temperature=self.temperature)


def sample(
    task: Task, data: Data, run: Run, seed: int, begun: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Draws of all chains by site.

    :param begun: where :func:`starts` has come to; None to call it.
    """
    task = run.of(task)
    if run.start is not None and begun is None:
        begun = starts(task, data, run, seed)
    given: dict[str, Any] = {}
    if run.step_size is not None:
        given = {
            "step_size": run.step_size,
            "num_steps": run.num_steps,
            "adapt_mass_matrix": False,
            "gradient": "plain",
            "minibatch": "epoch",
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
        # That there is no single region, and what larger minibatches would save.
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
    """Where Adam comes to from draws of the prior, unconstrained, one for each chain."""
    assert run.start is not None
    found = [train(task, data, run.start, 1000 + 100 * seed + c) for c in range(run.chains)]
    each: dict[str, Any] = jax.tree.map(lambda *w: jnp.stack(w), *found)
    if not task.has_classes:
        each["sd"] = jnp.full(run.chains, math.log(0.5))
    return each if run.chains > 1 else jax.tree.map(lambda w: w[0], each)


def tune(task: Task, data: Data, among: Sequence[Run]) -> Run:
    """The run that does best on held-out rows, a tenth of those to learn from.

    :param among: those with the same start begin at the same networks.
    """
    if len(among) == 1:
        return among[0]
    held_out = data.held_out()
    begun: dict[Training | None, Any] = {}
    found = []
    for run in among:
        if run.start not in begun:
            begun[run.start] = starts(task, held_out, run, 0)
        draws = sample(task, held_out, run, 0, begun[run.start])
        nll = score(run.of(task), draws, held_out).nll
        print(f"held out: NLL {nll:.4f}, {run[1:]}", flush=True)
        found.append(nll if math.isfinite(nll) else math.inf)
    return among[int(np.argmin(found))]


def score(task: Task, draws: dict[str, Any], data: Data) -> Scores:
    """Of what the draws predict together."""
    weights = {name: w for name, w in draws.items() if name != "sd"}
    outputs = partial(task.outputs, weights)
    if not task.has_classes:
        return of_numbers(outputs(data.x_test), np.asarray(draws["sd"]), data)
    others = None if data.x_other is None else outputs(data.x_other)
    return of_classes(outputs(data.x_test), data, others)
