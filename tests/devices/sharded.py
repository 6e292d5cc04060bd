"""What must hold where rows are spread over four devices: one function a check."""

import itertools
import re
import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import MCMC, init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc import SGHMCSplit, ShardedArray, bias_report
from numpyro_sgmcmc.adaptation.batched_gradients import sample_minibatch_indices, sample_subset
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
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS, make_gradient_fn
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import assert_posterior

N, DIM = 61, 3
LAYOUTS = {
    "four, as even as can be": (16, 15, 15, 15),
    "four, uneven": (2, 30, 9, 20),
}


def regression(X, y, group, offset, batch_size=None):
    """Rows that are spread, an array that all devices have, and a plate of its own."""
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


def mesh_of(num):
    return Mesh(np.array(jax.devices()[:num]), ("rows",))


def spread(x, counts):
    return ShardedArray(x, mesh_of(len(counts)), counts=counts)


def read(counts, batch_size=8):
    """A target with spread rows, its arguments, and NumPyro's potential on all rows."""
    X, y, group = table(sum(counts))
    keywords = {"batch_size": batch_size}
    sharded = Arguments((spread(X, counts), spread(y, counts), group, 0.1), keywords)
    target = make_model_potential(regression, sharded, init_to_uniform)

    def exact(q):
        args = tuple(jnp.asarray(a) for a in (X, y, group, 0.1))
        return potential_energy(regression, args, {}, target.unravel(q))

    return target, sharded, exact


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4)


def positions(dim, num=3):
    return np.random.default_rng(1).normal(size=(num, dim)).astype(np.float32)


def check_values_on_uneven_shards_are_those_of_one_device():
    target, arguments, exact = read(LAYOUTS["four, uneven"])
    q = positions(target.dim)[0]
    found = jax.jit(lambda q, a: (target.full_value(q, a), target.full_gradient(q, a)))
    for value, one in zip(found(q, arguments), jax.value_and_grad(exact)(q), strict=True):
        close(value, one)


def assert_passes_over_all_rows_are_those_of_one_device(counts):
    target, arguments, exact = read(counts)
    q, vectors = positions(target.dim)[0], positions(target.dim, 2)

    @jax.jit
    def passes(q, arguments):
        return (
            *target.full_value_grad_hessian(q, arguments),
            target.full_value(q, arguments),
            target.full_gradient(q, arguments),
            jax.grad(target.full_value)(q, arguments),
            target.full_hessian_products(q, vectors, arguments),
        )

    value, gradient, hessian = exact(q), jax.grad(exact)(q), jax.hessian(exact)(q)
    expected = (value, gradient, hessian, value, gradient, gradient, vectors @ hessian)
    for found, one in zip(passes(q, arguments), expected, strict=True):
        close(found, one)


def check_passes_over_uneven_shards_are_those_of_one_device():
    assert_passes_over_all_rows_are_those_of_one_device(LAYOUTS["four, uneven"])


def check_passes_over_even_shards_are_those_of_one_device():
    assert_passes_over_all_rows_are_those_of_one_device(LAYOUTS["four, as even as can be"])


def check_the_gradient_is_unbiased_for_shards_of_any_size():
    counts = (2, 5, 3, 4)
    target, arguments, exact = read(counts, 4)
    q = positions(target.dim)[0]
    firsts = np.cumsum((0, *counts[:-1]))
    every = np.array(list(itertools.product(*[range(n) for n in counts]))) + firsts
    one = jax.jit(lambda rows: target.gradient(q, {"rows": rows}, arguments))
    # One after the other: devices that are threads wait for ever where two programs cross.
    mean = np.mean([np.asarray(one(rows.astype(np.int32))) for rows in every], 0)
    close(mean, jax.grad(exact)(q))


def check_even_shards_give_the_gradient_of_the_same_rows_on_one_device():
    counts = (15, 15, 15, 15)
    X, y, group = (x[:60] for x in table())
    keywords = {"batch_size": 8}
    sharded = Arguments((spread(X, counts), spread(y, counts), group, 0.1), keywords)
    plain = Arguments((X, y, group, 0.1), keywords)
    of = [make_model_potential(regression, a, init_to_uniform) for a in (sharded, plain)]
    q = positions(of[0].dim)[0]
    rows = {"rows": np.array([3, 9, 20, 15, 44, 31, 45, 59], np.int32)}
    gradients = [jax.jit(t.gradient)(q, rows, a) for t, a in zip(of, (sharded, plain), strict=True)]
    close(*gradients)


