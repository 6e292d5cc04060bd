"""Models with discrete latent variables in each row, and simulated data."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.distributions.transforms import OrderedTransform

from tests.numpyro_models.models import BatchSize, Example

NUM_CLASSES, NUM_ANNOTATORS = 3, 5


def _mark() -> dict[str, str]:
    return {"enumerate": "parallel"}


def mixture(x: Any, batch_size: BatchSize = None) -> None:
    """Three normal components, ordered by their means."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(3, 2.0)))
    normals = dist.Normal(0, 3).expand([3]).to_event(1)
    means = numpyro.sample("means", dist.TransformedDistribution(normals, OrderedTransform()))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Categorical(weights), infer=_mark())
        numpyro.sample("x", dist.Normal(means[z], sigma), obs=x[i])


def _mixture() -> Example:
    rng = np.random.default_rng(0)
    z = rng.choice(3, 2_000, p=[0.3, 0.5, 0.2])
    x = np.array([-3.0, 0.0, 3.0])[z] + 0.8 * rng.normal(size=2_000)
    return Example(mixture, (x.astype(np.float32),), 200)


def dawid_skene(labels: Any, batch_size: BatchSize = None) -> None:
    """True classes of items, and annotators who confuse them."""
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(NUM_CLASSES)))
    prior = jnp.ones((NUM_ANNOTATORS, NUM_CLASSES, NUM_CLASSES)) + 4 * jnp.eye(NUM_CLASSES)
    confusion = numpyro.sample("confusion", dist.Dirichlet(prior).to_event(2))
    with numpyro.plate("items", len(labels), subsample_size=batch_size, dim=-2) as i:
        z = numpyro.sample("z", dist.Categorical(shares), infer=_mark())
        with numpyro.plate("annotators", NUM_ANNOTATORS, dim=-1) as j:
            numpyro.sample("label", dist.Categorical(confusion[j, z]), obs=labels[i])


def _dawid_skene() -> Example:
    rng = np.random.default_rng(1)
    z = rng.choice(NUM_CLASSES, 2_000, p=[0.5, 0.3, 0.2])
    accuracy = np.linspace(0.5, 0.9, NUM_ANNOTATORS)
    is_right = rng.random((2_000, NUM_ANNOTATORS)) < accuracy
    labels = np.where(is_right, z[:, None], rng.integers(0, NUM_CLASSES, is_right.shape))
    return Example(dawid_skene, (labels,), 200)


def zero_inflated(x: Any, y: Any, batch_size: BatchSize = None) -> None:
    """Counts that are zero for two reasons."""
    share = numpyro.sample("share", dist.Beta(2, 2))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        is_zero = numpyro.sample("is_zero", dist.Bernoulli(share), infer=_mark())
        rate = jnp.where(is_zero == 1, 1e-6, jnp.exp(beta[0] + beta[1] * x[i]))
        numpyro.sample("y", dist.Poisson(rate), obs=y[i])


def _zero_inflated() -> Example:
    rng = np.random.default_rng(2)
    x = rng.normal(size=3_000).astype(np.float32)
    y = np.where(rng.random(3_000) < 0.3, 0, rng.poisson(np.exp(0.7 + 0.4 * x)))
    return Example(zero_inflated, (x, y), 300)


def occupancy(x: Any, seen: Any, batch_size: BatchSize = None) -> None:
    """Species at sites, seen at some of the visits."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    detection = numpyro.sample("detection", dist.Beta(1, 1))
    with numpyro.plate("sites", len(x), subsample_size=batch_size, dim=-2) as i:
        logits = beta[0] + beta[1] * x[i][:, None]
        z = numpyro.sample("z", dist.Bernoulli(logits=logits), infer=_mark())
        with numpyro.plate("visits", seen.shape[1], dim=-1):
            numpyro.sample("seen", dist.Bernoulli(detection * z), obs=seen[i])


def _occupancy() -> Example:
    rng = np.random.default_rng(3)
    x = rng.normal(size=2_000).astype(np.float32)
    z = rng.random(2_000) < 1 / (1 + np.exp(-(0.3 + 0.8 * x)))
    seen = (z[:, None] & (rng.random((2_000, 4)) < 0.35)).astype(np.int32)
    return Example(occupancy, (x, seen), 200)


def misclassified(measured: Any, y: Any, batch_size: BatchSize = None) -> None:
    """A regression on an exposure that is recorded with errors."""
    share = numpyro.sample("share", dist.Beta(2, 2))
    positive = numpyro.sample("positive", dist.Beta(jnp.array([2.0, 18.0]), 10.0).to_event(1))
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        exposed = numpyro.sample("exposed", dist.Bernoulli(share), infer=_mark())
        numpyro.sample("measured", dist.Bernoulli(positive[exposed]), obs=measured[i])
        numpyro.sample("y", dist.Normal(beta[0] + beta[1] * exposed, sigma), obs=y[i])


def _misclassified() -> Example:
    rng = np.random.default_rng(4)
    exposed = rng.random(2_000) < 0.4
    measured = (rng.random(2_000) < np.where(exposed, 0.85, 0.1)).astype(np.int32)
    y = (1.0 + 2.0 * exposed + 0.7 * rng.normal(size=2_000)).astype(np.float32)
    return Example(misclassified, (measured, y), 200)


def hidden_markov(series: Any, batch_size: BatchSize = None) -> None:
    """Many short series of two hidden states."""
    transition = numpyro.sample("transition", dist.Dirichlet(jnp.ones((2, 2))).to_event(1))
    prior = dist.Beta(jnp.array([2.0, 8.0]), jnp.array([8.0, 2.0]))
    p = numpyro.sample("p", prior.to_event(1))
    with numpyro.plate("series", len(series), subsample_size=batch_size) as i:
        batch = series[i]

    def step(state: Any, y: Any) -> tuple[Any, None]:
        with numpyro.plate("series", len(series), subsample_size=batch_size):
            state = numpyro.sample("z", dist.Categorical(transition[state]), infer=_mark())
            numpyro.sample("y", dist.Bernoulli(p[state]), obs=y)
        return state, None

    scan(step, jnp.zeros(len(batch), jnp.int32), batch.T)


def _hidden_markov() -> Example:
    rng = np.random.default_rng(5)
    num, length = 5_000, 8
    state, series = np.zeros(num, int), np.empty((num, length), np.int32)
    for t in range(length):
        state = (rng.random(num) < np.array([0.3, 0.8])[state]).astype(int)
        series[:, t] = rng.random(num) < np.array([0.15, 0.75])[state]
    return Example(hidden_markov, (series,), 500)


EXAMPLES = {
    "mixture": _mixture(),
    "annotators": _dawid_skene(),
    "zero-inflated counts": _zero_inflated(),
    "occupancy": _occupancy(),
    "misclassified covariate": _misclassified(),
    "hidden Markov": _hidden_markov(),
}
