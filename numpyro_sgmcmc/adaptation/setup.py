"""The order of the warm-up's shared part, with everything it decides.

1. Adam, then second-order steps, from the start to the mode region.
2. Curvature there gives the whitening, and a few full gradients the anchor.
3. Two rounds of pilot chains move both to the posterior's own mean and covariance.
4. At the pilot's draws the gradient's noise is measured: for both estimators, for random rows and
   for blocks. It decides estimator, minibatches and step size.

Work over all rows happens a fixed number of times. The arrays are concrete, so that Python may
branch; nothing here runs under ``vmap`` or ``pmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.adaptation.pilot import PILOT_FRICTION, run_pilot
from numpyro_sgmcmc.adaptation.step_size import (
    MAX_NUM_STEPS,
    choose_num_steps,
    choose_step_size,
)
from numpyro_sgmcmc.adaptation.warm_start import (
    approach,
    descend,
    draw_subset,
    full_gradient,
    refine,
)
from numpyro_sgmcmc.adaptation.whitening import (
    factor_from_curvature,
    factor_from_draws,
    largest_curvature,
    symmetric_root,
)
from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.coordinates import Coordinates
from numpyro_sgmcmc.dynamics import Dynamics, Underdamped
from numpyro_sgmcmc.full_data import Indices
from numpyro_sgmcmc.gradients import Anchored, gradient_variance
from numpyro_sgmcmc.minibatch import STREAMS
from numpyro_sgmcmc.model import Target
from numpyro_sgmcmc.notices import notify

__all__ = ["Adaptation", "Settings", "adapt"]

_WORK = 1e8  # rows a minibatch times coordinates times steps: bounds each stage's cost
_PILOT_CHAINS = 16
_PILOT_STEP_SIZE = 0.3
_CLEARLY_NOISIER = 1.5


@dataclass(frozen=True)
class Settings:
    """
    - **dynamics** - the SDE.
    - **largest_step_size** - step size that suits a whitened Gaussian and an exact gradient.
    - **step_size** - the user's step size, or None to choose it.
    - **num_steps** - the user's steps an iteration, or None to choose.
    - **gradient** - ``"plain"``, ``"control_variate"`` or ``"auto"``.
    - **minibatch** - ``"iid"``, ``"epoch"``, ``"blocks"`` or ``"auto"``.
    - **inverse_mass_matrix** - the user's, shape ``(d,)`` or ``(d, d)``, or None to adapt it.
    - **is_dense** - whether the adapted one is dense.
    - **mask** - blocks of a structured dense one, shape ``(d, d)``, or None.
    - **target_bias** - allowed relative error of posterior sds.
    """

    dynamics: Dynamics
    largest_step_size: float
    step_size: float | None
    num_steps: int | None
    gradient: str
    minibatch: str
    inverse_mass_matrix: Array | None
    is_dense: bool
    mask: Array | None
    target_bias: float


class Adaptation(NamedTuple):
    """
    - **anchored** - coordinates and the full gradient at their anchor.
    - **step_size** - step size.
    - **num_steps** - steps an iteration.
    - **estimator** - ``"plain"`` or ``"control_variate"``.
    - **minibatch** - ``"iid"``, ``"epoch"`` or ``"blocks"``.
    """

    anchored: Anchored
    step_size: float
    num_steps: int
    estimator: str
    minibatch: str


def adapt(
    target: Target,
    arguments: Arguments,
    settings: Settings,
    position: Array,
    progress: Callable[[str], None] = lambda stage: None,
) -> Adaptation:
    """Find the mode region, whitening, anchor, estimator, minibatches and step size.

    :param target: the posterior.
    :param arguments: the model's arguments, concrete.
    :param settings: what the user has fixed.
    :param position: a first position, finite, shape ``(d,)``.
    :param progress: called with the name of each stage before it starts.
    :return: what all chains share.
    """
    keys = iter(random.split(random.key(0), 12))
    batch = sum(p.subsample_size for p in target.plates) or 1
    affordable = int(_WORK / (batch * target.dim))

    progress("warm start")
    num_steps = max(100, min(1000, affordable))
    position = descend(target, arguments, position, next(keys), num_steps)
    subset = draw_subset(target, next(keys))
    position = refine(target, arguments, position, subset)

    progress("curvature")
    factor = _first_factor(target, arguments, settings, position, subset, next(keys))
    coordinates = Coordinates(position, factor)
    position, gradient = approach(target, arguments, coordinates)
    anchored = Anchored(Coordinates(position, factor), gradient)
    if not bool(jnp.isfinite(anchored.anchor_gradient).all()):
        raise RuntimeError(
            "The gradient on all rows is not finite near the mode. "
            + target.explain(anchored.coordinates.anchor, arguments)
        )

    estimator = _first_estimator(target, settings)
    draws = None
    num_steps = min(2000, affordable)
    if num_steps >= 200:
        for _ in range(2):
            progress("pilot chains")
            curvature = _curvature(target, arguments, anchored, None, subset, next(keys))
            pilot = Underdamped(PILOT_FRICTION)
            variance = _variance(target, arguments, anchored, None, estimator, "iid", next(keys))
            step_size, _ = choose_step_size(
                pilot, _PILOT_STEP_SIZE, variance, curvature, 0.1, pilot.relaxation_time
            )
            draws = run_pilot(
                target,
                arguments,
                anchored,
                jnp.asarray(step_size, target.dtype),
                next(keys),
                estimator,
                _PILOT_CHAINS,
                num_steps // 10 * 10,
            )
            moved = _move(target, arguments, settings, anchored, draws, step_size)
            if moved is None:
                draws = None
                break
            anchored, draws = moved

    progress("gradient noise")
    return _decide(target, arguments, settings, anchored, draws, subset, estimator, next(keys))


def _first_factor(
    target: Target,
    arguments: Arguments,
    settings: Settings,
    position: Array,
    subset: Indices | None,
    rng_key: Array,
) -> Array:
    matrix = settings.inverse_mass_matrix
    if matrix is None:
        return factor_from_curvature(
            target, arguments, position, settings.mask, subset, rng_key, settings.is_dense
        )
    return symmetric_root(matrix) if matrix.ndim == 2 else jnp.sqrt(matrix)


def _first_estimator(target: Target, settings: Settings) -> str:
    """The user's estimator, or the one to start from."""
    if settings.gradient != "auto":
        return settings.gradient
    return "control_variate" if target.plates and not target.is_randomized else "plain"


