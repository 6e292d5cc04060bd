"""The NumPyro contract, once for all samplers.

A run: :meth:`SGMCMCKernel.init` reads the model, finds what all chains share (once for one set of
data, whatever the number of chains) and starts the chain; :meth:`SGMCMCKernel.sample` runs
``num_steps`` stochastic-gradient steps in one ``lax.scan``. Nothing traced is kept on the kernel.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.chain.iteration import iterate, start_chain
from numpyro_sgmcmc.chain.program import Program
from numpyro_sgmcmc.chain.read_ahead import refilled, with_empty_block
from numpyro_sgmcmc.chain.start_locals import start_locals
from numpyro_sgmcmc.chain.state import SGMCMCState
from numpyro_sgmcmc.data.arguments import Arguments, HeldArrays, is_traced, refuse_other_numbers
from numpyro_sgmcmc.data.host import plain_failures
from numpyro_sgmcmc.data.minibatch import STREAMS
from numpyro_sgmcmc.data.progress import passes_shown, stages_shown
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.coordinates import Coordinates
from numpyro_sgmcmc.posterior.gradients import ESTIMATORS
from numpyro_sgmcmc.posterior.handlers import FullDataModel, prior_draws
from numpyro_sgmcmc.posterior.locals.checks import refuse_options_with_locals
from numpyro_sgmcmc.posterior.locals.sites import collected_sites
from numpyro_sgmcmc.posterior.target import Target, function_target
from numpyro_sgmcmc.posterior.targets import target_of
from numpyro_sgmcmc.samplers.adapted import Adapted
from numpyro_sgmcmc.samplers.compatibility import check_compatible
from numpyro_sgmcmc.samplers.mass_matrix import mass_matrix, mass_matrix_mask
from numpyro_sgmcmc.samplers.options import local_options
from numpyro_sgmcmc.samplers.schedules import first_step_size
from numpyro_sgmcmc.warmup import NO_NOISE, Adaptation, Noise, Settings, adapt
from numpyro_sgmcmc.warmup.starts import check_start, check_values, first_positions

__all__ = ["KernelOptions", "SGMCMCKernel", "typical_positions"]

_DENSE_MAX_DIM = 100


def _is_batch(rng_key: Array) -> bool:
    """Whether the key is one a chain: raw keys have one more axis than typed ones."""
    typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return jnp.ndim(rng_key) == (1 if typed else 2)


def typical_positions(like: Array) -> Array:
    """Whitened positions as the posterior may have them, at which to check users' functions."""
    return random.normal(random.key(0), (8, *like.shape), like.dtype)


class KernelOptions(TypedDict, total=False):
    """The keywords that all kernels share; :class:`SGMCMCKernel` describes them."""

    step_size: float | Callable[[Any], Any] | None
    num_steps: int | None
    inverse_mass_matrix: Any
    dense_mass: bool | list[tuple[str, ...]] | None
    adapt_step_size: bool
    adapt_mass_matrix: bool
    gradient: str
    minibatch: str
    noise_compensation: bool
    target_bias: float
    init_strategy: Callable
    gibbs_fn: Callable | None
    gibbs_sites: Sequence[str]
    collect_locals: bool | Sequence[str]


def _eagerly(rng_key: Array) -> AbstractContextManager[None]:
    """Leave the trace (pmap's, vmap's, jit's) in which a kernel is initialised, if it is in one."""
    return jax.ensure_compile_time_eval() if is_traced(rng_key) else nullcontext()


@partial(jax.jit, static_argnames="fn")
def _with_held(fn: Callable, z: Any, held: Arguments) -> Any:
    """``fn`` of unconstrained values and the arguments; compiled, so that nothing is copied."""
    return fn(z, held.read())


@partial(jax.jit, static_argnames="target")
def _full_gradients(target: Target, positions: Array, held: Arguments) -> Array:
    arguments = held.read()
    return jax.lax.map(lambda q: target.full_gradient(q, arguments), positions)


