"""What a chain carries from iteration to iteration."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from numpyro_sgmcmc.chain.block import Block
from numpyro_sgmcmc.chain.moments import Moments
from numpyro_sgmcmc.data.minibatch import StreamState
from numpyro_sgmcmc.dynamics.compensation import GradientNoise
from numpyro_sgmcmc.posterior.locals.moves import LocalState
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.step_control import StepControl

__all__ = ["AdaptState", "Moving", "SGMCMCState"]


class AdaptState(NamedTuple):
    """
    - **step_size** - step size of the iteration's last step, in whitened units; a chain whose
      warm-up finds it too long makes it shorter.
    - **whitening** - the whitened coordinates, with the gradient on all rows at their origin and,
      where the estimator needs it, the Hessian, a
      :class:`~numpyro_sgmcmc.posterior.whitening.Whitening`. Where the model has local sites the
      gradient is that for their present values.
    - **gradient_noise** - covariance of the whitened gradient's noise, a
      :class:`~numpyro_sgmcmc.dynamics.compensation.GradientNoise`; None unless it is compensated.
    """

    step_size: Array
    whitening: Whitening
    gradient_noise: GradientNoise | None = None

    @property
    def inverse_mass_matrix(self) -> Array:
        """About the posterior covariance, shape ``(d,)`` or ``(d, d)``."""
        return self.whitening.inverse_mass_matrix

    @property
    def mass_matrix_sqrt_inv(self) -> Array:
        """L with ``L L^T`` the inverse mass matrix, of the same shape."""
        return self.whitening.factor

    @property
    def anchor(self) -> Array:
        """Origin of the whitened coordinates and of the control variates, shape ``(d,)``."""
        return self.whitening.anchor

    @property
    def anchor_gradient(self) -> Array:
        """Gradient on all rows at the anchor, shape ``(d,)``."""
        return self.whitening.gradient

    @property
    def anchor_hessian(self) -> Array | None:
        """Hessian on all rows at the anchor, shape ``(d, d)``; None unless it is needed."""
        return self.whitening.hessian

    def with_anchor_gradient(self, gradient: Array) -> AdaptState:
        """With another gradient at the anchor: that for other local values."""
        return self._replace(whitening=self.whitening._replace(gradient=gradient))


class SGMCMCState(NamedTuple):
    """
    - **i** - iteration, warm-up counted in.
    - **z** - dict of the unconstrained values of the latent sites.
    - **dynamics** - state of the dynamic in whitened coordinates: position, momentum, ...
    - **streams** - state of the minibatch stream of each subsampled plate.
    - **num_steps** - stochastic-gradient steps of the iteration.
    - **weight** - weight of the draw in averages: the sum of the iteration's step sizes, zero
      where a schedule explores.
    - **diverging** - whether the iteration left the finite numbers; the chain then goes on from
      where the iteration began, or halfway from there to the anchor in warm-up and after a second
      failure in a row.
    - **adapt_state** - an :class:`AdaptState`.
    - **moments** - what tells the chain's bias, :class:`~numpyro_sgmcmc.chain.moments.Moments`.
    - **step_control** - what the warm-up's check of the step size has seen since the last one, a
      :class:`~numpyro_sgmcmc.warmup.step_control.StepControl`.
    - **rng_key** - random key of the next iteration.
    - **block** - rows read ahead, a :class:`~numpyro_sgmcmc.chain.block.Block`; None where all data
      are in memory.
    - **locals** - values of the latent sites inside the subsampled plate for all rows, a
      :class:`~numpyro_sgmcmc.posterior.locals.LocalState`; None where there are none.
    """

    i: Array
    z: Any
    dynamics: Any
    streams: dict[str, StreamState]
    num_steps: Array
    weight: Array
    diverging: Array
    adapt_state: AdaptState
    moments: Moments
    step_control: StepControl
    rng_key: Array
    block: Block | None = None
    locals: LocalState | None = None


class Moving(NamedTuple):
    """What a step moves.

    - **dynamics** - state of the dynamic.
    - **locals** - local values of all rows; None where there are none.
    - **anchor_gradient** - gradient on all rows at the anchor for these local values; None where
      there are none, for it then stays and is no part of the loop.
    """

    dynamics: Any
    locals: LocalState | None = None
    anchor_gradient: Array | None = None

    def whitening(self, whitening: Whitening) -> Whitening:
        """The coordinates, with the gradient at their origin for the present local values."""
        if self.anchor_gradient is None:
            return whitening
        return whitening._replace(gradient=self.anchor_gradient)
