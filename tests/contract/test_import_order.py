"""ArviZ converts a run whether ArviZ or NumPyro is imported first."""

import subprocess
import sys

import pytest

from tests.processes import ended, environment

RUN = """
import jax
import numpyro
import numpyro.distributions as dist
from numpyro_sgmcmc import SGHMCSplit

def model():
    numpyro.deterministic("x", 1.0)

mcmc = MCMC(SGHMCSplit(model), num_warmup=1, num_samples=3, progress_bar=False)
mcmc.run(jax.random.key(0))
print(az.from_numpyro(mcmc, log_likelihood=False)["posterior"]["x"].shape)
"""

IMPORTS = {
    "arviz first": "import arviz as az\nfrom numpyro.infer import MCMC",
    "numpyro first": "from numpyro.infer import MCMC\nimport arviz as az",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", IMPORTS)
def test_from_numpyro_converts_a_run_in_any_import_order(order):
    command = [sys.executable, "-c", IMPORTS[order] + RUN]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ended(process := subprocess.Popen(command, env=environment(), **pipes)):
        out, err = process.communicate(timeout=120)
    assert out.split("\n")[0] == "(1, 3)", err
