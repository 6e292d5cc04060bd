r"""Updates of local latent variables given the globals.

One step on a minibatch :math:`S` from globals :math:`\theta` and local values :math:`z`:

1. :math:`z_S` is updated by a transition that leaves :math:`p(z_i \mid \theta, y_i)` invariant for
   each row: the user's ``gibbs_fn``, then a short HMC trajectory with the gradient of the row's own
   density, which needs no other row and is not scaled by the plate
   (:func:`update_minibatch_locals`).
2. The globals take a step with the minibatch gradient at :math:`(\theta, z)`, new values included.

Both may use the same minibatch. Given any :math:`S` the first leaves :math:`p(\theta, z \mid y)`
invariant, so that :math:`S`, which is sampled independently of :math:`(\theta, z)`, is independent
of the updated :math:`(\theta, z)` as well, and the gradient on :math:`S` is unbiased there. With
minibatches without replacement the independence holds only approximately, as for any model.

Where a row's data determine its local value tightly, the globals hardly move given it, although
both could move together. :class:`~numpyro_sgmcmc.model.local_latents.LocalValues` with slopes are
differences from a linear function of the globals, the mode of the row's conditional distribution
near a reference (:func:`linearise_conditional_modes`). Gradients of the globals at fixed
differences include the motion of the local values.

Control variates stay exact although the local values change: the sum over all rows of the gradients
at the reference point, :math:`\sum_i \nabla_\theta \log p(y_i, z_i \mid \hat\theta)`, changes with
:math:`z_S` alone, by a difference on the minibatch.

:func:`estimate_marginal_gradients` estimates gradients of the globals' marginal posterior by
Fisher's identity

.. math:: \nabla_\theta \log p(\theta \mid y)
    = E\left[\nabla_\theta \log p(\theta, z \mid y) \mid \theta, y\right].

The mean is over local values that have been updated until they match the globals of a draw. A
chain's own local values do not serve: most rows were updated for globals of some steps before, and
the mean joint gradient at them is that of another conditional distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.local_latents import (
    BatchLocalValues,
    LocalLatents,
    LocalValues,
    call_gibbs_fn,
    with_local_values,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.trace import is_fixed_support

NUM_LOCAL_UPDATES = 10
"""Updates of all local values before the gradients at a draw, and updates with a gradient each."""

# HMC of the local values, in units of their scale. Three steps of 0.55 are a quarter of a unit
# oscillator's period, after which position and start are about independent.
_NUM_LEAPFROG_STEPS = 3
_LEAPFROG_STEP_SIZE = 0.55
_MIN_STEP_JITTER = 0.6  # step sizes are uniform from this factor to 1, against periodic orbits
# Now and then a much smaller step: it is accepted where globals make the conditional narrow.
_SMALL_STEP_FACTOR = 0.2
_SMALL_STEP_PROBABILITY = 0.1
_MAX_ROWS_PER_CHUNK = 4096  # a bound on the memory of updates of all rows
# Newton's method for the conditional mode of a row: steps, their greatest length, and the distance
# up to which the mode counts as reached, in SDs of the conditional.
_NUM_NEWTON_STEPS, _MAX_NEWTON_STEP_SD, _MAX_MODE_DISTANCE_SD = 8, 3.0, 0.3
_INIT_SD = 0.1  # of initial values around zero in unconstrained space


class LocalLatentsState(NamedTuple):
    """Local latent variables of one chain."""

    values: LocalValues  # values of all rows
    scale: Array  # length scale of HMC for each coordinate, shape `(N, k)`
    mean_accept_prob: Array  # mean acceptance probability on the last minibatch


def update_minibatch_locals(
    potential: Potential,
    state: LocalLatentsState,
    global_position: Array,
    indices: Indices,
    arguments: Arguments,
    rng_key: Array,
) -> tuple[LocalLatentsState, Arguments]:
    """Update the local values of a minibatch's rows.

    :return: the next state, and the arguments for the step's gradient.
    """
    rows = jnp.asarray(indices[_get_local_latents(potential).plate.name])
    before, scale = state.values.take(rows), state.scale[rows]
    after, accept_prob = update_local_values(
        potential, global_position, rows, before, scale, arguments, rng_key
    )
    state = LocalLatentsState(state.values.put(rows, after), state.scale, accept_prob.mean())
    return state, with_local_values(arguments, after)


def update_reference_gradient(
    potential: Potential,
    preconditioner: Preconditioner,
    values_before: LocalValues,
    indices: Indices,
    arguments: Arguments,
) -> Preconditioner:
    """Return the preconditioner with the full-data gradient at its center for new local values.

    :param preconditioner: with this gradient at the values before.
    :param values_before: local values of all rows before their update.
    :param arguments: with the new values of these rows.
    """
    plate, center = _get_local_latents(potential).plate, preconditioner.center
    rows = jnp.asarray(indices[plate.name])
    arguments_before = with_local_values(arguments, values_before.take(rows))
    gradient_before = potential.gradient(center, indices, arguments_before)
    change = potential.gradient(center, indices, arguments) - gradient_before
    gradient = preconditioner.reference_gradient + rows.shape[0] / plate.size * change
    return preconditioner._replace(reference_gradient=gradient)


def update_local_values(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    scale: Array,
    arguments: Arguments,
    rng_key: Array,
) -> tuple[BatchLocalValues, Array]:
    """Update the local values of some rows given the globals.

    :param indices: indices of the rows, each once.
    :param scale: length scales of HMC, shape ``(rows, k)``.
    :return: new values, and the acceptance probability of each row.
    """
    local = _get_local_latents(potential)
    gibbs_key, hmc_key = random.split(rng_key)
    if local.gibbs_fn is not None:
        global_values = potential.constrain(potential.unravel(global_position), arguments)
        unconstrained = values.get_unconstrained(global_position)
        hmc_values = local.constrain(local.unravel(unconstrained))
        gibbs_values = call_gibbs_fn(
            local,
            local.to_model_layout(values.gibbs_values),
            {**global_values, **hmc_values},
            indices,
            arguments,
            gibbs_key,
        )
        values = values._replace(gibbs_values=local.to_row_layout(gibbs_values))
    if not local.hmc_sites:
        return values, jnp.ones(indices.shape, potential.dtype)
    potentials = make_pointwise_potentials(potential, global_position, indices, values, arguments)
    hmc_position, accept_prob = _hmc_transition(potentials, values.hmc_position, scale, hmc_key)
    return values._replace(hmc_position=hmc_position), accept_prob


def _hmc_transition(
    pointwise_fn: Callable[[Array], Array], hmc_position: Array, scale: Array, rng_key: Array
) -> tuple[Array, Array]:
    """Run a few leapfrog steps and accept or reject each row by itself.

    :return: new positions, shape ``(rows, k)``, and acceptance probabilities, shape ``(rows,)``.
    """
    momentum_key, jitter_key, small_step_key, accept_key = random.split(rng_key, 4)
    num_rows, dtype = hmc_position.shape[0], hmc_position.dtype
    momentum = random.normal(momentum_key, hmc_position.shape, dtype)
    jitter = random.uniform(jitter_key, (num_rows, 1), dtype, _MIN_STEP_JITTER, 1.0)
    is_small = random.uniform(small_step_key, (num_rows, 1), dtype) < _SMALL_STEP_PROBABILITY
    small_factor = jnp.where(is_small, jnp.asarray(_SMALL_STEP_FACTOR, dtype), 1.0)
    step_size = _LEAPFROG_STEP_SIZE * jitter * small_factor

    def kick_and_drift(carry: Any, weights: Any) -> tuple[Any, None]:
        q, p = carry
        kick, drift = weights
        p = p - kick * step_size * scale * _pointwise_gradient(pointwise_fn, q)
        return (q + drift * step_size * scale * p, p), None

    # One scan, so that the model is compiled once: half a kick first and last, no drift at the end.
    kicks = jnp.ones(_NUM_LEAPFROG_STEPS + 1, dtype).at[jnp.array([0, -1])].set(0.5)
    drifts = jnp.ones(_NUM_LEAPFROG_STEPS + 1, dtype).at[-1].set(0.0)
    (q, p), _ = lax.scan(kick_and_drift, (hmc_position, momentum), (kicks, drifts))
    # Terms of the data alone, as binomial coefficients, are evaluated here, once for both ends.
    before, after = jax.vmap(pointwise_fn)(jnp.stack([hmc_position, q]))
    log_ratio = before - after
    log_ratio = log_ratio + 0.5 * (jnp.square(momentum) - jnp.square(p)).sum(1)
    log_ratio = jnp.where(jnp.isfinite(log_ratio) & jnp.isfinite(q).all(1), log_ratio, -jnp.inf)
    log_uniform = -random.exponential(accept_key, (num_rows,), dtype)
    next_position = jnp.where((log_uniform < log_ratio)[:, None], q, hmc_position)
    return next_position, jnp.exp(jnp.minimum(log_ratio, 0.0))


def make_pointwise_potentials(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    arguments: Arguments,
) -> Callable[[Array], Array]:
    """Return a function of the HMC position that gives the potential of each row by itself.

    It has shape ``(rows,)``, without the plate's scale. Each potential holds a share of the
    globals' prior, which is constant in the local values.
    """

    def one_row(row: Array, values: BatchLocalValues) -> Array:
        return _row_potential(potential, global_position, row, values, arguments)

    return lambda position: jax.vmap(one_row)(indices, values._replace(hmc_position=position))


def _row_potential(
    potential: Potential,
    global_position: Array,
    row: Array,
    values: BatchLocalValues,
    arguments: Arguments,
) -> Array:
    """Return the potential of one row, whose values have no axis of rows."""
    plate = _get_local_latents(potential).plate
    row, values = jax.tree.map(lambda x: x[None], (row, values))
    row_arguments = with_local_values(arguments, values)
    # On a minibatch of one row the plate's scale is the number of rows.
    return potential.value(global_position, {plate.name: row}, row_arguments) / plate.size


def _pointwise_gradient(pointwise_fn: Callable[[Array], Array], hmc_position: Array) -> Array:
    """Return the gradient of each row's potential; rows do not depend on each other."""
    return jax.grad(lambda x: pointwise_fn(x).sum())(hmc_position)


