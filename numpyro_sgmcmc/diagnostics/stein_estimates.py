r"""Estimates of a chain's bias by Stein's identity, with standard errors. NumPy, float64.

For positions :math:`q` of the chain and unbiased gradients :math:`g` of the potential there,

.. math::

    C = \operatorname{Cov}(q, g) = \Sigma_\text{chain}\,\Sigma_\text{posterior}^{-1}, \qquad
    m_\text{chain} - m_\text{posterior} = \Sigma_\text{posterior}\,E[g]

exactly for a Gaussian posterior, and to first order in the bias for any other (Stein's identity,
integration by parts: :math:`C = I` and :math:`E[g] = 0` for draws of the posterior). The identity
holds however the draws were generated.

:func:`estimate_bias_from_sums` takes the sums that a chain accumulates,
:func:`compute_sums_at_draws` makes such sums of gradients taken at draws after the run, and
:func:`estimate_bias_from_draws` takes gradients at some of the draws alone.
:class:`BiasMeasurements` collects the estimates of one run.

Reference: Gorham and Mackey (2015), *Measuring sample quality with Stein's method*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.pilot import compute_r_hat
from numpyro_sgmcmc.diagnostics.geometry import FunnelNeck, TailTransform
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats, Sums
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import FULL_MOMENTS_MAX_DIM, RunningSums

_MIN_STEIN_ENTRY_Z = 3.0
"""Standard errors: off-diagonal entries of C below are set to zero before C is inverted."""

_NUM_SUMS_BATCHES = 16
"""Batches of draws by time for the jackknife, as many as a chain's running sums have."""

_MIN_DRAWS_PER_COORDINATE = 10
"""Draws per coordinate for a sample covariance or a linear regression to be used."""


class Estimate(NamedTuple):
    """Estimates with standard errors.

    - **value** - estimates, of any shape.
    - **error** - their standard errors, of the same shape; NaN for a single batch.
    """

    value: np.ndarray
    error: np.ndarray


class BiasEstimate(NamedTuple):
    """Bias of the chains' mean and SD in each coordinate.

    - **mean_bias** - chains' mean minus the posterior's, in posterior SDs, shape ``(d,)``.
    - **sd_inflation** - chains' SD over the posterior's, minus one, shape ``(d,)``.
    """

    mean_bias: Estimate
    sd_inflation: Estimate

    def override_coordinates(self, indices: np.ndarray, replacement: BiasEstimate) -> BiasEstimate:
        """Return the estimate with some coordinates replaced."""

        def override(original: Estimate, new: Estimate) -> Estimate:
            value, error = original.value.copy(), original.error.copy()
            value[indices], error[indices] = new
            return Estimate(value, error)

        return BiasEstimate(
            override(self.mean_bias, replacement.mean_bias),
            override(self.sd_inflation, replacement.sd_inflation),
        )

    def add_mean_bias(self, other: Estimate) -> BiasEstimate:
        """Return the estimate with a mean bias added that gradients do not show."""
        value = self.mean_bias.value + other.value
        return self._replace(mean_bias=Estimate(value, np.hypot(self.mean_bias.error, other.error)))


class SteinEstimates(NamedTuple):
    r"""Estimates by Stein's identity.

    - **bias** - bias of the chains' mean and SDs.
    - **configurational_temperature** - :math:`\operatorname{tr} C / d`, 1 for an exact sampler.
    - **kinetic_temperature** - mean square of the momenta; NaN without momenta.
    - **chain_covariance** - the chains' covariance in preconditioned coordinates, shape ``(d, d)``
      or its diagonal ``(d,)``.
    - **posterior_covariance** - the posterior's, of the same shape.
    - **mcse** - Monte Carlo standard errors of the chains' mean and SDs, in the chains' SDs, shape
      ``(2, d)``.
    """

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

    @property
    def num_draws(self) -> int:
        """Number of draws of all chains."""
        return self.positions[..., 0].size


