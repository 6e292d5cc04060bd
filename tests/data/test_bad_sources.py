"""Sources of rows that fail, or are none: errors that name them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import HostArray, SGHMCSplit
from tests.contract.kernels import quietly
from tests.data.host_rows import (
    BATCH,
    Source,
    X,
    Y,
    by_index,
    by_subsample,
    fit,
)


def fails(array, rows):
    raise OSError("disk on fire")


def too_few(array, rows):
    return array[rows][:-1]


def with_gaps(array, rows):
    return np.where(rows == 7, np.nan, array[rows])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (fails, r"HostArray\('y', .*could not read .*rows between .*: OSError: disk on fire"),
        (too_few, r"HostArray\('y', .*gave shape \(.*was expected"),
        (with_gaps, r"HostArray\('y', .*missing or infinite values, for example in row"),
    ],
)
def test_a_bad_source_is_named_before_sampling(answer, message):
    with pytest.raises(RuntimeError, match=message) as caught:
        fit(X, HostArray(Source(Y, answer), name="y"))
    assert type(caught.value) is RuntimeError


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_is_not_finite_is_found_and_large_numbers_are_not(wrong, dtype):
    """Squares of large numbers are beyond the type, as those of infinite ones."""
    values = np.full((5, 3), np.finfo(dtype).max, dtype)
    np.testing.assert_array_equal(HostArray(values).read(np.arange(5)), values)
    values[3, 1] = wrong
    with pytest.raises(RuntimeError, match="missing or infinite values, for example in row 3"):
        HostArray(values).read(np.arange(5))


@pytest.mark.parametrize("reads", [1, 5, 20])
def test_a_bad_source_is_named_whenever_it_fails(reads):
    def fails_in_time(array, rows):
        if len(source.asked) > reads:
            raise OSError("disk on fire")
        return array[rows]

    source = Source(Y, fails_in_time)
    with pytest.raises(RuntimeError, match=r"HostArray\('y', .*: OSError: disk on fire") as caught:
        fit(X, HostArray(source, name="y"))
    assert type(caught.value) is RuntimeError


def test_numbers_of_other_machines():
    foreign = HostArray(X.astype(X.dtype.newbyteorder(">")))
    np.testing.assert_array_equal(foreign[np.array([3, 1])], X[[3, 1]])
    assert foreign.dtype == np.float32


@pytest.mark.slow
def test_a_source_that_fails_later_is_named_too():
    source = Source(Y)
    kernel = SGHMCSplit(by_index, step_size=0.3, num_steps=3)
    host = HostArray(source, name="y")
    mcmc = quietly(kernel, num_warmup=4, num_samples=4)
    mcmc.run(jax.random.key(0), X, host, batch_size=BATCH)
    source.answer = fails
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(RuntimeError, match="disk on fire"):
        mcmc.run(jax.random.key(1), X, host, batch_size=BATCH)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([1.0, 2.0], "a shape and a dtype, but got list"),
        (np.float32(3), r"array with rows, but got shape \(\)"),
        (np.zeros((0, 3)), r"array with rows, but got shape \(0, 3\)"),
        (np.array(["a"]), "integers, floats or booleans"),
        (SimpleNamespace(shape=(2**31, 3), dtype=np.float32), "indices of rows are 32-bit"),
        (SimpleNamespace(shape=(3,), dtype=np.float32, iloc=None), "pass its to_numpy"),
    ],
)
def test_what_is_no_source(source, message):
    with pytest.raises(ValueError, match=message):
        HostArray(source)


def test_what_the_device_cannot_hold():
    with pytest.raises(RuntimeError, match="missing or infinite values"):
        HostArray(np.array([1.0, 1e39]))[np.arange(2)]
    with pytest.raises(RuntimeError, match="some values are masked"):
        HostArray(np.ma.masked_equal(np.arange(5.0), 3.0))[np.arange(5)]


def test_lengths_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"'rows' has size 3000, but HostArray\('short'.*2990"):
        fit(X, HostArray(Y[:-10], name="short"))
    with pytest.raises(ValueError, match=r"'rows' has size 3000, but HostArray\('short'.*2990"):
        fit(X, HostArray(Y[:-10], name="short"), by_subsample)


def test_the_whole_array_cannot_be_used():
    def model(X, y, batch_size=None):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        mean = jnp.asarray(X) @ beta
        with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mean[i], 1.0), obs=y[i])

    with pytest.raises((TypeError, ValueError), match="never in memory as a whole"):
        fit(HostArray(X, name="X"), Y, model)
    with pytest.raises(TypeError, match="indexed by rows"):
        HostArray(X)[X[:, 0] > 0]
    with pytest.raises(RuntimeError, match="has no rows 3000, 4000"):
        HostArray(X)[np.array([3000, 1, 4000])]
