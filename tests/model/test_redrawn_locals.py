"""Local values that are drawn anew for each minibatch and dropped."""

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

ROWS = 40
Y = normal_means_data(ROWS)
AT = jnp.array([0.3, jnp.log(0.7)])  # mu and log tau
STICKS = 0.8


def conditional(hmc_sites, y):
    """Mean and sd of each local value given the globals and its datum."""
    precision = 1 / NOISE**2 + 1 / hmc_sites["tau"] ** 2
    mean = (y / NOISE**2 + hmc_sites["mu"] / hmc_sites["tau"] ** 2) / precision
    return mean, 1 / jnp.sqrt(precision)


def draw(rng_key, gibbs_sites, hmc_sites, rows, model_args):
    return {"z": dist.Normal(*conditional(hmc_sites, model_args[0][rows])).sample(rng_key)}


def draw_slowly(rng_key, gibbs_sites, hmc_sites, rows, model_args):
    """Leaves the conditional as it is, but remembers four fifths of the value before."""
    mean, sd = conditional(hmc_sites, model_args[0][rows])
    fresh = sd * jnp.sqrt(1 - STICKS**2) * random.normal(rng_key, mean.shape)
    return {"z": mean + STICKS * (gibbs_sites["z"] - mean) + fresh}


def mean_gradient(fn, sweeps, rows=None, num_keys=4_000):
    """Over many keys, at one position: means and standard errors."""
    arguments = Arguments((Y,), {"batch_size": 10})
    gibbs = GibbsConfig(fn, ("z",), sweeps)
    target = make_model_potential(normal_means, arguments, init_to_uniform, gibbs)
    assert target.local_latents is None
    rows = {"rows": jnp.arange(ROWS) if rows is None else rows}
    found = jax.jit(jax.vmap(lambda key: jax.grad(target.value)(AT, rows, arguments, key)))(
        random.split(random.key(0), num_keys)
    )
    found = np.asarray(found, np.float64)
    return found.mean(0), found.std(0) / np.sqrt(num_keys)


def marginal(q, y=Y, scale=1.0):
    """The potential with the local values integrated out."""
    mu, tau = q[0], jnp.exp(q[1])
    own = dist.Normal(mu, jnp.sqrt(tau**2 + NOISE**2)).log_prob(y).sum() * scale
    return -(own + dist.Normal(0, 5).log_prob(mu) + dist.HalfNormal(2).log_prob(tau) + q[1])


@pytest.mark.parametrize("sweeps", [1, 3])
def test_the_gradients_mean_is_that_of_the_marginal_posterior(sweeps):
    mean, error = mean_gradient(draw, sweeps)
    assert (np.abs(mean - jax.grad(marginal)(AT)) < 4.0 * error).all()
    assert (error < 0.2).all()


def test_a_minibatch_stands_for_all_rows():
    rows = jnp.array([3, 17, 5, 30])
    mean, error = mean_gradient(draw, 1, rows)
    exact = jax.grad(lambda q: marginal(q, jnp.asarray(Y)[rows], ROWS / 4))(AT)
    assert (np.abs(mean - exact) < 4.0 * error).all()


@pytest.mark.parametrize("sweeps", [1, 4, 20])
def test_too_few_sweeps_leave_the_share_of_the_prior_that_they_remember(sweeps):
    """The mean's gradient is linear in the local values, whose means are known."""
    mean, error = mean_gradient(draw_slowly, sweeps)
    globals_ = {"mu": AT[0], "tau": jnp.exp(AT[1])}
    middle, _ = conditional(globals_, jnp.asarray(Y))
    z = middle + STICKS**sweeps * (globals_["mu"] - middle)
    exact = -(z - globals_["mu"]).sum() / globals_["tau"] ** 2 + globals_["mu"] / 25
    assert abs(mean[0] - exact) < 4.0 * error[0]
    is_biased = abs(mean[0] - jax.grad(marginal)(AT)[0]) > 4.0 * error[0]
    assert is_biased == (sweeps < 10)


def given(scales, **settings):
    """All that a warm-up looks for."""
    matrix = np.square(scales)
    found = {
        "inverse_mass_matrix": matrix,
        "gradient_estimator": "minibatch",
        "subsampling": "contiguous",
    }
    return {**found, "step_size": 0.1, "num_steps": 20, **settings}


