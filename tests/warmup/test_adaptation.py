"""The pieces of the warm-up, each where its answer is known."""

from functools import cache, partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.optimize
from jax import random
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import SGMGT, SGNHT, SGHMCSplit
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import IID, Blocks
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.dynamics import NoseHoover, Overdamped, RiemannianLangevin, Underdamped
from numpyro_sgmcmc.posterior.estimators import Plain
from numpyro_sgmcmc.posterior.model import model_target
from numpyro_sgmcmc.posterior.target import function_target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup import pilot
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential, draw_subset
from numpyro_sgmcmc.warmup.factors import (
    factor_from_curvature,
    factor_from_draws,
    hessian_by_products,
    largest_curvature,
    symmetric_root,
)
from numpyro_sgmcmc.warmup.noise import NO_NOISE, Noise, draw_rows
from numpyro_sgmcmc.warmup.step_size import (
    MAX_NUM_STEPS,
    choose_num_steps,
    choose_step_size,
    shorten_until_right,
)
from numpyro_sgmcmc.warmup.warm_start import approach, centre, lbfgs, newton, newton_from
from tests.contract.kernels import BATCH, survey, survey_data


def random_covariance(d, seed=0, correlation=None):
    rng = np.random.default_rng(seed)
    if correlation is not None:
        return (1 - correlation) * np.eye(d) + correlation
    a = rng.standard_normal((d, 2 * d))
    return a @ a.T / (2 * d)


class Quadratic:
    """The potential of a Gaussian, as :class:`EagerPotential` shows it; counts the calls."""

    def __init__(self, hessian, mode=0.0):
        self.matrix, self.mode, self.num_calls = hessian, mode + np.zeros(len(hessian)), 0

    def value(self, position):
        return self.expansion(position)[0]

    def gradient(self, position):
        return self.expansion(position)[1]

    def expansion(self, position):
        self.num_calls += 1
        slope = self.matrix @ (position - self.mode)
        return (position - self.mode) @ slope / 2, slope, self.matrix

    def hessian_products(self, position, vectors):
        self.num_calls += 1
        return vectors @ self.matrix


def eager_potential(fn, dim):
    """The package's view of a potential function."""
    target = function_target(fn, jnp.zeros(dim))
    return EagerPotential(target, Arguments())


# --- Roots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 20])
@pytest.mark.parametrize("span", [0, 6])
def test_symmetric_root(d, span):
    scale = 10.0 ** np.linspace(-span, span, d)
    matrix = random_covariance(d) * np.outer(scale, scale)
    root, inverse_root = symmetric_root(matrix), symmetric_root(matrix, inverse=True)
    np.testing.assert_allclose(
        (root @ root.T) / np.outer(scale, scale), random_covariance(d), atol=1e-12
    )
    # The whitened matrix is the identity, whatever the units of the columns.
    np.testing.assert_allclose(inverse_root.T @ matrix @ inverse_root, np.eye(d), atol=1e-10)


def test_symmetric_root_turns_negative_curvature_round():
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    matrix = np.diag([2.0, -2.0, 1.0])
    np.testing.assert_allclose(symmetric_root(matrix) @ symmetric_root(matrix).T, np.abs(matrix))
    indefinite = vectors @ np.diag([3.0, -0.5, 1.0]) @ vectors.T
    root = symmetric_root(indefinite, inverse=True)
    values = np.linalg.eigvalsh(root.T @ indefinite @ root)
    np.testing.assert_allclose(np.abs(values), 1, atol=1e-10)
    assert (values < 0).sum() == 1


@pytest.mark.parametrize("matrix", [np.ones((2, 2)), np.diag([1.0, 0.0])], ids=str)
def test_symmetric_root_of_a_singular_matrix_is_finite(matrix):
    root = symmetric_root(matrix)
    np.testing.assert_allclose(root @ root.T, matrix, atol=1e-6)
    assert np.isfinite(symmetric_root(matrix, inverse=True)).all()


