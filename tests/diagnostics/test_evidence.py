"""What draws tell besides the moments: gradients where they are, tails, necks, dependence."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.reparam import LocScaleReparam

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics import run_data
from numpyro_sgmcmc.diagnostics.diagnosis import _describe_funnel_neck
from numpyro_sgmcmc.diagnostics.geometry import TailTransform, find_funnel_necks
from numpyro_sgmcmc.diagnostics.run_data import (
    ConvergenceStats,
    GradientsAtDraws,
    compute_gradients_at_draws,
    get_unconstrained_draws_or_none,
)
from numpyro_sgmcmc.diagnostics.stein_estimates import (
    compute_sums_at_draws,
    estimate_bias_from_sums,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.contract.kernels import BATCH, quietly, survey, survey_data

STEP = 0.3


def run(model, *args, seed=0, **kwargs):
    mcmc = quietly(
        SGHMCSplit(model), num_warmup=200, num_samples=1000, num_chains=4, chain_method="vectorized"
    )
    mcmc.run(jax.random.key(seed), *args, **kwargs)
    return mcmc


# --- Tails --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "is_heavy"),
    [
        (dist.Cauchy(0, 1), True),
        (dist.StudentT(2, 0, 1), True),
        (dist.Normal(3, 0.1), False),
        (dist.Laplace(0, 2), False),
        (dist.Gumbel(0, 1), False),
        (dist.Uniform(0, 1), False),
    ],
)
def test_heavy_tails_are_told_by_quantiles(prior, is_heavy):
    for seed in range(5):
        draws = np.asarray(prior.sample(jax.random.key(seed), (2_000, 1)), np.float64)
        assert len(TailTransform.fit(draws).coordinates) == is_heavy


def test_bent_gradient_is_that_of_the_bent_density():
    bend = TailTransform(np.array([1]), np.array([0.5]), np.array([2.0]))
    x = np.array([[0.0, -7.0, 1.0], [0.0, 3.0, 1.0]])

    def bent_potential(y):
        x, slope = jax.value_and_grad(lambda y: 0.5 + 2.0 * jnp.sinh(y))(y)
        return -dist.Cauchy(0, 1).log_prob(x) - jnp.log(slope)

    g = np.asarray(jax.vmap(jax.grad(lambda x: -dist.Cauchy(0, 1).log_prob(x)))(x[:, 1]))
    expected = jax.vmap(jax.grad(bent_potential))(bend.transform(x)[:, 0])
    found = bend.transform_gradient(x, np.stack([0 * g, g, 0 * g], 1))
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5)


# --- Necks --------------------------------------------------------------------------------------


def funnel_draws(sd, lowest):
    """Draws of v ~ N(0, sd), x ~ N(0, e^(v/2)), those below ``lowest`` left out, and what is
    known there.
    """
    rng = np.random.default_rng(0)
    v = sd * rng.standard_normal(20_000)
    v = v[v > lowest][:4_000]
    x = np.exp(v / 2) * rng.standard_normal(len(v))
    g = np.stack([v / sd**2 + 0.5 - 0.5 * np.square(x) * np.exp(-v), x * np.exp(-v)], 1)
    looked_at = np.arange(0, len(v), 30)
    return np.stack([v, x], 1), g, looked_at, STEP**2 * np.exp(-v[looked_at])


def of_neck(neck):
    """What is said of it, where it is the only coordinate's."""
    report = SimpleNamespace(evidence=SimpleNamespace(necks=[neck]), names=[("v", "v")])
    return _describe_funnel_neck(report, "v")


def test_a_neck_that_draws_have_not_entered_is_seen():
    found = find_funnel_necks(*funnel_draws(3.0, -2.5))
    assert [(n.coordinate, n.side) for n in found] == [(0, "low")]
    assert (
        0.05 < found[0].missed_mass <= 0.25
    )  # 0.15 of it is below -3.1, where the step is too long


def test_a_funnel_that_draws_fill_has_no_neck():
    assert not find_funnel_necks(*funnel_draws(0.5, -np.inf))
    positions, g, looked_at, curvature = funnel_draws(3.0, -2.5)
    assert not find_funnel_necks(
        positions, g, looked_at, 1e-4 * curvature
    )  # a step that is short enough
    assert not find_funnel_necks(positions, g, looked_at, np.full_like(curvature, 0.2))
    assert not find_funnel_necks(positions, g, looked_at, np.full_like(curvature, np.nan))


