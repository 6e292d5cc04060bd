"""Updates of local latent variables by `gibbs_fn`, against NumPyro's joint potential."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.handlers import substitute
from numpyro.infer import init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS, make_gradient_fn
from numpyro_sgmcmc.model.local_latents import LocalValues, with_local_values
from numpyro_sgmcmc.model.local_moves import (
    init_local_values,
    update_local_values,
    update_minibatch_locals,
    update_reference_gradient,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential
from numpyro_sgmcmc.model.trace import GibbsConfig
from tests.model.hierarchies import awkward, mixture, mixture_data, normal_means
from tests.model.plated import assert_close

ROWS, BATCH = 12, 4


_update_minibatch_locals = jax.jit(update_minibatch_locals, static_argnames="potential")
_update_reference_gradient = jax.jit(update_reference_gradient, static_argnames="potential")
_full_value = jax.jit(Potential.full_value, static_argnums=0)
_gradient = jax.jit(Potential.gradient, static_argnums=0)


def move(rng_key: Any, gibbs_sites: Any, hmc_sites: Any, rows: Any) -> Any:
    """Move local values within their supports."""
    moved = {
        "z": lambda x: x + 0.3,
        "width": lambda x: 1.2 * x,
        "pair": lambda x: x - 0.4,
        "weights": lambda x: jnp.roll(x, 1, -1),
        "cell": lambda x: 0.5 * x,
    }
    return {name: moved[name](x) for name, x in gibbs_sites.items()}


class _Case:
    """A small model in float64, at arbitrary global and local values."""

    def __init__(self, model: Any, y: Any) -> None:
        self.model, self.y = model, np.asarray(y, np.float64)
        self.arguments = Arguments((self.y,), {"batch_size": BATCH})
        names = ("z",) if model is normal_means else ("width", "pair", "weights", "cell")
        gibbs = GibbsConfig(move, names)
        self.potential = make_model_potential(model, self.arguments, init_to_uniform, gibbs)
        rng = np.random.default_rng(7)
        self.theta = jnp.asarray(0.3 * rng.standard_normal(self.potential.dim))
        self.reference = self.theta + 0.2
        self.values = init_local_values(self.potential, self.arguments, self.theta)
        self.joint = jax.jit(self._joint)
        self.joint_gradient = jax.jit(jax.grad(self._joint))

    def _joint(self, theta: Any, values: LocalValues) -> Any:
        """Return NumPyro's potential of all rows and values."""
        data = self.potential.local_latents.to_model_layout(values.by_site)
        model = substitute(self.model, data=data)
        return potential_energy(model, (jnp.asarray(self.y),), {}, self.potential.unravel(theta))

    def update(self, rows: Any, values: Any = None, gradient: Any = None) -> Any:
        """Update the local values of some rows."""
        values = self.values if values is None else values
        if gradient is None:
            gradient = self.joint_gradient(self.reference, values)
        indices = {"rows": jnp.asarray(rows)}
        after, arguments = _update_minibatch_locals(
            self.potential, values, self.theta, indices, self.arguments, jax.random.key(0)
        )
        preconditioner = _update_reference_gradient(
            self.potential,
            Preconditioner(self.reference, jnp.ones(self.potential.dim), gradient),
            values,
            indices,
            arguments,
        )
        return after, preconditioner.reference_gradient, arguments


@cache
def make_case(model: Any) -> _Case:
    shape = (ROWS,) if model is normal_means else (ROWS, 3)
    return _Case(model, np.random.default_rng(8).standard_normal(shape))


@pytest.fixture(params=[normal_means, awkward], ids=["normal_means", "awkward"])
def case(request, x64):
    return make_case(request.param)


def test_full_value_with_local_values_is_joint_potential(case):
    arguments = with_local_values(case.arguments, case.values)
    assert_close(
        _full_value(case.potential, case.theta, arguments), case.joint(case.theta, case.values)
    )


def test_update_minibatch_locals_changes_rows_of_minibatch_only(case):
    rows = np.array([9, 2, 4, 10])
    after, _, arguments = case.update(rows)
    others = np.setdiff1d(np.arange(ROWS), rows)
    inserted = arguments.kwargs["_local_values"].by_site
    for name, before in case.values.by_site.items():
        now = after.by_site[name]
        np.testing.assert_array_equal(now[others], before[others])
        assert (now[rows] != before[rows]).any()
        np.testing.assert_array_equal(inserted[name], now[rows])


def test_update_minibatch_locals_gradient_estimators_stay_unbiased(case):
    """The mean of the estimates on a partition of the rows is the full gradient."""
    after, gradient, _ = case.update([9, 2, 4, 10])
    arguments = with_local_values(case.arguments, after)
    preconditioner = Preconditioner(case.reference, jnp.ones(case.potential.dim), gradient)
    q = case.theta - case.reference
    blocks = np.random.default_rng(1).permutation(ROWS).reshape(-1, BATCH)
    expected = case.joint_gradient(case.theta, after)
    for estimator in (GRADIENT_ESTIMATORS["minibatch"], GRADIENT_ESTIMATORS["control_variate"]):
        estimates = jax.jit(
            jax.vmap(
                lambda b, e=estimator: make_gradient_fn(
                    e, case.potential, arguments, preconditioner, {"rows": b}
                )(q)
            )
        )(jnp.asarray(blocks))
        assert_close(np.mean(estimates, 0), expected)
        assert np.ptp(estimates, 0).max() > 1e-3 * np.abs(expected).max()


def test_update_reference_gradient_stays_exact(case):
    values, gradient = case.values, None
    for rows in [[0, 1, 2, 3], [8, 3, 5, 1], [11, 10, 2, 0]]:
        values, gradient, _ = case.update(rows, values, gradient)
    assert_close(gradient, case.joint_gradient(case.reference, values), rtol=1e-10)


def test_update_minibatch_locals_arguments_hold_updated_values(case):
    rows = jnp.array([9, 2, 4, 10])
    after, _, step_arguments = case.update(rows)
    arguments = with_local_values(case.arguments, after)
    indices = {"rows": rows}
    assert_close(
        _gradient(case.potential, case.theta, indices, step_arguments),
        _gradient(case.potential, case.theta, indices, arguments),
    )


def test_update_local_values_gibbs_fn_gets_minibatch_and_sets_values():
    y = mixture_data()
    arguments = Arguments((y,), {"batch_size": 5})
    seen = {}

    def gibbs_fn(rng_key, gibbs_sites, hmc_sites, rows):
        seen.update(gibbs_sites=gibbs_sites, hmc_sites=hmc_sites, rows=rows)
        return {"k": 1 - gibbs_sites["k"]}

    potential = make_model_potential(
        mixture, arguments, init_to_uniform, GibbsConfig(gibbs_fn, ("k",))
    )
    values = potential.local_latents.make_zero_values()
    rows = jnp.array([7, 1999, 3, 0, 12])
    theta = jnp.array([0.3, 2.0])
    after = update_local_values(
        potential, theta, rows, values.take(rows), arguments, jax.random.key(0)
    )
    np.testing.assert_array_equal(after.by_site["k"], np.ones(5))
    np.testing.assert_array_equal(seen["rows"], rows)
    np.testing.assert_allclose(seen["hmc_sites"]["share"], 1 / (1 + np.exp(-0.3)), rtol=1e-6)
    put = values.put(rows, after).by_site["k"]
    assert put.sum() == 5
    assert (put[rows] == 1).all()
