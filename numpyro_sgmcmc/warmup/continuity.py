r"""Whether the gradient is that of the potential's values.

A potential that is rounded, compared (``where`` on a parameter) or cut off from its gradient
(``stop_gradient``, a wrong custom derivative) changes where its gradient says that it does not.
Chains that follow gradients then sample another posterior, and nothing that is made of gradients
tells: for a potential rounded everywhere they sample the prior, perfectly.

So the values are looked at, once, along lines between typical positions. On a short interval of
length h the mean slope :math:`\Delta U / h` of a continuous potential lies between the slopes about
it, kinks included; what lies outside, times h, is change that the gradient does not know of.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.findings import Finding
from numpyro_sgmcmc.warmup.row_gradients import RowGradients, WeightedRows

__all__ = ["hidden_changes"]

_INTERVALS = 16
_MOST_PARTS, _FEWEST_LINES = 16, 2  # into which the coordinates are divided; lines of each
_ROWS = 2_048
_HIDDEN = 0.3  # nats along all lines together: less moves no posterior far
_SHARE = 0.01  # of all change along it
_ROUNDING = 16.0  # units in the last place of the potential, an interval


def hidden_changes(
    rows: RowGradients, whitening: Whitening, q: np.ndarray, lines: int
) -> list[Finding]:
    """The sites along which the potential changes unknown to its gradient.

    :param rows: gradients on minibatches.
    :param q: whitened positions from about the posterior, shape ``(k, d)``.
    :param lines: lines between two of them, those of all sites together, at most.
    """
    target = rows.target
    if target.is_randomized or len(q) < 2:
        return []
    parts = list(_parts(target, min(_MOST_PARTS, lines // _FEWEST_LINES)))
    positions = whitening.position(q[: 2 * (lines // len(parts))])
    ends = list(zip(positions[::2], positions[1::2], strict=False))
    some, found = min(list(rows.standing_for_all(_ROWS)), rows.some, key=len), {}
    for names, where in parts:
        hidden, total, known = np.sum([_along(rows, some, a, b, where) for a, b in ends], axis=0)
        if hidden > max(_HIDDEN, _SHARE * max(total, known)):
            found[names] = total, known
    return [_finding(names, *changes) for names, changes in found.items()]


def _parts(target: Target, most: int) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Names and coordinates of the sites, of some together where there are more than ``most``."""
    sites = target.sites
    if sites is None:
        yield (), np.arange(target.dim)
        return
    ends = np.cumsum([int(np.prod(s.shape)) for s in sites])
    places = np.split(np.arange(target.dim), ends[:-1])
    each = iter(zip((s.name for s in sites), places, strict=True))
    together = -(-len(sites) // most)
    while some := list(islice(each, together)):
        yield tuple(name for name, _ in some), np.concatenate([where for _, where in some])


def _along(
    rows: RowGradients,
    some: list[WeightedRows],
    start: np.ndarray,
    end: np.ndarray,
    where: np.ndarray,
) -> tuple[float, float, float]:
    """Hidden change along a line on which some coordinates move, and the change both ways.

    :param some: rows that stand for all.
    :return: as of :func:`beyond_slopes`; zeros where there is no density.
    """
    step = np.zeros_like(start)
    step[where] = end[where] - start[where]
    line = start + np.linspace(0.0, 1.0, _INTERVALS + 1)[:, None] * step
    values, gradients = rows.mean(line, some)
    slopes = gradients @ step / _INTERVALS
    if not (np.isfinite(values).all() and np.isfinite(slopes).all()):
        return 0.0, 0.0, 0.0
    return beyond_slopes(values, slopes, float(np.finfo(rows.target.dtype).eps))


def beyond_slopes(
    values: np.ndarray, slopes: np.ndarray, precision: float
) -> tuple[float, float, float]:
    """Change of a function that its slopes do not explain.

    :param values: at equidistant points, shape ``(n,)``.
    :param slopes: there, times the distance, shape ``(n,)``.
    :param precision: of the values, relative.
    :return: what is beyond the slopes about each interval; the sum of the function's changes,
        without their signs; and the same by the slopes.
    """
    change = np.diff(values)
    wide = np.pad(slopes, 1, mode="edge")
    about = np.stack([wide[k : k + len(change)] for k in range(4)])
    low, high = about.min(0), about.max(0)
    slack = (high - low) / 2.0 + _ROUNDING * precision * np.abs(values).max()
    hidden = float(np.maximum(np.maximum(change - high, low - change) - slack, 0.0).sum())
    known = float(np.abs(slopes[:-1] + slopes[1:]).sum() / 2.0)
    total = float(np.abs(change).sum())
    return hidden, total, known


def _finding(names: tuple[str, ...], total: float, known: float) -> Finding:
    where = " or ".join(f"'{name}'" for name in names)
    return Finding(
        names,
        "hidden",
        f"The gradient does not know how the log density changes along {where or 'the position'}: "
        f"by {total:.3g} nats where the gradient says {known:.3g}. A rounding, a comparison "
        "(`where` on a parameter), `stop_gradient` or a derivative of one's own that is wrong "
        "hides it, and chains that follow gradients sample another posterior. Write the model "
        "with a smooth function of the site, or sample it without gradients in a block of "
        "`numpyro.infer.Gibbs`.",
    )
