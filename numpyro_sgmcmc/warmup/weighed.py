"""What was weighed when the warm-up chose: kept for who asks why."""

from __future__ import annotations

from typing import NamedTuple

from numpyro_sgmcmc.warmup.noise import NoiseOfRows

__all__ = ["AGREE", "Weighed"]


AGREE = 1.1
"""R-hat of pilot chains that have forgotten their starts."""


class Weighed(NamedTuple):
    """
    - **step_sizes** - how the step size came to be: by the name of what limits it, how long a step
      may be after that; ``"scheme"``, ``"curvature"``, ``"noise"``, ``"settings"``, ``"means"`` in
      this order, or ``"given"`` alone.
    - **curvature** - the largest whitened curvature at typical positions.
    - **noise** - variance of the gradient's noise, mean over whitened coordinates, by estimator: of
      random rows and of blocks; empty where every step reads all rows.
    - **excess** - relative excess of posterior variances predicted at the step size chosen.
    - **shift** - by how many sds a mean is predicted to be off at most.
    - **windows** - of pilot chains; 0 where there were none of this kind.
    - **r_hat** - of these chains in the last window, the largest of any coordinate.
    """

    step_sizes: dict[str, float]
    curvature: float
    noise: dict[str, tuple[float, float]]
    excess: float
    shift: float
    windows: int = 0
    r_hat: float = 1.0

    @staticmethod
    def variances(noise: NoiseOfRows) -> dict[str, tuple[float, float]]:
        """The noise of each estimator by its name, of random rows and of blocks."""
        return {e.name: (of.mean, noise.blocks[e].mean) for e, of in noise.random.items()}
