"""Sum discrete latent variables out of the likelihood of each row, by enumeration.

A discrete site inside a subsampled plate takes finitely many states, over which NumPyro's funsor
machinery (:mod:`numpyro.contrib.funsor`) sums. What a minibatch needs is the log of the sum of each
row: the plate's scale multiplies it, and a scale inside of the sum would change the model.
:func:`compute_log_densities` therefore keeps the rows as a free dimension of the result. States of
several sites, of plates inside of a row and of NumPyro's ``scan`` are summed over within a row.

A discrete site outside of the plate, or one that other rows use, has no such form: the log of a sum
over states of a product over rows is not a sum over rows. :func:`check_rows_are_independent` finds
the latter.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax, random
from numpyro import validation_enabled
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.handlers import infer_config, scope, seed, substitute
from numpyro.primitives import Messenger

from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidModelError, import_optional, summarise_error
from numpyro_sgmcmc.model.handlers import set_subsample_indices, trace_prior, trace_run

# Relative change of a row's log density that is rounding.
_TOLERANCE = 1e-4
# States of the first row that are compared.
_MAX_COMPARED_STATES = 20
# Prefix of a site of one step of a `scan`.
_STEP_PREFIX = re.compile(r"^_STEP_\d+_")


class EnumeratedSites(NamedTuple):
    """The discrete sites that are summed out, all inside one subsampled plate."""

    names: tuple[str, ...]
    plate: str
    plate_size: int  # number of rows of the plate
    max_plate_nesting: int  # number of batch dimensions that plates use
    # Name of a row's log likelihood: of its observed site, or of the plate where there are several.
    row_name: str

    def fix_states(self, model: Callable, indices: Indices) -> Callable:
        """Return the model with state 0 at each of the sites."""
        # A function of the indices, so that what depends on states depends on the minibatch.
        state = 0 * jnp.asarray(indices[self.plate])[0]

        def get_value(site: Any) -> Any:
            if site["type"] == "sample" and site["name"] in self.names:
                return jnp.full(site["fn"].shape(site["kwargs"].get("sample_shape", ())), state)
            return None

        return substitute(model, substitute_fn=get_value)


class _collect_rows(Messenger):
    """Handler that leaves the sites of a plate's rows to an outer trace, without the plate.

    - **other_sites** - messages of the sites outside of the plate, which the trace does not see.
    - **shapes** - shapes of the sites inside of it, by the plates around them.

    :param unroll: whether NumPyro's ``scan`` runs as a loop, with sites of each step.
    """

    def __init__(self, fn: Any, sites: EnumeratedSites, num_rows: int, unroll: bool) -> None:
        self.plate, self.unroll = sites.plate, unroll
        self.plate_scale = sites.plate_size / num_rows
        self.other_sites: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "control_flow" and msg["fn"] is scan_wrapper and self.unroll:
            msg["fn"] = _run_steps
        if msg["type"] != "sample":
            return
        frames = [f for f in msg["cond_indep_stack"] if f.name != self.plate]
        if len(frames) == len(msg["cond_indep_stack"]):
            self.other_sites[msg["name"]] = msg
            msg["stop"] = True
        else:
            if msg["scale"] is not None and self.plate_scale != 1:
                msg["scale"] = msg["scale"] / self.plate_scale
            sizes = {f.dim: f.size for f in msg["cond_indep_stack"]}
            self.shapes[msg["name"]] = tuple(sizes.get(k, 1) for k in range(min(sizes), 0))
            msg["cond_indep_stack"] = frames


@contextmanager
def _use_row_plates() -> Iterator[None]:
    """Replace ``numpyro.plate``, as :func:`numpyro.contrib.funsor.plate_to_enum_plate` does."""
    from numpyro.contrib.funsor.enum_messenger import plate

    class RowPlate(plate):
        def __enter__(self) -> Any:
            # Its own indices are another array, which is not recognised as the plate's, and has no
            # dimension for one row.
            super().__enter__()
            self.indices = self._indices.data
            return self.indices

    replaced = numpyro.plate.__new__
    try:
        numpyro.plate.__new__ = lambda cls, *args, **kwargs: RowPlate(*args, **kwargs)
        yield
    finally:
        numpyro.plate.__new__ = replaced


def _run_steps(
    f: Callable, init: Any, xs: Any, length: int | None, is_reverse: bool, **options: Any
) -> Any:
    """Run NumPyro's ``scan`` as a loop with sites of each step, named with a prefix."""
    from numpyro.contrib.funsor import markov
    from numpyro.ops.pytree import PytreeTrace

    length = jax.tree.leaves(xs)[0].shape[0] if length is None else length
    carry, outputs, order = init, [], slice(None, None, -1 if is_reverse else 1)
    for step in markov(range(length)[order], history=options["history"]):
        with scope(prefix=f"_STEP_{step:09d}", divider="_", hide_types=["plate"]):
            carry, y = f(carry, jax.tree.map(itemgetter(step), xs))
        outputs.append(y)

    def stack(*ys: Any) -> Array:
        # States take turns in their dimensions, as in NumPyro's own loop.
        return jnp.stack([jnp.reshape(y, jnp.shape(ys[0])) for y in ys])

    return (length, None, carry), (PytreeTrace({}), jax.tree.map(stack, *outputs[order]))