# --- The factor from curvature ------------------------------------------------------------------


@pytest.mark.parametrize("d", [3, 64, 70])
def test_hessian_by_products(d):
    matrix = random_covariance(d)
    np.testing.assert_allclose(hessian_by_products(Quadratic(matrix), np.zeros(d)), matrix)


def test_dense_factor_is_the_root_of_the_inverse():
    hessian = random_covariance(6)
    factor = factor_from_curvature(hessian, None, True, None, np.zeros(6))
    np.testing.assert_allclose(factor @ factor.T, np.linalg.inv(hessian), rtol=1e-8)


def test_masked_factor_has_the_blocks_of_the_inverse():
    hessian, mask = random_covariance(5), np.eye(5, dtype=bool)
    mask[:2, :2] = mask[3:, 3:] = True
    factor = factor_from_curvature(hessian, mask, True, None, np.zeros(5))
    np.testing.assert_allclose(
        factor @ factor.T, np.where(mask, np.linalg.inv(hessian), 0), atol=1e-10
    )


def test_diagonal_factor():
    hessian = random_covariance(6)
    factor = factor_from_curvature(hessian, None, False, None, np.zeros(6))
    np.testing.assert_allclose(factor, 1 / np.sqrt(np.diagonal(hessian)))


def test_diagonal_factor_from_products():
    # The estimate is exact where the Hessian is diagonal, and good where it nearly is.
    scales = 10.0 ** np.linspace(-1, 1, 40)
    diagonal = Quadratic(np.diag(scales))
    factor = factor_from_curvature(None, None, False, diagonal, np.zeros(40))
    floor = 0.1 * np.median(scales)
    np.testing.assert_allclose(factor, 1 / np.sqrt(np.maximum(scales, floor)))
    near = Quadratic(random_covariance(40, correlation=0.05))
    factor = factor_from_curvature(None, None, False, near, np.zeros(40))
    np.testing.assert_allclose(factor, 1, atol=0.15)
    assert near.num_calls == 1


def test_flat_coordinates_have_a_finite_factor():
    factor = factor_from_curvature(np.diag([1.0, 0.0]), None, False, None, np.zeros(2))
    assert np.isfinite(factor).all()
    assert factor[1] > 100


# --- The factor from draws ----------------------------------------------------------------------

LOWER = np.array([[2.0, 0.0], [0.7, 0.1]])
FACTORS = {"dense": LOWER, "diagonal": np.array([3.0, 0.2])}


def whitened_covariance(factor, renewed):
    """Covariance of the renewed coordinates in the old ones."""
    if factor.ndim == 1:
        return np.square(renewed / factor)
    step = np.linalg.solve(factor, renewed)
    return step @ step.T


@pytest.mark.parametrize("kind", FACTORS)
def test_many_draws_are_believed(kind):
    factor = FACTORS[kind]
    covariance = np.array([[2.0, 0.5], [0.5, 0.6]])
    covariance = covariance if kind == "dense" else np.diagonal(covariance)
    renewed = factor_from_draws(factor, covariance, 1e12, None)
    np.testing.assert_allclose(whitened_covariance(factor, renewed), covariance, rtol=1e-6)


@pytest.mark.parametrize("kind", FACTORS)
def test_few_draws_change_nothing(kind):
    factor = FACTORS[kind]
    covariance = np.array([[1.3, 0.2], [0.2, 0.9]])
    covariance = covariance if kind == "dense" else np.diagonal(covariance)
    renewed = factor_from_draws(factor, covariance, 5.0, None)
    identity = np.eye(2) if kind == "dense" else np.ones(2)
    np.testing.assert_allclose(whitened_covariance(factor, renewed), identity, atol=1e-12)


