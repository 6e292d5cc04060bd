"""What is decided from the noise measured at typical positions, and what the user is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.minibatch import MINIBATCH_SCHEMES, Blocks, Epoch, MinibatchScheme
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.compensation import GradientNoise
from numpyro_sgmcmc.posterior.estimators import ESTIMATORS, Estimator, Plain
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.advice import (
    SHIFT_SHARE,
    Limits,
    Shifts,
    is_thermostat_at_work,
    tell_of_sorted_rows,
    warn,
)
from numpyro_sgmcmc.warmup.context import Choice, Context
from numpyro_sgmcmc.warmup.discretisation import kick_excess
from numpyro_sgmcmc.warmup.given_step import warn_of_given_step
from numpyro_sgmcmc.warmup.measure import shift_by_noise, shift_by_spread
from numpyro_sgmcmc.warmup.modes import Mode
from numpyro_sgmcmc.warmup.moment_source import (
    STEPS_APART,
    MomentSource,
    choose_source,
    own_gradients,
)
from numpyro_sgmcmc.warmup.noise import Noise, NoiseOfRows, measure_covariance
from numpyro_sgmcmc.warmup.settings import Adaptation
from numpyro_sgmcmc.warmup.step_size import (
    MAX_NUM_STEPS,
    choose_num_steps,
    excess_by_noise,
    shorten_until_right,
    stiff_step_size,
)
from numpyro_sgmcmc.warmup.weighed import Weighed

__all__ = ["decide"]

_CLEARLY_NOISIER = 1.5
_FREE_NOISE = 0.025  # variance that noise adds at most, where it may depend on the position
_SURPRISE = 1.5  # times the predicted excess: less is no surprise


def decide(context: Context, first: Mode, others: Sequence[Mode] = ()) -> Adaptation:
    """Estimator, minibatches and step size from the noise measured at typical positions.

    :param first: the mode that decides.
    :param others: modes in which chains run as well: with the same estimator and minibatches, and
        steps that suit the narrowest.
    """
    adaptation = _decide(context, first.whitening, first.q)
    settings = context.settings
    context.fix(replace(settings, gradient=adaptation.estimator, minibatch=adaptation.minibatch))
    each = [adaptation, *(_decide(context, mode.whitening, mode.q) for mode in others)]
    context.fix(settings)
    return adaptation._replace(
        step_size=min(a.step_size for a in each),
        num_steps=max(a.num_steps for a in each),
        relaxation_time=max(a.relaxation_time for a in each),
        other_modes=tuple(a.whitening for a in each[1:]),
        weighed=adaptation.weighed
        and adaptation.weighed._replace(windows=len(first.trail), r_hat=first.r_hat),
    )


def _decide(context: Context, whitening: Whitening, q: np.ndarray) -> Adaptation:
    """What suits one mode.

    :param q: whitened positions from about it.
    """
    settings, target, dynamics = context.settings, context.target, context.settings.dynamics
    noise = _over_epochs(context, context.noise(whitening, q))
    curvature = context.curvature(whitening, q)
    largest = dynamics.schemes[settings.scheme].step_size
    random, blocks = (
        context.cheapest(dynamics, largest, of_rows, curvature, settings.target_bias)
        for of_rows in noise
    )
    scheme = _choose_minibatch(context, noise, random, blocks)
    estimator, step_size, inflation = blocks if scheme.is_consecutive else random
    own = noise.of(scheme)[estimator]
    by_noise = float(step_size)
    step_size, inflation = _step_size(context, whitening, own, step_size, inflation)
    limits = Limits(estimator, own, curvature, largest, Shifts.none(), float(step_size))
    shifts = _shifts(context, whitening, q, limits, scheme, float(step_size))
    limits = replace(limits, shifts=shifts)
    step_size = _until_means_stay(context, limits, step_size)
    step_sizes = _step_sizes(context, limits, by_noise, float(step_size))
    own = own._replace(per_epoch=0 if scheme.is_independent else _per_epoch(context))
    if own.per_epoch:
        inflation = min(inflation, own.inflation(dynamics, float(step_size)))
    relaxation_time = dynamics.relaxation_time(float(step_size), own.variance)
    num_steps = settings.num_steps or choose_num_steps(relaxation_time, step_size)
    warn(context, limits, scheme, float(step_size), num_steps, inflation)
    located = settings.locate(whitening.cast(target.dtype))
    suitable = partial(_suitable, context, limits, located, by_noise)
    warn_of_given_step(context, limits, located, float(inflation), suitable)
    cast = context.with_hessian(whitening, estimator).cast(target.dtype)
    gradient_noise = None
    if settings.noise_compensation and target.plates:
        gradient_noise = _gradient_noise(context, cast, q, estimator, float(step_size))
    at = _Chosen(estimator, scheme, float(step_size), num_steps)
    return Adaptation(
        whitening=cast,
        step_size=step_size,
        num_steps=num_steps,
        estimator=estimator,
        minibatch=scheme,
        gradient_noise=gradient_noise,
        noise=own,
        moment_source=_moment_source(context, whitening, q, noise.of(scheme), at),
        allowed_excess=_allowed_excess(context, inflation),
        relaxation_time=float(relaxation_time),
        has_region=settings.has_region,
        weighed=Weighed(
            step_sizes=step_sizes,
            curvature=curvature,
            noise=Weighed.variances(noise) if target.plates else {},
            excess=float(inflation),
            shift=shifts.at(float(step_size)),
        ),
    )


def _step_sizes(
    context: Context, limits: Limits, by_noise: float, step_size: float
) -> dict[str, float]:
    """How the step size came to be, by what limits it."""
    settings = context.settings
    if settings.step_size is not None:
        return {"given": step_size}
    return {
        "scheme": float(limits.longest),
        "curvature": float(stiff_step_size(settings.dynamics, limits.longest, limits.curvature)),
        "noise": by_noise,
        "settings": limits.start,
        "means": step_size,
    }


@dataclass(frozen=True)
class _Chosen:
    """With what the chains run."""

    estimator: Estimator
    scheme: MinibatchScheme
    step_size: float
    num_steps: int


def _choose_minibatch(
    context: Context, noise: NoiseOfRows, random: Choice, blocks: Choice
) -> MinibatchScheme:
    """How to draw rows: the user's way, or the cheapest that does no harm."""
    local, asked = context.target.locals, context.settings.minibatch
    if asked is not None:
        return asked
    if local is None:
        return _cheapest_minibatch(context, noise, random, blocks)
    size, batch = local.plate.size, local.plate.subsample_size
    # Where an epoch has a seam, a minibatch across it may hold a row twice.
    if not Epoch().has_distinct_rows(size, batch):
        return Blocks()
    chosen = _cheapest_minibatch(context, noise, random, blocks)
    # Independent minibatches may hold a row twice, too.
    return chosen if chosen.has_distinct_rows(size, batch) else Blocks()


