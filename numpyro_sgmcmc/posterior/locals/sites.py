"""Which sites of a model are local to the rows of its subsampled plate, and their values.

The values of all rows travel with the model's arguments, so that whatever asks for the potential
on some rows gets it given those rows' own values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import constrain_fn

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.posterior.facts import Facts

__all__ = [
    "AllRows",
    "LocalSite",
    "LocalSites",
    "SomeRows",
    "collected_sites",
    "insert_locals",
    "local_sites",
    "with_locals",
    "without_locals",
]

_KWARG = "_local_values"


class AllRows(NamedTuple):
    """Local values of all rows.

    - **position** - unconstrained values of the sites that are moved by their gradient, those of
      a row side by side, shape ``(N, k)``.
    - **drawn** - values of the sites that ``gibbs_fn`` draws, ``(N, ...)`` each, by name.
    """

    position: Array
    drawn: dict[str, Array]

    def take(self, rows: Array) -> SomeRows:
        """The values of some rows."""
        return SomeRows(self.position[rows], {k: v[rows] for k, v in self.drawn.items()})

    def put(self, rows: Array, values: SomeRows) -> AllRows:
        """With other values for some rows, each of which comes once."""
        return AllRows(
            self.position.at[rows].set(values.position, unique_indices=True),
            {
                k: v.at[rows].set(values.drawn[k], unique_indices=True)
                for k, v in self.drawn.items()
            },
        )


class SomeRows(NamedTuple):
    """The same for the rows of one evaluation of the model, in their order."""

    position: Array
    drawn: dict[str, Array]


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
class LocalSites:
    """
    - **plate** - the subsampled plate.
    - **moved** - the sites that are moved by their gradient.
    - **drawn** - the sites that ``gibbs_fn`` draws.
    - **gibbs_fn** - the user's function, or None.
    - **sweeps** - how often it is called for values that are dropped after a step; None for values
      that stay.
    """

    plate: Plate
    moved: tuple[LocalSite, ...]
    drawn: tuple[LocalSite, ...]
    gibbs_fn: Callable | None = None
    sweeps: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all local sites."""
        return tuple(s.name for s in (*self.moved, *self.drawn))

    @property
    def width(self) -> int:
        """Numbers that the gradient moves in a row."""
        return sum(s.size for s in self.moved)

    def unravel(self, position: Array) -> dict[str, Array]:
        """Unconstrained values as the model sees them, from shape ``(rows, width)``."""
        ends = accumulate(s.size for s in self.moved)
        return {
            s.name: jnp.moveaxis(
                position[:, end - s.size : end].reshape(len(position), *s.shape), 0, s.axis
            )
            for s, end in zip(self.moved, ends, strict=True)
        }

    def laid_out(self, drawn: Mapping[str, Array]) -> dict[str, Array]:
        """Drawn values as the model sees them, from shapes ``(rows, ...)``."""
        return {s.name: jnp.moveaxis(drawn[s.name], 0, s.axis) for s in self.drawn}

    def unconstrained(self, values: AllRows | SomeRows) -> dict[str, Array]:
        """All local sites by name as the model sees them, unconstrained where they are moved."""
        return {**self.unravel(values.position), **self.laid_out(values.drawn)}

    def constrain(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Local sites among ``values``, constrained."""
        supports = {s.name: s.support for s in self.moved}
        return {
            k: biject_to(supports[k])(values[k]) if k in supports else values[k]
            for k in self.names
            if k in values
        }

    def zeros(self) -> AllRows:
        """Values for all rows that are nothing in particular."""
        num = self.plate.size
        return AllRows(
            jnp.zeros((num, self.width)),
            {s.name: jnp.zeros((num, *s.shape), s.dtype) for s in self.drawn},
        )


def with_locals(arguments: Arguments, values: AllRows | SomeRows) -> Arguments:
    """The arguments, with local values for the model: of all rows, or of those it is asked for."""
    return Arguments(arguments.args, {**arguments.kwargs, _KWARG: values})


def without_locals(arguments: Arguments) -> Arguments:
    """The arguments as the user gave them."""
    kwargs = {k: v for k, v in arguments.kwargs.items() if k != _KWARG}
    return Arguments(arguments.args, kwargs)


def insert_locals(
    local: LocalSites | None, run: Callable, z: Any, indices: Indices, arguments: Arguments
) -> tuple[Callable, Any, Arguments]:
    """The model, the unconstrained values and the arguments with the local values in place.

    :param local: the local sites, or None where the model has none.
    :param run: the model, its plates answered.
    :param z: unconstrained values of the global sites.
    :param indices: the rows.
    :param arguments: the model's arguments, with local values or without; some of the prior then.
    """
    if local is None:
        return run, z, arguments
    values = arguments.kwargs.get(_KWARG)
    arguments = without_locals(arguments)
    rows = jnp.asarray(indices[local.plate.name])
    if values is None:
        values = _by_prior(local, run, z, len(rows), arguments)
    if isinstance(values, AllRows):
        values = values.take(rows)
    if local.drawn:
        run = substitute(run, data=local.laid_out(values.drawn))
    return run, {**z, **local.unravel(values.position)}, arguments


def _by_prior(
    local: LocalSites, run: Callable, z: Any, num_rows: int, arguments: Arguments
) -> SomeRows:
    """Values for rows of which nobody has said any: in the middle of unconstrained space, and where
    ``gibbs_fn`` draws them, which may be in a support that zeros are outside of, from their prior.
    """
    position = jnp.zeros((num_rows, local.width))
    if not local.drawn:
        return SomeRows(position, {})
    run, (args, kwargs) = seed(run, random.key(0)), (arguments.args, arguments.kwargs)
    others = constrain_fn(run, args, kwargs, {**z, **local.unravel(position)})
    found = trace(substitute(run, data=lax.stop_gradient(others))).get_trace(*args, **kwargs)
    return SomeRows(
        position, {s.name: jnp.moveaxis(found[s.name]["value"], s.axis, 0) for s in local.drawn}
    )


def local_sites(facts: Facts) -> LocalSites | None:
    """The latent sites inside the subsampled plate, or None where there are none."""
    moved: list[LocalSite] = []
    drawn: list[LocalSite] = []
    for site in facts.samples:
        if site.is_observed or not site.frames:
            continue
        is_drawn = site.name in facts.gibbs.sites
        axis = len(site.batch_shape) + site.frames[0].dim
        shape = site.shape if is_drawn else site.free_shape
        assert shape is not None
        of_row = shape[:axis] + shape[axis + 1 :]
        found = LocalSite(site.name, of_row, axis, site.support, site.dtype)
        (drawn if is_drawn else moved).append(found)
    if not moved and not drawn:
        return None
    (plate,) = facts.plates.values()
    return LocalSites(plate, tuple(moved), tuple(drawn), facts.gibbs.fn, facts.gibbs.sweeps)


def collected_sites(
    local: LocalSites | None, collect_locals: bool | Sequence[str]
) -> tuple[str, ...]:
    """Names of the local sites that draws hold."""
    if local is None or not collect_locals:
        return ()
    if isinstance(collect_locals, bool):
        return local.names
    unknown = sorted(set(collect_locals) - set(local.names))
    if unknown:
        raise Refusal(
            f"`collect_locals` names '{unknown[0]}', but the latent sites inside the subsampled "
            f"plate are {sorted(local.names)}."
        )
    return tuple(collect_locals)
