r"""Along which vector field the bias of a function is told.

The gradient :math:`\nabla f` alone weighs all directions alike, and what is wrong in the narrowest
of them counts as much as what is wrong where f varies. Where the posterior is not white, as that of
a network's weights in units of their priors, it is weighed by a local covariance,

.. math::

    \varphi = S\nabla f, \qquad S(q) = (I + c\,B(q)^\top B(q))^{-1},

with B the whitened gradients of some of the functions' values at this draw, each over its sd. They
span the directions that data hold tight where the functions are what data were observed of, as a
network's predictions are, wherever these directions turn to. With c the curvature along them is
what the gradients at draws say; a thirtieth of it is taken: with less of it the estimates
exaggerate more, with more of it they scatter more. Where that curvature is below two, c is zero and
the field the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.diagnostics.functions import DrawFunctions
from numpyro_sgmcmc.posterior.whitening import Preconditioner

__all__ = ["SteinField"]

_MAX_METRIC_VALUES = 64  # values whose gradients make the metric
_MIN_CURVATURE_RATIO = 2.0  # curvature beyond which coordinates are not white
_METRIC_CURVATURE_FRACTION = 0.03


class SteinField(NamedTuple):
    """
    - **preconditioner** - whitened ones.
    - **constrain_fn** - maps a flat position to a draw.
    - **values_fn** - maps a flat position to values of the functions, shape ``(k,)``.
    - **weights** - :math:`c` over each value's variance, shape ``(k,)``.
    """

    preconditioner: Preconditioner
    constrain_fn: Callable[[Array], dict[str, Array]]
    values_fn: Callable[[Array], Array]
    weights: Any

    @classmethod
    def from_draws(
        cls,
        functions: DrawFunctions,
        result_shapes: Mapping[str, Any],
        points: Mapping[str, Array],
        preconditioner: Preconditioner,
        constrain_fn: Callable[[Array], dict[str, Array]],
    ) -> tuple[SteinField, Array | None]:
        r"""Measured at draws.

        :param result_shapes: shapes of the results on all rows.
        :param points: positions and gradients, axes of chains and draws first.
        :return: besides :math:`(I + c\,BB^\top)^{-1}` at each draw, shape ``(chains, draws, k,
            k)``; None where the field is the gradient.
        """
        values = _make_value_subset_fn(functions, result_shapes, constrain_fn)
        measure = DrawFunctions(
            partial(_compute_gradient_products, values, preconditioner),
            (),
            elements_per_result=preconditioner.center.size,
        )
        _, (found,) = next(measure.iterate_chunks([points], random.key(0)))
        value, work, products = (found[k].astype(np.float64) for k in ("value", "work", "products"))
        variance = value.var((0, 1))
        over = np.divide(1.0, variance, out=np.zeros_like(variance), where=variance > 0.0)
        length = np.diagonal(products, axis1=-2, axis2=-1).mean((0, 1)) @ over
        curved = np.square(work).mean((0, 1)) @ over
        if not curved > _MIN_CURVATURE_RATIO * length:
            return cls(preconditioner, constrain_fn, values, over), None
        c = (curved - length) / (over @ np.square(products).mean((0, 1)) @ over)
        dtype = preconditioner.center.dtype
        weights = _METRIC_CURVATURE_FRACTION * c * over
        root = np.sqrt(weights)
        # Here, and not where it is used: batches of inverses in compiled code can wait for each
        # other for ever, each on a thread that the other's need.
        inner = np.linalg.inv(np.eye(len(root)) + root[:, None] * products * root)
        field = cls(preconditioner, constrain_fn, values, jnp.asarray(weights, dtype))
        return field, jnp.asarray(inner, dtype)

    def make_metric_operator(
        self, position: Array, capacitance_inverse: Array | None
    ) -> Callable[[Array], Array]:
        """The map of whitened vectors, each a row, by S at this position.

        :param capacitance_inverse: the inverse there, of which the derivative is not asked for.
        """
        if capacitance_inverse is None:
            return lambda white: white
        b = self.preconditioner.apply_transpose(jax.jacrev(self.values_fn)(position))
        b *= jnp.sqrt(self.weights)[:, None]
        # Newton's step leaves an inverse as it is, and has the derivative of one.
        capacitance_inverse = 2.0 * capacitance_inverse - capacitance_inverse @ (
            capacitance_inverse + b @ (b.T @ capacitance_inverse)
        )
        return lambda white: white - (white @ b.T) @ capacitance_inverse @ b


def _make_value_subset_fn(
    functions: DrawFunctions,
    result_shapes: Mapping[str, Any],
    constrain_fn: Callable[[Array], dict[str, Array]],
) -> Callable[[Array], Array]:
    """A few of the values, evenly."""
    a_row = sum(int(np.prod(x.shape[1:])) for x in result_shapes.values())
    rows = tuple(
        x[_evenly_spaced_indices(len(x), max(1, _MAX_METRIC_VALUES // a_row))]
        for x in functions.row_arrays
    )

    def values(q: Array) -> Array:
        found = functions.evaluate_draw(None, constrain_fn(q), rows)
        flat = jnp.concatenate([x.reshape(-1) for x in found.values()])
        return flat[_evenly_spaced_indices(flat.size, _MAX_METRIC_VALUES)]

    return values


def _evenly_spaced_indices(num: int, max_count: int) -> np.ndarray:
    return np.unique(np.linspace(0, num - 1, min(num, max_count)).astype(int))


def _compute_gradient_products(
    values_fn: Callable[[Array], Array], preconditioner: Preconditioner, point: Mapping[str, Array]
) -> dict[str, Array]:
    """At one draw: values, their gradients' products with the posterior's, and with each other."""
    q = point["position"]
    white = preconditioner.apply_transpose(jax.jacrev(values_fn)(q))
    work = white @ preconditioner.apply_transpose(point["gradient"])
    return {"value": values_fn(q), "work": work, "products": white @ white.T}
