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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.locals.draws import users_draws
from numpyro_sgmcmc.posterior.locals.sites import AllRows, SomeRows, with_locals

if TYPE_CHECKING:
    from numpyro_sgmcmc.posterior.estimators import Estimator
    from numpyro_sgmcmc.posterior.target import Target

__all__ = ["LocalState", "curvatures", "renew", "renew_minibatch", "row_potentials", "sweep"]

_LEAPFROGS = 3
_STEP = 0.55  # three of them are a quarter of a unit oscillator's period
_SHORTEST_JITTER = 0.6
_CAUTIOUS, _RARELY = 0.2, 0.1  # now and then much shorter, for globals far from the usual
_SWEEP_ROWS = 4096


class LocalState(NamedTuple):
    """
    - **values** - local values of all rows, an
      :class:`~numpyro_sgmcmc.posterior.locals.sites.AllRows`.
    - **scale** - length scale of the moves of each number, shape ``(N, k)``.
    - **acceptance** - mean acceptance probability of the last minibatch's moves.
    """

    values: AllRows
    scale: Array
    acceptance: Array


def row_potentials(
    target: Target,
    theta: Array,
    rows: Array,
    position: Array,
    drawn: dict[str, Array],
    arguments: Arguments,
) -> Array:
    """The potential of each row by itself, without the plate's scale; shape ``(rows,)``.

    Each holds its share of the prior of the globals, a constant for the local values.
    """
    local = target.locals
    assert local is not None
    plate = local.plate

    def one(row: Array, position: Array, drawn: dict[str, Array]) -> Array:
        values = SomeRows(position[None], {k: v[None] for k, v in drawn.items()})
        with_values = with_locals(arguments, values)
        # On a minibatch of one row the plate's scale is the number of rows.
        return target.potential(theta, {plate.name: row[None]}, with_values) / plate.size

    return jax.vmap(one)(rows, position, drawn)


def _values_and_gradients(fn: Callable[[Array], Array], position: Array) -> tuple[Array, Array]:
    """Potentials of rows that do not depend on each other, and each row's own gradient."""
    values, pull = jax.vjp(fn, position)
    return values, pull(jnp.ones_like(values))[0]


def curvatures(
    target: Target, theta: Array, rows: Array, values: SomeRows, arguments: Arguments
) -> Array:
    """Second derivatives of the rows' own potentials in each number, shape ``(rows, k)``."""

    def gradient(position: Array) -> Array:
        return _values_and_gradients(
            lambda x: row_potentials(target, theta, rows, x, values.drawn, arguments), position
        )[1]

    def along(k: Array) -> Array:
        direction = jnp.zeros_like(values.position).at[:, k].set(1.0)
        return jax.jvp(gradient, (values.position,), (direction,))[1][:, k]

    return lax.map(along, jnp.arange(values.position.shape[1])).T


def _move(fn: Callable[[Array], Array], position: Array, scale: Array, rng_key: Array) -> Any:
    """A few leapfrog steps and one Metropolis decision, a row: new values, and acceptance."""
    momentum_key, jitter_key, rare_key, decide_key = random.split(rng_key, 4)
    num, dtype = position.shape[0], position.dtype
    momentum = random.normal(momentum_key, position.shape, dtype)
    jitter = random.uniform(jitter_key, (num, 1), dtype, _SHORTEST_JITTER, 1.0)
    is_rare = random.uniform(rare_key, (num, 1), dtype) < _RARELY
    h = _STEP * jitter * jnp.where(is_rare, jnp.asarray(_CAUTIOUS, dtype), 1.0)

    def half_steps(carry: Any, shares: Any) -> tuple[Any, Array]:
        q, p = carry
        kick, drift = shares
        values, g = _values_and_gradients(fn, q)
        p = p - kick * h * scale * g
        return (q + drift * h * scale * p, p), values

    # One place that evaluates the model, which is long to compile.
    kicks = jnp.ones(_LEAPFROGS + 1, dtype).at[jnp.array([0, -1])].set(0.5)
    drifts = jnp.ones(_LEAPFROGS + 1, dtype).at[-1].set(0.0)
    (q, p), values = lax.scan(half_steps, (position, momentum), (kicks, drifts))
    start, end = values[0], values[-1]
    log_ratio = start - end + 0.5 * (jnp.square(momentum) - jnp.square(p)).sum(1)
    log_ratio = jnp.where(jnp.isfinite(log_ratio) & jnp.isfinite(q).all(1), log_ratio, -jnp.inf)
    log_uniform = -random.exponential(decide_key, (num,), dtype)
    moved = jnp.where((log_uniform < log_ratio)[:, None], q, position)
    return moved, jnp.exp(jnp.minimum(log_ratio, 0.0))


