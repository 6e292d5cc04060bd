"""Rows on the host, checkpointed runs and diagnostics: wrong arguments are named."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpyro.infer import NUTS

import numpyro_sgmcmc
from numpyro_sgmcmc import HostArray, SGHMCSplit, diagnostics
from numpyro_sgmcmc.sampling import schedules
from tests.contract.kernels import GIVEN, quietly
from tests.hostile.calls import (
    any_values,
    assert_error_names,
    by_index,
    init_kernel,
    is_positive_integer,
    is_positive_number,
    is_zero_or_positive,
    num_examples,
    table,
)
from tests.quick import quick_if


class Reader:
    """Rows by an integer array, changed by a function."""

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
SLOW_SOURCES = {"texts", "columns", "infinite", "complex", "beyond float32"}  # as others of these


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", [quick_if(n not in SLOW_SOURCES, n) for n in BAD_SOURCES])
def test_host_array_of_a_wrong_source_is_named(name):
    make, word = BAD_SOURCES[name]
    X, y = table(6)
    assert_error_names(
        lambda: init_kernel(by_index, X, HostArray(make(y), name="y"), batch_size=2), "y", word
    )


@pytest.mark.usefixtures("no_warm_up")
@num_examples(8)
@given(
    rows=st.lists(st.integers(-6, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(["f2", "f4", "f8", "i1", "i4", "i8", "u1", "?"]),
    form=st.sampled_from(["plain", "reader", "sorted"]),
)
def test_host_array_index_gives_the_rows_in_memory(rows, dtype, form):
    x = (np.arange(12).reshape(6, 2) % 5).astype(dtype)
    source = Reader(x, lambda x: x) if form == "reader" else x
    host = HostArray(source, sort=form == "sorted")
    rows_on_host, expected = host[np.array(rows)], np.asarray(jnp.asarray(x))[rows]
    assert rows_on_host.dtype == expected.dtype
    np.testing.assert_array_equal(rows_on_host, expected)


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
def test_checkpointed_run_with_a_wrong_setting_names_it(settings, word, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    assert_error_names(lambda: on_disk(**{"checkpoint": tmp_path / "run", **settings}), word)


@pytest.mark.usefixtures("no_warm_up")
def test_checkpointed_run_with_a_wrong_folder_or_key_names_it(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    file = tmp_path / "file"
    file.write_text("something else")
    X, y = table(6)
    key = jax.random.key(0)
    assert_error_names(
        lambda: on_disk(checkpoint=file).run(key, X, y, batch_size=2), "`checkpoint`", "file"
    )
    assert_error_names(lambda: on_disk(checkpoint=file).resume(X, y, batch_size=2), "file")
    run = on_disk(checkpoint=tmp_path / "run")
    assert_error_names(lambda: run.run(0, X, y, batch_size=2), "`rng_key`")
    assert_error_names(lambda: run.resume(X, y, batch_size=2), "run")
    assert_error_names(run.running_mean, "`run`")
    assert_error_names(lambda: run.run(key, X, y[:-1], batch_size=2), "'rows'")


@pytest.fixture(scope="module")
def finished() -> dict[str, Any]:
    """Short runs: this package, another model, NUTS, and one that has not run."""
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
        return {
            "ours": run(SGHMCSplit(by_index, **GIVEN), X, y, batch_size=4),
            "other": run(SGHMCSplit(other, **GIVEN), y, batch_size=4),
            "NUTS": run(NUTS(by_index), jnp.asarray(X), jnp.asarray(y)),
            "not run": quietly(SGHMCSplit(by_index)),
        }


ON_RUNS: dict[str, Callable[[Any], Any]] = {
    "bias_report": diagnostics.bias_report,
    "print_summary": diagnostics.print_summary,
    "bias_corrected_samples": diagnostics.bias_corrected_samples,
    "ess_per_gradient": diagnostics.ess_per_gradient,
    "compare_with_finer": lambda mcmc: diagnostics.compare_with_finer(mcmc, jax.random.key(0)),
}


@pytest.mark.parametrize("name", ON_RUNS)
def test_diagnostics_of_another_object_than_a_run_name_the_function(name, finished):
    wrong = finished["NUTS"], finished["not run"], finished["ours"].sampler, {}, None, SGHMCSplit
    for mcmc in wrong:
        assert_error_names(lambda mcmc=mcmc: ON_RUNS[name](mcmc), f"`{name}`")


def test_diagnostics_with_a_wrong_argument_name_it(finished):
    ours, key = finished["ours"], jax.random.key(0)
    d = diagnostics
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report, others = d.bias_report(ours), d.bias_report(finished["other"])
    for wrong in (0, -1, 1.5, "all", True):
        assert_error_names(lambda w=wrong: d.bias_report(ours, num_draws=w), "`num_draws`")
    for wrong in ("yes", 1, None):
        assert_error_names(lambda w=wrong: d.bias_report(ours, full_data=w), "`full_data`")
    for wrong in (0, 2.0, "all", -1):
        assert_error_names(lambda w=wrong: d.print_summary(ours, prob=w), "`prob`")
    for wrong in (3, {}, "report", others):
        assert_error_names(lambda w=wrong: d.bias_corrected_samples(ours, w), "`report`")
    for wrong in (0, "key", np.zeros(2, np.int32), jax.random.split(key, 2)):
        assert_error_names(lambda w=wrong: d.compare_with_finer(ours, w), "`rng_key`")
    assert_error_names(lambda: d.compare_with_finer(ours, key, "both"), "`change`")
    assert_error_names(lambda: report.add_to(3), "`data`")
    pickled = pickle.loads(pickle.dumps(ours))
    for name in ("bias_corrected_samples", "ess_per_gradient"):
        assert_error_names(lambda n=name: ON_RUNS[n](pickled), f"`{name}`", "again")
    predictions: dict[str, Callable[[], Any]] = {
        "posterior_predictive": lambda: numpyro_sgmcmc.posterior_predictive(pickled, key),
        "log_likelihood": lambda: numpyro_sgmcmc.log_likelihood(pickled),
        "loo": lambda: numpyro_sgmcmc.loo(pickled),
        "to_arviz": lambda: numpyro_sgmcmc.to_arviz(pickled, log_likelihood=True),
    }
    for name, predict in predictions.items():
        assert_error_names(predict, f"`{name}`", "again")


@num_examples(25)
@given(
    name=st.sampled_from(["draws", "scores", "reference"]),
    wrong=st.sampled_from([None, "a", {}, 3.0, np.ones((4, 2)) + 1j, np.full((4, 2), np.nan)])
    | st.sampled_from([np.ones((4, 2)).astype(str), np.ones((3, 1)), np.zeros((0, 2))]),
)
def test_distance_with_a_wrong_array_names_it(name, wrong):
    right = np.random.default_rng(0).standard_normal((4, 2))
    d = diagnostics
    call = {
        "draws": lambda: d.stein_discrepancy(wrong, right),
        "scores": lambda: d.stein_discrepancy(right, wrong),
        "reference": lambda: d.kolmogorov_distance(right, wrong),
    }[name]
    assert_error_names(call, f"`{name}`")


@pytest.mark.parametrize(
    "weights",
    [
        *(None, "a", {}, np.ones(3), np.zeros((1, 4)), -np.ones((1, 4)), np.full((1, 4), np.nan)),
        *(np.array([[1, np.inf, 1, 1]]), np.ones((1, 4)) * 1j, np.ones((1, 4)).astype(str)),
    ],
    ids=str,
)
def test_weights_with_wrong_values_are_named(weights):
    draws = {"a": np.arange(4.0)[None]}
    assert_error_names(lambda: schedules.weighted_mean(draws, weights), "`weights`")
    assert_error_names(lambda: schedules.weighted_quantile(draws, weights, 0.5), "`weights`")
    assert_error_names(lambda: schedules.drop_exploration(draws, weights), "`weights`")
    assert_error_names(
        lambda: schedules.systematic_resample(jax.random.key(0), draws, weights), "`weights`"
    )


@num_examples(25)
@given(value=any_values())
def test_schedule_with_any_parameter_is_accepted_or_named(value):
    draws, weights = {"a": np.arange(4.0)[None]}, np.ones((1, 4))
    share = is_zero_or_positive(value) and float(value) <= 1
    cases = [
        ("initial", is_positive_number(value), lambda: schedules.Polynomial(value)),
        ("exponent", share and float(value) > 0, lambda: schedules.Polynomial(1.0, value)),
        ("period", is_positive_integer(value), lambda: schedules.Cyclical(1.0, value)),
        ("exploration", share and float(value) < 1, lambda: schedules.Cyclical(1.0, 3, value)),
        ("final", share, lambda: schedules.Cyclical(1.0, 3, 0.5, value)),
        ("q", share, lambda: schedules.weighted_quantile(draws, weights, value)),
        (
            "order",
            is_positive_number(value),
            lambda: schedules.optimal_decay_exponent(value, "mse"),
        ),
    ]
    for name, is_valid, call in cases:
        if is_valid:
            call()
        else:
            assert_error_names(call, f"`{name}`")


@pytest.mark.parametrize("form", ["host", pytest.param("half", marks=pytest.mark.slow)])
def test_short_run_has_the_sites_shapes_and_types_of_nuts(form, finished):
    X, y = table(12)
    if form == "jax":
        X, y = jnp.asarray(X), jnp.asarray(y)
    if form == "host":
        X, y = HostArray(X), HostArray(y)
    if form == "half":
        X, y = X[::-1][::-1].astype(np.float16), np.asfortranarray(y.astype(np.float64))
    options = {**GIVEN, "step_size": 0.3, "num_steps": 5}
    mcmc = quietly(SGHMCSplit(by_index, **options), num_warmup=5, num_samples=8)
    mcmc.run(jax.random.key(1), X, y, batch_size=5)
    ours, theirs = mcmc.get_samples(), finished["NUTS"].get_samples()
    assert ours.keys() == theirs.keys()
    for name, draws in ours.items():
        assert (draws.shape, draws.dtype) == (theirs[name].shape, theirs[name].dtype)
        assert np.isfinite(draws).all()
        assert len(np.unique(draws)) > 8
        assert np.abs(draws).max() < 4
