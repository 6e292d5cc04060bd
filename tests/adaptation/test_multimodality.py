"""Other modes of comparable mass are detected, and the sites that differ are named."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import MCMC, init_to_value

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation import multimodality
from numpyro_sgmcmc.adaptation.initialisation import (
    fit_inits,
    generate_prior_positions,
)
from numpyro_sgmcmc.adaptation.multimodality import (
    compute_mass_fractions,
    describe_other_modes,
    find_other_modes,
    has_barrier,
    interpolate_line,
    is_drifting_towards,
    is_fit_near,
    select_candidate_fits,
)
from numpyro_sgmcmc.adaptation.pilot import (
    PilotResult,
    build_preconditioner_from_fit,
    find_chains_outside_modes,
    find_separated_coordinates,
    init_pilot,
    run_pilot_windows,
)
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.errors import MultimodalPosteriorWarning, StepSizeWarning
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.trace import LatentSite
from tests.adaptation.inputs import make_inputs
from tests.contract.kernels import quietly

RNG = np.random.default_rng(2)
COMPONENT = RNG.choice(3, 900, p=[0.3, 0.45, 0.25])
Y = jnp.asarray(np.array([-4.0, 0.0, 3.5])[COMPONENT] + RNG.standard_normal(900), jnp.float32)
SQUARES = jnp.asarray(2.0 + np.random.default_rng(3).standard_normal(300), jnp.float32)


def mixture(y, means, batch_size):
    weights = numpyro.sample("weights", dist.Dirichlet(2.0 * jnp.ones(3)))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        components = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, 1.0))
        numpyro.sample("y", components, obs=y[i])


def unordered(y, batch_size=None):
    means = numpyro.sample("means", dist.Normal(0, 5).expand([3]).to_event(1))
    mixture(y, means, batch_size)


def ordered(y, batch_size=None):
    base = dist.Normal(0, 5).expand([3]).to_event(1)
    means = numpyro.sample("means", dist.TransformedDistribution(base, OrderedTransform()))
    mixture(y, means, batch_size)


def unknown_sign(y, batch_size=None):
    """The square of a parameter is identified, its sign is not."""
    a = numpyro.sample("a", dist.Normal(0, 3))
    b = numpyro.sample("b", dist.Normal(0, 3))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.square(a) + b, 1), obs=y[i])
        numpyro.sample("z", dist.Normal(b, 1), obs=-y[i])


def positive(y, batch_size=None):
    a = numpyro.sample("a", dist.HalfNormal(3))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.square(a), 1), obs=y[i])


def run(model, y=Y, chain_method="vectorized", init_params=None, num_samples=300, **options):
    """Run four chains; return the run and the messages about modes."""
    mcmc = quietly(
        SGHMCSplit(model, **options),
        num_warmup=100,
        num_samples=num_samples,
        num_chains=4,
        chain_method=chain_method,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(0), y, batch_size=100, init_params=init_params)
    return mcmc, [
        str(w.message) for w in caught if issubclass(w.category, MultimodalPosteriorWarning)
    ]


# --- In a run -------------------------------------------------------------------------------------


@pytest.mark.slow  # the description of permuted sites has a quick test
def test_run_permuted_components_are_reported_as_such():
    mcmc, (message,) = run(unordered, num_samples=50)
    assert "`means` permuted" in message
    assert "OrderedTransform" in message
    report = bias_report(mcmc)
    assert not report.is_ok
    assert {s.site: s.diagnosis for s in report.sites}["means"] == "multimodal"
    assert message in report.diagnosis


@pytest.mark.slow
def test_run_ordered_components_have_one_mode():
    mcmc, messages = run(ordered)
    assert not messages
    assert bias_report(mcmc).is_ok


@pytest.mark.slow
def test_run_unknown_sign_is_reported_with_its_site():
    mcmc, (message,) = run(unknown_sign, SQUARES)
    assert "other values of `a`" in message
    assert {s.site: s.diagnosis for s in bias_report(mcmc).sites}["a"] == "multimodal"


@pytest.mark.slow
@pytest.mark.parametrize(
    "chain_method", ["vectorized", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_run_init_in_modes_samples_each_mode_correctly(chain_method):
    """Each chain is right in its mode; together they sample no posterior, which is reported."""
    mcmc, (message,) = run(unknown_sign, SQUARES, chain_method, init_in_modes=True)
    assert "each mode" in message
    trace = mcmc.sampler.adaptation.trace.step_size_limits
    assert list(trace.limits)[-1] == "other_modes"
    assert trace.step_size == mcmc.sampler.adaptation.step_size
    a = np.asarray(mcmc.get_samples(group_by_chain=True)["a"])
    is_positive = (a > 0).mean(1)
    assert set(is_positive) == {0.0, 1.0}  # sequential chains start in either at random
    if chain_method == "vectorized":
        assert sorted(is_positive) == [0.0, 0.0, 1.0, 1.0]
    precision = 300 * np.array([[2 * 2.02**2 * 2, 2.02 * 2], [2.02 * 2, 2.0]])
    sd = np.sqrt(np.linalg.inv(precision)[0, 0])
    np.testing.assert_allclose(np.abs(a).mean(1), np.abs(a).mean(), atol=0.3 * sd)
    np.testing.assert_allclose(a.std(1), sd, rtol=0.2)
    report = bias_report(mcmc)
    sites = {s.site: s for s in report.sites}
    assert sites["a"].diagnosis == "not converged"
    assert "within each" in report.diagnosis
    # Bias within the modes is estimated as if these were one.
    for site in sites.values():
        assert abs(site.mean_bias) < 0.15
        assert abs(site.sd_inflation) < 0.1
    assert not report.heavy_tailed_coordinates.size


@pytest.mark.slow
def test_run_init_in_modes_one_mode_does_not_change_draws():
    runs = (run(positive, SQUARES, init_in_modes=c)[0] for c in (False, True))
    default, in_modes = (mcmc.get_samples()["a"] for mcmc in runs)
    np.testing.assert_array_equal(default, in_modes)


@pytest.mark.slow
def test_run_init_params_no_other_mode_is_searched_for():
    init_params = {"a": 2.0 * np.ones(4), "b": -2.0 * np.ones(4)}
    assert not run(unknown_sign, SQUARES, init_params=init_params, num_samples=10)[1]


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_run_strategy_in_one_mode_chains_stay_in_it(sign):
    """A strategy with values is the user's choice of the mode, and no prior draws are fitted."""
    strategy = init_to_value(values={"a": sign * 2.0, "b": sign * -2.0})
    y = jnp.asarray(2.0 + np.random.default_rng(3).standard_normal(1_200), jnp.float32)
    mcmc = quietly(SGHMCSplit(unknown_sign, init_strategy=strategy), num_warmup=2, num_samples=2)
    mcmc.run(jax.random.key(0), y, batch_size=600)
    assert (sign * mcmc.get_samples()["a"] > 0.0).all()


