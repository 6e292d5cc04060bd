r"""The keywords that all kernels share: declaration, checks, and what is built from them.

:class:`Options` declares each keyword with its type, default, description and check;
:class:`KernelOptions` repeats the types for type checkers. :func:`add_options_to_signature` shows
them in every kernel's signature. From a kernel's options :func:`build_potential_from_model` builds
the posterior, and :func:`build_warmup_settings` the settings of the warm-up.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation import WarmupSettings
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.data.subsampling import SUBSAMPLINGS
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.errors import (
    InvalidArgumentError,
    InvalidModelError,
    PlateWarning,
    format_message,
    warn_user,
)
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS
from numpyro_sgmcmc.model.local_latents import get_gibbs_fn_keywords, select_collected_sites
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from numpyro_sgmcmc.model.trace import GibbsConfig
from numpyro_sgmcmc.sampling.bias_monitor import FULL_MOMENTS_MAX_DIM
from numpyro_sgmcmc.sampling.mass_matrix import build_mass_matrix_mask, parse_inverse_mass_matrix
from numpyro_sgmcmc.sampling.schedules import first_step_size

# Parameters up to which `dense_mass=None` adapts a dense mass matrix: a bound on the time of the
# adaptation, which needs several draws per parameter.
_MAX_DENSE_MASS_MATRIX_DIM = 100
# Keywords of NUTS and of MCMC, and what to do in place of passing them to a kernel.
_FIX_BY_FOREIGN_KEYWORD = {
    "target_accept_prob": "leave it out, because no proposal is rejected. `target_sd_bias` bounds "
    "the relative bias of SDs (default 0.05).",
    "batch_size": "set the subsample_size of the plate in the model.",
    **dict.fromkeys(("num_warmup", "num_samples", "num_chains"), "pass it to MCMC."),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    r"""Keywords of all kernels.

    :param step_size: step size in preconditioned units (posterior standard deviations), positive.
        Or a schedule ``int -> float`` of the number of steps so far, warm-up included, such as any
        optax schedule. If jit or vmap traces the value, only the chains use it. The warm-up, which
        needs a number, then uses the integrator's default. Default None: chosen in warm-up.
    :param num_steps: stochastic-gradient steps per iteration. Default None: chosen in warm-up so
        that draws are approximately independent, from 1 to 500 (more with ``gibbs_fn``).
    :param inverse_mass_matrix: estimate of the posterior covariance in unconstrained space, which
        is used as given. Shape ``(d,)``, ``(d, d)``, or a dict of blocks by tuples of site names.
        Default None: adapted in warm-up.
    :param dense_mass: whether the adapted mass matrix is dense: a bool, or a list of tuples of site
        names that form blocks. Default None: dense for up to 100 coordinates. For more, it is a
        diagonal plus a matrix of low rank, estimated from draws and gradients.
    :param adapt_step_size: whether to choose the step size in warm-up if ``step_size`` is None. If
        False, the integrator's default is used. Default True.
    :param shrink_step_size_on_divergence: whether a chain halves a number given as ``step_size`` if
        an iteration diverges in warm-up. In the first quarter, only a second one in a row counts.
        Default True.
    :param adapt_mass_matrix: whether to adapt the mass matrix in warm-up if
        ``inverse_mass_matrix`` is None. If False, the identity is used. Default True.
    :param gradient_estimator: ``"minibatch"``, ``"control_variate"``,
        ``"second_order_control_variate"`` (stores a Hessian, so for few coordinates), or ``"auto"``
        (default): the one with the highest estimated efficiency per gradient evaluation, given the
        gradient noise measured in warm-up.
    :param subsampling: ``"contiguous"`` (consecutive rows), ``"shuffled"`` (random rows, each once
        per epoch), ``"palindrome"`` (as shuffled, but every second epoch reverses the order of the
        first), ``"iid"`` (random rows with replacement), or ``"auto"`` (default): contiguous
        minibatches, unless they are clearly noisier than random ones.
    :param noise_compensation: whether to inject less noise where the minibatch gradient adds noise:
        :math:`2\gamma h - h^2\hat V` instead of :math:`2\gamma h` (Ma, Chen and Fox 2015, equation
        (9)). The warm-up estimates :math:`\hat V` from per-observation gradients in the bulk of the
        posterior. Use it for minibatch gradients, whose noise is about the same everywhere. Noise
        of control variates is compensated only on average. Minibatches must be independent, so
        ``subsampling`` is then ``"iid"``. Default False.
    :param max_grad_norm: largest norm of the gradient in a step, in preconditioned units. Longer
        gradients are scaled down to it. At a draw from a Gaussian posterior the norm is about
        :math:`\sqrt d`. Clipping makes the draws overdispersed.
        :func:`~numpyro_sgmcmc.bias_report` estimates by how much, from gradients without clipping.
        Default None: no clipping.
    :param target_sd_bias: largest predicted relative error of posterior standard deviations at the
        step size chosen in warm-up, in (0, 1). Default 0.05.
    :param init_strategy: NumPyro initialisation strategy for the warm-up. Default
        ``init_to_uniform``.
    :param forward_mode_differentiation: whether gradients are computed in forward mode, for models
        with ``lax.while_loop``. Their cost grows with the number of coordinates. Default False.
    :param init_in_modes: whether to distribute the chains over the posterior modes of comparable
        mass that the warm-up detects. Each mode has a separate preconditioner and control variate,
        and R-hat compares modes. Vectorized and parallel chains are assigned in turn, others at
        random. Default False: all chains start in the mode of best fit, with a warning if there are
        others.
    :param gibbs_fn: function that samples sites inside the subsampled plate from their conditional
        distribution, as in :class:`~numpyro.infer.hmc_gibbs.HMCGibbs`, for the rows of a minibatch.
        Its keywords are ``rng_key``, ``gibbs_sites``, ``hmc_sites`` and ``rows``. The second and
        third are dicts of constrained values, of the minibatch for sites inside the plate; ``rows``
        are indices. ``gibbs_fn`` returns a dict of new values of all ``gibbs_sites``. If it has the
        parameters ``model_args`` and ``model_kwargs``, it gets the model's arguments, whose arrays
        on the host can be indexed by ``rows``. Its distribution is not checked. Default None.
    :param gibbs_sites: names of the sites that ``gibbs_fn`` samples, which may be discrete.
    :param keep_locals: whether to store the values of ``gibbs_sites`` from one visit of a row to
        the next. If False, they are sampled at each minibatch from their prior given the global
        sites, updated by ``num_gibbs_sweeps`` calls of ``gibbs_fn``, and dropped after the step.
        Use False if local values of all rows do not fit in memory. The posterior of the global
        sites is then right only if the calls converge, which is not checked. Default True.
    :param num_gibbs_sweeps: calls of ``gibbs_fn`` per minibatch with ``keep_locals=False``. One is
        enough if ``gibbs_fn`` samples all sites jointly. Default 1.
    :param collect_local_sites: whether draws contain the sites that ``gibbs_fn`` samples, for all
        rows: a bool, or names of such sites. Default False, because a draw then takes memory
        proportional to the number of rows. Draws always contain other sites inside the plate.
    :param collect_sites: names of the sites whose draws are kept, deterministic ones included. Of
        all other sites (also of ``collect_local_sites``) running means and SDs are kept
        (:func:`~numpyro_sgmcmc.running_moments`), so that memory does not grow with the run.
        Default None: draws of all sites but ``gibbs_sites`` are kept.
    :param running_quantiles: probabilities, between 0 and 1, of the quantiles that are estimated
        for the sites without draws. Default: none.
    :param running_covariances: names of sites without draws whose joint covariance matrix is
        computed. It takes memory for the square of their number of values. Default: none.
    :raises InvalidArgumentError: for a value out of range.
    """

    step_size: float | Callable[[Any], Any] | None = None
    num_steps: int | None = None
    inverse_mass_matrix: Any = None
    dense_mass: bool | list[tuple[str, ...]] | None = None
    adapt_step_size: bool = True
    shrink_step_size_on_divergence: bool = True
    adapt_mass_matrix: bool = True
    gradient_estimator: str = "auto"
    subsampling: str = "auto"
    noise_compensation: bool = False
    max_grad_norm: float | None = None
    target_sd_bias: float = 0.05
    init_strategy: Callable = init_to_uniform
    forward_mode_differentiation: bool = False
    init_in_modes: bool = False
    gibbs_fn: Callable | None = None
    gibbs_sites: Sequence[str] = ()
    keep_locals: bool = True
    num_gibbs_sweeps: int = 1
    collect_local_sites: bool | Sequence[str] = False
    collect_sites: Sequence[str] | None = None
    running_quantiles: Sequence[float] = ()
    running_covariances: Sequence[str] = ()

    def __post_init__(self) -> None:
        errors.check_choice(
            "gradient_estimator", self.gradient_estimator, ("auto", *GRADIENT_ESTIMATORS)
        )
        errors.check_choice("subsampling", self.subsampling, ("auto", *SUBSAMPLINGS))
        errors.check_callable("init_strategy", self.init_strategy)
        if self.num_steps is not None:
            errors.check_positive_int("num_steps", self.num_steps)
        target_sd_bias = errors.check_fraction("target_sd_bias", self.target_sd_bias, "(0, 1)")
        self._set("target_sd_bias", target_sd_bias)
        if self.max_grad_norm is not None:
            self._set("max_grad_norm", errors.check_positive("max_grad_norm", self.max_grad_norm))
        for field in fields(self):
            if field.type == "bool":  # a string, as all annotations of this module
                self._set(field.name, errors.check_bool(field.name, getattr(self, field.name)))
        self._check_step_size()
        if self.noise_compensation:
            self._check_noise_compensation()
            self._set("subsampling", "iid")
        dense_mass: Any = self.dense_mass
        if isinstance(dense_mass, np.bool_):
            self._set("dense_mass", bool(dense_mass))
        self._check_gibbs()
        self._check_collected_sites()

    @property
    def can_shrink_user_step_size(self) -> bool:
        """True if divergences in warm-up may shorten the user's step size."""
        return self.shrink_step_size_on_divergence and isinstance(self.step_size, float)

    @property
    def traced_step_size(self) -> Any:
        """Step size that jit or vmap traces, so that only the chains can use it; None otherwise."""
        return self.step_size if is_traced(self.step_size) else None

    @property
    def gibbs_config(self) -> GibbsConfig:
        """The user's updates of local sites."""
        num_sweeps = None if self.keep_locals else self.num_gibbs_sweeps
        return GibbsConfig(self.gibbs_fn, tuple(self.gibbs_sites), num_sweeps)

    def check_no_local_options(self) -> None:
        """Check that there is no option about named sites: a potential function has none."""
        if self.gibbs_fn is not None or self.collect_local_sites or self.collect_sites is not None:
            raise InvalidArgumentError(
                "`gibbs_fn`, `collect_local_sites` and `collect_sites` are not supported with "
                "`potential_fn`.",
                "pass a model, or leave these options out.",
                "gibbs-options",
            )

    def _set(self, name: str, value: Any) -> None:
        """Replace an option's value by one of a plain type."""
        object.__setattr__(self, name, value)

    def _check_step_size(self) -> None:
        """Check that the step size is a positive number, as far as it is known, or a schedule."""
        if is_traced(self.step_size):
            traced: Any = self.step_size
            if traced.shape != () or traced.dtype.kind not in "iuf":
                raise InvalidArgumentError(
                    f"`step_size` is traced and has type {traced.dtype} and shape {traced.shape}.",
                    "pass a positive number.",
                    "traced-step-size",
                )
        elif self.step_size is not None and not callable(self.step_size):
            self._set("step_size", errors.check_positive("step_size", self.step_size))

    def _check_noise_compensation(self) -> None:
        """Check that minibatches are independent and measured in one mode."""
        if self.subsampling not in ("auto", "iid"):
            raise InvalidArgumentError(
                f"`noise_compensation` needs independent minibatches, but `subsampling` is "
                f"{self.subsampling!r}.",
                "use subsampling='iid', or leave out `noise_compensation`.",
                "noise-compensation-unsupported",
            )
        if self.init_in_modes:
            raise InvalidArgumentError(
                "`noise_compensation` does not support `init_in_modes`.",
                "leave out one of them, because the gradient noise is measured in one mode alone.",
                "noise-compensation-unsupported",
            )

    def _check_gibbs(self) -> None:
        if not _are_names(self.gibbs_sites):
            raise InvalidArgumentError(
                f"`gibbs_sites` is {errors.describe_value(self.gibbs_sites)}, "
                "which is not a list of site names.",
                "pass a list of strings.",
                "gibbs-options",
            )
        self._set("gibbs_sites", tuple(self.gibbs_sites))
        if (self.gibbs_fn is None) != (not self.gibbs_sites):
            raise InvalidArgumentError(
                "Only one of `gibbs_fn` and `gibbs_sites` was given.",
                "pass both: the function, and the names of the sites whose values it returns.",
                "gibbs-options",
            )
        if self.gibbs_fn is not None:
            _check_gibbs_fn(self.gibbs_fn)
        collected = self.collect_local_sites
        if isinstance(collected, (bool, np.bool_)):
            self._set("collect_local_sites", bool(collected))
        elif _are_names(collected):
            self._set("collect_local_sites", tuple(collected))
        else:
            raise InvalidArgumentError(
                f"`collect_local_sites` is {errors.describe_value(collected)}, "
                "which is neither a bool nor a list of names.",
                "pass True, False or a list of site names.",
                "gibbs-options",
            )
        errors.check_positive_int("num_gibbs_sweeps", self.num_gibbs_sweeps)
        if self.keep_locals:
            if self.num_gibbs_sweeps > 1:
                raise InvalidArgumentError(
                    f"`num_gibbs_sweeps` is {self.num_gibbs_sweeps}, but `keep_locals` is True.",
                    "pass keep_locals=False, or leave out `num_gibbs_sweeps`.",
                    "keep-locals",
                )
        elif self.gibbs_fn is None:
            raise InvalidArgumentError(
                "`keep_locals` is False, but there is no `gibbs_fn`.",
                "pass `gibbs_fn` and `gibbs_sites`, or leave out `keep_locals`.",
                "keep-locals",
            )
        elif self.collect_local_sites:
            raise InvalidArgumentError(
                "`collect_local_sites` needs the local values that `keep_locals=False` drops.",
                "leave out one of the two.",
                "keep-locals",
            )

    def _check_collected_sites(self) -> None:
        """Check the options about sites without draws."""
        names: Any
        for option in ("collect_sites", "running_covariances"):
            names = getattr(self, option)
            if names is None and option == "collect_sites":
                continue
            if not (_are_names(names) and (len(names) or option == "running_covariances")):
                raise InvalidArgumentError(
                    f"`{option}` is {errors.describe_value(names)}, which is not a list of site "
                    "names.",
                    "pass a list of strings, or leave it out.",
                    "collect-sites",
                )
            self._set(option, tuple(names))
        quantiles: Any = self.running_quantiles
        if not (isinstance(quantiles, (list, tuple)) or getattr(quantiles, "ndim", 0) == 1):
            raise InvalidArgumentError(
                f"`running_quantiles` is {errors.describe_value(quantiles)}, which is not a list "
                "of probabilities.",
                "pass a list of numbers in (0, 1), such as [0.05, 0.5, 0.95].",
                "collect-sites",
            )
        quantiles = tuple(
            errors.check_fraction("running_quantiles", p, "(0, 1)") for p in quantiles
        )
        self._set("running_quantiles", quantiles)
        if self.collect_sites is None and (self.running_quantiles or self.running_covariances):
            raise InvalidArgumentError(
                "`running_quantiles` and `running_covariances` need `collect_sites`.",
                "pass collect_sites, the sites whose draws are kept, or use the draws instead.",
                "collect-sites",
            )
        if self.running_quantiles and callable(self.step_size):
            raise InvalidArgumentError(
                "`running_quantiles` does not support a schedule of step sizes, which weights "
                "draws.",
                "leave `running_quantiles` out, or use a constant step_size.",
                "collect-sites",
            )


