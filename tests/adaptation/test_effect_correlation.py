"""Models with effects of several groupings: layouts, Hessians, and unbiased gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC
from scipy import sparse

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation.conditional_effects import evaluate_block_arrow, remove_prior
from numpyro_sgmcmc.adaptation.effect_correlation import (
    EffectCorrelation,
    find_nesting,
)
from numpyro_sgmcmc.adaptation.effect_factors import factorize_inverse_blocks
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    SharedStrips,
    find_block_arrow_layout,
)
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
    _, hessian = remove_prior(inputs, position, gradient, hessian)
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


def test_nested_effects_given_their_group_are_independent():
    inputs, layout, position, _ = prepare(nested)
    _, hessian = evaluate_block_arrow(inputs, layout, position)
    factors = factorize_inverse_blocks(hessian.blocks)
    nesting, factors, others = find_nesting(layout, hessian.pairs, factors, hessian.blocks)
    assert not others.values.any()
    inverses = np.moveaxis(np.linalg.inv(np.moveaxis(factors, 2, 0)), 0, 2)
    coupling = SharedStrips.from_dense(np.zeros((layout.num_shared, 1, layout.num_groups)))
    shared = np.eye(layout.num_shared)
    factor = BlockArrowFactor(factors, inverses, coupling, shared, layout, None, nesting)
    identity = np.eye(layout.dim)
    L = factor.apply(identity).T
    effects = layout.merge(np.ones((1, layout.num_groups)), np.zeros(layout.num_shared)) > 0
    preconditioned = factor.apply_transpose(hessian @ L.T)[np.ix_(effects, effects)]
    np.testing.assert_allclose(preconditioned, np.eye(len(preconditioned)), atol=1e-4)
    np.testing.assert_allclose(factor.solve(L.T), identity, atol=1e-8)
    np.testing.assert_allclose(
        factor.apply_squared(np.ones(layout.dim)), np.square(L).sum(1), rtol=1e-6
    )
    gradient = jnp.asarray(identity[effects], "f")
    expected = factor.apply_transpose(identity[effects])
    compiled = jax.tree.map(jnp.asarray, factor).apply_transpose(gradient)
    np.testing.assert_allclose(compiled, expected, atol=1e-5)
    # Reports read the preconditioner of a finished run.
    stored = Preconditioner(np.zeros(layout.dim), factor, np.zeros(layout.dim)).cast(jnp.float32)
    np.testing.assert_allclose(
        stored.to_numpy().factor.apply_squared(np.ones(layout.dim)),
        np.square(L).sum(1),
        rtol=1e-4,
    )


def ratings(user, item, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    user_scale = numpyro.sample("user_scale", dist.HalfNormal(1))
    item_scale = numpyro.sample("item_scale", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    a, b = sample_effects("a", 2_000, user_scale), sample_effects("b", 500, item_scale)
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean + a[user[i]] + b[item[i]], sigma), obs=y[i])


def sample_scale(rng, squares, count, prior_scale, log_scale):
    """Sample a log scale of normals with a half-normal prior, by a slice sampler."""

    def log_density(x):
        return -(count - 1) * x - squares * np.exp(-2 * x) / 2 - np.exp(2 * x) / 2 / prior_scale**2

    width = 4.0 / np.sqrt(2.0 * count)
    level = log_density(log_scale) - rng.exponential()
    low = log_scale - width * rng.random()
    high = low + width
    while log_density(low) > level:
        low -= width
    while log_density(high) > level:
        high += width
    while log_density(x := rng.uniform(low, high)) <= level:
        low, high = (x, high) if x < log_scale else (low, x)
    return x


def run_gibbs_sampler(user, item, y, num_draws):
    """Return draws of mean, log scales and one effect of each grouping by exact conditionals."""
    rng, y = np.random.default_rng(0), y.astype(float)
    counts = sparse.csr_matrix((np.ones(len(y)), (user, item)))
    totals = np.bincount(user, y), np.bincount(item, y)
    sizes = np.bincount(user), np.bincount(item)
    mean, log_scales = 0.0, np.array([-0.5, -0.5, 0.0])
    effects, draws = [np.zeros(len(n)) for n in sizes], []
    for _ in range(num_draws):
        precisions = np.exp(-2.0 * log_scales)
        for k, matrix in enumerate((counts, counts.T)):
            residuals = totals[k] - sizes[k] * mean - matrix @ effects[1 - k]
            precision = sizes[k] * precisions[2] + precisions[k]
            noise = rng.standard_normal(len(precision)) / np.sqrt(precision)
            effects[k] = precisions[2] * residuals / precision + noise
        for k in range(2):  # the mean and all effects of a grouping, in opposite directions
            precision = len(effects[k]) * precisions[k] + 0.25
            shift = (effects[k].sum() * precisions[k] - mean / 4.0) / precision
            shift += rng.standard_normal() / np.sqrt(precision)
            mean, effects[k] = mean + shift, effects[k] - shift
        residuals = y - effects[0][user] - effects[1][item]
        precision = len(y) * precisions[2] + 0.25
        mean = residuals.sum() * precisions[2] / precision + rng.standard_normal() / np.sqrt(
            precision
        )
        squares = [np.square(x).sum() for x in (*effects, residuals - mean)]
        log_scales = np.array(
            [
                sample_scale(rng, *x)
                for x in zip(
                    squares, (2_000, 500, len(y)), (1.0, 1.0, 2.0), log_scales, strict=True
                )
            ]
        )
        draws.append([mean, *np.exp(log_scales), effects[0][0], effects[1][0]])
    return np.array(draws[num_draws // 10 :])


@pytest.mark.slow
def test_default_arguments_sample_crossed_effects():
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 2_000, 50_000), rng.integers(0, 500, 50_000)
    eta = 0.3 + 0.5 * rng.standard_normal(2_000)[user] + 0.4 * rng.standard_normal(500)[item]
    y = (eta + rng.standard_normal(50_000)).astype(np.float32)
    mcmc = MCMC(
        SGHMCSplit(ratings),
        num_warmup=100,
        num_samples=1_000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *map(jnp.asarray, (user, item, y)), batch_size=1_000)
    samples = mcmc.get_samples(group_by_chain=True)
    names = ("mean", "user_scale", "item_scale", "sigma")
    values = [samples[name] for name in names] + [samples[name][..., 0] for name in "ab"]
    reference = run_gibbs_sampler(user, item, y, 3_000)
    for draws, exact in zip(values, reference.T, strict=True):
        assert split_gelman_rubin(draws) < 1.01
        variance = exact.var()
        errors, errors_of_squares = (
            sum(1.0 / effective_sample_size(power(x)) for x in (draws, exact[None]))
            for power in (np.asarray, lambda x: np.square(x - x.mean()))
        )
        # Four standard errors.
        assert abs(draws.mean() - exact.mean()) < 4.0 * np.sqrt(errors * variance)
        assert abs(draws.std() / np.sqrt(variance) - 1.0) < 4.0 * np.sqrt(errors_of_squares / 2.0)
    assert max(split_gelman_rubin(np.asarray(samples[name])).max() for name in "ab") < 1.02


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan])
def test_factors_of_indefinite_blocks_are_finite_and_of_nan_are_not(value):
    """Without warnings, and without an error of the eigenvalues."""
    blocks = np.eye(2)[:, :, None] * np.ones(3)
    blocks[0, 0, 1], blocks[0, 1, 1], blocks[1, 0, 1] = value, 0.5, 0.5
    factors = factorize_inverse_blocks(blocks)
    assert np.isfinite(factors).all() == np.isfinite(value)
    np.testing.assert_allclose(factors[..., 0], np.eye(2))
