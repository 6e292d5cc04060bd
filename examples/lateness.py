"""Fit an ordinal regression: four classes of delay by the hour of departure.

python examples/lateness.py                # all flights of 2013
python examples/lateness.py --rows 5000    # quickly
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import MCMC
from nycflights import read_flights, style

from numpyro_sgmcmc import SGHMCSplit, bias_report

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

BOUNDS = (0, 15, 60)  # minutes
CLASSES = ("early", "at most 15 minutes late", "at most an hour late", "later")
COLOURS = ("#dbe7f0", "#9fc3dc", "#4c8bb5", "#1f4e6e")


def model(hour, winter, lateness=None, batch_size=None):
    """One scale on which flights are early or late, and where it is cut into classes."""
    trend = numpyro.sample("trend", dist.Normal(0, 1).expand([3]).to_event(1))
    of_winter = numpyro.sample("winter", dist.Normal(0, 1))
    spread = dist.Normal(0, 2).expand([len(BOUNDS)]).to_event(1)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(spread, OrderedTransform()))
    with numpyro.plate("flights", len(hour), subsample_size=batch_size) as i:
        powers = hour[i, None] ** jnp.arange(1, 4)
        score = powers @ trend + of_winter * winter[i]
        obs = None if lateness is None else lateness[i]
        numpyro.sample("lateness", dist.OrderedLogistic(score, cuts), obs=obs)


def probabilities(draws, hour):
    """Of each class at some hours outside winter, shape (draws, hours, classes)."""
    score = draws["trend"] @ (hour ** np.arange(1, 4)[:, None])
    below = 1 / (1 + np.exp(score[..., None] - draws["cuts"][:, None, :]))
    ends = np.zeros_like(below[..., :1]), np.ones_like(below[..., :1])
    return np.diff(np.concatenate([ends[0], below, ends[1]], -1), axis=-1)


def plot(draws, hours, observed, scaled):
    """Classes by hour: the model's as areas, observed shares as points on their borders."""
    grid = np.linspace(hours.min(), hours.max(), 60)
    p = probabilities(draws, scaled(grid)).mean(0)
    with plt.rc_context(style):
        figure, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
        ax.stackplot(grid, p.T, colors=COLOURS, labels=CLASSES)
        for k in range(len(BOUNDS)):
            border = observed[:, : k + 1].sum(1)
            label = "observed" if k == 0 else None
            ax.scatter(
                hours, border, s=16, color="white", edgecolor="#d9822b", label=label, zorder=3
            )
        ax.set(
            xlabel="scheduled hour of departure", ylabel="flights, March to November",
            title="Who leaves late arrives late", xlim=(grid[0], grid[-1]), ylim=(0, 1),
        )  # fmt: skip
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="flights to read, default all")
    parser.add_argument("--output", default="lateness.png")
    options = parser.parse_args()

    flights = read_flights(options.rows)
    lateness = np.searchsorted(BOUNDS, flights["arr_delay"].to_numpy(), side="left")
    hour = flights["hour"].to_numpy(float)
    winter = flights["month"].isin((12, 1, 2)).to_numpy()

    def scaled(x):
        return (x - 13.0) / 5.0

    mcmc = MCMC(SGHMCSplit(model), num_warmup=300, num_samples=500, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    data = (scaled(hour).astype(np.float32), winter.astype(np.float32), lateness.astype(np.int32))
    mcmc.run(jax.random.key(0), *map(jnp.asarray, data), batch_size=1_000)
    mcmc.print_summary()
    print(bias_report(mcmc).summary_line)

    hours = np.unique(hour[~winter])
    observed = np.array(
        [np.bincount(lateness[(hour == h) & ~winter], minlength=4) for h in hours], float
    )
    observed /= observed.sum(1, keepdims=True)
    draws = {name: np.asarray(x) for name, x in mcmc.get_samples().items()}
    plot(draws, hours, observed, scaled).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
