"""A step size that the warm-up chose too long is shortened by the chains that find it so."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC
from scipy.linalg import expm

from numpyro_sgmcmc import SGNHT, SHMC, SGHMCSplit
from numpyro_sgmcmc.adaptation import GradientNoiseStats
from numpyro_sgmcmc.adaptation.gradient_noise import compute_epoch_variance_fraction
from numpyro_sgmcmc.dynamics import NoseHooverThermostat, OverdampedLangevin, UnderdampedLangevin
from numpyro_sgmcmc.sampling.bias_monitor import StepSizeMonitor

# --- What noise that cancels over an epoch is predicted to do ----------------------------------


@pytest.mark.parametrize("friction", [0.0, 0.2, 1.5, 2.0, 10.0, 1e3])
def test_autocorrelation_is_that_of_the_damped_oscillator(friction):
    times = np.array([0.0, 0.3, 1.0, 5.0, 300.0])
    drift = np.array([[0.0, 1.0], [-1.0, -friction]])
    exact = [expm(t * drift)[0, 0] for t in times]
    found = UnderdampedLangevin(friction).autocorrelation(times, 0.1)
    np.testing.assert_allclose(found, exact, atol=1e-6)
    np.testing.assert_allclose(OverdampedLangevin().autocorrelation(times, 0.1), np.exp(-times))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("dynamics", "scheme", "step_size", "per_epoch"),
    [
        (UnderdampedLangevin(1.5), "symmetric", 0.02, 100),
        (UnderdampedLangevin(1.5), "symmetric", 0.02, 400),
        (UnderdampedLangevin(1.5), "symmetric", 0.1, 10),
        (UnderdampedLangevin(10.0), "symmetric", 0.05, 100),
        (OverdampedLangevin(), "euler", 0.01, 50),
    ],
)
def test_share_of_noise_that_an_epoch_leaves(dynamics, scheme, step_size, per_epoch):
    """Exactly: the offsets of a random permutation, through the scheme's own response."""
    step = dynamics.make_step(scheme)
    start = dynamics.init(jnp.zeros(1), jax.random.key(0))
    start = jax.tree.map(jnp.zeros_like, start)
    quiet = jnp.zeros((step.draws, 1))

    def position(state, offset):
        state = step(state, step_size, lambda q: q + offset, quiet, 0)
        return state, state.position[0]

    num = per_epoch * int(np.ceil(60 / (per_epoch * step_size)))
    offsets = jnp.zeros(num + per_epoch).at[0].set(1.0)
    response = np.asarray(jax.lax.scan(position, start, offsets)[1])
    # Of one epoch's offsets, the sum is zero and all orders are alike.
    one = (np.eye(per_epoch) - 1 / per_epoch) * per_epoch / (per_epoch - 1)
    variance = 0.0
    for phase in range(per_epoch):
        shifted = np.concatenate([np.zeros(phase), response])[: num + phase]
        shifted = np.pad(shifted, (0, -len(shifted) % per_epoch)).reshape(-1, per_epoch)
        variance += np.sum(shifted @ one * shifted) / per_epoch
    share = variance / np.square(response).sum()
    assert 0.01 < share < 0.99
    assert compute_epoch_variance_fraction(dynamics, step_size, per_epoch) == pytest.approx(
        share, rel=0.03, abs=0.01
    )


def test_noise_that_cancels_is_predicted_to_do_less():
    noise = GradientNoiseStats(100.0, 0.0, 100.0)
    over_epochs = noise._replace(batches_per_epoch=100)
    dynamics = UnderdampedLangevin(1.5)
    assert noise.predict_variance_inflation(dynamics, 0.02) == pytest.approx(2 / 3)
    # Simulated, the variance is 1.127 times the right one.
    assert over_epochs.predict_variance_inflation(dynamics, 0.02) == pytest.approx(0.127, abs=0.01)
    thermostat = NoseHooverThermostat(1.5)
    assert over_epochs.predict_variance_inflation(
        thermostat, 0.02
    ) == noise.predict_variance_inflation(thermostat, 0.02)
    assert noise._replace(batches_per_epoch=1).predict_variance_inflation(dynamics, 0.02) == 0.0


