"""Compiled programs that are forgotten before the system has no room for more.

JAX keeps what it has compiled: here some ten programs for each model, and with every kernel, NUTS
too, one for each run. Each holds mappings of memory, of which Linux allows a process 65,530. The
next compilation ends it then, after some eighty models or two hundred runs.
"""

from __future__ import annotations

import gc
from pathlib import Path

import jax

__all__ = ["clear_compilation_cache_if_full"]

_MEMORY_MAPS_FILE, _MAX_MEMORY_MAPS_FILE = (
    Path("/proc/self/maps"),
    Path("/proc/sys/vm/max_map_count"),
)
_MAX_MEMORY_MAPS_FRACTION = (
    0.5  # of those allowed: one fit takes hundreds, what else the process does some more
)


def clear_compilation_cache_if_full() -> None:
    """Have JAX forget all that it has compiled, where mappings run short; elsewhere do nothing.

    What is used again is compiled again.
    """
    if not (_MEMORY_MAPS_FILE.exists() and _MAX_MEMORY_MAPS_FILE.exists()):
        return  # not Linux
    if _MEMORY_MAPS_FILE.read_bytes().count(b"\n") > _MAX_MEMORY_MAPS_FRACTION * int(
        _MAX_MEMORY_MAPS_FILE.read_text()
    ):
        jax.clear_caches()
        gc.collect()
