"""Rows that decide are found, are in every minibatch, and leave the gradient unbiased."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.influential import choose_num_influential
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import SUBSAMPLINGS, Plate, init_stream, sample_minibatches
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import quietly

RARE, BATCH = 5, 100


def model(z, x, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a * z[i] + b * x[i], scale), obs=y[i])


def two_outcomes(z, x, y, batch_size=None):
    """The plate is not the last batch dimension, and what is observed is scaled besides."""
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    with numpyro.plate("rows", len(y), subsample_size=batch_size, dim=-2) as i:
        mean = jnp.stack([a * z[i], b * x[i]], 1)
        with numpyro.handlers.scale(scale=0.5), numpyro.plate("outcomes", 2):
            numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.stack([y[i], -y[i]], 1))
        numpyro.factor("pull", -0.1 * (a - z[i][:, None]) ** 2)


def data(num_rows, num_rare, value=1.0):
    rng = np.random.default_rng(6)
    z, x = rng.standard_normal(num_rows), np.zeros(num_rows)
    x[rng.choice(num_rows, num_rare, False)] = value
    y = 0.5 * z + 2.0 * x + rng.standard_normal(num_rows)
    return tuple(jnp.asarray(v, jnp.float32) for v in (z, x, y))


def ready(model, num_rows, batch_size, num_rare=2):
    arguments = Arguments(data(num_rows, num_rare), {"batch_size": batch_size})
    return make_model_potential(model, arguments, numpyro.infer.init_to_uniform), arguments


# --- Which rows ---------------------------------------------------------------------------------


def test_few_rows_that_make_the_noise_are_told():
    alike = np.full(50_000, 1e-5)
    assert choose_num_influential(alike, BATCH) == 0
    rng = np.random.default_rng(0)
    assert choose_num_influential(1e-5 * rng.chisquare(1, 50_000), BATCH) == 0
    decided = alike.copy()
    decided[7:12] = 0.3
    assert choose_num_influential(decided, BATCH) == 5
    assert choose_num_influential(1e-12 * decided, BATCH) == 0  # noise that shortens no step
    decided[:400] = 0.3  # more than a minibatch holds
    assert choose_num_influential(decided, BATCH) <= BATCH // 2


# --- What a minibatch is then -------------------------------------------------------------------

PLATE = Plate("rows", 11, 5, included_rows=(3, 7))


def test_places_are_the_other_rows_in_their_order():
    others = [0, 1, 2, 4, 5, 6, 8, 9, 10]
    for xp in (np, jnp):
        found = np.asarray(PLATE.add_included_rows(xp.arange(9, dtype=xp.int32).reshape(3, 3)))
        assert found.shape == (3, 5)
        assert (found[:, :2] == [3, 7]).all()
        assert list(found[:, 2:].ravel()) == others
    assert PLATE.batches_per_epoch == 3
    assert np.isclose(PLATE.row_weights.sum(), 5.0)  # the likelihood as a whole weighs the same


@pytest.mark.parametrize("scheme", SUBSAMPLINGS.values(), ids=SUBSAMPLINGS)
def test_every_minibatch_holds_them_and_the_others_are_all_visited(scheme):
    key = jax.random.key(0)
    _, rows = sample_minibatches(scheme, PLATE, init_stream(PLATE, key), key, 60)
    rows = np.asarray(rows)
    assert (rows[:, :2] == [3, 7]).all()
    counts = np.bincount(rows[:, 2:].ravel(), minlength=11)
    assert not counts[[3, 7]].any()
    assert counts[[0, 1, 2, 4, 5, 6, 8, 9, 10]].min() > 5


@pytest.mark.parametrize("of", [model, two_outcomes])
def test_the_gradient_stays_unbiased(of):
    target, arguments = ready(of, 11, 5)
    stepped = target.with_included_rows((("rows", (3, 7)),))
    assert stepped is target.with_included_rows((("rows", (3, 7)),))
    q = jnp.linspace(-0.4, 0.7, target.dim)
    places = np.arange(9, dtype=np.int32).reshape(3, 3)
    each = [
        stepped.value_and_grad(q, {"rows": rows}, arguments)
        for rows in stepped.plates[0].add_included_rows(places)
    ]
    whole = target.full_value(q, arguments), target.full_gradient(q, arguments)
    for found, expected in zip(zip(*each, strict=True), whole, strict=True):
        np.testing.assert_allclose(np.mean(found, 0), expected, rtol=1e-5, atol=1e-5)
    plain = target.gradient(q, {"rows": stepped.plates[0].add_included_rows(places[0])}, arguments)
    assert not np.allclose(plain, each[0][1], rtol=1e-3)


@pytest.mark.parametrize("of", [model, two_outcomes])
def test_shares_of_rows_add_up_to_the_potential(of):
    target, arguments = ready(of, 11, 5)
    q = jnp.linspace(-0.4, 0.7, target.dim)
    some, others = ({"rows": jnp.array(r)} for r in ([0, 3, 7, 8, 2], [1, 4, 5, 6, 10]))
    whole = target.value(q, some, arguments) - target.value(q, others, arguments)
    shares = [target.pointwise_potentials(q, r, arguments).sum() for r in (some, others)]
    assert target.pointwise_potentials(q, some, arguments).shape == (5,)
    np.testing.assert_allclose((shares[0] - shares[1]) * 11 / 5, whole, rtol=1e-4)


def test_rows_that_stand_for_all_hold_them():
    target, arguments = ready(model, 3_000, 50, num_rare=3)
    rare = tuple(int(k) for k in np.flatnonzero(np.asarray(arguments.args[1])))
    q = np.array([[0.3, 1.0, 0.1], [0.5, -2.0, 0.0]])
    exact = np.stack([target.full_gradient(jnp.asarray(x, jnp.float32), arguments) for x in q])
    found = BatchedGradients(target, arguments, 600, (("rows", rare),)).evaluate_on_subset(q)[1]
    without = BatchedGradients(target, arguments, 600).evaluate_on_subset(q)[1]
    # The gradient by b is made by these rows alone, but for the prior.
    np.testing.assert_allclose(found[:, 1], exact[:, 1], rtol=1e-4)
    assert not np.allclose(without[:, 1], exact[:, 1], rtol=0.1)
    everything = BatchedGradients(target, arguments, 10_000, (("rows", rare),)).evaluate_on_subset(
        q
    )[1]
    np.testing.assert_allclose(everything, exact, rtol=1e-4, atol=1e-2)


# --- Runs ---------------------------------------------------------------------------------------


def run(num_rows, num_rare, value, **settings):
    mcmc = quietly(
        SGHMCSplit(model, **settings),
        num_warmup=100,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
    )
    arguments = data(num_rows, num_rare, value)
    mcmc.run(jax.random.key(0), *arguments, batch_size=BATCH)
    return mcmc, arguments


def assert_right(mcmc, arguments):
    """The coefficients beside least squares: priors are wide and rows many."""
    z, x, y = (np.asarray(v, np.float64) for v in arguments)
    A = np.stack([z, x], 1)
    precision = A.T @ A + np.eye(2) / 25
    mean, sd = np.linalg.solve(precision, A.T @ y), np.sqrt(np.diag(np.linalg.inv(precision)))
    for name, m, s in zip("ab", mean, sd, strict=True):
        draws = np.asarray(mcmc.get_samples()[name])
        assert abs(draws.mean() - m) < 0.1 * s
        assert abs(draws.std() / s - 1) < 0.08


@pytest.mark.slow
def test_a_covariate_of_five_rows_is_right_with_short_draws():
    mcmc, arguments = run(50_000, RARE, 1.0)
    ((name, rows),) = mcmc.sampler.adaptation.included_rows
    assert name == "rows"
    assert set(np.flatnonzero(np.asarray(arguments[1]))) <= set(rows)
    assert len(rows) <= 10
    assert int(mcmc.last_state.num_steps.max()) <= 50
    assert_right(mcmc, arguments)
    assert bias_report(mcmc).is_ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"gradient_estimator": "minibatch"}, {"noise_compensation": True}]
)
def test_no_rows_are_held_where_that_would_not_help(settings):
    """Plain gradients have other noise, and what is compensated is that of single rows."""
    z, x, y = data(5_000, RARE)
    mcmc = MCMC(SGHMCSplit(model, **settings), num_warmup=1, num_samples=1, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mcmc.run(jax.random.key(0), z, x, y, batch_size=BATCH)
    assert mcmc.sampler.adaptation.included_rows == ()


@pytest.mark.slow
def test_six_rows_of_great_leverage_are_right():
    mcmc, arguments = run(20_000, 6, 100.0)
    assert len(mcmc.sampler.adaptation.included_rows[0][1]) <= 12
    assert int(mcmc.last_state.num_steps.max()) <= 50
    assert_right(mcmc, arguments)


@pytest.mark.slow
def test_where_nobody_decides_nothing_changes():
    rng = np.random.default_rng(0)
    z, x, y = (jnp.asarray(v, jnp.float32) for v in rng.standard_normal((3, 20_000)))
    mcmc = MCMC(SGHMCSplit(model), num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), z, x, y, batch_size=BATCH)
    assert mcmc.sampler.adaptation.included_rows == ()
    assert mcmc.sampler.potential.with_included_rows(()) is mcmc.sampler.potential
