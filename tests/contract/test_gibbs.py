"""Kernels as blocks of NumPyro's Gibbs, beside a discrete global latent site.

Each value of ``k`` changes the log rate by less than its posterior SD, so that ``k`` stays
uncertain; the exact posterior is a sum over ``k`` of integrals on a grid.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import condition
from numpyro.infer import DiscreteGibbs, Gibbs
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned, discrete_latent_sites

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.data.arguments import Arguments
from tests.contract.kernels import (
    GIVEN,
    KERNELS,
    assert_posterior,
    ignore_donation,
    moments,
    quietly,
)

SHIFT, PRIOR_MEAN, PRIOR_SD = 0.06, 0.25, 0.15
WEIGHTS = np.array([0.5, 0.3, 0.2])
BATCH = 40


def switching(y: Any, batch_size: int | None = None) -> None:
    k = numpyro.sample("k", dist.Categorical(jnp.asarray(WEIGHTS)))
    rate = numpyro.sample("rate", dist.LogNormal(PRIOR_MEAN, PRIOR_SD))
    numpyro.deterministic("total", rate * jnp.exp(SHIFT * k))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(rate * jnp.exp(SHIFT * k)), obs=y[i])


def counts() -> np.ndarray:
    return np.random.default_rng(1).poisson(np.exp(0.3), 400)


def exact_posterior() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return P(k), and mean and SD of the log rate given each k."""
    y, k = counts(), np.arange(3)
    mu = np.linspace(-1, 1.5, 20_001)[:, None]
    log_rate = mu + SHIFT * k
    log_density = (
        np.log(WEIGHTS)
        - 0.5 * ((mu - PRIOR_MEAN) / PRIOR_SD) ** 2
        + y.sum() * log_rate
        - len(y) * np.exp(log_rate)
    )
    p = np.exp(log_density - log_density.max())
    p /= p.sum()
    weights = p.sum(0)
    mean = (p * mu).sum(0) / weights
    return weights, mean, np.sqrt((p * (mu - mean) ** 2).sum(0) / weights)


def assert_exact_posterior(draws: dict[str, Any]) -> None:
    """Check P(k), and the moments given k, of draws ``(chains, draws)``."""
    k, mu = np.asarray(draws["k"]), np.log(draws["rate"])
    weights, means, sds = exact_posterior()
    marginal = moments(mu)
    ess_per_draw = min(1.0, float((marginal.sd / marginal.mean_error) ** 2 / mu.size))
    for value, (weight, mean, sd) in enumerate(zip(weights, means, sds, strict=True)):
        frequency = moments(k == value)
        assert frequency.mean_error < 0.04, "the effective sample size is too small to decide"
        error = abs(frequency.mean - weight)
        assert error < 5 * frequency.mean_error + 0.01, (value, frequency, weight)
        conditional = mu[k == value]
        mcse = conditional.std() / np.sqrt(conditional.size * ess_per_draw)
        assert abs(conditional.mean() - mean) < 5 * mcse + 0.1 * sd, (value, mean)
        assert abs(conditional.std() - sd) < 5 * mcse + 0.1 * sd, (value, sd)


def run_gibbs(
    kernel: Any, num_samples: int, batch_size: int, sites: Any = ("k",), **settings: Any
) -> dict[str, Any]:
    """Return draws of a discrete block and a stochastic-gradient block in turn."""
    gibbs = Gibbs([(DiscreteGibbs(kernel.model), sites), (kernel, None)])
    mcmc = quietly(gibbs, num_warmup=50, num_samples=num_samples, **settings)
    mcmc.run(jax.random.key(0), counts(), batch_size=batch_size)
    return mcmc.get_samples(group_by_chain=True)


@pytest.mark.slow  # the draws of the report on blocks have a quick test
@pytest.mark.parametrize("kernel_class", KERNELS, ids=lambda k: k.__name__)
def test_kernel_beside_a_discrete_block_has_the_exact_posterior(kernel_class):
    draws = run_gibbs(kernel_class(switching), 4000, BATCH)
    assert_exact_posterior(draws)
    np.testing.assert_allclose(
        draws["total"], draws["rate"] * np.exp(SHIFT * draws["k"]), rtol=1e-5
    )


@pytest.mark.slow
def test_minibatch_gradients_in_a_block_have_the_exact_posterior():
    """There is no reference to update: the conditioning values are in the gradient itself."""
    kernel = SGHMCSplit(switching, gradient_estimator="minibatch")
    assert_exact_posterior(run_gibbs(kernel, 3000, 100, discrete_latent_sites))


@pytest.mark.slow
def test_stale_reference_gradient_biases_the_posterior(monkeypatch):
    """Without `refresh` control variates keep the gradient of another conditional posterior."""
    monkeypatch.setattr(SGHMCSplit, "refresh", lambda self, state, args, kwargs: state)
    with pytest.raises(AssertionError):
        assert_exact_posterior(
            run_gibbs(SGHMCSplit(switching, gradient_estimator="control_variate"), 3000, BATCH)
        )


def test_kernel_without_a_model_as_a_block_raises():
    kernel = SGHMCSplit(potential_fn=lambda z: jnp.sum(jnp.square(z)))
    with pytest.raises(ValueError, match="potential function"):
        Gibbs([(kernel, None)])


# Wide priors


def line(x: Any, y: Any, batch_size: int | None = None) -> None:
    """A regression with wide priors."""
    k = numpyro.sample("k", dist.Categorical(jnp.asarray(WEIGHTS)))
    scale = numpyro.sample("scale", dist.HalfCauchy(25))
    slope = numpyro.sample("slope", dist.Normal(0, 100))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(k + slope * x[i], scale), obs=y[i])


def line_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(500)
    return x.astype(np.float32), (2 + 3 * x + 0.5 * rng.standard_normal(500)).astype(np.float32)


