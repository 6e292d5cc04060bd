"""Refused: rows that are spread over devices in a way in which no minibatch can be had of them."""

from __future__ import annotations

from collections.abc import Sequence

from numpyro_sgmcmc.checks import InvalidArgumentError, warn_user
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.sharded import ShardedArray
from numpyro_sgmcmc.data.shards import Shards
from numpyro_sgmcmc.data.stand_ins import RowLookup
from numpyro_sgmcmc.posterior.facts import ModelTrace

__all__ = ["check_sharding"]


def check_sharding(model_trace: ModelTrace) -> None:
    """Refuse arrays that are not spread alike or not indexed by a plate, and local sites with them;
    warn of minibatches that do not divide among the devices.

    :raises ValueError: naming array, plate or site.
    """
    if model_trace.shards is None:
        return
    _check_equal_sharding(model_trace.arguments.sharded_arrays, model_trace.row_lookups)
    warned = set()
    for array, name in model_trace.row_lookups:
        plate = model_trace.unsharded_plates[name]
        if not isinstance(array, ShardedArray):
            raise InvalidArgumentError(
                f"The plate '{name}' indexes {array!r} and rows that are spread over devices: "
                "make all of its arrays ShardedArrays, or ShardedArray(HostArray(rows)) where rows "
                "stay on the host."
            )
        _check_shard_sizes(plate, model_trace.shards)
        num, rows = len(model_trace.shards.rows_per_shard), model_trace.plates[name].subsample_size
        if rows != plate.subsample_size and name not in warned:
            warned.add(name)
            warn_user(
                f"Plate '{name}' has subsample_size={plate.subsample_size}, which does not "
                f"divide among {num} devices: each takes {rows // num} rows, {rows} in all."
            )
    local = [s.name for s in model_trace.sample_sites if s.plate_frames and not s.is_observed]
    if local:
        moved = [name for name in local if name not in model_trace.gibbs.site_names]
        raise InvalidArgumentError(
            f"Site '{(moved or local)[0]}' is latent inside the subsampled plate, which is not "
            "supported where rows are spread over devices: pass arrays that all devices have."
        )


def _check_equal_sharding(arrays: Sequence[ShardedArray], row_lookups: Sequence[RowLookup]) -> None:
    """Refuse arrays that no plate indexes, and such as are spread in different ways."""
    for array in arrays:
        if not any(found.array is array for found in row_lookups):
            raise InvalidArgumentError(
                f"{array!r} is not indexed by a subsampled plate's indices: index it, or pass an "
                "array that all devices have."
            )
    if len({x.shards for x in arrays}) > 1:
        listed = ", ".join(f"{x!r} with {list(x.shards.rows_per_shard)} rows" for x in arrays)
        raise InvalidArgumentError(
            f"All arrays that are spread over devices must be so in the same way, but there are "
            f"{listed} over meshes {[x.shards.mesh.shape for x in arrays]}."
        )


def _check_shard_sizes(plate: Plate, shards: Shards) -> None:
    """Refuse a minibatch of which a device has more rows to give than it holds."""
    num, least = len(shards.rows_per_shard), min(shards.rows_per_shard)
    part = plate.with_shards(shards).subsample_size_per_shard
    if part > least:
        raise InvalidArgumentError(
            f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, {part} rows for each "
            f"of {num} devices, but one of them has only {least}: use at most {num * least}."
        )
