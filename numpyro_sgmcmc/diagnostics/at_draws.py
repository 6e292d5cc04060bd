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

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import IIDSubsampling
from numpyro_sgmcmc.diagnostics.coordinates import get_chain_preconditioners
from numpyro_sgmcmc.diagnostics.runs import get_unconstrained_draws
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.warmup.effort import HIGH_DIM, count_rows_per_gradient
from numpyro_sgmcmc.warmup.noise import sample_minibatch_indices
from numpyro_sgmcmc.warmup.row_gradients import (
    BatchedGradients,
    WeightedMinibatch,
    iter_weighted_minibatches,
)

__all__ = ["GradientsAtDraws", "compute_gradients_at_draws", "get_unconstrained_draws_or_none"]

_MAX_ARRAY_ENTRIES = 2**27  # in all draws together, at most
_MIN_FINITE_FRACTION = 0.99  # of the draws
_MAX_GRADIENT_DRAWS, _MIN_GRADIENT_DRAWS = 1_024, 64
_MAX_GRADIENT_ROWS, _MAX_GRADIENT_BATCHES = (
    2**24,
    2**15,
)  # rows, and minibatches, at which gradients are taken, at most
_NUM_CURVATURE_DRAWS, _NUM_CURVATURE_ITERATIONS, _CURVATURE_DIFFERENCE_STEP = 128, 3, 0.01


class GradientsAtDraws(NamedTuple):
    """
    - **positions** - draws, by chain and in their order, shape ``(chains, n, d)``.
    - **gradients** - estimates of the potential's gradient there, unbiased and independent of
      each other given the draws.
    - **curvature_indices** - draws, of all chains one after the other, whose curvature is known; ``(k,)``.
    - **max_curvature** - there, the largest whitened one, shape ``(k,)``.
    """

    positions: np.ndarray
    gradients: np.ndarray
    curvature_indices: np.ndarray
    max_curvature: np.ndarray

    @classmethod
    def from_arrays(cls, positions: Any, gradients: Any) -> GradientsAtDraws:
        """Without curvature.

        :param positions: shape ``(chains, n, d)``.
        :param gradients: as many numbers.
        """
        at, found = (
            np.asarray(x, np.float64).reshape(positions.shape) for x in (positions, gradients)
        )
        return cls(at, found, np.zeros(0, int), np.zeros(0))

    def subtract_offsets(self, offsets: np.ndarray) -> GradientsAtDraws:
        """With each chain's positions less this, shape ``(chains, 1, d)``."""
        return self._replace(positions=self.positions - offsets)


def get_unconstrained_draws_or_none(mcmc: MCMC, kernel: SGMCMCKernel) -> np.ndarray | None:
    """All draws as flat unconstrained positions, ``(chains, draws, d)``; float64.

    :return: None where they were not kept, are too many to be gone through again, or are not
        draws of one posterior.
    """
    chains = mcmc.num_chains
    num = int(np.size(mcmc.get_extra_fields().get("diverging", 0)))
    dim = sum(np.size(x) for x in jax.tree.leaves(mcmc.last_state.z)) // chains
    if not kernel.has_potential or kernel.has_schedule or num * dim > _MAX_ARRAY_ENTRIES:
        return None
    try:
        found = np.asarray(get_unconstrained_draws(mcmc, kernel), np.float64)
    except (InvalidArgumentError, RuntimeError):  # sites, or all draws, that were not kept
        return None
    return _forward_fill_nonfinite(found)


def _forward_fill_nonfinite(draws: np.ndarray) -> np.ndarray | None:
    """Draws at the very edge of a support, of which float32 knows no place, as those before them.

    :param draws: shape ``(chains, draws, d)``.
    :return: None where they are more than a few.
    """
    fine = np.isfinite(draws).all(-1)
    if fine.all():
        return draws
    if fine.mean() < _MIN_FINITE_FRACTION or not fine[:, 0].all():
        return None
    places = np.where(fine, np.arange(draws.shape[1]), 0)
    places = np.maximum.accumulate(places, axis=1)
    return np.take_along_axis(draws, places[..., None], axis=1)


