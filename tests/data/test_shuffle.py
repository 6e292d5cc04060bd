"""Rows in random order on disk: permutation, memory, resumption, sources and errors."""

import json
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from numpyro_sgmcmc import HostArray, open_rows, shuffle_rows
from numpyro_sgmcmc.data import shuffle as shuffle_module
from numpyro_sgmcmc.errors import DataReadError, InvalidArgumentError

NUM_ROWS = 1000
_ROWS = np.arange(NUM_ROWS)
ARRAYS = {
    "X": np.stack([_ROWS, -_ROWS, _ROWS / 2], 1).astype(np.float32),
    "n": _ROWS.astype(np.int32),
    "late": _ROWS % 3 == 0,
}
# Bytes with which ARRAYS take 8 chunks and 9 buckets.
FEW_BYTES = 8000


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    """Processes are killed in these tests, machines are not; a flush takes milliseconds."""
    monkeypatch.setattr(shuffle_module.os, "fsync", lambda file: None)


def run(source, target, **options):
    return shuffle_rows(source, target, progress_bar=False, **options)


def read_all(table):
    return {name: x.read(np.arange(len(x))) for name, x in table.arrays.items()}


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


def test_rows_stay_together_in_an_order_that_depends_on_the_seed_only(tmp_path):
    few = run(ARRAYS, tmp_path / "few", max_memory_bytes=FEW_BYTES)
    layout = json.loads((tmp_path / "few" / "rows.json").read_text())["layout"]
    assert layout == [129, 9]
    order = read_all(few)["n"]
    np.testing.assert_array_equal(np.sort(order), _ROWS)
    for name, values in read_all(few).items():
        np.testing.assert_array_equal(values, ARRAYS[name][order])
        assert values.dtype == ARRAYS[name].dtype
    assert sorted(x.name for x in (tmp_path / "few").iterdir()) == [
        "X.npy",
        "late.npy",
        "n.npy",
        "rows.json",
    ]
    run(ARRAYS, tmp_path / "many")
    assert read_files(tmp_path / "many") == read_files(tmp_path / "few")
    other = run(ARRAYS, tmp_path / "other", seed=1)
    assert np.mean(read_all(other)["n"] == order) < 0.01


def test_permutation_is_uniformly_distributed(tmp_path):
    """Rows are as often in each part of the target, and four rows as often in each order."""
    num = 24_000
    table = run({"n": np.arange(num, dtype=np.int32)}, tmp_path / "t", max_memory_bytes=100_000)
    rows = read_all(table)["n"]
    counts = np.histogram2d(np.arange(num), rows, bins=20)[0]
    # Rows and columns of this table have fixed sums.
    chi_squared = ((counts - num / 400) ** 2 / (num / 400)).sum()
    assert 1e-3 < stats.chi2(19**2).sf(chi_squared) < 1 - 1e-3
    positions = np.argsort(rows)
    for four in (positions.reshape(-1, 4), positions.reshape(4, -1).T):  # neighbours, and far apart
        counts = np.unique(np.argsort(four, 1) @ [64, 16, 4, 1], return_counts=True)[1]
        assert len(counts) == 24
        assert 1e-3 < stats.chisquare(counts).pvalue < 1 - 1e-3


@pytest.mark.parametrize("kind", ["arrays", "parquet"])
def test_memory_is_bounded(tmp_path, kind):
    """Bytes that NumPy and Arrow have allocated, of rows that have 2,880,000."""
    pa = pytest.importorskip("pyarrow")
    x = np.random.default_rng(0).standard_normal((120_000, 5)).astype(np.float32)
    if kind == "arrays":
        source, columns = {"X": x, "n": np.arange(120_000)}, None
    else:
        source, columns = tmp_path / "table.parquet", {"X": list("abcde"), "n": "n"}
        table = pa.table({**dict(zip("abcde", x.T, strict=True)), "n": np.arange(120_000)})
        pytest.importorskip("pyarrow.parquet").write_table(table, source, row_group_size=2_000)
    run(source, tmp_path / "first", columns="n")  # imports
    previous = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(previous)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        run(source, tmp_path / "target", columns=columns, max_memory_bytes=600_000)
        num_bytes = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(previous)
    assert num_bytes < 700_000  # with Python's objects and the buffers of files


