"""Whatever is passed: the right potential, or an error of ours that names what is wrong.

Valid models and data are generated, and compared with NumPyro's own potential of the model on all
rows. Misuses start from a valid call in which one thing is changed; each must be refused before
any sampling, in a sentence or two that name the site, plate, argument or option, by this package
and not from inside JAX, NumPyro or NumPy.

``HOSTILE_EXAMPLES`` makes a longer run: so many examples a test, from random seeds.
"""

from __future__ import annotations

import inspect
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from contract import KERNELS, quietly
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpyro.infer import NUTS, init_to_uniform, init_to_value
from numpyro.infer.util import potential_energy
from strategies import Specimen, specimens

import numpyro_sgmcmc
from numpyro_sgmcmc import HostArray, SGHMCSplit, diagnostics, schedules
from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.coordinates import Coordinates
from numpyro_sgmcmc.model import model_target

PACKAGE = str(Path(numpyro_sgmcmc.__file__).parent)
LONG = int(os.environ.get("HOSTILE_EXAMPLES", "0"))


def few(number: int) -> Any:
    """So many examples, always the same ones; others and more in a long run."""
    return settings(
        max_examples=LONG or number,
        derandomize=not LONG,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class Reached(Exception):
    """The warm-up has begun, with a start of finite density."""


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Without optimisations: many small functions run once each."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def no_warm_up(monkeypatch):
    """Stop where the checks have passed."""

    def reached(self, starts):
        raise Reached

    monkeypatch.setattr("numpyro_sgmcmc.adaptation.setup._Setup._optimise", reached)


def assert_named(error: BaseException, *names: str) -> None:
    """Whether an error is ours, short, and says these things."""
    message = str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    told = f"{type(error).__name__}: {message} ({last.filename}:{last.lineno})"
    assert isinstance(error, (ValueError, TypeError, RuntimeError, OSError)), told
    assert last.filename.startswith(PACKAGE), told
    assert all(name in message for name in names), f"{names} not in {told}"
    assert len(message) < 700, told
    assert message.count(". ") <= 3, told
    assert "Tracer" not in message.split("(")[0], told


def refusal(call: Callable[[], Any], *names: str) -> None:
    """Whether a call is refused, by this package, with these words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
    assert not isinstance(caught.value, Reached), f"not refused: {names}"
    assert_named(caught.value, *names)


def start(
    model: Any,
    *args: Any,
    kernel: Any = SGHMCSplit,
    rng_key: Any = None,
    init_params: Any = None,
    options: dict | None = None,
    **kwargs: Any,
) -> None:
    """Initialise a kernel."""
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    kernel(model, **(options or {})).init(rng_key, 10, init_params, args, kwargs)


def passes(call: Callable[[], Any]) -> None:
    """Whether a call passes all checks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Reached):
            call()


# --- The right potential ------------------------------------------------------------------------


def windows(size: int, batch_size: int) -> np.ndarray:
    """Minibatches of consecutive rows from each start, round the end: each row as often."""
    return (np.arange(size)[:, None] + np.arange(batch_size)) % size


def assert_right_potential(specimen: Specimen, seed: int, rtol: float) -> None:
    """Full potential and gradient, and the means over all minibatches, are NumPyro's."""
    batch = {p: b for p, b in specimen.batch.items() if b is not None}
    arguments = Arguments(specimen.args, {**specimen.kwargs, **batch})
    target = model_target(specimen.model, arguments, init_to_uniform)
    position = np.random.default_rng(seed).normal(0, 0.7, target.dim).astype(target.dtype)

    every = list(product(*(windows(p.size, p.subsample_size) for p in target.plates)))
    rows = {p.name: np.array([e[k] for e in every]) for k, p in enumerate(target.plates)}

    def potentials(q: Any, plain: Any, held: Arguments, rows: Any) -> Any:
        theirs = jax.value_and_grad(lambda q: potential_energy(specimen.model, *plain, site(q)))
        one = jax.value_and_grad(lambda q, i: target.potential(q, i, held))
        found = {
            "NumPyro": theirs(q),
            "full": (target.full_potential(q, held), target.full_gradient(q, held)),
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
@few(10)
@given(specimen=specimens(), seed=st.integers(0, 2**31))
def test_potentials_of_valid_models_are_numpyros(specimen, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_right_potential(specimen, seed, 1e-9)


@few(3)
@given(specimen=specimens(), seed=st.integers(0, 2**31))
def test_potentials_of_valid_models_are_numpyros_in_float32(specimen, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_right_potential(specimen, seed, 2e-4)


# --- Misuses of data ----------------------------------------------------------------------------


def by_index(X: Any, y: Any, batch_size: Any = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, 1), obs=y[i])


def by_subsample(X: Any, y: Any, batch_size: Any = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size):
        mean = numpyro.subsample(X, event_dim=1) @ beta
        numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, event_dim=0))


