r"""Gradient-noise compensation: inject less noise where the gradient brings its own.

A minibatch gradient of covariance V adds :math:`h^2 V` to a step that should add
:math:`2\gamma h`. Injecting :math:`2\gamma h - h^2\hat V` in its place leaves the sum right
(Ma, Chen and Fox 2015, *A complete recipe for stochastic gradient MCMC*, equation (9); Chen, Fox
and Guestrin 2014). Where :math:`\hat V` exceeds what is injected, nothing is left to inject.

The divergence of a matrix function, which keeps SDEs with a varying D, Q or metric unbiased.

For a diagonal whose entries each depend on their own coordinate alone, the Jacobian is diagonal and
one directional derivative along ones is all of it: O(d) in place of the O(d^2) of ``jax.jacfwd``.
That is read off the jaxpr, which holds wherever the function is evaluated; a look at numbers would
hold where one has looked.

What an SDE must tell the rest of the library about itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.dynamics.integrators import Flow, Integrator, Step, compose
from numpyro_sgmcmc.jaxpr import propagate

__all__ = [
    "Dynamics",
    "GradientNoiseCovariance",
    "damped_oscillator_autocorrelation",
    "divergence",
    "is_elementwise",
]


class GradientNoiseCovariance(NamedTuple):
    """Covariance of the whitened gradient's noise, by its eigenvalues.

    - **eigenvalues** - eigenvalues, or variances where the covariance is taken as diagonal, ``(d,)``.
    - **eigenvectors** - eigenvectors as columns, shape ``(d, d)``; None for a diagonal.
    """

    eigenvalues: Array
    eigenvectors: Array | None = None

    @classmethod
    def from_covariance(cls, covariance: Array) -> GradientNoiseCovariance:
        """From a matrix of shape ``(d, d)``, or the diagonal of one, ``(d,)``."""
        return cls(covariance) if covariance.ndim == 1 else cls(*jnp.linalg.eigh(covariance))

    @property
    def covariance(self) -> Array:
        """The covariance, ``(d, d)`` or ``(d,)``."""
        if self.eigenvectors is None:
            return self.eigenvalues
        return (self.eigenvectors * self.eigenvalues) @ self.eigenvectors.T

    def subtract_from(self, normals: Array, fraction: Any) -> Array:
        """Normal entries of covariance one, made to have ``1 - share * covariance``.

        :param normals: shape ``(..., d)``.
        :param fraction: what part of the injected variance a unit of this covariance is.
        :return: the same shape; zero in directions where the difference is negative.
        """
        scale = jnp.sqrt(jnp.maximum(1.0 - fraction * self.eigenvalues, 0.0))
        if self.eigenvectors is None:
            return scale * normals
        return ((normals @ self.eigenvectors) * scale) @ self.eigenvectors.T


_CONSTANT_SOURCE, _MIXED_SOURCE = (
    -1,
    -2,
)  # in place of the one entry of the argument that a number comes from


# fmt: off
_ELEMENTWISE_PRIMITIVES = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
}


# They compute nothing, so that they may be applied to where entries come from.
_RESHAPING_PRIMITIVES = {
    "broadcast_in_dim", "concatenate", "expand_dims", "reshape", "rev", "slice", "split", "squeeze",
    "transpose",
}


# fmt: on


def divergence(matrix_fn: Callable[[Array], Array], q: Array) -> Array:
    r""":math:`\sum_j \partial_j M_{ji}` of a scalar, diagonal or dense matrix function.

    O(d) for a scalar, and for a diagonal of which each entry depends on its own coordinate alone.
    """
    kind = jax.eval_shape(matrix_fn, q).ndim
    if kind == 0:
        return jax.grad(matrix_fn)(q)
    if kind == 1 and is_elementwise(matrix_fn, q):
        return jax.jvp(matrix_fn, (q,), (jnp.ones_like(q),))[1]
    slope = jax.jacfwd(matrix_fn)(q)
    return jnp.diagonal(slope) if kind == 1 else jnp.einsum("jij->i", slope)


def is_elementwise(fn: Callable[[Array], Array], x: Array) -> bool:
    """Whether entry i of ``fn(x)`` depends on entry i of ``x`` alone, for every ``x``.

    :param fn: maps shape ``(d,)`` to ``(d,)``.
    :param x: any argument, of which only shape and type count.
    :return: False also where that cannot be seen.
    """
    closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    (found,) = propagate(
        closed.jaxpr,
        [np.arange(x.size)],
        _propagate_sources,
        lambda atom: np.full(atom.aval.shape, _CONSTANT_SOURCE),
    )
    is_own = (found == _CONSTANT_SOURCE) | (found == np.arange(x.size))
    return bool(is_own.all())


def _propagate_sources(eqn: Any, input_sources: list[np.ndarray]) -> list[np.ndarray]:
    """Return which entry of the argument each entry of an equation's outputs comes from."""
    name = eqn.primitive.name
    if name in _RESHAPING_PRIMITIVES:
        with jax.ensure_compile_time_eval():
            moved = eqn.primitive.bind(*(i.astype(np.int32) for i in input_sources), **eqn.params)
        return [np.asarray(m) for m in (moved if eqn.primitive.multiple_results else [moved])]
    shapes = [v.aval.shape for v in eqn.outvars]
    if name in _ELEMENTWISE_PRIMITIVES and len(shapes) == 1:
        return [_merge_sources([np.broadcast_to(i, shapes[0]) for i in input_sources])]
    is_free = all((i == _CONSTANT_SOURCE).all() for i in input_sources)
    return [np.full(shape, _CONSTANT_SOURCE if is_free else _MIXED_SOURCE) for shape in shapes]


