"""What a draw costs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_sgmcmc.diagnostics.runs import check_finished_run, check_has_data

__all__ = ["ess_per_gradient"]


def ess_per_gradient(mcmc: MCMC) -> dict[str, np.ndarray]:
    """Effective draws for each minibatch gradient, warm-up not counted.

    Unlike draws a second it does not depend on the machine; unlike draws an iteration it sees how
    many steps an iteration takes. Gradients that a scheme takes on one minibatch count one each;
    the one at the anchor that control variates take beside each does not.

    :param mcmc: a run of one of this package's kernels.
    :return: for each latent site an array of its shape, of effective sample sizes over gradients.
    :raises ValueError: for a run of another kernel, or before a run.
    """
    kernel = check_finished_run(mcmc, "ess_per_gradient")
    check_has_data(kernel, "ess_per_gradient")
    num_steps = int(np.max(mcmc.last_state.num_steps))
    a_step = kernel.dynamics.make_step(kernel.integrator).num_gradients
    gradients = mcmc.num_chains * mcmc.num_samples * num_steps * a_step
    samples: Any = mcmc.get_samples(group_by_chain=True)
    target = kernel.potential
    if target.sites is None:
        samples = samples if isinstance(samples, dict) else {"z": samples}
    else:
        samples = {s.name: samples[s.name] for s in target.sites if s.name in samples}
    return {
        name: np.asarray(jax.tree.map(lambda x: effective_sample_size(np.asarray(x)), draws))
        / gradients
        for name, draws in samples.items()
    }
