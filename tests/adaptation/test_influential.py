"""Influential observations are detected, and every minibatch includes them without bias."""

import math
import re
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation import adapt
from numpyro_sgmcmc.adaptation.batch_size import predict_draws
from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.budget import WarmupBudget
from numpyro_sgmcmc.adaptation.hierarchical_fit import fit_hierarchy_from_each
from numpyro_sgmcmc.adaptation.influential import (
    choose_num_included,
    choose_num_influential,
    find_influential_rows,
    find_influential_rows_of_groups,
)
from numpyro_sgmcmc.adaptation.step_size import choose_num_steps
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import SUBSAMPLINGS, Plate, init_stream, sample_minibatches
from numpyro_sgmcmc.errors import StepSizeWarning, SubsampleSizeWarning
from numpyro_sgmcmc.model.block_arrow import find_block_arrow_layout
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.adaptation.counts import NUM_ROWS, fit_counts, make_model
from tests.adaptation.counts import make_data as make_counts
from tests.adaptation.inputs import make_inputs
from tests.contract.kernels import quietly

NUM_RARE, BATCH = 5, 100


def model(z, x, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a * z[i] + b * x[i], scale), obs=y[i])


def two_outcomes(z, x, y, batch_size=None):
    """The plate is not the last batch dimension, and a scale handler is at work."""
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    with numpyro.plate("rows", len(y), subsample_size=batch_size, dim=-2) as i:
        mean = jnp.stack([a * z[i], b * x[i]], 1)
        with numpyro.handlers.scale(scale=0.5), numpyro.plate("outcomes", 2):
            numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.stack([y[i], -y[i]], 1))
        numpyro.factor("penalty", -0.1 * (a - z[i][:, None]) ** 2)


each_model = pytest.mark.parametrize("model_fn", [model, two_outcomes])


def make_data(num_rows, num_rare, value=1.0):
    """A covariate that has a value in a few rows and is zero in all others."""
    rng = np.random.default_rng(6)
    z, x = rng.standard_normal(num_rows), np.zeros(num_rows)
    x[rng.choice(num_rows, num_rare, False)] = value
    y = 0.5 * z + 2.0 * x + rng.standard_normal(num_rows)
    return tuple(jnp.asarray(v, jnp.float32) for v in (z, x, y))


def make_potential(model_fn, num_rows, batch_size, num_rare=2):
    arguments = Arguments(make_data(num_rows, num_rare), {"batch_size": batch_size})
    return make_model_potential(model_fn, arguments, numpyro.infer.init_to_uniform), arguments


# --- Detection ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_large", "scale", "expected"),
    [
        (0, 1.0, 0),
        (5, 1.0, 5),
        (5, 1e-12, 0),  # noise too small to shorten the step
        (60, 1.0, BATCH // 2),  # at most half of a minibatch
        (400, 1.0, 0),  # half a minibatch of them would not halve the noise
    ],
)
def test_choose_num_influential_large_remainders_are_counted(num_large, scale, expected):
    variances = np.full(50_000, 1e-5)
    variances[7 : 7 + num_large] = 0.3
    assert choose_num_influential(scale * variances, BATCH) == expected


def test_choose_num_influential_homogeneous_remainders_is_zero():
    variances = 1e-5 * np.random.default_rng(0).chisquare(1, 50_000)
    assert choose_num_influential(variances, BATCH) == 0


def test_find_influential_rows_rare_covariate_contains_its_rows():
    potential, arguments = make_potential(model, 10_000, BATCH, NUM_RARE)
    fit = MeanField(np.array([0.5, 2.0, 0.0]), np.array([0.01, 0.45, 0.01]))
    ((name, rows),) = find_influential_rows(potential, arguments, fit, np.random.default_rng(0))
    assert name == "rows"
    assert set(np.flatnonzero(np.asarray(arguments.args[1]))) <= set(rows)
    assert len(rows) <= NUM_RARE + 2


