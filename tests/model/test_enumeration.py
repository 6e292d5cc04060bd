"""Discrete latent variables that are summed out of each row, beside NumPyro's enumeration."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.contrib.funsor import config_enumerate, enum
from numpyro.diagnostics import summary
from numpyro.handlers import mask, scale, substitute
from numpyro.infer import MCMC, NUTS, init_to_uniform
from numpyro.infer.util import log_density, potential_energy

from numpyro_sgmcmc import (
    CheckpointedMCMC,
    HostArray,
    SGHMCSplit,
    ShardedArray,
    bias_report,
    log_likelihood,
    loo,
    posterior_predictive,
)
from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import EnumerationWarning
from numpyro_sgmcmc.model.enumeration import sample_states
from numpyro_sgmcmc.model.handlers import set_subsample_indices
from numpyro_sgmcmc.model.subsampled import make_model_potential

N, B, STEPS, ANNOTATORS = 6, 2, 4, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=N).astype(np.float32)
COUNTS = np.array([0, 3, 0, 1, 0, 5])
BINARY = RNG.integers(0, 2, (N, STEPS))
LABELS = RNG.integers(0, 3, (N, ANNOTATORS))


def mark():
    """Return a new dictionary, to which NumPyro writes."""
    return {"enumerate": "parallel"}


def weights(num=3):
    return numpyro.sample("w", dist.Dirichlet(jnp.ones(num)))


def probabilities(name="p", num=2):
    return numpyro.sample(name, dist.Beta(2, 2).expand([num]).to_event(1))


def mixture(batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
    w = weights()
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Categorical(w), infer=mark())
        numpyro.sample("y", dist.Normal(mu[z], 1.0), obs=jnp.asarray(X)[i])


def two_independent_sites(batch_size):
    p = probabilities()
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        a = numpyro.sample("a", dist.Bernoulli(p[0]), infer=mark())
        b = numpyro.sample("b", dist.Bernoulli(p[1]), infer=mark())
        numpyro.sample("x", dist.Normal(p[0] * a, 1.0), obs=jnp.asarray(X)[i])
        numpyro.sample("y", dist.Normal(a - 2.0 * b, 1.0), obs=jnp.asarray(X)[i] ** 2)


def dependent_sites(batch_size):
    p = probabilities()
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        a = numpyro.sample("a", dist.Bernoulli(p[0]), infer=mark())
        b = numpyro.sample("b", dist.Bernoulli(p[a]), infer=mark())
        numpyro.sample("y", dist.Normal(a + b, 1.0), obs=jnp.asarray(X)[i])


def annotators(batch_size):
    w = weights()
    confusion = numpyro.sample("c", dist.Dirichlet(jnp.ones((ANNOTATORS, 3, 3))).to_event(2))
    with numpyro.plate("rows", N, subsample_size=batch_size, dim=-2) as i:
        z = numpyro.sample("z", dist.Categorical(w), infer=mark())
        with numpyro.plate("annotators", ANNOTATORS, dim=-1) as j:
            numpyro.sample("y", dist.Categorical(confusion[j, z]), obs=jnp.asarray(LABELS)[i])


def markov_chain(batch_size):
    p = probabilities()
    transition = numpyro.sample("t", dist.Dirichlet(jnp.ones((2, 2))).to_event(1))
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        series = jnp.asarray(BINARY)[i]

    def step(state, y):
        with numpyro.plate("rows", N, subsample_size=batch_size):
            state = numpyro.sample("z", dist.Categorical(transition[state]), infer=mark())
            numpyro.sample("y", dist.Bernoulli(p[state]), obs=y)
        return state, None

    scan(step, jnp.zeros(len(series), int), series.T)


def capture_recapture(batch_size):
    p = probabilities()
    with numpyro.plate("animals", N, subsample_size=batch_size) as i:
        captures = jnp.asarray(BINARY)[i]

    def step(carry, y):
        is_captured, alive = carry
        with numpyro.plate("animals", N, subsample_size=batch_size), mask(mask=is_captured):
            survival = is_captured * p[0] * alive + 1 - is_captured
            alive = numpyro.sample("z", dist.Bernoulli(survival), infer=mark())
            numpyro.sample("y", dist.Bernoulli(p[1] * alive), obs=y)
        return (is_captured | y.astype(bool), alive), None

    init = captures[:, 0].astype(bool), jnp.ones(len(captures), int)
    scan(step, init, captures[:, 1:].T)


def zero_inflated(batch_size):
    p = probabilities()
    rate = numpyro.sample("rate", dist.LogNormal(0, 1))
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        is_zero = numpyro.sample("z", dist.Bernoulli(p[0]), infer=mark())
        rates = jnp.where(is_zero == 1, 1e-3, rate)
        numpyro.sample("y", dist.Poisson(rates), obs=jnp.asarray(COUNTS)[i])


def occupancy(batch_size):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    p = probabilities()
    with numpyro.plate("rows", N, subsample_size=batch_size, dim=-2) as i:
        logits = b[0] + b[1] * jnp.asarray(X)[i, None]
        z = numpyro.sample("z", dist.Bernoulli(logits=logits), infer=mark())
        with numpyro.plate("visits", STEPS, dim=-1):
            detection = jnp.where(z == 1, p[0], 0.01)
            numpyro.sample("y", dist.Bernoulli(detection), obs=jnp.asarray(BINARY)[i])


def misclassified_covariate(batch_size):
    p = probabilities(num=3)
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        truth = numpyro.sample("truth", dist.Bernoulli(p[0]), infer=mark())
        numpyro.sample("measured", dist.Bernoulli(p[1 + truth]), obs=jnp.asarray(BINARY)[i, 0])
        numpyro.sample("y", dist.Normal(b * truth, 1.0), obs=jnp.asarray(X)[i])


def abundance(batch_size):
    p = probabilities()
    with numpyro.plate("rows", N, subsample_size=batch_size, dim=-2) as i:
        number = numpyro.sample("z", dist.Binomial(5, p[0]), infer=mark())
        with numpyro.plate("visits", STEPS, dim=-1):
            rate = p[1] * (number + 0.1)
            numpyro.sample("y", dist.Poisson(rate), obs=jnp.asarray(BINARY)[i])


def state_per_visit(batch_size):
    """States of a plate inside of the row, given a state of the row."""
    p = probabilities()
    with numpyro.plate("rows", N, subsample_size=batch_size, dim=-2) as i:
        a = numpyro.sample("a", dist.Bernoulli(p[0]), infer=mark())
        with numpyro.plate("visits", STEPS, dim=-1):
            b = numpyro.sample("b", dist.Bernoulli(p[a]), infer=mark())
            y = jnp.asarray(BINARY)[i]
            numpyro.sample("y", dist.Bernoulli(jnp.where(b == 1, p[1], 0.1)), obs=y)


def scaled_by_the_user(batch_size):
    with scale(scale=0.5):
        mixture(batch_size)


def second_plate(batch_size):
    mixture(batch_size)
    mu = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("others", N, subsample_size=batch_size) as i:
        numpyro.sample("x", dist.Normal(mu, 1.0), obs=jnp.asarray(X)[i])


def chain_without_scan(batch_size):
    p = probabilities()
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        state = 0
        for t in range(3):
            state = numpyro.sample(f"z{t}", dist.Bernoulli(p[state]), infer=mark())
            y = jnp.asarray(BINARY)[i, t]
            numpyro.sample(f"y{t}", dist.Bernoulli(0.2 + 0.5 * state), obs=y)


STRUCTURES = (
    dependent_sites,
    abundance,
    scaled_by_the_user,
    second_plate,
)
MORE_STRUCTURES = (  # of parts that the others have
    mixture,
    annotators,
    markov_chain,
    capture_recapture,
    zero_inflated,
    occupancy,
    two_independent_sites,
    misclassified_covariate,
    state_per_visit,
    chain_without_scan,
)


def make_potential(model, *args):
    return make_model_potential(model, Arguments(args), init_to_uniform)


@pytest.mark.parametrize(
    "model",
    [*STRUCTURES, *(pytest.param(model, marks=pytest.mark.slow) for model in MORE_STRUCTURES)],
    ids=lambda model: model.__name__,
)
def test_potential_is_that_of_numpyro_and_the_mean_of_minibatches(model):
    potential = make_potential(model, B)
    arguments = Arguments((B,))
    enumerated = enum(config_enumerate(model), -3)

    @jit_low_optimization
    def compute(q):
        def numpyro_potential(q):
            return potential_energy(enumerated, (N,), {}, potential.unravel(q), enum=True)

        def minibatch(rows):
            indices = {p.name: rows for p in potential.plates}
            return potential.value_and_grad(q, indices, arguments)

        batches = jnp.arange(N).reshape(-1, B)
        return (
            jax.value_and_grad(numpyro_potential)(q),
            minibatch(jnp.arange(N)),
            jax.tree.map(lambda x: x.mean(0), jax.vmap(minibatch)(batches)),
        )

    expected, on_all_rows, epoch_mean = compute(jnp.linspace(-0.5, 0.7, potential.dim))
    for values in (on_all_rows, epoch_mean):
        for value, exact in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, exact, rtol=1e-4, atol=1e-5)


def test_weights_of_included_rows_multiply_the_sums_over_states():
    """The mean over minibatches with an always-included row is the potential on all rows."""
    potential, arguments = make_potential(mixture, B), Arguments((B,))
    weighted = potential.with_included_rows((("rows", (3,)),))
    q = jnp.linspace(-0.5, 0.7, potential.dim)

    @jit_low_optimization
    def evaluate(q):
        batches = jnp.array([[3, k] for k in range(N) if k != 3])
        values = jax.vmap(lambda rows: weighted.value(q, {"rows": rows}, arguments))(batches)
        return values.mean(), potential.value(q, {"rows": jnp.arange(N)}, arguments)

    np.testing.assert_allclose(*evaluate(q), rtol=1e-5)


def test_gradient_is_finite_where_a_state_has_probability_zero():
    def model(batch_size):
        p = probabilities(num=1)
        with numpyro.plate("rows", N, subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.Bernoulli(0.5), infer=mark())
            numpyro.sample("y", dist.Bernoulli(p[0] * z), obs=jnp.zeros(len(i), int))

    potential = make_potential(model, 1)
    gradient = potential.gradient(jnp.array([2.0]), {"rows": jnp.array([0])}, Arguments((1,)))
    p = jax.nn.sigmoid(2.0)
    # of the Beta(2, 2) prior with its Jacobian, and of log((2 - p) / 2) in each row
    expected = -2 * (1 - 2 * p) + N * p * (1 - p) / (2 - p)
    np.testing.assert_allclose(gradient, [expected], rtol=1e-5)


def test_log_density_of_a_row_is_its_share_of_the_potential():
    potential = make_potential(annotators, B)
    q, rows = jnp.linspace(-0.5, 0.7, potential.dim), {"rows": jnp.arange(N)}

    @jit_low_optimization
    def evaluate(q):
        values = potential.pointwise_potentials(q, rows, Arguments((B,)))
        one = lambda k: potential.value(q, {"rows": k[None]}, Arguments((B,)))  # noqa: E731
        return jax.vmap(one)(jnp.array([0, 3])), values

    one, values = evaluate(q)
    np.testing.assert_allclose(one[0] - one[1], N * (values[0] - values[3]), rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "num_states", "num_sites"),
    [
        (annotators, 3, 1),
        (markov_chain, 2, STEPS),
        pytest.param(state_per_visit, 2, 1 + STEPS, marks=pytest.mark.slow),
        pytest.param(chain_without_scan, 2, 3, marks=pytest.mark.slow),
    ],
)
def test_states_are_sampled_from_their_joint_posterior(model, num_states, num_sites):
    """Of one row, whose scale of N must not be part of the posterior."""
    potential, arguments, num_samples = make_potential(model, B), Arguments((B,)), 2000
    draw = potential.constrain(potential.unravel(jnp.linspace(-1, 2, potential.dim)), arguments)
    on_row = substitute(set_subsample_indices(model, {"rows": np.array([4])}), data=draw)

    @jit_low_optimization
    def sample(keys):
        return jax.vmap(
            lambda key: sample_states(on_row, potential.enumerated_sites, 1, key, arguments)
        )(keys)

    samples = sample(jax.random.split(jax.random.key(0), num_samples))
    paths = np.array(list(itertools.product(range(num_states), repeat=num_sites)))
    splits = np.cumsum([x[0].size for x in samples.values()])[:-1]
    parts = dict(zip(samples, np.split(paths, splits, axis=1), strict=True))
    by_path = {k: x.reshape(len(x), *samples[k].shape[1:]) for k, x in parts.items()}

    @jit_low_optimization
    def log_densities(states):
        return jax.vmap(lambda x: log_density(on_row, (B,), {}, x)[0])(states)

    exact = np.asarray(jax.nn.softmax(log_densities(by_path) / N))
    flat = np.concatenate([np.reshape(x, (num_samples, -1)) for x in samples.values()], 1)
    frequencies = (flat[:, None] == paths).all(-1).mean(0)
    sd = np.sqrt(exact * (1 - exact) / num_samples)
    assert (np.abs(frequencies - exact) < 4 * sd + 1e-3).all()


def host_mixture(x, batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Bernoulli(0.3), infer=mark())
        numpyro.sample("y", dist.Normal(mu[z], 1.0), obs=x[i])


def test_rows_on_the_host_are_recognised_by_the_plates_indices():
    potential = make_potential(host_mixture, HostArray(X), B)
    in_memory = make_potential(host_mixture, X, B)
    assert [(x.plate, len(x.array)) for x in potential.host_lookups] == [("rows", N)]
    q, rows = jnp.array([0.3, -0.2]), {"rows": jnp.array([4, 1])}
    value = potential.value(q, rows, Arguments((HostArray(X), B)))
    np.testing.assert_allclose(value, in_memory.value(q, rows, Arguments((X, B))), rtol=1e-6)


def with_local_latents(batch_size):
    p = probabilities()
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        u = numpyro.sample("u", dist.Gamma(2.0, 1.0))
        z = numpyro.sample("z", dist.Bernoulli(p[0]), infer=mark())
        numpyro.sample("y", dist.Normal(u * (1 + z), 1.0), obs=jnp.asarray(X)[i])


def test_potential_with_local_latents_is_that_of_numpyro():
    """On all rows and as the mean over minibatches, with its gradient."""
    potential, arguments = make_potential(with_local_latents, B), Arguments((B,))
    rows, enumerated = jnp.arange(N), enum(config_enumerate(with_local_latents), -2)

    @jit_low_optimization
    def compute(q):
        def exact(q):
            return potential_energy(enumerated, (N,), {}, potential.unravel(q), enum=True)

        def on_rows(rows):
            return jax.value_and_grad(lambda q: potential.value(q, {"rows": rows}, arguments))(q)

        batches = jax.vmap(on_rows)(rows.reshape(-1, B))
        epoch_mean = jax.tree.map(lambda x: x.mean(0), batches)
        return jax.value_and_grad(exact)(q), epoch_mean, on_rows(rows)

    expected, *found = compute(jnp.concatenate([jnp.array([0.3, -0.4]), X]))
    for values in found:
        jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-4), values, expected)


@pytest.mark.slow
def test_run_with_local_latents_is_that_of_nuts():
    rng, num_rows = np.random.default_rng(0), 100
    u = 1 + rng.normal(size=num_rows)
    x = jnp.asarray(rng.normal(u, 0.7), jnp.float32)
    y = jnp.asarray(rng.normal(u + 4 * (rng.random(num_rows) < 0.4)), jnp.float32)

    def model(batch_size=None):
        w = numpyro.sample("w", dist.Beta(2, 2))
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", num_rows, subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.Bernoulli(w), infer=mark())
            u = numpyro.sample("u", dist.Normal(mu, 1.0))
            numpyro.sample("x", dist.Normal(u, 0.7), obs=x[i])
            numpyro.sample("y", dist.Normal(u + 4 * z, 1.0), obs=y[i])

    options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(
        SGHMCSplit(model, collect_local_sites=True), num_warmup=500, num_samples=2000, **options
    )
    mcmc.run(jax.random.key(0), 25)
    nuts = MCMC(NUTS(model), num_warmup=500, num_samples=1000, **options)
    nuts.run(jax.random.key(1))
    found, exact = (summary(m.get_samples(group_by_chain=True)) for m in (mcmc, nuts))
    for name in ("w", "mu", "u"):
        z_scores = (found[name]["mean"] - exact[name]["mean"]) / np.sqrt(
            sum(s[name]["std"] ** 2 / s[name]["n_eff"] for s in (found, exact))
        )
        assert (np.abs(z_scores) < 4.5).all()
        np.testing.assert_allclose(found[name]["std"] / exact[name]["std"], 1.0, atol=0.12)


def test_deterministic_sites_of_states_are_dropped():
    def model(batch_size):
        numpyro.deterministic("twice", 2 * probabilities(num=1)[0])
        with numpyro.plate("rows", N, subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.Bernoulli(0.3), infer=mark())
            numpyro.sample("y", dist.Normal(z, 1.0), obs=jnp.asarray(X)[i])
        numpyro.deterministic("share", z.mean())

    with pytest.warns(UserWarning, match="'share'"):
        potential = make_potential(model, B)
    assert potential.deterministics == {"twice"}


@pytest.mark.slow
def test_run_predictions_sum_over_states():
    """Log likelihoods are those of the rows' sums, and states follow their posterior."""
    fixed = {"step_size": 0.1, "num_steps": 1, "gradient_estimator": "minibatch"}
    kernel = SGHMCSplit(host_mixture, subsampling="iid", **fixed)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=500, progress_bar=False)
    mcmc.run(jax.random.key(0), HostArray(X), B)
    mu = np.asarray(mcmc.get_samples()["mu"])[:, :, None]
    terms = np.log([0.7, 0.3])[:, None] - 0.5 * (X - mu) ** 2 - 0.5 * np.log(2 * np.pi)
    expected = np.logaddexp(*terms.swapaxes(0, 1))
    np.testing.assert_allclose(log_likelihood(mcmc)["y"][0], expected, atol=1e-5)
    assert np.isclose(loo(mcmc, num_rows=N).plpd_i.sum(), expected.mean(0).sum(), atol=2.0)
    states = posterior_predictive(mcmc, jax.random.key(1), infer_discrete=True)["z"][0]
    probabilities = np.exp(terms[:, 1] - expected)
    errors = (states - probabilities).mean(0)
    sd = np.sqrt((probabilities * (1 - probabilities)).mean(0) / len(states))
    assert (np.abs(errors) < 4 * sd).all()


