"""Whether posteriors are right with no arguments, and whether the bias report tells when not.

``python benchmarks/trust.py`` runs kernels with no arguments on the problems of
``trust_problems.py`` and compares them with long NUTS runs. ``--bad`` runs one kernel with
settings that are wrong on purpose, and counts how often the report says so. All comparisons are in
unconstrained space, coordinate by coordinate.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from common import print_header, print_row
from numpyro.infer import MCMC
from trust_problems import PROBLEMS
from trust_references import FILE, fingerprint, summarise, unconstrained

import numpyro_sgmcmc
from numpyro_sgmcmc import bias_report
from numpyro_sgmcmc.diagnostics import BiasReport

KERNELS = ("SGHMCSplit", "SGNHT", "SHMC baoab", "SHMC lie_trotter", "SGMGT")
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "step 3 times": {"factor": 3.0},
    "step 6 times": {"factor": 6.0},
    "plain, h = 0.1": {"gradient": "plain", "step_size": 0.1},
    "plain, iid, h = 0.03": {"gradient": "plain", "minibatch": "iid", "step_size": 0.03},
    "five rows": {"batch_size": 5},
    "five rows, plain": {"batch_size": 5, "gradient": "plain", "step_size": 0.03},
    "no whitening": {"adapt_mass_matrix": False, "factor": 3.0},
}
WIDTHS = (34, 18, 9, 13, 9, 9, 9, 8, 8)


class Outcome(NamedTuple):
    """
    - **shift** - mean error of each coordinate, in posterior sds.
    - **inflation** - sd over the reference's, minus one.
    - **shift_error** - Monte Carlo error of the shifts, of both runs.
    - **inflation_error** - the same of the inflations.
    - **report** - the bias report.
    - **ess** - smallest effective sample size.
    - **total_seconds** - compilation, warm-up and draws.
    """

    shift: np.ndarray
    inflation: np.ndarray
    shift_error: np.ndarray
    inflation_error: np.ndarray
    report: BiasReport
    ess: float
    total_seconds: float


def make(kernel: str, model: Callable, **options: Any) -> Any:
    """A kernel by its name in the table."""
    name, *scheme = kernel.split()
    extra = {"scheme": scheme[0]} if scheme else {}
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


def compare(mcmc: MCMC, model: Callable, args: tuple, reference: Mapping[str, Any]) -> Outcome:
    """The run beside the reference, in the order of the report's coordinates."""
    assert reference["data"] == fingerprint(args), "make trust_references.json anew"
    draws = unconstrained(model, args, mcmc.get_samples(group_by_chain=True))
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
        bias_report(mcmc),
        float(ess.min()),
        0.0,
    )


def evaluate(
    kernel: str, problem: str, reference: Mapping[str, Any], settings: Mapping[str, Any], seed: int
) -> tuple[Outcome, MCMC]:
    """One cell of the table."""
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
    return compare(mcmc, model, args, reference)._replace(total_seconds=seconds), mcmc


def is_right(o: Outcome) -> bool:
    """Means within 0.1 sd and sds within 7 %, beyond three standard errors."""
    mean = np.abs(o.shift) <= 0.1 + 3.0 * o.shift_error
    return bool((mean & (np.abs(o.inflation) <= 0.07 + 3.0 * o.inflation_error)).all())


def tells_the_truth(o: Outcome) -> float:
    """Share of coordinates whose predicted inflation is within 5 % or two standard errors."""
    said = o.report.estimates.inflation
    error = np.hypot(said.error, o.inflation_error)
    return float(np.mean(np.abs(said.value - o.inflation) <= np.maximum(0.05, 2.0 * error)))


def flag(o: Outcome) -> str:
    """Whether a flag is due, was given, or both."""
    wrong = (np.abs(o.inflation) > 0.2).any() or (np.abs(o.shift) > 0.3).any()
    fine = (np.abs(o.inflation) < 0.03).all() and (np.abs(o.shift) < 0.05).all()
    given = o.report.is_flagged
    if wrong and not given:
        return "MISSED"
    return "FALSE" if fine and given else "flag" if given else "-"


def show(problem: str, kernel: str, o: Outcome) -> None:
    said = o.report.estimates.inflation
    k = int(np.abs(o.inflation).argmax())
    print_row(
        [
            problem[:34],
            kernel,
            f"{np.abs(o.shift).max():.2f}",
            f"{o.inflation.min():+.2f} {o.inflation.max():+.2f}",
            f"{said.value[k]:+.2f}",
            f"{tells_the_truth(o):.2f}",
            flag(o),
            f"{o.ess:.0f}",
            f"{o.total_seconds:.0f}",
        ],
        WIDTHS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    parser.add_argument("--bad", action="store_true", help="settings that are wrong on purpose")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    known = json.loads(FILE.read_text())
    print_header("Trust: no arguments" if not args.bad else "Trust: wrong on purpose")
    header = ["problem", "kernel", "mean", "sd", "said", "truth", "flag", "ESS", "s"]
    print_row(header, WIDTHS)
    right, cells = [], []
    for problem in args.problems:
        if problem not in known:
            print(f"{problem}: no reference yet, left out", flush=True)
            continue
        for kernel in args.kernels:
            for label, settings in SETTINGS.items() if args.bad else [("", {})]:
                o, _ = evaluate(kernel, problem, known[problem], settings, args.seed)
                show(problem, label or kernel, o)
                if not PROBLEMS[problem].hard:
                    right.append(is_right(o))
                    cells.append((tells_the_truth(o), flag(o)))
    if cells:
        truth = np.mean([t >= 0.9 for t, _ in cells])
        flags = [f for _, f in cells]
        print(
            f"\nright in {sum(right)} of {len(right)}; the report tells the truth in {truth:.0%};"
        )
        print(f"missed {flags.count('MISSED')}, false alarms {flags.count('FALSE')}")


if __name__ == "__main__":
    main()
