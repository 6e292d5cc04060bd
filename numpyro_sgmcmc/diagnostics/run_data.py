"""What the diagnostics ask of a finished run.

Chains that run in coordinates of their own, put together.

How far chains agree, and as how many independent draws theirs count.

A run's draws looked at again, with gradients taken there.

In a stationary chain the kicks cancel: their mean is zero whatever the bias, so that moments made
of the gradients that moved the chain are blind to much. Gradients taken where the draws are, on
rows that no step has seen, are not.

What a draw costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.distributions import biject_to
from numpyro.infer import MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.util import unconstrain_fn

from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    iter_weighted_minibatches,
    sample_minibatch_indices,
)
from numpyro_sgmcmc.adaptation.budget import HIGH_DIM, count_rows_per_gradient
from numpyro_sgmcmc.adaptation.gradient_noise import compute_max_curvatures
from numpyro_sgmcmc.adaptation.preconditioning import thin_draws
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import RunningSums
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.state import SGMCMCState

__all__ = [
    "ConvergenceStats",
    "GradientsAtDraws",
    "check_finished_run",
    "check_has_data",
    "compute_center_offsets",
    "compute_gradients_at_draws",
    "compute_unconstrained_draws",
    "convert_sums_to_first_chain",
    "ess_per_gradient",
    "get_chain_preconditioners",
    "get_coordinate_names",
    "get_potential_coordinate_names",
    "get_unconstrained_draws",
    "get_unconstrained_draws_or_none",
    "make_thinning_slice",
]


def check_finished_run(mcmc: Any, caller: str, uses_moments: bool = True) -> SGMCMCKernel:
    """The kernel of a run of this package's.

    :param mcmc: what the user passed.
    :param caller: name of the function that needs it, for the message.
    :param uses_moments: whether it goes by the run's moments.
    :raises ValueError: where it is something else, or has not run.
    """
    if not isinstance(mcmc, MCMC):
        raise InvalidArgumentError(
            f"`{caller}` needs the MCMC object of a run, whose state holds the moments that "
            f"tell the bias, but got {type(mcmc).__name__}: draws alone do not tell it."
        )
    kernel = mcmc.sampler
    if not isinstance(kernel, SGMCMCKernel):
        raise InvalidArgumentError(
            f"`{caller}` is for the kernels of numpyro_sgmcmc, but this MCMC ran "
            f"{type(kernel).__name__}, which keeps no moments that tell its bias."
        )
    state = mcmc.last_state
    if state is not None and not sum(np.size(x) for x in jax.tree.leaves(state.z)):
        raise InvalidArgumentError(
            f"The model has no latent site: there is nothing for `{caller}` to tell."
        )
    if state is None or not np.any(np.asarray(state.moments.num_iterations) > 0):
        raise InvalidArgumentError(f"There are no draws yet: call `mcmc.run` before `{caller}`.")
    if state.local_state is not None and uses_moments:
        raise InvalidArgumentError(
            f"`{caller}` cannot tell the bias of a model with latent sites inside the "
            "subsampled plate: its moments are those of the globals given them. Compare with a "
            "run of half the step_size, and use `mcmc.print_summary()`."
        )
    return kernel


def check_has_data(kernel: SGMCMCKernel, caller: str) -> None:
    """Refuse a kernel that has been pickled, and with it has forgotten model and data.

    :raises ValueError: naming the function that needs them.
    """
    if not kernel.has_potential:
        raise InvalidArgumentError(
            f"`{caller}` needs the kernel's data, which it forgets when it is pickled: run it "
            "again first."
        )


def get_coordinate_names(mcmc: MCMC) -> list[tuple[str, str]]:
    """Site and name of each coordinate, in the order of the flat position."""
    z = mcmc.last_state.z
    if mcmc.num_chains > 1:
        z = jax.tree.map(lambda x: x[0], z)
    return _format_coordinate_names(z)


def get_potential_coordinate_names(potential: Potential) -> list[tuple[str, str]]:
    """The same of a model's posterior."""
    assert potential.sites is not None
    return _format_coordinate_names({s.name: np.zeros(s.shape) for s in potential.sites})


