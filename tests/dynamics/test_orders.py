"""Every integrator has the weak order that it claims, on a Gaussian and on a quartic potential."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import SGHMC, SGLD, SHMC, SGHMCSplit
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE
from numpyro_sgmcmc.adaptation.step_size import NoiseLimit
from numpyro_sgmcmc.dynamics import (
    MonomialGammaThermostat,
    NoseHooverThermostat,
    OverdampedLangevin,
    UnderdampedLangevin,
)
from numpyro_sgmcmc.dynamics.integrators import Integrator, Part, Step
from numpyro_sgmcmc.dynamics.langevin import UnderdampedState
from tests.dynamics.examples import (
    EXAMPLES,
    INTEGRATORS,
    QUICK_NAMES,
    QUICK_NAMES_OF_OTHER_KERNELS,
)
from tests.dynamics.orders import (
    covariance_errors,
    fitted_slope,
    local_errors,
    semigroup_terms,
    stationary_covariance,
)
from tests.dynamics.sdes import FRICTION, quartic
from tests.quick import quick_if

pytestmark = pytest.mark.usefixtures("x64")

STEP_SIZES = (0.2, 0.1, 0.05, 0.025)
SHORT_STEP_SIZES = (0.02, 0.01, 0.005, 0.0025)
CURVATURE = np.array([[1.0, 0.2, 0.0], [0.2, 0.5, 0.1], [0.0, 0.1, 1.6]])
LINEAR = [(name, integrator) for name, integrator in INTEGRATORS if EXAMPLES[name].covariance]


def fit_order_on_gaussian(example, step, num_noise):
    covariance = example.covariance(np.linalg.inv(CURVATURE))
    state = example.state(np.zeros(3))
    errors = covariance_errors(step, state, num_noise, STEP_SIZES, CURVATURE, covariance)
    return fitted_slope(STEP_SIZES, errors)


def observables(z):
    return jnp.concatenate([z, jnp.outer(z, z).ravel(), jnp.sin(z.sum(keepdims=True))])


def make_quartic_state(example, dim):
    return example.state(0.4 + 0.3 * np.arange(dim))


@cache
def quartic_terms(name, dim, order):
    example = EXAMPLES[name]
    z = ravel_pytree(make_quartic_state(example, dim))[0]
    return semigroup_terms(example.sde(jax.grad(quartic), dim), observables, z, order)


def fit_local_order_on_quartic(name, step, num_noise, order, dim=1):
    errors = local_errors(
        step,
        make_quartic_state(EXAMPLES[name], dim),
        num_noise,
        jax.grad(quartic),
        observables,
        quartic_terms(name, dim, order),
        SHORT_STEP_SIZES,
    )
    return fitted_slope(SHORT_STEP_SIZES, errors)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_integrators_claim_their_orders(name):
    integrators = EXAMPLES[name].dynamics.integrators
    assert {i: integrator.order for i, integrator in integrators.items()} == EXAMPLES[name].orders


@pytest.mark.parametrize(("name", "integrator"), LINEAR)
def test_stationary_covariance_on_gaussian_has_the_claimed_order(name, integrator):
    example = EXAMPLES[name]
    order = fit_order_on_gaussian(example, example.step(integrator), example.num_noise(integrator))
    assert order == pytest.approx(example.orders[integrator], abs=0.2)


def compose_underdamped(*parts):
    integrator = Integrator(tuple(Part(*part) for part in parts), order=2, step_size=0.3)
    return Step.from_flows(UnderdampedLangevin(FRICTION).flows, integrator)


def step_and_num_noise(name, integrator):
    """Return the step, for Lie-Trotter its symmetric conjugate, and its number of normals.

    The stationary expectations of a conjugate are those of the integrator at another point of its
    cycle, but only the symmetric one has the order in a single step.
    """
    example = EXAMPLES[name]
    if integrator != "lie_trotter":
        return example.step(integrator), example.num_noise(integrator)
    half_fluctuation, half_drift = ("ornstein_uhlenbeck", 0.5), ("drift", 0.5)
    parts = (half_fluctuation, half_drift, ("kick",), half_drift, half_fluctuation)
    return compose_underdamped(*parts), 2


COUPLED = ["underdamped", "nose_hoover, shared", "riemannian, dense", "riemannian_langevin, dense"]
IN_TWO = [(n, i) for n, i in INTEGRATORS if n in COUPLED and step_and_num_noise(n, i)[1] == 1]
IN_DIMENSIONS = [(n, i, 1) for n, i in INTEGRATORS] + [(n, i, 2) for n, i in IN_TWO]


@pytest.mark.parametrize(
    ("name", "integrator", "dim"),
    [
        quick_if(
            n in QUICK_NAMES | QUICK_NAMES_OF_OTHER_KERNELS and d == 1 + ((n, i) in IN_TWO), n, i, d
        )
        for n, i, d in IN_DIMENSIONS
    ],
)
def test_local_error_on_quartic_has_the_claimed_order(name, integrator, dim):
    step, num_noise = step_and_num_noise(name, integrator)
    order = EXAMPLES[name].orders[integrator]
    slope = fit_local_order_on_quartic(name, step, num_noise, order, dim)
    assert slope == pytest.approx(order + 1, abs=0.2)


@pytest.mark.parametrize("integrator", ["leapfrog", "baoab"])
def test_position_covariance_on_gaussian_is_exact(integrator):
    example = EXAMPLES["underdamped"]
    args = (example.state(np.zeros(3)), example.num_noise(integrator), 0.5, CURVATURE)
    covariance = stationary_covariance(example.step(integrator), *args)[:3, :3]
    np.testing.assert_allclose(covariance, np.linalg.inv(CURVATURE), atol=1e-10)


@pytest.mark.parametrize("num_leapfrog", [2, 5])
def test_lie_trotter_with_several_leapfrog_steps_has_order_two(num_leapfrog):
    dynamics = UnderdampedLangevin(FRICTION, num_leapfrog=num_leapfrog)
    inner = dynamics.make_step("lie_trotter")

    def step(state, h, gradient, normals):
        for k in range(num_leapfrog):
            state = inner(state, h / num_leapfrog, gradient, normals[k : k + 1], k)
        return state

    def explicit_step(state, h, gradient, normals):
        q, p, _ = state
        t = h / num_leapfrog
        for _ in range(num_leapfrog):
            q = q + t * p / 2
            p = p - t * gradient(q)
            q = q + t * p / 2
        decay = np.exp(-FRICTION * h)
        return UnderdampedState(q, decay * p + np.sqrt(1 - decay**2) * normals[-1])

    example = EXAMPLES["underdamped"]
    assert fit_order_on_gaussian(example, step, num_leapfrog) == pytest.approx(2, abs=0.2)
    normals = np.random.default_rng(0).standard_normal((num_leapfrog, 3))
    args = (example.state(np.arange(3.0)), 0.3, jax.grad(quartic), normals)
    leaves = jax.tree.leaves(step(*args)), jax.tree.leaves(explicit_step(*args))
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("integrator", ["baoab", "obabo"])
def test_step_with_stored_gradient_equals_that_with_two_gradients(integrator):
    example = EXAMPLES["underdamped"]
    step, step_with_two = example.dynamics.make_step(integrator), example.step(integrator)
    assert step.num_gradients == 1
    gradient, rng = jax.grad(quartic), np.random.default_rng(0)
    expected = example.state(np.array([0.3, -0.4]))
    state = expected._replace(gradient=gradient(expected.position))
    for _ in range(4):
        normals = rng.standard_normal((step.num_noise, 2))
        state = step(state, 0.4, gradient, normals)
        expected = step_with_two(expected, 0.4, gradient, normals)
    np.testing.assert_allclose(state.position, expected.position, rtol=1e-12)
    np.testing.assert_allclose(state.momentum, expected.momentum, rtol=1e-12)


def test_mt3_with_second_noise_of_unit_variance_is_not_of_order_three():
    """The second vector has the variance 1/12, which the paper's text omits."""
    correct = EXAMPLES["underdamped"].step("mt3")

    def step(state, h, gradient, normals):
        return correct(state, h, gradient, normals * np.sqrt([[1.0], [12.0]]))

    assert fit_local_order_on_quartic("underdamped", step, 2, 3) < 3.3


