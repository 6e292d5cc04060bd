"""Check posteriors with no arguments, and the bias report where they are wrong.

``python benchmarks/trust.py`` runs kernels with default options on the problems of
``trust_problems.py`` and compares them with long NUTS runs. ``--bad`` runs one kernel with
deliberately wrong settings and counts the reports that detect this; ``--rivals`` runs other
methods. Coordinates are compared in unconstrained space. With ``--save FILE`` each run is stored in
the file when it ends, and is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.distributions import biject_to
from numpyro.handlers import seed as seeded
from numpyro.handlers import trace
from numpyro.infer import MCMC
from rivals import STEP_SIZES, blackjax_draws, hmcecs_draws, svi_draws, unconstrained
from timing import print_header, print_row
from trust_problems import PROBLEMS
from trust_references import FILE, fingerprint, summarise

import numpyro_sgmcmc
from numpyro_sgmcmc import bias_report

KERNELS = ("SGHMCSplit", "SGNHT", "SHMC baoab", "SHMC lie_trotter", "SGMGT")
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "step 3 times": {"factor": 3.0},
    "step 6 times": {"factor": 6.0},
    "minibatch, h = 0.1": {"gradient_estimator": "minibatch", "step_size": 0.1},
    "minibatch, iid, h = 0.03": {
        "gradient_estimator": "minibatch",
        "subsampling": "iid",
        "step_size": 0.03,
    },
    "five rows": {"batch_size": 5},
    "five rows, minibatch": {"batch_size": 5, "gradient_estimator": "minibatch", "step_size": 0.03},
    "no preconditioner": {"adapt_mass_matrix": False, "factor": 3.0},
}
RIVALS = ("SVI normal", "SVI multivariate", "HMCECS", "BlackJAX sghmc", "BlackJAX sgnht")
WIDTHS = (34, 18, 9, 13, 9, 9, 9, 8, 8)


class Outcome(NamedTuple):
    """
    - **shift** - mean error of each coordinate, in posterior SDs.
    - **inflation** - SD over the reference's, minus one.
    - **shift_error** - Monte Carlo error of the shifts, of both runs.
    - **inflation_error** - the same of the inflations.
    - **ess** - smallest effective sample size.
    - **seconds** - compilation, warm-up and draws.
    - **said** - SD inflation estimated by the bias report; empty for the rivals.
    - **said_error** - its standard error.
    - **is_flagged** - whether the report calls the run biased.
    """

    shift: np.ndarray
    inflation: np.ndarray
    shift_error: np.ndarray
    inflation_error: np.ndarray
    ess: float
    seconds: float = 0.0
    said: np.ndarray = np.zeros(0)
    said_error: np.ndarray = np.zeros(0)
    is_flagged: bool = False


class Cell(NamedTuple):
    """One run: the problem, the kernel with its settings or the rival, and the seed."""

    problem: str
    label: str
    seed: int


def read_outcomes(file: Path | None) -> dict[Cell, Outcome]:
    """Read the runs of a file, one per line."""
    if file is None or not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines():
        fields = json.loads(line)
        cell = Cell(*fields.pop("cell"))
        arrays = {k: np.array(v) if isinstance(v, list) else v for k, v in fields.items()}
        found[cell] = Outcome(**arrays)
    return found


def write_outcome(file: Path, cell: Cell, outcome: Outcome) -> None:
    """Add a run to the file."""
    fields = {
        k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in outcome._asdict().items()
    }
    with file.open("a") as out:
        out.write(json.dumps({"cell": cell, **fields}) + "\n")


def make(kernel: str, model: Callable, **options: Any) -> Any:
    """Build a kernel by its name in the table."""
    name, *integrator = kernel.split()
    extra = {"integrator": integrator[0]} if integrator else {}
    return getattr(numpyro_sgmcmc, name)(model, **extra, **options)


def run(kernel: Any, args: tuple, batch_size: int, num_samples: int, seed: int) -> MCMC:
    """Four chains."""
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *args, batch_size=batch_size)
    return mcmc


def compare(draws: Mapping[str, Any], args: tuple, reference: Mapping[str, Any]) -> Outcome:
    """Compare unconstrained draws with the reference, in the order of the report's coordinates."""
    assert reference["data"] == fingerprint(args), "make trust_references.json anew"
    ours = summarise(draws)
    theirs = reference["sites"]
    sites = sorted(ours)

    def flat(of: Mapping[str, Any], key: str) -> np.ndarray:
        return np.concatenate([np.ravel(of[s][key]) for s in sites])

    sd, ess, ess_sd = flat(ours, "sd"), flat(ours, "ess"), flat(ours, "ess_sd")
    right, ess_right = flat(theirs, "sd"), flat(theirs, "ess")
    return Outcome(
        (flat(ours, "mean") - flat(theirs, "mean")) / right,
        sd / right - 1.0,
        np.sqrt(np.square(sd / right) / ess + 1.0 / ess_right),
        sd / right * np.sqrt(0.5 / ess_sd + 0.5 / flat(theirs, "ess_sd")),
        float(ess.min()),
    )


