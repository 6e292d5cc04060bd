"""How much time is made up in the air? Two likelihoods, judged by what they predict.

python examples/made_up_time.py                # all flights of 2013
python examples/made_up_time.py --rows 5000    # quickly
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, Predictive
from nycflights import read_flights, style
from scipy.special import logsumexp

from numpyro_sgmcmc import SGHMCSplit, bias_report, log_likelihood

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def model(distance, made_up=None, has_tails=False, batch_size=None):
    """Minutes from departure's delay to arrival's, by distance; normal or with heavy tails."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 20))
    slope = numpyro.sample("slope", dist.Normal(0, 10))
    scale = numpyro.sample("scale", dist.HalfNormal(20))
    df = numpyro.sample("df", dist.Gamma(2, 0.1)) if has_tails else jnp.inf
    with numpyro.plate("flights", len(distance), subsample_size=batch_size) as i:
        mean = intercept + slope * distance[i]
        likelihood = dist.StudentT(df, mean, scale) if has_tails else dist.Normal(mean, scale)
        numpyro.sample("made_up", likelihood, obs=None if made_up is None else made_up[i])


def fit(distance, made_up, has_tails):
    mcmc = MCMC(SGHMCSplit(model), num_warmup=300, num_samples=500, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(0), distance, made_up, has_tails=has_tails, batch_size=1_000)
    return mcmc


def elpd(mcmc, rows):
    """Log density of each of these rows, the posterior averaged over (no row left out: with so many
    rows and so few parameters one makes no difference).
    """
    found = log_likelihood(mcmc, rows)["made_up"].reshape(-1, len(rows))
    return logsumexp(found, axis=0) - np.log(len(found))


def plot(predicted, made_up):
    """Quantiles of predicted data beside those of the data."""
    levels = np.concatenate([[0.0005, 0.002, 0.01], np.linspace(0.05, 0.95, 19)])
    levels = np.unique(np.concatenate([levels, 1 - levels]))
    observed = np.quantile(made_up, levels)
    with plt.rc_context(style):
        figure, ax = plt.subplots(figsize=(6, 4.4), layout="constrained")
        ax.plot(observed, observed, color="0.7", linewidth=0.8)
        for (name, draws), colour in zip(predicted.items(), ("#d9822b", "#2b6a99"), strict=True):
            quantiles = np.quantile(draws, levels, axis=1)
            low, high = np.quantile(quantiles, (0.025, 0.975), axis=1)
            ax.fill_between(observed, low, high, color=colour, alpha=0.3, linewidth=0)
            ax.plot(observed, quantiles.mean(1), "o-", markersize=3, color=colour, label=name)
        ax.set(
            xlabel="quantiles of the data / minutes", ylabel="of data that the model predicts",
            title="Half an hour lost is no rarity",
        )  # fmt: skip
        ax.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="flights to read, default all")
    parser.add_argument("--output", default="made-up-time.png")
    options = parser.parse_args()

    flights = read_flights(options.rows)
    made_up = jnp.asarray(flights["arr_delay"] - flights["dep_delay"], jnp.float32)
    distance = jnp.asarray(flights["distance"] / 1000.0 - 1.0, jnp.float32)
    rows = np.arange(min(2_000, len(made_up)))  # at random: the table is shuffled
    scores, predicted = {}, {}
    for name, has_tails in (("normal", False), ("Student t", True)):
        mcmc = fit(distance, made_up, has_tails)
        print(f"{name}: {bias_report(mcmc).line}")
        mcmc.print_summary()
        scores[name] = elpd(mcmc, rows)
        some = {site: x[::20] for site, x in mcmc.get_samples().items()}
        predict = Predictive(model, some)
        drawn = predict(jax.random.key(1), distance[:20_000], has_tails=has_tails)
        predicted[name] = np.asarray(drawn["made_up"])
    gain = scores["Student t"] - scores["normal"]
    error = gain.std() / np.sqrt(len(gain))
    print(f"\nStudent t predicts a flight better by {gain.mean():.3f} ± {error:.3f} nats")
    plot(predicted, np.asarray(made_up)).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
