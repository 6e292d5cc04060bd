"""Mean-field fits that start the warm-up, where their optimum is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.adaptation.budget import WarmupBudget
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.adaptation.variational import fit_mean_field
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.potential import make_function_potential
from tests.adaptation.potentials import random_covariance

pytestmark = pytest.mark.usefixtures("x64")


def rng():
    return np.random.default_rng(0)


def fit(fn, init_positions, num_steps=2_000):
    potential = make_function_potential(fn, jnp.zeros(init_positions.shape[1]))
    inputs = WarmupInputs(potential, Arguments(), None, WarmupBudget(num_vi_steps=num_steps))
    return fit_mean_field(inputs, init_positions)


def test_fit_mean_field_gaussian_has_mean_and_inverse_diagonal_of_precision():
    precision, mode = 10.0 * random_covariance(5), np.arange(5.0)
    fits = fit(
        lambda q: (q - mode) @ jnp.asarray(precision) @ (q - mode) / 2,
        rng().uniform(-2, 2, (3, 5)),
    )
    assert len(fits) == 3
    for mean, sd, _ in fits:  # vocabulary: ok
        np.testing.assert_allclose(sd, np.diagonal(precision) ** -0.5, rtol=0.1)
        assert np.abs((mean - mode) / sd).max() < 0.3


def test_fit_mean_field_funnel_stays_in_the_bulk():
    """Effects of 100 groups, each observed once with noise one, and their scale.

    At the mode the scale is zero with all effects; most of the mass is about its true value 0.9.
    """
    y = 1.3 * rng().standard_normal(100)

    def potential_fn(q):
        log_scale, effects = q[0], q[1:]
        prior = 100 * log_scale + jnp.square(effects / jnp.exp(log_scale)).sum() / 2
        return prior + jnp.square(y - effects).sum() / 2 + log_scale**2 / 2

    for mean, sd, _ in fit(potential_fn, rng().uniform(-2, 2, (4, 101))):
        assert abs(mean[0]) < 0.5
        assert sd.min() > 0.05


def test_fit_mean_field_nan_beyond_support_stays_within():
    """The gradient of a constant NaN is zero, so that the entropy alone would widen the fit."""

    def potential_fn(q):
        return jnp.where(q[0] > 1.5, jnp.nan, q[0] ** 2 / 2)

    for mean, sd, _ in fit(potential_fn, np.zeros((2, 1))):
        assert -1.5 < mean[0] < 1.5
        assert 0.2 < sd[0] < 3.0
