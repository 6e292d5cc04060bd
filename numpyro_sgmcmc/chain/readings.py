"""Positions and gradients looked at while an iteration runs, for the moments that tell the bias."""

from __future__ import annotations

from typing import Any

from jax import Array, random

from numpyro_sgmcmc.chain.moments import Moments, Sums
from numpyro_sgmcmc.chain.plan import ChainPlan
from numpyro_sgmcmc.chain.state import Moving, SGMCMCState
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import draw_independent
from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.posterior.estimators import Estimator, whitened_gradient
from numpyro_sgmcmc.posterior.locals.sites import with_locals
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.moment_source import MomentSource

__all__ = ["MomentReader"]


class MomentReader:
    """Looks at the steps of one iteration, where the plan's moment source says.

    :param plan: what does not change from iteration to iteration.
    :param whitening: the chain's coordinates.
    :param arguments: the model's arguments.
    """

    def __init__(self, plan: ChainPlan, whitening: Whitening, arguments: Arguments) -> None:
        self._plan, self._whitening, self._arguments = plan, whitening, arguments

    @property
    def source(self) -> MomentSource:
        """Which gradients count."""
        return self._plan.adaptation.moment_source

    def zeros(self) -> Sums:
        """Nothing seen yet."""
        return Sums.zeros(self._plan.target.dim, self._plan.target.dtype)

    def keys(self, rng_key: Array, num: int) -> Array | None:
        """Keys of minibatches of their own, if there are such."""
        return random.split(rng_key, num) if self.source.estimator else None

    def look(self, sums: Sums, moving: Moving, q: Array, g: Array, rng_key: Any) -> Sums:
        """With one position and gradient more.

        :param q: the last step's position.
        :param g: the last step's gradient there.
        :param rng_key: key of a minibatch of its own, or None where the step's gradient counts.
        """
        if self.source.estimator is not None:
            q = moving.dynamics.position
            g = self._independent_gradient(self.source.estimator, moving, rng_key)(q)
        if not self.source.every:
            return sums
        # The moments are told coordinate by coordinate: they must be the sites' own.
        w = self._whitening
        return sums.add(w.unstretch(q), w.unstretch_gradient(g))

    def added(
        self, state: SGMCMCState, sums: Sums, end: Any, weight: Array, diverging: Array
    ) -> Moments:
        """The chain's moments with this iteration's.

        :param state: the chain's before the iteration.
        :param sums: the iteration's.
        :param end: the dynamic's state after it.
        """
        if not self.source.every:
            return state.moments
        is_sampling = state.i >= self._plan.num_warmup
        temperature = self._plan.locate(self._whitening).temperature(end)
        position = self._whitening.unstretch(end.position)
        finished = sums.finished(position, temperature, weight)
        return state.moments.add(finished, is_sampling, is_sampling & ~diverging)

    def _independent_gradient(
        self, estimator: Estimator, moving: Moving, rng_key: Array
    ) -> GradientFn:
        """The whitened gradient's estimate on a minibatch that no step has seen."""
        target, scheme = self._plan.target, self._plan.adaptation.minibatch
        arguments = self._arguments
        if moving.locals is not None:
            arguments = with_locals(arguments, moving.locals.values)
        model_key, *keys = random.split(rng_key, 1 + len(target.plates))
        rows = {
            p.name: draw_independent(scheme, p, key)
            for p, key in zip(target.plates, keys, strict=True)
        }
        return whitened_gradient(
            estimator,
            target,
            arguments,
            moving.whitening(self._whitening),
            rows,
            model_key if target.is_randomized else None,
        )
