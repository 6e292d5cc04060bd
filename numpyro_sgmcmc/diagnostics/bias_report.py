r"""What is known of a run's bias: a table, a verdict, and what ArviZ and pandas make of it.

The bias of runs of NumPyro's Gibbs: of all blocks together.

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

How far a run's means and standard deviations are from the posterior's, measured in the run.

Draws rescaled by the bias that was measured: an approximation, and labelled as one.

NumPyro's summary, and what the run says of its bias below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import diagnostics
from numpyro.infer import MCMC, Gibbs

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation.preconditioning import compute_geometric_mean_with_inverse
from numpyro_sgmcmc.data.arguments import Arguments, DeviceArrayCache
from numpyro_sgmcmc.diagnostics.diagnosis import (
    DIAGNOSES,
    MAX_OK_R_HAT,
    MAX_REPORTED_BIAS,
    SiteBias,
    describe_report,
    format_html_table,
    format_r_hat,
)
from numpyro_sgmcmc.diagnostics.function_bias import (
    FunctionBias,
    check_differentiable,
    estimate_function_bias,
)
from numpyro_sgmcmc.diagnostics.predictive import DrawFunctions, get_draws_by_site
from numpyro_sgmcmc.diagnostics.run_data import (
    ConvergenceStats,
    GradientsAtDraws,
    check_finished_run,
    check_has_data,
    compute_center_offsets,
    compute_gradients_at_draws,
    compute_unconstrained_draws,
    convert_sums_to_first_chain,
    get_chain_preconditioners,
    get_coordinate_names,
    get_potential_coordinate_names,
    get_unconstrained_draws,
    get_unconstrained_draws_or_none,
    make_thinning_slice,
)
from numpyro_sgmcmc.diagnostics.special_runs import estimate_bias_of_globals
from numpyro_sgmcmc.diagnostics.stein_estimates import (
    BiasDiagnostics,
    SteinEstimates,
    compute_between_chain_r_hat,
    compute_sums_at_draws,
    estimate_bias_from_draws,
    estimate_bias_from_sums,
)
from numpyro_sgmcmc.dynamics import Dynamics, Recipe
from numpyro_sgmcmc.errors import InvalidArgumentError, ModelWarning, ModelWarningKind
from numpyro_sgmcmc.model.trace import trace_model
from numpyro_sgmcmc.sampling.gibbs import build_conditional_potential
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel, full_gradients

__all__ = [
    "BiasReport",
    "bias_corrected_samples",
    "bias_report",
    "build_gibbs_report",
    "print_summary",
]

_DIAGNOSIS_BY_WARNING = {
    ModelWarningKind.MULTIMODAL: "multimodal",
    ModelWarningKind.MODES_VISITED: "not converged",
    ModelWarningKind.NON_IDENTIFIED: "ok",
    ModelWarningKind.NOT_CONVERGED: "inconclusive",
}
"""Verdicts by kind of the warm-up's findings; of all others, biased."""


