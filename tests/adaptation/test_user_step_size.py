"""A user's step size that is predicted to be wrong is reported before any sampling."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMC, SGLD, SGMGT, SGNHT, SGHMCSplit
from numpyro_sgmcmc.errors import StepSizeWarning
from tests.quick import quick_if

SIZE, BATCH = 2_000, 20
SEEDS = [quick_if(seed == 0, seed) for seed in range(3)]


def logistic(X, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def make_data(seed):
    rng = np.random.default_rng(seed)
    X, w = rng.standard_normal((SIZE, 5)), rng.standard_normal(5)
    y = rng.random(SIZE) < 1 / (1 + np.exp(-X @ w))
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def warm_up(seed=0, kernel=SGHMCSplit, batch_size=BATCH, **options):
    """Return the messages about the step size, and the adaptation."""
    kernel = kernel(logistic, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        kernel.init(jax.random.key(seed), 10, None, make_data(seed), {"batch_size": batch_size})
    messages = [str(w.message) for w in caught if w.category is StepSizeWarning]
    return messages, kernel.adaptation


def read_step_size(message):
    return float(re.search(r"Fix: use step_size=(\S+),", message)[1])


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("seed", range(3))
def test_user_step_size_too_long_for_the_noise_recommends_remedies_that_serve(seed):
    options = {"gradient_estimator": "minibatch"}
    (message,), _ = warm_up(seed, step_size=0.1, **options)
    assert re.search(r"step_size=0.1 .*SDs up to \d+% too wide", message)
    assert "gradient_estimator='auto'" in message
    batch_size = int(re.search(r"subsample_size=(\d+) of plate 'rows'", message)[1])
    assert not warm_up(seed, step_size=read_step_size(message), **options)[0]
    assert not warm_up(seed, step_size=0.1, batch_size=batch_size, **options)[0]


def test_user_step_size_is_not_shortened_where_the_shortest_is_too_long_as_well():
    """At 500 steps per draw the noise of independent minibatches still widens SDs by 9%."""
    options = {"gradient_estimator": "minibatch", "subsampling": "iid"}
    (message,), adaptation = warm_up(step_size=0.1, **options)
    assert "Fix: use subsample_size=" in message
    assert "gradient_estimator='auto'" in message
    shortest = adaptation.relaxation_time / 500
    assert warm_up(step_size=shortest, **options)[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_user_step_size_that_serves_is_not_reported(seed):
    assert not warm_up(seed, step_size=0.3)[0]
    chosen = warm_up(seed)[1].step_size
    assert not warm_up(seed, step_size=0.5 * float(chosen))[0]
    assert not warm_up(seed, gradient_estimator="minibatch", step_size=1e-3)[0]


@pytest.mark.parametrize(
    ("kernel", "step_size", "effect"),
    [
        (SGHMCSplit, 2.0, r"SDs up to \d+% too narrow"),
        quick_if(False, SGHMC, 1.5, "unstable"),
        quick_if(False, SGLD, 1.0, r"SDs up to \d+% too wide"),
        quick_if(False, SGNHT, 2.0, "SD"),
        quick_if(False, SGMGT, 3.0, "SD"),
    ],
)
def test_user_step_size_too_long_for_the_integrator_is_reported(kernel, step_size, effect):
    (message,), _ = warm_up(kernel=kernel, step_size=step_size)
    assert re.search(effect, message)
    assert not warm_up(kernel=kernel, step_size=0.03)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_user_step_size_thermostat_removes_noise():
    """Simulated chains show how much SGMGT removes: without it SDs would be 28% too wide."""
    for kernel in (SGNHT, SGMGT):
        assert not warm_up(kernel=kernel, gradient_estimator="minibatch", step_size=0.02)[0]
    (message,), _ = warm_up(kernel=SGMGT, gradient_estimator="minibatch", step_size=0.3)
    assert "too wide" in message


def test_user_step_size_friction_stops_chains():
    (message,), _ = warm_up(friction=40.0, step_size=1.0)
    assert "stop chains at friction 40" in message
    assert not warm_up(friction=40.0, step_size=read_step_size(message))[0]


def test_user_step_size_schedule_is_not_reported():
    """Its first step is not that of the draws."""
    assert not warm_up(step_size=lambda t: 2.0 / (1.0 + t))[0]