def _enumerate_rows(
    model: Callable, sites: EnumeratedSites, num_rows: int, unroll: bool = False
) -> _collect_rows:
    """Return the model with its discrete sites enumerated, for NumPyro's ``log_density``."""
    from numpyro.contrib.funsor import enum

    def mark(site: Any) -> dict[str, Any]:
        if site["type"] != "sample":
            return {}
        is_enumerated = _STEP_PREFIX.sub("", site["name"]) in sites.names
        return {"enumerate": "parallel" if is_enumerated else None}

    def run(*args: Any, **kwargs: Any) -> Any:
        with _use_row_plates():
            return model(*args, **kwargs)

    enumerated = enum(infer_config(run, config_fn=mark), -sites.max_plate_nesting - 1)
    return _collect_rows(enumerated, sites, num_rows, unroll)


def compute_log_densities(
    model: Callable, sites: EnumeratedSites, num_rows: int, arguments: Arguments
) -> tuple[Array, Array]:
    """Return the log density of the sites outside of the plate, and that of each row.

    :param model: the model on some rows, with values for all other sites.
    :return: a scalar, and an array of shape ``(rows,)`` without the plate's scale.
    """
    funsor = import_optional("funsor", "A model with discrete sites", "enumeration")
    from numpyro.contrib.funsor.infer_util import _enum_log_density

    rows_model = _enumerate_rows(model, sites, num_rows)
    lazy_sum, *_ = _enum_log_density(
        rows_model,
        arguments.args,
        arguments.kwargs,
        {},
        funsor.ops.logaddexp,
        funsor.ops.add,
        apply_optimizer=False,
    )
    result = funsor.optimizer.apply_optimizer(lazy_sum)
    if unknown := set(result.inputs) - {sites.plate}:
        raise InvalidModelError(
            f"Site '{sites.names[0]}' is discrete, but its row has batch dimensions without a "
            f"plate: {sorted(unknown)}.",
            "add a plate for each dimension, or `.to_event` if they belong to one value.",
            "enumeration-plates",
        )
    total = jnp.zeros((), jnp.result_type(float))
    for site in rows_model.other_sites.values():
        total += _log_prob(site).sum()
    return total, jnp.broadcast_to(result.data, (num_rows,))


def sample_states(
    model: Callable, sites: EnumeratedSites, num_rows: int, rng_key: Array, arguments: Arguments
) -> dict[str, Array]:
    """Sample the discrete sites from their posterior given the other sites and the data."""
    funsor = import_optional("funsor", "A model with discrete sites", "enumeration")
    from numpyro.contrib.funsor import trace

    rows_model = _enumerate_rows(model, sites, num_rows, unroll=True)
    traced = trace(rows_model).get_trace(*arguments.args, **arguments.kwargs)
    traced = {name: site for name, site in traced.items() if site["type"] == "sample"}
    factors, plates = [], {}  # the plates inside of a row around each site
    for name, site in traced.items():
        dims = site["infer"]["dim_to_name"]
        factors.append(funsor.to_funsor(_log_prob(site), funsor.Real, dims))
        plates[name] = {f.name for f in site["cond_indep_stack"]}
    all_plates = set().union(*plates.values())
    # Sum the states out one after the other, the last and those inside of plates first, and sample
    # them in the opposite order.
    names = [name for name in traced if _STEP_PREFIX.sub("", name) in sites.names]
    names = sorted(names, key=lambda name: len(plates[name]))
    joints = {}
    for name in reversed(names):
        own = [
            f.reduce(funsor.ops.add, all_plates.intersection(f.inputs) - plates[name])
            for f in factors
            if name in f.inputs
        ]
        joints[name] = sum(own[1:], own[0])
        factors = [f for f in factors if name not in f.inputs]
        factors.append(joints[name].reduce(funsor.ops.logaddexp, name))
    states: dict[str, Any] = {}
    for key, name in zip(random.split(rng_key, len(names)), names, strict=True):
        joint = joints[name](**{n: x for n, x in states.items() if n in joints[name].inputs})
        inputs = {n: domain for n, domain in joint.inputs.items() if n != name}
        logits = joint.align((*inputs, name)).data
        state = random.categorical(key, logits)
        states[name] = funsor.Tensor(state, OrderedDict(inputs), joint.inputs[name].dtype)
    values: dict[str, list[Array]] = {}
    for name in sorted(names):
        base_name, dims = _STEP_PREFIX.sub("", name), traced[name]["infer"]["name_to_dim"]
        shape = (1,) * (name != base_name) + rows_model.shapes[name]
        value = funsor.to_data(states[name], dims).reshape(shape)
        values.setdefault(base_name, []).append(value)
    return {name: jnp.concatenate(steps) for name, steps in values.items()}


