"""Whether a run that is wrong is called fine, and whether right runs are flagged.

``python benchmarks/verdicts.py`` runs ``SGHMCSplit`` with no arguments on the small problems of
``verdict_problems.py``, whose posteriors are known, and sets what the library says of each run
beside what is true. With ``--save FILE`` each run is kept in the file when it ends, and is not run
again.

Draws are compared in normal scores, all coordinates alike: a draw's rank among the exact posterior
in unconstrained space, as the normal quantile of that rank, and at most 3 either way. Exact draws
have mean 0 and sd 1 then, whatever the posterior's shape and tails. A run is

- *wrong* where any mean is off by more than 0.3 or any sd by more than 20 %, and by more than three
  standard errors, or where draws are not finite;
- *right* where none is and three standard errors are no more than that;
- *thin* otherwise: too few effective draws to say.

It is called fine where the report calls it fine and nothing was warned of nor refused, and flagged
where the report flags it, or anything was warned of or refused; else it is left unclear. A run that
is refused before it has draws is neither right nor wrong.
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
from verdict_exact import Reference
from verdict_problems import PROBLEMS, Problem
from verdict_references import normal_scores, read
from verdict_shapes import Built

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation import initialisation
from numpyro_sgmcmc.diagnostics.run_data import RunData

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
    "said": 8,
    "warned": 6,
    "s": 4,
}
_KINDS = {
    "kind": 12,
    "runs": 5,
    "refused": 8,
    "wrong": 6,
    "called ok": 12,
    "inconclusive": 8,
    "thin": 5,
    "called ok ": 12,
    "right": 6,
    "flagged": 8,
    "unclear ": 8,
}


class Outcome(NamedTuple):
    """
    - **truth** - right, wrong, thin or refused.
    - **mean** - the mean that is most off, in normal scores.
    - **sd** - the sd that is most off, relative.
    - **ess** - smallest effective sample size of the scores.
    - **verdicts** - of the sites, each once.
    - **sentence** - the report in a few sentences, or what was refused.
    - **is_fine** - whether the report calls the run right.
    - **is_flagged** - whether it calls it biased or apart, or anything was refused.
    - **warned** - what was warned of.
    - **seconds** - compilation, warm-up, draws and report.
    """

    truth: str
    mean: float = np.nan
    sd: float = np.nan
    ess: float = np.nan
    verdicts: tuple[str, ...] = ()
    sentence: str = ""
    is_fine: bool = False
    is_flagged: bool = False
    warned: tuple[str, ...] = ()
    seconds: float = 0.0


class Cell(NamedTuple):
    """One run."""

    problem: str
    seed: int


def read_outcomes(file: Path | None) -> dict[Cell, Outcome]:
    """The runs that a file holds, one a line."""
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
    """Unconstrained draws ``(chains, draws, d)`` beside the exact posterior."""
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
    """Effective sample size; one where the chains stand still, all at the same place or not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.asarray(effective_sample_size(x))
    return np.where(np.isfinite(found) & (found > 0), found, 1.0)


def evaluate(problem: Problem, built: Built, reference: Reference, seed: int) -> Outcome:
    """Four chains with no arguments, judged, and what the library says of them."""
    model, args = built
    kernel = SGHMCSplit(model)
    initialisation.WARMUP_SEED = seed  # else all seeds would have one warm-up
    options = {"num_warmup": 300, "num_samples": 1000, **problem.options}
    mcmc = MCMC(kernel, **options, num_chains=4, chain_method="vectorized", progress_bar=False)
    start = time.perf_counter()
    outcome = Outcome("refused")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            mcmc.run(jax.random.key(seed), *args, batch_size=problem.batch_size)
            outcome = judge(np.asarray(RunData.from_mcmc(mcmc, "verdicts").draws), reference)
            report = bias_report(mcmc)
            outcome = outcome._replace(
                verdicts=tuple(sorted({s.diagnosis for s in report.sites})),
                sentence=report.diagnosis,
                is_fine=report.is_ok,
                is_flagged=report.is_flagged,
            )
        except (ValueError, RuntimeError) as error:  # the library's refusals, and NumPyro's
            sentence = f"{type(error).__name__}: {error}"
            outcome = outcome._replace(sentence=sentence, is_flagged=True)
    warned = tuple(str(w.message) for w in caught if w.category is UserWarning)
    return outcome._replace(warned=warned, seconds=time.perf_counter() - start)


def said(o: Outcome) -> str:
    """What a user is told of the run: fine, flagged or unclear."""
    if o.is_flagged or o.warned:
        return "flagged"
    return "ok" if o.is_fine else "inconclusive"


def show(cell: Cell, o: Outcome) -> None:
    """One row, and what was said below it where it is more than that all is well."""
    known = o.truth != "refused"
    cells = {
        "problem": cell.problem,
        "seed": cell.seed,
        "truth": o.truth.upper() if (o.truth, said(o)) == ("wrong", "ok") else o.truth,
        "mean": f"{o.mean:+.2f}" if known else "",
        "sd": f"{o.sd:+.2f}" if known else "",
        "ESS": f"{o.ess:.0f}" if known else "",
        "said": said(o),
        "warned": len(o.warned) or "",
        "s": f"{o.seconds:.0f}",
    }
    print_row([cells[c] for c in _COLUMNS], _COLUMNS.values())
    if said(o) != "ok":
        for sentence in ([] if o.is_fine else [o.sentence]) + list(o.warned):
            print(f"    {sentence[:60]}", flush=True)


def count(kind: str, outcomes: Iterable[Outcome]) -> dict[str, str | int]:
    """A row of the table of what was true and what was said."""
    pairs = [(o.truth, said(o)) for o in outcomes]
    truths = [truth for truth, _ in pairs]
    return {
        "kind": kind,
        "runs": len(pairs),
        "refused": truths.count("refused"),
        "wrong": truths.count("wrong"),
        "called ok": pairs.count(("wrong", "ok")),
        "inconclusive": pairs.count(("wrong", "inconclusive")),
        "thin": truths.count("thin"),
        "called ok ": pairs.count(("thin", "ok")),
        "right": truths.count("right"),
        "flagged": pairs.count(("right", "flagged")),
        "unclear ": pairs.count(("right", "inconclusive")),
    }


def summarise(found: dict[Cell, Outcome]) -> None:
    """The runs of each kind, and all."""
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
    print_header("Verdicts: what is true, and what is said")
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
