"""Local latent variables, compared with NUTS on the model with these variables integrated out.

``python benchmarks/local_latents.py`` runs ``SGHMCSplit`` with no arguments on models with one
latent value per row, and NUTS with a dense mass matrix on the integrated models. Both draw 1,000
times in each of four chains, each in a separate process. NUTS is the reference: *means off* and
*SDs off* are the largest error of a mean of a global variable in posterior SDs, and the errors of
SDs, both in unconstrained space. They contain the Monte Carlo errors of both methods. *ESS* is the
smallest of a global variable. CPU seconds include compilation.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit, bias_report

_COLUMNS = {
    "model": 34,
    "rows": 7,
    "steps": 6,
    "CPU s": 6,
    "CPU s of NUTS": 14,
    "ESS": 6,
    "ESS of NUTS": 12,
    "R-hat": 6,
    "means off": 10,
    "SDs off": 13,
    "report": 13,
}


class Problem(NamedTuple):
    """A model with local latent values, the same model without them, and the data."""

    model: Callable[..., None]
    integrated: Callable[..., None]
    build: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    batch_size: int
    num_rows: int


def _normal(y: Any, batch_size: int | None = None) -> None:
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(z, 0.8), obs=y[i])


def _integrated_normal(y: Any) -> None:
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfNormal(2))
    numpyro.sample("y", dist.Normal(mu, jnp.hypot(tau, 0.8)), obs=y)


def _build_normal(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return ((1.0 + rng.normal(size=10_000) + 0.8 * rng.normal(size=10_000)).astype(np.float32),)


def _rare(x: Any, y: Any, batch_size: int | None = None) -> None:
    a, b = (numpyro.sample(name, dist.Normal(0, 5)) for name in "ab")
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(0, tau))
        numpyro.sample("y", dist.Normal(a + b * x[i] + z, 0.5), obs=y[i])


def _integrated_rare(x: Any, y: Any) -> None:
    a, b = (numpyro.sample(name, dist.Normal(0, 5)) for name in "ab")
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    numpyro.sample("y", dist.Normal(a + b * x, jnp.hypot(tau, 0.5)), obs=y)


def _build_rare(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = np.zeros(10_000)
    x[rng.choice(10_000, 10, replace=False)] = 1.0
    y = 1.0 + 2.0 * x + rng.normal(size=10_000) + 0.5 * rng.normal(size=10_000)
    return x.astype(np.float32), y.astype(np.float32)


def _sample_beta() -> tuple[Any, Any]:
    mean = numpyro.sample("mean", dist.Beta(1, 1))
    size = numpyro.sample("size", dist.HalfNormal(50))
    return mean * size, (1 - mean) * size


def _shares(trials: Any, y: Any, batch_size: int | None = None) -> None:
    a, b = _sample_beta()
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        share = numpyro.sample("share", dist.Beta(a, b))
        numpyro.sample("y", dist.Binomial(trials[i], share), obs=y[i])


def _integrated_shares(trials: Any, y: Any) -> None:
    numpyro.sample("y", dist.BetaBinomial(*_sample_beta(), total_count=trials), obs=y)


def _build_shares(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    trials = rng.integers(5, 60, 5_000)
    return trials, rng.binomial(trials, rng.beta(3.0, 7.0, 5_000))


def _sample_gamma(x: Any) -> tuple[Any, Any]:
    a, b = (numpyro.sample(name, dist.Normal(0, 2)) for name in "ab")
    shape = numpyro.sample("shape", dist.HalfNormal(5))
    return shape, shape * jnp.exp(-a - b * x)


def _rates(x: Any, y: Any, batch_size: int | None = None) -> None:
    shape, inverse_scale = _sample_gamma(x)
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        rate = numpyro.sample("rate", dist.Gamma(shape, inverse_scale[i]))
        numpyro.sample("y", dist.Poisson(rate), obs=y[i])


def _integrated_rates(x: Any, y: Any) -> None:
    numpyro.sample("y", dist.GammaPoisson(*_sample_gamma(x)), obs=y)


def _build_rates(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = rng.normal(size=5_000)
    mean = np.exp(1.0 + 0.3 * x)
    y = rng.poisson(rng.gamma(2.0, mean / 2.0))
    return x.astype(np.float32), y.astype(np.float32)


PROBLEMS = {
    "normal": Problem(_normal, _integrated_normal, _build_normal, 100, 10_000),
    "normal, a column with 10 ones": Problem(_rare, _integrated_rare, _build_rare, 100, 10_000),
    "binomial, beta shares": Problem(_shares, _integrated_shares, _build_shares, 100, 5_000),
    "Poisson, gamma rates": Problem(_rates, _integrated_rates, _build_rates, 100, 5_000),
}


class Outcome(NamedTuple):
    """Unconstrained draws of the global variables, CPU seconds, and diagnostics."""

    draws: dict[str, np.ndarray]
    cpu_seconds: float
    num_steps: int
    r_hat: float
    diagnoses: str


def run(name: str, method: str) -> Outcome:
    problem = PROBLEMS[name]
    data = tuple(map(jnp.asarray, problem.build(np.random.default_rng(0))))
    is_nuts = method == "NUTS"
    kernel: Any = (
        NUTS(problem.integrated, dense_mass=True) if is_nuts else SGHMCSplit(problem.model)
    )
    settings: dict[str, Any] = {} if is_nuts else {"batch_size": problem.batch_size}
    mcmc = MCMC(
        kernel,
        num_warmup=500 if is_nuts else 200,
        num_samples=1000,
        num_chains=4,
        chain_method="sequential" if is_nuts else "vectorized",
        progress_bar=False,
    )
    start = time.process_time()
    mcmc.run(jax.random.key(0), *data, **settings)
    samples = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    cpu_seconds = time.process_time() - start
    with numpyro.handlers.seed(rng_seed=0):
        trace = numpyro.handlers.trace(problem.integrated).get_trace(*data)
    draws = {}
    for site, values in samples.items():
        if site in trace and trace[site]["type"] == "sample":
            to_constrained = dist.biject_to(trace[site]["fn"].support)
            draws[site] = np.asarray(to_constrained.inv(values), np.float64)
    r_hat = max(np.max(split_gelman_rubin(x)) for x in draws.values())
    report = [] if is_nuts else [x for x in bias_report(mcmc).sites if x.site in draws]
    diagnoses = ", ".join(sorted({str(x.diagnosis) for x in report}))
    num_steps = 0 if is_nuts else int(np.max(mcmc.last_state.num_steps))
    return Outcome(draws, cpu_seconds, num_steps, float(r_hat), diagnoses)


def compare(name: str, ours: Outcome, nuts: Outcome) -> None:
    """Print one row of the table."""
    mean_errors, sd_errors, ess, nuts_ess = [], [], [], []
    for site, reference in nuts.draws.items():
        draws, axes = ours.draws[site], (0, 1)
        sd = reference.std(axes)
        mean_errors.append(np.max(np.abs(draws.mean(axes) - reference.mean(axes)) / sd))
        sd_errors.append(np.ravel(draws.std(axes) / sd - 1))
        ess.append(np.min(effective_sample_size(draws)))
        nuts_ess.append(np.min(effective_sample_size(reference)))
    sd_error = np.concatenate(sd_errors)
    cells = {
        "model": name,
        "rows": f"{PROBLEMS[name].num_rows:,}",
        "steps": ours.num_steps,
        "CPU s": f"{ours.cpu_seconds:.0f}",
        "CPU s of NUTS": f"{nuts.cpu_seconds:.0f}",
        "ESS": f"{min(ess):,.0f}",
        "ESS of NUTS": f"{min(nuts_ess):,.0f}",
        "R-hat": f"{ours.r_hat:.3f}",
        "means off": f"{max(mean_errors):.2f}",
        "SDs off": f"{100 * sd_error.min():+.0f} to {100 * sd_error.max():+.0f}%",
        "report": ours.diagnoses,
    }
    print_row([cells[c] for c in _COLUMNS], _COLUMNS.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--child", nargs=3, metavar=("PROBLEM", "METHOD", "FILE"))
    options = parser.parse_args()
    if options.child:
        name, method, file = options.child
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There are not enough devices")
            Path(file).write_bytes(pickle.dumps(run(name, method)))
        return
    print_header("Local latent variables")
    print_row(_COLUMNS, _COLUMNS.values())
    with tempfile.TemporaryDirectory() as folder:
        for name in options.problems:
            outcomes = []
            for method in ("SGHMCSplit", "NUTS"):
                file = str(Path(folder, method))
                command = [sys.executable, __file__, "--child", name, method, file]
                subprocess.run(command, check=True)
                outcomes.append(pickle.loads(Path(file).read_bytes()))
            compare(name, *outcomes)


if __name__ == "__main__":
    main()