class SGMCMCKernel(MCMCKernel):
    r"""Base of the stochastic-gradient kernels: everything but the choice of SDE and scheme.

    :param model: Python callable containing NumPyro primitives, with a subsampled plate around
        the data. Exclusive with ``potential_fn``.
    :param potential_fn: potential energy of a pytree of unconstrained values, in place of a model.
    :param dynamics: the SDE.
    :param scheme: name of the integrator.
    :param step_size: step size in whitened units (posterior standard deviations), positive; or a
        schedule ``int -> float`` of the number of steps so far, warm-up counted in, such as any
        optax schedule. Default None: chosen in warm-up.
    :param num_steps: stochastic-gradient steps an iteration. Default None: as many as make draws
        about independent, from 1 to 500.
    :param inverse_mass_matrix: about the posterior covariance in unconstrained space: shape
        ``(d,)``, ``(d, d)``, or a dict of blocks by tuples of site names. Kept as given. Default
        None: found in warm-up.
    :param dense_mass: whether the mass matrix found is dense: a bool, or a list of tuples of site
        names that form blocks. Default None: dense for up to 100 coordinates.
    :param adapt_step_size: if False and no ``step_size`` is given, take the scheme's own.
    :param adapt_mass_matrix: if False and no ``inverse_mass_matrix`` is given, take the identity.
    :param gradient: ``"plain"``, ``"control_variate"``, ``"second_order_control_variate"`` (keeps
        a Hessian, so for few coordinates), or ``"auto"`` (default): the one that goes furthest
        at the same cost, by the noise measured in warm-up.
    :param minibatch: ``"blocks"`` of consecutive rows, ``"epoch"`` (random rows, each once an
        epoch), ``"iid"`` (random rows), or ``"auto"`` (default): blocks, unless they prove
        clearly noisier than random rows.
    :param noise_compensation: whether to inject less noise where the minibatch gradient brings its
        own: :math:`2\gamma h - h^2\hat V` in place of :math:`2\gamma h` (Ma, Chen and Fox 2015,
        equation (9)), with :math:`\hat V` from the gradients of single rows, measured in warm-up
        at typical positions. For plain gradients, whose noise is about the same everywhere; that
        of control variates it compensates on average only. Needs independent minibatches:
        ``minibatch`` is then ``"iid"``. Default False.
    :param target_bias: relative error of posterior standard deviations that the choice of the
        step size may allow. Default 0.05.
    :param init_strategy: NumPyro initialisation strategy, from which the warm-up starts.
    :param gibbs_fn: draws of sites inside the subsampled plate from their conditional, as in
        :class:`~numpyro.infer.hmc_gibbs.HMCGibbs` and for the rows of a minibatch:
        ``gibbs_fn(rng_key, gibbs_sites, hmc_sites, rows)``, called by these keywords with dicts of
        constrained values (of the minibatch's rows for sites inside the plate) and the rows'
        indices, returns a dict of new values of all ``gibbs_sites``. That they come from the
        conditional is the user's affair.
    :param gibbs_sites: names of those sites, which may be discrete.
    :param collect_locals: whether draws hold the sites inside the subsampled plate, for all rows:
        a bool, or names of such sites. Default False: they take the memory of all rows a draw.
    :raises ValueError: at construction, for an option that is unknown or out of range; at
        ``init``, naming the site, plate or argument that cannot be sampled.
    """

    sample_field = "z"
    default_fields = ("z", "diverging")

    largest_step_sizes: ClassVar[dict[str, float]]
    """For each scheme, the step size that suits a whitened Gaussian and an exact gradient."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the shared keywords in the subclass's signature, for `help` and completion."""
        super().__init_subclass__(**kwargs)
        own = inspect.signature(cls.__init__).parameters
        shared = inspect.signature(SGMCMCKernel.__init__).parameters
        names = [n for n in KernelOptions.__annotations__ if n not in own]
        if "options" in own:
            visible = [p for n, p in own.items() if n not in ("self", "options")]
            cls.__signature__ = inspect.Signature(visible + [shared[n] for n in names])

    def __init__(
        self,
        model: Callable | None,
        potential_fn: Callable | None,
        *,
        dynamics: Dynamics,
        scheme: str,
        step_size: float | Callable[[Any], Any] | None = None,
        num_steps: int | None = None,
        inverse_mass_matrix: Any = None,
        dense_mass: bool | list[tuple[str, ...]] | None = None,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = True,
        gradient: str = "auto",
        minibatch: str = "auto",
        noise_compensation: bool = False,
        target_bias: float = 0.05,
        init_strategy: Callable = init_to_uniform,
        gibbs_fn: Callable | None = None,
        gibbs_sites: Sequence[str] = (),
        collect_locals: bool | Sequence[str] = False,
        **unknown: Any,
    ) -> None:
        checks.no_more_keywords(type(self), unknown)
        if (model is None) == (potential_fn is None):
            raise ValueError("Only one of `model` or `potential_fn` must be specified.")
        if model is not None:
            checks.function("model", model)
        else:
            checks.function("potential_fn", potential_fn)
        checks.one_of("scheme", scheme, tuple(self.largest_step_sizes))
        checks.one_of("gradient", gradient, ("auto", *ESTIMATORS))
        checks.one_of("minibatch", minibatch, ("auto", *STREAMS))
        checks.function("init_strategy", init_strategy)
        if num_steps is not None:
            checks.positive_int("num_steps", num_steps)
        checks.positive("target_bias", target_bias)
        checks.is_bool("adapt_step_size", adapt_step_size)
        checks.is_bool("adapt_mass_matrix", adapt_mass_matrix)
        checks.is_bool("noise_compensation", noise_compensation)
        if step_size is not None and not callable(step_size):
            checks.positive("step_size", step_size)
            step_size = float(step_size)
        self._model = model
        self._potential_fn = potential_fn
        self._dynamics = dynamics
        self._scheme = scheme
        self._step_size = step_size
        self._num_steps = num_steps
        self._inverse_mass_matrix = inverse_mass_matrix
        self._dense_mass = dense_mass
        self._adapt_step_size = adapt_step_size
        self._adapt_mass_matrix = adapt_mass_matrix
        self._gradient = gradient
        if noise_compensation and minibatch not in ("auto", "iid"):
            raise ValueError(
                f"`noise_compensation` needs independent minibatches, but `minibatch` is "
                f"{minibatch!r}, in which the noise of one minibatch takes back that of others: "
                "use minibatch='iid', or leave it out."
            )
        self._noise_compensation = bool(noise_compensation)
        self._minibatch = "iid" if noise_compensation else minibatch
        local_options(model, gibbs_fn, gibbs_sites, collect_locals)
        self._gibbs_fn = gibbs_fn
        self._gibbs_sites = tuple(gibbs_sites)
        self._collect_locals = collect_locals
        self._target_bias = float(target_bias)
        self._init_strategy = init_strategy
        self._forget()

    def _forget(self) -> None:
        """Drop all that `init` finds."""
        # NumPyro calls `init` before every run of a kernel whose `_sample_fn` is None.
        self._sample_fn: Callable | None = None
        self._targets: dict[Any, Target] = {}
        self._adapted: Adapted | None = None
        self._held = HeldArrays()
        self._target: Target | None = None
        self._num_warmup = 0
        self._noise = NO_NOISE

    @property
    def dynamics(self) -> Dynamics:
        """The SDE."""
        return self._dynamics

    @property
    def scheme(self) -> str:
        """Name of the integrator."""
        return self._scheme

    @property
    def noise(self) -> Noise:
        """The gradient's noise at typical positions, as the last warm-up measured it."""
        return self._noise

    @property
    def target(self) -> Target:
        """The posterior, once the kernel is initialised."""
        return self._ready

    @property
    def adaptation(self) -> Adaptation:
        """What all chains share, once the kernel is initialised."""
        if self._adapted is None:
            raise RuntimeError(f"{type(self).__name__} must be initialised first: call `init`.")
        return self._adapted.adaptation

    def coordinates(self, state: SGMCMCState) -> Coordinates:
        """The whitened coordinates of a state, or of one chain's where several are batched."""
        adapt_state = state.adapt_state
        if _is_batch(state.rng_key):
            adapt_state = jax.tree.map(lambda x: x[0], adapt_state)
        return Coordinates(adapt_state.anchor, adapt_state.mass_matrix_sqrt_inv)

    def has_local_sites(self, model_args: tuple, model_kwargs: dict | None) -> bool:
        """Whether the model has latent sites inside its subsampled plate."""
        if self._model is None:
            return False
        return self._read(Arguments(model_args, model_kwargs), None, False).locals is not None

    def full_gradients(self, positions: Array, arguments: Arguments) -> Array:
        """Gradients on all rows at flat positions, one after the other; shape ``(m, d)``."""
        if self._ready.locals is not None:
            raise ValueError(
                "With latent sites inside the subsampled plate the globals alone have no gradient "
                "to take on all rows."
            )
        held = self._held.hold(arguments)
        shown = passes_shown("gradients on all rows", arguments.hosts, len(positions))
        with plain_failures(arguments.hosts), shown:
            return jax.block_until_ready(_full_gradients(self._ready, positions, held))

    @property
    def model(self) -> Callable | None:
        """The model on all rows; ``None`` for a kernel made from a potential function."""
        return None if self._model is None else FullDataModel(self._model)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        return f"{state.num_steps} steps of size {state.adapt_state.step_size:.2e}"

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Constrain the sites and add the deterministic ones that do not vary with the rows."""
        held = self._held.hold(Arguments(model_args, model_kwargs))
        return lambda z: self._ready.with_constrained_locals(
            lambda z: _with_held(self._ready.postprocess, z, held), z
        )

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Constrain the sites, without running the model unless a support depends on values."""
        held = self._held.hold(Arguments(model_args, model_kwargs))
        return lambda z: self._ready.with_constrained_locals(
            lambda z: _with_held(self._ready.constrain, z, held), z
        )

    def wrap_model(self, wrapper: Callable) -> SGMCMCKernel:
        """A copy of this kernel for ``wrapper(model)``."""
        if self._model is None:
            raise ValueError("`wrap_model` needs a kernel made from a model.")
        kernel = copy.copy(self)
        kernel._forget()
        kernel._model = wrapper(self._model)
        return kernel

    def ready_variant(
        self, *, adaptation: Adaptation | None = None, target: Target | None = None
    ) -> SGMCMCKernel:
        """A copy of an initialised kernel that need not be initialised again.

        :param adaptation: what to have in place of what `init` found, or None to keep that.
        :param target: the posterior to have, or None to keep it.
        """
        assert self._adapted is not None
        kernel = copy.copy(self)  # which drops what `init` found, as pickling does
        kernel.__dict__.update(self.__dict__)
        if adaptation is not None:
            kernel._adapted = self._adapted._replace(adaptation=adaptation)
        if target is not None:
            kernel._target = target
        return kernel

    def refresh(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: dict | None
    ) -> SGMCMCState:
        """Anchor the control variates at the present position, for changed conditioning values.

        Costs one gradient on all rows; a kernel with plain gradients caches nothing and returns
        the state as it is.
        """
        if self.adaptation.estimator == "plain":
            return state
        arguments = self._held.hold(Arguments(model_args, model_kwargs)).read()
        anchor = ravel_pytree(state.z)[0].astype(self._ready.dtype)
        adapt_state = state.adapt_state._replace(
            anchor=anchor, anchor_gradient=self._ready.full_gradient(anchor, arguments)
        )
        if adapt_state.anchor_hessian is not None:
            hessian = self._ready.full_expansion(anchor, arguments)[2]
            adapt_state = adapt_state._replace(anchor_hessian=hessian)
        dynamics = state.dynamics._replace(position=jnp.zeros_like(anchor))
        return state._replace(dynamics=dynamics, adapt_state=adapt_state)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Any,
        model_args: tuple,
        model_kwargs: dict | None,
    ) -> SGMCMCState:
        """Read the model, adapt once for all chains, and start each chain about the anchor.

        :param rng_key: one key, or one a chain.
        :param num_warmup: number of warm-up iterations.
        :param init_params: unconstrained values at which the chains start, or None.
        :param model_args: the model's positional arguments.
        :param model_kwargs: the model's keyword arguments.
        :return: the chain's first state, batched where the key is.
        :raises ValueError: naming the site, plate or argument that cannot be sampled.
        :raises RuntimeError: where no finite starting point is found.
        """
        checks.check_key(rng_key)
        arguments = Arguments(model_args, model_kwargs)
        if self._model is not None:
            refuse_other_numbers(arguments, self._model)
        is_batch = _is_batch(rng_key)
        is_block = GIBBS_SITES_KWARG in arguments.kwargs
        with _eagerly(rng_key), plain_failures(arguments.hosts):
            concrete = self._concrete(arguments)
            if concrete.sharded and jax.sharding.get_abstract_mesh().manual_axes:
                raise ValueError(
                    "chain_method='parallel' gives every device a chain, but the devices share the "
                    "rows: use chain_method='vectorized'."
                )
            self._target = target = self._read(concrete, init_params, is_batch)
            if is_block and target.locals is not None:
                raise ValueError(
                    f"Site '{target.locals.names[0]}' is latent inside the subsampled plate, which "
                    "is not supported in a block of Gibbs: draw it by `gibbs_fn`, or let this "
                    "kernel move all sites."
                )
            if is_block:
                init_params = None  # Gibbs gives draws from the prior, constrained
            num_chains = len(rng_key) if is_batch else None
            init_params = check_start(init_params, target, concrete, num_chains)
            adaptation = self._adapt(target, concrete, init_params, is_batch)
            coordinates = adaptation.anchored.coordinates
            self._check_dynamics(self._located_dynamics(target, coordinates), target.dim)
        self._be_ready(arguments, num_warmup)
        start = partial(
            start_chain,
            anchored=adaptation.anchored,
            step_size=jnp.asarray(adaptation.step_size, target.dtype),
            num_steps=jnp.asarray(adaptation.num_steps),
            gradient_noise=adaptation.gradient_noise,
            target=target,
            dynamics=self._dynamics,
            minibatch=adaptation.minibatch,
        )
        state = (jax.vmap(start) if is_batch else start)(rng_key, init_params)
        room = partial(with_empty_block, self._program, num_chains=len(rng_key) if is_batch else 1)
        state = (jax.vmap(room) if is_batch else room)(state)
        if target.locals is not None:
            state = start_locals(self._program, state, concrete, init_params is not None)
        if is_block:
            state = self.refresh(state, model_args, model_kwargs)
        return state

    def restore(
        self,
        adaptation: Adaptation,
        num_warmup: int,
        z: Any,
        model_args: tuple,
        model_kwargs: dict | None,
    ) -> None:
        """Be as after an :meth:`init` that found ``adaptation``, without looking for it again.

        :param adaptation: the :attr:`adaptation` of a kernel with the same settings and data.
        :param num_warmup: number of warm-up iterations.
        :param z: unconstrained values of one chain; only their shapes matter.
        :param model_args: the model's positional arguments.
        :param model_kwargs: the model's keyword arguments.
        """
        arguments = Arguments(model_args, model_kwargs)
        self._target = self._read(arguments, z, is_batch=False)
        self._adapted = Adapted.to(arguments, adaptation, self._target)
        self._noise = adaptation.noise
        self._be_ready(arguments, num_warmup)

    def _be_ready(self, arguments: Arguments, num_warmup: int) -> None:
        self._held.keep_only(arguments)
        for host in arguments.hosts:
            host.forget()
        self._num_warmup = num_warmup
        self._sample_fn = self.sample

    def sample(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: dict | None
    ) -> SGMCMCState:
        """Run ``num_steps`` steps, each on a minibatch of its own.

        :raises ValueError: where the data are others than those that control variates hold the
            gradient on.
        """
        if is_traced(state.rng_key):  # once a compilation: it looks at all of the data
            assert self._adapted is not None
            self._adapted.check_same_data(Arguments(model_args, model_kwargs))
        arguments = self._held.hold(Arguments(model_args, model_kwargs)).read()
        state = refilled(self._program, state)
        place = None if state.block is None else state.block.place.ravel()[0]
        one = partial(iterate, self._program, arguments=arguments, place=place)
        if not _is_batch(state.rng_key):
            return one(state)
        return jax.vmap(one, spmd_axis_name=self._chain_axis(len(state.rng_key)))(state)

    def _chain_axis(self, num_chains: int) -> str | None:
        """The mesh axis over which chains are spread, if they are."""
        shards = self._ready.shards
        # Several processes could not read each other's draws.
        if shards is None or shards.chain_axis is None or jax.process_count() > 1:
            return None
        axis = shards.chain_axis
        return axis if num_chains % shards.mesh.shape[axis] == 0 else None

    @property
    def _program(self) -> Program:
        target = self._ready
        return Program(
            target=target,
            adaptation=self.adaptation,
            scheme=self._scheme,
            locate=partial(self._located_dynamics, target),
            schedule=self._step_size if callable(self._step_size) else None,
            num_warmup=self._num_warmup,
            collected=collected_sites(target.locals, self._collect_locals),
        )

    @property
    def _ready(self) -> Target:
        if self._target is None:
            raise RuntimeError(f"{type(self).__name__} must be initialised first: call `init`.")
        return self._target

    def _concrete(self, arguments: Arguments) -> Arguments:
        """The arguments with concrete arrays, which the shared part of the warm-up needs."""
        if arguments.is_concrete:
            return arguments
        others = {k: v for k, v in arguments.kwargs.items() if k != GIBBS_SITES_KWARG}
        if not Arguments(arguments.args, others).is_concrete or len(others) == len(
            arguments.kwargs
        ):
            raise ValueError(
                "The model's arguments are being traced by jit, vmap or pmap. Call MCMC.run "
                "outside of it, or let the transformed function close over the data."
            )
        # Under pmap Gibbs conditions on traced prior draws; ours serve to adapt as well.
        assert self._model is not None
        names = list(arguments.kwargs[GIBBS_SITES_KWARG])
        empty = Arguments(arguments.args, {**others, GIBBS_SITES_KWARG: {}})
        drawn = prior_draws(self._model, empty, names)
        return Arguments(arguments.args, {**others, GIBBS_SITES_KWARG: drawn})

    def _read(self, arguments: Arguments, init_params: Any, is_batch: bool) -> Target:
        """The target for arguments of this form, read from the model the first time."""
        if self._model is None:
            assert self._potential_fn is not None
            if init_params is None:
                raise ValueError(
                    "Valid value of `init_params` must be provided with `potential_fn`."
                )
            check_values(init_params)
            one = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[int(is_batch) :], jnp.result_type(x)),
                init_params,
            )
            leaves, structure = jax.tree.flatten(one)
            key = structure, tuple(x.shape for x in leaves)
            if key not in self._targets:
                self._targets[key] = function_target(self._potential_fn, one)
            return self._targets[key]
        form = (arguments.signature, jnp.result_type(float))
        if form not in self._targets:
            target = target_of(
                self._model,
                arguments,
                self._init_strategy,
                self._gibbs_fn,
                self._gibbs_sites,
            )
            refuse_options_with_locals(
                target, arguments, self._minibatch, self._gradient, self._collect_locals
            )
            check_compatible(target, self._gradient, self._noise_compensation)
            self._targets[form] = target
        return self._targets[form]

    def _adapt(
        self, target: Target, arguments: Arguments, init_params: Any, is_batch: bool
    ) -> Adaptation:
        """What all chains share, found once for one set of data."""
        if self._adapted is not None:
            if self._adapted.serves(target, arguments):
                return self._adapted.adaptation
            self._held = HeldArrays()
        with stages_shown(arguments.hosts) as progress:
            starts = first_positions(target, arguments, init_params, is_batch)
            has_start = init_params is not None and not is_traced(init_params)
            settings = self._settings(target, has_start)
            adaptation = adapt(target, arguments, settings, starts, progress)
        self._adapted = Adapted.to(arguments, adaptation, target)
        self._noise = adaptation.noise
        return adaptation

    def _settings(self, target: Target, has_start: bool) -> Settings:
        names = () if target.sites is None else target.sites
        mask = mass_matrix_mask(self._dense_mass, names, target.dim)
        is_dense = (
            target.dim <= _DENSE_MAX_DIM if self._dense_mass is None else bool(self._dense_mass)
        )
        matrix = mass_matrix(self._inverse_mass_matrix, names, target.dim)
        if matrix is None and not self._adapt_mass_matrix:
            matrix = np.ones(target.dim)
        step_size = self._step_size
        if callable(step_size):
            step_size = first_step_size(step_size)
        elif step_size is None and not self._adapt_step_size:
            step_size = self.largest_step_sizes[self._scheme]
        return Settings(
            dynamics=self._dynamics,
            scheme=self._scheme,
            locate=partial(self._located_dynamics, target),
            has_default_dynamics=self._has_default_dynamics(),
            largest_step_size=self.largest_step_sizes[self._scheme],
            step_size=step_size,
            num_steps=self._num_steps,
            gradient=self._gradient,
            minibatch=self._minibatch,
            inverse_mass_matrix=matrix,
            is_dense=is_dense,
            mask=mask,
            target_bias=self._target_bias,
            noise_compensation=self._noise_compensation,
            has_start=has_start,
        )

    def _located_dynamics(self, target: Target, coordinates: Coordinates) -> Dynamics:
        """The SDE; for kernels whose SDE depends on the position, told where that is."""
        return self._dynamics

    def _has_default_dynamics(self) -> bool:
        """Whether the SDE has the settings for which the largest step sizes are known to suit."""
        try:
            default = type(self)(potential_fn=abs, scheme=self._scheme)  # type: ignore[call-arg]
        except TypeError:  # a subclass with required arguments of its own
            return False
        return self._dynamics == default._dynamics

    def _check_dynamics(self, dynamics: Dynamics, dim: int) -> None:
        """Refuse an SDE that makes no sense at the anchor, before any step."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_sample_fn": None,
            "_targets": {},
            "_adapted": None,
            "_held": HeldArrays(),
            "_target": None,
        }
