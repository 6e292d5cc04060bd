"""What the warm-up sees of a posterior: the rows it draws and the density's shape."""

from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_sgmcmc import SGMGT, SGNHT, SGHMCSplit
from numpyro_sgmcmc.adaptation import pilot
from numpyro_sgmcmc.adaptation.batched_gradients import sample_minibatch_indices, sample_subset
from numpyro_sgmcmc.adaptation.step_size import limit_step_size_by_discretisation
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, IIDSubsampling, Plate
from numpyro_sgmcmc.dynamics import RiemannianOverdampedLangevin
from numpyro_sgmcmc.model.gradient_estimators import MinibatchGradient
from numpyro_sgmcmc.model.potential import make_function_potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import ProgressReporter
from tests.contract.kernels import BATCH, survey, survey_data
from tests.adaptation.potentials import FACTORS, eager_potential


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_whitening(factor):
    dense = np.diag(factor) if factor.ndim == 1 else factor
    whitening = Preconditioner(np.array([1.0, 2.0]), factor, np.zeros(2))
    v = np.random.default_rng(0).standard_normal((3, 2))
    np.testing.assert_allclose(whitening.apply(v), v @ dense.T)
    np.testing.assert_allclose(whitening.apply_transpose(v), v @ dense)
    np.testing.assert_allclose(whitening.solve(whitening.apply(v)), v)
    np.testing.assert_allclose(whitening.solve(whitening.apply(v[0])), v[0])
    coordinates = whitening.cast(jnp.float32)
    for x in v.astype(np.float32):
        np.testing.assert_allclose(coordinates.apply(x), whitening.apply(x), rtol=1e-5)
        np.testing.assert_allclose(
            coordinates.apply_transpose(x), whitening.apply_transpose(x), rtol=1e-5
        )
        np.testing.assert_allclose(coordinates.solve(coordinates.apply(x)), x, rtol=1e-4)
        np.testing.assert_allclose(
            coordinates.to_position(x), whitening.center + whitening.apply(x), rtol=1e-5
        )
    covariance = coordinates.inverse_mass_matrix
    np.testing.assert_allclose(
        np.diag(covariance) if factor.ndim == 1 else covariance, dense @ dense.T, rtol=1e-5
    )
    assert whitening.is_finite()
    assert not whitening._replace(reference_hessian=np.array([[np.inf]])).is_finite()


def target_of(*plates):
    return SimpleNamespace(plates=tuple(Plate(*p) for p in plates), host_lookups=())


def test_subset():
    assert sample_subset(target_of(("a", 20_000, 10)), 0) is None
    subset = sample_subset(target_of(("a", 10**6, 10), ("b", 30, 5)), 0)
    assert subset["a"].shape == (20_000,)
    assert (np.diff(subset["a"]) >= 0).all()
    assert 0 <= subset["a"].min() < 1000
    assert 999_000 < subset["a"].max() < 10**6
    assert abs(subset["a"].mean() / 10**6 - 0.5) < 5 / np.sqrt(12 * 20_000)
    np.testing.assert_array_equal(subset["b"], np.arange(30))


def test_rows_for_measuring_noise():
    target = target_of(("a", 50, 20), ("b", 7, 7))
    rng = np.random.default_rng(0)
    for scheme in (IIDSubsampling(), ContiguousSubsampling()):
        rows = sample_minibatch_indices(target, rng, (300, 4), scheme)
        assert rows["a"].shape == (300, 4, 20)
        assert rows["b"].shape == (300, 4, 7)
        for name, size in (("a", 50), ("b", 7)):
            assert rows[name].dtype == np.int32
            counts = np.bincount(rows[name].ravel(), minlength=size)
            assert counts.size == size
            assert np.abs(counts / counts.mean() - 1).max() < 0.2
    np.testing.assert_array_equal(rows["a"], (rows["a"][..., :1] + np.arange(20)) % 50)


