"""Work that the warm-up spends: numbers of initialisations, steps, chains and gradients.

The cost of a gradient is proportional to the rows it reads, and in high dimension each row costs
all coordinates. :class:`WarmupBudget` therefore scales down with the batch size and has a separate,
much smaller version beyond :data:`HIGH_DIM` coordinates: 3,000 gradients of a neural network take
seconds, the 100,000 of a regression's warm-up would take an hour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.potential import Potential

# Coordinates beyond which a vector operation costs as much as a gradient.
HIGH_DIM = 20_000

# Bounds on computing time: row gradients of all variational fits, and of all pilot chains.
_MAX_VI_ROW_GRADIENTS = 2**27
_MAX_PILOT_ROW_GRADIENTS = 2**30

# Steps of a variational fit: a floor, and a multiple that matches the steps of a compiled call.
_MIN_VI_STEPS, _VI_STEPS_MULTIPLE = 1_000, 250

# Lines of a hierarchy along which values are compared with gradients: enough to measure rounding.
_MIN_HIERARCHY_LINES = 16
# Minibatches per position by which its bias of means is predicted: each has noise of all groups.
_MAX_HIERARCHY_BIAS_PROBES = 2

# Pilot chains and steps of their windows in coordinates that a fit has found. Where the chains have
# not converged in these, the longer windows of other models follow, as far as their budget allows.
_NUM_FITTED_CHAINS, _FITTED_WINDOWS = 8, (200, 400, 400)

# Pilot windows that always run. Each ends with a pass over all rows, which on disk is all its time.
_MIN_PILOT_WINDOWS, _MAX_ON_DISK_WINDOWS = 2, 2

# Prior initialisations are added where a gradient is cheap. Up to this batch size (or, without a
# subsampled plate, this many rows) they are fitted together with the others: compiling a second
# fit on fewer rows takes longer than the rows.
_NUM_PRIOR_INITS = 12
_MAX_CHEAP_BATCH_SIZE, _MAX_CHEAP_DATA_SIZE = 1_024, 2_048

# With larger batches they are fitted on this many rows, up to this dimension: in more coordinates
# fits on few rows end too far from the optimum.
_PRIOR_FIT_BATCH_SIZE, _MAX_SMALL_BATCH_FIT_DIM = 512, 200


@dataclass(frozen=True)
class WarmupBudget:
    """Numbers that bound the work of each stage."""

    num_inits: int = 4  # variational fits from the initialisation strategy
    num_prior_inits: int = 0  # variational fits from draws of the prior
    # batch size of the latter; None to fit them with the others
    prior_fit_batch_size: int | None = None
    num_vi_steps: int = 4_000  # Adam steps of a fit
    num_pilot_chains: int = 16  # pilot chains
    # steps of the pilot chains, window by window, at most
    pilot_window_steps: tuple[int, ...] = (400, 800, 1_600, 1_600, 1_600, 1_600)
    num_full_gradients: int = 256  # draws of a window at which the full-data gradient is estimated
    num_representative_rows: int = 20_000  # rows of a plate in a representative subset, about
    # the same for full-data gradients with large gradient noise
    max_representative_rows: int = 131_072
    max_noise_minibatches: int = 64  # minibatches per position to measure gradient noise, at most
    num_power_iterations: int = 8  # power iterations for the largest curvature
    num_bias_probes: int = 8  # minibatches per position to predict the bias of means
    num_consistency_lines: int = 64  # segments along which values are compared with gradients

    def for_hierarchy(self) -> WarmupBudget:
        """Return the budget after the fit of a hierarchy, whose shared parameters need draws."""
        return replace(
            self,
            num_pilot_chains=_NUM_FITTED_CHAINS,
            pilot_window_steps=(*_FITTED_WINDOWS, *self.pilot_window_steps[1:3]),
            num_bias_probes=min(_MAX_HIERARCHY_BIAS_PROBES, self.num_bias_probes),
            num_consistency_lines=max(_MIN_HIERARCHY_LINES, self.num_consistency_lines),
        )

    def for_hessian_root(self) -> WarmupBudget:
        """Return the budget in coordinates of the Hessian's inverse root, which need few draws."""
        return replace(
            self, num_pilot_chains=_NUM_FITTED_CHAINS, pilot_window_steps=_FITTED_WINDOWS
        )

    @property
    def max_gradient_evaluations(self) -> int:
        """Gradient evaluations of the fits and the pilot chains, most of the work, at most."""
        vi_gradients = self.num_vi_steps * (self.num_inits + self.num_prior_inits)
        return vi_gradients + sum(self.pilot_window_steps) * self.gradients_per_pilot_step

    @property
    def gradients_per_pilot_step(self) -> int:
        """Gradients of a step of all pilot chains: one more, at the reference position."""
        return self.num_pilot_chains + 1

    @property
    def num_whole_batch_inits(self) -> int:
        """Number of variational fits on minibatches of the user's size."""
        return self.num_inits + (0 if self.prior_fit_batch_size else self.num_prior_inits)

    @classmethod
    def for_potential(cls, potential: Potential, arguments: Arguments) -> WarmupBudget:
        """Return the budget for the dimension of a posterior and the rows that a gradient reads."""
        if potential.dim > HIGH_DIM:
            num_rows = 4 * max([64, *(p.subsample_size for p in potential.plates)])
            return cls(
                num_inits=1,
                num_vi_steps=700,
                num_pilot_chains=4,
                pilot_window_steps=(100,),
                num_full_gradients=16,
                num_representative_rows=num_rows,
                max_representative_rows=num_rows,
                max_noise_minibatches=16,
                num_power_iterations=4,
                num_bias_probes=2,
                num_consistency_lines=4,
            )
        rows_per_gradient = count_rows_per_gradient(potential, arguments)
        is_cheap = rows_per_gradient <= (
            _MAX_CHEAP_BATCH_SIZE if potential.plates else _MAX_CHEAP_DATA_SIZE
        )
        can_fit_on_fewer_rows = (
            potential.shards is None
            and not arguments.host_arrays
            and len(potential.plates) == 1
            and potential.dim <= _MAX_SMALL_BATCH_FIT_DIM
        )
        budget = cls()
        if potential.sample_prior_position is not None and (is_cheap or can_fit_on_fewer_rows):
            prior_fit_batch_size = None if is_cheap else _PRIOR_FIT_BATCH_SIZE
            budget = cls(
                num_prior_inits=_NUM_PRIOR_INITS, prior_fit_batch_size=prior_fit_batch_size
            )
        num_rows = rows_per_gradient * budget.num_whole_batch_inits
        num_vi_steps = _MAX_VI_ROW_GRADIENTS // num_rows // _VI_STEPS_MULTIPLE * _VI_STEPS_MULTIPLE
        num_vi_steps = int(np.clip(num_vi_steps, _MIN_VI_STEPS, budget.num_vi_steps))
        row_gradients = np.cumsum(budget.pilot_window_steps) * budget.gradients_per_pilot_step
        row_gradients *= rows_per_gradient
        num_windows = int((row_gradients <= _MAX_PILOT_ROW_GRADIENTS).sum())
        num_windows = max(_MIN_PILOT_WINDOWS, num_windows)
        if arguments.host_arrays:
            num_windows = min(num_windows, _MAX_ON_DISK_WINDOWS)
        return replace(
            budget,
            num_vi_steps=num_vi_steps,
            pilot_window_steps=budget.pilot_window_steps[:num_windows],
        )


def count_rows_per_gradient(potential: Potential, arguments: Arguments) -> int:
    """Return the rows that a gradient reads: a minibatch, or all without a subsampled plate."""
    if potential.plates:
        return sum(p.subsample_size for p in potential.plates)
    return max((len(x) for x in arguments.arrays if x.ndim), default=1)