def line_given_two(x: Any, y: Any, batch_size: int | None = None) -> None:
    condition(line, {"k": jnp.asarray(2)})(x, y, batch_size)


@pytest.mark.slow
@ignore_donation
def test_blocks_with_wide_priors_keep_their_step_size():
    """Each adapts to likely values of the other's site; the step-size check keeps the step."""
    scale, slope = SGHMCSplit(line_given_two), SGHMCSplit(line_given_two)
    gibbs = Gibbs([(scale, ["scale"]), (slope, ["slope"])])
    mcmc = quietly(gibbs, num_warmup=100, num_samples=500, num_chains=4, chain_method=jax.vmap)
    x, y = line_data()
    mcmc.run(jax.random.key(0), x, y, batch_size=50)
    for state in mcmc.last_state.block_states:
        np.testing.assert_allclose(state.adapt_state.step_size, 0.3, rtol=1e-6)
    draws = mcmc.get_samples(group_by_chain=True)
    x, residual = x.astype(np.float64), y - 2.0
    mean = x @ residual / (x @ x)
    sigma = np.sqrt(np.square(residual - mean * x).sum() / (len(x) - 1))
    assert_posterior(draws["slope"], mean, sigma / np.sqrt(x @ x))
    assert_posterior(draws["scale"], sigma, sigma / np.sqrt(2 * len(x)))


@pytest.mark.slow
def test_block_adapts_once_whatever_the_draws_from_the_prior():
    """Continuous sites have variational means in place of draws from the prior."""
    kernel = SGHMCSplit(line).wrap_model(conditioned)
    x, y = line_data()
    k, adaptations = jnp.asarray(2), []
    for scale in (40.0, 0.01):
        given = {"k": k, "scale": jnp.asarray(scale)}
        kwargs = {"batch_size": 50, GIBBS_SITES_KWARG: given}
        kernel.init(jax.random.key(0), 10, None, (x, y), kwargs)
        adaptations.append(kernel.adaptation)
    assert adaptations[0] is adaptations[1]
    values = kernel._cache.adapted_arguments.kwargs[GIBBS_SITES_KWARG]
    assert values["k"] is k
    assert 0.4 < values["scale"] < 0.6


# Local latent variables


def offset(y: Any, batch_size: int | None = None) -> None:
    """The local variables integrate out: given k the mean of y is ``mu`` plus a constant."""
    k = numpyro.sample("k", dist.Categorical(jnp.asarray(WEIGHTS)))
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z + SHIFT * k, 1), obs=y[i])


def test_values_of_another_block_are_indexed_by_the_minibatch():
    """Another block has sampled the site inside the plate for all rows."""
    y = jnp.asarray(np.random.default_rng(0).standard_normal((60, 2)), jnp.float32)

    def pairs(y: Any, batch_size: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("columns", 2, dim=-1):
            with numpyro.plate("rows", 60, subsample_size=batch_size, dim=-2) as i:
                z = numpyro.sample("z", dist.Normal(mu, 1).expand([1, 1, 3]).to_event(1))
                numpyro.sample("y", dist.Normal(z.sum(-1), 1), obs=y[i])

    z = jnp.asarray(np.random.default_rng(1).standard_normal((60, 2, 3)), jnp.float32)
    kernel = SGHMCSplit(pairs, **GIVEN).wrap_model(conditioned)
    kwargs = {"batch_size": 20, GIBBS_SITES_KWARG: {"z": z}}
    kernel.init(jax.random.key(0), 10, None, (y,), kwargs)
    indices = jnp.array([3, 1, 59, 7])
    arguments = Arguments((y,), kwargs)
    value = kernel.potential.value(jnp.array([0.3]), {"rows": indices}, arguments)
    log_joint = dist.Normal(0.3, 1).log_prob(z[indices]).sum()
    log_joint += dist.Normal(z[indices].sum(-1), 1).log_prob(y[indices]).sum()
    expected = -15 * log_joint - dist.Normal(0, 1).log_prob(0.3)
    assert abs(float(value - expected)) < 1e-3 * abs(float(expected))


@pytest.mark.slow
def test_kernel_with_local_latents_beside_a_discrete_block_has_the_exact_posterior():
    y = (0.2 + np.sqrt(2) * np.random.default_rng(2).standard_normal(400)).astype(np.float32)
    kernel = SGHMCSplit(offset)
    gibbs = Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)])
    settings = {"num_warmup": 50, "num_samples": 1000, "num_chains": 2}
    mcmc = quietly(gibbs, chain_method="sequential", **settings)
    mcmc.run(jax.random.key(0), y, batch_size=BATCH)
    draws = mcmc.get_samples(group_by_chain=True)
    assert draws["z"].shape == (2, 1000, 400)
    precision = 1 + len(y) / 2  # of mu given k, and of z given mu: 2
    means = (y.sum() - len(y) * SHIFT * np.arange(3)) / 2 / precision
    weights = np.array([np.exp(0.5 * precision * m**2) for m in means])
    squares = ((y[:, None] - SHIFT * np.arange(3)) ** 2).sum(0)
    weights = WEIGHTS * np.exp(np.log(weights) - (squares - squares.min()) / 4)
    weights /= weights.sum()
    mean = float(weights @ means)
    sd = float(np.sqrt(weights @ (1 / precision + means**2) - mean**2))
    assert_posterior(draws["mu"], mean, sd)
    residual = draws["z"] - (draws["mu"][..., None] + y - SHIFT * draws["k"][..., None]) / 2
    assert abs(float(residual.mean())) < 0.02
    assert abs(float(residual.var()) - 0.5) < 0.02
    with pytest.raises(ValueError, match=r"'z'.*latent"):
        bias_report(mcmc)
