"""Block-arrow matrices equal dense ones, and layouts are those of the models."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform
from numpyro.infer.reparam import LocScaleReparam

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.conditional_effects import apply_covariance
from numpyro_sgmcmc.adaptation.effect_factors import factorize_inverse_blocks
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model import block_arrow, subsampled
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    BlockArrowLayout,
    BlockArrowMatrix,
    BlockDifferences,
    EffectSite,
    GroupPairs,
    SharedStrips,
    find_block_arrow_layout,
    multiply_blocks,
)
from numpyro_sgmcmc.model.gradient_estimators import SecondOrderControlVariate, make_gradient_fn
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.prior_scaling import PriorScaling
from numpyro_sgmcmc.model.subsampled import get_model_potential

GROUPS, ROWS = 40, 400
LAYOUTS = {
    "one effect": BlockArrowLayout(9, (EffectSite(2, (6,), (0,)),)),
    "two sites": BlockArrowLayout(15, (EffectSite(0, (6,), (0,)), EffectSite(8, (6,), (0,)))),
    "effects last": BlockArrowLayout(20, (EffectSite(1, (6, 3), (0,)),)),
    "groups last": BlockArrowLayout(20, (EffectSite(1, (3, 6), (1,)),)),
    "two group axes": BlockArrowLayout(27, (EffectSite(0, (2, 4, 3), (0, 2)),)),
    "two groupings": BlockArrowLayout(
        18, (EffectSite(1, (6,), (0,)), EffectSite(9, (2, 4), (1,), grouping=1))
    ),
}


def make_dense(layout, seed=0, is_sparse=False):
    """Return a positive definite matrix with the layout's zeros, in float64.

    :param is_sparse: whether each effect of a group is coupled with one shared parameter only.
    """
    rng = np.random.default_rng(seed)
    dim = layout.dim
    group = np.full(dim, -1)
    numbers = np.tile(np.arange(layout.num_groups), (layout.effects_per_group, 1))
    group = layout.merge(numbers, np.full(layout.num_shared, -1))
    matrix = rng.standard_normal((dim, dim))
    matrix = matrix + matrix.T
    is_zero = (group[:, None] != group) & (group[:, None] >= 0) & (group >= 0)
    if is_sparse:
        effects = np.tile(np.arange(layout.effects_per_group)[:, None], layout.num_groups)
        column = layout.merge(effects % layout.num_shared, -1 - np.arange(layout.num_shared))
        is_coupled = column[:, None] == -1 - column
        is_strip = (group[:, None] < 0) != (group < 0)
        is_zero |= is_strip & ~is_coupled
    return np.where(is_zero, 0.0, matrix) + 3.0 * dim * np.eye(dim)


def make_factor(matrix, has_strips=False):
    """Return the factor of the inverse of a block-arrow matrix."""
    factors = factorize_inverse_blocks(matrix.blocks)
    strips = matrix.strips.multiply(np.eye(matrix.layout.num_shared))
    coupling = apply_covariance(factors, strips)
    schur = matrix.corner - np.einsum("sag,tag->st", strips, coupling)
    inverses = np.moveaxis(np.linalg.inv(np.moveaxis(factors, 2, 0)), 0, 2)
    shared = np.linalg.cholesky(np.linalg.inv(schur))
    coupling = matrix.strips if has_strips else SharedStrips.from_dense(coupling)
    factor = BlockArrowFactor(factors, inverses, coupling, shared, matrix.layout)
    return replace(factor, has_strips=has_strips)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("has_strips", [False, True])
def test_block_arrow_algebra_equals_dense(layout, has_strips, xp):
    dense = make_dense(layout, is_sparse=has_strips)
    matrix = BlockArrowMatrix.from_products(layout, layout.make_probes() @ dense)
    assert (matrix.strips.columns is not None) == has_strips
    factor = make_factor(matrix, has_strips)
    v = np.random.default_rng(1).standard_normal((3, layout.dim))
    L = factor.apply(np.eye(layout.dim)).T
    np.testing.assert_allclose(L @ L.T, np.linalg.inv(dense), atol=1e-12)
    assert factor.log_det == pytest.approx(np.linalg.slogdet(L)[1])
    matrix, factor = jax.tree.map(xp.asarray, (matrix, factor))
    x, tolerance = xp.asarray(v), {"rtol": 2e-5, "atol": 2e-5}
    np.testing.assert_allclose(matrix @ x, v @ dense, rtol=2e-5, atol=1e-4)
    np.testing.assert_allclose(factor.apply(x), v @ L.T, **tolerance)
    np.testing.assert_allclose(factor.solve(x), np.linalg.solve(L, v.T).T, rtol=2e-4, atol=1e-4)
    np.testing.assert_allclose(factor.apply_transpose(x), v @ L, **tolerance)
    np.testing.assert_allclose(factor.apply_squared(x), v @ np.square(L).T, **tolerance)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_pairs_of_groups_equal_dense(xp):
    layout = LAYOUTS["two groupings"]
    dense, rng = make_dense(layout), np.random.default_rng(4)
    matrix = BlockArrowMatrix.from_products(layout, layout.make_probes() @ dense)
    first, second = np.divmod(rng.choice(24, 15, replace=False), 4)
    values = rng.standard_normal((2, 2, 15))
    values[1] = 0.0  # groups of the first grouping have one effect
    matrix = replace(matrix, pairs=GroupPairs.create(first, 6 + second, values, layout.num_groups))
    for pair in range(15):
        rows = 1 + first[pair]
        columns = 9 + second[pair] + 4 * np.arange(2)
        dense[rows, columns] += values[0, :, pair]
        dense[columns, rows] += values[0, :, pair]
    v = rng.standard_normal((3, layout.dim))
    matrix, x = jax.tree.map(xp.asarray, (matrix, v))
    np.testing.assert_allclose(matrix @ x, v @ dense, rtol=2e-5, atol=1e-4)


def test_correlated_factor_has_its_inverse_and_variances():
    layout = LAYOUTS["two groupings"]
    matrix = BlockArrowMatrix.from_products(layout, layout.make_probes() @ make_dense(layout))
    vectors = np.zeros((2, layout.num_groups, 1))
    vectors[0, :, 0] = 1.0 / np.sqrt(layout.num_groups)
    correlation = LowRankFactor(vectors.reshape(-1, 1), np.array([3.0]))
    factor = replace(make_factor(matrix), correlation=correlation)
    identity = np.eye(layout.dim)
    L = factor.apply(identity).T
    np.testing.assert_allclose(factor.solve(L.T), identity, atol=1e-12)
    np.testing.assert_allclose(factor.apply_transpose(identity), L, atol=1e-12)
    np.testing.assert_allclose(
        factor.apply_squared(np.ones(layout.dim)), np.square(L).sum(1), rtol=1e-5
    )
    assert factor.log_det == pytest.approx(np.linalg.slogdet(L)[1])


def make_preconditioner(kind):
    """Return coordinates whose effects' SDs change with the shared parameters, and a point.

    :param kind: ``"trend"``, ``"scaling"``, in which their means do too, or ``"both"``.
    """
    layout, rng = LAYOUTS["two sites"], np.random.default_rng(6)
    matrix = BlockArrowMatrix.from_products(layout, layout.make_probes() @ make_dense(layout))
    shape = layout.num_shared, layout.effects_per_group, layout.num_groups
    trend = SharedStrips.from_dense(0.3 * rng.standard_normal(shape))
    center, q = rng.standard_normal((2, layout.dim))
    exponents, slopes = (
        SharedStrips.from_dense(scale * rng.standard_normal(shape)) for scale in (0.5, 1.0)
    )
    # Of the first effects of all groups alone.
    is_scaled = np.array([[1.0], [0.0]])
    shares, linear_shares = rng.uniform(0, 0.5, (2, *shape[1:])) * is_scaled
    deviations, linear_deviations = rng.standard_normal((2, *shape[1:])) * is_scaled
    couplings = np.zeros((2, *shape[1:]))
    couplings[1, 0] = rng.standard_normal(shape[2])
    exponents, slopes = (replace(x, values=x.values * is_scaled) for x in (exponents, slopes))
    scaling = PriorScaling(
        exponents, shares, linear_shares, deviations, linear_deviations, slopes, couplings
    )
    factor = replace(
        make_factor(matrix),
        sd_trend=trend if kind != "scaling" else None,
        prior_scaling=scaling if kind != "trend" else None,
    )
    return Preconditioner(center, factor), q


@pytest.mark.parametrize("kind", ["trend", "scaling", "both"])
def test_gradient_is_that_of_the_transformed_density(kind):
    preconditioner, q = make_preconditioner(kind)

    def potential(position):
        return jnp.sum(jnp.cosh(position)) + jnp.sum(position[1:] * position[:-1]) ** 2

    def transformed(preconditioner, q):
        jacobian = jax.jacobian(preconditioner.to_position)(q)
        return potential(preconditioner.to_position(q)) - jnp.linalg.slogdet(jacobian)[1]

    with jax.enable_x64(True):
        expected = jax.grad(transformed, 1)(preconditioner.cast(jnp.float64), jnp.asarray(q))
        gradient = np.asarray(jax.grad(potential)(jnp.asarray(preconditioner.to_position(q))))
    pulled_back = preconditioner.pull_back(q, gradient)
    np.testing.assert_allclose(pulled_back, expected, rtol=1e-9, atol=1e-9)
    is_linear = kind == "trend"
    np.testing.assert_allclose(
        preconditioner.gradient_to_report_coordinates(q, pulled_back),
        preconditioner.apply_transpose(gradient) if is_linear else pulled_back,
        atol=1e-9,
    )
    site_scale = preconditioner.to_report_coordinates(q)
    np.testing.assert_allclose(
        site_scale, preconditioner.solve(preconditioner.to_displacement(q)) if is_linear else q
    )


@pytest.mark.parametrize("kind", ["trend", "scaling", "both"])
def test_maps_to_positions_have_inverses(kind):
    preconditioner, q = make_preconditioner(kind)
    np.testing.assert_allclose(
        preconditioner.from_position(preconditioner.to_position(q)), q, atol=1e-12
    )


def test_coordinates_about_another_center_have_the_same_trend():
    preconditioner, q = make_preconditioner("trend")
    layout, rng = preconditioner.factor.layout, np.random.default_rng(7)
    effects, shared = layout.split(q)
    mean, scale = rng.standard_normal(shared.size), rng.standard_normal((shared.size,) * 2)
    center = preconditioner.to_position(layout.merge(np.zeros_like(effects), mean))
    refitted = Preconditioner(center, preconditioner.factor.refit_shared(mean, scale))
    np.testing.assert_allclose(
        refitted.to_position(q),
        preconditioner.to_position(layout.merge(effects, mean + scale @ shared)),
    )
    np.testing.assert_allclose(refitted.from_position(refitted.to_position(q)), q, atol=1e-9)


def test_extreme_scales_are_finite_in_single_precision():
    preconditioner, q = make_preconditioner("scaling")
    layout, preconditioner = preconditioner.factor.layout, preconditioner.cast(jnp.float32)
    effects, shared = layout.split(q)
    for size in (-1e3, -60.0, 60.0, 1e3):
        point = jnp.asarray(layout.merge(effects, size * shared), "f")
        assert jnp.isfinite(preconditioner.to_position(point)).all()
        assert jnp.isfinite(preconditioner.pull_back(point, jnp.ones(layout.dim))).all()


def test_preconditioner_has_variances_of_each_chain():
    layout = LAYOUTS["two sites"]
    dense = make_dense(layout)
    matrix = BlockArrowMatrix.from_products(layout, layout.make_probes() @ dense)
    one = Preconditioner(np.zeros(layout.dim), make_factor(matrix), np.zeros(layout.dim), matrix)
    expected = np.diagonal(np.linalg.inv(dense))
    np.testing.assert_allclose(one.inverse_mass_matrix, expected, rtol=1e-5)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2.0 * x]), one.cast(jnp.float32))
    assert not stacked.is_dense
    assert stacked.inverse_mass_matrix.shape == (2, layout.dim)
    np.testing.assert_allclose(stacked.inverse_mass_matrix[0], expected, rtol=1e-4)


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    group = np.arange(ROWS) % GROUPS
    x = rng.integers(0, 2, ROWS).astype(np.float32)  # no gradient of a slope where it is zero
    return group, x, rng.standard_normal(ROWS).astype(np.float32)


def declare_scales():
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    return mean, numpyro.sample("scale", dist.HalfNormal(1))


def observe(at, y, batch_size):
    with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(at(i), 1), obs=y[i])


def centred(group, x, y, batch_size=None):
    mean, scale = declare_scales()
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
        slope = numpyro.sample("slope", dist.Normal(0, scale))
    observe(lambda i: effect[group[i]] + slope[group[i]] * x[i], y, batch_size)


def non_centred(group, x, y, batch_size=None):
    mean, scale = declare_scales()
    raw = numpyro.sample("raw", dist.Normal(0, 1).expand([GROUPS, 2]).to_event(2))
    effect = mean + scale * raw
    observe(lambda i: effect[group[i], 0] + effect[group[i], 1] * x[i], y, batch_size)


def transposed(group, x, y, batch_size=None):
    mean, scale = declare_scales()
    with numpyro.plate("groups", GROUPS), numpyro.plate("terms", 2, dim=-2):
        effect = numpyro.sample("effect", dist.StudentT(5, mean, scale))
    observe(lambda i: effect[0, group[i]] + effect[1, group[i]] * x[i], y, batch_size)


def with_row_scale(group, x, y, batch_size=None):
    mean, scale = declare_scales()
    row_scale = numpyro.sample("row_scale", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mean, scale).expand([GROUPS, 2]).to_event(2))
    with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        at = effect[group[i], 0] + effect[group[i], 1] * x[i]
        numpyro.sample("y", dist.Normal(at, row_scale), obs=y[i])


def paired(group, x, y, batch_size=None):
    _, scale = declare_scales()
    skill = numpyro.sample("skill", dist.Normal(0, scale).expand([GROUPS]).to_event(1))
    observe(lambda i: skill[group[i]] - skill[(group[i] + 1 + i) % GROUPS], y, batch_size)


def no_groups(group, x, y, batch_size=None):
    weight = numpyro.sample("weight", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
    observe(lambda i: weight.sum() * x[i], y, batch_size)


def make_potential(model):
    group, x, y = make_data()
    arguments = Arguments((jnp.asarray(group), jnp.asarray(x), jnp.asarray(y)), {"batch_size": 50})
    return get_model_potential(model, arguments, init_to_uniform), arguments


partly_centred = numpyro.handlers.reparam(centred, {"effect": LocScaleReparam(0.5)})


@pytest.mark.parametrize("model", [centred, non_centred, partly_centred, transposed])
def test_layout_has_effects_of_groups(model):
    potential, arguments = make_potential(model)
    layout = find_block_arrow_layout(potential, arguments)
    assert (layout.num_groups, layout.effects_per_group, layout.num_shared) == (GROUPS, 2, 2)
    rng = np.random.default_rng(2)
    position, v = (jnp.asarray(0.3 * rng.standard_normal(potential.dim), "f") for _ in range(2))
    products = potential.full_hessian_products(
        position, jnp.asarray(layout.make_probes(), "f"), arguments
    )
    matrix = BlockArrowMatrix.from_products(layout, products)
    expected = potential.full_hessian_products(position, v[None], arguments)[0]
    np.testing.assert_allclose(matrix @ v, expected, rtol=1e-4, atol=1e-3)


def test_potential_with_forward_mode_has_no_layout():
    potential, arguments = make_potential(centred)
    potential = replace(potential, forward_mode_differentiation=True)
    assert find_block_arrow_layout(potential, arguments) is None


def no_shared(group, x, y, batch_size=None):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])


@pytest.mark.parametrize("model", [paired, no_groups, no_shared])
def test_other_structures_have_no_layout(model):
    assert find_block_arrow_layout(*make_potential(model)) is None


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_terms_of_second_order_are_the_gradient_of_third_order_terms(layout):
    rng = np.random.default_rng(5)
    values = rng.standard_normal((1, *2 * (layout.effects_per_group,), layout.num_groups))
    values = jnp.asarray(values + values.swapaxes(1, 2), "f")
    column = layout.num_shared - 1
    matrix = BlockArrowMatrix.from_products(layout, layout.make_probes() @ make_dense(layout))
    matrix = jax.tree.map(lambda x: jnp.asarray(x, "f"), matrix)
    with_terms = replace(matrix, differences=BlockDifferences(values, np.ones(1), (column,)))

    def third_order(displacement):
        effects, shared = layout.split(displacement)
        return shared[column] * jnp.einsum("ag,abg,bg->", effects, values[0], effects) / 2.0

    displacements = jnp.asarray(rng.standard_normal((3, layout.dim)), "f")
    terms = with_terms.expand(displacements) - matrix @ displacements
    expected = jax.vmap(jax.grad(third_order))(displacements)
    np.testing.assert_allclose(terms, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("num_groups", [6, 7])
def test_sums_over_chunks_of_groups_equal_the_whole(num_groups, monkeypatch):
    rng = np.random.default_rng(6)
    effects, strips = (
        rng.standard_normal(shape).astype("f") for shape in ((3, 2, num_groups), (5, 2, num_groups))
    )
    strips[2:] = 0.0
    strips = jax.tree.map(jnp.asarray, SharedStrips.from_dense(strips))
    assert strips.columns is not None
    expected = strips.sum_over_groups(jnp.asarray(effects))
    monkeypatch.setattr(block_arrow, "_GROUPS_PER_CHUNK", 2)
    in_chunks = strips.sum_over_groups(jnp.asarray(effects))
    np.testing.assert_allclose(in_chunks, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("has_differences", "max_relative_noise"), [(False, 0.05), (True, 0.001)])
def test_epoch_mean_of_second_order_control_variate_is_full_gradient(
    has_differences, max_relative_noise
):
    potential, arguments = make_potential(with_row_scale)
    layout = find_block_arrow_layout(potential, arguments)
    rng = np.random.default_rng(3)
    center = jnp.asarray(0.3 * rng.standard_normal(potential.dim), "f")
    probes, row_scale = jnp.asarray(layout.make_probes(), "f"), 1
    products = potential.full_hessian_products(center, probes, arguments)
    matrix = BlockArrowMatrix.from_products(layout, products)
    definite = replace(matrix, corner=matrix.corner + 1e3 * jnp.eye(layout.num_shared))
    factor = jax.tree.map(
        lambda x: jnp.asarray(x, "f"),
        make_factor(jax.tree.map(lambda x: np.asarray(x, float), definite)),
    )
    coordinate = layout.take_shared(np.arange(layout.dim))[row_scale]
    if has_differences:
        step = jnp.float32(0.1)
        above, below = (
            layout.make_blocks(potential.full_hessian_products(point, probes, arguments))
            for point in (center.at[coordinate].add(x) for x in (step, -step))
        )
        values = (above - below)[None] / (2.0 * step)
        differences = BlockDifferences(values, step[None], (row_scale,))
        matrix = replace(matrix, differences=differences)
    gradient = potential.full_gradient(center, arguments)
    _, prior = BatchedGradients(potential, arguments).prior_products(center, probes)
    matrix = jax.tree.map(lambda x: np.asarray(x, float), matrix)
    matrix = matrix.subtract(BlockArrowMatrix.from_products(layout, prior))
    preconditioner = Preconditioner(center, factor, gradient, matrix).cast(jnp.float32)
    q = jnp.asarray(rng.standard_normal(potential.dim), "f").at[coordinate].multiply(0.2)

    @jax.jit
    def estimate(rows):
        return make_gradient_fn(
            SecondOrderControlVariate(), potential, arguments, preconditioner, {"rows": rows}
        )(q)

    estimates = jnp.stack([estimate(rows) for rows in jnp.arange(ROWS).reshape(-1, 50)])
    full = potential.full_gradient(preconditioner.to_position(q), arguments)
    expected = preconditioner.apply_transpose(full)
    np.testing.assert_allclose(estimates.mean(0), expected, atol=2e-3)
    # The noise is far below that of minibatch gradients.
    minibatch = potential.gradient(
        preconditioner.to_position(q), {"rows": jnp.arange(50)}, arguments
    )
    minibatch_noise = preconditioner.apply_transpose(minibatch) - expected
    assert estimates.std(0).max() < max_relative_noise * jnp.abs(minibatch_noise).max()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("xp", [np, jnp])
def test_products_with_blocks_are_those_of_each_group_also_in_threads(monkeypatch, transpose, xp):
    monkeypatch.setattr(block_arrow, "_MIN_THREADED_PRODUCTS", 0)
    rng = np.random.default_rng(0)
    blocks, effects = rng.standard_normal((3, 3, 2_500)), rng.standard_normal((2, 3, 2_500))
    matrices = np.moveaxis(blocks.swapaxes(0, 1) if transpose else blocks, 2, 0)
    expected = np.moveaxis(matrices @ np.moveaxis(effects, (0, 1), (2, 1)), (0, 1, 2), (2, 1, 0))
    found = multiply_blocks(xp.asarray(blocks), xp.asarray(effects), transpose)
    np.testing.assert_allclose(found, expected, atol=1e-12 if xp is np else 1e-5)


@pytest.mark.parametrize("transpose", [False, True])
def test_products_of_many_groups_are_those_of_each_group(monkeypatch, transpose):
    """The last part of the groups overlaps with the one before."""
    monkeypatch.setattr(block_arrow, "_MIN_EFFECTS_OF_PARTS", 0)
    monkeypatch.setattr(block_arrow, "_GROUPS_PER_PART", 40)
    num_effects, num_groups, num_chains = 10, 110, 2
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((num_effects, num_effects, num_groups))
    effects = rng.standard_normal((num_chains, num_effects, num_groups))
    expected = multiply_blocks(blocks, effects, transpose)
    multiply = jax.vmap(partial(multiply_blocks, transpose=transpose), (None, 0))
    found = multiply(jnp.asarray(blocks), jnp.asarray(effects))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_split_positions_have_the_same_sites_and_gradients(monkeypatch):
    def model(y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
        b = numpyro.sample("b", dist.HalfNormal(1))
        c = numpyro.sample("c", dist.Normal(0, 1).expand([2, 2]).to_event(2))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(a.sum() + c[0, 1], b), obs=y[i])

    arguments = Arguments((jnp.ones(20),), {"batch_size": 5})
    potential = get_model_potential(model, arguments, init_to_uniform)
    q = jnp.linspace(-1.0, 1.0, potential.dim)

    def evaluate(min_dim):
        monkeypatch.setattr(subsampled, "_MIN_DIM_TO_SPLIT", min_dim)
        gradient = jax.grad(lambda q: sum((x**3).sum() for x in potential.unravel(q).values()))
        return potential.unravel(q), gradient(q)

    jax.tree.map(np.testing.assert_array_equal, evaluate(0), evaluate(100))
