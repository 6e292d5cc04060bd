"""The fit of a hierarchy has the marginal mode and curvature of its shared parameters."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from scipy.optimize import minimize

from numpyro_sgmcmc import SGHMCSplit, suggest_subsample_size
from numpyro_sgmcmc.adaptation import (
    conditional_effects,
    hierarchical_fit,
    marginal_mode,
    marginal_refinement,
    pilot,
)
from numpyro_sgmcmc.adaptation.block_arrow_coordinates import recenter_block_arrow
from numpyro_sgmcmc.adaptation.conditional_effects import (
    ConditionalEffects,
    HierarchyFitError,
    evaluate_block_arrow,
    linearise,
)
from numpyro_sgmcmc.adaptation.effect_factors import (
    balance_signs,
    factorize_inverse_blocks,
    list_sign_patterns,
    make_symmetric_factors,
)
from numpyro_sgmcmc.adaptation.hierarchical_fit import fit_hierarchy, fit_hierarchy_from_each
from numpyro_sgmcmc.adaptation.marginal_mode import HierarchyNotConvergedError
from numpyro_sgmcmc.adaptation.pilot import init_standard_pilot, run_pilot_windows
from numpyro_sgmcmc.adaptation.warmup import warm_up_globals
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    BlockArrowLayout,
    BlockArrowMatrix,
    EffectSite,
    SharedStrips,
    find_block_arrow_layout,
    multiply_blocks,
)
from tests.adaptation import scales_of_groups
from tests.adaptation.inputs import make_inputs

GROUPS, ROWS_PER_GROUP = 200, 4
USERS, ITEMS = 60, 40
MAX_DISTANCE_SD, MAX_SD_ERROR = 0.05, 0.1
# Relative to the exact covariance; with one pattern of signs the error is 0.04 and more.
MAX_NORMAL_COVARIANCE_ERROR = 0.03
SIGNS = [(1, 1), (1, -1), (-1, 1), (-1, -1)]


def make_model(is_random_walk=False, is_bimodal=False, num_groups=GROUPS):
    def model(group, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        mean = mean**2 if is_bimodal else mean
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        if is_random_walk:
            effect = numpyro.sample("effect", dist.GaussianRandomWalk(scale, num_groups)) + mean
        else:
            with numpyro.plate("groups", num_groups):
                effect = numpyro.sample("effect", dist.Normal(mean, scale))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(effect[group[i]], 1.0), obs=y[i])

    return model


def make_data(seed=5, num_groups=GROUPS):
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_groups), ROWS_PER_GROUP)
    effect = 0.5 + 0.4 * rng.standard_normal(num_groups)
    y = (effect[group] + rng.standard_normal(group.size)).astype(np.float32)
    order = rng.permutation(group.size)
    return jnp.asarray(group[order]), jnp.asarray(y[order])


def marginal_potential(shared, group, y):
    """Return the potential of mean and log scale, effects integrated out."""
    mean, log_scale = shared
    group_means = np.bincount(group, y) / ROWS_PER_GROUP
    variance = np.exp(2.0 * log_scale) + 1.0 / ROWS_PER_GROUP
    prior = mean**2 / 8.0 + np.exp(2.0 * log_scale) / 2.0 - log_scale
    return 0.5 * np.sum(np.log(variance) + (group_means - mean) ** 2 / variance) + prior


def find_mode(potential, num_parameters):
    """Return the minimum of a function and its inverse Hessian there, by differences."""
    fit = minimize(potential, np.zeros(num_parameters), tol=1e-10)
    hessian, steps = np.zeros((num_parameters,) * 2), 1e-3 * np.eye(num_parameters)
    for i, j in np.ndindex(hessian.shape):
        values = [a * b * potential(fit.x + a * steps[i] + b * steps[j]) for a, b in SIGNS]
        hessian[i, j] = sum(values) / 4e-6
    return fit.x, np.linalg.inv(hessian)


def compute_exact_mode(group, y):
    """Return the marginal mode of mean and log scale, and its inverse Hessian."""
    args = np.asarray(group), np.asarray(y, float)
    return find_mode(lambda shared: marginal_potential(shared, *args), 2)


def fit(model, args, batch_size=100):
    inputs = make_inputs(model, args, batch_size)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    position = np.random.default_rng(0).uniform(-2, 2, inputs.potential.dim)
    return layout, fit_hierarchy(inputs, layout, position).coordinates


@pytest.mark.parametrize("num_groups", [GROUPS, 3_000])
def test_fit_has_trend_of_effects_sds_by_their_scale(num_groups):
    """Of many groups the differences are one-sided."""
    group, y = make_data(num_groups=num_groups)
    inputs = make_inputs(make_model(num_groups=num_groups), (group, y), 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    preconditioner = fit_hierarchy_from_each(
        inputs, layout, [np.zeros(inputs.potential.dim)]
    ).coordinates
    _, (_, log_scale) = layout.split(preconditioner.center)
    # The precision of an effect is the number of its rows, and that of its prior.
    prior_precision = np.exp(-2.0 * log_scale)
    share = prior_precision / (prior_precision + ROWS_PER_GROUP)
    trend = preconditioner.factor.sd_trend
    assert trend.columns == ((1,),)  # the mean does not change it
    np.testing.assert_allclose(trend.values, share * np.ones((1, 1, num_groups)), rtol=0.02)
    shared, covariance = compute_exact_mode(group, y)
    sds, factor = np.sqrt(np.diagonal(covariance)), preconditioner.factor.shared_factor
    np.testing.assert_allclose(factor @ factor.T, covariance, atol=0.2 * sds.min() ** 2)
    distance = np.abs(layout.take_shared(preconditioner.center) - shared) / sds
    assert distance.max() < MAX_DISTANCE_SD


def make_inputs_of_effects(make_rows, y, group, num_groups):
    def model(group, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("groups", num_groups):
            effect = numpyro.sample("effect", dist.Normal(mean, scale))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", make_rows(effect[group[i]]), obs=y[i])

    return make_inputs(model, (group, y), 100)


@pytest.mark.parametrize(
    ("make_rows", "num_groups", "is_exact"),
    [
        (lambda effect: dist.Normal(effect, 1.0), 3_000, True),
        (lambda effect: dist.Normal(effect, 1.0), GROUPS, False),
        (lambda effect: dist.StudentT(4.0, effect, 1.0), 3_000, False),
    ],
)
def test_fit_is_exact_where_many_groups_have_normal_effects(make_rows, num_groups, is_exact):
    group, y = make_data(num_groups=num_groups)
    inputs = make_inputs_of_effects(make_rows, y, group, num_groups)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)])
    assert fit.is_exact == is_exact


def test_fit_is_not_exact_where_newtons_method_has_not_converged(monkeypatch):
    monkeypatch.setattr(marginal_refinement, "_MAX_LAST_NEWTON_STEP_SD", 0.0)
    group, y = make_data(num_groups=3_000)
    inputs = make_inputs(make_model(num_groups=3_000), (group, y), 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)])
    assert not fit.is_exact


def test_pilot_chains_that_were_lost_do_not_keep_a_fit(monkeypatch):
    inputs = make_inputs(make_model(), make_data(), 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)]).coordinates
    inputs = replace(inputs, budget=inputs.budget.for_hierarchy())
    monkeypatch.setattr(pilot, "_find_surviving_chains", lambda *args: np.zeros(8, bool))
    start = replace(init_standard_pilot(inputs, fit), keeps_fit=True)
    assert not run_pilot_windows(inputs, start, [100]).keeps_fit


@pytest.mark.parametrize("has_wrong_covariance", [False, True])
def test_pilot_chains_keep_an_exact_fit(has_wrong_covariance):
    """Their bias is no reason for other coordinates; another covariance is."""
    num_groups = 3_000
    group, y = make_data(num_groups=num_groups)
    inputs = make_inputs(make_model(num_groups=num_groups), (group, y), 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)]).coordinates
    if has_wrong_covariance:
        factor = replace(fit.factor, shared_factor=4.0 * fit.factor.shared_factor)
        fit = fit._replace(factor=factor)
    # The center is two posterior SDs off, as the means of biased chains may be from a correct one.
    fit = recenter_block_arrow(inputs, fit, np.full(layout.num_shared, 2.0), np.eye(2))
    inputs = replace(inputs, budget=inputs.budget.for_hierarchy())
    start = replace(init_standard_pilot(inputs, fit), keeps_fit=True)
    end = run_pilot_windows(inputs, start, [400])
    is_kept = end.preconditioner is fit
    assert is_kept != has_wrong_covariance
    assert end.keeps_fit == is_kept


def make_many_effects(num_effects, num_groups, num_rows, effect_sd=0.6):
    """Return warm-up inputs of a regression, and the marginal potential."""

    def model(group, x, y, batch_size=None):
        shape = [num_effects]
        mean = numpyro.sample("mean", dist.Normal(0, 2).expand(shape).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand(shape).to_event(1))
        with numpyro.plate("groups", num_groups):
            effect = numpyro.sample("effect", dist.Normal(mean, scale).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal((effect[group[i]] * x[i]).sum(-1), 1.0), obs=y[i])

    rng = np.random.default_rng(3)
    group, x = np.arange(num_rows) % num_groups, rng.standard_normal((num_rows, num_effects))
    effect = effect_sd * rng.standard_normal((num_groups, num_effects))
    y = (effect[group] * x).sum(1) + rng.standard_normal(num_rows)
    args = (jnp.asarray(group), jnp.asarray(x, "f"), jnp.asarray(y, "f"))
    by_group = np.argsort(group, kind="stable").reshape(num_groups, -1)
    gram = np.einsum("gri,grj->gij", x[by_group], x[by_group])
    linear = np.einsum("gri,gr->gi", x[by_group], y[by_group])

    def potential(shared):
        mean, log_scale = np.split(shared, 2)
        precision = np.exp(-2.0 * log_scale)
        right, matrices = linear + precision * mean, gram + np.diag(precision)
        fitted = np.einsum("gi,gi->", right, np.linalg.solve(matrices, right[..., None])[..., 0])
        quadratic = fitted - num_groups * precision @ mean**2
        log_det = np.linalg.slogdet(matrices)[1].sum() + 2.0 * num_groups * log_scale.sum()
        prior = mean @ mean / 8.0 + np.exp(2.0 * log_scale).sum() / 2.0 - log_scale.sum()
        return (log_det - quadratic) / 2.0 + prior

    return make_inputs(model, args, 100), potential


def test_fit_of_many_effects_is_near_the_marginal_mode():
    num_effects = 6
    inputs, potential = make_many_effects(num_effects, num_groups=120, num_rows=960)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)]).coordinates
    # An effect depends on its mean and its scale alone.
    own = np.arange(num_effects)
    _, hessian = evaluate_block_arrow(inputs, layout, fit.center)
    columns = np.sort(hessian.strips.columns, axis=0)
    np.testing.assert_array_equal(columns, [own, num_effects + own])
    # The rows depend on neither.
    assert not fit.reference_hessian.strips.values.any()
    assert fit.factor.has_strips
    # Its SD changes with its scale.
    assert (np.array(fit.factor.sd_trend.columns) == num_effects + own).any(0).all()

    mode, covariance = find_mode(potential, 2 * num_effects)
    sds = np.sqrt(np.diagonal(covariance))
    _, shared = layout.split(fit.center)
    assert np.abs((shared - mode) / sds).max() < MAX_DISTANCE_SD
    fitted_sds = np.linalg.norm(fit.factor.shared_factor, axis=1)
    np.testing.assert_allclose(fitted_sds, sds, rtol=MAX_SD_ERROR)


def update_effects(inputs, layout, shared):
    """Return the linearisation at effects of zero, and the effects after a Newton step."""
    position = layout.merge(np.zeros((layout.effects_per_group, layout.num_groups)), shared)
    linearisation = conditional_effects.linearise(inputs, layout, position)
    factors, signs = linearisation.factors, balance_signs(linearisation.factors)
    deviation = multiply_blocks(factors, signs)
    conditional = conditional_effects.ConditionalEffects(
        position, factors, deviation, position, linearisation.hessian.blocks
    )
    return linearisation, conditional_effects.update_effects(
        inputs, layout, linearisation, conditional, signs, bound=1.0
    )


@pytest.mark.parametrize(
    ("distribution", "is_normal"), [(dist.Normal, True), (partial(dist.StudentT, 4.0), False)]
)
def test_effects_of_symmetric_rows_are_normal_only_if_their_gradient_is_linear(
    distribution, is_normal
):
    """Of these the even part of the gradient is zero."""
    group, y = np.arange(400) % 100, np.where(np.arange(400) < 200, 1.0, -1.0)
    args = jnp.asarray(y, "f"), jnp.asarray(group)
    inputs = make_inputs_of_effects(lambda effect: distribution(effect, 1.0), *args, 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    _, updated = update_effects(inputs, layout, np.zeros(layout.num_shared))
    assert updated.is_normal == is_normal


@pytest.mark.parametrize("effect_sd", [0.6, 0.1])
def test_hessian_of_the_marginal_is_exact(effect_sd):
    """Of small effects the rows determine the scale weakly: most of the curvature cancels."""
    inputs, potential = make_many_effects(3, 3_000, num_rows=12_000, effect_sd=effect_sd)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    mode, covariance = find_mode(potential, 6)
    linearisation, conditional = update_effects(inputs, layout, mode)
    assert linearisation.coloring.num_colors == 2
    signs = np.linalg.solve(
        np.moveaxis(conditional.factors, 2, 0), conditional.deviation.T[:, :, None]
    )[:, :, 0].T
    deviations = [
        multiply_blocks(conditional.factors, signs * pattern[:, None])
        for pattern in list_sign_patterns(3)
    ]
    found = conditional_effects.linearise_normal(
        inputs, layout, linearisation, conditional, deviations
    )
    assert found.is_marginal
    # In units in which the exact covariance is one.
    root = np.linalg.cholesky(covariance)
    relative = np.linalg.solve(root, np.linalg.solve(root, found.shared_covariance).T)
    np.testing.assert_allclose(relative, np.eye(6), atol=MAX_NORMAL_COVARIANCE_ERROR)
    # With a parameter that is said to couple with no effect, it is not found.
    is_coupled = linearisation.coloring.is_coupled.copy()
    is_coupled[-1] = False
    coloring = replace(linearisation.coloring, is_coupled=is_coupled)
    missing = replace(linearisation, coloring=coloring)
    assert conditional_effects.linearise_normal(inputs, layout, missing, conditional) is None


def test_missing_coupling_is_found_among_many_groups():
    num_groups, k, num_shared = 100_000, 5, 11
    site = EffectSite(num_shared, (num_groups, k), (0,))
    layout = BlockArrowLayout(num_shared + num_groups * k, (site,))
    blocks = np.tile(np.eye(k)[:, :, None], (1, 1, num_groups))
    strips = np.zeros((num_shared, k, num_groups))
    strips[:k] = 0.5 / np.sqrt(num_groups) * np.eye(k)[:, :, None]  # a quarter of the curvature
    corner = np.eye(num_shared)
    hessian = BlockArrowMatrix(blocks, SharedStrips.from_dense(strips), corner, layout)
    vector = conditional_effects._draw_shared_vector(hessian)
    assert conditional_effects._is_product(hessian, vector, hessian @ vector)
    strips[3] = 0.0
    missing = replace(hessian, strips=SharedStrips.from_dense(strips))
    assert not conditional_effects._is_product(missing, vector, hessian @ vector)


def test_fit_of_normal_effects_needs_no_differences_along_shared_parameters():
    inputs, potential = make_many_effects(3, 3_000, num_rows=12_000)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    unrefined = fit_hierarchy(inputs, layout, np.zeros(layout.dim))
    assert unrefined.linearisation is not None
    fit, is_exact = marginal_refinement.refine_shared(inputs, unrefined)
    assert is_exact
    mode, covariance = find_mode(potential, 6)
    root = np.linalg.cholesky(covariance)
    distance = np.linalg.solve(root, layout.take_shared(fit.center) - mode)
    assert np.abs(distance).max() < MAX_DISTANCE_SD
    relative = np.linalg.solve(root, fit.factor.shared_factor)
    np.testing.assert_allclose(relative @ relative.T, np.eye(6), atol=MAX_NORMAL_COVARIANCE_ERROR)
    by_differences = unrefined._replace(linearisation=None)
    other, _ = marginal_refinement.refine_shared(inputs, by_differences)
    trend, expected = fit.factor.sd_trend, other.factor.sd_trend
    assert trend.columns == expected.columns
    np.testing.assert_allclose(trend.values, expected.values, rtol=1e-3, atol=1e-4)


def test_fit_finds_marginal_mode_where_joint_mode_has_scale_zero():
    args = make_data()
    layout, preconditioner = fit(make_model(), args)
    mode, covariance = compute_exact_mode(*args)
    sds = np.sqrt(np.diagonal(covariance))
    effects, shared = layout.split(preconditioner.center)
    assert np.abs((shared - mode) / sds).max() < MAX_DISTANCE_SD
    # Effects are at their conditional means.
    group_means = np.bincount(args[0], args[1]) / ROWS_PER_GROUP
    weight = 1.0 / (1.0 + np.exp(-2.0 * shared[1]) / ROWS_PER_GROUP)
    expected = weight * group_means + (1.0 - weight) * shared[0]
    np.testing.assert_allclose(effects[0], expected, atol=2e-3)
    factor = preconditioner.factor
    fitted_sds = np.sqrt(np.diagonal(factor.shared_factor @ factor.shared_factor.T))
    np.testing.assert_allclose(fitted_sds, sds, rtol=MAX_SD_ERROR)
    np.testing.assert_allclose(
        factor.effect_factors[0, 0] ** 2,
        1.0 / (ROWS_PER_GROUP + np.exp(-2.0 * shared[1])),
        rtol=1e-3,
    )


def test_effects_that_the_prior_couples_have_no_fit():
    with pytest.raises(HierarchyFitError, match="different groups are coupled"):
        fit(make_model(is_random_walk=True), make_data())


@pytest.mark.parametrize("is_centred", [True, False])
def test_fit_with_many_rows_per_group_converges_from_afar(is_centred):
    """The rows determine the sum of mean and effects far better than the mean."""
    num_groups, rng = 40, np.random.default_rng(4)
    group = np.arange(20_000) % num_groups
    effects = 0.4 * rng.standard_normal(num_groups)
    y = rng.poisson(np.exp(0.3 + effects[group])).astype(np.float32)

    def model(group, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        prior = dist.Normal(0, scale if is_centred else 1).expand([num_groups]).to_event(1)
        effect = numpyro.sample("effect", prior)
        effect = effect if is_centred else scale * effect
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(mean + effect[group[i]])), obs=y[i])

    inputs = make_inputs(model, (jnp.asarray(group), jnp.asarray(y)), 500)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    for _ in range(3):
        position = rng.uniform(-2, 2, inputs.potential.dim)
        fit = fit_hierarchy(inputs, layout, position).coordinates
        mean, log_scale = layout.take_shared(fit.center)
        # Its error is that of the mean of the groups' effects, 0.4 / sqrt(40).
        assert abs(mean - 0.3 - effects.mean()) < 0.02
        assert abs(log_scale - np.log(effects.std())) < 0.1


def test_fits_are_compared_without_the_refinement(monkeypatch):
    """It moves the scales of many thousands of groups by several posterior SDs."""
    inputs = make_inputs(make_model(), make_data(), 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)

    def move(inputs, fit):
        identity = np.eye(layout.num_shared)
        shift = np.full(layout.num_shared, 5.0)
        moved = recenter_block_arrow(inputs, fit.coordinates, shift, identity)
        return marginal_refinement.HierarchyFit(moved, is_exact=True)

    monkeypatch.setattr(hierarchical_fit, "refine_shared", move)
    positions = [np.zeros(layout.dim), np.full(layout.dim, 0.3)]
    fit = fit_hierarchy_from_each(inputs, layout, positions).coordinates
    assert fit.is_finite()


@pytest.mark.parametrize("part", ["corner", "strips"])
def test_hessian_of_shared_parameters_that_is_not_finite_ends_the_fit(part, monkeypatch):
    inputs = make_inputs(make_model(), make_data(), 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    gradient, hessian = evaluate_block_arrow(inputs, layout, np.zeros(layout.dim))
    if part == "corner":
        corner = hessian.corner.copy()
        corner[0, 1] = np.nan
        hessian = replace(hessian, corner=corner)
    else:
        values = hessian.strips.values.copy()
        values[0, 0, 3] = np.inf
        hessian = replace(hessian, strips=replace(hessian.strips, values=values))
    monkeypatch.setattr(
        conditional_effects, "evaluate_block_arrow", lambda *args: (gradient, hessian)
    )
    with pytest.raises(HierarchyFitError, match="not finite"):
        conditional_effects.linearise(inputs, layout, np.zeros(layout.dim))


def test_fit_continues_where_wrong_secants_make_steps_too_short(monkeypatch):
    group, y = make_data()
    inputs = make_inputs_of_effects(lambda e: dist.StudentT(4.0, e, 1.0), y, group, GROUPS)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    position = np.full(layout.dim, 0.5)
    expected = fit_hierarchy(inputs, layout, position).coordinates
    update, calls = marginal_mode._update_bfgs, []

    def shrink_first(*args):
        calls.append(args)
        return (1e-6 if len(calls) <= 2 else 1.0) * update(*args)

    monkeypatch.setattr(marginal_mode, "_update_bfgs", shrink_first)
    found = fit_hierarchy(inputs, layout, position).coordinates
    distance = layout.take_shared(expected.solve(found.center - expected.center))
    assert np.abs(distance).max() < 0.2


def test_fits_that_differ_are_left_out():
    inputs = make_inputs(make_model(is_bimodal=True), make_data(), 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    effects = np.zeros((1, GROUPS))
    positive, negative = (layout.merge(effects, np.array([x, -0.5])) for x in (1.0, -1.0))
    fit_hierarchy_from_each(inputs, layout, [positive, positive])
    with pytest.raises(HierarchyFitError, match="initial positions differ"):
        fit_hierarchy_from_each(inputs, layout, [positive, negative])
    nowhere = np.full(inputs.potential.dim, np.nan)
    fit_hierarchy_from_each(inputs, layout, [nowhere, positive])
    fit_hierarchy_from_each(inputs, layout, [nowhere])  # from the origin
    with pytest.raises(HierarchyFitError, match="not finite"):
        fit_hierarchy_from_each(inputs, layout, [nowhere], has_effects=True)


def test_crossed_effects_start_at_mean_field_fits_where_no_fit_from_zero_converges():
    """Item responses: products of slopes and abilities have saddle points at zero."""
    num_persons, num_items = 200, 30

    def model(person, item, y, batch_size=None):
        with numpyro.plate("persons", num_persons):
            ability = numpyro.sample("ability", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(2))
        with numpyro.plate("items", num_items):
            difficulty = numpyro.sample("difficulty", dist.Normal(0, scale))
            slope = numpyro.sample("slope", dist.LogNormal(0, 0.5))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            logits = slope[item[i]] * (ability[person[i]] - difficulty[item[i]])
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    rng = np.random.default_rng(25)
    order = rng.permutation(num_persons * num_items)
    person, item = order // num_items, order % num_items
    ability, difficulty = rng.standard_normal(num_persons), 0.2 + rng.standard_normal(num_items)
    slope = np.exp(0.3 * rng.standard_normal(num_items))
    logits = slope[item] * (ability[person] - difficulty[item])
    y = rng.random(len(order)) < 1 / (1 + np.exp(-logits))
    args = tuple(jnp.asarray(x, int) for x in (person, item, y))
    inputs = make_inputs(model, args, 500)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    position = rng.uniform(-2, 2, layout.dim)
    with pytest.raises(HierarchyNotConvergedError):
        fit_hierarchy_from_each(inputs, layout, [position])
    adaptation = warm_up_globals(inputs, (rng.uniform(-2, 2, layout.dim) for _ in range(100)))
    assert adaptation.trace.hierarchy_note == ""
    assert isinstance(adaptation.preconditioner.factor, BlockArrowFactor)
    _, shared = layout.split(adaptation.preconditioner.center)
    assert abs(shared[0] - np.log(difficulty.std())) < 0.5


def correlated_model(group, x, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2).expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([3]).to_event(1))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(3, 2.0))
    with numpyro.plate("groups", GROUPS):
        normal = dist.MultivariateNormal(mean, scale_tril=scale[:, None] * correlation)
        effect = numpyro.sample("effect", normal)
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal((effect[group[i]] * x[i]).sum(-1), 1.0), obs=y[i])


def test_fit_of_correlated_effects_with_few_rows_is_near_the_marginal_mode():
    rng = np.random.default_rng(0)
    covariance = np.array([[0.6, 0.3, -0.1], [0.3, 0.4, 0.0], [-0.1, 0.0, 0.2]])
    effects = rng.multivariate_normal([0.2, -0.1, 0.3], covariance, GROUPS)
    group = np.repeat(np.arange(GROUPS), ROWS_PER_GROUP)
    x = rng.standard_normal((group.size, 3))
    y = (effects[group] * x).sum(1) + rng.standard_normal(group.size)
    args = jnp.asarray(group), jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    inputs = make_inputs(correlated_model, args, 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)

    to_correlation = dist.transforms.CorrCholeskyTransform()
    designs, responses = x.reshape(GROUPS, ROWS_PER_GROUP, 3), y.reshape(GROUPS, ROWS_PER_GROUP)

    @jax.jit
    def marginal(shared):
        """Return the potential of the shared parameters, effects integrated out."""
        z, mean, log_scale = jnp.split(shared, 3)
        correlation, scale = to_correlation(z), jnp.exp(log_scale)
        loadings = designs @ (scale[:, None] * correlation)
        covariances = loadings @ loadings.swapaxes(1, 2) + jnp.eye(ROWS_PER_GROUP)
        value = dist.MultivariateNormal(designs @ mean, covariances).log_prob(responses).sum()
        value += dist.LKJCholesky(3, 2.0).log_prob(correlation)
        value += to_correlation.log_abs_det_jacobian(z, correlation)
        value += (dist.HalfNormal(1).log_prob(scale) + log_scale).sum()
        return -value - dist.Normal(0, 2).log_prob(mean).sum()

    with jax.enable_x64(True):
        mode, covariance = find_mode(lambda shared: float(marginal(shared)), 9)
    sds = np.sqrt(np.diagonal(covariance))
    # With independent signs in place of balanced ones the fit is 2.8 SDs off.
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)]).coordinates
    distance = np.abs(layout.take_shared(fit.center) - mode) / sds
    assert distance.max() < MAX_DISTANCE_SD


def crossed_model(user, item, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
    with numpyro.plate("users", USERS):
        a = numpyro.sample("a", dist.Normal(0, scales[0]))
    with numpyro.plate("items", ITEMS):
        b = numpyro.sample("b", dist.Normal(0, scales[1]))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean + a[user[i]] + b[item[i]], 1.0), obs=y[i])


def make_crossed_data(num_rows=900):
    rng = np.random.default_rng(1)
    user, item = rng.integers(0, USERS, num_rows), rng.integers(0, ITEMS, num_rows)
    eta = 0.3 + 0.5 * rng.standard_normal(USERS)[user] + 0.4 * rng.standard_normal(ITEMS)[item]
    y = (eta + rng.standard_normal(num_rows)).astype(np.float32)
    return jnp.asarray(user), jnp.asarray(item), jnp.asarray(y)


def compute_crossed_mode(user, item, y):
    """Return the marginal mode of mean and log scales, and its inverse Hessian."""
    design = np.zeros((len(y), USERS + ITEMS))
    design[np.arange(len(y)), user] = 1.0
    design[np.arange(len(y)), USERS + np.asarray(item)] = 1.0
    products, sums = design.T @ design, design.T @ np.asarray(y, float)
    counts = np.diag(products)
    sizes = np.array([USERS, ITEMS])

    def marginal(shared):
        mean, log_scales = shared[0], shared[1:]
        precision = products + np.diag(np.repeat(np.exp(-2.0 * log_scales), sizes))
        residuals = sums - mean * counts
        squares = len(y) * mean**2 - 2.0 * mean * float(np.sum(y))
        value = squares - residuals @ np.linalg.solve(precision, residuals)
        value += np.linalg.slogdet(precision)[1] + 2.0 * sizes @ log_scales
        prior = mean**2 / 8.0 + np.sum(np.exp(2.0 * log_scales) / 2.0 - log_scales)
        return 0.5 * value + prior

    return find_mode(marginal, 3)


def test_fit_of_crossed_effects_is_near_the_marginal_mode():
    args = make_crossed_data()
    layout, preconditioner = fit(crossed_model, args)
    mode, covariance = compute_crossed_mode(*args)
    sds = np.sqrt(np.diagonal(covariance))
    _, shared = layout.split(preconditioner.center)
    # The start leaves out the covariance of effects of different groupings.
    assert np.abs((shared - mode) / sds).max() < 3.0 * MAX_DISTANCE_SD
    factor = preconditioner.factor
    fitted_sds = np.sqrt(np.diagonal(factor.shared_factor @ factor.shared_factor.T))
    np.testing.assert_allclose(fitted_sds, sds, rtol=MAX_SD_ERROR)
    # The means of users and items are nearly confounded: the only directions that are scaled.
    assert 1 <= factor.correlation.scales.size <= 4
    assert factor.correlation.scales.max() > 1.5


@pytest.mark.parametrize("is_crossed", [False, True])
def test_means_of_effects_follow_the_shared_parameters_about_a_new_center(is_crossed):
    args = make_crossed_data() if is_crossed else make_data()
    model = crossed_model if is_crossed else make_model()
    inputs = make_inputs(model, args, 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    fit = fit_hierarchy_from_each(inputs, layout, [np.zeros(inputs.potential.dim)]).coordinates
    num_shared = layout.num_shared
    # The log scales move by one and a half SDs.
    shift = np.array([0.0, 1.5, 1.5])[:num_shared]
    moved = recenter_block_arrow(inputs, fit, shift, np.eye(num_shared))
    _, hessian = evaluate_block_arrow(inputs, layout, moved.center)
    no_effects = np.zeros((num_shared, layout.effects_per_group, layout.num_groups))
    for unit in layout.merge(no_effects, np.eye(num_shared)):
        _, of_shared = layout.split(moved.factor.apply(unit))
        strips = hessian.strips.multiply(of_shared)
        # Along a shared coordinate the gradient of the effects stays zero.
        residual, _ = layout.split(hessian @ moved.factor.apply(unit))
        assert np.linalg.norm(residual) < 0.05 * np.linalg.norm(strips)


def test_default_arguments_sample_a_hierarchy_with_few_rows_per_group():
    args = make_data()
    mcmc = MCMC(
        SGHMCSplit(make_model()),
        num_warmup=100,
        num_samples=500,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *args, batch_size=100)
    adaptation = mcmc.sampler.adaptation
    assert adaptation.estimator.name == "second_order_control_variate"
    assert mcmc.sampler.integrator == "baoab"
    # Matrices are those of all chains, and chains have variances.
    adapt_state = mcmc.last_state.adapt_state
    assert adapt_state.preconditioner.factor.shared_factor.shape == (2, 2)
    assert all(len(x) == 4 for x in adapt_state.inverse_mass_matrix.values())
    suggestion = suggest_subsample_size(mcmc.sampler, *args, batch_size=100)
    assert all(np.isfinite(suggestion.seconds_per_draw))
    mode, covariance = compute_exact_mode(*args)
    # The marginal density on a grid of 5 SDs about its mode.
    axes = [
        m + np.linspace(-5, 5, 61) * s
        for m, s in zip(mode, np.sqrt(np.diag(covariance)), strict=True)
    ]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    potentials = np.array(
        [marginal_potential(p, np.asarray(args[0]), np.asarray(args[1], float)) for p in grid]
    )
    weights = np.exp(potentials.min() - potentials)
    weights /= weights.sum()
    mean, scale = grid[:, 0], np.exp(grid[:, 1])
    samples = mcmc.get_samples(group_by_chain=True)
    for draws, values in ((samples["mean"], mean), (samples["scale"], scale)):
        exact_mean = weights @ values
        exact_sd = np.sqrt(weights @ (values - exact_mean) ** 2)
        ess, ess_of_squares = (
            effective_sample_size(x) for x in (draws, np.square(draws - draws.mean()))
        )
        assert min(ess, ess_of_squares) > 400
        # Four standard errors.
        assert abs(float(draws.mean()) - exact_mean) < 4.0 / np.sqrt(ess) * exact_sd
        assert abs(float(draws.std()) / exact_sd - 1.0) < 4.0 / np.sqrt(2.0 * ess_of_squares)


def test_effects_without_density_have_no_fit():
    is_masked = jnp.arange(GROUPS) < GROUPS // 2

    def model(group, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        with numpyro.plate("groups", GROUPS):
            effect = numpyro.sample("effect", dist.Normal(mean, 1).mask(~is_masked))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            at = jnp.where(is_masked[group[i]], 0.0, effect[group[i]])
            numpyro.sample("y", dist.Normal(at, 1.0), obs=y[i])

    with pytest.raises(HierarchyFitError, match="does not depend"):
        fit(model, make_data())


def test_symmetric_factors_change_nearly_diagonally_with_prior_sds():
    rng = np.random.default_rng(0)
    num_effects, num_groups, num_rows = 5, 40, 4
    prior_sds = rng.uniform(0.2, 2.0, num_effects)
    x = rng.standard_normal((num_rows, num_effects, num_groups))
    gram = np.einsum("nag,nbg->abg", x, x)

    def factorize(prior_sds, is_symmetric):
        precisions = np.broadcast_to(prior_sds[:, None] ** -2, (num_effects, num_groups))
        prior = np.eye(num_effects)[:, :, None] * precisions
        factors = factorize_inverse_blocks(gram + prior)
        return make_symmetric_factors(factors, precisions) if is_symmetric else factors

    def measure_change(is_symmetric):
        """Return the sum of squares of ``F^-1 dF + dF^T F^-T`` off the diagonal."""
        F, sum_of_squares = np.moveaxis(factorize(prior_sds, is_symmetric), 2, 0), 0.0
        for change in 1e-4 * np.eye(num_effects):
            moved = np.moveaxis(factorize(prior_sds * np.exp(change), is_symmetric), 2, 0)
            scaled = np.linalg.solve(F, moved)
            derivative = (scaled @ scaled.swapaxes(1, 2) - np.eye(num_effects)) / 1e-4
            sum_of_squares += np.square(derivative[:, ~np.eye(num_effects, dtype=bool)]).sum()
        return sum_of_squares

    triangular, symmetric = factorize(prior_sds, False), factorize(prior_sds, True)
    covariances = [np.einsum("abg,cbg->acg", f, f) for f in (triangular, symmetric)]
    np.testing.assert_allclose(*covariances, rtol=1e-9, atol=1e-12)
    scaled = symmetric / prior_sds[:, None, None]
    np.testing.assert_allclose(scaled, scaled.swapaxes(0, 1), atol=1e-9)
    assert measure_change(is_symmetric=True) < 0.5 * measure_change(is_symmetric=False)


def test_symmetric_factors_without_prior_have_the_same_covariances():
    blocks = np.moveaxis(np.array([[[2.0, 0.5], [0.5, 1.0]], [[1.0, -0.3], [-0.3, 4.0]]]), 0, 2)
    factors = make_symmetric_factors(factorize_inverse_blocks(blocks), np.zeros((2, 2)))
    covariances = np.moveaxis(np.einsum("abg,cbg->acg", factors, factors), 2, 0)
    np.testing.assert_allclose(covariances, np.linalg.inv(np.moveaxis(blocks, 2, 0)))


def test_effects_of_few_rows_with_a_skewed_likelihood_converge():
    """Newton steps of location and log scale of groups with up to six rows would oscillate."""
    inputs = make_inputs(scales_of_groups.model, scales_of_groups.make_data(), 1_000)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    shared = np.array([-0.735, -0.69, 0.971, -0.72])  # near the mode
    position = layout.merge(np.zeros((2, layout.num_groups)), shared)
    linearisation = linearise(inputs, layout, position)
    factors = linearisation.factors
    signs = balance_signs(factors)
    deviation = multiply_blocks(factors, signs)
    gradient, blocks = np.zeros_like(position), linearisation.hessian.blocks
    effects = ConditionalEffects(position, factors, deviation, gradient, blocks)
    for _ in range(40):
        effects = conditional_effects.update_effects(
            inputs, layout, linearisation, effects, signs, 0.7
        )
    of_effects, _ = layout.split(effects.gradient)
    newton_steps = multiply_blocks(effects.factors, of_effects, transpose=True)
    assert np.abs(newton_steps).max() < 0.2  # in posterior SDs


def test_fits_of_effects_with_a_skewed_likelihood_end_at_the_same_mode():
    inputs = make_inputs(scales_of_groups.model, scales_of_groups.make_data(), 1_000)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    rng = np.random.default_rng(5)
    fits = []
    for _ in range(24):
        position = rng.uniform(-2, 2, inputs.potential.dim)
        with suppress(HierarchyNotConvergedError):
            fits.append(marginal_mode.fit_marginal(inputs, layout, position, False))
    assert len(fits) >= 12
    found = np.stack([layout.take_shared(fit.conditional.position) for fit in fits])
    assert np.ptp(found, axis=0).max() < 0.1  # posterior SDs are 0.025 to 0.04
