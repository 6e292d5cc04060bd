"""The papers' Boltzmann machine and recurrent network at toy size, beside sums and loops."""

import importlib
import itertools
import math
import sys
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.util import log_density
from scipy.special import expit, logsumexp
from scipy.stats import norm

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
classes = importlib.import_module("zhang2017_classes")
data = importlib.import_module("zhang2017_data")
music = importlib.import_module("zhang2017_music")
runs = importlib.import_module("zhang2017_runs")

RNG = np.random.default_rng(0)
MACHINE = {n: RNG.standard_normal(s) for n, s in classes.shapes(2, 4, 3).items()}
NETWORK = {n: RNG.standard_normal(s) for n, s in music.shapes(3, 4).items()}
ROLL = (RNG.random((2, 5, 3)) < 0.4).astype(np.float32)


def test_hidden_units_are_summed_out():
    """The energies of a class, over all values that the hidden units may have."""
    x = RNG.standard_normal((6, 2))
    hidden = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    expected = [
        [
            MACHINE["d"][k]
            + logsumexp(hidden @ (MACHINE["c"] + MACHINE["w"].T @ row + MACHINE["u"][:, k]))
            for k in range(3)
        ]
        for row in x
    ]
    np.testing.assert_allclose(classes.logits(MACHINE, x), expected, rtol=1e-4, atol=1e-4)


def loop_of_music(x):
    """Log likelihood of each quarter of a piece, one after the other."""
    state, found = np.zeros(4), []
    for before, now in itertools.pairwise([np.zeros(3), *x]):
        state = np.tanh(NETWORK["b"] + before @ NETWORK["v"] + state @ NETWORK["w"])
        p = expit(NETWORK["c"] + state @ NETWORK["u"])
        found.append(np.log(np.where(now == 1, p, 1 - p)).sum())
    return found


def test_a_network_hears_what_came_before():
    found = music.log_likelihoods(NETWORK, ROLL)
    np.testing.assert_allclose(found, [loop_of_music(x) for x in ROLL], rtol=1e-4)


def test_the_models_count_all_rows_and_no_quarter_beyond_the_end():
    priors = {
        name: sum(norm.logpdf(x).sum() for x in weights.values())
        for name, weights in (("machine", MACHINE), ("network", NETWORK))
    }
    length = np.array([5, 2])
    found = log_density(music.model, (ROLL, jnp.asarray(length), 4), {}, NETWORK)[0]
    total = sum(sum(loop_of_music(x)[:n]) for x, n in zip(ROLL, length, strict=True))
    assert float(found) == pytest.approx(priors["network"] + total, rel=1e-4)
    x, y = RNG.standard_normal((6, 2)), np.array([0, 1, 2, 2, 1, 0])
    found = log_density(classes.model, (x, jnp.asarray(y), 4, 3), {}, MACHINE)[0]
    z = np.asarray(classes.logits(MACHINE, x), float)
    total = (z[np.arange(6), y] - logsumexp(z, axis=1)).sum()
    assert float(found) == pytest.approx(priors["machine"] + total, rel=1e-4)


def test_scores_are_of_the_later_half_of_the_draws():
    p = np.array([[[0.9, 0.1]], [[0.6, 0.4]], [[0.2, 0.8]], [[0.1, 0.9]]])
    path = [{"p": x} for x in np.log(p)]
    task = runs.Task(None, (), (), lambda weights: weights["p"], np.array([1]))
    averaged = runs.scores(path, np.zeros(4), task)
    single = runs.scores(path, np.zeros(4), task, averages=False)
    kept = [0.1, 0.4, (0.4 + 0.8) / 2, (0.8 + 0.9) / 2]
    np.testing.assert_allclose(averaged.nll, -np.log(kept), rtol=1e-6)
    np.testing.assert_allclose(averaged.error, [1.0, 1.0, 0.0, 0.0])
    for nll in (averaged.single, single.nll):
        np.testing.assert_allclose(nll, -np.log(p[:, 0, 1]), rtol=1e-6)
    np.testing.assert_allclose(single.error, [1.0, 1.0, 0.0, 0.0])


