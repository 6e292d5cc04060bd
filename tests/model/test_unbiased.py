"""Gradient estimators are unbiased: the mean over all minibatches is the full-data gradient.

Every minibatch that a stream can give is visited once, and the mean must be exact up to rounding.
The reference is NumPyro's potential of the model without subsampling.
"""

from collections.abc import Callable
from dataclasses import fields
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
from tests.model.plated import CASES, assert_close, make_preconditioner, position_of
from tests.quick import quick_if

pytestmark = pytest.mark.usefixtures("x64")

NAMES = tuple(GRADIENT_ESTIMATORS)


# --- All minibatches ----------------------------------------------------------------------------


@cache
def all_iid(size, batch_size):
    """Return all ``size ** batch_size`` minibatches with replacement, equally likely."""
    return np.array(list(product(range(size), repeat=batch_size)))


def stream_indices(subsampling, num_steps, size, batch_size):
    """Return the minibatches of the first steps of a stream."""
    state = StreamState.init(random.key(4))
    return np.asarray(
        subsampling.sample_indices(state, random.key(0), num_steps, size, batch_size)[1]
    )


@cache
def whole_epochs(size, batch_size):
    """Return the minibatches of the first steps that end with an epoch."""
    num_steps = size // gcd(size, batch_size)
    return stream_indices(ShuffledSubsampling(), num_steps, size, batch_size)


