"""Two runs that many tests look at: one that is wrong, one that is right."""

import pytest

from numpyro_sgmcmc import SGHMCSplit
from tests.diagnostics.survey_runs import run_with


@pytest.fixture
def noisy():
    return run_with(SGHMCSplit, "plain, independent rows")


@pytest.fixture
def good():
    return run_with(SGHMCSplit, "default")
