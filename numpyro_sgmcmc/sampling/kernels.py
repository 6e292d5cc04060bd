"""The kernels: for each the SDE, the integrators, the defaults, and when to choose it.

The positional arguments, ``integrator`` and the keywords of
:class:`~numpyro_sgmcmc.kernel.Options` are the same for all, as are warm-up and output
(:class:`~numpyro_sgmcmc.kernel.SGMCMCKernel`). A constructor checks the keywords of its SDE and
builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.dynamics import (
    Kinetics,
    MonomialGammaLangevin,
    MonomialGammaThermostat,
    NoseHooverThermostat,
    OverdampedLangevin,
    Recipe,
    RiemannianOverdampedLangevin,
    RiemannianUnderdampedLangevin,
    UnderdampedLangevin,
)
from numpyro_sgmcmc.dynamics.general import check_recipe
from numpyro_sgmcmc.errors import InvalidArgumentError, standard_normal_points
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.mass_matrix import is_positive_definite
from numpyro_sgmcmc.sampling.options import KernelKeywords, KernelOptions

__all__ = [
    "SGHMC",
    "SGLD",
    "SGMGT",
    "SGNHT",
    "SGRHMC",
    "SGRLD",
    "SHMC",
    "RecipeKernel",
    "SGHMCSplit",
    "SGLaplaceHMC",
]


class UnderdampedKernel(SGMCMCKernel):
    """Base of the kernels with underdamped Langevin dynamics and no options but its friction."""

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        friction: float = 1.5,
        **options: Unpack[KernelKeywords],
    ) -> None:
        dynamics = UnderdampedLangevin(errors.check_positive("friction", friction))
        super().__init__(model, potential_fn, dynamics=dynamics, **options)


class SGHMCSplit(UnderdampedKernel):
    r"""Stochastic-gradient HMC with the symmetric splitting integrator: the recommended kernel.

    Weak order 2, one minibatch gradient per step (two with control variates). The SDE is

    .. math::

        d\theta = p\,dt, \qquad
        dp = -\nabla U(\theta)\,dt - \gamma p\,dt + \sqrt{2\gamma}\,dW

    with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2}`. One step of size :math:`h`,
    with a standard normal :math:`\zeta` and a minibatch gradient :math:`\nabla\tilde U`, is

    .. math::

        \theta &\leftarrow \theta + \tfrac h2 p, \quad p \leftarrow e^{-\gamma h/2} p \\
        p &\leftarrow p - h\nabla\tilde U(\theta) + \sqrt{2\gamma h}\,\zeta \\
        p &\leftarrow e^{-\gamma h/2} p, \quad \theta \leftarrow \theta + \tfrac h2 p

    Reference: Chen, Ding and Carin (2015), *On the convergence of stochastic gradient MCMC
    algorithms with high-order integrators*, Algorithm 2 of the supplement (SGHMC-S) and equation
    (8).

    :param model: NumPyro model with a subsampled plate around the data.
    :param potential_fn: minus the log density of a pytree of unconstrained values, if no model.
    :param float friction: friction coefficient :math:`\gamma` (:math:`D` in the paper), positive,
        in preconditioned units. Default 1.5.
    :param str integrator: ``"symmetric"``, ``"baoab"`` or ``"ubu"``. Default ``"symmetric"``, but
        ``"baoab"`` for a model with effects of many groups. There, the discretisation errors of
        ``"symmetric"`` in all effects together would bias the scale of the effects.
    :param options: the keywords of all kernels, see :class:`~numpyro_sgmcmc.kernel.Options`.
    :raises InvalidArgumentError: for an option out of range.

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

    integrators = ("symmetric", "baoab", "ubu")
    hierarchy_integrator = "baoab"


class SHMC(SGMCMCKernel):
    r"""Stochastic-gradient HMC by any of eight integrators, among them HMC without accept/reject.

    The SDE is that of :class:`~numpyro_sgmcmc.SGHMCSplit`. Choose this kernel to compare
    integrators, or if the problem needs a property of one of them:

    ===============  =====  =========  ============================================
    integrator       order  gradients  remark
    ===============  =====  =========  ============================================
    ``leapfrog``     1      1          positions without bias on Gaussians
    ``lie_trotter``  2      1          HMC with refreshment, see ``num_leapfrog``
    ``symmetric``    2      1          the splitting of SGHMCSplit
    ``baoab``        2      1          positions without bias on Gaussians
    ``obabo``        2      1          friction and noise outermost
    ``ubu``          2      1          exact free motion; strong order 2
    ``mt3``          3      3          plus one Hessian-vector product
    ``euler``        1      1          the integrator of SGHMC
    ===============  =====  =========  ============================================

    If minibatches visit all rows in random order, the bias of every integrator has an order of at
    most two (theorem 3 of the paper). If minibatches are independent, the order is one.

    Reference: Franzese, Milios, Filippone and Michiardi (2021), *Revisiting the effects of
    stochasticity for Hamiltonian samplers*, equation (3), section 4 and appendix B.5.

    :param float friction: friction coefficient :math:`\gamma` (:math:`C` in the paper), positive,
        in preconditioned units. Default 1.5.
    :param str integrator: one of the table. Default ``"leapfrog"``.
    :param int num_leapfrog: for ``"lie_trotter"``, leapfrog steps between refreshments of the
        momentum, :math:`N_l` in the paper, each on a separate minibatch. The momentum keeps the
        fraction :math:`e^{-\gamma h N_l}`, so a large friction refreshes it completely. The warm-up
        chooses a step size of at most 1.5 / N_l, because chains would not mix at a half period,
        :math:`N_l h = \pi`. Default 1.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
    """

    integrators = ("leapfrog", "lie_trotter", "symmetric", "baoab", "obabo", "ubu", "mt3", "euler")

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
        errors.check_positive_int("num_leapfrog", num_leapfrog)
        errors.check_choice("integrator", integrator, self.integrators)
        if num_leapfrog > 1 and integrator != "lie_trotter":
            raise InvalidArgumentError(
                f"`num_leapfrog` is {num_leapfrog}, but `integrator` is {integrator!r}.",
                "pass integrator='lie_trotter', or leave out `num_leapfrog`.",
                "num-leapfrog",
            )
        self._num_leapfrog = num_leapfrog  # for `settings`: the SDE has None for other integrators
        dynamics = UnderdampedLangevin(
            errors.check_positive("friction", friction),
            num_leapfrog=num_leapfrog if integrator == "lie_trotter" else None,
            is_fsal=integrator in ("baoab", "obabo"),
        )
        super().__init__(model, potential_fn, dynamics=dynamics, integrator=integrator, **options)


class SGNHT(SGMCMCKernel):
    r"""The stochastic-gradient Nosé-Hoover thermostat.

    Weak order 2 (1 with ``"euler"``), one minibatch gradient per step (two with control variates).
    The friction adapts until the momenta have the right temperature, so that gradient noise of a
    constant size does not widen the posterior. Choose this kernel where control variates are not
    available: for randomised likelihoods, or with the minibatch gradient.

    .. math::

        d\theta = p\,dt, \qquad
        dp = -\nabla U(\theta)\,dt - \xi p\,dt + \sqrt{2A}\,dW, \qquad
        d\xi = \left(\tfrac{p^\top p}{n} - 1\right)dt

    with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2 - n(\xi - A)^2/2}`. Here n is
    the number of coordinates that share a friction :math:`\xi`, which is 1 by default.

    References: Ding et al. (2014), *Bayesian sampling using stochastic gradient thermostats*;
    Chen, Ding and Carin (2015), *On the convergence of stochastic gradient MCMC algorithms with
    high-order integrators*, Algorithm 3 (Euler) and appendix A.3 (splitting).

    :param float friction: injected noise A, positive, in preconditioned units. Without gradient
        noise it is the stationary mean of the friction. Default 1.5.
    :param bool per_coordinate: whether there is one thermostat per coordinate, which also
        compensates noise that differs between coordinates. False for the one thermostat of the
        paper. Default True.
    :param str integrator: ``"symmetric"`` (default) or ``"euler"``.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
    """

    integrators = ("symmetric", "euler")

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        friction: float = 1.5,
        per_coordinate: bool = True,
        **options: Unpack[KernelKeywords],
    ) -> None:
        dynamics = NoseHooverThermostat(
            errors.check_positive("friction", friction),
            errors.check_bool("per_coordinate", per_coordinate),
        )
        super().__init__(model, potential_fn, dynamics=dynamics, **options)


class SGMGT(SGMCMCKernel):
    r"""The stochastic-gradient monomial-gamma thermostat.

    Weak order 2 (1 with ``"euler"`` or a positive ``sigma_theta``), one minibatch gradient per step
    (two with control variates). Choose this kernel to try momenta with heavier tails than Gaussian
    ones, or thermostats whose momenta are resampled. For a potential of five wells, resampling
    increased the number of crossings more than heavier tails did. With ``a=0.5``, ``m=2`` and no
    resampling, the kernel is SGNHT with a thermostat per coordinate. The paper has ``a=1`` and
    ``a=2``. A larger ``a`` needs shorter steps.

    .. math::

        d\theta &= (\nabla K(p) - \sigma_\theta\nabla U(\theta))\,dt
                + \sqrt{2\sigma_\theta}\,dW_1 \\
        dp &= (-\nabla U(\theta) - \xi\nabla K(p))\,dt + \sqrt{2\sigma_p}\,dW_2 \\
        d\xi &= (\gamma[\nabla K(p)^2 - \nabla^2 K(p)]
                - \tfrac{\sigma_\xi}{\gamma}(\xi - \sigma_p))\,dt + \sqrt{2\sigma_\xi}\,dW_3

    elementwise, with stationary density
    :math:`\propto e^{-U(\theta) - K(p) - (\xi - \sigma_p)^2/2\gamma}`. The kinetic energy K is that
    of :class:`~numpyro_sgmcmc.dynamics.Kinetics`.

    Reference: Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma
    sampler*, equation (13), appendices C (kinetics) and E (splitting).

    :param float a: shape of the kinetics, in [0.5, 2]. Default 1.
    :param float m: mass of the kinetics, positive. Default 1.
    :param float c: softening, positive; larger values soften less. Default 3.
    :param float sigma_p: noise of the momentum and mean of the friction, positive. Default 1.5.
    :param float sigma_theta: noise of the position, not negative. Default 0.
    :param float sigma_xi: noise of the friction, not negative. Default 0.
    :param float gamma: stationary variance of the friction, positive. Default 1.
    :param int momentum_period: steps between resamplings of the momentum, :math:`T_p`; None for
        never. Default 100.
    :param int thermostat_period: steps between resamplings of the friction, :math:`T_\xi`; None for
        never. Default 100.
    :param str integrator: ``"symmetric"`` (default) or ``"euler"``.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
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
        **options: Unpack[KernelKeywords],
    ) -> None:
        dynamics = MonomialGammaThermostat(
            kinetics=_build_kinetics(errors.check_in_interval("a", a, 0.5, 2.0), m, c),
            sigma_p=errors.check_positive("sigma_p", sigma_p),
            gamma=errors.check_positive("gamma", gamma),
            sigma_theta=errors.check_nonnegative("sigma_theta", sigma_theta),
            sigma_xi=errors.check_nonnegative("sigma_xi", sigma_xi),
            momentum_period=_check_period("momentum_period", momentum_period),
            thermostat_period=_check_period("thermostat_period", thermostat_period),
        )
        super().__init__(model, potential_fn, dynamics=dynamics, **options)


