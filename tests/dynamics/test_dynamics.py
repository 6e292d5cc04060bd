"""Each SDE leaves its density invariant, and each scheme follows that SDE."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.diagnostics import check_invariance
from numpyro_sgmcmc.diagnostics.invariance import SDE, fokker_planck_residual, small_step_limit
from numpyro_sgmcmc.dynamics import Recipe, UnderdampedLangevin
from tests.dynamics.examples import EXAMPLES, KINDS, OF_OTHER_KERNELS, SCHEMES
from tests.dynamics.sdes import FRICTION, quartic, riemannian, scalar_metric, underdamped
from tests.quick import quick_if


def turned(z):
    return jnp.array([[0.0, -1.0], [1.0, 0.0]])


pytestmark = pytest.mark.usefixtures("x64")

DIM = 2
NAMES = sorted(EXAMPLES)


def dim_of(name, scheme=None):
    if name == "recipe" or (scheme is not None and EXAMPLES[name].num_draws(scheme) > 1):
        return 1  # an energy written for one, a quadrature over many
    return DIM


def points(example, dim=DIM, num=5):
    size = ravel_pytree(example.state(np.zeros(dim)))[0].size
    z = 0.7 * np.random.default_rng(1).standard_normal((num, size))
    kinetics = getattr(example.dynamics, "kinetics", None)
    if kinetics is not None and kinetics.a == 2.0:  # its velocity has a kink at zero
        z[:, dim : 2 * dim] += 2.5 * np.sign(z[:, dim : 2 * dim])
    return z


def residuals(example, sde, dim=DIM):
    log_density = example.log_density(quartic, dim)
    at = jax.jit(jax.vmap(lambda z: fokker_planck_residual(sde, log_density, z)))
    return np.abs(at(points(example, dim)))


@pytest.mark.parametrize("name", [quick_if(n in KINDS | OF_OTHER_KERNELS, n) for n in NAMES])
def test_sde_leaves_its_density_invariant(name):
    example, dim = EXAMPLES[name], dim_of(name)
    assert residuals(example, example.sde(jax.grad(quartic), dim), dim).max() < 1e-10


# They are long in compiling; the tests of orders have them in `make test`.
LONG = {("monomial_gamma, a = 1", "symmetric")} | {
    ("riemannian, dense", scheme) for scheme in EXAMPLES["riemannian, dense"].orders
}


@pytest.mark.parametrize(
    ("name", "scheme"), [quick_if(n in KINDS and (n, s) not in LONG, n, s) for n, s in SCHEMES]
)
def test_small_steps_leave_the_density_invariant(name, scheme):
    example, dim = EXAMPLES[name], dim_of(name, scheme)
    limit = small_step_limit(
        example.step(scheme),
        example.state(np.zeros(dim)),
        example.num_draws(scheme),
        jax.grad(quartic),
    )
    assert residuals(example, limit, dim).max() < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_energy_is_that_of_the_auxiliary_variables(name):
    """Up to a constant, and with the posterior's own it is the whole density."""
    example, dim = EXAMPLES[name], dim_of(name)
    state = example.state(np.zeros(dim))
    unravel = ravel_pytree(state)[1]
    log_density = example.log_density(quartic, dim)
    sums = []
    for z in points(example, dim):
        state = unravel(jnp.asarray(z))
        sums.append(log_density(z) + quartic(state.position) + example.dynamics.energy(state))
    np.testing.assert_allclose(sums, sums[0], atol=1e-8)


def with_diffusion(scale):
    right = underdamped(jax.grad(quartic), DIM)
    return SDE(right.drift, lambda z: scale * right.diffusion(z))


def with_drift(change):
    right = underdamped(jax.grad(quartic), DIM)
    return SDE(lambda z: change(z, right.drift(z)), right.diffusion)