def table(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 2)).astype(np.float32)
    return X, rng.standard_normal(n).astype(np.float32)


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
        (lambda eta: dist.Bernoulli(logits=eta), [1, 2]),
        (lambda eta: dist.Poisson(jnp.exp(eta)), [0, 1.5]),
        (lambda eta: dist.Poisson(jnp.exp(eta)), [0, -1]),
        (lambda eta: dist.Exponential(jnp.exp(eta)), [1.0, -1.0]),
        (lambda eta: dist.HalfNormal(jnp.exp(eta)), [1.0, -1.0]),
        (lambda eta: dist.Binomial(3, logits=eta), [0, 4]),
        (lambda eta: dist.Categorical(logits=eta[..., None] * jnp.arange(3.0)), [0, 3]),
        (lambda eta: dist.Categorical(logits=eta[..., None] * jnp.arange(3.0)), [0, -1]),
        (lambda eta: dist.Uniform(0.0, 1.0 + eta**2), [0.5, 1e9]),
        (lambda eta: dist.LogNormal(eta, 1.0), [0.5, -0.5]),
        (lambda eta: dist.Beta(1.0 + eta**2, 2.0), [0.5, 1.5]),
    ],
)
def test_data_outside_their_support_name_the_site(fn, values):
    def model(x: Any, seen: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", 6, subsample_size=2) as i:
            numpyro.sample("seen", fn(b * x[i]), obs=seen[i])

    refusal(lambda: start(model, table(6)[1], np.array(values * 3)), "'seen' (3 of 6 values)")


@pytest.mark.usefixtures("no_warm_up")
@few(25)
@given(
    n=st.integers(1, 6),
    batch=st.one_of(
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
    ),
)
def test_minibatch_sizes(n, batch):
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


# --- Misuses of plates and models ---------------------------------------------------------------


def in_plate(body: Callable[[Any, Any, Any, Any, int], Any]) -> Callable:
    """A model whose plate has this body, of data, rows, coefficients and minibatch size."""

    def model(X: Any, y: Any, batch_size: int = 4) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            body(X, y, i, b, batch_size)

    return model


def of_prior(site: Callable[[], Any]) -> Callable:
    """A model of a mean with this prior."""

    def model(X: Any, y: Any, batch_size: int = 4) -> None:
        mean = site()
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(jnp.sum(mean), 1), obs=y[i])

    return model


def y_site(mean: Any, data: Any, **kwargs: Any) -> Any:
    return numpyro.sample("y", dist.Normal(mean, 1), obs=data, **kwargs)


