"""What can be read of a run, and the parts that write it."""

import json
from types import SimpleNamespace

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.reparam import LocScaleReparam

from numpyro_sgmcmc import bias_report, open_draws, print_summary
from numpyro_sgmcmc.checkpoint.fingerprint import describe
from numpyro_sgmcmc.checkpoint.mcmc import RunningMoments
from numpyro_sgmcmc.checkpoint.store import decode, encode
from numpyro_sgmcmc.data.subsampling import StreamState
from numpyro_sgmcmc.sampling.mass_matrix import MassMatrixBlocks
from numpyro_sgmcmc.sampling.schedules import Polynomial
from tests.checkpoint.runs import (
    DATA,
    assert_same_bits,
    compilation_cache,
    copy,
    foreground,
    mcmc_of,
    newest,
    resume,
    run,
    whole,
)
from tests.contract.kernels import survey

__all__ = ["compilation_cache", "copy", "foreground", "whole"]


def test_draws_open_lazily(whole):
    found = open_draws(whole[0])
    beta = found["posterior"]["beta"]
    assert beta.dims == ("chain", "draw", "beta_dim_0")
    assert not beta.variable._in_memory
    assert isinstance(found, az.InferenceData if az.__version__ < "1" else object)
    draws = whole[2].get_samples(True)
    for name in draws:
        np.testing.assert_array_equal(found["posterior"][name].values, draws[name])
    assert found["sample_stats"]["diverging"].dtype == bool
    summary = az.summary(found)
    assert {"beta[0]", "rate"} <= set(summary.index)


def test_diagnostics_after_a_resume(whole, capsys):
    mcmc = resume(whole[0])
    print_summary(mcmc)
    assert "rate" in capsys.readouterr().out
    assert str(bias_report(mcmc)) == str(bias_report(whole[2]))
    assert bias_report(mcmc, full_data=True).num_draws == 12
    data = az.from_numpyro(mcmc, log_likelihood=False)
    np.testing.assert_array_equal(data["posterior"]["rate"], whole[2].get_samples(True)["rate"])


def test_running_moments(whole, tmp_path):
    mcmc = run(mcmc_of(tmp_path, keep_draws=False))
    for name, draws in whole[2].get_samples(True).items():
        x = np.asarray(draws, np.float64)
        for axes, by_chain in (((0, 1), False), (1, True)):
            mean, variance = mcmc.running_mean(by_chain), mcmc.running_variance(by_chain)
            np.testing.assert_allclose(mean[name], x.mean(axes), rtol=1e-12)
            np.testing.assert_allclose(variance[name], x.var(axes), rtol=1e-9)
    assert list(open_draws(tmp_path).children if az.__version__ > "1" else ["sample_stats"]) == [
        "sample_stats"
    ]
    assert mcmc.get_extra_fields()["diverging"].shape == (12,)
    assert bias_report(mcmc).num_draws == 12
    with pytest.raises(RuntimeError, match="`running_mean` and `running_variance` are there"):
        mcmc.get_samples()
    with pytest.raises(RuntimeError, match="`print_summary` needs the draws"):
        mcmc.print_summary()


def test_running_moments_do_not_depend_on_segments():
    rng = np.random.default_rng(0)
    draws = {"a": rng.normal(3, 2, (2, 20, 3)).astype(np.float32)}
    weights = rng.integers(0, 3, (2, 20)).astype(float)
    once = RunningMoments.zeros(draws).add(draws, weights)
    pieces = RunningMoments.zeros(draws)
    for part in (slice(0, 1), slice(1, 7), slice(7, 7), slice(7, 20)):
        pieces = pieces.add({"a": draws["a"][:, part]}, weights[:, part])
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b)
    mean, variance = once.compute_pooled_moments()
    x, w = np.float64(draws["a"]).reshape(40, 3), weights.ravel()
    np.testing.assert_allclose(mean["a"], np.average(x, 0, w))
    np.testing.assert_allclose(variance["a"], np.average((x - mean["a"]) ** 2, 0, w))


