"""What a chain carries from iteration to iteration."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from numpyro_sgmcmc.chain.block import PrefetchBuffer
from numpyro_sgmcmc.chain.mass_blocks import MassMatrixBlocks, compute_mass_matrix_sqrt
from numpyro_sgmcmc.chain.moments import Moments
from numpyro_sgmcmc.data.minibatch import StreamState
from numpyro_sgmcmc.dynamics.compensation import GradientNoiseCovariance
from numpyro_sgmcmc.posterior.locals.moves import LocalLatentsState
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.step_control import StepSizeMonitor

__all__ = ["AdaptState", "SGMCMCState", "StepCarry"]


class AdaptState(NamedTuple):
    """
    - **step_size** - step size of the iteration's last step, in whitened units; a chain whose
      warm-up finds it too long makes it shorter.
    - **preconditioner** - the whitened coordinates, with the gradient on all rows at their origin and,
      where the estimator needs it, the Hessian, a
      :class:`~numpyro_sgmcmc.posterior.whitening.Whitening`. Where the model has local sites the
      gradient is that for their present values.
    - **gradient_noise_covariance** - covariance of the whitened gradient's noise, a
      :class:`~numpyro_sgmcmc.dynamics.compensation.GradientNoise`; None unless it is compensated.
    - **mass_matrix_blocks** - how the mass matrix is shown, a
      :class:`~numpyro_sgmcmc.chain.mass_blocks.MassBlocks`; None for a potential function.
    - **initial_center** - the first anchor, where other blocks of Gibbs make it move, shape ``(d,)``; None
      where it stays.
    """

    step_size: Array
    preconditioner: Preconditioner
    gradient_noise_covariance: GradientNoiseCovariance | None = None
    mass_matrix_blocks: MassMatrixBlocks | None = None
    initial_center: Array | None = None

    @property
    def inverse_mass_matrix(self) -> Any:
        """About the posterior covariance, as NumPyro shows it: a dict of arrays ``(k,)`` or
        ``(k, k)`` by tuples of site names; for a potential function one array.
        """
        return self._mass_matrices[0]

    @property
    def mass_matrix_sqrt(self) -> Any:
        """S, lower triangular, with ``S S^T`` the mass matrix, in the same form."""
        return self._mass_matrices[1]

    @property
    def mass_matrix_sqrt_inv(self) -> Any:
        """The inverse of S, in the same form."""
        return self._mass_matrices[2]

    @property
    def _mass_matrices(self) -> tuple[Any, Any, Any]:
        """The three above."""
        matrix, is_dense = self.preconditioner.inverse_mass_matrix, self.preconditioner.is_dense
        if self.mass_matrix_blocks is None:
            return matrix, *compute_mass_matrix_sqrt(matrix, is_dense)
        found = self.mass_matrix_blocks.extract(matrix, is_dense)
        no_chains = self.step_size.ndim
        roots = {k: compute_mass_matrix_sqrt(x, x.ndim > 1 + no_chains) for k, x in found.items()}
        return found, {k: s for k, (s, _) in roots.items()}, {k: r for k, (_, r) in roots.items()}

    @property
    def center(self) -> Array:
        """Origin of the whitened coordinates and of the control variates, shape ``(d,)``."""
        return self.preconditioner.center

    @property
    def reference_gradient(self) -> Array:
        """Gradient on all rows at the anchor, shape ``(d,)``."""
        return self.preconditioner.reference_gradient

    @property
    def reference_hessian(self) -> Array | None:
        """Hessian on all rows at the anchor, shape ``(d, d)``; None unless it is needed."""
        return self.preconditioner.reference_hessian

    def with_reference_gradient(self, gradient: Array) -> AdaptState:
        """With another gradient at the anchor: that for other local values."""
        return self._replace(
            preconditioner=self.preconditioner._replace(reference_gradient=gradient)
        )


class SGMCMCState(NamedTuple):
    """
    - **i** - iteration, warm-up counted in.
    - **z** - dict of the unconstrained values of the latent sites.
    - **dynamics_state** - state of the dynamic in whitened coordinates: position, momentum, ...
    - **streams** - state of the minibatch stream of each subsampled plate.
    - **num_steps** - stochastic-gradient steps of the iteration.
    - **weight** - weight of the draw in averages: the sum of the iteration's step sizes, zero
      where a schedule explores.
    - **diverging** - whether the iteration left the finite numbers; the chain then goes on from
      where the iteration began, or halfway from there to the anchor in warm-up and after a second
      failure in a row.
    - **adapt_state** - an :class:`AdaptState`.
    - **moments** - what tells the chain's bias, :class:`~numpyro_sgmcmc.chain.moments.Moments`.
    - **step_size_monitor** - what the warm-up's check of the step size has seen since the last one, a
      :class:`~numpyro_sgmcmc.warmup.step_control.StepControl`.
    - **rng_key** - random key of the next iteration.
    - **prefetch_buffer** - rows read ahead, a :class:`~numpyro_sgmcmc.chain.block.Block`; None where all data
      are in memory.
    - **local_state** - values of the latent sites inside the subsampled plate for all rows, a
      :class:`~numpyro_sgmcmc.posterior.locals.LocalState`; None where there are none.
    """

    i: Array
    z: Any
    dynamics_state: Any
    streams: dict[str, StreamState]
    num_steps: Array
    weight: Array
    diverging: Array
    adapt_state: AdaptState
    moments: Moments
    step_size_monitor: StepSizeMonitor
    rng_key: Array
    prefetch_buffer: PrefetchBuffer | None = None
    local_state: LocalLatentsState | None = None


class StepCarry(NamedTuple):
    """What a step moves.

    - **dynamics_state** - state of the dynamic.
    - **local_state** - local values of all rows; None where there are none.
    - **reference_gradient** - gradient on all rows at the anchor for these local values; None where
      there are none, for it then stays and is no part of the loop.
    """

    dynamics_state: Any
    local_state: LocalLatentsState | None = None
    reference_gradient: Array | None = None

    def refresh_preconditioner(self, preconditioner: Preconditioner) -> Preconditioner:
        """The coordinates, with the gradient at their origin for the present local values."""
        if self.reference_gradient is None:
            return preconditioner
        return preconditioner._replace(reference_gradient=self.reference_gradient)
