"""Latent sites inside the subsampled plate: a value a row."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, DiscreteGibbs, Gibbs, Predictive, init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc import (
    SGNHT,
    CheckpointedMCMC,
    HostArray,
    SGHMCSplit,
    bias_report,
    print_summary,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.estimators import ESTIMATORS, whitened_gradient
from numpyro_sgmcmc.posterior.locals import AllRows, LocalState, renew_minibatch, with_locals
from numpyro_sgmcmc.posterior.locals.moves import renew, row_potentials, sweep
from numpyro_sgmcmc.posterior.model import model_target
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from tests.contract.kernels import (
    assert_posterior,
    assert_same_distribution,
    quietly,
)
from tests.posterior.hierarchies import (
    NOISE,
    awkward,
    counts,
    counts_data,
    draw_indicators,
    draw_normal_means,
    indicator_odds,
    mixture,
    mixture_data,
    mixture_posterior,
    normal_means,
    normal_means_data,
    normal_means_posterior,
    trials,
    trials_data,
)
from tests.posterior.plated import assert_close

ROWS, BATCH = 12, 4


_visit = jax.jit(renew_minibatch, static_argnames=("target", "estimator"))
_rows_of = jax.jit(row_potentials, static_argnames="target")
_full_potential = jax.jit(Target.full_potential, static_argnums=0)
_gradient = jax.jit(Target.gradient, static_argnums=0)


class _Exact:
    """A small model in float64 with values that are nothing in particular."""

    def __init__(self, model: Any, y: Any) -> None:
        self.model, self.y = model, np.asarray(y, np.float64)
        self.arguments = Arguments((self.y,), {"batch_size": BATCH})
        self.target = model_target(model, self.arguments, init_to_uniform)
        rng = np.random.default_rng(7)
        self.theta = jnp.asarray(0.3 * rng.standard_normal(self.target.dim))
        self.anchor = self.theta + 0.2
        local = self.target.locals
        self.values = AllRows(
            jnp.asarray(0.5 * rng.standard_normal((ROWS, local.width))), local.zeros().drawn
        )
        self.slopes = jax.jit(jax.grad(self.joint, (0, 1)))
        self.state = LocalState(self.values, jnp.full((ROWS, local.width), 0.5), jnp.ones(()))

    def joint(self, theta: Any, position: Any) -> Any:
        """NumPyro's own potential of all rows and values."""
        z = self.target.unravel(theta) | self.target.locals.unravel(position)
        return potential_energy(self.model, (jnp.asarray(self.y),), {}, z)

    def full_gradient(self, values: AllRows, theta: Any = None) -> Any:
        theta = self.theta if theta is None else theta
        return self.slopes(theta, values.position)[0]

    def visit(self, rows: Any, seed: int = 0, state: Any = None, gradient: Any = None) -> Any:
        state = self.state if state is None else state
        if gradient is None:
            gradient = self.full_gradient(state.values, self.anchor)
        return _visit(
            self.target,
            state,
            self.theta,
            {"rows": jnp.asarray(rows)},
            self.arguments,
            self.anchor,
            gradient,
            ESTIMATORS["control_variate"],
            jax.random.key(seed),
        )


@pytest.fixture(params=[normal_means, awkward], ids=["normal_means", "awkward"])
def case(request, x64):
    rng = np.random.default_rng(8)
    shape = (ROWS,) if request.param is normal_means else (ROWS, 3)
    return _Exact(request.param, rng.standard_normal(shape))


def test_potential_on_all_rows_is_the_joint(case):
    arguments = with_locals(case.arguments, case.values)
    assert_close(
        _full_potential(case.target, case.theta, arguments),
        case.joint(case.theta, case.values.position),
    )


def test_a_row_sees_its_own_unscaled_gradient(case):
    expected = case.slopes(case.theta, case.values.position)[1]
    rows = jnp.array([3, 11, 0, 7])
    some = case.values.take(rows)

    def total(position):
        return _rows_of(case.target, case.theta, rows, position, some.drawn, case.arguments).sum()

    assert_close(jax.grad(total)(some.position), expected[rows])


