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
    HiddenChange,
    compute_hidden_change,
    estimate_rounding,
    find_inconsistent_gradients,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InconsistentGradientWarning, ModelWarningKind, SGMCMCWarning
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.contract.kernels import quietly
from tests.quick import quick_if

POINTS = np.linspace(-1.0, 1.0, 17)


def hidden_change(fn):
    x = jnp.asarray(POINTS, jnp.float32)
    values = np.asarray(jax.vmap(fn)(x), np.float64)
    distance = POINTS[1] - POINTS[0]
    slopes = np.asarray(jax.vmap(jax.grad(fn))(x), np.float64) * distance
    nearby = jnp.asarray(-1.0 + distance / 16 * np.arange(20), jnp.float32)
    rounding = estimate_rounding(np.diff(np.asarray(jax.vmap(fn)(nearby), np.float64), 2))
    return compute_hidden_change(values, slopes, rounding)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: 40.0 * x**2,
        lambda x: 3.0 * jnp.exp(3.0 * x),
        lambda x: 50.0 * jnp.abs(x - 0.2),
        lambda x: 20.0 * jnp.cos(4.0 * x),
        lambda x: jnp.where(x > 0.1, 5.0 * x, 0.5),  # continuous at 0.1
        lambda x: 1e6 + 10.0 * x**2,  # rounded in float32
        lambda x: 10.0 * x + jax.scipy.special.gammaln(1e5 + x) - jax.scipy.special.gammaln(1e5),
    ],
)
def test_hidden_change_continuous_function_is_zero(fn):
    change = hidden_change(fn)
    assert change.hidden < 0.01
    assert change.trapezoidal_difference < 0.02 * change.total
    assert not change.is_reported


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
    change = hidden_change(fn)
    assert change.hidden > fraction * change.total
    assert change.is_reported


def test_hidden_change_doubled_slopes_of_a_valley_are_reported():
    """Intervals next to a minimum have slopes of both signs, between which the change is."""
    x = np.linspace(-0.5, 0.5, 12)
    change = compute_hidden_change(x**2, 4.0 * x * (x[1] - x[0]), 1e-4)
    assert change.hidden < 0.3
    assert change.trapezoidal_difference == pytest.approx(change.total, rel=0.05)
    assert HiddenChange(*2.0 * np.array(change)).is_reported  # on two lines


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


def find_inconsistent_sites(model, args, center, sds):
    """Return the warnings at positions with these means and SDs."""
    arguments = Arguments(args, {"batch_size": 100})
    potential = get_model_potential(model, arguments, init_to_uniform)
    preconditioner = Preconditioner(np.array(center), np.array(sds))
    q = np.random.default_rng(0).standard_normal((16, len(sds)))  # as many as pilot chains
    return find_inconsistent_gradients(
        BatchedGradients(potential, arguments), preconditioner, q, NUM_LINES
    )


DATA = 1.0 + np.random.default_rng(4).standard_normal(300).astype(np.float32)
NUM_LINES = 64  # of the default budget


@pytest.mark.parametrize("name", MEANS)
def test_inconsistent_gradients_site_is_named(name):
    found = find_inconsistent_sites(model, (name, jnp.asarray(DATA)), [1.0, 0.0], [0.3, 1.0])
    assert [w.sites for w in found] == ([] if name in ("kinked", "right") else [("a",)])


@pytest.mark.parametrize(("num_rows", "max_minibatches"), [(400, 4), (20_000, 20)])
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


@pytest.mark.slow
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


# --- Rounding -----------------------------------------------------------------------------------

