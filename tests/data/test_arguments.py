"""A model's arguments as a pytree: arrays are leaves, everything else is structure."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.data import arguments as arguments_module
from numpyro_sgmcmc.data.arguments import Arguments, DeviceArrayCache, as_jax_arrays, is_array

X, y = np.ones((4, 2), np.float32), np.arange(4)


def same(a, b):
    (first, one), (second, two) = jax.tree.flatten(a), jax.tree.flatten(b)
    return one == two and all(np.array_equal(x, z) for x, z in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.ones(3), True),
        (np.ones(3, bool), True),
        (np.ones(3, np.complex64), True),
        (np.array(["a"]), False),
        (np.array([None, 1], object), False),
        (np.array("2020-01-01", "datetime64[D]"), False),
        (np.float64(1), False),
        (1.0, False),
        ([1.0], False),
        (None, False),
    ],
    ids=repr,
)
def test_is_array(value, expected):
    assert is_array(value) is expected


def test_jax_arrays_are_arrays():
    assert is_array(jnp.ones(3))
    assert is_array(np.ones(3, jnp.bfloat16))
    assert is_array(jax.random.key(0))


def test_leaves_are_the_arrays():
    arguments = Arguments((X, 3, "a", None), {"data": {"y": y, "flag": True}, "names": ["a", X]})
    assert [id(x) for x in jax.tree.leaves(arguments)] == [id(x) for x in (X, y, X)]
    assert [id(x) for x in arguments.arrays] == [id(x) for x in (X, y, X)]


def test_round_trip():
    model = object()
    before = Arguments(
        (X, 3, None, (y, {"k": 2.5})), {"f": model, "unhashable": {1, 2}, "b": False}
    )
    leaves, structure = jax.tree.flatten(before)
    after = jax.tree.unflatten(structure, leaves)
    assert after.args[0] is X
    assert after.args[1:3] == (3, None)
    assert after.args[3][0] is y
    assert after.args[3][1] == {"k": 2.5}
    assert after.kwargs == before.kwargs
    assert after.kwargs["f"] is model
    assert after.kwargs["b"] is False


def test_empty():
    assert jax.tree.leaves(Arguments()) == []
    assert Arguments().args == ()
    assert Arguments((), None).kwargs == {}


def test_own_copy_of_the_keywords():
    kwargs = {"y": y}
    arguments = Arguments((), kwargs)
    kwargs["y"] = X
    assert arguments.kwargs["y"] is y


def test_static_values_decide_what_is_compiled():
    traces = []

    @jax.jit
    def total(arguments):
        traces.append(1)
        return arguments.args[0].sum() * arguments.kwargs["batch_size"]

    for batch_size in (2, 2, 3):
        for data in (X, 2 * X):
            found = total(Arguments((data,), {"batch_size": batch_size}))
            assert float(found) == data.sum() * batch_size
    assert len(traces) == 2
    total(Arguments((np.ones((5, 2), np.float32),), {"batch_size": 3}))
    assert len(traces) == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, True), (1, 1.0), (0, False), ("a", "b"), (None, 0), ((1,), [1])],
    ids=repr,
)
def test_different_static_values_differ(first, second):
    assert not same(Arguments((X, first)), Arguments((X, second)))
    assert Arguments((X, first)).signature != Arguments((X, second)).signature


def test_unhashable_values_are_told_apart_by_identity():
    names, others = np.array(["a", "b"]), np.array(["a", "b"])
    assert same(Arguments((X, names)), Arguments((X, names)))
    assert not same(Arguments((X, names)), Arguments((X, others)))
    hash(Arguments((X, names)).signature)


def test_signature():
    signature = Arguments((X, 3), {"y": y}).signature
    assert Arguments((2 * X, 3), {"y": y + 1}).signature == signature
    assert Arguments((jnp.asarray(X), 3), {"y": jnp.asarray(y)}).signature == signature
    for other in (
        Arguments((X[:3], 3), {"y": y}),
        Arguments((X.astype(int), 3), {"y": y}),
        Arguments((X, 4), {"y": y}),
        Arguments((X, 3), {"z": y}),
        Arguments((X, 3, y)),
    ):
        assert other.signature != signature
    assert hash(signature) == hash(Arguments((X, 3), {"y": y}).signature)


def test_is_concrete():
    arguments = Arguments((X, 3), {"y": y})
    assert arguments.is_concrete
    seen = []
    jax.jit(lambda a: seen.append(a.is_concrete))(arguments)
    jax.vmap(lambda x: seen.append(Arguments((x,), {"y": y}).is_concrete) or x)(X)
    assert seen == [False, False]


def test_map_arrays():
    arguments = Arguments((X, 3, "a"), {"data": [y, None]})
    doubled = arguments.map_arrays(lambda x: 2 * x)
    assert same(doubled, Arguments((2 * X, 3, "a"), {"data": [2 * y, None]}))
    np.testing.assert_array_equal(arguments.args[0], X)


def test_as_jax_arrays():
    words = np.array(["a"])
    args, kwargs = as_jax_arrays(((X, 3, words), {"y": y}))
    assert isinstance(args[0], jax.Array)
    assert isinstance(kwargs["y"], jax.Array)
    assert args[1] == 3
    assert args[2] is words


class Table:
    def __call__(self, X, data, y=None):
        pass


def model(X, data, y=None):
    pass


@pytest.mark.parametrize("fn", [model, Table(), partial(model)], ids=["def", "object", "partial"])
def test_named_arrays(fn):
    arguments = Arguments((X, {"a": X, "b": [y, 3]}), {"y": y})
    assert [name for name, _ in arguments.named_arrays(fn)] == [
        "`X`",
        "`data['a']`",
        "`data['b'][0]`",
        "`y`",
    ]
    assert [id(x) for _, x in arguments.named_arrays(fn)] == [id(x) for x in arguments.arrays]


def test_names_where_the_signature_has_none():
    arguments = Arguments((X, y), {"z": y})
    assert [n for n, _ in arguments.named_arrays(lambda *args, z: None)][-1] == "`z`"
    assert len(arguments.named_arrays(lambda *args, **kwargs: None)) == 3
    assert [n for n, _ in arguments.named_arrays(3)] == ["`argument 0`", "`argument 1`", "`z`"]


def test_arguments_pass_through_transformations():
    arguments = Arguments((jnp.asarray(X), 2), {"y": jnp.asarray(y)})

    def total(a):
        return a.args[0].sum() * a.args[1]

    gradient = jax.grad(total, allow_int=True)(arguments)
    np.testing.assert_array_equal(gradient.args[0], np.full_like(X, 2))
    doubled = jax.tree.map(lambda x: 2 * x, arguments)
    assert float(total(doubled)) == 2 * float(total(arguments))
    shapes = jax.eval_shape(lambda a: a, arguments)
    assert shapes.args[0].shape == X.shape
    assert shapes.args[1] == 2


def held(*arrays):
    """Which of these are held in references."""
    return [
        isinstance(x, jax.Ref)
        for x in DeviceArrayCache().cache_arrays(Arguments(arrays, None)).args
    ]


def test_only_arrays_that_are_large_together_are_held(monkeypatch):
    monkeypatch.setattr(arguments_module, "_MIN_TOTAL_CACHE_BYTES", 2_000)
    monkeypatch.setattr(arguments_module, "_MIN_CACHED_ARRAY_BYTES", 500)
    large, small = np.ones(300, np.float32), np.ones(100, np.float32)
    assert held(large) == [False]
    assert held(large, small, large) == [True, False, True]
    assert held(*[small] * 6) == [False] * 6


def test_a_held_array_is_one_reference_with_its_values(monkeypatch):
    monkeypatch.setattr(arguments_module, "_MIN_TOTAL_CACHE_BYTES", 0)
    monkeypatch.setattr(arguments_module, "_MIN_CACHED_ARRAY_BYTES", 0)
    keeper = DeviceArrayCache()
    first, second = (keeper.cache_arrays(Arguments((X, y), {"z": X})) for _ in range(2))
    assert first.args[0] is second.args[0] is first.kwargs["z"]
    np.testing.assert_array_equal(jax.jit(lambda: first.dereference().args[0])(), X)
