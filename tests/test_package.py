"""The installed package: types, dependencies and version."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpyro_sgmcmc

PACKAGE = Path(numpyro_sgmcmc.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]


def test_package_ships_types():
    assert (PACKAGE / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def find_distributions(requirements):
    return {re.match(r"[\w-]+", r)[0] for r in requirements}


def test_package_import_imports_no_optional_dependency():
    optional = find_distributions(r for rs in PROJECT["optional-dependencies"].values() for r in rs)
    optional -= {*find_distributions(PROJECT["dependencies"]), "numpyro-sgmcmc"}
    modules = {name.split("-")[0] for name in optional} - {"import"} | {"xarray"}  # import-linter
    code = "import sys, numpyro_sgmcmc; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(run.stdout.split())
    assert {"arviz", "flax", "h5py", "matplotlib", "orbax", "pandas", "zarr"} <= modules
    assert "numpyro" in imported
    assert not imported & modules


def test_changelog_lists_the_version_or_is_open():
    headings = re.findall(r"^## (\S+)", (PACKAGE.parent / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", numpyro_sgmcmc.__version__)
