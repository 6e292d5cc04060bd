"""Bad input is refused before any step is taken."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMC, SGLD, SGHMCSplit
from tests.hostile.regression import N, X, Y, model


@pytest.fixture
def no_sampling(monkeypatch):
    def sample(self, *args):
        pytest.fail("a step was taken before the error")

    monkeypatch.setattr("numpyro_sgmcmc.sampling.kernel.SGMCMCKernel.sample", sample)


def refusal(kernel_of, *args, num_chains=1, init_params=None, exception=ValueError, **kwargs):
    """The message with which a kernel is refused, at construction or by a run."""
    with pytest.raises(exception) as error:
        MCMC(
            kernel_of(),
            num_warmup=1,
            num_samples=1,
            num_chains=num_chains,
            chain_method="vectorized",
            progress_bar=False,
        ).run(jax.random.key(0), *args, init_params=init_params, **kwargs)
    return str(error.value)


@pytest.mark.parametrize("batch", [0, -1, N + 1])
def test_subsample_size_out_of_range(no_sampling, batch):
    message = refusal(lambda: SGHMCSplit(model), X, Y, batch=batch)
    assert f"subsample_size={batch}" in message
    assert "'rows'" in message


def test_subsample_size_that_is_no_integer(no_sampling):
    message = refusal(lambda: SGHMCSplit(model), X, Y, batch=100.0)
    assert "subsample_size=100.0" in message
    assert "integer" in message


def test_nothing_indexed(no_sampling):
    message = refusal(lambda: SGHMCSplit(model), X, Y, rows_of=())
    assert "'rows'" in message
    assert "index" in message


def test_a_mean_without_columns_and_data_not_indexed(no_sampling):
    def flat(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=100):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    message = refusal(lambda: SGHMCSplit(flat), Y)
    assert "'y'" in message
    assert "index the data" in message


def test_subsampled_array_of_another_length(no_sampling):
    def shorter(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 900, subsample_size=100):
            batch = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(mu, 1), obs=batch)

    message = refusal(lambda: SGHMCSplit(shorter), Y)
    assert all(word in message for word in ("rows", "900", "1000"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gradient_estimator", None),
        ("subsampling", "random"),
        ("integrator", "leapfrog"),
        ("step_size", 0),
        ("step_size", np.nan),
        ("step_size", True),
        ("step_size", lambda i: 0.0),
        ("friction", -1.0),
        ("friction", np.inf),
        ("friction", None),
        ("friction", "high"),
        ("num_steps", -1),
        ("num_steps", True),
        ("target_sd_bias", -0.1),
        ("target_sd_bias", None),
        ("init_strategy", "uniform"),
        ("init_strategy", None),
        ("dense_mass", 2),
        ("dense_mass", ("b", "c")),
        ("inverse_mass_matrix", np.ones((3, 2))),
        ("inverse_mass_matrix", np.array([1.0, np.nan, 1.0])),
        ("inverse_mass_matrix", np.full((3, 3), np.nan)),
        ("inverse_mass_matrix", np.diag([1.0, 1.0, -1.0])),
        ("inverse_mass_matrix", np.eye(3) + np.eye(3, k=1)),
        ("inverse_mass_matrix", {("b",): np.ones(2)}),
    ],
)
def test_option_is_named(no_sampling, option, value):
    message = refusal(lambda: SGHMCSplit(model, **{option: value}), X, Y)
    assert f"`{option}" in message, message
    assert len(message) > len(option) + 20


@pytest.mark.parametrize(
    ("scheduled", "word"),
    [
        (lambda i: 0.3 - 0.02 * i, "`step_size"),
        pytest.param(lambda i: 0.3 - 0.001 * i, None, marks=pytest.mark.slow),
    ],
)
def test_step_size_schedule_that_ends_below_zero(scheduled, word):
    """An error before sampling, or late in a run: every iteration after that diverges."""
    kernel = SGHMCSplit(model, step_size=scheduled, num_steps=50)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=20, progress_bar=False)
    if word is not None:
        with pytest.raises(ValueError, match=word):
            mcmc.run(jax.random.key(0), X, Y)
    else:
        mcmc.run(jax.random.key(0), X, Y)
        assert mcmc.get_extra_fields()["diverging"][-10:].all()


@pytest.mark.slow
def test_step_size_schedule_that_ends_at_zero():
    """The chain rests, which is no divergence, and its draws have no weight."""
    kernel = SGHMCSplit(model, step_size=lambda i: 0.3 * (i < 50), num_steps=5)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y, extra_fields=("weight",))
    fields = mcmc.get_extra_fields()
    assert not fields["diverging"].any()
    np.testing.assert_array_equal(fields["weight"] > 0, np.arange(20) < 10)


TWO = {"b": np.zeros((2, 3))}


@pytest.mark.parametrize(
    ("init_params", "num_chains", "words"),
    [
        ({"b": np.zeros((2, 3))}, 1, ("'b'", "(2, 3)", "(3,)")),
        ({"b": np.zeros((2, 4))}, 2, ("'b'", "(2, 4)", "(3,)")),
        ({"b": np.array([[0.0, 0, 0], [0, np.inf, 0]])}, 2, ("'b'", "not finite")),
        ({**TWO, "a": np.zeros(2)}, 2, ("['a']", "['b']")),
    ],
)
def test_init_params_of_several_chains(no_sampling, init_params, num_chains, words):
    message = refusal(
        lambda: SGHMCSplit(model), X, Y, num_chains=num_chains, init_params=init_params
    )
    assert all(word in message for word in words), message


def scaled(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y[i])


def test_init_params_of_another_number_of_chains(no_sampling):
    """NumPyro itself looks at the first site only."""
    start = {"mu": np.zeros(2), "sigma": np.zeros(3)}
    message = refusal(lambda: SGHMCSplit(scaled), Y, num_chains=2, init_params=start)
    assert "`init_params`" in message
    assert "'sigma'" in message


@pytest.mark.parametrize("log_sigma", [-200.0, 200.0])
def test_init_params_where_the_density_is_not_finite(no_sampling, log_sigma):
    start = {"mu": np.float32(0), "sigma": np.float32(log_sigma)}
    message = refusal(
        lambda: SGHMCSplit(scaled), Y, init_params=start, exception=ValueError
    )
    assert "init_params" in message


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
@pytest.mark.parametrize("start", [[np.nan, 0.0], [7.0, 0.0]], ids=["nan", "outside"])
def test_init_params_where_the_potential_function_is_not_finite(no_sampling, start):
    def potential(z):
        return jnp.sum(jnp.square(z) + 1e-6 * jnp.sqrt(5.0 - z))

    message = refusal(
        lambda: SGHMCSplit(potential_fn=potential),
        init_params=np.array(start, np.float32),
        exception=ValueError,
    )
    assert "init_params" in message


def test_data_outside_the_support_and_no_other_warning(no_sampling):
    def counted(y):
        rate = numpyro.sample("rate", dist.Gamma(1, 1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("visits", dist.Poisson(rate), obs=y[i])

    y = np.full(N, 3)
    y[7] = -1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = refusal(lambda: SGHMCSplit(counted), y, exception=ValueError)
    assert "'visits' (1 of 1000 values)" in message
    assert not [w for w in caught if "numpyro_sgmcmc" in w.filename]


def test_a_column_of_data_beside_a_row_of_means(no_sampling):
    """Every row would be compared with every other, without a word."""

    def columns(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(x[i] @ b, 1), obs=y[i])

    message = refusal(lambda: SGHMCSplit(columns), X, np.asarray(Y)[:, None])
    assert "'y'" in message
    assert "(100, 1)" in message


def test_data_that_do_not_fit_the_likelihood(no_sampling):
    def wide(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=100) as i:
            mean = jnp.stack([x[i] @ b] * 3)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[:, i])

    message = refusal(lambda: SGHMCSplit(wide), X, np.ones((2, N)))
    assert "'y'" in message
    assert "(2, 100)" in message


def test_a_factor_that_is_not_finite_is_named(no_sampling):
    def factored(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.factor("penalty", jnp.log(-1.0 - jnp.square(b).sum()))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(x[i] @ b, 1), obs=y[i])

    message = refusal(lambda: SGHMCSplit(factored), X, Y, exception=ValueError)
    assert "'penalty'" in message


def test_no_data_for_a_discrete_likelihood(no_sampling):
    def unobserved(y=None):
        p = numpyro.sample("p", dist.Beta(1, 1))
        with numpyro.plate("rows", 1000, subsample_size=100) as i:
            numpyro.sample("y", dist.Bernoulli(p), obs=None if y is None else y[i])

    message = refusal(lambda: SGHMCSplit(unobserved))
    assert "'y'" in message
    assert "no data" in message


def binary(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=100) as i:
        numpyro.sample("clicked", dist.Bernoulli(logits=x[i] @ b), obs=y[i])


def test_missing_values_among_the_covariates(no_sampling):
    x = np.array(X)
    x[5, 1] = np.nan
    y = np.zeros(N)
    message = refusal(lambda: SGHMCSplit(binary), x, y, exception=ValueError)
    assert "`x` (1 of its values)" in message


def test_unknown_keyword_names_the_kernel():
    for kernel in (SGHMCSplit, SGHMC, SGLD):
        with pytest.raises(TypeError, match=rf"{kernel.__name__}.*'stepsize'"):
            kernel(model, stepsize=0.1)
    with pytest.raises(TypeError, match="'friction'"):
        SGLD(model, friction=1.0)


def test_a_perfect_fit_is_no_crash():
    """A scale that falls to nothing: NumPy's own errors would say nothing to a user."""

    def fitted(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(b * x[i], sigma), obs=y[i])

    start = {"b": np.float32(0), "sigma": np.float32(0)}
    found = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            SGHMCSplit(fitted).init(jax.random.key(0), 10, start, (Y, Y), {})
        except ValueError as error:
            found = error
    assert not isinstance(found, np.linalg.LinAlgError)


def test_wrap_model_without_a_model():
    with pytest.raises(ValueError, match="model"):
        SGLD(potential_fn=lambda z: z**2).wrap_model(lambda model: model)
