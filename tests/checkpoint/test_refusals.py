"""What is damaged in a run's folder, and what cannot continue it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from numpyro.infer import NUTS

from numpyro_sgmcmc import SGHMCSplit, open_draws
from tests.checkpoint.runs import (
    DATA,
    KERNEL,
    assert_same_bits,
    compilation_cache,
    copy,
    foreground,
    kernel_of,
    mcmc_of,
    newest,
    resume,
    run,
    slow,
    truncate,
    whole,
)
from tests.contract.kernels import KERNELS, survey

__all__ = ["compilation_cache", "copy", "foreground", "whole"]


def damage_header(folder):
    truncate(newest(folder) / "checkpoint.json")


def damage_state(folder):
    for path in (newest(folder) / "state").rglob("*"):
        if path.is_file():
            truncate(path)


def damage_values(folder):
    path = newest(folder) / "checkpoint.json"
    header = json.loads(path.read_text())
    header["arrays"][3][2] += 1
    path.write_text(json.dumps(header))


def damage_draws(folder):
    truncate(folder / "draws.zarr/posterior/beta/c/1/2/0")


def lose_draws(folder):
    shutil.rmtree(folder / "draws.zarr/posterior/rate/c/1/2", ignore_errors=True)
    (folder / "draws.zarr/posterior/rate/c/1/2").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage_header, marks=slow),
        damage_state,
        pytest.param(damage_values, marks=slow),
        damage_draws,
        pytest.param(lose_draws, marks=slow),
    ],
)
def test_falls_back_to_the_checkpoint_before(whole, copy, damage):
    damage(copy)
    with pytest.warns(UserWarning, match="iteration 19 is damaged.*of iteration 15"):
        mcmc = resume(copy)
    assert_same_bits(mcmc, whole[1])
    assert len(list((copy / "checkpoints").iterdir())) == 2
    assert_same_bits(resume(copy), whole[1])


def test_no_checkpoint_is_whole(copy):
    for step in (copy / "checkpoints").iterdir():
        truncate(step / "checkpoint.json")
    with pytest.raises(
        RuntimeError, match=r"No checkpoint in .* can be read: that of iteration 19"
    ):
        resume(copy)


def test_early_draws_are_damaged(copy):
    truncate(copy / "draws.zarr/posterior/beta/c/0/0/0")
    mcmc = resume(copy)
    with pytest.raises(RuntimeError, match=r"Draws 0 to 2 .* are damaged"):
        mcmc.get_samples()
    assert np.isfinite(np.asarray(open_draws(copy)["posterior"]["beta"][:, 2:])).all()


# What is refused


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
def test_other_settings(whole, kernel, settings, match):
    with pytest.raises(ValueError, match=match):
        resume(whole[0], kernel, **settings)


def test_other_data(whole):
    mcmc = mcmc_of(whole[0])
    other = DATA.y.copy()
    other[7] += 1e-3
    with pytest.raises(ValueError, match="data `y` was float32"):
        mcmc.resume(DATA.X, other, DATA.counts, batch_size=40)
    with pytest.raises(ValueError, match="data `X` was"):
        mcmc.resume(DATA.X[:-1], DATA.y, DATA.counts, batch_size=40)
    with pytest.raises(ValueError, match="argument `batch_size` was 40 and is now 50"):
        mcmc.resume(*DATA, batch_size=50)


def test_other_versions(copy):
    for step in (copy / "checkpoints").iterdir():
        header = json.loads((step / "checkpoint.json").read_text())
        header["fingerprint"]["version of JAX"] = "0.1"
        (step / "checkpoint.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"version of JAX was 0\.1 and is now"):
        resume(copy)


def test_other_random_numbers(whole):
    is_other = not jax.config.jax_threefry_partitionable
    with (
        jax.threefry_partitionable(is_other),
        pytest.raises(ValueError, match="JAX's option `jax_threefry_partitionable` was"),
    ):
        resume(whole[0])


@pytest.mark.parametrize(("change", "age"), [(-1, "an older"), (1, "a newer")])
def test_a_run_stored_in_another_format(copy, change, age):
    """It is told from a damaged one, and its draws are there."""
    for path in copy.glob("checkpoints/*/checkpoint.json"):
        header = json.loads(path.read_text())
        header["format"] += change
        path.write_text(json.dumps(header))
    with pytest.raises(ValueError, match=f"{age} format.* than this version.*open_draws"):
        resume(copy)
    assert open_draws(copy)["posterior"].sizes["draw"] > 0


def test_a_key_to_resume_with(whole):
    with pytest.raises(ValueError, match="leave the key out"):
        mcmc_of(whole[0]).resume(jax.random.key(1), *DATA, batch_size=40)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot be made: Not a directory"):
        run(mcmc_of(tmp_path / "file" / "run"))


def test_folders_with_and_without_a_run(whole, tmp_path):
    with pytest.raises(FileExistsError, match="call `resume` to continue it"):
        run(mcmc_of(whole[0]))
    with pytest.raises(FileNotFoundError, match="call `run`"):
        resume(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint of a run"):
        open_draws(tmp_path)
    assert mcmc_of(whole[0]).has_checkpoint
    assert not mcmc_of(tmp_path).has_checkpoint


def test_constructor(tmp_path):
    with pytest.raises(ValueError, match="`sampler` is a NUTS"):
        mcmc_of(tmp_path, NUTS(survey))
    with pytest.raises(ValueError, match="`checkpoint_every` is 0"):
        mcmc_of(tmp_path, checkpoint_every=0)
    with pytest.raises(ValueError, match="`keep_draws` is 'no'"):
        mcmc_of(tmp_path, keep_draws="no")
    mcmc = mcmc_of(tmp_path)
    with pytest.raises(NotImplementedError, match="`run` includes it"):
        mcmc.warmup(jax.random.key(0))
    with pytest.raises(NotImplementedError, match="from its folder"):
        mcmc.post_warmup_state = None
    with pytest.raises(RuntimeError, match="no draws yet"):
        mcmc.running_mean()


@pytest.mark.parametrize("module", ["zarr", "orbax.checkpoint"])
def test_missing_extra(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    mcmc = mcmc_of(tmp_path)
    with pytest.raises(ImportError, match=rf"{module},.*pip install 'numpyro-sgmcmc\[checkpoint\]'"):
        run(mcmc)


def test_imports_nothing_that_is_extra():
    code = (
        "import sys, numpyro_sgmcmc;"
        "assert not {'zarr', 'orbax.checkpoint', 'arviz', 'xarray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