@pytest.mark.parametrize("kind", FACTORS)
def test_shrinkage_is_sampling_variance_over_distance(kind):
    factor = FACTORS[kind]
    covariance = np.array([[2.0, 0.5], [0.5, 0.6]])
    identity, variance = np.eye(2), 2 * 3 / 20
    if kind == "diagonal":
        covariance, identity, variance = np.diagonal(covariance), np.ones(2), 2 * 2 / 20
    shrinkage = variance / np.square(covariance - identity).sum()
    assert 0 < shrinkage < 1
    expected = (1 - shrinkage) * covariance + shrinkage * identity
    renewed = factor_from_draws(factor, covariance, 20.0, None)
    np.testing.assert_allclose(whitened_covariance(factor, renewed), expected, rtol=1e-8)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("num_draws", [60, 300])
def test_a_right_factor_is_spoiled_less_than_by_the_draws_themselves(is_dense, num_draws):
    rng, d = np.random.default_rng(0), 20
    factor = np.eye(d) if is_dense else np.ones(d)
    kept, believed = [], []
    for _ in range(20):
        draws = rng.standard_normal((num_draws, d))
        covariance = np.cov(draws, rowvar=False) if is_dense else draws.var(0, ddof=1)
        renewed = factor_from_draws(factor, covariance, num_draws, None)
        kept.append(np.linalg.norm(whitened_covariance(factor, renewed) - factor))
        believed.append(np.linalg.norm(covariance - factor))
    assert np.mean(kept) < 0.2 * np.mean(believed)


def test_a_wrong_factor_is_mended_by_as_few_draws():
    rng, d = np.random.default_rng(0), 20
    truth = random_covariance(d, correlation=0.8)
    draws = rng.standard_normal((300, d)) @ np.linalg.cholesky(truth).T
    renewed = factor_from_draws(np.eye(d), np.cov(draws, rowvar=False), 300, None)
    spread = np.linalg.eigvalsh(np.linalg.solve(renewed, truth) @ np.linalg.inv(renewed).T)
    assert 0.4 < spread.min() < spread.max() < 2.0
    assert np.linalg.eigvalsh(truth).max() > 10


def test_mask_keeps_blocks_apart():
    covariance, mask = random_covariance(4), np.eye(4, dtype=bool)
    mask[:2, :2] = True
    renewed = factor_from_draws(np.eye(4), covariance, 1e12, mask)
    np.testing.assert_allclose(renewed @ renewed.T, np.where(mask, covariance, 0), atol=1e-10)


def test_stuck_or_lost_coordinates_keep_a_usable_factor():
    renewed = factor_from_draws(np.ones(3), np.array([0.0, 1.0, 1e12]), 1e9, None)
    assert (renewed >= 0.1).all()
    assert (renewed <= 10).all()


# --- Curvature ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factor", [np.array([1.0, 0.1, 5.0]), np.tril(random_covariance(3))], ids=["diagonal", "dense"]
)
def test_largest_curvature(factor):
    hessian = random_covariance(3, seed=1)
    dense = np.diag(factor) if factor.ndim == 1 else factor
    expected = np.linalg.eigvalsh(dense.T @ hessian @ dense).max()
    whitening = Whitening(np.zeros(3), factor, np.zeros(3))
    assert largest_curvature(hessian, whitening, None) == pytest.approx(expected)
    assert largest_curvature(None, whitening, Quadratic(hessian)) == pytest.approx(
        expected, rel=0.02
    )
    assert largest_curvature(-hessian, whitening, None) == pytest.approx(expected)


def test_correlated_columns_are_stiff_for_a_diagonal_factor():
    # What decides the step: a diagonal factor leaves an eigenvalue of about d times correlation.
    covariance = random_covariance(20, correlation=0.95)
    hessian = np.linalg.inv(covariance)
    whitening = Whitening(np.zeros(20), np.sqrt(np.diagonal(covariance)), np.zeros(20))
    assert largest_curvature(hessian, whitening, None) == pytest.approx(20, rel=0.01)
    dense = whitening._replace(factor=np.linalg.cholesky(covariance))
    assert largest_curvature(hessian, dense, None) == pytest.approx(1)


