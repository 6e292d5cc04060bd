"""Peak memory of a run with many group effects, with draws of all sites and of a few.

    python benchmarks/collected_sites.py [--groups 1e5] [--draws 1000]

Each row is a process: four chains on a hierarchical Gaussian with ten rows per group, without
arguments but the batch size of 20,000. With ``collect_sites`` the effects have running moments in
place of draws. *Warm-up* and *run* are the peaks in MB beyond the memory with the data. The last
columns compare the effects with their exact posterior: SD over effects of the error of a mean in
Monte Carlo standard errors, and mean and largest relative error of the SDs. The last column is a
checksum of the first draws of mean and SD. With draws of the effects there are fewer draws, and a
hundredth of the effects is compared.
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
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit, running_moments

MEAN, SD, NOISE, ROWS_PER_GROUP, BATCH_SIZE = 0.5, 1.0, 2.0, 10, 20_000
NUM_COMPARED = 100
NUM_SHARED_DRAWS = 40  # of the shared parameters, over which the exact moments are averaged
WIDTHS = (8, 7, 8, 8, 8, 8, 7, 8, 8, 12)


def effects(group, y, num_groups, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(mean, sd))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], noise), obs=y[i])


def get_peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def compute_exact_moments(draws, group, y, num_groups):
    """Return means and SDs of the effects, over draws of the shared parameters."""
    rows, sums = np.bincount(group, minlength=num_groups), np.bincount(group, y, num_groups)
    chosen = np.linspace(0, draws["sd"].size - 1, NUM_SHARED_DRAWS).astype(int)
    mean, variance, square = 0.0, 0.0, 0.0
    for k in chosen:
        mu, tau, noise = (draws[name].ravel()[k].astype(float) for name in ("mean", "sd", "noise"))
        v = 1 / (1 / tau**2 + rows / noise**2)
        m = v * (mu / tau**2 + sums / noise**2)
        mean, variance, square = mean + m, variance + v, square + m**2
    mean, variance, square = (x / len(chosen) for x in (mean, variance, square))
    return mean, np.sqrt(variance + square - mean**2)


def run(num_groups: int, num_draws: int, how: str) -> None:
    """Sample, and print the peaks, their growth, the seconds and the errors of the effects."""
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    group = rng.integers(0, num_groups, ROWS_PER_GROUP * num_groups).astype(np.int32)
    effect = MEAN + SD * rng.standard_normal(num_groups)
    y = (effect[group] + NOISE * rng.standard_normal(group.size)).astype(np.float32)
    data = *(jax.block_until_ready(jnp.asarray(x)) for x in (group, y)), num_groups
    before = get_peak_bytes()
    options = {"collect_sites": ["mean", "sd", "noise"]} if how == "moments" else {}
    mcmc = MCMC(
        SGHMCSplit(effects, **options),
        num_warmup=num_draws // 4,
        num_samples=num_draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    began = time.perf_counter()
    mcmc.warmup(jax.random.key(1), *data, batch_size=BATCH_SIZE)
    after_warmup = get_peak_bytes()
    mcmc.run(jax.random.key(1), *data, batch_size=BATCH_SIZE)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    seconds, peak = time.perf_counter() - began, get_peak_bytes()
    draws = {name: np.asarray(draws[name]) for name in draws}
    step = 1
    if how == "moments":
        moments = running_moments(mcmc)
        mean, sd, error = (
            np.asarray(x["effect"]) for x in (moments.mean, moments.sd, moments.mcse)
        )
    else:
        x = draws.pop("effect")[..., :: (step := 100)].astype(np.float64)
        mean, sd = x.mean((0, 1)), x.std((0, 1))
        error = sd / np.sqrt(effective_sample_size(x))
    exact_mean, exact_sd = (x[::step] for x in compute_exact_moments(draws, group, y, num_groups))
    z, ratio = np.std((mean - exact_mean) / error), sd / exact_sd - 1
    digest = zlib.crc32(b"".join(x[:, :NUM_COMPARED].tobytes() for x in draws.values()))
    print(before, after_warmup, peak, seconds, z, ratio.mean(), np.abs(ratio).max(), digest)


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
    header = ["effects", "draws", "data MB", "warm-up", "run", "seconds", "SD of z"]
    print_row([*header, "SD bias", "largest", "crc"], WIDTHS)
    for how, num_draws in (("moments", args.draws), ("draws", NUM_COMPARED)):
        command = [sys.executable, __file__, "--child", how]
        command += ["--groups", str(num_groups), "--draws", str(num_draws)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        before, *peaks, seconds, z, bias, largest, digest = out.split()[-8:]
        megabytes = [before, *(str(float(x) - float(before)) for x in peaks)]
        megabytes = [f"{float(x) / 1e6:.0f}" for x in megabytes]
        errors = [f"{float(z):.2f}", f"{float(bias):+.2%}", f"{float(largest):.1%}"]
        print_row([how, num_draws, *megabytes, f"{float(seconds):.0f}", *errors, digest], WIDTHS)


if __name__ == "__main__":
    main()
