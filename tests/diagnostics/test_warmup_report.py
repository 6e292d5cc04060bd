"""The warm-up report states what the warm-up chose, and the plot shows it."""

from functools import cache

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib import pyplot
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import SGHMCSplit, warmup_report
from numpyro_sgmcmc.adaptation.settings import LocalLatentsInit, StepSizeTrace
from numpyro_sgmcmc.diagnostics import plot_warmup
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind
from tests.contract.kernels import BATCH, GIVEN, quietly, survey, survey_data

mpl.use("Agg")

DATA = survey_data()


@cache
def run(**settings):
    mcmc = quietly(
        SGHMCSplit(survey, **settings), num_warmup=20, num_samples=20, num_chains=2,
        chain_method="vectorized",
    )  # fmt: skip
    mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH, extra_fields=("diverging",))
    return mcmc


def sections_of(mcmc):
    return dict(warmup_report(mcmc).sections)


def replace_adaptation(trace=None, **changes):
    """Return the adapted run as if its warm-up had had other results."""
    mcmc = run()
    adaptation = mcmc.sampler.adaptation
    adaptation = adaptation._replace(trace=adaptation.trace._replace(**trace or {}), **changes)
    other = MCMC(mcmc.sampler.copy_with(adaptation=adaptation), num_warmup=1, num_samples=1)
    other._last_state, other._states = mcmc._last_state, mcmc._states
    return other


def test_warmup_report_has_the_numbers_of_the_warmup():
    mcmc = run()
    adaptation, sections = mcmc.sampler.adaptation, sections_of(mcmc)
    assert f"{BATCH} of the {len(DATA[-1]):,} rows" in sections["Run"]
    assert sections["Step size"].startswith(f"{adaptation.step_size:.3g}")
    assert sections["Steps"].startswith(f"{adaptation.num_steps} per draw")
    assert f"{adaptation.relaxation_time:.2g}" in sections["Steps"]
    assert f"R-hat {adaptation.trace.r_hat:.2f}" in sections["Initialisation"]
    variances = np.diagonal(np.asarray(adaptation.preconditioner.inverse_mass_matrix))
    assert f"from {np.sqrt(variances).min():.3g} (" in sections["Preconditioner"]
    for name in ("minibatch gradient", "control variate", "second-order control variate"):
        assert name in sections["Gradient"]
    assert sections["Chains"] == "0 of 40 iterations diverged."


def test_step_size_limits_of_a_warmup_decrease_to_its_step_size():
    adaptation = run().sampler.adaptation
    step_sizes = list(adaptation.trace.step_size_limits.limits.values())
    assert step_sizes == sorted(step_sizes, reverse=True)
    assert step_sizes[-1] == pytest.approx(float(adaptation.step_size), rel=1e-6)
    variances = adaptation.trace.noise_variances[adaptation.estimator.name]
    chosen = variances[adaptation.subsampling.is_contiguous]
    assert chosen == pytest.approx(adaptation.noise_stats.mean_variance)


def test_warmup_report_names_the_limits_that_reduce_the_step_size():
    def step_size_section(**step_sizes):
        limits = StepSizeTrace(step_sizes)
        trace = {"step_size_limits": limits}
        return sections_of(replace_adaptation(trace, step_size=limits.step_size))["Step size"]

    text = step_size_section(
        integrator=0.3, stability=0.3, gradient_noise=0.1, dynamics=0.1, mean_bias=0.05
    )
    assert text == (
        "0.05. The integrator's default of 0.3 is reduced to 0.1 by gradient noise (bias of SDs), "
        "0.05 by bias of means."
    )
    text = step_size_section(integrator=0.3, stability=0.3, gradient_noise=0.3)
    assert text == "0.3, the integrator's default: no limit is smaller."


def test_warmup_report_names_a_friction_that_slows_relaxation():
    assert "friction" not in sections_of(run())["Steps"]
    text = sections_of(run(friction=30.0, step_size=0.01, num_steps=4))["Steps"]
    assert "friction 30 relaxation takes 20 times" in text


def test_warmup_report_states_detected_properties_of_model_and_chains():
    sections = sections_of(
        replace_adaptation(
            included_rows=(("rows", (3, 5)),),
            model_warnings=(ModelWarning((), ModelWarningKind.MULTIMODAL, "Another mode."),),
            has_dominant_mode=False,
            step_size=10.0,
            allowed_variance_inflation=0.1,
        )
    )
    assert "2 of 'rows'" in sections["Subsampling"]
    assert sections["Warnings"] == "Another mode."
    assert "no dominant mode" in sections["Initialisation"]
    assert "draws of the prior" in sections["Preconditioner"]
    assert "independent" not in sections["Steps"]
    assert "Predicted bias" not in sections
    assert sections["Chains"].startswith("2 of 2")


