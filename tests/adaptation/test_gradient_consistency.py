"""Changes of the log density that its gradient does not show are reported before sampling."""

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
from numpyro_sgmcmc.adaptation.budget import WarmupBudget
from numpyro_sgmcmc.adaptation.model_checks import (
    compute_hidden_change,
    find_inconsistent_gradients,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InconsistentGradientWarning, ModelWarningKind
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.contract.kernels import quietly
from tests.quick import quick_if

POINTS = np.linspace(-1.0, 1.0, 17)


def hidden_change(fn):
    x = jnp.asarray(POINTS, jnp.float32)
    values = np.asarray(jax.vmap(fn)(x), np.float64)
    slopes = np.asarray(jax.vmap(jax.grad(fn))(x), np.float64) * (POINTS[1] - POINTS[0])
    return compute_hidden_change(values, slopes, np.finfo(np.float32).eps)


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
def test_hidden_change_continuous_function_is_zero(fn):
    assert hidden_change(fn)[0] < 0.01


@pytest.mark.parametrize(
    ("fn", "fraction"),
    [
        (lambda x: 10.0 * jnp.round(3.0 * x) + x, 0.5),
        (lambda x: jnp.where(x > 0.05, 4.0, 0.0) + x**2, 0.5),
        (lambda x: 10.0 * jax.lax.stop_gradient(x) + x, 0.5),
        (lambda x: 10.0 * x - 5.0 * jax.lax.stop_gradient(x), 0.2),
    ],
)
def test_hidden_change_wrong_gradient_is_measured(fn, fraction):
    hidden, total, _ = hidden_change(fn)
    assert hidden > fraction * total


@jax.custom_jvp
def identity_with_derivative_two(x):
    return x


identity_with_derivative_two.defjvp(lambda primals, tangents: (primals[0], 2.0 * tangents[0]))

MEANS = {
    "rounded": lambda a: jnp.round(4 * a) / 4,
    "compared": lambda a: jnp.where(a > 1.0, 1.5, 0.5),
    "stopped": jax.lax.stop_gradient,
    "wrong derivative": identity_with_derivative_two,
    "kinked": jnp.abs,
    "right": lambda a: a,
}


def model(name, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(MEANS[name](a) + 0.3 * b, 1), obs=y[i])


DATA = 1.0 + np.random.default_rng(4).standard_normal(300).astype(np.float32)
NUM_LINES = 64  # of the default budget


@pytest.mark.parametrize("name", MEANS)
def test_inconsistent_gradients_site_is_named(name):
    arguments = Arguments((name, jnp.asarray(DATA)), {"batch_size": 100})
    potential = get_model_potential(model, arguments, init_to_uniform)
    preconditioner = Preconditioner(np.array([1.0, 0.0]), np.array([0.3, 1.0]))
    q = np.random.default_rng(0).standard_normal((2 * NUM_LINES, 2))
    found = find_inconsistent_gradients(
        BatchedGradients(potential, arguments), preconditioner, q, NUM_LINES
    )
    assert [w.sites for w in found] == ([] if name in ("kinked", "right") else [("a",)])


@pytest.mark.parametrize(("num_rows", "max_minibatches"), [(400, 4), (20_000, 22)])
def test_inconsistent_gradients_expensive_rows_are_limited(num_rows, max_minibatches):
    """The check evaluates the representative subset, or 2,048 rows where that has more."""

    class CountingGradients(BatchedGradients):
        num_minibatches = 0

        def weighted_mean(self, positions, weighted_minibatches):
            self.num_minibatches = len(weighted_minibatches)
            return super().weighted_mean(positions, weighted_minibatches)

    y = jnp.asarray(np.random.default_rng(0).standard_normal(5_000), jnp.float32)
    arguments = Arguments(("right", y), {"batch_size": 100})
    potential = get_model_potential(model, arguments, init_to_uniform)
    gradients = CountingGradients(
        potential, arguments, WarmupBudget(num_representative_rows=num_rows)
    )
    q = np.array([[0.0, 0.0], [1.0, 1.0]])
    preconditioner = Preconditioner(np.zeros(2), np.ones(2))
    assert not find_inconsistent_gradients(gradients, preconditioner, q, 2)
    assert gradients.num_minibatches == max_minibatches


@pytest.mark.parametrize("name", [quick_if(name == "compared", name) for name in MEANS])
def test_run_inconsistent_gradient_warns_and_report_is_flagged(name):
    mcmc = quietly(SGHMCSplit(model), num_warmup=50, num_samples=200)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(0), name, jnp.asarray(DATA), batch_size=100)
    messages = [str(w.message) for w in caught if w.category is InconsistentGradientWarning]
    report = bias_report(mcmc)
    if name in ("kinked", "right"):
        assert not messages
        assert ModelWarningKind.INCONSISTENT_GRADIENT not in {w.kind for w in report.model_warnings}
        return
    assert len(messages) == 1
    assert "'a'" in messages[0]
    assert "'b'" not in messages[0]
    assert {s.site: s.diagnosis for s in report.sites}["a"] in ("biased", "not converged")
    assert messages[0] in report.diagnosis
    assert "halve" not in report.diagnosis  # a smaller step size is no remedy
