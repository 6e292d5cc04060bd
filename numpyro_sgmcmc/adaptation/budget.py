"""How much the warm-up spends: a budget in gradients, less of them where each one costs much.

A gradient costs about its rows, and with very many coordinates each row costs them all: in a
network 3,000 minibatch gradients are seconds, and the 100,000 that suit a regression would be an
hour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.potential import Potential

__all__ = ["HIGH_DIM", "WarmupBudget", "count_rows_per_gradient"]

HIGH_DIM = 20_000
_MAX_VI_ROW_GRADIENTS = 2**27  # rows at which gradients are taken for the fit, all starts together
_NUM_PRIOR_INITS, _PRIOR_FIT_BATCH_SIZE = (
    12,
    512,
)  # with gradients of so few rows more starts cost little
_MAX_CHEAP_BATCH_SIZE = 1_024  # less than the program for fewer rows would take to be compiled
_MAX_CHEAP_DATA_SIZE = (
    2_048  # likewise of a model without a subsampled plate, which cannot take fewer
)
_MAX_SMALL_BATCH_FIT_DIM = 200  # in more, fits on few rows end too far from where they lead
_MIN_VI_STEPS, _VI_STEPS_MULTIPLE = 1_000, 250
_MAX_PILOT_ROW_GRADIENTS = 2**30  # likewise for all pilot chains
_MIN_PILOT_WINDOWS = 2
_MAX_ON_DISK_WINDOWS = 2


@dataclass(frozen=True)
class WarmupBudget:
    """
    - **num_inits** - starts of the fit by volume, by the initialisation strategy.
    - **num_prior_inits** - the same drawn from the prior.
    - **prior_fit_batch_size** - of a minibatch, on which these are fitted; None for all, with the others.
    - **num_vi_steps** - its steps.
    - **num_pilot_chains** - pilot chains.
    - **pilot_window_steps** - their steps in one window after the other, at most.
    - **num_full_gradients** - of a window, at which gradients on all rows are taken.
    - **num_representative_rows** - rows of a plate that stand for all, about.
    - **max_representative_rows** - the same for the draws' gradients where these are noisy.
    - **max_noise_minibatches** - at each of some positions, for the noise, at most.
    - **num_power_iterations** - power iterations for the largest curvature.
    - **num_bias_probes** - minibatches a position that tell how far noise moves means.
    - **num_consistency_lines** - between two positions each, along which values are compared with gradients.
    """

    num_inits: int = 4
    num_prior_inits: int = 0
    prior_fit_batch_size: int | None = None
    num_vi_steps: int = 4_000
    num_pilot_chains: int = 16
    pilot_window_steps: tuple[int, ...] = (400, 800, 1_600, 1_600, 1_600, 1_600)
    num_full_gradients: int = 256
    num_representative_rows: int = 20_000
    max_representative_rows: int = 131_072
    max_noise_minibatches: int = 64
    num_power_iterations: int = 8
    num_bias_probes: int = 8
    num_consistency_lines: int = 64

    @property
    def max_gradient_evaluations(self) -> int:
        """Of the fit and the pilot chains, which are most of the work, at most."""
        starts = self.num_inits + self.num_prior_inits
        return self.num_vi_steps * starts + sum(self.pilot_window_steps) * (
            self.num_pilot_chains + 1
        )

    @property
    def num_whole_batch_inits(self) -> int:
        """Starts that are fitted on whole minibatches."""
        return self.num_inits + (0 if self.prior_fit_batch_size else self.num_prior_inits)

    @classmethod
    def for_potential(cls, potential: Potential, arguments: Arguments) -> WarmupBudget:
        """What suits the posterior."""
        if potential.dim > HIGH_DIM:
            return _build_high_dim_budget(potential)
        rows = count_rows_per_gradient(potential, arguments)
        effort = cls()
        if potential.sample_prior_position is None:
            pass  # the strategy alone says where to start
        elif rows <= (_MAX_CHEAP_BATCH_SIZE if potential.plates else _MAX_CHEAP_DATA_SIZE):
            effort = cls(num_prior_inits=_NUM_PRIOR_INITS)
        elif _can_fit_on_fewer_rows(potential, arguments):
            effort = cls(
                num_prior_inits=_NUM_PRIOR_INITS, prior_fit_batch_size=_PRIOR_FIT_BATCH_SIZE
            )
        fitting = (
            _MAX_VI_ROW_GRADIENTS
            // (rows * effort.num_whole_batch_inits)
            // _VI_STEPS_MULTIPLE
            * _VI_STEPS_MULTIPLE
        )
        steps = int(np.clip(fitting, _MIN_VI_STEPS, effort.num_vi_steps))
        done = np.cumsum(effort.pilot_window_steps) * (effort.num_pilot_chains + 1) * rows
        num = max(_MIN_PILOT_WINDOWS, int((done <= _MAX_PILOT_ROW_GRADIENTS).sum()))
        # Each window ends with a pass over all rows: on a disk that is all its time.
        num = min(num, _MAX_ON_DISK_WINDOWS) if arguments.host_arrays else num
        return replace(
            effort, num_vi_steps=steps, pilot_window_steps=effort.pilot_window_steps[:num]
        )


def _build_high_dim_budget(potential: Potential) -> WarmupBudget:
    """About 3,000 gradients in all."""
    rows = 4 * max([64, *(p.subsample_size for p in potential.plates)])
    return WarmupBudget(
        num_inits=1,
        num_vi_steps=700,
        num_pilot_chains=4,
        pilot_window_steps=(100,),
        num_full_gradients=16,
        num_representative_rows=rows,
        max_representative_rows=rows,
        max_noise_minibatches=16,
        num_power_iterations=4,
        num_bias_probes=2,
        num_consistency_lines=4,
    )


def _can_fit_on_fewer_rows(potential: Potential, arguments: Arguments) -> bool:
    """Whether fits from further starts may take fewer rows than a minibatch has."""
    is_in_memory = potential.shards is None and not arguments.host_arrays
    return is_in_memory and len(potential.plates) == 1 and potential.dim <= _MAX_SMALL_BATCH_FIT_DIM


def count_rows_per_gradient(potential: Potential, arguments: Arguments) -> int:
    """Rows that a gradient takes: a minibatch, or where the model chooses none all that it has."""
    if potential.plates:
        return sum(p.subsample_size for p in potential.plates)
    return max((len(x) for x in arguments.arrays if x.ndim), default=1)
