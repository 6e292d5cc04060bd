"""What the kernels in a metric share: the user's metric, in whitened coordinates, and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError, standard_normal_points
from numpyro_sgmcmc.dynamics import (
    Dynamics,
    RiemannianOverdampedLangevin,
    RiemannianUnderdampedLangevin,
)
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["RiemannianKernel"]


def _flatten_diagonal_by_site(
    diagonal_by_site: dict[str, Any], position: dict[str, Array]
) -> Array:
    """A diagonal given by site, flat."""
    if not isinstance(position, dict) or set(diagonal_by_site) != set(position):
        sites = ", ".join(f"'{s}'" for s in position)
        raise InvalidArgumentError(
            f"`inverse_metric` returns {sorted(diagonal_by_site)}, but the sites are {sites}."
        )
    try:
        same = {k: jnp.broadcast_to(diagonal_by_site[k], jnp.shape(x)) for k, x in position.items()}
    except ValueError as error:
        raise InvalidArgumentError(
            f"`inverse_metric` returns values that do not fit their sites' shapes: {error}"
        ) from error
    return ravel_pytree(same)[0]


def _check_inverse_metric_value(inverse_metric: np.ndarray, dim: int) -> None:
    """Refuse what is no inverse metric."""
    if inverse_metric.shape not in ((), (dim,), (dim, dim)):
        raise InvalidArgumentError(
            f"`inverse_metric` returns shape {inverse_metric.shape}, but the model has {dim} "
            f"unconstrained coordinates: return a scalar, shape ({dim},) or ({dim}, {dim})."
        )
    if inverse_metric.ndim == 2:
        is_symmetric = np.allclose(inverse_metric, inverse_metric.T, rtol=1e-4, atol=1e-6)
        is_positive = is_symmetric and np.linalg.eigvalsh(inverse_metric).min() > 0
    else:
        is_positive = np.all(inverse_metric > 0)
    if not (np.isfinite(inverse_metric).all() and is_positive):
        raise InvalidArgumentError(
            "`inverse_metric` must be positive definite everywhere, but is not at a typical "
            "position: take a square or an exponential of it."
        )


class RiemannianKernel(SGMCMCKernel):
    """Base of the kernels in a metric.

    :param inverse_metric: ``"potential"``, or the user's function.
    :param dynamics: the SDE.
    :param integrator: name of the integrator.
    :param options: keywords shared by all kernels.
    :raises ValueError: for an option that is unknown or out of range, and at ``init`` for a metric
        of the wrong shape or not positive definite.
    """

    def __init__(
        self,
        model: Callable | None,
        potential_fn: Callable | None,
        *,
        inverse_metric: str | Callable[[Any], Any],
        dynamics: Dynamics,
        integrator: str,
        **options: Unpack[KernelOptions],
    ) -> None:
        is_named = isinstance(inverse_metric, str) and inverse_metric == "potential"
        if not (is_named or callable(inverse_metric)):
            raise InvalidArgumentError(
                f"`inverse_metric` is {inverse_metric!r}, but must be 'potential' or a function "
                "of the unconstrained values."
            )
        self._inverse_metric_fn = inverse_metric
        if callable(inverse_metric) and options.get("dense_mass") is None:
            options["dense_mass"] = False  # a diagonal then belongs to the sites
        super().__init__(model, potential_fn, dynamics=dynamics, integrator=integrator, **options)

    @property
    def _is_site_aligned(self) -> bool:
        return callable(self._inverse_metric_fn)

    def _bind_dynamics(self, potential: Potential, preconditioner: Preconditioner) -> Any:
        given = self._inverse_metric_fn
        if not callable(given):
            return self._dynamics

        def inverse_metric(q: Array) -> Array:
            position = potential.unravel(preconditioner.to_position(q))
            value = given(position)
            if isinstance(value, dict):
                value = _flatten_diagonal_by_site(value, position)
            return jnp.asarray(value, potential.dtype)

        assert isinstance(
            self._dynamics, (RiemannianUnderdampedLangevin, RiemannianOverdampedLangevin)
        )
        return replace(self._dynamics, inverse_metric=inverse_metric)

    def _check_inverse_metric_fn(self, dynamics: Any, potential: Potential) -> None:
        origin = jnp.zeros(potential.dim, potential.dtype)
        at = [origin, *standard_normal_points(origin)]
        values = [
            checks.evaluate_user_function("inverse_metric", dynamics.inverse_metric, q) for q in at
        ]
        for value in values:
            _check_inverse_metric_value(value, potential.dim)