def check_every_estimator_is_exact_where_each_shard_shows_all_of_its_rows():
    target, arguments, exact = read((15, 15, 15, 15))
    anchor, q = jnp.asarray(positions(target.dim)[:2])
    _, gradient, hessian = jax.jit(target.full_value_grad_hessian)(anchor, arguments)
    whitening = Preconditioner(anchor, jnp.ones(target.dim), gradient, hessian)
    for estimator in GRADIENT_ESTIMATORS.values():
        found = jax.jit(
            lambda q, a, e=estimator: make_gradient_fn(
                e, target, a, whitening, {"rows": jnp.arange(60)}
            )(q)
        )(q, arguments)
        close(found, jax.grad(exact)(anchor + q))


def check_each_shard_draws_its_own_part_by_the_stream_that_is_asked_for():
    counts = (8, 40, 12, 20)
    shards = spread(np.zeros(80, np.float32), counts).shards
    firsts = np.cumsum((0, *counts[:-1]))
    plate = Plate("rows", 80, 16, shards)
    for name, scheme in SUBSAMPLINGS.items():
        state = init_stream(plate, random.key(3))
        draw = jax.jit(partial(sample_minibatches, scheme, plate), static_argnums=2)
        state, rows = draw(state, random.key(4), 30)
        parts = np.asarray(rows).reshape(30, 4, 4)
        keys = random.split(random.key(4), 4)
        for k, (first, count) in enumerate(zip(firsts, counts, strict=True)):
            begin = StreamState.init(random.split(random.key(3), 4)[k])
            _, expected = scheme.sample_indices(begin, keys[k], 30, count, 4)
            np.testing.assert_array_equal(parts[:, k] - first, expected, err_msg=name)
        # It goes on where it was.
        state, _ = draw(state, random.key(5), 7)
        assert isinstance(state, StreamState)


def check_warm_up_draws_stay_within_their_shards():
    counts = (2, 30, 9, 20)
    target, _, _ = read(counts)
    ends = np.cumsum(counts)
    rng = np.random.default_rng(0)
    for scheme in (IIDSubsampling(), ContiguousSubsampling()):
        rows = sample_minibatch_indices(target, rng, (50, 6), scheme)["rows"]
        parts = rows.reshape(50, 6, 4, 2)
        for k, (end, count) in enumerate(zip(ends, counts, strict=True)):
            assert set(np.unique(parts[:, :, k])) == set(range(end - count, end))
    big = target.plates[0]._replace(size=10**6)
    subset = sample_subset(replace(target, plates=(big,)), 0)["rows"].reshape(4, -1)
    for part, end, count in zip(subset, ends, counts, strict=True):
        assert set(np.unique(part)) == set(range(end - count, end))
        assert (np.diff(part) >= 0).all()


def collectives(fn, *operands):
    """How often each kind of collective stands in a compiled function."""
    text = jax.jit(fn).lower(*operands).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {k: n for k in kinds if (n := len(re.findall(rf" {k}(?:-start)?\(", text)))}


PAIRS = tuple(zip(SUBSAMPLINGS.values(), GRADIENT_ESTIMATORS.values(), strict=True))


def assert_a_gradient_takes_one_sum_over_devices_and_no_exchange_of_rows(counts, pairs=PAIRS):
    target, arguments, _ = read(counts)
    zeros = jnp.zeros(target.dim)
    whitening = Preconditioner(zeros, zeros + 1, zeros, jnp.eye(target.dim))
    plate = target.plates[0]
    for scheme, estimator in pairs:
        draw = partial(sample_minibatches, scheme, plate)
        of = partial(make_gradient_fn, estimator, target, preconditioner=whitening)

        def steps(q, state, arguments, draw=draw, of=of):
            state, rows = draw(state, random.key(0), 5)

            def step(q, rows):
                return q - 0.01 * of(arguments=arguments, indices={"rows": rows})(q), None

            return lax.scan(step, q, rows)[0], state

        found = collectives(steps, zeros, init_stream(plate, random.key(0)), arguments)
        assert found == {"all-reduce": 1}, (scheme, found)
        fresh = {"rows": sample_independent_minibatch(scheme, plate, random.key(0))}
        assert collectives(target.gradient, zeros, fresh, arguments) == {"all-reduce": 1}
        assert collectives(target.full_gradient, zeros, arguments) == {"all-reduce": 1}


def check_a_gradient_on_uneven_shards_takes_one_sum_and_no_exchange_of_rows():
    assert_a_gradient_takes_one_sum_over_devices_and_no_exchange_of_rows(LAYOUTS["four, uneven"])


