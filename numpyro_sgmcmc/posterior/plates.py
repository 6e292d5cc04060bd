"""The subsampled plates of a model, beside the arrays that their rows index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.data.sharded import ShardedArray, Shards
from numpyro_sgmcmc.data.stand_ins import Lookup
from numpyro_sgmcmc.posterior.dataflow import row_lookups

__all__ = ["check_row_lengths", "plate_groups", "shards_of", "spread_plate"]


def plate_groups(seen: dict[str, Any], plates: dict[str, Plate]) -> tuple[tuple[Plate, ...], ...]:
    """The plates, those that enclose a common site together."""
    groups = [{name} for name in plates]
    for site in seen.values():
        met = {f.name for f in site.get("cond_indep_stack", ()) if f.name in plates}
        joined = [g for g in groups if g & met]
        if len(joined) > 1:
            groups = [g for g in groups if not g & met] + [set().union(*joined)]
    return tuple(tuple(plates[name] for name in plates if name in g) for g in groups)


def shards_of(arrays: list[ShardedArray], lookups: Iterable[Lookup]) -> Shards | None:
    """Which device holds which rows, the same for all arrays that are spread over devices."""
    if not arrays:
        return None
    for array in arrays:
        if not any(lookup.array is array for lookup in lookups):
            raise ValueError(
                f"{array!r} is not indexed by a subsampled plate's indices: index it, or pass an "
                "array that all devices have."
            )
    shards = {x.shards for x in arrays}
    if len(shards) > 1:
        listed = ", ".join(f"{x!r} with {list(x.shards.counts)} rows" for x in arrays)
        raise ValueError(
            f"All arrays that are spread over devices must be so in the same way, but there are "
            f"{listed} over meshes {[x.shards.mesh.shape for x in arrays]}."
        )
    return shards.pop()


def spread_plate(plate: Plate, array: Any, shards: Shards) -> Plate:
    """A plate whose rows are spread over devices, each with an equal part of a minibatch."""
    if not isinstance(array, ShardedArray):
        raise ValueError(
            f"The plate '{plate.name}' indexes {array!r} and rows that are spread over devices: "
            "make all of its arrays ShardedArrays."
        )
    num = len(shards.counts)
    part = -(-plate.subsample_size // num)
    if part > min(shards.counts):
        raise ValueError(
            f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, {part} rows for each "
            f"of {num} devices, but one of them has only {min(shards.counts)}: use at most "
            f"{num * min(shards.counts)}."
        )
    if num * part != plate.subsample_size and plate.shards is None:
        notify(
            f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, which does not "
            f"divide among {num} devices: each takes {part} rows, {num * part} in all."
        )
    return plate._replace(subsample_size=num * part, shards=shards)


def check_row_lengths(
    model: Callable,
    fn: Callable[[Indices, Arguments], Array],
    plates: dict[str, Plate],
    arguments: Arguments,
    lookups: Iterable[Lookup],
) -> None:
    """Whether every array that a plate's indices look up has the plate's number of rows."""
    if not plates:
        return
    for host, plate in lookups:
        if len(host) != plates[plate].size:
            raise ValueError(
                f"The plate '{plate}' has size {plates[plate].size}, but {host!r}, which it "
                f"indexes, has {len(host)} rows. Make the two agree."
            )
    rows = {p.name: np.arange(p.subsample_size) for p in plates.values()}
    jaxpr = jax.make_jaxpr(fn)(rows, arguments).jaxpr
    by_var = dict(zip(jaxpr.invars, sorted(plates), strict=False))
    named = [name for name, _ in arguments.named_arrays(model)]
    arrays = dict(zip(jaxpr.invars[len(plates) :], named, strict=True))
    for plate, length, array in row_lookups(jaxpr, by_var, arrays):
        size = plates[plate].size
        if length != size:
            raise ValueError(
                f"The plate '{plate}' has size {size}, but {array or 'an array'} that it indexes "
                f"has {length} rows. Make the two agree: JAX would read other rows without a word."
            )