def test_curvature_that_is_not_finite_counts_as_one():
    whitening = Whitening(np.zeros(2), np.ones(2), np.zeros(2))
    assert largest_curvature(np.full((2, 2), np.nan), whitening, None) == 1.0
    assert largest_curvature(None, whitening, Quadratic(np.full((2, 2), np.nan))) == 1.0
    assert largest_curvature(None, whitening, Quadratic(np.zeros((2, 2)))) == 1.0


# --- Step size ----------------------------------------------------------------------------------

DYNAMICS = [Overdamped(), Underdamped(1.5), Underdamped(0.2)]


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
def test_largest_step_where_nothing_stands_against_it(dynamics):
    for curvature in (0.1, 1.0):
        assert choose_step_size(dynamics, 0.2, NO_NOISE, curvature, 0.05) == (0.2, 0.0)


@pytest.mark.parametrize(
    ("dynamics", "power"), [(Overdamped(), 1), (Underdamped(1.5), 0.5)], ids=repr
)
def test_stiff_directions_shorten_the_step(dynamics, power):
    at = {c: choose_step_size(dynamics, 0.2, NO_NOISE, c, 0.05)[0] for c in (50.0, 5000.0)}
    assert at[50.0] < 0.2
    assert at[50.0] / at[5000.0] == pytest.approx(100**power)


