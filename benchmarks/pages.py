"""Put the tables that the benchmarks have kept into the pages: ``python benchmarks/pages.py``.

A page says where its tables go by two lines, of which what is between them is replaced:

    <!-- measured: step_cost -->
    <!-- end -->

The tables of one script stand there, one after the other, or, by ``<!-- measured: memory 2 -->``,
one of them; ``<!-- measured: memory 2 without draws MB; 10,000 -->`` leaves out the columns of such
titles and the rows with such cells. A table is that of the newest Python that has it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from results import Table, key, read

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "_build" not in page.parts and "<!-- measured: " in page.read_text()
]
_PLACE = re.compile(
    r"(<!-- measured: (\w+)(?: (\d+))?(?: without ([^\n]+))? -->\n).*?(<!-- end -->)", re.DOTALL
)


def kept() -> list[Table]:
    """Read what was measured, each table by the newest Python that has it."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    return list({key(table): table for path in files for table in read(path)}.values())


def with_tables(page: str, measured: Sequence[Table]) -> str:
    """The text of a page with its tables.

    :raises KeyError: where a script that the page names has kept no table.
    """

    def place(match: re.Match[str]) -> str:
        begin, name, number, without, end = match.groups()
        tables = [table for table in measured if table["benchmark"] == name]
        if number:
            tables = tables[int(number) - 1 : int(number)]
        if not tables:
            raise KeyError(f"benchmarks/{name}.py has kept no table {number or ''}".rstrip())
        left_out = set(without.split("; ")) if without else set()
        return begin + "\n\n".join(_shown(table, left_out) for table in tables) + "\n" + end

    return _PLACE.sub(place, page)


def _shown(table: Table, left_out: set[str]) -> str:
    """Return a table with its caption, without these columns and the rows with these cells."""
    head, *rows = table["rows"]
    columns = [i for i, title in enumerate(head) if title not in left_out]
    rows = [head, *(row for row in rows if left_out.isdisjoint(row))]
    shown = _markdown([[row[i] for i in columns] for row in rows])
    return f"{table['title']}: {_when(table)}.\n\n{shown}"


def _when(table: Table) -> str:
    when = table["day"]
    if "commit" in table:
        when += f", commit {table['commit']}, load average {table['load']}"
    return f"{_where(table)} ({when})"


def _where(table: Table) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items())
    return f"{versions}, {table['machine']}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    lines = (head, ["---"] * len(head), *others)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    measured = kept()
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), measured))


if __name__ == "__main__":
    main()
