"""State and configuration of a chain.

:class:`SGMCMCState` is what a chain carries from iteration to iteration, :class:`StepCarry` the
part of it that a step changes, and :class:`ChainConfig` what stays the same. :class:`Keys` and
:func:`sample_iteration_indices` say how an iteration's randomness derives from the chain's key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation import Adaptation
from numpyro_sgmcmc.data.subsampling import StreamState, Subsampling, sample_minibatches_of_plates
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator
from numpyro_sgmcmc.model.local_latents import LocalValues
from numpyro_sgmcmc.model.potential import IncludedRows, Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import Moments, StepSizeMonitor
from numpyro_sgmcmc.sampling.mass_matrix import MassMatrixBlocks, compute_mass_matrix_sqrt
from numpyro_sgmcmc.sampling.options import Options
from numpyro_sgmcmc.sampling.site_moments import CollectedSites, SiteMoments


class SGMCMCState(NamedTuple):
    """State of a chain between iterations, a named tuple of these fields.

    - **i** - number of the iteration, counted from the first of the warm-up.
    - **z** - dict of the unconstrained values of the latent sites.
    - **dynamics_state** - state of the SDE in preconditioned coordinates: position, momentum, ...
    - **streams** - state of the minibatch stream of each subsampled plate.
    - **num_steps** - stochastic-gradient steps per iteration.
    - **weight** - weight of the draw in averages: the sum of the iteration's step sizes, or zero
      where a schedule explores.
    - **diverging** - whether the iteration reached numbers that are not finite, moved by 1,000
      posterior SDs or more, or did not move. The chain then restarts from the position at the
      iteration's start. In warm-up, and after a second divergence in a row, it restarts halfway
      between that position and the center.
    - **adapt_state** - an :class:`AdaptState`.
    - **moments** - running sums for estimates of the chain's bias.
    - **step_size_monitor** - temperatures for the warm-up's check of the step size.
    - **rng_key** - random key of the next iteration.
    - **prefetch_buffer** - rows read ahead of the chain; None if all data are in memory.
    - **local_state** - values of the sites that ``gibbs_fn`` samples, for all rows; None if
      there are none.
    - **site_moments** - running moments of the sites whose draws are not kept; None if all are.
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
    local_state: LocalValues | None = None
    site_moments: SiteMoments | None = None


def _raise_not_available(field: str, state: SGMCMCState) -> None:
    """Raise the error for a field of NUTS in ``extra_fields``."""
    raise InvalidArgumentError(
        f"The extra field '{field}' is not available: it would take a pass over all rows per draw.",
        "leave it out of `extra_fields`. numpyro.infer.util.log_density(kernel.model, ...) "
        "computes the log density of a draw.",
        "extra-fields",
    )


for _field in ("potential_energy", "energy", "accept_prob", "mean_accept_prob"):
    setattr(SGMCMCState, _field, property(partial(_raise_not_available, _field)))


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticSettings:
    """Results of the warm-up that are constants of a compiled iteration.

    As part of the state's structure they make JAX compile again where they differ: with
    ``MCMC(..., jit_model_args=True)`` other data call the same function.
    """

    num_steps: int
    estimator: GradientEstimator
    subsampling: Subsampling
    included_rows: IncludedRows

    @classmethod
    def create(cls, adaptation: Adaptation) -> StaticSettings:
        return cls(**{f.name: getattr(adaptation, f.name) for f in fields(cls)})


class AdaptState(NamedTuple):
    """
    - **step_size** - size of the iteration's last step, in preconditioned coordinates. A chain
      shortens it in warm-up if it proves too long.
    - **preconditioner** - coordinates, with the full-data gradient at their center and, where the
      estimator needs it, the Hessian. In a model with local latent variables the gradient is that
      given their present values.
    - **gradient_noise_covariance** - covariance of the preconditioned gradient's noise; None unless
      the noise is compensated.
    - **mass_matrix_blocks** - blocks in which the mass matrix is shown; None for a potential
      function.
    - **initial_center** - the center before other blocks of Gibbs moved it, shape ``(d,)``; None
      if it has not moved.
    - **static_settings** - without arrays.
    """

    step_size: Array
    preconditioner: Preconditioner
    gradient_noise_covariance: GradientNoiseCovariance | None = None
    mass_matrix_blocks: MassMatrixBlocks | None = None
    initial_center: Array | None = None
    static_settings: StaticSettings | None = None

    @property
    def inverse_mass_matrix(self) -> Any:
        """Estimated posterior covariance in NumPyro's format.

        A dict of arrays ``(k,)`` or ``(k, k)`` by tuples of site names; one array for a potential
        function.
        """
        return self._mass_matrices[0]

    @property
    def mass_matrix_sqrt(self) -> Any:
        """Matrix S, lower triangular, with ``S S^T`` the mass matrix, in the same format."""
        return self._mass_matrices[1]

    @property
    def mass_matrix_sqrt_inv(self) -> Any:
        """Inverse of S, in the same format."""
        return self._mass_matrices[2]

    @property
    def _mass_matrices(self) -> tuple[Any, Any, Any]:
        matrix, is_dense = self.preconditioner.inverse_mass_matrix, self.preconditioner.is_dense
        if self.mass_matrix_blocks is None:
            return matrix, *compute_mass_matrix_sqrt(matrix, is_dense)
        blocks = self.mass_matrix_blocks.extract(matrix, is_dense)
        roots, inverses = {}, {}
        for names, block in blocks.items():
            is_dense = block.ndim > 1 + self.step_size.ndim  # chains may have an axis
            roots[names], inverses[names] = compute_mass_matrix_sqrt(block, is_dense)
        return blocks, roots, inverses

    def with_reference_gradient(self, gradient: Array) -> AdaptState:
        """Return the state with another full-data gradient at the center."""
        return self._replace(
            preconditioner=self.preconditioner._replace(reference_gradient=gradient)
        )


