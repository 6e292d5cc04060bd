"""The warm-up's budget follows the cost of a gradient."""

from types import SimpleNamespace

import numpy as np
import pytest

from numpyro_sgmcmc.adaptation.budget import HIGH_DIM, WarmupBudget, count_rows_per_gradient
from numpyro_sgmcmc.data.subsampling import Plate


def budget(batch_size=None, dim=10, num_rows=1_000, host_arrays=(), has_prior=True):
    plates = () if batch_size is None else (Plate("rows", num_rows, batch_size),)
    potential = SimpleNamespace(
        dim=dim,
        plates=plates,
        shards=None,
        sample_prior_position=(lambda key, arguments: None) if has_prior else None,
    )
    arguments = SimpleNamespace(arrays=[np.zeros(num_rows)], host_arrays=host_arrays)
    return WarmupBudget.for_potential(potential, arguments)


def test_budget_small_batch_is_default_with_prior_inits():
    assert budget(100) == WarmupBudget(num_prior_inits=12)
    assert budget(100, has_prior=False) == WarmupBudget()


@pytest.mark.parametrize(("num_rows", "num_prior_inits"), [(2_048, 12), (2_049, 0)])
def test_budget_without_plate_depends_on_data_size(num_rows, num_prior_inits):
    assert budget(num_rows=num_rows).num_prior_inits == num_prior_inits


@pytest.mark.parametrize(("dim", "fit_batch_size"), [(200, 512), (201, None)])
def test_budget_large_batch_fits_prior_inits_on_fewer_rows(dim, fit_batch_size):
    found = budget(2_000, dim=dim, num_rows=10_000)
    assert found.prior_fit_batch_size == fit_batch_size
    assert found.num_prior_inits == (12 if fit_batch_size else 0)
    assert found.num_whole_batch_inits == 4


def test_budget_expensive_gradient_has_fewer_steps_and_windows():
    costs = [
        (b.num_vi_steps, len(b.pilot_window_steps))
        for b in (budget(size, num_rows=10**6) for size in (100, 20_000, 500_000))
    ]
    assert costs[0] == (4_000, 6)
    assert costs[2] == (1_000, 2)
    assert costs == sorted(costs, reverse=True)


def test_budget_rows_on_disk_has_two_windows():
    assert len(budget(100, host_arrays=("X",)).pilot_window_steps) == 2


def test_budget_high_dimension_takes_a_few_thousand_gradients():
    assert budget(100, dim=HIGH_DIM + 1).max_gradient_evaluations < 3_000
    assert budget(100).max_gradient_evaluations > 100_000


def test_count_rows_per_gradient_sums_over_plates():
    potential = SimpleNamespace(plates=(Plate("a", 100, 20), Plate("b", 50, 7)))
    arguments = SimpleNamespace(arrays=[np.zeros(()), np.zeros(30)])
    assert count_rows_per_gradient(potential, arguments) == 27
    assert count_rows_per_gradient(SimpleNamespace(plates=()), arguments) == 30
