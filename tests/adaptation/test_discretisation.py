"""The discretisation error on a normal agrees with formulas and simulated chains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.adaptation.step_size import (
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
from tests.quick import quick_if


@pytest.mark.parametrize("step_size", [0.01, 0.05, 0.2])
def test_kick_variance_euler_overdamped_has_the_exact_value(step_size):
    """X <- (1 - h) x + sqrt(2 h) z has variance 1 / (1 - h / 2)."""
    inflation = compute_kick_variance_inflation(OverdampedLangevin(), "euler", step_size)
    assert inflation == pytest.approx(1 / (1 - step_size / 2) - 1, rel=1e-3)


def test_kick_variance_baoab_and_lie_trotter_have_no_error():
    assert (
        abs(compute_kick_variance_inflation(UnderdampedLangevin(is_fsal=True), "baoab", 0.5)) < 1e-5
    )
    assert (
        abs(
            compute_kick_variance_inflation(UnderdampedLangevin(num_leapfrog=1), "lie_trotter", 0.5)
        )
        < 1e-5
    )


@pytest.mark.parametrize("integrator", ["symmetric", "euler", "leapfrog", "mt3", "ubu"])
def test_kick_variance_error_falls_with_the_order(integrator):
    """One order less where gradients are taken at a position that is only close to the end's."""
    dynamics = UnderdampedLangevin()
    coarse, fine = (compute_kick_variance_inflation(dynamics, integrator, h) for h in (0.2, 0.1))
    order = np.log2(coarse / fine)
    assert order > min(2, dynamics.integrators[integrator].order + 1) - 0.3


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["symmetric", "euler"])
def test_kick_variance_agrees_with_simulated_chains(integrator):
    step, step_size = UnderdampedLangevin().make_step(integrator), 0.4

    def run_step(state, noise):
        positions = []
        state = step(state, step_size, lambda q: (positions.append(q), q)[1], noise)
        return state, positions[0]

    init = UnderdampedLangevin().init(
        jax.random.normal(jax.random.key(2), (200_000,)), jax.random.key(0)
    )
    noise = jax.random.normal(jax.random.key(1), (100, step.num_noise, 200_000))
    _, positions = jax.lax.scan(run_step, init, noise)
    variances = np.asarray(positions[40::10]).var(1)
    error = 5 * np.sqrt(2 / 200_000 / len(variances))
    assert variances.mean() - 1 == pytest.approx(
        compute_kick_variance_inflation(UnderdampedLangevin(), integrator, 0.4), abs=error
    )
    assert compute_kick_variance_inflation(UnderdampedLangevin(), integrator, 0.4) > 2 * error


def test_kick_variance_nonlinear_dynamics_is_zero():
    assert compute_kick_variance_inflation(MonomialGammaThermostat(), "symmetric", 0.3) == 0.0


@pytest.mark.slow
def test_kick_variance_thermostat_inflates_positions():
    """It keeps the variance of momenta at one, which the symmetric step alone reduces."""
    step, step_size = NoseHooverThermostat(per_coordinate=False).make_step("symmetric"), 0.3

    def run_step(state, noise):
        positions = []
        state = step(state, step_size, lambda q: (positions.append(q), q)[1], noise)
        return state, jnp.square(positions[0]).mean()

    init = NoseHooverThermostat(per_coordinate=False).init(
        jax.random.normal(jax.random.key(2), (100_000,)), jax.random.key(0)
    )
    noise = jax.random.normal(jax.random.key(1), (200, step.num_noise, 100_000))
    _, variances = jax.lax.scan(run_step, init, noise)
    inflation = compute_kick_variance_inflation(NoseHooverThermostat(), "symmetric", step_size)
    assert variances[100:].mean() - 1 == pytest.approx(inflation, abs=0.004)
    assert (
        inflation
        > compute_kick_variance_inflation(UnderdampedLangevin(), "symmetric", step_size) + 0.008
    )


def test_kick_variance_huge_friction_is_zero():
    """Where friction stops all movement, rounding hides the effect of a step."""
    for friction in (100.0, 1e3, 1e4):
        assert (
            compute_kick_variance_inflation(UnderdampedLangevin(friction), "symmetric", 0.3) == 0.0
        )


# --- The variance of draws ------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [1.0, 4.0])
def test_draw_variance_euler_overdamped_has_the_exact_value(curvature):
    inflation = compute_draw_variance_inflation(OverdampedLangevin(), "euler", 0.2, curvature)
    assert inflation == pytest.approx(1 / (1 - 0.2 * curvature / 2) - 1, rel=1e-3)


