"""A run that is killed and resumed is bitwise equal to an uninterrupted one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import HostArray, SGHMCSplit
from numpyro_sgmcmc.checkpoint import store
from numpyro_sgmcmc.checkpoint.store import encode
from numpyro_sgmcmc.errors import DataReadError
from numpyro_sgmcmc.sampling.schedules import Polynomial
from tests.adaptation import counts
from tests.checkpoint.runs import (
    DATA,
    KERNEL,
    SETTINGS,
    Killed,
    assert_bitwise_equal,
    end_at,
    fail_writing,
    kernel_of,
    kill,
    mcmc_of,
    outcome,
    resume,
    run,
    slow,
)
from tests.contract.kernels import KERNELS, ignore_donation, quietly


@pytest.mark.parametrize("method", [pytest.param("sequential", marks=slow), "vectorized"])
def test_checkpointed_mcmc_gives_the_draws_of_mcmc(whole, method, tmp_path):
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
def test_run_killed_at_every_checkpoint_is_resumed_bitwise(whole, tmp_path, monkeypatch):
    write, kills = store.CheckpointStore.write, 0

    def write_and_die(self, checkpoint, is_writer):
        written = write(self, checkpoint, is_writer)
        if checkpoint.num_iterations < 19:
            raise KeyboardInterrupt  # no handler treats it as a full disk
        return written

    monkeypatch.setattr(store.CheckpointStore, "write", write_and_die)
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
    assert_bitwise_equal(mcmc, whole[1])


@pytest.mark.parametrize(
    "iteration", [pytest.param(2, marks=slow), 9, pytest.param(17, marks=slow)]
)
def test_run_killed_inside_a_segment_is_resumed_bitwise(whole, tmp_path, monkeypatch, iteration):
    with monkeypatch.context() as patch:
        end_at(patch, iteration, kill)
        with pytest.raises(Killed):
            run(mcmc_of(tmp_path))
    assert_bitwise_equal(resume(tmp_path), whole[1])
    assert_bitwise_equal(resume(tmp_path), whole[1])  # complete: it is read only


@slow
@pytest.mark.parametrize("step", ["draws", "state", "manifest"])
def test_run_killed_while_writing_is_resumed_bitwise(whole, tmp_path, monkeypatch, step):
    with monkeypatch.context() as patch:
        fail_writing(patch, step, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(mcmc_of(tmp_path))
    assert_bitwise_equal(resume(tmp_path), whole[1])


@slow
@pytest.mark.parametrize("kernel_class", KERNELS)
def test_run_of_every_kernel_is_resumed_bitwise(kernel_class, tmp_path, monkeypatch):
    kernel = kernel_of(kernel_class)
    expected = outcome(run(mcmc_of(tmp_path / "whole", kernel)))
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            run(mcmc_of(tmp_path / "killed", kernel))
    assert_bitwise_equal(resume(tmp_path / "killed", kernel_of(kernel_class)), expected)


@ignore_donation
@slow
@pytest.mark.parametrize("method", ["sequential", jax.vmap, "one chain"])
def test_run_by_every_chain_method_is_resumed_bitwise(method, tmp_path, monkeypatch):
    settings = {"num_chains": 1} if method == "one chain" else {"chain_method": method}
    expected = run(mcmc_of(tmp_path / "whole", **settings))
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            run(mcmc_of(tmp_path / "killed", **settings))
    assert_bitwise_equal(resume(tmp_path / "killed", **settings), outcome(expected))


@pytest.mark.slow
def test_run_on_host_arrays_is_resumed_bitwise(tmp_path, monkeypatch):
    """Prefetched rows are a part of the state; changed values are other data."""
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
    assert_bitwise_equal(resumed, outcome(whole))
    renamed = mcmc_of(tmp_path / "killed", kernel_of())
    renamed.resume(*[HostArray(x, name="renamed") for x in DATA], batch_size=40)
    others = [HostArray(x.copy()) for x in DATA]
    others[0].source[7] += 1
    with pytest.raises(ValueError, match=r"HostArray `X` was"):
        mcmc_of(tmp_path / "killed", kernel_of()).resume(*others, batch_size=40)


@slow
@pytest.mark.parametrize("is_resumed", [False, True])
def test_source_failing_while_sampling_raises_and_can_be_resumed(tmp_path, is_resumed):
    """With its message and the draws up to the last checkpoint; an intact source continues."""
    # Rows are read once for 64 iterations, and ahead for as many.
    settings = {"num_samples": 413, "checkpoint_every": 10}

    class Failing:
        shape, dtype = DATA.y.shape, DATA.y.dtype

        def __getitem__(self, rows):
            paths = (tmp_path / "broken" / "checkpoints").glob("*")
            if any(int(step.name.partition(".")[0]) > 10 for step in paths):
                raise OSError("disk on fire")
            return DATA.y[rows]

    broken = mcmc_of(tmp_path / "broken", **settings)
    data = HostArray(DATA.X), HostArray(Failing(), name="y"), HostArray(DATA.counts)
    with pytest.raises(DataReadError, match=r"HostArray\('y', .*: OSError: disk on fire"):
        broken.run(jax.random.key(1), *data, batch_size=40)
    assert 0 < broken.get_samples(True)["beta"].shape[1] < 206
    if is_resumed:
        again, whole = (mcmc_of(tmp_path / name, **settings) for name in ("broken", "whole"))
        again.resume(*map(HostArray, DATA), batch_size=40)
        whole.run(jax.random.key(1), *map(HostArray, DATA), batch_size=40)
        assert_bitwise_equal(again, outcome(whole))


@slow
@pytest.mark.parametrize(
    "settings",
    [
        {"step_size": Polynomial(0.2, 0.5)},
        {"gradient_estimator": "minibatch", "noise_compensation": True},
        {"gradient_estimator": "second_order_control_variate", "subsampling": "palindrome"},
        {"step_size": None, "num_steps": 40},
    ],
    ids=["schedule", "compensated", "second order", "adapted"],
)
def test_run_with_other_options_is_resumed_bitwise(settings, tmp_path, monkeypatch):
    kernel = kernel_of(**settings)
    whole = run(mcmc_of(tmp_path / "whole", kernel), extra_fields=("weight", "z.rate"))
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            run(mcmc_of(tmp_path / "killed", kernel), extra_fields=("weight", "z.rate"))
    mcmc = resume(tmp_path / "killed", kernel_of(**settings))
    assert_bitwise_equal(mcmc, outcome(whole))
    assert {"weight", "z.rate", "diverging"} == set(mcmc.get_extra_fields())
    weights = np.asarray(mcmc.get_extra_fields()["weight"], np.float64)
    mean = np.average(np.asarray(mcmc.get_samples()["rate"], np.float64), weights=weights)
    np.testing.assert_allclose(mcmc.running_mean()["rate"], mean, rtol=1e-6)


@slow
@pytest.mark.parametrize("start", [jnp.zeros(3), (jnp.zeros(()), [jnp.zeros(2)])])
def test_run_of_a_potential_fn_is_read_bitwise(start, tmp_path):
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
    assert_bitwise_equal(again, outcome(mcmc))


@slow
def test_run_with_a_low_rank_preconditioner_is_resumed_bitwise(tmp_path, monkeypatch):
    """From 100 parameters on, a few directions of a low-rank preconditioner are in the state."""
    inverse = jnp.eye(120) - 0.98 * jnp.full((120, 120), 1 / 120)

    def potential(z):
        return z @ inverse @ z / 2

    def make(folder):
        return mcmc_of(folder, SGHMCSplit(potential_fn=potential, num_steps=2), num_chains=1)

    whole = make(tmp_path / "whole")
    whole.run(jax.random.PRNGKey(0), init_params=jnp.zeros(120))
    assert whole.last_state.adapt_state.preconditioner.low_rank is not None
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            make(tmp_path / "killed").run(jax.random.PRNGKey(0), init_params=jnp.zeros(120))
    again = make(tmp_path / "killed")
    again.resume()
    assert_bitwise_equal(again, outcome(whole))


@slow
def test_run_of_a_hierarchy_is_resumed_bitwise(tmp_path, monkeypatch):
    """The Hessian of effects by group, their third derivatives and coordinates are in the state."""
    data = tuple(map(jnp.asarray, counts.make_data()))
    kernel = SGHMCSplit(counts.model, num_steps=2)
    whole = mcmc_of(tmp_path / "whole", kernel)
    whole.run(jax.random.key(1), *data, batch_size=160)
    preconditioner = whole.last_state.adapt_state.preconditioner
    assert preconditioner.is_block_arrow
    assert preconditioner.reference_hessian.third_derivatives is not None
    assert whole.sampler.adaptation.included_rows
    with monkeypatch.context() as patch:
        end_at(patch, 12, kill)
        with pytest.raises(Killed):
            mcmc_of(tmp_path / "killed", kernel).run(jax.random.key(1), *data, batch_size=160)
    resumed = mcmc_of(tmp_path / "killed", SGHMCSplit(counts.model, num_steps=2))
    resumed.resume(*data, batch_size=160)
    assert_bitwise_equal(resumed, outcome(whole))
