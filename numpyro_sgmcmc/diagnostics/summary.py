"""NumPyro's summary, and what the run says of its bias below it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpyro import diagnostics
from numpyro.infer import MCMC

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.diagnostics.bias import bias_report

__all__ = ["print_summary"]


def print_summary(
    mcmc: MCMC,
    prob: float = 0.9,
    exclude_deterministic: bool = True,
    sites: Sequence[str] | None = None,
) -> None:
    """``mcmc.print_summary()`` and one line on bias; the verdict as well where there is something.

    :param mcmc: a run of one of this package's kernels.
    :param prob: probability mass of the intervals, from 0 to 1. Default 0.9.
    :param exclude_deterministic: whether to leave deterministic sites out. Default True.
    :param sites: names of the sites to have in the table, deterministic ones too, or, with ``~``
        before each, of those to leave out: ``["~effect"]``. The lines below are on all. Default
        None: all.
    :raises ValueError: for a run of another kernel, or before a run, and for sites that are not
        there.
    """
    report = bias_report(mcmc)
    checks.check_in_interval("prob", prob, 0.0, 1.0)
    if sites is None:
        mcmc.print_summary(prob, exclude_deterministic)
    else:
        diagnostics.print_summary(_select_site_draws(mcmc, sites, exclude_deterministic), prob)
        if (diverging := mcmc.get_extra_fields().get("diverging")) is not None:
            print(f"Number of divergences: {np.sum(diverging)}")
    print(report.summary_line)
    if not report.is_ok:
        print(report.diagnosis)


def _select_site_draws(
    mcmc: MCMC, sites: Sequence[str], exclude_deterministic: bool
) -> dict[str, Any]:
    """Draws of the sites asked for, by chain."""
    draws = mcmc.get_samples(group_by_chain=True)
    named = [sites] if isinstance(sites, str) else sites
    if not (isinstance(named, (list, tuple)) and all(isinstance(name, str) for name in named)):
        raise InvalidArgumentError(f"`sites` is {sites!r}, but must be a list of sites' names.")
    there = list(draws) if isinstance(draws, dict) else []
    if unknown := [name for name in named if name.removeprefix("~") not in there]:
        raise InvalidArgumentError(
            f"`sites` has {', '.join(map(repr, unknown))}, but the run has draws of "
            f"{', '.join(map(repr, there)) or 'no sites with names'}."
        )
    if len({name.startswith("~") for name in named}) != 1:
        raise InvalidArgumentError(
            "`sites` must name sites to show, or, with ~ before each, to leave out."
        )
    if not named[0].startswith("~"):
        return {name: draws[name] for name in named}
    latent = attrgetter(mcmc.sampler.sample_field)(mcmc.last_state)
    shown = [name for name in there if name in latent or not exclude_deterministic]
    return {name: draws[name] for name in shown if f"~{name}" not in named}
