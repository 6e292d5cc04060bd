"""A run in segments that tests of checkpoints share, and the ways to end it."""

import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from numpyro_sgmcmc import CheckpointedMCMC, SGHMCSplit
from numpyro_sgmcmc.checkpoint import store
from numpyro_sgmcmc.checkpoint.draws import DrawsOnDisk
from numpyro_sgmcmc.checkpoint.runner import ChainRunner
from numpyro_sgmcmc.checkpoint.store import encode
from tests.contract.kernels import survey, survey_data

# Test modules import the fixtures, and have them in their own `__all__`.
__all__ = [
    "DATA",
    "KERNEL",
    "SETTINGS",
    "Killed",
    "assert_same_bits",
    "compilation_cache",
    "copy",
    "end_at",
    "fail_writing",
    "foreground",
    "kernel_of",
    "kill",
    "mcmc_of",
    "newest",
    "outcome",
    "resume",
    "run",
    "slow",
    "truncate",
    "whole",
]

DATA = survey_data()
slow = pytest.mark.slow
# Checkpoints at iterations 0, 4, 7 (the warm-up and what thinning leaves over), 11, 15, 19.
SETTINGS = {
    "num_warmup": 6,
    "num_samples": 13,
    "thinning": 2,
    "num_chains": 2,
    "chain_method": "vectorized",
    "checkpoint_every": 2,
}


class Killed(Exception):
    """The end of the process, as far as a test can have it without ending itself."""


def kernel_of(kernel_class=SGHMCSplit, **options):
    return kernel_class(
        survey,
        **{"num_steps": 2, "step_size": 0.2, "gradient_estimator": "control_variate", **options},
    )


KERNEL = kernel_of()  # adapts once for all tests


def mcmc_of(folder, kernel=KERNEL, **settings):
    return CheckpointedMCMC(
        kernel, **{**SETTINGS, "progress_bar": False, "checkpoint": folder, **settings}
    )


def run(mcmc, **settings):
    mcmc.run(jax.random.key(1), *DATA, batch_size=40, **settings)
    return mcmc


def resume(folder, kernel=None, **settings):
    mcmc = mcmc_of(folder, kernel or kernel_of(), **settings)
    mcmc.resume(*DATA, batch_size=40)
    return mcmc


def outcome(mcmc):
    """All that a run leaves, as arrays."""
    found = [mcmc.last_state, mcmc.get_extra_fields(True), mcmc.running_mean(True)]
    found += [mcmc.running_variance(True), mcmc.running_mean()]
    if mcmc._keep_draws:
        found.append(mcmc.get_samples(True))
    arrays = []
    encode(found, arrays)
    return arrays


def assert_same_bits(mcmc, expected):
    found = outcome(mcmc)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """What is resumed is the same program, and compiling it most of a test."""
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.2,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(autouse=True)
def foreground():
    """Meet Ctrl-C as a process in the foreground does, wherever the tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compilation_cache):
    """The folder of a run that nothing disturbed, and what it left."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    mcmc = run(mcmc_of(folder))
    return folder, outcome(mcmc), mcmc


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole[0], tmp_path / "copy"))


def end_at(monkeypatch, iteration, how):
    """End with ``how`` once the chains have come to an iteration."""
    advance = ChainRunner.run_iterations

    def advance_and_end(self, segment, iterations):
        segment = advance(self, segment, iterations)
        if np.max(segment.state.i) >= iteration:
            how()
        return segment

    # At most two iterations between two looks, whatever the clock says.
    monkeypatch.setattr("numpyro_sgmcmc.checkpoint.progress._POLL_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(ChainRunner, "run_iterations", advance_and_end)


def kill():
    raise Killed


WRITERS = {
    "draws": (DrawsOnDisk, "write"),
    "state": (store, "_create_checkpointer"),
    "header": (store, "_write_atomically"),
}


def fail_writing(monkeypatch, step, error):
    """Raise ``error`` once draws, state or header are to be written with two draws on disk."""
    owner, name = WRITERS[step]
    before, calls = getattr(owner, name), []

    def write(*args):
        calls.append(1)
        # Draws are written first in the fourth segment, the others with the first checkpoint.
        if len(calls) == (2 if step == "draws" else 5):
            if step == "draws":  # some are there, and wrong
                before(args[0], jax.tree.map(lambda x: 0 * x, args[1]), args[2])
            raise error
        return before(*args)

    monkeypatch.setattr(owner, name, write)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def newest(folder):
    return max((folder / "checkpoints").iterdir())
