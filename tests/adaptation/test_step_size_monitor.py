"""A step size that the warm-up chose too long is shortened by the chains."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC
from scipy import stats
from scipy.linalg import expm

from numpyro_sgmcmc import SGNHT, SHMC, SGHMCSplit
from numpyro_sgmcmc.adaptation import GradientNoiseStats
from numpyro_sgmcmc.adaptation.gradient_noise import compute_epoch_variance_fraction
from numpyro_sgmcmc.dynamics import NoseHooverThermostat, OverdampedLangevin, UnderdampedLangevin
from numpyro_sgmcmc.errors import GradientNoiseWarning
from numpyro_sgmcmc.sampling.bias_monitor import StepSizeMonitor, _compute_student_quantile
from tests.quick import quick_if

# --- The variance inflation that is predicted for noise that cancels over an epoch ----------------


@pytest.mark.parametrize("friction", [0.0, 0.2, 1.5, 2.0, 10.0, 1e3])
def test_autocorrelation_is_that_of_the_damped_oscillator(friction):
    lags = np.array([0.0, 0.3, 1.0, 5.0, 300.0])
    drift = np.array([[0.0, 1.0], [-1.0, -friction]])
    exact = [expm(t * drift)[0, 0] for t in lags]
    np.testing.assert_allclose(
        UnderdampedLangevin(friction).autocorrelation(lags, 0.1), exact, atol=1e-6
    )
    np.testing.assert_allclose(OverdampedLangevin().autocorrelation(lags, 0.1), np.exp(-lags))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("is_palindrome", [False, True])
@pytest.mark.parametrize(
    ("dynamics", "integrator", "step_size", "batches_per_epoch"),
    [
        (UnderdampedLangevin(1.5), "symmetric", 0.02, 100),
        quick_if(False, UnderdampedLangevin(1.5), "symmetric", 0.02, 400),
        (UnderdampedLangevin(1.5), "symmetric", 0.1, 10),
        (UnderdampedLangevin(10.0), "symmetric", 0.05, 100),
        (OverdampedLangevin(), "euler", 0.01, 50),
    ],
)
def test_epoch_variance_fraction_agrees_with_the_response_to_a_permutation(
    dynamics, integrator, step_size, batches_per_epoch, is_palindrome
):
    """The offsets of a random permutation act through the integrator's exact impulse response."""
    step = dynamics.make_step(integrator)
    state = jax.tree.map(jnp.zeros_like, dynamics.init(jnp.zeros(1), jax.random.key(0)))
    zeros = jnp.zeros((step.num_noise, 1))

    def run_step(state, offset):
        state = step(state, step_size, lambda q: q + offset, zeros, 0)
        return state, state.position[0]

    period = batches_per_epoch * (1 + is_palindrome)
    num = period * int(np.ceil(60 / (period * step_size)))
    impulse = jnp.zeros(num + period).at[0].set(1.0)
    response = np.asarray(jax.lax.scan(run_step, state, impulse)[1])
    # The offsets of an epoch sum to zero, and all orders have the same probability.
    epoch_covariance = np.eye(batches_per_epoch) - 1 / batches_per_epoch
    epoch_covariance *= batches_per_epoch / (batches_per_epoch - 1)
    if is_palindrome:
        both = np.concatenate([epoch_covariance, epoch_covariance[::-1]])
        epoch_covariance = np.concatenate([both, both[:, ::-1]], axis=1)
    variance = 0.0
    for phase in range(period):
        shifted = np.concatenate([np.zeros(phase), response])[: num + phase]
        shifted = np.pad(shifted, (0, -len(shifted) % period)).reshape(-1, period)
        variance += np.sum(shifted @ epoch_covariance * shifted) / period
    fraction = variance / np.square(response).sum()
    assert 0.01 < fraction < 0.99
    predicted = compute_epoch_variance_fraction(
        dynamics, step_size, batches_per_epoch, is_palindrome=is_palindrome
    )
    assert predicted == pytest.approx(fraction, rel=0.03, abs=0.01)


def test_predict_variance_inflation_noise_cancels_over_an_epoch():
    stats = GradientNoiseStats(100.0, 0.0, 100.0)
    epoch_stats = stats._replace(batches_per_epoch=100)
    dynamics = UnderdampedLangevin(1.5)
    assert stats.predict_variance_inflation(dynamics, 0.02) == pytest.approx(2 / 3)
    # In a simulation the variance is 1.127.
    assert epoch_stats.predict_variance_inflation(dynamics, 0.02) == pytest.approx(0.127, abs=0.01)
    thermostat = NoseHooverThermostat(1.5)
    assert epoch_stats.predict_variance_inflation(
        thermostat, 0.02
    ) == stats.predict_variance_inflation(thermostat, 0.02)
    assert stats._replace(batches_per_epoch=1).predict_variance_inflation(dynamics, 0.02) == 0.0


# --- The decision ---------------------------------------------------------------------------------


