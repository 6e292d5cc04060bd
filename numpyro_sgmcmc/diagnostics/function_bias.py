r"""Bias of functions of the draws, by Stein's identity.

For a vector field :math:`\varphi` that grows slowly, and with whitened coordinates throughout,

.. math::

    E_\pi[\varphi\cdot g] = E_\pi[\operatorname{div}\varphi].

The field :math:`\nabla f` tells how far the mean of f is off: the difference of its two sides,
:math:`E_p[-Lf]` with L the generator of the overdamped SDE, is that shift times the rate at which
f is forgotten, for which :math:`E|\nabla f|^2/\operatorname{Var}f` is taken. The field
:math:`(f - E f)\nabla f` tells how much too wide f is spread: the ratio of its two sides, for draws
of :math:`\pi^{1/T}` T whatever f, is taken for the square of the sds' ratio. Both are exact where f
is linear and the posterior a Gaussian that is white in these coordinates, whatever the chain's
covariance. Of a square the shift is exact too, and half of the sd's excess is told. Where the rate
is far above 1, f goes along directions that are narrower than their coordinates, as in a network's
weights, and what is wrong in the narrowest counts most: the excess of a network's predictions has
been told as 23 % where 5 % was true. Neither minds that parameters may be
exchanged without a change of f. Laplacians are taken along one random direction a draw.

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

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.diagnostics.at_draws import LookedAt
from numpyro_sgmcmc.diagnostics.dependence import Dependence
from numpyro_sgmcmc.diagnostics.estimates import Estimate, Estimates, jackknife
from numpyro_sgmcmc.diagnostics.functions import Functions
from numpyro_sgmcmc.posterior.whitening import Whitening

__all__ = ["FunctionBias", "bias_of_functions", "differentiable"]

_NUM_BATCHES = 16
_NUM_TERMS = 4
_SEED = 0


class FunctionBias(NamedTuple):
    """
    - **names** - of functions, and of each of their values; ``k`` in all.
    - **shift** - chains' means less the posterior's, in posterior sds, shape ``(k,)``.
    - **inflation** - chains' sds over the posterior's, minus one, shape ``(k,)``.
    - **variance** - chains' variances, shape ``(k,)``.
    - **dependence** - of all draws.
    - **num_looked_at** - draws at which gradients were taken.
    """

    names: list[tuple[str, str]]
    shift: Estimate
    inflation: Estimate
    variance: np.ndarray
    dependence: Dependence
    num_looked_at: int

    def in_place_of(self, own: Estimates) -> Estimates:
        """Estimates of these, with the temperatures of the run's own."""
        by_chance = np.stack([self.dependence.ess, 2.0 * self.dependence.ess]) ** -0.5
        return own._replace(
            shift=self.shift,
            inflation=self.inflation,
            covariance=self.variance,
            posterior=self.variance / np.square(1.0 + self.inflation.value),
            chance=by_chance,
        )


def differentiable(fn: Any, rows: tuple[Any, ...], draws: Mapping[str, Array]) -> Functions:
    """What a user has passed, if its bias can be told.

    :raises ValueError: for what is no function of a draw, and results that are not real.
    """
    if isinstance(fn, Predictive):
        raise Refusal(
            "`fn` is a Predictive, but bias is told of functions of a draw that have a gradient, "
            "such as the mean about which it draws."
        )
    functions = Functions.of(fn, rows)
    for name, x in functions.form(draws).items():
        if not jnp.issubdtype(x.dtype, np.floating):
            raise Refusal(
                f"`fn` returns type {x.dtype} as '{name}', but bias is told of real numbers, by "
                "their gradients: return a probability in place of what it decides."
            )
    return functions


def bias_of_functions(
    functions: Functions,
    draws: Mapping[str, Array],
    looked_at: LookedAt,
    coordinates: Whitening,
    constrain: Callable[[Array], dict[str, Array]],
) -> FunctionBias:
    """Of each value, from gradients at some of the draws.

    :param draws: all of them by site, axes of chains and draws first.
    :param looked_at: some of them, and the gradients there.
    :param coordinates: whitened ones.
    :param constrain: maps a flat position to a draw.
    :raises ValueError: where a value is not finite.
    """
    form = functions.form(draws)
    names = [
        (name, name + ("[{}]".format(",".join(map(str, i))) if i else ""))
        for name, x in form.items()
        for i in np.ndindex(x.shape)
    ]
    dependence = _by_name(functions, draws, _dependence)
    dtype = coordinates.anchor.dtype
    at = {
        "position": jnp.asarray(looked_at.positions, dtype),
        "gradient": jnp.asarray(looked_at.gradients, dtype),
    }
    at["direction"] = random.rademacher(random.key(_SEED), at["position"].shape, dtype)
    terms = partial(_terms, functions, coordinates, constrain)
    stein = Functions(terms, functions.rows, width=coordinates.anchor.size)
    sums = _by_name(stein, at, _sums)
    shift, inflation, variance = _estimates(sums)
    num = looked_at.positions[..., 0].size
    return FunctionBias(names, shift, inflation, variance, Dependence(*dependence), num)


