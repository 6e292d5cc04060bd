"""Models that compute with NumPy on their data, or close over NumPy arrays, run as with NUTS."""

from __future__ import annotations

import dataclasses
import types
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.extend.core import ClosedJaxpr
from numpyro import handlers
from numpyro.infer import MCMC, Predictive, init_to_uniform
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc import HostArray, SGHMCSplit, ShardedArray, bias_report, posterior_predictive
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError
from numpyro_sgmcmc.model.numpy_values import IndexableArray, NumPyArgumentsModel
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import GIVEN, quietly
from tests.quick import quick_if

ROWS, BATCH, GROUPS = 60, 12, 4
_rng = np.random.default_rng(0)
GROUP = np.r_[np.arange(GROUPS), _rng.integers(0, GROUPS, ROWS - GROUPS)]
X = _rng.standard_normal(ROWS).astype(np.float32)
Y = (GROUP + X + 0.3 * _rng.standard_normal(ROWS)).astype(np.float32)
DATA = (GROUP, X, Y)


def rows(effects, group, x, y, scale=0.5):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(effects[group[i]] + slope * x[i], scale), obs=y[i])


def vector(num):
    return numpyro.sample("effects", dist.Normal(0, 2).expand([int(num)]).to_event(1))


def plain(group, x, y):
    rows(vector(GROUPS), jnp.asarray(group), jnp.asarray(x), jnp.asarray(y))


def levels(group, x, y):
    rows(vector(len(np.unique(group))), group, x, y)


def largest(group, x, y):
    rows(vector(int(group.max()) + 1), group, x, y)


def codes(group, x, y):
    _, code = np.unique(group, return_inverse=True)
    rows(vector(code.max() + 1), code, x, y)


def counted(group, x, y):
    rows(vector((np.bincount(group) > 0).sum()), group, x, y)


def loop(group, x, y):
    number = {int(value): k for k, value in enumerate(np.unique(group))}
    code = np.empty_like(group)
    for row, value in enumerate(group):
        code[row] = number[int(value)]
    rows(vector(len(number)), code, x, y)


def branch(group, x, y):
    scale = 0.5 if np.isfinite(y).all() and x.std() > 0 else 1.0
    rows(vector(GROUPS), group, x, y, scale)


def missing(group, x, y):
    filled = x.copy()
    filled[np.nonzero(np.isnan(x))[0]] = 0.0
    rows(vector(GROUPS), group, filled, y)


def updated(group, x, y):
    last = int(group.argmax())
    rows(vector(GROUPS), group.at[last].set(group.max()), x, y)


def columns(table):
    group, x, y = table[:, 0].astype(int), table[:, 1], table[:, 2]
    rows(vector(len(np.unique(group))), group, x, y)


def by_name(data):
    rows(vector(len(np.unique(data["group"]))), *data.values())


NUMPY_MODELS = {
    "np.unique": (levels, DATA),
    "int of the largest": (largest, DATA),
    "int of the largest, JAX arrays": (largest, tuple(map(jnp.asarray, DATA))),
    "codes of np.unique": (codes, DATA),
    "np.bincount": (counted, DATA),
    "loop over rows": (loop, DATA),
    "branch on the data": (branch, DATA),
    "filled copy": (missing, DATA),
    "functional update and int": (updated, DATA),
    "columns of a table": (columns, (np.column_stack(DATA),)),
    "dict of arrays": (by_name, ({"group": GROUP, "x": X, "y": Y},)),
}


def of_globals():
    rows(vector(GROUPS), GROUP, X, Y)


def closing_over(group, x, y):
    def model():
        rows(vector(GROUPS), group, x, y)

    return model


def of_helper():
    helper()


def helper(group=GROUP, *, x=X, y=Y):
    rows(vector(GROUPS), group, x, y)


@dataclasses.dataclass(frozen=True)
class Data:
    group: np.ndarray
    x: np.ndarray
    y: np.ndarray

    def __call__(self):
        rows(vector(GROUPS), self.group, self.x, self.y)

    def model(self):
        self()


@dataclasses.dataclass(slots=True)
class Slots:
    group: np.ndarray
    x: np.ndarray
    y: np.ndarray


