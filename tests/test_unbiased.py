"""The minibatch gradient is unbiased: its mean over all minibatches is the gradient on all rows.

Not sampled: every minibatch that a stream can give is visited once, and the mean must be right to
rounding. NumPyro's own potential of the model without subsampling is the truth.
"""

from dataclasses import replace
from itertools import product
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer.util import potential_energy
from plated import CASES, assert_close, coordinates_of, full_gradient, position_of

from numpyro_sgmcmc.gradients import ESTIMATORS, Anchored, gradient_variance, whitened_gradient
from numpyro_sgmcmc.minibatch import Blocks, Epoch

pytestmark = pytest.mark.usefixtures("x64", "quick_compile")


# --- All minibatches ----------------------------------------------------------------------------


def all_iid(size, batch_size):
    """All ``size ** batch_size`` draws with replacement, each as likely."""
    return np.array(list(product(range(size), repeat=batch_size)))


def whole_epochs(size, batch_size):
    """As many steps of the stream as end where an epoch does."""
    stream = Epoch(size, batch_size)
    steps = size // gcd(size, batch_size)
    return np.asarray(stream.draw(stream.init(random.key(4)), random.key(0), steps)[1])


def one_epoch_of_blocks(size, batch_size):
    """The stream's steps of one epoch, or, where rows are left over, all that it may take."""
    if size % batch_size == 0:
        stream = Blocks(size, batch_size)
        steps = size // batch_size
        return np.asarray(stream.draw(stream.init(random.key(4)), random.key(0), steps)[1])
    offsets = np.arange(size)[:, None, None]
    starts = np.arange(size // batch_size)[:, None] * batch_size
    return ((offsets + starts + np.arange(batch_size)) % size).reshape(-1, batch_size)


WAYS = {"iid": all_iid, "epoch": whole_epochs, "blocks": one_epoch_of_blocks}


def all_minibatches(way, sizes, batch):
    """Every combination of the plates' minibatches; the plates' streams are independent."""
    plates = {name: WAYS[way](sizes[name], size) for name, size in batch.items()}
    for rows in product(*plates.values()):
        yield dict(zip(plates, rows, strict=True))


def mean_gradient(way, sizes, batch, gradient):
    return np.mean([gradient(rows) for rows in all_minibatches(way, sizes, batch)], axis=0)


# --- The package's gradient and NumPyro's -------------------------------------------------------


class Gradients(NamedTuple):
    """
    - **sizes** - the plates' sizes.
    - **batch** - the subsampled plates' minibatch sizes.
    - **minibatch** - maps rows to the whitened minibatch gradient.
    - **full** - NumPyro's on all rows, whitened.
    """

    sizes: dict
    batch: dict
    minibatch: object
    full: np.ndarray

    def is_unbiased(self, way):
        mean = mean_gradient(way, self.sizes, self.batch, self.minibatch)
        return np.abs(mean - self.full).max() < 1e-12 * np.abs(self.full).max()


def gradients_of(name, batch, estimator, is_dense=True, change=lambda target, anchored: (target, anchored)):
    case = CASES[name]
    target, arguments = case.target(**batch), case.arguments(**batch)
    full, coordinates = full_gradient(case, target), coordinates_of(target, is_dense)
    hessian = jax.jacfwd(full)(coordinates.anchor)
    anchored = Anchored(coordinates, full(coordinates.anchor), hessian)
    q = jnp.asarray(position_of(target, seed=1))
    expected = coordinates.pull(full(coordinates.position(q)))
    target, anchored = change(target, anchored)

    @jax.jit
    def minibatch(rows):
        return whitened_gradient(estimator, target, arguments, anchored, rows)(q)

    batch = {p.name: p.subsample_size for p in target.plates}
    return Gradients(case.sizes, batch, minibatch, np.asarray(expected))


ARRANGEMENTS = [
    ("one", {"rows": 3}),
    ("one", {"rows": 4}),
    ("subsample", {"rows": 4}),
    ("separate", {"rows": 3, "columns": 1}),
    ("separate", {"rows": 4, "columns": 2}),
    ("nested", {"rows": 2, "columns": 1}),
    ("nested", {"rows": 3, "columns": 2}),
    ("nested", {"rows": 3}),
    ("nested", {"columns": 2}),
    ("three", {"rows": 1, "columns": 2}),
    ("supports", {"rows": 4}),
]


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@pytest.mark.parametrize(("name", "batch"), ARRANGEMENTS)
def test_minibatch_gradient_is_unbiased(name, batch, estimator):
    gradients = gradients_of(name, batch, estimator)
    some = [gradients.minibatch(rows) for rows in all_minibatches("blocks", gradients.sizes, gradients.batch)]
    assert np.std(some, axis=0).max() > 1e-3
    for way in WAYS:
        mean = mean_gradient(way, gradients.sizes, gradients.batch, gradients.minibatch)
        assert_close(mean, gradients.full)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_diagonal_whitening(estimator):
    gradients = gradients_of("one", {"rows": 4}, estimator, is_dense=False)
    assert gradients.is_unbiased("epoch")


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"plain"}))
def test_control_variates_are_exact_at_the_anchor(estimator):
    case = CASES["one"]
    target, arguments = case.target(rows=2), case.arguments(rows=2)
    full, coordinates = full_gradient(case, target), coordinates_of(target)
    hessian = jax.jacfwd(full)(coordinates.anchor)
    anchored = Anchored(coordinates, full(coordinates.anchor), hessian)
    rows = {"rows": jnp.array([1, 5])}
    gradient = whitened_gradient(estimator, target, arguments, anchored, rows)
    origin = jnp.zeros(target.dim)
    assert_close(gradient(origin), coordinates.pull(full(coordinates.anchor)))
    if estimator == "second_order_control_variate":
        bend = jax.jacfwd(gradient)(origin)
        assert_close(bend, coordinates.factor.T @ hessian @ coordinates.factor)