class KernelOptions(TypedDict, total=False):
    """Types of :class:`Options`, by which type checkers check a kernel's keywords."""

    step_size: float | Callable[[Any], Any] | None
    num_steps: int | None
    inverse_mass_matrix: Any
    dense_mass: bool | list[tuple[str, ...]] | None
    adapt_step_size: bool
    shrink_step_size_on_divergence: bool
    adapt_mass_matrix: bool
    gradient_estimator: str
    subsampling: str
    noise_compensation: bool
    max_grad_norm: float | None
    target_sd_bias: float
    init_strategy: Callable
    forward_mode_differentiation: bool
    init_in_modes: bool
    gibbs_fn: Callable | None
    gibbs_sites: Sequence[str]
    keep_locals: bool
    num_gibbs_sweeps: int
    collect_local_sites: bool | Sequence[str]
    collect_sites: Sequence[str] | None
    running_quantiles: Sequence[float]
    running_covariances: Sequence[str]


class KernelKeywords(KernelOptions, total=False):
    """Types of the keywords that the kernels of this package share."""

    integrator: str


def _check_gibbs_fn(gibbs_fn: Callable) -> None:
    """Check that ``gibbs_fn`` can be called with its keywords, as far as it has a signature."""
    errors.check_callable("gibbs_fn", gibbs_fn)
    keywords = get_gibbs_fn_keywords(gibbs_fn)
    try:
        inspect.signature(gibbs_fn).bind(**dict.fromkeys(keywords))
    except ValueError:
        pass  # some built-in functions have no signature
    except TypeError as error:
        raise InvalidArgumentError(
            f"`gibbs_fn` cannot be called with its keywords: {error}.",
            f"let it take the keywords {', '.join(keywords)}.",
            "gibbs-options",
        ) from None