def outside(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        pass
    y_site(X[i] @ b, y[i])


def factor_outside(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        log_prob = dist.Normal(X[i] @ b, 1).log_prob(y[i])
    numpyro.factor("likelihood", log_prob.sum())


def prior_of_the_rows(X, y, batch_size=4):
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        spread = y[i].std()
    b = numpyro.sample("b", dist.Normal(0, spread))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(b, y[i])


def one_latent_a_row_outside(X, y, batch_size=4):
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        pass
    b = numpyro.sample("b", dist.Normal(0, 1).expand([len(i)]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(b, y[i])


def another_plates_rows(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(X[i] @ b, y[i])
    with numpyro.plate("others", len(y), subsample_size=batch_size):
        numpyro.sample("z", dist.Normal(X[i] @ b, 1), obs=y[i])


def same_name(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(X[i] @ b, y[i])
    with numpyro.plate("rows", 2 * len(y), subsample_size=batch_size) as j:
        numpyro.sample("z", dist.Normal(b[0], 1), obs=jnp.concatenate([y, y])[j])


def if_of_a_latent(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    if b[0] > 0:
        b = -b
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(X[i] @ b, y[i])


def levels_of_the_data(X, y, batch_size=4):
    num = len(np.unique(y))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([num]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(b[0], y[i])


def largest_of_the_data(X, y, batch_size=4):
    num = int(y.max()) + 1
    b = numpyro.sample("b", dist.Normal(0, 1).expand([num]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(b[0], y[i])


def deltas_in_a_plate() -> Any:
    with numpyro.plate("k", 2):
        return numpyro.sample("b", dist.Delta(1.0))


OUTSIDE = np.arange(12.0, dtype=np.float32)

BAD_MODELS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "first rows of y": (
        in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, y[:n])),
        ("'y'", "'rows'", "same data"),
    ),
    "first rows of X": (in_plate(lambda X, y, i, b, n: y_site(X[:n] @ b, y[i])), ("'rows'",)),
    "first rows of all": (in_plate(lambda X, y, i, b, n: y_site(X[:n] @ b, y[:n])), ("'rows'",)),
    "all rows of y": (in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, y)), ("'y'", "'rows'")),
    "all rows of X": (in_plate(lambda X, y, i, b, n: y_site(X @ b, y[i])), ("'rows'",)),
    "global rows": (
        in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, jnp.asarray(OUTSIDE)[:n])),
        ("'y'", "'rows'"),
    ),
    "global rows in NumPy": (
        in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, OUTSIDE[i])),
        ("test_hostile.py",),
    ),
    "rows in the event": (
        in_plate(
            lambda X, y, i, b, n: numpyro.sample(
                "y", dist.Normal(X[i] @ b, 1).to_event(1), obs=y[i]
            )
        ),
        ("'y'", "to_event"),
    ),
    "rows times rows": (
        in_plate(lambda X, y, i, b, n: y_site((X[i] @ b)[:, None], y[i])),
        ("'y'", "every other"),
    ),
    "some of the rows": (
        in_plate(lambda X, y, i, b, n: y_site(b[0], y[i][y[i] > 0])),
        ("test_hostile.py",),
    ),
    "short array in a loop": (
        in_plate(lambda X, y, i, b, n: y_site(jax.lax.map(lambda k: X[:7, 0][k], i), y[i])),
        ("'rows'", "7 rows"),
    ),
    "short array, sorted rows": (
        in_plate(lambda X, y, i, b, n: y_site(X[:7, 0][jnp.sort(i)], y[i])),
        ("'rows'", "7 rows"),
    ),
    "outside of the plate": (outside, ("'y'", "'rows'", "outside")),
    "factor outside of the plate": (factor_outside, ("'likelihood'", "'rows'", "outside")),
    "prior that sees the minibatch": (prior_of_the_rows, ("'b'", "'rows'", "outside")),
    "one latent a row outside": (one_latent_a_row_outside, ("'b'", "'rows'")),
    "rows of another plate": (another_plates_rows, ("'z'", "'rows'")),
    "one name for two plates": (same_name, ("'rows'", "12", "24")),
    "if of a latent": (if_of_a_latent, ("test_hostile.py", "if b[0] > 0")),
    "np.unique of the data": (levels_of_the_data, ("test_hostile.py", "np.unique(y)")),
    "int of the data": (largest_of_the_data, ("test_hostile.py", "int(y.max())")),
    "classes as floats": (
        in_plate(
            lambda X, y, i, b, n: numpyro.sample(
                "y", dist.Categorical(logits=jnp.zeros(3)), obs=jnp.zeros(12)[i]
            )
        ),
        ("'y'", "float32"),
    ),
    "delta": (of_prior(lambda: numpyro.sample("b", dist.Delta(1.0))), ("'b'", "delta")),
    "deltas": (of_prior(lambda: numpyro.sample("b", dist.Delta(1.0).expand([2]))), ("'b'",)),
    "delta event": (
        of_prior(lambda: numpyro.sample("b", dist.Delta(jnp.ones(2)).to_event(1))),
        ("'b'", "delta"),
    ),
    "deltas in a plate": (of_prior(deltas_in_a_plate), ("'b'", "delta")),
    "discrete": (of_prior(lambda: numpyro.sample("b", dist.Poisson(2.0))), ("'b'", "Gibbs")),
    "no latent": (of_prior(lambda: 0.0), ("no latent site",)),
    "latent without values": (
        of_prior(lambda: numpyro.sample("b", dist.Normal(0, 1).expand([0]))),
        ("no latent site",),
    ),
    "complex": (of_prior(lambda: 1j * numpyro.sample("b", dist.Normal(0, 1))), ("'y'", "complex")),
    "empty support": (of_prior(lambda: numpyro.sample("b", dist.Uniform(2.0, 1.0))), ("'b'",)),
    "endless support": (
        of_prior(lambda: numpyro.sample("b", dist.Uniform(0.0, jnp.inf))),
        ("'b'",),
    ),
    "nan gradient": (
        of_prior(lambda: jnp.sqrt(0.0 * numpyro.sample("b", dist.Normal(0, 1)))),
        ("gradient",),
    ),
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_are_named(name):
    model, words = BAD_MODELS[name]
    refusal(lambda: start(model, *table(12)), *words)


# Where a minibatch is one row, some of these cannot be told from one row for all.
@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("batch_size", [1, 11])
@pytest.mark.parametrize(
    "name",
    [
        "first rows of y",
        "all rows of y",
        "rows in the event",
        "rows times rows",
        "outside of the plate",
        "factor outside of the plate",
        "one latent a row outside",
        "rows of another plate",
        "one name for two plates",
        "short array in a loop",
    ],
)
def test_bad_models_are_named_at_any_minibatch_size(name, batch_size):
    refusal(lambda: start(BAD_MODELS[name][0], *table(12), batch_size=batch_size))


GOOD_MODELS: dict[str, Callable] = {
    # Three more entries a row, as many as there are rows in a minibatch.
    "an axis as long as the minibatch": in_plate(
        lambda X, y, i, b, n: y_site(jnp.ones((4, 1)) * (X[i] @ b), jnp.stack([y[i]] * 4))
    ),
    "zeros in place of data": in_plate(
        lambda X, y, i, b, n: numpyro.sample(
            "y", dist.Poisson(0.5 * (y[i] - X[i] @ b) ** 2), obs=jnp.zeros(len(i), int)
        )
    ),
    "one value for all rows": in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, y.mean())),
    "factor of the rows": in_plate(
        lambda X, y, i, b, n: numpyro.factor("f", -jnp.square(y[i] - X[i] @ b))
    ),
    "a jitted helper that returns both": in_plate(
        lambda X, y, i, b, n: y_site(*jax.jit(lambda X, y, i: (X[i] @ b, y[i]))(X, y, i))
    ),
    "improper": of_prior(
        lambda: numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
    ),
    "whole numbers for reals": in_plate(
        lambda X, y, i, b, n: y_site(X[i] @ b, jnp.round(y).astype(int)[i])
    ),
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", GOOD_MODELS)
def test_unusual_models_pass(name, batch_size):
    passes(lambda: start(GOOD_MODELS[name], *table(12), batch_size=batch_size))


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    ("site", "match"),
    [
        (lambda: numpyro.sample("b", dist.ProjectedNormal(jnp.ones(2))), "'b'"),
        (lambda: numpyro.sample("b", dist.Normal(0.0, -1.0)), "invalid scale parameter"),
        (lambda: numpyro.sample("y", dist.Normal(0.0, 1.0)), "unique names but got `y`"),
    ],
)
def test_left_to_numpyro(site, match):
    """Its own sentences are as clear: NUTS raises the same."""
    X, y = (jnp.asarray(x) for x in table(6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kernel in (SGHMCSplit, NUTS):
            with pytest.raises((ValueError, AssertionError), match=match):
                quietly(kernel(of_prior(site)), num_warmup=1, num_samples=1).run(
                    jax.random.key(0), X, y, batch_size=3 if kernel is SGHMCSplit else None
                )


# --- Misuses of options -------------------------------------------------------------------------


def is_positive_number(x: Any) -> bool:
    if isinstance(x, (np.ndarray, jax.Array)):
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.number):
            return False
    elif isinstance(x, (bool, np.bool_)) or not isinstance(
        x, (int, float, np.integer, np.floating, Fraction, Decimal)
    ):
        return False
    try:
        return bool(np.isfinite(float(x)) and float(x) > 0)
    except (OverflowError, TypeError, ValueError):
        return False


ZEROS = int, float, np.integer, np.floating, np.ndarray, jax.Array, Fraction, Decimal


def is_zero_or_positive(x: Any) -> bool:
    if isinstance(x, bool) or getattr(x, "dtype", None) == np.bool_:
        return False
    try:
        is_zero = isinstance(x, ZEROS) and x == 0
        return is_positive_number(x) or (is_zero and is_positive_number(x + 1))
    except (TypeError, ValueError, ArithmeticError):
        return False


def is_positive_integer(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and x > 0


def is_flag(x: Any) -> bool:
    return isinstance(x, (bool, np.bool_))


def is_one_of(*names: str) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, str) and x in names


def or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or test(x)


SHARED: dict[str, Callable[[Any], bool]] = {
    "step_size": or_none(lambda x: callable(x) or is_positive_number(x)),
    "num_steps": or_none(is_positive_integer),
    "adapt_step_size": is_flag,
    "adapt_mass_matrix": is_flag,
    "noise_compensation": is_flag,
    "gradient": is_one_of("auto", "plain", "control_variate", "second_order_control_variate"),
    "minibatch": is_one_of("auto", "blocks", "epoch", "iid"),
    "target_bias": is_positive_number,
    "init_strategy": callable,
    "friction": is_positive_number,
    "per_coordinate": is_flag,
    "num_leapfrog": lambda x: is_positive_integer(x) and x == 1,  # for another scheme
    "momentum_period": or_none(is_positive_integer),
    "thermostat_period": or_none(is_positive_integer),
    "a": lambda x: is_positive_number(x) and 0.5 <= float(x) <= 2,
    "m": is_positive_number,
    "c": is_positive_number,
    "sigma_p": is_positive_number,
    "sigma_theta": is_zero_or_positive,
    "sigma_xi": is_zero_or_positive,
    "gamma": is_positive_number,
    "inverse_metric": lambda x: callable(x) or (isinstance(x, str) and x == "potential"),
}


def options_of(kernel: Any) -> list[str]:
    own = set(inspect.signature(kernel).parameters)
    shared = set(inspect.signature(SGHMCSplit).parameters) - {"friction"}
    if kernel not in vars(numpyro_sgmcmc).values():  # a subclass of the tests'
        own.discard("friction")
    return sorted((own | shared) & {*SHARED, "scheme"})


def numbers() -> Any:
    return st.one_of(st.integers(-2, 3), st.integers(), st.floats(), st.fractions(), st.decimals())


def anything() -> Any:
    """Values of every kind that someone might pass."""
    scalar = st.one_of(
        st.none(),
        st.booleans(),
        numbers(),
        st.text(max_size=4),
        st.sampled_from(["auto", "plain", "iid", "blocks", "euler", "potential", "1.0", "0.1"]),
        st.binary(max_size=2),
        st.complex_numbers(),
    )
    held = st.one_of(st.booleans(), st.integers(-2, 3), st.floats(width=32))
    return st.one_of(
        scalar,
        st.lists(scalar, max_size=2),
        st.dictionaries(st.text(max_size=2), scalar, max_size=1),
        held.map(np.array),
        held.map(jnp.asarray),
        held.map(lambda x: np.array([x])),
        held.map(lambda x: np.array(x)[()]),
        st.just(np.array(["auto", "plain"])),
        st.just(np.array("auto")),
        st.just(object()),
        st.just(lambda i: 0.1),
        st.just(SGHMCSplit),
        st.just(jax.random.key(0)),
    )


@few(200)
@given(data=st.data(), kernel=st.sampled_from(KERNELS))
def test_every_option_takes_what_it_should_and_nothing_else(data, kernel):
    option = data.draw(st.sampled_from(options_of(kernel)))
    value = data.draw(anything())
    is_valid = SHARED.get(option, is_one_of(*kernel.largest_step_sizes))(value)
    if is_valid:
        kernel(by_index, **{option: value})
    else:
        refusal(lambda: kernel(by_index, **{option: value}), f"`{option}`")


@few(100)
@given(
    data=st.data(),
    kernel=st.sampled_from(KERNELS),
    name=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12),
)
def test_misspelt_options_are_named(data, kernel, name):
    known = set(inspect.signature(kernel).parameters) | set(SHARED)
    if data.draw(st.booleans()):  # a known one with a letter missing
        right = data.draw(st.sampled_from(sorted(known)))
        k = data.draw(st.integers(0, len(right) - 1))
        name = right[:k] + right[k + 1 :]
    if name and name not in known | {"scheme", "dense_mass", "inverse_mass_matrix", "options"}:
        refusal(lambda: kernel(by_index, **{name: 1}), f"'{name}'")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wrong", [3, "model", SGHMCSplit(by_index), [by_index], np.ones(3)])
