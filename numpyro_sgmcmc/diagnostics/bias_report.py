"""The bias report: how far a run's means and SDs are from the posterior's, measured in the run.

``run_data`` reads the run; ``stein_estimates`` and ``draw_gradients`` estimate the bias from its
running sums and from gradients at draws; ``geometry`` finds heavy tails and funnel necks, and
``excursions`` draws outside of the posterior;
:class:`BiasReport` holds the results, and ``diagnosis`` classifies and prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import diagnostics
from numpyro.infer import MCMC, Gibbs

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation.preconditioning import compute_geometric_mean_with_inverse
from numpyro_sgmcmc.diagnostics.arviz import add_group
from numpyro_sgmcmc.diagnostics.diagnosis import (
    Diagnosis,
    SiteBias,
    describe,
    diagnose_sites,
    make_table,
    summarize_in_one_line,
    wrap_lines,
)
from numpyro_sgmcmc.diagnostics.draw_gradients import (
    compute_full_gradients_at_draws,
    compute_gradients_at_draws,
    predict_noise_mean_bias,
)
from numpyro_sgmcmc.diagnostics.excursions import find_excursions
from numpyro_sgmcmc.diagnostics.function_bias import (
    check_differentiable,
    estimate_function_bias,
)
from numpyro_sgmcmc.diagnostics.geometry import (
    Excursion,
    FunnelNeck,
    TailTransform,
    find_funnel_necks,
)
from numpyro_sgmcmc.diagnostics.predictive import DrawFunctions, get_draws_by_site
from numpyro_sgmcmc.diagnostics.run_data import (
    ConvergenceStats,
    GibbsRunData,
    RunData,
    check_finished_run,
    check_has_data,
    check_sites_kept,
)
from numpyro_sgmcmc.diagnostics.special_runs import (
    find_unconverged_discrete_sites,
    measure_bias_of_gibbs,
    measure_bias_of_globals,
)
from numpyro_sgmcmc.diagnostics.stein_estimates import (
    BiasEstimate,
    BiasMeasurements,
    Estimate,
    GradientsAtDraws,
    SteinEstimates,
    compute_between_chain_r_hat,
    estimate_bias_at_draws,
    estimate_bias_from_sums,
    estimate_tail_bias,
    measure_convergence,
)
from numpyro_sgmcmc.dynamics import Recipe
from numpyro_sgmcmc.errors import InvalidArgumentError, ModelWarning

# Share of diverging iterations beyond which a run is flagged.
_MAX_DIVERGENCE_FRACTION = 0.01
# Draws per chain that split R-hat needs, which NumPyro's table has.
_MIN_DRAWS_FOR_SUMMARY = 4
# Standard errors beyond which an inflated kinetic temperature is attributed to gradient noise.
_KINETIC_Z = 3.0


@dataclass(frozen=True, repr=False)
class BiasReport:
    """Result of :func:`~numpyro_sgmcmc.bias_report`; prints as a table, in a notebook as HTML.

    :param coordinate_names: site and name of each coordinate.
    :param bias_estimates: estimates of the bias by several methods. The table shows the first, or
        another one that clearly shows a bias.
    :param convergence: R-hat and ESS of each coordinate.
    :param configurational_temperature: configurational temperature, 1 for an exact sampler.
    :param kinetic_temperature: mean square of the momenta; NaN without momenta.
    :param chain_covariance: the chains' covariance in the first chain's preconditioned
        coordinates, or its diagonal. For functions of the draws, the variances of their values.
    :param posterior_covariance: estimate of the posterior's covariance, of the same shape.
    :param mcse: Monte Carlo standard errors of the chains' means and SDs, in the chains' SDs, shape
        ``(2, d)``.
    :param heavy_tailed_coordinates: coordinates diagnosed after a tail transform, shape ``(k,)``.
    :param funnel_necks: high-curvature regions that the chains do not reach.
    :param excursions: coordinates with draws far outside of the posterior.
    :param num_gradient_draws: number of draws at which gradients were computed after the run.
    :param noise_mean_bias: predicted bias of means by gradient noise, in posterior SDs, which the
        estimates include. Shape ``(d,)``, or ``(0,)`` if it was not predicted. NaN where third
        derivatives differ too much between draws.
    :param model_warnings: problems that the warm-up has detected.
    :param step_size: last step size, the largest of all chains.
    :param weak_order: weak order of the integrator.
    :param gradient_noise_variance: variance of the preconditioned gradient's noise as measured in
        the warm-up; NaN if it was not measured.
    :param noise_sd_inflation: upper bound of the SD inflation that is predicted from this noise.
    :param num_divergences: number of diverging iterations.
    :param num_draws: number of draws of all chains.
    :param max_ess: upper bound of the ESS: time of the run over the relaxation time of a Gaussian.
    :param full_data: whether gradients were computed on all rows.
    :param is_for_functions: whether the report is on functions of the draws, each of which counts
        as a site, in place of the parameters.
    :param has_custom_dynamics: whether the user has defined the SDE or the integrator.
    :param num_steps: steps per draw.
    :param max_grad_norm: norm to which the run has clipped gradients, or None.
    :param notes: further notes on what was diagnosed.
    """

    coordinate_names: tuple[tuple[str, str], ...]
    bias_estimates: tuple[BiasEstimate, ...]
    convergence: ConvergenceStats
    configurational_temperature: Estimate
    kinetic_temperature: Estimate
    chain_covariance: np.ndarray
    posterior_covariance: np.ndarray
    mcse: np.ndarray
    heavy_tailed_coordinates: np.ndarray
    funnel_necks: tuple[FunnelNeck, ...]
    excursions: tuple[Excursion, ...]
    num_gradient_draws: int
    noise_mean_bias: np.ndarray
    model_warnings: tuple[ModelWarning, ...]
    step_size: float
    weak_order: int
    gradient_noise_variance: float
    noise_sd_inflation: float
    num_divergences: int
    num_draws: int
    max_ess: float
    full_data: bool
    is_for_functions: bool = False
    has_custom_dynamics: bool = False
    num_steps: int = 1
    max_grad_norm: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def mean_bias(self) -> Estimate:
        """Chains' mean minus the posterior's, in posterior SDs, with standard errors."""
        return self.bias_estimates[0].mean_bias

    @property
    def sd_inflation(self) -> Estimate:
        """Chains' SD divided by the posterior's, minus one, with standard errors."""
        return self.bias_estimates[0].sd_inflation

    @property
    def r_hat(self) -> np.ndarray:
        """R-hat of each coordinate, shape ``(d,)``; NaN for a single chain."""
        return self.convergence.r_hat

    @property
    def ess(self) -> np.ndarray:
        """Effective sample size of each coordinate, ``(d,)``; NaN for a schedule of step sizes."""
        return self.convergence.ess

    @cached_property
    def sites(self) -> list[SiteBias]:
        """Worst coordinates and diagnosis of each site."""
        return diagnose_sites(self)

    @property
    def has_many_divergences(self) -> bool:
        """True if more than 1% of the iterations diverged."""
        return self.num_divergences > _MAX_DIVERGENCE_FRACTION * self.num_draws

    @property
    def is_flagged(self) -> bool:
        """True if a site is biased, multimodal or not converged, or many iterations diverged."""
        flagged = (Diagnosis.NOT_CONVERGED, Diagnosis.BIASED, Diagnosis.MULTIMODAL)
        return self.has_many_divergences or any(s.diagnosis in flagged for s in self.sites)

    @property
    def is_ok(self) -> bool:
        """True if all sites are ok and few iterations diverged."""
        all_ok = all(s.diagnosis == Diagnosis.OK for s in self.sites)
        return all_ok and not self.has_many_divergences

    @property
    def diagnosis(self) -> str:
        """Description of what is wrong and how to fix it, in a few sentences."""
        return describe(self)

    @property
    def summary_line(self) -> str:
        """Largest biases in one line."""
        return summarize_in_one_line(self)

    def __str__(self) -> str:
        return make_table(self).to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return make_table(self).to_html()

    def to_dataset(self) -> Any:
        """Convert the report to an :class:`xarray.Dataset` with an entry for each coordinate."""
        xarray = errors.import_optional("xarray", "BiasReport.to_dataset", "arviz")
        columns = {
            "mean_bias": self.mean_bias.value,
            "mean_bias_error": self.mean_bias.error,
            "sd_inflation": self.sd_inflation.value,
            "sd_inflation_error": self.sd_inflation.error,
            "r_hat": self.r_hat,
            "ess": self.ess,
        }
        return xarray.Dataset(
            {name: ("coordinate", values) for name, values in columns.items()},
            coords={
                "coordinate": [name for _, name in self.coordinate_names],
                "site": ("coordinate", [site for site, _ in self.coordinate_names]),
            },
            attrs={
                "diagnosis": self.diagnosis,
                "kinetic_temperature": float(self.kinetic_temperature.value),
                "configurational_temperature": float(self.configurational_temperature.value),
                "gradient_noise_variance": self.gradient_noise_variance,
                "step_size": self.step_size,
                "full_data": int(self.full_data),
            },
        )

    def to_dataframe(self, coordinates: bool = False) -> Any:
        """Convert the report to a :class:`pandas.DataFrame`.

        :param coordinates: whether to return one row per coordinate. Default False: one row per
            site, with its diagnosis.
        """
        pandas = errors.import_optional("pandas", "BiasReport.to_dataframe", "arviz")
        if coordinates:
            return self.to_dataset().to_dataframe()
        return pandas.DataFrame(self.sites).set_index("site")

    def add_to(self, data: Any) -> None:
        """Add the report to an ArviZ object as its group ``bias_report``.

        :param data: :class:`arviz.InferenceData` (ArviZ 0.x) or :class:`xarray.DataTree` (1.x).
        """
        dataset = self.to_dataset()
        if not hasattr(data, "groups"):
            raise InvalidArgumentError(
                f"`data` is a {type(data).__name__}, which is not an ArviZ object.",
                "pass the result of `to_arviz(mcmc)`.",
                "arviz-object",
            )
        add_group(data, "bias_report", dataset)


def bias_report(
    mcmc: MCMC,
    fn: Callable[..., Any] | None = None,
    *row_arrays: Any,
    full_data: bool = False,
    num_draws: int = 400,
) -> BiasReport:
    """Estimate the bias of a finished run's means and SDs.

    By Stein's identity, running sums of positions and gradients show biased SDs and chains that
    have not converged. The report adds gradients at up to 1,024 draws, which take a few seconds.
    These show bias that averages to zero in the sums. The curvature at draws shows regions that the
    chains do not reach. Heavy tails are transformed. The report also has R-hat, effective sample
    sizes and the warnings of the warm-up. It misses a mode in which no chain was initialised.

    With a function of the draws, such as a network's predictions, the report is on the values of
    the function, and uses gradients at draws alone. It is exact for linear functions of Gaussian
    parameters that the preconditioner standardises, and approximate otherwise. For example, it
    shows half of the SD inflation of a square.

    For NumPyro's Gibbs, the report is on all continuous sites of all blocks given the discrete
    sites, by gradients on all rows at draws. For models with sites that ``gibbs_fn`` samples, it is
    on the other sites, by gradients at draws with updated local values. These gradients cost as
    much as sampling the same draws in the run.

    :param mcmc: a run of one of this package's kernels, or of Gibbs with such a block.
    :param fn: a function of one draw (a dict of values by site) and of ``row_arrays``, as in
        :func:`~numpyro_sgmcmc.diagnostics.predictive_summary`. It returns real numbers, or a dict
        of arrays of them, and has second derivatives. Default: none.
    :param row_arrays: arrays with equal numbers of rows, which ``fn`` gets after the draw, in
        chunks of rows. The results of ``fn`` must have the rows along their first axis, and each
        result must depend on its own row alone.
    :param full_data: whether to compute gradients on all rows at ``num_draws`` draws, in place of
        the run's minibatch gradients. This is more precise if minibatch gradients are noisy, and
        takes ``num_draws`` passes over the data. Default False.
    :param num_draws: number of evenly spaced draws for ``full_data``, for Gibbs, and for models
        with sites that ``gibbs_fn`` samples. Default 400.
    :return: the report; ``print`` shows it as a table with the recommended fixes.
    :raises ValueError: for a run of another kernel, or before a run; for a function whose values
        are not real and finite; and for a function without ``full_data`` if gradients at draws are
        not available.
    """
    errors.check_positive_int("num_draws", num_draws)
    errors.check_bool("full_data", full_data)
    if row_arrays and fn is None:
        raise InvalidArgumentError(
            "`bias_report` got arrays of rows, but `fn` is None.",
            "pass `fn`, a function of a draw and these arrays, before the arrays.",
            "function-bias",
        )
    if isinstance(mcmc, MCMC) and isinstance(mcmc.sampler, Gibbs):
        _check_no_function(fn, "a run of Gibbs")
        return _report_on_gibbs(GibbsRunData.from_mcmc(mcmc), num_draws)
    run = RunData.from_mcmc(mcmc, "bias_report", allow_local_latents=True)
    if fn is not None or full_data or run.local_state is not None:
        check_has_data(run.kernel, "bias_report")
    if run.local_state is not None:
        _check_no_function(fn, "a model with sites that `gibbs_fn` samples")
        return _report_on_globals(run, num_draws)
    functions = None
    if fn is not None:
        if run.kernel.has_schedule:
            raise InvalidArgumentError(
                "`bias_report` does not support `fn` with a schedule of step sizes.",
                "leave `fn` out, or run with a constant step_size.",
                "function-bias",
            )
        check_sites_kept([s.name for s in run.kernel.potential.sites or ()], run.site_draws)
        functions = check_differentiable(fn, row_arrays, get_draws_by_site(run.site_draws, "mcmc"))
    return _report_on_run(run, functions, num_draws if full_data else None)


def _check_no_function(fn: Any, run_description: str) -> None:
    if fn is not None:
        raise InvalidArgumentError(
            f"`bias_report` does not support `fn` for {run_description}.",
            "leave `fn` out to judge the parameters.",
            "function-bias",
        )


def _report_on_run(
    run: RunData, functions: DrawFunctions | None, num_full_draws: int | None
) -> BiasReport:
    """Report on parameters, or on functions of them.

    :param num_full_draws: draws at which to take gradients on all rows, or None.
    """
    if not (run.batch_sums.weight > 0).any():
        raise InvalidArgumentError(
            "All draws of the run diverged or have weight zero.",
            "use a smaller step_size, or leave `step_size` out so that the warm-up adapts it.",
            "all-diverged",
        )
    if num_full_draws is None:
        exact = None
        # Batches of all chains, each in its chain's own coordinates.
        sums = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), run.batch_sums)
        stein = estimate_bias_from_sums(sums, run.preconditioners)
    else:
        exact = compute_full_gradients_at_draws(run, num_full_draws)
        exact_in_first_chain = exact.subtract_offsets(run.center_offsets)
        stein = estimate_bias_at_draws(exact_in_first_chain, run.preconditioners[0])
    names = None
    if functions is None:
        measured = _measure_bias(run, stein, exact)
    else:
        names, measured = _estimate_function_bias(run, stein, functions, exact)
    return _assemble_report(run, measured, names, full_data=exact is not None)


def _measure_bias(
    run: RunData, stein: SteinEstimates, exact: GradientsAtDraws | None
) -> BiasMeasurements:
    """Measure the bias of a run's parameters.

    :param stein: estimates from the running sums, or from ``exact``.
    :param exact: gradients on all rows at some draws, if they were asked for.
    """
    chain_sums = jax.tree.map(lambda x: x.sum(1), run.batch_sums)
    r_hat = compute_between_chain_r_hat(chain_sums, run.preconditioners)
    draws, dynamics = run.finite_draws, run.kernel.dynamics
    if draws is None:
        ess = (np.nan if run.kernel.has_schedule else 1.0) / np.square(stein.mcse[0])
        return BiasMeasurements((stein.bias,), ConvergenceStats(r_hat, ess), stein)
    offsets = run.center_offsets
    tails = TailTransform.fit((draws - offsets).reshape(-1, draws.shape[-1]))
    convergence = measure_convergence(draws, None if offsets.any() else tails)
    noise_mean_bias = predict_noise_mean_bias(run, draws)
    estimates = [stein.bias]
    funnel_necks: tuple[FunnelNeck, ...] = ()
    gradients = compute_gradients_at_draws(run, draws)
    if gradients is not None:
        gradients = gradients.subtract_offsets(offsets)
        estimates.append(estimate_bias_at_draws(gradients, run.preconditioners[0]).bias)
        if dynamics.has_constant_metric:  # else the SDE adapts its step to the position
            stiffness = [dynamics.stiffness(max(0.0, float(c))) for c in gradients.max_curvature]
            at_draws = gradients
            # Gradients in model coordinates may have infinite variance.
            if run.preconditioners[0].has_uncertain_scales:
                at_draws = gradients.to_coordinates(run.preconditioners[0])
            funnel_necks = find_funnel_necks(
                at_draws.positions.reshape(-1, draws.shape[-1]),
                at_draws.gradients.reshape(-1, draws.shape[-1]),
                gradients.curvature_indices,
                np.square(run.step_size * np.array(stiffness)),
            )
    tail_gradients = gradients if exact is None else exact.subtract_offsets(offsets)
    tail_bias = estimate_tail_bias(tail_gradients, tails)
    return BiasMeasurements(
        bias_estimates=tuple(
            b.add_mean_bias(noise_mean_bias).override_coordinates(tails.coordinates, tail_bias)
            for b in estimates
        ),
        convergence=convergence._replace(r_hat=np.fmax(convergence.r_hat, r_hat)),
        stein=stein,
        heavy_tailed_coordinates=tails.coordinates,
        funnel_necks=funnel_necks,
        excursions=find_excursions(run, draws),
        num_gradient_draws=0 if gradients is None else gradients.num_draws,
        noise_mean_bias=noise_mean_bias.value,
    )


def _estimate_function_bias(
    run: RunData, stein: SteinEstimates, functions: DrawFunctions, exact: GradientsAtDraws | None
) -> tuple[tuple[tuple[str, str], ...], BiasMeasurements]:
    """Estimate the bias of functions of the draws, by gradients on all rows if there are some."""
    gradients = exact
    if gradients is None and (draws := run.finite_draws) is not None:
        gradients = compute_gradients_at_draws(run, draws)
    if gradients is None:
        raise InvalidArgumentError(
            "`bias_report` of `fn` needs gradients at draws, which are expensive for this run.",
            "pass full_data=True to compute the gradients on all rows.",
            "function-bias",
        )
    return estimate_function_bias(
        functions,
        get_draws_by_site(run.site_draws, "mcmc"),
        gradients,
        run.preconditioners[0].cast(run.kernel.potential.dtype),
        run.make_constrain_fn(),
        stein,
    )


def _report_on_globals(run: RunData, num_draws: int) -> BiasReport:
    """Report on the globals of a run with sites that ``gibbs_fn`` samples."""
    measured = measure_bias_of_globals(run, num_draws)
    local_latents = run.kernel.potential.local_latents
    assert local_latents is not None
    names = ", ".join(f"`{name}`" for name in local_latents.names)
    return replace(
        _assemble_report(run, measured, full_data=True),
        max_ess=float(np.fmax.reduce(measured.convergence.ess)),
        notes=(f"Only globals are diagnosed, marginal over the local latent variables {names}.",),
    )


def _report_on_gibbs(run: GibbsRunData, num_draws: int) -> BiasReport:
    """Report on all continuous sites of a run of NumPyro's Gibbs."""
    measured = measure_bias_of_gibbs(run, num_draws)
    note = "All blocks of Gibbs are diagnosed together"
    if run.discrete_samples:
        names = ", ".join(f"`{name}`" for name in run.discrete_samples)
        note += f", given the discrete sites {names}, which are not diagnosed"
    discrete_warnings = find_unconverged_discrete_sites(run.discrete_samples)
    return BiasReport(
        **_flatten(measured),
        coordinate_names=run.coordinate_names,
        model_warnings=(*run.block_warnings, *discrete_warnings),
        step_size=run.step_size,
        weak_order=run.weak_order,
        gradient_noise_variance=np.nan,
        noise_sd_inflation=np.nan,
        num_divergences=run.num_divergences,
        num_draws=run.num_draws,
        max_ess=float(np.fmax.reduce(measured.convergence.ess)),
        full_data=True,
        notes=(f"{note}.",),
    )


