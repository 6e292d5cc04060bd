r"""Zhang et al. (2017), discriminative restricted Boltzmann machines, on letters and digits.

.. math:: p(y \mid x) \propto \exp\Big(d_y + \sum_j \log(1 + e^{c_j + (W^\top x)_j + U_{jy}})\Big),

in which the hidden units are summed out (Larochelle and Bengio 2008).

The paper's settings are those of its appendix F: the SDEs are the kernels' own with the gradient of
the whole potential, so that step sizes and sigmas are taken as they are. Each sampler also runs at
longer steps. SGNHT-D is SGMGT-D with a = 1/2 and the kinetics :math:`p^2 / 2`. The text at hand is
silent on data, sizes, minibatches and priors: here 100 hidden units, minibatches of 100, standard
normal weights, inputs standardised, no stop by a validation error.

    python benchmarks/papers/zhang2017_classes.py           # a quarter of an hour
    python benchmarks/papers/zhang2017_classes.py --full    # 28 x 28 pixels, 500 units, 200 passes
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import output
from jax import Array
from jax.nn import log_softmax, softplus
from zhang2017_data import Split, digits, letters, made_up_classes
from zhang2017_runs import Runs, Sampler, Task, all_runs, print_results

from numpyro_sgmcmc import SGLD, SGMGT, SGNHT

D = {"sigma_p": 10.0, "sigma_theta": 0.1, "sigma_xi": 0.1}
SAMPLERS = {
    "SGLD": Sampler(SGLD, {}, (1e-5, 5e-5, 2e-4), 1e-5),
    "SGNHT": Sampler(SGNHT, {"friction": 10.0}, (2e-4, 5e-4, 2e-3), 2e-4),
    "SGNHT-D": Sampler(SGMGT, {"a": 0.5, "m": 2.0, **D}, (2e-4, 5e-4, 2e-3), 2e-4),
    "SGMGT-D, a = 1": Sampler(SGMGT, {"a": 1.0, "c": 3.0, **D}, (1e-5, 5e-4, 2e-3), 1e-5),
    "SGMGT-D, a = 2": Sampler(SGMGT, {"a": 2.0, "c": 5.0, **D}, (5e-5, 5e-4, 2e-3), 5e-5),
}
RATE = 1e-3
"""Adam's."""


class Size(NamedTuple):
    """Sizes of the data, the network and the runs."""

    units: int
    batch: int
    passes: int
    runs: int


def shapes(inputs: int, units: int, classes: int) -> dict[str, tuple[int, ...]]:
    return {"w": (inputs, units), "u": (units, classes), "c": (units,), "d": (classes,)}


def logits(weights: Any, x: Array) -> Array:
    """Return the logits of the classes, up to a constant per row, shape ``(n, classes)``."""
    hidden = weights["c"] + x @ weights["w"]
    return weights["d"] + softplus(hidden[:, :, None] + weights["u"]).sum(1)


def model(x: Array, y: Array, units: int, classes: int, batch_size: int | None = None) -> None:
    """Standard normal weights."""
    weights = {
        name: numpyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))
        for name, shape in shapes(x.shape[1], units, classes).items()
    }
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Categorical(logits=logits(weights, x[i])), obs=y[i])


def first(of_shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Small weights, where a run starts."""
    rng = np.random.default_rng(seed)
    return {name: 0.1 * rng.standard_normal(s).astype(np.float32) for name, s in of_shapes.items()}


def make_task(data: Split, size: Size) -> Task:
    classes = int(data.y.max()) + 1
    log_probability = jax.jit(lambda weights, x: log_softmax(logits(weights, x)))
    x_test = jnp.asarray(data.x_test)
    of_shapes = shapes(data.x.shape[1], size.units, classes)
    return Task(
        model,
        (jnp.asarray(data.x), jnp.asarray(data.y), size.units, classes, size.batch),
        [first(of_shapes, run) for run in range(size.runs)],
        lambda weights: log_probability(weights, x_test),
        data.y_test,
    )


def experiment(name: str, data: Split, size: Size) -> dict[str, Runs]:
    found = all_runs(SAMPLERS, make_task(data, size), size.passes, RATE)
    caption = (
        f"{name}: {len(data.y):,} rows to learn from, {len(data.y_test):,} to test on, "
        f"{size.units} units, {size.runs} runs (* the paper's step size)"
    )
    print_results(found, SAMPLERS, caption, has_classes=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part, on made-up rows")
    parser.add_argument("--full", action="store_true", help="500 units, 200 passes (hours)")
    parser.add_argument("--only", choices=("letters", "digits"), help="one table by itself")
    asked = parser.parse_args()
    output.print_title("Zhang et al. (2017): discriminative restricted Boltzmann machines")
    if asked.quick:
        experiment("Made up", made_up_classes(400), Size(4, 20, 6, 2))
        return
    size = Size(500, 100, 200, 3) if asked.full else Size(100, 100, 30, 3)
    tables = {
        "letters": (letters, size),
        "digits": (lambda: digits(28 if asked.full else 14), size._replace(passes=2 * size.passes)),
    }
    for name, (load, own) in tables.items():
        if asked.only in (None, name):
            experiment(name.capitalize(), load(), own)


if __name__ == "__main__":
    main()