# --- The measured order of a wrong step is not the claimed one ----------------------------------


def friction_on_one_side(_):
    return compose_underdamped(("drift", 0.5), ("friction", 0.5), ("noisy_kick",), ("drift", 0.5))


def drift_on_one_side(_):
    return compose_underdamped(("drift",), ("friction", 0.5), ("noisy_kick",), ("friction", 0.5))


def noise_without_step_size(correct):
    def step(state, h, gradient, normals):
        return correct(state, h, gradient, normals / jnp.sqrt(h))

    return step


def noise_by_friction_not_its_root(correct):
    def step(state, h, gradient, normals):
        return correct(state, h, gradient, jnp.sqrt(FRICTION) * normals)

    return step


def without_gradient(correct):
    def step(state, h, gradient, normals):
        return correct(state, h, jnp.zeros_like, normals)

    return step


def one_normal_for_two_kicks(_):
    # The same normal vector in both halves of a kick doubles the variance.
    half_drift, half_kick = ("drift", 0.5), ("noisy_kick", 0.5)
    halves = compose_underdamped(half_drift, half_kick, ("friction",), half_kick, half_drift)

    def step(state, h, gradient, normals):
        return halves(state, h, gradient, jnp.concatenate([normals, normals]))

    return step


WRONG = [
    friction_on_one_side,
    drift_on_one_side,
    noise_without_step_size,
    noise_by_friction_not_its_root,
    without_gradient,
    one_normal_for_two_kicks,
]


