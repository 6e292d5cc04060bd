"""Whether the docs name files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (ROOT / "numpyro_sgmcmc", ROOT)


def named_files(text):
    """Paths in backquotes that look like a file or a folder of this project."""
    found = re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|png|toml))?)`", text)
    return [path for path in found if not path.startswith(("http", "."))]


@pytest.mark.parametrize("page", ["docs/development.md"])
def test_named_files_exist(page):
    files = named_files((ROOT / page).read_text())
    assert len(files) > 40
    missing = [f for f in files if not any((room / f).exists() for room in ROOMS)]
    assert not missing


def test_reading_lists_are_as_short_as_they_say():
    text = (ROOT / "docs/development.md").read_text()
    step, warm_up, report = (
        re.findall(r"^\d+\. `(.*?)`", part, re.MULTILINE)
        for part in re.split(r"\n## A (?:step|warm-up|report), ", text)[1:]
    )
    assert (len(step), len(warm_up), len(report)) == (9, 12, 7)
