"""What minibatch gradients tell, where it is known: passes over all rows, noise, its effects."""

import tracemalloc
from itertools import islice

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.adaptation import batched_gradients as row_gradients_module
from numpyro_sgmcmc.adaptation import variational
from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    iter_weighted_minibatches,
    sample_minibatch_indices,
)
from numpyro_sgmcmc.adaptation.gradient_noise import (
    estimate_max_curvature,
    measure_noise,
    predict_mean_bias_from_noise,
    predict_mean_bias_per_variance_inflation,
)
from numpyro_sgmcmc.adaptation.preconditioning import refine_directions
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import IIDSubsampling, Plate
from numpyro_sgmcmc.model.gradient_estimators import (
    GRADIENT_ESTIMATORS,
    ControlVariate,
    MinibatchGradient,
)
from numpyro_sgmcmc.model.potential import make_function_potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from numpyro_sgmcmc.progress import ProgressReporter
from tests.adaptation.potentials import random_covariance

pytestmark = pytest.mark.usefixtures("x64")


def rng():
    return np.random.default_rng(0)


def row_gradients(fn, dim):
    return BatchedGradients(make_function_potential(fn, jnp.zeros(dim)), Arguments())


# --- Passes over all rows -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 12, 13])
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_weighted_minibatches_are_all_rows(size, batch):
    """Whatever is left over, each row counts as much, and what is no row's counts once."""
    batch = min(batch, size)
    prior, of_rows = 0.7, rng().standard_normal(size)
    total = weights = 0.0
    for rows, weight in iter_weighted_minibatches([[Plate("a", size, batch)]]):
        assert rows["a"].shape == (batch,)
        total += weight * (prior + size / batch * of_rows[rows["a"]].sum())
        weights += weight
    assert weights == pytest.approx(1)
    assert total == pytest.approx(prior + of_rows.sum())


def test_minibatches_come_one_at_a_time():
    """All of them have as many numbers as there are rows."""
    tracemalloc.start()
    some = list(islice(iter_weighted_minibatches([[Plate("a", 10**7, 100)]]), 3))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [rows["a"][0] for rows, _ in some] == [0, 100, 200]
    assert most < 10**6


def test_weighted_minibatches_of_nested_plates_and_others():
    """Two plates of one site, and a third of its own."""
    a, b, c = Plate("a", 5, 2), Plate("b", 7, 3), Plate("c", 4, 3)
    of_pairs, of_rows = rng().standard_normal((5, 7)), rng().standard_normal(4)
    total = 0.0
    for rows, weight in iter_weighted_minibatches([[a, b], [c]]):
        pairs = of_pairs[np.ix_(rows["a"], rows["b"])].sum() * 5 / 2 * 7 / 3
        total += weight * (0.3 + pairs + of_rows[rows["c"]].sum() * 4 / 3)
    assert total == pytest.approx(0.3 + of_pairs.sum() + of_rows.sum())


def waiting_times(y, batch_size=None):
    """Its potential is exp(t) sum(y) - n t: all derivatives from the second on are alike."""
    t = numpyro.sample("t", dist.ImproperUniform(dist.constraints.real, (), ()))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Exponential(jnp.exp(t)), obs=y[i])


def waiting(num=200, batch=20):
    y = rng().exponential(size=num)
    arguments = Arguments((jnp.asarray(y),), {"batch_size": batch})
    target = get_model_potential(waiting_times, arguments, init_to_uniform)
    mode = np.array([np.log(num / y.sum())])
    return (
        y,
        BatchedGradients(target, arguments),
        Preconditioner(mode, num**-0.5 * np.ones(1), np.zeros(1)),
    )


def test_gradient_everywhere():
    y, rows, _ = waiting(num=203)
    found = rows.full_gradient(np.array([0.3]))
    np.testing.assert_allclose(found, np.exp(0.3) * y.sum() - len(y), rtol=1e-10)
    assert rows.is_finite(np.array([0.3]))
    assert not rows.is_finite(np.array([np.nan]))
    # A finite value beside an infinite slope is no start either.
    assert not row_gradients(lambda q: jnp.sqrt(q).sum(), 1).is_finite(np.zeros(1))


