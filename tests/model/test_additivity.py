"""Arrays that a plate's indices look up, and dependence on indices, from a jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InvalidModelError
from numpyro_sgmcmc.jaxpr import find_dependent_outputs
from numpyro_sgmcmc.model.additivity import RowGather, find_row_gathers
from numpyro_sgmcmc.model.subsampled import make_model_potential

ROWS, COLUMNS = 7, 3


def row_gathers(fn):
    """Return the gathers of ``fn(i, X, T, y)``; rows are axis 0 of X and y, and axis 1 of T."""
    i = jnp.arange(2, dtype=jnp.int32)
    jaxpr = jax.make_jaxpr(fn)(
        i, jnp.ones((ROWS, COLUMNS)), jnp.ones((COLUMNS, ROWS)), jnp.ones(ROWS)
    )
    return find_row_gathers(jaxpr.jaxpr, ["rows"], list("XTy"))


FOLLOWED = {
    "X[i]": ("X", lambda i, X, T, y: X[i]),
    "X[i, :]": ("X", lambda i, X, T, y: X[i, :]),
    "X[i, 0]": ("X", lambda i, X, T, y: X[i, 0]),
    "X[i, :2]": ("X", lambda i, X, T, y: X[i, :2]),
    "X[:, 0][i]": ("X", lambda i, X, T, y: X[:, 0][i]),
    "X.at[i].get()": ("X", lambda i, X, T, y: X.at[i].get()),
    "y.at[i].get(mode)": ("y", lambda i, X, T, y: y.at[i].get(mode="fill", fill_value=0.0)),
    "take(X, i)": ("X", lambda i, X, T, y: jnp.take(X, i, axis=0)),
    "take(X, i, mode)": ("X", lambda i, X, T, y: jnp.take(X, i, axis=0, mode="clip")),
    "take(T, i, axis)": ("T", lambda i, X, T, y: jnp.take(T, i, axis=1)),
    "take_along_axis": ("y", lambda i, X, T, y: jnp.take_along_axis(y, i, axis=0)),
    "T[:, i]": ("T", lambda i, X, T, y: T[:, i]),
    "T[..., i]": ("T", lambda i, X, T, y: T[..., i]),
    "T.T[i]": ("T", lambda i, X, T, y: T.T[i]),
    "y[i]": ("y", lambda i, X, T, y: y[i]),
    "y[i, None]": ("y", lambda i, X, T, y: y[i, None]),
    "y[i[:, None]]": ("y", lambda i, X, T, y: y[i[:, None]]),
    "y[unsigned]": ("y", lambda i, X, T, y: y[i.astype(jnp.uint32)]),
    "log(X)[i]": ("X", lambda i, X, T, y: jnp.log(X)[i]),
    "standardised": ("X", lambda i, X, T, y: ((X - X.mean(0)) / X.std(0))[i]),
    "joined": (None, lambda i, X, T, y: jnp.concatenate([X, T.T], 1)[i]),
    "in a jit": ("X", lambda i, X, T, y: jax.jit(lambda j, Z: Z[j])(i, X)),
    "in a gradient": ("X", lambda i, X, T, y: jax.grad(lambda b: (X[i] @ b).sum())(jnp.ones(3))),
    "in a checkpoint": ("X", lambda i, X, T, y: jax.checkpoint(lambda j, Z: Z[j])(i, X)),
    "constant": (None, lambda i, X, T, y: jnp.asarray(np.arange(ROWS))[i]),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_find_row_gathers_plate_indices_are_followed(name):
    array, fn = FOLLOWED[name]
    assert row_gathers(fn) == [RowGather("rows", ROWS, array)]


NOT_FOLLOWED = {
    "group of ten": lambda i, X, T, y: y[i // 10],
    "row before": lambda i, X, T, y: y[i - 1],
    "row after": lambda i, X, T, y: y[i + 1],
    "cycle": lambda i, X, T, y: y[i % 3],
    "other rows": lambda i, X, T, y: y[jnp.arange(2)],
    "values looked up": lambda i, X, T, y: T[0][(2 * i).astype(jnp.int32)],
    "no lookup": lambda i, X, T, y: i * y.sum(),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_find_row_gathers_computed_indices_are_not_followed(name):
    assert row_gathers(NOT_FOLLOWED[name]) == []


def test_find_row_gathers_index_of_an_index_is_followed_once():
    # A table that maps rows to groups is looked up by rows; an array of groups is not.
    def fn(i, X, T, y):
        group = (y > 0).astype(jnp.int32)
        return X[0][group[i]]

    assert row_gathers(fn) == [RowGather("rows", ROWS, "y")]


def test_find_row_gathers_reports_length_of_the_indexed_dimension():
    assert row_gathers(lambda i, X, T, y: X[:5][i]) == [RowGather("rows", 5, "X")]
    assert row_gathers(lambda i, X, T, y: T[i]) == [RowGather("rows", COLUMNS, "T")]


def test_find_row_gathers_two_plates_are_distinguished():
    def fn(i, j, X, y):
        return X[i].sum() + y[j].sum() + X[:, 0][j].sum()

    i = jnp.arange(2)
    jaxpr = jax.make_jaxpr(fn)(i, i, jnp.ones((ROWS, 2)), jnp.ones(5)).jaxpr
    gathers = find_row_gathers(jaxpr, ["a", "b"], ["X", "y"])
    assert sorted(gathers) == [
        RowGather("a", 7, "X"),
        RowGather("b", 5, "y"),
        RowGather("b", 7, "X"),
    ]


def dependent_outputs(fn, *args, num=1):
    return find_dependent_outputs(jax.make_jaxpr(fn)(*args), num)


def test_find_dependent_outputs_follows_calls_and_loops():
    def fn(a, b):
        return a, b, 2 * b + jnp.sin(a), jnp.ones(3), b.sum(), jnp.zeros_like(a)

    outputs = dependent_outputs(fn, 1.0, jnp.ones(2))
    assert outputs == [True, False, True, False, False, False]
    outputs = dependent_outputs(fn, 1.0, jnp.ones(2), num=2)
    assert outputs == [True, True, True, False, True, False]
    for transform in (jax.jit, jax.checkpoint):
        assert dependent_outputs(transform(lambda a, b: (a * b, b)), 1.0, 2.0) == [True, False]

    def loop(a, b):
        return jax.lax.scan(lambda c, _: (c + a, None), b, None, 3)[0]

    assert dependent_outputs(loop, 1.0, 2.0) == [True]


def test_find_dependent_outputs_follows_custom_derivatives():
    @jax.custom_vjp
    def swap(a, b):
        return b, a

    swap.defvjp(lambda a, b: ((b, a), None), lambda _, g: g[::-1])
    assert dependent_outputs(swap, 1.0, 2.0) == [False, True]


# --- Checks of a model --------------------------------------------------------------------------


def regression(X, y, *, weights=None, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, weights["sd"][i]), obs=y[i])


@pytest.mark.parametrize(
    ("X_rows", "sd_rows", "name"),
    [(8, 10, "`X`"), (12, 10, "`X`"), (10, 9, r"`weights\['sd'\]`")],
)
def test_make_model_potential_array_of_another_length_raises(X_rows, sd_rows, name):
    weights = {"sd": jnp.ones(sd_rows)}
    arguments = Arguments(
        (jnp.ones((X_rows, 2)), np.ones(10)), {"weights": weights, "batch_size": 4}
    )
    with pytest.raises(ValueError, match=f"'rows' has size 10.*{name}"):
        make_model_potential(regression, arguments, init_to_uniform)


def test_make_model_potential_arrays_of_the_plates_length_pass():
    weights = {"sd": np.ones(10)}
    arguments = Arguments((np.ones((10, 2)), jnp.ones(10)), {"weights": weights, "batch_size": 4})
    assert make_model_potential(regression, arguments, init_to_uniform).dim == 2


def test_make_model_potential_groups_of_rows_pass():
    def model(y, batch_size):
        mean = numpyro.sample("mean", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mean[i // 4], 1), obs=y[i])

    assert make_model_potential(model, Arguments((jnp.ones(12), 4)), init_to_uniform).dim == 3


# --- Scalars inside of a plate ------------------------------------------------------------------


def scalar_model(statement, dim=-1):
    """A model with a statement about the log densities of the rows, inside the plate."""
    y = jnp.asarray(np.random.default_rng(0).standard_normal(40), jnp.float32)

    def model(batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size, dim=dim) as i:
            numpyro.sample("y", dist.Normal(a, 1), obs=y[i] if dim == -1 else y[i, None])
            statement(dist.Normal(a, 1).log_prob(y[i]), a)

    return model


def in_another_plate(log_prob, a):
    with numpyro.plate("columns", 3, dim=-1):
        numpyro.factor("ll", log_prob.sum() * jnp.ones(3))


SUMS = {
    "sum": (lambda ll, a: numpyro.factor("ll", ll.sum()), -1),
    "vector of one": (lambda ll, a: numpyro.factor("ll", ll.sum()[None]), -1),
    "dot product": (lambda ll, a: numpyro.factor("ll", ll @ ll), -1),
    "logarithm of a sum": (lambda ll, a: numpyro.factor("ll", jnp.log(jnp.exp(ll).sum())), -1),
    "distribution": (lambda ll, a: numpyro.sample("ll", dist.Normal(ll.sum(), 1), obs=0.0), -1),
    "columns": (in_another_plate, -2),
    "another dimension": (lambda ll, a: numpyro.factor("ll", ll.sum()), -2),
}


@pytest.mark.parametrize("name", SUMS)
def test_make_model_potential_sum_over_minibatch_inside_its_plate_raises(name):
    statement, dim = SUMS[name]
    with pytest.raises(InvalidModelError, match=r"'ll'.*plate 'rows'") as caught:
        make_model_potential(
            scalar_model(statement, dim), Arguments((), {"batch_size": 5}), init_to_uniform
        )
    assert caught.value.entry == "scalar-in-plate"


NO_SUMS = {
    "without rows": (lambda ll, a: numpyro.factor("ll", -(a**2) / 40), -1),
    "row by row": (lambda ll, a: numpyro.factor("ll", ll), -1),
    "another dimension": (lambda ll, a: numpyro.factor("ll", ll[:, None]), -2),
    "mean": (lambda ll, a: numpyro.factor("ll", ll.mean()), -1),
    "observed mean": (lambda ll, a: numpyro.sample("ll", dist.Normal(a, 1), obs=ll.mean()), -1),
}


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("name", NO_SUMS)
def test_make_model_potential_scalar_without_sum_passes(name, batch_size):
    statement, dim = NO_SUMS[name]
    model = scalar_model(statement, dim)
    arguments = Arguments((), {"batch_size": batch_size})
    assert make_model_potential(model, arguments, init_to_uniform).dim == 1


def test_make_model_potential_event_over_minibatch_raises():
    def model(batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", 40, subsample_size=batch_size) as i:
            mean = a * jnp.ones(len(i))
            numpyro.sample("y", dist.MultivariateNormal(mean, jnp.eye(len(i))), obs=i / 40)

    with pytest.raises(InvalidModelError, match=r"'y'.*plate 'rows'") as caught:
        make_model_potential(model, Arguments((), {"batch_size": 5}), init_to_uniform)
    assert caught.value.entry == "rows-in-event"
