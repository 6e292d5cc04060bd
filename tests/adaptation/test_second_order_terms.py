"""Gradients of a hierarchy have terms of second order where they would be noisy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import HostArray
from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions
from numpyro_sgmcmc.adaptation.block_arrow_coordinates import recenter_block_arrow
from numpyro_sgmcmc.adaptation.gradient_noise import measure_hierarchy_noise
from numpyro_sgmcmc.adaptation.hierarchical_fit import fit_hierarchy_from_each
from numpyro_sgmcmc.adaptation.pilot import PILOT_DYNAMICS, PILOT_THINNING, _run_pilot_steps
from numpyro_sgmcmc.adaptation.second_order_terms import add_differences
from numpyro_sgmcmc.dynamics.langevin import UnderdampedState
from numpyro_sgmcmc.model.block_arrow import EffectThirdDerivatives, find_block_arrow_layout
from numpyro_sgmcmc.model.gradient_estimators import (
    MinibatchGradient,
    SecondOrderControlVariate,
    make_gradient_fn,
)
from tests.adaptation.counts import NUM_GROUPS, NUM_ROWS, fit_counts
from tests.adaptation.inputs import make_inputs

GROUPS, ROWS_PER_GROUP = 200, 4
ROW_SCALE, SCALE = 1, 2  # their numbers: the order of the shared parameters is that of their names


def model(group, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    row_scale = numpyro.sample("row_scale", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], row_scale), obs=y[i])


def fit(batch_size):
    rng = np.random.default_rng(5)
    group = rng.permutation(np.repeat(np.arange(GROUPS), ROWS_PER_GROUP))
    effect = 0.5 + 0.8 * rng.standard_normal(GROUPS)
    y = (effect[group] + 0.7 * rng.standard_normal(group.size)).astype(np.float32)
    inputs = make_inputs(model, (jnp.asarray(group), jnp.asarray(y)), batch_size)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    position = np.zeros(inputs.potential.dim)
    return inputs, fit_hierarchy_from_each(inputs, layout, [position]).coordinates


def measure_noise(inputs, preconditioner, hessian, q):
    """Measure the noise of effects and shared parameters with another Hessian."""
    at = preconditioner._replace(reference_hessian=hessian)
    bulk = BulkPositions(inputs.batched_gradients, at, q)
    return measure_hierarchy_noise(bulk, SecondOrderControlVariate(), np.random.default_rng(2))


@pytest.mark.parametrize(("batch_size", "columns"), [(20, (ROW_SCALE,)), (400, None)])
def test_noisy_scale_of_rows_has_differences(batch_size, columns):
    _, preconditioner = fit(batch_size)
    differences = preconditioner.reference_hessian.differences
    assert columns == (None if differences is None else differences.columns)


def fit_crossed():
    def crossed(user, item, y, batch_size=None):
        row_scale = numpyro.sample("row_scale", dist.HalfNormal(1))
        effects = []
        for name, index in (("users", user), ("items", item)):
            with numpyro.plate(name, GROUPS):
                effects.append((numpyro.sample(f"effect of {name}", dist.Normal(0, 1)), index))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            eta = sum(effect[index[i]] for effect, index in effects)
            numpyro.sample("y", dist.Normal(eta, row_scale), obs=y[i])

    rng = np.random.default_rng(5)
    num_rows = GROUPS * ROWS_PER_GROUP
    user, item = (jnp.asarray(rng.integers(0, GROUPS, num_rows)) for _ in range(2))
    y = jnp.asarray(1.5 * rng.standard_normal(num_rows), jnp.float32)
    inputs = make_inputs(crossed, (user, item, y), 20)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    return inputs, fit_hierarchy_from_each(
        inputs, layout, [np.zeros(inputs.potential.dim)]
    ).coordinates


def test_crossed_effects_have_differences_of_pairs_of_groups():
    inputs, fit = fit_crossed()
    hessian = fit.reference_hessian
    differences = hessian.differences
    assert differences.columns == (0,)
    # The rows' curvature is proportional to the inverse variance of the rows.
    for at_center, difference in (
        (hessian.pairs.values, differences.pairs[0].values),
        (hessian.blocks, differences.values[0]),
    ):
        is_coupled = np.abs(at_center) > 1e-3
        np.testing.assert_allclose(difference[is_coupled], -2 * at_center[is_coupled], rtol=0.02)
    q = np.random.default_rng(1).standard_normal((4, inputs.potential.dim))

    def measure(hessian):
        return measure_noise(inputs, fit, hessian, q)[1]

    assert measure(replace(hessian, differences=None)).max() > 0.2
    assert measure(hessian).max() < 0.1 * measure(replace(hessian, differences=None)).max()


def test_estimates_with_differences_of_crossed_effects_are_unbiased():
    """The mean over all minibatches of a partition is the gradient on all rows."""
    inputs, fit = fit_crossed()
    num_rows = GROUPS * ROWS_PER_GROUP
    q = jnp.asarray(np.random.default_rng(1).standard_normal(inputs.potential.dim), jnp.float32)
    preconditioner = fit.cast(jnp.float32)
    batches = np.random.default_rng(2).permutation(num_rows).reshape(-1, 20)
    potential, arguments = inputs.potential, inputs.arguments
    estimates = []
    for estimator in (SecondOrderControlVariate(), MinibatchGradient()):

        @jax.jit
        def estimate(rows, estimator=estimator):
            indices = {"rows": rows}
            return make_gradient_fn(estimator, potential, arguments, preconditioner, indices)(q)

        estimates.append(np.mean([estimate(rows) for rows in jnp.asarray(batches)], 0))
    error = np.abs(estimates[0] - estimates[1])
    assert error.max() < 2e-3 * np.abs(estimates[1]).max()


def test_differences_remove_the_noise_and_follow_the_center():
    inputs, preconditioner = fit(20)
    hessian = preconditioner.reference_hessian
    q = np.random.default_rng(1).standard_normal((4, inputs.potential.dim))

    def measure(hessian):
        return measure_noise(inputs, preconditioner, hessian, q)[1]

    before, after = measure(replace(hessian, differences=None)), measure(hessian)
    assert before[ROW_SCALE] > 0.2
    assert after[ROW_SCALE] < 0.1 * before[ROW_SCALE]
    # The effects' noise, which the gradients of their mean and scale have, is removed as well.
    assert (after < 0.1 * before).all()
    # The precision that each group's rows add is proportional to the inverse variance of the rows.
    shift = np.eye(3)[ROW_SCALE]
    moved = recenter_block_arrow(inputs, preconditioner, shift, np.eye(3)).reference_hessian
    change = preconditioner.factor.shared_factor @ shift
    ratio = moved.differences.values / hessian.differences.values
    np.testing.assert_allclose(ratio, np.exp(-2.0 * change[ROW_SCALE]), rtol=2e-3)


def test_differences_are_those_of_the_rows():
    """The prior of the effects depends on their scale, the likelihood given them does not."""
    inputs, preconditioner = fit(20)
    hessian, steps = preconditioner.reference_hessian, np.full(2, 0.05)
    columns = ROW_SCALE, SCALE
    found = add_differences(inputs, preconditioner, hessian, columns, steps).differences
    of_row_scale, of_scale = np.abs(found.values).reshape(2, -1).max(1)
    assert of_scale < 1e-3 * of_row_scale


def test_products_of_the_prior_have_no_rounding_of_rows():
    inputs, preconditioner = fit(20)
    layout = preconditioner.reference_hessian.layout
    center = preconditioner.center.astype(np.float32)
    probes = layout.make_probes(with_shared=False)
    _, products = inputs.batched_gradients.prior_products(center, probes)
    scale = np.exp(layout.take_shared(center)[SCALE])
    blocks = layout.make_blocks(products)
    np.testing.assert_allclose(blocks, np.full((1, 1, GROUPS), scale**-2.0), rtol=2e-6)


@pytest.fixture(scope="module")
def counts():
    return fit_counts(40)


def test_effects_of_counts_have_third_derivatives(counts):
    """They are those of the density: differences of the Hessian's blocks agree."""
    inputs, preconditioner = counts
    hessian, center = preconditioner.reference_hessian, preconditioner.center
    layout, step = hessian.layout, 0.02
    assert hessian.third_derivatives is not None
    rng = np.random.default_rng(1)
    effects = rng.standard_normal((2, NUM_GROUPS))
    direction = layout.merge(effects, np.zeros(layout.num_shared))
    points = np.stack([center + step * direction, center - step * direction])
    _, products = inputs.batched_gradients.large_pass_products(points, direction[None])
    expected, _ = layout.split((products[0, 0] - products[1, 0]) / (4.0 * step))
    terms = hessian.third_derivatives.expand(effects)
    np.testing.assert_allclose(terms, expected, atol=0.01 * np.abs(expected).max())


