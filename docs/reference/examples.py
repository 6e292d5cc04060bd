"""Examples of the API pages, run by tests/documentation/test_docs.py.

A page shows the lines after the comment with the name of its object.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_sgmcmc
from numpyro_sgmcmc import CheckpointedMCMC, SGHMCSplit, diagnostics, dynamics, metrics, schedules
from numpyro_sgmcmc.errors import ModelWarningKind

X = jax.random.normal(jax.random.key(0), (2_000, 3))
y = (X[:, 0] + jax.random.logistic(jax.random.key(1), (2_000,)) > 0).astype(jnp.int32)
X_new = X[:5]
folder = Path(tempfile.mkdtemp())


def model(X, y=None, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.deterministic("odds_ratio", jnp.exp(beta))
    with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
        obs = None if y is None else y[i]
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=obs)


mcmc = MCMC(
    SGHMCSplit(model), num_warmup=50, num_samples=200, num_chains=2, chain_method="vectorized",
    progress_bar=False,
)  # fmt: skip
mcmc.run(jax.random.key(0), X, y, batch_size=100, extra_fields=("weight",))

# -- numpyro_sgmcmc.SHMC
kernel = numpyro_sgmcmc.SHMC(model, integrator="baoab")
hmc = numpyro_sgmcmc.SHMC(model, integrator="lie_trotter", num_leapfrog=5, friction=10.0)

# -- numpyro_sgmcmc.SGNHT
kernel = numpyro_sgmcmc.SGNHT(model, gradient_estimator="minibatch")

# -- numpyro_sgmcmc.SGMGT
kernel = numpyro_sgmcmc.SGMGT(model, a=2.0)

# -- numpyro_sgmcmc.SGLaplaceHMC
kernel = numpyro_sgmcmc.SGLaplaceHMC(model)

# -- numpyro_sgmcmc.SGRHMC
kernel = numpyro_sgmcmc.SGRHMC(model, inverse_metric=lambda z: 1.0 + jnp.sum(z["beta"] ** 2))

# -- numpyro_sgmcmc.SGRLD
kernel = numpyro_sgmcmc.SGRLD(model, inverse_metric=lambda z: {"beta": 1.0 + z["beta"] ** 2})

# -- numpyro_sgmcmc.SGHMC
kernel = numpyro_sgmcmc.SGHMC(model, step_size=0.05)

# -- numpyro_sgmcmc.SGLD
kernel = numpyro_sgmcmc.SGLD(model, step_size=schedules.Polynomial(0.05))

# -- numpyro_sgmcmc.kernel.Options
kernel = SGHMCSplit(model, target_sd_bias=0.02, subsampling="shuffled")

# -- numpyro_sgmcmc.train_weights
trained = numpyro_sgmcmc.train_weights(
    model, jax.random.key(0), X, y, batch_size=100, num_train_steps=1_000, progress_bar=False
)
kernel = SGHMCSplit(numpyro_sgmcmc.localised(model, trained.center, precision=100.0))

# -- numpyro_sgmcmc.train_and_sample
trained_mcmc = numpyro_sgmcmc.train_and_sample(
    model, jax.random.key(0), X, y, batch_size=100, precision=100.0, num_train_steps=1_000,
    num_chains=2, progress_bar=False,
)  # fmt: skip

# -- numpyro_sgmcmc.localised
center = {"beta": jnp.array([1.5, 0.0, 0.0])}  # such as guide.median(params)
kernel = SGHMCSplit(numpyro_sgmcmc.localised(model, center, precision=100.0))

# -- numpyro_sgmcmc.kernel.SGMCMCState
state = mcmc.last_state
print(state.num_steps, state.adapt_state.step_size)  # one value per chain

# -- numpyro_sgmcmc.CheckpointedMCMC
kernel = SGHMCSplit(model, collect_sites=["odds_ratio"])  # draws of `beta` are not kept
stored = CheckpointedMCMC(
    kernel, num_warmup=20, num_samples=20, num_chains=2, chain_method="vectorized",
    progress_bar=False, checkpoint=folder / "my-run",
)  # fmt: skip
stored.run(
    jax.random.key(0), X, y, batch_size=100
)  # after an interruption: stored.resume(X, y, ...)

# -- numpyro_sgmcmc.open_draws
data = numpyro_sgmcmc.open_draws(folder / "my-run")
print(data["posterior"]["odds_ratio"].shape)

# -- numpyro_sgmcmc.shuffle_rows
columns = {"X": np.asarray(X), "y": np.asarray(y)}  # or "trips.parquet"
arrays, levels = numpyro_sgmcmc.shuffle_rows(columns, folder / "shuffled", progress_bar=False)

# -- numpyro_sgmcmc.open_rows
arrays, levels = numpyro_sgmcmc.open_rows(folder / "shuffled")

# -- numpyro_sgmcmc.Table
table = numpyro_sgmcmc.open_rows(folder / "shuffled")
print(table.arrays["X"].shape, table.levels)  # no categorical columns

# -- numpyro_sgmcmc.dynamics.potential_metric
print(dynamics.potential_metric(jnp.zeros(3)), dynamics.potential_metric(jnp.ones(3)))

# -- numpyro_sgmcmc.dynamics.UnderdampedLangevin
langevin = dynamics.UnderdampedLangevin(friction=1.5)
print({name: integrator.order for name, integrator in langevin.integrators.items()})

# -- numpyro_sgmcmc.dynamics.NoseHooverThermostat
thermostat = dynamics.NoseHooverThermostat(friction=1.5)
print(diagnostics.check_invariance(thermostat).max())

# -- numpyro_sgmcmc.dynamics.Kinetics
kinetics = dynamics.Kinetics(a=1.0, mass=1.0, softening=3.0)
print(kinetics.velocity(jnp.array([0.1, 10.0])))  # bounded for a = 1

# -- numpyro_sgmcmc.dynamics.Integrator
integrator = dynamics.UnderdampedLangevin(1.5).integrators["symmetric"]
print([part.flow_name for part in integrator.parts], integrator.step_size)

# -- numpyro_sgmcmc.metrics.expanded_mean
inverse_metric = metrics.expanded_mean("topics")  # for SGRLD and SGRHMC

# -- numpyro_sgmcmc.bias_report
report = numpyro_sgmcmc.bias_report(mcmc)
print(report)
print(report.is_ok, report.to_dataframe().head())

# Of predictions:
print(numpyro_sgmcmc.bias_report(mcmc, lambda draw, X: X @ draw["beta"], X_new))

# -- numpyro_sgmcmc.diagnostics.BiasReport
# report = bias_report(mcmc)
print(report.is_ok, report.is_flagged, report.diagnosis)
print(report.mean_bias.value, report.sd_inflation.error)  # one value per coordinate
table = report.to_dataframe()  # one row per site; to_dataset() has one per coordinate

# -- numpyro_sgmcmc.diagnostics.SiteBias
# report = bias_report(mcmc)
for site_bias in report.sites:
    print(site_bias.site, site_bias.mean_bias, site_bias.sd_inflation, site_bias.diagnosis)

# -- numpyro_sgmcmc.diagnostics.Diagnosis
# report = bias_report(mcmc)
to_extend = [s.site for s in report.sites if s.diagnosis == diagnostics.Diagnosis.INCONCLUSIVE]

# -- numpyro_sgmcmc.errors.ModelWarning
# report = bias_report(mcmc)
for model_warning in report.model_warnings:  # none for this model
    print(model_warning.kind, model_warning.sites, model_warning.message)

# -- numpyro_sgmcmc.errors.ModelWarningKind
# report = bias_report(mcmc)
kinds = {w.kind for w in report.model_warnings}
print(ModelWarningKind.MULTIMODAL in kinds)

# -- numpyro_sgmcmc.print_summary
numpyro_sgmcmc.print_summary(mcmc, prob=0.95)

# -- numpyro_sgmcmc.warmup_report
print(numpyro_sgmcmc.warmup_report(mcmc))

# -- numpyro_sgmcmc.diagnostics.WarmupReport
for heading, text in numpyro_sgmcmc.warmup_report(mcmc).sections:
    print(heading, len(text))

# -- numpyro_sgmcmc.suggest_subsample_size
suggestion = numpyro_sgmcmc.suggest_subsample_size(mcmc.sampler, X, y, batch_size=100)
print(suggestion.best)

# -- numpyro_sgmcmc.diagnostics.SubsampleSizeSuggestion
# suggestion = suggest_subsample_size(kernel, X, y, batch_size=100)
print(suggestion.subsample_sizes["rows"], suggestion.seconds_per_draw, suggestion.best)

# -- numpyro_sgmcmc.running_moments
# stored = CheckpointedMCMC(SGHMCSplit(model, collect_sites=["odds_ratio"]), ...)
moments = numpyro_sgmcmc.running_moments(stored)
print(moments)  # of `beta`, whose draws are not kept

# -- numpyro_sgmcmc.diagnostics.RunningMoments
# moments = running_moments(stored)
print(moments.mean["beta"], moments.sd["beta"], moments.mcse["beta"])

# -- numpyro_sgmcmc.to_arviz
data = numpyro_sgmcmc.to_arviz(mcmc, log_likelihood=100)  # of 100 rows at random

# -- numpyro_sgmcmc.log_likelihood
values = numpyro_sgmcmc.log_likelihood(mcmc, np.arange(10))["y"]  # (chains, draws, 10)

# -- numpyro_sgmcmc.posterior_predictive
replicated = numpyro_sgmcmc.posterior_predictive(mcmc, jax.random.key(1), np.arange(10))["y"]

# -- numpyro_sgmcmc.loo
estimate = numpyro_sgmcmc.loo(mcmc, num_rows=200)
print(estimate)

# -- numpyro_sgmcmc.diagnostics.LooEstimate
# estimate = loo(mcmc, num_rows=200)
print(estimate.elpd, estimate.se, estimate.subsampling_se)
unreliable = estimate.indices[estimate.pareto_k > 0.7]  # rows

# -- numpyro_sgmcmc.diagnostics.LooDifference
# estimate = loo(mcmc, num_rows=200), and another model's at the same rows
difference = estimate - estimate
print(difference.elpd, difference.se)

# -- numpyro_sgmcmc.diagnostics.predictive_summary
print(diagnostics.predictive_summary(mcmc, lambda draw, X: X @ draw["beta"], X_new))

# -- numpyro_sgmcmc.diagnostics.PredictiveSummary
summary = diagnostics.predictive_summary(mcmc, lambda draw, X: X @ draw["beta"], X_new)
print(summary.functions.keys())
dataset = summary.to_dataset()

# -- numpyro_sgmcmc.diagnostics.FunctionSummary
# summary = predictive_summary(mcmc, lambda draw, X: X @ draw["beta"], X_new)
(logits,) = summary.functions.values()
print(logits.mean, logits.sd, logits.ess)  # one value per row of X_new

# -- numpyro_sgmcmc.diagnostics.plot_bias
axes = diagnostics.plot_bias(numpyro_sgmcmc.bias_report(mcmc))

# -- numpyro_sgmcmc.diagnostics.plot_warmup
axes = diagnostics.plot_warmup(mcmc)

# -- numpyro_sgmcmc.diagnostics.bias_corrected_samples
corrected = diagnostics.bias_corrected_samples(mcmc)["beta"]

# -- numpyro_sgmcmc.diagnostics.compare_with_finer
finer = diagnostics.compare_with_finer(mcmc, jax.random.key(2))
print(finer.is_visible)

# -- numpyro_sgmcmc.diagnostics.Refinement
# finer = compare_with_finer(mcmc, jax.random.key(2))
print(finer.names, finer.sd_inflation.value, finer.sd_inflation.error)

# -- numpyro_sgmcmc.diagnostics.ess_per_gradient
print(diagnostics.ess_per_gradient(mcmc)["beta"])

# -- numpyro_sgmcmc.diagnostics.kolmogorov_distance
first, second = mcmc.get_samples(group_by_chain=True)["beta"]
print(diagnostics.kolmogorov_distance(first, second))

# -- numpyro_sgmcmc.diagnostics.stein_discrepancy
normal = np.random.default_rng(0).standard_normal((500, 2))
print(diagnostics.stein_discrepancy(normal, -normal))  # scores of the standard normal

# -- numpyro_sgmcmc.diagnostics.check_invariance
print(diagnostics.check_invariance(dynamics.UnderdampedLangevin(1.5)))

# -- numpyro_sgmcmc.schedules.Polynomial
kernel = SGHMCSplit(model, step_size=schedules.Polynomial(0.3, exponent=1 / 3))

# -- numpyro_sgmcmc.schedules.Cyclical
kernel = SGHMCSplit(model, step_size=schedules.Cyclical(0.3, period=1000))

# -- numpyro_sgmcmc.schedules.optimal_decay_exponent
exponent = schedules.optimal_decay_exponent(2, "mse")  # 1/5

# -- numpyro_sgmcmc.schedules.first_step_size
step_size = schedules.first_step_size(schedules.Polynomial(0.3))  # 0.3

# -- numpyro_sgmcmc.schedules.weighted_mean
draws = mcmc.get_samples(group_by_chain=True)
weights = mcmc.get_extra_fields(group_by_chain=True)["weight"]
mean = schedules.weighted_mean(draws, weights)["beta"]

# -- numpyro_sgmcmc.schedules.weighted_quantile
median = schedules.weighted_quantile(draws, weights, 0.5)["beta"]

# -- numpyro_sgmcmc.schedules.drop_exploration
kept, kept_weights = schedules.drop_exploration(draws, weights)

# -- numpyro_sgmcmc.schedules.systematic_resample
equal = schedules.systematic_resample(jax.random.key(3), draws, weights, num_draws=100)