@dataclass(frozen=True, repr=False)
class BiasReport:
    """What :func:`~numpyro_sgmcmc.bias_report` found; prints as a table, in a notebook as HTML.

    :param names: site and name of each coordinate.
    :param stein_estimates: shift, inflation and temperatures.
    :param bias_diagnostics: what the draws tell besides.
    :param model_warnings: what the warm-up found to be wrong whatever the chains say.
    :param step_size: the run's last step size, the longest of the chains'.
    :param weak_order: weak order of the scheme.
    :param gradient_noise_variance: variance of the whitened gradient's noise, measured in warm-up; NaN where
        it had nothing to look for.
    :param noise_sd_inflation: by how much that noise is predicted to widen sds, at most.
    :param num_divergences: diverging iterations.
    :param num_draws: iterations they are out of.
    :param max_ess: as how many independent draws they count at most: their time over that
        in which a Gaussian is forgotten.
    :param full_data: whether the gradients were those on all rows.
    :param is_for_functions: whether it is on values of functions of the draws, each as a site, in
        place of the parameters.
    :param has_custom_dynamics: whether SDE or scheme are the user's and not the package's.
    :param max_grad_norm: to which norm the run has cut its gradients, or None.
    :param notes: what else there is to know of how it was told.
    """

    names: list[tuple[str, str]]
    stein_estimates: SteinEstimates
    bias_diagnostics: BiasDiagnostics
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
    max_grad_norm: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def sites(self) -> list[SiteBias]:
        """One row a site: its worst coordinates, and the verdict."""
        by_site: dict[str, list[int]] = {}
        for k, (site, _) in enumerate(self.names):
            by_site.setdefault(site, []).append(k)
        told, known = self.bias_diagnostics, self._diagnoses_by_site
        return [
            SiteBias.from_coordinates(
                site, np.array(where), told.bias_estimates, told.convergence, known.get(site)
            )
            for site, where in by_site.items()
        ]

    @property
    def _diagnoses_by_site(self) -> dict[str, str]:
        """Sites of which a neck or the warm-up tells that they are wrong, and the verdict."""
        everywhere = {site for site, _ in self.names}
        found = dict.fromkeys(sorted(everywhere), "ok")
        for finding in self.model_warnings:
            told = _DIAGNOSIS_BY_WARNING.get(finding.kind, "biased")
            for site in everywhere if self.is_for_functions else finding.sites or everywhere:
                found[site] = min(found[site], told, key=DIAGNOSES.index)
        for neck in self.bias_diagnostics.funnel_necks:
            site, told = (
                self.names[neck.coordinate][0],
                "biased" if neck.is_significant else "inconclusive",
            )
            found[site] = min(found[site], told, key=DIAGNOSES.index)
        return found

    @property
    def r_hat(self) -> np.ndarray:
        """How far the chains disagree, shape ``(d,)``; NaN for a single short chain."""
        return self.bias_diagnostics.convergence.r_hat

    @property
    def ess(self) -> np.ndarray:
        """Effective sample sizes, shape ``(d,)``; NaN where the draws are not there."""
        return self.bias_diagnostics.convergence.ess

    @property
    def is_flagged(self) -> bool:
        """Whether any site is clearly biased, chains disagree, or iterations diverged often."""
        return self.has_many_divergences or any(
            s.diagnosis in ("not converged", "biased", "multimodal") for s in self.sites
        )

    @property
    def is_ok(self) -> bool:
        """Whether every site is right within error bars that are short enough to tell."""
        return not self.has_many_divergences and all(s.diagnosis == "ok" for s in self.sites)

    @property
    def has_many_divergences(self) -> bool:
        """Whether more than one iteration in a hundred diverged."""
        return self.num_divergences > 0.01 * self.num_draws

    @property
    def diagnosis(self) -> str:
        """The report in a few sentences: what is wrong, and what would cure it."""
        return describe_report(self)

    @property
    def summary_line(self) -> str:
        """The report in one line."""
        sites = self.sites
        shift = max(sites, key=lambda s: abs(s.mean_bias))
        inflation = max(sites, key=lambda s: abs(s.sd_inflation))
        return (
            f"Bias: means off by at most {abs(shift.mean_bias):.2f} ± {shift.mean_bias_error:.2f}"
            f" posterior sds, sds by {100 * inflation.sd_inflation:+.1f} % ± "
            f"{100 * inflation.sd_inflation_error:.1f} %"
        )

    def __str__(self) -> str:
        header = ("site", "size", "mean shift", "sd inflation", "R-hat", "ESS", "verdict")
        rows = [header, *self._make_table_cells()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(w) if k in (0, 6) else cell.rjust(w)
                for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", *self._make_notes(), "", self.diagnosis])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = (
            "site",
            "size",
            "mean shift (posterior sds)",
            "sd inflation",
            "R-hat",
            "ESS",
            "verdict",
        )
        return format_html_table(
            header, self._make_table_cells(), [*self._make_notes(), self.diagnosis]
        )

    def _make_table_cells(self) -> list[tuple[str, ...]]:
        return [
            (
                s.site,
                str(s.size),
                _format_bias(s.mean_bias, s.mean_bias_error, MAX_REPORTED_BIAS, "{:+.3f} ± {:.3f}"),
                _format_bias(
                    100 * s.sd_inflation,
                    100 * s.sd_inflation_error,
                    100 * MAX_REPORTED_BIAS,
                    "{:+.1f} % ± {:.1f} %",
                ),
                format_r_hat(s.r_hat),
                f"{s.ess:.0f}" if np.isfinite(s.ess) else "-",
                s.diagnosis,
            )
            for s in self.sites
        ]

    def _make_notes(self) -> list[str]:
        configurational, kinetic = (
            self.stein_estimates.configurational_temperature,
            self.stein_estimates.kinetic_temperature,
        )
        heat = f"configurational {configurational.value:.3f} ± {configurational.error:.3f}"
        if np.isfinite(kinetic.value):
            heat += f", kinetic {kinetic.value:.3f} ± {kinetic.error:.3f}"
        widens = f"at most {100 * self.noise_sd_inflation:.1f} %"
        if self.noise_sd_inflation > MAX_REPORTED_BIAS:
            widens = f"more than {100 * MAX_REPORTED_BIAS:,.0f} %"
        noise = (
            f"Gradient noise: variance {self.gradient_noise_variance:.3g} in the noisiest whitened "
            f"coordinate, which widens sds by {widens}"
        )
        moved = float(np.abs(self.bias_diagnostics.noise_mean_bias).max(initial=0.0))
        noise += f" and moves means by at most {moved:.2f} sds." if moved >= 0.005 else "."
        if np.isnan(self.gradient_noise_variance):
            reason = ", because the warm-up had nothing to look for" * (not self.notes)
            noise = f"Gradient noise: not measured{reason}."
        gradients = "gradients on all rows" if self.full_data else "the run's own gradients"
        if num := self.bias_diagnostics.num_gradient_draws:
            gradients += f", and from gradients at {num} draws"
        heavy = [
            name
            for _, name in (self.names[k] for k in self.bias_diagnostics.heavy_tailed_coordinates)
        ]
        of_tails = (
            f"Heavy tails, whose sds mean nothing: {', '.join(heavy[:3])}"
            f"{', ...' * (len(heavy) > 3)}. Told by quantiles, on a scale that bends the tails."
        )
        worst = "Worst coordinates, in unconstrained space"
        if self.is_for_functions:
            worst, gradients = "Worst values of each function", f"gradients at {num} draws"
        return [
            f"{worst}; mean shift in posterior sds; from {gradients}.",
            f"Temperature (1 where exact): {heat}.",
            noise,
            *[of_tails] * bool(heavy),
            *self.notes,
        ]

    def to_dataset(self) -> Any:
        """The report as an :class:`xarray.Dataset`, one entry a coordinate."""
        xarray = errors.import_optional("xarray", "BiasReport.to_dataset", "arviz")
        shift, inflation = self.bias_diagnostics.bias_estimates[0]
        columns = {
            "mean_shift": shift.value,
            "mean_shift_error": shift.error,
            "sd_inflation": inflation.value,
            "sd_inflation_error": inflation.error,
            "r_hat": self.r_hat,
            "ess": self.ess,
        }
        return xarray.Dataset(
            {name: ("coordinate", values) for name, values in columns.items()},
            coords={
                "coordinate": [name for _, name in self.names],
                "site": ("coordinate", [site for site, _ in self.names]),
            },
            attrs={
                "verdict": self.diagnosis,
                "kinetic_temperature": float(self.stein_estimates.kinetic_temperature.value),
                "configurational_temperature": float(
                    self.stein_estimates.configurational_temperature.value
                ),
                "gradient_noise_variance": self.gradient_noise_variance,
                "step_size": self.step_size,
                "full_data": int(self.full_data),
            },
        )

    def to_dataframe(self, coordinates: bool = False) -> Any:
        """The report as a :class:`pandas.DataFrame`.

        :param coordinates: one row a coordinate; default one row a site, with the verdicts.
        """
        pandas = errors.import_optional("pandas", "BiasReport.to_dataframe", "arviz")
        if coordinates:
            return self.to_dataset().to_dataframe()
        return pandas.DataFrame(self.sites).set_index("site")

    def add_to(self, data: Any) -> None:
        """Put the report into an ArviZ object as its group ``bias_report``.

        :param data: an ``InferenceData`` (ArviZ 0.23) or a ``DataTree`` (ArviZ 1.x).
        """
        dataset = self.to_dataset()
        if not hasattr(data, "groups"):
            raise InvalidArgumentError(
                f"`data` is a {type(data).__name__}, but must be an ArviZ object."
            )
        if hasattr(data, "add_groups"):
            data.add_groups({"bias_report": dataset})
        else:
            data["bias_report"] = type(data)(dataset)


