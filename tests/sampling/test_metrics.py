"""The Fisher metric of a simplex: its SDEs' invariance, and a posterior known exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.handlers import reparam, seed, trace

from numpyro_sgmcmc import SGRHMC, SGRLD
from numpyro_sgmcmc.diagnostics import check_invariance
from numpyro_sgmcmc.dynamics import RiemannianOverdampedLangevin, RiemannianUnderdampedLangevin
from numpyro_sgmcmc.dynamics.base import is_elementwise
from numpyro_sgmcmc.metrics import ExpandedMean, MirroredGamma, expanded_mean
from tests.contract.kernels import assert_posterior, quietly

ALPHA = np.array([0.5, 1.0, 0.5, 2.0], np.float32)
COUNTS = np.random.default_rng(0).multinomial(5, [0.6, 0.25, 0.1, 0.05], 40).astype(np.float32)


def counts(rows, batch_size=None):
    shares = numpyro.sample("shares", dist.Dirichlet(ALPHA))
    numpyro.sample("other", dist.Normal(0, 1))
    with numpyro.plate("rows", len(rows), subsample_size=batch_size) as i:
        numpyro.sample("counts", dist.Multinomial(5, shares), obs=rows[i])


def expanded(model=counts):
    return reparam(model, config={"shares": ExpandedMean()})


def kernel_of(kernel_class, step_size, num_steps, model=None):
    return kernel_class(
        model or expanded(),
        inverse_metric=expanded_mean("shares"),
        adapt_mass_matrix=False,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        step_size=step_size,
        num_steps=num_steps,
    )


def test_a_gamma_variable_with_a_sign():
    x = np.linspace(-40, 40, 80_001)
    for alpha in (0.7, 3.0):
        fn = MirroredGamma(alpha)
        p = np.exp(np.asarray(fn.log_prob(jnp.asarray(x)), np.float64))
        p[len(p) // 2] = 0.0  # where there may be a pole
        assert abs(np.trapezoid(p, x) - 1.0) < 0.03
        assert abs(np.trapezoid(p * x**2, x) - fn.variance) < 0.01
        draws = np.asarray(fn.sample(random.key(0), (20_000,)), np.float64)
        assert abs(draws.mean()) < 5.0 * draws.std() / np.sqrt(draws.size)
        squares = draws**2
        assert abs(squares.mean() - fn.variance) < 5.0 * squares.std() / np.sqrt(draws.size)


def test_the_site_has_the_distribution_that_it_had():
    def shares(rng_key):
        found = trace(seed(expanded(), rng_key)).get_trace(COUNTS)
        assert found["shares"]["type"] == "deterministic"
        assert found["shares_mirrored"]["value"].shape == (4,)
        return found["shares"]["value"]

    draws = np.asarray(jax.vmap(shares)(random.split(random.key(0), 20_000)), np.float64)
    exact = dist.Dirichlet(ALPHA)
    error = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - exact.mean) < 5.0 * error).all()
    np.testing.assert_allclose(draws.var(0), exact.variance, rtol=0.05)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("dynamics", [RiemannianOverdampedLangevin, RiemannianUnderdampedLangevin])
def test_the_posterior_is_invariant(dynamics, alpha):
    def potential(t):
        own = MirroredGamma(alpha).log_prob(t).sum()
        log_shares = jnp.log(jnp.abs(t)) - jnp.log(jnp.abs(t).sum())
        return -own - 0.7 * log_shares[0] - 0.2 * log_shares[1]

    def metric(t):
        return expanded_mean("shares")({"shares_mirrored": t})["shares_mirrored"]

    sizes = np.array([[1.3, 0.8], [0.9, -1.7], [-2.1, 1.2]])
    momenta = np.array([[0.4, -1.0], [1.2, 0.3], [-0.2, 0.9]])
    states = sizes if dynamics is RiemannianOverdampedLangevin else np.hstack([sizes, momenta])
    found = check_invariance(dynamics(metric), potential, dim=2, states=states)
    assert found.max() < 1e-8


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("kernel_class", "step_size", "num_steps"), [(SGRLD, 5e-4, 60), (SGRHMC, 0.02, 40)]
)
def test_an_exact_posterior(kernel_class, step_size, num_steps):
    """Steps so short that what is wrong with them is no part of what is tested."""
    kernel = kernel_of(kernel_class, step_size, num_steps)
    mcmc = quietly(kernel, num_warmup=50, num_samples=500, num_chains=2, chain_method="vectorized")
    mcmc.run(random.key(0), COUNTS, batch_size=20)
    exact = dist.Dirichlet(ALPHA + COUNTS.sum(0))
    draws = mcmc.get_samples(group_by_chain=True)["shares"]
    assert_posterior(draws, exact.mean, np.sqrt(exact.variance))


def test_a_step_costs_as_much_as_there_are_coordinates():
    """The divergence is one directional derivative, in the coordinates of a run, too."""
    mcmc = quietly(kernel_of(SGRLD, 1e-3, 2), num_warmup=0, num_samples=1)
    mcmc.run(random.key(0), COUNTS, batch_size=20)
    kernel, state = mcmc.sampler, mcmc.last_state
    dynamics = kernel._bind_dynamics(kernel.potential, kernel.get_preconditioner(state))
    q = state.dynamics_state.position
    assert is_elementwise(dynamics.inverse_metric, q)
    expected = np.concatenate([[1.0], np.abs(state.z["shares_mirrored"])])
    np.testing.assert_allclose(dynamics.inverse_metric(q), expected, rtol=1e-5)


def test_a_coordinate_at_zero_leaves_it():
    kernel = kernel_of(SGRLD, 1e-3, 20)
    mcmc = quietly(kernel, num_warmup=0, num_samples=3)
    start = {"shares_mirrored": np.array([1.0, 0.5, 0.0, 1e-35]), "other": np.array(0.0)}
    mcmc.run(random.key(0), COUNTS, batch_size=20, init_params=start)
    assert (np.asarray(mcmc.get_samples()["shares"]) > 0.0).all()


def normal(rows, batch_size=None):
    numpyro.sample("shares", dist.Normal(0, 1))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="takes names of Dirichlet sites"):
        expanded_mean()
    with pytest.raises(ValueError, match=r"'shares' is Normal"):
        seed(expanded(normal), 0)(COUNTS)
    kernel = kernel_of(SGRLD, 1e-3, 20, counts)
    with pytest.raises(ValueError, match=r"expanded_mean\('shares'\) needs the site by"):
        quietly(kernel).run(random.key(0), COUNTS, batch_size=20)
