"""A page of text on what the warm-up chose and why."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass, replace

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.adaptation import Adaptation
from numpyro_sgmcmc.adaptation.step_size import MAX_NUM_STEPS
from numpyro_sgmcmc.adaptation.warnings import format_sd_inflation
from numpyro_sgmcmc.diagnostics.diagnosis import format_r_hat
from numpyro_sgmcmc.diagnostics.run_data import check_has_data
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError
from numpyro_sgmcmc.model.potential import get_coordinate_names
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

# Characters of a line, and of its heading.
_PAGE_WIDTH, _HEADING_WIDTH = 88, 16
# A chain has shortened its step size if that is below this share of the adapted one.
_REDUCED_STEP_FRACTION = 0.99
# A friction is reported if relaxation takes this many times as long as with the default.
_SLOW_RELAXATION_RATIO = 3.0
_ESTIMATOR_LABELS = {
    "minibatch": "minibatch gradient",
    "control_variate": "control variate",
    "second_order_control_variate": "second-order control variate",
}
_SUBSAMPLING_LABELS = {
    "contiguous": "Contiguous blocks of rows",
    "shuffled": "Shuffled rows (without replacement in an epoch)",
    "palindrome": "Shuffled rows (every second epoch reverses the first)",
    "iid": "Independent random rows",
}
_STEP_SIZE_LIMIT_LABELS = {
    "stability": "stability at the largest curvature",
    "gradient_noise": "gradient noise (bias of SDs)",
    "dynamics": "discretisation error with the kernel's options",
    "observations": "gradients of single observations",
    "mean_bias": "bias of means",
    "other_modes": "the narrowest mode",
}


@dataclass(frozen=True, repr=False)
class WarmupReport:
    """The result of :func:`warmup_report`; prints as a page of text, in a notebook as HTML.

    :param sections: pairs of heading and text, in the order of the warm-up.
    """

    sections: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(
            textwrap.fill(
                text,
                _PAGE_WIDTH,
                initial_indent=heading.ljust(_HEADING_WIDTH),
                subsequent_indent=" " * _HEADING_WIDTH,
                break_on_hyphens=False,
            )
            for heading, text in self.sections
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        items = (f"<dt>{html.escape(h)}</dt><dd>{html.escape(t)}</dd>" for h, t in self.sections)
        return f"<dl>{''.join(items)}</dl>"


def warmup_report(mcmc: MCMC) -> WarmupReport:
    """Report what the warm-up of a run chose, and why.

    Sections: run, initialisation, preconditioner, gradient estimator, subsampling, step size, steps
    per draw, predicted bias, warnings, chains. The report reads no data. Step sizes and variances
    are in preconditioned coordinates. In these coordinates, posterior SDs are about one, and for a
    normal posterior so is the variance of the gradient.

    :param mcmc: a run of one of this package's kernels, or an ``MCMC`` object after its warm-up.
    :return: a page of text, which prints itself.
    :raises ValueError: for a run of another kernel, before the warm-up, and for a pickled run.
    """
    kernel, adaptation = check_warmed_up_run(mcmc, "warmup_report")
    sections = [
        ("Run", _describe_run(kernel)),
        ("Initialisation", _describe_initialisation(adaptation)),
        ("Preconditioner", _describe_preconditioner(kernel, adaptation)),
        ("Gradient", _describe_gradient_estimator(kernel, adaptation)),
        ("Subsampling", _describe_subsampling(kernel, adaptation)),
        ("Step size", _describe_step_size(adaptation)),
        ("Steps", _describe_num_steps(kernel, adaptation)),
        ("Predicted bias", _describe_predicted_bias(adaptation)),
        ("Warnings", " ".join(w.message for w in adaptation.model_warnings)),
        ("Chains", _describe_chains(mcmc, adaptation)),
    ]
    return WarmupReport(tuple((heading, text) for heading, text in sections if text))


def check_warmed_up_run(mcmc: MCMC, caller: str) -> tuple[SGMCMCKernel, Adaptation]:
    """Return the kernel and the adaptation of a run after its warm-up; else ``ValueError``."""
    kernel = mcmc.sampler if isinstance(mcmc, MCMC) else None
    if not isinstance(kernel, SGMCMCKernel):
        received = type(mcmc).__name__ if kernel is None else f"a run of {type(kernel).__name__}"
        raise InvalidArgumentError(
            f"`{caller}` got {received}, which has no warm-up of numpyro_sgmcmc.",
            "pass the MCMC object of a run of one of numpyro_sgmcmc's kernels.",
            "not-a-run",
        )
    if mcmc.last_state is None:
        raise InvalidArgumentError(
            f"`{caller}` got an MCMC object before its warm-up.",
            "call `mcmc.run` or `mcmc.warmup` first.",
            "no-draws",
        )
    check_has_data(kernel, caller)
    if kernel.potential.dim == 0:
        raise InvalidModelError(
            f"`{caller}` got a run of a model without latent sites, which has no warm-up.",
            "check the model: all of its sites are observed or conditioned on.",
            "no-latent-sites",
        )
    return kernel, kernel.adaptation


def get_coordinate_variances(preconditioner: Preconditioner) -> np.ndarray:
    """Return the estimated posterior variances of the unconstrained coordinates, shape ``(d,)``."""
    matrix = np.asarray(preconditioner.inverse_mass_matrix, np.float64)
    return np.diagonal(matrix) if preconditioner.is_dense else matrix


def _describe_run(kernel: SGMCMCKernel) -> str:
    potential, dim = kernel.potential, kernel.potential.dim
    minibatches = " and ".join(
        f"minibatches of {p.subsample_size:,} of the {p.size:,} rows of '{p.name}'"
        for p in potential.plates
    )
    order = kernel.dynamics.integrators[kernel.integrator].order
    return (
        f"{type(kernel).__name__}, integrator '{kernel.integrator}' of weak order {order}; {dim:,} "
        f"parameter{'s' * (dim != 1)}; {minibatches or 'all rows at every step'}."
    )


def _describe_initialisation(adaptation: Adaptation) -> str:
    trace = adaptation.trace
    if trace is None:
        uses_strategy = adaptation.uses_init_strategy
        source = "the initialisation strategy" if uses_strategy else "`init_params`"
        return f"Positions of {source}; every setting was given, so no pilot chains were run."
    if not trace.num_pilot_windows:
        return "Last positions of pilot chains, near the bulk of the posterior."
    r_hat = f"R-hat {format_r_hat(trace.r_hat)} in window {trace.num_pilot_windows}, the last"
    if not adaptation.has_dominant_mode:
        return (
            f"Pilot chains found no dominant mode ({r_hat}); coordinates are scaled by the prior."
        )
    num_modes = 1 + len(adaptation.other_mode_preconditioners)
    modes = f" {num_modes} modes, in which chains start in turn." * (num_modes > 1)
    place = "in the bulk of the posterior" if trace.is_converged else "which had not converged"
    return f"Last positions of pilot chains, {place} ({r_hat}).{modes}"


def _describe_preconditioner(kernel: SGMCMCKernel, adaptation: Adaptation) -> str:
    preconditioner, options = adaptation.preconditioner, kernel.options
    names = [name for _, name in get_coordinate_names(kernel.potential)]
    standard_deviations = np.sqrt(get_coordinate_variances(preconditioner))
    is_given = options.inverse_mass_matrix is not None or not options.adapt_mass_matrix
    source = "as given" if is_given else "from draws and gradients of pilot chains"
    if not adaptation.has_dominant_mode:
        source = "from draws of the prior"
    if adaptation.local_init is not None and not is_given:
        source = "from the curvature given the local latent variables"
    form, directions = "Diagonal", ""
    if preconditioner.is_dense:
        scaled_factor = np.asarray(preconditioner.factor, np.float64) / standard_deviations[:, None]
        direction_sds = np.linalg.svd(scaled_factor, compute_uv=False)
        ratio = direction_sds.max() / direction_sds.min()
        form = "Dense"
        directions = f"; SDs of the principal directions of the correlation differ {ratio:.1f}-fold"
    elif preconditioner.is_block_arrow:
        layout = preconditioner.factor.layout
        groups = " + ".join(f"{part.stop - part.start:,}" for part, _ in layout.groupings)
        form = f"Blocks of {groups} groups and {layout.num_shared} shared parameters"
        form += ", effects partially non-centred" * preconditioner.factor.has_scales
        form += ", effects partially centred" * (preconditioner.centering is not None)
    elif preconditioner.is_hessian_root:
        form, source = "Dense", "from the Hessian of all rows"
    elif preconditioner.low_rank is not None:
        scales = np.asarray(preconditioner.low_rank.scales)
        form = f"Diagonal plus {len(scales)} direction{'s' * (len(scales) != 1)}"
        directions = f", these scaled by {scales.min():.2g} to {scales.max():.2g}"
    low, high = int(np.argmin(standard_deviations)), int(np.argmax(standard_deviations))
    smallest, largest = standard_deviations[low], standard_deviations[high]
    values = f"SDs of {smallest:.3g}."
    if smallest < largest:
        values = (
            f"SDs from {smallest:.3g} ({names[low]}) to {largest:.3g} ({names[high]}){directions}."
        )
    note = adaptation.trace.hierarchy_note if adaptation.trace else ""
    return f"{form}, {source}: unconstrained {values} {note}".rstrip()


def _describe_gradient_estimator(kernel: SGMCMCKernel, adaptation: Adaptation) -> str:
    text = _ESTIMATOR_LABELS[adaptation.estimator.name].capitalize()
    if kernel.options.gradient_estimator != "auto":
        text += ", as given"
    noise_variances = adaptation.trace.noise_variances if adaptation.trace else {}
    if not noise_variances:
        return f"{text}."
    if len(noise_variances) > 1:
        text += ", of the highest estimated efficiency per unit of computation"
    # Two significant digits, with an exponent only for small values.
    variances = "; ".join(
        f"{_ESTIMATOR_LABELS[name]} {float(f'{random:.2g}'):g} and {float(f'{contiguous:.2g}'):g}"
        for name, (random, contiguous) in noise_variances.items()
    )
    return f"{text}. Mean noise variance for random and for contiguous minibatches: {variances}."


def _describe_subsampling(kernel: SGMCMCKernel, adaptation: Adaptation) -> str:
    if not kernel.potential.plates:
        return ""
    text = _SUBSAMPLING_LABELS[adaptation.subsampling.name]
    noise_variances = adaptation.trace.noise_variances if adaptation.trace else {}
    random, contiguous = noise_variances.get(adaptation.estimator.name, (0.0, 0.0))
    if kernel.options.subsampling != "auto":
        text += ", as given"
    elif random > 0.0:
        text += f"; contiguous minibatches have {contiguous / random:.2f} times the noise variance"
        text += " of random ones"
    included = [f"{len(rows)} of '{plate}'" for plate, rows in adaptation.included_rows if rows]
    if included:
        text += f". Influential observations in every minibatch: {' and '.join(included)}"
    return f"{text}."


def _describe_step_size(adaptation: Adaptation) -> str:
    step_size = f"{adaptation.step_size:.3g}"
    if adaptation.trace is None or "user" in adaptation.trace.step_size_limits.limits:
        return f"{step_size}, as given."
    limits = adaptation.trace.step_size_limits
    if not limits.binding:
        return f"{step_size}, the integrator's default: no limit is smaller."
    reductions = ", ".join(
        f"{step_size:.3g} by {_STEP_SIZE_LIMIT_LABELS[name]}"
        for name, step_size in limits.binding.items()
    )
    default = limits.limits["integrator"]
    return f"{step_size}. The integrator's default of {default:.3g} is reduced to {reductions}."


def _describe_num_steps(kernel: SGMCMCKernel, adaptation: Adaptation) -> str:
    num_steps, time = adaptation.num_steps, adaptation.relaxation_time
    origin = ", as given" if kernel.options.num_steps is not None else ""
    if not origin and adaptation.local_init is not None:
        return (
            f"{num_steps:,} per draw, after which global and local latent variables are about "
            "independent of the previous draw."
        )
    if not origin and num_steps == MAX_NUM_STEPS:
        origin = ", the maximum"
    step_size = f"{adaptation.step_size:.3g}"
    if adaptation.has_dominant_mode:
        text = (
            f"Positions {max(1, round(time / adaptation.step_size)):,} steps apart are about "
            f"independent: in preconditioned coordinates the relaxation time is {time:.2g} and the "
            f"step size {step_size}."
        )
    else:
        text = (
            f"In coordinates scaled by the prior the step size is {step_size} and the relaxation "
            f"time of the prior is {time:.2g}; that of the posterior may be longer."
        )
    dynamics, default_friction = kernel.dynamics, UnderdampedLangevin.friction
    if isinstance(dynamics, UnderdampedLangevin) and dynamics.friction != default_friction:
        default = replace(dynamics, friction=default_friction)
        ratio = time / default.relaxation_time(adaptation.step_size)
        if ratio >= _SLOW_RELAXATION_RATIO:
            text += (
                f" With friction {dynamics.friction:g} relaxation takes {ratio:,.0f} times as long "
                f"as with the default of {default_friction}."
            )
    return f"{num_steps:,} per draw{origin}. {text}"


def _describe_predicted_bias(adaptation: Adaptation) -> str:
    trace = adaptation.trace
    if trace is None or not adaptation.has_dominant_mode:  # no prediction without a Gaussian bulk
        return ""
    sd_inflation = format_sd_inflation(trace.variance_inflation, digits=1)
    text = f"By gradient noise, SDs {sd_inflation} too large at worst"
    if trace.mean_bias > 0.0:
        text += f", means at most {trace.mean_bias:.2g} SD off"
    return f"{text}."


def _describe_chains(mcmc: MCMC, adaptation: Adaptation) -> str:
    step_sizes = np.atleast_1d(np.asarray(mcmc.last_state.adapt_state.step_size, float))
    num_reduced = int((step_sizes < _REDUCED_STEP_FRACTION * adaptation.step_size).sum())
    sentences = []
    if adaptation.allowed_variance_inflation is not None and num_reduced:
        sentences.append(
            f"{num_reduced} of {len(step_sizes)} had another kinetic temperature than predicted, "
            f"or diverged, and reduced their step size, to {step_sizes.min():.3g} at least."
        )
    extra_fields = mcmc.get_extra_fields()
    if "diverging" in extra_fields:
        diverging = np.asarray(jax.device_get(extra_fields["diverging"]))
        sentences.append(f"{int(diverging.sum())} of {diverging.size:,} iterations diverged.")
    return " ".join(sentences)
