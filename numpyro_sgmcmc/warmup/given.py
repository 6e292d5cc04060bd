"""The warm-up of a run whose settings are all given."""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.data.minibatch import IID
from numpyro_sgmcmc.posterior.estimators import Plain
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.factors import root
from numpyro_sgmcmc.warmup.moment_source import STEPS_APART, choose_source, own_gradients
from numpyro_sgmcmc.warmup.noise import NO_NOISE, UNKNOWN_NOISE
from numpyro_sgmcmc.warmup.settings import Adaptation

__all__ = ["as_given"]


def as_given(context: Context, position: np.ndarray) -> Adaptation:
    """What the user has given, about a first position: no optimum, no chains, no measurement."""
    settings, target = context.settings, context.target
    matrix, estimator, scheme = settings.inverse_mass_matrix, settings.gradient, settings.minibatch
    step_size, num_steps = settings.step_size, settings.num_steps
    if not target.plates:  # all rows at every step
        estimator, scheme = Plain(), scheme or IID()
    assert matrix is not None
    assert estimator is not None
    assert scheme is not None
    assert step_size is not None
    assert num_steps is not None
    whitening = Whitening(position, root(matrix), np.zeros_like(position))
    if estimator.has_anchor:
        whitening = context.whitening_at(position, root(matrix))
        context.refuse_infinite_gradient(whitening)
        whitening = context.with_hessian(whitening, estimator)
    # Gradients apart are worth their cost only where it is spread over many steps.
    is_free = scheme.is_independent or num_steps < STEPS_APART
    apart = choose_source({estimator: 0.0}, estimator, is_free, num_steps)
    return Adaptation(
        whitening=whitening.cast(target.dtype),
        step_size=step_size,
        num_steps=num_steps,
        estimator=estimator,
        minibatch=scheme,
        gradient_noise=None,
        noise=UNKNOWN_NOISE if target.plates else NO_NOISE,
        moment_source=apart or own_gradients(target.dim, num_steps),
        allowed_excess=None,
        relaxation_time=float(settings.dynamics.relaxation_time(step_size)),
        is_given=not settings.has_start,
    )
