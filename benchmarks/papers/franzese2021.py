r"""Revisiting the effects of stochasticity for Hamiltonian samplers: the synthetic experiments.

Reproduces Figure 6 (the two-point toy with an exact integrator, appendix E), the synthetic data
set of Figures 1 and 9 (256 random trigonometric features, appendix F.1), the Kolmogorov distances
of appendix F.2 and the integration lengths of Figure 5, of Franzese, Milios, Filippone and
Michiardi (2021), *Revisiting the effects of stochasticity for Hamiltonian samplers*.

Both potentials are quadratic, so that a step is an affine map and the moments of the stationary
law follow without sampling. Minibatches are a partition of the rows, visited in a new random order
in every epoch, as in the paper's theorems: the mean second moment after a set S of minibatches is
the average, over its last member k, of k's step applied to that after S without k. A sum over
subsets in place of permutations makes the epoch's map exact. Only the Kolmogorov distances are
simulated. The standard errors of orders are those of a straight line's fit, not of sampling.

The paper gives neither the number of rows nor the frequencies: here 40 rows in 5 minibatches of 8,
standard normal frequencies times 5 and inputs from -1 to 1. The sampler does not see a rotation of
the features, so they are rotated into the few directions that the inputs reach.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy.linalg
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from matplotlib.ticker import NullFormatter
from scipy.sparse.linalg import LinearOperator, gmres
from scipy.special import ndtr

from numpyro_sgmcmc.dynamics import Underdamped
from numpyro_sgmcmc.dynamics.integrators import Step

jax.config.update("jax_enable_x64", True)

FRICTION = 5.0
NOISE_VARIANCE = 0.1
NUM_FEATURES, NUM_ROWS, BATCH_SIZE, NUM_TEST = 256, 40, 8, 200
ORDERS = {"leapfrog": 1, "lie_trotter": 2, "symmetric": 2, "mt3": 3}
COLORS = {"leapfrog": "C0", "lie_trotter": "C1", "symmetric": "C2", "mt3": "C3"}
WAYS = ("full batch", "permuted, ends", "permuted, all steps", "with replacement")


# --- Moments of affine steps --------------------------------------------------------------------


class Affine(NamedTuple):
    """A step ``z -> A (z, 1) + noise`` on flat states with a one at their end.

    - **matrix** - A with the row that keeps the one, shape ``(n + 1, n + 1)``.
    - **noise** - covariance of the noise, the same shape.
    """

    matrix: np.ndarray
    noise: np.ndarray


def after(step: Affine, moment: np.ndarray) -> np.ndarray:
    """The second moment of ``(z, 1)`` after the step."""
    return step.matrix @ moment @ step.matrix.T + step.noise


@partial(jax.jit, static_argnums=(0, 1))
def jacobians(
    dynamics: Underdamped, step: Step, h: Any, hessian: Array, slope: Array, count: Any
) -> tuple[Array, Array, Array]:
    """Of the flat state after a step from zero, by state and noise; and that state."""
    dim = len(slope)
    state = dynamics.init(jnp.zeros(dim), random.key(0))
    flat, unravel = ravel_pytree(state)

    def run(z: Array, noise: Array) -> Array:
        def gradient(q: Array) -> Array:
            return hessian @ q + slope

        return ravel_pytree(step(unravel(z), h, gradient, noise.reshape(-1, dim), count))[0]

    origin = (jnp.zeros_like(flat), jnp.zeros(step.draws * dim))
    return (*jax.jacfwd(run, (0, 1))(*origin), run(*origin))


def linearized(
    dynamics: Underdamped,
    step: Step,
    h: float,
    hessian: np.ndarray,
    slope: np.ndarray,
    count: int = 0,
) -> Affine:
    """The library's step on the gradient ``hessian q + slope``."""
    transition, spread, shift = (
        np.asarray(x) for x in jacobians(dynamics, step, h, hessian, slope, count)
    )
    n = len(shift)
    matrix, noise = np.eye(n + 1), np.zeros((n + 1, n + 1))
    matrix[:n, :n], matrix[:n, n] = transition, shift
    noise[:n, :n] = spread @ spread.T
    return Affine(matrix, noise)


