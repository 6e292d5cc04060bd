"""Latent sites inside the subsampled plate are coordinates, and their rows groups of effects."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC, init_to_uniform, log_likelihood
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc import SGHMCSplit, bias_report, diagnostics
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.block_arrow import find_block_arrow_layout
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.subsampled import make_model_potential
from numpyro_sgmcmc.model.validation import check_conditional_independence
from tests.contract.kernels import assert_posterior, quietly
from tests.model.hierarchies import (
    NOISE,
    awkward,
    normal_means,
    normal_means_data,
    normal_means_posterior,
)
from tests.model.plated import assert_close
from tests.quick import quick_if

ROWS, BATCH = 40, 8

_full_gradient = jax.jit(Potential.full_gradient, static_argnums=0)
_gradient = jax.jit(Potential.gradient, static_argnums=0)


@cache
def make_case(model: Any) -> tuple[Potential, Arguments, Any]:
    """Return a potential in float64, its arguments and a position."""
    shape = (ROWS,) if model is normal_means else (ROWS, 3)
    y = np.random.default_rng(8).standard_normal(shape)
    arguments = Arguments((y,), {"batch_size": BATCH})
    potential = make_model_potential(model, arguments, init_to_uniform)
    position = jnp.asarray(0.3 * np.random.default_rng(7).standard_normal(potential.dim))
    return potential, arguments, position


@pytest.fixture(params=[normal_means, awkward], ids=["normal_means", "awkward"])
def model(request, x64):
    return request.param


@pytest.mark.parametrize(
    "model",
    [
        quick_if(model is normal_means, model, id=model.__name__)
        for model in (normal_means, awkward)
    ],
    indirect=True,
)
def test_full_gradient_is_that_of_the_joint_potential(model):
    potential, arguments, position = make_case(model)
    (y,) = arguments.args

    def joint(q: Any) -> Any:
        return potential_energy(model, (jnp.asarray(y),), {}, potential.unravel(q))

    assert not potential.has_minibatches
    assert_close(_full_gradient(potential, position, arguments), jax.grad(joint)(position))


@pytest.mark.parametrize("num_rows", [2, 5])
def test_few_rows_are_independent(num_rows):
    """So few that the rows of a check are all rows."""
    arguments = Arguments((normal_means_data(num_rows),), {"batch_size": 1})
    potential = make_model_potential(normal_means, arguments, init_to_uniform)
    check_conditional_independence(potential, arguments, jnp.zeros(potential.dim, jnp.float32))


def test_gradients_of_a_partition_have_the_full_gradient_as_mean(model):
    potential, arguments, position = make_case(model)
    blocks = np.random.default_rng(1).permutation(ROWS).reshape(-1, BATCH)
    gradients = [
        _gradient(potential, position, {"rows": jnp.asarray(rows)}, arguments) for rows in blocks
    ]
    assert_close(np.mean(gradients, 0), _full_gradient(potential, position, arguments))


def test_rows_are_the_groups_of_the_hierarchy(model):
    potential, arguments, _ = make_case(model)
    layout = find_block_arrow_layout(potential, arguments)
    assert layout.num_groups == ROWS
    assert layout.effects_per_group == (1 if model is normal_means else 8)
    assert layout.num_shared == 2


def run(**options: Any) -> MCMC:
    mcmc = quietly(
        SGHMCSplit(normal_means, **options),
        num_warmup=20,
        num_samples=400,
        num_chains=2,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(1), normal_means_data(400), batch_size=40)
    return mcmc


@pytest.fixture(scope="module")
def normal_run():
    return run()


def test_draws_match_the_posterior_on_a_grid(normal_run):
    y = normal_means_data(400)
    draws = normal_run.get_samples(group_by_chain=True)
    for name, (mean, sd) in normal_means_posterior(y).items():
        assert_posterior(draws[name], mean, sd)
    mu, tau = (np.asarray(draws[n], np.float64)[..., None] for n in ("mu", "tau"))
    variance = 1 / (1 / tau**2 + 1 / NOISE**2)
    u = (draws["z"] - variance * (mu / tau**2 + y / NOISE**2)) / np.sqrt(variance)
    # Given the globals each local value is normal; draws are about independent.
    assert abs(np.mean(u)) < 5 / np.sqrt(u.size / 2)
    assert abs(np.var(u) - 1) < 5 * np.sqrt(2 / (u.size / 2))
    assert normal_run.sampler.adaptation.preconditioner.is_block_arrow
    assert normal_run.sampler.adaptation.num_steps <= 15


def test_reports_and_predictions_of_the_same_rows(normal_run):
    y, draws = normal_means_data(400), normal_run.get_samples()
    report = bias_report(normal_run)
    assert [site.site for site in report.sites] == ["mu", "tau", "z"]
    assert not report.is_flagged, report
    rows = np.array([399, 3, 3, 200])
    found = diagnostics.log_likelihood(normal_run, rows=rows)["y"]
    expected = log_likelihood(normal_run.sampler.model, draws, y)["y"][:, rows]
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"'z'.*other sizes"):
        diagnostics.suggest_subsample_size(normal_means, y, batch_size=40)


def test_local_sites_may_be_kept_as_running_moments():
    y = normal_means_data(400)
    mcmc = run(collect_sites=["mu", "tau"])
    assert sorted(mcmc.get_samples()) == ["mu", "tau"]
    moments = diagnostics.running_moments(mcmc)
    mean = np.asarray(moments.mean["z"]).ravel()
    assert abs(np.corrcoef(mean, y)[0, 1]) > 0.999