class BiasMeasurements(NamedTuple):
    """Everything that was measured of a run's bias.

    - **bias_estimates** - one or more estimates of the same bias; the first is printed.
    - **convergence** - R-hat and ESS of each coordinate.
    - **stein** - temperatures, covariances and Monte Carlo errors.
    - **heavy_tailed_coordinates** - coordinates judged after a tail transform, shape ``(k,)``.
    - **funnel_necks** - high-curvature regions that the chains do not reach.
    - **num_gradient_draws** - draws at which gradients were taken after the run.
    - **noise_mean_bias** - predicted mean bias by gradient noise, contained in the estimates, in
      posterior SDs; shape ``(d,)``, or ``(0,)`` where none was predicted.
    """

    bias_estimates: tuple[BiasEstimate, ...]
    convergence: ConvergenceStats
    stein: SteinEstimates
    heavy_tailed_coordinates: np.ndarray = np.zeros(0, int)
    funnel_necks: tuple[FunnelNeck, ...] = ()
    num_gradient_draws: int = 0
    noise_mean_bias: np.ndarray = np.zeros(0)


# --- Estimates from sums ------------------------------------------------------------------------


def estimate_bias_from_sums(sums: RunningSums | Sums, factor: np.ndarray) -> SteinEstimates:
    """Estimate the bias of a chain's mean and SDs, coordinate by coordinate.

    :param sums: fields with a leading axis of approximately independent batches.
    :param factor: factor L of the preconditioner, shape ``(d,)`` or ``(d, d)``.
    :return: estimates with jackknife standard errors over batches.
    """
    sums = Sums.from_arrays(sums)
    has_weight = sums.weight > 0
    sums = sums.map(lambda x: x[has_weight])
    total = sums.map(lambda x: x.sum(0))
    weights = sums.weight / total.weight
    num_batches = len(weights) if len(weights) > 1 else 0
    leave_one_out = [
        Sums(*(t - x[b] for t, x in zip(total, sums, strict=True))) for b in range(num_batches)
    ]

    def over_batches(statistic: Callable[[Sums], np.ndarray]) -> Estimate:
        return jackknife(statistic(total), [statistic(x) for x in leave_one_out], weights)

    is_full = total.position_gradient.ndim == 2
    is_significant = None
    if is_full:
        matrix = over_batches(lambda x: _compute_central_moments(x).stein_matrix)
        # Sampling noise of all entries would accumulate in the inverse.
        is_significant = np.abs(matrix.value) > _MIN_STEIN_ENTRY_Z * matrix.error
        np.fill_diagonal(is_significant, True)

    def bias(x: Sums) -> np.ndarray:
        gradient, c, chain = _compute_central_moments(x)
        posterior = compute_posterior_covariance(c, chain, is_significant)
        chain_variance = _compute_position_variances(chain, factor)
        posterior_variance = _compute_position_variances(posterior, factor)
        mean_difference = posterior @ gradient if is_full else posterior * gradient
        with np.errstate(invalid="ignore"):
            sd = np.sqrt(posterior_variance)
            return np.stack(
                [
                    _scale_to_positions(mean_difference, factor) / sd,
                    np.sqrt(chain_variance) / sd - 1.0,
                ]
            )

    def mean_and_sd(x: Sums) -> np.ndarray:
        variance = _compute_position_variances(_compute_central_moments(x).covariance, factor)
        mean = _scale_to_positions(x.position / x.weight, factor)
        return np.stack([mean, np.sqrt(variance)])

    bias_of_mean_and_sd = over_batches(bias)
    _, c, chain = _compute_central_moments(total)
    return SteinEstimates(
        bias=BiasEstimate(
            *(Estimate(*x) for x in zip(*bias_of_mean_and_sd, strict=True)),
        ),
        configurational_temperature=over_batches(_compute_mean_diagonal),
        kinetic_temperature=over_batches(lambda x: x.kinetic_temperature / x.weight),
        chain_covariance=chain,
        posterior_covariance=compute_posterior_covariance(c, chain, is_significant),
        mcse=over_batches(mean_and_sd).error / np.sqrt(_compute_position_variances(chain, factor)),
    )


