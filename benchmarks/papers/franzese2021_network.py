"""Figures 8, 9 and 10 of Franzese et al. (2021) on a network with one hidden layer.

The paper's oracle is SGHMC in small steps; here NUTS, which has no step size to doubt: chains start
at draws of one run, and their predictions are compared with those of another. 200 draws, as in the
paper, so that not even draws of the first run come closer than the self-distance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import output
from franzese2021_chains import draws
from franzese2021_data import Split, load, make_model, network, split
from jax import Array, random
from numpyro.infer import MCMC, NUTS, init_to_sample
from standard_errors import Mean

from numpyro_sgmcmc import SHMC
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics import kolmogorov_distance, predictive_summary
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.subsampled import get_model_potential

SIZES, VARIANCE, BATCH = (13, 50, 1), 0.2, 32
INTEGRATORS = ("leapfrog", "lie_trotter", "symmetric", "mt3")
LENGTHS = (1, 10, 50, 100)
FRICTIONS = (0.5, 1.0, 5.0, 10.0, 50.0, 100.0)
NUM_DRAWS = 200
EXPLODED = 20.0  # times the oracle's SDs


class Size(NamedTuple):
    """
    - **step_sizes** - with minibatches, falling; all rows have the first ``num_full`` of them.
    - **chains** - side by side, whose draws are :data:`NUM_DRAWS` together.
    - **apart** - time between draws, and ``burn_in`` before the first.
    - **nuts** - draws of a run, after half as many.
    - **splits** - random ones.
    - **values** - of what is varied, at most.
    """

    step_sizes: tuple[float, ...]
    num_full: int
    chains: int
    burn_in: float
    apart: float
    nuts: int
    splits: int = 1
    values: int = 6


DEFAULT = Size((0.04, 0.03, 0.02, 0.01, 0.005, 0.0025), 4, 40, 10.0, 2.5, 1000)
PAPER = Size((0.04, 0.03, 0.02, 0.01, 0.005, 0.0025, 0.001), 7, 40, 50.0, 2.5, 4000, splits=5)
QUICK = Size((0.04, 0.02), 1, 40, 0.2, 0.1, 40, values=2)


class Cell(NamedTuple):
    """
    - **distance** - mean Kolmogorov distance of predictions to the oracle.
    - **width** - mean ratio of their SDs to the oracle's.
    """

    distance: float
    width: float

    def __str__(self) -> str:
        if not np.isfinite(self.distance):
            return "diverges"
        return f"{self.distance:.3f} ({self.width:.2f})"


Curves: TypeAlias = dict[Any, list[Cell]]
"""A cell for each step size, by integrator, length or friction."""


def predictions(weights: Any, x: Array) -> Array:
    """Return predictions at all rows, for draws with two leading axes."""
    flat = {name: jnp.asarray(w).reshape(-1, *w.shape[2:]) for name, w in weights.items()}
    return jax.lax.map(lambda w: network(w, x, jnp.tanh)[:, 0], flat)


class Oracle:
    """Two runs of NUTS on all rows: where chains start, and what they are compared with."""

    def __init__(self, data: Split, size: Size, seed: int = 0) -> None:
        self.data = data
        self.model = make_model(SIZES, jnp.tanh, VARIANCE)
        self.runs = [self._nuts(size.nuts, random.key(2 * seed + k)) for k in range(2)]
        ours, self.reference = (np.asarray(predictions(w, data.x_test)) for w in self.runs)
        rng, sets = np.random.default_rng(seed), 40
        chosen = [rng.choice(len(ours), min(NUM_DRAWS, len(ours)), False) for _ in range(sets)]
        self.own = np.array([self._distance(ours[i]) for i in chosen])

    def _nuts(self, num: int, key: Array) -> dict[str, Array]:
        kernel = NUTS(self.model, init_strategy=init_to_sample)
        mcmc = MCMC(kernel, num_warmup=num // 2, num_samples=num, progress_bar=False)
        mcmc.run(key, self.data.x, self.data.y)
        return mcmc.get_samples(group_by_chain=True)

    def _distance(self, ours: np.ndarray) -> float:
        return float(kolmogorov_distance(ours, self.reference).distance.mean())

    @property
    def self_distance(self) -> Mean:
        """Distance of as many draws of one run, and its SD over choices of draws."""
        return Mean(self.own.mean(), self.own.std())

    def target(self, batch_size: int) -> tuple[Potential, Arguments]:
        arguments = Arguments((self.data.x, self.data.y), {"batch_size": batch_size})
        return get_model_potential(self.model, arguments, init_to_sample), arguments

    def starts(self, target: Potential, chains: int) -> Array:
        """Draws of the first run, as far apart as the run allows."""
        every = len(next(iter(self.runs[0].values()))[0]) // chains
        some = {name: w[0, ::every][:chains] for name, w in self.runs[0].items()}
        return jax.vmap(lambda w: jax.flatten_util.ravel_pytree(w)[0])(some)

    def judge(self, weights: dict[str, np.ndarray]) -> Cell:
        ours = np.asarray(predictions(weights, self.data.x_test))
        with np.errstate(over="ignore", invalid="ignore"):
            width = float((ours.std(0) / self.reference.std(0)).mean())
        if not (np.isfinite(ours).all() and width < EXPLODED):
            return Cell(np.inf, np.inf)
        return Cell(self._distance(ours), width)


def curve(
    oracle: Oracle,
    size: Size,
    batch_size: int,
    step_sizes: Sequence[float],
    seed: int,
    from_prior: bool = False,
    **setting: Any,
) -> list[Cell]:
    """One setting at all step sizes.

    :param from_prior: whether chains start at draws from the prior, as the paper's do.
    """
    target, arguments = oracle.target(batch_size)
    keys = random.split(random.key(seed), size.chains)
    starts = oracle.starts(target, size.chains)
    if from_prior:
        starts = jax.vmap(lambda key: target.sample_init_position(key, arguments))(keys)
    found = []
    for h in step_sizes:
        weights = draws(
            target,
            arguments,
            setting.get("integrator", "leapfrog"),
            keys[0],
            starts,
            h,
            friction=setting.get("friction", 5.0),
            num_leapfrog=setting.get("num_leapfrog"),
            num_draws=NUM_DRAWS // size.chains,
            burn_in=size.burn_in,
            apart=size.apart,
        )
        found.append(oracle.judge(weights))
    print(batch_size, setting, *found, f"{time.process_time():.0f} s of CPU", flush=True)
    return found


def explore(oracle: Oracle, size: Size) -> dict[tuple[str, str], Curves]:
    """Curves by what varies and by minibatch."""
    varied: dict[str, list[tuple[Any, dict[str, Any]]]] = {
        "integrator": [(s, {"integrator": s}) for s in INTEGRATORS],
        "length": [(n, {"integrator": "lie_trotter", "num_leapfrog": n}) for n in LENGTHS],
        "friction": [(c, {"friction": c, "from_prior": True}) for c in FRICTIONS],
    }
    num_rows = len(oracle.data.y)
    return {
        (what, name): {
            value: curve(oracle, size, batch, step_sizes, seed=i, **setting)
            for i, (value, setting) in enumerate(settings[: size.values])
        }
        for what, settings in varied.items()
        for name, batch, step_sizes in (
            (f"{BATCH} rows", BATCH, size.step_sizes),
            ("all rows", num_rows, size.step_sizes[: size.num_full]),
        )
    }


HEADS = {
    "integrator": "Figure 8, C = 5. The paper: with minibatches all integrators are equal; the "
    "order matters with all rows and long steps",
    "length": "Figure 9, Lie-Trotter, steps between refreshments. The paper: one is safe",
    "friction": "Figure 10, leapfrog, chains from the prior. The paper: 5 to 10 do, not sensitive",
}


def print_curves(found: dict[tuple[str, str], Curves], size: Size) -> None:
    for (what, name), curves in found.items():
        output.print_table(
            f"{HEADS[what]}. {name}: mean Kolmogorov distance of {NUM_DRAWS} draws' predictions "
            "to the oracle's (and the ratio of their SDs)",
            (what, *(f"h = {h:g}" for h in size.step_sizes)),
            [
                (value, *cells, *["-"] * (len(size.step_sizes) - len(cells)))
                for value, cells in curves.items()
            ],
        )


def library(oracle: Oracle, size: Size, h: float = 0.01) -> None:
    """Run the kernel with all settings given, and evaluate it as a user would."""
    kernel = SHMC(
        oracle.model,
        friction=5.0,
        step_size=h,
        num_steps=round(size.apart / h),
        adapt_mass_matrix=False,
        gradient_estimator="minibatch",
        subsampling="shuffled",
        init_strategy=init_to_sample,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=round(size.burn_in / size.apart),
        num_samples=NUM_DRAWS // size.chains,
        num_chains=size.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), oracle.data.x, oracle.data.y, batch_size=BATCH)
    weights = mcmc.get_samples(group_by_chain=True)
    print(f"SHMC by MCMC, {BATCH} rows, h = {h:g}, from the prior: {oracle.judge(weights)}")

    def mean(draw: dict[str, Array], x: Array) -> Array:
        return network(draw, x, jnp.tanh)[:, 0]

    summary = predictive_summary(weights, mean, oracle.data.x_test, reference=oracle.runs[1])
    print(summary, flush=True)


def experiment(size: Size) -> None:
    """Print tables of figures 8 to 10 for each split."""
    table = load("Boston")
    for seed in range(size.splits):
        oracle = Oracle(split(table, seed), size, seed)
        own = oracle.self_distance
        print(f"self-distance {own.value:.3f}, SD {own.error:.3f}", flush=True)
        library(oracle, size)
        print_curves(explore(oracle, size), size)
