"""Fit a survival model of the time until an aircraft's next departure, with censoring.

python examples/return_time.py                # all departures of January 2013
python examples/return_time.py --rows 5000    # quickly
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC
from nycflights import read_airlines, read_schedule, style

from numpyro_sgmcmc import SGHMCSplit, bias_report

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

END = pd.Timestamp("2013-02-01", tz="America/New_York")
EDGES = np.array([0.0, 4, 5, 6, 9, 12, 18, 24, 36, 48, 96, 192, 384, 744])  # hours
SHOWN = {"B6": "#2b6a99", "US": "#6a9e5b", "AA": "#b0417e", "WN": "#d9822b"}
FEWEST = 300


def model(airline, num_airlines, hours, is_back, batch_size=None):
    """Planes come back at a rate that changes with the hours since they left, by airline.

    Of a plane that is not back yet only the hours without it are known.
    """
    mean = numpyro.sample("mean", dist.Normal(-4, 2).expand([len(EDGES) - 1]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("airlines", num_airlines):
        log_rate = numpyro.sample("log_rate", dist.Normal(mean, sd).to_event(1))
    with numpyro.plate("departures", len(hours), subsample_size=batch_size) as i:
        rate = log_rate[airline[i]]
        spent = jnp.clip(hours[i, None] - EDGES[:-1], 0, np.diff(EDGES))
        later_than = -(jnp.exp(rate) * spent).sum(-1)
        at = jnp.searchsorted(jnp.asarray(EDGES), hours[i]) - 1
        now = jnp.take_along_axis(rate, at[:, None], -1)[:, 0]
        numpyro.factor("return", later_than + jnp.where(is_back[i], now, 0.0))


def read_returns(num_rows):
    """January's departures at random: hours until the same plane's next one, as the whole year
    has them, and hours until January's end.
    """
    flights = read_schedule().dropna(subset=["dep_time", "tailnum"])
    minutes = pd.to_timedelta(flights["minute"] + flights["dep_delay"], unit="min")
    flights["left"] = pd.to_datetime(flights["time_hour"]) + minutes
    flights = flights.sort_values("left")
    again = flights.groupby("tailnum")["left"].shift(-1)
    flights["hours"] = (again - flights["left"]).dt.total_seconds() / 3600
    flights["seen"] = (END - flights["left"]).dt.total_seconds() / 3600
    january = flights[flights["left"] < END].fillna({"hours": np.inf})  # never in that year
    flown = january["carrier"].value_counts()
    january = january[january["carrier"].isin(flown.index[flown >= FEWEST])]
    return january.sample(frac=1, random_state=2013)[:num_rows]


def not_back(log_rate, hours):
    """The share of planes that is not back after so many hours, shape (draws, airlines, hours)."""
    spent = np.clip(hours[:, None] - EDGES[:-1], 0, np.diff(EDGES))
    return np.exp(-np.exp(log_rate) @ spent.T)


def plot(log_rate, airline, codes, truth, is_back):
    """Shares that are not back: by the model, without the open rows, and as it came out."""
    grid = np.geomspace(4, 744, 200)
    marks = np.array([4, 5, 6, 9, 12, 18, 24, 36, 48, 72, 96, 144, 192, 288, 384, 552, 744])
    curves = not_back(log_rate, grid)
    names = read_airlines()
    with plt.rc_context(style):
        figure, ax = plt.subplots(figsize=(8, 4.6), layout="constrained")
        for code, colour in SHOWN.items():
            k = codes.index(code)
            low, high = np.quantile(curves[:, k], (0.025, 0.975), axis=0)
            ax.fill_between(grid, low, high, color=colour, alpha=0.35, linewidth=0)
            ax.plot(grid, curves[:, k].mean(0), color=colour, linewidth=1)
            came, closed = truth[airline == k], truth[(airline == k) & is_back]
            ax.plot(grid, (closed[:, None] > grid).mean(0), ":", color=colour, linewidth=1.2)
            ax.scatter(marks, (came[:, None] > marks).mean(0), s=14, color=colour,
                       edgecolor="white", linewidth=0.6, zorder=3, clip_on=False)  # fmt: skip
            ax.scatter([], [], s=24, marker="s", color=colour, label=names[code])
        ax.plot([], [], color="0.3", label="the model, with 95% intervals")
        ax.plot([], [], ":", color="0.3", label="open rows dropped")
        ax.scatter([], [], s=14, color="0.3", label="what the rest of the year showed")
        ticks = {4: "4 h", 6: "6 h", 12: "12 h", 24: "1 day", 48: "2", 96: "4", 192: "8", 384: "16"}
        ax.set(
            xscale="log", xlim=(4, 780), ylim=(0, 1),
            xlabel="hours and days since departure from New York",
            ylabel="departures whose plane is not back",
            title="Predictions for February from January alone",
        )  # fmt: skip
        ax.set_xticks([*ticks, 744], [*ticks.values(), "31"])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.legend(loc="lower left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="departures to read, default all of January")
    parser.add_argument("--output", default="return-time.png")
    options = parser.parse_args()

    departures = read_returns(options.rows)
    airline, codes = pd.factorize(departures["carrier"], sort=True)
    truth, seen = departures["hours"].to_numpy(), departures["seen"].to_numpy()
    is_back = truth < seen
    hours = np.where(is_back, truth, seen)
    print(f"{len(hours):,} departures by {len(codes)} airlines, {np.mean(~is_back):.0%} open")

    mcmc = MCMC(SGHMCSplit(model), num_warmup=300, num_samples=500, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    data = jnp.asarray(airline, jnp.int32), len(codes), jnp.asarray(hours, jnp.float32)
    mcmc.run(jax.random.key(0), *data, jnp.asarray(is_back), batch_size=1_000)
    print(bias_report(mcmc))

    log_rate = np.asarray(mcmc.get_samples()["log_rate"])
    week = not_back(log_rate, np.array([168.0]))[..., 0]
    print("\nnot back in a week  by the model  open rows dropped  in truth")
    for k, code in enumerate(codes):
        cell = f"{week[:, k].mean():.1%} ± {week[:, k].std():.1%}"
        late, mine = truth > 168, airline == k
        print(f"{code:<18}{cell:>14}{late[mine & is_back].mean():>19.1%}{late[mine].mean():>10.1%}")
    plot(log_rate, airline, list(codes), truth, is_back).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
