"""Arguments, folders and dependencies of a checkpointed run."""

import sys

import jax
import pytest

from numpyro_sgmcmc import open_draws
from numpyro_sgmcmc.errors import CheckpointError
from tests.checkpoint.runs import mcmc_of, resume, run


def test_run_in_a_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created: Not a directory"):
        run(mcmc_of(tmp_path / "file" / "run"))


def test_run_and_resume_in_each_others_folder_raise(whole, tmp_path):
    with pytest.raises(FileExistsError, match=r"`checkpoint=.*`resume`"):
        run(mcmc_of(whole[0]))
    with pytest.raises(FileNotFoundError, match=r"`checkpoint=.*`run`"):
        resume(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        open_draws(tmp_path)
    assert mcmc_of(whole[0]).has_checkpoint
    assert not mcmc_of(tmp_path).has_checkpoint


def test_checkpointed_mcmc_has_no_separate_warmup(tmp_path):
    mcmc = mcmc_of(tmp_path)
    with pytest.raises(NotImplementedError, match="`warmup`"):
        mcmc.warmup(jax.random.key(0))
    with pytest.raises(NotImplementedError, match="`post_warmup_state`"):
        mcmc.post_warmup_state = None


def test_moments_and_samples_before_a_run_raise(tmp_path):
    mcmc = mcmc_of(tmp_path)
    for call in (mcmc.running_mean, mcmc.get_samples):
        with pytest.raises(ValueError, match="no draws"):
            call()


@pytest.mark.parametrize("module", ["zarr", "orbax.checkpoint"])
def test_run_without_a_dependency_raises(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module}.*\[checkpoint\]"):
        run(mcmc_of(tmp_path))