@jax.jit
def _compute_step_scale(sums, allowed, ess_per_iteration):
    return StepSizeMonitor(*sums).compute_step_scale(allowed, ess_per_iteration)


def compute_scale(temperatures, allowed=0.1, ess_per_iteration=1.0):
    """Return the factor of the step size after iterations, shape ``(iterations, d)``."""
    for_all = np.append(temperatures, temperatures.mean(1, keepdims=True), 1).astype(np.float32)
    sums = np.float32(len(for_all)), for_all.sum(0), np.square(for_all).sum(0)
    return float(_compute_step_scale(sums, np.float32(allowed), ess_per_iteration))


def sample_temperatures(shape, seed=0):
    """Sample temperatures of exact draws of a standard normal."""
    return np.square(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def test_step_size_monitor_sums_leave_out_invalid_iterations():
    temperatures = sample_temperatures((30, 3))
    monitor = StepSizeMonitor.zeros(3, jnp.float32)
    for k, t in enumerate(temperatures):
        monitor = monitor.add(jnp.where(k == 7, jnp.nan, t), jnp.array(k != 7))
    kept = np.delete(np.asarray(temperatures), 7, 0)
    assert monitor.num_iterations == 29
    expected = [*kept.sum(0), kept.mean(1).sum()]
    np.testing.assert_allclose(monitor.temperature_sum, expected, rtol=1e-5)
    np.testing.assert_allclose(monitor.temperature_sq_sum[:3], np.square(kept).sum(0), rtol=1e-5)


@pytest.mark.parametrize("num", [25, quick_if(False, 75), 500])
def test_step_scale_exact_draws_rarely_shorten_the_step(num):
    scales = [compute_scale(sample_temperatures((num, 20), seed)) for seed in range(200)]
    assert np.mean(np.array(scales) < 1) <= 0.01


@pytest.mark.parametrize("num", [25, 60])
def test_step_scale_exact_draws_of_many_coordinates_do_not_shorten_the_step(num):
    """Some temperatures of a hierarchy's many effects are far from one by chance."""
    for seed in range(3):
        q, noise = np.random.default_rng(seed).standard_normal((2, num, 100_000))
        assert compute_scale(q * (q + noise), allowed=0.02) == 1


@pytest.mark.parametrize(
    ("temperature", "scale"),
    [
        (np.ones(20), 1.0),
        (1.05 * np.ones(20), 1.0),  # within what is allowed
        (1.4 * np.ones(20), 0.1 / 0.4),
        (3.0 * np.ones(20), 1 / 8),
        (0.7 * np.ones(20), 0.1 / 0.3),  # too low on average
        (np.append(2.0, np.ones(19)), 1 / 8),  # in one coordinate alone
        (np.append(0.5, np.ones(19)), 0.1 / 0.5),
    ],
)
def test_step_scale_is_the_ratio_of_allowed_to_actual_deviation(temperature, scale):
    temperatures = temperature * sample_temperatures((2000, 20))
    assert compute_scale(temperatures) == pytest.approx(scale, rel=0.25)


def test_step_scale_few_or_dependent_iterations_do_not_shorten_the_step():
    temperatures = 1.4 * sample_temperatures((100, 20))
    assert compute_scale(temperatures) < 1
    assert compute_scale(temperatures, ess_per_iteration=0.02) == 1
    assert compute_scale(4.0 * sample_temperatures((10, 20))) == 1
    assert compute_scale(temperatures, allowed=1.0) == 1


# --- In a run -------------------------------------------------------------------------------------

DATA = jnp.asarray(np.random.default_rng(0).standard_normal((1000, 3)), jnp.float32)
NOISY = {"gradient_estimator": "minibatch", "subsampling": "iid"}


def normal_mean(y, batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])


def standard_normal(kernel_class):
    return kernel_class(
        potential_fn=lambda q: jnp.square(q).sum() / 2, inverse_mass_matrix=np.ones(3)
    )


