"""Chains that run in coordinates of their own, put together."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from numpyro_sgmcmc.chain.moments import Sums
from numpyro_sgmcmc.chain.state import SGMCMCState
from numpyro_sgmcmc.posterior.whitening import Whitening

__all__ = ["away_from_first", "coordinates_of_chains", "in_those_of_the_first"]


def coordinates_of_chains(state: SGMCMCState) -> list[Whitening]:
    """Each chain's whitened coordinates, in float64."""
    several = state.adapt_state.whitening._replace(hessian=None)
    several = jax.tree.map(lambda x: np.asarray(x, np.float64), several)
    if not state.i.ndim:
        return [several]
    return [jax.tree.map(lambda x, c=c: x[c], several) for c in range(len(state.i))]


def away_from_first(chains: Sequence[Whitening]) -> np.ndarray:
    """Each chain's anchor less the first one's, shape ``(chains, 1, d)``.

    Draws less these are about one place, modes laid over each other.
    """
    return np.stack([c.anchor - chains[0].anchor for c in chains])[:, None]


def in_those_of_the_first(sums: Sums, chains: Sequence[Whitening]) -> Sums:
    r"""Moments of all chains in the first one's coordinates, as they are where all have the same.

    With :math:`q_0 = Mq + b` gradients become :math:`g_0 = M^{-\top} g`. The stretch is left out:
    moments are kept without it.

    :param sums: leading axes of chains and of batches.
    :param chains: each chain's coordinates; where moments are no matrices, diagonal ones.
    """
    first = chains[0]
    if all(np.array_equal(c.anchor, first.anchor) for c in chains):
        return sums
    moved = [
        _moved(jax.tree.map(lambda x, c=c: x[c], sums), w, first) for c, w in enumerate(chains)
    ]
    return jax.tree.map(lambda *xs: np.stack(xs), *moved)


def _moved(sums: Sums, own: Whitening, to: Whitening) -> Sums:
    """One chain's sums in other coordinates, each batch of them."""
    sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
    weight = sums.weight[:, None]
    away = own.anchor - to.anchor
    if sums.stein.ndim == 2:  # diagonals
        m, b = own.factor / to.factor, away / to.factor
        gradient = sums.gradient / m
        spread = m * m * sums.spread + 2.0 * m * b * sums.position + weight * b * b
        return sums._replace(
            position=m * sums.position + weight * b,
            gradient=gradient,
            stein=sums.stein + b * gradient,
            spread=spread,
        )
    inverse = np.linalg.inv(_matrix(to.factor))
    m, b = inverse @ _matrix(own.factor), inverse @ away
    back = np.linalg.inv(m)
    position, gradient = sums.position @ m.T, sums.gradient @ back
    cross = position[:, :, None] * b
    spread = m @ sums.spread @ m.T + cross + cross.mT + weight[..., None] * np.outer(b, b)
    return sums._replace(
        position=position + weight * b,
        gradient=gradient,
        stein=m @ sums.stein @ back + b[:, None] * gradient[:, None, :],
        spread=spread,
    )


def _matrix(factor: np.ndarray) -> np.ndarray:
    return np.diag(factor) if factor.ndim == 1 else factor
