"""SGNHT: the stochastic-gradient Nosé-Hoover thermostat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.dynamics import NoseHooverThermostat
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["SGNHT"]


class SGNHT(SGMCMCKernel):
    r"""The stochastic-gradient Nosé-Hoover thermostat.

    Weak order 2 (1 with ``"euler"``), one minibatch gradient a step (two with control variates).
    The friction adapts until the momenta have the right temperature, so that gradient noise of a
    constant size does not widen the posterior. Choose it where control variates cannot be had: for
    randomised likelihoods, or where the plain gradient must do.

    .. math::

        d\theta = p\,dt, \qquad
        dp = -\nabla U(\theta)\,dt - \xi p\,dt + \sqrt{2A}\,dW, \qquad
        d\xi = \left(\tfrac{p^\top p}{n} - 1\right)dt

    with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2 - n(\xi - A)^2/2}`.

    References: Ding et al. (2014), *Bayesian sampling using stochastic gradient thermostats*;
    Chen, Ding and Carin (2015), *On the convergence of stochastic gradient MCMC algorithms with
    high-order integrators*, Algorithm 3 (Euler) and appendix A.3 (splitting).

    :param float friction: injected noise A, which is the friction's stationary mean without
        gradient noise; positive, in whitened units. Default 1.5.
    :param bool per_coordinate: one thermostat a coordinate, which also takes away noise that
        differs between coordinates; False for the one thermostat of the paper. Default True.
    :param str scheme: ``"symmetric"`` (default) or ``"euler"``.
    :param options: keywords shared by all kernels.
    :raises ValueError: for an option that is unknown or out of range.
    """

    integrators = ("symmetric", "euler")

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        friction: float = 1.5,
        per_coordinate: bool = True,
        integrator: str = "symmetric",
        **options: Unpack[KernelOptions],
    ) -> None:
        checks.check_positive("friction", friction)
        checks.check_bool("per_coordinate", per_coordinate)
        dynamics = NoseHooverThermostat(float(friction), bool(per_coordinate))
        super().__init__(model, potential_fn, dynamics=dynamics, integrator=integrator, **options)
