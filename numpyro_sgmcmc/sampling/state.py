"""What a chain carries from iteration to iteration.

What does not change from iteration to iteration, and how an iteration's randomness is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation import Adaptation
from numpyro_sgmcmc.data.subsampling import StreamState, sample_minibatches
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.model.local_moves import LocalLatentsState
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import Moments, StepSizeMonitor
from numpyro_sgmcmc.sampling.mass_matrix import MassMatrixBlocks, compute_mass_matrix_sqrt

__all__ = [
    "AdaptState",
    "ChainConfig",
    "Keys",
    "PrefetchBuffer",
    "PrefetchCursor",
    "SGMCMCState",
    "StepCarry",
    "get_key_data",
    "sample_iteration_indices",
]


class PrefetchCursor(NamedTuple):
    """Where the drawing of a chain's rows has come to, ahead of the chain.

    - **rng_key** - key of the first iteration whose rows are not drawn yet.
    - **streams** - the minibatch streams there.
    """

    rng_key: Array
    streams: dict[str, Any]


class PrefetchBuffer(NamedTuple):
    """Rows read for the next iterations of a chain.

    - **row_arrays** - for each lookup, shape ``(iterations, num_steps, subsample_size, ...)``.
    - **indices** - which rows these are, by plate, shape ``(iterations, num_steps, subsample_size)``.
    - **next_indices** - the rows of as many iterations after them, which are being read.
    - **cursor** - from where the rows after those are drawn.
    - **num_used** - iterations used.
    - **next_key_data** - words of the random key of the iteration that comes next: with another one, the
      rows that have been read are not those that it draws.
    """

    row_arrays: tuple[Array, ...]
    indices: dict[str, Array]
    next_indices: dict[str, Array]
    cursor: PrefetchCursor
    num_used: Array
    next_key_data: Array

    def slice_step(
        self, buffer_index: Array, step: Array
    ) -> tuple[dict[str, Array], tuple[Array, ...]]:
        """The rows of one step and the values there.

        Copied for this step alone and with one index for all chains, which is as fast as memory.

        :param buffer_index: number of the iteration in the block.
        :param step: step in the iteration.
        """

        def one(x: Array) -> Array:
            flat = x.reshape(-1, *x.shape[2:])
            return lax.dynamic_index_in_dim(flat, buffer_index * x.shape[1] + step, keepdims=False)

        return {p: one(x) for p, x in self.indices.items()}, tuple(one(x) for x in self.row_arrays)


def get_key_data(rng_key: Array) -> Array:
    """The integers of a typed or a raw key."""
    is_typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(rng_key) if is_typed else rng_key


class AdaptState(NamedTuple):
    """
    - **step_size** - step size of the iteration's last step, in whitened units; a chain whose
      warm-up finds it too long makes it shorter.
    - **preconditioner** - the whitened coordinates, with the gradient on all rows at their origin and,
      where the estimator needs it, the Hessian, a
      :class:`~numpyro_sgmcmc.model.preconditioner.Whitening`. Where the model has local sites the
      gradient is that for their present values.
    - **gradient_noise_covariance** - covariance of the whitened gradient's noise, a
      :class:`~numpyro_sgmcmc.dynamics.base.GradientNoise`; None unless it is compensated.
    - **mass_matrix_blocks** - how the mass matrix is shown, a
      :class:`~numpyro_sgmcmc.sampling.mass_matrix.MassBlocks`; None for a potential function.
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
    - **moments** - what tells the chain's bias, :class:`~numpyro_sgmcmc.sampling.bias_monitor.Moments`.
    - **step_size_monitor** - what the warm-up's check of the step size has seen since the last one, a
      :class:`~numpyro_sgmcmc.sampling.bias_monitor.StepControl`.
    - **rng_key** - random key of the next iteration.
    - **prefetch_buffer** - rows read ahead, a :class:`~numpyro_sgmcmc.sampling.prefetch.Block`; None where all data
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


@dataclass(frozen=True)
class ChainConfig:
    """
    - **potential** - the posterior.
    - **adaptation** - what all chains share.
    - **integrator** - name of the integrator.
    - **bind_dynamics** - the SDE for given coordinates: a metric must know where a whitened position is.
    - **step_size_schedule** - the user's step sizes by number of steps so far, or None.
    - **num_warmup** - warm-up iterations.
    - **max_grad_norm** - largest norm of a whitened gradient, or None.
    - **collected_local_sites** - local sites of which the state's ``z`` has the values of all rows.
    - **can_shrink_user_step_size** - whether divergences in warm-up may shorten a step of the user's.
    - **traced_step_size** - the user's step size where it is being traced, or None.
    - **mass_matrix_blocks** - how the mass matrix is shown; None for a potential function.
    """

    potential: Potential
    adaptation: Adaptation
    integrator: str
    bind_dynamics: Callable[[Preconditioner], Dynamics]
    step_size_schedule: Callable[[Any], Any] | None
    num_warmup: int
    max_grad_norm: float | None = None
    collected_local_sites: tuple[str, ...] = ()
    can_shrink_user_step_size: bool = False
    traced_step_size: Array | None = None
    mass_matrix_blocks: MassMatrixBlocks | None = None

    def get_step_size(self, step_index: Array, adapt_state: AdaptState) -> Array:
        """Size of the step that has ``step_index`` before it."""
        if self.step_size_schedule is not None:
            step_size = jnp.asarray(
                self.step_size_schedule(step_index), adapt_state.step_size.dtype
            )
            # A negative step would run time backwards; the iteration then counts as diverging.
            return jnp.where(step_size >= 0.0, step_size, jnp.nan)
        return adapt_state.step_size

    def compute_weight(self, step_indices: Array, adapt_state: AdaptState) -> Array:
        """Weight in averages of a draw that took these steps."""
        if self.traced_step_size is not None:
            return len(step_indices) * adapt_state.step_size
        if self.step_size_schedule is None:
            # The same for all chains, even if some have shortened their steps.
            chosen = jnp.asarray(self.adaptation.step_size, adapt_state.step_size.dtype)
            return len(step_indices) * chosen
        weights = jax.vmap(getattr(self.step_size_schedule, "weight", self.step_size_schedule))(
            step_indices
        )
        # The draw is the last step's: where that explores, the draw does.
        weight = jnp.where((weights[-1] > 0.0) & (weights >= 0.0).all(), weights.sum(), 0.0)
        return weight.astype(adapt_state.step_size.dtype)


class Keys(NamedTuple):
    """What an iteration's key is split into; **next_key** is the next iteration's."""

    next_key: Array
    normals: Array
    indices: Array
    model: Array
    auxiliary: Array
    restart: Array
    moments: Array

    @classmethod
    def split(cls, rng_key: Array) -> Keys:
        """The keys of the iteration that begins with this one."""
        return cls(*random.split(rng_key, len(cls._fields)))


def sample_iteration_indices(
    config: ChainConfig, streams: dict[str, Any], rng_key: Array
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The streams after an iteration, and the rows of all its steps.

    At once: small draws cost more than they yield, and indices computed inside the loop would be
    fused into the gather and computed again there.
    """
    adaptation, plates = config.adaptation, config.potential.plates
    after, rows = {}, {}
    for p, key in zip(plates, random.split(rng_key, len(plates)), strict=True):
        after[p.name], rows[p.name] = sample_minibatches(
            adaptation.subsampling, p, streams[p.name], key, adaptation.num_steps
        )
    return after, rows
