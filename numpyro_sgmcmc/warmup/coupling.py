r"""Whether a row's share in the potential is its own.

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

import numpy as np

from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.findings import ModelWarning
from numpyro_sgmcmc.warmup.row_gradients import BatchedGradients

__all__ = ["find_nonadditive_plates"]

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
    for some in batched_gradients.evaluate_pass_minibatches(positions, chosen, at, np.arange(num)):
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
        "coupled",
        f"The rows of the plate '{plate_name}' do not add up: what one adds to the log density depends "
        "on which others are in the minibatch. A mean, a standard deviation, a sum or a rank taken "
        "over the minibatch does that, and chains sample another posterior. Take it over all rows, "
        "before the model, or leave out `subsample_size`.",
    )
