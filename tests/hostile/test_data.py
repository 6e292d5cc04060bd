"""Generated models have the right potential; data that are wrong are refused by name."""

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

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.hostile.calls import (
    by_index,
    by_subsample,
    few,
    passes,
    refusal,
    start,
    table,
)
from tests.hostile.strategies import Specimen, specimens
from tests.quick import quick_if

slow = partial(quick_if, False)


def windows(size: int, batch_size: int) -> np.ndarray:
    """Minibatches of consecutive rows from each start, round the end: each row as often."""
    return (np.arange(size)[:, None] + np.arange(batch_size)) % size


def assert_right_potential(specimen: Specimen, seed: int, rtol: float) -> None:
    """Full potential and gradient, and the means over all minibatches, are NumPyro's."""
    batch = {p: b for p, b in specimen.batch.items() if b is not None}
    arguments = Arguments(specimen.args, {**specimen.kwargs, **batch})
    target = make_model_potential(specimen.model, arguments, init_to_uniform)
    position = np.random.default_rng(seed).normal(0, 0.7, target.dim).astype(target.dtype)

    every = list(product(*(windows(p.size, p.subsample_size) for p in target.plates)))
    rows = {p.name: np.array([e[k] for e in every]) for k, p in enumerate(target.plates)}

    def potentials(q: Any, plain: Any, held: Arguments, rows: Any) -> Any:
        theirs = jax.value_and_grad(lambda q: potential_energy(specimen.model, *plain, site(q)))
        one = jax.value_and_grad(lambda q, i: target.value(q, i, held))
        found = {
            "NumPyro": theirs(q),
            "full": (target.full_value(q, held), target.full_gradient(q, held)),
        }
        if rows:
            means = jax.tree.map(lambda x: x.mean(0), jax.vmap(one, (None, 0))(q, rows))
            found["mean of minibatches"] = means
        return found

    site = target.unravel
    held = arguments.map_arrays(np.array)
    found = jax.tree.map(np.asarray, jax.jit(potentials)(position, specimen.plain, held, rows))
    expected = found.pop("NumPyro")
    sizes = 1.0 + np.abs(expected[0]), 1.0 + np.abs(expected[1]).max()
    for name, both in found.items():
        for value, right, size in zip(both, expected, sizes, strict=True):
            told = f"{name} of {specimen}: {value} where {right}"
            assert value.shape == right.shape, told
            assert np.isfinite(right).all(), told
            assert (np.abs(value - right) <= rtol * size).all(), told
    names = {p for p, b in batch.items() if b < specimen.sizes[p]}
    assert {p.name: p.size for p in target.plates} == {p: specimen.sizes[p] for p in names}