def _assemble_report(
    run: RunData,
    measured: BiasMeasurements,
    function_names: tuple[tuple[str, str], ...] | None = None,
    *,
    full_data: bool,
) -> BiasReport:
    kernel, noise_stats = run.kernel, run.kernel.noise_stats
    variance_inflation = noise_stats.predict_variance_inflation(kernel.dynamics, run.step_size)
    # Gradient noise inflates momenta and positions alike; discretisation inflates momenta by h^2/2.
    temperature, error = (float(x) for x in measured.stein.kinetic_temperature)
    kinetic_inflation = temperature - 1.0 - _KINETIC_Z * error - run.step_size**2 / 2.0
    # NaN for noise that was not measured; NaN without momenta is ignored.
    variance_inflation = max(variance_inflation, kinetic_inflation, 0.0)
    is_custom_sde = not type(kernel.dynamics).__module__.startswith("numpyro_sgmcmc.")
    return BiasReport(
        **_flatten(measured),
        coordinate_names=run.coordinate_names if function_names is None else function_names,
        model_warnings=() if run.adaptation is None else run.adaptation.model_warnings,
        step_size=run.step_size,
        weak_order=kernel.dynamics.integrators[kernel.integrator].order,
        gradient_noise_variance=noise_stats.variance,
        noise_sd_inflation=float(np.sqrt(1.0 + variance_inflation) - 1.0),
        num_divergences=run.num_divergences,
        num_draws=run.num_draws,
        max_ess=run.max_ess,
        full_data=full_data,
        is_for_functions=function_names is not None,
        has_custom_dynamics=is_custom_sde or isinstance(kernel.dynamics, Recipe),
        num_steps=run.num_steps,
        max_grad_norm=kernel.options.max_grad_norm,
    )


