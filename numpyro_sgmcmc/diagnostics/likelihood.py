"""Pointwise log likelihoods by chunks of rows, whatever the number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array
from numpyro.infer import MCMC

from numpyro_sgmcmc.diagnostics.at_rows import (
    evaluate_plate_sites,
    get_subsampled_plate,
    validate_row_indices,
)
from numpyro_sgmcmc.diagnostics.runs import check_finished_run

__all__ = ["evaluate_log_likelihood", "log_likelihood"]


def log_likelihood(mcmc: MCMC, rows: Any = None) -> dict[str, np.ndarray]:
    """Log likelihoods of the draws at each row, by chunks of rows.

    What ``numpyro.infer.log_likelihood(kernel.model, ...)`` gives, for data that are not loaded
    whole: only a chunk of rows and the result are in memory. The result has a number for every
    draw and row; for many rows ask for some of them, such as a random subset for an estimate of
    the predictive density.

    :param mcmc: a run of one of this package's kernels, on a model with one subsampled plate.
    :param rows: which rows, integers of shape ``(n,)``. Default None: all.
    :return: by observed site inside the plate, an array ``(chains, draws, ...)`` whose axis for
        the plate has the rows in their order.
    :raises ValueError: for a run of another kernel or before a run, a model without a subsampled
        plate or with several, rows that are not there, or draws that were not kept.
    """
    kernel = check_finished_run(mcmc, "log_likelihood", uses_moments=False)
    plate = get_subsampled_plate(kernel, "log_likelihood")
    rows = validate_row_indices(np.arange(plate.size) if rows is None else rows, plate)
    return evaluate_log_likelihood(mcmc, mcmc.get_samples(group_by_chain=True), rows)[0]


def evaluate_log_likelihood(
    mcmc: MCMC, samples: dict[str, Any], indices: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Those of such draws at such rows, and the rows' axes (:func:`at_rows`)."""
    return evaluate_plate_sites(mcmc, samples, indices, "log likelihood", _read_log_likelihood)


def _read_log_likelihood(site: dict[str, Any]) -> Array | None:
    is_data = site["type"] == "sample" and site["is_observed"]
    return site["fn"].log_prob(site["value"]) if is_data else None