def test_find_influential_rows_of_groups_of_high_dimension():
    num_groups, num_rows = 21_000, 42_000
    group = jnp.arange(num_rows) % num_groups

    def grouped_model(z, x, y, batch_size=None):
        b = numpyro.sample("b", dist.Normal(0, 5))
        with numpyro.plate("groups", num_groups):
            effect = numpyro.sample("effect", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            eta = effect[group[i]] + b * x[i]
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=(y[i] > 0).astype(int))

    inputs = make_inputs(grouped_model, make_data(num_rows, NUM_RARE, 20.0), 4_000)
    potential, arguments = inputs.potential, inputs.arguments
    layout = find_block_arrow_layout(potential, arguments)
    hierarchy = fit_hierarchy_from_each(inputs, layout, [np.zeros(1 + num_groups)]).coordinates
    rng = np.random.default_rng(0)
    found = find_influential_rows_of_groups(potential, arguments, hierarchy, rng, 0.3)
    ((_, rows),) = found.included
    assert set(np.flatnonzero(np.asarray(arguments.args[1]))) <= set(rows)
    assert len(rows) < 400  # a tenth of the minibatch
    assert found.max_step_size == math.inf  # no third derivatives
    # As many weights, which every row depends on.
    fit = MeanField(hierarchy.center, hierarchy.sds)
    assert find_influential_rows(potential, arguments, fit, rng) == ()


@pytest.mark.parametrize(
    ("step_size", "expected"),
    [
        (0.3, 3),  # sampled observations have weight 97 / 17: 0.3 * 97 / 17 * 0.5 < 1
        (0.03, 1),  # 0.03 * 99 / 19 * 6 < 1
        (0.01, 0),  # 0.01 * 100 / 20 * 9 < 1
        (1.0, 3),  # no number allows it, and this one the longest step
    ],
)
def test_choose_num_included_is_the_smallest_that_allows_the_step_size(step_size, expected):
    gradients = np.full(100, 0.5)
    gradients[:3] = 9.0, 6.0, 6.0
    num_included, max_step_size = choose_num_included(gradients, 20, step_size)
    assert num_included == expected
    weight = (100 - expected) / (20 - expected)
    assert max_step_size == pytest.approx(1 / (weight * gradients[expected]))


def test_choose_num_included_is_at_most_half_of_a_minibatch():
    assert choose_num_included(np.geomspace(1e9, 1e-9, 100), 20, 0.3)[0] == 10
    # With equal gradients each included observation would shorten the step.
    assert choose_num_included(np.full(100, 1.0), 20, 0.3)[0] == 0


def test_choose_num_included_counts_those_that_are_included_already():
    gradients = np.concatenate([np.full(5, 0.1), [9.0], np.full(94, 0.5)])
    num_included, max_step_size = choose_num_included(gradients, 20, 0.3, min_included=5)
    assert num_included == 6
    assert max_step_size == pytest.approx(1 / (94 / 14 * 0.5))


def test_choose_num_included_infinite_gradients_do_not_limit_the_step_size():
    gradients = np.concatenate([np.full(4, np.inf), np.full(96, 1e-3)])
    assert choose_num_included(gradients, 20, 0.3)[0] == 4
    gradients[:30] = np.inf  # more than half a minibatch
    num_included, max_step_size = choose_num_included(gradients, 20, 0.3)
    assert num_included == 10
    assert max_step_size == pytest.approx(1 / (90 / 10 * 1e-3))
    assert choose_num_included(np.full(100, np.inf), 20, 0.3)[1] > 1e9


def test_choose_num_included_is_no_larger_for_a_tenth_of_the_step_size():
    gradients = np.concatenate([[9.0, 1.02, 1.01], np.full(97, 1.0)])
    assert choose_num_included(gradients, 20, 0.3)[0] == 1
    gradients[1:3] = 1.5
    assert choose_num_included(gradients, 20, 0.3)[0] == 3


@pytest.fixture(scope="module")
def counts():
    return fit_counts(40)


