"""What the model says of a run's rows, for each draw, by chunks of rows.

Only a chunk of rows and the result are in memory, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host import unwrap_callback_errors
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.progress import show_data_passes
from numpyro_sgmcmc.posterior.handlers import FullDataModel
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["evaluate_plate_sites", "get_subsampled_plate", "validate_row_indices"]

_MAX_DRAW_ROW_PAIRS_PER_CHUNK = 2**22
_MAX_ROWS_PER_CHUNK = 8192


def get_subsampled_plate(kernel: SGMCMCKernel, caller: str) -> Plate:
    """The one subsampled plate.

    :param caller: name of the function that needs it, for the message.
    :raises ValueError: for a model with none, or several.
    """
    plates = kernel.potential.plates
    if kernel.potential.local_latents is not None:
        raise InvalidArgumentError(
            f"`{caller}` goes by rows, but here each has latent values of its own: "
            "az.from_numpyro(mcmc, log_likelihood=True) and numpyro.infer.Predictive take draws "
            "with collect_local_sites=True."
        )
    if len(plates) != 1 or kernel.model is None:
        names = ", ".join(f"'{p.name}'" for p in plates) or "none"
        raise InvalidArgumentError(
            f"`{caller}` goes by the rows of one subsampled plate, but the model has {names}."
        )
    return plates[0]


def validate_row_indices(indices: Any, plate: Plate) -> np.ndarray:
    """Numbers of a plate's rows, as an array.

    :raises ValueError: for what is none.
    """
    indices = np.asarray(indices)
    if indices.ndim != 1 or indices.size == 0 or indices.dtype.kind not in "iu":
        raise InvalidArgumentError("`rows` must be integers of shape (n,), at least one.")
    if not 0 <= indices.min() <= indices.max() < plate.size:
        raise InvalidArgumentError(f"`rows` must lie between 0 and {plate.size - 1}.")
    return indices


def evaluate_plate_sites(
    mcmc: MCMC,
    samples: dict[str, Any],
    row_indices: np.ndarray,
    progress_label: str,
    read_site: Callable[[dict[str, Any]], Array | None],
    handler: Callable[[Callable], Callable] = lambda model: model,
    rng_key: Array | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """A number or more of each draw and row of the one plate, and the rows' axes.

    :param samples: by site, ``(chains, draws, ...)``.
    :param row_indices: integers of shape ``(n,)``.
    :param progress_label: it is, for the progress bar.
    :param read_site: gives it of a site inside the plate, as it stands in a trace, or None.
    :param handler: put around the seeded model.
    :param rng_key: of what the model draws; each draw and chunk has one of its own.
    :return: by site, ``(chains, draws, ...)``, and the axis, from the right, of the rows.
    :raises ValueError: for draws that were not kept.
    """
    kernel: SGMCMCKernel = mcmc.sampler
    target, model, plate = kernel.potential, kernel.model, kernel.potential.plates[0]
    assert isinstance(model, FullDataModel)
    missing = [s.name for s in target.sites or () if s.name not in samples]
    if missing:
        raise InvalidArgumentError(
            f"The draws of site '{missing[0]}' were not kept: run without '~z.{missing[0]}'."
        )
    chains, draws = jax.tree.leaves(samples)[0].shape[:2]
    axes: dict[str, int] = {}

    def of_draw(sites: Any, key: Array, indices: Array, arguments: Arguments) -> dict[str, Array]:
        run = substitute(
            handler(seed(model.with_subsample_indices({plate.name: indices}), key)), data=sites
        )
        found = {}
        for name, site in trace(run).get_trace(*arguments.args, **arguments.kwargs).items():
            frames = [f for f in site.get("cond_indep_stack", ()) if f.name == plate.name]
            value = read_site(site) if frames else None
            if value is not None:
                axes[name] = frames[0].dim
                found[name] = value
        return found

    of_all = jax.jit(jax.vmap(of_draw, in_axes=(0, 0, None, None)))
    flat = jax.tree.map(lambda x: x.reshape(chains * draws, *x.shape[2:]), samples)
    arguments = Arguments(mcmc._args, mcmc._kwargs)
    hosts, arguments = arguments.host_arrays, arguments.map_arrays(jnp.asarray)
    chunk = max(
        1,
        min(
            len(row_indices), _MAX_ROWS_PER_CHUNK, _MAX_DRAW_ROW_PAIRS_PER_CHUNK // (chains * draws)
        ),
    )
    rng_key = random.key(0) if rng_key is None else rng_key
    result: dict[str, np.ndarray] = {}
    with (
        unwrap_callback_errors(hosts),
        show_data_passes(progress_label, hosts, len(row_indices) / plate.size),
    ):
        for start in range(0, len(row_indices), chunk):
            first = min(
                start, len(row_indices) - chunk
            )  # the last chunk is as long: one compilation
            some = jnp.asarray(row_indices[first : first + chunk], jnp.int32)
            keys = random.split(random.fold_in(rng_key, start), chains * draws)
            for name, values in of_all(flat, keys, some, arguments).items():
                shape = list(values.shape)
                shape[axes[name]] = len(row_indices)
                whole = result.setdefault(name, np.empty(shape, values.dtype))
                there = np.moveaxis(whole, axes[name], 0)
                there[first : first + chunk] = np.moveaxis(np.asarray(values), axes[name], 0)
    return {k: x.reshape(chains, draws, *x.shape[1:]) for k, x in result.items()}, axes
