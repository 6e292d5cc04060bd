"""Public import path of the ready-made metrics."""

from numpyro_sgmcmc.sampling.metrics import *  # noqa: F403
from numpyro_sgmcmc.sampling.metrics import __all__ as __all__
