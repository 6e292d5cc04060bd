"""Tables 1 and 2 of Franzese et al. (2021): deep networks on four tables, gradients on all rows.

Energy and Yacht are in no package. The paper's SGHMC is Springenberg's, which adapts its mass and
friction in its burn-in; here it is the Euler integrator at the same step size and friction as SHMC,
whose integrator is the leapfrog.

Several processes may each run some of the data sets, splits and kernels into one ``--folder``;
``--join`` prints the tables of what is there.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import output
from franzese2021_data import (
    CLASSIFICATIONS,
    REGRESSIONS,
    Split,
    Table,
    load,
    make_model,
    network,
    split,
)
from jax import Array, random
from jax.scipy.special import logsumexp
from numpyro.infer import MCMC, init_to_sample
from parts import Parts, arguments
from standard_errors import Mean

from numpyro_sgmcmc import SGHMC, SHMC

KERNELS = {"SHMC": SHMC, "SGHMC": SGHMC}
CLAIMS = {
    "Boston": ("2.821 ± 0.61, 2.825 ± 0.63", "2.600 ± 0.09, 2.600 ± 0.09"),
    "Concrete": ("4.907 ± 0.39, 4.833 ± 0.46", "2.971 ± 0.07, 2.948 ± 0.09"),
    "Ionosphere": ("0.920 ± 0.03, 0.916 ± 0.02", "0.294 ± 0.04, 0.295 ± 0.04"),
    "Vehicle": ("0.777 ± 0.02, 0.783 ± 0.02", "0.588 ± 0.03, 0.588 ± 0.03"),
}


class Size(NamedTuple):
    """
    - **splits** - random ones.
    - **draws** - a run, of one chain.
    - **step_size** - and the steps from one draw to the next.
    - **burn_in** - draws that are left out.
    """

    splits: int
    draws: int
    step_size: float
    num_steps: int
    burn_in: int


DEFAULT = Size(5, 200, 0.01, 50, 40)
PAPER = Size(5, 200, 0.005, 500, 4)
QUICK = Size(2, 10, 0.01, 5, 2)


class Scores(NamedTuple):
    """
    - **error** - RMSE in the table's units, or accuracy.
    - **mnll** - mean negative log-likelihood of the rows to test on, in the table's units.
    """

    error: float
    mnll: float


def scores(outputs: Array, data: Split, variance: float | None) -> Scores:
    """Return the scores of the mixture over draws.

    :param outputs: the networks', shape ``(draws, n, k)``.
    """
    y = data.y_test
    if variance is None:
        log_probabilities = jax.nn.log_softmax(outputs)
        mixture = logsumexp(log_probabilities, axis=0) - jnp.log(len(outputs))
        chosen = jnp.take_along_axis(mixture, y[:, None], axis=1)[:, 0]
        return Scores(float((mixture.argmax(1) == y).mean()), float(-chosen.mean()))
    f = outputs[..., 0]
    log_densities = -0.5 * (y - f) ** 2 / variance - 0.5 * jnp.log(2 * jnp.pi * variance)
    mixture = logsumexp(log_densities, axis=0) - jnp.log(len(f)) - jnp.log(data.unit)
    rmse = data.unit * jnp.sqrt(jnp.square(f.mean(0) - y).mean())
    return Scores(float(rmse), float(-mixture.mean()))


def run(name: str, model: Callable, data: Split, size: Size, seed: int) -> dict[str, Array]:
    """Draws of one chain with the paper's friction, nothing left to the warm-up."""
    kernel = KERNELS[name](
        model,
        friction=5.0,
        step_size=size.step_size,
        num_steps=size.num_steps,
        adapt_mass_matrix=False,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        init_strategy=init_to_sample,
    )
    mcmc = MCMC(kernel, num_warmup=size.burn_in, num_samples=size.draws, progress_bar=False)
    with warnings.catch_warnings():
        # All rows at every step are what the paper has here.
        warnings.filterwarnings("ignore", message=".*subsample_size")
        mcmc.run(random.key(seed), data.x, data.y)
    return mcmc.get_samples()


def measure(table: Table, size: Size, kernel: str, seed: int) -> Scores:
    """Return the scores of a kernel on a split."""
    is_regression = table.variance is not None
    hidden, outputs = (4 * [50], 1) if is_regression else (2 * [50], int(table.y.max()) + 1)
    sizes = (table.x.shape[1], *hidden, outputs)
    data = split(table, seed)
    model = make_model(sizes, jax.nn.relu, table.variance)
    weights = run(kernel, model, data, size, seed)
    f = jax.lax.map(lambda w: network(w, data.x_test, jax.nn.relu), weights)
    return scores(f, data, table.variance)


def row(name: str, found: dict[str, list[Scores]]) -> tuple[str, ...]:
    """The table's: means over splits and their SDs, as the paper's."""

    def cell(field: str) -> str:
        values = [np.array([getattr(s, field) for s in of_splits]) for of_splits in found.values()]
        return ", ".join(f"{Mean(v.mean(), v.std(ddof=1)):.3f}" for v in values)

    splits = ", ".join(str(len(of_splits)) for of_splits in found.values())
    return name, splits, cell("error"), CLAIMS[name][0], cell("mnll"), CLAIMS[name][1]


def experiment(
    size: Size, data: Sequence[str], kernels: Sequence[str], splits: Sequence[int], parts: Parts
) -> None:
    """Tables 1 and 2."""
    for what, names in (("RMSE", REGRESSIONS), ("accuracy", CLASSIFICATIONS)):
        rows = []
        for name in filter(data.__contains__, names):
            table = load(name)
            found: dict[str, list[Scores]] = {kernel: [] for kernel in kernels}
            for seed, kernel in itertools.product(splits, kernels):
                part = f"{name}-{kernel}-{seed}"
                numbers = parts.get(part, partial(measure, table, size, kernel, seed))
                found[kernel] += [Scores(*numbers)] if numbers else []
            if min(map(len, found.values())) > 1:
                rows.append(row(name, found))
        if rows:
            output.print_table(
                f"{what} and mean negative log-likelihood ({', '.join(kernels)}), mean ± SD over "
                f"random splits; {size.draws} draws, {size.num_steps} steps of "
                f"{size.step_size:g} from one to the next",
                ("table", "splits", what, "paper", "MNLL", "paper"),
                rows,
            )


def main() -> None:
    options, parts = arguments(
        __doc__, data=(*REGRESSIONS, *CLASSIFICATIONS), kernels=tuple(KERNELS)
    )
    output.print_title("Franzese et al. (2021): deep networks on four tables")
    size = {"QUICK": QUICK, "DEFAULT": DEFAULT, "PAPER": PAPER}[options.size]
    splits = range(size.splits) if options.splits is None else options.splits
    experiment(size, options.data, options.kernels, splits, parts)


if __name__ == "__main__":
    main()
