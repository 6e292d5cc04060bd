"""Fixtures shared by all tests."""

import jax
import pytest


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
