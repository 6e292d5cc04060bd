"""Kernels on one model share its potential and compiled programs, and never a wrong one."""

import logging
import warnings
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import init_to_median, init_to_uniform, init_to_value

from numpyro_sgmcmc import SGNHT, HostArray, SGHMCSplit, ShardedArray
from numpyro_sgmcmc.compilation import fingerprint_jaxpr
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import DroppedSiteWarning
from numpyro_sgmcmc.model.subsampled import get_model_potential
from numpyro_sgmcmc.model.trace import NO_GIBBS, GibbsConfig

ROWS, BATCH = 60, 6
X = np.linspace(-1, 1, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
Y = X.sum(1)
SCALE = 1.0
CHOSEN = 0


def regression(X, y, batch_size=BATCH):
    beta = numpyro.sample("beta", dist.Normal(0, SCALE).expand([2]).to_event(1))
    numpyro.deterministic("sum", beta.sum())
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        mean = numpyro.deterministic("mean", X[i] @ jax.nn.relu(beta))
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[i])


def potential(model=regression, args=(X, Y), strategy=init_to_uniform, gibbs=NO_GIBBS, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedSiteWarning)
        return get_model_potential(model, Arguments(args, kwargs), strategy, gibbs)


def closing_over(value):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(mu + jnp.asarray(value)[i], 1.0), obs=y[i])

    return model


def local(y, batch_size=BATCH):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(mu + k, 1.0), obs=y[i])


SHIFT = 0


def sample_k(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": (random.bernoulli(rng_key, 0.5, rows.shape) + SHIFT) % 2}


@contextmanager
def compilations():
    """Collect JAX's log messages on the programs that it compiles, with their arguments."""
    messages = []

    class Listener(logging.Handler):
        def emit(self, record):
            if (message := record.getMessage()).startswith("Compiling "):
                messages.append(message)

    listener, logger = Listener(logging.DEBUG), logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(listener)
    try:
        with jax.log_compiles():
            yield messages
    finally:
        logger.removeHandler(listener)


# --- Shared -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_get_model_potential_second_kernel_compiles_no_program_of_the_model():
    def run(kernel_class):
        """Return the kernel and the messages on programs that read the rows."""
        with compilations() as messages, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            kernel = kernel_class(regression, num_steps=2)
            kernel.init(random.key(0), 4, None, (X, Y), {"batch_size": 7})
        return kernel, [message for message in messages if f"[{ROWS},2]" in message]

    jax.clear_caches()
    first, before = run(SGHMCSplit)
    second, after = run(SGNHT)
    assert first.potential is second.potential
    assert len(before) > 4
    assert not after


@pytest.mark.parametrize(
    ("model", "args", "options"),
    [
        (regression, (X, Y), {"batch_size": 5}),
        (regression, (X, Y), {"strategy": init_to_median}),
        (regression, (HostArray(X), HostArray(Y)), {}),
        (regression, (ShardedArray(X), ShardedArray(Y)), {}),
        (local, (Y,), {"gibbs": GibbsConfig(sample_k, ("k",))}),
        (closing_over(X[:, 0]), (Y,), {}),
    ],
    ids=["arrays", "median", "host", "sharded", "gibbs", "closure"],
)
def test_get_model_potential_same_model_is_shared(model, args, options):
    assert potential(model, args, **options) is potential(model, args, **options)


def test_get_model_potential_other_values_of_data_is_shared():
    assert potential() is potential(args=(X + 1, Y))


def test_get_model_potential_bound_method_is_shared_per_object():
    class Study:
        def model(self, y):
            return closing_over(X[:, 0])(y)

    study = Study()
    assert potential(study.model, (Y,)) is potential(study.model, (Y,))
    assert potential(Study().model, (Y,)) is not potential(study.model, (Y,))


def test_get_model_potential_shared_warns_each_time():
    for _ in range(2):
        with pytest.warns(DroppedSiteWarning, match="mean"):
            get_model_potential(regression, Arguments((X, Y)), init_to_uniform)


# --- Not shared ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"args": (X[1:], Y[1:])},
        {"args": (X.astype(np.int32), Y)},
        {"args": (HostArray(X), Y)},
        {"strategy": init_to_value(values={"beta": jnp.zeros(2)})},
    ],
    ids=["batch", "rows", "dtype", "host", "strategy"],
)
def test_get_model_potential_other_shapes_or_strategy_is_not_shared(options):
    assert potential(**options) is not potential()


def test_get_model_potential_other_host_arrays_is_not_shared():
    one, other = HostArray(X), HostArray(X)
    assert potential(args=(one, Y)) is not potential(args=(other, Y))


def test_get_model_potential_float64_is_not_shared(x64):
    wide = potential()
    with jax.enable_x64(False):
        assert potential() is not wide


def test_get_model_potential_closure_changed_in_place_is_not_shared():
    offset = np.zeros(ROWS, np.float32)
    model = closing_over(offset)
    before = potential(model, (Y,))
    offset[-1] = 1.0
    assert potential(model, (Y,)) is not before
    offset[-1] = 0.0
    assert potential(model, (Y,)) is before


def test_get_model_potential_changed_global_is_not_shared(monkeypatch):
    before = potential()
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    assert potential() is not before
    monkeypatch.undo()
    assert potential() is before