SCORE = """<score-partwise><part>
  <measure><attributes><divisions>2</divisions></attributes>
    <note><pitch><step>A</step><octave>0</octave></pitch><duration>3</duration></note>
    <note><chord/><pitch><step>C</step><alter>-1</alter><octave>4</octave></pitch>
      <duration>2</duration></note>
    <note><rest/><duration>1</duration></note>
    <backup><duration>2</duration></backup><forward><duration>1</duration></forward>
    <note><grace/><pitch><step>D</step><octave>4</octave></pitch></note>
    <note><pitch><step>C</step><octave>8</octave></pitch><duration>3</duration></note>
  </measure>
  <measure><attributes><divisions>1</divisions></attributes>
    <note><pitch><step>B</step><octave>4</octave></pitch><duration>1</duration></note></measure>
</part></score-partwise>"""


def test_a_score_is_read():
    """Eighths that begin between quarters are heard only if they last to the next."""
    score = ElementTree.fromstring(SCORE)
    notes = [(a, b, key) for a, b, key in data._notes(score.find("part")) if a != b]
    half = Fraction(1, 2)
    assert notes == [
        (0, 3 * half, 0),
        (0, 1, 38),
        (3 * half, 3, 87),
        (3, 4, 50),
    ]
    roll = data.roll_of(score)
    assert [list(np.flatnonzero(quarter)) for quarter in roll] == [[0, 38], [0], [87], [50]]


def test_a_split_of_made_up_rows():
    found = data.standardised(data.made_up_classes(100))
    np.testing.assert_allclose(found.x.mean(0), 0.0, atol=1e-5)
    assert found.x.std() == pytest.approx(1.0, rel=1e-4)
    assert len(found.y_test) == len(found.x_test) == 50


def test_classes_are_separated():
    """In long steps, and not in steps that go nowhere."""
    task = classes.make_task(data.made_up_classes(400), classes.Size(4, 20, 10, 2))
    name = "SGMGT-D, a = 1"
    sampler = classes.SAMPLERS[name]._replace(step_sizes=(1e-7, 0.05))
    found = runs.all_runs({name: sampler}, task, 10, 0.05)
    for idle in found[name][1e-7]:
        assert abs(idle.nll[-1] - math.log(3)) < 0.2
    for run in (*found[name][0.05], *found["Adam"][0.05]):
        assert run.nll[-1] < 0.4
        assert run.error[-1] < 0.1
        assert not run.diverging.any()


def test_steps_decay():
    """So fast here that nothing moves from the second pass on."""
    task = classes.make_task(data.made_up_classes(100), classes.Size(4, 20, 3, 1))
    sampler = classes.SAMPLERS["SGLD"]._replace(step_sizes=(0.02,))
    (run,) = runs.on_grid(sampler, task, 3, decay=1e12)[0.02]
    assert abs(run.single[1] - run.single[0]) < 1e-4
    start = -task.predict(task.starts[0])[np.arange(50), task.outcomes].mean()
    assert abs(run.single[0] - start) > 0.01


@pytest.mark.slow
def test_music_is_heard():
    """Better than keys that know nothing of each other."""
    pieces = data.made_up_music(60, 12)
    task = music.make_task(pieces, music.Size(8, 10, 60, 1))
    name = "SGMGT, a = 1"
    sampler = music.SAMPLERS[name]._replace(step_sizes=(0.05,))
    found = runs.all_runs({name: sampler}, task, 60, 0.03)
    is_music = np.arange(12) < pieces.y_test[:, None]
    p, x = pieces.x[pieces.x.any(-1)].mean(0), pieces.x_test[is_music]
    alone = -np.log(np.where(x == 1, p, 1 - p)).sum(1).mean()
    for of_sampler in found.values():
        (run,) = next(iter(of_sampler.values()))
        assert run.nll[-1] < alone - 1.0
