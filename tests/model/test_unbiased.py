"""The minibatch gradient is unbiased: its mean over all minibatches is the gradient on all rows.

Not sampled: every minibatch that a stream can give is visited once, and the mean must be right to
rounding. NumPyro's own potential of the model without subsampling is the truth.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, ShuffledSubsampling, StreamState
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS, make_gradient_fn
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.model.plated import CASES, assert_close, coordinates_of, position_of
from tests.quick import quick_if

pytestmark = pytest.mark.usefixtures("x64")

NAMES = tuple(GRADIENT_ESTIMATORS)


# --- All minibatches ----------------------------------------------------------------------------


@cache
def all_iid(size, batch_size):
    """All ``size ** batch_size`` draws with replacement, each as likely."""
    return np.array(list(product(range(size), repeat=batch_size)))


def drawn(scheme, steps, size, batch_size):
    """The first steps of a stream."""
    start = StreamState.init(random.key(4))
    return np.asarray(scheme.sample_indices(start, random.key(0), steps, size, batch_size)[1])


@cache
def whole_epochs(size, batch_size):
    """As many steps of the stream as end where an epoch does."""
    steps = size // gcd(size, batch_size)
    return drawn(ShuffledSubsampling(), steps, size, batch_size)


@cache
def one_epoch_of_blocks(size, batch_size):
    """The stream's steps of one epoch, or, where rows are left over, all that it may take."""
    if size % batch_size == 0:
        steps = size // batch_size
        return drawn(ContiguousSubsampling(), steps, size, batch_size)
    offsets = np.arange(size)[:, None, None]
    starts = np.arange(size // batch_size)[:, None] * batch_size
    return ((offsets + starts + np.arange(batch_size)) % size).reshape(-1, batch_size)


WAYS = {"iid": all_iid, "epoch": whole_epochs, "blocks": one_epoch_of_blocks}


def all_minibatches(way, sizes, batch):
    """Every combination of the plates' minibatches; the plates' streams are independent."""
    plates = {name: WAYS[way](sizes[name], size) for name, size in batch.items()}
    for rows in product(*plates.values()):
        yield dict(zip(plates, rows, strict=True))


# --- The package's gradient and NumPyro's -------------------------------------------------------

_CHUNK = 256


class Bench(NamedTuple):
    """
    - **sizes** - sizes of the model's plates.
    - **batch** - minibatch sizes of the subsampled ones.
    - **target** - the package's target.
    - **whitening** - coordinates that are nothing in particular, NumPyro's derivatives there.
    - **q** - a whitened position.
    - **gradient** - NumPyro's on all rows, of positions.
    - **minibatches** - ``(q, rows, whitening)`` to the gradients of each minibatch by each
      estimator, for ``rows`` of shape ``(m, batch_size)`` a plate.
    """

    sizes: dict[str, int]
    batch: dict[str, int]
    target: Potential
    whitening: Preconditioner
    q: Any
    gradient: Callable
    minibatches: Callable

    def full(self, q):
        """NumPyro's whitened gradient on all rows."""
        coordinates = self.whitening
        return np.asarray(coordinates.apply_transpose(self.gradient(coordinates.to_position(q))))

    def mean(self, way, whitening=None):
        """Mean over all minibatches, shape ``(estimators, d)``."""
        chunks = list(all_minibatches(way, self.sizes, self.batch))
        rows = {name: np.array([c[name] for c in chunks], np.int32) for name in self.batch}
        return self.each(self.q, rows, whitening).mean(0)

    def each(self, q, rows, whitening=None):
        """Gradients of all minibatches, shape ``(m, estimators, d)``."""
        num = len(next(iter(rows.values())))
        found = []
        for start in range(0, num, _CHUNK):
            places = np.minimum(start + np.arange(_CHUNK), num - 1)
            chunk = {name: x[places] for name, x in rows.items()}
            found.append(np.asarray(self.minibatches(q, chunk, whitening or self.whitening)))
        return np.concatenate(found)[:num]


def minibatches_of(target, arguments):
    def one(q, rows, whitening):
        return jnp.stack(
            [
                make_gradient_fn(GRADIENT_ESTIMATORS[e], target, arguments, whitening, rows)(q)
                for e in NAMES
            ]
        )

    return jax.jit(jax.vmap(one, (None, 0, None)))


@cache
def _bench(name, batch, is_dense):
    case = CASES[name]
    target, arguments = case.target(**dict(batch)), case.arguments(**dict(batch))
    coordinates = coordinates_of(target, is_dense)

    @jax.jit
    def derivatives(position):
        gradient = jax.grad(case.potential(target))
        return gradient(position), jax.jacfwd(gradient)(position)

    gradient, hessian = derivatives(coordinates.center)
    whitening = coordinates._replace(reference_gradient=gradient, reference_hessian=hessian)
    return Bench(
        case.sizes,
        {p.name: p.subsample_size for p in target.plates},
        target,
        whitening,
        jnp.asarray(position_of(target, seed=1)),
        lambda position: derivatives(position)[0],
        minibatches_of(target, arguments),
    )


def bench(name, is_dense=True, **batch):
    return _bench(name, tuple(batch.items()), is_dense)


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
SLOW = {3, 6, 8}  # other minibatches of models that have one


@pytest.mark.parametrize(
    ("name", "batch"), [quick_if(i not in SLOW, *case) for i, case in enumerate(ARRANGEMENTS)]
)
def test_minibatch_gradient_is_unbiased(name, batch):
    b = bench(name, **batch)
    expected = b.full(b.q)
    for way in WAYS:
        for estimate in b.mean(way):
            assert_close(estimate, expected)


def test_a_single_minibatch_is_off():
    b = bench("nested", rows=2, columns=1)
    rows = {"rows": np.array([[0, 1]]), "columns": np.array([[0]])}
    errors = np.abs(b.each(b.q, rows)[0] - b.full(b.q)).max(1)
    assert (errors > 1e-3).all()


def test_diagonal_whitening():
    b = bench("one", rows=4, is_dense=False)
    for estimate in b.mean("epoch"):
        assert_close(estimate, b.full(b.q))


def test_noise_falls_with_the_distance_from_the_anchor():
    # Of one minibatch, as |q|^0, |q|^1 and |q|^2; none is left at the anchor but the plain one's.
    b, rows = bench("one", rows=3), {"rows": np.array([[1, 5, 5]])}

    def errors(scale):
        q = scale * b.q
        return np.linalg.norm(b.each(q, rows)[0] - b.full(q), axis=1)

    slopes = np.log10(errors(1e-2) / errors(1e-3))
    np.testing.assert_allclose(slopes, [0, 1, 2], atol=0.1)
    assert errors(0.0)[0] > 0.1
    assert errors(0.0)[1:].max() < 1e-12


# --- Planted mistakes are seen ------------------------------------------------------------------


def is_unbiased(b, way="blocks", minibatches=None, whitening=None):
    if minibatches is not None:
        b = b._replace(minibatches=minibatches)
    error = np.abs(b.mean(way, whitening) - b.full(b.q)).max(1)
    return dict(zip(NAMES, error < 1e-12 * np.abs(b.full(b.q)).max(), strict=True))


def all_but(*wrong):
    return {name: name not in wrong for name in NAMES}


def test_scale_left_out_is_seen():
    case, b = CASES["one"], bench("one", rows=3)

    def potential(z, indices, arguments, rng_key):
        X, y = (jnp.asarray(x)[indices["rows"]] for x in case.data)
        return potential_energy(case.model, (X, y), {}, z)

    wrong = replace(b.target, potential_fn=potential)
    assert is_unbiased(b) == all_but()
    assert is_unbiased(b, minibatches=minibatches_of(wrong, case.arguments(rows=3))) == all_but(
        *NAMES
    )


def test_prior_counted_twice_is_seen():
    b, right = bench("one", rows=3), bench("one", rows=3).target.potential_fn

    def potential(z, *rest):
        return right(z, *rest) + jnp.square(z["beta"]).sum() / 2

    wrong = replace(b.target, potential_fn=potential)
    found = is_unbiased(b, minibatches=minibatches_of(wrong, CASES["one"].arguments(rows=3)))
    assert not found["minibatch"]


def test_gradient_of_another_anchor_is_seen():
    b = bench("one", rows=3)
    wrong = b.whitening._replace(reference_gradient=b.gradient(b.whitening.center + 1e-6))
    assert is_unbiased(b, whitening=wrong) == all_but(*NAMES[1:])


def test_minibatch_gradient_in_place_of_the_full_one_is_seen():
    b = bench("one", rows=3)
    rows = {"rows": np.array([[0, 2, 3]])}
    pulled = b.each(jnp.zeros_like(b.q), rows)[0, NAMES.index("minibatch")]
    gradient = jnp.linalg.solve(b.whitening.factor.T, pulled)
    wrong = b.whitening._replace(reference_gradient=gradient)
    assert is_unbiased(b, whitening=wrong) == all_but(*NAMES[1:])


def test_wrong_hessian_is_seen():
    b = bench("one", rows=3)
    for hessian in (None, b.whitening.reference_hessian * (1 + 1e-6)):
        wrong = b.whitening._replace(reference_hessian=hessian)
        assert is_unbiased(b, whitening=wrong) == all_but("second_order_control_variate")


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_minibatch_left_out_is_seen(way, monkeypatch):
    b, complete = bench("one", rows=4), WAYS[way]
    assert is_unbiased(b, way) == all_but()
    monkeypatch.setitem(WAYS, way, lambda size, batch_size: complete(size, batch_size)[1:])
    assert is_unbiased(b, way) == all_but(*NAMES)


# --- The noise ----------------------------------------------------------------------------------


def test_noise_variance():
    """That of the weighted gradients at an estimator's probes."""
    b = bench("one", rows=3)
    arguments, rows = CASES["one"].arguments(rows=3), all_iid(6, 3)
    whitening = jax.tree.map(lambda x: np.asarray(x, np.float64), b.whitening)

    def of(estimator):
        probes = GRADIENT_ESTIMATORS[estimator].noise_eval_points(
            np.asarray(b.q, np.float64), whitening
        )
        gradient = jax.vmap(
            lambda i, place: b.target.gradient(place, {"rows": i}, arguments), (0, None)
        )
        return sum(weight * gradient(rows, jnp.asarray(p, b.q.dtype)) for p, weight in probes)

    draws = b.each(b.q, {"rows": rows})
    for k, name in enumerate(NAMES):
        found = jax.vmap(b.whitening.apply_transpose)(of(name)).var(0, ddof=1)
        # The bend of second-order control variates is taken by differences.
        rtol = 0.05 if GRADIENT_ESTIMATORS[name].needs_hessian else 1e-12
        assert_close(found, draws[:, k].var(0, ddof=1), rtol)
    # For rows drawn with replacement it is the variance between rows over their number.
    single = b.each(b.q, {"rows": np.arange(6)[:, None]})
    assert_close(draws.var(0), single.var(0) / 3)
