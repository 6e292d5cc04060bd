"""Where the step-size schedules may be imported from."""

from numpyro_sgmcmc.sampling.schedules import *  # noqa: F403
from numpyro_sgmcmc.sampling.schedules import __all__ as __all__
