"""The paths that the page "Architecture" lists are those that a run takes."""

import re
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

import numpyro_sgmcmc
from numpyro_sgmcmc import SGHMCSplit, bias_report

ROOT = Path(__file__).parents[2]
PACKAGE = Path(numpyro_sgmcmc.__file__).parent
PAGE = ROOT / "docs/development.md"
MAX_FILES = {"step": 10, "warm-up": 14, "report": 8}


def model(x, y, batch_size=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("observations", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ slope), obs=y[i])


def listed_path(name):
    """Read the numbered functions of a path, and the files that the page names besides."""
    section = re.split(rf"\n### The path of a {name}\n", PAGE.read_text())[1].split("\n### ")[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", section, re.MULTILINE)
    further = re.findall(r"`([\w/]+\.py)`", section.split("\nFurther files")[1])
    return steps, further


class CallRecorder:
    """Records the package's functions that are called below each start, in order of first call."""

    def __init__(self, *starts):
        self.below = {start: {start: 0} for start in starts}

    def __call__(self, frame, event, arg):
        if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        function = self.name(frame)
        while frame is not None:
            is_ours = frame.f_code.co_filename.startswith(str(PACKAGE))
            if is_ours and (order := self.below.get(self.name(frame))) is not None:
                order.setdefault(function, len(order))
            frame = frame.f_back

    @staticmethod
    def name(frame):
        path = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
        return path, frame.f_code.co_qualname.split(".<locals>")[0]

    def __enter__(self):
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def recorded():
    """Record the calls of a warm-up, of an iteration and of a report, without compiled programs."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 3)).astype(np.float32)
    y = (rng.random(2000) < 0.5).astype(np.int32)
    mcmc = MCMC(
        SGHMCSplit(model),
        num_warmup=20,
        num_samples=60,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    starts = {name: listed_path(name)[0][0] for name in MAX_FILES}
    jax.clear_caches()
    with CallRecorder(*starts.values()) as recorder:
        mcmc.run(jax.random.key(0), x, y, batch_size=100)
        str(bias_report(mcmc))
    return {name: recorder.below[start] for name, start in starts.items()}


@pytest.mark.parametrize("name", MAX_FILES)
def test_architecture_path_is_the_one_a_run_takes(recorded, name):
    steps, _ = listed_path(name)
    order = recorded[name]
    assert len(steps) > 4
    assert len({path for path, _ in steps}) <= MAX_FILES[name]
    assert [function for function in steps if function not in order] == []
    calls = [order[function] for function in steps]
    assert calls == sorted(calls)


@pytest.mark.parametrize("name", MAX_FILES)
def test_architecture_path_names_every_file_a_run_enters(recorded, name):
    steps, further = listed_path(name)
    entered = {path for path, _ in recorded[name]}
    assert entered - {path for path, _ in steps} - set(further) == set()