def _move(
    target: Target,
    arguments: Arguments,
    settings: Settings,
    anchored: Anchored,
    draws: Array,
    step_size: float,
) -> tuple[Anchored, Array] | None:
    """Anchor and whitening at the draws' mean and covariance, and the draws as seen from there."""
    coordinates = anchored.coordinates
    alive = jnp.isfinite(draws).all((1, 2)) & (jnp.abs(draws).max((1, 2)) < 1e3)
    if not int(alive.sum()) > _PILOT_CHAINS // 2:
        return None
    draws = draws[alive]
    flat = draws.reshape(-1, target.dim)
    factor = coordinates.factor
    if settings.inverse_mass_matrix is None:
        relaxation_time = Underdamped(PILOT_FRICTION).relaxation_time
        time = draws.shape[0] * draws.shape[1] * 5 * step_size
        factor = factor_from_draws(
            factor, flat, time / relaxation_time, settings.mask, settings.is_dense
        )
    mean = flat.mean(0)
    moved = Coordinates(coordinates.position(mean), factor)
    gradient = full_gradient(target, arguments, moved.anchor)
    if not bool(jnp.isfinite(gradient).all() & jnp.isfinite(factor).all()):
        return None
    last = jax.vmap(lambda q: moved.whiten(coordinates.push(q)))(draws[:, -1] - mean)
    return Anchored(moved, gradient), last


def _curvature(
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    draws: Array | None,
    subset: Indices | None,
    rng_key: Array,
) -> float:
    """Largest whitened curvature at the anchor and at one typical point."""
    if target.is_randomized:
        return 1.0
    origin = jnp.zeros(target.dim, target.dtype)
    points = [origin] if draws is None else [origin, draws[0]]
    values = [
        float(largest_curvature(target, arguments, anchored.coordinates, q, subset, rng_key))
        for q in points
    ]
    finite = [v for v in values if jnp.isfinite(v)]
    return max(finite, default=1.0)


