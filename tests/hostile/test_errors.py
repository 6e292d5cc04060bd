"""Bad input: one clear sentence that names the site or argument."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMC, SGLD, SGHMCSplit
from numpyro_sgmcmc.errors import InitializationError
from tests.hostile.regression import X, Y, model


def run(*args, init_params=None, options=None, **kwargs):
    kernel = SGHMCSplit(model, **(options or {}))
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    mcmc.run(jax.random.key(0), *(args or (X, Y)), init_params=init_params, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"discrete": True}, ("'k' is discrete", "Gibbs", "DiscreteGibbs(kernel.model)")),
        ({"batch": 2000}, ("'rows'", "subsample_size=2000", "1000")),
        ({"size": 900}, ("'rows'", "size 900", "`X`", "1000 rows")),
        ({"size": 1100}, ("'rows'", "size 1100", "`X`", "1000 rows")),
        ({"rows_of": ("y",)}, ("'rows'", "index every array of rows", "numpyro.subsample")),
        ({"rows_of": ("X",)}, ("'y'", "1000 rows", "'rows'", "index the data")),
        (
            {"key": True, "options": {"gradient_estimator": "control_variate"}},
            ("prng_key", "minibatch"),
        ),
    ],
)
def test_model_that_cannot_be_sampled(kwargs, words):
    with pytest.raises(ValueError, match="'") as error:
        run(**kwargs)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_array_of_another_length_is_named():
    with pytest.raises(ValueError, match="`y` that it indexes has 500 rows"):
        run(X, Y[:500])


@pytest.mark.parametrize("bad", [(X, Y.at[3].set(jnp.nan)), (X.at[3, 0].set(jnp.nan), Y)])
@pytest.mark.filterwarnings("ignore:Out-of-support values")
def test_missing_values_name_the_site(bad):
    with pytest.raises(InitializationError, match=r"site 'y' \(1 of 1000 values\)"):
        run(*bad)


def test_a_minibatch_s_own_spread_that_is_zero_is_thought_of():
    """Some minibatches hold none of the few rows in which a column differs."""

    def standardised(X, y, batch):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            x = (X[i] - X[i].mean(0)) / X[i].std(0)
            numpyro.sample("y", dist.Normal(x @ b, 1), obs=y[i])

    rare = X.at[:, 0].set(jnp.arange(len(X)) < 3)
    with pytest.raises(InitializationError, match="the minibatch's own rows, such as their standard"):
        SGHMCSplit(standardised).init(jax.random.key(0), 2, None, (rare, Y, 50), {})


@pytest.mark.filterwarnings("ignore:Out-of-support values")
def test_missing_value_beyond_the_first_rows_is_found():
    """One bad row among more than the warm-up looks at first."""
    n = 50_000
    x = jnp.ones((n, 3))
    with pytest.raises(InitializationError, match="site 'y'"):
        run(x, jnp.zeros(n).at[n // 2].set(jnp.nan))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_estimator": "full"}, "`gradient_estimator` is 'full'.*'minibatch'"),
        ({"subsampling": "all"}, "`subsampling` is 'all'.*'contiguous'"),
        ({"integrator": "euler"}, "`integrator` is 'euler'.*'symmetric'"),
        ({"step_size": -1.0}, "`step_size` is -1.0"),
        ({"step_size": "small"}, "`step_size` is 'small'"),
        ({"step_size": lambda i: -1.0}, r"`step_size\(0\)` is -1.0"),
        ({"friction": 0.0}, "`friction` is 0.0"),
        ({"num_steps": 0}, "`num_steps` is 0"),
        ({"num_steps": 1.5}, "`num_steps` is 1.5"),
        ({"target_sd_bias": 0}, "`target_sd_bias` is 0"),
        ({"dense_mass": "yes"}, "`dense_mass` is 'yes'"),
        ({"dense_mass": [("c",)]}, "`dense_mass` names site 'c'.*'b'"),
        ({"inverse_mass_matrix": jnp.ones(4)}, r"shape \(4,\).*3 unconstrained"),
        ({"inverse_mass_matrix": -jnp.ones(3)}, "positive definite"),
        ({"inverse_mass_matrix": {("c",): jnp.ones(3)}}, "names site 'c'"),
        ({"potential_fn": lambda z: 0.0}, "`model`.*`potential_fn`"),
    ],
)
def test_option_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        run(options=options)


@pytest.mark.parametrize("kernel", [SGHMCSplit, SGHMC, SGLD])
def test_neither_model_nor_potential_and_unknown_keyword(kernel):
    with pytest.raises(ValueError, match=r"`model`.*`potential_fn`"):
        kernel()
    with pytest.raises(TypeError, match="'stepsize'"):
        kernel(model, stepsize=0.1)


@pytest.mark.parametrize(
    ("init_params", "words"),
    [
        ({"b": jnp.ones(4)}, r"site 'b' has shape \(4,\).*\(3,\)"),
        ({"c": jnp.ones(3)}, r"unknown sites \['c'\] and lacks the sites \['b'\]"),
        ({"b": jnp.array([0.0, jnp.nan, 0.0])}, "'b' is not finite"),
        (jnp.ones(3), "must be a dict"),
    ],
)
def test_init_params_that_do_not_fit(init_params, words):
    with pytest.raises(ValueError, match=words):
        run(init_params=init_params)


def test_potential_without_init_params():
    mcmc = MCMC(SGLD(potential_fn=lambda z: z**2), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match="`init_params` must be provided"):
        mcmc.run(jax.random.key(0))


def test_no_subsampled_plate_warns():
    with pytest.warns(UserWarning, match="no subsampled plate.*subsample_size"):
        run(batch=None)


def test_nonfinite_steps_are_counted_and_the_chain_goes_on(capsys):
    def potential(z):
        return 0.5 * z**2 + 0.0 * jnp.sqrt(1.5 - z)

    mcmc = MCMC(
        SGHMCSplit(potential_fn=potential), num_warmup=0, num_samples=500, progress_bar=False
    )
    mcmc.run(jax.random.key(0), init_params=jnp.array(0.0))
    diverging = np.asarray(mcmc.get_extra_fields()["diverging"])
    draws = np.asarray(mcmc.get_samples())
    assert 0 < diverging.sum() < 500
    assert np.isfinite(draws).all()
    assert len(np.unique(draws)) > 300
    mcmc.print_summary()
    assert f"Number of divergences: {diverging.sum()}" in capsys.readouterr().out
