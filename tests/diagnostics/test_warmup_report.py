"""The page on a warm-up says what the warm-up found."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import SGHMCSplit, warmup_report
from numpyro_sgmcmc.adaptation.settings import LocalLatentsInit, StepSizeLimit, StepSizeTrace
from numpyro_sgmcmc.diagnostics import plot_warmup
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind
from tests.contract.kernels import BATCH, quietly, survey, survey_data

mpl.use("Agg")

DATA = survey_data()
GIVEN = {
    "step_size": 1e-3,
    "num_steps": 4,
    "gradient_estimator": "minibatch",
    "subsampling": "contiguous",
    "adapt_mass_matrix": False,
}


@cache
def run(**settings):
    mcmc = quietly(
        SGHMCSplit(survey, **settings), num_warmup=20, num_samples=20, num_chains=2,
        chain_method="vectorized",
    )  # fmt: skip
    mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH, extra_fields=("diverging",))
    return mcmc


def page(mcmc):
    return dict(warmup_report(mcmc).sections)


def with_changes(**changes):
    """The same run, as if its warm-up had found something else."""
    mcmc = run()
    kernel = mcmc.sampler
    weighed = kernel.adaptation.trace._replace(**changes.pop("weighed", {}))
    adaptation = kernel.adaptation._replace(trace=weighed, **changes)
    other = MCMC(kernel.copy_with(adaptation=adaptation), num_warmup=1, num_samples=1)
    other._last_state, other._states = mcmc._last_state, mcmc._states
    return other


def test_numbers_are_the_warm_ups():
    mcmc = run()
    found, told = mcmc.sampler.adaptation, page(mcmc)
    assert f"{BATCH} of the {len(DATA[-1]):,} rows" in told["Run"]
    assert told["Step size"].startswith(f"{found.step_size:.3g}")
    assert told["Steps"].startswith(f"{found.num_steps} a draw")
    assert told["Steps"].endswith(f"and a step is {found.step_size:.3g}.")
    assert f"R-hat {found.trace.r_hat:.2f}" in told["Start"]
    sds = np.sqrt(np.diagonal(np.asarray(found.preconditioner.inverse_mass_matrix)))
    assert f"from {sds.min():.3g} (" in told["Whitening"]
    for name in ("minibatch gradient", "control variates", "second-order control variates"):
        assert name in told["Gradient"]
    assert told["Chains"] == "0 of 40 iterations diverged."


def test_the_steps_fall_to_the_one_that_is_taken():
    found = run().sampler.adaptation
    lengths = [limit.step_size for limit in found.trace.step_size_limits.limits]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == pytest.approx(float(found.step_size), rel=1e-6)
    chosen = found.trace.noise_variances[found.estimator.name]
    assert chosen[found.subsampling.is_contiguous] == pytest.approx(found.noise_stats.mean_variance)


def test_what_limits_the_step_is_named():
    names = ("integrator", "stability", "gradient_noise", "dynamics", "mean_bias")
    limits = StepSizeTrace(tuple(map(StepSizeLimit, names, (0.3, 0.3, 0.1, 0.1, 0.05))))
    told = page(with_changes(step_size=0.05, weighed={"step_size_limits": limits}))["Step size"]
    assert told == (
        "0.05. 0.3 suits the scheme; of that the gradient's noise leaves 0.1, means, which would "
        "move, leave 0.05."
    )
    all_alike = StepSizeTrace(tuple(StepSizeLimit(name, 0.3) for name in names))
    told = page(with_changes(step_size=0.3, weighed={"step_size_limits": all_alike}))["Step size"]
    assert told == "0.3, the longest that suits the scheme: nothing asks for less."


def test_an_unusual_friction_is_named():
    assert "friction" not in page(run(friction=1.5))["Steps"]
    told = page(run(friction=30.0, step_size=0.01, num_steps=4))["Steps"]
    assert told.endswith("20 times as long as with the default friction of 1.5: yours is 30.")


def test_what_was_found_is_told():
    changes = {
        "included_rows": (("rows", (3, 5)),),
        "model_warnings": (
            ModelWarning((), ModelWarningKind.MULTIMODAL, "There is another mode."),
        ),
        "has_dominant_mode": False,
        "step_size": 10.0,
        "allowed_variance_inflation": 0.1,
    }
    told = page(with_changes(**changes))
    assert told["Minibatches"].endswith("in every one: 2 of 'rows'.")
    assert told["Warnings"] == "There is another mode."
    assert "no single region" in told["Start"]
    assert "from draws of the prior" in told["Whitening"]
    assert "independent" not in told["Steps"]
    assert "Predicted" not in told
    assert told["Chains"].startswith("2 of 2 ran hotter or colder than predicted")


def test_values_of_rows():
    told = page(with_changes(local_init=LocalLatentsInit(None, None, None), num_steps=1_000))
    assert told["Steps"].startswith("1,000 a draw: until parameters and values of rows")
    assert "from the curvature, given the values of rows" in told["Whitening"]


def test_what_is_given_is_said_to_be():
    told = page(run(**GIVEN))
    assert "all that a warm-up looks for was given" in told["Start"]
    assert told["Whitening"] == "Diagonal, as given: unconstrained sds of 1."
    assert told["Gradient"] == "Minibatch gradient, as given."
    assert told["Step size"] == "0.001, as given."
    assert "Predicted" not in told
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_warmup(run(**GIVEN))


def test_all_rows_at_every_step():
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2)
    mcmc = quietly(kernel, num_warmup=10, num_samples=10)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(3))
    told = page(mcmc)
    assert told["Run"].endswith("3 parameters; all rows at every step.")
    assert told["Gradient"] == "Minibatch gradient."
    assert "Minibatches" not in told
    pyplot.close(plot_warmup(mcmc)[0].figure)


def test_a_page():
    text = str(warmup_report(run()))
    assert max(map(len, text.splitlines())) <= 88
    assert len(text.splitlines()) < 40
    html = warmup_report(run())._repr_html_()
    assert html.count("<dt>") == len(warmup_report(run()).sections)
    assert "<dt>Whitening</dt>" in html


def test_plot():
    found = run().sampler.adaptation
    axes = plot_warmup(run())
    widths = axes[0].lines[0].get_ydata()
    assert (np.diff(widths) <= 0).all()
    assert len(axes[1].patches) == 2 * len(found.trace.noise_variances)
    lengths = [bar.get_width() for bar in axes[2].patches]
    assert lengths == [limit.step_size for limit in found.trace.step_size_limits.limits]
    assert plot_warmup(run(), axes=axes) is axes
    pyplot.close(axes[0].figure)


@pytest.mark.parametrize("told", [warmup_report, plot_warmup])
def test_refusals(told):
    with pytest.raises(ValueError, match="a run of NUTS"):
        told(MCMC(NUTS(survey), num_warmup=1, num_samples=1))
    with pytest.raises(ValueError, match="but got dict"):
        told({})
    with pytest.raises(ValueError, match=re.escape("call `mcmc.run` before")):
        told(MCMC(SGHMCSplit(survey), num_warmup=1, num_samples=1))


def test_axes_must_be_three():
    with pytest.raises(ValueError, match="three matplotlib axes"):
        plot_warmup(run(), axes=[1, 2])


def test_what_is_predicted_is_of_the_step_that_is_given():
    def predicted(**given):
        told = page(run(gradient_estimator="minibatch", num_steps=5, **given))["Predicted"]
        return float(told.partition("sds ")[2].split()[0])

    assert predicted(step_size=0.2) > 2.0 * predicted(step_size=0.05) > 0.0