def test_a_step_that_is_too_long_in_the_midst_is_told_from_a_neck():
    positions, g, looked_at, curvature = funnel_draws(0.3, -np.inf)
    assert all(not n.is_step_too_large_in_bulk for n in find_funnel_necks(*funnel_draws(3.0, -2.5)))
    found = find_funnel_necks(positions, g, looked_at, 3.0 * curvature / np.median(curvature))
    assert [(n.coordinate, n.is_step_too_large_in_bulk) for n in found] == [(0, True)]
    assert "too long for most of the posterior" in of_neck(found[0])
    assert "LocScaleReparam(0)" not in of_neck(found[0])
    assert "LocScaleReparam(0)" in of_neck(found[0]._replace(is_step_too_large_in_bulk=False))


def groups(group, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    with numpyro.plate("groups", 30):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])


def group_data(scale):
    rng = np.random.default_rng(1)
    group = rng.integers(0, 30, 900)
    y = scale * rng.standard_normal(30)[group] + rng.standard_normal(900)
    return jnp.asarray(group), jnp.asarray(y, jnp.float32)


@pytest.mark.slow
def test_groups_that_do_not_differ_are_a_neck():
    report = bias_report(run(groups, *group_data(0.0), batch_size=100))
    assert not report.is_ok
    assert {report.names[n.coordinate][0] for n in report.bias_diagnostics.funnel_necks} == {
        "scale"
    }
    assert "At the low end of `scale` the posterior is too narrow for the step" in report.diagnosis
    assert "LocScaleReparam(0)" in report.diagnosis


@pytest.mark.slow
def test_the_cure_of_groups_that_do_not_differ_is_one():
    cured = numpyro.handlers.reparam(groups, config={"effect": LocScaleReparam(0)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the minibatch, that it is all rows
        report = bias_report(run(cured, *group_data(0.0), batch_size=900))
    assert report.is_ok
    assert not report.bias_diagnostics.funnel_necks


@pytest.mark.slow
def test_groups_that_differ_have_no_neck():
    report = bias_report(run(groups, *group_data(0.5), batch_size=100))
    assert report.is_ok
    assert not report.bias_diagnostics.funnel_necks


# --- Gradients where the draws are --------------------------------------------------------------


@pytest.fixture(scope="module")
def surveyed():
    return run(survey, *survey_data(), batch_size=BATCH)


def test_gradients_at_draws_are_unbiased(surveyed):
    kernel = surveyed.sampler
    looked_at = compute_gradients_at_draws(
        surveyed, kernel, get_unconstrained_draws_or_none(surveyed, kernel)
    )
    flat = looked_at.positions.reshape(-1, looked_at.positions.shape[-1])
    arguments = Arguments(surveyed._args, surveyed._kwargs)
    exact = np.asarray(kernel.full_gradients(jnp.asarray(flat, jnp.float32), arguments))
    off = looked_at.gradients.reshape(flat.shape) - exact
    scale = exact.std(0)
    assert (np.abs(off.mean(0)) < 4 * off.std(0) / np.sqrt(len(off)) + 0.01 * scale).all()
    assert (off.std(0) < 0.3 * scale).all()


def test_curvature_at_draws_is_the_hessian_s(surveyed):
    kernel = surveyed.sampler
    looked_at = compute_gradients_at_draws(
        surveyed, kernel, get_unconstrained_draws_or_none(surveyed, kernel)
    )
    flat = looked_at.positions.reshape(-1, looked_at.positions.shape[-1])
    factor = np.asarray(kernel.adaptation.preconditioner.factor, np.float64)
    factor = np.diag(factor) if factor.ndim == 1 else factor
    arguments = Arguments(surveyed._args, surveyed._kwargs)

    def largest(q):
        hessian = jax.jacfwd(lambda x: kernel.potential.full_gradient(x, arguments))(q)
        return np.linalg.eigvalsh(factor.T @ np.asarray(hessian, np.float64) @ factor).max()

    expected = [largest(jnp.asarray(flat[k], jnp.float32)) for k in looked_at.curvature_indices[:5]]
    np.testing.assert_allclose(looked_at.max_curvature[:5], expected, rtol=0.15)


def test_a_mean_that_was_moved_is_told_by_them():
    """Draws of a normal, and the gradient of one whose mean is half an sd lower."""
    d = 3
    q = np.random.default_rng(0).standard_normal((4, 1000, d))
    told = estimate_bias_from_sums(
        *compute_sums_at_draws(
            GradientsAtDraws.from_arrays(q, q + 0.5), Preconditioner(np.zeros(d), np.ones(d))
        )
    )
    assert (np.abs(told.mean_bias.value - 0.5) < 4 * told.mean_bias.error).all()
    assert (told.mean_bias.error < 0.05).all()
    assert (np.abs(told.sd_inflation.value) < 0.05).all()


# --- Dependence ---------------------------------------------------------------------------------


def test_dependent_draws_count_less():
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4, 500, 3))
    draws[..., 1] = draws[:, :1, 1] + 0.3 * draws[..., 1]
    draws[..., 2] = np.repeat(draws[:, ::10, 2], 10, axis=1)
    found = ConvergenceStats.from_draws(draws)
    assert found.r_hat[0] < 1.02 < 1.1 < found.r_hat[1]
    assert found.ess[2] < 400 < 1500 < found.ess[0]
    assert (ConvergenceStats.from_draws(draws[:, :4]).ess == 16).all()
    assert np.isnan(ConvergenceStats.from_draws(draws[:, :30]).r_hat).all()