class Named(NamedTuple):
    group: np.ndarray
    x: np.ndarray
    y: np.ndarray


class Plain:
    def __init__(self, group, x, y):
        self.arrays = {"group": group, "x": [x], "y": (y,)}


def of_attributes(data):
    def model():
        rows(vector(GROUPS), data.group, data.x, data.y)

    return model


def of_argument(data):
    rows(vector(GROUPS), data.group, data.x, data.y)


def of_containers(data):
    def model():
        arrays = data.arrays
        rows(vector(GROUPS), arrays["group"], arrays["x"][0], arrays["y"][0])

    return model


CLOSURES = {
    "globals": (of_globals, ()),
    "closure": (closing_over(*DATA), ()),
    "defaults of a helper": (of_helper, ()),
    "callable dataclass": (Data(*DATA), ()),
    "method": (Data(*DATA).model, ()),
    "attributes": (of_attributes(Data(*DATA)), ()),
    "attributes in slots": (of_attributes(Slots(*DATA)), ()),
    "named tuple": (of_attributes(Named(*DATA)), ()),
    "namespace": (of_attributes(types.SimpleNamespace(group=GROUP, x=X, y=Y)), ()),
    "containers": (of_containers(Plain(*DATA)), ()),
    "dataclass as argument": (of_argument, (Data(*DATA),)),
    "partial": (partial(levels, GROUP, X), (Y,)),
    "handler": (handlers.scale(of_globals, scale=1.0), ()),
}


def make_potential(model, args=(), **kwargs):
    return make_model_potential(model, Arguments(args, kwargs), init_to_uniform)


def evaluate(model, args):
    """Return minibatch and full-data gradients of a model."""
    potential, arguments = make_potential(model, args), Arguments(args)
    q = jnp.linspace(-1, 1, potential.dim)
    indices = {"rows": jnp.arange(1, ROWS, 7)}
    return potential.value_and_grad(q, indices, arguments), potential.full_gradient(q, arguments)


@pytest.fixture(scope="module")
def expected():
    return evaluate(plain, DATA)


SLOW = {  # of the same kinds as others
    "int of the largest, JAX arrays",
    "codes of np.unique",
    "np.bincount",
    "branch on the data",
    "callable dataclass",
    "attributes",
    "namespace",
}


@pytest.mark.parametrize("name", [quick_if(n not in SLOW, n) for n in (*NUMPY_MODELS, *CLOSURES)])
def test_gradients_are_those_of_the_model_in_jax(name, expected):
    actual = evaluate(*(NUMPY_MODELS | CLOSURES)[name])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), actual, expected)


def test_rows_are_read_from_the_traced_arguments():
    def constants(model):
        potential = make_potential(model, DATA)
        jaxpr = jax.make_jaxpr(potential.value)(
            jnp.zeros(potential.dim), potential.first_indices, Arguments(DATA)
        )
        return count(jaxpr)

    def count(jaxpr):
        """Constants of the inner programs are their own with JAX 0.12."""
        params = [p for eqn in jaxpr.jaxpr.eqns for p in eqn.params.values()]
        inner = [count(p) for p in params if isinstance(p, ClosedJaxpr)]
        return sum(map(np.size, jaxpr.consts)) + sum(inner)

    assert constants(largest) == constants(plain) < ROWS
    assert constants(codes) >= ROWS


def test_a_model_that_runs_with_traced_arguments_gets_no_others():
    seen = []

    def model(group, x, y):
        seen.append(type(x))
        rows(vector(GROUPS), group, x, y)

    make_potential(model, tuple(map(jnp.asarray, DATA)))
    assert seen
    assert all(issubclass(kind, jax.core.Tracer) for kind in seen)


def test_a_model_does_not_change_the_users_arrays():
    def model(group, x, y):
        len(np.unique(group))
        x[0] = 100.0
        rows(vector(GROUPS), group, x, y)

    before = X.copy()
    with pytest.raises(ValueError, match="read-only"):
        make_potential(model, DATA)
    np.testing.assert_array_equal(X, before)