def _merge_sources(input_sources: list[np.ndarray]) -> np.ndarray:
    """Where entries come from that are computed of several, each of these at the same place."""
    found = input_sources[0]
    for other in input_sources[1:]:
        both = np.where(found == other, found, _MIXED_SOURCE)
        found = np.where(
            other == _CONSTANT_SOURCE, found, np.where(found == _CONSTANT_SOURCE, other, both)
        )
    return found


def damped_oscillator_autocorrelation(friction: float, lag: np.ndarray) -> np.ndarray:
    """Autocorrelation of a unit oscillator's position under friction and white noise.

    :param friction: friction, not negative.
    :param lag: lags, of any shape.
    """
    decay = friction / 2.0
    # Where the two rates meet, at critical friction, they are held apart. Their product is one, by
    # which the slow one is exact at any friction. Neither exponential overflows.
    fast = decay + (np.sqrt(complex(decay**2 - 1.0)) or 1e-8)
    slow = 1.0 / fast
    turned = fast * np.exp(-slow * lag) - slow * np.exp(-fast * lag)
    return (turned / (fast - slow)).real


@dataclass(frozen=True)
class Dynamics:
    """An SDE over a flat position of shape ``(d,)`` and its auxiliary variables.

    Everything is in whitened coordinates: unit mass, posterior covariance about the identity.
    A state is a NamedTuple of arrays whose first field is the position. Subclasses are frozen
    dataclasses: they are compiled into the step. Their fields' defaults are the settings at which
    the schemes' step sizes are known to suit; at others a Gaussian is simulated to find one.

    A subclass has a ``State``, :attr:`flows`, :attr:`schemes`, :meth:`draw` (or an :meth:`init`),
    :meth:`relaxation_time`, :meth:`noise_inflation` and :meth:`stiffness`, and :meth:`energy` where
    there are auxiliary variables, for
    :func:`~numpyro_sgmcmc.diagnostics.check_invariance`. The rest has defaults.
    """

    State: ClassVar[type]
    """The state's NamedTuple: ``position``, then the auxiliary variables."""

    has_thermostat: ClassVar[bool] = False
    """Whether its friction adapts to the momenta's temperature."""

    has_constant_metric: ClassVar[bool] = True
    """Whether a step is as long everywhere: with a metric it is not."""

    @property
    def has_default_settings(self) -> bool:
        """Whether the schemes' step sizes are known to suit these settings."""
        return all(getattr(self, field.name) == field.default for field in fields(self))

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        """The schemes that this SDE has, by name."""
        raise NotImplementedError

    @property
    def linear_approximation(self) -> Dynamics | None:
        """About the same SDE, with steps that are linear on a normal; None if there is none."""
        return None

    @property
    def flows(self) -> Mapping[str, Flow]:
        """The flows from which the schemes are composed, by name."""
        raise NotImplementedError

    @property
    def resampling_periods(self) -> Mapping[str, int]:
        """Auxiliary variables that are drawn afresh, with the number of steps between draws."""
        return {}

    def make_step(self, integrator: str) -> Step:
        """The step of one of the schemes."""
        return compose(self.flows, self.integrators[integrator])

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        """Draws of an auxiliary variable from its stationary law.

        :param name: name of the variable.
        :param shape: the position's shape, with any number of axes before it.
        """
        raise NotImplementedError

    def energy(self, state: Any) -> Array:
        """Minus the log stationary density of the auxiliary variables, up to a constant."""
        return jnp.zeros(())

    def kinetic_temperature(self, state: Any) -> Array:
        r"""Kinetic temperature, the mean over coordinates of :math:`p\,\partial_p K`.

        One on average for an exact sampler; NaN without momenta.
        """
        return jnp.full((), jnp.nan)

    def init(self, position: Array, rng_key: Array) -> Any:
        """The state at ``position``, auxiliary variables drawn from their stationary law."""
        names = self.State._fields[1:]  # type: ignore[attr-defined]
        keys = random.split(rng_key, max(1, len(names)))
        drawn = (
            self.sample_auxiliary(n, k, position.shape, position.dtype)
            for n, k in zip(names, keys, strict=False)
        )
        return self.State(position, *drawn)

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        """Time between about independent draws of a whitened Gaussian."""
        raise NotImplementedError

    def autocorrelation(self, lag: np.ndarray, step_size: Any) -> np.ndarray:
        """Autocorrelation of the position on a whitened Gaussian.

        :param lag: lags, of any shape.
        :param step_size: step size.
        """
        return np.exp(-2.0 * lag / self.relaxation_time(step_size))

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        """Predicted relative excess of a unit posterior variance.

        :param gradient_variance: variance of the gradient's estimate, a coordinate.
        :param step_size: step size.
        :param position_dependent_fraction: share of the noise that differs over the posterior, from 0 to 1, which
            no thermostat can take away.
        """
        raise NotImplementedError

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        """The step's normal entries, less what the gradient's own noise brings.

        :param state: the state before the step.
        :param normals: standard normal entries, shape ``(draws, d)``.
        :param step_size: step size.
        :param noise_covariance: covariance of the gradient's noise.
        """
        return noise_covariance.subtract_from(normals, self.gradient_noise_fraction(step_size))

    def gradient_noise_fraction(self, step_size: Any) -> float:
        """What part of the injected variance a gradient's variance of one brings."""
        return self.variance_inflation(1.0, step_size)

    @property
    def max_step_size(self) -> float:
        """A bound on step sizes that has other reasons than bias and stability."""
        return math.inf

    def stiffness(self, curvature: float) -> float:
        """How many times shorter a step must be at ``curvature`` than at curvature one."""
        raise NotImplementedError
