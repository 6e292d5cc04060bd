"""Users' functions of the draws, evaluated a chunk of rows at a time.

What the model says of a run's rows, for each draw, by chunks of rows.

Only a chunk of rows and the result are in memory, whatever the number of rows.

Pointwise log likelihoods by chunks of rows, whatever the number of rows.

Data as the posterior would have them, by chunks of rows, whatever the number of rows.

How well a run knows what is computed from its parameters, such as predictions.

Weights of a network, components of a mixture and factors of a matrix may be exchanged, turned or
mirrored without any change in what the model says: their R-hat is large and means nothing, while
chains agree on every prediction. So what is wanted is judged, not what it is computed from.

Reference: Franzese, Milios, Filippone and Michiardi (2021), *Revisiting the effects of
stochasticity for Hamiltonian samplers*, appendix F.2, for the Kolmogorov distance of predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.distributions import Unit
from numpyro.handlers import seed, substitute, trace, uncondition
from numpyro.infer import MCMC, Predictive

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.diagnostics.diagnosis import format_html_table
from numpyro_sgmcmc.diagnostics.distances import compute_ks_statistic
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats, check_finished_run
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.handlers import FullDataModel
from numpyro_sgmcmc.progress import show_data_passes
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

__all__ = [
    "DrawFunctions",
    "FunctionSummary",
    "PredictiveSummary",
    "evaluate_log_likelihood",
    "evaluate_plate_sites",
    "get_draws_by_site",
    "get_subsampled_plate",
    "log_likelihood",
    "posterior_predictive",
    "predictive_summary",
    "validate_row_indices",
]

_MAX_RESULT_ELEMENTS_PER_CHUNK = 2**24  # of all draws together in a chunk of rows, about


_MAX_RESULT_ELEMENTS_PER_MAP_BATCH = (
    2**22
)  # of the draws at which functions are evaluated at once, about


def get_draws_by_site(run: Any, arg_name: str) -> dict[str, Array]:
    """Draws of a run, each site's with axes of chains and draws first.

    :param run: an ``MCMC`` that has run, or a dict of draws with these axes.
    :param arg_name: of the argument, for the message.
    :raises ValueError: for anything else, or fewer than two draws a chain.
    """
    found = _extract_draws(run, arg_name)
    if _count_chains_and_draws(found)[1] < 2:
        raise InvalidArgumentError(
            f"`{arg_name}` has one draw a chain, but two at least are needed."
        )
    return found


def _extract_draws(run: Any, arg_name: str) -> dict[str, Array]:
    if isinstance(run, MCMC):
        if run.last_state is None:
            raise InvalidArgumentError(
                f"There are no draws in `{arg_name}` yet: call its `run` first."
            )
        return dict(run.get_samples(group_by_chain=True))
    shapes = {np.shape(x)[:2] for x in run.values()} if isinstance(run, Mapping) else set()
    if len(shapes) != 1 or len(next(iter(shapes))) < 2:
        raise InvalidArgumentError(
            f"`{arg_name}` is a {type(run).__name__}, but must be an MCMC that has run, or a dict of "
            "draws by site, all with the same two first axes (chains, draws, ...)."
        )
    return {k: jnp.asarray(x) for k, x in run.items()}


@dataclass(frozen=True)
class DrawFunctions:
    """
    - **fn** - maps one draw, a dict by site, and rows to an array or a dict of arrays.
    - **row_arrays** - arrays of which as many rows at a time go to ``fn``, whose results have them along
      their first axis; none for functions of the draw alone.
    - **takes_key** - whether ``fn`` takes a random key before the draw.
    - **elements_per_result** - numbers in memory for each number of the results, about.
    """

    fn: Callable[..., Any]
    row_arrays: tuple[np.ndarray, ...]
    takes_key: bool = False
    elements_per_result: int = 1

    @classmethod
    def from_fn(cls, fn: Any, row_arrays: tuple[Any, ...]) -> DrawFunctions:
        """What a user has passed: a function, or a ``Predictive`` and its model's arguments.

        :raises ValueError: for anything else, and for rows of different lengths.
        """
        arrays = tuple(np.asarray(x) for x in row_arrays)
        if any(x.dtype.kind not in "biufc" for x in arrays):
            raise InvalidArgumentError(
                "What follows `fn` must be arrays of numbers, but their types are "
                f"{', '.join(str(x.dtype) for x in arrays)}: give other things to `fn` by "
                "functools.partial."
            )
        lengths = sorted({x.shape[0] if x.ndim else 0 for x in arrays})
        if len(lengths) > 1 or 0 in lengths:
            raise InvalidArgumentError(
                "What follows `fn` must be arrays with as many rows each, at least one, but their "
                f"shapes are {', '.join(str(x.shape) for x in arrays)}: give other things to `fn` "
                "by functools.partial."
            )
        if isinstance(fn, Predictive):
            if fn.guide is not None:
                raise InvalidArgumentError(
                    "`fn` is a Predictive with a guide, which has draws of its own."
                )
            return cls(partial(_predict_one_draw, fn), arrays, takes_key=True)
        if not callable(fn):
            raise InvalidArgumentError(
                f"`fn` is a {type(fn).__name__}, but must be a function of a draw (a dict of "
                "values by site), or a Predictive."
            )
        return cls(fn, arrays)

    def eval_shape(self, draws: Mapping[str, Array]) -> dict[str, jax.ShapeDtypeStruct]:
        """The results' names, shapes and types at one draw, on all rows.

        :raises ValueError: for a site of which there are no draws, and for results that are no
            arrays of numbers, or lack the rows' axis.
        """
        one = {k: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for k, x in draws.items()}
        key = jax.eval_shape(lambda: random.key(0))
        try:
            found = jax.eval_shape(
                lambda k, z, *rows: self.evaluate_draw(k, z, rows), key, one, *self.row_arrays
            )
        except KeyError as error:
            if not error.args or error.args[0] in draws:
                raise
            raise InvalidArgumentError(
                f"`fn` asks for '{error.args[0]}', but there are draws of "
                f"{', '.join(repr(k) for k in draws)}."
            ) from error
        if not found:
            raise InvalidArgumentError("`fn` returns nothing.")
        for name, x in found.items():
            if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
                raise InvalidArgumentError(
                    f"`fn` returns type {x.dtype} as '{name}', but must return numbers."
                )
            if self.row_arrays and x.shape[:1] != self.row_arrays[0].shape[:1]:
                raise InvalidArgumentError(
                    f"`fn` returns shape {x.shape} as '{name}', but must return a result for each "
                    f"of the {len(self.row_arrays[0])} rows along the first axis."
                )
        return found

    def iterate_chunks(
        self, runs: Sequence[Mapping[str, Array]], rng_key: Array
    ) -> Iterator[tuple[Any, list[dict[str, np.ndarray]]]]:
        """The rows' places, and for each run the results there by name, ``(chains, draws, rows,
        ...)``. Without rows, one chunk with all results, ``(chains, draws, ...)``.
        """
        form, *_ = [self.eval_shape(draws) for draws in runs]
        numbers = sum(int(np.prod(x.shape)) for x in form.values())
        length = len(self.row_arrays[0]) if self.row_arrays else 1
        a_row = -(-numbers // length)
        most = max(int(np.prod(_count_chains_and_draws(draws))) for draws in runs)
        fitting = min(
            _MAX_RESULT_ELEMENTS_PER_CHUNK // (most * a_row),
            _MAX_RESULT_ELEMENTS_PER_MAP_BATCH // (a_row * self.elements_per_result),
        )
        chunk = max(1, min(fitting, length))
        at_once = max(
            1, _MAX_RESULT_ELEMENTS_PER_MAP_BATCH // (chunk * a_row * self.elements_per_result)
        )
        evaluate = jax.jit(self._evaluate_draws, static_argnames="batch_size")
        for start in range(0, length, chunk):
            first = min(start, length - chunk)  # the last chunk is as long: one compilation
            part = tuple(x[first : first + chunk] for x in self.row_arrays)
            found = []
            for k, draws in enumerate(runs):
                key = random.fold_in(random.fold_in(rng_key, k), first)
                values = evaluate(
                    random.split(key, _count_chains_and_draws(draws)), draws, part, at_once
                )
                if self.row_arrays:
                    values = jax.tree.map(lambda x: x[:, :, start - first :], values)  # noqa: B023
                found.append(jax.tree.map(np.asarray, values))
            yield (slice(start, first + chunk) if self.row_arrays else ...), found

    def _evaluate_draws(
        self, keys: Array, draws: dict[str, Array], row_arrays: tuple[Array, ...], batch_size: int
    ) -> dict[str, Array]:
        def one(x: tuple[Array, dict[str, Array]]) -> dict[str, Array]:
            return self.evaluate_draw(*x, row_arrays)

        shape = keys.shape
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (keys, draws))
        found = lax.map(one, flat, batch_size=batch_size)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)

    def evaluate_draw(self, key: Any, draw: Any, row_arrays: tuple[Any, ...]) -> dict[str, Array]:
        """Results at one draw by name."""
        found = self.fn(key, draw, *row_arrays) if self.takes_key else self.fn(draw, *row_arrays)
        if not isinstance(found, Mapping):
            found = {getattr(self.fn, "__name__", "fn"): found}
        return {str(k): jnp.asarray(x) for k, x in found.items()}


def _predict_one_draw(
    predictive: Predictive, key: Array, draw: dict[str, Array], *model_args: Array
) -> Any:
    """One draw's predictions, by NumPyro."""
    again = Predictive(
        predictive.model,
        posterior_samples=draw,
        params=predictive.params,
        return_sites=predictive.return_sites,
        infer_discrete=predictive.infer_discrete,
        condition_deterministic=predictive.condition_deterministic,
        batch_ndims=0,
    )
    return again(key, *model_args)


