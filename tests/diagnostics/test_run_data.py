"""What the diagnostics read from a run: draws, convergence, cost."""

import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.diagnostics import effective_sample_size

from numpyro_sgmcmc import (
    SHMC,
    SGHMCSplit,
    bias_report,
    log_likelihood,
    loo,
    posterior_predictive,
    to_arviz,
)
from numpyro_sgmcmc.diagnostics import ess_per_gradient, run_data
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats, RunData
from numpyro_sgmcmc.sampling.bias_monitor import Moments, RunningSums
from tests.contract.kernels import BATCH, quietly, survey
from tests.diagnostics.survey_runs import DATA

# --- The run ------------------------------------------------------------------------------------


def test_run_data_matches_the_run(noisy):
    run = RunData.from_mcmc(noisy, "test")
    samples = noisy.get_samples(group_by_chain=True)
    expected = np.concatenate([samples["beta"], np.log(samples["rate"])[..., None]], -1)
    np.testing.assert_allclose(run.draws, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(run.finite_draws, np.asarray(run.draws, np.float64))
    assert [name for _, name in run.coordinate_names] == ["beta[0]", "beta[1]", "rate"]
    assert (run.num_iterations, run.num_draws) == (4000, 4000)
    assert len(run.preconditioners) == 4
    assert run.step_size == pytest.approx(0.3)
    draw = run.make_constrain_fn()(run.draws[1, 2])
    np.testing.assert_allclose(draw["rate"], samples["rate"][1, 2], rtol=1e-5)


def test_run_data_without_diverging_field_counts_draws(noisy, monkeypatch):
    monkeypatch.setattr(noisy, "get_extra_fields", lambda **_: {})
    run = RunData.from_mcmc(noisy, "test")
    assert (run.num_draws, run.num_divergences) == (4000, 0)
    assert run.max_ess > 1000


def test_divergences_of_a_gibbs_block_do_not_depend_on_its_shortened_steps():
    sums = RunningSums.zeros(2, jnp.float32)._replace(weight=jnp.float32(0.5))
    moments = Moments.zeros(2, jnp.float32)
    for is_valid in (True, False, True, True):
        moments = moments.add(sums, jnp.array(True), jnp.array(is_valid))
    shortened = SimpleNamespace(step_size=jnp.float32(0.02))
    state = SimpleNamespace(moments=moments, weight=0.5, num_steps=5, adapt_state=shortened)
    kernel = SimpleNamespace(has_schedule=False)
    assert run_data._count_block_divergences(kernel, state) == 1


def test_nonfinite_draws_are_replaced_by_the_one_before():
    draws = np.random.default_rng(0).standard_normal((2, 300, 2))
    assert run_data._forward_fill_nonfinite(draws) is draws
    draws[1, 7:9, 1] = -np.inf
    filled = run_data._forward_fill_nonfinite(draws)
    np.testing.assert_array_equal(filled[1, 7:9], draws[1, [6, 6]])
    assert np.isfinite(filled).all()
    draws[0, 50:, 0] = np.nan
    assert run_data._forward_fill_nonfinite(draws) is None


def test_report_of_pickled_kernel_uses_its_sums(default_report, default):
    """Model and data are gone; the running sums are not."""
    kernel = default.sampler
    default.sampler = pickle.loads(pickle.dumps(kernel))
    try:
        report = bias_report(default)
        np.testing.assert_array_equal(report.sd_inflation.value, default_report.sd_inflation.value)
        assert report.num_gradient_draws == 0
        for read_data in (
            lambda: bias_report(default, full_data=True),
            lambda: posterior_predictive(default, jax.random.key(0)),
            lambda: log_likelihood(default),
            lambda: to_arviz(default, log_likelihood=True),
            lambda: loo(default),
        ):
            with pytest.raises(ValueError, match="pickled"):
                read_data()
    finally:
        default.sampler = kernel


def test_draws_that_were_not_kept_are_named():
    kernel = SGHMCSplit(
        survey,
        step_size=1e-3,
        num_steps=4,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        adapt_mass_matrix=False,
    )
    mcmc = quietly(kernel, num_warmup=5, num_samples=50)
    mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH, extra_fields=("~z.rate",))
    assert len(bias_report(mcmc).coordinate_names) == 3
    with pytest.raises(ValueError, match=r"'rate'.*not kept"):
        bias_report(mcmc, full_data=True)


# --- Convergence and cost -----------------------------------------------------------------------


def test_convergence_of_independent_and_dependent_draws():
    draws = np.random.default_rng(0).standard_normal((4, 500, 3))
    draws[..., 1] = draws[:, :1, 1] + 0.3 * draws[..., 1]
    draws[..., 2] = np.repeat(draws[:, ::10, 2], 10, axis=1)
    stats = ConvergenceStats.from_draws(draws)
    assert stats.r_hat[0] < 1.02 < 1.1 < stats.r_hat[1]
    assert stats.ess[2] < 400 < 1500 < stats.ess[0]


def test_convergence_of_few_draws_is_not_estimated():
    draws = np.random.default_rng(0).standard_normal((4, 30, 3))
    assert (ConvergenceStats.from_draws(draws[:, :4]).ess == 16).all()
    assert np.isnan(ConvergenceStats.from_draws(draws).r_hat).all()


def test_ess_is_at_least_one(monkeypatch):
    estimates = np.array([-3e5, 7.0, np.nan])
    monkeypatch.setattr(run_data, "effective_sample_size", lambda x: estimates)
    ess = ConvergenceStats.from_draws(np.zeros((4, 200, 3))).ess
    np.testing.assert_array_equal(ess, [1.0, 7.0, np.nan])


def test_ess_per_gradient_counts_all_gradients(noisy):
    num_steps = int(noisy.last_state.num_steps[0])
    ess_per_gradients = ess_per_gradient(noisy)
    draws = noisy.get_samples(group_by_chain=True)
    assert set(ess_per_gradients) == {"beta", "rate"}
    for site, values in ess_per_gradients.items():
        ess = effective_sample_size(np.asarray(draws[site]))
        np.testing.assert_allclose(values, ess / (4 * 1000 * num_steps))


def test_ess_per_gradient_counts_each_gradient_of_a_step():
    """MT3 takes three gradients per step."""
    kernel = SHMC(
        potential_fn=lambda q: jnp.square(q).sum(), integrator="mt3", step_size=0.5, num_steps=4
    )
    mcmc = quietly(kernel, num_samples=300, thinning=3)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(2))
    ess = effective_sample_size(np.asarray(mcmc.get_samples())[None])
    np.testing.assert_allclose(ess_per_gradient(mcmc)["z"], ess / (300 * 4 * 3))
