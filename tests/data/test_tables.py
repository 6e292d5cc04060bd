"""Columns of data frames, Parquet files and Arrow files as arrays."""

import pickle
import sys

import numpy as np
import pytest

from numpyro_sgmcmc import HostArray, as_arrays
from numpyro_sgmcmc.errors import InvalidArgumentError

pa = pytest.importorskip("pyarrow")
pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
parquet = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

FRAME = pandas.DataFrame(
    {
        "x": [0.5, -1.5, 2.5, 3.5],
        "count": np.array([3, 1, 2, 2**31 - 1]),
        "late": [True, False, True, True],
        "size": pandas.Categorical(["M", "S", "S", "M"], categories=["S", "M", "L"]),
        "city": ["Rome", "Oslo", "Rome", "Bern"],
        "customer": np.array([2**40, 7, 7, 9]),
        "day": pandas.to_datetime(["2020-01-02", "2020-01-01"] * 2),
    }
)
LIBRARIES = {
    "pandas": lambda frame: frame,
    "polars": polars.from_pandas,
    "arrow": lambda frame: pa.Table.from_pandas(frame, preserve_index=False),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_as_arrays_gives_values_codes_and_levels(library):
    frame = LIBRARIES[library](FRAME)
    arrays, levels = as_arrays(frame, categories=["city", "customer", "day"])
    assert list(arrays) == list(FRAME.columns)
    assert {name: x.dtype.name for name, x in arrays.items()} == {
        name: "float32" if name == "x" else "int32" for name in FRAME.columns
    }
    for name in ("x", "count", "late"):
        np.testing.assert_array_equal(arrays[name], FRAME[name])
    assert list(levels["city"]) == ["Bern", "Oslo", "Rome"]
    assert list(levels["customer"]) == [7, 9, 2**40]
    # Levels of a categorical column keep their order, with those that do not occur; polars orders
    # them by occurrence.
    assert list(levels["size"]) == (["M", "S"] if library == "polars" else ["S", "M", "L"])
    assert set(levels) == {"size", "city", "customer", "day"}
    for name in ("size", "city", "customer"):
        np.testing.assert_array_equal(levels[name][arrays[name]], FRAME[name])
    np.testing.assert_array_equal(arrays["day"], [1, 0, 1, 0])


@pytest.mark.parametrize(
    ("dtype", "declared"),
    [(polars.Categorical, ["a", "b"]), (polars.Enum(["b", "c", "a"]), ["b", "c", "a"])],
)
def test_as_arrays_encodes_categories_of_polars(dtype, declared):
    frame = polars.DataFrame({"r": polars.Series(["b", "a", "b"]).cast(dtype)})
    arrays, levels = as_arrays(frame, ["r"], categories=["r"])
    assert list(levels["r"]) == declared
    np.testing.assert_array_equal(levels["r"][arrays["r"]], ["b", "a", "b"])


@pytest.mark.parametrize("library", ["pandas", "arrow"])
def test_categorical_columns_keep_their_codes_if_they_are_listed(library):
    frame = LIBRARIES[library](FRAME.iloc[:3])
    arrays, levels = as_arrays(frame, "size", categories="size")
    assert list(levels["size"]) == ["S", "M", "L"]
    np.testing.assert_array_equal(arrays["size"], [1, 0, 0])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["size", "city", "customer", "day"])
def test_new_rows_have_the_codes_of_the_levels_of_the_fit(library, name):
    arrays, levels = as_arrays(LIBRARIES[library](FRAME), [name], categories=name)
    new = FRAME.iloc[2:].reset_index(drop=True)
    new["size"] = new["size"].cat.reorder_categories(["L", "M", "S"])
    new_arrays, new_levels = as_arrays(LIBRARIES[library](new), [name], levels=levels)
    np.testing.assert_array_equal(new_arrays[name], arrays[name][2:])
    np.testing.assert_array_equal(new_levels[name], levels[name])


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (["Oslo", "Bern"], "Column 'city' has values .* not in its `levels`: 'Rome'.*Fix: leave"),
        ([1, 2], "Column 'city' has values .*: 'Bern', 'Oslo', 'Rome'"),
        (["Oslo", "Oslo"], "`levels` of column 'city' are .* repeated"),
        (["Oslo", None], "`levels` of column 'city' are missing"),
        (["Oslo", 1], "`levels` of column 'city' are .* several types"),
    ],
)
def test_values_and_levels_that_do_not_fit_raise(levels, words):
    for convert in LIBRARIES.values():
        with pytest.raises(InvalidArgumentError, match=words):
            as_arrays(convert(FRAME), "city", levels={"city": levels})
    with pytest.raises(InvalidArgumentError, match="no column 'town'"):
        as_arrays(FRAME, "x", levels={"town": levels})


