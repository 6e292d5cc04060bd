"""Nothing that is given is looked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC, init_to_value

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation import warmup
from tests.contract.kernels import BATCH, survey, survey_data

GIVEN = {
    "step_size": 0.1,
    "num_steps": 3,
    "gradient_estimator": "minibatch",
    "subsampling": "contiguous",
    "adapt_mass_matrix": False,
}


class LookedFor(Exception):
    pass


@pytest.fixture(autouse=True)
def nothing_is_looked_for(monkeypatch):
    def refuse(*args):
        raise LookedFor

    monkeypatch.setattr(warmup, "locate_main_mode", refuse)


def init(init_params=None, **options):
    kernel = SGHMCSplit(survey, **{**GIVEN, **options})
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = tuple(survey_data()), {"batch_size": BATCH}
    return kernel, kernel.init(keys, 10, init_params, *arguments)


def test_without_a_subsampled_plate_there_is_nothing_to_choose_from():
    given = {k: v for k, v in GIVEN.items() if k not in ("gradient", "minibatch")}

    def start(**options):
        kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2, **options)
        kernel.init(jax.random.key(0), 10, jnp.ones(3), (), {})
        return kernel.adaptation

    assert start(**given).estimator.name == "plain"
    assert start(**given, gradient_estimator="control_variate").estimator.name == "plain"
    with pytest.raises(LookedFor):
        start(**{**given, "num_steps": None})


def test_chains_start_by_the_strategy():
    kernel, state = init()
    positions = np.concatenate([np.reshape(x, (3, -1)) for x in jax.tree.leaves(state.z)], 1)
    assert (np.abs(positions) <= 2.0).all()  # uniform within two of zero, in unconstrained space
    assert positions.std(0).min() > 0.0
    assert kernel.adaptation.step_size == 0.1
    assert kernel.adaptation.num_steps == 3


def test_noise_that_was_not_measured_is_not_said_to_be_none():
    """The report knows how far sds are off, but not why."""
    mcmc = MCMC(
        SGHMCSplit(survey, **{**GIVEN, "step_size": 0.02, "subsampling": "iid"}),
        num_warmup=50,
        num_samples=300,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *survey_data(), batch_size=BATCH)
    report = bias_report(mcmc)
    assert "not measured" in str(report)
    assert "does not explain" not in str(report)
    assert np.isnan(report.noise_sd_inflation)


@pytest.mark.parametrize(
    ("minibatch", "num_steps", "is_apart"),
    [("iid", 40, False), ("blocks", 40, True), ("blocks", 3, False)],
)
def test_moments_cost_little(minibatch, num_steps, is_apart):
    kernel, _ = init(subsampling=minibatch, num_steps=num_steps)
    source = kernel.adaptation.monitor_gradients
    assert (source.estimator is not None) == is_apart
    assert source.every == (20 if is_apart else 1)


def test_a_strategy_that_says_where():
    value = {k: jnp.ones_like(x[0]) for k, x in init()[1].z.items()}
    _, state = init(init_strategy=init_to_value(values=value))
    for x in jax.tree.leaves(state.z):
        np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape))


def test_control_variates_are_anchored_at_the_users_start():
    start = jax.tree.map(jnp.ones_like, init()[1].z)
    kernel, state = init(start, gradient_estimator="control_variate")
    anchor = kernel.adaptation.preconditioner.center
    np.testing.assert_allclose(anchor, 1.0)
    assert np.abs(kernel.adaptation.preconditioner.gradient).max() > 0.0
    np.testing.assert_allclose(jax.tree.leaves(state.z)[0], 1.0, rtol=1e-6)


@pytest.mark.parametrize("missing", [*GIVEN, "init_params"])
def test_what_is_left_out_is_looked_for(missing):
    options = {"gradient_estimator": "control_variate"} if missing == "init_params" else {}
    kept = {k: v for k, v in {**GIVEN, **options}.items() if k != missing}
    kernel = SGHMCSplit(survey, **kept)
    with pytest.raises(LookedFor):
        kernel.init(jax.random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})
