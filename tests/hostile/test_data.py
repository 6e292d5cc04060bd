"""Generated models have the right potential; wrong data raise errors that name them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpyro.infer import init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc import HostArray
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.hostile.calls import (
    assert_accepted,
    assert_error_names,
    by_index,
    by_subsample,
    init_kernel,
    num_examples,
    table,
    texts,
)
from tests.hostile.strategies import Specimen, specimens
from tests.quick import quick_if

slow = partial(quick_if, False)


def windows(size: int, batch_size: int) -> np.ndarray:
    """Return minibatches of consecutive rows from each first row, so that rows are balanced."""
    return (np.arange(size)[:, None] + np.arange(batch_size)) % size


def assert_right_potential(specimen: Specimen, seed: int, rtol: float) -> None:
    """Full potential and gradient, and their means over minibatches, are those of NumPyro."""
    batch = {p: b for p, b in specimen.batch.items() if b is not None}
    arguments = Arguments(specimen.args, {**specimen.kwargs, **batch})
    potential = make_model_potential(specimen.model, arguments, init_to_uniform)
    position = np.random.default_rng(seed).normal(0, 0.7, potential.dim).astype(potential.dtype)

    every = list(product(*(windows(p.size, p.subsample_size) for p in potential.plates)))
    rows = {p.name: np.array([e[k] for e in every]) for k, p in enumerate(potential.plates)}

    def potentials(q: Any, plain: Any, numpy_arguments: Arguments, rows: Any) -> Any:
        theirs = jax.value_and_grad(lambda q: potential_energy(specimen.model, *plain, site(q)))
        one = jax.value_and_grad(lambda q, i: potential.value(q, i, numpy_arguments))
        values = {
            "NumPyro": theirs(q),
            "full": (
                potential.full_value(q, numpy_arguments),
                potential.full_gradient(q, numpy_arguments),
            ),
        }
        if rows:
            means = jax.tree.map(lambda x: x.mean(0), jax.vmap(one, (None, 0))(q, rows))
            values["mean of minibatches"] = means
        return values

    site = potential.unravel
    numpy_arguments = arguments.map_arrays(np.array)
    results = jax.tree.map(
        np.asarray, jax.jit(potentials)(position, specimen.plain, numpy_arguments, rows)
    )
    expected = results.pop("NumPyro")
    sizes = 1.0 + np.abs(expected[0]), 1.0 + np.abs(expected[1]).max()
    for name, value_and_gradient in results.items():
        for value, right, size in zip(value_and_gradient, expected, sizes, strict=True):
            description = f"{name} of {specimen}: {value} where {right}"
            assert value.shape == right.shape, description
            assert np.isfinite(right).all(), description
            assert (np.abs(value - right) <= rtol * size).all(), description
    names = {p for p, b in batch.items() if b < specimen.sizes[p]}
    assert {p.name: p.size for p in potential.plates} == {p: specimen.sizes[p] for p in names}


@pytest.mark.usefixtures("x64")
@num_examples(4)
@given(specimen=specimens(), seed=st.integers(0, 2**31))
def test_potential_of_a_valid_model_is_that_of_numpyro(specimen, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_right_potential(specimen, seed, 1e-9)


@pytest.mark.slow
@num_examples(6)
@given(specimen=specimens(), seed=st.integers(0, 2**31))
def test_potential_of_a_valid_model_in_float32_is_that_of_numpyro(specimen, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_right_potential(specimen, seed, 2e-4)


def longer(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, x])


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def put(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.flat[-1] = value
        return x

    return put


def masked(x: np.ndarray) -> Any:
    return np.ma.masked_array(x, mask=np.arange(x.size).reshape(x.shape) == 0)


def frame(x: np.ndarray) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(x) if x.ndim == 2 else pandas.Series(x)


# Change of `y`, and words of the message.
BAD_DATA: dict[str, tuple[Callable[[np.ndarray], Any], tuple[str, ...]]] = {
    "shorter": (lambda x: x[:-1], ("rows",)),
    "longer": (longer, ("rows",)),
    "column": (lambda x: x[:, None], ("'y'",)),
    "row": (lambda x: x[None], ("rows",)),
    "none": (lambda x: None, ("`y`",)),
    "missing": (with_value(np.nan), ("'y'", "`y`")),
    "infinite": (with_value(np.inf), ("'y'", "`y`")),
    "beyond float32": (lambda x: with_value(1e300)(x.astype(np.float64)), ("'y'", "`y`")),
    "texts": (lambda x: x.astype(str), ("`y`", "<U")),
    "objects": (lambda x: x.astype(object), ("`y`", "object")),
    "dates": (lambda x: np.arange(len(x)).astype("datetime64[D]"), ("`y`", "datetime64")),
    "records": (lambda x: np.zeros(len(x), [("a", "f4")]), ("`y`",)),
    "complex": (lambda x: x + 1j, ("'y'", "complex")),
    "big-endian": (lambda x: x.astype(">f4"), ("`y`", "astype")),
    "long double": (lambda x: x.astype(np.longdouble), ("`y`", "astype")),
    "masked": (masked, ("`y`", "masked")),
    "beyond int32": (lambda x: with_value(2**31)(x.astype(np.int64)), ("`y`", "int32")),
    "beyond uint32": (lambda x: with_value(2**32)(x.astype(np.uint64)), ("`y`", "uint32")),
    "list": (lambda x: x.tolist(), ("`y`", "list")),
    "series": (frame, ("`y`", "Series")),
}


@pytest.mark.usefixtures("no_warm_up")
@num_examples(12)
@given(
    name=st.sampled_from(list(BAD_DATA)),
    n=st.integers(3, 9),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
    is_keyword=st.booleans(),
    is_jax=st.booleans(),
)
def test_run_with_wrong_data_names_them(name, n, seed, share, is_keyword, is_jax):
    change, words = BAD_DATA[name]
    X, y = table(n, seed)
    batch_size = 1 + int(share * (n - 2))  # subsampled, and at most n - 1
    y = change(y)
    if is_jax:
        X = jnp.asarray(X)
    args, kwargs = ((X,), {"y": y}) if is_keyword else ((X, y), {})
    assert_error_names(
        lambda: init_kernel(by_index, *args, **kwargs, batch_size=batch_size), *words
    )


# Change of `X`, and words of the message.
BAD_COVARIATES: dict[str, tuple[Callable[[np.ndarray], Any], tuple[str, ...]]] = {
    "shorter": (lambda x: x[:-1], ("rows", "`y`")),
    "longer": (longer, ("rows", "`y`")),
    "transposed": (lambda x: x.T, ("'rows'", "2")),
    "a column": (lambda x: x[:, 0], ("`X` (6,)",)),
    "missing": (with_value(np.nan), ("'y'", "`X`")),
    "infinite": (with_value(-np.inf), ("'y'", "`X`")),
    "texts": (lambda x: x.astype(str), ("`X`", "<U")),
    "masked": (masked, ("`X`", "masked")),
    "long double": (lambda x: x.astype(np.longdouble), ("`X`", "astype")),
    "frame": (frame, ("`X`", "DataFrame")),
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", BAD_COVARIATES)
@pytest.mark.parametrize("model", [by_index, by_subsample])
def test_run_with_wrong_covariates_names_them(name, model):
    change, words = BAD_COVARIATES[name]
    X, y = table(6)
    if model is by_subsample and name in ("shorter", "longer"):
        words = ("rows",)
    assert_error_names(lambda: init_kernel(model, change(X), y, batch_size=4), *words)


def column_of_frame(df: Any, i: Any) -> Any:
    return df["x"][i]


def column_of_matrix(df: Any, i: Any) -> Any:
    return df[i, 0]


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("select", [column_of_frame, column_of_matrix])
def test_run_with_a_frame_names_as_arrays(no_warm_up, library, select):
    frame_library = pytest.importorskip(library)
    data = frame_library.DataFrame({"x": [1.0, 2.0, 3.0, 4.0], "city": list("abab")})

    def model(df):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", len(df), subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(b, 1), obs=select(df, i))

    words = ("`df`, a DataFrame", "as_arrays(df)", "df.to_numpy()")
    assert_error_names(lambda: init_kernel(model, data), *words)


def test_run_with_swapped_arguments_shows_their_shapes(no_warm_up):
    """With NUTS the model raises an IndexError about a tuple."""
    X, y = table(6)
    assert_error_names(lambda: init_kernel(by_index, y, X, batch_size=4), "`X` (6,)", "`y` (6, 2)")


CODES = np.arange(6, dtype=np.float32) % 3


@pytest.mark.parametrize(
    ("mean", "args", "words"),
    [
        (lambda e, i, g: e[g[i]], (CODES,), ("from `g` are", "`g.astype(int)`")),
        (lambda e, i, g: jnp.take(e, g)[i], (CODES,), ("from `g` are", "`g.astype(int)`")),
        (lambda e, i, g: e[numpyro.subsample(g, 0)], (CODES,), ("from `g` are",)),
        (lambda e, i, g: jnp.take_along_axis(e, g[i], 0), (CODES,), ("from `g` are",)),
        (lambda e, i, g: e[g[i, 0]], (CODES[:, None],), ("from `g` are", "`g[i, 0].astype(int)`")),
        (lambda e, i, g, k: e[g[i]] * e[k["a"][i]], (CODES, {"a": CODES}), ("`g` and `k['a']`",)),
        (lambda e, i, g: e[g[i]], (HostArray(CODES),), ("of an array are", "group[i].astype(int)")),
        (lambda e, i: e[jnp.asarray(CODES)[i]], (), ("of an array are", "group[i].astype(int)")),
    ],
    ids=[
        *("index", "take", "subsample", "along_axis", "column", "two"),
        *("host_array", "closed_over"),
    ],
)
def test_run_with_float_codes_names_them(no_warm_up, mean, args, words):
    def model(y, *args):
        e = numpyro.sample("e", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=4) as i:
            numpyro.sample("y", dist.Normal(mean(e, i, *args), 1), obs=y[i])

    named = {1: lambda y, g: model(y, g), 2: lambda y, g, k: model(y, g, k)}
    assert_error_names(
        lambda: init_kernel(named.get(len(args), model), table(6)[1], *args), *words, "floats"
    )


@pytest.mark.parametrize(("model", "x"), [(by_index, "X"), (by_subsample, "X")])
def test_run_without_rows_names_the_array(no_warm_up, model, x):
    X, y = table(6)
    assert_error_names(lambda: init_kernel(model, X[:0], y[:0], batch_size=2), f"`{x}`")


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (lambda eta: dist.Bernoulli(logits=eta), [-1, 1]),
        slow(lambda eta: dist.Bernoulli(logits=eta), [1, 2]),
        slow(lambda eta: dist.Poisson(jnp.exp(eta)), [0, 1.5]),
        slow(lambda eta: dist.Poisson(jnp.exp(eta)), [0, -1]),
        slow(lambda eta: dist.Exponential(jnp.exp(eta)), [1.0, -1.0]),
        slow(lambda eta: dist.HalfNormal(jnp.exp(eta)), [1.0, -1.0]),
        slow(lambda eta: dist.Binomial(3, logits=eta), [0, 4]),
        slow(lambda eta: dist.Categorical(logits=eta[..., None] * jnp.arange(3.0)), [0, 3]),
        (lambda eta: dist.Categorical(logits=eta[..., None] * jnp.arange(3.0)), [0, -1]),
        (lambda eta: dist.Uniform(0.0, 1.0 + eta**2), [0.5, 1e9]),
        slow(lambda eta: dist.LogNormal(eta, 1.0), [0.5, -0.5]),
        slow(lambda eta: dist.Beta(1.0 + eta**2, 2.0), [0.5, 1.5]),
    ],
)
def test_run_with_data_outside_the_support_names_the_site(fn, values):
    def model(x: Any, seen: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", 6, subsample_size=2) as i:
            numpyro.sample("seen", fn(b * x[i]), obs=seen[i])

    assert_error_names(
        lambda: init_kernel(model, table(6)[1], np.array(values * 3)), "'seen' (3 of 6 values)"
    )


BATCH_SIZES = st.one_of(
    st.integers(-3, 9),
    st.booleans(),
    st.floats(allow_nan=True),
    texts(3),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 3).map(np.int64),
    st.integers(1, 3).map(np.array),
    st.integers(1, 3).map(jnp.asarray),
    st.just(np.True_),
    st.just(2 + 0j),
)


@pytest.mark.usefixtures("no_warm_up")
@num_examples(12)
@given(n=st.sampled_from([1, 4]), batch=BATCH_SIZES)
def test_subsample_size_with_any_value_is_accepted_or_named(n, batch):
    check_minibatch_size(n, batch)


@pytest.mark.slow
@pytest.mark.usefixtures("no_warm_up")
@num_examples(12)
@given(n=st.integers(1, 6), batch=BATCH_SIZES)
def test_subsample_size_of_any_plate_is_accepted_or_named(n, batch):
    check_minibatch_size(n, batch)


def check_minibatch_size(n, batch):
    """It is an integer from 1 to the plate's size, or an error names the plate."""
    X, y = table(n)
    call = lambda: init_kernel(by_index, X, y, batch_size=batch)  # noqa: E731
    # The integers of these arrays have no dimensions.
    is_int = isinstance(batch, (int, np.integer, np.ndarray, jax.Array))
    is_int = is_int and not isinstance(batch, bool)
    if (is_int and 1 <= batch <= n) or (not isinstance(batch, str) and batch == n):
        assert_accepted(call)
    else:
        assert_error_names(call, "'rows'", "subsample_size")


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (1, {}, ("missing a required argument: 'y'",)),
        (2, {"bach_size": 3}, ("'bach_size'",)),
        (2, {"y": 0}, ("'y'",)),
        (2, {"batch_size": 3, "z": 1}, ("'z'",)),
    ],
)
def test_run_with_arguments_of_another_signature_names_them(no_warm_up, args, kwargs, words):
    assert_error_names(lambda: init_kernel(by_index, *table(6)[:args], **kwargs), *words)
