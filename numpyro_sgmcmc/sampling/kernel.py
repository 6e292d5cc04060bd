"""Base class of all kernels: NumPyro's ``MCMCKernel`` interface.

:meth:`SGMCMCKernel.init` reads the model, runs the adaptation that all chains share once per data
set, and initialises the chains. :meth:`SGMCMCKernel.sample` runs one iteration: ``num_steps``
stochastic-gradient steps in a ``lax.scan`` (:mod:`numpyro_sgmcmc.sampling.step`). The results of
``init`` are kept in one :class:`InitCache`; no traced value is stored on a kernel.
"""

from __future__ import annotations

import copy
import html
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation import NO_NOISE, Adaptation, GradientNoiseStats, adapt
from numpyro_sgmcmc.adaptation.initialisation import (
    check_potential_fn_params,
    generate_init_positions,
    validate_init_params,
)
from numpyro_sgmcmc.compilation import clear_compilation_cache_if_full
from numpyro_sgmcmc.data.arguments import (
    Arguments,
    DeviceArrayCache,
    check_jax_representable,
    is_traced,
)
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.errors import InitializationError, InvalidArgumentError, InvalidModelError
from numpyro_sgmcmc.model.handlers import ConditionedModel, FullDataModel, sample_prior_values
from numpyro_sgmcmc.model.index_bounds import check_index_bounds
from numpyro_sgmcmc.model.numpy_values import NumPyArgumentsModel
from numpyro_sgmcmc.model.potential import Potential, make_function_potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import show_adaptation_progress, show_data_passes
from numpyro_sgmcmc.sampling.chain_init import init_chains
from numpyro_sgmcmc.sampling.gibbs import (
    condition_on_variational_means,
    recenter_state,
    with_conditioning,
)
from numpyro_sgmcmc.sampling.mass_matrix import build_mass_matrix_blocks
from numpyro_sgmcmc.sampling.options import (
    KernelOptions,
    Options,
    add_options_to_signature,
    build_potential_from_model,
    build_warmup_settings,
    check_no_unknown_options,
)
from numpyro_sgmcmc.sampling.prefetch import attach_prefetch_buffer
from numpyro_sgmcmc.sampling.site_moments import CollectedSites, SiteMoments
from numpyro_sgmcmc.sampling.state import (
    ChainConfig,
    SGMCMCState,
    has_chain_axis,
    make_chain_axes,
)
from numpyro_sgmcmc.sampling.step import run_iteration

# Characters of a value in a kernel's repr; longer values are printed as "...".
_MAX_REPR_CHARS = 60
_T = TypeVar("_T")


