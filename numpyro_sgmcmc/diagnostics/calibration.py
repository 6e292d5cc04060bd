"""Draws rescaled by the bias that was measured: an approximation, and labelled as one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.diagnostics.bias import bias_report
from numpyro_sgmcmc.diagnostics.coordinates import compute_center_offsets, get_chain_preconditioners
from numpyro_sgmcmc.diagnostics.report import BiasReport
from numpyro_sgmcmc.diagnostics.runs import (
    check_finished_run,
    check_has_data,
    get_coordinate_names,
    get_unconstrained_draws,
)

__all__ = ["bias_corrected_samples"]


def bias_corrected_samples(
    mcmc: MCMC, report: BiasReport | None = None, *, group_by_chain: bool = False
) -> dict[str, Any]:
    """The run's draws about their own mean, with the posterior's measured spread in place of the
    chain's.

    In unconstrained space; a linear map of all coordinates up to 64 of them, one scale each
    beyond. Means stay as they are. The map is right for posteriors that are about Gaussian in
    unconstrained space and chains that are too wide or too narrow by moderate factors; it is no
    substitute for a smaller step size. Deterministic sites are computed anew.

    :param mcmc: a run of one of this package's kernels.
    :param report: of :func:`~numpyro_sgmcmc.bias_report`; default: made here.
    :param group_by_chain: whether to keep the chains apart, as in ``mcmc.get_samples``.
    :return: samples by site, shape ``(chains * draws, ...)`` or ``(chains, draws, ...)``.
    :raises ValueError: for a run of another kernel, before a run, or where the error bars of the
        spread are too wide to correct it.
    """
    kernel = check_finished_run(mcmc, "calibrated_samples")
    check_has_data(kernel, "calibrated_samples")
    if report is None:
        report = bias_report(mcmc)
    if not isinstance(report, BiasReport):
        raise InvalidArgumentError(
            f"`report` is a {type(report).__name__}, but must be a bias report."
        )
    if report.is_for_functions:
        raise InvalidArgumentError("`report` is on functions of the draws: pass bias_report(mcmc).")
    if report.names != get_coordinate_names(mcmc):
        raise InvalidArgumentError(
            "`report` is that of another run: its coordinates are not this run's."
        )
    found = _compute_correction_matrix(
        report.stein_estimates.chain_covariance, report.stein_estimates.posterior_covariance
    )
    if not np.isfinite(found).all():
        raise InvalidArgumentError(
            "The posterior's spread is measured too roughly to correct the draws: take more draws, "
            "or pass bias_report(mcmc, full_data=True)."
        )
    if compute_center_offsets(get_chain_preconditioners(mcmc.last_state)).any():
        raise InvalidArgumentError(
            "Chains run in different modes, and the draws of each would have to be corrected by "
            "themselves: run without `init_in_modes`."
        )
    positions = get_unconstrained_draws(mcmc, kernel)
    coordinates = kernel.get_preconditioner(mcmc.last_state)
    centre = positions.mean((0, 1))
    scale = jnp.asarray(found, positions.dtype)

    def rescaled(position: jax.Array) -> jax.Array:
        q = coordinates.solve(position - centre)
        q = scale @ q if scale.ndim == 2 else scale * q
        return centre + coordinates.apply(q)

    constrain = kernel.postprocess_fn(mcmc._args, mcmc._kwargs)
    unravel = kernel.potential.unravel
    samples = jax.vmap(jax.vmap(lambda x: constrain(unravel(rescaled(x)))))(positions)
    if group_by_chain:
        return samples
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)


def _compute_correction_matrix(
    chain_covariance: np.ndarray, posterior_covariance: np.ndarray
) -> np.ndarray:
    """A with ``A chain A^T`` the posterior's covariance, symmetric where they commute."""
    if chain_covariance.ndim == 1:
        with np.errstate(invalid="ignore"):
            return np.sqrt(posterior_covariance / chain_covariance)
    if not np.isfinite(posterior_covariance).all():
        return posterior_covariance
    root = _compute_matrix_power(chain_covariance, 0.5)
    inverse = _compute_matrix_power(chain_covariance, -0.5)
    return inverse @ _compute_matrix_power(root @ posterior_covariance @ root, 0.5) @ inverse


def _compute_matrix_power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    """A power of a symmetric matrix; NaN where it is not positive definite."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2.0)
    if not (values > 0).all():
        return np.full_like(matrix, np.nan)
    return (vectors * values**exponent) @ vectors.T