@pytest.mark.parametrize("make_wrong", WRONG)
def test_local_error_of_wrong_step_has_another_order(make_wrong):
    step = make_wrong(EXAMPLES["underdamped"].step("symmetric"))
    assert abs(fit_local_order_on_quartic("underdamped", step, 1, 2) - 3) > 0.5


@pytest.mark.parametrize("make_wrong", [w for w in WRONG if w is not without_gradient])
def test_stationary_covariance_of_wrong_step_has_another_order(make_wrong):
    example = EXAMPLES["underdamped"]
    order = fit_order_on_gaussian(example, make_wrong(example.step("symmetric")), 1)
    assert not abs(order - 2) < 0.5


def test_stationary_covariance_of_step_without_gradient_is_infinite():
    example = EXAMPLES["underdamped"]
    step = without_gradient(example.step("symmetric"))
    covariance = stationary_covariance(step, example.state(np.zeros(3)), 1, 0.1, CURVATURE)
    assert np.isinf(covariance).all()


# --- Discretisation error at the default step sizes ---------------------------------------------


def compute_sd_ratio(dynamics, integrator, step_size, curvature):
    """Return the SD of the integrator's stationary distribution over the exact one."""
    step, state = dynamics.make_step(integrator), dynamics.init(jnp.zeros(1), jax.random.key(0))
    covariance = stationary_covariance(
        step, state, step.num_noise, step_size, np.array([[curvature]])
    )
    return np.sqrt(curvature * covariance[0, 0])


KERNELS = [(k, i) for k in (SGHMCSplit, SGHMC, SGLD, SHMC) for i in k.integrators]


@pytest.mark.parametrize("curvature", [0.25, 1.0, 2.0, 4.0, 30.0, 1000.0])
@pytest.mark.parametrize(("kernel_class", "integrator"), KERNELS)
def test_default_step_size_biases_gaussian_sd_by_less_than_five_percent(
    kernel_class, integrator, curvature
):
    dynamics = kernel_class(potential_fn=lambda q: q @ q, integrator=integrator).dynamics
    largest = dynamics.integrators[integrator].step_size
    step_size, _ = NoiseLimit(dynamics, largest, curvature, 0.05).limit_step_size(NO_NOISE)
    ratio = compute_sd_ratio(dynamics, integrator, step_size, curvature)
    assert ratio == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("dynamics", "integrator", "step_size", "ratio"),
    [
        (UnderdampedLangevin(1.5), "symmetric", 0.3, 0.9958),
        (UnderdampedLangevin(1.5), "euler", 0.1, 1.0014),
        (OverdampedLangevin(), "euler", 0.05, 1 / np.sqrt(1 - 0.025)),
    ],
)
def test_standard_gaussian_sd_at_default_step_size(dynamics, integrator, step_size, ratio):
    assert compute_sd_ratio(dynamics, integrator, step_size, 1.0) == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "integrator"),
    [("overdamped", "euler"), ("underdamped", "euler"), ("underdamped", "symmetric")],
)
@pytest.mark.parametrize("step_size", [0.02, 0.1])
@pytest.mark.parametrize("gradient_variance", [1.0, 200.0])
def test_variance_inflation_equals_that_of_the_stationary_covariance(
    name, integrator, step_size, gradient_variance
):
    example = EXAMPLES[name]
    step, state = example.step(integrator), example.state(np.zeros(1))
    args = (step, state, example.num_noise(integrator), step_size, np.eye(1))
    ratio = (
        stationary_covariance(*args, gradient_variance)[0, 0] / stationary_covariance(*args)[0, 0]
    )
    predicted = example.dynamics.variance_inflation(gradient_variance, step_size)
    assert ratio - 1 == pytest.approx(predicted, rel=1e-6)


