"""A run that is killed and resumed is the run that was not, to the last bit."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from contract import (
    KERNELS,
    ignore_donation,
    quick_compilation,
    quietly,
    run_on_two_devices,
    survey,
    survey_data,
)
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

from numpyro_sgmcmc import (
    CheckpointedMCMC,
    HostArray,
    SGHMCSplit,
    bias_report,
    open_draws,
    print_summary,
)
from numpyro_sgmcmc.checkpointing import store
from numpyro_sgmcmc.checkpointing.codec import decode, encode
from numpyro_sgmcmc.checkpointing.draws import DrawsOnDisk
from numpyro_sgmcmc.checkpointing.fingerprint import describe
from numpyro_sgmcmc.checkpointing.loop import Chains
from numpyro_sgmcmc.checkpointing.running import RunningMoments
from numpyro_sgmcmc.minibatch import StreamState
from numpyro_sgmcmc.schedules import Polynomial

__all__ = ["quick_compilation"]

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
        survey, **{"num_steps": 2, "step_size": 0.2, "gradient": "control_variate", **options}
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
def compilation_cache(tmp_path_factory, quick_compilation):
    """What is resumed is the same program, and compiling it most of a test."""
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
    advance = Chains.advance

    def advance_and_end(self, segment, iterations):
        segment = advance(self, segment, iterations)
        if np.max(segment.state.i) >= iteration:
            how()
        return segment

    # At most two iterations between two looks, whatever the clock says.
    monkeypatch.setattr("numpyro_sgmcmc.checkpointing.watch._LOOK_SECONDS", 0.0)
    monkeypatch.setattr(Chains, "advance", advance_and_end)


def kill():
    raise Killed


@pytest.mark.parametrize("method", [pytest.param("sequential", marks=slow), "vectorized"])
def test_draws_are_those_of_plain_mcmc(whole, method, tmp_path):
    settings = {k: v for k, v in SETTINGS.items() if k != "checkpoint_every"}
    settings["chain_method"] = method
    plain = quietly(KERNEL, **settings)
    plain.run(jax.random.key(1), *DATA, batch_size=40)
    mcmc = whole[2] if method == "vectorized" else run(mcmc_of(tmp_path, chain_method=method))
    for name, draws in plain.get_samples(True).items():
        np.testing.assert_array_equal(mcmc.get_samples(True)[name], draws)
    diverging = plain.get_extra_fields(True)["diverging"]
    np.testing.assert_array_equal(mcmc.get_extra_fields(True)["diverging"], diverging)
    ours, theirs = [], []
    encode(mcmc.last_state, ours)
    encode(plain.last_state, theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@slow
def test_killed_at_every_checkpoint(whole, tmp_path, monkeypatch):
    write, kills = store.Store.write, 0

    def write_and_die(self, checkpoint):
        written = write(self, checkpoint)
        if checkpoint.iterations < 19:
            raise KeyboardInterrupt  # which no handler takes for a full disk
        return written

    monkeypatch.setattr(store.Store, "write", write_and_die)
    with pytest.raises(KeyboardInterrupt):
        run(mcmc_of(tmp_path))
    kills += 1
    while True:
        try:
            mcmc = resume(tmp_path)
            break
        except KeyboardInterrupt:
            kills += 1
    assert kills == 5
    assert_same_bits(mcmc, whole[1])


@pytest.mark.parametrize(
    "iteration", [pytest.param(2, marks=slow), 9, pytest.param(17, marks=slow)]
)
def test_killed_inside_a_segment(whole, tmp_path, monkeypatch, iteration):
    with monkeypatch.context() as patch:
        end_at(patch, iteration, kill)
        with pytest.raises(Killed):
            run(mcmc_of(tmp_path))
    assert_same_bits(resume(tmp_path), whole[1])
    assert_same_bits(resume(tmp_path), whole[1])  # which is complete and only read


@slow
@pytest.mark.parametrize("step", ["draws", "state", "header"])
def test_killed_while_writing(whole, tmp_path, monkeypatch, step):
    targets = {
        "draws": (DrawsOnDisk, "write"),
        "state": (store, "_checkpointer"),
        "header": (store, "_write_atomically"),
    }
    owner, name = targets[step]
    before, calls = getattr(owner, name), []

    def write(*args):
        calls.append(1)
        # Draws are written first in the fourth segment, the others with the first checkpoint.
        if len(calls) == (2 if step == "draws" else 5):
            if step == "draws":
                before(args[0], jax.tree.map(lambda x: 0 * x, args[1]), args[2])
            raise KeyboardInterrupt
        return before(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, write)
        with pytest.raises(KeyboardInterrupt):
            run(mcmc_of(tmp_path))
    assert_same_bits(resume(tmp_path), whole[1])


@slow
@pytest.mark.parametrize("kernel_class", KERNELS)
def test_every_kernel(kernel_class, tmp_path, monkeypatch):
    kernel = kernel_of(kernel_class)
    expected = outcome(run(mcmc_of(tmp_path / "whole", kernel)))
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            run(mcmc_of(tmp_path / "killed", kernel))
    assert_same_bits(resume(tmp_path / "killed", kernel_of(kernel_class)), expected)


@ignore_donation
@slow
@pytest.mark.parametrize("method", ["sequential", jax.vmap, "one chain"])
def test_every_chain_method(method, tmp_path, monkeypatch):
    settings = {"num_chains": 1} if method == "one chain" else {"chain_method": method}
    expected = run(mcmc_of(tmp_path / "whole", **settings))
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            run(mcmc_of(tmp_path / "killed", **settings))
    assert_same_bits(resume(tmp_path / "killed", **settings), outcome(expected))


def test_rows_on_the_host(tmp_path, monkeypatch):
    """The rows read ahead are a part of the state; other values are other data."""
    data = [HostArray(x, name=n) for n, x in DATA._asdict().items()]
    kernel = kernel_of()
    whole, killed = (mcmc_of(tmp_path / name, kernel) for name in ("whole", "killed"))
    whole.run(jax.random.key(1), *data, batch_size=40)
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            killed.run(jax.random.key(1), *data, batch_size=40)
    resumed = mcmc_of(tmp_path / "killed", kernel_of())
    resumed.resume(*data, batch_size=40)
    assert_same_bits(resumed, outcome(whole))
    others = [HostArray(x.copy()) for x in DATA]
    others[0]._source[7] += 1
    for host, name in zip(others, DATA._fields, strict=True):
        host.name = name
    with pytest.raises(ValueError, match=r"data HostArray\('X'"):
        mcmc_of(tmp_path / "killed", kernel_of()).resume(*others, batch_size=40)


ON_TWO_DEVICES = """
import sys
import jax
import test_checkpoint as t

