"""The sampling kernels, and what they share: options, states, steps, schedules and metrics."""

from numpyro_sgmcmc.sampling.kernels import *  # noqa: F403
from numpyro_sgmcmc.sampling.kernels import __all__ as __all__