def epoch(
    steps: Sequence[Affine], moment: np.ndarray, last: Sequence[Affine] | None = None
) -> list[np.ndarray]:
    """Mean second moment after 0, 1, ..., K steps of a random permutation of the K steps.

    :param last: what stands for a step that comes last; None for the step itself.
    """
    num = len(steps)
    reached, means = {frozenset(): moment}, [moment]
    for size in range(1, num + 1):
        larger = {}
        used = last if last is not None and size == num else steps
        for members in itertools.combinations(range(num), size):
            chosen = frozenset(members)
            parts = [after(used[k], reached[chosen - {k}]) for k in members]
            larger[chosen] = sum(parts) / size
        reached = larger
        means.append(sum(reached.values()) / len(reached))
    return means


def fixed_point(advance: Callable[[np.ndarray], np.ndarray], size: int) -> np.ndarray:
    """The second moment that an affine map of second moments leaves as it is."""

    def advanced(x: np.ndarray) -> np.ndarray:
        return advance(np.append(x, 1.0).reshape(size, size)).ravel()[:-1]

    offset = advanced(np.zeros(size**2 - 1))

    def residual(x: np.ndarray) -> np.ndarray:
        return x - (advanced(x) - offset)

    operator = LinearOperator((size**2 - 1,) * 2, matvec=residual, dtype=float)
    solution, failed = gmres(operator, offset, rtol=1e-12, atol=3e-14, restart=600, maxiter=5)
    if failed:
        raise RuntimeError("The stationary moments were not found.")
    moment = np.append(solution, 1.0).reshape(size, size)
    # Where the step is unstable a solution exists, but is no second moment.
    is_moment = np.linalg.eigvalsh(moment)[0] > -1e-8 * np.abs(moment).max()
    return moment if is_moment else np.full_like(moment, np.inf)


class Stationary(NamedTuple):
    """Second moments of ``(z, 1)``, z measured from the exact posterior mean.

    - **ends** - at the ends of epochs.
    - **all_steps** - over all steps.
    """

    ends: np.ndarray
    all_steps: np.ndarray


def permuted(steps: Sequence[Affine]) -> Stationary:
    """Minibatches in a new random order in every epoch; one minibatch is the full batch."""
    ends = fixed_point(lambda m: epoch(steps, m)[-1], len(steps[0].matrix))
    return Stationary(ends, np.mean(epoch(steps, ends)[1:], axis=0))


def with_replacement(steps: Sequence[Affine]) -> Stationary:
    """A minibatch of the partition at random at every step."""
    mean = fixed_point(lambda m: np.mean([after(s, m) for s in steps], 0), len(steps[0].matrix))
    return Stationary(mean, mean)


# --- Figure 6: two points -----------------------------------------------------------------------

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


def toy_steps(scheme: str, h: float, offsets: Sequence[float]) -> list[Affine]:
    if scheme == "exact":
        return [exact_step(h, o) for o in offsets]
    step = Underdamped(TOY_FRICTION).step(scheme)
    hessian = np.array([[1.0 / TOY_VARIANCE]])
    return [
        linearized(Underdamped(TOY_FRICTION), step, h, hessian, -hessian[0] * o) for o in offsets
    ]


@partial(jax.jit, static_argnums=(2, 3))
def toy_draws(key: Array, h_flow: tuple[Array, Array], num_epochs: int, order: str) -> Array:
    """Positions of many runs of the exact integrator at the end of an epoch of two steps."""
    flow, covariance = h_flow
    root = jnp.linalg.cholesky(covariance)
    modes = jnp.asarray(TOY_MEANS)

    def body(z: Array, key: Array) -> tuple[Array, None]:
        row_key, noise_key = random.split(key)
        rows = random.bernoulli(row_key, 0.5, (2, len(z))).astype(int)
        if order == "permuted":
            rows = jnp.stack([rows[0], 1 - rows[0]])
        for r, noise in zip(rows, random.normal(noise_key, (2, *z.shape)), strict=True):
            mode = jnp.full(len(z), modes.mean()) if order == "full batch" else modes[r]
            center = jnp.stack([mode, jnp.zeros(len(z))], 1)
            z = (z - center) @ flow.T + center + noise @ root.T
        return z, None

    z, _ = lax.scan(body, jnp.zeros((TOY_DRAWS, 2)), random.split(key, num_epochs))
    return z[:, 0]


def kolmogorov(draws: np.ndarray, cdf: Callable) -> np.ndarray:
    """Largest difference of the empirical distribution functions, one a column, from the exact."""
    n = len(draws)
    exact = cdf(np.sort(draws, 0))
    steps = np.arange(n + 1)[:, None] / n
    return np.maximum(steps[1:] - exact, exact - steps[:-1]).max(0)


