"""Modes besides the one that the chains are in are reported, and what differs in them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import MCMC, init_to_uniform

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation import initialisation
from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.context import WarmupContext
from numpyro_sgmcmc.adaptation.multimodality import (
    Mode,
    VariationalFit,
    _compute_mass_fractions,
    find_chains_outside_modes,
    find_separated_coordinates,
    has_barrier,
    interpolate_line,
    is_drifting_towards,
    is_fit_near,
    select_candidate_fits,
)
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.contract.kernels import quietly

RNG = np.random.default_rng(2)
PART = RNG.choice(3, 900, p=[0.3, 0.45, 0.25])
Y = jnp.asarray(np.array([-4.0, 0.0, 3.5])[PART] + RNG.standard_normal(900), jnp.float32)


def components(y, means, batch_size):
    weights = numpyro.sample("weights", dist.Dirichlet(2.0 * jnp.ones(3)))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, 1.0))
        numpyro.sample("y", mixture, obs=y[i])


def free(y, batch_size=None):
    means = numpyro.sample("means", dist.Normal(0, 5).expand([3]).to_event(1))
    components(y, means, batch_size)


def ordered(y, batch_size=None):
    start = dist.Normal(0, 5).expand([3]).to_event(1)
    means = numpyro.sample("means", dist.TransformedDistribution(start, OrderedTransform()))
    components(y, means, batch_size)


def two_places(y, batch_size=None):
    """The square of a parameter is known, its sign is not."""
    a = numpyro.sample("a", dist.Normal(0, 3))
    b = numpyro.sample("b", dist.Normal(0, 3))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.square(a) + b, 1), obs=y[i])
        numpyro.sample("z", dist.Normal(b, 1), obs=-y[i])


def above_zero(y, batch_size=None):
    a = numpyro.sample("a", dist.HalfNormal(3))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.square(a), 1), obs=y[i])


def run(model, y=Y, chain_method="vectorized", init_in_modes=False, **options):
    mcmc = quietly(
        SGHMCSplit(model, init_in_modes=init_in_modes),
        num_warmup=100,
        num_samples=300,
        num_chains=4,
        chain_method=chain_method,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(0), y, batch_size=100, **options)
    return mcmc, [str(w.message) for w in caught if "mode" in str(w.message)]


def test_components_that_can_be_exchanged_are_named_as_that():
    mcmc, said = run(free)
    assert "other mode" in said[0]
    assert "the entries of `means` are exchanged" in said[0]
    assert "OrderedTransform" in said[0]
    report = bias_report(mcmc)
    assert not report.is_ok
    assert {s.site: s.diagnosis for s in report.sites}["means"] == "multimodal"
    assert said[0] in report.diagnosis


@pytest.mark.slow
def test_ordered_components_are_one_mode():
    mcmc, said = run(ordered)
    assert not said
    assert bias_report(mcmc).is_ok


@pytest.mark.slow
def test_another_place_is_named():
    y = jnp.asarray(2.0 + np.random.default_rng(3).standard_normal(300), jnp.float32)
    mcmc, said = run(two_places, y)
    assert " % of the mass, in which `a` is elsewhere" in said[0]
    assert {s.site: s.diagnosis for s in bias_report(mcmc).sites}["a"] == "multimodal"


@pytest.mark.parametrize(
    "chain_method", ["vectorized", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_chains_in_each_mode(chain_method):
    """Right in both; together no posterior's, and said so."""
    y = jnp.asarray(2.0 + np.random.default_rng(3).standard_normal(300), jnp.float32)
    mcmc, said = run(two_places, y, chain_method, init_in_modes=True)
    assert "Chains start in each in turn" in said[0]
    a = np.asarray(mcmc.get_samples(group_by_chain=True)["a"])
    is_above = (a > 0).mean(1)
    assert set(is_above) == {0.0, 1.0}  # one by one they start in either at random
    if chain_method == "vectorized":
        assert sorted(is_above) == [0.0, 0.0, 1.0, 1.0]
    precision = 300 * np.array([[2 * 2.02**2 * 2, 2.02 * 2], [2.02 * 2, 2.0]])
    sd = np.sqrt(np.linalg.inv(precision)[0, 0])
    np.testing.assert_allclose(np.abs(a).mean(1), np.abs(a).mean(), atol=0.3 * sd)
    np.testing.assert_allclose(a.std(1), sd, rtol=0.2)
    report = bias_report(mcmc)
    verdicts = {s.site: s for s in report.sites}
    assert verdicts["a"].diagnosis == "not converged"
    assert "within each" in report.diagnosis
    # Laid over each other the modes say what they say by themselves.
    for site in verdicts.values():
        assert abs(site.mean_bias) < 0.15
        assert abs(site.sd_inflation) < 0.1
    assert not report.heavy_tailed_coordinates.size