def evaluate(
    kernel: str, problem: str, reference: Mapping[str, Any], settings: Mapping[str, Any], seed: int
) -> Outcome:
    """Run a kernel on a problem and compare it with the reference."""
    options = dict(settings)
    model, args = PROBLEMS[problem].build()
    batch_size = options.pop("batch_size", PROBLEMS[problem].batch_size)
    factor = options.pop("factor", None)
    start = time.perf_counter()
    if factor is not None:
        probe = make(kernel, model, **options)
        state = probe.init(jax.random.key(seed), 0, None, args, {"batch_size": batch_size})
        options["step_size"] = min(1.3, factor * float(state.adapt_state.step_size))
        options["num_steps"] = int(state.num_steps)
    mcmc = run(make(kernel, model, **options), args, batch_size, 1000, seed)
    jax.block_until_ready(mcmc.last_state)
    seconds = time.perf_counter() - start
    draws = unconstrained(model, args, mcmc.get_samples(group_by_chain=True))
    outcome = compare(draws, args, reference)
    report = bias_report(mcmc)
    said = report.sd_inflation
    return outcome._replace(
        seconds=seconds, said=said.value, said_error=said.error, is_flagged=report.is_flagged
    )


def rival(name: str, problem: str, reference: Mapping[str, Any], seed: int) -> Outcome:
    """Run another method on the problem; of several tries return the one with the smallest error.

    :raises Exception: what the rival itself raises, where no try succeeds.
    """
    model, args = PROBLEMS[problem].build()
    common = model, args, PROBLEMS[problem].batch_size
    key = jax.random.key(seed)
    found = trace(seeded(model, key)).get_trace(*args)
    mean = {
        k: np.reshape(s["mean"], biject_to(found[k]["fn"].support).inv(found[k]["value"]).shape)
        for k, s in reference["sites"].items()
    }
    family, _, which = name.partition(" ")
    tries: list[Callable[[], Any]]
    if family == "SVI":
        tries = [partial(svi_draws, *common, dense=which == "multivariate", rng_key=key)]
    elif family == "HMCECS":
        tries = [partial(hmcecs_draws, *common, mean, key)]
    else:
        tries = [partial(blackjax_draws, which, *common, mean, h, key) for h in STEP_SIZES]
    outcomes = []
    for attempt in tries:
        start = time.perf_counter()
        draws = jax.block_until_ready(attempt())
        seconds = time.perf_counter() - start
        outcomes.append(compare(draws, args, reference)._replace(seconds=seconds))
    return min(outcomes, key=distance)


def distance(o: Outcome) -> float:
    """Return the largest error, in SDs or relative; infinite for draws that are not finite."""
    worst = max(np.abs(o.shift).max(), np.abs(o.inflation).max())
    return float(worst) if np.isfinite(worst) else np.inf


def is_right(o: Outcome) -> bool:
    """Means within 0.1 SD and SDs within 7%, beyond three standard errors."""
    mean = np.abs(o.shift) <= 0.1 + 3.0 * o.shift_error
    return bool((mean & (np.abs(o.inflation) <= 0.07 + 3.0 * o.inflation_error)).all())


