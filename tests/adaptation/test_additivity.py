"""The log likelihood has to be additive over observations."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.model_checks import find_nonadditive_plates
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import ModelWarningKind, NonAdditiveLikelihoodWarning
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import quietly
from tests.quick import quick_if

N = 500
RNG = np.random.default_rng(0)
X = RNG.gamma(1.0, 1.0, N).astype(np.float32)
Y = (1.0 + 0.8 * X + 0.5 * RNG.standard_normal(N)).astype(np.float32)
each_batch_size = pytest.mark.parametrize("batch_size", [2, 50, quick_if(False, 499)])


def make_model(transform, offset=0.0):
    """A regression on a transformation of the minibatch's covariate."""

    def model(x, y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(offset, 2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        s = numpyro.sample("s", dist.HalfNormal(1))
        with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(a + b * transform(x[i]), s), obs=y[i] + offset)

    return model


OVER_THE_MINIBATCH = {
    "centred": lambda x: x - x.mean(),
    "standardised": lambda x: (x - x.mean()) / (x.std() + 0.1),
    "ranked": lambda x: jnp.argsort(jnp.argsort(x)) / len(x),
    "cumulative sum": lambda x: jnp.cumsum(x) / len(x),
    "fraction of the sum": lambda x: len(x) * x / x.sum(),
}
ROW_BY_ROW = {
    "identity": lambda x: x,
    "logarithm": jnp.log,
    "mean of the full data": lambda x: x - X.mean(),
}


def check(model, batch_size, offset=0.0):
    arguments = Arguments((X, Y), {"batch_size": batch_size})
    potential = make_model_potential(model, arguments, init_to_uniform)
    preconditioner = Preconditioner(np.array([offset + 1.0, 0.8, -0.7]), np.full(3, 0.05))
    q = np.random.default_rng(1).standard_normal((16, 3))
    return find_nonadditive_plates(BatchedGradients(potential, arguments), preconditioner, q)


@each_batch_size
@pytest.mark.parametrize("name", OVER_THE_MINIBATCH)
def test_nonadditive_plates_statistic_of_minibatch_is_reported(name, batch_size):
    (warning,) = check(make_model(OVER_THE_MINIBATCH[name]), batch_size)
    assert warning.kind is ModelWarningKind.NON_ADDITIVE
    assert "plate 'rows'" in warning.message


@each_batch_size
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_nonadditive_plates_function_of_row_is_not_reported(name, offset, batch_size):
    """An offset of 1e4 makes the potential large, so that float32 rounds differences."""
    assert not check(make_model(ROW_BY_ROW[name], offset), batch_size, offset)


@pytest.mark.filterwarnings("ignore")
def test_run_nonadditive_likelihood_warns_once_and_report_is_flagged():
    model = make_model(OVER_THE_MINIBATCH["standardised"])
    mcmc = quietly(SGHMCSplit(model), num_warmup=50, num_samples=100)
    with pytest.warns(NonAdditiveLikelihoodWarning, match="rows.*additive") as caught:
        mcmc.run(random.key(0), jnp.asarray(X), jnp.asarray(Y), batch_size=20)
    messages = [str(w.message) for w in caught if w.category is NonAdditiveLikelihoodWarning]
    assert len(messages) == 1
    report = bias_report(mcmc)
    assert report.is_flagged
    assert messages[0] in report.diagnosis