@pytest.mark.slow
def test_where_there_is_one_mode_chains_in_modes_are_as_ever():
    y = jnp.asarray(2.0 + np.random.default_rng(3).standard_normal(300), jnp.float32)
    model = above_zero
    plain, in_modes = (run(model, y, init_in_modes=c)[0] for c in (False, True))
    np.testing.assert_array_equal(plain.get_samples()["a"], in_modes.get_samples()["a"])


def test_where_the_user_says_where_to_start_no_other_mode_is_looked_for():
    y = jnp.asarray(2.0 + np.random.default_rng(3).standard_normal(300), jnp.float32)
    start = {"a": 2.0 * np.ones(4), "b": -2.0 * np.ones(4)}
    _, said = run(two_places, y, init_params=start)
    assert not said


@pytest.mark.slow
def test_large_minibatches_have_starts_by_the_prior_too(monkeypatch):
    """Those by the strategy are in one mode."""
    monkeypatch.setattr(WarmupContext, "find_finite_positions", lambda *_: [np.array([2.0, -2.0])])
    y = jnp.asarray(2.0 + np.random.default_rng(3).standard_normal(1_200), jnp.float32)
    with pytest.warns(UserWarning, match="in which `a` is elsewhere"):
        quietly(SGHMCSplit(two_places), num_warmup=2, num_samples=2).run(
            jax.random.key(0), y, batch_size=600
        )


def fit_at(mean, bound):
    return VariationalFit(MeanField(np.full(2, mean), np.full(2, 0.1)), bound)


def test_fits_that_failed_are_no_modes():
    best, near, small = fit_at(0.0, -10.0), fit_at(1.0, -30.0), fit_at(2.0, -500.0)
    assert [
        fit is near for fit in select_candidate_fits([best, near, small, fit_at(3.0, -np.inf)])
    ] == [True]


def test_a_heavier_mode_is_told_to_be_heavier():
    np.testing.assert_allclose(_compute_mass_fractions([0.0]), [0.5])
    np.testing.assert_allclose(_compute_mass_fractions([np.log(9.0)]), [0.1])
    np.testing.assert_allclose(_compute_mass_fractions([-np.log(9.0), -np.log(90.0)]), [0.09, 0.9])
    np.testing.assert_allclose(_compute_mass_fractions([-2_000.0]), [1.0])


@pytest.mark.parametrize("away", [0.0, 0.5])
def test_draws_that_meet_are_not_apart(away):
    rng = np.random.default_rng(0)
    ours, theirs = rng.standard_normal((2, 16, 3))
    assert not len(find_separated_coordinates(ours, theirs + away))
    assert not find_chains_outside_modes(ours + away, [theirs]).any()
    theirs[:, 1] += 20.0
    assert list(find_separated_coordinates(ours, theirs)) == [1]
    draws, sure = 0.1 * rng.standard_normal((16, 2)), np.zeros(2)
    assert is_fit_near(fit_at(0.1, 0.0), draws, sure)
    assert not is_fit_near(fit_at(0.7, 0.0), draws, sure)
    assert is_fit_near(fit_at(0.7, 0.0), draws, sure + 0.3)


def test_chains_that_a_low_barrier_lets_out_are_of_their_mode():
    rng = np.random.default_rng(0)
    ours = 0.2 * rng.standard_normal((16, 2))
    theirs = 0.2 * rng.standard_normal((16, 2)) + np.array([3.0, 0.0])
    theirs[:5, 0] -= 3.0
    assert list(find_separated_coordinates(ours, theirs)) == [0]
    assert list(find_chains_outside_modes(theirs, [ours])) == [False] * 5 + [True] * 11
    theirs[:9, 0] = 0.0
    assert not len(find_separated_coordinates(ours, theirs))
    assert not find_chains_outside_modes(theirs, [ours]).any()


@pytest.mark.parametrize(
    ("potential", "expected"),
    [
        (lambda q: np.minimum(np.square(q), np.square(q - 4.0) + 3.0), True),
        (lambda q: np.where(np.abs(q - 2.0) < 1.9, np.inf, 0.0), True),
        (lambda q: np.square(q) / 50.0, False),
        (lambda q: np.square(q - 2.0), False),
    ],
    ids=["two wells", "nothing between", "a slope", "one well"],
)
def test_modes_are_parted_by_a_barrier(potential, expected):
    line = interpolate_line(np.zeros(1), np.full(1, 4.0))
    np.testing.assert_array_equal(line[[0, -1], 0], [0.0, 4.0])
    assert has_barrier(potential(line[:, 0])) == expected


