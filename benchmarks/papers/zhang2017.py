r"""Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma sampler*: the
five-well potential (appendix D) and naive stochastic slice sampling beside the stochastic
Laplacian HMC (Figure 7, appendices M and N).

**Five wells.** Chains of SGNHT and of SGMGT with a = 1 and a = 2, with and without the "D" noise,
start in the deepest well with gradients that carry normal noise. Appendix D gives the potential
and no more. The rest is taken from the paper's settings for the discriminative RBM where it has
them: sigma_p = 10, gamma = 1, m = 1, c = 3 for a = 1 and 5 for a = 2, fresh momenta and
thermostats every 100 steps, and sigma_theta = sigma_xi = 0.1 for "D". SGNHT draws nothing afresh;
SGMGT with a = 1/2 is SGNHT that does, and tells the effect of the kinetics from that of fresh
draws. The gradient's noise has standard deviation 2. Two more settings change one thing each: no
noise, or sigma_p = 1. All samplers run at all step sizes; each is
judged at its own best.

**Regression.** One coefficient, 100 rows, minibatches of 30, 2,000 iterations; the step size 0.1,
the friction 7 and the softening 1 are the paper's. It is silent on the covariates (standard
normal here), the prior (standard normal), the steps an iteration (10) and the mass (1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import arguments, print_table, print_title, save
from jax import Array, lax, random
from numpyro.infer import MCMC
from scipy.stats import norm

from numpyro_sgmcmc import SGLaplaceHMC
from numpyro_sgmcmc.dynamics import Dynamics, MonomialGamma, MonomialGammaLangevin, NoseHoover
from numpyro_sgmcmc.dynamics.kinetics import Kinetics

# Five wells

COEFFICIENTS = np.array([-0.47, -0.83, -0.71, -0.02, 0.24, 0.01, 0.27, -0.37, 0.87, -0.37])
FREQUENCIES = np.pi / 4 * np.arange(1, 11)
EDGES = np.linspace(-3.0, 3.0, 61)
CORE = 0.15
"""A chain is in a well when it is this near to the minimum."""
PERIOD = 100
STEP_SIZES = np.array([0.01, 0.02, 0.04, 0.06, 0.09, 0.13, 0.18, 0.25])


def potential(theta: Any) -> Any:
    waves = COEFFICIENTS * jnp.sin(FREQUENCIES * (theta[..., None] + 4.0))
    return 0.75 * theta**2 - 1.5 * waves.sum(-1)


class Wells(NamedTuple):
    """
    - **minima** - the five deepest, from left to right.
    - **shares** - exact probability of each bin.
    - **barrier** - the least energy that leads out of the deepest well.
    """

    minima: np.ndarray
    shares: np.ndarray
    barrier: float


def find_wells() -> Wells:
    theta = np.linspace(-6.0, 6.0, 240_001)
    u = np.asarray(potential(jnp.asarray(theta)), float)
    inner = u[1:-1]
    lows = np.flatnonzero((inner < u[:-2]) & (inner <= u[2:])) + 1
    tops = np.flatnonzero((inner > u[:-2]) & (inner >= u[2:])) + 1
    density = np.exp(-u)
    shares = np.histogram(theta, EDGES, weights=density / density.sum())[0]
    deepest = lows[np.argmin(u[lows])]
    beside = (tops[tops < deepest].max(), tops[tops > deepest].min())
    five = np.sort(theta[lows[np.argsort(u[lows])[:5]]])
    return Wells(five, shares, float(u[list(beside)].min() - u[deepest]))


class Setting(NamedTuple):
    """
    - **sigma_p** - noise of the momentum, and the mean friction.
    - **noise** - standard deviation of the gradient's noise.
    """

    sigma_p: float
    noise: float

    def __str__(self) -> str:
        return f"σ_p = {self.sigma_p:g}, noise {self.noise:g}"


SETTINGS = (Setting(10.0, 2.0), Setting(10.0, 0.0), Setting(1.0, 2.0))


KINETICS = {
    "a = 1/2": Kinetics(0.5, 2.0, 3.0),
    "a = 1": Kinetics(1.0, 1.0, 3.0),
    "a = 2": Kinetics(2.0, 1.0, 5.0),
}


def samplers(sigma_p: float) -> dict[str, Dynamics]:
    def thermostat(name: str, noise: float = 0.0) -> Dynamics:
        return MonomialGamma(KINETICS[name], sigma_p, 1.0, noise, noise, PERIOD, PERIOD)

    return {
        "SGNHT": NoseHoover(sigma_p),
        **{name: thermostat(name) for name in KINETICS},
        **{f"{name}, D": thermostat(name, 0.1) for name in ("a = 1", "a = 2")},
    }


class Visits(NamedTuple):
    """
    - **counts** - draws in each bin, ``(lanes, runs, bins)``.
    - **crossings** - arrivals in another well than the last, ``(lanes, runs)``.
    - **seen** - wells seen by the end of each block, ``(blocks, lanes, runs)``.
    """

    counts: np.ndarray
    crossings: np.ndarray
    seen: np.ndarray


@partial(jax.jit, static_argnames=("dynamics", "runs", "blocks"))
def explore(
    rng_key: Array,
    dynamics: Dynamics,
    gradient_noise: float,
    step_sizes: Array,
    minima: Array,
    runs: int,
    blocks: int,
) -> Visits:
    """Independent runs in blocks of :data:`PERIOD` steps; lanes of step sizes share their noise."""
    step = dynamics.step("symmetric")
    slope = jax.grad(lambda theta: potential(theta).sum())
    lanes = len(step_sizes)
    start_key, key = random.split(rng_key)
    home = jnp.argmin(potential(minima))
    first = jax.vmap(dynamics.init)(
        jnp.full((runs, 1), minima[home]), random.split(start_key, runs)
    )

    def move(state: Any, h: Array, error: Array, noise: Array) -> Any:
        return step(state, h, lambda q: slope(q) + gradient_noise * error, noise)

    over_runs = jax.vmap(move, (0, None, 0, 0))
    over_lanes = jax.vmap(over_runs, (0, 0, None, None))

    def one(carry: Any, key: Array) -> tuple[Any, None]:
        states, counts, well, crossings, seen = carry
        noise = random.normal(key, (runs, step.draws + 1, 1))
        states = over_lanes(states, step_sizes, noise[:, 0], noise[:, 1:])
        theta = states.position[..., 0]
        width = EDGES[1] - EDGES[0]
        place = jnp.clip(((theta - EDGES[0]) / width).astype(int), 0, len(EDGES) - 2)
        counts = counts.at[jnp.arange(lanes)[:, None], jnp.arange(runs), place].add(1)
        distance = jnp.abs(theta[..., None] - minima)
        arrived = jnp.where(distance.min(-1) < CORE, distance.argmin(-1), well)
        crossings += arrived != well
        return (states, counts, arrived, crossings, seen | (1 << arrived)), None

    def block(carry: Any, key: Array) -> tuple[Any, Array]:
        states, *rest = carry
        draw_key, key = random.split(key)
        for k, field in enumerate(dynamics.resampling):
            fresh = dynamics.draw(field, random.fold_in(draw_key, k), (runs, 1), jnp.float32)
            states = states._replace(**{field: jnp.broadcast_to(fresh, (lanes, runs, 1))})
        carry, _ = lax.scan(one, (states, *rest), random.split(key, PERIOD))
        return carry, lax.population_count(carry[-1])

    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), first)
    zeros = jnp.zeros((lanes, runs), int)
    counts = jnp.zeros((lanes, runs, len(EDGES) - 1), int)
    carry = (states, counts, zeros + home, zeros, zeros + (1 << home))
    (_, counts, _, crossings, _), seen = lax.scan(block, carry, random.split(key, blocks))
    return Visits(counts, crossings, seen)


class Mean(NamedTuple):
    """Means over runs (the last axis) and their standard errors."""

    value: Any
    error: Any

    def __str__(self) -> str:
        return f"{self.value:.3g} ± {self.error:.1g}"

    def __getitem__(self, index: Any) -> Any:
        return Mean(self.value[index], self.error[index])

    def __sub__(self, other: Mean) -> Mean:
        return Mean(self.value - other.value, np.hypot(self.error, other.error))


def mean(x: Any) -> Mean:
    x = np.asarray(x, float)
    return Mean(x.mean(-1), x.std(-1, ddof=1) / np.sqrt(x.shape[-1]))


class Score(NamedTuple):
    """
    - **distance** - total variation between a chain's histogram and the exact one.
    - **crossings** - crossings in 1,000 steps.
    - **seen** - wells seen, of five, in the first tenth of the run.
    - **best** - place of the step size with the least distance.
    """

    distance: Mean
    crossings: Mean
    seen: Mean
    best: int


def score(visits: Visits, wells: Wells) -> Score:
    counts = np.asarray(visits.counts, float)
    num_steps = PERIOD * len(visits.seen)
    # Draws beyond the outermost bins are counted in these; the exact share there is below 1e-3.
    distance = mean(0.5 * np.abs(counts / num_steps - wells.shares).sum(-1))
    early = visits.seen[max(1, len(visits.seen) // 10) - 1]
    crossings = mean(np.asarray(visits.crossings) * 1e3 / num_steps)
    return Score(distance, crossings, mean(early), int(np.argmin(distance.value)))


class Fresh(NamedTuple):
    """
    - **above** - probability that a fresh momentum holds more energy than the barrier.
    - **speed** - mean speed of fresh momenta.
    """

    above: float
    speed: float


def fresh_momenta(kinetics: Kinetics, barrier: float) -> Fresh:
    p = np.linspace(0.0, 1000.0, 1_000_001)
    velocity = np.asarray(kinetics.velocity(jnp.asarray(p)), float)
    steps = (velocity[1:] + velocity[:-1]) / 2 * np.diff(p)
    energy = np.append(0.0, np.cumsum(steps))
    density = np.exp(-energy)
    share = density / density.sum()
    return Fresh(float(share[energy > barrier].sum()), float(share @ velocity))


def five_wells(quick: bool) -> tuple[dict[str, Score], int]:
    """Scores in the first setting, and the number of steps."""
    wells = find_wells()
    runs, blocks = (20, 20) if quick else (300, 200)
    num_steps = PERIOD * blocks
    rows, claims, first = [], [], {}
    for setting in SETTINGS[:1] if quick else SETTINGS:
        scores = {}
        for k, (name, dynamics) in enumerate(samplers(setting.sigma_p).items()):
            if ("D" in name and first) or (quick and name not in ("SGNHT", "a = 1")):
                continue
            key, h = random.key(k), jnp.asarray(STEP_SIZES)
            found = explore(key, dynamics, setting.noise, h, wells.minima, runs, blocks)
            scores[name] = s = score(found, wells)
            cells = s.distance[s.best], s.crossings[s.best], s.seen[s.best]
            rows.append((setting, name, f"{STEP_SIZES[s.best]:g}", *cells))
        claims += compare(setting, scores)
        first = first or scores
    print_table(
        f"Five wells: each sampler at its best step size, {num_steps} steps, {runs} chains",
        ("setting", "sampler", "h", "total variation", "crossings / 1,000", "wells seen at 10 %"),
        rows,
    )
    print_table(
        "Does a larger a cross more often? Differences of crossings / 1,000 and total variation",
        (
            "setting",
            "difference",
            *(f"crossings, h = {h:g}" for h in COMMON),
            "crossings, each at its best",
            "total variation, each at its best",
        ),
        [*claims, ("paper", "", "positive", "positive", "positive", "negative")],
    )
    print_fresh(wells)
    return first, num_steps


COMMON = (0.04, 0.13)
"""Step sizes at which samplers are compared."""


def compare(setting: Setting, scores: Mapping[str, Score]) -> list[tuple[Any, ...]]:
    rows = []
    for more, less in (("a = 1", "SGNHT"), ("a = 1", "a = 1/2"), ("a = 2", "a = 1")):
        if not {more, less} <= set(scores):
            continue
        s, t = scores[more], scores[less]
        places = [int(np.argmin(np.abs(h - STEP_SIZES))) for h in COMMON]
        rows.append(
            (
                setting,
                f"{more} less {less}",
                *(s.crossings[i] - t.crossings[i] for i in places),
                s.crossings[s.best] - t.crossings[t.best],
                s.distance[s.best] - t.distance[t.best],
            )
        )
    return rows


def print_fresh(wells: Wells) -> None:
    found = {name: fresh_momenta(k, wells.barrier) for name, k in KINETICS.items()}
    print_table(
        "Why it might, and why it need not: fresh momenta",
        ("kinetics", f"share with energy above the barrier, {wells.barrier:.2f}", "mean speed"),
        [(name, f"{fresh.above:.4f}", f"{fresh.speed:.2f}") for name, fresh in found.items()],
    )


# Regression

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

    The slice is an interval, so that doubling needs no test of its own.
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
    step = dynamics.step("symmetric")
    scale = np.sqrt(1.0 - h * data.noise / 2 / FRICTION) if compensates else 1.0

    def chain(key: Array) -> Array:
        start_key, key = random.split(key)

        def one(state: Any, key: Array) -> tuple[Any, None]:
            row_key, noise_key = random.split(key)
            gradient = jax.grad(
                lambda q: batch_potential(data, draw_rows(row_key, BATCH_SIZE))(q[0])
            )
            noise = scale * random.normal(noise_key, (step.draws, 1))
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
    kernel = SGLaplaceHMC(model, gradient=gradient, minibatch="iid")
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


def regression(quick: bool) -> dict[str, np.ndarray]:
    """Draws of each sampler, in posterior standard deviations from the posterior mean."""
    data = make_regression()
    runs, num = (20, 200) if quick else (100, 2000)
    heat = STEP_SIZE * data.noise / 2 / FRICTION
    keys = random.split(random.key(1), 7)
    half = STEP_SIZE / 2
    tasks: dict[str, tuple[Callable[[], Array], str]] = {
        "slices, all rows": (lambda: run_slices(keys[0], data, NUM_ROWS, runs, num), "1"),
        "naive slices": (lambda: run_slices(keys[1], data, BATCH_SIZE, runs, num), "above 1"),
        f"Laplacian, h = {STEP_SIZE:g}": (
            lambda: run_laplacian(keys[2], data, STEP_SIZE, False, runs, num),
            f"near 1; theory {1 + heat:.2f}",
        ),
        f"Laplacian, h = {half:g}": (
            lambda: run_laplacian(keys[3], data, half, False, runs, num),
            f"near 1; theory {1 + heat / 2:.2f}",
        ),
        f"Laplacian, h = {half:g}, eq. 27": (
            lambda: run_laplacian(keys[4], data, half, True, runs, num),
            "1",
        ),
        "SGLaplaceHMC, plain": (lambda: run_kernel(keys[5], data, "plain", runs, num), "1"),
        "SGLaplaceHMC": (lambda: run_kernel(keys[6], data, "auto", runs, num), "1"),
    }
    draws, rows = {}, []
    shown = ("naive slices", "SGLaplaceHMC") if quick else tuple(tasks)
    for name in shown:
        task, paper = tasks[name]
        draws[name] = z = (np.asarray(task(), float) - data.mean) / data.sd
        rows.append(
            (name, mean(np.square(z).mean(-1)), mean(z.mean(-1)), mean(distances(z)), paper)
        )
    print_table(
        f"Regression: {runs} chains of {num}; in posterior standard deviations",
        ("sampler", "variance", "mean", "Kolmogorov distance", "paper, variance"),
        rows,
    )
    needed = STEP_SIZE * data.noise / 2
    print(
        f"At h = {STEP_SIZE:g} equation (27) would inject noise for A - B = {FRICTION:g} - "
        f"{needed:.1f}, which is {'not possible' if needed > FRICTION else 'possible'}."
    )
    return draws


def distances(z: np.ndarray) -> np.ndarray:
    """Kolmogorov distance of each chain's draws from the standard normal."""
    n = z.shape[-1]
    exact = norm.cdf(np.sort(z, axis=-1))
    above, below = np.arange(1, n + 1) / n - exact, exact - np.arange(n) / n
    return np.maximum(above, below).max(-1)


