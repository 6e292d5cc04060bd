"""SGRLD: Langevin dynamics in a metric that depends on the position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from numpyro_sgmcmc.dynamics import RiemannianOverdampedLangevin
from numpyro_sgmcmc.samplers.options import KernelOptions
from numpyro_sgmcmc.samplers.riemannian import RiemannianKernel

__all__ = ["SGRLD"]


class SGRLD(RiemannianKernel):
    r"""Stochastic-gradient Riemannian Langevin dynamics.

    Weak order 1, one minibatch gradient a step (two with control variates). Choose it where a
    good metric is known and a momentum does not help; otherwise
    :class:`~numpyro_sgmcmc.SGRHMC`, which takes longer steps.

    .. math:: d\theta = (-G^{-1}\nabla U + \Gamma)\,dt + \sqrt{2G^{-1}}\,dW, \qquad
        \Gamma_i = \textstyle\sum_j \partial_j (G^{-1})_{ij}

    with stationary density :math:`\propto e^{-U(\theta)}`.

    References: Patterson and Teh (2013), *Stochastic gradient Riemannian Langevin dynamics on the
    probability simplex*; Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient
    MCMC*, equation (14), with the sign of :math:`\Gamma` corrected.

    :param inverse_metric: :math:`G^{-1}` relative to the posterior covariance, so that 1 is a step
        of the usual length: a function of the unconstrained values (a dict by site name) that
        returns a positive scalar, a diagonal of shape ``(d,)`` or as a dict by site name (arrays
        of the sites' shapes, or scalars), or a positive definite matrix of shape ``(d, d)``. With
        it ``dense_mass`` is False unless given, so that coordinates are those of the sites, each
        in units of its posterior sd. Or ``"potential"`` (default),
        :func:`~numpyro_sgmcmc.dynamics.potential_metric`.
    :param str scheme: ``"euler"``.
    :param options: keywords shared by all kernels.
    :raises ValueError: for an option that is unknown or out of range, and at ``init`` for a metric
        of the wrong shape or not positive definite.
    """

    integrators = ("euler",)

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        inverse_metric: str | Callable[[Any], Any] = "potential",
        integrator: str = "euler",
        **options: Unpack[KernelOptions],
    ) -> None:
        super().__init__(
            model,
            potential_fn,
            inverse_metric=inverse_metric,
            dynamics=RiemannianOverdampedLangevin(),
            integrator=integrator,
            **options,
        )