folder, patch = t.Path(sys.argv[1] if len(sys.argv) > 1 else {folder!r}), t.pytest.MonkeyPatch()
parallel = dict(chain_method="parallel")
expected = t.outcome(t.run(t.mcmc_of(folder / "whole", **parallel)))
with patch.context() as p:
    t.end_at(p, 12, t.kill)
    with t.pytest.raises(t.Killed):
        t.run(t.mcmc_of(folder / "killed", **parallel))
mcmc = t.resume(folder / "killed", **parallel)
assert mcmc.chain_method == "parallel"
t.assert_same_bits(mcmc, expected)
print("the same")
"""


@slow
def test_parallel_chains(tmp_path):
    assert "the same" in run_on_two_devices(ON_TWO_DEVICES.format(folder=str(tmp_path)))


@slow
@pytest.mark.parametrize(
    "settings",
    [
        {"step_size": Polynomial(0.2, 0.5)},
        {"gradient": "plain", "noise_compensation": True},
        {"gradient": "second_order_control_variate", "minibatch": "epoch"},
        {"step_size": None, "num_steps": 40},
    ],
    ids=["schedule", "compensated", "second order", "adapted"],
)
def test_what_else_a_state_holds(settings, tmp_path, monkeypatch):
    kernel = kernel_of(**settings)
    whole = run(mcmc_of(tmp_path / "whole", kernel), extra_fields=("weight", "z.rate"))
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            run(mcmc_of(tmp_path / "killed", kernel), extra_fields=("weight", "z.rate"))
    mcmc = resume(tmp_path / "killed", kernel_of(**settings))
    assert_same_bits(mcmc, outcome(whole))
    assert {"weight", "z.rate", "diverging"} == set(mcmc.get_extra_fields())
    weights = np.asarray(mcmc.get_extra_fields()["weight"], np.float64)
    mean = np.average(np.asarray(mcmc.get_samples()["rate"], np.float64), weights=weights)
    np.testing.assert_allclose(mcmc.running_mean()["rate"], mean, rtol=1e-6)


@slow
@pytest.mark.parametrize("start", [jnp.zeros(3), (jnp.zeros(()), [jnp.zeros(2)])])
def test_potential_fn(start, tmp_path):
    def potential(z):
        return sum(jnp.square(x).sum() for x in jax.tree.leaves(z)) / 2

    def make():
        return mcmc_of(
            tmp_path,
            SGHMCSplit(potential_fn=potential, num_steps=1, step_size=0.2),
            num_chains=1,
        )

    mcmc = make()
    mcmc.run(jax.random.PRNGKey(0), init_params=start)
    again = make()
    again.resume()
    assert jax.tree.structure(again.get_samples()) == jax.tree.structure(start)
    assert_same_bits(again, outcome(mcmc))


# What is damaged


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def newest(folder):
    return max((folder / "checkpoints").iterdir())


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
    with pytest.raises(ImportError, match=rf"{module}: pip install 'numpyro-sgmcmc\[checkpoint\]'"):
        run(mcmc)


def test_imports_nothing_that_is_extra():
    code = (
        "import sys, numpyro_sgmcmc;"
        "assert not {'zarr', 'orbax.checkpoint', 'arviz', 'xarray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# What ends a run in good order


@pytest.mark.parametrize(
    "step", ["draws", pytest.param("state", marks=slow), pytest.param("header", marks=slow)]
)
def test_full_disk(whole, tmp_path, monkeypatch, step):
    targets = {
        "draws": (DrawsOnDisk, "write"),
        "state": (store, "_checkpointer"),
        "header": (store, "_write_atomically"),
    }
    owner, name = targets[step]
    before, calls = getattr(owner, name), []

    def write(*args):
        calls.append(1)
        if len(calls) == (2 if step == "draws" else 5):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return before(*args)

    mcmc = mcmc_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, write)
        with pytest.raises(
            RuntimeError, match=r"No space left on device.*2 draws a chain are safe"
        ):
            run(mcmc)
    assert mcmc.get_samples(True)["beta"].shape == (2, 2, 2)
    assert open_draws(tmp_path)["posterior"].sizes["draw"] == 2
    assert_same_bits(resume(tmp_path), whole[1])


@pytest.mark.parametrize(("iteration", "draws"), [pytest.param(3, 0, marks=slow), (13, 3)])
def test_ctrl_c(whole, tmp_path, monkeypatch, iteration, draws):
    mcmc = mcmc_of(tmp_path)
    with monkeypatch.context() as patch:
        end_at(patch, iteration, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.warns(UserWarning, match=f"Ctrl-C after {draws} of 6 draws.*`resume`"):
            run(mcmc)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if draws:
        found, expected = mcmc.get_samples(True), whole[2].get_samples(True)
        np.testing.assert_array_equal(found["beta"], expected["beta"][:, :draws])
        assert bias_report(mcmc).num_draws == 2 * draws
    else:
        with pytest.raises(RuntimeError, match="no draws yet"):
            mcmc.get_samples()
    mcmc.resume(*DATA, batch_size=40)
    assert_same_bits(mcmc, whole[1])


@slow
def test_second_ctrl_c(whole, tmp_path, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    mcmc = mcmc_of(tmp_path)
    with monkeypatch.context() as patch:
        end_at(patch, 13, twice)
        with pytest.raises(KeyboardInterrupt):
            run(mcmc)
    expected = whole[2].get_samples(True)["beta"][:, :2]
    np.testing.assert_array_equal(mcmc.get_samples(True)["beta"], expected)


CHILD = """
import sys
import test_checkpoint as t