def test_a_row_s_density_is_the_joint_s_up_to_a_constant(case):
    rows = jnp.arange(ROWS)
    moved = case.values.position.at[5].add(0.7)
    own = partial(row_potentials, case.target, case.theta, rows, drawn={}, arguments=case.arguments)
    change = own(position=moved) - own(position=case.values.position)
    expected = case.joint(case.theta, moved) - case.joint(case.theta, case.values.position)
    assert_close(change, jnp.zeros(ROWS).at[5].set(expected))


def test_only_the_minibatch_s_rows_change(case):
    rows = [9, 2, 4, 10]
    after, _, here = case.visit(rows)
    others = np.setdiff1d(np.arange(ROWS), rows)
    before, now = case.values.position, after.values.position
    np.testing.assert_array_equal(now[others], before[others])
    assert (now[jnp.array(rows)] != before[jnp.array(rows)]).any()
    served = here.kwargs["_local_values"].position
    np.testing.assert_array_equal(served, now[jnp.array(rows)])


def test_gradient_of_the_globals_is_that_at_the_new_values_and_unbiased(case):
    """The estimates on a partition of the rows have the full gradient as their mean."""
    after, gradient, _ = case.visit([9, 2, 4, 10])
    arguments = with_locals(case.arguments, after.values)
    whitening = Whitening(case.anchor, jnp.ones(case.target.dim), gradient)
    q = case.theta - case.anchor
    blocks = np.random.default_rng(1).permutation(ROWS).reshape(-1, BATCH)
    expected = case.full_gradient(after.values)
    for estimator in (ESTIMATORS["plain"], ESTIMATORS["control_variate"]):
        found = jax.jit(
            jax.vmap(
                lambda b, e=estimator: whitened_gradient(
                    e, case.target, arguments, whitening, {"rows": b}
                )(q)
            )
        )(jnp.asarray(blocks))
        assert_close(np.mean(found, 0), expected)
        assert np.ptp(found, 0).max() > 1e-3 * np.abs(expected).max()


def test_gradient_at_the_anchor_follows_the_local_values(case):
    state, gradient = case.state, None
    for n, rows in enumerate([[0, 1, 2, 3], [8, 3, 5, 1], [11, 10, 2, 0]]):
        state, gradient, _ = case.visit(rows, n, state, gradient)
    assert_close(gradient, case.full_gradient(state.values, case.anchor), rtol=1e-10)


def test_the_minibatch_in_the_step_is_the_one_gathered(case):
    """The step's gradient is that of its own rows at their renewed values."""
    rows = jnp.array([9, 2, 4, 10])
    after, _, here = case.visit(rows)
    arguments = with_locals(case.arguments, after.values)
    indices = {"rows": rows}
    assert_close(
        _gradient(case.target, case.theta, indices, here),
        _gradient(case.target, case.theta, indices, arguments),
    )


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_local_moves_leave_the_conditional_as_it_is(scale):
    """Draws from p(z | theta, y) remain such, whatever the scale of the moves; each row moves."""
    rows, tau = 20_000, 1.3
    y = normal_means_data(rows)
    arguments = Arguments((y,), {"batch_size": 100})
    target = model_target(normal_means, arguments, init_to_uniform)
    theta = jnp.array([0.4, np.log(tau)], jnp.float32)
    variance = 1 / (1 / tau**2 + 1 / NOISE**2)
    mean = variance * (0.4 / tau**2 + y / NOISE**2)
    start = np.random.default_rng(0).standard_normal(rows)
    values = AllRows(jnp.asarray(mean + np.sqrt(variance) * start, jnp.float32)[:, None], {})
    widths = jnp.full((rows, 1), scale * np.sqrt(variance), jnp.float32)
    state = LocalState(values, widths, jnp.ones(()))
    after, acceptance = jax.jit(sweep, static_argnums=(0, 5))(
        target, theta, state, arguments, jax.random.key(0), 3
    )
    u = (np.asarray(after.position[:, 0], np.float64) - mean) / np.sqrt(variance)
    assert abs(u.mean() - start.mean()) < 5 * np.sqrt(2 / rows)
    assert abs(u.var() - start.var()) < 5 * np.sqrt(4 / rows)
    assert abs((u**4).mean() - 3) < 5 * np.sqrt(96 / rows)
    assert 0.1 < acceptance.mean() <= 1
    assert abs(np.corrcoef(u, start)[0, 1]) < (0.4 if scale == 1.0 else 0.9)


