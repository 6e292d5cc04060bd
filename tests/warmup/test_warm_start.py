"""Where the warm-up finds the mode and the mass."""

from functools import cache
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.optimize
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.model import model_target
from numpyro_sgmcmc.posterior.target import function_target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential
from numpyro_sgmcmc.warmup.warm_start import approach, centre, lbfgs, newton, newton_from
from tests.warmup.potentials import Quadratic, eager_potential, random_covariance

ROWS, COLUMNS = 500, 5
UNITS = 10.0 ** np.linspace(-3, 3, COLUMNS)


def logistic(X, y, units, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10 / units).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])


KINDS = {
    "independent": (0.0, np.ones(COLUMNS)),
    "correlated": (0.99, np.ones(COLUMNS)),
    "badly scaled": (0.0, UNITS),
    "correlated and badly scaled": (0.99, UNITS),
}


@cache
def logistic_target(is_double):
    arguments, _, _ = logistic_data("independent")
    return model_target(logistic, arguments, init_to_uniform)


def logistic_data(kind):
    """Arguments, and the mode and its Hessian, by SciPy in float64."""
    correlation, units = KINDS[kind]
    rng = np.random.default_rng(3)
    shared, own = rng.standard_normal((ROWS, 1)), rng.standard_normal((ROWS, COLUMNS))
    base = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own
    y = rng.random(ROWS) < 1 / (1 + np.exp(-base @ np.linspace(-1, 1, COLUMNS)))

    def fun(b):
        logits = base @ b
        p = 1 / (1 + np.exp(-logits))
        value = np.logaddexp(0, logits).sum() - logits @ y + b @ b / 200
        hessian = (base.T * (p * (1 - p))) @ base + np.eye(COLUMNS) / 100
        return value, base.T @ (p - y) + b / 100, hessian

    best = scipy.optimize.minimize(
        lambda b: fun(b)[0],
        np.zeros(COLUMNS),
        jac=lambda b: fun(b)[1],
        hess=lambda b: fun(b)[2],
        method="trust-exact",
        options={"gtol": 1e-10},
    ).x
    arguments = Arguments(
        (jnp.asarray(base * units, float), jnp.asarray(y, int), jnp.asarray(units, float)),
        {"batch_size": 10},
    )
    return arguments, best / units, fun(best)[2] * np.outer(units, units)


def sds_from(position, mode, hessian):
    return np.sqrt((position - mode) @ hessian @ (position - mode))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["x64", "single"])
def test_newton_finds_the_mode_of_a_logistic_regression(kind, precision, request):
    if precision == "x64":
        request.getfixturevalue("x64")
    arguments, mode, hessian = logistic_data(kind)
    potential = EagerPotential(logistic_target(precision == "x64"), arguments)
    for seed in range(3):
        start = np.random.default_rng(seed).uniform(-2, 2, COLUMNS)
        assert sds_from(start, mode, hessian) > 3
        assert sds_from(newton(potential, start), mode, hessian) < 0.1


def test_newton_of_a_gaussian_takes_one_step():
    potential = Quadratic(random_covariance(8), mode=3.0)
    np.testing.assert_allclose(newton(potential, np.zeros(8)), 3.0)
    # The expansion and a trial, and once more where the gradient is found to be zero.
    assert potential.num_calls <= 4


def test_newton_leaves_a_saddle():
    def potential(q):
        return (q[0] ** 2 - 4) ** 2 / 8 + q[1] ** 2

    position = newton(eager_potential(potential, 2), np.array([0.05, 1.0]))
    np.testing.assert_allclose(position, [2, 0], atol=0.1)


def test_newton_follows_a_bent_valley():
    def potential(q):
        return 50 * (q[1] - q[0] ** 2) ** 2 + (1 - q[0]) ** 2 / 2

    position = newton(eager_potential(potential, 2), np.array([-1.5, 2.0]))
    assert np.linalg.norm(position - 1) < 0.2


def test_newton_stays_finite_where_the_potential_is_not():
    def potential(q):
        return jnp.where(q[0] > 0, q[0] - 2 * jnp.log(q[0]), jnp.inf)

    np.testing.assert_allclose(newton(eager_potential(potential, 1), np.array([50.0])), 2, atol=0.2)
    start = np.array([-1.0])
    np.testing.assert_array_equal(newton(eager_potential(potential, 1), start), start)


def wells(depth):
    """A well about 0, and one about 40 that is so much deeper."""

    def potential(q, *_):
        return -jnp.logaddexp(-jnp.square(q[0]) / 2, depth - jnp.square(q[0] - 40.0) / 2)

    return eager_potential(potential, 1)


@pytest.mark.parametrize("num_shallow", [0, 1, 3])
def test_of_several_ends_the_one_with_most_mass_counts(num_shallow):
    starts = [np.array([0.1 * k]) for k in range(num_shallow)] + [np.array([39.0])]
    np.testing.assert_allclose(newton_from(wells(200.0), starts), 40.0, atol=0.2)
    # A little more is no reason to leave the first start's.
    np.testing.assert_allclose(
        newton_from(wells(20.0), starts), 40.0 * (num_shallow == 0), atol=0.2
    )


