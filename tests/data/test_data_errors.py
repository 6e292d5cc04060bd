"""Data that cannot be read or used raise errors that name them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import HostArray, SGHMCSplit, ShardedArray
from numpyro_sgmcmc.errors import DataReadError
from tests.contract.kernels import quietly
from tests.data.host_rows import BATCH, Source, X, Y, by_index, by_subsample, fit


def raise_os_error(array, indices):
    raise OSError("disk on fire")


# --- HostArray


@pytest.mark.parametrize("num_reads", [1, 5, 20])
def test_host_array_of_a_source_that_fails_later_raises(num_reads):
    def fail_after_reads(array, indices):
        if len(source.read_sizes) > num_reads:
            raise OSError("disk on fire")
        return array[indices]

    source = Source(Y, fail_after_reads)
    with pytest.raises(DataReadError, match=r"HostArray\('y'.*disk on fire"):
        fit(X, HostArray(source, name="y"))


@pytest.mark.slow
def test_host_array_of_a_source_that_fails_in_the_next_run_raises():
    source = Source(Y)
    host = HostArray(source, name="y")
    mcmc = quietly(SGHMCSplit(by_index, step_size=0.3, num_steps=3), num_warmup=4, num_samples=4)
    mcmc.run(jax.random.key(0), X, host, batch_size=BATCH)
    source.answer = raise_os_error
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(RuntimeError, match="disk on fire"):  # of JAX: the kernel is not called
        mcmc.run(jax.random.key(1), X, host, batch_size=BATCH)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_host_array_with_a_nonfinite_value_names_its_row(wrong, dtype):
    """Large finite values pass, although their squares overflow."""
    values = np.full((5, 3), np.finfo(dtype).max, dtype)
    np.testing.assert_array_equal(HostArray(values).read(np.arange(5)), values)
    values[3, 1] = wrong
    with pytest.raises(DataReadError, match=r"missing.*row 3"):
        HostArray(values).read(np.arange(5))


@pytest.mark.parametrize(
    ("values", "keyword"),
    [
        (np.array([1.0, 1e39]), "infinite"),
        (np.ma.masked_equal(np.arange(5.0), 3.0), "masked"),
        (np.array([0, 2**40]), "integers.*int32"),
        (Source(np.array([0, 2**40])), "integers.*int32"),
    ],
    ids=["beyond float32", "masked", "beyond int32", "integers of a wider type"],
)
def test_host_array_of_values_that_the_device_cannot_hold_raises(values, keyword):
    if isinstance(values, Source):
        values.dtype = np.dtype(np.int32)
    with pytest.raises(DataReadError, match=keyword):
        HostArray(values)[np.arange(values.shape[0])]


def test_host_array_of_another_byte_order_is_converted():
    foreign = HostArray(X.astype(X.dtype.newbyteorder(">")))
    np.testing.assert_array_equal(foreign[np.array([3, 1])], X[[3, 1]])
    assert foreign.dtype == np.float32


@pytest.mark.parametrize(
    ("source", "keyword"),
    [
        ([1.0, 2.0], "list"),
        (None, "NoneType"),
        ({}, "dict"),
        (HostArray(Y), "HostArray already"),
        (np.float32(3), r"shape \(\)"),
        (np.zeros((0, 3)), r"shape \(0, 3\)"),
        (np.array(["a"]), "dtype"),
        (SimpleNamespace(shape=(2**31, 3), dtype=np.float32), "32-bit"),
        (SimpleNamespace(shape=(3,), dtype=np.float32, iloc=None), "to_numpy"),
    ],
)
def test_host_array_of_something_else_raises(source, keyword):
    with pytest.raises(ValueError, match=rf"HostArray.*{keyword}"):
        HostArray(source)


@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 4)])
def test_host_array_of_a_file_whose_header_is_read_as_rows_raises(tmp_path, shape):
    file = tmp_path / "x.npy"
    np.save(file, np.arange(8.0, dtype=np.float32))
    with pytest.raises(ValueError, match=r"header.*\n?.*np\.load"):
        HostArray(np.memmap(file, np.float32, "r", shape=shape))
    rows = HostArray(np.load(file, mmap_mode="r"))
    assert np.array_equal(rows[np.arange(8)], np.arange(8.0))


@pytest.mark.parametrize("model", [by_index, by_subsample])
def test_host_array_of_another_length_than_the_plate_raises(model):
    with pytest.raises(ValueError, match=r"'rows'.*3000.*HostArray\('short'.*2990"):
        fit(X, HostArray(Y[:-10], name="short"), model)


def test_host_array_used_as_a_whole_raises():
    def model(X, y, batch_size=None):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        mean = jnp.asarray(X) @ beta
        with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mean[i], 1.0), obs=y[i])

    with pytest.raises((TypeError, ValueError), match=r"HostArray.*whole"):
        fit(HostArray(X, name="X"), Y, model)


def test_host_array_with_a_wrong_index_raises():
    with pytest.raises(TypeError, match=r"HostArray.*indexed"):
        HostArray(X)[X[:, 0] > 0]
    with pytest.raises(DataReadError, match="rows 3000, 4000"):
        HostArray(X)[np.array([3000, 1, 4000])]


# --- ShardedArray


def test_sharded_array_of_all_rows_on_one_device_has_its_values():
    x = np.arange(12.0).reshape(4, 3)
    array = ShardedArray(x, name="x")
    assert (array.shape, array.ndim, len(array)) == ((4, 3), 2, 4)
    np.testing.assert_array_equal(array[1:3], x[1:3])
    np.testing.assert_array_equal(array[np.array([3, -4]), 1], x[[3, 0], 1])
    np.testing.assert_array_equal(array[-1], x[-1])
    assert repr(array) == "ShardedArray('x', shape=(4, 3), dtype=float32, shards=1)"
    foreign = ShardedArray(x.astype(">f4"))
    np.testing.assert_array_equal(foreign[np.array([3, 1])], x[[3, 1]])


@pytest.mark.parametrize("dtype", [np.int64, np.float32, bool])
def test_sharded_array_of_rows_without_columns_is_empty(dtype):
    array = ShardedArray(np.zeros((3, 0), dtype))
    assert array.shape == (3, 0)
    assert array[np.array([2])].shape == (1, 0)


def test_sharded_array_with_a_wrong_use_raises():
    array = ShardedArray(np.arange(4.0))
    with pytest.raises(TypeError, match=r"ShardedArray.*whole"):
        np.asarray(array)
    with pytest.raises(TypeError, match=r"ShardedArray.*indexed"):
        array[0.5]


@pytest.mark.parametrize(
    ("values", "keyword"),
    [
        (np.ma.masked_equal(np.arange(5.0), 3.0), "masked"),
        (np.array([0.0, np.nan, 1.0]), "missing.*row 1"),
        (np.array([[0.0, 1.0], [np.inf, 1.0]], np.float16), "infinite.*row 1"),
        (np.array([0.0, 1e300]), "infinite.*row 1"),
        (np.array([0, 2**40]), "int32"),
        (np.array([0, 2**40], np.uint64), "uint32"),
        (np.array(["a", "b"]), "dtype"),
        (3.0, "shape"),
        (np.zeros((0, 2)), "shape"),
    ],
    ids=str,
)
def test_sharded_array_of_values_that_devices_cannot_hold_raises(values, keyword):
    with pytest.raises(ValueError, match=keyword):
        ShardedArray(values)


def test_sharded_array_of_an_array_with_an_empty_mask_has_its_values():
    array = ShardedArray(np.ma.masked_equal(np.arange(5.0), 9.0))
    np.testing.assert_array_equal(array[np.arange(5)], np.arange(5.0))
