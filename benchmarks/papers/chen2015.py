r"""Chen, Ding and Carin (2015), *On the convergence of stochastic gradient MCMC algorithms with
high-order integrators*, NeurIPS: the experiments on synthetic data, Figures 1-3 and 5-8.

The model is :math:`x_i \sim N(\theta, 1)`, :math:`\theta \sim N(0, 1)`, with 1,000 points,
minibatches of 10 and the test function :math:`\phi(\theta) = \theta^2`, whose posterior mean is
known. Shown are the bias of the invariant measure against the step size, and bias and mean
squared error (MSE) against the number of steps L, for step sizes :math:`h_l = h_0 l^{-\alpha}`
(averages weighted by step size) and :math:`h = h_0 L^{-\alpha}`.

Where the paper is silent: the data come from :math:`\theta = 0`, so that the spread of
:math:`\phi` does not hide its bias; the friction is 30, of the paper's 10, 20 and 30; chains start
at half the posterior's standard deviation, where the two terms of the full gradient's bias have
one sign. The prefactors 0.033 and 0.045 are the paper's. The rows are dealt to 100 minibatches
once; a step takes the *full* gradient, a minibatch at random (*iid*), or the next of a random
order that is drawn anew each *epoch*.

A step is linear in state and noise here, so its moments obey a recursion, whose matrices are the
jacobians of the library's own step: "exact" numbers have no Monte Carlo error. They treat the
noise of minibatches as Gaussian, which is exact for the bias and close for the MSE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from common import Slope, arguments, fit_slope, print_table, print_title, save
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.dynamics import Dynamics, Overdamped, Underdamped
from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.samplers.schedules import Polynomial, best_exponent

jax.config.update("jax_enable_x64", True)

NUM_ROWS, BATCH_SIZE = 1000, 10
NUM_BATCHES = NUM_ROWS // BATCH_SIZE
X = np.random.default_rng(0).normal(size=NUM_ROWS)
BATCHES = np.arange(NUM_ROWS).reshape(NUM_BATCHES, BATCH_SIZE)
PRECISION = NUM_ROWS + 1.0
MEAN = X.sum() / PRECISION
NOISE = NUM_ROWS**2 * X[BATCHES].mean(1).var()
"""Variance of the minibatch gradient."""

FRICTION = 30.0
START = 0.5
ALPHAS = (0.1, 1 / 5, 1 / 3, 1 / 2, 0.7)
GROUPS = 20
"""Groups of runs, left out one at a time for standard errors."""


class Sampler(NamedTuple):
    """A dynamic and its scheme."""

    dynamics: Dynamics
    scheme: str


SGHMC = Sampler(Underdamped(FRICTION), "symmetric")
EULER = Sampler(Underdamped(FRICTION), "euler")
EXPLICIT = Sampler(Underdamped(FRICTION), "explicit_euler")
SGLD = Sampler(Overdamped(), "euler")


class Steps(NamedTuple):
    """Step sizes ``initial * l ** -exponent`` of lanes that run side by side, each ``(lanes,)``."""

    initial: Array
    exponent: Array

    def at(self, count: Any) -> Array:
        return Polynomial(self.initial, self.exponent)(count)


class Averages(NamedTuple):
    """
    - **squares** - averages of ``(theta - MEAN) ** 2 - 1 / PRECISION``, ``(stops, lanes, runs)``.
    - **offsets** - averages of ``theta - MEAN``, of the same shape.
    """

    squares: np.ndarray
    offsets: np.ndarray


def batch_gradient(rows: Array) -> GradientFn:
    """The gradient's estimate from these rows."""
    return lambda theta: theta + NUM_ROWS * (theta - jnp.asarray(X)[rows].mean())


def full_gradient(theta: Array) -> Array:
    return PRECISION * (theta - MEAN)


def segments(stops: Array) -> tuple[Array, Array]:
    return jnp.append(0, stops[:-1]), stops


