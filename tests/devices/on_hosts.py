"""Checks of sharded rows on the host, for four devices: one function per check."""

import itertools
import tempfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from jax.sharding import Mesh
from numpyro.infer import MCMC, init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc import (
    CheckpointedMCMC,
    HostArray,
    SGHMCSplit,
    ShardedArray,
    bias_report,
    log_likelihood,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import assert_posterior
from tests.data.host_rows import Source
from tests.devices.sharded import (
    DIM,
    LAYOUTS,
    UNEVEN,
    assert_close,
    assert_hierarchy_has_the_fit_of_one_device,
    count_step_collectives,
    fit_known_noise,
    make_mesh,
    positions,
    regression,
    shard,
    table,
    uneven_regression,
)

# Everything that a warm-up adapts.
GIVEN = {"inverse_mass_matrix": np.full(8, 1e-3), "step_size": 0.1, "num_steps": 3}
COUNTS = (100, 400, 300, 200)


def on_host(x, counts, mesh=None):
    return ShardedArray(HostArray(x), mesh or make_mesh(len(counts)), counts=counts)


def mcmc_of(kind=MCMC, num_samples=40, **options):
    options = {
        "gradient_estimator": "control_variate",
        "subsampling": "contiguous",
        **GIVEN,
        **options,
    }
    settings = {} if kind is MCMC else {"checkpoint": options.pop("checkpoint")}
    return kind(
        SGHMCSplit(regression, **options),
        num_warmup=5,
        num_samples=num_samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
        **settings,
    )


def run(mcmc, X, y):
    start = {"beta": np.zeros((2, DIM)), "sigma": np.zeros(2), "level": np.zeros((2, 4))}
    group = table(1000)[2]
    mcmc.run(random.key(0), X, y, group, 0.1, batch_size=20, init_params=start)
    return mcmc


def draws(mcmc):
    return np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])


def assert_values_are_those_of_rows_on_devices(counts):
    X, y, group = table(sum(counts))
    keywords = {"batch_size": 8}
    rows = np.concatenate([n + np.array([0, 1]) for n in np.cumsum((0, *counts[:-1]))])
    results = []
    for given in (shard, on_host):
        arguments = Arguments((given(X, counts), given(y, counts), group, 0.1), keywords)
        potential = make_model_potential(regression, arguments, init_to_uniform)
        q, vectors = positions(potential.dim), positions(potential.dim, 2)

        @jax.jit
        def values(q, arguments, potential=potential, vectors=vectors):
            def of_minibatch(q):
                return potential.value_and_grad(q, {"rows": rows}, arguments)

            return (
                jax.vmap(of_minibatch)(q),
                potential.full_value_grad_hessian(q[0], arguments),
                potential.full_value(q[0], arguments),
                potential.full_gradient(q[0], arguments),
                potential.full_hessian_products(q[0], vectors, arguments),
            )

        results.append(jax.tree.leaves(values(q, arguments)))
    for on_devices, on_hosts in zip(*results, strict=True):
        np.testing.assert_array_equal(on_devices, on_hosts)


def check_potential_of_uneven_rows_on_hosts_has_the_values_of_rows_on_devices():
    assert_values_are_those_of_rows_on_devices(LAYOUTS["uneven"])


def check_potential_of_even_rows_on_hosts_has_the_values_of_rows_on_devices():
    assert_values_are_those_of_rows_on_devices((15,) * 4)


def check_gradient_of_rows_on_hosts_is_unbiased():
    counts = (2, 5, 3, 4)
    X, y, group = table(sum(counts))
    arguments = Arguments((on_host(X, counts), on_host(y, counts), group, 0.1), {"batch_size": 4})
    potential = make_model_potential(regression, arguments, init_to_uniform)
    q = positions(potential.dim)[0]
    firsts = np.cumsum((0, *counts[:-1]))
    every = np.array(list(itertools.product(*[range(n) for n in counts]))) + firsts
    one = jax.jit(lambda rows: potential.gradient(q, {"rows": rows}, arguments))
    mean = np.mean([np.asarray(one(rows.astype(np.int32))) for rows in every], 0)

    def exact(q):
        args = tuple(jnp.asarray(a) for a in (X, y, group, 0.1))
        return potential_energy(regression, args, {}, potential.unravel(q))

    assert_close(mean, jax.grad(exact)(q))


