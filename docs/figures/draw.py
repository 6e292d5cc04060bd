"""Figures of index.md, theory.md, batch-size.md and the reference: `make figures`, three CPU
minutes.

python docs/figures/draw.py
"""

import json
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import gelman_rubin
from numpyro.infer import MCMC, NUTS
from scipy.linalg import solve_discrete_lyapunov
from scipy.stats import gaussian_kde

from numpyro_sgmcmc import SGHMCSplit, bias_report, suggest_subsample_size
from numpyro_sgmcmc.diagnostics import plot_bias, plot_warmup
from numpyro_sgmcmc.dynamics import UnderdampedLangevin

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN, RED = "#2b6a99", "#d9822b", "#3c8d5a", "#c0392b"


# -- front page: a posterior beside that of NUTS, and measured effective draws per second --


def logistic(X, y, batch_size=None):
    """The model of docs/index.md."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])


def draw_front() -> None:
    num_rows, num_columns = 10_000, 12
    keys = jax.random.split(jax.random.key(0), 3)
    X = jax.random.normal(keys[0], (num_rows, num_columns))
    truth = 0.08 * jax.random.normal(keys[1], (num_columns,))
    y = jax.random.bernoulli(keys[2], jax.nn.sigmoid(X @ truth)).astype(jnp.float32)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for kernel, batch_size, colour, shift in (
        (NUTS(logistic), None, ORANGE, -0.17),
        (SGHMCSplit(logistic), 100, BLUE, 0.17),
    ):
        mcmc = MCMC(
            kernel,
            num_warmup=500,
            num_samples=1000,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(1), X, y, batch_size=batch_size)
        draws = np.asarray(mcmc.get_samples()["beta"])
        low, mean, high = np.quantile(draws, [0.025, 0.5, 0.975], axis=0)
        left.errorbar(
            np.arange(num_columns) + shift,
            mean,
            [mean - low, high - mean],
            fmt="o",
            markersize=2,
            color=colour,
            label=type(kernel).__name__,
        )
    left.set(xlabel="coefficient", ylabel="posterior median and 95% interval")
    left.set_title(f"Posterior of a logistic regression, {num_rows:,} rows")
    left.legend()
    # The newest Python's table of benchmarks/scaling.py.
    *_, newest = sorted((FOLDER.parents[1] / "benchmarks" / "results").glob("*.json"))
    (table,) = (t for t in json.loads(newest.read_text()) if t["benchmark"] == "scaling")
    for kernel, colour in (("NUTS", ORANGE), ("SGHMCSplit", BLUE)):
        rows = [row for row in table["rows"] if row[1] == kernel]
        num_rows, ess = (
            [float(row[k].replace(",", "")) for row in rows]
            for k in (0, table["rows"][0].index("ESS/s"))
        )
        right.plot(num_rows, ess, "o-", markersize=4, color=colour, label=kernel)
    right.set(xscale="log", yscale="log", xlabel="rows", ylabel="effective draws per second")
    right.set_title("Speed of sampling by number of rows")
    right.legend()
    figure.savefig(FOLDER / "front.svg")


# -- splitting: stationary SDs of the library's own steps on a standard normal, solved exactly --


def stationary_sd(integrator: str, step_size: float, noise_variance: float = 0.0) -> float:
    """Return the stationary SD of the position for an integrator on a standard normal."""
    dynamics = UnderdampedLangevin(1.5)
    step = dynamics.make_step(integrator)
    start = dynamics.init(jnp.zeros(1), jax.random.key(0))

    def one(position, momentum, noise):
        offset = jnp.sqrt(noise_variance) * noise[-1]
        state = start._replace(position=position, momentum=momentum)
        state = step(state, step_size, lambda q: q + offset, noise[:-1])
        return jnp.concatenate([state.position, state.momentum])

    at = jnp.zeros(1), jnp.zeros(1), jnp.zeros((step.num_noise + 1, 1))
    of_position, of_momentum, of_noise = jax.jacobian(one, argnums=(0, 1, 2))(*at)
    a = np.concatenate([of_position, of_momentum], 1).astype(float)
    b = np.asarray(of_noise, float).reshape(2, -1)
    return float(np.sqrt(solve_discrete_lyapunov(a, b @ b.T)[0, 0]))


def draw_splitting() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    sizes = np.geomspace(0.03, 0.8, 25)
    integrators = (
        ("euler", ORANGE, "Euler (SGHMC)"),
        ("symmetric", BLUE, "symmetric splitting (SGHMCSplit)"),
    )
    for integrator, colour, label in integrators:
        error = [abs(stationary_sd(integrator, h) - 1.0) for h in sizes]
        left.plot(sizes, 100 * np.array(error), color=colour, label=label)
    left.axhline(5, color="0.6", linewidth=0.8, linestyle="--")
    left.text(sizes[0], 5.6, "tolerance (target_sd_bias)", fontsize=8, color="0.4")
    left.set(
        xscale="log", yscale="log", xlabel="step size (posterior SDs)",
        ylabel="bias of the SD (%)", title="Exact gradients: discretisation error",
    )  # fmt: skip
    left.legend(loc="lower right", fontsize=8)
    for variance, colour in ((1.0, GREEN), (10.0, BLUE), (100.0, ORANGE), (1000.0, RED)):
        sd_bias = [100 * (stationary_sd("symmetric", h, variance) - 1) for h in sizes]
        right.plot(sizes, np.maximum(sd_bias, 1e-3), color=colour, label=f"variance {variance:g}")
    right.axhline(5, color="0.6", linewidth=0.8, linestyle="--")
    right.set(
        xscale="log", yscale="log", xlabel="step size (posterior SDs)", ylim=(0.1, None),
        ylabel="bias of the SD (%)", title="Noisy gradients: SDs are inflated",
    )  # fmt: skip
    right.legend(fontsize=8, title="gradient-noise variance", title_fontsize=8)
    for ax in (left, right):
        ax.set_xticks([0.05, 0.1, 0.2, 0.5], ["0.05", "0.1", "0.2", "0.5"])
        ax.xaxis.set_minor_locator(NullLocator())
    figure.savefig(FOLDER / "splitting.png")


# -- control variates: a logistic regression of 20,000 rows, minibatches of 100 --


def survey(num_rows: int = 20_000, dim: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Simulate covariates and binary responses."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((num_rows, dim))
    p = 1 / (1 + np.exp(-X @ np.linspace(-1, 1, dim)))
    return X, (rng.random(num_rows) < p).astype(float)


def mode_and_factor(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior mode under a standard normal prior, and a factor of the covariance."""
    beta = np.zeros(X.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-X @ beta))
        hessian = (X * (p * (1 - p))[:, None]).T @ X + np.eye(len(beta))
        beta = beta - np.linalg.solve(hessian, X.T @ (p - y) + beta)
    return beta, np.linalg.cholesky(np.linalg.inv(hessian))


