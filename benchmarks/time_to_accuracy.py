"""Time until means are within 0.1 SD and SDs within 10%, for this library and for other methods.

``python benchmarks/time_to_accuracy.py --problems logistic --rows 100000`` runs every method on the
problem and prints the wall and CPU seconds from the call until all means and SDs of unconstrained
coordinates are that close to the reference, compilation included. Each method runs in a separate
process. Samplers are looked at after each block of draws. Other methods get ten times (``--ratio``)
the CPU seconds of ``SGHMCSplit`` and at least a minute; one that does not reach the accuracy has
the errors of its best result. Without ``--rows`` the numbers of rows are those of the page.

``--cores 11`` runs eleven methods at a time, each on one core. ``--keep FILE`` appends each result
to a file as JSON and leaves out those that the file has; ``--seconds`` stops after a time.
``--tables FILE`` prints tables of such files, of the methods of ``--methods``. The page's table of
approximations has ``--methods minibatches pathfinder 10% --label ", approximations"``.

``SGHMCSplit`` has no arguments but the batch size. The others get settings in their favour:

- NUTS runs one chain with 500 iterations of warm-up, so that no chain repeats the adaptation.
- SVI runs Adam with a cosine schedule for each of three learning rates and numbers of steps from
  1,000 to 100,000, on all rows and on minibatches; only the quickest setting that reaches the
  accuracy is counted, without the search.
- HMCECS gets the posterior mean of the reference for its Taylor proxy.
- Laplace's approximation uses Newton's method with the Hessian of all rows.
- gpboost and statsmodels, if installed, fit the hierarchies as mixed models: maximum marginal
  likelihood with Laplace's approximation, REML, and mean-field variational inference.

Of hierarchies the errors of the shared parameters are printed besides.

``--reference`` stores references in ``accuracy_references/``: those of ``hierarchies.py`` for
hierarchies; the integral over the scales for crossed effects; importance sampling from Laplace's
approximation, or from NUTS with the quadratic approximation of the log likelihood at the mode,
where Pareto's k is below 0.5; else long runs of NUTS.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import results
from hierarchies import run_reference
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size
from numpyro.handlers import block
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.util import initialize_model, potential_energy
from rivals import MIXED_MODELS, hmcecs, unconstrained
from scalable_problems import SCALABLE_PROBLEMS, ScalableProblem
from timing import print_header, print_row, use_empty_compilation_cache

from numpyro_sgmcmc import SGHMCSplit

_FOLDER = Path(__file__).parent / "accuracy_references"
_MAX_MEAN_ERROR, _MAX_SD_ERROR = 0.1, 0.1  # posterior SDs; share of the SD
_MAX_DENSE = 2_000  # coordinates of a dense covariance matrix
_MAX_COORDINATES = 1_000  # compared, chosen at random, where there are more than _MAX_DENSE
_BLOCK = 250  # draws of a chain between two looks
_MAX_CPU_SECONDS = 1_000.0  # of SGHMCSplit, whose seconds are the budget of the others
_NUM_APPROXIMATE_DRAWS = 4_000
_MAX_PATHFINDER_ROWS = 4_000_000  # evaluated at once for its ELBO: a bound on memory
_LEARNING_RATES = (0.03, 0.01, 0.003)
_NUM_STEPS = (1_000, 3_000, 10_000, 30_000, 100_000)
_MIN_CPU_SECONDS = 60.0  # of the others
_MIN_SECONDS_LEFT = 30.0  # before the end of ``--seconds``, for another run to begin
_OURS = "SGHMCSplit"
_WIDTHS = (32, 31, 8, 8, 7, 9, 11, 28)  # of the columns of a row for each method

ROWS = {
    "logistic": (10_000, 100_000, 1_000_000),
    "Gaussian, 1,000 groups": (200_000,),
    "logistic, 1,000 groups": (200_000,),
    "Gaussian, 10,000 groups": (1_000_000,),
    "logistic, 10,000 groups": (1_000_000,),
    "flights": (327_346,),
}
"""Numbers of rows on the page; 100,000 for the other problems."""

# In the order in which they run, for what ends in time.
_METHODS = {
    "SGHMCSplit": ["SGHMCSplit"],
    "NUTS": ["NUTS", "NUTS, dense mass matrix"],
    "HMCECS": ["HMCECS"],
    "Laplace": ["Laplace"],
    "Laplace with weights": ["Laplace, importance sampling"],
    "minibatch SVI, mean-field": ["SVI, mean-field, minibatches"],
    "minibatch SVI, low-rank": ["SVI, low-rank, minibatches"],
    "minibatch SVI, dense": ["SVI, dense, minibatches"],
    "pathfinder": ["pathfinder"],
    "NUTS, 10%": ["NUTS, 10% of the rows"],
    "SVI, mean-field": ["SVI, mean-field, all rows"],
    "SVI, low-rank": ["SVI, low-rank, all rows"],
    "SVI, dense": ["SVI, dense, all rows"],
    "gpboost": ["gpboost"],
    "statsmodels": ["statsmodels"],
}
"""Columns of the table of all problems, each with its methods, of which the quickest counts."""


class Summary(NamedTuple):
    """Means and SDs of all unconstrained coordinates, in the order of the sites' names.

    An SD that a method does not estimate is NaN.
    """

    mean: np.ndarray
    sd: np.ndarray


def reference_file(name: str, num_rows: int) -> Path:
    return _FOLDER / f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{num_rows}.npz"


class Posterior:
    """A problem with its data, on all rows and on minibatches."""

    def __init__(self, name: str, num_rows: int) -> None:
        self.problem = SCALABLE_PROBLEMS[name]
        self.num_rows = num_rows
        self.model, self.args = self.problem.build(num_rows, np.random.default_rng(1))
        self.file = reference_file(name, num_rows)

    def sort(self, sites: dict[str, Any], axes: int = 0) -> np.ndarray:
        """Return unconstrained values as an array whose last axis is that of the coordinates."""
        parts = [np.asarray(sites[k], np.float64) for k in sorted(sites)]
        return np.concatenate([x.reshape(*x.shape[:axes], -1) for x in parts], -1)

    def summarise(self, draws: dict[str, Any]) -> Summary:
        """Return the summary of constrained draws, axes of chains and draws first."""
        x = self.sort(unconstrained(self.model, self.args, draws), axes=2)
        return Summary(x.mean((0, 1)), x.std((0, 1)))

    def make_flat(self) -> tuple[Callable, np.ndarray, Callable]:
        """Return the potential ``(position, arguments)``, an initial position, and its map."""
        found = initialize_model(
            random.key(0),
            self.model,
            init_strategy=init_to_median(num_samples=5),
            dynamic_args=True,
            model_args=self.args,
        )
        start, unravel = ravel_pytree(found.param_info.z)
        return lambda q, args: found.potential_fn(*args)(unravel(q)), np.asarray(start), unravel

    def subset(self, num_rows: int) -> tuple:
        """Return the arguments with the first rows only; rows are in random order."""
        return jax.tree.map(
            lambda x: x[:num_rows] if getattr(x, "shape", ())[:1] == (self.num_rows,) else x,
            self.args,
        )


def _blocks(posterior: Posterior, kernel: Any, args: tuple, **settings: Any) -> Iterator[Summary]:
    """Run a sampler and return the summary of all draws after each block."""
    batch_size = settings.pop("batch_size", None)
    mcmc = MCMC(kernel, num_samples=_BLOCK, progress_bar=False, **settings)
    key, blocks = random.key(0), []
    while True:
        mcmc.run(key, *args, batch_size=batch_size)
        blocks.append(jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True)))
        yield posterior.summarise(jax.tree.map(lambda *x: np.concatenate(x, 1), *blocks))
        mcmc.post_warmup_state = mcmc.last_state
        key = mcmc.last_state.rng_key


def run_sgmcmc(posterior: Posterior) -> Iterator[Summary]:
    yield from _blocks(
        posterior,
        SGHMCSplit(posterior.model),
        posterior.args,
        num_warmup=_BLOCK,
        num_chains=4,
        chain_method="vectorized",
        batch_size=posterior.problem.batch_size,
    )


def run_nuts(
    posterior: Posterior, dense_mass: bool = False, share: float = 1.0
) -> Iterator[Summary]:
    args = posterior.args if share == 1.0 else posterior.subset(int(share * posterior.num_rows))
    yield from _blocks(
        posterior, NUTS(posterior.model, dense_mass=dense_mass), args, num_warmup=500
    )


def run_hmcecs(posterior: Posterior) -> Iterator[Summary]:
    _, start, unravel = posterior.make_flat()
    mean = np.load(posterior.file)["mean"]
    sites = unravel(jnp.asarray(start))
    splits = np.cumsum([np.size(sites[k]) for k in sorted(sites)])[:-1]
    parts = np.split(mean, splits)
    point = {
        k: jnp.asarray(x.reshape(np.shape(sites[k])), jnp.float32)
        for k, x in zip(sorted(sites), parts, strict=True)
    }
    model = partial(posterior.model, batch_size=posterior.problem.batch_size)
    mcmc = hmcecs(model, posterior.args, point, _BLOCK)
    key, blocks = random.key(0), []
    while True:
        mcmc.run(key, *posterior.args)
        blocks.append(jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True)))
        yield posterior.summarise(jax.tree.map(lambda *x: np.concatenate(x, 1), *blocks))
        mcmc.post_warmup_state = mcmc.last_state
        key = mcmc.last_state.rng_key


def run_svi(
    posterior: Posterior, guide: Any, is_full: bool, learning_rate: float, num_steps: int
) -> Iterator[Summary]:
    autoguide = guide(posterior.model, init_loc_fn=init_to_median)
    schedule = optax.cosine_decay_schedule(learning_rate, num_steps)
    optimizer = numpyro.optim.optax_to_numpyro(optax.adam(schedule))
    svi = SVI(posterior.model, autoguide, optimizer, Trace_ELBO())
    batch_size = None if is_full else posterior.problem.batch_size
    found = svi.run(
        random.key(0), num_steps, *posterior.args, batch_size=batch_size, progress_bar=False
    )
    draws = autoguide.sample_posterior(
        random.key(1),
        found.params,
        *posterior.args,
        sample_shape=(1, _NUM_APPROXIMATE_DRAWS),
        batch_size=batch_size,
    )
    latent = {k: x for k, x in draws.items() if not k.startswith("_")}
    yield posterior.summarise(latent)


class Laplace(NamedTuple):
    """Laplace's approximation in flat unconstrained coordinates."""

    mode: np.ndarray
    covariance: np.ndarray
    value_fn: partial[Any]
    unravel: Callable

    @classmethod
    def fit(cls, posterior: Posterior) -> Laplace:
        """Minimise the potential on all rows by Newton's method with a line search."""
        potential_fn, q, unravel = posterior.make_flat()
        # Data as arguments: constants of this size are folded slowly by the compiler.
        arrays = jax.tree.map(jnp.asarray, posterior.args)
        gradient_fn = jax.grad(potential_fn)
        value = jax.jit(potential_fn)

        @jax.jit
        def evaluate(q: Any, arrays: Any) -> tuple[Any, Any]:
            def product(v: Any) -> Any:
                return jax.jvp(lambda q: gradient_fn(q, arrays), (q,), (v,))[1]

            return gradient_fn(q, arrays), jax.lax.map(product, jnp.eye(q.size), batch_size=8)

        for _ in range(60):
            gradient, hessian = (np.asarray(x, np.float64) for x in evaluate(q, arrays))
            values, axes = np.linalg.eigh((hessian + hessian.T) / 2.0)
            values = np.maximum(np.abs(values), 1e-6 * np.abs(values).max())
            step = axes @ ((axes.T @ gradient) / values)
            if gradient @ step < 1e-3:  # the step is below 0.03 SD
                break
            now, scale = float(value(q, arrays)), 1.0
            while scale > 1e-4 and not float(value(np.float32(q - scale * step), arrays)) < now:
                scale /= 2.0
            q = np.float32(q - scale * step)
        mode, covariance = np.asarray(q, np.float64) - step, (axes / values) @ axes.T
        return cls(mode, covariance, partial(potential_fn, args=arrays), unravel)

    def sample(self, num_draws: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return draws and the logarithms of their importance weights."""
        normals = np.random.default_rng(seed).standard_normal((num_draws, self.mode.size))
        draws = self.mode + normals @ np.linalg.cholesky(self.covariance).T
        return draws, 0.5 * (normals**2).sum(1) - self.evaluate(draws)

    def evaluate(self, draws: np.ndarray) -> np.ndarray:
        """Return the potential on all rows at each draw."""
        value_fn, arrays = self.value_fn.func, self.value_fn.keywords["args"]
        evaluate = jax.jit(lambda x, arrays: jax.lax.map(lambda q: value_fn(q, arrays), x))
        return np.asarray(evaluate(np.float32(draws), arrays), np.float64)

    def order(self, x: np.ndarray, posterior: Posterior) -> np.ndarray:
        """Return flat values of shape ``(n, d)`` in the order of :class:`Summary`."""
        sites = jax.vmap(self.unravel)(jnp.asarray(x, jnp.float32))
        return posterior.sort(sites, axes=1)


def run_laplace(posterior: Posterior, is_weighted: bool) -> Iterator[Summary]:
    laplace = Laplace.fit(posterior)
    if not is_weighted:
        sd = np.sqrt(np.diag(laplace.covariance))
        mean, sd = laplace.order(np.stack([laplace.mode, sd]), posterior)
        yield Summary(mean, sd)
        return
    draws, log_weights = laplace.sample(_NUM_APPROXIMATE_DRAWS)
    yield _weighted_summary(laplace.order(draws, posterior), log_weights)[0]


def _weighted_summary(x: np.ndarray, log_weights: np.ndarray) -> tuple[Summary, float, float]:
    """Return moments with Pareto-smoothed weights, Pareto's k, and the effective sample size."""
    try:
        from arviz import psislw

        smoothed, pareto_k = psislw(log_weights)
    except ImportError:  # from ArviZ 1.0 on, which takes the negative logarithms
        from arviz_stats.base import array_stats

        smoothed, pareto_k = array_stats.psislw(-log_weights)
    weights = np.exp(np.asarray(smoothed) - np.max(smoothed))
    weights /= weights.sum()
    mean = weights @ x
    summary = Summary(mean, np.sqrt(weights @ (x - mean) ** 2))
    return summary, float(pareto_k), float(1.0 / (weights**2).sum())


def run_pathfinder(posterior: Posterior) -> Iterator[Summary]:
    import blackjax

    potential_fn, start, unravel = posterior.make_flat()
    state, _ = blackjax.vi.pathfinder.approximate(
        random.key(0),
        lambda q: -potential_fn(q, posterior.args),
        jnp.asarray(start),
        num_samples=int(np.clip(_MAX_PATHFINDER_ROWS // posterior.num_rows, 10, 200)),
    )
    draws, _ = blackjax.vi.pathfinder.sample(random.key(1), state, _NUM_APPROXIMATE_DRAWS)
    x = posterior.sort(jax.vmap(unravel)(draws), axes=1)
    yield Summary(x.mean(0), x.std(0))


def run_mixed_model(posterior: Posterior, package: str) -> Iterator[Summary]:
    likelihood = posterior.problem.hierarchy.likelihood
    yield Summary(*MIXED_MODELS[package](likelihood, *map(np.asarray, posterior.args)))


_GUIDES = {
    "mean-field": AutoNormal,
    "low-rank": partial(AutoLowRankMultivariateNormal, rank=10),
    "dense": AutoMultivariateNormal,
}


def list_methods(problem: ScalableProblem, dim: int) -> dict[str, list[Callable]]:
    """Return for each method its settings, each a function that iterates over summaries."""
    methods: dict[str, list[Callable]] = {
        "SGHMCSplit": [run_sgmcmc],
        "NUTS": [run_nuts],
        "NUTS, 10% of the rows": [partial(run_nuts, share=0.1)],
    }
    if problem.is_dense:
        methods["NUTS, dense mass matrix"] = [partial(run_nuts, dense_mass=True)]
    for name, guide in _GUIDES.items():
        if name == "dense" and dim > _MAX_DENSE:
            continue
        for rows, is_full in (("minibatches", False), ("all rows", True)):
            methods[f"SVI, {name}, {rows}"] = [
                partial(run_svi, guide=guide, is_full=is_full, learning_rate=rate, num_steps=steps)
                for steps in _NUM_STEPS
                for rate in _LEARNING_RATES
            ]
    if dim <= _MAX_DENSE:
        methods["Laplace"] = [partial(run_laplace, is_weighted=False)]
        methods["Laplace, importance sampling"] = [partial(run_laplace, is_weighted=True)]
    if problem.hierarchy is not None:
        for package in MIXED_MODELS:
            methods[package] = [partial(run_mixed_model, package=package)]
    methods["pathfinder"] = [run_pathfinder]
    if dim <= 100:
        methods["HMCECS"] = [run_hmcecs]
    return methods


class Result(NamedTuple):
    """
    - **wall_seconds**, **cpu_seconds** - of the quickest setting that reaches the accuracy, or of
      the one with the smallest error.
    - **mean_error**, **sd_error** - largest errors, in posterior SDs and relative to the SD.
    - **shared_mean_error**, **shared_sd_error** - those of the shared parameters of a hierarchy.
    - **num_missing** - SDs that the method does not estimate.
    """

    wall_seconds: float
    cpu_seconds: float
    mean_error: float
    sd_error: float
    shared_mean_error: float
    shared_sd_error: float
    num_missing: int
    is_reached: bool


def run_method(posterior: Posterior, settings: list[Callable], budget: float) -> Iterator[Result]:
    """Run the settings of a method, until they have used the budget of CPU seconds.

    Yields each result that is better than the ones before it, so that it is known if the process is
    killed. A process with one setting ends a minute later, one with several at three times the
    budget.
    """
    limit = int((3.0 if len(settings) > 1 else 1.0) * budget) + 60
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    reference = np.load(posterior.file)
    chosen = np.arange(reference["mean"].size)
    if chosen.size > _MAX_DENSE:
        chosen = np.random.default_rng(0).choice(chosen, _MAX_COORDINATES, replace=False)
    num_shared = int(reference.get("num_shared", 0))  # they are last
    shared = np.arange(reference["mean"].size)[-num_shared:]
    chosen = np.union1d(chosen, shared) if num_shared else chosen
    best, num_steps_of_best, spent = None, None, 0.0
    for setting in settings:
        num_steps = getattr(setting, "keywords", {}).get("num_steps")
        if best is not None and best.is_reached and num_steps != num_steps_of_best:
            break
        wall, cpu, looking = time.perf_counter(), time.process_time(), np.zeros(2)
        for summary in setting(posterior):
            now = np.array([time.perf_counter() - wall, time.process_time() - cpu])
            seconds = now - looking
            errors = [
                np.abs(summary.mean - reference["mean"]) / reference["sd"],
                np.abs(summary.sd / reference["sd"] - 1.0),
            ]
            missing = np.isnan(summary.sd) & np.isfinite(summary.mean)
            errors[1][missing] = 0.0
            worst = [
                float(np.nan_to_num(e[at], nan=np.inf).max())
                for at in (chosen, shared)
                for e in errors
            ]
            is_reached = worst[0] <= _MAX_MEAN_ERROR and worst[1] <= _MAX_SD_ERROR
            found = Result(*map(float, seconds), *worst, int(missing.sum()), is_reached)
            if best is None or _rank(found) < _rank(best):
                best, num_steps_of_best = found, num_steps
                yield best
            if is_reached or seconds[1] > budget:
                break
            looking += [time.perf_counter() - wall, time.process_time() - cpu] - now
        spent += time.process_time() - cpu
        if spent > budget:
            break


def _rank(result: Result) -> tuple[bool, float]:
    error = max(result.mean_error / _MAX_MEAN_ERROR, result.sd_error / _MAX_SD_ERROR)
    return not result.is_reached, result.wall_seconds if result.is_reached else error


def _sample_quadratic(posterior: Posterior, laplace: Laplace) -> tuple[np.ndarray, np.ndarray]:
    """Return 4,000 draws of NUTS with the prior and a quadratic log likelihood, and log weights."""
    mode = jnp.asarray(laplace.mode, jnp.float32)
    prior = block(posterior.model, hide_fn=lambda site: site.get("is_observed", False))

    def prior_energy(q: Any) -> Any:
        return potential_energy(prior, posterior.args, {}, laplace.unravel(q))

    gradient, hessian = jax.grad(prior_energy)(mode), jax.jit(jax.hessian(prior_energy))(mode)
    precision = np.linalg.inv(laplace.covariance) - np.asarray(hessian, np.float64)

    def energy(q: Any) -> Any:
        step = q - mode
        return prior_energy(q) - gradient @ step + 0.5 * step @ jnp.float32(precision) @ step

    sd = np.sqrt(np.diag(laplace.covariance))
    start = laplace.mode + 0.1 * sd * np.random.default_rng(0).standard_normal((4, mode.size))
    mcmc = MCMC(
        NUTS(potential_fn=energy, dense_mass=True, target_accept_prob=0.9),
        num_warmup=1_500,
        num_samples=3_000,
        thinning=3,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(3), init_params=jnp.asarray(start, jnp.float32))
    draws = np.asarray(mcmc.get_samples())
    energies = np.asarray(jax.vmap(energy)(draws), np.float64)
    return draws, energies - laplace.evaluate(draws)


def make_reference(posterior: Posterior) -> str:
    """Store the reference of a posterior and return how it was found."""
    if (case := posterior.problem.hierarchy) is not None:
        case = case._replace(num_rows=posterior.num_rows)
        found = run_reference(case, np.arange(case.num_groups))
        summary = Summary(
            np.concatenate([found.effect_mean.ravel(), found.shared_mean]),
            np.concatenate([found.effect_sd.ravel(), found.shared_sd]),
        )
        note = f"effects integrated out, Pareto's k {found.pareto_k:.2f}"
        arrays = {name: np.float32(x) for name, x in summary._asdict().items()}
        np.savez(posterior.file, **arrays, num_shared=len(found.shared_mean), note=note)
        return note
    if posterior.problem.integrate is not None:
        note = "integral over the scales"
        mean, sd = posterior.problem.integrate(*posterior.args)
        np.savez(posterior.file, mean=mean, sd=sd, note=note)
        return note
    _, start, _ = posterior.make_flat()
    if start.size <= 100:
        laplace = Laplace.fit(posterior)
        for proposal, sample in (
            ("Laplace's approximation", lambda: laplace.sample(10_000)),
            ("a quadratic log likelihood", lambda: _sample_quadratic(posterior, laplace)),
        ):
            draws, log_weights = sample()
            summary, pareto_k, ess = _weighted_summary(laplace.order(draws, posterior), log_weights)
            note = f"importance sampling from {proposal}, Pareto's k {pareto_k:.2f}, ESS {ess:.0f}"
            if pareto_k < 0.5 and ess > 3_000:
                np.savez(posterior.file, **summary._asdict(), note=note)
                return note
    mcmc = MCMC(
        NUTS(posterior.model, dense_mass=posterior.problem.is_dense),
        num_warmup=500,
        num_samples=posterior.problem.num_nuts,
        num_chains=2,
        progress_bar=False,
        chain_method="parallel",
    )
    mcmc.run(random.key(7), *posterior.args)
    samples = mcmc.get_samples(group_by_chain=True)
    x = posterior.sort(unconstrained(posterior.model, posterior.args, samples), axes=2)
    ess = float(np.min(effective_sample_size(x)))
    note = f"NUTS, smallest ESS {ess:.0f}"
    np.savez(posterior.file, mean=x.mean((0, 1)), sd=x.std((0, 1)), note=note)
    return note


_NO_RESULT = Result(*6 * [float("inf")], num_missing=0, is_reached=False)  # within the budget


class Pair(NamedTuple):
    """A method and the posterior that it is run on."""

    problem: str
    num_rows: int
    method: str


Record = dict[str, Any]
"""What a run found: its pair, its :class:`Result` or None, and where it ran."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--problems", nargs="+", choices=SCALABLE_PROBLEMS, default=list(SCALABLE_PROBLEMS)
    )
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--methods", nargs="+", help="regular expressions of their names")
    parser.add_argument("--reference", action="store_true", help="store references")
    parser.add_argument("--cores", type=int, help="runs at a time, each on one core")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="wall seconds at most")
    parser.add_argument("--ratio", type=float, default=10.0, help="CPU seconds / SGHMCSplit's")
    parser.add_argument("--keep", type=Path, help="file of results")
    parser.add_argument("--tables", type=Path, nargs="+", help="files of results")
    parser.add_argument("--label", default="", help="end of the tables' titles")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None or options.reference:
        warnings.simplefilter("ignore")
    if options.run is not None:
        posterior = Posterior(options.problems[0], options.rows[0])
        dim = np.load(posterior.file)["mean"].size
        settings = list_methods(posterior.problem, dim)[options.run]
        cache = use_empty_compilation_cache()
        for result in run_method(posterior, settings, options.budget):
            print(json.dumps(result._asdict()), flush=True)
        cache.cleanup()
        return
    if options.tables:
        records = [r for file in options.tables for r in read_records(file)]
        wanted = [
            r
            for r in records
            if not options.methods or any(re.search(m, r["pair"][2]) for m in options.methods)
        ]
        print_tables(wanted, options.label)
        return
    cases = [
        (problem, num_rows)
        for problem in options.problems
        for num_rows in options.rows or ROWS.get(problem, (100_000,))
    ]
    if options.reference:
        numpyro.set_host_device_count(2)
        _FOLDER.mkdir(exist_ok=True)
        for problem, num_rows in cases:
            note = make_reference(Posterior(problem, num_rows))
            print(f"{problem}, {num_rows:,} rows: {note}", flush=True)
        return
    pairs, files = [], {case: reference_file(*case) for case in cases}
    for (problem, num_rows), file in files.items():
        if not file.exists():
            print(f"{problem}, {num_rows:,} rows: no reference; store one by --reference")
    for method in (m for methods in _METHODS.values() for m in methods):
        for (problem, num_rows), file in files.items():
            if not file.exists():
                continue
            offered = list_methods(SCALABLE_PROBLEMS[problem], np.load(file)["mean"].size)
            is_wanted = not options.methods or any(re.search(m, method) for m in options.methods)
            is_there = method not in MIXED_MODELS or importlib.util.find_spec(method) is not None
            if method in offered and is_wanted and is_there:
                pairs.append(Pair(problem, num_rows, method))
    print_tables(measure(pairs, options))


def read_records(file: Path | None) -> list[Record]:
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def measure(pairs: Sequence[Pair], options: argparse.Namespace) -> list[Record]:
    """Run each pair in a process, and return what they found and what the file has.

    Runs begin in the order of the pairs. Those of other methods wait until that of this library has
    set their budget, if it is among the pairs.
    """
    records, keep = read_records(options.keep), options.keep
    done = {Pair(*r["pair"]) for r in records if r["note"] != "stopped"}
    waiting = [pair for pair in pairs if pair not in done]
    ours = {pair[:2] for pair in waiting if pair.method == _OURS}
    end, lock = time.monotonic() + options.seconds, threading.Lock()

    def choose() -> Pair | None:
        with lock:
            for pair in waiting:
                if pair.method == _OURS or pair[:2] not in ours:
                    waiting.remove(pair)
                    return pair
        return None

    def work(core: int | None) -> None:
        while waiting and (left := end - time.monotonic()) > _MIN_SECONDS_LEFT:
            if (pair := choose()) is None:
                time.sleep(0.5)
                continue
            record = _run_pair(pair, _find_budget(pair, records, options.ratio), core, left)
            with lock:
                records.append(record)
                print_row(_cells(record), _WIDTHS)
                if keep is not None:
                    with keep.open("a") as file:
                        file.write(json.dumps(record) + "\n")
                if pair.method == _OURS:
                    ours.discard(pair[:2])

    num_cores = options.cores
    cores = sorted(os.sched_getaffinity(0))[:num_cores] if num_cores else [None]
    threads = [threading.Thread(target=work, args=(core,)) for core in cores]
    print_header("Wall and CPU seconds, and errors")
    print_row(("problem", "method", "wall s", "CPU s", "mean", "SD", "shared", "result"), _WIDTHS)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print()
    return records


def _find_budget(pair: Pair, records: Sequence[Record], ratio: float) -> float:
    if pair.method == _OURS:
        return _MAX_CPU_SECONDS
    ours = (
        r["result"]
        for r in records
        if tuple(r["pair"]) == (*pair[:2], _OURS) and r["result"] is not None
    )
    return max(_MIN_CPU_SECONDS, *(ratio * result["cpu_seconds"] for result in ours), 0.0)


def _run_pair(pair: Pair, budget: float, core: int | None, timeout: float) -> Record:
    command = ["taskset", "-c", str(core)] if core is not None else []
    command += [sys.executable, __file__, "--run", pair.method, "--problems", pair.problem]
    command += ["--rows", str(pair.num_rows), "--budget", str(budget)]
    where = results.describe() | {"cores": 1 if core is not None else os.cpu_count()}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        timer = threading.Timer(min(timeout, 1e6), process.kill)
        timer.start()
        found, messages = (text.splitlines() for text in process.communicate())
        timer.cancel()
    note = {0: "", -signal.SIGXCPU: "budget used", -signal.SIGKILL: "stopped"}
    error = messages[-1] if messages else f"exit status {process.returncode}"
    return {
        "pair": pair,
        "budget": budget,
        "result": json.loads(found[-1]) if found else None,
        "note": note.get(process.returncode, error),
        **where,
    }


def _cells(record: Record) -> list[str]:
    problem, num_rows, method = record["pair"]
    name, note = f"{problem}, {num_rows:,} rows", record["note"]
    if record["result"] is None:
        return [name, method, "", "", "", "", "", note or "no result"]
    result = Result(**record["result"])
    of_shared = f"{result.shared_mean_error:.2f}, {100 * result.shared_sd_error:.0f}%"
    notes = [] if result.is_reached else [f"not reached {note}".rstrip()]
    notes += [f"{result.num_missing} SDs missing"] * (result.num_missing > 0)
    return [
        name,
        method,
        f"{result.wall_seconds:.1f}",
        f"{result.cpu_seconds:.1f}",
        f"{result.mean_error:.2f}",
        f"{100 * result.sd_error:.0f}%",
        of_shared if SCALABLE_PROBLEMS[problem].hierarchy else "",
        ", ".join(notes),
    ]


def print_tables(records: Sequence[Record], label: str = "") -> None:
    """Print the CPU seconds of all methods that reach the accuracy, and the errors of the others.

    A run that was stopped before it had used its budget counts only where it reached the accuracy.
    """
    counted = [
        r
        for r in records
        if (r["result"] or {}).get("is_reached") or r["note"] in ("", "budget used")
    ]
    if not counted:
        return
    where = {k: counted[0][k] for k in ("day", "commit", "load", "versions", "machine")}
    columns = [c for c, ms in _METHODS.items() if any(r["pair"][2] in ms for r in counted)]
    cases = list(dict.fromkeys((r["pair"][0], r["pair"][1]) for r in counted))
    order = list(SCALABLE_PROBLEMS)
    cases.sort(key=lambda case: (order.index(case[0]), case[1]))
    best = {
        (case, column): min(
            (
                Result(**r["result"]) if r["result"] else _NO_RESULT
                for r in counted
                if tuple(r["pair"][:2]) == case and r["pair"][2] in _METHODS[column]
            ),
            key=_rank,
            default=None,
        )
        for case in cases
        for column in columns
    }

    def seconds(result: Result | None) -> str:
        if result is None:
            return ""
        return f"{result.cpu_seconds:.1f}" if result.is_reached else "–"

    def errors(result: Result | None) -> str:
        if result is None or result.is_reached:
            return ""
        if result == _NO_RESULT:
            return "no result"
        return f"{_round(result.mean_error)}, {_round(100 * result.sd_error)}%"

    for title, cell in (
        ("CPU seconds to the accuracy", seconds),
        ("Errors where the accuracy is not reached", errors),
    ):
        print_header(title + label, **where)
        widths = [32, *(max(len(c), 12) for c in columns)]
        print_row(["problem", *columns], widths)
        for case in cases:
            cells = [cell(best[case, column]) for column in columns]
            if any(cells):
                print_row([f"{case[0]}, {case[1]:,} rows", *cells], widths)
        print()


def _round(x: float) -> str:
    return f"{x:.2g}" if x < 10 else f"{min(x, 999):.0f}" + "+" * (x > 999)


if __name__ == "__main__":
    main()
