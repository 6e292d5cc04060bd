"""What a run must have in common with the run that it continues."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.checkpoint.fingerprint import describe
from numpyro_sgmcmc.sampling.schedules import Polynomial
from tests.checkpoint.runs import DATA, KERNEL, kernel_of, manifest_of, mcmc_of, resume
from tests.contract.kernels import KERNELS, survey


class Prior:
    """A model with an attribute."""

    def __init__(self, sd):
        self.sd = sd

    def __call__(self):
        return self.model()

    def model(self):
        return dist.Normal(0, self.sd)


def test_describe_distinguishes_functions_by_code_and_closure():
    def scaled(factor):
        return lambda x: factor * x

    assert describe(scaled(2)) == describe(scaled(2))
    assert describe(scaled(2)) != describe(scaled(3))
    assert describe(lambda x: x + 1) != describe(lambda x: x + 2)
    alike = scaled(SimpleNamespace(a=1)), scaled(SimpleNamespace(a=1))
    assert describe(alike[0]) == describe(alike[1])
    assert describe(scaled(SimpleNamespace(a=1))) != describe(scaled(SimpleNamespace(a=2)))
    assert describe(scaled(dist.Normal(1, 2))) != describe(scaled(dist.Normal(2, 1)))
    assert describe(scaled(jax.jit(scaled(1)))) != describe(scaled(jax.jit(scaled(2))))


def test_describe_distinguishes_objects_by_attributes():
    assert describe(Polynomial(0.1, 0.3)) != describe(Polynomial(0.1, 0.4))
    assert describe(Prior(1)) != describe(Prior(2))
    assert describe(Prior(1).model) != describe(Prior(2).model)
    assert describe(handlers.scale(survey, 1.0)) != describe(handlers.scale(survey, 2.0))
    centred, other = (
        handlers.reparam(survey, {"beta": LocScaleReparam(c)}) for c in (0.0, 0.5)
    )  # fmt: skip
    assert describe(centred) != describe(other)


def test_describe_ignores_what_a_distribution_has_cached():
    used = dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2))
    before = describe(used)
    assert used.precision_matrix.shape == (2, 2)
    assert describe(used) == before


def test_describe_distinguishes_arrays_by_values():
    assert describe(np.zeros(3)) != describe(np.ones(3))
    large = np.zeros((2**20, 9))
    other = large.copy()
    other[-1, 3] = 1.0
    assert describe(large) != describe(other)


@pytest.mark.parametrize(
    ("kernel", "settings", "match"),
    [
        (kernel_of(step_size=0.1), {}, "kernel option `step_size` was 0.2 and is now 0.1"),
        (kernel_of(KERNELS[1]), {}, "kernel was SGHMCSplit and is now SGHMC"),
        (kernel_of(friction=2.0), {}, "kernel option `dynamics`"),
        (SGHMCSplit(lambda *a, **k: survey(*a, **k), num_steps=2, step_size=0.2), {}, "model was"),
        (KERNEL, {"num_samples": 15}, "`num_samples` was 13 and is now 15"),
        (KERNEL, {"num_warmup": 5}, "`num_warmup` was 6 and is now 5"),
        (KERNEL, {"num_chains": 3}, "`num_chains` was 2"),
        (KERNEL, {"thinning": 1}, "`thinning` was 2"),
        (KERNEL, {"chain_method": "sequential"}, "`chain_method` was 'vectorized'"),
        (KERNEL, {"checkpoint_every": 3}, "`checkpoint_every` was 2"),
        (KERNEL, {"keep_draws": False}, "`keep_draws` was True"),
    ],
)
def test_resume_with_other_settings_raises(whole, kernel, settings, match):
    with pytest.raises(ValueError, match=match):
        resume(whole[0], kernel, **settings)


def test_resume_with_other_data_raises(whole):
    mcmc = mcmc_of(whole[0])
    other = DATA.y.copy()
    other[7] += 1e-3
    with pytest.raises(ValueError, match="data `y` was float32"):
        mcmc.resume(DATA.X, other, DATA.counts, batch_size=40)
    with pytest.raises(ValueError, match="data `X` was"):
        mcmc.resume(DATA.X[:-1], DATA.y, DATA.counts, batch_size=40)
    with pytest.raises(ValueError, match="argument `batch_size` was 40 and is now 50"):
        mcmc.resume(*DATA, batch_size=50)


def test_resume_with_other_versions_raises(copy):
    for step in (copy / "checkpoints").iterdir():
        manifest = json.loads(manifest_of(step).read_text())
        manifest["fingerprint"]["version of JAX"] = "0.1"
        manifest_of(step).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"version of JAX was 0\.1 and is now"):
        resume(copy)


def test_resume_with_other_random_numbers_raises(whole):
    is_other = not jax.config.jax_threefry_partitionable
    with (
        jax.threefry_partitionable(is_other),
        pytest.raises(ValueError, match="JAX's option `jax_threefry_partitionable` was"),
    ):
        resume(whole[0])


def test_resume_with_a_key_raises(whole):
    with pytest.raises(ValueError, match="`resume` got a key"):
        mcmc_of(whole[0]).resume(jax.random.key(1), *DATA, batch_size=40)
