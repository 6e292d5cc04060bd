"""Neural networks, cold posteriors, cyclical step sizes and clipped gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import init_to_sample

from numpyro_sgmcmc import SGHMCSplit, bias_report, schedules
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.adaptation import test_non_identified
from tests.contract.kernels import assert_posterior, quietly
from tests.quick import quick_if

ROWS, UNITS = 200, 15
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(-2, 2, (ROWS, 2)), jnp.float32)
Y = jnp.asarray(np.sin(2 * X[:, 0]) * X[:, 1] + 0.3 * RNG.standard_normal(ROWS), jnp.float32)
UNPRECONDITIONED = {
    "adapt_mass_matrix": False,
    "gradient_estimator": "minibatch",
    "subsampling": "shuffled",
}


def normal(*shape):
    return dist.Normal(0, 1).expand(shape).to_event(len(shape))


def output(weights, x, activation=jnp.tanh):
    hidden = activation(x @ weights["w1"] + weights["b1"])
    return (hidden @ weights["w2"] + weights["b2"])[..., 0]


def observe(f, y, batch_size):
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(f(X[i]), 0.3), obs=y[i])


def plain_network(y, batch_size=None, activation=jnp.tanh):
    shapes = {"w1": (2, UNITS), "b1": (UNITS,), "w2": (UNITS, 1), "b2": (1,)}
    weights = {name: numpyro.sample(name, normal(*shape)) for name, shape in shapes.items()}
    observe(lambda x: output(weights, x, activation), y, batch_size)


def plain_network_with_relu(y, batch_size=None):
    plain_network(y, batch_size, jax.nn.relu)


def linen_network(y, batch_size=None):
    linen = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import random_flax_module

    class Network(linen.Module):
        def setup(self):
            self.hidden, self.out = linen.Dense(UNITS), linen.Dense(1)

        def __call__(self, x):
            return self.out(jnp.tanh(self.hidden(x)))[..., 0]

    f = random_flax_module("net", Network(), dist.Normal(0, 1), input_shape=(1, 2))
    observe(f, y, batch_size)


def nnx_network(y, batch_size=None):
    nnx = pytest.importorskip("flax.nnx")
    from numpyro.contrib.module import random_nnx_module

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(2, UNITS, rngs=rngs)
            self.out = nnx.Linear(UNITS, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(jnp.tanh(self.hidden(x)))[..., 0]

    f = random_nnx_module("net", Network(nnx.Rngs(0)), dist.Normal(0, 1))
    observe(f, y, batch_size)


FLAX_NAMES = {
    "w1": "net/hidden.kernel",
    "b1": "net/hidden.bias",
    "w2": "net/out.kernel",
    "b2": "net/out.bias",
}


def make_potential(model):
    arguments = Arguments((Y,), {"batch_size": 50})
    return get_model_potential(model, arguments, init_to_sample), arguments


@pytest.mark.parametrize("model", [linen_network, quick_if(False, nnx_network)])
def test_flax_network_has_potential_and_gradient_of_the_plain_network(model):
    plain, arguments = make_potential(plain_network)
    flax, _ = make_potential(model)
    q = jax.random.normal(jax.random.key(0), (plain.dim,))
    renamed = {FLAX_NAMES[name]: w for name, w in plain.unravel(q).items()}
    assert renamed.keys() == flax.unravel(q).keys()
    flax_q = ravel_pytree(renamed)[0]
    indices = {"rows": jnp.arange(3, 53)}

    def evaluate(potential, position):
        value, gradient = jax.jit(potential.value_and_grad)(position, indices, arguments)
        return value, potential.unravel(gradient)

    expected_value, expected = evaluate(plain, q)
    value, gradient = evaluate(flax, flax_q)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name, g in expected.items():
        np.testing.assert_allclose(gradient[FLAX_NAMES[name]], g, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", [plain_network, linen_network, nnx_network])
def test_network_from_prior_draws_reaches_the_noise_level_of_the_data(model):
    kernel = SGHMCSplit(
        model, step_size=0.003, num_steps=50, init_strategy=init_to_sample, **UNPRECONDITIONED
    )
    mcmc = quietly(kernel, num_warmup=60, num_samples=10)
    mcmc.run(jax.random.key(0), Y, batch_size=50)
    weights = mcmc.get_samples()
    if model is not plain_network:
        weights = {name: weights[flax_name] for name, flax_name in FLAX_NAMES.items()}
    error = jax.vmap(lambda w: output(w, X))(weights).mean(0) - Y
    assert 0.2 < float(jnp.sqrt(jnp.square(error).mean())) < 0.4


# --- Cold posteriors: a linear regression, whose posterior is known -----------------------------

PRIOR_SD, NOISE = 2.0, 0.5


def linear_model(y, batch_size=None, power=1.0):
    w = numpyro.sample("w", dist.Normal(0, PRIOR_SD).expand([2]).to_event(1))
    with handlers.scale(scale=power), numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, NOISE), obs=y[i])


def linear_posterior(prior_power, likelihood_power):
    x = np.asarray(X, float)
    precision = prior_power * np.eye(2) / PRIOR_SD**2 + likelihood_power * x.T @ x / NOISE**2
    covariance = np.linalg.inv(precision)
    return covariance @ x.T @ np.asarray(Y, float) * likelihood_power / NOISE**2, covariance


def run_cold(power, is_whole, covariance):
    """Sample a power of the posterior, or of the likelihood; control variates are exact here."""
    kernel = SGHMCSplit(
        handlers.scale(linear_model, power) if is_whole else linear_model,
        step_size=0.2,
        num_steps=10,
        inverse_mass_matrix=covariance,
        gradient_estimator="control_variate",
        subsampling="shuffled",
    )
    mcmc = quietly(kernel, num_warmup=50, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(jax.random.key(0), Y, batch_size=50, **({} if is_whole else {"power": power}))
    return mcmc


@pytest.mark.slow  # gradients of scaled models have quick tests
@pytest.mark.parametrize("temperature", [0.25, 4.0])
@pytest.mark.parametrize("is_whole", [True, False], ids=["posterior", "likelihood"])
def test_cold_posterior_is_a_power_of_the_posterior(temperature, is_whole):
    power = 1.0 / temperature
    mean, covariance = linear_posterior(power if is_whole else 1.0, power)
    if is_whole:
        warm_mean, warm_covariance = linear_posterior(1.0, 1.0)
        np.testing.assert_allclose(covariance, temperature * warm_covariance)
        np.testing.assert_allclose(mean, warm_mean)
    draws = run_cold(power, is_whole, covariance).get_samples(group_by_chain=True)["w"]
    assert_posterior(draws, mean, np.sqrt(np.diag(covariance)))


@pytest.mark.slow
def test_bias_report_of_cold_posterior_is_ok():
    report = bias_report(run_cold(4.0, True, linear_posterior(4.0, 4.0)[1]))
    (site,) = report.sites
    assert site.diagnosis == "ok"
    assert abs(site.sd_inflation) < 0.1


# --- Cyclical step sizes ------------------------------------------------------------------------


def compute_predictive_sd(step_size):
    """Return the mean SD of a network's values at new rows, without exploration draws."""
    kernel = SGHMCSplit(
        test_non_identified.network,
        step_size=step_size,
        num_steps=50,
        init_strategy=init_to_sample,
        **UNPRECONDITIONED,
    )
    mcmc = quietly(kernel, num_samples=500, num_chains=4, chain_method="vectorized")
    data = test_non_identified.X, test_non_identified.Y
    mcmc.run(jax.random.key(1), *data, batch_size=50, extra_fields=("weight",))
    draws = mcmc.get_samples(group_by_chain=True)
    weights = mcmc.get_extra_fields(group_by_chain=True)["weight"]
    draws, _ = schedules.drop_exploration(draws, weights)
    new = test_non_identified.NEW
    values = jax.vmap(jax.vmap(lambda w: test_non_identified.output(w, new)))(draws)
    return float(values.std((0, 1)).mean())


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_cyclical_step_sizes_remove_most_bias_of_long_steps():
    """SDs over those of NUTS were 2.36 (steps of 0.02), 1.20 (cycles) and 1.04 (steps of 0.002)."""
    short, long = compute_predictive_sd(0.002), compute_predictive_sd(0.02)
    cycles = compute_predictive_sd(schedules.Cyclical(0.02, period=1000))
    assert long > 1.7 * short
    assert cycles < 1.35 * short


