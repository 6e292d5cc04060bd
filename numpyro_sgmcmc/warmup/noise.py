"""The gradient's noise at typical positions: what decides whether the posterior is right."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import MinibatchScheme
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.estimators import Estimator, whitened_gradient
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.eager_potential import run_length

__all__ = [
    "NO_NOISE",
    "UNKNOWN_NOISE",
    "Noise",
    "NoiseOfRows",
    "draw_rows",
    "epoch_share",
    "measure_covariance",
]

_ROW_GRADIENTS = 2**22
_NEVER_CANCELLED = 0.1
"""Share of the effect of noise that grows with the distance from the anchor: in simulated epochs of
15 minibatches the variance was off by that, to the other side."""


class Noise(NamedTuple):
    """What the choice of the step size must know of the gradient's noise.

    - **variance** - its variance in the noisiest coordinate, or on average where too few
      minibatches were seen to tell.
    - **varying** - the share of it that differs from place to place, from 0 to 1: on average
      over coordinates, or in one that clearly differs more.
    - **mean** - its variance, mean over coordinates.
    - **per_epoch** - minibatches in an epoch over which their noise cancels; 0 for independent
      ones.
    - **order** - the noise is proportional to this power of the distance from the anchor.
    """

    variance: float
    varying: float
    mean: float
    per_epoch: int = 0
    order: int = 0

    def inflation(self, dynamics: Dynamics, step_size: float) -> float:
        """Predicted relative excess of a unit posterior variance.

        :param dynamics: tells how noise acts.
        :param step_size: step size.
        """
        inflation = dynamics.noise_inflation(self.variance, step_size, self.varying)
        # A thermostat cools what seems to it heat: nothing has cancelled for it.
        if self.per_epoch == 0 or dynamics.has_thermostat:
            return inflation
        share = epoch_share(dynamics, step_size, self.per_epoch, self.order)
        # Noise that moves with the position cancels to first order in its strength.
        return inflation * (share + (self.order > 0) * inflation / 4.0)

    @classmethod
    def of(cls, variances: np.ndarray, num_minibatches: int, is_cheap: bool) -> Noise:
        """From variances of shape ``(positions, d)``, each measured on some minibatches."""
        mean = variances.mean(0)
        spread = np.square(variances - mean).sum(0) / max(1, len(variances) - 1)
        # As much a variance measured on so few numbers spreads by itself.
        own = 2.0 / (num_minibatches - 1) * np.square(variances).mean(0)
        surprise = 1.0 + 3.0 * np.sqrt(2.0 / max(1, len(variances) - 1))
        square = np.maximum(np.square(mean), np.finfo(float).tiny)
        on_average = (spread - own).sum() / square.sum()
        clearly = ((spread - surprise * own) / square).max()
        varying = float(np.sqrt(np.clip(max(on_average, clearly), 0.0, 1.0)))
        worst = mean.max() if is_cheap else mean.mean()
        return cls(float(worst), varying, float(mean.mean()))


NO_NOISE = Noise(0.0, 0.0, 0.0)
UNKNOWN_NOISE = Noise(float("nan"), float("nan"), float("nan"))
"""That of a run whose warm-up had nothing to look for, and measured nothing."""


class NoiseOfRows(NamedTuple):
    """The noise of each estimator by the kind of rows in a minibatch.

    - **random** - of random rows.
    - **blocks** - of consecutive rows.
    """

    random: dict[Estimator, Noise]
    blocks: dict[Estimator, Noise]

    def of(self, scheme: MinibatchScheme) -> dict[Estimator, Noise]:
        """That of a scheme's kind of rows."""
        return self.blocks if scheme.is_consecutive else self.random


