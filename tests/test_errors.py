"""Errors and warnings: what they are called, what they say, and where they point."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit, errors
from numpyro_sgmcmc.data.host_array import RowIndexError

EACH_ERROR = [
    (errors.InvalidArgumentError, ValueError),
    (errors.InvalidModelError, ValueError),
    (errors.InitializationError, ValueError),
    (errors.DataReadError, RuntimeError),
    (errors.CheckpointError, RuntimeError),
    (RowIndexError, TypeError),
]


@pytest.mark.parametrize(("error_class", "builtin"), EACH_ERROR)
def test_error_is_a_builtin_error_with_problem_fix_and_entry(error_class, builtin):
    error = error_class("`x` is wrong.", "use `y`.", "sorted-data")
    assert isinstance(error, builtin)
    section = 'See "The run is slow" in the documentation (Troubleshooting).'
    assert str(error) == f"`x` is wrong. Fix: use `y`. {section}"
    assert errors.summarise_error(error) == "`x` is wrong"
    assert errors.summarise_error(pickle.loads(pickle.dumps(error))) == "`x` is wrong"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_error_that_needs_no_explanation_names_no_section():
    assert str(errors.InvalidArgumentError("`x` is wrong.", "use `y`.", "choice")) == (
        "`x` is wrong. Fix: use `y`."
    )


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError("first line.\nsecond line"), "first line"),
        (ValueError(), "ValueError"),
        (KeyError("a"), "there is no key 'a'"),
        (ValueError("x" * 1000), "x" * 200),
    ],
)
def test_summarise_error_gives_the_first_line(error, summary):
    assert errors.summarise_error(error) == summary


def test_warn_user_points_to_the_callers_line_with_its_category():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors.warn_user("All is well.", errors.DataOrderWarning, "do nothing.", "all-well")
    (warning,) = caught
    assert warning.category is errors.DataOrderWarning
    assert warning.filename == __file__
    assert str(warning.message).startswith("All is well. Fix: do nothing.")


def test_warnings_of_the_package_have_one_base():
    categories = [getattr(errors, name) for name in errors.__all__ if name.endswith("Warning")]
    categories = [c for c in categories if isinstance(c, type) and issubclass(c, Warning)]
    assert len(categories) > 10
    assert all(issubclass(c, errors.SGMCMCWarning) for c in categories)
    assert all(kind in errors._CATEGORY_OF_KIND for kind in errors.ModelWarningKind)


@pytest.mark.parametrize(
    ("keyword", "suggestion"),
    [
        ("stepsize", "'step_size'"),
        ("target_accept_prob", "`target_sd_bias`"),
        ("zzz", "use one of"),
    ],
)
def test_unknown_keyword_suggests_the_closest_option(keyword, suggestion):
    with pytest.raises(TypeError, match=rf"SGHMCSplit.*'{keyword}'.*{suggestion}"):
        SGHMCSplit(lambda: None, **{keyword: 1})


def test_import_optional_of_a_missing_module_names_the_extra():
    with pytest.raises(ImportError, match=r"plot_trace.*no_such_module.*\[examples\]"):
        errors.import_optional("no_such_module", "plot_trace", "examples")


@pytest.mark.parametrize(
    ("check", "valid", "invalid"),
    [
        (
            errors.check_positive,
            (1, 0.5, np.float32(2)),
            (0, -1.0, np.nan, np.inf, True, "1", None),
        ),
        (errors.check_nonnegative, (0, 0.5), (-1.0, np.nan, np.inf, True, "1", None)),
        (errors.check_positive_int, (1, np.int64(3)), (0, 1.0, True, "1", None)),
        (errors.check_bool, (True, np.False_), (0, 1, None, "yes")),
        (errors.check_callable, (abs,), (3, None)),
        (errors.check_rng_key, (jax.random.key(0), jax.random.PRNGKey(0)), (0, np.zeros(2))),
        (errors.check_rng_keys, (jax.random.split(jax.random.key(0)),), (0, np.zeros((2, 3)))),
    ],
)
def test_check_accepts_valid_values_and_names_others(check, valid, invalid):
    is_of_keys = check in (errors.check_rng_key, errors.check_rng_keys)
    name = "rng_key" if is_of_keys else "option"
    for value in valid:
        check(value) if is_of_keys else check(name, value)
    for value in invalid:
        with pytest.raises(errors.InvalidArgumentError, match=f"`{name}`"):
            check(value) if is_of_keys else check(name, value)


@pytest.mark.parametrize(
    ("value", "is_valid"), [(0.5, True), (2, True), (0.4, False), (2.1, False)]
)
def test_check_in_interval_includes_its_ends(value, is_valid):
    if is_valid:
        errors.check_in_interval("a", value, 0.5, 2.0)
    else:
        with pytest.raises(errors.InvalidArgumentError, match=r"`a`.*0\.5"):
            errors.check_in_interval("a", value, 0.5, 2.0)


@pytest.mark.parametrize("value", ["a", np.array([None]), np.ones(2) + 1j, [[1], [1, 2]]], ids=str)
def test_validate_real_array_of_other_values_names_them(value):
    with pytest.raises(errors.InvalidArgumentError, match="`draws`"):
        errors.validate_real_array("draws", value)
    assert errors.validate_real_array("draws", jnp.ones(2, jnp.bfloat16)).shape == (2,)
