"""Model overdispersed counts of cancelled flights by airline, airport and day.

python examples/cancellations.py                # all days of 2013
python examples/cancellations.py --rows 5000    # quickly
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from jax.nn import sigmoid
from numpyro.infer import MCMC, Predictive
from nycflights import read_airlines, read_schedule, style

from numpyro_sgmcmc import SGHMCSplit, bias_report

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

AIRPORTS = {"EWR": "Newark", "JFK": "Kennedy", "LGA": "LaGuardia"}


def model(group, num_groups, scheduled, cancelled=None, batch_size=None):
    """Cancelled flights of a group on a day: a share of them that is drawn anew each day.

    ``together`` is the logit of the correlation between two of the group's flights on one day.
    """
    mean = numpyro.sample("mean", dist.Normal(-4, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    usual = numpyro.sample("usual", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", num_groups):
        logit = numpyro.sample("logit", dist.Normal(mean, sd))
        together = numpyro.sample("together", dist.Normal(usual, spread))
    with numpyro.plate("days", len(group), subsample_size=batch_size) as i:
        share, concentration = sigmoid(logit[group[i]]), jnp.exp(-together[group[i]])
        counts = dist.BetaBinomial(share * concentration, (1 - share) * concentration, scheduled[i])
        numpyro.sample("cancelled", counts, obs=None if cancelled is None else cancelled[i])


def another(draws):
    """Shares of cancelled flights, and of those beside a cancelled one, by draw and group."""
    share, correlation = (1 / (1 + np.exp(-draws[name])) for name in ("logit", "together"))
    return share, share + correlation * (1 - share)


def plot(draws, names, observed):
    """By airport and airline: how often a flight is cancelled, and one beside a cancelled one."""
    share, beside = another(draws)
    (left, right), (low, high) = (np.quantile(p, (0.025, 0.975), axis=0) for p in (share, beside))
    share, beside = share.mean(0), beside.mean(0)
    airlines = read_airlines().str.split().str[0].replace("US", "US Airways")
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 3, figsize=(8, 4.4), sharex=True, layout="constrained")
        for ax, (airport, title) in zip(axes, AIRPORTS.items(), strict=True):
            k = np.flatnonzero([name.endswith(airport) for name in names])
            k = k[np.argsort(beside[k])]
            y = np.arange(len(k))
            ax.hlines(y, left[k], right[k], color="#9fc3dc", linewidth=2.5)
            ax.scatter(share[k], y, s=16, color="#2b6a99", label="of all flights", zorder=3)
            ax.hlines(y, low[k], high[k], color="#f0c794", linewidth=2.5)
            ax.scatter(beside[k], y, s=16, color="#d9822b", zorder=3,
                       label="of the others, where one is cancelled")  # fmt: skip
            ax.scatter(observed[k], y, s=14, marker="x", color="0.5", linewidth=0.8,
                       label="the same, counted", zorder=4)  # fmt: skip
            ax.set(title=title, yticks=y, yticklabels=airlines[[names[j][:2] for j in k]])
            ax.set(xlim=(0, 0.5), ylim=(-0.6, len(k) - 0.4))
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            ax.tick_params(axis="y", length=0)
        axes[1].set_xlabel("cancelled")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def read_counts(num_rows):
    """Scheduled and cancelled flights of each airline at each airport by day, in random order."""
    flights = read_schedule()
    flights["group"] = flights["carrier"] + " " + flights["origin"]
    flights["cancelled"] = flights["dep_time"].isna()
    days = flights.groupby(["group", "month", "day"])["cancelled"].agg(["size", "sum"])
    return days.reset_index().sample(frac=1, random_state=2013)[:num_rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="rows to read, default all")
    parser.add_argument("--output", default="cancellations.png")
    options = parser.parse_args()

    days = read_counts(options.rows)
    group, names = pd.factorize(days["group"], sort=True)
    scheduled, cancelled = days["size"].to_numpy(np.int32), days["sum"].to_numpy(np.int32)
    print(f"{len(days):,} days of {len(names)} groups, {cancelled.sum():,} of "
          f"{scheduled.sum():,} flights cancelled")  # fmt: skip

    mcmc = MCMC(SGHMCSplit(model), num_warmup=300, num_samples=500, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    data = jnp.asarray(group, jnp.int32), len(names), jnp.asarray(scheduled)
    mcmc.run(jax.random.key(0), *data, jnp.asarray(cancelled), batch_size=1_000)
    print(bias_report(mcmc))

    draws = {name: np.asarray(x) for name, x in mcmc.get_samples().items()}
    some = {name: x[::20] for name, x in draws.items()}
    predicted = np.asarray(Predictive(model, some)(jax.random.key(1), *data)["cancelled"])
    shares = 1 / (1 + np.exp(-some["logit"][:, group]))
    alone = np.random.default_rng(0).binomial(scheduled, shares)
    print("\ndays with so many cancelled   in truth    predicted  one by one")
    for bound in (1, 2, 10, 30):
        counts = [(x >= bound).sum(-1) for x in (predicted, alone)]
        cells = [f"{x.mean():,.0f} ± {x.std():.0f}" for x in counts]
        print(f"{bound} or more{(cancelled >= bound).sum():>28,}{cells[0]:>13}{cells[1]:>12}")
    pairs = np.bincount(group, cancelled * (scheduled - 1.0))
    both = np.bincount(group, cancelled * (cancelled - 1.0))
    observed = np.divide(both, pairs, out=np.full(len(names), np.nan), where=pairs > 0)
    plot(draws, names, observed).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
