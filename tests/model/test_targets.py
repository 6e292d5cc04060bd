"""Kernels on one model share its target, and with it what is compiled; never a wrong one."""

import gc
import logging
import warnings
import weakref
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


def target(model=regression, args=(X, Y), strategy=init_to_uniform, gibbs=NO_GIBBS, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of sites left out
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
        z = numpyro.sample("z", dist.Normal(mu, 1))
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(z + k, 1.0), obs=y[i])


SHIFT = 0


def draw_k(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": (random.bernoulli(rng_key, 0.5, rows.shape) + SHIFT) % 2}


@contextmanager
def compilations():
    """What JAX's log says of each program that it compiles: its name and arguments."""
    found = []

    class Listener(logging.Handler):
        def emit(self, record):
            if (said := record.getMessage()).startswith("Compiling "):
                found.append(said)

    listener, logger = Listener(logging.DEBUG), logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(listener)
    try:
        with jax.log_compiles():
            yield found
    finally:
        logger.removeHandler(listener)


# --- Shared -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_kernel_compiles_less():
    def run(kernel_class):
        """The kernel, and what it compiled of the model: the programs that read the rows."""
        with compilations() as found, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            kernel = kernel_class(regression, num_steps=2)
            kernel.init(random.key(0), 4, None, (X, Y), {"batch_size": 7})
        return kernel, [said for said in found if f"[{ROWS},2]" in said]

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
        (local, (Y,), {"gibbs": GibbsConfig(draw_k, ("k",))}),
        (closing_over(X[:, 0]), (Y,), {}),
    ],
    ids=["plain", "median", "host", "sharded", "gibbs", "closure"],
)
def test_the_same_model_has_one_target(model, args, options):
    assert target(model, args, **options) is target(model, args, **options)


def test_other_data_of_the_same_form_have_the_same_target():
    assert target() is target(args=(X + 1, Y))


def test_a_bound_method_has_one_target():
    class Study:
        def model(self, y):
            return closing_over(X[:, 0])(y)

    study = Study()
    assert target(study.model, (Y,)) is target(study.model, (Y,))
    assert target(Study().model, (Y,)) is not target(study.model, (Y,))


def test_every_kernel_has_its_warnings():
    """The model is read for each."""
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"deterministic sites \['mean'\]"):
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
def test_another_form_is_another_target(options):
    assert target(**options) is not target()


def test_other_arrays_on_the_host_are_another_target():
    one, other = HostArray(X), HostArray(X)
    assert target(args=(one, Y)) is not target(args=(other, Y))


def test_float64_is_another_target(x64):
    wide = target()
    with jax.enable_x64(False):
        assert target() is not wide


def test_data_changed_in_place_are_another_target():
    offset = np.zeros(ROWS, np.float32)
    model = closing_over(offset)
    before = target(model, (Y,))
    offset[-1] = 1.0
    assert target(model, (Y,)) is not before
    offset[-1] = 0.0
    assert target(model, (Y,)) is before


def test_a_global_that_means_something_else_is_another_target(monkeypatch):
    before = target()
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    assert target() is not before
    monkeypatch.undo()
    assert target() is before


def test_another_gibbs_fn_is_another_target(monkeypatch):
    gibbs = GibbsConfig(draw_k, ("k",))
    before = target(local, (Y,), gibbs=gibbs)
    same_draws = lambda **given: draw_k(**given)  # noqa: E731
    assert target(local, (Y,), gibbs=GibbsConfig(same_draws, ("k",))) is not before
    monkeypatch.setattr(f"{__name__}.SHIFT", 1)
    assert target(local, (Y,), gibbs=gibbs) is not before


def test_a_strategy_that_returns_something_else_is_another_target():
    values = {"beta": jnp.zeros(2)}
    strategy = init_to_value(values=values)
    before = target(strategy=strategy)
    assert target(strategy=strategy) is before
    values["beta"] = jnp.ones(2)
    assert target(strategy=strategy) is not before


def test_first_values_of_parameters_are_part_of_the_target():
    def model(y):
        shift = numpyro.param("shift", lambda key: jnp.asarray(y).mean())
        closing_over(np.zeros(ROWS))(y - shift)

    assert target(model, (Y,)) is target(model, (Y.copy(),))
    assert target(model, (Y,)) is not target(model, (Y + 1,))


def test_more_constants_than_are_worth_looking_at_are_not_shared(monkeypatch):
    monkeypatch.setattr("numpyro_sgmcmc.compilation._MAX_CONSTANT_BYTES", 4 * ROWS - 1)
    model = closing_over(np.ones(ROWS, np.float32))
    assert target(model, (Y,)) is not target(model, (Y,))


# --- Kept alive by nothing ----------------------------------------------------------------------


def test_a_target_that_nobody_has_is_let_go():
    model = closing_over(np.zeros(ROWS))
    found = target(model, (Y,))
    refs = weakref.ref(found), weakref.ref(model)
    del found, model
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


# --- Keys of programs ---------------------------------------------------------------------------


def key_of(fn, *args):
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
def test_programs_are_equal_where_they_compute_the_same(make):
    assert key_of(make(1.0)) == key_of(make(1.0))
    assert key_of(make(1.0)) != key_of(make(2.0))


def test_types_are_part_of_a_program():
    assert key_of(lambda x: x, jnp.ones(3)) != key_of(lambda x: x, jnp.ones(3, jnp.int32))
    assert key_of(lambda x: x, jnp.ones(3)) != key_of(lambda x: x, jnp.ones(4))


def test_callbacks_are_compared_themselves():
    def calling(fn):
        return lambda x: jax.pure_callback(fn, jax.ShapeDtypeStruct((3,), jnp.float32), x)

    assert key_of(calling(np.sin)) == key_of(calling(np.sin))
    assert key_of(calling(np.sin)) != key_of(calling(np.cos))


def test_variables_are_told_apart_whenever_they_are_made():
    """Numbers given to the results of later operations must not come again."""

    def first(a, b, c, d):
        e = jnp.sin(a)
        return e * b

    def second(a, b, c, d):
        jnp.sin(a)
        return c * b

    keys = [fingerprint_jaxpr(jax.make_jaxpr(f)(1.0, 2.0, 3.0, 4.0)) for f in (first, second)]
    assert keys[0] != keys[1]


def test_a_global_that_chooses_a_column_is_another_target(monkeypatch):
    columns = [X[:, 0], X[:, 1], X[:, 0] + 1, X[:, 1] + 2]

    def model(y, *given):
        b = numpyro.sample("b", dist.Normal(0, 1))
        computed = [*given, *map(jnp.exp, given)]
        with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(b * computed[CHOSEN][i], 1.0), obs=y[i])

    found = []
    for chosen in range(8):
        monkeypatch.setitem(globals(), "CHOSEN", chosen)
        found.append(target(model, (Y, *columns)))
    assert len(set(map(id, found))) == 8


def test_what_is_done_with_all_rows_is_part_of_the_target(monkeypatch):
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            shift = 0.0 if len(i) <= BATCH + 1 else SCALE
            numpyro.sample("y", dist.Normal(b + shift, 1.0), obs=y[i])

    before = target(model, (Y,))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert target(model, (Y,)) is not before
