r"""The local values of a minibatch's rows, renewed given the globals.

One step on a minibatch :math:`S` from globals :math:`\theta` and local values :math:`z`:

1. :math:`z_S` is renewed by a transition that leaves :math:`p(z_i \mid \theta, y_i)` as it is for
   each row: the user's draws, then a Metropolis-corrected move along the gradient of the row's own
   density, which needs no other row and is not scaled by the plate.
2. The globals take a step with the minibatch's gradient at :math:`(\theta, z)`, new values and all.

Why the second may use the same minibatch: given any :math:`S` the first leaves
:math:`p(\theta, z \mid y)` as it is, so that :math:`S`, which is drawn without a look at
:math:`(\theta, z)`, is independent of the renewed :math:`(\theta, z)` as well, and the gradient on
:math:`S` has the full gradient there as its mean. The condition is that :math:`S` is drawn without
that look and that the moves are exact. Rows that come once an epoch are independent of what later
steps of the same epoch have made of the globals only about, as with any model.

Control variates stay exact though the local values move: the sum over all rows of the gradients at
the anchor, :math:`\sum_i \nabla_\theta \log p(y_i, z_i \mid \hat\theta)`, changes with
:math:`z_S` alone, by a difference on the minibatch.

Gradients of the globals' own posterior, the local values integrated out.

By Fisher's identity

.. math:: \nabla_\theta \log p(\theta \mid y)
    = E\left[\nabla_\theta \log p(\theta, z \mid y) \mid \theta, y\right],

so that at a draw of the globals the mean of the joint gradient over local values that have been
moved until they suit it is an estimate. Those that a chain has there do not serve: most rows were
renewed for globals of some steps ago, and the joint gradient is then that given these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.local_latents import (
    BatchLocalValues,
    LocalValues,
    call_gibbs_fn,
    with_local_values,
)
from numpyro_sgmcmc.model.potential import Potential

if TYPE_CHECKING:
    from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator
    from numpyro_sgmcmc.model.potential import Potential

__all__ = [
    "LocalLatentsState",
    "NUM_LOCAL_UPDATES",
    "compute_local_hessian_diagonal",
    "estimate_marginal_gradients",
    "init_local_values",
    "pointwise_local_potentials",
    "sweep_local_values",
    "update_local_values",
    "update_minibatch_locals",
]

_NUM_LEAPFROG_STEPS = 3


_LEAPFROG_STEP_SIZE = 0.55  # three of them are a quarter of a unit oscillator's period


_MIN_STEP_JITTER = 0.6


_SMALL_STEP_FACTOR, _SMALL_STEP_PROBABILITY = (
    0.2,
    0.1,
)  # now and then much shorter, for globals far from the usual


_MAX_ROWS_PER_SWEEP_CHUNK = 4096


class LocalLatentsState(NamedTuple):
    """
    - **values** - local values of all rows, an
      :class:`~numpyro_sgmcmc.model.local_latents.AllRows`.
    - **scale** - length scale of the moves of each number, shape ``(N, k)``.
    - **mean_accept_prob** - mean acceptance probability of the last minibatch's moves.
    """

    values: LocalValues
    scale: Array
    mean_accept_prob: Array


def pointwise_local_potentials(
    potential: Potential,
    global_position: Array,
    indices: Array,
    hmc_position: Array,
    gibbs_values: dict[str, Array],
    arguments: Arguments,
) -> Array:
    """The potential of each row by itself, without the plate's scale; shape ``(rows,)``.

    Each holds its share of the prior of the globals, a constant for the local values.
    """
    local = potential.local_latents
    assert local is not None
    plate = local.plate

    def one(row: Array, position: Array, drawn: dict[str, Array]) -> Array:
        values = BatchLocalValues(position[None], {k: v[None] for k, v in drawn.items()})
        with_values = with_local_values(arguments, values)
        # On a minibatch of one row the plate's scale is the number of rows.
        return potential.value(global_position, {plate.name: row[None]}, with_values) / plate.size

    return jax.vmap(one)(indices, hmc_position, gibbs_values)


def _pointwise_value_and_grad(
    fn: Callable[[Array], Array], hmc_position: Array
) -> tuple[Array, Array]:
    """Potentials of rows that do not depend on each other, and each row's own gradient."""
    values, pull = jax.vjp(fn, hmc_position)
    return values, pull(jnp.ones_like(values))[0]


