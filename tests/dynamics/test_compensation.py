"""Gradient-noise compensation subtracts the noise covariance, and the warm-up measures it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import SGLD, SGMGT, SGHMCSplit
from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients, BulkPositions
from numpyro_sgmcmc.adaptation.gradient_noise import measure_noise_covariance
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import GradientNoiseWarning, StepSizeWarning
from numpyro_sgmcmc.model.gradient_estimators import MinibatchGradient
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.contract.kernels import (
    assert_posterior,
    quietly,
    survey,
    survey_data,
    survey_posterior,
)
from tests.dynamics.examples import EXAMPLES, INTEGRATORS
from tests.dynamics.orders import stationary_covariance
from tests.dynamics.sdes import FRICTION, quartic
from tests.model.plated import CASES, position_of
from tests.quick import quick_if

COVARIANCE = np.array([[0.5, 0.3, 0.0], [0.3, 0.6, -0.1], [0.0, -0.1, 0.2]])
BATCH = 40

# --- The step's noise ---------------------------------------------------------------------------

# Integrators that use a gradient in two steps distribute its noise over both: they are tested by
# the stationary covariance.
ONE_STEP = [case for case in INTEGRATORS if case[1] not in ("baoab", "obabo")]
QUICK = [
    ("overdamped", "euler"),
    ("underdamped", "euler"),
    ("underdamped", "symmetric"),
    ("underdamped", "mt3"),
    ("nose_hoover, per coordinate", "symmetric"),
    ("riemannian, dense", "symmetric"),
    ("recipe", "euler"),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("is_dense", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "integrator"), [quick_if(c in QUICK, *c) for c in ONE_STEP])
def test_compensated_step_has_the_covariance_of_the_exact_gradient(name, integrator, is_dense):
    """Linearised about zero noise, and to the order of the step size."""
    example, h = EXAMPLES[name], 1e-3
    dim = 1 if name == "recipe" else 3
    covariance = COVARIANCE[:dim, :dim] / h
    if not is_dense:
        covariance = np.diag(np.diag(covariance))
    noise_covariance = GradientNoiseCovariance.from_covariance(
        covariance if is_dense else np.diag(covariance)
    )
    state = example.state(0.3 + 0.2 * np.arange(dim))
    step, num_noise = example.dynamics.make_step(integrator), example.num_noise(integrator)

    def run(normals, offset, is_compensated):
        if is_compensated:
            normals = example.dynamics.compensate_gradient_noise(
                state, normals, h, noise_covariance
            )
        after = step(state, h, lambda q: jax.grad(quartic)(q) + offset, normals)
        return ravel_pytree([v for k, v in after._asdict().items() if k != "gradient"])[0]

    def covariance_by_source(is_compensated):
        """Return the step's covariance by the injected noise and by that of the gradient."""
        fn = jax.jit(jax.jacobian(partial(run, is_compensated=is_compensated), (0, 1)))
        by_normals, by_offset = map(np.asarray, fn(np.zeros((num_noise, dim)), np.zeros(dim)))
        flat = by_normals.reshape(len(by_normals), -1)
        return flat @ flat.T, by_offset @ covariance @ by_offset.T

    exact, by_gradient = covariance_by_source(False)
    injected, _ = covariance_by_source(True)
    scale = np.sqrt(np.diag(by_gradient))
    error = np.abs(injected + by_gradient - exact)
    has_noise = scale > 1e-3 * scale.max()
    assert has_noise.any()
    relative = error / np.maximum(np.outer(scale, scale), 1e-12)
    assert (relative[has_noise][:, has_noise] < 0.02).all()
    assert np.abs(by_gradient / exact.max()).max() > 0.1  # enough noise for the test to fail


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "integrator", ["euler", "leapfrog", "symmetric", "baoab", "obabo", "ubu", "mt3"]
)
def test_compensated_stationary_variance_is_that_of_the_exact_gradient(integrator):
    dynamics = UnderdampedLangevin(FRICTION, None, integrator in ("baoab", "obabo"))
    h, variance = 0.1, 6.0
    noise_covariance = GradientNoiseCovariance(jnp.full(2, variance))
    step, state = dynamics.make_step(integrator), dynamics.init(jnp.zeros(2), jax.random.key(0))

    def compensated(state, h, gradient, normals):
        normals = dynamics.compensate_gradient_noise(state, normals, h, noise_covariance)
        return step(state, h, gradient, normals)

    def compute_variance(step, gradient_variance):
        num_noise = EXAMPLES["underdamped"].num_noise(integrator)
        return stationary_covariance(step, state, num_noise, h, np.eye(2), gradient_variance)[0, 0]

    exact, noisy = compute_variance(step, 0.0), compute_variance(step, variance)
    assert noisy / exact > 1.2
    assert compute_variance(compensated, variance) / exact == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("num_leapfrog", [1, 5])
