"""A kernel prints as the call that makes it."""

import inspect

import numpy as np
import pytest

import numpyro_sgmcmc
from numpyro_sgmcmc import SGHMCSplit
from tests.sampling.test_options import KERNELS, RECIPE_FUNCTIONS, make_kernel


def model():
    pass


def auxiliary(rng_key, dim):
    return np.zeros(dim)


def evaluate(text):
    return eval(text, {**vars(numpyro_sgmcmc), "model": model, "abs": abs, "auxiliary": auxiliary})


@pytest.mark.parametrize("kernel_class", KERNELS, ids=lambda k: k.__name__)
def test_repr_with_changed_number_shows_it(kernel_class):
    shown = []
    for name, parameter in inspect.signature(kernel_class).parameters.items():
        if type(parameter.default) is float:
            value = 1.25 * parameter.default or 0.25
            assert f"{name}={value}" in repr(make_kernel(kernel_class, **{name: value}))
            shown.append(name)
    assert "target_sd_bias" in shown


@pytest.mark.parametrize("kernel_class", KERNELS, ids=lambda k: k.__name__)
def test_repr_with_default_arguments_shows_the_model_alone(kernel_class):
    required = RECIPE_FUNCTIONS if kernel_class is numpyro_sgmcmc.RecipeKernel else {}
    shown = ", ".join(["model", *(f"{name}=abs" for name in required)])
    text = repr(kernel_class(model, **required))
    assert text == f"{kernel_class.__name__}({shown})"
    assert type(evaluate(text)) is kernel_class


@pytest.mark.parametrize(
    ("kernel_name", "settings"),
    [
        ("SHMC", {"integrator": "lie_trotter", "num_leapfrog": 5}),
        ("SHMC", {"integrator": "baoab", "friction": 2.0}),
        ("RecipeKernel", {**RECIPE_FUNCTIONS, "auxiliary": auxiliary}),
        ("SGMGT", {"a": 2.0, "momentum_period": None}),
        ("SGRHMC", {"inverse_metric": abs, "momentum_period": 3}),
        ("SGHMCSplit", {"num_steps": 3}),
    ],
)
def test_repr_evaluates_to_a_kernel_of_the_same_settings(kernel_name, settings):
    kernel = getattr(numpyro_sgmcmc, kernel_name)(model, **settings)
    for name, value in settings.items():
        assert f"{name}={getattr(value, '__name__', repr(value))}" in repr(kernel)
    assert evaluate(repr(kernel)).settings == kernel.settings


def test_repr_with_array_abbreviates_it():
    kernel = SGHMCSplit(
        model, friction=2.0, gradient_estimator="minibatch", inverse_mass_matrix=np.eye(9)
    )
    assert repr(kernel) == (
        "SGHMCSplit(model, friction=2.0, inverse_mass_matrix=..., gradient_estimator='minibatch')"
    )


def test_repr_html_escapes_names():
    shown = SGHMCSplit(potential_fn=lambda q: q)._repr_html_()
    assert shown == "<code>SGHMCSplit(potential_fn=&lt;lambda&gt;)</code>"
