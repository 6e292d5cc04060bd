"""HostArray: the draws are those of the same rows in memory, and how rows are read."""

import os
import pickle
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.util import tqdm_auto

from numpyro_sgmcmc import HostArray, bias_report, log_likelihood
from numpyro_sgmcmc.adaptation.step_size import MONITOR_INTERVAL
from numpyro_sgmcmc.data.row_proxies import PlateIndexRegistry, PrefetchedRows, RowLookup
from numpyro_sgmcmc.sampling.prefetch import compute_buffer_length
from tests.data.host_rows import (
    BATCH,
    GIVEN,
    NUM_ROWS,
    Source,
    X,
    Y,
    assert_same,
    by_column,
    by_index,
    by_subsample,
    fit,
    get_draws,
)


@pytest.fixture(scope="module")
def long_run():
    """A run whose rows are read in many blocks, and its array."""
    host = HostArray(Source(X.copy()))
    return fit(host, Y, num_samples=1500, num_warmup=0), host


# --- Draws


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (by_index, {}),
        (by_column, {"subsampling": "palindrome"}),
        (by_subsample, {"subsampling": "iid", "gradient_estimator": "minibatch"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_run_of_rows_on_the_host_has_the_draws_of_rows_in_memory(model, options):
    in_memory = get_draws(fit(X, Y, model, options={**GIVEN, **options}))
    on_host = fit(HostArray(X), HostArray(Y), model, options={**GIVEN, **options})
    assert_same(get_draws(on_host), in_memory)


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 2])
def test_run_of_sequential_chains_has_the_draws_of_rows_in_memory(num_chains):
    settings = {"chain_method": "sequential", "num_chains": num_chains, "options": GIVEN}
    both = [fit(*data, **settings) for data in ((X, Y), (HostArray(X), HostArray(Y)))]
    assert_same(*map(get_draws, both))


@pytest.mark.slow
@pytest.mark.parametrize("gradient_estimator", ["minibatch", "control_variate"])
def test_run_continued_with_another_key_has_the_draws_of_rows_in_memory(gradient_estimator):
    """NumPyro replaces the key of the state: rows prefetched for the old key are discarded."""
    options = {**GIVEN, "subsampling": "iid", "gradient_estimator": gradient_estimator}
    first, continued = [], []
    for data in ((X, Y), (HostArray(X), Y)):
        mcmc = fit(*data, options=options)
        first.append(get_draws(mcmc))
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(jax.random.key(5), *data, batch_size=BATCH)
        continued.append(get_draws(mcmc))
    assert_same(*first)
    assert_same(*continued)


@pytest.mark.slow
def test_warmup_of_rows_on_the_host_finds_the_coordinates_of_rows_in_memory():
    """It reads other rows, in runs of neighbours, so that they agree statistically."""
    memory, host = (
        fit(*data, num_samples=2).sampler.adaptation.preconditioner
        for data in ((X, Y), (HostArray(X), HostArray(Y)))
    )
    sd = NUM_ROWS**-0.5
    assert np.abs(host.center - memory.center).max() < 0.3 * sd
    np.testing.assert_allclose(np.diag(host.factor), sd, rtol=0.05)
    np.testing.assert_allclose(np.diag(memory.factor), sd, rtol=0.05)


@pytest.mark.slow
def test_bias_report_of_rows_on_the_host_is_that_of_rows_in_memory():
    """With so much gradient noise, its moments are from rows that are not those of the steps."""
    options = {
        **GIVEN,
        "subsampling": "shuffled",
        "gradient_estimator": "minibatch",
        "step_size": 0.5,
    }
    options["num_steps"] = 2 * MONITOR_INTERVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        both = [
            fit(*data, options=options, num_samples=200)
            for data in ((X, Y), (HostArray(X), HostArray(Y)))
        ]
    assert both[0].sampler.adaptation.monitor_gradients.estimator is not None
    for full_data in (False, True):
        a, b = (bias_report(m, full_data=full_data, num_draws=50) for m in both)
        np.testing.assert_allclose(a.sd_inflation.value, b.sd_inflation.value, atol=1e-3)


# --- Passes over all rows


