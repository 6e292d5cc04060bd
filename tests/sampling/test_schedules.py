"""Step-size schedules, and averages weighted by step size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, schedules
from numpyro_sgmcmc.errors import InvalidArgumentError

WEIGHTS = np.array([[1.0, 0.0, 3.0], [2.0, 2.0, 0.0]])
DRAWS = {"a": np.array([[1.0, 50.0, 3.0], [5.0, 7.0, 90.0]]), "b": np.arange(12.0).reshape(2, 3, 2)}

# Schedules


def test_polynomial_decays_with_its_exponent():
    schedule = schedules.Polynomial(0.4, 0.5)
    np.testing.assert_allclose(schedule(jnp.array([0, 3, 99])), [0.4, 0.2, 0.04], rtol=1e-6)


def test_optimal_decay_exponent_is_that_of_the_theorem():
    assert schedules.optimal_decay_exponent(2, "bias") == pytest.approx(1 / 3)
    assert schedules.optimal_decay_exponent(2, "mse") == pytest.approx(1 / 5)
    assert schedules.optimal_decay_exponent(1, "bias") == pytest.approx(1 / 2)
    with pytest.raises(InvalidArgumentError, match=r"criterion.*'variance'"):
        schedules.optimal_decay_exponent(2, "variance")


def test_cyclical_weights_are_zero_while_it_explores():
    schedule = schedules.Cyclical(0.4, period=10, exploration=0.3)
    step_sizes = np.asarray(jax.jit(schedule)(np.arange(20)))
    np.testing.assert_allclose(step_sizes[:10], step_sizes[10:])
    assert (np.diff(step_sizes[:10]) < 0).all()
    assert step_sizes[0] == pytest.approx(0.4)
    weights = np.asarray(jax.jit(schedule.weight)(np.arange(10)))
    assert (weights[:3] == 0).all()
    np.testing.assert_allclose(weights[3:], step_sizes[3:10])


@pytest.mark.parametrize(
    ("build", "pattern"),
    [
        (lambda: schedules.Polynomial(-1.0), "`initial`.*-1.0"),
        (lambda: schedules.Polynomial(0.1, 2.0), "`exponent`.*2.0"),
        (lambda: schedules.Cyclical(0.4, 0), "`period`.*0"),
        (lambda: schedules.Cyclical(0.4, 100, 1.5), "`exploration`.*1.5"),
        (lambda: schedules.Cyclical(0.4, 100, 1), "`exploration`.*1"),
        (lambda: schedules.Cyclical(0.4, 100, final=-1), "`final`.*-1"),
        (lambda: schedules.Cyclical(0.4, 100, final=2), "`final`.*2"),
    ],
)
def test_schedule_with_an_invalid_parameter_raises(build, pattern):
    with pytest.raises(InvalidArgumentError, match=pattern):
        build()


@pytest.mark.parametrize(
    ("schedule", "pattern"),
    [
        (lambda n: 0.1 if n < 10 else 0.2, "`step_size`.*trace"),
        (lambda n: jnp.ones(2), "`step_size`.*shape"),
        (lambda n: -0.1 + 0.0 * n, r"`step_size\(0\)`.*-0.1"),
        (lambda n: jnp.where(n > 1000, jnp.nan, 0.1), r"`step_size\(2000\)`.*nan"),
        (lambda n: 0.0 * n, "`step_size`.*zero"),
    ],
)
def test_invalid_schedule_raises(schedule, pattern):
    with pytest.raises(InvalidArgumentError, match=pattern):
        schedules.first_step_size(schedule)


def test_first_step_size_of_a_warmup_schedule_is_its_largest():
    assert schedules.first_step_size(optax.linear_schedule(0.0, 0.3, 50)) == pytest.approx(0.3)
    assert schedules.first_step_size(optax.constant_schedule(0.2)) == pytest.approx(0.2)


# Weighted draws


def test_weighted_mean_is_over_draws_and_chains():
    means = schedules.weighted_mean(DRAWS, WEIGHTS)
    assert means["a"] == pytest.approx((1 + 9 + 10 + 14) / 8)
    expected = np.tensordot(WEIGHTS / 8, DRAWS["b"], 2)
    np.testing.assert_allclose(means["b"], expected, rtol=1e-6)


@pytest.mark.parametrize(("q", "value"), [(0.0, 1), (0.125, 1), (0.2, 3), (0.6, 5), (1.0, 7)])
def test_weighted_quantile_ignores_draws_without_weight(q, value):
    """Sorted, the draws have weights 1 (1/8), 3 (3/8), 5 (2/8), 7 (2/8)."""
    assert schedules.weighted_quantile(DRAWS, WEIGHTS, q)["a"] == value


def test_weighted_quantile_with_equal_weights_is_the_ordinary_quantile():
    x = np.random.default_rng(0).standard_normal((2, 501, 3))
    quantiles = schedules.weighted_quantile(jnp.asarray(x), np.ones((2, 501)), 0.3)
    expected = np.quantile(x.reshape(-1, 3), 0.3, axis=0, method="inverted_cdf")
    np.testing.assert_allclose(quantiles, expected, rtol=1e-6)


def test_drop_exploration_keeps_draws_with_weight():
    weights = np.array([[0.0, 2.0, 3.0], [0.0, 1.0, 4.0]])
    draws, kept_weights = schedules.drop_exploration(DRAWS, weights)
    np.testing.assert_array_equal(kept_weights, weights[:, 1:])
    np.testing.assert_array_equal(draws["b"], DRAWS["b"][:, 1:])


def test_drop_exploration_with_weights_that_differ_between_chains_raises():
    with pytest.raises(InvalidArgumentError, match=r"`weights`.*chains"):
        schedules.drop_exploration(jnp.zeros((2, 2)), jnp.array([[0.0, 1.0], [1.0, 0.0]]))


def test_systematic_resample_repeats_draws_in_proportion_to_their_weights():
    resampled = schedules.systematic_resample(random.key(0), DRAWS, WEIGHTS, num_draws=400)
    assert resampled["b"].shape == (2, 400, 2)
    for chain, expected in enumerate([{1: 100, 3: 300}, {5: 200, 7: 200}]):
        values, counts = np.unique(resampled["a"][chain], return_counts=True)
        assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == expected


def test_systematic_resample_of_a_chain_without_weight_raises():
    """One chain has weights, so that the total is positive."""
    weights = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    with pytest.raises(InvalidArgumentError, match=r"`weights` of chain 1.*zero"):
        schedules.systematic_resample(random.key(0), DRAWS, weights)


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda: schedules.weighted_mean(jnp.ones(6), jnp.ones((2, 3))), "`weights`.*shape"),
        (lambda: schedules.weighted_mean(jnp.ones(3), jnp.zeros(3)), "`weights`.*zero"),
        (lambda: schedules.weighted_mean(jnp.ones(3), jnp.array([-1.0, 1, 1])), "`weights`.*neg"),
        (lambda: schedules.weighted_quantile(jnp.ones(3), jnp.ones(3), 2.0), "`q`.*2.0"),
        (
            lambda: schedules.systematic_resample(random.key(0), jnp.ones(3), jnp.ones(3)),
            "`weights`.*group_by_chain",
        ),
        (
            lambda: schedules.systematic_resample(random.key(0), DRAWS, WEIGHTS, -3),
            "`num_draws`.*-3",
        ),
        (lambda: schedules.drop_exploration(jnp.ones(3), jnp.ones(3)), "`weights`.*chains, draws"),
    ],
)
def test_weighted_draws_with_invalid_arguments_raise(call, pattern):
    with pytest.raises(InvalidArgumentError, match=pattern):
        call()


# Runs


def potential(q):
    return jnp.square(q).sum() / 2


def run(step_size, num_warmup, num_samples, init_params, num_steps=10, seed=0, **settings):
    """Return a run on a standard normal; its weights are among the extra fields."""
    kernel = SGHMCSplit(potential_fn=potential, step_size=step_size, num_steps=num_steps)
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        progress_bar=False,
        **settings,
    )
    mcmc.run(random.key(seed), init_params=init_params, extra_fields=("weight",))
    return mcmc


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.Polynomial(0.5, 0.2),
        pytest.param(schedules.Cyclical(0.5, period=40), marks=pytest.mark.slow),
        pytest.param(optax.exponential_decay(0.5, 1000, 0.5), marks=pytest.mark.slow),
    ],
    ids=lambda s: type(s).__name__,
)
def test_weight_of_a_draw_is_the_sum_of_its_step_sizes(schedule):
    mcmc = run(schedule, num_warmup=3, num_samples=20, init_params=jnp.zeros(2))
    step_indices = np.arange(30, 230).reshape(20, 10)
    weight = jax.jit(jax.vmap(jax.vmap(getattr(schedule, "weight", schedule))))
    expected = np.sum(weight(step_indices), 1)
    np.testing.assert_allclose(mcmc.get_extra_fields()["weight"], expected, rtol=1e-5)


def test_weight_of_a_draw_that_ends_in_exploration_is_zero():
    """Cycles have 25 steps, of which the last 12 sample; a draw comes every ten steps."""
    mcmc = run(schedules.Cyclical(0.5, period=25), 0, 10, init_params=jnp.zeros(2))
    last_steps = 10 * np.arange(1, 11) - 1
    weight = np.asarray(mcmc.get_extra_fields()["weight"])
    np.testing.assert_array_equal(weight > 0, last_steps % 25 >= 12.5)


@pytest.mark.slow
def test_weights_of_a_constant_step_size_are_equal():
    mcmc = run(0.2, num_warmup=3, num_samples=20, init_params=jnp.zeros(2), num_steps=5)
    np.testing.assert_allclose(mcmc.get_extra_fields()["weight"], 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "num_diverging"),
    [
        pytest.param(
            optax.warmup_cosine_decay_schedule(0.0, 0.3, 50, 300), 0, marks=pytest.mark.slow
        ),
        (lambda n: 0.3 - 0.002 * n, 25),
    ],
    ids=["from zero to zero", "below zero"],
)
def test_negative_steps_diverge_and_steps_of_zero_do_not(schedule, num_diverging):
    mcmc = run(schedule, num_warmup=0, num_samples=40, init_params=jnp.ones(2))
    fields = mcmc.get_extra_fields()
    assert fields["diverging"].sum() == num_diverging
    assert (fields["weight"] >= 0).all()


@pytest.mark.slow
def test_weighted_averages_leave_out_long_exploration_steps():
    """The variance is up to 20% off while a cycle explores, and right where it samples."""
    mcmc = run(
        schedules.Cyclical(1.6, period=1000, exploration=0.8),
        num_warmup=100,
        num_samples=1000,
        init_params=jnp.zeros((64, 2)),
        seed=1,
        num_chains=64,
        chain_method="vectorized",
    )
    draws = mcmc.get_samples(group_by_chain=True)
    weights = mcmc.get_extra_fields(group_by_chain=True)["weight"]
    np.testing.assert_allclose(schedules.weighted_mean(jnp.square(draws), weights), 1, atol=0.03)
    assert (jnp.square(draws).mean((0, 1)) < 0.95).all()
    resampled = schedules.systematic_resample(random.key(2), draws, weights)
    np.testing.assert_allclose(jnp.square(resampled).mean((0, 1)), 1, atol=0.04)
    kept, kept_weights = schedules.drop_exploration(draws, weights)
    assert kept.shape == (64, 200, 2)
    np.testing.assert_allclose(
        schedules.weighted_mean(kept, kept_weights), schedules.weighted_mean(draws, weights), 1e-5
    )
