"""What a posterior does not bear: options of the kernel, and ways to run it."""

from __future__ import annotations

import jax

from numpyro_sgmcmc.checks import InvalidArgumentError, warn_user
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.locals.sites import select_collected_sites
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.samplers.options import Options

__all__ = ["check_chain_method", "check_gibbs_block_collects_locals", "check_options_match_model"]


def check_chain_method(arguments: Arguments) -> None:
    """Refuse to spread chains over the devices that rows are spread over."""
    if arguments.sharded_arrays and jax.sharding.get_abstract_mesh().manual_axes:
        raise InvalidArgumentError(
            "chain_method='parallel' gives every device a chain, but the devices share the "
            "rows: use chain_method='vectorized'."
        )


def check_gibbs_block_collects_locals(potential: Potential, options: Options) -> None:
    """Refuse to be a block of NumPyro's Gibbs that does not hand on its local values."""
    local = potential.local_latents
    if local is None:
        return
    for name in local.names:
        if name not in select_collected_sites(local, options.collect_local_sites):
            raise InvalidArgumentError(
                f"Site '{name}' is latent inside the subsampled plate, and the other blocks of "
                "Gibbs need its values for all rows: pass collect_local_sites=True."
            )


def check_options_match_model(potential: Potential, options: Options) -> None:
    """Refuse options that make no sense for a model; warn of one without a subsampled plate.

    :raises ValueError: naming the option, with the way out.
    """
    if not potential.plates and potential.dim:
        warn_user(
            "The model has no subsampled plate: every step uses the gradient on all rows. "
            "Give the data's plate a subsample_size, for example 100; where that is an argument "
            "of the model, pass it to `run`."
        )
    if potential.is_stochastic and "control_variate" in options.gradient_estimator:
        raise InvalidArgumentError(
            f"{_describe_randomness(options)}, so that the gradient on all rows is random too and "
            f"gradient_estimator={options.gradient_estimator!r} has nothing to hold on to. Use gradient_estimator='minibatch' or "
            "'auto'."
        )
    if options.forward_mode_differentiation and potential.local_latents is not None:
        raise InvalidArgumentError(
            f"Site '{potential.local_latents.names[0]}' has a latent value for each row, whose gradients are "
            "taken in reverse mode: leave out `forward_mode_differentiation`."
        )
    if options.noise_compensation:
        _check_noise_compensation(potential, options)


def _describe_randomness(options: Options) -> str:
    if options.gibbs_sweeps is not None:
        return "With `gibbs_sweeps` local values are drawn anew at each evaluation"
    return "The model draws random keys (numpyro.prng_key)"


def _check_noise_compensation(potential: Potential, options: Options) -> None:
    """Refuse to compensate noise that is not that of independent rows."""
    if potential.shards is not None:
        raise InvalidArgumentError(
            "`noise_compensation` needs the gradients of single rows, which rows spread over "
            "devices do not have: leave it out."
        )
    if potential.is_stochastic:
        raise InvalidArgumentError(
            f"{_describe_randomness(options)}, whose noise the gradients of single rows do not show: "
            "leave out `noise_compensation`."
        )
    for group in potential.plate_groups:
        if len(group) > 1:
            names = " and ".join(f"'{p.name}'" for p in group)
            raise InvalidArgumentError(
                f"The subsampled plates {names} meet at one site, so that its rows are not "
                "independent: leave out `noise_compensation`, or subsample one of them."
            )
