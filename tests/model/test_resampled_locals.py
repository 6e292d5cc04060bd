"""Local values that are sampled anew for each minibatch and dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import SGNHT, CheckpointedMCMC, HostArray, SGHMCSplit, bias_report
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import make_model_potential
from numpyro_sgmcmc.model.trace import GibbsConfig
from tests.contract.kernels import assert_posterior, quietly
from tests.model.hierarchies import (
    NOISE,
    normal_means,
    normal_means_data,
    normal_means_posterior,
)
from tests.quick import quick_if

ROWS = 40
Y = normal_means_data(ROWS)
POSITION = jnp.array([0.3, jnp.log(0.7)])  # mu and log tau
AUTOCORRELATION = 0.8


def conditional(hmc_sites, y):
    """Return mean and SD of each local value given the globals and its datum."""
    precision = 1 / NOISE**2 + 1 / hmc_sites["tau"] ** 2
    mean = (y / NOISE**2 + hmc_sites["mu"] / hmc_sites["tau"] ** 2) / precision
    return mean, 1 / jnp.sqrt(precision)


def sample_exactly(rng_key, gibbs_sites, hmc_sites, rows, model_args):
    return {"z": dist.Normal(*conditional(hmc_sites, model_args[0][rows])).sample(rng_key)}


def sample_with_memory(rng_key, gibbs_sites, hmc_sites, rows, model_args):
    """Leave the conditional invariant, with autocorrelation 0.8 between sweeps."""
    mean, sd = conditional(hmc_sites, model_args[0][rows])
    fresh = sd * jnp.sqrt(1 - AUTOCORRELATION**2) * random.normal(rng_key, mean.shape)
    return {"z": mean + AUTOCORRELATION * (gibbs_sites["z"] - mean) + fresh}


def mean_gradient(fn, num_sweeps, rows=None, num_keys=4_000):
    """Return the mean gradient over many keys at one position, and its standard error."""
    arguments = Arguments((Y,), {"batch_size": 10})
    gibbs = GibbsConfig(fn, ("z",), num_sweeps)
    potential = make_model_potential(normal_means, arguments, init_to_uniform, gibbs)
    assert potential.local_latents is None
    rows = {"rows": jnp.arange(ROWS) if rows is None else rows}
    gradients = jax.jit(
        jax.vmap(lambda key: jax.grad(potential.value)(POSITION, rows, arguments, key))
    )(random.split(random.key(0), num_keys))
    gradients = np.asarray(gradients, np.float64)
    return gradients.mean(0), gradients.std(0) / np.sqrt(num_keys)


def marginal_potential(q, y=Y, scale=1.0):
    """Return the potential with the local values integrated out."""
    mu, tau = q[0], jnp.exp(q[1])
    likelihood = dist.Normal(mu, jnp.sqrt(tau**2 + NOISE**2)).log_prob(y).sum() * scale
    return -(likelihood + dist.Normal(0, 5).log_prob(mu) + dist.HalfNormal(2).log_prob(tau) + q[1])


marginal_gradient = jax.jit(jax.grad(marginal_potential))


@pytest.mark.parametrize("num_sweeps", [quick_if(False, 1), 3])
def test_gradient_exact_gibbs_fn_is_unbiased_for_marginal(num_sweeps):
    mean, error = mean_gradient(sample_exactly, num_sweeps)
    assert (np.abs(mean - marginal_gradient(POSITION)) < 4.0 * error).all()
    assert (error < 0.2).all()


def test_gradient_minibatch_is_unbiased_for_scaled_marginal():
    rows = jnp.array([3, 17, 5, 30])
    mean, error = mean_gradient(sample_exactly, 1, rows)
    exact = jax.jit(jax.grad(marginal_potential))(POSITION, Y[np.asarray(rows)], ROWS / 4)
    assert (np.abs(mean - exact) < 4.0 * error).all()


@pytest.mark.parametrize("num_sweeps", [1, quick_if(False, 4), 20])
def test_gradient_few_sweeps_has_known_bias(num_sweeps):
    """The gradient in mu is linear in the local values, whose means are known."""
    mean, error = mean_gradient(sample_with_memory, num_sweeps)
    globals_ = {"mu": POSITION[0], "tau": jnp.exp(POSITION[1])}
    exact_mean, _ = conditional(globals_, jnp.asarray(Y))
    z = exact_mean + AUTOCORRELATION**num_sweeps * (globals_["mu"] - exact_mean)
    exact = -(z - globals_["mu"]).sum() / globals_["tau"] ** 2 + globals_["mu"] / 25
    assert abs(mean[0] - exact) < 4.0 * error[0]
    is_biased = abs(mean[0] - marginal_gradient(POSITION)[0]) > 4.0 * error[0]
    assert is_biased == (num_sweeps < 10)


def given(scales, **settings):
    """Return options that leave nothing for the warm-up to adapt."""
    defaults = {
        "inverse_mass_matrix": np.square(scales),
        "gradient_estimator": "minibatch",
        "subsampling": "contiguous",
        "step_size": 0.1,
        "num_steps": 20,
    }
    return {**defaults, **settings}


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_draws_match_marginal_posterior():
    y = normal_means_data()
    exact = normal_means_posterior(y)
    (_, sd), (mean, sd_of_tau) = exact["mu"], exact["tau"]
    settings = given([sd, sd_of_tau / mean], friction=4.0)
    kernel = SGHMCSplit(
        normal_means, gibbs_fn=sample_exactly, gibbs_sites=["z"], keep_locals=False, **settings
    )
    mcmc = quietly(kernel, num_warmup=50, num_samples=400, num_chains=2, chain_method="vectorized")
    start = {"mu": np.full(2, exact["mu"][0]), "tau": np.full(2, np.log(mean))}
    mcmc.run(random.key(1), y, batch_size=1000, init_params=start)
    assert mcmc.last_state.local_state is None
    draws = mcmc.get_samples(group_by_chain=True)
    for name, (mean, sd) in exact.items():
        assert_posterior(draws[name], mean, sd)
    assert not bias_report(mcmc).is_flagged


@pytest.mark.slow
def test_draws_host_array_match_array_in_memory():
    settings = given([0.1, 0.1], num_steps=3)
    found = []
    for rows in (Y, HostArray(Y)):
        kernel = SGHMCSplit(
            normal_means,
            gibbs_fn=sample_exactly,
            gibbs_sites=["z"],
            keep_locals=False,
            num_gibbs_sweeps=2,
            **settings,
        )
        mcmc = quietly(kernel, num_warmup=2, num_samples=4)
        mcmc.run(random.key(1), rows, batch_size=10)
        found.append(mcmc.get_samples())
    assert np.ptp(found[0]["mu"]) > 0.0
    for name, draws in found[0].items():
        np.testing.assert_allclose(draws, found[1][name], rtol=1e-5)


MANY = 10**9


def many_rows(batch_size=10):
    """Model with rows that are computed, too many to hold one number each in memory."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", MANY, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=jnp.sin(i))


