"""SGHMC by symmetric splitting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["SGHMCSplit"]


class SGHMCSplit(SGMCMCKernel):
    r"""Stochastic-gradient HMC with the symmetric splitting scheme: the kernel to start from.

    Weak order 2, one minibatch gradient a step (two with control variates). One step of size
    :math:`h` from :math:`(\theta, p)`:

    .. math::

        \theta &\leftarrow \theta + \tfrac h2 p, \quad p \leftarrow e^{-\gamma h/2} p \\
        p &\leftarrow p - h\nabla\tilde U(\theta) + \sqrt{2\gamma h}\,\zeta \\
        p &\leftarrow e^{-\gamma h/2} p, \quad \theta \leftarrow \theta + \tfrac h2 p

    .. math::

        d\theta = p\,dt, \qquad
        dp = -\nabla U(\theta)\,dt - \gamma p\,dt + \sqrt{2\gamma}\,dW

    with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2}`, by half a drift, half the
    friction, a kick with the minibatch gradient and noise, half the friction and half a drift.

    Reference: Chen, Ding and Carin (2015), *On the convergence of stochastic gradient MCMC
    algorithms with high-order integrators*, Algorithm 2 of the supplement (SGHMC-S) and equation
    (8).

    :param float friction: friction coefficient :math:`\gamma` (:math:`D` in the paper), positive,
        in whitened units. Default 1.5.
    :param str scheme: ``"symmetric"``.
    :param options: keywords shared by all kernels.
    :raises ValueError: for an option that is unknown or out of range.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_sgmcmc import SGHMCSplit

        >>> def model(y, batch_size=None):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> mcmc = MCMC(SGHMCSplit(model), num_warmup=100, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y, batch_size=100)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.003)
        True
    """

    integrators = ("symmetric",)

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        friction: float = 1.5,
        integrator: str = "symmetric",
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
