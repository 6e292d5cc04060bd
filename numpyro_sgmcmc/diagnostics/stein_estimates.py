r"""From moments to statements on bias, with standard errors; NumPy, float64, no sampler in sight.

With :math:`g` an unbiased gradient of the potential at :math:`q`, whose law is the chain's,

.. math::

    C = \operatorname{Cov}(q, g) = \Sigma_\text{chain}\,\Sigma_\text{posterior}^{-1}, \qquad
    m_\text{chain} - m_\text{posterior} = \Sigma_\text{posterior}\,E[g]

exactly for a Gaussian posterior, and to first order in the bias for any other (Stein's identity:
:math:`C = I` and :math:`E[g] = 0` where there is none).

How far the gradient's noise has moved a run's means, which no gradient shows.

In a stationary chain the gradients have mean zero, whatever their noise. Where the posterior is
Gaussian the means are then right; elsewhere the noise, which widens many coordinates a little,
moves one that they have in common, such as the scale of hundreds of effects, and only third
derivatives tell (:func:`~numpyro_sgmcmc.adaptation.gradient_noise.shift_by_noise`).

What a run's draws tell besides the moments of its own gradients.

Bias told by a run's draws and gradients at some of them, where the moments that the chains have
kept are those of another posterior: that of some sites given the others.

Stein's identity does not ask how draws have come about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.budget import HIGH_DIM, WarmupBudget
from numpyro_sgmcmc.adaptation.gradient_noise import (
    GradientNoiseStats,
    predict_mean_bias_from_noise,
)
from numpyro_sgmcmc.adaptation.settings import Adaptation
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics.geometry import FunnelNeck, TailTransform, find_funnel_necks
from numpyro_sgmcmc.diagnostics.run_data import (
    ConvergenceStats,
    GradientsAtDraws,
    compute_center_offsets,
    compute_gradients_at_draws,
    get_chain_preconditioners,
    get_unconstrained_draws_or_none,
)
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import FULL_MOMENTS_MAX_DIM, RunningSums
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

__all__ = [
    "BiasDiagnostics",
    "BiasEstimate",
    "Estimate",
    "SteinEstimates",
    "compute_between_chain_r_hat",
    "compute_configurational_temperature",
    "compute_posterior_covariance",
    "compute_sums_at_draws",
    "estimate_bias_from_draws",
    "estimate_bias_from_sums",
    "jackknife",
    "predict_noise_mean_bias",
]

_MIN_STEIN_ENTRY_Z = 3.0


class Estimate(NamedTuple):
    """
    - **value** - estimates, of any shape.
    - **error** - their standard errors, of the same shape; NaN for a single batch.
    """

    value: np.ndarray
    error: np.ndarray


class BiasEstimate(NamedTuple):
    """
    - **mean_bias** - chain's mean minus the posterior's, in posterior sds, shape ``(d,)``.
    - **sd_inflation** - chain's sd over the posterior's, minus one, shape ``(d,)``.
    """

    mean_bias: Estimate
    sd_inflation: Estimate

    def override_coordinates(self, indices: np.ndarray, replacement: BiasEstimate) -> BiasEstimate:
        """With some coordinates told by another witness, who knows these alone."""
        return BiasEstimate(
            *(_override_entries(a, indices, b) for a, b in zip(self, replacement, strict=True))
        )

    def add_mean_bias(self, added_bias: Estimate) -> BiasEstimate:
        """With means that are off by so much more, of which it knows nothing."""
        shift = Estimate(
            self.mean_bias.value + added_bias.value,
            np.hypot(self.mean_bias.error, added_bias.error),
        )
        return self._replace(mean_bias=shift)


class SteinEstimates(NamedTuple):
    r"""
    - **mean_bias** - chain's mean minus the posterior's, in posterior sds, shape ``(d,)``.
    - **sd_inflation** - chain's sd over the posterior's, minus one, shape ``(d,)``.
    - **configurational_temperature** - configurational temperature :math:`\operatorname{tr} C / d`.
    - **kinetic_temperature** - kinetic temperature; NaN without momenta.
    - **chain_covariance** - the chain's, in whitened coordinates, ``(d, d)`` or ``(d,)``.
    - **posterior_covariance** - the posterior's, likewise.
    - **mcse** - Monte Carlo standard errors of the chain's own mean and sds, in its sds, shape
      ``(2, d)``: what is due to the number of draws.
    """

    mean_bias: Estimate
    sd_inflation: Estimate
    configurational_temperature: Estimate
    kinetic_temperature: Estimate
    chain_covariance: np.ndarray
    posterior_covariance: np.ndarray
    mcse: np.ndarray

    @property
    def bias_estimate(self) -> BiasEstimate:
        """Shift and inflation alone."""
        return BiasEstimate(self.mean_bias, self.sd_inflation)


def _override_entries(original: Estimate, indices: np.ndarray, replacement: Estimate) -> Estimate:
    value, error = original.value.copy(), original.error.copy()
    value[indices], error[indices] = replacement
    return Estimate(value, error)


def estimate_bias_from_sums(sums: Any, factor: np.ndarray) -> SteinEstimates:
    """Bias of a chain's mean and sds, coordinate by coordinate.

    :param sums: a :class:`~numpyro_sgmcmc.sampling.bias_monitor.Sums` whose fields have a leading axis of
        batches, about independent ones.
    :param factor: L of the whitened coordinates, shape ``(d,)`` or ``(d, d)``.
    :return: standard errors are by the jackknife over batches.
    """
    batches = [np.asarray(x, np.float64) for x in sums]
    kept = batches[0] > 0
    batches = [x[kept] for x in batches]
    total = [x.sum(0) for x in batches]
    shares = batches[0] / total[0]
    without = [
        [t - x for t, x in zip(total, batch, strict=True)]
        for batch in zip(*batches, strict=True)
        if len(shares) > 1
    ]

    def over_batches(statistic: Any) -> Estimate:
        return jackknife(statistic(total), [statistic(w) for w in without], shares)

    is_full = total[3].ndim == 2
    is_clear = None
    if is_full:
        c = over_batches(lambda t: _compute_central_moments(t)[1])
        # Entries lost in noise would pile up in the inverse.
        is_clear = np.abs(c.value) > _MIN_STEIN_ENTRY_Z * c.error
        np.fill_diagonal(is_clear, True)

    def bias(t: list[np.ndarray]) -> np.ndarray:
        gradient, c, spread = _compute_central_moments(t)
        posterior = compute_posterior_covariance(c, spread, is_clear)
        wide, right = (_compute_position_variances(x, factor) for x in (spread, posterior))
        moved = posterior @ gradient if is_full else posterior * gradient
        moved = _scale_to_positions(moved, factor)
        with np.errstate(invalid="ignore"):
            sd = np.sqrt(right)
            return np.stack([moved / sd, np.sqrt(wide) / sd - 1.0])

    def configurational(t: list[np.ndarray]) -> np.ndarray:
        c = _compute_central_moments(t)[1]
        return np.asarray(np.mean(np.diagonal(c) if is_full else c))

    both = over_batches(bias)
    _, whole, spread = _compute_central_moments(total)
    sd = np.sqrt(_compute_position_variances(spread, factor))

    def own(t: list[np.ndarray]) -> np.ndarray:
        return np.stack(
            [
                _scale_to_positions(t[1] / t[0], factor),
                np.sqrt(_compute_position_variances(_compute_central_moments(t)[2], factor)),
            ]
        )

    return SteinEstimates(
        Estimate(both.value[0], both.error[0]),
        Estimate(both.value[1], both.error[1]),
        over_batches(configurational),
        over_batches(lambda t: t[5] / t[0]),
        spread,
        compute_posterior_covariance(whole, spread, is_clear),
        over_batches(own).error / sd,
    )


def compute_configurational_temperature(batch_sums: Any) -> float:
    r""":math:`\operatorname{tr} C / d` of all chains together; NaN before the first reading.

    :param batch_sums: a :class:`~numpyro_sgmcmc.sampling.bias_monitor.Sums` with a leading axis of batches,
        and one of chains before it where there are several.
    """
    ndim = np.ndim(batch_sums.weight)
    total = [np.asarray(x, np.float64).sum(tuple(range(ndim))) for x in batch_sums]
    if not total[0] > 0:
        return float("nan")
    c = _compute_central_moments(total)[1]
    return float(np.mean(np.diagonal(c) if c.ndim == 2 else c))


def compute_between_chain_r_hat(sums: Any, factor: np.ndarray) -> np.ndarray:
    r"""R-hat of each coordinate from the sums of chains, which need not be split; shape ``(d,)``.

    :math:`\sqrt{1 + B/W}` with B the variance of the chains' means and W the mean of their
    variances. NaN for a single chain.

    :param sums: as for :func:`estimate`, the leading axis that of chains.
    :param factor: L of the whitened coordinates, shape ``(d,)`` or ``(d, d)``.
    """
    chains = [np.asarray(x, np.float64) for x in sums]
    chains = [x[chains[0] > 0] for x in chains]
    each = list(zip(*chains, strict=True))
    if len(each) < 2:
        return np.full(factor.shape[0], np.nan)
    means = np.stack([_scale_to_positions(t[1] / t[0], factor) for t in each])
    within = np.mean(
        [_compute_position_variances(_compute_central_moments(list(t))[2], factor) for t in each], 0
    )
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # of lost chains
        return np.sqrt(1.0 + means.var(0, ddof=1) / np.maximum(within, 0.0))


def compute_posterior_covariance(
    stein_matrix: np.ndarray, chain_covariance: np.ndarray, is_significant: np.ndarray | None = None
) -> np.ndarray:
    """The posterior's covariance ``C^-1 S`` from Stein's matrix and the chain's covariance.

    :param stein_matrix: C, shape ``(d, d)`` or ``(d,)``.
    :param chain_covariance: S, of the same shape.
    :param is_significant: entries of C that are used; all where None.
    """
    if stein_matrix.ndim == 1:
        return chain_covariance / stein_matrix
    stein_matrix = (
        stein_matrix if is_significant is None else np.where(is_significant, stein_matrix, 0.0)
    )
    try:
        found = np.linalg.solve(stein_matrix, chain_covariance)
    except np.linalg.LinAlgError:
        return np.full_like(chain_covariance, np.nan)
    return (found + found.T) / 2.0


def _compute_central_moments(total: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean gradient, Stein's matrix C and the chain's covariance."""
    weight, position, gradient, stein, spread, _ = total
    q, g = position / weight, gradient / weight
    if stein.ndim == 1:
        return g, stein / weight - q * g, spread / weight - q * q
    return g, stein / weight - np.outer(q, g), spread / weight - np.outer(q, q)


