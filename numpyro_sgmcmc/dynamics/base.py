r"""The interface of an SDE, and mathematics that several SDEs share.

:class:`Dynamics` is the interface: flows, integrators, stationary law of the auxiliary variables,
and the predictions from which the warm-up chooses a step size.

:class:`GradientNoiseCovariance` compensates gradient noise. A minibatch gradient of covariance V
adds :math:`h^2 V` to a step that should add :math:`2\gamma h`; injecting
:math:`2\gamma h - h^2\hat V` instead restores the total (Ma, Chen and Fox 2015, *A complete recipe
for stochastic gradient MCMC*, equation (9); Chen, Fox and Guestrin 2014).
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

from numpyro_sgmcmc.dynamics.integrators import Flow, Integrator, Step
from numpyro_sgmcmc.jaxpr import propagate

# Markers of entries that do not come from one entry of the argument: from none, or from several.
_CONSTANT_SOURCE = -1
_MIXED_SOURCE = -2

# fmt: off
# Primitives whose output entry i depends on entry i of the inputs alone.
_ELEMENTWISE_PRIMITIVES = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
}
# Primitives that move entries and compute nothing: they can be applied to the sources themselves.
_RESHAPING_PRIMITIVES = {
    "broadcast_in_dim", "concatenate", "expand_dims", "reshape", "rev", "slice", "split", "squeeze",
    "transpose",
}
# fmt: on


class PositionState(NamedTuple):
    """State of an SDE without auxiliary variables: the preconditioned position."""

    position: Array


class MomentumState(NamedTuple):
    """State of an SDE with a momentum, of the position's shape ``(d,)``."""

    position: Array
    momentum: Array


class GradientNoiseCovariance(NamedTuple):
    """Covariance of the noise of the preconditioned gradient, by its eigenvalues."""

    eigenvalues: Array  # eigenvalues, or variances if the covariance is taken as diagonal, `(d,)`
    # eigenvectors as columns, shape `(d, d)`; None for a diagonal
    eigenvectors: Array | None = None

    @classmethod
    def from_covariance(cls, covariance: Array) -> GradientNoiseCovariance:
        """Decompose a covariance matrix of shape ``(d, d)``, or its diagonal of shape ``(d,)``."""
        return cls(covariance) if covariance.ndim == 1 else cls(*jnp.linalg.eigh(covariance))

    @property
    def covariance(self) -> Array:
        """Covariance matrix, shape ``(d, d)``, or its diagonal, shape ``(d,)``."""
        if self.eigenvectors is None:
            return self.eigenvalues
        return (self.eigenvectors * self.eigenvalues) @ self.eigenvectors.T

    def subtract_from(self, normals: Array, fraction: Any) -> Array:
        """Scale standard normals ``(..., d)`` to the covariance ``1 - fraction * covariance``.

        They are zero where the difference is negative: there is more noise than is injected.

        :param fraction: fraction of the injected variance that a gradient variance of one adds.
        """
        scale = jnp.sqrt(jnp.maximum(1.0 - fraction * self.eigenvalues, 0.0))
        if self.eigenvectors is None:
            return scale * normals
        return ((normals @ self.eigenvectors) * scale) @ self.eigenvectors.T


