r"""Whether the gradient is that of the potential's values.

A potential that is rounded, compared (``where`` on a parameter) or cut off from its gradient
(``stop_gradient``, a wrong custom derivative) changes where its gradient says that it does not.
Chains that follow gradients then sample another posterior, and nothing that is made of gradients
tells: for a potential rounded everywhere they sample the prior, perfectly.

So the values are looked at, once, along lines between typical positions. On a short interval of
length h the mean slope :math:`\Delta U / h` of a continuous potential lies between the slopes about
it, kinks included; what lies outside, times h, is change that the gradient does not know of.

Whether a row's share in the potential is its own.

A minibatch stands for all rows where each adds the same whichever the others are. A covariate that
is standardised by the minibatch's mean, a batch normalisation or a ranking within the minibatch
breaks this: then the mean over minibatches is another potential than that on all rows, and nothing
that is made of minibatches tells.

So minibatches are put together from halves. Where rows add up,
:math:`U(A, R) + U(B, S) = U(A, S) + U(B, R)` for any halves. R and S are copies of one row each,
which no mean or sd of a minibatch passes over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients, WeightedMinibatch
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = [
    "find_inconsistent_gradients",
    "find_nonadditive_plates",
]

_NUM_INTERVALS_PER_LINE = 16


_MAX_SITE_GROUPS, _MIN_LINES_PER_SITE_GROUP = (
    16,
    2,
)  # into which the coordinates are divided; lines of each


_NUM_CONSISTENCY_ROWS = 2_048


_MIN_HIDDEN_CHANGE_NATS = 0.3  # nats along all lines together: less moves no posterior far


_MIN_HIDDEN_CHANGE_FRACTION = 0.01  # of all change along it


_CONSISTENCY_ROUNDING_ULPS = 16.0  # units in the last place of the potential, an interval


def find_inconsistent_gradients(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    num_lines: int,
) -> list[ModelWarning]:
    """The sites along which the potential changes unknown to its gradient.

    :param batched_gradients: gradients on minibatches.
    :param q: whitened positions from about the posterior, shape ``(k, d)``.
    :param num_lines: lines between two of them, those of all sites together, at most.
    """
    target = batched_gradients.potential
    if target.is_stochastic or len(q) < 2:
        return []
    parts = list(
        _iter_site_groups(target, min(_MAX_SITE_GROUPS, num_lines // _MIN_LINES_PER_SITE_GROUP))
    )
    positions = preconditioner.to_position(q[: 2 * (num_lines // len(parts))])
    ends = list(zip(positions[::2], positions[1::2], strict=False))
    some, found = (
        min(
            list(batched_gradients.iter_subset_minibatches(_NUM_CONSISTENCY_ROWS)),
            batched_gradients.subset_minibatches,
            key=len,
        ),
        {},
    )
    for names, where in parts:
        hidden, total, known = np.sum(
            [_measure_changes_along_segment(batched_gradients, some, a, b, where) for a, b in ends],
            axis=0,
        )
        if hidden > max(_MIN_HIDDEN_CHANGE_NATS, _MIN_HIDDEN_CHANGE_FRACTION * max(total, known)):
            found[names] = total, known
    return [_describe_inconsistent_gradient(names, *changes) for names, changes in found.items()]


def _iter_site_groups(
    potential: Potential, max_groups: int
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Names and coordinates of the sites, of some together where there are more than ``max_groups``."""
    sites = potential.sites
    if sites is None:
        yield (), np.arange(potential.dim)
        return
    ends = np.cumsum([int(np.prod(s.shape)) for s in sites])
    places = np.split(np.arange(potential.dim), ends[:-1])
    each = iter(zip((s.name for s in sites), places, strict=True))
    together = -(-len(sites) // max_groups)
    while some := list(islice(each, together)):
        yield tuple(name for name, _ in some), np.concatenate([where for _, where in some])


def _measure_changes_along_segment(
    batched_gradients: BatchedGradients,
    weighted_minibatches: list[WeightedMinibatch],
    start: np.ndarray,
    end: np.ndarray,
    coordinates: np.ndarray,
) -> tuple[float, float, float]:
    """Hidden change along a line on which some coordinates move, and the change both ways.

    :param weighted_minibatches: rows that stand for all.
    :return: as of :func:`beyond_slopes`; zeros where there is no density.
    """
    step = np.zeros_like(start)
    step[coordinates] = end[coordinates] - start[coordinates]
    line = start + np.linspace(0.0, 1.0, _NUM_INTERVALS_PER_LINE + 1)[:, None] * step
    values, gradients = batched_gradients.weighted_mean(line, weighted_minibatches)
    slopes = gradients @ step / _NUM_INTERVALS_PER_LINE
    if not (np.isfinite(values).all() and np.isfinite(slopes).all()):
        return 0.0, 0.0, 0.0
    return compute_hidden_change(
        values, slopes, float(np.finfo(batched_gradients.potential.dtype).eps)
    )


def compute_hidden_change(
    values: np.ndarray, slopes: np.ndarray, relative_precision: float
) -> tuple[float, float, float]:
    """Change of a function that its slopes do not explain.

    :param values: at equidistant points, shape ``(n,)``.
    :param slopes: there, times the distance, shape ``(n,)``.
    :param relative_precision: of the values, relative.
    :return: what is beyond the slopes about each interval; the sum of the function's changes,
        without their signs; and the same by the slopes.
    """
    change = np.diff(values)
    wide = np.pad(slopes, 1, mode="edge")
    about = np.stack([wide[k : k + len(change)] for k in range(4)])
    low, high = about.min(0), about.max(0)
    slack = (high - low) / 2.0 + _CONSISTENCY_ROUNDING_ULPS * relative_precision * np.abs(
        values
    ).max()
    hidden = float(np.maximum(np.maximum(change - high, low - change) - slack, 0.0).sum())
    known = float(np.abs(slopes[:-1] + slopes[1:]).sum() / 2.0)
    total = float(np.abs(change).sum())
    return hidden, total, known


def _describe_inconsistent_gradient(
    site_names: tuple[str, ...], value_change: float, gradient_change: float
) -> ModelWarning:
    where = " or ".join(f"'{name}'" for name in site_names)
    return ModelWarning(
        site_names,
        ModelWarningKind.INCONSISTENT_GRADIENT,
        f"The gradient does not know how the log density changes along {where or 'the position'}: "
        f"by {value_change:.3g} nats where the gradient says {gradient_change:.3g}. A rounding, a comparison "
        "(`where` on a parameter), `stop_gradient` or a derivative of one's own that is wrong "
        "hides it, and chains that follow gradients sample another posterior. Write the model "
        "with a smooth function of the site, or sample it without gradients in a block of "
        "`numpyro.infer.Gibbs`.",
    )


_NUM_ADDITIVITY_TRIALS = 8


_MAX_INTERACTION_FRACTION = 1e-3  # of what the halves change, that they may change together


_ADDITIVITY_ROUNDING_ULPS = 256.0  # units in the last place of the potential


def find_nonadditive_plates(
    batched_gradients: BatchedGradients, preconditioner: Preconditioner, q: np.ndarray
) -> list[ModelWarning]:
    """The plates whose rows do not add up.

    :param batched_gradients: gradients on minibatches.
    :param q: whitened positions from about the posterior, shape ``(k, d)``.
    """
    target = batched_gradients.potential
    if target.is_stochastic:
        return []
    rng = np.random.default_rng(0)  # its own, so that what is chosen does not hang on it
    plates = [p for group in batched_gradients.plate_groups for p in group]
    positions = preconditioner.to_position(q[:_NUM_ADDITIVITY_TRIALS])
    return [
        _describe_nonadditive_plate(plate.name)
        for plate in plates
        if plate.shards is None and plate.subsample_size > 1
        if _is_nonadditive(batched_gradients, plate, plates, positions, rng)
    ]


def _is_nonadditive(
    batched_gradients: BatchedGradients,
    plate: Plate,
    plates: list[Plate],
    positions: np.ndarray,
    rng: np.random.Generator,
) -> bool:
    """Whether in most tries the halves of a plate's minibatches change the potential together."""
    minibatches = np.stack(
        [m for _ in range(_NUM_ADDITIVITY_TRIALS) for m in _swap_minibatch_halves(plate, rng)]
    )
    num = len(minibatches)
    chosen = {
        p.name: np.tile(np.arange(p.subsample_size, dtype=np.int32), (num, 1)) for p in plates
    }
    chosen[plate.name] = minibatches
    at = np.repeat(
        np.arange(_NUM_ADDITIVITY_TRIALS) % len(positions), num // _NUM_ADDITIVITY_TRIALS
    )
    values = np.empty(num)
    for some in batched_gradients.evaluate_minibatches(positions, chosen, at, np.arange(num)):
        values[some.pair_slice] = some.values
    with np.errstate(invalid="ignore"):
        ar, bs, as_, br = values.reshape(_NUM_ADDITIVITY_TRIALS, 4).T
        together = np.abs((ar - as_) - (br - bs))
        apart = np.abs(ar - as_) + np.abs(ar - br)
        slack = (
            _ADDITIVITY_ROUNDING_ULPS
            * float(np.finfo(batched_gradients.potential.dtype).eps)
            * np.abs(values).max()
        )
        return bool(
            (together > _MAX_INTERACTION_FRACTION * apart + slack).sum()
            > _NUM_ADDITIVITY_TRIALS // 2
        )


def _swap_minibatch_halves(plate: Plate, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Minibatches of the halves A and R, B and S, A and S, B and R."""
    half = plate.subsample_size // 2
    a, b = rng.integers(0, plate.size, (2, plate.subsample_size - half))
    r, s = (np.full(half, row) for row in rng.integers(0, plate.size, 2))
    for one, other in ((a, r), (b, s), (a, s), (b, r)):
        yield np.concatenate([one, other]).astype(np.int32)


def _describe_nonadditive_plate(plate_name: str) -> ModelWarning:
    return ModelWarning(
        (),
        ModelWarningKind.NON_ADDITIVE,
        f"The rows of the plate '{plate_name}' do not add up: what one adds to the log density depends "
        "on which others are in the minibatch. A mean, a standard deviation, a sum or a rank taken "
        "over the minibatch does that, and chains sample another posterior. Take it over all rows, "
        "before the model, or leave out `subsample_size`.",
    )