class SGLaplaceHMC(SGMCMCKernel):
    r"""Stochastic-gradient HMC with Laplace-like momenta.

    Weak order 2 (1 with ``"euler"``), one minibatch gradient per step (two with control variates).
    Choose this kernel for gradients with heavy tails. The speed of every coordinate is bounded by
    1/m, so that one large gradient does not move a chain far.

    .. math:: d\theta = \nabla K(p)\,dt, \qquad
        dp = -(\nabla U(\theta) + A\nabla K(p))\,dt + \sqrt{2A}\,dW

    with stationary density :math:`\propto e^{-U(\theta) - K(p)}`. The kinetic energy K is that of
    :class:`~numpyro_sgmcmc.dynamics.Kinetics` with a = 1.

    Reference: Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma
    sampler*, equation (27), a correction of the naive stochastic slice sampler.

    :param float friction: friction coefficient A, positive, in preconditioned units. Default 1.5.
    :param float m: mass of the kinetics, positive. Default 1.
    :param float c: softening, positive; larger values soften less. Default 3.
    :param str integrator: ``"symmetric"`` (default) or ``"euler"``.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
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
        **options: Unpack[KernelKeywords],
    ) -> None:
        dynamics = MonomialGammaLangevin(
            _build_kinetics(1.0, m, c), errors.check_positive("friction", friction)
        )
        super().__init__(model, potential_fn, dynamics=dynamics, **options)


class RiemannianKernel(SGMCMCKernel):
    """Base of the kernels in a metric that depends on the position."""

    def __init__(
        self,
        model: Callable | None,
        potential_fn: Callable | None,
        *,
        inverse_metric: str | Callable[[Any], Any],
        dynamics: RiemannianUnderdampedLangevin | RiemannianOverdampedLangevin,
        **options: Unpack[KernelKeywords],
    ) -> None:
        is_default = isinstance(inverse_metric, str) and inverse_metric == "potential"
        if not (is_default or callable(inverse_metric)):
            raise InvalidArgumentError(
                f"`inverse_metric` is {errors.describe_value(inverse_metric)}, "
                "which is not a function.",
                "pass 'potential' or a function of the unconstrained values.",
                "inverse-metric",
            )
        self._inverse_metric = inverse_metric
        if callable(inverse_metric) and options.get("dense_mass") is None:
            options["dense_mass"] = False  # so that a diagonal metric belongs to the sites
        super().__init__(model, potential_fn, dynamics=dynamics, **options)

    @property
    def _is_site_aligned(self) -> bool:
        return callable(self._inverse_metric)

    def _bind_dynamics(self, potential: Potential, preconditioner: Preconditioner) -> Any:
        user_metric, dynamics = self._inverse_metric, self._dynamics
        if not callable(user_metric):
            return dynamics

        def inverse_metric(q: Array) -> Array:
            position = potential.unravel(preconditioner.to_position(q))
            value = user_metric(position)
            if isinstance(value, dict):
                value = _flatten_diagonal_by_site(value, position)
            return jnp.asarray(value, potential.dtype)

        assert isinstance(dynamics, (RiemannianUnderdampedLangevin, RiemannianOverdampedLangevin))
        return replace(dynamics, inverse_metric=inverse_metric)

    def _check_inverse_metric_fn(self, dynamics: Any, potential: Potential) -> None:
        dim, origin = potential.dim, jnp.zeros(potential.dim, potential.dtype)
        for q in (origin, *standard_normal_points(origin)):
            value = errors.evaluate_user_function("inverse_metric", dynamics.inverse_metric, q)
            if value.shape not in ((), (dim,), (dim, dim)):
                raise InvalidArgumentError(
                    f"`inverse_metric` returns shape {value.shape}, but the model has {dim} "
                    "unconstrained coordinates.",
                    f"return a scalar, shape ({dim},) or ({dim}, {dim}).",
                    "inverse-metric",
                )
            if not is_positive_definite(value):
                raise InvalidArgumentError(
                    "`inverse_metric` is not positive definite at a typical position.",
                    "return a function that is positive everywhere, such as an exponential.",
                    "inverse-metric",
                )


class SGRHMC(RiemannianKernel):
    r"""Stochastic-gradient Riemannian HMC. With the default metric it is gSGRHMC.

    Weak order 2 (1 with ``"euler"``), one minibatch gradient per step (two with control
    variates). Choose this kernel if the scale of the posterior changes from place to place, as in
    funnels and bananas, and a metric with this scale is known.

    .. math::

        d\theta = S p\,dt, \qquad
        dp = (-S^\top\nabla U + \operatorname{div} S - \gamma S^\top S\,p)\,dt
        + \sqrt{2\gamma S^\top S}\,dW, \qquad SS^\top = G^{-1}

    with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2}`.

    Reference: Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient MCMC*, equation
    (17) with its signs corrected, and Algorithm 1.

    :param inverse_metric: :math:`G^{-1}` relative to the posterior covariance, so that 1 is a step
        of the usual length. A function from the unconstrained values (a dict by site name) to a
        positive scalar, to a positive definite matrix of shape ``(d, d)``, or to its diagonal, as
        an array of shape ``(d,)`` or a dict by site name (arrays of the sites' shapes, or scalars).
        With a function, ``dense_mass`` is False by default, so that the coordinates are those of
        the sites, each in units of its posterior SD. Or ``"potential"`` (default), for
        :func:`~numpyro_sgmcmc.dynamics.potential_metric`.
    :param float friction: friction coefficient :math:`\gamma`, positive; 1 in the paper. Default
        1.5.
    :param int momentum_period: steps between resamplings of the momentum; None (default) for never.
    :param str integrator: ``"symmetric"`` (default) or ``"euler"``.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
    :raises InvalidArgumentError: at ``init``, for a metric of the wrong shape or not positive
        definite.
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
        **options: Unpack[KernelKeywords],
    ) -> None:
        dynamics = RiemannianUnderdampedLangevin(
            friction=errors.check_positive("friction", friction),
            momentum_period=_check_period("momentum_period", momentum_period),
        )
        super().__init__(
            model, potential_fn, inverse_metric=inverse_metric, dynamics=dynamics, **options
        )


class SGRLD(RiemannianKernel):
    r"""Stochastic-gradient Riemannian Langevin dynamics.

    Weak order 1, one minibatch gradient per step (two with control variates). Choose this kernel if
    a good metric is known and a momentum does not help. Otherwise choose
    :class:`~numpyro_sgmcmc.SGRHMC`, which takes longer steps.

    .. math:: d\theta = (-G^{-1}\nabla U + \Gamma)\,dt + \sqrt{2G^{-1}}\,dW, \qquad
        \Gamma_i = \textstyle\sum_j \partial_j (G^{-1})_{ij}

    with stationary density :math:`\propto e^{-U(\theta)}`.

    References: Patterson and Teh (2013), *Stochastic gradient Riemannian Langevin dynamics on the
    probability simplex*; Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient
    MCMC*, equation (14), with the sign of :math:`\Gamma` corrected.

    :param inverse_metric: as for :class:`~numpyro_sgmcmc.SGRHMC`.
    :param str integrator: ``"euler"``.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
    :raises InvalidArgumentError: at ``init``, for a metric of the wrong shape or not positive
        definite.
    """

    integrators = ("euler",)

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        inverse_metric: str | Callable[[Any], Any] = "potential",
        **options: Unpack[KernelKeywords],
    ) -> None:
        dynamics = RiemannianOverdampedLangevin()
        super().__init__(
            model, potential_fn, inverse_metric=inverse_metric, dynamics=dynamics, **options
        )


def _init_no_auxiliary(rng_key: Array, dim: int) -> Array:
    return jnp.zeros(0)


class RecipeKernel(SGMCMCKernel):
    r"""A sampler from the user's D, Q and h.

    Weak order 1, one minibatch gradient per step (two with control variates). Choose this kernel to
    try a new SDE. The dedicated kernels are faster and have better integrators. JAX computes the
    derivatives in :math:`\Gamma`.

    The argument of all functions is the flat :math:`z = (\theta, a)` of shape ``(n,)``. It has the
    position in preconditioned units, shape ``(d,)``, and then the auxiliary variables.

    .. math::

        dz = \left(-(D(z) + Q(z))\nabla H(z) + \Gamma(z)\right)dt + \sqrt{2D(z)}\,dW,
        \qquad \Gamma_i = \sum_j \partial_j\,(D_{ij} + Q_{ij})

    with stationary density :math:`\propto e^{-H(z)}`, :math:`H(z) = U(\theta) + h(z)`.

    Reference: Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient MCMC*, equations
    (2) to (6).

    :param diffusion: D, a function from z to a positive semi-definite matrix of shape ``(n, n)``,
        or to its diagonal.
    :param curl: Q, a function from z to a skew-symmetric matrix of shape ``(n, n)``.
    :param hamiltonian: h, a function from z to a scalar, the energy that is added to U. The
        integral of :math:`e^{-h}` over the auxiliary variables must be the same at every position,
        as it is if h depends on these alone. Without auxiliary variables h must be constant.
    :param auxiliary: a function ``(rng_key, d) -> (n - d,)`` that returns initial values of the
        auxiliary variables. Default: there are none.
    :param str integrator: ``"euler"``.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
    :raises InvalidArgumentError: at ``init``, if D is not positive semi-definite, Q is not skew, a
        shape is wrong, or the integral of :math:`e^{-h}` changes with the position. The last is
        detected if h is a sum of a function of the position and one of the auxiliary variables, or
        quadratic in the latter (at most 100 of them).

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
        **options: Unpack[KernelKeywords],
    ) -> None:
        functions = {"diffusion": diffusion, "curl": curl, "hamiltonian": hamiltonian}
        for name, function in {**functions, "auxiliary": auxiliary}.items():
            errors.check_callable(name, function)
        self._auxiliary = auxiliary  # for `settings`: the SDE calls it `init_auxiliary`
        dynamics = Recipe(diffusion, curl, hamiltonian, auxiliary)
        super().__init__(model, potential_fn, dynamics=dynamics, **options)

    def _check_user_functions(self, potential: Potential) -> None:
        dynamics = self._dynamics
        assert isinstance(dynamics, Recipe)
        check_recipe(dynamics, potential.dim)


class SGHMC(UnderdampedKernel):
    r"""Stochastic-gradient HMC with Euler's method.

    Weak order 1, one minibatch gradient per step (two with control variates). Choose this kernel to
    compare with published results. :class:`~numpyro_sgmcmc.SGHMCSplit` costs the same per step and
    has the same bias at steps three times as large. A step of size h from :math:`(\theta, p)` is

    .. math::

        p \leftarrow p - \gamma h p - h\nabla\tilde U(\theta) + \sqrt{2\gamma h}\,\zeta, \quad
        \theta \leftarrow \theta + h p

    The SDE is that of :class:`~numpyro_sgmcmc.SGHMCSplit`.

    Reference: Chen, Fox and Guestrin (2014), *Stochastic gradient Hamiltonian Monte Carlo*,
    equation (13); Chen, Ding and Carin (2015), Algorithm 2 of the supplement (SGHMC-E).

    :param float friction: friction coefficient :math:`\gamma` (:math:`D` in the paper), positive,
        in preconditioned units. Default 1.5.
    :param str integrator: ``"euler"``.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
    """

    integrators = ("euler",)


class SGLD(SGMCMCKernel):
    r"""Stochastic-gradient Langevin dynamics.

    Weak order 1, one minibatch gradient per step (two with control variates). Choose this kernel as
    the simplest baseline. For the same bias it needs about four times as many steps per draw as
    :class:`~numpyro_sgmcmc.SGHMCSplit`. One step of size :math:`h`, and the SDE:

    .. math:: \theta \leftarrow \theta - h\nabla\tilde U(\theta) + \sqrt{2h}\,\zeta

    .. math:: d\theta = -\nabla U(\theta)\,dt + \sqrt{2}\,dW

    with stationary density :math:`\propto e^{-U(\theta)}`.

    Reference: Welling and Teh (2011), *Bayesian learning via stochastic gradient Langevin
    dynamics*, equation (4), whose step :math:`\epsilon` is :math:`2h`.

    :param str integrator: ``"euler"``.
    :param options: see :class:`~numpyro_sgmcmc.SGHMCSplit`, also for ``model``, ``potential_fn``.
    """

    integrators = ("euler",)

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        **options: Unpack[KernelKeywords],
    ) -> None:
        super().__init__(model, potential_fn, dynamics=OverdampedLangevin(), **options)


def _build_kinetics(a: float, m: Any, c: Any) -> Kinetics:
    """Return the kinetic energy of the paper's symbols."""
    return Kinetics(a, errors.check_positive("m", m), errors.check_positive("c", c))


def _check_period(name: str, period: Any) -> int | None:
    """Check that a number of steps between resamplings is a positive integer or None."""
    if period is not None:
        errors.check_positive_int(name, period)
    return period


def _flatten_diagonal_by_site(
    diagonal_by_site: dict[str, Any], position: dict[str, Array]
) -> Array:
    """Return the flat form of a diagonal by site name, shape ``(d,)``."""
    if not isinstance(position, dict) or set(diagonal_by_site) != set(position):
        sites = ", ".join(f"'{s}'" for s in position)
        raise InvalidArgumentError(
            f"`inverse_metric` returns the keys {sorted(diagonal_by_site)}, which are not the "
            "sites.",
            f"return a dict with the keys {sites}.",
            "inverse-metric",
        )
    diagonal = {}
    for site, value in position.items():
        entries, shape = diagonal_by_site[site], jnp.shape(value)
        try:
            diagonal[site] = jnp.broadcast_to(entries, shape)
        except ValueError:
            raise InvalidArgumentError(
                f"`inverse_metric` returns shape {jnp.shape(entries)} for '{site}' of shape "
                f"{shape}.",
                "return an array of the site's shape, or a scalar.",
                "inverse-metric",
            ) from None
    return ravel_pytree(diagonal)[0]
