"""What the user is told of the gradient's noise: which minibatch would serve, and that it does."""

import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.warnings import (
    PredictedMeanBias,
    StepSizeLimits,
    warn_about_gradient_noise,
)
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, Plate
from numpyro_sgmcmc.dynamics import NoseHooverThermostat, UnderdampedLangevin
from numpyro_sgmcmc.model.gradient_estimators import ControlVariate

NAMED = r"of 'rows' (about|all) (\d+): (\d+) steps a draw"


def told(limits, taken, inflation=0.0, size=100_000, batch_size=100, **settings):
    """What is said of a step size at which a draw takes so many steps."""
    fields = {
        "step_size": None,
        "num_steps": None,
        "gradient": None,
        "minibatch": None,
        "noise_compensation": False,
        "inverse_mass_matrix": None,
        "target_sd_bias": 0.05,
        "dynamics": UnderdampedLangevin(1.5),
    }
    context = SimpleNamespace(
        settings=SimpleNamespace(**{**fields, **settings}),
        target=SimpleNamespace(plates=(Plate("rows", size, batch_size),), locals=None),
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        warn_about_gradient_noise(
            context, limits, ContiguousSubsampling(), 3.0 / taken, taken, inflation
        )
    return [str(w.message) for w in said]


def limits(variance, shift_rate=0.0):
    noise, rate = GradientNoiseStats(variance, 1.0, variance), np.array([0.0, -shift_rate])
    return StepSizeLimits(
        ControlVariate(), noise, 1.0, 0.3, PredictedMeanBias(rate, np.zeros(2), lambda h: 0.0), 0.3
    )


def test_nothing_is_said_of_few_steps():
    assert told(limits(0.1), taken=10) == []


def test_nothing_is_said_where_more_rows_would_be_as_much_work():
    """As many times as large, as many times fewer steps."""
    assert told(limits(10.0), taken=120) == []


def test_all_rows_where_they_are_less_work():
    """A draw takes 480 steps of 100 rows and a control variate, or ten of all 2,000."""
    (sentence,) = told(limits(40.0), taken=480, size=2_000)
    assert re.search(NAMED, sentence).groups() == ("all", "2000", "10")
    work = 480 * (100 + 100 * 1.4), 10 * (100 + 2_000)  # a step costs a hundred rows besides
    assert f"{work[0] / work[1]:.1f} times less work" in sentence


def test_sds_that_no_step_size_holds():
    """4,000 times the rows leave 0.25 of variance: at 0.3 an excess of 0.025, which is allowed."""
    (sentence,) = told(limits(1_000.0), taken=500, inflation=2.0, size=10**8)
    assert "sds are predicted to be 73 % too wide, where target_sd_bias allows 5 %" in sentence
    kind, size, num_steps = re.search(NAMED, sentence).groups()
    assert kind == "about"
    of_draw = 1_000.0 * 100 / int(size) * (3.0 / int(num_steps)) / 3.0
    assert of_draw <= 0.05


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"inverse_mass_matrix": np.ones(2)}, "no inverse_mass_matrix of your own"),
        ({"dynamics": UnderdampedLangevin(1e-4)}, "the default friction of 1.5"),
    ],
)
def test_what_is_given_and_may_be_at_fault_is_named(given, cure):
    (sentence,) = told(limits(1_000.0), taken=500, inflation=2.0, **given)
    assert sentence.endswith(f"steps a draw), or {cure}.")


def test_means_that_no_step_size_holds():
    """Where means shift by 0.6 sds at 500 steps, ten times the rows or fewer hold them there."""
    rate = 0.6 / (3.0 / 500)
    (sentence,) = told(limits(1.0, rate), taken=500)
    assert "means are predicted to be 0.6 posterior sds off" in sentence
    _, size, num_steps = re.search(NAMED, sentence).groups()
    assert rate * 3.0 / int(num_steps) * 100 / int(size) <= 0.062
    assert "do not trust them" in sentence


def test_an_integrator_without_the_error_that_holds_steps_short():
    """Means off by 3 h^2 allow steps of 0.14; noise alone 0.3."""
    shifts = PredictedMeanBias(np.zeros(2), np.array([0.0, 3.0]), lambda h: h**2)
    (sentence,) = told(replace(limits(0.1), mean_bias=shifts), taken=22)
    assert "0.14 long and not 0.3" in sentence
    assert "SHMC(model, integrator='baoab')" in sentence
    assert (
        told(replace(limits(0.1), mean_bias=shifts), taken=22, dynamics=NoseHooverThermostat())
        == []
    )
    (sentence,) = told(
        replace(limits(0.1), mean_bias=shifts._replace(bias_per_variance_inflation=3e4)), taken=500
    )
    assert "Means are predicted to be 1.1 posterior sds off" in sentence
    milder = shifts._replace(bias_per_variance_inflation=shifts.bias_per_variance_inflation / 3)
    assert told(replace(limits(0.1), mean_bias=milder), taken=13) == []


@pytest.mark.parametrize("given", [{"step_size": 0.01}, {"num_steps": 500}])
def test_what_is_given_is_not_found_fault_with(given):
    assert told(limits(40.0), taken=480, size=2_000, **given) == []


def test_the_minibatch_that_is_named_serves():
    """In earnest: all 2,000 rows where 20 of them are too noisy for plain gradients."""

    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    y = jnp.asarray(np.random.default_rng(0).standard_normal(2_000), jnp.float32)

    def found(batch_size):
        kernel = SGHMCSplit(model, gradient_estimator="minibatch", subsampling="iid")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            kernel.init(jax.random.key(0), 10, None, (y,), {"batch_size": batch_size})
        return kernel.adaptation, [str(w.message) for w in said]

    _, (sentence,) = found(20)
    assert sentence.endswith("or gradient_estimator='auto'.")
    _, size, num_steps = re.search(NAMED, sentence).groups()
    adaptation, said = found(int(size))
    assert not [s for s in said if "noisy" in s]
    assert adaptation.num_steps == int(num_steps)
