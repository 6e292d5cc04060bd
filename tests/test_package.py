"""What whoever installs the package gets."""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpyro_sgmcmc

PACKAGE = Path(numpyro_sgmcmc.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
OPTIONAL = (
    "arviz",
    "flax",
    "h5py",
    "hypothesis",
    "matplotlib",
    "orbax",
    "pandas",
    "xarray",
    "zarr",
)


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_nothing_optional_is_imported():
    code = (
        "import sys, numpyro_sgmcmc; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(run.stdout.split())
    assert "numpyro" in found
    assert found & set(OPTIONAL) == set()


def test_the_changelog_is_open():
    text = (PACKAGE.parent / "CHANGELOG.md").read_text()
    assert "## Unreleased" in text or f"## {numpyro_sgmcmc.__version__}" in text
