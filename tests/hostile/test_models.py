"""Models and plates that cannot be sampled raise errors that name them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import (
    quietly,
)
from tests.hostile.calls import (
    assert_accepted,
    assert_error_names,
    init_kernel,
    table,
)
from tests.quick import quick_if


def in_plate(body: Callable[[Any, Any, Any, Any, int], Any]) -> Callable:
    """Return a model whose plate has this body, of data, indices, coefficients and batch size."""

    def model(X: Any, y: Any, batch_size: int = 4) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            body(X, y, i, b, batch_size)

    return model


def of_prior(site: Callable[[], Any]) -> Callable:
    """Return a model of a mean with this prior."""

    def model(X: Any, y: Any, batch_size: int = 4) -> None:
        mean = site()
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(jnp.sum(mean), 1), obs=y[i])

    return model


def y_site(mean: Any, data: Any, **kwargs: Any) -> Any:
    return numpyro.sample("y", dist.Normal(mean, 1), obs=data, **kwargs)


def outside(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        pass
    y_site(X[i] @ b, y[i])


def factor_outside(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        log_prob = dist.Normal(X[i] @ b, 1).log_prob(y[i])
    numpyro.factor("likelihood", log_prob.sum())


def prior_of_the_rows(X, y, batch_size=4):
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        spread = y[i].std()
    b = numpyro.sample("b", dist.Normal(0, spread))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(b, y[i])


def one_latent_a_row_outside(X, y, batch_size=4):
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        pass
    b = numpyro.sample("b", dist.Normal(0, 1).expand([len(i)]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(b, y[i])


def another_plates_rows(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(X[i] @ b, y[i])
    with numpyro.plate("others", len(y), subsample_size=batch_size):
        numpyro.sample("z", dist.Normal(X[i] @ b, 1), obs=y[i])


def same_name(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(X[i] @ b, y[i])
    with numpyro.plate("rows", 2 * len(y), subsample_size=batch_size) as j:
        numpyro.sample("z", dist.Normal(b[0], 1), obs=jnp.concatenate([y, y])[j])


def if_of_a_latent(X, y, batch_size=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    if b[0] > 0:
        b = -b
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(X[i] @ b, y[i])


def levels_of_the_data(X, y, batch_size=4):
    num = len(np.unique(y))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([num]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(b[0], y[i])


def largest_of_the_data(X, y, batch_size=4):
    num = int(y.max()) + 1
    b = numpyro.sample("b", dist.Normal(0, 1).expand([num]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        y_site(b[0], y[i])


def deltas_in_a_plate() -> Any:
    with numpyro.plate("k", 2):
        return numpyro.sample("b", dist.Delta(1.0))


OUTSIDE = np.arange(12.0, dtype=np.float32)

BAD_MODELS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "first rows of y": (
        in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, y[:n])),
        ("'y'", "'rows'", "same data"),
    ),
    "first rows of X": (in_plate(lambda X, y, i, b, n: y_site(X[:n] @ b, y[i])), ("'rows'",)),
    "first rows of all": (in_plate(lambda X, y, i, b, n: y_site(X[:n] @ b, y[:n])), ("'rows'",)),
    "all rows of y": (in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, y)), ("'y'", "'rows'")),
    "all rows of X": (in_plate(lambda X, y, i, b, n: y_site(X @ b, y[i])), ("'rows'",)),
    "global rows": (
        in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, jnp.asarray(OUTSIDE)[:n])),
        ("'y'", "'rows'"),
    ),
    "rows in the event": (
        in_plate(
            lambda X, y, i, b, n: numpyro.sample(
                "y", dist.Normal(X[i] @ b, 1).to_event(1), obs=y[i]
            )
        ),
        ("'y'", "to_event"),
    ),
    "rows times rows": (
        in_plate(lambda X, y, i, b, n: y_site((X[i] @ b)[:, None], y[i])),
        ("'y'", "every other"),
    ),
    "some of the rows": (
        in_plate(lambda X, y, i, b, n: y_site(b[0], y[i][y[i] > 0])),
        ("test_models.py",),
    ),
    "short array in a loop": (
        in_plate(lambda X, y, i, b, n: y_site(jax.lax.map(lambda k: X[:7, 0][k], i), y[i])),
        ("'rows'", "7 rows"),
    ),
    "short array, sorted rows": (
        in_plate(lambda X, y, i, b, n: y_site(X[:7, 0][jnp.sort(i)], y[i])),
        ("'rows'", "7 rows"),
    ),
    "outside of the plate": (outside, ("'y'", "'rows'", "outside")),
    "factor outside of the plate": (factor_outside, ("'likelihood'", "'rows'", "outside")),
    "prior that sees the minibatch": (prior_of_the_rows, ("'b'", "'rows'", "outside")),
    "one latent a row outside": (one_latent_a_row_outside, ("'b'", "'rows'")),
    "rows of another plate": (another_plates_rows, ("'z'", "'rows'")),
    "one name for two plates": (same_name, ("'rows'", "12", "24")),
    "if of a latent": (if_of_a_latent, ("test_models.py", "if b[0] > 0")),
    "np.unique of a minibatch": (
        in_plate(lambda X, y, i, b, n: y_site(b[0] + len(np.unique(y[i])), y[i])),
        ("test_models.py",),
    ),
    "int of a minibatch": (
        in_plate(lambda X, y, i, b, n: y_site(b[0] + int(y[i].max()), y[i])),
        ("test_models.py",),
    ),
    "fixed number of rows": (
        in_plate(
            lambda X, y, i, b, n: numpyro.sample(
                "y", dist.Normal(b[0], 1).expand([n, 2]).to_event(1), obs=X[i]
            )
        ),
        ("'rows'", "len(i)"),
    ),
    "classes as floats": (
        in_plate(
            lambda X, y, i, b, n: numpyro.sample(
                "y", dist.Categorical(logits=jnp.zeros(3)), obs=jnp.zeros(12)[i]
            )
        ),
        ("'y'", "float32"),
    ),
    "delta": (of_prior(lambda: numpyro.sample("b", dist.Delta(1.0))), ("'b'", "delta")),
    "deltas": (of_prior(lambda: numpyro.sample("b", dist.Delta(1.0).expand([2]))), ("'b'",)),
    "delta event": (
        of_prior(lambda: numpyro.sample("b", dist.Delta(jnp.ones(2)).to_event(1))),
        ("'b'", "delta"),
    ),
    "deltas in a plate": (of_prior(deltas_in_a_plate), ("'b'", "delta")),
    "discrete": (
        of_prior(lambda: numpyro.sample("b", dist.Poisson(2.0))),
        ("'b'", "Gibbs", "by hand"),
    ),
    "complex": (of_prior(lambda: 1j * numpyro.sample("b", dist.Normal(0, 1))), ("'y'", "complex")),
    "empty support": (of_prior(lambda: numpyro.sample("b", dist.Uniform(2.0, 1.0))), ("'b'",)),
    "endless support": (
        of_prior(lambda: numpyro.sample("b", dist.Uniform(0.0, jnp.inf))),
        ("'b'",),
    ),
    "nan gradient": (
        of_prior(lambda: jnp.sqrt(0.0 * numpyro.sample("b", dist.Normal(0, 1)))),
        ("gradient",),
    ),
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", BAD_MODELS)
def test_invalid_model_is_named(name):
    model, words = BAD_MODELS[name]
    assert_error_names(lambda: init_kernel(model, *table(12)), *words)


# With a minibatch of one row, some of these cannot be distinguished from one row for all.
@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("batch_size", [1, 11])
@pytest.mark.parametrize(
    "name",
    [
        "first rows of y",
        "all rows of y",
        "rows in the event",
        "rows times rows",
        "outside of the plate",
        "factor outside of the plate",
        "one latent a row outside",
        "rows of another plate",
        "one name for two plates",
        "short array in a loop",
    ],
)
def test_invalid_model_with_any_batch_size_raises(name, batch_size):
    assert_error_names(lambda: init_kernel(BAD_MODELS[name][0], *table(12), batch_size=batch_size))


GOOD_MODELS: dict[str, Callable] = {
    "global rows in NumPy": in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, OUTSIDE[i])),
    "np.unique of the data": levels_of_the_data,
    "int of the data": largest_of_the_data,
    # Three more entries a row, as many as there are rows in a minibatch.
    "an axis as long as the minibatch": in_plate(
        lambda X, y, i, b, n: y_site(jnp.ones((4, 1)) * (X[i] @ b), jnp.stack([y[i]] * 4))
    ),
    "zeros in place of data": in_plate(
        lambda X, y, i, b, n: numpyro.sample(
            "y", dist.Poisson(0.5 * (y[i] - X[i] @ b) ** 2), obs=jnp.zeros(len(i), int)
        )
    ),
    "one value for all rows": in_plate(lambda X, y, i, b, n: y_site(X[i] @ b, y.mean())),
    "factor of the rows": in_plate(
        lambda X, y, i, b, n: numpyro.factor("f", -jnp.square(y[i] - X[i] @ b))
    ),
    "a jitted helper that returns both": in_plate(
        lambda X, y, i, b, n: y_site(*jax.jit(lambda X, y, i: (X[i] @ b, y[i]))(X, y, i))
    ),
    "improper": of_prior(
        lambda: numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
    ),
    "whole numbers for reals": in_plate(
        lambda X, y, i, b, n: y_site(X[i] @ b, jnp.round(y).astype(int)[i])
    ),
}


# Those that compute with NumPy on the data are tested in tests/model/test_numpy_values.py.
SLOW_GOOD_MODELS = {
    "global rows in NumPy",
    "np.unique of the data",
    "int of the data",
    "whole numbers for reals",
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("batch_size", [quick_if(False, 1), 4])
@pytest.mark.parametrize("name", [quick_if(n not in SLOW_GOOD_MODELS, n) for n in GOOD_MODELS])
def test_unusual_model_is_accepted(name, batch_size):
    assert_accepted(lambda: init_kernel(GOOD_MODELS[name], *table(12), batch_size=batch_size))


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    ("site", "match"),
    [
        (lambda: numpyro.sample("b", dist.ProjectedNormal(jnp.ones(2))), "'b'"),
        (lambda: numpyro.sample("b", dist.Normal(0.0, -1.0)), "invalid scale parameter"),
        (lambda: numpyro.sample("y", dist.Normal(0.0, 1.0)), "unique names but got `y`"),
    ],
)
def test_model_with_an_error_of_numpyro_raises_it(site, match):
    """NUTS raises the same error."""
    X, y = (jnp.asarray(x) for x in table(6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kernel in (SGHMCSplit, NUTS):
            with pytest.raises((ValueError, AssertionError), match=match):
                quietly(kernel(of_prior(site)), num_warmup=1, num_samples=1).run(
                    jax.random.key(0), X, y, batch_size=3 if kernel is SGHMCSplit else None
                )
