"""Positions and gradients looked at while an iteration runs, for the moments that tell the bias."""

from __future__ import annotations

from typing import Any

from jax import Array, random

from numpyro_sgmcmc.chain.moments import Moments, RunningSums
from numpyro_sgmcmc.chain.plan import ChainConfig
from numpyro_sgmcmc.chain.state import SGMCMCState, StepCarry
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import sample_independent_minibatch
from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.posterior.estimators import GradientEstimator, make_gradient_fn
from numpyro_sgmcmc.posterior.locals.sites import with_local_values
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.moment_source import MonitorGradients

__all__ = ["MomentAccumulator"]


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
