r"""A run as an ArviZ object, and leave-one-out cross-validation, whatever the number of rows.

ArviZ computes the log likelihood of every row at every draw, at once. Here it is computed by
chunks, and for some of the rows if there are many.

The log density of a row given all others, summed over all N rows, is estimated from m of them,
drawn at random without replacement, by what is cheap to know of all: :math:`\tilde\ell_i`, the
log likelihood of row i in the middle of the posterior. With
:math:`e_i = \mathrm{elpd}_i - \tilde\ell_i`

.. math::

    \widehat{\mathrm{elpd}} = \sum_{i\le N}\tilde\ell_i + \frac Nm\sum_{i\in S} e_i

is unbiased, with variance :math:`N^2(1 - m/N)\,s_e^2/m`: the difference estimator of Magnusson,
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
    evaluate_log_likelihood,
    get_subsampled_plate,
    validate_row_indices,
)
from numpyro_sgmcmc.diagnostics.run_data import RunData, check_finished_run
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = ["LooDifference", "LooEstimate", "loo", "to_arviz"]

_MAX_RELIABLE_PARETO_K = 0.7


class LooDifference(NamedTuple):
    """How much better one model predicts than another: ``loo(one) - loo(another)``.

    - **elpd** - difference of the expected log pointwise predictive densities of all rows.
    - **se** - its standard error for rows as of a population, from the differences row by row.
    - **subsampling_se** - its standard error because not all rows were looked at.
    """

    elpd: float
    se: float
    subsampling_se: float

    def __str__(self) -> str:
        return (
            f"elpd difference  {self.elpd:.1f}\n"
            f"se               {self.se:.1f}, and {self.subsampling_se:.2g} because not all rows "
            "were looked at"
        )


class LooEstimate(NamedTuple):
    """The estimate of one model. Of two at the same rows the difference is one minus the other, a
    :class:`LooDifference`.

    - **elpd** - expected log pointwise predictive density of all rows, each left out.
    - **se** - its standard error for rows as of a population, as ArviZ has it.
    - **subsampling_se** - its standard error because not all rows were looked at.
    - **p_loo** - effective number of parameters.
    - **pareto_k** - of the rows looked at, shape ``(m,)``: a row's part is not to be trusted above
      0.7.
    - **indices** - which they are, shape ``(m,)``.
    - **elpd_i** - their parts of the density, shape ``(m,)``.
    - **plpd_i** - their log likelihoods in the middle of the posterior, shape ``(m,)``.
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
        """How much better this model predicts, where both have looked at the same rows.

        :raises ValueError: for estimates at other rows.
        """
        if not isinstance(other, LooEstimate):
            return NotImplemented
        if self.num_rows != other.num_rows or not np.array_equal(self.indices, other.indices):
            raise InvalidArgumentError(
                "These estimates have looked at different rows: give `loo` the same `num_rows` and "
                "`seed`, for runs on the same rows in the same order."
            )
        elpd = self.elpd_i - other.elpd_i
        return LooDifference(
            elpd=self.elpd - other.elpd,
            se=_compute_population_se(elpd, self.num_rows),
            subsampling_se=_compute_subsampling_se(
                elpd - self.plpd_i + other.plpd_i, self.num_rows
            ),
        )

    def __str__(self) -> str:
        bad = int((self.pareto_k > _MAX_RELIABLE_PARETO_K).sum())
        return (
            f"elpd   {self.elpd:.1f}\n"
            f"se     {self.se:.1f}, and {self.subsampling_se:.1f} because {len(self.indices):,} rows "
            "were looked at\n"
            f"p_loo  {self.p_loo:.1f}\n"
            f"k      at most {self.pareto_k.max():.2f}; above {_MAX_RELIABLE_PARETO_K:g}, and not to be trusted, "
            f"for {bad} of these rows"
        )


