r"""Distances between draws and a posterior: from its scores, or from draws of a reference run.

:func:`stein_discrepancy` needs gradients of the log density, :func:`kolmogorov_distance` a
reference.

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
from scipy.stats import ks_2samp

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.errors import InvalidArgumentError

# Draws per block of the Stein kernel matrix: a bound on memory, of 512 n entries for n draws.
_STEIN_BLOCK_SIZE = 512


def stein_discrepancy(
    draws: Any,
    scores: Any,
    *,
    kernel: str = "imq",
    length: float = 1.0,
    unbiased: bool = False,
) -> float:
    r"""Return the kernelised Stein discrepancy of draws from the distribution with these scores.

    With a base kernel k of the distance :math:`r = |x - y|` and scores :math:`s = \nabla \log p`,

    .. math:: k_p(x, y) = s_x^\top s_y k + s_x^\top \nabla_y k + s_y^\top \nabla_x k
              + \operatorname{tr} \nabla_x \nabla_y k

    has mean zero over pairs of independent draws of p. The discrepancy is the root of the mean of
    :math:`k_p` over all pairs. It tends to zero with the number of draws if they are from p. With
    the IMQ kernel, it tends to zero only then. Use draws in preconditioned coordinates, in which
    posterior SDs are about one.

    :param draws: shape ``(n, d)``. Memory grows as ``512 n``, time as ``n^2 d``.
    :param scores: gradients of the log density at the draws, shape ``(n, d)``. With ``unbiased``,
        also unbiased estimates of them, each from an independent minibatch.
    :param kernel: base kernel: ``"imq"`` (default), :math:`(\ell^2 + r^2)^{-1/2}`, or
        ``"gaussian"``, :math:`e^{-r^2 / 2\ell^2}`.
    :param length: length scale :math:`\ell`, positive, in the units of the draws. Default 1.
    :param unbiased: whether to leave out each draw's pair with itself and return the squared
        discrepancy, a U-statistic that may be negative. Default False.
    :return: the discrepancy, or its square if ``unbiased``.
    :raises ValueError: for draws or scores that are not finite, or of different shapes.
    """
    draws = errors.validate_real_array("draws", draws)
    scores = errors.validate_real_array("scores", scores)
    x, s = jnp.asarray(draws, float), jnp.asarray(scores, float)
    if x.shape != s.shape or x.ndim != 2 or not x.size:
        raise InvalidArgumentError(
            f"`draws` has shape {x.shape} and `scores` has shape {s.shape}.",
            "pass two arrays of the same shape (n, d).",
            "distance-shapes",
        )
    _check_finite("draws", x)
    _check_finite("scores", s)
    errors.check_choice("kernel", kernel, tuple(_RADIAL_KERNELS))
    errors.check_positive("length", length)
    errors.check_bool("unbiased", unbiased)
    n = len(x)
    if unbiased and n < 2:
        raise InvalidArgumentError(
            "`unbiased=True` needs pairs of draws, but `draws` has one draw.",
            "pass more draws.",
            "distance-shapes",
        )
    total, diagonal = _sum_stein_kernel(x - x.mean(0), s, jnp.asarray(length, x.dtype), kernel)
    if unbiased:
        return float((total - diagonal) / (n * (n - 1)))
    return float(jnp.sqrt(jnp.maximum(total, 0.0)) / n)


def _imq_kernel(squared_distance: Array, length: Array) -> tuple[Array, Array, Array]:
    base = length**2 + squared_distance
    return base**-0.5, -0.5 * base**-1.5, 0.75 * base**-2.5


def _gaussian_kernel(squared_distance: Array, length: Array) -> tuple[Array, Array, Array]:
    rate = 0.5 / length**2
    k = jnp.exp(-rate * squared_distance)
    return k, -rate * k, rate**2 * k


# Kernels as functions of the squared distance u, with their first two derivatives in u.
_RADIAL_KERNELS = {"imq": _imq_kernel, "gaussian": _gaussian_kernel}


@partial(jax.jit, static_argnames="kernel")
def _sum_stein_kernel(x: Array, s: Array, length: Array, kernel: str) -> tuple[Array, Array]:
    """Return the sums of the Stein kernel over all pairs, and over those of a draw with itself.

    For k(u) with u = |x - y|^2 the kernel is
    k s_x.s_y - 2 k' (x - y).(s_x - s_y) - 2 d k' - 4 u k''.
    """
    n, d = x.shape
    squared_norms, x_dot_s = jnp.square(x).sum(1), (x * s).sum(1)

    def sum_pairs(draw: tuple[Array, Array]) -> Array:
        """Return the sum over all pairs with a draw y of score t."""
        y, t = draw
        u = jnp.maximum(y @ y + squared_norms - 2.0 * x @ y, 0.0)
        k, dk, d2k = _RADIAL_KERNELS[kernel](u, length)
        cross = y @ t - s @ y - x @ t + x_dot_s  # (y - x) . (t - s)
        return (k * (s @ t) - 2.0 * dk * cross - 2.0 * d * dk - 4.0 * u * d2k).sum()

    k, dk, _ = _RADIAL_KERNELS[kernel](jnp.zeros((), x.dtype), length)
    diagonal = k * jnp.square(s).sum() - 2.0 * d * dk * n
    return lax.map(sum_pairs, (x, s), batch_size=_STEIN_BLOCK_SIZE).sum(), diagonal


class KolmogorovDistance(NamedTuple):
    """
    - **distance** - largest difference between the distribution functions of draws and reference,
      for each marginal, from 0 to 1.
    - **self_distance** - the same between two halves of the reference: that of a perfect sampler
      with half as many draws.
    """

    distance: np.ndarray
    self_distance: np.ndarray


def kolmogorov_distance(draws: Any, reference: Any) -> KolmogorovDistance:
    """Return the Kolmogorov distance of marginals, for example of predictions at test points.

    The distance depends on the effective sample sizes. Use a reference with the same ESS as the
    draws, and compare the distance with that between two independent references.

    :param draws: shape ``(n, ...)``, one marginal for each index of the other axes.
    :param reference: draws of a trusted run, shape ``(m, ...)``.
    :return: a named tuple of two arrays of shape ``(...)``: ``distance``, from 0 to 1, and
        ``self_distance``, the distance between two halves of the reference.
    :raises ValueError: for shapes that do not match, fewer than two draws, or values not finite.
    """
    a = errors.validate_real_array("draws", draws).astype(np.float64)
    b = errors.validate_real_array("reference", reference).astype(np.float64)
    if a.ndim < 1 or a.shape[1:] != b.shape[1:] or len(a) < 2 or len(b) < 2:
        raise InvalidArgumentError(
            f"`draws` has shape {a.shape} and `reference` has shape {b.shape}.",
            "pass two arrays with at least two draws each along the first axis, and with equal "
            "other axes.",
            "distance-shapes",
        )
    _check_finite("draws", a)
    _check_finite("reference", b)
    half = len(b) // 2
    return KolmogorovDistance(compute_ks_statistic(a, b), compute_ks_statistic(b[:half], b[half:]))


def compute_ks_statistic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the Kolmogorov distances of samples ``(n, ...)`` and ``(m, ...)``, shape ``(...)``."""
    # The exact p-value would take longer; neither is used.
    return np.asarray(ks_2samp(a, b, method="asymp", axis=0).statistic)


def _check_finite(name: str, x: Any) -> None:
    if not bool(np.isfinite(x).all()):
        raise InvalidArgumentError(
            f"`{name}` has values that are not finite.",
            "leave out the draws of diverging iterations.",
            "not-finite-draws",
        )
