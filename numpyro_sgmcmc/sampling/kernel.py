"""What NumPyro hands to a kernel: keys of one chain or several, and the model's arguments.

Functions of the posterior, compiled so that large arrays are held and not copied.

What a kernel's `init` finds: kept in one object, and found again where it was forgotten.

The NumPyro contract, once for all samplers.

A run: :meth:`SGMCMCKernel.init` reads the model, finds what all chains share (once for one set of
data, whatever the number of chains) and starts the chain; :meth:`SGMCMCKernel.sample` runs
``num_steps`` stochastic-gradient steps in one ``lax.scan``. Nothing traced is kept on the kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation import NO_NOISE, Adaptation, GradientNoiseStats, adapt
from numpyro_sgmcmc.adaptation.initialisation import generate_init_positions, validate_init_params
from numpyro_sgmcmc.compilation import clear_compilation_cache_if_full
from numpyro_sgmcmc.data.arguments import (
    Arguments,
    DeviceArrayCache,
    check_jax_representable,
    is_traced,
)
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.data.sharded_array import Shards
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.handlers import ConditionedModel, FullDataModel, sample_prior_values
from numpyro_sgmcmc.model.local_latents import select_collected_sites
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import show_adaptation_progress, show_data_passes
from numpyro_sgmcmc.sampling.chain_init import init_chains
from numpyro_sgmcmc.sampling.gibbs import condition_on_variational_means, recenter_state
from numpyro_sgmcmc.sampling.mass_matrix import build_mass_matrix_blocks
from numpyro_sgmcmc.sampling.options import (
    KernelOptions,
    KernelReprMixin,
    Options,
    build_potential_from_fn,
    build_potential_from_model,
    build_warmup_settings,
    check_chain_method,
    check_gibbs_block_collects_locals,
    document_shared_options,
    get_single_chain_shapes,
)
from numpyro_sgmcmc.sampling.state import ChainConfig, SGMCMCState
from numpyro_sgmcmc.sampling.step import run_iteration

__all__ = [
    "AdaptationRecord",
    "InitCache",
    "SGMCMCKernel",
    "call_with_cached_arrays",
    "concretize_arguments",
    "escape_trace",
    "find_chain_mesh_axis",
    "full_gradients",
    "has_chain_axis",
]


def has_chain_axis(rng_key: Array) -> bool:
    """Whether the key is one a chain: raw keys have one more axis than typed ones."""
    typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return jnp.ndim(rng_key) == (1 if typed else 2)


def escape_trace(rng_key: Array) -> AbstractContextManager[None]:
    """Leave the trace (pmap's, vmap's, jit's) in which a kernel is initialised, if it is in one."""
    return jax.ensure_compile_time_eval() if is_traced(rng_key) else nullcontext()


def find_chain_mesh_axis(shards: Shards | None, num_chains: int) -> str | None:
    """The mesh axis over which chains are spread, if they are."""
    # Several processes could not read each other's draws.
    if shards is None or shards.chain_axis is None or jax.process_count() > 1:
        return None
    axis = shards.chain_axis
    return axis if num_chains % shards.mesh.shape[axis] == 0 else None


def concretize_arguments(model: Callable | None, arguments: Arguments) -> Arguments:
    """The arguments with concrete arrays, which the shared part of the warm-up needs.

    :raises ValueError: where the data are traced.
    """
    if arguments.is_concrete:
        return arguments
    others = {k: v for k, v in arguments.kwargs.items() if k != GIBBS_SITES_KWARG}
    if not Arguments(arguments.args, others).is_concrete or len(others) == len(arguments.kwargs):
        raise InvalidArgumentError(
            "The model's arguments are being traced by jit, vmap or pmap. Call MCMC.run "
            "outside of it, or let the transformed function close over the data."
        )
    # Under pmap Gibbs conditions on traced prior draws; ours serve to adapt as well.
    assert model is not None
    names = list(arguments.kwargs[GIBBS_SITES_KWARG])
    empty = Arguments(arguments.args, {**others, GIBBS_SITES_KWARG: {}})
    drawn = sample_prior_values(model, empty, names)
    return Arguments(arguments.args, {**others, GIBBS_SITES_KWARG: drawn})


@partial(jax.jit, static_argnames="fn")
def call_with_cached_arrays(fn: Callable, z: Any, cached_arguments: Arguments) -> Any:
    """``fn`` of unconstrained values and the arguments."""
    return fn(z, cached_arguments.dereference())


@partial(jax.jit, static_argnames="potential")
def _full_gradients_jitted(
    potential: Potential,
    positions: Array,
    cached_arguments: Arguments,
    conditioning_values: dict[str, Array] | None,
) -> Array:
    arguments = cached_arguments.dereference()

    def one(x: tuple[Array, dict[str, Array] | None]) -> Array:
        position, values = x
        if values is None:
            return potential.full_gradient(position, arguments)
        kwargs = {**arguments.kwargs, GIBBS_SITES_KWARG: values}
        return potential.full_gradient(position, Arguments(arguments.args, kwargs))

    return jax.lax.map(one, (positions, conditioning_values))


def full_gradients(
    potential: Potential,
    array_cache: DeviceArrayCache,
    positions: Array,
    arguments: Arguments,
    conditioning_values: dict[str, Array] | None = None,
) -> Array:
    """Gradients on all rows at flat positions, one after the other; shape ``(m, d)``.

    :param conditioning_values: for a block of Gibbs, values of the other sites at each position, ``(m, ...)``.
    :raises ValueError: for a model with local sites.
    """
    if potential.local_latents is not None:
        raise InvalidArgumentError(
            "With latent sites inside the subsampled plate the globals alone have no gradient "
            "to take on all rows."
        )
    shown = show_data_passes("gradients on all rows", arguments.host_arrays, len(positions))
    with unwrap_callback_errors(arguments.host_arrays), shown:
        return jax.block_until_ready(
            _full_gradients_jitted(
                potential, positions, array_cache.cache_arrays(arguments), conditioning_values
            )
        )


class AdaptationRecord(NamedTuple):
    """What the warm-up found, and for what: to know when to adapt anew, and when it is too late.

    - **adaptation** - what was found.
    - **potential** - the posterior.
    - **arguments** - the model's arguments, concrete.
    - **checksums** - of the data, at that time.
    """

    adaptation: Adaptation
    potential: Potential
    arguments: Arguments
    checksums: tuple[int | None, ...]

    def is_valid_for(self, potential: Potential, arguments: Arguments) -> bool:
        """Whether this posterior, with these very arrays, unchanged, is the one adapted to."""
        return (
            self.potential is potential
            and _have_identical_arrays(arguments, self.arguments)
            and self.checksums == arguments.checksums
        )

    def is_valid_for_gibbs_block(self, arguments: Arguments) -> bool:
        """Whether a block of Gibbs has adapted to these very arrays, unchanged, and to values of
        other sites found for them.
        """
        values = self.arguments.kwargs[GIBBS_SITES_KWARG]
        kept = {name: values[name] for name in arguments.kwargs[GIBBS_SITES_KWARG]}
        then = Arguments(self.arguments.args, {**self.arguments.kwargs, GIBBS_SITES_KWARG: kept})
        return (
            _have_identical_arrays(arguments, then) and self.checksums == self.arguments.checksums
        )

    def check_same_data(self, arguments: Arguments) -> None:
        """Control variates with another data set's gradient lead to a wrong posterior, silently.

        :raises ValueError: for such data.
        """
        is_block = GIBBS_SITES_KWARG in arguments.kwargs  # whose changes `refresh` knows of
        if is_block or not self.adaptation.estimator.needs_reference or not arguments.is_concrete:
            return
        now, then = arguments.arrays, self.arguments.arrays
        if (
            len(now) == len(then)
            and arguments.host_arrays == self.arguments.host_arrays
            and all(a is b or _are_arrays_equal(a, b) for a, b in zip(now, then, strict=True))
            and self.arguments.checksums == self.checksums
        ):
            return
        raise InvalidArgumentError(
            "The data are not those that the warm-up adapted to, whose gradient the control "
            "variates hold: call `mcmc.run` with a new MCMC object, or use gradient_estimator='minibatch'."
        )


def _have_identical_arrays(a: Arguments, b: Arguments) -> bool:
    """Whether all that is no array is equal, and the arrays are the very same."""
    return a.signature == b.signature and all(
        x is y for x, y in zip(a.arrays, b.arrays, strict=True)
    )


def _are_arrays_equal(a: Any, b: Any) -> bool:
    """Whether two arrays hold the same, missing values included."""
    if a.shape != b.shape:
        return False
    if isinstance(a, jax.Array) and not a.is_fully_addressable:
        return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact)))
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")


