r"""Paulin, Whalley, Chada and Leimkuhler (2025), *Sampling from Bayesian neural network posteriors
with symmetric minibatch splitting Langevin dynamics*, AISTATS: minibatches in palindromic order.

Shown are the bias of posterior variances with independent, shuffled and palindromic minibatches,
its order in the step size, and the longest step at which no SD is wrong by more than a target. The
rows are dealt to K minibatches once, and gradients are minibatch gradients; all is in coordinates
in which the posterior covariance is the identity. The time of an epoch, K h, is in units of these
coordinates, in which positions are independent after about three.

On normal posteriors a step is linear, and its moments are exact: with constant noise (*a mean*),
and with minibatches whose Hessians differ (*a slope*). On others chains are simulated; references
are by quadrature.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import output
import scipy.linalg
import scipy.optimize
from epochs import first_epoch, next_batches
from jax import Array, random
from jax.scipy.special import gammaln
from linear_steps import Affine, jacobians, linearized

from numpyro_sgmcmc.data.subsampling import (
    IIDSubsampling,
    PalindromeSubsampling,
    ShuffledSubsampling,
)
from numpyro_sgmcmc.dynamics import UnderdampedLangevin

DYNAMICS = UnderdampedLangevin()
ORDERS = {
    "independent": IIDSubsampling(),
    "shuffled": ShuffledSubsampling(),
    "palindrome": PalindromeSubsampling(),
}

# Exact: the mean of a normal, where minibatches differ in their slopes alone


def variance_bias_of_a_mean(order: str, integrator: str, h: float, num_batches: int) -> float:
    """Relative bias of the variance over all steps; a gradient has the variance K."""
    by = jacobians(DYNAMICS, integrator, h, np.eye(1))
    matrix, slope, noise = (np.asarray(x) for x in by)
    noise, slope = noise @ noise.T, slope[:, 0]
    if np.abs(np.linalg.eigvals(matrix)).max() >= 1:
        return np.inf
    if order == "independent":
        forcing = noise + num_batches * np.outer(slope, slope)
        return scipy.linalg.solve_discrete_lyapunov(matrix, forcing)[0, 0] - 1
    batches = np.arange(num_batches)
    if order == "palindrome":
        batches = np.concatenate([batches, batches[::-1]])
    # Noise of the minibatches of an epoch sums to zero.
    centering = np.sqrt(num_batches**2 / (num_batches - 1)) * (
        np.eye(num_batches) - 1 / num_batches
    )
    power, by_batch, covariance = np.eye(len(matrix)), np.zeros((len(matrix), num_batches)), 0.0
    steps = []
    for batch in batches:
        power, by_batch = matrix @ power, matrix @ by_batch
        by_batch[:, batch] += slope
        covariance = matrix @ covariance @ matrix.T + noise if steps else noise
        centered = by_batch @ centering
        steps.append((power, covariance + centered @ centered.T))
    end = scipy.linalg.solve_discrete_lyapunov(*steps[-1])
    return np.mean([(m @ end @ m.T + c)[0, 0] for m, c in steps]) - 1


# Exact: the slope of a regression, whose minibatches differ in their Hessians as well


def variance_bias_of_a_slope(order: str, integrator: str, h: float, num_batches: int) -> float:
    """Relative bias of the variance over all steps, on 20 rows per minibatch."""
    rng = np.random.default_rng(0)
    x, error = rng.standard_normal((2, num_batches, 20))
    precision = np.square(x).sum()
    slopes = (x * (error - x * (x * error).sum() / precision)).sum(1) / -np.sqrt(precision)
    curvatures = np.square(x).sum(1) / precision
    return variance_bias(order, integrator, h, num_batches * curvatures, num_batches * slopes)


def variance_bias(
    order: str, integrator: str, h: float, curvatures: np.ndarray, slopes: np.ndarray
) -> float:
    """Relative bias of the variance over all steps on minibatches of mean curvature one.

    A step is a linear map of second moments. The mean over all permutations of a set of minibatches
    is the mean, over the first of them, of its map before (and after, of a palindrome) the mean of
    the others'. A second part of the vector sums the moments of all steps.

    :param slopes: of the minibatches' potentials at the posterior mean.
    """
    num_batches = len(slopes)
    maps = []
    for k in range(num_batches):
        step = linearized(DYNAMICS, integrator, h, curvatures[k, None, None], slopes[k, None])
        one = moment_map(step)
        maps.append(np.block([[one, np.zeros_like(one)], [one, np.eye(len(one))]]))
    size = len(maps[0]) // 2
    if order == "independent":
        mean, num_steps = sum(maps) / num_batches, 1
    else:
        means = {frozenset(): np.eye(2 * size)}
        for n in range(1, num_batches + 1):
            means = {
                frozenset(chosen): sum(
                    (maps[k] if order == "palindrome" else np.eye(2 * size))
                    @ means[frozenset(chosen) - {k}]
                    @ maps[k]
                    for k in chosen
                )
                / n
                for chosen in itertools.combinations(range(num_batches), n)
            }
        (mean,) = means.values()
        num_steps = num_batches * (1 + (order == "palindrome"))
    end = mean[:size, :size]
    if np.abs(np.linalg.eigvals(end[:-1, :-1])).max() >= 1:
        return np.inf
    fixed = np.linalg.solve(np.eye(size - 1) - end[:-1, :-1], end[:-1, -1])
    moments = (mean[size:, :size] @ np.append(fixed, 1.0) / num_steps).reshape(3, 3)
    return moments[0, 0] - moments[0, -1] ** 2 - 1


def moment_map(step: Affine) -> np.ndarray:
    """The matrix of a step on flat second moments, whose last entry is one."""
    matrix = np.kron(step.matrix, step.matrix)
    matrix[:, -1] += step.noise.ravel()
    return matrix


def print_orders(bias: Callable, caption: str, num_batches: int, times: np.ndarray) -> None:
    """Bias at halved step sizes, and its order from the one before."""
    rows = []
    h = times / num_batches
    biases = {order: np.array([bias(order, "ubu", x, num_batches) for x in h]) for order in ORDERS}
    for i, time in enumerate(times):
        row = [f"{time:.3g}", f"{h[i]:.3g}"]
        for values in biases.values():
            cell = f"{values[i]:+.1e}"
            if i and values[i] * values[i - 1] < 0:
                cell += " (sign changes)"
            elif i and np.isfinite(values[i - 1]):
                cell += f" ({np.log2(values[i - 1] / values[i]):.2f})"
            row.append(cell)
        rows.append(row)
    header = ["time of an epoch", "h", *ORDERS]
    output.print_table(f"{caption}, K = {num_batches}: bias of the variance (order)", header, rows)


def longest_step(bias: Callable, target: float, grid: np.ndarray) -> float:
    """The longest step up to which the SD is right within the target."""
    errors = np.array([abs(np.sqrt(1 + bias(h)) - 1) for h in grid])
    beyond = np.argmax(errors > target)
    if beyond == 0:
        raise ValueError("The step sizes do not include the longest.")
    log_h = np.log(grid[beyond - 1 : beyond + 1])
    return float(np.exp(np.interp(target, errors[beyond - 1 : beyond + 1], log_h)))


def print_exact_steps(integrator: str, sizes: tuple[int, ...]) -> None:
    """The longest steps on a normal mean."""
    rows = []
    for num_batches, target in itertools.product(sizes, (0.05, 0.01, 0.002)):
        row = [num_batches, f"{100 * target:g}%"]
        for order in ORDERS:
            grid = np.geomspace(0.002, 5.0, 80) / num_batches
            bias = partial(variance_bias_of_a_mean, order, integrator, num_batches=num_batches)
            row.append(f"{longest_step(bias, target, grid):.3g}")
        row.append(f"{float(row[-1]) / float(row[-2]):.2f}")
        rows.append(row)
    header = ["K", "error of the SD", *ORDERS, "palindrome / shuffled"]
    output.print_table(f"A normal mean, {integrator}: longest step", header, rows)


# Simulated: posteriors of one or two parameters


class Problem(NamedTuple):
    """Rows, and the log density of one; the prior is N(0, 10)."""

    rows: np.ndarray  # shape `(n, columns)`
    log_density: Callable[[Array, Array], Array]
    dim: int


class Posterior(NamedTuple):
    """A posterior in coordinates of unit covariance, its rows dealt to minibatches."""

    batches: Array  # shape `(K, B, columns)`
    mean: np.ndarray
    factor: np.ndarray  # of the covariance
    gradient: Callable[[Array, Array], Array]  # of the potential, by position and minibatch


def problems() -> dict[str, Problem]:
    """Six regressions and samples of 200 rows."""
    rng = np.random.default_rng(1)
    n = 200
    x, error = rng.standard_normal((2, n))
    uniform, heavy = rng.uniform(size=n), rng.standard_t(5, n)

    def linear(q: Array, row: Array) -> Array:
        return -jnp.square(row[1] - q[0] - q[1] * row[0]) / 2

    def logistic(q: Array, row: Array) -> Array:
        return -jax.nn.softplus((1 - 2 * row[1]) * (q[0] + q[1] * row[0]))

    def poisson(q: Array, row: Array) -> Array:
        log_rate = q[0] + q[1] * row[0]
        return row[1] * log_rate - jnp.exp(log_rate)

    def student(q: Array, row: Array) -> Array:
        return -q[1] - 2.5 * jnp.log1p(jnp.square((row[0] - q[0]) * jnp.exp(-q[1])) / 4)

    def gamma(q: Array, row: Array) -> Array:
        shape = jnp.exp(q[1])
        scaled = row[0] * jnp.exp(-q[0])
        return shape * (q[1] + jnp.log(scaled) - scaled) - gammaln(shape)

    def mean(q: Array, row: Array) -> Array:
        return -jnp.square(row[0] - q[0]) / 2

    return {
        "normal mean": Problem(error[:, None], mean, 1),
        "linear, heavy-tailed x": Problem(np.stack([heavy, heavy + error], 1), linear, 2),
        "logistic": Problem(np.stack([x, uniform < 1 / (1 + np.exp(-x))], 1), logistic, 2),
        "Poisson": Problem(np.stack([x, rng.poisson(np.exp(0.5 * x))], 1), poisson, 2),
        "Student t, unknown scale": Problem(rng.standard_t(4, (n, 1)), student, 2),
        "gamma, unknown shape": Problem(rng.gamma(0.7, size=(n, 1)), gamma, 2),
    }


def skewed() -> Problem:
    """Ten counts with a mean of 0.5, whose log rate has a skewed posterior."""
    counts = np.array([0, 1, 0, 0, 1, 0, 2, 0, 1, 0.0])
    return Problem(counts[:, None], lambda q, row: row[0] * q[0] - jnp.exp(q[0]), 1)


def solve(problem: Problem, num_batches: int, points: int = 161) -> Posterior:
    """Mean and covariance by quadrature on a grid about the mode."""
    rows, dim = jnp.asarray(problem.rows, float), problem.dim

    def potential(q: Array) -> Array:
        log_density = jax.vmap(partial(problem.log_density, q))(rows).sum()
        return jnp.square(q).sum() / 200 - log_density

    found = scipy.optimize.minimize(
        jax.jit(potential), np.zeros(dim), jac=jax.jit(jax.grad(potential)), tol=1e-10
    )
    at_mode = np.linalg.cholesky(np.linalg.inv(np.asarray(jax.hessian(potential)(found.x))))
    axis = np.linspace(-9.0, 9.0, points)
    grid = np.stack(np.meshgrid(*[axis] * dim), -1).reshape(-1, dim) @ at_mode.T + found.x
    energies = np.asarray(jax.jit(lambda g: jax.lax.map(potential, g, batch_size=256))(grid))
    weights = np.exp(energies.min() - energies)
    mean = np.average(grid, 0, weights)
    factor = np.linalg.cholesky(np.cov(grid.T, aweights=weights, ddof=0).reshape(dim, dim))
    order = np.random.default_rng(2).permutation(len(rows))
    batches = problem.rows[order].reshape(num_batches, -1, problem.rows.shape[1])

    def batch_potential(q: Array, batch: Array) -> Array:
        q = jnp.asarray(mean, q.dtype) + jnp.asarray(factor, q.dtype) @ q
        log_density = jax.vmap(partial(problem.log_density, q))(batch).sum()
        return jnp.square(q).sum() / 200 - num_batches * log_density

    gradient = jax.grad(batch_potential)
    return Posterior(jnp.asarray(batches, jnp.float32), mean, factor, gradient)


@partial(jax.jit, static_argnames=("gradient", "order", "integrator", "num_steps"))
def simulate(
    batches: Array,
    gradient: Callable,
    order: str,
    integrator: str,
    h: Array,
    starts: Array,
    num_steps: int,
) -> tuple[Array, Array]:
    """Mean and second moment of each chain over the last two thirds of the steps."""
    step, num_batches = DYNAMICS.make_step(integrator), len(batches)
    num_chains, dim = starts.shape
    streams = first_epoch(random.key(1), num_batches, num_chains)
    _, chosen = next_batches(streams, num_batches, num_steps, ORDERS[order])
    burn_in = num_steps // 3

    def run_step(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        state, first, second = carry
        batch, key, index = xs
        normals = random.normal(key, (num_chains, step.num_noise, dim), jnp.float32)

        def one(state: tuple, k: Array, normals: Array) -> tuple:
            return step(state, h, lambda q: gradient(q, batches[k]), normals)

        state = jax.vmap(one)(state, batch, normals)
        q = jnp.where(index >= burn_in, state.position, 0.0)
        return (state, first + q, second + q[:, :, None] * q[:, None, :]), None

    state = jax.vmap(DYNAMICS.init)(starts, random.split(random.key(2), num_chains))
    zeros = jnp.zeros_like(starts), jnp.zeros((num_chains, dim, dim), jnp.float32)
    keys = random.split(random.key(3), num_steps)
    (_, first, second), _ = jax.lax.scan(
        run_step, (state, *zeros), (chosen, keys, jnp.arange(num_steps))
    )
    return first / (num_steps - burn_in), second / (num_steps - burn_in)


def simulated_variance_bias(
    posterior: Posterior, order: str, integrator: str, h: float, time: float, num_chains: int
) -> tuple[np.ndarray, np.ndarray]:
    """Relative bias of each parameter's variance, and its standard error over chains."""
    dim = len(posterior.mean)
    starts = random.normal(random.key(0), (num_chains, dim), jnp.float32)
    # A few lengths, so that few programs are compiled.
    num_steps = 2 ** int(np.ceil(np.log2(time / h)))
    first, second = simulate(
        posterior.batches, posterior.gradient, order, integrator, jnp.float32(h), starts, num_steps
    )
    first, second = (np.asarray(x, float) for x in (first, second))
    factor = posterior.factor
    centered = second - 2 * first[:, :, None] * first.mean(0) + np.outer(*[first.mean(0)] * 2)
    variances = np.einsum("ij,cjk,ik->ci", factor, centered, factor) / np.square(factor).sum(1)
    return variances.mean(0) - 1, variances.std(0) / np.sqrt(num_chains)


