"""Five wells (appendix D of Zhang et al. 2017): distance from the density, and crossings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import output
from jax import Array, lax, random
from lanes import in_lanes, over_lanes
from standard_errors import Mean, mean

from numpyro_sgmcmc.dynamics import Dynamics, MonomialGammaThermostat, NoseHooverThermostat
from numpyro_sgmcmc.dynamics.langevin import Kinetics

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
        return MonomialGammaThermostat(KINETICS[name], sigma_p, 1.0, noise, noise, PERIOD, PERIOD)

    return {
        "SGNHT": NoseHooverThermostat(sigma_p),
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
    step = dynamics.make_step("symmetric")
    slope = jax.grad(lambda theta: potential(theta).sum())
    lanes = len(step_sizes)
    start_key, key = random.split(rng_key)
    home = jnp.argmin(potential(minima))
    first = jax.vmap(dynamics.init)(
        jnp.full((runs, 1), minima[home]), random.split(start_key, runs)
    )

    def move(state: Any, h: Array, error: Array, noise: Array) -> Any:
        return step(state, h, lambda q: slope(q) + gradient_noise * error, noise)

    move_all = over_lanes(move)

    def one(carry: Any, key: Array) -> tuple[Any, None]:
        states, counts, well, crossings, seen = carry
        noise = random.normal(key, (runs, step.num_noise + 1, 1))
        states = move_all(states, step_sizes, noise[:, 0], noise[:, 1:])
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
        for k, field in enumerate(dynamics.resampling_periods):
            fresh = dynamics.sample_auxiliary(
                field, random.fold_in(draw_key, k), (runs, 1), jnp.float32
            )
            states = states._replace(**{field: jnp.broadcast_to(fresh, (lanes, runs, 1))})
        carry, _ = lax.scan(one, (states, *rest), random.split(key, PERIOD))
        return carry, lax.population_count(carry[-1])

    zeros = jnp.zeros((lanes, runs), int)
    counts = jnp.zeros((lanes, runs, len(EDGES) - 1), int)
    carry = (in_lanes(first, lanes), counts, zeros + home, zeros, zeros + (1 << home))
    (_, counts, _, crossings, _), seen = lax.scan(block, carry, random.split(key, blocks))
    return Visits(counts, crossings, seen)


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


def five_wells(quick: bool) -> None:
    """Print the scores of the samplers in each setting."""
    wells = find_wells()
    runs, blocks = (20, 20) if quick else (300, 200)
    num_steps = PERIOD * blocks
    rows, claims = [], []
    for setting in SETTINGS[:1] if quick else SETTINGS:
        scores = {}
        for k, (name, dynamics) in enumerate(samplers(setting.sigma_p).items()):
            if ("D" in name and setting is not SETTINGS[0]) or (
                quick and name not in ("SGNHT", "a = 1")
            ):
                continue
            key, h = random.key(k), jnp.asarray(STEP_SIZES)
            found = explore(key, dynamics, setting.noise, h, wells.minima, runs, blocks)
            scores[name] = s = score(found, wells)
            cells = s.distance[s.best], s.crossings[s.best], s.seen[s.best]
            rows.append((setting, name, f"{STEP_SIZES[s.best]:g}", *cells))
        claims += compare(setting, scores)
    output.print_table(
        f"Five wells: each sampler at its best step size, {num_steps} steps, {runs} chains",
        ("setting", "sampler", "h", "total variation", "crossings / 1,000", "wells seen at 10%"),
        rows,
    )
    output.print_table(
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
    output.print_table(
        "Why it might, and why it need not: fresh momenta",
        ("kinetics", f"share with energy above the barrier, {wells.barrier:.2f}", "mean speed"),
        [(name, f"{fresh.above:.4f}", f"{fresh.speed:.2f}") for name, fresh in found.items()],
    )