def _cheapest_minibatch(
    context: Context, noise: NoiseOfRows, random: Choice, blocks: Choice
) -> MinibatchScheme:
    settings = context.settings
    estimator, longest, least = random
    # Over an epoch the noise of its minibatches cancels: it heats the momenta and not the
    # positions, which a thermostat would cool too far.
    if is_thermostat_at_work(context, noise.random[estimator], settings.step_size or longest):
        return MINIBATCH_SCHEMES["iid"]
    estimator, step_size, excess = blocks
    in_blocks, in_random = noise.blocks[estimator].mean, noise.random[estimator].mean
    # Noise that neither shortens steps nor widens more does no harm, and blocks are cheaper.
    is_wide = excess > max(2.0 * settings.target_bias, _CLEARLY_NOISIER * least)
    is_harmful = longest > step_size or is_wide
    if in_blocks > _CLEARLY_NOISIER * in_random and is_harmful:
        tell_of_sorted_rows(in_blocks / in_random)
        return Epoch()
    return Blocks()


def _step_size(
    context: Context, whitening: Whitening, noise: Noise, step_size: float, inflation: float
) -> tuple[float, float]:
    """The user's step size, or the one found, shortened where the SDE's settings are unusual."""
    settings = context.settings
    if settings.step_size is not None:
        given = settings.step_size, settings.noise_compensation
        return settings.step_size, excess_by_noise(settings.dynamics, noise, *given)
    located = settings.locate(whitening.cast(context.target.dtype))
    step_size, excess = _shortened(context, located, noise, step_size)
    return step_size, max(inflation, np.square(1.0 + excess) - 1.0)


def _shortened(
    context: Context, located: Dynamics, noise: Noise, step_size: float
) -> tuple[float, float]:
    """The step size where the SDE's settings are unusual, and the error of sds left at it."""
    settings = context.settings
    if located.has_default_settings:
        return step_size, 0.0
    heard = 0.0 if settings.noise_compensation else noise.mean
    return shorten_until_right(
        located, settings.scheme, step_size, context.target.dim, settings.target_bias, heard
    )


def _shifts(
    context: Context,
    whitening: Whitening,
    q: np.ndarray,
    limits: Limits,
    scheme: MinibatchScheme,
    step_size: float,
) -> Shifts:
    """How far noise and the step's own error are predicted to move the posterior's means."""
    settings, rng, probes = context.settings, context.rng, context.effort.probes
    is_unknown = context.target.locals is not None or not settings.has_region
    if is_unknown:
        return Shifts.none()
    by_noise = np.zeros(context.target.dim)
    if not settings.noise_compensation:
        excess = settings.dynamics.noise_inflation(1.0, step_size, limits.noise.varying)
        by_noise = shift_by_noise(
            context.rows, whitening, q, limits.estimator, scheme, excess, probes, rng
        )
    dynamics, integrator = settings.locate(whitening.cast(context.target.dtype)), settings.scheme
    # At a long step, where rounding is small beside it, and less by its order at shorter ones.
    order, longest = dynamics.schemes[integrator].order, limits.longest
    excess = kick_excess(dynamics, integrator, longest)
    by_step = np.zeros(context.target.dim)
    if excess != 0.0:
        by_step = shift_by_spread(context.rows, whitening, q, probes, rng)
    return Shifts(
        by_noise / step_size, by_step, lambda shorter: excess * (shorter / longest) ** order
    )


