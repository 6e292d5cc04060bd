r"""Draws that are far outside of the posterior.

Rare, large gradients of a few observations, or steps that are unstable in a tail, can move a
coordinate far from the posterior, from where it returns within some draws. Means hardly change, but
SDs do, and the tails of draws then look like those of a posterior with heavy tails.

The density distinguishes the two. Let x be a draw and x' the same draw with coordinate j at its
median. Given the other coordinates, a draw of the posterior has :math:`U(x) - U(x') > t` with a
probability of about :math:`e^{-t}` if the tails are exponential or lighter. If they fall off as a
power, the potential grows as a logarithm, and the probability is about :math:`e^{-ta/(1 + a)}` for
a Student t distribution with a degrees of freedom: :math:`e^{-t/2}` for a Cauchy distribution. So
with n draws of d coordinates, differences beyond :math:`2\log(nd)` by several nats do not occur.
"""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.diagnostics.geometry import Excursion, find_outlying_draws
from numpyro_sgmcmc.diagnostics.run_data import RunData

# Coordinates with the farthest draws that are examined: a bound on time.
_MAX_CANDIDATES = 16
# Draws of a Cauchy distribution, the heaviest tails that count, are beyond with this probability.
_MAX_FALSE_POSITIVE_RATE = 1e-3
# Of the potential's sum over rows, relative to it and in machine precisions.
_ROUNDING_ERRORS = 16.0


def find_excursions(run: RunData, draws: np.ndarray) -> tuple[Excursion, ...]:
    """Return the coordinates that have draws far outside of the posterior, the clearest first.

    If there is one, all coordinates with outlying draws are included: the draw of a scale may be
    likely given an effect that is far outside. The function takes a pass over the rows if there are
    outlying draws. Not supported (and empty) for rows on disk, randomised likelihoods, and chains
    in several modes.

    :param draws: in unconstrained space, shape ``(chains, n, d)``.
    """
    potential, arguments = run.kernel.potential, run.arguments
    if arguments.host_arrays or potential.is_stochastic or run.center_offsets.any():
        return ()
    flat = draws.reshape(-1, draws.shape[-1])
    outlying = find_outlying_draws(flat, _MAX_CANDIDATES)
    if not outlying:
        return ()
    moved = flat[[x.draw for x in outlying]]
    at_medians = moved.copy()
    for position, x in zip(at_medians, outlying, strict=True):
        position[x.coordinate] = x.median
    batched = BatchedGradients(potential, arguments)
    potentials = batched.full_potentials(np.concatenate([moved, at_medians]))
    of_draws, of_medians = np.split(np.asarray(potentials, np.float64), 2)
    rounding = _ROUNDING_ERRORS * np.finfo(potential.dtype).eps * np.abs(of_medians)
    threshold = 2.0 * np.log(flat.size / _MAX_FALSE_POSITIVE_RATE) + rounding
    increases = of_draws - of_medians
    increases[np.isnan(increases)] = np.inf
    if (increases <= threshold).all():
        return ()
    order = np.argsort(-increases, kind="stable")
    return tuple(Excursion(outlying[k].coordinate, float(increases[k])) for k in order)
