r"""From moments to statements on bias, with standard errors; NumPy, float64, no sampler in sight.

With :math:`g` an unbiased gradient of the potential at :math:`q`, whose law is the chain's,

.. math::

    C = \operatorname{Cov}(q, g) = \Sigma_\text{chain}\,\Sigma_\text{posterior}^{-1}, \qquad
    m_\text{chain} - m_\text{posterior} = \Sigma_\text{posterior}\,E[g]

exactly for a Gaussian posterior, and to first order in the bias for any other (Stein's identity:
:math:`C = I` and :math:`E[g] = 0` where there is none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "BiasEstimate",
    "Estimate",
    "SteinEstimates",
    "compute_between_chain_r_hat",
    "compute_configurational_temperature",
    "compute_posterior_covariance",
    "estimate_bias_from_sums",
    "jackknife",
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

    :param sums: a :class:`~numpyro_sgmcmc.chain.moments.Sums` whose fields have a leading axis of
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

    :param batch_sums: a :class:`~numpyro_sgmcmc.chain.moments.Sums` with a leading axis of batches,
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