def test_the_users_objects_are_left_as_they_are():
    data = Plain(*DATA)
    make_potential(of_containers(data))
    assert type(data.arrays["group"]) is np.ndarray
    assert type(of_globals.__globals__["GROUP"]) is np.ndarray


def test_other_values_of_the_same_shapes_make_another_potential():
    fewer = GROUP % 2
    assert make_potential(levels, DATA).dim == GROUPS + 1
    assert make_potential(levels, (fewer, X, Y)).dim == 3
    model = NumPyArgumentsModel(levels, Arguments(DATA))
    assert model.has_values_of(Arguments((GROUP.copy(), X, jnp.asarray(Y))))
    assert not model.has_values_of(Arguments((fewer, X, Y)))
    assert NumPyArgumentsModel(levels, Arguments((fewer, X, Y))).digest != model.digest


def test_arrays_above_the_bound_remain_traced():
    arguments = Arguments((np.zeros(2, np.float32), np.zeros(100, np.float32)))
    seen = []

    def model(small, large):
        seen.append((type(small), type(large)))

    bounded = NumPyArgumentsModel(model, arguments, max_bytes=100)
    jax.eval_shape(lambda a: bounded(*a.args), arguments)
    assert seen[0][0] is IndexableArray
    assert issubclass(seen[0][1], jax.core.Tracer)
    assert bounded.describe_traced(arguments) == "`large`"


def test_values_of_other_gibbs_blocks_remain_traced():
    seen = []

    def model(x, **conditioning):
        seen.append((type(x), type(conditioning[GIBBS_SITES_KWARG]["k"])))

    arguments = Arguments((X,), {GIBBS_SITES_KWARG: {"k": X}})
    with_values = NumPyArgumentsModel(model, arguments)
    jax.eval_shape(lambda a: with_values(*a.args, **a.kwargs), arguments)
    assert seen[0][0] is IndexableArray
    assert issubclass(seen[0][1], jax.core.Tracer)


def test_rows_on_the_host_are_named():
    host = HostArray(GROUP)
    with pytest.raises(InvalidModelError, match=r"`group`|HostArray"):
        make_potential(levels, (host, X, Y))
    # The other arguments have values.
    potential = make_potential(lambda group, x, y: largest_of_two(group, x, y), (host, GROUP, Y))
    assert potential.dim == GROUPS


def largest_of_two(group, levels_of, y):
    effects = vector(levels_of.max() + 1)
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(effects[group[i]], 0.5), obs=y[i])


@pytest.mark.parametrize("statement", [lambda x: int(x.max()), lambda x: x.mean(0), np.unique])
@pytest.mark.parametrize("make", [HostArray, lambda x: ShardedArray(HostArray(x))])
def test_arrays_of_rows_that_are_used_as_a_whole_are_named(statement, make):
    def model(group, x, y):
        statement(group)
        rows(vector(GROUPS), group, x, y)

    arrays = make(GROUP), make(X), make(Y)
    with pytest.raises(InvalidModelError, match=r"statement\(group\)`|Array.*whole") as caught:
        make_potential(model, arrays)
    assert caught.value.entry == "host-array-index"
    assert "before the run" in caught.value.fix


def test_other_attributes_that_do_not_exist_are_pythons_error():
    with pytest.raises(AttributeError, match="maximum"):
        make_potential(lambda group, x, y: group.maximum(), (HostArray(GROUP), X, Y))


INDEXED_TABLES = {
    "lists": ("dict", lambda table, i: np.array(table["group"])[i]),
    "column": ("data frame", lambda frame, i: frame.group.values[i]),
    "rows": ("data frame", lambda frame, i: frame.group.iloc[i].to_numpy()),
}


@pytest.mark.parametrize("name", INDEXED_TABLES)
def test_tables_that_are_no_arguments_are_an_error_that_says_how_to_index_them(name):
    kind, get_rows = INDEXED_TABLES[name]
    table = {"group": GROUP.tolist()}
    if kind == "data frame":
        table = pytest.importorskip("pandas").DataFrame(table)

    def model(y):
        effects = vector(GROUPS)
        with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(effects[get_rows(table, i)], 0.5), obs=y[i])

    with pytest.raises(InvalidModelError) as caught:
        make_potential(model, (Y,))
    assert caught.value.entry == "traced-value"
    assert "jnp.asarray(df.g.values)[i]" in caught.value.fix
    assert "as_arrays" in caught.value.fix


