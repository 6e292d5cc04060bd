"""Pilot chains sample the posterior, whatever fits into memory."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.adaptation import pilot
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.gradient_estimators import MinibatchGradient
from numpyro_sgmcmc.model.potential import make_function_potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import ProgressReporter


@pytest.mark.parametrize("max_normals", [pilot._MAX_NORMALS_PER_CALL, 20_000, 1])
def test_run_pilot_limited_normals_per_call_samples_standard_normal(monkeypatch, max_normals):
    """A hundred steps per call, ten, and five: the number of draws is the same."""
    monkeypatch.setattr(pilot, "_MAX_NORMALS_PER_CALL", max_normals)
    dim, num_chains = 60, 16
    potential = make_function_potential(lambda z: 0.5 * z @ z, jnp.zeros(dim))
    preconditioner = Preconditioner(np.zeros(dim), np.ones(dim), np.zeros(dim))
    rng, shapes = np.random.default_rng(0), []
    run_steps = pilot._run_pilot_steps

    def recorded(*args):
        shapes.append(args[6][1].shape)
        return run_steps(*args)

    monkeypatch.setattr(pilot, "_run_pilot_steps", recorded)
    draws = pilot.run_pilot(
        potential,
        Arguments(),
        preconditioner.cast(potential.dtype),
        rng.standard_normal((num_chains, dim)),
        0.3,
        400,
        rng,
        MinibatchGradient(),
        ProgressReporter(),
    )
    assert draws.shape == (num_chains, 40, dim)
    assert sum(shape[0] for shape in shapes) == 400
    assert max(np.prod(shape) for shape in shapes) <= max(max_normals, num_chains * 5 * dim * 2)
    # Draws are a time of 1.5 apart, so that some 12,000 are independent: four standard errors.
    assert abs(draws.var() - 1) < 0.05
    assert abs(draws.mean()) < 0.05
