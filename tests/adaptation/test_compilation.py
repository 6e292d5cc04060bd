"""Ahead-of-time compilation: the compiled programs are those that are called, each one once."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import init_to_sample

from numpyro_sgmcmc import HostArray, SGHMCSplit
from numpyro_sgmcmc.compilation import aot_compile
from tests.contract.kernels import quietly
from tests.quick import quick_if

RNG = np.random.default_rng(5)
X = RNG.standard_normal((700, 3)).astype(np.float32)
Y = (X.sum(1) + RNG.standard_normal(700)).astype(np.float32)


def regression(X, y, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, 1.0), obs=y[i])


@pytest.fixture
def compiled(monkeypatch):
    """Count how often the program of each name is compiled."""
    from jax._src import compiler

    counts, compile_or_get_cached = Counter(), compiler.compile_or_get_cached

    def count(backend, computation, *args, **kwargs):
        counts[computation.operation.attributes["sym_name"].value] += 1
        return compile_or_get_cached(backend, computation, *args, **kwargs)

    monkeypatch.setattr(compiler, "compile_or_get_cached", count)
    jax.clear_caches()
    return counts


def run(*args, batch_size=None, progress_bar=False, num_chains=1, **options):
    mcmc = quietly(
        SGHMCSplit(regression, **options),
        num_warmup=2,
        num_samples=2,
        num_chains=num_chains,
        chain_method="vectorized",
    )
    mcmc.progress_bar = progress_bar  # NumPyro switches it off in parallel tests
    mcmc.run(random.key(0), *args, batch_size=batch_size)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        quick_if(False, (X, Y), {"batch_size": 50}, id="dense"),
        quick_if(True, (X, Y), {"batch_size": 50, "dense_mass": False}, id="diagonal"),
        quick_if(False, (X, Y), {}, id="all rows"),
        quick_if(False, (HostArray(X), HostArray(Y)), {"batch_size": 50}, id="on the host"),
        quick_if(
            False, (X, Y), {"batch_size": 50, "init_strategy": init_to_sample}, id="init_strategy"
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
def test_warmup_any_data_compiles_each_program_once(compiled, args, options):
    run(*args, **options)
    assert compiled["jit__run_fit_steps"] == 1
    assert compiled["jit__run_pilot_steps"] == 1
    assert compiled["jit__sum_hessian_products"] <= 1
    assert compiled["jit__evaluate_remainder_variances"] <= 1
    # The default initialisation strategy is uniform, which NumPy samples.
    assert "jit_sample_uniform" not in compiled


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "num_fits"), [(1_000, 1), (1_100, 2)])
def test_warmup_prior_inits_are_fitted_apart_beyond_a_thousand_rows(compiled, batch_size, num_fits):
    """They are fitted on fewer rows than a large minibatch has, which is another program."""
    run(np.tile(X, (4, 1)), np.tile(Y, 4), batch_size=batch_size)
    assert compiled["jit__run_fit_steps"] == num_fits
    assert compiled["jit__run_pilot_steps"] == 1


def test_run_progress_bar_compiles_chains_once(compiled):
    """JAX calls a function that reads references with other arrays than at first."""
    num_rows = 700_000  # 11 MB
    X_large, y_large = np.resize(X, (num_rows, 3)), np.resize(Y, num_rows)
    without_warmup = {
        "step_size": 0.01,
        "num_steps": 1,
        "gradient_estimator": "minibatch",
        "subsampling": "contiguous",
        "inverse_mass_matrix": np.full(3, 1e-6),
    }
    run(X_large, y_large, batch_size=50, progress_bar=True, num_chains=2, **without_warmup)
    assert compiled["jit__body_fn"] == 1


def test_aot_compile_call_reuses_the_program(compiled):
    double = jax.jit(lambda x: 2 * x)
    aot_compile(double, jax.ShapeDtypeStruct((5,), jnp.float32))
    np.testing.assert_array_equal(double(jnp.ones(5)), 2 * np.ones(5))
    assert sum(n for name, n in compiled.items() if "lambda" in name) == 1
