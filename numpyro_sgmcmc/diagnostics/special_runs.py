r"""Runs that are diagnosed by gradients at their draws alone, and the comparison with a finer run.

**Local latent variables.** The running sums of such a run are those of the globals given the local
values, whose bias is not that of the globals' marginal. :func:`measure_bias_of_globals` takes
gradients of the marginal posterior of the globals at draws, by Fisher's identity.

**Gibbs.** A block's running sums are of little use. Given the other blocks it may be exact where
its marginal is not, since the errors of the others propagate; and the error that it makes itself is
smaller in its marginal, the more it depends on the others. With :math:`\rho` the correlation of two
coordinates in separate blocks and a first block that inflates its conditional variance by
:math:`1 + \epsilon`, the marginal variances are inflated by

.. math::

    1 + \frac{\epsilon}{1 + \rho^2} \quad\text{and}\quad 1 + \frac{\rho^2\epsilon}{1 + \rho^2},

whereas the blocks' running sums show :math:`1 + \epsilon` and 1. :func:`measure_bias_of_gibbs`
takes gradients of the joint posterior at draws, in the coordinates of all blocks, given the
discrete sites.

**A finer run.** :func:`compare_with_finer` runs on with half the step size or twice the batch size
and compares draws with draws. It costs another run, and assumes less than the bias report.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.data.arguments import DeviceArrayCache
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.data.subsampling import init_stream
from numpyro_sgmcmc.diagnostics.diagnosis import (
    MAX_OK_R_HAT,
    MEAN_BIAS_TOLERANCE,
    SD_INFLATION_TOLERANCE,
    format_r_hat,
)
from numpyro_sgmcmc.diagnostics.run_data import (
    GibbsRunData,
    RunData,
    check_finished_run,
    check_has_data,
    check_sites_kept,
    make_thinning_slice,
)
from numpyro_sgmcmc.diagnostics.stein_estimates import (
    BiasMeasurements,
    Estimate,
    estimate_bias_from_draws,
    measure_convergence,
)
from numpyro_sgmcmc.errors import InvalidArgumentError, ModelWarning, ModelWarningKind
from numpyro_sgmcmc.model.local_moves import NUM_LOCAL_UPDATES, estimate_marginal_gradients
from numpyro_sgmcmc.progress import show_data_passes
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel, full_gradients

_MARGINAL_GRADIENT_SEED = 0

# Share of the finer run that is discarded, in which it moves from the coarser stationary law.
_FINER_RUN_BURN_IN_FRACTION = 0.1
# Standard errors beyond the tolerance at which a difference counts as visible.
_VISIBLE_Z = 3.0


def measure_bias_of_globals(run: RunData, num_draws: int) -> BiasMeasurements:
    """Measure the bias of the globals by gradients of their marginal posterior at draws.

    The local values start from the run's last ones and follow the draws back in time.

    :param num_draws: number of evenly spaced draws, of all chains.
    """
    potential = run.kernel.potential
    draws = np.asarray(run.draws, np.float64)
    thinning = make_thinning_slice(draws, num_draws)
    positions = jnp.asarray(draws[:, thinning][:, ::-1], potential.dtype)
    keys = random.split(random.key(_MARGINAL_GRADIENT_SEED), len(positions))
    cached_arguments = DeviceArrayCache().cache_arrays(run.arguments)
    host_arrays = run.arguments.host_arrays
    num_passes = positions.shape[0] * positions.shape[1] * NUM_LOCAL_UPDATES
    progress = show_data_passes("gradients on all rows", host_arrays, num_passes)
    gradients = []
    with unwrap_callback_errors(host_arrays), progress:
        for c, key in enumerate(keys):
            values = jax.tree.map(lambda x, c=c: x[c], run.local_state)
            inputs = potential, positions[c], values, cached_arguments, key
            gradients.append(np.asarray(estimate_marginal_gradients(*inputs)))
    return estimate_bias_from_draws(draws, thinning, np.stack(gradients)[:, ::-1])


def measure_bias_of_gibbs(run: GibbsRunData, num_draws: int) -> BiasMeasurements:
    """Measure the bias of all continuous sites by gradients on all rows at ``num_draws`` draws."""
    thinning = make_thinning_slice(run.draws, num_draws)

    def select(x: Any) -> Any:
        """Return the thinned draws, one chain after the other."""
        return x[:, thinning].reshape(-1, *x.shape[2:])

    gradients = full_gradients(
        run.potential,
        DeviceArrayCache(),
        jnp.asarray(select(run.draws), run.potential.dtype),
        run.arguments,
        jax.tree.map(select, run.discrete_samples),
    )
    return estimate_bias_from_draws(run.draws, thinning, np.asarray(gradients))


def find_unconverged_discrete_sites(discrete_samples: dict[str, Any]) -> list[ModelWarning]:
    """Return a warning for each discrete site on which chains disagree.

    Given a discrete site that is stuck, the other sites look right.
    """
    model_warnings = []
    for name, x in discrete_samples.items():
        values = np.asarray(x, np.float64).reshape(*x.shape[:2], -1)
        r_hat = float(np.fmax.reduce(measure_convergence(values).r_hat))
        if r_hat > MAX_OK_R_HAT:
            message = (
                f"The chains disagree on the discrete site `{name}` (R-hat up to "
                f"{format_r_hat(r_hat)}), given which the other sites are diagnosed. Fix: a longer "
                "run."
            )
            model_warnings.append(ModelWarning((), ModelWarningKind.NOT_CONVERGED, message))
    return model_warnings


class Refinement(NamedTuple):
    """Comparison of a run with a finer one, by coordinate in unconstrained space.

    - **names** - names of the coordinates.
    - **mean_difference** - mean of the run minus that of the finer run, in the finer run's SDs.
    - **sd_inflation** - SD of the run divided by that of the finer run, minus one.
    - **finer_run** - the finer run.
    """

    names: list[str]
    mean_difference: Estimate
    sd_inflation: Estimate
    finer_run: MCMC

    @property
    def is_visible(self) -> bool:
        """True if a mean differs by 0.1 SD or an SD by 5%, plus three standard errors."""
        mean, sd = self.mean_difference, self.sd_inflation
        has_mean_bias = np.abs(mean.value) > MEAN_BIAS_TOLERANCE + _VISIBLE_Z * mean.error
        has_sd_bias = np.abs(sd.value) > SD_INFLATION_TOLERANCE + _VISIBLE_Z * sd.error
        return bool((has_mean_bias | has_sd_bias).any())


def compare_with_finer(mcmc: MCMC, rng_key: Array, change: str = "step") -> Refinement:
    """Run on from the last state with half the step size or twice the batch size, and compare.

    With half the step size, the remaining error of the finer run is as large as the difference if
    the weak order is one, and a third of the difference if the weak order is two.

    :param mcmc: a run of one of this package's kernels.
    :param rng_key: random key of the finer run.
    :param change: ``"step"`` (default) for half the step size and twice the steps; ``"batch"`` for
        twice the subsample size of each subsampled plate, at the same step size.
    :return: the comparison, without the first tenth of the finer run.
    :raises ValueError: for a run of another kernel, before a run, if the step size to halve is a
        schedule, or if no minibatch can be larger.
    """
    kernel = check_finished_run(mcmc, "compare_with_finer")
    errors.check_choice("change", change, ("step", "batch"))
    errors.check_rng_key(rng_key)
    check_has_data(kernel, "compare_with_finer")
    stream_key, rng_key = random.split(rng_key)
    if change == "step":
        finer_kernel, state = _halve_step_size(kernel, mcmc.last_state)
    else:
        finer_kernel, state = _double_batch_size(kernel, mcmc.last_state, stream_key)
    finer_run = MCMC(
        finer_kernel,
        num_warmup=mcmc.num_warmup,
        num_samples=mcmc.num_samples,
        num_chains=mcmc.num_chains,
        thinning=mcmc.thinning,
        chain_method=mcmc.chain_method,
        progress_bar=mcmc.progress_bar,
    )
    finer_run.post_warmup_state = state._replace(
        moments=jax.tree.map(jnp.zeros_like, state.moments), site_moments=None
    )
    run = RunData.from_mcmc(mcmc, "compare_with_finer")
    check_sites_kept([s.name for s in run.kernel.potential.sites or ()], run.site_draws)
    finer_run.run(rng_key, *mcmc._args, **mcmc._kwargs)
    finer_draws = RunData.from_mcmc(finer_run, "compare_with_finer").draws
    finer_draws = finer_draws[:, int(_FINER_RUN_BURN_IN_FRACTION * finer_draws.shape[1]) :]
    (mean, sd, ess, sd_ess), (finer_mean, finer_sd, finer_ess, finer_sd_ess) = (
        _compute_moments_and_ess(np.asarray(x, np.float64)) for x in (run.draws, finer_draws)
    )
    ratio = sd / finer_sd
    mean_error = np.sqrt(np.square(ratio) / ess + 1.0 / finer_ess)
    return Refinement(
        [name for _, name in run.coordinate_names],
        Estimate((mean - finer_mean) / finer_sd, mean_error),
        Estimate(ratio - 1.0, ratio * np.sqrt(0.5 / sd_ess + 0.5 / finer_sd_ess)),
        finer_run,
    )


def _compute_moments_and_ess(draws: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return mean and SD of each coordinate, and the ESS of the mean and of the variance."""
    mean, sd = draws.mean((0, 1)), draws.std((0, 1))
    ess, sd_ess = map(effective_sample_size, (draws, np.square(draws - mean)))
    return mean, sd, np.atleast_1d(ess), np.atleast_1d(sd_ess)


