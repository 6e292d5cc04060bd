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

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host import plain_failures
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.progress import passes_shown
from numpyro_sgmcmc.posterior.handlers import FullDataModel
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["at_rows", "checked_rows", "the_plate"]

_CHUNK_ELEMENTS = 2**22
_LONGEST_CHUNK = 8192


def the_plate(kernel: SGMCMCKernel, wanted_by: str) -> Plate:
    """The one subsampled plate.

    :param wanted_by: name of the function that needs it, for the message.
    :raises ValueError: for a model with none, or several.
    """
    plates = kernel.target.plates
    if kernel.target.locals is not None:
        raise Refusal(
            f"`{wanted_by}` goes by rows, but here each has latent values of its own: "
            "az.from_numpyro(mcmc, log_likelihood=True) and numpyro.infer.Predictive take draws "
            "with collect_locals=True."
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


def at_rows(
    mcmc: MCMC,
    samples: dict[str, Any],
    rows: np.ndarray,
    what: str,
    read: Callable[[dict[str, Any]], Array | None],
    handler: Callable[[Callable], Callable] = lambda model: model,
    rng_key: Array | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """A number or more of each draw and row of the one plate, and the rows' axes.

    :param samples: by site, ``(chains, draws, ...)``.
    :param rows: integers of shape ``(n,)``.
    :param what: it is, for the progress bar.
    :param read: gives it of a site inside the plate, as it stands in a trace, or None.
    :param handler: put around the seeded model.
    :param rng_key: of what the model draws; each draw and chunk has one of its own.
    :return: by site, ``(chains, draws, ...)``, and the axis, from the right, of the rows.
    :raises ValueError: for draws that were not kept.
    """
    kernel: SGMCMCKernel = mcmc.sampler
    target, model, plate = kernel.target, kernel.model, kernel.target.plates[0]
    assert isinstance(model, FullDataModel)
    missing = [s.name for s in target.sites or () if s.name not in samples]
    if missing:
        raise Refusal(
            f"The draws of site '{missing[0]}' were not kept: run without '~z.{missing[0]}'."
        )
    chains, draws = jax.tree.leaves(samples)[0].shape[:2]
    axes: dict[str, int] = {}

    def of_draw(sites: Any, key: Array, indices: Array, arguments: Arguments) -> dict[str, Array]:
        run = substitute(handler(seed(model.on_rows({plate.name: indices}), key)), data=sites)
        found = {}
        for name, site in trace(run).get_trace(*arguments.args, **arguments.kwargs).items():
            frames = [f for f in site.get("cond_indep_stack", ()) if f.name == plate.name]
            value = read(site) if frames else None
            if value is not None:
                axes[name] = frames[0].dim
                found[name] = value
        return found

    of_all = jax.jit(jax.vmap(of_draw, in_axes=(0, 0, None, None)))
    flat = jax.tree.map(lambda x: x.reshape(chains * draws, *x.shape[2:]), samples)
    arguments = Arguments(mcmc._args, mcmc._kwargs)
    hosts, arguments = arguments.hosts, arguments.map_arrays(jnp.asarray)
    chunk = max(1, min(len(rows), _LONGEST_CHUNK, _CHUNK_ELEMENTS // (chains * draws)))
    rng_key = random.key(0) if rng_key is None else rng_key
    result: dict[str, np.ndarray] = {}
    with plain_failures(hosts), passes_shown(what, hosts, len(rows) / plate.size):
        for start in range(0, len(rows), chunk):
            first = min(start, len(rows) - chunk)  # the last chunk is as long: one compilation
            some = jnp.asarray(rows[first : first + chunk], jnp.int32)
            keys = random.split(random.fold_in(rng_key, start), chains * draws)
            for name, values in of_all(flat, keys, some, arguments).items():
                shape = list(values.shape)
                shape[axes[name]] = len(rows)
                whole = result.setdefault(name, np.empty(shape, values.dtype))
                there = np.moveaxis(whole, axes[name], 0)
                there[first : first + chunk] = np.moveaxis(np.asarray(values), axes[name], 0)
    return {k: x.reshape(chains, draws, *x.shape[1:]) for k, x in result.items()}, axes
