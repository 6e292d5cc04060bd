"""How far long work has come, shown once it takes longer than a few seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from numpyro.util import tqdm_auto
from tqdm import tqdm

from numpyro_sgmcmc.data.host_array import HostArray, count_reads

__all__ = ["ProgressReporter", "show_adaptation_progress", "show_data_passes"]

_DISPLAY_DELAY_SECONDS = 3.0


class ProgressReporter:
    """Told how far work in stages has come; this one keeps it to itself."""

    def begin_stage(self, name: str) -> None:
        """A stage begins."""

    def set_total(self, work: int) -> None:
        """So much work, in any unit, is to do in the stages that take longest, at most."""

    def advance(self, work: int) -> None:
        """So much more of it is done."""


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


@contextmanager
def show_adaptation_progress(host_arrays: Sequence[HostArray]) -> Iterator[ProgressReporter]:
    """A line with the stage of the adaptation, and the passes over rows on the host so far.

    :param host_arrays: arrays whose rows are read when needed.
    :return: as context, what is to be told of the stages.
    """
    with tqdm_auto(
        delay=_DISPLAY_DELAY_SECONDS,
        leave=False,
        disable=None,
        miniters=0,
        bar_format="{desc} {elapsed}{postfix}",
    ) as bar:
        longest = max(host_arrays, key=len, default=None)

        def read(rows: int) -> None:
            assert longest is not None
            passes = f"{rows / len(longest):.2f} passes over '{longest.name}'"
            bar.set_postfix_str(passes, refresh=False)
            bar.update(0)

        with count_reads(longest, read):
            yield _ProgressBarReporter(bar)


@contextmanager
def show_data_passes(
    description: str, host_arrays: Sequence[HostArray], num_passes: float
) -> Iterator[None]:
    """A progress bar of some passes over all rows on the host; none for rows in memory.

    :param description: what the passes are for.
    :param host_arrays: arrays whose rows are read when needed.
    :param num_passes: their number; a fraction for some of the rows.
    """
    longest = max(host_arrays, key=len, default=None)
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
        with count_reads(longest, lambda rows: bar.update(rows - bar.n)):
            yield
