"""Log likelihoods, predictions and other functions of the draws, evaluated by chunks of rows.

Only a chunk of rows and the result are in memory, whatever the number of rows.

- :func:`log_likelihood` and :func:`posterior_predictive` evaluate the model at the run's own rows.
- :func:`predictive_summary` diagnoses the convergence of functions of the draws, such as
  predictions at test points. The weights of a network, the components of a mixture and the factors
  of a matrix can be permuted, rotated or reflected without changing the likelihood; their R-hat is
  large and has no meaning, while chains may agree on every prediction.

Reference: Franzese, Milios, Filippone and Michiardi (2021), *Revisiting the effects of
stochasticity for Hamiltonian samplers*, appendix F.2, for the Kolmogorov distance of predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from numpyro_sgmcmc.diagnostics.diagnosis import Table
from numpyro_sgmcmc.diagnostics.distances import compute_ks_statistic
from numpyro_sgmcmc.diagnostics.run_data import (
    ConvergenceStats,
    check_finished_run,
    check_has_data,
    check_sites_kept,
)
from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError
from numpyro_sgmcmc.model.enumeration import compute_log_densities, sample_states
from numpyro_sgmcmc.model.handlers import set_subsample_indices
from numpyro_sgmcmc.progress import show_data_passes

# Bounds on memory. Values of all draws together in a chunk of rows, and values that are computed
# at once, of functions of the draws:
_MAX_ELEMENTS_PER_CHUNK = 2**24
_MAX_ELEMENTS_PER_BATCH = 2**22
# Pairs of a draw and a row, and rows, at which a model is evaluated at once:
_MAX_DRAW_ROW_PAIRS_PER_CHUNK = 2**22
_MAX_ROWS_PER_CHUNK = 8192

# Mean of the Kolmogorov distribution.
_KOLMOGOROV_MEAN = np.sqrt(np.pi / 2.0) * np.log(2.0)
# Title, field, reduction over values and format; the last two columns need a reference.
_TABLE_COLUMNS: tuple[tuple[str, str, Callable[[np.ndarray], Any], str], ...] = (
    ("R-hat", "r_hat", np.nanmax, ".3f"),
    ("ESS", "ess", np.nanmin, ".0f"),
    ("between chains", "between_chain_distance", np.mean, ".3f"),
    ("expected", "expected_distance", np.nanmean, ".3f"),
    ("to reference", "distance_to_reference", np.mean, ".3f"),
    ("within reference", "reference_between_chain_distance", np.mean, ".3f"),
)
_TABLE_NOTE = "Largest R-hat and smallest ESS; Kolmogorov distances, from 0 to 1, are means."


def log_likelihood(mcmc: MCMC, rows: Any = None) -> dict[str, np.ndarray]:
    """Return the log likelihood of each draw at each row, in chunks of rows.

    It equals ``numpyro.infer.log_likelihood(kernel.model, ...)``, but only a chunk of rows and the
    result, one number per draw and row, are in memory. If discrete sites are summed out, a row has
    one value, the log of the sum over their states. Its name is that of the observed site, or that
    of the plate if several sites are observed.

    :param mcmc: a run of one of this package's kernels, on a model with one subsampled plate.
    :param rows: indices of the rows, integers of shape ``(n,)``. Default None: all rows.
    :return: a dict from the observed sites inside the plate to arrays ``(chains, draws, ...)``,
        whose axis for the plate has the rows in their order.
    :raises ValueError: for a run of another kernel or before a run, a model without a subsampled
        plate or with several, indices out of range, or draws that were not kept.
    """
    indices = validate_row_indices(rows, get_subsampled_plate(mcmc, "log_likelihood"))
    return evaluate_plate_sites(mcmc, mcmc.get_samples(group_by_chain=True), indices)[0]


def posterior_predictive(
    mcmc: MCMC,
    rng_key: Array,
    rows: Any = None,
    num_draws: int | None = None,
    infer_discrete: bool = False,
) -> dict[str, np.ndarray]:
    """Sample replicated data at the run's rows, for posterior predictive checks.

    The function replaces ``numpyro.infer.Predictive(kernel.model, ...)`` with data ``None``. It
    evaluates chunks of rows, and supports models in which data cannot be ``None``. Deterministic
    sites inside the plate are returned too. For rows outside the data, use ``Predictive``.

    :param mcmc: a run of one of this package's kernels, on a model with one subsampled plate.
    :param rng_key: random key.
    :param rows: indices of the rows, integers of shape ``(n,)``. Default None: all rows.
    :param num_draws: draws of each chain to use, evenly spaced, at least 1. Default None: all.
    :param infer_discrete: whether to sample, in place of replicated data, the discrete sites that
        are summed out, from their posterior given the data. Default False.
    :return: a dict from the observed or deterministic sites inside the plate to arrays
        ``(chains, draws, ...)``, whose axis for the plate has the rows in their order.
    :raises ValueError: for a run of another kernel or before a run, a model without a subsampled
        plate or with several, indices out of range, or draws that were not kept.
    """
    plate = get_subsampled_plate(mcmc, "posterior_predictive")
    errors.check_rng_key(rng_key)
    enumerated = mcmc.sampler.potential.enumerated_sites
    if errors.check_bool("infer_discrete", infer_discrete) and enumerated is None:
        raise InvalidArgumentError(
            "`infer_discrete` needs discrete sites inside the subsampled plate.",
            "leave `infer_discrete` out, because the model has no site that is summed out.",
            "infer-discrete",
        )
    indices = validate_row_indices(rows, plate)
    samples = mcmc.get_samples(group_by_chain=True)
    if num_draws is not None:
        errors.check_positive_int("num_draws", num_draws)
        selected = get_evenly_spaced_indices(_count_chains_and_draws(samples)[1], num_draws)
        samples = {name: x[:, selected] for name, x in samples.items()}
    return evaluate_plate_sites(mcmc, samples, indices, rng_key, infer_discrete=infer_discrete)[0]


def get_evenly_spaced_indices(num: int, max_count: int) -> np.ndarray:
    """Return at most ``max_count`` indices from 0 to ``num - 1``, both included."""
    return np.linspace(0, num - 1, min(num, max_count)).astype(int)


def get_subsampled_plate(mcmc: MCMC, caller: str) -> Plate:
    """Return the one subsampled plate of a finished run, which ``caller`` needs.

    :raises ValueError: for no such run, or a model without a subsampled plate or with several.
    """
    kernel = check_finished_run(mcmc, caller, uses_moments=False)
    check_has_data(kernel, caller)
    plates = kernel.potential.plates
    if kernel.potential.local_latents is not None:
        raise InvalidModelError(
            f"`{caller}` does not support models with sites that `gibbs_fn` samples.",
            "run with collect_local_sites=True, and pass the run to az.from_numpyro(mcmc, "
            "log_likelihood=True) or its draws to numpyro.infer.Predictive.",
            "predict-local-latents",
        )
    if len(plates) != 1 or kernel.model is None:
        names = ", ".join(f"'{p.name}'" for p in plates) or "none"
        raise InvalidModelError(
            f"`{caller}` needs a model with one subsampled plate, but this model has {names}.",
            "use numpyro.infer.log_likelihood or numpyro.infer.Predictive with `kernel.model`.",
            "predict-one-plate",
        )
    return plates[0]


def validate_row_indices(rows: Any, plate: Plate) -> np.ndarray:
    """Return indices of a plate's rows as an array; all for None.

    :raises ValueError: for no integers, or indices out of range.
    """
    indices = np.arange(plate.size) if rows is None else np.asarray(rows)
    fix = f"pass an array of shape (n,) of integers from 0 to {plate.size - 1}, n at least 1."
    if indices.ndim != 1 or indices.size == 0 or indices.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"`rows` has shape {indices.shape} and type {indices.dtype}.", fix, "row-indices"
        )
    if not 0 <= indices.min() <= indices.max() < plate.size:
        raise InvalidArgumentError(
            f"`rows` has indices out of range: plate '{plate.name}' has {plate.size} rows.",
            fix,
            "row-indices",
        )
    return indices


def evaluate_plate_sites(
    mcmc: MCMC,
    samples: dict[str, Any],
    indices: np.ndarray,
    rng_key: Array | None = None,
    max_rows_per_chunk: int = _MAX_ROWS_PER_CHUNK,
    infer_discrete: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Return log likelihoods or, with a random key, replicated data of the sites in the plate.

    With ``infer_discrete``, return states of the discrete sites in place of replicated data.

    :param samples: draws by site, ``(chains, draws, ...)``.
    :param indices: indices of the rows, shape ``(n,)``.
    :return: by site, ``(chains, draws, ...)``, and the axis, from the right, of the rows.
    :raises ValueError: for draws that were not kept.
    """
    potential = mcmc.sampler.potential
    plate, enumerated = potential.plates[0], potential.enumerated_sites
    check_sites_kept([s.name for s in potential.sites or ()], samples)
    chains, draws = _count_chains_and_draws(samples)
    axes: dict[str, int] = {}

    def read_site(site: dict[str, Any]) -> Array | None:
        if rng_key is None:
            is_data = site["type"] == "sample" and site["is_observed"]
            return site["fn"].log_prob(site["value"]) if is_data else None
        if infer_discrete and site["type"] == "sample":
            return site["value"] if site["name"] in enumerated.names else None
        if site["type"] == "sample":
            is_data = site["infer"].get("was_observed") and not isinstance(site["fn"], Unit)
            return site["value"] if is_data else None
        return site["value"] if site["type"] == "deterministic" else None

    def evaluate_draw(draw: Any, key: Array, rows: Array, arguments: Arguments) -> dict[str, Array]:
        model = set_subsample_indices(potential.user_model, {plate.name: rows})
        draw = potential.take_rows(draw, rows)
        if enumerated is not None and rng_key is None:
            model = substitute(model, data=draw)
            axes[enumerated.row_name] = -1
            log_probs = compute_log_densities(model, enumerated, len(rows), arguments)[1]
            return {enumerated.row_name: log_probs}
        if infer_discrete:
            given = substitute(model, data=draw)
            key, states_key = random.split(key)
            draw = {**draw, **sample_states(given, enumerated, len(rows), states_key, arguments)}
        handled = seed(model, key)
        is_replicated = rng_key is not None and not infer_discrete
        handled = substitute(uncondition(handled) if is_replicated else handled, data=draw)
        sites = trace(handled).get_trace(*arguments.args, **arguments.kwargs)
        values = {}
        for name, site in sites.items():
            frames = [f for f in site.get("cond_indep_stack", ()) if f.name == plate.name]
            value = read_site(site) if frames else None
            if value is not None:
                axes[name], values[name] = frames[0].dim, value
        return values

    evaluate = jax.jit(jax.vmap(evaluate_draw, in_axes=(0, 0, None, None)))
    flat_draws = jax.tree.map(lambda x: x.reshape(chains * draws, *x.shape[2:]), samples)
    arguments = Arguments(mcmc._args, mcmc._kwargs)
    host_arrays, arguments = arguments.host_arrays, arguments.map_arrays(jnp.asarray)
    max_rows = min(max_rows_per_chunk, _MAX_DRAW_ROW_PAIRS_PER_CHUNK // (chains * draws))
    chunk = max(1, min(len(indices), max_rows))
    base_key = random.key(0) if rng_key is None else rng_key
    label = "log likelihood" if rng_key is None else "predictive"
    results: dict[str, np.ndarray] = {}
    with (
        unwrap_callback_errors(host_arrays),
        show_data_passes(label, host_arrays, len(indices) / plate.size),
    ):
        for start in range(0, len(indices), chunk):
            # The last chunk overlaps with the one before: chunks of one length, one compilation.
            first = min(start, len(indices) - chunk)
            rows = jnp.asarray(indices[first : first + chunk], jnp.int32)
            keys = random.split(random.fold_in(base_key, start), chains * draws)
            for name, values in evaluate(flat_draws, keys, rows, arguments).items():
                shape = list(values.shape)
                shape[axes[name]] = len(indices)
                result = results.setdefault(name, np.empty(shape, values.dtype))
                by_row = np.moveaxis(result, axes[name], 0)
                by_row[first : first + chunk] = np.moveaxis(np.asarray(values), axes[name], 0)
    return {k: x.reshape(chains, draws, *x.shape[1:]) for k, x in results.items()}, axes


class FunctionSummary(NamedTuple):
    """The summary of one function of the draws, as arrays of the function's shape.

    - **mean** - posterior mean.
    - **sd** - posterior standard deviation.
    - **r_hat** - split R-hat; NaN for chains of fewer than 50 draws.
    - **ess** - effective sample size; NaN for values that are equal at all draws.
    - **between_chain_distance** - Kolmogorov distance between a chain and all others, from 0 to 1,
      averaged over the chains. For one chain, the distance between its halves.
    - **expected_distance** - expectation of **between_chain_distance** for independent chains of
      the same distribution and ESS.
    - **distance_to_reference** - Kolmogorov distance to the reference; NaN without one.
    - **reference_between_chain_distance** - **between_chain_distance** of the reference; NaN
      without one.
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
    """The result of :func:`predictive_summary`; prints as a table, in a notebook as HTML.

    :param functions: summaries by name of the function.
    :param has_reference: whether a reference was passed.
    """

    functions: dict[str, FunctionSummary]
    has_reference: bool

    def __getitem__(self, name: str) -> FunctionSummary:
        return self.functions[name]

    def _make_table(self) -> Table:
        columns = _TABLE_COLUMNS if self.has_reference else _TABLE_COLUMNS[:4]
        header = ["function", "size", *(title for title, *_ in columns)]
        cells = [
            [
                name,
                str(f.mean.size),
                *(
                    "-" if np.isnan(x := getattr(f, field)).all() else f"{reduce_fn(x):{spec}}"
                    for _, field, reduce_fn, spec in columns
                ),
            ]
            for name, f in self.functions.items()
        ]
        return Table([header, *cells], [_TABLE_NOTE])

    def __str__(self) -> str:
        return self._make_table().to_text()

    def _repr_html_(self) -> str:
        return self._make_table().to_html()

    __repr__ = __str__

    def to_dataset(self) -> Any:
        """Return the summary as an :class:`xarray.Dataset`, one variable per function.

        The first axis, ``statistic``, has the fields of :class:`FunctionSummary`.
        """
        xarray = errors.import_optional("xarray", "PredictiveSummary.to_dataset", "arviz")
        variables = {}
        for name, f in self.functions.items():
            axes = [f"{name}_dim_{k}" for k in range(f.mean.ndim)]
            variables[name] = (["statistic", *axes], np.stack(f))
        return xarray.Dataset(variables, coords={"statistic": list(FunctionSummary._fields)})


def predictive_summary(
    mcmc: Any,
    fn: Callable[..., Any] | Predictive,
    *rows: Any,
    reference: Any = None,
    rng_key: Array | None = None,
) -> PredictiveSummary:
    """Return R-hat, ESS and Kolmogorov distances of functions of the draws.

    Rows are evaluated in chunks, so that not all predictions are in memory at once.

    :param mcmc: a run of any kernel, including NumPyro's; or a dict of draws by site, with axes
        ``(chains, draws, ...)``.
    :param fn: a function of one draw (a dict of values by site) and of ``rows``, which returns an
        array or a dict of arrays. Or a :class:`~numpyro.infer.Predictive`, whose model, parameters
        and sites are used.
    :param rows: arrays with equal numbers of rows, which ``fn`` gets after the draw, in chunks of
        rows. Its results must have the rows along their first axis. The model of a ``Predictive``
        gets them as its arguments.
    :param reference: a trusted run, as ``mcmc``, for distances to it. Default: none.
    :param rng_key: random key for a ``Predictive`` that samples. Default: ``random.key(0)``.
    :return: the summary; ``print`` shows it as a table.
    :raises ValueError: for runs without draws of a site that ``fn`` uses, rows that are not numbers
        or of different lengths, or results that are not numbers, not finite, or lack the rows'
        axis.
    """
    runs = [get_draws_by_site(mcmc, "mcmc")]
    if reference is not None:
        runs.append(get_draws_by_site(reference, "reference"))
    functions = DrawFunctions.from_fn(fn, rows)
    rng_key = random.key(0) if rng_key is None else rng_key
    errors.check_rng_key(rng_key)
    parts: dict[str, list[FunctionSummary]] = {}
    for values in functions.iterate_chunks(runs, rng_key):
        for name in values[0]:
            parts.setdefault(name, []).append(_summarize_function(name, [v[name] for v in values]))
    summaries = {
        name: FunctionSummary(
            *(np.concatenate(x) if rows else np.asarray(x[0]) for x in zip(*chunks, strict=True))
        )
        for name, chunks in parts.items()
    }
    return PredictiveSummary(summaries, has_reference=reference is not None)


def _summarize_function(name: str, values: list[np.ndarray]) -> FunctionSummary:
    """Return the summary of values ``(chains, draws, ...)`` of the run, and of a reference."""
    if not all(np.isfinite(x).all() for x in values):
        raise InvalidArgumentError(
            f"`fn` returns '{name}' with values that are not finite at some of the draws.",
            "change the function, or leave out the draws of diverging iterations.",
            "not-finite-draws",
        )
    x, *references = (v.astype(np.float64) for v in values)
    shape, num_chains = x.shape[2:], max(2, len(x))
    stats = ConvergenceStats.from_draws(x.reshape(*x.shape[:2], -1))
    r_hat, ess = (stat.reshape(shape) for stat in stats)
    to_reference = within_reference = np.full(shape, np.nan)
    for reference in references:
        to_reference = compute_ks_statistic(*(v.reshape(-1, *shape) for v in (x, reference)))
        within_reference = _compute_between_chain_distance(reference)
    return FunctionSummary(
        mean=x.mean((0, 1)),
        sd=x.std((0, 1)),
        r_hat=r_hat,
        ess=ess,
        between_chain_distance=_compute_between_chain_distance(x),
        expected_distance=_KOLMOGOROV_MEAN
        * np.sqrt((num_chains + num_chains / (num_chains - 1)) / ess),
        distance_to_reference=to_reference,
        reference_between_chain_distance=within_reference,
    )


def _compute_between_chain_distance(values: np.ndarray) -> np.ndarray:
    """Return the mean Kolmogorov distance between a chain, the first axis, and all others."""
    if len(values) == 1:
        half = values.shape[1] // 2
        return compute_ks_statistic(values[0, :half], values[0, half:])
    distances = [
        compute_ks_statistic(x, np.delete(values, k, axis=0).reshape(-1, *x.shape[1:]))
        for k, x in enumerate(values)
    ]
    return np.mean(distances, axis=0)


def get_draws_by_site(run: Any, arg_name: str) -> dict[str, Array]:
    """Return the draws of an ``MCMC``, or a dict of draws, with axes of chains and draws first.

    :raises ValueError: naming the argument, for anything else, or one draw per chain.
    """
    if isinstance(run, MCMC):
        if run.last_state is None:
            raise InvalidArgumentError(
                f"`{arg_name}` is an MCMC object without draws.",
                "call its `run` first.",
                "no-draws",
            )
        draws = dict(run.get_samples(group_by_chain=True))
    else:
        shapes = {np.shape(x)[:2] for x in run.values()} if isinstance(run, Mapping) else set()
        if len(shapes) != 1 or len(next(iter(shapes))) < 2:
            raise InvalidArgumentError(
                f"`{arg_name}` is a {type(run).__name__}, which is neither a run nor draws by "
                "site.",
                "pass an MCMC object after its `run`, or a dict from sites to arrays with the same "
                "first axes (chains, draws).",
                "draws-by-site",
            )
        draws = {k: jnp.asarray(x) for k, x in run.items()}
    if _count_chains_and_draws(draws)[1] < 2:
        raise InvalidArgumentError(
            f"`{arg_name}` has one draw per chain.",
            "pass at least two draws per chain.",
            "draws-by-site",
        )
    return draws


@dataclass(frozen=True)
class DrawFunctions:
    """Functions of a draw, and the rows at which they are evaluated.

    - **fn** - maps one draw, a dict by site, and rows to an array or a dict of arrays.
    - **row_arrays** - arrays whose rows are passed to ``fn`` in chunks; its results have them along
      their first axis. Empty for functions of the draw alone.
    - **takes_key** - whether ``fn`` takes a random key before the draw.
    - **elements_per_result** - approximate number of values in memory per value of the results.
    """

    fn: Callable[..., Any]
    row_arrays: tuple[np.ndarray, ...]
    takes_key: bool = False
    elements_per_result: int = 1

    @classmethod
    def from_fn(cls, fn: Any, row_arrays: tuple[Any, ...]) -> DrawFunctions:
        """Convert a user's function, or a ``Predictive`` and its model's arguments.

        :raises ValueError: for anything else, and for rows of different lengths.
        """
        arrays = tuple(np.asarray(x) for x in row_arrays)
        lengths = {x.shape[0] if x.ndim else 0 for x in arrays}
        problem = ""
        if any(x.dtype.kind not in "biufc" for x in arrays):
            types = ", ".join(str(x.dtype) for x in arrays)
            problem = f"types {types}, which are not all numbers"
        elif len(lengths) > 1 or 0 in lengths:
            shapes = ", ".join(str(x.shape) for x in arrays)
            problem = f"shapes {shapes}, without a common number of rows"
        if problem:
            raise InvalidArgumentError(
                f"The arrays after `fn` have {problem}.",
                "pass arrays of numbers with equal numbers of rows, at least one. Bind other "
                "arguments of `fn` by functools.partial.",
                "rows-of-a-function",
            )
        if isinstance(fn, Predictive):
            if fn.guide is not None:
                raise InvalidArgumentError(
                    "`fn` is a Predictive with a guide, so it would not use the draws of the run.",
                    "pass a Predictive without a guide.",
                    "function-of-draws",
                )

            def predict(key: Array, draw: dict[str, Array], *model_args: Array) -> Any:
                predictive = Predictive(
                    fn.model,
                    posterior_samples=draw,
                    params=fn.params,
                    return_sites=fn.return_sites,
                    infer_discrete=fn.infer_discrete,
                    condition_deterministic=fn.condition_deterministic,
                    batch_ndims=0,
                )
                return predictive(key, *model_args)

            return cls(predict, arrays, takes_key=True)
        if not callable(fn):
            raise InvalidArgumentError(
                f"`fn` is a {type(fn).__name__}, which is not a function.",
                "pass a function of a draw (a dict of values by site), or a Predictive.",
                "function-of-draws",
            )
        return cls(fn, arrays)

    def eval_shape(self, draws: Mapping[str, Array]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and types of the results at one draw and all rows, by name.

        :raises ValueError: for a site without draws, and for results that are not arrays of
            numbers, or lack the rows' axis.
        """
        draw = {k: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for k, x in draws.items()}
        try:
            shapes = jax.eval_shape(self.evaluate_draw, random.key(0), draw, self.row_arrays)
        except KeyError as error:
            if not error.args or error.args[0] in draws:
                raise
            raise InvalidArgumentError(
                f"`fn` uses site '{error.args[0]}', which has no draws.",
                f"use only the sites {', '.join(repr(k) for k in draws)}.",
                "function-of-draws",
            ) from error
        if not shapes:
            raise InvalidArgumentError(
                "`fn` returns nothing.",
                "return an array, or a dict of arrays.",
                "function-of-draws",
            )
        for name, x in shapes.items():
            if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
                raise InvalidArgumentError(
                    f"`fn` returns '{name}' with type {x.dtype}, which is not a type of numbers.",
                    "return arrays of numbers.",
                    "function-of-draws",
                )
            if self.row_arrays and x.shape[:1] != self.row_arrays[0].shape[:1]:
                num_rows = len(self.row_arrays[0])
                raise InvalidArgumentError(
                    f"`fn` returns '{name}' with shape {x.shape} for {num_rows} rows.",
                    "return one result per row, along the first axis.",
                    "function-of-draws",
                )
        return shapes

    def iterate_chunks(
        self,
        runs: Sequence[Mapping[str, Array]],
        rng_key: Array,
        max_elements_per_chunk: int = _MAX_ELEMENTS_PER_CHUNK,
        max_elements_per_batch: int = _MAX_ELEMENTS_PER_BATCH,
    ) -> Iterator[list[dict[str, np.ndarray]]]:
        """Yield the results of each run at a chunk of rows, by name.

        They have shape ``(chains, draws, rows, ...)``. Without rows there is one chunk, of shape
        ``(chains, draws, ...)``.
        """
        shapes, *_ = [self.eval_shape(draws) for draws in runs]
        num_rows = len(self.row_arrays[0]) if self.row_arrays else 1
        per_row = -(-sum(int(np.prod(x.shape)) for x in shapes.values()) // num_rows)
        per_row_in_memory = per_row * self.elements_per_result
        max_draws = max(int(np.prod(_count_chains_and_draws(draws))) for draws in runs)
        max_rows = min(
            max_elements_per_chunk // (max_draws * per_row),
            max_elements_per_batch // per_row_in_memory,
        )
        chunk = max(1, min(max_rows, num_rows))
        batch_size = max(1, max_elements_per_batch // (chunk * per_row_in_memory))

        @jax.jit
        def evaluate(keys: Array, draws: Any, rows: tuple[Array, ...]) -> dict[str, Array]:
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (keys, draws))
            results = lax.map(
                lambda x: self.evaluate_draw(x[0], x[1], rows), flat, batch_size=batch_size
            )
            return jax.tree.map(lambda x: x.reshape(*keys.shape, *x.shape[1:]), results)

        for start in range(0, num_rows, chunk):
            # The last chunk overlaps with the one before: chunks of one length, one compilation.
            first = min(start, num_rows - chunk)
            rows = tuple(x[first : first + chunk] for x in self.row_arrays)
            results = []
            for k, draws in enumerate(runs):
                key = random.fold_in(random.fold_in(rng_key, k), first)
                keys = random.split(key, _count_chains_and_draws(draws))
                values = evaluate(keys, draws, rows)
                if rows:
                    values = {name: x[:, :, start - first :] for name, x in values.items()}
                results.append(jax.tree.map(np.asarray, values))
            yield results

    def evaluate_draw(self, key: Any, draw: Any, row_arrays: tuple[Any, ...]) -> dict[str, Array]:
        """Return results at one draw by name."""
        result = self.fn(key, draw, *row_arrays) if self.takes_key else self.fn(draw, *row_arrays)
        if not isinstance(result, Mapping):
            result = {getattr(self.fn, "__name__", "fn"): result}
        return {str(k): jnp.asarray(x) for k, x in result.items()}


def _count_chains_and_draws(draws: Mapping[str, Array]) -> tuple[int, int]:
    chains, num_draws = jax.tree.leaves(draws)[0].shape[:2]
    return chains, num_draws
