"""The bias of the globals of a model with latent sites inside the subsampled plate.

The moments of such a run are those of the globals given the local values: how far these are off is
not how far the globals' own law is. So gradients of the globals' own posterior are taken at draws,
after the run, by Fisher's identity.

A second run with half the step or twice the minibatch beside the first: a check by brute force.

Costs at least another run. :func:`~numpyro_sgmcmc.bias_report` says the same for nothing; this one
assumes less, because it compares draws with draws.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation import Adaptation
from numpyro_sgmcmc.data.arguments import Arguments, DeviceArrayCache
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.data.subsampling import Plate, init_stream
from numpyro_sgmcmc.diagnostics.run_data import (
    check_finished_run,
    get_coordinate_names,
    get_unconstrained_draws,
    make_thinning_slice,
)
from numpyro_sgmcmc.diagnostics.stein_estimates import (
    BiasDiagnostics,
    Estimate,
    SteinEstimates,
    estimate_bias_from_draws,
)
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.local_moves import NUM_LOCAL_UPDATES, estimate_marginal_gradients
from numpyro_sgmcmc.progress import show_data_passes
from numpyro_sgmcmc.sampling.bias_monitor import Moments
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

__all__ = [
    "Refinement",
    "compare_with_finer",
    "estimate_bias_of_globals",
]

_MARGINAL_GRADIENT_SEED = 0


def estimate_bias_of_globals(
    mcmc: MCMC, kernel: SGMCMCKernel, num_draws: int
) -> tuple[SteinEstimates, BiasDiagnostics]:
    """What gradients of the globals' own posterior at some of the draws tell.

    The local values start from the run's last ones and follow the draws back in time.

    :param kernel: the run's, which has its data.
    :param num_draws: number of draws, taken evenly.
    """
    target, arguments = kernel.potential, Arguments(mcmc._args, mcmc._kwargs)
    draws = np.asarray(get_unconstrained_draws(mcmc, kernel), np.float64)
    some = make_thinning_slice(draws.shape[1], -(-num_draws // len(draws)))
    back = jnp.asarray(draws[:, some][:, ::-1], target.dtype)
    state = mcmc.last_state.local_state
    if mcmc.num_chains == 1:
        state = jax.tree.map(lambda x: x[None], state)
    keys = random.split(random.key(_MARGINAL_GRADIENT_SEED), len(back))
    held = DeviceArrayCache().cache_arrays(arguments)
    passes = back.shape[0] * back.shape[1] * NUM_LOCAL_UPDATES
    shown = show_data_passes("gradients on all rows", arguments.host_arrays, passes)
    with unwrap_callback_errors(arguments.host_arrays), shown:
        gradients = [
            np.asarray(
                estimate_marginal_gradients(
                    target, back[c], jax.tree.map(lambda x, c=c: x[c], state), held, keys[c]
                )
            )
            for c in range(len(back))
        ]
    return estimate_bias_from_draws(draws, some, np.stack(gradients)[:, ::-1])


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
    errors.check_choice("change", change, ("step", "batch"))
    errors.check_rng_key(rng_key)
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
