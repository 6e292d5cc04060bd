"""What was weighed when the warm-up chose: kept for who asks why."""

from __future__ import annotations

from typing import NamedTuple

from numpyro_sgmcmc.warmup.noise import NoiseStatsBySubsampling

__all__ = ["MAX_CONVERGED_R_HAT", "AdaptationTrace"]


MAX_CONVERGED_R_HAT = 1.1
"""R-hat of pilot chains that have forgotten their starts."""


class AdaptationTrace(NamedTuple):
    """
    - **step_size_limits** - how the step size came to be: by the name of what limits it, how long a step
      may be after that; ``"integrator"``, ``"curvature"``, ``"noise"``, ``"settings"``, ``"means"`` in
      this order, or ``"given"`` alone.
    - **max_curvature** - the largest whitened curvature at typical positions.
    - **noise_variances** - variance of the gradient's noise, mean over whitened coordinates, by estimator: of
      random rows and of blocks; empty where every step reads all rows.
    - **variance_inflation** - relative excess of posterior variances predicted at the step size chosen.
    - **mean_bias** - by how many sds a mean is predicted to be off at most.
    - **num_pilot_windows** - of pilot chains; 0 where there were none of this kind.
    - **r_hat** - of these chains in the last window, the largest of any coordinate.
    """

    step_size_limits: dict[str, float]
    max_curvature: float
    noise_variances: dict[str, tuple[float, float]]
    variance_inflation: float
    mean_bias: float
    num_pilot_windows: int = 0
    r_hat: float = 1.0

    @staticmethod
    def tabulate_noise_variances(
        noise_by_subsampling: NoiseStatsBySubsampling,
    ) -> dict[str, tuple[float, float]]:
        """The noise of each estimator by its name, of random rows and of blocks."""
        return {
            e.name: (of.mean_variance, noise_by_subsampling.contiguous[e].mean_variance)
            for e, of in noise_by_subsampling.iid.items()
        }
