r"""Estimates of a chain's bias by Stein's identity, with standard errors. NumPy, float64.

For positions :math:`q` of the chain and unbiased gradients :math:`g` of the potential there,

.. math::

    C = \operatorname{Cov}(q, g) = \Sigma_\text{chain}\,\Sigma_\text{posterior}^{-1}, \qquad
    m_\text{chain} - m_\text{posterior} = \Sigma_\text{posterior}\,E[g]

exactly for a Gaussian posterior (Stein's identity, integration by parts: :math:`C = I` and
:math:`E[g] = 0` for draws of the posterior). For any other posterior a small bias and its estimate
are proportional, by a factor that depends on the shape: draws from :math:`e^{-U/T}` have
:math:`C = T`, and SDs of :math:`T^{1/p}` where U grows as :math:`|q|^p`. The identity holds however
the draws were generated.

:func:`estimate_bias_from_sums` takes the sums that a chain accumulates, as NumPy arrays,
:func:`estimate_bias_at_draws` gradients taken at draws after the run, and
:func:`estimate_bias_from_draws` draws of any kernel and gradients at some of them.

Reference: Gorham and Mackey (2015), *Measuring sample quality with Stein's method*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_sgmcmc.adaptation.pilot import compute_r_hat
from numpyro_sgmcmc.diagnostics.geometry import Excursion, FunnelNeck, TailTransform
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats
from numpyro_sgmcmc.model.block_arrow import BlockArrowFactor
from numpyro_sgmcmc.model.hessian_factor import HessianFactor
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import FULL_MOMENTS_MAX_DIM, RunningSums, get_split_factor

# Standard errors: off-diagonal entries of C below are set to zero before C is inverted, unless the
# noise of all entries of gradients at draws adds less than this to the inverse.
_MIN_STEIN_ENTRY_Z, _MAX_INVERSE_BIAS = 3.0, 0.02
# Variances of entries of split vectors below are zero but for rounding: of coordinates that are
# directions themselves, and of directions that pad a low-rank factor.
_MIN_SPLIT_VARIANCE = 1e-4
# Batches of draws by time for the jackknife, as many as a chain's running sums have.
_NUM_SUMS_BATCHES = 16
# Draws per coordinate for a sample covariance or a linear regression to be used.
_MIN_DRAWS_PER_COORDINATE = 10


class Estimate(NamedTuple):
    """Estimates with standard errors."""

    value: np.ndarray  # estimates, of any shape
    error: np.ndarray  # their standard errors, of the same shape; NaN for a single batch

    def at(self, indices: np.ndarray) -> Estimate:
        """Return the estimates of some coordinates."""
        return Estimate(self.value[indices], self.error[indices])


class BiasEstimate(NamedTuple):
    """Bias of the chains' mean and SD in each coordinate."""

    mean_bias: Estimate  # chains' mean minus the posterior's, in posterior SDs, shape `(d,)`
    sd_inflation: Estimate  # chains' SD over the posterior's, minus one, shape `(d,)`

    def override_coordinates(self, indices: np.ndarray, replacement: BiasEstimate) -> BiasEstimate:
        """Return the estimate with some coordinates replaced."""
        combined: BiasEstimate = jax.tree.map(np.copy, self)
        for target, source in zip(combined, replacement, strict=True):
            target.value[indices], target.error[indices] = source
        return combined

    def add_mean_bias(self, other: Estimate) -> BiasEstimate:
        """Return the estimate with a mean bias added that gradients do not show; NaN adds none."""
        value = self.mean_bias.value + np.nan_to_num(other.value)
        return self._replace(mean_bias=Estimate(value, np.hypot(self.mean_bias.error, other.error)))


class SteinEstimates(NamedTuple):
    """Estimates by Stein's identity: bias, and the fields of a bias report of these names."""

    bias: BiasEstimate
    configurational_temperature: Estimate
    kinetic_temperature: Estimate
    chain_covariance: np.ndarray
    posterior_covariance: np.ndarray
    mcse: np.ndarray


