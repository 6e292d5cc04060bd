r"""Checks of the model before sampling: gradients that match the density, additive likelihoods.

Both find models for which minibatch gradients are wrong, so that chains sample another posterior
and no diagnostic made from gradients shows it.

:func:`find_inconsistent_gradients` compares values of the potential with its gradient. Rounding,
comparisons (``where`` on a parameter), ``stop_gradient`` and wrong custom derivatives change the
potential without changing its gradient: with a potential that is rounded everywhere, chains sample
the prior, perfectly. Along lines between positions in the bulk of the posterior, the mean slope
:math:`\Delta U / h` of a continuous potential over a short interval of length h lies between the
slopes about it, kinks included. What lies outside, times h, is change hidden from the gradient.

:func:`find_nonadditive_plates` checks that each observation contributes the same to the potential
whichever others are in the minibatch. Standardising a covariate by the minibatch's mean, batch
normalisation and ranking within the minibatch break this: the mean over minibatches is then not
the potential on all observations. For an additive likelihood, minibatches composed of halves A or
B and R or S satisfy :math:`U(A, R) + U(B, S) = U(A, S) + U(B, R)`.
"""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind, format_message
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.trace import site_slices

# Consistency of gradients: intervals per line; groups into which the sites are divided, and lines
# per group at least; rows on which the potential is evaluated. These bound the work.
_NUM_INTERVALS_PER_LINE = 16
_MAX_SITE_GROUPS, _MIN_LINES_PER_SITE_GROUP = 16, 2
_NUM_CONSISTENCY_ROWS = 2_048

# Hidden change that is reported: nats along all lines together (less hardly moves the posterior),
# and fraction of the total change.
_MIN_HIDDEN_CHANGE_NATS, _MIN_HIDDEN_CHANGE_FRACTION = 0.3, 0.01

# Rounding error of the potential per interval, in units in the last place.
_CONSISTENCY_ROUNDING_ULPS = 16.0

# Additivity: trials; interaction of the halves relative to their own effects; rounding error of
# the potential in units in the last place.
_NUM_ADDITIVITY_TRIALS = 8
_MAX_INTERACTION_FRACTION = 1e-3
_ADDITIVITY_ROUNDING_ULPS = 256.0

# Site names that a message lists.
_MAX_SITES_LISTED = 3


