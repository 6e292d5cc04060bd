r"""Softened monomial-gamma kinetic energies (Zhang et al. 2017).

.. math::

    K_c(p) = \sum_i \int_0^{g_i} \tanh(cx/2)^a\,dx, \qquad g_i = |p_i|^{1/a}/m,

whose gradient is :math:`\tfrac{1}{am}\operatorname{sign}(p)\,\tanh(cg/2)^a\,|p|^{1/a - 1}`. For
:math:`a = 1/2` the Gaussian :math:`p^2/m` needs no softening and gets none. Up to a constant,
these are the paper's energies for :math:`a = 1` and :math:`a = 2`; its gradient for a general
:math:`a` is misprinted.

Reference: Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma sampler*,
appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, random

__all__ = ["LAPLACE_KINETICS", "Kinetics"]

_MAX_TABLE_EXPONENTIAL = 40.0
_QUANTILE_TABLE_SIZE = 8192
_MIN_SOFTENED_G = 1e-4


@dataclass(frozen=True)
class Kinetics:
    """A kinetic energy, elementwise.

    :param float a: shape: 1/2 is Gaussian; heavier tails of the momentum above. In [0.5, 2].
    :param float mass: m, positive.
    :param float softening: c, positive; the larger, the less is softened.
    """

    a: float
    mass: float
    softening: float

    @property
    def is_gaussian(self) -> bool:
        return self.a == 0.5

    def energy(self, p: Array) -> Array:
        """The energy of each coordinate, zero at zero.

        By quadrature: to rounding for a = 1 and a = 2, to about three digits in between.
        """
        if self.is_gaussian:
            return jnp.square(p) / self.mass
        # The tail of the integral beyond g, by Gauss-Laguerre nodes in c x, is smooth and small.
        g, c = self._g(p), self.softening
        x, w = np.polynomial.laguerre.laggauss(64)
        weights = w * np.exp(x)  # of which neither factor is a float32
        tail = _one_minus_tanh_power(self.a, c * g[..., None] + x) @ weights
        start = _one_minus_tanh_power(self.a, x) @ weights
        return g + (tail - start) / c

    def velocity(self, p: Array) -> Array:
        r"""The energy's gradient :math:`\nabla K_c(p)`."""
        if self.is_gaussian:
            return 2.0 * p / self.mass
        size = jnp.abs(p)
        safe = jnp.maximum(size, jnp.finfo(p.dtype).tiny)
        psi = jnp.tanh(self.softening * self._g(safe) / 2.0)
        speed = psi**self.a * safe ** (1.0 / self.a - 1.0) / (self.a * self.mass)
        return jnp.where(size > 0.0, jnp.sign(p) * speed, 0.0)

    def curvature(self, p: Array) -> Array:
        r"""The energy's second derivative.

        For :math:`a > 1` it has a pole at zero, which is cut off at :math:`g = 10^{-4}`.
        """
        if self.is_gaussian:
            return jnp.full_like(p, 2.0 / self.mass)
        a, m, c = self.a, self.mass, self.softening
        g = jnp.maximum(self._g(p), _MIN_SOFTENED_G)
        psi = jnp.tanh(c * g / 2.0)
        # psi' / psi = c / sinh(c g)
        bend = a * c * g / jnp.sinh(jnp.minimum(c * g, 80.0)) + 1.0 - a
        return (psi / (m * g)) ** a * (m * g) ** (1.0 - a) * bend / (a**2 * m)

    def apply_friction(self, p: Array, friction_time: Any) -> Array:
        r"""The flow of :math:`dp = -\xi\nabla K_c(p)\,dt` for the time that makes :math:`\xi t`.

        Exact for a = 1/2 and a = 1, an explicit midpoint step otherwise.
        """
        if self.is_gaussian:
            return p * jnp.exp(-2.0 * friction_time / self.mass)
        if self.a == 1.0:
            rate = self.softening / (2.0 * self.mass)
            # asinh(sinh(x) exp(-y)) by logarithms: sinh leaves float32 at 88.
            x = rate * jnp.abs(p)
            log_sinh = x + jnp.log1p(-jnp.exp(-2.0 * x)) - np.log(2.0)
            w = log_sinh - rate * friction_time / self.mass
            above = w + jnp.log1p(jnp.sqrt(1.0 + jnp.exp(-2.0 * jnp.abs(w))))
            below = jnp.arcsinh(jnp.exp(jnp.minimum(w, 0.0)))
            return jnp.sign(p) * jnp.where(w > 0.0, above, below) / rate
        half = p - 0.5 * friction_time * self.velocity(p)
        return p - friction_time * self.velocity(half)

    def sample_momentum(self, rng_key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        r"""Draws from the density :math:`\propto e^{-K_c(p)}`.

        By inversion: :math:`g^a` is tabulated as a function of an exponential variable, to about
        five digits.
        """
        if self.is_gaussian:
            return np.sqrt(self.mass / 2.0) * random.normal(rng_key, shape, dtype)
        size_key, sign_key = random.split(rng_key)
        e = random.exponential(size_key, shape, dtype)
        return random.rademacher(sign_key, shape, dtype) * self.magnitude_from_exponential(e)

    def magnitude_from_exponential(self, e: Array) -> Array:
        """|p| at which the stationary law has the tail probability exp(-e)."""
        table = jnp.asarray(_quantile_table(self.a, self.softening), e.dtype)
        place = jnp.minimum(e / _MAX_TABLE_EXPONENTIAL, 1.0) * (_QUANTILE_TABLE_SIZE - 1)
        left = jnp.clip(place.astype(int), 0, _QUANTILE_TABLE_SIZE - 2)
        power = table[left] + (place - left) * (table[left + 1] - table[left])
        return self.mass**self.a * power

    def _g(self, p: Array) -> Array:
        return jnp.abs(p) ** (1.0 / self.a) / self.mass


LAPLACE_KINETICS = Kinetics(a=1.0, mass=1.0, softening=3.0)
"""The paper's energy for a = 1, whose momenta have the tails of a Laplace distribution."""


def _one_minus_tanh_power(a: float, x: Any) -> Any:
    """``1 - tanh(x / 2)^a`` without cancellation, for x >= 0."""
    e = jnp.exp(-x)
    return -jnp.expm1(a * (jnp.log1p(-e) - jnp.log1p(e)))


@cache
def _quantile_table(a: float, softening: float) -> np.ndarray:
    """``g^a``, whose density is exp(-K), where its tail probability is exp(-e); e on a grid."""
    # Fine near zero, where the density of g^a is largest, and long enough for the last entry.
    y = np.linspace(0.0, 1.0, 400_001) ** 2 * (_MAX_TABLE_EXPONENTIAL + 20.0 * max(a, 1.0)) ** a
    g = y ** (1.0 / a)
    rate = np.tanh(softening * g / 2.0) ** a
    energy = np.concatenate([[0.0], np.cumsum(np.diff(g) * (rate[1:] + rate[:-1]) / 2.0)])
    density = np.exp(-energy)
    tail = np.concatenate(
        [np.cumsum((np.diff(y) * (density[1:] + density[:-1]) / 2)[::-1])[::-1], [0.0]]
    )
    with np.errstate(divide="ignore"):
        e = -np.log(tail / tail[0])
    return np.interp(np.linspace(0.0, _MAX_TABLE_EXPONENTIAL, _QUANTILE_TABLE_SIZE), e, y)
