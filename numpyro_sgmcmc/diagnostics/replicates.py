"""Data as the posterior would have them, by chunks of rows, whatever the number of rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro.distributions import Unit
from numpyro.handlers import uncondition
from numpyro.infer import MCMC

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.diagnostics.at_rows import (
    evaluate_plate_sites,
    get_subsampled_plate,
    validate_row_indices,
)
from numpyro_sgmcmc.diagnostics.runs import check_finished_run

__all__ = ["posterior_predictive"]


def posterior_predictive(
    mcmc: MCMC, rng_key: Array, rows: Any = None, num_draws: int | None = None
) -> dict[str, np.ndarray]:
    """Draws of the observed sites at the run's own rows: replicated data, for predictive checks.

    What ``numpyro.infer.Predictive(kernel.model, ...)`` gives where the data are ``None``, for data
    that are not loaded whole, on the host as well, and for models in which the observed values
    cannot be left out: only a chunk of rows and the result are in memory. Deterministic sites
    inside the plate come along. Other rows than the run's: ``Predictive``.

    :param mcmc: a run of one of this package's kernels, on a model with one subsampled plate.
    :param rng_key: random key.
    :param rows: which rows, integers of shape ``(n,)``. Default None: all.
    :param num_draws: of each chain, evenly spaced, at least 1. Default None: all.
    :return: by observed or deterministic site inside the plate, an array ``(chains, draws, ...)``
        whose axis for the plate has the rows in their order.
    :raises ValueError: for a run of another kernel or before a run, a model without a subsampled
        plate or with several, rows that are not there, or draws that were not kept.
    """
    kernel = check_finished_run(mcmc, "posterior_predictive", uses_moments=False)
    checks.check_rng_key(rng_key)
    plate = get_subsampled_plate(kernel, "posterior_predictive")
    rows = validate_row_indices(np.arange(plate.size) if rows is None else rows, plate)
    samples = mcmc.get_samples(group_by_chain=True)
    if num_draws is not None:
        checks.check_positive_int("num_draws", num_draws)
        all_draws = jax.tree.leaves(samples)[0].shape[1]
        places = np.linspace(0, all_draws - 1, min(num_draws, all_draws)).astype(int)
        samples = {name: x[:, places] for name, x in samples.items()}
    return evaluate_plate_sites(
        mcmc, samples, rows, "predictive", _read_replicated_value, uncondition, rng_key
    )[0]


def _read_replicated_value(site: dict[str, Any]) -> Array | None:
    if site["type"] == "deterministic":
        return site["value"]
    is_data = site["type"] == "sample" and site["infer"].get("was_observed")
    return site["value"] if is_data and not isinstance(site["fn"], Unit) else None  # no factor
