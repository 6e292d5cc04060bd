"""The complete recipe as a kernel: any diffusion that has the posterior as its marginal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.dynamics import Recipe
from numpyro_sgmcmc.dynamics.recipe_checks import check_recipe
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["RecipeKernel"]


def _init_no_auxiliary(rng_key: Array, dim: int) -> Array:
    return jnp.zeros(0)


class RecipeKernel(SGMCMCKernel):
    r"""A sampler from the user's own D, Q and h.

    Weak order 1, one minibatch gradient a step (two with control variates). Choose it to try a new
    dynamic; the dedicated kernels are faster and have better schemes. The derivatives in
    :math:`\Gamma` are taken automatically.

    All functions are of :math:`z = (\theta, a)`, flat: the position in whitened units, shape
    ``(d,)``, then the auxiliary variables, ``n`` in all.

    .. math::

        dz = \left(-(D(z) + Q(z))\nabla H(z) + \Gamma(z)\right)dt + \sqrt{2D(z)}\,dW,
        \qquad \Gamma_i = \sum_j \partial_j\,(D_{ij} + Q_{ij})

    with stationary density :math:`\propto e^{-H(z)}`, :math:`H(z) = U(\theta) + h(z)`.

    Reference: Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient MCMC*, equations
    (2) to (6).

    :param diffusion: D: maps z to a positive semi-definite matrix of shape ``(n, n)``, or to its
        diagonal.
    :param curl: Q: maps z to a skew-symmetric matrix of shape ``(n, n)``.
    :param hamiltonian: h: maps z to the energy besides the posterior's, a scalar. The integral of
        :math:`e^{-h}` over the auxiliary variables must be the same at every position, as it is
        where h reads these alone; without any, h is constant.
    :param auxiliary: ``(rng_key, d) -> (n - d,)``, first values of the auxiliary variables;
        :class:`~numpyro_sgmcmc.dynamics.Recipe` has it as ``draw_auxiliary``. Default: there are
        none.
    :param str scheme: ``"euler"``.
    :param options: keywords shared by all kernels.
    :raises ValueError: for an option that is unknown or out of range, and at ``init`` where D is
        not positive semi-definite, Q not skew, one of the wrong shape, or where h changes with the
        position. The last is told of energies that are a sum of a function of the position and one
        of the auxiliary variables, or quadratic in these (100 at most).

    **Example** Stochastic-gradient HMC with friction 1.5:

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_sgmcmc import RecipeKernel

        >>> def diffusion(z):
        ...     d = z.size // 2
        ...     return jnp.repeat(jnp.array([0.0, 1.5]), d)

        >>> def curl(z):
        ...     d = z.size // 2
        ...     return jnp.kron(jnp.array([[0.0, -1.0], [1.0, 0.0]]), jnp.eye(d))

        >>> kernel = RecipeKernel(
        ...     lambda: None, diffusion=diffusion, curl=curl,
        ...     hamiltonian=lambda z: jnp.square(z[z.size // 2:]).sum() / 2,
        ...     auxiliary=lambda key, d: jax.random.normal(key, (d,)),
        ... )
    """

    integrators = ("euler",)

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        diffusion: Callable[[Array], Array],
        curl: Callable[[Array], Array],
        hamiltonian: Callable[[Array], Array],
        auxiliary: Callable[[Array, int], Array] = _init_no_auxiliary,
        integrator: str = "euler",
        **options: Unpack[KernelOptions],
    ) -> None:
        functions = {
            "diffusion": diffusion,
            "curl": curl,
            "hamiltonian": hamiltonian,
            "auxiliary": auxiliary,
        }
        for name, function in functions.items():
            checks.check_callable(name, function)
        dynamics = Recipe(diffusion, curl, hamiltonian, auxiliary)
        super().__init__(model, potential_fn, dynamics=dynamics, integrator=integrator, **options)

    def _check_user_functions(self, potential: Potential) -> None:
        dynamics = self._dynamics
        assert isinstance(dynamics, Recipe)
        check_recipe(dynamics, potential.dim)