@pytest.mark.slow
def test_infer_discrete_without_discrete_sites_raises():
    def model(batch_size):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", N, subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=jnp.asarray(X)[i])

    fixed = {"step_size": 0.1, "num_steps": 1, "gradient_estimator": "minibatch"}
    mcmc = MCMC(SGHMCSplit(model, **fixed), num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), B)
    with pytest.raises(ValueError, match=r"infer_discrete.*discrete sites"):
        posterior_predictive(mcmc, jax.random.key(1), infer_discrete=True)


# --- Errors


def _with_states(use_states, fn=None, infer=None):
    def model(batch_size):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", N, subsample_size=batch_size) as i:
            z = numpyro.sample("z", fn or dist.Bernoulli(0.3), infer=infer or mark())
            numpyro.sample("y", dist.Normal(mu + use_states(z), 1.0), obs=jnp.asarray(X)[i])

    return model


def used_outside(batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Bernoulli(0.3), infer=mark())
        numpyro.sample("y", dist.Normal(mu + z, 1.0), obs=jnp.asarray(X)[i])
    numpyro.factor("total", mu * z.sum())


def crossed(batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    rows = numpyro.plate("rows", N, subsample_size=batch_size, dim=-2)
    items = numpyro.plate("items", STEPS, subsample_size=2, dim=-1)
    with rows as i:
        z = numpyro.sample("z", dist.Bernoulli(0.3), infer=mark())
        with items as j:
            y = jnp.asarray(BINARY)[i[:, None], j]
            numpyro.sample("y", dist.Normal(mu + z, 1.0), obs=y)


def global_state(batch_size):
    z = numpyro.sample("z", dist.Bernoulli(0.3), infer=mark())
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu + z, 1.0), obs=jnp.asarray(X)[i])


