"""What a posterior does not bear: options of the kernel, and ways to run it."""

from __future__ import annotations

import jax

from numpyro_sgmcmc.checks import Refusal, notify
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.locals.sites import collected_sites
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.samplers.options import Options

__all__ = ["refuse_chain_per_device", "refuse_dropped_locals_in_block", "refuse_unsuitable_options"]


def refuse_chain_per_device(arguments: Arguments) -> None:
    """Refuse to spread chains over the devices that rows are spread over."""
    if arguments.sharded and jax.sharding.get_abstract_mesh().manual_axes:
        raise Refusal(
            "chain_method='parallel' gives every device a chain, but the devices share the "
            "rows: use chain_method='vectorized'."
        )


def refuse_dropped_locals_in_block(target: Target, options: Options) -> None:
    """Refuse to be a block of NumPyro's Gibbs that does not hand on its local values."""
    local = target.locals
    if local is None:
        return
    for name in local.names:
        if name not in collected_sites(local, options.collect_locals):
            raise Refusal(
                f"Site '{name}' is latent inside the subsampled plate, and the other blocks of "
                "Gibbs need its values for all rows: pass collect_locals=True."
            )


def refuse_unsuitable_options(target: Target, options: Options) -> None:
    """Refuse options that make no sense for a model; warn of one without a subsampled plate.

    :raises ValueError: naming the option, with the way out.
    """
    if not target.plates and target.dim:
        notify(
            "The model has no subsampled plate: every step uses the gradient on all rows. "
            "Give the data's plate a subsample_size, for example 100; where that is an argument "
            "of the model, pass it to `run`."
        )
    if target.is_randomized and "control_variate" in options.gradient:
        raise Refusal(
            f"{_what_is_random(options)}, so that the gradient on all rows is random too and "
            f"gradient={options.gradient!r} has nothing to hold on to. Use gradient='plain' or "
            "'auto'."
        )
    if options.forward_mode_differentiation and target.locals is not None:
        raise Refusal(
            f"Site '{target.locals.names[0]}' has a latent value for each row, whose gradients are "
            "taken in reverse mode: leave out `forward_mode_differentiation`."
        )
    if options.noise_compensation:
        _refuse_dependent_rows(target, options)


def _what_is_random(options: Options) -> str:
    if options.gibbs_sweeps is not None:
        return "With `gibbs_sweeps` local values are drawn anew at each evaluation"
    return "The model draws random keys (numpyro.prng_key)"


def _refuse_dependent_rows(target: Target, options: Options) -> None:
    """Refuse to compensate noise that is not that of independent rows."""
    if target.shards is not None:
        raise Refusal(
            "`noise_compensation` needs the gradients of single rows, which rows spread over "
            "devices do not have: leave it out."
        )
    if target.is_randomized:
        raise Refusal(
            f"{_what_is_random(options)}, whose noise the gradients of single rows do not show: "
            "leave out `noise_compensation`."
        )
    for group in target.groups:
        if len(group) > 1:
            names = " and ".join(f"'{p.name}'" for p in group)
            raise Refusal(
                f"The subsampled plates {names} meet at one site, so that its rows are not "
                "independent: leave out `noise_compensation`, or subsample one of them."
            )
