"""From a NumPyro model to what can be known of it: :class:`~.facts.Facts`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro import validation_enabled
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.stand_ins import IndexingRecorder, PlateIndexRegistry, RowLookup
from numpyro_sgmcmc.posterior.facts import NO_GIBBS, GibbsConfig, ModelTrace, SampleSite, TracedSite
from numpyro_sgmcmc.posterior.failures import translate_model_error
from numpyro_sgmcmc.posterior.handlers import set_subsample_indices

__all__ = ["trace_model"]


def trace_model(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig = NO_GIBBS,
) -> ModelTrace:
    """Run a model once on the first rows of its plates, without data, and note what it states.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :param gibbs: the user's draws of local sites.
    :raises ValueError: where the model cannot be run.
    """
    run = _TracingRun(arguments)
    statements: dict[str, TracedSite] = {}
    samples: list[SampleSite] = []

    def note(arguments: Arguments) -> None:
        """What is known of a traced value is noted while it is being traced: no value is kept."""
        for name, site in run.run_and_trace(model, arguments).items():
            stack = [f for f in site.get("cond_indep_stack", ()) if f.name in run.plates]
            statements[name] = TracedSite(site["type"], tuple(f.name for f in stack))
            if site["type"] == "sample":
                samples.append(_describe_sample_site(site, tuple(stack), name in gibbs.site_names))

    try:
        jax.eval_shape(note, arguments)
    except InvalidArgumentError:
        raise
    except Exception as error:
        plain = translate_model_error(error, model, arguments, tuple(run.plates.values()))
        if plain is error:
            raise
        raise plain from error
    return ModelTrace(
        model=model,
        model_with_params=_substitute_params(model, arguments, statements),
        arguments=arguments,
        init_strategy=init_strategy,
        gibbs=gibbs,
        unsharded_plates=run.plates,
        traced_sites=statements,
        sample_sites=tuple(samples),
        row_lookups=tuple(run.row_lookups),
    )


class _TracingRun:
    """One run of a model on the first rows of its plates, with notes also where it fails.

    :param arguments: the arguments as the user gave them.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.sharded_arrays = arguments.sharded_arrays
        self.plates: dict[str, Plate] = {}
        self.index_registry = PlateIndexRegistry()
        self.row_lookups: dict[RowLookup, None] = {}

    def run_and_trace(self, model: Callable, arguments: Arguments) -> dict[str, Any]:
        """The model's trace, its latent sites drawn from the prior."""
        given = iter(self.sharded_arrays)
        arguments = arguments.map_arrays(jnp.asarray)
        arguments = arguments.map_host_arrays(
            lambda a: IndexingRecorder(a, self.index_registry, self.row_lookups)
        )
        arguments = arguments.map_sharded_arrays(
            lambda a: IndexingRecorder(a, self.index_registry, self.row_lookups, next(given))
        )
        seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
        chosen = set_subsample_indices(seeded, self._register_plate)
        return trace(chosen).get_trace(*arguments.args, **arguments.kwargs)

    def _register_plate(self, name: str, size: int, subsample_size: int) -> Array:
        is_int = isinstance(subsample_size, (int, np.integer))
        is_int = is_int and not isinstance(subsample_size, bool)
        if not (is_int and 0 < subsample_size <= size):
            raise InvalidArgumentError(
                f"Plate '{name}' has subsample_size={subsample_size!r}, but it must be an integer "
                f"between 1 and the plate's size, {size}."
            )
        if name in self.plates and self.plates[name].size != size:
            raise InvalidArgumentError(
                f"Plate '{name}' has size {self.plates[name].size} in one place of the model and "
                f"{size} in another: give the two different names."
            )
        self.plates[name] = Plate(name, size, subsample_size)
        return self.index_registry.register(name, jnp.arange(subsample_size))


def _describe_sample_site(
    site: Any, plate_frames: tuple[Any, ...], is_gibbs_site: bool
) -> SampleSite:
    """What is known of a sample statement; ``is_gibbs_site`` where ``gibbs_fn`` draws it."""
    fn, value = site["fn"], site["value"]
    known = SampleSite(
        name=site["name"],
        plate_frames=plate_frames,
        is_observed=site["is_observed"],
        shape=jnp.shape(value),
        batch_shape=fn.batch_shape,
        event_shape=fn.event_shape,
        unplated_dims=_find_unplated_dims(site),
    )
    if known.is_observed:
        return known
    known = known._replace(dtype=jnp.result_type(value), support=fn.support, is_delta=_is_delta(fn))
    if is_gibbs_site or known.is_delta or fn.support.is_discrete:
        return known
    with suppress(NotImplementedError):  # there is no map to unconstrained space
        known = known._replace(unconstrained_shape=jnp.shape(biject_to(fn.support).inv(value)))
    return known


def _find_unplated_dims(site: Any) -> tuple[int, ...]:
    """Batch dimensions without a plate, where a site has plates at all."""
    stated = {frame.dim for frame in site["cond_indep_stack"]}
    if not stated:
        return ()
    fn, shape = site["fn"], jnp.shape(site["value"])
    shapes = (tuple(fn.batch_shape), shape[: len(shape) - len(fn.event_shape)])
    # A loop of NumPyro's has its steps on the left, which need no plate.
    looped = -max(map(len, shapes)) if site.get("_control_flow_done", False) else None
    has_many = {-k for one in shapes for k in range(1, len(one) + 1) if one[-k] > 1}
    return tuple(sorted(has_many - stated - {looped}))


def _is_delta(fn: Any) -> bool:
    """Whether a distribution, whatever it is wrapped in, has all its mass at one point."""
    while not isinstance(fn, dist.Delta) and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, dist.Delta)


def _substitute_params(
    model: Callable, arguments: Arguments, traced_sites: dict[str, TracedSite]
) -> Callable:
    """The model with the first values of its ``param`` and ``mutable`` sites, if it has any."""
    names = [n for n, s in traced_sites.items() if s.site_type in ("param", "mutable")]
    with validation_enabled(False):  # a draw from the prior may be one that no chain comes to
        values = _TracingRun(arguments).run_and_trace(model, arguments) if names else {}
    return substitute(model, data={n: values[n]["value"] for n in names})
