"""What :class:`~numpyro_sgmcmc.CheckpointedMCMC` cannot run with, refused before any work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["check_checkpoint_settings", "check_dependencies", "check_run_folder"]


def check_checkpoint_settings(
    sampler: Any,
    num_samples: Any,
    thinning: Any,
    checkpoint: Any,
    checkpoint_every: Any,
    keep_draws: Any,
) -> None:
    """Refuse what cannot be meant.

    :raises ValueError: naming the argument.
    """
    if not isinstance(sampler, SGMCMCKernel):
        raise InvalidArgumentError(
            f"`CheckpointedMCMC` is for the kernels of numpyro_sgmcmc, whose state holds all "
            f"that a run goes on from, but `sampler` is a {type(sampler).__name__}."
        )
    checks.check_bool("keep_draws", keep_draws)
    if not isinstance(checkpoint, (str, os.PathLike)) or not str(checkpoint):
        raise InvalidArgumentError(
            f"`checkpoint` is {checkpoint!r}, but must be the path of a folder."
        )
    checks.check_positive_int("num_samples", num_samples)
    checks.check_positive_int("thinning", thinning)
    if num_samples < thinning:
        raise InvalidArgumentError(
            f"`thinning` is {thinning}, which leaves none of {num_samples} samples."
        )
    if checkpoint_every is not None:
        checks.check_positive_int("checkpoint_every", checkpoint_every)


def check_run_folder(folder: Path, is_run_missing: bool) -> None:
    """Refuse a file where the run's folder should be, and a folder without a run.

    :param is_run_missing: whether there is no run, but should be.
    :raises OSError: naming the folder.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"`checkpoint` is '{folder}', a file: give it the path of a folder."
        )
    if is_run_missing:
        raise FileNotFoundError(f"'{folder}' holds no run that could be continued: call `run`.")


def check_dependencies() -> None:
    """Refuse missing packages.

    :raises ImportError: saying what to install.
    """
    checks.import_optional("orbax.checkpoint", "`CheckpointedMCMC`", "checkpoint")
    checks.import_optional("zarr", "`CheckpointedMCMC`", "checkpoint")