def not_subsampled(batch_size):
    host_mixture(jnp.asarray(X), None)


FOUR_STATES = dist.Categorical(jnp.full(4, 0.25))


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (_with_states(lambda z: jnp.roll(z, 1)), "'y'.*states.*other rows"),
        (_with_states(lambda z: z.mean()), "'y'.*states.*other rows"),
        (_with_states(lambda z: z.max(), FOUR_STATES), "'y'.*states.*other rows"),
        (_with_states(lambda z: (z == 2).mean(), FOUR_STATES), "'y'.*states.*other rows"),
        (_with_states(lambda z: (z == 3).any(), FOUR_STATES), "'y'.*states.*other rows"),
        (_with_states(lambda z: (z == 3).all(), FOUR_STATES), "'y'.*states.*other rows"),
        (used_outside, "'total'.*states.*other rows"),
        (crossed, "'z'.*'y'.*'items' and 'rows'"),
        (not_subsampled, "'z'.*'rows', which is not subsampled.*give the plate a subsample_size"),
        (global_state, "'z'.*discrete.*DiscreteGibbs.*by hand.*not be additive"),
        (_with_states(lambda z: z, dist.Poisson(2.0)), "'z'.*cannot be enumerated.*gibbs_sites"),
        (_with_states(lambda z: z, dist.DiscreteUniform(1, 3)), "'z'.*from 1.*add 1"),
        (_with_states(lambda z: z, infer={"enumerate": "sequential"}), "'z'.*cannot be enumerated"),
    ],
    ids=[
        "roll",
        "mean",
        "max",
        "mean of one state",
        "any",
        "all",
        "outside",
        "crossed",
        "full",
        "global",
        "infinite",
        "from 1",
        "sequential",
    ],
)
def test_states_that_cannot_be_summed_out_of_a_row_raise(model, match):
    with pytest.raises(ValueError, match=match):
        make_potential(model, B)


