"""The gradient's noise at typical positions: what decides whether the posterior is right."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import Subsampling
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.estimators import GradientEstimator, make_gradient_fn
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.eager_potential import choose_run_length

__all__ = [
    "NO_NOISE",
    "UNKNOWN_NOISE",
    "GradientNoiseStats",
    "NoiseStatsBySubsampling",
    "compute_epoch_variance_fraction",
    "measure_noise_covariance",
    "sample_minibatch_indices",
]

_MAX_ROW_GRADIENT_ENTRIES = 2**22
_MIN_EPOCH_VARIANCE_FRACTION = 0.1
"""Share of the effect of noise that grows with the distance from the anchor: in simulated epochs of
15 minibatches the variance was off by that, to the other side."""


class GradientNoiseStats(NamedTuple):
    """What the choice of the step size must know of the gradient's noise.

    - **variance** - its variance in the noisiest coordinate, or on average where too few
      minibatches were seen to tell.
    - **position_dependent_fraction** - the share of it that differs from place to place, from 0 to 1: on average
      over coordinates, or in one that clearly differs more.
    - **mean_variance** - its variance, mean over coordinates.
    - **batches_per_epoch** - minibatches in an epoch over which their noise cancels; 0 for independent
      ones.
    - **noise_exponent** - the noise is proportional to this power of the distance from the anchor.
    """

    variance: float
    position_dependent_fraction: float
    mean_variance: float
    batches_per_epoch: int = 0
    noise_exponent: int = 0

    def predict_variance_inflation(self, dynamics: Dynamics, step_size: float) -> float:
        """Predicted relative excess of a unit posterior variance.

        :param dynamics: tells how noise acts.
        :param step_size: step size.
        """
        inflation = dynamics.variance_inflation(
            self.variance, step_size, self.position_dependent_fraction
        )
        # A thermostat cools what seems to it heat: nothing has cancelled for it.
        if self.batches_per_epoch == 0 or dynamics.has_thermostat:
            return inflation
        share = compute_epoch_variance_fraction(
            dynamics, step_size, self.batches_per_epoch, self.noise_exponent
        )
        # Noise that moves with the position cancels to first order in its strength.
        return inflation * (share + (self.noise_exponent > 0) * inflation / 4.0)

    @classmethod
    def from_variances(
        cls, variances: np.ndarray, num_minibatches: int, use_noisiest_coordinate: bool
    ) -> GradientNoiseStats:
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
        worst = mean.max() if use_noisiest_coordinate else mean.mean()
        return cls(float(worst), varying, float(mean.mean()))


NO_NOISE = GradientNoiseStats(0.0, 0.0, 0.0)
UNKNOWN_NOISE = GradientNoiseStats(float("nan"), float("nan"), float("nan"))
"""That of a run whose warm-up had nothing to look for, and measured nothing."""


class NoiseStatsBySubsampling(NamedTuple):
    """The noise of each estimator by the kind of rows in a minibatch.

    - **iid** - of random rows.
    - **contiguous** - of consecutive rows.
    """

    iid: dict[GradientEstimator, GradientNoiseStats]
    contiguous: dict[GradientEstimator, GradientNoiseStats]

    def for_subsampling(
        self, subsampling: Subsampling
    ) -> dict[GradientEstimator, GradientNoiseStats]:
        """That of a scheme's kind of rows."""
        return self.contiguous if subsampling.is_contiguous else self.iid


