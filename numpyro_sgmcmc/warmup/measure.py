"""What minibatch gradients at some positions tell: their noise, what it does, and the curvature.

Everything is in whitened coordinates, and made from gradients alone
(:class:`~numpyro_sgmcmc.warmup.row_gradients.RowGradients`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numpyro_sgmcmc.data.minibatch import Subsampling
from numpyro_sgmcmc.posterior.estimators import GradientEstimator
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.noise import NO_NOISE, GradientNoiseStats, sample_minibatch_indices
from numpyro_sgmcmc.warmup.row_gradients import BatchedGradients

__all__ = [
    "estimate_max_curvature",
    "measure_noise",
    "predict_mean_bias_from_noise",
    "predict_mean_bias_per_variance_inflation",
    "refine_directions",
]

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
_NUM_CG_ITERATIONS, _CG_STEP_LENGTH = 12, 0.3


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


def refine_directions(
    batched_gradients: BatchedGradients, preconditioner: Preconditioner, directions: np.ndarray
) -> np.ndarray:
    """Wide directions nearer to the widest ones: one inverse iteration with the curvature.

    Of draws fewer than coordinates the widest directions come out with a little of all others, in
    which the gradient varies far more. The curvature at the anchor, asked for by differences of
    gradients, is inverted by conjugate gradients.

    :param directions: whitened ones as columns, shape ``(d, k)``.
    :return: of the same shape, not normalised.
    """

    def curved(v: np.ndarray) -> np.ndarray:
        length = _CG_STEP_LENGTH / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-30)
        moved = preconditioner.apply(length * v)
        _, found = batched_gradients.evaluate_on_subset(
            np.concatenate([preconditioner.center + moved, preconditioner.center - moved])
        )
        above, below = np.split(preconditioner.apply_transpose(found), 2)
        return (above - below) / (2.0 * length)

    found = np.zeros_like(directions.T)
    rest = ahead = directions.T
    for _ in range(_NUM_CG_ITERATIONS):
        bent, square = curved(ahead), np.square(rest).sum(1, keepdims=True)
        along = (ahead * bent).sum(1, keepdims=True)
        # Where the posterior is not convex a direction is left as far as it has come.
        share = np.where(along > 0.0, square / np.where(along > 0.0, along, 1.0), 0.0)
        found = found + share * ahead
        rest = rest - share * bent
        following = np.square(rest).sum(1, keepdims=True) / np.maximum(square, 1e-30)
        ahead = np.where(along > 0.0, rest + following * ahead, ahead)
    fine = np.isfinite(found).all(1) & (found != 0.0).any(1)
    return np.where(fine, found.T, directions)
