"""Heavy tails and funnel necks are detected from draws, gradients and curvature."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc.diagnostics.geometry import TailTransform, find_funnel_necks

STEP_SIZE = 0.3


@pytest.mark.parametrize(
    ("prior", "is_heavy"),
    [
        (dist.Cauchy(0, 1), True),
        (dist.StudentT(2, 0, 1), True),
        (dist.Normal(3, 0.1), False),
        (dist.Laplace(0, 2), False),
        (dist.Gumbel(0, 1), False),
        (dist.Uniform(0, 1), False),
    ],
)
def test_tail_transform_detects_heavy_tails_only(prior, is_heavy):
    for seed in range(5):
        draws = np.asarray(prior.sample(jax.random.key(seed), (2_000, 1)), np.float64)
        assert len(TailTransform.fit(draws).coordinates) == is_heavy


def test_tail_transform_of_constant_draws_detects_nothing():
    assert not len(TailTransform.fit(np.ones((100, 2))).coordinates)


def test_transformed_gradient_is_that_of_the_transformed_density():
    transform = TailTransform(np.array([1]), np.array([0.5]), np.array([2.0]))
    x = np.array([[0.0, -7.0, 1.0], [0.0, 3.0, 1.0]])

    def transformed_potential(y):
        x, slope = jax.value_and_grad(lambda y: 0.5 + 2.0 * jnp.sinh(y))(y)
        return -dist.Cauchy(0, 1).log_prob(x) - jnp.log(slope)

    g = np.asarray(jax.vmap(jax.grad(lambda x: -dist.Cauchy(0, 1).log_prob(x)))(x[:, 1]))
    expected = jax.vmap(jax.grad(transformed_potential))(transform.transform(x)[:, 0])
    gradient = transform.transform_gradient(x, np.stack([0 * g, g, 0 * g], 1))
    np.testing.assert_allclose(gradient[:, 0], expected, rtol=1e-5)


def funnel_draws(scale, lowest):
    """Return draws of a funnel above ``lowest``, gradients, and curvature at some of them.

    v ~ N(0, scale) and x ~ N(0, e^(v/2)).
    """
    rng = np.random.default_rng(0)
    v = scale * rng.standard_normal(20_000)
    v = v[v > lowest][:4_000]
    x = np.exp(v / 2) * rng.standard_normal(len(v))
    g = np.stack([v / scale**2 + 0.5 - 0.5 * np.square(x) * np.exp(-v), x * np.exp(-v)], 1)
    indices = np.arange(0, len(v), 30)
    return np.stack([v, x], 1), g, indices, STEP_SIZE**2 * np.exp(-v[indices])


def test_funnel_neck_without_draws_is_found():
    """15% of the mass is below -3.1, where the step size is too large."""
    funnel_necks = find_funnel_necks(*funnel_draws(3.0, -2.5))
    assert [(n.coordinate, n.side) for n in funnel_necks] == [(0, "low")]
    assert 0.05 < funnel_necks[0].missed_mass <= 0.25
    assert not funnel_necks[0].is_step_too_large_in_bulk


def test_funnel_that_draws_fill_has_no_funnel_neck():
    assert not find_funnel_necks(*funnel_draws(0.5, -np.inf))


@pytest.mark.parametrize("curvature", ["small step size", "constant", "not finite"])
def test_funnel_neck_needs_a_trend_to_large_curvature(curvature):
    positions, g, indices, scaled_curvature = funnel_draws(3.0, -2.5)
    scaled_curvature = {
        "small step size": 1e-4 * scaled_curvature,
        "constant": np.full_like(scaled_curvature, 0.2),
        "not finite": np.full_like(scaled_curvature, np.nan),
    }[curvature]
    assert not find_funnel_necks(positions, g, indices, scaled_curvature)


def test_step_size_too_large_in_bulk_is_distinguished_from_a_funnel_neck():
    positions, g, indices, curvature = funnel_draws(0.3, -np.inf)
    funnel_necks = find_funnel_necks(positions, g, indices, 3.0 * curvature / np.median(curvature))
    assert [(n.coordinate, n.is_step_too_large_in_bulk) for n in funnel_necks] == [(0, True)]
