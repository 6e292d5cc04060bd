"""Networks beside what is used today, at toy size: scores by hand, rivals on a line."""

import gzip
import importlib
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.util import log_density
from scipy.stats import norm

from numpyro_sgmcmc import SGHMCSplit

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
networks = importlib.import_module("networks")
data = importlib.import_module("networks_data")
kernels = importlib.import_module("networks_kernels")
rivals = importlib.import_module("networks_rivals")
tasks = importlib.import_module("networks_task")

RNG = np.random.default_rng(0)
CLASSES = tasks.Task((2, 4, 3), 1.5, True)
LINE = tasks.Task((2, 1), 1.0, False)
MADE_UP = data.made_up(200)


def line(num=40):
    x = RNG.standard_normal((2 * num, 2)).astype(np.float32)
    y = (x @ [1.0, -0.5] + 0.3 * RNG.standard_normal(2 * num)).astype(np.float32)
    return data.Data(x[:num], y[:num], x[num:], y[num:], None, 2.0)


def test_a_network_by_hand():
    weights = CLASSES.from_prior(jax.random.key(0))
    w = {name: np.asarray(x, float) for name, x in weights.items()}
    hidden = np.maximum(1.5 * (MADE_UP.x @ w["w0"] / math.sqrt(2) + w["b0"]), 0.0)
    expected = 1.5 * (hidden @ w["w1"] / 2.0 + w["b1"])
    np.testing.assert_allclose(CLASSES.network(weights, MADE_UP.x), expected, rtol=1e-4, atol=1e-4)


def test_the_temperature_is_of_prior_and_likelihood():
    weights = CLASSES.from_prior(jax.random.key(0))
    x, y = jnp.asarray(MADE_UP.x), jnp.asarray(MADE_UP.y)
    likelihood = -len(y) * float(CLASSES.loss(weights, x, y, None, 0.0))
    prior = sum(norm.logpdf(np.asarray(w)).sum() for w in weights.values())
    for temperature in (1.0, 0.25):
        model = CLASSES._replace(temperature=temperature).model
        found = log_density(model, (x, y), {}, weights)[0]
        assert float(found) == pytest.approx((prior + likelihood) / temperature, rel=1e-4)


def test_scores_of_classes():
    """Two networks, four rows; of the others all are less sure than all but one."""
    p = np.array([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]] * 2)
    p[1, 3] = [0.4, 0.6]
    others = np.array([[[0.55, 0.45], [0.65, 0.35]]] * 2)
    rows = data.Data(None, None, None, np.array([0, 1, 1, 0]))
    found = tasks.of_classes(np.log(p), rows, np.log(others))
    assert found.nll == pytest.approx(-np.log([0.9, 0.2, 0.7, 0.5]).mean(), rel=1e-5)
    assert found.error == 75.0
    assert found.calibration == pytest.approx(100 * (0.1 + 0.8 + 0.3 + 0.5) / 4, rel=1e-4)
    assert found.auroc == pytest.approx(100 * 6 / 8)


def test_scores_of_numbers():
    rows = line()
    f, sd = RNG.standard_normal((3, 40, 1)), np.array([0.5, 1.0, 2.0])
    found = tasks.of_numbers(f, sd, rows)
    densities = norm.pdf(rows.y_test, f[..., 0], sd[:, None]).mean(0) / 2.0
    assert found.nll == pytest.approx(-np.log(densities).mean(), rel=1e-4)
    error = 2.0 * np.sqrt(np.square(f[..., 0].mean(0) - rows.y_test).mean())
    assert found.error == pytest.approx(error, rel=1e-4)


def test_adam_finds_the_ridge():
    rows = line()
    weights = rivals.train(LINE, rows, rivals.Training(300, 40, 0.05, 2.0), 0)
    z = np.column_stack([rows.x / math.sqrt(2), np.ones(40)])
    expected = np.linalg.solve(z.T @ z + 2.0 * np.eye(3), z.T @ rows.y)
    np.testing.assert_allclose(np.ravel(LINE.last(weights)), expected, atol=0.01)


def test_laplace_has_the_spread_of_a_line():
    rows = line()
    weights = LINE.from_prior(jax.random.key(0))
    matrix = rivals.gauss_newton(LINE, rows, weights, 0.3)
    z = np.column_stack([rows.x / math.sqrt(2), np.ones(40)])
    np.testing.assert_allclose(matrix, z.T @ z / 0.09, rtol=1e-4)
    spread = rivals.last_layer_laplace(LINE, weights, matrix, 0, 2.0)(rows.x).std(0)[:, 0]
    covariance = np.linalg.inv(matrix + 2.0 * np.eye(3))
    expected = np.sqrt(np.einsum("nu,uv,nv->n", z, covariance, z))
    # Of 50 draws.
    np.testing.assert_allclose(spread, expected, rtol=5 / math.sqrt(100))


