"""Rows that stay on the host: the draws of the same rows in memory, and how they are read."""

import os
import pickle
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import HostArray, bias_report, log_likelihood
from numpyro_sgmcmc.adaptation.subsampling_choice import MONITOR_INTERVAL
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
    draws,
    fit,
)


@pytest.fixture(scope="module")
def long_run():
    """A run whose rows are read in many blocks, with its rows."""
    host = HostArray(Source(X.copy()))
    return fit(host, Y, num_samples=1500, num_warmup=0), host


# --- The same draws -----------------------------------------------------------------------------


# By plain gradients on independent rows it is in `make test` as well: see the run that goes on.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (by_index, {}),
        (by_column, {"subsampling": "shuffled"}),
        (by_subsample, {"subsampling": "iid", "gradient_estimator": "minibatch"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_draws_are_those_of_rows_in_memory(model, options):
    in_memory = draws(fit(X, Y, model, options={**GIVEN, **options}))
    on_host = fit(HostArray(X), HostArray(Y), model, options={**GIVEN, **options})
    assert_same(draws(on_host), in_memory)


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 2])
def test_chains_one_by_one(num_chains):
    settings = {"chain_method": "sequential", "num_chains": num_chains, "options": GIVEN}
    both = [fit(*data, **settings) for data in ((X, Y), (HostArray(X), HostArray(Y)))]
    assert_same(*map(draws, both))


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["plain", "control_variate"])
def test_a_run_that_goes_on_with_another_key_reads_that_keys_rows(gradient):
    """NumPyro gives the warm state the new run's key: rows read ahead for the old one are void."""
    first, then = [], []
    for data in ((X, Y), (HostArray(X), Y)):
        mcmc = fit(*data, options={**GIVEN, "subsampling": "iid", "gradient_estimator": gradient})
        first.append(draws(mcmc))
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(jax.random.key(5), *data, batch_size=BATCH)
        then.append(draws(mcmc))
    assert_same(*first)
    assert_same(*then)


@pytest.mark.slow
def test_the_warm_up_finds_what_it_finds_in_memory():
    """Other rows are read, in runs of neighbours: coordinates agree, though not to rounding."""
    memory, host = (
        fit(*data, num_samples=2).sampler.adaptation.preconditioner
        for data in ((X, Y), (HostArray(X), HostArray(Y)))
    )
    sd = NUM_ROWS**-0.5
    assert np.abs(host.center - memory.center).max() < 0.3 * sd
    np.testing.assert_allclose(np.diag(host.factor), sd, rtol=0.05)
    np.testing.assert_allclose(np.diag(memory.factor), sd, rtol=0.05)


@pytest.mark.slow
def test_reports():
    """Epochs with much noise: moments are read from rows that no step has drawn."""
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
        np.testing.assert_allclose(
            a.sd_inflation.value, b.sd_inflation.value, atol=1e-3
        )


# --- All rows -----------------------------------------------------------------------------------


def test_log_likelihood_by_chunks(monkeypatch, long_run):
    """Chunks of 7 rows or so, of which the last overlaps with the one before."""
    mcmc, host = long_run
    asked = host._source.asked
    before, per_draw = len(asked), 2 * 1500
    monkeypatch.setattr(
        "numpyro_sgmcmc.diagnostics.predictive._MAX_DRAW_ROW_PAIRS_PER_CHUNK", 700 * per_draw
    )
    found = log_likelihood(mcmc)["y"]
    assert found.shape == (2, 1500, NUM_ROWS)
    assert asked[before:] == [700] * 5
    beta = draws(mcmc)
    expected = dist.Normal(np.einsum("nd,csd->csn", X, beta), 1.0).log_prob(Y)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    some = np.array([2999, 0, 5])
    np.testing.assert_allclose(log_likelihood(mcmc, some)["y"], found[..., some], rtol=1e-5)
    with pytest.raises(ValueError, match="between 0 and 2999"):
        log_likelihood(mcmc, [3000])
    monkeypatch.setattr("numpyro_sgmcmc.model.handlers.FullDataModel.max_bytes", 1000)
    with pytest.raises(ValueError, match="HostArray.*log_likelihood"):
        mcmc.sampler.model(*mcmc._args, batch_size=BATCH)