def toy(num_epochs: int, step_sizes: Sequence[float]) -> dict[str, np.ndarray]:
    """Figure 6 and how its error falls with the step size."""
    center, offsets = TOY_MEANS.mean(), TOY_MEANS - TOY_MEANS.mean()
    laws = {
        "full batch": lambda scheme, h: permuted(toy_steps(scheme, h, [0.0])),
        "with replacement": lambda scheme, h: with_replacement(toy_steps(scheme, h, offsets)),
        "permuted": lambda scheme, h: permuted(toy_steps(scheme, h, offsets)),
    }
    spread, rows = math.sqrt(TOY_VARIANCE), []
    for i, (order, law) in enumerate(laws.items()):
        keys = random.split(random.key(i), 8)
        flow = jax.tree.map(jnp.asarray, exact_flow(0.4))
        draws = np.stack([toy_draws(k, flow, num_epochs, order) for k in keys], 1)
        distance = kolmogorov(draws, lambda x: ndtr((x - center) / spread))
        cells = []
        for scheme in ("exact", "lie_trotter", "symmetric"):
            s = law(scheme, 0.4)
            cells.append(" / ".join(f"{math.sqrt(m[0, 0]):.4f}" for m in s))
        error = distance.std(ddof=1) / math.sqrt(len(distance))
        rows.append((order, f"{distance.mean():.4f} ± {error:.4f}", *cells))
    # The mean of the Kolmogorov distribution.
    expected = math.sqrt(math.pi / 2 / TOY_DRAWS) * math.log(2)
    common.print_table(
        f"Figure 6, two points, h = 0.4: Kolmogorov distance of {TOY_DRAWS:,} draws of the exact "
        f"integrator ({expected:.4f} expected for exact draws) and sd of the position at the ends "
        f"of epochs / over all steps, exact; the posterior's is {spread:.4f}. The paper: with "
        "minibatches even the exact integrator is off.",
        ("minibatches", "Kolmogorov", "sd, exact integrator", "sd, lie_trotter", "sd, symmetric"),
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
    common.print_table(
        "Two points, exact integrator: order in h of the error that minibatches leave, from exact "
        f"moments, {len(step_sizes)} step sizes from {step_sizes[0]:g} to {step_sizes[-1]:g}",
        ("minibatches", "position's variance", "whole covariance", "paper"),
        [
            (
                name,
                common.fit_slope(step_sizes, errors[name]),
                common.fit_slope(step_sizes, errors[f"{name}, state"]),
                "2 (permutations are assumed)" if name == "with replacement" else "2, at least",
            )
            for name in errors
            if not name.endswith("state")
        ],
    )
    return {name: e for name, e in errors.items() if not name.endswith("state")}


# --- The regression -----------------------------------------------------------------------------


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


BATCHES = np.arange(NUM_ROWS).reshape(-1, BATCH_SIZE)
FULL = BATCHES.reshape(1, -1)


DYNAMICS = Underdamped(FRICTION)


def regression_steps(problem: Regression, scheme: str, h: float, batches: Any) -> list[Affine]:
    step = DYNAMICS.step(scheme)
    return [linearized(DYNAMICS, step, h, *problem.quadratic(rows)) for rows in batches]


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
    problem: Regression, schemes: Sequence[str], step_sizes: Sequence[float]
) -> dict[str, dict[str, list[Errors]]]:
    """Figure 1: errors by scheme, way of taking minibatches and step size; all exact."""
    found = {scheme: {} for scheme in schemes}
    for scheme, h in itertools.product(schemes, step_sizes):
        full = permuted(regression_steps(problem, scheme, h, FULL)).ends
        steps = regression_steps(problem, scheme, h, BATCHES)
        in_order = permuted(steps)
        moments = {
            "full batch": full,
            "permuted, ends": in_order.ends,
            "permuted, all steps": in_order.all_steps,
            "with replacement": with_replacement(steps).ends,
        }
        for name, moment in moments.items():
            found[scheme].setdefault(name, []).append(errors_of(problem, moment))
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
        return str(common.fit_slope(step_sizes[window], chosen))

    for (field, what), window in itertools.product(
        (
            ("predictive", "predictive second moments"),
            ("state", "covariance of position and momentum"),
        ),
        windows,
    ):
        used = step_sizes[window]
        common.print_table(
            f"Figure 1, order in h of the error in the {what}, exact moments, {len(used)} step "
            f"sizes from {used[0]:.2g} to {used[-1]:.2g}. The paper: the weak order on the full "
            "batch, at most 2 with permuted minibatches.",
            ("scheme", "weak order", *WAYS),
            [
                (s, ORDERS[s], *(cell([getattr(e, field) for e in f[w]], window) for w in WAYS))
                for s, f in found.items()
            ],
        )
    at = windows[-1].stop - 1
    common.print_table(
        f"Figure 1, relative error of the predictive second moments at h = {step_sizes[at]:.2g}",
        ("scheme", *WAYS),
        [(s, *(f"{f[w][at].predictive:.1e}" for w in WAYS)) for s, f in found.items()],
    )