def test_what_is_no_model_and_no_potential(kernel, wrong):
    refusal(lambda: kernel(wrong), "`model`")
    refusal(lambda: kernel(potential_fn=wrong), "`potential_fn`")
    refusal(lambda: kernel(by_index, by_index), "`model`", "`potential_fn`")


BAD_SCHEDULES: dict[str, Callable] = {
    "array": lambda i: jnp.full(1, 0.1),
    "arrays": lambda i: jnp.full(2, 0.1),
    "complex": lambda i: 0.1 + 0j,
    "text": lambda i: "0.1",
    "none": lambda i: None,
    "no argument": lambda: 0.1,
    "two arguments": lambda i, j: 0.1,
    "list": [0.1, 0.2].__getitem__,
    "if": lambda i: 0.1 if i < 3 else 0.2,
    "nan": lambda i: jnp.nan,
    "infinite": lambda i: jnp.inf,
    "negative": lambda i: -0.1,
    "zero": lambda i: 0.0,
    "raises": lambda i: 1 / 0,
    "float": float,
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", BAD_SCHEDULES)
def test_bad_schedules_are_named(name):
    options = {"step_size": BAD_SCHEDULES[name]}
    refusal(lambda: start(by_index, *table(6), batch_size=2, options=options), "`step_size")


def is_matrix(x: Any, dim: int) -> bool:
    """Whether an array is an inverse mass matrix or its diagonal."""
    if not (isinstance(x, np.ndarray) and x.dtype.kind in "iuf" and np.isfinite(x).all()):
        return False
    if x.shape == (dim,):
        return bool((x > 0).all())
    return (
        x.shape == (dim, dim) and np.array_equal(x, x.T) and bool(np.linalg.eigvalsh(x).min() > 0)
    )


@st.composite
def matrices(draw: Any) -> Any:
    """Mostly matrices of the right shape, right or wrong in what they hold."""
    shape = draw(st.sampled_from([(2,), (2, 2), (3,), (3, 3), (2, 3), (), (1, 2, 2)]))
    entry = st.one_of(st.integers(-2, 4), st.sampled_from([np.nan, np.inf, 0.5]))
    x = np.array([draw(entry) for _ in range(int(np.prod(shape)))], float).reshape(shape)
    if len(shape) == 2 and shape[0] == shape[1] and draw(st.booleans()):
        x = x + x.T + draw(st.sampled_from([0, 9])) * np.eye(shape[0])
    return x.astype(draw(st.sampled_from(["f8", "f4", "c8", "O", "U3"]))) if shape else x


@pytest.mark.usefixtures("no_warm_up")
@few(20)
@given(matrix=matrices(), is_block=st.booleans())
def test_inverse_mass_matrices(matrix, is_block):
    value = {("beta",): matrix} if is_block else matrix
    options = {"inverse_mass_matrix": value}
    call = lambda: start(by_index, *table(6), batch_size=2, options=options)  # noqa: E731
    if is_matrix(matrix, 2):
        passes(call)
    else:
        refusal(call, "`inverse_mass_matrix`")


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("inverse_mass_matrix", x) for x in ("a", 1.0, [[1], [1, 2]], {3: np.ones(2)})),
        ("inverse_mass_matrix", {("beta", "z"): np.ones(3)}),
        ("inverse_mass_matrix", {("beta",): np.ones(2), "beta": np.ones(2)}),
        ("inverse_mass_matrix", {(): np.ones(0)}),
        *(("dense_mass", x) for x in ("beta", 1, 0, "", ("beta",), {"beta"}, np.ones(2))),
        *(("dense_mass", x) for x in ([1], [()], [[]], [None], [("z",)], [("beta", 3)])),
        ("init_strategy", lambda: 3),
        ("init_strategy", lambda site: 3),
        ("init_strategy", init_to_value(values={"beta": np.ones(3)})),
        ("init_strategy", init_to_value(values={"beta": 1.0})),
        ("init_strategy", init_to_value(values={"beta": "a"})),
    ],
)
def test_options_that_do_not_fit_the_model_are_named(option, value):
    options = {option: value}
    refusal(lambda: start(by_index, *table(6), batch_size=2, options=options), f"`{option}`")


