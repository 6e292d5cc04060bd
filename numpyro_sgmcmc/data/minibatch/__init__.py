"""Streams of minibatch indices: O(B) time and O(1) memory a step, whatever the number of rows.

Three ways to visit the rows of one plate, all unbiased; a new one is a file here and a name in
:data:`MINIBATCH_SCHEMES`.
"""

from numpyro_sgmcmc.data.minibatch.base import MinibatchScheme, StreamState
from numpyro_sgmcmc.data.minibatch.blocks import Blocks
from numpyro_sgmcmc.data.minibatch.epoch import Epoch
from numpyro_sgmcmc.data.minibatch.iid import IID
from numpyro_sgmcmc.data.minibatch.streams import (
    draw_independent,
    draw_minibatches,
    start_stream,
)

__all__ = [
    "IID",
    "MINIBATCH_SCHEMES",
    "Blocks",
    "Epoch",
    "MinibatchScheme",
    "StreamState",
    "draw_independent",
    "draw_minibatches",
    "start_stream",
]

MINIBATCH_SCHEMES: dict[str, MinibatchScheme] = {s.name: s for s in (IID(), Epoch(), Blocks())}
"""The schemes by the names of a kernel's ``minibatch`` argument."""
