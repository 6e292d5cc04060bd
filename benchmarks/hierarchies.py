"""Hierarchies of thousands of groups, compared with exact posteriors.

``python benchmarks/hierarchies.py`` runs ``SGHMCSplit`` with no arguments but the minibatch size on
regressions whose coefficients vary over groups. Groups have sizes of a power law. Each case runs in
a separate process.

The reference integrates the coefficients out, in float64: exactly for Gaussian rows, whose
coefficients are normal given the shared parameters, and by Gauss-Hermite quadrature at the mode of
each group for other rows. What is left is the marginal density of the shared parameters, which is
approximated by a normal at its mode; draws of that normal are weighted with the density, and
Pareto's k of the weights is shown.

*means off* and *SDs off* are the largest error of a mean of a shared parameter in posterior SDs,
and the errors of SDs, scales as logarithms. *effects* are the root mean square of the errors of
means of 1,000 groups' coefficients, and 95% of the errors of their SDs. *report* has the worst
diagnosis of a shared parameter, and that of the coefficients.

``--growth`` prints CPU seconds of the warm-up and CPU milliseconds per effective draw against the
numbers of groups and rows, with the slopes of their logarithms. Compilation is part of the warm-up.
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
from collections.abc import Callable
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
from timing import print_header, print_row, use_empty_compilation_cache

from numpyro_sgmcmc import SGHMCSplit, bias_report, running_moments
from numpyro_sgmcmc.diagnostics import Diagnosis

_NUM_COMPARED_GROUPS = 1_000  # whose coefficients are compared with the reference
_NUM_REFERENCE_DRAWS = 400  # of the normal at the mode
# Nodes of the quadrature in each coefficient, and with fewer rows per group than so many.
_NUM_NODES, _NUM_NODES_FEW_ROWS, _FEW_ROWS_PER_GROUP = 7, 15, 50
_COLUMNS = {
    "case": 34,
    "B": 7,
    "steps": 6,
    "wall s": 7,
    "CPU s": 7,
    "GB": 6,
    "ESS": 6,
    "R-hat": 7,
    "means off": 10,
    "SDs off": 14,
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
    "gaussian, 1,000 x 2": Case("gaussian", 1_000, 2, 200_000, 2_000, 360),
    "logistic, 1,000 x 2": Case("logistic", 1_000, 2, 200_000, 2_000, 360),
    "poisson, 1,000 x 2": Case("poisson", 1_000, 2, 200_000, 2_000, 360),
    "gaussian, 10,000 x 2": Case("gaussian", 10_000, 2, 1_000_000, 20_000),
    "logistic, 10,000 x 2": Case("logistic", 10_000, 2, 1_000_000, 20_000),
    "gaussian, 10,000 x 2, few rows": Case("gaussian", 10_000, 2, 100_000, 4_000),
    "logistic, 10,000 x 2, few rows": Case("logistic", 10_000, 2, 100_000, 4_000),
    "gaussian, 100,000 x 2": Case("gaussian", 100_000, 2, 1_000_000, 5_000),
    "logistic, 100,000 x 2": Case("logistic", 100_000, 2, 1_000_000, 5_000),
    "gaussian, 20,000 x 20": Case("gaussian", 20_000, 20, 200_000, 4_000),
    "gaussian, 100,000 x 20": Case("gaussian", 100_000, 20, 1_000_000, 10_000, 270),
}
_LONG_CASES = {"gaussian, 20,000 x 20", "gaussian, 100,000 x 20"}  # a quarter of an hour and more
_MAX_COLLECTED_EFFECTS = 300_000  # whose draws are kept; more have running moments

_GROWTH = {
    "groups": [
        Case("gaussian", groups, 2, 100 * groups, 5_000, 150)
        for groups in (300, 1_000, 3_000, 10_000, 30_000)
    ],
    "rows": [
        Case("gaussian", 1_000, 2, num_rows, 5_000, 150)
        for num_rows in (100_000, 300_000, 1_000_000)
    ],
}
_GROWTH_COLUMNS = {
    "groups": 8,
    "rows": 10,
    "warm-up CPU s": 14,
    "CPU ms a draw": 14,
    "ESS a draw": 11,
    "CPU ms per effective draw": 26,
    "steps": 6,
}


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

    shared_mean: np.ndarray  # mean, log scale and, of Gaussian rows, log sigma
    shared_sd: np.ndarray
    effect_mean: np.ndarray  # of the compared groups by their order, shape `(groups, k)`
    effect_sd: np.ndarray
    pareto_k: float


class Marginal(NamedTuple):
    """Density of the shared parameters, with the coefficients of each group integrated out.

    - **summarise** - from the shared parameters to statistics of the rows of each group.
    - **compute_log_likelihood** - of the shared parameters and these statistics.
    - **condition** - means and variances of the coefficients, from the same.
    """

    summarise: Callable[[Array], Any]
    compute_log_likelihood: Callable[[Array, Any], Array]
    condition: Callable[[Array, Any], tuple[Array, Array]]


def integrate_gaussian(case: Case) -> Marginal:
    """Return the exact marginal density of Gaussian rows."""
    group, x, y = make_data(case)
    k = case.num_effects
    x, y = x.astype(float), y.astype(float)
    gram = np.empty((case.num_groups, k, k))
    linear = np.empty((case.num_groups, k))
    for i in range(k):
        linear[:, i] = np.bincount(group, x[:, i] * y, case.num_groups)
        for j in range(k):
            gram[:, i, j] = np.bincount(group, x[:, i] * x[:, j], case.num_groups)
    statistics, sum_of_squares = (jnp.asarray(gram), jnp.asarray(linear)), float(y @ y)

    def factor(shared: Array, gram: Array, linear: Array) -> tuple[Array, Array]:
        """Return Cholesky factors of the precisions, and their half-solved right-hand sides."""
        mean, scale, sigma = shared[:k], jnp.exp(shared[k : 2 * k]), jnp.exp(shared[-1])
        cholesky = jnp.linalg.cholesky(gram / sigma**2 + jnp.diag(scale**-2.0))
        right = linear / sigma**2 + mean / scale**2
        half_solved = jax.scipy.linalg.solve_triangular(cholesky, right[..., None], lower=True)
        return cholesky, half_solved[..., 0]

    def compute_log_likelihood(shared: Array, statistics: Any) -> Array:
        mean, log_scale, sigma = shared[:k], shared[k : 2 * k], jnp.exp(shared[-1])
        cholesky, half_solved = factor(shared, *statistics)
        log_det = jnp.log(jnp.diagonal(cholesky, axis1=1, axis2=2)).sum()
        of_means = log_scale.sum() + ((mean / jnp.exp(log_scale)) ** 2).sum() / 2.0
        of_rows = -case.num_rows * shared[-1] - sum_of_squares / sigma**2 / 2.0
        return of_rows + (half_solved**2).sum() / 2.0 - log_det - case.num_groups * of_means

    def condition(shared: Array, statistics: Any) -> tuple[Array, Array]:
        cholesky, half_solved = factor(shared, *statistics)
        inverse = jnp.linalg.inv(cholesky)
        return jnp.einsum("gba,gb->ga", inverse, half_solved), (inverse**2).sum(1)

    return Marginal(lambda shared: statistics, compute_log_likelihood, condition)


def integrate_by_quadrature(case: Case) -> Marginal:
    """Return the marginal density of logistic or Poisson rows.

    Gauss-Hermite quadrature at the mode of each group's coefficients, with
    7 or 15 nodes in each coefficient. Nodes stay where they are while the shared parameters vary
    within their posterior, so that the rows are read once.
    """
    group, x, y = make_data(case)
    order = np.argsort(group, kind="stable")
    group, x, y = jnp.asarray(group[order]), jnp.asarray(x[order], float), jnp.asarray(y[order])
    k = case.num_effects
    normalizer = jax.nn.softplus if case.likelihood == "logistic" else jnp.exp
    derivative = jax.vmap(jax.grad(normalizer))
    second_derivative = jax.vmap(jax.grad(jax.grad(normalizer)))
    has_few_rows = case.num_rows < _FEW_ROWS_PER_GROUP * case.num_groups
    num_nodes = _NUM_NODES_FEW_ROWS if has_few_rows else _NUM_NODES
    points, weights = np.polynomial.hermite.hermgauss(num_nodes)
    points = np.stack(np.meshgrid(*[points] * k), -1).reshape(-1, k)
    log_weights = np.log(np.stack(np.meshgrid(*[weights] * k), -1)).sum(-1).ravel()
    log_weights += (points**2).sum(-1)

    def sum_by_group(values: Array) -> Array:
        return jax.ops.segment_sum(values, group, case.num_groups, indices_are_sorted=True)

    def eta(effect: Array) -> Array:
        return (x * effect[group]).sum(-1)

    @jax.jit
    def summarise(shared: Array) -> tuple[Array, Array]:
        """Return nodes ``(groups, nodes, k)`` and the logarithms of likelihood and weight."""
        mean, scale = shared[:k], jnp.exp(shared[k:])

        def derivatives(effect: Array) -> tuple[Array, Array]:
            at = eta(effect)
            gradient = sum_by_group((y - derivative(at))[:, None] * x)
            outer = x[:, :, None] * x[:, None]
            precision = sum_by_group(second_derivative(at)[:, None, None] * outer)
            return gradient - (effect - mean) / scale**2, precision + jnp.diag(scale**-2.0)

        def update(_: int, effect: Array) -> Array:  # Newton's method
            gradient, precision = derivatives(effect)
            return effect + jnp.linalg.solve(precision, gradient[..., None])[..., 0]

        effect = jax.lax.fori_loop(0, 12, update, jnp.tile(mean, (case.num_groups, 1)))
        cholesky = jnp.linalg.cholesky(jnp.linalg.inv(derivatives(effect)[1]))
        nodes = effect[:, None] + jnp.einsum("gab,nb->gna", cholesky, 2**0.5 * points)
        log_likelihood = jax.lax.map(
            lambda at: sum_by_group(y * eta(at) - normalizer(eta(at))), nodes.swapaxes(0, 1)
        )
        log_det = jnp.log(jnp.diagonal(cholesky, axis1=1, axis2=2)).sum(-1, keepdims=True)
        return nodes, log_likelihood.T + log_weights + log_det

    def compute_log_density(shared: Array, nodes: Array, log_likelihood: Array) -> Array:
        standardised = (nodes - shared[:k]) / jnp.exp(shared[k:])
        return log_likelihood - (standardised**2).sum(-1) / 2.0 - shared[k:].sum()

    def condition(shared: Array, statistics: Any) -> tuple[Array, Array]:
        weights = jax.nn.softmax(compute_log_density(shared, *statistics))
        mean = jnp.einsum("gn,gna->ga", weights, statistics[0])
        return mean, jnp.einsum("gn,gna->ga", weights, (statistics[0] - mean[:, None]) ** 2)

    def compute_log_likelihood(shared: Array, statistics: Any) -> Array:
        return jax.nn.logsumexp(compute_log_density(shared, *statistics), axis=-1).sum()

    return Marginal(summarise, compute_log_likelihood, condition)


def compute_reference(case: Case, compared: np.ndarray) -> Reference:
    """Return means and SDs of the exact posterior; needs float64.

    :param compared: groups whose coefficients are wanted.
    """
    k = case.num_effects
    is_gaussian = case.likelihood == "gaussian"
    marginal = (integrate_gaussian if is_gaussian else integrate_by_quadrature)(case)

    @jax.jit
    def potential(shared: Array, statistics: Any) -> Array:
        log_prior = -(shared[:k] ** 2).sum() / 8.0 - (jnp.exp(shared[k : 2 * k]) ** 2).sum() / 2.0
        if is_gaussian:
            log_prior -= jnp.exp(shared[-1]) ** 2 / 18.0
        log_likelihood = marginal.compute_log_likelihood(shared, statistics)
        return -(log_likelihood + log_prior + shared[k:].sum())

    value_and_gradient = jax.jit(jax.value_and_grad(potential))

    def evaluate(shared: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = value_and_gradient(shared, statistics)
        return float(value), np.asarray(gradient)

    shared = np.concatenate([np.zeros(k), np.full(k, -1.0), [0.0] * is_gaussian])
    for _ in range(1 if is_gaussian else 3):  # the nodes depend on the shared parameters
        statistics = marginal.summarise(jnp.asarray(shared))
        shared = optimize.minimize(evaluate, shared, jac=True, method="BFGS", tol=1e-6).x
    step = 1e-4 * np.eye(len(shared))
    hessian = np.stack([evaluate(shared + e)[1] - evaluate(shared - e)[1] for e in step]) / 2e-4
    hessian = (hessian + hessian.T) / 2.0
    for _ in range(3):  # Newton's method
        shared = shared - np.linalg.solve(hessian, evaluate(shared)[1])
    covariance = np.linalg.inv(hessian)
    rng = np.random.default_rng(0)
    normals = rng.standard_normal((_NUM_REFERENCE_DRAWS, len(shared)))
    draws = shared + normals @ np.linalg.cholesky(covariance).T
    log_weights = np.array([-float(potential(d, statistics)) for d in draws])
    log_weights += (normals**2).sum(1) / 2.0
    weights = np.exp(log_weights - log_weights.max())
    largest = np.sort(weights)[-80:]
    pareto_k = float(stats.genpareto.fit(largest[1:] - largest[0], floc=0)[0])
    # The normal's moments, with the difference of weighted from unweighted draws.
    weights /= weights.sum()
    mean = shared + (weights @ draws - draws.mean(0))
    sd = np.sqrt(np.diag(covariance))
    sd *= np.sqrt(weights @ (draws - mean) ** 2) / draws.std(0)
    statistics = jax.tree.map(lambda values: values[compared], statistics)
    condition = jax.jit(marginal.condition)
    effects, variances = np.array([condition(d, statistics) for d in draws[::4]]).swapaxes(0, 1)
    variance = variances.mean(0) + effects.var(0)
    return Reference(mean, sd, effects.mean(0), np.sqrt(variance), pareto_k)


def run_reference(case: Case, compared: np.ndarray) -> Reference:
    """Return :func:`compute_reference` of a separate process, which computes in float64."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.npz"
        np.save(groups := Path(folder) / "groups.npy", compared)
        command = [sys.executable, __file__, "--reference", json.dumps(case)]
        subprocess.run([*command, str(groups), str(file)], check=True)
        found = np.load(file)
        return Reference(*(found[field] for field in Reference._fields))


