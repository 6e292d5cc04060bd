"""The kernels: correct posteriors, the recipe's identities, the kinetics and wrong arguments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel

import numpyro_sgmcmc
from numpyro_sgmcmc import SGMGT, SGNHT, SGRHMC, SGRLD, SHMC, RecipeKernel, SGHMCSplit, SGLaplaceHMC
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE
from numpyro_sgmcmc.adaptation.step_size import NoiseLimit
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.dynamics import (
    Kinetics,
    NoseHooverThermostat,
    OverdampedLangevin,
    Recipe,
    RiemannianUnderdampedLangevin,
    UnderdampedLangevin,
)
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.contract.kernels import (
    GIVEN,
    KERNELS,
    assert_posterior,
    quietly,
    survey,
    survey_data,
    survey_posterior,
)

BATCH = 40
FRICTION = 1.3


def diffusion(z):
    return jnp.repeat(jnp.array([0.0, 1.5]), z.size // 2)


def curl(z):
    return jnp.kron(jnp.array([[0.0, -1.0], [1.0, 0.0]]), jnp.eye(z.size // 2))


def kinetic(z):
    return jnp.square(z[z.size // 2 :]).sum() / 2


def momentum(key, dim):
    return random.normal(key, (dim,))


WITHOUT_AUXILIARY = {"diffusion": diffusion, "curl": curl, "hamiltonian": kinetic}
RECIPE = {**WITHOUT_AUXILIARY, "auxiliary": momentum}

VARIANTS = {
    "SHMC, Lie-Trotter": (SHMC, {"integrator": "lie_trotter", "num_leapfrog": 5}),
    "SHMC, BAOAB": (SHMC, {"integrator": "baoab"}),
    "SHMC, OBABO": (SHMC, {"integrator": "obabo"}),
    "SHMC, UBU": (SHMC, {"integrator": "ubu"}),
    "SHMC, MT3": (SHMC, {"integrator": "mt3"}),
    "SGNHT, shared": (SGNHT, {"per_coordinate": False}),
    "SGNHT, minibatch gradient": (SGNHT, {"gradient_estimator": "minibatch"}),
    "SGMGT, a = 2": (SGMGT, {"a": 2.0, "c": 2.0, "step_size": 0.1}),
    "SGMGT, D": (SGMGT, {"sigma_theta": 0.1, "sigma_xi": 0.1, "step_size": 0.05}),
    "SGRHMC, diagonal": (
        SGRHMC,
        {"inverse_metric": lambda z: {k: 1 + 0.2 * jnp.sin(v) for k, v in z.items()}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_kernel_with_other_settings_samples_the_posterior(name):
    """The contract tests the kernels with default arguments."""
    kernel_class, settings = VARIANTS[name]
    data = survey_data()
    mcmc = quietly(
        kernel_class(survey, **settings),
        num_warmup=200,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
    )
    mcmc.run(random.key(0), *data, batch_size=BATCH)
    draws = mcmc.get_samples(group_by_chain=True)
    for site, exact in survey_posterior(data).items():
        assert_posterior(draws[site], *exact)
    assert not mcmc.get_extra_fields()["diverging"].any()


NONLINEAR = [
    (kernel_class, {"integrator": integrator, **settings})
    for kernel_class, settings in (
        (SGNHT, {}),
        (SGNHT, {"per_coordinate": False}),
        (SGMGT, {}),
        (SGMGT, {"a": 0.5, "m": 2.0}),
        (SGLaplaceHMC, {}),
        (SGRLD, {}),
        (SGRHMC, {}),
    )
    for integrator in kernel_class.integrators
]


@pytest.mark.slow
@pytest.mark.parametrize("curvature", [0.25, 1.0, 3.5, 30.0])
@pytest.mark.parametrize(
    ("kernel_class", "settings"), NONLINEAR, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_default_step_size_biases_gaussian_sd_by_less_than_five_percent(
    kernel_class, settings, curvature
):
    """Simulate 4,000 chains in two dimensions, which estimate an SD within about 0.3%.

    Kernels of linear steps are tested in tests/dynamics/test_orders.py.
    """
    kernel = kernel_class(potential_fn=lambda q: q @ q, **settings)
    dynamics, integrator = kernel.dynamics, settings["integrator"]
    largest = dynamics.integrators[integrator].step_size
    step_size, _ = NoiseLimit(dynamics, largest, curvature, 0.05).limit_step_size(NO_NOISE)
    step, num_chains = dynamics.make_step(integrator), 4000
    num_steps = min(2000, math.ceil(30 / step_size / min(curvature, 1.0)))

    @jax.jit
    @jax.vmap
    def run(key):
        init_key, key = random.split(key)
        state = dynamics.init(random.normal(init_key, (2,)) / math.sqrt(curvature), key)

        def take_step(state, key):
            normals = random.normal(key, (step.num_noise, 2))
            state = step(state, step_size, lambda q: curvature * q, normals)
            return state, jnp.square(state.position)

        keys = random.split(key, num_steps)
        return jax.lax.scan(take_step, state, keys)[1][num_steps // 2 :].mean()

    variance = run(random.split(random.key(0), num_chains)).mean()
    assert math.sqrt(curvature * float(variance)) == pytest.approx(1, abs=0.05)


def test_every_public_kernel_is_in_the_contract():
    kernels = {
        x
        for x in vars(numpyro_sgmcmc).values()
        if isinstance(x, type) and issubclass(x, MCMCKernel)
    }
    assert kernels == {k for kernel in KERNELS for k in kernel.__mro__ if k in kernels}


# --- The complete recipe ------------------------------------------------------------------------


DIM = 2
ZERO, EYE = np.zeros((DIM, DIM)), np.eye(DIM)
SYMPLECTIC = np.block([[ZERO, -EYE], [EYE, ZERO]])


def metric(q):
    return 0.8 + 0.3 * jnp.tanh(q.sum())


def thermostat_curl(z):
    """Return Q for a momentum and one thermostat: the last row and column hold p / n."""
    p = z[DIM : 2 * DIM] / DIM
    q = jnp.zeros((2 * DIM + 1, 2 * DIM + 1)).at[: 2 * DIM, : 2 * DIM].set(SYMPLECTIC)
    return q.at[DIM : 2 * DIM, -1].set(p).at[-1, DIM : 2 * DIM].set(-p)


def thermostat_energy(z):
    return jnp.square(z[DIM : 2 * DIM]).sum() / 2 + DIM * jnp.square(z[-1] - FRICTION) / 2


def momentum_energy(z):
    return jnp.square(z[DIM:]).sum() / 2


AS_RECIPES = {
    "SGLD": (
        OverdampedLangevin(),
        "euler",
        Recipe(jnp.ones_like, lambda z: jnp.zeros((DIM, DIM)), lambda z: 0.0 * z.sum(), None),
        0,
    ),
    "SGHMC": (
        UnderdampedLangevin(FRICTION),
        "explicit_euler",
        Recipe(
            lambda z: jnp.repeat(jnp.array([0.0, FRICTION]), DIM),
            lambda z: SYMPLECTIC,
            momentum_energy,
            None,
        ),
        DIM,
    ),
    "SGNHT": (
        NoseHooverThermostat(FRICTION, per_coordinate=False),
        "explicit_euler",
        Recipe(
            lambda z: jnp.array([0.0] * DIM + [FRICTION] * DIM + [0.0]),
            thermostat_curl,
            thermostat_energy,
            None,
        ),
        DIM + 1,
    ),
    "SGRHMC": (
        RiemannianUnderdampedLangevin(metric, FRICTION),
        "explicit_euler",
        Recipe(
            lambda z: jnp.concatenate([jnp.zeros(DIM), FRICTION * metric(z[:DIM]) * jnp.ones(DIM)]),
            lambda z: jnp.sqrt(metric(z[:DIM])) * SYMPLECTIC,
            momentum_energy,
            None,
        ),
        DIM,
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", AS_RECIPES)
def test_euler_step_of_dedicated_sde_is_that_of_its_recipe(name):
    dynamics, integrator, recipe, num_auxiliary = AS_RECIPES[name]
    step, rng = dynamics.make_step(integrator), np.random.default_rng(0)

    def gradient(q):
        return jnp.sinh(q) + q[::-1]

    @jax.jit
    def take_steps(state, z, used, normals):
        general = recipe._euler(recipe.State(z[:DIM], z[DIM:]), 0.1, gradient, normals)
        return step(state, 0.1, gradient, used), general

    for _ in range(5):
        z = 0.7 * rng.standard_normal(DIM + num_auxiliary)
        normals = rng.standard_normal((3, DIM))
        auxiliary = [z[DIM : 2 * DIM], z[2 * DIM :].squeeze()][: -(-num_auxiliary // DIM)]
        state = dynamics.State(z[:DIM], *auxiliary)
        used = normals[:1] if name == "SGLD" else normals[1:2]
        dedicated, general = take_steps(state, z, used, normals)
        flat = np.concatenate([np.atleast_1d(x) for x in dedicated if x is not None])
        np.testing.assert_allclose(flat, np.concatenate(general), rtol=1e-10, atol=1e-12)


# --- The kinetics -------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("a", [0.5, 0.8, 1.0, 1.5, 2.0])
def test_velocity_and_curvature_are_derivatives_of_the_energy(a):
    kinetics = Kinetics(a, 0.8, 2.5)
    p = jnp.array([-9.0, -0.5, 0.05, 0.3, 2.0])

    @jax.jit
    def derivatives(p):
        first, second = (jax.vmap(jax.grad(fn))(p) for fn in (kinetics.energy, kinetics.velocity))
        return first, kinetics.velocity(p), second, kinetics.curvature(p)

    first, velocity, second, curvature = derivatives(p)
    np.testing.assert_allclose(first, velocity, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(second, curvature, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("a", [0.8, 1.0, 2.0])
def test_momentum_quantiles_are_those_of_the_stationary_density(a):
    kinetics = Kinetics(a, 0.8, 2.5)
    e = jnp.array([0.001, 0.1, 1.0, 3.0, 8.0])
    x = np.concatenate(
        [np.linspace(0, 1, 5_001) ** 2, 1 + 2000 * np.linspace(0, 1, 20_001)[1:] ** 2]
    )
    density = np.exp(-np.asarray(kinetics.energy(jnp.asarray(x))))
    mass = np.append(0.0, np.cumsum(np.diff(x) * (density[1:] + density[:-1]) / 2))
    tail = 1 - np.interp(kinetics.magnitude_from_exponential(e), x, mass) / mass[-1]
    np.testing.assert_allclose(tail, np.exp(-e), rtol=1e-3)


@pytest.mark.parametrize("a", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("p", [0.0, 1e-30, -1e-12, 1e-3, 80.0, -1e6])
def test_kinetics_at_extreme_momenta_are_finite_in_float32(a, p):
    kinetics = Kinetics(a, 1.0, 3.0)
    p = jnp.float32(p)
    for value in (
        kinetics.energy(p),
        kinetics.velocity(p),
        kinetics.curvature(p),
        kinetics.apply_friction(p, 0.5),
    ):
        assert value.dtype == jnp.float32
        assert jnp.isfinite(value)


# --- Settings other than the defaults -----------------------------------------------------------


SETTINGS = [
    (SGHMCSplit, {"friction": 10.0}),
    (SHMC, {"friction": 10.0}),
    (SHMC, {"integrator": "lie_trotter", "num_leapfrog": 10, "friction": 5.0}),
    (SGMGT, {"m": 0.05}),
    (SGMGT, {"sigma_theta": 10.0}),
    (SGNHT, {"friction": 10.0}),
    (SGLaplaceHMC, {"m": 0.05}),
    (SGRHMC, {"inverse_metric": lambda q: 30.0}),
    (
        RecipeKernel,
        {
            "diffusion": lambda z: jnp.full_like(z, 60.0),
            "curl": lambda z: jnp.zeros((z.size, z.size)),
            "hamiltonian": lambda z: 0.0 * z.sum(),
        },
    ),
]


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
@pytest.mark.slow
@pytest.mark.parametrize(("kernel_class", "settings"), SETTINGS)
def test_adapted_step_size_depends_on_the_settings(kernel_class, settings):
    """At the step sizes of the defaults SDs would be from 16% too small to five times too large.

    Lie-Trotter would not mix at all: ten steps of 0.3 are half a period.
    """
    kernel = kernel_class(potential_fn=lambda q: jnp.square(q).sum() / 2, **settings)
    mcmc = quietly(
        kernel, num_warmup=100, num_samples=1500, num_chains=4, chain_method="vectorized"
    )
    mcmc.run(random.key(0), init_params=jnp.zeros((4, 2)))
    draws = mcmc.get_samples(group_by_chain=True)
    assert_posterior(draws, np.zeros(2), np.ones(2))
    assert not mcmc.get_extra_fields()["diverging"].any()


# --- Wrong arguments ----------------------------------------------------------------------------


def test_num_leapfrog_without_lie_trotter_raises():
    with pytest.raises(InvalidArgumentError, match=r"`num_leapfrog`.*`integrator`"):
        SHMC(survey, num_leapfrog=5)


@pytest.mark.parametrize("name", RECIPE)
def test_recipe_argument_that_is_not_a_function_raises(name):
    with pytest.raises(InvalidArgumentError, match=f"`{name}`"):
        RecipeKernel(survey, **{**RECIPE, name: 1.0})


@pytest.fixture(scope="module")
def survey_potential():
    arguments = Arguments(tuple(survey_data()), {"batch_size": BATCH})
    return get_model_potential(survey, arguments, init_to_uniform)


@pytest.mark.parametrize(
    ("kernel_class", "settings", "match"),
    [
        (SGRHMC, {"inverse_metric": lambda z: jnp.ones(7)}, r"inverse_metric.*\(7,\)"),
        (SGRHMC, {"inverse_metric": lambda z: {"b": 1.0, "rate": 1.0}}, "inverse_metric.*'beta'"),
        (
            SGRLD,
            {"inverse_metric": lambda z: {"beta": jnp.ones(3), "rate": 1.0}},
            "inverse_metric.*'beta'",
        ),
        (SGRLD, {"inverse_metric": lambda z: 100.0 * (z["rate"] - 1.09)}, "positive definite"),
        (SGRLD, {"inverse_metric": lambda z: -1.0}, "positive definite"),
        (SGRHMC, {"inverse_metric": lambda z: jnp.diag(jnp.array([1.0, 1, -1]))}, "positive def"),
        (RecipeKernel, {**RECIPE, "diffusion": lambda z: -jnp.ones(z.size)}, "diffusion.*positive"),
        (RecipeKernel, {**RECIPE, "diffusion": lambda z: jnp.ones(2)}, r"diffusion.*\(2,\)"),
        (RecipeKernel, {**RECIPE, "curl": lambda z: jnp.ones((z.size, z.size))}, "curl.*skew"),
        (RecipeKernel, {**RECIPE, "hamiltonian": lambda z: z}, "hamiltonian.*scalar"),
        (RecipeKernel, {**RECIPE, "auxiliary": lambda key, d: jnp.ones(d**3)}, "auxiliary"),
        (RecipeKernel, WITHOUT_AUXILIARY, "0 auxiliary variables"),
        (RecipeKernel, {**RECIPE, "auxiliary": lambda key: jnp.ones(3)}, "auxiliary"),
        (RecipeKernel, {**RECIPE, "auxiliary": lambda key, d: jnp.ones((d, 1))}, "auxiliary.*flat"),
        (
            RecipeKernel,
            {**RECIPE, "diffusion": lambda z: 1.0 - jnp.square(z)},
            "diffusion.*positive",
        ),
        (RecipeKernel, {**RECIPE, "diffusion": lambda z: z / z}, "diffusion.*finite"),
    ],
)
def test_wrong_user_function_raises(kernel_class, settings, match, survey_potential):
    """The recipe's functions are checked before the warm-up, a metric in its coordinates after."""
    if kernel_class is RecipeKernel:
        with pytest.raises(InvalidArgumentError, match=match):
            RecipeKernel(survey, **settings)._check_user_functions(survey_potential)
        return
    kernel = kernel_class(survey, **GIVEN, **settings)
    with pytest.raises(InvalidArgumentError, match=match):
        kernel.init(random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})


def test_init_checks_user_functions():
    kernel = RecipeKernel(survey, **{**RECIPE, "curl": jnp.diag})
    with pytest.raises(InvalidArgumentError, match=r"curl.*skew"):
        kernel.init(random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})
