"""What a chain carries from iteration to iteration."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from numpyro_sgmcmc.chain.block import Block
from numpyro_sgmcmc.chain.mass_blocks import MassBlocks, square_root_of_inverse
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
    - **blocks** - how the mass matrix is shown, a
      :class:`~numpyro_sgmcmc.chain.mass_blocks.MassBlocks`; None for a potential function.
    - **centre** - the first anchor, where other blocks of Gibbs make it move, shape ``(d,)``; None
      where it stays.
    """

    step_size: Array
    whitening: Whitening
    gradient_noise: GradientNoise | None = None
    blocks: MassBlocks | None = None
    centre: Array | None = None

    @property
    def inverse_mass_matrix(self) -> Any:
        """About the posterior covariance, as NumPyro shows it: a dict of arrays ``(k,)`` or
        ``(k, k)`` by tuples of site names; for a potential function one array.
        """
        return self._matrices[0]

    @property
    def mass_matrix_sqrt(self) -> Any:
        """S, lower triangular, with ``S S^T`` the mass matrix, in the same form."""
        return self._matrices[1]

    @property
    def mass_matrix_sqrt_inv(self) -> Any:
        """The inverse of S, in the same form."""
        return self._matrices[2]

    @property
    def _matrices(self) -> tuple[Any, Any, Any]:
        """The three above."""
        matrix, is_dense = self.whitening.inverse_mass_matrix, self.whitening.is_dense
        if self.blocks is None:
            return matrix, *square_root_of_inverse(matrix, is_dense)
        found = self.blocks.of(matrix, is_dense)
        no_chains = self.step_size.ndim
        roots = {k: square_root_of_inverse(x, x.ndim > 1 + no_chains) for k, x in found.items()}
        return found, {k: s for k, (s, _) in roots.items()}, {k: r for k, (_, r) in roots.items()}

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
