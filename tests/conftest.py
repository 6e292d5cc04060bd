"""Fixtures shared by all tests."""

import gc
from pathlib import Path

import jax
import pytest

from tests.hostile.calls import Reached

_MAPS = Path("/proc/self/maps")
_MANY_MAPS = 20_000


def pytest_runtest_teardown(item, nextitem):
    """Forget compiled programs now and then.

    Each holds some mappings of memory, of which Linux allows a process 65,530. A worker that runs
    out of them is ended by a segmentation fault.
    """
    if _MAPS.exists() and _MAPS.read_text().count("\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64():
    """Float64 for the test, for statements that hold to rounding.

    Modules of exact tests put ``pytestmark = pytest.mark.usefixtures("x64")`` at their top and
    make no array at import. JAX keys its caches by the setting, so nothing leaks either way.
    """
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def quick_compile():
    """Compile without optimisations: for many small functions that run for no time."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def no_warm_up(monkeypatch):
    """Stop where the checks have passed."""

    def reached(self, starts):
        raise Reached

    monkeypatch.setattr("numpyro_sgmcmc.warmup.setup.Setup._optimise", reached)