def draw_control_variates() -> None:
    X, y = survey()
    n, batch = len(y), 100
    mode, factor = mode_and_factor(X, y)
    rng = np.random.default_rng(1)
    distances = np.geomspace(0.1, 30, 20)
    p_mode = 1 / (1 + np.exp(-X @ mode))
    at_mode = X * (p_mode - y)[:, None]
    found = {"minibatch": [], "control variate": [], "second-order control variate": []}
    for distance in distances:
        variances = []
        for _ in range(10):
            direction = rng.standard_normal(len(mode))
            move = factor @ (distance * direction / np.linalg.norm(direction))
            p = 1 / (1 + np.exp(-X @ (mode + move)))
            rows = X * (p - y)[:, None]
            linear = X * (p_mode * (1 - p_mode) * (X @ move))[:, None]
            each = (rows, rows - at_mode, rows - at_mode - linear)
            variances.append([(n**2 / batch * (r @ factor).var(0)).mean() for r in each])
        for values, variance in zip(found.values(), np.mean(variances, 0), strict=True):
            values.append(variance)
    figure, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (label, values), colour in zip(found.items(), (ORANGE, BLUE, GREEN), strict=True):
        ax.plot(distances, values, color=colour, label=label)
    ax.axhline(1, color="0.6", linewidth=0.8, linestyle="--")
    ax.text(0.1, 1.4, "variance of the gradient itself", fontsize=8, color="0.4")
    near = np.sqrt(len(mode))
    ax.axvspan(near / 2, 2 * near, color="#eef2f5", zorder=0)
    ax.text(near, 3e-9, "where draws are", fontsize=8, color="0.4", ha="center")
    ax.set(
        xscale="log", yscale="log", xlabel="distance from the reference point (posterior SDs)",
        ylabel="gradient-noise variance", title="Gradients from 100 of 20,000 rows",
    )  # fmt: skip
    ax.legend(fontsize=8, loc="lower right")
    figure.savefig(FOLDER / "control-variates.png")


