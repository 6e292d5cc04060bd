"""Kernels, potentials and programs are released when nothing uses them any more.

The chains run in a loop of these tests, because NumPyro keeps the last eight runs of every kernel,
and JAX 0.10 keeps all.
"""

import gc
import weakref

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit, compilation
from numpyro_sgmcmc.model import subsampled
from tests.contract.kernels import GIVEN

Y = np.random.default_rng(0).standard_normal(60).astype(np.float32)
NUM_RUNS = 3


def make_model():
    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    return model


def run(model, **options):
    """Run a chain for two steps; return weak references to its kernel and potential."""
    kernel, data = SGHMCSplit(model, **options), ((Y,), {"batch_size": 6})
    state = kernel.init(jax.random.key(0), 2, None, *data)
    sample = jax.jit(lambda state: kernel.sample(state, *data))
    assert np.isfinite(sample(sample(state)).z["mu"])
    return [weakref.ref(x) for x in (kernel, kernel.potential)]


def num_programs():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_kernels_on_one_model_share_potential_and_programs():
    jax.clear_caches()
    gc.collect()
    model, before = make_model(), len(subsampled._potential_cache)
    kernels, programs = [], []
    for _ in range(NUM_RUNS):
        kernels.append(run(model)[0])
        programs.append(num_programs())
    assert [kernel() for kernel in kernels] == [None] * NUM_RUNS
    assert len(subsampled._potential_cache) == before + 1
    assert programs[-1] == programs[1]


@pytest.mark.slow
def test_kernels_on_new_models_are_released_with_their_programs():
    jax.clear_caches()
    gc.collect()
    before = len(subsampled._potential_cache)
    refs = [ref for _ in range(2) for ref in run(make_model())]
    jax.clear_caches()
    gc.collect()
    assert len(subsampled._potential_cache) == before
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.slow
@pytest.mark.skipif(not compilation._MEMORY_MAPS_FILE.exists(), reason="needs Linux's /proc")
def test_clear_compilation_cache_if_full_clears_programs_near_the_limit_only():
    jax.clear_caches()
    others = num_programs()  # of other tests
    model = make_model()
    run(model, **GIVEN)
    programs = num_programs()
    num_maps = compilation._MEMORY_MAPS_FILE.read_text().count("\n")
    compilation.clear_compilation_cache_if_full(max_num_maps=4 * num_maps)
    assert num_programs() == programs
    compilation.clear_compilation_cache_if_full(max_num_maps=num_maps)
    assert num_programs() - others < (programs - others) / 4
    run(model, **GIVEN)