def _scale_to_positions(q: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """From whitened differences to positions'."""
    return factor @ q if factor.ndim == 2 else factor * q


def _compute_position_variances(covariance: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Variances of the positions whose whitened covariance this is."""
    if covariance.ndim == 2:
        push = np.diag(factor) if factor.ndim == 1 else factor
        return np.einsum("ij,jk,ik->i", push, covariance, push)
    return np.square(factor) @ covariance if factor.ndim == 2 else np.square(factor) * covariance


def jackknife(
    full_estimate: Any, leave_one_out: Sequence[Any], weights: np.ndarray | None = None
) -> Estimate:
    """The estimate with its error from leaving out one batch at a time.

    :param full_estimate: the estimate from all batches, of any shape.
    :param leave_one_out: those from all batches but one, in their order.
    :param weights: each batch's share of the whole, shape ``(batches,)``. Default: equal.
    :return: errors are NaN for a single batch.

    Reference: Busing, Meijer and van der Leeden (1999), *Delete-m jackknife for unequal m*.
    """
    weights = np.full(len(leave_one_out), 1.0 / len(leave_one_out)) if weights is None else weights
    num = len(weights)
    if num < 2:
        return Estimate(full_estimate, np.full_like(full_estimate, np.nan))
    shape = (num,) + (1,) * np.ndim(full_estimate)
    h = 1.0 / weights.reshape(shape)
    left = np.stack(leave_one_out)
    centre = num * full_estimate - ((1.0 - 1.0 / h) * left).sum(0)
    pseudo = h * full_estimate - (h - 1.0) * left
    return Estimate(full_estimate, np.sqrt((np.square(pseudo - centre) / (h - 1.0)).mean(0)))


_NUM_NOISE_BIAS_POSITIONS = 8


_NOISE_BIAS_RELATIVE_ERROR = 0.25  # of what is predicted to first order: its error


def predict_noise_mean_bias(mcmc: MCMC, kernel: SGMCMCKernel, draws: np.ndarray) -> Estimate:
    """How far noise is predicted to have moved each mean, in posterior sds; zeros where unknown.

    :param draws: all of them, shape ``(chains, draws, d)``.
    """
    target, arguments = kernel.potential, Arguments(mcmc._args, mcmc._kwargs)
    nothing = Estimate(np.zeros(target.dim), np.zeros(target.dim))
    adaptation = kernel.get_cached_adaptation(arguments)
    coordinates = get_chain_preconditioners(mcmc.last_state)
    if adaptation is None or not _is_noise_bias_predictable(kernel, adaptation):
        return nothing
    if compute_center_offsets(coordinates).any():  # chains in several modes
        return nothing
    step_size = float(np.max(mcmc.last_state.adapt_state.step_size))
    rows = BatchedGradients(target, arguments, included_rows=adaptation.included_rows)
    flat = draws.reshape(-1, target.dim)
    some = flat[np.linspace(0, len(flat) - 1, _NUM_NOISE_BIAS_POSITIONS).astype(int)]
    whitening = coordinates[0]
    moved = predict_mean_bias_from_noise(
        rows,
        whitening,
        whitening.solve(some - whitening.center),
        adaptation.estimator,
        adaptation.subsampling,
        _predict_unit_variance_inflation(adaptation.noise_stats, kernel.dynamics, step_size),
        WarmupBudget.num_bias_probes,
        np.random.default_rng(0),
    )
    return Estimate(moved, _NOISE_BIAS_RELATIVE_ERROR * np.abs(moved))


def _is_noise_bias_predictable(kernel: SGMCMCKernel, adaptation: Adaptation) -> bool:
    """Whether noise is heard, and whitened coordinates are those of a single region."""
    target, options = kernel.potential, kernel.options
    is_heard = bool(target.plates) and not (options.noise_compensation or target.is_stochastic)
    is_learnt = options.adapt_mass_matrix and options.inverse_mass_matrix is None
    is_whitened = adaptation.trace is not None and adaptation.has_dominant_mode and is_learnt
    return is_heard and is_whitened and target.dim <= HIGH_DIM


def _predict_unit_variance_inflation(
    noise_stats: GradientNoiseStats, dynamics: Dynamics, step_size: float
) -> float:
    """Of a unit variance, that noise of variance one makes, less what an epoch cancels."""
    excess = dynamics.variance_inflation(1.0, step_size, noise_stats.position_dependent_fraction)
    by_all = dynamics.variance_inflation(
        noise_stats.variance, step_size, noise_stats.position_dependent_fraction
    )
    return (
        excess * noise_stats.predict_variance_inflation(dynamics, step_size) / by_all
        if by_all > 0.0
        else 0.0
    )


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


_MIN_DRAWS_PER_COORDINATE = 10  # that a covariance, or a regression, is worth something


def estimate_bias_from_draws(
    draws: np.ndarray, gradient_slice: slice, gradients: np.ndarray
) -> tuple[SteinEstimates, BiasDiagnostics]:
    """Bias of the draws.

    :param draws: all of them as flat positions, shape ``(chains, draws, d)``.
    :param gradient_slice: those of each chain at which gradients are known.
    :param gradients: of the potential there, unbiased; as many numbers.
    """
    known = GradientsAtDraws.from_arrays(draws[:, gradient_slice], gradients)
    everywhere = GradientsAtDraws.from_arrays(
        draws, _extrapolate_gradients(draws, gradient_slice, known)
    )
    estimates = estimate_bias_from_sums(
        *compute_sums_at_draws(everywhere, _fit_preconditioner(draws))
    )
    return estimates, BiasDiagnostics.from_draws(draws, estimates.bias_estimate, known)


def _extrapolate_gradients(
    draws: np.ndarray, gradient_slice: slice, gradients_at_draws: GradientsAtDraws
) -> np.ndarray:
    """Gradients at all draws, whose sums are unbiased: by a regression on the position, and where
    they are known what that misses, as often as there are draws for each of these.

    So the chains' means and sds are those of all draws. Where too few are known for a regression
    what it misses is everything.
    """
    dim = draws.shape[-1]
    q, g = (
        gradients_at_draws.positions.reshape(-1, dim),
        gradients_at_draws.gradients.reshape(-1, dim),
    )
    found = np.zeros_like(draws)
    if len(q) >= _MIN_DRAWS_PER_COORDINATE * dim:
        centre = q.mean(0)
        scale = np.where(q.std(0) > 0.0, q.std(0), 1.0)
        slope = np.linalg.lstsq((q - centre) / scale, g - g.mean(0), rcond=None)[0]
        found = (draws - centre) / scale @ slope + g.mean(0)
    times = draws.shape[1] / gradients_at_draws.positions.shape[1]
    found[:, gradient_slice] += times * (gradients_at_draws.gradients - found[:, gradient_slice])
    return found


def _fit_preconditioner(draws: np.ndarray) -> Preconditioner:
    """Coordinates that are white for the draws, as long as these tell a covariance."""
    flat = draws.reshape(-1, draws.shape[-1])
    anchor, sds = flat.mean(0), flat.std(0)
    factor = np.where(sds > 0.0, sds, 1.0)
    if len(flat) < _MIN_DRAWS_PER_COORDINATE * flat.shape[1]:
        return Preconditioner(anchor, factor)
    correlation = np.atleast_2d(np.cov((flat - anchor) / factor, rowvar=False))
    try:
        return Preconditioner(anchor, factor[:, None] * np.linalg.cholesky(correlation))
    except np.linalg.LinAlgError:  # chains that are stuck
        return Preconditioner(anchor, factor)