def check_a_gradient_by_blocks_takes_one_sum_and_no_exchange_of_rows():
    pairs = [(ContiguousSubsampling(), GRADIENT_ESTIMATORS["control_variate"])]
    counts = LAYOUTS["four, uneven"]
    assert_a_gradient_takes_one_sum_over_devices_and_no_exchange_of_rows(counts, pairs)


def check_a_gradient_on_even_shards_takes_one_sum_and_no_exchange_of_rows():
    counts = LAYOUTS["four, as even as can be"]
    assert_a_gradient_takes_one_sum_over_devices_and_no_exchange_of_rows(counts)


def collectives_of(mcmc, arguments):
    """Those of a run's iteration."""
    kernel, keywords = mcmc.sampler, {"batch_size": 20}
    return collectives(lambda s: kernel.sample(s, arguments, keywords), mcmc.last_state)


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
    """Rows for very uneven shards, and the posterior's exact mean and sd with known noise.

    The small shard's rows say something else: with equal shares the answer is another one.
    """
    X, y, _ = table(sum(UNEVEN))
    y[: UNEVEN[0]] += 3.0 * X[: UNEVEN[0], 0]
    precision = np.eye(DIM) + X.T.astype(float) @ X
    mean, sd = np.linalg.solve(precision, X.T @ y), np.sqrt(np.diag(np.linalg.inv(precision)))
    return X, y, mean, sd


def fit_known_noise(*arguments):
    """A run of that regression, with all that a warm-up does."""

    def known(X, y, batch_size=None):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size):
            x = numpyro.subsample(X, event_dim=1)
            numpyro.sample("y", dist.Normal(x @ beta, 1), obs=numpyro.subsample(y, event_dim=0))

    mcmc = MCMC(
        SGHMCSplit(known),
        num_warmup=300,
        num_samples=800,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *arguments, batch_size=100)
    return mcmc


def check_the_posterior_is_that_of_all_rows():
    X, y, mean, sd = uneven_regression()
    mcmc = fit_known_noise(spread(X, UNEVEN), spread(y, UNEVEN))
    assert_posterior(mcmc.get_samples(group_by_chain=True)["beta"], mean, sd)


def check_another_mode_is_told():
    """The square of a parameter is known, its sign is not."""
    _, y, _ = table(400)

    def two_places(y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 3))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(jnp.square(a), 1), obs=y[i])

    counts = (50, 150, 120, 80)
    mcmc = MCMC(SGHMCSplit(two_places), num_warmup=5, num_samples=5, progress_bar=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc.run(random.key(0), spread(y + 9.0, counts), batch_size=40)
    assert any("another mode, with about 50 % of the mass" in str(w.message) for w in caught)


def check_chains_spread_over_a_second_axis_are_the_same_chains():
    X, y, group = table(1000)
    draws = []
    for shape, names in (((2,), ("rows",)), ((2, 2), ("rows", "chains"))):
        mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
        arguments = (ShardedArray(X, mesh), ShardedArray(y, mesh), group, 0.1)
        mcmc = run(arguments, 2)
        draws.append(mcmc.get_samples(group_by_chain=True)["beta"])
        assert collectives_of(mcmc, arguments) == {"all-reduce": 1}
    np.testing.assert_allclose(*draws, atol=1e-3)


def check_a_jax_array_that_is_spread_by_rows_is_taken_as_one():
    X, _, _ = table(400)
    mesh = mesh_of(4)
    given = jax.device_put(X, NamedSharding(mesh, PartitionSpec("rows")))
    (found,) = Arguments((given, X)).sharded_arrays
    assert found == ShardedArray.from_padded_array(given, ShardedArray(X, mesh).shards, "X")
    one = jax.device_put(X, NamedSharding(mesh_of(1), PartitionSpec("rows")))
    by_columns = jax.device_put(X.T, NamedSharding(mesh, PartitionSpec(None, "rows")))
    assert not Arguments((one, by_columns)).sharded_arrays


def check_what_numpyro_does_with_a_run_works():
    X, y, group = table(400)
    counts = (50, 150, 120, 80)
    arguments = (spread(X, counts), spread(y, counts), group, 0.1)
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


def check_a_mesh_with_explicit_axes_serves():
    X, y, group = table(60)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    arguments = Arguments((ShardedArray(X, mesh), ShardedArray(y, mesh), group, 0.1))
    target = make_model_potential(partial(regression, batch_size=8), arguments, init_to_uniform)
    q = positions(target.dim)[0]
    other, same, _ = read((15,) * 4)
    close(jax.jit(target.full_gradient)(q, arguments), jax.jit(other.full_gradient)(q, same))