@pytest.mark.parametrize(
    "names", [FRAME.columns[:2], np.array(["x", "late"])], ids=["Index", "array"]
)
def test_as_arrays_takes_names_as_pandas_and_numpy_have_them(names):
    assert list(as_arrays(FRAME, names).arrays) == list(names)
    assert as_arrays(FRAME, {"X": names}).arrays["X"].shape == (len(FRAME), 2)


def test_as_arrays_stacks_the_columns_of_a_matrix():
    arrays, _ = as_arrays(FRAME, {"X": ["x", "late"], "counts": "count", "pair": ["count", "late"]})
    np.testing.assert_array_equal(arrays["X"], FRAME[["x", "late"]])
    assert {name: x.dtype.name for name, x in arrays.items()} == {
        "X": "float32",
        "counts": "int32",
        "pair": "int32",
    }


BAD_FRAME = pandas.DataFrame(
    {
        "x": [1.0, np.nan, np.inf, 1e300],
        "n": pandas.array([1, None, 3, 4], dtype="Int64"),
        "big": [1, 2, 3, -(2**31) - 1],
        "g": pandas.Categorical(["a", None, "b", "a"]),
        "city": ["a", "b", "c", None],
        "mixed": np.array([1, "a", 2.5, None], object),
        "when": pandas.to_datetime(["2020-01-01"] * 4),
        "seconds": 1.7e9 + np.arange(4),
        "number": 2**25 + np.arange(4),
        "fine": [1.0, 2.0, 3.0, 4.0],
    }
)


@pytest.mark.parametrize(
    ("columns", "categories", "words"),
    [
        ("x", (), "Column 'x' has (1 missing values|3 missing or infinite values)"),
        ("n", (), "Column 'n' has 1 missing values"),
        ("big", (), "Column 'big' has integers beyond int32's range.*categories"),
        ("g", (), "Column 'g' has 1 missing levels"),
        ("city", "city", "Column 'city' has 1 missing levels"),
        ("city", (), "Column 'city' .*categories"),
        ("mixed", (), "Column 'mixed' has dtype object.*to_numeric"),
        ("mixed", "mixed", "Column 'mixed' cannot be read"),
        ("when", (), "Column 'when' has type timestamp.*convert"),
        ("seconds", (), "Column 'seconds' has an SD of .* subtract"),
        ({"M": ["number", "fine"]}, (), "Column 'number' has an SD of .* subtract"),
        ({"M": ["fine", "size"]}, (), "Array 'M' has numbers and codes"),
        (["fine", "absent"], (), "no column 'absent'.*'x'"),
        ("fine", "absent", "no column 'absent'"),
        ([], (), "selects no column"),
    ],
)
def test_as_arrays_of_unusable_columns_names_them(columns, categories, words):
    frame = BAD_FRAME.assign(size=FRAME["size"])
    with pytest.raises(InvalidArgumentError, match=words):
        as_arrays(frame, columns, categories=categories)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (polars.DataFrame({"x": [1.0, float("nan"), float("inf")]}), "'x' has 2 missing"),
        (polars.DataFrame({"x": [1.0, None]}), "'x' has 1 missing values"),
        (polars.DataFrame({"x": [object()]}), "'x' has dtype object"),
        (polars.DataFrame({"x": [1.0]}).lazy(), "LazyFrame.*collect"),
        ({"x": [1.0]}, "dict.*data frame"),
        (pandas.Series([1.0]), "Series.*to_frame"),
        (pandas.DataFrame(np.ones((2, 2)), columns=["x", "x"]), "several columns.*'x'"),
    ],
    ids=["NaN", "null", "objects", "lazy", "dict", "series", "twice"],
)
def test_as_arrays_of_unusable_frames_raises(frame, words):
    with pytest.raises(InvalidArgumentError, match=words):
        as_arrays(frame)


def test_as_arrays_without_arrow_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"`as_arrays` needs pyarrow.*numpyro-sgmcmc\[parquet\]"):
        as_arrays(FRAME)


# --- Files


