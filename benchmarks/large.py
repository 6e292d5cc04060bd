"""Posteriors with 100 to 10,000 parameters and default options, compared with NUTS.

``python benchmarks/large.py`` runs the problems of ``large_problems.py`` with default options, and
compares each coordinate in unconstrained space with the references of ``large_references.py``.
Words as arguments select problems by their names. ``--small`` takes minibatches that are known to
be too small: the library must report a bias.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import jax
import numpy as np
from large_problems import LARGE_PROBLEMS
from large_references import file_of
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC
from rivals import unconstrained
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit, bias_report
from tests.sampling.references import summarise

_COLUMNS = {
    "problem": 36,
    "parameters": 10,
    "B": 7,
    "steps": 6,
    "R-hat": 7,
    "ESS": 6,
    "means off": 10,
    "SDs off": 14,
    "beyond": 7,
    "CPU s": 6,
    "ESS/s": 7,
    "ESS/s of NUTS": 14,
    "report": 13,
}
_DIAGNOSES = ("not converged", "biased", "multimodal", "inconclusive", "ok")  # the worst first


def run(name: str, batch_size: int, seed: int) -> tuple[MCMC, float, list[str]]:
    """Return the run of four chains, the CPU seconds it took, and the library's warnings."""
    model, args = LARGE_PROBLEMS[name].build()
    mcmc = MCMC(
        SGHMCSplit(model),
        num_warmup=300,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(seed), *args, batch_size=batch_size)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, time.process_time() - start, [str(w.message) for w in caught]


def compare(name: str, batch_size: int, seed: int) -> list[str]:
    """Print one row of the table and return the library's warnings."""
    mcmc, seconds, messages = run(name, batch_size, seed)
    model, args = LARGE_PROBLEMS[name].build()
    draws = unconstrained(model, args, mcmc.get_samples(group_by_chain=True))
    found, reference = summarise(draws), np.load(file_of(name))

    def flat(key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a statistic of all coordinates, and the reference's."""
        sites = sorted(found)
        values = np.concatenate([np.ravel(found[s][key]) for s in sites])
        return values, np.concatenate([np.ravel(reference[f"{key}:{s}"]) for s in sites])

    (mean, true_mean), (sd, true_sd), (ess, nuts_ess) = flat("mean"), flat("sd"), flat("ess")
    ess_of_sd, nuts_ess_of_sd = flat("ess_sd")
    mean_bias, sd_bias = (mean - true_mean) / true_sd, sd / true_sd - 1.0
    error = np.sqrt(1 / ess + 1 / nuts_ess)
    sd_error = np.sqrt(0.5 / ess_of_sd + 0.5 / nuts_ess_of_sd)
    beyond = (np.abs(mean_bias) > 0.1 + 3 * error) | (np.abs(sd_bias) > 0.1 + 3 * sd_error)
    r_hat = max(np.max(split_gelman_rubin(np.asarray(x, np.float64))) for x in draws.values())
    diagnoses = {s.diagnosis for s in bias_report(mcmc).sites}
    cells: dict[str, Any] = {
        "problem": name,
        "parameters": len(mean),
        "B": batch_size,
        "steps": int(np.max(mcmc.last_state.num_steps)),
        "R-hat": f"{r_hat:.3f}",
        "ESS": f"{ess.min():.0f}",
        "means off": f"{np.abs(mean_bias).max():.2f}",
        "SDs off": f"{100 * sd_bias.min():+.0f} to {100 * sd_bias.max():+.0f}%",
        "beyond": int(beyond.sum()),
        "CPU s": f"{seconds:.0f}",
        "ESS/s": f"{ess.min() / seconds:.1f}",
        "ESS/s of NUTS": f"{nuts_ess.min() / float(reference['cpu']):.1f}",
        "report": next(v for v in _DIAGNOSES if v in diagnoses),
    }
    print_row([cells[c] for c in _COLUMNS], _COLUMNS.values())
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of problems' names")
    parser.add_argument("--small", action="store_true", help="minibatches that are too small")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print_header("Posteriors with 123 to 9,741 parameters")
    print_row(_COLUMNS, _COLUMNS.values())
    for name, problem in LARGE_PROBLEMS.items():
        batch_size = problem.small if options.small else problem.batch_size
        is_wanted = not options.words or any(word in name for word in options.words)
        if is_wanted and batch_size is not None:
            for message in compare(name, batch_size, options.seed):
                print(f"    {message}", flush=True)


if __name__ == "__main__":
    main()
