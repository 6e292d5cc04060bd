"""How far long work has come, shown once it takes longer than a few seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from numpyro.util import tqdm_auto
from tqdm import tqdm

from numpyro_sgmcmc.data.host import HostArray, counting

__all__ = ["Stages", "passes_shown", "stages_shown"]

_DELAY = 3.0


class Stages:
    """Told how far work in stages has come; this one keeps it to itself."""

    def begin(self, name: str) -> None:
        """A stage begins."""

    def expect(self, work: int) -> None:
        """So much work, in any unit, is to do in the stages that take longest, at most."""

    def done(self, work: int) -> None:
        """So much more of it is done."""


class _StagesShown(Stages):
    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def begin(self, name: str) -> None:
        self._bar.set_description_str(f"adapting: {name}", refresh=False)
        self._bar.update(0)

    def expect(self, work: int) -> None:
        self._bar.total = work

    def done(self, work: int) -> None:
        self._bar.bar_format = "{desc} {elapsed}, about {remaining} left{postfix}"
        self._bar.update(work)


@contextmanager
def stages_shown(hosts: Sequence[HostArray]) -> Iterator[Stages]:
    """A line with the stage of the adaptation, and the passes over rows on the host so far.

    :param hosts: arrays whose rows are read when needed.
    :return: as context, what is to be told of the stages.
    """
    with tqdm_auto(
        delay=_DELAY,
        leave=False,
        disable=None,
        miniters=0,
        bar_format="{desc} {elapsed}{postfix}",
    ) as bar:
        longest = max(hosts, key=len, default=None)

        def read(rows: int) -> None:
            assert longest is not None
            passes = f"{rows / len(longest):.2f} passes over '{longest.name}'"
            bar.set_postfix_str(passes, refresh=False)
            bar.update(0)

        with counting(longest, read):
            yield _StagesShown(bar)


@contextmanager
def passes_shown(what: str, hosts: Sequence[HostArray], passes: float) -> Iterator[None]:
    """A progress bar of some passes over all rows on the host; none for rows in memory.

    :param what: what the passes are for.
    :param hosts: arrays whose rows are read when needed.
    :param passes: their number; a fraction for some of the rows.
    """
    longest = max(hosts, key=len, default=None)
    if longest is None:
        yield
        return
    with tqdm_auto(
        total=round(passes * len(longest)),
        delay=_DELAY,
        leave=False,
        disable=None,
        desc=what,
        unit=" rows",
        unit_scale=True,
    ) as bar:
        with counting(longest, lambda rows: bar.update(rows - bar.n)):
            yield
