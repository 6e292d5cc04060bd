"""Whether posteriors are right with no arguments, and whether the bias report tells when not.

``python benchmarks/trust.py`` runs kernels with no arguments on the problems of
``trust_problems.py`` and compares them with long NUTS runs. ``--bad`` runs one kernel with
settings that are wrong on purpose, and counts how often the report says so; ``--rivals`` runs what
else there is. All comparisons are in unconstrained space, coordinate by coordinate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from common import print_header, print_row
from numpyro.distributions import biject_to
from numpyro.handlers import seed as seeded
from numpyro.handlers import trace
from numpyro.infer import MCMC
from rivals import STEP_SIZES, blackjax_draws, hmcecs_draws, svi_draws, unconstrained
from trust_problems import PROBLEMS
from trust_references import FILE, fingerprint, summarise

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
    - **ess** - smallest effective sample size.
    - **seconds** - compilation, warm-up and draws.
    - **report** - the bias report; None for the rivals, which have none.
    """

    shift: np.ndarray
    inflation: np.ndarray
    shift_error: np.ndarray
    inflation_error: np.ndarray
    ess: float
    seconds: float = 0.0
    report: BiasReport | None = None


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


def compare(draws: Mapping[str, Any], args: tuple, reference: Mapping[str, Any]) -> Outcome:
    """Unconstrained draws beside the reference, in the order of the report's coordinates."""
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
    draws = unconstrained(model, args, mcmc.get_samples(group_by_chain=True))
    outcome = compare(draws, args, reference)
    return outcome._replace(seconds=seconds, report=bias_report(mcmc))


def rivals(problem: str, reference: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Outcome]]:
    """What else could be run on the problem; what cannot be is printed, and left out."""
    model, args = PROBLEMS[problem].build()
    common = model, args, PROBLEMS[problem].batch_size
    key = jax.random.key(seed)
    found = trace(seeded(model, key)).get_trace(*args)
    mean = {
        k: np.reshape(s["mean"], biject_to(found[k]["fn"].support).inv(found[k]["value"]).shape)
        for k, s in reference["sites"].items()
    }
    runs: dict[str, list[Callable[[], Any]]] = {
        "SVI normal": [lambda: svi_draws(*common, dense=False, rng_key=key)],
        "SVI multivariate": [lambda: svi_draws(*common, dense=True, rng_key=key)],
        "HMCECS": [lambda: hmcecs_draws(*common, mean, key)],
    }
    for name in ("sghmc", "sgnht"):
        runs[f"BlackJAX {name}"] = [
            partial(blackjax_draws, name, *common, mean, h, key) for h in STEP_SIZES
        ]
    for name, tries in runs.items():
        outcomes = []
        for attempt in tries:
            start = time.perf_counter()
            try:
                draws = jax.block_until_ready(attempt())
            except Exception as error:  # whatever a rival cannot do is part of the table
                print(f"{problem}, {name}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            seconds = time.perf_counter() - start
            outcomes.append(compare(draws, args, reference)._replace(seconds=seconds))
        if outcomes:
            yield name, min(outcomes, key=distance)


def distance(o: Outcome) -> float:
    """The largest error, in sds or relative; infinite where a chain has left the numbers."""
    worst = max(np.abs(o.shift).max(), np.abs(o.inflation).max())
    return float(worst) if np.isfinite(worst) else np.inf


def is_right(o: Outcome) -> bool:
    """Means within 0.1 sd and sds within 7 %, beyond three standard errors."""
    mean = np.abs(o.shift) <= 0.1 + 3.0 * o.shift_error
    return bool((mean & (np.abs(o.inflation) <= 0.07 + 3.0 * o.inflation_error)).all())


def tells_the_truth(o: Outcome) -> float:
    """Share of coordinates whose predicted inflation is within 5 % or two standard errors."""
    assert o.report is not None
    said = o.report.estimates.inflation
    error = np.hypot(said.error, o.inflation_error)
    return float(np.mean(np.abs(said.value - o.inflation) <= np.maximum(0.05, 2.0 * error)))


def flag(o: Outcome) -> str:
    """Whether a flag is due, was given, or both."""
    wrong = (np.abs(o.inflation) > 0.2).any() or (np.abs(o.shift) > 0.3).any()
    fine = (np.abs(o.inflation) < 0.03).all() and (np.abs(o.shift) < 0.05).all()
    assert o.report is not None
    given = o.report.is_flagged
    if wrong and not given:
        return "MISSED"
    return "FALSE" if fine and given else "flag" if given else "-"


def show(problem: str, kernel: str, o: Outcome) -> None:
    """One row; a rival has nothing to say of itself."""
    k = int(np.abs(o.inflation).argmax())
    own = ["", "", ""]
    if o.report is not None:
        said = o.report.estimates.inflation.value[k]
        own = [f"{said:+.2f}", f"{tells_the_truth(o):.2f}", flag(o)]
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
    """How many are right, and how often the reports were."""
    right = sum(is_right(o) for o in cells)
    truth = np.mean([tells_the_truth(o) >= 0.9 for o in cells])
    flags = [flag(o) for o in cells]
    return (
        f"right in {right} of {len(cells)}; the report tells the truth in {truth:.0%};\n"
        f"missed {flags.count('MISSED')}, false alarms {flags.count('FALSE')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--bad", action="store_true", help="settings that are wrong on purpose")
    parser.add_argument("--rivals", action="store_true", help="SVI, HMCECS, BlackJAX")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    known = json.loads(FILE.read_text())
    what = "rivals" if args.rivals else "wrong on purpose" if args.bad else "no arguments"
    print_header(f"Trust: {what}")
    header = ["problem", "kernel", "mean", "sd", "said", "truth", "flag", "ESS", "s"]
    print_row(header, WIDTHS)
    cells = []
    for problem, seed in itertools.product(args.problems, args.seeds):
        if args.rivals:
            for name, o in rivals(problem, known[problem], seed):
                show(problem, name, o)
            continue
        settings = SETTINGS if args.bad else {"": {}}
        for kernel, label in itertools.product(args.kernels, settings):
            o = evaluate(kernel, problem, known[problem], settings[label], seed)
            show(problem, label or kernel, o)
            if not PROBLEMS[problem].hard:
                cells.append(o)
    if cells:
        print(f"\n{summary(cells)}")


if __name__ == "__main__":
    main()
