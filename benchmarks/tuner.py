"""Compare ``SGHMCSplit`` with samplers tuned by successive halving of a kernel Stein discrepancy.

The tuner is MAMBA (Coullon, South, Nemeth, 2023, *Statistics and Computing* 33:66), on their
logistic regression: ten columns, standard deviations of coefficients and prior of sqrt(10). Its
arms are step sizes from 10^-1 to 10^-7.5, minibatches of 100% to 0.1% of the rows and, for SGHMC,
5 or 10 steps between momenta. Each round runs all arms for equal times, and keeps the third with
the smallest discrepancy (inverse multiquadric kernel, gradients on all rows at about every tenth
draw).

``SGHMCSplit`` runs first; its CPU time, with compilation and warm-up, is the budget of the others:
half of it for tuning, half for the run with the chosen arm. Their compilation, the posterior mode
at which they start, and the discrepancies of the arms are not counted. The reference is the normal
approximation at the mode with importance weights; the first row has draws by these weights.
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.infer import MCMC
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit

DIM, PRIOR_VARIANCE, CORRELATION = 10, 10.0, 0.4
STEP_SIZES = tuple((10.0 ** -np.arange(1.0, 8.0, 0.5)).tolist())
BATCH_FRACTIONS = (1.0, 0.1, 0.01, 0.001)
KEPT = 3  # one of so many arms is kept in a round
FRICTION = 0.01  # of SGHMC, per step
THINNING = 10  # draws of an arm for each gradient on all rows
MAX_SCORED, MAX_SCORED_OF_ARM = 1_024, 256  # draws with such gradients
COLUMNS = {
    "method": 12,
    "step size": 10,
    "rows": 8,
    "steps": 6,
    "tuning (s)": 10,
    "run (s)": 8,
    "draws": 8,
    "discrepancy": 11,
    "worst mean bias (SD)": 20,
    "SD bias": 14,
}


class Arm(NamedTuple):
    """Step size, rows of a minibatch, and steps between momenta: zero for SGLD."""

    step_size: float
    batch_size: int
    num_leapfrog: int


class Posterior(NamedTuple):
    """Rows and mode; means, SDs and draws of the reference."""

    x: Array
    y: Array
    mode: Array
    mean: np.ndarray
    sd: np.ndarray
    draws: Array


def model(x: Any, y: Any, batch_size: int | None = None) -> None:
    prior = dist.Normal(0, PRIOR_VARIANCE**0.5).expand([DIM]).to_event(1)
    beta = numpyro.sample("beta", prior)
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def make_data(num_rows: int) -> tuple[Array, Array]:
    """Simulate normal columns of random correlation, and outcomes."""
    rng = np.random.default_rng(42)
    rho = rng.uniform(-CORRELATION, CORRELATION, (DIM, DIM))
    lag = np.abs(np.subtract.outer(np.arange(DIM), np.arange(DIM)))
    covariance = np.where(lag == 0, 1.0, np.tril(rho, -1) + np.tril(rho, -1).T) ** np.maximum(
        lag, 1
    )
    x = rng.standard_normal((num_rows, DIM)) @ np.linalg.cholesky(covariance).T
    logits = x @ rng.normal(0, PRIOR_VARIANCE**0.5, DIM)
    y = rng.random(num_rows) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def summed_gradient(beta: Array, x: Array, y: Array) -> Array:
    """Return the gradient of the log likelihood of these rows."""
    return (y - jax.nn.sigmoid(x @ beta)) @ x


@jax.jit
def full_gradients(draws: Array, x: Array, y: Array) -> Array:
    """Return gradients of the log posterior on all rows."""
    return lax.map(lambda b: summed_gradient(b, x, y) - b / PRIOR_VARIANCE, draws, batch_size=32)


def find_posterior(x: Array, y: Array, num: int = 3_000) -> Posterior:
    """Return the mode by Newton's method, and moments by weighted draws of Student's t."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    mode = np.zeros(DIM)
    for _ in range(20):
        p = 1 / (1 + np.exp(-xs @ mode))
        precision = (xs * (p * (1 - p))[:, None]).T @ xs + np.eye(DIM) / PRIOR_VARIANCE
        mode = mode + np.linalg.solve(precision, xs.T @ (ys - p) - mode / PRIOR_VARIANCE)
    rng, nu = np.random.default_rng(0), 20
    root = np.linalg.cholesky(np.linalg.inv(precision))
    z = rng.standard_normal((num, DIM)) / np.sqrt(rng.chisquare(nu, (num, 1)) / nu)
    points = mode + z @ root.T
    fit = xs @ mode
    logs = (nu + DIM) / 2 * np.log1p(np.square(z).sum(1) / nu)
    for part in np.array_split(np.arange(num), num // 100):
        # Differences from the mode, so that sums over all rows do not cancel.
        change = (points[part] - mode) @ xs.T
        terms = change * ys - np.log1p(np.expm1(change) / (1 + np.exp(-fit)))
        logs[part] += terms.sum(1) - np.square(points[part]).sum(1) / (2 * PRIOR_VARIANCE)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = weights @ points
    sd = np.sqrt(weights @ np.square(points - mean))
    print(f"reference: ESS {1 / np.square(weights).sum():.0f}", flush=True)
    draws = points[rng.choice(num, MAX_SCORED, p=weights)]
    start, draws = (jnp.asarray(a, jnp.float32) for a in (mode, draws))
    return Posterior(x, y, start, mean, sd, draws)


@jax.jit
def discrepancy(draws: Array, gradients: Array) -> Array:
    """Return the kernel Stein discrepancy with k(a, b) = (1 + |a - b|^2)^(-1/2)."""

    def row(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        diff, gradient = pair[0] - draws, pair[1]
        squares = jnp.square(diff).sum(1)
        base = 1.0 + squares
        cross = (diff * (gradient - gradients)).sum(1)
        stein = (gradients @ gradient) / jnp.sqrt(base)
        stein += (cross + DIM) * base**-1.5 - 3.0 * squares * base**-2.5
        return total + stein.sum(), None

    return jnp.sqrt(lax.scan(row, 0.0, (draws, gradients))[0]) / len(draws)


def score(draws: Array, posterior: Posterior, max_draws: int) -> float:
    """Return the discrepancy of some draws, infinite where these are not finite."""
    size = 2 ** int(np.log2(min(len(draws), max_draws)))  # few sizes are compiled
    draws = draws[np.linspace(0, len(draws) - 1, size).astype(int)]
    value = float(discrepancy(draws, full_gradients(draws, posterior.x, posterior.y)))
    return value if np.isfinite(value) else np.inf


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def run_steps(
    key: Array,
    beta: Array,
    step_size: Array,
    batch_size: int,
    num_leapfrog: int,
    num_draws: int,
    use_control_variate: bool,
    data: tuple[Array, Array, Array],
) -> Array:
    """Return draws of SGLD, or of SGHMC where there are steps between momenta."""
    x, y, reference = data
    scale = len(y) / batch_size
    reference_gradient = summed_gradient(reference, x, y)

    def gradient(key: Array, beta: Array) -> Array:
        xs, ys = x, y
        if batch_size < len(y):
            rows = random.randint(key, (batch_size,), 0, len(y))
            xs, ys = x[rows], y[rows]
        value = scale * summed_gradient(beta, xs, ys) - beta / PRIOR_VARIANCE
        if use_control_variate:
            value += reference_gradient - scale * summed_gradient(reference, xs, ys)
        return value

    def leapfrog(state: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], None]:
        beta, v = state
        beta = beta + v
        noise = jnp.sqrt(2 * FRICTION * step_size) * random.normal(key, beta.shape)
        v = (1 - FRICTION) * v + step_size * gradient(random.fold_in(key, 1), beta) + noise
        return (beta, v), None

    def draw(beta: Array, key: Array) -> tuple[Array, Array]:
        noise = random.normal(key, beta.shape)
        if num_leapfrog:
            keys = random.split(random.fold_in(key, 1), num_leapfrog)
            beta = lax.scan(leapfrog, (beta, jnp.sqrt(step_size) * noise), keys)[0][0]
        else:
            drift = step_size * gradient(random.fold_in(key, 1), beta)
            beta = beta + drift + jnp.sqrt(2 * step_size) * noise
        return beta, beta

    return lax.scan(draw, beta, random.split(key, num_draws))[1]


class Sampler:
    """Runs arms for a given CPU time, in compiled parts of about 50 ms."""

    def __init__(self, posterior: Posterior, use_control_variate: bool) -> None:
        self._data = posterior.x, posterior.y, posterior.mode
        self._use_control_variate = use_control_variate
        self._num_draws: dict[tuple[int, int], int] = {}  # of a part
        self._key = random.key(0)

    def _run_part(self, arm: Arm, beta: Array, num_draws: int) -> Array:
        self._key, key = random.split(self._key)
        step_size = jnp.float32(arm.step_size)
        call = key, beta, step_size, arm.batch_size, arm.num_leapfrog, num_draws
        return run_steps(*call, self._use_control_variate, self._data).block_until_ready()

    def run(self, arm: Arm, beta: Array, seconds: float) -> Array:
        """Return the draws of so many CPU seconds, at least one."""
        if arm[1:] not in self._num_draws:
            self._run_part(arm, beta, 10)  # compiles
            start = time.process_time()
            self._run_part(arm, beta, 10)
            one = (time.process_time() - start) / 10
            self._num_draws[arm[1:]] = int(np.clip(0.05 / one, 1, 1_000))
            self._run_part(arm, beta, self._num_draws[arm[1:]])
        parts, start = [], time.process_time()
        while not parts or time.process_time() - start < seconds:
            parts.append(self._run_part(arm, beta, self._num_draws[arm[1:]]))
            beta = parts[-1][-1]
        return jnp.concatenate(parts)


def tune(sampler: Sampler, arms: list[Arm], posterior: Posterior, seconds: float) -> Arm:
    """Return the best arm after rounds of successive halving, which take so long together."""
    states = [(arm, posterior.mode) for arm in arms]
    num_rounds = int(np.log(len(arms)) / np.log(KEPT))
    for _ in range(num_rounds):
        scored = []
        for arm, beta in states:
            draws = sampler.run(arm, beta, seconds / num_rounds / len(states))
            scored.append((score(draws[::THINNING], posterior, MAX_SCORED_OF_ARM), arm, draws[-1]))
        scored.sort(key=lambda s: s[0])
        states = [s[1:] for s in scored[: max(1, len(scored) // KEPT)]]
    return states[0][0]


def show(
    method: str, arm: Arm | None, times: tuple[float, float], draws: Array, posterior: Posterior
) -> None:
    """Print a row: the errors of all draws, and the discrepancy of evenly spaced ones."""
    exact = np.asarray(draws, np.float64)
    mean = (exact.mean(0) - posterior.mean) / posterior.sd
    inflation = 100 * (exact.std(0) / posterior.sd - 1)
    cells = [
        method,
        f"{arm.step_size:.1g}" if arm else "",
        arm.batch_size if arm else "",
        arm.num_leapfrog or "" if arm else "",
        *(f"{t:.1f}" if t else "" for t in times),
        len(draws),
        f"{score(draws, posterior, MAX_SCORED):.1f}",
        f"{np.abs(mean).max():.2f}",
        f"{inflation.min():+.0f}% to {inflation.max():+.0f}%",
    ]
    print_row(cells, COLUMNS.values())


def run_default(x: Array, y: Array) -> tuple[Array, float]:
    """Return the draws of ``SGHMCSplit`` and the CPU time of everything."""
    start = time.process_time()
    mcmc = MCMC(
        SGHMCSplit(model),
        num_warmup=300,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x, y, batch_size=1_000)
    draws = jax.block_until_ready(mcmc.get_samples()["beta"])
    return draws, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    given = parser.parse_args()
    posterior = find_posterior(*make_data(given.rows))
    print_header(f"Comparison with a tuner, {given.rows:,} rows")
    print_row(COLUMNS, COLUMNS.values())
    show("reference", None, (0.0, 0.0), posterior.draws, posterior)
    draws, budget = run_default(posterior.x, posterior.y)
    show("SGHMCSplit", None, (0.0, budget), draws, posterior)
    batch_sizes = [round(f * given.rows) for f in BATCH_FRACTIONS]
    methods: dict[str, tuple[tuple[int, ...], bool]] = {
        "SGLD-CV": ((0,), True),
        "SGHMC": ((5, 10), False),
    }
    for name, (lengths, use_control_variate) in methods.items():
        sampler = Sampler(posterior, use_control_variate)
        arms = [Arm(*a) for a in itertools.product(STEP_SIZES, batch_sizes, lengths)]
        arm = tune(sampler, arms, posterior, budget / 2)
        draws = sampler.run(arm, posterior.mode, budget / 2)
        show(name, arm, (budget / 2, budget / 2), draws, posterior)


if __name__ == "__main__":
    main()
