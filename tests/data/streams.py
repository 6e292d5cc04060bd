"""Streams of minibatches as tests draw from them."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_sgmcmc.data.subsampling import (
    SUBSAMPLINGS,
    ContiguousSubsampling,
    IIDSubsampling,
    ShuffledSubsampling,
    StreamState,
    Subsampling,
)

IMPROBABLE = 1e-6
"""Threshold of p-values; seeds are fixed, so that a test which passes once passes always."""

each_stream = pytest.mark.parametrize("name", sorted(SUBSAMPLINGS))


class Stream(NamedTuple):
    """A subsampling method on a plate of a size."""

    subsampling: Subsampling
    size: int
    batch_size: int

    def init(self, key):
        return StreamState.init(key)

    def sample_indices(self, state, key, num_steps):
        return self.subsampling.sample_indices(state, key, num_steps, self.size, self.batch_size)


def iid(size, batch_size):
    return Stream(IIDSubsampling(), size, batch_size)


def epoch(size, batch_size):
    return Stream(ShuffledSubsampling(), size, batch_size)


def blocks(size, batch_size):
    return Stream(ContiguousSubsampling(), size, batch_size)


def named(name, size, batch_size):
    return Stream(SUBSAMPLINGS[name], size, batch_size)


@partial(jax.jit, static_argnames=("stream", "num_steps"))
def draw(stream, state, key, num_steps):
    return stream.sample_indices(state, key, num_steps)


def walk(stream, seed, lengths):
    """The state after successive draws of the given numbers of steps, and all their rows."""
    state, rows = stream.init(random.key(seed)), []
    for call, num_steps in enumerate(lengths):
        state, new = draw(stream, state, random.key(1000 + call), num_steps)
        assert new.shape == (num_steps, stream.batch_size)
        assert new.dtype == jnp.int32
        rows.append(np.asarray(new))
    return state, np.concatenate(rows)


@partial(jax.jit, static_argnames=("stream", "num_steps"))
def first_rows(stream, states, keys, num_steps):
    return jax.vmap(lambda state, key: stream.sample_indices(state, key, num_steps)[1])(
        states, keys
    )


@cache
def of_many_seeds(stream, num_steps, num_seeds):
    """Rows of the first steps, shape ``(num_seeds, num_steps, batch_size)``."""
    bits = np.random.default_rng(7).integers(0, 2**32, (num_seeds, 4), dtype=np.uint32)
    start = np.zeros(num_seeds, np.uint32)
    keys = random.wrap_key_data(bits[:, 2:])
    return np.asarray(first_rows(stream, StreamState(bits[:, :2], start, start), keys, num_steps))


def assert_even(values, num_cells):
    """That the values are uniform over ``range(num_cells)``, by a chi-square test."""
    counts = np.bincount(np.asarray(values).ravel(), minlength=num_cells)
    assert len(counts) == num_cells
    assert stats.chisquare(counts).pvalue > IMPROBABLE
