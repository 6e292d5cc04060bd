"""Whether each row's local values can be moved by themselves, and where they begin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.facts import ModelTrace, SampleSite
from numpyro_sgmcmc.posterior.locals.moves import (
    map_over_row_chunks,
    pointwise_local_potentials,
    update_local_values,
)
from numpyro_sgmcmc.posterior.locals.sites import (
    BatchLocalValues,
    LocalValues,
    select_collected_sites,
    with_local_values,
)

if TYPE_CHECKING:
    from numpyro_sgmcmc.posterior.target import Potential

__all__ = [
    "check_conditional_independence",
    "check_local_latents_options",
    "check_local_sites",
    "init_local_values",
]

_NUM_CHECKED_ROWS = 5
_NUM_INDEPENDENCE_CHECKS = 4


def init_local_values(
    potential: Potential, arguments: Arguments, global_position: Array
) -> LocalValues:
    """Local values of all rows to begin with: near the middle of unconstrained space.

    Sites that ``gibbs_fn`` draws come from the prior given the globals.

    :raises ValueError: where ``gibbs_fn`` returns other names, shapes or types than it should, or
        values outside of a site's support.
    """
    local = potential.local_latents
    assert local is not None
    noise = random.normal(random.key(1), (local.plate.size, local.hmc_dim), potential.dtype)
    values = LocalValues(0.1 * noise, {})
    if not local.gibbs_sites:
        return values

    def one(rows: Array, key: Array) -> dict[str, Array]:
        assert potential.sample_conditional_prior is not None
        drawn = potential.sample_conditional_prior(
            global_position, {local.plate.name: rows}, arguments, key
        )
        return {s.name: jnp.moveaxis(drawn[s.name], s.axis, 0) for s in local.gibbs_sites}

    values = values._replace(
        gibbs_values=jax.jit(lambda key: map_over_row_chunks(one, local.plate.size, key))(
            random.key(2)
        )
    )
    rows = jnp.arange(local.plate.subsample_size)
    scale = jnp.ones((len(rows), local.hmc_dim), potential.dtype)
    renewed, _ = jax.jit(
        lambda v: update_local_values(
            potential, global_position, rows, v.take(rows), scale, arguments, random.key(0)
        )
    )(values)
    for name, x in local.to_model_layout(renewed.drawn).items():
        _check_values_in_support(
            name, next(s.support for s in local.gibbs_sites if s.name == name), x
        )
    return values


def _check_values_in_support(name: str, support: Any, values: Array) -> None:
    """Refuse draws that are outside of a support that is the same whatever the other values."""
    if not all(isinstance(x, (int, float)) for x in jax.tree.leaves(support)):
        return
    is_inside = np.asarray(support(values))
    if not is_inside.all():
        outside = np.asarray(values).ravel()[np.flatnonzero(~is_inside)[0] if is_inside.ndim else 0]
        raise InvalidArgumentError(
            f"`gibbs_fn` returns values of '{name}' outside of its support, {support}, for example "
            f"{outside}."
        )


@partial(jax.jit, static_argnames="potential")
def _compute_joint_and_pointwise(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    arguments: Arguments,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The minibatch's potential and the mean of its rows', with gradients in the local values."""
    local = potential.local_latents
    assert local is not None

    def together(position: Array) -> Array:
        with_values = with_local_values(arguments, values._replace(hmc_position=position))
        return potential.value(global_position, {local.plate.name: indices}, with_values)

    def apart(position: Array) -> Array:
        own = pointwise_local_potentials(
            potential, global_position, indices, position, values.gibbs_values, arguments
        )
        return local.plate.size * own.mean()

    found = (jax.value_and_grad(fn)(values.hmc_position) for fn in (together, apart))
    first, second = found
    return first, second


def check_conditional_independence(
    potential: Potential, arguments: Arguments, global_position: Array, values: LocalValues
) -> None:
    """Refuse a model in which rows are tied together other than through the globals.

    A minibatch's potential must be the mean of those of its rows. It is not where a row's
    value serves other rows, or a site outside of the plate.

    :raises ValueError: naming the local sites, with the way out.
    """
    local = potential.local_latents
    assert local is not None
    rng = np.random.default_rng(3)
    size = local.plate.size
    num = min(_NUM_CHECKED_ROWS, size)
    for _ in range(_NUM_INDEPENDENCE_CHECKS):
        start = rng.integers(size)
        rows = jnp.asarray((start + np.arange(num)) % size if num > 1 else [start])
        some = values.take(rows)
        noise = rng.standard_normal(some.hmc_position.shape)
        some = some._replace(hmc_position=jnp.asarray(noise, some.hmc_position.dtype))
        (whole, pull), (mean, own) = _compute_joint_and_pointwise(
            potential, global_position, rows, some, arguments
        )
        if not (np.isfinite(whole) and np.isfinite(mean)):
            continue
        tolerance = 1e-3 if np.asarray(whole).dtype == np.float32 else 1e-8
        terms = 1.0 + abs(float(whole)) + abs(float(mean))
        pulls = 1.0 + np.abs(pull).max(initial=0.0) + np.abs(own).max(initial=0.0)
        is_off = abs(float(whole - mean)) > tolerance * terms
        if is_off or np.abs(pull - own).max(initial=0.0) > tolerance * pulls:
            names = " and ".join(f"'{n}'" for n in local.names)
            raise InvalidArgumentError(
                f"Site {names} has a latent value for each row of the plate '{local.plate.name}', "
                "but the rows are not independent given the other sites: a row's value serves "
                "another row, or a site outside of the plate. Move what needs it into the plate, "
                "or give the plate no subsample_size."
            )