def _format_bias(value: float, error: float, max_value: float, template: str) -> str:
    return template.format(value, error) if abs(value) < max_value else "lost"


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
            found.append(ModelWarning((), ModelWarningKind.NOT_CONVERGED, told))
    return found


def _make_scope_notes(discrete_sites: list[str]) -> tuple[str, ...]:
    told = "All blocks of Gibbs are judged together, those of other kernels with them"
    if discrete_sites:
        names = ", ".join(f"`{name}`" for name in discrete_sites)
        told += f"; not judged, and taken as given: {names} (discrete)"
    return (told + ".",)


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
    errors.check_positive_int("num_draws", num_draws)
    errors.check_bool("full_data", full_data)
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
    if mcmc.last_state.local_state is not None:
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


def bias_corrected_samples(
    mcmc: MCMC, report: BiasReport | None = None, *, group_by_chain: bool = False
) -> dict[str, Any]:
    """The run's draws about their own mean, with the posterior's measured spread in place of the
    chain's.

    In unconstrained space; a linear map of all coordinates up to 64 of them, one scale each
    beyond. Means stay as they are. The map is right for posteriors that are about Gaussian in
    unconstrained space and chains that are too wide or too narrow by moderate factors; it is no
    substitute for a smaller step size. Deterministic sites are computed anew.

    :param mcmc: a run of one of this package's kernels.
    :param report: of :func:`~numpyro_sgmcmc.bias_report`; default: made here.
    :param group_by_chain: whether to keep the chains apart, as in ``mcmc.get_samples``.
    :return: samples by site, shape ``(chains * draws, ...)`` or ``(chains, draws, ...)``.
    :raises ValueError: for a run of another kernel, before a run, or where the error bars of the
        spread are too wide to correct it.
    """
    kernel = check_finished_run(mcmc, "calibrated_samples")
    check_has_data(kernel, "calibrated_samples")
    if report is None:
        report = bias_report(mcmc)
    if not isinstance(report, BiasReport):
        raise InvalidArgumentError(
            f"`report` is a {type(report).__name__}, but must be a bias report."
        )
    if report.is_for_functions:
        raise InvalidArgumentError("`report` is on functions of the draws: pass bias_report(mcmc).")
    if report.names != get_coordinate_names(mcmc):
        raise InvalidArgumentError(
            "`report` is that of another run: its coordinates are not this run's."
        )
    found = _compute_correction_matrix(
        report.stein_estimates.chain_covariance, report.stein_estimates.posterior_covariance
    )
    if not np.isfinite(found).all():
        raise InvalidArgumentError(
            "The posterior's spread is measured too roughly to correct the draws: take more draws, "
            "or pass bias_report(mcmc, full_data=True)."
        )
    if compute_center_offsets(get_chain_preconditioners(mcmc.last_state)).any():
        raise InvalidArgumentError(
            "Chains run in different modes, and the draws of each would have to be corrected by "
            "themselves: run without `init_in_modes`."
        )
    positions = get_unconstrained_draws(mcmc, kernel)
    coordinates = kernel.get_preconditioner(mcmc.last_state)
    centre = positions.mean((0, 1))
    scale = jnp.asarray(found, positions.dtype)

    def rescaled(position: jax.Array) -> jax.Array:
        q = coordinates.solve(position - centre)
        q = scale @ q if scale.ndim == 2 else scale * q
        return centre + coordinates.apply(q)

    constrain = kernel.postprocess_fn(mcmc._args, mcmc._kwargs)
    unravel = kernel.potential.unravel
    samples = jax.vmap(jax.vmap(lambda x: constrain(unravel(rescaled(x)))))(positions)
    if group_by_chain:
        return samples
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)