def _until_means_stay(context: Context, limits: Limits, step_size: float) -> float:
    """The step size, shortened where the posterior's means would be too far off; not the user's."""
    if context.settings.step_size is not None:
        return step_size
    return _longest(context, limits, step_size)


def _suitable(context: Context, limits: Limits, located: Dynamics, by_noise: float) -> float:
    """The step size that is chosen where none is given."""
    step_size, _ = _shortened(context, located, limits.noise, by_noise)
    return _longest(context, limits, step_size)


def _longest(context: Context, limits: Limits, step_size: float) -> float:
    """The longest step size up to this one at which the posterior's means stay."""
    settings = context.settings
    shortest = settings.dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    allowed = SHIFT_SHARE * settings.target_bias
    return limits.shifts.longest(step_size, min(step_size, shortest), allowed, times=1.0)


def _over_epochs(context: Context, noise: NoiseOfRows) -> NoiseOfRows:
    """The noise, with the minibatches over which it cancels, unless they are to be independent.

    Plain gradients have so much of it that their step size does not count on that.
    """
    asked = context.settings.minibatch
    if asked is not None and asked.is_independent:
        return noise
    per_epoch = _per_epoch(context)
    return NoiseOfRows(
        *(
            {e: n._replace(per_epoch=per_epoch if e.has_anchor else 0) for e, n in of.items()}
            for of in noise
        )
    )


def _per_epoch(context: Context) -> int:
    """Minibatches in an epoch; 0 without rows to choose from."""
    return max((p.per_epoch for p in context.rows.step_target.plates), default=0)


def _allowed_excess(context: Context, inflation: float) -> float | None:
    """Excess of temperature that is no reason for a shorter step."""
    if context.settings.step_size is not None:
        return None
    return max(2.0 * context.settings.target_bias, _SURPRISE * inflation)


def _moment_source(
    context: Context,
    whitening: Whitening,
    q: np.ndarray,
    noise: dict[Estimator, Noise],
    at: _Chosen,
) -> MomentSource:
    """Where the moments that tell the bias come from.

    :param noise: of the kind of rows with which the chains run.
    """
    dim, dynamics = context.target.dim, context.settings.dynamics
    estimator, num_steps = at.estimator, at.num_steps
    excess = dynamics.noise_inflation(noise[estimator].variance, at.step_size)
    # Where gradients apart cost much, a little dependence is let pass.
    free = _FREE_NOISE if num_steps >= STEPS_APART else 4.0 * _FREE_NOISE
    is_independent = at.scheme.is_independent or excess <= free
    if is_independent and noise[estimator].mean <= num_steps:
        return own_gradients(dim, num_steps)
    # The Hessian at the anchor is there only if the chain's own estimator needs it.
    kept = [e for e in noise if e == estimator or not e.needs_hessian]
    variances = {e: noise[e].mean for e in kept}
    if context.estimators == (Plain(),) and not context.target.is_randomized:
        without_hessian = tuple(e for e in ESTIMATORS.values() if not e.needs_hessian)
        kind = MINIBATCH_SCHEMES["blocks" if at.scheme.is_consecutive else "iid"]
        found = context.noise_of(whitening, q, without_hessian, kind)
        variances = {e: n.mean for e, n in found.items()}
    apart = choose_source(variances, estimator, is_independent, num_steps)
    return apart or own_gradients(dim, num_steps)


def _gradient_noise(
    context: Context, whitening: Whitening, q: np.ndarray, estimator: Estimator, step_size: float
) -> GradientNoise:
    """The covariance to compensate; says so where that is more than is injected."""
    target = context.target
    covariance = measure_covariance(
        context.rows.step_target,
        context.arguments,
        whitening,
        context.cast(q),
        context.rng,
        estimator,
        whitening.is_dense,
    )
    found = GradientNoise.of(jnp.asarray(covariance, target.dtype))
    shares = np.asarray(found.values) * context.settings.dynamics.noise_share(step_size)
    if (worst := shares.max()) > 1.0:
        notify(
            f"Gradient noise is up to {worst:.1f} times what the sampler injects at step size "
            f"{step_size:.3g}, so that it cannot be compensated in {(shares > 1.0).sum()} of "
            f"{target.dim} directions: posterior sds will be up to "
            f"{100 * (np.sqrt(worst) - 1):.0f} % too wide. Use a shorter step_size or a larger "
            "subsample_size."
        )
    return found
