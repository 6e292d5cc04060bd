"""Scales of effects with a wide posterior: exponents, effects given the scales, and posteriors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation import gradient_noise
from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions
from numpyro_sgmcmc.adaptation.conditional_effects import evaluate_prior
from numpyro_sgmcmc.adaptation.hierarchical_fit import fit_hierarchy_from_each
from numpyro_sgmcmc.adaptation.prior_scales import PriorSensitivity
from numpyro_sgmcmc.diagnostics import bias_corrected_samples
from numpyro_sgmcmc.model.block_arrow import find_block_arrow_layout
from numpyro_sgmcmc.model.gradient_estimators import (
    ControlVariate,
    MinibatchGradient,
    make_gradient_fn,
)
from tests.adaptation.inputs import make_inputs

GROUPS, ROWS_PER_GROUP, BATCH_SIZE = 200, 10, 200


def make_prior(kind, b, c, x):
    """Return the prior of effects of groups with covariates x, and of shared parameters b and c."""
    if kind == "SDs":
        return dist.Normal(b, jnp.exp(c))
    if kind == "variances":
        return dist.Normal(b, jnp.exp(0.5 * c))
    if kind == "precisions":
        return dist.Normal(b, jnp.exp(-c))
    if kind == "SDs of each group":
        return dist.Normal(b * x, x * jnp.exp(c))
    if kind == "trend of groups":
        return dist.Normal(0.0, jnp.exp(b * x + c))
    if kind == "heavy tails":
        return dist.StudentT(4.0, b, jnp.exp(c))
    assert kind == "correlated"
    factor = jnp.exp(c) * jnp.array([[1.0, 0.0], [jnp.tanh(b), 1.0]])
    return dist.MultivariateNormal(jnp.zeros(2), scale_tril=factor)


@pytest.mark.parametrize(
    ("kind", "exponent"),
    [
        ("SDs", 1.0),
        ("variances", 0.5),
        ("precisions", -1.0),
        ("SDs of each group", 1.0),
        ("trend of groups", 1.0),
        ("heavy tails", None),
        ("correlated", 1.0),
    ],
)
def test_exponents_are_those_of_normal_priors(kind, exponent):
    rng = np.random.default_rng(0)
    x, group = rng.uniform(0.5, 2.0, GROUPS), np.arange(GROUPS * 2) % GROUPS

    def model(y, batch_size=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        c = numpyro.sample("c", dist.Normal(-1, 1))
        with numpyro.plate("groups", GROUPS):
            effect = numpyro.sample("effect", make_prior(kind, b, c, x))
        effect = effect if effect.ndim == 1 else effect.sum(-1)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])

    y = jnp.asarray(rng.standard_normal(group.size), "f")
    inputs = make_inputs(model, (y,), 100)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    position = 0.5 * rng.standard_normal(layout.dim)
    scales = PriorSensitivity.measure(
        inputs, position, np.full(2, 0.5), *evaluate_prior(inputs, layout, position)
    )
    if exponent is None:  # the precision is that at the effects, which is negative for some
        assert scales is None
        return
    expected = np.zeros_like(scales.exponents)
    expected[1] = exponent
    if kind == "trend of groups":
        expected[0] = x
    np.testing.assert_allclose(scales.exponents, expected, atol=1e-3)
    assert scales.changes_correlation.tolist() == [kind == "correlated", False]
    # A location b, or b x.
    location = np.zeros_like(expected)
    if kind in ("SDs", "variances", "precisions"):
        location[0] = 1.0
    if kind == "SDs of each group":
        location[0] = x
    np.testing.assert_allclose(scales.compute_location_slopes(), location, atol=2e-3)


def make_model(is_centred):
    def model(group, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("groups", GROUPS):
            if is_centred:
                effect = numpyro.sample("effect", dist.Normal(mean, scale))
            else:
                effect = mean + scale * numpyro.sample("raw", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])

    return model


def make_data():
    """Effects with a scale of a fifth of the standard error of a group's mean."""
    rng = np.random.default_rng(5)
    group = rng.permutation(np.arange(GROUPS * ROWS_PER_GROUP) % GROUPS)
    effects = 0.5 + 0.06 * rng.standard_normal(GROUPS)
    return group, effects[group] + rng.standard_normal(group.size)


