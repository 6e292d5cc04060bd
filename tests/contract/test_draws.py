"""The NumPyro contract: draws, extra fields and summaries have the format of NUTS."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.util import nested_attrgetter

from numpyro_sgmcmc.sampling.state import SGMCMCState
from tests.contract.conftest import EXTRA_FIELDS
from tests.contract.kernels import (
    BATCH,
    assert_posterior,
    each_kernel,
    one_kernel,
    survey,
    survey_posterior,
)


@each_kernel
@pytest.mark.parametrize("site", ["beta", "rate", "contrast"])
def test_default_run_has_the_exact_posterior(fit_of, kernel_class, site):
    fit = fit_of(kernel_class)
    assert_posterior(fit.draws[site], *survey_posterior(fit.data)[site])


@each_kernel
def test_draws_have_the_shapes_of_nuts(fit_of, kernel_class):
    fit = fit_of(kernel_class)
    shapes = {name: x.shape for name, x in fit.draws.items()}
    assert shapes == {"beta": (2, 300, 2), "contrast": (2, 300), "rate": (2, 300)}
    assert {name: x.shape for name, x in fit.mcmc.get_samples().items()} == {
        "beta": (600, 2),
        "contrast": (600,),
        "rate": (600,),
    }
    assert all(x.dtype == jnp.float32 for x in fit.draws.values())


@one_kernel
def test_chains_start_overdispersed_and_differ(fit_of, kernel_class):
    fit = fit_of(kernel_class)
    a, b = np.asarray(fit.draws["beta"])
    assert not np.isclose(a, b).all(axis=-1).any()
    arguments = (tuple(fit.data), {"batch_size": BATCH})
    keys = jax.random.split(jax.random.key(3), 100)
    positions = np.stack([fit.kernel.init(key, 20, None, *arguments).z["beta"] for key in keys])
    mean, sd = survey_posterior(fit.data)["beta"]
    dispersion = positions.std(0) / sd
    assert (dispersion > 1.5).all(), "R-hat needs over-dispersed initial positions"
    assert (np.abs(positions.mean(0) - mean) < 5 * dispersion * sd / np.sqrt(100)).all()


@each_kernel
def test_deterministic_site_is_computed_from_its_draw(fit_of, kernel_class):
    draws = fit_of(kernel_class).draws
    np.testing.assert_allclose(
        draws["contrast"], draws["beta"][..., 0] - draws["beta"][..., 1], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("field", ["potential_energy", "energy", "accept_prob", "mean_accept_prob"])
def test_extra_field_of_nuts_is_named(field):
    state = SGMCMCState(*range(len(SGMCMCState._fields)))
    with pytest.raises(ValueError, match=f"'{field}'.*Fix: leave it out"):
        nested_attrgetter("num_steps", field)(state)


@each_kernel
def test_extra_fields_have_one_value_per_draw(fit_of, kernel_class):
    fit = fit_of(kernel_class)
    fields = fit.mcmc.get_extra_fields(group_by_chain=True)
    assert set(fields) == {*EXTRA_FIELDS, "diverging"}
    assert fields["adapt_state.step_size"].shape == (2, 300)
    assert (fields["adapt_state.step_size"] > 0).all()
    assert (fields["num_steps"] >= 1).all()
    assert fields["num_steps"].dtype == jnp.int32
    assert fields["diverging"].dtype == jnp.bool_
    assert not fields["diverging"].any()
    np.testing.assert_allclose(np.exp(fields["z.rate"]), fit.draws["rate"], rtol=1e-5)
    matrix = np.asarray(fields["adapt_state.inverse_mass_matrix"]["beta", "rate"])
    assert matrix.shape == (2, 300, 3, 3)
    posterior = survey_posterior(fit.data)
    mean, sd = posterior["rate"]
    expected = np.array([*posterior["beta"][1], sd / mean])  # SD of the log rate
    np.testing.assert_allclose(np.sqrt(np.diagonal(matrix[0, 0])), expected, rtol=0.25)


@each_kernel
def test_summary_lists_sites_and_divergences(fit_of, kernel_class, capsys):
    fit = fit_of(kernel_class)
    fit.mcmc.print_summary()
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("beta[0]", "beta[1]", "rate"))
    assert "contrast" not in printed
    assert "Number of divergences: 0" in printed
    state = jax.tree.map(lambda x: x[0], fit.mcmc.last_state._replace(rng_key=None))
    diagnostics = fit.kernel.get_diagnostics_str(state)
    assert f"{int(state.num_steps)} steps" in diagnostics
    assert f"{float(state.adapt_state.step_size):.2e}" in diagnostics


@one_kernel
def test_kernel_has_the_methods_that_gibbs_calls(fit_of, kernel_class):
    fit = fit_of(kernel_class)
    arguments = (tuple(fit.data), {"batch_size": BATCH})
    state = fit.kernel.init(jax.random.key(0), 10, None, *arguments)
    constrained = fit.kernel.get_constrain_fn(*arguments)(state.z)
    assert set(constrained) == {"beta", "rate"}
    np.testing.assert_allclose(constrained["rate"], np.exp(state.z["rate"]), rtol=1e-5)
    processed = fit.kernel.postprocess_fn(*arguments)(state.z)
    assert set(processed) == {"beta", "rate", "contrast"}

    refreshed = fit.kernel.refresh(state, *arguments)
    jax.tree.map(np.testing.assert_array_equal, refreshed.z, state.z)
    after = jax.jit(lambda state: fit.kernel.sample(state, *arguments))(refreshed)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.z))
    assert not np.array_equal(after.z["beta"], state.z["beta"])

    calls = []

    def wrapper(model):
        calls.append(model)
        return lambda *args, **kwargs: model(*args, **kwargs)

    wrapped = fit.kernel.wrap_model(wrapper)
    assert type(wrapped) is kernel_class
    assert calls == [survey]
    assert wrapped.model != fit.kernel.model
    assert wrapped._sample_fn is None, "NumPyro must initialise the copy"
    assert fit.kernel._sample_fn is not None
