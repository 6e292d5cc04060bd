"""Run NumPyro's tests of MCMC with ``NUTS`` and ``HMC`` replaced by ``SGHMCSplit``.

``python benchmarks/numpyro_tests.py NUMPYRO/test/infer/test_mcmc.py`` takes about half an hour;
further arguments are those of pytest. The file is one of a checkout of NumPyro, with its
``conftest.py``. Tests that use neither of the two kernels are left out.

Options of the Metropolis correction, which is absent here, are left out, and
``adapt_step_size=False`` becomes ``shrink_step_size_on_divergence=False``. The page "Compatibility
with NumPyro" gives the reason of each failure.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from numpyro import infer

from numpyro_sgmcmc import SGHMCSplit

_OMITTED = {
    "find_heuristic_step_size",
    "max_tree_depth",
    "regularize_mass_matrix",
    "target_accept_prob",
    "trajectory_length",
}
_RENAMED = {"adapt_step_size": "shrink_step_size_on_divergence"}


class NUTS(infer.NUTS):
    """Returns SGHMCSplit with the options that it has."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        kept = {_RENAMED.get(k, k): x for k, x in options.items() if k not in _OMITTED}
        return SGHMCSplit(*args, **kept)


class HMC(NUTS):
    """The same under the other name, which parametrised tests show."""


class _Plugin:
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out tests that use neither kernel."""
        items[:] = filter(_uses_replaced_kernel, items)


def _uses_replaced_kernel(item: Any) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "kernel_cls" in parameters:
        return parameters["kernel_cls"] in (HMC, NUTS)
    return re.search(r"\b(HMC|NUTS)\(", inspect.getsource(item.function)) is not None


def main(path: str, *options: str) -> int:
    infer.NUTS, infer.HMC = NUTS, HMC
    # Without the settings of NumPyro's checkout, which make each warning an error.
    settings = ["-c", "/dev/null", "--rootdir", str(Path(path).parent), "-p", "no:cacheprovider"]
    return int(pytest.main([path, *settings, "-q", "-rfs", *options], [_Plugin()]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
