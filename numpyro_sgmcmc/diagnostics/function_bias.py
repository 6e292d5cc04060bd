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

Bias of functions of the draws, by Stein's identity.

For a vector field :math:`\varphi` that grows slowly, and with whitened coordinates throughout,

.. math::

    E_\pi[\varphi\cdot g] = E_\pi[\operatorname{div}\varphi].

Of :math:`\varphi = S\nabla f` the difference of the two sides, :math:`E_p[-Lf]` with L the
generator of an overdamped SDE, tells how far the mean of f is off: it is that shift times the rate
at which f is forgotten, for which :math:`E[\varphi\cdot\nabla f]/\operatorname{Var}f` is taken. Of
:math:`(f - E f)\varphi` they tell how fast that SDE would narrow the spread of f:

.. math::

    E_p[(f - E_p f)(\varphi\cdot g - \operatorname{div}\varphi)]\,/\,E_p[\varphi\cdot\nabla f]

is one for the posterior's draws, and taken for the square of the sds' ratio. S is the identity, or
where the posterior is not white in these coordinates a local covariance
(:mod:`~numpyro_sgmcmc.diagnostics.function_bias`). Both are exact where f is linear and the posterior
a Gaussian that is white in these coordinates, whatever the chain's covariance. Of a square the
shift is exact too, and half of the sd's excess is told. Neither minds that parameters may be
exchanged without a change of f. Divergences are taken along one random direction a draw.

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

from numpyro_sgmcmc.diagnostics.predictive import DrawFunctions
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats, GradientsAtDraws
from numpyro_sgmcmc.diagnostics.stein_estimates import Estimate, SteinEstimates, jackknife
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = [
    "FunctionBias",
    "SteinField",
    "check_differentiable",
    "estimate_function_bias",
]

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


_NUM_JACKKNIFE_BATCHES = 16


_NUM_STEIN_TERMS = 4


_PROBE_SEED = 0


_MIN_VARIANCE_RATIO = (
    0.01  # of the variances' ratio: where many times too hot, it may be said to be less
)


class FunctionBias(NamedTuple):
    """
    - **names** - of functions, and of each of their values; ``k`` in all.
    - **mean_bias** - chains' means less the posterior's, in posterior sds, shape ``(k,)``.
    - **sd_inflation** - chains' sds over the posterior's, minus one, shape ``(k,)``.
    - **variance** - chains' variances, shape ``(k,)``.
    - **convergence** - of all draws.
    - **num_gradient_draws** - draws at which gradients were taken.
    """

    names: list[tuple[str, str]]
    mean_bias: Estimate
    sd_inflation: Estimate
    variance: np.ndarray
    convergence: ConvergenceStats
    num_gradient_draws: int

    def to_estimates(self, run_estimates: SteinEstimates) -> SteinEstimates:
        """Estimates of these, with the temperatures of the run's own."""
        by_chance = np.stack([self.convergence.ess, 2.0 * self.convergence.ess]) ** -0.5
        return run_estimates._replace(
            mean_bias=self.mean_bias,
            sd_inflation=self.sd_inflation,
            chain_covariance=self.variance,
            posterior_covariance=self.variance / np.square(1.0 + self.sd_inflation.value),
            mcse=by_chance,
        )


def check_differentiable(
    fn: Any, row_arrays: tuple[Any, ...], draws: Mapping[str, Array]
) -> DrawFunctions:
    """What a user has passed, if its bias can be told.

    :raises ValueError: for what is no function of a draw, and results that are not real.
    """
    if isinstance(fn, Predictive):
        raise InvalidArgumentError(
            "`fn` is a Predictive, but bias is told of functions of a draw that have a gradient, "
            "such as the mean about which it draws."
        )
    functions = DrawFunctions.from_fn(fn, row_arrays)
    for name, x in functions.eval_shape(draws).items():
        if not jnp.issubdtype(x.dtype, np.floating):
            raise InvalidArgumentError(
                f"`fn` returns type {x.dtype} as '{name}', but bias is told of real numbers, by "
                "their gradients: return a probability in place of what it decides."
            )
    return functions


def estimate_function_bias(
    functions: DrawFunctions,
    draws: Mapping[str, Array],
    gradients_at_draws: GradientsAtDraws,
    preconditioner: Preconditioner,
    constrain_fn: Callable[[Array], dict[str, Array]],
) -> FunctionBias:
    """Of each value, from gradients at some of the draws.

    :param draws: all of them by site, axes of chains and draws first.
    :param gradients_at_draws: some of them, and the gradients there.
    :param preconditioner: whitened ones.
    :param constrain_fn: maps a flat position to a draw.
    :raises ValueError: where a value is not finite.
    """
    form = functions.eval_shape(draws)
    names = [
        (name, name + ("[{}]".format(",".join(map(str, i))) if i else ""))
        for name, x in form.items()
        for i in np.ndindex(x.shape)
    ]
    dependence = _reduce_values_by_function(functions, draws, _compute_convergence)
    dtype = preconditioner.center.dtype
    at = {
        "position": jnp.asarray(gradients_at_draws.positions, dtype),
        "gradient": jnp.asarray(gradients_at_draws.gradients, dtype),
    }
    at["direction"] = random.rademacher(random.key(_PROBE_SEED), at["position"].shape, dtype)
    field, inner = SteinField.from_draws(functions, form, at, preconditioner, constrain_fn)
    if inner is not None:
        at["inner"] = inner
    terms = partial(_compute_stein_terms, functions, field)
    stein = DrawFunctions(
        terms, functions.row_arrays, elements_per_result=preconditioner.center.size
    )
    sums = _reduce_values_by_function(stein, at, _sum_terms_by_batch)
    shift, inflation, variance = _estimate_bias_from_sums(sums)
    num = gradients_at_draws.positions[..., 0].size
    return FunctionBias(names, shift, inflation, variance, ConvergenceStats(*dependence), num)