@pytest.mark.parametrize(
    ("kernel_class", "settings", "minibatch"),
    [
        (SGHMCSplit, {}, "contiguous"),
        (SGHMCSplit, {"gradient_estimator": "minibatch"}, "contiguous"),
        (SGNHT, {}, "contiguous"),
        (SGNHT, {"gradient_estimator": "minibatch"}, "iid"),
        (SGMGT, {"gradient_estimator": "minibatch"}, "contiguous"),
        (SGMGT, {"gradient_estimator": "minibatch", "step_size": 0.1}, "iid"),
    ],
)
def test_rows_are_independent_where_a_thermostat_is_at_work(kernel_class, settings, minibatch):
    """Over an epoch their noise would cancel, and the thermostat cool the positions too far."""
    kernel = kernel_class(survey, **settings)
    kernel.init(random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})
    assert kernel.adaptation.subsampling.name == minibatch


def test_thermostat_on_epochs_is_warned_of():
    kernel = SGNHT(survey, gradient_estimator="minibatch", subsampling="shuffled")
    with pytest.warns(UserWarning, match="sds may be too narrow"):
        kernel.init(random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})


def test_surface_keeps_the_digits_of_its_callers():
    potential = eager_potential(lambda q: jnp.square(q).sum(), 2)
    value, gradient, hessian = potential.value_grad_hessian(np.array([1.0, 2.0]))
    assert isinstance(value, float)
    assert gradient.dtype == hessian.dtype == np.float64
    np.testing.assert_allclose(gradient, [2, 4])
    np.testing.assert_allclose(hessian, 2 * np.eye(2))
    np.testing.assert_allclose(potential.hessian_products(np.zeros(2), np.eye(2)), 2 * np.eye(2))
    np.testing.assert_allclose(potential.gradient(np.array([1.0, 2.0])), [2, 4])


def test_simulated_chains_know_what_a_metric_does_to_noise():
    dynamics = RiemannianOverdampedLangevin(lambda q: jnp.full((), 4.0))
    of = partial(limit_step_size_by_discretisation, dynamics, "euler", 0.02, 20, 0.05)
    exact, excess = of()
    assert exact == 0.02
    assert excess == pytest.approx((1 / (1 - 0.02 * 4 / 2)) ** 0.5 - 1, abs=0.01)
    noisy, excess = of(noise_variance=3.0)
    assert noisy == pytest.approx(0.6 * 0.02)
    assert 0.02 < excess < 0.06


@pytest.mark.parametrize("fitting", [pilot._MAX_NORMALS_PER_CALL, 20_000, 1])
def test_pilot_draws_whose_noise_fits_into_memory(monkeypatch, fitting):
    """A hundred steps a call, ten, and five: as many draws, of the same posterior."""
    monkeypatch.setattr(pilot, "_MAX_NORMALS_PER_CALL", fitting)
    dim = 60
    target = make_function_potential(lambda z: 0.5 * z @ z, jnp.zeros(dim))
    origin = Preconditioner(np.zeros(dim), np.ones(dim), np.zeros(dim)).cast(target.dtype)
    rng, taken = np.random.default_rng(0), []
    advance = pilot._run_pilot_steps
    monkeypatch.setattr(
        pilot, "_run_pilot_steps", lambda *args: taken.append(args[6][1].shape) or advance(*args)
    )
    start = rng.standard_normal((16, dim))
    draws = pilot.run_pilot(
        target, Arguments(), origin, start, 0.3, 400, rng, MinibatchGradient(), ProgressReporter()
    )
    assert draws.shape == (16, 40, dim)
    assert sum(shape[0] for shape in taken) == 400
    assert max(np.prod(shape) for shape in taken) <= max(fitting, 16 * 5 * dim * 2)
    # A time of 1.5 apart, some 12,000 are independent: bounds of about four standard errors.
    assert abs(draws.var() - 1) < 0.05
    assert abs(draws.mean()) < 0.05
