"""Training of networks: averaged weights, and a posterior that is sampled about them.

A chain from a random initialisation needs many passes over the rows to reach the bulk of the
posterior of a network's weights. An optimizer needs few. :func:`train_weights` minimises the
negative log joint density on shuffled minibatches and averages the last iterates.
:func:`train_and_sample` begins chains at this average, on the posterior that
:class:`~numpyro_sgmcmc.model.handlers.localised` restricts to a neighbourhood of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random
from numpyro.infer import MCMC, init_to_sample

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.compilation import clear_compilation_cache_if_full
from numpyro_sgmcmc.data.arguments import Arguments, check_jax_representable
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.data.subsampling import (
    ShuffledSubsampling,
    init_streams,
    sample_minibatches_of_plates,
)
from numpyro_sgmcmc.errors import (
    InitializationError,
    InvalidArgumentError,
    InvalidModelError,
    describe_value,
)
from numpyro_sgmcmc.model.handlers import localised
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.subsampled import get_model_potential
from numpyro_sgmcmc.progress import ProgressReporter, show_adaptation_progress
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.kernels import SGHMCSplit

# Learning rate of the default optimizer, which decays to a tenth of it over the first three
# quarters of the steps. Iterates of the last quarter are averaged.
_LEARNING_RATE, _FINAL_LEARNING_RATE_FRACTION = 0.01, 0.1
_AVERAGED_FRACTION = 0.25
_MAX_STEPS_PER_CALL = 250  # of compiled code, after which the progress bar advances
# Minibatches on which the loss before and after the averaged steps is compared, and standard errors
# of its decrease by which this has to exceed its limit.
_NUM_COMPARED_MINIBATCHES, _NUM_STANDARD_ERRORS = 20, 3.0


class TrainedWeights(NamedTuple):
    """Weights that are averaged over the last iterates of an optimizer.

    - **center** - constrained values by site, for :class:`~numpyro_sgmcmc.localised`.
    - **init_params** - the same values, unconstrained, for ``MCMC.run``.
    - **losses** - negative log joint density of each step's minibatch, shape ``(num_steps,)``.
    """

    center: dict[str, Array]
    init_params: dict[str, Array]
    losses: np.ndarray


def train_weights(
    model: Callable,
    rng_key: Array,
    *args: Any,
    num_train_steps: int = 5000,
    optimizer: optax.GradientTransformation | None = None,
    init_strategy: Callable = init_to_sample,
    progress_bar: bool = True,
    **kwargs: Any,
) -> TrainedWeights:
    """Find weights of large posterior density by an optimizer, and average the last quarter.

    The optimizer minimises the negative log joint density of the unconstrained sites on shuffled
    minibatches. For a normal prior this is training with weight decay. Data can be in memory, on
    disk or on several devices, as for kernels. Pass arguments of the model that have the name of an
    argument below by position.

    :param model: NumPyro model.
    :param rng_key: random key of the initial weights and of the minibatches.
    :param args: positional arguments of the model.
    :param num_train_steps: number of minibatches.
    :param optimizer: of optax. Default: Adam, with a learning rate that decays from 0.01 to 0.001,
        so that standardised data and weights of the order of one are assumed.
    :param init_strategy: initialisation strategy of NumPyro. Default: a draw from the prior.
    :param progress_bar: whether a progress bar is shown.
    :param kwargs: keyword arguments of the model.
    :return: named tuple of the averaged weights by site, constrained (``center``) and unconstrained
        (``init_params``), and of the negative log joint density of each step's minibatch
        (``losses``). A warning is issued if the loss was still decreasing.
    :raises ValueError: for a model that the kernels do not sample or that has local latent
        variables, and if the loss is not finite.
    """
    errors.check_rng_key(rng_key)
    errors.check_positive_int("num_train_steps", num_train_steps)
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise InvalidArgumentError(
            f"`optimizer` is {describe_value(optimizer)}, which is not an optimizer of optax.",
            "pass an optimizer such as optax.adam(0.001).",
            "training",
        )
    num_steps, arguments = int(num_train_steps), Arguments(args, kwargs)
    check_jax_representable(arguments, model)
    clear_compilation_cache_if_full()
    potential = _make_potential(model, arguments, init_strategy)
    optimizer = _make_default_optimizer(num_steps) if optimizer is None else optimizer
    arguments = arguments.map_arrays(jnp.asarray)
    with ExitStack() as stack:
        stack.enter_context(unwrap_callback_errors(arguments.host_arrays))
        progress = ProgressReporter()
        if progress_bar:
            progress = stack.enter_context(show_adaptation_progress(arguments.host_arrays))
        progress.begin_stage("training")
        progress.set_total(num_steps)
        carry = _init_training(potential, optimizer, rng_key, arguments)
        start = first_averaged = carry.position
        losses = []
        for num_call_steps, num_averaged in _split_steps(num_steps):
            first_averaged = carry.position if num_averaged == 0 else first_averaged
            carry, call_losses = _run_training_steps(
                potential, optimizer, num_call_steps, arguments, carry, num_averaged
            )
            losses.append(np.asarray(call_losses))
            if not (np.isfinite(losses[-1][-1]) and np.isfinite(carry.position).all()):
                _raise_nonfinite_loss(potential, arguments, start)
            progress.advance(num_call_steps)
        _warn_if_decreasing(potential, arguments, carry, first_averaged)
    z = potential.unravel(carry.average)
    return TrainedWeights(potential.constrain(z, arguments), z, np.concatenate(losses))


def train_and_sample(
    model: Callable,
    rng_key: Array,
    *args: Any,
    precision: float | Mapping[str, Any],
    num_train_steps: int = 5000,
    optimizer: optax.GradientTransformation | None = None,
    init_strategy: Callable = init_to_sample,
    kernel: Callable[[Callable], SGMCMCKernel] = SGHMCSplit,
    num_warmup: int = 300,
    num_samples: int = 500,
    num_chains: int = 4,
    progress_bar: bool = True,
    **kwargs: Any,
) -> MCMC:
    r"""Train a network, and sample its posterior in the neighbourhood of the trained weights.

    This is one call of :func:`train_weights`, and one run of ``MCMC`` on
    ``localised(model, center, precision)`` whose chains begin at these weights. The SDs of
    predictions are those of one mode, and depend on the precision.

    :param model: NumPyro model.
    :param rng_key: random key.
    :param args: positional arguments of the model.
    :param precision: inverse variance of the localising normal density, as in
        :class:`~numpyro_sgmcmc.localised`: a number for all sites, or a dict by site. Sites that
        are not in the dict are not restricted. Draws of weights that the data do not determine have
        an SD of at most about :math:`\text{precision}^{-1/2}`.
    :param num_train_steps: number of minibatches to train on.
    :param optimizer: see :func:`train_weights`.
    :param init_strategy: of the training, see :func:`train_weights`.
    :param kernel: class of a kernel, or a function from the model to a kernel, such as
        ``partial(SGHMCSplit, num_steps=100)``.
    :param num_warmup: warm-up iterations of each chain.
    :param num_samples: draws of each chain.
    :param num_chains: number of chains.
    :param progress_bar: whether progress bars are shown.
    :param kwargs: keyword arguments of the model.
    :return: the completed run, with a kernel on the localised model.
    :raises ValueError: see :func:`train_weights`.
    """
    errors.check_rng_key(rng_key)
    for name, number in (("num_samples", num_samples), ("num_chains", num_chains)):
        errors.check_positive_int(name, number)
    errors.check_nonnegative("num_warmup", num_warmup)
    if not callable(kernel) or isinstance(kernel, SGMCMCKernel):
        raise InvalidArgumentError(
            f"`kernel` is {describe_value(kernel)}, which is not a function from a model to a "
            "kernel.",
            "pass the class of a kernel, or a function such as partial(SGHMCSplit, num_steps=100).",
            "training",
        )
    potential = _make_potential(model, Arguments(args, kwargs), init_strategy)
    by_site = _validate_precision(precision, potential, Arguments(args, kwargs))
    train_key, run_key = random.split(rng_key)
    trained = train_weights(
        model,
        train_key,
        *args,
        num_train_steps=num_train_steps,
        optimizer=optimizer,
        init_strategy=init_strategy,
        progress_bar=progress_bar,
        **kwargs,
    )
    center = {name: trained.center[name] for name in by_site}
    mcmc = MCMC(
        kernel(localised(model, center, by_site)),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=progress_bar,
    )
    init_params = trained.init_params
    if num_chains > 1:
        init_params = {n: jnp.stack([z] * num_chains) for n, z in init_params.items()}
    mcmc.run(run_key, *args, init_params=init_params, **kwargs)
    return mcmc


def _make_potential(model: Callable, arguments: Arguments, init_strategy: Callable) -> Potential:
    """Return the potential of a model without local latent variables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.DroppedSiteWarning)  # no draws are kept
        potential = get_model_potential(model, arguments, init_strategy)
    if names := potential.local_names:
        raise InvalidModelError(
            f"The sites {list(names)} are local latent variables, which `train_weights` does not "
            "support.",
            "sample this model by SGHMCSplit(model), or integrate the sites out.",
            "training",
        )
    return potential


