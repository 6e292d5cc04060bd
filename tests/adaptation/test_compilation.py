"""What is compiled ahead is what is called: nothing is compiled twice."""

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
    """Names of the programs handed to the compiler, with how often each was."""
    from jax._src import compiler

    found, compile_or_get_cached = Counter(), compiler.compile_or_get_cached

    def counted(backend, computation, *args, **kwargs):
        found[computation.operation.attributes["sym_name"].value] += 1
        return compile_or_get_cached(backend, computation, *args, **kwargs)

    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    jax.clear_caches()
    return found


@pytest.mark.parametrize(
    ("args", "kwargs", "options"),
    [
        quick_if(False, (X, Y), {"batch_size": 50}, {}, id="dense"),
        quick_if(True, (X, Y), {"batch_size": 50}, {"dense_mass": False}, id="diagonal"),
        quick_if(True, (X, Y), {}, {}, id="all rows"),
        quick_if(False, (HostArray(X), HostArray(Y)), {"batch_size": 50}, {}, id="host"),
        quick_if(
            True, (X, Y), {"batch_size": 50}, {"init_strategy": init_to_sample}, id="strategy"
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
def test_nothing_is_compiled_twice(compiled, args, kwargs, options):
    mcmc = quietly(SGHMCSplit(regression, **options), num_warmup=2, num_samples=2)
    mcmc.run(random.key(0), *args, **kwargs)
    assert sum(compiled[f"jit__run_{k}_steps"] for k in ("fit", "pilot")) == 2  # of the fit and of the pilot chains
    assert compiled["jit__sum_hessian_products"] <= 1
    assert compiled["jit__evaluate_remainder_variances"] <= 1


def test_starts_by_the_prior_on_fewer_rows_are_compiled_once(compiled):
    mcmc = quietly(SGHMCSplit(regression), num_warmup=2, num_samples=2)
    mcmc.run(random.key(0), np.tile(X, (4, 1)), np.tile(Y, 4), batch_size=1_100)
    assert sum(compiled[f"jit__run_{k}_steps"] for k in ("fit", "pilot")) == 3  # of two fits and the pilot chains


def test_up_to_a_thousand_rows_there_is_one_fit(compiled):
    mcmc = quietly(SGHMCSplit(regression), num_warmup=2, num_samples=2)
    mcmc.run(random.key(0), np.tile(X, (4, 1)), np.tile(Y, 4), batch_size=1_000)
    assert sum(compiled[f"jit__run_{k}_steps"] for k in ("fit", "pilot")) == 2  # and of the pilot chains


def test_uniform_starts_are_not_compiled(compiled):
    quietly(SGHMCSplit(regression), num_warmup=2, num_samples=2).run(
        random.key(0), X, Y, batch_size=50
    )
    assert "jit_start" not in compiled


def test_a_progress_bar_costs_no_second_compilation_of_the_chains(compiled):
    """Of a function that reads references JAX makes other arrays than it is first called with."""
    several = {"num_chains": 2, "chain_method": "vectorized"}
    mcmc = quietly(SGHMCSplit(regression), num_warmup=2, num_samples=2, **several)
    mcmc.progress_bar = True  # NumPyro shows none in parallel tests
    rows = 700_000  # 11 MB
    mcmc.run(random.key(0), np.resize(X, (rows, 3)), np.resize(Y, rows), batch_size=50)
    assert compiled["jit__body_fn"] == 1


def test_a_call_takes_what_was_compiled_ahead(compiled):
    double = jax.jit(lambda x: 2 * x)
    aot_compile(double, jax.ShapeDtypeStruct((5,), jnp.float32))
    np.testing.assert_array_equal(double(jnp.ones(5)), 2 * np.ones(5))
    assert sum(n for name, n in compiled.items() if "lambda" in name) == 1