# Figure


def draw(scores: Mapping[str, Score], num_steps: int, draws: Mapping[str, np.ndarray]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for k, (name, s) in enumerate(scores.items()):
        style = {"color": f"C{k}", "label": name, "ls": "--" if "D" in name else "-"}
        axes[0].errorbar(STEP_SIZES, *s.crossings, marker="o", ms=3, capsize=2, **style)
        axes[1].errorbar(STEP_SIZES, *s.distance, marker="o", ms=3, capsize=2, **style)
    axes[0].set(xscale="log", yscale="log", xlabel="step size h")
    axes[0].set(ylabel="crossings in 1,000 steps", title="Five wells: crossings", ylim=(0.02, 300))
    axes[0].legend(fontsize=8, ncols=2, loc="upper left")
    axes[1].set(xscale="log", xlabel="step size h", ylabel="total variation")
    axes[1].set(title=f"Five wells: distance after {num_steps} steps")
    grid = np.linspace(-6, 6, 121)
    middle = (grid[1:] + grid[:-1]) / 2
    shown = ["naive slices", f"Laplacian, h = {STEP_SIZE:g}", "SGLaplaceHMC"]
    for k, name in enumerate(shown):
        height = np.histogram(draws[name], grid, density=True)[0]
        axes[2].plot(middle, height, color=f"C{k}", label=name)
    axes[2].plot(middle, norm.pdf(middle), "--", color="grey", label="exact")
    axes[2].set(xlabel="coefficient, posterior standard deviations", ylabel="density")
    axes[2].set(title="Regression, minibatches of 30 (Fig. 7)", ylim=(0, 0.5))
    axes[2].legend(fontsize=8)
    return figure


def main() -> None:
    quick = arguments(__doc__).quick
    print_title("Zhang, Chen, Gan, Henao and Carin (2017): synthetic experiments")
    scores, num_steps = five_wells(quick)
    draws = regression(quick)
    if not quick:
        save(draw(scores, num_steps, draws), "zhang2017")


if __name__ == "__main__":
    main()
