"""Hierarchies of thousands of groups, compared with exact posteriors.

``python benchmarks/hierarchies.py`` runs ``SGHMCSplit`` with no arguments but the minibatch size on
regressions whose coefficients vary over groups. Groups have sizes of a power law. Each case runs in
a separate process.

Gaussian rows have an exact reference: given the shared parameters the coefficients of a group are
normal, so that they are integrated out by sums of each group in float64. What is left is the
marginal density of the shared parameters, which is approximated by a normal at its mode; draws of
that normal are weighted with the density, and Pareto's k of the weights is shown.

*mean* and *sd* are the largest error of a mean of a shared parameter in posterior SDs, and the
errors of SDs, scales as logarithms. *effects* are the root mean square of the errors of means of
1,000 groups' coefficients, and 95% of the errors of their SDs. *report* has the worst diagnosis of
a shared parameter, and that of the coefficients.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC
from scipy import optimize, stats
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit, bias_report, running_moments
from numpyro_sgmcmc.diagnostics import Diagnosis

_NUM_COMPARED_GROUPS = 1_000  # whose coefficients are compared with the reference
_NUM_REFERENCE_DRAWS = 400  # of the normal at the mode
_COLUMNS = {
    "case": 34,
    "B": 7,
    "steps": 6,
    "wall s": 7,
    "CPU s": 7,
    "GB": 6,
    "ESS": 6,
    "R-hat": 7,
    "mean": 7,
    "sd": 14,
    "effects": 22,
    "report": 18,
}


class Case(NamedTuple):
    """
    - **likelihood** - of the rows: gaussian, logistic or poisson.
    - **num_effects** - coefficients of a group, of which the first is the intercept.
    - **num_samples** - draws of each of four chains.
    """

    likelihood: str
    num_groups: int
    num_effects: int
    num_rows: int
    batch_size: int
    num_samples: int = 250


CASES = {
    "gaussian, 1,000 x 2": Case("gaussian", 1_000, 2, 200_000, 2_000),
    "logistic, 1,000 x 2": Case("logistic", 1_000, 2, 200_000, 2_000),
    "poisson, 1,000 x 2": Case("poisson", 1_000, 2, 200_000, 2_000),
    "gaussian, 10,000 x 2": Case("gaussian", 10_000, 2, 1_000_000, 20_000),
    "logistic, 10,000 x 2": Case("logistic", 10_000, 2, 1_000_000, 20_000),
    "gaussian, 10,000 x 2, few rows": Case("gaussian", 10_000, 2, 100_000, 4_000),
    "logistic, 10,000 x 2, few rows": Case("logistic", 10_000, 2, 100_000, 4_000),
    "gaussian, 100,000 x 2": Case("gaussian", 100_000, 2, 1_000_000, 20_000),
    "logistic, 100,000 x 2": Case("logistic", 100_000, 2, 1_000_000, 20_000),
    "gaussian, 20,000 x 20": Case("gaussian", 20_000, 20, 200_000, 40_000),
    "gaussian, 100,000 x 20": Case("gaussian", 100_000, 20, 1_000_000, 200_000),
}
_LONG_CASES = {"gaussian, 20,000 x 20", "gaussian, 100,000 x 20"}  # half an hour and hours
_MAX_COLLECTED_EFFECTS = 300_000  # whose draws are kept; more have running moments


def make_data(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return groups, covariates ``(N, k)`` and outcomes."""
    rng = np.random.default_rng(11)
    num_rows, num_groups, num_effects = case.num_rows, case.num_groups, case.num_effects
    weights = 1.0 / (np.arange(num_groups) + num_groups / 20.0)
    group = rng.choice(num_groups, num_rows, p=weights / weights.sum()).astype(np.int32)
    x = rng.standard_normal((num_rows, num_effects)).astype(np.float32)
    x[:, 0] = 1.0
    mean = 0.2 * rng.standard_normal(num_effects)
    scale = rng.uniform(0.2, 0.5, num_effects)
    effect = mean + scale * rng.standard_normal((num_groups, num_effects))
    eta = np.einsum("nk,nk->n", x, effect[group])
    if case.likelihood == "gaussian":
        y = eta + 1.2 * rng.standard_normal(num_rows)
    elif case.likelihood == "logistic":
        y = rng.random(num_rows) < 1.0 / (1.0 + np.exp(-eta))
    else:
        y = rng.poisson(np.exp(eta))
    return group, x, y.astype(np.float32)


