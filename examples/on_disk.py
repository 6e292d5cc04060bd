"""Fit one model to data on disk and to the same data in memory.

python examples/on_disk.py                 # all flights of 2013
python examples/on_disk.py --rows 5000     # quickly
python examples/on_disk.py --copies 200    # 65 million rows: what it takes of memory
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from nycflights import read_flights, style
from scipy.stats import gaussian_kde

from numpyro_sgmcmc import HostArray, SGHMCSplit, bias_report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = ("distance", "delay", "evening", "winter")
PANELS = {
    "intercept": "1,000 miles, on time, at noon",
    "distance": "1,000 miles more",
    "delay": "left an hour late",
    "evening": "left six hours after noon",
    "scale": "scale",
    "df": "degrees of freedom",
}


def model(X, made_up=None, batch_size=None):
    """Minutes from departure's delay to arrival's."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 20))
    slopes = [numpyro.sample(name, dist.Normal(0, 10)) for name in COLUMNS]
    scale = numpyro.sample("scale", dist.HalfNormal(20))
    df = numpyro.sample("df", dist.Gamma(2, 0.1))
    with numpyro.plate("flights", len(X), subsample_size=batch_size) as i:
        mean = intercept + X[i] @ jnp.stack(slopes)
        obs = None if made_up is None else made_up[i]
        numpyro.sample("made_up", dist.StudentT(df, mean, scale), obs=obs)


def write(folder, num_rows, copies):
    """The table as two files of plain numbers; how many rows they have."""
    flights = read_flights(num_rows)
    columns = (
        flights["distance"] / 1000 - 1,
        flights["dep_delay"] / 60,
        (flights["hour"] - 12) / 6,
        flights["month"].isin((12, 1, 2)),
    )
    X = np.stack([column.to_numpy(np.float32) for column in columns], 1)
    made_up = (flights["arr_delay"] - flights["dep_delay"]).to_numpy(np.float32)
    for name, array in (("X", X), ("made_up", made_up)):
        with open(folder / name, "wb") as file:
            for _ in range(copies):
                array.tofile(file)
    return copies * len(made_up)


def fit(folder, where):
    """Run on these files in a separate process; draws go to a file beside them."""
    shapes = {"X": (-1, len(COLUMNS)), "made_up": (-1,)}
    if where == "disk":
        maps = [np.memmap(folder / name, np.float32, "r") for name in shapes]
        data = [HostArray(x.reshape(s)) for x, s in zip(maps, shapes.values(), strict=True)]
    else:
        data = [
            jnp.asarray(np.fromfile(folder / name, np.float32).reshape(shape))
            for name, shape in shapes.items()
        ]
    mcmc = MCMC(SGHMCSplit(model), num_warmup=300, num_samples=500, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(0), *data, batch_size=1_000)
    mcmc.print_summary()
    print(bias_report(mcmc).summary_line)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"At most {most * (1 if sys.platform == 'darwin' else 1024) / 1e6:,.0f} MB of memory")
    np.savez(folder / f"{where}.npz", **mcmc.get_samples())


def plot(memory, disk):
    """Each parameter's two posteriors, one over the other."""
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 3, figsize=(8, 4.4), layout="constrained")
        for ax, (name, label) in zip(axes.flat, PANELS.items(), strict=True):
            both = np.concatenate([memory[name], disk[name]])
            grid = np.linspace(both.min(), both.max(), 200)
            ax.fill_between(grid, gaussian_kde(memory[name])(grid), color="#9fc3dc",
                            linewidth=0, label="rows in memory")  # fmt: skip
            ax.plot(grid, gaussian_kde(disk[name])(grid), color="#d9822b", label="rows on disk")
            ax.set_title(label, loc="center", fontweight="normal", fontsize=9)
            ax.set(xlabel="" if name == "df" else "minutes", yticks=[], ylim=(0, None))
            ax.locator_params(axis="x", nbins=4)
            ax.spines["left"].set_visible(False)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=2)
        figure.suptitle("Minutes lost in the air: one posterior", x=0.01, ha="left",
                        fontsize=10, fontweight="bold")  # fmt: skip
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="flights to read, default all")
    parser.add_argument("--copies", type=int, default=1, help="times that they are written")
    parser.add_argument("--output", default="on-disk.png")
    parser.add_argument("--fit", nargs=2, metavar=("FOLDER", "WHERE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit:
        fit(Path(options.fit[0]), options.fit[1])
        return

    draws = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_rows = write(folder, options.rows, options.copies)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{num_rows:,} rows, {size / 1e6:,.0f} MB", flush=True)
        for where in ("memory", "disk"):
            print(f"\nRows {'on' if where == 'disk' else 'in'} {where}:", flush=True)
            subprocess.run([sys.executable, __file__, "--fit", name, where], check=True)
            draws[where] = dict(np.load(folder / f"{where}.npz"))
    gaps = [(draws["disk"][name] - x) / x.std() for name, x in draws["memory"].items()]
    means, each = (max(abs(f(x)).max() for x in gaps) for f in (np.mean, np.asarray))
    print(f"\nMeans are at most {means:.3f} posterior SDs apart, single draws at most {each:.2f}")
    plot(draws["memory"], draws["disk"]).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