def compute_epoch_variance_fraction(
    dynamics: Dynamics, step_size: float, batches_per_epoch: int, noise_exponent: int = 0
) -> float:
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
    :param batches_per_epoch: number of minibatches K.
    :param noise_exponent: that power.
    """
    if batches_per_epoch < 2:
        return 0.0
    remembered = int(10.0 * dynamics.relaxation_time(step_size) / step_size)
    lags = np.arange(1, min(batches_per_epoch, remembered + 2))
    correlation = dynamics.autocorrelation(lags * step_size, step_size)
    correlation = correlation * np.abs(correlation) ** noise_exponent
    cancelled = (
        2.0 / (batches_per_epoch - 1) * np.sum((1.0 - lags / batches_per_epoch) * correlation)
    )
    return float(np.clip(1.0 - cancelled, _MIN_EPOCH_VARIANCE_FRACTION * (noise_exponent > 0), 1.0))


def sample_minibatch_indices(
    potential: Potential, rng: np.random.Generator, shape: tuple[int, ...], subsampling: Subsampling
) -> Indices:
    """Independent minibatches with rows as a scheme has them: random ones, or consecutive.

    :return: shape ``shape + (subsample_size,)`` for each plate.
    """
    if subsampling.is_contiguous:
        return {
            p.name: _sample_plate_indices(p, rng, shape, p.subsample_size_per_shard)
            for p in potential.plates
        }
    return {
        p.name: _sample_plate_indices(p, rng, shape, choose_run_length(potential, p))
        for p in potential.plates
    }


def _sample_plate_indices(
    plate: Plate, rng: np.random.Generator, shape: tuple[int, ...], run_length: int
) -> np.ndarray:
    """Runs of rows that start at random; of each shard its part, and all decisive ones."""
    if plate.included_rows:
        room = plate.random_part
        run_length = 1 if run_length == 1 else room.subsample_size_per_shard
        return plate.add_included_rows(_sample_plate_indices(room, rng, shape, run_length))
    firsts, counts = plate.shard_offsets_and_sizes
    start = rng.integers(
        0, counts, (*shape, len(counts), plate.subsample_size_per_shard // run_length)
    )
    rows = (start[..., None] + np.arange(run_length)) % counts[..., None]
    rows = firsts + rows.reshape(*shape, len(counts), plate.subsample_size_per_shard)
    return rows.reshape(*shape, plate.subsample_size).astype(np.int32)


@partial(jax.jit, static_argnames=("potential", "estimator", "is_dense"))
def _compute_row_gradient_covariance(
    potential: Potential,
    arguments: Arguments,
    preconditioner: Preconditioner,
    positions: Array,
    indices: Indices,
    estimator: GradientEstimator,
    is_dense: bool,
) -> Array:
    def at(q: Array, rows: Indices) -> Array:
        def one(row: Indices) -> Array:
            single = {name: i[None] for name, i in row.items()}
            return make_gradient_fn(estimator, potential, arguments, preconditioner, single)(q)

        gradients = jax.vmap(one)(dict(rows))
        return jnp.cov(gradients, rowvar=False) if is_dense else gradients.var(0, ddof=1)

    return jax.lax.map(lambda x: at(*x), (positions, dict(indices))).mean(0)


def measure_noise_covariance(
    potential: Potential,
    arguments: Arguments,
    preconditioner: Preconditioner,
    positions: Array,
    rng: np.random.Generator,
    estimator: GradientEstimator,
    is_dense: bool,
) -> np.ndarray:
    """Covariance of the whitened gradient's noise from the gradients of single rows.

    For minibatches of independent rows: that of one row over their number, plate by plate. The
    mean over positions.

    :param positions: whitened positions, shape ``(k, d)``.
    :param estimator: how the gradient is estimated.
    :param is_dense: whether to return the matrix ``(d, d)``, or its diagonal ``(d,)``.
    """
    shape = len(positions), int(np.clip(_MAX_ROW_GRADIENT_ENTRIES // potential.dim, 16, 1024))
    total = np.zeros((potential.dim,) * (1 + is_dense))
    for varied in potential.plates:
        rows = {
            p.name: np.broadcast_to(
                rng.integers(0, p.size, shape if p is varied else (shape[0], 1), dtype=np.int32),
                shape,
            )
            for p in potential.plates
        }
        of_rows = _compute_row_gradient_covariance(
            potential, arguments, preconditioner, positions, rows, estimator, is_dense
        )
        total += np.asarray(of_rows, np.float64) / varied.subsample_size
    return total
