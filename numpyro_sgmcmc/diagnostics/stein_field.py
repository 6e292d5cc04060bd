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

from numpyro_sgmcmc.diagnostics.functions import Functions
from numpyro_sgmcmc.posterior.whitening import Whitening

__all__ = ["Field"]

_MOST = 64  # values whose gradients make the metric
_NARROW = 2.0  # curvature beyond which coordinates are not white
_SHARE = 0.03


class Field(NamedTuple):
    """
    - **coordinates** - whitened ones.
    - **constrain** - maps a flat position to a draw.
    - **values** - maps a flat position to values of the functions, shape ``(k,)``.
    - **weights** - :math:`c` over each value's variance, shape ``(k,)``.
    """

    coordinates: Whitening
    constrain: Callable[[Array], dict[str, Array]]
    values: Callable[[Array], Array]
    weights: Any

    @classmethod
    def of(
        cls,
        functions: Functions,
        form: Mapping[str, Any],
        at: Mapping[str, Array],
        coordinates: Whitening,
        constrain: Callable[[Array], dict[str, Array]],
    ) -> tuple[Field, Array | None]:
        r"""Measured at draws.

        :param form: shapes of the results on all rows.
        :param at: positions and gradients, axes of chains and draws first.
        :return: besides :math:`(I + c\,BB^\top)^{-1}` at each draw, shape ``(chains, draws, k,
            k)``; None where the field is the gradient.
        """
        values = _some_of(functions, form, constrain)
        measure = Functions(
            partial(_moments, values, coordinates), (), width=coordinates.anchor.size
        )
        _, (found,) = next(measure.by_chunks([at], random.key(0)))
        value, work, products = (found[k].astype(np.float64) for k in ("value", "work", "products"))
        variance = value.var((0, 1))
        over = np.divide(1.0, variance, out=np.zeros_like(variance), where=variance > 0.0)
        length = np.diagonal(products, axis1=-2, axis2=-1).mean((0, 1)) @ over
        curved = np.square(work).mean((0, 1)) @ over
        if not curved > _NARROW * length:
            return cls(coordinates, constrain, values, over), None
        c = (curved - length) / (over @ np.square(products).mean((0, 1)) @ over)
        dtype = coordinates.anchor.dtype
        weights = _SHARE * c * over
        root = np.sqrt(weights)
        # Here, and not where it is used: batches of inverses in compiled code can wait for each
        # other for ever, each on a thread that the other's need.
        inner = np.linalg.inv(np.eye(len(root)) + root[:, None] * products * root)
        field = cls(coordinates, constrain, values, jnp.asarray(weights, dtype))
        return field, jnp.asarray(inner, dtype)

    def at(self, position: Array, inner: Array | None) -> Callable[[Array], Array]:
        """The map of whitened vectors, each a row, by S at this position.

        :param inner: the inverse there, of which the derivative is not asked for.
        """
        if inner is None:
            return lambda white: white
        b = self.coordinates.pull(jax.jacrev(self.values)(position))
        b *= jnp.sqrt(self.weights)[:, None]
        # Newton's step leaves an inverse as it is, and has the derivative of one.
        inner = 2.0 * inner - inner @ (inner + b @ (b.T @ inner))
        return lambda white: white - (white @ b.T) @ inner @ b


def _some_of(
    functions: Functions, form: Mapping[str, Any], constrain: Callable[[Array], dict[str, Array]]
) -> Callable[[Array], Array]:
    """A few of the values, evenly."""
    a_row = sum(int(np.prod(x.shape[1:])) for x in form.values())
    rows = tuple(x[_evenly(len(x), max(1, _MOST // a_row))] for x in functions.rows)

    def values(q: Array) -> Array:
        found = functions.named(None, constrain(q), rows)
        flat = jnp.concatenate([x.reshape(-1) for x in found.values()])
        return flat[_evenly(flat.size, _MOST)]

    return values


def _evenly(num: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, num - 1, min(num, most)).astype(int))


def _moments(
    values: Callable[[Array], Array], coordinates: Whitening, at: Mapping[str, Array]
) -> dict[str, Array]:
    """At one draw: values, their gradients' products with the posterior's, and with each other."""
    q = at["position"]
    white = coordinates.pull(jax.jacrev(values)(q))
    work = white @ coordinates.pull(at["gradient"])
    return {"value": values(q), "work": work, "products": white @ white.T}
