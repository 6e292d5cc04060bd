"""What the diagnostics ask of a finished run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.infer import MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.util import unconstrain_fn

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = [
    "check_finished_run",
    "check_has_data",
    "compute_unconstrained_draws",
    "get_coordinate_names",
    "get_potential_coordinate_names",
    "get_unconstrained_draws",
    "make_thinning_slice",
]


def check_finished_run(mcmc: Any, caller: str, uses_moments: bool = True) -> SGMCMCKernel:
    """The kernel of a run of this package's.

    :param mcmc: what the user passed.
    :param caller: name of the function that needs it, for the message.
    :param uses_moments: whether it goes by the run's moments.
    :raises ValueError: where it is something else, or has not run.
    """
    if not isinstance(mcmc, MCMC):
        raise InvalidArgumentError(
            f"`{caller}` needs the MCMC object of a run, whose state holds the moments that "
            f"tell the bias, but got {type(mcmc).__name__}: draws alone do not tell it."
        )
    kernel = mcmc.sampler
    if not isinstance(kernel, SGMCMCKernel):
        raise InvalidArgumentError(
            f"`{caller}` is for the kernels of numpyro_sgmcmc, but this MCMC ran "
            f"{type(kernel).__name__}, which keeps no moments that tell its bias."
        )
    state = mcmc.last_state
    if state is not None and not sum(np.size(x) for x in jax.tree.leaves(state.z)):
        raise InvalidArgumentError(
            f"The model has no latent site: there is nothing for `{caller}` to tell."
        )
    if state is None or not np.any(np.asarray(state.moments.num_iterations) > 0):
        raise InvalidArgumentError(f"There are no draws yet: call `mcmc.run` before `{caller}`.")
    if state.locals is not None and uses_moments:
        raise InvalidArgumentError(
            f"`{caller}` cannot tell the bias of a model with latent sites inside the "
            "subsampled plate: its moments are those of the globals given them. Compare with a "
            "run of half the step_size, and use `mcmc.print_summary()`."
        )
    return kernel


def check_has_data(kernel: SGMCMCKernel, caller: str) -> None:
    """Refuse a kernel that has been pickled, and with it has forgotten model and data.

    :raises ValueError: naming the function that needs them.
    """
    if not kernel.has_potential:
        raise InvalidArgumentError(
            f"`{caller}` needs the kernel's data, which it forgets when it is pickled: run it "
            "again first."
        )


def get_coordinate_names(mcmc: MCMC) -> list[tuple[str, str]]:
    """Site and name of each coordinate, in the order of the flat position."""
    z = mcmc.last_state.z
    if mcmc.num_chains > 1:
        z = jax.tree.map(lambda x: x[0], z)
    return _format_coordinate_names(z)


def get_potential_coordinate_names(potential: Potential) -> list[tuple[str, str]]:
    """The same of a model's posterior."""
    assert potential.sites is not None
    return _format_coordinate_names({s.name: np.zeros(s.shape) for s in potential.sites})


def _format_coordinate_names(z: Any) -> list[tuple[str, str]]:
    names: list[tuple[str, str]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(z)[0]:
        site = str(getattr(path[0], "key", "z")) if path else "z"
        places = (f"[{','.join(map(str, i))}]" if i else "" for i in np.ndindex(jnp.shape(leaf)))
        names.extend((site, site + place) for place in places)
    return names


def get_unconstrained_draws(mcmc: MCMC, kernel: SGMCMCKernel) -> jax.Array:
    """The draws as flat unconstrained positions, shape ``(chains, draws, d)``."""
    return compute_unconstrained_draws(mcmc, kernel.potential, kernel._model)


def compute_unconstrained_draws(
    mcmc: MCMC,
    potential: Potential,
    model: Callable | None,
    conditioning_samples: dict[str, jax.Array] | None = None,
) -> jax.Array:
    """The draws as flat unconstrained positions of a posterior, shape ``(chains, draws, d)``.

    :param conditioning_samples: draws of the sites that the posterior is conditioned on.
    """
    samples = mcmc.get_samples(group_by_chain=True)
    if potential.sites is None:
        z = samples
    else:
        missing = [s.name for s in potential.sites if s.name not in samples]
        if missing:
            raise InvalidArgumentError(
                f"The draws of site '{missing[0]}' were not kept: run without '~z.{missing[0]}'."
            )
        z = {s.name: samples[s.name] for s in potential.sites}
        if all(s.support is not None for s in potential.sites):
            z = {s.name: biject_to(s.support).inv(z[s.name]) for s in potential.sites}
        else:
            by_gibbs = (
                {} if conditioning_samples is None else {GIBBS_SITES_KWARG: conditioning_samples}
            )

            def one(values: dict[str, Any], others: dict[str, Any]) -> Any:
                return unconstrain_fn(model, mcmc._args, {**mcmc._kwargs, **others}, values)

            z = jax.vmap(jax.vmap(one))(z, by_gibbs)
            z = {s.name: z[s.name] for s in potential.sites}
    leaves = jax.tree.leaves(z)
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in leaves], -1).astype(
        potential.dtype
    )


def make_thinning_slice(num_draws: int, num_wanted: int) -> slice:
    """About so many of ``num_draws`` draws, at least as many where there are, as far apart as can be."""
    return slice(None, None, max(1, num_draws // num_wanted))