def print_measured_orders(quick: bool) -> None:
    """Orders on a skewed posterior: the log rate of ten counts in five minibatches."""
    posterior, rows = solve(skewed(), 5), []
    step_sizes = np.array([0.8, 0.4]) if quick else np.array([0.56, 0.4, 0.28, 0.2, 0.14])
    chains, time = (50, 20.0) if quick else (6000, 100.0)
    for order in ORDERS:
        found = [
            simulated_variance_bias(posterior, order, "ubu", h, time, chains) for h in step_sizes
        ]
        bias, error = (np.array(x)[:, 0] for x in zip(*found, strict=True))
        slopes = np.diff(np.log(np.abs(bias))) / np.diff(np.log(step_sizes))
        cells = [f"{b:+.4f} ± {e:.4f}" for b, e in zip(bias, error, strict=True)]
        rows.append([order, *cells, ", ".join(f"{s:.2f}" for s in slopes)])
    header = ["", *[f"h = {h:g}" for h in step_sizes], "orders"]
    output.print_table("A skewed posterior: bias of the variance", header, rows)


def print_steps(quick: bool) -> None:
    """The longest step at 5% error of the SDs on six posteriors, in 20 minibatches of ten rows."""
    rows, target = [], 0.05
    for name, problem in list(problems().items())[: 1 if quick else None]:
        posterior, row = solve(problem, 20), [name]
        found = {}
        for order in ORDERS:
            time, chains = (10.0, 20) if quick else (40.0, 1500)
            shortest = 0.008 if order == "independent" else 0.05
            errors = [0.0]
            for h in shortest * 1.2 ** np.arange(2 if quick else 15):
                bias, standard_error = simulated_variance_bias(
                    posterior, order, "ubu", h, time, chains
                )
                by_parameter = np.abs(np.sqrt(np.maximum(1 + bias, 0)) - 1)
                errors.append(by_parameter.max())
                if not errors[-1] <= target:
                    break
            slope = np.log(1.2) / (errors[-1] - errors[-2])
            found[order] = h * np.exp(slope * (target - errors[-1]))
            relative = slope * standard_error[by_parameter.argmax()] / 2
            row.append(f"{found[order]:.4f} ± {abs(found[order] * relative):.4f}")
        row.append(f"{found['palindrome'] / found['shuffled']:.2f}")
        row.append(f"{found['palindrome'] / found['independent']:.1f}")
        rows.append(row)
        print(row, flush=True)
    header = ["", *ORDERS, "palindrome / shuffled", "palindrome / independent"]
    output.print_table("Longest step at 5% error of the SDs, UBU", header, rows)


def main() -> None:
    """Everything."""
    jax.config.update("jax_enable_x64", True)
    args = output.arguments(__doc__)
    output.print_title("Paulin et al. (2025): palindromic minibatches")
    times = np.array([16.0, 8, 4, 2, 1, 0.5, 0.25, 0.125])
    print_orders(variance_bias_of_a_mean, "A mean", 5 if args.quick else 100, times)
    print_orders(variance_bias_of_a_slope, "A slope", 3 if args.quick else 8, times[1:] / 1.25)
    for integrator in ("ubu", "symmetric"):
        print_exact_steps(integrator, (5,) if args.quick else (5, 20, 100))
    print_measured_orders(args.quick)
    print_steps(args.quick)


if __name__ == "__main__":
    main()
