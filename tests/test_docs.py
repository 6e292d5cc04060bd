"""Whether the docs name files that are there, and whether their code runs."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from numpyro import handlers

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


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.filterwarnings("ignore:Pilot chains find no single region")
def test_the_page_on_networks_runs(capsys):
    pytest.importorskip("flax")
    text = (ROOT / "docs/networks.md").read_text()
    names: dict = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert "between chains" in capsys.readouterr().out
    # Its two networks are one.
    model = handlers.seed(names["flax_model"], jax.random.key(0))
    trace = handlers.trace(model).get_trace(names["X"], names["y"])
    draw = {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}
    found = names["flax_network"](draw, names["X"])
    np.testing.assert_allclose(found, trace["y"]["fn"].loc, rtol=1e-4, atol=1e-5)
