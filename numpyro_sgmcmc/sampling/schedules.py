r"""Step-size schedules, and averages weighted by step size.

A schedule is any function of the number of steps so far, optax's included. With a step size that
changes, draws do not count alike: averages converge for
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
    ...     step_size=schedules.Polynomial(0.5, schedules.best_exponent(2, "mse")),
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


def optimal_decay_exponent(order: float, criterion: str) -> float:
    """The decay at which the error bound of a scheme falls fastest.

    :param order: the scheme's weak order K.
    :param criterion: ``"bias"``: 1 / (K + 1), or ``"mse"``: 1 / (2 K + 1).
    :raises ValueError: for another criterion.

    Reference: Chen, Ding and Carin (2015), theorem 5 and remark 7.
    """
    errors.check_choice("criterion", criterion, ("bias", "mse"))
    errors.check_positive("order", order)
    order = float(order)
    return 1.0 / (order + 1 if criterion == "bias" else 2 * order + 1)


def _convert_fields_to_float(schedule: Any, *names: str) -> None:
    """Numbers of any kind, such as fractions, as floats."""
    for name in names:
        object.__setattr__(schedule, name, float(getattr(schedule, name)))


@dataclass(frozen=True)
class Polynomial:
    r"""Step sizes :math:`h_0 l^{-\alpha}` for steps l = 1, 2, ...

    :param float initial: the first step size, in whitened units.
    :param float exponent: :math:`\alpha`, in (0, 1] for averages to converge. Default 1/3.
    :raises ValueError: for a value out of range.
    """

    initial: float
    exponent: float = 1.0 / 3.0

    def __post_init__(self) -> None:
        errors.check_positive("initial", self.initial)
        errors.check_in_interval("exponent", self.exponent, 0.0, 1.0)
        _convert_fields_to_float(self, "initial", "exponent")

    def __call__(self, count: Any) -> Array:
        return self.initial * (1.0 + jnp.asarray(count, float)) ** -self.exponent


@dataclass(frozen=True)
class Cyclical:
    """Cosine cycles: long steps find a mode, short ones sample it.

    The first part of each cycle explores: its draws have weight zero, and
    :func:`without_exploration` leaves them out.

    :param float initial: step size at the start of each cycle, in whitened units.
    :param int period: steps a cycle.
    :param float exploration: share of the cycle that explores, in [0, 1). Default 0.5.
    :param float final: share of ``initial`` below which the step size does not fall. Default 0.05.
    :raises ValueError: for a value out of range.

    Reference: Zhang, Li, Zhang, Chen and Wilson (2020), *Cyclical stochastic gradient MCMC for
    Bayesian deep learning*, equation (1).
    """

    initial: float
    period: int
    exploration: float = 0.5
    final: float = 0.05

    def __post_init__(self) -> None:
        errors.check_positive("initial", self.initial)
        errors.check_positive_int("period", self.period)
        errors.check_nonnegative("final", self.final)
        errors.check_nonnegative("exploration", self.exploration)
        _convert_fields_to_float(self, "initial", "final", "exploration")
        if self.final > 1:
            raise InvalidArgumentError(
                f"`final` is {self.final}, but must be a share, from 0 to 1."
            )
        if self.exploration >= 1:
            raise InvalidArgumentError(
                f"`exploration` is {self.exploration}, but must be below 1: nothing would be kept."
            )

    def _phase(self, count: Any) -> Array:
        return (jnp.asarray(count) % self.period) / self.period

    def __call__(self, count: Any) -> Array:
        cosine = (jnp.cos(jnp.pi * self._phase(count)) + 1.0) / 2.0
        return self.initial * jnp.maximum(cosine, self.final)

    def weight(self, count: Any) -> Array:
        """Weight of a step: its size, or zero while the cycle explores."""
        return jnp.where(self._phase(count) >= self.exploration, self(count), 0.0)


def _normalize_weights(draws: Any, weights: Any) -> tuple[Array, int]:
    """Each draw's share of the weight, flat, and the number of axes of the weights."""
    weights = errors.validate_real_array("weights", weights)
    shapes = {np.shape(x)[: weights.ndim] for x in jax.tree.leaves(draws)}
    if shapes != {weights.shape}:
        raise InvalidArgumentError(
            f"`weights` have shape {weights.shape}, which are not the first axes of `draws`: take "
            "both with group_by_chain=True, or both without."
        )
    if not ((weights >= 0).all() and 0 < weights.sum() < np.inf):
        raise InvalidArgumentError("`weights` must be finite and not negative, and not all zero.")
    return jnp.asarray(weights / weights.sum()).ravel(), weights.ndim


def weighted_mean(draws: Any, weights: Any) -> Any:
    """Means over all draws and chains.

    :param draws: pytree of arrays whose leading axes are those of ``weights``.
    :param weights: weights, not negative, of shape ``(draws,)`` or ``(chains, draws)``.
    :return: pytree of arrays without these axes.
    :raises ValueError: for weights of another shape, negative, or all zero.
    """
    shares, ndim = _normalize_weights(draws, weights)
    return jax.tree.map(
        lambda x: jnp.tensordot(shares, x.reshape(shares.size, *x.shape[ndim:]), 1), draws
    )


