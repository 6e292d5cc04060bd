r"""Bias of functions of the draws, by Stein's identity.

For a vector field :math:`\varphi` that grows slowly, in preconditioned coordinates throughout,

.. math::

    E_\pi[\varphi\cdot g] = E_\pi[\operatorname{div}\varphi].

For :math:`\varphi = S\nabla f` the difference of the two sides is :math:`E_p[-Lf]` with L the
generator of an overdamped SDE: the bias of the mean of f times the relaxation rate of f, which is
estimated by :math:`E[\varphi\cdot\nabla f]/\operatorname{Var}f`. For :math:`(f - E f)\varphi` it is
the rate at which that SDE would change the variance of f:

.. math::

    E_p[(f - E_p f)(\varphi\cdot g - \operatorname{div}\varphi)]\,/\,E_p[\varphi\cdot\nabla f]

is one for draws of the posterior, and estimates the squared ratio of the SDs. Both are exact if f
is linear and the posterior a Gaussian that the preconditioner standardises, whatever the chains'
covariance. For a square the mean bias is exact too, and the SD inflation half of the true one. Both
are invariant if parameters are permuted without a change of f. Divergences are estimated along one
random direction per draw.

The matrix S is the identity where the posterior is approximately white. Elsewhere, as for a
network's weights in units of their prior SDs, the gradient :math:`\nabla f` alone would give errors
in the narrowest directions the weight of errors in those along which f varies. There

.. math::

    S(q) = (I + c\,B(q)^\top B(q))^{-1}

with B the gradients of some of the functions' values at the draw, each over its SD. They span the
directions that the data determine if the functions are those that were observed, as a network's
predictions are. The curvature along them is estimated from the gradients at draws; c is a small
share of it: a smaller one exaggerates bias, a larger one increases the variance of the estimates.
Where that curvature is below two, c is zero.

Reference: Gorham and Mackey (2015), *Measuring sample quality with Stein's method*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import Predictive

from numpyro_sgmcmc.diagnostics.predictive import DrawFunctions, get_evenly_spaced_indices
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats
from numpyro_sgmcmc.diagnostics.stein_estimates import (
    BiasEstimate,
    BiasMeasurements,
    Estimate,
    GradientsAtDraws,
    SteinEstimates,
    jackknife,
)
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.potential import format_coordinate_names
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Values whose gradients make the matrix S: a bound on the time of its inverse at each draw.
_MAX_METRIC_VALUES = 64
# Default of `min_curvature_ratio`, in preconditioned coordinates.
_MIN_CURVATURE_RATIO = 2.0
# Share of that curvature in S; tuned on linear functions of Gaussians with narrow directions, see
# tests/diagnostics/test_function_bias.py.
_METRIC_CURVATURE_FRACTION = 0.03
# Batches of each chain's draws by time.
_NUM_JACKKNIFE_BATCHES = 16
# Lower bound of the estimated squared ratio of SDs, which noise can make negative.
_MIN_VARIANCE_RATIO = 0.01
_PROBE_SEED = 0


def check_differentiable(
    fn: Any, row_arrays: tuple[Any, ...], draws: Mapping[str, Array]
) -> DrawFunctions:
    """Return the user's function and arrays of rows, after a check of its results' types."""
    if isinstance(fn, Predictive):
        raise InvalidArgumentError(
            "`fn` is a Predictive, but bias is estimated only for differentiable functions.",
            "pass a function such as the mean of the predictive distribution.",
            "function-bias",
        )
    functions = DrawFunctions.from_fn(fn, row_arrays)
    for name, x in functions.eval_shape(draws).items():
        if not jnp.issubdtype(x.dtype, np.floating):
            raise InvalidArgumentError(
                f"`fn` returns '{name}' of type {x.dtype}, which is not a type of real numbers.",
                "return a differentiable quantity, such as a probability in place of a decision.",
                "function-bias",
            )
    return functions


def estimate_function_bias(
    functions: DrawFunctions,
    draws: Mapping[str, Array],
    gradients_at_draws: GradientsAtDraws,
    preconditioner: Preconditioner,
    constrain_fn: Callable[[Array], dict[str, Array]],
    run_estimates: SteinEstimates,
    min_curvature_ratio: float = _MIN_CURVATURE_RATIO,
) -> tuple[tuple[tuple[str, str], ...], BiasMeasurements]:
    """Estimate the bias of each value from gradients at some of the draws.

    :param gradients_at_draws: some of the draws as flat positions, and the gradients there.
    :param preconditioner: coordinates in which Stein's identity is applied.
    :param run_estimates: estimates of the parameters, of which the temperatures are kept.
    :param min_curvature_ratio: curvature along the functions' gradients beyond which S is not the
        identity.
    :return: name of the function and of each of its values, and their bias.
    """
    shapes = functions.eval_shape(draws)
    convergence = ConvergenceStats(*_reduce_by_function(functions, draws, _compute_convergence))
    dtype, dim = preconditioner.center.dtype, preconditioner.center.size
    positions = jnp.asarray(gradients_at_draws.positions, dtype)
    points = {
        "position": positions,
        "gradient": jnp.asarray(gradients_at_draws.gradients, dtype),
        "direction": random.rademacher(random.key(_PROBE_SEED), positions.shape, dtype),
    }
    value_subset_fn = _make_value_subset_fn(functions, shapes, constrain_fn)
    field, capacitance_inverse = SteinField.from_draws(
        value_subset_fn, points, preconditioner, min_curvature_ratio
    )
    if capacitance_inverse is not None:
        points["capacitance_inverse"] = capacitance_inverse
    stein_functions = DrawFunctions(
        partial(_compute_stein_terms, functions, constrain_fn, field),
        functions.row_arrays,
        elements_per_result=dim,
    )
    sums = _reduce_by_function(stein_functions, points, _sum_terms_by_batch)
    bias, variance = _estimate_bias_from_sums(sums)
    stein = run_estimates._replace(
        bias=bias,
        chain_covariance=variance,
        posterior_covariance=variance / np.square(1.0 + bias.sd_inflation.value),
        mcse=np.stack([convergence.ess, 2.0 * convergence.ess]) ** -0.5,
    )
    num_draws = gradients_at_draws.num_draws
    measured = BiasMeasurements((bias,), convergence, stein, num_gradient_draws=num_draws)
    return format_coordinate_names(shapes), measured


def _reduce_by_function(
    functions: DrawFunctions,
    draws: Mapping[str, Array],
    reduce_fn: Callable[[str, np.ndarray], np.ndarray],
) -> np.ndarray:
    """Reduce the values of each function over draws; the last axis of the result is the values'."""
    results: dict[str, list[np.ndarray]] = {}
    for (values,) in functions.iterate_chunks([draws], random.key(_PROBE_SEED)):
        for name, x in values.items():
            results.setdefault(name, []).append(reduce_fn(name, x.astype(np.float64)))
    return np.concatenate([x for parts in results.values() for x in parts], axis=-1)


