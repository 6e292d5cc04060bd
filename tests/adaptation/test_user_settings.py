"""Settings that the user gives are not adapted; a warm-up without anything to adapt is skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC, init_to_value

from numpyro_sgmcmc import SGHMCSplit, bias_report
from tests.contract.kernels import BATCH, survey, survey_data
from tests.hostile.calls import WarmupReached

SETTINGS = {
    "step_size": 0.1,
    "num_steps": 3,
    "gradient_estimator": "minibatch",
    "subsampling": "contiguous",
    "adapt_mass_matrix": False,
}


def init(init_params=None, **options):
    """Return a kernel and its state for three chains."""
    kernel = SGHMCSplit(survey, **{**SETTINGS, **options})
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = tuple(survey_data()), {"batch_size": BATCH}
    return kernel, kernel.init(keys, 10, init_params, *arguments)


def is_adapted(kernel):
    return kernel.adaptation.trace is not None


def test_fully_specified_kernel_starts_by_the_initialisation_strategy():
    kernel, state = init()
    assert not is_adapted(kernel)
    positions = np.concatenate([np.reshape(x, (3, -1)) for x in jax.tree.leaves(state.z)], 1)
    assert (np.abs(positions) <= 2.0).all()  # uniform within two of zero, in unconstrained space
    assert positions.std(0).min() > 0.0
    assert kernel.adaptation.step_size == 0.1
    assert kernel.adaptation.num_steps == 3


def test_fully_specified_kernel_init_to_value_starts_there():
    values = {k: jnp.ones_like(x[0]) for k, x in init()[1].z.items()}
    _, state = init(init_strategy=init_to_value(values=values))
    for x in jax.tree.leaves(state.z):
        np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape))


def test_fully_specified_control_variate_has_its_reference_at_init_params():
    init_params = jax.tree.map(jnp.ones_like, init()[1].z)
    kernel, state = init(init_params, gradient_estimator="control_variate")
    assert not is_adapted(kernel)
    preconditioner = kernel.adaptation.preconditioner
    np.testing.assert_allclose(preconditioner.center, 1.0)
    assert np.abs(preconditioner.reference_gradient).max() > 0.0
    np.testing.assert_allclose(jax.tree.leaves(state.z)[0], 1.0, rtol=1e-6)


@pytest.mark.parametrize("missing", [*SETTINGS, "init_params"])
def test_missing_setting_is_adapted(missing, no_warm_up):
    """A control variate needs a reference: that of ``init_params``, or an adapted one."""
    options = {"gradient_estimator": "control_variate"} if missing == "init_params" else {}
    settings = {**SETTINGS, **options, "step_size": 1e-3}
    kept = {k: v for k, v in settings.items() if k != missing}
    kernel = SGHMCSplit(survey, **kept)
    with pytest.raises(WarmupReached):
        kernel.init(jax.random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})


@pytest.mark.parametrize("estimator", [None, "control_variate"])
def test_potential_function_estimator_and_subsampling_need_not_be_given(estimator):
    options = {k: v for k, v in SETTINGS.items() if k not in ("gradient_estimator", "subsampling")}
    if estimator is not None:
        options["gradient_estimator"] = estimator
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2, **options)
    kernel.init(jax.random.key(0), 10, jnp.ones(3), (), {})
    assert kernel.adaptation.estimator.name == "minibatch"
    assert not is_adapted(kernel)


@pytest.mark.parametrize(
    ("subsampling", "num_steps", "is_separate"),
    [("iid", 40, False), ("contiguous", 40, True), ("contiguous", 3, False)],
)
def test_fully_specified_monitor_gradients_are_cheap(subsampling, num_steps, is_separate):
    kernel, _ = init(subsampling=subsampling, num_steps=num_steps)
    gradients = kernel.adaptation.monitor_gradients
    assert (gradients.estimator is not None) == is_separate
    assert gradients.interval == (20 if is_separate else 1)


def test_fully_specified_report_does_not_know_the_gradient_noise():
    mcmc = MCMC(
        SGHMCSplit(survey, **{**SETTINGS, "step_size": 0.02, "subsampling": "iid"}),
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