def _are_names(value: Any) -> bool:
    """Return whether a value is a list (or other collection) of strings."""
    is_list = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    return is_list and all(isinstance(name, str) for name in value)


def add_options_to_signature(kernel_class: type) -> None:
    """Show integrator and shared keywords in a kernel's signature, in place of ``**options``."""
    own = inspect.signature(kernel_class.__init__).parameters  # type: ignore[misc]
    if "options" not in own:
        return
    parameters = {name: p for name, p in own.items() if name not in ("self", "options")}
    if integrators := getattr(kernel_class, "integrators", ()):
        kind = inspect.Parameter.KEYWORD_ONLY
        integrator = inspect.Parameter("integrator", kind, default=integrators[0], annotation="str")
        parameters.setdefault("integrator", integrator)
    for name, parameter in inspect.signature(Options).parameters.items():
        parameters.setdefault(name, parameter)
    kernel_class.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]


def check_no_unknown_options(kernel_class: type, options: Mapping[str, Any]) -> None:
    """Check that a kernel got no unknown keyword, and suggest the nearest known one."""
    known = inspect.signature(kernel_class).parameters
    for name in options:
        if name in Options.__dataclass_fields__:
            continue
        if similar := difflib.get_close_matches(name, known, 1):
            fix = f"did you mean '{similar[0]}'?"
        else:
            fix = f"use one of {', '.join(known)}."
        problem = f"{kernel_class.__name__} got an unexpected keyword argument '{name}'."
        fix = _FIX_BY_FOREIGN_KEYWORD.get(name, fix)
        raise TypeError(format_message(problem, fix, "unknown-keyword"))


