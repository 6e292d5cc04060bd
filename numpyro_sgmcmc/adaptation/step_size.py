"""Choice of the step size: as long as integrator, curvature, noise and means allow.

:func:`choose_step_size` starts from the integrator's default step size and applies one limit after
the other; :class:`.StepSizeTrace` lists them:

1. ``stability``: the largest preconditioned curvature;
2. ``gradient_noise``: the increase of posterior variances that gradient noise makes;
3. ``dynamics``: the discretisation error with unusual options of the kernel (a large friction, a
   small mass, a steep metric), on a standard normal;
4. ``observations``: gradients of single observations of a hierarchy, where an effect is far from
   its center;
5. ``mean_bias``: the bias of posterior means by gradient noise and by the discretisation error.

The discretisation error is exact where a step is linear in the state. The second half of this
module computes it: of draws, and of the positions at which gradients are taken. The mean of all
gradients of a stationary chain is zero, so that a mean is right where the variance at these
positions is; a scale that thousands of effects share follows their variance there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from jax.interpreters.ad import JVPTracer

from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions
from numpyro_sgmcmc.adaptation.coupling import NO_COUPLING, Coupling
from numpyro_sgmcmc.adaptation.gradient_noise import (
    GradientNoiseStats,
    measure_noise_at_coupled_draws,
    predict_mean_bias_from_noise,
    predict_mean_bias_per_variance_inflation,
)
from numpyro_sgmcmc.adaptation.settings import (
    StepSizeTrace,
    SubsamplingChoice,
    WarmupInputs,
    WarmupSettings,
)
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.errors import InvalidArgumentError

MAX_NUM_STEPS = 500
"""Most steps per draw: no limit shortens the step below 1/500 of the relaxation time."""

MONITOR_INTERVAL = 20
"""Steps between gradients on separate minibatches: they cost 5% or less of a run."""

_MAX_MONITOR_INTERVAL = 30  # where the number of steps is chosen
# Largest preconditioned curvature up to which integrators behave as on a standard normal.
_MAX_HARMLESS_CURVATURE = 3.5
# Share of the variance target that gradient noise may take: it biases means as well where it
# differs over the posterior.
_NOISE_TO_TARGET_RATIO = 0.5
_HARMLESS_BIAS_RATIO = 0.5  # of the target, below which coupled coordinates change nothing
_COVARIANCE_RELATIVE_ERROR = 0.03  # of the noise covariance that is compensated
_NOISE_SHRINK_FACTOR, _MEAN_BIAS_SHRINK_FACTOR = 0.99, 0.97  # resolution of the step size
# The same for the discretisation error; a simulation costs more than the formula.
_SIMULATED_SHRINK_FACTOR, _ANALYTIC_SHRINK_FACTOR = 0.6, 0.9
_MIN_STEP_SIZE_RATIO = 0.6**20  # to the first step size, at which the search ends with an error
# Share of the SD target that a known discretisation error may take; others come on top of it.
_ANALYTIC_BIAS_FRACTION = 0.5
# Modulus of the slowest eigenvalue of a step beyond which float32 rounding hides its effect, and
# beyond which it hides the variance of draws.
_MAX_RESOLVED_EIGENVALUE, _MAX_ACCURATE_EIGENVALUE = 1.0 - 1e-6, 1.0 - 1e-5
# Decay of the correlation in a step by the SDE beyond which an eigenvalue of one is not rounding.
_MIN_CORRELATION_DECAY = 1e-4
# Size of a simulation of the discretisation error: coordinates of all chains, chains, steps.
_NUM_SIMULATED_COORDINATES, _SIMULATED_CHAINS, _SIMULATED_STEPS = 4096, (4, 1024), (64, 2048)


class PredictedMeanBias(NamedTuple):
    """Bias of the posterior means, in posterior SDs, as a function of the step size.

    Coordinates are those of the model, not the preconditioned ones.

    - **noise_bias_per_step_size** - bias by gradient noise over the step size, shape ``(d,)``.
    - **bias_per_variance_inflation** - bias by the discretisation error over the variance
      inflation that it makes, shape ``(d,)``.
    - **variance_inflation** - that variance inflation at **reference_step_size**; it is
      proportional to the step size to the power of **order**.
    - **coupling** - coupled coordinates, whose SDs are biased as well.
    - **inflation_per_noise_variance** - variance inflation by gradient noise over the step size.
    """

    noise_bias_per_step_size: np.ndarray = np.zeros(1)
    bias_per_variance_inflation: np.ndarray = np.zeros(1)
    variance_inflation: float = 0.0
    reference_step_size: float = 1.0
    order: int = 1
    coupling: Coupling = NO_COUPLING
    inflation_per_noise_variance: float = 0.0

    @property
    def by_noise(self) -> PredictedMeanBias:
        """The part by gradient noise."""
        return self._replace(variance_inflation=0.0)

    @property
    def by_discretisation(self) -> PredictedMeanBias:
        """The part by the discretisation error."""
        return self._replace(noise_bias_per_step_size=np.zeros(1), inflation_per_noise_variance=0.0)

    def compute_max(self, step_size: float, batch_size_factor: float = 1.0) -> float:
        """Return the largest bias of a mean, or of a coupled coordinate's SD, in posterior SDs.

        :param batch_size_factor: batch size relative to the model's.
        """
        return self.find_largest(step_size, batch_size_factor)[1]

    def find_largest(self, step_size: float, batch_size_factor: float = 1.0) -> tuple[int, float]:
        """Return the model coordinate with the largest bias, and that bias."""
        variance_inflation = (
            self.variance_inflation * (step_size / self.reference_step_size) ** self.order
        )
        by_discretisation = self.bias_per_variance_inflation * variance_inflation
        noisy_step_size = step_size / batch_size_factor
        by_noise = self.noise_bias_per_step_size * noisy_step_size
        biases = np.abs(by_noise + by_discretisation)
        coordinate = int(biases.argmax())
        by_coupling = self.coupling.compute_biases(
            variance_inflation, self.inflation_per_noise_variance * noisy_step_size
        )
        if by_coupling.max(initial=0.0) > biases[coordinate]:
            return int(self.coupling.indices[by_coupling.argmax()]), float(by_coupling.max())
        return coordinate, float(biases[coordinate])

    def limit_step_size(
        self,
        step_size: float,
        min_step_size: float,
        max_mean_bias: float,
        batch_size_factor: float = 1.0,
    ) -> float:
        """Return the longest step size at which no mean is biased by more than ``max_mean_bias``,
        between ``min_step_size`` and ``step_size``.
        """
        return _shrink_until(
            lambda h: not self.compute_max(h, batch_size_factor) > max_mean_bias,
            step_size,
            min_step_size,
            _MEAN_BIAS_SHRINK_FACTOR,
        )


@dataclass(frozen=True)
class StepSizeChoice:
    """The step size and its predicted effects.

    - **step_size** - the user's, or the chosen one.
    - **noise_stats** - gradient noise, with the number of minibatches over which it cancels.
    - **variance_inflation** - predicted relative increase of posterior variances.
    """

    step_size: float
    trace: StepSizeTrace
    noise_stats: GradientNoiseStats
    variance_inflation: float
    mean_bias: PredictedMeanBias


def choose_step_size(
    inputs: WarmupInputs,
    bulk: BulkPositions,
    choice: SubsamplingChoice,
    bound_dynamics: Dynamics,
    has_dominant_mode: bool,
) -> StepSizeChoice:
    """Choose the step size, or predict the effects of the user's.

    :param bound_dynamics: the SDE in preconditioned coordinates.
    :param has_dominant_mode: whether means can be predicted.
    """
    settings, dynamics, noise_stats = inputs.settings, inputs.settings.dynamics, choice.noise_stats
    noise_limit = NoiseLimit.from_settings(settings, choice.max_curvature)
    step_size = settings.step_size
    if step_size is not None:
        variance_inflation = noise_limit.predict_variance_inflation(noise_stats, step_size)
    else:
        step_size, sd_inflation = _limit_step_size_by_dynamics(inputs, bound_dynamics, choice)
        variance_inflation = max(
            choice.variance_inflation, float(np.square(1.0 + sd_inflation) - 1.0)
        )
    dynamics_limit = float(step_size)
    if settings.step_size is None:
        step_size = limit_step_size_by_observations(settings, choice.max_step_size, step_size)
    observations_limit = float(step_size)
    mean_bias = PredictedMeanBias()
    if inputs.potential.local_latents is None and has_dominant_mode:
        mean_bias = _predict_mean_bias(inputs, bulk, choice, bound_dynamics, observations_limit)
    if settings.step_size is not None:
        limits = {"user": float(step_size)}
    else:
        step_size = limit_step_size_by_mean_bias(settings, mean_bias, step_size)
        limits = {
            "integrator": float(noise_limit.integrator_step_size),
            "stability": float(noise_limit.stability_limit),
            "gradient_noise": float(choice.step_size),
            "dynamics": dynamics_limit,
            "observations": observations_limit,
            "mean_bias": float(step_size),
        }
    noise_stats = noise_stats.for_epochs(
        choice.subsampling, bulk.batched_gradients.batches_per_epoch
    )
    if noise_stats.batches_per_epoch:
        variance_inflation = min(
            variance_inflation, noise_stats.predict_variance_inflation(dynamics, float(step_size))
        )
    return StepSizeChoice(
        step_size, StepSizeTrace(limits), noise_stats, variance_inflation, mean_bias
    )


def recommend_step_size(
    inputs: WarmupInputs,
    bound_dynamics: Dynamics,
    choice: SubsamplingChoice,
    mean_bias: PredictedMeanBias,
) -> float:
    """Return the step size that would be chosen in place of the user's."""
    step_size, _ = _limit_step_size_by_dynamics(inputs, bound_dynamics, choice)
    step_size = limit_step_size_by_observations(inputs.settings, choice.max_step_size, step_size)
    return limit_step_size_by_mean_bias(inputs.settings, mean_bias, step_size)


