"""Chen, Ding and Carin (2015), Figure 4 and Table 1, and Ma, Chen and Fox (2015), Figure 3, right.

Topics of documents by SGLD, SGHMC with Euler steps and with the symmetric splitting, and by SGRLD
and SGRHMC with the Fisher metric.

The papers' corpus, 10 million Wikipedia articles, is not at hand: here it is 8,447 articles of the
New York Times with 3,012 words (395 of Reuters where these do not come), of each article at most
128 words. As in the papers: minibatches of 100 documents, step size and friction from a grid, and
perplexity of half of the words of documents kept apart, given the other half. Ours: 20 topics
(Chen: 200 and 500; Ma does not say), 3 passes over the documents (one), alpha = 0.1, beta = 0.5
(both silent), 5 sweeps for a minibatch's local values. All samplers start alike, and each is judged
at its own best settings. SGLD and SGHMC move the logarithms of gamma variables (Chen's expanded
natural coordinates), SGRLD and SGRHMC the expanded mean in which the Fisher metric is diagonal.

    python benchmarks/papers/topics.py           # some 15 minutes
    python benchmarks/papers/topics.py --full    # 10 passes, whole articles, three runs of each
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import output
import topics_model
from side_by_side import side_by_side
from topics_data import Corpus, load, made_up

from numpyro_sgmcmc import SGHMC, SGLD, SGRHMC, SGRLD, SGHMCSplit
from numpyro_sgmcmc.metrics import expanded_mean


class Sampler(NamedTuple):
    """
    - **kernel** - its class.
    - **model** - in the coordinates that it moves.
    - **step_sizes** - of the grid.
    - **frictions** - of the grid.
    """

    kernel: Callable
    model: Callable
    step_sizes: tuple[float, ...]
    frictions: tuple[float | None, ...] = (None,)


class Size(NamedTuple):
    """Sizes of the data, the network and the runs."""

    topics: int
    held_out: int
    batch: int
    passes: int
    sweeps: int
    runs: int
    draws: int = 12

    def steps_a_draw(self, documents: int) -> int:
        return max(1, self.passes * (documents // self.batch) // self.draws)


class Outcome(NamedTuple):
    """
    - **perplexity** - of the mean over the draws of the second half.
    - **path** - of each draw by itself.
    - **diverging** - share of the draws before which a step left the finite numbers.
    """

    perplexity: float
    path: np.ndarray
    diverging: float


Setting = tuple[float, float | None]
"""Step size and friction."""

FRICTIONS = (5.0, 20.0)
SAMPLERS = {
    "SGLD": Sampler(SGLD, topics_model.natural, (1e-3, 3e-3, 1e-2, 3e-2)),
    "SGHMC, Euler": Sampler(SGHMC, topics_model.natural, (0.005, 0.015, 0.05, 0.15), FRICTIONS),
    "SGHMC, splitting": Sampler(
        SGHMCSplit, topics_model.natural, (0.005, 0.015, 0.05, 0.15), FRICTIONS
    ),
    "SGRLD": Sampler(SGRLD, topics_model.mean, (3e-4, 1e-3, 3e-3, 1e-2)),
    "SGRHMC": Sampler(SGRHMC, topics_model.mean, (0.005, 0.015, 0.05, 0.15), FRICTIONS),
}


def grid(
    sampler: Sampler, friction: float | None, data: Corpus, size: Size, seed: int
) -> list[Outcome]:
    """Chains over the documents that are not held out, one with each step size."""
    words, held_out = data.words[size.held_out :], data.words[: size.held_out]
    shape = size.topics, len(data.vocabulary)
    own: dict[str, Any] = {} if friction is None else {"friction": friction}
    if sampler.model is topics_model.mean:
        own["inverse_metric"] = expanded_mean("topics")
    kernel = sampler.kernel(
        sampler.model,
        step_size=sampler.step_sizes[0],
        num_steps=size.steps_a_draw(len(words)),
        gradient_estimator="minibatch",
        subsampling="contiguous",
        adapt_mass_matrix=False,
        gibbs_fn=topics_model.draw_shares,
        gibbs_sites=["shares"],
        keep_locals=False,
        num_gibbs_sweeps=size.sweeps,
        **own,
    )
    first = topics_model.first(sampler.model, shape, seed)
    arguments = words, shape, size.batch
    states = side_by_side(kernel, sampler.step_sizes, first, arguments, size.draws, seed)
    found, diverging = [], []
    for key, state in zip(jax.random.split(jax.random.key(1), size.draws), states, strict=True):
        diverging.append(np.asarray(state.diverging))
        topics = topics_model.topics_of(state.z)
        found.append([np.asarray(topics_model.completed(t, held_out, key)) for t in topics])
    late = np.mean(found[size.draws // 2 :], 0)
    path = [[topics_model.perplexity(p, held_out) for p in of_draw] for of_draw in found]
    return [
        Outcome(topics_model.perplexity(p, held_out), *rest)
        for p, *rest in zip(late, np.transpose(path), np.mean(diverging, 0), strict=True)
    ]


def on_grid(name: str, data: Corpus, size: Size) -> dict[Setting, list[Outcome]]:
    """A sampler's runs at all its settings."""
    sampler, found = SAMPLERS[name], {}
    for friction in sampler.frictions:
        began = time.process_time()
        runs = [grid(sampler, friction, data, size, seed) for seed in range(size.runs)]
        for h, outcomes in zip(sampler.step_sizes, zip(*runs, strict=True), strict=True):
            found[h, friction] = list(outcomes)
            text = ", ".join(f"{o.perplexity:.0f} ({o.diverging:.0%})" for o in outcomes)
            print(f"{name}, h = {h:g}, friction {friction}: {text}", flush=True)
        print(f"{time.process_time() - began:.0f} s CPU", flush=True)
    return found


