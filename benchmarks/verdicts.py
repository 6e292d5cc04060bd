"""Compare diagnoses with the truth: whether wrong runs are called ok, and right runs are flagged.

This script runs ``SGHMCSplit`` with no arguments on small problems with known posteriors, and
compares the report and the warnings of each run with its true error. With ``--save FILE`` each run
is stored in the file when it ends, and is not run again.

Draws are compared in normal scores, all coordinates alike: a draw's rank among the exact posterior
in unconstrained space, as the normal quantile of that rank, and at most 3 either way. Exact draws
have mean 0 and SD 1 then, whatever the posterior's shape and tails. A run is

- *wrong* where any mean is off by more than 0.3 or any SD by more than 20%, and by more than three
  standard errors, or where draws are not finite;
- *right* where none is and three standard errors are no more than that;
- *thin* otherwise: the effective sample size is too small to decide;
- *raised* where an error is raised before there are draws.

A run is called ok where the report is ok and there is no warning or error. It is flagged where the
report is flagged, or a warning or an error was raised. Otherwise it is inconclusive.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from timing import print_header, print_row
from verdict_exact import Reference  # vocabulary: ok
from verdict_problems import PROBLEMS, Problem  # vocabulary: ok
from verdict_references import normal_scores, read  # vocabulary: ok
from verdict_shapes import Built  # vocabulary: ok

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation import initialisation, settings
from numpyro_sgmcmc.diagnostics.run_data import RunData
from numpyro_sgmcmc.errors import DataOrderWarning, SGMCMCWarning, SubsampleSizeWarning

MEAN_TOLERANCE, SD_TOLERANCE = 0.3, 0.2
_ERRORS = 3.0  # standard errors that chance may explain
_SD_OF_SCORES = 0.9975  # of a standard normal that ends at 3 either way
_COLUMNS = {
    "problem": 32,
    "seed": 4,
    "truth": 8,
    "mean": 6,
    "sd": 6,
    "ESS": 6,
    "report": 12,
    "warned": 6,
    "s": 4,
}
_KINDS = {
    "kind": 12,
    "runs": 5,
    "raised": 8,
    "wrong": 6,
    "called ok": 12,
    "inconclusive": 12,
    "thin": 5,
    "called ok ": 12,
    "right": 6,
    "flagged": 8,
    "inconclusive ": 12,
}


class Outcome(NamedTuple):
    """
    - **truth** - right, wrong, thin or raised.
    - **mean** - the mean that is most off, in normal scores.
    - **sd** - the SD that is most off, relative.
    - **ess** - smallest effective sample size of the scores.
    - **diagnoses** - of the sites, each once.
    - **sentence** - the report's diagnosis, or the message of the error.
    - **is_ok** - whether the report calls the run ok.
    - **is_flagged** - whether it is biased or not converged, or an error was raised.
    - **warned** - messages of the warnings.
    - **seconds** - compilation, warm-up, draws and report.
    """

    truth: str
    mean: float = np.nan
    sd: float = np.nan
    ess: float = np.nan
    diagnoses: tuple[str, ...] = ()
    sentence: str = ""
    is_ok: bool = False
    is_flagged: bool = False
    warned: tuple[str, ...] = ()
    seconds: float = 0.0


class Cell(NamedTuple):
    """One run."""

    problem: str
    seed: int


def read_outcomes(file: Path | None) -> dict[Cell, Outcome]:
    """Read the runs of a file, one per line."""
    if file is None or not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines():
        fields = json.loads(line)
        cell = Cell(*fields.pop("cell"))
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
        }
        found[cell] = Outcome(**given)
    return found


def write_outcome(file: Path, cell: Cell, outcome: Outcome) -> None:
    """Add a run to the file."""
    with file.open("a") as out:
        out.write(json.dumps({"cell": cell, **outcome._asdict()}) + "\n")


def judge(draws: np.ndarray, reference: Reference) -> Outcome:
    """Compare unconstrained draws ``(chains, draws, d)`` with the exact posterior."""
    if not np.isfinite(draws).all():
        return Outcome("wrong", np.inf, np.inf, 0.0)
    z = normal_scores(draws.astype(np.float64), reference.quantiles)
    mean, sd = z.mean((0, 1)), z.std((0, 1)) / _SD_OF_SCORES
    ess, ess_sd = _effective(z), _effective((z - mean) ** 2)
    mean_error = np.sqrt(sd**2 / ess + 1 / reference.ess)
    sd_error = np.sqrt(sd**2 / 2 / ess_sd + 0.5 / reference.ess)
    off, error = np.stack([np.abs(mean), np.abs(sd - 1)]), np.stack([mean_error, sd_error])
    tolerance = np.array([[MEAN_TOLERANCE], [SD_TOLERANCE]])
    is_wrong = (off > np.maximum(tolerance, _ERRORS * error)).any()
    is_known = (_ERRORS * error <= tolerance).all()
    return Outcome(
        "wrong" if is_wrong else "right" if is_known else "thin",
        float(mean[np.abs(mean).argmax()]),
        float(sd[np.abs(sd - 1).argmax()] - 1),
        float(ess.min()),
    )


def _effective(x: np.ndarray) -> np.ndarray:
    """Return the effective sample size; one for constant chains."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.asarray(effective_sample_size(x))
    return np.where(np.isfinite(found) & (found > 0), found, 1.0)


