"""The three steps from a model to its target, and the rows by which plates are known."""

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
from numpyro_sgmcmc.errors import InvalidArgumentError
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


def test_facts_hold_nothing_that_was_traced():
    facts = trace_model(hierarchy, Arguments((Y,)), init_to_uniform)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(vars(facts)))
    assert facts.traced_sites["twice"] == ("deterministic", ())
    assert facts.traced_sites["z"] == ("sample", ("rows",))
    z = next(s for s in facts.sample_sites if s.name == "z")
    assert (z.shape, z.unconstrained_shape, z.is_observed) == ((BATCH,), (BATCH,), False)
    assert [s.name for s in facts.sample_sites if s.is_observed] == ["y"]


def test_reading_refuses_nothing_that_can_be_run():
    """What cannot be sampled is for `check` to say."""

    def model(y):
        numpyro.sample("k", dist.Bernoulli(0.5))
        with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(0, 1.0), obs=y[i])

    facts = trace_model(model, Arguments((Y,)), init_to_uniform)
    with pytest.raises(InvalidArgumentError, match="Site 'k' is discrete"):
        validate_model(facts)


def test_building_needs_the_facts_alone():
    target = build_potential(trace_model(hierarchy, Arguments((Y,)), init_to_uniform))
    assert [s.name for s in target.sites] == ["mu", "tau"]
    assert target.local_latents.names == ("z",)


@pytest.mark.parametrize("make", [HostArray, ShardedArray])
def test_indexed_arrays_are_those_that_the_user_gave(make):
    y = make(Y)
    facts = trace_model(hierarchy, Arguments((y,)), init_to_uniform)
    assert facts.row_lookups == (RowLookup(y, "rows"),)
    assert facts.row_lookups[0].array is y


def test_refusals_in_the_middle_of_a_model_come_as_they_are():
    def model(y):
        numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", ROWS, subsample_size=0):
            pass

    with pytest.raises(InvalidArgumentError, match=r"^Plate 'rows' has subsample_size=0"):
        trace_model(model, Arguments((Y,)), init_to_uniform)


@pytest.mark.parametrize(
    ("make", "error", "start"),
    [
        (HostArray, InvalidArgumentError, "The model fails at "),
        (ShardedArray, TypeError, "ShardedArray\\("),
    ],
)
def test_arrays_used_otherwise_than_by_rows(make, error, start):
    """Told by the error's type: where rows are on the host, with the line of the model."""

    def model(y):
        numpyro.sample("mu", dist.Normal(0, 1))
        jnp.asarray(y)

    with pytest.raises(error, match=f"^{start}.* as a whole: index it by"):
        trace_model(model, Arguments((make(Y),)), init_to_uniform)


def test_rows_are_known_as_the_same_object():
    issued = PlateIndexRegistry()
    i, j = issued.register("a", jnp.arange(3)), issued.register("b", jnp.arange(3))
    assert [issued.find_plate(x) for x in (i, j, (i, 0), (j, slice(2)))] == ["a", "b", "a", "b"]
    for other in (jnp.arange(3), i + 0, i[:, None], 0, (), (0, i), slice(None), None):
        assert issued.find_plate(other) is None
