"""Configuration of the site, which `make docs` builds."""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")


import numpyro_sgmcmc  # noqa: E402

project = "numpyro-sgmcmc"
copyright = "the numpyro-sgmcmc authors"
language = "en"
version = release = numpyro_sgmcmc.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx_copybutton",
    "mathml",
]
exclude_patterns = ["_build"]
html_math_renderer = "mathml"
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"^(?!numpyro_sgmcmc\.).*"),  # other projects' names
    ("py:.*", r"^numpyro_sgmcmc\.(adaptation|data|model|sampling)\..*"),  # not public
]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3  # vocabulary: ok

# A signature of twenty keywords is read a line each; what they mean stands below it.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
add_module_names = False
python_use_unqualified_type_names = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
highlight_language = "default"  # Python where it is Python

# `make docs-links`: only addresses elsewhere need the network.
linkcheck_anchors = False  # vocabulary: ok
linkcheck_timeout = 20

html_theme = "furo"
html_title = "numpyro-sgmcmc"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


FILES = {  # files of the repository that are pages of the site, too
    "contributing": "CONTRIBUTING.md",
    "conduct": "CODE_OF_CONDUCT.md",
    "changelog": "CHANGELOG.md",
}


def _with_files(app, docname, source):
    """The text of such a file for its page, and links to it from other pages."""
    text = source[0]
    if docname in FILES:
        text = (HERE.parent / FILES[docname]).read_text()
        app.env.note_dependency(str(HERE.parent / FILES[docname]))
        text = text.replace("](docs/", "](")
    for page, file in FILES.items():
        text = re.sub(rf"\]\((?:\.\./)?{re.escape(file)}", f"]({page}.md", text)
    source[0] = text


def setup(app):
    app.connect("source-read", _with_files)
