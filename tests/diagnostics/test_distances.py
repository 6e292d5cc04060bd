"""Distances against their definitions, written out pair by pair, and against SciPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from numpyro_sgmcmc.diagnostics import kolmogorov_distance, stein_discrepancy
from tests.quick import quick_if

RNG = np.random.default_rng(0)


def by_definition(x, s, fn):
    """The Stein kernel from autodiff of the base kernel, for all pairs."""

    def pair(x, sx, y, sy):
        slope_x, slope_y = jax.grad(fn, 0)(x, y), jax.grad(fn, 1)(x, y)
        bend = jnp.trace(jax.jacfwd(jax.grad(fn, 0), 1)(x, y))
        return sx @ sy * fn(x, y) + sx @ slope_y + sy @ slope_x + bend

    over_y = jax.vmap(pair, (None, None, 0, 0))
    return np.asarray(jax.vmap(over_y, (0, 0, None, None))(x, s, x, s))


BASE = {
    "imq": lambda x, y: (0.7**2 + jnp.square(x - y).sum()) ** -0.5,
    "gaussian": lambda x, y: jnp.exp(-jnp.square(x - y).sum() / (2 * 0.7**2)),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("num", "kernel"),
    [quick_if(n < 1100, n, k) for n in (1, 7, 1100) for k in BASE],
)
def test_stein_discrepancy_is_its_definition(kernel, num):
    x, s = RNG.standard_normal((2, num, 3))
    pairs = by_definition(jnp.asarray(x[:60]), jnp.asarray(s[:60]), BASE[kernel])
    if num <= 60:
        found = stein_discrepancy(x, s, kernel=kernel, length=0.7)
        assert found == pytest.approx(np.sqrt(pairs.mean()), rel=1e-9)
        if num > 1:
            off = pairs.sum() - np.trace(pairs)
            found = stein_discrepancy(x, s, kernel=kernel, length=0.7, unbiased=True)
            assert found == pytest.approx(off / (num * (num - 1)), rel=1e-9)
        return
    # More draws than a chunk holds: the same as in pieces by hand.
    ones = np.ones(num)
    pairs = by_definition(jnp.asarray(x), jnp.asarray(s), BASE[kernel])
    found = stein_discrepancy(x, s, kernel=kernel, length=0.7)
    assert found == pytest.approx(np.sqrt(ones @ pairs @ ones) / num, rel=1e-9)


@pytest.mark.slow
def test_stein_discrepancy_tells_a_wide_sample_from_a_right_one():
    x = RNG.standard_normal((10_000, 2))
    right = stein_discrepancy(x, -x)
    wide = stein_discrepancy(1.1 * x, -1.1 * x)
    shifted = stein_discrepancy(x + 0.1, -x - 0.1)
    assert right < 0.03
    assert wide > 2 * right
    assert shifted > 2 * right
    noisy = -1.1 * x + RNG.standard_normal(x.shape)
    found = stein_discrepancy(1.1 * x, noisy, unbiased=True)
    assert found == pytest.approx(wide**2, abs=0.4 * wide**2)


def test_kolmogorov_distance_is_scipys():
    draws, reference = RNG.standard_normal((301, 4)), 1.2 * RNG.standard_normal((400, 4))
    found = kolmogorov_distance(draws, reference)
    for k in range(4):
        expected = scipy.stats.ks_2samp(draws[:, k], reference[:, k]).statistic
        assert found.distance[k] == pytest.approx(expected)
        halves = scipy.stats.ks_2samp(reference[:200, k], reference[200:, k]).statistic
        assert found.self_distance[k] == pytest.approx(halves)
    assert kolmogorov_distance(draws[:, 0], reference[:, 0]).distance.shape == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stein_discrepancy(np.ones((3, 2)), np.ones((3, 1))), "one shape"),
        (lambda: stein_discrepancy(np.ones(3), np.ones(3)), "one shape"),
        (lambda: stein_discrepancy(np.full((3, 2), np.nan), np.ones((3, 2))), "`draws` are not"),
        (lambda: stein_discrepancy(np.ones((3, 2)), np.full((3, 2), np.inf)), "`scores` are not"),
        (lambda: stein_discrepancy(np.ones((3, 2)), np.ones((3, 2)), kernel="rbf"), "`kernel`"),
        (lambda: stein_discrepancy(np.ones((3, 2)), np.ones((3, 2)), length=0), "`length`"),
        (lambda: stein_discrepancy(np.ones((1, 2)), np.ones((1, 2)), unbiased=True), "two draws"),
        (lambda: kolmogorov_distance(np.ones((3, 2)), np.ones((3, 1))), "same other axes"),
        (lambda: kolmogorov_distance(np.ones((3, 2)), np.full((3, 2), np.nan)), "`reference` are"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