def test_gibbs_fn_gets_the_minibatch_and_its_draws_are_kept():
    y = mixture_data()
    arguments = Arguments((y,), {"batch_size": 5})
    seen = {}

    def gibbs_fn(rng_key, gibbs_sites, hmc_sites, rows):
        seen.update(gibbs_sites=gibbs_sites, hmc_sites=hmc_sites, rows=rows)
        return {"k": 1 - gibbs_sites["k"]}

    target = model_target(mixture, arguments, init_to_uniform, gibbs_fn, ("k",))
    values = target.locals.zeros()
    rows = jnp.array([7, 1999, 3, 0, 12])
    theta = jnp.array([0.3, 2.0])
    after, _ = renew(
        target, theta, rows, values.take(rows), jnp.zeros((5, 0)), arguments, jax.random.key(0)
    )
    np.testing.assert_array_equal(after.drawn["k"], np.ones(5))
    np.testing.assert_array_equal(seen["rows"], rows)
    np.testing.assert_allclose(seen["hmc_sites"]["share"], 1 / (1 + np.exp(-0.3)), rtol=1e-6)
    put = values.put(rows, after).drawn["k"]
    assert put.sum() == 5
    assert (put[rows] == 1).all()


# Runs.


def posterior_run(kernel: Any, *data: Any, batch: int = 100, **settings: Any) -> MCMC:
    settings = {"num_warmup": 50, "num_samples": 250, "num_chains": 2} | settings
    mcmc = quietly(kernel, **{"chain_method": "vectorized", **settings})
    mcmc.run(jax.random.key(1), *data, batch_size=batch)
    return mcmc


def assert_globals(mcmc: MCMC, exact: dict[str, tuple[float, float]]) -> None:
    draws = mcmc.get_samples(group_by_chain=True)
    for name, (mean, sd) in exact.items():
        assert_posterior(draws[name], mean, sd)


@pytest.fixture(scope="module")
def whole():
    """A run with the local values of all rows."""
    y = normal_means_data()
    return posterior_run(SGHMCSplit(normal_means, collect_locals=True), y)


def test_normal_means_against_the_marginal(whole):
    assert_globals(whole, normal_means_posterior(normal_means_data()))


def test_local_values_against_their_posterior(whole):
    """Given the globals' posterior each local value is normal with a known mean and sd."""
    y = normal_means_data()
    draws = whole.get_samples(group_by_chain=True)
    mu, tau = (np.asarray(draws[n], np.float64)[..., None] for n in ("mu", "tau"))
    assert draws["z"].shape == (2, 250, len(y))
    variance = 1 / (1 / tau**2 + 1 / NOISE**2)
    u = (draws["z"] - variance * (mu / tau**2 + y / NOISE**2)) / np.sqrt(variance)
    u = np.asarray(u)
    # Each draw is standard normal and about independent of the others.
    assert abs(u.mean()) < 5 / np.sqrt(u.size / 4)
    assert abs(u.var() - 1) < 5 * np.sqrt(2 / (u.size / 4))
    of_rows = u.reshape(-1, len(y))
    assert np.abs(of_rows.mean(0)).max() < 6 * np.sqrt(2 / len(of_rows))
    extreme = np.argsort(y)[[0, 1, -2, -1]]
    assert np.abs(of_rows[:, extreme].mean(0)).max() < 5 * np.sqrt(2 / len(of_rows))


