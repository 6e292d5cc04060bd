"""Streams of minibatch indices: O(B) time and O(1) memory a step, whatever the number of rows.

Three ways to visit the rows of one plate, all unbiased; a new one is a file here and a name in
:data:`MINIBATCH_SCHEMES`.
"""

from numpyro_sgmcmc.data.minibatch.base import StreamState, Subsampling
from numpyro_sgmcmc.data.minibatch.blocks import ContiguousSubsampling
from numpyro_sgmcmc.data.minibatch.epoch import ShuffledSubsampling
from numpyro_sgmcmc.data.minibatch.iid import IIDSubsampling
from numpyro_sgmcmc.data.minibatch.streams import (
    init_stream,
    sample_independent_minibatch,
    sample_minibatches,
)

__all__ = [
    "SUBSAMPLINGS",
    "ContiguousSubsampling",
    "IIDSubsampling",
    "ShuffledSubsampling",
    "StreamState",
    "Subsampling",
    "init_stream",
    "sample_independent_minibatch",
    "sample_minibatches",
]

SUBSAMPLINGS: dict[str, Subsampling] = {
    s.name: s for s in (IIDSubsampling(), ShuffledSubsampling(), ContiguousSubsampling())
}
"""The schemes by the names of a kernel's ``minibatch`` argument."""