class SGMCMCKernel(MCMCKernel):
    r"""Base of the stochastic-gradient kernels; a subclass chooses the SDE and its integrators.

    :param model: a NumPyro model with a subsampled plate, or None.
    :param potential_fn: minus the log density of a pytree of unconstrained values, or None.
    :param dynamics: the SDE.
    :param integrator: one of :attr:`integrators`. Default: the first of them.
    :param options: the keywords of :class:`~numpyro_sgmcmc.sampling.options.Options`.
    :raises TypeError: for an unknown option.
    :raises ValueError: for an option out of range. :meth:`init` raises it for a site, plate or
        argument that cannot be sampled, which the message names.
    """

    sample_field = "z"
    default_fields = ("z", "diverging")

    integrators: ClassVar[tuple[str, ...]]
    """Names of the integrators to choose from, among those of the SDE."""

    hierarchy_integrator: ClassVar[str | None] = None
    """Integrator of models with effects of many groups, unless the user chooses one; None for the
    first of the others."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        add_options_to_signature(cls)

    def __init__(
        self,
        model: Callable | None,
        potential_fn: Callable | None,
        *,
        dynamics: Dynamics,
        integrator: str | None = None,
        **options: Unpack[KernelOptions],
    ) -> None:
        check_no_unknown_options(type(self), options)
        if (model is None) == (potential_fn is None):
            raise InvalidArgumentError(
                "Exactly one of `model` and `potential_fn` must be given.",
                "pass a model, or a potential function by the keyword `potential_fn`.",
                "model-or-potential-fn",
            )
        if model is not None:
            errors.check_callable("model", model)
        else:
            errors.check_callable("potential_fn", potential_fn)
        if integrator is not None:
            errors.check_choice("integrator", integrator, self.integrators)
        self._model = model
        self._potential_fn = potential_fn
        self._dynamics = dynamics
        self._integrator = integrator
        self._options = Options(**options)
        if model is None:
            self._options.check_no_local_options()
        self._cache = InitCache()

    # Settings.

    @property
    def model(self) -> Callable | None:
        """The model on the full data; ``None`` for a kernel made from a potential function."""
        traced = getattr(self._cache.potential, "user_model", None)
        if isinstance(traced, NumPyArgumentsModel):
            return FullDataModel(traced.without_values)
        return None if self._model is None else FullDataModel(self._model)

    @property
    def options(self) -> Options:
        """The keywords that all kernels share."""
        return self._options

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of the constructor, by name."""
        own = {name.lstrip("_"): x for name, x in vars(self).items()}
        del own["options"], own["cache"]
        own["integrator"] = self._integrator or self.integrators[0]
        return {**own, **vars(self._options)}

    @property
    def dynamics(self) -> Dynamics:
        """The SDE."""
        return self._dynamics.for_integrator(self.integrator)

    @property
    def integrator(self) -> str:
        """Name of the integrator."""
        if self._integrator is None and (adaptation := self._cache.adaptation) is not None:
            return adaptation.integrator or self.integrators[0]
        return self._integrator or self.integrators[0]

    @property
    def has_schedule(self) -> bool:
        """True if the step size follows a schedule of the user's."""
        return callable(self._options.step_size)

    def __repr__(self) -> str:
        """Return the call that makes this kernel, without default values."""
        settings = {**vars(self._dynamics), **self.settings}
        if kinetics := settings.get("kinetics"):
            settings |= {"a": kinetics.a, "m": kinetics.mass, "c": kinetics.softening}
        arguments = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            default = parameter.default
            value = settings.get(name, default)
            is_plain = isinstance(value, (bool, int, float, str, tuple))
            if value is default or (is_plain and (type(value), value) == (type(default), default)):
                continue
            text = getattr(value, "__name__", None) or repr(value)
            text = text if "\n" not in text and len(text) <= _MAX_REPR_CHARS else "..."
            arguments.append(text if name == "model" else f"{name}={text}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    # Results of `init`.

    @property
    def has_potential(self) -> bool:
        """True once ``init`` has built a potential; False for a copied or pickled kernel."""
        return self._cache.potential is not None

    @property
    def potential(self) -> Potential:
        """The potential, once the kernel is initialised."""
        return self._require_init(self._cache.potential)

    @property
    def adaptation(self) -> Adaptation:
        """The adaptation that all chains share, once the kernel is initialised."""
        return self._require_init(self._cache.adaptation)

    def _require_init(self, result: _T | None) -> _T:
        """Return a result of ``init``, or raise before it."""
        if result is None:
            raise InitializationError(
                f"{type(self).__name__} is not initialised.",
                "call `init`, or `MCMC.run` or `MCMC.warmup`.",
                "not-initialised",
            )
        return result

    @property
    def noise_stats(self) -> GradientNoiseStats:
        """Gradient noise in the bulk of the posterior, as measured in the last warm-up."""
        return self._cache.noise_stats

    def get_cached_adaptation(self, arguments: Arguments) -> Adaptation | None:
        """Return the adaptation if it was made for these very arguments, else None."""
        return self._cache.get_adaptation(self.potential, arguments)

    def full_gradients(self, positions: Array, arguments: Arguments) -> Array:
        """Return full-data gradients at flat positions, shape ``(m, d)``."""
        return full_gradients(self.potential, self._cache.array_cache, positions, arguments)

    # NumPyro's interface.

    @property
    def _sample_fn(self) -> Callable | None:
        """:meth:`sample`, or None before ``init``: NumPyro then calls ``init`` before a run."""
        return self.sample if self._cache.is_ready else None

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Any,
        model_args: tuple,
        model_kwargs: dict | None,
    ) -> SGMCMCState:
        """Read the model, adapt once for all chains, and initialise the chains.

        :param rng_key: one random key, or one per chain.
        :param num_warmup: number of warm-up iterations.
        :param init_params: unconstrained initial values of the chains, or None.
        :param model_args: the model's positional arguments.
        :param model_kwargs: the model's keyword arguments.
        :return: the initial state, with an axis of chains if there is one key per chain.
        :raises ValueError: for a site, plate or argument that cannot be sampled, which the message
            names, or if no finite initial position is found.
        """
        errors.check_rng_keys(rng_key)
        arguments = Arguments(model_args, model_kwargs)
        if self._model is not None:
            check_jax_representable(arguments, self._model)
        if not is_traced(rng_key):
            clear_compilation_cache_if_full()
        is_batch = has_chain_axis(rng_key)
        is_block = GIBBS_SITES_KWARG in arguments.kwargs
        # Under pmap, vmap or jit the shared part of the warm-up runs outside of the trace.
        outside_trace = jax.ensure_compile_time_eval() if is_traced(rng_key) else nullcontext()
        with outside_trace, unwrap_callback_errors(arguments.host_arrays):
            concrete = _concretize_arguments(self._model, arguments)
            if concrete.sharded_arrays and jax.sharding.get_abstract_mesh().manual_axes:
                raise InvalidArgumentError(
                    "chain_method='parallel' needs a device per chain, but the data are sharded "
                    "over the devices.",
                    "use chain_method='vectorized'.",
                    "sharded-parallel-chains",
                )
            potential = self.get_potential(concrete, init_params, is_batch)
            self._cache.potential = potential
            collected_sites = CollectedSites.select(potential, self._options)
            if is_block:
                _check_sites_of_gibbs_block(potential, self._options, collected_sites)
                init_params = None  # Gibbs passes constrained draws from the prior
                assert self._model is not None
                block = self._options, self._dynamics, self._integrator or self.integrators[0]
                get_cached = self._cache.get_arguments_of_gibbs_block
                concrete = condition_on_variational_means(self._model, concrete, *block, get_cached)
            num_chains = len(rng_key) if is_batch else None
            init_params = validate_init_params(init_params, potential, concrete, num_chains)
            if potential.dim:
                self._check_user_functions(potential)
            adaptation = self._adapt(potential, concrete, init_params, is_batch)
            if potential.dim:
                dynamics = self._bind_dynamics(potential, adaptation.preconditioner)
                self._check_inverse_metric_fn(dynamics, potential)
        self._cache.finish_init(arguments, num_warmup)
        state = init_chains(self._chain_config, self.dynamics, rng_key, init_params, concrete)
        if names := collected_sites.with_moments:
            z = jax.tree.map(lambda x: x[0], state.z) if is_batch else state.z
            postprocess = self._make_draw_fn(potential.postprocess, model_args, model_kwargs)
            shapes = jax.eval_shape(postprocess, z)
            moments = SiteMoments.zeros(
                {n: shapes[n] for n in names}, self._options, potential.dtype
            )
            if is_batch:
                moments = jax.tree.map(
                    lambda x: jnp.broadcast_to(x, (len(rng_key), *x.shape)), moments
                )
            state = state._replace(site_moments=moments)
        if is_block:
            state = self.refresh(state, model_args, model_kwargs)
        return state

    def sample(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: dict | None
    ) -> SGMCMCState:
        """Return the state after one iteration: ``num_steps`` steps, each with a new minibatch.

        :raises ValueError: if the data are not those whose full-data gradient the control
            variates use.
        """
        if is_traced(state.rng_key):  # once per compilation, because it reads all of the data
            self._cache.check_same_data(Arguments(model_args, model_kwargs), self.potential)
        arguments = self._cached_arguments(model_args, model_kwargs).dereference()
        shards, num_chains, chain_axis = self.potential.shards, state.i.size, None
        # Chains of several processes are not distributed: no process could read all draws.
        if shards is not None and state.i.ndim and jax.process_count() == 1:
            axis = shards.chain_axis
            if axis is not None and num_chains % shards.mesh.shape[axis] == 0:
                chain_axis = axis
        return run_iteration(self._chain_config, state, arguments, chain_axis)

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Return a function that constrains sites and adds deterministic sites outside plates.

        Sites whose draws are not kept are left out.
        """
        postprocess = self._make_draw_fn(self.potential.postprocess, model_args, model_kwargs)
        if (kept := self._options.collect_sites) is None:
            return postprocess
        return lambda z: {name: x for name, x in postprocess(z).items() if name in kept}

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Return a function that constrains sites; it runs the model only for dynamic supports."""
        return self._make_draw_fn(self.potential.constrain, model_args, model_kwargs)

    def _make_draw_fn(self, fn: Callable, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Return a function that applies ``fn`` to unconstrained values of a draw."""
        potential, arguments = self.potential, self._cached_arguments(model_args, model_kwargs)
        return lambda z: potential.constrain_with_locals(
            lambda z: _call_with_cached_arrays(fn, z, arguments), z
        )

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        """Return the text of the progress bar: number and size of the steps."""
        return f"{state.num_steps} steps of size {state.adapt_state.step_size:.2e}"

    def wrap_model(self, wrapper: Callable) -> SGMCMCKernel:
        """Return an uninitialised copy of this kernel for ``wrapper(model)``."""
        if self._model is None:
            raise InvalidArgumentError(
                "`wrap_model` needs a kernel made from a model, but this one has a `potential_fn`.",
                "pass `model` in place of `potential_fn`.",
                "kernel-without-model",
            )
        kernel = copy.copy(self)
        kernel._cache = InitCache()
        kernel._model = ConditionedModel(wrapper(self._model))
        return kernel

    def refresh(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: dict | None
    ) -> SGMCMCState:
        """Move the control variates' reference to the present position of a Gibbs block.

        NumPyro's ``Gibbs`` calls this when the conditioning values have changed. It costs one
        full-data gradient; a kernel with minibatch gradients returns the state as it is.
        """
        if not self.adaptation.estimator.needs_reference:
            return state
        arguments = self._cached_arguments(model_args, model_kwargs).dereference()
        return recenter_state(self.potential, state, arguments)

    # Copies.

    def copy_with(
        self, *, adaptation: Adaptation | None = None, potential: Potential | None = None
    ) -> SGMCMCKernel:
        """Return a copy of an initialised kernel, which need not be initialised again.

        Adaptation and potential are those of this kernel where they are None.
        """
        kernel = copy.copy(self)
        kernel._cache = replace(
            self._cache,
            adaptation=adaptation or self.adaptation,
            potential=potential or self.potential,
        )
        return kernel

    def with_batch_sizes(
        self, state: SGMCMCState, batch_sizes: Mapping[str, int], num_steps: int
    ) -> tuple[SGMCMCKernel, SGMCMCState]:
        """Return a copy of an initialised kernel with other minibatches, and its initial state.

        :param state: initial state of this kernel's chains, with an axis of chains.
        :param num_steps: steps per iteration of the copy; a multiple of the interval at which
            gradients are monitored is taken.
        """
        adaptation = self.adaptation
        monitor_gradients = adaptation.monitor_gradients
        interval = max(1, min(monitor_gradients.interval, num_steps))
        if monitor_gradients.interval:
            monitor_gradients = monitor_gradients._replace(interval=interval)
        kernel = self.copy_with(
            adaptation=adaptation._replace(
                num_steps=num_steps + -num_steps % interval, monitor_gradients=monitor_gradients
            ),
            potential=self.potential.with_batch_sizes(batch_sizes),
        )
        attach = partial(attach_prefetch_buffer, kernel._chain_config, num_chains=state.i.size)
        axes = make_chain_axes(state.adapt_state.preconditioner)
        return kernel, jax.vmap(attach, (axes,), axes)(state._replace(prefetch_buffer=None))

    def restore(
        self,
        adaptation: Adaptation,
        num_warmup: int,
        z: Any,
        model_args: tuple,
        model_kwargs: dict | None,
    ) -> None:
        """Restore the results of an :meth:`init` without running the warm-up again.

        :param adaptation: that of a kernel with the same settings and data.
        :param z: unconstrained values of one chain, of which only the shapes are used.
        """
        arguments = Arguments(model_args, model_kwargs)
        potential = self.get_potential(arguments, z, is_batch=False)
        self._cache.potential = potential
        self._cache.store_adaptation(adaptation, potential, arguments)
        self._cache.finish_init(arguments, num_warmup)

    def __getstate__(self) -> dict[str, Any]:
        # Without data and compiled functions.
        cache = InitCache(noise_stats=self._cache.noise_stats, num_warmup=self._cache.num_warmup)
        return {**self.__dict__, "_cache": cache}

    # Hooks of kernels whose SDE depends on the position.

    @property
    def _is_site_aligned(self) -> bool:
        """True if the preconditioner must be diagonal, with one scale per site coordinate."""
        return False

    def _bind_dynamics(self, potential: Potential, preconditioner: Preconditioner) -> Dynamics:
        """Return the SDE in the coordinates of a preconditioner."""
        return self.dynamics

    def _check_user_functions(self, potential: Potential) -> None:
        """Check the user's functions that define the SDE, before the warm-up."""

    def _check_inverse_metric_fn(self, dynamics: Dynamics, potential: Potential) -> None:
        """Check the user's metric, which needs the preconditioner, after the warm-up."""

    # Parts of `init` and `sample`.

    def _cached_arguments(self, model_args: tuple, model_kwargs: dict | None) -> Arguments:
        """Return the arguments with large arrays as references."""
        return self._cache.array_cache.cache_arrays(Arguments(model_args, model_kwargs))

    @property
    def _chain_config(self) -> ChainConfig:
        options, adaptation = self._options, self.adaptation
        return ChainConfig(
            potential=self.potential.with_included_rows(adaptation.included_rows),
            adaptation=adaptation,
            options=options,
            integrator=self.integrator,
            bind_dynamics=partial(self._bind_dynamics, self.potential),
            num_warmup=self._cache.num_warmup,
            collected_sites=CollectedSites.select(self.potential, options),
            mass_matrix_blocks=build_mass_matrix_blocks(
                options.dense_mass, options.inverse_mass_matrix, self.potential.sites
            ),
        )

    def get_potential(
        self, arguments: Arguments, init_params: Any = None, is_batch: bool = False
    ) -> Potential:
        """Return the potential for arguments of this structure, built at the first call."""
        build: Callable[[], Potential]
        if self._model is not None:
            key: Any = arguments.signature, jnp.result_type(float)
            build = partial(build_potential_from_model, self._model, arguments, self._options)
        else:
            assert self._potential_fn is not None
            if init_params is None:
                raise InvalidArgumentError(
                    "`init_params` is None, but `potential_fn` needs initial values.",
                    "pass init_params to MCMC.run, a pytree of unconstrained values.",
                    "potential-fn-init-params",
                )
            check_potential_fn_params(init_params)
            prototype = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[is_batch:], jnp.result_type(x)),
                init_params,
            )
            leaves, structure = jax.tree.flatten(prototype)
            key = structure, tuple(x.shape for x in leaves)
            forward_mode = self._options.forward_mode_differentiation
            build = partial(make_function_potential, self._potential_fn, prototype, forward_mode)
        potentials = self._cache.potentials
        if key not in potentials or not potentials[key].is_valid_for(arguments):
            potentials[key] = build()
        return potentials[key]

    def _adapt(
        self, potential: Potential, arguments: Arguments, init_params: Any, is_batch: bool
    ) -> Adaptation:
        """Return the adaptation that all chains share, made once per data set."""
        cached = self._cache.get_adaptation(potential, arguments)
        if cached is not None:
            return cached
        if self._cache.adaptation is not None:  # for other data, which need not be kept
            self._cache.array_cache = DeviceArrayCache()
        if self._model is not None:
            check_index_bounds(potential, arguments, self._model)
        settings = build_warmup_settings(
            self._options,
            potential,
            self._dynamics,
            self._integrator or self.integrators[0],
            partial(self._bind_dynamics, potential),
            hierarchy_integrator=None if self._integrator else self.hierarchy_integrator,
            has_init_params=init_params is not None and not is_traced(init_params),
            is_site_aligned=self._is_site_aligned,
        )
        init_positions = generate_init_positions(potential, arguments, init_params, is_batch)
        with show_adaptation_progress(arguments.host_arrays) as progress:
            adaptation = adapt(potential, arguments, settings, init_positions, progress)
        self._cache.store_adaptation(adaptation, potential, arguments)
        return adaptation


