"""What the warm-up is told: a kernel's options, made to fit the posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from numpyro_sgmcmc.chain.moments import FULL_MOMENTS_MAX_DIM
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.minibatch import SUBSAMPLINGS
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.estimators import GRADIENT_ESTIMATORS
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.samplers.mass_matrix import build_mass_matrix_mask, parse_inverse_mass_matrix
from numpyro_sgmcmc.samplers.options import Options
from numpyro_sgmcmc.samplers.schedules import first_step_size
from numpyro_sgmcmc.warmup import WarmupSettings

__all__ = ["build_warmup_settings"]

_MAX_DENSE_MASS_MATRIX_DIM = 100


def build_warmup_settings(
    options: Options,
    potential: Potential,
    dynamics: Dynamics,
    integrator: str,
    bind_dynamics: Callable[[Preconditioner], Dynamics],
    has_init_params: bool,
    is_site_aligned: bool,
) -> WarmupSettings:
    """The settings of the warm-up.

    An option that has a field of its name there is passed on as it is; the others are made here.

    :raises ValueError: for a mass matrix or a schedule that does not fit.
    """
    sites = () if potential.sites is None else potential.sites
    mask = build_mass_matrix_mask(options.dense_mass, sites, potential.dim)
    matrix = parse_inverse_mass_matrix(options.inverse_mass_matrix, sites, potential.dim)
    if matrix is None and not options.adapt_mass_matrix:
        matrix = np.ones(potential.dim)
    is_dense = options.dense_mass
    # Moments of chains in different coordinates are put together: see the bias report.
    most_dense = FULL_MOMENTS_MAX_DIM if options.init_in_modes else _MAX_DENSE_MASS_MATRIX_DIM
    if options.init_in_modes and is_dense and potential.dim > most_dense:
        raise InvalidArgumentError(
            f"`init_in_modes` has a diagonal mass matrix above {most_dense} parameters, but "
            f"`dense_mass` is set and there are {potential.dim}: leave one of them out."
        )
    made: dict[str, Any] = {
        "dynamics": dynamics,
        "integrator": integrator,
        "bind_dynamics": bind_dynamics,
        "step_size": _get_fixed_step_size(options, dynamics.integrators[integrator].step_size),
        "has_constant_step_size": not callable(options.step_size) and options.traced_step_size is None,
        "estimator": GRADIENT_ESTIMATORS.get(options.gradient_estimator),
        "subsampling": SUBSAMPLINGS.get(options.subsampling),
        "inverse_mass_matrix": matrix,
        "is_dense": potential.dim <= most_dense if is_dense is None else bool(is_dense),
        "is_site_aligned": is_site_aligned and not is_dense,
        "mass_matrix_mask": mask,
        "has_init_params": has_init_params,
        "has_dominant_mode": True,
    }
    names = {field.name for field in fields(WarmupSettings)} - made.keys()
    return WarmupSettings(**made, **{name: getattr(options, name) for name in names})


def _get_fixed_step_size(options: Options, default_step_size: float) -> float | None:
    """The step size where it is not to be chosen: the user's, or the scheme's own."""
    if callable(options.step_size):
        return first_step_size(options.step_size)
    is_unknown = options.step_size is None and not options.adapt_step_size
    if is_unknown or options.traced_step_size is not None:
        return default_step_size
    return options.step_size