def compute_configurational_temperature(batch_sums: RunningSums | Sums) -> float:
    r"""Return :math:`\operatorname{tr} C / d` of all chains; NaN without an iteration.

    :param batch_sums: fields with a leading axis of batches, and one of chains before it if there
        are several.
    """
    axes = tuple(range(np.ndim(batch_sums.weight)))
    total = Sums.from_arrays(batch_sums).map(lambda x: x.sum(axes))
    return float(_compute_mean_diagonal(total)) if total.weight > 0 else float("nan")


def compute_between_chain_r_hat(sums: Sums, factor: np.ndarray) -> np.ndarray:
    r"""Return R-hat of each coordinate, without a split of chains, shape ``(d,)``.

    NaN for a single chain.

    :param sums: fields with a leading axis of chains.
    :param factor: factor L of the preconditioner, shape ``(d,)`` or ``(d, d)``.
    """
    sums = Sums.from_arrays(sums)
    indices = np.flatnonzero(sums.weight > 0)
    if len(indices) < 2:
        return np.full(factor.shape[0], np.nan)
    chains = [Sums(*(x[c] for x in sums)) for c in indices]  # without those of weight zero
    means = np.stack([_scale_to_positions(x.position / x.weight, factor) for x in chains])
    within = np.mean(
        [_compute_position_variances(_compute_central_moments(x)[2], factor) for x in chains], 0
    )
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # chains that are stuck
        return compute_r_hat(means, np.maximum(within, 0.0))


def compute_posterior_covariance(
    stein_matrix: np.ndarray, chain_covariance: np.ndarray, is_significant: np.ndarray | None = None
) -> np.ndarray:
    r"""Return the posterior's covariance :math:`C^{-1}\Sigma_\text{chain}`, symmetrised.

    :param stein_matrix: C, shape ``(d, d)`` or ``(d,)``.
    :param chain_covariance: the chains' covariance, of the same shape.
    :param is_significant: entries of C that are used; all where None.
    """
    if stein_matrix.ndim == 1:
        return chain_covariance / stein_matrix
    if is_significant is not None:
        stein_matrix = np.where(is_significant, stein_matrix, 0.0)
    try:
        covariance = np.linalg.solve(stein_matrix, chain_covariance)
    except np.linalg.LinAlgError:
        return np.full_like(chain_covariance, np.nan)
    return (covariance + covariance.T) / 2.0


class _CentralMoments(NamedTuple):
    """Mean gradient, Stein's matrix C and the covariance of the positions."""

    mean_gradient: np.ndarray
    stein_matrix: np.ndarray
    covariance: np.ndarray


def _compute_central_moments(total: Sums) -> _CentralMoments:
    weight = total.weight
    q, g = total.position / weight, total.gradient / weight
    product = np.outer if total.position_gradient.ndim == 2 else np.multiply
    return _CentralMoments(
        g,
        total.position_gradient / weight - product(q, g),
        total.position_position / weight - product(q, q),
    )


def _compute_mean_diagonal(total: Sums) -> np.ndarray:
    """Return the mean of the diagonal of Stein's matrix C."""
    c = _compute_central_moments(total).stein_matrix
    return np.asarray(np.mean(np.diagonal(c) if c.ndim == 2 else c))


