"""Streams of minibatches for tests."""

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
    PalindromeSubsampling,
    ShuffledSubsampling,
    StreamState,
    Subsampling,
)

MIN_P_VALUE = 1e-6
"""Seeds are fixed, so that a test that passes once passes always."""

each_subsampling = pytest.mark.parametrize("name", sorted(SUBSAMPLINGS))


class Stream(NamedTuple):
    """A subsampling method on a plate of a given size."""

    subsampling: Subsampling
    size: int
    batch_size: int

    def init(self, key):
        return StreamState.init(key)

    def sample_indices(self, state, key, num_steps):
        return self.subsampling.sample_indices(state, key, num_steps, self.size, self.batch_size)


def iid(size, batch_size):
    return Stream(IIDSubsampling(), size, batch_size)


def shuffled(size, batch_size):
    return Stream(ShuffledSubsampling(), size, batch_size)


def palindrome(size, batch_size):
    return Stream(PalindromeSubsampling(), size, batch_size)


def contiguous(size, batch_size):
    return Stream(ContiguousSubsampling(), size, batch_size)


def make_stream(name, size, batch_size):
    return Stream(SUBSAMPLINGS[name], size, batch_size)


@partial(jax.jit, static_argnames=("stream", "num_steps"))
def sample_indices(stream, state, key, num_steps):
    return stream.sample_indices(state, key, num_steps)


def sample_in_parts(stream, seed, lengths):
    """Return the state after calls of the given numbers of steps, and all indices."""
    state, indices = stream.init(random.key(seed)), []
    for call, num_steps in enumerate(lengths):
        state, new = sample_indices(stream, state, random.key(1000 + call), num_steps)
        assert new.shape == (num_steps, stream.batch_size)
        assert new.dtype == jnp.int32
        indices.append(np.asarray(new))
    return state, np.concatenate(indices)


@partial(jax.jit, static_argnames=("stream", "num_steps"))
def sample_from_states(stream, states, keys, num_steps):
    return jax.vmap(lambda state, key: stream.sample_indices(state, key, num_steps)[1])(
        states, keys
    )


@cache
def sample_from_seeds(stream, num_steps, num_seeds):
    """Return indices of the first steps, shape ``(num_seeds, num_steps, batch_size)``."""
    bits = np.random.default_rng(7).integers(0, 2**32, (num_seeds, 4), dtype=np.uint32)
    zeros = np.zeros(num_seeds, np.uint32)
    keys = random.wrap_key_data(bits[:, 2:])
    states = StreamState(bits[:, :2], zeros, zeros)
    return np.asarray(sample_from_states(stream, states, keys, num_steps))


def assert_uniform(values, num_cells):
    """Values are uniform over ``range(num_cells)``, by a chi-square test."""
    counts = np.bincount(np.asarray(values).ravel(), minlength=num_cells)
    assert len(counts) == num_cells
    assert stats.chisquare(counts).pvalue > MIN_P_VALUE
