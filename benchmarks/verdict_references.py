"""Exact posteriors in unconstrained space, stored as quantiles.

This script makes the file of references anew (minutes); with names of problems as arguments, only
those. References are computed in float64, all but one without MCMC: closed forms of normal
posteriors, grids, independent draws where the model has them, and weighted draws elsewhere.
``--check`` runs NUTS in float64 on the same models and prints the differences in normal scores.
NUTS accepts by the potential, so wrong gradients only slow it down. Where it does not mix (funnels,
modes), its effective sample size is small.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import timing  # noqa: F401, puts the repository's root on the path
import verdict_exact as exact  # vocabulary: ok
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from rivals import unconstrained
from scipy import special
from verdict_exact import SCORES, Reference  # vocabulary: ok
from verdict_problems import PROBLEMS  # vocabulary: ok

from tests.sampling.references import fingerprint

__all__ = ["FILE", "normal_scores", "read"]

FILE = Path(__file__).parent / "verdict_references.npz"  # vocabulary: ok

Maker = Callable[[Callable, tuple], Reference]


def read(name: str, args: tuple) -> Reference:
    """The reference of a problem, which must be that of its data."""
    with np.load(FILE) as file:
        assert str(file[f"{name}:data"]) == fingerprint(args), "make the references anew"
        return Reference(file[f"{name}:quantiles"], file[f"{name}:ess"])


def normal_scores(draws: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    """Draws ``(..., d)`` as normal scores of their ranks in the reference, at most 3."""
    scores = [np.interp(draws[..., k], q, SCORES) for k, q in enumerate(quantiles)]
    return np.stack(scores, -1)


def nuts(model: Callable, args: tuple, num: int = 2_000, target: float = 0.8) -> np.ndarray:
    """Draws of four chains, flat and unconstrained: ``(4, num, d)``."""
    args = exact.as_float64(args)
    mcmc = MCMC(
        NUTS(model, dense_mass=True, target_accept_prob=target),
        num_warmup=1_000,
        num_samples=num,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *args)
    draws = unconstrained(model, args, mcmc.get_samples(group_by_chain=True))
    return np.concatenate([np.reshape(draws[k], (4, num, -1)) for k in sorted(draws)], -1)


def horseshoe(model: Callable, args: tuple) -> Reference:
    """NUTS on the scales with the coefficients integrated out; these are drawn given the scales."""
    X, y = (np.asarray(x, np.float64) for x in args)
    precision = X.T @ X
    fitted = np.linalg.solve(precision, X.T @ y)

    def scales(fitted: Any) -> None:
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([5]).to_event(1))
        spread = np.linalg.inv(precision) + jnp.diag((tau * local) ** 2)
        numpyro.sample("fitted", dist.MultivariateNormal(jnp.zeros(5), spread), obs=fitted)

    draws = nuts(scales, (jnp.asarray(fitted),), 10_000, 0.95)
    ess = effective_sample_size(special.ndtri(_ranks(draws))).min()
    flat = draws.reshape(-1, 6)
    width = np.exp(flat[:, :5] + flat[:, 5:])
    pull = np.eye(5) + width[:, :, None] * precision * width[:, None, :]
    mean = np.linalg.solve(pull, (width * (precision @ fitted))[..., None])
    factor = np.linalg.cholesky(np.linalg.inv(pull))
    noise = np.random.default_rng(5).standard_normal((len(flat), 5, 1))
    raw = (mean + factor @ noise)[..., 0]
    return exact.of_draws({"local": flat[:, :5], "raw": raw, "tau": flat[:, 5]}, float(ess))


def _ranks(draws: np.ndarray) -> np.ndarray:
    """Ranks among all chains' draws, between 0 and 1."""
    flat = draws.reshape(-1, draws.shape[-1])
    return ((flat.argsort(0).argsort(0) + 0.5) / len(flat)).reshape(draws.shape)


def _drawn(draws: Callable[[tuple], exact.Draws]) -> Maker:
    return lambda model, args: exact.of_draws(draws(args))


def _silent(model: Callable, args: tuple) -> Reference:
    return exact.of_draws(exact.prior_draws(model, args))