# -- runs: chains that agree and are biased, and the bias report of them --


def model(X, y, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])


def run(num_samples: int = 1000, **options) -> MCMC:
    X, y = (jnp.asarray(x, jnp.float32) for x in survey())
    mcmc = MCMC(
        SGHMCSplit(model, **options), num_warmup=200, num_samples=num_samples, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mcmc.run(jax.random.key(0), X, y, batch_size=100)
    return mcmc


def draw_runs() -> None:
    right = run(num_samples=4000)
    plot_warmup(right)
    plt.savefig(FOLDER / "warmup.png")
    wrong = run(gradient_estimator="minibatch", step_size=0.1)
    plot_bias(wrong)
    plt.savefig(FOLDER / "bias.png")
    draws = np.asarray(wrong.get_samples(group_by_chain=True)["beta"][..., 0])
    truth = np.asarray(right.get_samples()["beta"])
    figure, (left, ax) = plt.subplots(
        1, 2, figsize=(9, 3.4), width_ratios=(1.5, 1), layout="constrained"
    )
    for chain, colour in zip(draws, (BLUE, ORANGE, GREEN, RED), strict=True):
        left.plot(chain, color=colour, linewidth=0.5, alpha=0.8)
    r_hat = gelman_rubin(draws)
    left.set(xlabel="draw", ylabel="coefficient", title=f"Four chains agree: R-hat {r_hat:.3f}")
    at = np.linspace(draws.min(), draws.max(), 400)
    for values, colour, label in (
        (truth[:, 0], BLUE, "posterior"),
        (draws.ravel(), ORANGE, "these chains"),
    ):
        density = gaussian_kde(values)(at)
        ax.fill_between(at, density, color=colour, alpha=0.25, linewidth=0)
        ax.plot(at, density, color=colour, label=label)
    ratio = draws.std() / truth[:, 0].std()
    ax.set(xlabel="coefficient", yticks=[], title=f"and are {ratio:.1f} times too wide")
    ax.legend(fontsize=8)
    figure.savefig(FOLDER / "silently-wrong.png")

    settings = [("minibatch", h) for h in (0.003, 0.01, 0.02, 0.05, 0.1)]
    settings += [("control_variate", h) for h in (0.3, 0.8, 1.2)]
    figure, ax = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
    ends = [-15, 200]
    ax.plot(ends, ends, color="0.7", linewidth=0.8)
    for gradient, colour in (("minibatch", ORANGE), ("control_variate", BLUE)):
        true, estimated, error = [], [], []
        for step_size in (h for g, h in settings if g == gradient):
            mcmc = run(gradient_estimator=gradient, step_size=step_size)
            estimate = bias_report(mcmc).sd_inflation
            sd = np.asarray(mcmc.get_samples()["beta"]).std(0)
            true += list(100 * (sd / truth.std(0) - 1))
            estimated += list(100 * estimate.value)
            error += list(200 * estimate.error)
        print(gradient, np.round(true, 1), np.round(estimated, 1), np.round(error, 1))
        ax.errorbar(
            true, estimated, yerr=error, fmt="o", markersize=4, linewidth=1, color=colour,
            label=gradient.replace("_", " ") + ("s" if gradient != "minibatch" else " gradients"),
        )  # fmt: skip
    ax.set_xscale("symlog", linthresh=10)
    ax.set_yscale("symlog", linthresh=10)
    ticks = [-10, 0, 10, 100]
    ax.set_xticks(ticks, [f"{t:+d}%" for t in ticks])
    ax.set_yticks(ticks, [f"{t:+d}%" for t in ticks])
    ax.set(
        xlabel="true bias of SDs", ylabel="estimated bias of SDs",
        title="Estimated and true bias of 40 SDs in 8 runs",
    )  # fmt: skip
    ax.legend(fontsize=8)
    figure.savefig(FOLDER / "estimated-bias.png")  # vocabulary: ok


# -- batch size: predicted steps and time of a draw, for a model with 200 groups --


def counts(x, store, exposure, num_stores, sales=None, batch_size=None):
    """The model of docs/batch-size.md."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("stores", num_stores):
        effect = numpyro.sample("effect", dist.Normal(0, sd))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        log_rate = jnp.log(exposure[i]) + intercept + slope * x[i] + effect[store[i]]
        numpyro.sample("sales", dist.Poisson(jnp.exp(log_rate)), obs=sales[i])


def draw_batch_size() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    num_rows, num_stores = 50_000, 200
    x = jax.random.normal(keys[0], (num_rows,))
    store = jax.random.randint(keys[1], (num_rows,), 0, num_stores)
    exposure = jax.random.uniform(keys[2], (num_rows,), minval=0.5, maxval=2.0)
    effects = 0.5 * jax.random.normal(keys[3], (num_stores,))
    rate = exposure * jnp.exp(-0.5 + 0.3 * x + effects[store])
    sales = jax.random.poisson(keys[4], rate)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for gradient_estimator, colour, label in (
        ("auto", BLUE, "second-order control variate (chosen)"),
        ("control_variate", ORANGE, "control variate"),
    ):
        kernel = SGHMCSplit(counts, gradient_estimator=gradient_estimator)
        suggestion = suggest_subsample_size(
            kernel, x, store, exposure, num_stores, sales, batch_size=200
        )
        (sizes,) = suggestion.subsample_sizes.values()
        milliseconds = 1e3 * np.array(suggestion.seconds_per_draw)
        line = {"color": colour, "marker": "o", "markersize": 3}
        left.plot(sizes, suggestion.steps_per_draw, label=label, **line)
        right.plot(sizes, milliseconds, **line)
        best = suggestion.best_index
        right.plot(sizes[best], milliseconds[best], "o", color=colour, markersize=9, mfc="none")
    log = {"xscale": "log", "yscale": "log", "xlabel": "batch size (rows)"}
    left.set(**log, ylabel="gradient steps per draw", title="Steps per draw")
    right.set(**log, ylabel="ms per effective draw, 4 chains", title="Time per effective draw")
    left.legend(fontsize=8)
    figure.savefig(FOLDER / "batch-size.png")


# -- benchmarks: seconds until means and SDs are accurate, by the number of rows --


def read_rows(title: str) -> list[list[str]]:
    """Return the rows of a stored table, of the newest Python that has it."""
    files = sorted((FOLDER.parents[1] / "benchmarks" / "results").glob("*.json"))
    *_, table = (t for file in files for t in json.loads(file.read_text()) if t["title"] == title)
    return table["rows"]


def draw_time_to_accuracy() -> None:
    (_, *methods), *rows = read_rows("CPU seconds to the accuracy")
    by_rows = {}
    for problem, *cells in rows:
        if match := re.fullmatch(r"logistic, ([\d,]+) rows", problem):
            by_rows[int(match[1].replace(",", ""))] = cells
    figure, axes = plt.subplots(figsize=(5.6, 3.6))
    for k, method in enumerate(methods):
        reached = {n: float(cells[k]) for n, cells in by_rows.items() if re.match(r"\d", cells[k])}
        if reached:
            is_ours = method == "SGHMCSplit"
            style = {"linewidth": 2.5, "zorder": 3} if is_ours else {"linewidth": 1.2}
            axes.plot(
                *zip(*reached.items(), strict=True), "o-", markersize=4, label=method, **style
            )
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="CPU seconds")
    axes.set_yticks([5, 10, 20, 50], ["5", "10", "20", "50"])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("Logistic regression: time to accurate means and SDs")
    figure.legend(fontsize=8, loc="outside right center")
    figure.savefig(FOLDER / "time-to-accuracy.png")


# -- benchmarks: CPU time per effective draw, by the numbers of groups and of rows --


def draw_growth() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), sharey=True, layout="constrained")
    for panel, by in zip(axes, ("groups", "rows"), strict=True):
        head, *rows = read_rows(f"Growth with the number of {by}, minibatches of 5,000")
        x, y = (
            np.array([float(row[head.index(name)].replace(",", "")) for row in rows])
            for name in (by, "CPU ms per effective draw")
        )
        slope = np.polyfit(np.log(x[-3:]), np.log(y[-3:]), 1)[0]
        panel.plot(x, y, "o-", color=BLUE, markersize=4)
        panel.set(xscale="log", yscale="log", xlabel=f"number of {by}")
        panel.set_title(f"slope of the last three points: {slope:.2f}", fontsize=9)
    axes[0].set_ylabel("CPU ms per effective draw")
    figure.savefig(FOLDER / "growth.png")


if __name__ == "__main__":
    with plt.style.context(FOLDER / "style.mplstyle"):
        draw_front()
        draw_splitting()
        draw_control_variates()
        draw_runs()
        draw_batch_size()
        draw_time_to_accuracy()
        draw_growth()