def _validate_precision(
    precision: float | Mapping[str, Any], potential: Potential, arguments: Arguments
) -> dict[str, Any]:
    """Return the precision by site, after checking sites, values and shapes."""
    position = np.zeros(potential.dim, potential.dtype)
    values = jax.eval_shape(potential.constrain, potential.unravel(position), arguments)
    names = list(values)
    by_site = precision if isinstance(precision, Mapping) else dict.fromkeys(names, precision)
    if not by_site or (unknown := sorted(set(by_site) - set(names))):
        problem = f"has unknown sites {unknown}" if by_site else "is empty"
        raise InvalidArgumentError(
            f"`precision` {problem}.",
            f"pass a positive number, or a dict of some of the sites {sorted(names)}.",
            "training",
        )
    for name, value in by_site.items():
        array = errors.validate_real_array("precision", value)
        if not (np.isfinite(array).all() and (array > 0).all()):
            of_site = f" of '{name}'" if isinstance(precision, Mapping) else ""
            raise InvalidArgumentError(
                f"`precision`{of_site} is {describe_value(value)}, which is not positive and "
                "finite.",
                "pass the inverse variance of the localising density, such as 100.0.",
                "training",
            )
        if array.shape not in ((), values[name].shape):
            raise InvalidArgumentError(
                f"`precision` of '{name}' has shape {array.shape}.",
                f"pass a number, or an array of the site's shape {values[name].shape}.",
                "training",
            )
    return dict(by_site)


