"""Models of the kinds in NumPyro's examples and tutorials, with simulated data.

Each takes ``batch_size``, the subsample size of the plate of its data; None for all rows, as for
NUTS. Several compute with NumPy on their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import OrderedTransform
from numpyro.handlers import mask

BatchSize = int | None


class Example(NamedTuple):
    """A model with its data.

    - **batch_size** - subsample size; None for a model without a plate of its data.
    - **sites** - sites that are compared with NUTS; all where it is None.
    - **warning** - part of a warning that the run issues, or an empty string.
    """

    model: Callable[..., None]
    args: tuple[Any, ...]
    batch_size: BatchSize
    sites: tuple[str, ...] | None = None
    warning: str = ""


def _float32(*arrays: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x, np.float32) for x in arrays)


# --- Batting averages ---------------------------------------------------------------------------


def one_ability(trials: Any, successes: Any, batch_size: BatchSize = None) -> None:
    ability = numpyro.sample("ability", dist.Uniform(0, 1))
    with numpyro.plate("players", len(trials), subsample_size=batch_size) as i:
        numpyro.sample("hits", dist.Binomial(trials[i], probs=ability), obs=successes[i])


def beta_abilities(trials: Any, successes: Any, batch_size: BatchSize = None) -> None:
    centre = numpyro.sample("centre", dist.Uniform(0, 1))
    concentration = numpyro.sample("concentration", dist.Pareto(1, 1.5))
    with numpyro.plate("players", len(trials), subsample_size=batch_size) as i:
        prior = dist.Beta(centre * concentration, (1 - centre) * concentration)
        ability = numpyro.sample("ability", prior)
        numpyro.sample("hits", dist.Binomial(trials[i], probs=ability), obs=successes[i])


def logit_abilities(trials: Any, successes: Any, batch_size: BatchSize = None) -> None:
    location = numpyro.sample("location", dist.Normal(-1, 1))
    scale = numpyro.sample("scale", dist.HalfCauchy(1))
    with numpyro.plate("players", len(trials), subsample_size=batch_size) as i:
        logit = numpyro.sample("logit", dist.Normal(location, scale))
        numpyro.sample("hits", dist.Binomial(trials[i], logits=logit), obs=successes[i])


def separate_abilities(trials: Any, successes: Any, batch_size: BatchSize = None) -> None:
    with numpyro.plate("players", len(trials), subsample_size=batch_size) as i:
        ability = numpyro.sample("ability", dist.Uniform(0, 1))
        numpyro.sample("hits", dist.Binomial(trials[i], probs=ability), obs=successes[i])


def _batting(model: Callable) -> Example:
    rng = np.random.default_rng(1)
    trials = rng.integers(30, 60, 200)
    probs = 1 / (1 + np.exp(1.0 - 0.6 * rng.standard_normal(200)))
    sites = {
        beta_abilities: ("centre", "concentration"),
        logit_abilities: ("location", "scale"),
    }
    return Example(model, (trials, rng.binomial(trials, probs)), 50, sites.get(model))


# --- Admissions: correlated effects of departments -----------------------------------------------


def admissions(
    department: Any, is_male: Any, applied: Any, admitted: Any, batch_size: BatchSize = None
) -> None:
    num = len(np.unique(department))
    mean = numpyro.sample("mean", dist.Normal(0, jnp.array([3.0, 1.0])).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, concentration=2))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([num, 2]).to_event(2))
    effects = mean + z @ (scale[:, None] * factor).T
    with numpyro.plate("cells", len(applied), subsample_size=batch_size) as i:
        effect = effects[department[i]]
        logits = effect[:, 0] + effect[:, 1] * is_male[i]
        numpyro.sample("admitted", dist.Binomial(applied[i], logits=logits), obs=admitted[i])


def _admissions() -> Example:
    rng = np.random.default_rng(2)
    department, is_male = np.repeat(np.arange(12), 2), np.tile([0, 1], 12)
    logits = rng.normal(-0.5, 1, 12)[department] + rng.normal(0, 0.4, 12)[department] * is_male
    applied = rng.integers(40, 400, 24)
    admitted = rng.binomial(applied, 1 / (1 + np.exp(-logits)))
    sites = ("mean", "scale", "z")
    return Example(admissions, (department, is_male, applied, admitted), 12, sites)


# --- Missing covariates as latent values ---------------------------------------------------------


def imputation(age: Any, title: Any, survived: Any, batch_size: BatchSize = None) -> None:
    is_missing = np.isnan(age)
    rows = np.nonzero(is_missing)[0]
    num = int(title.max()) + 1
    # As in the tutorial, nothing keeps the scales positive except the density.
    location = numpyro.sample("location", dist.Normal(0, 1).expand([num]).to_event(1))
    scale = numpyro.sample("scale", dist.Normal(0, 1).expand([num]).to_event(1))
    group = title[rows]
    missing = numpyro.sample("missing", dist.Normal(location[group], scale[group]).to_event(1))
    filled = jnp.asarray(age).at[rows].set(missing)
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("passengers", len(age), subsample_size=batch_size) as i:
        code, x = jnp.asarray(title)[i], filled[i]
        with mask(mask=~jnp.asarray(is_missing)[i]):
            numpyro.sample("age", dist.Normal(location[code], scale[code]), obs=x)
        numpyro.sample("survived", dist.Bernoulli(logits=intercept + slope * x), obs=survived[i])


def _imputation() -> Example:
    rng = np.random.default_rng(3)
    title = rng.integers(0, 4, 400)
    age = np.array([-1.0, -0.3, 0.4, 1.0])[title] + 0.7 * rng.standard_normal(400)
    survived = (rng.random(400) < 1 / (1 + np.exp(-0.3 + 0.8 * age))).astype(np.int32)
    age[rng.random(400) < 0.1] = np.nan
    return Example(imputation, (np.asarray(age, np.float32), title, survived), 100)


# --- Regressions ---------------------------------------------------------------------------------


def logistic(features: Any, labels: Any, batch_size: BatchSize = None) -> None:
    dim = features.shape[1]
    coefs = numpyro.sample("coefs", dist.Normal(jnp.zeros(dim), jnp.ones(dim)))
    with numpyro.plate("rows", features.shape[0], subsample_size=batch_size) as i:
        logits = jnp.dot(features[i], coefs)
        numpyro.sample("label", dist.Bernoulli(logits=logits), obs=labels[i])


def _logistic() -> Example:
    rng = np.random.default_rng(4)
    features = np.hstack([rng.standard_normal((2000, 12)), np.ones((2000, 1))])
    labels = rng.random(2000) < 1 / (1 + np.exp(-features @ np.linspace(-1, 1, 13)))
    return Example(logistic, (*_float32(features), labels.astype(np.int32)), 100)


def two_predictors(married: Any, age: Any, divorced: Any, batch_size: BatchSize = None) -> None:
    intercept = numpyro.sample("intercept", dist.Normal(0, 0.2))
    by_marriage = numpyro.sample("by_marriage", dist.Normal(0, 0.5))
    by_age = numpyro.sample("by_age", dist.Normal(0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    with numpyro.plate("states", len(divorced), subsample_size=batch_size) as i:
        mean = intercept + by_marriage * married[i] + by_age * age[i]
        numpyro.sample("divorced", dist.Normal(mean, sigma), obs=divorced[i])


def _two_predictors() -> Example:
    rng = np.random.default_rng(5)
    age = rng.standard_normal(100)
    married = 0.8 * age + 0.6 * rng.standard_normal(100)
    divorced = -0.6 * age + 0.1 * married + 0.7 * rng.standard_normal(100)
    return Example(two_predictors, _float32(married, age, divorced), 20)


def patients(code: Any, week: Any, volume: Any, batch_size: BatchSize = None) -> None:
    level = numpyro.sample("level", dist.Normal(0, 2))
    level_scale = numpyro.sample("level_scale", dist.HalfNormal(1))
    trend = numpyro.sample("trend", dist.Normal(0, 1))
    trend_scale = numpyro.sample("trend_scale", dist.HalfNormal(1))
    with numpyro.plate("patients", len(np.unique(code))):
        alpha = numpyro.sample("alpha", dist.Normal(level, level_scale))
        beta = numpyro.sample("beta", dist.Normal(trend, trend_scale))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("visits", len(volume), subsample_size=batch_size) as i:
        mean = alpha[code[i]] + beta[code[i]] * week[i]
        numpyro.sample("volume", dist.Normal(mean, sigma), obs=volume[i])


def _patients() -> Example:
    rng = np.random.default_rng(6)
    code = np.repeat(np.arange(30), 12)
    week = np.tile(np.linspace(-1, 1, 12), 30)
    alpha, beta = rng.normal(1, 0.7, 30), rng.normal(-0.5, 0.5, 30)
    volume = alpha[code] + beta[code] * week + 0.4 * rng.standard_normal(360)
    return Example(patients, (code, *_float32(week, volume)), 60)


def experiment(before: Any, is_treated: Any, after: Any, batch_size: BatchSize = None) -> None:
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    theta = numpyro.sample("theta", dist.Normal(0, 2))
    effect = numpyro.sample("effect", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(3))
    baseline = float(np.mean(before))
    with numpyro.plate("users", len(after), subsample_size=batch_size) as i:
        mean = intercept + theta * (before[i] - baseline) + effect * is_treated[i]
        numpyro.sample("after", dist.Normal(mean, sigma), obs=after[i])


def _experiment() -> Example:
    rng = np.random.default_rng(7)
    before, is_treated = rng.gamma(4, 1, 500), rng.integers(0, 2, 500)
    after = 1 + 0.7 * before + 0.3 * is_treated + rng.standard_normal(500)
    return Example(experiment, _float32(before, is_treated, after), 100)


def horseshoe(X: Any, y: Any, batch_size: BatchSize = None) -> None:
    dim = X.shape[1]
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([dim]).to_event(1))
    shared = numpyro.sample("shared", dist.HalfCauchy(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([dim]).to_event(1))
    beta = numpyro.deterministic("beta", shared * local * z)
    precision = numpyro.sample("precision", dist.Gamma(3, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, precision**-0.5), obs=y[i])


def _horseshoe() -> Example:
    rng = np.random.default_rng(8)
    X = rng.standard_normal((400, 8))
    y = X @ np.array([2.0, -1.0, 0.5, 0, 0, 0, 0, 0]) + 0.7 * rng.standard_normal(400)
    return Example(horseshoe, _float32(X, y), 100, ("beta", "precision"))


def reaction_times(subject: Any, y: Any, fastest: Any, batch_size: BatchSize = None) -> None:
    location = numpyro.sample("location", dist.Normal(-0.5, 1))
    location_sd = numpyro.sample("location_sd", dist.HalfNormal(0.5))
    log_sd = numpyro.sample("log_sd", dist.Normal(-1, 0.5))
    log_sd_sd = numpyro.sample("log_sd_sd", dist.HalfNormal(0.5))
    with numpyro.plate("subjects", len(fastest)):
        mu = numpyro.sample("mu", dist.Normal(location, location_sd))
        log_sigma = numpyro.sample("log_sigma", dist.Normal(log_sd, log_sd_sd))
        shift = numpyro.sample("shift", dist.Beta(4, 2))  # of the fastest time of the subject
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        k = subject[i]
        times = dist.LogNormal(mu[k], jnp.exp(log_sigma[k]))
        numpyro.sample("y", times, obs=y[i] - shift[k] * fastest[k])


def _reaction_times() -> Example:
    rng = np.random.default_rng(10)
    subject = rng.permutation(np.repeat(np.arange(30), 60))
    mu, shift = rng.normal(-0.7, 0.3, 30)[subject], rng.uniform(0.15, 0.3, 30)[subject]
    sigma = np.exp(rng.normal(-1, 0.2, 30))[subject]
    y = shift + np.exp(mu + sigma * rng.standard_normal(1_800))
    fastest = np.array([y[subject == k].min() for k in range(30)])
    return Example(reaction_times, (subject, *_float32(y, fastest)), 200)


# --- Counts and proportions ----------------------------------------------------------------------


def zero_inflated(X: Any, y: Any, batch_size: BatchSize = None) -> None:
    dim = X.shape[1]
    for_gate = numpyro.sample("for_gate", dist.Normal(0, 1).expand([dim]).to_event(1))
    for_rate = numpyro.sample("for_rate", dist.Normal(0, 1).expand([dim]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        gate, rate = jax.nn.sigmoid(X[i] @ for_gate), jnp.exp(X[i] @ for_rate)
        numpyro.sample("y", dist.ZeroInflatedPoisson(gate=gate, rate=rate), obs=y[i])


def _zero_inflated() -> Example:
    rng = np.random.default_rng(9)
    X = np.column_stack([np.ones(800), rng.standard_normal((800, 3))])
    gate = 1 / (1 + np.exp(-X @ np.array([-0.5, 0.7, 0.0, -0.4])))
    y = rng.poisson(np.exp(X @ np.array([1.0, 0.3, -0.3, 0.2]))) * (rng.random(800) > gate)
    return Example(zero_inflated, (*_float32(X), y), 100)


def proportions(X: Any, is_called: Any, bought: Any, batch_size: BatchSize = None) -> None:
    beta = numpyro.sample(
        "beta", dist.MultivariateNormal(jnp.zeros(X.shape[1]), jnp.eye(X.shape[1]))
    )
    effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("customers", len(bought), subsample_size=batch_size) as i:
        logits = X[i].dot(beta) + effect * is_called[i]
        numpyro.sample("bought", dist.Bernoulli(logits=logits), obs=bought[i])


def _proportions() -> Example:
    rng = np.random.default_rng(10)
    X = np.column_stack([np.ones(1000), rng.integers(0, 2, 1000)])
    is_called = rng.integers(0, 2, 1000)
    probs = 1 / (1 + np.exp(1.2 - 0.4 * is_called))
    return Example(
        proportions, (*_float32(X, is_called), (rng.random(1000) < probs).astype(np.int32)), 100
    )


def ordinal(x: Any, grade: Any, batch_size: BatchSize = None) -> None:
    num_cutpoints = len(np.unique(grade)) - 1
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    normal = dist.Normal(0, 1.5).expand([num_cutpoints]).to_event(1)
    cutpoints = numpyro.sample(
        "cutpoints", dist.TransformedDistribution(normal, OrderedTransform())
    )
    with numpyro.plate("rows", len(grade), subsample_size=batch_size) as i:
        numpyro.sample("grade", dist.OrderedLogistic(slope * x[i], cutpoints), obs=grade[i])


def _ordinal() -> Example:
    rng = np.random.default_rng(11)
    x = rng.standard_normal(500)
    latent = 0.8 * x + rng.logistic(size=500)
    return Example(ordinal, (*_float32(x), np.digitize(latent, [-1.5, 0.0, 1.2])), 100)


class Histories(NamedTuple):
    """Capture histories of animals: first and last capture, and captures after the first."""

    first: np.ndarray
    last: np.ndarray
    recaptures: np.ndarray


def capture_recapture(data: Any, num_occasions: int, batch_size: BatchSize = None) -> None:
    """State the Cormack-Jolly-Seber model with the time of death summed out."""
    survival = numpyro.sample("survival", dist.Uniform(0, 1))
    capture = numpyro.sample("capture", dist.Uniform(0, 1))
    unseen = [jnp.ones(())]  # probability of no capture after an occasion, from the last one
    for _ in range(num_occasions - 1):
        unseen.append(1 - survival + survival * (1 - capture) * unseen[-1])
    never_again = jnp.stack(unseen[::-1])
    with numpyro.plate("animals", len(data.first), subsample_size=batch_size) as i:
        num_survived, num_seen = data.last[i] - data.first[i], data.recaptures[i]
        log_density = (
            num_survived * jnp.log(survival)
            + num_seen * jnp.log(capture)
            + (num_survived - num_seen) * jnp.log1p(-capture)
            + jnp.log(never_again[data.last[i]])
        )
        numpyro.factor("history", log_density)


def _capture_recapture() -> Example:
    rng = np.random.default_rng(12)
    num, occasions = 400, 8
    first = rng.integers(0, occasions - 1, num)
    last, recaptures, is_alive = first.copy(), np.zeros(num, int), np.ones(num, bool)
    for t in range(1, occasions):
        is_alive &= (t <= first) | (rng.random(num) < 0.8)
        is_seen = is_alive & (t > first) & (rng.random(num) < 0.4)
        last[is_seen] = t
        recaptures += is_seen
    return Example(capture_recapture, (Histories(first, last, recaptures), occasions), 100)


# --- Incomplete observations ---------------------------------------------------------------------


def censored(x: Any, time: Any, is_censored: Any, batch_size: BatchSize = None) -> None:
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(time), subsample_size=batch_size) as i:
        normal, is_late = dist.Normal(intercept + slope * x[i], sigma), is_censored[i]
        with mask(mask=~is_late):
            numpyro.sample("time", normal, obs=time[i])
        with mask(mask=is_late):
            probs = jnp.clip(1 - normal.cdf(time[i]), 1e-7, 1 - 1e-7)
            numpyro.sample("later", dist.Bernoulli(probs), obs=jnp.ones(len(i), jnp.int32))


def _censored() -> Example:
    rng = np.random.default_rng(13)
    x = rng.standard_normal(500)
    time = 1 + 0.5 * x + 0.8 * rng.standard_normal(500)
    return Example(censored, (*_float32(x, np.minimum(time, 1.5)), time > 1.5), 100)


def truncated(height: Any, minimum: Any, distance: Any, batch_size: BatchSize = None) -> None:
    location = numpyro.sample("location", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    with numpyro.plate("rows", len(height), subsample_size=batch_size) as i:
        bounded = dist.TruncatedDistribution(dist.Normal(location, scale), low=minimum[i])
        numpyro.sample("height", bounded, obs=height[i])
        folded = dist.FoldedDistribution(dist.Normal(0, spread))
        numpyro.sample("distance", folded, obs=distance[i])


def _truncated() -> Example:
    rng = np.random.default_rng(14)
    height, minimum = 1 + rng.standard_normal(3000), rng.uniform(-1, 1, 3000)
    kept = np.flatnonzero(height > minimum)[:1000]
    distance = np.abs(1.5 * rng.standard_normal(1000))
    return Example(truncated, _float32(height[kept], minimum[kept], distance), 100)


# --- Gaussian processes and networks -------------------------------------------------------------


def approximate_process(x: Any, y: Any, batch_size: BatchSize = None) -> None:
    """State a Gaussian process by sines on an interval around the data."""
    half_width, num_sines = 1.5 * float(np.abs(x).max()), 12
    frequency = np.arange(1, num_sines + 1) * np.pi / (2 * half_width)
    basis = np.sin(frequency * (x[:, None] + half_width)) / np.sqrt(half_width)
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0, 1))
    length = numpyro.sample("length", dist.InverseGamma(5, 2))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([num_sines]).to_event(1))
    # The square root of the spectral density; that of a density of zero has no gradient.
    scale = jnp.sqrt(jnp.sqrt(2 * jnp.pi) * length) * jnp.exp(-0.25 * (length * frequency) ** 2)
    weights = amplitude * scale * z
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(basis[i] @ weights, noise), obs=y[i])


def _approximate_process() -> Example:
    rng = np.random.default_rng(15)
    x = rng.uniform(-1, 1, 500)
    y = np.sin(4 * x) + 0.3 * rng.standard_normal(500)
    return Example(approximate_process, _float32(x, y), 100)


def exact_process(x: Any, y: Any, batch_size: BatchSize = None) -> None:
    variance = numpyro.sample("variance", dist.LogNormal(0, 1))
    length = numpyro.sample("length", dist.LogNormal(-1, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-2, 1))
    squared = (x[:, None] - x) ** 2
    covariance = variance * jnp.exp(-0.5 * squared / length**2)
    covariance += (noise + 1e-4) * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), covariance), obs=y)


def _exact_process() -> Example:
    rng = np.random.default_rng(16)
    x = np.sort(rng.uniform(-1, 1, 30))
    return Example(exact_process, _float32(x, np.sin(4 * x) + 0.3 * rng.standard_normal(30)), None)


def network(X: Any, y: Any, grid: Any, batch_size: BatchSize = None) -> None:
    inputs, num_hidden = X.shape[1], 4
    first = numpyro.sample("first", dist.Normal(0, 1).expand([inputs, num_hidden]).to_event(2))
    second = numpyro.sample("second", dist.Normal(0, 1).expand([num_hidden]).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(3, 1))
    numpyro.deterministic("curve", jnp.tanh(grid @ first) @ second)
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        mean = jnp.tanh(X[i] @ first) @ second
        numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=y[i])


def _network() -> Example:
    rng = np.random.default_rng(17)
    x = rng.uniform(-1, 1, 300)
    powers = [np.vander(values, 3) for values in (x, np.linspace(-0.9, 0.9, 7))]
    y = x + 0.5 * np.sin(5 * x) + 0.5 * rng.standard_normal(300)
    arrays = _float32(powers[0], y, powers[1])
    return Example(network, arrays, 50, ("curve", "precision"))


# --- Marketing mix and recommendations ------------------------------------------------------------


def marketing_mix(spend: Any, sales: Any, batch_size: BatchSize = None) -> None:
    """State sales of areas by spend whose effect decays over weeks and saturates."""
    num_areas, _, num_channels = spend.shape
    shape = [num_channels]
    decay = numpyro.sample("decay", dist.Beta(2, 2).expand(shape).to_event(1))
    half = numpyro.sample("half", dist.LogNormal(0, 0.5).expand(shape).to_event(1))
    effect = numpyro.sample("effect", dist.HalfNormal(1).expand(shape).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("area", num_areas):
        level = numpyro.sample("level", dist.Normal(0, 5))

    def add_week(stock: Any, new: Any) -> tuple[Any, Any]:
        stock = decay * stock + new
        return stock, stock

    with numpyro.plate("areas", num_areas, subsample_size=batch_size) as i:
        weeks = jnp.moveaxis(spend[i], 1, 0)
        _, stock = jax.lax.scan(add_week, jnp.zeros(weeks.shape[1:]), weeks)
        mean = level[i] + stock / (stock + half) @ effect
        numpyro.sample("sales", dist.Normal(mean.T, noise).to_event(1), obs=sales[i])


def _marketing_mix() -> Example:
    """Return eight areas in 40 weeks; the last of three channels has no effect."""
    rng = np.random.default_rng(18)
    spend = rng.gamma(0.5, 1.0, (8, 40, 3))
    stock = spend.copy()
    for week in range(1, 40):
        stock[:, week] += np.array([0.6, 0.3, 0.5]) * stock[:, week - 1]
    sales = 5 + rng.standard_normal((8, 1)) + stock / (stock + 1) @ np.array([2.0, 1.0, 0.0])
    arrays = _float32(spend, sales + 0.3 * rng.standard_normal((8, 40)))
    return Example(marketing_mix, arrays, 6)


def factorisation(person: Any, item: Any, rating: Any, batch_size: BatchSize = None) -> None:
    """State ratings by two factors, which are identified up to a rotation."""
    persons = numpyro.sample("persons", dist.Normal(0, 1).expand([20, 2]).to_event(2))
    items = numpyro.sample("items", dist.Normal(0, 1).expand([12, 2]).to_event(2))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    numpyro.deterministic("means", persons @ items.T)
    with numpyro.plate("ratings", len(rating), subsample_size=batch_size) as i:
        mean = (persons[person[i]] * items[item[i]]).sum(-1)
        numpyro.sample("rating", dist.Normal(mean, noise), obs=rating[i])


def _factorisation() -> Example:
    rng = np.random.default_rng(19)
    person, item = rng.integers(0, 20, 600), rng.integers(0, 12, 600)
    persons, items = rng.standard_normal((20, 2)), rng.standard_normal((12, 2))
    rating = (persons[person] * items[item]).sum(-1) + 0.5 * rng.standard_normal(600)
    arrays, sites = (person, item, *_float32(rating)), ("means", "noise")
    return Example(factorisation, arrays, 100, sites, "components of `items`, `persons` rotated")


EXAMPLES: dict[str, Example] = {
    "batting averages, one ability": _batting(one_ability),
    "batting averages, beta prior": _batting(beta_abilities),
    "batting averages, logits": _batting(logit_abilities),
    "admissions": _admissions(),
    "imputation": _imputation(),
    "logistic regression": _logistic(),
    "regression on two predictors": _two_predictors(),
    "hierarchical regression": _patients(),
    "adjusted experiment": _experiment(),
    "horseshoe": _horseshoe(),
    "reaction times": _reaction_times(),
    "zero-inflated Poisson": _zero_inflated(),
    "proportions": _proportions(),
    "ordinal regression": _ordinal(),
    "capture-recapture": _capture_recapture(),
    "censoring": _censored(),
    "truncation": _truncated(),
    "Gaussian process by sines": _approximate_process(),
    "Gaussian process": _exact_process(),
    "network": _network(),
    "marketing mix": _marketing_mix(),
    "matrix factorisation": _factorisation(),
}
"""Models that run, by name."""

SEPARATE = _batting(separate_abilities)
