"""Stochastic Hamiltonian Monte Carlo with a choice of integrators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["SHMC"]


class SHMC(SGMCMCKernel):
    r"""Stochastic-gradient HMC by any of seven schemes, among them HMC without accept/reject.

    The SDE is :class:`~numpyro_sgmcmc.SGHMCSplit`'s. Choose this kernel to compare integrators, or
    for one of theirs that suits the problem:

    ===============  =====  =========  ============================================
    scheme           order  gradients  remark
    ===============  =====  =========  ============================================
    ``leapfrog``     1      1          positions without bias on Gaussians
    ``lie_trotter``  2      1          HMC with refreshment, see ``num_leapfrog``
    ``symmetric``    2      1          the splitting of SGHMCSplit
    ``baoab``        2      1          positions without bias on Gaussians
    ``obabo``        2      1          friction and noise outermost
    ``mt3``          3      3          and one Hessian-vector product
    ``euler``        1      1          the scheme of SGHMC
    ===============  =====  =========  ============================================

    With minibatches that visit all rows in random order no scheme has a bias of higher order than
    two (theorem 3 of the paper), with independent ones of higher order than one.

    .. math::

        d\theta = p\,dt, \qquad
        dp = -\nabla U(\theta)\,dt - \gamma p\,dt + \sqrt{2\gamma}\,dW

    with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2}`.

    Reference: Franzese, Milios, Filippone and Michiardi (2021), *Revisiting the effects of
    stochasticity for Hamiltonian samplers*, equation (3), section 4 and appendix B.5.

    :param float friction: friction coefficient :math:`\gamma` (:math:`C` in the paper), positive,
        in whitened units. Default 1.5.
    :param str scheme: one of the table's. Default ``"leapfrog"``.
    :param int num_leapfrog: for ``"lie_trotter"``, leapfrog steps between refreshments of the
        momentum, :math:`N_l` in the paper, each on a minibatch of its own. The momentum keeps the
        share :math:`e^{-\gamma h N_l}`: a large friction refreshes it fully. The step size is
        then at most 1.5 / N_l: at a half period, :math:`N_l h = \pi`, nothing would mix. Default 1.
    :param options: keywords shared by all kernels.
    :raises ValueError: for an option that is unknown or out of range.
    """

    integrators = ("leapfrog", "lie_trotter", "symmetric", "baoab", "obabo", "mt3", "euler")

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        friction: float = 1.5,
        integrator: str = "leapfrog",
        num_leapfrog: int = 1,
        **options: Unpack[KernelOptions],
    ) -> None:
        checks.check_positive("friction", friction)
        checks.check_positive_int("num_leapfrog", num_leapfrog)
        checks.check_choice("integrator", integrator, self.integrators)
        if num_leapfrog > 1 and integrator != "lie_trotter":
            raise InvalidArgumentError(
                f"`num_leapfrog` is for integrator='lie_trotter', but the scheme is {integrator!r}."
            )
        dynamics = UnderdampedLangevin(
            float(friction),
            num_leapfrog=num_leapfrog if integrator == "lie_trotter" else None,
            is_fsal=integrator in ("baoab", "obabo"),
        )
        super().__init__(model, potential_fn, dynamics=dynamics, integrator=integrator, **options)
