r"""Rows that decide: few that tell of some parameter what all others do not.

A covariate that is other than zero in five of 50,000 rows is learnt from these alone, and a
minibatch of a hundred holds one of them once in a hundred steps, five hundredfold: no step size
makes that right. In every minibatch, weighted so that the gradient stays unbiased, they make no
noise.

They are known by how their share of the potential bends over the posterior. About an anchor a row's
share is :math:`u_i(a) + \delta \cdot \nabla u_i + r_i(\delta)`; control variates take the first two
terms exactly, and the even part of what is left,
:math:`\tfrac12(u_i(a + \delta) + u_i(a - \delta)) - u_i(a)`, needs no derivative. With m rows in
every minibatch of B the noise goes as

.. math:: \frac{N - m}{B - m} \sum_{i > m} \operatorname{Var} r_i

over the rows in falling order, which has its minimum where the rows no longer decide.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.adaptation.budget import HIGH_DIM
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.model.potential import IncludedRows, Potential

__all__ = [
    "choose_num_influential",
    "compute_remainder_variances",
    "find_influential_rows",
    "precompile_influential_rows",
]

_NUM_ANTITHETIC_PAIRS = 6  # of positions at which each row is looked at
_MAX_ROWS_PER_CALL = 8_192  # looked at in one go
_MAX_REMAINING_NOISE_FRACTION = (
    0.5  # of the noise that has to be saved for rows to be in every minibatch
)
_MIN_GRADIENT_NOISE_VARIANCE = (
    0.02  # variance of the noise, summed over whitened coordinates, that shortens steps
)
_MAX_INFLUENTIAL_BATCH_FRACTION = 0.5  # of a minibatch


def find_influential_rows(
    potential: Potential, arguments: Arguments, variational_fit: MeanField, rng: np.random.Generator
) -> IncludedRows:
    """The rows that are to be in every minibatch, by plate; none where no few of them decide.

    One pass over the rows, without derivatives. Not for several plates, rows elsewhere than in
    memory, randomised likelihoods, local sites or very many coordinates.

    :param variational_fit: where the posterior is, about.
    """
    if not _can_find_influential_rows(potential, arguments):
        return ()
    plate = potential.plates[0]
    found = compute_remainder_variances(potential, arguments, variational_fit, rng)
    num = choose_num_influential(found, plate.subsample_size)
    if not num:
        return ()
    rows = np.sort(np.argsort(-found, kind="stable")[:num])
    return ((plate.name, tuple(int(row) for row in rows)),)


def precompile_influential_rows(potential: Potential, arguments: Arguments) -> None:
    """Begin to compile :func:`decisive_rows`."""
    if not _can_find_influential_rows(potential, arguments):
        return
    plate = potential.plates[0]
    positions = jax.ShapeDtypeStruct(
        (2 * _NUM_ANTITHETIC_PAIRS + 1, potential.dim), potential.dtype
    )
    rows = {plate.name: jax.ShapeDtypeStruct((min(_MAX_ROWS_PER_CALL, plate.size),), np.int32)}
    aot_compile(_evaluate_remainder_variances, potential, arguments, positions, rows)


def _can_find_influential_rows(potential: Potential, arguments: Arguments) -> bool:
    """Whether a pass tells what rows decide."""
    is_plain = len(potential.plates) == 1 and potential.pointwise_potential_fn is not None
    elsewhere = arguments.host_arrays or arguments.sharded_arrays or potential.shards is not None
    if not is_plain or elsewhere or potential.is_stochastic or potential.local_latents is not None:
        return False
    return (
        potential.dim <= HIGH_DIM and potential.plates[0].subsample_size < potential.plates[0].size
    )


def compute_remainder_variances(
    potential: Potential, arguments: Arguments, variational_fit: MeanField, rng: np.random.Generator
) -> np.ndarray:
    """Variance over the fit of each row's even remainder, shape ``(rows,)``."""
    plate = potential.plates[0]
    deviations = variational_fit.sd * rng.standard_normal((_NUM_ANTITHETIC_PAIRS, potential.dim))
    both = np.concatenate(
        [
            variational_fit.mean[None],
            variational_fit.mean + deviations,
            variational_fit.mean - deviations,
        ]
    )
    positions = both.astype(potential.dtype)
    together = min(_MAX_ROWS_PER_CALL, plate.size)
    found = np.zeros(plate.size)
    for first in range(0, plate.size, together):
        first = min(first, plate.size - together)  # as many each time: one program
        rows = {plate.name: np.arange(first, first + together, dtype=np.int32)}
        found[first : first + together] = _evaluate_remainder_variances(
            potential, arguments, positions, rows
        )
    return np.where(np.isfinite(found), found, 0.0)


@partial(jax.jit, static_argnames="potential")
def _evaluate_remainder_variances(
    potential: Potential, arguments: Arguments, positions: Array, indices: Indices
) -> Array:
    each = jax.lax.map(lambda q: potential.pointwise_potentials(q, indices, arguments), positions)
    above, below = jnp.split(each[1:], 2)
    return jnp.var((above + below) / 2.0 - each[0], axis=0, ddof=1)


def choose_num_influential(remainder_variances: np.ndarray, batch_size: int) -> int:
    """How many rows are to be in every minibatch.

    :param remainder_variances: of each row, shape ``(rows,)``.
    :param batch_size: rows of a minibatch.
    """
    size, most = len(remainder_variances), int(_MAX_INFLUENTIAL_BATCH_FRACTION * batch_size)
    falling = -np.sort(-remainder_variances)
    rest = remainder_variances.sum() - np.concatenate([[0.0], np.cumsum(falling[:most])])
    num = np.arange(len(rest))
    noise = 2.0 * (size - num) / (batch_size - num) * np.maximum(rest, 0.0)
    best = int(np.argmin(noise))
    is_worth_it = (
        noise[0] > _MIN_GRADIENT_NOISE_VARIANCE
        and noise[best] < _MAX_REMAINING_NOISE_FRACTION * noise[0]
    )
    return best if is_worth_it else 0
