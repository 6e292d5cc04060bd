"""Posterior means and SDs by long NUTS runs, stored in ``references.json``.

``python -m tests.sampling.references`` makes the file (about ten minutes on two cores): four chains
of 2,500 draws for each model of :mod:`tests.sampling.models`, seeded. Each entry holds a
fingerprint of the data for which it was computed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "references.json"


def fingerprint(args: tuple) -> str:
    """Return a digest of the data."""
    digest = hashlib.sha256()
    for x in args:
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()[:16]


def summarise(samples: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return mean, SD and ESS of each coordinate of draws of shape ``(chains, draws, ...)``.

    ``ess`` is the ESS of the mean, ``ess_sd`` that of the squared deviations, by which the standard
    error of an SD is computed.
    """
    from numpyro.diagnostics import effective_sample_size

    summary = {}
    for name, draws in sorted(samples.items()):
        x = np.asarray(draws, np.float64).reshape(*draws.shape[:2], -1)
        mean = x.mean((0, 1))
        summary[name] = {
            "mean": mean.tolist(),
            "sd": x.std((0, 1), ddof=1).tolist(),
            "ess": np.atleast_1d(effective_sample_size(x)).tolist(),
            "ess_sd": np.atleast_1d(effective_sample_size((x - mean) ** 2)).tolist(),
        }
    return summary


def compute_violations(
    actual: dict[str, Any],
    reference: dict[str, Any],
    tolerance: float = 0.1,
    z: float = 3.0,
) -> dict[str, dict[str, float]]:
    """Return for each site by how much errors of means and log SDs exceed the tolerance.

    Means are within 0.1 posterior SD and SDs within 10%, plus three standard errors of the Monte
    Carlo error of both runs (a model has up to 53 coordinates).

    :param actual: a result of :func:`summarise`.
    :param reference: another one, perhaps with more sites.
    """
    violations = {}
    for site, summary in actual.items():
        a = {k: np.array(v) for k, v in summary.items()}
        b = {k: np.array(v) for k, v in reference[site].items()}
        mean_bias = np.abs(a["mean"] - b["mean"]) / b["sd"]
        mean_error = np.sqrt((a["sd"] / b["sd"]) ** 2 / a["ess"] + 1 / b["ess"])
        log_sd_ratio = np.abs(np.log(a["sd"] / b["sd"]))
        sd_error = np.sqrt(0.5 / a["ess_sd"] + 0.5 / b["ess_sd"])
        violations[site] = {
            "mean": float((mean_bias - tolerance - z * mean_error).max()),
            "sd": float((log_sd_ratio - np.log1p(tolerance) - z * sd_error).max()),
        }
    return violations


def _offsets(samples: dict[str, Any]) -> dict[str, Any]:
    """Return draws of the centred model as draws of the non-centred one."""
    mu, tau = samples["mu"][..., None], samples["tau"][..., None]
    kept = {k: v for k, v in samples.items() if k != "alpha"}
    return {**kept, "offset": (samples["alpha"] - mu) / tau}


# Two parametrisations of one posterior: NUTS mixes four times better in the first.
TRANSFORMED = {
    "hierarchical Poisson, non-centred": ("hierarchical Poisson, centred", _offsets),
}


def make(only: list[str]) -> None:
    """Run NUTS on every model (or on those named) and write the file."""
    import jax
    from numpyro.infer import MCMC, NUTS

    from tests.sampling.models import MODELS

    references = json.loads(FILE.read_text()) if only else {}
    for n, (name, build) in enumerate(MODELS.items()):
        if name in TRANSFORMED or (only and name not in only):
            continue
        model, args = build()
        kernel = NUTS(model, dense_mass=True)
        mcmc = MCMC(
            kernel,
            num_warmup=1000,
            num_samples=2500,
            num_chains=4,
            chain_method="parallel",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(n), *args)
        samples = mcmc.get_samples(group_by_chain=True)
        sites = summarise(samples)
        references[name] = {"data": fingerprint(args), "sites": sites}
        for other, (source, transform) in TRANSFORMED.items():
            if source == name:
                references[other] = {
                    "data": fingerprint(args),
                    "sites": summarise(transform(samples)),
                }
        smallest = min(min(s["ess"]) for s in sites.values())
        print(f"{name}: smallest effective sample size {smallest:.0f}", flush=True)
    FILE.write_text(json.dumps(references, indent=1) + "\n")


if __name__ == "__main__":
    import numpyro

    numpyro.set_host_device_count(4)
    make(sys.argv[1:])
