r"""Latent Dirichlet allocation, its topics in two parametrisations, and document completion.

.. math:: \pi_k \sim \mathrm{Dirichlet}(\beta),\quad \theta_d \sim \mathrm{Dirichlet}(\alpha),\quad
    p(w \mid \theta_d, \pi) = \textstyle\sum_k \theta_{dk}\pi_{kw}.

The shares :math:`\theta_d` are drawn anew for each minibatch: by turns the topic of each word, and
the shares given these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.handlers import reparam

from numpyro_sgmcmc.metrics import ExpandedMean

ALPHA, BETA = 0.1, 0.5
_HELD_OUT_SWEEPS, _HELD_OUT_KEPT = 20, 10


def _documents(topics: Array, words: Any, batch_size: int | None) -> None:
    num_topics = topics.shape[0]
    with numpyro.plate("documents", len(words), subsample_size=batch_size) as i:
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.full(num_topics, ALPHA)))
        w = words[i]
        p = (topics.T[w] * shares[:, None]).sum(-1)
        numpyro.factor("words", jnp.where(w >= 0, jnp.log(p), 0.0).sum(-1))


def natural(words: Any, shape: tuple[int, int], batch_size: int | None = None) -> None:
    """Topics by gamma variables, which kernels move in their logarithms (expanded natural)."""
    sizes = numpyro.sample("sizes", dist.Gamma(BETA, 1.0).expand(shape).to_event(2))
    topics = numpyro.deterministic("topics", sizes / sizes.sum(-1, keepdims=True))
    _documents(topics, words, batch_size)


def _dirichlet(words: Any, shape: tuple[int, int], batch_size: int | None = None) -> None:
    rows = dist.Dirichlet(jnp.full(shape[1], BETA)).expand(shape[:1]).to_event(1)
    _documents(numpyro.sample("topics", rows), words, batch_size)


mean = reparam(_dirichlet, config={"topics": ExpandedMean()})
"""The same by the expanded mean."""


def first(model: Any, shape: tuple[int, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Return initial topics that differ by chance alone, the same in both parametrisations."""
    sizes = BETA * np.random.default_rng(seed).gamma(100.0, 0.01, shape).astype(np.float32)
    return {"sizes": np.log(sizes)} if model is natural else {"topics_mirrored": sizes}


def topics_of(z: dict[str, Array]) -> Array:
    """Return the topics of unconstrained values in either parametrisation."""
    sizes = jnp.exp(z["sizes"]) if "sizes" in z else jnp.abs(z["topics_mirrored"])
    return sizes / sizes.sum(-1, keepdims=True)


def draw_shares(
    rng_key: Array, gibbs_sites: Any, hmc_sites: Any, rows: Array, model_args: Any
) -> dict[str, Array]:
    """One sweep for the minibatch's documents."""
    (sizes,) = hmc_sites.values()
    sizes = jnp.abs(sizes)
    w = model_args[0][rows]
    p = (sizes / sizes.sum(-1, keepdims=True)).T[w]
    return {"shares": _sweep(p, w >= 0, gibbs_sites["shares"], rng_key)}


def _sweep(p: Array, is_word: Array, shares: Array, rng_key: Array) -> Array:
    """Topics of the words given the shares, then the shares given these.

    :param p: of each word under each topic, shape ``(documents, length, topics)``.
    """
    topic_key, share_key = random.split(rng_key)
    below = jnp.cumsum(p * shares[:, None], -1)
    at = random.uniform(topic_key, is_word.shape) * below[..., -1]
    topic = (below < at[..., None]).sum(-1)
    counts = (jax.nn.one_hot(topic, p.shape[-1]) * is_word[..., None]).sum(1)
    # A share that underflows to zero would have no finite density.
    drawn = jnp.maximum(random.gamma(share_key, ALPHA + counts), 1e-30)
    return drawn / drawn.sum(-1, keepdims=True)


@jax.jit
def completed(topics: Array, words: Array, rng_key: Array) -> Array:
    """Probability of each second word of documents, given the words between them.

    :return: of shape ``(documents, length / 2)``; one where there is no word.
    """
    seen, hidden = words[:, ::2], words[:, 1::2]
    p = topics.T[seen]
    shares = jnp.full((len(words), topics.shape[0]), 1.0 / topics.shape[0])

    def one(shares: Array, key: Array) -> tuple[Array, Array]:
        shares = _sweep(p, seen >= 0, shares, key)
        return shares, shares

    _, shares = lax.scan(one, shares, random.split(rng_key, _HELD_OUT_SWEEPS))
    shares = shares[-_HELD_OUT_KEPT:].mean(0)
    found = (topics.T[hidden] * shares[:, None]).sum(-1)
    return jnp.where(hidden >= 0, found, 1.0)


def perplexity(probabilities: Any, words: np.ndarray) -> float:
    """Return the perplexity of held-out words under the mean probability over draws."""
    num = (words[:, 1::2] >= 0).sum()
    return float(np.exp(-np.log(np.asarray(probabilities, np.float64)).sum() / num))
