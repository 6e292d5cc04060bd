"""A given step size that is predicted to be wrong: told before any sampling, and only then."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMC, SGLD, SGMGT, SGNHT, SGHMCSplit
from tests.quick import quick_if

pytestmark = pytest.mark.usefixtures("optimised")

SIZE, BATCH = 2_000, 20
SEEDS = [quick_if(seed == 0, seed) for seed in range(3)]


def model(X, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def made_up(seed):
    rng = np.random.default_rng(seed)
    X, w = rng.standard_normal((SIZE, 5)), rng.standard_normal(5)
    y = rng.random(SIZE) < 1 / (1 + np.exp(-X @ w))
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def said(seed=0, kernel=SGHMCSplit, batch_size=BATCH, **settings):
    """What the warm-up says, and the kernel."""
    kernel = kernel(model, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        kernel.init(jax.random.key(seed), 10, None, made_up(seed), {"batch_size": batch_size})
    return [str(w.message) for w in caught if "is predicted to" in str(w.message)], kernel


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_that_noise_heats(seed):
    (sentence,), _ = said(seed, gradient_estimator="minibatch", step_size=0.1)
    assert sentence.startswith("step_size=0.1 is predicted to make posterior sds up to ")
    assert re.search(r"\d+ % too wide \(target_sd_bias allows 5 %\)", sentence)
    assert sentence.endswith(", or gradient_estimator='auto'.")
    step_size = float(re.search(r"Use about (\S+), or leave it to the warm-up", sentence)[1])
    size = int(re.search(r"subsample_size \(of 'rows' (about|all) (\d+)\)", sentence)[2])
    assert said(seed, gradient_estimator="minibatch", step_size=step_size)[0] == []
    assert said(seed, gradient_estimator="minibatch", step_size=0.1, batch_size=size)[0] == []


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_said_of_a_step_that_does(seed):
    assert said(seed, step_size=0.3)[0] == []
    _, kernel = said(seed)
    assert said(seed, step_size=0.5 * float(kernel.adaptation.step_size))[0] == []
    assert said(seed, gradient_estimator="minibatch", step_size=1e-3)[0] == []


@pytest.mark.parametrize(
    ("kernel", "step_size", "wrong"),
    [
        (SGHMCSplit, 2.0, r"make posterior sds up to \d+ % too narrow"),
        (SGHMC, 1.5, "be too long to be stable, so that chains leave the posterior"),
        (SGLD, 1.0, r"make posterior sds up to \d+ % too wide"),
        (SGNHT, 2.0, "posterior"),
        (SGMGT, 3.0, "posterior"),
    ],
)
def test_a_step_that_is_too_long_for_the_scheme(kernel, step_size, wrong):
    (sentence,), _ = said(kernel=kernel, step_size=step_size)
    assert re.search(wrong, sentence)
    assert "or leave it to the warm-up" in sentence
    assert said(kernel=kernel, step_size=0.03)[0] == []


def test_a_thermostat_takes_noise_away():
    """Of SGMGT simulated chains tell how much: untouched, sds would be 28 % too wide."""
    for kernel in (SGNHT, SGMGT):
        assert said(kernel=kernel, gradient_estimator="minibatch", step_size=0.02)[0] == []
    (sentence,), _ = said(kernel=SGMGT, gradient_estimator="minibatch", step_size=0.3)
    assert "too wide" in sentence


def test_friction_that_ends_all_momentum_in_a_step():
    (sentence,), _ = said(friction=40.0, step_size=1.0)
    assert "leave chains where they are: it ends all momentum at friction 40." in sentence
    step_size = float(re.search(r"Use about (\S+),", sentence)[1])
    assert said(friction=40.0, step_size=step_size)[0] == []


def test_nothing_is_said_of_a_schedule():
    """Its first step is not that of the draws."""
    assert said(step_size=lambda t: 2.0 / (1.0 + t))[0] == []
