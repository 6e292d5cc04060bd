"""Compute means and SDs in unconstrained space by long NUTS runs, stored in ``large_references/``.

``python benchmarks/large_references.py`` makes the files anew (hours on two cores); with names of
problems, only those.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import jax
import numpy as np
import timing  # noqa: F401, puts the repository's root on the path
from large_problems import LARGE_PROBLEMS
from numpyro.infer import MCMC, NUTS
from rivals import unconstrained

from tests.sampling.references import summarise

__all__ = ["FOLDER", "file_of"]

FOLDER = Path(__file__).parent / "large_references"


def file_of(problem: str) -> Path:
    """Return the file of a problem's reference."""
    return FOLDER / (re.sub("[^a-z0-9]+", "-", problem.lower()) + ".npz")


def make(name: str) -> None:
    """A long run of NUTS, summed up, with the seconds it took."""
    problem = LARGE_PROBLEMS[name]
    model, args = problem.build()
    mcmc = MCMC(
        NUTS(model, dense_mass=problem.dense, target_accept_prob=0.9),
        num_warmup=problem.num_nuts // 2,
        num_samples=problem.num_nuts,
        num_chains=4,
        chain_method="parallel",
        progress_bar=False,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    mcmc.run(jax.random.key(0), *args, extra_fields=("num_steps", "diverging"))
    draws = mcmc.get_samples(group_by_chain=True)
    jax.block_until_ready(draws)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    extra = mcmc.get_extra_fields()
    sites = summarise(unconstrained(model, args, draws))
    found = {f"{k}:{site}": np.float32(v) for site, s in sites.items() for k, v in s.items()}
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(file_of(name), wall=seconds[0], cpu=seconds[1], **found)
    worst = min(np.min(s["ess"]) for s in sites.values())
    dim = sum(np.size(s["ess"]) for s in sites.values())
    print(
        f"{name}: {dim} parameters, {seconds[0]:.0f} s, {seconds[1]:.0f} s of CPU, smallest ESS "
        f"{worst:.0f}, {extra['num_steps'].mean():.0f} gradients a draw, "
        f"{extra['diverging'].sum()} divergences",
        flush=True,
    )


if __name__ == "__main__":
    import numpyro

    numpyro.set_host_device_count(4)
    for name in sys.argv[1:] or LARGE_PROBLEMS:
        make(name)