def test_third_derivatives_of_effects_remove_most_of_their_noise(counts):
    inputs, preconditioner = counts
    hessian = preconditioner.reference_hessian
    q = np.random.default_rng(1).standard_normal((4, inputs.potential.dim))

    def measure(hessian):
        return measure_noise(inputs, preconditioner, hessian, q)[0]

    assert measure(hessian) < 0.3 * measure(replace(hessian, third_derivatives=None))


def test_third_derivatives_follow_the_center(counts):
    """Those by the intercept are sums of the rates of the counts, as the curvature is."""
    inputs, preconditioner = counts
    matrix = preconditioner.reference_hessian
    moved = recenter_block_arrow(inputs, preconditioner, np.array([1.0, 0.0]), np.eye(2))
    after = moved.reference_hessian
    assert np.abs(moved.center - preconditioner.center).max() > 1e-3
    ratio = after.third_derivatives.values[0, 0] / matrix.third_derivatives.values[0, 0]
    np.testing.assert_allclose(ratio, after.blocks[0, 0] / matrix.blocks[0, 0], rtol=1e-4)
    assert np.abs(ratio - 1.0).max() > 1e-3


def test_displacements_end_where_the_curvature_of_the_rows_is_zero(counts):
    """For counts the curvature by an effect decreases towards smaller rates."""
    _, preconditioner = counts
    hessian = preconditioner.reference_hessian
    layout = hessian.layout
    lower, upper = hessian.third_derivatives.bounds
    # The derivatives by the intercept are all sums of the rates, so that their ratio is one.
    np.testing.assert_allclose(lower[0], -1.0, rtol=1e-5)
    assert (upper[0] > 1e20).all()
    # The derivatives by the slope are sums with powers of a covariate of both signs.
    slopes = hessian.third_derivatives.values[2, 1]
    for sign, bound in ((1.0, -lower[1]), (-1.0, upper[1])):
        expected = np.where(sign * slopes > 0.0, hessian.blocks[1, 1] / np.abs(slopes), np.inf)
        np.testing.assert_allclose(bound, np.minimum(expected, 1e30))
    beyond = layout.merge(np.full((2, NUM_GROUPS), -50.0), np.full(layout.num_shared, -50.0))
    effects, shared = layout.split(hessian.limit_displacement(beyond))
    np.testing.assert_array_equal(effects, np.maximum(lower, -50.0))
    np.testing.assert_array_equal(shared, -50.0)


