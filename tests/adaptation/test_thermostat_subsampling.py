"""Kernels with a thermostat, and hierarchies, get independent minibatches if noise is large."""

from types import SimpleNamespace

import pytest
from jax import random

from numpyro_sgmcmc import SGMGT, SGNHT, SGHMCSplit
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import Candidates
from numpyro_sgmcmc.adaptation.subsampling_choice import NoiseMeasurement, choose_subsampling
from numpyro_sgmcmc.errors import SGMCMCWarning
from numpyro_sgmcmc.model.gradient_estimators import SecondOrderControlVariate
from tests.adaptation.inputs import make_inputs
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


@pytest.mark.parametrize(
    ("is_hierarchy", "variance", "subsampling"),
    [(True, 1.0, "iid"), (True, 0.1, "contiguous"), (False, 1.0, "contiguous")],
)
def test_hierarchy_with_large_noise_has_independent_minibatches(
    is_hierarchy, variance, subsampling
):
    """With those of an epoch the SD of the rows was 0.4 posterior SDs too large."""
    estimator = SecondOrderControlVariate()
    stats = {estimator: GradientNoiseStats(variance, 0.0, variance, 8, 2)}
    preconditioner = SimpleNamespace(is_block_arrow=is_hierarchy, num_products=0)
    bulk = SimpleNamespace(preconditioner=preconditioner)
    choice = choose_subsampling(
        make_inputs(survey, tuple(survey_data()), BATCH),
        Candidates((estimator,), None, True),
        bulk,
        NoiseMeasurement(stats, stats, 1.0),
    )
    assert choice.subsampling.name == subsampling
