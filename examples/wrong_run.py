"""A biased run, how the report shows it, and what removes the bias, with NUTS as the reference.

python examples/wrong_run.py                # 20,000 flights, and NUTS twice on them
python examples/wrong_run.py --rows 5000    # quickly
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from nycflights import read_flights, style

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics import plot_bias

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from speed_plot import plot_speed

WRONG = {"gradient_estimator": "minibatch", "step_size": 0.1}
BATCH_SIZE = 100


def model(X, late, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("flights", len(late), subsample_size=batch_size) as i:
        numpyro.sample("late", dist.Bernoulli(logits=X[i] @ beta), obs=late[i])


def read(num_rows):
    """What is known of a flight beforehand, and whether it arrived 15 minutes late."""
    flights = read_flights(num_rows)
    hour = (flights["hour"] - 13) / 5
    columns = {
        "always": np.ones(len(flights)),
        "hour": hour,
        "hour²": hour**2,
        "distance": np.log(flights["distance"] / 1000),
        "winter": flights["month"].isin((12, 1, 2)),
        "summer": flights["month"].isin((6, 7, 8)),
        "Newark": flights["origin"] == "EWR",
        "LaGuardia": flights["origin"] == "LGA",
    }
    X = np.stack([np.asarray(x, np.float32) for x in columns.values()], 1)
    return list(columns), jnp.asarray(X), jnp.asarray(flights["arr_delay"] > 15, jnp.int32)


def fit(key, kernel, *data, num_samples=1000, **sizes):
    """A run, and the seconds of CPU at which its draws began and ended, compilation included."""
    mcmc = MCMC(kernel, num_warmup=300, num_samples=num_samples, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    start = time.process_time()
    mcmc.warmup(jax.random.key(key), *data, **sizes)
    jax.block_until_ready(mcmc.post_warmup_state)
    begun = time.process_time() - start
    mcmc.run(mcmc.post_warmup_state.rng_key, *data, **sizes)
    jax.block_until_ready(mcmc.get_samples())
    return (begun, time.process_time() - start), mcmc


def against(mcmc, nuts):
    """Return the biases of means, in SDs of NUTS, and of SDs, relative to NUTS."""
    a, b = (m.get_samples()["beta"] for m in (mcmc, nuts))
    return np.asarray((a.mean(0) - b.mean(0)) / b.std(0)), np.asarray(a.std(0) / b.std(0) - 1)


def plot(runs, nuts, names):
    """Above what the report says of two runs, with NUTS's word; below errors against seconds."""
    shown = {"Plain gradients, step 0.1": "as set", "Nothing set": "nothing set"}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(8, 9), layout="constrained")
        *parts, below = figure.subfigures(3, 1, height_ratios=(1, 1, 1.15))
        for part, (title, label) in zip(parts, shown.items(), strict=True):
            axes = part.subplots(1, 2, sharey=True)
            mcmc = runs[label][1]
            plot_bias(mcmc, axes=axes)
            shift, inflation = against(mcmc, nuts)
            for ax, x in zip(axes, (shift, 100 * inflation), strict=True):
                ax.scatter(x, np.arange(len(x)), marker="x", s=34, color="#222222", zorder=4,
                           linewidth=1, label="NUTS")  # fmt: skip
            axes[0].set(title=title, yticks=range(len(names)), yticklabels=names)
            axes[0].set_xlim(-0.3, 0.3)
        parts[0].axes[1].legend(loc="upper center")
        ax = plot_speed(runs, nuts, moment="sd", ax=below.subplots())
        ax.set(title="Error of SDs, by time", xlabel="seconds of CPU, compilation included")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="flights to read")
    parser.add_argument("--output", default="wrong-run.png")
    options = parser.parse_args()

    names, *data = read(options.rows)
    print(f"{len(data[1]):,} flights, {BATCH_SIZE} a step")
    kernels = {
        "as set": SGHMCSplit(model, **WRONG),
        "half the step": SGHMCSplit(model, **WRONG | {"step_size": 0.05}),
        "nothing set": SGHMCSplit(model),
    }
    _, nuts = fit(0, NUTS(model, dense_mass=True), *data, num_samples=4000)
    runs = {name: fit(1, kernel, *data, batch_size=BATCH_SIZE) for name, kernel in kernels.items()}
    for name, (_, mcmc) in runs.items():
        print(f"\n{name}:\n{bias_report(mcmc)}")
    runs["NUTS again"] = fit(2, NUTS(model, dense_mass=True), *data)

    print("\nworst of the coordinates  CPU s  draws from  mean bias     SD bias")
    for name, ((begun, ended), mcmc) in runs.items():
        shift, inflation = (x[np.abs(x).argmax()] for x in against(mcmc, nuts))
        print(f"{name:<25}{ended:>7.0f}{begun:>12.0f}{shift:>+12.3f}{inflation:>+14.1%}")
    plot(runs, nuts, names).savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