def compute_tail_gradients(hierarchy):
    """The remainders of the counts' gradients in the tails of the effects, in closed form."""
    group, x, _ = make_counts()
    effects, _ = hierarchy.factor.layout.split(hierarchy.center)
    design = np.stack([np.ones_like(x), x])  # of the two effects
    rates = np.exp((design * effects[:, group]).sum(0))
    # Derivatives of the linear predictor by effects in units of their SDs.
    slopes = np.einsum("abr,ar->br", hierarchy.factor.effect_factors[..., group], design)
    half = 0.5**0.5
    directions = np.array([[1, 0], [0, 1], [half, half], [half, -half]])
    directions = np.concatenate([directions, -directions])
    # Where the density is that of a normal at 3 SDs, or at 3 SDs.
    cubes = np.stack([sum_by_group(rates * (d @ slopes) ** 3, group) for d in directions])
    distances = np.full_like(cubes, 3.0)
    for index in zip(*np.nonzero(cubes > 0), strict=True):
        roots = np.roots([cubes[index] / 6.0, 0.5, 0.0, -4.5])
        distances[index] = roots[(np.abs(roots.imag) < 1e-9) & (roots.real > 0)].real.min()
    # Gradients are expanded no farther than where the rows' curvature by an effect is zero.
    units = np.einsum("abg,nb->nag", hierarchy.factor.effect_factors, directions)
    ends = units * distances[:, None]
    curvatures = np.stack([sum_by_group(rates * d**2, group) for d in design])
    third = np.stack([sum_by_group(rates * d**3, group) for d in design])
    lower = np.where(third > 0, -curvatures / np.abs(third), -np.inf)
    upper = np.where(third < 0, curvatures / np.abs(third), np.inf)
    t, limited = (
        np.einsum("nar,ar->nr", e[..., group], design) for e in (ends, ends.clip(lower, upper))
    )
    assert not np.allclose(t, limited)
    remainders = rates * (np.exp(t) - 1 - limited - limited**2 / 2)
    return np.abs(remainders).max(0) * np.sqrt(np.square(slopes).sum(0))


def sum_by_group(values, group):
    return np.bincount(group, values)


@pytest.mark.parametrize("step_size", [0.3, 0.03])
def test_find_influential_rows_of_groups_are_those_with_large_gradients(counts, step_size):
    inputs, hierarchy = counts
    gradients = compute_tail_gradients(hierarchy)
    rng = np.random.default_rng(0)
    found = find_influential_rows_of_groups(
        inputs.potential, inputs.arguments, hierarchy, rng, step_size
    )
    num_included, _ = choose_num_included(-np.sort(-gradients), 40, step_size)
    assert 0 < num_included <= 20
    ((_, rows),) = found.included
    # None is included for its variance.
    assert set(np.argsort(-gradients)[:num_included]) == set(rows)
    # The largest of the others has the weight of a sampled observation.
    weight = (NUM_ROWS - len(rows)) / (40 - len(rows))
    expected = 1 / (weight * np.delete(gradients, rows).max())
    assert found.max_step_size == pytest.approx(expected, rel=1e-3)


def test_warm_up_of_groups_includes_observations_and_limits_the_step_size(counts):
    inputs, _ = counts
    position = np.zeros(inputs.potential.dim)
    with pytest.warns(SubsampleSizeWarning, match="recommended size"):
        adaptation = adapt(inputs.potential, inputs.arguments, inputs.settings, [position])
    ((_, rows),) = adaptation.included_rows
    assert 0 < len(rows) <= 20
    limits = adaptation.trace.step_size_limits
    assert "observations" in limits.binding
    assert limits.limits["observations"] < limits.limits["dynamics"]
    step_size = limits.limits["observations"]
    # Larger minibatches give sampled observations less weight, and allow longer steps.
    choice, mean_bias = adaptation.trace.choice, adaptation.trace.predicted_mean_bias
    plates = inputs.potential.with_included_rows(adaptation.included_rows).plates
    present, larger = predict_draws(inputs.settings, plates, choice, limits, mean_bias, (1.0, 2.0))
    assert present.num_steps == adaptation.num_steps
    num_random = [40 - len(rows), 80 - len(rows)]
    expected = choose_num_steps(
        adaptation.relaxation_time, step_size * num_random[1] / num_random[0]
    )
    assert larger.num_steps == expected < present.num_steps


