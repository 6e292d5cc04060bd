"""The code of the site's pages runs, block after block, at toy size."""

import re
import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot

from tests.quick import quick_if

DOCS = Path(__file__).parents[1] / "docs"
ROWS = """
import jax
X = jax.random.normal(jax.random.key(0), (2_000, 3))
y = jax.random.bernoulli(jax.random.key(1), 0.3, (2_000,)).astype("int32")
"""
FITTED = "mcmc = run_of_start()"
BEFORE = {"index.md": ROWS, "understand/how-it-works.md": FITTED}  # what a page takes for granted
PAGES = {
    "index.md": {},
    "understand/how-it-works.md": {},
    "start.md": {"50_000": "2_000", "500, num_samples=1000": "20, num_samples=100"},
    "large-data.md": {
        "200_000": "4_000",
        "=1000)": "=100)",
        "=1000, num_chains": "=100, num_chains",
    },
    "howto/from-nuts.md": {},
    "howto/from-others.md": {"20_000": "4_000"},
    "howto/biased.md": {},
    "howto/many-groups.md": {
        "2_000, 60_000": "40, 4_000",
        "batch_size=2_000": "batch_size=400",
        "last_state, 3000": "last_state, 300",
    },
    "howto/save-and-load.md": {"20_000": "4_000"},
    "howto/predict.md": {},
    "howto/compare.md": {"10_000": "3_000"},
    "howto/own-sampler.md": {"20_000": "4_000"},
}
TOLD = {  # what a page says, and whether it came out so
    "howto/from-nuts.md": lambda page: (
        np.abs(page["shift"]).max() < 0.25
        and np.abs(page["b"]["beta"].std(0) / page["a"]["beta"].std(0) - 1).max() < 0.15
    ),
    "howto/biased.md": lambda page: (
        page["bias_report"](page["wrong"]).is_flagged
        and page["bias_report"](page["right"]).is_fine
        and page["finer"].is_visible
    ),
    "howto/compare.md": lambda page: (
        0.0
        < (page["found"]["parabola"] - page["found"]["line"]).subsampling_se
        < page["found"]["line"].subsampling_se
    ),
}


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run(page):
    """The names that a page's blocks leave behind."""
    names = {"__name__": "page", "run_of_start": lambda: run("start.md")["mcmc"]}
    exec(BEFORE.get(page, ""), names)
    found = blocks(page)
    assert found
    for number, code in enumerate(found):
        for large, small in PAGES[page].items():
            code = code.replace(large, small)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # toy sizes have warnings of their own
            exec(compile(code, f"{page}, block {number}", "exec"), names)
    return names


def test_every_page_of_these_folders_is_run():
    found = {str(p.relative_to(DOCS)) for p in (DOCS / "howto").glob("*.md")}
    assert found == {page for page in PAGES if page.startswith("howto/")}


@pytest.mark.parametrize("page", [quick_if(p == "start.md", p, id=p) for p in PAGES])
def test_code_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    mpl.use("Agg")
    names = run(page)
    pyplot.close("all")
    assert TOLD.get(page, lambda page: True)(names)


def test_sizes_are_those_of_the_pages():
    for page, sizes in PAGES.items():
        code = "".join(blocks(page))
        assert [large for large in sizes if large not in code] == []
