"""The benchmark of convolutions: its network, its posterior, averaged weights."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpyro.infer.util import log_density
from scipy.stats import norm

for folder in ("benchmarks", "benchmarks/papers"):
    sys.path.insert(0, str(Path(__file__).parents[2] / folder))
convolutions = importlib.import_module("convolutions")
rivals = importlib.import_module("networks_rivals")

NETWORK = convolutions.Network(8, (2, 3), 4)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((5, 64)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, 10, 5))
WEIGHTS = jax.vmap(NETWORK.initialise)(jax.random.split(jax.random.key(0)))


def logits_by_convolution(w):
    f = X.reshape(5, 8, 8, 1)
    for layer in range(2):
        kernel = w[f"w{layer}"].reshape(3, 3, f.shape[3], -1)
        f = lax.conv_general_dilated(
            f, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        f = jnp.logaddexp(f + w[f"b{layer}"], 0.0) - np.log(2.0)
        f = lax.reduce_window(f, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    f = jnp.logaddexp(f.reshape(5, -1) @ w["w2"] + w["b2"], 0.0) - np.log(2.0)
    return f @ w["w3"] + w["b3"]


def test_products_with_patches_are_convolutions():
    for k in range(2):
        w = convolutions.pick(WEIGHTS, k)
        expected = logits_by_convolution(w)
        np.testing.assert_allclose(NETWORK.logits(w, X), expected, rtol=1e-4, atol=1e-4)


def test_the_model_is_a_product_of_posteriors():
    precision = jnp.array([1.0, 30.0])
    expected = 0.0
    for k in range(2):
        w = convolutions.pick(WEIGHTS, k)
        expected -= len(Y) * float(NETWORK.loss(w, X, Y, None, 0.0))
        sd = float(precision[k]) ** -0.5
        expected += sum(norm.logpdf(np.asarray(v), 0.0, sd).sum() for v in w.values())
    found = log_density(NETWORK.model, (X, Y, precision), {}, WEIGHTS)[0]
    assert float(found) == pytest.approx(expected, rel=1e-4)


class Slope:
    """A loss of slope one, whatever the rows: a step of Adam is then its rate."""

    def loss(self, weights, x, y, key, dropout):
        return weights["w"]


def test_averaging_begins_after_the_last_step_of_the_descent():
    task, start = Slope(), {"w": jnp.float32(0.0)}
    rest = (1, False, start, jax.random.key(0), X[:2], Y[:2], 0.5, 0.0, 0.0)
    end = rivals.train_from(task, 3, 0, *rest)["w"]
    mean = rivals.train_from(task, 3, 2, *rest)["w"]
    steps = 0.05 * np.arange(1, 5)  # two epochs of two steps, at a tenth of the rate
    assert float(mean - end) == pytest.approx(-steps.mean(), rel=1e-3)
