r"""A sigmoid belief net of one layer, and how likely it makes an image.

.. math:: p(h_j = 1) = \sigma(b_j),\quad p(v_d = 1 \mid h) = \sigma(c_d + W_d^\top h).

The hidden units are an image's own. A visit redraws them by one sweep, unit after unit, and they
stay for the next.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.nn import log_sigmoid, logsumexp, softplus

_CHUNK = 50  # images whose likelihoods are computed at once


def model(images: Any, num_units: int, batch_size: int | None = None) -> None:
    """Standard normal weights and biases."""
    num_pixels = images.shape[1]
    weights = dist.Normal(0.0, 1.0).expand([num_pixels, num_units]).to_event(2)
    w = numpyro.sample("w", weights)
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([num_units]).to_event(1))
    c = numpyro.sample("c", dist.Normal(0.0, 1.0).expand([num_pixels]).to_event(1))
    with numpyro.plate("images", len(images), subsample_size=batch_size) as i:
        units = numpyro.sample("units", dist.Bernoulli(logits=b).to_event(1))
        logits = units @ w.T + c
        numpyro.sample("pixels", dist.Bernoulli(logits=logits).to_event(1), obs=images[i])


def first(num_pixels: int, num_units: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return initial values of chains: units that differ by chance alone."""
    rng = np.random.default_rng(seed)
    w = 0.1 * rng.standard_normal((num_pixels, num_units))
    found = {"w": w, "b": np.zeros(num_units), "c": np.zeros(num_pixels)}
    return {name: x.astype(np.float32) for name, x in found.items()}


def draw_units(
    rng_key: Array, gibbs_sites: Any, hmc_sites: Any, rows: Array, model_args: Any
) -> dict[str, Array]:
    """One sweep for the minibatch's images."""
    return {"units": sweep(rng_key, gibbs_sites["units"], model_args[0][rows], hmc_sites)}


def sweep(
    rng_key: Array, units: Array, images: Array, weights: Any, power: float | Array = 1.0
) -> Array:
    """Each hidden unit given the others, one after the other.

    :param units: shape ``(images, units)``.
    :param power: of the likelihood.
    """
    logits = units @ weights["w"].T + weights["c"]

    def one(logits: Array, xs: Any) -> tuple[Array, Array]:
        own, bias, old, key = xs  # of one unit; the old values of all images
        off = logits - old[:, None] * own
        gain = (images * own - softplus(off + own) + softplus(off)).sum(-1)
        new = random.bernoulli(key, jax.nn.sigmoid(bias + power * gain)).astype(units.dtype)
        return off + new[:, None] * own, new

    keys = random.split(rng_key, units.shape[1])
    return lax.scan(one, logits, (weights["w"].T, weights["b"], units.T, keys))[1].T


def _log_likelihood(units: Array, images: Array, weights: Any) -> Array:
    """Return the log likelihood of images given their units."""
    logits = units @ weights["w"].T + weights["c"]
    return (images * logits - softplus(logits)).sum(-1)


@jax.jit
def exact(weights: Any, images: Array) -> Array:
    """Log likelihood of each image, by all values that the hidden units may have."""
    num = weights["b"].shape[0]
    every = (jnp.arange(2**num)[:, None] >> jnp.arange(num)) & 1
    prior = jnp.where(every == 1, log_sigmoid(weights["b"]), log_sigmoid(-weights["b"])).sum(-1)
    logits = every @ weights["w"].T + weights["c"]
    normaliser = softplus(logits).sum(-1)
    return logsumexp(prior + images @ logits.T - normaliser, axis=-1)


@partial(jax.jit, static_argnames=("temperatures", "particles"))
def annealed(
    rng_key: Array, weights: Any, images: Array, temperatures: int, particles: int
) -> Array:
    """Logs of unbiased estimates of it by annealed importance sampling from the units' prior."""
    powers = jnp.linspace(0.0, 1.0, temperatures + 1)
    start_key, rng_key = random.split(rng_key)
    repeated = jnp.repeat(images, particles, axis=0)
    shape = (len(repeated), weights["b"].shape[0])
    units = random.bernoulli(start_key, jax.nn.sigmoid(weights["b"]), shape).astype(images.dtype)

    def one(carry: tuple[Array, Array], xs: Any) -> tuple[tuple[Array, Array], None]:
        (units, log_weight), (key, power, step) = carry, xs
        log_weight = log_weight + step * _log_likelihood(units, repeated, weights)
        return (sweep(key, units, repeated, weights, power), log_weight), None

    xs = random.split(rng_key, temperatures), powers[1:], jnp.diff(powers)
    (_, found), _ = lax.scan(one, (units, jnp.zeros(len(repeated))), xs)
    return logsumexp(found.reshape(-1, particles), axis=-1) - jnp.log(particles)
