"""A recipe with a wrong marginal of the position, or no diffusion, raises; others are accepted."""

import jax
import jax.numpy as jnp
import pytest

from numpyro_sgmcmc import RecipeKernel
from numpyro_sgmcmc.diagnostics import check_invariance
from numpyro_sgmcmc.dynamics import Recipe
from numpyro_sgmcmc.dynamics.general import check_recipe
from numpyro_sgmcmc.errors import InvalidArgumentError
from tests.quick import quick_if

DIM = 2


def split(z):
    return z[: z.size // 2], z[z.size // 2 :]


def diffusion(z):
    return jnp.repeat(jnp.array([0.0, 1.5]), z.size // 2)


def curl(z):
    return jnp.kron(jnp.array([[0.0, -1.0], [1.0, 0.0]]), jnp.eye(z.size // 2))


def metric(q):
    return 1.0 + 0.5 * jnp.square(q)


def normal(z):
    return jnp.square(split(z)[1]).sum() / 2


def heavy_tailed(z):
    p = split(z)[1]
    return (jnp.sqrt(1.0 + jnp.square(p)) - 1.0).sum()


def shifted_normal_in_a_metric(z):
    """Correct: mean and variance depend on the position, with half the log determinant."""
    q, p = split(z)
    return (jnp.square(p - jnp.sin(q)) / metric(q) + jnp.log(metric(q))).sum() / 2


def heavy_tailed_in_a_metric(z):
    """Correct, but neither a sum nor quadratic, so that it is not checked."""
    q, p = split(z)
    return (jnp.sqrt(1.0 + jnp.square(p) / metric(q)) + jnp.log(metric(q)) / 2).sum()


def without_determinant(z):
    q, p = split(z)
    return (jnp.square(p) / metric(q)).sum() / 2


def with_position(z):
    return heavy_tailed(z) + 0.1 * jnp.square(split(z)[0]).sum()


def momentum(rng_key, dim):
    return jax.random.normal(rng_key, (dim,))


def no_auxiliary(rng_key, dim):
    return jnp.zeros(0)


def make_recipe(hamiltonian, auxiliary=momentum, **functions):
    functions = {"diffusion": diffusion, "curl": curl, **functions}
    return Recipe(hamiltonian=hamiltonian, init_auxiliary=auxiliary, **functions)


@pytest.mark.parametrize("check", [check_recipe, check_invariance])
@pytest.mark.parametrize(
    ("hamiltonian", "auxiliary", "match"),
    [
        (normal, no_auxiliary, "hamiltonian.*auxiliary"),
        (without_determinant, momentum, "hamiltonian.*marginal"),
        (with_position, momentum, "hamiltonian.*marginal"),
    ],
)
def test_recipe_with_another_marginal_of_the_position_raises(check, hamiltonian, auxiliary, match):
    # Without auxiliary variables z is the position alone, of which `normal` reads half.
    dim = DIM if check is check_recipe or auxiliary is no_auxiliary else 1
    with pytest.raises(InvalidArgumentError, match=match):
        check(make_recipe(hamiltonian, auxiliary), dim=dim)


@pytest.mark.parametrize(
    "hamiltonian",
    [
        quick_if(False, normal),
        heavy_tailed,
        shifted_normal_in_a_metric,
        heavy_tailed_in_a_metric,
    ],
)
def test_recipe_with_the_posterior_as_marginal_is_accepted_and_invariant(hamiltonian):
    dynamics = make_recipe(hamiltonian)
    check_recipe(dynamics, DIM)
    assert check_invariance(dynamics, dim=1).max() < 1e-8


@pytest.mark.parametrize(
    ("name", "function", "match"),
    [
        ("diffusion", lambda z: jnp.ones(7), r"diffusion.*\(7,\)"),
        ("curl", lambda z: jnp.zeros((7, 7)), r"curl.*\(7, 7\)"),
        ("curl", lambda z: jnp.eye(z.size), "curl.*skew"),
    ],
)
def test_check_invariance_of_recipe_without_diffusion_raises(name, function, match):
    with pytest.raises(InvalidArgumentError, match=match):
        check_invariance(make_recipe(normal, **{name: function}))


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
def test_recipe_that_does_not_move_has_no_step_size():
    kernel = RecipeKernel(
        potential_fn=lambda q: jnp.square(q).sum() / 2,
        diffusion=jnp.zeros_like,
        curl=lambda z: jnp.zeros((z.size, z.size)),
        hamiltonian=lambda z: 0.0 * z.sum(),
    )
    with pytest.raises(ValueError, match="step size"):
        kernel.init(jax.random.key(0), 10, jnp.ones(2), (), {})