def find_inconsistent_gradients(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    num_lines: int,
) -> list[ModelWarning]:
    """Return a warning for each group of sites along which the gradient misses changes.

    :param q: preconditioned positions in the bulk of the posterior, shape ``(k, d)``.
    :param num_lines: lines between two of these positions, of all groups together, at most.
    """
    potential = batched_gradients.potential
    if potential.is_stochastic or len(q) < 2:
        return []
    max_groups = max(1, min(_MAX_SITE_GROUPS, num_lines // _MIN_LINES_PER_SITE_GROUP))
    site_groups = _group_sites(potential, max_groups)
    positions = preconditioner.to_position(q[: 2 * (num_lines // len(site_groups))])
    minibatches = min(
        list(batched_gradients.iter_subset_minibatches(_NUM_CONSISTENCY_ROWS)),
        batched_gradients.subset_minibatches,
        key=len,
    )
    precision = float(np.finfo(potential.dtype).eps)
    fractions = np.linspace(0.0, 1.0, _NUM_INTERVALS_PER_LINE + 1)
    model_warnings = []
    for names, coordinates in site_groups:
        changes = np.zeros(3)
        for start, end in zip(positions[::2], positions[1::2], strict=False):
            displacement = np.zeros_like(start)
            displacement[coordinates] = end[coordinates] - start[coordinates]
            values, gradients = batched_gradients.weighted_mean(
                start + fractions[:, None] * displacement, minibatches
            )
            slopes = gradients @ displacement / _NUM_INTERVALS_PER_LINE
            if np.isfinite(values).all() and np.isfinite(slopes).all():
                changes += compute_hidden_change(values, slopes, precision)
        hidden, total, by_gradient = changes
        threshold = _MIN_HIDDEN_CHANGE_FRACTION * max(total, by_gradient)
        if hidden <= max(_MIN_HIDDEN_CHANGE_NATS, threshold):
            continue
        listed = ", ".join(f"'{name}'" for name in names[:_MAX_SITES_LISTED])
        listed += ", ..." if len(names) > _MAX_SITES_LISTED else ""
        message = format_message(
            f"The gradient along {listed or 'the position'} misses changes of the log density: "
            f"{total:.3g} nats, {by_gradient:.3g} by the gradient.",
            "write the model without rounding, comparisons (`where` on a parameter), "
            "`stop_gradient` and wrong custom derivatives, or sample the site without gradients "
            "in a block of `numpyro.infer.Gibbs`.",
            "inconsistent-gradient",
        )
        kind = ModelWarningKind.INCONSISTENT_GRADIENT
        model_warnings.append(ModelWarning(names, kind, message))
    return model_warnings


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


def compute_hidden_change(
    values: np.ndarray, slopes: np.ndarray, relative_precision: float
) -> tuple[float, float, float]:
    """Return the change of a function that its slopes do not explain.

    :param values: values at equidistant points, shape ``(n,)``.
    :param slopes: derivatives there times the distance, shape ``(n,)``.
    :return: change beyond the slopes about each interval; absolute change of the values; absolute
        change by the slopes. Each is summed over the intervals.
    """
    change = np.diff(values)
    # Slopes at the two ends of each interval and at the points next to these.
    padded = np.pad(slopes, 1, mode="edge")
    neighbours = np.stack([padded[k : k + len(change)] for k in range(4)])
    low, high = neighbours.min(0), neighbours.max(0)
    rounding = _CONSISTENCY_ROUNDING_ULPS * relative_precision * np.abs(values).max()
    tolerance = (high - low) / 2.0 + rounding
    beyond = np.maximum(change - high, low - change) - tolerance
    hidden = float(np.maximum(beyond, 0.0).sum())
    by_slopes = float(np.abs(slopes[:-1] + slopes[1:]).sum() / 2.0)
    return hidden, float(np.abs(change).sum()), by_slopes


def find_nonadditive_plates(
    batched_gradients: BatchedGradients, preconditioner: Preconditioner, q: np.ndarray
) -> list[ModelWarning]:
    """Return a warning for each plate whose log likelihood is not additive over observations.

    :param q: preconditioned positions in the bulk of the posterior, shape ``(k, d)``.
    """
    if batched_gradients.potential.is_stochastic:
        return []
    # Separate from the warm-up's generator, so that the check does not change its choices.
    rng = np.random.default_rng(0)
    plates = [p for group in batched_gradients.plate_groups for p in group]
    positions = preconditioner.to_position(q[:_NUM_ADDITIVITY_TRIALS])
    model_warnings = []
    for plate in plates:
        can_split = plate.shards is None and plate.subsample_size > 1
        if can_split and _is_nonadditive(batched_gradients, plate, plates, positions, rng):
            message = format_message(
                f"The log likelihood of plate '{plate.name}' is not additive over observations.",
                "compute means, SDs, sums and ranks on the full data before the model, not on the "
                "minibatch, or leave out `subsample_size`.",
                "non-additive-likelihood",
            )
            model_warnings.append(ModelWarning((), ModelWarningKind.NON_ADDITIVE, message))
    return model_warnings


def _is_nonadditive(
    batched_gradients: BatchedGradients,
    plate: Plate,
    plates: list[Plate],
    positions: np.ndarray,
    rng: np.random.Generator,
) -> bool:
    """Return True if halves of a plate's minibatches interact in most of the trials."""
    batch_size = plate.subsample_size
    half = batch_size // 2
    minibatches = []
    for _ in range(_NUM_ADDITIVITY_TRIALS):
        a, b = rng.integers(0, plate.size, (2, batch_size - half))
        # Copies of one row each: no mean or SD of a minibatch hides them.
        r, s = (np.full(half, row) for row in rng.integers(0, plate.size, 2))
        minibatches += [np.concatenate(halves) for halves in ((a, r), (b, s), (a, s), (b, r))]
    num = len(minibatches)
    indices = {
        p.name: np.tile(np.arange(p.subsample_size, dtype=np.int32), (num, 1)) for p in plates
    }
    indices[plate.name] = np.stack(minibatches).astype(np.int32)
    position_index = np.repeat(np.arange(_NUM_ADDITIVITY_TRIALS) % len(positions), 4)
    results = batched_gradients.evaluate_minibatches(
        positions, indices, position_index, np.arange(num)
    )
    values = np.concatenate([r.values for r in results])
    u_ar, u_bs, u_as, u_br = values.reshape(_NUM_ADDITIVITY_TRIALS, 4).T
    precision = float(np.finfo(batched_gradients.potential.dtype).eps)
    with np.errstate(invalid="ignore"):
        interaction = np.abs((u_ar - u_as) - (u_br - u_bs))
        own_effects = np.abs(u_ar - u_as) + np.abs(u_ar - u_br)
        rounding = _ADDITIVITY_ROUNDING_ULPS * precision * np.abs(values).max()
        is_interacting = interaction > _MAX_INTERACTION_FRACTION * own_effects + rounding
    return bool(is_interacting.sum() > _NUM_ADDITIVITY_TRIALS // 2)
