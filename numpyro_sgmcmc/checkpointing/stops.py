"""At which iterations a run stops for a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CheckpointSchedule"]


class CheckpointSchedule(NamedTuple):
    """
    - **iterations_per_segment** - iterations from stop to stop.
    - **num_discarded_iterations** - iterations before the first draw: warm-up, and what thinning leaves over.
    - **num_sampling_iterations** - iterations after that.
    """

    iterations_per_segment: int
    num_discarded_iterations: int
    num_sampling_iterations: int

    @property
    def num_iterations(self) -> int:
        """The iteration at which the run is complete."""
        return self.num_discarded_iterations + self.num_sampling_iterations

    def next_stop(self, num_done: int) -> int:
        """The next stop after ``num_done`` iterations: a multiple, so that chunks on disk are whole."""
        if num_done < self.num_discarded_iterations:
            return min(
                self.num_discarded_iterations,
                (num_done // self.iterations_per_segment + 1) * self.iterations_per_segment,
            )
        since = num_done - self.num_discarded_iterations
        return min(
            self.num_iterations,
            self.num_discarded_iterations
            + (since // self.iterations_per_segment + 1) * self.iterations_per_segment,
        )