def with_step_size_factor(kernel, factor, init_params, args, kwargs):
    """Return a kernel whose warm-up has chosen a longer step, and the right step size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        kernel.init(jax.random.key(0), 0, init_params, args, kwargs)
    adaptation = kernel.adaptation
    step_size = adaptation.step_size
    return kernel.copy_with(adaptation=adaptation._replace(step_size=factor * step_size)), step_size


def run(kernel, num_warmup=300):
    """Return the step sizes of the chains, and the relative errors of the SDs."""
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
    sd_inflation = np.asarray(mcmc.get_samples()["mu"]).std(0) * np.sqrt(len(DATA)) - 1
    return np.asarray(mcmc.last_state.adapt_state.step_size), sd_inflation


@pytest.mark.slow
def test_run_too_long_steps_are_shortened_in_warmup_only():
    kernel = SGHMCSplit(normal_mean, num_steps=100, **NOISY)
    arguments = None, (DATA,), {"batch_size": 10}
    kernel, step_size = with_step_size_factor(kernel, 20.0, *arguments)
    step_sizes, sd_inflation = run(kernel)
    assert (step_sizes < 4.0 * step_size).all()
    assert np.abs(sd_inflation).max() < 0.35
    step_sizes, sd_inflation = run(kernel, num_warmup=0)
    np.testing.assert_allclose(step_sizes, 20.0 * step_size, rtol=1e-5)
    assert sd_inflation.min() > 1.0


@pytest.mark.slow
def test_run_right_steps_are_kept():
    kernel = SGHMCSplit(normal_mean)
    step_sizes, sd_inflation = run(kernel)
    np.testing.assert_allclose(step_sizes, kernel.adaptation.step_size, rtol=1e-5)
    assert np.abs(sd_inflation).max() < 0.1


@pytest.mark.slow
def test_run_user_step_size_is_kept():
    step_sizes, sd_inflation = run(SGHMCSplit(normal_mean, step_size=0.1, num_steps=30, **NOISY))
    np.testing.assert_allclose(step_sizes, 0.1, rtol=1e-5)
    assert sd_inflation.min() > 0.5


def test_warm_up_target_out_of_reach_is_reported_unless_noise_cancels():
    """V h / (2 friction) is 0.2 at the shortest step, of 500 steps per draw."""
    arguments = jax.random.key(0), 0, None, (DATA,), {"batch_size": 10}
    with pytest.warns(GradientNoiseWarning, match=r"1[0-2]% too wide.*\(10 steps per draw\)"):
        SGHMCSplit(normal_mean, target_sd_bias=0.03, **NOISY).init(*arguments)
    # Over an epoch of 100 minibatches the same noise cancels.
    options = {"gradient_estimator": "minibatch", "subsampling": "shuffled"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SGHMCSplit(normal_mean, target_sd_bias=0.03, **options).init(*arguments)


@pytest.mark.parametrize(
    "kernel_class", [SGHMCSplit, *(pytest.param(k, marks=pytest.mark.slow) for k in (SGNHT, SHMC))]
)
def test_run_chains_that_diverge_in_warmup_take_shorter_steps(kernel_class):
    """Beyond its stability limit the integrator diverges from every position."""
    _, step_size = with_step_size_factor(standard_normal(kernel_class), 1.0, jnp.zeros(3), (), {})
    kernel, _ = with_step_size_factor(
        standard_normal(kernel_class), 4.0 / step_size, jnp.zeros(3), (), {}
    )
    mcmc = MCMC(kernel, num_warmup=200, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=jnp.ones(3), extra_fields=("diverging",))
    assert mcmc.last_state.adapt_state.step_size < 2.0
    assert not mcmc.get_extra_fields()["diverging"].any()
    # Near its stability limit a thermostat may stop in one coordinate for long.
    if kernel_class is not SGNHT:
        assert np.asarray(mcmc.get_samples()).std(0) == pytest.approx(1.0, abs=0.25)


def test_run_steps_are_not_shortened_without_end():
    """Where every iteration diverges, the step size is not the cause."""

    def potential_fn(q):
        return jnp.square(q).sum() / 2 + 1e-9 * jnp.sqrt(1e-4 - jnp.square(q)).sum()

    kernel = SGHMCSplit(potential_fn=potential_fn, inverse_mass_matrix=np.ones(2), num_steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state = kernel.init(jax.random.key(0), 100, jnp.zeros(2), (), {})
    step_size = float(state.adapt_state.step_size)
    sample = jax.jit(lambda state: kernel.sample(state, (), {}))
    for _ in range(100):
        state = sample(state)
    assert state.adapt_state.step_size == pytest.approx(step_size / 64, rel=1e-5)


@pytest.mark.parametrize("z", [4.0, 4.7, 5.5])
@pytest.mark.parametrize("degrees_of_freedom", [19.0, 49.0, 1e4])
def test_quantiles_of_student_are_those_of_scipy(z, degrees_of_freedom):
    expected = stats.t.isf(stats.norm.sf(z), degrees_of_freedom)
    found = _compute_student_quantile(z, jnp.asarray(degrees_of_freedom))
    assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("num_errors", "is_shortened"), [(4.7, False), (8.0, True)])
def test_step_is_shortened_beyond_the_quantile_of_few_iterations(num_errors, is_shortened):
    """With 24 iterations Student's quantile is 5.2 where the normal one is 4.2."""
    num, rng = 24, np.random.default_rng(0)
    deviations = rng.standard_normal(num)
    deviations = (deviations - deviations.mean()) / deviations.std(ddof=1)
    noise = 0.1 * np.sqrt(num)  # so that the standard error is 0.1
    temperatures = 1.0 + rng.normal(0.0, 1.0, (num, 200)) * 0.1
    temperatures[:, 7] = 1.0 + 0.1 * num_errors + noise * deviations
    scale = compute_scale(temperatures, allowed=0.01)
    assert (scale < 1.0) == is_shortened