class GradientsAtDraws(NamedTuple):
    """Gradients of the potential at some draws.

    - **positions** - draws by chain, in their order, shape ``(chains, n, d)``.
    - **gradients** - unbiased estimates of the gradient there, independent of each other given
      the draws, of the same shape.
    - **curvature_indices** - draws whose curvature is known, an index into those of all chains
      one after the other, shape ``(k,)``.
    - **max_curvature** - the largest preconditioned curvature there, shape ``(k,)``.
    """

    positions: np.ndarray
    gradients: np.ndarray
    curvature_indices: np.ndarray = np.zeros(0, int)
    max_curvature: np.ndarray = np.zeros(0)

    @classmethod
    def from_arrays(cls, positions: Any, gradients: Any) -> GradientsAtDraws:
        """Convert positions, shape ``(chains, n, d)``, and as many gradients to float64."""
        positions = np.asarray(positions, np.float64)
        return cls(positions, np.asarray(gradients, np.float64).reshape(positions.shape))

    def subtract_offsets(self, offsets: np.ndarray) -> GradientsAtDraws:
        """Return them with an offset of each chain, ``(chains, 1, d)``, subtracted."""
        return self._replace(positions=self.positions - offsets)

    def to_coordinates(self, preconditioner: Preconditioner) -> GradientsAtDraws:
        """Return positions and gradients in preconditioned coordinates."""
        q = preconditioner.from_position(self.positions)
        return self._replace(positions=q, gradients=preconditioner.pull_back(q, self.gradients))

    @property
    def num_draws(self) -> int:
        """Number of draws of all chains."""
        return self.positions[..., 0].size


class BiasMeasurements(NamedTuple):
    """All that was measured of a run's bias; fields as in a bias report."""

    bias_estimates: tuple[BiasEstimate, ...]
    convergence: ConvergenceStats
    stein: SteinEstimates
    heavy_tailed_coordinates: np.ndarray = np.zeros(0, int)
    funnel_necks: tuple[FunnelNeck, ...] = ()
    excursions: tuple[Excursion, ...] = ()
    num_gradient_draws: int = 0
    noise_mean_bias: np.ndarray = np.zeros(0)


# --- Estimates from sums ------------------------------------------------------------------------