def _scale_to_positions(q: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return a preconditioned displacement as one of positions."""
    return factor @ q if factor.ndim == 2 else factor * q


def _compute_position_variances(covariance: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return the variances of positions, given a covariance of preconditioned ones."""
    if covariance.ndim == 2:
        matrix = _as_matrix(factor)
        return np.einsum("ij,jk,ik->i", matrix, covariance, matrix)
    return np.square(factor) @ covariance if factor.ndim == 2 else np.square(factor) * covariance


def _as_matrix(factor: np.ndarray) -> np.ndarray:
    return np.diag(factor) if factor.ndim == 1 else factor


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


def convert_sums_to_first_chain(sums: Sums, preconditioners: Sequence[Preconditioner]) -> Sums:
    r"""Return the sums of all chains in the first chain's preconditioned coordinates.

    With :math:`q_0 = Mq + b` gradients become :math:`g_0 = M^{-\top} g`. The low-rank part of a
    preconditioner is left out: sums are accumulated without it.

    :param sums: fields with leading axes of chains and of batches.
    :param preconditioners: preconditioner of each chain; diagonal where the sums are.
    """
    first = preconditioners[0]
    if all(np.array_equal(p.center, first.center) for p in preconditioners):
        return sums
    converted = [
        _convert_sums(Sums(*(x[c] for x in sums)), p, first) for c, p in enumerate(preconditioners)
    ]
    return Sums(*(np.stack(x) for x in zip(*converted, strict=True)))


def _convert_sums(sums: Sums, source: Preconditioner, destination: Preconditioner) -> Sums:
    """Return one chain's batches of sums in another chain's coordinates."""
    sums = Sums.from_arrays(sums)
    weight = sums.weight[:, None]
    displacement = source.center - destination.center
    if sums.position_gradient.ndim == 2:  # batches of diagonals
        m, b = source.factor / destination.factor, displacement / destination.factor
        gradient = sums.gradient / m
        return sums._replace(
            position=m * sums.position + weight * b,
            gradient=gradient,
            position_gradient=sums.position_gradient + b * gradient,
            position_position=m * m * sums.position_position
            + 2.0 * m * b * sums.position
            + weight * b * b,
        )
    inverse = np.linalg.inv(_as_matrix(destination.factor))
    m, b = inverse @ _as_matrix(source.factor), inverse @ displacement
    m_inverse = np.linalg.inv(m)
    position, gradient = sums.position @ m.T, sums.gradient @ m_inverse
    cross = position[:, :, None] * b
    return sums._replace(
        position=position + weight * b,
        gradient=gradient,
        position_gradient=m @ sums.position_gradient @ m_inverse
        + b[:, None] * gradient[:, None, :],
        position_position=m @ sums.position_position @ m.T
        + cross
        + cross.mT
        + weight[..., None] * np.outer(b, b),
    )


# --- Estimates from gradients at draws ----------------------------------------------------------


def compute_sums_at_draws(
    gradients: GradientsAtDraws, preconditioner: Preconditioner
) -> tuple[Sums, np.ndarray]:
    """Return sums over draws and the gradients there, in batches by time, and the factor L.

    :param preconditioner: coordinates of the sums; its low-rank part is left out, so that each
        coordinate belongs to one site.
    """
    shape, dim = gradients.positions.shape, gradients.positions.shape[-1]
    center, factor = (np.asarray(x, np.float64) for x in preconditioner[:2])
    preconditioner = Preconditioner(center, factor)
    q = preconditioner.solve(gradients.positions.reshape(-1, dim) - center).reshape(shape)
    g = preconditioner.apply_transpose(gradients.gradients.reshape(-1, dim)).reshape(shape)
    return _accumulate_batch_sums(q, g, is_dense=dim <= FULL_MOMENTS_MAX_DIM), factor


def estimate_bias_at_draws(
    gradients: GradientsAtDraws, preconditioner: Preconditioner
) -> BiasEstimate:
    """Estimate the bias from gradients at draws, in a preconditioner's coordinates."""
    return estimate_bias_from_sums(*compute_sums_at_draws(gradients, preconditioner)).bias


def estimate_tail_bias(gradients: GradientsAtDraws, tail_transform: TailTransform) -> BiasEstimate:
    """Estimate the bias of coordinates with heavy tails, after their transform."""
    dim = len(tail_transform.coordinates)
    if not dim:
        return BiasEstimate(*[Estimate(np.zeros(0), np.zeros(0))] * 2)
    y = tail_transform.transform(gradients.positions)
    g = tail_transform.transform_gradient(gradients.positions, gradients.gradients)
    sums = _accumulate_batch_sums(y, g, is_dense=False)
    return estimate_bias_from_sums(sums, np.ones(dim)).bias


def transform_tails(draws: np.ndarray, tail_transform: TailTransform) -> np.ndarray:
    """Return a copy of the draws with their heavy-tailed coordinates transformed."""
    transformed = draws.copy()
    transformed[..., tail_transform.coordinates] = tail_transform.transform(draws)
    return transformed


def _accumulate_batch_sums(q: np.ndarray, g: np.ndarray, is_dense: bool) -> Sums:
    """Return sums over batches of each chain's draws by time, with a leading axis of batches.

    :param is_dense: whether products are matrices.
    """
    product = "bni,bnj->bij" if is_dense else "bni,bni->bi"
    num_batches = min(_NUM_SUMS_BATCHES, q.shape[1])
    batches = []
    for indices in np.array_split(np.arange(q.shape[1]), num_batches):
        x, y = q[:, indices], g[:, indices]
        weight = np.full(len(q), float(len(indices)))
        batches.append(
            Sums(
                weight=weight,
                position=x.sum(1),
                gradient=y.sum(1),
                position_gradient=np.einsum(product, x, y),
                position_position=np.einsum(product, x, x),
                kinetic_temperature=weight * np.nan,
            )
        )
    return Sums(*(np.concatenate(x) for x in zip(*batches, strict=True)))


# --- Estimates from draws of any kernel ---------------------------------------------------------


def estimate_bias_from_draws(
    draws: np.ndarray, gradient_slice: slice, gradients: np.ndarray
) -> BiasMeasurements:
    """Estimate the bias of draws, however they were generated.

    :param draws: all draws as flat positions, shape ``(chains, draws, d)``.
    :param gradient_slice: the draws of each chain at which gradients are gradients_at_draws.
    :param gradients: unbiased gradients of the potential there.
    """
    gradients_at_draws = GradientsAtDraws.from_arrays(draws[:, gradient_slice], gradients)
    everywhere = GradientsAtDraws.from_arrays(
        draws, _extrapolate_gradients(draws, gradient_slice, gradients_at_draws)
    )
    stein = estimate_bias_from_sums(*compute_sums_at_draws(everywhere, _fit_preconditioner(draws)))
    tails = TailTransform.fit(draws.reshape(-1, draws.shape[-1]))
    convergence = ConvergenceStats.from_draws(transform_tails(draws, tails))
    if len(draws) == 1:  # halves of one chain differ because of few draws, which the ESS shows
        convergence = convergence._replace(r_hat=np.full_like(convergence.r_hat, np.nan))
    bias = stein.bias.override_coordinates(
        tails.coordinates, estimate_tail_bias(gradients_at_draws, tails)
    )
    return BiasMeasurements((bias,), convergence, stein, tails.coordinates)


def _extrapolate_gradients(
    draws: np.ndarray, gradient_slice: slice, gradients_at_draws: GradientsAtDraws
) -> np.ndarray:
    """Return gradients at all draws whose sums are unbiased.

    A linear regression on the position predicts them; at the draws whose gradient is known its
    residual is added, times the number of draws for each of these. Sums of positions are then
    those of all draws. With too few known gradients for a regression the prediction is zero.
    """
    dim = draws.shape[-1]
    q, g = (
        gradients_at_draws.positions.reshape(-1, dim),
        gradients_at_draws.gradients.reshape(-1, dim),
    )
    gradients = np.zeros_like(draws)
    if len(q) >= _MIN_DRAWS_PER_COORDINATE * dim:
        center = q.mean(0)
        scale = np.where(q.std(0) > 0.0, q.std(0), 1.0)
        slope = np.linalg.lstsq((q - center) / scale, g - g.mean(0), rcond=None)[0]
        gradients = (draws - center) / scale @ slope + g.mean(0)
    draws_per_gradient = draws.shape[1] / gradients_at_draws.positions.shape[1]
    gradients[:, gradient_slice] += draws_per_gradient * (
        gradients_at_draws.gradients - gradients[:, gradient_slice]
    )
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
