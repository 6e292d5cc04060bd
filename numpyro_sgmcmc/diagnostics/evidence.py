"""What a run's draws tell besides the moments of its own gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.chain.moments import FULL_MAX_DIM, Sums
from numpyro_sgmcmc.diagnostics.at_draws import LookedAt, draws_of, look_at
from numpyro_sgmcmc.diagnostics.coordinates import away_from_first, coordinates_of_chains
from numpyro_sgmcmc.diagnostics.dependence import Dependence
from numpyro_sgmcmc.diagnostics.estimates import Estimate, Estimates, Witness, estimate
from numpyro_sgmcmc.diagnostics.necks import Neck, necks
from numpyro_sgmcmc.diagnostics.noise_shift import moved_by_noise
from numpyro_sgmcmc.diagnostics.tails import Bend
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["Evidence", "sums_of"]

_NUM_BATCHES = 16


class Evidence(NamedTuple):
    """
    - **witnesses** - of shift and inflation, the moments' own first.
    - **dependence** - of the draws.
    - **heavy** - coordinates with heavy tails, shape ``(k,)``.
    - **necks** - ends of coordinates that are too narrow for the step.
    - **num_looked_at** - draws at which gradients were taken.
    - **by_noise** - of the shifts, what the gradient's noise is predicted to do, shape ``(d,)``.
    """

    witnesses: tuple[Witness, ...]
    dependence: Dependence
    heavy: np.ndarray
    necks: tuple[Neck, ...]
    num_looked_at: int
    by_noise: np.ndarray = np.zeros(0)

    @classmethod
    def of(
        cls,
        mcmc: MCMC,
        kernel: SGMCMCKernel,
        own: Estimates,
        r_hat: np.ndarray,
        exact: LookedAt | None = None,
    ) -> Evidence:
        """That of a finished run.

        :param own: what the moments tell.
        :param r_hat: by the moments, shape ``(d,)``.
        :param exact: gradients on all rows at some draws, if they were asked for.
        """
        first, draws = own.witness, draws_of(mcmc, kernel)
        if draws is None:
            few = np.nan if kernel.has_schedule else 1.0
            dependence = Dependence(r_hat, few / np.square(own.chance[0]))
            return cls((first,), dependence, np.zeros(0, int), (), 0)
        coordinates = coordinates_of_chains(mcmc.last_state)
        away = away_from_first(coordinates)
        bend = Bend.of((draws - away).reshape(-1, draws.shape[-1]))
        dependence = Dependence.of(draws if away.any() else _bent(draws, bend))
        # One chain's halves that differ do not tell of modes, but of too few draws: so does ESS.
        several = np.fmax(dependence.r_hat, r_hat) if len(draws) > 1 else r_hat
        dependence = dependence._replace(r_hat=several)
        by_noise = moved_by_noise(mcmc, kernel, draws)
        looked_at, first = look_at(mcmc, kernel, draws), first.moved(by_noise)
        if looked_at is None and exact is not None:
            first = first.replaced(bend.where, _of_tails(exact.moved(away), bend))
            return cls((first,), dependence, bend.where, (), 0, by_noise.value)
        if looked_at is None:
            unknown = Estimate(np.zeros(len(bend.where)), np.full(len(bend.where), np.inf))
            first = first.replaced(bend.where, Witness(unknown, unknown))
            return cls((first,), dependence, bend.where, (), 0, by_noise.value)
        looked_at = looked_at.moved(away)
        of_tails = _of_tails(looked_at if exact is None else exact.moved(away), bend)
        second = _at_draws(looked_at, coordinates[0]).moved(by_noise)
        witnesses = (w.replaced(bend.where, of_tails) for w in (first, second))
        step_size = float(np.max(mcmc.last_state.adapt_state.step_size))
        narrow = _necks(looked_at, kernel.dynamics, step_size)
        num = looked_at.positions[..., 0].size
        return cls(tuple(witnesses), dependence, bend.where, narrow, num, by_noise.value)

    @classmethod
    def of_draws(cls, draws: np.ndarray, own: Witness, exact: LookedAt) -> Evidence:
        """That of draws of any kernel.

        :param draws: all of them, shape ``(chains, draws, d)``.
        :param own: what the gradients tell.
        :param exact: gradients on all rows at some of the draws.
        """
        bend = Bend.of(draws.reshape(-1, draws.shape[-1]))
        dependence = Dependence.of(_bent(draws, bend))
        if len(draws) == 1:  # halves that differ do not tell of modes
            dependence = dependence._replace(r_hat=np.full_like(dependence.r_hat, np.nan))
        own = own.replaced(bend.where, _of_tails(exact, bend))
        return cls((own,), dependence, bend.where, (), 0)


def _bent(draws: np.ndarray, bend: Bend) -> np.ndarray:
    """The draws, those with heavy tails straightened."""
    bent = draws.copy()
    bent[..., bend.where] = bend.straight(draws)
    return bent


def _necks(looked_at: LookedAt, dynamics: Dynamics, step_size: float) -> tuple[Neck, ...]:
    """Ends that are too narrow for a step, where it is as long everywhere."""
    if not dynamics.is_uniform:
        return ()
    dim = looked_at.positions.shape[-1]
    stiffness = [dynamics.stiffness(max(0.0, float(c))) for c in looked_at.curvature]
    found = necks(
        looked_at.positions.reshape(-1, dim),
        looked_at.gradients.reshape(-1, dim),
        looked_at.curved,
        np.square(step_size * np.array(stiffness)),
    )
    return tuple(found)


def _at_draws(looked_at: LookedAt, coordinates: Whitening) -> Witness:
    """Shift and inflation by the gradients at the draws."""
    sums, factor = sums_of(looked_at, coordinates)
    return estimate(sums, factor).witness


def _of_tails(looked_at: LookedAt, bend: Bend) -> Witness:
    """The same of the coordinates with heavy tails, bent."""
    if not len(bend.where):
        nothing = Estimate(np.zeros(0), np.zeros(0))
        return Witness(nothing, nothing)
    y = bend.straight(looked_at.positions)
    g = bend.gradient(looked_at.positions, looked_at.gradients)
    return estimate(_batches(y, g, is_full=False), np.ones(len(bend.where))).witness


def sums_of(looked_at: LookedAt, coordinates: Whitening) -> tuple[Sums, np.ndarray]:
    """Moments of draws and the gradients there, in batches by time; and L of their coordinates.

    :param coordinates: whitened ones.
    """
    positions, gradients = looked_at.positions, looked_at.gradients
    anchor, factor = (np.asarray(x, np.float64) for x in coordinates[:2])
    plain = Whitening(anchor, factor)  # without a stretch: each coordinate a site's own
    flat = positions.reshape(-1, positions.shape[-1])
    q = plain.whiten(flat - anchor).reshape(positions.shape)
    g = plain.pull(gradients.reshape(flat.shape)).reshape(positions.shape)
    return _batches(q, g, is_full=len(anchor) <= FULL_MAX_DIM), factor


def _batches(q: np.ndarray, g: np.ndarray, is_full: bool) -> Sums:
    """Sums with a leading axis of batches: of each chain its draws, in their order.

    :param is_full: whether products are matrices.
    """
    product = "bni,bnj->bij" if is_full else "bni,bni->bi"
    num = min(_NUM_BATCHES, q.shape[1])
    places = np.array_split(np.arange(q.shape[1]), num)

    def one(where: np.ndarray) -> list[Any]:
        a, b = q[:, where], g[:, where]
        weight = np.full(len(q), float(len(where)))
        return [
            weight,
            a.sum(1),
            b.sum(1),
            np.einsum(product, a, b),
            np.einsum(product, a, a),
            weight * np.nan,
        ]

    found: list[Any] = [np.concatenate(x) for x in zip(*map(one, places), strict=True)]
    return Sums(*found)
