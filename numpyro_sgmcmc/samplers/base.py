"""The NumPyro contract, once for all samplers.

A run: :meth:`SGMCMCKernel.init` reads the model, finds what all chains share (once for one set of
data, whatever the number of chains) and starts the chain; :meth:`SGMCMCKernel.sample` runs
``num_steps`` stochastic-gradient steps in one ``lax.scan``. Nothing traced is kept on the kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.chain import ChainPlan, SGMCMCState, advance, start_chains
from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments, HeldArrays, is_traced, refuse_other_numbers
from numpyro_sgmcmc.data.host import plain_failures
from numpyro_sgmcmc.data.progress import stages_shown
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.handlers import ConditionedModel, FullDataModel
from numpyro_sgmcmc.posterior.locals.sites import collected_sites
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.samplers.compatibility import (
    refuse_chain_per_device,
    refuse_dropped_locals_in_block,
)
from numpyro_sgmcmc.samplers.compiled import full_gradients, with_held
from numpyro_sgmcmc.samplers.gibbs_block import anchored_here, at_likely_values
from numpyro_sgmcmc.samplers.help import Shown, show_shared_keywords
from numpyro_sgmcmc.samplers.init_cache import InitCache
from numpyro_sgmcmc.samplers.inputs import (
    chain_axis,
    concrete_arguments,
    eagerly,
    is_one_per_chain,
)
from numpyro_sgmcmc.samplers.mass_matrix import mass_blocks
from numpyro_sgmcmc.samplers.options import KernelOptions, Options
from numpyro_sgmcmc.samplers.reading import read_function, read_model, values_of_one_chain
from numpyro_sgmcmc.samplers.warmup_settings import warmup_settings
from numpyro_sgmcmc.warmup import Adaptation, Noise, adapt
from numpyro_sgmcmc.warmup.forget import forget_programs_if_many
from numpyro_sgmcmc.warmup.starts import accepted_start, first_positions

__all__ = ["SGMCMCKernel"]


class SGMCMCKernel(Shown, MCMCKernel):
    r"""Base of the stochastic-gradient kernels: everything but the choice of SDE and scheme.

    :param dynamics: the SDE.
    :param scheme: name of the integrator.
    :param options: the keywords of :class:`~numpyro_sgmcmc.samplers.options.Options`.
    :raises ValueError: at construction, for an option that is unknown or out of range; at
        ``init``, naming the site, plate or argument that cannot be sampled.
    """

    sample_field = "z"
    default_fields = ("z", "diverging")

    schemes: ClassVar[tuple[str, ...]]
    """Names of the schemes to choose from, among those of the SDE."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        show_shared_keywords(cls)

    def __init__(
        self,
        model: Callable | None,
        potential_fn: Callable | None,
        *,
        dynamics: Dynamics,
        scheme: str,
        **options: Unpack[KernelOptions],
    ) -> None:
        checks.no_more_keywords(type(self), Options.unknown_among(options))
        if (model is None) == (potential_fn is None):
            raise Refusal("Only one of `model` or `potential_fn` must be specified.")
        if model is not None:
            checks.function("model", model)
        else:
            checks.function("potential_fn", potential_fn)
        checks.one_of("scheme", scheme, self.schemes)
        self._model = model
        self._potential_fn = potential_fn
        self._dynamics = dynamics
        self._scheme = scheme
        self._options = Options(**options)
        if model is None:
            self._options.refuse_local_sites()
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
    def scheme(self) -> str:
        """Name of the integrator."""
        return self._scheme

    @property
    def noise(self) -> Noise:
        """The gradient's noise at typical positions, as the last warm-up measured it."""
        return self._cache.noise

    def adaptation_to(self, arguments: Arguments) -> Adaptation | None:
        """What all chains share, where it was found for these very arguments; else None."""
        record = self._cache.record
        if record is None or not record.holds_for(self.target, arguments):
            return None
        return record.adaptation

    @property
    def has_data(self) -> bool:
        """Whether the kernel knows a posterior: not before `init`, and not once pickled."""
        return self._cache.target is not None

    @property
    def has_schedule(self) -> bool:
        """Whether the step size follows a schedule of the user's."""
        return self._schedule is not None

    @property
    def _schedule(self) -> Callable | None:
        step_size = self._options.step_size
        return step_size if callable(step_size) else None

    @property
    def target(self) -> Target:
        """The posterior, once the kernel is initialised."""
        if self._cache.target is None:
            raise RuntimeError(f"{type(self).__name__} must be initialised first: call `init`.")
        return self._cache.target

    @property
    def adaptation(self) -> Adaptation:
        """What all chains share, once the kernel is initialised."""
        if self._cache.record is None:
            raise RuntimeError(f"{type(self).__name__} must be initialised first: call `init`.")
        return self._cache.record.adaptation

    def coordinates(self, state: SGMCMCState) -> Whitening:
        """The whitened coordinates of a state, or of one chain's where several are batched."""
        whitening = state.adapt_state.whitening
        return jax.tree.map(lambda x: x[0], whitening) if state.i.ndim else whitening

    def full_gradients(self, positions: Array, arguments: Arguments) -> Array:
        """Gradients on all rows at flat positions, one after the other; shape ``(m, d)``."""
        return full_gradients(self.target, self._cache.held, positions, arguments)

    @property
    def model(self) -> Callable | None:
        """The model on all rows; ``None`` for a kernel made from a potential function."""
        return None if self._model is None else FullDataModel(self._model)

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        return f"{state.num_steps} steps of size {state.adapt_state.step_size:.2e}"

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Constrain the sites and add the deterministic ones that do not vary with the rows."""
        held = self._cache.held.hold(Arguments(model_args, model_kwargs))
        return lambda z: self.target.with_constrained_locals(
            lambda z: with_held(self.target.postprocess, z, held), z
        )

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict | None) -> Callable:
        """Constrain the sites, without running the model unless a support depends on values."""
        held = self._cache.held.hold(Arguments(model_args, model_kwargs))
        return lambda z: self.target.with_constrained_locals(
            lambda z: with_held(self.target.constrain, z, held), z
        )

    def wrap_model(self, wrapper: Callable) -> SGMCMCKernel:
        """A copy of this kernel for ``wrapper(model)``."""
        if self._model is None:
            raise Refusal("`wrap_model` needs a kernel made from a model.")
        kernel = copy.copy(self)
        kernel._cache = InitCache()
        kernel._model = ConditionedModel(wrapper(self._model))
        return kernel

    def ready_variant(
        self, *, adaptation: Adaptation | None = None, target: Target | None = None
    ) -> SGMCMCKernel:
        """A copy of an initialised kernel that need not be initialised again.

        :param adaptation: what to have in place of what `init` found, or None to keep that.
        :param target: the posterior to have, or None to keep it.
        """
        kernel = copy.copy(self)
        kernel._cache = self._cache.variant(adaptation, target)
        return kernel

    def refresh(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: dict | None
    ) -> SGMCMCState:
        """Anchor the control variates at the present position, for changed conditioning values.

        Costs one gradient on all rows; a kernel with plain gradients caches nothing and returns
        the state as it is.
        """
        if not self.adaptation.estimator.has_anchor:
            return state
        arguments = self._cache.held.hold(Arguments(model_args, model_kwargs)).read()
        return anchored_here(self.target, state, arguments)

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
        checks.one_key_or_more(rng_key)
        arguments = Arguments(model_args, model_kwargs)
        if self._model is not None:
            refuse_other_numbers(arguments, self._model)
        if not is_traced(rng_key):
            forget_programs_if_many()
        is_batch = is_one_per_chain(rng_key)
        is_block = GIBBS_SITES_KWARG in arguments.kwargs
        with eagerly(rng_key), plain_failures(arguments.hosts):
            concrete = concrete_arguments(self._model, arguments)
            refuse_chain_per_device(concrete)
            self._cache.target = target = self._read(concrete, init_params, is_batch)
            if is_block:
                refuse_dropped_locals_in_block(target, self._options)
                init_params = None  # Gibbs gives draws from the prior, constrained
                concrete = self._at_likely_values(concrete)
            num_chains = len(rng_key) if is_batch else None
            init_params = accepted_start(init_params, target, concrete, num_chains)
            if target.dim:
                self._refuse_bad_functions(target)
            adaptation = self._adapt(target, concrete, init_params, is_batch)
            if target.dim:
                located = self._located_dynamics(target, adaptation.whitening)
                self._refuse_bad_metric(located, target)
        self._cache.be_ready(arguments, num_warmup)
        state = start_chains(self._plan, self._dynamics, rng_key, init_params, concrete)
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
        self._cache.target = target = self._read(arguments, z, is_batch=False)
        self._cache.remember(adaptation, target, arguments)
        self._cache.be_ready(arguments, num_warmup)

    def sample(
        self, state: SGMCMCState, model_args: tuple, model_kwargs: dict | None
    ) -> SGMCMCState:
        """Run ``num_steps`` steps, each on a minibatch of its own.

        :raises ValueError: where the data are others than those that control variates hold the
            gradient on.
        """
        if is_traced(state.rng_key):  # once a compilation: it looks at all of the data
            assert self._cache.record is not None
            self._cache.record.refuse_other_data(Arguments(model_args, model_kwargs))
        arguments = self._cache.held.hold(Arguments(model_args, model_kwargs)).read()
        axis = chain_axis(self.target.shards, len(state.i)) if state.i.ndim else None
        return advance(self._plan, state, arguments, axis)

    @property
    def _plan(self) -> ChainPlan:
        return ChainPlan(
            target=self.target.with_decisive(self.adaptation.decisive),
            adaptation=self.adaptation,
            scheme=self._scheme,
            locate=partial(self._located_dynamics, self.target),
            schedule=self._schedule,
            shortens_given_step=self._options.shortens_given_step,
            traced_step_size=self._options.traced_step_size,
            num_warmup=self._cache.num_warmup,
            clip_gradient=self._options.clip_gradient,
            collected=collected_sites(self.target.locals, self._options.collect_locals),
            blocks=mass_blocks(self._options, self.target.sites),
        )

    def _read(self, arguments: Arguments, init_params: Any, is_batch: bool) -> Target:
        """The target for arguments of this form, read from the model the first time."""
        targets = self._cache.targets
        if self._model is None:
            assert self._potential_fn is not None
            one = values_of_one_chain(init_params, is_batch)
            return read_function(self._potential_fn, one, self._options, targets)
        form = (arguments.signature, jnp.result_type(float))
        if form not in targets:
            targets[form] = read_model(self._model, arguments, self._options)
        return targets[form]

    def _at_likely_values(self, arguments: Arguments) -> Arguments:
        """Those of a block of Gibbs with likely values of the other blocks' sites."""
        assert self._model is not None
        settings = self._options, self._dynamics, self._scheme
        return at_likely_values(self._model, arguments, *settings, self._cache.record)

    def _adapt(
        self, target: Target, arguments: Arguments, init_params: Any, is_batch: bool
    ) -> Adaptation:
        """What all chains share, found once for one set of data."""
        if (record := self._cache.record) is not None:
            if record.holds_for(target, arguments):
                return record.adaptation
            self._cache.held = HeldArrays()
        settings = warmup_settings(
            self._options,
            target,
            self._dynamics,
            self._scheme,
            partial(self._located_dynamics, target),
            has_start=init_params is not None and not is_traced(init_params),
            is_by_site=self._is_by_site,
        )
        starts = first_positions(target, arguments, init_params, is_batch)
        with stages_shown(arguments.hosts) as progress:
            adaptation = adapt(target, arguments, settings, starts, progress)
        self._cache.remember(adaptation, target, arguments)
        return adaptation

    @property
    def _is_by_site(self) -> bool:
        """Whether the SDE must run in the sites' own coordinates, each in a unit of its own."""
        return False

    def _located_dynamics(self, target: Target, whitening: Whitening) -> Dynamics:
        """The SDE; for kernels whose SDE depends on the position, told where that is."""
        return self._dynamics

    def _refuse_bad_functions(self, target: Target) -> None:
        """Refuse users' functions of which no SDE can be made, before the warm-up."""

    def _refuse_bad_metric(self, dynamics: Dynamics, target: Target) -> None:
        """The same for functions of the sites' own coordinates, which the warm-up has found."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": self._cache.without_data()}


show_shared_keywords(SGMCMCKernel)
