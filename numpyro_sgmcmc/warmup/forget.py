"""Compiled programs that are forgotten before the system has no room for more.

JAX keeps what it has compiled: here some ten programs for each model, and with every kernel, NUTS
too, one for each run. Each holds mappings of memory, of which Linux allows a process 65,530. The
next compilation ends it then, after some eighty models or two hundred runs.
"""

from __future__ import annotations

import gc
from pathlib import Path

import jax

__all__ = ["forget_programs_if_many"]

_MAPPINGS, _ALLOWED = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_SHARE = 0.5  # of those allowed: one fit takes hundreds, what else the process does some more


def forget_programs_if_many() -> None:
    """Have JAX forget all that it has compiled, where mappings run short; elsewhere do nothing.

    What is used again is compiled again.
    """
    if not (_MAPPINGS.exists() and _ALLOWED.exists()):
        return  # not Linux
    if _MAPPINGS.read_bytes().count(b"\n") > _SHARE * int(_ALLOWED.read_text()):
        jax.clear_caches()
        gc.collect()
