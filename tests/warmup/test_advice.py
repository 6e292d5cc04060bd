"""What the user is told of the gradient's noise: which minibatch would serve, and that it does."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit

ROWS, RARE = 20_000, 40


def rare_column(x, y, batch_size=None):
    """A column that is zero in all rows but a few, which decide its coefficient."""
    b = numpyro.sample("b", dist.Normal(0, 2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(b * x[i])), obs=y[i])


def many_means(group, y, batch_size=None):
    """Groups that a minibatch meets seldom, and the scale that they share."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    means = numpyro.sample("means", dist.Normal(0, scale).expand([150]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(means[group[i]], 3.0), obs=y[i])


def rare_data():
    rng = np.random.default_rng(0)
    x = np.zeros(ROWS, np.float32)
    x[rng.choice(ROWS, RARE, replace=False)] = rng.standard_normal(RARE)
    return jnp.asarray(x), jnp.asarray(rng.poisson(np.exp(0.7 * x)))


def grouped_data():
    rng = np.random.default_rng(0)
    group = rng.integers(0, 150, 3_000)
    y = rng.standard_normal(150)[group] + 3.0 * rng.standard_normal(3_000)
    return jnp.asarray(group), jnp.asarray(y, jnp.float32)


def found_with(model, data, batch_size, **options):
    """The kernel after its warm-up, and what that said."""
    kernel = SGHMCSplit(model, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        kernel.init(jax.random.key(0), 10, None, data, {"batch_size": batch_size})
    return kernel, [str(w.message) for w in said]


@pytest.mark.parametrize(
    ("model", "data", "batch_size", "told"),
    [
        (rare_column, rare_data, 20, "posterior sds are predicted to be .* % too wide"),
        (rare_column, rare_data, 500, "a draw takes .* short steps"),
        (many_means, grouped_data, 30, "means are predicted to be .* posterior sds off"),
    ],
)
def test_the_minibatch_that_is_named_serves(model, data, batch_size, told):
    _, (sentence,) = found_with(model, data(), batch_size)
    assert re.search(told, sentence)
    named = re.search(r"of 'rows' (?:about|all) (\d+): (\d+) steps a draw", sentence)
    size, num_steps = int(named[1]), int(named[2])
    assert size > batch_size
    kernel, said = found_with(model, data(), size)
    assert not said
    assert kernel.adaptation.num_steps == pytest.approx(num_steps, rel=0.5)


def test_nothing_is_said_of_a_step_size_that_is_given():
    _, said = found_with(rare_column, rare_data(), 20, step_size=0.1)
    assert not said


def test_control_variates_are_named_where_the_user_has_none():
    _, (sentence,) = found_with(rare_column, rare_data(), 20, gradient="plain")
    assert sentence.endswith("or gradient='auto'.")
