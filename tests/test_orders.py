"""Every scheme has the weak order that it claims, on a Gaussian and on a quartic potential."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import KERNELS
from jax.flatten_util import ravel_pytree
from orders import (
    covariance_errors,
    fitted_slope,
    local_errors,
    semigroup_terms,
    stationary_covariance,
)
from sdes import EXAMPLES, FRICTION, SCHEMES, quartic

from numpyro_sgmcmc.adaptation.step_size import choose_step_size
from numpyro_sgmcmc.dynamics import Overdamped, Underdamped
from numpyro_sgmcmc.dynamics.underdamped import UnderdampedState
from numpyro_sgmcmc.integrators import Scheme, compose

pytestmark = pytest.mark.usefixtures("x64", "quick_compile")

STEP_SIZES = (0.2, 0.1, 0.05, 0.025)
SHORT_STEP_SIZES = (0.05, 0.025, 0.0125, 0.00625)
CURVATURE = np.array([[1.0, 0.2, 0.0], [0.2, 0.5, 0.1], [0.0, 0.1, 1.6]])
ORDERS = {("overdamped", "euler"): 1, ("underdamped", "euler"): 1, ("underdamped", "symmetric"): 2}


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


def test_every_scheme_is_here():
    assert sorted(ORDERS) == sorted(SCHEMES)


@pytest.mark.parametrize(("name", "scheme"), SCHEMES)
def test_claimed_order(name, scheme):
    assert EXAMPLES[name].dynamics.schemes[scheme].order == ORDERS[name, scheme]


@pytest.mark.parametrize(("name", "scheme"), SCHEMES)
def test_order_of_stationary_covariance(name, scheme):
    example = EXAMPLES[name]
    slope = gaussian_slope(example, example.step(scheme), example.num_draws(scheme))
    assert slope == pytest.approx(ORDERS[name, scheme], abs=0.2)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(("name", "scheme"), SCHEMES)
def test_weak_order_on_a_quartic(name, scheme, dim):
    example, order = EXAMPLES[name], ORDERS[name, scheme]
    slope = quartic_slope(name, example.step(scheme), example.num_draws(scheme), order, dim)
    assert slope == pytest.approx(order + 1, abs=0.2)


# --- The measures see what they must ------------------------------------------------------------


def scheme_of(*flows):
    return compose(Underdamped(FRICTION).flows(), Scheme(flows, order=2))


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
    return scheme_of(
        ("drift", 0.5),
        ("noisy_kick", 0.5),
        ("friction", 1.0),
        ("noisy_kick", 0.5),
        ("drift", 0.5),
    )


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


def test_measures_serve_a_third_order_scheme_with_two_noise_vectors():
    # Milstein and Tretyakov (2003), for unit mass and a gradient that is differentiated twice.
    root = np.sqrt(2 * FRICTION)

    def step(state, h, gradient, noise):
        q, p = state
        w1, w2 = noise[0], noise[1] / np.sqrt(12)

        def force(q, p):
            return -gradient(q) - FRICTION * p

        q1 = q + 7 / 24 * h * p
        p1 = (p - 7 / 24 * h * gradient(q1)) / (1 + 7 / 24 * h * FRICTION)
        f1 = force(q1, p1)
        q2 = q + 25 / 24 * h * p + h**2 / 2 * f1
        p2 = (p + 2 / 3 * h * f1 - 3 / 8 * h * gradient(q2)) / (1 + 3 / 8 * h * FRICTION)
        f2 = force(q2, p2)
        q3 = q + h * p + 17 / 36 * h**2 * f1 + h**2 / 36 * f2
        p3 = (p + 2 / 3 * h * (f1 - f2) - h * gradient(q3)) / (1 + h * FRICTION)
        bend = jax.jvp(gradient, (q3,), (w1,))[1]
        half = w1 / 2 + w2
        q_noise = h**1.5 * half - FRICTION * h**2.5 * w1 / 6
        p_noise = h**0.5 * w1 - FRICTION * h**1.5 * half + h**2.5 * (FRICTION**2 * w1 - bend) / 6
        return UnderdampedState(q3 + root * q_noise, p3 + root * p_noise)

    example = EXAMPLES["underdamped"]
    assert gaussian_slope(example, step, 2) == pytest.approx(3, abs=0.2)
    assert quartic_slope("underdamped", step, 2, 3) == pytest.approx(4, abs=0.2)


# --- What the default step sizes cost -----------------------------------------------------------


def sd_ratio(dynamics, scheme, step_size, curvature):
    step, state = compose(dynamics.flows(), scheme), dynamics.init(jnp.zeros(1), jax.random.key(0))
    covariance = stationary_covariance(
        step, state, scheme.draws, step_size, np.array([[curvature]])
    )
    return np.sqrt(curvature * covariance[0, 0])


DEFAULTS = [(k, s) for k in KERNELS for s in k.largest_step_sizes]


@pytest.mark.parametrize("curvature", [0.25, 1.0, 2.0, 4.0, 30.0, 1000.0])
@pytest.mark.parametrize(("kernel_class", "scheme"), DEFAULTS)
def test_chosen_step_size_widens_a_gaussian_by_less_than_five_percent(
    kernel_class, scheme, curvature
):
    dynamics = kernel_class(potential_fn=lambda q: q @ q)._dynamics
    largest = kernel_class.largest_step_sizes[scheme]
    step_size, _ = choose_step_size(dynamics, largest, 0.0, curvature, 0.05)
    assert sd_ratio(dynamics, dynamics.schemes[scheme], step_size, curvature) == pytest.approx(
        1, abs=0.05
    )


@pytest.mark.parametrize(
    ("dynamics", "scheme", "step_size", "ratio"),
    [
        (Underdamped(1.5), "symmetric", 0.3, 0.9958),
        (Underdamped(1.5), "euler", 0.1, 1.0014),
        (Overdamped(), "euler", 0.05, 1 / np.sqrt(1 - 0.025)),
    ],
)
def test_unit_gaussian_at_the_first_step_sizes(dynamics, scheme, step_size, ratio):
    found = sd_ratio(dynamics, dynamics.schemes[scheme], step_size, 1.0)
    assert found == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize(("name", "scheme"), SCHEMES)
@pytest.mark.parametrize("step_size", [0.02, 0.1])
@pytest.mark.parametrize("gradient_variance", [1.0, 200.0])
def test_noise_inflation_is_the_excess_variance(name, scheme, step_size, gradient_variance):
    example, unit = EXAMPLES[name], np.eye(1)
    args = (example.step(scheme), example.state(np.zeros(1)), example.num_draws(scheme), step_size)
    noisy = stationary_covariance(*args, unit, gradient_variance)[0, 0]
    quiet = stationary_covariance(*args, unit)[0, 0]
    predicted = example.dynamics.noise_inflation(gradient_variance, step_size)
    assert noisy / quiet - 1 == pytest.approx(predicted, rel=1e-6)
