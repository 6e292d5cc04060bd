"""Progress of a long run: Ctrl-C, lengths of chunks, and the progress bar."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.util import tqdm_auto

from numpyro_sgmcmc.checkpoint.processes import ProcessGroup
from numpyro_sgmcmc.diagnostics.stein_estimates import compute_configurational_temperature
from numpyro_sgmcmc.sampling.state import SGMCMCState

# Seconds between two looks at Ctrl-C and updates of the bar: short for a user, long for a device.
_POLL_INTERVAL_SECONDS = 0.5
# Coordinates whose ESS is in the bar: a bound on the time it takes.
MAX_ESS_COORDINATES = 8


class SigintHandler:
    """Ctrl-C in one process stops all at the next draw; a second one raises KeyboardInterrupt."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.is_stop_requested = False
        self._process_group, self._is_local_stop_requested = process_group, False
        self._previous_handler: Any = None

    def poll(self) -> bool:
        """Return whether any process got a request; all of them must call this."""
        requests = self._process_group.allgather(self._is_local_stop_requested)
        self.is_stop_requested = bool(requests.any())
        return self.is_stop_requested

    def _request_stop(self, signal_number: int, frame: FrameType | None) -> None:
        if self._is_local_stop_requested:
            raise KeyboardInterrupt
        self._is_local_stop_requested = True

    def __enter__(self) -> SigintHandler:
        # Python sets handlers in the main thread only, and a shell has background processes ignore
        # Ctrl-C, which they must go on to do.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._previous_handler = signal.signal(signal.SIGINT, self._request_stop)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)


class ChunkSizer:
    """Number of iterations that take about the poll interval, by the first process's clock."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self._process_group = process_group
        self._chunk_length = 1
        self._chunk_start_seconds = 0.0

    def next_chunk(self, multiple_of: int, max_iterations: int) -> int:
        """Return a number of iterations, a multiple of ``multiple_of`` or ``max_iterations``."""
        self._chunk_start_seconds = time.perf_counter()
        length = max(multiple_of, self._chunk_length // multiple_of * multiple_of)
        return int(self._process_group.allgather(min(max_iterations, length))[0])

    def record(self, num_iterations: int) -> None:
        """Adapt the chunk's length to the time since :meth:`next_chunk`."""
        seconds = time.perf_counter() - self._chunk_start_seconds
        if seconds < _POLL_INTERVAL_SECONDS:
            self._chunk_length = max(self._chunk_length, 2 * num_iterations)
        elif seconds > 2 * _POLL_INTERVAL_SECONDS:
            self._chunk_length = max(1, num_iterations // 2)


class ProgressBar:
    """A progress bar with step size, configurational temperature and effective sample size."""

    def __init__(self, is_shown: bool, num_iterations: int, num_warmup: int, num_done: int) -> None:
        self._bar = tqdm_auto(total=num_iterations, initial=num_done, disable=not is_shown)
        self._num_warmup = num_warmup
        self._traces: list[np.ndarray] = []
        self._ess_text = ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def advance(self, num_iterations: int) -> None:
        """Show some more iterations."""
        self._bar.update(num_iterations)
        self._bar.set_description("warmup" if self._bar.n <= self._num_warmup else "sample", False)

    def add_draws(self, draws: Any) -> None:
        """Add draws, leaves of shape ``(chains, draws, ...)``, to the effective sample size."""
        if self._bar.disable:
            return
        leaves = [np.asarray(x) for x in jax.tree.leaves(draws)]
        if not leaves or leaves[0].shape[1] == 0:
            return
        flat = [x.reshape(*x.shape[:2], -1)[..., :MAX_ESS_COORDINATES] for x in leaves]
        self._traces.append(np.concatenate(flat, -1)[..., :MAX_ESS_COORDINATES])
        traces = np.concatenate(self._traces, 1)
        if traces.shape[1] >= 4:
            with np.errstate(all="ignore"):
                ess = np.min(effective_sample_size(traces))
            self._ess_text = f", ESS {ess:.0f} of {traces.shape[0] * traces.shape[1]} draws"

    def show_state(self, state: SGMCMCState) -> None:
        """Show mean step size and temperature of one chain's state, or of all chains'."""
        if self._bar.disable:
            return
        text = f"step size {np.mean(np.asarray(state.adapt_state.step_size)):.2g}"
        temperature = compute_configurational_temperature(
            state.moments.batches, state.adapt_state.preconditioner.center.shape[-1]
        )
        if np.isfinite(temperature):
            text += f", temperature {temperature:.2f}"
        self._bar.set_postfix_str(text + self._ess_text, refresh=False)