@pytest.mark.usefixtures("no_warm_up")
@few(20)
@given(
    shape=st.sampled_from([(2,), (2,), (2,), (), (1,), (3,), (2, 1), (1, 2)]),
    dtype=st.sampled_from(["f4", "f8", "f2", "i4", "?", "c8"]),
    entry=st.sampled_from([0.0, 1.0, np.nan, np.inf]),
    site=st.sampled_from(["beta", "beta", "alpha", ""]),
    others=st.sampled_from([{}, {}, {"y": np.zeros(6)}, {"z": np.zeros(2)}]),
    num_chains=st.sampled_from([None, None, 2, 3]),
)
@example((2,), "c8", 1.0, "beta", {}, None)
def test_init_params(shape, dtype, entry, site, others, num_chains):
    """Unconstrained values of each latent site, one a chain, or an error that names them."""
    key = jax.random.key(0)
    if num_chains is not None:
        key, shape = jax.random.split(key, num_chains), (num_chains, *shape)
    if not np.isfinite(entry) and dtype in ("i4", "?"):
        dtype = "f4"
    init_params = {site: np.full(shape, entry).astype(dtype), **others}
    call = lambda: start(  # noqa: E731
        by_index, *table(6), batch_size=2, init_params=init_params, rng_key=key
    )
    expected = (2,) if num_chains is None else (num_chains, 2)
    is_right = site == "beta" and not others and shape == expected and np.isfinite(entry)
    if is_right and dtype != "c8":
        passes(call)
    else:
        refusal(call, "`init_params`")


