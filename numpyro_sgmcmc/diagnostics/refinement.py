"""A second run with half the step or twice the minibatch beside the first: a check by brute force.

Costs at least another run. :func:`~numpyro_sgmcmc.bias_report` says the same for nothing; this one
assumes less, because it compares draws with draws.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.chain.moments import Moments
from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.minibatch import start_stream
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.diagnostics.estimates import Estimate
from numpyro_sgmcmc.diagnostics.runs import coordinate_names, finished_run, unconstrained_draws
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.warmup import Adaptation

__all__ = ["Refinement", "compare_with_finer"]

_FORGOTTEN = 0.1


class Refinement(NamedTuple):
    """A run beside a finer one, coordinate by coordinate in unconstrained space.

    - **names** - of the coordinates.
    - **shift** - mean of the run minus that of the finer one, in its sds.
    - **inflation** - sd of the run over that of the finer one, minus one.
    - **finer** - the finer run.
    """

    names: list[str]
    shift: Estimate
    inflation: Estimate
    finer: MCMC

    @property
    def is_visible(self) -> bool:
        """Whether any coordinate differs by more than 0.1 sd or 5 %, beyond three errors."""
        off = np.abs(self.shift.value) > 0.1 + 3.0 * self.shift.error
        wide = np.abs(self.inflation.value) > 0.05 + 3.0 * self.inflation.error
        return bool((off | wide).any())


def compare_with_finer(mcmc: MCMC, rng_key: Array, change: str = "step") -> Refinement:
    """Run on from the last state with half the step size or twice the minibatch, and compare.

    Where halving the step halves (order one) or quarters (order two) an error, the error that is
    left in the finer run is as large as the difference, or a third of it.

    :param mcmc: a run of one of this package's kernels.
    :param rng_key: key of the second run.
    :param change: ``"step"``: half the step size and twice the steps; ``"batch"``: twice the rows
        of each subsampled plate, at the same step size.
    :return: the comparison, and the finer run as ``finer``. Its first tenth is forgotten.
    :raises ValueError: for a run of another kernel, before a run, for a schedule of step sizes, or
        where there is no larger minibatch.
    """
    kernel = finished_run(mcmc, "compare_with_finer")
    checks.one_of("change", change, ("step", "batch"))
    checks.one_key(rng_key)
    stream_key, rng_key = random.split(rng_key)
    if change == "step":
        finer, state = _half_steps(kernel, mcmc)
    else:
        finer, state = _twice_the_rows(kernel, mcmc, stream_key)
    again = MCMC(
        finer,
        num_warmup=mcmc.num_warmup,
        num_samples=mcmc.num_samples,
        num_chains=mcmc.num_chains,
        thinning=mcmc.thinning,
        chain_method=mcmc.chain_method,
        progress_bar=mcmc.progress_bar,
    )
    again.post_warmup_state = state
    again.run(rng_key, *mcmc._args, **mcmc._kwargs)
    ours, theirs = unconstrained_draws(mcmc, kernel), unconstrained_draws(again, finer)
    theirs = theirs[:, int(_FORGOTTEN * theirs.shape[1]) :]
    return Refinement([name for _, name in coordinate_names(mcmc)], *_compare(ours, theirs), again)


def _half_steps(kernel: SGMCMCKernel, mcmc: MCMC) -> tuple[SGMCMCKernel, Any]:
    if callable(kernel.options.step_size):
        raise Refusal("`compare_with_finer` cannot halve a schedule: give a constant step_size.")
    adaptation = _adaptation(kernel)
    step_size, num_steps = adaptation.step_size / 2, 2 * adaptation.num_steps
    adaptation = adaptation._replace(step_size=step_size, num_steps=num_steps)
    finer = kernel.ready_variant(adaptation=adaptation)
    state = mcmc.last_state
    adapt_state = state.adapt_state._replace(step_size=state.adapt_state.step_size / 2)
    state = state._replace(adapt_state=adapt_state, num_steps=2 * state.num_steps)
    return finer, _afresh(state)


def _twice_the_rows(kernel: SGMCMCKernel, mcmc: MCMC, rng_key: Array) -> tuple[SGMCMCKernel, Any]:
    _adaptation(kernel)  # refuses one that has forgotten its data
    target = kernel.target

    def larger(p: Plate) -> Plate:
        return p._replace(subsample_size=min(p.most, 2 * p.subsample_size))

    plates = tuple(larger(p) for p in target.plates)
    if plates == target.plates:
        raise Refusal("Every minibatch is the whole plate already: there is no larger one.")
    groups = tuple(tuple(larger(p) for p in group) for group in target.groups)
    finer = kernel.ready_variant(target=replace(target, plates=plates, groups=groups))
    state = mcmc.last_state
    streams = {}
    for p, key in zip(plates, random.split(rng_key, len(plates)), strict=True):
        make = partial(start_stream, p)
        batched = mcmc.num_chains > 1
        streams[p.name] = (
            jax.vmap(make)(random.split(key, mcmc.num_chains)) if batched else make(key)
        )
    return finer, _afresh(state._replace(streams=streams))


def _adaptation(kernel: SGMCMCKernel) -> Adaptation:
    try:
        return kernel.adaptation
    except RuntimeError:
        raise Refusal(
            "The kernel has forgotten its data (it was pickled): run it again first."
        ) from None


def _afresh(state: Any) -> Any:
    """The state with empty moments."""
    empty = jax.tree.map(jax.numpy.zeros_like, state.moments)
    return state._replace(moments=Moments(*empty))


def _compare(ours: Array, theirs: Array) -> tuple[Estimate, Estimate]:
    """Differences of means and sds, with errors from effective sample sizes."""
    found = []
    for draws in (ours, theirs):
        x = np.asarray(draws, np.float64)
        mean, sd = x.mean((0, 1)), x.std((0, 1))
        ess, ess_sd = (np.atleast_1d(effective_sample_size(y)) for y in (x, np.square(x - mean)))
        found.append((mean, sd, ess, ess_sd))
    (mean, sd, ess, ess_sd), (right, right_sd, right_ess, right_ess_sd) = found
    ratio = sd / right_sd
    shift_error = np.sqrt(np.square(ratio) / ess + 1.0 / right_ess)
    return (
        Estimate((mean - right) / right_sd, shift_error),
        Estimate(ratio - 1.0, ratio * np.sqrt(0.5 / ess_sd + 0.5 / right_ess_sd)),
    )
