"""One chain on a convolutional network, beside a trained network and an ensemble of four.

Fashion-MNIST by the experiment of Paulin, Whalley, Chada and Leimkuhler (2025), section 5: a chain
begins at averaged weights of a network by Adam, and samples about them, at temperature one, with
the integrator UBU and palindromic minibatches. Its potential is that of the weights' posterior, a
normal prior about zero, and of ``localised`` about its start. There is one draw for each pass over
the rows; the first fifth of them is dropped.

All methods have equally many passes in total: with E = ``--epochs``, the ensemble's four networks
have E each, and one network alone has E, or 4 E. A chain's start has E and E / 3 more of averaging,
and the chain the rest of 4 E. With 15, this is the paper's 15 + 5 + 40.

A tenth of the training rows is held out to choose settings, by the least NLL: the rate and the
prior's precision (the weight decay) for one network and for an ensemble (a pair in its place); the
prior's precision again for one network of 4 E passes; and the precisions of the prior and about the
start, and the step size, of a chain, at half its passes. Then all learn from all rows, and test
images are predicted. Means and standard errors are over seeds.

Networks that differ in their seeds or settings are trained side by side. Chains of several seeds
are one chain on a product of posteriors: they share the order of their minibatches alone.

    python benchmarks/papers/convolutions.py          # 2,498 weights, 5,000 rows
    python benchmarks/papers/convolutions.py --full   # 421,642 weights, 60,000 rows (for a GPU)
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networks_data
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from networks_data import Data
from networks_rivals import train_from
from networks_task import Scores, Weights, of_classes
from numpyro.infer import MCMC
from standard_errors import mean

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit, localised

_CLASSES, _MEMBERS = 10, 4
_FRICTION = math.sqrt(50.0)  # the paper's
_COLUMNS = {
    "method": 24,
    "passes": 6,
    "NLL": 17,
    "accuracy, %": 14,
    "ECE, %": 13,
    "rate": 6,
    "prior precision": 15,
    "localised": 9,
    "step size": 9,
}


class Network(NamedTuple):
    """Two convolutions of 3 x 3 pixels, each followed by means of 2 x 2, and dense layers.

    - **side** - of an image in pixels.
    - **channels** - of the convolutions.
    - **units** - of the hidden dense layer.
    """

    side: int
    channels: tuple[int, int]
    units: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights; a convolution is a product with the 9 pixels about each."""
        first, second = self.channels
        inputs = (self.side // 4) ** 2 * second
        sizes = ((9, first), (9 * first, second), (inputs, self.units), (self.units, _CLASSES))
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, size in enumerate(sizes):
            shapes |= {f"w{layer}": size, f"b{layer}": size[1:]}
        return shapes

    @property
    def num_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def initialise(self, key: Array) -> dict[str, Array]:
        """Weights of variance two over a layer's inputs (He et al. 2015), biases of zero."""
        keys = random.split(key, len(self.shapes))
        return {
            name: random.normal(key, shape) * (math.sqrt(2.0 / shape[0]) if shape[1:] else 0.0)
            for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)
        }

    def logits(self, weights: Weights, x: Array) -> Array:
        """Shape ``(n, classes)``."""
        f = x.reshape(-1, self.side, self.side, 1)
        for layer in range(2):
            f = _activate(_patches(f) @ weights[f"w{layer}"] + weights[f"b{layer}"])
            half = f.shape[1] // 2
            f = f[:, : 2 * half, : 2 * half].reshape(len(f), half, 2, half, 2, -1).mean((2, 4))
        f = _activate(f.reshape(len(f), -1) @ weights["w2"] + weights["b2"])
        return f @ weights["w3"] + weights["b3"]

    def loss(
        self, weights: Weights, x: Array, y: Array, key: Array | None, dropout: float
    ) -> Array:
        """Mean negative log probability of the class; the last two are not used."""
        f = self.logits(weights, x)
        return -jnp.take_along_axis(jax.nn.log_softmax(f), y[:, None], axis=1).mean()

    def model(self, x: Array, y: Array, precision: Array, batch_size: int | None = None) -> None:
        """A product of posteriors of several networks.

        :param precision: of each network's prior.
        """
        weights = {}
        for name, shape in self.shapes.items():
            sd = precision.reshape(-1, *[1] * len(shape)) ** -0.5
            prior = dist.Normal(0.0, sd).expand([len(precision), *shape])
            weights[name] = numpyro.sample(name, prior.to_event(len(shape) + 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            logits = jax.vmap(self.logits, (0, None), 1)(weights, x[i])
            classes = jnp.broadcast_to(y[i][:, None], logits.shape[:2])
            numpyro.sample("y", dist.Categorical(logits=logits).to_event(1), obs=classes)


def _activate(f: Array) -> Array:
    """Softplus as in the paper, but zero at zero: the posterior is better conditioned."""
    return jax.nn.softplus(f) - math.log(2.0)


def _patches(f: Array) -> Array:
    """Neighbours of all pixels, zeros outside.

    A product with them is as fast for several networks at once, unlike a convolution.
    """
    _, height, width, _ = f.shape
    padded = jnp.pad(f, ((0, 0), (1, 1), (1, 1), (0, 0)))
    places = itertools.product(range(3), range(3))
    return jnp.concatenate([padded[:, i : i + height, j : j + width] for i, j in places], -1)


class Size(NamedTuple):
    """
    - **rows** - to learn from.
    - **batch** - rows of a minibatch.
    - **epochs** - passes of a trained network.
    - **rates** - Adam's at first; **precisions** of the prior; among which held-out rows choose.
    - **localisations** - precisions about a chain's start; likewise.
    - **steps** - step sizes; likewise.
    """

    network: Network
    rows: int
    batch: int
    epochs: int
    rates: tuple[float, ...] = (0.001, 0.003)
    precisions: tuple[float, ...] = (1.0, 10.0, 30.0, 100.0)
    localisations: tuple[float, ...] = (50.0, 500.0)
    steps: tuple[float, ...] = (1.25e-4, 5e-4)  # the paper's, and four times that

    @property
    def averaged(self) -> int:
        """Passes over which the weights of a chain's start are averaged."""
        return max(1, round(self.epochs / 3))

    @property
    def sampled(self) -> int:
        """Passes of a chain."""
        return (_MEMBERS - 1) * self.epochs - self.averaged


SMALL = Size(
    Network(14, (8, 16), 8),
    5_000,
    100,
    15,
    rates=(0.01, 0.03, 0.1),
    precisions=(0.3, 1.0, 3.0, 10.0, 30.0),
    localisations=(2.0, 10.0, 50.0),
    steps=(5e-4, 1e-3, 2e-3, 4e-3),
)
FULL = Size(Network(28, (32, 64), 128), 60_000, 200, 15)


class Settings(NamedTuple):
    """
    - **rate** - Adam's, at first.
    - **precision** - of the prior.
    - **localisation** - precision about a chain's start.
    - **step** - step size of a chain.
    """

    rate: float
    precision: float
    localisation: float = math.nan
    step: float = math.nan


def train(
    size: Size, data: Data, settings: Sequence[Settings], seeds: Sequence[int], passes: tuple
) -> dict[str, Array]:
    """Weights of networks, one for each of the settings and seeds, on a leading axis.

    :param passes: those by Adam, and those of averaging.
    """
    keys = jax.vmap(random.key)(np.asarray(seeds))
    starts = jax.jit(jax.vmap(size.network.initialise))(keys)
    static = (size.network, *passes, min(size.batch, len(data.y)), False)
    rows, classes = jnp.asarray(data.x), jnp.asarray(data.y)

    def one(start: Any, key: Array, rate: Array, precision: Array) -> Any:
        return train_from(*static, start, key, rows, classes, rate, precision, 0.0)

    rates, precisions = (jnp.array(column) for column in list(zip(*settings, strict=True))[:2])
    found: dict[str, Array] = jax.block_until_ready(jax.vmap(one)(starts, keys, rates, precisions))
    return found


def sample(
    size: Size,
    data: Data,
    settings: Sequence[Settings],
    starts: Mapping[str, Array],
    epochs: int,
    seed: int,
) -> dict[str, Array]:
    """Draws of chains, one for each of the settings and starts, shape ``(draws, chains, ...)``.

    :param settings: with one step size. Where a chain diverges, the draws of all are NaN.
    """
    _, precisions, localisations, (step, *_) = (list(c) for c in zip(*settings, strict=True))
    about = {
        name: np.broadcast_to(np.reshape(localisations, (-1, *[1] * (w.ndim - 1))), w.shape)
        for name, w in starts.items()
    }
    batch = min(size.batch, len(data.y))
    kernel = SGHMCSplit(
        localised(size.network.model, starts, about),
        integrator="ubu",
        step_size=step,
        friction=_FRICTION,
        num_steps=len(data.y) // batch,
        adapt_mass_matrix=False,
        gradient_estimator="minibatch",
        subsampling="palindrome",
    )
    mcmc = MCMC(kernel, num_warmup=0, num_samples=epochs, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a run without warm-up
        mcmc.run(
            random.key(seed),
            jnp.asarray(data.x),
            jnp.asarray(data.y),
            jnp.array(precisions),
            batch_size=batch,
            init_params=starts,
            extra_fields=("diverging",),
        )
    has_diverged = mcmc.get_extra_fields()["diverging"].any()
    draws: dict[str, Array] = mcmc.get_samples()
    return {n: jnp.where(has_diverged, jnp.nan, w[epochs // 5 :]) for n, w in draws.items()}


@partial(jax.jit, static_argnums=0)
def predict(network: Network, draws: Weights, x: Array) -> Array:
    """Logits, shape ``(draws, n, classes)``."""

    def of_draw(weights: Weights) -> Array:
        # Part by part: neighbours of all pixels of all images would take much memory.
        return lax.map(lambda image: network.logits(weights, image[None])[0], x, batch_size=1_000)

    return lax.map(of_draw, draws)


def score(size: Size, draws: Weights, data: Data) -> Scores:
    """Scores of the mean prediction.

    :param draws: weights with a leading axis, of draws or of an ensemble's members.
    """
    logits = predict(size.network, draws, jnp.asarray(data.x_test))
    if not jnp.isfinite(logits).all():  # of a chain or a network that has diverged
        return Scores(math.nan, math.nan, math.nan)
    return of_classes(logits, data)


def pick(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda w: w[index], tree)


@contextmanager
def timed(what: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"    {what}: {wall:.0f} s, {cpu:.0f} s of CPU", flush=True)


def choose(settings: Sequence[Settings], nlls: Iterable[float], what: str) -> Settings:
    """The settings of the least NLL on held-out rows."""
    found = list(nlls)
    for nll, one in zip(found, settings, strict=True):
        print(f"    held out, {what}: NLL {nll:.4f}, {[f'{value:g}' for value in one]}")
    return settings[int(np.nanargmin(found))]


def tune(size: Size, data: Data) -> dict[str, Settings]:
    """Settings of each method, chosen on held-out rows."""
    held_out = data.held_out()
    among = [Settings(*pair) for pair in itertools.product(size.rates, size.precisions)]
    with timed("tuning of networks"):
        pairs = [one for one in among for _ in range(2)]
        found = train(size, held_out, pairs, [0, 1] * len(among), (size.epochs, 0))

    def nll(draws: Weights) -> float:
        return score(size, draws, held_out).nll

    alone = [nll(pick(found, slice(k, k + 1))) for k in range(len(pairs))]
    one = choose(among, np.reshape(alone, (-1, 2)).mean(1), "one network")
    both = [nll(pick(found, slice(k, k + 2))) for k in range(0, len(pairs), 2)]
    pair = choose(among, both, "ensemble")

    with timed("tuning of a longer network"):
        among = [one._replace(precision=precision) for precision in size.precisions]
        longer = train(size, held_out, among, [0] * len(among), (_MEMBERS * size.epochs, 0))
    alone = [nll(pick(longer, slice(k, k + 1))) for k in range(len(among))]
    long = choose(among, alone, "longer network")

    with timed("tuning of chains"):
        starts = train(size, held_out, among, [0] * len(among), (size.epochs, size.averaged))
        tried: list[Settings] = []
        found_nlls: list[float] = []
        for step in size.steps:
            grid = list(itertools.product(range(len(among)), size.localisations))
            own = [among[k]._replace(localisation=about, step=step) for k, about in grid]
            begun = pick(starts, np.array([k for k, _ in grid]))
            draws = sample(size, held_out, own, begun, max(2, size.sampled // 2), 0)
            found_nlls += [nll(pick(draws, np.s_[:, k])) for k in range(len(own))]
            tried += own
    chain = choose(tried, found_nlls, "chain")
    return {"one": one, "ensemble": pair, "long": long, "chain": chain}


def measure(size: Size, data: Data, seeds: int) -> None:
    """Print the table."""
    chosen, total = tune(size, data), _MEMBERS * size.epochs
    title = (
        f"Convolutions on Fashion-MNIST: {size.network.num_weights:,} weights, "
        f"{len(data.y):,} rows, {total} passes"
    )
    members = np.arange(100, 100 + _MEMBERS * seeds)

    def by_seed(of_seed: Callable[[int], Weights]) -> list[Scores]:
        return [score(size, of_seed(seed), data) for seed in range(seeds)]

    def trained(name: str, num: int, passes: tuple[int, int]) -> dict[str, Array]:
        with timed(f"training of {num} networks, {name}"):
            return train(size, data, [chosen[name]] * num, members[:num], passes)

    each = partial(pick, trained("one", seeds, (size.epochs, 0)))
    ensembles = trained("ensemble", _MEMBERS * seeds, (size.epochs, 0))
    longer = trained("long", seeds, (total, 0))
    starts = trained("chain", seeds, (size.epochs, size.averaged))
    with timed(f"{seeds} chains"):
        draws = sample(size, data, [chosen["chain"]] * seeds, starts, size.sampled, 1)

    def alone(found: Any) -> Callable[[int], Weights]:
        return lambda seed: pick(found, slice(seed, seed + 1))

    rows = {
        "one network": ("one", size.epochs, lambda seed: each(slice(seed, seed + 1))),
        "one network, longer": ("long", total, alone(longer)),
        "ensemble of 4": (
            "ensemble",
            total,
            lambda seed: pick(ensembles, slice(_MEMBERS * seed, _MEMBERS * (seed + 1))),
        ),
        "averaged weights": ("chain", size.epochs + size.averaged, alone(starts)),
        "one chain from these": ("chain", total, lambda seed: pick(draws, np.s_[:, seed])),
    }
    print()
    print_header(f"{title}, {seeds} seeds")
    print_row(_COLUMNS, _COLUMNS.values())
    for method, (name, passes, of_seed) in rows.items():
        cells = [method, passes]
        scores = np.transpose(by_seed(of_seed))[:3]
        for values, digits in zip(scores, (4, 2, 2), strict=True):
            cells.append(f"{mean(values) if seeds > 1 else values[0]:.{digits}f}")
        settings = chosen[name] if method == "one chain from these" else chosen[name][:2]
        cells += [f"{value:g}" for value in settings] + [""] * (4 - len(settings))
        print_row(cells, _COLUMNS.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--full", action="store_true", help="421,642 weights and 60,000 rows")
    parser.add_argument("--rows", type=int, help="to learn from")
    parser.add_argument("--epochs", type=int, help="passes of a trained network")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument("--folder", type=Path, help="of the files of Fashion-MNIST")
    options = parser.parse_args()
    size = FULL if options.full else SMALL
    data = networks_data.fashion(options.rows or size.rows, size.network.side, options.folder)
    size = size._replace(epochs=options.epochs or size.epochs)
    with timed("all"):
        measure(size, data, options.seeds)


if __name__ == "__main__":
    main()