def test_rows_of_a_sharded_array_have_the_potential_of_rows_in_memory():
    x = jnp.asarray(X)
    sharded, in_memory = (make_potential(host_mixture, a, B) for a in (ShardedArray(x), x))
    q, rows = jnp.array([0.3, -0.2]), {"rows": jnp.array([4, 1])}
    value = sharded.value(q, rows, Arguments((ShardedArray(x), B)))
    np.testing.assert_allclose(value, in_memory.value(q, rows, Arguments((x, B))), rtol=1e-6)


@pytest.mark.slow
def test_checkpointed_run_has_the_draws_of_mcmc_and_a_report(tmp_path):
    x = np.random.default_rng(1).normal(size=60).astype(np.float32)
    kernel = SGHMCSplit(
        host_mixture,
        step_size=0.1,
        num_steps=2,
        gradient_estimator="minibatch",
        subsampling="contiguous",
    )
    settings = {"num_warmup": 10, "num_samples": 20, "num_chains": 2, "progress_bar": False}
    settings["chain_method"] = "vectorized"
    plain = MCMC(kernel, **settings)
    checkpointed = CheckpointedMCMC(kernel, checkpoint=tmp_path / "run", **settings)
    for mcmc in (plain, checkpointed):
        mcmc.run(jax.random.key(0), x, 20)
    np.testing.assert_array_equal(checkpointed.get_samples()["mu"], plain.get_samples()["mu"])
    assert [site.site for site in bias_report(checkpointed).sites] == ["mu"]


def test_dependent_rows_of_a_sharded_array_raise():
    def model(x, batch_size):
        p = probabilities()
        with numpyro.plate("rows", N, subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.Bernoulli(p[0]), infer=mark())
            numpyro.sample("y", dist.Normal(jnp.roll(z, 1), 1.0), obs=x[i])

    with pytest.raises(ValueError, match=r"'y'.*states.*other rows"):
        make_potential(model, ShardedArray(X), B)


def unmarked(batch_size):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(mu + z, 1.0), obs=jnp.asarray(X)[i])


def test_site_without_a_mark_warns():
    with pytest.warns(EnumerationWarning, match=r"'z'.*infer=.*parallel"):
        make_potential(unmarked, B)


def test_missing_funsor_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "funsor", None)
    with pytest.raises(ImportError, match=r"funsor.*numpyro-sgmcmc\[enumeration\]"):
        SGHMCSplit(mixture).init(jax.random.key(0), 1, None, (B,), {})
