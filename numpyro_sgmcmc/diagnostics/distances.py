r"""Distances between a sample and a posterior: from its scores, or from a reference sample.

References: Gorham and Mackey (2017), *Measuring sample quality with kernels*; Liu, Lee and Jordan
(2016), *A kernelized Stein discrepancy for goodness-of-fit tests*; Franzese, Milios, Filippone and
Michiardi (2021), *Revisiting the effects of stochasticity for Hamiltonian samplers*, appendix F.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = ["KolmogorovDistance", "compute_ks_statistic", "kolmogorov_distance", "stein_discrepancy"]

_STEIN_BLOCK_SIZE_DRAWS = 512


def stein_discrepancy(
    draws: Any,
    scores: Any,
    *,
    kernel: str = "imq",
    length: float = 1.0,
    unbiased: bool = False,
) -> float:
    r"""Kernelised Stein discrepancy of draws from the law that has these scores.

    Zero in the limit of many draws if they are from that law, and, for the IMQ kernel, only then.
    Draws in whitened units make ``length`` mean something: :func:`~numpyro_sgmcmc.bias_report` and
    this function see the same errors, this one those of any shape, but as one number.

    :param draws: shape ``(n, d)``. Memory grows as ``512 n``, time as ``n^2 d``.
    :param scores: gradients of the log density at the draws, shape ``(n, d)``; or unbiased
        estimates, with a minibatch of its own for each, if ``unbiased``.
    :param kernel: ``"imq"``, :math:`(\ell^2 + |x - y|^2)^{-1/2}`, or ``"gaussian"``,
        :math:`e^{-|x - y|^2 / 2\ell^2}`.
    :param length: :math:`\ell`, positive.
    :param unbiased: whether to leave each draw's pair with itself out (a U-statistic, which may be
        negative; the squared discrepancy is returned). Default False: the discrepancy.
    :raises ValueError: for draws or scores that are not finite, or of different shapes.
    """
    draws, scores = (
        errors.validate_real_array("draws", draws),
        errors.validate_real_array("scores", scores),
    )
    x, s = (jnp.asarray(a, float) for a in (draws, scores))
    if x.shape != s.shape or x.ndim != 2 or not x.size:
        raise InvalidArgumentError(
            f"`draws` and `scores` must have one shape (n, d), but have {x.shape} and {s.shape}."
        )
    for name, a in (("draws", x), ("scores", s)):
        if not bool(jnp.isfinite(a).all()):
            raise InvalidArgumentError(
                f"`{name}` are not finite: leave out the diverging iterations."
            )
    errors.check_choice("kernel", kernel, tuple(_RADIAL_KERNELS))
    errors.check_positive("length", length)
    errors.check_bool("unbiased", unbiased)
    if unbiased and len(x) < 2:
        raise InvalidArgumentError("`unbiased` needs two draws at least.")
    total, own = _sum_stein_kernel(x - x.mean(0), s, jnp.asarray(length, x.dtype), kernel)
    n = len(x)
    if unbiased:
        return float((total - own) / (n * (n - 1)))
    return float(jnp.sqrt(jnp.maximum(total, 0.0)) / n)


def _imq_kernel(squared_distance: Array, length: Array) -> tuple[Array, Array, Array]:
    base = length**2 + squared_distance
    return base**-0.5, -0.5 * base**-1.5, 0.75 * base**-2.5


def _gaussian_kernel(squared_distance: Array, length: Array) -> tuple[Array, Array, Array]:
    rate = 0.5 / length**2
    k = jnp.exp(-rate * squared_distance)
    return k, -rate * k, rate**2 * k


_RADIAL_KERNELS = {"imq": _imq_kernel, "gaussian": _gaussian_kernel}
"""Kernels as functions of the squared distance, with their first two derivatives."""


@partial(jax.jit, static_argnames="kernel")
def _sum_stein_kernel(x: Array, s: Array, length: Array, kernel: str) -> tuple[Array, Array]:
    """The Stein kernel added up over all pairs, and over the pairs of each draw with itself."""
    n, d = x.shape
    chunk = min(n, _STEIN_BLOCK_SIZE_DRAWS)
    padded = -(-n // chunk) * chunk
    pad = [(0, padded - n), (0, 0)]
    blocks = (
        jnp.pad(x, pad).reshape(-1, chunk, d),
        jnp.pad(s, pad).reshape(-1, chunk, d),
        (jnp.arange(padded) < n).reshape(-1, chunk),
    )
    squares, slopes = jnp.square(x).sum(1), (x * s).sum(1)

    def pairs(block: tuple[Array, Array, Array]) -> Array:
        y, t, is_real = block
        u = jnp.maximum(jnp.square(y).sum(1)[:, None] + squares - 2.0 * y @ x.T, 0.0)
        k, slope, bend = _RADIAL_KERNELS[kernel](u, length)
        # (y - x) . (t - s), of the two terms with one derivative.
        along = (y * t).sum(1)[:, None] - y @ s.T - t @ x.T + slopes
        values = k * (t @ s.T) - 2.0 * slope * along - 2.0 * d * slope - 4.0 * u * bend
        return jnp.where(is_real[:, None], values, 0.0).sum()

    k, slope, _ = _RADIAL_KERNELS[kernel](jnp.zeros((), x.dtype), length)
    own = k * jnp.square(s).sum() - 2.0 * d * slope * n
    return lax.map(pairs, blocks).sum(), own


class KolmogorovDistance(NamedTuple):
    """
    - **distance** - largest difference between the distribution functions of draws and reference,
      for each marginal, from 0 to 1.
    - **self_distance** - the same between two halves of the reference: what not even a perfect
      sampler falls below with half as many draws.
    """

    distance: np.ndarray
    self_distance: np.ndarray


def kolmogorov_distance(draws: Any, reference: Any) -> KolmogorovDistance:
    """Kolmogorov distance of marginals, for example predictions at test points.

    The numbers of draws limit it: compare it with the self-distance, and draws with a reference
    of as many effective draws.

    :param draws: shape ``(n, ...)``, one marginal for each place of the other axes.
    :param reference: draws from a run that is trusted, shape ``(m, ...)``.
    :return: distances of shape ``(...)``.
    :raises ValueError: for shapes that do not match, fewer than two draws, or values not finite.
    """
    a = errors.validate_real_array("draws", draws).astype(np.float64)
    b = errors.validate_real_array("reference", reference).astype(np.float64)
    if a.ndim < 1 or a.shape[1:] != b.shape[1:] or len(a) < 2 or len(b) < 2:
        raise InvalidArgumentError(
            "`draws` and `reference` must have two draws or more along the first axis and the same "
            f"other axes, but their shapes are {a.shape} and {b.shape}."
        )
    for name, x in (("draws", a), ("reference", b)):
        if not np.isfinite(x).all():
            raise InvalidArgumentError(
                f"`{name}` are not finite: leave out the diverging iterations."
            )
    half = len(b) // 2
    return KolmogorovDistance(compute_ks_statistic(a, b), compute_ks_statistic(b[:half], b[half:]))


def compute_ks_statistic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Kolmogorov distance between two samples, ``(n, ...)`` and ``(m, ...)``, of each marginal."""
    shape = a.shape[1:]
    columns = zip(a.reshape(len(a), -1).T, b.reshape(len(b), -1).T, strict=True)
    return np.array(
        [_compute_max_cdf_difference(np.sort(x), np.sort(y)) for x, y in columns]
    ).reshape(shape)


def _compute_max_cdf_difference(x: np.ndarray, y: np.ndarray) -> float:
    both = np.concatenate([x, y])
    below_x, below_y = (np.searchsorted(s, both, side="right") / len(s) for s in (x, y))
    return float(np.abs(below_x - below_y).max())