# --- Integration lengths ------------------------------------------------------------------------


def leapfrog_cycle(
    problem: Regression, h: float, num_leapfrog: int, batches: Any
) -> tuple[list[Affine], list[Affine]]:
    """Lie-Trotter steps on each minibatch: those without and those with a refreshment."""
    dynamics = Underdamped(FRICTION, num_leapfrog)
    step = dynamics.step("lie_trotter")
    quadratics = [problem.quadratic(rows) for rows in batches]
    return tuple(  # type: ignore[return-value]
        [linearized(dynamics, step, h, *each, count) for each in quadratics]
        for count in (num_leapfrog, num_leapfrog - 1)
    )


def refreshed(problem: Regression, h: float, num_leapfrog: int, batches: Any) -> np.ndarray:
    """The stationary second moment after refreshments, which come at the ends of epochs."""
    plain, last = leapfrog_cycle(problem, h, num_leapfrog, batches)

    def cycle(moment: np.ndarray) -> np.ndarray:
        for _ in range(num_leapfrog // len(batches) - 1):
            moment = epoch(plain, moment)[-1]
        return epoch(plain, moment, last)[-1]

    return fixed_point(cycle, len(plain[0].matrix))


def slowest(problem: Regression, h: float, num_leapfrog: int) -> float:
    """Time in which the slowest mean shrinks by e, on the full batch."""
    plain, last = leapfrog_cycle(problem, h, num_leapfrog, FULL)
    n = len(plain[0].matrix) - 1
    before = np.linalg.matrix_power(plain[0].matrix[:n, :n], num_leapfrog - 1)
    radius = np.abs(np.linalg.eigvals(last[0].matrix[:n, :n] @ before)).max()
    return -num_leapfrog * h / math.log(radius)


def integration_lengths(
    problem: Regression, lengths: Sequence[int], fitted: np.ndarray, shown: Sequence[float]
) -> None:
    """Figure 5: Lie-Trotter with more and more leapfrog steps between refreshments."""
    rows = []
    for length in lengths:
        cells = []
        for batches in (FULL, BATCHES):
            if length % len(batches):
                cells += ["-"] * (1 + len(shown))
                continue
            errors = [
                errors_of(problem, refreshed(problem, h, length, batches)).predictive
                for h in (*fitted, *shown)
            ]
            cells.append(str(common.fit_slope(fitted, errors[: len(fitted)])))
            shown_errors = errors[len(fitted) :]
            cells += [f"{e:.1e}" if np.isfinite(e) else "unstable" for e in shown_errors]
        times = (f"{slowest(problem, h, length):.1f}" for h in shown)
        rows.append((length, *cells, *times))
    at = [f"h = {h:g}" for h in shown]
    common.print_table(
        "Figure 5, Lie-Trotter with N_l leapfrog steps between refreshments: order of the error "
        f"in the predictive second moments from h = {fitted[0]:.2g} to {fitted[-1]:.2g}, the error "
        "itself at larger steps, and the time in which the slowest mean shrinks by e; exact. The "
        "paper: order 2 for every N_l, larger errors at large h for N_l near 100.",
        (
            "N_l",
            "full batch: order",
            *at,
            "permuted: order",
            *at,
            "time, full batch: " + at[0],
            *at[1:],
        ),
        rows,
    )


# --- Kolmogorov distances of draws --------------------------------------------------------------


@partial(jax.jit, static_argnums=1)
def simulate(
    problem: Regression, scheme: str, key: Array, starts: Array, h: Array, num_epochs: Array
) -> Array:
    """Positions of independent chains at the end of an epoch, each with orders of its own."""
    step, batches = DYNAMICS.step(scheme), jnp.asarray(BATCHES)
    init_key, key = random.split(key)

    def one_step(state: Any, rows: Array, noise: Array) -> Any:
        return step(state, h, lambda q: problem.gradient(q, rows), noise)

    def one_epoch(i: Array, state: Any) -> Any:
        order_key, noise_key = random.split(random.fold_in(key, i))
        index = jnp.tile(jnp.arange(len(batches)), (len(starts), 1))
        orders = random.permutation(order_key, index, axis=1, independent=True)

        def body(state: Any, each: tuple[Array, Array]) -> tuple[Any, None]:
            chosen, key = each
            noise = random.normal(key, (len(starts), step.draws, starts.shape[1]))
            return jax.vmap(one_step)(state, batches[chosen], noise), None

        return lax.scan(body, state, (orders.T, random.split(noise_key, len(batches))))[0]

    state = jax.vmap(DYNAMICS.init)(starts, random.split(init_key, len(starts)))
    return lax.fori_loop(0, num_epochs, one_epoch, state).position


def exact_draws(problem: Regression, rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.multivariate_normal(problem.mean, problem.covariance, size, method="cholesky")


def predictive_distance(
    problem: Regression, positions: np.ndarray, num_groups: int
) -> tuple[float, float]:
    """Mean Kolmogorov distance over the test points and its standard error over groups."""
    center = problem.test @ problem.mean
    standard = (positions @ problem.test.T - center) / problem.predictive_sd
    each = np.array([kolmogorov(g, ndtr).mean() for g in np.split(standard, num_groups)])
    return float(each.mean()), float(each.std(ddof=1) / math.sqrt(num_groups))


def distances(
    problem: Regression,
    schemes: Sequence[str],
    step_sizes: Sequence[float],
    num_draws: int,
    duration: float,
    num_groups: int = 4,
) -> tuple[dict[str, np.ndarray], tuple[float, float]]:
    """Appendix F.2: predictive marginals with permuted minibatches, and the self-distance."""
    rng, size = np.random.default_rng(1), num_groups * num_draws
    itself = predictive_distance(problem, exact_draws(problem, rng, size), num_groups)
    found: dict[str, list] = {scheme: [] for scheme in schemes}
    rows = [("exact draws", "-", f"{itself[0]:.4f} ± {itself[1]:.4f}", "0")]
    for i, (scheme, h) in enumerate(itertools.product(schemes, step_sizes)):
        # From exact draws, so that only the bias must grow: three relaxation times are enough.
        starts = jnp.asarray(exact_draws(problem, rng, size))
        num_epochs = max(1, round(duration / (h * len(BATCHES))))
        positions = simulate(problem, scheme, random.key(i), starts, h, num_epochs)
        value = predictive_distance(problem, np.asarray(positions), num_groups)
        found[scheme].append(value)
        moment = permuted(regression_steps(problem, scheme, h, BATCHES)).ends
        law = errors_of(problem, moment).kolmogorov
        rows.append((scheme, f"{h:g}", f"{value[0]:.4f} ± {value[1]:.4f}", f"{law:.4f}"))
    common.print_table(
        f"Appendix F.2, permuted minibatches: mean Kolmogorov distance of {num_draws} draws from "
        "the exact predictive marginals, simulated, and without sampling error for a Gaussian law "
        "of the exact moments. The paper: at small steps all schemes reach the self-distance.",
        ("scheme", "h", "draws", "law"),
        rows,
    )
    return {scheme: np.array(v) for scheme, v in found.items()}, itself


# --- The figure ---------------------------------------------------------------------------------


def guide(ax: Any, x: np.ndarray, first: float, order: int, is_above: bool = False) -> None:
    """A grey dashed line of a given order from ``(x[0], first)``, above or below the data."""
    y = first * (x / x[0]) ** order
    ax.plot(x, y, color="grey", ls="--", lw=1)
    place = {"ha": "right", "va": "bottom"} if is_above else {"ha": "left", "va": "top"}
    middle = len(x) // 2
    ax.annotate(f"order {order}", (x[middle], y[middle]), color="grey", **place)


def plot(
    toy_errors: dict[str, np.ndarray],
    toy_sizes: np.ndarray,
    found: dict[str, dict[str, list[Errors]]],
    step_sizes: np.ndarray,
    drawn: dict[str, np.ndarray],
    itself: tuple[float, float],
    drawn_sizes: Sequence[float],
) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")
    ax = axes[0, 0]
    styles = (("C3", "o-"), ("C0", "o-"), ("C2", "x:"))
    for (name, errors), (color, style) in zip(toy_errors.items(), styles, strict=True):
        ax.plot(toy_sizes, errors, style, color=color, ms=5, label=name)
    guide(ax, toy_sizes, toy_errors["with replacement"][0] * 0.5, 1)
    guide(ax, toy_sizes, toy_errors["permuted, ends"][0] * 0.4, 3)
    ax.set(title="two points, exact integrator", ylabel="relative error of the variance")
    for ax, way in ((axes[0, 1], "full batch"), (axes[1, 0], "permuted, ends")):
        for scheme, errors in found.items():
            values = np.array([e.predictive for e in errors[way]])
            if values.max() > 1e-9:
                ax.plot(step_sizes, values, "o-", color=COLORS[scheme], ms=4, label=scheme)
        ax.set(title=f"trigonometric features, {way}", ylabel="relative error, predictive moments")
        ax.set_ylim(1e-10, 1)
    ax = axes[0, 1]
    guide(ax, step_sizes, 1e-6, 2, is_above=True)
    guide(ax, step_sizes[2:], 1e-9, 3)
    ax = axes[1, 0]
    iid = [e.predictive for e in found["mt3"]["with replacement"]]
    ax.plot(step_sizes, iid, "x:", color="C3", ms=5, label="mt3, with replacement")
    guide(ax, step_sizes, 1e-7, 2)
    guide(ax, step_sizes[:-2], 6e-3, 1, is_above=True)
    ax = axes[1, 1]
    for i, (scheme, values) in enumerate(drawn.items()):
        law = [e.kolmogorov for e in found[scheme]["permuted, ends"]]
        ax.plot(step_sizes, law, "-", color=COLORS[scheme], lw=1)
        # Side by side, to be seen.
        x = np.array(drawn_sizes) * 1.08 ** (i - 1)
        ax.errorbar(x, *values.T, fmt="o", color=COLORS[scheme], ms=5, capsize=2, label=scheme)
    ax.axhline(itself[0], color="grey", ls="--", label="self-distance of the draws")
    ax.set(title="permuted, ends: draws (points) and law (lines)")
    ax.set(ylabel="mean Kolmogorov distance", xlim=(1e-3, 0.1), ylim=(1e-5, 1))
    for ax in axes.flat:
        ax.set(xscale="log", yscale="log", xlabel="step size")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.legend(fontsize=8, frameon=False, loc="upper left")
    axes[1, 0].legend(fontsize=8, frameon=False, loc="lower right")
    ax = axes[0, 0]
    ax.set_xticks(toy_sizes[::2], [f"{h:.2g}" for h in toy_sizes[::2]])
    return figure


def main() -> None:
    quick = common.arguments(__doc__).quick
    common.print_title("Franzese et al. (2021): two points and 256 trigonometric features")
    toy_sizes = np.geomspace(0.025, 0.4, 3 if quick else 9)
    toy_errors = toy(5 if quick else 30, toy_sizes)

    problem = make_regression()
    curvatures = [
        np.linalg.eigvalsh(problem.quadratic(rows)[0])[-1] for rows in (*BATCHES, FULL[0])
    ]
    print(
        f"regression: {len(problem.mean)} of {NUM_FEATURES} directions reached; largest curvature "
        f"{curvatures[-1]:.0f} on all rows, up to {max(curvatures[:-1]):.0f} on a minibatch"
    )
    schemes = ("lie_trotter", "mt3") if quick else tuple(ORDERS)
    step_sizes = 0.08 / 2.0 ** np.arange(9, -1, -3 if quick else -1)
    found = bottleneck(problem, schemes, step_sizes)
    windows = (slice(0, 2),) if quick else (slice(0, 4), slice(3, 7))
    slope_table(found, step_sizes, windows)
    lengths = (1, 10) if quick else (1, 5, 10, 25, 50, 100)
    integration_lengths(problem, lengths, step_sizes[windows[0]], (0.005, 0.02))
    drawn_sizes = (0.04,) if quick else (0.08, 0.04, 0.02)
    drawn_schemes = schemes[:1] if quick else ("leapfrog", "lie_trotter", "mt3")
    drawn, itself = distances(
        problem, drawn_schemes, drawn_sizes, *((50, 1.0) if quick else (1000, 15.0))
    )
    figure = plot(toy_errors, toy_sizes, found, step_sizes, drawn, itself, drawn_sizes)
    if not quick:
        common.save(figure, "franzese2021")


if __name__ == "__main__":
    main()