def build_potential_from_model(
    model: Callable, arguments: Arguments, options: Options
) -> Potential:
    """Return the potential of a model, after checking that it supports the options.

    It warns of a model without subsampled plate.
    """
    potential = get_model_potential(
        model,
        arguments,
        options.init_strategy,
        options.gibbs_config,
        options.forward_mode_differentiation,
    )
    _check_local_latents(potential, arguments, options)
    if not potential.plates and potential.dim:
        exact = "" if potential.is_stochastic else "use NUTS, which has no bias, or "
        warn_user(
            "The model has no subsampled plate (subsample_size below its size), so every step "
            "computes the gradient on all data.",
            PlateWarning,
            f"{exact}give the plate of the rows a subsample_size below its size, for example 100. "
            "If subsample_size is an argument of the model, pass it to `run`.",
            "no-subsampled-plate",
        )
    is_resampled = not options.keep_locals
    source = "keep_locals=False samples locals" if is_resampled else "the model uses prng_key"
    if potential.is_stochastic and "control_variate" in options.gradient_estimator:
        raise InvalidArgumentError(
            f"`gradient_estimator` is {options.gradient_estimator!r}, but the likelihood is "
            f"random: {source}.",
            "use gradient_estimator='minibatch' or 'auto'.",
            "random-likelihood",
        )
    if options.forward_mode_differentiation and potential.local_names:
        raise InvalidArgumentError(
            "`forward_mode_differentiation` does not support site "
            f"'{potential.local_names[0]}', which is latent inside the subsampled plate.",
            "leave out `forward_mode_differentiation`.",
            "forward-mode-locals",
        )
    if not options.noise_compensation:
        return potential
    # The noise must show in the gradients of single observations.
    if potential.shards is not None:
        raise InvalidArgumentError(
            "`noise_compensation` is not supported for sharded data.",
            "leave out `noise_compensation`, which needs per-observation gradients.",
            "noise-compensation-unsupported",
        )
    if potential.is_stochastic:
        raise InvalidArgumentError(
            f"`noise_compensation` is not supported, because the likelihood is random: {source}.",
            "leave out `noise_compensation`.",
            "random-likelihood",
        )
    for group in potential.plate_groups:
        if len(group) > 1:
            names = " and ".join(f"'{p.name}'" for p in group)
            raise InvalidModelError(
                f"`noise_compensation` does not support a site in two subsampled plates: {names}.",
                "leave out `noise_compensation`, or subsample one of the plates.",
                "noise-compensation-unsupported",
            )
    return potential


