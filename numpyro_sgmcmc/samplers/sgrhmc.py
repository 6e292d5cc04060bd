"""SGRHMC: Hamiltonian dynamics in a metric that depends on the position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.dynamics import RiemannianUnderdampedLangevin
from numpyro_sgmcmc.samplers.options import KernelOptions
from numpyro_sgmcmc.samplers.riemannian import RiemannianKernel

__all__ = ["SGRHMC"]


class SGRHMC(RiemannianKernel):
    r"""Stochastic-gradient Riemannian HMC; gSGRHMC with its default metric.

    Weak order 2 (1 with ``"euler"``), one minibatch gradient a step (two with control
    variates). Choose it where the posterior's scale changes from place to place, as in funnels and
    bananas, and a metric that follows it is known.

    .. math::

        d\theta = S p\,dt, \qquad
        dp = (-S^\top\nabla U + \operatorname{div} S - \gamma S^\top S\,p)\,dt
        + \sqrt{2\gamma S^\top S}\,dW, \qquad SS^\top = G^{-1}

    with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2}`.

    Reference: Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient MCMC*, equation
    (17) with its signs corrected, and Algorithm 1.

    :param inverse_metric: :math:`G^{-1}` relative to the posterior covariance, so that 1 is a step
        of the usual length: a function of the unconstrained values (a dict by site name) that
        returns a positive scalar, a diagonal of shape ``(d,)`` or as a dict by site name (arrays
        of the sites' shapes, or scalars), or a positive definite matrix of shape ``(d, d)``. With
        it ``dense_mass`` is False unless given, so that coordinates are those of the sites, each
        in units of its posterior sd. Or ``"potential"`` (default),
        :func:`~numpyro_sgmcmc.dynamics.potential_metric`.
    :param float friction: friction coefficient :math:`\gamma`, positive; 1 in the paper. Default
        1.5.
    :param int momentum_period: steps between fresh momenta; None (default) for never.
    :param str scheme: ``"symmetric"`` (default) or ``"euler"``.
    :param options: keywords shared by all kernels.
    :raises ValueError: for an option that is unknown or out of range, and at ``init`` for a metric
        of the wrong shape or not positive definite.
    """

    integrators = ("symmetric", "euler")

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        inverse_metric: str | Callable[[Any], Any] = "potential",
        friction: float = 1.5,
        momentum_period: int | None = None,
        integrator: str = "symmetric",
        **options: Unpack[KernelOptions],
    ) -> None:
        checks.check_positive("friction", friction)
        if momentum_period is not None:
            checks.check_positive_int("momentum_period", momentum_period)
        super().__init__(
            model,
            potential_fn,
            inverse_metric=inverse_metric,
            dynamics=RiemannianUnderdampedLangevin(
                friction=float(friction), momentum_period=momentum_period
            ),
            integrator=integrator,
            **options,
        )