def test_compensated_lie_trotter_has_the_variance_of_the_exact_gradient(num_leapfrog, x64):
    """A whole cycle is one linear map, with separate gradient noise in each leapfrog step."""
    dynamics, h, variance = UnderdampedLangevin(FRICTION, num_leapfrog=num_leapfrog), 0.05, 4.0
    noise_covariance = GradientNoiseCovariance(jnp.full(1, variance))
    step = dynamics.make_step("lie_trotter")

    def compute_mean_variance(is_compensated, gradient_variance):
        def cycle(z, normals, offsets):
            state, positions = dynamics.State(z[:1], z[1:]), []
            for k in range(num_leapfrog):
                entries = normals[k : k + 1]
                if is_compensated:
                    entries = dynamics.compensate_gradient_noise(
                        state, entries, h, noise_covariance
                    )
                state = step(state, h, lambda q, k=k: q + offsets[k], entries, k)
                positions.append(state.position)
            return jnp.concatenate([state.position, state.momentum]), jnp.concatenate(positions)

        zeros = jnp.zeros(2), jnp.zeros((num_leapfrog, 1)), jnp.zeros(num_leapfrog)
        end, positions = jax.jit(jax.jacobian(cycle, (0, 1, 2)))(*zeros)
        transition, by_normals, by_offsets = (np.asarray(x).reshape(2, -1) for x in end)
        forcing = by_normals @ by_normals.T + gradient_variance * by_offsets @ by_offsets.T
        covariance = np.eye(2)
        for _ in range(2000):
            covariance = transition @ covariance @ transition.T + forcing
        by_z, by_normals, by_offsets = (np.asarray(x).reshape(num_leapfrog, -1) for x in positions)
        along = by_z @ covariance @ by_z.T + by_normals @ by_normals.T
        return np.diag(along + gradient_variance * by_offsets @ by_offsets.T).mean()

    exact, noisy = compute_mean_variance(False, 0.0), compute_mean_variance(False, variance)
    assert noisy / exact > 1.05
    assert compute_mean_variance(True, variance) / exact == pytest.approx(1.0, abs=0.01)


def test_subtract_from_with_more_noise_than_injected_is_zero():
    noise_covariance = GradientNoiseCovariance(jnp.array([1.0, 2.0, 3.0]))
    scaled = noise_covariance.subtract_from(jnp.ones((1, 3)), 0.5)
    np.testing.assert_allclose(scaled, [[np.sqrt(0.5), 0, 0]], rtol=1e-6)


# --- The measured covariance --------------------------------------------------------------------


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize(
    ("name", "sizes"), [("one", {"rows": 3}), ("separate", {"rows": 2, "columns": 3})]
)
def test_measured_noise_covariance_equals_that_of_all_rows(name, sizes, is_dense, x64):
    case = CASES[name]
    potential, arguments = case.potential(**sizes), case.arguments(**sizes)
    center = jnp.asarray(position_of(potential))
    factor = 0.5 + jnp.arange(potential.dim)
    if is_dense:
        factor = jnp.diag(factor) + 0.3 * jnp.eye(potential.dim, k=-1)
    preconditioner = Preconditioner(center, factor, jnp.zeros(potential.dim))

    @jax.jit
    def gradient(indices):
        return preconditioner.apply_transpose(potential.gradient(center, indices, arguments))

    def row_gradient(plate, row):
        return gradient({p.name: np.array([row if p is plate else 0]) for p in potential.plates})

    expected = 0.0
    for p in potential.plates:
        gradients = np.array([row_gradient(p, i) for i in range(p.size)], np.float64)
        expected = expected + np.cov(gradients, rowvar=False, ddof=0) / sizes[p.name]
    gradients = BatchedGradients(potential, arguments)
    bulk = BulkPositions(gradients, preconditioner, np.zeros((40, potential.dim)))
    measured = measure_noise_covariance(bulk, MinibatchGradient(), np.random.default_rng(0))
    expected = expected if is_dense else np.diag(expected)
    np.testing.assert_allclose(measured, expected, atol=0.03 * np.abs(expected).max())


