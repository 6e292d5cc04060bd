"""Fit a neural network to delays by hour and day of the year, with predictive intervals.

The data are 5,000 of the flights that left New York in 2013 and arrived somewhere. A network with
one hidden layer gives the probability that a flight arrives more than 15 minutes late; its weights
have a posterior, and so has every prediction. No flight leaves late at night: there the posterior
is wide. The sampler sees 500 flights at a step.

    python examples/network.py
    python examples/network.py --rows 2000  # fewer flights: less sure
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, init_to_sample
from nycflights import read_flights, style

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.diagnostics import predictive_summary

matplotlib.use("Agg")  # the plot is a file: no screen is needed
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

UNITS, BATCH_SIZE = 20, 500
DAYS = {"10 July": 191, "20 September": 263}
MONTHS = pd.date_range("2013-01-01", periods=12, freq="MS")
COLORS = ("#d9822b", "#2b6a99")


def inputs(hour, day) -> jax.Array:
    """What the network gets: the hour, from about -2 to 2, and the season on a circle."""
    angle = 2 * np.pi * np.asarray(day) / 365
    hour, cos, sin = np.broadcast_arrays((np.asarray(hour) - 13) / 5, np.cos(angle), np.sin(angle))
    return jnp.asarray(np.stack([hour, cos, sin], axis=-1), jnp.float32)


def load_flights() -> pd.DataFrame:
    """Hour and day of departure, and whether late, in random order."""
    flights = read_flights()
    scheduled = flights["sched_dep_time"]
    date = pd.to_datetime(flights[["year", "month", "day"]])
    return pd.DataFrame(
        {
            "hour": scheduled // 100 + scheduled % 100 / 60,
            "day": date.dt.day_of_year,
            "late": flights["arr_delay"] > 15,
        }
    )


def network(weights, x) -> jax.Array:
    """The log odds of being late."""
    hidden = jnp.tanh(x @ weights["w1"] + weights["b1"])
    return weights["b2"] + hidden @ weights["w2"] / np.sqrt(UNITS)


def model(x, late, batch_size=None):
    weights = {
        "w1": numpyro.sample("w1", dist.Normal(0, 1).expand([x.shape[1], UNITS]).to_event(2)),
        "b1": numpyro.sample("b1", dist.Normal(0, 1).expand([UNITS]).to_event(1)),
        "w2": numpyro.sample("w2", dist.Normal(0, 2).expand([UNITS]).to_event(1)),
        "b2": numpyro.sample("b2", dist.Normal(0, 2)),
    }
    with numpyro.plate("flights", len(x), subsample_size=batch_size) as i:
        numpyro.sample("late", dist.Bernoulli(logits=network(weights, x[i])), obs=late[i])


def fit(x, late) -> MCMC:
    """Four chains from the prior, in the weights' own units.

    ``SGHMCSplit(model)`` finds all this itself; that takes minutes, and this less than one.
    """
    kernel = SGHMCSplit(
        model,
        friction=5.0,
        step_size=0.005,
        num_steps=200,
        adapt_mass_matrix=False,
        gradient_estimator="minibatch",
        subsampling="shuffled",
        init_strategy=init_to_sample,
    )
    mcmc = MCMC(kernel, num_warmup=100, num_samples=400, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(0), x, late, batch_size=BATCH_SIZE)
    return mcmc


def probabilities(mcmc: MCMC, x) -> np.ndarray:
    """Of every draw, shape ``(draws, ...)``."""
    draw = jax.jit(jax.vmap(lambda weights: jax.nn.sigmoid(network(weights, x))))
    return np.asarray(draw(mcmc.get_samples()))


def plot(mcmc: MCMC, others: pd.DataFrame) -> plt.Figure:
    """The probability by hour and day, how sure the network is of it, and two days.

    :param others: flights that the network has not seen.
    """
    hours, days = np.linspace(0, 24, 73), np.arange(1, 366, 4)
    p = probabilities(mcmc, inputs(hours[:, None], days))
    low, high = np.quantile(p, (0.025, 0.975), axis=0)
    with plt.rc_context(style):
        figure, axes = plt.subplot_mosaic("AB;CC", figsize=(8, 7.4), layout="constrained")
        maps = {
            "A": (p.mean(0), "YlOrBr", "Late by more than 15 minutes"),
            "B": (high - low, "viridis", "Width of the 95% interval"),
        }
        for key, (z, colors, title) in maps.items():
            ax = axes[key]
            image = ax.pcolormesh(days, hours, z, cmap=colors, shading="gouraud", vmin=0)
            figure.colorbar(image, ax=ax, format=PercentFormatter(1, decimals=0))
            ax.set_xticks(MONTHS.day_of_year, [name[0] for name in MONTHS.month_name()])
            ax.set(title=title, ylabel="hour of departure", yticks=range(0, 25, 4))
        ax = axes["C"]
        for (name, day), color in zip(DAYS.items(), COLORS, strict=True):
            p = probabilities(mcmc, inputs(hours, day))
            low, high = np.quantile(p, (0.025, 0.975), axis=0)
            ax.fill_between(hours, low, high, color=color, alpha=0.25, linewidth=0)
            ax.plot(hours, p.mean(0), color=color, label=name)
            near = others[(others["day"] - day).abs() <= 10]
            seen = near.groupby(near["hour"].astype(int))["late"].agg(["mean", "size"])
            seen = seen[seen["size"] >= 100]
            ax.scatter(seen.index + 0.5, seen["mean"], s=16, color="white", edgecolor=color,
                       zorder=3)  # fmt: skip
        ax.set(
            title="Two days, and unseen flights about them", xlabel="hour of departure",
            xlim=(0, 24), ylim=(0, 0.8), xticks=range(0, 25, 4),
        )  # fmt: skip
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.legend(loc="upper left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5000, help="flights to learn from")
    parser.add_argument("--output", default="network.png")
    options = parser.parse_args()

    flights = load_flights()
    chosen, others = flights[: options.rows], flights[options.rows :]
    x, late = inputs(chosen["hour"], chosen["day"]), jnp.asarray(chosen["late"], jnp.int32)
    print(f"{len(late):,} flights, {late.mean():.1%} of them late; {BATCH_SIZE:,} a step\n")
    mcmc = fit(x, late)

    # Weights may be exchanged without any change in what the network says: judge its predictions.
    new = inputs(np.arange(6, 24, 3)[:, None], np.arange(15, 366, 30)).reshape(-1, 3)
    print(predictive_summary(mcmc, network, new))
    print()
    for hours in ((6, 12, 18), (24,)):
        p = probabilities(mcmc, inputs(np.array(hours)[:, None], np.arange(1, 366, 4)))
        low, high = np.quantile(p, (0.025, 0.975), axis=0)
        width = high - low
        at = ", ".join(map(str, hours))
        print(f"95% intervals at {at} h: {width.min():.0%} to {width.max():.0%} wide over the year")
    plot(mcmc, others).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
