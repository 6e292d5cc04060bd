"""Distances against their definitions, pair by pair, and against SciPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from numpyro_sgmcmc.diagnostics import kolmogorov_distance, stein_discrepancy
from tests.quick import quick_if

RNG = np.random.default_rng(0)
BASE_KERNELS = {
    "imq": lambda x, y: (0.7**2 + jnp.square(x - y).sum()) ** -0.5,
    "gaussian": lambda x, y: jnp.exp(-jnp.square(x - y).sum() / (2 * 0.7**2)),
}


def stein_kernel(x, s, base_kernel):
    """The Stein kernel of all pairs, by automatic differentiation of the base kernel."""

    def pair(x, sx, y, sy):
        dx, dy = jax.grad(base_kernel, 0)(x, y), jax.grad(base_kernel, 1)(x, y)
        trace = jnp.trace(jax.jacfwd(jax.grad(base_kernel, 0), 1)(x, y))
        return sx @ sy * base_kernel(x, y) + sx @ dy + sy @ dx + trace

    over_y = jax.vmap(pair, (None, None, 0, 0))
    return np.asarray(jax.jit(jax.vmap(over_y, (0, 0, None, None)))(x, s, x, s))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("num", "kernel"),
    # The last is more draws than a block holds.
    [quick_if(n < 1100, n, k) for n in (1, 7, 1100) for k in BASE_KERNELS],
)
def test_stein_discrepancy_equals_its_definition(kernel, num):
    x, s = RNG.standard_normal((2, num, 3))
    pairs = stein_kernel(x, s, BASE_KERNELS[kernel])
    discrepancy = stein_discrepancy(x, s, kernel=kernel, length=0.7)
    assert discrepancy == pytest.approx(np.sqrt(pairs.mean()), rel=1e-9)
    if num > 1:
        u_statistic = (pairs.sum() - np.trace(pairs)) / (num * (num - 1))
        unbiased = stein_discrepancy(x, s, kernel=kernel, length=0.7, unbiased=True)
        assert unbiased == pytest.approx(u_statistic, rel=1e-9)


@pytest.mark.slow
def test_stein_discrepancy_is_larger_for_biased_draws():
    x = RNG.standard_normal((10_000, 2))
    exact = stein_discrepancy(x, -x)
    wide = stein_discrepancy(1.1 * x, -1.1 * x)
    shifted = stein_discrepancy(x + 0.1, -x - 0.1)
    assert exact < 0.03
    assert wide > 2 * exact
    assert shifted > 2 * exact
    noisy_scores = -1.1 * x + RNG.standard_normal(x.shape)
    unbiased = stein_discrepancy(1.1 * x, noisy_scores, unbiased=True)
    assert unbiased == pytest.approx(wide**2, abs=0.4 * wide**2)


def test_kolmogorov_distance_is_scipys():
    draws, reference = RNG.standard_normal((301, 4)), 1.2 * RNG.standard_normal((400, 4))
    result = kolmogorov_distance(draws, reference)
    for k in range(4):
        expected = scipy.stats.ks_2samp(draws[:, k], reference[:, k]).statistic
        assert result.distance[k] == pytest.approx(expected)
        halves = scipy.stats.ks_2samp(reference[:200, k], reference[200:, k]).statistic
        assert result.self_distance[k] == pytest.approx(halves)
    assert kolmogorov_distance(draws[:, 0], reference[:, 0]).distance.shape == ()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: stein_discrepancy(np.ones((3, 2)), np.ones((3, 1))), "`draws`.*`scores`"),
        (lambda: stein_discrepancy(np.ones(3), np.ones(3)), "`draws`.*`scores`"),
        (lambda: stein_discrepancy(np.full((3, 2), np.nan), np.ones((3, 2))), "`draws`.*finite"),
        (lambda: stein_discrepancy(np.ones((3, 2)), np.full((3, 2), np.inf)), "`scores`.*finite"),
        (lambda: stein_discrepancy(np.ones((3, 2)), np.ones((3, 2)), kernel="rbf"), "`kernel`"),
        (lambda: stein_discrepancy(np.ones((3, 2)), np.ones((3, 2)), length=0), "`length`"),
        (lambda: stein_discrepancy(np.ones((1, 2)), np.ones((1, 2)), unbiased=True), "`unbiased"),
        (lambda: kolmogorov_distance(np.ones((3, 2)), np.ones((3, 1))), "`draws`.*`reference`"),
        (
            lambda: kolmogorov_distance(np.ones((3, 2)), np.full((3, 2), np.nan)),
            "`reference`.*finite",
        ),
    ],
)
def test_distances_of_invalid_arguments_raise(call, match):
    with pytest.raises(ValueError, match=match):
        call()