def noise_of(variance):
    return Noise(variance, 1.0, variance)


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
@pytest.mark.parametrize("target_bias", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("variance", [0.01, 1.0, 10.0])
def test_noise_shortens_the_step_until_its_share_of_the_bias_is_kept(
    dynamics, target_bias, variance
):
    step_size, inflation = choose_step_size(dynamics, 0.2, noise_of(variance), 1.0, target_bias)
    assert 0 < step_size <= 0.2
    assert inflation == pytest.approx(dynamics.noise_inflation(variance, step_size))
    shortest = dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    assert np.sqrt(1 + inflation) - 1 < target_bias or step_size == pytest.approx(shortest)
    assert choose_num_steps(dynamics.relaxation_time(step_size), step_size) <= MAX_NUM_STEPS


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
def test_step_is_not_shorter_than_a_draw_can_pay_for(dynamics):
    step_size, inflation = choose_step_size(dynamics, 0.2, noise_of(1e6), 1.0, 0.05)
    assert choose_num_steps(dynamics.relaxation_time(step_size), step_size) == MAX_NUM_STEPS
    assert inflation > 1


def test_thermostats_take_longer_steps_the_less_the_noise_varies():
    steps = [
        choose_step_size(NoseHoover(1.5), 0.3, Noise(10.0, v, 10.0), 1.0, 0.05)[0]
        for v in (1.0, 0.3, 0.1, 0.0)
    ]
    assert (np.diff(steps) > 0).all()
    assert steps[0] == pytest.approx(
        choose_step_size(NoseHoover(1.5, False), 0.3, noise_of(10.0), 1.0, 0.05)[0], rel=0.1
    )


@pytest.mark.parametrize(("spread", "varying"), [(0.0, 0.0), (0.3, 0.3), (3.0, 1.0)])
def test_share_of_noise_that_varies(spread, varying):
    """Not what variances measured on few numbers differ by of themselves: a quarter here."""
    rng = np.random.default_rng(0)
    size = 2.0 * np.exp(spread * rng.standard_normal((400, 1)) - spread**2 / 2)
    numbers = np.sqrt(size)[..., None] * rng.standard_normal((400, 5, 32))
    found = Noise.of(numbers.var(-1, ddof=1), 32, is_cheap=True)
    assert found.varying == pytest.approx(varying, abs=0.07)
    if spread < 1:
        assert found.mean == pytest.approx(2.0, rel=0.1)
        assert 1.0 <= found.variance / found.mean < 1.1


def test_less_noise_is_never_a_shorter_step():
    steps = [
        choose_step_size(Underdamped(1.5), 0.3, noise_of(v), 1.0, 0.05)[0]
        for v in np.geomspace(1e-3, 1e5, 50)
    ]
    assert (np.diff(steps) <= 0).all()


@pytest.mark.parametrize(
    ("time", "step_size", "num_steps"),
    [
        (3.0, 0.3, 10),
        (3.0, 0.29, 11),
        (2.0, 5.0, 1),
        (2.0, 1e-9, MAX_NUM_STEPS),
        (2.0, np.float32(0.1), 20),
    ],
)
def test_choose_num_steps(time, step_size, num_steps):
    assert choose_num_steps(time, step_size) == num_steps


# --- Finding the mode ---------------------------------------------------------------------------

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


# --- The anchor ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_whitening(factor):
    dense = np.diag(factor) if factor.ndim == 1 else factor
    whitening = Whitening(np.array([1.0, 2.0]), factor, np.zeros(2))
    v = np.random.default_rng(0).standard_normal((3, 2))
    np.testing.assert_allclose(whitening.push(v), v @ dense.T)
    np.testing.assert_allclose(whitening.pull(v), v @ dense)
    np.testing.assert_allclose(whitening.whiten(whitening.push(v)), v)
    np.testing.assert_allclose(whitening.whiten(whitening.push(v[0])), v[0])
    coordinates = whitening.cast(jnp.float32)
    for x in v.astype(np.float32):
        np.testing.assert_allclose(coordinates.push(x), whitening.push(x), rtol=1e-5)
        np.testing.assert_allclose(coordinates.pull(x), whitening.pull(x), rtol=1e-5)
        np.testing.assert_allclose(coordinates.whiten(coordinates.push(x)), x, rtol=1e-4)
        np.testing.assert_allclose(
            coordinates.position(x), whitening.anchor + whitening.push(x), rtol=1e-5
        )
    covariance = coordinates.inverse_mass_matrix
    np.testing.assert_allclose(
        np.diag(covariance) if factor.ndim == 1 else covariance, dense @ dense.T, rtol=1e-5
    )
    assert whitening.is_finite()
    assert not whitening._replace(hessian=np.array([[np.inf]])).is_finite()


# --- Rows for the warm-up -----------------------------------------------------------------------


def target_of(*plates):
    return SimpleNamespace(plates=tuple(Plate(*p) for p in plates))


def test_subset():
    assert draw_subset(target_of(("a", 20_000, 10)), 0) is None
    subset = draw_subset(target_of(("a", 10**6, 10), ("b", 30, 5)), 0)
    assert subset["a"].shape == (20_000,)
    assert (np.diff(subset["a"]) >= 0).all()
    assert 0 <= subset["a"].min() < 1000
    assert 999_000 < subset["a"].max() < 10**6
    assert abs(subset["a"].mean() / 10**6 - 0.5) < 5 / np.sqrt(12 * 20_000)
    np.testing.assert_array_equal(subset["b"], np.arange(30))


def test_rows_for_measuring_noise():
    target = target_of(("a", 50, 20), ("b", 7, 7))
    rng = np.random.default_rng(0)
    for scheme in (IID(), Blocks()):
        rows = draw_rows(target, rng, (300, 4), scheme)
        assert rows["a"].shape == (300, 4, 20)
        assert rows["b"].shape == (300, 4, 7)
        for name, size in (("a", 50), ("b", 7)):
            assert rows[name].dtype == np.int32
            counts = np.bincount(rows[name].ravel(), minlength=size)
            assert counts.size == size
            assert np.abs(counts / counts.mean() - 1).max() < 0.2
    np.testing.assert_array_equal(rows["a"], (rows["a"][..., :1] + np.arange(20)) % 50)


# --- The potential --------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("kernel_class", "settings", "minibatch"),
    [
        (SGHMCSplit, {}, "blocks"),
        (SGHMCSplit, {"gradient": "plain"}, "blocks"),
        (SGNHT, {}, "blocks"),
        (SGNHT, {"gradient": "plain"}, "iid"),
        (SGMGT, {"gradient": "plain"}, "blocks"),
        (SGMGT, {"gradient": "plain", "step_size": 0.1}, "iid"),
    ],
)
def test_rows_are_independent_where_a_thermostat_is_at_work(kernel_class, settings, minibatch):
    """Over an epoch their noise would cancel, and the thermostat cool the positions too far."""
    kernel = kernel_class(survey, **settings)
    kernel.init(random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})
    assert kernel.adaptation.minibatch.name == minibatch


