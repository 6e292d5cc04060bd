"""How far long work has come, shown once it takes longer than a few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from numpyro.util import tqdm_auto

from numpyro_sgmcmc.data.host import HostArray, counting

__all__ = ["passes_shown", "stages_shown"]

_DELAY = 3.0


@contextmanager
def stages_shown(hosts: Sequence[HostArray]) -> Iterator[Callable[[str], None]]:
    """A line with the stage of the adaptation, and the passes over rows on the host so far.

    :param hosts: arrays whose rows are read when needed.
    :return: as context, a function to call with the name of each stage as it begins.
    """
    with tqdm_auto(
        total=5,
        delay=_DELAY,
        leave=False,
        disable=None,
        miniters=0,
        bar_format="{desc} {elapsed}{postfix}",
    ) as bar:

        def stage(name: str) -> None:
            bar.set_description(f"adapting: {name}", refresh=False)
            bar.update()

        longest = max(hosts, key=len, default=None)

        def read(rows: int) -> None:
            assert longest is not None
            passes = f"{rows / len(longest):.2f} passes over '{longest.name}'"
            bar.set_postfix_str(passes, refresh=False)
            bar.update(0)

        with counting(longest, read):
            yield stage


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
