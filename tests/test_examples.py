"""The gallery's scripts run on a few rows."""

import runpy
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
FEW = ["--rows", "20000"]
GALLERY = {  # what makes it quick, and a word of what it prints
    "routes": (FEW, "sd"),
    "lateness": (FEW, "sd"),
    "made_up_time": (FEW, "p_loo"),
    "return_time": (FEW, "sd"),
    "cancellations": (FEW, "sd"),
    "on_disk": (FEW, "sd"),
    "wrong_run": (["--rows", "5000"], "Gradient noise explains it"),
    "wells": (["--steps", "200"], "crossings"),
    "network": (["--rows", "2000"], "R-hat"),
    "item_response": (["--quick"], "answers of 60 persons"),
    "topics": (["--quick", "--draws", "4"], "peak memory"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.filterwarnings("ignore::UserWarning")  # on few rows the warm-up has a word to say
@pytest.mark.parametrize("name", GALLERY)
def test_script(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mpl, "use", lambda backend: None)
    monkeypatch.syspath_prepend(EXAMPLES)
    quickly, told = GALLERY[name]
    picture = tmp_path / f"picture.{'gif' if name == 'wells' else 'png'}"
    monkeypatch.setattr(sys, "argv", [name, *quickly, "--output", str(picture)])
    with mpl.rc_context({"backend": "Agg"}):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    pyplot.close("all")
    assert picture.stat().st_size > 10_000
    assert told in capsys.readouterr().out
    if name == "wells":
        assert picture.with_suffix(".png").stat().st_size > 10_000
        assert Image.open(picture).n_frames == 100


def test_every_script_has_a_page():
    elsewhere = {"flights", "nycflights"}  # on another page, or of use to these
    scripts = {p.stem for p in EXAMPLES.glob("*.py")} - elsewhere
    pages = {p.stem.replace("-", "_") for p in (EXAMPLES.parent / "docs/gallery").glob("*.md")}
    assert scripts == set(GALLERY) == pages - {"index"}


def test_the_animation_is_small_and_shows_the_chain_in_orange():
    with Image.open(EXAMPLES.parent / "docs/gallery/wells.gif") as wells:
        assert wells.n_frames == 100
        assert Path(wells.filename).stat().st_size < 1_500_000
        wells.seek(30)
        pixels = np.asarray(wells.convert("RGB"), int)
    far = np.abs(pixels - (0xD9, 0x82, 0x2B)).max(-1)
    assert (far < 20).sum() > 30  # a small palette may lack it