def renew(
    target: Target,
    theta: Array,
    rows: Array,
    values: SomeRows,
    scale: Array,
    arguments: Arguments,
    rng_key: Array,
) -> tuple[SomeRows, Array]:
    """Local values of some rows after one transition given the globals, and its acceptance.

    :param theta: the globals' flat position, shape ``(d,)``.
    :param rows: indices of the rows, each once.
    :param values: the rows' present values.
    :param scale: length scales of the moves, shape ``(rows, k)``.
    :param arguments: the model's arguments.
    :param rng_key: a fresh key.
    """
    local = target.locals
    assert local is not None
    draw_key, move_key = random.split(rng_key)
    if local.gibbs_fn is not None:
        values = values._replace(drawn=_draw(target, theta, rows, values, arguments, draw_key))
    if not local.moved:
        return values, jnp.ones(rows.shape, target.dtype)
    moved, acceptance = _move(
        lambda x: row_potentials(target, theta, rows, x, values.drawn, arguments),
        values.position,
        scale,
        move_key,
    )
    return values._replace(position=moved), acceptance


def _draw(
    target: Target,
    theta: Array,
    rows: Array,
    values: SomeRows,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """What ``gibbs_fn`` draws for the rows, checked for its names, shapes and types."""
    local = target.locals
    assert local is not None
    assert local.gibbs_fn is not None
    globals_ = target.constrain(target.unravel(theta), arguments)
    others = local.constrain(local.unravel(values.position))
    found = users_draws(
        local, local.laid_out(values.drawn), {**globals_, **others}, rows, arguments, rng_key
    )
    return {s.name: jnp.moveaxis(found[s.name], s.axis, 0) for s in local.drawn}


def renew_minibatch(
    target: Target,
    state: LocalState,
    theta: Array,
    indices: Indices,
    arguments: Arguments,
    anchor: Array,
    anchor_gradient: Array,
    estimator: Estimator,
    rng_key: Array,
) -> tuple[LocalState, Array, Arguments]:
    """The local part of a step: the minibatch's rows gathered, renewed and put back.

    :param state: local values of all rows.
    :param theta: the globals' flat position, shape ``(d,)``.
    :param indices: the minibatch.
    :param anchor: where the control variates hold the gradient.
    :param anchor_gradient: gradient on all rows there, for the present local values.
    :param estimator: how the gradient is estimated.
    :return: the next state, the gradient at the anchor for the new values, and the arguments of
        the step's gradient.
    """
    local = target.locals
    assert local is not None
    rows = jnp.asarray(indices[local.plate.name])
    before = state.values.take(rows)
    after, acceptance = renew(target, theta, rows, before, state.scale[rows], arguments, rng_key)
    with_after = with_locals(arguments, after)
    if estimator.has_anchor:
        share = rows.shape[0] / local.plate.size
        there = target.gradient(anchor, indices, with_locals(arguments, before))
        change = target.gradient(anchor, indices, with_after) - there
        anchor_gradient = anchor_gradient + share * change
    values = state.values.put(rows, after)
    return LocalState(values, state.scale, acceptance.mean()), anchor_gradient, with_after


def sweep(
    target: Target,
    theta: Array,
    state: LocalState,
    arguments: Arguments,
    rng_key: Array,
    num_moves: int,
) -> tuple[AllRows, Array]:
    """Local values of all rows after some transitions, and each row's mean acceptance.

    A chunk of the rows at a time.
    """
    local = target.locals
    assert local is not None

    def one(rows: Array, key: Array) -> tuple[SomeRows, Array]:
        scale = state.scale[rows]

        def move(values: SomeRows, key: Array) -> tuple[SomeRows, Array]:
            return renew(target, theta, rows, values, scale, arguments, key)

        keys = random.split(key, num_moves)
        values, acceptance = lax.scan(move, state.values.take(rows), keys)
        return values, acceptance.mean(0)

    values, acceptance = by_chunks(one, local.plate.size, rng_key)
    return AllRows(*values), acceptance


def by_chunks(fn: Callable[[Array, Array], Any], num_rows: int, rng_key: Array) -> Any:
    """What ``fn(rows, key)`` gives for all rows, a chunk at a time; rows along the first axis."""
    chunk = min(num_rows, _SWEEP_ROWS)
    num_chunks = -(-num_rows // chunk)
    rows = (jnp.arange(num_chunks * chunk) % num_rows).reshape(num_chunks, chunk)
    found = lax.map(lambda x: fn(*x), (rows, random.split(rng_key, num_chunks)))
    return jax.tree.map(lambda x: x.reshape(num_chunks * chunk, *x.shape[2:])[:num_rows], found)
