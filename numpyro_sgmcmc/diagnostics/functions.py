"""Users' functions of the draws, evaluated a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.infer import MCMC, Predictive

from numpyro_sgmcmc.checks import InvalidArgumentError

__all__ = ["DrawFunctions", "get_draws_by_site"]

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
