"""Fixtures shared by all tests, and a count of what was compiled."""

import gc
import os
import platform
from collections import Counter
from pathlib import Path

import jax
import pytest

from tests.hostile.calls import WarmupReached

_MAPS = Path("/proc/self/maps")
_MANY_MAPS = 40_000

# Compile without optimising: what is tested is the same and most programs run for no time.
# A long run asks for `optimised`.
jax.config.update("jax_disable_most_optimizations", True)
# On JAX 0.10 the older emitters compile more than twice as fast; later ones have them no more.
# Without fused multiply-adds a formula has the same bits in every program that they make.
_FLAGS = ["--xla_cpu_use_fusion_emitters=false"]
if platform.machine() in ("x86_64", "AMD64"):
    _FLAGS.append("--xla_cpu_max_isa=AVX")
if (0, 10) <= jax.__version_info__ < (0, 11):
    given = os.environ.get("XLA_FLAGS", "").split()  # a worker has its parent's
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*given, *_FLAGS]))


@pytest.fixture(scope="module")
def optimised():
    """Optimise what is compiled: for modules of long runs, which are worth it."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


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
def no_warm_up(monkeypatch):
    """Stop where the checks have passed."""

    def reached(*args):
        raise WarmupReached

    monkeypatch.setattr("numpyro_sgmcmc.adaptation.warmup.fit_inits", reached)


def pytest_runtest_teardown(item, nextitem):
    """Forget compiled programs now and then.

    Each holds some mappings of memory, of which Linux allows a process 65,530. A worker that runs
    out of them is ended by a segmentation fault.
    """
    if _MAPS.exists() and _MAPS.read_text().count("\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()


# Compilations are most of the tests' time: how many, how long, and how many were on disk.

_compiled: Counter = Counter()


def _note_compilation(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.update(programs=1, seconds=seconds)


def _note_cache_hit(event, **_):
    if event == "/jax/compilation_cache/cache_hits":
        _compiled.update(hits=1)


jax.monitoring.register_event_duration_secs_listener(_note_compilation)
jax.monitoring.register_event_listener(_note_cache_hit)


def pytest_sessionfinish(session):
    """Hand a worker's count to the process that sums them up."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["compiled"] = dict(_compiled)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    _compiled.update(getattr(node, "workeroutput", {}).get("compiled", {}))


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"compilations: {_compiled['programs']} programs in {_compiled['seconds']:.0f} s "
        f"({_compiled['hits']} from the cache)"
    )
