r"""Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma sampler*: the
five-well potential (appendix D) and naive stochastic slice sampling beside the stochastic
Laplacian HMC (Figure 7, appendices M and N).

**Five wells.** Chains of SGNHT and of SGMGT with a = 1 and a = 2, with and without the "D" noise,
start in the deepest well with gradients that carry normal noise. Appendix D gives the potential
and no more. The rest is taken from the paper's settings for the discriminative RBM where it has
them: sigma_p = 10, gamma = 1, m = 1, c = 3 for a = 1 and 5 for a = 2, fresh momenta and
thermostats every 100 steps, and sigma_theta = sigma_xi = 0.1 for "D". SGNHT draws nothing afresh;
SGMGT with a = 1/2 is SGNHT that does, and separates the effect of the kinetics from that of fresh
draws. The gradient's noise has standard deviation 2. Two more settings change one thing each: no
noise, or sigma_p = 1. All samplers run at all step sizes; each is
judged at its own best.

**Regression.** One coefficient, 100 rows, minibatches of 30, 2,000 iterations; the step size 0.1,
the friction 7 and the softening 1 are the paper's. It is silent on the covariates (standard
normal here), the prior (standard normal), the steps an iteration (10) and the mass (1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import output
from scipy.stats import norm
from zhang2017_regression import STEP_SIZE, regression
from zhang2017_wells import STEP_SIZES, Score, five_wells


def draw(scores: Mapping[str, Score], num_steps: int, draws: Mapping[str, np.ndarray]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for k, (name, s) in enumerate(scores.items()):
        style = {"color": f"C{k}", "label": name, "ls": "--" if "D" in name else "-"}
        axes[0].errorbar(STEP_SIZES, *s.crossings, marker="o", ms=3, capsize=2, **style)
        axes[1].errorbar(STEP_SIZES, *s.distance, marker="o", ms=3, capsize=2, **style)
    axes[0].set(xscale="log", yscale="log", xlabel="step size h")
    axes[0].set(ylabel="crossings in 1,000 steps", title="Five wells: crossings", ylim=(0.02, 300))
    axes[0].legend(fontsize=8, ncols=2, loc="upper left")
    axes[1].set(xscale="log", xlabel="step size h", ylabel="total variation")
    axes[1].set(title=f"Five wells: distance after {num_steps} steps")
    grid = np.linspace(-6, 6, 121)
    middle = (grid[1:] + grid[:-1]) / 2
    shown = ["naive slices", f"Laplacian, h = {STEP_SIZE:g}", "SGLaplaceHMC"]
    for k, name in enumerate(shown):
        height = np.histogram(draws[name], grid, density=True)[0]
        axes[2].plot(middle, height, color=f"C{k}", label=name)
    axes[2].plot(middle, norm.pdf(middle), "--", color="grey", label="exact")
    axes[2].set(xlabel="coefficient, posterior standard deviations", ylabel="density")
    axes[2].set(title="Regression, minibatches of 30 (Fig. 7)", ylim=(0, 0.5))
    axes[2].legend(fontsize=8)
    return figure


def main() -> None:
    quick = output.arguments(__doc__).quick
    output.print_title("Zhang, Chen, Gan, Henao and Carin (2017): synthetic experiments")
    scores, num_steps = five_wells(quick)
    draws = regression(quick)
    if not quick:
        output.save(draw(scores, num_steps, draws), "zhang2017")


if __name__ == "__main__":
    main()
