"""The belief net of the papers' experiment where all of it is known: nine pixels, three units."""

import importlib
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy.special import expit, logsumexp

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
net = importlib.import_module("belief_net_model")
belief_net = importlib.import_module("belief_net")

RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.standard_normal((9, 3)).astype(np.float32),
    "b": np.array([0.5, -1.0, 0.2], np.float32),
    "c": RNG.standard_normal(9).astype(np.float32),
}
STATES = np.array(list(itertools.product([0.0, 1.0], repeat=3)))


def log_joint(image):
    """Of each state of the units, with an image."""
    prior = np.where(STATES == 1, np.log(expit(WEIGHTS["b"])), np.log(expit(-WEIGHTS["b"])))
    p = expit(STATES @ WEIGHTS["w"].T + WEIGHTS["c"])
    return prior.sum(1) + np.log(np.where(image == 1, p, 1 - p)).sum(1)


def test_the_likelihood_is_a_sum_over_states():
    images = belief_net.made_up(5)
    expected = [logsumexp(log_joint(image)) for image in images]
    np.testing.assert_allclose(net.exact(WEIGHTS, images), expected, rtol=1e-5)


def test_annealed_importance_sampling_is_unbiased():
    (image,) = belief_net.made_up(1)
    found = net.annealed(random.key(0), WEIGHTS, np.stack([image] * 4_000), 5, 1)
    ratio = np.exp(np.asarray(found, np.float64) - logsumexp(log_joint(image)))
    assert abs(ratio.mean() - 1.0) < 5.0 * ratio.std() / np.sqrt(len(ratio))
    assert 0.01 < ratio.std() < 2.0


def test_sweeps_leave_the_units_their_posterior():
    """From it, one sweep; and from anywhere, some."""
    (image,) = belief_net.made_up(1)
    num = 20_000
    images = jnp.broadcast_to(jnp.asarray(image), (num, 9))
    exact = np.exp(log_joint(image) - logsumexp(log_joint(image)))
    start = jnp.asarray(STATES[RNG.choice(8, num, p=exact)], jnp.float32)
    sweep = jax.jit(lambda key, units: net.sweep(key, units, images, WEIGHTS))
    once, often = sweep(random.key(0), start), jnp.zeros_like(start)
    for key in random.split(random.key(1), 20):
        often = sweep(key, often)
    for units in (once, often):
        numbers = np.asarray(units) @ np.array([4, 2, 1])
        share = np.bincount(numbers.astype(int), minlength=8) / num
        assert (np.abs(share - exact) < 5.0 * np.sqrt(exact * (1 - exact) / num) + 1e-6).all()


@pytest.mark.slow
def test_weights_are_found():
    """Better than pixels that know nothing of each other."""
    images, size = belief_net.made_up(400), belief_net.Size(3, 100, 20, 3_000, 6, 2, 20)
    sampler = belief_net.SAMPLERS["SGHMC, splitting"]._replace(step_sizes=(1e-6, 0.02))
    idle, found = belief_net.on_step_sizes(sampler, 10.0, images, size)
    p = images[100:].mean(0)
    alone = -(images[:100] * np.log(p) + (1 - images[:100]) * np.log(1 - p)).sum(1).mean()
    assert found.diverging == 0.0
    assert found.nll < alone - 0.5 < idle.nll
