"""Choice of coordinates in which the Hessian of a nearly normal posterior is the identity.

For regressions with hundreds to thousands of weights, such as multinomial ones, in which columns
are correlated and a minibatch has fewer rows than there are weights. A diagonal leaves directions
of very different widths, and a control variate of first order so much noise that steps are short. A
full matrix costs a product of all pairs of coordinates at every step; that of second order then
adds only a product of the minibatch's Hessian with one vector.
"""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.adaptation.batch_size import SECONDS_PER_VALUE, estimate_gradient_seconds
from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions
from numpyro_sgmcmc.adaptation.gradient_noise import estimate_max_curvature, measure_noise
from numpyro_sgmcmc.adaptation.preconditioning import build_hessian_root
from numpyro_sgmcmc.adaptation.settings import Candidates, WarmupInputs
from numpyro_sgmcmc.adaptation.step_size import NoiseLimit
from numpyro_sgmcmc.adaptation.subsampling_choice import choose_estimator, count_equivalent_steps
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS, GradientEstimator
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Coordinates: fewer are well served by directions from draws; of more, matrices in float64 take
# gigabytes.
_MIN_DIM, _MAX_DIM = 257, 8_000
# Rows times coordinates of a Hessian: minutes on two cores with 8,000 of these.
_MAX_ROW_PRODUCTS = 2**29
_NUM_POSITIONS = 8  # at which noise is measured and gradients are compared with a normal's
_NUM_CHAINS = 4  # that share the cost of an operation, as in a usual run
_MIN_STEPS = 10.0  # per draw with an exact gradient: the least that any coordinates allow
# Mean squared difference of the gradient from that of a normal in a coordinate, up to which the
# posterior is nearly normal: 0.006 in multinomial regressions.
_MAX_MEAN_SQUARED_DIFFERENCE = 0.2


def choose_hessian_root(
    inputs: WarmupInputs, candidates: Candidates, preconditioner: Preconditioner, fit: MeanField
) -> Preconditioner | None:
    """Return coordinates of the Hessian's inverse root where draws cost less in them, else None.

    :param preconditioner: the diagonal of a fit, in which the cost of a draw is estimated from
        below: wide directions across coordinates are not seen.
    """
    potential = inputs.potential
    if not _is_applicable(inputs, candidates):
        return None
    gradient_seconds = estimate_gradient_seconds(potential, inputs.arguments, _NUM_CHAINS)
    product_seconds = SECONDS_PER_VALUE * 2.0 * potential.dim**2
    rng = np.random.default_rng(0)  # so that the choices for other models do not change
    normals = rng.standard_normal((_NUM_POSITIONS, potential.dim))

    def compute_cost(
        preconditioner: Preconditioner, estimators: tuple[GradientEstimator, ...], seconds: float
    ) -> float:
        """Return the seconds of an independent draw.

        :param seconds: of a step beside its gradients.
        """
        bulk = BulkPositions(inputs.batched_gradients, preconditioner, normals)
        noise = measure_noise(bulk, estimators, IIDSubsampling(), rng)
        limit = NoiseLimit.from_settings(inputs.settings, estimate_max_curvature(bulk, rng))
        choice = choose_estimator(estimators, IIDSubsampling(), noise, limit)
        step_seconds = choice.estimator.relative_cost * gradient_seconds + seconds
        return step_seconds * count_equivalent_steps(choice, limit)

    cost = compute_cost(preconditioner, candidates.estimators, 0.0)
    if cost < _MIN_STEPS * (gradient_seconds + product_seconds):
        return None
    root = build_hessian_root(inputs, fit.mean)
    if root is None or not _is_nearly_normal(inputs, root, normals):
        return None
    estimators = tuple(GRADIENT_ESTIMATORS.values())
    return root if compute_cost(root, estimators, product_seconds) < cost else None


def _is_applicable(inputs: WarmupInputs, candidates: Candidates) -> bool:
    """Return whether model and settings allow these coordinates, at an affordable cost."""
    potential, settings = inputs.potential, inputs.settings
    num_rows = sum(p.size for p in potential.plates)
    has_remote_rows = inputs.arguments.host_arrays or potential.shards is not None
    return (
        _MIN_DIM <= potential.dim <= _MAX_DIM
        and potential.dim * num_rows <= _MAX_ROW_PRODUCTS
        and potential.has_minibatches
        and not (potential.is_stochastic or has_remote_rows)
        and settings.is_form_free
        and settings.inverse_mass_matrix is None
        and not (settings.is_site_aligned or settings.noise_compensation or settings.init_in_modes)
        and candidates.is_estimator_free
    )


def _is_nearly_normal(inputs: WarmupInputs, root: Preconditioner, q: np.ndarray) -> bool:
    """Return whether gradients change as those of a standard normal do, in these coordinates."""
    points = np.concatenate([np.zeros((1, q.shape[1])), q])
    _, gradients = inputs.batched_gradients.evaluate_on_subset(root.to_position(points))
    changes = root.apply_transpose(gradients[1:] - gradients[0])
    return bool(np.square(changes - q).mean() < _MAX_MEAN_SQUARED_DIFFERENCE)