def test_rows_are_renewed_between_draws(whole):
    z = np.asarray(whole.get_samples(group_by_chain=True)["z"])
    assert (z[:, 1:] != z[:, :-1]).all(2).mean() > 0.9
    steps = int(whole.last_state.num_steps[0])
    assert steps >= 2000 / 100


def test_draws_hold_the_globals_by_default_and_numpyro_s_tools_work(whole):
    y = normal_means_data()
    mcmc = posterior_run(SGHMCSplit(normal_means), y, num_samples=10, num_warmup=4)
    assert sorted(mcmc.get_samples()) == ["mu", "tau"]
    mcmc.print_summary()
    data = az.from_numpyro(mcmc, log_likelihood=False)
    assert set(data.posterior.data_vars) == {"mu", "tau"}
    with pytest.raises(ValueError, match=r"collect_locals=True .* log_likelihood=False"):
        az.from_numpyro(mcmc, log_likelihood=True)
    state = mcmc.last_state.locals
    assert state.values.position.shape == (2, 2000, 1)
    drawn = Predictive(mcmc.sampler.model, whole.get_samples())(jax.random.key(0), y)
    assert drawn["y"].shape == (500, 2000)
    found = az.from_numpyro(whole, log_likelihood=True)
    assert found.log_likelihood["y"].shape == (2, 250, 2000)
    assert found.posterior["z"].shape == (2, 250, 2000)


def test_what_cannot_tell_the_bias_says_so(whole):
    for report in (bias_report, print_summary):
        with pytest.raises(ValueError, match="cannot tell the bias of a model with latent sites"):
            report(whole)


@pytest.mark.slow
def test_sequential_chains_a_pickled_kernel_and_more_draws():
    y = normal_means_data(400)
    kernel = pickle.loads(pickle.dumps(SGHMCSplit(normal_means, collect_locals=["z"])))
    mcmc = posterior_run(kernel, y, chain_method="sequential", num_samples=300, batch=40)
    assert_globals(mcmc, normal_means_posterior(y))
    draws = mcmc.get_samples(group_by_chain=True)
    assert not (draws["z"][0, 0] == draws["z"][1, 0]).any()
    again = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(again.get_samples()["z"], mcmc.get_samples()["z"])


def test_warmup_then_run_goes_on():
    y = normal_means_data(400)
    mcmc = quietly(SGHMCSplit(normal_means, collect_locals=True), num_samples=300, num_warmup=50)
    mcmc.warmup(jax.random.key(0), y, batch_size=40)
    warm = mcmc.post_warmup_state
    mcmc.run(jax.random.key(1), y, batch_size=40)
    assert_globals(mcmc, normal_means_posterior(y))
    mcmc.post_warmup_state = mcmc.last_state
    assert warm.locals is not None
    mcmc.run(jax.random.key(2), y, batch_size=40)
    assert_globals(mcmc, normal_means_posterior(y))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        SGHMCSplit(normal_means, gibbs_fn=draw_normal_means, gibbs_sites=["z"]),
        SGHMCSplit(normal_means, minibatch="epoch"),
        SGNHT(normal_means),
        SGHMCSplit(normal_means, gradient="plain"),
    ],
    ids=["gibbs_fn", "epoch", "SGNHT", "plain"],
)
@pytest.mark.filterwarnings("ignore:A draw takes", "ignore:The minibatch gradient is so noisy")
def test_other_ways_to_the_same_posterior(kernel):
    y = normal_means_data()
    assert_globals(posterior_run(kernel, y), normal_means_posterior(y))


