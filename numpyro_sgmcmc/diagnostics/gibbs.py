r"""The bias of runs of NumPyro's Gibbs: of all blocks together.

The moments that a block keeps are of little use here. Given the others its law may be right where
its own is not, since they pass their errors on; and what is wrong in it is less wrong in its
marginal, the more it follows the others. With :math:`\rho` the correlation of two coordinates in
blocks of their own and a variance that the first block's steps make :math:`1 + \epsilon` times too
large given the second, the marginal variances are

.. math::

    1 + \frac{\epsilon}{1 + \rho^2} \quad\text{and}\quad 1 + \frac{\rho^2\epsilon}{1 + \rho^2},

while the blocks' own moments tell :math:`1 + \epsilon` and 1. So gradients of the joint posterior
are taken at draws, after the run, in the coordinates of all blocks: Stein's identity does not ask
how draws have come about. Where a site is discrete they are those given it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, Gibbs

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments, DeviceArrayCache
from numpyro_sgmcmc.diagnostics.by_draws import estimate_bias_from_draws
from numpyro_sgmcmc.diagnostics.dependence import ConvergenceStats, format_r_hat
from numpyro_sgmcmc.diagnostics.report import BiasReport
from numpyro_sgmcmc.diagnostics.runs import (
    compute_unconstrained_draws,
    get_potential_coordinate_names,
    make_thinning_slice,
)
from numpyro_sgmcmc.diagnostics.site_bias import MAX_OK_R_HAT
from numpyro_sgmcmc.posterior.read import trace_model
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.compiled import full_gradients
from numpyro_sgmcmc.samplers.gibbs_block import build_conditional_potential
from numpyro_sgmcmc.warmup.findings import ModelWarning

__all__ = ["build_gibbs_report"]


def build_gibbs_report(mcmc: MCMC, num_draws: int) -> BiasReport:
    """What gradients on all rows at some of the draws tell of the continuous sites.

    :param mcmc: a run of NumPyro's Gibbs.
    :param num_draws: number of draws, taken evenly.
    :raises ValueError: where no block is one of this package's kernels, or before a run.
    """
    blocks = _get_sgmcmc_blocks(mcmc)
    kernel, arguments = blocks[0][0], Arguments(mcmc._args, mcmc._kwargs)
    discrete = _find_discrete_sites(kernel, arguments)
    samples = mcmc.get_samples(group_by_chain=True)
    if missing := [name for name in discrete if name not in samples]:
        raise InvalidArgumentError(
            f"The draws of site '{missing[0]}' were not kept: run without '~z.{missing[0]}'."
        )
    given = {name: samples[name] for name in discrete}
    assert kernel._model is not None
    one = {name: x[0, 0] for name, x in given.items()}
    target = build_conditional_potential(kernel._model, one, arguments, kernel.options)
    if not target.dim:
        raise InvalidArgumentError(
            "All sites are discrete: there is nothing for `bias_report` to tell."
        )
    draws = np.asarray(compute_unconstrained_draws(mcmc, target, kernel._model, given), np.float64)
    some = make_thinning_slice(draws.shape[1], -(-num_draws // len(draws)))
    flat = jnp.asarray(draws[:, some].reshape(-1, target.dim), target.dtype)
    at = {name: x[:, some].reshape(-1, *x.shape[2:]) for name, x in given.items()}
    gradients = full_gradients(target, DeviceArrayCache(), flat, arguments, at)
    estimates, evidence = estimate_bias_from_draws(draws, some, np.asarray(gradients))
    step_sizes = {float(np.max(state.adapt_state.step_size)) for _, state in blocks}
    return BiasReport(
        names=get_potential_coordinate_names(target),
        stein_estimates=estimates,
        bias_diagnostics=evidence,
        model_warnings=(*_collect_block_warnings(blocks), *_find_unconverged_discrete_sites(given)),
        step_size=step_sizes.pop() if len(step_sizes) == 1 else np.nan,
        weak_order=min(k.dynamics.integrators[k.integrator].order for k, _ in blocks),
        gradient_noise_variance=np.nan,
        noise_sd_inflation=np.nan,
        num_divergences=sum(_count_block_divergences(*block) for block in blocks),
        num_draws=max(int(np.sum(state.moments.num_iterations)) for _, state in blocks),
        max_ess=float(np.fmax.reduce(evidence.convergence.ess)),
        full_data=True,
        notes=_make_scope_notes(discrete),
    )


def _get_sgmcmc_blocks(mcmc: MCMC) -> list[tuple[SGMCMCKernel, Any]]:
    """The blocks that are kernels of this package's, and their states."""
    assert isinstance(mcmc.sampler, Gibbs)
    kernels = [kernel for kernel, _ in mcmc.sampler.blocks]
    where = [k for k, kernel in enumerate(kernels) if isinstance(kernel, SGMCMCKernel)]
    if not where:
        raise InvalidArgumentError(
            "`bias_report` is for the kernels of numpyro_sgmcmc, but none of this Gibbs' blocks is "
            "one of them."
        )
    if mcmc.last_state is None:
        raise InvalidArgumentError("There are no draws yet: call `mcmc.run` before `bias_report`.")
    return [(kernels[k], mcmc.last_state.block_states[k]) for k in where]


