"""The data of a finished run that the diagnostics use.

:class:`RunData` and :class:`GibbsRunData` are the only objects that read the ``MCMC`` object and
its last state; all other diagnostics take their values from them.
:class:`ConvergenceStats` holds R-hat and effective sample sizes, and :func:`ess_per_gradient`
relates the latter to the cost of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, Gibbs
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.util import unconstrain_fn

from numpyro_sgmcmc.adaptation import Adaptation
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError, ModelWarning
from numpyro_sgmcmc.model.block_arrow import BlockArrowMatrix
from numpyro_sgmcmc.model.local_latents import LocalValues
from numpyro_sgmcmc.model.potential import (
    Potential,
    format_coordinate_names,
    get_coordinate_names,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.trace import trace_model
from numpyro_sgmcmc.sampling.bias_monitor import RunningSums
from numpyro_sgmcmc.sampling.gibbs import build_conditional_potential
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

# Numbers in all draws together (1 GiB in float64): larger runs are diagnosed by their sums alone.
_MAX_DRAW_ENTRIES = 2**27
# Share of draws that must be finite in unconstrained space; the others repeat the previous one.
_MIN_FINITE_FRACTION = 0.99
# Numbers in the draws for which ESS and R-hat are computed at once: a bound on memory.
_MAX_CHUNK_ENTRIES = 2**20
# Draws per chain; below, autocorrelations are not estimated and the ESS is the number of draws.
_MIN_DRAWS_FOR_ESS = 8
# Draws per chain; below, split R-hat of independent draws often exceeds 1.05.
_MIN_DRAWS_FOR_R_HAT = 50


def check_finished_run(mcmc: Any, caller: str, uses_moments: bool = True) -> SGMCMCKernel:
    """Return the kernel of a finished run.

    :param caller: name of the function that needs the run, for the message.
    :param uses_moments: whether the caller interprets the run's running sums, which for models
        with local latent variables are those of a conditional posterior.
    :raises ValueError: if the object is no run of this package's kernels, or has no draws.
    """
    if not isinstance(mcmc, MCMC):
        raise InvalidArgumentError(
            f"`{caller}` got {type(mcmc).__name__} in place of an MCMC object.",
            "pass the MCMC object after its `run`. Draws alone lack the gradients that show bias.",
            "not-a-run",
        )
    kernel = mcmc.sampler
    if not isinstance(kernel, SGMCMCKernel):
        raise InvalidArgumentError(
            f"`{caller}` got a run of {type(kernel).__name__}, not of a numpyro_sgmcmc kernel.",
            "use a kernel of numpyro_sgmcmc, because other kernels do not record gradients.",
            "not-a-run",
        )
    state = mcmc.last_state
    if state is not None and not sum(np.size(x) for x in jax.tree.leaves(state.z)):
        raise InvalidModelError(
            f"`{caller}` got a run of a model without latent sites.",
            "check the model: all of its sites are observed or conditioned on.",
            "no-latent-sites",
        )
    if state is None or not np.any(np.asarray(state.moments.num_iterations) > 0):
        raise _no_draws_error(caller)
    if state.local_state is not None and uses_moments:
        raise InvalidArgumentError(
            f"`{caller}` does not support models with sites that `gibbs_fn` samples.",
            "use `bias_report`, or compare with a run of half the step_size.",
            "bias-of-local-latents",
        )
    return kernel


def _no_draws_error(caller: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"`{caller}` got an MCMC object without draws.", "call `mcmc.run` first.", "no-draws"
    )


def check_has_data(kernel: SGMCMCKernel, caller: str) -> None:
    """Check that a kernel has its model and data, which pickling discards."""
    if not kernel.has_potential:
        raise InvalidArgumentError(
            f"`{caller}` needs the kernel's data, which are discarded when a kernel is pickled.",
            "call `mcmc.run` again.",
            "kernel-without-data",
        )


@dataclass(frozen=True, eq=False)
class RunData:
    """All that the diagnostics read from a finished run.

    :param kernel: the kernel; without potential if it has been pickled.
    :param arguments: the model's arguments.
    :param num_steps: steps per iteration, the largest of all chains.
    :param step_size: last step size, the largest of all chains.
    :param mean_step_size: last step size, the mean of all chains.
    :param num_iterations: iterations after the warm-up, of all chains.
    :param num_draws: draws of all chains.
    :param num_divergences: diverging iterations among them.
    :param batch_sums: running sums, axes of chains and of batches first.
    :param preconditioners: preconditioner of each chain, float64.
    :param coordinate_names: site and name of each coordinate of the flat position.
    :param local_state: local latent variables with an axis of chains, or None.
    """

    kernel: SGMCMCKernel
    arguments: Arguments
    num_steps: int
    step_size: float
    mean_step_size: float
    num_iterations: int
    num_draws: int
    num_divergences: int
    batch_sums: RunningSums
    preconditioners: tuple[Preconditioner, ...]
    coordinate_names: tuple[tuple[str, str], ...]
    local_state: LocalValues | None
    _get_samples: Callable[[], Any]

    @classmethod
    def from_mcmc(cls, mcmc: Any, caller: str, *, allow_local_latents: bool = False) -> RunData:
        """Read a run, after the checks of :func:`check_finished_run`.

        :param allow_local_latents: whether the caller supports local latent variables.
        """
        kernel = check_finished_run(mcmc, caller, uses_moments=not allow_local_latents)
        state = mcmc.last_state
        preconditioner = state.adapt_state.preconditioner
        hessian = preconditioner.reference_hessian
        structure = hessian.without_values() if isinstance(hessian, BlockArrowMatrix) else None
        preconditioner = preconditioner._replace(reference_hessian=structure)
        by_chain = preconditioner, state.moments.batches, state.local_state, state.z
        if not state.i.ndim:
            by_chain = jax.tree.map(lambda x: x[None], by_chain)
        preconditioner, batch_sums, local_state, z = by_chain
        preconditioner = preconditioner.to_numpy()
        step_sizes = np.asarray(state.adapt_state.step_size)
        num_iterations = int(np.asarray(state.moments.num_iterations).sum())
        diverging = mcmc.get_extra_fields().get("diverging")
        return cls(
            kernel=kernel,
            arguments=Arguments(mcmc._args, mcmc._kwargs),
            num_steps=int(np.asarray(state.num_steps).max()),
            step_size=float(np.max(step_sizes)),
            mean_step_size=float(np.mean(step_sizes)),
            num_iterations=num_iterations,
            num_draws=num_iterations // mcmc.thinning if diverging is None else np.size(diverging),
            num_divergences=0 if diverging is None else int(np.asarray(diverging).sum()),
            batch_sums=jax.tree.map(np.asarray, batch_sums),
            preconditioners=preconditioner.split_chains(),
            coordinate_names=(
                get_coordinate_names(kernel.potential)  # collected local sites left out
                if kernel.has_potential
                else format_coordinate_names(jax.tree.map(lambda x: x[0], z))
            ),
            local_state=local_state,
            _get_samples=partial(mcmc.get_samples, group_by_chain=True),
        )

    @cached_property
    def adaptation(self) -> Adaptation | None:
        """Results of the warm-up; None if the kernel has been pickled or run on other data."""
        if not self.kernel.has_potential:
            return None
        return self.kernel.get_cached_adaptation(self.arguments)

    @cached_property
    def site_draws(self) -> Any:
        """Draws by site, axes of chains and draws first."""
        return self._get_samples()

    @cached_property
    def draws(self) -> Array:
        """Draws as flat unconstrained positions in the model's precision, ``(chains, draws, d)``.

        :raises ValueError: if the draws of a site were not kept.
        """
        kernel = self.kernel
        return _unconstrain_draws(self.site_draws, kernel.potential, kernel._model, self.arguments)

    @cached_property
    def finite_draws(self) -> np.ndarray | None:
        """Draws in float64, the few that are not finite replaced by the draw before.

        None if they were not kept, do not fit into memory or are weighted by a schedule.
        """
        is_large = self.num_draws * len(self.coordinate_names) > _MAX_DRAW_ENTRIES
        if is_large or not self.kernel.has_potential or self.kernel.has_schedule:
            return None
        try:
            draws = np.asarray(self.draws, np.float64)
        except (InvalidArgumentError, RuntimeError):  # some sites, or all draws, were not kept
            return None
        return _forward_fill_nonfinite(draws)

    @property
    def center_offsets(self) -> np.ndarray:
        """Center of each chain's preconditioner minus the first one's, shape ``(chains, 1, d)``.

        Chains in different modes have different centers; their draws minus these offsets lie about
        one place.
        """
        first = self.preconditioners[0].center
        return np.stack([p.center - first for p in self.preconditioners])[:, None]

    @property
    def max_ess(self) -> float:
        """Upper bound of the ESS: the chains' time over the relaxation time of a Gaussian."""
        time = self.num_iterations * self.num_steps * self.mean_step_size
        num_relaxation_times = time / float(self.kernel.dynamics.relaxation_time(self.step_size))
        return max(1.0, min(num_relaxation_times, self.num_draws))

    def make_constrain_fn(self) -> Callable[[Array], dict[str, Array]]:
        """Return a function that maps a flat position to a draw, deterministic sites included."""
        constrain = self.kernel.postprocess_fn(self.arguments.args, self.arguments.kwargs)
        unravel = self.kernel.potential.unravel
        return lambda position: constrain(unravel(position))


