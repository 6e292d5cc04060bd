"""Kernels with a thermostat get independent minibatches where the gradient noise matters."""

import pytest
from jax import random

from numpyro_sgmcmc import SGMGT, SGNHT, SGHMCSplit
from numpyro_sgmcmc.errors import SGMCMCWarning
from tests.contract.kernels import BATCH, survey, survey_data
from tests.quick import quick_if


def init(kernel):
    kernel.init(random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})
    return kernel.adaptation


@pytest.mark.parametrize(
    ("kernel_class", "options", "subsampling"),
    [
        quick_if(False, SGHMCSplit, {}, "contiguous"),
        quick_if(True, SGHMCSplit, {"gradient_estimator": "minibatch"}, "contiguous"),
        quick_if(False, SGNHT, {}, "contiguous"),
        quick_if(True, SGNHT, {"gradient_estimator": "minibatch"}, "iid"),
        quick_if(
            False, SGMGT, {"gradient_estimator": "minibatch", "step_size": 1e-3}, "contiguous"
        ),
        quick_if(False, SGMGT, {"gradient_estimator": "minibatch", "step_size": 0.1}, "iid"),
    ],
)
def test_subsampling_choice_active_thermostat_is_iid(kernel_class, options, subsampling):
    """Noise that cancels over an epoch would make the thermostat shrink the posterior."""
    assert init(kernel_class(survey, **options)).subsampling.name == subsampling


def test_thermostat_shuffled_minibatches_warns():
    kernel = SGNHT(survey, gradient_estimator="minibatch", subsampling="shuffled")
    with pytest.warns(SGMCMCWarning, match="thermostat"):
        init(kernel)
