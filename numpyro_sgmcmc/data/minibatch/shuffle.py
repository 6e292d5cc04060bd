"""Random permutations that are never stored: a place's image is computed when it is asked for.

The permutation is the swap-or-not shuffle (Hoang, Morris and Rogaway, 2012,
doi:10.1007/978-3-642-32009-5_1): in each round a place x is paired with K - x mod N, and a hash
of the pair decides whether the two swap. It is a bijection for any N, needs no loop of data-
dependent length, and after r rounds from a uniform offset two places are correlated by 2^-r.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

__all__ = [
    "GOLDEN_RATIO_UINT32",
    "epoch_seed",
    "hash_uint32",
    "is_static_one",
    "permute",
    "wrap_index",
]

GOLDEN_RATIO_UINT32 = 0x9E3779B9
"""2^32 over the golden ratio: multiples of it are spread evenly over the 32-bit words."""

_NUM_SHUFFLE_ROUNDS = 12


def hash_uint32(x: Array) -> Array:
    """A bijection of 32-bit words in which each input bit flips each output bit half the time.

    Constants: Chris Wellons, "Prospecting for hash functions" (2018), lowbias32.
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def epoch_seed(seed: Array, epoch: Array) -> Array:
    """A 32-bit word for each epoch."""
    return hash_uint32(seed[0] ^ hash_uint32(epoch + seed[1]))


def is_static_one(size: Any) -> bool:
    """XLA on a CPU cannot compile a remainder by one."""
    return isinstance(size, int) and size == 1


def permute(seed: Array, positions: Array, size: Any) -> Array:
    """The image of the places ``positions`` under the permutation of ``range(size)`` that ``seed`` names."""
    if is_static_one(size):
        return jnp.zeros_like(positions)
    n = jnp.asarray(size, jnp.uint32)
    positions = positions + seed % n
    positions = jnp.where(positions >= n, positions - n, positions)
    for i in range(1, _NUM_SHUFFLE_ROUNDS + 1):
        round_key = hash_uint32(seed + jnp.uint32((GOLDEN_RATIO_UINT32 * i) & 0xFFFFFFFF))
        pivot = round_key % n
        partner = jnp.where(pivot >= positions, pivot - positions, pivot + (n - positions))
        coin = (
            hash_uint32(
                jnp.maximum(positions, partner) * jnp.uint32(GOLDEN_RATIO_UINT32) + round_key
            )
            >> 31
        )
        positions = jnp.where(coin == 1, partner, positions)
    return positions


def wrap_index(x: Array, size: Any) -> Array:
    """``x mod size`` for ``x < 2 size``."""
    size = jnp.asarray(size, jnp.uint32)
    return jnp.where(x >= size, x - size, x)
