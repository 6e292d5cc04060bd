"""What one run of a model tells of it: nothing here is traced, and nothing has been refused yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.shards import Shards
from numpyro_sgmcmc.data.stand_ins import RowLookup

__all__ = ["NO_GIBBS", "GibbsConfig", "ModelTrace", "SampleSite", "TracedSite"]


class TracedSite(NamedTuple):
    """
    - **site_type** - NumPyro's type of it: ``"sample"``, ``"deterministic"``, ``"param"``, ...
    - **plates** - names of the subsampled plates that enclose it.
    """

    site_type: str
    plates: tuple[str, ...]


class SampleSite(NamedTuple):
    """
    - **name** - name of a sample statement.
    - **plate_frames** - NumPyro's frames (name, dim, rows) of the subsampled plates that enclose it.
    - **is_observed** - whether it has data.
    - **shape** - shape of its value.
    - **batch_shape** - of its distribution.
    - **event_shape** - of its distribution.
    - **unplated_dims** - batch dimensions, counted from the right, for which no plate stands although
      one does for others.
    - **dtype** - type of a latent value.
    - **support** - a latent distribution's support.
    - **is_delta** - whether a latent distribution has all its mass at one point.
    - **unconstrained_shape** - shape of a latent value in unconstrained space; None where it has none.
    """

    name: str
    plate_frames: tuple[Any, ...]
    is_observed: bool
    shape: tuple[int, ...]
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    unplated_dims: tuple[int, ...] = ()
    dtype: Any = None
    support: Any = None
    is_delta: bool = False
    unconstrained_shape: tuple[int, ...] | None = None

    @property
    def has_fixed_support(self) -> bool:
        """Whether the support is the same whatever the data and the other sites."""
        # An array among its bounds may be another site's value or come from the data.
        return all(isinstance(x, (int, float)) for x in jax.tree.leaves(self.support))


class GibbsConfig(NamedTuple):
    """Local sites that the user draws.

    - **gibbs_fn** - the user's function, or None.
    - **site_names** - names of the sites.
    - **num_sweeps** - how often it is called for values that start from their prior at each minibatch,
      and are dropped; None for values that stay from one visit of a row to the next.
    """

    gibbs_fn: Callable | None = None
    site_names: tuple[str, ...] = ()
    num_sweeps: int | None = None


NO_GIBBS = GibbsConfig()


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """A model as one run on the first rows of its plates shows it.

    - **model** - the model as the user gave it.
    - **model_with_params** - the same, with the first values of its ``param`` and ``mutable`` sites.
    - **arguments** - its arguments.
    - **init_strategy** - NumPyro's initialisation strategy.
    - **gibbs** - the user's draws of local sites.
    - **unsharded_plates** - the subsampled plates by name, as the model states them.
    - **traced_sites** - all statements with a name.
    - **sample_sites** - the sample statements, in the model's order.
    - **row_lookups** - the arrays on the host or spread over devices that plates' rows index.
    """

    model: Callable
    model_with_params: Callable
    arguments: Arguments
    init_strategy: Callable
    gibbs: GibbsConfig
    unsharded_plates: Mapping[str, Plate]
    traced_sites: Mapping[str, TracedSite]
    sample_sites: tuple[SampleSite, ...]
    row_lookups: tuple[RowLookup, ...]

    @property
    def shards(self) -> Shards | None:
        """Which device holds which rows, if rows are spread over devices."""
        spread = self.arguments.sharded_arrays
        return spread[0].shards if spread else None

    @cached_property
    def plates(self) -> dict[str, Plate]:
        """The subsampled plates by name; of those spread over devices each gives as many rows."""
        shards, plates = self.shards, dict(self.unsharded_plates)
        if shards is not None:
            for name in {x.plate for x in self.row_lookups}:
                plates[name] = plates[name].with_shards(shards)
        return plates

    @property
    def plate_groups(self) -> tuple[tuple[Plate, ...], ...]:
        """The plates, those that enclose a common site together."""
        groups = [{name} for name in self.plates]
        for _, enclosing in self.traced_sites.values():
            joined = [g for g in groups if g & set(enclosing)]
            if len(joined) > 1:
                groups = [g for g in groups if g not in joined] + [set().union(*joined)]
        return tuple(tuple(self.plates[n] for n in self.plates if n in g) for g in groups)
