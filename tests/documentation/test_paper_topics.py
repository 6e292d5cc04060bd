"""The papers' experiment with topics at toy size, and its parts where they are known exactly."""

import importlib
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

FOLDER = str(Path(__file__).parents[2] / "benchmarks" / "papers")
WORDS = np.array([0, 1, 1])
TOPICS = np.array([[0.7, 0.3], [0.2, 0.8]])


@pytest.fixture(scope="module", autouse=True)
def papers():
    pytest.importorskip("matplotlib")
    sys.path.insert(0, FOLDER)
    yield
    sys.path.remove(FOLDER)


def module(name):
    return importlib.import_module(name)


def exact_shares(alpha):
    """Means of a document's shares given its words, by all topics that the words may have."""
    total, mean = 0.0, np.zeros(2)
    for topics in itertools.product(range(2), repeat=len(WORDS)):
        counts = np.bincount(topics, minlength=2)
        own = np.prod([TOPICS[k, w] for k, w in zip(topics, WORDS, strict=True)])
        for n in counts:
            own *= np.prod(alpha + np.arange(n))
        total += own
        mean += own * (alpha + counts) / (2 * alpha + len(WORDS))
    return mean / total


def test_sweeps_end_in_the_posterior_of_the_shares():
    model = module("topics_model")
    num = 4_000
    p = jnp.broadcast_to(jnp.asarray(TOPICS.T[WORDS], jnp.float32), (num, 3, 2))
    is_word = jnp.ones((num, 3), bool)
    sweep = jax.jit(lambda shares, key: model._sweep(p, is_word, shares, key))
    shares = jnp.full((num, 2), 0.5)
    for key in random.split(random.key(0), 30):
        shares = sweep(shares, key)
    found = np.asarray(shares, np.float64)
    error = found.std(0) / np.sqrt(num)
    assert (np.abs(found.mean(0) - exact_shares(model.ALPHA)) < 4.0 * error).all()


def test_completion_by_a_single_topic():
    model = module("topics_model")
    words = np.array([[0, 1, 1, 0, 2, -1], [2, 2, -1, -1, -1, -1]])
    topics = jnp.array([[0.2, 0.3, 0.5]])
    found = model.completed(topics, words, random.key(0))
    np.testing.assert_allclose(found, [[0.3, 0.2, 1.0], [0.5, 1.0, 1.0]], rtol=1e-6)
    expected = (0.3 * 0.2 * 0.5) ** (-1 / 3)
    np.testing.assert_allclose(model.perplexity(found, words), expected, rtol=1e-6)


def test_a_file_of_counts():
    (row,) = module("topics_data")._cut(["2 4:2 1:1"], 5, 0)
    assert sorted(row[:3]) == [1, 4, 4]
    assert (row[3:] == -1).all()


@pytest.mark.slow
def test_topics_are_found():
    topics = module("topics")
    data, size = module("topics_data").made_up(60, 30, 24), topics.Size(4, 10, 10, 8, 2, 1, 4)
    sampler = topics.SAMPLERS["SGRLD"]._replace(step_sizes=(1e-5, 1e-2))
    idle, found = topics.grid(sampler, None, data, size, 0)
    assert found.diverging == 0.0
    assert (found.path < 30.0).all()  # a guess among 30 words
    assert found.perplexity < 0.75 * idle.perplexity
