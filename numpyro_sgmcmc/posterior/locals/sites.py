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

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import biject_to
from numpyro.handlers import substitute

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate

__all__ = [
    "AllRows",
    "LocalSite",
    "LocalSites",
    "SomeRows",
    "bind",
    "collected_sites",
    "local_sites",
    "with_locals",
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
    """

    plate: Plate
    moved: tuple[LocalSite, ...]
    drawn: tuple[LocalSite, ...]
    gibbs_fn: Callable | None = None

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


def bind(
    local: LocalSites | None, run: Callable, z: Any, indices: Indices, arguments: Arguments
) -> tuple[Callable, Any, Arguments]:
    """The model, the unconstrained values and the arguments with the local values in place.

    :param local: the local sites, or None where the model has none.
    :param run: the model, its plates answered.
    :param z: unconstrained values of the global sites.
    :param indices: the rows.
    :param arguments: the model's arguments, with local values or without; zeros then.
    """
    if local is None:
        return run, z, arguments
    kwargs = dict(arguments.kwargs)
    values = kwargs.pop(_KWARG, None)
    if values is None:
        values = local.zeros()
    if isinstance(values, AllRows):
        values = values.take(jnp.asarray(indices[local.plate.name]))
    if local.drawn:
        run = substitute(run, data=local.laid_out(values.drawn))
    return run, {**z, **local.unravel(values.position)}, Arguments(arguments.args, kwargs)


def local_sites(
    seen: Mapping[str, Any],
    plates: Mapping[str, Plate],
    gibbs_fn: Callable | None,
    gibbs_sites: Sequence[str],
) -> LocalSites | None:
    """The latent sites inside the subsampled plate, or None where there are none.

    :param seen: the trace of the model on a minibatch.
    :param plates: the subsampled plates.
    :param gibbs_fn: the user's function for some of the sites, or None.
    :param gibbs_sites: names of those sites.
    :raises ValueError: naming the site that cannot be sampled, with the way out.
    """
    moved: list[LocalSite] = []
    drawn: list[LocalSite] = []
    for name, site in seen.items():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        frames = [f for f in site["cond_indep_stack"] if f.name in plates]
        if not frames:
            continue
        found = _local_site(site, frames, name in gibbs_sites)
        (drawn if name in gibbs_sites else moved).append(found)
    missing = sorted(set(gibbs_sites) - {s.name for s in drawn})
    if missing:
        raise ValueError(
            f"`gibbs_sites` names '{missing[0]}', which is no latent site inside a subsampled "
            "plate: give it the names of such sites, or the plate a subsample_size."
        )
    if not moved and not drawn:
        return None
    name = (moved or drawn)[0].name
    if len(plates) > 1:
        raise ValueError(
            f"Site '{name}' has a latent value for each row of a subsampled plate, and the model "
            f"has the subsampled plates {sorted(plates)}: leave one of them its subsample_size."
        )
    (plate,) = plates.values()
    if not any(
        s["type"] == "sample"
        and s["is_observed"]
        and any(f.name == plate.name for f in s["cond_indep_stack"])
        for s in seen.values()
    ):
        raise ValueError(
            f"Site '{name}' is latent inside the subsampled plate '{plate.name}', in which "
            "nothing is observed: pass its data (is an argument None?), or move it out of the "
            "plate."
        )
    return LocalSites(plate, tuple(moved), tuple(drawn), gibbs_fn)


def _local_site(site: Any, frames: Sequence[Any], is_drawn: bool) -> LocalSite:
    """One site, checked to be one that its rows can be moved one by one."""
    name, fn, value = site["name"], site["fn"], site["value"]
    where = f"Site '{name}' inside the subsampled plate '{frames[0].name}'"
    if len(frames) > 1:
        others = " and ".join(f"'{f.name}'" for f in frames)
        raise ValueError(
            f"Site '{name}' has a latent value for each pair of rows of the subsampled plates "
            f"{others}: give one of them no subsample_size, or integrate the site out."
        )
    axis = len(fn.batch_shape) + frames[0].dim
    if is_drawn:
        shape = jnp.shape(value)
        one = shape[:axis] + shape[axis + 1 :]
        return LocalSite(name, one, axis, fn.support, jnp.result_type(value))
    if fn.support.is_discrete:
        raise ValueError(
            f"{where} is discrete and has no data: pass them (is an argument None?), or if it is "
            f"latent, draw it by gibbs_fn=... and gibbs_sites=['{name}'], or sum it out of the "
            "likelihood."
        )
    base = fn
    while isinstance(base, (dist.ExpandedDistribution, dist.Independent)):
        base = base.base_dist  # a plate expands what it encloses
    if isinstance(base, dist.Delta):
        raise ValueError(f"{where} has a delta distribution; use numpyro.deterministic instead.")
    if not all(isinstance(x, (int, float)) for x in jax.tree.leaves(fn.support)):
        raise ValueError(
            f"{where} has a support that depends on other values: rescale it, for example a "
            "Uniform(0, 1) times its upper bound."
        )
    try:
        shape = jnp.shape(biject_to(fn.support).inv(value))
    except NotImplementedError as error:
        raise ValueError(
            f"{where} has support {fn.support}, which has no map to unconstrained space: "
            "reparametrise the site, or draw it by gibbs_fn."
        ) from error
    return LocalSite(
        name, shape[:axis] + shape[axis + 1 :], axis, fn.support, jnp.result_type(value)
    )


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
        raise ValueError(
            f"`collect_locals` names '{unknown[0]}', but the latent sites inside the subsampled "
            f"plate are {sorted(local.names)}."
        )
    return tuple(collect_locals)