def _unconstrain_draws(
    samples: Any,
    potential: Potential,
    model: Callable | None,
    arguments: Arguments,
    conditioning_samples: dict[str, Array] | None = None,
) -> Array:
    """Return draws as flat unconstrained positions of a posterior, shape ``(chains, draws, d)``.

    :param samples: draws by site, axes of chains and draws first.
    :param conditioning_samples: draws of the sites that the posterior is conditioned on.
    """
    if potential.sites is None:
        z = samples
    else:
        check_sites_kept([s.name for s in potential.sites], samples)
        z = {s.name: samples[s.name] for s in potential.sites}
        if all(s.support is not None for s in potential.sites):
            z = {s.name: biject_to(s.support).inv(z[s.name]) for s in potential.sites}
        else:  # supports that depend on other sites
            gibbs_kwargs = {GIBBS_SITES_KWARG: conditioning_samples} if conditioning_samples else {}

            def unconstrain(values: dict[str, Any], kwargs: dict[str, Any]) -> Any:
                return unconstrain_fn(model, arguments.args, {**arguments.kwargs, **kwargs}, values)

            z = jax.vmap(jax.vmap(unconstrain))(z, gibbs_kwargs)
            z = {s.name: z[s.name] for s in potential.sites}
    leaves = [x.reshape(*x.shape[:2], -1) for x in jax.tree.leaves(z)]
    return jnp.concatenate(leaves, -1).astype(potential.dtype)


