"""Simulation-based calibration of the package.

Parameters are drawn from the prior and data given the parameters. Then the rank of each parameter
among the posterior draws is uniform if model, warm-up, minibatches and sampler are right.
``python benchmarks/calibration.py`` checks four models with minibatches and default options, and
prints a chi-squared test per parameter.

Ranks have little power against a bias of a fraction of an SD. ``--exact`` compares the runs of the
hierarchical model with its exact posterior instead, which is Gaussian given the scale.

Reference: Talts, Betancourt, Simpson, Vehtari and Gelman (2018), *Validating Bayesian inference
algorithms with simulation-based calibration*.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, Predictive
from numpyro.infer.reparam import LocScaleReparam
from scipy import stats
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics import Diagnosis

ROWS, BATCH, GROUPS = 2_000, 100, 10
CHAINS, KEPT = 4, 25  # draws kept of each chain: ranks from 0 to 100
BINS = 10
_FORGET_EVERY = 10
WIDTHS = (12, 14, 9, 9, 9)


class Problem(NamedTuple):
    """
    - **model** - takes the covariates and ``batch_size``; ``y`` is None to draw data.
    - **sites** - whose ranks are taken.
    """

    model: Callable
    sites: tuple[str, ...]


def logistic(x: Any, group: Any, y: Any = None, batch_size: int | None = None) -> None:
    """Five coefficients."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([5]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=None if y is None else y[i])


def linear(x: Any, group: Any, y: Any = None, batch_size: int | None = None) -> None:
    """Five coefficients and the scale of the noise."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([5]).to_event(1))
    scale = numpyro.sample("scale", dist.Gamma(3, 3))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ beta, scale), obs=None if y is None else y[i])


def groups(x: Any, group: Any, y: Any = None, batch_size: int | None = None) -> None:
    """Intercepts of ten groups, non-centred, with their mean and scale."""
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", GROUPS):
        level = numpyro.sample("level", dist.Normal(mean, spread))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(level[group[i]], 1), obs=None if y is None else y[i])


def counts(x: Any, group: Any, y: Any = None, batch_size: int | None = None) -> None:
    """Poisson counts with three coefficients and an intercept."""
    level = numpyro.sample("level", dist.Normal(0.5, 0.5))
    beta = numpyro.sample("beta", dist.Normal(0, 0.3).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        rate = jnp.exp(level + x[i, :3] @ beta)
        numpyro.sample("y", dist.Poisson(rate), obs=None if y is None else y[i])


Ranks = tuple[dict[str, np.ndarray], bool]
"""By site the ranks of its entries, and whether the report is ok."""

PROBLEMS = {
    "logistic": Problem(logistic, ("beta",)),
    "linear": Problem(linear, ("beta", "scale")),
    "groups": Problem(
        numpyro.handlers.reparam(groups, config={"level": LocScaleReparam(0)}),
        ("mean", "spread", "level"),
    ),
    "counts": Problem(counts, ("level", "beta")),
}


def covariates() -> tuple[Any, Any]:
    """Return the covariates and groups, the same for all data sets."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 5)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.integers(0, GROUPS, ROWS))


def sampler(model: Callable) -> MCMC:
    """Build a sampler with default options; all data sets share it, so that it is compiled once."""
    return MCMC(
        SGHMCSplit(partial(model, batch_size=BATCH)),
        num_warmup=300,
        num_samples=40 * KEPT,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )


def run_on_prior_draw(problem: Problem, mcmc: MCMC, seed: int) -> dict[str, Any]:
    """Run on data that are drawn given parameters of the prior; return these, and the data."""
    given = covariates()
    prior_key, run_key = jax.random.split(jax.random.key(seed))
    drawn: dict[str, Any] = Predictive(problem.model, num_samples=1)(prior_key, *given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mcmc.run(run_key, *given, drawn["y"][0])
    return drawn


def ranks_of(problem: Problem, mcmc: MCMC, seed: int) -> Ranks:
    """Return the ranks of the true parameters by site, and whether the report is ok."""
    drawn = run_on_prior_draw(problem, mcmc, seed)
    truth = {name: np.asarray(drawn[name][0]) for name in problem.sites}
    if seed % _FORGET_EVERY == 0:
        jax.clear_caches()  # compiled programs take mappings of memory, of which there are so many
    draws = mcmc.get_samples(group_by_chain=True)
    kept = {name: np.asarray(draws[name])[:, 39::40] for name in problem.sites}
    ranks = {name: (kept[name] < truth[name]).sum((0, 1)).ravel() for name in problem.sites}
    return ranks, bias_report(mcmc).is_ok


def exact_log_scale(group: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the exact posterior mean and SD of the log scale of :func:`groups`, on a grid."""
    rows = np.bincount(group, minlength=GROUPS).astype(float)
    sums = np.bincount(group, weights=y, minlength=GROUPS)
    log_scale = np.linspace(-8.0, 3.0, 2_000)
    log_density = np.empty_like(log_scale)
    # Given the scale, means of groups and population are Gaussian.
    precision, linear = np.eye(GROUPS + 1), np.append(sums, sums.sum())
    for k, scale in enumerate(np.exp(log_scale)):
        weights = np.append(np.full(GROUPS, scale), 1.0)
        precision[:GROUPS, :GROUPS] = np.diag(1.0 + rows * scale**2)
        precision[GROUPS, :GROUPS] = precision[:GROUPS, GROUPS] = rows * scale
        precision[GROUPS, GROUPS] = 1.0 + rows.sum()
        b = weights * linear
        log_det = np.linalg.slogdet(precision)[1]
        log_density[k] = (b @ np.linalg.solve(precision, b) - log_det - scale**2) / 2
    log_density += log_scale
    density = np.exp(log_density - log_density.max())
    mean = np.average(log_scale, weights=density)
    return float(mean), float(np.sqrt(np.average((log_scale - mean) ** 2, weights=density)))


def compare_with_exact(num_data_sets: int) -> None:
    """Print the bias of the log scale of each run of :func:`groups`, and the diagnoses."""
    given, mcmc, rows = covariates(), sampler(PROBLEMS["groups"].model), []
    print_row(("data set", "mean bias", "SD bias", "ESS", "diagnosis"), WIDTHS)
    for seed in range(num_data_sets):
        y = run_on_prior_draw(PROBLEMS["groups"], mcmc, seed)["y"][0]
        mean, sd = exact_log_scale(np.asarray(given[1]), np.asarray(y, float))
        z = (np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["spread"], float)) - mean) / sd
        rows.append((z.mean(), 100 * (z.std() - 1), float(effective_sample_size(z))))
        worst = min((s.diagnosis for s in bias_report(mcmc).sites), key=list(Diagnosis).index)
        bias = f"{rows[-1][0]:+.2f}", f"{rows[-1][1]:+.0f}%", f"{rows[-1][2]:.0f}"
        print_row((seed, *bias, worst), WIDTHS)
    mean_bias, sd_bias, _ = np.median(rows, axis=0)
    print(f"medians: mean bias {mean_bias:+.2f} SD, SD bias {sd_bias:+.0f}%")


def read_ranks(file: Path | None) -> dict[tuple[str, int], Ranks]:
    """Read the ranks of a file, by model and seed."""
    if file is None or not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines():
        name, seed, ranks, is_fine = json.loads(line)
        found[name, seed] = {site: np.array(r) for site, r in ranks.items()}, is_fine
    return found


def write_ranks(file: Path, name: str, seed: int, ranks: Ranks) -> None:
    """Append the ranks of a data set to the file."""
    of_sites = {site: r.tolist() for site, r in ranks[0].items()}
    with file.open("a") as out:
        out.write(json.dumps([name, seed, of_sites, bool(ranks[1])]) + "\n")


def p_value(ranks: np.ndarray) -> float:
    """Return the p-value of a chi-squared test for uniform ranks."""
    edges = np.linspace(-0.5, CHAINS * KEPT + 0.5, BINS + 1)
    return float(stats.chisquare(np.histogram(ranks, edges)[0]).pvalue)


def main() -> None:
    """Run and test."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data-sets", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--save", type=Path, help="file of finished data sets, added to")
    parser.add_argument(
        "--exact", action="store_true", help="compare the hierarchical model with its posterior"
    )
    arguments = parser.parse_args()
    if arguments.exact:
        print_header("Hierarchical model: runs against the exact posterior of the log scale")
        compare_with_exact(arguments.data_sets)
        return
    kept = read_ranks(arguments.save)
    print_header("Calibration: ranks of what made the data among the draws")
    print_row(("model", "parameter", "sets", "p", "ok"), WIDTHS)
    for name in arguments.only:
        start = time.perf_counter()
        mcmc = sampler(PROBLEMS[name].model)
        for seed in range(arguments.data_sets):
            if (name, seed) not in kept:
                kept[name, seed] = ranks_of(PROBLEMS[name], mcmc, seed)
                if arguments.save:
                    write_ranks(arguments.save, name, seed, kept[name, seed])
        runs = [kept[name, seed] for seed in range(arguments.data_sets)]
        fine = np.mean([is_fine for _, is_fine in runs])
        found = {s: np.stack([ranks[s] for ranks, _ in runs]) for s in PROBLEMS[name].sites}
        for site, ranks in found.items():
            for k, of_one in enumerate(ranks.T):
                p = f"{p_value(of_one):.3f}"
                print_row((name, f"{site}[{k}]", len(runs), p, f"{100 * fine:.0f}%"), WIDTHS)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