# --- The decision ------------------------------------------------------------------------------


def decide(temperatures, allowed=0.1, independent=1.0):
    """The factor after iterations of these temperatures, shape ``(iterations, d)``."""
    control = StepSizeMonitor.zeros(temperatures.shape[1], jnp.float32)
    seen = jnp.append(temperatures, temperatures.mean(1, keepdims=True), 1)
    control = StepSizeMonitor(jnp.float32(len(seen)), seen.sum(0), jnp.square(seen).sum(0))
    return float(control.compute_step_scale(jnp.float32(allowed), independent))


def chi_square(shape, seed=0):
    return jnp.asarray(np.square(np.random.default_rng(seed).standard_normal(shape)), jnp.float32)


def test_sums_are_those_of_the_iterations_that_count():
    temperatures = chi_square((30, 3))
    control = StepSizeMonitor.zeros(3, jnp.float32)
    for k, t in enumerate(temperatures):
        control = control.add(jnp.where(k == 7, jnp.nan, t), jnp.array(k != 7))
    kept = np.delete(np.asarray(temperatures), 7, 0)
    assert control.num_iterations == 29
    np.testing.assert_allclose(
        control.temperature_sum, [*kept.sum(0), kept.mean(1).sum()], rtol=1e-5
    )
    np.testing.assert_allclose(control.temperature_sq_sum[:3], np.square(kept).sum(0), rtol=1e-5)


@pytest.mark.parametrize("num", [25, 75, 500])
def test_chance_does_not_shorten_steps(num):
    """Temperatures of exact draws of a Gaussian, 20 coordinates: a false alarm is rare."""
    factors = [decide(chi_square((num, 20), seed)) for seed in range(200)]
    assert np.mean(np.array(factors) < 1) <= 0.01


@pytest.mark.parametrize(
    ("heat", "factor"),
    [
        (np.ones(20), 1.0),
        (1.05 * np.ones(20), 1.0),  # within what is allowed
        (1.4 * np.ones(20), 0.1 / 0.4),
        (3.0 * np.ones(20), 1 / 8),
        (0.7 * np.ones(20), 0.1 / 0.3),  # too cold on average
        (np.append(2.0, np.ones(19)), 1 / 8),  # one coordinate alone
        (np.append(0.5, np.ones(19)), 0.1 / 0.5),
    ],
)
def test_heat_shortens_the_step_as_far_as_it_is_too_much(heat, factor):
    found = decide(jnp.asarray(heat) * chi_square((2000, 20)))
    assert found == pytest.approx(factor, rel=0.25)


def test_dependent_iterations_and_few_are_not_trusted():
    hot = 1.4 * chi_square((100, 20))
    assert decide(hot) < 1
    assert decide(hot, independent=0.02) == 1
    assert decide(4.0 * chi_square((10, 20))) == 1
    assert decide(hot, allowed=1.0) == 1


# --- In a run ----------------------------------------------------------------------------------


def misled(kernel_class, factor):
    """The kernel, whose warm-up takes a step so much too long."""

    class Misled(kernel_class):
        def _adapt(self, *args):
            adaptation = super()._adapt(*args)
            if not hasattr(self, "right"):
                self.right = adaptation.step_size
                adaptation = adaptation._replace(step_size=factor * adaptation.step_size)
                self._cache.adaptation = adaptation
            return adaptation

    return Misled


def normal_mean(y, batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])


DATA = jnp.asarray(np.random.default_rng(0).standard_normal((1000, 3)), jnp.float32)
NOISY = {"gradient_estimator": "minibatch", "subsampling": "iid"}


