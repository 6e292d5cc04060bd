"""What a step makes of a standard normal at its kicks, beside formulas and simulated chains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.adaptation.step_size import (
    PredictedMeanBias,
    compute_draw_variance_inflation,
    compute_kick_variance_inflation,
    limit_step_size_by_discretisation,
    simulate_sd_inflation,
)
from numpyro_sgmcmc.dynamics import (
    MonomialGammaThermostat,
    NoseHooverThermostat,
    OverdampedLangevin,
    RiemannianOverdampedLangevin,
    UnderdampedLangevin,
)


@pytest.mark.parametrize("step_size", [0.01, 0.05, 0.2])
def test_euler_on_the_overdamped_equation(step_size):
    """X <- (1 - h) x + sqrt(2 h) z has variance 1 / (1 - h / 2)."""
    found = compute_kick_variance_inflation(OverdampedLangevin(), "euler", step_size)
    assert found == pytest.approx(1 / (1 - step_size / 2) - 1, rel=1e-3)


def test_schemes_that_kick_where_the_variance_is_right():
    assert (
        abs(compute_kick_variance_inflation(UnderdampedLangevin(is_fsal=True), "baoab", 0.5)) < 1e-5
    )
    assert (
        abs(
            compute_kick_variance_inflation(UnderdampedLangevin(num_leapfrog=1), "lie_trotter", 0.5)
        )
        < 1e-5
    )


@pytest.mark.parametrize("scheme", ["symmetric", "euler", "leapfrog", "mt3"])
def test_error_falls_with_the_order(scheme):
    """Midway through a step as well, but where the gradient's place is only about the end's."""
    dynamics = UnderdampedLangevin()
    coarse, fine = (compute_kick_variance_inflation(dynamics, scheme, h) for h in (0.2, 0.1))
    order = np.log2(coarse / fine)
    assert order > min(2, dynamics.integrators[scheme].order + 1) - 0.3


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["symmetric", "euler"])
def test_simulated_chains_agree(scheme):
    step, step_size = UnderdampedLangevin().make_step(scheme), 0.4

    def one(state, noise):
        places = []
        state = step(state, step_size, lambda q: (places.append(q), q)[1], noise)
        return state, places[0]

    start = UnderdampedLangevin().init(
        jax.random.normal(jax.random.key(2), (200_000,)), jax.random.key(0)
    )
    noise = jax.random.normal(jax.random.key(1), (100, step.num_noise, 200_000))
    _, places = jax.lax.scan(one, start, noise)
    variances = np.asarray(places[40::10]).var(1)
    error = 5 * np.sqrt(2 / 200_000 / len(variances))
    assert variances.mean() - 1 == pytest.approx(
        compute_kick_variance_inflation(UnderdampedLangevin(), scheme, 0.4), abs=error
    )
    assert compute_kick_variance_inflation(UnderdampedLangevin(), scheme, 0.4) > 2 * error


def test_what_has_no_linear_form_is_left_alone():
    assert compute_kick_variance_inflation(MonomialGammaThermostat(), "symmetric", 0.3) == 0.0


def test_a_thermostat_widens_besides():
    """It holds the momenta's variance at one, which the symmetric step makes less."""
    step, step_size = NoseHooverThermostat(per_coordinate=False).make_step("symmetric"), 0.3

    def one(state, noise):
        places = []
        state = step(state, step_size, lambda q: (places.append(q), q)[1], noise)
        return state, jnp.square(places[0]).mean()

    start = NoseHooverThermostat(per_coordinate=False).init(
        jax.random.normal(jax.random.key(2), (100_000,)), jax.random.key(0)
    )
    noise = jax.random.normal(jax.random.key(1), (200, step.num_noise, 100_000))
    _, variances = jax.lax.scan(one, start, noise)
    found = compute_kick_variance_inflation(NoseHooverThermostat(), "symmetric", step_size)
    assert variances[100:].mean() - 1 == pytest.approx(found, abs=0.004)
    assert (
        found
        > compute_kick_variance_inflation(UnderdampedLangevin(), "symmetric", step_size) + 0.008
    )