def choose_num_steps(relaxation_time: float, step_size: Any) -> int:
    """Return the steps between approximately independent draws, from 1 to 500.

    Many steps are a multiple of an interval at which the report's gradients are taken: a prime
    number of steps would have one gradient per draw.
    """
    num_steps = max(1, min(MAX_NUM_STEPS, math.ceil(relaxation_time / float(step_size) - 1e-6)))
    if num_steps < 2 * MONITOR_INTERVAL:
        return num_steps
    intervals = range(MONITOR_INTERVAL, _MAX_MONITOR_INTERVAL + 1)
    candidates = range(num_steps, MAX_NUM_STEPS + 1)
    return next(n for n in candidates if any(n % k == 0 for k in intervals))


@dataclass(frozen=True)
class NoiseLimit:
    """The step size that curvature and gradient noise allow.

    - **integrator_step_size** - step size for a standard normal and an exact gradient.
    - **max_curvature** - largest preconditioned curvature.
    - **target_sd_bias** - allowed relative error of posterior SDs. The variance inflation by noise
      is kept to half of it, that of SDs to a quarter.
    - **is_compensated** - whether the noise covariance is subtracted from the injected noise.
    """

    dynamics: Dynamics
    integrator_step_size: float
    max_curvature: float
    target_sd_bias: float
    is_compensated: bool = False

    @classmethod
    def from_settings(cls, settings: WarmupSettings, max_curvature: float) -> NoiseLimit:
        """Return the limit for the user's SDE, integrator and target."""
        step_size = settings.dynamics.integrators[settings.integrator].step_size
        target, is_compensated = settings.target_sd_bias, settings.noise_compensation
        return cls(settings.dynamics, step_size, max_curvature, target, is_compensated)

    @property
    def effective_curvature(self) -> float:
        """The curvature that limits the step: up to 3.5 it counts as a standard normal's."""
        return max(1.0, self.max_curvature / _MAX_HARMLESS_CURVATURE)

    @property
    def stability_limit(self) -> float:
        """The step size for the largest preconditioned curvature and an exact gradient."""
        step_size = min(self.integrator_step_size, self.dynamics.max_step_size)
        return step_size / self.dynamics.stiffness(self.effective_curvature)

    def limit_step_size(self, noise_stats: GradientNoiseStats) -> tuple[float, float]:
        """Return the longest step size and the variance inflation predicted at it.

        It exceeds the target where the step would have to be shorter than 1/500 of the relaxation
        time.
        """
        step_size = _shrink_until(
            lambda h: (
                self.predict_variance_inflation(noise_stats, h)
                <= _NOISE_TO_TARGET_RATIO * self.target_sd_bias
            ),
            self.stability_limit,
            self.dynamics.relaxation_time(self.stability_limit) / MAX_NUM_STEPS,
            _NOISE_SHRINK_FACTOR,
        )
        return step_size, self.predict_variance_inflation(noise_stats, step_size)

    def predict_variance_inflation(
        self, noise_stats: GradientNoiseStats, step_size: float
    ) -> float:
        """Return the relative increase of posterior variances that gradient noise makes.

        With noise compensation it is the part of the noise that depends on the position, and the
        part that exceeds the injected noise.
        """
        if not self.is_compensated:
            return noise_stats.predict_variance_inflation(self.dynamics, step_size)
        variance_inflation = self.dynamics.variance_inflation(noise_stats.variance, step_size)
        uncompensated = max(noise_stats.position_dependent_fraction, _COVARIANCE_RELATIVE_ERROR)
        return uncompensated * min(variance_inflation, 1.0) + max(variance_inflation - 1.0, 0.0)