@dataclass(eq=False)
class InitCache:
    """What `init` finds.

    - **potentials** - the posteriors read so far, by the form of the arguments.
    - **array_cache** - large arrays, as compiled steps see them.
    - **record** - what the warm-up found; None before it.
    - **potential** - the posterior of the last `init`; None before it.
    - **noise_stats** - the gradient's noise at typical positions, as the last warm-up measured it.
    - **num_warmup** - number of warm-up iterations.
    - **is_ready** - whether `init` has ended, so that the kernel can sample.
    """

    potentials: dict[Any, Potential] = field(default_factory=dict)
    array_cache: DeviceArrayCache = field(default_factory=DeviceArrayCache)
    record: AdaptationRecord | None = None
    potential: Potential | None = None
    noise_stats: GradientNoiseStats = NO_NOISE
    num_warmup: int = 0
    is_ready: bool = False

    def store_adaptation(
        self, adaptation: Adaptation, potential: Potential, arguments: Arguments
    ) -> None:
        """Keep what has been found just now."""
        self.record = AdaptationRecord(adaptation, potential, arguments, arguments.checksums)
        self.noise_stats = adaptation.noise_stats

    def finish_init(self, arguments: Arguments, num_warmup: int) -> None:
        """Let go of data that sampling does not need, and allow it."""
        self.array_cache.keep_only(arguments)
        for host in arguments.host_arrays:
            host.clear_prefetched()
        self.num_warmup = num_warmup
        self.is_ready = True

    def copy_without_data(self) -> InitCache:
        """What a copy or a pickled kernel keeps: neither data nor anything compiled."""
        return InitCache(noise_stats=self.noise_stats, num_warmup=self.num_warmup)

    def copy_with(self, adaptation: Adaptation | None, potential: Potential | None) -> InitCache:
        """With another adaptation, or another posterior; None keeps what there is."""
        assert self.record is not None
        found: dict[str, Any] = {}
        if adaptation is not None:
            found["record"] = self.record._replace(adaptation=adaptation)
        if potential is not None:
            found["potential"] = potential
        return replace(self, **found)


