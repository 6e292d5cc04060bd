"""Dependence on the number of rows, from the programs on B and on B + 1 rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc.model.row_count import compare_row_counts
from tests.quick import quick_if

ROWS, COLUMNS, BATCH_SIZE = 20, 3, 8
X = jnp.asarray(np.random.default_rng(0).uniform(0.1, 0.9, (ROWS, COLUMNS)), jnp.float32)
Y = X[:, 0]
CODES = jnp.arange(ROWS) % COLUMNS
COVARIANCE = jnp.eye(COLUMNS) + 0.1


def ratios(fn):
    """Return how ``fn(i)`` changes from B to B + 1 rows."""
    sizes = (BATCH_SIZE, BATCH_SIZE + 1)
    return compare_row_counts(*(jax.make_jaxpr(fn)(jnp.arange(n)) for n in sizes))


def scan_within_row(i):
    return jax.lax.scan(lambda c, x: (0.5 * c + x, None), jnp.zeros(len(i)), X[i].T)[0]


ROW_BY_ROW = {
    "index": lambda i: X[i],
    "row before": lambda i: Y[i - 1],
    "number of the row": lambda i: i / ROWS,
    "position": lambda i: Y[i] * jnp.arange(len(i)),
    "matrix product": lambda i: X[i] @ jnp.ones(COLUMNS),
    "transposed": lambda i: jnp.ones(COLUMNS) @ X.T[:, i],
    "outer product": lambda i: jnp.einsum("bi,bj->bij", X[i], X[i]),
    "sum within row": lambda i: X[i].sum(-1),
    "softmax within row": lambda i: jax.nn.softmax(X[i], -1),
    "sorted within row": lambda i: jnp.sort(X[i], -1),
    "walk within row": lambda i: jnp.cumsum(X[i], -1),
    "scan within row": scan_within_row,
    "convolution within row": lambda i: jax.vmap(lambda x: jnp.convolve(x, jnp.ones(2)))(X[i]),
    "segments within row": lambda i: jax.vmap(
        lambda x: jax.ops.segment_sum(x, jnp.array([0, 0, 1]), 2)
    )(X[i]),
    "solve within row": lambda i: jax.scipy.linalg.solve_triangular(COVARIANCE, X[i].T),
    "in a jit": lambda i: jax.jit(lambda x: jnp.where(x > 0, x, 0.0))(Y[i]),
    "in a checkpoint": lambda i: jax.checkpoint(jnp.sin)(Y[i]),
    "constant of the data": lambda i: Y[i] * np.linspace(0, 1, ROWS)[3] / ROWS,
    "values of all rows": lambda i: (Y[i] - Y.mean()) / Y.std(),
}
DENSITIES = {
    "normal": lambda i: dist.Normal(Y[i], 1),
    "multivariate normal": lambda i: dist.MultivariateNormal(X[i], COVARIANCE),
    "categorical": lambda i: dist.Categorical(logits=X[i]),
    "ordered": lambda i: dist.OrderedLogistic(Y[i], jnp.array([0.0, 1.0])),
    "multinomial": lambda i: dist.Multinomial(4, logits=X[i]),
    "beta": lambda i: dist.Beta(1 + Y[i], 2.0),
    "zero-inflated": lambda i: dist.ZeroInflatedPoisson(0.3, Y[i]),
    "negative binomial": lambda i: dist.NegativeBinomial2(Y[i], 2.0),
    "truncated": lambda i: dist.TruncatedNormal(Y[i], 1, low=0.0),
    "mixture": lambda i: dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.ones(COLUMNS) / COLUMNS), dist.Normal(X[i], 1)
    ),
    "walk": lambda i: dist.GaussianRandomWalk(1.0, COLUMNS).expand([len(i)]),
    "masked": lambda i: dist.Normal(Y[i], 1).mask(Y[i] > 0.5),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_compare_row_counts_functions_of_rows_are_unchanged(name):
    assert ratios(ROW_BY_ROW[name]) == [1.0]


@pytest.mark.parametrize("name", DENSITIES)
def test_compare_row_counts_densities_of_rows_are_unchanged(name):
    def log_prob(i):
        fn = DENSITIES[name](i)
        value = jax.eval_shape(lambda: fn.sample(jax.random.key(0)))
        return fn.log_prob(jnp.ones(value.shape, value.dtype))

    assert ratios(log_prob) == [1.0]


OVER_THE_MINIBATCH = {
    "sum": lambda i: Y[i] * Y[i].sum(),
    "mean": lambda i: Y[i] - Y[i].mean(),
    "maximum": lambda i: Y[i] / Y[i].max(),
    "cumulative sum": lambda i: jnp.cumsum(Y[i]),
    "ranks": lambda i: jnp.argsort(jnp.argsort(Y[i])),
    "softmax": lambda i: jax.nn.softmax(Y[i]),
    "scan": lambda i: jax.lax.scan(lambda c, x: (c + x, c), 0.0, Y[i])[1],
    "groups": lambda i: jax.ops.segment_sum(Y[i], CODES[i], COLUMNS)[CODES[i]],
    "product of rows": lambda i: X[i] @ (X[i].T @ Y[i]),
    "distances": lambda i: jnp.linalg.cholesky(jnp.eye(len(i)) + jnp.outer(Y[i], Y[i])),
    "number of ones": lambda i: Y[i] * jnp.ones(len(i)).sum(),
    "grid": lambda i: Y[i] * jnp.linspace(0, 1, len(i)),
    "constant grid": lambda i: Y[i] * np.linspace(0, 1, len(i), dtype=np.float32),
    "added number": lambda i: Y[i] + len(i),
    "branch": lambda i: 2 * Y[i] if len(i) > BATCH_SIZE else Y[i],
    "wiring": lambda i: (lambda a, b: 1 + (a if len(i) > BATCH_SIZE else b))(Y[i], Y[i + 1]),
    "in a loop": lambda i: jax.lax.fori_loop(0, 3, lambda _, x: x / len(i) + 1, Y[i]),
}


@pytest.mark.parametrize("name", OVER_THE_MINIBATCH)
def test_compare_row_counts_operations_over_rows_are_found(name):
    assert ratios(OVER_THE_MINIBATCH[name]) == [None]


@pytest.mark.parametrize(
    "fn",
    [
        lambda i: 1 / len(i),
        lambda i: Y[i] / len(i),
        lambda i: -(Y[i] * (ROWS / len(i)))[:, None],
        quick_if(False, lambda i: jax.jit(lambda x: x * jnp.float32(1 / len(i)))(Y[i])),
    ],
)
def test_compare_row_counts_factors_are_returned(fn):
    assert ratios(fn) == pytest.approx([BATCH_SIZE / (BATCH_SIZE + 1)])


def test_compare_row_counts_factors_that_cancel_are_one():
    assert ratios(lambda i: Y[i] / len(i) * (3.0 * len(i))) == [1.0]