def to_arviz(mcmc: MCMC, log_likelihood: Any = False, seed: int = 0) -> Any:
    """A run as an ArviZ object, on ArviZ 0.23 and 1.x.

    The draws, the fields of ``extra_fields`` and, where the data are in memory, the observed data;
    and the log likelihood if asked for, by chunks of rows, so that in memory is only what is
    returned: a number for each draw and row.

    :param mcmc: a run of one of this package's kernels.
    :param log_likelihood: False (default) for none, True for that of all rows, a number for so many
        rows at random, or the rows' numbers, shape ``(n,)``. The rows' numbers are the coordinate
        of the plate.
    :param seed: of the choice of rows.
    :return: ``InferenceData`` for ArviZ 0.x, ``DataTree`` for 1.x.
    :raises ValueError: for a run of another kernel or before a run, and rows that are not there.
    :raises ImportError: without ArviZ.
    """
    kernel = check_finished_run(mcmc, "to_arviz", uses_moments=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces 1.0
        arviz = errors.import_optional("arviz", "`to_arviz`", "arviz")
    data = _convert_draws(arviz, mcmc)
    if log_likelihood is False:
        return data
    rows = _select_row_indices(kernel, log_likelihood, seed)
    found, axes = evaluate_log_likelihood(mcmc, mcmc.get_samples(group_by_chain=True), rows)
    _add_group(
        data,
        "log_likelihood",
        _make_log_likelihood_dataset(found, axes, kernel.potential.plates[0].name, rows),
    )
    return data


def loo(mcmc: MCMC, num_rows: int = 1000, seed: int = 0) -> LooEstimate:
    """Leave-one-out cross-validation by Pareto-smoothed importance sampling at some of the rows.

    Costs one pass over the data and the log likelihoods of all draws at ``num_rows`` rows. For two
    models, ``loo(one) - loo(another)`` with the same ``num_rows`` and ``seed`` is the difference of
    all rows, with its standard errors.

    :param mcmc: a run of one of this package's kernels on a model with one subsampled plate, inside
        of which one site is observed, with one value a row.
    :param num_rows: rows to look at; all, if there are no more. Default 1000.
    :param seed: of the choice of rows.
    :raises ValueError: for a run of another kernel or before a run, and for another model.
    :raises ImportError: without ArviZ.
    """
    kernel = check_finished_run(mcmc, "loo", uses_moments=False)
    errors.check_positive_int("num_rows", num_rows)
    num = get_subsampled_plate(kernel, "loo").size
    data = to_arviz(mcmc, min(num_rows, num), seed)
    log_likelihood = data["log_likelihood"]
    names = list(log_likelihood.data_vars)
    if len(names) != 1 or log_likelihood[names[0]].ndim != 3:
        raise InvalidArgumentError(
            "`loo` needs one observed site inside the subsampled plate, with one value a row, but "
            f"the model has {', '.join(map(repr, names)) or 'none'}: sum the log likelihoods that "
            "`to_arviz` gives of a row, and pass them to az.loo."
        )
    of_draws = log_likelihood[names[0]]
    rows = np.asarray(of_draws.coords[of_draws.dims[-1]])
    elpd, pareto_k = _compute_pointwise_loo(data)
    middle = _compute_posterior_mean_draw(mcmc)
    everywhere = evaluate_log_likelihood(mcmc, middle, np.arange(num))[0][names[0]].reshape(-1)
    middle_i = everywhere[rows].astype(np.float64)
    given_all = np.logaddexp.reduce(np.asarray(of_draws, np.float64).reshape(-1, len(rows)), axis=0)
    lpd = given_all - np.log(of_draws.shape[0] * of_draws.shape[1])
    return LooEstimate(
        elpd=float(everywhere.sum(dtype=np.float64) + num * (elpd - middle_i).mean()),
        se=_compute_population_se(elpd, num),
        subsampling_se=_compute_subsampling_se(elpd - middle_i, num),
        p_loo=float(num * (lpd - elpd).mean()),
        pareto_k=pareto_k,
        indices=rows,
        elpd_i=elpd,
        plpd_i=middle_i,
        num_rows=num,
    )


def _compute_population_se(pointwise: np.ndarray, num_rows: int) -> float:
    """Of a sum over all rows, as if they were drawn from a population."""
    return float(np.sqrt(num_rows) * pointwise.std())


def _compute_subsampling_se(pointwise: np.ndarray, num_rows: int) -> float:
    """Of a sum over all rows made up from some, drawn without replacement."""
    return float(
        num_rows * np.sqrt((1.0 - len(pointwise) / num_rows) / len(pointwise)) * pointwise.std()
    )


def _convert_draws(arviz: Any, mcmc: MCMC) -> Any:
    """An ArviZ object without log likelihoods; without observed data where they are on the host."""
    if not Arguments(mcmc._args, mcmc._kwargs).host_arrays:
        return arviz.from_numpyro(mcmc, log_likelihood=False)
    draws = mcmc.get_samples(group_by_chain=True)
    fields = {k: x for k, x in mcmc.get_extra_fields(group_by_chain=True).items() if _is_array(x)}
    groups = {"posterior": draws, "sample_stats": fields}
    groups = {k: jax.tree.map(np.asarray, x) for k, x in groups.items()}
    return arviz.from_dict(**groups) if _is_arviz_0x(arviz) else arviz.from_dict(groups)


def _is_arviz_0x(arviz: Any) -> bool:
    return bool(arviz.__version__.startswith("0."))


def _is_array(x: Any) -> bool:
    return not isinstance(x, (dict, tuple))


def _select_row_indices(kernel: Any, selection: Any, seed: int) -> np.ndarray:
    """The rows' numbers: all, so many at random, or those given."""
    plate = get_subsampled_plate(kernel, "to_arviz")
    if selection is True:
        return np.arange(plate.size)
    if np.ndim(selection):
        return validate_row_indices(selection, plate)
    errors.check_positive_int("log_likelihood", selection)
    if selection > plate.size:
        raise InvalidArgumentError(
            f"`log_likelihood` asks for {selection} rows, but there are {plate.size}."
        )
    return np.sort(np.random.default_rng(seed).choice(plate.size, selection, replace=False))


def _make_log_likelihood_dataset(
    log_lik_by_site: dict[str, np.ndarray], axes: dict[str, int], plate_name: str, indices: Any
) -> Any:
    """Log likelihoods by site, with the rows' numbers as the plate's coordinate."""
    import xarray  # ArviZ brings it

    arrays = {}
    for name, x in log_lik_by_site.items():
        dims = [f"{name}_dim_{k}" for k in range(x.ndim - 2)]
        dims[axes[name]] = plate_name
        arrays[name] = (("chain", "draw", *dims), x)
    chains, draws = next(iter(log_lik_by_site.values())).shape[:2]
    coords = {"chain": np.arange(chains), "draw": np.arange(draws), plate_name: indices}
    return xarray.Dataset(arrays, coords=coords)


def _add_group(data: Any, group: str, dataset: Any) -> None:
    """Put a group into an ArviZ object of either major version."""
    if hasattr(data, "add_groups"):
        data.add_groups({group: dataset})
    else:
        data[group] = type(data)(dataset)


def _compute_pointwise_loo(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """ArviZ's pointwise elpd, and its Pareto k."""
    import arviz

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large k are told by their numbers
        found = arviz.loo(data, pointwise=True)
    elpd = found["loo_i"] if _is_arviz_0x(arviz) else found.elpd_i
    return np.asarray(elpd, np.float64).ravel(), np.asarray(found.pareto_k, np.float64).ravel()


def _compute_posterior_mean_draw(mcmc: MCMC) -> dict[str, Any]:
    """The mean of the unconstrained draws as one draw of one chain."""
    kernel = mcmc.sampler
    middle = RunData.from_mcmc(mcmc, "loo", allow_local_latents=True).draws.mean((0, 1))
    sites = kernel.get_constrain_fn(mcmc._args, mcmc._kwargs)(kernel.potential.unravel(middle))
    return {name: jnp.asarray(x)[None, None] for name, x in sites.items()}
