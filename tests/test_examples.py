"""The scripts of the gallery run on small data."""

import runpy
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--rows", "20000"]
GALLERY = {  # arguments for a short run, and a word of the output
    "routes": (SMALL, "sd"),
    "lateness": (SMALL, "sd"),
    "made_up_time": (SMALL, "p_loo"),
    "return_time": (SMALL, "sd"),
    "cancellations": (SMALL, "sd"),
    "on_disk": (SMALL, "sd"),
    "wrong_run": (["--rows", "5000"], "Gradient noise explains it"),
    "wells": (["--steps", "200"], "crossings"),
    "network": (["--rows", "2000"], "R-hat"),
    "item_response": (["--quick"], "answers of 60 persons"),
    "topics": (["--quick", "--draws", "4"], "peak memory"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.filterwarnings("ignore::UserWarning")  # small data need other settings
@pytest.mark.parametrize("name", GALLERY)
def test_gallery_script_with_small_data_draws_a_picture(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mpl, "use", lambda backend: None)
    monkeypatch.syspath_prepend(EXAMPLES)
    arguments, output_word = GALLERY[name]
    picture = tmp_path / f"picture.{'gif' if name == 'wells' else 'png'}"
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--output", str(picture)])
    with mpl.rc_context({"backend": "Agg"}):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    pyplot.close("all")
    assert picture.stat().st_size > 10_000
    assert output_word in capsys.readouterr().out
    if name == "wells":
        assert picture.with_suffix(".png").stat().st_size > 10_000
        assert Image.open(picture).n_frames == 100


def test_gallery_scripts_all_have_a_page():
    elsewhere = {"flights", "nycflights"}  # on another page, or imported by these
    scripts = {p.stem for p in EXAMPLES.glob("*.py")} - elsewhere
    pages = {p.stem.replace("-", "_") for p in (EXAMPLES.parent / "docs/gallery").glob("*.md")}
    assert scripts == set(GALLERY) == pages - {"index"}


def test_gallery_animation_is_small_and_shows_the_chain():
    with Image.open(EXAMPLES.parent / "docs/gallery/wells.gif") as wells:
        assert wells.n_frames == 100
        assert Path(wells.filename).stat().st_size < 1_500_000
        wells.seek(30)
        pixels = np.asarray(wells.convert("RGB"), int)
    color_difference = np.abs(pixels - (0xD9, 0x82, 0x2B)).max(-1)
    assert (color_difference < 20).sum() > 30  # the orange of the chain, to the palette's accuracy
