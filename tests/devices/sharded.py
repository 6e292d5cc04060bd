"""Checks of rows sharded over four devices: one function per check."""

import itertools
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import MCMC, init_to_uniform, init_to_value
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc import SGHMCSplit, ShardedArray, bias_report, train_weights
from numpyro_sgmcmc.adaptation.batched_gradients import sample_minibatch_indices, sample_subset
from numpyro_sgmcmc.adaptation.hierarchical_fit import fit_hierarchy_from_each
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import (
    SUBSAMPLINGS,
    ContiguousSubsampling,
    IIDSubsampling,
    Plate,
    StreamState,
    init_stream,
    sample_independent_minibatch,
    sample_minibatches,
)
from numpyro_sgmcmc.errors import MultimodalPosteriorWarning
from numpyro_sgmcmc.model.block_arrow import find_block_arrow_layout
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS, make_gradient_fn
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.adaptation.inputs import make_inputs
from tests.contract.kernels import assert_posterior

N, DIM = 61, 3
LAYOUTS = {
    "even": (16, 15, 15, 15),
    "uneven": (2, 30, 9, 20),
}


def regression(X, y, group, offset, batch_size=None):
    """Sharded rows, an array that all devices have, and another plate."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        mean = X[i] @ beta + level[group[i]] + offset
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y[i])


def table(num=N, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, DIM)).astype(np.float32)
    y = (X @ np.array([1.0, -0.5, 0.2]) + rng.normal(size=num)).astype(np.float32)
    return X, y, rng.integers(0, 4, num)


def make_mesh(num):
    return Mesh(np.array(jax.devices()[:num]), ("rows",))


def shard(x, counts):
    return ShardedArray(x, make_mesh(len(counts)), counts=counts)


def make_potential(counts, batch_size=8):
    """Return the potential of sharded rows, its arguments, and NumPyro's potential on all rows."""
    X, y, group = table(sum(counts))
    keywords = {"batch_size": batch_size}
    sharded = Arguments((shard(X, counts), shard(y, counts), group, 0.1), keywords)
    potential = make_model_potential(regression, sharded, init_to_uniform)

    def exact(q):
        args = tuple(jnp.asarray(a) for a in (X, y, group, 0.1))
        return potential_energy(regression, args, {}, potential.unravel(q))

    return potential, sharded, exact


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4)


def positions(dim, num=3):
    return np.random.default_rng(1).normal(size=(num, dim)).astype(np.float32)


def check_potential_on_uneven_shards_has_the_values_of_one_device():
    potential, arguments, exact = make_potential(LAYOUTS["uneven"])
    q = positions(potential.dim)[0]
    evaluate = jax.jit(lambda q, a: (potential.full_value(q, a), potential.full_gradient(q, a)))
    for value, one in zip(evaluate(q, arguments), jax.value_and_grad(exact)(q), strict=True):
        assert_close(value, one)


def assert_passes_over_all_rows_are_those_of_one_device(counts):
    potential, arguments, exact = make_potential(counts)
    q, vectors = positions(potential.dim)[0], positions(potential.dim, 2)

    @jax.jit
    def passes(q, arguments):
        return (
            *potential.full_value_grad_hessian(q, arguments),
            potential.full_value(q, arguments),
            potential.full_gradient(q, arguments),
            jax.grad(potential.full_value)(q, arguments),
            potential.full_hessian_products(q, vectors, arguments),
        )

    value, gradient, hessian = exact(q), jax.grad(exact)(q), jax.hessian(exact)(q)
    expected = (value, gradient, hessian, value, gradient, gradient, vectors @ hessian)
    for value, one in zip(passes(q, arguments), expected, strict=True):
        assert_close(value, one)


def check_passes_over_uneven_shards_give_the_values_of_one_device():
    assert_passes_over_all_rows_are_those_of_one_device(LAYOUTS["uneven"])


def check_passes_over_even_shards_give_the_values_of_one_device():
    assert_passes_over_all_rows_are_those_of_one_device(LAYOUTS["even"])


def check_losses_of_a_training_epoch_on_shards_have_the_mean_of_all_rows():
    counts = (16, 16, 16, 16)
    potential, arguments, exact = make_potential(counts, 16)
    q = positions(potential.dim)[0]
    start = potential.constrain(potential.unravel(q), arguments)
    trained = train_weights(
        regression,
        random.key(0),
        *arguments.args,
        num_train_steps=4,
        optimizer=optax.sgd(0.0),
        init_strategy=init_to_value(values=start),
        progress_bar=False,
        batch_size=16,
    )
    assert np.std(trained.losses) > 0.1
    assert_close(np.mean(trained.losses), exact(q))


