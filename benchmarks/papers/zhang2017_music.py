r"""Next chord RNN draft."""
from __future__ import annotations
from typing import Any
import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
from jax import Array, lax, random
from functools import partial

def shapes(keys, units):
    return {"v": (keys, units), "w": (units, units), "b": (units,), "u": (units, keys), "c": (keys,)}

def logits(weights, x):
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    inputs = before @ weights["v"] + weights["b"]
    def step(state, own):
        state = jnp.tanh(own + state @ weights["w"])
        return state, state
    first = jnp.zeros((len(x), len(weights["b"])), x.dtype)
    _, states = lax.scan(step, first, inputs.swapaxes(0, 1))
    return states.swapaxes(0, 1) @ weights["u"] + weights["c"]

def log_likelihoods(weights, x):
    z = logits(weights, x)
    return (x * z - jax.nn.softplus(z)).sum(-1)

def model(x, length, units, batch_size=None):
    weights = {n: numpyro.sample(n, dist.Normal(0.0, 1.0).expand(s).to_event(len(s))) for n, s in shapes(x.shape[-1], units).items()}
    with numpyro.plate("pieces", len(x), subsample_size=batch_size) as i:
        of_quarters = log_likelihoods(weights, x[i])
        is_music = jnp.arange(x.shape[1]) < length[i][:, None]
        numpyro.factor("music", jnp.where(is_music, of_quarters, 0.0).sum(-1))