@pytest.mark.usefixtures("optimised")
def test_the_posterior_of_the_globals():
    y = normal_means_data()
    exact = normal_means_posterior(y)
    (_, sd), (mean, sd_of_tau) = exact["mu"], exact["tau"]
    settings = given([sd, sd_of_tau / mean], friction=4.0)
    kernel = SGHMCSplit(
        normal_means, gibbs_fn=draw, gibbs_sites=["z"], keep_locals=False, **settings
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
def test_rows_may_be_on_the_host():
    """No values of all rows are kept, so that the rows may be anywhere."""
    settings = given([0.1, 0.1], num_steps=3)
    found = []
    for rows in (Y, HostArray(Y)):
        kernel = SGHMCSplit(
            normal_means,
            gibbs_fn=draw,
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


def endless(batch_size=10):
    """Rows that are computed, of which no memory holds a number each."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", MANY, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=jnp.sin(i))


def draw_endless(rng_key, gibbs_sites, hmc_sites, rows):
    mean = 0.5 * (hmc_sites["mu"] + jnp.sin(rows))
    return {"z": dist.Normal(mean, jnp.sqrt(0.5)).sample(rng_key)}


def test_memory_is_that_of_a_minibatch():
    """Gigabytes, were there anything for each row; a look before any values is kept small, too."""
    draws = {"gibbs_fn": draw_endless, "gibbs_sites": ["z"]}
    kernel = SGHMCSplit(endless, **draws, keep_locals=False, **given([1e-4], num_steps=2))
    mcmc = quietly(kernel, num_warmup=2, num_samples=3)
    mcmc.run(random.key(0), init_params={"mu": np.array(0.0)})
    assert np.isfinite(mcmc.get_samples()["mu"]).all()
    target = make_model_potential(
        endless, Arguments((), {}), init_to_uniform, GibbsConfig(draw_endless, ("z",))
    )
    potential = jax.jit(lambda rows: target.value(jnp.zeros(1), {"rows": rows}, Arguments((), {})))
    needed = potential.lower(jnp.arange(7)).compile().memory_analysis()
    assert needed.temp_size_in_bytes < 10**6
    assert np.isfinite(potential(jnp.arange(7)))


def topics(counts, batch_size=None):
    """Of which a value at zero is outside of its support."""
    words = numpyro.sample("words", dist.Dirichlet(jnp.ones((3, 5))).to_event(1))
    with numpyro.plate("documents", len(counts), subsample_size=batch_size) as i:
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("counts", dist.Multinomial(20, shares @ words), obs=counts[i])


def draw_shares(rng_key, gibbs_sites, hmc_sites, rows, model_args, model_kwargs):
    """By one sweep about: the mean of the words' topics given the shares, then the shares."""
    assert model_kwargs == {"batch_size": 8}
    odds = gibbs_sites["shares"][:, :, None] * hmc_sites["words"]
    of_topics = model_args[0][rows][:, None] * odds / odds.sum(1, keepdims=True)
    return {"shares": dist.Dirichlet(1.0 + of_topics.sum(2)).sample(rng_key)}


def documents():
    rng = np.random.default_rng(0)
    words = rng.dirichlet(np.ones(5), 3)[rng.integers(3, size=64)]
    return rng.multinomial(20, words).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("sweeps", [None, 2])
def test_values_that_a_simplex_bounds(sweeps):
    """Nothing evaluates the model at local values that nobody has drawn."""
    kernel = SGHMCSplit(
        topics,
        gibbs_fn=draw_shares,
        gibbs_sites=["shares"],
        keep_locals=sweeps is None,
        num_gibbs_sweeps=sweeps or 1,
        **given(np.full(12, 0.1)),
    )
    mcmc = quietly(kernel, num_warmup=5, num_samples=5)
    mcmc.run(random.key(0), documents(), batch_size=8)
    words = mcmc.get_samples()["words"]
    assert np.isfinite(words).all()
    assert (words[1:] != words[:-1]).all()


def test_draws_on_the_boundary_name_the_site():
    """A share of exactly zero has no density, and no other start would help."""

    def draw_one(rng_key, gibbs_sites, hmc_sites, rows):
        return {"shares": jax.nn.one_hot(random.randint(rng_key, (len(rows),), 0, 3), 3)}

    kernel = SGHMCSplit(
        topics,
        gibbs_fn=draw_one,
        gibbs_sites=["shares"],
        keep_locals=False,
        **given(np.full(12, 0.1)),
    )
    with pytest.raises(ValueError, match=r"`gibbs_fn` draws values of 'shares'.*exactly 0: keep"):
        kernel.init(random.key(0), 2, None, (documents(),), {"batch_size": 8})


@pytest.mark.slow
def test_a_run_can_be_stored(tmp_path):
    settings = given([0.1, 0.1], step_size=0.01)
    kernel = SGNHT(normal_means, gibbs_fn=draw, gibbs_sites=["z"], keep_locals=False, **settings)
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


def test_what_makes_no_sense_is_refused():
    draws = {"gibbs_fn": draw, "gibbs_sites": ["z"], "keep_locals": False}
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
