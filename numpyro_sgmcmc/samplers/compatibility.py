"""Which of a kernel's options a posterior bears."""

from __future__ import annotations

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["check_compatible"]


def check_compatible(target: Target, gradient: str, noise_compensation: bool) -> None:
    """Refuse options that make no sense for a model; warn of one without a subsampled plate.

    :raises ValueError: naming the option, with the way out.
    """
    if not target.plates:
        notify(
            "The model has no subsampled plate: every step uses the gradient on all rows. "
            "Give the data's plate a subsample_size, for example 100."
        )
    if target.is_randomized and "control_variate" in gradient:
        raise ValueError(
            "The model draws random keys (numpyro.prng_key), so that its gradient on all "
            "rows is random too and gradient='control_variate' has nothing to hold on to. "
            "Use gradient='plain' or 'auto'."
        )
    if noise_compensation:
        _check_independent_rows(target)


def _check_independent_rows(target: Target) -> None:
    """Refuse to compensate noise that is not that of independent rows."""
    if target.shards is not None:
        raise ValueError(
            "`noise_compensation` needs the gradients of single rows, which rows spread over "
            "devices do not have: leave it out."
        )
    if target.is_randomized:
        raise ValueError(
            "The model draws random keys (numpyro.prng_key), whose noise the gradients of "
            "single rows do not show: leave out `noise_compensation`."
        )
    for group in target.groups:
        if len(group) > 1:
            names = " and ".join(f"'{p.name}'" for p in group)
            raise ValueError(
                f"The subsampled plates {names} meet at one site, so that its rows are not "
                "independent: leave out `noise_compensation`, or subsample one of them."
            )
