"""Warnings that point at the user's own line, not at ours, NumPyro's or JAX's."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import jax
import numpyro

__all__ = ["notify"]

_INTERNAL = tuple(str(Path(p).parent) for p in (__file__, numpyro.__file__, jax.__file__))


def notify(message: str) -> None:
    """Warn once (by Python's own rules) at the innermost line outside the libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