def test_get_model_potential_other_gibbs_fn_is_not_shared(monkeypatch):
    gibbs = GibbsConfig(sample_k, ("k",))
    before = potential(local, (Y,), gibbs=gibbs)
    equivalent = lambda **kwargs: sample_k(**kwargs)  # noqa: E731
    assert potential(local, (Y,), gibbs=GibbsConfig(equivalent, ("k",))) is not before
    monkeypatch.setattr(f"{__name__}.SHIFT", 1)
    assert potential(local, (Y,), gibbs=gibbs) is not before


def test_get_model_potential_changed_strategy_is_not_shared():
    values = {"beta": jnp.zeros(2)}
    strategy = init_to_value(values=values)
    before = potential(strategy=strategy)
    assert potential(strategy=strategy) is before
    values["beta"] = jnp.ones(2)
    assert potential(strategy=strategy) is not before


def test_get_model_potential_other_param_values_is_not_shared():
    def model(y):
        shift = numpyro.param("shift", lambda key: jnp.asarray(y).mean())
        closing_over(np.zeros(ROWS))(y - shift)

    assert potential(model, (Y,)) is potential(model, (Y.copy(),))
    assert potential(model, (Y,)) is not potential(model, (Y + 1,))


# --- Fingerprints -------------------------------------------------------------------------------


def fingerprint(fn, *args):
    return fingerprint_jaxpr(jax.make_jaxpr(fn)(*(args or (jnp.ones(3),))))


def sloped(slope):
    @jax.custom_jvp
    def fn(x):
        return x

    fn.defjvp(lambda primals, tangents: (primals[0], slope * tangents[0]))
    return fn


@pytest.mark.parametrize(
    "make",
    [
        lambda c: lambda x: x * c,
        lambda c: lambda x: x * np.full(3, c),
        lambda c: lambda x: jax.jit(lambda x: x + c)(x),
        lambda c: lambda x: jax.lax.scan(lambda a, b: (a + c * b, a), 0.0, x),
        lambda c: lambda x: jax.lax.cond(x[0] > 0, lambda: x * c, lambda: x),
        lambda c: lambda x: x + random.normal(random.key(int(c)), (3,)),
        lambda c: lambda x: x[:: int(c)],
        lambda c: jax.grad(lambda x: sloped(c)(x).sum()),
        lambda c: lambda x: jnp.sin(x) * x if c == 1.0 else x * jnp.sin(x),
    ],
)
def test_fingerprint_jaxpr_equal_for_equal_programs_only(make):
    assert fingerprint(make(1.0)) == fingerprint(make(1.0))
    assert fingerprint(make(1.0)) != fingerprint(make(2.0))


def test_fingerprint_jaxpr_depends_on_types_and_shapes():
    assert fingerprint(lambda x: x, jnp.ones(3)) != fingerprint(lambda x: x, jnp.ones(3, jnp.int32))
    assert fingerprint(lambda x: x, jnp.ones(3)) != fingerprint(lambda x: x, jnp.ones(4))


def test_fingerprint_jaxpr_compares_callbacks_by_identity():
    def calling(fn):
        return lambda x: jax.pure_callback(fn, jax.ShapeDtypeStruct((3,), jnp.float32), x)

    assert fingerprint(calling(np.sin)) == fingerprint(calling(np.sin))
    assert fingerprint(calling(np.sin)) != fingerprint(calling(np.cos))


def test_fingerprint_jaxpr_distinguishes_all_variables():
    def first(a, b, c, d):
        e = jnp.sin(a)
        return e * b

    def second(a, b, c, d):
        jnp.sin(a)
        return c * b

    assert fingerprint(first, 1.0, 2.0, 3.0, 4.0) != fingerprint(second, 1.0, 2.0, 3.0, 4.0)


def test_fingerprint_jaxpr_large_constants_raises():
    jaxpr = jax.make_jaxpr(lambda x: x + jnp.asarray(np.arange(3.0, dtype=np.float32)))(jnp.ones(3))
    assert fingerprint_jaxpr(jaxpr, max_constant_bytes=12) == fingerprint_jaxpr(jaxpr)
    with pytest.raises(ValueError, match="constants"):
        fingerprint_jaxpr(jaxpr, max_constant_bytes=11)


def test_get_model_potential_global_chooses_column_is_not_shared(monkeypatch):
    columns = [X[:, 0], X[:, 1], X[:, 0] + 1, X[:, 1] + 2]

    def model(y, *given):
        b = numpyro.sample("b", dist.Normal(0, 1))
        computed = [*given, *map(jnp.exp, given)]
        with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(b * computed[CHOSEN][i], 1.0), obs=y[i])

    potentials = []
    for chosen in range(8):
        monkeypatch.setitem(globals(), "CHOSEN", chosen)
        potentials.append(potential(model, (Y, *columns)))
    assert len(set(map(id, potentials))) == 8


def test_get_model_potential_change_on_all_rows_is_not_shared(monkeypatch):
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            shift = 0.0 if len(i) <= BATCH + 1 else SCALE
            numpyro.sample("y", dist.Normal(b + shift, 1.0), obs=y[i])

    before = potential(model, (Y,))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert potential(model, (Y,)) is not before
