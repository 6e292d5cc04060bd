r"""The start by volume: a mean-field Gaussian fitted to the posterior on minibatches.

With :math:`\theta = m + s\epsilon` and a minibatch gradient g there, Adam follows g for the mean
m and :math:`g\,\epsilon\,s - 1` for :math:`\log s`; the one is the entropy's. It leads to where
most of the mass is. The mode is no such place: in a hierarchy the density grows without bound as a
scale goes to zero with all that it scales, but the volume there does not.

Several starts run at once, on the same minibatches. Reference: Kucukelbir, Tran, Ranganath, Gelman
and Blei (2017), *Automatic differentiation variational inference*.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random

from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.progress import ProgressReporter

__all__ = ["MeanField", "fit_mean_field", "precompile_mean_field"]

_INIT_SD = 0.1
_INIT_LEARNING_RATE = 0.05
# With a million rows a posterior is a thousandth of its prior: a fiftieth left the mean up to six
# sds off and the bound 100 nats lower.
_FINAL_LEARNING_RATE_FRACTION = 1 / 1_000
_MAX_STEPS_PER_CALL = 250
_MAX_NORMALS_PER_CALL = 2**25  # random ones, at most


class MeanField(NamedTuple):
    """Independent normals.

    - **mean** - shape ``(d,)``.
    - **sd** - of the same shape.
    """

    mean: np.ndarray
    sd: np.ndarray


def _make_optimizer(num_steps: int) -> optax.GradientTransformation:
    return optax.adam(
        optax.cosine_decay_schedule(_INIT_LEARNING_RATE, num_steps, _FINAL_LEARNING_RATE_FRACTION)
    )


def _init_fit(means: np.ndarray, num_steps: int) -> Any:
    """All starts' parameters, and the optimizer's state for each."""
    params = means, np.full_like(means, np.log(_INIT_SD))
    state = _make_optimizer(num_steps).init(
        tuple(x[0] for x in params)
    )  # no program: starts are alike
    return params, jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], len(means), 0), state)


@partial(jax.jit, static_argnames=("potential", "num_steps"))
def _run_fit_steps(
    potential: Potential,
    arguments: Arguments,
    carry: Any,
    indices: Indices,
    normals: Array,
    rng_keys: Array | None,
    num_steps: int,
) -> Any:
    """One call's steps of all starts.

    :param indices: one minibatch a step, shape ``(steps, subsample_size)`` for each plate.
    :param normals: standard normal entries, shape ``(steps, starts, d)``.
    :param rng_keys: one a step, for a randomised likelihood.
    :param num_steps: those of all calls together.
    """
    optimizer = _make_optimizer(num_steps)

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        rows, noise, key = xs

        def one(carry: Any, noise: Array) -> Any:
            (mean, log_sd), state = carry
            deviation = jnp.exp(log_sd) * noise
            gradient = potential.gradient_or_nan(mean + deviation, rows, arguments, key)
            # Where there is no density there is no way to go; the next minibatch may know one.
            # (`optax.apply_if_finite` is slower: under `vmap` it copies all it has.)
            is_finite = jnp.isfinite(gradient)
            slopes = (
                jnp.where(is_finite, gradient, 0.0),
                jnp.where(is_finite, gradient * deviation - 1.0, 0.0),
            )
            updates, state = optimizer.update(slopes, state)
            return optax.apply_updates((mean, log_sd), updates), state

        return jax.vmap(one)(carry, noise), None

    return lax.scan(step, carry, (indices, normals, rng_keys))[0]


def _choose_call_sizes(num_steps: int, num_inits: int, dim: int) -> tuple[int, int]:
    """How many calls, and the steps of each."""
    fitting = _MAX_NORMALS_PER_CALL // (num_inits * dim)
    a_call = max(1, min(_MAX_STEPS_PER_CALL, fitting, num_steps))
    return -(-num_steps // a_call), a_call


def precompile_mean_field(
    potential: Potential,
    arguments: Arguments,
    num_inits: int,
    num_steps: int,
    batch_size: int | None = None,
) -> None:
    """Begin to compile a :func:`fit` from so many starts.

    :param batch_size: rows of a minibatch on which it is fitted; None for all.
    """
    num_calls, a_call = _choose_call_sizes(num_steps, num_inits, potential.dim)
    means = jax.ShapeDtypeStruct((num_inits, potential.dim), potential.dtype)
    rows = {
        p.name: jax.ShapeDtypeStruct((a_call, batch_size or p.subsample_size), np.int32)
        for p in potential.plates
    }
    aot_compile(
        _run_fit_steps,
        potential,
        arguments,
        _init_fit(np.zeros(means.shape, means.dtype), num_calls * a_call),
        rows,
        jax.ShapeDtypeStruct((a_call, *means.shape), potential.dtype),
        random.split(random.key(0), a_call) if potential.is_stochastic else None,
        num_calls * a_call,
    )


def fit_mean_field(
    potential: Potential,
    arguments: Arguments,
    init_positions: np.ndarray,
    sample_indices: Any,
    num_steps: int,
    rng: np.random.Generator,
    progress: ProgressReporter,
) -> list[MeanField]:
    """The fits to which the starts lead.

    :param init_positions: first means, shape ``(starts, d)``.
    :param sample_indices: ``(shape) -> minibatches`` of that shape.
    :param num_steps: steps, rounded up to whole calls.
    :param progress: told of the gradients taken.
    """
    num_calls, a_call = _choose_call_sizes(num_steps, *init_positions.shape)
    carry = _init_fit(init_positions.astype(potential.dtype), num_calls * a_call)
    for call in range(num_calls):
        noise = rng.standard_normal((a_call, *init_positions.shape), np.float32).astype(
            potential.dtype
        )
        keys = random.split(random.key(call), a_call) if potential.is_stochastic else None
        rows = sample_indices((a_call,))
        carry = _run_fit_steps(potential, arguments, carry, rows, noise, keys, num_calls * a_call)
        progress.advance(a_call * len(init_positions))
    mean, log_sd = (np.asarray(x, np.float64) for x in carry[0])
    return [MeanField(m, np.exp(s)) for m, s in zip(mean, log_sd, strict=True)]