def test_step_sizes_at_which_means_stay():
    """Noise moves the first mean, the step's error the second, and both the third, two ways."""
    shifts = PredictedMeanBias(
        np.array([1.0, 0.0, 1.0]), np.array([0.0, -50.0, -20.0]), lambda h: h**2
    )
    assert shifts.compute_max(0.1) == pytest.approx(0.5)
    assert shifts.compute_max(0.04) == pytest.approx(0.08)
    assert shifts.compute_max(0.04, batch_size_factor=10.0) == pytest.approx(0.08)
    assert shifts.compute_max(0.01, batch_size_factor=1.0) == pytest.approx(0.01)
    found = shifts.limit_step_size(0.3, 0.001, 0.06, batch_size_factor=1.0)
    assert found == pytest.approx(np.sqrt(0.06 / 50), rel=0.04)
    assert shifts.limit_step_size(0.3, 0.1, 0.06, batch_size_factor=1.0) == 0.1
    assert shifts.limit_step_size(0.02, 0.001, 0.06, batch_size_factor=1.0) == 0.02


def test_a_step_that_moves_nothing_has_no_excess():
    """A friction that ends all momentum within a step leaves positions to rounding."""
    for friction in (100.0, 1e3, 1e4):
        assert (
            compute_kick_variance_inflation(UnderdampedLangevin(friction), "symmetric", 0.3) == 0.0
        )


# --- The variance that draws have --------------------------------------------------------------


@pytest.mark.parametrize("curvature", [1.0, 4.0])
def test_draws_of_euler_on_the_overdamped_equation(curvature):
    found = compute_draw_variance_inflation(OverdampedLangevin(), "euler", 0.2, curvature)
    assert found == pytest.approx(1 / (1 - 0.2 * curvature / 2) - 1, rel=1e-3)


@pytest.mark.parametrize(
    ("dynamics", "scheme", "step_size"),
    [
        (UnderdampedLangevin(), "symmetric", 1.5),
        (UnderdampedLangevin(), "euler", 0.5),
        (UnderdampedLangevin(), "mt3", 1.5),
        (UnderdampedLangevin(40.0), "symmetric", 0.1),
        (UnderdampedLangevin(is_fsal=True), "obabo", 1.0),
        (UnderdampedLangevin(is_fsal=True), "baoab", 1.5),
    ],
)
def test_draws_have_the_variance_of_simulated_chains(dynamics, scheme, step_size):
    sd, error = simulate_sd_inflation(dynamics, scheme, step_size, 0.0, 20)
    found = compute_draw_variance_inflation(dynamics, scheme, step_size)
    assert np.sqrt(1 + found) - 1 == pytest.approx(sd, abs=4 * error)


@pytest.mark.parametrize(
    ("dynamics", "scheme", "step_size"),
    [
        (UnderdampedLangevin(), "symmetric", 0.3),
        (UnderdampedLangevin(), "mt3", 0.8),
        (UnderdampedLangevin(5.0), "symmetric", 0.2),
        (UnderdampedLangevin(is_fsal=True), "baoab", 0.8),
        (OverdampedLangevin(), "euler", 0.1),
    ],
)
def test_draws_have_the_variance_of_chains_with_noisy_gradients(dynamics, scheme, step_size):
    sd, error = simulate_sd_inflation(dynamics, scheme, step_size, 2.0, 20)
    found = compute_draw_variance_inflation(dynamics, scheme, step_size, noise_variance=2.0)
    assert found > compute_draw_variance_inflation(dynamics, scheme, step_size) + 0.01
    assert np.sqrt(1 + found) - 1 == pytest.approx(sd, abs=4 * error)


def test_what_a_thermostat_does_to_draws_is_not_known():
    assert compute_draw_variance_inflation(NoseHooverThermostat(), "symmetric", 0.2) is None
    assert (
        compute_draw_variance_inflation(
            NoseHooverThermostat(), "symmetric", 0.2, noise_variance=1.0
        )
        is None
    )


