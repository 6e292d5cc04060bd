"""The keywords that all kernels share, each with its type, default, description and check.

What `help` shows of a kernel (its own keywords, and those that all kernels share), and what a
prompt and a notebook show of it: what differs from the defaults.

From what a kernel is made of to the posterior: the model or the potential function, read.

What a posterior does not bear: options of the kernel, and ways to run it.

What the warm-up is told: a kernel's options, made to fit the posterior.
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation import WarmupSettings
from numpyro_sgmcmc.adaptation.initialisation import check_potential_fn_params
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.data.subsampling import SUBSAMPLINGS
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.errors import InvalidArgumentError, warn_user
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS
from numpyro_sgmcmc.model.local_latents import get_gibbs_fn_keywords, select_collected_sites
from numpyro_sgmcmc.model.potential import Potential, make_function_potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from numpyro_sgmcmc.model.trace import GibbsConfig
from numpyro_sgmcmc.model.validation import check_local_latents_options
from numpyro_sgmcmc.sampling.bias_monitor import FULL_MOMENTS_MAX_DIM
from numpyro_sgmcmc.sampling.mass_matrix import build_mass_matrix_mask, parse_inverse_mass_matrix
from numpyro_sgmcmc.sampling.schedules import first_step_size

__all__ = [
    "KernelOptions",
    "KernelReprMixin",
    "Options",
    "build_potential_from_fn",
    "build_potential_from_model",
    "build_warmup_settings",
    "check_chain_method",
    "check_gibbs_block_collects_locals",
    "check_options_match_model",
    "document_shared_options",
    "get_single_chain_shapes",
]

_BOOL_OPTIONS = (
    "adapt_step_size",
    "adapt_mass_matrix",
    "noise_compensation",
    "forward_mode_differentiation",
    "init_in_modes",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    r"""The keywords that all kernels share; a kernel's signature and docstring take them from here.

    :param step_size: step size in whitened units (posterior standard deviations), positive; or a
        schedule ``int -> float`` of the number of steps so far, warm-up counted in, such as any
        optax schedule. One that jit or vmap traces is the chains'; the warm-up, which must know a
        number, goes by the scheme's own. Default None: chosen in warm-up.
    :param num_steps: stochastic-gradient steps an iteration. Default None: as many as make draws
        about independent, from 1 to 500.
    :param inverse_mass_matrix: about the posterior covariance in unconstrained space: shape
        ``(d,)``, ``(d, d)``, or a dict of blocks by tuples of site names. Kept as given. Default
        None: found in warm-up.
    :param dense_mass: whether the mass matrix found is dense: a bool, or a list of tuples of site
        names that form blocks. Default None: dense for up to 100 coordinates. One that is not
        dense is a diagonal with a few directions besides that draws and gradients show.
    :param adapt_step_size: if False and no ``step_size`` is given, take the scheme's own; one that
        is given is then kept even where a chain's warm-up diverges again and again, which else
        halves it. Default True.
    :param adapt_mass_matrix: if False and no ``inverse_mass_matrix`` is given, take the identity.
    :param gradient_estimator: ``"minibatch"``, ``"control_variate"``, ``"second_order_control_variate"`` (keeps
        a Hessian, so for few coordinates), or ``"auto"`` (default): the one that goes furthest
        at the same cost, by the noise measured in warm-up.
    :param subsampling: ``"contiguous"`` blocks of consecutive rows, ``"shuffled"`` (random rows, each once an
        epoch), ``"iid"`` (random rows), or ``"auto"`` (default): blocks, unless they prove
        clearly noisier than random rows.
    :param noise_compensation: whether to inject less noise where the minibatch gradient brings its
        own: :math:`2\gamma h - h^2\hat V` in place of :math:`2\gamma h` (Ma, Chen and Fox 2015,
        equation (9)), with :math:`\hat V` from the gradients of single rows, measured in warm-up
        at typical positions. For plain gradients, whose noise is about the same everywhere; that
        of control variates it compensates on average only. Needs independent minibatches:
        ``subsampling`` is then ``"iid"``. Default False.
    :param max_grad_norm: largest norm of the gradient in a step, in whitened units, where that at a
        draw from a normal posterior is about :math:`\sqrt d`; longer ones are cut to it. Biased as
        soon as it cuts: draws spread wider, and :func:`~numpyro_sgmcmc.bias_report`, which reads
        gradients uncut, says by how much. Default None: gradients as they are.
    :param target_sd_bias: relative error of posterior standard deviations that the choice of the
        step size may allow. Default 0.05.
    :param init_strategy: NumPyro initialisation strategy, from which the warm-up starts.
    :param forward_mode_differentiation: whether gradients are taken in forward mode, for models
        with ``lax.while_loop``; they cost as much more as there are coordinates. Default False.
    :param init_in_modes: whether chains start in turn in each of the modes of comparable mass
        that the warm-up finds, each with whitening and control variates of its own, and R-hat
        compares them. Default False: all in the one whose fit is best, and a warning where there
        are others. Vectorized and parallel chains take turns; others start in one at random.
    :param gibbs_fn: draws of sites inside the subsampled plate from their conditional, as in
        :class:`~numpyro.infer.hmc_gibbs.HMCGibbs` and for the rows of a minibatch:
        ``gibbs_fn(rng_key, gibbs_sites, hmc_sites, rows)``, called by these keywords with dicts of
        constrained values (of the minibatch's rows for sites inside the plate) and the rows'
        indices, returns a dict of new values of all ``gibbs_sites``. Where it takes them,
        ``model_args`` and ``model_kwargs`` are the model's own arguments, whose arrays on the host
        may be indexed by ``rows``. That the draws come from the conditional is the user's affair.
    :param gibbs_sites: names of those sites, which may be discrete.
    :param gibbs_sweeps: keep no local values: at each minibatch those of its rows are drawn from
        their prior given the globals, then by so many calls of ``gibbs_fn``, and dropped after the
        step. For streams of rows, whose local values would not fit in memory. The posterior of the
        globals is right as far as the calls forget where they began, which nothing checks; one
        is enough where ``gibbs_fn`` draws all sites together. Default None: values stay.
    :param collect_local_sites: whether draws hold the sites inside the subsampled plate, for all rows:
        a bool, or names of such sites. Default False: they take the memory of all rows a draw.
    :raises ValueError: for a value out of range.
    """

    step_size: float | Callable[[Any], Any] | None = None
    num_steps: int | None = None
    inverse_mass_matrix: Any = None
    dense_mass: bool | list[tuple[str, ...]] | None = None
    adapt_step_size: bool = True
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
    gibbs_sweeps: int | None = None
    collect_local_sites: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        errors.check_choice(
            "gradient_estimator", self.gradient_estimator, ("auto", *GRADIENT_ESTIMATORS)
        )
        errors.check_choice("subsampling", self.subsampling, ("auto", *SUBSAMPLINGS))
        errors.check_callable("init_strategy", self.init_strategy)
        if self.num_steps is not None:
            errors.check_positive_int("num_steps", self.num_steps)
        errors.check_positive("target_sd_bias", self.target_sd_bias)
        if self.max_grad_norm is not None:
            errors.check_positive("max_grad_norm", self.max_grad_norm)
            self._set_option("max_grad_norm", float(self.max_grad_norm))
        for name in _BOOL_OPTIONS:
            errors.check_bool(name, getattr(self, name))
        if is_traced(self.step_size):
            _check_traced_step_size(self.step_size)
        elif self.step_size is not None and not callable(self.step_size):
            errors.check_positive("step_size", self.step_size)
            self._set_option("step_size", float(self.step_size))
        self._set_option("target_sd_bias", float(self.target_sd_bias))
        self._set_option("noise_compensation", bool(self.noise_compensation))
        self._set_option("init_in_modes", bool(self.init_in_modes))
        self._set_option("forward_mode_differentiation", bool(self.forward_mode_differentiation))
        if self.noise_compensation:
            _check_independent_subsampling(self.subsampling)
            _check_single_mode(self.init_in_modes)
            self._set_option("subsampling", "iid")
        _check_gibbs_sites(self.gibbs_fn, self.gibbs_sites)
        if self.gibbs_fn is not None:
            errors.check_callable("gibbs_fn", self.gibbs_fn)
            _check_callable_keywords(
                "gibbs_fn", self.gibbs_fn, get_gibbs_fn_keywords(self.gibbs_fn)
            )
        _check_collect_local_sites(self.collect_local_sites)
        if self.gibbs_sweeps is not None:
            _check_gibbs_sweeps(self.gibbs_sweeps, self.gibbs_fn, self.collect_local_sites)
        self._set_option("gibbs_sites", tuple(self.gibbs_sites))

    @property
    def can_shrink_user_step_size(self) -> bool:
        """Whether divergences in warm-up may shorten a step size that is given."""
        return self.adapt_step_size and isinstance(self.step_size, float)

    @property
    def traced_step_size(self) -> Any:
        """The step size where jit or vmap traces it, so that only the chains can have it."""
        return self.step_size if is_traced(self.step_size) else None

    @property
    def gibbs_config(self) -> GibbsConfig:
        """The user's draws of local sites."""
        return GibbsConfig(self.gibbs_fn, tuple(self.gibbs_sites), self.gibbs_sweeps)

    @classmethod
    def find_unknown(cls, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords that no kernel knows."""
        known = {field.name for field in fields(cls)}
        return {name: x for name, x in keywords.items() if name not in known}

    def _set_option(self, name: str, value: Any) -> None:
        """A checked value in its plain type."""
        object.__setattr__(self, name, value)

    def check_no_local_options(self) -> None:
        """Refuse what concerns local sites: a potential function has none.

        :raises ValueError: for such options.
        """
        if self.gibbs_fn is not None or self.collect_local_sites:
            raise InvalidArgumentError(
                "`gibbs_fn` and `collect_local_sites` need a kernel made from a model."
            )


class KernelOptions(TypedDict, total=False):
    """:class:`Options` as type checkers need them to check a kernel's keywords."""

    step_size: float | Callable[[Any], Any] | None
    num_steps: int | None
    inverse_mass_matrix: Any
    dense_mass: bool | list[tuple[str, ...]] | None
    adapt_step_size: bool
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
    gibbs_sweeps: int | None
    collect_local_sites: bool | Sequence[str]


def _check_traced_step_size(step_size: Any) -> None:
    """Refuse a traced step size that is no number, as far as that can be seen."""
    if step_size.shape != () or step_size.dtype.kind not in "iuf":
        raise InvalidArgumentError(
            f"`step_size` is traced and has type {step_size.dtype} and shape {step_size.shape}, "
            "but must be a positive number."
        )


def _check_independent_subsampling(subsampling: str) -> None:
    """Refuse to compensate noise that other minibatches take back."""
    if subsampling not in ("auto", "iid"):
        raise InvalidArgumentError(
            f"`noise_compensation` needs independent minibatches, but `minibatch` is "
            f"{subsampling!r}, in which the noise of one minibatch takes back that of others: "
            "use subsampling='iid', or leave it out."
        )


def _check_single_mode(init_in_modes: bool) -> None:
    """Refuse to compensate in several modes what is measured in one."""
    if init_in_modes:
        raise InvalidArgumentError(
            "`noise_compensation` takes back the noise of one mode: leave out either it or "
            "`init_in_modes`."
        )


def _check_gibbs_sites(gibbs_fn: Any, gibbs_sites: Any) -> None:
    """Refuse what is no list of names, names that no function draws, and a function of none."""
    if isinstance(gibbs_sites, str) or not all(isinstance(n, str) for n in gibbs_sites):
        raise InvalidArgumentError(
            f"`gibbs_sites` is {gibbs_sites!r}, but must be a list of names of sites."
        )
    if (gibbs_fn is None) != (len(gibbs_sites) == 0):
        raise InvalidArgumentError(
            "`gibbs_fn` and `gibbs_sites` go together: a function, and the names of the sites "
            "that it draws."
        )


def _check_gibbs_sweeps(num_gibbs_sweeps: Any, gibbs_fn: Any, collect_local_sites: Any) -> None:
    """Refuse what is no number of sweeps, sweeps of nothing, and draws of what is dropped."""
    errors.check_positive_int("gibbs_sweeps", num_gibbs_sweeps)
    if gibbs_fn is None:
        raise InvalidArgumentError(
            "`gibbs_sweeps` says how often to call `gibbs_fn`, which is missing."
        )
    if collect_local_sites:
        raise InvalidArgumentError(
            "`gibbs_sweeps` drops local values after each step, so that there are none for "
            "`collect_local_sites`: leave out one of the two."
        )


def _check_callable_keywords(name: str, fn: Callable, keywords: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these keywords."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise InvalidArgumentError(
            f"`{name}` is called with the keywords {', '.join(keywords)}, but {error}."
        ) from None


def _check_collect_local_sites(collect_local_sites: Any) -> None:
    """Refuse what is neither a bool nor a list of names."""
    if isinstance(collect_local_sites, str) or not (
        isinstance(collect_local_sites, bool)
        or all(isinstance(n, str) for n in collect_local_sites)
    ):
        raise InvalidArgumentError(
            f"`collect_local_sites` is {collect_local_sites!r}, but must be True, False or a list of names "
            "of sites."
        )


_MODEL_PARAMS_DOC = """\
:param model: Python callable containing NumPyro primitives, with a subsampled plate around
    the data. Exclusive with ``potential_fn``.
:param potential_fn: potential energy of a pytree of unconstrained values, in place of a model.
"""


_KINETICS_FIELD_NAMES = {"a": "a", "m": "mass", "c": "softening"}


_MAX_REPR_CHARS = 60  # characters of a value


_OPTIONS_PARAM_PATTERN = re.compile(r":param options:.*\n?( .*\n?)*")


def document_shared_options(kernel_class: type) -> None:
    """Put the shared keywords into a kernel's signature and docstring.

    In the signature they stand for ``**options``, in the docstring for ``:param options:``.
    """
    own = inspect.signature(kernel_class.__init__).parameters  # type: ignore[misc]
    if "options" not in own:
        return
    visible = [p for n, p in own.items() if n not in ("self", "options")]
    shared = [p for n, p in inspect.signature(Options).parameters.items() if n not in own]
    kernel_class.__signature__ = inspect.Signature(visible + shared)  # type: ignore[attr-defined]
    kernel_class.__doc__ = _insert_shared_params(vars(kernel_class).get("__doc__"))


def _insert_shared_params(docstring: str | None) -> str | None:
    """A docstring with the parameters that all kernels share: first the model, last the options."""
    if docstring is None or Options.__doc__ is None or ":param options:" not in docstring:
        return docstring
    docstring, shared = inspect.cleandoc(docstring), inspect.cleandoc(Options.__doc__)
    shared = shared[shared.index(":param") : shared.index(":raises")]
    docstring = _OPTIONS_PARAM_PATTERN.sub(lambda _: shared, docstring)
    if ":param model:" in docstring:
        return docstring
    first = docstring.index(":param")
    return docstring[:first] + _MODEL_PARAMS_DOC + docstring[first:]


class KernelReprMixin:
    """A kernel that prints as the call that makes it, defaults left out."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that was chosen at construction, by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._format_arguments())})"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    def _format_arguments(self) -> list[str]:
        shown = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = self._get_setting(name, parameter.default)
            if value is parameter.default or _is_default(value, parameter.default):
                continue
            text = getattr(value, "__name__", None) or repr(value)
            text = text if "\n" not in text and len(text) <= _MAX_REPR_CHARS else "..."
            shown.append(text if name == "model" else f"{name}={text}")
        return shown

    def _get_setting(self, name: str, default: Any) -> Any:
        """What a keyword was set to: kept by the kernel, its SDE, or the SDE's kinetics."""
        settings = self.settings
        for kept in (name, f"{name}_fn"):
            if kept in settings:
                return settings[kept]
        dynamics = settings["dynamics"]
        if name in _KINETICS_FIELD_NAMES and hasattr(dynamics, "kinetics"):
            return getattr(dynamics.kinetics, _KINETICS_FIELD_NAMES[name])
        return getattr(dynamics, name, default)


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value is the default one; arrays and functions never are."""
    return (
        type(value) is type(default)
        and isinstance(value, (bool, int, float, str, tuple))
        and (value == default)
    )


def build_potential_from_model(
    model: Callable, arguments: Arguments, options: Options
) -> Potential:
    """The posterior of a model that bears the options.

    :raises ValueError: naming the site, plate or option that cannot be sampled.
    """
    is_forward = options.forward_mode_differentiation
    target = get_model_potential(
        model, arguments, options.init_strategy, options.gibbs_config, is_forward
    )
    check_local_latents_options(
        target,
        arguments,
        options.subsampling,
        options.gradient_estimator,
        options.collect_local_sites,
    )
    check_options_match_model(target, options)
    return target


def build_potential_from_fn(
    potential_fn: Callable,
    value_shapes: Any,
    options: Options,
    potential_cache: dict[Any, Potential],
) -> Potential:
    """The posterior of a potential function.

    :param value_shapes: shapes and types of the values of which it is a function.
    :param potential_cache: those read before, by names and shapes of the values; gains this one.
    :raises ValueError: for what is no such function.
    """
    leaves, structure = jax.tree.flatten(value_shapes)
    form = structure, tuple(x.shape for x in leaves)
    if form not in potential_cache:
        is_forward = options.forward_mode_differentiation
        potential_cache[form] = make_function_potential(potential_fn, value_shapes, is_forward)
    return potential_cache[form]


def get_single_chain_shapes(init_params: Any, is_batch: bool) -> Any:
    """Shapes and types of the values of which a potential is a function.

    :raises ValueError: where there are none.
    """
    if init_params is None:
        raise InvalidArgumentError(
            "Valid value of `init_params` must be provided with `potential_fn`."
        )
    check_potential_fn_params(init_params)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[int(is_batch) :], jnp.result_type(x)),
        init_params,
    )


def check_chain_method(arguments: Arguments) -> None:
    """Refuse to spread chains over the devices that rows are spread over."""
    if arguments.sharded_arrays and jax.sharding.get_abstract_mesh().manual_axes:
        raise InvalidArgumentError(
            "chain_method='parallel' gives every device a chain, but the devices share the "
            "rows: use chain_method='vectorized'."
        )


def check_gibbs_block_collects_locals(potential: Potential, options: Options) -> None:
    """Refuse to be a block of NumPyro's Gibbs that does not hand on its local values."""
    local = potential.local_latents
    if local is None:
        return
    for name in local.names:
        if name not in select_collected_sites(local, options.collect_local_sites):
            raise InvalidArgumentError(
                f"Site '{name}' is latent inside the subsampled plate, and the other blocks of "
                "Gibbs need its values for all rows: pass collect_local_sites=True."
            )


def check_options_match_model(potential: Potential, options: Options) -> None:
    """Refuse options that make no sense for a model; warn of one without a subsampled plate.

    :raises ValueError: naming the option, with the way out.
    """
    if not potential.plates and potential.dim:
        warn_user(
            "The model has no subsampled plate: every step uses the gradient on all rows. "
            "Give the data's plate a subsample_size, for example 100; where that is an argument "
            "of the model, pass it to `run`."
        )
    if potential.is_stochastic and "control_variate" in options.gradient_estimator:
        raise InvalidArgumentError(
            f"{_describe_randomness(options)}, so that the gradient on all rows is random too and "
            f"gradient_estimator={options.gradient_estimator!r} has nothing to hold on to. Use gradient_estimator='minibatch' or "
            "'auto'."
        )
    if options.forward_mode_differentiation and potential.local_latents is not None:
        raise InvalidArgumentError(
            f"Site '{potential.local_latents.names[0]}' has a latent value for each row, whose gradients are "
            "taken in reverse mode: leave out `forward_mode_differentiation`."
        )
    if options.noise_compensation:
        _check_noise_compensation(potential, options)


def _describe_randomness(options: Options) -> str:
    if options.gibbs_sweeps is not None:
        return "With `gibbs_sweeps` local values are drawn anew at each evaluation"
    return "The model draws random keys (numpyro.prng_key)"


def _check_noise_compensation(potential: Potential, options: Options) -> None:
    """Refuse to compensate noise that is not that of independent rows."""
    if potential.shards is not None:
        raise InvalidArgumentError(
            "`noise_compensation` needs the gradients of single rows, which rows spread over "
            "devices do not have: leave it out."
        )
    if potential.is_stochastic:
        raise InvalidArgumentError(
            f"{_describe_randomness(options)}, whose noise the gradients of single rows do not show: "
            "leave out `noise_compensation`."
        )
    for group in potential.plate_groups:
        if len(group) > 1:
            names = " and ".join(f"'{p.name}'" for p in group)
            raise InvalidArgumentError(
                f"The subsampled plates {names} meet at one site, so that its rows are not "
                "independent: leave out `noise_compensation`, or subsample one of them."
            )


_MAX_DENSE_MASS_MATRIX_DIM = 100


def build_warmup_settings(
    options: Options,
    potential: Potential,
    dynamics: Dynamics,
    integrator: str,
    bind_dynamics: Callable[[Preconditioner], Dynamics],
    has_init_params: bool,
    is_site_aligned: bool,
) -> WarmupSettings:
    """The settings of the warm-up.

    An option that has a field of its name there is passed on as it is; the others are made here.

    :raises ValueError: for a mass matrix or a schedule that does not fit.
    """
    sites = () if potential.sites is None else potential.sites
    mask = build_mass_matrix_mask(options.dense_mass, sites, potential.dim)
    matrix = parse_inverse_mass_matrix(options.inverse_mass_matrix, sites, potential.dim)
    if matrix is None and not options.adapt_mass_matrix:
        matrix = np.ones(potential.dim)
    is_dense = options.dense_mass
    # Moments of chains in different coordinates are put together: see the bias report.
    most_dense = FULL_MOMENTS_MAX_DIM if options.init_in_modes else _MAX_DENSE_MASS_MATRIX_DIM
    if options.init_in_modes and is_dense and potential.dim > most_dense:
        raise InvalidArgumentError(
            f"`init_in_modes` has a diagonal mass matrix above {most_dense} parameters, but "
            f"`dense_mass` is set and there are {potential.dim}: leave one of them out."
        )
    made: dict[str, Any] = {
        "dynamics": dynamics,
        "integrator": integrator,
        "bind_dynamics": bind_dynamics,
        "step_size": _get_fixed_step_size(options, dynamics.integrators[integrator].step_size),
        "has_constant_step_size": not callable(options.step_size)
        and options.traced_step_size is None,
        "estimator": GRADIENT_ESTIMATORS.get(options.gradient_estimator),
        "subsampling": SUBSAMPLINGS.get(options.subsampling),
        "inverse_mass_matrix": matrix,
        "is_dense": potential.dim <= most_dense if is_dense is None else bool(is_dense),
        "is_site_aligned": is_site_aligned and not is_dense,
        "mass_matrix_mask": mask,
        "has_init_params": has_init_params,
    }
    names = {field.name for field in fields(WarmupSettings)} - made.keys()
    return WarmupSettings(**made, **{name: getattr(options, name) for name in names})


def _get_fixed_step_size(options: Options, default_step_size: float) -> float | None:
    """The step size where it is not to be chosen: the user's, or the scheme's own."""
    if callable(options.step_size):
        return first_step_size(options.step_size)
    is_unknown = options.step_size is None and not options.adapt_step_size
    if is_unknown or options.traced_step_size is not None:
        return default_step_size
    return options.step_size
