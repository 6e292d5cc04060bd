"""Fixtures of the tests of checkpoints: one complete run for all of them."""

import shutil
import signal
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from tests.checkpoint.runs import mcmc_of, outcome, run


@pytest.fixture(scope="package", autouse=True)
def compilation_cache(tmp_path_factory):
    """Cache compiled programs: most of the time of a resumed run is compilation."""
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
    """Handle Ctrl-C as a foreground process does, wherever the tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="package")
def whole(tmp_path_factory, compilation_cache):
    """The folder of an uninterrupted run, its outcome and its MCMC object; not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    mcmc = run(mcmc_of(folder))
    return folder, outcome(mcmc), mcmc


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the uninterrupted run's folder."""
    return Path(shutil.copytree(whole[0], tmp_path / "copy"))