def _flatten(measured: BiasMeasurements) -> dict[str, Any]:
    """Return measurements by name, those of Stein's identity among them."""
    values = measured._asdict()
    stein = values.pop("stein")._asdict()
    del stein["bias"]  # without noise and tails, which the first of the bias estimates includes
    return values | stein


# --- Corrected draws ----------------------------------------------------------------------------


def bias_corrected_samples(
    mcmc: MCMC, report: BiasReport | None = None, *, group_by_chain: bool = False
) -> dict[str, Any]:
    """Return the draws rescaled about their mean to the posterior's estimated covariance.

    The map acts in unconstrained space. It is linear for up to 64 coordinates, and has one scale
    per coordinate for more. Means are not changed. The map is accurate if the posterior is
    approximately Gaussian in unconstrained space and the errors of the SDs are moderate. It does
    not replace a smaller step size. Deterministic sites are computed from the rescaled draws.

    :param mcmc: a run of one of this package's kernels.
    :param report: result of :func:`~numpyro_sgmcmc.bias_report`. Default None: computed here.
    :param group_by_chain: whether to keep the axis of chains, as in ``mcmc.get_samples``. Default
        False.
    :return: samples by site, shape ``(chains * draws, ...)`` or ``(chains, draws, ...)``.
    :raises ValueError: for a run of another kernel, before a run, or if the posterior's covariance
        cannot be estimated with sufficient precision.
    """
    run = RunData.from_mcmc(mcmc, "bias_corrected_samples")
    check_has_data(run.kernel, "bias_corrected_samples")
    report = bias_report(mcmc) if report is None else report
    if not isinstance(report, BiasReport):
        raise InvalidArgumentError(
            f"`report` is a {type(report).__name__}, which is not a bias report.",
            "pass the result of bias_report(mcmc), or leave it out.",
            "report-of-another-run",
        )
    if report.coordinate_names != run.coordinate_names or report.is_for_functions:
        raise InvalidArgumentError(
            "`report` has coordinates that differ from those of the run.",
            "pass the result of bias_report(mcmc), without a function, for this run.",
            "report-of-another-run",
        )
    correction = _compute_correction(report.chain_covariance, report.posterior_covariance)
    if not np.isfinite(correction).all():
        raise InvalidArgumentError(
            "The posterior's covariance is estimated too imprecisely to correct draws.",
            "use more draws, or pass report=bias_report(mcmc, full_data=True).",
            "uncorrectable-draws",
        )
    if run.center_offsets.any():
        raise InvalidArgumentError(
            "`bias_corrected_samples` does not support chains in different modes.",
            "run without `init_in_modes`.",
            "uncorrectable-draws",
        )
    positions = run.draws
    # Covariances are those of coordinates without the low-rank part.
    preconditioner = run.preconditioners[0]._replace(low_rank=None).cast(positions.dtype)
    scale = jnp.asarray(correction, positions.dtype)
    constrain = run.make_constrain_fn()
    if preconditioner.has_uncertain_scales:
        to_coordinates, to_position = preconditioner.from_position, preconditioner.to_position
        center = to_coordinates(positions).mean((0, 1))
    else:
        mean, center = positions.mean((0, 1)), 0.0

        def to_coordinates(position: jax.Array) -> jax.Array:
            return preconditioner.solve(position - mean)

        def to_position(q: jax.Array) -> jax.Array:
            return mean + preconditioner.apply(q)

    def correct(position: jax.Array) -> dict[str, Any]:
        q = to_coordinates(position) - center
        q = scale @ q if scale.ndim == 2 else scale * q
        return constrain(to_position(center + q))

    samples = jax.vmap(jax.vmap(correct))(positions)
    if group_by_chain:
        return samples
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)