def make_chain_axes(preconditioner: Preconditioner) -> Any:
    """Return the axes of chains of a batch of states, for ``vmap``.

    Large matrices are the same for all chains and have none, so that a product reads them once.
    """
    if not preconditioner.is_common:
        return 0
    adapt_state = AdaptState._make([0] * len(AdaptState._fields))
    adapt_state = adapt_state._replace(preconditioner=Preconditioner(0, None, 0))
    return SGMCMCState._make([0] * len(SGMCMCState._fields))._replace(adapt_state=adapt_state)


class PrefetchCursor(NamedTuple):
    """Position of the row indices that are sampled ahead of a chain."""

    rng_key: Array  # key of the first iteration whose indices are not sampled yet
    streams: dict[str, Any]  # the minibatch streams at that iteration


class PrefetchBuffer(NamedTuple):
    """Rows read for the next iterations of a chain.

    - **row_arrays** - for each lookup, shape ``(iterations, num_steps, subsample_size, ...)``.
    - **indices** - their row indices by plate, ``(iterations, num_steps, subsample_size)``.
    - **next_indices** - indices of as many iterations after them, whose rows are being read.
    - **cursor** - where the sampling of indices continues.
    - **num_used** - iterations of the buffer that the chain has run.
    - **next_key_data** - words of the next iteration's random key. If the chain's key differs, the
      rows in the buffer are not those that the chain samples.
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
        """Return the row indices of a step of the buffer's iteration by plate, and the rows.

        Copied for this step alone and with one index for all chains, which is as fast as data in
        memory.
        """

        def slice_array(x: Array) -> Array:
            flat = x.reshape(-1, *x.shape[2:])
            return lax.dynamic_index_in_dim(flat, buffer_index * x.shape[1] + step, keepdims=False)

        return jax.tree.map(slice_array, (self.indices, self.row_arrays))


class StepCarry(NamedTuple):
    """Part of the state that a step changes.

    - **dynamics_state** - state of the SDE.
    - **local_state** - local latent variables of all rows; None if there are none.
    - **reference_gradient** - full-data gradient at the center given these; None if there are
      none, since it then stays the same and is not part of the loop.
    """

    dynamics_state: Any
    local_state: LocalValues | None = None
    reference_gradient: Array | None = None

    def update_preconditioner(self, preconditioner: Preconditioner) -> Preconditioner:
        """Return the preconditioner with the reference gradient given the local variables."""
        if self.reference_gradient is None:
            return preconditioner
        return preconditioner._replace(reference_gradient=self.reference_gradient)


@dataclass(frozen=True)
class ChainConfig:
    """Settings that all iterations of a chain share."""

    potential: Potential  # the posterior
    adaptation: Adaptation  # results of the warm-up that all chains share
    options: Options  # the user's
    integrator: str  # name of the integrator
    # returns the SDE in the coordinates of a preconditioner, on which the metric of a Riemannian
    # SDE depends
    bind_dynamics: Callable[[Preconditioner], Dynamics]
    num_warmup: int  # warm-up iterations
    collected_sites: CollectedSites  # sites whose local values, draws or moments are kept
    # blocks in which the mass matrix is shown; None for a potential function
    mass_matrix_blocks: MassMatrixBlocks | None = None

    def get_step_size(self, step_index: Array, adapt_state: AdaptState) -> Array:
        """Return the size of the step that ``step_index`` others precede."""
        if not callable(schedule := self.options.step_size):
            return adapt_state.step_size
        step_size = jnp.asarray(schedule(step_index), adapt_state.step_size.dtype)
        # A negative step would run time backwards: NaN makes the iteration count as diverging.
        return jnp.where(step_size >= 0.0, step_size, jnp.nan)

    def compute_weight(self, step_indices: Array, adapt_state: AdaptState) -> Array:
        """Return the weight in averages of a draw after these steps."""
        if self.options.traced_step_size is not None:
            return len(step_indices) * adapt_state.step_size
        if not callable(schedule := self.options.step_size):
            # The same for all chains, although some may have shortened their steps.
            step_size = jnp.asarray(self.adaptation.step_size, adapt_state.step_size.dtype)
            return len(step_indices) * step_size
        weights = jax.vmap(getattr(schedule, "weight", schedule))(step_indices)
        # The draw is the last step's: if that step explores, the draw has no weight.
        weight = jnp.where((weights[-1] > 0.0) & (weights >= 0.0).all(), weights.sum(), 0.0)
        return weight.astype(adapt_state.step_size.dtype)


class Keys(NamedTuple):
    """The keys that an iteration's key is split into; **next_key** is the next iteration's."""

    next_key: Array
    normals: Array
    indices: Array
    model: Array
    auxiliary: Array
    restart: Array
    moments: Array

    @classmethod
    def split(cls, rng_key: Array) -> Keys:
        """Return the keys of an iteration, given its key."""
        return cls(*random.split(rng_key, len(cls._fields)))


def sample_iteration_indices(
    config: ChainConfig, streams: dict[str, Any], rng_key: Array
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the streams after an iteration, and the row indices of all its steps."""
    adaptation, plates = config.adaptation, config.potential.plates
    return sample_minibatches_of_plates(
        adaptation.subsampling, plates, streams, rng_key, adaptation.num_steps
    )


def has_chain_axis(rng_key: Array) -> bool:
    """Return whether there is one key per chain, typed or raw."""
    return random.key_data(rng_key).ndim == 2
