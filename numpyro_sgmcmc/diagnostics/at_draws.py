"""A run's draws looked at again, with gradients taken there.

In a stationary chain the kicks cancel: their mean is zero whatever the bias, so that moments made
of the gradients that moved the chain are blind to much. Gradients taken where the draws are, on
rows that no step has seen, are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import IID
from numpyro_sgmcmc.diagnostics.coordinates import coordinates_of_chains
from numpyro_sgmcmc.diagnostics.runs import unconstrained_draws
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.warmup.effort import MANY_DIM, rows_a_gradient
from numpyro_sgmcmc.warmup.noise import draw_rows
from numpyro_sgmcmc.warmup.row_gradients import RowGradients, WeightedRows, minibatches_of

__all__ = ["LookedAt", "draws_of", "look_at"]

_NUMBERS = 2**27  # in all draws together, at most
_MOST_FINE = 0.99  # of the draws
_MOST_DRAWS, _FEWEST_DRAWS = 1_024, 64
_ROWS, _PAIRS = 2**24, 2**15  # rows, and minibatches, at which gradients are taken, at most
_CURVED_DRAWS, _CURVED_ROUNDS, _CURVED_LENGTH = 128, 3, 0.01


class LookedAt(NamedTuple):
    """
    - **positions** - draws, by chain and in their order, shape ``(chains, n, d)``.
    - **gradients** - estimates of the potential's gradient there, unbiased and independent of
      each other given the draws.
    - **curved** - draws, of all chains one after the other, whose curvature is known; ``(k,)``.
    - **curvature** - there, the largest whitened one, shape ``(k,)``.
    """

    positions: np.ndarray
    gradients: np.ndarray
    curved: np.ndarray
    curvature: np.ndarray

    @classmethod
    def of(cls, positions: Any, gradients: Any) -> LookedAt:
        """Without curvature.

        :param positions: shape ``(chains, n, d)``.
        :param gradients: as many numbers.
        """
        at, found = (
            np.asarray(x, np.float64).reshape(positions.shape) for x in (positions, gradients)
        )
        return cls(at, found, np.zeros(0, int), np.zeros(0))

    def moved(self, away: np.ndarray) -> LookedAt:
        """With each chain's positions less this, shape ``(chains, 1, d)``."""
        return self._replace(positions=self.positions - away)


def draws_of(mcmc: MCMC, kernel: SGMCMCKernel) -> np.ndarray | None:
    """All draws as flat unconstrained positions, ``(chains, draws, d)``; float64.

    :return: None where they were not kept, are too many to be gone through again, or are not
        draws of one posterior.
    """
    chains = mcmc.num_chains
    num = int(np.size(mcmc.get_extra_fields().get("diverging", 0)))
    dim = sum(np.size(x) for x in jax.tree.leaves(mcmc.last_state.z)) // chains
    if not kernel.has_data or kernel.has_schedule or num * dim > _NUMBERS:
        return None
    try:
        found = np.asarray(unconstrained_draws(mcmc, kernel), np.float64)
    except (Refusal, RuntimeError):  # sites, or all draws, that were not kept
        return None
    return _held_over(found)


def _held_over(draws: np.ndarray) -> np.ndarray | None:
    """Draws at the very edge of a support, of which float32 knows no place, as those before them.

    :param draws: shape ``(chains, draws, d)``.
    :return: None where they are more than a few.
    """
    fine = np.isfinite(draws).all(-1)
    if fine.all():
        return draws
    if fine.mean() < _MOST_FINE or not fine[:, 0].all():
        return None
    places = np.where(fine, np.arange(draws.shape[1]), 0)
    places = np.maximum.accumulate(places, axis=1)
    return np.take_along_axis(draws, places[..., None], axis=1)