@partial(jax.jit, static_argnames=("sampler", "order", "runs"))
def simulate(
    rng_key: Array,
    sampler: Sampler,
    order: str,
    steps: Steps,
    stops: Array,
    runs: int,
    burn_in: int = 0,
    start: float = START,
) -> Averages:
    """Weighted averages up to each stop, of independent runs; lanes share their noise."""
    dynamics, step = sampler.dynamics, sampler.dynamics.step(sampler.scheme)
    key, start_key, momentum_key = random.split(rng_key, 3)
    offset = random.normal(start_key, (runs, 1)) * start / np.sqrt(PRECISION)
    states = jax.vmap(dynamics.init)(MEAN + offset, random.split(momentum_key, runs))
    lanes = len(steps.initial)
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), states)

    def move(state: Any, h: Array, batch: Array, noise: Array) -> Any:
        gradient = full_gradient if order == "full" else batch_gradient(jnp.asarray(BATCHES)[batch])
        return step(state, h, gradient, noise)

    over_runs = jax.vmap(move, (0, None, 0, 0))
    over_lanes = jax.vmap(over_runs, (0, 0, None, None))

    def one(l: Array, carry: Any) -> Any:
        states, deck, squares, offsets, weights = carry
        noise_key, batch_key = random.split(random.fold_in(key, l))
        noise = random.normal(noise_key, (runs, step.draws, 1))
        if order == "epoch":
            deck = lax.cond(
                l % NUM_BATCHES == 0,
                lambda: jnp.argsort(random.bits(batch_key, deck.shape), axis=1),
                lambda: deck,
            )
            batch = deck[:, l % NUM_BATCHES]
        else:
            batch = random.randint(batch_key, (runs,), 0, NUM_BATCHES)
        h = steps.at(l)
        states = over_lanes(states, h, batch, noise)
        off = states.position[..., 0] - MEAN
        w = jnp.where(l >= burn_in, h, 0.0)[:, None]
        squares = squares + w * (off**2 - 1.0 / PRECISION)
        return states, deck, squares, offsets + w * off, weights + w

    def segment(carry: Any, ends: tuple[Array, Array]) -> tuple[Any, Averages]:
        carry = lax.fori_loop(*ends, one, carry)
        *_, squares, offsets, weights = carry
        return carry, Averages(squares / weights, offsets / weights)

    deck = jnp.zeros((runs, NUM_BATCHES if order == "epoch" else 0), int)
    zeros = jnp.zeros((lanes, runs))
    carry = (states, deck, zeros, zeros, jnp.zeros((lanes, 1)))
    return lax.scan(segment, carry, segments(stops))[1]


class Moments(NamedTuple):
    """
    - **covariance** - of the state and, last, the sum of the epoch's gradient noise so far.
    - **quadratic** - sum of ``w c c^T``; c the covariance of the state with a past position.
    - **linear** - sum of ``w c``.
    - **weight** - sum of the weights w.
    - **bias** - sum of the weighted biases.
    - **variance** - variance of the weighted sum.
    """

    covariance: Array
    quadratic: Array
    linear: Array
    weight: Array
    bias: Array
    variance: Array


def jacobians(sampler: Sampler, h: Array) -> tuple[Array, Array, Array]:
    """The step's matrices for the state, the gradient's noise and the injected noise."""
    step = sampler.dynamics.step(sampler.scheme)
    state, unravel = ravel_pytree(sampler.dynamics.init(jnp.zeros(1), random.key(0)))

    def move(z: Array, offset: Array, noise: Array) -> Array:
        return ravel_pytree(step(unravel(z), h, lambda q: PRECISION * q + offset, noise))[0]

    zero = jnp.zeros_like(state), jnp.zeros(()), jnp.zeros((step.draws, 1))
    T, b, c = jax.jacfwd(move, (0, 1, 2))(*zero)
    return T, b, c.reshape(len(state), -1)


