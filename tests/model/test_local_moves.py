"""Updates of local latent variables, against NumPyro's joint potential."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS, make_gradient_fn
from numpyro_sgmcmc.model.local_latents import LocalValues, with_local_values
from numpyro_sgmcmc.model.local_moves import (
    LocalLatentsState,
    make_pointwise_potentials,
    sweep_local_values,
    update_local_values,
    update_minibatch_locals,
    update_reference_gradient,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential
from numpyro_sgmcmc.model.trace import GibbsConfig
from tests.model.hierarchies import (
    NOISE,
    awkward,
    mixture,
    mixture_data,
    normal_means,
    normal_means_data,
)
from tests.model.plated import assert_close
from tests.quick import quick_if

ROWS, BATCH = 12, 4


_update_minibatch_locals = jax.jit(update_minibatch_locals, static_argnames="potential")
_update_reference_gradient = jax.jit(update_reference_gradient, static_argnames="potential")


@partial(jax.jit, static_argnames="potential")
def _pointwise_potentials(potential, global_position, rows, values, arguments):
    evaluate = make_pointwise_potentials(potential, global_position, rows, values, arguments)
    return evaluate(values.hmc_position)


_full_value = jax.jit(Potential.full_value, static_argnums=0)
_gradient = jax.jit(Potential.gradient, static_argnums=0)


class _Case:
    """A small model in float64, at arbitrary global and local values."""

    def __init__(self, model: Any, y: Any) -> None:
        self.model, self.y = model, np.asarray(y, np.float64)
        self.arguments = Arguments((self.y,), {"batch_size": BATCH})
        self.potential = make_model_potential(model, self.arguments, init_to_uniform)
        rng = np.random.default_rng(7)
        self.theta = jnp.asarray(0.3 * rng.standard_normal(self.potential.dim))
        self.reference = self.theta + 0.2
        local = self.potential.local_latents
        self.values = LocalValues(
            jnp.asarray(0.5 * rng.standard_normal((ROWS, local.hmc_dim))),
            local.make_zero_values().gibbs_values,
        )
        self.joint = jax.jit(self._joint)
        self.joint_gradients = jax.jit(jax.grad(self._joint, (0, 1)))
        self.state = LocalLatentsState(
            self.values, jnp.full((ROWS, local.hmc_dim), 0.5), jnp.ones(())
        )

    def _joint(self, theta: Any, position: Any) -> Any:
        """Return NumPyro's potential of all rows and values."""
        z = self.potential.unravel(theta) | self.potential.local_latents.unravel(position)
        return potential_energy(self.model, (jnp.asarray(self.y),), {}, z)

    def full_gradient(self, values: LocalValues, theta: Any = None) -> Any:
        theta = self.theta if theta is None else theta
        return self.joint_gradients(theta, values.hmc_position)[0]

    def update(self, rows: Any, seed: int = 0, state: Any = None, gradient: Any = None) -> Any:
        """Update the local values of some rows."""
        state = self.state if state is None else state
        if gradient is None:
            gradient = self.full_gradient(state.values, self.reference)
        indices = {"rows": jnp.asarray(rows)}
        after, arguments = _update_minibatch_locals(
            self.potential, state, self.theta, indices, self.arguments, jax.random.key(seed)
        )
        preconditioner = _update_reference_gradient(
            self.potential,
            Preconditioner(self.reference, jnp.ones(self.potential.dim), gradient),
            state.values,
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
        _full_value(case.potential, case.theta, arguments),
        case.joint(case.theta, case.values.hmc_position),
    )


def test_pointwise_potentials_gradient_is_unscaled(case):
    expected = case.joint_gradients(case.theta, case.values.hmc_position)[1]
    rows = jnp.array([3, 11, 0, 7])
    some = case.values.take(rows)

    def total(position):
        values = some._replace(hmc_position=position)
        return _pointwise_potentials(case.potential, case.theta, rows, values, case.arguments).sum()

    assert_close(jax.grad(total)(some.hmc_position), expected[rows])


def test_pointwise_potentials_one_row_moved_changes_as_joint(case):
    rows = jnp.arange(ROWS)
    moved = case.values.hmc_position.at[5].add(0.7)

    def pointwise(position):
        values = case.values.take(rows)._replace(hmc_position=position)
        return _pointwise_potentials(case.potential, case.theta, rows, values, case.arguments)

    change = pointwise(moved) - pointwise(case.values.hmc_position)
    expected = case.joint(case.theta, moved) - case.joint(case.theta, case.values.hmc_position)
    assert_close(change, jnp.zeros(ROWS).at[5].set(expected))


