"""Any input: the right potential, or an error of this package that names what is wrong.

Valid models and data are generated, and compared with NumPyro's potential of the model on all rows.
Wrong input changes one thing of a valid call. It must raise an error before any sampling, with a
short message that names the site, plate, argument or option, from this package and not from inside
JAX, NumPyro or NumPy.

``HOSTILE_EXAMPLES`` sets the number of examples per test, from random seeds, for a longer run.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import numpyro_sgmcmc
from numpyro_sgmcmc import SGHMCSplit

PACKAGE = str(Path(numpyro_sgmcmc.__file__).parent)
LONG = int(os.environ.get("HOSTILE_EXAMPLES", "0"))


def num_examples(number: int) -> Any:
    """Set the number of examples, which are the same in every run but a longer one."""
    return settings(
        max_examples=LONG or number,
        derandomize=not LONG,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class WarmupReached(Exception):
    """Raised where the warm-up begins, with an initial position of finite density."""


def assert_named(error: BaseException, *names: str) -> None:
    """An error is from this package, short, and contains the names."""
    message = str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    description = f"{type(error).__name__}: {message} ({last.filename}:{last.lineno})"
    assert isinstance(error, (ValueError, TypeError, RuntimeError, OSError)), description
    assert last.filename.startswith(PACKAGE), description
    assert all(name in message for name in names), f"{names} not in {description}"
    assert len(message) < 700, description
    assert message.count(". ") <= 5, description
    assert "Tracer" not in message.split("(")[0], description


def assert_error_names(call: Callable[[], Any], *names: str) -> None:
    """A call raises an error of this package whose message contains the names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
    assert not isinstance(caught.value, WarmupReached), f"no error: {names}"
    assert_named(caught.value, *names)


def init_kernel(
    model: Any,
    *args: Any,
    kernel: Any = SGHMCSplit,
    rng_key: Any = None,
    init_params: Any = None,
    options: dict | None = None,
    **kwargs: Any,
) -> None:
    """Initialise a kernel, which checks the input and runs the warm-up."""
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    kernel(model, **(options or {})).init(rng_key, 10, init_params, args, kwargs)


def assert_accepted(call: Callable[[], Any]) -> None:
    """A call passes all checks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(WarmupReached):
            call()


def by_index(X: Any, y: Any, batch_size: Any = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, 1), obs=y[i])


def by_subsample(X: Any, y: Any, batch_size: Any = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size):
        mean = numpyro.subsample(X, event_dim=1) @ beta
        numpyro.sample("y", dist.Normal(mean, 1), obs=numpyro.subsample(y, event_dim=0))


def table(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 2)).astype(np.float32)
    return X, rng.standard_normal(n).astype(np.float32)


ZEROS = int, float, np.integer, np.floating, np.ndarray, jax.Array, Fraction, Decimal


def numbers() -> Any:
    return st.one_of(st.integers(-2, 3), st.integers(), st.floats(), st.fractions(), st.decimals())


def is_positive_number(x: Any) -> bool:
    if isinstance(x, (np.ndarray, jax.Array)):
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.number):
            return False
    elif isinstance(x, (bool, np.bool_)) or not isinstance(
        x, (int, float, np.integer, np.floating, Fraction, Decimal)
    ):
        return False
    try:
        return bool(np.isfinite(float(x)) and float(x) > 0)
    except (OverflowError, TypeError, ValueError):
        return False


def is_zero_or_positive(x: Any) -> bool:
    if isinstance(x, bool) or getattr(x, "dtype", None) == np.bool_:
        return False
    try:
        is_zero = isinstance(x, ZEROS) and x == 0
        return is_positive_number(x) or (is_zero and is_positive_number(x + 1))
    except (TypeError, ValueError, ArithmeticError):
        return False


def is_positive_integer(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and x > 0


def texts(max_size: int) -> Any:
    """Return a strategy for texts; that of all characters makes a table for seconds."""
    return st.text("aZ1_. '\nβ☃", max_size=max_size)


def any_values() -> Any:
    """Return a strategy for values of every kind that a user might pass."""
    scalar = st.one_of(
        st.none(),
        st.booleans(),
        numbers(),
        texts(4),
        st.sampled_from(
            ["auto", "minibatch", "iid", "contiguous", "euler", "potential", "1.0", "0.1"]
        ),
        st.binary(max_size=2),
        st.complex_numbers(),
    )
    held = st.one_of(st.booleans(), st.integers(-2, 3), st.floats(width=32))
    return st.one_of(
        scalar,
        st.lists(scalar, max_size=2),
        st.dictionaries(texts(2), scalar, max_size=1),
        held.map(np.array),
        held.map(jnp.asarray),
        held.map(lambda x: np.array([x])),
        held.map(lambda x: np.array(x)[()]),
        st.just(np.array(["auto", "minibatch"])),
        st.just(np.array("auto")),
        st.just(object()),
        st.just(lambda i: 0.1),
        st.just(SGHMCSplit),
        st.just(jax.random.key(0)),
    )