def estimate_bias_from_sums(
    sums: RunningSums, preconditioners: Sequence[Preconditioner], are_at_draws: bool = False
) -> SteinEstimates:
    r"""Estimate the bias of a chain's mean and SDs, coordinate by coordinate.

    The diagonal of C of vectors that are split by a low-rank factor with directions U is compared
    with that of :math:`I - UU^\top` and :math:`U^\top U`: the posterior's variance along a
    direction, which many coordinates share, is estimated once and not from each of these.

    :param sums: fields with a leading axis of approximately independent batches.
    :param are_at_draws: whether gradients are those at draws, so that entries of C that are not
        significant are kept if this hardly changes the inverse.
    :return: estimates with jackknife standard errors over batches.
    """
    has_weight = np.asarray(sums.weight) > 0
    sums = jax.tree.map(lambda x: np.asarray(x, np.float64)[has_weight], sums)
    total = jax.tree.map(lambda x: x.sum(0), sums)
    weights = np.asarray(sums.weight / total.weight)
    leave_one_out = [
        jax.tree.map(lambda t, x, b=b: t - x[b], total, sums)
        for b in range(len(weights) if len(weights) > 1 else 0)
    ]

    def over_batches(statistic: Callable[[RunningSums], np.ndarray]) -> Estimate:
        with np.errstate(invalid="ignore"):  # variances that few draws make negative
            return jackknife(statistic(total), [statistic(x) for x in leave_one_out], weights)

    factor = preconditioners[0].factor
    compute_variances = _make_position_variances(factor)
    split = _SplitVectors.from_preconditioners(preconditioners)
    is_significant = None
    if total.position_gradient.ndim == 2:
        matrix = over_batches(lambda x: _compute_central_moments(x)[2])
        # Sampling noise of all entries would accumulate in the inverse.
        is_significant = np.abs(matrix.value) > _MIN_STEIN_ENTRY_Z * matrix.error
        np.fill_diagonal(is_significant, True)
        # Noise N of C adds N^2 to the inverse: on its diagonal, the sum of the variances in a row.
        if are_at_draws and np.square(matrix.error).sum(1).mean() < _MAX_INVERSE_BIAS:
            is_significant[:] = True

    def compute_covariances(x: RunningSums) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return those of chain and posterior, and the difference of their means."""
        _, gradient, c, chain = _compute_central_moments(x)
        if is_significant is not None:
            posterior = _compute_posterior_covariance(c, chain, is_significant)
            return chain, posterior, posterior @ gradient
        relative = split.divide_by_variances(c, zero=1.0)  # chain's variances over the posterior's
        difference = split.divide_by_variances(chain / relative * gradient, zero=0.0)
        chain, posterior = (split.merge_variances(v) for v in (chain, chain / relative))
        return chain, posterior, split.merge(difference)

    def bias(x: RunningSums) -> np.ndarray:
        chain, posterior, mean_difference = compute_covariances(x)
        sd = np.sqrt(compute_variances(posterior))
        mean_bias = _scale_to_positions(mean_difference, factor) / sd
        return np.stack([mean_bias, np.sqrt(compute_variances(chain)) / sd - 1.0])

    def mean_and_sd(x: RunningSums) -> np.ndarray:
        mean, covariance = split.compute_mean_and_covariance(x)
        sd = np.sqrt(compute_variances(covariance))
        return np.stack([_scale_to_positions(mean, factor), sd])

    dim = preconditioners[0].center.size
    chain, posterior, _ = compute_covariances(total)
    return SteinEstimates(
        bias=BiasEstimate(*(Estimate(*x) for x in zip(*over_batches(bias), strict=True))),
        configurational_temperature=over_batches(lambda x: _compute_mean_diagonal(x, dim)),
        kinetic_temperature=over_batches(lambda x: np.asarray(x.kinetic_temperature / x.weight)),
        chain_covariance=chain,
        posterior_covariance=posterior,
        mcse=over_batches(mean_and_sd).error / np.sqrt(compute_variances(chain)),
    )


class _SplitVectors(NamedTuple):
    """Vectors that a low-rank factor has split into d + k entries; d entries without one."""

    # what one unit of each direction adds to the coordinates of sites, shape `(d, k)`
    scaled_directions: np.ndarray
    variances: np.ndarray  # the diagonal of C for an exact sampler, shape `(d + k,)`

    @classmethod
    def from_preconditioners(cls, preconditioners: Sequence[Preconditioner]) -> _SplitVectors:
        """Return those of the chains' sums, in the first chain's coordinates."""
        first = get_split_factor(preconditioners[0])
        if first is None:
            dim = preconditioners[0].center.size
            return cls(np.zeros((dim, 0)), np.ones(dim))
        squares = [np.square(p.low_rank.directions) for p in preconditioners if p.low_rank]
        variances = np.mean([np.append(1.0 - x.sum(1), x.sum(0)) for x in squares], axis=0)
        return cls(first.directions * first.scales, variances)

    def divide_by_variances(self, v: np.ndarray, zero: float) -> np.ndarray:
        """Return ``v`` over the variances, ``zero`` for entries that are always zero."""
        is_zero = self.variances < _MIN_SPLIT_VARIANCE
        return np.where(is_zero, zero, v / np.where(is_zero, 1.0, self.variances))

    def merge(self, v: np.ndarray) -> np.ndarray:
        """Return a split vector in coordinates of sites."""
        dim = len(self.scaled_directions)
        return v[:dim] + self.scaled_directions @ v[dim:]

    def merge_variances(self, v: np.ndarray) -> np.ndarray:
        """Return the variances in coordinates of sites of a split vector's, uncorrelated."""
        return self._replace(scaled_directions=np.square(self.scaled_directions)).merge(v)

    def compute_mean_and_covariance(self, total: RunningSums) -> tuple[np.ndarray, np.ndarray]:
        """Return the chain's mean and covariance, or its diagonal, in coordinates of sites."""
        mean, _, _, covariance = _compute_central_moments(total)
        if covariance.ndim == 2:
            return mean, covariance
        return self.merge(mean), self.merge_variances(covariance)


