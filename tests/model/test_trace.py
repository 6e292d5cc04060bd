"""Trace, check and build: the steps from a model to its potential."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import HostArray, ShardedArray
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.row_proxies import PlateIndexRegistry, RowLookup
from numpyro_sgmcmc.errors import InvalidModelError
from numpyro_sgmcmc.model.subsampled import build_potential
from numpyro_sgmcmc.model.trace import trace_model
from numpyro_sgmcmc.model.validation import validate_model

ROWS, BATCH = 12, 4
Y = np.linspace(-1, 1, ROWS, dtype=np.float32)


def hierarchy(y, batch_size=BATCH):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.deterministic("twice", 2 * mu)
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y[i])


def test_trace_model_describes_sites_without_tracers():
    model_trace = trace_model(hierarchy, Arguments((Y,)), init_to_uniform)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(vars(model_trace)))
    assert model_trace.traced_sites["twice"] == ("deterministic", ())
    assert model_trace.traced_sites["z"] == ("sample", ("rows",))
    z = next(s for s in model_trace.sample_sites if s.name == "z")
    assert (z.shape, z.unconstrained_shape, z.is_observed) == ((BATCH,), (BATCH,), False)
    assert [s.name for s in model_trace.sample_sites if s.is_observed] == ["y"]


def test_trace_model_discrete_site_raises_in_validation_only():
    def model(y):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(k, 1.0), obs=y[i])

    model_trace = trace_model(model, Arguments((Y,)), init_to_uniform)
    with pytest.raises(InvalidModelError, match=r"'k'.*discrete"):
        validate_model(model_trace)


def test_build_potential_has_local_sites_of_full_size():
    potential = build_potential(trace_model(hierarchy, Arguments((Y,)), init_to_uniform))
    assert {s.name: s.shape for s in potential.sites} == {"mu": (), "tau": (), "z": (ROWS,)}
    assert potential.dim == ROWS + 2


@pytest.mark.parametrize("make", [HostArray, ShardedArray])
def test_trace_model_row_lookups_hold_the_users_arrays(make):
    y = make(Y)
    model_trace = trace_model(hierarchy, Arguments((y,)), init_to_uniform)
    assert model_trace.row_lookups == (RowLookup(y, "rows"),)
    assert model_trace.row_lookups[0].array is y


def test_trace_model_invalid_subsample_size_raises():
    def model(y):
        numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", ROWS, subsample_size=0):
            pass

    with pytest.raises(InvalidModelError, match=r"'rows'.*subsample_size=0"):
        trace_model(model, Arguments((Y,)), init_to_uniform)


@pytest.mark.parametrize("make", [HostArray, ShardedArray])
def test_trace_model_row_array_used_as_a_whole_raises(make):

    def model(y):
        numpyro.sample("mu", dist.Normal(0, 1))
        jnp.asarray(y)

    with pytest.raises(InvalidModelError, match=rf"test_trace.py.*{make.__name__}.*index it"):
        trace_model(model, Arguments((make(Y),)), init_to_uniform)


def test_plate_index_registry_compares_indices_by_identity():
    registry = PlateIndexRegistry()
    i, j = registry.register("a", jnp.arange(3)), registry.register("b", jnp.arange(3))
    assert [registry.find_plate(x) for x in (i, j, (i, 0), (j, slice(2)))] == ["a", "b", "a", "b"]
    for other in (jnp.arange(3), i + 0, i[:, None], 0, (), (0, i), slice(None), None):
        assert registry.find_plate(other) is None