def check_gradient_on_shards_of_any_size_is_unbiased():
    counts = (2, 5, 3, 4)
    potential, arguments, exact = make_potential(counts, 4)
    q = positions(potential.dim)[0]
    firsts = np.cumsum((0, *counts[:-1]))
    every = np.array(list(itertools.product(*[range(n) for n in counts]))) + firsts
    one = jax.jit(lambda rows: potential.gradient(q, {"rows": rows}, arguments))
    # One after the other: two programs at once deadlock on devices that are threads.
    mean = np.mean([np.asarray(one(rows.astype(np.int32))) for rows in every], 0)
    assert_close(mean, jax.grad(exact)(q))


def check_gradient_on_even_shards_is_that_of_one_device():
    counts = (15, 15, 15, 15)
    X, y, group = (x[:60] for x in table())
    keywords = {"batch_size": 8}
    sharded = Arguments((shard(X, counts), shard(y, counts), group, 0.1), keywords)
    plain = Arguments((X, y, group, 0.1), keywords)
    of = [make_model_potential(regression, a, init_to_uniform) for a in (sharded, plain)]
    q = positions(of[0].dim)[0]
    rows = {"rows": np.array([3, 9, 20, 15, 44, 31, 45, 59], np.int32)}
    gradients = [jax.jit(t.gradient)(q, rows, a) for t, a in zip(of, (sharded, plain), strict=True)]
    assert_close(*gradients)


def check_gradient_estimators_on_all_rows_are_exact():
    potential, arguments, exact = make_potential((15, 15, 15, 15))
    reference, q = jnp.asarray(positions(potential.dim)[:2])
    _, gradient, hessian = jax.jit(potential.full_value_grad_hessian)(reference, arguments)
    preconditioner = Preconditioner(reference, jnp.ones(potential.dim), gradient, hessian)
    estimators = GRADIENT_ESTIMATORS.values()

    @jax.jit
    def estimate(q, arguments):
        rows = {"rows": jnp.arange(60)}
        make = partial(make_gradient_fn, preconditioner=preconditioner, indices=rows)
        return [make(e, potential, arguments)(q) for e in estimators]

    expected = jax.jit(jax.grad(exact))(reference + q)
    for gradient in estimate(q, arguments):
        assert_close(gradient, expected)


def check_each_shard_samples_its_part_by_the_subsampling_method():
    counts = (8, 40, 12, 20)
    shards = shard(np.zeros(80, np.float32), counts).shards
    firsts = np.cumsum((0, *counts[:-1]))
    plate = Plate("rows", 80, 16, shards)
    for name, subsampling in SUBSAMPLINGS.items():
        state = init_stream(plate, random.key(3))
        draw = jax.jit(partial(sample_minibatches, subsampling, plate), static_argnums=2)
        _, rows = draw(state, random.key(4), 30)
        parts = np.asarray(rows).reshape(30, 4, 4)
        keys = random.split(random.key(4), 4)
        sample = jax.jit(partial(subsampling.sample_indices, num_steps=30, batch_size=4))
        for k, (first, count) in enumerate(zip(firsts, counts, strict=True)):
            begin = StreamState.init(random.split(random.key(3), 4)[k])
            _, expected = sample(begin, keys[k], size=count)
            np.testing.assert_array_equal(parts[:, k] - first, expected, err_msg=name)


def check_minibatches_of_the_warmup_stay_within_shards():
    counts = (2, 30, 9, 20)
    potential, _, _ = make_potential(counts)
    ends = np.cumsum(counts)
    rng = np.random.default_rng(0)
    for subsampling in (IIDSubsampling(), ContiguousSubsampling()):
        rows = sample_minibatch_indices(potential, rng, (50, 6), subsampling)["rows"]
        parts = rows.reshape(50, 6, 4, 2)
        for k, (end, count) in enumerate(zip(ends, counts, strict=True)):
            assert set(np.unique(parts[:, :, k])) == set(range(end - count, end))
    big = potential.plates[0]._replace(size=10**6)
    subset = sample_subset(replace(potential, plates=(big,)))["rows"].reshape(4, -1)
    for part, end, count in zip(subset, ends, counts, strict=True):
        assert set(np.unique(part)) == set(range(end - count, end))
        assert (np.diff(part) >= 0).all()


def count_collectives(fn, *operands):
    """Return how often a compiled function uses each kind of collective."""
    text = jax.jit(fn).lower(*operands).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {k: n for k in kinds if (n := len(re.findall(rf" {k}(?:-start)?\(", text)))}


