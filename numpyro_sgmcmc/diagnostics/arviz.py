r"""A run as an ArviZ object, and leave-one-out cross-validation (LOO) for many observations.

ArviZ evaluates the log likelihood of every row at every draw at once. Here it is evaluated by
chunks, and at a random subset of the rows if there are many.

The expected log pointwise predictive density (elpd) of all N rows is estimated from a random
subset S of m rows and from the log likelihood :math:`\tilde\ell_i` of every row at the posterior
mean. With :math:`e_i = \mathrm{elpd}_i - \tilde\ell_i`,

.. math::

    \widehat{\mathrm{elpd}} = \sum_{i\le N}\tilde\ell_i + \frac Nm\sum_{i\in S} e_i

is unbiased, with variance :math:`N^2(1 - m/N)\,s_e^2/m` for the sample variance :math:`s_e^2`
(over m - 1 degrees of freedom): the difference estimator of Magnusson,
Andersen, Jonasson and Vehtari (2020), *Leave-one-out cross-validation for Bayesian model comparison
in large data*. The difference of two models at the same rows is estimated in the same way, with
:math:`e_i` the difference of theirs.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics.predictive import (
    evaluate_plate_sites,
    get_subsampled_plate,
    validate_row_indices,
)
from numpyro_sgmcmc.diagnostics.run_data import RunData, check_finished_run
from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError

# Above it, Pareto-smoothed importance sampling is unreliable (Vehtari et al., 2024, section 3).
_MAX_RELIABLE_PARETO_K = 0.7


class LooDifference(NamedTuple):
    """The difference in predictive density of two models, ``loo(one) - loo(another)``.

    - **elpd** - difference of the expected log pointwise predictive densities of all rows.
    - **se** - standard error from differences by row, if the rows are a sample from a population.
    - **subsampling_se** - standard error from evaluating a subset of the rows.
    """

    elpd: float
    se: float
    subsampling_se: float

    def __str__(self) -> str:
        return (
            f"elpd difference  {self.elpd:.1f}\n"
            f"se               {self.se:.1f} (plus subsampling se {self.subsampling_se:.2g})"
        )


class LooEstimate(NamedTuple):
    """Leave-one-out (LOO) estimate of a model. Estimates at the same rows can be subtracted.

    - **elpd** - expected log pointwise predictive density: the sum over all rows, each left out.
    - **se** - standard error of ``elpd`` if the rows are a sample from a population, as in ArviZ.
    - **subsampling_se** - standard error of ``elpd`` from evaluating a subset; NaN for one row.
    - **p_loo** - effective number of parameters.
    - **pareto_k** - Pareto k of the evaluated rows, shape ``(m,)``. Above 0.7, the elpd of a row is
      unreliable.
    - **indices** - indices of the evaluated rows, shape ``(m,)``.
    - **elpd_i** - elpd of the evaluated rows, shape ``(m,)``.
    - **plpd_i** - log likelihoods of these rows at the posterior mean, shape ``(m,)``.
    - **num_rows** - number of all rows, N.
    """

    elpd: float
    se: float
    subsampling_se: float
    p_loo: float
    pareto_k: np.ndarray
    indices: np.ndarray
    elpd_i: np.ndarray
    plpd_i: np.ndarray
    num_rows: int

    def __sub__(self, other: LooEstimate) -> LooDifference:
        """Return the difference in predictive density, for estimates at the same rows.

        :raises ValueError: for estimates at other rows.
        """
        if not isinstance(other, LooEstimate):
            return NotImplemented
        if self.num_rows != other.num_rows or not np.array_equal(self.indices, other.indices):
            raise InvalidArgumentError(
                "Two `loo` estimates at different rows cannot be subtracted.",
                "call `loo` with the same `num_rows` and `seed` for both runs, and run both on the "
                "same rows in the same order.",
                "loo-rows",
            )
        elpd = self.elpd_i - other.elpd_i
        standard_errors = _compute_standard_errors(elpd, self.plpd_i - other.plpd_i, self.num_rows)
        return LooDifference(self.elpd - other.elpd, *standard_errors)

    def __str__(self) -> str:
        num_unreliable = int((self.pareto_k > _MAX_RELIABLE_PARETO_K).sum())
        return (
            f"elpd   {self.elpd:.1f}\n"
            f"se     {self.se:.1f} (plus subsampling se {self.subsampling_se:.1f}: "
            f"{len(self.indices):,} of {self.num_rows:,} rows evaluated)\n"
            f"p_loo  {self.p_loo:.1f}\n"
            f"k      max Pareto k {self.pareto_k.max():.2f}; {num_unreliable} rows with "
            f"k > {_MAX_RELIABLE_PARETO_K:g}"
        )


def to_arviz(mcmc: MCMC, log_likelihood: Any = False, seed: int = 0) -> Any:
    """Return a run as an ArviZ object, for ArviZ 0.23 and 1.x.

    The object has the draws, the fields of ``extra_fields``, the observed data (unless an argument
    is a :class:`.HostArray`) and, on request, the log likelihood. It is evaluated in chunks of
    rows, so that only the log likelihood, one number per draw and row, is in memory.

    :param mcmc: a run of one of this package's kernels.
    :param log_likelihood: rows of the log likelihood: False for none (default), True for all, a
        number of random rows, or an array of indices, shape ``(n,)``. The rows' indices are the
        coordinate of the plate.
    :param seed: seed of the random rows, an integer. Default 0.
    :return: :class:`arviz.InferenceData` for ArviZ 0.x, :class:`xarray.DataTree` for 1.x.
    :raises ValueError: for a run of another kernel or before a run, and indices out of range.
    :raises ImportError: if ArviZ is not installed.
    """
    check_finished_run(mcmc, "to_arviz", uses_moments=False)
    data = _convert_draws(mcmc)
    if log_likelihood is False:
        return data
    plate = get_subsampled_plate(mcmc, "to_arviz")
    if log_likelihood is True or np.ndim(log_likelihood):
        indices = validate_row_indices(None if log_likelihood is True else log_likelihood, plate)
    else:
        errors.check_positive_int("log_likelihood", log_likelihood)
        if log_likelihood > plate.size:
            raise InvalidArgumentError(
                f"`log_likelihood` is {log_likelihood}, but plate '{plate.name}' has {plate.size} "
                "rows.",
                "pass a smaller number, or True for all rows.",
                "row-indices",
            )
        rng = np.random.default_rng(seed)
        indices = np.sort(rng.choice(plate.size, log_likelihood, replace=False))
    import xarray  # a dependency of ArviZ

    samples = mcmc.get_samples(group_by_chain=True)
    chains, draws = jax.tree.leaves(samples)[0].shape[:2]
    arrays = {}
    values, axes = evaluate_plate_sites(mcmc, samples, indices)
    for name, x in values.items():
        dims = [f"{name}_dim_{k}" for k in range(x.ndim - 2)]
        dims[axes[name]] = plate.name
        arrays[name] = (("chain", "draw", *dims), x)
    coords = {"chain": np.arange(chains), "draw": np.arange(draws), plate.name: indices}
    add_group(data, "log_likelihood", xarray.Dataset(arrays, coords=coords))
    return data


def loo(mcmc: MCMC, num_rows: int = 1000, seed: int = 0) -> LooEstimate:
    """Estimate leave-one-out (LOO) cross-validation at a random subset of the rows.

    The method is Pareto-smoothed importance sampling. It evaluates all rows at the posterior mean,
    and ``num_rows`` rows at all draws. To compare two models, subtract their estimates for the same
    ``num_rows`` and ``seed``: ``loo(one) - loo(another)`` estimates the difference over all rows.

    :param mcmc: a run of one of this package's kernels. Its model has one subsampled plate with one
        observed site, which has one value per row.
    :param num_rows: number of rows to evaluate, or all rows if there are fewer. Default 1000.
    :param seed: seed of the random rows, an integer. Default 0.
    :return: the estimate of the expected log predictive density, with both standard errors.
    :raises ValueError: for a run of another kernel, of another model, or before a run.
    :raises ImportError: if ArviZ is not installed.
    """
    num_all = get_subsampled_plate(mcmc, "loo").size
    errors.check_positive_int("num_rows", num_rows)
    data = to_arviz(mcmc, min(num_rows, num_all), seed)
    group = data["log_likelihood"]
    names = list(group.data_vars)
    if len(names) != 1 or group[names[0]].ndim != 3:
        raise InvalidModelError(
            "`loo` needs one observed site with one value per row, but the plate has the observed "
            f"sites {', '.join(map(repr, names)) or 'none'}.",
            "sum the log likelihoods of `to_arviz` for each row, and pass the sums to az.loo.",
            "loo-sites",
        )
    log_likelihood = group[names[0]]
    indices = np.asarray(log_likelihood.coords[log_likelihood.dims[-1]])
    arviz = _import_arviz("loo")
    with warnings.catch_warnings(action="ignore"):  # large Pareto k are in the result
        result = arviz.loo(data, pointwise=True)
    elpd_i, pareto_k = (
        np.asarray(x, np.float64).ravel()
        for x in (result["loo_i"] if _is_arviz_0x(arviz) else result.elpd_i, result.pareto_k)
    )
    # The mean of the unconstrained draws, as one draw of one chain.
    kernel = mcmc.sampler
    mean = RunData.from_mcmc(mcmc, "loo").draws.mean((0, 1))
    sites = kernel.get_constrain_fn(mcmc._args, mcmc._kwargs)(kernel.potential.unravel(mean))
    mean_draw = jax.tree.map(lambda x: jnp.asarray(x)[None, None], sites)
    plpd = evaluate_plate_sites(mcmc, mean_draw, np.arange(num_all))[0][names[0]].reshape(-1)
    plpd_i = plpd[indices].astype(np.float64)
    by_draw = np.asarray(log_likelihood, np.float64).reshape(-1, len(indices))
    lpd_i = np.logaddexp.reduce(by_draw, axis=0) - np.log(len(by_draw))
    se, subsampling_se = _compute_standard_errors(elpd_i, plpd_i, num_all)
    return LooEstimate(
        elpd=float(plpd.sum(dtype=np.float64) + num_all * (elpd_i - plpd_i).mean()),
        se=se,
        subsampling_se=subsampling_se,
        p_loo=float(num_all * (lpd_i - elpd_i).mean()),
        pareto_k=pareto_k,
        indices=indices,
        elpd_i=elpd_i,
        plpd_i=plpd_i,
        num_rows=num_all,
    )


def add_group(data: Any, group: str, dataset: Any) -> None:
    """Add a dataset as a group to an ArviZ object of either major version."""
    if hasattr(data, "add_groups"):
        data.add_groups({group: dataset})
    else:
        data[group] = type(data)(dataset)


def _compute_standard_errors(
    elpd_i: np.ndarray, plpd_i: np.ndarray, num_rows: int
) -> tuple[float, float]:
    """Return the SEs of a sum over all rows: as a sample of a population, and from a subset.

    The latter is estimated without bias from ``elpd_i - plpd_i`` at m rows; it is NaN for one row.
    """
    m, residuals = len(elpd_i), elpd_i - plpd_i
    variance = residuals.var(ddof=1) if m > 1 else np.nan
    subsampling_se = num_rows * np.sqrt((1.0 - m / num_rows) * variance / m)
    return float(np.sqrt(num_rows) * elpd_i.std()), float(subsampling_se)


def _import_arviz(caller: str) -> Any:
    # ArviZ 0.23 announces 1.0.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return errors.import_optional("arviz", f"`{caller}`", "arviz")


def _is_arviz_0x(arviz: Any) -> bool:
    return bool(arviz.__version__.startswith("0."))


def _convert_draws(mcmc: MCMC) -> Any:
    """Return an ArviZ object without log likelihoods; data on the host are left out."""
    arviz = _import_arviz("to_arviz")
    if not Arguments(mcmc._args, mcmc._kwargs).host_arrays:
        return arviz.from_numpyro(mcmc, log_likelihood=False)
    fields = mcmc.get_extra_fields(group_by_chain=True).items()
    groups = {
        "posterior": mcmc.get_samples(group_by_chain=True),
        # ArviZ stores arrays, but not fields that are dicts or tuples of them.
        "sample_stats": {name: x for name, x in fields if not isinstance(x, (dict, tuple))},
    }
    groups = jax.tree.map(np.asarray, groups)
    return arviz.from_dict(**groups) if _is_arviz_0x(arviz) else arviz.from_dict(groups)