def compute_configurational_temperature(batch_sums: RunningSums, dim: int) -> float:
    r"""Return :math:`\operatorname{tr} C / d` of all chains; NaN without an iteration.

    :param batch_sums: fields with a leading axis of batches, and one of chains before it if there
        are several.
    """
    axes = tuple(range(np.ndim(batch_sums.weight)))
    total = jax.tree.map(lambda x: np.asarray(x, np.float64).sum(axes), batch_sums)
    return float(_compute_mean_diagonal(total, dim)) if total.weight > 0 else float("nan")


def compute_between_chain_r_hat(
    sums: RunningSums, preconditioners: Sequence[Preconditioner]
) -> np.ndarray:
    r"""Return R-hat of each coordinate, without a split of chains, shape ``(d,)``.

    NaN for a single chain.
    """
    means, variances = [], []
    for chain, preconditioner in enumerate(preconditioners):
        if not sums.weight[chain] > 0:
            continue
        split = _SplitVectors.from_preconditioners([preconditioner])
        chain_sums = jax.tree.map(lambda x, c=chain: np.asarray(x[c], np.float64), sums)
        mean, covariance = split.compute_mean_and_covariance(chain_sums)
        offset = preconditioner.center - preconditioners[0].center
        means.append(offset + _scale_to_positions(mean, preconditioner.factor))
        variances.append(_make_position_variances(preconditioner.factor)(covariance))
    if len(means) < 2:
        return np.full(preconditioners[0].center.size, np.nan)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # chains that are stuck
        return compute_r_hat(np.stack(means), np.maximum(np.mean(variances, 0), 0.0))


def _compute_posterior_covariance(
    stein_matrix: np.ndarray, chain_covariance: np.ndarray, is_significant: np.ndarray
) -> np.ndarray:
    r"""Return the posterior's covariance :math:`C^{-1}\Sigma_\text{chain}`, symmetrised.

    :param is_significant: entries of C that are used.
    """
    try:
        covariance = np.linalg.solve(np.where(is_significant, stein_matrix, 0.0), chain_covariance)
    except np.linalg.LinAlgError:
        return np.full_like(chain_covariance, np.nan)
    return (covariance + covariance.T) / 2.0


def _compute_central_moments(total: RunningSums) -> tuple[Any, Any, Any, Any]:
    """Return mean position and gradient, Stein's matrix C and the covariance of the positions."""
    q, g = total.position / total.weight, total.gradient / total.weight
    product: Any = np.outer if total.position_gradient.ndim == 2 else np.multiply
    c = total.position_gradient / total.weight - product(q, g)
    return q, g, c, total.position_position / total.weight - product(q, q)


def _compute_mean_diagonal(total: RunningSums, dim: int) -> np.ndarray:
    """Return the trace of Stein's matrix C over the number of coordinates."""
    c = _compute_central_moments(total)[2]
    return np.asarray((np.diagonal(c) if c.ndim == 2 else c).sum() / dim)


def _scale_to_positions(q: np.ndarray, factor: Any) -> np.ndarray:
    """Return a preconditioned displacement as one of positions."""
    if isinstance(factor, (BlockArrowFactor, HessianFactor)):
        return np.asarray(factor.apply(q))
    return factor @ q if factor.ndim == 2 else factor * q