def _count_chains_and_draws(draws: Mapping[str, Array]) -> tuple[int, int]:
    """Chains, and draws of each."""
    chains, num = jax.tree.leaves(draws)[0].shape[:2]
    return chains, num


_MAX_DRAW_ROW_PAIRS_PER_CHUNK = 2**22


_MAX_ROWS_PER_CHUNK = 8192


def get_subsampled_plate(kernel: SGMCMCKernel, caller: str) -> Plate:
    """The one subsampled plate.

    :param caller: name of the function that needs it, for the message.
    :raises ValueError: for a model with none, or several.
    """
    plates = kernel.potential.plates
    if kernel.potential.local_latents is not None:
        raise InvalidArgumentError(
            f"`{caller}` goes by rows, but here each has latent values of its own: "
            "az.from_numpyro(mcmc, log_likelihood=True) and numpyro.infer.Predictive take draws "
            "with collect_local_sites=True."
        )
    if len(plates) != 1 or kernel.model is None:
        names = ", ".join(f"'{p.name}'" for p in plates) or "none"
        raise InvalidArgumentError(
            f"`{caller}` goes by the rows of one subsampled plate, but the model has {names}."
        )
    return plates[0]


def validate_row_indices(indices: Any, plate: Plate) -> np.ndarray:
    """Numbers of a plate's rows, as an array.

    :raises ValueError: for what is none.
    """
    indices = np.asarray(indices)
    if indices.ndim != 1 or indices.size == 0 or indices.dtype.kind not in "iu":
        raise InvalidArgumentError("`rows` must be integers of shape (n,), at least one.")
    if not 0 <= indices.min() <= indices.max() < plate.size:
        raise InvalidArgumentError(f"`rows` must lie between 0 and {plate.size - 1}.")
    return indices


