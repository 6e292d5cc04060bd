"""Effective draws per second compared with NUTS and HMCECS, on a million rows.

Two posteriors: logistic regression (D = 20), which is nearly Gaussian, and Student-t regression
with unknown scale and degrees of freedom (D = 22), which is less so. The default minibatch has 100
rows. ESS/s is the smallest effective sample size of a coordinate over the seconds of sampling,
without compilation and warm-up; *all* is the time of one call of ``MCMC.run`` with a new kernel,
compilation included. *Mean* and *sd* are the largest errors relative to the NUTS run, whose Monte
Carlo error is about 0.06 SDs and 4%; for logistic regression relative to the Gaussian at the mode.

Targets: 3,000 times the ESS/s of NUTS, 15 times that of HMCECS, *all* at most a tenth of NUTS's.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from logistic_regression import BATCH_SIZE, DIM, logistic, make_data
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from rivals import hmcecs, unconstrained
from scaling import laplace, sample
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit

WIDTHS = (12, 40, 8, 10, 10, 10, 8, 14)


def robust(X: Array, y: Array, batch_size: int | None = None) -> None:
    """Student-t regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.StudentT(nu, X[i] @ beta, sigma), obs=y[i])


class Row(NamedTuple):
    """
    - **draws** - unconstrained, shape ``(chains, draws, d)``.
    - **sampling** - seconds.
    - **all** - seconds.
    """

    draws: np.ndarray
    sampling: float
    all: float

    @property
    def rate(self) -> float:
        """Effective draws a second."""
        return float(effective_sample_size(self.draws).min()) / self.sampling


def flat(model: Callable, args: tuple, samples: Any) -> np.ndarray:
    """Draws as one array."""
    z = unconstrained(model, args, samples)
    return np.concatenate([np.reshape(z[k], (*z[k].shape[:2], -1)) for k in sorted(z)], -1)


def by_nuts(model: Callable, args: tuple, num_draws: int) -> Row:
    """One chain, as many warm-up iterations as draws."""
    start = time.perf_counter()
    mcmc = MCMC(NUTS(model), num_warmup=num_draws, num_samples=num_draws, progress_bar=False)
    mcmc.warmup(random.key(1), *args)
    jax.block_until_ready(mcmc.post_warmup_state)
    middle = time.perf_counter()
    mcmc.run(random.key(2), *args)
    draws = flat(model, args, mcmc.get_samples(group_by_chain=True))
    end = time.perf_counter()
    return Row(draws, end - middle, end - start)


def by_hmcecs(model: Callable, args: tuple, mean: dict[str, Any]) -> Row:
    """One chain; the second of two runs is timed, the first compiles."""
    start = time.perf_counter()
    mcmc = hmcecs(model, args, mean, 2000)
    mcmc.run(random.key(1), *args, batch_size=BATCH_SIZE)
    jax.block_until_ready(mcmc.get_samples())
    whole = time.perf_counter() - start
    mcmc.post_warmup_state = mcmc.last_state
    start = time.perf_counter()
    mcmc.run(random.key(2), *args, batch_size=BATCH_SIZE)
    draws = flat(model, args, mcmc.get_samples(group_by_chain=True))
    return Row(draws, time.perf_counter() - start, whole)


def by_us(
    model: Callable, args: tuple, batch_size: int, num_chains: int = 4, **options: Any
) -> Row:
    """Vectorized chains with 8,000 draws together."""
    num_draws = 8_000 // num_chains
    start = time.perf_counter()
    mcmc = MCMC(
        SGHMCSplit(model, **options),
        num_warmup=300,
        num_samples=num_draws,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), *args, batch_size=batch_size)
    draws = flat(model, args, mcmc.get_samples(group_by_chain=True))
    whole = time.perf_counter() - start
    kernel = SGHMCSplit(model, **options)
    timed = sample(kernel, num_chains, num_draws, args, {"batch_size": batch_size})
    return Row(draws, timed.sampling, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-rows", type=float, default=1e6)
    parser.add_argument("--nuts-draws", type=int, default=300)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    num_rows = int(args.num_rows)
    print_header(f"Effective draws a second, {num_rows:,} rows")
    header = ["model", "sampler", "ESS", "sampling", "ESS/s", "all", "mean", "sd"]
    print_row(header, WIDTHS)
    X, labels = make_data(random.key(0), num_rows, DIM)
    noise = random.t(random.key(3), 4.0, (num_rows,))
    y = X @ jnp.linspace(-1.0, 1.0, DIM) + 0.8 * noise
    for name, model, data in (("logistic", logistic, (X, labels)), ("Student-t", robust, (X, y))):
        ours = {
            "SGHMCSplit": by_us(model, data, BATCH_SIZE),
            "SGHMCSplit, B = 10": by_us(model, data, 10),
            "SGHMCSplit, B = 10, step_size = 0.8": by_us(model, data, 10, step_size=0.8),
            "SGHMCSplit, B = 10, 0.53, 100 chains": by_us(model, data, 10, 100, step_size=0.53),
            "SGHMCSplit, B = 10, 0.8, 100 chains": by_us(model, data, 10, 100, step_size=0.8),
        }
        nuts = by_nuts(model, data, args.nuts_draws)
        if model is logistic:
            mean, sd = laplace(*data)
        else:
            mean, sd = nuts.draws.mean((0, 1)), nuts.draws.std((0, 1))
        centre = {"beta": mean[:DIM]}
        if model is robust:  # sites in the order of their names
            centre |= {"nu": mean[DIM], "sigma": mean[DIM + 1]}
        rows = {"NUTS": nuts, "HMCECS, Taylor proxy": by_hmcecs(model, data, centre), **ours}
        for sampler, row in rows.items():
            shift = np.abs((row.draws.mean((0, 1)) - mean) / sd).max()
            ratio = row.draws.std((0, 1)) / sd
            print_row(
                [
                    name,
                    sampler,
                    f"{effective_sample_size(row.draws).min():.0f}",
                    f"{row.sampling:.2f} s",
                    f"{row.rate:,.3g}",
                    f"{row.all:.0f} s",
                    f"{shift:.2f}",
                    f"{ratio.min():.3f} {ratio.max():.3f}",
                ],
                WIDTHS,
            )
        best = rows["SGHMCSplit"].rate
        print(
            f"SGHMCSplit over NUTS: {best / nuts.rate:,.0f}; over HMCECS: "
            f"{best / rows['HMCECS, Taylor proxy'].rate:.1f}; all over NUTS's: "
            f"{rows['SGHMCSplit'].all / nuts.all:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