def _compute_correction(
    chain_covariance: np.ndarray, posterior_covariance: np.ndarray
) -> np.ndarray:
    r"""Return the symmetric A with :math:`A\,\Sigma_\text{chain} A = \Sigma_\text{posterior}`.

    It is the optimal transport map between two Gaussians; NaN if a covariance is not positive
    definite.
    """
    if chain_covariance.ndim == 1:
        with np.errstate(invalid="ignore"):
            return np.sqrt(posterior_covariance / chain_covariance)
    if not np.isfinite(posterior_covariance).all():
        return posterior_covariance
    matrices = [(m + m.T) / 2.0 for m in (posterior_covariance, chain_covariance)]
    if not all(np.linalg.eigvalsh(m).min() > 0.0 for m in matrices):
        return np.full_like(posterior_covariance, np.nan)
    return compute_geometric_mean_with_inverse(*matrices)


# --- Summary ------------------------------------------------------------------------------------


def print_summary(
    mcmc: MCMC,
    prob: float = 0.9,
    exclude_deterministic: bool = True,
    sites: Sequence[str] | None = None,
) -> None:
    """Print ``mcmc.print_summary()``, a line on bias, and the diagnosis unless all sites are ok.

    :param mcmc: a run of one of this package's kernels.
    :param prob: probability mass of the intervals, in (0, 1]. Default 0.9.
    :param exclude_deterministic: whether to leave deterministic sites out. Default True.
    :param sites: names of the sites in the table, which may be deterministic, or names of sites to
        leave out, each after a ``~``: ``["~effect"]``. The lines below the table are on all sites.
        Default None: all.
    :raises ValueError: for a run of another kernel, or before a run, for fewer than 4 draws per
        chain, and for unknown sites.
    """
    if not (isinstance(mcmc, MCMC) and isinstance(mcmc.sampler, Gibbs)):
        check_finished_run(mcmc, "print_summary", uses_moments=False)
    if mcmc.last_state is not None:
        draws = jax.tree.leaves(mcmc.get_samples(group_by_chain=True))
        num_draws = min((x.shape[1] for x in draws), default=_MIN_DRAWS_FOR_SUMMARY)
        if num_draws < _MIN_DRAWS_FOR_SUMMARY:
            raise InvalidArgumentError(
                f"`print_summary` needs at least {_MIN_DRAWS_FOR_SUMMARY} draws per chain, but "
                f"there are {num_draws}.",
                "raise num_samples, or print `bias_report(mcmc)`.",
                "few-draws",
            )
    report = bias_report(mcmc)
    errors.check_in_interval("prob", prob, 0.0, 1.0)
    if sites is None:
        mcmc.print_summary(prob, exclude_deterministic)
    else:
        diagnostics.print_summary(_select_site_draws(mcmc, sites, exclude_deterministic), prob)
        if (diverging := mcmc.get_extra_fields().get("diverging")) is not None:
            print(f"Number of divergences: {np.sum(diverging)}")
    print(report.summary_line)
    if not report.is_ok:
        print(wrap_lines(report.diagnosis))


def _select_site_draws(
    mcmc: MCMC, sites: Sequence[str], exclude_deterministic: bool
) -> dict[str, Any]:
    """Return the draws of the sites asked for, axes of chains and draws first."""
    draws = mcmc.get_samples(group_by_chain=True)
    names = [sites] if isinstance(sites, str) else sites
    available = list(draws) if isinstance(draws, dict) else []
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not is_list or any(name.removeprefix("~") not in available for name in names):
        raise InvalidArgumentError(
            f"`sites` is {errors.describe_value(sites)}, which is not a list of sites of the run.",
            f"use names of {', '.join(map(repr, available)) or 'a model with named sites'}.",
            "summary-sites",
        )
    if len({name.startswith("~") for name in names}) != 1:
        raise InvalidArgumentError(
            "`sites` must name only sites to show, or only sites to leave out (each after a ~).",
            "pass names of one of the two kinds.",
            "summary-sites",
        )
    if not names[0].startswith("~"):
        return {name: draws[name] for name in names}
    latent = attrgetter(mcmc.sampler.sample_field)(mcmc.last_state)
    shown = [name for name in available if name in latent or not exclude_deterministic]
    return {name: draws[name] for name in shown if f"~{name}" not in names}