def test_thermostat_on_epochs_is_warned_of():
    kernel = SGNHT(survey, gradient="plain", minibatch="epoch")
    with pytest.warns(UserWarning, match="sds may be too narrow"):
        kernel.init(random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})


def test_potential_is_infinite_where_the_potential_is_not_finite():
    potential = eager_potential(lambda q: jnp.log(q).sum(), 2)
    assert potential.value(np.array([1.0, -1.0])) == np.inf
    assert not potential.is_finite(np.array([1.0, -1.0]))
    assert potential.value(np.array([1.0, np.e])) == pytest.approx(1)
    assert potential.is_finite(np.array([1.0, 2.0]))
    # A finite value beside an infinite slope is no start either.
    assert not eager_potential(lambda q: jnp.sqrt(q).sum(), 1).is_finite(np.zeros(1))


def test_potential_keeps_the_digits_of_its_callers():
    potential = eager_potential(lambda q: jnp.square(q).sum(), 2)
    value, gradient, hessian = potential.expansion(np.array([1.0, 2.0]))
    assert isinstance(value, float)
    assert gradient.dtype == hessian.dtype == np.float64
    np.testing.assert_allclose(gradient, [2, 4])
    np.testing.assert_allclose(hessian, 2 * np.eye(2))
    np.testing.assert_allclose(potential.hessian_products(np.zeros(2), np.eye(2)), 2 * np.eye(2))
    np.testing.assert_allclose(potential.gradient(np.array([1.0, 2.0])), [2, 4])


def test_simulated_chains_know_what_a_metric_does_to_noise():
    dynamics = RiemannianLangevin(lambda q: jnp.full((), 4.0))
    of = partial(shorten_until_right, dynamics, "euler", 0.02, 20, 0.05)
    exact, excess = of()
    assert exact == 0.02
    assert excess == pytest.approx((1 / (1 - 0.02 * 4 / 2)) ** 0.5 - 1, abs=0.01)
    noisy, excess = of(variance=3.0)
    assert noisy == pytest.approx(0.6 * 0.02)
    assert 0.02 < excess < 0.06


@pytest.mark.parametrize("fitting", [pilot._NUMBERS_A_CALL, 20_000, 1])
def test_pilot_draws_whose_noise_fits_into_memory(monkeypatch, fitting):
    """A hundred steps a call, ten, and five: as many draws, of the same posterior."""
    monkeypatch.setattr(pilot, "_NUMBERS_A_CALL", fitting)
    dim = 60
    target = function_target(lambda z: 0.5 * z @ z, jnp.zeros(dim))
    origin = Whitening(np.zeros(dim), np.ones(dim), np.zeros(dim)).cast(target.dtype)
    rng, taken = np.random.default_rng(0), []
    advance = pilot._advance
    monkeypatch.setattr(
        pilot, "_advance", lambda *args: taken.append(args[5][1].shape) or advance(*args)
    )
    start = rng.standard_normal((16, dim))
    draws = pilot.run_pilot(target, Arguments(), origin, start, 0.3, 400, rng, Plain())
    assert draws.shape == (16, 40, dim)
    assert sum(shape[1] for shape in taken) == 400
    assert max(np.prod(shape) for shape in taken) <= max(fitting, 16 * 5 * dim * 2)
    # A time of 1.5 apart, some 12,000 are independent: bounds of about four standard errors.
    assert abs(draws.var() - 1) < 0.05
    assert abs(draws.mean()) < 0.05
