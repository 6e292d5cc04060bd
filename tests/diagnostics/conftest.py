"""Two runs that many tests share: one with strong gradient noise, one by default settings."""

import pytest

from numpyro_sgmcmc import SGHMCSplit, bias_report
from tests.diagnostics.survey_runs import run_with


@pytest.fixture
def noisy():
    return run_with(SGHMCSplit, "iid minibatch gradient")


@pytest.fixture
def default():
    return run_with(SGHMCSplit, "default")


@pytest.fixture(scope="session")
def noisy_report():
    return bias_report(run_with(SGHMCSplit, "iid minibatch gradient"))


@pytest.fixture(scope="session")
def default_report():
    return bias_report(run_with(SGHMCSplit, "default"))