def _variance(
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    draws: Array | None,
    estimator: str,
    minibatch: str,
    rng_key: Array,
) -> float:
    """Variance of the whitened gradient's noise at typical positions."""
    if not target.plates:
        return 0.0
    position_key, row_key = random.split(rng_key)
    batch = sum(p.subsample_size for p in target.plates)
    few = batch * target.dim > 10**6
    num_positions, num_minibatches = (4, 4) if few else (_PILOT_CHAINS, 32)
    if draws is None:
        shape = (num_positions, target.dim)
        draws = random.normal(position_key, shape, target.dtype)
    draws = draws[:num_positions]
    total = draws.shape[0] * num_minibatches
    rows = {}
    for p, key in zip(target.plates, random.split(row_key, len(target.plates)), strict=True):
        stream = STREAMS[minibatch](p.size, p.subsample_size)
        # Minibatches of one epoch repel each other; one from each of many epochs do not.
        inits = jax.vmap(stream.init)(random.split(key, total))
        _, indices = jax.vmap(lambda s, k, stream=stream: stream.draw(s, k, 1))(
            inits, random.split(random.fold_in(key, 1), total)
        )
        rows[p.name] = indices.reshape(draws.shape[0], num_minibatches, p.subsample_size)
    return float(_jitted_variance(estimator, target, arguments, anchored, draws, rows))


_jitted_variance = jax.jit(gradient_variance, static_argnames=("estimator", "target"))


def _decide(
    target: Target,
    arguments: Arguments,
    settings: Settings,
    anchored: Anchored,
    draws: Array | None,
    subset: Indices | None,
    estimator: str,
    rng_key: Array,
) -> Adaptation:
    """Estimator, minibatches and step size from the noise measured at typical positions."""
    dynamics = settings.dynamics
    noise_key, curvature_key = random.split(rng_key)

    def noise(estimator: str, minibatch: str) -> float:
        return _variance(target, arguments, anchored, draws, estimator, minibatch, noise_key)

    random_rows = noise(estimator, "iid")
    if settings.gradient == "auto" and estimator == "control_variate":
        plain = noise("plain", "iid")
        # A second gradient a step must buy more than a smaller step would.
        if plain < 2.0 * random_rows:
            estimator, random_rows = "plain", plain

    minibatch, variance = settings.minibatch, random_rows
    if minibatch in ("auto", "blocks") and target.plates:
        in_blocks = noise(estimator, "blocks")
        if minibatch == "auto":
            minibatch = "blocks"
            if in_blocks > _CLEARLY_NOISIER * random_rows:
                minibatch = "epoch"
                notify(
                    f"Blocks of consecutive rows are {in_blocks / random_rows:.1f} times as noisy "
                    "as random rows: the rows are sorted by something that matters. Random rows "
                    "are used, which cost more; shuffle the data once, for example with "
                    "X, y = X[i], y[i] for i = numpy.random.permutation(len(y))."
                )
        variance = in_blocks if minibatch == "blocks" else random_rows
    elif minibatch == "auto":
        minibatch = "epoch"

    relaxation_time = dynamics.relaxation_time
    step_size = settings.step_size
    if step_size is None:
        curvature = _curvature(target, arguments, anchored, draws, subset, curvature_key)
        step_size, inflation = choose_step_size(
            dynamics,
            settings.largest_step_size,
            variance,
            curvature,
            settings.target_bias,
            relaxation_time,
        )
        if inflation > 2.0 * settings.target_bias:
            notify(
                f"The gradient's noise is predicted to make posterior sds about "
                f"{100 * (jnp.sqrt(1 + inflation) - 1):.0f} % too wide at {MAX_NUM_STEPS} steps a "
                "draw. Use a larger subsample_size"
                + (", or gradient='control_variate'." if estimator == "plain" else ".")
            )
    num_steps = settings.num_steps or choose_num_steps(relaxation_time, step_size)
    return Adaptation(anchored, step_size, num_steps, estimator, minibatch)

