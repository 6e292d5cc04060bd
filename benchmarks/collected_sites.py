"""Peak memory of a run with many group effects, with draws of all sites and of a few.

    python benchmarks/collected_sites.py [--groups 1e5] [--draws 1000]

Each row is a process: four chains on a hierarchical Gaussian with one row per group. With
``collect_sites=["mean", "sd"]`` the effects have running moments in place of draws. The last
columns compare the effects with their exact posterior: the largest error of a mean in Monte Carlo
standard errors, and the mean and the largest relative error of the SDs. The last column is a
checksum of the first draws of mean and SD. With draws of the effects there are fewer draws, and a
hundredth of the effects is compared. Step size, number of steps and mass matrix are given, and
every step takes all rows, so that the time is not that of a warm-up.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings
import zlib

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit, running_moments

MEAN, SD, NOISE = 0.5, 1.0, 0.5
NUM_COMPARED = 100
WIDTHS = (8, 7, 8, 8, 8, 7, 8, 8, 12)


def effects(y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    with numpyro.plate("groups", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mean, sd))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[i], NOISE), obs=y[i])


def get_peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run(num_groups: int, num_draws: int, how: str) -> None:
    """Sample, and print the peak, its growth, the seconds and the errors of the effects."""
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    y = MEAN + np.hypot(SD, NOISE) * rng.standard_normal(num_groups)
    y = jax.block_until_ready(jax.numpy.asarray(y, jax.numpy.float32))
    before = get_peak_bytes()
    # Flat positions are in alphabetical order: effect, mean, log SD.
    variance = 1 / (1 / SD**2 + 1 / NOISE**2)
    scale = (SD**2 + NOISE**2) / num_groups
    inverse_mass_matrix = np.r_[np.full(num_groups, variance), scale, scale]
    options = {"collect_sites": ["mean", "sd"]} if how == "moments" else {}
    kernel = SGHMCSplit(
        effects,
        step_size=0.4,
        num_steps=5,
        inverse_mass_matrix=inverse_mass_matrix,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        **options,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=num_draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = {"effect": np.tile(np.asarray(y), (4, 1)), "mean": np.full(4, MEAN), "sd": np.zeros(4)}
    began = time.perf_counter()
    mcmc.run(jax.random.key(1), y, batch_size=num_groups, init_params=start)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    seconds, peak = time.perf_counter() - began, get_peak_bytes()
    draws = {name: np.asarray(draws[name]) for name in draws}
    step = 1
    if how == "moments":
        moments = running_moments(mcmc)
        mean, sd, error = (x["effect"] for x in (moments.mean, moments.sd, moments.mcse))
    else:
        x = draws.pop("effect")[..., :: (step := 100)].astype(np.float64)
        mean, sd = x.mean((0, 1)), x.std((0, 1))
        error = sd / np.sqrt(effective_sample_size(x))
    # The exact moments given the data, with the mean hyperparameters, which many groups determine.
    mu, tau = draws["mean"].mean(dtype=np.float64), draws["sd"].mean(dtype=np.float64)
    exact_variance = 1 / (1 / tau**2 + 1 / NOISE**2)
    exact_mean = exact_variance * (mu / tau**2 + np.asarray(y, np.float64)[::step] / NOISE**2)
    z, ratio = np.abs((mean - exact_mean) / error).max(), sd / np.sqrt(exact_variance) - 1
    digest = zlib.crc32(b"".join(x[:, :NUM_COMPARED].tobytes() for x in draws.values()))
    print(before, peak, seconds, z, ratio.mean(), np.abs(ratio).max(), digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--groups", type=float, default=1e5)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--child", choices=("draws", "moments"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_groups = int(args.groups)
    if args.child:
        run(num_groups, args.draws, args.child)
        return
    print_header(f"Peak memory of {num_groups:,} group effects, 4 chains")
    print_row(
        ["effects", "draws", "data MB", "run MB", "seconds", "max z", "SD bias", "largest", "crc"],
        WIDTHS,
    )
    for how, num_draws in (("moments", args.draws), ("draws", NUM_COMPARED)):
        command = [sys.executable, __file__, "--child", how]
        command += ["--groups", str(num_groups), "--draws", str(num_draws)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        before, peak, seconds, z, bias, largest, digest = out.split()[-7:]
        megabytes = [f"{float(x) / 1e6:.0f}" for x in (before, float(peak) - float(before))]
        errors = [f"{float(z):.1f}", f"{float(bias):+.2%}", f"{float(largest):.1%}"]
        print_row([how, num_draws, *megabytes, f"{float(seconds):.0f}", *errors, digest], WIDTHS)


if __name__ == "__main__":
    main()