def test_order_of_the_control_variates_noise():
    # The error of one minibatch's gradient falls with the distance q from the anchor as q^1, q^2.
    case = CASES["one"]
    target, arguments = case.target(rows=2), case.arguments(rows=2)
    full, coordinates = full_gradient(case, target), coordinates_of(target)
    hessian = jax.jacfwd(full)(coordinates.anchor)
    anchored = Anchored(coordinates, full(coordinates.anchor), hessian)
    rows, direction = {"rows": jnp.array([1, 5])}, jnp.asarray(position_of(target, seed=1))

    def error(estimator, scale):
        q = scale * direction
        estimate = whitened_gradient(estimator, target, arguments, anchored, rows)(q)
        return np.linalg.norm(estimate - coordinates.pull(full(coordinates.position(q))))

    for estimator, order in (("plain", 0), ("control_variate", 1), ("second_order_control_variate", 2)):
        ratio = error(estimator, 1e-2) / error(estimator, 1e-3)
        assert np.log10(ratio) == pytest.approx(order, abs=0.1)


# --- Planted mistakes are seen ------------------------------------------------------------------


def without_scale(target, anchored):
    """Each chosen row counts once, not size / batch_size times."""
    case = CASES["one"]

    def potential(z, indices, arguments, rng_key):
        X, y = (jnp.asarray(x)[indices["rows"]] for x in case.data)
        return potential_energy(case.model, (X, y), {}, z)

    return replace(target, potential_of_sites=potential), anchored


def with_prior_twice(target, anchored):
    """The prior counted again with the rows."""
    right = target.potential_of_sites

    def potential(z, indices, arguments, rng_key):
        return right(z, indices, arguments, rng_key) + jnp.square(z["beta"]).sum() / 2

    return replace(target, potential_of_sites=potential), anchored


def gradient_of_another_anchor(target, anchored):
    moved = full_gradient(CASES["one"], target)(anchored.coordinates.anchor + 1e-6)
    return target, anchored._replace(anchor_gradient=moved)


def minibatch_gradient_at_the_anchor(target, anchored):
    rows = {"rows": jnp.arange(3)}
    wrong = target.gradient(anchored.coordinates.anchor, rows, CASES["one"].arguments(rows=3))
    return target, anchored._replace(anchor_gradient=wrong)


def hessian_left_out(target, anchored):
    return target, anchored._replace(anchor_hessian=None)


def hessian_elsewhere(target, anchored):
    full = full_gradient(CASES["one"], target)
    wrong = jax.jacfwd(full)(anchored.coordinates.anchor + 1e-6)
    return target, anchored._replace(anchor_hessian=wrong)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@pytest.mark.parametrize(
    ("plant", "spared"),
    [
        (without_scale, ()),
        (with_prior_twice, ("control_variate", "second_order_control_variate")),
        (gradient_of_another_anchor, ("plain",)),
        (minibatch_gradient_at_the_anchor, ("plain",)),
        (hessian_left_out, ("plain", "control_variate")),
        (hessian_elsewhere, ("plain", "control_variate")),
    ],
)
def test_planted_mistakes_are_seen(plant, spared, estimator):
    assert gradients_of("one", {"rows": 3}, estimator).is_unbiased("blocks")
    if estimator not in spared:
        assert not gradients_of("one", {"rows": 3}, estimator, change=plant).is_unbiased("blocks")


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_minibatch_more_or_less_is_seen(way, monkeypatch):
    gradients = gradients_of("one", {"rows": 4}, "plain")
    assert gradients.is_unbiased(way)
    complete = WAYS[way]
    monkeypatch.setitem(WAYS, way, lambda size, batch_size: complete(size, batch_size)[1:])
    assert not gradients.is_unbiased(way)


# --- The noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_noise_variance(estimator):
    gradients = gradients_of("one", {"rows": 3}, estimator)
    case = CASES["one"]
    target, arguments = case.target(rows=3), case.arguments(rows=3)
    coordinates = coordinates_of(target)
    full = full_gradient(case, target)
    hessian = jax.jacfwd(full)(coordinates.anchor)
    anchored = Anchored(coordinates, full(coordinates.anchor), hessian)
    rows = all_iid(6, 3)
    q = jnp.asarray(position_of(target, seed=1))
    found = gradient_variance(estimator, target, arguments, anchored, q[None], {"rows": rows[None]})
    draws = np.array([gradients.minibatch({"rows": r}) for r in rows])
    assert_close(found, draws.var(0, ddof=1))
    # For rows drawn with replacement it is the variance between the rows over their number.
    single = gradients_of("one", {"rows": 1}, estimator)
    between = np.array([single.minibatch({"rows": jnp.array([i])}) for i in range(6)])
    assert_close(draws.var(0), between.var(0) / 3)