@pytest.mark.slow
def test_log_likelihood_of_rows_on_the_host_is_computed_by_chunks(long_run):
    """The last chunk overlaps with the one before."""
    mcmc, host = long_run
    num_reads = len(host.source.read_sizes)
    values = log_likelihood(mcmc)["y"]
    assert values.shape == (2, 1500, NUM_ROWS)
    chunk = host.source.read_sizes[-1]
    num_chunks = -(-NUM_ROWS // chunk)
    assert num_chunks > 1
    assert host.source.read_sizes[num_reads:] == [chunk] * num_chunks
    some = slice(None, None, 25)
    beta = get_draws(mcmc)[:, some]
    expected = dist.Normal(np.einsum("nd,csd->csn", X, beta), 1.0).log_prob(Y)
    np.testing.assert_allclose(values[:, some], expected, rtol=1e-4, atol=1e-5)
    rows = np.array([2999, 0, 5])
    np.testing.assert_allclose(log_likelihood(mcmc, rows)["y"], values[..., rows], rtol=1e-5)
    with pytest.raises(ValueError, match="rows"):
        log_likelihood(mcmc, [3000])


def test_model_on_all_rows_of_a_large_host_array_raises(long_run):
    mcmc, _ = long_run
    large = HostArray(SimpleNamespace(shape=(2**28, 2), dtype=np.float32), name="large")
    with pytest.raises(ValueError, match=r"HostArray\('large'.*log_likelihood"):
        mcmc.sampler.model(large, Y, batch_size=BATCH)


@pytest.mark.slow
def test_long_passes_show_progress(monkeypatch, capsys):
    def show_at_once(*args, **options):
        return tqdm_auto(*args, **{**options, "delay": 0.0})

    monkeypatch.setattr("numpyro_sgmcmc.progress.tqdm_auto", show_at_once)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    def read_slowly(array, indices):
        if indices.size == NUM_ROWS:
            time.sleep(0.15)  # bars are refreshed ten times per second at most
        return array[indices]

    host = HostArray(Source(X, read_slowly), name="X")
    options = {"step_size": 0.3, "subsampling": "iid"}
    mcmc = fit(host, Y, num_samples=5, options=options, progress_bar=True)
    shown = capsys.readouterr().err
    assert re.search(r"adapting: .*[1-9].* passes over 'X'", shown)
    assert re.search(r"adapting: pilot chains 00:0\d, about 00:\d\d left", shown)
    bias_report(mcmc, full_data=True, num_draws=4)
    shown = capsys.readouterr().err
    assert re.search(r"gradients.*: +[1-9]\d*%.*k rows/s", shown)


# --- Reads


def test_run_prefetches_rows_in_blocks(long_run):
    mcmc, host = long_run
    source, buffer = host.source, mcmc.last_state.prefetch_buffer
    (values,) = buffer.row_arrays
    length = values.shape[1]
    step_indices = {"rows": np.empty((3, BATCH), np.int32)}
    lookups = (RowLookup(host, "rows"),)
    assert length == compute_buffer_length(lookups, step_indices, num_chains=2) > 1
    assert 1 <= int(buffer.num_used[0]) <= length
    # Chunks of the warm-up, then blocks: the first is waited for, the others are prefetched.
    assert max(source.read_sizes) <= max(8192, 2 * 3 * BATCH * length)
    num_blocks = -(-1500 // length)
    num_prefetches = source.threads.count("numpyro_sgmcmc-reader_0")
    # No step of the two chains reads its own rows; the warm-up reads some thousand times.
    assert len(source.read_sizes) - num_prefetches < 1500 * 3 * 2
    assert num_blocks > 10
    assert num_blocks - 1 <= num_prefetches <= num_blocks + 1


@pytest.mark.parametrize("kind", ["memmap", "h5py", "zarr"])
def test_host_array_of_a_file_has_its_rows(kind, tmp_path):
    if kind == "memmap":
        source = np.memmap(tmp_path / "X.dat", np.float64, "w+", shape=X.shape)
        source[:] = X
    elif kind == "h5py":
        file = pytest.importorskip("h5py").File(tmp_path / "X.h5", "w")
        source = file.create_dataset("X", data=X)
    else:
        zarr = pytest.importorskip("zarr")
        source = zarr.create_array(tmp_path / "X.zarr", shape=X.shape, dtype=X.dtype)
        source[:] = X

    host = HostArray(source)
    rows = np.array([[5, 2], [NUM_ROWS - 1, 2]])
    np.testing.assert_array_equal(host[rows], X[rows])
    assert host.dtype == jnp.zeros(()).dtype
    np.testing.assert_array_equal(jax.jit(lambda i: host[i, 1])(rows), X[rows, 1])
    np.testing.assert_array_equal(host[3:9], X[3:9])
    np.testing.assert_array_equal(host[-1], X[-1])
    assert len(host) == NUM_ROWS
    assert host.ndim == 2


@pytest.mark.parametrize(
    "index",
    [
        lambda i, c: (i, c),
        lambda i, c: (i[:, None], c[None, :2]),
        lambda i, c: (i, slice(1, None)),
        lambda i, c: (i, Ellipsis, None),
        lambda i, c: (i[0], c),
        lambda i, c: (slice(2, 9, 3), c),
        lambda i, c: (i, 1),
    ],
)
def test_host_array_index_gives_what_jax_gives(index):
    rows, columns = np.array([5, 0, 7]), np.array([1, 0, 1])
    expected = jnp.asarray(X)[index(rows, columns)]
    np.testing.assert_array_equal(HostArray(X)[index(rows, columns)], expected)
    traced = jax.jit(lambda i, c: HostArray(X)[index(i, c)])
    np.testing.assert_array_equal(traced(rows, columns), expected)
    first, *_ = index(rows, columns)
    if first is rows:
        i = jnp.asarray(rows)
        prefetched = PrefetchedRows(
            HostArray(X), PlateIndexRegistry({"rows": i}), {"rows": jnp.asarray(X)[i]}
        )
        np.testing.assert_array_equal(prefetched[index(i, columns)], expected)


def measure_resident_files():
    """Return the megabytes of mapped files that are in this process's memory."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\s+(\d+) kB", status)[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("order", ["consecutive", "random"])
def test_host_array_of_a_memory_map_releases_its_pages(tmp_path, order):
    """A small part of 200 MB stays resident, although a random row loads 64 kB."""
    num, width = 50_000, 1_000
    np.zeros(num * width, np.float32).tofile(tmp_path / "X.dat")
    host = HostArray(np.memmap(tmp_path / "X.dat", np.float32, "r", shape=(num, width)))
    host.max_resident_bytes = 2**25
    rows = np.arange(num) if order == "consecutive" else np.random.default_rng(0).permutation(num)
    before, most = measure_resident_files(), 0.0
    for part in np.array_split(rows, 100):
        host.read(part)
        most = max(most, measure_resident_files())
    assert most - before < 100


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[7:][3:],
        lambda x: x[::-2],
        lambda x: x[:, 2:5],
        lambda x: x[:, 1],
        lambda x: x.reshape(-1, 2, 3),
        lambda x: x.T,
    ],
    ids=["all", "slice", "reversed", "columns", "column", "tensor", "transposed"],
)
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_rows_of_a_large_memory_map_are_those_of_the_array(tmp_path, view, mode):
    np.arange(613, dtype=np.float32).tofile(tmp_path / "X.dat")
    array = np.memmap(tmp_path / "X.dat", np.float32, mode, offset=13 * 4, shape=(100, 6))
    if mode != "r":
        array[20:25] += 0.5
    source = view(array)
    host = HostArray(source)
    host.max_resident_bytes = 0
    num = len(source)
    for rows in ([], [num - 1], [0, 1, 2, num - 2, num - 1, 3, 3, 1], np.arange(num)):
        np.testing.assert_array_equal(
            host.read(np.array(rows, int)), np.array(source)[np.array(rows, int)]
        )


def test_host_array_of_a_truncated_file_raises(tmp_path):
    """The system would kill the process."""
    np.zeros(100_000, np.float32).tofile(tmp_path / "X.dat")
    host = HostArray(np.memmap(tmp_path / "X.dat", np.float32, "r", shape=(10_000, 10)))
    host.read(np.arange(9_990, 10_000))
    os.truncate(tmp_path / "X.dat", 200_000)
    with pytest.raises(RuntimeError, match=r"X\.dat.*9990.*200000"):
        host.read(np.arange(9_990, 10_000))


def test_host_array_in_another_run_discards_prefetched_rows(long_run):
    mcmc, host = long_run
    assert host._prefetches
    host.source.array += 1.0
    mcmc.sampler.init(jax.random.key(0), 0, None, (host, Y), {"batch_size": BATCH})
    assert not host._prefetches


def test_host_array_after_pickling_has_its_rows():
    host = HostArray(X, name="X")
    host.prefetch(np.arange(5))
    copy = pickle.loads(pickle.dumps(host))
    assert copy != host
    np.testing.assert_array_equal(copy[np.arange(5)], X[:5])


def test_checksum_of_bfloat16_rows_is_that_of_their_values():
    rows = np.arange(6).reshape(3, 2).astype(jnp.bfloat16)
    other = HostArray(rows + jnp.bfloat16(1)).checksum()
    assert HostArray(rows).checksum() == HostArray(rows.copy()).checksum() != other


def test_prefetch_from_several_threads_gives_each_its_rows():
    """Each device is a thread, and all share one list of prefetched rows."""
    host = HostArray(np.arange(400.0))
    host.num_readers = 4

    def read(first):
        indices = np.arange(first, first + 5)
        for _ in range(1_000):
            host.prefetch(indices)
            np.testing.assert_array_equal(host.read_prefetched(indices), indices)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, (0, 100, 200, 300)))
    finally:
        sys.setswitchinterval(interval)
