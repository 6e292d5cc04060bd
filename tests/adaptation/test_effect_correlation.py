"""Models with effects of several groupings: layouts, Hessians, and unbiased gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc.adaptation.effect_correlation import EffectCorrelation
from numpyro_sgmcmc.adaptation.hierarchical_fit import (
    evaluate_block_arrow,
    factorize_inverse_blocks,
)
from numpyro_sgmcmc.model.block_arrow import find_block_arrow_layout
from numpyro_sgmcmc.model.gradient_estimators import SecondOrderControlVariate, make_gradient_fn
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.adaptation.inputs import make_inputs

ROWS, USERS, ITEMS, TAGS = 600, 50, 40, 30


def sample_effects(name, num_groups, scale):
    with numpyro.plate(f"groups of {name}", num_groups):
        return numpyro.sample(name, dist.Normal(0, scale))


def observe(eta, y, batch_size):
    with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(eta(i))), obs=y[i])


def declare_scales():
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    return mean, numpyro.sample("scale", dist.HalfNormal(1).expand([3]).to_event(1))


def crossed(user, item, tag, x, y, batch_size=None):
    """Users with two effects, of which a row may have one, and items."""
    mean, scale = declare_scales()
    first, slope = (sample_effects(name, USERS, scale[0]) for name in ("first", "slope"))
    second = sample_effects("second", ITEMS, scale[1])
    observe(
        lambda i: mean + first[user[i]] + slope[user[i]] * x[i] + second[item[i]], y, batch_size
    )


def three_factors(user, item, tag, x, y, batch_size=None):
    mean, scale = declare_scales()
    a, b, c = (
        sample_effects(name, num, scale[k])
        for k, (name, num) in enumerate({"a": USERS, "b": ITEMS, "c": TAGS}.items())
    )
    observe(lambda i: mean + a[user[i]] * jnp.exp(b[item[i]]) + c[tag[i]], y, batch_size)


def nested(user, item, tag, x, y, batch_size=None):
    """Each user belongs to one hospital."""
    mean, scale = declare_scales()
    patient = sample_effects("patient", USERS, scale[0])
    hospital = sample_effects("hospital", 30, scale[1])
    observe(lambda i: mean + patient[user[i]] + hospital[user[i] % 30], y, batch_size)


def prepare(model, rows=ROWS):
    rng = np.random.default_rng(0)
    user, item, tag = (rng.integers(0, num, rows) for num in (USERS, ITEMS, TAGS))
    x = rng.integers(0, 2, rows).astype(np.float32)
    y = rng.poisson(1.0, rows).astype(np.float32)
    inputs = make_inputs(model, tuple(map(jnp.asarray, (user, item, tag, x, y))), 60)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    position = 0.3 * rng.standard_normal(inputs.potential.dim)
    return inputs, layout, position, rng


@pytest.mark.parametrize(
    ("model", "groupings"),
    [
        (crossed, [(USERS, 2), (ITEMS, 1)]),
        (three_factors, [(USERS, 1), (ITEMS, 1), (TAGS, 1)]),
        (nested, [(30, 1), (USERS, 1)]),
    ],
)
def test_hessian_of_several_groupings(model, groupings):
    inputs, layout, position, rng = prepare(model)
    sizes = [(columns.stop - columns.start, k) for columns, k in layout.groupings]
    assert sorted(sizes) == sorted(groupings)
    gradient, hessian = evaluate_block_arrow(inputs, layout, position)
    potential, arguments = inputs.potential, inputs.arguments
    v = rng.standard_normal((2, potential.dim))
    q = jnp.asarray(position, "f")
    expected = potential.full_hessian_products(q, jnp.asarray(v, "f"), arguments)
    np.testing.assert_allclose(hessian @ v, expected, rtol=1e-3, atol=2e-2)
    np.testing.assert_allclose(gradient, potential.full_gradient(q, arguments), atol=1e-2)
    if model is nested:  # a line for each user and a few for each hospital
        assert hessian.pairs.targets.size < 2 * (USERS + 30)


def estimate_epoch_mean(inputs, preconditioner, q):
    potential, arguments = inputs.potential, inputs.arguments

    @jax.jit
    def estimate(rows):
        return make_gradient_fn(
            SecondOrderControlVariate(), potential, arguments, preconditioner, {"rows": rows}
        )(q)

    return jnp.stack([estimate(rows) for rows in jnp.arange(ROWS).reshape(-1, 60)]).mean(0)


def test_epoch_mean_with_crossed_effects_is_full_gradient():
    inputs, layout, position, rng = prepare(crossed)
    gradient, hessian = evaluate_block_arrow(inputs, layout, position)
    scale = jnp.full(layout.dim, 0.3)
    preconditioner = Preconditioner(position, scale, gradient, hessian).cast(jnp.float32)
    q = jnp.asarray(rng.standard_normal(layout.dim), jnp.float32)
    position = preconditioner.to_position(q)
    full = scale * inputs.potential.full_gradient(position, inputs.arguments)
    tolerance = 1e-4 * jnp.abs(full).max()
    mean = estimate_epoch_mean(inputs, preconditioner, q)
    np.testing.assert_allclose(mean, full, atol=tolerance)
    # A term of the rows' Hessians that the matrix does not have would bias the estimate.
    hessian = replace(preconditioner.reference_hessian, pairs=None)
    biased = estimate_epoch_mean(inputs, preconditioner._replace(reference_hessian=hessian), q)
    assert jnp.abs(biased - full).max() > 100.0 * tolerance


def test_correlation_solves_with_the_effects_block_of_the_hessian():
    inputs, layout, position, rng = prepare(crossed)
    _, hessian = evaluate_block_arrow(inputs, layout, position)
    factors = factorize_inverse_blocks(hessian.blocks)
    correlation = EffectCorrelation.create(hessian.pairs, factors)
    x = rng.standard_normal((1, 2, layout.num_groups))
    scaled = np.einsum("abg,sbg->sag", factors, x)
    product = np.einsum("abg,sbg->sag", hessian.blocks, scaled) + hessian.pairs.multiply(scaled)
    product = np.einsum("bag,sbg->sag", factors, product)
    np.testing.assert_allclose(correlation.solve(product), x, atol=2e-3)
    low_rank = correlation.fit_low_rank()
    matrix = np.eye(x[0].size) + correlation.coupling.toarray()
    eigenvalues = np.linalg.eigvalsh(matrix)
    assert np.max(1.0 / low_rank.scales**2) == pytest.approx(eigenvalues[-1], rel=0.02)
    assert np.min(1.0 / low_rank.scales**2) == pytest.approx(eigenvalues[0], rel=0.05)
