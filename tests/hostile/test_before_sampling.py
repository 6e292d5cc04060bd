"""Bad input raises an error before any step is taken."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGLD, HostArray, SGHMCSplit, ShardedArray
from numpyro_sgmcmc.errors import InitializationError
from tests.contract.kernels import GIVEN
from tests.hostile.regression import N, X, Y, model


def run(kernel, *args, num_chains=1, init_params=None, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=1,
        num_samples=1,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *args, init_params=init_params, **kwargs)


def get_error(make_kernel, *args, exception=ValueError, **kwargs):
    """Return the message of the error that the kernel or its run raises."""
    with pytest.raises(exception) as error:
        run(make_kernel(), *args, **kwargs)
    return str(error.value)


# --- Plates and likelihoods


def test_run_without_indexed_arrays_names_the_plate(no_warm_up):
    message = get_error(lambda: SGHMCSplit(model), X, Y, rows_of=())
    assert "'rows'" in message
    assert "index" in message


def test_run_with_scalar_mean_and_unindexed_data_names_the_site(no_warm_up):
    def flat(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=100):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    message = get_error(lambda: SGHMCSplit(flat), Y)
    assert "'y'" in message
    assert "index" in message


def test_run_with_a_subsampled_array_of_another_length_names_the_plate(no_warm_up):
    def shorter(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 900, subsample_size=100):
            batch = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(mu, 1), obs=batch)

    message = get_error(lambda: SGHMCSplit(shorter), Y)
    assert all(word in message for word in ("rows", "900", "1000"))


def test_run_with_a_column_of_data_and_a_row_of_means_names_the_site(no_warm_up):
    """NumPyro would compare every row with every other."""

    def columns(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(x[i] @ b, 1), obs=y[i])

    message = get_error(lambda: SGHMCSplit(columns), X, np.asarray(Y)[:, None])
    assert "'y'" in message
    assert "(100, 1)" in message


def test_run_with_data_of_another_shape_than_the_likelihood_names_the_site(no_warm_up):
    def wide(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=100) as i:
            mean = jnp.stack([x[i] @ b] * 3)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[:, i])

    message = get_error(lambda: SGHMCSplit(wide), X, np.ones((2, N)))
    assert "'y'" in message
    assert "(2, 100)" in message


def test_run_without_data_of_a_discrete_likelihood_names_the_site(no_warm_up):
    def unobserved(y=None):
        p = numpyro.sample("p", dist.Beta(1, 1))
        with numpyro.plate("rows", 1000, subsample_size=100) as i:
            numpyro.sample("y", dist.Bernoulli(p), obs=None if y is None else y[i])

    assert "'y'" in get_error(lambda: SGHMCSplit(unobserved))


def test_run_with_a_random_likelihood_and_control_variates_names_the_estimator(no_warm_up):
    kernel = SGHMCSplit(model, gradient_estimator="control_variate")
    message = get_error(lambda: kernel, X, Y, key=True)
    assert "prng_key" in message
    assert "gradient_estimator" in message


def test_run_without_a_subsampled_plate_warns():
    with pytest.warns(UserWarning, match=r"no subsampled plate.*subsample_size"):
        run(SGHMCSplit(model, **GIVEN), X, Y, batch=None)


# --- Values


def test_run_with_data_outside_the_support_names_the_site_and_warns_not(no_warm_up):
    def counted(y):
        rate = numpyro.sample("rate", dist.Gamma(1, 1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("visits", dist.Poisson(rate), obs=y[i])

    y = np.full(N, 3)
    y[7] = -1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = get_error(lambda: SGHMCSplit(counted), y)
    assert "'visits' (1 of 1000 values)" in message
    assert not [w for w in caught if "numpyro_sgmcmc" in w.filename]


def test_run_with_a_missing_covariate_names_the_argument(no_warm_up):
    def binary(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("clicked", dist.Bernoulli(logits=x[i] @ b), obs=y[i])

    x = np.array(X)
    x[5, 1] = np.nan
    assert "`x`" in get_error(lambda: SGHMCSplit(binary), x, np.zeros(N))


@pytest.mark.filterwarnings("ignore:Out-of-support values")
def test_run_with_a_missing_value_in_a_late_row_names_the_site():
    """The warm-up evaluates fewer rows at first."""
    n = 50_000
    y = jnp.zeros(n).at[n // 2].set(jnp.nan)
    with pytest.raises(InitializationError) as info:
        run(SGHMCSplit(model), jnp.ones((n, 3)), y)
    assert "site 'y' (1 of 50000 values), argument `y` (1 of 50000 values)." in info.value.problem


def test_run_with_a_nonfinite_factor_names_it(no_warm_up):
    def factored(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.factor("penalty", jnp.log(-1.0 - jnp.square(b).sum()))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(x[i] @ b, 1), obs=y[i])

    assert "'penalty'" in get_error(lambda: SGHMCSplit(factored), X, Y)


def test_run_with_a_zero_standard_deviation_of_a_minibatch_names_it():
    """Some minibatches contain none of the few rows in which a column differs."""

    def standardised(X, y, batch):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            x = (X[i] - X[i].mean(0)) / X[i].std(0)
            numpyro.sample("y", dist.Normal(x @ b, 1), obs=y[i])

    rare = X.at[:, 0].set(jnp.arange(len(X)) < 3)
    with pytest.raises(InitializationError, match="standard deviation"):
        SGHMCSplit(standardised).init(jax.random.key(0), 2, None, (rare, Y, 50), {})


@pytest.mark.parametrize("kind", [jnp.asarray, HostArray, ShardedArray, None])
@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
def test_run_with_a_gradient_that_is_not_finite_names_the_site(kind):
    """Its density is finite, and in all rows but one its gradient."""

    def rooted(x, y, batch):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            mean = a + b[0] + jnp.sqrt(jnp.square(b[1] * x[i]))
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    x = np.array(X[:, 0])
    x[3] = 0.0
    args = (x, Y, None) if kind is None else (kind(x), kind(np.asarray(Y)), 50)
    with pytest.raises(InitializationError, match=r"gradient of site 'b' \(1 of 2\)"):
        SGHMCSplit(rooted).init(jax.random.key(0), 2, None, args, {})


@pytest.mark.slow
def test_init_of_a_perfect_fit_raises_no_linear_algebra_error():
    """The scale converges to zero."""

    def fitted(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(b * x[i], sigma), obs=y[i])

    init_params = {"b": np.float32(0), "sigma": np.float32(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            SGHMCSplit(fitted).init(jax.random.key(0), 10, init_params, (Y, Y), {})
        except np.linalg.LinAlgError as error:
            pytest.fail(f"not an error of this package: {error}")
        except ValueError:
            pass


# --- Initial values


TWO = {"b": np.zeros((2, 3))}


@pytest.mark.parametrize(
    ("init_params", "num_chains", "words"),
    [
        ({"b": np.zeros(4)}, 1, ("'b'", "(4,)", "(3,)")),
        ({"b": np.zeros((2, 3))}, 1, ("'b'", "(2, 3)", "(3,)")),
        ({"b": np.zeros((2, 4))}, 2, ("'b'", "(2, 4)", "(3,)")),
        ({"b": np.array([0.0, np.nan, 0.0])}, 1, ("'b'", "finite")),
        ({"b": np.array([[0.0, 0, 0], [0, np.inf, 0]])}, 2, ("'b'", "finite")),
        ({**TWO, "a": np.zeros(2)}, 2, ("'a'",)),
        ({"c": np.zeros(3)}, 1, ("'b'", "'c'")),
    ],
)
def test_run_with_wrong_init_params_names_the_site(no_warm_up, init_params, num_chains, words):
    message = get_error(
        lambda: SGHMCSplit(model), X, Y, num_chains=num_chains, init_params=init_params
    )
    assert all(word in message for word in ("`init_params`", *words)), message


def scaled(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y[i])


def test_run_with_init_params_of_another_number_of_chains_names_the_site(no_warm_up):
    """NumPyro checks the first site only."""
    init_params = {"mu": np.zeros(2), "sigma": np.zeros(3)}
    message = get_error(lambda: SGHMCSplit(scaled), Y, num_chains=2, init_params=init_params)
    assert "`init_params`" in message
    assert "'sigma'" in message


@pytest.mark.parametrize("log_sigma", [-200.0, 200.0])
def test_run_with_init_params_of_nonfinite_density_names_them(no_warm_up, log_sigma):
    init_params = {"mu": np.float32(0), "sigma": np.float32(log_sigma)}
    assert "init_params" in get_error(lambda: SGHMCSplit(scaled), Y, init_params=init_params)


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
@pytest.mark.parametrize("position", [[np.nan, 0.0], [7.0, 0.0]], ids=["nan", "outside"])
def test_run_with_init_params_of_nonfinite_potential_names_them(no_warm_up, position):
    def potential(z):
        return jnp.sum(jnp.square(z) + 1e-6 * jnp.sqrt(5.0 - z))

    message = get_error(
        lambda: SGHMCSplit(potential_fn=potential), init_params=np.array(position, np.float32)
    )
    assert "init_params" in message


# --- Kernels and schedules


def test_wrap_model_of_a_kernel_without_a_model_raises():
    with pytest.raises(ValueError, match="model"):
        SGLD(potential_fn=lambda z: z**2).wrap_model(lambda model: model)


def test_run_with_a_schedule_that_soon_becomes_negative_raises():
    kernel = SGHMCSplit(model, step_size=lambda i: 0.3 - 0.02 * i, num_steps=50)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=20, progress_bar=False)
    with pytest.raises(ValueError, match="`step_size"):
        mcmc.run(jax.random.key(0), X, Y)


@pytest.mark.slow
def test_run_with_a_schedule_that_becomes_negative_late_diverges_from_there():
    kernel = SGHMCSplit(model, step_size=lambda i: 0.3 - 0.001 * i, num_steps=50)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert mcmc.get_extra_fields()["diverging"][-10:].all()


@pytest.mark.slow
def test_run_with_a_schedule_that_ends_at_zero_has_draws_of_zero_weight():
    """A chain at rest is no divergence."""
    kernel = SGHMCSplit(model, step_size=lambda i: 0.3 * (i < 50), num_steps=5)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y, extra_fields=("weight",))
    fields = mcmc.get_extra_fields()
    assert not fields["diverging"].any()
    np.testing.assert_array_equal(fields["weight"] > 0, np.arange(20) < 10)


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
@pytest.mark.filterwarnings("ignore:The pilot chains of the warm-up had not converged")
def test_run_with_nonfinite_steps_counts_divergences_and_continues(capsys):
    def potential(z):
        return 0.5 * z**2 + 0.0 * jnp.sqrt(1.5 - z)

    kernel = SGHMCSplit(potential_fn=potential)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=500, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=jnp.array(0.0))
    num_divergences = int(np.sum(mcmc.get_extra_fields()["diverging"]))
    draws = np.asarray(mcmc.get_samples())
    assert 0 < num_divergences < 500
    assert np.isfinite(draws).all()
    assert len(np.unique(draws)) > 300
    mcmc.print_summary()
    assert f"Number of divergences: {num_divergences}" in capsys.readouterr().out
