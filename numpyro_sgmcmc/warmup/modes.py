"""Other modes: fits that ended elsewhere with about as much of the posterior's mass.

Where a posterior has several modes, chains about one of them agree with each other and are wrong
together. Several starts show some of the others: a fit far from where the pilot chains are, from
which pilot chains do not come to these, and where there is about as much mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.findings import Finding
from numpyro_sgmcmc.warmup.variational import MeanField

__all__ = [
    "COMPARABLE",
    "Fit",
    "Mode",
    "are_apart",
    "finding_of",
    "have_stayed",
    "is_barred",
    "is_near",
    "is_on_its_way",
    "line_between",
    "possible",
]

COMPARABLE = 2.5
"""Nats by which a mode's mass may be smaller, to be told of: about a tenth is left."""

_POSSIBLE = 100.0  # nats: with many rows a fit ends several sds from its mode
_UNSURE = 2.0  # times the distance of the best fit from its mode
_FAR = 3.0  # sds of a fit beyond the sd of the pilot chains: perhaps not where these are
_GAP = 0.3  # between two groups of draws, of the sum of their sds
_ON_ITS_WAY = 0.1  # of the way that is left, in one window
_LINE = 9  # points
_BARRIER = 0.5  # nats: a lower one keeps no chain where it is
_SAME = 0.2  # of the difference between modes, within which entries count as exchanged
_SHOWN = 3


class Fit(NamedTuple):
    """
    - **normal** - the independent normals.
    - **bound** - evidence bound; -inf where it is none.
    """

    normal: MeanField
    bound: float


class Mode(NamedTuple):
    """
    - **whitening** - coordinates about it.
    - **q** - whitened positions from about it, shape ``(n, d)``.
    - **is_settled** - whether pilot chains about it agree and have stopped moving.
    - **r_hat** - of theirs, the largest of any coordinate.
    - **trail** - where they have been, window by window, the median one; each of shape ``(d,)``.
    - **nats** - by how much the logarithm of its mass is smaller than that of the chains' mode.
    - **is_of_its_own** - whether its pilot chains have not come to where others are.
    """

    whitening: Whitening
    q: np.ndarray
    is_settled: bool = True
    r_hat: float = 1.0
    trail: tuple[np.ndarray, ...] = ()
    nats: float = 0.0
    is_of_its_own: bool = True

    @property
    def draws(self) -> np.ndarray:
        """The positions, shape ``(n, d)``."""
        return np.asarray(self.whitening.position(self.q))

    @property
    def place(self) -> np.ndarray:
        """In the midst of its pilot chains, shape ``(d,)``."""
        return self.trail[-1] if self.trail else self.whitening.anchor


def possible(fits: list[Fit]) -> list[Fit]:
    """The fits besides the best that may be modes of their own, a few.

    :param fits: in the order of their bounds, the largest first.
    """
    best, *others = fits
    return [fit for fit in others if best.bound - fit.bound < _POSSIBLE]


def is_near(fit: Fit, draws: np.ndarray, unsure: np.ndarray) -> bool:
    """Whether a fit's mean is in the midst of pilot chains.

    :param draws: ends of these chains, shape ``(n, d)``.
    :param unsure: how far from its mode a fit may have ended, shape ``(d,)``.
    """
    away = np.abs(fit.normal.mean - draws.mean(0))
    return bool((away < draws.std(0) + _FAR * fit.normal.sd + _UNSURE * unsure).all())


