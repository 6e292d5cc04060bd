"""Rows of which each must add the same to the potential whichever the others are."""

import warnings

import jax
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
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import quietly
from tests.quick import quick_if

N = 500
RNG = np.random.default_rng(0)
X = RNG.gamma(1.0, 1.0, N).astype(np.float32)
Y = (1.0 + 0.8 * X + 0.5 * RNG.standard_normal(N)).astype(np.float32)
SIZES = pytest.mark.parametrize("batch_size", [2, 50, quick_if(False, 499)])


def model_of(of_rows, level=0.0):
    """A regression on what is made of the minibatch's covariate."""

    def model(x, y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(level, 2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        s = numpyro.sample("s", dist.HalfNormal(1))
        with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(a + b * of_rows(x[i]), s), obs=y[i] + level)

    return model


COUPLED = {
    "centred": lambda x: x - x.mean(),
    "standardised": lambda x: (x - x.mean()) / (x.std() + 0.1),
    "ranked": lambda x: jnp.argsort(jnp.argsort(x)) / len(x),
    "running sum": lambda x: jnp.cumsum(x) / len(x),
    "share of the sum": lambda x: len(x) * x / x.sum(),
}
FREE = {"as it is": lambda x: x, "logarithm": jnp.log, "another's": lambda x: x - X.mean()}


def found(model, batch_size, level=0.0):
    arguments = Arguments((X, Y), {"batch_size": batch_size})
    target = make_model_potential(model, arguments, init_to_uniform)
    whitening = Preconditioner(np.array([level + 1.0, 0.8, -0.7]), np.full(3, 0.05))
    q = np.random.default_rng(1).standard_normal((16, 3))
    return find_nonadditive_plates(BatchedGradients(target, arguments), whitening, q)


@SIZES
@pytest.mark.parametrize("name", COUPLED)
def test_what_is_taken_over_the_minibatch_is_found(name, batch_size):
    (finding,) = found(model_of(COUPLED[name]), batch_size)
    assert "The rows of the plate 'rows' do not add up" in finding.message


@SIZES
@pytest.mark.parametrize("level", [0.0, 1e4])
@pytest.mark.parametrize("name", FREE)
def test_rows_that_add_up_are_let_be(name, level, batch_size):
    assert not found(model_of(FREE[name], level), batch_size, level)


@pytest.mark.filterwarnings("ignore")
def test_the_plate_is_named_before_sampling_and_the_report_remembers():
    mcmc = quietly(SGHMCSplit(model_of(COUPLED["standardised"])), num_warmup=50, num_samples=100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc.run(random.key(0), jnp.asarray(X), jnp.asarray(Y), batch_size=20)
    told = [str(w.message) for w in caught if "do not add up" in str(w.message)]
    assert len(told) == 1
    report = bias_report(mcmc)
    assert report.is_flagged
    assert told[0] in report.diagnosis
    jax.effects_barrier()
