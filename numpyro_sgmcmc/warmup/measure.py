"""What minibatch gradients at some positions tell: their noise, what it does, and the curvature.

Everything is in whitened coordinates, and made from gradients alone
(:class:`~numpyro_sgmcmc.warmup.row_gradients.RowGradients`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numpyro_sgmcmc.data.minibatch import MinibatchScheme
from numpyro_sgmcmc.posterior.estimators import Estimator
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.noise import NO_NOISE, Noise, draw_rows
from numpyro_sgmcmc.warmup.row_gradients import RowGradients

__all__ = [
    "largest_curvature_on",
    "measure_noise",
    "sharpened",
    "shift_by_noise",
    "shift_by_spread",
]

_POSITIONS, _FEWEST_MINIBATCHES = 16, 16
_ROWS = 2**20  # at which gradients are taken for the noise, at most
_NUMBERS = 2**26  # in these gradients together, at most
_FEW_POSITIONS = 4
_ENOUGH = 128  # minibatches in all that tell the noise of the noisiest coordinate
_SHIFT_POSITIONS = 8
_LOST = 100.0  # sds: a shift that is too large to be predicted
_SPREAD = 0.3  # whitened units: deviations in which the posterior's third derivatives are felt
_POWER_LENGTH = 0.1
_SOLVE_ROUNDS, _SOLVE_LENGTH = 12, 0.3


def measure_noise(
    rows: RowGradients,
    whitening: Whitening,
    q: np.ndarray,
    estimators: Sequence[Estimator],
    scheme: MinibatchScheme,
    minibatches: int,
    rng: np.random.Generator,
) -> dict[Estimator, Noise]:
    """The gradient's noise by estimator, on minibatches of a scheme's kind.

    :param rows: gradients on minibatches.
    :param q: whitened positions from about the posterior, of which the first few are taken.
    :param minibatches: at each of them, at most.
    """
    target = rows.target
    if not target.plates:
        return dict.fromkeys(estimators, NO_NOISE)
    batch = sum(p.subsample_size for p in target.plates)
    num_positions = min(len(q), _POSITIONS)
    fitting = min(_ROWS // batch, _NUMBERS // target.dim) // num_positions
    if fitting < _FEWEST_MINIBATCHES:
        num_positions = min(len(q), _FEW_POSITIONS)
    num = int(np.clip(fitting, _FEWEST_MINIBATCHES, minibatches))
    found = _deviations(rows, whitening, q[:num_positions], estimators, scheme, num, rng)
    is_enough = num_positions * num >= _ENOUGH
    return {
        e: Noise.of(v.var(1, ddof=1), num, is_enough)._replace(order=e.noise_order)
        for e, v in found.items()
    }


def _deviations(
    rows: RowGradients,
    whitening: Whitening,
    q: np.ndarray,
    estimators: Sequence[Estimator],
    scheme: MinibatchScheme,
    num: int,
    rng: np.random.Generator,
) -> dict[Estimator, np.ndarray]:
    """Whitened estimates by ``num`` minibatches, up to a constant; shape ``(k, num, d)`` each."""
    drawn = draw_rows(rows.step_target, rng, (num,), scheme)
    probes = {e: [e.probes(x, whitening) for x in q] for e in estimators}
    every = (p for of in probes.values() for some in of for p, _ in some)
    places = {p.tobytes(): p for p in every}
    at, of = np.divmod(np.arange(len(places) * num), num)
    positions = np.stack(list(places.values()))
    gradients = np.concatenate([g for _, _, g in rows.of_steps(positions, drawn, at, of)])
    gradients = whitening.pull(gradients).reshape(len(places), num, -1)
    there = dict(zip(places, gradients, strict=True))
    return {
        e: np.stack([sum(w * there[p.tobytes()] for p, w in some) for some in of])
        for e, of in probes.items()
    }


def shift_by_noise(
    rows: RowGradients,
    whitening: Whitening,
    q: np.ndarray,
    estimator: Estimator,
    scheme: MinibatchScheme,
    excess: float,
    probes: int,
    rng: np.random.Generator,
) -> np.ndarray:
    r"""How far the gradient's noise is predicted to move the posterior's mean, in posterior sds.

    Noise of covariance V adds :math:`c V` to the posterior's covariance. The deviations
    :math:`\zeta` of :func:`_shift` are those of minibatch gradients themselves, with all their
    correlations.

    :param q: whitened positions from about the posterior, of which the first few are taken.
    :param excess: c, the excess of a unit variance that noise of variance one makes.
    :param probes: minibatches a position.
    :return: each coordinate's shift as far as it is clear, shape ``(d,)``.
    """
    target = rows.target
    if not target.plates or target.is_randomized or not excess > 0.0:
        return np.zeros(target.dim)
    q = q[:_SHIFT_POSITIONS]
    num = max(2, probes * _SHIFT_POSITIONS // len(q))
    noise = np.concatenate(
        [
            _deviations(rows, whitening, x[None], (estimator,), scheme, num, rng)[estimator]
            for x in q
        ]
    )
    zeta = np.sqrt(excess * num / (num - 1)) * (noise - noise.mean(1, keepdims=True))
    return _shift(rows, whitening, q, zeta)


def shift_by_spread(
    rows: RowGradients, whitening: Whitening, q: np.ndarray, probes: int, rng: np.random.Generator
) -> np.ndarray:
    r"""The same for draws wider in all directions: over the relative excess of their variance.

    :param q: whitened positions from about the posterior, of which the first few are taken.
    :param probes: directions a position.
    :return: each coordinate's shift as far as it is clear, over the excess, shape ``(d,)``.
    """
    if rows.target.is_randomized:
        return np.zeros(rows.target.dim)
    q = q[:_SHIFT_POSITIONS]
    num = max(2, probes * _SHIFT_POSITIONS // len(q))
    zeta = _SPREAD * rng.standard_normal((len(q), num, q.shape[1]))
    return _shift(rows, whitening, q, zeta) / _SPREAD**2


def _shift(rows: RowGradients, whitening: Whitening, q: np.ndarray, zeta: np.ndarray) -> np.ndarray:
    r"""How far a posterior's mean moves, in posterior sds, to which deviations are added.

    To first order by

    .. math:: -\tfrac12\,E[D^2 \nabla U(\zeta, \zeta)]

    where the posterior is not Gaussian. Many coordinates that are each hardly wider may move one
    far that they have in common: a scale that hundreds of effects share.

    :param q: whitened positions, shape ``(k, d)``.
    :param zeta: deviations, shape ``(k, num, d)``.
    :return: each coordinate's mean less two standard errors, and zero within these; ``(d,)``.
        Deviations to where there is no density do not count, unless they are most: then 100.
    """
    num = zeta.shape[1]
    both = np.concatenate([q[:, None], q[:, None] + zeta, q[:, None] - zeta], 1)
    values, found = rows.on_some(whitening.position(both.reshape(-1, q.shape[1])))
    # A gradient may well be finite where the density is not.
    found = np.where(np.isfinite(values)[:, None], found, np.nan)
    found = whitening.pull(found).reshape(both.shape)
    there, above, below = np.split(found, [1, 1 + num], 1)
    shifts = -0.5 * (above + below - 2.0 * there).reshape(-1, q.shape[1])
    in_sds = whitening.push(shifts) / whitening.sds
    fine = np.isfinite(in_sds).all(1)
    if 2 * fine.sum() < len(fine):
        return np.full(q.shape[1], _LOST)  # the posterior ends where deviations lead
    in_sds = in_sds[fine]
    mean, error = in_sds.mean(0), in_sds.std(0) / np.sqrt(len(in_sds))
    return np.sign(mean) * np.maximum(np.abs(mean) - 2.0 * error, 0.0)


def largest_curvature_on(
    rows: RowGradients,
    whitening: Whitening,
    q: np.ndarray,
    rounds: int,
    rng: np.random.Generator,
) -> float:
    """Largest whitened curvature at some typical positions, by power iterations.

    :param q: whitened positions from about the posterior.
    :param rounds: iterations.
    """
    positions = whitening.position(q)
    v = rng.standard_normal(positions.shape)
    _, base = rows.on_some(positions)
    for _ in range(rounds):
        v /= np.maximum(np.linalg.norm(v, axis=1, keepdims=True), np.finfo(float).tiny)
        _, moved = rows.on_some(positions + _POWER_LENGTH * whitening.push(v))
        v = whitening.pull(moved - base) / _POWER_LENGTH
    largest = np.linalg.norm(v, axis=1)
    return float(largest[np.isfinite(largest)].max(initial=1.0))


def sharpened(rows: RowGradients, whitening: Whitening, directions: np.ndarray) -> np.ndarray:
    """Wide directions nearer to the widest ones: one inverse iteration with the curvature.

    Of draws fewer than coordinates the widest directions come out with a little of all others, in
    which the gradient varies far more. The curvature at the anchor, asked for by differences of
    gradients, is inverted by conjugate gradients.

    :param directions: whitened ones as columns, shape ``(d, k)``.
    :return: of the same shape, not normalised.
    """

    def curved(v: np.ndarray) -> np.ndarray:
        length = _SOLVE_LENGTH / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-30)
        moved = whitening.push(length * v)
        _, found = rows.on_some(
            np.concatenate([whitening.anchor + moved, whitening.anchor - moved])
        )
        above, below = np.split(whitening.pull(found), 2)
        return (above - below) / (2.0 * length)

    found = np.zeros_like(directions.T)
    rest = ahead = directions.T
    for _ in range(_SOLVE_ROUNDS):
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
