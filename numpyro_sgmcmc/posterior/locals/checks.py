"""Whether each row's local values can be moved by themselves, and where they begin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.facts import Facts, SampleSite
from numpyro_sgmcmc.posterior.locals.moves import by_chunks, renew, row_potentials
from numpyro_sgmcmc.posterior.locals.sites import AllRows, SomeRows, collected_sites, with_locals

if TYPE_CHECKING:
    from numpyro_sgmcmc.posterior.target import Target

__all__ = [
    "first_values",
    "refuse_dependent_rows",
    "refuse_local_sites",
    "refuse_options_with_locals",
]

_ROWS = 5
_TRIES = 4


def first_values(target: Target, arguments: Arguments, theta: Array) -> AllRows:
    """Local values of all rows to begin with: near the middle of unconstrained space.

    Sites that ``gibbs_fn`` draws come from the prior given the globals.

    :raises ValueError: where ``gibbs_fn`` returns other names, shapes or types than it should, or
        values outside of a site's support.
    """
    local = target.locals
    assert local is not None
    noise = random.normal(random.key(1), (local.plate.size, local.width), target.dtype)
    values = AllRows(0.1 * noise, {})
    if not local.drawn:
        return values

    def one(rows: Array, key: Array) -> dict[str, Array]:
        assert target.draw_prior is not None
        drawn = target.draw_prior(theta, {local.plate.name: rows}, arguments, key)
        return {s.name: jnp.moveaxis(drawn[s.name], s.axis, 0) for s in local.drawn}

    values = values._replace(
        drawn=jax.jit(lambda key: by_chunks(one, local.plate.size, key))(random.key(2))
    )
    rows = jnp.arange(local.plate.subsample_size)
    scale = jnp.ones((len(rows), local.width), target.dtype)
    renewed, _ = jax.jit(
        lambda v: renew(target, theta, rows, v.take(rows), scale, arguments, random.key(0))
    )(values)
    for name, x in local.laid_out(renewed.drawn).items():
        _refuse_outside_support(name, next(s.support for s in local.drawn if s.name == name), x)
    return values


def _refuse_outside_support(name: str, support: Any, values: Array) -> None:
    """Refuse draws that are outside of a support that is the same whatever the other values."""
    if not all(isinstance(x, (int, float)) for x in jax.tree.leaves(support)):
        return
    is_inside = np.asarray(support(values))
    if not is_inside.all():
        outside = np.asarray(values).ravel()[np.flatnonzero(~is_inside)[0] if is_inside.ndim else 0]
        raise Refusal(
            f"`gibbs_fn` returns values of '{name}' outside of its support, {support}, for example "
            f"{outside}."
        )


@partial(jax.jit, static_argnames="target")
def _both_ways(
    target: Target, theta: Array, rows: Array, values: SomeRows, arguments: Arguments
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The minibatch's potential and the mean of its rows', with gradients in the local values."""
    local = target.locals
    assert local is not None

    def together(position: Array) -> Array:
        with_values = with_locals(arguments, values._replace(position=position))
        return target.potential(theta, {local.plate.name: rows}, with_values)

    def apart(position: Array) -> Array:
        own = row_potentials(target, theta, rows, position, values.drawn, arguments)
        return local.plate.size * own.mean()

    found = (jax.value_and_grad(fn)(values.position) for fn in (together, apart))
    first, second = found
    return first, second


def refuse_dependent_rows(
    target: Target, arguments: Arguments, theta: Array, values: AllRows
) -> None:
    """Refuse a model in which rows are tied together other than through the globals.

    A minibatch's potential must be the mean of those of its rows. It is not where a row's
    value serves other rows, or a site outside of the plate.

    :raises ValueError: naming the local sites, with the way out.
    """
    local = target.locals
    assert local is not None
    rng = np.random.default_rng(3)
    size = local.plate.size
    num = min(_ROWS, size)
    for _ in range(_TRIES):
        start = rng.integers(size)
        rows = jnp.asarray((start + np.arange(num)) % size if num > 1 else [start])
        some = values.take(rows)
        noise = rng.standard_normal(some.position.shape)
        some = some._replace(position=jnp.asarray(noise, some.position.dtype))
        (whole, pull), (mean, own) = _both_ways(target, theta, rows, some, arguments)
        if not (np.isfinite(whole) and np.isfinite(mean)):
            continue
        tolerance = 1e-3 if np.asarray(whole).dtype == np.float32 else 1e-8
        terms = 1.0 + abs(float(whole)) + abs(float(mean))
        pulls = 1.0 + np.abs(pull).max(initial=0.0) + np.abs(own).max(initial=0.0)
        is_off = abs(float(whole - mean)) > tolerance * terms
        if is_off or np.abs(pull - own).max(initial=0.0) > tolerance * pulls:
            names = " and ".join(f"'{n}'" for n in local.names)
            raise Refusal(
                f"Site {names} has a latent value for each row of the plate '{local.plate.name}', "
                "but the rows are not independent given the other sites: a row's value serves "
                "another row, or a site outside of the plate. Move what needs it into the plate, "
                "or give the plate no subsample_size."
            )


