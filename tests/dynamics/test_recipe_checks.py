"""Recipes of whose position the posterior is not the marginal are refused, others are not."""

import jax
import jax.numpy as jnp
import pytest

from numpyro_sgmcmc import RecipeKernel
from numpyro_sgmcmc.diagnostics import check_invariance
from numpyro_sgmcmc.dynamics import Recipe

DIM = 2


def half(z):
    return z[: z.size // 2], z[z.size // 2 :]


def diffusion(z):
    return jnp.repeat(jnp.array([0.0, 1.5]), z.size // 2)


def curl(z):
    return jnp.kron(jnp.array([[0.0, -1.0], [1.0, 0.0]]), jnp.eye(z.size // 2))


def metric(q):
    return 1.0 + 0.5 * jnp.square(q)


def normal(z):
    return jnp.square(half(z)[1]).sum() / 2


def heavy_tailed(z):
    p = half(z)[1]
    return (jnp.sqrt(1.0 + jnp.square(p)) - 1.0).sum()


def shifted_normal(z):
    """In a metric, about a mean that the position moves, with its half log determinant."""
    q, p = half(z)
    return (jnp.square(p - jnp.sin(q)) / metric(q) + jnp.log(metric(q))).sum() / 2


def heavy_tailed_in_a_metric(z):
    """Right, but not quadratic: nothing is told of it."""
    q, p = half(z)
    return (jnp.sqrt(1.0 + jnp.square(p) / metric(q)) + jnp.log(metric(q)) / 2).sum()


def without_determinant(z):
    q, p = half(z)
    return (jnp.square(p) / metric(q)).sum() / 2


def of_the_position(z):
    return heavy_tailed(z) + 0.1 * jnp.square(half(z)[0]).sum()


def some(rng_key, dim):
    return jax.random.normal(rng_key, (dim,))


def none(rng_key, dim):
    return jnp.zeros(0)


def at_init(hamiltonian, auxiliary, **functions):
    kernel = RecipeKernel(
        potential_fn=lambda q: jnp.square(q).sum() / 2,
        **{"diffusion": diffusion, "curl": curl, **functions},
        hamiltonian=hamiltonian,
        auxiliary=auxiliary,
    )
    kernel._check_user_functions(type("Target", (), {"dim": DIM}))


def at_check(hamiltonian, auxiliary, **functions):
    functions = {"diffusion": diffusion, "curl": curl, **functions}
    dynamics = Recipe(hamiltonian=hamiltonian, init_auxiliary=auxiliary, **functions)
    return check_invariance(dynamics, dim=1 if auxiliary is some else 2)


@pytest.mark.parametrize("looked_at", [at_init, at_check])
@pytest.mark.parametrize(
    ("hamiltonian", "auxiliary", "words"),
    [
        (normal, none, "hamiltonian.*auxiliary"),
        (without_determinant, some, "hamiltonian.*marginal"),
        (of_the_position, some, "hamiltonian.*marginal"),
    ],
)
def test_energies_that_move_the_marginal_are_refused(looked_at, hamiltonian, auxiliary, words):
    with pytest.raises(ValueError, match=words):
        looked_at(hamiltonian, auxiliary)


@pytest.mark.parametrize(
    "hamiltonian", [normal, heavy_tailed, shifted_normal, heavy_tailed_in_a_metric]
)
def test_others_are_not(hamiltonian):
    at_init(hamiltonian, some)
    assert at_check(hamiltonian, some).max() < 1e-8


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("diffusion", lambda z: jnp.ones(7), r"diffusion.*\(7,\)"),
        ("curl", lambda z: jnp.zeros((7, 7)), r"curl.*\(7, 7\)"),
        ("curl", lambda z: jnp.eye(z.size), "curl.*skew"),
    ],
)
def test_what_makes_no_diffusion_is_refused_before_the_check(name, wrong, words):
    with pytest.raises(ValueError, match=words):
        at_check(normal, some, **{name: wrong})
