"""Bias of a coordinate along which curvature and gradient noise change, predicted and simulated."""

from functools import partial

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer.reparam import LocScaleReparam

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation.bias_potential import (
    _MISSED_TAIL_FACTOR,
    BiasPotential,
    has_wide_coordinate,
    integrate_noise,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner

FRICTION, NUM_NARROW, CURVATURE = 1.5, 6, 8.0
GROUPS, ROWS = 10, 2_000


def narrow_curvature(x, trend):
    return CURVATURE * np.exp(trend * x)


def potential_gradient(x, y, trend):
    """Return the gradient by x, standard normal, and y, normal given x with its curvature."""
    curvature = narrow_curvature(x, trend)
    return x + trend / 2.0 * (curvature * y**2 - 1.0).sum(0), curvature * y


def simulate_mean(step_size, trend, noise, num_chains=2_000, num_steps=600):
    """Return the mean of x of chains by the symmetric splitting, and its standard error.

    :param noise: SD of the gradient noise of y over the curvature.
    """
    rng = np.random.default_rng(0)
    h, decay = step_size, np.exp(-FRICTION * step_size / 2.0)
    q = rng.standard_normal((1 + NUM_NARROW, num_chains))
    q[1:] /= np.sqrt(narrow_curvature(q[0], trend))
    p, kept = rng.standard_normal(q.shape), []
    for step in range(num_steps):
        q += h / 2.0 * p
        gradient = np.vstack(potential_gradient(q[0], q[1:], trend)).astype(float)
        gradient[1:] += noise * narrow_curvature(q[0], trend) * rng.standard_normal(q[1:].shape)
        p = decay * p - h * gradient + np.sqrt(2.0 * FRICTION * h) * rng.standard_normal(q.shape)
        p *= decay
        q += h / 2.0 * p
        if step >= num_steps // 3:
            kept.append(q[0].copy())
    means = np.mean(kept, 0)
    return means.mean(), means.std() / np.sqrt(num_chains)


@pytest.mark.parametrize(
    ("step_size", "trend", "noise"), [(0.2, 0.5, 0.0), (0.1, 0.5, 0.15), (0.1, -0.5, 0.15)]
)
def test_predicted_bias_agrees_with_a_simulation(step_size, trend, noise):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(1_000)
    y = rng.standard_normal((NUM_NARROW, 1_000)) / np.sqrt(narrow_curvature(x, trend))
    squares = np.square(np.vstack(potential_gradient(x, y, trend))).sum(0)
    variances = NUM_NARROW * np.square(noise * narrow_curvature(x, trend))
    x = ((x - x.mean()) / x.std())[:, None]
    potential = BiasPotential(
        x,
        step_size**2 / 8.0 * squares[:, None],
        integrate_noise(x, squares, variances) / (4.0 * FRICTION),
    )
    predicted = potential.compute_max_bias(1.0, step_size) / _MISSED_TAIL_FACTOR
    mean, error = simulate_mean(step_size, trend, noise)
    assert -np.sign(trend) * mean > 10.0 * error
    assert 0.6 * abs(mean) < predicted < 1.4 * abs(mean)


def test_coordinate_is_wide_beyond_the_preconditioner():
    draws = np.random.default_rng(0).standard_normal((1_000, 3)) * [1.0, 2.0, 3.0]
    scales = np.array([1.0, 2.0, 3.0])
    preconditioner = Preconditioner(np.zeros(3), scales, np.zeros(3))
    assert not has_wide_coordinate(draws, preconditioner)
    assert has_wide_coordinate(draws, preconditioner._replace(factor=scales / [1, 1, 1.5]))


def test_no_bias_potential_is_no_bias():
    assert BiasPotential().compute_max_bias(1.0, 0.3) == 0.0


def groups(group, y, batch_size):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", GROUPS):
        level = numpyro.sample("level", dist.Normal(mean, scale))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(level[group[i]], 1), obs=y[i])


def make_data():
    rng = np.random.default_rng(1)
    group = rng.integers(0, GROUPS, ROWS)
    y = 0.8 * rng.standard_normal(GROUPS)[group] + rng.standard_normal(ROWS)
    return group, y.astype(np.float32)


def run_noncentred(**options):
    model = numpyro.handlers.reparam(groups, config={"level": LocScaleReparam(0)})
    mcmc = MCMC(
        SGHMCSplit(partial(model, batch_size=100)),
        chain_method="vectorized",
        progress_bar=False,
        **options,
    )
    mcmc.run(jax.random.key(0), *make_data())
    return mcmc


@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.DiscretisationWarning")
def test_noncentred_groups_with_many_rows_take_shorter_steps():
    """Chains with the step size that noise alone allows seldom reach large scales."""
    trace = run_noncentred(num_warmup=0, num_samples=1).sampler.adaptation.trace
    limits = trace.step_size_limits.limits
    assert limits["mean_bias"] < 0.6 * limits["dynamics"]
    assert trace.predicted_mean_bias.bias_potential.max_sd_ratio > 1.25
    assert trace.num_pilot_windows == 6


def compute_log_scale(group, y):
    """Return the exact posterior mean and SD of the log scale: the rest is Gaussian given it."""
    rows, sums = np.bincount(group), np.bincount(group, weights=y)
    grid = np.linspace(-4.0, 2.0, 1_000)
    log_density = np.empty_like(grid)
    for k, scale in enumerate(np.exp(grid)):
        precision = np.diag(np.append(1.0 + rows * scale**2, 1.0 + rows.sum()))
        precision[-1, :-1] = precision[:-1, -1] = rows * scale
        linear = np.append(scale * sums, sums.sum())
        log_det = np.linalg.slogdet(precision)[1]
        log_density[k] = (linear @ np.linalg.solve(precision, linear) - log_det - scale**2) / 2.0
    weights = np.exp(log_density + grid - (log_density + grid).max())
    mean = np.average(grid, weights=weights)
    return mean, np.sqrt(np.average(np.square(grid - mean), weights=weights))


@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.DiscretisationWarning")
@pytest.mark.slow
def test_noncentred_groups_beside_the_exact_posterior():
    mcmc = run_noncentred(num_warmup=300, num_samples=1_000, num_chains=4)
    mean, sd = compute_log_scale(*make_data())
    z = (np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["scale"], float)) - mean) / sd
    error = 1.0 / np.sqrt(effective_sample_size(z))
    assert abs(z.mean()) < 0.1 + 3.0 * error
    assert abs(z.std() - 1.0) < 0.1 + 3.0 * error / np.sqrt(2.0)
    assert not bias_report(mcmc).is_flagged
