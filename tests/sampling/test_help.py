"""A kernel prints as the call that makes it."""

import inspect

import numpy as np
import pytest

import numpyro_sgmcmc
from numpyro_sgmcmc import SGHMCSplit
from tests.sampling.test_options import KERNELS, made


def model():
    pass


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_every_number_shows(kernel):
    shown = []
    for name, parameter in inspect.signature(kernel).parameters.items():
        if type(parameter.default) is float:
            value = 1.25 * parameter.default or 0.25
            text = repr(made(kernel, **{name: value}))
            assert f"{name}={value}" in text
            shown.append(name)
    assert "target_sd_bias" in shown


def test_defaults_are_left_out():
    assert repr(SGHMCSplit(model)) == "SGHMCSplit(model)"
    kernel = SGHMCSplit(
        model, friction=2.0, gradient_estimator="minibatch", inverse_mass_matrix=np.eye(9)
    )
    text = (
        "SGHMCSplit(model, friction=2.0, inverse_mass_matrix=..., gradient_estimator='minibatch')"
    )
    assert repr(kernel) == text
    assert eval(repr(SGHMCSplit(model, num_steps=3)), {**vars(numpyro_sgmcmc), "model": model})


def test_html_is_escaped():
    shown = SGHMCSplit(potential_fn=lambda q: q)._repr_html_()
    assert shown == "<code>SGHMCSplit(potential_fn=&lt;lambda&gt;)</code>"
