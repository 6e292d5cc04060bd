"""Every scheme has the weak order that it claims, on a Gaussian and on a quartic potential."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import SGHMC, SGLD, SHMC, SGHMCSplit
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE
from numpyro_sgmcmc.adaptation.step_size import limit_step_size_by_noise
from numpyro_sgmcmc.dynamics import OverdampedLangevin, UnderdampedLangevin
from numpyro_sgmcmc.dynamics.integrators import Integrator, Part, compose
from numpyro_sgmcmc.dynamics.langevin import UnderdampedState
from tests.dynamics.examples import EXAMPLES, KINDS, OF_OTHER_KERNELS, SCHEMES
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
LINEAR = [(name, scheme) for name, scheme in SCHEMES if EXAMPLES[name].covariance]


def gaussian_slope(example, step, num_draws):
    covariance = example.covariance(np.linalg.inv(CURVATURE))
    state = example.state(np.zeros(3))
    errors = covariance_errors(step, state, num_draws, STEP_SIZES, CURVATURE, covariance)
    return fitted_slope(STEP_SIZES, errors)


def observables(z):
    return jnp.concatenate([z, jnp.outer(z, z).ravel(), jnp.sin(z.sum(keepdims=True))])


def quartic_state(example, dim):
    return example.state(0.4 + 0.3 * np.arange(dim))


@cache
def quartic_terms(name, dim, order):
    example = EXAMPLES[name]
    z = ravel_pytree(quartic_state(example, dim))[0]
    return semigroup_terms(example.sde(jax.grad(quartic), dim), observables, z, order)


def quartic_slope(name, step, num_draws, order, dim=1):
    errors = local_errors(
        step,
        quartic_state(EXAMPLES[name], dim),
        num_draws,
        jax.grad(quartic),
        observables,
        quartic_terms(name, dim, order),
        SHORT_STEP_SIZES,
    )
    return fitted_slope(SHORT_STEP_SIZES, errors)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_claimed_orders(name):
    example = EXAMPLES[name]
    claimed = {s: scheme.order for s, scheme in example.dynamics.integrators.items()}
    assert claimed == example.orders


@pytest.mark.parametrize(("name", "scheme"), LINEAR)
def test_order_of_stationary_covariance(name, scheme):
    example = EXAMPLES[name]
    slope = gaussian_slope(example, example.step(scheme), example.num_draws(scheme))
    assert slope == pytest.approx(example.orders[scheme], abs=0.2)


def scheme_of(*flows):
    return compose(
        UnderdampedLangevin(FRICTION).flows, Integrator(tuple(Part(*f) for f in flows), 2, 0.3)
    )


def step_of(name, scheme):
    """The scheme's step, or for Lie-Trotter its symmetric conjugate and its number of draws.

    A conjugate's stationary expectations are those of the scheme at another point of its cycle,
    but only the symmetric one is as exact in a single step.
    """
    example = EXAMPLES[name]
    if scheme != "lie_trotter":
        return example.step(scheme), example.num_draws(scheme)
    parts = (
        ("ornstein_uhlenbeck", 0.5),
        ("drift", 0.5),
        ("kick",),
        ("drift", 0.5),
        ("ornstein_uhlenbeck", 0.5),
    )
    return scheme_of(*parts), 2


COUPLED = ["underdamped", "nose_hoover, shared", "riemannian, dense", "riemannian_langevin, dense"]
IN_DIMS = [(n, s, 1) for n, s in SCHEMES] + [
    (n, s, 2) for n, s in SCHEMES if n in COUPLED and step_of(n, s)[1] == 1
]


@pytest.mark.parametrize(
    ("name", "scheme", "dim"),
    [quick_if(n in KINDS | OF_OTHER_KERNELS, n, s, d) for n, s, d in IN_DIMS],
)
def test_weak_order_on_a_quartic(name, scheme, dim):
    step, num_draws = step_of(name, scheme)
    order = EXAMPLES[name].orders[scheme]
    slope = quartic_slope(name, step, num_draws, order, dim)
    assert slope == pytest.approx(order + 1, abs=0.2)


@pytest.mark.parametrize("scheme", ["leapfrog", "baoab"])
def test_positions_without_bias_on_a_gaussian(scheme):
    example = EXAMPLES["underdamped"]
    args = (example.state(np.zeros(3)), example.num_draws(scheme), 0.5, CURVATURE)
    found = stationary_covariance(example.step(scheme), *args)[:3, :3]
    np.testing.assert_allclose(found, np.linalg.inv(CURVATURE), atol=1e-10)


@pytest.mark.parametrize("num_leapfrog", [2, 5])
def test_lie_trotter_of_several_leapfrog_steps(num_leapfrog):
    dynamics = UnderdampedLangevin(FRICTION, num_leapfrog=num_leapfrog)
    inner = dynamics.make_step("lie_trotter")

    def step(state, h, gradient, noise):
        for count in range(num_leapfrog):
            state = inner(state, h / num_leapfrog, gradient, noise[count : count + 1], count)
        return state

    def by_hand(state, h, gradient, noise):
        q, p, _ = state
        t = h / num_leapfrog
        for _ in range(num_leapfrog):
            q = q + t * p / 2
            p = p - t * gradient(q)
            q = q + t * p / 2
        decay = np.exp(-FRICTION * h)
        return UnderdampedState(q, decay * p + np.sqrt(1 - decay**2) * noise[-1])

    example = EXAMPLES["underdamped"]
    assert gaussian_slope(example, step, num_leapfrog) == pytest.approx(2, abs=0.2)
    noise = np.random.default_rng(0).standard_normal((num_leapfrog, 3))
    args = (example.state(np.arange(3.0)), 0.3, jax.grad(quartic), noise)
    for a, b in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(by_hand(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("scheme", ["baoab", "obabo"])
def test_kept_gradient_is_the_one_at_the_position(scheme):
    """One gradient a step does what two would."""
    example = EXAMPLES["underdamped"]
    step, closed = example.dynamics.make_step(scheme), example.step(scheme)
    assert step.num_gradients == 1
    gradient, rng = jax.grad(quartic), np.random.default_rng(0)
    closed_state = example.state(np.array([0.3, -0.4]))
    state = closed_state._replace(gradient=gradient(closed_state.position))
    for _ in range(4):
        noise = rng.standard_normal((step.num_noise, 2))
        state = step(state, 0.4, gradient, noise)
        closed_state = closed(closed_state, 0.4, gradient, noise)
    np.testing.assert_allclose(state.position, closed_state.position, rtol=1e-12)
    np.testing.assert_allclose(state.momentum, closed_state.momentum, rtol=1e-12)


def test_noise_of_another_variance_spoils_the_third_order():
    """The second vector's variance is 1/12; the paper's text leaves it out."""
    example = EXAMPLES["underdamped"]
    right = example.step("mt3")

    def step(state, h, gradient, noise):
        return right(state, h, gradient, noise * np.sqrt([[1.0], [12.0]]))

    assert quartic_slope("underdamped", step, 2, 3) < 3.3


# --- The measures see what they must ------------------------------------------------------------


def friction_on_one_side(_):
    return scheme_of(("drift", 0.5), ("friction", 0.5), ("noisy_kick", 1.0), ("drift", 0.5))


def drift_on_one_side(_):
    return scheme_of(("drift", 1.0), ("friction", 0.5), ("noisy_kick", 1.0), ("friction", 0.5))


def noise_without_step_size(correct):
    def step(state, h, gradient, noise):
        return correct(state, h, gradient, noise / jnp.sqrt(h))

    return step


def noise_by_friction_in_place_of_its_root(correct):
    def step(state, h, gradient, noise):
        return correct(state, h, gradient, jnp.sqrt(FRICTION) * noise)

    return step


def gradient_left_out(correct):
    def step(state, h, gradient, noise):
        return correct(state, h, jnp.zeros_like, noise)

    return step


def noise_twice_at_half_size(_):
    # One normal vector in both halves of a kick in place of two: its variance is doubled.
    halves = scheme_of(
        ("drift", 0.5),
        ("noisy_kick", 0.5),
        ("friction", 1.0),
        ("noisy_kick", 0.5),
        ("drift", 0.5),
    )

    def step(state, h, gradient, noise):
        return halves(state, h, gradient, jnp.concatenate([noise, noise]))

    return step


WRONG = [
    friction_on_one_side,
    drift_on_one_side,
    noise_without_step_size,
    noise_by_friction_in_place_of_its_root,
    gradient_left_out,
    noise_twice_at_half_size,
]


@pytest.mark.parametrize("plant", WRONG)
def test_wrong_step_has_not_the_order_on_a_quartic(plant):
    example = EXAMPLES["underdamped"]
    slope = quartic_slope("underdamped", plant(example.step("symmetric")), 1, 2)
    assert abs(slope - 3) > 0.5


@pytest.mark.parametrize("plant", [w for w in WRONG if w is not gradient_left_out])
def test_wrong_step_has_not_the_order_on_a_gaussian(plant):
    example = EXAMPLES["underdamped"]
    slope = gaussian_slope(example, plant(example.step("symmetric")), 1)
    assert not abs(slope - 2) < 0.5


def test_step_without_gradient_has_no_stationary_covariance():
    example = EXAMPLES["underdamped"]
    step = gradient_left_out(example.step("symmetric"))
    covariance = stationary_covariance(step, example.state(np.zeros(3)), 1, 0.1, CURVATURE)
    assert np.isinf(covariance).all()


# --- What the default step sizes cost -----------------------------------------------------------


def sd_ratio(dynamics, scheme, step_size, curvature):
    step, state = dynamics.make_step(scheme), dynamics.init(jnp.zeros(1), jax.random.key(0))
    covariance = stationary_covariance(
        step, state, step.num_noise, step_size, np.array([[curvature]])
    )
    return np.sqrt(curvature * covariance[0, 0])


DEFAULTS = [(k, s) for k in (SGHMCSplit, SGHMC, SGLD, SHMC) for s in k.integrators]


@pytest.mark.parametrize("curvature", [0.25, 1.0, 2.0, 4.0, 30.0, 1000.0])
@pytest.mark.parametrize(("kernel_class", "scheme"), DEFAULTS)
def test_chosen_step_size_widens_a_gaussian_by_less_than_five_percent(
    kernel_class, scheme, curvature
):
    dynamics = kernel_class(potential_fn=lambda q: q @ q, integrator=scheme).dynamics
    largest = dynamics.integrators[scheme].step_size
    step_size, _ = limit_step_size_by_noise(dynamics, largest, NO_NOISE, curvature, 0.05)
    assert sd_ratio(dynamics, scheme, step_size, curvature) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("dynamics", "scheme", "step_size", "ratio"),
    [
        (UnderdampedLangevin(1.5), "symmetric", 0.3, 0.9958),
        (UnderdampedLangevin(1.5), "euler", 0.1, 1.0014),
        (OverdampedLangevin(), "euler", 0.05, 1 / np.sqrt(1 - 0.025)),
    ],
)
def test_unit_gaussian_at_the_first_step_sizes(dynamics, scheme, step_size, ratio):
    found = sd_ratio(dynamics, scheme, step_size, 1.0)
    assert found == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("overdamped", "euler"), ("underdamped", "euler"), ("underdamped", "symmetric")],
)
@pytest.mark.parametrize("step_size", [0.02, 0.1])
@pytest.mark.parametrize("gradient_variance", [1.0, 200.0])
def test_noise_inflation_is_the_excess_variance(name, scheme, step_size, gradient_variance):
    example, unit = EXAMPLES[name], np.eye(1)
    args = (example.step(scheme), example.state(np.zeros(1)), example.num_draws(scheme), step_size)
    noisy = stationary_covariance(*args, unit, gradient_variance)[0, 0]
    quiet = stationary_covariance(*args, unit)[0, 0]
    predicted = example.dynamics.variance_inflation(gradient_variance, step_size)
    assert noisy / quiet - 1 == pytest.approx(predicted, rel=1e-6)
