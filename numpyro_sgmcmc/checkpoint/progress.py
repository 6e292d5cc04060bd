"""At which iterations a run stops for a checkpoint.

What a long run shows while it goes on, and how it is stopped.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.util import tqdm_auto

from numpyro_sgmcmc.checkpoint.processes import ProcessGroup
from numpyro_sgmcmc.checkpoint.store import Checkpoint
from numpyro_sgmcmc.diagnostics.stein_estimates import compute_configurational_temperature
from numpyro_sgmcmc.sampling.state import SGMCMCState

__all__ = [
    "CheckpointSchedule",
    "ChunkSizer",
    "ProgressBar",
    "SigintHandler",
    "print_resume_position",
]


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


_MAX_ESS_COORDINATES = 8  # coordinates whose effective draws are shown


_POLL_INTERVAL_SECONDS = 0.5


def print_resume_position(
    process_group: ProcessGroup,
    folder: Path,
    checkpoint: Checkpoint,
    num_draws: int,
    num_iterations: int,
) -> None:
    """Where a resumed run goes on, in a line beside the progress bar, which may be off.

    :param process_group: those that share the run; the first one says it.
    :param checkpoint: the checkpoint.
    :param num_draws: draws of a chain in the whole run.
    :param num_iterations: iterations of the whole run.
    """
    if not process_group.is_primary:
        return
    on = f"going on after iteration {checkpoint.num_iterations} of {num_iterations}"
    rest = "the run is complete" if checkpoint.num_iterations == num_iterations else on
    print(
        f"'{folder}': {checkpoint.num_draws} of {num_draws} draws a chain; {rest}.", file=sys.stderr
    )


class SigintHandler:
    """Ctrl-C as a wish to stop, to be met at the next good moment; the second one stops at once.

    :param process_group: those that share the run; a wish that one is told is all of theirs.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self.is_stop_requested = False
        self._process_group, self._is_local_stop_requested = process_group, False
        self._previous_handler: Any = None

    def poll(self) -> bool:
        """Learn whether any process has been asked by now; all of them must look."""
        self.is_stop_requested = bool(
            self._process_group.allgather(self._is_local_stop_requested).any()
        )
        return self.is_stop_requested

    def _request_stop(self, signal_number: int, frame: FrameType | None) -> None:
        if self._is_local_stop_requested:
            raise KeyboardInterrupt
        self._is_local_stop_requested = True

    def __enter__(self) -> SigintHandler:
        # Other threads can set no handlers; there Ctrl-C is not theirs to meet either. Nor is it a
        # background process's, which its shell has told to ignore it.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._previous_handler = signal.signal(signal.SIGINT, self._request_stop)
        return self

    def __exit__(
        self,
        exc_type: type | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)


class ChunkSizer:
    """How many iterations to compute between two looks at the clock: about half a second's.

    :param process_group: those that share the run; the first one's clock counts.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self._process_group = process_group
        self._chunk_length = 1
        self._chunk_start_seconds = 0.0

    def next_chunk(self, multiple_of: int, max_iterations: int) -> int:
        """Iterations to do now, a multiple of ``multiple_of`` or all of ``max_iterations``."""
        self._chunk_start_seconds = time.perf_counter()
        return int(
            self._process_group.allgather(
                min(
                    max_iterations,
                    max(multiple_of, self._chunk_length // multiple_of * multiple_of),
                )
            )[0]
        )

    def record(self, num_iterations: int) -> None:
        """Learn from how long they took."""
        seconds = time.perf_counter() - self._chunk_start_seconds
        if seconds < _POLL_INTERVAL_SECONDS:
            self._chunk_length = max(self._chunk_length, 2 * num_iterations)
        elif seconds > 2 * _POLL_INTERVAL_SECONDS:
            self._chunk_length = max(1, num_iterations // 2)


class ProgressBar:
    """A progress bar with step size, temperature and effective draws.

    :param is_shown: whether there is a bar at all.
    :param num_iterations: of the whole run.
    :param num_warmup: those of them that are warm-up.
    :param num_done: those that were done before.
    :param draws: draws so far, a pytree of shape ``(chains, draws, ...)``, or None.
    """

    def __init__(
        self, is_shown: bool, num_iterations: int, num_warmup: int, num_done: int, draws: Any
    ) -> None:
        self._bar = tqdm_auto(total=num_iterations, initial=num_done, disable=not is_shown)
        self._num_warmup = num_warmup
        self._traces: list[np.ndarray] = []
        self._ess_text = ""
        self.add_draws(draws)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        exc_type: type | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def advance(self, num_iterations: int) -> None:
        """Some iterations more."""
        self._bar.update(num_iterations)
        self._bar.set_description("warmup" if self._bar.n <= self._num_warmup else "sample", False)

    def add_draws(self, draws: Any) -> None:
        """Draws for the effective sample size, of which a few coordinates are kept."""
        if self._bar.disable or draws is None:
            return
        leaves = [np.asarray(x) for x in jax.tree.leaves(draws)]
        if not leaves or leaves[0].shape[1] == 0:
            return
        flat = [x.reshape(*x.shape[:2], -1)[..., :_MAX_ESS_COORDINATES] for x in leaves]
        self._traces.append(np.concatenate(flat, -1)[..., :_MAX_ESS_COORDINATES])
        traces = np.concatenate(self._traces, 1)
        if traces.shape[1] >= 4:
            with np.errstate(all="ignore"):
                ess = np.min(effective_sample_size(traces))
            self._ess_text = f", ESS {ess:.0f} of {traces.shape[0] * traces.shape[1]} draws"

    def show_state(self, state: SGMCMCState) -> None:
        """The step size and the temperature of a state, which may be one of several chains."""
        if self._bar.disable:
            return
        parts = f"step size {np.mean(np.asarray(state.adapt_state.step_size)):.2g}"
        temperature = compute_configurational_temperature(state.moments.batches)
        if np.isfinite(temperature):
            parts += f", temperature {temperature:.2f}"
        self._bar.set_postfix_str(parts + self._ess_text, refresh=False)