def _make_position_variances(factor: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from a covariance of preconditioned positions to their variances."""
    if isinstance(factor, BlockArrowFactor):
        squared_shifts = factor.square_shifts()
        return lambda variances: np.asarray(factor.apply_squared(variances, squared_shifts))
    if isinstance(factor, HessianFactor):
        return lambda variances: np.asarray(factor.apply_squared(variances))

    def compute_variances(covariance: np.ndarray) -> np.ndarray:
        if covariance.ndim == 2:
            matrix = np.diag(factor) if factor.ndim == 1 else factor
            return np.einsum("ij,jk,ik->i", matrix, covariance, matrix)
        square = np.square(factor)
        return np.asarray(square @ covariance if factor.ndim == 2 else square * covariance)

    return compute_variances


def jackknife(
    full_estimate: Any, leave_one_out: Sequence[Any], weights: np.ndarray | None = None
) -> Estimate:
    """Return an estimate with its delete-one-batch jackknife standard error.

    :param full_estimate: the estimate from all batches, of any shape.
    :param leave_one_out: the estimates from all batches but one, in their order.
    :param weights: each batch's share of the data, shape ``(batches,)``. Default: equal.
    :return: errors are NaN for a single batch.

    Reference: Busing, Meijer and van der Leeden (1999), *Delete-m jackknife for unequal m*.
    """
    weights = np.full(len(leave_one_out), 1.0 / len(leave_one_out)) if weights is None else weights
    num_batches = len(weights)
    if num_batches < 2:
        return Estimate(full_estimate, np.full_like(full_estimate, np.nan))
    h = 1.0 / weights.reshape((num_batches,) + (1,) * np.ndim(full_estimate))
    estimates = np.stack(leave_one_out)
    center = num_batches * full_estimate - ((1.0 - 1.0 / h) * estimates).sum(0)
    pseudo_values = h * full_estimate - (h - 1.0) * estimates
    variance = (np.square(pseudo_values - center) / (h - 1.0)).mean(0)
    return Estimate(full_estimate, np.sqrt(variance))


# --- Estimates from gradients at draws ----------------------------------------------------------


def estimate_bias_at_draws(
    gradients: GradientsAtDraws, preconditioner: Preconditioner
) -> SteinEstimates:
    """Estimate the bias from gradients at draws, with errors over batches by time.

    :param preconditioner: coordinates of the estimate. Up to so many coordinates as there are full
        second moments, its low-rank part is left out.
    """
    (num_chains, _, dim), low_rank = gradients.positions.shape, get_split_factor(preconditioner)
    preconditioner = preconditioner._replace(low_rank=low_rank)
    q, g = gradients.positions.reshape(-1, dim), gradients.gradients.reshape(-1, dim)
    if preconditioner.has_uncertain_scales:
        q = preconditioner.from_position(q)
        g = preconditioner.pull_back(q, g)
    else:
        q, g = preconditioner.solve(q - preconditioner.center), preconditioner.apply_transpose(g)
    if low_rank is not None:
        q, g = low_rank.split(q), low_rank.split(g)
    q_by_chain, g_by_chain = (x.reshape(num_chains, -1, x.shape[-1]) for x in (q, g))
    sums = _accumulate_batch_sums(q_by_chain, g_by_chain, is_dense=dim <= FULL_MOMENTS_MAX_DIM)
    return estimate_bias_from_sums(sums, [preconditioner], are_at_draws=True)


def estimate_tail_bias(gradients: GradientsAtDraws | None, tails: TailTransform) -> BiasEstimate:
    """Estimate the bias of coordinates with heavy tails, after their transform.

    It is unknown without gradients.
    """
    dim = len(tails.coordinates)
    if gradients is None or not dim:
        unknown = Estimate(np.zeros(dim), np.full(dim, np.inf))
        return BiasEstimate(unknown, unknown)
    y = tails.transform(gradients.positions)
    g = tails.transform_gradient(gradients.positions, gradients.gradients)
    sums = _accumulate_batch_sums(y, g, is_dense=False)
    return estimate_bias_from_sums(sums, [Preconditioner(tails.center, np.ones(dim))]).bias


def measure_convergence(draws: np.ndarray, tails: TailTransform | None = None) -> ConvergenceStats:
    """Return R-hat and ESS of draws whose heavy-tailed coordinates are transformed.

    R-hat is NaN for a single chain: its halves differ because of few draws, which the ESS shows,
    and not because of modes.
    """
    if tails is not None:
        transformed = draws.copy()
        transformed[..., tails.coordinates] = tails.transform(draws)
        draws = transformed
    stats = ConvergenceStats.from_draws(draws)
    return stats if len(draws) > 1 else stats._replace(r_hat=np.full_like(stats.r_hat, np.nan))


def _accumulate_batch_sums(q: np.ndarray, g: np.ndarray, is_dense: bool) -> RunningSums:
    """Return sums over batches of each chain's draws by time; products are matrices if dense."""
    product = "bni,bnj->bij" if is_dense else "bni,bni->bi"
    num_batches = min(_NUM_SUMS_BATCHES, q.shape[1])
    batches = []
    for indices in np.array_split(np.arange(q.shape[1]), num_batches):
        x, y = q[:, indices], g[:, indices]
        weight = np.full(len(q), float(len(indices)))
        products = np.einsum(product, x, y), np.einsum(product, x, x)
        batches.append((weight, x.sum(1), y.sum(1), *products, weight * np.nan))
    return RunningSums(*map(np.concatenate, zip(*batches, strict=True)))  # type: ignore[arg-type]


# --- Estimates from draws of any kernel ---------------------------------------------------------


def estimate_bias_from_draws(
    draws: np.ndarray, gradient_slice: slice, gradients: np.ndarray
) -> BiasMeasurements:
    """Estimate the bias of draws, however they were generated.

    :param gradient_slice: the draws of each chain at which gradients are known.
    """
    known = GradientsAtDraws.from_arrays(draws[:, gradient_slice], gradients)
    everywhere = GradientsAtDraws(draws, _extrapolate_gradients(draws, gradient_slice, known))
    stein = estimate_bias_at_draws(everywhere, _fit_preconditioner(draws))
    tails = TailTransform.fit(draws.reshape(-1, draws.shape[-1]))
    bias = stein.bias.override_coordinates(tails.coordinates, estimate_tail_bias(known, tails))
    return BiasMeasurements((bias,), measure_convergence(draws, tails), stein, tails.coordinates)


def _extrapolate_gradients(
    draws: np.ndarray, gradient_slice: slice, known: GradientsAtDraws
) -> np.ndarray:
    """Return gradients at all draws whose sums are unbiased.

    A linear regression on the position predicts them; at the draws whose gradient is known its
    residual is added, times the number of draws for each of these. Sums of positions are then
    those of all draws. With too few known gradients for a regression the prediction is zero.
    """
    q, g = (x.reshape(-1, draws.shape[-1]) for x in known[:2])
    gradients = np.zeros_like(draws)
    if len(q) >= _MIN_DRAWS_PER_COORDINATE * draws.shape[-1]:
        center = q.mean(0)
        scale = np.where(q.std(0) > 0.0, q.std(0), 1.0)
        slope = np.linalg.lstsq((q - center) / scale, g - g.mean(0), rcond=None)[0]
        gradients = (draws - center) / scale @ slope + g.mean(0)
    draws_per_gradient = draws.shape[1] / known.positions.shape[1]
    residual = known.gradients - gradients[:, gradient_slice]
    gradients[:, gradient_slice] += draws_per_gradient * residual
    return gradients


def _fit_preconditioner(draws: np.ndarray) -> Preconditioner:
    """Return the preconditioner by the draws' covariance, or by their SDs if draws are few."""
    flat = draws.reshape(-1, draws.shape[-1])
    center, sd = flat.mean(0), flat.std(0)
    factor = np.where(sd > 0.0, sd, 1.0)
    if len(flat) < _MIN_DRAWS_PER_COORDINATE * flat.shape[1]:
        return Preconditioner(center, factor)
    correlation = np.atleast_2d(np.cov((flat - center) / factor, rowvar=False))
    try:
        return Preconditioner(center, factor[:, None] * np.linalg.cholesky(correlation))
    except np.linalg.LinAlgError:  # chains that are stuck
        return Preconditioner(center, factor)