def test_noise_that_a_step_hardly_forgets_is_not_called_harmless():
    """There rounding decides: without noise nothing is wrong, with it nobody knows."""
    assert compute_draw_variance_inflation(OverdampedLangevin(), "euler", 1e-6) == 0.0
    assert (
        compute_draw_variance_inflation(OverdampedLangevin(), "euler", 1e-6, noise_variance=1.0)
        is None
    )


def test_a_friction_next_to_none_is_not_refused():
    """Rounding does not tell its steps from those that are not stable; simulated chains do."""
    step_size, excess = limit_step_size_by_discretisation(
        UnderdampedLangevin(1e-6), "symmetric", 0.3, 20, 0.05
    )
    assert step_size == 0.3
    assert abs(excess) < 0.05


@pytest.mark.parametrize(
    ("friction", "variance", "longest"), [(0.1, 0.0, 0.3), (3.0, 0.0, 0.3), (10.0, 0.0, 0.2)]
)
def test_steps_of_unusual_frictions_are_as_long_as_they_may_be(friction, variance, longest):
    """By the exact variance: of slow chains a simulation had seen too little."""
    dynamics = UnderdampedLangevin(friction)
    step_size, excess = limit_step_size_by_discretisation(
        dynamics, "symmetric", 0.3, 20, 0.04, variance
    )
    assert abs(excess) <= 0.02
    assert step_size <= longest
    if step_size < 0.3:
        assert (
            np.sqrt(1 + compute_draw_variance_inflation(dynamics, "symmetric", step_size / 0.9)) - 1
            < -0.02
        )


@pytest.mark.parametrize(
    ("scheme", "longest"), [("euler", 1.0), ("lie_trotter", 2.0), ("baoab", 2.0)]
)
def test_steps_that_are_not_stable(scheme, longest):
    dynamics = UnderdampedLangevin(is_fsal=scheme == "baoab")
    assert abs(compute_draw_variance_inflation(dynamics, scheme, 0.95 * longest)) < np.inf
    for step_size in (longest, 1.1 * longest, 1e3, 1e30):
        assert compute_draw_variance_inflation(dynamics, scheme, step_size) == np.inf
    assert compute_draw_variance_inflation(dynamics, scheme, 0.8 * longest, 4.0) == np.inf


def test_a_step_in_which_friction_ends_all_momentum():
    for friction in (35.0, 100.0, 1e3):
        assert compute_draw_variance_inflation(
            UnderdampedLangevin(friction), "symmetric", 1.0
        ) == pytest.approx(-1, abs=1e-3)


@pytest.mark.parametrize("step_size", [1e-9, 1e-6, 1e-5, 1e-4, 1e-3])
def test_rounding_in_short_steps_is_no_excess(step_size):
    for dynamics in (UnderdampedLangevin(), UnderdampedLangevin(40.0), OverdampedLangevin()):
        assert abs(compute_draw_variance_inflation(dynamics, "euler", step_size)) < 0.01


def test_limit_step_size_by_discretisation_constant_metric_matches_closed_form():
    """With metric 4 the Euler step has variance 1 / (1 - 4 h / 2) on a standard normal."""
    dynamics = RiemannianOverdampedLangevin(lambda q: jnp.full((), 4.0))
    step_size, sd_inflation = limit_step_size_by_discretisation(dynamics, "euler", 0.02, 20, 0.05)
    assert step_size == 0.02
    assert sd_inflation == pytest.approx((1 / (1 - 0.02 * 4 / 2)) ** 0.5 - 1, abs=0.01)
    step_size, sd_inflation = limit_step_size_by_discretisation(
        dynamics, "euler", 0.02, 20, 0.05, noise_variance=3.0
    )
    assert step_size == pytest.approx(0.6 * 0.02)
    assert 0.02 < sd_inflation < 0.06
