"""Means and SDs in unconstrained space by long NUTS runs, in ``trust_references.json``.

``python benchmarks/trust_references.py`` makes the file anew (an hour on two cores); with names of
problems, only those.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from numpyro.infer import MCMC, NUTS
from rivals import unconstrained
from trust_problems import PROBLEMS

from tests.sampling.references import fingerprint, summarise

FILE = Path(__file__).parent / "trust_references.json"


def reference(name: str) -> dict[str, Any]:
    """A long run of NUTS, summed up, with the seconds it took."""
    model, args = PROBLEMS[name].build()
    mcmc = MCMC(
        NUTS(model, dense_mass=True, target_accept_prob=0.99 if PROBLEMS[name].hard else 0.8),
        num_warmup=PROBLEMS[name].num_nuts // 2,
        num_samples=PROBLEMS[name].num_nuts,
        num_chains=4,
        chain_method="parallel",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), *args)
    samples = unconstrained(model, args, mcmc.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - start
    return {"data": fingerprint(args), "seconds": seconds, "sites": summarise(samples)}


def main(names: list[str]) -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names or PROBLEMS:
        known[name] = reference(name)
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        worst = min(min(s["ess"]) for s in known[name]["sites"].values())
        print(f"{name}: {known[name]['seconds']:.0f} s, smallest ESS {worst:.0f}", flush=True)


if __name__ == "__main__":
    import numpyro

    numpyro.set_host_device_count(4)
    main(sys.argv[1:])
