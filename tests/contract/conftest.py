"""Runs and settings that the tests of the NumPyro contract share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import (
    BATCH,
    quietly,
    survey,
    survey_data,
)

EXTRA_FIELDS = (
    "adapt_state.step_size",
    "adapt_state.inverse_mass_matrix",
    "num_steps",
    "z.rate",
)


@pytest.fixture(scope="session")
def fit_of():
    """Return a function that returns a run of two vectorized chains of a kernel, made once."""
    fits: dict[Any, SimpleNamespace] = {}

    def fit(kernel_class: Any) -> SimpleNamespace:
        if kernel_class not in fits:
            kernel, data = kernel_class(survey), survey_data()
            mcmc = quietly(
                kernel, num_samples=600, thinning=2, num_chains=2, chain_method="vectorized"
            )
            mcmc.run(jax.random.key(1), *data, batch_size=BATCH, extra_fields=EXTRA_FIELDS)
            fits[kernel_class] = SimpleNamespace(
                kernel=kernel, mcmc=mcmc, data=data, draws=mcmc.get_samples(group_by_chain=True)
            )
        return fits[kernel_class]

    return fit


@pytest.fixture
def fit(fit_of):
    return fit_of(SGHMCSplit)


@pytest.fixture
def progress_bar(monkeypatch):
    """Let NumPyro show its progress bar under CI and pytest-xdist."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("CI", raising=False)