@pytest.mark.slow
def test_long_passes_show_how_far_they_are(monkeypatch, capsys):
    monkeypatch.setattr("numpyro_sgmcmc.progress._DISPLAY_DELAY_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    def slowly(array, rows):
        if rows.size == NUM_ROWS:
            time.sleep(0.15)  # bars are drawn ten times a second at most
        return array[rows]

    host = HostArray(Source(X, slowly), name="X")
    mcmc = fit(host, Y, num_samples=5, options={"step_size": 0.3, "subsampling": "iid"})
    shown = capsys.readouterr().err
    assert re.search(r"adapting: .*[1-9].* passes over 'X'", shown)
    assert re.search(r"adapting: pilot chains 00:0\d, about 00:\d\d left", shown)
    bias_report(mcmc, full_data=True, num_draws=4)
    shown = capsys.readouterr().err
    assert re.search(r"gradients on all rows: +[1-9]\d*%.*k rows/s", shown)


# --- Reading ------------------------------------------------------------------------------------


def test_rows_are_read_in_blocks_and_ahead(long_run):
    mcmc, host = long_run
    source = host._source
    block = mcmc.last_state.prefetch_buffer
    (values,), used = block.row_arrays, block.num_used
    length = values.shape[1]
    rows = {"rows": np.empty((3, BATCH), np.int32)}
    assert length == compute_buffer_length((RowLookup(host, "rows"),), rows, num_chains=2) > 1
    assert 1 <= int(used[0]) <= length
    # The warm-up's chunks, then blocks: the first is waited for, the others are read ahead.
    assert max(source.asked) <= max(8192, 2 * 3 * BATCH * length)
    blocks = -(-1500 // length)
    ahead = source.threads.count("numpyro_sgmcmc-reader_0")
    # No step of two chains reads for itself; the warm-up makes some thousand requests.
    assert len(source.asked) - ahead < 1500 * 3 * 2
    assert blocks > 10
    assert blocks - 1 <= ahead <= blocks + 1


@pytest.mark.parametrize("kind", ["memmap", "h5py", "zarr"])
def test_sources(kind, tmp_path):
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
def test_indices_mean_what_they_mean_to_jax(index):
    rows, columns = np.array([5, 0, 7]), np.array([1, 0, 1])
    expected = jnp.asarray(X)[index(rows, columns)]
    np.testing.assert_array_equal(HostArray(X)[index(rows, columns)], expected)
    traced = jax.jit(lambda i, c: HostArray(X)[index(i, c)])
    np.testing.assert_array_equal(traced(rows, columns), expected)
    first, *_ = index(rows, columns)
    if first is rows:
        i = jnp.asarray(rows)
        given = PrefetchedRows(
            HostArray(X), PlateIndexRegistry({"rows": i}), {"rows": jnp.asarray(X)[i]}
        )
        np.testing.assert_array_equal(given[index(i, columns)], expected)


def resident_file_pages():
    """Megabytes of files that are mapped into this process and in its memory."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\s+(\d+) kB", status)[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("order", ["consecutive", "random"])
def test_memory_maps_let_go_of_their_pages(tmp_path, order):
    """Of 200 MB read only some stay: a random row brings 64 kB with it."""
    num, width = 50_000, 1_000
    np.zeros(num * width, np.float32).tofile(tmp_path / "X.dat")
    host = HostArray(np.memmap(tmp_path / "X.dat", np.float32, "r", shape=(num, width)))
    host.max_resident_bytes = 2**25
    rows = np.arange(num) if order == "consecutive" else np.random.default_rng(0).permutation(num)
    before, most = resident_file_pages(), 0.0
    for part in np.array_split(rows, 100):
        host.read(part)
        most = max(most, resident_file_pages())
    assert most - before < 100


def test_a_file_that_has_become_shorter_is_told(tmp_path):
    """The system would end the process, without a word."""
    np.zeros(100_000, np.float32).tofile(tmp_path / "X.dat")
    host = HostArray(np.memmap(tmp_path / "X.dat", np.float32, "r", shape=(10_000, 10)))
    host.read(np.arange(9_990, 10_000))
    os.truncate(tmp_path / "X.dat", 200_000)
    with pytest.raises(RuntimeError, match=r"X\.dat.* 9990 .*had 400000 bytes, and now has 200000"):
        host.read(np.arange(9_990, 10_000))


def test_what_was_read_ahead_is_forgotten_with_the_run(long_run):
    mcmc, host = long_run
    assert host._prefetches
    host._source.array += 1.0
    mcmc.sampler.init(jax.random.key(0), 0, None, (host, Y), {"batch_size": BATCH})
    assert not host._prefetches


def test_pickling():
    host = HostArray(X, name="X")
    host.prefetch(np.arange(5))
    copy = pickle.loads(pickle.dumps(host))
    assert copy != host
    np.testing.assert_array_equal(copy[np.arange(5)], X[:5])


def test_threads_that_read_at_once_each_get_their_own_rows():
    """As devices do, each of which is a thread: what is read ahead is one list for all of them."""
    source = HostArray(np.arange(400.0))
    source.num_readers = 4

    def read(first):
        rows = np.arange(first, first + 5)
        for _ in range(3_000):
            source.prefetch(rows)
            np.testing.assert_array_equal(source.read_prefetched(rows), rows)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, (0, 100, 200, 300)))
    finally:
        sys.setswitchinterval(interval)