def epoch_share(dynamics: Dynamics, step_size: float, per_epoch: int, order: int = 0) -> float:
    r"""What is left of the noise's effect where each minibatch comes once in an epoch.

    K minibatches in random order have noise of autocovariance
    :math:`-(1 - k/K) V / (K - 1)` at lag k; the position answers it as it answers white noise,
    with its own autocorrelation :math:`\rho`:

    .. math:: 1 - \frac{2}{K - 1} \sum_{k=1}^{K-1} \left(1 - \frac{k}{K}\right) \rho(kh)

    About 0 for epochs that are short beside the relaxation time, 1 for long ones. Noise that grows
    with the distance from an anchor changes while the position moves, and cancels less: its own
    correlation, a power of the position's, is another factor under the sum.

    :param dynamics: tells how positions relax.
    :param step_size: step size h.
    :param per_epoch: number of minibatches K.
    :param order: that power.
    """
    if per_epoch < 2:
        return 0.0
    remembered = int(10.0 * dynamics.relaxation_time(step_size) / step_size)
    lags = np.arange(1, min(per_epoch, remembered + 2))
    correlation = dynamics.autocorrelation(lags * step_size, step_size)
    correlation = correlation * np.abs(correlation) ** order
    cancelled = 2.0 / (per_epoch - 1) * np.sum((1.0 - lags / per_epoch) * correlation)
    return float(np.clip(1.0 - cancelled, _NEVER_CANCELLED * (order > 0), 1.0))


def draw_rows(
    target: Target, rng: np.random.Generator, shape: tuple[int, ...], scheme: MinibatchScheme
) -> Indices:
    """Independent minibatches with rows as a scheme has them: random ones, or consecutive.

    :return: shape ``shape + (subsample_size,)`` for each plate.
    """
    if scheme.is_consecutive:
        return {p.name: _draw(p, rng, shape, p.part) for p in target.plates}
    return {p.name: _draw(p, rng, shape, run_length(target, p)) for p in target.plates}


def _draw(
    plate: Plate, rng: np.random.Generator, shape: tuple[int, ...], run_length: int
) -> np.ndarray:
    """Runs of rows that start at random; of each shard its part, and all decisive ones."""
    if plate.decisive:
        room = plate.drawn
        run_length = 1 if run_length == 1 else room.part
        return plate.with_decisive(_draw(room, rng, shape, run_length))
    firsts, counts = plate.strata
    start = rng.integers(0, counts, (*shape, len(counts), plate.part // run_length))
    rows = (start[..., None] + np.arange(run_length)) % counts[..., None]
    rows = firsts + rows.reshape(*shape, len(counts), plate.part)
    return rows.reshape(*shape, plate.subsample_size).astype(np.int32)


@partial(jax.jit, static_argnames=("target", "estimator", "is_dense"))
def _covariance_of_rows(
    target: Target,
    arguments: Arguments,
    whitening: Whitening,
    positions: Array,
    indices: Indices,
    estimator: Estimator,
    is_dense: bool,
) -> Array:
    def at(q: Array, rows: Indices) -> Array:
        def one(row: Indices) -> Array:
            single = {name: i[None] for name, i in row.items()}
            return whitened_gradient(estimator, target, arguments, whitening, single)(q)

        gradients = jax.vmap(one)(dict(rows))
        return jnp.cov(gradients, rowvar=False) if is_dense else gradients.var(0, ddof=1)

    return jax.lax.map(lambda x: at(*x), (positions, dict(indices))).mean(0)


def measure_covariance(
    target: Target,
    arguments: Arguments,
    whitening: Whitening,
    positions: Array,
    rng: np.random.Generator,
    estimator: Estimator,
    is_dense: bool,
) -> np.ndarray:
    """Covariance of the whitened gradient's noise from the gradients of single rows.

    For minibatches of independent rows: that of one row over their number, plate by plate. The
    mean over positions.

    :param positions: whitened positions, shape ``(k, d)``.
    :param estimator: how the gradient is estimated.
    :param is_dense: whether to return the matrix ``(d, d)``, or its diagonal ``(d,)``.
    """
    shape = len(positions), int(np.clip(_ROW_GRADIENTS // target.dim, 16, 1024))
    total = np.zeros((target.dim,) * (1 + is_dense))
    for varied in target.plates:
        rows = {
            p.name: np.broadcast_to(
                rng.integers(0, p.size, shape if p is varied else (shape[0], 1), dtype=np.int32),
                shape,
            )
            for p in target.plates
        }
        of_rows = _covariance_of_rows(
            target, arguments, whitening, positions, rows, estimator, is_dense
        )
        total += np.asarray(of_rows, np.float64) / varied.subsample_size
    return total
