"""How far a run's means and standard deviations are from the posterior's, measured in the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC, Gibbs

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics.at_draws import (
    GradientsAtDraws,
    compute_gradients_at_draws,
    get_unconstrained_draws_or_none,
)
from numpyro_sgmcmc.diagnostics.coordinates import (
    compute_center_offsets,
    convert_sums_to_first_chain,
    get_chain_preconditioners,
)
from numpyro_sgmcmc.diagnostics.estimates import (
    SteinEstimates,
    compute_between_chain_r_hat,
    estimate_bias_from_sums,
)
from numpyro_sgmcmc.diagnostics.evidence import BiasDiagnostics, compute_sums_at_draws
from numpyro_sgmcmc.diagnostics.function_bias import (
    FunctionBias,
    check_differentiable,
    estimate_function_bias,
)
from numpyro_sgmcmc.diagnostics.functions import DrawFunctions, get_draws_by_site
from numpyro_sgmcmc.diagnostics.gibbs import build_gibbs_report
from numpyro_sgmcmc.diagnostics.local_bias import estimate_bias_of_globals
from numpyro_sgmcmc.diagnostics.report import BiasReport
from numpyro_sgmcmc.diagnostics.runs import (
    check_finished_run,
    check_has_data,
    get_coordinate_names,
    get_potential_coordinate_names,
    get_unconstrained_draws,
    make_thinning_slice,
)
from numpyro_sgmcmc.dynamics import Dynamics, Recipe
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["bias_report"]


def bias_report(
    mcmc: MCMC,
    fn: Callable[..., Any] | None = None,
    *row_arrays: Any,
    full_data: bool = False,
    num_draws: int = 400,
) -> BiasReport:
    """What a finished run says of its own bias.

    Moments of the gradients that the run took say how far the chain's means and sds are from the
    posterior's, coordinate by coordinate: by the step size, gradient noise, or too few draws. To
    these, which are blind to what no kick undoes, come gradients at about a thousand of the draws,
    which take a few seconds; the curvature there, which tells ends of coordinates where chains
    cannot enter; R-hat and effective sample sizes; quantiles in place of sds where tails are
    heavy; and what the warm-up found. A mode that no start has found stays unseen.

    With a function of the draws, such as a network's predictions, the report is on its values in
    place of the parameters, from the gradients at draws alone. It is exact where these are linear
    in a Gaussian's parameters, white in the run's coordinates, and rough elsewhere: of a square
    half of the sd's excess is told::

        def mean(draw, X):
            return X @ draw["beta"]

        bias_report(mcmc, mean, X_test)

    Of NumPyro's Gibbs with blocks of this package's kernels all continuous sites are judged, in
    whichever block, by gradients on all rows at draws; discrete sites are taken as given. Of models
    with latent sites inside the subsampled plate the globals are judged, by gradients with the
    local values renewed at draws, which cost as much as these draws in the run.

    :param mcmc: a run of one of this package's kernels, or of Gibbs with such a block.
    :param fn: a function of one draw, a dict of values by site, and rows, that returns real numbers
        or a dict of arrays of them and has second derivatives; as in
        :func:`~numpyro_sgmcmc.diagnostics.predictive_summary`. Default: none.
    :param row_arrays: arrays to cut into chunks of rows, with as many rows each; ``fn`` gets the chunks
        after the draw, and its results must have a place for each row along their first axis, made
        of that row alone.
    :param full_data: whether to take gradients on all rows at some of the draws in place of the
        run's minibatch gradients. Sharper where those are noisy; costs ``num_draws`` passes over
        the data.
    :param num_draws: number of draws for ``full_data``, for Gibbs, and for models with latent sites
        inside the subsampled plate, taken evenly. Default 400.
    :raises ValueError: for a run of another kernel, or before a run; for a function whose values
        are not real and finite; and with a function where gradients at draws are not to be had
        without ``full_data``.
    """
    checks.check_positive_int("num_draws", num_draws)
    checks.check_bool("full_data", full_data)
    if row_arrays and fn is None:
        raise InvalidArgumentError("`bias_report` takes rows only after a function of the draws.")
    if isinstance(mcmc, MCMC) and isinstance(mcmc.sampler, Gibbs):
        if fn is not None:
            raise InvalidArgumentError(
                "`bias_report` tells the bias of parameters alone for runs of Gibbs: leave out the "
                "function, or let one kernel move all sites."
            )
        return build_gibbs_report(mcmc, num_draws)
    kernel = check_finished_run(mcmc, "bias_report", uses_moments=False)
    if mcmc.last_state.locals is not None:
        if fn is not None:
            raise InvalidArgumentError(
                "`bias_report` tells the bias of global parameters alone where the model has "
                "latent sites inside the subsampled plate: leave out the function."
            )
        return _build_globals_report(mcmc, kernel, num_draws)
    functions = None if fn is None else _validate_draw_functions(mcmc, kernel, fn, row_arrays)
    return _build_run_report(mcmc, kernel, functions, num_draws if full_data else None)


def _build_run_report(
    mcmc: MCMC, kernel: SGMCMCKernel, draw_functions: DrawFunctions | None, num_draws: int | None
) -> BiasReport:
    """The report by the moments that the chains have kept.

    :param num_draws: number of draws with gradients on all rows in their place, or None.
    """
    coordinates = get_chain_preconditioners(mcmc.last_state)
    factor = coordinates[0].factor
    own = jax.tree.map(np.asarray, mcmc.last_state.moments.batches)
    if mcmc.num_chains == 1:
        own = jax.tree.map(lambda x: x[None], own)
    if not (own.weight > 0).any():
        raise InvalidArgumentError(
            "All draws diverged or have weight zero, so that there is nothing to report on."
        )
    exact = _compute_full_data_gradients(mcmc, kernel, num_draws) if num_draws is not None else None
    if exact is None:
        sums = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own)
    else:
        sums, factor = compute_sums_at_draws(
            exact.subtract_offsets(compute_center_offsets(coordinates)), coordinates[0]
        )
    estimates = estimate_bias_from_sums(sums, factor)
    names = get_coordinate_names(mcmc)
    if draw_functions is None:
        together = convert_sums_to_first_chain(own, coordinates)
        r_hat = compute_between_chain_r_hat(
            jax.tree.map(lambda x: x.sum(1), together), coordinates[0].factor
        )
        evidence = BiasDiagnostics.from_run(mcmc, kernel, estimates, r_hat, exact)
    else:
        told = _compute_function_bias(mcmc, kernel, draw_functions, exact)
        names, estimates = told.names, told.to_estimates(estimates)
        evidence = BiasDiagnostics(
            (estimates.bias_estimate,),
            told.convergence,
            np.zeros(0, int),
            (),
            told.num_gradient_draws,
        )
    is_exact = exact is not None
    return _assemble_report(
        mcmc, kernel, names, estimates, evidence, is_exact, draw_functions is not None
    )


def _build_globals_report(mcmc: MCMC, kernel: SGMCMCKernel, num_draws: int) -> BiasReport:
    """The report on a run with latent sites inside the subsampled plate."""
    check_has_data(kernel, "bias_report")
    target = kernel.potential
    assert target.local_latents is not None
    estimates, evidence = estimate_bias_of_globals(mcmc, kernel, num_draws)
    own = ", ".join(f"`{name}`" for name in target.local_latents.names)
    note = f"Globals alone, the local values integrated out; not judged: {own}."
    names = get_potential_coordinate_names(target)
    report = _assemble_report(mcmc, kernel, names, estimates, evidence, True, False)
    independent = float(np.fmax.reduce(evidence.convergence.ess))
    return replace(report, notes=(note,), max_ess=independent)


def _assemble_report(
    mcmc: MCMC,
    kernel: SGMCMCKernel,
    names: list[tuple[str, str]],
    stein_estimates: SteinEstimates,
    bias_diagnostics: BiasDiagnostics,
    full_data: bool,
    is_for_functions: bool,
) -> BiasReport:
    """What was found, with what the run was."""
    arguments = Arguments(mcmc._args, mcmc._kwargs)
    adaptation = kernel.get_cached_adaptation(arguments) if kernel.has_potential else None
    noise = kernel.noise_stats
    step_size = float(np.max(mcmc.last_state.adapt_state.step_size))
    predicted = noise.predict_variance_inflation(kernel.dynamics, step_size)
    num_draws = int(np.size(mcmc.get_extra_fields().get("diverging", 0)))
    num_steps = int(np.max(mcmc.last_state.num_steps))
    iterations = int(np.sum(mcmc.last_state.moments.num_iterations))
    time = iterations * num_steps * float(np.mean(mcmc.last_state.adapt_state.step_size))
    independent = time / float(kernel.dynamics.relaxation_time(step_size))
    return BiasReport(
        names=names,
        stein_estimates=stein_estimates,
        bias_diagnostics=bias_diagnostics,
        model_warnings=() if adaptation is None else adaptation.model_warnings,
        step_size=step_size,
        weak_order=kernel.dynamics.integrators[kernel.integrator].order,
        gradient_noise_variance=noise.variance,
        noise_sd_inflation=max(
            float(np.sqrt(1.0 + predicted) - 1.0),
            _compute_kinetic_sd_inflation(stein_estimates, step_size),
        ),
        num_divergences=int(np.sum(mcmc.get_extra_fields().get("diverging", 0))),
        num_draws=num_draws,
        max_ess=max(1.0, min(independent, num_draws)),
        full_data=full_data,
        is_for_functions=is_for_functions,
        has_custom_dynamics=_is_custom_dynamics(kernel.dynamics),
        max_grad_norm=kernel.options.max_grad_norm,
    )


def _is_custom_dynamics(dynamics: Dynamics) -> bool:
    """Whether the user has written the SDE, or what it is made of."""
    return isinstance(dynamics, Recipe) or not type(dynamics).__module__.startswith(
        "numpyro_sgmcmc."
    )


def _validate_draw_functions(
    mcmc: MCMC, kernel: SGMCMCKernel, fn: Callable[..., Any], row_arrays: tuple[Any, ...]
) -> DrawFunctions:
    """What the report is to be on, if it can be."""
    check_has_data(kernel, "bias_report")
    if kernel.has_schedule:
        raise InvalidArgumentError(
            "With a schedule the draws are weighted, and the bias of functions of them cannot be "
            "told."
        )
    return check_differentiable(fn, row_arrays, get_draws_by_site(mcmc, "mcmc"))


def _compute_function_bias(
    mcmc: MCMC,
    kernel: SGMCMCKernel,
    draw_functions: DrawFunctions,
    exact_gradients: GradientsAtDraws | None,
) -> FunctionBias:
    """Their bias, by gradients on all rows if there are such."""
    looked_at = exact_gradients
    if looked_at is None and (draws := get_unconstrained_draws_or_none(mcmc, kernel)) is not None:
        looked_at = compute_gradients_at_draws(mcmc, kernel, draws)
    if looked_at is None:
        raise InvalidArgumentError(
            "There is no cheap way to gradients at this run's draws, which the bias of functions "
            "is told by: pass full_data=True."
        )
    constrain = kernel.postprocess_fn(mcmc._args, mcmc._kwargs)
    target = kernel.potential
    return estimate_function_bias(
        draw_functions,
        get_draws_by_site(mcmc, "mcmc"),
        looked_at,
        get_chain_preconditioners(mcmc.last_state)[0].cast(target.dtype),
        lambda q: constrain(target.unravel(q)),
    )


def _compute_kinetic_sd_inflation(stein_estimates: SteinEstimates, step_size: float) -> float:
    """By how much momenta are clearly hotter than a step of this size makes them: noise does that,
    and widens sds as much. NaN counts as nothing.
    """
    value, error = (float(x) for x in stein_estimates.kinetic_temperature)
    clear = value - 1.0 - 3.0 * error - step_size**2 / 2.0
    return float(np.sqrt(1.0 + clear) - 1.0) if clear > 0.0 else 0.0


def _compute_full_data_gradients(
    mcmc: MCMC, kernel: SGMCMCKernel, num_draws: int
) -> GradientsAtDraws:
    """Some of the draws, and the gradients on all rows there."""
    positions = get_unconstrained_draws(mcmc, kernel)
    per_chain = -(-num_draws // len(positions))
    positions = positions[:, make_thinning_slice(positions.shape[1], per_chain)]
    flat = positions.reshape(-1, positions.shape[-1])
    gradients = kernel.full_gradients(flat, Arguments(mcmc._args, mcmc._kwargs))
    return GradientsAtDraws.from_arrays(positions, gradients)
