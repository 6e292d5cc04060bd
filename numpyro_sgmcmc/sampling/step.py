r"""A step's minibatch: rows in memory, or rows that have been read ahead.

One stochastic-gradient step.

.. math:: z \leftarrow \Phi_h(z;\ \tilde g, \zeta)

with :math:`\Phi_h` the integrator's step, :math:`\tilde g` the whitened gradient's estimate on a
minibatch and :math:`\zeta` normal entries. What a model or a kernel has besides comes before it,
each a function that does nothing where it is not wanted: local values renewed, auxiliary
variables drawn afresh, noise taken back.

Positions and gradients looked at while an iteration runs, for the moments that tell the bias.

One iteration of one chain: ``num_steps`` stochastic-gradient steps in a ``lax.scan``.

Pure functions of the chain's state; what they need besides is in a
:class:`~numpyro_sgmcmc.sampling.state.ChainPlan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.settings import MonitorGradients
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.row_proxies import RowLookup, with_prefetched_rows
from numpyro_sgmcmc.data.subsampling import sample_independent_minibatch
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.integrators import GradientFn, Step, clip_grad_norm
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator, make_gradient_fn
from numpyro_sgmcmc.model.local_latents import with_local_values
from numpyro_sgmcmc.model.local_moves import update_minibatch_locals
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import (
    FirstGradientRecorder,
    Moments,
    RunningSums,
    StepSizeMonitor,
)
from numpyro_sgmcmc.sampling.prefetch import refill_prefetch_buffer
from numpyro_sgmcmc.sampling.state import (
    AdaptState,
    ChainConfig,
    Keys,
    PrefetchBuffer,
    SGMCMCState,
    StepCarry,
    get_key_data,
    sample_iteration_indices,
)

__all__ = [
    "InMemoryMinibatchSource",
    "Minibatch",
    "MinibatchSource",
    "MomentAccumulator",
    "PrefetchedMinibatchSource",
    "StepInputs",
    "Stepper",
    "run_chain_iteration",
    "run_iteration",
]


class Minibatch(NamedTuple):
    """
    - **indices** - row indices by plate.
    - **arguments** - the model's arguments, as it sees them for these rows.
    """

    indices: dict[str, Array]
    arguments: Arguments


class MinibatchSource(Protocol):
    """Where the rows of an iteration's steps come from."""

    def get_scan_inputs(self) -> Any:
        """What the loop over steps takes apart, a leading axis of steps."""
        ...

    def get_minibatch(self, scan_input: Any) -> Minibatch:
        """The minibatch of the step that got this part."""
        ...


class InMemoryMinibatchSource:
    """Rows that the compiled step looks up itself.

    :param indices: indices by plate, ``(num_steps, subsample_size)``.
    :param arguments: the model's arguments.
    """

    def __init__(self, indices: dict[str, Array], arguments: Arguments) -> None:
        self._indices, self._arguments = indices, arguments

    def get_scan_inputs(self) -> Any:
        return self._indices

    def get_minibatch(self, scan_input: Any) -> Minibatch:
        return Minibatch(scan_input, self._arguments)


class PrefetchedMinibatchSource:
    """Rows that have been read from the host, a block of iterations at a time.

    :param buffer: the block.
    :param buffer_index: the iteration's number in the block, the same for all chains.
    :param num_steps: steps of an iteration.
    :param lookups: the arrays that have been read, by plate.
    :param arguments: the model's arguments.
    """

    def __init__(
        self,
        buffer: PrefetchBuffer,
        buffer_index: Array,
        num_steps: int,
        lookups: tuple[RowLookup, ...],
        arguments: Arguments,
    ) -> None:
        self._buffer, self._buffer_index, self._num_steps = buffer, buffer_index, num_steps
        self._lookups, self._arguments = lookups, arguments

    def get_scan_inputs(self) -> Any:
        return jnp.arange(self._num_steps)

    def get_minibatch(self, scan_input: Any) -> Minibatch:
        rows, values = self._buffer.slice_step(self._buffer_index, scan_input)
        return Minibatch(rows, with_prefetched_rows(self._arguments, self._lookups, rows, values))


_MAX_PREGENERATED_NORMALS = 2**22  # numbers: beyond, an iteration's noise would fill the memory


