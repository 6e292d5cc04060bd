"""Where the ready-made metrics may be imported from."""

from numpyro_sgmcmc.sampling.metrics import *  # noqa: F403
from numpyro_sgmcmc.sampling.metrics import __all__ as __all__
