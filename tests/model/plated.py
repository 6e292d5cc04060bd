"""Small models with subsampled plates in every arrangement, and NumPyro's potential of each.

Each model takes the minibatch size of each of its subsampled plates as an argument with the plate's
name. None means all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential


def one(X: Any, y: Any, rows: int | None = None) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=rows) as i:
        numpyro.sample("y", dist.StudentT(4, X[i] @ beta, scale), obs=y[i])


def subsample(X: Any, y: Any, rows: int | None = None) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=rows):
        mean = numpyro.subsample(X, event_dim=1) @ beta
        numpyro.sample("y", dist.Normal(mean, scale), obs=numpyro.subsample(y, event_dim=0))


def separate(y: Any, counts: Any, rows: int | None = None, columns: int | None = None) -> None:
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=rows) as i:
        numpyro.sample("y", dist.Normal(shift * rate, rate), obs=y[i])
    with numpyro.plate("columns", len(counts), subsample_size=columns) as j:
        numpyro.sample("counts", dist.Poisson(rate), obs=counts[j])


def nested(y: Any, rows: int | None = None, columns: int | None = None) -> None:
    """Sites in each plate alone and in both, and a latent site that both look up."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    effect = numpyro.sample("effect", dist.Normal(mu, 1).expand([y.shape[1]]).to_event(1))
    with numpyro.plate("rows", y.shape[0], subsample_size=rows, dim=-2) as i:
        numpyro.sample("row", dist.Normal(mu**2, 1), obs=y[i, :1])
        with numpyro.plate("columns", y.shape[1], subsample_size=columns, dim=-1) as j:
            numpyro.sample("y", dist.StudentT(4, effect[j] + mu, 1), obs=y[i][:, j])
    with numpyro.plate("columns", y.shape[1], subsample_size=columns, dim=-1) as j:
        numpyro.sample("column", dist.Normal(effect[j], 1), obs=y[0, j])


def three(y: Any, x: Any, rows: int | None = None, columns: int | None = None) -> None:
    """Two plates that meet and one that stands alone, of the size of the first."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("rows", y.shape[0], subsample_size=rows, dim=-2) as i:
        with numpyro.plate("columns", y.shape[1], subsample_size=columns, dim=-1) as j:
            numpyro.sample("y", dist.Normal(mu, scale), obs=y[i[:, None], j])
    with numpyro.plate("others", len(x), subsample_size=rows) as k:
        numpyro.sample("x", dist.Cauchy(mu, scale), obs=x[k])


def supports(y: Any, rows: int | None = None) -> None:
    """A simplex, a support that depends on another site, and a plate that is not subsampled."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    top = numpyro.sample("top", dist.Gamma(3, 1))
    inner = numpyro.sample("inner", dist.Uniform(0.0, top))
    with numpyro.plate("components", 3):
        location = numpyro.sample("location", dist.Normal(0, 2))
    mixture = dist.MixtureSameFamily(
        dist.Categorical(probs=weights), dist.Normal(location, 1 + inner)
    )
    with numpyro.plate("rows", len(y), subsample_size=rows) as i:
        numpyro.sample("y", mixture, obs=y[i])
        numpyro.factor("tilt", 0.1 * jnp.sin(y[i] * inner))


_potentials: dict[Any, Potential] = {}


class Case(NamedTuple):
    """A model with data.

    - **model** - the model.
    - **data** - its positional arguments, NumPy arrays.
    - **sizes** - sizes of its plates that can be subsampled.
    """

    model: Callable
    data: tuple
    sizes: dict[str, int]

    def potential(self, **batch: int) -> Potential:
        """Return the package's potential with these minibatch sizes, made once."""
        key = self.model, frozenset(batch.items()), jax.config.jax_enable_x64
        if key not in _potentials:
            made = make_model_potential(self.model, self.arguments(**batch), init_to_uniform)
            _potentials[key] = made
        return _potentials[key]

    def arguments(self, **batch: int) -> Arguments:
        """Return the arguments of a run."""
        return Arguments(self.data, batch)

    def numpyro_potential(self, potential: Potential, rows: Any = slice(None)) -> Callable:
        """Return NumPyro's potential on all rows, or on some, as a function of flat positions."""

        def evaluate(position: Any) -> Any:
            data = tuple(jnp.asarray(x[rows]) for x in self.data)
            return potential_energy(self.model, data, {}, potential.unravel(position))

        return evaluate

    def scaled_numpyro_potential(self, potential: Potential, rows: Any, scale: float) -> Callable:
        """Return the potential of the prior and ``scale`` times the log likelihood of the rows."""
        once = self.numpyro_potential(potential, rows)
        twice = self.numpyro_potential(potential, np.concatenate([rows, rows]))
        return lambda q: once(q) + (scale - 1) * (twice(q) - once(q))


def _cases() -> dict[str, Case]:
    rng = np.random.default_rng(5)
    X, y = rng.standard_normal((6, 2)), rng.standard_normal(6)
    y[0] += 4  # an outlier, so that rows are not interchangeable
    table = rng.standard_normal((4, 3)) + np.arange(3)
    return {
        "one": Case(one, (X, y), {"rows": 6}),
        "subsample": Case(subsample, (X, y), {"rows": 6}),
        "separate": Case(separate, (y, np.array([1, 4, 0, 2, 9])), {"rows": 6, "columns": 5}),
        "nested": Case(nested, (table,), {"rows": 4, "columns": 3}),
        "three": Case(three, (table, y), {"rows": 4, "columns": 3, "others": 6}),
        "supports": Case(supports, (y,), {"rows": 6}),
    }


CASES = _cases()


def position_of(potential: Potential, seed: int = 0) -> np.ndarray:
    """Return a position that is neither the origin nor near the mode."""
    return 0.5 * np.random.default_rng(seed).standard_normal(potential.dim)


def make_preconditioner(potential: Potential, is_dense: bool = True) -> Preconditioner:
    """Return arbitrary preconditioned coordinates."""
    rng, dim = np.random.default_rng(9), potential.dim
    factor = 0.3 * np.tril(rng.standard_normal((dim, dim))) + np.eye(dim)
    center = jnp.asarray(0.2 * rng.standard_normal(dim))
    return Preconditioner(center, jnp.asarray(factor if is_dense else np.diagonal(factor)))


def assert_close(actual: Any, expected: Any, rtol: float = 1e-12) -> None:
    """Check equality up to rounding, relative to the largest entry."""
    actual, expected = (np.asarray(ravel_pytree(x)[0]) for x in (actual, expected))
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max())
