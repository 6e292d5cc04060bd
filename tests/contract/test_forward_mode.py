"""Gradients in forward mode: the same gradients, and models that have no others."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.contract.kernels import BATCH, assert_posterior, quietly, survey, survey_data

ROWS = np.random.default_rng(0).normal(1.5, 1.0, 300).astype(np.float32)


def doubled(y, batch_size=None):
    """The mean is doubled until it is over 1, a number of times that depends on it."""
    start = numpyro.sample("start", dist.Uniform(0.6, 0.9))
    mean = lax.while_loop(lambda x: x < 1.0, lambda x: 2.0 * x, start)
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


def run(model, *data, num_samples=400, **options):
    mcmc = quietly(SGHMCSplit(model, **options), num_warmup=50, num_samples=num_samples)
    mcmc.run(jax.random.key(0), *data, batch_size=BATCH)
    return mcmc


def test_a_loop_of_unknown_length():
    mcmc = run(doubled, ROWS, forward_mode_differentiation=True)
    # Normal with the sd of the mean, halved; the bounds 0.6 and 0.9 are four sds away and more.
    draws = mcmc.get_samples(group_by_chain=True)["start"]
    assert_posterior(draws, ROWS.mean() / 2, 0.5 / np.sqrt(len(ROWS)))
    assert "start" in str(bias_report(mcmc))


def test_without_the_option():
    with pytest.raises(ValueError, match=r"while_loop.*forward_mode_differentiation=True"):
        run(doubled, ROWS)


def test_the_same_gradients_and_curvature():
    arguments = Arguments(tuple(survey_data()), {"batch_size": BATCH})
    both = [
        get_model_potential(survey, arguments, init_to_uniform, forward_mode_differentiation=x)
        for x in (False, True)
    ]
    position, rows = jnp.array([0.3, -0.2, 1.0]), {"rows": jnp.arange(BATCH)}
    for of, given in (
        ("value_and_grad", (rows, arguments)),
        ("full_value_grad_hessian", (arguments,)),
    ):
        backward, forward = (jax.jit(getattr(target, of))(position, *given) for target in both)
        for a, b in zip(backward, forward, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-3)


def test_potential_functions():
    def potential(z):
        return lax.while_loop(lambda x: x[0] < 3, lambda x: (x[0] + 1, x[1]), (0, z**2 / 2))[1]

    options = {"step_size": 0.3, "num_steps": 3, "gradient_estimator": "minibatch"}
    kernel = SGHMCSplit(potential_fn=potential, forward_mode_differentiation=True, **options)
    mcmc = quietly(kernel, num_warmup=50, num_samples=2000)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(()))
    assert_posterior(mcmc.get_samples(group_by_chain=True), 0.0, 1.0)


def test_local_sites():
    def model(y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            own = numpyro.sample("own", dist.Normal(mean, 1))
            numpyro.sample("y", dist.Normal(own, 1), obs=y[i])

    with pytest.raises(ValueError, match=r"'own'.*leave out `forward_mode_differentiation`"):
        run(model, ROWS, forward_mode_differentiation=True)
