"""Fixtures shared by all tests, and a count of compilations."""

import gc
import os
import platform
from collections import Counter
from pathlib import Path

import jax
import pytest

_MAPS = Path("/proc/self/maps")
# Linux allows a process 65,530 memory mappings; compiled programs hold several each.
_MAX_MAPS = 40_000

# Files whose tests share sampler runs, which one worker makes once.
_SHARED_RUNS = (
    {
        f"tests/diagnostics/test_{name}.py"
        for name in ("bias_report", "diagnosis", "draw_gradients", "plots", "run_data")
    },
    {f"tests/contract/test_{name}.py" for name in ("chains", "draws", "starts")},
)
# The first two files collect garbage and clear caches, which takes a minute after many other tests.
# The longest are next, so that workers end at about the same time.
_FIRST_FILES = (
    "tests/sampling/test_leaks.py",
    "tests/adaptation/test_compilation.py",
    "tests/devices/test_devices.py",
    "tests/diagnostics/test_bias_report.py",
    "tests/contract/test_chains.py",
    "tests/dynamics/test_dynamics.py",
    "tests/model/test_enumeration.py",
    "tests/diagnostics/test_gibbs_report.py",
    "tests/adaptation/test_additivity.py",
    "tests/dynamics/test_orders.py",
    "tests/data/test_subsampling.py",
    "tests/adaptation/test_gradient_consistency.py",
    "tests/model/test_unbiased.py",
    "tests/model/test_local_runs.py",
    "tests/hostile/test_data.py",
    "tests/adaptation/test_multimodality.py",
    "tests/adaptation/test_user_step_size.py",
)

# JAX's traced programs are many objects, which Python's default thresholds visit again and again: a
# tenth of the time of the tests.
gc.set_threshold(20_000, 10, 10)

# Compile without optimisation: most programs run for a short time only. Modules with long runs use
# the fixture `optimised`.
jax.config.update("jax_disable_most_optimizations", True)
# A program in one part compiles faster than in parts that threads compile.
_FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
# With JAX 0.10, the older emitters compile more than twice as fast; later versions lack them.
# Without fused multiply-adds, a formula is bitwise reproducible in all of their programs.
if (0, 10) <= jax.__version_info__ < (0, 11):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    if platform.machine() in ("x86_64", "AMD64"):
        _FLAGS.append("--xla_cpu_max_isa=AVX")
_given = os.environ.get("XLA_FLAGS", "").split()  # a worker inherits them
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*_given, *_FLAGS]))


@pytest.fixture(scope="module")
def optimised():
    """Compile with optimisation, for modules with long runs."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Use float64, for equalities that hold to rounding.

    Modules of such tests use ``pytestmark = pytest.mark.usefixtures("x64")`` and make no array at
    import. The setting is part of the keys of JAX's caches.
    """
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def no_warm_up(monkeypatch):
    """Raise :class:`WarmupReached` instead of the warm-up, after all checks of the input.

    What takes longer than the checks is left out: the comparison of the potential with those of
    other kernels, and the compilation of the warm-up.
    """
    from tests.hostile.calls import WarmupReached  # not in the process that only starts workers

    def reached(*args):
        raise WarmupReached

    monkeypatch.setattr("numpyro_sgmcmc.adaptation.warmup.fit_inits", reached)
    monkeypatch.setattr(
        "numpyro_sgmcmc.model.subsampled._potential_cache_key", lambda *args: object()
    )
    monkeypatch.setattr("numpyro_sgmcmc.adaptation.warmup._start_compilation", lambda *args: None)


def pytest_collection_modifyitems(items):
    """Put some files first; the order of the others, and of the tests of a file, stays."""
    rank = {file: k for k, file in enumerate(_FIRST_FILES)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give files that share runs to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedRunsScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return next((min(files) for files in _SHARED_RUNS if file in files), file)

    return SharedRunsScheduling(config, log)


def pytest_runtest_teardown(item, nextitem):
    """Clear the compilation caches before memory mappings run out (a segmentation fault)."""
    is_last_of_file = nextitem is None or nextitem.path != item.path
    if is_last_of_file and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MAX_MAPS:
        jax.clear_caches()
        gc.collect()


# Compilations take most of the tests' time. The summary shows their number, time and cache hits.

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
    """Send a worker's counts to the process that adds them."""
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
