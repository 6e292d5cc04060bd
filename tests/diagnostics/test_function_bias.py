"""Bias of functions of the draws, on draws whose bias is known."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import Predictive

from numpyro_sgmcmc import bias_report
from numpyro_sgmcmc.diagnostics import bias_corrected_samples
from numpyro_sgmcmc.diagnostics.function_bias import estimate_function_bias
from numpyro_sgmcmc.diagnostics.predictive import DrawFunctions
from numpyro_sgmcmc.diagnostics.stein_estimates import GradientsAtDraws, SteinEstimates
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.data.host_rows import NUM_ROWS, X, Y, by_index, fit

RNG = np.random.default_rng(0)
SD = np.array([1.0, 0.2, 5.0])
ROWS = RNG.standard_normal((7, 3)).astype(np.float32)


def linear(draw, rows):
    return rows @ draw["q"]


def square(draw):
    return (draw["q"] ** 2).sum()


def cube(draw):
    return (draw["q"] ** 3)[0]


def estimate(fn, row_arrays, q, gradients, preconditioner, **options):
    """Estimate the bias of a function of draws q whose gradients are known."""
    names, measured = estimate_function_bias(
        DrawFunctions.from_fn(fn, row_arrays),
        {"q": jnp.asarray(q, jnp.float32)},
        GradientsAtDraws.from_arrays(q, gradients),
        preconditioner.cast(jnp.float32),
        lambda x: {"q": x},
        SteinEstimates(*[None] * 6),
        **options,
    )
    return names, measured.stein.bias


def estimate_for_gaussian(fn, row_arrays, sd_ratio, offset):
    """Estimate from draws of a Gaussian whose SDs and mean differ from the posterior's."""
    q = offset + sd_ratio * SD * RNG.standard_normal((4, 4_000, 3))
    return estimate(fn, row_arrays, q, q / SD**2, Preconditioner(np.zeros(3), SD))


@pytest.mark.parametrize("sd_ratio", [1.0, np.array([1.0, 1.3, 0.8])], ids=["right", "unequal"])
def test_bias_of_linear_functions_of_a_gaussian_is_exact(sd_ratio):
    offset = np.array([0.1, 0.0, -0.5])
    names, bias = estimate_for_gaussian(linear, (ROWS,), sd_ratio, offset)
    sd = np.sqrt(np.square(ROWS) @ SD**2)
    sd_inflation = np.sqrt(np.square(ROWS) @ np.square(sd_ratio * SD)) / sd - 1.0
    assert [name for name, _ in names] == ["linear"] * 7
    assert names[3] == ("linear", "linear[3]")
    truths = (bias.sd_inflation, sd_inflation), (bias.mean_bias, ROWS @ offset / sd)
    for (value, error), truth in truths:
        assert error.max() < 0.03
        assert np.abs((value - truth) / error).max() < 4.0


@pytest.mark.parametrize("variance_ratio", [1.0, 1.5])
@pytest.mark.parametrize("fn", [square, cube])
def test_bias_of_nonlinear_functions_accounts_for_their_laplacian(fn, variance_ratio):
    """It matters for the mean of the square, and for the SD of the cube as well."""
    _, bias = estimate_for_gaussian(fn, (), np.sqrt(variance_ratio), 0.0)
    value, error = (x.item() for x in bias.sd_inflation)
    assert error < 0.06
    ratio = variance_ratio if fn is square else (5.0 * variance_ratio - 2.0) / 3.0
    assert abs(value - (np.sqrt(ratio) - 1.0)) < 4.0 * error
    # In units of the SD that the estimated inflation implies.
    sd = np.sqrt(2.0 * (SD**4).sum()) * variance_ratio / np.sqrt(variance_ratio)
    mean_bias = (variance_ratio - 1.0) * (SD**2).sum() / sd if fn is square else 0.0
    value, error = (x.item() for x in bias.mean_bias)
    assert error < 0.1
    assert abs(value - mean_bias) < 4.0 * error


