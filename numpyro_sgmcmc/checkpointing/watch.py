"""What a long run shows while it goes on, and how it is stopped."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.util import tqdm_auto

from numpyro_sgmcmc.chain.state import SGMCMCState
from numpyro_sgmcmc.checkpointing.processes import Processes
from numpyro_sgmcmc.checkpointing.store import Checkpoint
from numpyro_sgmcmc.diagnostics.estimates import configurational_temperature

__all__ = ["Interrupt", "Pace", "Watch", "tell_where"]

_FEW = 8  # coordinates whose effective draws are shown
_LOOK_SECONDS = 0.5


def tell_where(
    processes: Processes, folder: Path, reached: Checkpoint, num_draws: int, last: int
) -> None:
    """Where a resumed run goes on, in a line beside the progress bar, which may be off.

    :param processes: those that share the run; the first one says it.
    :param reached: the checkpoint.
    :param num_draws: draws of a chain in the whole run.
    :param last: iterations of the whole run.
    """
    if not processes.is_first:
        return
    on = f"going on after iteration {reached.iterations} of {last}"
    rest = "the run is complete" if reached.iterations == last else on
    print(f"'{folder}': {reached.draws} of {num_draws} draws a chain; {rest}.", file=sys.stderr)


class Interrupt:
    """Ctrl-C as a wish to stop, to be met at the next good moment; the second one stops at once.

    :param processes: those that share the run; a wish that one is told is all of theirs.
    """

    def __init__(self, processes: Processes) -> None:
        self.is_asked = False
        self._processes, self._is_asked_here = processes, False
        self._before: Any = None

    def look(self) -> bool:
        """Learn whether any process has been asked by now; all of them must look."""
        self.is_asked = bool(self._processes.gathered(self._is_asked_here).any())
        return self.is_asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked_here:
            raise KeyboardInterrupt
        self._is_asked_here = True

    def __enter__(self) -> Interrupt:
        # Other threads can set no handlers; there Ctrl-C is not theirs to meet either. Nor is it a
        # background process's, which its shell has told to ignore it.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class Pace:
    """How many iterations to compute between two looks at the clock: about half a second's.

    :param processes: those that share the run; the first one's clock counts.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._length = 1
        self._since = 0.0

    def next(self, unit: int, most: int) -> int:
        """Iterations to do now, a multiple of ``unit`` or all of ``most``."""
        self._since = time.perf_counter()
        return int(self._processes.gathered(min(most, max(unit, self._length // unit * unit)))[0])

    def done(self, iterations: int) -> None:
        """Learn from how long they took."""
        seconds = time.perf_counter() - self._since
        if seconds < _LOOK_SECONDS:
            self._length = max(self._length, 2 * iterations)
        elif seconds > 2 * _LOOK_SECONDS:
            self._length = max(1, iterations // 2)


class Watch:
    """A progress bar with step size, temperature and effective draws.

    :param is_shown: whether there is a bar at all.
    :param iterations: of the whole run.
    :param num_warmup: those of them that are warm-up.
    :param done: those that were done before.
    :param draws: draws so far, a pytree of shape ``(chains, draws, ...)``, or None.
    """

    def __init__(
        self, is_shown: bool, iterations: int, num_warmup: int, done: int, draws: Any
    ) -> None:
        self._bar = tqdm_auto(total=iterations, initial=done, disable=not is_shown)
        self._num_warmup = num_warmup
        self._traces: list[np.ndarray] = []
        self._ess = ""
        self.add_draws(draws)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def step(self, iterations: int) -> None:
        """Some iterations more."""
        self._bar.update(iterations)
        self._bar.set_description("warmup" if self._bar.n <= self._num_warmup else "sample", False)

    def add_draws(self, draws: Any) -> None:
        """Draws for the effective sample size, of which a few coordinates are kept."""
        if self._bar.disable or draws is None:
            return
        leaves = [np.asarray(x) for x in jax.tree.leaves(draws)]
        if not leaves or leaves[0].shape[1] == 0:
            return
        flat = [x.reshape(*x.shape[:2], -1)[..., :_FEW] for x in leaves]
        self._traces.append(np.concatenate(flat, -1)[..., :_FEW])
        traces = np.concatenate(self._traces, 1)
        if traces.shape[1] >= 4:
            with np.errstate(all="ignore"):
                ess = np.min(effective_sample_size(traces))
            self._ess = f", ESS {ess:.0f} of {traces.shape[0] * traces.shape[1]} draws"

    def show(self, state: SGMCMCState) -> None:
        """The step size and the temperature of a state, which may be one of several chains."""
        if self._bar.disable:
            return
        parts = f"step size {np.mean(np.asarray(state.adapt_state.step_size)):.2g}"
        temperature = configurational_temperature(state.moments.batches)
        if np.isfinite(temperature):
            parts += f", temperature {temperature:.2f}"
        self._bar.set_postfix_str(parts + self._ess, refresh=False)