def compute_quantiles(group, y, probabilities):
    """Return quantiles of the posterior of the scale, by integration over effects and mean."""
    means = np.bincount(group, y, GROUPS) / ROWS_PER_GROUP
    scales = np.linspace(0, 0.6, 6_001)[1:]
    variances = scales**2 + 1.0 / ROWS_PER_GROUP
    precision = GROUPS / variances + 1.0
    log_density = -0.5 * (
        GROUPS * np.log(variances)
        + np.log(precision)
        + np.square(means).sum() / variances
        - (means.sum() / variances) ** 2 / precision
        + scales**2
    )
    mass = np.exp(log_density - log_density.max()).cumsum()
    return np.interp(probabilities, mass / mass[-1], scales)


@pytest.mark.parametrize("is_centred", [True, False])
def test_effects_given_an_uncertain_scale_have_their_exact_means_and_sds(is_centred):
    group, y = make_data()
    inputs = make_inputs(make_model(is_centred), (group, jnp.asarray(y, "f")), BATCH_SIZE)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    start = [np.zeros(inputs.potential.dim)]
    preconditioner = fit_hierarchy_from_each(inputs, layout, start).coordinates
    assert preconditioner.factor.prior_scaling is not None
    means = np.bincount(group, y, GROUPS) / ROWS_PER_GROUP
    effects = np.zeros((1, GROUPS))
    for mean, log_scale in [(0.5, -5.0), (0.45, -3.0), (0.55, -2.0), (0.5, -1.0)]:
        displacement = np.array([mean, log_scale]) - layout.take_shared(preconditioner.center)
        shared = np.linalg.solve(preconditioner.factor.shared_factor, displacement)
        at_means, at_sds = (
            layout.split(preconditioner.to_position(layout.merge(effects + x, shared)))
            for x in (0.0, 1.0)
        )
        found, (found_mean, found_scale) = at_means
        sds = np.abs(at_sds[0] - found)
        np.testing.assert_allclose([found_mean, found_scale], [mean, log_scale])
        if not is_centred:
            found, sds = mean + np.exp(log_scale) * found, np.exp(log_scale) * sds
        precision = ROWS_PER_GROUP + np.exp(-2.0 * log_scale)
        expected = (ROWS_PER_GROUP * means + np.exp(-2.0 * log_scale) * mean) / precision
        exact_sd = 1.0 / np.sqrt(precision)
        np.testing.assert_allclose(sds[0], exact_sd, rtol=1e-3)
        np.testing.assert_allclose(found[0], expected, atol=5e-3 * exact_sd)


