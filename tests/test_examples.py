"""The gallery's scripts run on a few rows."""

import runpy
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib import pyplot

EXAMPLES = Path(__file__).parents[1] / "examples"
GALLERY = ["routes", "lateness", "made_up_time", "return_time", "cancellations", "on_disk"]


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.filterwarnings("ignore::UserWarning")  # on few rows the warm-up has a word to say
@pytest.mark.parametrize("name", GALLERY)
def test_script(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mpl, "use", lambda backend: None)
    monkeypatch.syspath_prepend(EXAMPLES)
    picture = tmp_path / "picture.png"
    arguments = ["--rows", "20000", "--output", str(picture)]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with mpl.rc_context({"backend": "Agg"}):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    pyplot.close("all")
    assert picture.stat().st_size > 10_000
    assert "sd" in capsys.readouterr().out


def test_every_script_has_a_page():
    elsewhere = {"flights", "nycflights", "network", "topics"}  # on other pages, or of use to these
    scripts = {p.stem for p in EXAMPLES.glob("*.py")} - elsewhere
    pages = {p.stem.replace("-", "_") for p in (EXAMPLES.parent / "docs/gallery").glob("*.md")}
    assert scripts == set(GALLERY) == pages - {"index"}