@pytest.mark.parametrize("wrong", [np.zeros(2), (0.0, 0.0), 3.0, "beta"])
def test_init_params_that_are_no_dict(no_warm_up, wrong):
    refusal(lambda: start(by_index, *table(6), batch_size=2, init_params=wrong), "`init_params`")


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    "rng_key",
    [
        0,
        "key",
        [0, 1],
        None.__class__,
        np.float32(1),
        np.zeros(2, np.int32),
        np.zeros(3, np.uint32),
        np.zeros((2, 2, 2), np.uint32),
        np.zeros((), np.uint32),
        jax.random.split(jax.random.key(0), (2, 2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_random_key(rng_key):
    refusal(lambda: start(by_index, *table(6), batch_size=2, rng_key=rng_key), "`rng_key`")


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    "rng_key",
    [
        jax.random.key(0, impl="rbg"),
        jax.random.PRNGKey(0),
        np.zeros(2, np.uint32),
        jax.random.split(jax.random.key(0), 3),
        jax.random.split(jax.random.PRNGKey(0), 3),
    ],
)
def test_every_kind_of_random_key(rng_key):
    passes(lambda: start(by_index, *table(6), batch_size=2, rng_key=rng_key))


BAD_POTENTIALS: dict[str, tuple[Callable, Any, str]] = {
    "vector": (lambda z: z**2, np.zeros(2), "`potential_fn`"),
    "one entry": (lambda z: jnp.sum(z**2, keepdims=True), np.zeros(2), "`potential_fn`"),
    "complex": (lambda z: z.sum() + 0j, np.zeros(2), "`potential_fn`"),
    "integer": (lambda z: 3, np.zeros(2), "`potential_fn`"),
    "none": (lambda z: None, np.zeros(2), "`potential_fn`"),
    "text": (lambda z: "a", np.zeros(2), "`potential_fn`"),
    "dict": (lambda z: {"u": z.sum()}, np.zeros(2), "`potential_fn`"),
    "no argument": (lambda: 3.0, np.zeros(2), "`potential_fn`"),
    "if": (lambda z: z.sum() if z[0] > 0 else -z.sum(), np.zeros(2), "`potential_fn`"),
    "other sites": (lambda z: z["a"], {"b": 0.0}, "`potential_fn`"),
    "nan": (lambda z: jnp.nan * z.sum(), np.zeros(2), "`init_params`"),
    "no start": (lambda z: z.sum(), None, "`init_params`"),
    "no values": (lambda z: 0.0, {}, "`init_params`"),
    "empty": (lambda z: z.sum(), np.zeros(0), "`init_params`"),
    "complex start": (lambda z: jnp.abs(z).sum(), np.zeros(2) + 1j, "`init_params`"),
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", BAD_POTENTIALS)
def test_bad_potential_functions_are_named(name):
    potential, init_params, word = BAD_POTENTIALS[name]
    kernel = SGHMCSplit(potential_fn=potential)
    refusal(lambda: kernel.init(jax.random.key(0), 10, init_params, (), {}), word)


# --- Misuses of kernels that take functions -----------------------------------------------------


def recipe(**functions: Any) -> Any:
    functions = {
        "diffusion": lambda z: jnp.ones(z.size),
        "curl": lambda z: jnp.zeros((z.size, z.size)),
        "hamiltonian": lambda z: 0.0,
        **functions,
    }
    return numpyro_sgmcmc.RecipeKernel(by_index, **functions)


def check_dynamics(kernel: Any) -> None:
    """The checks that follow the warm-up, without it."""
    arguments = Arguments(table(6), {"batch_size": 2})
    target = model_target(by_index, arguments, init_to_uniform)
    coordinates = Coordinates(jnp.zeros(2), jnp.ones(2))
    anchored = SimpleNamespace(coordinates=coordinates)
    kernel._adapted = arguments, SimpleNamespace(anchored=anchored)
    kernel._check_dynamics(kernel._located_dynamics(target, coordinates), target.dim)


BAD_FUNCTIONS: dict[str, Callable] = {
    "no argument": lambda: 1.0,
    "shapes": lambda z: jnp.ones(7) + jnp.ones(5),
    "none": lambda z: None,
    "text": lambda z: "a",
    "nan": lambda z: jnp.full(2, jnp.nan),
    "shape": lambda z: jnp.ones((2, 3)),
    "raises": lambda z: 1 / 0,
    "if": lambda z: 1.0 if jax.tree.leaves(z)[0].sum() > 1e9 else None,
}


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
@pytest.mark.parametrize("option", ["diffusion", "curl", "hamiltonian"])
def test_bad_functions_of_a_recipe_are_named(option, name):
    refusal(lambda: check_dynamics(recipe(**{option: BAD_FUNCTIONS[name]})), f"`{option}`")


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
@pytest.mark.parametrize("kernel", ["SGRHMC", "SGRLD"])
def test_bad_metrics_are_named(kernel, name):
    made = getattr(numpyro_sgmcmc, kernel)(by_index, inverse_metric=BAD_FUNCTIONS[name])
    refusal(lambda: check_dynamics(made), "`inverse_metric`")


@pytest.mark.parametrize("wrong", [*BAD_FUNCTIONS.values(), lambda key, dim: jnp.ones((2, 2))])
def test_bad_auxiliary_variables_are_named(wrong):
    refusal(lambda: check_dynamics(recipe(auxiliary=wrong)), "`auxiliary`")


# --- Misuses of rows on the host ----------------------------------------------------------------


class Reader:
    """Rows by an integer array, through what is done to them on the way."""

    def __init__(self, x: np.ndarray, change: Callable[[np.ndarray], Any], dtype: Any = None):
        self.x, self.change = x, change
        self.shape, self.dtype = x.shape, dtype or x.dtype

    def __getitem__(self, rows: Any) -> Any:
        return self.change(self.x[rows])


def fails(x: np.ndarray) -> Any:
    raise OSError("no disk")


BAD_SOURCES: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "fails": (lambda y: Reader(y, fails), "no disk"),
    "none": (lambda y: Reader(y, lambda x: None), "HostArray('y'"),
    "texts": (lambda y: Reader(y, lambda x: x.astype(str)), "HostArray('y'"),
    "one row less": (lambda y: Reader(y, lambda x: x[:-1]), "gave shape"),
    "columns": (lambda y: Reader(y, lambda x: x[:, None]), "gave shape"),
    "missing": (lambda y: Reader(y, lambda x: x * np.nan), "missing"),
    "infinite": (lambda y: Reader(y, lambda x: x * np.inf), "missing"),
    "masked": (lambda y: np.ma.masked_greater(y, -9.0), "masked"),
    "complex": (lambda y: Reader(y, lambda x: x + 1j), "complex"),
    "fractions for integers": (lambda y: Reader(y, lambda x: x, np.int32), "int32"),
    "beyond int32": (lambda y: np.full(len(y), 2**40), "int32"),
    "beyond float32": (lambda y: np.full(len(y), 1e300), "infinite"),
    "one short": (lambda y: y[:-1], "rows"),
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", BAD_SOURCES)
def test_bad_sources_are_named(name):
    make, word = BAD_SOURCES[name]
    X, y = table(6)
    refusal(lambda: start(by_index, X, HostArray(make(y), name="y"), batch_size=2), "y", word)


@pytest.mark.parametrize(
    "source",
    [None, 3.0, "rows", [1.0], {}, np.float32(1), np.zeros((0, 2)), HostArray(table(3)[1])],
)
def test_what_is_no_source(source):
    refusal(lambda: HostArray(source), "HostArray")


@pytest.mark.usefixtures("no_warm_up")
@few(15)
@given(
    rows=st.lists(st.integers(-6, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(["f2", "f4", "f8", "i1", "i4", "i8", "u1", "?"]),
    form=st.sampled_from(["plain", "reader", "sorted"]),
)
def test_rows_on_the_host_are_those_in_memory(rows, dtype, form):
    x = (np.arange(12).reshape(6, 2) % 5).astype(dtype)
    source = Reader(x, lambda x: x) if form == "reader" else x
    host = HostArray(source, sort=form == "sorted")
    found, expected = host[np.array(rows)], jnp.asarray(x)[np.array(rows)]
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


# --- Misuses of runs on disk --------------------------------------------------------------------


def on_disk(**settings: Any) -> Any:
    settings = {"num_warmup": 1, "num_samples": 2, "progress_bar": False, **settings}
    return numpyro_sgmcmc.CheckpointedMCMC(settings.pop("kernel", SGHMCSplit(by_index)), **settings)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        *(({"checkpoint": x}, "`checkpoint`") for x in (None, 3, "", ["a"], b"a")),
        *(({"checkpoint_every": x}, "`checkpoint_every`") for x in (0, -1, 1.5, "a", True)),
        *(({"keep_draws": x}, "`keep_draws`") for x in (None, 1, "yes")),
        *(({"num_samples": x}, "`num_samples`") for x in (0, -1, 2.0, None)),
        *(({"thinning": x}, "`thinning`") for x in (0, -1, 2.0, 3)),
        *(({"kernel": x}, "`sampler`") for x in (NUTS(by_index), None, SGHMCSplit)),
    ],
)
def test_bad_settings_of_a_run_on_disk_are_named(settings, word, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    refusal(lambda: on_disk(**{"checkpoint": tmp_path / "run", **settings}), word)


@pytest.mark.usefixtures("no_warm_up")
def test_bad_folders_and_keys_of_a_run_on_disk_are_named(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    file = tmp_path / "file"
    file.write_text("something else")
    X, y = table(6)
    key = jax.random.key(0)
    refusal(lambda: on_disk(checkpoint=file).run(key, X, y, batch_size=2), "`checkpoint`", "file")
    refusal(lambda: on_disk(checkpoint=file).resume(X, y, batch_size=2), "file")
    run = on_disk(checkpoint=tmp_path / "run")
    refusal(lambda: run.run(0, X, y, batch_size=2), "`rng_key`")
    refusal(lambda: run.resume(X, y, batch_size=2), "run")
    refusal(run.running_mean, "`run`")
    refusal(lambda: run.run(key, X, y[:-1], batch_size=2), "'rows'")


# --- Misuses of diagnostics ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished() -> dict[str, Any]:
    """Short runs: one of ours, one of another model, one of NUTS, and one that has not run."""
    X, y = table(12)

    def other(y: Any, batch_size: Any) -> None:
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(level, 1), obs=y[i])

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        mcmc = quietly(kernel, num_warmup=2, num_samples=8)
        mcmc.run(jax.random.key(0), *args, **kwargs)
        return mcmc

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"step_size": 0.1, "num_steps": 2}
        return {
            "ours": run(SGHMCSplit(by_index, **options), X, y, batch_size=4),
            "other": run(SGHMCSplit(other, **options), y, batch_size=4),
            "NUTS": run(NUTS(by_index), jnp.asarray(X), jnp.asarray(y)),
            "not run": quietly(SGHMCSplit(by_index)),
        }


ON_RUNS: dict[str, Callable[[Any], Any]] = {
    "bias_report": diagnostics.bias_report,
    "print_summary": diagnostics.print_summary,
    "calibrated_samples": diagnostics.calibrated_samples,
    "ess_per_gradient": diagnostics.ess_per_gradient,
    "compare_with_finer": lambda mcmc: diagnostics.compare_with_finer(mcmc, jax.random.key(0)),
}


@pytest.mark.parametrize("name", ON_RUNS)
def test_diagnostics_of_what_is_no_run_of_ours(name, finished):
    named = "bias_report" if name == "print_summary" else name
    wrong = finished["NUTS"], finished["not run"], finished["ours"].sampler, {}, None, SGHMCSplit
    for mcmc in wrong:
        refusal(lambda mcmc=mcmc: ON_RUNS[name](mcmc), f"`{named}`")


def test_misuses_of_diagnostics_are_named(finished):
    ours, key = finished["ours"], jax.random.key(0)
    d = diagnostics
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report, others = d.bias_report(ours), d.bias_report(finished["other"])
    for wrong in (0, -1, 1.5, "all", True):
        refusal(lambda w=wrong: d.bias_report(ours, num_draws=w), "`num_draws`")
    for wrong in ("yes", 1, None):
        refusal(lambda w=wrong: d.bias_report(ours, full_data=w), "`full_data`")
    for wrong in (0, 2.0, "all", -1):
        refusal(lambda w=wrong: d.print_summary(ours, prob=w), "`prob`")
    for wrong in (3, {}, "report", others):
        refusal(lambda w=wrong: d.calibrated_samples(ours, w), "`report`")
    for wrong in (0, "key", np.zeros(2, np.int32), jax.random.split(key, 2)):
        refusal(lambda w=wrong: d.compare_with_finer(ours, w), "`rng_key`")
    refusal(lambda: d.compare_with_finer(ours, key, "both"), "`change`")
    refusal(lambda: report.add_to(3), "`data`")
    pickled = pickle.loads(pickle.dumps(ours))
    for name in ("calibrated_samples", "ess_per_gradient"):
        refusal(lambda n=name: ON_RUNS[n](pickled), f"`{name}`", "again")


@few(60)
@given(
    name=st.sampled_from(["draws", "scores", "reference"]),
    wrong=st.sampled_from([None, "a", {}, 3.0, np.ones((4, 2)) + 1j, np.full((4, 2), np.nan)])
    | st.sampled_from([np.ones((4, 2)).astype(str), np.ones((3, 1)), np.zeros((0, 2))]),
)
def test_misuses_of_distances_are_named(name, wrong):
    right = np.random.default_rng(0).standard_normal((4, 2))
    d = diagnostics
    call = {
        "draws": lambda: d.stein_discrepancy(wrong, right),
        "scores": lambda: d.stein_discrepancy(right, wrong),
        "reference": lambda: d.kolmogorov_distance(right, wrong),
    }[name]
    refusal(call, f"`{name}`")


@pytest.mark.parametrize(
    "weights",
    [
        *(None, "a", {}, np.ones(3), np.zeros((1, 4)), -np.ones((1, 4)), np.full((1, 4), np.nan)),
        *(np.array([[1, np.inf, 1, 1]]), np.ones((1, 4)) * 1j, np.ones((1, 4)).astype(str)),
    ],
    ids=str,
)
def test_bad_weights_are_named(weights):
    draws = {"a": np.arange(4.0)[None]}
    refusal(lambda: schedules.weighted_mean(draws, weights), "`weights`")
    refusal(lambda: schedules.weighted_quantile(draws, weights, 0.5), "`weights`")
    refusal(lambda: schedules.without_exploration(draws, weights), "`weights`")
    refusal(lambda: schedules.resample(jax.random.key(0), draws, weights), "`weights`")


@few(60)
@given(value=anything())
def test_misuses_of_schedules_are_named(value):
    draws, weights = {"a": np.arange(4.0)[None]}, np.ones((1, 4))
    share = is_zero_or_positive(value) and float(value) <= 1
    cases = [
        ("initial", is_positive_number(value), lambda: schedules.Polynomial(value)),
        ("exponent", share and float(value) > 0, lambda: schedules.Polynomial(1.0, value)),
        ("period", is_positive_integer(value), lambda: schedules.Cyclical(1.0, value)),
        ("exploration", share and float(value) < 1, lambda: schedules.Cyclical(1.0, 3, value)),
        ("final", share, lambda: schedules.Cyclical(1.0, 3, 0.5, value)),
        ("q", share, lambda: schedules.weighted_quantile(draws, weights, value)),
        ("order", is_positive_number(value), lambda: schedules.best_exponent(value, "mse")),
    ]
    for name, is_valid, call in cases:
        if is_valid:
            call()
        else:
            refusal(call, f"`{name}`")


# --- Whole runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["host", "half"])
def test_a_short_run_gives_what_nuts_gives(form, finished):
    """Names, shapes and types of the draws, and the posterior's neighbourhood."""
    X, y = table(12)
    if form == "jax":
        X, y = jnp.asarray(X), jnp.asarray(y)
    if form == "host":
        X, y = HostArray(X), HostArray(y)
    if form == "half":
        X, y = X[::-1][::-1].astype(np.float16), np.asfortranarray(y.astype(np.float64))
    mcmc = quietly(SGHMCSplit(by_index, step_size=0.3, num_steps=5), num_warmup=5, num_samples=8)
    mcmc.run(jax.random.key(1), X, y, batch_size=5)
    ours, theirs = mcmc.get_samples(), finished["NUTS"].get_samples()
    assert ours.keys() == theirs.keys()
    for name, draws in ours.items():
        assert (draws.shape, draws.dtype) == (theirs[name].shape, theirs[name].dtype)
        assert np.isfinite(draws).all()
        assert len(np.unique(draws)) > 8
        assert np.abs(draws).max() < 4