@pytest.mark.slow
def test_chains_that_are_apart_by_chance_are_no_mode(monkeypatch):
    """Of all groups of pilot chains it is said that they do not meet: there is one mode."""
    for name, said in [
        ("is_near", False),
        ("is_on_its_way", False),
        ("are_apart", np.arange(1)),
    ]:
        monkeypatch.setattr(f"numpyro_sgmcmc.adaptation.warmup.{name}", lambda *_, s=said: s)
    _, said = run(ordered)
    assert not said


@pytest.mark.parametrize(("before", "is_coming"), [(3.0, False), (3.2, False), (3.6, True)])
def test_chains_that_come_nearer_in_every_window_are_on_their_way(before, is_coming):
    rng = np.random.default_rng(0)
    ours, theirs = 0.2 * rng.standard_normal((2, 16, 1)) + np.array([[[0.0]], [[3.0]]])
    trail = (np.array([before]), np.array([3.0]))
    mode = Mode(Preconditioner(np.zeros(1), np.ones(1)), theirs, False, 1.2, trail)
    assert is_drifting_towards(mode, ours) == is_coming
    assert not is_drifting_towards(mode._replace(is_converged=True), ours)
    assert is_drifting_towards(mode._replace(window_medians=trail[:1]), ours)


@pytest.mark.slow
@pytest.mark.parametrize("sd", [36.0, 42.0])
def test_a_mode_behind_a_low_barrier_is_told(sd):
    """Chains from there never settle, nor do they come to the others: 31 % of the mass."""
    rng = np.random.default_rng(3)
    noise = rng.standard_normal((2, 20_000))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True)
    y, z = jnp.asarray(np.array([[1.0], [0.5]]) + sd * noise, jnp.float32)

    def model(y, z, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0.5, 1.5))
        c = numpyro.sample("c", dist.Normal(0, 3))
        bent = a * a * (0.25 + 0.75 * jax.nn.sigmoid(-4 * a))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(bent, sd), obs=y[i])
            numpyro.sample("z", dist.Normal(c + 0.6 * a, sd), obs=z[i])

    mcmc = quietly(SGHMCSplit(model), num_warmup=10, num_samples=10)
    with pytest.warns(
        UserWarning, match=r"another mode, with about \d\d % of the mass, in which `a`"
    ):
        mcmc.run(jax.random.key(0), y, z, batch_size=100)


def test_starts_by_the_prior_are_not_all_where_the_density_is_largest(monkeypatch):
    """The density is largest at 2, and a fifth of the prior's draws lie there."""

    def model(y, batch_size=None):
        m = numpyro.sample("m", dist.Normal(0, 3))
        tall = dist.Normal(2, 0.5).log_prob(m)
        numpyro.factor("modes", jnp.logaddexp(tall, dist.Normal(-3, 3).log_prob(m)))
        with numpyro.plate("rows", len(y), subsample_size=batch_size):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    y = jnp.zeros(20)
    arguments = Arguments((y,), {"batch_size": 20})
    target = get_model_potential(model, arguments, init_to_uniform)
    for seed in range(10):
        monkeypatch.setattr(initialisation, "WARMUP_SEED", seed)
        found = np.ravel(
            list(initialisation.generate_prior_positions(BatchedGradients(target, arguments), 12))
        )
        is_tall = np.abs(found - 2) < 1
        assert len(found) == 12
        assert 2 <= is_tall.sum() <= 11


@pytest.mark.slow
@pytest.mark.parametrize("num", [2_000, 200_000])
def test_a_mirror_is_found_with_many_rows(num):
    """Fits end several sds from their modes there, and bounds differ by many nats."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((num, 3)).astype(np.float32)
    y = np.square(x @ np.array([1.0, -0.5, 0.8])) / 4 + 0.5 * rng.standard_normal(num)

    def model(x, y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(jnp.square(x[i] @ w) / 4, scale), obs=y[i])

    mcmc = MCMC(SGHMCSplit(model), num_warmup=10, num_samples=10, progress_bar=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(0), jnp.asarray(x), jnp.asarray(y, jnp.float32), batch_size=100)
    assert any("in which `w` is elsewhere" in str(w.message) for w in caught)


def test_what_does_not_go_with_several_modes():
    with pytest.raises(ValueError, match=r"leave out either it or `init_in_modes`"):
        SGHMCSplit(two_places, init_in_modes=True, noise_compensation=True)

    def wide(y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([65]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(w[0], 1), obs=y[i])

    mcmc = quietly(SGHMCSplit(wide, init_in_modes=True, dense_mass=True), num_samples=1)
    with pytest.raises(ValueError, match=r"diagonal mass matrix above 64 parameters, but"):
        mcmc.run(jax.random.key(0), Y, batch_size=100)