def _compute_correction_matrix(
    chain_covariance: np.ndarray, posterior_covariance: np.ndarray
) -> np.ndarray:
    """A with ``A chain A^T`` the posterior's covariance, symmetric where they commute."""
    if chain_covariance.ndim == 1:
        with np.errstate(invalid="ignore"):
            return np.sqrt(posterior_covariance / chain_covariance)
    if not np.isfinite(posterior_covariance).all():
        return posterior_covariance
    matrices = [(m + m.T) / 2.0 for m in (posterior_covariance, chain_covariance)]
    if not all(np.linalg.eigvalsh(m).min() > 0.0 for m in matrices):
        return np.full_like(posterior_covariance, np.nan)
    return compute_geometric_mean_with_inverse(*matrices)


def print_summary(
    mcmc: MCMC,
    prob: float = 0.9,
    exclude_deterministic: bool = True,
    sites: Sequence[str] | None = None,
) -> None:
    """``mcmc.print_summary()`` and one line on bias; the verdict as well where there is something.

    :param mcmc: a run of one of this package's kernels.
    :param prob: probability mass of the intervals, from 0 to 1. Default 0.9.
    :param exclude_deterministic: whether to leave deterministic sites out. Default True.
    :param sites: names of the sites to have in the table, deterministic ones too, or, with ``~``
        before each, of those to leave out: ``["~effect"]``. The lines below are on all. Default
        None: all.
    :raises ValueError: for a run of another kernel, or before a run, and for sites that are not
        there.
    """
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
        print(report.diagnosis)