def _compute_convergence(name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise InvalidArgumentError(
            f"`fn` returns '{name}' that is not finite at some draws.",
            "check its value at the draws of `mcmc.get_samples()`.",
            "function-bias",
        )
    return np.stack(ConvergenceStats.from_draws(values.reshape(*values.shape[:2], -1)))


# --- The field ----------------------------------------------------------------------------------


class SteinField(NamedTuple):
    r"""The vector field :math:`\varphi = S\nabla f`.

    - **preconditioner** - preconditioned coordinates.
    - **values_fn** - maps a flat position to some of the functions' values, shape ``(k,)``.
    - **weights** - :math:`c` over the variance of each of these values, shape ``(k,)``.
    """

    preconditioner: Preconditioner
    values_fn: Callable[[Array], Array]
    weights: Any

    @classmethod
    def from_draws(
        cls,
        values_fn: Callable[[Array], Array],
        points: Mapping[str, Array],
        preconditioner: Preconditioner,
        min_curvature_ratio: float,
    ) -> tuple[SteinField, Array | None]:
        r"""Estimate the field's weights from gradients at draws.

        :param points: positions and gradients, axes of chains and draws first.
        :param min_curvature_ratio: see :func:`estimate_function_bias`.
        :return: the field, and :math:`(I + c\,BB^\top)^{-1}` at each draw, shape ``(chains, draws,
            k, k)``; None if S is the identity.
        """

        def compute_products(point: Mapping[str, Array]) -> dict[str, Array]:
            q = point["position"]
            gradients = preconditioner.apply_transpose(jax.jacrev(values_fn)(q))
            work = gradients @ preconditioner.apply_transpose(point["gradient"])
            return {"value": values_fn(q), "work": work, "products": gradients @ gradients.T}

        products_fn = DrawFunctions(
            compute_products, (), elements_per_result=preconditioner.center.size
        )
        (results,) = next(products_fn.iterate_chunks([points], random.key(0)))
        value, work, products = (
            results[k].astype(np.float64) for k in ("value", "work", "products")
        )
        variance = value.var((0, 1))
        precision = np.divide(1.0, variance, out=np.zeros_like(variance), where=variance > 0.0)
        squared_length = np.diagonal(products, axis1=-2, axis2=-1).mean((0, 1)) @ precision
        squared_work = np.square(work).mean((0, 1)) @ precision
        if not squared_work > min_curvature_ratio * squared_length:
            return cls(preconditioner, values_fn, precision), None
        c = (squared_work - squared_length) / (
            precision @ np.square(products).mean((0, 1)) @ precision
        )
        weights = _METRIC_CURVATURE_FRACTION * c * precision
        root = np.sqrt(weights)
        # Inverted here and not in compiled code, where batches of inverses can deadlock: each
        # occupies a thread that the others wait for.
        capacitance_inverse = np.linalg.inv(np.eye(len(root)) + root[:, None] * products * root)
        dtype = preconditioner.center.dtype
        field = cls(preconditioner, values_fn, jnp.asarray(weights, dtype))
        return field, jnp.asarray(capacitance_inverse, dtype)

    def make_metric_operator(
        self, position: Array, capacitance_inverse: Array | None
    ) -> Callable[[Array], Array]:
        r"""Return the map of preconditioned vectors, as rows, by S at a position.

        :math:`S = I - B^\top (I + BB^\top)^{-1} B` (Woodbury), with c contained in B.

        :param capacitance_inverse: :math:`(I + BB^\top)^{-1}` at this position, a constant; None
            if S is the identity.
        """
        if capacitance_inverse is None:
            return lambda v: v
        b = self.preconditioner.apply_transpose(jax.jacrev(self.values_fn)(position))
        b *= jnp.sqrt(self.weights)[:, None]
        # A Newton step X <- 2X - X(I + BB^T)X keeps the inverse and gives it its derivative.
        capacitance_inverse = 2.0 * capacitance_inverse - capacitance_inverse @ (
            capacitance_inverse + b @ (b.T @ capacitance_inverse)
        )
        return lambda v: v - (v @ b.T) @ capacitance_inverse @ b


def _make_value_subset_fn(
    functions: DrawFunctions,
    result_shapes: Mapping[str, Any],
    constrain_fn: Callable[[Array], dict[str, Array]],
) -> Callable[[Array], Array]:
    """Return a function of a flat position that evaluates some of the values, evenly spaced."""
    values_per_row = sum(int(np.prod(x.shape[1:])) for x in result_shapes.values())
    row_arrays = tuple(
        x[get_evenly_spaced_indices(len(x), max(1, _MAX_METRIC_VALUES // values_per_row))]
        for x in functions.row_arrays
    )

    def values_fn(q: Array) -> Array:
        results = functions.evaluate_draw(None, constrain_fn(q), row_arrays)
        flat = jnp.concatenate([x.reshape(-1) for x in results.values()])
        return flat[get_evenly_spaced_indices(flat.size, _MAX_METRIC_VALUES)]

    return values_fn


# --- Stein's identity ---------------------------------------------------------------------------


def _compute_stein_terms(
    functions: DrawFunctions,
    constrain_fn: Callable[[Array], dict[str, Array]],
    field: SteinField,
    point: dict[str, Array],
    *row_arrays: Array,
) -> dict[str, Array]:
    r"""Return the terms of Stein's identity for each value at one draw, along the last axis.

    They are f, :math:`\varphi\cdot g`, :math:`\varphi\cdot\nabla f` and an estimate
    :math:`v^\top (\partial\varphi/\partial q)\,v` of the divergence of :math:`\varphi` with a
    random direction v.
    """
    v = point["direction"]
    g = field.preconditioner.apply_transpose(point["gradient"])

    def terms_on_rows(*arrays: Array) -> dict[str, Array]:
        def value_fn(q: Array) -> dict[str, Array]:
            return functions.evaluate_draw(None, constrain_fn(q), arrays)

        def field_fn(q: Array) -> tuple[Any, tuple[Any, Any]]:
            gradient = jax.tree.map(field.preconditioner.apply_transpose, jax.jacrev(value_fn)(q))
            metric = field.make_metric_operator(q, point.get("capacitance_inverse"))
            return jax.tree.map(metric, gradient), (gradient, value_fn(q))

        phi, derivative, (gradient, value) = jax.jvp(
            field_fn, (point["position"],), (field.preconditioner.apply(v),), has_aux=True
        )

        def stack(f: Array, phi: Array, grad_f: Array, dphi: Array) -> Array:
            return jnp.stack([f, phi @ g, (phi * grad_f).sum(-1), dphi @ v], -1)

        return jax.tree.map(stack, value, phi, gradient, derivative)

    if not row_arrays:
        return terms_on_rows()
    # Each result depends on its own row alone, so that its gradient needs no other row.
    by_row = jax.vmap(lambda *row: terms_on_rows(*(x[None] for x in row)))(*row_arrays)
    return jax.tree.map(lambda x: x[:, 0], by_row)


def _sum_terms_by_batch(name: str, terms: np.ndarray) -> np.ndarray:
    """Sum terms ``(chains, draws, ..., 4)`` over batches of the draws of each chain by time.

    :return: shape ``(batches, 6, k)``: along the second axis the number of draws, f, which is
        centred, the residual of Stein's identity, the squared gradient, and products of f with f
        and with the residual.
    """
    num_chains, num_draws, *_, num_terms = terms.shape
    f, work, squared_gradient, divergence = np.moveaxis(
        terms.reshape(num_chains, num_draws, -1, num_terms), -1, 0
    )
    f, residual = f - f.mean((0, 1)), work - divergence
    summands = np.stack([np.ones_like(f), f, residual, squared_gradient, f * f, f * residual])
    num_batches = min(_NUM_JACKKNIFE_BATCHES, num_draws)
    starts = np.unique(np.linspace(0, num_draws, num_batches, endpoint=False).astype(int))
    sums = np.add.reduceat(summands, starts, axis=2)
    return np.moveaxis(sums, 0, 2).reshape(-1, len(summands), sums.shape[-1])


def _estimate_bias_from_sums(batch_sums: np.ndarray) -> tuple[BiasEstimate, np.ndarray]:
    """Return the bias and the chains' variance from sums ``(batches, 6, k)``."""

    def statistic(total: np.ndarray) -> np.ndarray:
        f, residual, squared_gradient, f_f, f_residual = total[1:] / total[0]
        variance = f_f - f * f
        with np.errstate(divide="ignore", invalid="ignore"):
            variance_ratio = (f_residual - f * residual) / squared_gradient
            sd_ratio = np.sqrt(np.maximum(variance_ratio, _MIN_VARIANCE_RATIO))
            posterior_variance = variance / np.square(sd_ratio)
            relaxation_rate = squared_gradient / posterior_variance
            mean_bias = residual / (relaxation_rate * np.sqrt(posterior_variance))
        results = np.stack([mean_bias, sd_ratio - 1.0, variance])
        is_constant = ~((variance > 0.0) | (squared_gradient > 0.0))
        return np.where(is_constant, 0.0, results)

    total = batch_sums.sum(0)
    values, errors = jackknife(
        statistic(total),
        [statistic(total - x) for x in batch_sums],
        batch_sums[:, 0, 0] / total[0, 0],
    )
    mean_bias, sd_inflation, (variance, _) = zip(values, errors, strict=True)
    return BiasEstimate(Estimate(*mean_bias), Estimate(*sd_inflation)), variance
