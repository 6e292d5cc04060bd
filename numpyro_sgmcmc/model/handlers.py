"""Effect handlers that run a NumPyro model on chosen rows of its subsampled plates.

The model is not changed: ``plate(...) as i``, ``numpyro.subsample`` and nested plates all see the
chosen indices, and the plate's own scale (rows / chosen rows) makes the minibatch log likelihood
unbiased. The main objects are :class:`set_subsample_indices`, which chooses the indices, and
:class:`FullDataModel`, a model with all plates at their full size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro import factor, validation_enabled
from numpyro.handlers import condition, seed, substitute, trace
from numpyro.infer import init_to_sample
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_sgmcmc.data.arguments import Arguments, as_jax_arrays
from numpyro_sgmcmc.data.row_proxies import is_row_array_or_proxy
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.errors import (
    InvalidArgumentError,
    InvalidModelError,
    check_callable,
    describe_value,
    validate_real_array,
)
from numpyro_sgmcmc.model.numpy_values import NumPyArgumentsModel

ChooseIndices = Callable[[str, int, int], Any]
"""Maps ``(name, size, subsample_size)`` of a plate to row indices, or None to leave it alone."""


class set_subsample_indices(Messenger):
    """Handler that sets the row indices of subsampled plates.

    :param indices: indices by plate name, or a function that chooses them; plates without any keep
        NumPyro's own behaviour.
    :param weights: by plate name, a weight for each chosen row, besides the plate's scale; the rows
        of other plates have equal weights.
    """

    def __init__(
        self, fn: Any, indices: Indices | ChooseIndices, weights: Mapping[str, Any] | None = None
    ) -> None:
        self.choose_indices = indices if callable(indices) else lambda name, *_: indices.get(name)
        self.weights = weights or {}
        self.chosen_indices: dict[str, Any] = {}
        names = _find_conditioned_sites(fn)
        super().__init__(_subsample_given_values(fn, names) if names else fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size, subsample_size = msg["args"]
            indices = self.choose_indices(msg["name"], size, subsample_size)
            if indices is not None:
                # The object itself is kept, because a PlateIndexRegistry compares by identity.
                msg["value"] = indices if isinstance(indices, Array) else jnp.asarray(indices)
                msg["args"] = (size, indices.shape[0])
                self.chosen_indices[msg["name"]] = msg["value"]
        elif msg["type"] == "control_flow":
            # Plates inside of a loop are hidden from the handlers around it.
            msg["args"] = tuple(self._wrap_body(x) if callable(x) else x for x in msg["args"])
        elif msg["type"] == "subsample" and is_row_array_or_proxy(msg["value"]):
            _subsample_row_array(msg)
        elif msg["type"] == "sample":
            # NumPyro writes to the dictionary, which sites of the user's model may share.
            msg["infer"] = dict(msg["infer"])
            for frame in msg["cond_indep_stack"]:
                if frame.name in self.weights:
                    weights = jnp.asarray(self.weights[frame.name], jnp.result_type(float))
                    assert len(weights) == frame.size, "one weight per row"
                    weights = weights.reshape(-1, *[1] * (-frame.dim - 1))
                    msg["scale"] = weights if msg["scale"] is None else msg["scale"] * weights

    def _wrap_body(self, body: Callable) -> Callable:
        """Return the body of a loop with the same indices for its plates."""

        def choose_indices(name: str, size: int, subsample_size: int) -> Any:
            if name in self.chosen_indices:
                return self.chosen_indices[name]
            return self.choose_indices(name, size, subsample_size)

        return set_subsample_indices(body, choose_indices)


def _subsample_row_array(msg: Any) -> None:
    """Evaluate ``numpyro.subsample`` of a host or sharded array along its first axis."""
    data, event_dim = msg["value"], msg["kwargs"]["event_dim"]
    for plate in _PYRO_STACK:
        # A plate of NumPyro, or of its enumeration, whose `_indices` are no array.
        is_plate = hasattr(plate, "subsample_size")
        if is_plate and len(data.shape) == event_dim - plate.dim:
            if len(data) != plate.size:
                raise plate_array_length_error(plate.name, plate.size, repr(data), len(data))
            msg["value"] = data[getattr(plate, "indices", plate._indices)]
            msg["type"] = "subsampled"  # so that the plate does not subsample it again
            return


def plate_array_length_error(
    plate: str, plate_size: int, array: str, num_rows: int
) -> InvalidModelError:
    """Return the error for an array with another number of rows than the plate that indexes it."""
    return InvalidModelError(
        f"The plate '{plate}' has size {plate_size}, but {array} has {num_rows} rows.",
        f"give '{plate}' the length of the array as its size, or pass an array of {plate_size} "
        "rows. JAX would clamp indices that are out of range and read wrong rows silently.",
        "plate-array-length",
    )


class localised(Messenger):
    r"""Restrict a model's posterior to a neighbourhood of ``center`` by a normal density.

    The log density has the additional term

    .. math:: -\frac{\gamma}{2} \sum_j (x_j - c_j)^2

    with values x of the named sites, center c and precision :math:`\gamma`. This is the localising
    Gaussian of singular learning theory. Draws are from the product of the model's posterior and
    this normal density. Their SD is at most about :math:`\gamma^{-1/2}` in directions that the data
    do not determine. A large precision leaves one mode. The term is the same for every minibatch.
    Plates, predictions and flax modules are unchanged. The trace has one more site, ``localised``.

    Reference: Lau, Furman, Wang, Murfet and Wei (2025), *The local learning coefficient: a
    singularity-aware complexity measure*.

    :param model: NumPyro model.
    :param center: values by site, constrained as in draws and in
        :func:`~numpyro.infer.initialization.init_to_value`. Each site is latent or deterministic,
        outside of subsampled plates. Other sites are not restricted.
    :param precision: inverse variance of the density, positive: a number for all sites, or a dict
        by site of numbers or of arrays of the sites' shapes.
    :raises ValueError: for other precisions or values, and in a run of the model for other sites or
        shapes.
    """

    def __init__(
        self, model: Callable, center: Mapping[str, Any], precision: float | Mapping[str, Any]
    ) -> None:
        check_callable("model", model)
        is_dict = isinstance(center, Mapping) and len(center) > 0
        by_site = dict.fromkeys(center if is_dict else (), precision)
        by_site = dict(precision) if isinstance(precision, Mapping) else by_site
        problem = ""
        if not is_dict:
            problem = f"`center` is {describe_value(center)}, which is not a dict of values by site"
        elif by_site.keys() != center.keys():
            problem = f"`precision` has sites {sorted(by_site)}, but `center` has {sorted(center)}"
        else:
            real = jnp.result_type(float)
            self.center, self.precision = (
                {name: validate_real_array(kind, x).astype(real) for name, x in values.items()}
                for kind, values in (("center", center), ("precision", by_site))
            )
            for name, gamma in self.precision.items():
                is_finite = np.isfinite(self.center[name]).all() and np.isfinite(gamma).all()
                if not (is_finite and (gamma > 0).all()):
                    problem = f"`center` or `precision` of '{name}' is not finite, or not positive"
        if problem:
            raise InvalidArgumentError(
                f"{problem}.",
                "pass a dict of values by site, such as guide.median(params), and a positive "
                "precision.",
                "localised",
            )
        super().__init__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with trace() as sites:
            result = self.fn(*args, **kwargs)
        shapes = {n: jnp.shape(s["value"]) for n, s in sites.items() if _is_global(s, sites)}
        terms = []
        for name, x in self.center.items():
            gamma, shape = self.precision[name], shapes.get(name)
            if x.shape != shape or gamma.shape not in ((), shape):
                found = "no such global site" if shape is None else f"shape {shape}"
                raise InvalidArgumentError(
                    f"`center` of '{name}' has shape {x.shape}, `precision` has shape "
                    f"{gamma.shape}, and the model has {found}.",
                    f"use the sites and shapes of the model: {shapes}.",
                    "localised",
                )
            terms.append((gamma * jnp.square(sites[name]["value"] - x)).sum())
        factor("localised", -0.5 * sum(terms))
        return result


def _is_global(site: Any, sites: Mapping[str, Any]) -> bool:
    """Return whether a traced site is latent or deterministic, outside of subsampled plates."""
    is_latent = site["type"] == "sample" and not site["is_observed"]
    return (is_latent or site["type"] == "deterministic") and all(
        frame.name not in sites or frame.size == sites[frame.name]["args"][0]
        for frame in site.get("cond_indep_stack", ())
    )


class disable_validation(Messenger):
    """Handler that leaves out NumPyro's checks that values of the named sites are in their support.

    Values that come from unconstrained space always are, up to rounding, and the checks are a sixth
    of the operations of a hierarchical model's gradient.
    """

    def __init__(self, fn: Any, names: frozenset[str]) -> None:
        self.names = names
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["fn"] = _without_validation(msg["fn"])


def _without_validation(fn: Any) -> Any:
    """Return a copy of a distribution, and of its base distributions, that checks no values."""
    if not isinstance(fn, dist.Distribution):
        return fn
    fn = copy.copy(fn)
    fn._validate_args = False
    for name, part in vars(fn).items():
        if isinstance(part, dist.Distribution):
            setattr(fn, name, _without_validation(part))
    return fn


class detect_rng_use(Messenger):
    """Handler that records whether the model asks for a random key (``numpyro.prng_key``)."""

    has_requested_key = False

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "prng_key" and msg["value"] is None:
            self.has_requested_key = True
            msg["value"] = random.key(0)


class ConditionedModel:
    """The model of a block of Gibbs, which subsamples the values of other blocks.

    Gibbs passes values for all rows of the sites inside a subsampled plate.
    """

    def __init__(self, model: Callable) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = frozenset(kwargs.get(GIBBS_SITES_KWARG, ()))
        return _subsample_given_values(self.model, names)(*args, **kwargs)


class _subsample_given_values(Messenger):
    """Handler that selects the minibatch from values of the named sites, given for all rows."""

    def __init__(self, fn: Any, names: frozenset[str]) -> None:
        self.names = names
        self.plate_indices: dict[str, tuple[int, Any]] = {}
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] != "sample" or msg["name"] not in self.names:
            return
        for frame in msg["cond_indep_stack"]:
            size, indices = self.plate_indices.get(frame.name, (frame.size, None))
            axis = frame.dim - msg["fn"].event_dim
            shape = jnp.shape(msg["value"])
            if frame.size < size and len(shape) >= -axis and shape[axis] == size:
                msg["value"] = jnp.take(msg["value"], indices, axis)

    def postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "plate":
            self.plate_indices[msg["name"]] = msg["args"][0], msg["value"]


def _find_conditioned_sites(model: Any) -> frozenset[str]:
    """Return the names of sites that ``numpyro.handlers.condition`` gives values around a model."""
    names: frozenset[str] = frozenset()
    while isinstance(model, (Messenger, NumPyArgumentsModel, ConditionedModel)):
        if isinstance(model, condition):
            names |= frozenset(model.data or ())
        model = model.fn if isinstance(model, Messenger) else model.model
    return names


class FullDataModel:
    """The model with every plate at its full size, for ArviZ, ``log_likelihood`` and
    :class:`~numpyro.infer.gibbs.DiscreteGibbs`.

    Two views of one model are equal, so that blocks of ``Gibbs`` can share it.
    """

    max_bytes = 2**30
    """A bound on memory: larger host arrays are not loaded as a whole."""

    def __init__(self, model: Callable) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for host in Arguments(args, kwargs).host_arrays:
            num_bytes = len(host) * max(host.row_size, 1) * host.dtype.itemsize
            if num_bytes > self.max_bytes:
                raise InvalidArgumentError(
                    f"The model on all rows would load {num_bytes / 1e9:.1f} GB of {host!r}.",
                    "use numpyro_sgmcmc.log_likelihood, numpyro_sgmcmc.posterior_predictive or "
                    "numpyro_sgmcmc.to_arviz, which read the rows in chunks.",
                    "full-data-memory",
                )
        if not isinstance(self.model, NumPyArgumentsModel):
            args, kwargs = as_jax_arrays((args, kwargs))
        try:
            return set_subsample_indices(self.model, _all_indices)(*args, **kwargs)
        except AssertionError as error:
            if str(error):
                raise
            # NumPyro raises a bare AssertionError for a site without a value and without a key.
            raise InvalidArgumentError(
                "A latent site of the model has no value, and there is no random key to sample it.",
                "pass collect_local_sites=True, so that draws have latent sites inside the "
                "subsampled plate. Or use numpyro_sgmcmc.log_likelihood, which sums discrete sites "
                "out, or az.from_numpyro(mcmc, log_likelihood=False).",
                "missing-local-draws",
            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FullDataModel) and self.model == other.model

    def __hash__(self) -> int:
        return hash((FullDataModel, self.model))


def _all_indices(name: str, size: int, subsample_size: int) -> Array:
    return jnp.arange(size)


def trace_run(
    model: Callable, arguments: Arguments, values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the trace of one run of a model, with values given for some of its sites."""
    arguments = arguments.map_arrays(jnp.asarray)
    run = trace(substitute(model, data=dict(values or {})))
    return run.get_trace(*arguments.args, **arguments.kwargs)


def trace_prior(
    model: Callable, indices: Indices | ChooseIndices, arguments: Arguments
) -> dict[str, Any]:
    """Return the model's trace on some rows of each plate, with latent sites from the prior."""
    model = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
    return trace_run(set_subsample_indices(model, indices), arguments)


def sample_prior_values(
    model: Callable, arguments: Arguments, names: list[str]
) -> dict[str, Array]:
    """Sample the named sites from the prior, on all rows."""
    with validation_enabled(False):  # invalid values are reported where a chain starts at them
        sites = trace_prior(model, _all_indices, arguments)
    return {name: jnp.asarray(sites[name]["value"]) for name in names}