def make_mcmc(case: Case, collect_sites: list[str] | None = None) -> MCMC:
    return MCMC(
        SGHMCSplit(partial(model, case.likelihood, case.num_groups), collect_sites=collect_sites),
        num_warmup=case.num_samples // 4,
        num_samples=case.num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )


def stack_shared(draws: dict[str, Any]) -> np.ndarray:
    """Return the shared parameters, scales as logarithms, of shape ``(chains, draws, d)``."""
    shared = [np.asarray(draws[n], float) for n in ("mean", "scale", "sigma") if n in draws]
    shared = [z.reshape(*z.shape[:2], -1) for z in shared]
    return np.concatenate([shared[0], *(np.log(s) for s in shared[1:])], -1)


def measure_growth(case: Case) -> dict[str, float]:
    """Return numbers of a row of the table of ``--growth``."""
    data = tuple(jnp.asarray(a) for a in make_data(case))
    mcmc, key = make_mcmc(case), jax.random.key(0)
    cache = use_empty_compilation_cache()
    seconds, blocks = [time.process_time()], []
    mcmc.warmup(key, *data, batch_size=case.batch_size)
    for _ in range(2):  # the first has the compilation
        mcmc.run(key, *data, batch_size=case.batch_size)
        blocks.append(stack_shared(jax.block_until_ready(mcmc.get_samples(group_by_chain=True))))
        mcmc.post_warmup_state, key = mcmc.last_state, mcmc.last_state.rng_key
        seconds.append(time.process_time())
    cache.cleanup()
    num_draws = 4 * case.num_samples
    ess = effective_sample_size(np.concatenate(blocks, 1)).min() / (2 * num_draws)
    of_draw = 1e3 * (seconds[2] - seconds[1]) / num_draws
    return {
        "groups": case.num_groups,
        "rows": case.num_rows,
        "warm-up CPU s": seconds[1] - seconds[0] - 1e-3 * num_draws * of_draw,
        "CPU ms a draw": of_draw,
        "ESS a draw": ess,
        "CPU ms per effective draw": of_draw / ess,
        "steps": int(np.max(np.asarray(mcmc.last_state.num_steps))),
    }