def sample_many_rows(rng_key, gibbs_sites, hmc_sites, rows):
    mean = 0.5 * (hmc_sites["mu"] + jnp.sin(rows))
    return {"z": dist.Normal(mean, jnp.sqrt(0.5)).sample(rng_key)}


def test_run_many_rows_needs_memory_of_a_minibatch():
    options = {"gibbs_fn": sample_many_rows, "gibbs_sites": ["z"]}
    kernel = SGHMCSplit(many_rows, **options, keep_locals=False, **given([1e-4], num_steps=2))
    mcmc = quietly(kernel, num_warmup=2, num_samples=3)
    mcmc.run(random.key(0), init_params={"mu": np.array(0.0)})
    assert np.isfinite(mcmc.get_samples()["mu"]).all()
    potential = make_model_potential(
        many_rows, Arguments((), {}), init_to_uniform, GibbsConfig(sample_many_rows, ("z",))
    )
    value = jax.jit(lambda rows: potential.value(jnp.zeros(1), {"rows": rows}, Arguments((), {})))
    memory = value.lower(jnp.arange(7)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10**6
    assert np.isfinite(value(jnp.arange(7)))


def topics(counts, batch_size=None):
    """Topic model: the local values are on a simplex, which does not contain zero."""
    words = numpyro.sample("words", dist.Dirichlet(jnp.ones((3, 5))).to_event(1))
    with numpyro.plate("documents", len(counts), subsample_size=batch_size) as i:
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("counts", dist.Multinomial(20, shares @ words), obs=counts[i])


def sample_shares(rng_key, gibbs_sites, hmc_sites, rows, model_args, model_kwargs):
    """Approximate sweep: the mean of the words' topics given the shares, then the shares."""
    assert model_kwargs == {"batch_size": 8}
    odds = gibbs_sites["shares"][:, :, None] * hmc_sites["words"]
    of_topics = model_args[0][rows][:, None] * odds / odds.sum(1, keepdims=True)
    return {"shares": dist.Dirichlet(1.0 + of_topics.sum(2)).sample(rng_key)}


def documents():
    rng = np.random.default_rng(0)
    words = rng.dirichlet(np.ones(5), 3)[rng.integers(3, size=64)]
    return rng.multinomial(20, words).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("num_sweeps", [None, 2])
def test_draws_local_values_on_simplex_are_finite(num_sweeps):
    """The model is evaluated only at local values inside their support."""
    kernel = SGHMCSplit(
        topics,
        gibbs_fn=sample_shares,
        gibbs_sites=["shares"],
        keep_locals=num_sweeps is None,
        num_gibbs_sweeps=num_sweeps or 1,
        **given(np.full(12, 0.1)),
    )
    mcmc = quietly(kernel, num_warmup=5, num_samples=5)
    mcmc.run(random.key(0), documents(), batch_size=8)
    words = mcmc.get_samples()["words"]
    assert np.isfinite(words).all()
    assert (words[1:] != words[:-1]).all()


def test_init_gibbs_fn_on_boundary_of_support_raises():
    """A value of exactly zero has no density, at any initial position."""

    def positive(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.LogNormal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    def sample_zeros(rng_key, gibbs_sites, hmc_sites, rows):
        return {"z": jnp.zeros(len(rows))}

    options = {"gibbs_fn": sample_zeros, "gibbs_sites": ["z"], "keep_locals": False}
    kernel = SGHMCSplit(positive, **options, **given([0.1]))
    with pytest.raises(ValueError, match=r"'z'.*`gibbs_fn`.*not finite"):
        kernel.init(random.key(0), 2, None, (Y,), {"batch_size": 8})


@pytest.mark.slow
def test_checkpointed_run_resampled_locals_has_draws(tmp_path):
    settings = given([0.1, 0.1], step_size=0.01)
    kernel = SGNHT(
        normal_means, gibbs_fn=sample_exactly, gibbs_sites=["z"], keep_locals=False, **settings
    )
    mcmc = CheckpointedMCMC(
        kernel, num_warmup=3, num_samples=6, checkpoint=tmp_path / "run", progress_bar=False
    )
    mcmc.run(random.key(0), Y, batch_size=10)
    assert mcmc.get_samples()["mu"].shape == (6,)


def two_effects(y, batch_size=None):
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(0, 1))
        w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z + w, 1), obs=y[i])


def test_kernel_invalid_options_of_resampled_locals_raises():
    draws = {"gibbs_fn": sample_exactly, "gibbs_sites": ["z"], "keep_locals": False}
    for wrong, words in [
        ({**draws, "num_gibbs_sweeps": 0}, "num_gibbs_sweeps"),
        ({"keep_locals": False}, "keep_locals.*gibbs_fn"),
        ({**draws, "collect_local_sites": True}, "collect_local_sites.*keep_locals"),
    ]:
        with pytest.raises(ValueError, match=words):
            SGHMCSplit(normal_means, **wrong)
    for wrong, words in [
        (
            {**draws, "gradient_estimator": "control_variate"},
            "gradient_estimator.*keep_locals",
        ),
        ({**draws, "noise_compensation": True}, "noise_compensation"),
    ]:
        with pytest.raises(ValueError, match=words):
            quietly(SGHMCSplit(normal_means, **wrong)).run(random.key(0), Y, batch_size=10)
    kernel = SGHMCSplit(two_effects, **draws)
    with pytest.raises(ValueError, match=r"'w'.*gibbs_fn"):
        quietly(kernel).run(random.key(0), Y, batch_size=10)
