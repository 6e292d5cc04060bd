"""Plot the runs stored by ``trust.py --save`` in ``docs/trust.png``.

Left and middle, one row per posterior: the largest error of a mean and of an SD, for the kernels of
this package with default options and for other methods. Right, one dot per run, deliberately wrong
settings included: the true ratio of the worst SD to the posterior's, against the ratio in the bias
report of the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from trust import RIVALS, Cell, Outcome, read_outcomes
from trust_problems import PROBLEMS

mpl.use("Agg")

from matplotlib import pyplot as plt

FIGURE = Path(__file__).parents[1] / "docs" / "trust.png"
LEAST, MOST = 0.005, 30.0
STYLES = {
    "this package, no arguments": ("o", "tab:blue"),
    "HMCECS": ("D", "tab:green"),
    "SVI": ("x", "tab:red"),
    "BlackJAX": ("^", "tab:orange"),
}


def family(label: str) -> str:
    """Return the method of a run."""
    return label.split()[0] if label in RIVALS else "this package, no arguments"


def draw_errors(ax: Any, cells: dict[Cell, Outcome], problems: list[str], what: str) -> None:
    """The largest error of each run, by posterior; what is beyond the axis sits at its end."""
    for cell, o in cells.items():
        if "," in cell.label or cell.problem not in problems:
            continue
        size = np.abs(o.shift) if what == "mean" else np.abs(np.log1p(o.inflation))
        worst = np.nan_to_num(size.max(), nan=MOST)
        marker, color = STYLES[family(cell.label)]
        row = problems.index(cell.problem)
        ax.plot(np.clip(worst, LEAST, MOST), row, marker, color=color, ms=5, alpha=0.7)
    ax.axvline(0.1 if what == "mean" else 0.07, color="0.6", lw=1, ls="--")
    ax.set(xscale="log", xlim=(LEAST, 1.2 * MOST), ylim=(len(problems) - 0.5, -0.5))
    ax.grid(axis="y", color="0.93")


def draw_reports(ax: Any, cells: dict[Cell, Outcome]) -> None:
    """Plot the reported against the true SD ratio, without runs that have no report."""
    ratios = []
    for cell, o in cells.items():
        if o.said.size and not PROBLEMS[cell.problem].hard:
            k = int(np.abs(o.inflation).argmax())
            ratios.append((1.0 + o.inflation[k], 1.0 + o.said[k], o.is_flagged))
    true, said, flagged = np.array(ratios).T
    flagged = flagged.astype(bool)
    line = np.array([0.6, 12.0])
    ax.fill_between(line, 0.95 * line, 1.05 * line, color="0.88", label="within 5%")
    ax.plot(true[~flagged], said[~flagged], "o", color="tab:blue", ms=4, alpha=0.6, label="no flag")
    ax.plot(true[flagged], said[flagged], "o", color="tab:red", ms=4, alpha=0.6, label="flagged")
    ax.set(xscale="log", yscale="log", xlim=line, ylim=line)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(mpl.ticker.FixedLocator([0.7, 1, 2, 4, 8]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(mpl.ticker.NullLocator())
    ax.set(xlabel="true SD ratio of the worst coordinate", ylabel="SD ratio of the bias report")
    ax.legend(frameon=False, loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=FIGURE)
    args = parser.parse_args()
    cells = {k: v for file in args.files for k, v in read_outcomes(file).items()}
    problems = [p for p in PROBLEMS if not PROBLEMS[p].hard]
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(14, 5), width_ratios=(1, 1, 1.1), layout="constrained"
    )
    draw_errors(left, cells, problems, "mean")
    draw_errors(middle, cells, problems, "sd")
    left.set_yticks(range(len(problems)), problems)
    middle.set_yticks(range(len(problems)), [])
    left.set_xlabel("largest error of a mean (posterior SDs)")
    middle.set_xlabel("largest error of an SD (|log ratio|)")
    handles = [
        plt.Line2D([], [], marker=m, color=c, ls="", label=name) for name, (m, c) in STYLES.items()
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False)
    draw_reports(right, cells)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
