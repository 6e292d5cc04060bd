"""What `make test` leaves to `make test-all`."""

from typing import Any

import pytest


def quick_if(is_quick: bool, *values: Any, **options: Any) -> Any:
    """A parameter of a test that only `make test-all` runs unless it is to be quick."""
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow, **options)
