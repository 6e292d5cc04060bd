r"""Which sites of a model are local to the rows of its subsampled plate, and their values.

The values of all rows travel with the model's arguments, so that whatever asks for the potential
on some rows gets it given those rows' own values.

The user's draws of local values: one call for values that stay, sweeps for such as are dropped.

Values that nobody keeps are drawn anew for each minibatch, from their prior given the globals and
by so many calls of ``gibbs_fn``. With the sweeps long enough they come from
:math:`p(z_S \mid \theta, y_S)`, and the mean of
:math:`\nabla_\theta \log p(y_S, z_S \mid \theta)` is the gradient of the likelihood with z
integrated out (Fisher's identity): to the sampler the potential is one that draws random keys.

Reference: Patterson and Teh (2013), *Stochastic gradient Riemannian Langevin dynamics on the
probability simplex*, section 4.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import constrain_fn

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.trace import ModelTrace

__all__ = [
    "BatchLocalValues",
    "LocalLatents",
    "LocalSite",
    "LocalValues",
    "call_gibbs_fn",
    "find_local_latents",
    "get_gibbs_fn_keywords",
    "insert_local_values",
    "resample_local_values",
    "select_collected_sites",
    "with_local_values",
    "without_local_values",
]

_LOCAL_VALUES_KWARG = "_local_values"


class LocalValues(NamedTuple):
    """Local values of all rows.

    - **hmc_position** - unconstrained values of the sites that are moved by their gradient, those of
      a row side by side, shape ``(N, k)``.
    - **gibbs_values** - values of the sites that ``gibbs_fn`` draws, ``(N, ...)`` each, by name.
    """

    hmc_position: Array
    gibbs_values: dict[str, Array]

    def take(self, indices: Array) -> BatchLocalValues:
        """The values of some rows."""
        return BatchLocalValues(
            self.hmc_position[indices], {k: v[indices] for k, v in self.gibbs_values.items()}
        )

    def put(self, indices: Array, values: BatchLocalValues) -> LocalValues:
        """With other values for some rows, each of which comes once."""
        return LocalValues(
            self.hmc_position.at[indices].set(values.hmc_position, unique_indices=True),
            {
                k: v.at[indices].set(values.gibbs_values[k], unique_indices=True)
                for k, v in self.gibbs_values.items()
            },
        )


class BatchLocalValues(NamedTuple):
    """The same for the rows of one evaluation of the model, in their order."""

    hmc_position: Array
    gibbs_values: dict[str, Array]


class LocalSite(NamedTuple):
    """
    - **name** - name of the site.
    - **shape** - shape of one row's value: unconstrained where a gradient moves it.
    - **axis** - the axis of the rows in the values that the model sees.
    - **support** - the distribution's support.
    - **dtype** - type of the values.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    support: Any
    dtype: Any

    @property
    def size(self) -> int:
        """Numbers a row."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class LocalLatents:
    """
    - **plate** - the subsampled plate.
    - **hmc_sites** - the sites that are moved by their gradient.
    - **gibbs_sites** - the sites that ``gibbs_fn`` draws.
    - **gibbs_fn** - the user's function, or None.
    - **num_sweeps** - how often it is called for values that are dropped after a step; None for values
      that stay.
    """

    plate: Plate
    hmc_sites: tuple[LocalSite, ...]
    gibbs_sites: tuple[LocalSite, ...]
    gibbs_fn: Callable | None = None
    num_sweeps: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all local sites."""
        return tuple(s.name for s in (*self.hmc_sites, *self.gibbs_sites))

    @property
    def hmc_dim(self) -> int:
        """Numbers that the gradient moves in a row."""
        return sum(s.size for s in self.hmc_sites)

    def unravel(self, hmc_position: Array) -> dict[str, Array]:
        """Unconstrained values as the model sees them, from shape ``(rows, width)``."""
        ends = accumulate(s.size for s in self.hmc_sites)
        return {
            s.name: jnp.moveaxis(
                hmc_position[:, end - s.size : end].reshape(len(hmc_position), *s.shape), 0, s.axis
            )
            for s, end in zip(self.hmc_sites, ends, strict=True)
        }

    def to_model_layout(self, gibbs_values: Mapping[str, Array]) -> dict[str, Array]:
        """Drawn values as the model sees them, from shapes ``(rows, ...)``."""
        return {s.name: jnp.moveaxis(gibbs_values[s.name], 0, s.axis) for s in self.gibbs_sites}

    def to_unconstrained_sites(self, values: LocalValues | BatchLocalValues) -> dict[str, Array]:
        """All local sites by name as the model sees them, unconstrained where they are moved."""
        return {**self.unravel(values.hmc_position), **self.to_model_layout(values.gibbs_values)}

    def constrain(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Local sites among ``values``, constrained."""
        supports = {s.name: s.support for s in self.hmc_sites}
        return {
            k: biject_to(supports[k])(values[k]) if k in supports else values[k]
            for k in self.names
            if k in values
        }

    def make_zero_values(self) -> LocalValues:
        """Values for all rows that are nothing in particular."""
        num = self.plate.size
        return LocalValues(
            jnp.zeros((num, self.hmc_dim)),
            {s.name: jnp.zeros((num, *s.shape), s.dtype) for s in self.gibbs_sites},
        )


def with_local_values(arguments: Arguments, values: LocalValues | BatchLocalValues) -> Arguments:
    """The arguments, with local values for the model: of all rows, or of those it is asked for."""
    return Arguments(arguments.args, {**arguments.kwargs, _LOCAL_VALUES_KWARG: values})


def without_local_values(arguments: Arguments) -> Arguments:
    """The arguments as the user gave them."""
    kwargs = {k: v for k, v in arguments.kwargs.items() if k != _LOCAL_VALUES_KWARG}
    return Arguments(arguments.args, kwargs)


def insert_local_values(
    local_latents: LocalLatents | None,
    model: Callable,
    z: Any,
    indices: Indices,
    arguments: Arguments,
) -> tuple[Callable, Any, Arguments]:
    """The model, the unconstrained values and the arguments with the local values in place.

    :param local_latents: the local sites, or None where the model has none.
    :param model: the model, its plates answered.
    :param z: unconstrained values of the global sites.
    :param indices: the rows.
    :param arguments: the model's arguments, with local values or without; some of the prior then.
    """
    if local_latents is None:
        return model, z, arguments
    values = arguments.kwargs.get(_LOCAL_VALUES_KWARG)
    arguments = without_local_values(arguments)
    rows = jnp.asarray(indices[local_latents.plate.name])
    if values is None:
        values = _default_local_values(local_latents, model, z, len(rows), arguments)
    if isinstance(values, LocalValues):
        values = values.take(rows)
    if local_latents.gibbs_sites:
        model = substitute(model, data=local_latents.to_model_layout(values.gibbs_values))
    return model, {**z, **local_latents.unravel(values.hmc_position)}, arguments


def _default_local_values(
    local_latents: LocalLatents, model: Callable, z: Any, num_rows: int, arguments: Arguments
) -> BatchLocalValues:
    """Values for rows of which nobody has said any: in the middle of unconstrained space, and where
    ``gibbs_fn`` draws them, which may be in a support that zeros are outside of, from their prior.
    """
    position = jnp.zeros((num_rows, local_latents.hmc_dim))
    if not local_latents.gibbs_sites:
        return BatchLocalValues(position, {})
    model, (args, kwargs) = seed(model, random.key(0)), (arguments.args, arguments.kwargs)
    others = constrain_fn(model, args, kwargs, {**z, **local_latents.unravel(position)})
    found = trace(substitute(model, data=lax.stop_gradient(others))).get_trace(*args, **kwargs)
    return BatchLocalValues(
        position,
        {
            s.name: jnp.moveaxis(found[s.name]["value"], s.axis, 0)
            for s in local_latents.gibbs_sites
        },
    )


def find_local_latents(model_trace: ModelTrace) -> LocalLatents | None:
    """The latent sites inside the subsampled plate, or None where there are none."""
    moved: list[LocalSite] = []
    drawn: list[LocalSite] = []
    for site in model_trace.sample_sites:
        if site.is_observed or not site.plate_frames:
            continue
        is_drawn = site.name in model_trace.gibbs.site_names
        axis = len(site.batch_shape) + site.plate_frames[0].dim
        shape = site.shape if is_drawn else site.unconstrained_shape
        assert shape is not None
        of_row = shape[:axis] + shape[axis + 1 :]
        found = LocalSite(site.name, of_row, axis, site.support, site.dtype)
        (drawn if is_drawn else moved).append(found)
    if not moved and not drawn:
        return None
    (plate,) = model_trace.plates.values()
    return LocalLatents(
        plate, tuple(moved), tuple(drawn), model_trace.gibbs.gibbs_fn, model_trace.gibbs.num_sweeps
    )


def select_collected_sites(
    local_latents: LocalLatents | None, collect_local_sites: bool | Sequence[str]
) -> tuple[str, ...]:
    """Names of the local sites that draws hold."""
    if local_latents is None or not collect_local_sites:
        return ()
    if isinstance(collect_local_sites, bool):
        return local_latents.names
    unknown = sorted(set(collect_local_sites) - set(local_latents.names))
    if unknown:
        raise InvalidArgumentError(
            f"`collect_local_sites` names '{unknown[0]}', but the latent sites inside the subsampled "
            f"plate are {sorted(local_latents.names)}."
        )
    return tuple(collect_local_sites)


def resample_local_values(
    model: Callable,
    local_latents: LocalLatents,
    other_values: Mapping[str, Array],
    indices: Array | np.ndarray,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """Values of the sites that ``gibbs_fn`` draws, from nothing, as the model sees them.

    :param model: the model, its plates answered by the rows.
    :param other_values: values of all other latent sites.
    :param indices: the very rows that the plate answers with.
    """
    assert local_latents.num_sweeps is not None
    prior_key, sweep_key = random.split(rng_key)
    drawn = trace(substitute(seed(model, prior_key), data=dict(other_values))).get_trace(
        *arguments.args, **arguments.kwargs
    )
    first = {s.name: jnp.asarray(drawn[s.name]["value"]) for s in local_latents.gibbs_sites}

    def sweep(values: dict[str, Array], key: Array) -> tuple[dict[str, Array], None]:
        return call_gibbs_fn(local_latents, values, other_values, indices, arguments, key), None

    return lax.scan(sweep, first, random.split(sweep_key, local_latents.num_sweeps))[0]


def get_gibbs_fn_keywords(gibbs_fn: Callable) -> tuple[str, ...]:
    """The keywords of a ``gibbs_fn``: the model's arguments are among them where it takes them."""
    always = ("rng_key", "gibbs_sites", "hmc_sites", "rows")
    try:
        taken = inspect.signature(gibbs_fn).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return always
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return always + tuple(k for k in ("model_args", "model_kwargs") if takes_any or k in taken)


def call_gibbs_fn(
    local_latents: LocalLatents,
    current_values: dict[str, Array],
    other_values: Mapping[str, Array],
    indices: Array | np.ndarray,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """What ``gibbs_fn`` draws for some rows, checked for its names, shapes and types.

    :param current_values: the values before, as the model sees them.
    :param other_values: values of all other latent sites.
    :raises ValueError: for a function that returns something else.
    """
    assert local_latents.gibbs_fn is not None
    arguments = without_local_values(arguments)
    keywords = {
        "rng_key": rng_key,
        "gibbs_sites": current_values,
        "hmc_sites": other_values,
        "rows": indices,
        "model_args": arguments.args,
        "model_kwargs": arguments.kwargs,
    }
    found = local_latents.gibbs_fn(
        **{k: keywords[k] for k in get_gibbs_fn_keywords(local_latents.gibbs_fn)}
    )
    if not isinstance(found, Mapping):
        raise InvalidArgumentError(
            f"`gibbs_fn` returns {type(found).__name__}, but must return a dict of new values of "
            f"{sorted(current_values)}."
        )
    expected = {k: v.shape for k, v in current_values.items()}
    shapes = {k: jnp.shape(v) for k, v in found.items()}
    if shapes != expected:
        raise InvalidArgumentError(
            f"`gibbs_fn` returns values of shapes {shapes}, but must return {expected}: a value "
            "for each row of the minibatch at each of `gibbs_sites`."
        )
    for s in local_latents.gibbs_sites:
        if not np.can_cast(jnp.result_type(found[s.name]), s.dtype, "same_kind"):
            raise InvalidArgumentError(
                f"`gibbs_fn` returns {jnp.result_type(found[s.name])} values of '{s.name}', whose "
                f"type is {s.dtype}: it must return draws (not probabilities)."
            )
    return {s.name: jnp.asarray(found[s.name]).astype(s.dtype) for s in local_latents.gibbs_sites}