def check_sites_kept(names: Sequence[str], samples: Any) -> None:
    """Check that the draws of these sites were kept."""
    if missing := [name for name in names if name not in samples]:
        raise InvalidArgumentError(
            f"The draws of site '{missing[0]}' were not kept.",
            f"name it in `collect_sites`, or leave '~z.{missing[0]}' out of `extra_fields`.",
            "sites-not-kept",
        )


def _forward_fill_nonfinite(draws: np.ndarray) -> np.ndarray | None:
    """Replace draws that are not finite by the draw before; None if these are more than a few.

    In float32 a draw at the edge of its support may have no finite unconstrained value.
    """
    is_finite = np.isfinite(draws).all(-1)
    if is_finite.all():
        return draws
    if is_finite.mean() < _MIN_FINITE_FRACTION or not is_finite[:, 0].all():
        return None
    indices = np.where(is_finite, np.arange(draws.shape[1]), 0)
    indices = np.maximum.accumulate(indices, axis=1)
    return np.take_along_axis(draws, indices[..., None], axis=1)


def make_thinning_slice(draws: Array | np.ndarray, num_wanted: int) -> slice:
    """Return a slice of evenly spaced draws of each chain, ``num_wanted`` or more of all chains.

    :param draws: shape ``(chains, draws, d)``; all of them if there are fewer.
    """
    per_chain = -(-num_wanted // len(draws))
    return slice(None, None, max(1, draws.shape[1] // per_chain))


@dataclass(frozen=True, eq=False)
class GibbsRunData:
    """All that the bias report reads from a run of NumPyro's ``Gibbs``.

    :param potential: the posterior of all continuous sites given the discrete ones.
    :param draws: flat unconstrained positions, float64, shape ``(chains, draws, d)``.
    :param discrete_samples: draws of the discrete sites, axes of chains and draws first.
    :param weak_order: the lowest weak order of the blocks' integrators.
    :param step_size: the blocks' step size; NaN if they differ.
    :param num_draws: sampling iterations of all chains.
    :param num_divergences: diverging iterations, summed over blocks.
    :param block_warnings: model warnings of the blocks' warm-ups.
    """

    arguments: Arguments
    potential: Potential
    coordinate_names: tuple[tuple[str, str], ...]
    draws: np.ndarray
    discrete_samples: dict[str, Array]
    weak_order: int
    step_size: float
    num_draws: int
    num_divergences: int
    block_warnings: tuple[ModelWarning, ...]

    @classmethod
    def from_mcmc(cls, mcmc: MCMC) -> GibbsRunData:
        """Read a run; without a block of this package's kernels, or without draws, it raises."""
        assert isinstance(mcmc.sampler, Gibbs)
        block_indices = [
            k for k, (b, _) in enumerate(mcmc.sampler.blocks) if isinstance(b, SGMCMCKernel)
        ]
        if not block_indices:
            raise InvalidArgumentError(
                "`bias_report` got a run of Gibbs without a block of numpyro_sgmcmc.",
                "use a kernel of numpyro_sgmcmc for at least one block.",
                "not-a-run",
            )
        if mcmc.last_state is None:
            raise _no_draws_error("bias_report")
        kernels = [mcmc.sampler.blocks[k][0] for k in block_indices]
        states = [mcmc.last_state.block_states[k] for k in block_indices]
        kernel, arguments = kernels[0], Arguments(mcmc._args, mcmc._kwargs)
        assert kernel._model is not None
        discrete_sites = _find_discrete_sites(kernel, arguments)
        samples = mcmc.get_samples(group_by_chain=True)
        check_sites_kept(discrete_sites, samples)
        discrete_samples = {name: samples[name] for name in discrete_sites}
        first_values = {name: x[0, 0] for name, x in discrete_samples.items()}
        potential = build_conditional_potential(
            kernel._model, first_values, arguments, kernel.options
        )
        if not potential.dim:
            raise InvalidModelError(
                "All latent sites of the model are discrete, but `bias_report` needs a continuous "
                "site.",
                "judge discrete sites by R-hat and ESS (`mcmc.print_summary()`).",
                "no-latent-sites",
            )
        draws = _unconstrain_draws(samples, potential, kernel._model, arguments, discrete_samples)
        step_sizes = {float(np.max(state.adapt_state.step_size)) for state in states}
        adaptations = [k.adaptation for k in kernels if k.has_potential]
        return cls(
            arguments=arguments,
            potential=potential,
            coordinate_names=get_coordinate_names(potential),
            draws=np.asarray(draws, np.float64),
            discrete_samples=discrete_samples,
            weak_order=min(k.dynamics.integrators[k.integrator].order for k in kernels),
            step_size=step_sizes.pop() if len(step_sizes) == 1 else np.nan,
            num_draws=max(int(np.asarray(state.moments.num_iterations).sum()) for state in states),
            num_divergences=sum(map(_count_block_divergences, kernels, states)),
            block_warnings=tuple(dict.fromkeys(w for a in adaptations for w in a.model_warnings)),
        )


def _find_discrete_sites(kernel: SGMCMCKernel, arguments: Arguments) -> list[str]:
    """Return the names of the discrete latent sites; sites inside a subsampled plate raise."""
    assert kernel._model is not None
    trace = trace_model(
        kernel._model, arguments, kernel.options.init_strategy, kernel.options.gibbs_config
    )
    latent = [s for s in trace.sample_sites if not s.is_observed]
    if local := next((s.name for s in latent if s.plate_frames), None):
        raise InvalidArgumentError(
            f"`bias_report` of Gibbs does not support site '{local}' inside a subsampled plate.",
            "use one kernel for all sites, or compare with a run of half the step_size.",
            "bias-of-local-latents",
        )
    return [s.name for s in latent if s.support.is_discrete]


def _count_block_divergences(kernel: SGMCMCKernel, state: Any) -> int:
    """Return the iterations of a block that its running sums have left out, of all chains."""
    if kernel.has_schedule:
        return 0
    weight = np.asarray(state.moments.batches.weight, np.float64).sum(-1)
    # All iterations have the weight of the last, also of chains that shortened their steps.
    num_kept = weight / np.asarray(state.weight, np.float64)
    return int(np.sum(np.rint(state.moments.num_iterations - num_kept)))


class ConvergenceStats(NamedTuple):
    """R-hat and effective sample size of each coordinate.

    - **r_hat** - split R-hat, shape ``(d,)``; NaN for few draws.
    - **ess** - effective sample size, shape ``(d,)``: at most the number of draws if these are
      few; NaN if the draws are weighted by a schedule.
    """

    r_hat: np.ndarray
    ess: np.ndarray

    @classmethod
    def from_draws(cls, draws: np.ndarray) -> ConvergenceStats:
        """Compute both by NumPyro's diagnostics, of draws of shape ``(chains, draws, d)``."""
        num_chains, num_draws, dim = draws.shape
        if num_draws < _MIN_DRAWS_FOR_ESS:
            return cls(np.full(dim, np.nan), np.full(dim, float(num_chains * num_draws)))
        chunk_size = max(1, _MAX_CHUNK_ENTRIES // (num_chains * num_draws))
        chunks = np.split(draws, range(chunk_size, dim, chunk_size), axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            r_hat = np.concatenate([split_gelman_rubin(x) for x in chunks])
            ess = np.concatenate([effective_sample_size(x) for x in chunks])
        # For chains that are stuck apart NumPyro's estimate can round to a negative number.
        ess = np.where(ess < 1.0, 1.0, ess)
        return cls(r_hat if num_draws >= _MIN_DRAWS_FOR_R_HAT else np.full(dim, np.nan), ess)


def ess_per_gradient(mcmc: MCMC) -> dict[str, np.ndarray]:
    """Return the effective sample size per minibatch gradient, not counting the warm-up.

    Unlike the ESS per second, it does not depend on the machine. Unlike the ESS per iteration, it
    accounts for the number of steps per iteration. All gradients of a step count, except the second
    gradient of a control variate, at the reference.

    :param mcmc: a run of one of this package's kernels.
    :return: a dict from the latent sites to arrays of their shapes.
    :raises ValueError: for a run of another kernel, or before a run.
    """
    run = RunData.from_mcmc(mcmc, "ess_per_gradient")
    check_has_data(run.kernel, "ess_per_gradient")
    potential, samples = run.kernel.potential, run.site_draws
    gradients_per_step = run.kernel.dynamics.make_step(run.kernel.integrator).num_gradients
    num_gradients = mcmc.num_chains * mcmc.num_samples * run.num_steps * gradients_per_step
    if potential.sites is None:
        samples = samples if isinstance(samples, dict) else {"z": samples}
    else:
        samples = {s.name: samples[s.name] for s in potential.sites if s.name in samples}
    return {
        name: np.asarray(jax.tree.map(lambda x: effective_sample_size(np.asarray(x)), draws))
        / num_gradients
        for name, draws in samples.items()
    }