def limit_step_size_by_discretisation(
    dynamics: Dynamics,
    integrator: str,
    step_size: float,
    dim: int,
    target_sd_bias: float,
    noise_variance: float = 0.0,
) -> tuple[float, float]:
    """Return the longest step size at which a standard normal keeps its SD.

    Default step sizes hold for the default options of the kernels. The search first takes an exact
    gradient and then a noisy one. The error is computed where a step is linear, else simulated.

    :param step_size: longest step size.
    :param target_sd_bias: allowed relative error of the SD.
    :param noise_variance: variance of the gradient noise in preconditioned coordinates.
    :return: the step size, and the relative error of the SD at it.
    :raises InvalidArgumentError: where no step size is short enough for an exact gradient.
    """

    def compute_sd_inflation(step_size: float, noise_variance: float) -> tuple[float, float, bool]:
        """Return the error of the SD, its standard error, and whether these are exact."""
        exact = _compute_analytic_sd_inflation(dynamics, integrator, step_size, noise_variance)
        if exact is not None:
            return exact, 0.0, True
        simulated = simulate_sd_inflation(dynamics, integrator, step_size, noise_variance, dim)
        return *simulated, False

    analytic = _compute_analytic_sd_inflation(dynamics, integrator, step_size, noise_variance)
    shrink_factor, allowed = _SIMULATED_SHRINK_FACTOR, target_sd_bias
    if analytic is not None:
        shrink_factor, allowed = _ANALYTIC_SHRINK_FACTOR, _ANALYTIC_BIAS_FRACTION * target_sd_bias
    min_step_size = _MIN_STEP_SIZE_RATIO * step_size
    for variance in (0.0, noise_variance) if noise_variance > 0.0 else (0.0,):
        sd_inflation, error, is_exact = compute_sd_inflation(step_size, variance)
        while not abs(sd_inflation) <= allowed + 2.0 * error:
            if variance > 0.0:
                if step_size <= dynamics.relaxation_time(step_size) / MAX_NUM_STEPS:
                    break
            # Simulated chains that do not move at all move no more in shorter steps.
            elif step_size < min_step_size or (sd_inflation == -1.0 and not is_exact):
                raise InvalidArgumentError(
                    "With the options of this kernel, no step size samples a standard normal "
                    "distribution correctly.",
                    "check that the diffusion is not zero, and that friction, mass and metric are "
                    "not extreme.",
                    "no-valid-step-size",
                )
            step_size *= shrink_factor
            sd_inflation, error, is_exact = compute_sd_inflation(step_size, variance)
    return step_size, sd_inflation


