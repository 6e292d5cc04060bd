"""Running means and variances against NumPy's."""

import jax
import numpy as np

from numpyro_sgmcmc.checkpoint.running_moments import RunningMoments


def test_running_moments_do_not_depend_on_segments():
    rng = np.random.default_rng(0)
    draws = {"a": rng.normal(3, 2, (2, 20, 3)).astype(np.float32)}
    weights = rng.integers(0, 3, (2, 20)).astype(float)
    once = RunningMoments.zeros(draws).add(draws, weights)
    pieces = RunningMoments.zeros(draws)
    for part in (slice(0, 1), slice(1, 7), slice(7, 7), slice(7, 20)):
        pieces = pieces.add({"a": draws["a"][:, part]}, weights[:, part])
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b)
    mean, variance = once.mean_and_variance(group_by_chain=False)
    x, w = np.float64(draws["a"]).reshape(40, 3), weights.ravel()
    np.testing.assert_allclose(mean["a"], np.average(x, 0, w))
    np.testing.assert_allclose(variance["a"], np.average((x - mean["a"]) ** 2, 0, w))
