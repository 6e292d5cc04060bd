"""How far a run's means and standard deviations are from the posterior's, measured in the run."""

from __future__ import annotations

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics.at_draws import LookedAt
from numpyro_sgmcmc.diagnostics.coordinates import (
    away_from_first,
    coordinates_of_chains,
    in_those_of_the_first,
)
from numpyro_sgmcmc.diagnostics.estimates import Estimates, disagreement, estimate
from numpyro_sgmcmc.diagnostics.evidence import Evidence, sums_of
from numpyro_sgmcmc.diagnostics.report import BiasReport
from numpyro_sgmcmc.diagnostics.runs import coordinate_names, finished_run, unconstrained_draws
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["bias_report"]


def bias_report(mcmc: MCMC, *, full_data: bool = False, num_draws: int = 400) -> BiasReport:
    """What a finished run says of its own bias.

    Moments of the gradients that the run took say how far the chain's means and sds are from the
    posterior's, coordinate by coordinate: by the step size, gradient noise, or too few draws. To
    these, which are blind to what no kick undoes, come gradients at about a thousand of the draws,
    which take a few seconds; the curvature there, which tells ends of coordinates where chains
    cannot enter; R-hat and effective sample sizes; quantiles in place of sds where tails are
    heavy; and what the warm-up found. A mode that no start has found stays unseen.

    :param mcmc: a run of one of this package's kernels.
    :param full_data: whether to take gradients on all rows at some of the draws in place of the
        run's minibatch gradients. Sharper where those are noisy; costs ``num_draws`` passes over
        the data.
    :param num_draws: number of draws for ``full_data``, taken evenly. Default 400.
    :raises ValueError: for a run of another kernel, or before a run.
    """
    kernel = finished_run(mcmc, "bias_report")
    checks.positive_int("num_draws", num_draws)
    checks.is_bool("full_data", full_data)
    coordinates = coordinates_of_chains(mcmc.last_state)
    factor = coordinates[0].factor
    own = jax.tree.map(np.asarray, mcmc.last_state.moments.batches)
    if mcmc.num_chains == 1:
        own = jax.tree.map(lambda x: x[None], own)
    if not (own.weight > 0).any():
        raise Refusal(
            "All draws diverged or have weight zero, so that there is nothing to report on."
        )
    exact = _at_all_rows(mcmc, kernel, num_draws) if full_data else None
    if exact is None:
        sums = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own)
    else:
        sums, factor = sums_of(exact.moved(away_from_first(coordinates)), coordinates[0])
    estimates = estimate(sums, factor)
    together = in_those_of_the_first(own, coordinates)
    r_hat = disagreement(jax.tree.map(lambda x: x.sum(1), together), coordinates[0].factor)
    evidence = Evidence.of(mcmc, kernel, estimates, r_hat, exact)
    arguments = Arguments(mcmc._args, mcmc._kwargs)
    adaptation = kernel.adaptation_to(arguments) if kernel.has_data else None
    noise = kernel.noise
    step_size = float(np.max(mcmc.last_state.adapt_state.step_size))
    predicted = noise.inflation(kernel.dynamics, step_size)
    num_draws = int(np.size(mcmc.get_extra_fields().get("diverging", 0)))
    num_steps = int(np.max(mcmc.last_state.num_steps))
    iterations = int(np.sum(mcmc.last_state.moments.iterations))
    time = iterations * num_steps * float(np.mean(mcmc.last_state.adapt_state.step_size))
    independent = time / float(kernel.dynamics.relaxation_time(step_size))
    return BiasReport(
        names=coordinate_names(mcmc),
        estimates=estimates,
        evidence=evidence,
        findings=() if adaptation is None else adaptation.findings,
        step_size=step_size,
        order=kernel.dynamics.schemes[kernel.scheme].order,
        noise_variance=noise.variance,
        noise_inflation=max(float(np.sqrt(1.0 + predicted) - 1.0), _heat(estimates, step_size)),
        divergences=int(np.sum(mcmc.get_extra_fields().get("diverging", 0))),
        num_draws=num_draws,
        num_independent=max(1.0, min(independent, num_draws)),
        full_data=full_data,
    )


def _heat(estimates: Estimates, step_size: float) -> float:
    """By how much momenta are clearly hotter than a step of this size makes them: noise does that,
    and widens sds as much. NaN counts as nothing.
    """
    value, error = (float(x) for x in estimates.kinetic)
    clear = value - 1.0 - 3.0 * error - step_size**2 / 2.0
    return float(np.sqrt(1.0 + clear) - 1.0) if clear > 0.0 else 0.0


def _at_all_rows(mcmc: MCMC, kernel: SGMCMCKernel, num_draws: int) -> LookedAt:
    """Some of the draws, and the gradients on all rows there."""
    positions = unconstrained_draws(mcmc, kernel)
    per_chain = -(-num_draws // len(positions))
    positions = positions[:, :: max(1, positions.shape[1] // per_chain)]
    flat = positions.reshape(-1, positions.shape[-1])
    gradients = kernel.full_gradients(flat, Arguments(mcmc._args, mcmc._kwargs))
    return LookedAt.of(positions, gradients)
