"""A short checkpointed run that tests share, and the ways to interrupt it."""

import os

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from numpyro_sgmcmc import CheckpointedMCMC, SGHMCSplit
from numpyro_sgmcmc.checkpoint.draws import DrawsOnDisk
from numpyro_sgmcmc.checkpoint.progress import ChunkSizer
from numpyro_sgmcmc.checkpoint.runner import ChainRunner
from numpyro_sgmcmc.checkpoint.store import encode
from tests.contract.kernels import survey, survey_data

DATA = survey_data()
slow = pytest.mark.slow
# Checkpoints at iterations 0, 4, 7 (the warm-up and the remainder of thinning), 11, 15, 19.
SETTINGS = {
    "num_warmup": 6,
    "num_samples": 13,
    "thinning": 2,
    "num_chains": 2,
    "chain_method": "vectorized",
    "checkpoint_every": 2,
}


class Killed(Exception):
    """Ends a run in place of the end of its process."""


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
    """Return all that a run leaves, as arrays."""
    parts = [mcmc.last_state, mcmc.get_extra_fields(True), mcmc.running_mean(True)]
    parts += [mcmc.running_variance(True), mcmc.running_mean()]
    if mcmc._keep_draws:
        parts.append(mcmc.get_samples(True))
    arrays = []
    encode(parts, arrays)
    return arrays


def assert_bitwise_equal(mcmc, expected):
    arrays = outcome(mcmc)
    assert len(arrays) == len(expected)
    for a, b in zip(arrays, expected, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def end_at(monkeypatch, iteration, end):
    """Call ``end`` once the chains have reached an iteration."""
    run_iterations = ChainRunner.run_iterations

    def run_and_end(self, segment, num_iterations):
        segment = run_iterations(self, segment, num_iterations)
        if np.max(segment.state.i) >= iteration:
            end()
        return segment

    # One draw at a time, whatever the clock shows.
    monkeypatch.setattr(ChunkSizer, "next_chunk", lambda self, multiple, most: min(multiple, most))
    monkeypatch.setattr(ChainRunner, "run_iterations", run_and_end)


def kill():
    raise Killed


WRITERS = {
    "draws": (DrawsOnDisk, "write"),
    "state": (ocp.StandardCheckpointHandler, "async_save"),
    "manifest": (ocp.JsonCheckpointHandler, "async_save"),
}


def fail_writing(monkeypatch, step, error):
    """Raise ``error`` when draws, state or manifest are written with two draws on disk."""
    owner, name = WRITERS[step]
    write, calls = getattr(owner, name), []

    def write_or_fail(*args, **kwargs):
        calls.append(1)
        # Draws are written first in the fourth segment, the others with the first checkpoint.
        if len(calls) == (2 if step == "draws" else 5):
            if step != "draws":  # a coroutine
                return fail()
            # Some draws are written, and wrong.
            write(args[0], jax.tree.map(lambda x: 0 * x, args[1]), args[2])
            raise error
        return write(*args, **kwargs)

    async def fail():
        raise error

    monkeypatch.setattr(owner, name, write_or_fail)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def newest(folder):
    return max((folder / "checkpoints").iterdir())


def manifest_of(checkpoint_folder):
    return checkpoint_folder / "manifest/manifest.json"
