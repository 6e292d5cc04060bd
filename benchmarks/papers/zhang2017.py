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

import output
from zhang2017_regression import regression
from zhang2017_wells import five_wells


def main() -> None:
    quick = output.arguments(__doc__).quick
    output.print_title("Zhang, Chen, Gan, Henao and Carin (2017): synthetic experiments")
    five_wells(quick)
    regression(quick)


if __name__ == "__main__":
    main()
