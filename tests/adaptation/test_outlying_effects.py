"""Effects of small groups stay in the posterior although minibatches give their rows large weights.

A row far from the location of its group has a gradient that grows exponentially as the log scale
falls.
"""

import jax
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit, bias_report
from tests.adaptation.scales_of_groups import make_data, model
from tests.contract.kernels import quietly


@pytest.mark.slow
def test_no_draw_is_far_outside_of_the_posterior():
    mcmc = quietly(
        SGHMCSplit(model),
        num_warmup=200,
        num_samples=250,
        num_chains=4,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(0), *make_data(), batch_size=1_000)
    assert mcmc.sampler.adaptation.included_rows
    for site in ("location", "log_scale"):
        draws = np.asarray(mcmc.get_samples()[site])
        lower, median, upper = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
        sds = (upper - lower) / 1.349  # of a normal with these quartiles
        # Of groups without rows, the posterior has heavier tails than a normal.
        assert (np.abs(draws - median) < 10.0 * sds).all()
    assert not bias_report(mcmc).excursions