class StepInputs(NamedTuple):
    """What one step takes; in an iteration's inputs all have a leading axis of steps.

    - **minibatch_input** - what its minibatch is made of.
    - **normals** - standard normal entries, or a key for them.
    - **model_key** - key of a randomised likelihood, or None.
    - **step_index** - their number, counted from the run's first.
    - **local_key** - key of the local moves, or None.
    """

    minibatch_input: Any
    normals: Array
    model_key: Array | None
    step_index: Array
    local_key: Array | None


@dataclass(frozen=True)
class Stepper:
    """The steps of one iteration of one chain.

    - **config** - what does not change from iteration to iteration.
    - **adapt_state** - the chain's step size and coordinates.
    - **dynamics** - the SDE, told where its coordinates are.
    - **integrate** - the integrator's step.
    - **minibatch_source** - where the rows come from.
    - **resample_auxiliary** - ``(state, count) -> state`` draws auxiliary variables afresh where due.
    - **get_normals** - the normal entries of a step from what it got for them.
    """

    config: ChainConfig
    adapt_state: AdaptState
    dynamics: Dynamics
    integrate: Step
    minibatch_source: MinibatchSource
    resample_auxiliary: Callable[[Any, Array], Any]
    get_normals: Callable[[Array], Array]

    @classmethod
    def prepare_iteration(
        cls,
        config: ChainConfig,
        adapt_state: AdaptState,
        minibatch_source: MinibatchSource,
        keys: Keys,
        step_indices: Array,
    ) -> tuple[Stepper, StepInputs]:
        """The stepper, and the inputs of all steps.

        :param step_indices: the iteration's steps, counted from the run's first.
        """
        target, num_steps = config.potential, len(step_indices)
        dynamics = config.bind_dynamics(adapt_state.preconditioner)
        integrate = dynamics.make_step(config.integrator)
        resample = _make_auxiliary_resampler(dynamics, keys.auxiliary, step_indices, target)
        entries, noise = _prepare_normals(integrate, target, keys.normals, num_steps)
        model_keys = random.split(keys.model, num_steps) if target.is_stochastic else None
        local_keys = None
        if target.local_latents is not None:
            local_keys = random.split(random.fold_in(keys.model, 1), num_steps)
        stepper = cls(config, adapt_state, dynamics, integrate, minibatch_source, resample, entries)
        return stepper, StepInputs(
            minibatch_source.get_scan_inputs(), noise, model_keys, step_indices, local_keys
        )

    def step(self, carry: StepCarry, inputs: StepInputs) -> tuple[StepCarry, Array, Array]:
        """One step.

        :return: what has moved, and a position with the gradient's estimate there, uncut.
        """
        plan, whitening = self.config, self.adapt_state.preconditioner
        noise = self.get_normals(inputs.normals)
        minibatch = self.minibatch_source.get_minibatch(inputs.minibatch_input)
        carry, minibatch = self._update_locals(carry, minibatch, inputs.local_key)
        gradient = FirstGradientRecorder(
            make_gradient_fn(
                plan.adaptation.estimator,
                plan.potential,
                minibatch.arguments,
                carry.refresh_preconditioner(whitening),
                minibatch.indices,
                inputs.model_key,
            )
        )
        start = self.resample_auxiliary(carry.dynamics_state, inputs.step_index)
        step_size = plan.get_step_size(inputs.step_index, self.adapt_state)
        noise = self._compensate_normals(start, noise, step_size)
        followed = clip_grad_norm(gradient, plan.max_grad_norm)
        end = self.integrate(start, step_size, followed, noise, inputs.step_index)
        read_at = end if self.integrate.gradient_at_end else start
        return carry._replace(dynamics_state=end), read_at.position, gradient.first_gradient

    def _update_locals(
        self, carry: StepCarry, minibatch: Minibatch, rng_key: Array | None
    ) -> tuple[StepCarry, Minibatch]:
        """The minibatch's local values renewed given the globals, where the model has some."""
        target, whitening = self.config.potential, self.adapt_state.preconditioner
        if target.local_latents is None:
            return carry, minibatch
        assert carry.local_state is not None
        assert carry.reference_gradient is not None
        assert rng_key is not None
        own, anchor_gradient, arguments = update_minibatch_locals(
            target,
            carry.local_state,
            whitening.to_position(carry.dynamics_state.position),
            minibatch.indices,
            minibatch.arguments,
            whitening.center,
            carry.reference_gradient,
            self.config.adaptation.estimator,
            rng_key,
        )
        moved = StepCarry(carry.dynamics_state, own, anchor_gradient)
        return moved, minibatch._replace(arguments=arguments)

    def _compensate_normals(self, dynamics_state: Any, normals: Array, step_size: Array) -> Array:
        """The normal entries, less what the gradient's own noise brings where that is asked for."""
        if self.adapt_state.gradient_noise_covariance is None:
            return normals
        return self.dynamics.compensate_gradient_noise(
            dynamics_state, normals, step_size, self.adapt_state.gradient_noise_covariance
        )