@pytest.mark.parametrize(
    ("dynamics", "ratio"),
    [
        (NoseHooverThermostat(), 0.0),
        (MonomialGammaThermostat(), 0.0),
        (NoseHooverThermostat(per_coordinate=False), 1.0),
        (MonomialGammaThermostat(sigma_theta=0.1), 1.0),
        (UnderdampedLangevin(), 1.0),
    ],
)
def test_thermostats_per_coordinate_balance_noise_that_is_the_same_everywhere(dynamics, ratio):
    """Except the noise of the position, which no thermostat balances."""
    position_dependent = dynamics.variance_inflation(0.1, 1e-4)
    constant = dynamics.variance_inflation(0.1, 1e-4, position_dependent_fraction=0.0)
    assert constant / position_dependent == pytest.approx(ratio, abs=1e-4)


# --- UBU: free motion and strong order ----------------------------------------------------------


def free_motion(friction, time, dtype):
    """Return the mean's matrix and the noise's factor of position and momentum, each 2 by 2."""
    dynamics = UnderdampedLangevin(friction)

    def move(z, normals):
        state = UnderdampedState(z[:1], z[1:])
        moved = dynamics.flows["free_motion"].apply(state, time, None, normals[:, None])
        return jnp.concatenate([moved.position, moved.momentum])

    zeros = jnp.zeros(2, dtype)
    return [np.asarray(x, float) for x in jax.jacobian(move, (0, 1))(zeros, zeros)]


@pytest.mark.parametrize("friction", [1e-3, 1.5, 40.0])
@pytest.mark.parametrize("time", [1e-4, 0.15, 1.0])
def test_free_motion_has_the_exact_moments_in_float32(friction, time):
    """Reference: the integrals of the Ornstein-Uhlenbeck process by quadrature."""
    mean, factor = free_motion(friction, jnp.float32(time), jnp.float32)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    s, weights = time * (nodes + 1) / 2, time * weights / 2
    by_noise = np.stack([-np.expm1(-friction * s) / friction, np.exp(-friction * s)])
    covariance = 2 * friction * (by_noise * weights) @ by_noise.T
    expected = [[1, -np.expm1(-friction * time) / friction], [0, np.exp(-friction * time)]]
    np.testing.assert_allclose(mean, expected, rtol=2e-6)
    np.testing.assert_allclose(factor @ factor.T, covariance, rtol=1e-5)
    conditional = covariance[0, 0] - covariance[0, 1] ** 2 / covariance[1, 1]
    np.testing.assert_allclose(factor[0, 1] ** 2, conditional, rtol=1e-5)


@pytest.mark.parametrize(("integrator", "order"), [("ubu", 2), ("symmetric", 1)])
def test_strong_order_along_one_brownian_path(integrator, order):
    """Paths of 16 to 128 steps on a quartic, from the increments of the finest."""
    num_paths, num_finest = 200, 1024
    fine_time = 2.0 / num_finest
    _, factor = free_motion(FRICTION, fine_time / 2, float)
    rng = np.random.default_rng(0)
    # Noise of position and momentum over each half of the finest steps.
    noise = rng.standard_normal((2 * num_finest, num_paths, 2)) @ factor.T
    position = jnp.asarray(rng.standard_normal((num_paths, 1)))
    step = UnderdampedLangevin(FRICTION).make_step(integrator)
    gradient = jax.vmap(jax.grad(quartic))

    def end(noise, time):
        """Return positions after steps whose halves have the given noise."""
        _, half_factor = free_motion(FRICTION, time / 2, float)
        normals = (noise @ np.linalg.inv(half_factor).T).reshape(-1, 2, num_paths, 2)
        # Per step: the normals of momentum and position in the first half, then in the second.
        normals = np.moveaxis(normals, 3, 2).reshape(-1, 4, num_paths, 1)
        if integrator == "symmetric":  # the momentum's noise alone, as one normal
            normals = (normals[:, :1] + normals[:, 2:3]) / np.sqrt(2)
        state = UnderdampedState(position, jnp.zeros_like(position))
        run = jax.jit(
            lambda s, n: jax.lax.scan(lambda s, n: (step(s, time, gradient, n), None), s, n)[0]
        )
        return np.asarray(run(state, normals).position)

    times, ends = [], []
    while len(noise) >= 32:
        time = 4.0 / len(noise)
        times.append(time)
        ends.append(end(noise, time))
        # The noise of two motions in a row.
        mean, _ = free_motion(FRICTION, time / 2, float)
        noise = noise[::2] @ mean.T + noise[1::2]
    errors = [np.sqrt(np.square(e - ends[0]).mean()) for e in ends[3:]]
    assert fitted_slope(times[3:], errors) == pytest.approx(order, abs=0.2)
