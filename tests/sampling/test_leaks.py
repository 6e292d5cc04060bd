"""What a process keeps of kernels that are gone: nothing, once JAX has forgotten its programs.

The chains run in a loop of the test's own. NumPyro keeps the last eight runs, and JAX 0.10 all, of
every kernel's.
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

Y = np.random.default_rng(0).standard_normal(60).astype(np.float32)
RUNS = 12


def make_model():
    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    return model


def run(model):
    """A short run; weak references to its kernel, target and adaptation."""
    kernel, data = SGHMCSplit(model), ((Y,), {"batch_size": 6})
    state = kernel.init(jax.random.key(0), 2, None, *data)
    sample = jax.jit(lambda state: kernel.sample(state, *data))
    assert np.isfinite(sample(sample(state)).z["mu"])
    return [weakref.ref(x) for x in (kernel, kernel.potential)]


def num_programs():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_kernels_on_one_model_leave_nothing():
    jax.clear_caches()
    gc.collect()
    model, before = make_model(), len(subsampled._potential_cache)
    kernels, programs = [], []
    for _ in range(RUNS):
        kernels.append(run(model)[0])
        programs.append(num_programs())
    assert [kernel() for kernel in kernels] == [None] * RUNS
    assert len(subsampled._potential_cache) == before + 1
    assert programs[-1] == programs[1]


def test_new_models_are_gone_with_their_programs():
    jax.clear_caches()
    gc.collect()
    before = len(subsampled._potential_cache)
    refs = [ref for _ in range(RUNS) for ref in run(make_model())]
    jax.clear_caches()
    gc.collect()
    assert len(subsampled._potential_cache) == before
    assert [ref() for ref in refs] == [None] * len(refs)


def test_programs_are_forgotten_where_mappings_run_short(monkeypatch, tmp_path):
    if not compilation._MEMORY_MAPS_FILE.exists():
        pytest.skip("mappings are Linux's")
    jax.clear_caches()
    others = num_programs()  # which other tests hold
    model = make_model()
    run(model)
    programs = num_programs()
    allowed = tmp_path / "max_map_count"
    monkeypatch.setattr(compilation, "_MAX_MEMORY_MAPS_FILE", allowed)
    mappings = compilation._MEMORY_MAPS_FILE.read_text().count("\n")
    allowed.write_text(str(4 * mappings))
    compilation.clear_compilation_cache_if_full()
    assert num_programs() == programs
    allowed.write_text(str(mappings))
    compilation.clear_compilation_cache_if_full()
    assert num_programs() - others < (programs - others) / 4
    run(model)