def compute_local_hessian_diagonal(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    arguments: Arguments,
) -> Array:
    """Return second derivatives of the rows' potentials in each coordinate, shape ``(rows, k)``."""
    potentials = make_pointwise_potentials(potential, global_position, indices, values, arguments)
    position, gradient = values.hmc_position, partial(_pointwise_gradient, potentials)

    def second_derivative(k: Array) -> Array:
        direction = jnp.zeros_like(position).at[:, k].set(1.0)
        return jax.jvp(gradient, (position,), (direction,))[1][:, k]

    return lax.map(second_derivative, jnp.arange(position.shape[1])).T


@partial(jax.jit, static_argnames="potential")
def linearise_conditional_modes(
    potential: Potential, global_position: Array, values: LocalValues, arguments: Arguments
) -> LocalValues:
    r"""Return the same local values with the slopes of the rows' conditional modes.

    With U a row's potential, the mode :math:`\hat z(\theta)` moves by
    :math:`-(\partial_z^2 U)^{-1}\,\partial_z \partial_\theta U` with the globals. Rows for
    which Newton's method does not reach a mode get a slope of zero.
    """

    def one_row(row: Array, values: BatchLocalValues) -> Array:
        def value(theta: Array, x: Array) -> Array:
            at = values._replace(hmc_position=x, slope=None)
            return _row_potential(potential, theta, row, at, arguments)

        gradient = jax.grad(value, 1)
        start = values.get_unconstrained(global_position)
        identity = jnp.eye(start.size, dtype=start.dtype)

        def newton_step(carry: Any, _: None) -> tuple[Any, None]:
            x = carry[0]
            hessian, g = jax.jacfwd(gradient, 1)(global_position, x), gradient(global_position, x)
            curvature, directions = jnp.linalg.eigh(hessian)
            step = directions @ (directions.T @ g / jnp.abs(curvature))
            length = jnp.sqrt(jnp.abs(g @ step))  # in SDs of the conditional
            factor = jnp.minimum(1.0, _MAX_NEWTON_STEP_SD / length)
            return (x - factor * step, hessian, curvature[0], length), None

        init = start, identity, jnp.ones((), start.dtype), jnp.ones((), start.dtype)
        (mode, hessian, curvature, length), _ = lax.scan(
            newton_step, init, length=_NUM_NEWTON_STEPS
        )
        mixed = jax.jacrev(gradient)(global_position, mode)
        slope = -jnp.linalg.solve(hessian, mixed)
        is_mode = (curvature > 0.0) & (length < _MAX_MODE_DISTANCE_SD) & jnp.isfinite(slope).all()
        return jnp.where(is_mode, slope, 0.0)

    num_rows = values.hmc_position.shape[0]
    slope = map_over_row_chunks(
        lambda rows, _: jax.vmap(one_row)(rows, values.take(rows)), num_rows, random.key(0)
    )
    return values.with_slope(slope, global_position)