def mean_of(outcomes: list[Outcome]) -> float:
    """Return the mean perplexity of runs, or infinity if any diverged."""
    if any(o.diverging > 0 or not np.isfinite(o.perplexity) for o in outcomes):
        return np.inf
    return float(np.mean([o.perplexity for o in outcomes]))


def shown(outcomes: list[Outcome]) -> str:
    """Their mean perplexity, and how often they diverged."""
    often = np.mean([o.diverging for o in outcomes])
    if often > 0.5:
        return "explodes"
    value = f"{np.mean([o.perplexity for o in outcomes]):.0f}"
    return f"{value} ({often:.0%} diverge)" if often else value


def print_results(found: dict[str, dict], seen: np.ndarray) -> None:
    """Print tables of the best settings, and of all of them."""
    best = {name: min(runs, key=lambda k, r=runs: mean_of(r[k])) for name, runs in found.items()}
    early = np.searchsorted(seen, seen[-1] / 3)
    output.print_table(
        "Perplexity of held-out words, each sampler at its best settings (one draw; the mean over "
        "the second half of the draws)",
        ("sampler", "h", "friction", f"after {seen[early]:,} documents", f"{seen[-1]:,}", "mean"),
        [
            (
                name,
                f"{k[0]:g}",
                "-" if k[1] is None else f"{k[1]:g}",
                f"{np.mean([o.path[early] for o in found[name][k]]):.0f}",
                f"{np.mean([o.path[-1] for o in found[name][k]]):.0f}",
                shown(found[name][k]),
            )
            for name, k in best.items()
        ],
    )
    for name, runs in found.items():
        step_sizes = sorted({h for h, _ in runs})
        output.print_table(
            f"{name}: perplexity by step size and friction",
            ("friction", *(f"h = {h:g}" for h in step_sizes)),
            [
                ("-" if f is None else f"{f:g}", *(shown(runs[h, f]) for h in step_sizes))
                for f in dict.fromkeys(f for _, f in runs)
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part, on made-up documents")
    parser.add_argument("--full", action="store_true", help="10 passes, three runs (hours)")
    parser.add_argument("--corpus", choices=("nyt", "reuters"), default="nyt")
    asked = parser.parse_args()
    output.print_title("Chen et al. (2015) and Ma et al. (2015): topics of documents")
    if asked.quick:
        data, size = made_up(60, 30, 24), Size(4, 10, 10, 2, 2, 1, 5)
    else:
        data = load(asked.corpus, 1400 if asked.full else 128)
        is_small = len(data.words) < 1000
        size = Size(20, 100 if is_small else 300, 50 if is_small else 100, 3, 5, 1)
        if asked.full or is_small:
            size = size._replace(passes=30 if is_small else 10)
        if asked.full:
            size = size._replace(runs=3, sweeps=10)
    num = len(data.words) - size.held_out
    print(f"{num:,} documents and {size.held_out} held out, {len(data.vocabulary):,} words")
    found = {name: on_grid(name, data, size) for name in SAMPLERS}
    seen = size.batch * size.steps_a_draw(num) * np.arange(1, size.draws + 1)
    print_results(found, seen)


if __name__ == "__main__":
    main()