def run(kernel, num_warmup=300):
    """The step sizes in the end, and how far the sds are off."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=600,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mcmc.run(jax.random.key(0), DATA, batch_size=10)
    sds = np.asarray(mcmc.get_samples()["mu"]).std(0)
    return np.asarray(mcmc.last_state.adapt_state.step_size), sds * np.sqrt(len(DATA)) - 1


@pytest.mark.slow
def test_steps_that_noise_makes_too_long_are_shortened():
    kernel = misled(SGHMCSplit, 20.0)(normal_mean, num_steps=100, **NOISY)
    step_sizes, off = run(kernel)
    assert (step_sizes < 4.0 * kernel.right).all()
    assert np.abs(off).max() < 0.35
    # Without a warm-up there is no check.
    unchecked, off = run(
        misled(SGHMCSplit, 20.0)(normal_mean, num_steps=100, **NOISY), num_warmup=0
    )
    np.testing.assert_allclose(unchecked, 20.0 * kernel.right, rtol=1e-5)
    assert off.min() > 1.0


def test_a_target_out_of_reach_is_said_with_numbers():
    """V h / (2 friction) is 0.2 at the shortest step that 500 steps a draw can pay for."""
    kernel = SGHMCSplit(normal_mean, target_sd_bias=0.03, **NOISY)
    with pytest.warns(
        UserWarning, match="1[0-2] % too wide, where target_sd_bias allows 3 %"
    ) as said:
        kernel.init(jax.random.key(0), 0, None, (DATA,), {"batch_size": 10})
    # Of all rows a draw takes few steps, and less work.
    assert "of 'rows' all 1000: 10 steps a draw" in str(said[0].message)
    # Over an epoch of 100 minibatches the same noise does little.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = SGHMCSplit(
            normal_mean, target_sd_bias=0.03, gradient_estimator="minibatch", subsampling="shuffled"
        )
        kernel.init(jax.random.key(0), 0, None, (DATA,), {"batch_size": 10})


@pytest.mark.slow
def test_right_steps_are_left_alone():
    kernel = misled(SGHMCSplit, 1.0)(normal_mean)
    step_sizes, off = run(kernel)
    np.testing.assert_allclose(step_sizes, kernel.right, rtol=1e-5)
    assert np.abs(off).max() < 0.1


@pytest.mark.slow
def test_the_users_step_size_is_left_alone():
    step_sizes, off = run(SGHMCSplit(normal_mean, step_size=0.1, num_steps=30, **NOISY))
    np.testing.assert_allclose(step_sizes, 0.1, rtol=1e-5)
    assert off.min() > 0.5


@pytest.mark.parametrize(
    "kernel_class", [SGHMCSplit, *(pytest.param(k, marks=pytest.mark.slow) for k in (SGNHT, SHMC))]
)
def test_a_chain_that_diverges_in_warmup_goes_on_with_smaller_steps(kernel_class):
    """Beyond its stability bound the integrator diverges, from wherever it starts."""

    def make(factor):
        return misled(kernel_class, factor)(
            potential_fn=lambda q: jnp.square(q).sum() / 2, inverse_mass_matrix=np.ones(3)
        )

    probe = make(1.0)
    probe.init(jax.random.key(0), 0, jnp.zeros(3), (), {})
    kernel = make(4.0 / probe.right)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=jnp.ones(3), extra_fields=("diverging",))
    assert mcmc.last_state.adapt_state.step_size < 2.0
    assert not mcmc.get_extra_fields()["diverging"].any()
    # Near its bound a thermostat may stand still in one coordinate for long.
    if kernel_class is not SGNHT:
        assert np.asarray(mcmc.get_samples()).std(0) == pytest.approx(1.0, abs=0.25)


def test_steps_do_not_shrink_to_nothing():
    """Where every iteration diverges, it is not the step's doing."""

    def cliff(q):
        return jnp.square(q).sum() / 2 + 1e-9 * jnp.sqrt(1e-4 - jnp.square(q)).sum()

    kernel = SGHMCSplit(potential_fn=cliff, inverse_mass_matrix=np.ones(2), num_steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state = kernel.init(jax.random.key(0), 100, jnp.zeros(2), (), {})
    first = float(state.adapt_state.step_size)
    step = jax.jit(lambda state: kernel.sample(state, (), {}))
    for _ in range(100):
        state = step(state)
    assert state.adapt_state.step_size == pytest.approx(first / 64, rel=1e-5)
