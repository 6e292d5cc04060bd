"""The papers' networks at toy size: without a hidden layer, where the posterior is known."""

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import init_to_sample
from scipy.stats import norm

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.contract.kernels import assert_posterior
from tests.quick import quick_if

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
import franzese2021_network as network_of_one_layer
from franzese2021_chains import draws
from franzese2021_data import Split, Table, make_model, network, split
from franzese2021_tables import KERNELS, Size, measure, scores
from parts import Parts

ROWS, VARIANCE = 60, 0.2
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((ROWS, 2)), jnp.float32)
Y = jnp.asarray(RNG.standard_normal(ROWS), jnp.float32)


def exact_posterior():
    """Mean and SDs of bias and weights, in the order of their names."""
    design = np.column_stack([np.ones(ROWS), np.asarray(X, float) / math.sqrt(2)])
    covariance = np.linalg.inv(np.eye(3) + design.T @ design / VARIANCE)
    return covariance @ design.T @ np.asarray(Y, float) / VARIANCE, np.sqrt(np.diag(covariance))


@pytest.mark.parametrize(
    ("integrator", "num_leapfrog", "batch_size", "h"),
    [
        ("mt3", None, ROWS, 0.05),
        quick_if(False, "leapfrog", None, ROWS, 0.05),
        quick_if(False, "lie_trotter", 5, ROWS, 0.02),
        quick_if(False, "symmetric", None, 20, 0.004),
    ],
)
def test_chains_have_the_posterior(integrator, num_leapfrog, batch_size, h):
    model = make_model((2, 1), jnp.tanh, VARIANCE)
    arguments = Arguments((X, Y), {"batch_size": batch_size})
    target = get_model_potential(model, arguments, init_to_sample)
    starts = jax.random.normal(jax.random.key(1), (200, 3))
    found = draws(
        target,
        arguments,
        integrator,
        jax.random.key(0),
        starts,
        h,
        num_leapfrog=num_leapfrog,
        num_draws=5,
        burn_in=3.0,
        apart=0.5,
    )
    assert found["w0"].shape == (200, 5, 2, 1)
    flat = np.concatenate([found["b0"], found["w0"][..., 0]], axis=-1)
    assert_posterior(np.moveaxis(flat, 0, 1), *exact_posterior())


def test_a_network_is_the_papers():
    """Equation (104): no activation before the first layer, and the root of each layer's inputs."""
    rng = np.random.default_rng(1)
    w = [rng.standard_normal(shape) for shape in ((2, 3), (3,), (3, 1), (1,))]
    weights = dict(zip(("w0", "b0", "w1", "b1"), map(jnp.asarray, w), strict=True))
    hidden = np.asarray(X) @ w[0] / math.sqrt(2) + w[1]
    expected = np.maximum(hidden, 0.0) @ w[2] / math.sqrt(3) + w[3]
    np.testing.assert_allclose(network(weights, X, jax.nn.relu), expected, rtol=1e-4, atol=1e-5)


def test_scores_of_a_mixture():
    data = Split(X, Y, X[:4], Y[:4], unit=9.0)
    f = RNG.standard_normal((5, 4))
    y = np.asarray(Y[:4])
    densities = norm.pdf(9.0 * y, 9.0 * f, 9.0 * math.sqrt(VARIANCE)).mean(0)
    found = scores(jnp.asarray(f)[..., None], data, VARIANCE)
    assert found.mnll == pytest.approx(-np.log(densities).mean(), rel=1e-4)
    assert found.error == pytest.approx(9.0 * np.sqrt(np.square(f.mean(0) - y).mean()), rel=1e-4)
    classes = data._replace(y_test=jnp.array([0, 1, 1, 0]))
    logits = RNG.standard_normal((5, 4, 2))
    p = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).mean(0)
    found = scores(jnp.asarray(logits), classes, None)
    chosen = p[np.arange(4), [0, 1, 1, 0]]
    assert found.mnll == pytest.approx(-np.log(chosen).mean(), rel=1e-4)
    assert found.error == pytest.approx((chosen > 0.5).mean())


def test_a_split_is_standardised_by_the_rows_to_learn_from():
    table = Table(RNG.standard_normal((50, 3)) * 7 + 2, RNG.standard_normal(50) * 5, 40, VARIANCE)
    data = split(table, 0)
    np.testing.assert_allclose(data.x.mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(data.y.std(), 1.0, rtol=1e-4)
    both = np.concatenate([data.y, data.y_test]) * data.unit
    np.testing.assert_allclose(np.ptp(both), np.ptp(table.y), rtol=1e-4)
    assert len(data.y_test) == 10


@pytest.mark.slow
def test_tables_at_toy_size():
    y = RNG.integers(0, 2, 60)
    table = Table(RNG.standard_normal((60, 3)) + 4.0 * y[:, None], y, 50, None)
    size = Size(1, 20, 0.02, 20, 10)
    assert [measure(table, size, kernel, 0).error for kernel in KERNELS] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*plot")
def test_the_experiment_on_one_layer_at_toy_size(monkeypatch, capsys, tmp_path):
    table = Table(np.asarray(RNG.standard_normal((106, 8))), RNG.standard_normal(106), 95, 0.2)
    monkeypatch.setattr(network_of_one_layer, "load", lambda name: table)
    what, size = ("starts", "library", "integrator", "friction"), network_of_one_layer.QUICK

    def run(what, *, is_join):
        parts = Parts(tmp_path, "toy", is_join)
        network_of_one_layer.experiment("Boston", size, 0, parts, what)
        return capsys.readouterr().out

    assert "| h = 0.04" not in run(what, is_join=True)
    assert run(what[:2], is_join=False).count("SHMC by MCMC") == 1
    printed = run(what, is_join=False)
    assert printed.count("| h = 0.04") == 4
    joined = run(what, is_join=True)
    assert joined.count("| h = 0.04") == 4
    assert all(line in printed for line in joined.splitlines() if line.startswith("|"))