@pytest.mark.slow
@pytest.mark.parametrize("sd", [36.0, 42.0])
def test_run_mode_behind_a_low_barrier_is_reported(sd):
    """Chains from there neither converge nor come to the main mode; it has 31% of the mass."""
    rng = np.random.default_rng(3)
    noise = rng.standard_normal((2, 20_000))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True)
    y, z = jnp.asarray(np.array([[1.0], [0.5]]) + sd * noise, jnp.float32)

    def model(y, z, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0.5, 1.5))
        c = numpyro.sample("c", dist.Normal(0, 3))
        mean = a * a * (0.25 + 0.75 * jax.nn.sigmoid(-4 * a))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mean, sd), obs=y[i])
            numpyro.sample("z", dist.Normal(c + 0.6 * a, sd), obs=z[i])

    mcmc = quietly(SGHMCSplit(model), num_warmup=10, num_samples=10)
    with pytest.warns(MultimodalPosteriorWarning, match=r"\d\d% .*`a`"):
        mcmc.run(jax.random.key(0), y, z, batch_size=100)


@pytest.mark.slow
@pytest.mark.parametrize("num", [2_000, 200_000])
def test_run_many_observations_mirror_mode_is_found(num):
    """With many observations fits end several SDs from their modes, and ELBOs differ by nats."""
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
    modes = [w for w in caught if issubclass(w.category, MultimodalPosteriorWarning)]
    assert any("`w`" in str(w.message) for w in modes)


