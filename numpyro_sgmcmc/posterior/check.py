"""What of a model cannot be sampled by minibatches, each refused where it belongs."""

from __future__ import annotations

from numpyro_sgmcmc.posterior.facts import Facts
from numpyro_sgmcmc.posterior.locals.checks import refuse_local_sites
from numpyro_sgmcmc.posterior.row_checks import refuse_what_is_no_sum_over_rows
from numpyro_sgmcmc.posterior.sites import refuse_global_sites, warn_of_missing_plates
from numpyro_sgmcmc.posterior.spread_checks import refuse_spread_rows

__all__ = ["check"]


def check(facts: Facts) -> None:
    """Refuse a model that cannot be sampled; from what its statements show to what its rows do.

    :raises ValueError: naming the site, plate or argument that stands in the way.
    """
    refuse_local_sites(facts)
    refuse_global_sites(facts)
    refuse_spread_rows(facts)
    refuse_what_is_no_sum_over_rows(facts)
    warn_of_missing_plates(facts)