def accurate_share(o: Outcome) -> float:
    """Return the share of coordinates with an SD within 5% or two standard errors of the report."""
    error = np.hypot(o.said_error, o.inflation_error)
    allowed = np.maximum(0.05 * (1.0 + o.inflation), 2.0 * error)
    return float(np.mean(np.abs(o.said - o.inflation) <= allowed))


def strictly_accurate_share(o: Outcome) -> float:
    """Return the share with 5 percentage points in place of 5% of the SD, which is stricter."""
    error = np.hypot(o.said_error, o.inflation_error)
    return float(np.mean(np.abs(o.said - o.inflation) <= np.maximum(0.05, 2.0 * error)))


def flag(o: Outcome) -> str:
    """Compare the flag of the report with the true error."""
    wrong = (np.abs(o.inflation) > 0.2).any() or (np.abs(o.shift) > 0.3).any()
    fine = (np.abs(o.inflation) < 0.03).all() and (np.abs(o.shift) < 0.05).all()
    if wrong and not o.is_flagged:
        return "MISSED"
    return "FALSE" if fine and o.is_flagged else "flag" if o.is_flagged else "-"


def show(problem: str, kernel: str, o: Outcome) -> None:
    """One row; a rival has nothing to say of itself."""
    k = int(np.abs(o.inflation).argmax())
    own = ["", "", ""]
    if o.said.size:
        own = [f"{o.said[k]:+.2f}", f"{accurate_share(o):.2f}", flag(o)]
    print_row(
        [
            problem[:34],
            kernel,
            f"{np.abs(o.shift).max():.2f}",
            f"{o.inflation.min():+.2f} {o.inflation.max():+.2f}",
            *own,
            f"{o.ess:.0f}",
            f"{o.seconds:.0f}",
        ],
        WIDTHS,
    )


def summary(cells: list[Outcome]) -> str:
    """Summarise how many runs and how many reports are right."""
    right = sum(is_right(o) for o in cells)
    truth = sum(accurate_share(o) >= 0.9 for o in cells)
    strict = sum(strictly_accurate_share(o) >= 0.9 for o in cells)
    flags = [flag(o) for o in cells]
    return (
        f"right in {right} of {len(cells)}; the report is accurate in {truth}, counted in "
        f"percentage points in {strict};\n"
        f"missed {flags.count('MISSED')}, false alarms {flags.count('FALSE')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS, metavar="PROBLEM"
    )
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--bad", action="store_true", help="settings that are wrong on purpose")
    parser.add_argument("--rivals", action="store_true", help="SVI, HMCECS, BlackJAX")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--save", type=Path, help="file of finished runs, added to")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    known = json.loads(FILE.read_text())
    what = "rivals" if args.rivals else "wrong on purpose" if args.bad else "no arguments"
    print_header(f"Trust: {what}")
    header = ["problem", "kernel", "mean", "sd", "report", "accurate", "flag", "ESS", "s"]
    print_row(header, WIDTHS)
    labels = RIVALS if args.rivals else args.kernels
    cells = []
    kept = read_outcomes(args.save)
    settings = SETTINGS if args.bad else {"": {}}
    runs = itertools.product(args.problems, args.seeds, labels, settings)
    for problem, seed, label, setting in runs:
        cell = Cell(problem, f"{label}, {setting}" if setting else label, seed)
        if cell in kept:
            o = kept[cell]
        elif args.rivals:
            try:
                o = rival(label, problem, known[problem], seed)
            except Exception as error:  # whatever a rival cannot do is part of the table
                print(f"{problem}, {label}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
        else:
            o = evaluate(label, problem, known[problem], settings[setting], seed)
        if cell not in kept and args.save:
            write_outcome(args.save, cell, o)
        show(problem, setting or label, o)
        jax.clear_caches()  # compiled programs hold mappings of memory, which are limited
        if not args.rivals and not PROBLEMS[problem].hard:
            cells.append(o)
    if cells:
        print(f"\n{summary(cells)}")


if __name__ == "__main__":
    main()
