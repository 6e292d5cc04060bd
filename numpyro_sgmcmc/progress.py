"""Progress bars of the adaptation and of passes over all data.

A bar appears once the work takes longer than a few seconds, in a log file after half a minute.
Passes are counted in rows that the largest :class:`HostArray` has read; for data in memory no rows
are counted. No bar appears in a run with ``MCMC(..., progress_bar=False)``, or in its diagnostics.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from numpyro.infer import MCMC
from numpyro.util import tqdm_auto
from tqdm import tqdm

from numpyro_sgmcmc.data.host_array import HostArray, count_reads

# Shorter work shows no bar. In a log file every update stays.
_DISPLAY_DELAY_SECONDS, _LOG_INTERVAL_SECONDS = 3.0, 30.0


class ProgressReporter:
    """Receiver of the progress of work in stages; without a bar it shows nothing."""

    def __init__(self, bar: tqdm | None = None) -> None:
        self._bar = tqdm(disable=True) if bar is None else bar

    def begin_stage(self, name: str) -> None:
        """Begin a stage."""
        self._bar.set_description_str(f"adapting: {name}", refresh=False)
        self._bar.update(0)

    def set_total(self, work: int) -> None:
        """Set an upper bound on the work of the longest stages, in any unit."""
        self._bar.total = work

    def advance(self, work: int) -> None:
        """Add completed work, in the unit of :meth:`set_total`."""
        is_estimable = self._bar.total is not None and self._bar.n + work <= self._bar.total
        remaining = ", about {remaining} left" if is_estimable else ""
        self._bar.bar_format = f"{{desc}} {{elapsed}}{remaining}{{postfix}}"
        self._bar.update(work)


def _open_bar(log_interval: float = _LOG_INTERVAL_SECONDS, **options: Any) -> tqdm:
    """Open a bar on a terminal or in a notebook, or lines in a log file."""
    if not _is_bar_wanted():
        return tqdm(disable=True)
    bar = tqdm_auto(delay=_DISPLAY_DELAY_SECONDS, leave=False, disable=None, **options)
    if bar.disable:
        bar = tqdm(delay=log_interval, mininterval=log_interval, leave=False, **options)
    return bar


def _is_bar_wanted() -> bool:
    """Return whether ``progress_bar`` is True in the MCMC object that runs, or is diagnosed.

    NumPyro does not pass it to kernels, so that it is read from the frames of the call: it is the
    ``self`` of a method, or the argument ``mcmc`` of a function of this package.
    """
    frame: FrameType | None = sys._getframe(1)
    is_wanted = True
    while frame is not None:
        callers = [frame.f_locals.get("self")]
        if frame.f_globals.get("__name__", "").startswith("numpyro_sgmcmc."):
            callers.append(frame.f_locals.get("mcmc"))
        for caller in callers:
            if isinstance(caller, MCMC):
                is_wanted = caller.progress_bar
        frame = frame.f_back
    return is_wanted


@contextmanager
def show_adaptation_progress(host_arrays: Sequence[HostArray]) -> Iterator[ProgressReporter]:
    """Show the stage of the adaptation and the passes over data on the host."""
    with ExitStack() as stack:
        bar = stack.enter_context(_open_bar(miniters=0, bar_format="{desc} {elapsed}{postfix}"))
        if host_arrays:
            longest = max(host_arrays, key=len)

            def show_passes(num_rows: int) -> None:
                passes = f"{num_rows / len(longest):.2f} passes over '{longest.name}'"
                bar.set_postfix_str(passes, refresh=False)
                bar.update(0)

            stack.enter_context(count_reads(longest, show_passes))
        yield ProgressReporter(bar)


@contextmanager
def show_data_passes(
    description: str, host_arrays: Sequence[HostArray], num_passes: float
) -> Iterator[None]:
    """Show a progress bar of passes over all rows on the host; none for data in memory.

    :param num_passes: number of passes; a fraction for a part of the rows.
    """
    if not host_arrays:
        yield
        return
    longest = max(host_arrays, key=len)
    total = round(num_passes * len(longest))
    with (
        _open_bar(total=total, desc=description, unit=" rows", unit_scale=True) as bar,
        count_reads(longest, lambda num_rows: bar.update(num_rows - bar.n)),
    ):
        yield
