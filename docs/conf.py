"""Configuration of the site, which `make docs` builds."""

import hashlib
import inspect
import os
import re
import sys
from pathlib import Path

from docutils.nodes import reference
from sphinx.addnodes import desc_signature
from sphinx.util.inspect import stringify_signature

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")


import numpyro_sgmcmc  # noqa: E402
from numpyro_sgmcmc.kernel import Options, SGMCMCKernel  # noqa: E402

project = "numpyro-sgmcmc"
copyright = "the numpyro-sgmcmc authors"
language = "en"
version = release = numpyro_sgmcmc.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "mathml",
]
exclude_patterns = ["_build", "_templates"]

# Tutorials are notebooks. Their outputs are cached until the code of a page, the package or the
# style of the figures changes.
STYLE = HERE / "figures/style.mplstyle"
sources = hashlib.sha256()
for path in [STYLE, *sorted((HERE.parent / "numpyro_sgmcmc").rglob("*.py"))]:
    sources.update(path.read_bytes())
BUILD = HERE / "_build"
nb_execution_mode = "cache"
nb_execution_cache_path = str(BUILD / f"executed/{sources.hexdigest()[:16]}")
nb_execution_timeout = 900  # seconds
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_ipywidgets_js = {}  # loaded from elsewhere
# What the kernels inherit: the style, SVG figures, and no progress bars.
os.environ |= {
    "MATPLOTLIBRC": str(STYLE),
    "IPYTHONDIR": str(BUILD / "ipython"),
    "PYTHONWARNINGS": "ignore:IProgress not found",
    "TQDM_DISABLE": "1",
}
profile = BUILD / "ipython/profile_default/ipython_kernel_config.py"
profile.parent.mkdir(parents=True, exist_ok=True)
profile.write_text(
    "c.InlineBackend.figure_formats = {'svg'}\n"
    "c.HistoryManager.enabled = False\n"
    "c.IPKernelApp.log_level = 'ERROR'\n"
)
templates_path = ["_templates"]
html_math_renderer = "mathml"
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"^(?!numpyro_sgmcmc\.).*"),  # other projects' names
    # not public
    ("py:.*", r"^numpyro_sgmcmc\.(adaptation|data|model|sampling|[a-z_]+\.[a-z_]+)\..*"),
]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3  # vocabulary: ok

# One page for each name in an `autosummary` list, in reference/api.
autosummary_generate = True
NO_CONSTRUCTOR = ":exclude-members: __init__, __new__"
parts = (HERE / "reference/examples.py").read_text().split("\n# -- ")[1:]
autosummary_context = {
    "figures": {
        "numpyro_sgmcmc.diagnostics.plot_bias": "/figures/bias.png",
        "numpyro_sgmcmc.diagnostics.plot_warmup": "/figures/warmup.png",
        "numpyro_sgmcmc.suggest_subsample_size": "/figures/batch-size.png",
    },
    "examples": {name: lines for name, *lines in (part.strip().split("\n") for part in parts)},
    "autodoc_options": {  # by object, the members shown on its page
        f"numpyro_sgmcmc.{name}": options
        for name, options in {
            "CheckpointedMCMC": [
                ":members: has_checkpoint, run, resume, get_samples, running_mean, "
                "running_variance, print_summary"
            ],
            "HostArray": [":members: from_parquet"],
            "diagnostics.BiasReport": [
                ":members: sites, diagnosis, summary_line, is_ok, is_flagged, "
                "has_many_divergences, mean_bias, sd_inflation, r_hat, ess, to_dataframe, "
                "to_dataset, add_to"
            ],
            "diagnostics.PredictiveSummary": [":members: to_dataset"],
            "diagnostics.Refinement": [":members: is_visible"],
            "diagnostics.SubsampleSizeSuggestion": [":members: best"],
            "dynamics.Dynamics": [":members:", NO_CONSTRUCTOR],
            "kernel.KernelOptions": [NO_CONSTRUCTOR],
            "kernel.Options": [NO_CONSTRUCTOR],
            "kernel.SGMCMCKernel": [
                ":members: model, options, settings, dynamics, integrator, noise_stats, init, "
                "sample"
            ],
        }.items()
    },
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
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


def _without_shared_options(app, what, name, obj, options, signature, returns):
    """A kernel's signature without the keywords of all kernels, which are described once."""
    if what != "class" or not issubclass(obj, SGMCMCKernel) or obj is SGMCMCKernel:
        return signature and (re.sub(r"<function (\w+)>", r"\1", signature), returns)
    keywords = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(obj).parameters
    own = [p for name, p in parameters.items() if name not in Options.__dataclass_fields__]
    return stringify_signature(inspect.Signature([*own, keywords])), returns


# Pages of other projects, by project and object. Their inventories are not read, so that the site
# builds without a network.
NUMPYRO, JAX = "https://num.pyro.ai/en/stable", "https://docs.jax.dev/en/latest/_autosummary"
ARVIZ = "https://python.arviz.org/en/v0.22.0/api/generated"
PANDAS = "https://pandas.pydata.org/docs/reference/api"
XARRAY = "https://docs.xarray.dev/en/stable/generated"
ELSEWHERE = {
    ("arviz", "InferenceData"): f"{ARVIZ}/arviz.InferenceData.html",
    ("jax", "Array"): f"{JAX}/jax.Array.html",
    ("jax", "Mesh"): f"{JAX}/jax.sharding.Mesh.html",
    ("jax", "jit"): f"{JAX}/jax.jit.html",
    ("numpyro", "HMCGibbs"): f"{NUMPYRO}/mcmc.html#numpyro.infer.hmc_gibbs.HMCGibbs",
    ("numpyro", "MCMC"): f"{NUMPYRO}/mcmc.html#numpyro.infer.mcmc.MCMC",
    ("numpyro", "Predictive"): f"{NUMPYRO}/utilities.html#numpyro.infer.util.Predictive",
    ("numpyro", "reparam"): f"{NUMPYRO}/handlers.html#numpyro.handlers.reparam",
    ("pandas", "DataFrame"): f"{PANDAS}/pandas.DataFrame.html",
    ("xarray", "DataTree"): f"{XARRAY}/xarray.DataTree.html",
    ("xarray", "Dataset"): f"{XARRAY}/xarray.Dataset.html",
}


def _link_elsewhere(app, env, node, content):
    """A link to another project's page."""
    names = node.get("reftarget", "").split(".")
    address = ELSEWHERE.get((names[0], names[-1]))
    return address and reference("", "", content, refuri=address, internal=False)


def _with_both_names(app, doctree):
    """Anchors by both import paths: the pages of the source use one of them for a module."""
    paths = {"numpyro_sgmcmc", "numpyro_sgmcmc.diagnostics"}
    for signature in doctree.findall(desc_signature):
        for other in paths - {signature["module"]} if signature["module"] in paths else ():
            signature["ids"].append(f"{other}.{signature['fullname']}")


def setup(app):
    app.connect("source-read", _with_files)
    app.connect("doctree-read", _with_both_names)
    app.connect("autodoc-process-signature", _without_shared_options)
    app.connect("missing-reference", _link_elsewhere)
