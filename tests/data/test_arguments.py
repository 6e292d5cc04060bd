"""Model arguments as a pytree: arrays are leaves, everything else is structure."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.data.arguments import Arguments, DeviceArrayCache, as_jax_arrays, is_array

X, y = np.ones((4, 2), np.float32), np.arange(4)


def are_same(a, b):
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
def test_is_array_of_numpy_values(value, expected):
    assert is_array(value) is expected


def test_is_array_of_jax_types_is_true():
    assert is_array(jnp.ones(3))
    assert is_array(np.ones(3, jnp.bfloat16))
    assert is_array(jax.random.key(0))


def test_arguments_leaves_are_the_arrays():
    arguments = Arguments((X, 3, "a", None), {"data": {"y": y, "flag": True}, "names": ["a", X]})
    assert [id(x) for x in jax.tree.leaves(arguments)] == [id(x) for x in (X, y, X)]
    assert [id(x) for x in arguments.arrays] == [id(x) for x in (X, y, X)]


def test_arguments_after_a_round_trip_are_the_same():
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


def test_arguments_without_values_are_empty():
    assert jax.tree.leaves(Arguments()) == []
    assert Arguments().args == ()
    assert Arguments((), None).kwargs == {}


def test_arguments_copy_the_keywords():
    kwargs = {"y": y}
    arguments = Arguments((), kwargs)
    kwargs["y"] = X
    assert arguments.kwargs["y"] is y


def test_arguments_with_another_static_value_are_compiled_again():
    traces = []

    @jax.jit
    def total(arguments):
        traces.append(1)
        return arguments.args[0].sum() * arguments.kwargs["batch_size"]

    for batch_size in (2, 2, 3):
        for data in (X, 2 * X):
            result = total(Arguments((data,), {"batch_size": batch_size}))
            assert float(result) == data.sum() * batch_size
    assert len(traces) == 2
    total(Arguments((np.ones((5, 2), np.float32),), {"batch_size": 3}))
    assert len(traces) == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, True), (1, 1.0), (0, False), ("a", "b"), (None, 0), ((1,), [1])],
    ids=repr,
)
def test_arguments_with_different_static_values_differ(first, second):
    assert not are_same(Arguments((X, first)), Arguments((X, second)))
    assert Arguments((X, first)).signature != Arguments((X, second)).signature


def test_arguments_with_unhashable_values_compare_by_identity():
    names, others = np.array(["a", "b"]), np.array(["a", "b"])
    assert are_same(Arguments((X, names)), Arguments((X, names)))
    assert not are_same(Arguments((X, names)), Arguments((X, others)))
    hash(Arguments((X, names)).signature)


def test_signature_depends_on_structure_shapes_and_types():
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


def test_is_concrete_of_traced_arrays_is_false():
    arguments = Arguments((X, 3), {"y": y})
    assert arguments.is_concrete
    seen = []
    jax.jit(lambda a: seen.append(a.is_concrete))(arguments)
    jax.vmap(lambda x: seen.append(Arguments((x,), {"y": y}).is_concrete) or x)(X)
    assert seen == [False, False]


def test_map_arrays_leaves_other_values():
    arguments = Arguments((X, 3, "a"), {"data": [y, None]})
    doubled = arguments.map_arrays(lambda x: 2 * x)
    assert are_same(doubled, Arguments((2 * X, 3, "a"), {"data": [2 * y, None]}))
    np.testing.assert_array_equal(arguments.args[0], X)


def test_as_jax_arrays_converts_numbers_only():
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
def test_named_arrays_of_any_callable_have_its_names(fn):
    arguments = Arguments((X, {"a": X, "b": [y, 3]}), {"y": y})
    assert [name for name, _ in arguments.named_arrays(fn)] == [
        "`X`",
        "`data['a']`",
        "`data['b'][0]`",
        "`y`",
    ]
    assert [id(x) for _, x in arguments.named_arrays(fn)] == [id(x) for x in arguments.arrays]


def test_named_arrays_without_a_signature_are_numbered():
    arguments = Arguments((X, y), {"z": y})
    for model in (lambda *args, z: None, lambda *args, **kwargs: None, 3):
        names = [name for name, _ in arguments.named_arrays(model)]
        assert names == ["`argument 0`", "`argument 1`", "`z`"]


def test_arguments_under_transformations_keep_their_structure():
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


def are_in_references(*arrays):
    cached = DeviceArrayCache().cache_arrays(Arguments(arrays), 2_000, 500)
    return [isinstance(x, jax.Ref) for x in cached.args]


def test_device_array_cache_holds_arrays_that_are_large_together():
    large, small = np.ones(300, np.float32), np.ones(100, np.float32)
    assert are_in_references(large) == [False]
    assert are_in_references(large, small, large) == [True, False, True]
    assert are_in_references(*[small] * 6) == [False] * 6


def test_device_array_cache_holds_each_array_once_with_its_values():
    cache = DeviceArrayCache()
    first, second = (cache.cache_arrays(Arguments((X, y), {"z": X}), 0, 0) for _ in range(2))
    assert first.args[0] is second.args[0] is first.kwargs["z"]
    np.testing.assert_array_equal(jax.jit(lambda: first.dereference().args[0])(), X)


def test_device_array_cache_releases_other_arrays():
    cache = DeviceArrayCache()
    first = cache.cache_arrays(Arguments((X, y)), 0, 0)
    cache.keep_only(Arguments((X,)))
    second = cache.cache_arrays(Arguments((X, y)), 0, 0)
    assert first.args[0] is second.args[0]
    assert first.args[1] is not second.args[1]
