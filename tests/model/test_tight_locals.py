"""Local values that their rows determine tightly move with the globals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.model.local_latents import LocalValues, with_local_values
from numpyro_sgmcmc.model.local_moves import linearise_conditional_modes, sweep_local_values
from tests.contract.kernels import assert_posterior, moments, quietly
from tests.model.hierarchies import NOISE, normal_means
from tests.model.plated import assert_close
from tests.model.test_local_moves import ROWS, make_case
from tests.model.tight_locals import NOISE as TIGHT_NOISE
from tests.model.tight_locals import (
    counts,
    counts_data,
    deaths,
    deaths_data,
    levels,
    lines,
    normal_data,
    normal_posterior,
)


def run(kernel: Any, *data: Any, batch: int = 30, num_samples: int = 300) -> Any:
    mcmc = quietly(
        kernel, num_warmup=50, num_samples=num_samples, num_chains=2, chain_method="vectorized"
    )
    mcmc.run(jax.random.key(0), *data, batch_size=batch)
    return mcmc


# --- Runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def levels_run(optimised):
    return run(SGHMCSplit(levels, collect_local_sites=True), normal_data(levels))


@pytest.mark.slow
def test_draws_of_tight_levels_match_the_posterior(levels_run):
    draws = levels_run.get_samples(group_by_chain=True)["mu"]
    assert_posterior(draws, *normal_posterior(levels, normal_data(levels)))
    assert bias_report(levels_run).is_ok


@pytest.mark.slow
def test_collected_tight_levels_match_their_conditional(levels_run):
    y, draws = normal_data(levels), levels_run.get_samples()
    mu, z = (np.asarray(draws[name], np.float64) for name in ("mu", "z"))
    variance = 1 / (1 + y.shape[1] / TIGHT_NOISE**2)
    mean = variance / TIGHT_NOISE**2 * (y - mu[:, None]).sum(-1)
    u = (z[..., 0] - mean) / np.sqrt(variance)
    assert abs(u.mean()) < 0.1
    assert abs(u.std() - 1) < 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_draws_of_tight_lines_match_the_posterior():
    mcmc = run(SGHMCSplit(lines), normal_data(lines))
    draws = mcmc.get_samples(group_by_chain=True)["mu"]
    assert_posterior(draws, *normal_posterior(lines, normal_data(lines)))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_draws_of_tight_rates_contain_the_truth():
    mcmc = run(SGHMCSplit(counts), *counts_data())
    for name, truth, sd in [
        ("a", 7.0, 0.3 / np.sqrt(120)),
        ("b", -0.5, None),
        ("tau", 0.3, 0.3 / np.sqrt(240)),
    ]:
        found = moments(mcmc.get_samples(group_by_chain=True)[name])
        assert abs(found.mean - truth) < 4 * found.sd
        assert found.mean_error < 0.2 * found.sd
        assert sd is None or abs(found.sd / sd - 1) < 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_draws_of_tight_logits_contain_the_truth():
    y, population, al = deaths_data()
    mcmc = run(SGHMCSplit(deaths), y, population, batch=50)
    draws = mcmc.get_samples(group_by_chain=True)
    found = moments(draws["al"][..., 0, 0])
    assert (np.abs(found.mean - al) < 4 * found.sd).all()
    # That of the mean of all places, and more where deaths are rare.
    assert (found.sd > 0.9 * 0.2 / np.sqrt(300)).all()
    assert (found.sd < 0.02).all()
    assert (found.mean_error < 0.2 * found.sd).all()
    assert abs(np.mean(draws["ss"]) - 0.2) < 0.03
    assert bias_report(mcmc).is_ok


@pytest.mark.slow
def test_tight_levels_move_with_the_globals_in_a_run():
    """A local value moves by the same amount with each of its row's means."""
    y = normal_data(levels)[:40]
    state = SGHMCSplit(levels).init(jax.random.key(0), 1, None, (y,), {"batch_size": 10})
    slope = state.local_state.values.slope
    assert slope.shape == (len(y), 1, y.shape[1])
    np.testing.assert_allclose(slope, -1 / (TIGHT_NOISE**2 + y.shape[1]), rtol=1e-3)


# --- Slopes ---------------------------------------------------------------------------------------


@pytest.fixture
def case(x64):
    return make_case(normal_means)


def with_random_slopes(case: Any) -> LocalValues:
    slope = np.random.default_rng(1).standard_normal((ROWS, 1, case.potential.dim))
    return case.values.with_slope(jnp.asarray(slope), case.theta)


def test_slopes_change_no_value_and_move_local_values_with_the_globals(case):
    values, moved = with_random_slopes(case), case.theta + jnp.array([0.3, -0.2])
    assert_close(values.get_unconstrained(case.theta), case.values.hmc_position)
    z = case.values.hmc_position + values.slope @ (moved - case.theta)
    assert_close(values.get_unconstrained(moved), z)
    arguments = with_local_values(case.arguments, values)
    assert_close(case.potential.full_value(moved, arguments), case.joint(moved, z))
    by_globals, by_locals = case.joint_gradients(moved, z)
    expected = by_globals + (by_locals[..., None] * values.slope).sum((0, 1))
    assert_close(case.potential.full_gradient(moved, arguments), expected)


def test_updates_of_values_with_slopes_are_those_without(case):
    def sweep(values: LocalValues) -> LocalValues:
        state, key = case.state._replace(values=values), jax.random.key(0)
        return sweep_local_values(case.potential, case.theta, state, case.arguments, key, 2)[0]

    after = sweep(with_random_slopes(case))
    assert_close(after.get_unconstrained(case.theta), sweep(case.values).hmc_position)


def test_put_rows_keeps_slopes(case):
    values = with_random_slopes(case)
    rows = jnp.array([2, 7])
    after = values.put(rows, case.values.take(rows))
    assert_close(after.slope, values.slope)
    assert_close(after.hmc_position[rows], case.values.hmc_position[rows])


def test_slopes_are_derivatives_of_the_conditional_modes(case):
    def modes(theta: Any) -> Any:
        """Return the conditional modes of normal means, given ``mu`` and ``log(tau)``."""
        precision = jnp.exp(-2 * theta[1])
        return (precision * theta[0] + case.y / NOISE**2) / (precision + NOISE**-2)

    values = linearise_conditional_modes(case.potential, case.theta, case.values, case.arguments)
    assert_close(values.slope[:, 0], jax.jacobian(modes)(case.theta))
    assert_close(values.get_unconstrained(case.theta), case.values.hmc_position)
