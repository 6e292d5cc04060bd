"""A regression's marginal (Figure 7 of Zhang et al. 2017): naive slices, and Laplacian HMC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import output
from jax import Array, lax, random
from numpyro.infer import MCMC
from scipy.stats import ks_1samp, norm
from standard_errors import mean

from numpyro_sgmcmc import SGLaplaceHMC
from numpyro_sgmcmc.dynamics import MonomialGammaLangevin
from numpyro_sgmcmc.dynamics.langevin import Kinetics

NUM_ROWS, BATCH_SIZE = 100, 30
FRICTION, STEP_SIZE, SOFTENING, STEPS = 7.0, 0.1, 1.0, 10


class Regression(NamedTuple):
    """
    - **x** - covariates, shape ``(100,)``.
    - **y** - responses.
    - **mean** - the coefficient's posterior mean.
    - **sd** - its posterior standard deviation.
    - **noise** - variance of the minibatch gradient at the posterior mean.
    """

    x: np.ndarray
    y: np.ndarray
    mean: float
    sd: float
    noise: float


def make_regression() -> Regression:
    rng = np.random.default_rng(0)
    x = rng.normal(size=NUM_ROWS)
    y = x + rng.normal(size=NUM_ROWS)
    precision = x @ x + 1.0
    center = x @ y / precision
    slopes = x * (x * center - y)
    left_out = (NUM_ROWS - BATCH_SIZE) / (NUM_ROWS - 1)
    noise = NUM_ROWS**2 / BATCH_SIZE * slopes.var() * left_out
    return Regression(x, y, center, precision**-0.5, noise)


def batch_potential(data: Regression, rows: Array) -> Callable[[Array], Array]:
    """Minus the log posterior, estimated from these rows."""
    x, y = jnp.asarray(data.x)[rows], jnp.asarray(data.y)[rows]

    def value(beta: Array) -> Array:
        return beta**2 / 2 + NUM_ROWS / len(rows) * jnp.square(y - beta * x).sum() / 2

    return value


def draw_rows(key: Array, size: int) -> Array:
    return random.permutation(key, NUM_ROWS)[:size]


def slice_step(key: Array, data: Regression, beta: Array, batch_size: int) -> Array:
    """Doubling and shrinking (Neal 2003), on one minibatch.

    The slice is an interval, so that doubling needs no separate test.
    """
    row_key, level_key, place_key, side_key, key = random.split(key, 5)
    u = batch_potential(data, draw_rows(row_key, batch_size))
    level = u(beta) + random.exponential(level_key)
    left = beta - data.sd * random.uniform(place_key)

    def is_short(carry: Any) -> Array:
        left, right, _ = carry
        return (u(left) < level) | (u(right) < level)

    def double(carry: Any) -> Any:
        left, right, key = carry
        key, coin_key = random.split(key)
        goes_left = random.bernoulli(coin_key)
        width = right - left
        return left - width * goes_left, right + width * ~goes_left, key

    left, right, _ = lax.while_loop(is_short, double, (left, left + data.sd, side_key))

    def propose(carry: Any) -> Any:
        left, right, new, key = carry
        left, right = jnp.where(new < beta, new, left), jnp.where(new > beta, new, right)
        key, new_key = random.split(key)
        return left, right, random.uniform(new_key, minval=left, maxval=right), key

    key, new_key = random.split(key)
    new = random.uniform(new_key, minval=left, maxval=right)
    return lax.while_loop(lambda c: u(c[2]) >= level, propose, (left, right, new, key))[2]


def run_slices(key: Array, data: Regression, batch_size: int, runs: int, num: int) -> Array:
    """Draws, shape ``(runs, num)``."""

    def chain(key: Array) -> Array:
        def one(beta: Array, key: Array) -> tuple[Array, Array]:
            beta = slice_step(key, data, beta, batch_size)
            return beta, beta

        return lax.scan(one, jnp.asarray(data.mean), random.split(key, num))[1]

    return jax.jit(jax.vmap(chain))(random.split(key, runs))


def run_laplacian(
    key: Array, data: Regression, h: float, compensates: bool, runs: int, num: int
) -> Array:
    """Stochastic Laplacian HMC in the coefficient's own units, draws of shape ``(runs, num)``.

    :param compensates: whether less noise is injected for that of the gradient, equation (27).
    """
    dynamics = MonomialGammaLangevin(Kinetics(1.0, 1.0, SOFTENING), FRICTION)
    step = dynamics.make_step("symmetric")
    scale = np.sqrt(1.0 - h * data.noise / 2 / FRICTION) if compensates else 1.0

    def chain(key: Array) -> Array:
        start_key, key = random.split(key)

        def one(state: Any, key: Array) -> tuple[Any, None]:
            row_key, noise_key = random.split(key)
            gradient = jax.grad(
                lambda q: batch_potential(data, draw_rows(row_key, BATCH_SIZE))(q[0])
            )
            noise = scale * random.normal(noise_key, (step.num_noise, 1))
            return step(state, h, gradient, noise), None

        def iterate(state: Any, key: Array) -> tuple[Any, Array]:
            state, _ = lax.scan(one, state, random.split(key, STEPS))
            return state, state.position[0]

        state = dynamics.init(jnp.full(1, data.mean), start_key)
        return lax.scan(iterate, state, random.split(key, num))[1]

    return jax.jit(jax.vmap(chain))(random.split(key, runs))


def model(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x), subsample_size=BATCH_SIZE) as i:
        numpyro.sample("y", dist.Normal(beta * x[i], 1), obs=y[i])


def run_kernel(key: Array, data: Regression, gradient: str, runs: int, num: int) -> Array:
    """The package's kernel, which chooses mass, step size and steps itself."""
    kernel = SGLaplaceHMC(model, gradient_estimator=gradient, subsampling="iid")
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=num,
        num_chains=runs,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(key, jnp.asarray(data.x), jnp.asarray(data.y))
    return mcmc.get_samples(group_by_chain=True)["beta"]


