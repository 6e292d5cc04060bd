"""R-hat and effective draws, of chains that are lost as well."""

import numpy as np
import pytest

from numpyro_sgmcmc.diagnostics import run_data
from numpyro_sgmcmc.diagnostics.diagnosis import format_r_hat
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats
from numpyro_sgmcmc.diagnostics.stein_estimates import compute_between_chain_r_hat

DRAWS = np.random.default_rng(0).standard_normal((4, 200, 3))


def test_independent_draws():
    found = ConvergenceStats.from_draws(DRAWS)
    assert (found.r_hat < 1.02).all()
    assert (found.ess > 500).all()


def test_no_number_of_effective_draws_is_below_one(monkeypatch):
    theirs = np.array([-3e5, 7.0, np.nan])
    monkeypatch.setattr(run_data, "effective_sample_size", lambda x: theirs)
    np.testing.assert_array_equal(ConvergenceStats.from_draws(DRAWS).ess, [1.0, 7.0, np.nan])


@pytest.mark.parametrize(
    ("r_hat", "expected"),
    [(1.004, "1.00"), (99.0, "99.00"), (7.9e20, ">100"), (np.inf, ">100"), (np.nan, "-")],
)
def test_what_is_shown(r_hat, expected):
    assert format_r_hat(r_hat) == expected


def test_chains_that_stand_apart_where_they_are_disagree_beyond_all_bounds():
    """Their variances are rounding, of either sign."""
    place = np.array([1e6, 2e6])
    spread = 10 * (place**2 * (1 - 1e-12))[:, None]
    zeros = np.zeros((2, 1))
    found = compute_between_chain_r_hat(
        (np.full(2, 10.0), 10 * place[:, None], zeros, zeros, spread, zeros), np.ones(1)
    )
    assert found[0] > 100