# --- The kernels' option ------------------------------------------------------------------------


def compute_sd_ratio(noise_compensation):
    """Return the SD of `beta` over the exact one, with noise of 2/3 of the injected variance."""
    data = survey_data()
    kernel = SGHMCSplit(
        survey,
        gradient_estimator="minibatch",
        subsampling="iid",
        step_size=0.2,
        num_steps=10,
        noise_compensation=noise_compensation,
    )
    mcmc = quietly(kernel, num_warmup=200, num_samples=4000)
    mcmc.run(jax.random.key(0), *data, batch_size=BATCH)
    return mcmc.get_samples()["beta"].std(0) / survey_posterior(data)["beta"][1]


@pytest.mark.slow
def test_noise_compensation_restores_posterior_sds():
    with pytest.warns(StepSizeWarning, match="step_size"):
        assert (compute_sd_ratio(False) > 1.2).all()
    np.testing.assert_allclose(compute_sd_ratio(True), 1.0, atol=0.07)


@pytest.mark.slow
@pytest.mark.parametrize("kernel_class", [SGHMCSplit, SGLD])
def test_noise_compensation_lengthens_the_adapted_step_size(kernel_class):
    data = survey_data()
    step_sizes = {}
    for noise_compensation in (False, True):
        kernel = kernel_class(
            survey,
            gradient_estimator="minibatch",
            subsampling="iid",
            noise_compensation=noise_compensation,
        )
        mcmc = quietly(kernel, num_warmup=100, num_samples=2000)
        mcmc.run(jax.random.key(0), *data, batch_size=BATCH)
        step_sizes[noise_compensation] = float(mcmc.last_state.adapt_state.step_size)
    assert step_sizes[True] > 3 * step_sizes[False]
    draws = mcmc.get_samples(group_by_chain=True)["beta"]
    assert_posterior(draws, *survey_posterior(data)["beta"])


def test_noise_compensation_with_more_noise_than_injected_warns():
    kernel = SGHMCSplit(
        survey, gradient_estimator="minibatch", step_size=1.0, num_steps=1, noise_compensation=True
    )
    with pytest.warns(GradientNoiseWarning, match=r"[Nn]oise compensation"):
        kernel.init(jax.random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})


@pytest.mark.parametrize("subsampling", ["shuffled", "contiguous"])
def test_noise_compensation_with_dependent_minibatches_raises(subsampling):
    with pytest.raises(ValueError, match=r"noise_compensation.*independent"):
        SGMGT(survey, subsampling=subsampling, noise_compensation=True)


def random_likelihood(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    offset = 0.1 * jax.random.normal(numpyro.prng_key())
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu + offset, 1), obs=y[i])


def crossed_plates(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size, dim=-2) as i:
        with numpyro.plate("columns", y.shape[1], subsample_size=batch_size, dim=-1) as j:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i][:, j])


@pytest.mark.parametrize(
    ("model", "shape", "match"),
    [
        (random_likelihood, (50,), "noise_compensation.*prng_key"),
        (crossed_plates, (20, 10), "'rows'.*'columns'.*noise_compensation"),
    ],
)
def test_noise_compensation_without_independent_row_gradients_raises(model, shape, match):
    kernel = SGHMCSplit(model, noise_compensation=True)
    with pytest.raises(ValueError, match=match):
        kernel.init(jax.random.key(0), 10, None, (np.zeros(shape),), {"batch_size": 5})