def test_there_is_no_bound_where_the_curvature_is_not_positive():
    values = np.array([[[2.0, -2.0, 2.0, 0.0]]])
    third_derivatives = EffectThirdDerivatives(values).with_bounds(np.array([[[3, 3, -3, 3]]]))
    lower, upper = third_derivatives.bounds[:, 0]
    np.testing.assert_allclose(lower, [-1.5, -1e30, -1e30, -1e30])
    np.testing.assert_allclose(upper, [1e30, 1.5, 1e30, 1e30])


def test_noise_in_the_tails_is_limited(counts):
    """Without bounds the expansion of the gradient turns back, and its noise grows."""
    inputs, preconditioner = counts
    hessian = preconditioner.reference_hessian
    unbounded = replace(hessian.third_derivatives, bounds=None)
    q = np.zeros((4, inputs.potential.dim))
    intercepts, _ = hessian.layout.split(np.arange(inputs.potential.dim))
    q[:, intercepts[0]] = -20.0

    def measure(third_derivatives):
        changed = replace(hessian, third_derivatives=third_derivatives)
        return measure_noise(inputs, preconditioner, changed, q)[0]

    assert measure(hessian.third_derivatives) < 0.1 * measure(unbounded)


def test_measured_noise_in_the_tails_is_that_of_estimates(counts):
    inputs, fit = counts
    q = np.random.default_rng(1).standard_normal(inputs.potential.dim)
    intercepts, _ = fit.reference_hessian.layout.split(np.arange(inputs.potential.dim))
    q[intercepts[0]] -= 8.0
    estimator, rng = SecondOrderControlVariate(), np.random.default_rng(2)
    batches = np.stack([rng.choice(NUM_ROWS, 40, replace=False) for _ in range(30)])
    preconditioner = fit.cast(jnp.float32)

    @jax.jit
    def estimate(rows):
        indices = {"rows": rows}
        arguments = inputs.potential, inputs.arguments, preconditioner, indices
        return make_gradient_fn(estimator, *arguments)(jnp.asarray(q, jnp.float32))

    found = np.stack([estimate(rows) for rows in jnp.asarray(batches)])

    def evaluate(rows):
        center, total = fit.center, 0.0
        for x, weight in estimator.noise_eval_points(q, fit):
            position = jnp.asarray(center + fit.expansion_to_displacement(x), jnp.float32)
            gradient = inputs.potential.gradient(position, {"rows": rows}, inputs.arguments)
            total = total + weight * np.asarray(gradient, float)
        return fit.pull_back_expansion(q, total)

    expected = np.stack([evaluate(rows) for rows in jnp.asarray(batches)])
    deviations, expected = (x - x.mean(0) for x in (found, expected))
    error = np.linalg.norm(deviations - expected, axis=1)
    # Second derivatives are measured by finite differences.
    assert (error < 0.1 * np.linalg.norm(expected, axis=1)).all()


