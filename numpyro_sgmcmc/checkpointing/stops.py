"""At which iterations a run stops for a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Stops"]


class Stops(NamedTuple):
    """
    - **every** - iterations from stop to stop.
    - **before_draws** - iterations before the first draw: warm-up, and what thinning leaves over.
    - **drawing** - iterations after that.
    """

    every: int
    before_draws: int
    drawing: int

    @property
    def last(self) -> int:
        """The iteration at which the run is complete."""
        return self.before_draws + self.drawing

    def next(self, done: int) -> int:
        """The next stop after ``done`` iterations: a multiple, so that chunks on disk are whole."""
        if done < self.before_draws:
            return min(self.before_draws, (done // self.every + 1) * self.every)
        since = done - self.before_draws
        return min(self.last, self.before_draws + (since // self.every + 1) * self.every)