def test_user_step_size_that_moves_effects_out_of_the_posterior_is_reported():
    inputs, _ = fit_counts(40)
    inputs = replace(inputs, settings=replace(inputs.settings, step_size=0.2))
    position = np.zeros(inputs.potential.dim)
    with pytest.warns(StepSizeWarning, match="effects far outside") as caught:
        adapt(inputs.potential, inputs.arguments, inputs.settings, [position])
    (message,) = (str(w.message) for w in caught if w.category is StepSizeWarning)
    assert 0.0 < float(re.search(r"use step_size=(\S+),", message)[1]) < 0.1


def test_likelihood_with_a_derivative_in_reverse_mode_only_has_the_same_observations(counts):
    @jax.custom_vjp
    def exp(x):
        return jnp.exp(x)

    exp.defvjp(lambda x: (jnp.exp(x),) * 2, lambda y, gradient: (gradient * y,))
    found = [
        find_influential_rows_of_groups(
            inputs.potential, inputs.arguments, hierarchy, np.random.default_rng(0), 0.3
        )
        for inputs, hierarchy in (counts, fit_counts(40, model=make_model(exp)))
    ]
    assert found[0].included == found[1].included
    assert found[0].max_step_size == pytest.approx(found[1].max_step_size, rel=1e-3)


# --- Minibatches --------------------------------------------------------------------------------

PLATE = Plate("rows", 11, 5, included_rows=(3, 7))
OTHERS = [0, 1, 2, 4, 5, 6, 8, 9, 10]


@pytest.mark.parametrize("xp", [np, jnp])
def test_add_included_rows_other_rows_keep_their_order(xp):
    found = np.asarray(PLATE.add_included_rows(xp.arange(9, dtype=xp.int32).reshape(3, 3)))
    assert found.shape == (3, 5)
    assert (found[:, :2] == [3, 7]).all()
    assert list(found[:, 2:].ravel()) == OTHERS
    assert PLATE.batches_per_epoch == 3
    # The total weight of the likelihood is that of a minibatch without included rows.
    assert np.isclose(PLATE.row_weights.sum(), 5.0)


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS.values(), ids=SUBSAMPLINGS)
def test_sample_minibatches_included_rows_are_in_each_and_others_visited(subsampling):
    key = jax.random.key(0)
    _, indices = sample_minibatches(subsampling, PLATE, init_stream(PLATE, key), key, 60)
    indices = np.asarray(indices)
    assert (indices[:, :2] == [3, 7]).all()
    counts = np.bincount(indices[:, 2:].ravel(), minlength=11)
    assert not counts[[3, 7]].any()
    assert counts[OTHERS].min() > 5


@each_model
def test_step_potential_included_rows_is_unbiased(model_fn):
    potential, arguments = make_potential(model_fn, 11, 5)
    included = (("rows", (3, 7)),)
    step_potential = potential.with_included_rows(included)
    assert step_potential is potential.with_included_rows(included)
    q = jnp.linspace(-0.4, 0.7, potential.dim)
    (plate,) = step_potential.plates
    minibatches = plate.add_included_rows(np.arange(9, dtype=np.int32).reshape(3, 3))
    estimates = [
        step_potential.value_and_grad(q, {"rows": rows}, arguments) for rows in minibatches
    ]
    expected = potential.full_value(q, arguments), potential.full_gradient(q, arguments)
    for estimate, exact in zip(zip(*estimates, strict=True), expected, strict=True):
        np.testing.assert_allclose(np.mean(estimate, 0), exact, rtol=1e-5, atol=1e-5)
    unweighted = potential.gradient(q, {"rows": minibatches[0]}, arguments)
    assert not np.allclose(unweighted, estimates[0][1], rtol=1e-3)


@each_model
def test_pointwise_potentials_sum_is_likelihood_of_minibatch(model_fn):
    potential, arguments = make_potential(model_fn, 11, 5)
    q = jnp.linspace(-0.4, 0.7, potential.dim)
    a, b = ({"rows": jnp.array(rows)} for rows in ([0, 3, 7, 8, 2], [1, 4, 5, 6, 10]))
    difference = potential.value(q, a, arguments) - potential.value(q, b, arguments)
    shares = [potential.pointwise_potentials(q, indices, arguments) for indices in (a, b)]
    assert shares[0].shape == (5,)
    np.testing.assert_allclose((shares[0].sum() - shares[1].sum()) * 11 / 5, difference, rtol=1e-4)