def test_gradient_everywhere_of_many_coordinates(monkeypatch):
    """Fewer slots a call, and the same sum."""
    monkeypatch.setattr(row_gradients_module, "HIGH_DIM", 0)
    y, rows, _ = waiting(num=403)
    positions = np.array([[0.3], [-0.2], [0.1]])
    _, found = rows.weighted_mean(positions, iter_weighted_minibatches(rows.plate_groups))
    np.testing.assert_allclose(found, np.exp(positions) * y.sum() - len(y), rtol=1e-10)


def test_gradients_on_all_rows_by_way_of_the_anchor():
    y, rows, whitening = waiting()
    positions = whitening.to_position(np.linspace(-2, 2, 5)[:, None])
    exact = np.exp(positions) * y.sum() - len(y)
    np.testing.assert_allclose(
        rows.estimate_full_gradients(positions, whitening, 20_000), exact, atol=1e-8
    )


# --- Noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRADIENT_ESTIMATORS)
def test_noise_of_random_rows(name):
    """That of one row over their number, times the rows squared."""
    y, rows, whitening = waiting()
    q = np.array([[1.5]])
    found = measure_noise(
        rows, whitening, q, [GRADIENT_ESTIMATORS[name]], IIDSubsampling(), 4_000, rng()
    )
    t, anchor = whitening.to_position(q)[0, 0], whitening.center[0]
    of_rows = {
        "minibatch": np.exp(t),
        "control_variate": np.exp(t) - np.exp(anchor),
        "second_order_control_variate": np.exp(t) - np.exp(anchor) * (1 + t - anchor),
    }[name] * y
    variance = whitening.factor[0] ** 2 * len(y) ** 2 * of_rows.var() / 20
    # A variance from 4,000 minibatches has an sd of 2.5 % of itself, skewed rows a little more.
    assert found[GRADIENT_ESTIMATORS[name]].variance == pytest.approx(variance, rel=0.1)
    assert (
        found[GRADIENT_ESTIMATORS[name]].noise_exponent == GRADIENT_ESTIMATORS[name].noise_exponent
    )


@pytest.mark.parametrize("estimator", [MinibatchGradient(), ControlVariate()], ids=lambda e: e.name)
def test_noise_moves_the_mean_of_a_skewed_posterior(estimator):
    """By minus half the third derivative times the excess variance."""
    y, rows, whitening = waiting(num=200, batch=20)
    excess = 0.02
    q = 0.7 * np.ones((8, 1))
    (found,) = predict_mean_bias_from_noise(
        rows, whitening, q, estimator, IIDSubsampling(), excess, 4_000, rng()
    )
    t, anchor = whitening.to_position(q[:1])[0, 0], whitening.center[0]
    of_rows = (np.exp(t) - estimator.needs_reference * np.exp(anchor)) * y
    variance = whitening.factor[0] ** 2 * len(y) ** 2 * of_rows.var() / 20
    third = np.exp(t) * y.sum() * whitening.factor[0] ** 3
    expected = -0.5 * third * excess * variance
    # Two standard errors of 4,000 minibatches are taken off: a twentieth.
    assert expected < found < 0.9 * expected


def test_wider_draws_move_the_mean_of_a_skewed_posterior():
    y, rows, whitening = waiting(num=200, batch=20)
    q = 0.7 * np.ones((8, 1))
    (found,) = predict_mean_bias_per_variance_inflation(rows, whitening, q, 4_000, rng())
    third = np.exp(whitening.to_position(q[:1])[0, 0]) * y.sum() * whitening.factor[0] ** 3
    assert -0.5 * third < found < 0.9 * -0.5 * third