_LINE = [np.linspace(-0.7, 1.3, 161), np.linspace(0.1, 0.9, 161)]
_MAKERS: dict[str, Maker] = {
    "two components, free means": partial(exact.by_grid, start=(-1.5, 1.5), is_symmetric=True),
    "three components, free means": partial(
        exact.by_grid, start=(-4.0, 0.0, 4.0), num=41, is_symmetric=True
    ),
    "groups alike, centred": _drawn(partial(exact.group_draws, centred=True)),
    "groups alike, non-centred": _drawn(partial(exact.group_draws, centred=False)),
    "groups apart, centred": _drawn(partial(exact.group_draws, centred=True)),
    "horseshoe, five columns": horseshoe,
    "a rounded parameter": partial(exact.by_grid, axes=[np.linspace(-1, 2, 60_001)]),
    "a change of level": partial(exact.by_grid, axes=[np.linspace(-1, 8, 90_001)]),
    "a change point": _drawn(exact.change_point_draws),
    "a gradient stopped": partial(exact.by_grid, axes=_LINE),
    "gradients doubled": partial(exact.by_grid, axes=_LINE),
    "one gradient doubled": partial(exact.by_grid, axes=_LINE),
    "the same, parameters correlated": partial(exact.by_grid, axes=_LINE),
    "one gradient reversed": partial(
        exact.by_grid, axes=[np.linspace(-8, 12, 201), np.linspace(0.1, 0.9, 161)]
    ),
    "sparse simplex": _drawn(exact.simplex_draws),
    "a category of 20 rows": exact.by_weights,
    "classes that are separated": partial(
        exact.by_grid, axes=[np.linspace(-25, 10, 201), np.linspace(-5, 70, 201)]
    ),
    "Laplace prior": exact.by_weights,
    "a kink": partial(
        exact.by_grid, axes=[np.linspace(-0.3, 0.8, 201), np.linspace(-0.7, 0.7, 561)]
    ),
    "logistic regression": exact.by_weights,
    **dict.fromkeys(
        (
            "5 of 50,000 rows, normal",
            "six rows of great leverage",
            "each row ten times",
            "columns correlated at 0.9999",
            "units from 1e-6 to 1e6",
            "a sum of two",
            "a level of 1e5",
            "a level of 1e8",
            "five iterations of warm-up",
            "ten correlated columns",
        ),
        exact.by_curvature,
    ),
    **dict.fromkeys(
        (
            "5 of 50,000 rows, logistic",
            "rows sorted by the response",
            "exp of a wide covariate",
            "two components, ordered means",
            "Student-t(2) rows",
            "gamma rows",
            "normal rows",
            "Poisson regression",
        ),
        exact.by_grid,
    ),
}


def make(name: str) -> dict[str, Any]:
    """The reference of a problem, as it is kept."""
    model, args = PROBLEMS[name].build()
    quantiles, ess = _MAKERS.get(name, _silent)(model, args)
    print(f"{name}: {len(ess)} coordinates, as {ess.min():.0f} draws", flush=True)
    return {
        f"{name}:data": fingerprint(args),
        f"{name}:quantiles": quantiles,
        f"{name}:ess": ess.astype(np.float32),
    }


def check(name: str) -> None:
    """Print the worst mean and SD of NUTS in normal scores, and its effective sample size."""
    model, args = PROBLEMS[name].build()
    z = normal_scores(nuts(model, args), read(name, args).quantiles)
    ess = effective_sample_size(z).min()
    mean, sd = np.abs(z.mean((0, 1))).max(), np.abs(z.std((0, 1)) - 1).max()
    print(f"{name}: mean {mean:.3f}, SD {sd:.3f}, ESS {ess:.0f}")  # vocabulary: ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", help="names of problems; default all")
    parser.add_argument("--check", action="store_true", help="compare with NUTS")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    for name in given.problems or PROBLEMS:
        if given.check:
            check(name)
            continue
        known = dict(np.load(FILE)) if FILE.exists() else {}
        np.savez_compressed(FILE, **{**known, **make(name)})
        jax.clear_caches()


if __name__ == "__main__":
    main()