def test_more_starts_are_tried_only_where_the_first_disagree():
    """Twenty nats between wells are no reason, and then a fifth start is not tried."""
    shallow, deep = [np.array([0.3])], [np.array([39.0])]
    np.testing.assert_allclose(newton_from(wells(20.0), 4 * shallow + deep), 0.0, atol=0.2)
    tried = []

    class Counted:
        def __init__(self, potential):
            self.potential, self.value = potential, potential.value

        def expansion(self, q):
            tried.append(float(q[0]))
            return self.potential.expansion(q)

    newton_from(Counted(wells(20.0)), shallow + 11 * deep)
    few = tried.count(39.0)
    tried.clear()
    newton_from(Counted(wells(200.0)), shallow + 11 * deep)
    assert (few, tried.count(39.0)) == (3, 11)


def test_lbfgs_never_ends_above_its_start():
    def potential(q):
        return jnp.square(q * jnp.arange(1.0, 31.0)).sum() / 2 + jnp.cos(q).sum()

    target = function_target(potential, jnp.zeros(30))
    start = jnp.linspace(-2, 2, 30)
    end = lbfgs(target, Arguments(), start, None)
    assert potential(end) < 1e-2 * potential(start) + 30
    top = jnp.zeros(30)
    assert potential(lbfgs(target, Arguments(), top, None)) <= potential(top)


def test_centre_is_where_the_mass_is():
    # x_i | v ~ N(0, exp(-v)) without its normaliser: the density's mode is at v = 0, while v has
    # the marginal N(-n s^2 / 2, s^2).
    n, s = 6, 3.0

    def potential(q):
        v, x = q[0], q[1:]
        return v**2 / (2 * s**2) + jnp.exp(v) * jnp.square(x).sum() / 2

    potential = eager_potential(potential, n + 1)
    mode = newton(potential, 0.1 * np.ones(n + 1))
    assert abs(mode[0]) < s / 2
    found = centre(potential, mode, 0)
    assert abs(found[0] + n * s**2 / 2) < s
    assert np.abs(found[1:]).max() < np.exp(-found[0] / 2)


def test_centre_of_a_gaussian_is_its_mode():
    potential = Quadratic(random_covariance(4), mode=1.0)
    np.testing.assert_allclose(centre(potential, np.ones(4), 0), 1.0)


@pytest.mark.parametrize("is_dense", [True, False])
def test_approach(is_dense):
    hessian = random_covariance(4) if is_dense else np.diag([1.0, 4.0, 9.0, 0.1])
    factor = np.linalg.cholesky(np.linalg.inv(hessian))
    factor = factor if is_dense else np.diagonal(factor)
    potential = Quadratic(hessian, mode=2.0)
    start = np.zeros(4)
    whitening = approach(potential, Whitening(start, factor, potential.gradient(start)))
    np.testing.assert_allclose(whitening.anchor, 2.0)
    np.testing.assert_allclose(whitening.gradient, potential.gradient(whitening.anchor))


def test_approach_does_not_follow_steps_that_are_too_long():
    potential = Quadratic(np.eye(3))
    start = np.ones(3)
    whitening = Whitening(start, 3.0 * np.ones(3), potential.gradient(start))
    assert approach(potential, whitening) is whitening


def test_approach_does_not_leave_a_point_for_one_that_is_not_finite():
    potential = SimpleNamespace(gradient=lambda q: np.full(3, np.nan))
    whitening = Whitening(np.ones(3), np.ones(3), 5 * np.ones(3))
    assert approach(potential, whitening) is whitening


def hierarchy():
    """A centred hierarchy whose groups do not differ, and the log density of its log scale.

    The joint density has no mode: it grows without bound as scale and effects shrink together.
    """
    y = 0.9 * np.random.default_rng(1).standard_normal(8)

    def potential(q):
        mu, log_tau, effects = q[0], q[1], q[2:]
        tau = jnp.exp(log_tau)
        return (
            jnp.square(y - effects).sum() / 2
            + jnp.square((effects - mu) / tau).sum() / 2
            + (len(y) - 1) * log_tau
            + jnp.square(tau) / 2
            + jnp.square(mu) / 50
        )

    def log_density(log_tau):
        variance = 1 + np.exp(2 * log_tau)
        precision = len(y) / variance + 1 / 25
        fit = np.square(y).sum() / variance - np.square(y.sum() / variance) / precision
        scale = log_tau - np.exp(2 * log_tau) / 2
        return scale - len(y) / 2 * np.log(variance) - fit / 2 - np.log(precision) / 2

    return eager_potential(potential, 10), log_density


@pytest.mark.parametrize("keeps_the_best", [True, False])
def test_newton_stays_where_the_mass_is(keeps_the_best, x64, monkeypatch):
    """It follows the density into the spike, and returns a point of the way with mass around."""
    potential, log_density = hierarchy()
    if not keeps_the_best:
        monkeypatch.setattr("numpyro_sgmcmc.warmup.warm_start._NEGLIGIBLE", np.inf)
    found = newton(potential, np.full(10, 0.5))[1]
    best = max(log_density(t) for t in np.linspace(-8, 2, 200))
    assert (best - log_density(found) < 3) == keeps_the_best