class _TrainingState(NamedTuple):
    """State of the optimizer between compiled calls."""

    position: Array  # unconstrained weights, shape `(d,)`
    average: Array  # of the averaged iterates
    optimizer_state: Any
    streams: dict[str, Any]  # of minibatches, by plate
    rng_key: Array


@lru_cache
def _make_default_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Return Adam with cosine decay of the learning rate, constant while iterates are averaged."""
    num_decay_steps = num_steps - _count_averaged_steps(num_steps)
    return optax.adam(
        optax.cosine_decay_schedule(
            _LEARNING_RATE, max(1, num_decay_steps), _FINAL_LEARNING_RATE_FRACTION
        )
    )


def _count_averaged_steps(num_steps: int) -> int:
    return max(1, round(_AVERAGED_FRACTION * num_steps))


def _split_steps(num_steps: int) -> Iterator[tuple[int, int | None]]:
    """Yield the steps of each compiled call, and the iterates that were averaged before.

    The second number is None before averaging begins.
    """
    num_averaged_steps = _count_averaged_steps(num_steps)
    for num, num_before in ((num_steps - num_averaged_steps, None), (num_averaged_steps, 0)):
        for start in range(0, num, _MAX_STEPS_PER_CALL):
            yield (
                min(_MAX_STEPS_PER_CALL, num - start),
                None if num_before is None else num_before + start,
            )


@partial(jax.jit, static_argnames=("potential", "optimizer"))
def _init_training(
    potential: Potential,
    optimizer: optax.GradientTransformation,
    rng_key: Array,
    arguments: Arguments,
) -> _TrainingState:
    position_key, stream_key, rng_key = random.split(rng_key, 3)
    position = potential.sample_init_position(position_key, arguments)
    streams = init_streams(potential.plates, stream_key)
    return _TrainingState(position, position, optimizer.init(position), streams, rng_key)


@partial(jax.jit, static_argnames=("potential", "optimizer", "num_steps"))
def _run_training_steps(
    potential: Potential,
    optimizer: optax.GradientTransformation,
    num_steps: int,
    arguments: Arguments,
    state: _TrainingState,
    num_averaged: Any,
) -> tuple[_TrainingState, Array]:
    """Return the state after some steps of the optimizer, and the loss of each.

    :param num_averaged: iterates of which ``state.average`` is the mean; None: no averaging.
    """
    rng_key, call_key = random.split(state.rng_key)
    streams, batches = _sample_minibatches(potential, state.streams, call_key, num_steps)

    def step(state: _TrainingState, xs: Any) -> tuple[_TrainingState, Array]:
        i, (indices, model_key) = xs
        loss, gradient = potential.value_and_grad(state.position, indices, arguments, model_key)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.position)
        position = optax.apply_updates(state.position, updates)
        average = state.average
        if num_averaged is not None:
            average = optax.incremental_update(position, average, 1.0 / (num_averaged + i + 1))
        return _TrainingState(position, average, optimizer_state, streams, rng_key), loss

    state = state._replace(streams=streams, rng_key=rng_key)
    return lax.scan(step, state, (jnp.arange(num_steps), batches))


def _raise_nonfinite_loss(potential: Potential, arguments: Arguments, start: Array) -> None:
    """Raise the error of a loss that is not finite at the end of a call.

    :param start: initial position of the training.
    """
    cause, fix = potential.diagnose_nonfinite(start, arguments)
    if not cause:
        cause = ", because the weights have diverged"
        fix = "pass an optimizer with smaller steps, such as optimizer=optax.adam(0.001)."
    raise InitializationError(
        f"The loss of the training is not finite{cause}.", fix, "no-finite-initial-position"
    )


def _warn_if_decreasing(
    potential: Potential, arguments: Arguments, state: _TrainingState, first_averaged: Array
) -> None:
    """Warn if the averaged steps decreased the loss by more than the posterior's typical loss.

    A normal posterior's potential has an expectation of d / 2 nats above its minimum.

    :param state: after the last step.
    :param first_averaged: position before the averaged steps.
    """
    decreases = np.asarray(
        _compute_decreases(potential, arguments, state, first_averaged), np.float64
    )
    error = decreases.std(ddof=1) / np.sqrt(len(decreases))
    if decreases.mean() - _NUM_STANDARD_ERRORS * error > potential.dim / 2.0:
        errors.warn_user(
            "The training has not converged: over its last quarter the negative log joint density "
            f"decreased by {decreases.mean():.3g}.",
            errors.ConvergenceWarning,
            "standardise the data, or pass a larger num_train_steps or an optimizer with larger "
            "steps, such as optimizer=optax.adam(0.1). Chains about these weights would sample a "
            "region of small posterior density.",
            "training",
        )


@partial(jax.jit, static_argnames="potential")
def _compute_decreases(
    potential: Potential, arguments: Arguments, state: _TrainingState, first_averaged: Array
) -> Array:
    """Return the decrease of the loss of some minibatches over the averaged steps."""

    def compare(xs: Any) -> Array:
        indices, model_key = xs
        before, after = (
            potential.value(position, indices, arguments, model_key)
            for position in (first_averaged, state.position)
        )
        return before - after

    _, batches = _sample_minibatches(
        potential, state.streams, state.rng_key, _NUM_COMPARED_MINIBATCHES
    )
    return lax.map(compare, batches)


def _sample_minibatches(
    potential: Potential, streams: dict[str, Any], rng_key: Array, num: int
) -> tuple[dict[str, Any], tuple[dict[str, Array], Array]]:
    """Return the next streams, the row indices of some minibatches, and keys for the model."""
    minibatch_key, model_key = random.split(rng_key)
    streams, indices = sample_minibatches_of_plates(
        ShuffledSubsampling(), potential.plates, streams, minibatch_key, num
    )
    return streams, (indices, random.split(model_key, num))
