"""What answers a model's ``plate`` statements with the rows that are wanted.

The model is never edited: ``plate(...) as i``, ``numpyro.subsample`` and nested plates all see
them, and the plate's own scale (rows / chosen rows) makes the minibatch potential unbiased.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro import validation_enabled
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_sgmcmc.data.arguments import Arguments, as_jax_arrays
from numpyro_sgmcmc.data.row_proxies import is_row_array_or_proxy
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = [
    "ConditionedModel",
    "FullDataModel",
    "detect_rng_use",
    "disable_validation",
    "sample_prior_values",
    "set_subsample_indices",
    "trace_prior",
]

_MAX_FULL_DATA_BYTES = 2**30


class set_subsample_indices(Messenger):
    """Handler that answers each subsampled plate with ``choose(name, size, subsample_size)``.

    ``choose_indices`` may return None to leave a plate alone.

    :param weights: by plate, what each of its rows weighs besides; plates that are not named weigh
        all rows alike.
    """

    def __init__(
        self,
        fn: Any,
        choose_indices: Callable[[str, int, int], Any],
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        self.choose_indices, self.weights = choose_indices, weights or {}
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size, subsample_size = msg["args"]
            rows = self.choose_indices(msg["name"], size, subsample_size)
            if rows is not None:
                # The very same object, by which `IssuedRows` knows them again.
                msg["value"] = rows if isinstance(rows, Array) else jnp.asarray(rows)
                msg["args"] = (size, rows.shape[0])
        elif msg["type"] == "subsample" and is_row_array_or_proxy(msg["value"]):
            _subsample_row_array(msg)
        elif msg["type"] == "sample" and self.weights:
            for frame in msg["cond_indep_stack"]:
                if frame.name in self.weights:
                    if len(self.weights[frame.name]) != frame.size:
                        raise ValueError("As many weights as rows are needed.")
                    weight = jnp.asarray(self.weights[frame.name], jnp.result_type(float))
                    weight = weight.reshape(-1, *[1] * (-frame.dim - 1))
                    msg["scale"] = weight if msg["scale"] is None else msg["scale"] * weight


def _subsample_row_array(msg: Any) -> None:
    """Answer ``numpyro.subsample`` of an array whose rows are elsewhere, along its first axis."""
    data, event_dim = msg["value"], msg["kwargs"]["event_dim"]
    for plate in _PYRO_STACK:
        if isinstance(plate, numpyro.plate) and len(data.shape) == event_dim - plate.dim:
            if len(data) != plate.size:
                raise InvalidArgumentError(
                    f"The plate '{plate.name}' has size {plate.size}, but {data!r}, which is "
                    f"subsampled in it, has {len(data)} rows. Make the two agree."
                )
            msg["value"] = data[plate._indices]
            msg["type"] = "subsampled"  # so that the plate does not do it again
            return


class disable_validation(Messenger):
    """Handler that leaves out NumPyro's checks whether values of some sites lie in their support.

    Those that come from unconstrained space do, but for rounding; the checks are a sixth of the
    operations of a hierarchy's gradient.

    :param names: the sites.
    """

    def __init__(self, fn: Any, names: frozenset[str]) -> None:
        self.names = names
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["fn"] = _without_validation(msg["fn"])


def _without_validation(fn: Any) -> Any:
    """A distribution, and all that it is made of, without checks of values."""
    if not isinstance(fn, dist.Distribution):
        return fn
    fn = copy.copy(fn)
    fn._validate_args = False
    for name, part in vars(fn).items():
        if isinstance(part, dist.Distribution):
            setattr(fn, name, _without_validation(part))
    return fn


class detect_rng_use(Messenger):
    """Handler that notes whether the model asks for a random key."""

    has_requested_key = False

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "prng_key" and msg["value"] is None:
            self.has_requested_key = True
            msg["value"] = random.key(0)


class ConditionedModel:
    """A block's model in Gibbs, which takes of other blocks' values the rows of its minibatch.

    Gibbs hands on values for all rows of the sites inside of a subsampled plate.

    :param model: the model as Gibbs has wrapped it.
    """

    def __init__(self, model: Callable) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = frozenset(kwargs.get(GIBBS_SITES_KWARG, ()))
        return _subsample_given_values(self.model, names)(*args, **kwargs)


class _subsample_given_values(Messenger):
    """Handler that takes, of values that are given for all rows, those of the plates' rows.

    :param names: the sites whose values are given so.
    """

    def __init__(self, fn: Any, names: frozenset[str]) -> None:
        self.names = names
        self.plate_indices: dict[str, tuple[int, Any]] = {}
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] != "sample" or msg["name"] not in self.names:
            return
        for frame in msg["cond_indep_stack"]:
            size, rows = self.plate_indices.get(frame.name, (frame.size, None))
            axis = frame.dim - msg["fn"].event_dim
            shape = jnp.shape(msg["value"])
            if frame.size < size and len(shape) >= -axis and shape[axis] == size:
                msg["value"] = jnp.take(msg["value"], rows, axis)

    def postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "plate":  # answered by now
            self.plate_indices[msg["name"]] = msg["args"][0], msg["value"]


class FullDataModel:
    """The model with every plate at its full size: what ArviZ, ``log_likelihood`` and
    :class:`~numpyro.infer.gibbs.DiscreteGibbs` should see.

    Two views of one model are equal, so that blocks of ``Gibbs`` can share it.

    :param model: a NumPyro model.
    """

    def __init__(self, model: Callable) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for host in Arguments(args, kwargs).host_arrays:
            num_bytes = len(host) * max(host.row_size, 1) * host.dtype.itemsize
            if num_bytes > _MAX_FULL_DATA_BYTES:
                raise InvalidArgumentError(
                    f"The model on all rows would load all of {host!r}, {num_bytes / 1e9:.1f} GB, "
                    "into memory: numpyro_sgmcmc.log_likelihood and "
                    "numpyro_sgmcmc.posterior_predictive go by chunks, as does "
                    "numpyro_sgmcmc.to_arviz in place of az.from_numpyro."
                )
        args, kwargs = as_jax_arrays((args, kwargs))
        run = set_subsample_indices(self.model, lambda name, size, _: jnp.arange(size))
        try:
            return run(*args, **kwargs)
        except AssertionError as error:
            if str(error):
                raise
            # A bare assertion is NumPyro's for a site without a value and without a key.
            raise InvalidArgumentError(
                "A latent site of the model has no value, and there is no random key to draw one. "
                "Draws hold latent sites inside the subsampled plate with collect_local_sites=True "
                "alone; without them there is no log likelihood, and ArviZ can be told so: "
                "az.from_numpyro(mcmc, log_likelihood=False)."
            ) from error

    def with_subsample_indices(self, indices: Indices) -> Callable:
        """The model on some rows of each plate.

        :param indices: rows by plate name; plates that are not named are left alone.
        """
        return set_subsample_indices(self.model, lambda name, size, _: indices.get(name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FullDataModel) and self.model == other.model

    def __hash__(self) -> int:
        return hash((FullDataModel, self.model))


def trace_prior(model: Callable, indices: Indices, arguments: Arguments) -> dict[str, Any]:
    """The model's trace on some rows of each plate, its latent sites drawn from the prior."""
    arguments = arguments.map_arrays(jnp.asarray)
    seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
    chosen = set_subsample_indices(seeded, lambda name, size, _: indices.get(name))
    return trace(chosen).get_trace(*arguments.args, **arguments.kwargs)


def sample_prior_values(
    model: Callable, arguments: Arguments, names: list[str]
) -> dict[str, Array]:
    """Draws from the prior for the named sites, on all rows, as values to condition on."""
    args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
    seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
    chosen = set_subsample_indices(seeded, lambda name, size, _: jnp.arange(size))
    with validation_enabled(False):  # what is wrong with a draw is told where a chain starts at it
        seen = trace(chosen).get_trace(*args, **kwargs)
    return {name: jnp.asarray(seen[name]["value"]) for name in names}
