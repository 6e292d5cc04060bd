"""Whether the docs name files that are there and every public name, and whether their code runs."""

import importlib
import inspect
import re
import runpy
import warnings
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import is_typeddict

import jax
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_sgmcmc.kernel import Options, SGMCMCKernel
from tests.documentation.test_site import SEARCHES

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "numpyro_sgmcmc", ROOT)
PUBLIC = ("", ".diagnostics", ".dynamics", ".errors", ".kernel", ".metrics", ".schedules")


def named_files(text):
    """Paths in backquotes that look like a file or a folder of this project."""
    found = re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|png|toml))?)`", text)
    return [path for path in found if not path.startswith(("http", "."))]


@pytest.mark.parametrize("page", ["docs/development.md"])
def test_named_files_exist(page):
    files = named_files((ROOT / page).read_text())
    assert len(files) > 40
    missing = [f for f in files if not any((folder / f).exists() for folder in FOLDERS)]
    assert not missing


def test_code_fits_its_box():
    """A box of the site is 90 characters wide on a desktop; what is longer must be scrolled."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    box = r"^```(?:python|\{code-cell\} ipython3)\n(?:---\n.*?^---\n)?(.*?)^```"
    code = {p: re.findall(box, p.read_text(), re.M | re.S) for p in pages}
    lines = [(p.name, line) for p in pages for line in "".join(code[p]).splitlines()]
    assert len(lines) > 400
    assert [(page, line) for page, line in lines if len(line) > 90] == []


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.NonIdentifiedPosteriorWarning")
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


def test_readers_words_are_on_the_pages_of_their_subject():
    for word, address in SEARCHES.items():
        page = ROOT / "docs" / address.replace(".html", ".md")
        assert word.lower() in page.read_text().lower(), (word, address)


def test_options_page_lists_every_option():
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs/options.md").read_text()))
    assert set(Options.__dataclass_fields__) - named == set()


def documented_names():
    """What the reference pages show, by the name under which they do."""
    pages = sorted((ROOT / "docs/reference").glob("*.md"))
    entry = re.compile(r"^   (numpyro_sgmcmc\.\S+)$", re.MULTILINE)
    return [name for page in pages for name in entry.findall(page.read_text())]


def public_names():
    """Each public object by its names, of which some have two."""
    names = {}
    for subpackage in PUBLIC:
        module = importlib.import_module(f"numpyro_sgmcmc{subpackage}")
        for name in module.__all__:
            names.setdefault(id(getattr(module, name)), []).append(f"{module.__name__}.{name}")
    return list(names.values())


def test_the_reference_is_complete_and_shows_nothing_private():
    shown = Counter(documented_names())
    public = public_names()
    times = {names[0]: sum(shown[name] for name in names) for names in public}
    assert {name: n for name, n in times.items() if n != 1} == {}
    assert set(shown) - {name for names in public for name in names} == set()


def test_examples_of_the_reference_run():
    path = ROOT / "docs/reference/examples.py"
    examples = re.findall(r"^# -- (\S+)$", path.read_text(), re.MULTILINE)
    assert set(examples) <= set(documented_names())
    without = []
    for names in public_names():
        module, name = names[0].rsplit(".", 1)
        public = getattr(importlib.import_module(module), name)
        is_kernel = inspect.isclass(public) and SGMCMCKernel in public.__mro__[1:]
        is_result = inspect.isclass(public) and module == "numpyro_sgmcmc.diagnostics"
        needs_example = inspect.isfunction(public) or is_kernel or is_result
        if needs_example and not set(names) & set(examples) and ">>>" not in inspect.getdoc(public):
            without.append(names[0])
    assert without == []
    mpl.use("Agg")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # toy sizes cause warnings
        runpy.run_path(str(path))
    pyplot.close("all")


def test_every_argument_is_described():
    described_names = re.compile(r":param (?:\w+ )?\*?(\w+):|^- \*\*(\w+)\*\*", re.MULTILINE)
    as_mcmc = inspect.signature(MCMC).parameters  # which NumPyro describes
    for names in public_names():
        module, name = names[0].rsplit(".", 1)
        public = getattr(importlib.import_module(module), name)
        is_exception = isinstance(public, type) and issubclass(public, (BaseException, Enum))
        if is_typeddict(public) or is_exception:
            continue
        described = ["".join(found) for found in described_names.findall(inspect.getdoc(public))]
        taken = list(inspect.signature(public).parameters)
        if isinstance(public, type) and issubclass(public, SGMCMCKernel):
            # What kernels share is described once, in `Options` and `SGHMCSplit`.
            shared = set(Options.__dataclass_fields__)
            if "see :class:`~numpyro_sgmcmc.SGHMCSplit`" in inspect.getdoc(public):
                shared |= {"model", "potential_fn"}
            taken = [x for x in taken if x not in shared] + ["options"]
        if isinstance(public, type) and issubclass(public, MCMC):
            taken = [x for x in taken if x in described or x not in as_mcmc]
        assert described == taken, names[0]