def check_local_latents_options(
    potential: Potential,
    arguments: Arguments,
    subsampling: str,
    gradient_estimator: str,
    collect_local_sites: bool | Sequence[str],
) -> None:
    """Refuse what is wrong, or not there, for a model with local sites.

    :raises ValueError: naming the site, with the way out.
    """
    local = potential.local_latents
    if local is None:
        if collect_local_sites:
            raise InvalidArgumentError(
                "`collect_local_sites` asks for latent sites inside a subsampled plate, but the model "
                "has none: leave it out."
            )
        return
    site = f"Site '{local.names[0]}' has a latent value for each row of '{local.plate.name}'"
    size, batch = local.plate.size, local.plate.subsample_size
    if subsampling == "iid":
        raise InvalidArgumentError(
            f"{site}, and a minibatch of independent rows may hold a row twice: use "
            "subsampling='contiguous' or 'shuffled', and no `noise_compensation`."
        )
    if subsampling == "shuffled" and size % batch:
        raise InvalidArgumentError(
            f"{site}, and where {batch} rows do not divide {size}, a minibatch between two epochs "
            "may hold a row twice: use subsampling='contiguous', or another subsample_size."
        )
    if gradient_estimator == "second_order_control_variate":
        raise InvalidArgumentError(
            f"{site}, whose values move the Hessian that {gradient_estimator!r} would hold: use "
            "gradient_estimator='control_variate'."
        )
    if potential.is_stochastic:
        raise InvalidArgumentError(
            f"{site}, and the model draws random keys (numpyro.prng_key), so that the rows' own "
            "densities are random: sample what they randomise, or integrate the site out."
        )
    if arguments.host_arrays and local.hmc_sites:
        raise InvalidArgumentError(
            f"Site '{local.hmc_sites[0].name}' has a latent value for each row, moved along the "
            "gradient of the row's own density, for which rows of a HostArray would be read once "
            "more, one by one: pass arrays in memory, or draw the site by `gibbs_fn`."
        )
    select_collected_sites(local, collect_local_sites)


def check_local_sites(model_trace: ModelTrace) -> None:
    """Refuse latent sites inside subsampled plates whose rows cannot be moved one by one.

    :raises ValueError: naming the site, with the way out.
    """
    plates, gibbs_sites = model_trace.unsharded_plates, model_trace.gibbs.site_names
    found = [s for s in model_trace.sample_sites if s.plate_frames and not s.is_observed]
    for site in found:
        _check_local_site(site, site.name in gibbs_sites)
    missing = sorted(set(gibbs_sites) - {s.name for s in found})
    if missing:
        raise InvalidArgumentError(
            f"`gibbs_sites` names '{missing[0]}', which is no latent site inside a subsampled "
            "plate: give it the names of such sites, or the plate a subsample_size."
        )
    if not found:
        return
    name = next((s.name for s in found if s.name not in gibbs_sites), found[0].name)
    if model_trace.gibbs.num_sweeps is not None and name not in gibbs_sites:
        raise InvalidArgumentError(
            f"Site '{name}' has a latent value for each row, which `gibbs_fn` does not draw: with "
            "`gibbs_sweeps`, which keeps no such values, it must draw all of them. Name the site "
            "in `gibbs_sites`, or leave out `gibbs_sweeps`."
        )
    if len(plates) > 1:
        raise InvalidArgumentError(
            f"Site '{name}' has a latent value for each row of a subsampled plate, and the model "
            f"has the subsampled plates {sorted(plates)}: leave one of them its subsample_size."
        )
    (plate,) = plates
    if not any(s.is_observed and s.plate_frames for s in model_trace.sample_sites):
        raise InvalidArgumentError(
            f"Site '{name}' is latent inside the subsampled plate '{plate}', in which "
            "nothing is observed: pass its data (is an argument None?), or move it out of the "
            "plate."
        )


def _check_local_site(site: SampleSite, is_gibbs_site: bool) -> None:
    """Refuse one such site; ``is_gibbs_site`` where ``gibbs_fn`` draws it."""
    where = f"Site '{site.name}' inside the subsampled plate '{site.plate_frames[0].name}'"
    if len(site.plate_frames) > 1:
        others = " and ".join(f"'{f.name}'" for f in site.plate_frames)
        raise InvalidArgumentError(
            f"Site '{site.name}' has a latent value for each pair of rows of the subsampled plates "
            f"{others}: give one of them no subsample_size, or integrate the site out."
        )
    if is_gibbs_site:
        return
    if site.support.is_discrete:
        raise InvalidArgumentError(
            f"{where} is discrete and has no data: pass them (is an argument None?), or if it is "
            f"latent, draw it by gibbs_fn=... and gibbs_sites=['{site.name}'], or sum it out of "
            "the likelihood."
        )
    if site.is_delta:
        raise InvalidArgumentError(
            f"{where} has a delta distribution; use numpyro.deterministic instead."
        )
    if not site.has_fixed_support:
        raise InvalidArgumentError(
            f"{where} has a support that depends on other values: rescale it, for example a "
            "Uniform(0, 1) times its upper bound."
        )
    if site.unconstrained_shape is None:
        raise InvalidArgumentError(
            f"{where} has support {site.support}, which has no map to unconstrained space: "
            "reparametrise the site, or draw it by gibbs_fn."
        )