def _format_coordinate_names(z: Any) -> list[tuple[str, str]]:
    names: list[tuple[str, str]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(z)[0]:
        site = str(getattr(path[0], "key", "z")) if path else "z"
        places = (f"[{','.join(map(str, i))}]" if i else "" for i in np.ndindex(jnp.shape(leaf)))
        names.extend((site, site + place) for place in places)
    return names


def get_unconstrained_draws(mcmc: MCMC, kernel: SGMCMCKernel) -> jax.Array:
    """The draws as flat unconstrained positions, shape ``(chains, draws, d)``."""
    return compute_unconstrained_draws(mcmc, kernel.potential, kernel._model)


def compute_unconstrained_draws(
    mcmc: MCMC,
    potential: Potential,
    model: Callable | None,
    conditioning_samples: dict[str, jax.Array] | None = None,
) -> jax.Array:
    """The draws as flat unconstrained positions of a posterior, shape ``(chains, draws, d)``.

    :param conditioning_samples: draws of the sites that the posterior is conditioned on.
    """
    samples = mcmc.get_samples(group_by_chain=True)
    if potential.sites is None:
        z = samples
    else:
        missing = [s.name for s in potential.sites if s.name not in samples]
        if missing:
            raise InvalidArgumentError(
                f"The draws of site '{missing[0]}' were not kept: run without '~z.{missing[0]}'."
            )
        z = {s.name: samples[s.name] for s in potential.sites}
        if all(s.support is not None for s in potential.sites):
            z = {s.name: biject_to(s.support).inv(z[s.name]) for s in potential.sites}
        else:
            by_gibbs = (
                {} if conditioning_samples is None else {GIBBS_SITES_KWARG: conditioning_samples}
            )

            def one(values: dict[str, Any], others: dict[str, Any]) -> Any:
                return unconstrain_fn(model, mcmc._args, {**mcmc._kwargs, **others}, values)

            z = jax.vmap(jax.vmap(one))(z, by_gibbs)
            z = {s.name: z[s.name] for s in potential.sites}
    leaves = jax.tree.leaves(z)
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in leaves], -1).astype(
        potential.dtype
    )


