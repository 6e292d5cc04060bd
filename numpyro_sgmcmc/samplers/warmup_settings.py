"""What the warm-up is told: a kernel's options, made to fit the posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from numpyro_sgmcmc.chain.moments import FULL_MAX_DIM
from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.minibatch import MINIBATCH_SCHEMES
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.estimators import ESTIMATORS
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.samplers.mass_matrix import mass_matrix, mass_matrix_mask
from numpyro_sgmcmc.samplers.options import Options
from numpyro_sgmcmc.samplers.schedules import first_step_size
from numpyro_sgmcmc.warmup import Settings

__all__ = ["warmup_settings"]

_DENSE_MAX_DIM = 100


def warmup_settings(
    options: Options,
    target: Target,
    dynamics: Dynamics,
    scheme: str,
    locate: Callable[[Whitening], Dynamics],
    has_start: bool,
    is_by_site: bool,
) -> Settings:
    """The settings of the warm-up.

    An option that has a field of its name there is passed on as it is; the others are made here.

    :raises ValueError: for a mass matrix or a schedule that does not fit.
    """
    sites = () if target.sites is None else target.sites
    mask = mass_matrix_mask(options.dense_mass, sites, target.dim)
    matrix = mass_matrix(options.inverse_mass_matrix, sites, target.dim)
    if matrix is None and not options.adapt_mass_matrix:
        matrix = np.ones(target.dim)
    is_dense = options.dense_mass
    # Moments of chains in different coordinates are put together: see the bias report.
    most_dense = FULL_MAX_DIM if options.chains_in_modes else _DENSE_MAX_DIM
    if options.chains_in_modes and is_dense and target.dim > most_dense:
        raise Refusal(
            f"`chains_in_modes` has a diagonal mass matrix above {most_dense} parameters, but "
            f"`dense_mass` is set and there are {target.dim}: leave one of them out."
        )
    made: dict[str, Any] = {
        "dynamics": dynamics,
        "scheme": scheme,
        "locate": locate,
        "step_size": _fixed_step_size(options, dynamics.schemes[scheme].step_size),
        "is_step_fixed": not callable(options.step_size) and options.traced_step_size is None,
        "gradient": ESTIMATORS.get(options.gradient),
        "minibatch": MINIBATCH_SCHEMES.get(options.minibatch),
        "inverse_mass_matrix": matrix,
        "is_dense": target.dim <= most_dense if is_dense is None else bool(is_dense),
        "is_by_site": is_by_site and not is_dense,
        "mask": mask,
        "has_start": has_start,
        "has_region": True,
    }
    names = {field.name for field in fields(Settings)} - made.keys()
    return Settings(**made, **{name: getattr(options, name) for name in names})


def _fixed_step_size(options: Options, of_scheme: float) -> float | None:
    """The step size where it is not to be chosen: the user's, or the scheme's own."""
    if callable(options.step_size):
        return first_step_size(options.step_size)
    is_unknown = options.step_size is None and not options.adapt_step_size
    if is_unknown or options.traced_step_size is not None:
        return of_scheme
    return options.step_size
