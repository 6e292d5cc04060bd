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
    "Estimate",
    "Estimates",
    "Witness",
    "configurational_temperature",
    "disagreement",
    "estimate",
    "jackknife",
    "posterior_covariance",
]

_CLEARLY = 3.0


class Estimate(NamedTuple):
    """
    - **value** - estimates, of any shape.
    - **error** - their standard errors, of the same shape; NaN for a single batch.
    """

    value: np.ndarray
    error: np.ndarray


class Witness(NamedTuple):
    """
    - **shift** - chain's mean minus the posterior's, in posterior sds, shape ``(d,)``.
    - **inflation** - chain's sd over the posterior's, minus one, shape ``(d,)``.
    """

    shift: Estimate
    inflation: Estimate

    def replaced(self, where: np.ndarray, by: Witness) -> Witness:
        """With some coordinates told by another witness, who knows these alone."""
        return Witness(*(_replaced(a, where, b) for a, b in zip(self, by, strict=True)))

    def moved(self, by: Estimate) -> Witness:
        """With means that are off by so much more, of which it knows nothing."""
        shift = Estimate(self.shift.value + by.value, np.hypot(self.shift.error, by.error))
        return self._replace(shift=shift)


class Estimates(NamedTuple):
    r"""
    - **shift** - chain's mean minus the posterior's, in posterior sds, shape ``(d,)``.
    - **inflation** - chain's sd over the posterior's, minus one, shape ``(d,)``.
    - **configurational** - configurational temperature :math:`\operatorname{tr} C / d`.
    - **kinetic** - kinetic temperature; NaN without momenta.
    - **covariance** - the chain's, in whitened coordinates, ``(d, d)`` or ``(d,)``.
    - **posterior** - the posterior's, likewise.
    - **chance** - Monte Carlo standard errors of the chain's own mean and sds, in its sds, shape
      ``(2, d)``: what is due to the number of draws.
    """

    shift: Estimate
    inflation: Estimate
    configurational: Estimate
    kinetic: Estimate
    covariance: np.ndarray
    posterior: np.ndarray
    chance: np.ndarray

    @property
    def witness(self) -> Witness:
        """Shift and inflation alone."""
        return Witness(self.shift, self.inflation)


def _replaced(found: Estimate, where: np.ndarray, by: Estimate) -> Estimate:
    value, error = found.value.copy(), found.error.copy()
    value[where], error[where] = by
    return Estimate(value, error)


def estimate(sums: Any, factor: np.ndarray) -> Estimates:
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
        c = over_batches(lambda t: _moments(t)[1])
        # Entries lost in noise would pile up in the inverse.
        is_clear = np.abs(c.value) > _CLEARLY * c.error
        np.fill_diagonal(is_clear, True)

    def bias(t: list[np.ndarray]) -> np.ndarray:
        gradient, c, spread = _moments(t)
        posterior = posterior_covariance(c, spread, is_clear)
        wide, right = (_variances(x, factor) for x in (spread, posterior))
        moved = posterior @ gradient if is_full else posterior * gradient
        moved = _push(moved, factor)
        with np.errstate(invalid="ignore"):
            sd = np.sqrt(right)
            return np.stack([moved / sd, np.sqrt(wide) / sd - 1.0])

    def configurational(t: list[np.ndarray]) -> np.ndarray:
        c = _moments(t)[1]
        return np.asarray(np.mean(np.diagonal(c) if is_full else c))

    both = over_batches(bias)
    _, whole, spread = _moments(total)
    sd = np.sqrt(_variances(spread, factor))

    def own(t: list[np.ndarray]) -> np.ndarray:
        return np.stack([_push(t[1] / t[0], factor), np.sqrt(_variances(_moments(t)[2], factor))])

    return Estimates(
        Estimate(both.value[0], both.error[0]),
        Estimate(both.value[1], both.error[1]),
        over_batches(configurational),
        over_batches(lambda t: t[5] / t[0]),
        spread,
        posterior_covariance(whole, spread, is_clear),
        over_batches(own).error / sd,
    )


def configurational_temperature(batches: Any) -> float:
    r""":math:`\operatorname{tr} C / d` of all chains together; NaN before the first reading.

    :param batches: a :class:`~numpyro_sgmcmc.chain.moments.Sums` with a leading axis of batches,
        and one of chains before it where there are several.
    """
    ndim = np.ndim(batches.weight)
    total = [np.asarray(x, np.float64).sum(tuple(range(ndim))) for x in batches]
    if not total[0] > 0:
        return float("nan")
    c = _moments(total)[1]
    return float(np.mean(np.diagonal(c) if c.ndim == 2 else c))


def disagreement(sums: Any, factor: np.ndarray) -> np.ndarray:
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
    means = np.stack([_push(t[1] / t[0], factor) for t in each])
    within = np.mean([_variances(_moments(list(t))[2], factor) for t in each], 0)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # of lost chains
        return np.sqrt(1.0 + means.var(0, ddof=1) / np.maximum(within, 0.0))


def posterior_covariance(
    c: np.ndarray, spread: np.ndarray, is_clear: np.ndarray | None = None
) -> np.ndarray:
    """The posterior's covariance ``C^-1 S`` from Stein's matrix and the chain's covariance.

    :param c: C, shape ``(d, d)`` or ``(d,)``.
    :param spread: S, of the same shape.
    :param is_clear: entries of C that are used; all where None.
    """
    if c.ndim == 1:
        return spread / c
    c = c if is_clear is None else np.where(is_clear, c, 0.0)
    try:
        found = np.linalg.solve(c, spread)
    except np.linalg.LinAlgError:
        return np.full_like(spread, np.nan)
    return (found + found.T) / 2.0


def _moments(total: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean gradient, Stein's matrix C and the chain's covariance."""
    weight, position, gradient, stein, spread, _ = total
    q, g = position / weight, gradient / weight
    if stein.ndim == 1:
        return g, stein / weight - q * g, spread / weight - q * q
    return g, stein / weight - np.outer(q, g), spread / weight - np.outer(q, q)


def _push(q: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """From whitened differences to positions'."""
    return factor @ q if factor.ndim == 2 else factor * q


def _variances(covariance: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Variances of the positions whose whitened covariance this is."""
    if covariance.ndim == 2:
        push = np.diag(factor) if factor.ndim == 1 else factor
        return np.einsum("ij,jk,ik->i", push, covariance, push)
    return np.square(factor) @ covariance if factor.ndim == 2 else np.square(factor) * covariance


def jackknife(whole: Any, without: Sequence[Any], shares: np.ndarray | None = None) -> Estimate:
    """The estimate with its error from leaving out one batch at a time.

    :param whole: the estimate from all batches, of any shape.
    :param without: those from all batches but one, in their order.
    :param shares: each batch's share of the whole, shape ``(batches,)``. Default: equal.
    :return: errors are NaN for a single batch.

    Reference: Busing, Meijer and van der Leeden (1999), *Delete-m jackknife for unequal m*.
    """
    shares = np.full(len(without), 1.0 / len(without)) if shares is None else shares
    num = len(shares)
    if num < 2:
        return Estimate(whole, np.full_like(whole, np.nan))
    shape = (num,) + (1,) * np.ndim(whole)
    h = 1.0 / shares.reshape(shape)
    left = np.stack(without)
    centre = num * whole - ((1.0 - 1.0 / h) * left).sum(0)
    pseudo = h * whole - (h - 1.0) * left
    return Estimate(whole, np.sqrt((np.square(pseudo - centre) / (h - 1.0)).mean(0)))