def sweep_local_values(
    potential: Potential,
    global_position: Array,
    state: LocalLatentsState,
    arguments: Arguments,
    rng_key: Array,
    num_updates: int,
) -> tuple[LocalValues, Array]:
    """Update the local values of all rows several times, a chunk of rows at a time.

    :return: new values, and the mean acceptance probability of each row.
    """

    def update_chunk(rows: Array, key: Array) -> tuple[BatchLocalValues, Array]:
        scale = state.scale[rows]

        def update(values: BatchLocalValues, key: Array) -> tuple[BatchLocalValues, Array]:
            return update_local_values(
                potential, global_position, rows, values, scale, arguments, key
            )

        keys = random.split(key, num_updates)
        values, accept_prob = lax.scan(update, state.values.take(rows), keys)
        return values, accept_prob.mean(0)

    num_rows = _get_local_latents(potential).plate.size
    values, accept_prob = map_over_row_chunks(update_chunk, num_rows, rng_key)
    return LocalValues(*values), accept_prob


def map_over_row_chunks(fn: Callable[[Array, Array], Any], num_rows: int, rng_key: Array) -> Any:
    """Return ``fn(rows, key)`` for all rows, a chunk at a time, with rows along the first axis."""
    chunk_size = min(num_rows, _MAX_ROWS_PER_CHUNK)
    num_chunks = -(-num_rows // chunk_size)
    padded = num_chunks * chunk_size
    rows = (jnp.arange(padded) % num_rows).reshape(num_chunks, chunk_size)
    results = lax.map(lambda x: fn(*x), (rows, random.split(rng_key, num_chunks)))
    return jax.tree.map(lambda x: x.reshape(padded, *x.shape[2:])[:num_rows], results)


@partial(jax.jit, static_argnames=("potential", "num_updates"))
def estimate_marginal_gradients(
    potential: Potential,
    global_positions: Array,
    state: LocalLatentsState,
    cached_arguments: Arguments,
    rng_key: Array,
    num_updates: int = NUM_LOCAL_UPDATES,
) -> Array:
    """Estimate gradients of the globals' marginal potential at a sequence of draws.

    :param state: local values near those of the first draw.
    :param cached_arguments: the model's arguments; large arrays may be in references.
    :return: approximately unbiased estimates, of the shape ``(n, d)`` of the positions.
    """
    arguments = cached_arguments.dereference()

    def update(position: Array, values: LocalValues, key: Array, num: int) -> LocalValues:
        return sweep_local_values(
            potential, position, state._replace(values=values), arguments, key, num
        )[0]

    def at_draw(values: LocalValues, draw: tuple[Array, Array]) -> tuple[LocalValues, Array]:
        position, key = draw
        first_key, *keys = random.split(key, 1 + num_updates)

        def joint_gradient(values: LocalValues, key: Array) -> tuple[LocalValues, Array]:
            values = update(position, values, key, 1)
            with_values = with_local_values(arguments, values)
            return values, potential.full_gradient(position, with_values)

        values = update(position, values, first_key, num_updates)
        values, gradients = lax.scan(joint_gradient, values, jnp.stack(keys))
        return values, gradients.mean(0)

    keys = random.split(rng_key, len(global_positions))
    return lax.scan(at_draw, state.values, (global_positions, keys))[1]


def init_local_values(
    potential: Potential, arguments: Arguments, global_position: Array
) -> LocalValues:
    """Return initial local values of all rows.

    Sites of HMC start near zero in unconstrained space, those of ``gibbs_fn`` at a sample from
    their prior given the globals.
    """
    local = _get_local_latents(potential)
    normals = random.normal(random.key(1), (local.plate.size, local.hmc_dim), potential.dtype)
    values = LocalValues(_INIT_SD * normals, {})
    if not local.gibbs_sites:
        return values

    def sample_prior(rows: Array, key: Array) -> dict[str, Array]:
        indices = {local.plate.name: rows}
        sites = potential.sample_conditional_prior(global_position, indices, arguments, key)
        return local.to_row_layout(sites)

    sample_all = jax.jit(lambda key: map_over_row_chunks(sample_prior, local.plate.size, key))
    values = values._replace(gibbs_values=sample_all(random.key(2)))
    rows = jnp.arange(local.plate.subsample_size)
    scale = jnp.ones((len(rows), local.hmc_dim), potential.dtype)
    updated, _ = jax.jit(
        lambda v: update_local_values(
            potential, global_position, rows, v.take(rows), scale, arguments, random.key(0)
        )
    )(values)
    for name, new_values in local.to_model_layout(updated.gibbs_values).items():
        support = next(site.support for site in local.gibbs_sites if site.name == name)
        is_inside = np.asarray(support(new_values)) if is_fixed_support(support) else np.array(True)
        if not is_inside.all():
            index = np.flatnonzero(~is_inside)[0] if is_inside.ndim else 0
            outside = np.asarray(new_values).ravel()[index]
            raise InvalidArgumentError(
                f"`gibbs_fn` returns {outside} for site '{name}', outside of its support, "
                f"{support}.",
                "return samples of the site given the other values.",
                "gibbs-fn",
            )
    return values


def _get_local_latents(potential: Potential) -> LocalLatents:
    assert potential.local_latents is not None
    return potential.local_latents
