"""All kernels, a model with an exact posterior, and assertions about draws.

A new kernel is tested by the tests of this folder once it is in :data:`KERNELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_sgmcmc import (
    SGHMC,
    SGLD,
    SGMGT,
    SGNHT,
    SGRHMC,
    SGRLD,
    SHMC,
    RecipeKernel,
    SGHMCSplit,
    SGLaplaceHMC,
)
from tests.quick import quick_if


class LangevinRecipe(RecipeKernel):
    """Underdamped Langevin dynamics by :class:`RecipeKernel`, which needs an SDE."""

    def __init__(
        self, model: Any = None, potential_fn: Any = None, *, friction: float = 1.5, **options: Any
    ) -> None:
        super().__init__(
            model,
            potential_fn,
            diffusion=lambda z: jnp.repeat(jnp.array([0.0, friction]), z.size // 2),
            curl=lambda z: jnp.kron(jnp.array([[0.0, -1.0], [1.0, 0.0]]), jnp.eye(z.size // 2)),
            hamiltonian=lambda z: jnp.square(z[z.size // 2 :]).sum() / 2,
            auxiliary=lambda key, dim: jax.random.normal(key, (dim,), jnp.float32),
            **options,
        )


KERNELS = [
    SGHMCSplit,
    SGHMC,
    SGLD,
    SHMC,
    SGNHT,
    SGMGT,
    SGLaplaceHMC,
    SGRLD,
    SGRHMC,
    LangevinRecipe,
]

# Run in `make test`: a splitting, a thermostat and a metric. The recipe has separate quick tests
# (tests/dynamics).
QUICK_KERNELS = {SGHMCSplit, SGNHT, SGRHMC}


# Every kernel; those that are not quick by `make test-all` only.
each_kernel = pytest.mark.parametrize(
    "kernel_class", [quick_if(k in QUICK_KERNELS, k, id=k.__name__) for k in KERNELS]
)

# For code that all kernels share, and SDEs that have separate tests.
one_kernel = pytest.mark.parametrize(
    "kernel_class", [quick_if(k is SGHMCSplit, k, id=k.__name__) for k in KERNELS]
)

# NumPyro warns of this with NUTS as well, with a callable chain method and no progress bar.
ignore_donation = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


ROWS, BATCH = 400, 40

# With these options nothing is adapted: the warm-up is most of the time of a short run.
GIVEN = {
    "step_size": 0.1,
    "num_steps": 1,
    "gradient_estimator": "minibatch",
    "subsampling": "contiguous",
    "adapt_mass_matrix": False,
}


class Data(NamedTuple):
    X: Any
    y: Any
    counts: Any


def survey(X: Any, y: Any = None, counts: Any = None, batch_size: int | None = None) -> None:
    """A regression with known noise and a Poisson rate, whose posterior is exact."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    numpyro.deterministic("contrast", beta[..., 0] - beta[..., 1])
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        mean = X[i] @ beta
        numpyro.sample("y", dist.Normal(mean, 1), obs=None if y is None else y[i])
        numpyro.sample("counts", dist.Poisson(rate), obs=None if counts is None else counts[i])


def survey_data(seed: int = 0) -> Data:
    """Return data of :func:`survey` as NumPy arrays."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((ROWS, 2)).astype(np.float32)
    X[:, 1] += 0.5 * X[:, 0]
    y = X @ np.array([0.6, -0.3]) + rng.standard_normal(ROWS)
    return Data(X, y.astype(np.float32), rng.poisson(3.0, ROWS))


def survey_posterior(data: Data) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the exact posterior mean and SD of each site of :func:`survey`."""
    X, y = np.asarray(data.X, np.float64), np.asarray(data.y, np.float64)
    covariance = np.linalg.inv(np.eye(2) + X.T @ X)
    beta = covariance @ X.T @ y
    shape, rate = 2 + np.sum(data.counts), 1 + len(y)
    difference = np.array([1.0, -1.0])
    return {
        "beta": (beta, np.sqrt(np.diag(covariance))),
        "rate": (shape / rate, np.sqrt(shape) / rate),
        "contrast": (
            difference @ beta,
            np.sqrt(difference @ covariance @ difference),
        ),
    }


def quietly(kernel: Any, **settings: Any) -> MCMC:
    """Return an MCMC object for short runs without a progress bar."""
    return MCMC(kernel, **{"num_warmup": 20, "num_samples": 50, "progress_bar": False, **settings})


class Moments(NamedTuple):
    """Mean and SD of draws with their standard errors, by coordinate."""

    mean: np.ndarray
    sd: np.ndarray
    mean_error: np.ndarray
    sd_error: np.ndarray


def moments(draws: Any) -> Moments:
    """Return moments of draws ``(chains, draws, ...)``; errors from the effective sample size."""
    x = np.asarray(draws, np.float64)
    mean = x.mean((0, 1))
    squares = np.square(x - mean)
    variance = squares.mean((0, 1))
    # The ESS of antithetic draws may exceed their number.
    size = np.minimum(effective_sample_size(x), x.shape[0] * x.shape[1])
    size_of_squares = np.minimum(effective_sample_size(squares), x.shape[0] * x.shape[1])
    sd = np.sqrt(variance)
    variance_error = squares.std((0, 1)) / np.sqrt(size_of_squares)
    return Moments(mean, sd, sd / np.sqrt(size), variance_error / (2 * sd))


def assert_posterior(
    draws: Any, mean: Any, sd: Any, *, mean_bias: float = 0.1, sd_bias: float = 0.1
) -> None:
    """Check that draws ``(chains, draws, ...)`` have the exact mean and SD.

    The tolerance is the bias that kernels allow by default (a tenth of a posterior SD in the mean,
    10% in the SD) and five standard errors.
    """
    found = moments(draws)
    mean, sd = np.asarray(mean), np.asarray(sd)
    assert (found.mean_error < 0.2 * sd).all(), "the effective sample size is too small to decide"
    mean_error = np.abs(found.mean - mean)
    assert (mean_error <= mean_bias * sd + 5 * found.mean_error).all(), (found, mean, sd)
    sd_error = np.abs(found.sd - sd)
    assert (sd_error <= sd_bias * sd + 5 * found.sd_error).all(), (found, mean, sd)


def assert_same_distribution(a: Any, b: Any) -> None:
    """Check that two sets of draws ``(chains, draws, ...)`` have equal means and SDs."""
    a, b = moments(a), moments(b)
    assert (np.abs(a.mean - b.mean) <= 5 * np.hypot(a.mean_error, b.mean_error)).all(), (a, b)
    assert (np.abs(a.sd - b.sd) <= 5 * np.hypot(a.sd_error, b.sd_error)).all(), (a, b)


def num_compilations(fn: Callable[[], Any]) -> int:
    """Return the number of programs that XLA compiles while ``fn`` runs."""
    compilations = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(fn())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(compilations)


def as_jax(data: Data) -> Data:
    """Return the data as JAX arrays."""
    return Data(*(jnp.asarray(x) for x in data))