INVALID_MODELS = {
    "int of a latent site": lambda group, x, y: rows(vector(int(vector(1)[0])), group, x, y),
    "values of a minibatch": lambda group, x, y: minibatch_levels(group, x, y),
}


def minibatch_levels(group, x, y):
    effects = vector(GROUPS)
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        num = len(np.unique(group[i]))
        numpyro.sample("y", dist.Normal(effects[group[i]] + num, 0.5), obs=y[i])


@pytest.mark.parametrize("name", INVALID_MODELS)
def test_values_that_do_not_exist_are_named(name):
    with pytest.raises(InvalidModelError, match=r"test_numpy_values\.py") as caught:
        make_potential(INVALID_MODELS[name], DATA)
    assert caught.value.entry == "traced-value"


def test_arrays_that_remain_traced_are_named():
    model = INVALID_MODELS["int of a latent site"]
    with pytest.raises(InvalidModelError) as caught:
        make_potential(model, (GROUP, HostArray(X), Y))
    assert "`x`" in caught.value.fix
    assert "`group`" not in caught.value.fix


def test_run_and_predictions():
    matrix = np.full(GROUPS + 1, 0.5**2 * GROUPS / ROWS)
    options = {**GIVEN, "inverse_mass_matrix": matrix, "step_size": 0.3, "num_steps": 10}
    kernel = SGHMCSplit(codes, **options)
    mcmc = quietly(kernel, num_samples=200)
    mcmc.run(jax.random.key(0), *DATA)
    draws = mcmc.get_samples()
    effects = draws["effects"].mean(0)
    np.testing.assert_allclose(effects, np.arange(GROUPS), atol=0.6)
    replicated = posterior_predictive(mcmc, jax.random.key(1))["y"].mean((0, 1))
    assert np.corrcoef(replicated, Y)[0, 1] > 0.9
    predictive = Predictive(kernel.model, draws)
    assert predictive(jax.random.key(2), *DATA)["y"].shape == (200, ROWS)
    assert {bias.site for bias in bias_report(mcmc).sites} == draws.keys()
    # Other data of the same shapes: another posterior, not the constants of this one.
    mcmc.run(jax.random.key(0), GROUP[::-1].copy(), X, Y)
    assert np.abs(mcmc.get_samples()["effects"].mean(0) - effects).max() > 0.5


def test_traced_arguments_in_steps_are_an_error():
    mcmc = MCMC(
        SGHMCSplit(levels, **GIVEN),
        num_warmup=2,
        num_samples=2,
        progress_bar=False,
        jit_model_args=True,
    )
    with pytest.raises(InvalidArgumentError) as caught:
        mcmc.run(jax.random.key(0), *DATA)
    assert caught.value.entry == "numpy-arguments"


# --- Values by numpyro.handlers.condition --------------------------------------------------------


def unobserved(group, x):
    effects = vector(GROUPS)
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(effects[group[i]] + slope * x[i], 0.5))


CONDITIONED = {
    "NumPy": handlers.condition(unobserved, {"y": Y}),
    "JAX": handlers.condition(unobserved, {"y": jnp.asarray(Y)}),
    "inside of another handler": handlers.scale(
        handlers.condition(unobserved, {"y": Y}), scale=1.0
    ),
    "around another handler": handlers.condition(handlers.scale(unobserved, scale=1.0), {"y": Y}),
}


@pytest.mark.parametrize("name", CONDITIONED)
def test_conditioned_values_are_subsampled(name, expected):
    arguments = tuple(map(jnp.asarray, (GROUP, X)))
    actual = evaluate(CONDITIONED[name], arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), actual, expected)


def test_conditioned_values_of_another_length_are_named():
    model = handlers.condition(unobserved, {"y": Y[:-1]})
    with pytest.raises(InvalidModelError, match="'y'") as caught:
        make_potential(model, tuple(map(jnp.asarray, (GROUP, X))))
    assert "condition" in caught.value.fix