def compute_gradients_at_draws(
    mcmc: MCMC, kernel: SGMCMCKernel, draws: np.ndarray
) -> GradientsAtDraws | None:
    """Gradients at some of the draws on some of the rows.

    :param draws: all of them, shape ``(chains, draws, d)``.
    :return: None where there is no cheap way: for rows elsewhere than in memory, a randomised
        likelihood, and very many parameters.
    """
    target, arguments = kernel.potential, Arguments(mcmc._args, mcmc._kwargs)
    elsewhere = arguments.host_arrays or arguments.sharded_arrays
    if elsewhere or target.is_stochastic or target.dim > HIGH_DIM:
        return None
    adaptation = kernel.get_cached_adaptation(arguments)
    decisive = () if adaptation is None else adaptation.included_rows
    rows = BatchedGradients(target, arguments, included_rows=decisive)
    coordinates = get_chain_preconditioners(mcmc.last_state)
    batch = count_rows_per_gradient(target, rows.arguments)
    num = int(np.clip(_MAX_GRADIENT_ROWS // (2 * batch), _MIN_GRADIENT_DRAWS, _MAX_GRADIENT_DRAWS))
    positions = _thin_draws_evenly(draws, num)
    flat = positions.reshape(-1, target.dim)
    of_chain = np.repeat(np.arange(len(positions)), positions.shape[1])
    gradients = _estimate_gradients(rows, coordinates, flat, of_chain).reshape(positions.shape)
    curved = np.unique(np.linspace(0, len(flat) - 1, _NUM_CURVATURE_DRAWS).astype(int))
    start = gradients.reshape(flat.shape)[curved]
    curvature = np.zeros(len(curved))
    for alike in _group_chains_by_center(coordinates):
        some = np.isin(of_chain[curved], alike)
        there = coordinates[alike[0]]
        curvature[some] = _compute_max_curvature(rows, there, flat[curved][some], start[some])
    return GradientsAtDraws(positions, gradients, curved, curvature)


def _thin_draws_evenly(draws: np.ndarray, num_draws: int) -> np.ndarray:
    """About so many of the draws, as many of each chain.

    :param draws: shape ``(chains, draws, d)``.
    """
    each = min(draws.shape[1], max(2, num_draws // len(draws)))
    return draws[:, np.linspace(0, draws.shape[1] - 1, each).astype(int)]


def _group_chains_by_center(preconditioners: Sequence[Preconditioner]) -> list[list[int]]:
    """The chains that run in the same coordinates."""
    by_anchor: dict[bytes, list[int]] = {}
    for chain, whitening in enumerate(preconditioners):
        by_anchor.setdefault(whitening.center.tobytes(), []).append(chain)
    return list(by_anchor.values())


def _estimate_gradients(
    batched_gradients: BatchedGradients,
    preconditioners: Sequence[Preconditioner],
    positions: np.ndarray,
    chain_index: np.ndarray,
) -> np.ndarray:
    """Unbiased gradients by control variates, each on rows of its own; exact where rows are few.

    :param preconditioners: of each chain.
    :param positions: shape ``(n, d)``.
    :param chain_index: the chain of each.
    """
    target = batched_gradients.potential
    batch = sum(p.subsample_size for p in target.plates)
    if not batch:
        return batched_gradients.evaluate_on_subset(positions)[1]
    num = len(positions)
    most = min(_MAX_GRADIENT_BATCHES, _MAX_ARRAY_ENTRIES // target.dim, _MAX_GRADIENT_ROWS // batch)
    each = max(1, most // (2 * num))
    all_rows = (
        list(iter_weighted_minibatches(batched_gradients.plate_groups))
        if _count_batches_per_epoch(batched_gradients) <= 2 * each
        else []
    )
    if all_rows:
        return batched_gradients.weighted_mean(positions, all_rows)[1]
    rng = np.random.default_rng(0)
    drawn = sample_minibatch_indices(
        batched_gradients.step_potential, rng, (num * each,), IIDSubsampling()
    )
    # At each draw and, with the same rows, at the anchor.
    both = np.concatenate([positions, [w.center for w in preconditioners]])
    of, is_anchor = np.divmod(np.arange(2 * num * each), 2)
    draw, sign = of // each, 1 - 2 * is_anchor
    at = np.where(is_anchor, num + chain_index[draw], draw)
    found = _compute_center_gradients(batched_gradients, preconditioners)[chain_index]
    for part, _, gradients in batched_gradients.evaluate_step_minibatches(both, drawn, at, of):
        np.add.at(found, draw[part], sign[part, None] / each * gradients)
    return found


def _compute_center_gradients(
    batched_gradients: BatchedGradients, preconditioners: Sequence[Preconditioner]
) -> np.ndarray:
    """The gradient on all rows at each chain's anchor, shape ``(chains, d)``."""
    found = np.stack([w.reference_gradient for w in preconditioners])
    for alike in _group_chains_by_center(preconditioners):
        if not found[alike[0]].any():  # nobody has asked for it
            found[alike] = batched_gradients.full_gradient(preconditioners[alike[0]].center)
    return found


def _count_batches_per_epoch(batched_gradients: BatchedGradients) -> int:
    """Minibatches in a pass over all rows, about."""
    return sum(p.batches_per_epoch for p in batched_gradients.potential.plates)


def _compute_max_curvature(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    positions: np.ndarray,
    initial_directions: np.ndarray,
) -> np.ndarray:
    """Largest whitened curvature at each position, by power iterations from its gradient."""
    some: list[WeightedMinibatch] = batched_gradients.subset_minibatches
    base = batched_gradients.weighted_mean(positions, some)[1]
    v = preconditioner.apply_transpose(initial_directions)
    length = np.zeros(len(v))
    for _ in range(_NUM_CURVATURE_ITERATIONS):
        v /= np.maximum(np.linalg.norm(v, axis=1, keepdims=True), np.finfo(float).tiny)
        moved = batched_gradients.weighted_mean(
            positions + _CURVATURE_DIFFERENCE_STEP * preconditioner.apply(v), some
        )[1]
        v = preconditioner.apply_transpose(moved - base) / _CURVATURE_DIFFERENCE_STEP
        length = np.linalg.norm(v, axis=1)
    return length
