"""Gradients in forward mode: equal to those in reverse mode, and for models with while loops."""

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
    """The mean is doubled until it exceeds 1, a number of times that depends on it."""
    start = numpyro.sample("start", dist.Uniform(0.6, 0.9))
    mean = lax.while_loop(lambda x: x < 1.0, lambda x: 2.0 * x, start)
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


def run(model, *data, num_samples=400, **options):
    mcmc = quietly(SGHMCSplit(model, **options), num_warmup=50, num_samples=num_samples)
    mcmc.run(jax.random.key(0), *data, batch_size=BATCH)
    return mcmc


def test_while_loop_with_forward_mode_has_the_gradient_of_the_loop_written_out():
    def written_out(y, batch_size=None):
        start = numpyro.sample("start", dist.Uniform(0.6, 0.9))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(2.0 * start, 1), obs=y[i])

    arguments = Arguments((ROWS,), {"batch_size": BATCH})
    loop, expected = (
        get_model_potential(model, arguments, init_to_uniform, forward_mode_differentiation=x)
        for model, x in ((doubled, True), (written_out, False))
    )
    args = jnp.array([0.3]), {"rows": jnp.arange(BATCH)}, arguments
    results = (jax.jit(potential.value_and_grad)(*args) for potential in (loop, expected))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.slow
def test_while_loop_with_forward_mode_has_the_exact_posterior():
    mcmc = run(doubled, ROWS, forward_mode_differentiation=True)
    # Normal with half the standard error; the bounds 0.6 and 0.9 are at least four SDs away.
    draws = mcmc.get_samples(group_by_chain=True)["start"]
    assert_posterior(draws, ROWS.mean() / 2, 0.5 / np.sqrt(len(ROWS)))
    assert "start" in str(bias_report(mcmc))


def test_while_loop_in_reverse_mode_raises():
    with pytest.raises(ValueError, match=r"(?s)while_loop.*forward_mode_differentiation"):
        run(doubled, ROWS)


def test_forward_mode_gives_the_gradients_and_hessians_of_reverse_mode():
    arguments = Arguments(tuple(survey_data()), {"batch_size": BATCH})
    potentials = [
        get_model_potential(survey, arguments, init_to_uniform, forward_mode_differentiation=x)
        for x in (False, True)
    ]
    position, indices = jnp.array([0.3, -0.2, 1.0]), {"rows": jnp.arange(BATCH)}
    for method, args in (
        ("value_and_grad", (indices, arguments)),
        ("full_value_grad_hessian", (arguments,)),
    ):
        reverse, forward = (jax.jit(getattr(p, method))(position, *args) for p in potentials)
        for a, b in zip(reverse, forward, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-3)


def test_potential_function_with_a_while_loop_has_the_exact_posterior():
    def potential(z):
        return lax.while_loop(lambda x: x[0] < 3, lambda x: (x[0] + 1, x[1]), (0, z**2 / 2))[1]

    options = {"step_size": 0.3, "num_steps": 3, "gradient_estimator": "minibatch"}
    kernel = SGHMCSplit(potential_fn=potential, forward_mode_differentiation=True, **options)
    mcmc = quietly(kernel, num_warmup=50, num_samples=2000)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(()))
    assert_posterior(mcmc.get_samples(group_by_chain=True), 0.0, 1.0)


def test_forward_mode_with_local_latents_raises():
    def model(y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            own = numpyro.sample("own", dist.Normal(mean, 1))
            numpyro.sample("y", dist.Normal(own, 1), obs=y[i])

    with pytest.raises(ValueError, match=r"'own'.*forward_mode_differentiation"):
        run(model, ROWS, forward_mode_differentiation=True)
