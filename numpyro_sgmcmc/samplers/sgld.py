"""SGLD: overdamped Langevin dynamics by the Euler scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from numpyro_sgmcmc.dynamics import OverdampedLangevin
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["SGLD"]


class SGLD(SGMCMCKernel):
    r"""Stochastic-gradient Langevin dynamics.

    Weak order 1, one minibatch gradient a step (two with control variates). Choose it as the
    simplest baseline: it needs about four times the steps of
    :class:`~numpyro_sgmcmc.SGHMCSplit` for the same bias. One step of size :math:`h`:

    .. math:: \theta \leftarrow \theta - h\nabla\tilde U(\theta) + \sqrt{2h}\,\zeta

    .. math:: d\theta = -\nabla U(\theta)\,dt + \sqrt{2}\,dW

    with stationary density :math:`\propto e^{-U(\theta)}`.

    Reference: Welling and Teh (2011), *Bayesian learning via stochastic gradient Langevin
    dynamics*, equation (4), whose step :math:`\epsilon` is :math:`2h`.

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
        integrator: str = "euler",
        **options: Unpack[KernelOptions],
    ) -> None:
        super().__init__(
            model, potential_fn, dynamics=OverdampedLangevin(), integrator=integrator, **options
        )
