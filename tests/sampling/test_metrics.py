"""The Fisher metric of a simplex: invariance of its SDEs, and an exact posterior."""

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
from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError
from numpyro_sgmcmc.metrics import ExpandedMean, MirroredGamma, expanded_mean
from tests.contract.kernels import assert_posterior, quietly
from tests.quick import quick_if

ALPHA = np.array([0.5, 1.0, 0.5, 2.0], np.float32)
COUNTS = np.random.default_rng(0).multinomial(5, [0.6, 0.25, 0.1, 0.05], 40).astype(np.float32)


def multinomial(rows, batch_size=None):
    shares = numpyro.sample("shares", dist.Dirichlet(ALPHA))
    numpyro.sample("other", dist.Normal(0, 1))
    with numpyro.plate("rows", len(rows), subsample_size=batch_size) as i:
        numpyro.sample("counts", dist.Multinomial(5, shares), obs=rows[i])


def expanded(model=multinomial):
    return reparam(model, config={"shares": ExpandedMean()})


def make_kernel(kernel_class, step_size, num_steps, model=None):
    return kernel_class(
        model or expanded(),
        inverse_metric=expanded_mean("shares"),
        adapt_mass_matrix=False,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        step_size=step_size,
        num_steps=num_steps,
    )


@pytest.mark.parametrize("alpha", [0.7, 3.0])
def test_mirrored_gamma_density_is_normalised_and_matches_its_draws(alpha):
    x = np.linspace(-40, 40, 80_001)
    gamma = MirroredGamma(alpha)
    density = np.exp(np.asarray(gamma.log_prob(jnp.asarray(x)), np.float64))
    density[len(density) // 2] = 0.0  # where there may be a pole
    assert abs(np.trapezoid(density, x) - 1.0) < 0.03
    assert abs(np.trapezoid(density * x**2, x) - gamma.variance) < 0.01
    draws = np.asarray(gamma.sample(random.key(0), (20_000,)), np.float64)
    assert abs(draws.mean()) < 5.0 * draws.std() / np.sqrt(draws.size)
    squares = draws**2
    assert abs(squares.mean() - gamma.variance) < 5.0 * squares.std() / np.sqrt(draws.size)


def test_expanded_mean_site_keeps_its_dirichlet_prior():
    def sample_shares(rng_key):
        sites = trace(seed(expanded(), rng_key)).get_trace(jnp.asarray(COUNTS))
        assert sites["shares"]["type"] == "deterministic"
        assert sites["shares_mirrored"]["value"].shape == (4,)
        return sites["shares"]["value"]

    keys = random.split(random.key(0), 20_000)
    draws = np.asarray(jax.jit(jax.vmap(sample_shares))(keys), np.float64)
    exact = dist.Dirichlet(ALPHA)
    error = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - exact.mean) < 5.0 * error).all()
    np.testing.assert_allclose(draws.var(0), exact.variance, rtol=0.05)


@pytest.mark.parametrize(
    ("dynamics", "alpha"),
    [
        quick_if(alpha == 0.5, dynamics, alpha)
        for dynamics in (RiemannianOverdampedLangevin, RiemannianUnderdampedLangevin)
        for alpha in (0.1, 0.5, 2.0)
    ],
)
def test_posterior_is_invariant_under_the_expanded_mean_metric(dynamics, alpha):
    def potential(t):
        prior = MirroredGamma(alpha).log_prob(t).sum()
        log_shares = jnp.log(jnp.abs(t)) - jnp.log(jnp.abs(t).sum())
        return -prior - 0.7 * log_shares[0] - 0.2 * log_shares[1]

    def metric(t):
        return expanded_mean("shares")({"shares_mirrored": t})["shares_mirrored"]

    positions = np.array([[1.3, 0.8], [0.9, -1.7], [-2.1, 1.2]])
    momenta = np.array([[0.4, -1.0], [1.2, 0.3], [-0.2, 0.9]])
    is_overdamped = dynamics is RiemannianOverdampedLangevin
    states = positions if is_overdamped else np.hstack([positions, momenta])
    residuals = check_invariance(dynamics(metric), potential, dim=2, states=states)
    assert residuals.max() < 1e-8


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("kernel_class", "step_size", "num_steps"), [(SGRLD, 5e-4, 60), (SGRHMC, 0.02, 40)]
)
def test_expanded_mean_run_has_the_exact_posterior(kernel_class, step_size, num_steps):
    """Steps are so short that their discretisation error is negligible."""
    kernel = make_kernel(kernel_class, step_size, num_steps)
    mcmc = quietly(kernel, num_warmup=50, num_samples=500, num_chains=2, chain_method="vectorized")
    mcmc.run(random.key(0), COUNTS, batch_size=20)
    exact = dist.Dirichlet(ALPHA + COUNTS.sum(0))
    draws = mcmc.get_samples(group_by_chain=True)["shares"]
    assert_posterior(draws, exact.mean, np.sqrt(exact.variance))


def test_expanded_mean_metric_is_elementwise_and_leaves_zero():
    """An elementwise metric has a divergence that costs one directional derivative."""
    kernel = make_kernel(SGRLD, 1e-3, 20)
    mcmc = quietly(kernel, num_warmup=0, num_samples=3)
    init_params = {
        "shares_mirrored": np.array([1.0, 0.5, 0.0, 1e-35]),
        "other": np.array(0.0),
    }
    mcmc.run(random.key(0), COUNTS, batch_size=20, init_params=init_params)
    assert (np.asarray(mcmc.get_samples()["shares"]) > 0.0).all()
    state = mcmc.last_state
    dynamics = kernel._bind_dynamics(kernel.potential, state.adapt_state.preconditioner)
    q = state.dynamics_state.position
    assert is_elementwise(dynamics.inverse_metric, q)
    expected = np.concatenate([[1.0], np.abs(state.z["shares_mirrored"])])
    np.testing.assert_allclose(dynamics.inverse_metric(q), expected, rtol=1e-5)


def normal(rows, batch_size=None):
    numpyro.sample("shares", dist.Normal(0, 1))


def test_expanded_mean_of_other_sites_raises():
    with pytest.raises(InvalidArgumentError, match="`names`"):
        expanded_mean()
    with pytest.raises(InvalidModelError, match=r"'shares'.*Normal"):
        seed(expanded(normal), 0)(COUNTS)
    kernel = make_kernel(SGRLD, 1e-3, 20, multinomial)
    with pytest.raises(ValueError, match=r"'shares'.*'shares_mirrored'"):
        quietly(kernel).run(random.key(0), COUNTS, batch_size=20)