def make_slopes(correlation):
    """Return a model of intercepts and slopes with a known correlation, and a moment function."""
    intercept_sd = 0.7
    matrix = np.array([[1.0, 0.0], [correlation, np.sqrt(1.0 - correlation**2)]])

    def model(group, x, y, batch_size=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        scale = numpyro.sample("zeta", dist.Normal(-2, 1))
        with numpyro.plate("groups", GROUPS):
            factor = jnp.stack([intercept_sd, jnp.exp(scale)])[:, None] * matrix
            prior = dist.MultivariateNormal(jnp.stack([0.0, slope]), scale_tril=factor)
            effect = numpyro.sample("effect", prior)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            eta = effect[group[i], 0] + x[i] * effect[group[i], 1]
            numpyro.sample("y", dist.Normal(eta, 1), obs=y[i])

    def compute_moments(group, x, y, slope, log_scale):
        """Return the exact means ``(G, 2)`` and covariances ``(G, 2, 2)`` of the effects."""
        factor = np.diag([intercept_sd, np.exp(log_scale)]) @ matrix
        of_prior, design = np.linalg.inv(factor @ factor.T), np.stack([np.ones_like(x), x], 1)
        precisions, sums = np.zeros((GROUPS, 2, 2)), np.zeros((GROUPS, 2))
        np.add.at(precisions, group, design[:, :, None] * design[:, None])
        np.add.at(sums, group, design * y[:, None])
        covariances = np.linalg.inv(precisions + of_prior)
        forces = sums + of_prior @ np.array([0.0, slope])
        return np.einsum("gab,gb->ga", covariances, forces), covariances

    return model, compute_moments


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_effects_given_the_scale_of_slopes_are_exact(correlation):
    rng, num_rows = np.random.default_rng(7), GROUPS * ROWS_PER_GROUP
    model, compute_moments = make_slopes(correlation)
    group, x = rng.permutation(np.arange(num_rows) % GROUPS), 1.0 + rng.standard_normal(num_rows)
    y = 0.7 * rng.standard_normal(GROUPS)[group] + 0.3 * x + rng.standard_normal(num_rows)
    args = group, jnp.asarray(x, "f"), jnp.asarray(y, "f")
    inputs = make_inputs(model, args, BATCH_SIZE)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    preconditioner = fit_hierarchy_from_each(inputs, layout, [np.zeros(layout.dim)]).coordinates
    assert (preconditioner.factor.prior_scaling.couplings is not None) == (correlation != 0.0)
    center = layout.take_shared(preconditioner.center)
    for change in ([0.0, -3.0], [0.0, 1.0], [0.03, -2.0]):
        shared = np.linalg.solve(preconditioner.factor.shared_factor, change)

        def take_effects(coordinates, shared=shared):
            q = layout.merge(coordinates, shared)
            return layout.split(preconditioner.to_position(q))[0].T

        found = take_effects(np.zeros((2, GROUPS)))
        factors = np.stack(
            [take_effects(np.eye(2)[:, [j]] + 0.0 * found.T) - found for j in (0, 1)]
        )
        means, covariances = compute_moments(group, x, y, *(center + change))
        sds = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
        errors = np.abs(found - means) / sds
        units = sds[:, :, None] * sds[:, None]
        of_covariances = (np.einsum("cga,cgb->gab", factors, factors) - covariances) / units
        # The change with the mean is that of independent effects.
        assert errors.max() < (5e-3 if change[0] == 0.0 else 0.05)
        assert np.abs(of_covariances).max() < 0.01


@pytest.mark.parametrize("estimator", [MinibatchGradient(), ControlVariate()])
def test_measured_noise_is_that_of_the_steps(estimator):
    """The shared parameters have noise of the effects' gradients, whose means and SDs change."""
    group, y = make_data()
    inputs = make_inputs(make_model(True), (group, jnp.asarray(y, "f")), BATCH_SIZE)
    layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
    start = [np.zeros(inputs.potential.dim)]
    preconditioner = fit_hierarchy_from_each(inputs, layout, start).coordinates
    rng, shape = np.random.default_rng(1), (400, BATCH_SIZE)
    q, rows = rng.standard_normal(layout.dim), rng.integers(0, len(y), shape, dtype=np.int32)
    bulk = BulkPositions(inputs.batched_gradients, preconditioner, q[None])
    estimates = gradient_noise._evaluate_estimates(bulk, (estimator,), {"rows": rows})
    (measured,) = estimates[estimator]

    @jax.jit
    def estimate(batch):
        return make_gradient_fn(
            estimator,
            inputs.potential,
            inputs.arguments,
            preconditioner.cast(jnp.float32),
            {"rows": batch},
        )(jnp.asarray(q, "f"))

    of_steps = np.stack([estimate(batch) for batch in rows])
    sds = of_steps.std(0)
    errors = (measured - measured.mean(0)) - (of_steps - of_steps.mean(0))
    assert np.abs(errors).max() < 0.02 * sds.max()
    assert np.abs(layout.take_shared(errors / sds)).max() < 0.02


@pytest.mark.parametrize("is_centred", [True, False])
def test_posterior_of_a_scale_that_reaches_zero(is_centred):
    group, y = make_data()
    probabilities = np.array([0.05, 0.2, 0.5, 0.8, 0.95])
    quantiles = compute_quantiles(group, y, probabilities)
    mcmc = MCMC(
        SGHMCSplit(make_model(is_centred)),
        num_warmup=100,
        num_samples=500,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), jnp.asarray(group), jnp.asarray(y, "f"), batch_size=BATCH_SIZE)
    scale = np.asarray(mcmc.get_samples(group_by_chain=True)["scale"], float)
    corrected = bias_corrected_samples(mcmc)
    if is_centred:  # effects given small scales have these
        deviations = corrected["effect"] - corrected["mean"][:, None]
        squares = np.square(deviations / corrected["scale"][:, None]).mean(1)
        is_small = corrected["scale"] < np.quantile(corrected["scale"], 0.05)
        assert 0.8 < np.median(squares[is_small]) < 1.2
        assert squares[is_small].max() < 2.0
    for quantile, probability in zip(quantiles, probabilities, strict=True):
        is_below = (scale < quantile).astype(float)
        ess = effective_sample_size(is_below)
        assert ess > 100
        error = is_below.mean() - probability
        assert abs(error) < 4.0 * np.sqrt(probability * (1 - probability) / ess)