def _select_site_draws(
    mcmc: MCMC, sites: Sequence[str], exclude_deterministic: bool
) -> dict[str, Any]:
    """Draws of the sites asked for, by chain."""
    draws = mcmc.get_samples(group_by_chain=True)
    named = [sites] if isinstance(sites, str) else sites
    if not (isinstance(named, (list, tuple)) and all(isinstance(name, str) for name in named)):
        raise InvalidArgumentError(f"`sites` is {sites!r}, but must be a list of sites' names.")
    there = list(draws) if isinstance(draws, dict) else []
    if unknown := [name for name in named if name.removeprefix("~") not in there]:
        raise InvalidArgumentError(
            f"`sites` has {', '.join(map(repr, unknown))}, but the run has draws of "
            f"{', '.join(map(repr, there)) or 'no sites with names'}."
        )
    if len({name.startswith("~") for name in named}) != 1:
        raise InvalidArgumentError(
            "`sites` must name sites to show, or, with ~ before each, to leave out."
        )
    if not named[0].startswith("~"):
        return {name: draws[name] for name in named}
    latent = attrgetter(mcmc.sampler.sample_field)(mcmc.last_state)
    shown = [name for name in there if name in latent or not exclude_deterministic]
    return {name: draws[name] for name in shown if f"~{name}" not in named}
