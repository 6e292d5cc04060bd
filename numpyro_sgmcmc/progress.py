"""Progress bars of the adaptation and of passes over all data.

A bar appears once the work takes longer than a few seconds. Passes are counted in rows that the
largest :class:`HostArray` has read; for data in memory no rows are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from numpyro.util import tqdm_auto
from tqdm import tqdm

from numpyro_sgmcmc.data.host_array import HostArray, count_reads

# Shorter work shows no bar.
_DISPLAY_DELAY_SECONDS = 3.0


class ProgressReporter:
    """Receiver of the progress of work in stages; this class shows nothing."""

    def begin_stage(self, name: str) -> None:
        """Begin a stage."""

    def set_total(self, work: int) -> None:
        """Set an upper bound on the work of the longest stages, in any unit."""

    def advance(self, work: int) -> None:
        """Add completed work, in the unit of :meth:`set_total`."""


class _ProgressBarReporter(ProgressReporter):
    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def begin_stage(self, name: str) -> None:
        self._bar.set_description_str(f"adapting: {name}", refresh=False)
        self._bar.update(0)

    def set_total(self, work: int) -> None:
        self._bar.total = work

    def advance(self, work: int) -> None:
        self._bar.bar_format = "{desc} {elapsed}, about {remaining} left{postfix}"
        self._bar.update(work)


def _find_longest(host_arrays: Sequence[HostArray]) -> HostArray | None:
    """Return the array with the most rows, or None where there is none."""
    return max(host_arrays, key=len, default=None)


@contextmanager
def show_adaptation_progress(host_arrays: Sequence[HostArray]) -> Iterator[ProgressReporter]:
    """Show the stage of the adaptation and the passes over data on the host.

    :param host_arrays: arrays whose rows are read when needed.
    :return: as context, the receiver of the stages.
    """
    with tqdm_auto(
        delay=_DISPLAY_DELAY_SECONDS,
        leave=False,
        disable=None,
        miniters=0,
        bar_format="{desc} {elapsed}{postfix}",
    ) as bar:
        longest = _find_longest(host_arrays)

        def show_passes(num_rows: int) -> None:
            assert longest is not None
            passes = f"{num_rows / len(longest):.2f} passes over '{longest.name}'"
            bar.set_postfix_str(passes, refresh=False)
            bar.update(0)

        with count_reads(longest, show_passes):
            yield _ProgressBarReporter(bar)


@contextmanager
def show_data_passes(
    description: str, host_arrays: Sequence[HostArray], num_passes: float
) -> Iterator[None]:
    """Show a progress bar of passes over all rows on the host; none for data in memory.

    :param description: purpose of the passes.
    :param host_arrays: arrays whose rows are read when needed.
    :param num_passes: number of passes; a fraction for a part of the rows.
    """
    longest = _find_longest(host_arrays)
    if longest is None:
        yield
        return
    with tqdm_auto(
        total=round(num_passes * len(longest)),
        delay=_DISPLAY_DELAY_SECONDS,
        leave=False,
        disable=None,
        desc=description,
        unit=" rows",
        unit_scale=True,
    ) as bar:
        with count_reads(longest, lambda num_rows: bar.update(num_rows - bar.n)):
            yield