def test_the_gauss_newton_matrix_of_classes_is_a_hessian():
    weights = CLASSES.from_prior(jax.random.key(1))
    features = CLASSES.features(weights, MADE_UP.x)
    y = jnp.asarray(MADE_UP.y)

    def loss(last):
        p = jax.nn.log_softmax(features @ last.T)
        return -jnp.take_along_axis(p, y[:, None], axis=1).sum()

    hessian = jax.hessian(loss)(CLASSES.last(weights).T).reshape(15, 15)
    found = rivals.gauss_newton(CLASSES, MADE_UP, weights)
    np.testing.assert_allclose(found, hessian, rtol=1e-3, atol=1e-3)


def test_units_drop_out():
    weights = CLASSES.from_prior(jax.random.key(0))
    whole = CLASSES.features(weights, MADE_UP.x)[:, :-1]
    kept = CLASSES.features(weights, MADE_UP.x, jax.random.key(1), 0.5)[:, :-1]
    is_kept = np.asarray(kept) != 0.0
    np.testing.assert_allclose(kept, 2.0 * whole * is_kept, rtol=1e-5)
    share = is_kept.sum() / (np.asarray(whole) != 0.0).sum()
    assert share == pytest.approx(0.5, abs=0.1)


def test_what_is_held_out_is_not_learnt_from():
    held_out = MADE_UP.held_out()
    assert (len(held_out.x), len(held_out.x_test)) == (90, 10)
    together = np.concatenate([held_out.x, held_out.x_test])
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(MADE_UP.x, axis=0))


def test_bytes_of_images_are_read(tmp_path):
    images = RNG.integers(0, 256, (3, 2, 2), np.uint8)
    head = bytes([0, 0, 8, 3]) + np.array([3, 2, 2], ">i4").tobytes()
    (tmp_path / "images.gz").write_bytes(gzip.compress(head + images.tobytes()))
    np.testing.assert_array_equal(data.read(tmp_path / "images.gz"), images)


def test_chains_separate_classes():
    """From optimised starts, and much better than chance."""
    start = rivals.Training(10, 20, 0.03, 1.0)
    run = kernels.Run(SGHMCSplit, 20, 2, 0, 20, 0.02, 5, start)
    draws = kernels.sample(CLASSES, MADE_UP, run, 0)
    assert len(draws["b0"]) == 40
    found = kernels.score(CLASSES, draws, MADE_UP)
    assert found.nll < 0.5
    assert found.inside < found.outside + 0.5


def test_with_no_arguments_the_warm_up_finds_start_and_steps():
    """And chains come to the line, whose rows have an SD of 0.3, or 0.6 in the table's units."""
    rows = line()
    draws = kernels.sample(LINE, rows, kernels.Run(SGHMCSplit, 20, 2, 20, 100), 0)
    assert len(draws["sd"]) == 200
    assert float(draws["sd"].mean()) == pytest.approx(0.3, abs=0.15)
    assert kernels.score(LINE, draws, rows).error < 0.8


def test_the_run_is_chosen_on_held_out_rows(monkeypatch):
    """And not on the rows to test on, whose classes are wrong here."""
    how = rivals.Training(10, 20, 0.03, 1.0)
    right, wrong = MADE_UP, MADE_UP._replace(y=(MADE_UP.y + 1) % 3)
    found = {t: rivals.train(CLASSES, rows, how, 0) for t, rows in ((0.5, wrong), (1.0, right))}
    monkeypatch.setattr(
        kernels,
        "sample",
        lambda task, *_: {name: w[None] for name, w in found[task.temperature].items()},
    )
    runs = [kernels.Run(SGHMCSplit, 20, 1, 0, 1, temperature=t) for t in found]
    misleading = MADE_UP._replace(y_test=(MADE_UP.y_test + 1) % 3)
    assert kernels.tune(CLASSES, misleading, runs) == runs[1]


def test_a_small_part_of_everything(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["networks.py", "--quick"])
    networks.main()
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = [line.split("|")[1].strip() for line in tables]
    assert names.count("SGHMCSplit, T chosen") == 2
    assert names.count("SGHMCSplit, cycles") == 2
    assert len(names) == 2 * 9
    assert "nan" not in "".join(tables)