def look_at(mcmc: MCMC, kernel: SGMCMCKernel, draws: np.ndarray) -> LookedAt | None:
    """Gradients at some of the draws on some of the rows.

    :param draws: all of them, shape ``(chains, draws, d)``.
    :return: None where there is no cheap way: for rows elsewhere than in memory, a randomised
        likelihood, and very many parameters.
    """
    target, arguments = kernel.target, Arguments(mcmc._args, mcmc._kwargs)
    elsewhere = arguments.hosts or arguments.sharded
    if elsewhere or target.is_randomized or target.dim > MANY_DIM:
        return None
    adaptation = kernel.adaptation_to(arguments)
    decisive = () if adaptation is None else adaptation.decisive
    rows = RowGradients(target, arguments, decisive=decisive)
    coordinates = coordinates_of_chains(mcmc.last_state)
    batch = rows_a_gradient(target, rows.arguments)
    num = int(np.clip(_ROWS // (2 * batch), _FEWEST_DRAWS, _MOST_DRAWS))
    positions = _evenly(draws, num)
    flat = positions.reshape(-1, target.dim)
    of_chain = np.repeat(np.arange(len(positions)), positions.shape[1])
    gradients = _gradients(rows, coordinates, flat, of_chain).reshape(positions.shape)
    curved = np.unique(np.linspace(0, len(flat) - 1, _CURVED_DRAWS).astype(int))
    start = gradients.reshape(flat.shape)[curved]
    curvature = np.zeros(len(curved))
    for alike in _alike(coordinates):
        some = np.isin(of_chain[curved], alike)
        there = coordinates[alike[0]]
        curvature[some] = _largest_curvature(rows, there, flat[curved][some], start[some])
    return LookedAt(positions, gradients, curved, curvature)


def _evenly(draws: np.ndarray, num: int) -> np.ndarray:
    """About so many of the draws, as many of each chain.

    :param draws: shape ``(chains, draws, d)``.
    """
    each = min(draws.shape[1], max(2, num // len(draws)))
    return draws[:, np.linspace(0, draws.shape[1] - 1, each).astype(int)]


def _alike(coordinates: Sequence[Whitening]) -> list[list[int]]:
    """The chains that run in the same coordinates."""
    by_anchor: dict[bytes, list[int]] = {}
    for chain, whitening in enumerate(coordinates):
        by_anchor.setdefault(whitening.anchor.tobytes(), []).append(chain)
    return list(by_anchor.values())


def _gradients(
    rows: RowGradients,
    coordinates: Sequence[Whitening],
    positions: np.ndarray,
    of_chain: np.ndarray,
) -> np.ndarray:
    """Unbiased gradients by control variates, each on rows of its own; exact where rows are few.

    :param coordinates: of each chain.
    :param positions: shape ``(n, d)``.
    :param of_chain: the chain of each.
    """
    target = rows.target
    batch = sum(p.subsample_size for p in target.plates)
    if not batch:
        return rows.on_some(positions)[1]
    num = len(positions)
    most = min(_PAIRS, _NUMBERS // target.dim, _ROWS // batch)
    each = max(1, most // (2 * num))
    all_rows = list(minibatches_of(rows.groups)) if _passes(rows) <= 2 * each else []
    if all_rows:
        return rows.mean(positions, all_rows)[1]
    rng = np.random.default_rng(0)
    drawn = draw_rows(rows.step_target, rng, (num * each,), IID())
    # At each draw and, with the same rows, at the anchor.
    both = np.concatenate([positions, [w.anchor for w in coordinates]])
    of, is_anchor = np.divmod(np.arange(2 * num * each), 2)
    draw, sign = of // each, 1 - 2 * is_anchor
    at = np.where(is_anchor, num + of_chain[draw], draw)
    found = _at_anchors(rows, coordinates)[of_chain]
    for part, _, gradients in rows.of_steps(both, drawn, at, of):
        np.add.at(found, draw[part], sign[part, None] / each * gradients)
    return found


def _at_anchors(rows: RowGradients, coordinates: Sequence[Whitening]) -> np.ndarray:
    """The gradient on all rows at each chain's anchor, shape ``(chains, d)``."""
    found = np.stack([w.gradient for w in coordinates])
    for alike in _alike(coordinates):
        if not found[alike[0]].any():  # nobody has asked for it
            found[alike] = rows.everywhere(coordinates[alike[0]].anchor)
    return found


def _passes(rows: RowGradients) -> int:
    """Minibatches in a pass over all rows, about."""
    return sum(p.per_epoch for p in rows.target.plates)


def _largest_curvature(
    rows: RowGradients, whitening: Whitening, positions: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """Largest whitened curvature at each position, by power iterations from its gradient."""
    some: list[WeightedRows] = rows.some
    base = rows.mean(positions, some)[1]
    v = whitening.pull(start)
    length = np.zeros(len(v))
    for _ in range(_CURVED_ROUNDS):
        v /= np.maximum(np.linalg.norm(v, axis=1, keepdims=True), np.finfo(float).tiny)
        moved = rows.mean(positions + _CURVED_LENGTH * whitening.push(v), some)[1]
        v = whitening.pull(moved - base) / _CURVED_LENGTH
        length = np.linalg.norm(v, axis=1)
    return length