def _shrink_until(
    is_allowed: Callable[[float], bool], step_size: float, min_step_size: float, factor: float
) -> float:
    """Shorten a step size by a factor at a time until it is allowed or the shortest."""
    while step_size > min_step_size and not is_allowed(step_size):
        step_size = max(factor * step_size, min_step_size)
    return step_size


def _limit_step_size_by_dynamics(
    inputs: WarmupInputs, bound_dynamics: Dynamics, choice: SubsamplingChoice
) -> tuple[float, float]:
    """Return a shorter step size for unusual options of the kernel, and the error of SDs at it."""
    settings = inputs.settings
    if bound_dynamics.has_default_settings:
        return choice.step_size, 0.0
    return limit_step_size_by_discretisation(
        bound_dynamics,
        settings.integrator,
        choice.step_size,
        inputs.potential.dim,
        settings.target_sd_bias,
        0.0 if settings.noise_compensation else choice.noise_stats.mean_variance,
    )


def limit_step_size_by_observations(
    settings: WarmupSettings, max_step_size: float, step_size: float
) -> float:
    """Shorten the step size to what the gradients of single observations allow."""
    min_step_size = settings.dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    return min(step_size, max(max_step_size, min_step_size))


def limit_step_size_by_mean_bias(
    settings: WarmupSettings,
    mean_bias: PredictedMeanBias,
    step_size: float,
    batch_size_factor: float = 1.0,
) -> float:
    """Shorten the step size until no mean is biased by more than the target."""
    min_step_size = settings.dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    return mean_bias.limit_step_size(
        step_size, min(step_size, min_step_size), settings.max_mean_bias, batch_size_factor
    )