def refuse_options_with_locals(
    target: Target,
    arguments: Arguments,
    minibatch: str,
    gradient: str,
    collect_locals: bool | Sequence[str],
) -> None:
    """Refuse what is wrong, or not there, for a model with local sites.

    :raises ValueError: naming the site, with the way out.
    """
    local = target.locals
    if local is None:
        if collect_locals:
            raise Refusal(
                "`collect_locals` asks for latent sites inside a subsampled plate, but the model "
                "has none: leave it out."
            )
        return
    site = f"Site '{local.names[0]}' has a latent value for each row of '{local.plate.name}'"
    size, batch = local.plate.size, local.plate.subsample_size
    if minibatch == "iid":
        raise Refusal(
            f"{site}, and a minibatch of independent rows may hold a row twice: use "
            "minibatch='blocks' or 'epoch', and no `noise_compensation`."
        )
    if minibatch == "epoch" and size % batch:
        raise Refusal(
            f"{site}, and where {batch} rows do not divide {size}, a minibatch between two epochs "
            "may hold a row twice: use minibatch='blocks', or another subsample_size."
        )
    if gradient == "second_order_control_variate":
        raise Refusal(
            f"{site}, whose values move the Hessian that {gradient!r} would hold: use "
            "gradient='control_variate'."
        )
    if target.is_randomized:
        raise Refusal(
            f"{site}, and the model draws random keys (numpyro.prng_key), so that the rows' own "
            "densities are random: sample what they randomise, or integrate the site out."
        )
    if arguments.hosts and local.moved:
        raise Refusal(
            f"Site '{local.moved[0].name}' has a latent value for each row, moved along the "
            "gradient of the row's own density, for which rows of a HostArray would be read once "
            "more, one by one: pass arrays in memory, or draw the site by `gibbs_fn`."
        )
    collected_sites(local, collect_locals)


def refuse_local_sites(facts: Facts) -> None:
    """Refuse latent sites inside subsampled plates whose rows cannot be moved one by one.

    :raises ValueError: naming the site, with the way out.
    """
    plates, gibbs_sites = facts.stated_plates, facts.gibbs.sites
    found = [s for s in facts.samples if s.frames and not s.is_observed]
    for site in found:
        _refuse_local_site(site, site.name in gibbs_sites)
    missing = sorted(set(gibbs_sites) - {s.name for s in found})
    if missing:
        raise Refusal(
            f"`gibbs_sites` names '{missing[0]}', which is no latent site inside a subsampled "
            "plate: give it the names of such sites, or the plate a subsample_size."
        )
    if not found:
        return
    name = next((s.name for s in found if s.name not in gibbs_sites), found[0].name)
    if facts.gibbs.sweeps is not None and name not in gibbs_sites:
        raise Refusal(
            f"Site '{name}' has a latent value for each row, which `gibbs_fn` does not draw: with "
            "`gibbs_sweeps`, which keeps no such values, it must draw all of them. Name the site "
            "in `gibbs_sites`, or leave out `gibbs_sweeps`."
        )
    if len(plates) > 1:
        raise Refusal(
            f"Site '{name}' has a latent value for each row of a subsampled plate, and the model "
            f"has the subsampled plates {sorted(plates)}: leave one of them its subsample_size."
        )
    (plate,) = plates
    if not any(s.is_observed and s.frames for s in facts.samples):
        raise Refusal(
            f"Site '{name}' is latent inside the subsampled plate '{plate}', in which "
            "nothing is observed: pass its data (is an argument None?), or move it out of the "
            "plate."
        )


def _refuse_local_site(site: SampleSite, is_drawn: bool) -> None:
    """Refuse one such site; ``is_drawn`` where ``gibbs_fn`` draws it."""
    where = f"Site '{site.name}' inside the subsampled plate '{site.frames[0].name}'"
    if len(site.frames) > 1:
        others = " and ".join(f"'{f.name}'" for f in site.frames)
        raise Refusal(
            f"Site '{site.name}' has a latent value for each pair of rows of the subsampled plates "
            f"{others}: give one of them no subsample_size, or integrate the site out."
        )
    if is_drawn:
        return
    if site.support.is_discrete:
        raise Refusal(
            f"{where} is discrete and has no data: pass them (is an argument None?), or if it is "
            f"latent, draw it by gibbs_fn=... and gibbs_sites=['{site.name}'], or sum it out of "
            "the likelihood."
        )
    if site.is_delta:
        raise Refusal(f"{where} has a delta distribution; use numpyro.deterministic instead.")
    if not site.has_fixed_support:
        raise Refusal(
            f"{where} has a support that depends on other values: rescale it, for example a "
            "Uniform(0, 1) times its upper bound."
        )
    if site.free_shape is None:
        raise Refusal(
            f"{where} has support {site.support}, which has no map to unconstrained space: "
            "reparametrise the site, or draw it by gibbs_fn."
        )
