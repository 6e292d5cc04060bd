"""Figures 8, 9 and 10 of Franzese et al. (2021) on a network with one hidden layer.

The paper's oracle is SGHMC in small steps; here NUTS, which has no step size to doubt: chains start
at draws of one run, and their predictions are compared with those of another. 200 draws, as in the
paper, so that not even draws of the first run come closer than the self-distance.

The network has as many inputs as the table has covariates and one layer of 50 nodes; the width, the
noise variance and the number of rows to learn from are those of the paper's table 1.

Several processes may each run some of the parts into one ``--folder``: the run of NUTS where chains
start and the reference first, then what needs both. ``--join`` prints the tables of what is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import output
from franzese2021_chains import draws
from franzese2021_data import load, make_model, network, split
from jax import Array, random
from numpyro.infer import MCMC, NUTS, init_to_sample
from parts import Parts, arguments
from standard_errors import Mean

from numpyro_sgmcmc import SHMC
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics import kolmogorov_distance, predictive_summary
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.subsampled import get_model_potential

WIDTH, BATCH = 50, 32
# Of the step sizes, over Boston's. Curvature grows with the number of rows over the noise variance:
# Concrete's is 8 times as large, and its minibatch gradients are 16 times as noisy (variance).
STEP_SCALES = {"Boston": 1.0, "Concrete": 0.25}
INTEGRATORS = ("leapfrog", "lie_trotter", "symmetric", "mt3")
LENGTHS = (1, 10, 50, 100)
FRICTIONS = (0.5, 1.0, 5.0, 10.0, 50.0, 100.0)
NUM_DRAWS = 200
EXPLODED = 20.0  # times the oracle's SDs


class Size(NamedTuple):
    """
    - **step_sizes** - Boston's with minibatches, falling; all rows have the first ``num_full``.
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


DEFAULT = Size((0.04, 0.03, 0.02, 0.01, 0.005, 0.0025), 3, 40, 10.0, 2.5, 1000)
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


def predictions(weights: Any, x: Array) -> Array:
    """Return predictions at all rows, for draws with two leading axes."""
    flat = {name: jnp.asarray(w).reshape(-1, *w.shape[2:]) for name, w in weights.items()}
    return jax.lax.map(lambda w: network(w, x, jnp.tanh)[:, 0], flat)


RUNS = ("starts", "reference")


