"""Chains that run in coordinates of their own, put together."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from numpyro_sgmcmc.chain.moments import RunningSums
from numpyro_sgmcmc.chain.state import SGMCMCState
from numpyro_sgmcmc.posterior.whitening import Preconditioner

__all__ = ["compute_center_offsets", "convert_sums_to_first_chain", "get_chain_preconditioners"]


def get_chain_preconditioners(state: SGMCMCState) -> list[Preconditioner]:
    """Each chain's whitened coordinates, in float64."""
    several = state.adapt_state.preconditioner._replace(reference_hessian=None)
    several = jax.tree.map(lambda x: np.asarray(x, np.float64), several)
    if not state.i.ndim:
        return [several]
    return [jax.tree.map(lambda x, c=c: x[c], several) for c in range(len(state.i))]


def compute_center_offsets(preconditioners: Sequence[Preconditioner]) -> np.ndarray:
    """Each chain's anchor less the first one's, shape ``(chains, 1, d)``.

    Draws less these are about one place, modes laid over each other.
    """
    return np.stack([c.center - preconditioners[0].center for c in preconditioners])[:, None]


def convert_sums_to_first_chain(
    sums: RunningSums, preconditioners: Sequence[Preconditioner]
) -> RunningSums:
    r"""Moments of all chains in the first one's coordinates, as they are where all have the same.

    With :math:`q_0 = Mq + b` gradients become :math:`g_0 = M^{-\top} g`. The stretch is left out:
    moments are kept without it.

    :param sums: leading axes of chains and of batches.
    :param preconditioners: each chain's coordinates; where moments are no matrices, diagonal ones.
    """
    first = preconditioners[0]
    if all(np.array_equal(c.center, first.center) for c in preconditioners):
        return sums
    moved = [
        _change_sums_coordinates(jax.tree.map(lambda x, c=c: x[c], sums), w, first)
        for c, w in enumerate(preconditioners)
    ]
    return jax.tree.map(lambda *xs: np.stack(xs), *moved)


def _change_sums_coordinates(
    sums: RunningSums, source: Preconditioner, destination: Preconditioner
) -> RunningSums:
    """One chain's sums in other coordinates, each batch of them."""
    sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
    weight = sums.weight[:, None]
    away = source.center - destination.center
    if sums.position_gradient.ndim == 2:  # diagonals
        m, b = source.factor / destination.factor, away / destination.factor
        gradient = sums.gradient / m
        spread = m * m * sums.position_position + 2.0 * m * b * sums.position + weight * b * b
        return sums._replace(
            position=m * sums.position + weight * b,
            gradient=gradient,
            position_gradient=sums.position_gradient + b * gradient,
            position_position=spread,
        )
    inverse = np.linalg.inv(_as_matrix(destination.factor))
    m, b = inverse @ _as_matrix(source.factor), inverse @ away
    back = np.linalg.inv(m)
    position, gradient = sums.position @ m.T, sums.gradient @ back
    cross = position[:, :, None] * b
    spread = (
        m @ sums.position_position @ m.T + cross + cross.mT + weight[..., None] * np.outer(b, b)
    )
    return sums._replace(
        position=position + weight * b,
        gradient=gradient,
        position_gradient=m @ sums.position_gradient @ back + b[:, None] * gradient[:, None, :],
        position_position=spread,
    )


def _as_matrix(factor: np.ndarray) -> np.ndarray:
    return np.diag(factor) if factor.ndim == 1 else factor