# Distributions of which large terms cancel in single precision: likelihood of a log mean and a log
# precision, their values, data, and posterior SDs for one observation.
CANCELLING = {
    "gamma": (
        lambda m, a: dist.Gamma(a, a / jnp.exp(m)),
        (0.0, np.log(200.0)),
        lambda rng, n: rng.gamma(200, 1 / 200, n),
        (200**-0.5, 2**0.5),
    ),
    "beta": (
        lambda m, a: dist.Beta(a * jax.nn.sigmoid(m), a * jax.nn.sigmoid(-m)),
        (0.0, np.log(300.0)),
        lambda rng, n: rng.beta(150, 150, n),
        (4 / 300**0.5 / 2, 2**0.5),
    ),
    "nearly Poisson": (
        lambda m, a: dist.NegativeBinomial2(jnp.exp(m), a),
        (np.log(20.0), np.log(2_000.0)),
        lambda rng, n: rng.poisson(20 * rng.gamma(2_000, 1 / 2_000, n)),
        (20**-0.5, 20.0),
    ),
    "Poisson of large counts": (
        lambda m, a: dist.Poisson(jnp.exp(m) + 0.0 * a),
        (np.log(1e5), 0.0),
        lambda rng, n: rng.poisson(1e5, n),
        (1e-5**0.5, 50.0),
    ),
    "binomial of large counts": (
        lambda m, a: dist.BetaBinomial(a * jax.nn.sigmoid(m), a * jax.nn.sigmoid(-m), 1_000),
        (0.0, np.log(500.0)),
        lambda rng, n: rng.binomial(1_000, rng.beta(250, 250, n)),
        (2 / 500**0.5, 2**0.5),
    ),
    "inverse gamma": (
        lambda m, a: dist.InverseGamma(a, a * jnp.exp(m)),
        (0.0, np.log(500.0)),
        lambda rng, n: 1 / rng.gamma(500, 1 / 500, n),
        (500**-0.5, 2**0.5),
    ),
    "Student t": (
        lambda m, a: dist.StudentT(a, m, 0.01),
        (0.0, np.log(3_000.0)),
        lambda rng, n: 0.01 * rng.standard_t(3_000, n),
        (0.01, 20.0),
    ),
}


def cancelling_model(name, transform, y, batch_size=None):
    m = numpyro.sample("m", dist.Normal(0, 20))
    log_precision = numpyro.sample("log_precision", dist.Normal(5, 5))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        fn = CANCELLING[name][0](transform(m), jnp.exp(log_precision))
        numpyro.sample("y", fn, obs=y[i])


def find_in_cancelling_model(name, transform, width=1.0, num_rows=2_000):
    _, center, sample, sds = CANCELLING[name]
    y = jnp.asarray(sample(np.random.default_rng(1), num_rows), jnp.float32)
    # In the order of the coordinates: log_precision, m.
    sds = np.array([sds[1], width * sds[0]]) / num_rows**0.5
    found = find_inconsistent_sites(cancelling_model, (name, transform, y), center[::-1], sds)
    return [w.sites for w in found]


# The others are of the same terms: logarithms of gamma functions, and powers.
QUICK_CANCELLING = {"gamma", "nearly Poisson", "Poisson of large counts", "Student t"}


@pytest.mark.parametrize("name", [quick_if(n in QUICK_CANCELLING, n) for n in CANCELLING])
def test_inconsistent_gradients_cancelling_terms_are_rounding(name):
    assert find_in_cancelling_model(name, lambda m: m) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        quick_if(name == "gamma" or kind == "rounded", name, kind)
        for name in ("gamma", "Poisson of large counts", "Student t")
        for kind in ("rounded", "compared", "stopped", "wrong derivative")
    ],
)
def test_inconsistent_gradients_are_found_beside_cancelling_terms(name, kind):
    """Chains that miss a part of the density are far wider than its posterior."""
    center, sd = CANCELLING[name][1][0], CANCELLING[name][3][0] / 2_000**0.5
    width = 300.0

    def transform(m):
        shifted = (m - center) / (0.4 * width * sd) + 1.0  # where MEANS has its changes
        return center + (MEANS[kind](shifted) - 1.0) * (0.4 * width * sd)

    assert find_in_cancelling_model(name, transform, width) == [("m",)]


