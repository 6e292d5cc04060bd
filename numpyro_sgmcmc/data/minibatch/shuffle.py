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

__all__ = ["GOLDEN", "epoch_key", "is_one", "mix", "permute", "wrap"]

GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio: multiples of it are spread evenly over the 32-bit words."""

_ROUNDS = 12


def mix(x: Array) -> Array:
    """A bijection of 32-bit words in which each input bit flips each output bit half the time.

    Constants: Chris Wellons, "Prospecting for hash functions" (2018), lowbias32.
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def epoch_key(seed: Array, epoch: Array) -> Array:
    """A 32-bit word for each epoch."""
    return mix(seed[0] ^ mix(epoch + seed[1]))


def is_one(size: Any) -> bool:
    """XLA on a CPU cannot compile a remainder by one."""
    return isinstance(size, int) and size == 1


def permute(key: Array, x: Array, size: Any) -> Array:
    """The image of the places ``x`` under the permutation of ``range(size)`` that ``key`` names."""
    if is_one(size):
        return jnp.zeros_like(x)
    n = jnp.asarray(size, jnp.uint32)
    x = x + key % n
    x = jnp.where(x >= n, x - n, x)
    for i in range(1, _ROUNDS + 1):
        round_key = mix(key + jnp.uint32((GOLDEN * i) & 0xFFFFFFFF))
        pivot = round_key % n
        partner = jnp.where(pivot >= x, pivot - x, pivot + (n - x))
        coin = mix(jnp.maximum(x, partner) * jnp.uint32(GOLDEN) + round_key) >> 31
        x = jnp.where(coin == 1, partner, x)
    return x


def wrap(x: Array, size: Any) -> Array:
    """``x mod size`` for ``x < 2 size``."""
    size = jnp.asarray(size, jnp.uint32)
    return jnp.where(x >= size, x - size, x)
