"""Pilot chains sample the posterior, whatever fits into memory."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.adaptation.pilot import (
    PilotResult,
    WindowStatus,
    compute_r_hat,
    run_pilot,
    run_windows,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.gradient_estimators import MinibatchGradient
from numpyro_sgmcmc.model.potential import make_function_potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import ProgressReporter

DIM, NUM_CHAINS = 60, 16


class RecordingReporter(ProgressReporter):
    def __init__(self):
        self.amounts = []

    def advance(self, work):
        self.amounts.append(work)


@pytest.mark.parametrize(("max_normals", "steps_per_call"), [(2**25, 100), (20_000, 20), (1, 5)])
def test_run_pilot_limited_normals_per_call_samples_standard_normal(max_normals, steps_per_call):
    potential = make_function_potential(lambda z: 0.5 * z @ z, jnp.zeros(DIM))
    preconditioner = Preconditioner(np.zeros(DIM), np.ones(DIM), np.zeros(DIM))
    rng, progress = np.random.default_rng(0), RecordingReporter()
    draws = run_pilot(
        potential,
        Arguments(),
        preconditioner.cast(potential.dtype),
        rng.standard_normal((NUM_CHAINS, DIM)),
        0.3,
        400,
        rng,
        MinibatchGradient(),
        progress,
        max_normals,
    )
    assert draws.shape == (NUM_CHAINS, 40, DIM)
    # A step takes the gradient of each chain, and that of the reference position.
    assert progress.amounts == [steps_per_call * (NUM_CHAINS + 1)] * (400 // steps_per_call)
    # Draws are a time of 1.5 apart, so that some 12,000 are independent: four standard errors.
    assert abs(draws.var() - 1) < 0.05
    assert abs(draws.mean()) < 0.05


def test_r_hat_matches_ratio_of_variances():
    means = np.array([[0.0, 1.0], [0.0, 3.0]])
    np.testing.assert_allclose(compute_r_hat(means, np.array([1.0, 4.0])), [1.0, 1.5**0.5])


@pytest.mark.parametrize(
    ("statuses", "step_divisors", "scale"),
    [
        ("FINISHED", [1.0], 1.0),
        ("CONTINUE CONTINUE FINISHED", [1.0, 1.0, 1.0], 1.0),
        ("CHAINS_LOST NONFINITE CONTINUE FINISHED", [1.0, 4.0, 8.0, 8.0], 0.5),
        ("CHAINS_LOST CHAINS_LOST CHAINS_LOST CHAINS_LOST", [1.0, 4.0, 16.0, 64.0], 1 / 16),
    ],
)
def test_run_windows_failed_windows_have_shorter_steps_after_them(statuses, step_divisors, scale):
    """Lost chains also restart nearer to the center."""
    remaining, used = [WindowStatus[name] for name in statuses.split()], []

    def run_window(pilot, step_divisor, window):
        assert window == len(used)
        used.append(step_divisor)
        return pilot, remaining.pop(0)

    pilot = PilotResult(Preconditioner(np.zeros(2), np.ones(2)), np.ones((4, 2)))
    result = run_windows(run_window, pilot, num_windows=4)
    assert used == step_divisors
    np.testing.assert_array_equal(result.q, np.full((4, 2), scale))
    np.testing.assert_array_equal(pilot.q, 1.0)  # the argument is not changed
    assert not result.is_converged