def test_warmup_report_of_local_latents_states_the_origin_of_steps_and_preconditioner():
    local_init = LocalLatentsInit(None, None)
    sections = sections_of(replace_adaptation(local_init=local_init, num_steps=1_000))
    assert sections["Steps"].startswith("1,000 per draw")
    assert "local latent variables" in sections["Steps"]
    assert "curvature given the local latent variables" in sections["Preconditioner"]


def test_warmup_report_with_all_settings_given_says_so():
    options = {**GIVEN, "step_size": 1e-3}
    sections = sections_of(run(**options))
    assert "every setting was given" in sections["Initialisation"]
    assert sections["Preconditioner"] == "Diagonal, as given: unconstrained SDs of 1."
    assert sections["Gradient"] == "Minibatch gradient, as given."
    assert sections["Step size"] == "0.001, as given."
    assert "Predicted bias" not in sections
    with pytest.raises(ValueError, match=r"`plot_warmup`.*given"):
        plot_warmup(run(**options))


def test_warmup_report_without_minibatches_has_no_subsampling():
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2)
    mcmc = quietly(kernel, num_warmup=10, num_samples=10)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(3))
    sections = sections_of(mcmc)
    assert sections["Run"].endswith("3 parameters; all rows at every step.")
    assert sections["Gradient"] == "Minibatch gradient."
    assert "Subsampling" not in sections
    pyplot.close(plot_warmup(mcmc)[0].figure)


def test_warmup_report_fits_a_page_as_text_and_has_all_sections_as_html():
    report = warmup_report(run())
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 88
    assert len(lines) < 40
    html = report._repr_html_()
    assert html.count("<dt>") == len(report.sections)
    assert "<dt>Preconditioner</dt>" in html


@pytest.mark.slow
def test_warmup_report_predicts_the_bias_at_a_given_step_size():
    def predicted(**given):
        mcmc = run(gradient_estimator="minibatch", num_steps=5, **given)
        text = sections_of(mcmc)["Predicted bias"]
        return float(text.partition("at most ")[2].partition("%")[0])

    assert predicted(step_size=0.2) > 2.0 * predicted(step_size=0.05) > 0.0


def test_plot_warmup_shows_the_numbers_of_the_warmup():
    trace = run().sampler.adaptation.trace
    axes = plot_warmup(run())
    assert (np.diff(axes[0].lines[0].get_ydata()) <= 0).all()
    assert len(axes[1].patches) == 2 * len(trace.noise_variances)
    step_sizes = [bar.get_width() for bar in axes[2].patches]
    assert step_sizes == list(trace.step_size_limits.limits.values())
    assert plot_warmup(run(), axes=axes) is axes
    pyplot.close(axes[0].figure)


@pytest.mark.parametrize("function", [warmup_report, plot_warmup])
def test_warmup_report_and_plot_of_invalid_runs_raise(function):
    with pytest.raises(ValueError, match="a run of NUTS"):
        function(MCMC(NUTS(survey), num_warmup=1, num_samples=1))
    with pytest.raises(ValueError, match="got dict"):
        function({})
    with pytest.raises(ValueError, match=f"`{function.__name__}`.*before its warm-up"):
        function(MCMC(SGHMCSplit(survey), num_warmup=1, num_samples=1))


def test_plot_warmup_with_invalid_axes_raises():
    with pytest.raises(ValueError, match=r"`axes`.*3"):
        plot_warmup(run(), axes=[1, 2])


@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.DiscretisationWarning")
def test_warmup_report_states_why_groups_have_no_blocks():
    groups = np.arange(600) % 150
    y = jnp.asarray(np.random.default_rng(0).standard_normal(600), jnp.float32)

    def model(batch_size=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.GaussianRandomWalk(scale, 150))
        with numpyro.plate("rows", 600, subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(effect[jnp.asarray(groups)[i]], 1.0), obs=y[i])

    mcmc = quietly(SGHMCSplit(model), num_warmup=1, num_samples=1)
    mcmc.run(jax.random.key(0), batch_size=100)
    expected = "The effects of 150 groups have no blocks: effects of different groups are coupled."
    assert sections_of(mcmc)["Preconditioner"].endswith(expected)
