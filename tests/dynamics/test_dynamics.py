"""Every SDE leaves its density invariant, and every integrator follows its SDE."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.diagnostics import check_invariance
from numpyro_sgmcmc.diagnostics.invariance import SDE, fokker_planck_residual, small_step_limit
from numpyro_sgmcmc.dynamics import (
    Kinetics,
    MonomialGammaLangevin,
    MonomialGammaThermostat,
    Recipe,
    UnderdampedLangevin,
)
from numpyro_sgmcmc.errors import InvalidArgumentError
from tests.dynamics.examples import (
    EXAMPLES,
    INTEGRATORS,
    QUICK_NAMES,
    QUICK_NAMES_OF_OTHER_KERNELS,
)
from tests.dynamics.sdes import FRICTION, quartic, riemannian, scalar_metric, underdamped
from tests.quick import quick_if

pytestmark = pytest.mark.usefixtures("x64")

DIM = 2
NAMES = sorted(EXAMPLES)


def dim_of(name, integrator=None):
    """Return one for the recipe, whose energy has one dimension, and for large quadratures."""
    if name == "recipe" or (integrator and EXAMPLES[name].num_noise(integrator) > 1):
        return 1
    return DIM


def make_flat_states(example, dim=DIM, num=5):
    size = ravel_pytree(example.state(np.zeros(dim)))[0].size
    z = 0.7 * np.random.default_rng(1).standard_normal((num, size))
    kinetics = getattr(example.dynamics, "kinetics", None)
    if kinetics is not None and kinetics.a == 2.0:  # its velocity has a kink at zero
        z[:, dim : 2 * dim] += 2.5 * np.sign(z[:, dim : 2 * dim])
    return jnp.asarray(z)


def compute_residuals(example, sde, dim=DIM, log_density=None):
    log_density = log_density or example.log_density(quartic, dim)
    residual = jax.vmap(lambda z: fokker_planck_residual(sde, log_density, z))
    return np.abs(jax.jit(residual)(make_flat_states(example, dim)))


@pytest.mark.parametrize(
    "name", [quick_if(n in QUICK_NAMES | QUICK_NAMES_OF_OTHER_KERNELS, n) for n in NAMES]
)
def test_sde_of_the_literature_leaves_its_density_invariant(name):
    example, dim = EXAMPLES[name], dim_of(name)
    assert compute_residuals(example, example.sde(jax.grad(quartic), dim), dim).max() < 1e-10


# The others follow from their local errors beside the SDE, and from the invariance by the SDE.
QUICK_LIMITS = {("underdamped", "symmetric"), ("nose_hoover, per coordinate", "euler")}


@pytest.mark.parametrize(
    ("name", "integrator"), [quick_if((n, i) in QUICK_LIMITS, n, i) for n, i in INTEGRATORS]
)
def test_small_step_limit_leaves_the_density_invariant(name, integrator):
    example, dim = EXAMPLES[name], dim_of(name, integrator)
    limit = small_step_limit(
        example.step(integrator),
        example.state(np.zeros(dim)),
        example.num_noise(integrator),
        jax.grad(quartic),
    )
    assert compute_residuals(example, limit, dim).max() < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_energy_is_minus_log_density_of_auxiliary_variables(name):
    example, dim = EXAMPLES[name], dim_of(name)
    unravel = ravel_pytree(example.state(np.zeros(dim)))[1]
    log_density = example.log_density(quartic, dim)

    def constant(z):
        state = unravel(z)
        return log_density(z) + quartic(state.position) + example.dynamics.energy(state)

    constants = jax.jit(jax.vmap(constant))(make_flat_states(example, dim))
    np.testing.assert_allclose(constants, constants[0], atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_init_returns_the_position_and_random_auxiliary_variables(name):
    position = jnp.array([0.3, -1.0])
    states = [EXAMPLES[name].state(position, seed) for seed in (0, 1)]
    for state in states:
        np.testing.assert_array_equal(state.position, position)
        assert all(x.dtype == position.dtype for x in jax.tree.leaves(state))
    for a, b in zip(*(jax.tree.leaves(s[1:]) for s in states), strict=True):
        assert (a != b).all()


def test_init_momentum_has_unit_variance():
    momentum = EXAMPLES["underdamped"].state(np.zeros(40_000)).momentum
    assert abs(momentum.mean()) < 5 / 200
    assert abs(momentum.var() - 1) < 5 * np.sqrt(2) / 200


@pytest.mark.parametrize("integrator", ["euler", "symmetric"])
def test_monomial_gamma_langevin_with_gaussian_kinetics_is_underdamped_langevin(integrator):
    gaussian = MonomialGammaLangevin(Kinetics(a=0.5, mass=2.0, softening=3.0), FRICTION)
    normals = np.random.default_rng(0).standard_normal((1, DIM))
    states = []
    for dynamics in (gaussian, UnderdampedLangevin(FRICTION)):
        state = dynamics.State(np.array([0.3, -0.4]), np.array([1.2, -0.7]))
        states.append(dynamics.make_step(integrator)(state, 0.2, jax.grad(quartic), normals))
    np.testing.assert_array_equal(states[0].position, states[1].position)
    np.testing.assert_array_equal(states[0].momentum, states[1].momentum)


def test_thermostat_with_noise_of_the_friction_is_solved_exactly_at_a_fixed_momentum():
    dynamics, t = MonomialGammaThermostat(sigma_p=1.2, gamma=0.7, sigma_xi=0.3), 0.5
    state = dynamics.State(*(jnp.array(x) for x in ([0.3, -1.0], [1.5, -0.2], [0.9, 2.0])))
    rate = 0.3 / 0.7
    limit = 1.2 + dynamics.thermostat_drift(state.momentum) / rate
    expected = limit + (state.thermostat - limit) * np.exp(-rate * t)
    moved = dynamics._drift(state, t, None, None)
    np.testing.assert_allclose(moved.thermostat, expected, rtol=1e-12)
    np.testing.assert_array_equal(moved.momentum, state.momentum)


# --- The residual detects wrong SDEs, also those misprinted in papers ---------------------------


def with_diffusion(scale):
    correct = underdamped(jax.grad(quartic), DIM)
    return SDE(correct.drift, lambda z: scale * correct.diffusion(z))


def with_drift(change):
    correct = underdamped(jax.grad(quartic), DIM)
    return SDE(lambda z: change(z, correct.drift(z)), correct.diffusion)


WRONG_SDES = {
    "noise by the friction, not its root": lambda: with_diffusion(FRICTION),
    "half of the noise": lambda: with_diffusion(0.5),
    "no friction": lambda: with_drift(
        lambda z, f: f + FRICTION * jnp.concatenate([jnp.zeros(DIM), z[DIM:]])
    ),
    "velocity of the wrong sign": lambda: with_drift(
        lambda z, f: jnp.concatenate([-f[:DIM], f[DIM:]])
    ),
    "gradient twice": lambda: underdamped(lambda q: 2 * jax.grad(quartic)(q), DIM),
}


@pytest.mark.parametrize("name", sorted(WRONG_SDES))
def test_residual_of_wrong_underdamped_sde_is_large(name):
    assert compute_residuals(EXAMPLES["underdamped"], WRONG_SDES[name]()).max() > 0.01


@pytest.mark.parametrize(
    "integrator",
    [quick_if(i in ("euler", "symmetric"), i) for i in EXAMPLES["underdamped"].orders],
)
def test_residual_of_step_with_wrong_noise_is_large(integrator):
    example = EXAMPLES["underdamped"]
    correct = example.step(integrator)

    def step(state, h, gradient, normals):
        return correct(state, h, gradient, jnp.sqrt(FRICTION) * normals)

    num_noise = example.num_noise(integrator)
    limit = small_step_limit(step, example.state(np.zeros(DIM)), num_noise, jax.grad(quartic))
    assert compute_residuals(example, limit).max() > 0.01


def test_residual_of_metric_without_correction_is_large():
    without_correction = riemannian(scalar_metric, with_correction=False)
    sde = without_correction(jax.grad(quartic), DIM)
    assert compute_residuals(EXAMPLES["riemannian, scalar"], sde).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "mean"),
    [
        ("nose_hoover, shared", lambda log_density: log_density / DIM, FRICTION),
        ("monomial_gamma, a = 1", lambda log_density: log_density * 0.5, 1.4),
    ],
)
def test_residual_of_misprinted_thermostat_variance_is_large(name, change, mean):
    example = EXAMPLES[name]
    correct = example.log_density(quartic, DIM)

    def misprinted(z):
        at_mean = correct(z.at[2 * DIM :].set(mean))
        return at_mean + change(correct(z) - at_mean)

    sde = example.sde(jax.grad(quartic), DIM)
    assert compute_residuals(example, sde, log_density=misprinted).max() > 0.01


def test_residual_of_recipe_with_misprinted_sign_is_large():
    example = EXAMPLES["recipe"]
    correct = example.sde(jax.grad(quartic), 1)

    def drift(z):
        energy_gradient = jnp.concatenate([jax.grad(quartic)(z[:1]), jnp.zeros(1)])
        energy_gradient += jax.grad(example.dynamics.hamiltonian)(z)
        matrix = jnp.diag(example.dynamics.diffusion(z)) + example.dynamics.curl(z)
        return -2 * matrix @ energy_gradient - correct.drift(z)  # minus the correction

    assert compute_residuals(example, SDE(drift, correct.diffusion), 1).max() > 0.01


# --- check_invariance, as users call it ---------------------------------------------------------


def no_auxiliary(rng_key, dim):
    return jnp.zeros(0)


def recipe_with_momentum(diffusion):
    return Recipe(
        diffusion,
        lambda z: jnp.array([[0.0, -1.0], [1.0, 0.0]]),
        lambda z: jnp.square(z[1:]).sum() / 2,
        lambda key, dim: jax.random.normal(key, (dim,)),
    )


@pytest.mark.slow
def test_check_invariance_in_float32_passes_correct_dynamics_only():
    jax.config.update("jax_enable_x64", False)
    assert check_invariance(UnderdampedLangevin(1.5), integrator="symmetric").max() < 1e-9
    assert check_invariance(UnderdampedLangevin(1.5, is_fsal=True), integrator="baoab").max() < 1e-9

    def diffusion(z):
        return 1.0 + 0.5 * jnp.sin(z)

    correct = Recipe(diffusion, lambda z: jnp.zeros((1, 1)), lambda z: 0.0 * z.sum(), no_auxiliary)
    assert check_invariance(correct).max() < 1e-9

    class WithoutCorrection(Recipe):
        def drift(self, z, potential_gradient):
            return -self.diffusion(z) * potential_gradient

    wrong = WithoutCorrection(correct.diffusion, correct.curl, correct.hamiltonian, no_auxiliary)
    assert check_invariance(wrong).max() > 0.01


def test_check_invariance_of_diffusion_with_zeros_is_finite():
    dynamics = recipe_with_momentum(lambda z: jnp.array([0.0, 1.5]) * (1 + z[0] ** 2))
    assert check_invariance(dynamics).max() < 1e-9


def test_check_invariance_with_coinciding_eigenvalues_raises():
    with pytest.raises(InvalidArgumentError, match="not finite"):
        check_invariance(recipe_with_momentum(lambda z: (1 + z[0] ** 2) * jnp.eye(2)))


def test_check_invariance_with_unknown_integrator_raises():
    with pytest.raises(InvalidArgumentError, match="`integrator`"):
        check_invariance(UnderdampedLangevin(1.0), integrator="foo")