def advance(
    sampler: Sampler, order: str, burn_in: int, l: Array, h: Array, past: Moments
) -> Moments:
    """The moments after one more step."""
    T, b, c = jacobians(sampler, h)
    n = len(T)
    A = jnp.zeros((n + 1, n + 1)).at[:n, :n].set(T)
    C = jnp.zeros((n + 1, c.shape[1])).at[:n].set(c)
    if order == "epoch":
        # Drawn without replacement: what is left of the epoch balances what has been drawn.
        left = NUM_BATCHES - l % NUM_BATCHES
        A = A.at[:n, n].set(-b / left).at[n, n].set(1.0 - 1.0 / left)
        noise = NOISE * NUM_BATCHES / (NUM_BATCHES - 1.0) * (left - 1.0) / left
        kick = jnp.append(b, 1.0)
    else:
        noise = NOISE if order == "iid" else 0.0
        kick = jnp.append(b, 0.0)
    P = A @ past.covariance @ A.T + C @ C.T + noise * jnp.outer(kick, kick)
    quadratic, linear = A @ past.quadratic @ A.T, A @ past.linear
    w = jnp.where(l >= burn_in, h, 0.0)
    # phi is (theta - MEAN)^2 + 2 MEAN (theta - MEAN) and a constant; Isserlis' theorem.
    with_past = 2.0 * quadratic[0, 0] + 4.0 * MEAN**2 * linear[0]
    own = 2.0 * P[0, 0] ** 2 + 4.0 * MEAN**2 * P[0, 0]
    return Moments(
        P,
        quadratic + w * jnp.outer(P[0], P[0]),
        linear + w * P[0],
        past.weight + w,
        past.bias + w * (P[0, 0] - 1.0 / PRECISION),
        past.variance + 2.0 * w * with_past + w**2 * own,
    )


@partial(jax.jit, static_argnames=("sampler", "order"))
def exact(
    sampler: Sampler,
    order: str,
    steps: Steps,
    stops: Array,
    burn_in: int = 0,
    start: float = START,
) -> tuple[Array, Array]:
    """Bias and MSE of the weighted averages up to each stop, shape ``(stops, lanes)``."""
    one = jax.vmap(partial(advance, sampler, order, burn_in), (None, 0, 0))

    def segment(past: Moments, ends: tuple[Array, Array]) -> tuple[Moments, tuple[Array, Array]]:
        past = lax.fori_loop(*ends, lambda l, m: one(l, steps.at(l), m), past)
        bias = past.bias / past.weight
        return past, (bias, past.variance / past.weight**2 + bias**2)

    n = len(jacobians(sampler, 0.0)[0])
    diagonal = jnp.array([start**2 / PRECISION, *[1.0] * (n - 1), 0.0])
    matrix, zero = jnp.zeros((n + 1, n + 1)), jnp.zeros(())
    first = Moments(jnp.diag(diagonal), matrix, matrix[0], zero, zero, zero)
    lanes = len(steps.initial)
    first = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), first)
    return lax.scan(segment, first, segments(stops))[1]


def bias_of(averages: Averages) -> np.ndarray:
    """The bias over runs (the last axis), by the part of phi whose mean is not zero anyway."""
    return averages.squares.mean(-1)


def mse_of(averages: Averages) -> np.ndarray:
    return np.square(averages.squares + 2.0 * MEAN * averages.offsets).mean(-1)


class Estimate(NamedTuple):
    """A statistic over runs, its leave-one-group-out values (first axis) and standard error."""

    value: np.ndarray
    left_out: np.ndarray

    @property
    def error(self) -> np.ndarray:
        return jackknife_error(self.left_out)


def jackknife_error(left_out: np.ndarray) -> np.ndarray:
    return np.sqrt((len(left_out) - 1.0) * np.var(left_out, axis=0))


def estimate(averages: Averages, statistic: Callable[[Averages], np.ndarray]) -> Estimate:
    group = np.arange(averages.squares.shape[-1]) % GROUPS
    kept = [Averages(*(a[..., group != g] for a in averages)) for g in range(GROUPS)]
    return Estimate(statistic(averages), np.stack([statistic(k) for k in kept]))


def slope_of(x: np.ndarray, found: Estimate) -> Slope:
    """Slope over the first axis, by weighted least squares.

    Points that share their noise are not independent: the standard error is the jackknife's.
    """

    def slope(y: np.ndarray) -> float:
        return fit_slope(x, np.abs(y), found.error).value

    left_out = np.array([slope(y) for y in found.left_out])
    return Slope(slope(found.value), float(jackknife_error(left_out)))