@cache
def all_contiguous(size, batch_size):
    """Return the minibatches of one epoch, or of all offsets where rows are left over."""
    if size % batch_size == 0:
        return stream_indices(ContiguousSubsampling(), size // batch_size, size, batch_size)
    offsets = np.arange(size)[:, None, None]
    starts = np.arange(size // batch_size)[:, None] * batch_size
    return ((offsets + starts + np.arange(batch_size)) % size).reshape(-1, batch_size)


SUBSAMPLINGS = {"iid": all_iid, "shuffled": whole_epochs, "contiguous": all_contiguous}


def all_minibatches(subsampling, sizes, batch):
    """Yield every combination of the plates' minibatches; their streams are independent."""
    plates = {name: SUBSAMPLINGS[subsampling](sizes[name], size) for name, size in batch.items()}
    for rows in product(*plates.values()):
        yield dict(zip(plates, rows, strict=True))


# --- The package's gradient and NumPyro's -------------------------------------------------------

_CHUNK = 256


class Bench(NamedTuple):
    """A model, and its gradient by the package and by NumPyro.

    - **sizes** - sizes of the model's plates.
    - **batch** - minibatch sizes of the subsampled ones.
    - **potential** - the package's potential.
    - **preconditioner** - arbitrary coordinates, with NumPyro's derivatives at their center.
    - **q** - a preconditioned position.
    - **gradient** - NumPyro's full-data gradient, a function of positions.
    - **minibatch_gradients** - ``(q, indices, preconditioner) -> gradients`` of each minibatch by
      each estimator, for ``indices`` of shape ``(m, batch_size)`` per plate.
    """

    sizes: dict[str, int]
    batch: dict[str, int]
    potential: Potential
    preconditioner: Preconditioner
    q: Any
    gradient: Callable
    minibatch_gradients: Callable

    def full(self, q):
        """Return NumPyro's preconditioned full-data gradient."""
        position = self.preconditioner.to_position(q)
        return np.asarray(self.preconditioner.apply_transpose(self.gradient(position)))

    def mean(self, subsampling, preconditioner=None):
        """Return the mean over all minibatches, shape ``(estimators, d)``."""
        chunks = list(all_minibatches(subsampling, self.sizes, self.batch))
        indices = {name: np.array([c[name] for c in chunks], np.int32) for name in self.batch}
        return self.each(self.q, indices, preconditioner).mean(0)

    def each(self, q, indices, preconditioner=None):
        """Return the gradients of all minibatches, shape ``(m, estimators, d)``."""
        preconditioner = preconditioner or self.preconditioner
        num = len(next(iter(indices.values())))
        gradients = []
        for start in range(0, num, _CHUNK):
            positions = np.minimum(start + np.arange(_CHUNK), num - 1)
            chunk = {name: x[positions] for name, x in indices.items()}
            gradients.append(np.asarray(self.minibatch_gradients(q, chunk, preconditioner)))
        return np.concatenate(gradients)[:num]


def make_minibatch_gradients(potential, arguments):
    def one(q, indices, preconditioner):
        def estimate(estimator):
            return make_gradient_fn(estimator, potential, arguments, preconditioner, indices)(q)

        return jnp.stack([estimate(GRADIENT_ESTIMATORS[name]) for name in NAMES])

    return jax.jit(jax.vmap(one, (None, 0, None)))


@cache
def _bench(name, batch, is_dense):
    case = CASES[name]
    potential, arguments = case.potential(**dict(batch)), case.arguments(**dict(batch))
    preconditioner = make_preconditioner(potential, is_dense)
    numpyro_potential = case.numpyro_potential(potential)

    @jax.jit
    def derivatives(position):
        gradient = jax.grad(numpyro_potential)
        return gradient(position), jax.jacfwd(gradient)(position)

    gradient, hessian = derivatives(preconditioner.center)
    return Bench(
        case.sizes,
        {p.name: p.subsample_size for p in potential.plates},
        potential,
        preconditioner._replace(reference_gradient=gradient, reference_hessian=hessian),
        jnp.asarray(position_of(potential, seed=1)),
        lambda position: derivatives(position)[0],
        make_minibatch_gradients(potential, arguments),
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
SLOW = {1, 3, 6, 8}  # other minibatch sizes of models that are in the quick tier


@pytest.mark.parametrize(
    ("name", "batch"), [quick_if(i not in SLOW, *case) for i, case in enumerate(ARRANGEMENTS)]
)
def test_gradient_estimators_all_minibatches_mean_is_full_gradient(name, batch):
    b = bench(name, **batch)
    expected = b.full(b.q)
    for subsampling in SUBSAMPLINGS:
        for estimate in b.mean(subsampling):
            assert_close(estimate, expected)


def test_gradient_estimators_one_minibatch_is_not_exact():
    b = bench("nested", rows=2, columns=1)
    rows = {"rows": np.array([[0, 1]]), "columns": np.array([[0]])}
    errors = np.abs(b.each(b.q, rows)[0] - b.full(b.q)).max(1)
    assert (errors > 1e-3).all()


def test_gradient_estimators_diagonal_preconditioner_mean_is_full_gradient():
    b = bench("one", rows=3, is_dense=False)
    for estimate in b.mean("shuffled"):
        assert_close(estimate, b.full(b.q))


def test_gradient_estimators_near_reference_noise_scales_as_documented():
    # As |q|^0, |q|^1 and |q|^2; at the reference point only the minibatch gradient is noisy.
    b, rows = bench("one", rows=3), {"rows": np.array([[1, 5, 5]])}

    def errors(scale):
        q = scale * b.q
        return np.linalg.norm(b.each(q, rows)[0] - b.full(q), axis=1)

    exponents = np.log10(errors(1e-2) / errors(1e-3))
    np.testing.assert_allclose(exponents, [0, 1, 2], atol=0.1)
    assert errors(0.0)[0] > 0.1
    assert errors(0.0)[1:].max() < 1e-12


# --- The test detects mistakes -----------------------------------------------------------------


def is_unbiased(b, subsampling="contiguous", potential=None, preconditioner=None):
    """Return for each estimator whether it is unbiased.

    :param potential: wrong potential in place of that of ``b``, of the case "one".
    """
    if potential is not None:
        gradients = make_minibatch_gradients(potential, CASES["one"].arguments(rows=3))
        b = b._replace(minibatch_gradients=gradients)
    error = np.abs(b.mean(subsampling, preconditioner) - b.full(b.q)).max(1)
    return dict(zip(NAMES, error < 1e-12 * np.abs(b.full(b.q)).max(), strict=True))


def all_but(*wrong):
    return {name: name not in wrong for name in NAMES}


def with_potential(potential, minibatch_potential):
    """Return a copy with another minibatch potential of unconstrained values."""
    wrong_class = type(
        "WrongPotential",
        (type(potential),),
        {"minibatch_potential": staticmethod(minibatch_potential)},
    )
    return wrong_class(**{f.name: getattr(potential, f.name) for f in fields(potential)})


def test_unbiasedness_without_plate_scale_is_violated():
    case, b = CASES["one"], bench("one", rows=3)

    def minibatch_potential(z, indices, arguments, rng_key, weights=None):
        X, y = (jnp.asarray(x)[indices["rows"]] for x in case.data)
        return potential_energy(case.model, (X, y), {}, z)

    wrong = with_potential(b.potential, minibatch_potential)
    assert is_unbiased(b) == all_but()
    assert is_unbiased(b, potential=wrong) == all_but(*NAMES)


def test_unbiasedness_with_prior_counted_twice_is_violated():
    b = bench("one", rows=3)

    def minibatch_potential(z, *args):
        return b.potential.minibatch_potential(z, *args) + jnp.square(z["beta"]).sum() / 2

    wrong = with_potential(b.potential, minibatch_potential)
    assert not is_unbiased(b, potential=wrong)["minibatch"]


def test_unbiasedness_with_gradient_at_another_reference_is_violated():
    b = bench("one", rows=3)
    gradient = b.gradient(b.preconditioner.center + 1e-6)
    wrong = b.preconditioner._replace(reference_gradient=gradient)
    assert is_unbiased(b, preconditioner=wrong) == all_but(*NAMES[1:])


def test_unbiasedness_with_minibatch_gradient_at_reference_is_violated():
    b = bench("one", rows=3)
    indices = {"rows": np.array([[0, 2, 3]])}
    preconditioned = b.each(jnp.zeros_like(b.q), indices)[0, NAMES.index("minibatch")]
    gradient = jnp.linalg.solve(b.preconditioner.factor.T, preconditioned)
    wrong = b.preconditioner._replace(reference_gradient=gradient)
    assert is_unbiased(b, preconditioner=wrong) == all_but(*NAMES[1:])


def test_unbiasedness_with_wrong_hessian_is_violated():
    b = bench("one", rows=3)
    for hessian in (None, b.preconditioner.reference_hessian * (1 + 1e-6)):
        wrong = b.preconditioner._replace(reference_hessian=hessian)
        assert is_unbiased(b, preconditioner=wrong) == all_but("second_order_control_variate")


@pytest.mark.parametrize("subsampling", sorted(SUBSAMPLINGS))
def test_unbiasedness_without_one_minibatch_is_violated(subsampling, monkeypatch):
    b, complete = bench("one", rows=3), SUBSAMPLINGS[subsampling]
    assert is_unbiased(b, subsampling) == all_but()
    monkeypatch.setitem(SUBSAMPLINGS, subsampling, lambda *args: complete(*args)[1:])
    assert is_unbiased(b, subsampling) == all_but(*NAMES)


# --- Noise --------------------------------------------------------------------------------------


def test_noise_eval_points_weighted_gradients_have_noise_variance_of_estimate():
    b = bench("one", rows=3)
    arguments, rows = CASES["one"].arguments(rows=3), all_iid(6, 3)
    preconditioner = jax.tree.map(lambda x: np.asarray(x, np.float64), b.preconditioner)
    gradient = jax.jit(
        jax.vmap(
            lambda i, position: b.potential.gradient(position, {"rows": i}, arguments), (0, None)
        )
    )
    estimates = b.each(b.q, {"rows": rows})
    for k, name in enumerate(NAMES):
        estimator = GRADIENT_ESTIMATORS[name]
        points = estimator.noise_eval_points(np.asarray(b.q, np.float64), preconditioner)
        positions = [(preconditioner.center + x, w) for x, w in points]
        weighted = sum(w * gradient(rows, jnp.asarray(p, b.q.dtype)) for p, w in positions)
        variance = jax.vmap(b.preconditioner.apply_transpose)(weighted).var(0, ddof=1)
        # Second-order control variates take a derivative by finite differences.
        rtol = 0.05 if estimator.needs_hessian else 1e-12
        assert_close(variance, estimates[:, k].var(0, ddof=1), rtol)
    # With replacement, it is the variance between rows over their number.
    single = b.each(b.q, {"rows": np.arange(6)[:, None]})
    assert_close(estimates.var(0), single.var(0) / 3)
