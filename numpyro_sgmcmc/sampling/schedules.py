r"""Step-size schedules, and averages weighted by step size.

A schedule is any function of the number of steps so far, such as optax's. With a step size that
changes, draws have different weights: averages converge for
:math:`\tilde\phi = \sum_l h_l\phi_l / \sum_l h_l` (Chen, Ding and Carin 2015, section 3.3). Every
kernel keeps the weight of each draw in its state: ask for ``extra_fields=("weight",)`` and pass it
to the functions here.

**Example**

.. doctest::

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import MCMC
    >>> from numpyro_sgmcmc import SGHMCSplit, schedules

    >>> kernel = SGHMCSplit(
    ...     potential_fn=lambda q: jnp.square(q).sum() / 2,
    ...     step_size=schedules.Polynomial(0.5, schedules.optimal_decay_exponent(2, "mse")),
    ...     num_steps=10,
    ... )
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=2000, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), init_params=jnp.zeros(1), extra_fields=("weight",))
    >>> mean = schedules.weighted_mean(mcmc.get_samples(), mcmc.get_extra_fields()["weight"])
    >>> bool(abs(mean[0]) < 0.15)
    True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.errors import InvalidArgumentError, summarise_error

__all__ = [
    "Cyclical",
    "Polynomial",
    "drop_exploration",
    "first_step_size",
    "optimal_decay_exponent",
    "systematic_resample",
    "weighted_mean",
    "weighted_quantile",
]

# Steps at which a schedule is checked, and the last at which it must not be negative: schedules
# that decrease linearly may end below zero, after the run.
_CHECKED_STEPS = (0, *(a * 10**b for b in range(5) for a in (1, 2, 5)))
_LAST_NONNEGATIVE_STEP = 100


@dataclass(frozen=True)
class Polynomial:
    r"""Step sizes :math:`h_0 l^{-\alpha}` for steps l = 1, 2, ...

    :param float initial: first step size :math:`h_0`, positive, in preconditioned coordinates.
    :param float exponent: :math:`\alpha`, in (0, 1], so that averages converge. Default 1/3.
    :raises ValueError: for a value out of range.
    """

    initial: float
    exponent: float = 1.0 / 3.0

    def __post_init__(self) -> None:
        _set_fields(
            self,
            initial=errors.check_positive("initial", self.initial),
            exponent=errors.check_fraction("exponent", self.exponent, "(0, 1]"),
        )

    def __call__(self, count: Any) -> Array:
        return self.initial * (1.0 + jnp.asarray(count, float)) ** -self.exponent


@dataclass(frozen=True)
class Cyclical:
    """Step sizes in cosine cycles. Long steps find a mode, and short steps sample it.

    The first part of each cycle explores. Its draws have weight zero, and :func:`drop_exploration`
    leaves them out.

    :param float initial: step size at the start of each cycle, in preconditioned coordinates.
    :param int period: number of steps per cycle.
    :param float exploration: fraction of the cycle that explores, in [0, 1). Default 0.5.
    :param float final: smallest step size as a fraction of ``initial``, in [0, 1]. Default 0.05.
    :raises ValueError: for a value out of range.

    Reference: Zhang, Li, Zhang, Chen and Wilson (2020), *Cyclical stochastic gradient MCMC for
    Bayesian deep learning*, equation (1).
    """

    initial: float
    period: int
    exploration: float = 0.5
    final: float = 0.05

    def __post_init__(self) -> None:
        errors.check_positive_int("period", self.period)
        _set_fields(
            self,
            initial=errors.check_positive("initial", self.initial),
            final=errors.check_fraction("final", self.final, "[0, 1]"),
            exploration=errors.check_fraction("exploration", self.exploration, "[0, 1)"),
        )

    def __call__(self, count: Any) -> Array:
        cosine = (jnp.cos(jnp.pi * self._phase(count)) + 1.0) / 2.0
        return self.initial * jnp.maximum(cosine, self.final)

    def weight(self, count: Any) -> Array:
        """Return the weight of a step: its size, or zero where the cycle explores."""
        return jnp.where(self._phase(count) >= self.exploration, self(count), 0.0)

    def _phase(self, count: Any) -> Array:
        return (jnp.asarray(count) % self.period) / self.period


def optimal_decay_exponent(order: float, criterion: str) -> float:
    """Return the exponent of :class:`Polynomial` with the fastest convergence of averages.

    :param order: weak order K of the integrator, positive.
    :param criterion: ``"bias"`` for the exponent 1 / (K + 1), ``"mse"`` for 1 / (2 K + 1).
    :return: the exponent.
    :raises ValueError: for another criterion.

    Reference: Chen, Ding and Carin (2015), theorem 5 and remark 7.
    """
    errors.check_choice("criterion", criterion, ("bias", "mse"))
    order = errors.check_positive("order", order)
    return 1.0 / (order + 1 if criterion == "bias" else 2 * order + 1)


def first_step_size(schedule: Any) -> float:
    """Return a schedule's first step size, or its largest if it starts at zero.

    The schedule is checked at 16 numbers of steps from 0 to 50,000.

    :param schedule: function from the number of steps so far to a step size.
    :return: a positive number.
    :raises ValueError: if JAX cannot trace the schedule, or a step size is not valid.
    """

    def evaluate(count: Any) -> Any:
        step_size = jnp.asarray(schedule(count))
        if step_size.shape or jnp.issubdtype(step_size.dtype, jnp.complexfloating):
            raise TypeError(f"it returns {step_size.dtype} of shape {step_size.shape}")
        return step_size

    try:
        jax.eval_shape(evaluate, jnp.int32(0))
    except Exception as error:
        raise InvalidArgumentError(
            f"Calling the schedule `step_size` failed: {summarise_error(error)}.",
            "pass a function of the number of steps so far that JAX can trace (no Python `if` on "
            "it) and that returns a real number.",
            "schedule-function",
        ) from error
    step_sizes = [float(schedule(count)) for count in _CHECKED_STEPS]
    for count, size in zip(_CHECKED_STEPS, step_sizes, strict=True):
        if not np.isfinite(size) or (size < 0 and count <= _LAST_NONNEGATIVE_STEP):
            raise InvalidArgumentError(
                f"`step_size({count})` is {size}, which is not a valid step size.",
                "let the schedule return finite numbers that are not negative.",
                "schedule-values",
            )
    if max(step_sizes) <= 0:
        raise InvalidArgumentError(
            f"The schedule `step_size` is zero at all steps up to {_CHECKED_STEPS[-1]}.",
            "let the schedule return positive numbers.",
            "schedule-values",
        )
    return step_sizes[0] if step_sizes[0] > 0 else max(step_sizes)


# Weighted draws.


def weighted_mean(draws: Any, weights: Any) -> Any:
    """Return weighted means over all draws and chains.

    :param draws: pytree of arrays whose leading axes are those of ``weights``.
    :param weights: weights, not negative, of shape ``(draws,)`` or ``(chains, draws)``.
    :return: pytree of arrays without these axes.
    :raises ValueError: for weights of another shape, negative, or all zero.
    """
    weights = _check_weights(draws, weights)
    normalized = jnp.asarray(weights / weights.sum()).ravel()
    return jax.tree.map(
        lambda x: jnp.tensordot(normalized, x.reshape(weights.size, *x.shape[weights.ndim :]), 1),
        draws,
    )


def weighted_quantile(draws: Any, weights: Any, q: float) -> Any:
    """Return the smallest values whose cumulative weight is at least the fraction ``q``.

    This is the method "inverted_cdf" of :func:`numpy.quantile`.

    :param draws: as in :func:`weighted_mean`.
    :param weights: as in :func:`weighted_mean`.
    :param q: fraction of the weight, in [0, 1].
    :return: quantiles, without the axes of chains and draws.
    :raises ValueError: as :func:`weighted_mean`, and for ``q`` out of range.
    """
    q = errors.check_fraction("q", q, "[0, 1]")
    weights = _check_weights(draws, weights)

    def quantile(x: Any) -> Array:
        flat = np.asarray(x).reshape(weights.size, -1)
        values = np.quantile(flat, q, 0, method="inverted_cdf", weights=weights.ravel())
        return jnp.asarray(values.reshape(x.shape[weights.ndim :]))

    return jax.tree.map(quantile, draws)


def drop_exploration(draws: Any, weights: Any) -> tuple[Any, Array]:
    """Return the draws whose weight is not zero, and their weights.

    :param draws: pytree of arrays of shape ``(chains, draws, ...)``, as by
        ``get_samples(group_by_chain=True)``.
    :param weights: weights of a schedule, equal for all chains, of shape ``(chains, draws)``.
    :return: pytree of arrays of shape ``(chains, kept, ...)``, and weights ``(chains, kept)``.
    :raises ValueError: if chains would keep different draws, or no chain would keep any.
    """
    weights = _check_weights(draws, weights, needs_chain_axis=True)
    is_kept = weights > 0.0
    if not (is_kept == is_kept[0]).all():
        raise InvalidArgumentError(
            "`weights` are zero at different draws of different chains.",
            "pass the weights of one schedule: extra_fields=('weight',).",
            "exploration-weights",
        )
    kept = is_kept[0]
    return jax.tree.map(lambda x: x[:, kept], draws), jnp.asarray(weights[:, kept])


def systematic_resample(
    rng_key: Array, draws: Any, weights: Any, num_draws: int | None = None
) -> Any:
    """Resample draws to equal weights, chain by chain and in their order, as ArviZ needs them.

    A draw appears as often as ``num_draws`` times its share of the weight of its chain, rounded up
    or down.

    :param rng_key: random key.
    :param draws: pytree of arrays of shape ``(chains, draws, ...)``, as by
        ``get_samples(group_by_chain=True)``.
    :param weights: weights of shape ``(chains, draws)``, not negative.
    :param num_draws: number of draws per chain to return. Default None: as many as there are.
    :return: pytree of arrays of shape ``(chains, num_draws, ...)``.
    :raises ValueError: as :func:`weighted_mean`, and if all weights of a chain are zero.
    """
    errors.check_rng_key(rng_key)
    weights = _check_weights(draws, weights, needs_chain_axis=True)
    if not (weights.sum(1) > 0).all():
        raise InvalidArgumentError(
            f"`weights` of chain {int(np.argmin(weights.sum(1)))} are all zero.",
            "leave this chain out, or run beyond the exploration of the schedule's first cycle.",
            "weights-values",
        )
    num = weights.shape[1] if num_draws is None else num_draws
    errors.check_positive_int("num_draws", num)

    def resample_indices(key: Array, w: Array) -> Array:
        points = (jnp.arange(num) + random.uniform(key)) / num
        indices = jnp.searchsorted(jnp.cumsum(w) / w.sum(), points, side="right")
        return jnp.minimum(indices, w.size - 1)  # rounding may leave the last sum below one

    keys = random.split(rng_key, len(weights))
    indices = jax.vmap(resample_indices)(keys, jnp.asarray(weights))
    return jax.tree.map(lambda x: jax.vmap(lambda y, i: y[i])(jnp.asarray(x), indices), draws)


def _check_weights(draws: Any, weights: Any, needs_chain_axis: bool = False) -> np.ndarray:
    """Return the weights as an array after checking their shape and values."""
    weights = errors.validate_real_array("weights", weights)
    leading_shapes = {np.shape(x)[: weights.ndim] for x in jax.tree.leaves(draws)}
    if leading_shapes != {weights.shape} or (needs_chain_axis and weights.ndim != 2):
        needed = "(chains, draws)" if needs_chain_axis else "that of the leading axes of `draws`"
        raise InvalidArgumentError(
            f"`weights` has shape {weights.shape}, which is not {needed}.",
            "take draws and weights with group_by_chain=True.",
            "weights-shape",
        )
    if not ((weights >= 0).all() and 0 < weights.sum() < np.inf):
        raise InvalidArgumentError(
            "`weights` must be finite, not negative, and not all zero.",
            "pass the extra field 'weight' of a run that has not diverged.",
            "weights-values",
        )
    return weights


def _set_fields(schedule: Any, **values: float) -> None:
    """Replace fields of a frozen schedule, numbers of any type, by floats."""
    for name, value in values.items():
        object.__setattr__(schedule, name, value)
