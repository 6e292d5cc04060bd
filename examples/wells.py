"""Animate Langevin dynamics and two thermostats on a potential with five wells.

python examples/wells.py                # the animation, and beside it its end as wells.png
python examples/wells.py --steps 200    # quickly
"""

import argparse
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from nycflights import style
from PIL import Image

from numpyro_sgmcmc import SGLD, SGMGT, SGNHT

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COEFFICIENTS = np.array([-0.47, -0.83, -0.71, -0.02, 0.24, 0.01, 0.27, -0.37, 0.87, -0.37])
FREQUENCIES = np.pi / 4 * np.arange(1, 11)
CHAINS, SHOWN = 200, 40
FRAMES, COLOURS = 100, 32
NEAR = 0.15  # of a minimum: there a chain is in its well
EDGES = np.linspace(-3, 3, 61)
BLUE, ORANGE = "#2b6a99", "#d9822b"


def potential(theta):
    """Zhang et al. (2017), appendix D."""
    waves = COEFFICIENTS * jnp.sin(FREQUENCIES * (jnp.asarray(theta)[..., None] + 4))
    return 0.75 * theta**2 - 1.5 * waves.sum(-1)


def model(slopes, batch_size=None):
    """The wells, and rows whose slopes cancel: all of them say nothing, a minibatch is noise."""
    theta = numpyro.sample("theta", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.factor("wells", -potential(theta))
    with numpyro.plate("rows", len(slopes), subsample_size=batch_size) as i:
        numpyro.factor("noise", -slopes[i] * theta)


def rows(num=100, batch_size=10, sd=2.0):
    """Slopes that sum to zero; those of a minibatch, scaled up, have this SD."""
    slopes = np.random.default_rng(0).standard_normal(num)
    slopes -= slopes.mean()
    return jnp.asarray(slopes / slopes.std() * sd * np.sqrt(batch_size) / num)


class Wells(NamedTuple):
    """Where they are, and what a sampler should find."""

    minima: np.ndarray
    deepest: float
    shares: np.ndarray  # exact, of each bin


def find_wells():
    theta = np.linspace(-4, 4, 8001)
    u = np.asarray(potential(theta))
    lows = np.flatnonzero((u[1:-1] < u[:-2]) & (u[1:-1] <= u[2:])) + 1
    lows = lows[np.argsort(u[lows])[:5]]
    shares = np.histogram(theta, EDGES, weights=np.exp(-u))[0]
    return Wells(np.sort(theta[lows]), theta[lows[0]], shares / np.exp(-u).sum())


def run(kernel, wells, num_steps):
    """Draws after each step of chains that start in the deepest well, (chains, steps)."""
    mcmc = MCMC(kernel, num_warmup=0, num_samples=num_steps, num_chains=CHAINS,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    start = {"theta": jnp.full(CHAINS, wells.deepest)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all settings are given, and the posterior has other modes
        mcmc.run(jax.random.key(0), rows(), batch_size=10, init_params=start)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["theta"])


def crossings(draws, wells):
    """Arrivals of each chain in another well than the last, up to each step, (chains, steps)."""
    distance = np.abs(draws[..., None] - wells.minima)
    place = np.where(distance.min(-1) < NEAR, distance.argmin(-1), -1)
    steps = np.maximum.accumulate(np.where(place >= 0, np.arange(place.shape[1]), 0), axis=1)
    place = np.take_along_axis(place, steps, axis=1)  # the last well that a chain was in
    place[place < 0] = np.abs(wells.minima - wells.deepest).argmin()
    return np.cumsum(np.diff(place, axis=1, prepend=place[:, :1]) != 0, axis=1)


def distance(draws, wells):
    """Total variation between all draws and the density."""
    return 0.5 * np.abs(np.histogram(draws, EDGES)[0] / draws.size - wells.shares).sum()


class Panels:
    """A row for each sampler: its chains in the wells, and the share of its draws by place."""

    def __init__(self, runs, wells):
        self.runs, self.crossed = runs, {k: crossings(x, wells) for k, x in runs.items()}
        self.figure, axes = plt.subplots(len(runs), 2, figsize=(7.6, 6.6), sharex=True,
                                         sharey="col", layout="constrained")  # fmt: skip
        theta, middle = np.linspace(-3, 3, 601), (EDGES[1:] + EDGES[:-1]) / 2
        self.balls, self.one, self.lines, self.titles = [], [], [], []
        for (left, right), name in zip(axes, runs, strict=True):
            left.plot(theta, potential(theta), color="0.6", linewidth=1)
            self.balls.append(left.scatter([], [], s=16, color=BLUE, alpha=0.5, linewidth=0))
            self.one.append(left.scatter([], [], s=34, color=ORANGE, edgecolor="white", zorder=3))
            left.set(title=name, ylabel="potential", ylim=(-4, 7), xlim=(-3, 3))
            right.fill_between(middle, wells.shares, color="0.88", linewidth=0)
            self.lines += right.plot(middle, 0 * middle, color=BLUE, linewidth=1.2)
            self.titles.append(right.set_title(" ", fontweight="normal"))
            right.set(ylabel="share of draws", ylim=(0, 0.36))
        for ax in axes[-1]:
            ax.set_xlabel("θ")

    def show(self, step):
        """The chains after a step, and all their draws up to then."""
        for k, (name, draws) in enumerate(self.runs.items()):
            here = draws[:SHOWN, step]
            ends = np.stack([here, np.asarray(potential(here)) + 0.25], 1)
            self.balls[k].set_offsets(ends[1:])
            self.one[k].set_offsets(ends[:1])
            past = draws[:, : step + 1]
            self.lines[k].set_ydata(np.histogram(past, EDGES)[0] / past.size)
            crossed = self.crossed[name][:, step].mean()
            self.titles[k].set_text(f"step {step + 1:,}: {crossed:.1f} crossings a chain")

    def frame(self):
        self.figure.canvas.draw()
        return Image.fromarray(np.asarray(self.figure.canvas.buffer_rgba())[..., :3])


def animate(runs, wells, output):
    """The animation, with one palette for all frames, and its end as a still picture."""
    num_steps = next(iter(runs.values())).shape[1]
    every = max(1, num_steps // FRAMES)
    with plt.rc_context(style | {"figure.dpi": 80}):
        panels = Panels(runs, wells)
        panels.show(num_steps - 1)
        panels.figure.savefig(output.with_suffix(".png"), dpi=150)
        sample = panels.frame()
        sample.paste(ORANGE, (0, 0, 120, 120))  # without them so few pixels would share a colour
        palette = sample.quantize(COLOURS)
        frames = []
        for step in range(0, num_steps, every):
            panels.show(step)
            frames.append(panels.frame().quantize(palette=palette, dither=Image.Dither.NONE))
    waits = [100] * (len(frames) - 1) + [3000]
    frames[0].save(output, save_all=True, append_images=frames[1:], duration=waits, loop=0,
                   optimize=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of each chain")
    parser.add_argument("--output", type=Path, default=Path("wells.gif"))
    options = parser.parse_args()

    given = {"num_steps": 1, "adapt_mass_matrix": False, "shrink_step_size_on_divergence": False,
             "gradient_estimator": "minibatch", "subsampling": "iid"}  # fmt: skip
    kernels = {
        "SGLD, h = 0.004": SGLD(model, step_size=0.004, **given),
        "SGNHT, h = 0.13": SGNHT(model, friction=10.0, step_size=0.13, **given),
        "SGMGT, h = 0.13": SGMGT(model, sigma_p=10.0, step_size=0.13, **given),
        "SGNHT, h = 0.2": SGNHT(model, friction=10.0, step_size=0.2, **given),
        "SGMGT, h = 0.2": SGMGT(model, sigma_p=10.0, step_size=0.2, **given),
    }
    wells = find_wells()
    runs = {name: run(kernel, wells, options.steps) for name, kernel in kernels.items()}
    print(f"{CHAINS} chains, {options.steps:,} gradients each\n")
    print("sampler          crossings in 1,000 steps  still at home  total variation")
    for name, draws in runs.items():
        crossed = crossings(draws, wells)[:, -1]
        rate = crossed * 1000 / options.steps
        cell = f"{rate.mean():.2f} ± {rate.std() / np.sqrt(CHAINS):.2f}"
        print(f"{name:<17}{cell:>24}{(crossed == 0).mean():>15.0%}{distance(draws, wells):>17.3f}")
    animate(dict(list(runs.items())[:3]), wells, options.output)


if __name__ == "__main__":
    main()