def _find_discrete_sites(kernel: SGMCMCKernel, arguments: Arguments) -> list[str]:
    """Names of the discrete latent sites, which have no gradient.

    :raises ValueError: where sites of a block are latent inside a subsampled plate.
    """
    assert kernel._model is not None
    facts = trace_model(
        kernel._model, arguments, kernel.options.init_strategy, kernel.options.gibbs_config
    )
    latent = [s for s in facts.sample_sites if not s.is_observed]
    if local := next((s.name for s in latent if s.plate_frames), None):
        raise InvalidArgumentError(
            f"Site '{local}' is latent inside the subsampled plate, and given its values gradients "
            "do not tell how far the other sites' own law is off: `bias_report` is for runs of one "
            "kernel then. Let it move all sites, or compare with a run of half the step_size."
        )
    return [s.name for s in latent if s.support.is_discrete]


def _count_block_divergences(kernel: SGMCMCKernel, state: Any) -> int:
    """Iterations of a block that its moments have left out, of all chains."""
    if kernel.has_schedule:
        return 0
    weight = np.asarray(state.moments.batches.weight, np.float64).sum(-1)
    kept = weight / (state.num_steps * np.asarray(state.adapt_state.step_size))
    return int(np.sum(np.rint(state.moments.num_iterations - kept)))


def _collect_block_warnings(blocks: list[tuple[SGMCMCKernel, Any]]) -> list[ModelWarning]:
    """What the blocks' warm-ups have found, the others at likely values."""
    found = [
        f for kernel, _ in blocks if kernel.has_potential for f in kernel.adaptation.model_warnings
    ]
    return list(dict.fromkeys(found))


def _find_unconverged_discrete_sites(discrete_samples: dict[str, Any]) -> list[ModelWarning]:
    """Discrete sites on which chains do not agree: where one is stuck, others look right."""
    found = []
    for name, x in discrete_samples.items():
        r_hat = np.nan
        if len(x) > 1:
            values = np.asarray(x, np.float64).reshape(*x.shape[:2], -1)
            r_hat = float(np.fmax.reduce(ConvergenceStats.from_draws(values).r_hat))
        if r_hat > MAX_OK_R_HAT:
            told = (
                f"Chains disagree on the discrete site `{name}` (R-hat up to "
                f"{format_r_hat(r_hat)}), given which the others are judged: run longer."
            )
            found.append(ModelWarning((), "unsettled", told))
    return found


def _make_scope_notes(discrete_sites: list[str]) -> tuple[str, ...]:
    told = "All blocks of Gibbs are judged together, those of other kernels with them"
    if discrete_sites:
        names = ", ".join(f"`{name}`" for name in discrete_sites)
        told += f"; not judged, and taken as given: {names} (discrete)"
    return (told + ".",)