class FailingSource:
    """An array that fails after a number of rows have been read."""

    def __init__(self, values, max_rows=10**9):
        self.values, self.max_rows, self.num_rows = values, max_rows, 0
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, indices):
        self.num_rows += len(indices)
        if self.num_rows > self.max_rows:
            raise OSError("killed")
        return self.values[indices]


def test_interrupted_first_pass_keeps_its_chunks(tmp_path):
    run(ARRAYS, tmp_path / "expected")
    options = {"max_memory_bytes": FEW_BYTES}
    # A checksum reads each row once.
    failing = {**ARRAYS, "X": FailingSource(ARRAYS["X"], NUM_ROWS + 600)}
    target = tmp_path / "target"
    with pytest.raises(DataReadError, match="killed"):
        run(failing, target, **options)
    with pytest.raises(InvalidArgumentError, match=r"unfinished.*same arguments"):
        open_rows(target)
    source = FailingSource(ARRAYS["X"])
    run({**ARRAYS, "X": source}, target, **options)
    assert source.num_rows == NUM_ROWS + NUM_ROWS - 4 * 129
    assert read_files(target) == read_files(tmp_path / "expected")


@pytest.mark.parametrize("part", ["bucket", "progress"])
def test_interrupted_second_pass_keeps_its_buckets(tmp_path, monkeypatch, part):
    run(ARRAYS, tmp_path / "expected")
    options, target = {"max_memory_bytes": FEW_BYTES}, tmp_path / "target"
    name = {"bucket": "_array_path", "progress": "_write"}[part]
    function, written = getattr(shuffle_module, name), []

    def fail_in_the_sixth_bucket(path, *args):
        progress = target / "unfinished" / "finished-buckets"
        is_sixth = progress.exists() and progress.read_text() == "5"
        if is_sixth and (part == "progress" or args == ("late",)):  # other arrays are written
            raise KeyboardInterrupt
        return function(path, *args)

    monkeypatch.setattr(shuffle_module, name, fail_in_the_sixth_bucket)
    with pytest.raises(KeyboardInterrupt):
        run(ARRAYS, target, **options)
    monkeypatch.setattr(shuffle_module, name, function)
    sort = shuffle_module._Shuffle._sort_bucket

    def record(self, sizes, bucket, first):
        written.append(bucket)
        sort(self, sizes, bucket, first)

    monkeypatch.setattr(shuffle_module._Shuffle, "_sort_bucket", record)
    run(ARRAYS, target, **options)
    assert written == list(range(5, 9))
    assert read_files(target) == read_files(tmp_path / "expected")
    # A finished target is opened, and its files are not written again.
    run(ARRAYS, target)
    assert written == list(range(5, 9))


def test_progress_counts_the_rows_of_both_passes(tmp_path, monkeypatch):
    bars = []

    class Bar(SimpleNamespace):
        def __enter__(self):
            bars.append(self)
            return self

        def __exit__(self, *args):
            pass

        def update(self, num):
            self.num = getattr(self, "num", 0) + num

    monkeypatch.setattr(shuffle_module, "tqdm_auto", lambda **options: Bar(**options))
    shuffle_rows(ARRAYS, tmp_path / "target", max_memory_bytes=FEW_BYTES)
    (bar,) = bars
    assert bar.num == bar.total == 2 * NUM_ROWS
    assert not bar.disable


# --- Sources


def write_npy(folder):
    folder.mkdir()
    for name, values in ARRAYS.items():
        np.save(folder / f"{name}.npy", values)
    return folder


def write_zarr(folder):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(folder), mode="w")
    for name, values in ARRAYS.items():
        group.create_array(name, data=values, chunks=(300, *values.shape[1:]))
    return folder


SOURCES = {
    "npy": write_npy,
    "zarr": write_zarr,
    "zarr group": lambda folder: pytest.importorskip("zarr").open_group(str(write_zarr(folder))),
    "HostArray": lambda folder: {name: HostArray(x, name=name) for name, x in ARRAYS.items()},
}