@dataclass(frozen=True)
class Dynamics:
    """An SDE over a flat position of shape ``(d,)`` and auxiliary variables.

    All quantities are in preconditioned coordinates, with unit mass and a posterior covariance
    about the identity. A state is a NamedTuple of arrays whose first field is the position.
    Subclasses are frozen dataclasses, because they are compiled into the step. The integrators'
    step sizes are tuned for the defaults of the subclass's fields. For other values, the warm-up
    simulates a Gaussian to find a step size.

    A subclass has a ``State``, :attr:`flows`, :attr:`integrators`, :meth:`sample_auxiliary` (or an
    :meth:`init`), :meth:`relaxation_time`, :meth:`variance_inflation` and :meth:`stiffness`. With
    auxiliary variables it also has :meth:`energy`, which
    :func:`~numpyro_sgmcmc.diagnostics.check_invariance` uses. Other members have defaults.
    """

    State: ClassVar[type]
    """NamedTuple of the state: ``position``, then the auxiliary variables."""

    has_thermostat: ClassVar[bool] = False
    """Whether the friction adapts to the kinetic temperature."""

    has_constant_metric: ClassVar[bool] = True
    """Whether the metric is the same at all positions."""

    @property
    def has_default_settings(self) -> bool:
        """True if all fields have their defaults, for which step sizes are tuned."""
        return all(getattr(self, field.name) == field.default for field in fields(self))

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        """Integrators of this SDE, by name."""
        raise NotImplementedError

    def for_integrator(self, name: str) -> Dynamics:
        """Return this SDE with the state that an integrator needs."""
        return self

    @property
    def linear_approximation(self) -> Dynamics | None:
        """An SDE close to this one whose steps are linear on a Gaussian; None if there is none."""
        return None

    @property
    def flows(self) -> Mapping[str, Flow]:
        """Flows of which the integrators are composed, by name."""
        raise NotImplementedError

    @property
    def resampling_periods(self) -> Mapping[str, int]:
        """Steps between resamplings of an auxiliary variable, by its name.

        The mapping has the variables with a field ``<name>_period`` that is not None.
        """
        names = self.State._fields[1:]  # type: ignore[attr-defined]
        periods = {name: getattr(self, f"{name}_period", None) for name in names}
        return {name: period for name, period in periods.items() if period is not None}

    def make_step(self, integrator: str) -> Step:
        """Return the step of the integrator of this name."""
        return Step.from_flows(self.flows, self.integrators[integrator])

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        """Sample the auxiliary variable of this name from its stationary distribution.

        :param shape: shape of the position, with any number of batch axes before it.
        """
        raise NotImplementedError

    def energy(self, state: Any) -> Array:
        """Return minus the log stationary density of the auxiliary variables, up to a constant."""
        return jnp.zeros(())

    def kinetic_temperature(self, state: Any) -> Array:
        r"""Return the kinetic temperature, the mean over coordinates of :math:`p\,\partial_p K`.

        Its expectation is one for an exact sampler; NaN without momenta.
        """
        return jnp.full((), jnp.nan)

    def init(self, position: Array, rng_key: Array) -> Any:
        """Return a state at ``position`` with auxiliary variables from their stationary law."""
        names = self.State._fields[1:]  # type: ignore[attr-defined]
        keys = random.split(rng_key, max(1, len(names)))
        auxiliary = (
            self.sample_auxiliary(name, key, position.shape, position.dtype)
            for name, key in zip(names, keys, strict=False)
        )
        return self.State(position, *auxiliary)

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        """Return the time between approximately independent positions on a standard Gaussian.

        :param gradient_variance: variance of the gradient estimate per coordinate.
        """
        raise NotImplementedError

    def autocorrelation(self, lag: np.ndarray, step_size: Any) -> np.ndarray:
        """Return the autocorrelation of the position on a standard Gaussian, in the lag's shape."""
        return np.exp(-2.0 * lag / self.relaxation_time(step_size))

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        """Return the predicted relative increase of a posterior variance of one.

        :param gradient_variance: variance of the gradient estimate per coordinate.
        :param position_dependent_fraction: fraction of the gradient variance that varies over the
            posterior, from 0 to 1. A thermostat cannot compensate this fraction.
        """
        raise NotImplementedError

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        """Return the step's normals, scaled down by the variance that gradient noise adds.

        :param state: state before the step.
        :param normals: standard normal numbers, shape ``(num_noise, d)``.
        """
        return noise_covariance.subtract_from(normals, self.gradient_noise_fraction(step_size))

    def gradient_noise_fraction(self, step_size: Any) -> float:
        """Return the variance that gradient noise of variance one adds, over the injected one."""
        return self.variance_inflation(1.0, step_size)

    @property
    def max_step_size(self) -> float:
        """Upper bound of the step size for reasons other than bias and stability."""
        return math.inf

    def stiffness(self, curvature: float) -> float:
        """Return the factor by which the step for ``curvature`` is shorter than that for one."""
        raise NotImplementedError


def as_matrix(x: Array) -> Array:
    """Return a matrix given as one or by its diagonal."""
    return jnp.diag(x) if x.ndim == 1 else x


def divergence(matrix_fn: Callable[[Array], Array], q: Array) -> Array:
    r"""Return :math:`\sum_j \partial_j M_{ji}` of a scalar, diagonal or dense matrix function.

    The cost is O(d) for a scalar, and for a diagonal of which each entry depends on the same
    entry of the position alone: its Jacobian is diagonal, so that one directional derivative along
    ones gives all of it. Otherwise it is that of ``jax.jacfwd``.

    :param matrix_fn: maps a position of shape ``(d,)`` to shape ``()``, ``(d,)`` or ``(d, d)``.
    """
    ndim = jax.eval_shape(matrix_fn, q).ndim
    if ndim == 0:
        return jax.grad(matrix_fn)(q)
    if ndim == 1 and is_elementwise(matrix_fn, q):
        return jax.jvp(matrix_fn, (q,), (jnp.ones_like(q),))[1]
    jacobian = jax.jacfwd(matrix_fn)(q)
    return jnp.diagonal(jacobian) if ndim == 1 else jnp.einsum("jij->i", jacobian)


def is_elementwise(fn: Callable[[Array], Array], x: Array) -> bool:
    """Return whether entry i of ``fn(x)`` depends on entry i of ``x`` alone, for every ``x``.

    The answer is read off the jaxpr; values at some points would show nothing about others.

    :return: False also if the function contains primitives that are not known.
    """
    closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    (sources,) = propagate(
        closed.jaxpr,
        [np.arange(x.size)],
        _propagate_sources,
        lambda atom: np.full(atom.aval.shape, _CONSTANT_SOURCE),
    )
    return bool(((sources == _CONSTANT_SOURCE) | (sources == np.arange(x.size))).all())


def _propagate_sources(eqn: Any, input_sources: list[np.ndarray]) -> list[np.ndarray]:
    """Return, for each output entry of an equation, the entry of the argument it depends on."""
    name = eqn.primitive.name
    if name in _RESHAPING_PRIMITIVES:
        with jax.ensure_compile_time_eval():
            moved = eqn.primitive.bind(*(i.astype(np.int32) for i in input_sources), **eqn.params)
        return [np.asarray(m) for m in (moved if eqn.primitive.multiple_results else [moved])]
    shapes = [v.aval.shape for v in eqn.outvars]
    if name in _ELEMENTWISE_PRIMITIVES and len(shapes) == 1:
        merged = np.broadcast_to(input_sources[0], shapes[0])
        for other in input_sources[1:]:
            is_kept = (merged == other) | (other == _CONSTANT_SOURCE)
            is_constant = merged == _CONSTANT_SOURCE
            merged = np.select([is_kept, is_constant], [merged, other], _MIXED_SOURCE)
        return [merged]
    all_constant = all((i == _CONSTANT_SOURCE).all() for i in input_sources)
    source = _CONSTANT_SOURCE if all_constant else _MIXED_SOURCE
    return [np.full(shape, source) for shape in shapes]
