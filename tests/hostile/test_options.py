"""Wrong options, initial values, keys and functions raise errors that name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpyro.infer import init_to_uniform, init_to_value

import numpyro_sgmcmc
from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import (
    KERNELS,
)
from tests.hostile.calls import (
    any_values,
    assert_accepted,
    assert_error_names,
    by_index,
    init_kernel,
    is_positive_integer,
    is_positive_number,
    is_zero_or_positive,
    num_examples,
    table,
)


def is_flag(x: Any) -> bool:
    return isinstance(x, (bool, np.bool_))


def is_one_of(*names: str) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, str) and x in names


def or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or test(x)


SHARED: dict[str, Callable[[Any], bool]] = {
    "step_size": or_none(lambda x: callable(x) or is_positive_number(x)),
    "num_steps": or_none(is_positive_integer),
    "adapt_step_size": is_flag,
    "shrink_step_size_on_divergence": is_flag,
    "adapt_mass_matrix": is_flag,
    "noise_compensation": is_flag,
    "init_in_modes": is_flag,
    "gradient_estimator": is_one_of(
        "auto", "minibatch", "control_variate", "second_order_control_variate"
    ),
    "subsampling": is_one_of("auto", "contiguous", "shuffled", "palindrome", "iid"),
    "max_grad_norm": or_none(is_positive_number),
    "target_sd_bias": lambda x: is_positive_number(x) and float(x) < 1,
    "init_strategy": callable,
    "friction": is_positive_number,
    "per_coordinate": is_flag,
    "num_leapfrog": lambda x: is_positive_integer(x) and x == 1,  # for another integrator
    "momentum_period": or_none(is_positive_integer),
    "thermostat_period": or_none(is_positive_integer),
    "a": lambda x: is_positive_number(x) and 0.5 <= float(x) <= 2,
    "m": is_positive_number,
    "c": is_positive_number,
    "sigma_p": is_positive_number,
    "sigma_theta": is_zero_or_positive,
    "sigma_xi": is_zero_or_positive,
    "gamma": is_positive_number,
    "inverse_metric": lambda x: callable(x) or (isinstance(x, str) and x == "potential"),
}


def options_of(kernel: Any) -> list[str]:
    own = set(inspect.signature(kernel).parameters)
    shared = set(inspect.signature(SGHMCSplit).parameters) - {"friction"}
    if kernel not in vars(numpyro_sgmcmc).values():  # a subclass of the tests'
        own.discard("friction")
    return sorted((own | shared) & {*SHARED, "integrator"})


@num_examples(90)
@given(data=st.data(), kernel=st.sampled_from(KERNELS))
def test_option_with_any_value_is_accepted_or_named(data, kernel):
    option = data.draw(st.sampled_from(options_of(kernel)))
    value = data.draw(any_values())
    is_valid = SHARED.get(option, is_one_of(*kernel.integrators))(value)
    if is_valid:
        kernel(by_index, **{option: value})
    else:
        assert_error_names(lambda: kernel(by_index, **{option: value}), f"`{option}`")


@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [
        ("gradient_estimator", "full", ("'minibatch'", "'control_variate'")),
        ("subsampling", "all", ("'contiguous'", "'shuffled'", "'palindrome'", "'iid'")),
        ("integrator", "leapfrog", ("'symmetric'",)),
    ],
)
def test_option_with_an_unknown_value_lists_the_choices(option, value, choices):
    assert_error_names(
        lambda: SGHMCSplit(by_index, **{option: value}), f"`{option}`", repr(value), *choices
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_option_with_an_array_of_strings_is_named(kernel):
    """Comparisons with such an array give arrays, or the truth value of its only entry."""
    for option in options_of(kernel):
        for words in (["auto", "plain"], "auto", "potential", *kernel.integrators):
            value = np.array(words)
            assert_error_names(lambda o=option, v=value: kernel(by_index, **{o: v}), f"`{option}`")


@num_examples(45)
@given(
    data=st.data(),
    kernel=st.sampled_from(KERNELS),
    name=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12),
)
def test_kernel_with_a_misspelt_option_names_it(data, kernel, name):
    options = set(inspect.signature(kernel).parameters) | set(SHARED)
    if data.draw(st.booleans()):  # an option without one of its letters
        right = data.draw(st.sampled_from(sorted(options)))
        k = data.draw(st.integers(0, len(right) - 1))
        name = right[:k] + right[k + 1 :]
    options |= {
        "integrator",
        "dense_mass",
        "inverse_mass_matrix",
        "options",
        "self",
    }  # Python's own: self
    if name and name not in options:
        assert_error_names(lambda: kernel(by_index, **{name: 1}), f"'{name}'")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wrong", [3, "model", SGHMCSplit(by_index), [by_index], np.ones(3)])
def test_kernel_with_something_else_than_a_model_names_the_argument(kernel, wrong):
    assert_error_names(lambda: kernel(wrong), "`model`")
    assert_error_names(lambda: kernel(potential_fn=wrong), "`potential_fn`")
    assert_error_names(lambda: kernel(by_index, by_index), "`model`", "`potential_fn`")
    assert_error_names(kernel, "`model`", "`potential_fn`")


BAD_SCHEDULES: dict[str, Callable] = {
    "array": lambda i: jnp.full(1, 0.1),
    "arrays": lambda i: jnp.full(2, 0.1),
    "complex": lambda i: 0.1 + 0j,
    "text": lambda i: "0.1",
    "none": lambda i: None,
    "no argument": lambda: 0.1,
    "two arguments": lambda i, j: 0.1,
    "list": [0.1, 0.2].__getitem__,
    "if": lambda i: 0.1 if i < 3 else 0.2,
    "nan": lambda i: jnp.nan,
    "infinite": lambda i: jnp.inf,
    "negative": lambda i: -0.1,
    "zero": lambda i: 0.0,
    "raises": lambda i: 1 / 0,
    "float": float,
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", BAD_SCHEDULES)
def test_schedule_with_wrong_values_is_named(name):
    options = {"step_size": BAD_SCHEDULES[name]}
    assert_error_names(
        lambda: init_kernel(by_index, *table(6), batch_size=2, options=options), "`step_size"
    )


def is_matrix(x: Any, dim: int) -> bool:
    """Return whether an array is an inverse mass matrix or its diagonal."""
    if not (isinstance(x, np.ndarray) and x.dtype.kind in "iuf" and np.isfinite(x).all()):
        return False
    if x.shape == (dim,):
        return bool((x > 0).all())
    return (
        x.shape == (dim, dim) and np.array_equal(x, x.T) and bool(np.linalg.eigvalsh(x).min() > 0)
    )


@st.composite
def matrices(draw: Any) -> Any:
    """Return matrices, mostly of the right shape, with valid or invalid values."""
    shape = draw(st.sampled_from([(2,), (2, 2), (3,), (3, 3), (2, 3), (), (1, 2, 2)]))
    entry = st.one_of(st.integers(-2, 4), st.sampled_from([np.nan, np.inf, 0.5]))
    x = np.array([draw(entry) for _ in range(int(np.prod(shape)))], float).reshape(shape)
    if len(shape) == 2 and shape[0] == shape[1] and draw(st.booleans()):
        x = x + x.T + draw(st.sampled_from([0, 9])) * np.eye(shape[0])
    return x.astype(draw(st.sampled_from(["f8", "f4", "c8", "O", "U3"]))) if shape else x


@pytest.mark.usefixtures("no_warm_up")
@num_examples(10)
@given(matrix=matrices(), is_block=st.booleans())
def test_inverse_mass_matrix_with_any_values_is_accepted_or_named(matrix, is_block):
    value = {("beta",): matrix} if is_block else matrix
    options = {"inverse_mass_matrix": value}
    call = lambda: init_kernel(by_index, *table(6), batch_size=2, options=options)  # noqa: E731
    if is_matrix(matrix, 2):
        assert_accepted(call)
    else:
        assert_error_names(call, "`inverse_mass_matrix`")


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("inverse_mass_matrix", x) for x in ("a", 1.0, [[1], [1, 2]], {3: np.ones(2)})),
        ("inverse_mass_matrix", {("beta", "z"): np.ones(3)}),
        ("inverse_mass_matrix", {("beta",): np.ones(2), "beta": np.ones(2)}),
        ("inverse_mass_matrix", {(): np.ones(0)}),
        *(("dense_mass", x) for x in ("beta", 1, 0, "", ("beta",), {"beta"}, np.ones(2))),
        *(("dense_mass", x) for x in ([1], [()], [[]], [None], [("z",)], [("beta", 3)])),
        ("init_strategy", lambda: 3),
        ("init_strategy", lambda site: 3),
        ("init_strategy", init_to_value(values={"beta": np.ones(3)})),
        ("init_strategy", init_to_value(values={"beta": 1.0})),
        ("init_strategy", init_to_value(values={"beta": "a"})),
    ],
)
def test_option_that_does_not_fit_the_model_is_named(option, value):
    options = {option: value}
    assert_error_names(
        lambda: init_kernel(by_index, *table(6), batch_size=2, options=options), f"`{option}`"
    )


@pytest.mark.usefixtures("no_warm_up")
@num_examples(10)
@given(
    shape=st.sampled_from([(2,), (2,), (2,), (), (1,), (3,), (2, 1), (1, 2)]),
    dtype=st.sampled_from(["f4", "f8", "f2", "i4", "?", "c8"]),
    entry=st.sampled_from([0.0, 1.0, np.nan, np.inf]),
    site=st.sampled_from(["beta", "beta", "alpha", ""]),
    others=st.sampled_from([{}, {}, {"y": np.zeros(6)}, {"z": np.zeros(2)}]),
    num_chains=st.sampled_from([None, None, 2, 3]),
)
@example((2,), "c8", 1.0, "beta", {}, None)
def test_init_params_with_any_values_are_accepted_or_named(
    shape, dtype, entry, site, others, num_chains
):
    key = jax.random.key(0)
    if num_chains is not None:
        key, shape = jax.random.split(key, num_chains), (num_chains, *shape)
    if not np.isfinite(entry) and dtype in ("i4", "?"):
        dtype = "f4"
    init_params = {site: np.full(shape, entry).astype(dtype), **others}
    call = lambda: init_kernel(  # noqa: E731
        by_index, *table(6), batch_size=2, init_params=init_params, rng_key=key
    )
    expected = (2,) if num_chains is None else (num_chains, 2)
    is_right = site == "beta" and not others and shape == expected and np.isfinite(entry)
    if is_right and dtype != "c8":
        assert_accepted(call)
    else:
        assert_error_names(call, "`init_params`")


@pytest.mark.parametrize("wrong", [np.zeros(2), (0.0, 0.0), 3.0, "beta"])
def test_init_params_of_another_type_are_named(no_warm_up, wrong):
    assert_error_names(
        lambda: init_kernel(by_index, *table(6), batch_size=2, init_params=wrong), "`init_params`"
    )


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    "rng_key",
    [
        0,
        "key",
        [0, 1],
        None.__class__,
        np.float32(1),
        np.zeros(2, np.int32),
        np.zeros(3, np.uint32),
        np.zeros((2, 2, 2), np.uint32),
        np.zeros((), np.uint32),
        jax.random.split(jax.random.key(0), (2, 2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_rng_key_of_another_type_is_named(rng_key):
    assert_error_names(
        lambda: init_kernel(by_index, *table(6), batch_size=2, rng_key=rng_key), "`rng_key`"
    )


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    "rng_key",
    [
        jax.random.key(0, impl="rbg"),
        jax.random.PRNGKey(0),
        np.zeros(2, np.uint32),
        jax.random.split(jax.random.key(0), 3),
        jax.random.split(jax.random.PRNGKey(0), 3),
    ],
)
def test_rng_key_of_every_kind_is_accepted(rng_key):
    assert_accepted(lambda: init_kernel(by_index, *table(6), batch_size=2, rng_key=rng_key))


BAD_POTENTIALS: dict[str, tuple[Callable, Any, str]] = {
    "vector": (lambda z: z**2, np.zeros(2), "`potential_fn`"),
    "one entry": (lambda z: jnp.sum(z**2, keepdims=True), np.zeros(2), "`potential_fn`"),
    "complex": (lambda z: z.sum() + 0j, np.zeros(2), "`potential_fn`"),
    "integer": (lambda z: 3, np.zeros(2), "`potential_fn`"),
    "none": (lambda z: None, np.zeros(2), "`potential_fn`"),
    "text": (lambda z: "a", np.zeros(2), "`potential_fn`"),
    "dict": (lambda z: {"u": z.sum()}, np.zeros(2), "`potential_fn`"),
    "no argument": (lambda: 3.0, np.zeros(2), "`potential_fn`"),
    "if": (lambda z: z.sum() if z[0] > 0 else -z.sum(), np.zeros(2), "`potential_fn`"),
    "other sites": (lambda z: z["a"], {"b": 0.0}, "`potential_fn`"),
    "nan": (lambda z: jnp.nan * z.sum(), np.zeros(2), "`init_params`"),
    "no start": (lambda z: z.sum(), None, "`init_params`"),
    "no values": (lambda z: 0.0, {}, "`init_params`"),
    "empty": (lambda z: z.sum(), np.zeros(0), "`init_params`"),
    "complex start": (lambda z: jnp.abs(z).sum(), np.zeros(2) + 1j, "`init_params`"),
}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("name", BAD_POTENTIALS)
def test_potential_fn_with_a_wrong_value_is_named(name):
    potential, init_params, word = BAD_POTENTIALS[name]
    kernel = SGHMCSplit(potential_fn=potential)
    assert_error_names(lambda: kernel.init(jax.random.key(0), 10, init_params, (), {}), word)


def recipe(**functions: Any) -> Any:
    functions = {
        "diffusion": lambda z: jnp.ones(z.size),
        "curl": lambda z: jnp.zeros((z.size, z.size)),
        "hamiltonian": lambda z: 0.0,
        **functions,
    }
    return numpyro_sgmcmc.RecipeKernel(by_index, **functions)


def check_dynamics(kernel: Any) -> None:
    """Run the checks of user functions, without the warm-up."""
    arguments = Arguments(table(6), {"batch_size": 2})
    potential = make_model_potential(by_index, arguments, init_to_uniform)
    preconditioner = Preconditioner(jnp.zeros(2), jnp.ones(2))
    kernel._check_user_functions(potential)
    kernel._check_inverse_metric_fn(kernel._bind_dynamics(potential, preconditioner), potential)


BAD_FUNCTIONS: dict[str, Callable] = {
    "no argument": lambda: 1.0,
    "shapes": lambda z: jnp.ones(7) + jnp.ones(5),
    "none": lambda z: None,
    "text": lambda z: "a",
    "nan": lambda z: jnp.full(2, jnp.nan),
    "shape": lambda z: jnp.ones((2, 3)),
    "raises": lambda z: 1 / 0,
    "if": lambda z: 1.0 if jax.tree.leaves(z)[0].sum() > 1e9 else None,
}


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
@pytest.mark.parametrize("option", ["diffusion", "curl", "hamiltonian"])
def test_recipe_with_a_wrong_function_names_it(option, name):
    assert_error_names(
        lambda: check_dynamics(recipe(**{option: BAD_FUNCTIONS[name]})), f"`{option}`"
    )


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
@pytest.mark.parametrize("kernel", ["SGRHMC", "SGRLD"])
def test_kernel_with_a_wrong_metric_names_it(kernel, name):
    made = getattr(numpyro_sgmcmc, kernel)(by_index, inverse_metric=BAD_FUNCTIONS[name])
    assert_error_names(lambda: check_dynamics(made), "`inverse_metric`")


@pytest.mark.parametrize("wrong", [*BAD_FUNCTIONS.values(), lambda key, dim: jnp.ones((2, 2))])
def test_recipe_with_wrong_auxiliary_variables_names_them(wrong):
    assert_error_names(lambda: check_dynamics(recipe(auxiliary=wrong)), "`auxiliary`")