@pytest.fixture(scope="module")
def parts():
    """Two tables with other types, levels and categories."""
    rng = np.random.default_rng(0)
    first = pandas.DataFrame(
        {
            "x": rng.standard_normal(50),
            "n": np.arange(50),
            "city": rng.choice(["Rome", "Oslo"], 50),
            "size": pandas.Categorical(rng.choice(["S", "M"], 50), categories=["S", "M"]),
        }
    )
    second = pandas.DataFrame(
        {
            "x": rng.standard_normal(30).astype("f4"),
            "n": np.arange(30, dtype="i2"),
            "city": rng.choice(["Bern", "Oslo"], 30),
            "size": pandas.Categorical(rng.choice(["L", "M"], 30), categories=["M", "L"]),
        }
    )
    return first, second


@pytest.fixture(params=["parquet", "feather"])
def folder(request, parts, tmp_path):
    for year, frame in zip((2020, 2021), parts, strict=True):
        path = tmp_path / "table" / f"year={year}" / f"part.{request.param}"
        path.parent.mkdir(parents=True)
        table = pa.Table.from_pandas(frame)
        if request.param == "parquet":
            parquet.write_table(table, path, row_group_size=16)
        else:
            feather.write_feather(table, path, chunksize=16)
    (tmp_path / "table" / "notes.txt").write_text("not a table")
    return tmp_path / "table"


def test_columns_of_files_are_those_of_one_table(folder, parts):
    """Files have the same codes, whatever their levels."""
    both = pandas.concat(parts, ignore_index=True)
    rows = np.array([79, 0, 50, 49, 17, 17])
    X = HostArray.from_parquet(folder, ["x", "n", "year"])
    assert (X.shape, X.dtype.name) == ((80, 3), "float32")
    expected = np.c_[both["x"], both["n"], np.repeat([2020, 2021], [50, 30])].astype("f4")
    np.testing.assert_array_equal(X[rows], expected[rows])
    np.testing.assert_array_equal(X[10:70], expected[10:70])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(X))[rows], expected[rows])
    for name, levels in (("city", ["Bern", "Oslo", "Rome"]), ("size", ["L", "M", "S"])):
        codes = HostArray.from_parquet(folder, name, categories="city", name=name)
        assert (codes.shape, codes.dtype.name, codes.name) == ((80,), "int32", name)
        assert list(codes.levels[name]) == levels
        np.testing.assert_array_equal(codes.levels[name][codes.read(rows)], both[name].iloc[rows])


def test_row_groups_in_memory_are_bounded(tmp_path):
    path, x = tmp_path / "x.parquet", np.arange(100.0)
    parquet.write_table(pa.table({"x": x}), path, row_group_size=10)
    for cache_bytes, max_bytes in ((100, 80), (0, 40)):  # a row group has 40 bytes
        array = HostArray.from_parquet(path, "x", cache_bytes=cache_bytes)
        cached_bytes = []
        for row in np.random.default_rng(0).permutation(100):
            assert array.read(row) == x[row]
            cached_bytes.append(array.source.cached_bytes)
        assert max(cached_bytes) == max_bytes


@pytest.mark.parametrize("has_statistics", [True, False])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, None, 2.0, None], "Column 'x' has 2 missing values"),
        ([1, 2, 3, 2**31], "Column 'x' has integers beyond"),
        (["a", "b", None, "a"], "Column 'x' has type string.*categories"),
    ],
)
def test_files_with_unusable_columns_raise_before_rows_are_read(
    tmp_path, values, words, has_statistics
):
    path = tmp_path / "x.parquet"
    parquet.write_table(
        pa.table({"x": values}), path, row_group_size=3, write_statistics=has_statistics
    )
    with pytest.raises(InvalidArgumentError, match=words):
        HostArray.from_parquet(path, "x")


def test_paths_without_tables_raise(tmp_path):
    (tmp_path / "broken.parquet").write_text("PAR")
    parquet.write_table(pa.table({"x": pa.array([], pa.float64())}), tmp_path / "empty.parquet")
    (tmp_path / "folder").mkdir()
    for name, words in {
        "absent.parquet": "absent.parquet' is neither a Parquet or Arrow file",
        "folder": "folder' is neither a Parquet or Arrow file",
        "broken.parquet": "broken.parquet' cannot be opened",
        "empty.parquet": "empty.parquet' has no rows",
    }.items():
        with pytest.raises(InvalidArgumentError, match=words):
            HostArray.from_parquet(tmp_path / name, "x")
