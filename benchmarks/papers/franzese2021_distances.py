"""Appendix F.2 of Franzese et al. (2021): Kolmogorov distances of simulated draws."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import output
from epochs import first_epoch, next_batches
from franzese2021_regression import BATCHES, DYNAMICS, Regression, errors_of, regression_steps
from jax import Array, lax, random
from linear_steps import permuted
from scipy.special import ndtr
from scipy.stats import ks_1samp
from standard_errors import Mean, mean


@partial(jax.jit, static_argnums=1)
def simulate(
    problem: Regression, integrator: str, key: Array, starts: Array, h: Array, num_epochs: Array
) -> Array:
    """Positions of independent chains at the end of an epoch, each with independent orders."""
    step, batches = DYNAMICS.make_step(integrator), jnp.asarray(BATCHES)
    init_key, order_key, key = random.split(key, 3)

    def one_step(state: Any, rows: Array, noise: Array) -> Any:
        return step(state, h, lambda q: problem.gradient(q, rows), noise)

    def one_epoch(i: Array, carry: Any) -> Any:
        state, orders = carry
        orders, chosen = next_batches(orders, len(batches), len(batches))

        def body(state: Any, each: tuple[Array, Array]) -> tuple[Any, None]:
            batch, key = each
            noise = random.normal(key, (len(starts), step.num_noise, starts.shape[1]))
            return jax.vmap(one_step)(state, batches[batch], noise), None

        keys = random.split(random.fold_in(key, i), len(batches))
        return lax.scan(body, state, (chosen, keys))[0], orders

    state = jax.vmap(DYNAMICS.init)(starts, random.split(init_key, len(starts)))
    orders = first_epoch(order_key, len(batches), len(starts))
    return lax.fori_loop(0, num_epochs, one_epoch, (state, orders))[0].position


def exact_draws(problem: Regression, rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.multivariate_normal(problem.mean, problem.covariance, size, method="cholesky")


def predictive_distance(problem: Regression, positions: np.ndarray, num_groups: int) -> Mean:
    """Mean Kolmogorov distance over the test points and its standard error over groups."""
    center = problem.test @ problem.mean
    standard = (positions @ problem.test.T - center) / problem.predictive_sd
    groups = np.split(standard, num_groups)
    return mean([ks_1samp(g, ndtr, axis=0, method="asymp").statistic.mean() for g in groups])


def distances(
    problem: Regression,
    integrators: Sequence[str],
    step_sizes: Sequence[float],
    num_draws: int,
    duration: float,
    num_groups: int = 4,
) -> tuple[dict[str, np.ndarray], Mean]:
    """Appendix F.2: predictive marginals with permuted minibatches, and the self-distance."""
    rng, size = np.random.default_rng(1), num_groups * num_draws
    itself = predictive_distance(problem, exact_draws(problem, rng, size), num_groups)
    found: dict[str, list] = {integrator: [] for integrator in integrators}
    rows = [("exact draws", "-", f"{itself:.4f}", "0")]
    for i, (integrator, h) in enumerate(itertools.product(integrators, step_sizes)):
        # From exact draws, so that only the bias must grow: three relaxation times are enough.
        starts = jnp.asarray(exact_draws(problem, rng, size))
        num_epochs = max(1, round(duration / (h * len(BATCHES))))
        positions = simulate(problem, integrator, random.key(i), starts, h, num_epochs)
        distance = predictive_distance(problem, np.asarray(positions), num_groups)
        found[integrator].append(distance)
        moment = permuted(regression_steps(problem, integrator, h, BATCHES)).ends
        law = errors_of(problem, moment).kolmogorov
        rows.append((integrator, f"{h:g}", f"{distance:.4f}", f"{law:.4f}"))
    output.print_table(
        f"Appendix F.2, permuted minibatches: mean Kolmogorov distance of {num_draws} draws from "
        "the exact predictive marginals, simulated, and without sampling error for a Gaussian law "
        "of the exact moments. The paper: at small steps all integrators reach the self-distance.",
        ("integrator", "h", "draws", "law"),
        rows,
    )
    return {integrator: np.array(v) for integrator, v in found.items()}, itself
