"""What a run's draws tell besides the moments of its own gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.chain.moments import FULL_MOMENTS_MAX_DIM, RunningSums
from numpyro_sgmcmc.diagnostics.at_draws import (
    GradientsAtDraws,
    compute_gradients_at_draws,
    get_unconstrained_draws_or_none,
)
from numpyro_sgmcmc.diagnostics.coordinates import compute_center_offsets, get_chain_preconditioners
from numpyro_sgmcmc.diagnostics.dependence import ConvergenceStats
from numpyro_sgmcmc.diagnostics.estimates import (
    BiasEstimate,
    Estimate,
    SteinEstimates,
    estimate_bias_from_sums,
)
from numpyro_sgmcmc.diagnostics.necks import FunnelNeck, find_funnel_necks
from numpyro_sgmcmc.diagnostics.noise_shift import predict_noise_mean_bias
from numpyro_sgmcmc.diagnostics.tails import TailTransform
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["BiasDiagnostics", "compute_sums_at_draws"]

_NUM_SUMS_BATCHES = 16


class BiasDiagnostics(NamedTuple):
    """
    - **bias_estimates** - of shift and inflation, the moments' own first.
    - **convergence** - of the draws.
    - **heavy_tailed_coordinates** - coordinates with heavy tails, shape ``(k,)``.
    - **funnel_necks** - ends of coordinates that are too narrow for the step.
    - **num_gradient_draws** - draws at which gradients were taken.
    - **noise_mean_bias** - of the shifts, what the gradient's noise is predicted to do, shape ``(d,)``.
    """

    bias_estimates: tuple[BiasEstimate, ...]
    convergence: ConvergenceStats
    heavy_tailed_coordinates: np.ndarray
    funnel_necks: tuple[FunnelNeck, ...]
    num_gradient_draws: int
    noise_mean_bias: np.ndarray = np.zeros(0)

    @classmethod
    def from_run(
        cls,
        mcmc: MCMC,
        kernel: SGMCMCKernel,
        stein_estimates: SteinEstimates,
        sums_r_hat: np.ndarray,
        exact_gradients: GradientsAtDraws | None = None,
    ) -> BiasDiagnostics:
        """That of a finished run.

        :param stein_estimates: what the moments tell.
        :param sums_r_hat: by the moments, shape ``(d,)``.
        :param exact_gradients: gradients on all rows at some draws, if they were asked for.
        """
        first, draws = stein_estimates.bias_estimate, get_unconstrained_draws_or_none(mcmc, kernel)
        if draws is None:
            few = np.nan if kernel.has_schedule else 1.0
            dependence = ConvergenceStats(sums_r_hat, few / np.square(stein_estimates.mcse[0]))
            return cls((first,), dependence, np.zeros(0, int), (), 0)
        coordinates = get_chain_preconditioners(mcmc.last_state)
        away = compute_center_offsets(coordinates)
        bend = TailTransform.fit((draws - away).reshape(-1, draws.shape[-1]))
        dependence = ConvergenceStats.from_draws(
            draws if away.any() else _transform_tails(draws, bend)
        )
        # One chain's halves that differ do not tell of modes, but of too few draws: so does ESS.
        several = np.fmax(dependence.r_hat, sums_r_hat) if len(draws) > 1 else sums_r_hat
        dependence = dependence._replace(r_hat=several)
        by_noise = predict_noise_mean_bias(mcmc, kernel, draws)
        looked_at, first = (
            compute_gradients_at_draws(mcmc, kernel, draws),
            first.add_mean_bias(by_noise),
        )
        if looked_at is None and exact_gradients is not None:
            first = first.override_coordinates(
                bend.coordinates, _estimate_tail_bias(exact_gradients.subtract_offsets(away), bend)
            )
            return cls((first,), dependence, bend.coordinates, (), 0, by_noise.value)
        if looked_at is None:
            unknown = Estimate(
                np.zeros(len(bend.coordinates)), np.full(len(bend.coordinates), np.inf)
            )
            first = first.override_coordinates(bend.coordinates, BiasEstimate(unknown, unknown))
            return cls((first,), dependence, bend.coordinates, (), 0, by_noise.value)
        looked_at = looked_at.subtract_offsets(away)
        of_tails = _estimate_tail_bias(
            looked_at if exact_gradients is None else exact_gradients.subtract_offsets(away), bend
        )
        second = _estimate_bias_at_draws(looked_at, coordinates[0]).add_mean_bias(by_noise)
        witnesses = (w.override_coordinates(bend.coordinates, of_tails) for w in (first, second))
        step_size = float(np.max(mcmc.last_state.adapt_state.step_size))
        narrow = _find_funnel_necks_at_draws(looked_at, kernel.dynamics, step_size)
        num = looked_at.positions[..., 0].size
        return cls(tuple(witnesses), dependence, bend.coordinates, narrow, num, by_noise.value)

    @classmethod
    def from_draws(
        cls, draws: np.ndarray, bias_estimate: BiasEstimate, exact_gradients: GradientsAtDraws
    ) -> BiasDiagnostics:
        """That of draws of any kernel.

        :param draws: all of them, shape ``(chains, draws, d)``.
        :param bias_estimate: what the gradients tell.
        :param exact_gradients: gradients on all rows at some of the draws.
        """
        bend = TailTransform.fit(draws.reshape(-1, draws.shape[-1]))
        dependence = ConvergenceStats.from_draws(_transform_tails(draws, bend))
        if len(draws) == 1:  # halves that differ do not tell of modes
            dependence = dependence._replace(r_hat=np.full_like(dependence.r_hat, np.nan))
        bias_estimate = bias_estimate.override_coordinates(
            bend.coordinates, _estimate_tail_bias(exact_gradients, bend)
        )
        return cls((bias_estimate,), dependence, bend.coordinates, (), 0)


def _transform_tails(draws: np.ndarray, tail_transform: TailTransform) -> np.ndarray:
    """The draws, those with heavy tails straightened."""
    bent = draws.copy()
    bent[..., tail_transform.coordinates] = tail_transform.transform(draws)
    return bent


def _find_funnel_necks_at_draws(
    gradients_at_draws: GradientsAtDraws, dynamics: Dynamics, step_size: float
) -> tuple[FunnelNeck, ...]:
    """Ends that are too narrow for a step, where it is as long everywhere."""
    if not dynamics.has_constant_metric:
        return ()
    dim = gradients_at_draws.positions.shape[-1]
    stiffness = [dynamics.stiffness(max(0.0, float(c))) for c in gradients_at_draws.max_curvature]
    found = find_funnel_necks(
        gradients_at_draws.positions.reshape(-1, dim),
        gradients_at_draws.gradients.reshape(-1, dim),
        gradients_at_draws.curvature_indices,
        np.square(step_size * np.array(stiffness)),
    )
    return tuple(found)


def _estimate_bias_at_draws(
    gradients_at_draws: GradientsAtDraws, preconditioner: Preconditioner
) -> BiasEstimate:
    """Shift and inflation by the gradients at the draws."""
    sums, factor = compute_sums_at_draws(gradients_at_draws, preconditioner)
    return estimate_bias_from_sums(sums, factor).bias_estimate


def _estimate_tail_bias(
    gradients_at_draws: GradientsAtDraws, tail_transform: TailTransform
) -> BiasEstimate:
    """The same of the coordinates with heavy tails, bent."""
    if not len(tail_transform.coordinates):
        nothing = Estimate(np.zeros(0), np.zeros(0))
        return BiasEstimate(nothing, nothing)
    y = tail_transform.transform(gradients_at_draws.positions)
    g = tail_transform.transform_gradient(
        gradients_at_draws.positions, gradients_at_draws.gradients
    )
    return estimate_bias_from_sums(
        _accumulate_batch_sums(y, g, is_dense=False), np.ones(len(tail_transform.coordinates))
    ).bias_estimate


def compute_sums_at_draws(
    gradients_at_draws: GradientsAtDraws, preconditioner: Preconditioner
) -> tuple[RunningSums, np.ndarray]:
    """Moments of draws and the gradients there, in batches by time; and L of their coordinates.

    :param preconditioner: whitened ones.
    """
    positions, gradients = gradients_at_draws.positions, gradients_at_draws.gradients
    anchor, factor = (np.asarray(x, np.float64) for x in preconditioner[:2])
    plain = Preconditioner(anchor, factor)  # without a stretch: each coordinate a site's own
    flat = positions.reshape(-1, positions.shape[-1])
    q = plain.solve(flat - anchor).reshape(positions.shape)
    g = plain.apply_transpose(gradients.reshape(flat.shape)).reshape(positions.shape)
    return _accumulate_batch_sums(q, g, is_dense=len(anchor) <= FULL_MOMENTS_MAX_DIM), factor


def _accumulate_batch_sums(q: np.ndarray, g: np.ndarray, is_dense: bool) -> RunningSums:
    """Sums with a leading axis of batches: of each chain its draws, in their order.

    :param is_dense: whether products are matrices.
    """
    product = "bni,bnj->bij" if is_dense else "bni,bni->bi"
    num = min(_NUM_SUMS_BATCHES, q.shape[1])
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
    return RunningSums(*found)
