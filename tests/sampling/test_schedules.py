"""Step-size schedules and the weights they imply."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.sampling import schedules

WEIGHTS = np.array([[1.0, 0.0, 3.0], [2.0, 2.0, 0.0]])
DRAWS = {"a": np.array([[1.0, 50.0, 3.0], [5.0, 7.0, 90.0]]), "b": np.arange(12.0).reshape(2, 3, 2)}


def test_best_exponents_are_the_theorys():
    assert schedules.optimal_decay_exponent(2, "bias") == pytest.approx(1 / 3)
    assert schedules.optimal_decay_exponent(2, "mse") == pytest.approx(1 / 5)
    assert schedules.optimal_decay_exponent(1, "bias") == pytest.approx(1 / 2)
    with pytest.raises(ValueError, match="'variance'"):
        schedules.optimal_decay_exponent(2, "variance")


def test_polynomial():
    schedule = schedules.Polynomial(0.4, 0.5)
    np.testing.assert_allclose(schedule(jnp.array([0, 3, 99])), [0.4, 0.2, 0.04], rtol=1e-6)


def test_cycles_explore_first():
    schedule = schedules.Cyclical(0.4, period=10, exploration=0.3)
    sizes = schedule(jnp.arange(20))
    np.testing.assert_allclose(sizes[:10], sizes[10:])
    assert (np.diff(sizes[:10]) < 0).all()
    assert sizes[0] == pytest.approx(0.4)
    weights = schedule.weight(jnp.arange(10))
    assert (weights[:3] == 0).all()
    np.testing.assert_allclose(weights[3:], sizes[3:10])


def test_weighted_mean():
    found = schedules.weighted_mean(DRAWS, WEIGHTS)
    assert found["a"] == pytest.approx((1 + 9 + 10 + 14) / 8)
    expected = np.tensordot(WEIGHTS / 8, DRAWS["b"], 2)
    np.testing.assert_allclose(found["b"], expected, rtol=1e-6)


@pytest.mark.parametrize(("q", "value"), [(0.0, 1), (0.125, 1), (0.2, 3), (0.6, 5), (1.0, 7)])
def test_weighted_quantile(q, value):
    """Sorted with their shares: 1 (1/8), 3 (3/8), 5 (2/8), 7 (2/8)."""
    assert schedules.weighted_quantile(DRAWS, WEIGHTS, q)["a"] == value


def test_equal_weights_give_ordinary_quantiles():
    x = np.random.default_rng(0).standard_normal((2, 501, 3))
    found = schedules.weighted_quantile(x, np.ones((2, 501)), 0.3)
    expected = np.quantile(x.reshape(-1, 3), 0.3, axis=0, method="inverted_cdf")
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_resampled_draws_appear_as_often_as_their_weights_say():
    found = schedules.systematic_resample(random.key(0), DRAWS, WEIGHTS, num_draws=400)
    assert found["b"].shape == (2, 400, 2)
    for chain, expected in enumerate([{1: 100, 3: 300}, {5: 200, 7: 200}]):
        values, counts = np.unique(found["a"][chain], return_counts=True)
        assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == expected


def potential(q):
    return jnp.square(q).sum() / 2


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
@pytest.mark.parametrize(
    "schedule",
    [
        schedules.Polynomial(0.5, 0.2),
        pytest.param(schedules.Cyclical(0.5, period=40), marks=pytest.mark.slow),
        pytest.param(optax.exponential_decay(0.5, 1000, 0.5), marks=pytest.mark.slow),
    ],
    ids=lambda s: type(s).__name__,
)
def test_weights_reach_the_extra_fields(schedule):
    kernel = SGHMCSplit(potential_fn=potential, step_size=schedule, num_steps=10)
    mcmc = MCMC(kernel, num_warmup=3, num_samples=20, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.zeros(2), extra_fields=("weight",))
    steps = jnp.arange(30, 230).reshape(20, 10)
    expected = jax.vmap(jax.vmap(getattr(schedule, "weight", schedule)))(steps).sum(1)
    np.testing.assert_allclose(mcmc.get_extra_fields()["weight"], expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
def test_draws_that_end_in_exploration_have_no_weight():
    """Cycles of 25 steps, of which the last 12 sample, seen every ten steps."""
    schedule = schedules.Cyclical(0.5, period=25)
    kernel = SGHMCSplit(potential_fn=potential, step_size=schedule, num_steps=10)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=10, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.zeros(2), extra_fields=("weight",))
    last = 10 * np.arange(1, 11) - 1
    weight = np.asarray(mcmc.get_extra_fields()["weight"])
    np.testing.assert_array_equal(weight > 0, last % 25 >= 12.5)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: schedules.Polynomial(-1.0), "`initial` is -1.0"),
        (lambda: schedules.Polynomial(0.1, 2.0), "`exponent` is 2.0"),
        (lambda: schedules.Cyclical(0.4, 0), "`period` is 0"),
        (lambda: schedules.Cyclical(0.4, 100, 1.5), "`exploration` is 1.5"),
        (lambda: schedules.Cyclical(0.4, 100, final=-1), "`final` is -1"),
        (lambda: schedules.weighted_mean(jnp.ones(6), jnp.ones((2, 3))), "group_by_chain"),
        (lambda: schedules.weighted_mean(jnp.ones(3), jnp.zeros(3)), "not all zero"),
        (lambda: schedules.weighted_mean(jnp.ones(3), jnp.array([-1.0, 1, 1])), "negative"),
        (lambda: schedules.weighted_quantile(jnp.ones(3), jnp.ones(3), 2.0), "`q` is 2.0"),
        (
            lambda: schedules.systematic_resample(random.key(0), jnp.ones(3), jnp.ones(3)),
            "group_by_chain",
        ),
        (
            lambda: schedules.systematic_resample(random.key(0), DRAWS, WEIGHTS, -3),
            "`num_draws` is -3",
        ),
        (lambda: schedules.drop_exploration(jnp.ones(3), jnp.ones(3)), "chains, draws"),
    ],
)
def test_bad_input_is_named(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda n: 0.1 if n < 10 else 0.2, "that JAX can trace"),
        (lambda n: jnp.ones(2), "returns a number"),
        (lambda n: -0.1 + 0.0 * n, r"`step_size\(0\)` is -0.1"),
        (lambda n: jnp.where(n > 1000, jnp.nan, 0.1), r"`step_size\(2000\)` is nan"),
        (lambda n: 0.0 * n, "all zero"),
    ],
)
def test_bad_schedule_is_named(schedule, words):
    kernel = SGHMCSplit(potential_fn=potential, step_size=schedule)
    with pytest.raises(ValueError, match=words):
        kernel.init(random.key(0), 10, jnp.zeros(2), (), {})


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
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
def test_steps_of_zero_are_no_divergence_and_negative_ones_are(schedule, num_diverging):
    kernel = SGHMCSplit(potential_fn=potential, step_size=schedule, num_steps=10)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=40, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.ones(2), extra_fields=("weight",))
    fields = mcmc.get_extra_fields()
    assert fields["diverging"].sum() == num_diverging
    assert (fields["weight"] >= 0).all()


def test_weights_that_differ_between_chains_are_refused():
    with pytest.raises(ValueError, match="the same in each chain"):
        schedules.drop_exploration(jnp.zeros((2, 2)), jnp.array([[0.0, 1.0], [1.0, 0.0]]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
def test_constant_steps_weigh_alike():
    kernel = SGHMCSplit(potential_fn=potential, step_size=0.2, num_steps=5)
    mcmc = MCMC(kernel, num_warmup=3, num_samples=20, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.zeros(2), extra_fields=("weight",))
    np.testing.assert_allclose(mcmc.get_extra_fields()["weight"], 1.0, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
@pytest.mark.slow
def test_weights_leave_the_long_steps_out():
    """The variance is up to 20 % off while a cycle explores, and right where it samples."""
    schedule = schedules.Cyclical(1.6, period=1000, exploration=0.8)
    kernel = SGHMCSplit(potential_fn=potential, step_size=schedule, num_steps=10)
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=1000,
        num_chains=64,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), init_params=jnp.zeros((64, 2)), extra_fields=("weight",))
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
