"""Results of a kernel's `init`: reused, discarded in copies, and adapted again for other data."""

import copy
import pickle

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.checkpoint.fingerprint import compute_fingerprint
from numpyro_sgmcmc.errors import InitializationError, InvalidArgumentError
from tests.hostile.calls import WarmupReached

Y = np.arange(6, dtype=np.float32)
BATCH = {"batch_size": 2}


def model(y, batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def make_kernel():
    return SGHMCSplit(model, step_size=0.2, num_steps=2, gradient_estimator="minibatch")


def initialise(kernel, y=Y):
    kernel.init(jax.random.key(0), 7, None, (y,), BATCH)
    return kernel


def with_scales(y, num_scales, batch_size):
    """State priors that let each scale be negative, where the density is not finite."""
    scales = numpyro.sample("scales", dist.Normal(0, 1).expand([num_scales]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(0, scales[i % num_scales]), obs=y[i])


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize("num_scales", [1, 3, 4, 6])
def test_up_to_100_initial_positions_are_tried(num_scales):
    with pytest.raises(WarmupReached):
        SGHMCSplit(with_scales).init(jax.random.key(0), 7, None, (Y, num_scales, 5), {})


@pytest.mark.usefixtures("no_warm_up")
def test_initial_positions_are_tried_in_vain():
    with pytest.raises(InitializationError, match="'y'"):
        SGHMCSplit(with_scales).init(jax.random.key(0), 7, None, (np.full(6, np.nan), 1, 5), {})


@pytest.fixture(scope="module")
def kernel():
    return initialise(make_kernel())


@pytest.mark.parametrize("name", ["potential", "adaptation"])
def test_result_of_init_before_init_raises(name):
    kernel = make_kernel()
    assert kernel._sample_fn is None
    assert not kernel.has_potential
    with pytest.raises(InitializationError, match=r"SGHMCSplit.*initialised"):
        getattr(kernel, name)


@pytest.mark.parametrize(
    "make_copy",
    [copy.copy, lambda k: pickle.loads(pickle.dumps(k)), lambda k: k.wrap_model(lambda m: m)],
    ids=["copied", "pickled", "of another model"],
)
def test_copied_kernel_must_be_initialised(kernel, make_copy):
    other = make_copy(kernel)
    assert other._sample_fn is None
    assert not other.has_potential
    other_model = {"model": None}  # that of a wrapped kernel differs
    assert {**other.settings, **other_model} == {**kernel.settings, **other_model}
    assert kernel._sample_fn == kernel.sample
    assert kernel.has_potential


def test_pickled_kernel_keeps_the_measured_gradient_noise(kernel):
    assert pickle.loads(pickle.dumps(kernel)).noise_stats == kernel.noise_stats


def test_copy_with_another_adaptation_is_initialised(kernel):
    adaptation = kernel.adaptation
    other = kernel.copy_with(adaptation=adaptation._replace(num_steps=5))
    assert other._sample_fn is not None
    assert other.potential is kernel.potential
    assert other.adaptation.num_steps == 5
    assert kernel.adaptation is adaptation
    assert kernel.copy_with(potential=kernel.potential).adaptation is adaptation


def test_init_adapts_again_for_other_data_only():
    kernel = initialise(make_kernel())
    adaptation = kernel.adaptation
    assert initialise(kernel).adaptation is adaptation
    assert initialise(kernel, Y + 1).adaptation is not adaptation


def test_wrap_model_of_a_potential_function_raises():
    kernel = SGHMCSplit(potential_fn=lambda q: (q**2).sum() / 2)
    with pytest.raises(InvalidArgumentError, match=r"`wrap_model`.*model"):
        kernel.wrap_model(lambda m: m)


def test_fingerprint_contains_settings_and_no_result_of_init(kernel):
    before, after = (compute_fingerprint(k, {}, (Y,), BATCH) for k in (make_kernel(), kernel))
    assert before == after
    options = {name for name in before if name.startswith("kernel option")}
    assert "kernel option `step_size`" in options
    assert len(options) == len(kernel.settings) - len(("model", "potential_fn"))