def _predict_mean_bias(
    inputs: WarmupInputs,
    bulk: BulkPositions,
    choice: SubsamplingChoice,
    bound_dynamics: Dynamics,
    step_size: float,
) -> PredictedMeanBias:
    """Predict the bias of posterior means by gradient noise and discretisation error."""
    settings = inputs.settings
    coupling = measure_noise_at_coupled_draws(
        bulk, choice.estimator, choice.subsampling, inputs.rng
    )
    is_coupled = coupling is not NO_COUPLING  # then few positions do not suffice
    by_noise, inflation_per_noise_variance = np.zeros(inputs.potential.dim), 0.0
    if not settings.noise_compensation:
        inflation_per_noise_variance = settings.dynamics.variance_inflation(
            1.0, step_size, choice.noise_stats.position_dependent_fraction
        )
    if inflation_per_noise_variance > 0.0 and not is_coupled:
        by_noise = predict_mean_bias_from_noise(
            bulk, choice.estimator, choice.subsampling, inflation_per_noise_variance, inputs.rng
        )
    # The variance inflation is computed at the longest step, where rounding is small beside it;
    # at shorter ones it is smaller by the order of the integrator.
    integrator = bound_dynamics.integrators[settings.integrator]
    max_step_size = settings.dynamics.integrators[settings.integrator].step_size
    variance_inflation = compute_kick_variance_inflation(
        bound_dynamics, settings.integrator, max_step_size
    )
    per_inflation = np.zeros(inputs.potential.dim)
    if variance_inflation != 0.0 and not is_coupled:
        per_inflation = predict_mean_bias_per_variance_inflation(bulk, inputs.rng)
    mean_bias = PredictedMeanBias(
        by_noise / step_size,
        per_inflation,
        variance_inflation,
        max_step_size,
        integrator.order,
        coupling,
        inflation_per_noise_variance / step_size,
    )
    if mean_bias.compute_max(step_size) < _HARMLESS_BIAS_RATIO * settings.max_mean_bias:
        return mean_bias._replace(coupling=NO_COUPLING)  # such as in a curved posterior
    return mean_bias


# --- The discretisation error of a step on a normal -----------------------------------------------


class _LinearStep(NamedTuple):
    """A step on a normal: ``state <- A state + B normals``, gradients at ``C (state, normals)``."""

    state_matrix: np.ndarray
    normals_matrix: np.ndarray
    gradient_positions: np.ndarray


