"""Figure 6 of Franzese et al. (2021): two points, and an exact integrator (appendix E)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import output
import scipy.linalg
from epochs import first_epoch, next_batches
from jax import Array, lax, random
from linear_steps import Affine, Stationary, linearized, permuted, with_replacement
from scipy.special import ndtr
from scipy.stats import ks_1samp
from standard_errors import fit_slope, mean

from numpyro_sgmcmc.dynamics import UnderdampedLangevin

TOY_DRAWS = 100_000
TOY_FRICTION, TOY_VARIANCE = 2.0, 1.0 / (1.0 / 0.5 + 2.0 / 2.0)
TOY_MEANS = np.array([4.0, -3.2]) * 2 / (2.0 / 0.5 + 2)


def exact_flow(h: float) -> tuple[np.ndarray, np.ndarray]:
    """The solution of the linear SDE of ``(position, momentum)``: its matrix and covariance."""
    generator = np.array([[0.0, 1.0], [-1.0 / TOY_VARIANCE, -TOY_FRICTION]])
    stationary = np.diag([TOY_VARIANCE, 1.0])
    flow = scipy.linalg.expm(h * generator)
    return flow, stationary - flow @ stationary @ flow.T


def exact_step(h: float, offset: float) -> Affine:
    """The exact solution for a time h on the potential of a row, whose mode is ``offset``."""
    flow, covariance = exact_flow(h)
    matrix, noise = np.eye(3), np.zeros((3, 3))
    matrix[:2, :2], matrix[:2, 2] = flow, (np.eye(2) - flow) @ [offset, 0.0]
    noise[:2, :2] = covariance
    return Affine(matrix, noise)


def toy_steps(integrator: str, h: float, offsets: Sequence[float]) -> list[Affine]:
    if integrator == "exact":
        return [exact_step(h, o) for o in offsets]
    dynamics, hessian = UnderdampedLangevin(TOY_FRICTION), np.array([[1.0 / TOY_VARIANCE]])
    return [linearized(dynamics, integrator, h, hessian, -hessian[0] * o) for o in offsets]


@partial(jax.jit, static_argnums=(2, 3))
def toy_draws(key: Array, h_flow: tuple[Array, Array], num_epochs: int, order: str) -> Array:
    """Positions of many runs of the exact integrator at the end of an epoch of two steps."""
    flow, covariance = h_flow
    root = jnp.linalg.cholesky(covariance)
    modes = jnp.asarray(TOY_MEANS)

    def body(carry: Any, key: Array) -> tuple[Any, None]:
        z, orders = carry
        row_key, noise_key = random.split(key)
        if order == "permuted":
            orders, rows = next_batches(orders, 2, 2)
        else:
            rows = random.bernoulli(row_key, 0.5, (2, len(z))).astype(int)
        for r, noise in zip(rows, random.normal(noise_key, (2, *z.shape)), strict=True):
            mode = jnp.full(len(z), modes.mean()) if order == "full batch" else modes[r]
            center = jnp.stack([mode, jnp.zeros(len(z))], 1)
            z = (z - center) @ flow.T + center + noise @ root.T
        return (z, orders), None

    keys = random.split(key, num_epochs + 1)
    start = jnp.zeros((TOY_DRAWS, 2)), first_epoch(keys[-1], 2, TOY_DRAWS)
    (z, _), _ = lax.scan(body, start, keys[:-1])
    return z[:, 0]


def toy(num_epochs: int, step_sizes: Sequence[float]) -> dict[str, np.ndarray]:
    """Figure 6 and how its error falls with the step size."""
    center, offsets = TOY_MEANS.mean(), TOY_MEANS - TOY_MEANS.mean()
    laws = {
        "full batch": lambda integrator, h: permuted(toy_steps(integrator, h, [0.0])),
        "with replacement": lambda integrator, h: with_replacement(
            toy_steps(integrator, h, offsets)
        ),
        "permuted": lambda integrator, h: permuted(toy_steps(integrator, h, offsets)),
    }
    spread, rows = math.sqrt(TOY_VARIANCE), []
    for i, (order, law) in enumerate(laws.items()):
        keys = random.split(random.key(i), 8)
        flow = jax.tree.map(jnp.asarray, exact_flow(0.4))
        draws = np.stack([toy_draws(k, flow, num_epochs, order) for k in keys], 1)
        standard = (draws - center) / spread
        distance = mean(ks_1samp(standard, ndtr, axis=0, method="asymp").statistic)
        cells = []
        for integrator in ("exact", "lie_trotter", "symmetric"):
            s = law(integrator, 0.4)
            cells.append(" / ".join(f"{math.sqrt(m[0, 0]):.4f}" for m in s))
        rows.append((order, f"{distance:.4f}", *cells))
    # The mean of the Kolmogorov distribution.
    expected = math.sqrt(math.pi / 2 / TOY_DRAWS) * math.log(2)
    output.print_table(
        f"Figure 6, two points, h = 0.4: Kolmogorov distance of {TOY_DRAWS:,} draws of the exact "
        f"integrator ({expected:.4f} expected for exact draws) and SD of the position at the ends "
        f"of epochs / over all steps, exact; the posterior's is {spread:.4f}. The paper: with "
        "minibatches even the exact integrator is off.",
        ("minibatches", "Kolmogorov", "SD, exact integrator", "SD, lie_trotter", "SD, symmetric"),
        rows,
    )
    truth = np.diag([TOY_VARIANCE, 1.0])
    errors = {}
    for order in ("with replacement", "permuted"):
        found = [laws[order]("exact", h) for h in step_sizes]
        for when in Stationary._fields if order == "permuted" else ("ends",):
            name = order if order != "permuted" else f"permuted, {when.replace('_', ' ')}"
            moments = np.stack([getattr(s, when)[:2, :2] - truth for s in found])
            errors[name] = np.abs(moments[:, 0, 0]) / TOY_VARIANCE
            errors[f"{name}, state"] = np.abs(moments).max((1, 2))
    output.print_table(
        "Two points, exact integrator: order in h of the error that minibatches leave, from exact "
        f"moments, {len(step_sizes)} step sizes from {step_sizes[0]:g} to {step_sizes[-1]:g}",
        ("minibatches", "position's variance", "whole covariance", "paper"),
        [
            (
                name,
                fit_slope(step_sizes, errors[name]),
                fit_slope(step_sizes, errors[f"{name}, state"]),
                "2 (permutations are assumed)" if name == "with replacement" else "2, at least",
            )
            for name in errors
            if not name.endswith("state")
        ],
    )
    return {name: e for name, e in errors.items() if not name.endswith("state")}