def _by_name(
    functions: Functions,
    draws: Mapping[str, Array],
    reduce: Callable[[str, np.ndarray], np.ndarray],
) -> np.ndarray:
    """What is made of the values, one function after the other; the last axis is theirs.

    :param reduce: takes a name and values of shape ``(chains, draws, ...)``.
    """
    found: dict[str, list[np.ndarray]] = {}
    for _, (values,) in functions.by_chunks([draws], random.key(_SEED)):
        for name, x in values.items():
            found.setdefault(name, []).append(reduce(name, x.astype(np.float64)))
    return np.concatenate([x for parts in found.values() for x in parts], axis=-1)


def _dependence(name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise Refusal(f"`{name}` is not finite at some of the draws.")
    return np.stack(Dependence.of(values.reshape(*values.shape[:2], -1)))


def _terms(
    functions: Functions,
    coordinates: Whitening,
    constrain: Callable[[Array], dict[str, Array]],
    at: dict[str, Array],
    *rows: Array,
) -> dict[str, Array]:
    r"""At one draw, of each value: f, :math:`\nabla f\cdot g`, :math:`|\nabla f|^2` and the trace
    of its Hessian about, along the last axis; whitened.
    """
    direction, g = coordinates.push(at["direction"]), coordinates.pull(at["gradient"])

    def at_rows(*some: Array) -> dict[str, Array]:
        def gradient(q: Array) -> tuple[dict[str, Array], dict[str, Array]]:
            value = lambda q: functions.named(None, constrain(q), some)  # noqa: E731
            return jax.jacrev(value)(q), value(q)

        a, turned, value = jax.jvp(gradient, (at["position"],), (direction,), has_aux=True)

        def of_one(value: Array, a: Array, turned: Array) -> Array:
            white = coordinates.pull(a.reshape(-1, a.shape[-1]))
            work, square = white @ g, jnp.square(white).sum(-1)
            trace = turned.reshape(white.shape) @ direction
            together = jnp.stack([value.reshape(-1), work, square, trace], -1)
            return together.reshape(*value.shape, _NUM_TERMS)

        return jax.tree.map(of_one, value, a, turned)

    if not rows:
        return at_rows()
    # Results belong to one row each: the gradient of one asks for no other row.
    one = jax.vmap(lambda *row: at_rows(*(x[None] for x in row)))(*rows)
    return jax.tree.map(lambda x: x[:, 0], one)


def _sums(name: str, terms: np.ndarray) -> np.ndarray:
    """Over batches of the draws by time, of each chain; shape ``(batches, 8, k)``, the number of
    draws first.
    """
    chains, num = terms.shape[:2]
    value, work, square, trace = np.moveaxis(terms, -1, 0).reshape(_NUM_TERMS, chains, num, -1)
    value = value - value.mean((0, 1))
    each = [np.ones_like(value), value, work, square, trace]
    each += [value * value, value * work, value * trace]
    starts = np.unique(np.linspace(0, num, min(_NUM_BATCHES, num), endpoint=False).astype(int))
    found = np.add.reduceat(np.stack(each), starts, axis=2)
    return np.moveaxis(found, 0, 2).reshape(-1, len(each), found.shape[-1])


def _estimates(sums: np.ndarray) -> tuple[Estimate, Estimate, np.ndarray]:
    """Shift, inflation and variance; errors by the jackknife.

    :param sums: shape ``(batches, 8, k)``.
    """

    def statistic(total: np.ndarray) -> np.ndarray:
        num, *rest = total
        f, w, s, t, ff, fw, ft = np.stack(rest) / num
        variance = ff - f * f
        with np.errstate(divide="ignore", invalid="ignore"):
            widening = np.sqrt((fw - f * w) / (s + ft - f * t))
            posterior = variance / np.square(widening)
            rate = s / posterior
            shift = (w - t) / (rate * np.sqrt(posterior))
        found = np.stack([shift, widening - 1.0, variance])
        return np.where((variance > 0.0) | (s > 0.0), found, 0.0)  # the same at all draws

    total = sums.sum(0)
    found = jackknife(
        statistic(total), [statistic(total - x) for x in sums], sums[:, 0, 0] / total[0, 0]
    )
    (shift, inflation, variance), errors = found
    return Estimate(shift, errors[0]), Estimate(inflation, errors[1]), variance
