"""Effects that a model multiplies by their scale are found, and their gradients have less noise."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.optimize import minimize

from numpyro_sgmcmc.adaptation.block_arrow_coordinates import recenter_block_arrow
from numpyro_sgmcmc.adaptation.conditional_effects import evaluate_block_arrow, remove_prior
from numpyro_sgmcmc.adaptation.effect_centering import (
    ScaledEffects,
    find_exponents,
    find_partial_centering,
)
from numpyro_sgmcmc.adaptation.hierarchical_fit import fit_hierarchy, fit_hierarchy_from_each
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowLayout,
    BlockArrowMatrix,
    EffectSite,
    SharedStrips,
    find_block_arrow_layout,
)
from numpyro_sgmcmc.model.gradient_estimators import SecondOrderControlVariate, make_gradient_fn
from tests.adaptation.inputs import make_inputs

SCHOOLS, DISTRICTS, ROWS = 90, 30, 2700


def make_model(kind):
    """Schools in districts, with the logarithm of the SD as the shared parameter.

    :param kind: ``"centred"``, ``"non-centred"``, or ``"variances"``, non-centred with the
        logarithms of variances.
    """

    def sample_effects(name, size):
        log_scale = numpyro.sample(f"{name} log scale", dist.Normal(-0.5, 0.5))
        scale = jnp.exp(log_scale / 2.0 if kind == "variances" else log_scale)
        is_centred = kind == "centred"
        prior = dist.Normal(0, scale if is_centred else 1.0).expand([size]).to_event(1)
        effects = numpyro.sample(name, prior)
        return effects if is_centred else scale * effects

    def model(school, district, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        schools = sample_effects("school", SCHOOLS)
        districts = sample_effects("district", DISTRICTS)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            eta = mean + schools[school[i]] + districts[district[i]]
            numpyro.sample("y", dist.Normal(eta, 1.0), obs=y[i])

    return model


def prepare(kind, num_rows=ROWS):
    rng = np.random.default_rng(0)
    school = np.arange(num_rows) % SCHOOLS
    effects = 0.6 * rng.standard_normal(SCHOOLS) + 0.5 * rng.standard_normal(DISTRICTS).repeat(3)
    y = effects[school] + rng.standard_normal(num_rows)
    args = jnp.asarray(school), jnp.asarray(school // 3), jnp.asarray(y, "f")
    inputs = make_inputs(make_model(kind), args, 90)
    return inputs, find_block_arrow_layout(inputs.potential, inputs.arguments)


def fit_near_data(kind):
    """Return coordinates about effects with the scales of the data."""
    inputs, layout = prepare(kind)
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)]).coordinates
    distance = np.array([np.log(0.5), 0.0, np.log(0.6)]) - layout.take_shared(fit.center)
    shift = np.linalg.solve(fit.factor.shared_factor, distance)
    return inputs, layout, recenter_block_arrow(inputs, fit, shift, np.eye(3))


def find_at(kind, num_rows=ROWS, is_uncertain=((False, False),)):
    """Return the layout, a center with scales of 0.5 and 0.6, and its centring.

    :param is_uncertain: whether the scales of the effects are, for each kind and grouping.
    """
    inputs, layout = prepare(kind, num_rows)
    log_scales = np.log([0.5, 0.6]) * (2.0 if kind == "variances" else 1.0)
    effects = np.random.default_rng(1).standard_normal((1, layout.num_groups))
    center = layout.merge(effects, np.array([log_scales[0], 0.0, log_scales[1]]))
    gradient, hessian = evaluate_block_arrow(inputs, layout, center)
    rows_gradient, of_rows = remove_prior(inputs, center, gradient, hessian)
    prior_precisions = np.diagonal(hessian.blocks - of_rows.blocks).T
    exponents = find_exponents(rows_gradient, of_rows, center)
    return layout, find_partial_centering(
        rows_gradient, of_rows, center, prior_precisions, exponents, np.array(is_uncertain)
    )


@pytest.mark.parametrize(("kind", "exponent"), [("non-centred", 1.0), ("variances", 0.5)])
def test_effects_that_a_scale_multiplies_are_centred_as_far_as_rows_determine_them(kind, exponent):
    layout, centering = find_at(kind)
    found = -centering.exponents.multiply(np.eye(3))[:, 0]
    # Shared parameters in the order of their names: district, mean, school.
    for column, scale, (groups, _) in zip((0, 2), (0.5, 0.6), layout.groupings, strict=True):
        precision = ROWS / (groups.stop - groups.start) * scale**2
        expected = exponent * precision / (precision + 1.0)
        np.testing.assert_allclose(found[column, groups], expected, rtol=1e-3)
        found[column, groups] = 0.0
    assert not found.any()


@pytest.mark.parametrize(("kind", "num_rows"), [("centred", ROWS), ("non-centred", 100)])
def test_effects_of_a_centred_model_or_of_few_rows_are_not_centred(kind, num_rows):
    _, centering = find_at(kind, num_rows)
    assert centering is None


def test_effects_of_few_rows_with_an_uncertain_scale_are_fully_centred():
    layout, centering = find_at("non-centred", 100, is_uncertain=[[False, True]])
    found = -centering.exponents.multiply(np.eye(3))[:, 0]
    # Shared parameters in the order of their names: district, mean, school.
    _, (schools, _) = layout.groupings
    np.testing.assert_allclose(found[2, schools], 1.0, rtol=1e-3)
    found[2, schools] = 0.0
    assert not found.any()


def prepare_correlated():
    """Groups with an intercept and a slope, products of a matrix and standard normal effects."""
    num_groups, rng = 40, np.random.default_rng(0)
    group, x = np.arange(ROWS) % num_groups, rng.standard_normal(ROWS)
    effects = rng.standard_normal((num_groups, 2)) @ np.array([[0.8, 0.3], [0.0, 0.4]])
    y = effects[group, 0] + effects[group, 1] * x + rng.standard_normal(ROWS)

    def model(group, x, y, batch_size=None):
        scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
        correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("groups", num_groups):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        effects = z @ (scales[:, None] * correlation).T
        with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
            eta = effects[group[i], 0] + effects[group[i], 1] * x[i]
            numpyro.sample("y", dist.Normal(eta, 1.0), obs=y[i])

    args = jnp.asarray(group), jnp.asarray(x, "f"), jnp.asarray(y, "f")
    inputs = make_inputs(model, args, 90)
    return inputs, find_block_arrow_layout(inputs.potential, inputs.arguments)


def fit_correlated():
    inputs, layout = prepare_correlated()
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)]).coordinates
    return inputs, layout, fit


def compute_matrix(shared):
    """Return the matrix of :func:`prepare_correlated` at the correlation and the scales."""
    correlation = jnp.tanh(shared[0])
    factor = jnp.array([[1.0, 0.0], [correlation, jnp.sqrt(1.0 - correlation**2)]])
    return jnp.exp(shared[1:])[:, None] * factor


def test_effects_that_a_matrix_multiplies_are_centred():
    _, layout, fit = fit_correlated()
    shared = jnp.asarray(layout.take_shared(fit.center), "f")
    inverse = np.linalg.inv(compute_matrix(shared))
    of_matrix = jax.jacobian(compute_matrix)(shared)
    expected = np.einsum("ab,bcj->jac", inverse, of_matrix)
    np.testing.assert_allclose(fit.centering.generators, expected, atol=2e-3)
    # The exponential is that of the matrix.
    for step in 0.1 * np.random.default_rng(0).standard_normal((5, 3)):
        effects = np.eye(2, layout.num_groups)
        shift = layout.merge(effects, step)
        shift = replace(fit.centering, effects=0.0 * effects).to_displacement(shift)
        found = compute_matrix(shared + step) @ layout.split(shift)[0][:, :2]
        np.testing.assert_allclose(found, compute_matrix(shared), atol=1e-4)


def test_a_group_without_rows_does_not_make_the_scale_of_the_rows_one_of_the_effects():
    num_groups, rows_per_group = 50, 10.0
    layout = BlockArrowLayout(num_groups + 1, (EffectSite(0, (num_groups,), (0,)),))
    precisions = np.full(num_groups, rows_per_group)
    gradient = np.sqrt(rows_per_group) * np.random.default_rng(0).standard_normal(num_groups)
    precisions[0], gradient[0] = 1e-9, 1e-2  # rounding of a group without rows
    # Of normal rows at effects of zero, with the logarithm of the rows' SD as the shared parameter:
    # its products with the effects' gradient are what a scale of all effects would have.
    strips = SharedStrips.from_dense(-2.0 * gradient[None, None])
    corner = np.array([[2.0 * rows_per_group * num_groups]])
    hessian = BlockArrowMatrix(precisions[None, None], strips, corner, layout)
    rows_gradient = layout.merge(gradient[None], np.zeros(1))
    assert ScaledEffects.find(rows_gradient, hessian, np.zeros(layout.dim)) is None


@pytest.mark.parametrize("has_zero_effects", [False, True])
def test_products_of_effects_and_scales_have_their_gradient_and_hessian(has_zero_effects):
    inputs, layout = prepare("non-centred")
    position = 0.5 * np.random.default_rng(1).standard_normal(layout.dim)
    effects, shared = layout.split(position)
    if has_zero_effects:  # as at the start of a fit
        position = layout.merge(0.0 * effects, shared)
    gradient, hessian = evaluate_block_arrow(inputs, layout, position)
    scaled = ScaledEffects.find(*remove_prior(inputs, position, gradient, hessian), position)
    y = scaled.to_products(position)
    np.testing.assert_allclose(scaled.from_products(y), position, atol=1e-12)

    def potential(y):
        products, shared = layout.split(y)
        scales = jnp.repeat(jnp.exp(shared[jnp.array([0, 2])]), np.array([DISTRICTS, SCHOOLS]))
        position = layout.merge(products / scales, shared)
        return inputs.potential.full_value(position, inputs.arguments) + jnp.log(scales).sum()

    y = jnp.asarray(y, "f")
    directions = jnp.asarray(np.random.default_rng(2).standard_normal((3, layout.dim)), "f")
    found, products = scaled.large_pass_products(
        inputs.batched_gradients, np.asarray(y, float)[None], np.asarray(directions, float)
    )
    expected = [jax.jvp(jax.grad(potential), (y,), (v,))[1] for v in directions]
    np.testing.assert_allclose(found[0], jax.grad(potential)(y), atol=1e-2)
    np.testing.assert_allclose(products[0], np.stack(expected), atol=1e-2)
    _, by_products = evaluate_block_arrow(inputs, layout, np.asarray(y, float), scaled)
    np.testing.assert_allclose(by_products @ np.asarray(directions), np.stack(expected), atol=1e-2)


@pytest.mark.parametrize("prepare_fit", [partial(fit_near_data, "non-centred"), fit_correlated])
def test_centring_removes_noise_and_keeps_the_mean_of_gradients(prepare_fit):
    inputs, _, fit = prepare_fit()
    q = jnp.asarray(np.random.default_rng(1).standard_normal(inputs.potential.dim), "f")
    rows = jnp.asarray(np.random.default_rng(2).permutation(ROWS).reshape(-1, 90))
    position = jnp.asarray(fit.to_position(np.asarray(q)), "f")
    full = inputs.potential.full_gradient(position, inputs.arguments)

    def estimate_all(preconditioner):
        preconditioner = preconditioner.cast(jnp.float32)
        q = jnp.asarray(preconditioner.to_numpy().from_position(np.asarray(position)), "f")

        @jax.jit
        def estimate(batch):
            return make_gradient_fn(
                SecondOrderControlVariate(),
                inputs.potential,
                inputs.arguments,
                preconditioner,
                {"rows": batch},
            )(q)

        estimates = jnp.stack([estimate(batch) for batch in rows])
        expected = preconditioner.pull_back(q, full)
        return estimates.mean(0) - expected, estimates.var(0).mean()

    gradient, hessian = evaluate_block_arrow(inputs, fit.factor.layout, fit.center)
    _, of_rows = remove_prior(inputs, fit.center, gradient, hessian)
    plain = fit._replace(factor=replace(fit.factor, centering=None), reference_hessian=of_rows)
    error, noise = estimate_all(fit)
    plain_error, plain_noise = estimate_all(plain)
    assert jnp.abs(error).max() < 5e-3
    assert jnp.abs(plain_error).max() < 5e-3
    assert noise < 0.05 * plain_noise
    # A Hessian that is not that of the coordinates would bias the estimate.
    wrong, _ = estimate_all(fit._replace(reference_hessian=of_rows))
    assert jnp.abs(wrong).max() > 0.02


def test_effects_have_unit_curvature_about_a_new_center():
    inputs, layout, fit = fit_near_data("non-centred")
    moved = recenter_block_arrow(inputs, fit, np.array([0.6, 0.0, -0.6]), np.eye(3))
    gradient, hessian = evaluate_block_arrow(inputs, layout, moved.center)
    hessian = moved.centering.transform_hessian(hessian, gradient)
    units = np.eye(layout.dim)
    curvature = moved.factor.apply_transpose(hessian @ moved.factor.apply(units))
    is_effect = layout.merge(np.ones((1, layout.num_groups)), np.zeros(layout.num_shared)) > 0
    eigenvalues = np.linalg.eigvalsh(curvature[np.ix_(is_effect, is_effect)])
    assert 0.8 < eigenvalues.min() < eigenvalues.max() < 1.25


@pytest.mark.parametrize("kind", ["centred", "non-centred"])
def test_fits_of_nested_effects_are_near_the_marginal_mode(kind):
    inputs, layout = prepare(kind)
    school, _, y = (np.asarray(x, float) for x in inputs.arguments.args)
    means = np.array([y[school == j].mean() for j in range(SCHOOLS)]).reshape(DISTRICTS, 3)

    def marginal(log_scales):
        """Return minus the log density of both scales, up to a constant."""
        of_schools = np.exp(2.0 * log_scales[1]) + SCHOOLS / ROWS
        of_districts = np.exp(2.0 * log_scales[0]) + of_schools / 3.0
        centers = means.mean(1)
        of_mean = of_districts / DISTRICTS + 4.0
        log_density = -np.log(of_schools) * DISTRICTS - np.log(of_districts) * (DISTRICTS - 1) / 2
        log_density -= np.square(means - centers[:, None]).sum() / of_schools / 2.0
        log_density -= np.square(centers - centers.mean()).sum() / of_districts / 2.0
        log_density -= np.log(of_mean) / 2.0 + centers.mean() ** 2 / of_mean / 2.0
        return -log_density + 2.0 * np.square(log_scales + 0.5).sum()

    mode = minimize(marginal, np.full(2, -0.5)).x
    sds = np.array([0.2, 0.1])
    rng = np.random.default_rng(3)
    for _ in range(3):
        fit = fit_hierarchy(inputs, layout, rng.uniform(-2.0, 2.0, layout.dim)).coordinates
        assert np.abs((layout.take_shared(fit.center)[[0, 2]] - mode) / sds).max() < 0.6


def test_center_without_finite_gradient_has_no_coordinates():
    inputs, layout, fit = fit_near_data("non-centred")
    # The exponential of the log scale of the districts overflows.
    shift = np.linalg.solve(fit.factor.shared_factor, np.array([200.0, 0.0, 0.0]))
    assert recenter_block_arrow(inputs, fit, shift, np.eye(layout.num_shared)) is None


def test_the_sd_of_the_rows_is_no_matrix_where_all_groups_have_the_same_covariates():
    num_groups, rows_per_group, rng = 60, 10, np.random.default_rng(0)
    group = np.repeat(np.arange(num_groups), rows_per_group)
    x = np.tile(np.linspace(-1.0, 1.0, rows_per_group), num_groups)
    effects = rng.standard_normal((num_groups, 2)) * [0.8, 0.5]
    y = effects[group, 0] + effects[group, 1] * x + 0.5 * rng.standard_normal(len(x))

    def model(group, x, y, batch_size=None):
        scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("groups", num_groups):
            effects = numpyro.sample("effects", dist.Normal(0, scales).to_event(1))
        with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
            eta = effects[group[i], 0] + effects[group[i], 1] * x[i]
            numpyro.sample("y", dist.Normal(eta, sigma), obs=y[i])

    inputs = make_inputs(model, (jnp.asarray(group), jnp.asarray(x, "f"), jnp.asarray(y, "f")), 90)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)]).coordinates
    assert fit.centering is None