def make_thinning_slice(num_draws: int, num_wanted: int) -> slice:
    """About so many of ``num_draws`` draws, at least as many where there are, as far apart as can be."""
    return slice(None, None, max(1, num_draws // num_wanted))


def get_chain_preconditioners(state: SGMCMCState) -> list[Preconditioner]:
    """Each chain's whitened coordinates, in float64."""
    several = state.adapt_state.preconditioner._replace(reference_hessian=None)
    several = jax.tree.map(lambda x: np.asarray(x, np.float64), several)
    if not state.i.ndim:
        return [several]
    return [jax.tree.map(lambda x, c=c: x[c], several) for c in range(len(state.i))]


def compute_center_offsets(preconditioners: Sequence[Preconditioner]) -> np.ndarray:
    """Each chain's anchor less the first one's, shape ``(chains, 1, d)``.

    Draws less these are about one place, modes laid over each other.
    """
    return np.stack([c.center - preconditioners[0].center for c in preconditioners])[:, None]


def convert_sums_to_first_chain(
    sums: RunningSums, preconditioners: Sequence[Preconditioner]
) -> RunningSums:
    r"""Moments of all chains in the first one's coordinates, as they are where all have the same.

    With :math:`q_0 = Mq + b` gradients become :math:`g_0 = M^{-\top} g`. The stretch is left out:
    moments are kept without it.

    :param sums: leading axes of chains and of batches.
    :param preconditioners: each chain's coordinates; where moments are no matrices, diagonal ones.
    """
    first = preconditioners[0]
    if all(np.array_equal(c.center, first.center) for c in preconditioners):
        return sums
    moved = [
        _change_sums_coordinates(jax.tree.map(lambda x, c=c: x[c], sums), w, first)
        for c, w in enumerate(preconditioners)
    ]
    return jax.tree.map(lambda *xs: np.stack(xs), *moved)


def _change_sums_coordinates(
    sums: RunningSums, source: Preconditioner, destination: Preconditioner
) -> RunningSums:
    """One chain's sums in other coordinates, each batch of them."""
    sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
    weight = sums.weight[:, None]
    away = source.center - destination.center
    if sums.position_gradient.ndim == 2:  # diagonals
        m, b = source.factor / destination.factor, away / destination.factor
        gradient = sums.gradient / m
        spread = m * m * sums.position_position + 2.0 * m * b * sums.position + weight * b * b
        return sums._replace(
            position=m * sums.position + weight * b,
            gradient=gradient,
            position_gradient=sums.position_gradient + b * gradient,
            position_position=spread,
        )
    inverse = np.linalg.inv(_as_matrix(destination.factor))
    m, b = inverse @ _as_matrix(source.factor), inverse @ away
    back = np.linalg.inv(m)
    position, gradient = sums.position @ m.T, sums.gradient @ back
    cross = position[:, :, None] * b
    spread = (
        m @ sums.position_position @ m.T + cross + cross.mT + weight[..., None] * np.outer(b, b)
    )
    return sums._replace(
        position=position + weight * b,
        gradient=gradient,
        position_gradient=m @ sums.position_gradient @ back + b[:, None] * gradient[:, None, :],
        position_position=spread,
    )


def _as_matrix(factor: np.ndarray) -> np.ndarray:
    return np.diag(factor) if factor.ndim == 1 else factor


_MAX_CHUNK_ENTRIES = 2**20  # numbers in the draws that are looked at in one go, about


_MIN_DRAWS_FOR_ESS, _MIN_DRAWS_FOR_R_HAT = (
    8,
    50,
)  # draws of a chain for ESS; for R-hat of its halves


class ConvergenceStats(NamedTuple):
    """
    - **r_hat** - split R-hat of each coordinate, shape ``(d,)``; NaN for few draws.
    - **ess** - effective sample size of each coordinate, shape ``(d,)``: no more than the draws
      where these are few; NaN where the draws are not independent of a schedule.
    """

    r_hat: np.ndarray
    ess: np.ndarray

    @classmethod
    def from_draws(cls, draws: np.ndarray) -> ConvergenceStats:
        """By NumPyro's diagnostics.

        :param draws: shape ``(chains, draws, d)``.
        """
        chains, num, dim = draws.shape
        if num < _MIN_DRAWS_FOR_ESS:
            return cls(np.full(dim, np.nan), np.full(dim, float(chains * num)))
        together = max(1, _MAX_CHUNK_ENTRIES // (chains * num))
        found = []
        for first in range(0, dim, together):
            some = draws[..., first : first + together]
            with np.errstate(divide="ignore", invalid="ignore"):
                found.append((split_gelman_rubin(some), effective_sample_size(some)))
        r_hat, ess = (np.concatenate(x) for x in zip(*found, strict=True))
        ess = np.where(ess < 1.0, 1.0, ess)  # what NumPyro's rounds to below zero, of lost chains
        return cls(r_hat if num >= _MIN_DRAWS_FOR_R_HAT else np.full(dim, np.nan), ess)


_MAX_ARRAY_ENTRIES = 2**27  # in all draws together, at most


_MIN_FINITE_FRACTION = 0.99  # of the draws


_MAX_GRADIENT_DRAWS, _MIN_GRADIENT_DRAWS = 1_024, 64


_MAX_GRADIENT_ROWS, _MAX_GRADIENT_BATCHES = (
    2**24,
    2**15,
)  # rows, and minibatches, at which gradients are taken, at most


_NUM_CURVATURE_DRAWS, _NUM_CURVATURE_ITERATIONS, _CURVATURE_DIFFERENCE_STEP = 128, 3, 0.01


class GradientsAtDraws(NamedTuple):
    """
    - **positions** - draws, by chain and in their order, shape ``(chains, n, d)``.
    - **gradients** - estimates of the potential's gradient there, unbiased and independent of
      each other given the draws.
    - **curvature_indices** - draws, of all chains one after the other, whose curvature is known; ``(k,)``.
    - **max_curvature** - there, the largest whitened one, shape ``(k,)``.
    """

    positions: np.ndarray
    gradients: np.ndarray
    curvature_indices: np.ndarray
    max_curvature: np.ndarray

    @classmethod
    def from_arrays(cls, positions: Any, gradients: Any) -> GradientsAtDraws:
        """Without curvature.

        :param positions: shape ``(chains, n, d)``.
        :param gradients: as many numbers.
        """
        at, found = (
            np.asarray(x, np.float64).reshape(positions.shape) for x in (positions, gradients)
        )
        return cls(at, found, np.zeros(0, int), np.zeros(0))

    def subtract_offsets(self, offsets: np.ndarray) -> GradientsAtDraws:
        """With each chain's positions less this, shape ``(chains, 1, d)``."""
        return self._replace(positions=self.positions - offsets)


def get_unconstrained_draws_or_none(mcmc: MCMC, kernel: SGMCMCKernel) -> np.ndarray | None:
    """All draws as flat unconstrained positions, ``(chains, draws, d)``; float64.

    :return: None where they were not kept, are too many to be gone through again, or are not
        draws of one posterior.
    """
    chains = mcmc.num_chains
    num = int(np.size(mcmc.get_extra_fields().get("diverging", 0)))
    dim = sum(np.size(x) for x in jax.tree.leaves(mcmc.last_state.z)) // chains
    if not kernel.has_potential or kernel.has_schedule or num * dim > _MAX_ARRAY_ENTRIES:
        return None
    try:
        found = np.asarray(get_unconstrained_draws(mcmc, kernel), np.float64)
    except (InvalidArgumentError, RuntimeError):  # sites, or all draws, that were not kept
        return None
    return _forward_fill_nonfinite(found)


def _forward_fill_nonfinite(draws: np.ndarray) -> np.ndarray | None:
    """Draws at the very edge of a support, of which float32 knows no place, as those before them.

    :param draws: shape ``(chains, draws, d)``.
    :return: None where they are more than a few.
    """
    fine = np.isfinite(draws).all(-1)
    if fine.all():
        return draws
    if fine.mean() < _MIN_FINITE_FRACTION or not fine[:, 0].all():
        return None
    places = np.where(fine, np.arange(draws.shape[1]), 0)
    places = np.maximum.accumulate(places, axis=1)
    return np.take_along_axis(draws, places[..., None], axis=1)


def compute_gradients_at_draws(
    mcmc: MCMC, kernel: SGMCMCKernel, draws: np.ndarray
) -> GradientsAtDraws | None:
    """Gradients at some of the draws on some of the rows.

    :param draws: all of them, shape ``(chains, draws, d)``.
    :return: None where there is no cheap way: for rows elsewhere than in memory, a randomised
        likelihood, and very many parameters.
    """
    target, arguments = kernel.potential, Arguments(mcmc._args, mcmc._kwargs)
    elsewhere = arguments.host_arrays or arguments.sharded_arrays
    if elsewhere or target.is_stochastic or target.dim > HIGH_DIM:
        return None
    adaptation = kernel.get_cached_adaptation(arguments)
    decisive = () if adaptation is None else adaptation.included_rows
    rows = BatchedGradients(target, arguments, included_rows=decisive)
    coordinates = get_chain_preconditioners(mcmc.last_state)
    batch = count_rows_per_gradient(target, rows.arguments)
    num = int(np.clip(_MAX_GRADIENT_ROWS // (2 * batch), _MIN_GRADIENT_DRAWS, _MAX_GRADIENT_DRAWS))
    positions = thin_draws(draws, num)
    flat = positions.reshape(-1, target.dim)
    of_chain = np.repeat(np.arange(len(positions)), positions.shape[1])
    gradients = _estimate_gradients(rows, coordinates, flat, of_chain).reshape(positions.shape)
    curved = np.unique(np.linspace(0, len(flat) - 1, _NUM_CURVATURE_DRAWS).astype(int))
    start = gradients.reshape(flat.shape)[curved]
    curvature = np.zeros(len(curved))
    for alike in _group_chains_by_center(coordinates):
        some = np.isin(of_chain[curved], alike)
        there = coordinates[alike[0]]
        curvature[some] = compute_max_curvatures(
            rows,
            there,
            flat[curved][some],
            there.apply_transpose(start[some]),
            _NUM_CURVATURE_ITERATIONS,
            _CURVATURE_DIFFERENCE_STEP,
        )
    return GradientsAtDraws(positions, gradients, curved, curvature)


def _group_chains_by_center(preconditioners: Sequence[Preconditioner]) -> list[list[int]]:
    """The chains that run in the same coordinates."""
    by_anchor: dict[bytes, list[int]] = {}
    for chain, whitening in enumerate(preconditioners):
        by_anchor.setdefault(whitening.center.tobytes(), []).append(chain)
    return list(by_anchor.values())


def _estimate_gradients(
    batched_gradients: BatchedGradients,
    preconditioners: Sequence[Preconditioner],
    positions: np.ndarray,
    chain_index: np.ndarray,
) -> np.ndarray:
    """Unbiased gradients by control variates, each on rows of its own; exact where rows are few.

    :param preconditioners: of each chain.
    :param positions: shape ``(n, d)``.
    :param chain_index: the chain of each.
    """
    target = batched_gradients.potential
    batch = sum(p.subsample_size for p in target.plates)
    if not batch:
        return batched_gradients.evaluate_on_subset(positions)[1]
    num = len(positions)
    most = min(_MAX_GRADIENT_BATCHES, _MAX_ARRAY_ENTRIES // target.dim, _MAX_GRADIENT_ROWS // batch)
    each = max(1, most // (2 * num))
    all_rows = (
        list(iter_weighted_minibatches(batched_gradients.plate_groups))
        if _count_batches_per_epoch(batched_gradients) <= 2 * each
        else []
    )
    if all_rows:
        return batched_gradients.weighted_mean(positions, all_rows)[1]
    rng = np.random.default_rng(0)
    drawn = sample_minibatch_indices(
        batched_gradients.step_potential, rng, (num * each,), IIDSubsampling()
    )
    # At each draw and, with the same rows, at the anchor.
    both = np.concatenate([positions, [w.center for w in preconditioners]])
    of, is_anchor = np.divmod(np.arange(2 * num * each), 2)
    draw, sign = of // each, 1 - 2 * is_anchor
    at = np.where(is_anchor, num + chain_index[draw], draw)
    found = _compute_center_gradients(batched_gradients, preconditioners)[chain_index]
    for part, _, gradients in batched_gradients.evaluate_step_minibatches(both, drawn, at, of):
        np.add.at(found, draw[part], sign[part, None] / each * gradients)
    return found


def _compute_center_gradients(
    batched_gradients: BatchedGradients, preconditioners: Sequence[Preconditioner]
) -> np.ndarray:
    """The gradient on all rows at each chain's anchor, shape ``(chains, d)``."""
    found = np.stack([w.reference_gradient for w in preconditioners])
    for alike in _group_chains_by_center(preconditioners):
        if not found[alike[0]].any():  # nobody has asked for it
            found[alike] = batched_gradients.full_gradient(preconditioners[alike[0]].center)
    return found


def _count_batches_per_epoch(batched_gradients: BatchedGradients) -> int:
    """Minibatches in a pass over all rows, about."""
    return sum(p.batches_per_epoch for p in batched_gradients.potential.plates)


def ess_per_gradient(mcmc: MCMC) -> dict[str, np.ndarray]:
    """Effective draws for each minibatch gradient, warm-up not counted.

    Unlike draws a second it does not depend on the machine; unlike draws an iteration it sees how
    many steps an iteration takes. Gradients that a scheme takes on one minibatch count one each;
    the one at the anchor that control variates take beside each does not.

    :param mcmc: a run of one of this package's kernels.
    :return: for each latent site an array of its shape, of effective sample sizes over gradients.
    :raises ValueError: for a run of another kernel, or before a run.
    """
    kernel = check_finished_run(mcmc, "ess_per_gradient")
    check_has_data(kernel, "ess_per_gradient")
    num_steps = int(np.max(mcmc.last_state.num_steps))
    a_step = kernel.dynamics.make_step(kernel.integrator).num_gradients
    gradients = mcmc.num_chains * mcmc.num_samples * num_steps * a_step
    samples: Any = mcmc.get_samples(group_by_chain=True)
    target = kernel.potential
    if target.sites is None:
        samples = samples if isinstance(samples, dict) else {"z": samples}
    else:
        samples = {s.name: samples[s.name] for s in target.sites if s.name in samples}
    return {
        name: np.asarray(jax.tree.map(lambda x: effective_sample_size(np.asarray(x)), draws))
        / gradients
        for name, draws in samples.items()
    }
