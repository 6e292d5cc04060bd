"""What the warm-up chose and why, on one page."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass, replace

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.diagnostics.dependence import shown_r_hat
from numpyro_sgmcmc.diagnostics.runs import coordinate_names, needs_data
from numpyro_sgmcmc.dynamics import Underdamped
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.warmup import Adaptation
from numpyro_sgmcmc.warmup.step_size import MAX_NUM_STEPS
from numpyro_sgmcmc.warmup.weighed import AGREE, Weighed

__all__ = ["Explanation", "explain", "warm_run"]

_WIDTH, _INDENT = 88, 14
_SHORTER = 0.99  # of the step size before: less is no reason
_SLOW = 3.0  # times as long as by default: worth a word
_ESTIMATORS = {
    "plain": "plain",
    "control_variate": "control variates",
    "second_order_control_variate": "second-order control variates",
}
_MINIBATCHES = {
    "blocks": "Blocks of consecutive rows, which memory reads fastest",
    "epoch": "Random rows, each once an epoch",
    "iid": "Random rows, each minibatch independent of the others",
}
_LIMITS = {
    "curvature": "the largest curvature leaves",
    "noise": "the gradient's noise leaves",
    "settings": "the kernel's settings, tried out on a Gaussian, leave",
    "means": "means, which would move, leave",
}


@dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`explain` found; prints as a page of text, in a notebook as HTML.

    :param parts: a heading and a few sentences each, in the order of the warm-up.
    """

    parts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(
            textwrap.fill(
                text,
                _WIDTH,
                initial_indent=heading.ljust(_INDENT),
                subsequent_indent=" " * _INDENT,
                break_on_hyphens=False,
            )
            for heading, text in self.parts
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = (f"<dt>{html.escape(h)}</dt><dd>{html.escape(t)}</dd>" for h, t in self.parts)
        return f"<dl>{''.join(rows)}</dl>"


def explain(mcmc: MCMC) -> Explanation:
    """What the warm-up chose for a run, and why: start, whitening, gradient, minibatches, steps.

    Numbers are the warm-up's own: nothing is computed anew, and no data are read. Step sizes and
    variances are in whitened units, in which a posterior sd is about one; the gradient at a draw of
    a normal posterior has variance one there, so that noise is large or small beside one.

    :param mcmc: a run of one of this package's kernels, or one whose warm-up is done.
    :return: a page of text, which prints itself.
    :raises ValueError: for a run of another kernel, before a run, and for one that was pickled.
    """
    kernel, adaptation = warm_run(mcmc, "explain")
    weighed = adaptation.weighed
    parts = [
        ("Run", _run(mcmc, kernel)),
        ("Start", _start(adaptation, weighed)),
        ("Whitening", _whitening(mcmc, kernel, adaptation)),
        ("Gradient", _gradient(kernel, adaptation, weighed)),
        ("Minibatches", _minibatches(kernel, adaptation, weighed)),
        ("Step size", _step_size(adaptation, weighed)),
        ("Steps", _steps(kernel, adaptation)),
        ("Predicted", _predicted(adaptation, weighed)),
        ("Warnings", " ".join(f.sentence for f in adaptation.findings)),
        ("Chains", _chains(mcmc, adaptation)),
    ]
    return Explanation(tuple((heading, text) for heading, text in parts if text))


def warm_run(mcmc: MCMC, wanted_by: str) -> tuple[SGMCMCKernel, Adaptation]:
    """The kernel of a run whose warm-up is done, and what it found.

    :param wanted_by: name of the function that needs it, for the message.
    :raises ValueError: where there is none.
    """
    kernel = mcmc.sampler if isinstance(mcmc, MCMC) else None
    if not isinstance(kernel, SGMCMCKernel):
        found = type(mcmc if kernel is None else kernel).__name__
        raise Refusal(
            f"`{wanted_by}` needs the MCMC object of a run of numpyro_sgmcmc's kernels, but got "
            f"{'' if kernel is None else 'a run of '}{found}."
        )
    if mcmc.last_state is None:
        raise Refusal(f"There is no warm-up yet: call `mcmc.run` before `{wanted_by}`.")
    needs_data(kernel, wanted_by)
    if kernel.target.dim == 0:
        raise Refusal(f"The model has no latent site: there is nothing for `{wanted_by}` to tell.")
    return kernel, kernel.adaptation


def _run(mcmc: MCMC, kernel: SGMCMCKernel) -> str:
    target, dim = kernel.target, kernel.target.dim
    rows = " and ".join(
        f"minibatches of {p.subsample_size:,} of the {p.size:,} rows of '{p.name}'"
        for p in target.plates
    )
    order = kernel.dynamics.schemes[kernel.scheme].order
    return (
        f"{type(kernel).__name__}, scheme '{kernel.scheme}' of weak order {order}; {dim:,} "
        f"parameter{'s' * (dim != 1)}; {rows or 'all rows at every step'}."
    )


def _start(adaptation: Adaptation, weighed: Weighed | None) -> str:
    if weighed is None:
        where = "the initialisation strategy says" if adaptation.is_given else "`init_params` says"
        return f"Where {where}: all that a warm-up looks for was given."
    if not weighed.windows:
        return "Where pilot chains came to, about the place where most of the mass is."
    agree = f"R-hat {shown_r_hat(weighed.r_hat)} in the last of {weighed.windows} windows"
    if not adaptation.has_region:
        return f"Pilot chains found no single region ({agree}): in units of the prior's sds."
    modes = len(adaptation.other_modes)
    others = f" {modes + 1} modes, in which chains start in turn." * bool(modes)
    if weighed.r_hat > AGREE:
        return f"Where pilot chains came to, which did not quite agree ({agree}).{others}"
    return f"In the posterior's midst, where pilot chains came to ({agree}).{others}"


def _whitening(mcmc: MCMC, kernel: SGMCMCKernel, adaptation: Adaptation) -> str:
    whitening = adaptation.whitening
    names = [name for _, name in coordinate_names(mcmc)]
    sds = np.sqrt(np.asarray(_sd_squares(whitening)))
    low, high = int(np.argmin(sds)), int(np.argmax(sds))
    options = kernel.options
    is_given = options.inverse_mass_matrix is not None or not options.adapt_mass_matrix
    whence = "as given" if is_given else "from draws and gradients of pilot chains"
    if not adaptation.has_region:
        whence = "from draws of the prior"
    if adaptation.locals is not None and not is_given:
        whence = "from the curvature, given the values of rows"
    if whitening.is_dense:
        factor = np.asarray(whitening.factor, np.float64) / sds[:, None]
        spread = np.linalg.svd(factor, compute_uv=False)
        form = "Dense"
        more = f"; in units of these its widest direction is {spread.max() / spread.min():.1f} "
        more += "times as wide as its narrowest"
    else:
        form, more = "Diagonal", ""
        if whitening.stretch is not None:
            factors = np.asarray(whitening.stretch.factors)
            num = len(factors)
            form = f"Diagonal, and {num} direction{'s' * (num != 1)} besides"
            more = f", these stretched by {factors.min():.2g} to {factors.max():.2g}"
    if sds[low] == sds[high]:
        return f"{form}, {whence}: unconstrained sds of {sds[0]:.3g}."
    return (
        f"{form}, {whence}: unconstrained sds from {sds[low]:.3g} ({names[low]}) to "
        f"{sds[high]:.3g} ({names[high]}){more}."
    )


def _sd_squares(whitening: Whitening) -> np.ndarray:
    matrix = np.asarray(whitening.inverse_mass_matrix, np.float64)
    return np.diagonal(matrix) if whitening.is_dense else matrix


def _gradient(kernel: SGMCMCKernel, adaptation: Adaptation, weighed: Weighed | None) -> str:
    name = _ESTIMATORS[adaptation.estimator.name]
    told = f"{name[0].upper()}{name[1:]}"
    if kernel.options.gradient != "auto":
        told += ", as given"
    if weighed is None or not weighed.noise:
        return f"{told}."
    if len(weighed.noise) > 1:
        told += ", which go furthest at the same cost"
    each = [
        f"{_ESTIMATORS[name]} {_short(of_random)} and {_short(of_blocks)}"
        for name, (of_random, of_blocks) in weighed.noise.items()
    ]
    return f"{told}. Mean variance of the noise, of random rows and of blocks: {'; '.join(each)}."


def _short(x: float) -> str:
    """Two significant digits, and an exponent only for what is small."""
    return f"{float(f'{x:.2g}'):g}"


def _minibatches(kernel: SGMCMCKernel, adaptation: Adaptation, weighed: Weighed | None) -> str:
    if not kernel.target.plates:
        return ""
    told = _MINIBATCHES[adaptation.minibatch.name]
    if kernel.options.minibatch != "auto":
        told += ", as given"
    elif weighed is not None and (noise := weighed.noise.get(adaptation.estimator.name)):
        of_random, of_blocks = noise
        if of_random > 0.0:
            told += f"; noise of blocks is {of_blocks / of_random:.2f} times that of random rows"
    held = [f"{len(rows)} of '{plate}'" for plate, rows in adaptation.decisive if rows]
    and_rows = f" Rows that decide are in every one: {' and '.join(held)}." * bool(held)
    return f"{told}.{and_rows}"


def _step_size(adaptation: Adaptation, weighed: Weighed | None) -> str:
    chosen = f"{adaptation.step_size:.3g}"
    if weighed is None or "given" in weighed.step_sizes:
        return f"{chosen}, as given."
    longest = last = weighed.step_sizes["scheme"]
    why = []
    for limit, words in _LIMITS.items():
        if (step_size := weighed.step_sizes[limit]) < _SHORTER * last:
            why.append(f"{words} {step_size:.3g}")
            last = step_size
    if not why:
        return f"{chosen}, the longest that suits the scheme: nothing asks for less."
    return f"{chosen}. {longest:.3g} suits the scheme; of that {', '.join(why)}."


def _steps(kernel: SGMCMCKernel, adaptation: Adaptation) -> str:
    num = adaptation.num_steps
    given = ", as given" * (kernel.options.num_steps is not None)
    if not given and adaptation.locals is not None:
        return (
            f"{num:,} a draw: until parameters and values of rows have about forgotten each other."
        )
    if not given and num == MAX_NUM_STEPS:
        given = ", the most that are taken"
    time = adaptation.relaxation_time
    if not adaptation.has_region:
        return (
            f"{num:,} a draw{given}. In units of the prior's sds a step is "
            f"{adaptation.step_size:.3g}, and under the prior alone the SDE forgets its past in a "
            f"time of {time:.2g}: with data it may take longer.{_of_friction(kernel, time)}"
        )
    return (
        f"{num:,} a draw{given}. Positions {max(1, round(time / adaptation.step_size)):,} steps "
        f"apart are about independent: in whitened units, where posterior sds are about one, the "
        f"SDE forgets its past in a time of {time:.2g}, and a step is {adaptation.step_size:.3g}."
        f"{_of_friction(kernel, time)}"
    )


def _of_friction(kernel: SGMCMCKernel, time: float) -> str:
    """What an unusual friction does to the time in which a draw is forgotten."""
    dynamics = kernel.dynamics
    if not isinstance(dynamics, Underdamped) or dynamics.friction == Underdamped.friction:
        return ""
    usual = replace(dynamics, friction=Underdamped.friction)
    times = time / usual.relaxation_time(kernel.adaptation.step_size)
    if times < _SLOW:
        return ""
    return (
        f" That is {times:,.0f} times as long as with the default friction of {usual.friction}: "
        f"yours is {dynamics.friction:g}."
    )


def _predicted(adaptation: Adaptation, weighed: Weighed | None) -> str:
    if weighed is None or not adaptation.has_region:  # else what noise does is not foretold
        return ""
    sds = 100.0 * (np.sqrt(1.0 + max(weighed.excess, 0.0)) - 1.0)
    means = f", means {weighed.shift:.2g} sds off at most" if weighed.shift > 0.0 else ""
    return f"By the gradient's noise sds {sds:.1f} % too wide at most{means}."


def _chains(mcmc: MCMC, adaptation: Adaptation) -> str:
    state = mcmc.last_state
    steps = np.atleast_1d(np.asarray(state.adapt_state.step_size, float))
    shorter = int((steps < _SHORTER * adaptation.step_size).sum())
    told = []
    if adaptation.allowed_excess is not None and shorter:
        told.append(
            f"{shorter} of {len(steps)} ran hotter or colder than predicted, or diverged, and "
            f"shortened their step, to {steps.min():.3g} at least."
        )
    extra = mcmc.get_extra_fields()
    if "diverging" in extra:
        diverging = np.asarray(jax.device_get(extra["diverging"]))
        told.append(f"{int(diverging.sum())} of {diverging.size:,} iterations diverged.")
    return " ".join(told)