def test_update_minibatch_locals_changes_rows_of_minibatch_only(case):
    rows = [9, 2, 4, 10]
    after, _, arguments = case.update(rows)
    others = np.setdiff1d(np.arange(ROWS), rows)
    before, now = case.values.hmc_position, after.values.hmc_position
    np.testing.assert_array_equal(now[others], before[others])
    assert (now[jnp.array(rows)] != before[jnp.array(rows)]).any()
    inserted = arguments.kwargs["_local_values"].hmc_position
    np.testing.assert_array_equal(inserted, now[jnp.array(rows)])


def test_update_minibatch_locals_gradient_estimators_stay_unbiased(case):
    """The mean of the estimates on a partition of the rows is the full gradient."""
    after, gradient, _ = case.update([9, 2, 4, 10])
    arguments = with_local_values(case.arguments, after.values)
    preconditioner = Preconditioner(case.reference, jnp.ones(case.potential.dim), gradient)
    q = case.theta - case.reference
    blocks = np.random.default_rng(1).permutation(ROWS).reshape(-1, BATCH)
    expected = case.full_gradient(after.values)
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
    state, gradient = case.state, None
    for n, rows in enumerate([[0, 1, 2, 3], [8, 3, 5, 1], [11, 10, 2, 0]]):
        state, gradient, _ = case.update(rows, n, state, gradient)
    assert_close(gradient, case.full_gradient(state.values, case.reference), rtol=1e-10)


def test_update_minibatch_locals_arguments_hold_updated_values(case):
    rows = jnp.array([9, 2, 4, 10])
    after, _, step_arguments = case.update(rows)
    arguments = with_local_values(case.arguments, after.values)
    indices = {"rows": rows}
    assert_close(
        _gradient(case.potential, case.theta, indices, step_arguments),
        _gradient(case.potential, case.theta, indices, arguments),
    )


@pytest.mark.parametrize("scale", [quick_if(False, 0.3), 1.0, 3.0])
def test_sweep_local_values_any_scale_leaves_conditional_invariant(scale):
    """Samples from p(z | theta, y) remain such samples, and each row moves."""
    rows, tau = 20_000, 1.3
    y = normal_means_data(rows)
    arguments = Arguments((y,), {"batch_size": 100})
    potential = make_model_potential(normal_means, arguments, init_to_uniform)
    theta = jnp.array([0.4, np.log(tau)], jnp.float32)
    variance = 1 / (1 / tau**2 + 1 / NOISE**2)
    mean = variance * (0.4 / tau**2 + y / NOISE**2)
    start = np.random.default_rng(0).standard_normal(rows)
    values = LocalValues(jnp.asarray(mean + np.sqrt(variance) * start, jnp.float32)[:, None], {})
    widths = jnp.full((rows, 1), scale * np.sqrt(variance), jnp.float32)
    state = LocalLatentsState(values, widths, jnp.ones(()))
    after, acceptance = jax.jit(sweep_local_values, static_argnums=(0, 5))(
        potential, theta, state, arguments, jax.random.key(0), 3
    )
    u = (np.asarray(after.hmc_position[:, 0], np.float64) - mean) / np.sqrt(variance)
    assert abs(u.mean() - start.mean()) < 5 * np.sqrt(2 / rows)
    assert abs(u.var() - start.var()) < 5 * np.sqrt(4 / rows)
    assert abs((u**4).mean() - 3) < 5 * np.sqrt(96 / rows)
    assert 0.1 < acceptance.mean() <= 1
    assert abs(np.corrcoef(u, start)[0, 1]) < (0.4 if scale == 1.0 else 0.9)


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
    after, _ = update_local_values(
        potential, theta, rows, values.take(rows), jnp.zeros((5, 0)), arguments, jax.random.key(0)
    )
    np.testing.assert_array_equal(after.gibbs_values["k"], np.ones(5))
    np.testing.assert_array_equal(seen["rows"], rows)
    np.testing.assert_allclose(seen["hmc_sites"]["share"], 1 / (1 + np.exp(-0.3)), rtol=1e-6)
    put = values.put(rows, after).gibbs_values["k"]
    assert put.sum() == 5
    assert (put[rows] == 1).all()