def test_init_in_modes_incompatible_options_raise():
    with pytest.raises(ValueError, match="init_in_modes"):
        SGHMCSplit(unknown_sign, init_in_modes=True, noise_compensation=True)

    def wide(y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([65]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(w[0], 1), obs=y[i])

    mcmc = quietly(SGHMCSplit(wide, init_in_modes=True, dense_mass=True), num_samples=1)
    with pytest.raises(ValueError, match=r"init_in_modes.*64"):
        mcmc.run(jax.random.key(0), Y, batch_size=100)


def test_warm_up_init_in_modes_issues_each_warning_once():
    """The step size is as wrong in one mode as in the other."""
    kernel = SGHMCSplit(unknown_sign, init_in_modes=True, step_size=1.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        kernel.init(jax.random.key(0), 10, None, (SQUARES,), {"batch_size": 100})
    assert len(kernel.adaptation.other_mode_preconditioners) == 1
    assert [w.category for w in caught].count(StepSizeWarning) == 1


# --- The stages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "num_others"), [(unknown_sign, 1), (positive, 0)])
def test_find_other_modes_far_fit_is_a_mode_only_where_chains_stay(model, num_others):
    """A second fit is at the mirror image, or where chains return to the only mode."""
    inputs = make_inputs(model, (SQUARES,), 100)
    init = np.full(inputs.potential.dim, 0.5)
    (best,) = fit_inits(inputs, [init], [])
    far = best._replace(mean=best.mean * np.array([-1.0, 1.0][: len(init)]))
    pilot = init_pilot(inputs, build_preconditioner_from_fit(inputs, best), best)
    main = run_pilot_windows(inputs, pilot, inputs.budget.pilot_window_steps)
    others = find_other_modes(inputs, main, (best, far))
    assert len(others) == num_others
    for mode in others:
        assert mode.is_converged
        assert mode.log_mass_deficit == pytest.approx(0.0, abs=0.5)
        assert mode.center[0] == pytest.approx(-main.center[0], abs=0.1)


def test_find_other_modes_search_ends_after_some_predicted_seconds(monkeypatch):
    """Chains of the first fit take so many steps of 17 gradients of a second each."""
    inputs = make_inputs(unknown_sign, (SQUARES,), 100)
    (best,) = fit_inits(inputs, [np.full(inputs.potential.dim, 0.5)], [])
    far = best._replace(mean=best.mean * np.array([-1.0, 1.0]))
    pilot = init_pilot(inputs, build_preconditioner_from_fit(inputs, best), best)
    main = run_pilot_windows(inputs, pilot, inputs.budget.pilot_window_steps)
    monkeypatch.setattr(multimodality, "estimate_gradient_seconds", lambda *_: 1.0)
    monkeypatch.setattr(multimodality, "is_fit_near", lambda *_: False)
    runs = []

    def run_windows(*args, **options):
        runs.append(run_pilot_windows(*args, **options))
        return runs[-1]

    monkeypatch.setattr(multimodality, "run_pilot_windows", run_windows)
    for max_seconds, num_runs in ((0.0, 0), (17.0 * 400, 1), (np.inf, 2)):
        runs.clear()
        find_other_modes(inputs, main, (best, far, far), max_seconds)
        assert len(runs) == num_runs
    assert all(run.num_steps >= 400 for run in runs)


def test_generate_prior_positions_are_not_all_in_the_narrow_mode():
    """The density is largest at 2, where a fifth of the prior draws are."""

    def model(y, batch_size=None):
        m = numpyro.sample("m", dist.Normal(0, 3))
        narrow = dist.Normal(2, 0.5).log_prob(m)
        numpyro.factor("modes", jnp.logaddexp(narrow, dist.Normal(-3, 3).log_prob(m)))
        with numpyro.plate("rows", len(y), subsample_size=batch_size):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    inputs = make_inputs(model, (jnp.zeros(20),), 20)
    for seed in range(10):
        positions = np.ravel(list(generate_prior_positions(inputs, 12, seed)))
        assert len(positions) == 12
        assert 2 <= (np.abs(positions - 2) < 1).sum() <= 11


def fit_at(mean, elbo=0.0):
    return MeanField(np.full(2, mean), np.full(2, 0.1), elbo)


def test_select_candidate_fits_drops_the_best_and_those_far_below():
    best, near, small = fit_at(0.0, -10.0), fit_at(1.0, -30.0), fit_at(2.0, -500.0)
    assert select_candidate_fits([best, near, small, fit_at(3.0, -np.inf)]) == [near]


def test_compute_mass_fractions_heavier_modes_have_more_than_half():
    np.testing.assert_allclose(compute_mass_fractions([0.0]), [0.5])
    np.testing.assert_allclose(compute_mass_fractions([np.log(9.0)]), [0.1])
    np.testing.assert_allclose(compute_mass_fractions([-np.log(9.0), -np.log(90.0)]), [0.09, 0.9])
    np.testing.assert_allclose(compute_mass_fractions([-2_000.0]), [1.0])


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_find_separated_coordinates_overlapping_draws_are_not_separated(offset):
    rng = np.random.default_rng(0)
    draws, other_draws = rng.standard_normal((2, 16, 3))
    assert not len(find_separated_coordinates(draws, other_draws + offset))
    assert not find_chains_outside_modes(draws + offset, [other_draws]).any()
    other_draws[:, 1] += 20.0
    assert list(find_separated_coordinates(draws, other_draws)) == [1]


def test_find_separated_coordinates_some_chains_crossed_the_barrier():
    rng = np.random.default_rng(0)
    draws = 0.2 * rng.standard_normal((16, 2))
    other_draws = 0.2 * rng.standard_normal((16, 2)) + np.array([3.0, 0.0])
    other_draws[:5, 0] -= 3.0
    assert list(find_separated_coordinates(draws, other_draws)) == [0]
    assert list(find_chains_outside_modes(other_draws, [draws])) == [False] * 5 + [True] * 11
    other_draws[:9, 0] = 0.0
    assert not len(find_separated_coordinates(draws, other_draws))
    assert not find_chains_outside_modes(other_draws, [draws]).any()


def test_is_fit_near_within_its_sds_and_error():
    draws = 0.1 * np.random.default_rng(0).standard_normal((16, 2))
    assert is_fit_near(fit_at(0.1), draws, np.zeros(2))
    assert not is_fit_near(fit_at(0.7), draws, np.zeros(2))
    assert is_fit_near(fit_at(0.7), draws, np.full(2, 0.3))


@pytest.mark.parametrize(
    ("potential", "expected"),
    [
        (lambda q: np.minimum(np.square(q), np.square(q - 4.0) + 3.0), True),
        (lambda q: np.where(np.abs(q - 2.0) < 1.9, np.inf, 0.0), True),
        (lambda q: np.square(q) / 50.0, False),
        (lambda q: np.square(q - 2.0), False),
    ],
    ids=["two wells", "no density between", "slope", "one well"],
)
def test_has_barrier_only_where_the_density_falls_between(potential, expected):
    line = interpolate_line(np.zeros(1), np.full(1, 4.0))
    np.testing.assert_array_equal(line[[0, -1], 0], [0.0, 4.0])
    assert has_barrier(potential(line[:, 0])) == expected


@pytest.mark.parametrize(("previous", "is_drifting"), [(3.0, False), (3.2, False), (3.6, True)])
def test_is_drifting_towards_chains_that_approach_in_every_window(previous, is_drifting):
    rng = np.random.default_rng(0)
    draws, q = 0.2 * rng.standard_normal((2, 16, 1)) + np.array([[[0.0]], [[3.0]]])
    preconditioner = Preconditioner(np.zeros(1), np.ones(1))
    medians = (np.array([previous]), np.array([3.0]))
    pilot = PilotResult(preconditioner, q, False, 1.2, medians)
    assert is_drifting_towards(pilot, draws) == is_drifting
    assert not is_drifting_towards(PilotResult(preconditioner, q, True, 1.0, medians), draws)
    assert is_drifting_towards(PilotResult(preconditioner, q, False, 1.2, medians[:1]), draws)


# --- How modes differ -----------------------------------------------------------------------------

LOADINGS = np.random.default_rng(4).standard_normal((3, 20))
ROTATION = np.linalg.qr(np.random.default_rng(5).standard_normal((3, 3)))[0]
CHANGED = LOADINGS + 3.0 * (np.arange(60).reshape(3, 20) == 17)


def describe_mode(other, loadings=LOADINGS):
    """Return the message about a second mode of a matrix, with an error of 0.05 in each entry."""
    sites = (LatentSite("loadings", loadings.shape, dist.constraints.real),)
    potential = SimpleNamespace(sites=sites, dim=loadings.size)
    zero = np.zeros(loadings.size)
    noise = 0.05 * np.random.default_rng(6).standard_normal((2, 16, loadings.size))
    modes = loadings.ravel() + noise[0], other.ravel() + noise[1]
    pilot = PilotResult(Preconditioner(zero, zero + 1.0, zero), modes[1])
    return describe_other_modes(potential, modes[0], [pilot], init_in_modes=False).message


@pytest.mark.parametrize(
    ("loadings", "other"),
    [
        (LOADINGS, ROTATION @ LOADINGS),
        (LOADINGS.T, LOADINGS.T @ ROTATION),
        (LOADINGS.reshape(3, 4, 5), (ROTATION.T @ LOADINGS).reshape(3, 4, 5)),
        (LOADINGS[:2], np.array([[0.6, 0.8], [-0.8, 0.6]]) @ LOADINGS[:2]),
    ],
    ids=["rows", "columns", "three axes", "two components"],
)
def test_rotated_components_are_described_as_such(loadings, other):
    message = describe_mode(other, loadings)
    assert "rotated" in message
    assert "`loadings`" in message
    assert "OrderedTransform" not in message


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (LOADINGS[[1, 2, 0]], "permuted"),
        (LOADINGS * np.array([[1], [-1], [1]]), "other values"),
        (LOADINGS[[1, 0, 2]] * np.array([[1], [-1], [1]]), "other values"),
        (CHANGED, "other values"),
        (LOADINGS + 1.0, "other values"),
        (np.random.default_rng(7).standard_normal((3, 20)), "other values"),
    ],
    ids=["permuted", "negated", "permuted and negated", "one entry", "shifted", "unrelated"],
)
def test_other_differences_are_not_described_as_rotations(other, word):
    message = describe_mode(other)
    assert word in message
    assert "rotated" not in message


@pytest.mark.parametrize("is_block_arrow", [True, False])
def test_slow_chains_of_a_fitted_hierarchy_have_a_dominant_mode(monkeypatch, is_block_arrow):
    """R-hat of a scale near zero may exceed two although fits from several positions agree."""
    pilot = SimpleNamespace(preconditioner=SimpleNamespace(is_common=is_block_arrow))
    monkeypatch.setattr(multimodality, "rescale_to_prior", lambda inputs, pilot: pilot)
    monkeypatch.setattr(multimodality, "find_other_modes", lambda inputs, pilot, fits: ())
    assert multimodality.find_modes(None, pilot, []).has_dominant_mode == is_block_arrow
