r"""Checks of the model before sampling: gradients that match the density, additive likelihoods.

Both find models for which minibatch gradients are wrong, so that chains sample another posterior
and no diagnostic made from gradients shows it.

:func:`find_inconsistent_gradients` compares values of the potential with its gradient. Rounding,
comparisons (``where`` on a parameter), ``stop_gradient`` and wrong custom derivatives change the
potential without changing its gradient: with a potential that is rounded everywhere, chains sample
the prior, perfectly. Along lines between positions in the bulk of the posterior, the mean slope
:math:`\Delta U / h` of a continuous potential over a short interval of length h lies between the
slopes about it, kinks included. What lies outside, times h, is change hidden from the gradient.
Rounding errors of the values are measured, not assumed, since terms of a density that cancel
(``lgamma`` of large arguments) leave errors of any size: over a distance far below h the potential
is linear, and second differences of its values are rounding errors.

Where the support of the data depends on a parameter (``Uniform(0, theta)``), the gradient leads to
positions of density zero.

:func:`find_nonadditive_plates` checks that each observation contributes the same to the potential
whichever others are in the minibatch, wherever it is in the minibatch, and however many there are.
Otherwise the mean over minibatches is not the potential on all observations.

- Others: standardising a covariate by the minibatch's mean, batch normalisation, ranks. For an
  additive likelihood, minibatches composed of halves A or B and R or S satisfy
  :math:`U(A, R) + U(B, S) = U(A, S) + U(B, R)`.
- Position: ``arange(len(i))`` as a covariate, a walk over the minibatch. The order must not matter.
- Number: ``1 / len(i)`` as a scale, a sum over the minibatch in each row. With N / B as the plate's
  scale, :math:`U` on copies of some rows must not depend on their number. Another size needs
  another program, so that this is evaluated only where the traced model may depend on the size
  (:mod:`~numpyro_sgmcmc.model.row_count`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients, JittedPotential
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind, format_message
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.trace import site_slices

# Consistency of gradients: intervals per line; groups into which the sites are divided, and lines
# per group at least; rows on which the potential is evaluated. These bound the work.
_NUM_INTERVALS_PER_LINE = 11
_MAX_SITE_GROUPS, _MIN_LINES_PER_SITE_GROUP = 16, 2
_NUM_CONSISTENCY_ROWS = 2_048

# Hidden change that is reported: nats along all lines together (less hardly moves the posterior),
# and fraction of the total change. The difference of a change from the trapezoidal rule is not zero
# for a right gradient, so that only a large fraction is reported.
_MIN_HIDDEN_CHANGE_NATS, _MIN_HIDDEN_CHANGE_FRACTION = 0.3, 0.01
_MIN_TRAPEZOIDAL_DIFFERENCE_FRACTION = 0.25

# Points at which rounding is measured: their number; distances as a fraction of an interval, and at
# least in units in the last place of a coordinate.
_NUM_NEARBY_POINTS, _NEARBY_FRACTION, _MIN_NEARBY_ULPS = 4, 1 / 16, 2.0

# Rounding of a change of the potential: in SDs of its measured error, and at least so many units in
# the last place (right models of a million rows need 1.5). Some second differences contain a jump
# that is not rounding: the largest eighth is left out.
_ROUNDING_TOLERANCE_SDS, _MIN_ROUNDING_ULPS, _TRIMMED_FRACTION = 6.0, 4.0, 1 / 8

# Newton steps out of the support: their greatest length, in preconditioned coordinates (parameters
# overflow elsewhere); multiples of a step back, at which the density that was left is searched for.
_MAX_NEWTON_STEP_SD, _REVERSE_STEPS = 10.0, 4.0 ** np.arange(-4, 9)

# Additivity, 32 values for a plate at most: trials of four minibatches; those in which the order
# changes; positions at which numbers of rows are compared. Interaction of the halves, and effect of
# the order and the number of the rows, relative to the effects of halves and positions; rounding
# error of the potential in units in the last place.
_NUM_ADDITIVITY_TRIALS, _NUM_ORDER_TRIALS, _NUM_ROW_COUNT_POSITIONS = 6, 2, 3
_MAX_INTERACTION_FRACTION = 1e-3
_MAX_MINIBATCH_EFFECT_FRACTION = 1e-5
_ADDITIVITY_ROUNDING_ULPS = 256.0
_DISTANCES = 30.0, 1000.0  # of further positions for numbers of rows, in posterior SDs

# Site names that a message lists.
_MAX_SITES_LISTED = 3

_Evaluate: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def find_inconsistent_gradients(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    num_lines: int,
) -> list[ModelWarning]:
    """Return a warning for each group of sites along which the gradient misses changes.

    :param num_lines: lines between two of these positions, of all groups together, at most.
    """
    potential = batched_gradients.potential
    if potential.is_stochastic or len(q) < 2:
        return []
    max_groups = max(1, min(_MAX_SITE_GROUPS, num_lines // _MIN_LINES_PER_SITE_GROUP))
    site_groups = _group_sites(potential, max_groups)
    positions = preconditioner.to_position(q[: 2 * (num_lines // len(site_groups))])
    # A multiple of the batch size: a minibatch that is filled up has larger rounding errors.
    batch_size = max(
        (p.subsample_size for g in batched_gradients.plate_groups for p in g), default=1
    )
    num_rows = max(1, _NUM_CONSISTENCY_ROWS // batch_size) * batch_size
    minibatches = min(
        list(batched_gradients.iter_subset_minibatches(num_rows)),
        batched_gradients.subset_minibatches,
        key=len,
    )

    def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Positions are rounded to the model's precision; a posterior may be a few units wide.
        rounding = points - points.astype(potential.dtype)
        with np.errstate(invalid="ignore"):  # the density may be zero
            values, gradients = batched_gradients.weighted_mean(points, minibatches)
            return values + (rounding * gradients).sum(1), gradients

    eps = float(np.finfo(potential.dtype).eps)
    model_warnings = []
    for names, coordinates in site_groups:
        lines = []
        for start, end in zip(positions[::2], positions[1::2], strict=False):
            displacement = np.zeros_like(start)
            displacement[coordinates] = end[coordinates] - start[coordinates]
            lines.append(_evaluate_line(evaluate, start, displacement, eps))
        listed = ", ".join(f"'{name}'" for name in names[:_MAX_SITES_LISTED])
        listed += ", ..." if len(names) > _MAX_SITES_LISTED else ""
        outside = _find_position_outside_support(evaluate, preconditioner, lines, coordinates)
        if outside is not None:
            where, _ = potential.diagnose_nonfinite(
                jnp.asarray(outside, potential.dtype), batched_gradients.arguments
            )
            message = format_message(
                f"The gradient along {listed or 'the position'} leads out of the support{where}.",
                "sample a parameter that bounds the data, such as theta of `Uniform(0, theta)`, in "
                "a block of `numpyro.infer.Gibbs` that uses no gradients, or give the data a "
                "distribution with a fixed support.",
                "gradient-leaves-support",
            )
        elif hidden_change := _describe_hidden_change(lines, eps):
            message = format_message(
                f"The gradient along {listed or 'the position'} misses changes of the log density: "
                f"{hidden_change}.",
                "write the model without rounding, comparisons (`where` on a parameter), indices "
                "beyond an array's length, `stop_gradient` or wrong custom derivatives. Or sample "
                "the site in a block of `numpyro.infer.Gibbs` that uses no gradients.",
                "inconsistent-gradient",
            )
        else:
            continue
        model_warnings.append(ModelWarning(names, ModelWarningKind.INCONSISTENT_GRADIENT, message))
    return model_warnings


class _Line(NamedTuple):
    """Potential along a line between two positions.

    - **start**, **start_gradient** - shape ``(d,)``.
    - **values**, **slopes** - values at equidistant points, and derivatives times their distance.
    - **second_differences** - of values at points that are far closer.
    """

    start: np.ndarray
    start_gradient: np.ndarray
    values: np.ndarray
    slopes: np.ndarray
    second_differences: np.ndarray


def _evaluate_line(
    evaluate: _Evaluate, start: np.ndarray, displacement: np.ndarray, relative_precision: float
) -> _Line:
    """Evaluate the potential along a line from ``start``."""
    fractions = np.linspace(0.0, 1.0, _NUM_INTERVALS_PER_LINE + 1)
    moved = displacement != 0.0
    ulps = relative_precision * np.abs(start[moved] / displacement[moved])
    min_distance = _MIN_NEARBY_ULPS * float(np.median(ulps)) if moved.any() else 0.0
    distance = np.clip(min_distance, _NEARBY_FRACTION * fractions[1], fractions[1])
    nearby = distance * np.arange(1, _NUM_NEARBY_POINTS + 1)
    points = start + np.concatenate([fractions, nearby])[:, None] * displacement
    values, gradients = evaluate(points)
    values, nearby_values = np.split(values, [len(fractions)])
    slopes = gradients[: len(fractions)] @ displacement / _NUM_INTERVALS_PER_LINE
    with np.errstate(invalid="ignore"):
        second_differences = np.diff(np.append(values[0], nearby_values), 2)
    return _Line(start, gradients[0], values, slopes, second_differences)


def _find_position_outside_support(
    evaluate: _Evaluate,
    preconditioner: Preconditioner,
    lines: list[_Line],
    coordinates: np.ndarray,
) -> np.ndarray | None:
    """Return a position of density zero to which the gradients of most lines lead, or None.

    It is the end of a Newton step, which leads to the mode of a smooth density, or the start of a
    line, if the density is positive in the opposite direction.
    """
    lines = [line for line in lines if np.isfinite(line.start_gradient).all()]
    if not lines:
        return None
    starts = np.stack([line.start for line in lines])
    gradients = np.stack([line.start_gradient for line in lines])
    has_density = np.isfinite([line.values[0] for line in lines])
    steps = np.zeros_like(starts)
    q_steps = -preconditioner.apply_transpose(gradients)
    lengths = np.linalg.norm(q_steps, axis=1, keepdims=True)
    q_steps *= _MAX_NEWTON_STEP_SD / np.maximum(lengths, _MAX_NEWTON_STEP_SD)
    steps[:, coordinates] = preconditioner.apply(q_steps)[:, coordinates]
    ends = np.where(has_density[:, None], starts + steps, starts)
    is_outside = ~np.isfinite(evaluate(ends)[0])
    for k in np.flatnonzero(~has_density):
        values, _ = evaluate(starts[k] - _REVERSE_STEPS[:, None] * steps[k])
        is_outside[k] = np.isfinite(values).any()
    return ends[is_outside][0] if 2 * is_outside.sum() > len(lines) else None


def _describe_hidden_change(lines: list[_Line], relative_precision: float) -> str:
    """Return the change that gradients miss along lines, in nats; empty where they miss none."""
    lines = [
        line
        for line in lines
        if all(np.isfinite(x).all() for x in (line.values, line.slopes, line.second_differences))
    ]
    if not lines:
        return ""
    rounding = estimate_rounding(np.concatenate([line.second_differences for line in lines]))
    changes = []
    for line in lines:
        min_rounding = _MIN_ROUNDING_ULPS * relative_precision * np.abs(line.values).max()
        changes.append(compute_hidden_change(line.values, line.slopes, max(rounding, min_rounding)))
    change = HiddenChange(*np.sum(changes, 0))
    if not change.is_reported:
        return ""
    return f"{change.total:.3g} nats, but {change.by_slopes:.3g} nats according to the gradient"


def estimate_rounding(second_differences: np.ndarray) -> float:
    """Return how much a change of a function may be off by the rounding of its values.

    :param second_differences: of values at equidistant points between which it is linear.
    """
    squares = np.sort(np.square(second_differences))
    squares = squares[: len(squares) - int(_TRIMMED_FRACTION * len(squares))]
    # A second difference of independent errors has six times their variance, a difference twice.
    return _ROUNDING_TOLERANCE_SDS * float(np.sqrt(2.0 * squares.mean() / 6.0))


def _group_sites(potential: Potential, max_groups: int) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """Return names and coordinates of the sites, divided into at most ``max_groups`` groups."""
    if potential.sites is None:
        return [((), np.arange(potential.dim))]
    slices = site_slices(potential.sites)
    names, coordinates = list(slices), [np.arange(potential.dim)[s] for s in slices.values()]
    group_size = -(-len(names) // max_groups)
    return [
        (tuple(names[i : i + group_size]), np.concatenate(coordinates[i : i + group_size]))
        for i in range(0, len(names), group_size)
    ]


class HiddenChange(NamedTuple):
    """Change of a function that its slopes do not explain, summed over intervals.

    - **hidden** - change beyond the slopes about each interval.
    - **trapezoidal_difference** - difference from the trapezoidal rule, beyond its error.
    - **total**, **by_slopes** - absolute change of the values, and by the slopes.
    """

    hidden: float
    trapezoidal_difference: float
    total: float
    by_slopes: float

    @property
    def is_reported(self) -> bool:
        """True if the slopes are not those of the function."""
        largest = max(self.total, self.by_slopes)
        return self.hidden > max(
            _MIN_HIDDEN_CHANGE_NATS, _MIN_HIDDEN_CHANGE_FRACTION * largest
        ) or self.trapezoidal_difference > max(
            _MIN_HIDDEN_CHANGE_NATS, _MIN_TRAPEZOIDAL_DIFFERENCE_FRACTION * largest
        )


def compute_hidden_change(values: np.ndarray, slopes: np.ndarray, rounding: float) -> HiddenChange:
    """Return the change of a function that its slopes do not explain.

    :param rounding: how much a change may be off by rounding.
    """
    change, trapezoidal = np.diff(values), (slopes[:-1] + slopes[1:]) / 2.0
    # Slopes at the two ends of each interval and at the points next to these.
    padded = np.pad(slopes, 1, mode="edge")
    neighbours = np.stack([padded[k : k + len(change)] for k in range(4)])
    low, high = neighbours.min(0), neighbours.max(0)
    tolerance = (high - low) / 2.0 + rounding
    beyond = np.maximum(change - high, low - change) - tolerance
    # A kink in the interval changes one of the second differences of the slopes next to it.
    second_differences = np.pad(np.abs(np.diff(slopes, 2)), 1, mode="edge")
    largest_nearby = np.maximum(second_differences[:-1], second_differences[1:])
    differences = np.abs(change - trapezoidal) - largest_nearby - rounding
    return HiddenChange(
        float(np.maximum(beyond, 0.0).sum()),
        float(np.maximum(differences, 0.0).sum()),
        float(np.abs(change).sum()),
        float(np.abs(trapezoidal).sum()),
    )


def find_nonadditive_plates(
    batched_gradients: BatchedGradients, preconditioner: Preconditioner, q: np.ndarray
) -> list[ModelWarning]:
    """Return a warning for each plate whose log likelihood is not additive over observations."""
    if batched_gradients.potential.is_stochastic:
        return []
    # Separate from the warm-up's generator, so that the check does not change its choices.
    rng = np.random.default_rng(0)
    positions = preconditioner.to_position(q[: 2 * _NUM_ADDITIVITY_TRIALS])
    size_dependent_sites = dict(batched_gradients.potential.size_dependent_sites)
    model_warnings = []
    for plate in _get_checked_plates(batched_gradients):
        if plate.shards is not None or plate.subsample_size in (1, plate.size):
            continue
        interacts, depends_on_order = _compare_minibatches(batched_gradients, plate, positions, rng)
        sites = size_dependent_sites.get(plate.name, ())
        # Where the potential is scaled twice, it may change by less than rounding between draws.
        few = q[:_NUM_ROW_COUNT_POSITIONS]
        distant = (preconditioner.to_position(distance * few) for distance in _DISTANCES)
        if interacts:
            message = format_message(
                f"The log likelihood of plate '{plate.name}' is not additive over observations.",
                "compute means, SDs, sums and ranks on the full data before the model, not on the "
                "minibatch, or leave out `subsample_size`.",
                "non-additive-likelihood",
            )
        elif depends_on_order:
            message = format_message(
                f"The position of a row in the minibatch of plate '{plate.name}' changes its log "
                "density.",
                "index covariates by the plate's indices, as in `time[i]`, and take the number of "
                "a row from `i`, not from `arange(len(i))`.",
                "position-in-minibatch",
            )
        elif sites and any(
            _depends_on_num_rows(batched_gradients, plate, x, rng) for x in (positions, *distant)
        ):
            listed = ", ".join(f"'{name}'" for name in sites[:_MAX_SITES_LISTED])
            message = format_message(
                f"The number of rows in a minibatch of plate '{plate.name}' changes the log "
                f"density of each row at {listed}.",
                "leave out `len(i)`, sums over rows and factors for the number of rows, because "
                "the plate scales the minibatch to all rows.",
                "minibatch-size-in-model",
            )
        else:
            continue
        model_warnings.append(ModelWarning((), ModelWarningKind.NON_ADDITIVE, message))
    return model_warnings


def _evaluate_rows(
    batched_gradients: BatchedGradients,
    plate: Plate,
    rows: np.ndarray,
    positions: np.ndarray,
    position_index: np.ndarray,
) -> np.ndarray:
    """Return the potential on minibatches of a plate, with the first rows of other plates."""
    first_rows = _first_rows(batched_gradients)
    indices = {name: np.tile(first, (len(rows), 1)) for name, first in first_rows.items()}
    results = batched_gradients.evaluate_minibatches(
        positions,
        {**indices, plate.name: rows.astype(np.int32)},
        position_index,
        np.arange(len(rows)),
    )
    return np.concatenate([r.values for r in results])


def _get_checked_plates(batched_gradients: BatchedGradients) -> Sequence[Plate]:
    """Return the plates with the batch size of a pass, or of a step if a pass takes all rows.

    NumPyro does not look up the rows of a plate whose minibatch has as many rows as the data.
    """
    plates = [p for group in batched_gradients.plate_groups for p in group]
    if any(p.subsample_size == p.size for p in plates):
        return batched_gradients.potential.plates
    return plates


def _first_rows(batched_gradients: BatchedGradients) -> dict[str, np.ndarray]:
    """Return the first minibatch of each plate."""
    return {
        p.name: np.arange(p.subsample_size, dtype=np.int32)
        for p in _get_checked_plates(batched_gradients)
    }


def _rounding_error(batched_gradients: BatchedGradients, values: np.ndarray) -> float:
    precision = float(np.finfo(batched_gradients.potential.dtype).eps)
    return _ADDITIVITY_ROUNDING_ULPS * precision * float(np.abs(values).max())


def _compare_minibatches(
    batched_gradients: BatchedGradients,
    plate: Plate,
    positions: np.ndarray,
    rng: np.random.Generator,
) -> tuple[bool, bool]:
    """Return whether, in most of the trials, halves of a minibatch interact, and order matters.

    In half of the trials two halves are copies of one row each, which no mean or SD of a minibatch
    hides; in the others rows of a group of the data are in both halves, if there are such groups.
    """
    batch_size, num_trials = plate.subsample_size, _NUM_ADDITIVITY_TRIALS
    half, minibatches = batch_size // 2, []
    for trial in range(num_trials):
        a, b = rng.integers(0, plate.size, (2, batch_size - half))
        r, s = rng.integers(0, plate.size, (2, half))
        if trial < num_trials // 2:
            r, s = np.full(half, r[0]), np.full(half, s[0])
        minibatches += [np.concatenate(halves) for halves in ((a, r), (b, s), (a, s), (b, r))]
    for original in minibatches[-4 * _NUM_ORDER_TRIALS :: 4]:
        # A random cycle moves each row, also one of two.
        cycle = rng.permutation(batch_size)
        minibatches.append(original.copy())
        minibatches[-1][cycle] = original[np.roll(cycle, 1)]
    trials = np.arange(num_trials)
    position_index = np.append(np.repeat(trials, 4), trials[-_NUM_ORDER_TRIALS:]) % len(positions)
    values = _evaluate_rows(
        batched_gradients, plate, np.stack(minibatches), positions, position_index
    )
    u_ar, u_bs, u_as, u_br = values[: 4 * num_trials].reshape(num_trials, 4).T
    rounding = _rounding_error(batched_gradients, values)
    with np.errstate(invalid="ignore"):
        own_effects = np.abs(u_ar - u_as) + np.abs(u_ar - u_br)
        interaction = np.abs((u_ar - u_as) - (u_br - u_bs))
        is_interacting = interaction > _MAX_INTERACTION_FRACTION * own_effects + rounding
        change = np.abs(values[4 * num_trials :] - u_ar[-_NUM_ORDER_TRIALS:])
        tolerance = _MAX_MINIBATCH_EFFECT_FRACTION * own_effects + rounding
        is_ordered = change > tolerance[-_NUM_ORDER_TRIALS:]
    interacts = any(_in_most_trials(trials) for trials in np.split(is_interacting, 2))
    return interacts, _in_most_trials(is_ordered)


def _depends_on_num_rows(
    batched_gradients: BatchedGradients,
    plate: Plate,
    positions: np.ndarray,
    rng: np.random.Generator,
) -> bool:
    """Return whether the potential on copies of some rows depends on the number of copies.

    Changes between positions are compared, because a constant does no harm.
    """
    positions = positions[:_NUM_ROW_COUNT_POSITIONS]
    batch_size, half = plate.subsample_size, plate.subsample_size // 2
    rows = rng.integers(0, plate.size, math.gcd(batch_size, half)).astype(np.int32)
    copies = np.tile(rows, (len(positions), batch_size // len(rows)))
    position_index = np.arange(len(positions))
    values = _evaluate_rows(batched_gradients, plate, copies, positions, position_index)
    subset = {**_first_rows(batched_gradients), plate.name: copies[0, :half]}
    of_half = JittedPotential(batched_gradients.potential, batched_gradients.arguments, subset)
    both = np.stack([values, [of_half.value(position) for position in positions]])
    with np.errstate(invalid="ignore"):
        change, change_of_half = np.diff(both)
        own_effects = np.abs(change) + np.abs(change_of_half)
        tolerance = _MAX_MINIBATCH_EFFECT_FRACTION * own_effects
        tolerance += _rounding_error(batched_gradients, both)
        # Rounding errors of a row are the same in all of its copies.
        return bool((np.abs(change - change_of_half) > tolerance).any())


def _in_most_trials(condition: np.ndarray) -> bool:
    return bool(condition.sum() > len(condition) // 2)