def evaluate_plate_sites(
    mcmc: MCMC,
    samples: dict[str, Any],
    row_indices: np.ndarray,
    progress_label: str,
    read_site: Callable[[dict[str, Any]], Array | None],
    handler: Callable[[Callable], Callable] = lambda model: model,
    rng_key: Array | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """A number or more of each draw and row of the one plate, and the rows' axes.

    :param samples: by site, ``(chains, draws, ...)``.
    :param row_indices: integers of shape ``(n,)``.
    :param progress_label: it is, for the progress bar.
    :param read_site: gives it of a site inside the plate, as it stands in a trace, or None.
    :param handler: put around the seeded model.
    :param rng_key: of what the model draws; each draw and chunk has one of its own.
    :return: by site, ``(chains, draws, ...)``, and the axis, from the right, of the rows.
    :raises ValueError: for draws that were not kept.
    """
    kernel: SGMCMCKernel = mcmc.sampler
    target, model, plate = kernel.potential, kernel.model, kernel.potential.plates[0]
    assert isinstance(model, FullDataModel)
    missing = [s.name for s in target.sites or () if s.name not in samples]
    if missing:
        raise InvalidArgumentError(
            f"The draws of site '{missing[0]}' were not kept: run without '~z.{missing[0]}'."
        )
    chains, draws = jax.tree.leaves(samples)[0].shape[:2]
    axes: dict[str, int] = {}

    def of_draw(sites: Any, key: Array, indices: Array, arguments: Arguments) -> dict[str, Array]:
        run = substitute(
            handler(seed(model.with_subsample_indices({plate.name: indices}), key)), data=sites
        )
        found = {}
        for name, site in trace(run).get_trace(*arguments.args, **arguments.kwargs).items():
            frames = [f for f in site.get("cond_indep_stack", ()) if f.name == plate.name]
            value = read_site(site) if frames else None
            if value is not None:
                axes[name] = frames[0].dim
                found[name] = value
        return found

    of_all = jax.jit(jax.vmap(of_draw, in_axes=(0, 0, None, None)))
    flat = jax.tree.map(lambda x: x.reshape(chains * draws, *x.shape[2:]), samples)
    arguments = Arguments(mcmc._args, mcmc._kwargs)
    hosts, arguments = arguments.host_arrays, arguments.map_arrays(jnp.asarray)
    chunk = max(
        1,
        min(
            len(row_indices), _MAX_ROWS_PER_CHUNK, _MAX_DRAW_ROW_PAIRS_PER_CHUNK // (chains * draws)
        ),
    )
    rng_key = random.key(0) if rng_key is None else rng_key
    result: dict[str, np.ndarray] = {}
    with (
        unwrap_callback_errors(hosts),
        show_data_passes(progress_label, hosts, len(row_indices) / plate.size),
    ):
        for start in range(0, len(row_indices), chunk):
            first = min(
                start, len(row_indices) - chunk
            )  # the last chunk is as long: one compilation
            some = jnp.asarray(row_indices[first : first + chunk], jnp.int32)
            keys = random.split(random.fold_in(rng_key, start), chains * draws)
            for name, values in of_all(flat, keys, some, arguments).items():
                shape = list(values.shape)
                shape[axes[name]] = len(row_indices)
                whole = result.setdefault(name, np.empty(shape, values.dtype))
                there = np.moveaxis(whole, axes[name], 0)
                there[first : first + chunk] = np.moveaxis(np.asarray(values), axes[name], 0)
    return {k: x.reshape(chains, draws, *x.shape[1:]) for k, x in result.items()}, axes


def log_likelihood(mcmc: MCMC, rows: Any = None) -> dict[str, np.ndarray]:
    """Log likelihoods of the draws at each row, by chunks of rows.

    What ``numpyro.infer.log_likelihood(kernel.model, ...)`` gives, for data that are not loaded
    whole: only a chunk of rows and the result are in memory. The result has a number for every
    draw and row; for many rows ask for some of them, such as a random subset for an estimate of
    the predictive density.

    :param mcmc: a run of one of this package's kernels, on a model with one subsampled plate.
    :param rows: which rows, integers of shape ``(n,)``. Default None: all.
    :return: by observed site inside the plate, an array ``(chains, draws, ...)`` whose axis for
        the plate has the rows in their order.
    :raises ValueError: for a run of another kernel or before a run, a model without a subsampled
        plate or with several, rows that are not there, or draws that were not kept.
    """
    kernel = check_finished_run(mcmc, "log_likelihood", uses_moments=False)
    plate = get_subsampled_plate(kernel, "log_likelihood")
    rows = validate_row_indices(np.arange(plate.size) if rows is None else rows, plate)
    return evaluate_log_likelihood(mcmc, mcmc.get_samples(group_by_chain=True), rows)[0]


def evaluate_log_likelihood(
    mcmc: MCMC, samples: dict[str, Any], indices: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Those of such draws at such rows, and the rows' axes (:func:`at_rows`)."""
    return evaluate_plate_sites(mcmc, samples, indices, "log likelihood", _read_log_likelihood)


def _read_log_likelihood(site: dict[str, Any]) -> Array | None:
    is_data = site["type"] == "sample" and site["is_observed"]
    return site["fn"].log_prob(site["value"]) if is_data else None


def posterior_predictive(
    mcmc: MCMC, rng_key: Array, rows: Any = None, num_draws: int | None = None
) -> dict[str, np.ndarray]:
    """Draws of the observed sites at the run's own rows: replicated data, for predictive checks.

    What ``numpyro.infer.Predictive(kernel.model, ...)`` gives where the data are ``None``, for data
    that are not loaded whole, on the host as well, and for models in which the observed values
    cannot be left out: only a chunk of rows and the result are in memory. Deterministic sites
    inside the plate come along. Other rows than the run's: ``Predictive``.

    :param mcmc: a run of one of this package's kernels, on a model with one subsampled plate.
    :param rng_key: random key.
    :param rows: which rows, integers of shape ``(n,)``. Default None: all.
    :param num_draws: of each chain, evenly spaced, at least 1. Default None: all.
    :return: by observed or deterministic site inside the plate, an array ``(chains, draws, ...)``
        whose axis for the plate has the rows in their order.
    :raises ValueError: for a run of another kernel or before a run, a model without a subsampled
        plate or with several, rows that are not there, or draws that were not kept.
    """
    kernel = check_finished_run(mcmc, "posterior_predictive", uses_moments=False)
    errors.check_rng_key(rng_key)
    plate = get_subsampled_plate(kernel, "posterior_predictive")
    rows = validate_row_indices(np.arange(plate.size) if rows is None else rows, plate)
    samples = mcmc.get_samples(group_by_chain=True)
    if num_draws is not None:
        errors.check_positive_int("num_draws", num_draws)
        all_draws = jax.tree.leaves(samples)[0].shape[1]
        places = np.linspace(0, all_draws - 1, min(num_draws, all_draws)).astype(int)
        samples = {name: x[:, places] for name, x in samples.items()}
    return evaluate_plate_sites(
        mcmc, samples, rows, "predictive", _read_replicated_value, uncondition, rng_key
    )[0]


def _read_replicated_value(site: dict[str, Any]) -> Array | None:
    if site["type"] == "deterministic":
        return site["value"]
    is_data = site["type"] == "sample" and site["infer"].get("was_observed")
    return site["value"] if is_data and not isinstance(site["fn"], Unit) else None  # no factor


_TABLE_NOTE = "Largest R-hat and smallest ESS; Kolmogorov distances, from 0 to 1, are means."


_KOLMOGOROV_MEAN = np.sqrt(np.pi / 2.0) * np.log(2.0)  # of his distribution


class FunctionSummary(NamedTuple):
    """One function of the draws; arrays of its shape at one draw.

    - **mean** - posterior mean.
    - **sd** - posterior standard deviation.
    - **r_hat** - split R-hat; NaN for chains of less than 50 draws.
    - **ess** - effective sample size; NaN for what is the same at all draws.
    - **between_chain_distance** - Kolmogorov distance between a chain and all others, from 0 to 1, the mean over
      the chains; of one chain, between its halves.
    - **expected_distance** - what **between_chain_distance** is, about, where chains agree and draws are as many.
    - **distance_to_reference** - Kolmogorov distance to the reference; NaN without one.
    - **reference_between_chain_distance** - the reference's own **between_chain_distance**; NaN without one.
    """

    mean: np.ndarray
    sd: np.ndarray
    r_hat: np.ndarray
    ess: np.ndarray
    between_chain_distance: np.ndarray
    expected_distance: np.ndarray
    distance_to_reference: np.ndarray
    reference_between_chain_distance: np.ndarray


@dataclass(frozen=True, repr=False)
class PredictiveSummary:
    """What :func:`predictive_summary` found; prints as a table, in a notebook as HTML.

    :param functions: by name.
    :param has_reference: whether there was a reference.
    """

    functions: dict[str, FunctionSummary]
    has_reference: bool

    def __getitem__(self, name: str) -> FunctionSummary:
        return self.functions[name]

    def _make_table_cells(self) -> list[list[str]]:
        """The table's cells, its header first."""
        columns = ["function", "size", "R-hat", "ESS", "between chains", "by chance"]
        if self.has_reference:
            columns += ["to the reference", "reference's own"]
        rows = [columns]
        for name, f in self.functions.items():
            row = [
                name,
                str(f.mean.size),
                _format_cell(np.nanmax, f.r_hat, "{:.3f}"),
                _format_cell(np.nanmin, f.ess, "{:.0f}"),
                _format_cell(np.mean, f.between_chain_distance, "{:.3f}"),
                _format_cell(np.nanmean, f.expected_distance, "{:.3f}"),
            ]
            if self.has_reference:
                row += [
                    f"{f.distance_to_reference.mean():.3f}",
                    f"{f.reference_between_chain_distance.mean():.3f}",
                ]
            rows.append(row)
        return rows

    def __str__(self) -> str:
        rows = self._make_table_cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            first, *others = zip(row, widths, strict=True)
            lines.append("  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in others)]))
        return "\n".join([*lines, "", _TABLE_NOTE])

    def _repr_html_(self) -> str:
        header, *rows = self._make_table_cells()
        return format_html_table(header, rows, [_TABLE_NOTE])

    __repr__ = __str__

    def to_dataset(self) -> Any:
        """The summary as an :class:`xarray.Dataset`: variables such as ``mean`` with a leading axis
        ``statistic``, by function.
        """
        xarray = errors.import_optional("xarray", "PredictiveSummary.to_dataset", "arviz")
        found = {}
        for name, f in self.functions.items():
            axes = [f"{name}_dim_{k}" for k in range(f.mean.ndim)]
            found[name] = (["statistic", *axes], np.stack(f))
        return xarray.Dataset(found, coords={"statistic": list(FunctionSummary._fields)})


def _format_cell(reduce_fn: Callable[[np.ndarray], Any], values: np.ndarray, template: str) -> str:
    """One number for an array, or none where it holds none."""
    return "-" if np.isnan(values).all() else template.format(reduce_fn(values))


def predictive_summary(
    mcmc: Any,
    fn: Callable[..., Any] | Predictive,
    *rows: Any,
    reference: Any = None,
    rng_key: Array | None = None,
) -> PredictiveSummary:
    """R-hat, effective sample sizes and Kolmogorov distances of functions of the draws.

    ::

        def mean(draw, X):
            return X @ draw["beta"]

        predictive_summary(mcmc, mean, X_test, reference=nuts)

    A chunk of the rows at a time, so that predictions for draws times rows are never in memory.

    :param mcmc: a run of any kernel, NumPyro's own too; or a dict of draws by site, with axes
        ``(chains, draws, ...)``.
    :param fn: a function of one draw, a dict of values by site, and rows, that returns an array or
        a dict of arrays; or a :class:`~numpyro.infer.Predictive`, of which model, parameters and
        sites are used.
    :param rows: arrays to cut into chunks of rows, with as many rows each; ``fn`` gets the chunks
        after the draw, and its results must have a place for each row along their first axis. A
        ``Predictive`` gets them as its model's arguments.
    :param reference: a run that is trusted, as ``mcmc``, for distances to it. Default: none.
    :param rng_key: for a ``Predictive`` that draws. Default: ``random.key(0)``.
    :raises ValueError: for runs without draws of what ``fn`` asks for, rows that are no numbers or
        of different lengths, or results that are no numbers, are not finite, or lack the rows'
        axis.
    """
    runs = [get_draws_by_site(mcmc, "mcmc")]
    if reference is not None:
        runs.append(get_draws_by_site(reference, "reference"))
    functions = DrawFunctions.from_fn(fn, rows)
    rng_key = random.key(0) if rng_key is None else rng_key
    errors.check_rng_key(rng_key)
    found = {
        name: FunctionSummary(*(np.full(x.shape, np.nan) for _ in FunctionSummary._fields))
        for name, x in functions.eval_shape(runs[0]).items()
    }
    for where, values in functions.iterate_chunks(runs, rng_key):
        for name, into in found.items():
            for whole, part in zip(
                into, _summarize_function(name, [v[name] for v in values]), strict=True
            ):
                whole[where] = part
    return PredictiveSummary(found, has_reference=reference is not None)


def _summarize_function(name: str, values: list[np.ndarray]) -> FunctionSummary:
    """That of some places.

    :param values: of the run, and of the reference if there is one; ``(chains, draws, ...)``.
    """
    for x in values:
        if not np.isfinite(x).all():
            raise InvalidArgumentError(f"`{name}` is not finite at some of the draws.")
    x = values[0].astype(np.float64)
    dependence = ConvergenceStats.from_draws(x.reshape(*x.shape[:2], -1))
    ess = dependence.ess.reshape(x.shape[2:])
    missing = np.full(x.shape[2:], np.nan)
    chains = max(2, len(x))
    summary = FunctionSummary(
        mean=x.mean((0, 1)),
        sd=x.std((0, 1)),
        r_hat=dependence.r_hat.reshape(x.shape[2:]),
        ess=ess,
        between_chain_distance=_compute_between_chain_distance(x),
        expected_distance=_KOLMOGOROV_MEAN * np.sqrt((chains + chains / (chains - 1)) / ess),
        distance_to_reference=missing,
        reference_between_chain_distance=missing,
    )
    if len(values) == 1:
        return summary
    trusted = values[1].astype(np.float64)
    pooled = (v.reshape(-1, *v.shape[2:]) for v in (x, trusted))
    return summary._replace(
        distance_to_reference=compute_ks_statistic(*pooled),
        reference_between_chain_distance=_compute_between_chain_distance(trusted),
    )


def _compute_between_chain_distance(values: np.ndarray) -> np.ndarray:
    """Kolmogorov distance between a chain and all others, the mean over the chains.

    :param values: shape ``(chains, draws, ...)``.
    """
    if len(values) == 1:
        half = values.shape[1] // 2
        return compute_ks_statistic(values[0, :half], values[0, half:])
    found = [
        compute_ks_statistic(values[k], np.delete(values, k, axis=0).reshape(-1, *values.shape[2:]))
        for k in range(len(values))
    ]
    return np.asarray(np.mean(found, axis=0))
