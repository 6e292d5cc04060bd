"""Compare the tables of two files of results: ``python benchmarks/compare.py OLD NEW``.

Rows are matched by their first two cells, and numbers by their column. Numbers that differ by more
than a tenth are printed, with the ratio of the new number to the old one.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from results import Table, key, read
from timing import print_row

WIDTHS = (34, 30, 16, 12, 12, 6)
_LABELS = 2  # cells that identify a row
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?")


class Change(NamedTuple):
    """
    - **table** - its title.
    - **row** - what it is of.
    - **column** - of the table.
    - **old**, **new** - the cells.
    - **ratio** - new over old.
    """

    table: str
    row: str
    column: str
    old: str
    new: str
    ratio: float


def number(cell: str) -> float | None:
    """The number with which a cell begins."""
    found = _NUMBER.match(cell.strip())
    return float(found.group().replace(",", "")) if found else None


def changes(old: list[Table], new: list[Table], more_than: float) -> Iterator[Change]:
    """The numbers of tables of both that differ by more than such a share."""
    before = {key(table): table for table in old}
    for table in new:
        if key(table) not in before:
            continue
        head, rows = table["rows"][0], _by_label(before[key(table)])
        for label, cells in _by_label(table).items():
            for column, was, now in zip(head, rows.get(label, ()), cells, strict=False):
                a, b = number(was), number(now)
                if a and b is not None and abs(b / a - 1.0) > more_than:
                    yield Change(table["title"], " ".join(label[0]), column, was, now, b / a)


def _by_label(table: Table) -> dict[tuple[tuple[str, ...], int], list[str]]:
    """Rows by their first cells and how often these came before."""
    seen: Counter[tuple[str, ...]] = Counter()
    found = {}
    for cells in table["rows"][1:]:
        label = tuple(cells[:_LABELS])
        found[label, seen[label]] = cells
        seen[label] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--more-than", type=float, default=0.1, help="share, 0.1 by default")
    given = parser.parse_args()
    print_row(("table", "row", "column", "old", "new", "ratio"), WIDTHS)
    for change in changes(read(given.old), read(given.new), given.more_than):
        cells = (change.table[: WIDTHS[0]], change.row[: WIDTHS[1]], change.column[: WIDTHS[2]])
        print_row((*cells, change.old, change.new, f"{change.ratio:.2f}"), WIDTHS)


if __name__ == "__main__":
    main()