def model(
    likelihood: str,
    num_groups: int,
    group: Any,
    x: Any,
    y: Any,
    batch_size: int | None = None,
) -> None:
    """Regression whose coefficients vary over groups."""
    num_effects = x.shape[1]
    mean = numpyro.sample("mean", dist.Normal(0, 2).expand([num_effects]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([num_effects]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(3)) if likelihood == "gaussian" else None
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(mean, scale).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        eta = (effect[group[i]] * x[i]).sum(-1)
        if likelihood == "gaussian":
            distribution = dist.Normal(eta, sigma)
        elif likelihood == "logistic":
            distribution = dist.Bernoulli(logits=eta)
        else:
            distribution = dist.Poisson(jnp.exp(eta))
        numpyro.sample("y", distribution, obs=y[i])


class Reference(NamedTuple):
    """Exact means and SDs; those of scales are of their logarithms."""

    shared_mean: np.ndarray  # mean, log scale and log sigma, shape `(2k + 1,)`
    shared_sd: np.ndarray
    effect_mean: np.ndarray  # of the first groups by their order, shape `(groups, k)`
    effect_sd: np.ndarray
    pareto_k: float


def compute_reference(case: Case, compared: np.ndarray) -> Reference:
    """Return the exact posterior of Gaussian rows; needs float64.

    :param compared: groups whose coefficients are wanted.
    """
    group, x, y = make_data(case)
    num_groups, k = case.num_groups, case.num_effects
    x, y = x.astype(float), y.astype(float)
    gram = np.empty((num_groups, k, k))
    linear = np.empty((num_groups, k))
    for i in range(k):
        linear[:, i] = np.bincount(group, x[:, i] * y, num_groups)
        for j in range(k):
            gram[:, i, j] = np.bincount(group, x[:, i] * x[:, j], num_groups)
    gram, linear, sum_of_squares = jnp.asarray(gram), jnp.asarray(linear), float(y @ y)

    def condition(shared: Array, gram: Array, linear: Array) -> tuple[Array, Array]:
        """Return Cholesky factors of the precisions of coefficients, and their means."""
        mean, scale, sigma = shared[:k], jnp.exp(shared[k : 2 * k]), jnp.exp(shared[-1])
        cholesky = jnp.linalg.cholesky(gram / sigma**2 + jnp.diag(scale**-2.0))
        right = linear / sigma**2 + mean / scale**2
        half_solved = jax.scipy.linalg.solve_triangular(cholesky, right[..., None], lower=True)
        return cholesky, half_solved

    def potential(shared: Array, gram: Array, linear: Array) -> Array:
        mean, scale, sigma = shared[:k], jnp.exp(shared[k : 2 * k]), jnp.exp(shared[-1])
        cholesky, half_solved = condition(shared, gram, linear)
        log_det = jnp.log(jnp.diagonal(cholesky, axis1=1, axis2=2)).sum()
        log_likelihood = -case.num_rows * shared[-1] - sum_of_squares / sigma**2 / 2.0
        log_likelihood += (half_solved**2).sum() / 2.0 - log_det
        log_likelihood -= num_groups * (shared[k : 2 * k].sum() + ((mean / scale) ** 2).sum() / 2.0)
        log_prior = -(mean**2).sum() / 8.0 - (scale**2).sum() / 2.0 - sigma**2 / 18.0
        return -(log_likelihood + log_prior + shared[k:].sum())

    value, value_and_gradient = jax.jit(potential), jax.jit(jax.value_and_grad(potential))

    def evaluate(shared: np.ndarray) -> tuple[float, np.ndarray]:
        found, gradient = value_and_gradient(shared, gram, linear)
        return float(found), np.asarray(gradient)

    shared = np.concatenate([np.zeros(k), np.full(k, -1.0), [0.0]])
    shared = optimize.minimize(evaluate, shared, jac=True, method="BFGS", tol=1e-6).x
    step = 1e-4 * np.eye(2 * k + 1)
    hessian = np.stack([evaluate(shared + e)[1] - evaluate(shared - e)[1] for e in step]) / 2e-4
    hessian = (hessian + hessian.T) / 2.0
    for _ in range(3):  # Newton's method
        shared = shared - np.linalg.solve(hessian, evaluate(shared)[1])
    covariance = np.linalg.inv(hessian)
    rng = np.random.default_rng(0)
    normals = rng.standard_normal((_NUM_REFERENCE_DRAWS, 2 * k + 1))
    draws = shared + normals @ np.linalg.cholesky(covariance).T
    log_weights = np.array([-float(value(d, gram, linear)) for d in draws])
    log_weights += (normals**2).sum(1) / 2.0
    weights = np.exp(log_weights - log_weights.max())
    largest = np.sort(weights)[-80:]
    pareto_k = float(stats.genpareto.fit(largest[1:] - largest[0], floc=0)[0])
    # The normal's moments, with the difference of weighted from unweighted draws.
    weights /= weights.sum()
    mean = shared + (weights @ draws - draws.mean(0))
    sd = np.sqrt(np.diag(covariance))
    sd *= np.sqrt(weights @ (draws - mean) ** 2) / draws.std(0)
    effects, variances = [], []
    for d in draws[::4]:
        cholesky, half_solved = condition(jnp.asarray(d), gram[compared], linear[compared])
        inverse = np.linalg.inv(np.asarray(cholesky))
        effects.append(np.einsum("gba,gb->ga", inverse, np.asarray(half_solved)[..., 0]))
        variances.append((inverse**2).sum(1))
    variance = np.mean(variances, 0) + np.var(effects, 0)
    return Reference(mean, sd, np.mean(effects, 0), np.sqrt(variance), pareto_k)


def run_reference(case: str, compared: np.ndarray) -> Reference:
    """Return :func:`compute_reference` of a separate process, which computes in float64."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.npz"
        np.save(groups := Path(folder) / "groups.npy", compared)
        command = [sys.executable, __file__, "--reference", case, str(groups), str(file)]
        subprocess.run(command, check=True)
        found = np.load(file)
        return Reference(*(found[field] for field in Reference._fields))


def run(name: str, num_samples: int | None) -> dict[str, Any]:
    """Run a case and return the cells of its row, and notes.

    :param num_samples: draws of each chain; None for those of the case.
    """
    case = CASES[name]
    case = case._replace(num_samples=num_samples or case.num_samples)
    rng = np.random.default_rng(0)
    compared = np.sort(
        rng.choice(case.num_groups, min(_NUM_COMPARED_GROUPS, case.num_groups), False)
    )
    data = tuple(jnp.asarray(a) for a in make_data(case))
    has_draws = case.num_groups * case.num_effects <= _MAX_COLLECTED_EFFECTS
    collect_sites = None if has_draws else ["mean", "scale", "sigma"]
    mcmc = MCMC(
        SGHMCSplit(partial(model, case.likelihood, case.num_groups), collect_sites=collect_sites),
        num_warmup=case.num_samples // 4,
        num_samples=case.num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(0), *data, batch_size=case.batch_size)
        draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
        report = bias_report(mcmc)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    on_device = jax.devices()[0].memory_stats() or {}  # none for a CPU
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gigabytes = on_device.get("peak_bytes_in_use", peak) / 1e9
    names = [n for n in ("mean", "scale", "sigma") if n in draws]
    shared = [np.asarray(draws[n], float) for n in names]
    shared = [z.reshape(*z.shape[:2], -1) for z in shared]
    z = np.concatenate([shared[0], *(np.log(s) for s in shared[1:])], -1)
    ess, r_hat = effective_sample_size(z), split_gelman_rubin(z)
    if has_draws:
        effects = np.asarray(draws["effect"][:, :, compared], float)
        effect_mean, effect_sd = effects.mean((0, 1)), effects.std((0, 1))
    else:
        moments = running_moments(mcmc)
        effect_mean, effect_sd = moments.mean["effect"][compared], moments.sd["effect"][compared]
    mean_cell, sd_cell, effects_cell = "", "", ""
    if case.likelihood == "gaussian":
        reference = run_reference(name, compared)
        off = (z.mean((0, 1)) - reference.shared_mean) / reference.shared_sd
        ratio = z.std((0, 1)) / reference.shared_sd - 1.0
        mean_cell = f"{np.abs(off).max():.2f}"
        sd_cell = f"{100 * ratio.min():+.0f} to {100 * ratio.max():+.0f}%"
        off = (effect_mean - reference.effect_mean) / reference.effect_sd
        ratio = effect_sd / reference.effect_sd - 1.0
        low, high = 100 * np.quantile(ratio, (0.025, 0.975))
        effects_cell = f"{np.sqrt(np.mean(off**2)):.2f}, {low:+.0f} to {high:+.0f}%"
    of_shared = [s.diagnosis for s in report.sites if s.site != "effect"]
    (of_effects,) = (s.diagnosis for s in report.sites if s.site == "effect")
    cells = {
        "case": name,
        "B": case.batch_size,
        "steps": int(np.max(np.asarray(mcmc.last_state.num_steps))),
        "wall s": f"{wall:.0f}",
        "CPU s": f"{cpu:.0f}",
        "GB": f"{gigabytes:.1f}",
        "ESS": f"{ess.min():.0f}",
        "R-hat": f"{r_hat.max():.3f}",
        "mean": mean_cell,
        "sd": sd_cell,
        "effects": effects_cell,
        "report": f"{min(of_shared, key=list(Diagnosis).index)}, {of_effects}",
    }
    notes = [f"{w.category.__name__}: {str(w.message)[:100]}" for w in caught]
    if case.likelihood == "gaussian":
        notes.append(f"Pareto's k of the reference: {float(reference.pareto_k):.2f}")
    return {"cells": cells, "notes": notes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", default=None)
    parser.add_argument("--long", action="store_true", help="run the cases with 20 effects too")
    parser.add_argument("--num-samples", type=int, help="draws of each chain")
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--reference", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference:
        jax.config.update("jax_enable_x64", True)
        case, groups, file = options.reference
        np.savez(file, **compute_reference(CASES[case], np.load(groups))._asdict())
        return
    if options.run:
        print(json.dumps(run(options.run, options.num_samples)))
        return
    print_header("Hierarchies of thousands of groups")
    print_row(_COLUMNS, _COLUMNS.values())
    for case in options.cases or [c for c in CASES if options.long or c not in _LONG_CASES]:
        command = [sys.executable, __file__, "--run", case]
        command += ["--num-samples", str(options.num_samples)] if options.num_samples else []
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        found = json.loads(out.stdout.splitlines()[-1])
        print_row([found["cells"][c] for c in _COLUMNS], _COLUMNS.values())
        print("\n".join(f"    {note}" for note in found["notes"]), flush=True)


if __name__ == "__main__":
    main()