def check_rows_on_hosts_have_the_draws_of_rows_on_devices():
    X, y, _ = table(1000)
    for options in ({}, {"gradient_estimator": "minibatch", "subsampling": "palindrome"}):
        expected = draws(run(mcmc_of(**options), shard(X, COUNTS), shard(y, COUNTS)))
        assert np.unique(expected, axis=1).shape == expected.shape
        mcmc = run(mcmc_of(**options), on_host(X, COUNTS), on_host(y, COUNTS))
        np.testing.assert_array_equal(draws(mcmc), expected)
    # One array on hosts, the other on devices.
    mcmc = run(mcmc_of(**options), on_host(X, COUNTS), shard(y, COUNTS))
    np.testing.assert_array_equal(draws(mcmc), expected)


def check_blocks_of_rows_are_prefetched_on_a_separate_thread():
    X, y, group = table(1000)
    source = Source(X)
    arguments = (on_host(source, COUNTS), on_host(y, COUNTS), group, 0.1)
    mcmc = run(mcmc_of(), *arguments[:2])
    # Parts of four devices, 64 iterations of three steps; no device reads rows of another.
    block = 2 * 64 * 3 * 20 // 4
    assert source.read_sizes.count(block) == 8
    ahead = [t for n, t in zip(source.read_sizes, source.threads, strict=True) if n == block]
    assert sum(t.startswith("numpyro_sgmcmc-reader") for t in ahead) == 4
    assert 2 * 20 // 4 not in source.read_sizes, "a step has read its rows itself"
    # One sum over devices for the gradient, and one per block for errors.
    assert count_step_collectives(mcmc, arguments) == {"all-reduce": 2}


def check_rows_on_hosts_with_a_chain_axis_have_the_draws_of_rows_on_devices():
    X, y, _ = table(1000)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "chains"))
    spread_over = [ShardedArray(x, mesh) for x in (X, y)]
    expected = draws(run(mcmc_of(), *spread_over))
    given = [ShardedArray(HostArray(x), mesh) for x in (X, y)]
    np.testing.assert_array_equal(draws(run(mcmc_of(), *given)), expected)


def check_failing_source_raises_on_all_devices():
    X, y, _ = table(1000)
    is_lost = threading.Event()

    def answer(array, rows):
        # A row of the second device; a read of all rows is none of a device.
        if is_lost.is_set() and len(rows) != 1000 and 450 in rows:
            raise OSError("no such block")
        return array[rows]

    source = HostArray(Source(X, answer), name="X")
    given = ShardedArray(source, make_mesh(4), counts=COUNTS), on_host(y, COUNTS)
    is_lost.set()
    with pytest.raises(RuntimeError, match=r"^HostArray\('X'.*no such block"):
        run(mcmc_of(), *given)
    is_lost.clear()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        mcmc = mcmc_of(CheckpointedMCMC, 200, checkpoint=Path(folder) / "run")
        keep = CheckpointedMCMC._save_checkpoint

        def keep_and_lose(self, checkpoint):
            written = keep(self, checkpoint)
            if checkpoint.num_draws == 100:  # rows are there up to iteration 192
                is_lost.set()
            return written

        patch.setattr(CheckpointedMCMC, "_save_checkpoint", keep_and_lose)
        with pytest.raises(RuntimeError, match=r"^HostArray\('X'.*no such block"):
            run(mcmc, *given)
        assert 100 <= draws(mcmc).shape[1] < 200
        is_lost.clear()
        patch.undo()
        mcmc.resume(*given, table(1000)[2], 0.1, batch_size=20)
        whole = mcmc_of(CheckpointedMCMC, 200, checkpoint=Path(folder) / "whole")
        expected = run(whole, *given)
        np.testing.assert_array_equal(draws(mcmc), draws(expected))


def check_posterior_of_rows_on_hosts_is_exact():
    """The rows are in memory maps."""
    X, y, mean, sd = uneven_regression()
    with tempfile.TemporaryDirectory() as folder:
        given = []
        for name, x in (("X", X), ("y", y)):
            np.save(Path(folder) / name, x)
            rows = np.load(Path(folder) / f"{name}.npy", mmap_mode="r")
            given.append(on_host(rows, UNEVEN))
        mcmc = fit_known_noise(*given)
        assert_posterior(mcmc.get_samples(group_by_chain=True)["beta"], mean, sd)
        assert "beta" in str(bias_report(mcmc, full_data=True))
        rows = np.array([5, 150, 2000, 2999])
        values = log_likelihood(mcmc, rows)["y"]
        beta = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
        expected = dist.Normal(beta @ X[rows].T, 1).log_prob(y[rows])
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


def check_hierarchy_of_rows_on_hosts_has_the_fit_of_one_device():
    mesh = make_mesh(4)
    assert_hierarchy_has_the_fit_of_one_device(lambda x: ShardedArray(HostArray(x), mesh))
