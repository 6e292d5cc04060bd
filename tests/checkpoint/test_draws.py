"""Draws of a checkpointed run, read from disk."""

import arviz as az
import numpy as np
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import bias_report, open_draws, print_summary
from numpyro_sgmcmc.errors import CheckpointError
from tests.checkpoint.runs import (
    DATA,
    assert_bitwise_equal,
    manifest_of,
    mcmc_of,
    newest,
    resume,
    run,
    truncate,
)


def test_open_draws_reads_lazily_what_get_samples_returns(whole):
    data = open_draws(whole[0])
    beta = data["posterior"]["beta"]
    assert beta.dims == ("chain", "draw", "beta_dim_0")
    assert not beta.variable._in_memory
    assert isinstance(data, az.InferenceData if az.__version__ < "1" else object)
    draws = whole[2].get_samples(True)
    for name in draws:
        np.testing.assert_array_equal(data["posterior"][name].values, draws[name])
    assert data["sample_stats"]["diverging"].dtype == bool
    assert {"beta[0]", "rate"} <= set(az.summary(data).index)


def test_resumed_run_gives_the_diagnostics_of_the_whole_run(whole, capsys):
    mcmc = resume(whole[0])
    assert isinstance(mcmc, MCMC)
    print_summary(mcmc)
    assert "rate" in capsys.readouterr().out
    assert str(bias_report(mcmc)) == str(bias_report(whole[2]))
    assert bias_report(mcmc, full_data=True).num_draws == 12
    data = az.from_numpyro(mcmc, log_likelihood=False)
    np.testing.assert_array_equal(data["posterior"]["rate"], whole[2].get_samples(True)["rate"])


def test_keep_draws_false_stores_moments_and_fields_only(whole, tmp_path):
    mcmc = run(mcmc_of(tmp_path, keep_draws=False))
    for name, draws in whole[2].get_samples(True).items():
        x = np.asarray(draws, np.float64)
        for axes, by_chain in (((0, 1), False), (1, True)):
            mean, variance = mcmc.running_mean(by_chain), mcmc.running_variance(by_chain)
            np.testing.assert_allclose(mean[name], x.mean(axes), rtol=1e-12)
            np.testing.assert_allclose(variance[name], x.var(axes), rtol=1e-9)
    data = open_draws(tmp_path)
    groups = list(data.children) if az.__version__ > "1" else list(data.groups())
    assert [g.strip("/") for g in groups] == ["sample_stats"]
    assert mcmc.get_extra_fields()["diverging"].shape == (12,)
    assert bias_report(mcmc).num_draws == 12
    with pytest.raises(ValueError, match=r"get_samples.*keep_draws"):
        mcmc.get_samples()
    with pytest.raises(ValueError, match=r"print_summary.*keep_draws"):
        mcmc.print_summary()


def test_progress_bar_of_a_resumed_run_shows_all_its_statistics(whole, copy, capsys):
    manifest_of(newest(copy)).unlink()  # one segment is left
    mcmc = mcmc_of(copy)
    mcmc.progress_bar = True
    mcmc.resume(*DATA, batch_size=40)
    text = capsys.readouterr().err
    for part in ("sample", "step size 0.2", "temperature", "ESS", "of 12 draws", "19/19"):
        assert part in text
    assert_bitwise_equal(mcmc, whole[1])


def test_resume_prints_its_position(whole, copy, capsys):
    """Without a progress bar too, at the end and with a segment of two draws left."""
    resume(copy)
    assert capsys.readouterr().err == f"'{copy}': 6 of 6 draws per chain; the run is complete.\n"
    manifest_of(newest(copy)).unlink()
    resume(copy)
    line = f"'{copy}': 4 of 6 draws per chain; resuming after iteration 15 of 19.\n"
    assert capsys.readouterr().err == line


def test_damaged_early_draws_are_named_and_the_others_readable(copy):
    truncate(copy / "draws.zarr/posterior/beta/c/0/0/0")
    mcmc = resume(copy)
    with pytest.raises(CheckpointError, match=r"Draws 0 to 1 .* damaged"):
        mcmc.get_samples()
    assert np.isfinite(np.asarray(open_draws(copy)["posterior"]["beta"][:, 2:])).all()
