r"""Zhang et al. (2017), a recurrent network of polyphonic music, on Bach's chorales.

.. math:: s_t = \tanh(b + V^\top x_{t-1} + W^\top s_{t-1}), \qquad
          p(x_{tk} = 1 \mid x_{<t}) = \sigma(c_k + (U^\top s_t)_k),

with :math:`x_{tk}` whether key k of 88 sounds at the t-th quarter. Its negative log likelihood is
that of a quarter, of all keys together.

The paper's settings are those of its appendix G, taken as they are: the SDEs are the kernels' own
with the gradient of the whole potential. "As printed" are its step sizes, divided by 1.1 after each
pass, with gradients cut to the length of one whose coordinates are all 5 (the paper cuts each
coordinate, the kernels cut the norm). The grid neither cuts nor decays. SGNHT-D is SGMGT-D with
a = 1/2 and the kinetics :math:`p^2 / 2`. The paper's JSB chorales are not at hand: here it is the
350 scores of ``music21``, one chord each quarter, at most the first 64. The text at hand is silent
on the network, minibatches and priors: here 100 units, minibatches of 10, standard normal weights.

    python benchmarks/papers/zhang2017_music.py           # some 10 minutes
    python benchmarks/papers/zhang2017_music.py --full    # whole chorales, 300 passes, five runs
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import output
from jax import Array, lax
from jax.nn import softplus
from zhang2017_data import Split, chorales, made_up_music
from zhang2017_runs import Sampler, Task, all_runs, header, on_grid, print_results, row_of

from numpyro_sgmcmc import SGLD, SGMGT, SGNHT

P = {"sigma_p": 10.0}
D = {**P, "sigma_theta": 0.1, "sigma_xi": 0.01}
LAPLACE, HEAVY = {"a": 1.0, "c": 5.0}, {"a": 2.0, "c": 3.0}
H = (2e-4, 5e-4, 2e-3)
SAMPLERS = {
    "SGLD": Sampler(SGLD, {}, (3e-6, 1e-5, 3e-5), 1e-3),
    "SGNHT": Sampler(SGNHT, {"friction": 10.0}, (5e-5, 5e-4, 2e-3), 5e-5),
    "SGNHT-D": Sampler(
        SGMGT, {"a": 0.5, "m": 2.0, **P, "sigma_theta": 0.01, "sigma_xi": 0.01}, H, 2e-3
    ),
    "SGMGT, a = 1": Sampler(SGMGT, {**LAPLACE, **P}, (5e-4, 2e-3, 5e-3), 2e-3),
    "SGMGT, a = 2": Sampler(SGMGT, {**HEAVY, **P}, (5e-4, 2e-3, 5e-3), 2e-3),
    "SGMGT-D, a = 1": Sampler(SGMGT, {**LAPLACE, **D}, H, 2e-3),
    "SGMGT-D, a = 2": Sampler(SGMGT, {**HEAVY, **D}, H, 2e-3),
}
RATE = 1e-3
"""Adam's."""
DECAY, LARGEST = 1.1, 5.0


class Size(NamedTuple):
    """Sizes of the data, the network and the runs."""

    units: int
    batch: int
    passes: int
    runs: int


def shapes(keys: int, units: int) -> dict[str, tuple[int, ...]]:
    return {
        "v": (keys, units),
        "w": (units, units),
        "b": (units,),
        "u": (units, keys),
        "c": (keys,),
    }


def log_likelihoods(weights: Any, x: Array) -> Array:
    """Return the log likelihood of each quarter given those before, shape ``(n, quarters)``.

    :param x: shape ``(n, quarters, keys)``.
    """
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    heard = before @ weights["v"] + weights["b"]

    def step(state: Array, now: Array) -> tuple[Array, Array]:
        state = jnp.tanh(now + state @ weights["w"])
        return state, state

    states = lax.scan(step, jnp.zeros_like(heard[:, 0]), heard.swapaxes(0, 1))[1]
    logits = states.swapaxes(0, 1) @ weights["u"] + weights["c"]
    return (x * logits - softplus(logits)).sum(-1)


def model(x: Array, length: Array, units: int, batch_size: int | None = None) -> None:
    """Standard normal weights.

    :param x: shape ``(n, quarters, keys)``.
    :param length: quarters of each piece.
    """
    weights = {
        name: numpyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))
        for name, shape in shapes(x.shape[-1], units).items()
    }
    with numpyro.plate("pieces", len(x), subsample_size=batch_size) as i:
        found = log_likelihoods(weights, x[i])
        is_music = jnp.arange(x.shape[1]) < length[i][:, None]
        numpyro.factor("music", jnp.where(is_music, found, 0.0).sum(-1))


def first(of_shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Small weights, and keys that are mostly silent: where a run starts."""
    rng = np.random.default_rng(seed)
    found = {name: 0.1 * rng.standard_normal(s).astype(np.float32) for name, s in of_shapes.items()}
    found["c"] -= 3.0
    return found


def make_task(data: Split, size: Size) -> Task:
    log_probability = jax.jit(log_likelihoods)
    x_test = jnp.asarray(data.x_test)
    is_music = np.arange(x_test.shape[1]) < data.y_test[:, None]
    of_shapes = shapes(x_test.shape[-1], size.units)
    return Task(
        model,
        (jnp.asarray(data.x), jnp.asarray(data.y), size.units, size.batch),
        [first(of_shapes, run) for run in range(size.runs)],
        lambda weights: np.asarray(log_probability(weights, x_test))[is_music][:, None],
        np.zeros(is_music.sum(), int),
    )


def as_printed(task: Task, passes: int) -> None:
    """The paper's step sizes, with its decay and its cut."""
    largest = LARGEST * math.sqrt(sum(x.size for x in task.starts[0].values()))
    rows = []
    for name, sampler in SAMPLERS.items():
        began = time.process_time()
        options = {**sampler.options, "max_grad_norm": largest}
        own = sampler._replace(step_sizes=(sampler.printed,), options=options)
        (runs,) = on_grid(own, task, passes, DECAY).values()
        rows.append((name, f"{sampler.printed:g}", *row_of(runs, has_classes=False)))
        print(f"{name}, as printed: {time.process_time() - began:.0f} s CPU", flush=True)
    caption = f"As printed: steps over {DECAY} after each pass, gradients cut to {largest:.0f}"
    output.print_table(caption, ("sampler", "h", *header(passes, False)), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part, on made-up music")
    parser.add_argument("--full", action="store_true", help="whole chorales, 300 passes (hours)")
    asked = parser.parse_args()
    output.print_title("Zhang et al. (2017): a recurrent network of chorales")
    if asked.quick:
        data, size = made_up_music(40, 12), Size(5, 10, 4, 2)
    elif asked.full:
        data, size = chorales(193), Size(100, 10, 300, 5)
    else:
        data, size = chorales(64), Size(100, 10, 60, 3)
    task = make_task(data, size)
    as_printed(task, size.passes)
    found = all_runs(SAMPLERS, task, size.passes, RATE)
    caption = (
        f"Negative log likelihood of a quarter: {len(data.y)} pieces to learn from, "
        f"{len(data.y_test)} to test on, {size.units} units, {size.runs} runs (* the paper's h)"
    )
    print_results(found, SAMPLERS, caption, has_classes=False)


if __name__ == "__main__":
    main()