WRONG = {
    "noise by the friction in place of its root": lambda: with_diffusion(FRICTION),
    "half of the noise": lambda: with_diffusion(0.5),
    "no friction": lambda: with_drift(
        lambda z, f: f + FRICTION * jnp.concatenate([jnp.zeros(DIM), z[DIM:]])
    ),
    "momentum runs backwards": lambda: with_drift(
        lambda z, f: jnp.concatenate([-f[:DIM], f[DIM:]])
    ),
    "gradient twice": lambda: underdamped(lambda q: 2 * jax.grad(quartic)(q), DIM),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_sde_is_seen(name):
    assert residuals(EXAMPLES["underdamped"], WRONG[name]()).max() > 0.01


@pytest.mark.parametrize(
    "scheme",
    [
        quick_if(s in ("euler", "symmetric"), s)
        for s in EXAMPLES["underdamped"].dynamics.integrators
    ],
)
def test_wrong_noise_of_a_step_is_seen(scheme):
    example = EXAMPLES["underdamped"]
    correct = example.step(scheme)

    def step(state, h, gradient, noise):
        return correct(state, h, gradient, jnp.sqrt(FRICTION) * noise)

    draws = example.num_draws(scheme)
    limit = small_step_limit(step, example.state(np.zeros(DIM)), draws, jax.grad(quartic))
    assert residuals(example, limit).max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_first_state(name):
    position = jnp.array([0.3, -1.0])
    states = [EXAMPLES[name].state(position, seed) for seed in (0, 1)]
    for state in states:
        np.testing.assert_array_equal(state.position, position)
        assert all(x.dtype == position.dtype for x in jax.tree.leaves(state))
    for a, b in zip(*(jax.tree.leaves(s[1:]) for s in states), strict=True):
        assert (a != b).all()


def test_first_momentum_has_unit_variance():
    example = EXAMPLES["underdamped"]
    momentum = example.state(np.zeros(40_000)).momentum
    assert abs(momentum.mean()) < 5 / 200
    assert abs(momentum.var() - 1) < 5 * np.sqrt(2) / 200


# --- Misprinted and naive versions fail ---------------------------------------------------------


def test_metric_without_its_correction_is_seen():
    naive = riemannian(scalar_metric, with_correction=False)
    example = EXAMPLES["riemannian, scalar"]
    assert residuals(example, naive(jax.grad(quartic), DIM)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nose_hoover, shared", lambda off: off / DIM),
        ("monomial_gamma, a = 1", lambda off: off * 0.5),
    ],
)
def test_misprinted_density_of_a_thermostat_is_seen(name, change):
    """The thermostat's variance without its factor."""
    example = EXAMPLES[name]
    right = example.log_density(quartic, DIM)

    def wrong(z):
        mean = 1.4 if "gamma" in name else FRICTION
        at_mean = z.at[2 * DIM :].set(mean)
        return right(at_mean) + change(right(z) - right(at_mean))

    sde = example.sde(jax.grad(quartic), DIM)
    at = jax.vmap(lambda z: fokker_planck_residual(sde, wrong, z))
    assert np.abs(at(jnp.asarray(points(example)))).max() > 0.01


def test_recipe_with_the_misprinted_sign_is_seen():
    example = EXAMPLES["recipe"]
    right = example.sde(jax.grad(quartic), 1)

    def drift(z):
        def without_correction(x):
            slope = jnp.concatenate([jax.grad(quartic)(x[:1]), jnp.zeros(1)])
            slope += jax.grad(example.dynamics.hamiltonian)(x)
            d = jnp.diag(example.dynamics.diffusion(x)) + example.dynamics.curl(x)
            return -d @ slope

        return 2 * without_correction(z) - right.drift(z)

    assert residuals(example, SDE(drift, right.diffusion), 1).max() > 0.01


def test_check_invariance():
    """As a user calls it, in single precision: right dynamics pass and a wrong one does not."""
    jax.config.update("jax_enable_x64", False)
    assert check_invariance(UnderdampedLangevin(1.5), integrator="symmetric").max() < 1e-9
    assert check_invariance(UnderdampedLangevin(1.5, is_fsal=True), integrator="baoab").max() < 1e-9

    def diffusion(z):
        return 1.0 + 0.5 * jnp.sin(z)

    right = Recipe(diffusion, lambda z: jnp.zeros((1, 1)), lambda z: 0.0 * z.sum(), no_auxiliary)
    assert check_invariance(right).max() < 1e-9

    class Naive(Recipe):
        def drift(self, z, potential_gradient):
            return -self.diffusion(z) * potential_gradient

    wrong = Naive(right.diffusion, right.curl, right.hamiltonian, no_auxiliary)
    assert check_invariance(wrong).max() > 0.01


def no_auxiliary(rng_key, dim):
    return jnp.zeros(0)


def varying_recipe(diffusion):
    return Recipe(
        diffusion,
        turned,
        lambda z: jnp.square(z[1:]).sum() / 2,
        lambda key, dim: jax.random.normal(key, (dim,)),
    )


def test_diffusion_that_is_zero_somewhere_can_be_checked():
    dynamics = varying_recipe(lambda z: jnp.array([0.0, 1.5]) * (1 + z[0] ** 2))
    assert check_invariance(dynamics).max() < 1e-9


def test_what_cannot_be_checked_is_said():
    with pytest.raises(ValueError, match="not finite"):
        check_invariance(varying_recipe(lambda z: (1 + z[0] ** 2) * jnp.eye(2)))
    with pytest.raises(ValueError, match="`integrator` is 'foo'"):
        check_invariance(UnderdampedLangevin(1.0), integrator="foo")