def compute_local_hessian_diagonal(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    arguments: Arguments,
) -> Array:
    """Second derivatives of the rows' own potentials in each number, shape ``(rows, k)``."""

    def gradient(position: Array) -> Array:
        return _pointwise_value_and_grad(
            lambda x: pointwise_local_potentials(
                potential, global_position, indices, x, values.gibbs_values, arguments
            ),
            position,
        )[1]

    def along(k: Array) -> Array:
        direction = jnp.zeros_like(values.hmc_position).at[:, k].set(1.0)
        return jax.jvp(gradient, (values.hmc_position,), (direction,))[1][:, k]

    return lax.map(along, jnp.arange(values.hmc_position.shape[1])).T


def _hmc_transition(
    pointwise_fn: Callable[[Array], Array], hmc_position: Array, scale: Array, rng_key: Array
) -> Any:
    """A few leapfrog steps and one Metropolis decision, a row: new values, and acceptance."""
    momentum_key, jitter_key, rare_key, decide_key = random.split(rng_key, 4)
    num, dtype = hmc_position.shape[0], hmc_position.dtype
    momentum = random.normal(momentum_key, hmc_position.shape, dtype)
    jitter = random.uniform(jitter_key, (num, 1), dtype, _MIN_STEP_JITTER, 1.0)
    is_rare = random.uniform(rare_key, (num, 1), dtype) < _SMALL_STEP_PROBABILITY
    h = (
        _LEAPFROG_STEP_SIZE
        * jitter
        * jnp.where(is_rare, jnp.asarray(_SMALL_STEP_FACTOR, dtype), 1.0)
    )

    def half_steps(carry: Any, shares: Any) -> tuple[Any, Array]:
        q, p = carry
        kick, drift = shares
        values, g = _pointwise_value_and_grad(pointwise_fn, q)
        p = p - kick * h * scale * g
        return (q + drift * h * scale * p, p), values

    # One place that evaluates the model, which is long to compile.
    kicks = jnp.ones(_NUM_LEAPFROG_STEPS + 1, dtype).at[jnp.array([0, -1])].set(0.5)
    drifts = jnp.ones(_NUM_LEAPFROG_STEPS + 1, dtype).at[-1].set(0.0)
    (q, p), values = lax.scan(half_steps, (hmc_position, momentum), (kicks, drifts))
    start, end = values[0], values[-1]
    log_ratio = start - end + 0.5 * (jnp.square(momentum) - jnp.square(p)).sum(1)
    log_ratio = jnp.where(jnp.isfinite(log_ratio) & jnp.isfinite(q).all(1), log_ratio, -jnp.inf)
    log_uniform = -random.exponential(decide_key, (num,), dtype)
    moved = jnp.where((log_uniform < log_ratio)[:, None], q, hmc_position)
    return moved, jnp.exp(jnp.minimum(log_ratio, 0.0))


def update_local_values(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    scale: Array,
    arguments: Arguments,
    rng_key: Array,
) -> tuple[BatchLocalValues, Array]:
    """Local values of some rows after one transition given the globals, and its acceptance.

    :param global_position: the globals' flat position, shape ``(d,)``.
    :param indices: indices of the rows, each once.
    :param values: the rows' present values.
    :param scale: length scales of the moves, shape ``(rows, k)``.
    :param arguments: the model's arguments.
    :param rng_key: a fresh key.
    """
    local = potential.local_latents
    assert local is not None
    draw_key, move_key = random.split(rng_key)
    if local.gibbs_fn is not None:
        values = values._replace(
            gibbs_values=_gibbs_transition(
                potential, global_position, indices, values, arguments, draw_key
            )
        )
    if not local.hmc_sites:
        return values, jnp.ones(indices.shape, potential.dtype)
    moved, acceptance = _hmc_transition(
        lambda x: pointwise_local_potentials(
            potential, global_position, indices, x, values.gibbs_values, arguments
        ),
        values.hmc_position,
        scale,
        move_key,
    )
    return values._replace(hmc_position=moved), acceptance