def _check_local_latents(potential: Potential, arguments: Arguments, options: Options) -> None:
    """Check the options and the data for a model with local latent variables."""
    local, names = potential.local_latents, potential.local_names
    if options.collect_local_sites and not names:
        raise InvalidArgumentError(
            "`collect_local_sites` needs latent sites inside a subsampled plate.",
            "leave `collect_local_sites` out, because the model has no such sites.",
            "collect-local-sites",
        )
    select_collected_sites(names, options.collect_local_sites)
    if not names:
        return
    (plate,) = potential.plates
    site = f"Site '{names[0]}' is latent inside the plate '{plate.name}'"
    if potential.is_stochastic:
        raise InvalidModelError(
            f"{site}, but the model draws random keys (numpyro.prng_key).",
            "write what the keys randomise as a sample site, or integrate the site out.",
            "local-latents-random",
        )
    if local is None:
        if arguments.host_arrays:
            raise InvalidArgumentError(
                f"{site}, so each step would read all rows of a HostArray.",
                "pass arrays in memory, or sample the site by `gibbs_fn`.",
                "local-latents-host-array",
            )
        return
    if options.subsampling == "iid":
        raise InvalidArgumentError(
            f"{site}, but an iid minibatch may hold a row twice.",
            "use subsampling='contiguous' or 'shuffled', and no `noise_compensation`.",
            "local-latents-subsampling",
        )
    cut_epochs = options.subsampling in ("shuffled", "palindrome")
    if cut_epochs and plate.size % plate.subsample_size:
        raise InvalidArgumentError(
            f"{site}, but a minibatch across two epochs may hold a row twice.",
            "use subsampling='contiguous', or a subsample_size that divides "
            f"{plate.size} (it is {plate.subsample_size}).",
            "local-latents-subsampling",
        )
    if options.gradient_estimator == "second_order_control_variate":
        raise InvalidArgumentError(
            f"{site}, but its values change the Hessian that {options.gradient_estimator!r} keeps.",
            "use gradient_estimator='control_variate'.",
            "local-latents-control-variate",
        )