def test_progress(whole, copy, capsys, monkeypatch):
    (newest(copy) / "checkpoint.json").unlink()  # a segment is left to do
    mcmc = mcmc_of(copy)
    mcmc.progress_bar = True
    mcmc.resume(*DATA, batch_size=40)
    shown = capsys.readouterr().err
    for text in ("sample", "step size 0.2", "temperature", "ESS", "19/19"):
        assert text in shown
    assert_same_bits(mcmc, whole[1])


def test_a_resumed_run_says_where_it_is(whole, copy, capsys):
    """With no progress bar too: at the end, and with a segment of two draws left to do."""
    resume(copy)
    assert capsys.readouterr().err == f"'{copy}': 6 of 6 draws a chain; the run is complete.\n"
    (newest(copy) / "checkpoint.json").unlink()
    resume(copy)
    line = f"'{copy}': 4 of 6 draws a chain; going on after iteration 15 of 19.\n"
    assert capsys.readouterr().err == line


# The parts


def test_codec_keeps_types_and_bits():
    tree = {
        "a": (1, 2.5, float("inf"), None, True, "x"),
        "b": [jnp.arange(3), np.float32(0.1), np.arange(2.0), jnp.zeros((0, 2))],
        "typed": jax.random.key(3, impl="rbg"),
        "raw": jax.random.PRNGKey(3),
        "stream": StreamState(*range(len(StreamState._fields))),
        "blocks": MassMatrixBlocks((("x", 1), ("y", 2)), ((("y", "x"), True),)),
        "matrices": {("x", "y"): jnp.eye(2), ("z",): jnp.ones(3)},
    }
    arrays = []
    found = decode(json.loads(json.dumps(encode(tree, arrays))), arrays)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["a"] == tree["a"]
    assert found["blocks"] == tree["blocks"]
    assert found["typed"].dtype == tree["typed"].dtype
    for a, b in zip(jax.tree.leaves(found["b"]), jax.tree.leaves(tree["b"]), strict=True):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match="A set cannot be kept"):
        encode({"a": {1}}, [])


class Prior:
    """A model with a setting of its own."""

    def __init__(self, sd):
        self.sd = sd

    def __call__(self):
        return self.model()

    def model(self):
        return dist.Normal(0, self.sd)


def test_description_tells_functions_apart():
    def scaled(factor):
        return lambda x: factor * x

    assert describe(scaled(2)) == describe(scaled(2))
    assert describe(scaled(2)) != describe(scaled(3))
    assert describe(lambda x: x + 1) != describe(lambda x: x + 2)
    assert describe(Polynomial(0.1, 0.3)) != describe(Polynomial(0.1, 0.4))
    assert describe(np.zeros(3)) != describe(np.ones(3))
    alike = scaled(SimpleNamespace(a=1)), scaled(SimpleNamespace(a=1))
    assert describe(alike[0]) == describe(alike[1])
    assert describe(scaled(SimpleNamespace(a=1))) != describe(scaled(SimpleNamespace(a=2)))
    assert describe(scaled(dist.Normal(1, 2))) != describe(scaled(dist.Normal(2, 1)))
    assert describe(scaled(jax.jit(scaled(1)))) != describe(scaled(jax.jit(scaled(2))))
    assert describe(Prior(1)) != describe(Prior(2))
    assert describe(Prior(1).model) != describe(Prior(2).model)
    assert describe(handlers.scale(survey, 1.0)) != describe(handlers.scale(survey, 2.0))
    config = [{"beta": LocScaleReparam(c)} for c in (0.0, 0.5)]
    assert describe(handlers.reparam(survey, config[0])) != describe(
        handlers.reparam(survey, config[1])
    )
    used = dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2))
    before = describe(used)
    assert used.precision_matrix.shape == (2, 2)
    assert describe(used) == before
    big = np.zeros((2**20, 9))
    other = big.copy()
    other[-1, 3] = 1.0
    assert describe(big) != describe(other)


def test_is_an_mcmc(whole):
    assert isinstance(whole[2], MCMC)