@pytest.mark.usefixtures("x64")
@few(6)
@given(specimen=specimens(), seed=st.integers(0, 2**31))
def test_potentials_of_valid_models_are_numpyros(specimen, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_right_potential(specimen, seed, 1e-9)


@pytest.mark.slow
@few(10)
@given(specimen=specimens(), seed=st.integers(0, 2**31))
def test_potentials_of_valid_models_are_numpyros_in_float32(specimen, seed):
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


# What is done to `y`, and what the error says.
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
@few(25)
@given(
    name=st.sampled_from(list(BAD_DATA)),
    n=st.integers(3, 9),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
    is_keyword=st.booleans(),
    is_jax=st.booleans(),
)
def test_bad_data_are_named(name, n, seed, share, is_keyword, is_jax):
    change, words = BAD_DATA[name]
    X, y = table(n, seed)
    batch_size = 1 + int(share * (n - 2))  # subsampled, and at most n - 1
    y = change(y)
    if is_jax:
        X = jnp.asarray(X)
    args, kwargs = ((X,), {"y": y}) if is_keyword else ((X, y), {})
    refusal(lambda: start(by_index, *args, **kwargs, batch_size=batch_size), *words)


# What is done to `X`.
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
def test_bad_covariates_are_named(name, model):
    change, words = BAD_COVARIATES[name]
    X, y = table(6)
    if model is by_subsample and name in ("shorter", "longer"):
        words = ("rows",)
    refusal(lambda: start(model, change(X), y, batch_size=4), *words)


def test_arrays_of_the_wrong_order_are_named(no_warm_up):
    """Under NUTS the model's own line raises an IndexError about a tuple."""
    X, y = table(6)
    refusal(lambda: start(by_index, y, X, batch_size=4), "`X` (6,)", "`y` (6, 2)")


@pytest.mark.parametrize(("model", "x"), [(by_index, "X"), (by_subsample, "X")])
def test_no_rows_at_all(no_warm_up, model, x):
    X, y = table(6)
    refusal(lambda: start(model, X[:0], y[:0], batch_size=2), f"`{x}`")


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (lambda eta: dist.Bernoulli(logits=eta), [-1, 1]),
        slow(lambda eta: dist.Bernoulli(logits=eta), [1, 2]),
        (lambda eta: dist.Poisson(jnp.exp(eta)), [0, 1.5]),
        slow(lambda eta: dist.Poisson(jnp.exp(eta)), [0, -1]),
        (lambda eta: dist.Exponential(jnp.exp(eta)), [1.0, -1.0]),
        slow(lambda eta: dist.HalfNormal(jnp.exp(eta)), [1.0, -1.0]),
        slow(lambda eta: dist.Binomial(3, logits=eta), [0, 4]),
        slow(lambda eta: dist.Categorical(logits=eta[..., None] * jnp.arange(3.0)), [0, 3]),
        (lambda eta: dist.Categorical(logits=eta[..., None] * jnp.arange(3.0)), [0, -1]),
        (lambda eta: dist.Uniform(0.0, 1.0 + eta**2), [0.5, 1e9]),
        slow(lambda eta: dist.LogNormal(eta, 1.0), [0.5, -0.5]),
        slow(lambda eta: dist.Beta(1.0 + eta**2, 2.0), [0.5, 1.5]),
    ],
)
def test_data_outside_their_support_name_the_site(fn, values):
    def model(x: Any, seen: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", 6, subsample_size=2) as i:
            numpyro.sample("seen", fn(b * x[i]), obs=seen[i])

    refusal(lambda: start(model, table(6)[1], np.array(values * 3)), "'seen' (3 of 6 values)")


BATCH_SIZES = st.one_of(
    st.integers(-3, 9),
    st.booleans(),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 3).map(np.int64),
    st.integers(1, 3).map(np.array),
    st.integers(1, 3).map(jnp.asarray),
    st.just(np.True_),
    st.just(2 + 0j),
)


@pytest.mark.usefixtures("no_warm_up")
@few(25)
@given(n=st.sampled_from([1, 4]), batch=BATCH_SIZES)
def test_minibatch_sizes(n, batch):
    check_minibatch_size(n, batch)


@pytest.mark.slow
@pytest.mark.usefixtures("no_warm_up")
@few(25)
@given(n=st.integers(1, 6), batch=BATCH_SIZES)
def test_minibatch_sizes_of_any_table(n, batch):
    check_minibatch_size(n, batch)


def check_minibatch_size(n, batch):
    """An integer from 1 to the plate's size, or an error that names the plate or its line."""
    X, y = table(n)
    call = lambda: start(by_index, X, y, batch_size=batch)  # noqa: E731
    is_int = isinstance(batch, (int, np.integer)) and not isinstance(batch, bool)
    is_array = isinstance(batch, (np.ndarray, jax.Array))
    if is_array:
        refusal(call, "subsample_size", "Python integer")
    elif (is_int and 1 <= batch <= n) or (not isinstance(batch, str) and batch == n):
        passes(call)
    else:
        refusal(call, "'rows'", "subsample_size")


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (1, {}, ("missing a required argument: 'y'",)),
        (2, {"bach_size": 3}, ("'bach_size'",)),
        (2, {"y": 0}, ("'y'",)),
        (2, {"batch_size": 3, "z": 1}, ("'z'",)),
    ],
)
def test_arguments_that_do_not_fit_the_model(no_warm_up, args, kwargs, words):
    refusal(lambda: start(by_index, *table(6)[:args], **kwargs), *words)