def _prepare_normals(
    integrate: Step, potential: Potential, rng_key: Array, num_steps: int
) -> tuple[Callable[[Array], Array], Array]:
    """How a step gets its normal entries, and from what: the entries of all steps drawn ahead.

    Only where these would fill the memory are they drawn step by step, from keys.
    """
    shape = (integrate.num_noise, potential.dim)
    if num_steps * integrate.num_noise * potential.dim <= _MAX_PREGENERATED_NORMALS:
        return lambda entries: entries, random.normal(rng_key, (num_steps, *shape), potential.dtype)
    return lambda key: random.normal(key, shape, potential.dtype), random.split(rng_key, num_steps)


def _make_auxiliary_resampler(
    dynamics: Dynamics, rng_key: Array, step_indices: Array, potential: Potential
) -> Callable[[Any, Array], Any]:
    """Draws auxiliary variables afresh at the steps where the dynamic has them due.

    :param step_indices: the iteration's steps, counted from the run's first.
    :return: ``(state, count) -> state``.
    """
    fresh = {}
    for k, (field, period) in enumerate(dynamics.resampling_periods.items()):
        num = len(step_indices) // period + 2
        key = random.fold_in(rng_key, k)
        fresh[field] = (
            dynamics.sample_auxiliary(field, key, (num, potential.dim), potential.dtype),
            period,
        )

    def resample(state: Any, count: Array) -> Any:
        for field, (draws, period) in fresh.items():
            draw = draws[count // period - step_indices[0] // period]
            value = jnp.where(count % period == 0, draw, getattr(state, field))
            state = state._replace(**{field: value})
        return state

    return resample


class MomentAccumulator:
    """Looks at the steps of one iteration, where the plan's moment source says.

    :param config: what does not change from iteration to iteration.
    :param preconditioner: the chain's coordinates.
    :param arguments: the model's arguments.
    """

    def __init__(
        self, config: ChainConfig, preconditioner: Preconditioner, arguments: Arguments
    ) -> None:
        self._config, self._preconditioner, self._arguments = config, preconditioner, arguments

    @property
    def monitor_gradients(self) -> MonitorGradients:
        """Which gradients count."""
        return self._config.adaptation.monitor_gradients

    def init_sums(self) -> RunningSums:
        """Nothing seen yet."""
        return RunningSums.zeros(self._config.potential.dim, self._config.potential.dtype)

    def split_keys(self, rng_key: Array, num_keys: int) -> Array | None:
        """Keys of minibatches of their own, if there are such."""
        return random.split(rng_key, num_keys) if self.monitor_gradients.estimator else None

    def accumulate(
        self, sums: RunningSums, carry: StepCarry, q: Array, g: Array, rng_key: Any
    ) -> RunningSums:
        """With one position and gradient more.

        :param q: the last step's position.
        :param g: the last step's gradient there.
        :param rng_key: key of a minibatch of its own, or None where the step's gradient counts.
        """
        if self.monitor_gradients.estimator is not None:
            q = carry.dynamics_state.position
            g = self._make_independent_gradient_fn(
                self.monitor_gradients.estimator, carry, rng_key
            )(q)
        if not self.monitor_gradients.interval:
            return sums
        # The moments are told coordinate by coordinate: they must be the sites' own.
        w = self._preconditioner
        return sums.add(w.apply_low_rank(q), w.solve_low_rank(g))

    def update_moments(
        self,
        state: SGMCMCState,
        sums: RunningSums,
        final_dynamics_state: Any,
        weight: Array,
        diverging: Array,
    ) -> Moments:
        """The chain's moments with this iteration's.

        :param state: the chain's before the iteration.
        :param sums: the iteration's.
        :param final_dynamics_state: the dynamic's state after it.
        """
        if not self.monitor_gradients.interval:
            return state.moments
        is_sampling = state.i >= self._config.num_warmup
        temperature = self._config.bind_dynamics(self._preconditioner).kinetic_temperature(
            final_dynamics_state
        )
        position = self._preconditioner.apply_low_rank(final_dynamics_state.position)
        finished = sums.finalize_iteration(position, temperature, weight)
        return state.moments.add(finished, is_sampling, is_sampling & ~diverging)

    def _make_independent_gradient_fn(
        self, estimator: GradientEstimator, carry: StepCarry, rng_key: Array
    ) -> GradientFn:
        """The whitened gradient's estimate on a minibatch that no step has seen."""
        target, scheme = self._config.potential, self._config.adaptation.subsampling
        arguments = self._arguments
        if carry.local_state is not None:
            arguments = with_local_values(arguments, carry.local_state.values)
        model_key, *keys = random.split(rng_key, 1 + len(target.plates))
        rows = {
            p.name: sample_independent_minibatch(scheme, p, key)
            for p, key in zip(target.plates, keys, strict=True)
        }
        return make_gradient_fn(
            estimator,
            target,
            arguments,
            carry.refresh_preconditioner(self._preconditioner),
            rows,
            model_key if target.is_stochastic else None,
        )


_MAX_DISPLACEMENT_SD = (
    1e3  # whitened units in one iteration: no chain moves so far by its own dynamics
)


_MIN_STEP_SIZE_FRACTION = (
    1 / 64
)  # of the step size chosen: where that fails too, it is not the step


_MIN_USER_STEP_SIZE_FRACTION = 2.0**-12  # of the user's, which may be in other units


def run_iteration(
    config: ChainConfig, state: SGMCMCState, arguments: Arguments, chain_axis: str | None = None
) -> SGMCMCState:
    """The state after one iteration, of one chain or of several.

    :param config: what does not change from iteration to iteration.
    :param state: the state before, batched for several chains.
    :param arguments: the model's arguments.
    :param chain_axis: the mesh axis over which chains are spread, if they are.
    """
    if config.potential.dim == 0:
        return state._replace(i=state.i + 1)
    state = refill_prefetch_buffer(config, state, chain_axis)
    in_block = None if state.prefetch_buffer is None else state.prefetch_buffer.num_used.ravel()[0]
    one = partial(run_chain_iteration, config, arguments=arguments, buffer_index=in_block)
    return jax.vmap(one, spmd_axis_name=chain_axis)(state) if state.i.ndim else one(state)


def run_chain_iteration(
    config: ChainConfig, state: SGMCMCState, arguments: Arguments, buffer_index: Array | None = None
) -> SGMCMCState:
    """The state after one iteration.

    :param config: what does not change from iteration to iteration.
    :param state: the state before.
    :param arguments: the model's arguments.
    :param buffer_index: the iteration's number in the block of rows that have been read, the same for
        all chains; None where all rows are in memory.
    """
    num_steps, adapt_state = config.adaptation.num_steps, state.adapt_state
    keys = Keys.split(state.rng_key)
    streams, rows = sample_iteration_indices(config, state.streams, keys.indices)
    counts = state.i * num_steps + jnp.arange(num_steps)
    source: MinibatchSource = InMemoryMinibatchSource(rows, arguments)
    if state.prefetch_buffer is not None:
        assert buffer_index is not None
        source = PrefetchedMinibatchSource(
            state.prefetch_buffer, buffer_index, num_steps, config.potential.host_lookups, arguments
        )
    stepper, inputs = Stepper.prepare_iteration(config, adapt_state, source, keys, counts)
    reader = MomentAccumulator(config, adapt_state.preconditioner, arguments)
    end, sums = _scan_steps(stepper, reader, _init_carry(state), inputs, keys)
    if end.reference_gradient is not None:
        adapt_state = adapt_state.with_reference_gradient(end.reference_gradient)

    step_size = config.get_step_size(counts[-1], adapt_state)
    dynamics, diverging = _restart_if_diverged(
        config, state, end.dynamics_state, step_size, keys.restart
    )
    weight = config.compute_weight(counts, adapt_state)
    control, factor = _adapt_step_size(
        config, state, _compute_temperatures(config, state, sums, end), diverging
    )
    if factor is not None:
        step_size = factor * step_size
    block = state.prefetch_buffer
    if block is not None:
        block = block._replace(
            num_used=block.num_used + 1, next_key_data=get_key_data(keys.next_key)
        )
    return state._replace(
        i=state.i + 1,
        z=_collect_site_values(config, adapt_state, dynamics.position, end),
        dynamics_state=dynamics,
        streams=streams,
        weight=weight,
        diverging=diverging,
        moments=reader.update_moments(state, sums, dynamics, weight, diverging),
        step_size_monitor=control,
        adapt_state=adapt_state._replace(step_size=step_size),
        rng_key=keys.next_key,
        prefetch_buffer=block,
        local_state=end.local_state,
    )


def _init_carry(state: SGMCMCState) -> StepCarry:
    if state.local_state is None:
        return StepCarry(state.dynamics_state)
    return StepCarry(
        state.dynamics_state, state.local_state, state.adapt_state.preconditioner.reference_gradient
    )


def _scan_steps(
    stepper: Stepper,
    accumulator: MomentAccumulator,
    init_carry: StepCarry,
    inputs: StepInputs,
    keys: Keys,
) -> tuple[StepCarry, RunningSums]:
    """All steps, with a look at position and gradient at some of them."""
    num_steps = len(inputs.step_index)
    every = accumulator.monitor_gradients.interval or num_steps

    def to_next_look(
        carry: tuple[StepCarry, RunningSums], xs: Any
    ) -> tuple[tuple[StepCarry, RunningSums], None]:
        (moving, sums), (some, fresh_key) = carry, xs
        if every == 1:
            moving, q, g = stepper.step(moving, jax.tree.map(lambda x: x[0], some))
        else:
            blank = moving.dynamics_state.position, jnp.zeros_like(moving.dynamics_state.position)
            (moving, q, g), _ = lax.scan(
                lambda c, x: (stepper.step(c[0], x), None), (moving, *blank), some
            )
        return (moving, accumulator.accumulate(sums, moving, q, g, fresh_key)), None

    grouped = jax.tree.map(lambda x: x.reshape(num_steps // every, every, *x.shape[1:]), inputs)
    fresh_keys = accumulator.split_keys(keys.moments, num_steps // every)
    (end, sums), _ = lax.scan(
        to_next_look, (init_carry, accumulator.init_sums()), (grouped, fresh_keys)
    )
    return end, sums


def _compute_temperatures(
    config: ChainConfig, state: SGMCMCState, sums: RunningSums, final_carry: StepCarry
) -> Array | None:
    """What should be one on average: of each coordinate, and of the momenta where that alone tells.

    Where there is no single region noise heats directions that are no coordinates. Of all others
    the momenta are the surest witness, and a step is short enough not to change them itself.
    """
    if not config.adaptation.monitor_gradients.interval:
        return None
    temperatures = sums.configurational_temperatures
    if (centre := state.adapt_state.initial_center) is not None:
        # Positions are told from the iteration's start, which they depend on: not from a fixed one.
        w = state.adapt_state.preconditioner
        temperatures += w.apply_low_rank(w.solve(w.center - centre)) * sums.gradient / sums.weight
    if config.adaptation.has_dominant_mode:
        return temperatures
    kinetic = config.bind_dynamics(state.adapt_state.preconditioner).kinetic_temperature(
        final_carry.dynamics_state
    )
    kinetic = jnp.where(jnp.isnan(kinetic), 1.0, kinetic)  # there are none
    return jnp.append(temperatures, kinetic)


def _adapt_step_size(
    config: ChainConfig, state: SGMCMCState, temperatures: Array | None, diverging: Array
) -> tuple[StepSizeMonitor, Array | None]:
    """What the chain has seen of its step size, and by what to multiply it: 1 after warm-up.

    Checks come halfway through the warm-up and at its end, on the iterations since the quarter
    and since the half; a divergence shortens the step at once, but for the over-dispersed start's.
    A step of the user's is shortened by divergences alone.
    """
    num_warmup, adaptation = config.num_warmup, config.adaptation
    if temperatures is None or adaptation.allowed_variance_inflation is None:
        if not config.can_shrink_user_step_size:
            return state.step_size_monitor, None
        one = jnp.ones_like(state.adapt_state.step_size)
        factor = _shrink_after_divergence(
            config, state, one, diverging, _MIN_USER_STEP_SIZE_FRACTION
        )
        return state.step_size_monitor, factor
    quarter, half = num_warmup // 4, num_warmup // 2
    is_warmup = state.i < num_warmup
    control = state.step_size_monitor.add(
        temperatures, (state.i >= quarter) & is_warmup & ~diverging
    )
    is_due = (state.i + 1 == half) | (state.i + 1 == num_warmup)
    allowed = jnp.asarray(adaptation.allowed_variance_inflation, temperatures.dtype)
    time = adaptation.num_steps * state.adapt_state.step_size
    independent = jnp.minimum(time / adaptation.relaxation_time, 1.0)
    factor = jnp.where(is_due, control.compute_step_scale(allowed, independent), 1.0)
    factor = _shrink_after_divergence(config, state, factor, diverging, _MIN_STEP_SIZE_FRACTION)
    control = jax.tree.map(lambda x: jnp.where(is_due, jnp.zeros_like(x), x), control)
    return control, factor


def _shrink_after_divergence(
    config: ChainConfig, state: SGMCMCState, scale: Array, diverging: Array, min_fraction: float
) -> Array:
    """By what to multiply a step that a divergence in warm-up may halve; 1 after warm-up.

    :param min_fraction: share of the first step size, below which none is shortened.
    """
    is_warmup = state.i < config.num_warmup
    is_blamed = is_warmup & diverging & (state.diverging | (state.i >= config.num_warmup // 4))
    scale = jnp.where(is_blamed, 0.5 * scale, scale)
    shortest = min_fraction * config.adaptation.step_size / state.adapt_state.step_size
    return jnp.where(is_warmup, jnp.maximum(scale, jnp.minimum(shortest, 1.0)), 1.0)


def _restart_if_diverged(
    config: ChainConfig,
    state: SGMCMCState,
    final_dynamics_state: Any,
    last_step_size: Array,
    rng_key: Array,
) -> tuple[Any, Array]:
    """Where the chain goes on, and whether the iteration has failed."""
    is_finite = jnp.stack(
        [jnp.isfinite(x).all() for x in jax.tree.leaves(final_dynamics_state)]
    ).all()
    moved = jnp.abs(final_dynamics_state.position - state.dynamics_state.position).max()
    # A chain of finite numbers that stands still is stuck, unless its schedule has come to rest.
    has_moved = (moved > 0) | (last_step_size == 0)
    diverging = ~(is_finite & has_moved & (moved < _MAX_DISPLACEMENT_SD))
    # An over-dispersed start, or the last finite position, may be one that no step leaves:
    # in warm-up, and where the iteration before failed too, come nearer to the anchor.
    is_stuck = (state.i < config.num_warmup) | state.diverging
    nearer = jnp.where(is_stuck, 0.5, 1.0).astype(config.potential.dtype)
    dynamics = config.bind_dynamics(state.adapt_state.preconditioner)
    restart = dynamics.init(nearer * state.dynamics_state.position, rng_key)
    return jax.tree.map(partial(jnp.where, diverging), restart, final_dynamics_state), diverging


def _collect_site_values(
    config: ChainConfig, adapt_state: AdaptState, q: Array, final_carry: StepCarry
) -> dict[str, Array]:
    """The unconstrained values of the sites that a draw holds."""
    target = config.potential
    z: dict[str, Array] = target.unravel(adapt_state.preconditioner.to_position(q))
    if config.collected_local_sites:
        assert target.local_latents is not None
        assert final_carry.local_state is not None
        of_rows = target.local_latents.to_unconstrained_sites(final_carry.local_state.values)
        z |= {name: of_rows[name] for name in config.collected_local_sites}
    return z
