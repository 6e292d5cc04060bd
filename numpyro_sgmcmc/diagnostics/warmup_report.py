"""What the warm-up chose and why, on one page."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass, replace

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.adaptation import Adaptation
from numpyro_sgmcmc.adaptation.settings import MAX_CONVERGED_R_HAT, AdaptationTrace
from numpyro_sgmcmc.adaptation.step_size import MAX_NUM_STEPS
from numpyro_sgmcmc.diagnostics.diagnosis import format_r_hat
from numpyro_sgmcmc.diagnostics.run_data import check_has_data, get_coordinate_names
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

__all__ = ["WarmupReport", "check_warmed_up_run", "warmup_report"]

_PAGE_WIDTH_CHARS, _HEADING_WIDTH_CHARS = 88, 14
_REDUCED_STEP_FRACTION = 0.99  # of the step size before: less is no reason
_SLOW_RELAXATION_RATIO = 3.0  # times as long as by default: worth a word
_ESTIMATOR_LABELS = {
    "minibatch": "minibatch gradient",
    "control_variate": "control variates",
    "second_order_control_variate": "second-order control variates",
}
_SUBSAMPLING_LABELS = {
    "contiguous": "Blocks of consecutive rows, which memory reads fastest",
    "shuffled": "Random rows, each once an epoch",
    "iid": "Random rows, each minibatch independent of the others",
}
_STEP_SIZE_LIMIT_CLAUSES = {
    "stability": "the largest curvature leaves",
    "gradient_noise": "the gradient's noise leaves",
    "dynamics": "the kernel's settings, tried out on a Gaussian, leave",
    "mean_bias": "means, which would move, leave",
    "other_modes": "the narrowest mode leaves",
}


@dataclass(frozen=True, repr=False)
class WarmupReport:
    """What :func:`explain` found; prints as a page of text, in a notebook as HTML.

    :param sections: a heading and a few sentences each, in the order of the warm-up.
    """

    sections: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(
            textwrap.fill(
                text,
                _PAGE_WIDTH_CHARS,
                initial_indent=heading.ljust(_HEADING_WIDTH_CHARS),
                subsequent_indent=" " * _HEADING_WIDTH_CHARS,
                break_on_hyphens=False,
            )
            for heading, text in self.sections
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = (f"<dt>{html.escape(h)}</dt><dd>{html.escape(t)}</dd>" for h, t in self.sections)
        return f"<dl>{''.join(rows)}</dl>"


def warmup_report(mcmc: MCMC) -> WarmupReport:
    """What the warm-up chose for a run, and why: start, whitening, gradient, minibatches, steps.

    Numbers are the warm-up's own: nothing is computed anew, and no data are read. Step sizes and
    variances are in whitened units, in which a posterior sd is about one; the gradient at a draw of
    a normal posterior has variance one there, so that noise is large or small beside one.

    :param mcmc: a run of one of this package's kernels, or one whose warm-up is done.
    :return: a page of text, which prints itself.
    :raises ValueError: for a run of another kernel, before a run, and for one that was pickled.
    """
    kernel, adaptation = check_warmed_up_run(mcmc, "explain")
    weighed = adaptation.trace
    parts = [
        ("Run", _describe_run(mcmc, kernel)),
        ("Start", _describe_initialisation(adaptation, weighed)),
        ("Whitening", _describe_preconditioner(mcmc, kernel, adaptation)),
        ("Gradient", _describe_gradient_estimator(kernel, adaptation, weighed)),
        ("Minibatches", _describe_subsampling(kernel, adaptation, weighed)),
        ("Step size", _describe_step_size(adaptation, weighed)),
        ("Steps", _describe_num_steps(kernel, adaptation)),
        ("Predicted", _describe_predicted_bias(adaptation, weighed)),
        ("Warnings", " ".join(f.message for f in adaptation.model_warnings)),
        ("Chains", _describe_chains(mcmc, adaptation)),
    ]
    return WarmupReport(tuple((heading, text) for heading, text in parts if text))


def check_warmed_up_run(mcmc: MCMC, caller: str) -> tuple[SGMCMCKernel, Adaptation]:
    """The kernel of a run whose warm-up is done, and what it found.

    :param caller: name of the function that needs it, for the message.
    :raises ValueError: where there is none.
    """
    kernel = mcmc.sampler if isinstance(mcmc, MCMC) else None
    if not isinstance(kernel, SGMCMCKernel):
        found = type(mcmc if kernel is None else kernel).__name__
        raise InvalidArgumentError(
            f"`{caller}` needs the MCMC object of a run of numpyro_sgmcmc's kernels, but got "
            f"{'' if kernel is None else 'a run of '}{found}."
        )
    if mcmc.last_state is None:
        raise InvalidArgumentError(f"There is no warm-up yet: call `mcmc.run` before `{caller}`.")
    check_has_data(kernel, caller)
    if kernel.potential.dim == 0:
        raise InvalidArgumentError(
            f"The model has no latent site: there is nothing for `{caller}` to tell."
        )
    return kernel, kernel.adaptation


def _describe_run(mcmc: MCMC, kernel: SGMCMCKernel) -> str:
    target, dim = kernel.potential, kernel.potential.dim
    rows = " and ".join(
        f"minibatches of {p.subsample_size:,} of the {p.size:,} rows of '{p.name}'"
        for p in target.plates
    )
    order = kernel.dynamics.integrators[kernel.integrator].order
    return (
        f"{type(kernel).__name__}, scheme '{kernel.integrator}' of weak order {order}; {dim:,} "
        f"parameter{'s' * (dim != 1)}; {rows or 'all rows at every step'}."
    )


def _describe_initialisation(
    adaptation: Adaptation, adaptation_trace: AdaptationTrace | None
) -> str:
    if adaptation_trace is None:
        where = (
            "the initialisation strategy says"
            if adaptation.uses_init_strategy
            else "`init_params` says"
        )
        return f"Where {where}: all that a warm-up looks for was given."
    if not adaptation_trace.num_pilot_windows:
        return "Where pilot chains came to, about the place where most of the mass is."
    agree = f"R-hat {format_r_hat(adaptation_trace.r_hat)} in the last of {adaptation_trace.num_pilot_windows} windows"
    if not adaptation.has_dominant_mode:
        return f"Pilot chains found no single region ({agree}): in units of the prior's sds."
    modes = len(adaptation.other_mode_preconditioners)
    others = f" {modes + 1} modes, in which chains start in turn." * bool(modes)
    if adaptation_trace.r_hat > MAX_CONVERGED_R_HAT:
        return f"Where pilot chains came to, which did not quite agree ({agree}).{others}"
    return f"In the posterior's midst, where pilot chains came to ({agree}).{others}"


def _describe_preconditioner(mcmc: MCMC, kernel: SGMCMCKernel, adaptation: Adaptation) -> str:
    whitening = adaptation.preconditioner
    names = [name for _, name in get_coordinate_names(mcmc)]
    sds = np.sqrt(np.asarray(_get_coordinate_variances(whitening)))
    low, high = int(np.argmin(sds)), int(np.argmax(sds))
    options = kernel.options
    is_given = options.inverse_mass_matrix is not None or not options.adapt_mass_matrix
    whence = "as given" if is_given else "from draws and gradients of pilot chains"
    if not adaptation.has_dominant_mode:
        whence = "from draws of the prior"
    if adaptation.local_init is not None and not is_given:
        whence = "from the curvature, given the values of rows"
    if whitening.is_dense:
        factor = np.asarray(whitening.factor, np.float64) / sds[:, None]
        spread = np.linalg.svd(factor, compute_uv=False)
        form = "Dense"
        more = f"; in units of these its widest direction is {spread.max() / spread.min():.1f} "
        more += "times as wide as its narrowest"
    else:
        form, more = "Diagonal", ""
        if whitening.low_rank is not None:
            factors = np.asarray(whitening.low_rank.scales)
            num = len(factors)
            form = f"Diagonal, and {num} direction{'s' * (num != 1)} besides"
            more = f", these stretched by {factors.min():.2g} to {factors.max():.2g}"
    if sds[low] == sds[high]:
        return f"{form}, {whence}: unconstrained sds of {sds[0]:.3g}."
    return (
        f"{form}, {whence}: unconstrained sds from {sds[low]:.3g} ({names[low]}) to "
        f"{sds[high]:.3g} ({names[high]}){more}."
    )


def _get_coordinate_variances(preconditioner: Preconditioner) -> np.ndarray:
    matrix = np.asarray(preconditioner.inverse_mass_matrix, np.float64)
    return np.diagonal(matrix) if preconditioner.is_dense else matrix


def _describe_gradient_estimator(
    kernel: SGMCMCKernel, adaptation: Adaptation, adaptation_trace: AdaptationTrace | None
) -> str:
    name = _ESTIMATOR_LABELS[adaptation.estimator.name]
    told = f"{name[0].upper()}{name[1:]}"
    if kernel.options.gradient_estimator != "auto":
        told += ", as given"
    if adaptation_trace is None or not adaptation_trace.noise_variances:
        return f"{told}."
    if len(adaptation_trace.noise_variances) > 1:
        told += ", which go furthest at the same cost"
    each = [
        f"{_ESTIMATOR_LABELS[name]} {_format_two_digits(of_random)} and {_format_two_digits(of_blocks)}"
        for name, (of_random, of_blocks) in adaptation_trace.noise_variances.items()
    ]
    return f"{told}. Mean variance of the noise, of random rows and of blocks: {'; '.join(each)}."


def _format_two_digits(value: float) -> str:
    """Two significant digits, and an exponent only for what is small."""
    return f"{float(f'{value:.2g}'):g}"


def _describe_subsampling(
    kernel: SGMCMCKernel, adaptation: Adaptation, adaptation_trace: AdaptationTrace | None
) -> str:
    if not kernel.potential.plates:
        return ""
    told = _SUBSAMPLING_LABELS[adaptation.subsampling.name]
    if kernel.options.subsampling != "auto":
        told += ", as given"
    elif adaptation_trace is not None and (
        noise := adaptation_trace.noise_variances.get(adaptation.estimator.name)
    ):
        of_random, of_blocks = noise
        if of_random > 0.0:
            told += f"; noise of blocks is {of_blocks / of_random:.2f} times that of random rows"
    held = [f"{len(rows)} of '{plate}'" for plate, rows in adaptation.included_rows if rows]
    and_rows = f" Rows that decide are in every one: {' and '.join(held)}." * bool(held)
    return f"{told}.{and_rows}"


def _describe_step_size(adaptation: Adaptation, adaptation_trace: AdaptationTrace | None) -> str:
    chosen = f"{adaptation.step_size:.3g}"
    if adaptation_trace is None or adaptation_trace.step_size_limits.is_user_step_size:
        return f"{chosen}, as given."
    limits = adaptation_trace.step_size_limits
    why = [f"{_STEP_SIZE_LIMIT_CLAUSES[x.name]} {x.step_size:.3g}" for x in limits.binding]
    if not why:
        return f"{chosen}, the longest that suits the scheme: nothing asks for less."
    return f"{chosen}. {limits['integrator']:.3g} suits the scheme; of that {', '.join(why)}."


def _describe_num_steps(kernel: SGMCMCKernel, adaptation: Adaptation) -> str:
    num = adaptation.num_steps
    given = ", as given" * (kernel.options.num_steps is not None)
    if not given and adaptation.local_init is not None:
        return (
            f"{num:,} a draw: until parameters and values of rows have about forgotten each other."
        )
    if not given and num == MAX_NUM_STEPS:
        given = ", the most that are taken"
    time = adaptation.relaxation_time
    if not adaptation.has_dominant_mode:
        return (
            f"{num:,} a draw{given}. In units of the prior's sds a step is "
            f"{adaptation.step_size:.3g}, and under the prior alone the SDE forgets its past in a "
            f"time of {time:.2g}: with data it may take longer.{_describe_friction(kernel, time)}"
        )
    return (
        f"{num:,} a draw{given}. Positions {max(1, round(time / adaptation.step_size)):,} steps "
        f"apart are about independent: in whitened units, where posterior sds are about one, the "
        f"SDE forgets its past in a time of {time:.2g}, and a step is {adaptation.step_size:.3g}."
        f"{_describe_friction(kernel, time)}"
    )


def _describe_friction(kernel: SGMCMCKernel, relaxation_time: float) -> str:
    """What an unusual friction does to the time in which a draw is forgotten."""
    dynamics = kernel.dynamics
    if (
        not isinstance(dynamics, UnderdampedLangevin)
        or dynamics.friction == UnderdampedLangevin.friction
    ):
        return ""
    usual = replace(dynamics, friction=UnderdampedLangevin.friction)
    times = relaxation_time / usual.relaxation_time(kernel.adaptation.step_size)
    if times < _SLOW_RELAXATION_RATIO:
        return ""
    return (
        f" That is {times:,.0f} times as long as with the default friction of {usual.friction}: "
        f"yours is {dynamics.friction:g}."
    )


def _describe_predicted_bias(
    adaptation: Adaptation, adaptation_trace: AdaptationTrace | None
) -> str:
    if (
        adaptation_trace is None or not adaptation.has_dominant_mode
    ):  # else what noise does is not foretold
        return ""
    sds = 100.0 * (np.sqrt(1.0 + max(adaptation_trace.variance_inflation, 0.0)) - 1.0)
    means = (
        f", means {adaptation_trace.mean_bias:.2g} sds off at most"
        if adaptation_trace.mean_bias > 0.0
        else ""
    )
    return f"By the gradient's noise sds {sds:.1f} % too wide at most{means}."


def _describe_chains(mcmc: MCMC, adaptation: Adaptation) -> str:
    state = mcmc.last_state
    steps = np.atleast_1d(np.asarray(state.adapt_state.step_size, float))
    shorter = int((steps < _REDUCED_STEP_FRACTION * adaptation.step_size).sum())
    told = []
    if adaptation.allowed_variance_inflation is not None and shorter:
        told.append(
            f"{shorter} of {len(steps)} ran hotter or colder than predicted, or diverged, and "
            f"shortened their step, to {steps.min():.3g} at least."
        )
    extra = mcmc.get_extra_fields()
    if "diverging" in extra:
        diverging = np.asarray(jax.device_get(extra["diverging"]))
        told.append(f"{int(diverging.sum())} of {diverging.size:,} iterations diverged.")
    return " ".join(told)
