"""Gradient-noise compensation: the right amount is measured, and the right amount taken away."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import SGLD, SGMGT, SGHMCSplit
from numpyro_sgmcmc.adaptation.gradient_noise import measure_noise_covariance
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.model.gradient_estimators import MinibatchGradient
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.contract.kernels import (
    assert_posterior,
    quietly,
    survey,
    survey_data,
    survey_posterior,
)
from tests.dynamics.examples import EXAMPLES, SCHEMES
from tests.dynamics.orders import stationary_covariance
from tests.dynamics.sdes import FRICTION, quartic
from tests.model.plated import CASES, position_of
from tests.quick import quick_if

COVARIANCE = np.array([[0.5, 0.3, 0.0], [0.3, 0.6, -0.1], [0.0, -0.1, 0.2]])
BATCH = 40

# --- What is taken away -------------------------------------------------------------------------

# Schemes that keep the gradient spread its noise over two steps: see the stationary covariance.
ONE_STEP = [case for case in SCHEMES if case[1] not in ("baoab", "obabo")]
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
@pytest.mark.parametrize(("name", "scheme"), [quick_if(c in QUICK, *c) for c in ONE_STEP])
def test_step_has_the_covariance_of_one_with_an_exact_gradient(name, scheme, is_dense):
    """Linearised about no noise; to the order of the step size."""
    example, h = EXAMPLES[name], 1e-3
    dim = 1 if name == "recipe" else 3
    covariance = np.atleast_2d(COVARIANCE[:dim, :dim]) * (1.0 / h)
    if not is_dense:
        covariance = np.diag(np.diag(covariance))
    noise_of_gradient = GradientNoiseCovariance.from_covariance(
        covariance if is_dense else np.diag(covariance)
    )
    state = example.state(0.3 + 0.2 * np.arange(dim))
    step, num_draws = example.dynamics.make_step(scheme), example.num_draws(scheme)

    def run(entries, offset, is_compensated):
        if is_compensated:
            entries = example.dynamics.compensate_gradient_noise(
                state, entries, h, noise_of_gradient
            )
        after = step(state, h, lambda q: jax.grad(quartic)(q) + offset, entries)
        variables = [v for k, v in after._asdict().items() if k != "gradient"]
        return ravel_pytree(variables)[0]

    def covariance_of(is_compensated):
        origin = jnp.zeros((num_draws, dim)), jnp.zeros(dim)
        by_noise, by_offset = jax.jacobian(partial(run, is_compensated=is_compensated), (0, 1))(
            *origin
        )
        flat = by_noise.reshape(len(by_noise), -1)
        return flat @ flat.T, by_offset @ covariance @ by_offset.T

    exact, brought = covariance_of(False)
    injected, _ = covariance_of(True)
    scale = jnp.sqrt(jnp.diag(brought))
    off = jnp.abs(injected + brought - exact)
    is_stirred = scale > 1e-3 * scale.max()
    assert is_stirred.any()
    relative = off / jnp.maximum(jnp.outer(scale, scale), 1e-12)
    assert (relative[is_stirred][:, is_stirred] < 0.02).all()
    assert (jnp.abs(brought / exact.max())).max() > 0.1, "too little noise to tell"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scheme", ["euler", "leapfrog", "symmetric", "baoab", "obabo", "mt3"])
def test_gaussian_is_as_wide_as_with_an_exact_gradient(scheme):
    dynamics, h, variance = (
        UnderdampedLangevin(FRICTION, None, scheme in ("baoab", "obabo")),
        0.1,
        6.0,
    )
    example = EXAMPLES["underdamped"]
    found = GradientNoiseCovariance(jnp.full(2, variance))
    step, state = dynamics.make_step(scheme), dynamics.init(jnp.zeros(2), jax.random.key(0))

    def compensated(state, h, gradient, noise):
        return step(state, h, gradient, dynamics.compensate_gradient_noise(state, noise, h, found))

    def variance_of(step, gradient_variance):
        arguments = state, example.num_draws(scheme), h, np.eye(2), gradient_variance
        return stationary_covariance(step, *arguments)[0, 0]

    exact, noisy = variance_of(step, 0.0), variance_of(step, variance)
    assert noisy / exact > 1.2
    assert variance_of(compensated, variance) / exact == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("num_leapfrog", [1, 5])
def test_lie_trotter_is_as_wide_as_with_an_exact_gradient(num_leapfrog, x64):
    """A whole cycle as one step, each of its leapfrog steps with a gradient noise of its own."""
    dynamics, h, variance = UnderdampedLangevin(FRICTION, num_leapfrog=num_leapfrog), 0.05, 4.0
    found, step = GradientNoiseCovariance(jnp.full(1, variance)), dynamics.make_step("lie_trotter")

    def widths(is_compensated, gradient_variance):
        def cycle(z, noise, offsets):
            state, positions = dynamics.State(z[:1], z[1:]), []
            for k in range(num_leapfrog):
                entries = noise[k : k + 1]
                if is_compensated:
                    entries = dynamics.compensate_gradient_noise(state, entries, h, found)
                state = step(state, h, lambda q, k=k: q + offsets[k], entries, k)
                positions.append(state.position)
            return jnp.concatenate([state.position, state.momentum]), jnp.concatenate(positions)

        zeros = jnp.zeros(2), jnp.zeros((num_leapfrog, 1)), jnp.zeros(num_leapfrog)
        (transition, noise, offsets), (by_z, by_noise, by_offsets) = jax.jacobian(cycle, (0, 1, 2))(
            *zeros
        )
        noise, by_noise = noise[..., 0], by_noise[..., 0]
        forcing = noise @ noise.T + gradient_variance * offsets @ offsets.T
        transition, forcing, by_z = (np.asarray(x) for x in (transition, forcing, by_z))
        covariance = np.eye(2)
        for _ in range(2000):
            covariance = transition @ covariance @ transition.T + forcing
        along = by_z @ covariance @ by_z.T + by_noise @ by_noise.T
        return jnp.diag(along + gradient_variance * by_offsets @ by_offsets.T).mean()

    exact, noisy = widths(False, 0.0), widths(False, variance)
    assert noisy / exact > 1.05
    assert widths(True, variance) / exact == pytest.approx(1.0, abs=0.01)


def test_no_more_is_taken_than_there_is():
    noise = jnp.ones((1, 3))
    found = GradientNoiseCovariance(jnp.array([1.0, 2.0, 3.0])).subtract_from(noise, 0.5)
    np.testing.assert_allclose(found, [[np.sqrt(0.5), 0, 0]], rtol=1e-6)


# --- What is measured ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize(
    ("name", "sizes"), [("one", {"rows": 3}), ("separate", {"rows": 2, "columns": 3})]
)
def test_covariance_of_minibatch_gradients(name, sizes, is_dense, x64):
    """Against all rows of a small model, one by one."""
    case = CASES[name]
    target, arguments = case.target(**sizes), case.arguments(**sizes)
    anchor = jnp.asarray(position_of(target))
    factor = jnp.diag(0.5 + jnp.arange(target.dim)) + 0.3 * jnp.eye(target.dim, k=-1)
    whitening = Preconditioner(anchor, factor, jnp.zeros(target.dim))

    def one_row(plate, row):
        rows = {p.name: jnp.array([row if p is plate else 0]) for p in target.plates}
        return whitening.apply_transpose(target.gradient(anchor, rows, arguments))

    exact = 0.0
    for p in target.plates:
        gradients = np.array([one_row(p, i) for i in range(p.size)], np.float64)
        exact = exact + np.cov(gradients, rowvar=False, ddof=0) / sizes[p.name]
    found = measure_noise_covariance(
        target,
        arguments,
        whitening,
        jnp.zeros((40, target.dim)),
        np.random.default_rng(0),
        MinibatchGradient(),
        is_dense,
    )
    exact = exact if is_dense else np.diag(exact)
    np.testing.assert_allclose(found, exact, atol=0.03 * np.abs(exact).max())


# --- The kernels' argument ----------------------------------------------------------------------


def spread(noise_compensation):
    """Sd of `beta` over the exact one, with noise of two thirds of what may be injected."""
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
def test_sds_are_right_where_they_would_be_too_wide():
    assert (spread(False) > 1.2).all()
    np.testing.assert_allclose(spread(True), 1.0, atol=0.07)


@pytest.mark.slow
@pytest.mark.parametrize("kernel_class", [SGHMCSplit, SGLD])
def test_step_size_is_chosen_for_it(kernel_class):
    data = survey_data()
    steps = {}
    for noise_compensation in (False, True):
        kernel = kernel_class(
            survey,
            gradient_estimator="minibatch",
            subsampling="iid",
            noise_compensation=noise_compensation,
        )
        mcmc = quietly(kernel, num_warmup=100, num_samples=2000)
        mcmc.run(jax.random.key(0), *data, batch_size=BATCH)
        steps[noise_compensation] = float(mcmc.last_state.adapt_state.step_size)
    assert steps[True] > 3 * steps[False]
    draws = mcmc.get_samples(group_by_chain=True)["beta"]
    assert_posterior(draws, *survey_posterior(data)["beta"])


def test_what_cannot_be_compensated_is_said():
    kernel = SGHMCSplit(
        survey, gradient_estimator="minibatch", step_size=1.0, num_steps=1, noise_compensation=True
    )
    with pytest.warns(UserWarning, match="times what the sampler injects at step size 1"):
        kernel.init(jax.random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})


@pytest.mark.parametrize("minibatch", ["shuffled", "contiguous"])
def test_dependent_minibatches_are_refused(minibatch):
    with pytest.raises(ValueError, match="independent minibatches"):
        SGMGT(survey, subsampling=minibatch, noise_compensation=True)


def noisy(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    shift = 0.1 * jax.random.normal(numpyro.prng_key())
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu + shift, 1), obs=y[i])


def crossed(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0], subsample_size=batch_size, dim=-2) as i:
        with numpyro.plate("columns", y.shape[1], subsample_size=batch_size, dim=-1) as j:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i][:, j])


@pytest.mark.parametrize(
    ("model", "shape", "words"),
    [(noisy, (50,), "prng_key"), (crossed, (20, 10), "'rows' and 'columns' meet")],
)
def test_noise_that_rows_do_not_show_is_refused(model, shape, words):
    kernel = SGHMCSplit(model, noise_compensation=True)
    with pytest.raises(ValueError, match=words):
        kernel.init(jax.random.key(0), 10, None, (np.zeros(shape),), {"batch_size": 5})
