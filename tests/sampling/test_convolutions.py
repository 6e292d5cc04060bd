"""Convolutional networks of flax, on images of vertical bars, horizontal bars and noise."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive, init_to_sample

from numpyro_sgmcmc import SGHMCSplit, localised, posterior_predictive
from numpyro_sgmcmc.diagnostics import predictive_summary
from tests.contract.kernels import quietly

ROWS, FILTERS = 2_000, 4
PRIORS = {
    "conv.kernel": dist.Normal(0, 1 / 3),
    "conv.bias": dist.Normal(0, 1),
    "out.kernel": dist.Normal(0, 0.4),
    "out.bias": dist.Normal(0, 1),
}

GIVEN = {
    "step_size": 0.005,
    "num_steps": ROWS // 100,  # an epoch per draw
    "adapt_mass_matrix": False,
    "gradient_estimator": "minibatch",
    "subsampling": "shuffled",
    "init_strategy": init_to_sample,
}


def make_images(seed, num):
    rng = np.random.default_rng(seed)
    images, classes = 0.3 * rng.standard_normal((num, 12, 12, 1)), rng.integers(0, 3, num)
    for image, k, row, column in zip(images, classes, *rng.integers(0, 7, (2, num)), strict=True):
        if k < 2:
            image[row : row + (6, 1)[k], column : column + (1, 6)[k]] += 2.0
    return jnp.asarray(images, jnp.float32), jnp.asarray(classes)


def linen_network():
    linen = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import random_flax_module

    class Network(linen.Module):
        def setup(self):
            self.conv, self.out = linen.Conv(FILTERS, (3, 3), strides=3), linen.Dense(3)

        def __call__(self, x):
            return self.out(jax.nn.relu(self.conv(x)).reshape(len(x), -1))

    return random_flax_module("net", Network(), PRIORS, input_shape=(1, 12, 12, 1))


def nnx_network():
    nnx = pytest.importorskip("flax.nnx")
    from numpyro.contrib.module import random_nnx_module

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, FILTERS, (3, 3), strides=3, rngs=rngs)
            self.out = nnx.Linear(16 * FILTERS, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(jax.nn.relu(self.conv(x)).reshape(len(x), -1))

    return random_nnx_module("net", Network(nnx.Rngs(0)), PRIORS)


def classify(x, y=None, batch_size=None, make_network=linen_network):
    network = make_network()
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        logits = network(x[i])
        if y is None:  # it depends on the minibatch
            numpyro.deterministic("logits", logits)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=None if y is None else y[i])


def nnx_classify(x, y=None, batch_size=None):
    classify(x, y, batch_size, nnx_network)


def compute_accuracy(model, mcmc):
    x, y = make_images(1, 500)
    draws = Predictive(model, mcmc.get_samples())(jax.random.key(1), x)["logits"]
    return float((jax.nn.softmax(draws).mean(0).argmax(-1) == y).mean())


@pytest.mark.parametrize("model", [classify, nnx_classify])
def test_one_draw_an_epoch_predicts_classes(model):
    x, y = make_images(0, ROWS)
    mcmc = quietly(SGHMCSplit(model, **GIVEN), num_warmup=30, num_samples=10)
    mcmc.run(jax.random.key(0), x, y, batch_size=100)
    assert compute_accuracy(model, mcmc) > 0.8  # a third by chance
    replicated = posterior_predictive(mcmc, jax.random.key(2), np.arange(300))["y"]
    assert replicated.shape == (1, 10, 300)
    assert (replicated == np.asarray(y[:300])).mean() > 0.7


@pytest.mark.slow  # the warm-up takes a minute
def test_no_arguments_about_a_trained_network():
    x, y = make_images(0, ROWS)
    trained = quietly(SGHMCSplit(classify, **GIVEN), num_warmup=30, num_samples=20)
    trained.run(jax.random.key(3), x, y, batch_size=100)
    center = {name: np.asarray(w[-1]) for name, w in trained.get_samples().items()}
    kernel = SGHMCSplit(localised(classify, center, 100.0))
    mcmc = quietly(kernel, num_warmup=50, num_samples=100, num_chains=2, chain_method="vectorized")
    init_params = {name: np.stack([w, w]) for name, w in center.items()}
    mcmc.run(jax.random.key(0), x, y, batch_size=100, init_params=init_params)
    assert compute_accuracy(classify, mcmc) > 0.8
    predict = Predictive(classify, mcmc.get_samples(), return_sites=["logits"])
    summary = predictive_summary(mcmc, predict, make_images(1, 100)[0])
    assert summary["logits"].r_hat.max() < 1.1
