"""Put the tables that the benchmarks have kept into the pages: ``python benchmarks/pages.py``.

A page says where its tables go by two lines, of which what is between them is replaced:

    <!-- measured: step_cost -->
    <!-- end -->

The tables of one script stand there, one after the other, or, by ``<!-- measured: memory 2 -->``,
one of them. What two Pythons found of the same rows is one table, in whose cells the first stands
before the second.
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
_PLACE = re.compile(r"(<!-- measured: (\w+)(?: (\d+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_LABELS = 2  # first cells, which are the labels of a row


def kept() -> list[list[Table]]:
    """What was measured: for each table those of the Pythons that have it, the oldest first."""
    found: dict[tuple[str, str], list[Table]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for table in read(path):
            found.setdefault(key(table), []).append(table)
    return list(found.values())


def with_tables(page: str, measured: Sequence[list[Table]]) -> str:
    """The text of a page with its tables.

    :raises KeyError: where a script that the page names has kept no table.
    """

    def place(match: re.Match[str]) -> str:
        begin, name, number, end = match.groups()
        those = [tables for tables in measured if tables[0]["benchmark"] == name]
        if number:
            those = those[int(number) - 1 : int(number)]
        if not those:
            raise KeyError(f"benchmarks/{name}.py has kept no table {number or ''}".rstrip())
        tables = "\n\n".join(map(_shown, those))
        return f"{begin}{tables}\n{end}"

    return _PLACE.sub(place, page)


def _shown(tables: Sequence[Table]) -> str:
    """A table as each Python found it: one, where the rows are of the same things."""
    labels = [[row[:_LABELS] for row in table["rows"]] for table in tables]
    if any(other != labels[0] for other in labels):
        return "\n\n".join(_shown([table]) for table in tables)
    beside = zip(*(table["rows"] for table in tables), strict=True)
    rows = [[_cell(cells) for cells in zip(*row, strict=True)] for row in beside]
    return f"{tables[0]['title']}: {' / '.join(map(_when, tables))}.\n\n{_markdown(rows)}"


def _cell(found: Sequence[str]) -> str:
    """Numbers side by side; a unit that they share stands once."""
    if len(set(found)) == 1:
        return found[0]
    units = {cell.partition(" ")[2] for cell in found}
    if len(units) == 1:
        found = [*(cell.partition(" ")[0] for cell in found[:-1]), found[-1]]
    return " / ".join(found)


def _when(table: Table) -> str:
    when = table["day"]
    if "commit" in table:
        when += f", commit {table['commit']}, load {table['load']} before"
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