@lru_cache(maxsize=64)
def compute_kick_variance_inflation(dynamics: Dynamics, integrator: str, step_size: float) -> float:
    """Return the relative increase of a unit variance at the positions of exact gradients.

    :return: mean over the gradients of a step; 0 for an SDE whose linear form is not known, and for
        a step whose effect rounding hides.
    """
    linear_step = _linearise_step(dynamics, integrator, step_size, 1.0)
    if linear_step is None or abs(_find_slowest_eigenvalue(linear_step)) > _MAX_RESOLVED_EIGENVALUE:
        return 0.0
    covariance = _compute_stationary_covariance(dynamics, linear_step)
    by_state, by_normals = np.split(linear_step.gradient_positions, [len(covariance)], axis=1)
    variances = ((by_state @ covariance) * by_state).sum(1) + np.square(by_normals).sum(1)
    return float(variances.mean() - 1.0)


@lru_cache(maxsize=64)
def compute_draw_variance_inflation(
    dynamics: Dynamics,
    integrator: str,
    step_size: float,
    curvature: float = 1.0,
    noise_variance: float = 0.0,
) -> float | None:
    """Return the relative increase of the variance of draws from a normal.

    :param curvature: curvature of the normal's potential.
    :param noise_variance: variance of independent gradient noise.
    :return: infinite for an unstable step; -1 where friction stops all movement; None for an SDE
        whose linear form is not known, for a thermostat, which is not linear, and for gradient
        noise where a step changes too little to be distinguished from rounding.
    """
    linear_step = _linearise_step(dynamics, integrator, step_size, curvature, noise_variance)
    if linear_step is None or dynamics.has_thermostat:
        return None
    slowest = _find_slowest_eigenvalue(linear_step)
    if abs(slowest) <= _MAX_ACCURATE_EIGENVALUE:
        covariance = _compute_stationary_covariance(dynamics, linear_step)
        return float(curvature * covariance[0, 0] - 1.0)
    if abs(slowest - 1.0) > 1.0 - _MAX_ACCURATE_EIGENVALUE:
        return math.inf
    if noise_variance > 0.0:
        return None
    decay = -math.expm1(-2.0 * step_size / dynamics.relaxation_time(step_size))
    return -1.0 if decay > _MIN_CORRELATION_DECAY else 0.0