def test_wider_effects_move_the_scale_they_share():
    """Effects of n standard normals, non-centred: n / 2 of the scale's own precision."""
    num, factor = 50, np.concatenate([[0.1], np.ones(50)])
    rows = row_gradients(lambda q: q[0] + jnp.exp(2 * q[0]) * jnp.square(q[1:]).sum() / 2, 51)
    whitening = Preconditioner(np.zeros(51), factor, np.zeros(51))
    q = np.concatenate([np.zeros((8, 1)), rng().standard_normal((8, num))], 1)
    found = predict_mean_bias_per_variance_inflation(rows, whitening, q, 2_000, rng())
    # The scale's own spread counts four times the squares, the effects' twice: times -1/2.
    squares = np.square(q[:, 1:]).sum(1).mean()
    expected = -0.5 * (2 * num + 8 * squares / 2 * 0.1**2) * 0.1
    assert expected * 1.02 < found[0] < 0.9 * expected


def test_noise_leaves_the_mean_of_a_gaussian():
    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    y = rng().standard_normal(100)
    arguments = Arguments((jnp.asarray(y),), {"batch_size": 5})
    rows = BatchedGradients(get_model_potential(model, arguments, init_to_uniform), arguments)
    whitening = Preconditioner(np.array([y.mean()]), 0.1 * np.ones(1), np.zeros(1))
    q = rng().standard_normal((8, 1))
    assert (
        np.abs(
            predict_mean_bias_from_noise(
                rows, whitening, q, MinibatchGradient(), IIDSubsampling(), 1.0, 8, rng()
            )
        ).max()
        < 1e-6
    )
    assert (
        np.abs(predict_mean_bias_per_variance_inflation(rows, whitening, q, 8, rng())).max() < 1e-6
    )


def test_deviations_to_where_there_is_no_density():
    """A few do not count; where most of them lead there, the shift is beyond prediction."""
    whitening, q = Preconditioner(np.zeros(1), np.ones(1), np.zeros(1)), np.zeros((8, 1))
    for edge, expected in ((0.5, 0.0), (0.05, 100.0)):
        rows = row_gradients(lambda q, e=edge: jnp.log(e - q).sum() + jnp.log(e + q).sum(), 1)
        found = predict_mean_bias_per_variance_inflation(rows, whitening, q, 200, rng())
        assert found * 0.09 == pytest.approx(expected, abs=1e-3)


# --- Directions ---------------------------------------------------------------------------------


def test_wide_directions_are_sharpened():
    """Those of a few draws, in which all other directions have a part, nearer to the true ones."""
    dim, draw = 400, rng().standard_normal
    wide = np.linalg.qr(draw((dim, 2)))[0]
    inverse = np.eye(dim) - wide @ np.diag([1 - 1 / 50, 1 - 1 / 20]) @ wide.T
    rows = row_gradients(lambda q: q @ jnp.asarray(inverse) @ q / 2, dim)
    found = np.linalg.qr(wide + 0.05 * draw(wide.shape))[0]
    assert np.linalg.norm(wide.T @ found) ** 2 < 2 * 0.55
    whitening = Preconditioner(np.zeros(dim), np.ones(dim), np.zeros(dim))
    found = np.linalg.qr(refine_directions(rows, whitening, found))[0]
    assert np.linalg.norm(wide.T @ found) ** 2 > 2 * 0.99


def test_directions_that_cannot_be_sharpened_are_kept():
    """Where the curvature is negative, or not finite."""
    whitening, some = Preconditioner(np.zeros(3), np.ones(3), np.zeros(3)), np.eye(3)[:, :1]
    for fn in (lambda q: -q @ q / 2, lambda q: jnp.sqrt(-1.0 - q @ q)):
        np.testing.assert_array_equal(
            refine_directions(row_gradients(fn, 3), whitening, some), some
        )