@pytest.mark.slow
def test_cyclical_step_sizes_without_preconditioner_sample_the_posterior():
    """The posterior SDs are 0.03 and the steps are in the units of the parameters."""
    mean, covariance = linear_posterior(1.0, 1.0)
    kernel = SGHMCSplit(
        linear_model,
        step_size=schedules.Cyclical(0.01, period=200),
        num_steps=50,
        adapt_mass_matrix=False,
        gradient_estimator="control_variate",
        subsampling="shuffled",
    )
    mcmc = quietly(kernel, num_warmup=4, num_samples=300, num_chains=4, chain_method="vectorized")
    start = {"w": np.tile(mean, (4, 1))}
    mcmc.run(jax.random.key(0), Y, batch_size=50, init_params=start, extra_fields=("weight",))
    weights = mcmc.get_extra_fields(group_by_chain=True)["weight"]
    draws, _ = schedules.drop_exploration(mcmc.get_samples(group_by_chain=True), weights)
    assert draws["w"].shape == (4, 150, 2)
    np.testing.assert_array_equal(mcmc.last_state.adapt_state.preconditioner.factor, 1.0)
    assert_posterior(draws["w"], mean, np.sqrt(np.diag(covariance)))


# --- Clipped gradients --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [None, 1000.0])
def test_clipped_gradients_let_a_chain_converge_from_far_away(max_grad_norm):
    """At five prior SDs the gradient is so large that without clipping every step diverges."""
    model = plain_network_with_relu
    kernel = SGHMCSplit(
        model,
        step_size=0.003,
        num_steps=50,
        max_grad_norm=max_grad_norm,
        shrink_step_size_on_divergence=False,
        **UNPRECONDITIONED,
    )
    potential, _ = make_potential(model)
    init_params = potential.unravel(5.0 * jax.random.normal(jax.random.key(0), (potential.dim,)))
    mcmc = quietly(kernel, num_warmup=60, num_samples=10)
    fields = ("diverging",)
    mcmc.run(jax.random.key(0), Y, batch_size=50, init_params=init_params, extra_fields=fields)
    values = jax.vmap(lambda w: output(w, X, jax.nn.relu))(mcmc.get_samples())
    error = float(jnp.sqrt(jnp.square(values.mean(0) - Y).mean()))
    diverging = np.asarray(mcmc.get_extra_fields()["diverging"])
    if max_grad_norm is None:
        assert diverging.all()
        assert error > 10.0
    else:
        assert not diverging.any()
        assert error < 0.45
