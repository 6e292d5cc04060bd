"""SGHMC by the Euler scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["SGHMC"]


class SGHMC(SGMCMCKernel):
    r"""Stochastic-gradient HMC with the Euler scheme.

    Weak order 1, one minibatch gradient a step (two with control variates). Choose it to compare
    with published results; :class:`~numpyro_sgmcmc.SGHMCSplit` costs the same and takes steps
    three times as large for the same bias. One step of size :math:`h` from :math:`(\theta, p)`:

    .. math::

        p \leftarrow p - \gamma h p - h\nabla\tilde U(\theta) + \sqrt{2\gamma h}\,\zeta, \quad
        \theta \leftarrow \theta + h p

    .. math::

        d\theta = p\,dt, \qquad
        dp = -\nabla U(\theta)\,dt - \gamma p\,dt + \sqrt{2\gamma}\,dW

    with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2}`.

    Reference: Chen, Fox and Guestrin (2014), *Stochastic gradient Hamiltonian Monte Carlo*,
    equation (13); Chen, Ding and Carin (2015), Algorithm 2 of the supplement (SGHMC-E).

    :param float friction: friction coefficient :math:`\gamma` (:math:`D` in the paper), positive,
        in whitened units. Default 1.5.
    :param str scheme: ``"euler"``.
    :param options: keywords shared by all kernels.
    :raises ValueError: for an option that is unknown or out of range.
    """

    integrators = ("euler",)

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        friction: float = 1.5,
        integrator: str = "euler",
        **options: Unpack[KernelOptions],
    ) -> None:
        checks.check_positive("friction", friction)
        super().__init__(
            model,
            potential_fn,
            dynamics=UnderdampedLangevin(float(friction)),
            integrator=integrator,
            **options,
        )