class Oracle:
    """Two runs of NUTS on all rows: where chains start, and what they are compared with."""

    def __init__(self, name: str, size: Size, seed: int, parts: Parts) -> None:
        self.num, self.seed = size.nuts, seed
        self._files = [parts.file(f"{name}-{seed}-{run}.npz") for run in RUNS]
        table = load(name)
        self.data = split(table, seed)
        self.model = make_model((table.x.shape[1], WIDTH, 1), jnp.tanh, table.variance)

    @cached_property
    def starts(self) -> dict[str, Array]:
        return self._nuts(0)

    @cached_property
    def reference(self) -> dict[str, Array]:
        return self._nuts(1)

    def _nuts(self, k: int) -> dict[str, Array]:
        """Read or run, and then store, the draws of one of the runs."""
        file = self._files[k]
        if file and file.exists():
            with np.load(file) as arrays:
                return {name: jnp.asarray(w) for name, w in arrays.items()}
        kernel = NUTS(self.model, init_strategy=init_to_sample)
        mcmc = MCMC(kernel, num_warmup=self.num // 2, num_samples=self.num, progress_bar=False)
        mcmc.run(random.key(2 * self.seed + k), self.data.x, self.data.y)
        weights: dict[str, Array] = mcmc.get_samples(group_by_chain=True)
        if file:
            np.savez(file, **{name: np.asarray(w) for name, w in weights.items()})
        return weights

    @cached_property
    def _reference_predictions(self) -> np.ndarray:
        return np.asarray(predictions(self.reference, self.data.x_test))

    def _distance(self, ours: np.ndarray) -> float:
        return float(kolmogorov_distance(ours, self._reference_predictions).distance.mean())

    def self_distance(self) -> tuple[float, float]:
        """Distance of as many draws of one run, and its SD over choices of draws."""
        ours = np.asarray(predictions(self.starts, self.data.x_test))
        rng, sets = np.random.default_rng(self.seed), 40
        chosen = [rng.choice(len(ours), min(NUM_DRAWS, len(ours)), False) for _ in range(sets)]
        own = np.array([self._distance(ours[i]) for i in chosen])
        return float(own.mean()), float(own.std())

    def target(self, batch_size: int) -> tuple[Potential, Arguments]:
        arguments = Arguments((self.data.x, self.data.y), {"batch_size": batch_size})
        return get_model_potential(self.model, arguments, init_to_sample), arguments

    def positions(self, chains: int) -> Array:
        """Draws of the first run, as far apart as the run allows."""
        every = len(next(iter(self.starts.values()))[0]) // chains
        some = {name: w[0, ::every][:chains] for name, w in self.starts.items()}
        return jax.vmap(lambda w: jax.flatten_util.ravel_pytree(w)[0])(some)

    def judge(self, weights: dict[str, np.ndarray]) -> Cell:
        ours = np.asarray(predictions(weights, self.data.x_test))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            width = float((ours.std(0) / self._reference_predictions.std(0)).mean())
        if not (np.isfinite(ours).all() and width < EXPLODED):
            return Cell(np.inf, np.inf)
        return Cell(self._distance(ours), width)


def measure(
    oracle: Oracle,
    size: Size,
    target: Potential,
    arguments: Arguments,
    h: float,
    seed: int,
    from_prior: bool = False,
    **setting: Any,
) -> Cell:
    """Return the distance of one setting at one step size.

    :param from_prior: whether chains start at draws from the prior, as the paper's do.
    """
    keys = random.split(random.key(seed), size.chains)
    starts = oracle.positions(size.chains)
    if from_prior:
        starts = jax.vmap(lambda key: target.sample_init_position(key, arguments))(keys)
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
    return oracle.judge(weights)


def library(oracle: Oracle, size: Size, h: float) -> Cell:
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

    def mean(draw: dict[str, Array], x: Array) -> Array:
        return network(draw, x, jnp.tanh)[:, 0]

    summary = predictive_summary(weights, mean, oracle.data.x_test, reference=oracle.reference)
    print(summary, flush=True)
    return oracle.judge(weights)


VARIED: dict[str, dict[str, dict[str, Any]]] = {
    "integrator": {s: {"integrator": s} for s in INTEGRATORS},
    "length": {f"{n}": {"integrator": "lie_trotter", "num_leapfrog": n} for n in LENGTHS},
    "friction": {f"{c:g}": {"friction": c, "from_prior": True} for c in FRICTIONS},
}
WHAT, ROWS = (*RUNS, "library", *VARIED), (str(BATCH), "all")
VALUES = tuple(dict.fromkeys(itertools.chain(*VARIED.values())))
DISTANCE = (
    f"mean Kolmogorov distance of {NUM_DRAWS} draws' predictions to those of NUTS (and the ratio "
    "of their SDs)"
)
HEADS = {
    "integrator": "Figure 8, C = 5",  # the paper: with minibatches all integrators are equal
    "length": "Figure 9, Lie-Trotter, steps between refreshments",  # the paper: one is safe
    "friction": "Figure 10, leapfrog, chains from the prior",  # the paper: 5 to 10, not sensitive
}


def experiment(
    name: str,
    size: Size,
    seed: int,
    parts: Parts,
    what: Sequence[str] = WHAT,
    rows: Sequence[str] = ROWS,
    values: Sequence[str] = VALUES,
) -> None:
    """Run the parts of a split, and print their tables.

    :param what: some of the two runs of NUTS, the kernel and what is varied.
    :param rows: of minibatches.
    :param values: of what is varied.
    """
    scale = STEP_SCALES[name]
    size = size._replace(step_sizes=tuple(scale * h for h in size.step_sizes))
    oracle = Oracle(name, size, seed, parts)
    where = f"{name}-{seed}"
    for run in RUNS:
        if run in what and not parts.is_join:
            getattr(oracle, run)
    if "library" in what:
        own = parts.get(f"{where}-self_distance", oracle.self_distance)
        h = 0.01 * scale
        cell = parts.get(f"{where}-library", partial(library, oracle, size, h))
        if own and cell:
            output.print_table(
                f"{name}, split {seed}: {DISTANCE}",
                ("predictions of", "distance"),
                [
                    ("NUTS (the self-distance ± SD over choices of draws)", Mean(*own)),
                    (f"SHMC by MCMC, {BATCH} rows, h = {h:g}, from the prior", Cell(*cell)),
                ],
            )
    for varied, batch in itertools.product(filter(VARIED.__contains__, what), rows):
        is_all = batch == "all"
        batch_size = len(oracle.data.y) if is_all else int(batch)
        step_sizes = size.step_sizes[: size.num_full] if is_all else size.step_sizes
        target = oracle.target(batch_size)
        lines = []
        for i, (value, setting) in enumerate(VARIED[varied].items()):
            if i >= size.values or value not in values:
                continue
            cells = []
            for h in step_sizes:
                one = partial(measure, oracle, size, *target, h, i, **setting)
                cell = parts.get(f"{where}-{varied}-{value}-{batch}-{h:g}", one)
                cells.append(Cell(*cell) if cell else "-")
            if set(cells) != {"-"}:
                lines.append((value, *cells))
        if lines:
            output.print_table(
                f"{HEADS[varied]}. {name}, split {seed}, {batch} rows: {DISTANCE}",
                (varied, *(f"h = {h:g}" for h in step_sizes)),
                lines,
            )


def main() -> None:
    options, parts = arguments(
        __doc__, data=tuple(STEP_SCALES), what=WHAT, rows=ROWS, values=VALUES
    )
    output.print_title("Franzese et al. (2021): a network with one hidden layer")
    size = {"QUICK": QUICK, "DEFAULT": DEFAULT, "PAPER": PAPER}[options.size]
    splits = range(size.splits) if options.splits is None else options.splits
    for name, seed in itertools.product(options.data, splits):
        experiment(name, size, seed, parts, options.what, options.rows, options.values)


if __name__ == "__main__":
    main()
