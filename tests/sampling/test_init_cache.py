"""What `init` finds is in one place: it is forgotten, shared and found again as a whole."""

import copy
import pickle

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.checkpoint.fingerprint import compute_fingerprint
from numpyro_sgmcmc.errors import InitializationError

Y = np.arange(6, dtype=np.float32)
ROWS = {"batch_size": 2}


def model(y, batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def new_kernel():
    return SGHMCSplit(model, step_size=0.2, num_steps=2, gradient_estimator="minibatch")


def initialised(kernel):
    kernel.init(jax.random.key(0), 7, None, (Y,), ROWS)
    return kernel


@pytest.fixture(scope="module")
def kernel():
    return initialised(new_kernel())


def test_before_init():
    kernel = new_kernel()
    assert kernel._sample_fn is None
    assert not kernel.has_potential
    for name in ("potential", "adaptation"):
        with pytest.raises(InitializationError, match="SGHMCSplit is not initialised"):
            getattr(kernel, name)


@pytest.mark.parametrize(
    "forget",
    [copy.copy, lambda k: pickle.loads(pickle.dumps(k)), lambda k: k.wrap_model(lambda m: m)],
    ids=["copied", "pickled", "of another model"],
)
def test_copies_have_forgotten_the_data(kernel, forget):
    other = forget(kernel)
    assert other._sample_fn is None
    assert not other.has_potential
    of_both = {"model": None}  # of which one may be wrapped
    assert {**other.settings, **of_both} == {**kernel.settings, **of_both}
    assert kernel._sample_fn == kernel.sample
    assert kernel.has_potential


def test_a_pickled_kernel_knows_the_noise(kernel):
    other = pickle.loads(pickle.dumps(kernel))
    assert other.noise_stats == kernel.noise_stats
    assert other._cache.num_warmup == 7


def test_a_variant_need_not_be_initialised(kernel):
    found = kernel.adaptation
    other = kernel.copy_with(adaptation=found._replace(num_steps=5))
    assert other._sample_fn is not None
    assert other.potential is kernel.potential
    assert other.adaptation.num_steps == 5
    assert kernel.adaptation is found
    assert kernel.copy_with(potential=kernel.potential).adaptation is found


def test_init_finds_once_what_has_not_changed(kernel):
    found = kernel.adaptation
    assert initialised(kernel).adaptation is found
    kernel.init(jax.random.key(0), 7, None, (Y + 1,), ROWS)
    assert kernel.adaptation is not found


def test_nothing_that_init_finds_is_in_the_fingerprint(kernel):
    before, after = (compute_fingerprint(k, {}, (Y,), ROWS) for k in (new_kernel(), kernel))
    assert before == after
    options = {n for n in before if n.startswith("kernel option")}
    assert "kernel option `step_size`" in options
    assert len(options) == len(kernel.settings) - len(("model", "potential_fn"))
