"""Bias of a coordinate along which the curvature in other directions changes."""

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
from numpyro_sgmcmc.adaptation import coupling
from numpyro_sgmcmc.adaptation.coupling import NO_COUPLING, Coupling, find_coupling
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
    squares = np.square(potential_gradient(x, y, trend)[1]).sum(0)
    variances = NUM_NARROW * np.square(noise * narrow_curvature(x, trend))
    x = (x - x.mean()) / x.std()
    at_draws = Coupling(x[:, None], x[:, None], squares[:, None], variances[:, None])
    (predicted,) = at_draws.compute_biases(step_size**2 / 4.0, step_size / (2.0 * FRICTION))
    predicted /= coupling._MISSED_TAIL_FACTOR
    mean, error = simulate_mean(step_size, trend, noise)
    assert -np.sign(trend) * mean > 10.0 * error
    assert 0.6 * abs(mean) < predicted < 1.4 * abs(mean)


def find_in(x, y, gradients):
    """Return the coupling in coordinates of unit scale, of draws x of one and y of the others."""
    dim = 1 + len(y)
    preconditioner = Preconditioner(np.zeros(dim), np.ones(dim), np.zeros(dim))
    return find_coupling(np.vstack([x, y]).T, np.vstack(gradients).T, preconditioner)


def test_scale_is_coupled():
    """A wide coordinate along which the curvature of the others grows."""
    rng = np.random.default_rng(0)
    x, normals = rng.standard_normal(256), rng.standard_normal((4, 256))
    y = normals / np.sqrt(narrow_curvature(x, 0.5))
    found = find_in(1.5 * x, y, potential_gradient(x, y, 0.5))
    assert found.coordinates.shape == (256, 1)
    assert np.corrcoef(found.coordinates[:, 0], x)[0, 1] > 0.99
    assert found.relaxation_factor == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("is_heavy", [False, True])
def test_heavy_tailed_coordinate_is_not_coupled(is_heavy):
    """It changes its own curvature alone."""
    rng = np.random.default_rng(0)
    y = rng.standard_normal((4, 256))
    x = rng.standard_cauchy(256) if is_heavy else 2.0 * rng.standard_normal(256)
    gradient_x = 2.0 * x / (1.0 + x**2) if is_heavy else x / 4.0
    assert find_in(x, y, (gradient_x, y)) is NO_COUPLING


def test_no_coupling_is_no_bias():
    assert not NO_COUPLING.compute_biases(1.0, 0.3).any()


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


@pytest.mark.slow
def test_pilot_chains_of_noncentred_groups_reach_large_scales():
    """With the noise of minibatches of the model's size they do not."""
    mcmc = run_noncentred(num_warmup=0, num_samples=1)
    mean, sd = compute_log_scale(*make_data())
    adaptation = mcmc.sampler.adaptation
    z = (adaptation.preconditioner.center[-1] - mean) / sd
    assert abs(z) < 0.4
    assert adaptation.trace.predicted_mean_bias.coupling.relaxation_factor > 1.25


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