def are_apart(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The coordinates in which most of one group's draws are beyond those of the other.

    Over a low barrier some chains get: an eighth of ours and three of theirs at either end do not
    count.

    :param ours: positions, shape ``(n, d)``.
    :param theirs: likewise.
    """
    ours, theirs = _inner(ours, 1), _inner(theirs, 3)
    gap = np.maximum(ours.min(0) - theirs.max(0), theirs.min(0) - ours.max(0))
    return np.flatnonzero(gap > _GAP * (ours.std(0) + theirs.std(0)))


def have_stayed(ends: np.ndarray, known: Sequence[np.ndarray]) -> np.ndarray:
    """Which chains have not come to where others are known to be, shape ``(n,)``.

    :param ends: of the chains, shape ``(n, d)``.
    :param known: draws about modes, each of shape ``(m, d)``.
    """
    stays = np.ones(len(ends), bool)
    for draws in known:
        where = are_apart(draws, ends)
        inner = _inner(draws, 1)[:, where]
        slack = inner.std(0)
        stays &= ((ends[:, where] < inner[0] - slack) | (ends[:, where] > inner[-1] + slack)).any(1)
    return stays


def _inner(draws: np.ndarray, eighths: int) -> np.ndarray:
    """Each coordinate's draws without so many at either end, sorted."""
    few = eighths * len(draws) // 8
    return np.sort(draws, axis=0)[few : len(draws) - few]


def is_on_its_way(mode: Mode, draws: np.ndarray) -> bool:
    """Whether pilot chains that have not settled may yet come to other draws.

    Chains that a low barrier lets out now and then never settle, and stay where they are all the
    same; those that are still coming down move on by a good part of the way in every window.

    :param draws: shape ``(n, d)``.
    """
    if mode.is_settled:
        return False
    apart = are_apart(draws, mode.draws)
    if len(mode.trail) < 2 or not len(apart):
        return True
    scale = draws.std(0)[apart] + mode.draws.std(0)[apart]
    before, now = (place[apart] / scale for place in mode.trail[-2:])
    left = draws.mean(0)[apart] / scale - now
    return bool((now - before) @ left > _ON_ITS_WAY * (left @ left))


def line_between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Places at which the potential tells whether a barrier parts two others, these included."""
    return start + np.linspace(0.0, 1.0, _LINE)[:, None] * (end - start)


def is_barred(potentials: np.ndarray) -> bool:
    """Whether between two places there is less density than at either.

    Of hundreds of coordinates some lie apart by chance, and along a ridge chains move slowly: no
    modes, for the density does not fall between them.

    :param potentials: on the line between them.
    """
    ends = max(potentials[0], potentials[-1])
    return not potentials.max() < ends + _BARRIER  # also where it is not finite


def finding_of(
    target: Target, ours: np.ndarray, others: Sequence[Mode], are_visited: bool
) -> Finding:
    """What is to be said of other modes.

    :param ours: draws about the mode that the chains are to be in, shape ``(n, d)``.
    :param others: the other modes.
    :param are_visited: whether chains start in them, too.
    """
    shares = 100.0 * _shares([mode.nats for mode in others])
    sites, exchanged = [], []
    for theirs in (mode.draws for mode in others):
        apart = _sites_apart(target, are_apart(ours, theirs), ours, theirs)
        sites += [name for name in apart[0] if name not in sites]
        exchanged += [name for name in apart[1] if name not in exchanged]
    what = (
        f"another mode, with about {shares[0]:.0f} % of the mass, in which"
        if len(others) == 1
        else f"{len(others)} other modes or more, with about {shares.sum():.0f} % of the mass, in "
        "which"
    )
    if exchanged:
        told = (
            f"the entries of {_listed(exchanged)} are exchanged: the model does not tell its "
            f"components apart. {_where(are_visited)} Order the "
            "components (numpyro.distributions.transforms.OrderedTransform), or read the draws as "
            "those of components in any order."
        )
    else:
        told = (
            f"{_listed(sites) or 'the position'} {'are' if len(sites) > 1 else 'is'} elsewhere. "
            f"{_where(are_visited)} Rule the "
            "others out by the prior, if they should not be; `init_params` decides in which mode "
            "chains start."
        )
    kind = "visited" if are_visited else "modes"
    return Finding(tuple(sites), kind, f"The posterior has {what} {told}")


def _where(are_visited: bool) -> str:
    if are_visited:
        return "Chains start in each in turn: its share of the draws is no estimate of its mass."
    return (
        "Chains start in one mode and, while they stay there, give its means and sds alone; with "
        "chains_in_modes=True they start in each."
    )


def _shares(nats: list[float]) -> np.ndarray:
    """Of the other modes in the mass of all, also where they have more."""
    masses = np.exp(-np.array([0.0, *nats]) + min(0.0, *nats))
    return np.asarray(masses[1:] / masses.sum())


def _sites_apart(
    target: Target, apart: np.ndarray, ours: np.ndarray, theirs: np.ndarray
) -> tuple[list[str], list[str]]:
    """The sites that differ, and those of them whose entries are exchanged."""
    if target.sites is None:
        return [], []
    ends = np.cumsum([int(np.prod(s.shape)) for s in target.sites])
    sites, exchanged = [], []
    for site, end in zip(target.sites, ends, strict=True):
        where = np.arange(end - int(np.prod(site.shape)), end)
        if not np.isin(where, apart).any():
            continue
        sites.append(site.name)
        a, b = (x[:, where].mean(0).reshape(site.shape) for x in (ours, theirs))
        if any(_are_exchanged(a, b, axis) for axis in range(len(site.shape))):
            exchanged.append(site.name)
    return sites, exchanged


def _are_exchanged(a: np.ndarray, b: np.ndarray, axis: int) -> bool:
    """Whether the entries along an axis are those of the other in another order."""
    a, b = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (a, b))
    if len(a) < 2:
        return False
    apart = np.abs(a - b).max()
    cost = np.abs(a[:, None] - b[None]).max(-1)
    rows, columns = linear_sum_assignment(cost)
    return bool((rows != columns).any() and cost[rows, columns].max() < _SAME * apart)


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return shown + ", ..." * (len(names) > _SHOWN)
