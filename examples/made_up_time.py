"""Compare two likelihoods by a posterior predictive check and leave-one-out cross-validation.

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
from numpyro.infer import MCMC
from nycflights import read_flights, style
from scipy.special import logsumexp

from numpyro_sgmcmc import SGHMCSplit, bias_report, log_likelihood, loo, posterior_predictive

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = "#d9822b", "#2b6a99"


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


def scores(mcmc, rows):
    """Log density of each of these rows, the posterior averaged over."""
    found = log_likelihood(mcmc, rows)["made_up"].reshape(-1, len(rows))
    return logsumexp(found, axis=0) - np.log(len(found))


def plot_quantiles(ax, predicted, made_up):
    """Quantiles of predicted data beside those of the data."""
    levels = np.concatenate([[0.0005, 0.002, 0.01], np.linspace(0.05, 0.95, 19)])
    levels = np.unique(np.concatenate([levels, 1 - levels]))
    observed = np.quantile(made_up, levels)
    ax.plot(observed, observed, color="0.7", linewidth=0.8)
    for (name, draws), colour in zip(predicted.items(), COLOURS, strict=True):
        quantiles = np.quantile(draws, levels, axis=1)
        low, high = np.quantile(quantiles, (0.025, 0.975), axis=1)
        ax.fill_between(observed, low, high, color=colour, alpha=0.3, linewidth=0)
        ax.plot(observed, quantiles.mean(1), "o-", markersize=3, color=colour, label=name)
    ax.set(
        xlabel="quantiles of the data / minutes", ylabel="of data that the model predicts",
        title="Half an hour lost is no rarity",
    )  # fmt: skip
    ax.legend()


def plot_gain(ax, made_up, gain):
    """By how much the second model predicts each flight better, by how the flight came out."""
    ax.axhline(0, color="0.7", linewidth=0.8)
    for which, colour in ((gain < 0, COLOURS[0]), (gain >= 0, COLOURS[1])):
        ax.scatter(made_up[which], gain[which], s=6, color=colour, alpha=0.4, linewidth=0)
    ax.set(
        xlabel="minutes lost in the air", ylabel="log density by the t less that by the normal",
        title="Who loses three quarters of an hour decides", ylim=(-1, 30),
    )  # fmt: skip
    ax.set_yscale("symlog", linthresh=1)
    ax.set_yticks([-0.5, 0, 0.5, 1, 3, 10, 30], ["−0.5", "0", "0.5", "1", "3", "10", "30"])
    ax.minorticks_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="flights to read, default all")
    parser.add_argument("--output", default="made-up-time.png")
    options = parser.parse_args()

    flights = read_flights(options.rows)
    made_up = jnp.asarray(flights["arr_delay"] - flights["dep_delay"], jnp.float32)
    distance = jnp.asarray(flights["distance"] / 1000.0 - 1.0, jnp.float32)
    few, some = (np.arange(min(n, len(made_up))) for n in (2_000, 20_000))  # of a shuffled table
    predicted, left_out, of_rows = {}, {}, []
    for name, has_tails in (("normal", False), ("Student t", True)):
        mcmc = fit(distance, made_up, has_tails)
        print(f"{name}: {bias_report(mcmc).summary_line}")
        mcmc.print_summary()
        left_out[name] = loo(mcmc, num_rows=1_000)
        print(f"{left_out[name]}\n")
        of_rows.append(scores(mcmc, few))
        drawn = posterior_predictive(mcmc, jax.random.key(1), some, num_draws=25)["made_up"]
        predicted[name] = drawn.reshape(-1, len(some))
    better, worse = left_out["Student t"], left_out["normal"]
    error = np.hypot(better.subsampling_se, worse.subsampling_se)
    print(f"Student t less normal, all {len(made_up):,} rows: "
          f"{better.elpd - worse.elpd:,.1f} ± {error:.1f}")  # fmt: skip
    gain = of_rows[1] - of_rows[0]
    print(f"The mean of the first {len(gain):,}, times all: {gain.mean() * len(made_up):,.0f} ± "
          f"{gain.std() / np.sqrt(len(gain)) * len(made_up):,.0f}")  # fmt: skip
    print(f"Of other flights like these: ± {gain.std() * np.sqrt(len(made_up)):,.0f}")
    extreme = np.asarray(made_up)[few] > 45
    print(f"Over 45 minutes lost: {extreme.sum()} of {len(few):,}, with {gain[extreme].sum():.0f} "
          f"of a gain of {gain.sum():.0f}")  # fmt: skip
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.4), layout="constrained")
        plot_quantiles(left, predicted, np.asarray(made_up))
        plot_gain(right, np.asarray(made_up)[few], gain)
    figure.savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