def regression(quick: bool) -> None:
    """Print how the draws of each sampler differ from the posterior, in posterior SDs."""
    data = make_regression()
    runs, num = (20, 200) if quick else (100, 2000)
    variance_inflation = STEP_SIZE * data.noise / 2 / FRICTION
    keys = random.split(random.key(1), 7)
    half = STEP_SIZE / 2
    tasks: dict[str, tuple[Callable[[], Array], str]] = {
        "slices, all rows": (lambda: run_slices(keys[0], data, NUM_ROWS, runs, num), "1"),
        "naive slices": (lambda: run_slices(keys[1], data, BATCH_SIZE, runs, num), "above 1"),
        f"Laplacian, h = {STEP_SIZE:g}": (
            lambda: run_laplacian(keys[2], data, STEP_SIZE, False, runs, num),
            f"near 1; theory {1 + variance_inflation:.2f}",
        ),
        f"Laplacian, h = {half:g}": (
            lambda: run_laplacian(keys[3], data, half, False, runs, num),
            f"near 1; theory {1 + variance_inflation / 2:.2f}",
        ),
        f"Laplacian, h = {half:g}, eq. 27": (
            lambda: run_laplacian(keys[4], data, half, True, runs, num),
            "1",
        ),
        "SGLaplaceHMC, minibatch": (
            lambda: run_kernel(keys[5], data, "minibatch", runs, num),
            "1",
        ),
        "SGLaplaceHMC": (lambda: run_kernel(keys[6], data, "auto", runs, num), "1"),
    }
    rows = []
    shown = ("naive slices", "SGLaplaceHMC, minibatch") if quick else tuple(tasks)
    for name in shown:
        task, paper = tasks[name]
        z = (np.asarray(task(), float) - data.mean) / data.sd
        distance = ks_1samp(z, norm.cdf, axis=-1, method="asymp").statistic
        means = np.square(z).mean(-1), z.mean(-1), distance
        rows.append((name, *map(mean, means), paper))
    output.print_table(
        f"Regression: {runs} chains of {num}; in posterior standard deviations",
        ("sampler", "variance", "mean", "Kolmogorov distance", "paper, variance"),
        rows,
    )
    needed = STEP_SIZE * data.noise / 2
    print(
        f"At h = {STEP_SIZE:g} equation (27) would inject noise for A - B = {FRICTION:g} - "
        f"{needed:.1f}, which is {'not possible' if needed > FRICTION else 'possible'}."
    )