def _reduce_values_by_function(
    functions: DrawFunctions,
    draws: Mapping[str, Array],
    reduce_fn: Callable[[str, np.ndarray], np.ndarray],
) -> np.ndarray:
    """What is made of the values, one function after the other; the last axis is theirs.

    :param reduce_fn: takes a name and values of shape ``(chains, draws, ...)``.
    """
    found: dict[str, list[np.ndarray]] = {}
    for _, (values,) in functions.iterate_chunks([draws], random.key(_PROBE_SEED)):
        for name, x in values.items():
            found.setdefault(name, []).append(reduce_fn(name, x.astype(np.float64)))
    return np.concatenate([x for parts in found.values() for x in parts], axis=-1)


def _compute_convergence(name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise InvalidArgumentError(f"`{name}` is not finite at some of the draws.")
    return np.stack(ConvergenceStats.from_draws(values.reshape(*values.shape[:2], -1)))


def _compute_stein_terms(
    functions: DrawFunctions, field: SteinField, point: dict[str, Array], *row_arrays: Array
) -> dict[str, Array]:
    r"""At one draw, of each value: f, :math:`\varphi\cdot g`, :math:`\varphi\cdot\nabla f` and the
    divergence of :math:`\varphi` about, along the last axis; whitened.
    """
    direction, g = point["direction"], field.preconditioner.apply_transpose(point["gradient"])

    def at_rows(*some: Array) -> dict[str, Array]:
        value = lambda q: functions.evaluate_draw(None, field.constrain_fn(q), some)  # noqa: E731

        def along(q: Array) -> tuple[dict[str, Array], tuple[dict[str, Array], dict[str, Array]]]:
            white = jax.tree.map(field.preconditioner.apply_transpose, jax.jacrev(value)(q))
            own = field.make_metric_operator(q, point.get("inner"))
            return jax.tree.map(own, white), (white, value(q))

        phi, turned, (white, found) = jax.jvp(
            along, (point["position"],), (field.preconditioner.apply(direction),), has_aux=True
        )

        def of_one(value: Array, phi: Array, white: Array, turned: Array) -> Array:
            each = [value, phi @ g, (phi * white).sum(-1), turned @ direction]
            return jnp.stack(each, -1)

        return jax.tree.map(of_one, found, phi, white, turned)

    if not row_arrays:
        return at_rows()
    # Results belong to one row each: the gradient of one asks for no other row.
    one = jax.vmap(lambda *row: at_rows(*(x[None] for x in row)))(*row_arrays)
    return jax.tree.map(lambda x: x[:, 0], one)


def _sum_terms_by_batch(name: str, terms: np.ndarray) -> np.ndarray:
    """Over batches of the draws by time, of each chain; shape ``(batches, 8, k)``, the number of
    draws first.
    """
    chains, num = terms.shape[:2]
    value, work, square, trace = np.moveaxis(terms, -1, 0).reshape(
        _NUM_STEIN_TERMS, chains, num, -1
    )
    value = value - value.mean((0, 1))
    each = [np.ones_like(value), value, work, square, trace]
    each += [value * value, value * work, value * trace]
    starts = np.unique(
        np.linspace(0, num, min(_NUM_JACKKNIFE_BATCHES, num), endpoint=False).astype(int)
    )
    found = np.add.reduceat(np.stack(each), starts, axis=2)
    return np.moveaxis(found, 0, 2).reshape(-1, len(each), found.shape[-1])


def _estimate_bias_from_sums(batch_sums: np.ndarray) -> tuple[Estimate, Estimate, np.ndarray]:
    """Shift, inflation and variance; errors by the jackknife.

    :param batch_sums: shape ``(batches, 8, k)``.
    """

    def statistic(total: np.ndarray) -> np.ndarray:
        num, *rest = total
        f, w, s, t, ff, fw, ft = np.stack(rest) / num
        variance = ff - f * f
        with np.errstate(divide="ignore", invalid="ignore"):
            widening = np.sqrt(np.maximum((fw - f * w - (ft - f * t)) / s, _MIN_VARIANCE_RATIO))
            posterior = variance / np.square(widening)
            rate = s / posterior
            shift = (w - t) / (rate * np.sqrt(posterior))
        found = np.stack([shift, widening - 1.0, variance])
        return np.where((variance > 0.0) | (s > 0.0), found, 0.0)  # the same at all draws

    total = batch_sums.sum(0)
    found = jackknife(
        statistic(total),
        [statistic(total - x) for x in batch_sums],
        batch_sums[:, 0, 0] / total[0, 0],
    )
    (shift, inflation, variance), errors = found
    return Estimate(shift, errors[0]), Estimate(inflation, errors[1]), variance