def evaluate(problem: Problem, built: Built, reference: Reference, seed: int) -> Outcome:
    """Run four chains with no arguments, and compare them with the reference and the report."""
    model, args = built
    kernel = SGHMCSplit(model)
    # Else all seeds would have one warm-up.
    settings.WARMUP_SEED = initialisation.WARMUP_SEED = seed
    options = {"num_warmup": 300, "num_samples": 1000, **problem.options}
    mcmc = MCMC(kernel, **options, num_chains=4, chain_method="vectorized", progress_bar=False)
    start = time.perf_counter()
    outcome = Outcome("raised")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            mcmc.run(jax.random.key(seed), *args, batch_size=problem.batch_size)
            outcome = judge(np.asarray(RunData.from_mcmc(mcmc, "evaluate").draws), reference)
            report = bias_report(mcmc)
            outcome = outcome._replace(
                diagnoses=tuple(sorted({s.diagnosis for s in report.sites})),
                sentence=report.diagnosis,
                is_ok=report.is_ok,
                is_flagged=report.is_flagged,
            )
        except (ValueError, RuntimeError) as error:  # the library's and NumPyro's
            sentence = f"{type(error).__name__}: {error}"
            outcome = outcome._replace(sentence=sentence, is_flagged=True)
    warned = tuple(str(w.message) for w in caught if is_counted(w.category))
    return outcome._replace(warned=warned, seconds=time.perf_counter() - start)


def is_counted(category: type[Warning]) -> bool:
    """Return whether a warning is this package's or a plain one, such as NumPyro's.

    Warnings about the time of a step are not.
    """
    if issubclass(category, (SubsampleSizeWarning, DataOrderWarning)):
        return False
    return category is UserWarning or issubclass(category, SGMCMCWarning)


def reported(o: Outcome) -> str:
    """Return the report's result: ok, flagged or inconclusive."""
    if o.is_flagged or o.warned:
        return "flagged"
    return "ok" if o.is_ok else "inconclusive"


def show(cell: Cell, o: Outcome) -> None:
    """Print one row, and below it the diagnosis and warnings of runs that are not ok."""
    known = o.truth != "raised"
    cells = {
        "problem": cell.problem,
        "seed": cell.seed,
        "truth": o.truth.upper() if (o.truth, reported(o)) == ("wrong", "ok") else o.truth,
        "mean": f"{o.mean:+.2f}" if known else "",
        "sd": f"{o.sd:+.2f}" if known else "",
        "ESS": f"{o.ess:.0f}" if known else "",
        "report": reported(o),
        "warned": len(o.warned) or "",
        "s": f"{o.seconds:.0f}",
    }
    print_row([cells[c] for c in _COLUMNS], _COLUMNS.values())
    if reported(o) != "ok":
        for sentence in ([] if o.is_ok else [o.sentence]) + list(o.warned):
            print(f"    {sentence[:60]}", flush=True)


def count(kind: str, outcomes: Iterable[Outcome]) -> dict[str, str | int]:
    """Return a row of the table of true errors against reports."""
    pairs = [(o.truth, reported(o)) for o in outcomes]
    truths = [truth for truth, _ in pairs]
    return {
        "kind": kind,
        "runs": len(pairs),
        "raised": truths.count("raised"),
        "wrong": truths.count("wrong"),
        "called ok": pairs.count(("wrong", "ok")),
        "inconclusive": pairs.count(("wrong", "inconclusive")),
        "thin": truths.count("thin"),
        "called ok ": pairs.count(("thin", "ok")),
        "right": truths.count("right"),
        "flagged": pairs.count(("right", "flagged")),
        "inconclusive ": pairs.count(("right", "inconclusive")),
    }


def summarise(found: dict[Cell, Outcome]) -> None:
    """Print a row for each kind of fault, and one for all runs."""
    print()
    print_row(_KINDS, _KINDS.values())
    kinds = dict.fromkeys(PROBLEMS[cell.problem].fault for cell in found)
    rows = [
        count(kind, [o for cell, o in found.items() if PROBLEMS[cell.problem].fault == kind])
        for kind in kinds
    ]
    for row in [*rows, count("all", found.values())]:
        print_row([row[c] for c in _KINDS], _KINDS.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=list(PROBLEMS), choices=PROBLEMS, metavar="PROBLEM"
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--batch-size", type=int, help="in place of the problems' own")
    parser.add_argument("--save", type=Path, help="file of finished runs, added to")
    given = parser.parse_args()
    print_header("Diagnoses: true errors against reports")
    print_row(_COLUMNS, _COLUMNS.values())
    kept = read_outcomes(given.save)
    found = {}
    for name in given.only:
        problem, cells = PROBLEMS[name], [Cell(name, seed) for seed in range(given.seeds)]
        if given.batch_size:
            problem = problem._replace(batch_size=given.batch_size)
        built = problem.build()  # once, so that all seeds share what is compiled for the model
        for cell in cells:
            if cell not in kept:
                kept[cell] = evaluate(problem, built, read(name, built[1]), cell.seed)
                if given.save:
                    write_outcome(given.save, cell, kept[cell])
            found[cell] = kept[cell]
            show(cell, found[cell])
        jax.clear_caches()  # compiled programs hold mappings of memory, which are limited
        gc.collect()
    summarise(found)


if __name__ == "__main__":
    main()
