"""A network under its prior, what draws of it predict, and how good that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from franzese2021_data import sample_weights
from jax import Array, lax, random
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
from networks_data import Data
from scipy.stats import rankdata

Weights = Mapping[str, Array]
_BINS = 15
_LEVELS = np.linspace(0.05, 0.95, 19)


class Task(NamedTuple):
    """A network of ReLU units, and what it is about.

    Its weights are standard normal before the data; in the network they are ``gain`` times that
    over the root of a layer's width, and biases ``gain`` times that.

    - **sizes** - units of each layer, inputs first.
    - **gain** - the prior's SD of a unit's output for inputs of size one.
    - **has_classes** - whether outputs are logits of classes, or else the mean of a normal number.
    - **temperature** - of the posterior, prior and likelihood.
    - **decay** - precision of the prior.
    """

    sizes: tuple[int, ...]
    gain: float
    has_classes: bool
    temperature: float = 1.0
    decay: float = 1.0

    def from_prior(self, key: Array) -> dict[str, Array]:
        """A draw of the weights."""
        with numpyro.handlers.seed(rng_seed=key):
            return sample_weights(self.sizes)

    def features(
        self, weights: Weights, x: Array, key: Array | None = None, dropout: float = 0.0
    ) -> Array:
        """The last layer's inputs, one for its bias included, shape ``(n, units + 1)``.

        :param key: of which units drop out; None for none.
        """
        f, layers = x, len(self.sizes) - 1
        for layer in range(layers - 1):
            w = weights[f"w{layer}"]
            f = jax.nn.relu(self.gain * (f @ w / math.sqrt(len(w)) + weights[f"b{layer}"]))
            if key is not None:
                stays = random.bernoulli(random.fold_in(key, layer), 1.0 - dropout, f.shape)
                f = jnp.where(stays, f / (1.0 - dropout), 0.0)
        ones = jnp.ones((len(f), 1), f.dtype)
        return self.gain * jnp.concatenate([f / math.sqrt(f.shape[1]), ones], axis=1)

    def last(self, weights: Weights) -> Array:
        """The last layer's weights, its bias below them."""
        layer = len(self.sizes) - 2
        return jnp.concatenate([weights[f"w{layer}"], weights[f"b{layer}"][None]])

    def network(
        self, weights: Weights, x: Array, key: Array | None = None, dropout: float = 0.0
    ) -> Array:
        """Shape ``(n, outputs)``; see :meth:`features`."""
        return self.features(weights, x, key, dropout) @ self.last(weights)

    def loss(
        self, weights: Weights, x: Array, y: Array, key: Array | None, dropout: float
    ) -> Array:
        """Mean over rows: negative log probability of the class, or half the squared error."""
        f = self.network(weights, x, key, dropout)
        if self.has_classes:
            return -jnp.take_along_axis(jax.nn.log_softmax(f), y[:, None], axis=1).mean()
        return 0.5 * jnp.square(y - f[:, 0]).mean()

    def model(self, x: Array, y: Array, batch_size: int | None = None) -> None:
        """Model for a kernel. The SD of a number has a half-normal prior."""
        with numpyro.handlers.scale(scale=1.0 / self.temperature):
            with numpyro.handlers.scale(scale=self.decay):
                weights = sample_weights(self.sizes)
            sd = None if self.has_classes else numpyro.sample("sd", dist.HalfNormal(1.0))
            with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
                f = self.network(weights, x[i])
                law = dist.Categorical(logits=f) if sd is None else dist.Normal(f[:, 0], sd)
                numpyro.sample("y", law, obs=y[i])

    def outputs(self, draws: Weights, x: Any) -> Array:
        """Return the outputs of each draw's network, shape ``(draws, n, outputs)``."""
        return _outputs(self, draws, x)


@partial(jax.jit, static_argnums=0)
def _outputs(task: Task, draws: Weights, x: Any) -> Array:
    return lax.map(lambda weights: task.network(weights, x), draws)


class Scores(NamedTuple):
    """
    - **nll** - mean negative log probability of a row to test on, its density in the table's units.
    - **error** - the accuracy in %, or the root of the mean squared error in the table's units.
    - **calibration** - expected calibration error in %: of the likeliest class in 15 bins (Guo et
      al. 2017), or of shares of rows below quantiles (Kuleshov et al. 2018).
    - **inside** - mean entropy in nats of what is predicted for the rows to test on.
    - **outside** - likewise for the others.
    - **auroc** - probability in % that a row of the others has more entropy.
    """

    nll: float
    error: float
    calibration: float
    inside: float = math.nan
    outside: float = math.nan
    auroc: float = math.nan


def of_classes(outputs: Any, data: Data, others: Any = None) -> Scores:
    """Return the scores of the networks' mean probabilities.

    :param outputs: logits for the rows to test on, shape ``(networks, n, classes)``.
    :param others: likewise for the others.
    """
    p, y = mean_probabilities(outputs), data.y_test
    places = np.arange(len(y)), y
    is_right, sure = p.argmax(1) == y, p.max(1)
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, is_right - sure, _BINS)
    scores = Scores(
        nll=float(-np.log(np.maximum(p[places], 1e-30)).mean()),
        error=100.0 * float(is_right.mean()),
        calibration=100.0 * float(np.abs(gaps).sum() / len(y)),
    )
    if others is None:
        return scores
    inside, outside = entropy(p), entropy(mean_probabilities(others))
    return scores._replace(
        inside=float(inside.mean()),
        outside=float(outside.mean()),
        auroc=100.0 * area(inside, outside),
    )


def of_numbers(outputs: Any, scale: Any, data: Data) -> Scores:
    """Return the scores of a mixture of normals, one per network.

    :param outputs: their means for the rows to test on, shape ``(networks, n, 1)``.
    :param scale: their SDs, shape ``(networks,)`` or one for all.
    """
    f, y = jnp.asarray(outputs)[..., 0], data.y_test
    scale = jnp.broadcast_to(jnp.asarray(scale), len(f))[:, None]
    densities = logsumexp(norm.logpdf(y, f, scale), axis=0) - math.log(len(f) * data.unit)
    below = np.asarray(norm.cdf(y, f, scale).mean(0))
    gaps = [abs((below <= level).mean() - level) for level in _LEVELS]
    return Scores(
        nll=float(-densities.mean()),
        error=data.unit * float(jnp.sqrt(jnp.square(f.mean(0) - y).mean())),
        calibration=100.0 * float(np.mean(gaps)),
    )


def mean_probabilities(outputs: Any) -> np.ndarray:
    """Return the mean probabilities of networks, shape ``(n, classes)``."""
    return np.asarray(lax.map(jax.nn.softmax, jnp.asarray(outputs)).mean(0), np.float64)


def entropy(p: np.ndarray) -> np.ndarray:
    """Return the entropy in nats, shape ``(n,)``."""
    return -(p * np.log(np.maximum(p, 1e-30))).sum(1)


def area(inside: np.ndarray, outside: np.ndarray) -> float:
    """Under the receiver's operating curve: how often one outside is larger than one inside."""
    ranks = rankdata(np.concatenate([inside, outside]))[len(inside) :]
    num = len(outside)
    return float((ranks.sum() - num * (num + 1) / 2) / (num * len(inside)))
