"""What the kernels in a metric share: the user's metric, in whitened coordinates, and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.dynamics import Riemannian, RiemannianLangevin
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.samplers.base import SGMCMCKernel, typical_positions

__all__ = ["MetricKernel", "potential_metric"]


def potential_metric(q: Array) -> Array:
    r"""The inverse metric of gSGRHMC, :math:`G^{-1} \propto \sqrt{|U + C|}`, a scalar.

    Larger where the potential is, so that steps are longer in the tails. In place of the potential
    stands its quadratic expansion about the anchor in whitened units, :math:`|q|^2/2`: any
    positive function of the position leaves the posterior invariant, and this one reads no data.
    C = 1/2 as in the paper, and the value is about one at a typical position.
    """
    return jnp.sqrt((jnp.square(q).sum() + 1.0) / (q.size + 1.0))


def _by_site(value: dict[str, Any], position: dict[str, Array]) -> Array:
    """A diagonal given by site, flat."""
    if not isinstance(position, dict) or set(value) != set(position):
        sites = ", ".join(f"'{s}'" for s in position)
        raise ValueError(f"`inverse_metric` returns {sorted(value)}, but the sites are {sites}.")
    try:
        same = {k: jnp.broadcast_to(value[k], jnp.shape(x)) for k, x in position.items()}
    except ValueError as error:
        raise ValueError(
            f"`inverse_metric` returns values that do not fit their sites' shapes: {error}"
        ) from error
    return ravel_pytree(same)[0]


class MetricKernel(SGMCMCKernel):
    """Base of the kernels in a metric; takes what :class:`SGMCMCKernel` takes.

    :param inverse_metric: ``"potential"``, or the user's function.
    """

    def __init__(
        self,
        model: Callable | None,
        potential_fn: Callable | None,
        *,
        inverse_metric: str | Callable[[Any], Any],
        **settings: Any,
    ) -> None:
        if inverse_metric != "potential" and not callable(inverse_metric):
            raise ValueError(
                f"`inverse_metric` is {inverse_metric!r}, but must be 'potential' or a function "
                "of the unconstrained values."
            )
        self._inverse_metric_fn = inverse_metric
        if callable(inverse_metric) and settings.get("dense_mass") is None:
            settings["dense_mass"] = False  # a diagonal then belongs to the sites
        super().__init__(model, potential_fn, **settings)

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

    def _has_default_dynamics(self) -> bool:
        return self._inverse_metric_fn == "potential" and super()._has_default_dynamics()

    def _check_dynamics(self, dynamics: Any, dim: int) -> None:
        anchor = self.adaptation.whitening.anchor
        at = [jnp.zeros_like(anchor), *typical_positions(anchor)]
        values = [checks.returned("inverse_metric", dynamics.inverse_metric, q) for q in at]
        for value in values:
            self._check_metric(value, dim)

    def _check_metric(self, value: np.ndarray, dim: int) -> None:
        if value.shape not in ((), (dim,), (dim, dim)):
            raise ValueError(
                f"`inverse_metric` returns shape {value.shape}, but the model has {dim} "
                f"unconstrained coordinates: return a scalar, shape ({dim},) or ({dim}, {dim})."
            )
        if value.ndim == 2:
            is_symmetric = np.allclose(value, value.T, rtol=1e-4, atol=1e-6)
            is_positive = is_symmetric and np.linalg.eigvalsh(value).min() > 0
        else:
            is_positive = np.all(value > 0)
        if not (np.isfinite(value).all() and is_positive):
            raise ValueError(
                "`inverse_metric` must be positive definite everywhere, but is not at a typical "
                "position: take a square or an exponential of it."
            )
