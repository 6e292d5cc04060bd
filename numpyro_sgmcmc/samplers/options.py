"""The keywords that all kernels share, each with its type, default, description and check."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import is_traced
from numpyro_sgmcmc.data.minibatch import SUBSAMPLINGS
from numpyro_sgmcmc.posterior.estimators import GRADIENT_ESTIMATORS
from numpyro_sgmcmc.posterior.facts import GibbsConfig
from numpyro_sgmcmc.posterior.locals.draws import get_gibbs_fn_keywords

__all__ = ["KernelOptions", "Options"]


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
        checks.check_choice(
            "gradient_estimator", self.gradient_estimator, ("auto", *GRADIENT_ESTIMATORS)
        )
        checks.check_choice("subsampling", self.subsampling, ("auto", *SUBSAMPLINGS))
        checks.check_callable("init_strategy", self.init_strategy)
        if self.num_steps is not None:
            checks.check_positive_int("num_steps", self.num_steps)
        checks.check_positive("target_sd_bias", self.target_sd_bias)
        if self.max_grad_norm is not None:
            checks.check_positive("max_grad_norm", self.max_grad_norm)
            self._set_option("max_grad_norm", float(self.max_grad_norm))
        for name in _BOOL_OPTIONS:
            checks.check_bool(name, getattr(self, name))
        if is_traced(self.step_size):
            _check_traced_step_size(self.step_size)
        elif self.step_size is not None and not callable(self.step_size):
            checks.check_positive("step_size", self.step_size)
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
            checks.check_callable("gibbs_fn", self.gibbs_fn)
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
    checks.check_positive_int("gibbs_sweeps", num_gibbs_sweeps)
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
