"""How much the warm-up spends: a budget in gradients, less of them where each one costs much.

A gradient costs about its rows, and with very many coordinates each row costs them all: in a
network 3,000 minibatch gradients are seconds, and the 100,000 that suit a regression would be an
hour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["MANY_DIM", "Effort", "rows_a_gradient"]

MANY_DIM = 20_000
_FIT_ROWS = 2**27  # rows at which gradients are taken for the fit, all starts together
_PRIOR_STARTS, _FEW_ROWS = 12, 512  # with gradients of so few rows more starts cost little
_FEW_OF_MINIBATCH = 1_024  # less than the program for fewer rows would take to be compiled
_FEW_OF_ALL = 2_048  # likewise of a model without a subsampled plate, which cannot take fewer
_FEW_COORDINATES = 200  # in more, fits on few rows end too far from where they lead
_FEWEST_FIT_STEPS, _FIT_STEPS_A_CALL = 1_000, 250
_PILOT_ROWS = 2**30  # likewise for all pilot chains
_FEWEST_WINDOWS = 2
_WINDOWS_ON_DISK = 2


@dataclass(frozen=True)
class Effort:
    """
    - **starts** - starts of the fit by volume, by the initialisation strategy.
    - **prior_starts** - the same drawn from the prior.
    - **few_rows** - of a minibatch, on which these are fitted; None for all, with the others.
    - **fit_steps** - its steps.
    - **chains** - pilot chains.
    - **windows** - their steps in one window after the other, at most.
    - **draws** - of a window, at which gradients on all rows are taken.
    - **rows** - rows of a plate that stand for all, about.
    - **most_rows** - the same for the draws' gradients where these are noisy.
    - **minibatches** - at each of some positions, for the noise, at most.
    - **rounds** - power iterations for the largest curvature.
    - **probes** - minibatches a position that tell how far noise moves means.
    - **lines** - between two positions each, along which values are compared with gradients.
    """

    starts: int = 4
    prior_starts: int = 0
    few_rows: int | None = None
    fit_steps: int = 4_000
    chains: int = 16
    windows: tuple[int, ...] = (400, 800, 1_600, 1_600, 1_600, 1_600)
    draws: int = 256
    rows: int = 20_000
    most_rows: int = 131_072
    minibatches: int = 64
    rounds: int = 8
    probes: int = 8
    lines: int = 64

    @property
    def gradients(self) -> int:
        """Of the fit and the pilot chains, which are most of the work, at most."""
        starts = self.starts + self.prior_starts
        return self.fit_steps * starts + sum(self.windows) * (self.chains + 1)

    @property
    def together(self) -> int:
        """Starts that are fitted on whole minibatches."""
        return self.starts + (0 if self.few_rows else self.prior_starts)

    @classmethod
    def of(cls, target: Target, arguments: Arguments) -> Effort:
        """What suits the posterior."""
        if target.dim > MANY_DIM:
            return _little(target)
        rows = rows_a_gradient(target, arguments)
        effort = cls()
        if target.start_by_prior is None:
            pass  # the strategy alone says where to start
        elif rows <= (_FEW_OF_MINIBATCH if target.plates else _FEW_OF_ALL):
            effort = cls(prior_starts=_PRIOR_STARTS)
        elif _may_fit_on_fewer(target, arguments):
            effort = cls(prior_starts=_PRIOR_STARTS, few_rows=_FEW_ROWS)
        fitting = _FIT_ROWS // (rows * effort.together) // _FIT_STEPS_A_CALL * _FIT_STEPS_A_CALL
        steps = int(np.clip(fitting, _FEWEST_FIT_STEPS, effort.fit_steps))
        done = np.cumsum(effort.windows) * (effort.chains + 1) * rows
        num = max(_FEWEST_WINDOWS, int((done <= _PILOT_ROWS).sum()))
        # Each window ends with a pass over all rows: on a disk that is all its time.
        num = min(num, _WINDOWS_ON_DISK) if arguments.hosts else num
        return replace(effort, fit_steps=steps, windows=effort.windows[:num])


def _little(target: Target) -> Effort:
    """About 3,000 gradients in all."""
    rows = 4 * max([64, *(p.subsample_size for p in target.plates)])
    return Effort(
        starts=1,
        fit_steps=700,
        chains=4,
        windows=(100,),
        draws=16,
        rows=rows,
        most_rows=rows,
        minibatches=16,
        rounds=4,
        probes=2,
        lines=4,
    )


def _may_fit_on_fewer(target: Target, arguments: Arguments) -> bool:
    """Whether fits from further starts may take fewer rows than a minibatch has."""
    is_in_memory = target.shards is None and not arguments.hosts
    return is_in_memory and len(target.plates) == 1 and target.dim <= _FEW_COORDINATES


def rows_a_gradient(target: Target, arguments: Arguments) -> int:
    """Rows that a gradient takes: a minibatch, or where the model chooses none all that it has."""
    if target.plates:
        return sum(p.subsample_size for p in target.plates)
    return max((len(x) for x in arguments.arrays if x.ndim), default=1)
