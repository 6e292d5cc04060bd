"""Products that determine how each shared parameter couples with effects and other parameters.

Most shared parameters, such as the mean of one effect or its scale, couple with one effect of each
group. The Hessian's columns of parameters that couple with different coordinates follow from one
product, with the sum of their unit vectors (graph coloring of a sparse Hessian; Curtis, Powell and
Reid, 1974). The means of 20 effects, their scales, and the SD of the rows need three products, not
41.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, BlockArrowMatrix, SharedStrips


@dataclass(frozen=True)
class SharedColoring:
    """Colors of the shared parameters: those of one color couple with different coordinates.

    - **is_coupled** - whether a parameter couples with an effect, in any group, shape ``(s, k)``.
    - **has_entry** - where the corner is not zero, shape ``(s, s)``.
    - **colors** - number of the color of each parameter, shape ``(s,)``.
    """

    layout: BlockArrowLayout
    is_coupled: np.ndarray
    has_entry: np.ndarray
    colors: np.ndarray

    @classmethod
    def find(cls, hessian: BlockArrowMatrix) -> SharedColoring:
        """Return colors by the Hessian's entries that are not zero."""
        strips, num_shared = hessian.strips, hessian.layout.num_shared
        is_nonzero = (strips.values != 0.0).any(-1)
        is_coupled = np.zeros((num_shared, is_nonzero.shape[1]), bool)
        every = np.arange(num_shared)[:, None]
        columns = every if strips.columns is None else np.array(strips.columns)
        is_coupled[columns, np.arange(is_nonzero.shape[1])] = is_nonzero
        has_entry = hessian.corner != 0.0
        rows = np.concatenate([is_coupled, has_entry], axis=1)
        colors = np.zeros(num_shared, int)
        used: list[np.ndarray] = []  # rows of each color
        for j, row in enumerate(rows):
            free = (color for color, other in enumerate(used) if not (other & row).any())
            colors[j] = next(free, len(used))
            if colors[j] == len(used):
                used.append(row)
            else:
                used[colors[j]] = used[colors[j]] | row
        return cls(hessian.layout, is_coupled, has_entry, colors)

    @property
    def num_colors(self) -> int:
        """Number of colors, each of which needs a product."""
        return int(self.colors.max()) + 1

    def sum_by_color(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over the parameters of each color, shape ``(colors, ...)``."""
        return np.eye(self.num_colors)[:, self.colors] @ values

    def make_probes(self) -> np.ndarray:
        """Return the vectors whose products :meth:`recover` takes, shape ``(colors, d)``."""
        shared = self.sum_by_color(np.eye(self.layout.num_shared))
        shape = self.num_colors, self.layout.effects_per_group, self.layout.num_groups
        return np.asarray(self.layout.merge(np.zeros(shape, np.float32), shared))

    def recover(self, products: np.ndarray) -> tuple[SharedStrips, np.ndarray]:
        """Return strips and corner from the Hessian's products with the probes."""
        effects, shared = self.layout.split(products)
        corner = np.where(self.has_entry, shared[self.colors], 0.0)
        columns = SharedStrips.choose_columns(~self.is_coupled)
        places = np.arange(len(self.is_coupled))[:, None] if columns is None else np.array(columns)
        effect = np.arange(effects.shape[1])
        values = effects[self.colors[places], effect]
        values *= self.is_coupled[places, effect][..., None]
        return SharedStrips(values, columns, len(corner)), (corner + corner.T) / 2.0
