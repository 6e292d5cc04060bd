"""A hierarchy with a skewed likelihood: Poisson counts with an intercept and a slope per group."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_sgmcmc.adaptation.hierarchical_fit import fit_hierarchy_from_each
from numpyro_sgmcmc.model.block_arrow import find_block_arrow_layout
from tests.adaptation.inputs import make_inputs

NUM_GROUPS, NUM_ROWS = 200, 1_600


def make_model(exp):
    def model(group, x, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("groups", NUM_GROUPS):
            effect = numpyro.sample("effect", dist.Normal(mean, scale).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            g = group[i]
            eta = effect[g, 0] + x[i] * effect[g, 1]
            numpyro.sample("y", dist.Poisson(exp(eta)), obs=y[i])

    return model


model = make_model(jnp.exp)


def make_data():
    """Return groups, covariate and counts; each group has eight rows."""
    rng = np.random.default_rng(5)
    group = rng.permutation(np.repeat(np.arange(NUM_GROUPS), NUM_ROWS // NUM_GROUPS))
    x = rng.standard_normal(group.size).astype(np.float32)
    effect = 0.4 * rng.standard_normal((NUM_GROUPS, 2))
    y = rng.poisson(np.exp(effect[group, 0] + x * effect[group, 1])).astype(np.float32)
    return group, x, y


def fit_counts(batch_size, as_array=jnp.asarray, model=model):
    """Return the inputs of a warm-up and the coordinates of the effects."""
    inputs = make_inputs(model, tuple(map(as_array, make_data())), batch_size)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    position = np.zeros(inputs.potential.dim)
    return inputs, fit_hierarchy_from_each(inputs, layout, [position]).coordinates
