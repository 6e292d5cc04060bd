"""Stochastic Laplacian HMC: Langevin dynamics with Laplace-like momenta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.dynamics import MonomialGammaLangevin
from numpyro_sgmcmc.dynamics.kinetics import Kinetics
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["SGLaplaceHMC"]


class SGLaplaceHMC(SGMCMCKernel):
    r"""Stochastic-gradient HMC with Laplace-like momenta.

    Weak order 2 (1 with ``"euler"``), one minibatch gradient a step (two with control variates).
    The speed of every coordinate is bounded by 1/m, so that a single large gradient throws no
    chain far: choose it for gradients with heavy tails.

    .. math:: d\theta = \nabla K(p)\,dt, \qquad
        dp = -(\nabla U(\theta) + A\nabla K(p))\,dt + \sqrt{2A}\,dW

    with stationary density :math:`\propto e^{-U(\theta) - K(p)}` and the softened kinetics
    :class:`~numpyro_sgmcmc.dynamics.kinetics.Kinetics` with a = 1.

    Reference: Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma
    sampler*, equation (27), where it mends the naive stochastic slice sampler.

    :param float friction: friction coefficient A, positive, in whitened units. Default 1.5.
    :param float m: mass of the kinetics, positive. Default 1.
    :param float c: softening, positive; the larger, the less is softened. Default 3.
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
        m: float = 1.0,
        c: float = 3.0,
        integrator: str = "symmetric",
        **options: Unpack[KernelOptions],
    ) -> None:
        for name, value in (("friction", friction), ("m", m), ("c", c)):
            checks.check_positive(name, value)
        dynamics = MonomialGammaLangevin(Kinetics(1.0, float(m), float(c)), float(friction))
        super().__init__(model, potential_fn, dynamics=dynamics, integrator=integrator, **options)
