"""SGMGT: the stochastic-gradient monomial-gamma thermostat, and its "D" form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.dynamics import MonomialGammaThermostat
from numpyro_sgmcmc.dynamics.kinetics import Kinetics
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["SGMGT"]


class SGMGT(SGMCMCKernel):
    r"""The stochastic-gradient monomial-gamma thermostat.

    Weak order 2 with the default scheme, 1 where ``sigma_theta`` is positive or with ``"euler"``;
    one minibatch gradient a step (two with control variates). Choose it to try momenta of heavier
    than Gaussian tails, or thermostats whose momenta are drawn afresh: on five wells the fresh
    draws, more than the tails, brought more crossings. ``a=0.5`` with ``m=2`` and no fresh draws is
    SGNHT with a thermostat a coordinate, ``a=1`` and ``a=2`` are the paper's; larger ``a`` needs
    shorter steps.

    .. math::

        d\theta &= (\nabla K(p) - \sigma_\theta\nabla U(\theta))\,dt
                + \sqrt{2\sigma_\theta}\,dW_1 \\
        dp &= (-\nabla U(\theta) - \xi\nabla K(p))\,dt + \sqrt{2\sigma_p}\,dW_2 \\
        d\xi &= (\gamma[\nabla K(p)^2 - \nabla^2 K(p)]
                - \tfrac{\sigma_\xi}{\gamma}(\xi - \sigma_p))\,dt + \sqrt{2\sigma_\xi}\,dW_3

    elementwise, with stationary density
    :math:`\propto e^{-U(\theta) - K(p) - (\xi - \sigma_p)^2/2\gamma}` and the softened kinetics of
    :class:`~numpyro_sgmcmc.dynamics.kinetics.Kinetics`.

    Reference: Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma
    sampler*, equation (13), appendices C (kinetics) and E (splitting).

    :param float a: shape of the kinetics, in [0.5, 2]. Default 1.
    :param float m: mass of the kinetics, positive. Default 1.
    :param float c: softening, positive; the larger, the less is softened. Default 3.
    :param float sigma_p: noise of the momentum and the friction's mean, positive. Default 1.5.
    :param float sigma_theta: noise of the position, not negative. Default 0.
    :param float sigma_xi: noise of the friction, not negative. Default 0.
    :param float gamma: the friction's stationary variance, positive. Default 1.
    :param int momentum_period: steps between fresh momenta, :math:`T_p`; None for never.
        Default 100.
    :param int thermostat_period: steps between fresh frictions, :math:`T_\xi`; None for never.
        Default 100.
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
        a: float = 1.0,
        m: float = 1.0,
        c: float = 3.0,
        sigma_p: float = 1.5,
        sigma_theta: float = 0.0,
        sigma_xi: float = 0.0,
        gamma: float = 1.0,
        momentum_period: int | None = 100,
        thermostat_period: int | None = 100,
        integrator: str = "symmetric",
        **options: Unpack[KernelOptions],
    ) -> None:
        checks.check_in_interval("a", a, 0.5, 2.0)
        for name, value in (("m", m), ("c", c), ("sigma_p", sigma_p), ("gamma", gamma)):
            checks.check_positive(name, value)
        for name, value in (("sigma_theta", sigma_theta), ("sigma_xi", sigma_xi)):
            checks.check_nonnegative(name, value)
        periods = {"momentum_period": momentum_period, "thermostat_period": thermostat_period}
        for name, period in periods.items():
            if period is not None:
                checks.check_positive_int(name, period)
        dynamics = MonomialGammaThermostat(
            Kinetics(float(a), float(m), float(c)),
            float(sigma_p),
            float(gamma),
            float(sigma_theta),
            float(sigma_xi),
            momentum_period,
            thermostat_period,
        )
        super().__init__(model, potential_fn, dynamics=dynamics, integrator=integrator, **options)