def _gibbs_transition(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """What ``gibbs_fn`` draws for the rows, checked for its names, shapes and types."""
    local = potential.local_latents
    assert local is not None
    assert local.gibbs_fn is not None
    globals_ = potential.constrain(potential.unravel(global_position), arguments)
    others = local.constrain(local.unravel(values.hmc_position))
    found = call_gibbs_fn(
        local,
        local.to_model_layout(values.gibbs_values),
        {**globals_, **others},
        indices,
        arguments,
        rng_key,
    )
    return {s.name: jnp.moveaxis(found[s.name], s.axis, 0) for s in local.gibbs_sites}


def update_minibatch_locals(
    potential: Potential,
    state: LocalLatentsState,
    global_position: Array,
    indices: Indices,
    arguments: Arguments,
    reference: Array,
    reference_gradient: Array,
    estimator: GradientEstimator,
    rng_key: Array,
) -> tuple[LocalLatentsState, Array, Arguments]:
    """The local part of a step: the minibatch's rows gathered, renewed and put back.

    :param state: local values of all rows.
    :param global_position: the globals' flat position, shape ``(d,)``.
    :param indices: the minibatch.
    :param reference: where the control variates hold the gradient.
    :param reference_gradient: gradient on all rows there, for the present local values.
    :param estimator: how the gradient is estimated.
    :return: the next state, the gradient at the anchor for the new values, and the arguments of
        the step's gradient.
    """
    local = potential.local_latents
    assert local is not None
    rows = jnp.asarray(indices[local.plate.name])
    before = state.values.take(rows)
    after, acceptance = update_local_values(
        potential, global_position, rows, before, state.scale[rows], arguments, rng_key
    )
    with_after = with_local_values(arguments, after)
    if estimator.needs_reference:
        share = rows.shape[0] / local.plate.size
        there = potential.gradient(reference, indices, with_local_values(arguments, before))
        change = potential.gradient(reference, indices, with_after) - there
        reference_gradient = reference_gradient + share * change
    values = state.values.put(rows, after)
    return LocalLatentsState(values, state.scale, acceptance.mean()), reference_gradient, with_after


def sweep_local_values(
    potential: Potential,
    global_position: Array,
    state: LocalLatentsState,
    arguments: Arguments,
    rng_key: Array,
    num_updates: int,
) -> tuple[LocalValues, Array]:
    """Local values of all rows after some transitions, and each row's mean acceptance.

    A chunk of the rows at a time.
    """
    local = potential.local_latents
    assert local is not None

    def one(rows: Array, key: Array) -> tuple[BatchLocalValues, Array]:
        scale = state.scale[rows]

        def move(values: BatchLocalValues, key: Array) -> tuple[BatchLocalValues, Array]:
            return update_local_values(
                potential, global_position, rows, values, scale, arguments, key
            )

        keys = random.split(key, num_updates)
        values, acceptance = lax.scan(move, state.values.take(rows), keys)
        return values, acceptance.mean(0)

    values, acceptance = map_over_row_chunks(one, local.plate.size, rng_key)
    return LocalValues(*values), acceptance


def map_over_row_chunks(fn: Callable[[Array, Array], Any], num_rows: int, rng_key: Array) -> Any:
    """What ``fn(rows, key)`` gives for all rows, a chunk at a time; rows along the first axis."""
    chunk = min(num_rows, _MAX_ROWS_PER_SWEEP_CHUNK)
    num_chunks = -(-num_rows // chunk)
    rows = (jnp.arange(num_chunks * chunk) % num_rows).reshape(num_chunks, chunk)
    found = lax.map(lambda x: fn(*x), (rows, random.split(rng_key, num_chunks)))
    return jax.tree.map(lambda x: x.reshape(num_chunks * chunk, *x.shape[2:])[:num_rows], found)


NUM_LOCAL_UPDATES = 10
"""Transitions of all local values before the gradients of a draw, and as many with a gradient."""


@partial(jax.jit, static_argnames=("potential", "num_updates"))
def estimate_marginal_gradients(
    potential: Potential,
    global_positions: Array,
    state: LocalLatentsState,
    cached_arguments: Arguments,
    rng_key: Array,
    num_updates: int = NUM_LOCAL_UPDATES,
) -> Array:
    """Unbiased about, at the globals of one draw after the other; shape ``(n, d)``.

    :param global_positions: the globals' flat positions, shape ``(n, d)``.
    :param state: local values that suit the first of them about.
    :param cached_arguments: the model's arguments; large arrays may be in references.
    :param rng_key: key of the moves.
    :param num_updates: transitions before the gradients of a draw, and transitions with one each.
    """
    arguments = cached_arguments.dereference()

    def moved(theta: Array, values: LocalValues, key: Array, num: int) -> LocalValues:
        return sweep_local_values(
            potential, theta, state._replace(values=values), arguments, key, num
        )[0]

    def at(values: LocalValues, draw: tuple[Array, Array]) -> tuple[LocalValues, Array]:
        theta, key = draw
        first_key, *keys = random.split(key, 1 + num_updates)

        def once_more(values: LocalValues, key: Array) -> tuple[LocalValues, Array]:
            values = moved(theta, values, key, 1)
            return values, potential.full_gradient(theta, with_local_values(arguments, values))

        values = moved(theta, values, first_key, num_updates)
        values, gradients = lax.scan(once_more, values, jnp.stack(keys))
        return values, gradients.mean(0)

    return lax.scan(
        at, state.values, (global_positions, random.split(rng_key, len(global_positions)))
    )[1]


def init_local_values(
    potential: Potential, arguments: Arguments, global_position: Array
) -> LocalValues:
    """Local values of all rows to begin with: near the middle of unconstrained space.

    Sites that ``gibbs_fn`` draws come from the prior given the globals.

    :raises ValueError: where ``gibbs_fn`` returns other names, shapes or types than it should, or
        values outside of a site's support.
    """
    local = potential.local_latents
    assert local is not None
    noise = random.normal(random.key(1), (local.plate.size, local.hmc_dim), potential.dtype)
    values = LocalValues(0.1 * noise, {})
    if not local.gibbs_sites:
        return values

    def one(rows: Array, key: Array) -> dict[str, Array]:
        assert potential.sample_conditional_prior is not None
        drawn = potential.sample_conditional_prior(
            global_position, {local.plate.name: rows}, arguments, key
        )
        return {s.name: jnp.moveaxis(drawn[s.name], s.axis, 0) for s in local.gibbs_sites}

    values = values._replace(
        gibbs_values=jax.jit(lambda key: map_over_row_chunks(one, local.plate.size, key))(
            random.key(2)
        )
    )
    rows = jnp.arange(local.plate.subsample_size)
    scale = jnp.ones((len(rows), local.hmc_dim), potential.dtype)
    renewed, _ = jax.jit(
        lambda v: update_local_values(
            potential, global_position, rows, v.take(rows), scale, arguments, random.key(0)
        )
    )(values)
    for name, x in local.to_model_layout(renewed.gibbs_values).items():
        _check_values_in_support(
            name, next(s.support for s in local.gibbs_sites if s.name == name), x
        )
    return values


def _check_values_in_support(name: str, support: Any, values: Array) -> None:
    """Refuse draws that are outside of a support that is the same whatever the other values."""
    if not all(isinstance(x, (int, float)) for x in jax.tree.leaves(support)):
        return
    is_inside = np.asarray(support(values))
    if not is_inside.all():
        outside = np.asarray(values).ravel()[np.flatnonzero(~is_inside)[0] if is_inside.ndim else 0]
        raise InvalidArgumentError(
            f"`gibbs_fn` returns values of '{name}' outside of its support, {support}, for example "
            f"{outside}."
        )
