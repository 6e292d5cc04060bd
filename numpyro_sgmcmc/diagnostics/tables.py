"""A report as HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["format_html_table"]


def format_html_table(
    header: Sequence[str], table_rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """A table with paragraphs below it; all text is escaped."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table_rows
    )
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