def test_what_fine_rests_on_is_said(surveyed):
    report = bias_report(surveyed)
    assert report.is_ok
    assert "R-hat is at most 1.0" in report.diagnosis
    assert "A mode that no start has found would stay unseen" in report.diagnosis
    assert f"from gradients at {report.bias_diagnostics.num_gradient_draws} draws" in str(report)


def vague(y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    numpyro.sample("c", dist.Cauchy(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a, 1), obs=y[i])


def test_what_is_said_of_heavy_tails_is_said_of_quantiles():
    y = jnp.asarray(np.random.default_rng(5).standard_normal(300), jnp.float32)
    mcmc = run(vague, y, batch_size=100)
    report = bias_report(mcmc)
    assert [report.names[k][0] for k in report.bias_diagnostics.heavy_tailed_coordinates] == ["c"]
    assert "Heavy tails, whose sds mean nothing: c. Told by quantiles" in str(report)
    ranks = np.asarray(dist.Cauchy(0, 1).cdf(mcmc.get_samples()["c"]))
    told = {s.site: s for s in report.sites}
    assert told["a"].diagnosis == "ok"
    error = 1 / np.sqrt(told["c"].ess)
    is_right = abs(ranks.mean() - 0.5) < 0.29 * 3 * error and abs(ranks.std() / 0.289 - 1) < 0.2
    assert is_right or told["c"].diagnosis != "ok"


def test_a_report_is_of_its_own_run_s_data():
    """The same kernel has run on other data since."""
    kernel = SGHMCSplit(vague)
    rng = np.random.default_rng(5)
    first, other = (jnp.asarray(m + rng.standard_normal(300), jnp.float32) for m in (0.0, 9.0))
    runs = []
    for y in (first, other):
        mcmc = quietly(kernel, num_warmup=100, num_samples=500)
        mcmc.run(jax.random.key(0), y, batch_size=100)
        runs.append(mcmc)
    for mcmc in runs:
        assert {s.site: s.diagnosis for s in bias_report(mcmc).sites}["a"] == "ok"


def small(y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a, 1), obs=y[i])


def test_nothing_given_is_taken_for_a_gradient():
    """All settings and a start off the mean, plain gradients: nobody has taken the anchor's."""
    y = jnp.asarray(np.random.default_rng(5).standard_normal(300), jnp.float32)
    kernel = SGHMCSplit(
        small,
        step_size=0.1,
        num_steps=20,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        inverse_mass_matrix=np.array([1 / 300]),
    )
    mcmc = quietly(kernel, num_warmup=100, num_samples=1000)
    mcmc.run(jax.random.key(0), y, batch_size=100, init_params={"a": jnp.array(0.2)})
    second = bias_report(mcmc).bias_diagnostics.bias_estimates[1]
    assert abs(second.mean_bias.value[0]) < 0.5


def test_draws_beyond_the_type_s_range_are_held_over():
    draws = np.random.default_rng(0).standard_normal((2, 300, 2))
    kept = run_data._forward_fill_nonfinite(draws)
    assert kept is draws
    draws[1, 7:9, 1] = -np.inf
    kept = run_data._forward_fill_nonfinite(draws)
    np.testing.assert_array_equal(kept[1, 7:9], draws[1, [6, 6]])
    assert np.isfinite(kept).all()
    draws[0, 50:, 0] = np.nan
    assert run_data._forward_fill_nonfinite(draws) is None