class SGMCMCKernel(KernelReprMixin, MCMCKernel):
    r"""Base of the stochastic-gradient kernels: everything but the choice of SDE and scheme.

    :param dynamics: the SDE.
    :param integrator: name of the integrator.
    :param options: the keywords of :class:`~numpyro_sgmcmc.sampling.options.Options`.
    :raises ValueError: at construction, for an option that is unknown or out of range; at
        ``init``, naming the site, plate or argument that cannot be sampled.
    """

    sample_field = "z"
    default_fields = ("z", "diverging")

    integrators: ClassVar[tuple[str, ...]]
    """Names of the schemes to choose from, among those of the SDE."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        document_shared_options(cls)

    def __init__(
        self,
        model: Callable | None,
        potential_fn: Callable | None,
        *,
        dynamics: Dynamics,
        integrator: str,
        **options: Unpack[KernelOptions],
    ) -> None:
        errors.check_no_unknown_kwargs(type(self), Options.find_unknown(options))
        if (model is None) == (potential_fn is None):
            raise InvalidArgumentError("Only one of `model` or `potential_fn` must be specified.")
        if model is not None:
            errors.check_callable("model", model)
        else:
            errors.check_callable("potential_fn", potential_fn)
        errors.check_choice("integrator", integrator, self.integrators)
        self._model = model
        self._potential_fn = potential_fn
        self._dynamics = dynamics
        self._integrator = integrator
        self._options = Options(**options)
        if model is None:
            self._options.check_no_local_options()
        self._cache = InitCache()

    @property
    def _sample_fn(self) -> Callable | None:
        """None before `init`: NumPyro then calls it before a run."""
        return self.sample if self._cache.is_ready else None

    @property
    def options(self) -> Options:
        """The keywords that all kernels share."""
        return self._options

    @property
    def settings(self) -> dict[str, Any]:
        """All that was chosen at construction, by name."""
        own = {name.lstrip("_"): x for name, x in vars(self).items()}
        del own["options"], own["cache"]
        return {**own, **vars(self._options)}

    @property
    def dynamics(self) -> Dynamics:
        """The SDE."""
        return self._dynamics

    @property
    def integrator(self) -> str:
        """Name of the integrator."""
        return self._integrator

    @property
    def noise_stats(self) -> GradientNoiseStats:
        """The gradient's noise at typical positions, as the last warm-up measured it."""
        return self._cache.noise_stats

    def get_cached_adaptation(self, arguments: Arguments) -> Adaptation | None:
        """What all chains share, where it was found for these very arguments; else None."""
        record = self._cache.record
        if record is None or not record.is_valid_for(self.potential, arguments):
            return None
        return record.adaptation

    @property
    def has_potential(self) -> bool:
        """Whether the kernel knows a posterior: not before `init`, and not once pickled."""
        return self._cache.potential is not None

    @property
    def has_schedule(self) -> bool:
        """Whether the step size follows a schedule of the user's."""
        return self._schedule is not None

    @property
    def _schedule(self) -> Callable | None:
        step_size = self._options.step_size
        return step_size if callable(step_size) else None

    @property
    def potential(self) -> Potential:
        """The posterior, once the kernel is initialised."""
        if self._cache.potential is None:
            raise RuntimeError(f"{type(self).__name__} must be initialised first: call `init`.")
        return self._cache.potential

    @property
    def adaptation(self) -> Adaptation:
        """What all chains share, once the kernel is initialised."""
        if self._cache.record is None:
            raise RuntimeError(f"{type(self).__name__} must be initialised first: call `init`.")
        return self._cache.record.adaptation

    def get_preconditioner(self, state: SGMCMCState) -> Preconditioner:
        """The whitened coordinates of a state, or of one chain's where several are batched."""
        whitening = state.adapt_state.preconditioner
        return jax.tree.map(lambda x: x[0], whitening) if state.i.ndim else whitening

    def full_gradients(self, positions: Array, arguments: Arguments) -> Array:
        """Gradients on all rows at flat positions, one after the other; shape ``(m, d)``."""
        return full_gradients(self.potential, self._cache.array_cache, positions, arguments)

    @property
    def model(self) -> Callable | None:
        """The model on all rows; ``None`` for a kernel made from a potential function."""
        return None if self._model is None else FullDataModel(self._model)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        return f"{state.num_steps} steps of size {state.adapt_state.step_size:.2e}"

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Constrain the sites and add the deterministic ones that do not vary with the rows."""
        held = self._cache.array_cache.cache_arrays(Arguments(model_args, model_kwargs))
        return lambda z: self.potential.constrain_with_locals(
            lambda z: call_with_cached_arrays(self.potential.postprocess, z, held), z
        )

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Constrain the sites, without running the model unless a support depends on values."""
        held = self._cache.array_cache.cache_arrays(Arguments(model_args, model_kwargs))
        return lambda z: self.potential.constrain_with_locals(
            lambda z: call_with_cached_arrays(self.potential.constrain, z, held), z
        )

    def wrap_model(self, wrapper: Callable) -> SGMCMCKernel:
        """A copy of this kernel for ``wrapper(model)``."""
        if self._model is None:
            raise InvalidArgumentError("`wrap_model` needs a kernel made from a model.")
        kernel = copy.copy(self)
        kernel._cache = InitCache()
        kernel._model = ConditionedModel(wrapper(self._model))
        return kernel

    def copy_with(
        self, *, adaptation: Adaptation | None = None, potential: Potential | None = None
    ) -> SGMCMCKernel:
        """A copy of an initialised kernel that need not be initialised again.

        :param adaptation: what to have in place of what `init` found, or None to keep that.
        :param potential: the posterior to have, or None to keep it.
        """
        kernel = copy.copy(self)
        kernel._cache = self._cache.copy_with(adaptation, potential)
        return kernel

    def refresh(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: dict | None
    ) -> SGMCMCState:
        """Anchor the control variates at the present position, for changed conditioning values.

        Costs one gradient on all rows; a kernel with plain gradients caches nothing and returns
        the state as it is.
        """
        if not self.adaptation.estimator.needs_reference:
            return state
        arguments = self._cache.array_cache.cache_arrays(
            Arguments(model_args, model_kwargs)
        ).dereference()
        return recenter_state(self.potential, state, arguments)

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
        errors.check_rng_keys(rng_key)
        arguments = Arguments(model_args, model_kwargs)
        if self._model is not None:
            check_jax_representable(arguments, self._model)
        if not is_traced(rng_key):
            clear_compilation_cache_if_full()
        is_batch = has_chain_axis(rng_key)
        is_block = GIBBS_SITES_KWARG in arguments.kwargs
        with escape_trace(rng_key), unwrap_callback_errors(arguments.host_arrays):
            concrete = concretize_arguments(self._model, arguments)
            check_chain_method(concrete)
            self._cache.potential = target = self._get_potential(concrete, init_params, is_batch)
            if is_block:
                check_gibbs_block_collects_locals(target, self._options)
                init_params = None  # Gibbs gives draws from the prior, constrained
                concrete = self._condition_on_variational_means(concrete)
            num_chains = len(rng_key) if is_batch else None
            init_params = validate_init_params(init_params, target, concrete, num_chains)
            if target.dim:
                self._check_user_functions(target)
            adaptation = self._adapt(target, concrete, init_params, is_batch)
            if target.dim:
                located = self._bind_dynamics(target, adaptation.preconditioner)
                self._check_inverse_metric_fn(located, target)
        self._cache.finish_init(arguments, num_warmup)
        state = init_chains(self._chain_config, self._dynamics, rng_key, init_params, concrete)
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
        self._cache.potential = target = self._get_potential(arguments, z, is_batch=False)
        self._cache.store_adaptation(adaptation, target, arguments)
        self._cache.finish_init(arguments, num_warmup)

    def sample(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: dict | None
    ) -> SGMCMCState:
        """Run ``num_steps`` steps, each on a minibatch of its own.

        :raises ValueError: where the data are others than those that control variates hold the
            gradient on.
        """
        if is_traced(state.rng_key):  # once a compilation: it looks at all of the data
            assert self._cache.record is not None
            self._cache.record.check_same_data(Arguments(model_args, model_kwargs))
        arguments = self._cache.array_cache.cache_arrays(
            Arguments(model_args, model_kwargs)
        ).dereference()
        axis = find_chain_mesh_axis(self.potential.shards, len(state.i)) if state.i.ndim else None
        return run_iteration(self._chain_config, state, arguments, axis)

    @property
    def _chain_config(self) -> ChainConfig:
        return ChainConfig(
            potential=self.potential.with_included_rows(self.adaptation.included_rows),
            adaptation=self.adaptation,
            integrator=self._integrator,
            bind_dynamics=partial(self._bind_dynamics, self.potential),
            step_size_schedule=self._schedule,
            can_shrink_user_step_size=self._options.can_shrink_user_step_size,
            traced_step_size=self._options.traced_step_size,
            num_warmup=self._cache.num_warmup,
            max_grad_norm=self._options.max_grad_norm,
            collected_local_sites=select_collected_sites(
                self.potential.local_latents, self._options.collect_local_sites
            ),
            mass_matrix_blocks=build_mass_matrix_blocks(self._options, self.potential.sites),
        )

    def _get_potential(self, arguments: Arguments, init_params: Any, is_batch: bool) -> Potential:
        """The target for arguments of this form, read from the model the first time."""
        targets = self._cache.potentials
        if self._model is None:
            assert self._potential_fn is not None
            one = get_single_chain_shapes(init_params, is_batch)
            return build_potential_from_fn(self._potential_fn, one, self._options, targets)
        form = (arguments.signature, jnp.result_type(float))
        if form not in targets:
            targets[form] = build_potential_from_model(self._model, arguments, self._options)
        return targets[form]

    def _condition_on_variational_means(self, arguments: Arguments) -> Arguments:
        """Those of a block of Gibbs with likely values of the other blocks' sites."""
        assert self._model is not None
        settings = self._options, self._dynamics, self._integrator
        return condition_on_variational_means(self._model, arguments, *settings, self._cache.record)

    def _adapt(
        self, potential: Potential, arguments: Arguments, init_params: Any, is_batch: bool
    ) -> Adaptation:
        """What all chains share, found once for one set of data."""
        if (record := self._cache.record) is not None:
            if record.is_valid_for(potential, arguments):
                return record.adaptation
            self._cache.array_cache = DeviceArrayCache()
        settings = build_warmup_settings(
            self._options,
            potential,
            self._dynamics,
            self._integrator,
            partial(self._bind_dynamics, potential),
            has_init_params=init_params is not None and not is_traced(init_params),
            is_site_aligned=self._is_site_aligned,
        )
        starts = generate_init_positions(potential, arguments, init_params, is_batch)
        with show_adaptation_progress(arguments.host_arrays) as progress:
            adaptation = adapt(potential, arguments, settings, starts, progress)
        self._cache.store_adaptation(adaptation, potential, arguments)
        return adaptation

    @property
    def _is_site_aligned(self) -> bool:
        """Whether the SDE must run in the sites' own coordinates, each in a unit of its own."""
        return False

    def _bind_dynamics(self, potential: Potential, preconditioner: Preconditioner) -> Dynamics:
        """The SDE; for kernels whose SDE depends on the position, told where that is."""
        return self._dynamics

    def _check_user_functions(self, potential: Potential) -> None:
        """Refuse users' functions of which no SDE can be made, before the warm-up."""

    def _check_inverse_metric_fn(self, dynamics: Dynamics, potential: Potential) -> None:
        """The same for functions of the sites' own coordinates, which the warm-up has found."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": self._cache.copy_without_data()}


document_shared_options(SGMCMCKernel)
