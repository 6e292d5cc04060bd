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

from numpyro_sgmcmc.chain.minibatch import Minibatch, RowSource
from numpyro_sgmcmc.chain.moments import FirstGradient
from numpyro_sgmcmc.chain.plan import ChainPlan, Keys
from numpyro_sgmcmc.chain.state import AdaptState, Moving
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.integrators import Step, clipped
from numpyro_sgmcmc.posterior.estimators import whitened_gradient
from numpyro_sgmcmc.posterior.locals.moves import renew_minibatch
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["StepInputs", "Stepper"]

_NOISE_AHEAD = 2**22  # numbers: beyond, an iteration's noise would fill the memory


class StepInputs(NamedTuple):
    """What one step takes; in an iteration's inputs all have a leading axis of steps.

    - **rows** - what its minibatch is made of.
    - **noise** - standard normal entries, or a key for them.
    - **model_key** - key of a randomised likelihood, or None.
    - **steps_before** - their number, counted from the run's first.
    - **local_key** - key of the local moves, or None.
    """

    rows: Any
    noise: Array
    model_key: Array | None
    steps_before: Array
    local_key: Array | None


@dataclass(frozen=True)
class Stepper:
    """The steps of one iteration of one chain.

    - **plan** - what does not change from iteration to iteration.
    - **adapt_state** - the chain's step size and coordinates.
    - **dynamics** - the SDE, told where its coordinates are.
    - **integrate** - the integrator's step.
    - **source** - where the rows come from.
    - **resample** - ``(state, count) -> state`` draws auxiliary variables afresh where due.
    - **entries** - the normal entries of a step from what it got for them.
    """

    plan: ChainPlan
    adapt_state: AdaptState
    dynamics: Dynamics
    integrate: Step
    source: RowSource
    resample: Callable[[Any, Array], Any]
    entries: Callable[[Array], Array]

    @classmethod
    def of_iteration(
        cls,
        plan: ChainPlan,
        adapt_state: AdaptState,
        source: RowSource,
        keys: Keys,
        counts: Array,
    ) -> tuple[Stepper, StepInputs]:
        """The stepper, and the inputs of all steps.

        :param counts: the iteration's steps, counted from the run's first.
        """
        target, num_steps = plan.target, len(counts)
        dynamics = plan.locate(adapt_state.whitening)
        integrate = dynamics.step(plan.scheme)
        resample = _resampling(dynamics, keys.resample, counts, target)
        entries, noise = _noise(integrate, target, keys.noise, num_steps)
        model_keys = random.split(keys.model, num_steps) if target.is_randomized else None
        local_keys = None
        if target.locals is not None:
            local_keys = random.split(random.fold_in(keys.model, 1), num_steps)
        stepper = cls(plan, adapt_state, dynamics, integrate, source, resample, entries)
        return stepper, StepInputs(source.scanned(), noise, model_keys, counts, local_keys)

    def step(self, moving: Moving, inputs: StepInputs) -> tuple[Moving, Array, Array]:
        """One step.

        :return: what has moved, and a position with the gradient's estimate there, uncut.
        """
        plan, whitening = self.plan, self.adapt_state.whitening
        noise = self.entries(inputs.noise)
        minibatch = self.source.minibatch(inputs.rows)
        moving, minibatch = self._renew_locals(moving, minibatch, inputs.local_key)
        gradient = FirstGradient(
            whitened_gradient(
                plan.adaptation.estimator,
                plan.target,
                minibatch.arguments,
                moving.whitening(whitening),
                minibatch.rows,
                inputs.model_key,
            )
        )
        start = self.resample(moving.dynamics, inputs.steps_before)
        step_size = plan.step_size(inputs.steps_before, self.adapt_state)
        noise = self._compensated(start, noise, step_size)
        followed = clipped(gradient, plan.clip_gradient)
        end = self.integrate(start, step_size, followed, noise, inputs.steps_before)
        read_at = end if self.integrate.reads_end else start
        return moving._replace(dynamics=end), read_at.position, gradient.first

    def _renew_locals(
        self, moving: Moving, minibatch: Minibatch, rng_key: Array | None
    ) -> tuple[Moving, Minibatch]:
        """The minibatch's local values renewed given the globals, where the model has some."""
        target, whitening = self.plan.target, self.adapt_state.whitening
        if target.locals is None:
            return moving, minibatch
        assert moving.locals is not None
        assert moving.anchor_gradient is not None
        assert rng_key is not None
        own, anchor_gradient, arguments = renew_minibatch(
            target,
            moving.locals,
            whitening.position(moving.dynamics.position),
            minibatch.rows,
            minibatch.arguments,
            whitening.anchor,
            moving.anchor_gradient,
            self.plan.adaptation.estimator,
            rng_key,
        )
        moved = Moving(moving.dynamics, own, anchor_gradient)
        return moved, minibatch._replace(arguments=arguments)

    def _compensated(self, state: Any, noise: Array, step_size: Array) -> Array:
        """The normal entries, less what the gradient's own noise brings where that is asked for."""
        if self.adapt_state.gradient_noise is None:
            return noise
        return self.dynamics.compensate(state, noise, step_size, self.adapt_state.gradient_noise)


def _noise(
    integrate: Step, target: Target, rng_key: Array, num_steps: int
) -> tuple[Callable[[Array], Array], Array]:
    """How a step gets its normal entries, and from what: the entries of all steps drawn ahead.

    Only where these would fill the memory are they drawn step by step, from keys.
    """
    shape = (integrate.draws, target.dim)
    if num_steps * integrate.draws * target.dim <= _NOISE_AHEAD:
        return lambda entries: entries, random.normal(rng_key, (num_steps, *shape), target.dtype)
    return lambda key: random.normal(key, shape, target.dtype), random.split(rng_key, num_steps)


def _resampling(
    dynamics: Dynamics, rng_key: Array, counts: Array, target: Target
) -> Callable[[Any, Array], Any]:
    """Draws auxiliary variables afresh at the steps where the dynamic has them due.

    :param counts: the iteration's steps, counted from the run's first.
    :return: ``(state, count) -> state``.
    """
    fresh = {}
    for k, (field, period) in enumerate(dynamics.resampling.items()):
        num = len(counts) // period + 2
        key = random.fold_in(rng_key, k)
        fresh[field] = dynamics.draw(field, key, (num, target.dim), target.dtype), period

    def resample(state: Any, count: Array) -> Any:
        for field, (draws, period) in fresh.items():
            draw = draws[count // period - counts[0] // period]
            value = jnp.where(count % period == 0, draw, getattr(state, field))
            state = state._replace(**{field: value})
        return state

    return resample