@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_arrays_give_the_same_files(tmp_path, source):
    run(ARRAYS, tmp_path / "expected")
    table = run(SOURCES[source](tmp_path / "s"), tmp_path / "t", max_memory_bytes=FEW_BYTES)
    assert read_files(tmp_path / "t") == read_files(tmp_path / "expected")
    assert not table.levels
    renamed = run(tmp_path / "t", tmp_path / "renamed", columns={"count": "n"}, seed=2)
    assert list(renamed.arrays) == ["count"]


def test_parquet_keeps_columns_and_levels(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {"x": _ROWS / 4, "n": _ROWS, "city": np.array(list("abcd"))[_ROWS % 4]}
    )
    (tmp_path / "table").mkdir()
    for k, part in enumerate((frame[:300], frame[300:])):
        part.to_parquet(tmp_path / "table" / f"{k}.parquet", row_group_size=100)
    columns = {"X": ["x", "n"], "city/code": "city"}
    options = {"columns": columns, "categories": "city", "max_memory_bytes": 20_000}
    table = run(tmp_path / "table", tmp_path / "target", **options)
    reopened = open_rows(tmp_path / "target")
    X = read_all(table)["X"]
    n = X[:, 1].astype(int)
    np.testing.assert_array_equal(np.sort(n), _ROWS)
    np.testing.assert_array_equal(X[:, 0], n / 4)
    for part in (table, reopened):
        cities = part.levels["city"][read_all(part)["city/code"]]
        np.testing.assert_array_equal(cities, frame["city"].iloc[n])
    # Levels are kept by a shuffle of shuffled rows.
    again = run(tmp_path / "target", tmp_path / "again", seed=1)
    assert list(again.levels["city"]) == list("abcd")


# --- Errors


def spoil(values):
    values = values.copy()
    values[-1] = np.nan
    return values


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ({**ARRAYS, "n": ARRAYS["n"][1:]}, {}, "different numbers of rows.*999"),
        ({}, {}, "no arrays"),
        (ARRAYS, {"columns": ["X", "absent"]}, "no array 'absent'"),
        (ARRAYS, {"categories": "X"}, "`categories` names 'X', but `source` has arrays"),
        (ARRAYS["n"], {}, "ndarray.*source of rows"),
        ({"s": np.array(["a", "b"])}, {}, "dtype <U1"),
        ("absent.parquet", {}, "absent.parquet"),
        (ARRAYS, {"max_memory_bytes": 10}, "`max_memory_bytes` is 10, but 62 bytes"),
        (ARRAYS, {"max_memory_bytes": 1.5}, "`max_memory_bytes`"),
        (ARRAYS, {"seed": -1}, "`seed` is -1"),
    ],
)
def test_invalid_input_raises_before_any_work(tmp_path, source, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        run(source, tmp_path / "target", **options)
    assert not (tmp_path / "target").exists()


def test_too_large_row_groups_raise(tmp_path):
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"x": _ROWS / 2}), path)
    with pytest.raises(InvalidArgumentError, match=r"72042 bytes.*smaller row groups"):
        run(path, tmp_path / "target", max_memory_bytes=50_000)


def test_too_small_disk_raises(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=20_000)
    monkeypatch.setattr(shuffle_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InvalidArgumentError, match=r"of disk space, of which 0\.00 GB are free"):
        run(ARRAYS, tmp_path / "target")


def test_targets_with_other_content_raise(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgumentError, match="not an empty folder"):
        run(ARRAYS, tmp_path)
    with pytest.raises(InvalidArgumentError, match="no shuffled rows"):
        open_rows(tmp_path)
    target = tmp_path / "target"
    run(ARRAYS, target)
    changed = {**ARRAYS, "n": ARRAYS["n"] + 1}
    for source, options in ((ARRAYS, {"seed": 1}), (changed, {}), (ARRAYS, {"columns": "n"})):
        with pytest.raises(InvalidArgumentError, match="another source or with other arguments"):
            run(source, target, **options)


def test_missing_values_raise_in_the_first_pass(tmp_path):
    with pytest.raises(DataReadError, match=r"HostArray.'X'.*missing.*row 999"):
        run({**ARRAYS, "X": spoil(ARRAYS["X"])}, tmp_path / "target")
