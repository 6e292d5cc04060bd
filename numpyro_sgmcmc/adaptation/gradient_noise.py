"""The gradient's noise at typical positions: what decides whether the posterior is right.

What minibatch gradients at some positions tell: their noise, what it does, and the curvature.

Everything is in whitened coordinates, and made from gradients alone
(:class:`~numpyro_sgmcmc.adaptation.batched_gradients.RowGradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    sample_minibatch_indices,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices, Subsampling
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator, make_gradient_fn
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = [
    "GradientNoiseStats",
    "NO_NOISE",
    "NoiseStatsBySubsampling",
    "UNKNOWN_NOISE",
    "compute_epoch_variance_fraction",
    "estimate_max_curvature",
    "measure_noise",
    "measure_noise_covariance",
    "predict_mean_bias_from_noise",
    "predict_mean_bias_per_variance_inflation",
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


_MAX_NOISE_POSITIONS, _MIN_NOISE_MINIBATCHES = 16, 16


_MAX_NOISE_ROWS = 2**20  # at which gradients are taken for the noise, at most


_MAX_NOISE_GRADIENT_ENTRIES = 2**26  # in these gradients together, at most


_MIN_NOISE_POSITIONS = 4


_MIN_MINIBATCHES_FOR_MAX_VARIANCE = (
    128  # minibatches in all that tell the noise of the noisiest coordinate
)


_MAX_MEAN_BIAS_POSITIONS = 8


_UNPREDICTABLE_MEAN_BIAS_SD = 100.0  # sds: a shift that is too large to be predicted


_PERTURBATION_SD = (
    0.3  # whitened units: deviations in which the posterior's third derivatives are felt
)


_POWER_ITERATION_STEP_LENGTH = 0.1


def measure_noise(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    estimators: Sequence[GradientEstimator],
    subsampling: Subsampling,
    max_minibatches: int,
    rng: np.random.Generator,
) -> dict[GradientEstimator, GradientNoiseStats]:
    """The gradient's noise by estimator, on minibatches of a scheme's kind.

    :param batched_gradients: gradients on minibatches.
    :param q: whitened positions from about the posterior, of which the first few are taken.
    :param max_minibatches: at each of them, at most.
    """
    target = batched_gradients.potential
    if not target.plates:
        return dict.fromkeys(estimators, NO_NOISE)
    batch = sum(p.subsample_size for p in target.plates)
    num_positions = min(len(q), _MAX_NOISE_POSITIONS)
    fitting = (
        min(_MAX_NOISE_ROWS // batch, _MAX_NOISE_GRADIENT_ENTRIES // target.dim) // num_positions
    )
    if fitting < _MIN_NOISE_MINIBATCHES:
        num_positions = min(len(q), _MIN_NOISE_POSITIONS)
    num = int(np.clip(fitting, _MIN_NOISE_MINIBATCHES, max_minibatches))
    found = _sample_gradient_estimates(
        batched_gradients, preconditioner, q[:num_positions], estimators, subsampling, num, rng
    )
    is_enough = num_positions * num >= _MIN_MINIBATCHES_FOR_MAX_VARIANCE
    return {
        e: GradientNoiseStats.from_variances(v.var(1, ddof=1), num, is_enough)._replace(
            noise_exponent=e.noise_exponent
        )
        for e, v in found.items()
    }


def _sample_gradient_estimates(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    estimators: Sequence[GradientEstimator],
    subsampling: Subsampling,
    num_minibatches: int,
    rng: np.random.Generator,
) -> dict[GradientEstimator, np.ndarray]:
    """Whitened estimates by ``num_minibatches`` minibatches, up to a constant; shape ``(k, num, d)`` each."""
    drawn = sample_minibatch_indices(
        batched_gradients.step_potential, rng, (num_minibatches,), subsampling
    )
    probes = {e: [e.noise_eval_points(x, preconditioner) for x in q] for e in estimators}
    every = (p for of in probes.values() for some in of for p, _ in some)
    places = {p.tobytes(): p for p in every}
    at, of = np.divmod(np.arange(len(places) * num_minibatches), num_minibatches)
    positions = np.stack(list(places.values()))
    gradients = np.concatenate(
        [g for _, _, g in batched_gradients.evaluate_step_minibatches(positions, drawn, at, of)]
    )
    gradients = preconditioner.apply_transpose(gradients).reshape(len(places), num_minibatches, -1)
    there = dict(zip(places, gradients, strict=True))
    return {
        e: np.stack([sum(w * there[p.tobytes()] for p, w in some) for some in of])
        for e, of in probes.items()
    }


def predict_mean_bias_from_noise(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    estimator: GradientEstimator,
    subsampling: Subsampling,
    variance_inflation_per_noise_variance: float,
    num_minibatches: int,
    rng: np.random.Generator,
) -> np.ndarray:
    r"""How far the gradient's noise is predicted to move the posterior's mean, in posterior sds.

    Noise of covariance V adds :math:`c V` to the posterior's covariance. The deviations
    :math:`\zeta` of :func:`_shift` are those of minibatch gradients themselves, with all their
    correlations.

    :param q: whitened positions from about the posterior, of which the first few are taken.
    :param variance_inflation_per_noise_variance: c, the excess of a unit variance that noise of variance one makes.
    :param num_minibatches: minibatches a position.
    :return: each coordinate's shift as far as it is clear, shape ``(d,)``.
    """
    target = batched_gradients.potential
    if not target.plates or target.is_stochastic or not variance_inflation_per_noise_variance > 0.0:
        return np.zeros(target.dim)
    q = q[:_MAX_MEAN_BIAS_POSITIONS]
    num = max(2, num_minibatches * _MAX_MEAN_BIAS_POSITIONS // len(q))
    noise = np.concatenate(
        [
            _sample_gradient_estimates(
                batched_gradients, preconditioner, x[None], (estimator,), subsampling, num, rng
            )[estimator]
            for x in q
        ]
    )
    zeta = np.sqrt(variance_inflation_per_noise_variance * num / (num - 1)) * (
        noise - noise.mean(1, keepdims=True)
    )
    return _predict_mean_bias(batched_gradients, preconditioner, q, zeta)


def predict_mean_bias_per_variance_inflation(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    num_directions: int,
    rng: np.random.Generator,
) -> np.ndarray:
    r"""The same for draws wider in all directions: over the relative excess of their variance.

    :param q: whitened positions from about the posterior, of which the first few are taken.
    :param num_directions: directions a position.
    :return: each coordinate's shift as far as it is clear, over the excess, shape ``(d,)``.
    """
    if batched_gradients.potential.is_stochastic:
        return np.zeros(batched_gradients.potential.dim)
    q = q[:_MAX_MEAN_BIAS_POSITIONS]
    num = max(2, num_directions * _MAX_MEAN_BIAS_POSITIONS // len(q))
    zeta = _PERTURBATION_SD * rng.standard_normal((len(q), num, q.shape[1]))
    return _predict_mean_bias(batched_gradients, preconditioner, q, zeta) / _PERTURBATION_SD**2


def _predict_mean_bias(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    perturbations: np.ndarray,
) -> np.ndarray:
    r"""How far a posterior's mean moves, in posterior sds, to which deviations are added.

    To first order by

    .. math:: -\tfrac12\,E[D^2 \nabla U(\zeta, \zeta)]

    where the posterior is not Gaussian. Many coordinates that are each hardly wider may move one
    far that they have in common: a scale that hundreds of effects share.

    :param q: whitened positions, shape ``(k, d)``.
    :param perturbations: deviations, shape ``(k, num, d)``.
    :return: each coordinate's mean less two standard errors, and zero within these; ``(d,)``.
        Deviations to where there is no density do not count, unless they are most: then 100.
    """
    num = perturbations.shape[1]
    both = np.concatenate([q[:, None], q[:, None] + perturbations, q[:, None] - perturbations], 1)
    values, found = batched_gradients.evaluate_on_subset(
        preconditioner.to_position(both.reshape(-1, q.shape[1]))
    )
    # A gradient may well be finite where the density is not.
    found = np.where(np.isfinite(values)[:, None], found, np.nan)
    found = preconditioner.apply_transpose(found).reshape(both.shape)
    there, above, below = np.split(found, [1, 1 + num], 1)
    shifts = -0.5 * (above + below - 2.0 * there).reshape(-1, q.shape[1])
    in_sds = preconditioner.apply(shifts) / preconditioner.sds
    fine = np.isfinite(in_sds).all(1)
    if 2 * fine.sum() < len(fine):
        return np.full(
            q.shape[1], _UNPREDICTABLE_MEAN_BIAS_SD
        )  # the posterior ends where deviations lead
    in_sds = in_sds[fine]
    mean, error = in_sds.mean(0), in_sds.std(0) / np.sqrt(len(in_sds))
    return np.sign(mean) * np.maximum(np.abs(mean) - 2.0 * error, 0.0)


def estimate_max_curvature(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    num_iterations: int,
    rng: np.random.Generator,
) -> float:
    """Largest whitened curvature at some typical positions, by power iterations.

    :param q: whitened positions from about the posterior.
    :param num_iterations: iterations.
    """
    positions = preconditioner.to_position(q)
    v = rng.standard_normal(positions.shape)
    _, base = batched_gradients.evaluate_on_subset(positions)
    for _ in range(num_iterations):
        v /= np.maximum(np.linalg.norm(v, axis=1, keepdims=True), np.finfo(float).tiny)
        _, moved = batched_gradients.evaluate_on_subset(
            positions + _POWER_ITERATION_STEP_LENGTH * preconditioner.apply(v)
        )
        v = preconditioner.apply_transpose(moved - base) / _POWER_ITERATION_STEP_LENGTH
    largest = np.linalg.norm(v, axis=1)
    return float(largest[np.isfinite(largest)].max(initial=1.0))
