r"""Draws that are far outside of the posterior.

Rare, large gradients of a few observations, or steps that are unstable in a tail, can move a
coordinate far from the posterior, from where it returns within some draws. Means hardly change, but
SDs do, and the tails of draws then look like those of a posterior with heavy tails.

The density distinguishes the two. Let x be a draw and x' the same draw with coordinate j at its
median. Given the other coordinates, a draw of the posterior has :math:`U(x) - U(x') > t` with a
probability of about :math:`e^{-t}` if the tails are exponential or lighter. If they fall off as a
power, the potential grows as a logarithm, and the probability is about :math:`e^{-ta/(1 + a)}` for
a Student t distribution with a degrees of freedom: :math:`e^{-t/2}` for a Cauchy distribution. So
with n draws of d coordinates, differences beyond :math:`2\log(nd)` by 14 nats occur in at most one
run of a thousand.
"""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import JittedPotential
from numpyro_sgmcmc.diagnostics.geometry import Excursion, find_outlying_draws
from numpyro_sgmcmc.diagnostics.run_data import RunData

# Outlying draws that are examined, and values of the potential by row: bounds on time.
_MAX_CANDIDATES, _MAX_ROW_VALUES = 16, 2**28
# Probability that exact draws are reported if all coordinates have Cauchy distributions.
_MAX_FALSE_POSITIVE_RATE = 1e-3
# Bound on the rounding error of the potential, relative to it, in units of the machine precision.
_ROUNDING_ERRORS = 16.0
# Draws within which coordinates leave the posterior together.
_MAX_LAG = 20


def find_excursions(run: RunData, draws: np.ndarray) -> tuple[Excursion, ...]:
    """Return the coordinates that have draws far outside of the posterior, the clearest first.

    Coordinates that are outlying at about the same draws are included: the draw of a scale may be
    likely given an effect that is far outside. If there are outlying draws, the function computes
    the potential on all rows up to 32 times. Not supported (and empty) for rows on disk, randomised
    likelihoods, and chains in several modes.

    :param draws: in unconstrained space, shape ``(chains, n, d)``.
    """
    potential, arguments = run.kernel.potential, run.arguments
    if arguments.host_arrays or potential.is_stochastic or run.center_offsets.any():
        return ()
    num_rows = sum(plate.size for plate in potential.plates)
    max_candidates = min(_MAX_CANDIDATES, _MAX_ROW_VALUES // (2 * max(1, num_rows)))
    flat = draws.reshape(-1, draws.shape[-1])
    outlying = find_outlying_draws(flat, max_candidates)
    if not outlying:
        return ()
    moved = flat[[x.draw for x in outlying]]
    at_medians = moved.copy()
    for position, x in zip(at_medians, outlying, strict=True):
        position[x.coordinate] = x.median
    evaluate = JittedPotential(potential, arguments).value
    of_draws, of_medians = (
        np.array([evaluate(q) for q in positions]) for positions in (moved, at_medians)
    )
    rounding = _ROUNDING_ERRORS * np.finfo(potential.dtype).eps * np.abs(of_medians)
    threshold = 2.0 * np.log(flat.size / _MAX_FALSE_POSITIVE_RATE) + rounding
    with np.errstate(invalid="ignore"):  # NaN where the median has no density
        increases = np.where(np.isfinite(of_draws), of_draws, np.inf) - of_medians
    is_outside = increases > threshold
    draw_index = np.array([x.draw for x in outlying])
    chain, index = np.divmod(draw_index, draws.shape[1])
    is_near = (chain == chain[:, None]) & (np.abs(index - index[:, None]) <= _MAX_LAG)
    is_found = (is_near & is_outside[:, None]).any(0)
    increase_by_coordinate: dict[int, float] = {}
    for k in np.flatnonzero(is_found):
        coordinate, increase = outlying[k].coordinate, float(increases[k])
        previous = increase_by_coordinate.get(coordinate, -np.inf)
        increase_by_coordinate[coordinate] = max(previous, increase)
    found = sorted(increase_by_coordinate.items(), key=lambda item: -item[1])
    return tuple(Excursion(coordinate, increase) for coordinate, increase in found)
