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

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.stand_ins import IndexedArray, IssuedRows, Recorder
from numpyro_sgmcmc.posterior.facts import NO_DRAWS, Facts, GibbsDraws, SampleSite, Statement
from numpyro_sgmcmc.posterior.failures import explained
from numpyro_sgmcmc.posterior.handlers import choose_rows

__all__ = ["read"]


def read(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsDraws = NO_DRAWS,
) -> Facts:
    """Run a model once on the first rows of its plates, without data, and note what it states.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :param gibbs: the user's draws of local sites.
    :raises ValueError: where the model cannot be run.
    """
    run = _Run(arguments)
    statements: dict[str, Statement] = {}
    samples: list[SampleSite] = []

    def note(arguments: Arguments) -> None:
        """What is known of a traced value is noted while it is being traced: no value is kept."""
        for name, site in run.trace(model, arguments).items():
            stack = [f for f in site.get("cond_indep_stack", ()) if f.name in run.plates]
            statements[name] = Statement(site["type"], tuple(f.name for f in stack))
            if site["type"] == "sample":
                samples.append(_sample_site(site, tuple(stack), name in gibbs.sites))

    try:
        jax.eval_shape(note, arguments)
    except Refusal:
        raise
    except Exception as error:
        plain = explained(error, model, arguments, tuple(run.plates.values()))
        if plain is error:
            raise
        raise plain from error
    return Facts(
        model=model,
        settled_model=_settled(model, arguments, statements),
        arguments=arguments,
        init_strategy=init_strategy,
        gibbs=gibbs,
        stated_plates=run.plates,
        statements=statements,
        samples=tuple(samples),
        indexed=tuple(run.indexed),
    )


class _Run:
    """One run of a model on the first rows of its plates, with notes also where it fails.

    :param arguments: the arguments as the user gave them.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.spread = arguments.sharded
        self.plates: dict[str, Plate] = {}
        self.issued = IssuedRows()
        self.indexed: dict[IndexedArray, None] = {}

    def trace(self, model: Callable, arguments: Arguments) -> dict[str, Any]:
        """The model's trace, its latent sites drawn from the prior."""
        given = iter(self.spread)
        arguments = arguments.map_arrays(jnp.asarray)
        arguments = arguments.map_hosts(lambda a: Recorder(a, self.issued, self.indexed))
        arguments = arguments.map_sharded(
            lambda a: Recorder(a, self.issued, self.indexed, next(given))
        )
        seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
        chosen = choose_rows(seeded, self._first_rows)
        return trace(chosen).get_trace(*arguments.args, **arguments.kwargs)

    def _first_rows(self, name: str, size: int, subsample_size: int) -> Array:
        is_int = isinstance(subsample_size, (int, np.integer))
        is_int = is_int and not isinstance(subsample_size, bool)
        if not (is_int and 0 < subsample_size <= size):
            raise Refusal(
                f"Plate '{name}' has subsample_size={subsample_size!r}, but it must be an integer "
                f"between 1 and the plate's size, {size}."
            )
        if name in self.plates and self.plates[name].size != size:
            raise Refusal(
                f"Plate '{name}' has size {self.plates[name].size} in one place of the model and "
                f"{size} in another: give the two different names."
            )
        self.plates[name] = Plate(name, size, subsample_size)
        return self.issued.issue(name, jnp.arange(subsample_size))


def _sample_site(site: Any, frames: tuple[Any, ...], is_drawn: bool) -> SampleSite:
    """What is known of a sample statement; ``is_drawn`` where ``gibbs_fn`` draws it."""
    fn, value = site["fn"], site["value"]
    known = SampleSite(
        name=site["name"],
        frames=frames,
        is_observed=site["is_observed"],
        shape=jnp.shape(value),
        batch_shape=fn.batch_shape,
        event_shape=fn.event_shape,
        bare_dims=_bare_dims(site),
    )
    if known.is_observed:
        return known
    known = known._replace(dtype=jnp.result_type(value), support=fn.support, is_delta=_is_delta(fn))
    if is_drawn or known.is_delta or fn.support.is_discrete:
        return known
    with suppress(NotImplementedError):  # there is no map to unconstrained space
        known = known._replace(free_shape=jnp.shape(biject_to(fn.support).inv(value)))
    return known


def _bare_dims(site: Any) -> tuple[int, ...]:
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


def _settled(model: Callable, arguments: Arguments, statements: dict[str, Statement]) -> Callable:
    """The model with the first values of its ``param`` and ``mutable`` sites, if it has any."""
    names = [n for n, s in statements.items() if s.kind in ("param", "mutable")]
    with validation_enabled(False):  # a draw from the prior may be one that no chain comes to
        values = _Run(arguments).trace(model, arguments) if names else {}
    return substitute(model, data={n: values[n]["value"] for n in names})