PAIRS = tuple(zip(SUBSAMPLINGS.values(), itertools.cycle(GRADIENT_ESTIMATORS.values())))


def assert_gradient_uses_one_all_reduce(counts, pairs=PAIRS):
    potential, arguments, _ = make_potential(counts)
    zeros = jnp.zeros(potential.dim)
    preconditioner = Preconditioner(zeros, zeros + 1, zeros, jnp.eye(potential.dim))
    plate = potential.plates[0]
    for subsampling, estimator in pairs:
        draw = partial(sample_minibatches, subsampling, plate)
        of = partial(make_gradient_fn, estimator, potential, preconditioner=preconditioner)

        def steps(q, state, arguments, draw=draw, of=of):
            state, rows = draw(state, random.key(0), 5)

            def step(q, rows):
                return q - 0.01 * of(arguments=arguments, indices={"rows": rows})(q), None

            return lax.scan(step, q, rows)[0], state

        collectives = count_collectives(steps, zeros, init_stream(plate, random.key(0)), arguments)
        assert collectives == {"all-reduce": 1}, (subsampling, collectives)
        fresh = {"rows": sample_independent_minibatch(subsampling, plate, random.key(0))}
        assert count_collectives(potential.gradient, zeros, fresh, arguments) == {"all-reduce": 1}
        assert count_collectives(potential.full_gradient, zeros, arguments) == {"all-reduce": 1}


def check_gradient_on_uneven_shards_uses_one_all_reduce():
    assert_gradient_uses_one_all_reduce(LAYOUTS["uneven"])


def check_gradient_of_contiguous_minibatches_uses_one_all_reduce():
    pairs = [(ContiguousSubsampling(), GRADIENT_ESTIMATORS["control_variate"])]
    counts = LAYOUTS["uneven"]
    assert_gradient_uses_one_all_reduce(counts, pairs)


def check_gradient_on_even_shards_uses_one_all_reduce():
    counts = LAYOUTS["even"]
    assert_gradient_uses_one_all_reduce(counts)


def count_step_collectives(mcmc, arguments):
    """Return the collectives of one iteration of a run."""
    kernel, keywords = mcmc.sampler, {"batch_size": 20}
    return count_collectives(lambda s: kernel.sample(s, arguments, keywords), mcmc.last_state)


def run(arguments, num_chains):
    mcmc = MCMC(
        SGHMCSplit(regression, gradient_estimator="control_variate", step_size=0.1, num_steps=3),
        num_warmup=5,
        num_samples=20,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *arguments, batch_size=20)
    return mcmc


UNEVEN = (100, 1700, 400, 800)


def uneven_regression():
    """Return rows for very uneven shards, and the exact posterior mean and SD with known noise.

    The rows of the small shard differ: equal weights of the shards would give another posterior.
    """
    X, y, _ = table(sum(UNEVEN))
    y[: UNEVEN[0]] += 3.0 * X[: UNEVEN[0], 0]
    precision = np.eye(DIM) + X.T.astype(float) @ X
    mean, sd = np.linalg.solve(precision, X.T @ y), np.sqrt(np.diag(np.linalg.inv(precision)))
    return X, y, mean, sd


def fit_known_noise(*arguments):
    """Return a run of that regression with a complete warm-up."""

    def known_noise(X, y, batch_size=None):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size):
            x = numpyro.subsample(X, event_dim=1)
            numpyro.sample("y", dist.Normal(x @ beta, 1), obs=numpyro.subsample(y, event_dim=0))

    mcmc = MCMC(
        SGHMCSplit(known_noise),
        num_warmup=300,
        num_samples=800,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *arguments, batch_size=100)
    return mcmc


def check_posterior_of_sharded_rows_is_exact():
    X, y, mean, sd = uneven_regression()
    mcmc = fit_known_noise(shard(X, UNEVEN), shard(y, UNEVEN))
    assert_posterior(mcmc.get_samples(group_by_chain=True)["beta"], mean, sd)


def check_another_mode_is_reported():
    """The data determine the square of a parameter, and not its sign."""
    _, y, _ = table(400)

    def two_places(y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 3))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(jnp.square(a), 1), obs=y[i])

    counts = (50, 150, 120, 80)
    mcmc = MCMC(SGHMCSplit(two_places), num_warmup=5, num_samples=5, progress_bar=False)
    with pytest.warns(MultimodalPosteriorWarning, match="mode"):
        mcmc.run(random.key(0), shard(y + 9.0, counts), batch_size=40)


