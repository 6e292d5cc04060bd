"""Refused: rows that are spread over devices in a way in which no minibatch can be had of them."""

from __future__ import annotations

from collections.abc import Sequence

from numpyro_sgmcmc.checks import Refusal, notify
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.sharded import ShardedArray
from numpyro_sgmcmc.data.shards import Shards
from numpyro_sgmcmc.data.stand_ins import IndexedArray
from numpyro_sgmcmc.posterior.facts import Facts

__all__ = ["refuse_spread_rows"]


def refuse_spread_rows(facts: Facts) -> None:
    """Refuse arrays that are not spread alike or not indexed by a plate, and local sites with them;
    warn of minibatches that do not divide among the devices.

    :raises ValueError: naming array, plate or site.
    """
    if facts.shards is None:
        return
    _refuse_unlike(facts.arguments.sharded, facts.indexed)
    warned = set()
    for array, name in facts.indexed:
        plate = facts.stated_plates[name]
        if not isinstance(array, ShardedArray):
            raise Refusal(
                f"The plate '{name}' indexes {array!r} and rows that are spread over devices: "
                "make all of its arrays ShardedArrays, or ShardedArray(HostArray(rows)) where rows "
                "stay on the host."
            )
        _refuse_empty_parts(plate, facts.shards)
        num, rows = len(facts.shards.counts), facts.plates[name].subsample_size
        if rows != plate.subsample_size and name not in warned:
            warned.add(name)
            notify(
                f"Plate '{name}' has subsample_size={plate.subsample_size}, which does not "
                f"divide among {num} devices: each takes {rows // num} rows, {rows} in all."
            )
    local = [s.name for s in facts.samples if s.frames and not s.is_observed]
    if local:
        moved = [name for name in local if name not in facts.gibbs.sites]
        raise Refusal(
            f"Site '{(moved or local)[0]}' is latent inside the subsampled plate, which is not "
            "supported where rows are spread over devices: pass arrays that all devices have."
        )


def _refuse_unlike(arrays: Sequence[ShardedArray], indexed: Sequence[IndexedArray]) -> None:
    """Refuse arrays that no plate indexes, and such as are spread in different ways."""
    for array in arrays:
        if not any(found.array is array for found in indexed):
            raise Refusal(
                f"{array!r} is not indexed by a subsampled plate's indices: index it, or pass an "
                "array that all devices have."
            )
    if len({x.shards for x in arrays}) > 1:
        listed = ", ".join(f"{x!r} with {list(x.shards.counts)} rows" for x in arrays)
        raise Refusal(
            f"All arrays that are spread over devices must be so in the same way, but there are "
            f"{listed} over meshes {[x.shards.mesh.shape for x in arrays]}."
        )


def _refuse_empty_parts(plate: Plate, shards: Shards) -> None:
    """Refuse a minibatch of which a device has more rows to give than it holds."""
    num, least = len(shards.counts), min(shards.counts)
    part = plate.spread_over(shards).part
    if part > least:
        raise Refusal(
            f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, {part} rows for each "
            f"of {num} devices, but one of them has only {least}: use at most {num * least}."
        )
