"""What the warm-up's shared part is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.data.minibatch import IID, MinibatchScheme
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.compensation import GradientNoise
from numpyro_sgmcmc.posterior.estimators import Estimator, Plain
from numpyro_sgmcmc.posterior.target import Decisive, Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.findings import Finding
from numpyro_sgmcmc.warmup.local_start import LocalStart
from numpyro_sgmcmc.warmup.moment_source import MomentSource
from numpyro_sgmcmc.warmup.noise import NO_NOISE, Noise
from numpyro_sgmcmc.warmup.weighed import Weighed

__all__ = ["Adaptation", "Settings", "nothing_to_adapt"]


@dataclass(frozen=True)
class Settings:
    """
    - **dynamics** - the SDE.
    - **scheme** - name of the integrator.
    - **locate** - the SDE for given coordinates.
    - **step_size** - the user's step size, or None to choose it.
    - **is_step_fixed** - whether that is the one of all steps: no schedule, and not traced.
    - **num_steps** - the user's steps an iteration, or None to choose.
    - **gradient** - the user's estimator, or None to choose it.
    - **minibatch** - the user's way to visit the rows, or None to choose it.
    - **inverse_mass_matrix** - the user's, shape ``(d,)`` or ``(d, d)``, or None to adapt it.
    - **is_dense** - whether the adapted one is dense.
    - **is_by_site** - whether coordinates must be the sites' own, each in its unit: nothing besides
      a diagonal is adapted then.
    - **mask** - blocks of a structured dense one, shape ``(d, d)``, or None.
    - **target_bias** - allowed relative error of posterior sds.
    - **noise_compensation** - whether the gradient's noise is taken from what is injected.
    - **chains_in_modes** - whether chains start in each of the modes found.
    - **has_start** - whether the first start is the user's.
    - **has_region** - whether pilot chains have found one in which means can be predicted.
    """

    dynamics: Dynamics
    scheme: str
    locate: Callable[[Whitening], Dynamics]
    step_size: float | None
    is_step_fixed: bool
    num_steps: int | None
    gradient: Estimator | None
    minibatch: MinibatchScheme | None
    inverse_mass_matrix: np.ndarray | None
    is_dense: bool
    is_by_site: bool
    mask: np.ndarray | None
    target_bias: float
    noise_compensation: bool
    chains_in_modes: bool
    has_start: bool
    has_region: bool = True

    @property
    def leaves_nothing_to_find(self) -> bool:
        """Whether all that a warm-up looks for is given: then it need not look for it."""
        given = (self.step_size, self.num_steps, self.gradient, self.minibatch)
        has_all = all(x is not None for x in (*given, self.inverse_mass_matrix))
        # Control variates need an anchor in the posterior's midst.
        has_anchor = self.has_start or not (self.gradient and self.gradient.has_anchor)
        return has_all and has_anchor and not self.noise_compensation


class Adaptation(NamedTuple):
    """
    - **whitening** - coordinates and the full gradient at their anchor.
    - **step_size** - step size.
    - **num_steps** - steps an iteration.
    - **estimator** - how the gradient is estimated.
    - **minibatch** - how the rows are visited.
    - **gradient_noise** - covariance of the gradient's noise, if it is compensated; else None.
    - **noise** - the noise measured at typical positions.
    - **moment_source** - where the moments come from that tell the bias.
    - **allowed_excess** - excess of temperature at which a chain in warm-up does not shorten its
      step; None where the step size is the user's.
    - **relaxation_time** - time between about independent draws.
    - **is_given** - whether nothing was looked for: the chains then start where the initialisation
      strategy says.
    - **decisive** - rows that are in every minibatch, by plate.
    - **findings** - what makes the posterior wrong whatever the chains say.
    - **other_modes** - coordinates about other modes, in which chains start in turn.
    - **has_region** - whether pilot chains have found a single region.
    - **locals** - where the local values start, a
      :class:`~numpyro_sgmcmc.warmup.local_start.LocalStart`; None where there are none.
    - **weighed** - what these choices were made by; None where nothing was looked for.
    """

    whitening: Whitening
    step_size: float
    num_steps: int
    estimator: Estimator
    minibatch: MinibatchScheme
    gradient_noise: GradientNoise | None
    noise: Noise
    moment_source: MomentSource
    allowed_excess: float | None
    relaxation_time: float
    is_given: bool = False
    decisive: Decisive = ()
    findings: tuple[Finding, ...] = ()
    other_modes: tuple[Whitening, ...] = ()
    has_region: bool = True
    locals: LocalStart | None = None
    weighed: Weighed | None = None


def nothing_to_adapt(target: Target, settings: Settings) -> Adaptation:
    """What chains of a model without latent values share: nothing that matters."""
    nowhere = np.zeros(0)
    whitening = Whitening(nowhere, np.zeros((0, 0)) if settings.is_dense else nowhere, nowhere)
    return Adaptation(
        whitening=whitening.cast(target.dtype),
        step_size=settings.step_size or 1.0,
        num_steps=settings.num_steps or 1,
        estimator=Plain(),
        minibatch=settings.minibatch or IID(),
        gradient_noise=None,
        noise=NO_NOISE,
        moment_source=MomentSource(),
        allowed_excess=None,
        relaxation_time=1.0,
    )
