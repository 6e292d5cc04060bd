"""Parameters of tests that only `make test-all` runs."""

from typing import Any

import pytest


def quick_if(is_quick: bool, *values: Any, **options: Any) -> Any:
    """Return a parameter of a test, marked as slow unless ``is_quick``."""
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow, **options)
