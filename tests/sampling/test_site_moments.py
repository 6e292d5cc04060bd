"""Running moments of sites without draws: exact in float32, in constant memory, after warm-up."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.diagnostics import split_gelman_rubin

from numpyro_sgmcmc.diagnostics.running_moments import _combine_chains, _pool_quantiles
from numpyro_sgmcmc.sampling.options import Options
from numpyro_sgmcmc.sampling.site_moments import (
    QuantileMarkers,
    SiteMoments,
    get_marker_fractions,
)

NUM_WARMUP, NUM_SAMPLES, PROBABILITIES = 20, 3000, (0.1, 0.5, 0.9)
OPTIONS = Options(
    collect_sites=["other"], running_quantiles=PROBABILITIES, running_covariances=["y", "x"]
)


def add_autoregressive(rng_key, offset, is_weighted):
    """Add a stationary sequence with mean 5,000, about ``offset``, and its exponential."""
    shapes = {"x": jnp.zeros(2), "y": jnp.zeros(())}
    empty = SiteMoments.zeros(shapes, OPTIONS, jnp.float32)

    def iterate(carry, i):
        moments, z = carry
        noise = jax.random.normal(jax.random.fold_in(rng_key, i), (3,))
        z = 0.6 * z + 0.8 * noise
        is_sampling = i >= NUM_WARMUP
        x = z[:2] + jnp.array([5000.0, offset])
        values = {"x": jnp.where(is_sampling, x, x + 1000.0), "y": jnp.exp(z[2])}
        weight = jnp.where(is_weighted, (i % 3) / 2.0, 1.0)
        moments = moments.add(values, weight, is_sampling, OPTIONS)
        return (moments, z), (jnp.append(x, values["y"]), weight)

    iterations = jnp.arange(NUM_WARMUP + NUM_SAMPLES)
    (moments, _), (values, weights) = jax.lax.scan(iterate, (empty, jnp.zeros(3)), iterations)
    return moments, values[NUM_WARMUP:], weights[NUM_WARMUP:]


@jax.jit
def add_two_chains(is_weighted):
    keys, offsets = jax.random.split(jax.random.key(0)), jnp.array([0.0, 0.5])
    return jax.vmap(add_autoregressive, (0, 0, None))(keys, offsets, is_weighted)


@cache
def two_chains(is_weighted=False):
    """Return moments and values of two chains with different means of ``x[1]``."""
    moments, values, weights = add_two_chains(is_weighted)
    return moments, np.asarray(values, np.float64), np.asarray(weights, np.float64)


def flatten(by_site):
    """Return the values of all sites along the last axis."""
    return np.concatenate([by_site["x"], by_site["y"][..., None]], -1)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("group_by_chain", [False, True])
def test_moments_equal_those_of_the_values_after_the_warm_up(is_weighted, group_by_chain):
    moments, values, weights = two_chains(is_weighted=is_weighted)
    combined = _combine_chains(moments, OPTIONS, group_by_chain)
    if not group_by_chain:
        values, weights = values.reshape(1, -1, 3), weights.reshape(1, -1)
    share = (weights / weights.sum(1, keepdims=True))[..., None]
    mean = (share * values).sum(1)
    deviations = values - mean[:, None]
    sd = np.sqrt((share * deviations**2).sum(1))
    covariance = np.einsum("cni,cnj->cij", share * deviations, deviations)
    covariance = covariance[:, [2, 0, 1]][:, :, [2, 0, 1]]
    if not group_by_chain:
        mean, sd, covariance = mean[0], sd[0], covariance[0]
    assert (np.abs(flatten(combined.mean) - mean) < 1e-5 * sd).all()
    np.testing.assert_allclose(flatten(combined.sd), sd, rtol=1e-5)
    np.testing.assert_allclose(combined.covariance, covariance, rtol=1e-4, atol=1e-3)


def test_standard_errors_are_those_of_correlated_draws():
    moments, values, _ = two_chains()
    combined = _combine_chains(moments, OPTIONS, group_by_chain=True)
    # An autoregressive sequence of correlation 0.6 has 0.4 / 1.6 as many independent values. The
    # standard error from 16 batches has a relative error of 18%.
    expected = values[..., :2].std(1) * np.sqrt(4 / values.shape[1])
    assert (np.abs(np.log(combined.mcse["x"] / expected)) < 4 * 0.18).all()


def test_r_hat_is_that_of_split_chains():
    moments, values, _ = two_chains()
    combined = _combine_chains(moments, OPTIONS, group_by_chain=False)
    r_hat = flatten(combined.r_hat)
    # The halves of a chain by batches are not exactly halves.
    np.testing.assert_allclose(r_hat, split_gelman_rubin(values), atol=0.005)
    assert r_hat[1] > 1.02, "the chains have different means"


def test_r_hat_shows_a_chain_that_drifts():
    """The halves of one chain differ."""
    empty = SiteMoments.zeros({"x": jnp.zeros(())}, Options(collect_sites=["a"]), jnp.float32)
    x = np.random.default_rng(0).standard_normal(500) + np.linspace(0.0, 3.0, 500)

    @jax.jit
    def add(x):
        def iterate(moments, x):
            added = moments.add({"x": x}, jnp.float32(1.0), True, Options(collect_sites=["a"]))
            return added, None

        return jax.lax.scan(iterate, empty, x)[0]

    moments = jax.tree.map(lambda x: x[None], add(jnp.asarray(x, jnp.float32)))
    r_hat = _combine_chains(moments, Options(collect_sites=["a"]), False).r_hat["x"]
    assert 1.2 < r_hat < split_gelman_rubin(x[None]) + 0.05  # the first half has some of the second


def test_quantiles_are_as_precise_as_those_of_the_draws():
    moments, values, _ = two_chains()
    for group_by_chain in (False, True):
        quantiles = _combine_chains(moments, OPTIONS, group_by_chain).quantiles
        draws = values if group_by_chain else values.reshape(1, -1, 3)
        draws = np.concatenate([draws[..., :2], np.log(draws[..., 2:])], -1)  # normal
        exact = np.quantile(draws, PROBABILITIES, axis=1).swapaxes(0, 1)
        found = flatten({"x": quantiles["x"], "y": np.log(quantiles["y"])})
        # Standard errors of quantiles of a quarter as many independent normal values.
        density = np.array([0.175, 0.399, 0.175])[:, None] / draws.std(1)[:, None]
        p = np.array(PROBABILITIES)[:, None]
        error = np.sqrt(p * (1 - p) / (draws.shape[1] / 4)) / density
        # The markers interpolate the distributions of chains with different means.
        assert (np.abs(found - exact) < 2 * error).all()


def test_quantiles_of_fewer_iterations_than_markers_are_nan():
    markers = QuantileMarkers.zeros(7, (2,), jnp.float32)
    for i in range(6):
        markers = markers.add(jnp.full(2, float(i)), i, get_marker_fractions([0.1, 0.9]))
    assert np.isnan(_pool_quantiles([markers], [0.1, 0.9])).all()