def weighted_quantile(draws: Any, weights: Any, q: float) -> Any:
    """The smallest value that at least the share ``q`` of the weight does not exceed.

    :param draws: as in :func:`weighted_mean`.
    :param weights: as in :func:`weighted_mean`.
    :param q: share, in [0, 1].
    :raises ValueError: as :func:`weighted_mean`, and for ``q`` out of range.
    """
    errors.check_nonnegative("q", q)
    q = float(q)
    if q > 1:
        raise InvalidArgumentError(f"`q` is {q!r}, but must lie between 0 and 1.")
    shares, ndim = _normalize_weights(draws, weights)

    def quantile(x: Array) -> Array:
        flat = x.reshape(shares.size, -1)
        order = jnp.argsort(flat, axis=0)
        below = jnp.cumsum(shares[order], axis=0)
        # Rounding may leave the last sum below one.
        place = jnp.minimum((below < q - 1e-6).sum(0), shares.size - 1)
        values = jnp.take_along_axis(jnp.sort(flat, axis=0), place[None], axis=0)
        return values.reshape(x.shape[ndim:])

    return jax.tree.map(quantile, draws)


def drop_exploration(draws: Any, weights: Any) -> tuple[Any, Array]:
    """The draws whose weight is not zero, and their weights.

    :param draws: pytree of arrays of shape ``(chains, draws, ...)``, as by
        ``get_samples(group_by_chain=True)``.
    :param weights: weights of shape ``(chains, draws)``; a schedule's, which are those of all
        chains alike.
    :return: pytree of arrays of shape ``(chains, kept, ...)``, and weights ``(chains, kept)``.
    :raises ValueError: where chains would keep different draws, or none.
    """
    _normalize_weights(draws, weights)
    kept = np.asarray(weights) > 0.0
    if kept.ndim != 2 or not (kept == kept[0]).all() or not kept[0].any():
        raise InvalidArgumentError(
            "`weights` must be positive at some draws, the same in each chain: pass those of one "
            "schedule, shape (chains, draws)."
        )
    return jax.tree.map(lambda x: x[:, kept[0]], draws), jnp.asarray(weights)[:, kept[0]]


def systematic_resample(
    rng_key: Array, draws: Any, weights: Any, num_draws: int | None = None
) -> Any:
    """Draws of equal weight, chain by chain, in their order: what ArviZ takes.

    Systematic resampling: a draw appears as often as its share of its chain's weight says, up or
    down to an integer.

    :param rng_key: key.
    :param draws: pytree of arrays of shape ``(chains, draws, ...)``, as by
        ``get_samples(group_by_chain=True)``.
    :param weights: weights of shape ``(chains, draws)``, not negative.
    :param num_draws: draws a chain to return. Default: as many as there are.
    :return: pytree of arrays of shape ``(chains, num_draws, ...)``.
    """
    errors.check_rng_key(rng_key)
    _normalize_weights(draws, weights)
    weights = jnp.asarray(weights)
    if weights.ndim != 2:
        raise InvalidArgumentError(
            "`weights` must have shape (chains, draws): use group_by_chain=True."
        )
    if num_draws is None:
        num_draws = weights.shape[1]
    errors.check_positive_int("num_draws", num_draws)

    def places(key: Array, w: Array) -> Array:
        points = (jnp.arange(num_draws) + random.uniform(key)) / num_draws
        found = jnp.searchsorted(jnp.cumsum(w) / w.sum(), points, side="right")
        return jnp.minimum(found, w.size - 1)

    rows = jax.vmap(places)(random.split(rng_key, weights.shape[0]), weights)
    return jax.tree.map(lambda x: jax.vmap(lambda y, r: y[r])(jnp.asarray(x), rows), draws)


def first_step_size(schedule: Any) -> float:
    """A schedule's first step size, or its largest where it starts at zero; checked at many.

    :param schedule: maps the number of steps so far to a step size.
    :raises ValueError: where it cannot be traced, or gives what is no step size.
    """

    def number(n: Any) -> Any:
        found = jnp.asarray(schedule(n))
        if found.shape or jnp.issubdtype(found.dtype, jnp.complexfloating):
            raise TypeError(f"it returns {found.dtype} of shape {found.shape}")
        return found

    try:
        jax.eval_shape(number, jnp.int32(0))
    except Exception as error:
        raise InvalidArgumentError(
            "`step_size` must be a function of the number of steps so far that JAX can trace "
            "(no Python `if` on it) and that returns a number, but calling it failed: "
            f"{summarise_error(error)}"
        ) from error
    counts = [0, *(a * 10**b for b in range(5) for a in (1, 2, 5))]
    sizes = [float(schedule(n)) for n in counts]
    for n, size in zip(counts, sizes, strict=True):
        if np.isnan(size) or np.isinf(size) or (size < 0 and n <= 100):
            raise InvalidArgumentError(
                f"`step_size({n})` is {size}, but a schedule's steps must be finite and not "
                "negative."
            )
    if max(sizes) <= 0:
        raise InvalidArgumentError("`step_size` is a schedule of steps that are all zero.")
    return sizes[0] if sizes[0] > 0 else max(sizes)