@dataclass(eq=False)
class InitCache:
    """Results of a kernel's ``init``, and the data that they are valid for.

    The last warm-up was for ``adapted_potential``, concrete arguments and data with these
    checksums.
    """

    potentials: dict[Any, Potential] = field(default_factory=dict)  # by structure of the arguments
    array_cache: DeviceArrayCache = field(default_factory=DeviceArrayCache)
    potential: Potential | None = None  # of the last `init`
    adaptation: Adaptation | None = None  # of the last `init`
    adapted_potential: Potential | None = None
    adapted_arguments: Arguments = field(default_factory=Arguments)
    adapted_checksums: tuple[int | None, ...] = ()
    noise_stats: GradientNoiseStats = NO_NOISE  # of that warm-up; kept in copies and pickles
    num_warmup: int = 0
    is_ready: bool = False  # whether `init` has ended, so that the kernel can sample

    def store_adaptation(
        self, adaptation: Adaptation, potential: Potential, arguments: Arguments
    ) -> None:
        """Store an adaptation and what it was made for."""
        self.adaptation = adaptation
        self.adapted_potential = potential
        self.adapted_arguments = arguments
        self.adapted_checksums = arguments.checksums
        self.noise_stats = adaptation.noise_stats

    def finish_init(self, arguments: Arguments, num_warmup: int) -> None:
        """Release data that sampling does not need, and mark the kernel as initialised."""
        self.array_cache.keep_only(arguments)
        for host_array in arguments.host_arrays:
            host_array.clear_prefetched()
        self.num_warmup = num_warmup
        self.is_ready = True

    def get_adaptation(self, potential: Potential, arguments: Arguments) -> Adaptation | None:
        """Return the adaptation if it was made for this potential and these arrays, unchanged."""
        is_valid = (
            self.adaptation is not None
            and self.adapted_potential is potential
            and _have_identical_arrays(arguments, self.adapted_arguments)
            and self.adapted_checksums == arguments.checksums
        )
        return self.adaptation if is_valid else None

    def get_arguments_of_gibbs_block(self, arguments: Arguments) -> Arguments | None:
        """Return the arguments adapted to, if they differ in values of replaced sites only.

        :param arguments: a block's, without values of the sites that the warm-up replaces.
        """
        if self.adaptation is None:
            return None
        adapted = self.adapted_arguments
        values = adapted.kwargs.get(GIBBS_SITES_KWARG, {})
        kept_names = set(arguments.kwargs[GIBBS_SITES_KWARG])
        kept = {name: x for name, x in values.items() if name in kept_names}
        is_valid = (
            _have_identical_arrays(arguments, with_conditioning(adapted, kept))
            and self.adapted_checksums == adapted.checksums
        )
        return adapted if is_valid else None

    def check_same_data(self, arguments: Arguments, potential: Potential) -> None:
        """Check that the program and its control variates do not hold values of another data set.

        Such a chain would have a wrong posterior without any sign of it.
        """
        if not potential.is_valid_for(arguments):
            raise InvalidArgumentError(
                "The model computes with NumPy on its arguments, and these are not those of the "
                "warm-up.",
                "call `run` of a new MCMC object, without jit_model_args=True; or use jax.numpy in "
                "the model.",
                "numpy-arguments",
            )
        adapted = self.adapted_arguments
        assert self.adaptation is not None
        if not self.adaptation.estimator.needs_reference or not arguments.is_concrete:
            return
        if GIBBS_SITES_KWARG in arguments.kwargs:  # `refresh` follows a Gibbs block's changes
            return
        arrays, adapted_arrays = arguments.arrays, adapted.arrays
        is_same = (
            len(arrays) == len(adapted_arrays)
            and arguments.host_arrays == adapted.host_arrays
            and all(
                a is b or _are_arrays_equal(a, b)
                for a, b in zip(arrays, adapted_arrays, strict=True)
            )
            and adapted.checksums == self.adapted_checksums
        )
        if not is_same:
            raise InvalidArgumentError(
                "The data differ from those of the warm-up, whose gradient the control variates "
                "use.",
                "call `run` of a new MCMC object, or use gradient_estimator='minibatch'.",
                "changed-data",
            )