def test_inconsistent_gradients_rounded_predictions_are_found():
    """Predictions that each change at other values of a parameter look like rounding errors."""

    def rounded_model(X, y, batch_size=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(jnp.round(20 * b * X[i]) / 20, 1), obs=y[i])

    rng = np.random.default_rng(0)
    X = rng.standard_normal(1_000).astype(np.float32)
    y = jnp.asarray(0.5 * X + rng.standard_normal(1_000), jnp.float32)
    (found,) = find_inconsistent_sites(rounded_model, (jnp.asarray(X), y), [0.5], [0.3])
    assert found.sites == ("b",)


# --- Bounds of the support that depend on a parameter ---------------------------------------------


BOUNDED = {
    "uniform": lambda bound: dist.Uniform(0.0, bound),
    "uniform below": lambda bound: dist.Uniform(bound - 3.0, 5.0),
    "shifted": lambda bound: dist.TransformedDistribution(
        dist.Exponential(1.0), dist.transforms.AffineTransform(bound - 3.0, 1.0)
    ),
    "Pareto": lambda bound: dist.Pareto(bound / 3.0, 2.0),
    # The density falls to zero towards the bound, which its gradient shows.
    "smooth": lambda bound: dist.TransformedDistribution(
        dist.LogNormal(0.0, 1.0), dist.transforms.AffineTransform(bound - 3.5, 1.0)
    ),
}


def bounded_model(name, y, batch_size=None):
    theta = numpyro.sample("theta", dist.LogNormal(1.0, 1.0))
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", BOUNDED[name](theta), obs=y[i])
        numpyro.sample("x", dist.Normal(mu, 1), obs=0.0 * y[i])


def find_in_bounded_model(name, theta, sd):
    rng = np.random.default_rng(2)
    y = rng.uniform(0, 3, 1_000)
    y = {"Pareto": 1 + y, "smooth": np.exp(rng.standard_normal(1_000))}.get(name, y)
    args = name, jnp.asarray(y, jnp.float32)
    return find_inconsistent_sites(bounded_model, args, [0.0, np.log(theta)], [1000**-0.5, sd])


@pytest.mark.parametrize(
    ("name", "is_inside"),
    [
        quick_if(name.startswith("uniform") or not is_inside, name, is_inside)
        for name in BOUNDED
        if name != "smooth"
        for is_inside in (True, False)
    ],
)
def test_inconsistent_gradients_parameter_that_bounds_the_data_is_named(name, is_inside):
    """From positions of positive density it leads out of the support; to others it has led."""
    is_lower_bound = name != "uniform"
    theta = 2.7 if is_inside == is_lower_bound else 3.6
    (found,) = find_in_bounded_model(name, theta, 0.04)
    assert found.sites == ("theta",)
    assert found.kind is ModelWarningKind.INCONSISTENT_GRADIENT
    assert ("site 'y'" in found.message) == (name != "shifted")  # whose support is stated as real


def test_inconsistent_gradients_smooth_bound_is_not_found():
    assert not find_in_bounded_model("smooth", 3.5, 0.0023)


@pytest.mark.slow
def test_run_parameter_that_bounds_the_data_is_named():
    def uniform_model(y, batch_size=None):
        theta = numpyro.sample("theta", dist.HalfNormal(10))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Uniform(0, theta), obs=y[i])

    y = jnp.asarray(np.random.default_rng(0).uniform(0, 3, 2_000), jnp.float32)
    mcmc = quietly(SGHMCSplit(uniform_model), num_warmup=10, num_samples=100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SGMCMCWarning)
        mcmc.run(jax.random.key(0), y, batch_size=100)
    (warning,) = [w for w in caught if issubclass(w.category, SGMCMCWarning)]
    assert warning.category is InconsistentGradientWarning  # and none about noise
    assert "'theta'" in str(warning.message)
    assert not bias_report(mcmc).is_ok