def check_chains_along_a_second_axis_are_the_same_chains():
    X, y, group = table(1000)
    draws = []
    for shape, names in (((2,), ("rows",)), ((2, 2), ("rows", "chains"))):
        mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
        arguments = (ShardedArray(X, mesh), ShardedArray(y, mesh), group, 0.1)
        mcmc = run(arguments, 2)
        draws.append(mcmc.get_samples(group_by_chain=True)["beta"])
        assert count_step_collectives(mcmc, arguments) == {"all-reduce": 1}
    np.testing.assert_allclose(*draws, atol=1e-3)


def check_jax_array_sharded_by_rows_is_converted():
    X, _, _ = table(400)
    mesh = make_mesh(4)
    given = jax.device_put(X, NamedSharding(mesh, PartitionSpec("rows")))
    (converted,) = Arguments((given, X)).sharded_arrays
    assert converted == ShardedArray.from_padded_array(given, ShardedArray(X, mesh).shards, "X")
    one = jax.device_put(X, NamedSharding(make_mesh(1), PartitionSpec("rows")))
    by_columns = jax.device_put(X.T, NamedSharding(mesh, PartitionSpec(None, "rows")))
    assert not Arguments((one, by_columns)).sharded_arrays


def check_numpyro_functions_accept_a_sharded_run():
    X, y, group = table(400)
    counts = (50, 150, 120, 80)
    arguments = (shard(X, counts), shard(y, counts), group, 0.1)
    mcmc = run(arguments, 2)
    samples = mcmc.get_samples()
    assert {k: v.shape for k, v in samples.items()} == {
        "beta": (40, 3),
        "sigma": (40,),
        "level": (40, 4),
    }
    few = {k: v[:5] for k, v in samples.items()}
    values, plain = (
        numpyro.infer.log_likelihood(mcmc.sampler.model, few, *a)["y"]
        for a in (arguments, (X, y, group, 0.1))
    )
    np.testing.assert_allclose(values, plain, rtol=1e-5)
    assert "level" in str(bias_report(mcmc, full_data=True))
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(1), *arguments, batch_size=20)
    assert np.isfinite(mcmc.get_samples()["beta"]).all()


def check_mesh_with_explicit_axes_has_the_values_of_one_without():
    X, y, group = table(60)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    arguments = Arguments((ShardedArray(X, mesh), ShardedArray(y, mesh), group, 0.1))
    potential = make_model_potential(partial(regression, batch_size=8), arguments, init_to_uniform)
    q = positions(potential.dim)[0]
    other, same, _ = make_potential((15,) * 4)
    assert_close(
        jax.jit(potential.full_gradient)(q, arguments), jax.jit(other.full_gradient)(q, same)
    )


def hierarchy(X, y, group, batch_size=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", 120):
        level = numpyro.sample("level", dist.Normal(0, scale))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(level[group[i]] + X[i, 0], 1), obs=y[i])


def assert_hierarchy_has_the_fit_of_one_device(shard_array):
    """Fit a hierarchy to rows on several devices and on one.

    :param shard_array: a function of an array.
    """
    X, y, _ = table(960)
    arrays = X, y, np.arange(960, dtype=np.int32) % 120
    fits = []
    for arguments in (tuple(map(shard_array, arrays)), tuple(map(jnp.asarray, arrays))):
        inputs = make_inputs(hierarchy, arguments, 64)
        layout = find_block_arrow_layout(inputs.potential, inputs.arguments)
        position = np.zeros(inputs.potential.dim)
        fits.append(fit_hierarchy_from_each(inputs, layout, [position]).coordinates)
    for a, b in zip(*map(jax.tree.leaves, fits), strict=True):
        assert_close(a, b)


def check_hierarchy_on_shards_has_the_fit_of_one_device():
    assert_hierarchy_has_the_fit_of_one_device(lambda x: shard(x, (240,) * 4))


def check_run_of_a_hierarchy_on_shards_has_block_arrow_coordinates():
    X, y, _ = table(960)
    arrays = X, y, np.arange(960, dtype=np.int32) % 120
    mcmc = MCMC(
        SGHMCSplit(hierarchy, step_size=0.2, num_steps=3),
        num_warmup=1,
        num_samples=2,
        progress_bar=False,
    )
    mcmc.run(random.key(0), *(shard(x, (240,) * 4) for x in arrays), batch_size=64)
    assert mcmc.sampler.adaptation.preconditioner.is_block_arrow
    assert np.isfinite(mcmc.get_samples()["level"]).all()
