"""The warm-up of a run whose settings are all given."""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.data.minibatch import IIDSubsampling
from numpyro_sgmcmc.posterior.estimators import MinibatchGradient
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.context import WarmupContext
from numpyro_sgmcmc.warmup.factors import factorize_covariance
from numpyro_sgmcmc.warmup.moment_source import (
    MONITOR_INTERVAL,
    choose_separate_gradients,
    choose_step_gradients,
)
from numpyro_sgmcmc.warmup.noise import NO_NOISE, UNKNOWN_NOISE
from numpyro_sgmcmc.warmup.settings import Adaptation

__all__ = ["build_adaptation_from_settings"]


def build_adaptation_from_settings(context: WarmupContext, position: np.ndarray) -> Adaptation:
    """What the user has given, about a first position: no optimum, no chains, no measurement."""
    settings, target = context.settings, context.potential
    matrix, estimator, scheme = (
        settings.inverse_mass_matrix,
        settings.estimator,
        settings.subsampling,
    )
    step_size, num_steps = settings.step_size, settings.num_steps
    if not target.plates:  # all rows at every step
        estimator, scheme = MinibatchGradient(), scheme or IIDSubsampling()
    assert matrix is not None
    assert estimator is not None
    assert scheme is not None
    assert step_size is not None
    assert num_steps is not None
    whitening = Preconditioner(position, factorize_covariance(matrix), np.zeros_like(position))
    if estimator.needs_reference:
        whitening = context.build_preconditioner(position, factorize_covariance(matrix))
        context.check_finite_gradient(whitening)
        whitening = context.add_reference_hessian(whitening, estimator)
    # Gradients apart are worth their cost only where it is spread over many steps.
    is_free = scheme.is_independent or num_steps < MONITOR_INTERVAL
    apart = choose_separate_gradients({estimator: 0.0}, estimator, is_free, num_steps)
    return Adaptation(
        preconditioner=whitening.cast(target.dtype),
        step_size=step_size,
        num_steps=num_steps,
        estimator=estimator,
        subsampling=scheme,
        gradient_noise_covariance=None,
        noise_stats=UNKNOWN_NOISE if target.plates else NO_NOISE,
        monitor_gradients=apart or choose_step_gradients(target.dim, num_steps),
        allowed_variance_inflation=None,
        relaxation_time=float(settings.dynamics.relaxation_time(step_size)),
        uses_init_strategy=not settings.has_init_params,
    )
