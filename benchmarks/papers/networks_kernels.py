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
from jax import lax, random
from jax.flatten_util import ravel_pytree
from networks_data import Data
from networks_rivals import Training, train
from networks_task import Scores, Task, of_classes, of_numbers
from numpyro.infer import MCMC

from numpyro_sgmcmc import schedules


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
    - **decay** - precision of the prior.
    - **cycle** - passes of a cosine cycle of step sizes, at whose end there is a draw. The mass
      matrix is then that of :func:`cyclical`, and the step size like a rate of Adam.
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
    decay: float = 1.0
    cycle: int = 0

    def of(self, task: Task) -> Task:
        """The task with the run's temperature and prior."""
        gain = task.gain if self.gain is None else self.gain
        return _with(task, self.temperature, gain, self.decay)


@cache
def _with(task: Task, temperature: float, gain: float, decay: float) -> Task:
    # One object for all splits: programs are compiled anew for each object's model.
    return task._replace(temperature=temperature, gain=gain, decay=decay)


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
    if run.cycle:
        given = cyclical(task, data, run, begun)
    elif run.step_size is not None:
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


def cyclical(task: Task, data: Data, run: Run, begun: Any) -> dict[str, Any]:
    """Settings of a kernel with cycles of step sizes, preconditioned as Adam is.

    With friction x step size = 0.1, the momentum keeps 0.9 of itself in a step. The mass matrix has
    the root mean square of minibatch gradients at the chains' starts, at least a tenth of its mean
    over all weights.
    """
    x, y = jnp.asarray(data.x), jnp.asarray(data.y)
    # The mass matrix is in units of this step size, so that its value does not matter.
    step_size, momentum_decay = 0.01, 0.1
    rows = jnp.arange(100 * run.batch).reshape(100, run.batch) % len(y)
    slope = jax.grad(lambda w, i: task.loss(w, x[i], y[i], None, 0.0))

    def add(total: Any, i: Any) -> tuple[Any, None]:
        slopes = jax.vmap(slope, (0, None))(begun, i)
        return jax.tree.map(lambda t, g: t + jnp.square(g).mean(0), total, slopes), None

    total, _ = lax.scan(add, jax.tree.map(lambda w: jnp.zeros(w.shape[1:]), begun), rows)
    root = jnp.sqrt(ravel_pytree(total)[0] / len(rows))
    assert run.step_size is not None
    scale = run.step_size * run.temperature * momentum_decay / (len(y) * step_size**2)
    num_steps = run.cycle * (len(y) // run.batch)
    return {
        "step_size": schedules.Cyclical(step_size, period=num_steps),
        "num_steps": num_steps,
        "friction": momentum_decay / step_size,
        "inverse_mass_matrix": scale / (root + 0.1 * root.mean()),
        "gradient_estimator": "minibatch",
        "subsampling": "contiguous",  # the images are in random order
    }


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
