"""Means, SDs, quantiles and covariances of sites whose draws were not kept.

The chains have accumulated them (:mod:`numpyro_sgmcmc.sampling.site_moments`);
:func:`running_moments` combines the chains in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.diagnostics.diagnosis import Table, format_r_hat
from numpyro_sgmcmc.diagnostics.run_data import check_finished_run
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.sampling.bias_monitor import compute_batch_index
from numpyro_sgmcmc.sampling.options import Options
from numpyro_sgmcmc.sampling.site_moments import SiteMoments, SiteSums

# Halvings of the interval that contains a quantile of all chains: to a part in 1e12 of it.
_NUM_BISECTIONS = 40
# Values of a site that are printed.
_MAX_PRINTED_VALUES = 10


class RunningMoments(NamedTuple):
    """Result of :func:`~numpyro_sgmcmc.running_moments`; prints as a table.

    All fields but ``covariance`` are dicts from sites to float64 arrays of the site's shape.

    - **mean** - means.
    - **sd** - standard deviations, with ddof=0.
    - **mcse** - Monte Carlo standard errors of the means, by batch means; NaN for one iteration.
    - **r_hat** - split R-hat; NaN for fewer than four iterations per chain.
    - **quantiles** - estimates of the kernel's ``running_quantiles``, along an axis before those of
      the site; NaN for few iterations.
    - **covariance** - covariance matrix of the values of the kernel's ``running_covariances``, site
      after site in that order, each in C order; None without that option.
    """

    mean: dict[str, np.ndarray]
    sd: dict[str, np.ndarray]
    mcse: dict[str, np.ndarray]
    r_hat: dict[str, np.ndarray]
    quantiles: dict[str, np.ndarray]
    covariance: np.ndarray | None

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [("site", "mean", "SD", "MCSE", "R-hat")]
        for name, mean in self.mean.items():
            for i in list(np.ndindex(mean.shape))[:_MAX_PRINTED_VALUES]:
                label = name + (f"[{','.join(map(str, i))}]" if i else "")
                values = (f"{x[name][i]:.3g}" for x in (self.mean, self.sd, self.mcse))
                r_hat = self.r_hat[name][i[mean.ndim - self.r_hat[name].ndim :]]
                rows.append((label, *values, format_r_hat(float(r_hat))))
            if mean.size > _MAX_PRINTED_VALUES:
                rest = f"... {mean.size - _MAX_PRINTED_VALUES:,} more"
                worst = format_r_hat(float(np.fmax.reduce(self.r_hat[name], None)))
                rows.append((rest, "", "", "", f"<= {worst}"))
        return Table(rows, ()).to_text()


def running_moments(mcmc: MCMC, group_by_chain: bool = False) -> RunningMoments:
    """Return mean, SD, R-hat and standard error of the sites whose draws were not kept.

    These are the sites that the kernel's ``collect_sites`` does not name. Their values are
    constrained. Every iteration since the warm-up counts, whatever ``thinning`` is. If the step
    size is a schedule, iterations are weighted.

    :param mcmc: a run of one of this package's kernels with ``collect_sites``.
    :param group_by_chain: whether to return means, SDs, standard errors, quantiles and covariances
        of each chain, with a leading axis, in place of those of all chains. Default False.
    :return: the moments, each a dict of arrays by site.
    :raises ValueError: for another run, or before a run.
    """
    kernel = check_finished_run(mcmc, "running_moments", uses_moments=False)
    options, state = kernel.options, mcmc.last_state
    moments: SiteMoments | None = state.site_moments
    if moments is None:
        raise InvalidArgumentError(
            "`running_moments` got a run that has kept the draws of all sites.",
            "use the draws, or pass the kernel `collect_sites`, the sites whose draws are kept.",
            "collect-sites",
        )
    if not state.i.ndim:
        moments = jax.tree.map(lambda x: x[None], moments)
    return _combine_chains(moments, options, group_by_chain)


def _combine_chains(moments: SiteMoments, options: Options, group_by_chain: bool) -> RunningMoments:
    """Return the moments of each chain, or of all chains together.

    :param moments: with an axis of chains.
    """
    moments = jax.tree.map(np.asarray, moments)
    chains = [jax.tree.map(lambda x, c=c: x[c], moments) for c in range(len(moments.weight))]
    r_hat = {name: _compute_split_r_hat(chains, name) for name in moments.sites}
    if not group_by_chain:
        return _pool_chains(chains, options)._replace(r_hat=r_hat)
    by_chain = [_pool_chains([chain], options) for chain in chains]
    return jax.tree.map(lambda *x: np.stack(x), *by_chain)._replace(r_hat=r_hat)


def _pool_chains(chains: list[SiteMoments], options: Options) -> RunningMoments:
    """Return the moments of all chains' values together, without R-hat."""
    mean, sd, mcse, quantiles = {}, {}, {}, {}
    weight = np.concatenate([np.asarray(c.weight, np.float64) for c in chains])
    is_used = weight > 0.0
    share = weight[is_used] / weight.sum()
    num_batches = is_used.sum()
    factor = num_batches / (num_batches - 1.0) if num_batches > 1 else np.nan
    for name in chains[0].sites:
        means, m2 = (
            np.concatenate(x)[is_used]
            for x in zip(*(_read_batches(c.sites[name]) for c in chains), strict=True)
        )
        mean[name] = np.tensordot(share, means, 1)
        deviations = np.square(means - mean[name])
        sd[name] = np.sqrt(np.tensordot(share, deviations, 1) + m2.sum(0) / weight.sum())
        mcse[name] = np.sqrt(factor * np.tensordot(np.square(share), deviations, 1))
        if options.running_quantiles:
            quantiles[name] = _pool_quantiles(
                [c.sites[name].markers for c in chains], options.running_quantiles
            )
    covariance = _pool_covariances(chains, options.running_covariances)
    return RunningMoments(mean, sd, mcse, {}, quantiles, covariance)


