"""Moments of chains in coordinates of their own are those in one chain's."""

import jax
import numpy as np
import pytest

from numpyro_sgmcmc.diagnostics.run_data import compute_center_offsets, convert_sums_to_first_chain
from numpyro_sgmcmc.model.preconditioner import LowRankFactor, Preconditioner, stack_preconditioners
from numpyro_sgmcmc.sampling.bias_monitor import RunningSums

DIM, BATCHES, READINGS = 3, 4, 50
RNG = np.random.default_rng(0)


def whitening(is_dense):
    factor = 0.5 + RNG.random(DIM)
    if is_dense:
        factor = np.diag(factor) + 0.3 * np.tril(RNG.standard_normal((DIM, DIM)), -1)
    return Preconditioner(5.0 * RNG.standard_normal(DIM), factor, RNG.standard_normal(DIM))


def sums_of(positions, gradients, whitening, is_full):
    """Of each batch, straight from the definition."""
    found = []
    for theta, slope in zip(positions, gradients, strict=True):
        q, g = whitening.solve(theta - whitening.center), whitening.apply_transpose(slope)
        stein, spread = q.T @ g, q.T @ q
        if not is_full:
            stein, spread = np.diagonal(stein), np.diagonal(spread)
        found.append(RunningSums(float(len(q)), q.sum(0), g.sum(0), stein, spread, 0.0))
    return jax.tree.map(lambda *xs: np.stack(xs), *found)


@pytest.mark.parametrize(
    ("is_full", "is_dense"), [(True, True), (True, False), (False, False)], ids=str
)
def test_moments_are_those_in_the_first_chains_coordinates(is_full, is_dense):
    chains = [whitening(is_dense) for _ in range(3)]
    positions = RNG.standard_normal((3, BATCHES, READINGS, DIM))
    gradients = RNG.standard_normal((3, BATCHES, READINGS, DIM))
    both = []
    for coordinates in (chains, [chains[0]] * 3):
        each = zip(positions, gradients, coordinates, strict=True)
        each = [sums_of(*one, is_full) for one in each]
        both.append(jax.tree.map(lambda *xs: np.stack(xs), *each))
    moved = convert_sums_to_first_chain(both[0], chains)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), moved, both[1])


def test_draws_less_the_way_between_anchors_lie_about_the_first():
    chains = [whitening(False), whitening(False)]
    away = compute_center_offsets(chains)
    anchors = np.stack([c.center for c in chains])[:, None]
    np.testing.assert_allclose(anchors - away, np.broadcast_to(chains[0].center, (2, 1, DIM)))


def test_coordinates_with_other_numbers_of_directions_go_together():
    direction = np.linalg.qr(RNG.standard_normal((DIM, 2)))[0]
    several = [
        whitening(False)._replace(low_rank=LowRankFactor(direction, np.array([3.0, 0.5]))),
        whitening(False)._replace(low_rank=LowRankFactor(direction[:, :1], np.array([2.0]))),
        whitening(False),
    ]
    together = stack_preconditioners([w.cast(np.float32) for w in several])
    q = RNG.standard_normal((5, DIM))
    for k, own in enumerate(several):
        one = jax.tree.map(lambda x, k=k: np.asarray(x[k], float), together)
        np.testing.assert_allclose(one.position(q), own.position(q), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            one.apply_transpose(q), own.apply_transpose(q), rtol=1e-5, atol=1e-5
        )
