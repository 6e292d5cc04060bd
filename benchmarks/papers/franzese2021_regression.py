"""Figure 1 of Franzese et al. (2021): a regression on trigonometric features, all moments exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import output
import scipy.linalg
from linear_steps import Affine, linearized, permuted, with_replacement
from scipy.special import ndtr
from standard_errors import fit_slope

from numpyro_sgmcmc.dynamics import UnderdampedLangevin

FRICTION = 5.0
NOISE_VARIANCE = 0.1
NUM_FEATURES, NUM_ROWS, BATCH_SIZE, NUM_TEST = 256, 40, 8, 200
BATCHES = np.arange(NUM_ROWS).reshape(-1, BATCH_SIZE)
FULL = BATCHES.reshape(1, -1)
DYNAMICS = UnderdampedLangevin(FRICTION)
ORDERS = {"leapfrog": 1, "lie_trotter": 2, "symmetric": 2, "mt3": 3}
WAYS = ("full batch", "permuted, ends", "permuted, all steps", "with replacement")


class Regression(NamedTuple):
    """
    - **features** - of the rows, rotated, shape ``(N, r)``.
    - **targets** - shape ``(N,)``.
    - **test** - features of the test points, shape ``(200, r)``.
    - **mean**, **covariance** - of the posterior.
    """

    features: np.ndarray
    targets: np.ndarray
    test: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray

    @property
    def predictive_sd(self) -> np.ndarray:
        return np.sqrt(np.einsum("ij,jk,ik->i", self.test, self.covariance, self.test))

    def gradient(self, q: Any, rows: Any) -> Any:
        """The gradient's estimate at q on some rows."""
        x = jnp.asarray(self.features)[rows]
        scale = NUM_ROWS / (len(rows) * NOISE_VARIANCE)
        return q + scale * x.T @ (x @ q - jnp.asarray(self.targets)[rows])

    def quadratic(self, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """The Hessian, and the gradient's estimate at the posterior mean."""
        x = self.features[rows]
        scale = NUM_ROWS / (len(rows) * NOISE_VARIANCE)
        hessian = np.eye(x.shape[1]) + scale * x.T @ x
        return hessian, self.mean + scale * x.T @ (x @ self.mean - self.targets[rows])


def make_regression(seed: int = 0) -> Regression:
    rng = np.random.default_rng(seed)
    frequencies = 5.0 * rng.normal(size=NUM_FEATURES)
    inputs = np.concatenate([rng.uniform(-1, 1, NUM_ROWS), np.linspace(-1, 1, NUM_TEST)])
    features = math.sqrt(2 / NUM_FEATURES) * np.cos(np.outer(inputs, frequencies) - math.pi / 4)
    weights = rng.normal(size=NUM_FEATURES)
    targets = features[:NUM_ROWS] @ weights
    targets = targets + math.sqrt(NOISE_VARIANCE) * rng.normal(size=NUM_ROWS)
    left, scale, _ = np.linalg.svd(features, full_matrices=False)
    rotated = (left * scale)[:, scale > 1e-8 * scale[0]]
    train, test = rotated[:NUM_ROWS], rotated[NUM_ROWS:]
    covariance = np.linalg.inv(np.eye(train.shape[1]) + train.T @ train / NOISE_VARIANCE)
    return Regression(
        train, targets, test, covariance @ train.T @ targets / NOISE_VARIANCE, covariance
    )


def regression_steps(problem: Regression, integrator: str, h: float, batches: Any) -> list[Affine]:
    return [linearized(DYNAMICS, integrator, h, *problem.quadratic(rows)) for rows in batches]


class Errors(NamedTuple):
    """
    - **predictive** - of the predictive second moments about the exact mean, relative, rms over
      test points.
    - **state** - of the covariance of position and momentum, the largest entry.
    - **kolmogorov** - distance of a Gaussian with these moments from the exact predictive, mean
      over test points.
    """

    predictive: float
    state: float
    kolmogorov: float


POINTS = np.linspace(-6, 6, 2401)


def errors_of(problem: Regression, moment: np.ndarray) -> Errors:
    if not np.isfinite(moment).all():
        return Errors(np.inf, np.inf, 1.0)
    d, sd = len(problem.mean), problem.predictive_sd
    positions = moment[:d, :d]
    second = np.einsum("ij,jk,ik->i", problem.test, positions, problem.test)
    truth = scipy.linalg.block_diag(problem.covariance, np.eye(d))
    shift = problem.test @ moment[:d, -1] / sd
    spread = np.sqrt(np.maximum(second / sd**2 - shift**2, 1e-300))
    law = ndtr((POINTS[:, None] - shift) / spread)
    return Errors(
        float(np.sqrt(np.mean((second / sd**2 - 1) ** 2))),
        float(np.abs(moment[: 2 * d, : 2 * d] - truth).max()),
        float(np.abs(law - ndtr(POINTS)[:, None]).max(0).mean()),
    )


def bottleneck(
    problem: Regression, integrators: Sequence[str], step_sizes: Sequence[float]
) -> dict[str, dict[str, list[Errors]]]:
    """Figure 1: errors by integrator, way of taking minibatches and step size; all exact."""
    found = {integrator: {} for integrator in integrators}
    for integrator, h in itertools.product(integrators, step_sizes):
        full = permuted(regression_steps(problem, integrator, h, FULL)).ends
        steps = regression_steps(problem, integrator, h, BATCHES)
        in_order = permuted(steps)
        moments = {
            "full batch": full,
            "permuted, ends": in_order.ends,
            "permuted, all steps": in_order.all_steps,
            "with replacement": with_replacement(steps).ends,
        }
        for name, moment in moments.items():
            found[integrator].setdefault(name, []).append(errors_of(problem, moment))
    return found


def slope_table(
    found: dict[str, dict[str, list[Errors]]], step_sizes: np.ndarray, windows: Sequence[slice]
) -> None:
    """The orders of Figure 1, and the errors at one step size."""

    def cell(values: Sequence[float], window: slice) -> str:
        chosen = np.array(values)[window]
        # Below, rounding shows.
        if chosen.min() < 1e-9:
            return "< 1e-9"
        return str(fit_slope(step_sizes[window], chosen))

    for (field, what), window in itertools.product(
        (
            ("predictive", "predictive second moments"),
            ("state", "covariance of position and momentum"),
        ),
        windows,
    ):
        used = step_sizes[window]
        output.print_table(
            f"Figure 1, order in h of the error in the {what}, exact moments, {len(used)} step "
            f"sizes from {used[0]:.2g} to {used[-1]:.2g}. The paper: the weak order on the full "
            "batch, at most 2 with permuted minibatches.",
            ("integrator", "weak order", *WAYS),
            [
                (s, ORDERS[s], *(cell([getattr(e, field) for e in f[w]], window) for w in WAYS))
                for s, f in found.items()
            ],
        )
    at = windows[-1].stop - 1
    output.print_table(
        f"Figure 1, relative error of the predictive second moments at h = {step_sizes[at]:.2g}",
        ("integrator", *WAYS),
        [(s, *(f"{f[w][at].predictive:.1e}" for w in WAYS)) for s, f in found.items()],
    )