def simulate_sd_inflation(
    dynamics: Dynamics, integrator: str, step_size: float, noise_variance: float, dim: int
) -> tuple[float, float]:
    """Return the relative error of the SD of simulated chains, and its standard error."""
    num_chains = int(np.clip(_NUM_SIMULATED_COORDINATES // dim, *_SIMULATED_CHAINS))
    num_steps = np.clip(3.0 * dynamics.relaxation_time(step_size) / step_size, *_SIMULATED_STEPS)
    num_steps = 2 ** math.ceil(math.log2(num_steps))
    sd, error = _simulate_sd(
        dynamics, integrator, step_size, noise_variance, dim, num_chains, num_steps
    )
    return float(sd) - 1.0, float(error)


def _compute_analytic_sd_inflation(
    dynamics: Dynamics, integrator: str, step_size: float, noise_variance: float
) -> float | None:
    """Return the exact relative error of the SD of draws, or None where it is not known.

    Rounding does not distinguish unstable steps from nearly frictionless ones.
    """
    exact = compute_draw_variance_inflation(
        dynamics, integrator, step_size, noise_variance=noise_variance
    )
    if exact is None or math.isinf(exact):
        return None
    return math.sqrt(max(0.0, 1.0 + exact)) - 1.0


@partial(jax.jit, static_argnames=("dynamics", "integrator", "dim", "num_chains", "num_steps"))
def _simulate_sd(
    dynamics: Dynamics,
    integrator: str,
    step_size: Any,
    noise_variance: Any,
    dim: int,
    num_chains: int,
    num_steps: int,
) -> tuple[Array, Array]:
    """Return the SD on a standard normal, zero where no chain moves, and its standard error."""
    step = dynamics.make_step(integrator)

    def run_chain(key: Array) -> Array:
        position_key, state_key, key = random.split(key, 3)
        position = random.normal(position_key, (dim,))

        def run_step(state: Any, xs: Any) -> tuple[Any, Array]:
            key, count = xs
            normals = random.normal(key, (step.num_noise + 1, dim))
            offset = jnp.sqrt(noise_variance) * normals[0]
            state = step(state, step_size, lambda q: q + offset, normals[1:], count)
            return state, jnp.square(state.position).mean()

        xs = random.split(key, num_steps), jnp.arange(num_steps)
        last, squares = lax.scan(run_step, dynamics.init(position, state_key), xs)
        has_moved = (last.position != position).any()
        return jnp.where(has_moved, squares[num_steps // 2 :].mean(), 0.0)

    variances = jax.vmap(run_chain)(random.split(random.key(0), num_chains))
    sd = jnp.sqrt(variances.mean())
    return sd, variances.std() / math.sqrt(num_chains) / (2.0 * jnp.maximum(sd, 1e-30))


def _linearise_step(
    dynamics: Dynamics,
    integrator: str,
    step_size: float,
    curvature: float,
    noise_variance: float = 0.0,
) -> _LinearStep | None:
    """Return the step on a normal, or None for an SDE whose linear form is not known.

    The last normal is that of the gradient noise.
    """
    linear = dynamics.linear_approximation
    if linear is None or integrator not in linear.integrators:
        return None
    if any(part.every_n_steps > 1 for part in linear.integrators[integrator].parts):
        return None
    state_size, compute_jacobian = _compile_step_jacobian(linear, integrator)
    jacobians = compute_jacobian(step_size, curvature, math.sqrt(noise_variance))
    state_jacobian, gradient_positions = (np.asarray(x, float) for x in jacobians)
    return _LinearStep(
        state_jacobian[:, :state_size], state_jacobian[:, state_size:], gradient_positions
    )


@lru_cache(maxsize=64)
def _compile_step_jacobian(linear_dynamics: Dynamics, integrator: str) -> tuple[int, Callable]:
    """Return the size of a state of one coordinate, and the compiled Jacobians of a step.

    These are of the next state and of the positions of gradients, with respect to state and
    normals.
    """
    step = linear_dynamics.make_step(integrator)
    shapes = jax.eval_shape(linear_dynamics.init, jnp.zeros(1), jax.random.key(0))
    state_size = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

    @jax.jit
    def compute_jacobian(step_size: Array, curvature: Array, noise_sd: Array) -> Any:
        def run_step(unit_vector: Array) -> tuple[Array, Array]:
            _, unravel = ravel_pytree(zeros)
            state, normals = unravel(unit_vector[:state_size]), unit_vector[state_size:-1, None]
            positions = []

            def gradient(q: Array) -> Array:
                if not isinstance(q, JVPTracer):  # a position of the gradient's derivative
                    positions.append(q)
                return curvature * q + noise_sd * unit_vector[-1]

            last = step(state, step_size, gradient, normals)
            return ravel_pytree(last)[0], jnp.concatenate(positions)

        return jax.vmap(run_step, out_axes=1)(jnp.eye(state_size + step.num_noise + 1))

    return state_size, compute_jacobian


def _find_slowest_eigenvalue(linear_step: _LinearStep) -> complex:
    """Return the eigenvalue of largest modulus of a step; infinite after an overflow."""
    a, b, _ = linear_step
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    return complex(max(np.linalg.eigvals(a), key=abs))


def _compute_stationary_covariance(dynamics: Dynamics, linear_step: _LinearStep) -> np.ndarray:
    """Solve ``S = A S A^T + B B^T`` for the covariance of the stationary state."""
    a, b, _ = linear_step
    size = len(a)
    covariance = np.linalg.solve(np.eye(size**2) - np.kron(a, a), (b @ b.T).ravel())
    covariance = covariance.reshape(size, size)
    if dynamics.has_thermostat:
        # It scales the state until momenta have unit variance, which the step alone changes.
        covariance = covariance / covariance[1, 1]
    return covariance