@pytest.mark.parametrize("min_curvature_ratio", [2.0, np.inf], ids=["metric", "gradient"])
def test_inflation_along_narrow_directions_has_little_weight(min_curvature_ratio):
    """A Gaussian that 40 rows determine, in units of its prior, inflated where it is narrow.

    The true SD inflation of the rows' values is 10% on average. With the gradient as field, as for
    an infinite ratio, 24% is estimated.
    """
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((40, 6)) * np.array([3.0, 2.0, 1.0, 0.3, 0.1, 0.03])
    curvature, axes = np.linalg.eigh(np.eye(6) + 30.0 * rows.T @ rows)
    variance_ratio = 1.0 + 0.8 * curvature / curvature.max()
    white = rng.standard_normal((4, 1_000, 6))
    q = white * np.sqrt(variance_ratio / curvature) @ axes.T
    gradients = white * np.sqrt(variance_ratio * curvature) @ axes.T
    variance = np.square(rows @ axes) / curvature
    truth = np.sqrt((variance @ variance_ratio) / variance.sum(1)) - 1.0
    assert 0.05 < truth.mean() < 0.12
    preconditioner = Preconditioner(np.zeros(6), np.ones(6))
    arguments = linear, (rows.astype(np.float32),), q, gradients, preconditioner
    _, bias = estimate(*arguments, min_curvature_ratio=min_curvature_ratio)
    value, error = bias.sd_inflation
    root_mean_square = np.sqrt(np.square(value - truth).mean())
    if min_curvature_ratio == 2.0:
        assert error.max() < 0.02
        assert abs((value - truth).mean()) < 0.04
        assert root_mean_square < 0.06
    else:
        assert (value - truth).mean() > 0.1
        assert root_mean_square > 0.1


# --- Reports ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    """Return a run with large steps and minibatch gradients, whose noise inflates all SDs."""
    options = {"gradient_estimator": "minibatch", "subsampling": "iid", "step_size": 0.3}
    options["inverse_mass_matrix"] = np.full(2, 1.0 / NUM_ROWS)
    return fit(X, Y, by_index, num_samples=500, options=options)


def prediction(draw, X):
    return X @ draw["beta"]


@pytest.mark.slow
@pytest.mark.parametrize("full_data", [False, True])
def test_report_on_predictions_is_their_true_bias(run, full_data):
    sd = np.asarray(prediction({"beta": run.get_samples()["beta"].T}, X[:5])).std(1)
    sd_ratio = sd / (np.linalg.norm(X[:5], axis=1) / np.sqrt(NUM_ROWS))
    report = bias_report(run, prediction, X[:5], full_data=full_data)
    value, error = report.sd_inflation
    assert (np.abs(value + 1.0 - sd_ratio) < 4.0 * error + 0.1 * sd_ratio).all()
    (site,) = report.sites
    assert (site.site, site.size, site.diagnosis) == ("prediction", 5, "biased")
    assert "worst of up to 5 values" in str(report)
    assert "SDs of `prediction`" in report.diagnosis


def test_functions_without_a_bias_estimate_raise(run):
    def sign(draw):
        return {"sign": draw["beta"] > 0}

    for fn, match in (
        (sign, "'sign'.*bool"),
        (Predictive(by_index, run.get_samples()), "`fn`.*Predictive"),
        (lambda draw: {"log": jnp.log(draw["beta"])}, "'log'.*not finite"),
    ):
        with pytest.raises(ValueError, match=match):
            bias_report(run, fn)
    with pytest.raises(ValueError, match="`fn`"):
        bias_report(run, None, X)


def test_draws_cannot_be_corrected_by_a_report_on_functions(run):
    with pytest.raises(ValueError, match="`report`"):
        bias_corrected_samples(run, report=bias_report(run, prediction, X[:2]))