# --- Curvature ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch"), [(60, 20), (67, 20), (9, 9)])
@pytest.mark.parametrize("directions", [1, 2, 4])
def test_hessian_on_all_rows(monkeypatch, size, batch, directions):
    """Whatever is left over, of rows, of a call's minibatches and of directions taken together."""

    def model(x, y, batch_size=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])

    monkeypatch.setattr(row_gradients_module, "_MAX_HESSIAN_ROW_DIRECTIONS", directions * batch)
    monkeypatch.setattr(row_gradients_module, "_MAX_HESSIAN_MINIBATCHES_PER_CALL", 2)
    x, b = rng().standard_normal((size, 3)), np.array([0.5, -1.0, 2.0])
    y = (rng().random(size) < 0.5).astype(np.int32)
    arguments = Arguments((jnp.asarray(x), jnp.asarray(y)), {"batch_size": batch})
    rows = BatchedGradients(get_model_potential(model, arguments, init_to_uniform), arguments)
    p = 1 / (1 + np.exp(-x @ b))
    expected = np.eye(3) + x.T @ (x * (p * (1 - p))[:, None])
    np.testing.assert_allclose(rows.full_hessian(b), expected)


def test_largest_curvature():
    hessian = random_covariance(20)
    rows = row_gradients(lambda q: q @ jnp.asarray(hessian) @ q / 2, 20)
    values = np.linalg.eigvalsh(hessian)
    factor = 2.0 * np.ones(20)
    whitening = Preconditioner(np.zeros(20), factor, np.zeros(20))
    q = rng().standard_normal((4, 20))
    found = estimate_max_curvature(rows, whitening, q, 8, rng())
    assert found == pytest.approx(4 * values.max(), rel=0.1)
    assert found <= 4 * values.max() * (1 + 1e-6)
    root = np.linalg.cholesky(np.linalg.inv(hessian))
    dense = Preconditioner(np.zeros(20), root, np.zeros(20))
    assert estimate_max_curvature(rows, dense, q, 8, rng()) == pytest.approx(1, rel=1e-6)


def test_curvature_that_is_not_finite_counts_as_one():
    rows = row_gradients(lambda q: jnp.sqrt(q).sum(), 2)
    whitening = Preconditioner(-np.ones(2), np.ones(2), np.zeros(2))
    assert estimate_max_curvature(rows, whitening, np.zeros((4, 2)), 8, rng()) == 1.0


# --- The start by volume ------------------------------------------------------------------------


def fit(fn, starts, num_steps=2_000):
    target = make_function_potential(fn, jnp.zeros(starts.shape[1]))
    return variational.fit_mean_field(
        target,
        Arguments(),
        starts,
        lambda shape: sample_minibatch_indices(target, rng(), shape, IIDSubsampling()),
        num_steps,
        rng(),
        ProgressReporter(),
    )


def test_the_fit_to_a_gaussian():
    """The mean-field fit has the mean, and as variances the inverse of the precision's diagonal."""
    precision, mode = 10.0 * random_covariance(5), np.arange(5.0)
    found = fit(
        lambda q: (q - mode) @ jnp.asarray(precision) @ (q - mode) / 2,
        rng().uniform(-2, 2, (3, 5)),
    )
    for mean, sd in found:
        np.testing.assert_allclose(sd, np.diagonal(precision) ** -0.5, rtol=0.1)
        assert np.abs((mean - mode) / sd).max() < 0.3


def test_the_fit_stays_out_of_a_spike():
    """Effects of 100 groups, each seen once with noise one, and their scale: at its mode that is
    zero with all effects; most of the mass is about 0.9, where it was drawn.
    """
    y = 1.3 * rng().standard_normal(100)

    def potential(q):
        log_scale, effects = q[0], q[1:]
        prior = 100 * log_scale + jnp.square(effects / jnp.exp(log_scale)).sum() / 2
        return prior + jnp.square(y - effects).sum() / 2 + log_scale**2 / 2

    for mean, sd in fit(potential, rng().uniform(-2, 2, (4, 101))):
        assert abs(mean[0]) < 0.5
        assert sd.min() > 0.05


def test_the_fit_keeps_out_of_where_there_is_no_density():
    """A NaN of which the gradient, zero, tells nothing: to the entropy it looks like room."""
    for mean, sd in fit(lambda q: jnp.where(q[0] > 1.5, jnp.nan, q[0] ** 2 / 2), np.zeros((2, 1))):
        assert -1.5 < mean[0] < 1.5
        assert 0.2 < sd[0] < 3.0
