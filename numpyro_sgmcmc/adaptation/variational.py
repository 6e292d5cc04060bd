r"""Variational initialisation: a mean-field normal fitted to the posterior on minibatches.

With :math:`\theta = m + s\epsilon` and g the minibatch gradient of the potential there, the
gradients of the negative evidence lower bound (ELBO) are g with respect to the mean m and
:math:`g\,\epsilon\,s - 1` with respect to :math:`\log s`; Adam follows both. The fit finds the bulk
of the posterior, and not a mode: the density of a hierarchical model grows without bound as a scale
goes to zero with all effects that it scales, but the volume there vanishes.

Several initialisations run at once, on the same minibatches.

Reference: Kucukelbir, Tran, Ranganath, Gelman and Blei (2017), *Automatic differentiation
variational inference*.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.batched_gradients import sample_minibatch_indices
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import IIDSubsampling, Indices
from numpyro_sgmcmc.model.potential import Potential

# Initial SD of all coordinates, in unconstrained units.
_INIT_SD = 0.1

# Learning rate of Adam with cosine decay. With a million rows the posterior SD is a thousandth of
# the prior's: decay to a fiftieth left the mean up to six SDs off and the ELBO 100 nats lower.
_INIT_LEARNING_RATE = 0.05
_FINAL_LEARNING_RATE_FRACTION = 1 / 1_000

# Steps per compiled call, and the normals that it consumes: a bound on memory.
_MAX_STEPS_PER_CALL = 250
_MAX_NORMALS_PER_CALL = 2**25


class MeanField(NamedTuple):
    """Independent normals, fitted to the posterior."""

    mean: np.ndarray  # shape `(d,)`
    # SDs, shape `(d,)`
    sd: np.ndarray  # vocabulary: ok
    elbo: float = -np.inf  # evidence lower bound up to a constant; -inf where it is not finite


def fit_mean_field(
    inputs: WarmupInputs, init_positions: Sequence[np.ndarray], batch_size: int | None = None
) -> list[MeanField]:
    """Fit a normal from each initial position, without its ELBO.

    :param batch_size: rows of a minibatch; None for those of the plates.
    """
    potential, rng = inputs.potential, inputs.rng
    means = np.stack(init_positions).astype(potential.dtype)
    num_calls, steps_per_call = _choose_call_sizes(inputs.budget.num_vi_steps, *means.shape)
    total_steps = num_calls * steps_per_call
    carry = _init_fit(means, total_steps)
    for call in range(num_calls):
        normals = rng.standard_normal((steps_per_call, *means.shape), np.float32)
        keys = random.split(random.key(call), steps_per_call) if potential.is_stochastic else None
        indices = sample_minibatch_indices(potential, rng, (steps_per_call,), IIDSubsampling())
        indices = {name: i[..., :batch_size] for name, i in indices.items()}
        step_inputs = indices, normals.astype(potential.dtype), keys
        carry = _run_fit_steps(potential, inputs.arguments, carry, step_inputs, total_steps)
        inputs.progress.advance(steps_per_call * len(means))
    means, log_sds = (np.asarray(x, np.float64) for x in carry[0])
    return [MeanField(m, np.exp(s)) for m, s in zip(means, log_sds, strict=True)]


def precompile_mean_field(
    inputs: WarmupInputs, num_inits: int, batch_size: int | None = None
) -> None:
    """Start the compilation of :func:`fit_mean_field`."""
    potential = inputs.potential
    num_calls, steps_per_call = _choose_call_sizes(
        inputs.budget.num_vi_steps, num_inits, potential.dim
    )
    total_steps = num_calls * steps_per_call
    indices = {
        p.name: jax.ShapeDtypeStruct((steps_per_call, batch_size or p.subsample_size), np.int32)
        for p in potential.plates
    }
    normals = jax.ShapeDtypeStruct((steps_per_call, num_inits, potential.dim), potential.dtype)
    keys = random.split(random.key(0), steps_per_call) if potential.is_stochastic else None
    carry = _init_fit(np.zeros((num_inits, potential.dim), potential.dtype), total_steps)
    step_inputs = indices, normals, keys
    aot_compile(_run_fit_steps, potential, inputs.arguments, carry, step_inputs, total_steps)


def _choose_call_sizes(num_steps: int, num_inits: int, dim: int) -> tuple[int, int]:
    """Return the number of compiled calls and the steps of each."""
    max_steps = _MAX_NORMALS_PER_CALL // (num_inits * dim)
    steps_per_call = max(1, min(_MAX_STEPS_PER_CALL, max_steps, num_steps))
    return -(-num_steps // steps_per_call), steps_per_call


def _make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Return Adam with cosine decay of the learning rate."""
    return optax.adam(
        optax.cosine_decay_schedule(_INIT_LEARNING_RATE, num_steps, _FINAL_LEARNING_RATE_FRACTION)
    )


def _init_fit(means: np.ndarray, num_steps: int) -> Any:
    """Return means and log SDs of all fits, and the state of the optimizer of each."""
    params = means, np.full_like(means, np.log(_INIT_SD))
    # One state, repeated by NumPy: this compiles nothing.
    state = _make_optimizer(num_steps).init(tuple(x[0] for x in params))
    return params, jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], len(means), 0), state)


@partial(jax.jit, static_argnames=("potential", "num_steps"))
def _run_fit_steps(
    potential: Potential,
    arguments: Arguments,
    carry: Any,
    step_inputs: tuple[Indices, Array, Array | None],
    num_steps: int,
) -> Any:
    """Run the steps of one call, for all fits.

    :param step_inputs: indices, normals ``(steps, num_inits, d)`` and the model's keys, by step.
    :param num_steps: steps of all calls together, for the learning rate.
    """
    optimizer = _make_optimizer(num_steps)

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        indices, normals, key = xs

        def update_fit(carry: Any, normals: Array) -> Any:
            (mean, log_sd), state = carry
            deviation = jnp.exp(log_sd) * normals
            gradient = potential.gradient_or_nan(mean + deviation, indices, arguments, key)
            # Where the density is zero a step is left out; the next minibatch may have a gradient.
            # (`optax.apply_if_finite` is slower: under `vmap` it copies its whole state.)
            is_finite = jnp.isfinite(gradient)
            elbo_gradient = (
                jnp.where(is_finite, gradient, 0.0),
                jnp.where(is_finite, gradient * deviation - 1.0, 0.0),
            )
            updates, state = optimizer.update(elbo_gradient, state)
            return optax.apply_updates((mean, log_sd), updates), state

        return jax.vmap(update_fit)(carry, normals), None

    return lax.scan(step, carry, step_inputs)[0]