def test_evaluate_on_subset_included_rows_are_a_stratum():
    potential, arguments = make_potential(model, 3_000, 50, num_rare=3)
    included = (("rows", tuple(map(int, np.flatnonzero(np.asarray(arguments.args[1]))))),)
    q = np.array([[0.3, 1.0, 0.1], [0.5, -2.0, 0.0]])
    exact = np.stack([potential.full_gradient(jnp.asarray(x, jnp.float32), arguments) for x in q])

    def gradients(num_rows, included_rows=()):
        budget = WarmupBudget(num_representative_rows=num_rows)
        batched = BatchedGradients(potential, arguments, budget, included_rows)
        return batched.evaluate_on_subset(q)[1]

    # The gradient with respect to b comes from these rows alone, and the prior.
    np.testing.assert_allclose(gradients(600, included)[:, 1], exact[:, 1], rtol=1e-4)
    assert not np.allclose(gradients(600)[:, 1], exact[:, 1], rtol=0.1)
    np.testing.assert_allclose(gradients(10_000, included), exact, rtol=1e-4, atol=1e-2)


# --- Runs ---------------------------------------------------------------------------------------


def run(num_rows, num_rare, value, **options):
    mcmc = quietly(
        SGHMCSplit(model, **options),
        num_warmup=100,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
    )
    data = make_data(num_rows, num_rare, value)
    mcmc.run(jax.random.key(0), *data, batch_size=BATCH)
    return mcmc, data


def assert_coefficients_match_least_squares(mcmc, data):
    """The priors are wide and there are many rows, so that the scale is about one."""
    z, x, y = (np.asarray(v, np.float64) for v in data)
    design = np.stack([z, x], 1)
    precision = design.T @ design + np.eye(2) / 25
    mean = np.linalg.solve(precision, design.T @ y)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    for name, m, s in zip("ab", mean, sd, strict=True):
        draws = np.asarray(mcmc.get_samples()[name])
        assert abs(draws.mean() - m) < 0.1 * s
        assert abs(draws.std() / s - 1) < 0.08


@pytest.mark.slow
def test_run_covariate_of_five_rows_is_right_with_few_steps_per_draw():
    mcmc, data = run(50_000, NUM_RARE, 1.0)
    ((name, rows),) = mcmc.sampler.adaptation.included_rows
    assert name == "rows"
    assert set(np.flatnonzero(np.asarray(data[1]))) <= set(rows)
    assert len(rows) <= 10
    assert int(mcmc.last_state.num_steps.max()) <= 50
    assert_coefficients_match_least_squares(mcmc, data)
    assert bias_report(mcmc).is_ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"gradient_estimator": "minibatch"}, {"noise_compensation": True}]
)
def test_run_estimator_without_control_variate_includes_no_rows(options):
    """Their noise is that of gradients, or of single rows, and not of the remainder."""
    mcmc = MCMC(SGHMCSplit(model, **options), num_warmup=1, num_samples=1, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mcmc.run(jax.random.key(0), *make_data(5_000, NUM_RARE), batch_size=BATCH)
    assert mcmc.sampler.adaptation.included_rows == ()


@pytest.mark.slow
def test_run_six_rows_of_high_leverage_is_right():
    mcmc, data = run(20_000, 6, 100.0)
    assert len(mcmc.sampler.adaptation.included_rows[0][1]) <= 12
    assert int(mcmc.last_state.num_steps.max()) <= 50
    assert_coefficients_match_least_squares(mcmc, data)


@pytest.mark.slow
def test_run_homogeneous_rows_includes_none():
    rng = np.random.default_rng(0)
    data = (jnp.asarray(v, jnp.float32) for v in rng.standard_normal((3, 20_000)))
    mcmc = MCMC(SGHMCSplit(model), num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), *data, batch_size=BATCH)
    assert mcmc.sampler.adaptation.included_rows == ()
    potential = mcmc.sampler.potential
    assert potential.with_included_rows(()) is potential
