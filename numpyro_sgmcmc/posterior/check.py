"""What of a model cannot be sampled by minibatches, each refused where it belongs."""

from __future__ import annotations

from numpyro_sgmcmc.posterior.facts import ModelTrace
from numpyro_sgmcmc.posterior.locals.checks import check_local_sites
from numpyro_sgmcmc.posterior.row_checks import check_factorises_over_plates
from numpyro_sgmcmc.posterior.sites import check_global_sites, warn_missing_plates
from numpyro_sgmcmc.posterior.spread_checks import check_sharding

__all__ = ["validate_model"]


def validate_model(model_trace: ModelTrace) -> None:
    """Refuse a model that cannot be sampled; from what its statements show to what its rows do.

    :raises ValueError: naming the site, plate or argument that stands in the way.
    """
    check_local_sites(model_trace)
    check_global_sites(model_trace)
    check_sharding(model_trace)
    check_factorises_over_plates(model_trace)
    warn_missing_plates(model_trace)