def check_rows_are_independent(
    model: Callable, sites: EnumeratedSites, plates: Mapping[str, Plate], arguments: Arguments
) -> None:
    """Check that no other row, and no site outside of the plate, uses the states of a row.

    The first row takes each of its states while the others have states of the prior, all the first
    state, or all the last. No other density may change. It also checks that states begin at 0, from
    where NumPyro enumerates them.

    :raises ValueError: naming the sites.
    """
    indices = {n: np.arange(min(max(p.subsample_size, 2), p.size)) for n, p in plates.items()}

    def evaluate(arguments: Arguments) -> Any:
        before = trace_prior(model, indices, arguments)
        values = {
            name: site["value"]
            for name, site in before.items()
            if site["type"] == "sample" and not site["is_observed"]
        }
        supports, dims, backgrounds = {}, {}, {}
        for name in sites.names:
            fn, dim = before[name]["fn"], _find_row_dim(before[name], sites.plate)
            supports[name] = jnp.ravel(fn.enumerate_support(expand=False))
            assert dim is not None
            dims[name] = dim
            rows = jnp.moveaxis(jnp.asarray(values[name]), dim, 0)
            ends = [jnp.full_like(rows, supports[name][k]) for k in (0, -1)]
            backgrounds[name] = jnp.stack([rows, *ends])
        seeded = seed(model, random.key(0))

        def compute_others(background: dict[str, Array], state: Array) -> dict[str, Array]:
            """Return densities without those of the first row, which is in the given state."""
            changed = {}
            for name, rows in background.items():
                support = supports[name]
                moved = rows.at[0].set(support[state % support.size])
                changed[name] = jnp.moveaxis(moved, 0, dims[name])
            trace = trace_run(
                set_subsample_indices(seeded, indices), arguments, {**values, **changed}
            )
            densities = {}
            for name, site in trace.items():
                if site["type"] == "sample":
                    log_prob = site["fn"].log_prob(site["value"])
                    if (dim := _find_row_dim(site, sites.plate)) is not None:
                        log_prob = jnp.moveaxis(log_prob, dim, 0)[1:]
                    densities[name] = log_prob
            return densities

        num_states = min(max(x.size for x in supports.values()), _MAX_COMPARED_STATES)

        def compare(background: dict[str, Array]) -> dict[str, Array]:
            densities = lax.map(partial(compute_others, background), jnp.arange(num_states))
            return {
                name: jnp.allclose(x[1:], x[:1], _TOLERANCE, _TOLERANCE, equal_nan=True)
                for name, x in densities.items()
            }

        return supports, lax.map(compare, backgrounds)

    try:
        with validation_enabled(False):  # a prior value may be invalid where no chain ever is
            supports, is_equal = jit_low_optimization(evaluate)(arguments)
    except NotImplementedError as error:
        raise InvalidModelError(
            f"Discrete site '{sites.names[0]}' has no list of states that all rows share.",
            f"give all rows the same number of states ({summarise_error(error)}).",
            "enumeration-states",
        ) from error
    for name, support in supports.items():
        if not np.array_equal(support, np.arange(support.size)):
            raise InvalidModelError(
                f"Site '{name}' is discrete with states from {support.min()}, but NumPyro "
                "enumerates states from 0.",
                f"let its states begin at 0, and add {support.min()} to its value in the model.",
                "enumeration-states",
            )
    for name, is_same in is_equal.items():
        if not is_same.all():
            raise InvalidModelError(
                f"Site '{name}' uses the states of discrete sites of other rows of the plate "
                f"'{sites.plate}'.",
                "let each row use its own states only, or combine dependent rows into one row.",
                "enumeration-rows",
            )


def _log_prob(site: Any) -> Array:
    log_prob = site["fn"].log_prob(site["value"])
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def _find_row_dim(site: Any, plate: str) -> int | None:
    """Return the dimension of a plate's rows in the log density of a site, or None."""
    return next((f.dim for f in site["cond_indep_stack"] if f.name == plate), None)
