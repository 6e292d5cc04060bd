"""Public import path of the step-size schedules and of averages weighted by step size."""

from numpyro_sgmcmc.sampling.schedules import *  # noqa: F403
from numpyro_sgmcmc.sampling.schedules import __all__ as __all__