def test_pilot_chains_have_the_estimates_of_the_chains(counts):
    inputs, fit = counts
    potential, arguments, num_chains = inputs.potential, inputs.arguments, 2
    rng = np.random.default_rng(1)
    preconditioner = fit.cast(jnp.float32)
    q = 4.0 * rng.standard_normal((num_chains, potential.dim)).astype(np.float32)
    normals = rng.standard_normal((PILOT_THINNING, 1, num_chains, potential.dim))
    rows = jnp.asarray(rng.integers(0, NUM_ROWS, (PILOT_THINNING, 40)), jnp.int32)
    start = UnderdampedState(jnp.asarray(q), jnp.zeros_like(q))
    step_size = jnp.float32(0.02)
    normals = jnp.asarray(normals, jnp.float32)
    inputs_of_steps = {"rows": rows}, normals, None
    _, (found,) = _run_pilot_steps(
        potential, arguments, preconditioner, start, step_size, jnp.float32(1.0), inputs_of_steps
    )
    step, state = PILOT_DYNAMICS.make_step("symmetric"), start
    for i in range(PILOT_THINNING):
        gradient = make_gradient_fn(
            SecondOrderControlVariate(), potential, arguments, preconditioner, {"rows": rows[i]}
        )
        state = step(state, step_size, jax.vmap(gradient), normals[i])
    np.testing.assert_allclose(found, state.position, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("num_included", "distance"), [(0, 1.0), (14, 1.0), (14, 5.0)])
def test_estimates_with_third_derivatives_are_unbiased(counts, num_included, distance):
    """The mean over all minibatches of a partition is the gradient on all rows."""
    inputs, fit = counts
    included = (("rows", tuple(range(0, 7 * num_included, 7))),) if num_included else ()
    step_potential = inputs.potential.with_included_rows(included)
    (plate,) = step_potential.plates
    others = np.random.default_rng(2).permutation(NUM_ROWS - num_included).astype(np.int32)
    batches = plate.add_included_rows(others.reshape(-1, 40 - num_included))
    q = distance * np.random.default_rng(1).standard_normal(inputs.potential.dim)
    q = jnp.asarray(q, jnp.float32)
    preconditioner, potential = fit.cast(jnp.float32), inputs.potential

    @jax.jit
    def estimate(rows):
        return make_gradient_fn(
            SecondOrderControlVariate(),
            step_potential,
            inputs.arguments,
            preconditioner,
            {"rows": rows},
        )(q)

    estimates = np.stack([estimate(rows) for rows in jnp.asarray(batches)])
    full = potential.full_gradient(preconditioner.to_position(q), inputs.arguments)
    expected = np.asarray(preconditioner.pull_back(q, full))
    error = np.abs(estimates.mean(0) - expected)
    assert error.max() < 2e-3 * np.abs(expected).max()


def test_effects_with_little_noise_have_no_third_derivatives():
    _, preconditioner = fit_counts(NUM_ROWS // 2)
    assert preconditioner.reference_hessian.third_derivatives is None


def test_third_derivatives_of_rows_on_the_host_are_the_same(counts):
    _, on_host = fit_counts(40, HostArray)
    expected = counts[1].reference_hessian.third_derivatives.values
    found = on_host.reference_hessian.third_derivatives.values
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())
