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
from numpyro_sgmcmc.checks import Refusal, typical_positions
from numpyro_sgmcmc.dynamics import Dynamics, Riemannian, RiemannianLangevin
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["MetricKernel"]


def _by_site(value: dict[str, Any], position: dict[str, Array]) -> Array:
    """A diagonal given by site, flat."""
    if not isinstance(position, dict) or set(value) != set(position):
        sites = ", ".join(f"'{s}'" for s in position)
        raise Refusal(f"`inverse_metric` returns {sorted(value)}, but the sites are {sites}.")
    try:
        same = {k: jnp.broadcast_to(value[k], jnp.shape(x)) for k, x in position.items()}
    except ValueError as error:
        raise Refusal(
            f"`inverse_metric` returns values that do not fit their sites' shapes: {error}"
        ) from error
    return ravel_pytree(same)[0]


def _refuse_indefinite(value: np.ndarray, dim: int) -> None:
    """Refuse what is no inverse metric."""
    if value.shape not in ((), (dim,), (dim, dim)):
        raise Refusal(
            f"`inverse_metric` returns shape {value.shape}, but the model has {dim} "
            f"unconstrained coordinates: return a scalar, shape ({dim},) or ({dim}, {dim})."
        )
    if value.ndim == 2:
        is_symmetric = np.allclose(value, value.T, rtol=1e-4, atol=1e-6)
        is_positive = is_symmetric and np.linalg.eigvalsh(value).min() > 0
    else:
        is_positive = np.all(value > 0)
    if not (np.isfinite(value).all() and is_positive):
        raise Refusal(
            "`inverse_metric` must be positive definite everywhere, but is not at a typical "
            "position: take a square or an exponential of it."
        )


class MetricKernel(SGMCMCKernel):
    """Base of the kernels in a metric.

    :param inverse_metric: ``"potential"``, or the user's function.
    :param dynamics: the SDE.
    :param scheme: name of the integrator.
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
        scheme: str,
        **options: Unpack[KernelOptions],
    ) -> None:
        is_named = isinstance(inverse_metric, str) and inverse_metric == "potential"
        if not (is_named or callable(inverse_metric)):
            raise Refusal(
                f"`inverse_metric` is {inverse_metric!r}, but must be 'potential' or a function "
                "of the unconstrained values."
            )
        self._inverse_metric_fn = inverse_metric
        if callable(inverse_metric) and options.get("dense_mass") is None:
            options["dense_mass"] = False  # a diagonal then belongs to the sites
        super().__init__(model, potential_fn, dynamics=dynamics, scheme=scheme, **options)

    @property
    def _is_by_site(self) -> bool:
        return callable(self._inverse_metric_fn)

    def _located_dynamics(self, target: Target, whitening: Whitening) -> Any:
        given = self._inverse_metric_fn
        if not callable(given):
            return self._dynamics

        def inverse_metric(q: Array) -> Array:
            position = target.unravel(whitening.position(q))
            value = given(position)
            if isinstance(value, dict):
                value = _by_site(value, position)
            return jnp.asarray(value, target.dtype)

        assert isinstance(self._dynamics, (Riemannian, RiemannianLangevin))
        return replace(self._dynamics, inverse_metric=inverse_metric)

    def _refuse_bad_metric(self, dynamics: Any, target: Target) -> None:
        origin = jnp.zeros(target.dim, target.dtype)
        at = [origin, *typical_positions(origin)]
        values = [checks.returned("inverse_metric", dynamics.inverse_metric, q) for q in at]
        for value in values:
            _refuse_indefinite(value, target.dim)
