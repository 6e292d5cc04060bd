r"""Updates of local latent variables by ``gibbs_fn``, given the globals.

One step on a minibatch :math:`S` from globals :math:`\theta` and local values :math:`z`:

1. ``gibbs_fn`` samples :math:`z_S`, which leaves :math:`p(z_i \mid \theta, y_i)` invariant for each
   row (:func:`update_minibatch_locals`).
2. The globals take a step with the minibatch gradient at :math:`(\theta, z)`, new values included.

Both may use the same minibatch. Given any :math:`S` the first leaves :math:`p(\theta, z \mid y)`
invariant, so that :math:`S`, which is sampled independently of :math:`(\theta, z)`, is independent
of the updated :math:`(\theta, z)` as well, and the gradient on :math:`S` is unbiased there. With
minibatches without replacement the independence holds only approximately, as for any model.

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
from typing import Any

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

_MAX_ROWS_PER_CHUNK = 4096  # a bound on the memory of updates of all rows


def update_minibatch_locals(
    potential: Potential,
    values: LocalValues,
    global_position: Array,
    indices: Indices,
    arguments: Arguments,
    rng_key: Array,
) -> tuple[LocalValues, Arguments]:
    """Update the local values of a minibatch's rows.

    :return: the next values, and the arguments for the step's gradient.
    """
    rows = jnp.asarray(indices[_get_local_latents(potential).plate.name])
    after = update_local_values(
        potential, global_position, rows, values.take(rows), arguments, rng_key
    )
    return values.put(rows, after), with_local_values(arguments, after)


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
    rows: Array,
    values: BatchLocalValues,
    arguments: Arguments,
    rng_key: Array,
) -> BatchLocalValues:
    """Return new local values of some rows, each once, given the globals."""
    local = _get_local_latents(potential)
    global_values = potential.constrain(potential.unravel(global_position), arguments)
    before = local.to_model_layout(values.by_site)
    after = call_gibbs_fn(local, before, global_values, rows, arguments, rng_key)
    return BatchLocalValues(local.to_row_layout(after))


def sweep_local_values(
    potential: Potential,
    global_position: Array,
    values: LocalValues,
    arguments: Arguments,
    rng_key: Array,
    num_updates: int,
) -> LocalValues:
    """Update the local values of all rows several times, a chunk of rows at a time."""

    def update_chunk(rows: Array, key: Array) -> BatchLocalValues:
        def update(values: BatchLocalValues, key: Array) -> tuple[BatchLocalValues, None]:
            return (
                update_local_values(potential, global_position, rows, values, arguments, key),
                None,
            )

        return lax.scan(update, values.take(rows), random.split(key, num_updates))[0]

    num_rows = _get_local_latents(potential).plate.size
    return LocalValues(*map_over_row_chunks(update_chunk, num_rows, rng_key))


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
    values: LocalValues,
    cached_arguments: Arguments,
    rng_key: Array,
    num_updates: int = NUM_LOCAL_UPDATES,
) -> Array:
    """Estimate gradients of the globals' marginal potential at a sequence of draws.

    :param values: local values near those of the first draw.
    :param cached_arguments: the model's arguments; large arrays may be in references.
    :return: approximately unbiased estimates, of the shape ``(n, d)`` of the positions.
    """
    arguments = cached_arguments.dereference()

    def update(position: Array, values: LocalValues, key: Array, num: int) -> LocalValues:
        return sweep_local_values(potential, position, values, arguments, key, num)

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
    return lax.scan(at_draw, values, (global_positions, keys))[1]


def init_local_values(
    potential: Potential, arguments: Arguments, global_position: Array
) -> LocalValues:
    """Return initial local values of all rows: a sample from their prior given the globals."""
    local = _get_local_latents(potential)

    def sample_prior(rows: Array, key: Array) -> dict[str, Array]:
        indices = {local.plate.name: rows}
        sites = potential.sample_conditional_prior(global_position, indices, arguments, key)
        return local.to_row_layout(sites)

    sample_all = jax.jit(lambda key: map_over_row_chunks(sample_prior, local.plate.size, key))
    values = LocalValues(sample_all(random.key(2)))
    rows = jnp.arange(local.plate.subsample_size)
    updated = jax.jit(
        lambda v: update_local_values(
            potential, global_position, rows, v.take(rows), arguments, random.key(0)
        )
    )(values)
    for name, new_values in local.to_model_layout(updated.by_site).items():
        support = next(site.support for site in local.sites if site.name == name)
        is_inside = np.asarray(support(new_values)) if is_fixed_support(support) else np.array(True)
        if not is_inside.all():
            index = np.flatnonzero(~is_inside)[0] if is_inside.ndim else 0
            outside = np.asarray(new_values).ravel()[index]
            raise InvalidArgumentError(
                f"`gibbs_fn` returns {outside} for site '{name}', which is outside of its support, "
                f"{support}.",
                "return samples of the site given the other values.",
                "gibbs-fn",
            )
    return values


def _get_local_latents(potential: Potential) -> LocalLatents:
    assert potential.local_latents is not None
    return potential.local_latents
