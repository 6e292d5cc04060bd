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
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.minibatch import init_stream
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.diagnostics.estimates import Estimate
from numpyro_sgmcmc.diagnostics.runs import (
    check_finished_run,
    get_coordinate_names,
    get_unconstrained_draws,
)
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.warmup import Adaptation

__all__ = ["Refinement", "compare_with_finer"]

_FINER_RUN_BURN_IN_FRACTION = 0.1


class Refinement(NamedTuple):
    """A run beside a finer one, coordinate by coordinate in unconstrained space.

    - **names** - of the coordinates.
    - **mean_difference** - mean of the run minus that of the finer one, in its sds.
    - **sd_inflation** - sd of the run over that of the finer one, minus one.
    - **finer_run** - the finer run.
    """

    names: list[str]
    mean_difference: Estimate
    sd_inflation: Estimate
    finer_run: MCMC

    @property
    def is_visible(self) -> bool:
        """Whether any coordinate differs by more than 0.1 sd or 5 %, beyond three errors."""
        off = np.abs(self.mean_difference.value) > 0.1 + 3.0 * self.mean_difference.error
        wide = np.abs(self.sd_inflation.value) > 0.05 + 3.0 * self.sd_inflation.error
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
    kernel = check_finished_run(mcmc, "compare_with_finer")
    checks.check_choice("change", change, ("step", "batch"))
    checks.check_rng_key(rng_key)
    stream_key, rng_key = random.split(rng_key)
    if change == "step":
        finer, state = _halve_step_size(kernel, mcmc)
    else:
        finer, state = _double_batch_size(kernel, mcmc, stream_key)
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
    ours, theirs = get_unconstrained_draws(mcmc, kernel), get_unconstrained_draws(again, finer)
    theirs = theirs[:, int(_FINER_RUN_BURN_IN_FRACTION * theirs.shape[1]) :]
    return Refinement(
        [name for _, name in get_coordinate_names(mcmc)], *_compare_draws(ours, theirs), again
    )


def _halve_step_size(kernel: SGMCMCKernel, mcmc: MCMC) -> tuple[SGMCMCKernel, Any]:
    if callable(kernel.options.step_size):
        raise InvalidArgumentError(
            "`compare_with_finer` cannot halve a schedule: give a constant step_size."
        )
    adaptation = _get_adaptation(kernel)
    step_size, num_steps = adaptation.step_size / 2, 2 * adaptation.num_steps
    adaptation = adaptation._replace(step_size=step_size, num_steps=num_steps)
    finer = kernel.copy_with(adaptation=adaptation)
    state = mcmc.last_state
    adapt_state = state.adapt_state._replace(step_size=state.adapt_state.step_size / 2)
    state = state._replace(adapt_state=adapt_state, num_steps=2 * state.num_steps)
    return finer, _reset_moments(state)


def _double_batch_size(
    kernel: SGMCMCKernel, mcmc: MCMC, rng_key: Array
) -> tuple[SGMCMCKernel, Any]:
    _get_adaptation(kernel)  # refuses one that has forgotten its data
    target = kernel.potential

    def larger(p: Plate) -> Plate:
        return p._replace(subsample_size=min(p.max_subsample_size, 2 * p.subsample_size))

    plates = tuple(larger(p) for p in target.plates)
    if plates == target.plates:
        raise InvalidArgumentError(
            "Every minibatch is the whole plate already: there is no larger one."
        )
    groups = tuple(tuple(larger(p) for p in group) for group in target.plate_groups)
    finer = kernel.copy_with(potential=replace(target, plates=plates, plate_groups=groups))
    state = mcmc.last_state
    streams = {}
    for p, key in zip(plates, random.split(rng_key, len(plates)), strict=True):
        make = partial(init_stream, p)
        batched = mcmc.num_chains > 1
        streams[p.name] = (
            jax.vmap(make)(random.split(key, mcmc.num_chains)) if batched else make(key)
        )
    return finer, _reset_moments(state._replace(streams=streams))


def _get_adaptation(kernel: SGMCMCKernel) -> Adaptation:
    try:
        return kernel.adaptation
    except RuntimeError:
        raise InvalidArgumentError(
            "The kernel has forgotten its data (it was pickled): run it again first."
        ) from None


def _reset_moments(state: Any) -> Any:
    """The state with empty moments."""
    empty = jax.tree.map(jax.numpy.zeros_like, state.moments)
    return state._replace(moments=Moments(*empty))


def _compare_draws(run_draws: Array, finer_draws: Array) -> tuple[Estimate, Estimate]:
    """Differences of means and sds, with errors from effective sample sizes."""
    found = []
    for draws in (run_draws, finer_draws):
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
