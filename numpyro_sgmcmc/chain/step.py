r"""One stochastic-gradient step.

.. math:: z \leftarrow \Phi_h(z;\ \tilde g, \zeta)

with :math:`\Phi_h` the integrator's step, :math:`\tilde g` the whitened gradient's estimate on a
minibatch and :math:`\zeta` normal entries. What a model or a kernel has besides comes before it,
each a function that does nothing where it is not wanted: local values renewed, auxiliary
variables drawn afresh, noise taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.chain.minibatch import Minibatch, MinibatchSource
from numpyro_sgmcmc.chain.moments import FirstGradientRecorder
from numpyro_sgmcmc.chain.plan import ChainConfig, Keys
from numpyro_sgmcmc.chain.state import AdaptState, StepCarry
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.integrators import Step, clip_grad_norm
from numpyro_sgmcmc.posterior.estimators import make_gradient_fn
from numpyro_sgmcmc.posterior.locals.moves import update_minibatch_locals
from numpyro_sgmcmc.posterior.target import Potential

__all__ = ["StepInputs", "Stepper"]

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
