"""Values that change unknown to their gradient are named before any draw."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.model_checks import (
    compute_hidden_change,
    find_inconsistent_gradients,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import ModelWarningKind
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.contract.kernels import quietly
from tests.quick import quick_if

PLACES = np.linspace(-1.0, 1.0, 17)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: 40.0 * x**2,
        lambda x: 3.0 * jnp.exp(3.0 * x),
        lambda x: 50.0 * jnp.abs(x - 0.2),
        lambda x: 20.0 * jnp.cos(4.0 * x),
        lambda x: jnp.where(x > 0.1, 5.0 * x, 0.5),  # continuous at 0.1
        lambda x: 1e6 + x**2,  # rounded in float32
    ],
)
def test_continuous_functions_pass(fn):
    x = jnp.asarray(PLACES, jnp.float32)
    values = np.asarray(jax.vmap(fn)(x), np.float64)
    slopes = np.asarray(jax.vmap(jax.grad(fn))(x), np.float64) * (PLACES[1] - PLACES[0])
    assert compute_hidden_change(values, slopes, np.finfo(np.float32).eps)[0] < 0.01


@pytest.mark.parametrize(
    ("fn", "share"),
    [
        (lambda x: 10.0 * jnp.round(3.0 * x) + x, 0.5),
        (lambda x: jnp.where(x > 0.05, 4.0, 0.0) + x**2, 0.5),
        (lambda x: 10.0 * jax.lax.stop_gradient(x) + x, 0.5),
        (lambda x: 10.0 * x - 5.0 * jax.lax.stop_gradient(x), 0.2),
    ],
)
def test_what_the_gradient_does_not_know_is_measured(fn, share):
    x = jnp.asarray(PLACES, jnp.float32)
    values = np.asarray(jax.vmap(fn)(x), np.float64)
    slopes = np.asarray(jax.vmap(jax.grad(fn))(x), np.float64) * (PLACES[1] - PLACES[0])
    hidden, total, _ = compute_hidden_change(values, slopes, np.finfo(np.float32).eps)
    assert hidden > share * total


def test_where_gradients_cost_much_few_rows_are_looked_at():
    """As many as stand for all elsewhere in such a warm-up."""

    def model(y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(a, 1), obs=y[i])

    y = np.random.default_rng(0).standard_normal(5_000)
    arguments = Arguments((jnp.asarray(y, jnp.float32),), {"batch_size": 100})
    target, asked = get_model_potential(model, arguments, init_to_uniform), []
    for num, expected in ((400, 4), (20_000, 22)):  # of 2,048 rows the last 48 take two
        rows = BatchedGradients(target, arguments, num)
        rows.weighted_mean = lambda line, some: asked.append(len(some)) or (line[:, 0], 0 * line)
        find_inconsistent_gradients(
            rows, Preconditioner(np.zeros(1), np.ones(1)), np.array([[0.0], [1.0]]), 2
        )
        assert asked.pop() == expected


@jax.custom_jvp
def doubled(x):
    """The identity, with a derivative of two."""
    return x


doubled.defjvp(lambda primals, tangents: (primals[0], 2.0 * tangents[0]))

MEANS = {
    "rounded": lambda a: jnp.round(4 * a) / 4,
    "compared": lambda a: jnp.where(a > 1.0, 1.5, 0.5),
    "stopped": jax.lax.stop_gradient,
    "wrong": doubled,
    "kinked": jnp.abs,
    "right": lambda a: a,
}


def model(kind, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(MEANS[kind](a) + 0.3 * b, 1), obs=y[i])


@pytest.mark.parametrize("kind", [quick_if(kind in ("compared", "right"), kind) for kind in MEANS])
def test_the_site_is_named_before_sampling_and_the_report_remembers(kind):
    y = jnp.asarray(1.0 + np.random.default_rng(4).standard_normal(300), jnp.float32)
    mcmc = quietly(SGHMCSplit(model), num_warmup=50, num_samples=200)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(0), kind, y, batch_size=100)
    said = [str(w.message) for w in caught if "does not know how the log density" in str(w.message)]
    report = bias_report(mcmc)
    if kind in ("kinked", "right"):
        assert not said
        assert ModelWarningKind.INCONSISTENT_GRADIENT not in {f.kind for f in report.model_warnings}
        return
    assert "along 'a'" in said[0]
    assert "'b'" not in said[0]
    assert {s.site: s.diagnosis for s in report.sites}["a"] in ("biased", "not converged")
    assert said[0] in report.diagnosis
    assert "halve" not in report.diagnosis
