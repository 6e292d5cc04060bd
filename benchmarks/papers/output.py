"""Command line and output of the papers' experiments: titles, tables, figures."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

for parent in Path(__file__).parents[1:3]:
    sys.path.insert(0, str(parent))

import results  # noqa: E402 (benchmarks/results.py)

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "papers"

if importlib.util.find_spec("matplotlib"):  # experiments that print tables alone do not need it
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("Agg")
    plt.style.use(DOCS / "figures/style.mplstyle")


def arguments(description: str | None, *others: str) -> argparse.Namespace:
    """The command line: ``--quick`` runs a small part of everything, to see that it works.

    :param others: experiments besides the script's own, of which ``--only`` names one; with them
        ``--full`` asks for the paper's size.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part of everything")
    if others:
        parser.add_argument("--only", choices=others, help="another experiment, by itself")
        parser.add_argument("--full", action="store_true", help="of the paper's size (hours)")
    return parser.parse_args()


def print_title(title: str) -> None:
    """The title and the versions."""
    print(f"{title}\nPython {platform.python_version()}, JAX {jax.__version__}", flush=True)


def print_table(caption: str, header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> None:
    """A table in Markdown, columns as wide as their widest cell; see also :mod:`results`."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    results.begin(caption)
    for row in cells:
        results.add(row)
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    cells.insert(1, ["-" * w for w in widths])
    print(f"\n{caption}\n")
    for row in cells:
        print("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def save(figure: Any, name: str) -> None:
    """Write a figure to ``docs/papers/NAME.png``."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{name}.png"
    figure.savefig(path)
    print(f"figure: {path.relative_to(DOCS.parent)}")