def _halve_step_size(kernel: SGMCMCKernel, state: Any) -> tuple[SGMCMCKernel, Any]:
    """Return kernel and state with half the step size and twice the steps."""
    if callable(kernel.options.step_size):
        raise InvalidArgumentError(
            "`compare_with_finer` cannot halve the schedule `step_size`.",
            "run with a constant step_size, or use change='batch'.",
            "no-finer-run",
        )
    adaptation = kernel.adaptation
    finer_kernel = kernel.copy_with(
        adaptation=adaptation._replace(
            step_size=adaptation.step_size / 2, num_steps=2 * adaptation.num_steps
        )
    )
    adapt_state = state.adapt_state._replace(step_size=state.adapt_state.step_size / 2)
    return finer_kernel, state._replace(adapt_state=adapt_state, num_steps=2 * state.num_steps)


def _double_batch_size(
    kernel: SGMCMCKernel, state: Any, rng_key: Array
) -> tuple[SGMCMCKernel, Any]:
    """Return kernel and state with twice the subsample size of each plate."""
    plates = kernel.potential.plates
    doubled = {p.name: min(p.max_subsample_size, 2 * p.subsample_size) for p in plates}
    potential = kernel.potential.with_batch_sizes(doubled)
    if potential.plates == plates:
        raise InvalidArgumentError(
            "`compare_with_finer` cannot double subsample_size: minibatches have all rows already.",
            "use change='step'.",
            "no-finer-run",
        )
    finer_kernel = kernel.copy_with(potential=potential)
    streams = {}
    for plate, key in zip(potential.plates, random.split(rng_key, len(plates)), strict=True):
        init = partial(init_stream, plate)
        if state.i.ndim:
            streams[plate.name] = jax.vmap(init)(random.split(key, len(state.i)))
        else:
            streams[plate.name] = init(key)
    return finer_kernel, state._replace(streams=streams)