def full_gradients(
    potential: Potential,
    array_cache: DeviceArrayCache,
    positions: Array,
    arguments: Arguments,
    conditioning_values: dict[str, Array] | None = None,
) -> Array:
    """Return full-data gradients at flat positions, computed one by one; shape ``(m, d)``.

    :param conditioning_values: for a block of Gibbs, values of the other sites at each position,
        shape ``(m, ...)``.
    """
    if potential.local_latents is not None:
        raise InvalidModelError(
            f"Site '{potential.local_latents.names[0]}' is latent inside the subsampled plate, so "
            "there is no full-data gradient.",
            "use `bias_report`, which averages gradients over the local latent variables.",
            "local-latents-gradient",
        )
    passes = show_data_passes("full-data gradients", arguments.host_arrays, len(positions))
    with unwrap_callback_errors(arguments.host_arrays), passes:
        return jax.block_until_ready(
            _full_gradients_jitted(
                potential, positions, array_cache.cache_arrays(arguments), conditioning_values
            )
        )


@partial(jax.jit, static_argnames="potential")
def _full_gradients_jitted(
    potential: Potential,
    positions: Array,
    cached_arguments: Arguments,
    conditioning_values: dict[str, Array] | None,
) -> Array:
    arguments = cached_arguments.dereference()

    def gradient(x: tuple[Array, dict[str, Array] | None]) -> Array:
        position, values = x
        at = arguments if values is None else with_conditioning(arguments, values)
        return potential.full_gradient(position, at)

    return jax.lax.map(gradient, (positions, conditioning_values))


