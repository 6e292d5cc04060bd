"""Pointwise log likelihoods by chunks of rows, whatever the number of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host import plain_failures
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.progress import passes_shown
from numpyro_sgmcmc.diagnostics.runs import finished_run
from numpyro_sgmcmc.posterior.handlers import FullDataModel
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["by_chunks", "checked_rows", "log_likelihood", "the_plate"]

_CHUNK_ELEMENTS = 2**22
_LONGEST_CHUNK = 8192


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
    kernel = finished_run(mcmc, "log_likelihood", tells_bias=False)
    plate = the_plate(kernel, "log_likelihood")
    rows = checked_rows(np.arange(plate.size) if rows is None else rows, plate)
    return by_chunks(mcmc, kernel, mcmc.get_samples(group_by_chain=True), rows)[0]


def the_plate(kernel: SGMCMCKernel, wanted_by: str) -> Plate:
    """The one subsampled plate.

    :param wanted_by: name of the function that needs it, for the message.
    :raises ValueError: for a model with none, or several.
    """
    plates = kernel.target.plates
    if kernel.target.locals is not None:
        raise Refusal(
            f"`{wanted_by}` has no log likelihood of rows with latent sites of their own: "
            "az.from_numpyro(mcmc, log_likelihood=True) has, for draws with collect_locals=True."
        )
    if len(plates) != 1 or kernel.model is None:
        names = ", ".join(f"'{p.name}'" for p in plates) or "none"
        raise Refusal(
            f"`{wanted_by}` goes by the rows of one subsampled plate, but the model has {names}."
        )
    return plates[0]


def checked_rows(rows: Any, plate: Plate) -> np.ndarray:
    """Numbers of a plate's rows, as an array.

    :raises ValueError: for what is none.
    """
    rows = np.asarray(rows)
    if rows.ndim != 1 or rows.size == 0 or rows.dtype.kind not in "iu":
        raise Refusal("`rows` must be integers of shape (n,), at least one.")
    if not 0 <= rows.min() <= rows.max() < plate.size:
        raise Refusal(f"`rows` must lie between 0 and {plate.size - 1}.")
    return rows


def by_chunks(
    mcmc: MCMC, kernel: SGMCMCKernel, samples: dict[str, Any], rows: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Log likelihoods of draws at rows of the one plate, and the rows' axes.

    :param samples: by site, ``(chains, draws, ...)``.
    :param rows: integers of shape ``(n,)``.
    :return: by observed site, ``(chains, draws, ...)``, and the axis, from the right, of the rows.
    :raises ValueError: for draws that were not kept.
    """
    target, model, plate = kernel.target, kernel.model, kernel.target.plates[0]
    assert isinstance(model, FullDataModel)
    missing = [s.name for s in target.sites or () if s.name not in samples]
    if missing:
        raise Refusal(
            f"The draws of site '{missing[0]}' were not kept: run without '~z.{missing[0]}'."
        )
    chains, draws = jax.tree.leaves(samples)[0].shape[:2]
    axes: dict[str, int] = {}

    def of_draw(sites: Any, indices: Array, arguments: Arguments) -> dict[str, Array]:
        run = substitute(seed(model.on_rows({plate.name: indices}), random.key(0)), data=sites)
        found = {}
        for name, site in trace(run).get_trace(*arguments.args, **arguments.kwargs).items():
            frames = [f for f in site.get("cond_indep_stack", ()) if f.name == plate.name]
            if site["type"] == "sample" and site["is_observed"] and frames:
                axes[name] = frames[0].dim
                found[name] = site["fn"].log_prob(site["value"])
        return found

    of_all = jax.jit(jax.vmap(of_draw, in_axes=(0, None, None)))
    flat = jax.tree.map(lambda x: x.reshape(chains * draws, *x.shape[2:]), samples)
    arguments = Arguments(mcmc._args, mcmc._kwargs)
    hosts, arguments = arguments.hosts, arguments.map_arrays(jnp.asarray)
    chunk = max(1, min(len(rows), _LONGEST_CHUNK, _CHUNK_ELEMENTS // (chains * draws)))
    result: dict[str, np.ndarray] = {}
    passes = len(rows) / plate.size
    with plain_failures(hosts), passes_shown("log likelihood", hosts, passes):
        for start in range(0, len(rows), chunk):
            first = min(start, len(rows) - chunk)  # the last chunk is as long: one compilation
            part = of_all(flat, jnp.asarray(rows[first : first + chunk], jnp.int32), arguments)
            for name, values in part.items():
                shape = list(values.shape)
                shape[axes[name]] = len(rows)
                whole = result.setdefault(name, np.empty(shape, values.dtype))
                there = np.moveaxis(whole, axes[name], 0)
                there[first : first + chunk] = np.moveaxis(np.asarray(values), axes[name], 0)
    return {k: x.reshape(chains, draws, *x.shape[1:]) for k, x in result.items()}, axes