@pytest.mark.parametrize(
    ("dynamics", "integrator", "step_size"),
    [
        (UnderdampedLangevin(), "symmetric", 1.5),
        (UnderdampedLangevin(), "euler", 0.5),
        (UnderdampedLangevin(), "mt3", 1.5),
        quick_if(False, UnderdampedLangevin(40.0), "symmetric", 0.1),
        (UnderdampedLangevin(is_fsal=True), "obabo", 1.0),
        (UnderdampedLangevin(is_fsal=True), "baoab", 1.5),
        (UnderdampedLangevin(), "ubu", 1.5),
    ],
)
def test_draw_variance_agrees_with_simulated_chains(dynamics, integrator, step_size):
    sd, error = simulate_sd_inflation(dynamics, integrator, step_size, 0.0, 20)
    inflation = compute_draw_variance_inflation(dynamics, integrator, step_size)
    assert np.sqrt(1 + inflation) - 1 == pytest.approx(sd, abs=4 * error)


@pytest.mark.parametrize(
    ("dynamics", "integrator", "step_size"),
    [
        (UnderdampedLangevin(), "symmetric", 0.3),
        (UnderdampedLangevin(), "mt3", 0.8),
        (UnderdampedLangevin(5.0), "symmetric", 0.2),
        (UnderdampedLangevin(is_fsal=True), "baoab", 0.8),
        (UnderdampedLangevin(), "ubu", 0.8),
        (OverdampedLangevin(), "euler", 0.1),
    ],
)
def test_draw_variance_noisy_gradients_agree_with_simulated_chains(dynamics, integrator, step_size):
    sd, error = simulate_sd_inflation(dynamics, integrator, step_size, 2.0, 20)
    inflation = compute_draw_variance_inflation(dynamics, integrator, step_size, noise_variance=2.0)
    assert inflation > compute_draw_variance_inflation(dynamics, integrator, step_size) + 0.01
    assert np.sqrt(1 + inflation) - 1 == pytest.approx(sd, abs=4 * error)


def test_draw_variance_thermostat_is_unknown():
    assert compute_draw_variance_inflation(NoseHooverThermostat(), "symmetric", 0.2) is None
    assert (
        compute_draw_variance_inflation(
            NoseHooverThermostat(), "symmetric", 0.2, noise_variance=1.0
        )
        is None
    )


def test_draw_variance_tiny_step_with_noise_is_unknown():
    """Rounding hides the effect of noise in tiny steps; without noise they are exact."""
    assert compute_draw_variance_inflation(OverdampedLangevin(), "euler", 1e-6) == 0.0
    assert (
        compute_draw_variance_inflation(OverdampedLangevin(), "euler", 1e-6, noise_variance=1.0)
        is None
    )


@pytest.mark.slow
def test_limit_by_discretisation_tiny_friction_is_simulated():
    """Rounding does not distinguish its steps from unstable ones; simulated chains do."""
    step_size, sd_inflation = limit_step_size_by_discretisation(
        UnderdampedLangevin(1e-6), "symmetric", 0.3, 20, 0.05
    )
    assert step_size == 0.3
    assert abs(sd_inflation) < 0.05


@pytest.mark.parametrize(
    ("friction", "variance", "longest"), [(0.1, 0.0, 0.3), (3.0, 0.0, 0.3), (10.0, 0.0, 0.2)]
)
def test_limit_by_discretisation_unusual_friction_has_the_longest_valid_step(
    friction, variance, longest
):
    """By the exact variance, since simulated chains of large friction are too slow."""
    dynamics = UnderdampedLangevin(friction)
    step_size, sd_inflation = limit_step_size_by_discretisation(
        dynamics, "symmetric", 0.3, 20, 0.04, variance
    )
    assert abs(sd_inflation) <= 0.02
    assert step_size <= longest
    if step_size < 0.3:
        assert (
            np.sqrt(1 + compute_draw_variance_inflation(dynamics, "symmetric", step_size / 0.9)) - 1
            < -0.02
        )


@pytest.mark.parametrize(
    ("integrator", "longest"), [("euler", 1.0), ("lie_trotter", 2.0), ("baoab", 2.0)]
)
def test_draw_variance_unstable_step_is_infinite(integrator, longest):
    dynamics = UnderdampedLangevin(is_fsal=integrator == "baoab")
    assert abs(compute_draw_variance_inflation(dynamics, integrator, 0.95 * longest)) < np.inf
    for step_size in (longest, 1.1 * longest, 1e3, 1e30):
        assert compute_draw_variance_inflation(dynamics, integrator, step_size) == np.inf
    assert compute_draw_variance_inflation(dynamics, integrator, 0.8 * longest, 4.0) == np.inf


def test_draw_variance_huge_friction_stops_chains():
    for friction in (35.0, 100.0, 1e3):
        assert compute_draw_variance_inflation(
            UnderdampedLangevin(friction), "symmetric", 1.0
        ) == pytest.approx(-1, abs=1e-3)


@pytest.mark.parametrize("step_size", [1e-9, 1e-6, 1e-5, 1e-4, 1e-3])
def test_draw_variance_short_steps_have_no_rounding_error(step_size):
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
