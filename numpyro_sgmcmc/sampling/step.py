r"""One iteration of a chain: ``num_steps`` stochastic-gradient steps in a ``lax.scan``.

.. math:: z \leftarrow \Phi_h(z;\ \tilde g, \zeta)

is one step, with :math:`\Phi_h` the integrator's step, :math:`\tilde g` the estimate of the
preconditioned gradient on a minibatch and :math:`\zeta` standard normal numbers
(:func:`make_step`). :func:`run_iteration` runs the steps, restarts a diverged chain, adapts the
step size in warm-up and adds to the sums from which the bias is estimated.

All functions are pure; what does not change from iteration to iteration is in a
:class:`~numpyro_sgmcmc.sampling.state.ChainConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.row_proxies import with_prefetched_rows
from numpyro_sgmcmc.data.subsampling import sample_independent_minibatch
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.model.gradient_estimators import make_gradient_fn
from numpyro_sgmcmc.model.local_latents import with_local_values
from numpyro_sgmcmc.model.local_moves import update_minibatch_locals, update_reference_gradient
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import (
    FirstGradientRecorder,
    RunningSums,
    StepSizeMonitor,
    get_split_factor,
)
from numpyro_sgmcmc.sampling.prefetch import refill_prefetch_buffer
from numpyro_sgmcmc.sampling.state import (
    ChainConfig,
    Keys,
    SGMCMCState,
    StepCarry,
    make_chain_axes,
    sample_iteration_indices,
)

# Normal numbers of an iteration that are generated at once: a bound on memory, 16 MB in float32.
_MAX_PREGENERATED_NORMALS = 2**22
# Posterior SDs in one iteration: a chain that moves farther has diverged.
_MAX_DISPLACEMENT_SD = 1e3
# Shares of the step size below which warm-up does not shorten it, for a chosen one and for one of
# the user's, which may be in other units: if that is still too long, something else is wrong.
_MIN_STEP_SIZE_FRACTION, _MIN_USER_STEP_SIZE_FRACTION = 1 / 64, 2.0**-12


class StepInputs(NamedTuple):
    """Inputs of a step; those of an iteration have a leading axis of steps."""

    minibatch: Any  # row indices by plate, or the step's number in the prefetch buffer
    normals: Array  # standard normal numbers, or a key for them
    model_key: Array | None  # key of a randomised likelihood, or None
    step_index: Array  # number of steps before it in the run
    local_key: Array | None  # key of the moves of local latent variables, or None


StepFn = Callable[[StepCarry, StepInputs], tuple[StepCarry, Array, Array]]


def run_iteration(
    config: ChainConfig, state: SGMCMCState, arguments: Arguments, chain_axis: str | None = None
) -> SGMCMCState:
    """Return the state after one iteration, of one chain or of several.

    :param chain_axis: the mesh axis over which chains are distributed, or None.
    """
    if config.potential.dim == 0:
        return state._replace(i=state.i + 1)
    state = refill_prefetch_buffer(config, state, chain_axis)
    buffer = state.prefetch_buffer
    buffer_index = None if buffer is None else buffer.num_used.ravel()[0]  # equal for all chains
    run_chain = partial(_run_chain_iteration, config, arguments, buffer_index)
    if not state.i.ndim:
        return run_chain(state)
    axes = make_chain_axes(state.adapt_state.preconditioner)
    return jax.vmap(run_chain, (axes,), axes, spmd_axis_name=chain_axis)(state)


def _run_chain_iteration(
    config: ChainConfig, arguments: Arguments, buffer_index: Array | None, state: SGMCMCState
) -> SGMCMCState:
    potential, adapt_state, buffer = config.potential, state.adapt_state, state.prefetch_buffer
    preconditioner = adapt_state.preconditioner
    dynamics = config.bind_dynamics(preconditioner)
    keys = Keys.split(state.rng_key)
    streams, indices = sample_iteration_indices(config, state.streams, keys.indices)

    def get_minibatch(minibatch_input: Any) -> tuple[dict[str, Array], Arguments]:
        if buffer is None:
            return minibatch_input, arguments
        assert buffer_index is not None
        indices, rows = buffer.slice_step(buffer_index, minibatch_input)
        return indices, with_prefetched_rows(arguments, potential.host_lookups, indices, rows)

    step, inputs = make_step(config, state, dynamics, keys, indices, get_minibatch)
    final, sums, split_sums = _scan_steps(config, state, step, inputs, arguments, keys.moments)
    if final.reference_gradient is not None:
        adapt_state = adapt_state.with_reference_gradient(final.reference_gradient)

    step_size = config.get_step_size(inputs.step_index[-1], adapt_state)
    dynamics_state, diverging = _restart_if_diverged(
        config, state, dynamics, final.dynamics_state, step_size, keys.restart
    )
    weight = config.compute_weight(inputs.step_index, adapt_state)
    temperatures, moments = None, state.moments
    if config.adaptation.monitor_gradients.interval:
        temperatures = _compute_temperatures(config, state, dynamics, sums, final.dynamics_state)
        is_sampling = state.i >= config.num_warmup
        position = preconditioner.to_report_coordinates(dynamics_state.position)
        if (split_factor := get_split_factor(preconditioner)) is not None:
            assert split_sums is not None
            sums, position = split_sums, split_factor.split(dynamics_state.position)
        temperature = dynamics.kinetic_temperature(dynamics_state)
        sums = sums.finalize_iteration(position, temperature, weight)
        moments = moments.add(sums, is_sampling, is_sampling & ~diverging)
    monitor, step_size = _adapt_step_size(config, state, temperatures, diverging, step_size)
    if buffer is not None:
        buffer = buffer._replace(
            num_used=buffer.num_used + 1, next_key_data=random.key_data(keys.next_key)
        )
    position = preconditioner.to_position(dynamics_state.position)
    z = potential.unravel(position)
    if config.collected_sites.local:
        assert potential.local_latents is not None
        assert final.local_state is not None
        local_values = potential.local_latents.to_model_layout(final.local_state.by_site)
        z |= {name: local_values[name] for name in config.collected_sites.local}
    site_moments = state.site_moments
    if site_moments is not None:
        # The barrier keeps the compiled step, and so the draws, as they are without moments.
        values = potential.constrain_with_locals(
            lambda z: potential.postprocess(z, arguments), lax.optimization_barrier(z)
        )
        # Equal weights are ones: their sum is exact.
        has_schedule = callable(config.options.step_size)
        site_weight = weight if has_schedule else jnp.ones_like(weight)
        is_sampling = state.i >= config.num_warmup
        site_moments = site_moments.add(values, site_weight, is_sampling, config.options)
    return state._replace(
        i=state.i + 1,
        z=z,
        dynamics_state=dynamics_state,
        streams=streams,
        weight=weight,
        diverging=diverging,
        moments=moments,
        step_size_monitor=monitor,
        adapt_state=adapt_state._replace(step_size=step_size),
        rng_key=keys.next_key,
        prefetch_buffer=buffer,
        local_state=final.local_state,
        site_moments=site_moments,
    )


# The steps.


def make_step(
    config: ChainConfig,
    state: SGMCMCState,
    dynamics: Dynamics,
    keys: Keys,
    indices: dict[str, Array],
    get_minibatch: Callable[[Any], tuple[dict[str, Array], Arguments]],
) -> tuple[StepFn, StepInputs]:
    """Return the step function of an iteration, and the inputs of all its steps.

    A step returns what has changed, and a position with the gradient's estimate there, not
    clipped.

    :param indices: row indices of all steps by plate, used unless they are in a prefetch buffer.
    :param get_minibatch: returns row indices and arguments of a step from its minibatch input.
    """
    potential, estimator = config.potential, config.adaptation.estimator
    num_steps, adapt_state = config.adaptation.num_steps, state.adapt_state
    preconditioner = adapt_state.preconditioner
    integrate = dynamics.make_step(config.integrator)
    step_indices = state.i * num_steps + jnp.arange(num_steps)
    resample_auxiliary = _make_auxiliary_resampler(config, dynamics, keys.auxiliary, step_indices)

    # Random numbers of all steps at once, which is faster, unless they would fill the memory.
    normals_shape = (integrate.num_noise, potential.dim)
    is_pregenerated = num_steps * integrate.num_noise * potential.dim <= _MAX_PREGENERATED_NORMALS
    if is_pregenerated:
        normals = random.normal(keys.normals, (num_steps, *normals_shape), potential.dtype)
    else:
        normals = random.split(keys.normals, num_steps)
    local_keys = None
    if potential.local_latents is not None:
        local_keys = random.split(random.fold_in(keys.model, 1), num_steps)
    all_inputs = StepInputs(
        minibatch=indices if state.prefetch_buffer is None else jnp.arange(num_steps),
        normals=normals,
        model_key=random.split(keys.model, num_steps) if potential.is_stochastic else None,
        step_index=step_indices,
        local_key=local_keys,
    )

    def step(carry: StepCarry, inputs: StepInputs) -> tuple[StepCarry, Array, Array]:
        normals = inputs.normals
        if not is_pregenerated:
            normals = random.normal(normals, normals_shape, potential.dtype)
        indices, arguments = get_minibatch(inputs.minibatch)
        updated = carry.update_preconditioner(preconditioner)
        if (before := carry.local_state) is not None:
            assert inputs.local_key is not None
            position = preconditioner.to_position(carry.dynamics_state.position)
            local_state, arguments = update_minibatch_locals(
                potential, before, position, indices, arguments, inputs.local_key
            )
            if estimator.needs_reference:
                updated = update_reference_gradient(potential, updated, before, indices, arguments)
            carry = StepCarry(carry.dynamics_state, local_state, updated.reference_gradient)
        gradient_fn = FirstGradientRecorder(
            make_gradient_fn(estimator, potential, arguments, updated, indices, inputs.model_key),
            config.options.max_grad_norm,
        )
        start = resample_auxiliary(carry.dynamics_state, inputs.step_index)
        step_size = config.get_step_size(inputs.step_index, adapt_state)
        if adapt_state.gradient_noise_covariance is not None:
            normals = dynamics.compensate_gradient_noise(
                start, normals, step_size, adapt_state.gradient_noise_covariance
            )
        end = integrate(start, step_size, gradient_fn, normals, inputs.step_index)
        position = (end if integrate.gradient_at_end else start).position
        return carry._replace(dynamics_state=end), position, gradient_fn.first_gradient

    return step, all_inputs


def _make_auxiliary_resampler(
    config: ChainConfig, dynamics: Dynamics, rng_key: Array, step_indices: Array
) -> Callable[[Any, Array], Any]:
    """Return a function ``(state, step_index) -> state`` that resamples auxiliary variables.

    A variable is resampled at the steps that are multiples of its period.
    """
    dim, dtype = config.potential.dim, config.potential.dtype
    samples_and_period = {}
    for k, (name, period) in enumerate(dynamics.resampling_periods.items()):
        num_samples = len(step_indices) // period + 2
        key = random.fold_in(rng_key, k)
        samples = dynamics.sample_auxiliary(name, key, (num_samples, dim), dtype)
        samples_and_period[name] = samples, period

    def resample(state: Any, step_index: Array) -> Any:
        for name, (samples, period) in samples_and_period.items():
            sample = samples[step_index // period - step_indices[0] // period]
            value = jnp.where(step_index % period == 0, sample, getattr(state, name))
            state = state._replace(**{name: value})
        return state

    return resample


def _scan_steps(
    config: ChainConfig,
    state: SGMCMCState,
    step: StepFn,
    inputs: StepInputs,
    arguments: Arguments,
    rng_key: Array,
) -> tuple[StepCarry, RunningSums, RunningSums | None]:
    """Run all steps, and sum positions and gradients at some of them.

    :param rng_key: key of minibatches that no step uses, for the sums.
    :return: the end of the last step, sums in sites' own coordinates, and sums of split vectors.
    """
    potential, preconditioner = config.potential, state.adapt_state.preconditioner
    split_factor = get_split_factor(preconditioner)
    monitor_gradients, num_steps = config.adaptation.monitor_gradients, len(inputs.step_index)
    interval = monitor_gradients.interval or num_steps

    def run_interval(
        carry: tuple[StepCarry, RunningSums, Any], xs: tuple[StepInputs, Any]
    ) -> tuple[tuple[StepCarry, RunningSums, Any], None]:
        (carry_of_steps, sums, split_sums), (inputs, independent_key) = carry, xs
        if interval == 1:
            first = jax.tree.map(lambda x: x[0], inputs)
            carry_of_steps, q, gradient = step(carry_of_steps, first)
        else:
            position = carry_of_steps.dynamics_state.position
            (carry_of_steps, q, gradient), _ = lax.scan(
                lambda c, x: (step(c[0], x), None),
                (carry_of_steps, position, jnp.zeros_like(position)),
                inputs,
            )
        if not monitor_gradients.interval:
            return (carry_of_steps, sums, split_sums), None
        if monitor_gradients.estimator is not None:
            q = carry_of_steps.dynamics_state.position
            gradient = _independent_gradient(
                config, carry_of_steps, preconditioner, arguments, independent_key
            )
        # The sums refer to sites' own coordinates, which low-rank factors would mix.
        sums = sums.add(
            preconditioner.to_report_coordinates(q),
            preconditioner.gradient_to_report_coordinates(q, gradient),
        )
        if split_factor is not None:
            split_sums = split_sums.add(split_factor.split(q), split_factor.split(gradient))
        return (carry_of_steps, sums, split_sums), None

    has_locals = state.local_state is not None
    reference_gradient = preconditioner.reference_gradient if has_locals else None
    initial = StepCarry(state.dynamics_state, state.local_state, reference_gradient)
    num_intervals = num_steps // interval
    grouped = jax.tree.map(lambda x: x.reshape(num_intervals, interval, *x.shape[1:]), inputs)
    independent_keys = random.split(rng_key, num_intervals) if monitor_gradients.estimator else None
    no_sums = RunningSums.zeros(potential.dim, potential.dtype)
    no_split_sums = None
    if split_factor is not None:
        num_directions = split_factor.scales.size
        no_split_sums = RunningSums.zeros(potential.dim + num_directions, potential.dtype)
    (final, sums, split_sums), _ = lax.scan(
        run_interval, (initial, no_sums, no_split_sums), (grouped, independent_keys)
    )
    return final, sums, split_sums


def _independent_gradient(
    config: ChainConfig,
    carry: StepCarry,
    preconditioner: Preconditioner,
    arguments: Arguments,
    rng_key: Array,
) -> Array:
    """Return an estimate of the preconditioned gradient on a minibatch that no step has used."""
    potential, adaptation = config.potential, config.adaptation
    assert adaptation.monitor_gradients.estimator is not None
    if carry.local_state is not None:
        arguments = with_local_values(arguments, carry.local_state)
    model_key, *plate_keys = random.split(rng_key, 1 + len(potential.plates))
    indices = {
        p.name: sample_independent_minibatch(adaptation.subsampling, p, key)
        for p, key in zip(potential.plates, plate_keys, strict=True)
    }
    gradient_fn = make_gradient_fn(
        adaptation.monitor_gradients.estimator,
        potential,
        arguments,
        carry.update_preconditioner(preconditioner),
        indices,
        model_key if potential.is_stochastic else None,
    )
    return gradient_fn(carry.dynamics_state.position)


# After the steps.


def _restart_if_diverged(
    config: ChainConfig,
    state: SGMCMCState,
    dynamics: Dynamics,
    final_dynamics_state: Any,
    last_step_size: Array,
    rng_key: Array,
) -> tuple[Any, Array]:
    """Return the state of the SDE from which the chain continues, and whether it has diverged."""
    leaves = jax.tree.leaves(final_dynamics_state)
    is_finite = jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
    distance = jnp.abs(final_dynamics_state.position - state.dynamics_state.position).max()
    # A chain with finite numbers that does not move is stuck, unless its schedule has reached zero.
    has_moved = (distance > 0) | (last_step_size == 0)
    diverging = ~(is_finite & has_moved & (distance < _MAX_DISPLACEMENT_SD))
    # An over-dispersed initial position, or the last finite one, may be one that no step leaves:
    # in warm-up, and if the iteration before failed too, halve the distance to the center.
    is_halved = (state.i < config.num_warmup) | state.diverging
    factor = jnp.where(is_halved, 0.5, 1.0).astype(config.potential.dtype)
    restart = dynamics.init(factor * state.dynamics_state.position, rng_key)
    return jax.tree.map(partial(jnp.where, diverging), restart, final_dynamics_state), diverging


def _compute_temperatures(
    config: ChainConfig,
    state: SGMCMCState,
    dynamics: Dynamics,
    sums: RunningSums,
    final_dynamics_state: Any,
) -> Array:
    r"""Return configurational temperatures, whose expectation is one for an exact sampler.

    Without a dominant mode the kinetic temperature is appended. Gradient noise then inflates the
    variance in directions that are no coordinates; the momenta show it best, and the step is too
    short to change their temperature itself.
    """
    temperatures = sums.configurational_temperatures
    preconditioner = state.adapt_state.preconditioner
    if (initial_center := state.adapt_state.initial_center) is not None:
        # The sums are about this iteration's center, which depends on the position: E[q' dU] = 1
        # holds about a fixed one.
        moved = preconditioner.solve(preconditioner.center - initial_center)
        temperatures += preconditioner.to_report_coordinates(moved) * sums.gradient / sums.weight
    if config.adaptation.has_dominant_mode:
        return temperatures
    kinetic_temperature = dynamics.kinetic_temperature(final_dynamics_state)
    # NaN for an SDE without momenta.
    kinetic_temperature = jnp.where(jnp.isnan(kinetic_temperature), 1.0, kinetic_temperature)
    return jnp.append(temperatures, kinetic_temperature)


def _adapt_step_size(
    config: ChainConfig,
    state: SGMCMCState,
    temperatures: Array | None,
    diverging: Array,
    last_step_size: Array,
) -> tuple[StepSizeMonitor, Array]:
    """Return the step-size monitor, and the step size, which changes in warm-up only.

    The temperatures are checked halfway through the warm-up and at its end, over the iterations
    since its quarter and since its half. A divergence halves the step at once, except those of the
    over-dispersed initial position. A step size of the user's is shortened by divergences only.
    """
    adaptation, num_warmup = config.adaptation, config.num_warmup
    quarter, half, is_warmup = num_warmup // 4, num_warmup // 2, state.i < num_warmup
    step_size, monitor = state.adapt_state.step_size, state.step_size_monitor
    if temperatures is not None and adaptation.allowed_variance_inflation is not None:
        min_fraction = _MIN_STEP_SIZE_FRACTION
        monitor = monitor.add(temperatures, (state.i >= quarter) & is_warmup & ~diverging)
        is_due = (state.i + 1 == half) | (state.i + 1 == num_warmup)
        allowed = jnp.asarray(adaptation.allowed_variance_inflation, temperatures.dtype)
        time = adaptation.num_steps * step_size
        ess_per_iteration = jnp.minimum(time / adaptation.relaxation_time, 1.0)
        scale = jnp.where(is_due, monitor.compute_step_scale(allowed, ess_per_iteration), 1.0)
        monitor = jax.tree.map(lambda x: jnp.where(is_due, jnp.zeros_like(x), x), monitor)
    elif config.options.can_shrink_user_step_size:
        min_fraction, scale = _MIN_USER_STEP_SIZE_FRACTION, jnp.ones_like(step_size)
    else:
        return monitor, last_step_size
    is_halved = is_warmup & diverging & (state.diverging | (state.i >= quarter))
    scale = jnp.where(is_halved, 0.5 * scale, scale)
    min_scale = jnp.minimum(min_fraction * adaptation.step_size / step_size, 1.0)
    scale = jnp.where(is_warmup, jnp.maximum(scale, min_scale), 1.0)
    return monitor, scale * last_step_size