@partial(jax.jit, static_argnames="fn")
def _call_with_cached_arrays(fn: Callable, z: Any, cached_arguments: Arguments) -> Any:
    """Return ``fn`` of unconstrained values and of arguments with arrays as references."""
    return fn(z, cached_arguments.dereference())


def _concretize_arguments(model: Callable | None, arguments: Arguments) -> Arguments:
    """Return the arguments with concrete arrays, which the shared part of the warm-up needs."""
    if arguments.is_concrete:
        return arguments
    is_block = GIBBS_SITES_KWARG in arguments.kwargs
    if not (is_block and arguments.without_kwarg(GIBBS_SITES_KWARG).is_concrete):
        raise InvalidArgumentError(
            "The model's arguments are traced by jit, vmap or pmap, but the warm-up needs values.",
            "call `MCMC.run` outside of the transformation, or let the transformed function close "
            "over the data.",
            "traced-arguments",
        )
    # Under pmap Gibbs conditions on traced draws from the prior: take concrete ones in their place.
    assert model is not None
    names = list(arguments.kwargs[GIBBS_SITES_KWARG])
    values = sample_prior_values(model, with_conditioning(arguments, {}), names)
    return with_conditioning(arguments, values)


def _check_sites_of_gibbs_block(
    potential: Potential, options: Options, collected_sites: CollectedSites
) -> None:
    """Check that a block of NumPyro's Gibbs hands all of its values to the other blocks."""
    if options.collect_sites is not None:
        raise InvalidArgumentError(
            "`collect_sites` is not supported in a block of Gibbs.",
            "leave it out. To drop the draws of a site, pass extra_fields=['~z.site'] to MCMC.run.",
            "collect-sites",
        )
    local = potential.local_latents
    if local is None:
        return
    if missing := [name for name in local.names if name not in collected_sites.local]:
        raise InvalidArgumentError(
            f"Site '{missing[0]}' is latent inside the subsampled plate, but Gibbs needs its "
            "values.",
            "pass collect_local_sites=True, so that the other blocks get the values of all rows.",
            "gibbs-block-locals",
        )


def _have_identical_arrays(a: Arguments, b: Arguments) -> bool:
    """Return whether two calls have the same array objects and equal other arguments."""
    return a.signature == b.signature and all(
        x is y for x, y in zip(a.arrays, b.arrays, strict=True)
    )


def _are_arrays_equal(a: Any, b: Any) -> bool:
    """Return whether two arrays have equal entries; NaN equals NaN."""
    if a.shape != b.shape:
        return False
    if isinstance(a, jax.Array) and not a.is_fully_addressable:
        return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact)))
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")


add_options_to_signature(SGMCMCKernel)
