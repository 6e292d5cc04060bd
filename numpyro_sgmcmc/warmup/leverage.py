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

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.target import Decisive, Target
from numpyro_sgmcmc.warmup.ahead import compile_ahead
from numpyro_sgmcmc.warmup.effort import MANY_DIM
from numpyro_sgmcmc.warmup.variational import MeanField

__all__ = ["bends", "decisive_rows", "most_decisive", "prepare"]

_PAIRS = 6  # of positions at which each row is looked at
_ROWS = 8_192  # looked at in one go
_MUCH = 0.5  # of the noise that has to be saved for rows to be in every minibatch
_NOISY = 0.02  # variance of the noise, summed over whitened coordinates, that shortens steps
_LARGEST_SHARE = 0.5  # of a minibatch


def decisive_rows(
    target: Target, arguments: Arguments, fit: MeanField, rng: np.random.Generator
) -> Decisive:
    """The rows that are to be in every minibatch, by plate; none where no few of them decide.

    One pass over the rows, without derivatives. Not for several plates, rows elsewhere than in
    memory, randomised likelihoods, local sites or very many coordinates.

    :param fit: where the posterior is, about.
    """
    if not _are_looked_for(target, arguments):
        return ()
    plate = target.plates[0]
    found = bends(target, arguments, fit, rng)
    num = most_decisive(found, plate.subsample_size)
    if not num:
        return ()
    rows = np.sort(np.argsort(-found, kind="stable")[:num])
    return ((plate.name, tuple(int(row) for row in rows)),)


def prepare(target: Target, arguments: Arguments) -> None:
    """Begin to compile :func:`decisive_rows`."""
    if not _are_looked_for(target, arguments):
        return
    plate = target.plates[0]
    positions = jax.ShapeDtypeStruct((2 * _PAIRS + 1, target.dim), target.dtype)
    rows = {plate.name: jax.ShapeDtypeStruct((min(_ROWS, plate.size),), np.int32)}
    compile_ahead(_bends, target, arguments, positions, rows)


def _are_looked_for(target: Target, arguments: Arguments) -> bool:
    """Whether a pass tells what rows decide."""
    is_plain = len(target.plates) == 1 and target.potentials_of_rows is not None
    elsewhere = arguments.hosts or arguments.sharded or target.shards is not None
    if not is_plain or elsewhere or target.is_randomized or target.locals is not None:
        return False
    return target.dim <= MANY_DIM and target.plates[0].subsample_size < target.plates[0].size


def bends(
    target: Target, arguments: Arguments, fit: MeanField, rng: np.random.Generator
) -> np.ndarray:
    """Variance over the fit of each row's even remainder, shape ``(rows,)``."""
    plate = target.plates[0]
    deviations = fit.sd * rng.standard_normal((_PAIRS, target.dim))
    both = np.concatenate([fit.mean[None], fit.mean + deviations, fit.mean - deviations])
    positions = both.astype(target.dtype)
    together = min(_ROWS, plate.size)
    found = np.zeros(plate.size)
    for first in range(0, plate.size, together):
        first = min(first, plate.size - together)  # as many each time: one program
        rows = {plate.name: np.arange(first, first + together, dtype=np.int32)}
        found[first : first + together] = _bends(target, arguments, positions, rows)
    return np.where(np.isfinite(found), found, 0.0)


@partial(jax.jit, static_argnames="target")
def _bends(target: Target, arguments: Arguments, positions: Array, rows: Indices) -> Array:
    each = jax.lax.map(lambda q: target.row_potentials(q, rows, arguments), positions)
    above, below = jnp.split(each[1:], 2)
    return jnp.var((above + below) / 2.0 - each[0], axis=0, ddof=1)


def most_decisive(bends: np.ndarray, batch: int) -> int:
    """How many rows are to be in every minibatch.

    :param bends: of each row, shape ``(rows,)``.
    :param batch: rows of a minibatch.
    """
    size, most = len(bends), int(_LARGEST_SHARE * batch)
    falling = -np.sort(-bends)
    rest = bends.sum() - np.concatenate([[0.0], np.cumsum(falling[:most])])
    num = np.arange(len(rest))
    noise = 2.0 * (size - num) / (batch - num) * np.maximum(rest, 0.0)
    best = int(np.argmin(noise))
    is_worth_it = noise[0] > _NOISY and noise[best] < _MUCH * noise[0]
    return best if is_worth_it else 0
