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

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.data.progress import Stages
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup.ahead import compile_ahead

__all__ = ["MeanField", "fit", "prepare"]

_FIRST_SD = 0.1
_LONGEST_STEP = 0.05
# With a million rows a posterior is a thousandth of its prior: a fiftieth left the mean up to six
# sds off and the bound 100 nats lower.
_SHORTEST_SHARE = 1 / 1_000
_STEPS_A_CALL = 250
_NUMBERS_A_CALL = 2**25  # random ones, at most


class MeanField(NamedTuple):
    """Independent normals.

    - **mean** - shape ``(d,)``.
    - **sd** - of the same shape.
    """

    mean: np.ndarray
    sd: np.ndarray


def _optimizer(num_steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(_LONGEST_STEP, num_steps, _SHORTEST_SHARE))


def _start(means: np.ndarray, num_steps: int) -> Any:
    """All starts' parameters, and the optimizer's state for each."""
    params = means, np.full_like(means, np.log(_FIRST_SD))
    state = _optimizer(num_steps).init(tuple(x[0] for x in params))  # no program: starts are alike
    return params, jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], len(means), 0), state)


@partial(jax.jit, static_argnames=("target", "num_steps"))
def _advance(
    target: Target,
    arguments: Arguments,
    carry: Any,
    rows: Indices,
    noise: Array,
    keys: Array | None,
    num_steps: int,
) -> Any:
    """One call's steps of all starts.

    :param rows: one minibatch a step, shape ``(steps, subsample_size)`` for each plate.
    :param noise: standard normal entries, shape ``(steps, starts, d)``.
    :param keys: one a step, for a randomised likelihood.
    :param num_steps: those of all calls together.
    """
    optimizer = _optimizer(num_steps)

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        rows, noise, key = xs

        def one(carry: Any, noise: Array) -> Any:
            (mean, log_sd), state = carry
            deviation = jnp.exp(log_sd) * noise
            gradient = target.honest_gradient(mean + deviation, rows, arguments, key)
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

    return lax.scan(step, carry, (rows, noise, keys))[0]


def _calls(num_steps: int, num_starts: int, dim: int) -> tuple[int, int]:
    """How many calls, and the steps of each."""
    fitting = _NUMBERS_A_CALL // (num_starts * dim)
    a_call = max(1, min(_STEPS_A_CALL, fitting, num_steps))
    return -(-num_steps // a_call), a_call


def prepare(
    target: Target,
    arguments: Arguments,
    num_starts: int,
    num_steps: int,
    few_rows: int | None = None,
) -> None:
    """Begin to compile a :func:`fit` from so many starts.

    :param few_rows: rows of a minibatch on which it is fitted; None for all.
    """
    num_calls, a_call = _calls(num_steps, num_starts, target.dim)
    means = jax.ShapeDtypeStruct((num_starts, target.dim), target.dtype)
    rows = {
        p.name: jax.ShapeDtypeStruct((a_call, few_rows or p.subsample_size), np.int32)
        for p in target.plates
    }
    compile_ahead(
        _advance,
        target,
        arguments,
        _start(np.zeros(means.shape, means.dtype), num_calls * a_call),
        rows,
        jax.ShapeDtypeStruct((a_call, *means.shape), target.dtype),
        random.split(random.key(0), a_call) if target.is_randomized else None,
        num_calls * a_call,
    )


def fit(
    target: Target,
    arguments: Arguments,
    starts: np.ndarray,
    draw_rows: Any,
    num_steps: int,
    rng: np.random.Generator,
    progress: Stages,
) -> list[MeanField]:
    """The fits to which the starts lead.

    :param starts: first means, shape ``(starts, d)``.
    :param draw_rows: ``(shape) -> minibatches`` of that shape.
    :param num_steps: steps, rounded up to whole calls.
    :param progress: told of the gradients taken.
    """
    num_calls, a_call = _calls(num_steps, *starts.shape)
    carry = _start(starts.astype(target.dtype), num_calls * a_call)
    for call in range(num_calls):
        noise = rng.standard_normal((a_call, *starts.shape), np.float32).astype(target.dtype)
        keys = random.split(random.key(call), a_call) if target.is_randomized else None
        rows = draw_rows((a_call,))
        carry = _advance(target, arguments, carry, rows, noise, keys, num_calls * a_call)
        progress.done(a_call * len(starts))
    mean, log_sd = (np.asarray(x, np.float64) for x in carry[0])
    return [MeanField(m, np.exp(s)) for m, s in zip(mean, log_sd, strict=True)]