def print_growth() -> None:
    """Print a table for each sequence of sizes, and the slopes of logarithms."""
    for size, cases in _GROWTH.items():
        print_header(f"Growth with the number of {size}, minibatches of {cases[0].batch_size:,}")
        print_row(_GROWTH_COLUMNS, _GROWTH_COLUMNS.values())
        found = []
        for case in cases:
            found.append(row := run_in_process("--grow", case))
            cells = (f"{n:,}" if isinstance(n, int) else f"{n:.2f}" for n in row.values())
            print_row(cells, _GROWTH_COLUMNS.values())
        x = np.log([row[size] for row in found])
        for name in ("warm-up CPU s", "CPU ms per effective draw"):
            slope = np.polyfit(x, np.log([row[name] for row in found]), 1)[0]
            print(f"    slope of {name}: {slope:.2f}")


def run_in_process(option: str, case: Case) -> Any:
    """Return what a separate process finds."""
    command = [sys.executable, __file__, option, json.dumps(case)]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def run(case: Case) -> dict[str, Any]:
    """Run a case and return the cells of its row, and notes."""
    rng = np.random.default_rng(0)
    compared = np.sort(
        rng.choice(case.num_groups, min(_NUM_COMPARED_GROUPS, case.num_groups), False)
    )
    data = tuple(jnp.asarray(a) for a in make_data(case))
    has_draws = case.num_groups * case.num_effects <= _MAX_COLLECTED_EFFECTS
    mcmc = make_mcmc(case, None if has_draws else ["mean", "scale", "sigma"])
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
    z = stack_shared(draws)
    ess, r_hat = effective_sample_size(z), split_gelman_rubin(z)
    if has_draws:
        effects = np.asarray(draws["effect"][:, :, compared], float)
        effect_mean, effect_sd = effects.mean((0, 1)), effects.std((0, 1))
    else:
        moments = running_moments(mcmc)
        effect_mean, effect_sd = moments.mean["effect"][compared], moments.sd["effect"][compared]
    num_steps = int(np.max(np.asarray(mcmc.last_state.num_steps)))
    del mcmc, draws, data  # memory for the reference
    reference = run_reference(case, compared)
    off = (z.mean((0, 1)) - reference.shared_mean) / reference.shared_sd
    ratio = z.std((0, 1)) / reference.shared_sd - 1.0
    effects_off = (effect_mean - reference.effect_mean) / reference.effect_sd
    effects_ratio = effect_sd / reference.effect_sd - 1.0
    low, high = 100 * np.quantile(effects_ratio, (0.025, 0.975))
    of_shared = [s.diagnosis for s in report.sites if s.site != "effect"]
    (of_effects,) = (s.diagnosis for s in report.sites if s.site == "effect")
    cells = {
        "B": case.batch_size,
        "steps": num_steps,
        "wall s": f"{wall:.0f}",
        "CPU s": f"{cpu:.0f}",
        "GB": f"{gigabytes:.1f}",
        "ESS": f"{ess.min():.0f}",
        "R-hat": f"{r_hat.max():.3f}",
        "means off": f"{np.abs(off).max():.2f}",
        "SDs off": f"{100 * ratio.min():+.0f} to {100 * ratio.max():+.0f}%",
        "effects": f"{np.sqrt(np.mean(effects_off**2)):.2f}, {low:+.0f} to {high:+.0f}%",
        "report": f"{min(of_shared, key=list(Diagnosis).index)}, {of_effects}",
    }
    notes = [f"{w.category.__name__}: {str(w.message)[:100]}" for w in caught]
    notes.append(f"Pareto's k of the reference: {float(reference.pareto_k):.2f}")
    return {"cells": cells, "notes": notes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", default=None)
    parser.add_argument("--long", action="store_true", help="run the cases with 20 effects too")
    parser.add_argument("--num-samples", type=int, help="draws of each chain")
    parser.add_argument("--growth", action="store_true", help="cost against groups and rows")
    for option in ("--run", "--grow"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--reference", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference:
        jax.config.update("jax_enable_x64", True)
        case, groups, file = options.reference
        np.savez(file, **compute_reference(Case(*json.loads(case)), np.load(groups))._asdict())
        return
    for of_case, case in ((run, options.run), (measure_growth, options.grow)):
        if case:
            print(json.dumps(of_case(Case(*json.loads(case)))))
            return
    if options.growth:
        print_growth()
        return
    print_header("Hierarchies of thousands of groups")
    print_row(_COLUMNS, _COLUMNS.values())
    for name in options.cases or [c for c in CASES if options.long or c not in _LONG_CASES]:
        case = CASES[name]
        case = case._replace(num_samples=options.num_samples or case.num_samples)
        found = run_in_process("--run", case)
        found["cells"]["case"] = name
        print_row([found["cells"][c] for c in _COLUMNS], _COLUMNS.values())
        print("\n".join(f"    {note}" for note in found["notes"]), flush=True)


if __name__ == "__main__":
    main()
