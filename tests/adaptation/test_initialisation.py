"""What the warm-up checks and compiles first: stages with given inputs, without a run."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from numpyro_sgmcmc.adaptation import warmup
from numpyro_sgmcmc.adaptation.initialisation import check_finite_gradient
from numpyro_sgmcmc.adaptation.settings import Candidates
from numpyro_sgmcmc.errors import InitializationError
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS
from numpyro_sgmcmc.model.preconditioner import Preconditioner


@pytest.mark.parametrize("gradient", [[0.0, 1.0], [0.0, np.nan]])
def test_check_finite_gradient_names_the_cause(gradient):
    potential = SimpleNamespace(diagnose_nonfinite=lambda *_: (": site 'y'", "drop its rows."))
    inputs = SimpleNamespace(cast=np.float32, potential=potential, arguments=None)
    preconditioner = Preconditioner(np.zeros(2), np.ones(2), np.array(gradient))
    if np.isfinite(gradient).all():
        check_finite_gradient(inputs, preconditioner)
        return
    with pytest.raises(InitializationError, match=r"gradient is not finite.*: site 'y'") as caught:
        check_finite_gradient(inputs, preconditioner)
    assert caught.value.fix == "drop its rows."


@pytest.mark.parametrize("name", GRADIENT_ESTIMATORS)
def test_start_compilation_of_the_hessian_for_estimators_that_need_it(name, monkeypatch):
    monkeypatch.setattr(warmup, "precompile_pilot", Mock())
    monkeypatch.setattr(warmup, "precompile_influential_rows", Mock())
    estimator, inputs = GRADIENT_ESTIMATORS[name], Mock()
    inputs.settings.estimator = estimator
    warmup._start_compilation(inputs, Candidates((estimator,), None, False))
    assert inputs.batched_gradients.precompile_hessian.called == estimator.needs_hessian


@pytest.mark.parametrize(("has_init_params", "sizes"), [(True, [(1,)]), (False, [(4,), (2, 50)])])
def test_start_compilation_of_the_mean_field_fits(has_init_params, sizes, monkeypatch):
    fit, inputs = Mock(), Mock()
    monkeypatch.setattr(warmup, "precompile_mean_field", fit)
    inputs.settings.has_init_params = has_init_params
    inputs.budget.num_whole_batch_inits, inputs.budget.num_prior_inits = 4, 2
    inputs.budget.prior_fit_batch_size = 50
    warmup._start_mean_field_compilation(inputs)
    assert [call.args for call in fit.call_args_list] == [(inputs, *size) for size in sizes]