def pick(found: Estimate, part: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    return Estimate(part(found.value), np.stack([part(y) for y in found.left_out]))


class Curve(NamedTuple):
    """
    - **x** - step sizes or numbers of steps, shape ``(n,)``.
    - **simulated** - values with their standard errors, at each x.
    - **exact** - values without Monte Carlo error, at each x.
    """

    x: np.ndarray
    simulated: Estimate
    exact: np.ndarray

    @property
    def slope(self) -> Slope:
        return slope_of(self.x, self.simulated)

    @property
    def exact_slope(self) -> float:
        """Over the simulated range, with the same weights."""
        return fit_slope(self.x, np.abs(self.exact), self.simulated.error).value

    @property
    def within(self) -> tuple[int, int]:
        """How many simulated values lie within two standard errors of the exact, and of all."""
        close = np.abs(self.simulated.value - self.exact) < 2.0 * self.simulated.error
        return int(close.sum()), close.size


def constant(values: Any) -> Steps:
    return Steps(jnp.asarray(values), jnp.zeros(np.shape(values)))


def end_slope(x: Sequence[float], y: np.ndarray) -> float:
    """Slope between the last two points."""
    return float(np.log(np.abs(y[-1] / y[-2])) / np.log(x[-1] / x[-2]))


# The invariant measure

LIMIT = np.array([1e-5, 2e-5])
NOISY = np.array([2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 2e-3])
INTEGRATORS = {"symmetric": SGHMC, "Euler": EULER, "explicit Euler": EXPLICIT}
CASES = [
    ("full", "symmetric", 2, np.array([1e-2, 1.5e-2, 2e-2, 2.5e-2, 3e-2, 4e-2])),
    ("full", "Euler", 1, np.array([3e-3, 4e-3, 6e-3, 8e-3, 1e-2, 1.5e-2])),
    ("full", "explicit Euler", 1, np.array([5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3])),
    ("iid", "symmetric", 2, NOISY),
    ("epoch", "symmetric", 2, NOISY),
    ("iid", "Euler", 1, NOISY),
    ("epoch", "Euler", 1, NOISY),
]
"""Gradient, integrator, the paper's order and step sizes at which the bias can be measured."""


def relative_bias(sampler: Sampler, order: str, h: np.ndarray, num_steps: int) -> np.ndarray:
    """Exact bias of phi over the posterior variance, averaged over the last steps."""
    burn_in = num_steps - 10 * NUM_BATCHES
    found = exact(sampler, order, constant(h), jnp.array([num_steps]), burn_in, 1.0)
    return PRECISION * np.asarray(found[0][0])


def simulated_bias(
    rng_key: Array, sampler: Sampler, order: str, h: np.ndarray, quick: bool
) -> Estimate:
    """As :func:`relative_bias`, simulated."""
    runs, num_steps = (100, 2000) if quick else (2000 if order == "full" else 600, 30_000)
    stops, burn_in = jnp.array([num_steps]), num_steps // 5
    averages = simulate(rng_key, sampler, order, constant(h), stops, runs, burn_in, 1.0)
    return estimate(averages, lambda a: PRECISION * bias_of(a)[0])


def largest_step_size(sampler: Sampler) -> float:
    """The step size beyond which the full gradient's step is unstable."""
    grid = np.linspace(1e-3, 0.15, 1491)
    T = jax.jit(jax.vmap(lambda h: jacobians(sampler, h)[0]))(jnp.asarray(grid))
    radius = np.abs(np.linalg.eigvals(np.asarray(T))).max(-1)
    return float(grid[radius < 1.0].max())


def figure_1(quick: bool) -> dict[tuple[str, str], Curve]:
    curves, rows = {}, []
    for k, (order, name, theory, h) in enumerate(CASES[:1] + CASES[4:5] if quick else CASES):
        sampler = INTEGRATORS[name]
        truth = relative_bias(sampler, order, np.concatenate([LIMIT, h]), 100_000)
        found = simulated_bias(random.key(k), sampler, order, h, quick)
        curve = curves[order, name] = Curve(h, found, truth[2:])
        span, limit = f"{h[0]:g} to {h[-1]:g}", f"{end_slope(LIMIT, truth[:2]):.2f}"
        cells = curve.slope, f"{curve.exact_slope:.2f}", limit, theory
        rows.append((order, name, span, *cells))
    print_table(
        "Figure 1: order of the bias of the invariant measure in the step size h",
        ("gradient", "integrator", "h", "simulated", "exact", "exact, h to 0", "paper"),
        rows,
    )
    print_table(
        "Figure 1: Euler explodes at smaller steps (full gradient)",
        ("integrator", "largest stable h"),
        [(name, f"{largest_step_size(s):.4f}") for name, s in INTEGRATORS.items()],
    )
    return curves


# Bias and mean squared error against the number of steps

PREFACTORS = {"decreasing": 0.045, "fixed": 0.033}
STOPS = np.array([100, 300, 1000, 3000])
EXACT_STOPS = np.array([100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000])
Rates: TypeAlias = dict[tuple[str, str, str], list[Curve]]
"""A curve for each alpha, by criterion, gradient and kind of step size."""


def fixed_steps(prefactor: float, alphas: Sequence[float], num_steps: Any) -> np.ndarray:
    return prefactor * np.asarray(num_steps, float)[..., None] ** -np.asarray(alphas)


def exact_rates(
    sampler: Sampler, order: str, kind: str, prefactor: float, alphas: Sequence[float], stops: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Bias and MSE at each stop, shape ``(stops, alphas)``, over powers of the variance."""
    if kind == "decreasing":
        steps = Steps(jnp.full(len(alphas), prefactor), jnp.asarray(alphas))
        found = exact(sampler, order, steps, jnp.asarray(stops))
    else:
        h = fixed_steps(prefactor, alphas, stops)
        found = exact(sampler, order, constant(h.ravel()), jnp.asarray(stops))
        diagonal = np.arange(len(stops))
        found = tuple(np.asarray(y).reshape(-1, *h.shape)[diagonal, diagonal] for y in found)
    bias, mse = map(np.asarray, found)
    return PRECISION * bias, PRECISION**2 * mse


def simulated_rates(
    rng_key: Array,
    sampler: Sampler,
    order: str,
    kind: str,
    prefactor: float,
    alphas: Sequence[float],
    stops: np.ndarray,
    runs: int,
) -> tuple[Estimate, Estimate]:
    """As :func:`exact_rates`, simulated."""
    if kind == "decreasing":
        steps = Steps(jnp.full(len(alphas), prefactor), jnp.asarray(alphas))
        averages = simulate(rng_key, sampler, order, steps, jnp.asarray(stops), runs)
    else:
        parts = [
            simulate(
                random.fold_in(rng_key, int(num_steps)),
                sampler,
                order,
                constant(fixed_steps(prefactor, alphas, num_steps)),
                jnp.array([num_steps]),
                runs,
            )
            for num_steps in stops
        ]
        averages = Averages(*(np.concatenate(field) for field in zip(*parts, strict=True)))
    return (
        estimate(averages, lambda a: PRECISION * bias_of(a)),
        estimate(averages, lambda a: PRECISION**2 * mse_of(a)),
    )


def rate(criterion: str, order: int, alpha: float) -> float:
    """The theory's exponent of L for an integrator of this order."""
    return -min(1.0 - alpha, order * alpha * (1 if criterion == "bias" else 2))


def rates(quick: bool) -> tuple[Rates, Rates]:
    """Curves over the simulated range, and exact ones over a longer one."""
    short: Rates = {}
    long: Rates = {}
    exact_stops = EXACT_STOPS[:5] if quick else EXACT_STOPS
    stops = STOPS[:2] if quick else STOPS
    for order in ("full", "iid"):
        runs = 100 if quick else {"full": 20_000, "iid": 4000}[order]
        for kind, prefactor in PREFACTORS.items():
            setting = SGHMC, order, kind, prefactor, ALPHAS
            found = simulated_rates(random.key(10), *setting, stops, runs)
            truth = exact_rates(*setting, exact_stops)
            for criterion, simulated, true in zip(("bias", "MSE"), found, truth, strict=True):
                key = criterion, order, kind
                at = range(len(ALPHAS))
                each = [pick(simulated, lambda y, i=i: y[..., i]) for i in at]
                short[key] = [Curve(stops, each[i], true[: len(stops), i]) for i in at]
                long[key] = [Curve(exact_stops, each[i], true[:, i]) for i in at]
    return short, long


def print_rates(criterion: str, short: Rates, long: Rates) -> None:
    rows = []
    for i, alpha in enumerate(ALPHAS):
        for kind in PREFACTORS:
            cells: list[Any] = [f"{alpha:.2f}", kind]
            for order, K in (("full", 2), ("iid", 1)):
                near, far = short[criterion, order, kind][i], long[criterion, order, kind][i]
                cells += [
                    f"{near.slope} ({near.exact_slope:.2f})",
                    f"{end_slope(far.x, far.exact):.2f}",
                    f"{rate(criterion, K, alpha):.2f}",
                ]
            rows.append(cells)
    first, last = next(iter(short.values()))[0].x[[0, -1]]
    end = next(iter(long.values()))[0].x[-2:]
    print_table(
        f"Figures 2, 5 and 7: exponent of L in the {criterion}; simulated from L = {first} to "
        f"{last} (exact there), exact from {end[0]:.0e} to {end[1]:.0e}, and the theory for "
        "order 2 and order 1",
        ("alpha", "steps", "full", "full, far", "K = 2", "iid", "iid, far", "K = 1"),
        rows,
    )


def print_best(long: Rates) -> None:
    rows = []
    for (criterion, order, kind), curves in long.items():
        slopes = [end_slope(c.x, c.exact) for c in curves]
        ends = [abs(c.exact[-1]) for c in curves]
        best = [f"{ALPHAS[int(np.argmin(values))]:.2f}" for values in (slopes, ends)]
        paper = best_exponent(2, criterion.lower())
        rows.append((criterion, order, kind, *best, f"{paper:.2f}"))
    last = next(iter(long.values()))[0].x[-1]
    print_table(
        f"The best alpha of those tried (exact, at L = {last:.0e})",
        ("what", "gradient", "steps", "falls fastest", "is smallest", "paper"),
        sorted(rows),
    )


# SGLD beside SGHMC

GRID = np.arange(1e-3, 0.5, 2e-3)
COMPARED = {"SGHMC": (SGHMC, 2), "SGLD": (SGLD, 1)}


def best_prefactor(sampler: Sampler, order: str, alpha: float) -> float:
    """As the paper's: of the least MSE after 500 steps."""
    h = GRID * 500.0**-alpha
    mse = np.asarray(exact(sampler, order, constant(h), jnp.array([500]))[1][0])
    return float(GRID[np.nanargmin(np.where(np.isfinite(mse), mse, np.inf))])


def figures_3_and_6(quick: bool) -> None:
    rows = []
    stops = STOPS[:2] if quick else STOPS
    far = np.array([1000, 3000] if quick else [10_000, 100_000])
    for order in ("full",) if quick else ("full", "iid"):
        for criterion in ("MSE",) if quick else ("bias", "MSE"):
            for name, (sampler, K) in COMPARED.items():
                alpha = best_exponent(K, criterion.lower())
                prefactor = best_prefactor(sampler, order, alpha)
                setting = sampler, order, "fixed", prefactor, (alpha,)
                which = ("bias", "MSE").index(criterion)
                runs = 100 if quick else 4000
                found = simulated_rates(random.key(20), *setting, stops, runs)[which]
                found = pick(found, lambda y: y[:, 0])
                near = Curve(stops, found, exact_rates(*setting, stops)[which][:, 0])
                true = exact_rates(*setting, far)[which][:, 0]
                rows.append(
                    (
                        order,
                        criterion,
                        name,
                        f"{prefactor:.3f} L^-{alpha:.2f}",
                        f"{found.value[-1]:.2g} ± {found.error[-1]:.1g} ({near.exact[-1]:.2g})",
                        f"{true[-1]:.2g}",
                        f"{end_slope(far, true):.2f}",
                        f"{rate(criterion, K, alpha):.2f}",
                    )
                )
    print_table(
        f"Figures 3 and 6: SGHMC and SGLD, fixed steps; at L = {stops[-1]} simulated (exact), at "
        f"{far[1]:.0e} exact, and the exponent of L from {far[0]:.0e}",
        (
            "gradient",
            "what",
            "sampler",
            "h",
            f"L = {stops[-1]}",
            f"L = {far[1]:.0e}",
            "exponent",
            "paper",
        ),
        rows,
    )


# Figure

LINES = {"full": "-", "iid": ":", "epoch": "-."}
MARKERS = {"full": "o", "iid": "s", "epoch": "^"}


def draw(biases: dict[tuple[str, str], Curve], long: Rates, short: Rates) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    draw_invariant(axes[0], biases)
    draw_rates(axes[1], "bias", "decreasing", long, short)
    draw_rates(axes[2], "MSE", "fixed", long, short)
    return figure


def draw_theory(ax: Any, x: Any, start: float, exponent: float, text: str) -> None:
    x = np.asarray(x, float)
    y = start * (x / x[0]) ** exponent
    ax.plot(x, y, "--", color="grey", lw=1)
    ax.annotate(text, (x[-1], y[-1]), xytext=(3, 0), textcoords="offset points", color="grey")


def draw_points(ax: Any, curve: Curve, order: str, colour: str) -> None:
    value, error = np.abs(curve.simulated.value), curve.simulated.error
    ax.errorbar(curve.x, value, error, fmt=MARKERS[order], ms=3, color=colour, capsize=2)


def draw_invariant(ax: Any, biases: dict[tuple[str, str], Curve]) -> None:
    colours = {"symmetric": "C0", "Euler": "C1", "explicit Euler": "C3"}
    for (order, name), curve in biases.items():
        top = 0.99 * largest_step_size(INTEGRATORS[name])
        h = np.geomspace(2e-4 if order == "full" else 1e-4, top, 60)
        y = np.abs(relative_bias(INTEGRATORS[name], order, h, 30_000))
        ax.plot(h, y, LINES[order], color=colours[name], label=f"{order}, {name}")
        draw_points(ax, curve, order, colours[name])
    draw_theory(ax, [5e-3, 5e-2], 2e-5, 1.0, "h")
    draw_theory(ax, [5e-3, 5e-2], 2e-5, 2.0, "h²")
    ax.set(xscale="log", yscale="log", xlabel="step size h", ylim=(1e-6, 1e6))
    ax.set(ylabel="|bias| / variance", title="Bias of the invariant measure (Fig. 1)")
    ax.legend(fontsize=8, loc="upper left", ncols=2)


def draw_rates(ax: Any, criterion: str, kind: str, long: Rates, short: Rates) -> None:
    for order in ("full", "iid"):
        for i, alpha in enumerate(ALPHAS):
            far, near = long[criterion, order, kind][i], short[criterion, order, kind][i]
            label = f"α = {alpha:.2f}" if order == "full" else None
            ax.plot(far.x, np.abs(far.exact), LINES[order], color=f"C{i}", label=label)
            draw_points(ax, near, order, f"C{i}")
    exponent, text = (-2 / 3, "$L^{-2/3}$") if criterion == "bias" else (-4 / 5, "$L^{-4/5}$")
    low = min(abs(c.exact[0]) for c in long[criterion, "full", kind])
    draw_theory(ax, EXACT_STOPS[[0, -1]], low / 3, exponent, text)
    ax.set(xscale="log", yscale="log", xlabel="steps L", xlim=(70, 5e6))
    ax.set(ylabel={"bias": "|bias| / variance", "MSE": "MSE / variance²"}[criterion])
    ax.set(title=f"{criterion[0].upper() + criterion[1:]}, {kind} steps (Fig. 2)")
    ax.legend(fontsize=8, loc="lower left", title="solid: full\ndotted: iid", title_fontsize=8)


def agreement(curves: Iterable[Curve]) -> str:
    close, total = np.sum([c.within for c in curves], axis=0)
    return f"{close} of {total}"


def main() -> None:
    quick = arguments(__doc__).quick
    print_title("Chen, Ding and Carin (2015): synthetic experiments")
    biases = figure_1(quick)
    short, long = rates(quick)
    for criterion in ("bias", "MSE"):
        print_rates(criterion, short, long)
    print_best(long)
    figures_3_and_6(quick)
    everything = [*biases.values(), *(c for curves in short.values() for c in curves)]
    print(f"simulated values within two standard errors of the exact: {agreement(everything)}")
    if not quick:
        save(draw(biases, long, short), "chen2015")


if __name__ == "__main__":
    main()