def test_discrete_indicators_against_the_marginal():
    y = mixture_data()
    kernel = SGHMCSplit(mixture, gibbs_fn=draw_indicators, gibbs_sites=["k"], collect_locals=True)
    mcmc = posterior_run(kernel, y)
    assert_globals(mcmc, mixture_posterior(y))
    draws = mcmc.get_samples()
    assert jnp.issubdtype(draws["k"].dtype, jnp.integer)
    odds = indicator_odds(draws["share"][:, None], draws["shift"][:, None], y)
    expected = np.asarray(jax.nn.sigmoid(odds)).mean(0)
    off = np.asarray(draws["k"]).mean(0) - expected
    error = np.sqrt(np.maximum(expected * (1 - expected), 1e-3) / (len(draws["k"]) / 2))
    assert np.abs(off / error).max() < 6
    assert abs(np.mean(off / error)) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data"), [(counts, counts_data), (trials, trials_data)], ids=["Poisson", "Bernoulli"]
)
@pytest.mark.usefixtures("optimised")
def test_against_nuts_on_the_whole_model(model, data):
    """Means and sds of the globals and of some local values, N = 2,000."""
    args = tuple(jnp.asarray(x) for x in data())
    nuts = quietly(
        NUTS(model), num_warmup=500, num_samples=1500, num_chains=2, chain_method="vectorized"
    )
    nuts.run(jax.random.key(0), *args)
    mcmc = posterior_run(SGHMCSplit(model, collect_locals=True), *args, num_samples=1000)
    theirs, ours = (m.get_samples(group_by_chain=True) for m in (nuts, mcmc))
    some = np.argsort(np.asarray(args[1]).reshape(2000, -1).sum(1))[[0, 3, 1000, 1001, 1996, 1999]]
    for name in theirs:
        a, b = (np.asarray(d[name]).reshape(*d[name].shape[:2], -1) for d in (ours, theirs))
        if name == "effect":
            a, b = a[..., some], b[..., some]
        assert_same_distribution(a, b)


# Refusals.

Y = normal_means_data(60)


def _local(build: Any) -> Any:
    """A model with a plate of 60 rows, in which ``build(i, mu)`` has the rest."""

    def model(y, batch_size=20):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
            z = build(mu)
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    return model


def two_plates(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])
    with numpyro.plate("others", 60, subsample_size=batch_size) as i:
        numpyro.sample("x", dist.Normal(mu, 1), obs=y[i])


def crossed(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size, dim=-1) as i:
        with numpyro.plate("columns", 30, subsample_size=10, dim=-2):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=jnp.broadcast_to(y[i], z.shape))


def outside(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])
    numpyro.sample("total", dist.Normal(z.sum(), 1), obs=3.0)


def neighbours(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z - jnp.roll(z, 1), 1), obs=y[i])


def only_local(y, batch_size=20):
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


def unobserved(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size):
        numpyro.sample("y", dist.Normal(mu, 1))


def keyed(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1)) + 0 * jax.random.normal(numpyro.prng_key())
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


normal = _local(lambda mu: numpyro.sample("z", dist.Normal(mu, 1)))
discrete = _local(lambda mu: numpyro.sample("k", dist.Bernoulli(logits=mu)))
stretched = _local(lambda mu: numpyro.sample("z", dist.Uniform(0, jnp.exp(mu))))
fixed = _local(lambda mu: numpyro.sample("z", dist.Delta(mu)))


