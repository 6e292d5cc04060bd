"""The code of the site's pages runs, block after block, at toy size.

Tutorials are run by `make docs`, and by the tests of the site.
"""

import re
import textwrap
import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot

from tests.quick import quick_if

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = sorted(p for p in (DOCS / "tutorials").glob("*.md") if p.stem != "index")
ROWS = """
import jax
X = jax.random.normal(jax.random.key(0), (2_000, 3))
y = jax.random.bernoulli(jax.random.key(1), 0.3, (2_000,)).astype("int32")
"""
QUICKSTART = "globals().update(run_quickstart())"
IMPORTS = """
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_sgmcmc import SGRLD, HostArray, SGHMCSplit, ShardedArray
"""
MODEL = """
def model(X, y, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])
"""
TOPICS = """
words = jax.random.randint(jax.random.key(0), (500,), 0, 6)

def model(words, batch_size=None):
    topics = numpyro.sample("topics", dist.Dirichlet(jnp.ones(6)).expand([2]).to_event(1))
    with numpyro.plate("rows", len(words), subsample_size=batch_size) as i:
        numpyro.sample("words", dist.Categorical(topics.mean(0)), obs=words[i])
"""
KINDS = """
def model(X, y, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    kind = numpyro.sample("k", dist.Bernoulli(0.5))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta + kind), obs=y[i])
"""
BEFORE = {  # what a page takes for granted, or one of its blocks
    "../README.md": ROWS,
    "index.md": ROWS,
    "howto/biased.md": QUICKSTART,
    "howto/save-and-load.md": QUICKSTART,
    "checkpoints.md": IMPORTS + ROWS + MODEL,
    "choosing.md": IMPORTS + ROWS,
    ("choosing.md", 0): TOPICS,
    ("choosing.md", 1): "K = 3; numpyro.handlers.seed(rng_seed=0).__enter__()",
    "discrete-latents.md": IMPORTS + "from numpyro.contrib.control_flow import scan",
    ("discrete-latents.md", 3): ROWS + KINDS,
    "local-latents.md": IMPORTS + ROWS + "y = y + X[:, 0]",
    "scaling.md": IMPORTS + ROWS + MODEL + "key = jax.random.key(0)",
    ("scaling.md", 2): "np.save('X.npy', X), np.save('y.npy', y)",
    "warmup.md": IMPORTS + ROWS + MODEL,
}
SKETCHES = {  # blocks that leave something to the reader, or need several hosts
    ("local-latents.md", 1),
    ("local-latents.md", 2),
    ("scaling.md", 1),
}
PAGES = {
    "../README.md": {"=1000": "=100"},
    "index.md": {},
    "start.md": {"50_000": "2_000", "500, num_samples=1000": "20, num_samples=100"},
    "large-data.md": {
        "200_000": "4_000",
        "=1000)": "=100)",
        "=1000, num_chains": "=100, num_chains",
    },
    "howto/from-nuts.md": {},
    "howto/biased.md": {},
    "howto/many-groups.md": {
        "2_000, 60_000": "40, 4_000",
        "batch_size=2_000": "batch_size=400",
        "last_state, 3000": "last_state, 300",
    },
    "howto/save-and-load.md": {},
    "howto/predict.md": {},
    "howto/own-sampler.md": {"20_000": "4_000"},
    "checkpoints.md": {
        "num_warmup=1000": "num_warmup=20",
        "num_samples=10_000": "num_samples=40",
        "num_samples=1000": "num_samples=40",
        '"w"][:, :, 17]': '"beta"][:, :, 1]',
        'var_names=["w"]': 'var_names=["beta"]',
    },
    "choosing.md": {},
    "batch-size.md": {"50_000": "5_000"},
    "discrete-latents.md": {
        "300, num_samples=1000": "20, num_samples=40",
        "500, num_samples=1000": "20, num_samples=100",
        "5_000": "1_000",
    },
    "local-latents.md": {"num_samples=1000, num_chains=4": "num_samples=40"},
    "scaling.md": {
        "=1000": "=20",
        "num_chains=4": "num_chains=2",
        "1024": "100",
        "4096": "100",
        "(4, 2)": "(1, 1)",
    },
    "warmup.md": {
        '"/path/to/a/folder"': "jax.config.jax_compilation_cache_dir",
        "0.1)": "jax.config.jax_persistent_cache_min_compile_time_secs)",
    },
}
TOLD = {  # what a page says, and whether it came out so
    "howto/from-nuts.md": lambda page: (
        np.abs(page["mean_bias"]).max() < 0.25
        and np.abs(page["b"]["beta"].std(0) / page["a"]["beta"].std(0) - 1).max() < 0.15
    ),
    "howto/predict.md": lambda page: (
        0.0 < (page["full"] - page["part"]).subsampling_se < page["full"].subsampling_se
    ),
}


def blocks(page):
    """Return the code of a page: its blocks of Python, or the cells of a notebook."""
    cell = r"^```(?:python|\{code-cell\} ipython3)\n(?:---\n.*?^---\n)?(.*?)^```"
    return re.findall(cell, (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run(page):
    """The names that a page's blocks leave behind."""
    names = {"__name__": "page", "run_quickstart": lambda: run("start.md")}
    exec(BEFORE.get(page, ""), names)
    found = blocks(page)
    assert found
    for number, code in enumerate(found):
        for large, small in PAGES[page].items():
            code = code.replace(large, small)
        if (page, number) in SKETCHES:
            compile(code, f"{page}, block {number}", "exec")
            continue
        exec(BEFORE.get((page, number), ""), names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # toy sizes cause other warnings
            exec(compile(code, f"{page}, block {number}", "exec"), names)
    return names


def test_every_page_is_run():
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    with_code = {page for page in pages if blocks(page)}
    own_tests = {"networks.md", "troubleshooting.md"}
    tutorials = {f"tutorials/{p.name}" for p in TUTORIALS}  # run when the site is built
    assert with_code - own_tests - tutorials == set(PAGES) - {"../README.md"}


@pytest.mark.parametrize("path", [DOCS / "start.md", *TUTORIALS], ids=lambda path: path.stem)
def test_tutorials_are_complete(path):
    text = path.read_text()
    for cell in re.findall(r"^```\{code-cell\} ipython3\n(.*?)^```", text, re.M | re.S):
        if re.search(r"plt\.(subplots|figure)|az\.plot|plt\.subfigures", cell):
            assert "    alt: " in cell, cell
            assert "    caption: " in cell, cell
    assert f"{{nb-download}}`{path.stem}.ipynb`" in text
    assert f"{path.stem}.md)" in (DOCS / "tutorials/index.md").read_text()
    if path in TUTORIALS:
        assert text.startswith("---\nfile_format: mystnb\n")
        assert "**Question.**" in text
        assert "## For your data" in text
        assert "$$" in text


def test_code_of_the_troubleshooting_page_compiles():
    """Its blocks are fragments of users' programs."""
    fragments = blocks("troubleshooting.md")
    assert len(fragments) == (DOCS / "troubleshooting.md").read_text().count("```python") > 0
    for number, fragment in enumerate(fragments):
        compile(textwrap.dedent(fragment), f"troubleshooting.md, block {number}", "exec")


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
