"""Fit a hierarchical model of delays on two hundred routes of very different size.

python examples/routes.py                  # all flights of 2013
python examples/routes.py --rows 5000      # quickly
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
from nycflights import read_flights, style

from numpyro_sgmcmc import SGHMCSplit, bias_report

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def model(route, num_routes, late=None, batch_size=None):
    """Model P(late) of each route, partially pooled over routes."""
    mean = numpyro.sample("mean", dist.Normal(-1, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("routes", num_routes):
        logit = numpyro.sample("logit", dist.Normal(mean, sd))
    with numpyro.plate("flights", len(route), subsample_size=batch_size) as i:
        obs = None if late is None else late[i]
        numpyro.sample("late", dist.Bernoulli(logits=logit[route[i]]), obs=obs)


def plot(draws, share, flown, names):
    """Each route as its own flights have it, and as the model has it."""
    p = 1 / (1 + np.exp(-draws["logit"]))
    everywhere = 1 / (1 + np.exp(-np.mean(draws["mean"])))
    with plt.rc_context(style):
        figure, ax = plt.subplots(figsize=(8, 4.4), layout="constrained")
        estimate, (low, high) = p.mean(0), np.quantile(p, (0.025, 0.975), axis=0)
        ax.vlines(flown, low, high, color="#2b6a99", alpha=0.25, linewidth=1.2)
        ax.vlines(flown, share, estimate, color="#d9822b", alpha=0.5, linewidth=0.6)
        ax.scatter(flown, share, s=12, color="#d9822b", label="share of the route's own flights")
        pooled = "partially pooled, with 95% intervals"
        ax.scatter(flown, estimate, s=12, color="#2b6a99", label=pooled)
        ax.axhline(everywhere, color="0.6", linewidth=0.8, linestyle="--")
        worst = np.argsort(np.abs(share - everywhere) * (flown < 100))[-3:]
        for k in worst:
            ax.annotate(f"{names[k]} ({flown[k]})", (flown[k], share[k]), xytext=(5, 3),
                        textcoords="offset points", fontsize=8)  # fmt: skip
        ax.set(
            xscale="log", xlabel="flights in 2013", ylabel="arrive more than 15 minutes late",
            title="Routes with few flights are drawn to what is usual", ylim=(-0.02, 0.8),
        )  # fmt: skip
        ax.legend(loc="upper right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="flights to read, default all")
    parser.add_argument("--output", default="routes.png")
    options = parser.parse_args()

    flights = read_flights(options.rows)
    route, names = pd.factorize(flights["origin"] + "-" + flights["dest"], sort=True)
    late = (flights["arr_delay"] > 15).to_numpy(np.int32)
    flown = np.bincount(route)
    print(f"{len(late):,} flights on {len(names)} routes, with 1 to {flown.max():,} each")

    mcmc = MCMC(SGHMCSplit(model), num_warmup=300, num_samples=500, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    data = jnp.asarray(route, jnp.int32), len(names), jnp.asarray(late)
    mcmc.run(jax.random.key(0), *data, batch_size=2_000)
    print(bias_report(mcmc))

    draws = {name: np.asarray(x) for name, x in mcmc.get_samples().items()}
    share = np.bincount(route, weights=late) / flown
    plot(draws, share, flown, names).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