def wrong_shape(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": jnp.zeros(3)}


def right_shape(rng_key, gibbs_sites, hmc_sites, rows):
    return dict(gibbs_sites)


def array(rng_key, gibbs_sites, hmc_sites, rows):
    return gibbs_sites["k"]


def probabilities(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": jnp.full(rows.shape, 0.3)}


def sevens(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": jnp.full(rows.shape, 7)}


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (two_plates, {}, "'z' .* subsampled plates .*'others', 'rows'"),
        (crossed, {}, "'z' .* pair of rows"),
        (outside, {}, "'z' .* a site outside of the plate"),
        (neighbours, {}, "'z' .* a row's value serves another row"),
        (only_local, {}, "All latent sites"),
        (unobserved, {}, "'y' .* nothing is observed: pass its data"),
        (keyed, {}, "'z' .*prng_key"),
        (discrete, {}, r"'k' .* discrete .* gibbs_sites=\['k'\]"),
        (stretched, {}, "'z' .* support that depends on other values"),
        (fixed, {}, "'z' .* delta"),
        (normal, {"minibatch": "iid"}, "'z' .* a row twice"),
        (normal, {"noise_compensation": True}, "'z' .* a row twice"),
        (normal, {"gradient": "second_order_control_variate"}, "'z' .* Hessian"),
        (normal, {"collect_locals": ["w"]}, r"'w', .* \['z'\]"),
        (normal, {"gibbs_fn": right_shape, "gibbs_sites": ["mu"]}, "'mu', which is no latent"),
        (discrete, {"gibbs_fn": wrong_shape, "gibbs_sites": ["k"]}, r"must return \{'k': \(20,"),
        (discrete, {"gibbs_fn": array, "gibbs_sites": ["k"]}, "must return a dict"),
        (discrete, {"gibbs_fn": probabilities, "gibbs_sites": ["k"]}, "float32 values of 'k'"),
        (discrete, {"gibbs_fn": sevens, "gibbs_sites": ["k"]}, "'k' outside .*, for example 7"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_refused_before_any_sampling(model, options, words):
    with pytest.raises(ValueError, match=words):
        quietly(SGHMCSplit(model, **options)).run(jax.random.key(0), Y)


def test_epochs_with_a_seam_are_refused():
    with pytest.raises(ValueError, match=r"'z' .* 7 rows do not divide 60"):
        quietly(SGHMCSplit(normal, minibatch="epoch")).run(jax.random.key(0), Y, batch_size=7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gibbs_fn": right_shape}, "go together"),
        ({"gibbs_sites": ["k"]}, "go together"),
        ({"gibbs_fn": right_shape, "gibbs_sites": "k"}, "a list of names"),
        ({"gibbs_fn": 3, "gibbs_sites": ["k"]}, "gibbs_fn"),
        ({"gibbs_fn": lambda key: {}, "gibbs_sites": ["k"]}, "keywords rng_key, .*, but "),
        ({"collect_locals": "z"}, "True, False or a list"),
    ],
)
def test_options_are_checked_at_construction(options, words):
    with pytest.raises(ValueError, match=words):
        SGHMCSplit(normal, **options)


def test_options_without_local_sites_or_a_model():
    with pytest.raises(ValueError, match="need a kernel made from a model"):
        SGHMCSplit(potential_fn=lambda z: z @ z, collect_locals=True)
    with pytest.raises(ValueError, match="has none: leave it out"):
        quietly(SGHMCSplit(_local(lambda mu: mu), collect_locals=True)).run(jax.random.key(0), Y)


def test_not_with_rows_on_the_host():
    with pytest.raises(ValueError, match=r"'z' .* not supported with HostArray"):
        quietly(SGHMCSplit(normal)).run(jax.random.key(0), HostArray(Y))


def test_not_in_a_block_of_gibbs():
    def switching(y, batch_size=20):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        mu = numpyro.sample("mu", dist.Normal(k, 1))
        with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    kernel = SGHMCSplit(switching)
    gibbs = Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)])
    with pytest.raises(ValueError, match=r"'z' .* not supported in a block of Gibbs"):
        quietly(gibbs).run(jax.random.key(0), Y)


def test_not_with_checkpoints(tmp_path):
    mcmc = CheckpointedMCMC(
        SGHMCSplit(normal),
        num_warmup=2,
        num_samples=2,
        checkpoint=tmp_path / "run",
        progress_bar=False,
    )
    with pytest.raises(ValueError, match="does not keep the values of latent sites"):
        mcmc.run(jax.random.key(0), Y)