def build_warmup_settings(
    options: Options,
    potential: Potential,
    dynamics: Dynamics,
    integrator: str,
    bind_dynamics: Callable[[Preconditioner], Dynamics] | None = None,
    has_init_params: bool = False,
    is_site_aligned: bool = False,
    hierarchy_integrator: str | None = None,
) -> WarmupSettings:
    """Return the settings of the warm-up.

    :param bind_dynamics: returns the SDE in given preconditioned coordinates, on which its metric
        may depend; None for ``dynamics`` in all of them.
    :param is_site_aligned: whether the SDE must run in the coordinates of the sites.
    :param hierarchy_integrator: integrator of models with effects of many groups, or None.
    """
    sites, dim = potential.sites or (), potential.dim
    mask = build_mass_matrix_mask(options.dense_mass, sites, dim)
    inverse_mass_matrix = parse_inverse_mass_matrix(options.inverse_mass_matrix, sites, dim)
    if inverse_mass_matrix is None and not options.adapt_mass_matrix:
        inverse_mass_matrix = np.ones(dim)
    is_dense = options.dense_mass
    # With several modes the bias report combines the moments of chains in different coordinates,
    # for which it needs full ones.
    max_dense_dim = FULL_MOMENTS_MAX_DIM if options.init_in_modes else _MAX_DENSE_MASS_MATRIX_DIM
    if options.init_in_modes and is_dense and potential.dim > max_dense_dim:
        raise InvalidArgumentError(
            f"`dense_mass` with `init_in_modes` supports at most {max_dense_dim} parameters, but "
            f"the model has {potential.dim}.",
            "leave out `dense_mass` or `init_in_modes`.",
            "dense-mass-in-modes",
        )
    step_size = options.step_size
    is_traced_or_schedule = callable(step_size) or options.traced_step_size is not None
    if callable(step_size):
        step_size = first_step_size(step_size)
    elif is_traced_or_schedule or (step_size is None and not options.adapt_step_size):
        step_size = dynamics.integrators[integrator].step_size
    return WarmupSettings(
        dynamics=dynamics,
        integrator=integrator,
        hierarchy_integrator=hierarchy_integrator,
        bind_dynamics=bind_dynamics or (lambda _: dynamics),
        step_size=step_size,
        has_constant_step_size=not is_traced_or_schedule,
        num_steps=options.num_steps,
        estimator=GRADIENT_ESTIMATORS.get(options.gradient_estimator),
        subsampling=SUBSAMPLINGS.get(options.subsampling),
        inverse_mass_matrix=inverse_mass_matrix,
        is_dense=potential.dim <= max_dense_dim if is_dense is None else bool(is_dense),
        is_form_free=is_dense is None,
        is_site_aligned=is_site_aligned and not is_dense,
        mass_matrix_mask=mask,
        target_sd_bias=options.target_sd_bias,
        noise_compensation=options.noise_compensation,
        init_in_modes=options.init_in_modes,
        has_init_params=has_init_params,
    )