mcmc = t.mcmc_of(sys.argv[1], num_samples=4013, checkpoint_every=100)
if mcmc.has_checkpoint:
    mcmc.resume(*t.DATA, batch_size=40)
else:
    t.run(mcmc)
"""


@slow
def test_killed_in_earnest(tmp_path):
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-c", CHILD]
    subprocess.run([*command, str(tmp_path / "whole")], env=environment, check=True)
    for kill_at in (3, 12, 30):
        child = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment)
        while child.poll() is None:
            done = [int(p.name) for p in (tmp_path / "killed").glob("checkpoints/*")]
            if done and max(done) >= 100 * kill_at:
                child.kill()
            time.sleep(0.01)
        assert child.returncode == -signal.SIGKILL
    settings = {"num_samples": 4013, "checkpoint_every": 100}
    whole, resumed = (mcmc_of(tmp_path / n, **settings) for n in ("whole", "killed"))
    whole.resume(*DATA, batch_size=40)
    resumed.resume(*DATA, batch_size=40)
    assert_same_bits(resumed, outcome(whole))


# What can be read


def test_draws_open_lazily(whole):
    found = open_draws(whole[0])
    beta = found["posterior"]["beta"]
    assert beta.dims == ("chain", "draw", "beta_dim_0")
    assert not beta.variable._in_memory
    assert isinstance(found, az.InferenceData if az.__version__ < "1" else object)
    draws = whole[2].get_samples(True)
    for name in draws:
        np.testing.assert_array_equal(found["posterior"][name].values, draws[name])
    assert found["sample_stats"]["diverging"].dtype == bool
    summary = az.summary(found)
    assert {"beta[0]", "rate"} <= set(summary.index)


def test_diagnostics_after_a_resume(whole, capsys):
    mcmc = resume(whole[0])
    print_summary(mcmc)
    assert "rate" in capsys.readouterr().out
    assert str(bias_report(mcmc)) == str(bias_report(whole[2]))
    assert bias_report(mcmc, full_data=True).num_draws == 12
    data = az.from_numpyro(mcmc, log_likelihood=False)
    np.testing.assert_array_equal(data["posterior"]["rate"], whole[2].get_samples(True)["rate"])


def test_running_moments(whole, tmp_path):
    mcmc = run(mcmc_of(tmp_path, keep_draws=False))
    for name, draws in whole[2].get_samples(True).items():
        x = np.asarray(draws, np.float64)
        for axes, by_chain in (((0, 1), False), (1, True)):
            mean, variance = mcmc.running_mean(by_chain), mcmc.running_variance(by_chain)
            np.testing.assert_allclose(mean[name], x.mean(axes), rtol=1e-12)
            np.testing.assert_allclose(variance[name], x.var(axes), rtol=1e-9)
    assert list(open_draws(tmp_path).children if az.__version__ > "1" else ["sample_stats"]) == [
        "sample_stats"
    ]
    assert mcmc.get_extra_fields()["diverging"].shape == (12,)
    assert bias_report(mcmc).num_draws == 12
    with pytest.raises(RuntimeError, match="`running_mean` and `running_variance` are there"):
        mcmc.get_samples()
    with pytest.raises(RuntimeError, match="`print_summary` needs the draws"):
        mcmc.print_summary()


def test_running_moments_do_not_depend_on_segments():
    rng = np.random.default_rng(0)
    draws = {"a": rng.normal(3, 2, (2, 20, 3)).astype(np.float32)}
    weights = rng.integers(0, 3, (2, 20)).astype(float)
    once = RunningMoments.zeros(draws).add(draws, weights)
    pieces = RunningMoments.zeros(draws)
    for part in (slice(0, 1), slice(1, 7), slice(7, 7), slice(7, 20)):
        pieces = pieces.add({"a": draws["a"][:, part]}, weights[:, part])
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b)
    mean, variance = once.pooled()
    x, w = np.float64(draws["a"]).reshape(40, 3), weights.ravel()
    np.testing.assert_allclose(mean["a"], np.average(x, 0, w))
    np.testing.assert_allclose(variance["a"], np.average((x - mean["a"]) ** 2, 0, w))


def test_progress(whole, copy, capsys, monkeypatch):
    (newest(copy) / "checkpoint.json").unlink()  # a segment is left to do
    mcmc = mcmc_of(copy)
    mcmc.progress_bar = True
    mcmc.resume(*DATA, batch_size=40)
    shown = capsys.readouterr().err
    for text in ("sample", "step size 0.2", "temperature", "ESS", "19/19"):
        assert text in shown
    assert_same_bits(mcmc, whole[1])


# The parts


def test_codec_keeps_types_and_bits():
    tree = {
        "a": (1, 2.5, float("inf"), None, True, "x"),
        "b": [jnp.arange(3), np.float32(0.1), np.arange(2.0), jnp.zeros((0, 2))],
        "typed": jax.random.key(3, impl="rbg"),
        "raw": jax.random.PRNGKey(3),
        "stream": StreamState(*range(len(StreamState._fields))),
    }
    arrays = []
    found = decode(json.loads(json.dumps(encode(tree, arrays))), arrays)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["a"] == tree["a"]
    assert found["typed"].dtype == tree["typed"].dtype
    for a, b in zip(jax.tree.leaves(found["b"]), jax.tree.leaves(tree["b"]), strict=True):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match="A set cannot be kept"):
        encode({"a": {1}}, [])


class Prior:
    """A model with a setting of its own."""

    def __init__(self, sd):
        self.sd = sd

    def __call__(self):
        return self.model()

    def model(self):
        return dist.Normal(0, self.sd)


def test_description_tells_functions_apart():
    def scaled(factor):
        return lambda x: factor * x

    assert describe(scaled(2)) == describe(scaled(2))
    assert describe(scaled(2)) != describe(scaled(3))
    assert describe(lambda x: x + 1) != describe(lambda x: x + 2)
    assert describe(Polynomial(0.1, 0.3)) != describe(Polynomial(0.1, 0.4))
    assert describe(np.zeros(3)) != describe(np.ones(3))
    alike = scaled(SimpleNamespace(a=1)), scaled(SimpleNamespace(a=1))
    assert describe(alike[0]) == describe(alike[1])
    assert describe(scaled(SimpleNamespace(a=1))) != describe(scaled(SimpleNamespace(a=2)))
    assert describe(scaled(dist.Normal(1, 2))) != describe(scaled(dist.Normal(2, 1)))
    assert describe(scaled(jax.jit(scaled(1)))) != describe(scaled(jax.jit(scaled(2))))
    assert describe(Prior(1)) != describe(Prior(2))
    assert describe(Prior(1).model) != describe(Prior(2).model)
    assert describe(handlers.scale(survey, 1.0)) != describe(handlers.scale(survey, 2.0))
    config = [{"beta": LocScaleReparam(c)} for c in (0.0, 0.5)]
    assert describe(handlers.reparam(survey, config[0])) != describe(
        handlers.reparam(survey, config[1])
    )
    used = dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2))
    before = describe(used)
    assert used.precision_matrix.shape == (2, 2)
    assert describe(used) == before
    big = np.zeros((2**20, 9))
    other = big.copy()
    other[-1, 3] = 1.0
    assert describe(big) != describe(other)


def test_is_an_mcmc(whole):
    assert isinstance(whole[2], MCMC)