def _read_batches(sums: SiteSums) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of a chain's batches and their sums of squared deviations, float64."""
    reference = np.asarray(sums.reference, np.float64)
    return reference + sums.mean, np.asarray(sums.m2, np.float64)


def _pool_covariances(chains: list[SiteMoments], names: Sequence[str]) -> np.ndarray | None:
    if not names:
        return None
    joint = [jax.tree.map(lambda x: np.asarray(x, np.float64), c.joint) for c in chains]
    references = [np.concatenate([c.sites[n].reference.ravel() for n in names]) for c in chains]
    share = np.array([j.weight for j in joint])
    share /= share.sum()
    means = np.stack([r + j.mean for r, j in zip(references, joint, strict=True)])
    deviations = means - share @ means
    within = sum(s * j.comoment / j.weight for s, j in zip(share, joint, strict=True))
    return within + np.einsum("c,ci,cj->ij", share, deviations, deviations)


def _pool_quantiles(chains: list[Any], probabilities: Sequence[float]) -> np.ndarray:
    """Return the quantiles of the mean of the chains' distributions, which markers interpolate.

    They are found by bisection for all values of a site at once.

    :param chains: :class:`~numpyro_sgmcmc.sampling.site_moments.QuantileMarkers` of each chain.
    """
    heights = np.stack([np.asarray(m.heights, np.float64) for m in chains])
    ranks = np.stack([np.asarray(m.ranks, np.float64) for m in chains])
    num_values = ranks[:, -1:].max()
    if num_values < ranks.shape[1] or not np.isfinite(heights[:, -1]).all():
        return np.full((len(probabilities), *heights.shape[2:]), np.nan)
    fractions = (ranks - 1.0) / (ranks[:, -1:] - 1.0)
    gaps, steps = np.diff(heights, axis=1), np.diff(fractions, axis=1)
    safe_gaps = np.where(gaps > 0.0, gaps, 1.0)

    def compute_cdf(x: np.ndarray) -> np.ndarray:
        inside = np.clip((x - heights[:, :-1]) / safe_gaps, 0.0, 1.0)
        inside = np.where(gaps > 0.0, inside, x >= heights[:, :-1])
        return (inside * steps).sum(1).mean(0)

    quantiles = []
    for p in probabilities:
        low, high = heights.min((0, 1)), heights.max((0, 1))
        for _ in range(_NUM_BISECTIONS):
            middle = (low + high) / 2.0
            is_below = compute_cdf(middle) < p
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        quantiles.append(high)
    return np.stack(quantiles)


def _compute_split_r_hat(chains: list[SiteMoments], name: str) -> np.ndarray:
    """Return split R-hat of a site: the batches of each chain are split into halves by time."""
    means, variances, counts = [], [], []
    for chain in chains:
        num_iterations, num_batches = int(chain.num_iterations), len(chain.weight)
        iterations = np.arange(num_iterations)
        index = np.asarray(compute_batch_index(jnp.asarray(iterations), num_batches))
        count = np.bincount(index, minlength=num_batches)
        time = np.bincount(index, iterations, minlength=num_batches) / np.maximum(count, 1)
        order = np.argsort(time)
        num_before = np.cumsum(count[order])
        split = 1 + int(np.argmin(np.abs(num_before - num_iterations / 2)))
        batch_means, m2 = _read_batches(chain.sites[name])
        for half in (order[:split], order[split:]):
            weight = np.asarray(chain.weight, np.float64)[half]
            if not weight.sum() > 0.0 or count[half].sum() < 2:
                return np.full(batch_means.shape[1:], np.nan)
            share = weight / weight.sum()
            mean = np.tensordot(share, batch_means[half], 1)
            between = np.tensordot(share, np.square(batch_means[half] - mean), 1)
            means.append(mean)
            counts.append(count[half].sum())
            variance = between + m2[half].sum(0) / weight.sum()
            variances.append(variance * counts[-1] / (counts[-1] - 1.0))
    within, n = np.mean(variances, 0), np.mean(counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt((n - 1.0) / n + np.var(means, 0, ddof=1) / within)
