"""Check runs whose minibatch noise is not that of a regression: four kinds on three posteriors.

The rows of a plate have equal shares of a potential with known moments, and noise that sums to zero
over all rows. The gradient noise of a minibatch is

- *isotropic*: of equal variance in all directions of the model;
- *correlated*: with a correlation of 0.9 between all coordinates;
- *anisotropic*: with SDs from 0.1 to 3 times the isotropic ones;
- *varying*: isotropic, times exp(z/2), where z is the first coordinate in its SDs.

With no arguments control variates remove all but the last. Each case therefore also runs with plain
gradients of independent minibatches, and the last one with those of an epoch, in which noise
cancels. A run is wrong where a mean is off by more than 0.2 SD or an SD by more than
15%, and by more than three standard errors. It is reported if the bias report does not diagnose it
as ``ok``, or if there is a warning.

``--all-rows`` initialises chains at the mean, and estimates the bias from gradients on all rows at
all draws. The default estimates leave out covariances within three standard errors.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.diagnostics import effective_sample_size
from numpyro.distributions import constraints
from numpyro.infer import MCMC
from timing import print_header, print_row
from verdicts import is_counted  # vocabulary: ok

import numpyro_sgmcmc
from numpyro_sgmcmc import bias_report

NUM_ROWS, BATCH_SIZE = 10_000, 500
MEAN_TOLERANCE, SD_TOLERANCE = 0.2, 0.15
SETTINGS: dict[str, dict[str, str]] = {
    "": {},
    "minibatch": {"gradient_estimator": "minibatch"},
    "minibatch, iid": {"gradient_estimator": "minibatch", "subsampling": "iid"},
}
COLUMNS = {
    "posterior": 9,
    "noise": 11,
    "kernel": 10,
    "options": 14,
    "mean bias (SD)": 16,
    "estimated": 14,
    "SD bias": 12,
    "estimated ": 12,
    "ESS": 6,
    "diagnosis": 14,
    "warnings": 22,
    "result": 8,
}


class Target(NamedTuple):
    """
    - **potential** - of a position.
    - **mean** - exact, shape ``(d,)``.
    - **sd** - exact, shape ``(d,)``.
    - **precision** - sum of the variances of the rows' isotropic noise: as in a regression, the
      precision of the posterior (of its principal directions, the geometric mean).
    """

    potential: Callable[[Array], Array]
    mean: np.ndarray
    sd: np.ndarray
    precision: float


def make_normal(d: int = 10, condition: float = 1e4) -> Target:
    """Build a normal with precisions from 1 to the condition number, in rotated directions."""
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.standard_normal((d, d)))[0]
    eigenvalues = np.geomspace(1.0, condition, d)
    root = jnp.asarray(np.sqrt(eigenvalues)[:, None] * rotation.T, jnp.float32)
    variance = np.einsum("ik,k,ik->i", rotation, 1 / eigenvalues, rotation)
    return Target(
        lambda x: 0.5 * jnp.sum(jnp.square(root @ x)),
        np.zeros(d),
        np.sqrt(variance),
        np.sqrt(condition),
    )


def make_banana(sd: float = 0.5) -> Target:
    """Build the second coordinate as the square of the first, a standard normal, with errors."""
    return Target(
        lambda x: 0.5 * (x[0] ** 2 + jnp.square((x[1] - x[0] ** 2) / sd)),
        np.array([0.0, 1.0]),
        np.array([1.0, np.sqrt(2.0 + sd**2)]),
        1.0,
    )


def make_funnel(d: int = 5) -> Target:
    """Build normals whose log variance is a standard normal."""
    return Target(
        lambda x: 0.5 * (x[0] ** 2 + jnp.sum(x[1:] ** 2) * jnp.exp(-x[0]) + (d - 1) * x[0]),
        np.zeros(d),
        np.array([1.0] + [np.exp(0.25)] * (d - 1)),
        1.0,
    )


TARGETS = {"normal": make_normal, "banana": make_banana, "funnel": make_funnel}
NOISES = ("isotropic", "correlated", "anisotropic", "varying")
CASES = [
    *((t, n, "SGHMCSplit", o) for t in TARGETS for n in NOISES for o in ("", "minibatch, iid")),
    *((t, "varying", k, "minibatch") for t in TARGETS for k in ("SGHMCSplit", "SGNHT", "SGRHMC")),
]


def make_slopes(noise: str, target: Target) -> Array:
    """Return the slopes of the rows, which sum to exactly zero: pairs of opposite sign."""
    rng = np.random.default_rng(1)
    d = len(target.sd)
    covariance = np.eye(d)
    if noise == "correlated":
        covariance = 0.1 * np.eye(d) + 0.9
    elif noise == "anisotropic":
        covariance = np.diag(np.geomspace(0.1, 3.0, d) ** 2)
    half = rng.multivariate_normal(np.zeros(d), covariance, NUM_ROWS // 2)
    slopes = rng.permutation(np.concatenate([half, -half]))
    return jnp.asarray(slopes * np.sqrt(target.precision / NUM_ROWS), jnp.float32)


def make_model(target: Target) -> Callable[..., None]:
    """Build the model; its arguments are the slopes and by how much noise grows along z."""
    unit = float(target.sd[0])

    def model(slopes: Array, growth: float, batch_size: int | None = None) -> None:
        d = slopes.shape[1]
        x = numpyro.sample("x", dist.ImproperUniform(constraints.real_vector, (), (d,)))
        with numpyro.plate("rows", NUM_ROWS, subsample_size=batch_size) as i:
            noise = slopes[i] @ x * jnp.exp(growth * x[0] / unit)
            numpyro.factor("share", noise - target.potential(x) / NUM_ROWS)

    return model


def measure(
    target: Target, noise: str, kernel: Any, seed: int, on_all_rows: bool = False
) -> list[str]:
    """Return the cells of a run.

    :param on_all_rows: whether chains start at the mean, with a report on all rows.
    """
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    arguments = make_slopes(noise, target), 0.5 if noise == "varying" else 0.0
    inits = {"x": np.tile(target.mean, (mcmc.num_chains, 1))} if on_all_rows else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(seed), *arguments, batch_size=BATCH_SIZE, init_params=inits)
        num_draws = mcmc.num_chains * mcmc.num_samples
        report = bias_report(mcmc, full_data=on_all_rows, num_draws=num_draws)
    x = (np.asarray(mcmc.get_samples(group_by_chain=True)["x"]) - target.mean) / target.sd
    mean, sd = x.mean((0, 1)), x.std((0, 1)) - 1
    ess, squares = effective_sample_size(x), np.square(x - mean)
    mean_error = (1 + sd) / np.sqrt(ess)
    sd_error = squares.std((0, 1)) / np.sqrt(effective_sample_size(squares)) / 2 / (1 + sd)
    is_wrong = (np.abs(mean) > np.maximum(MEAN_TOLERANCE, 3 * mean_error)).any() or (
        np.abs(sd) > np.maximum(SD_TOLERANCE, 3 * sd_error)
    ).any()
    warned = sorted({w.category.__name__ for w in caught if is_counted(w.category)})
    is_silent = report.is_ok and not warned
    k, j = np.abs(mean).argmax(), np.abs(sd).argmax()
    return [
        f"{mean[k]:+.2f} ± {mean_error[k]:.2f}",
        f"{report.mean_bias.value[k]:+.2f} ± {report.mean_bias.error[k]:.2f}",
        f"{100 * sd[j]:+.0f} ± {100 * sd_error[j]:.0f}%",
        f"{100 * report.sd_inflation.value[j]:+.0f} ± {100 * report.sd_inflation.error[j]:.0f}%",
        f"{ess.min():.0f}",
        report.sites[0].diagnosis,
        ", ".join(w.removesuffix("Warning") for w in warned),
        ("MISSED" if is_silent else "reported") if is_wrong else "right",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--noise", nargs="+", default=NOISES, choices=NOISES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all-rows", action="store_true", help="a report on all rows")
    given = parser.parse_args()
    print_header("Kinds of gradient noise")
    print_row(COLUMNS, COLUMNS.values())
    built = {name: TARGETS[name]() for name in given.only}
    models = {name: make_model(target) for name, target in built.items()}
    for name, noise, kernel, options in CASES:
        if name not in given.only or noise not in given.noise:
            continue
        sampler = getattr(numpyro_sgmcmc, kernel)(models[name], **SETTINGS[options])
        cells = measure(built[name], noise, sampler, given.seed, given.all_rows)
        print_row([name, noise, kernel, options, *cells], COLUMNS.values())


if __name__ == "__main__":
    main()
