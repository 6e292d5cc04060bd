"""Multinomial regressions with thousands of weights, compared with exact-gradient HMC.

``python benchmarks/multinomial.py`` runs ``SGHMCSplit`` on images of Fashion-MNIST, pixels from 0
to 1 and weights with a prior precision of 10: 20,000 images of 14 x 14 pixels with 1,970 weights,
and all 60,000 of 28 x 28 with 7,850. Their only argument is the minibatch size, with 7,850 weights
also ``target_sd_bias=0.25``: the noisiest direction of the preconditioned coordinates allows no
longer steps otherwise, though SDs of weights are hardly biased. Each case runs in a separate
process, the second one for more than an hour on two cores.

*full gradients* are those per effective draw of the weight with the smallest ESS, in sampling: a
step counts the rows that it reads once with minibatch gradients, twice with control variates and
three times with those of second order, which multiply the rows with three vectors and back.
*means off* and *SDs off* are the largest errors over all weights, in posterior SDs and percent.

``--reference`` makes the references anew: HMC with all rows and Metropolis steps in float64, in
coordinates of the inverse root of the Hessian at the mode. It takes a minute on an H100, and hours
on two cores. ``--folder`` is where the files of Fashion-MNIST are, by default as for
``papers/networks.py``.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC
from timing import print_header, print_row

sys.path.insert(0, str(Path(__file__).parent / "papers"))
import networks_data

from numpyro_sgmcmc import SGHMCSplit, bias_report

_FOLDER = Path(__file__).parent / "multinomial_references"
_NUM_CLASSES, _PRIOR_PRECISION = 10, 10.0
_NUM_NEWTON_STEPS = 10
# Exact-gradient HMC: its step size and the numbers of steps, drawn anew for each trajectory.
_HMC_STEP_SIZE, _MIN_LEAPFROG, _MAX_LEAPFROG = 0.2, 5, 9
_HMC_CHAINS, _HMC_WARMUP, _HMC_DRAWS = 16, 100, 1_000
_ROWS_READ = {"minibatch": 1, "control_variate": 2, "second_order_control_variate": 3}
_COLUMNS = {
    "weights": 8,
    "rows": 7,
    "B": 5,
    "estimator": 29,
    "steps": 6,
    "warm-up s": 10,
    "ms a draw": 10,
    "GB": 5,
    "ESS": 6,
    "draws": 6,
    "full gradients": 15,
    "R-hat": 6,
    "means off": 10,
    "SDs off": 14,
    "report": 13,
}


class Case(NamedTuple):
    """
    - **width** - of the images in pixels, 28 or the mean of 2 x 2 of them.
    - **num_samples** - draws of each of four chains, after **num_warmup** iterations of warm-up.
    """

    num_rows: int
    width: int
    batch_size: int
    num_samples: int
    num_warmup: int = 100
    target_sd_bias: float = 0.05

    @property
    def num_weights(self) -> int:
        return (self.width**2 + 1) * _NUM_CLASSES


CASES = (Case(20_000, 14, 200, 1_500), Case(60_000, 28, 600, 500, 10, 0.25))


def load(case: Case, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels with a column of ones, shape ``(rows, width**2 + 1)``, and classes."""
    folder = folder or networks_data._folder()
    x, y = (networks_data.read(folder / name)[: case.num_rows] for name in networks_data.FILES[:2])
    fold = 28 // case.width
    x = x.reshape(-1, case.width, fold, case.width, fold).mean((2, 4)) / 255.0
    x = np.concatenate([np.ones((len(x), 1)), x.reshape(len(x), -1)], 1)
    return x.astype(np.float32), y.astype(np.int32)


def model(x: Array, y: Array, batch_size: int | None = None) -> None:
    """Multinomial regression."""
    prior = dist.Normal(0.0, _PRIOR_PRECISION**-0.5)
    weights = numpyro.sample("weights", prior.expand([x.shape[1], _NUM_CLASSES]).to_event(2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Categorical(logits=x[i] @ weights), obs=y[i])


def potential(flat: Array, x: Array, y: Array) -> Array:
    """Negative log posterior density, without NumPyro."""
    logits = x @ flat.reshape(-1, _NUM_CLASSES)
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).sum()
    return _PRIOR_PRECISION / 2.0 * jnp.square(flat).sum() - log_likelihood


@jax.jit
def hessian(flat: Array, x: Array) -> Array:
    """Hessian of the potential, one pair of classes after the other."""
    p = jax.nn.softmax(x @ flat.reshape(-1, _NUM_CLASSES))

    def block(pair: Array) -> Array:
        a, b = pair
        return x.T @ (x * (p[:, a] * ((a == b) - p[:, b]))[:, None])

    pairs = jnp.stack(jnp.meshgrid(*[jnp.arange(_NUM_CLASSES)] * 2, indexing="ij"), -1)
    blocks = lax.map(lambda row: lax.map(block, row), pairs)
    matrix = blocks.transpose(2, 0, 3, 1).reshape(flat.size, flat.size)
    return matrix + _PRIOR_PRECISION * jnp.eye(flat.size)


@jax.jit
def newton_step(flat: Array, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return the position after a step of Newton's method, its length and the Cholesky factor."""
    cholesky = jnp.linalg.cholesky(hessian(flat, x))
    gradient = jax.grad(potential)(flat, x, y)
    step = jax.scipy.linalg.cho_solve((cholesky, True), gradient)
    # The first steps overshoot: their length in the metric of the Hessian is bounded.
    decrement = jnp.sqrt(gradient @ step)
    return flat - step / (1.0 + 0.1 * decrement / jnp.sqrt(flat.size)), decrement, cholesky


@jax.jit
def run_hmc(key: Array, center: Array, root: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Return draws of one chain after its warm-up, shape ``(draws, d)``, and acceptances."""

    def value(q: Array) -> Array:
        return potential(center + root @ q, x, y)

    value_and_gradient = jax.value_and_grad(value)

    def iterate(carry: Any, key: Array) -> tuple[Any, tuple[Array, Array]]:
        q, u, g = carry
        momentum_key, length_key, accept_key = random.split(key, 3)
        p = random.normal(momentum_key, q.shape, q.dtype)
        num = random.randint(length_key, (), _MIN_LEAPFROG, _MAX_LEAPFROG + 1)

        def leapfrog(k: Array, state: Any) -> Any:
            q, p, u, g = state
            # All chains take the longest trajectory, so that they run together.
            h = jnp.where(k < num, _HMC_STEP_SIZE, 0.0)
            p = p - h / 2.0 * g
            q = q + h * p
            u, g = value_and_gradient(q)
            return q, p - h / 2.0 * g, u, g

        q1, p1, u1, g1 = lax.fori_loop(0, _MAX_LEAPFROG, leapfrog, (q, p, u, g))
        change = u1 - u + (p1 @ p1 - p @ p) / 2.0
        accepted = jnp.log(random.uniform(accept_key, dtype=q.dtype)) < -change
        carry = jax.tree.map(partial(jnp.where, accepted), (q1, u1, g1), (q, u, g))
        return carry, (carry[0], accepted)

    start = random.normal(key, center.shape, center.dtype)
    carry = start, *value_and_gradient(start)
    carry, _ = lax.scan(iterate, carry, random.split(random.fold_in(key, 1), _HMC_WARMUP))
    _, (q, accepted) = lax.scan(iterate, carry, random.split(random.fold_in(key, 2), _HMC_DRAWS))
    return center + q @ root.T, accepted.mean()


def make_reference(case: Case, folder: Path | None, out: Path) -> None:
    """Store means and SDs of the posterior, and the smallest ESS and largest R-hat of their run."""
    jax.config.update("jax_enable_x64", True)
    x, y = (jnp.asarray(a) for a in load(case, folder))
    x, flat, start = x.astype(float), jnp.zeros(case.num_weights), time.perf_counter()
    for _ in range(_NUM_NEWTON_STEPS):
        flat, decrement, cholesky = newton_step(flat, x, y)
        print(f"Newton decrement {decrement:.2e}", flush=True)
    inverse = jax.scipy.linalg.solve_triangular(cholesky, jnp.eye(flat.size), lower=True)
    keys = random.split(random.key(0), _HMC_CHAINS)
    run = jax.jit(jax.vmap(run_hmc, (0, None, None, None, None)))
    draws, accepted = run(keys, flat, inverse.T, x, y)
    draws = np.asarray(draws)
    ess, r_hat = effective_sample_size(draws), split_gelman_rubin(draws)
    print(
        f"{case.num_weights} weights: {time.perf_counter() - start:.0f} s, acceptance "
        f"{float(accepted.mean()):.2f}, smallest ESS {ess.min():.0f}, R-hat {r_hat.max():.4f}"
    )
    np.savez_compressed(
        out / f"{case.num_weights}.npz",
        mean=draws.mean((0, 1)).astype(np.float32),
        sd=draws.std((0, 1)).astype(np.float32),
        ess=ess.min(),
        r_hat=r_hat.max(),
    )


def run(case: Case, folder: Path | None) -> dict[str, Any]:
    """Run a case and return the cells of its row, and the library's warnings."""
    data = tuple(jnp.asarray(a) for a in load(case, folder))
    mcmc = MCMC(
        SGHMCSplit(model, target_sd_bias=case.target_sd_bias),
        num_warmup=case.num_warmup,
        num_samples=case.num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    times = [time.perf_counter()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.warmup(random.key(0), *data, batch_size=case.batch_size)
        times.append(time.perf_counter())
        mcmc.run(random.key(1), *data, batch_size=case.batch_size)
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["weights"], float)
        times.append(time.perf_counter())
        report = bias_report(mcmc)
    draws = draws.reshape(*draws.shape[:2], -1)
    ess, r_hat = effective_sample_size(draws), split_gelman_rubin(draws)
    num_draws = draws.shape[0] * draws.shape[1]
    name, num_steps = mcmc.sampler.adaptation.estimator.name, int(np.max(mcmc.last_state.num_steps))
    rows_read = _ROWS_READ[name] * num_steps * case.batch_size * num_draws
    reference = np.load(_FOLDER / f"{case.num_weights}.npz")
    off = (draws.mean((0, 1)) - reference["mean"]) / reference["sd"]
    ratio = draws.std((0, 1)) / reference["sd"] - 1.0
    on_device = jax.devices()[0].memory_stats() or {}  # none for a CPU
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (site,) = report.sites
    cells = {
        "weights": f"{case.num_weights:,}",
        "rows": f"{case.num_rows:,}",
        "B": case.batch_size,
        "estimator": name,
        "steps": num_steps,
        "warm-up s": f"{times[1] - times[0]:.0f}",
        "ms a draw": f"{1e3 * (times[2] - times[1]) / num_draws:.1f}",
        "GB": f"{on_device.get('peak_bytes_in_use', peak) / 1e9:.1f}",
        "ESS": f"{ess.min():.0f}",
        "draws": num_draws,
        "full gradients": f"{rows_read / case.num_rows / ess.min():.2f}",
        "R-hat": f"{r_hat.max():.3f}",
        "means off": f"{np.abs(off).max():.3f}",
        "SDs off": f"{100 * ratio.min():+.1f} to {100 * ratio.max():+.1f}%",
        "report": str(site.diagnosis),
    }
    notes = [f"{w.category.__name__}: {str(w.message)[:100]}" for w in caught]
    notes.append(f"smallest ESS of the reference: {float(reference['ess']):,.0f}")
    return {"cells": cells, "notes": notes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--weights", type=int, nargs="+", help="cases, by their numbers of weights")
    parser.add_argument("--num-samples", type=int, help="draws of each chain")
    parser.add_argument("--reference", action="store_true", help="make the references anew")
    parser.add_argument("--folder", type=Path, help="of the files of Fashion-MNIST")
    parser.add_argument("--out", type=Path, default=_FOLDER, help="folder of new references")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(Case(*json.loads(options.run)), options.folder)))
        return
    cases = [c for c in CASES if not options.weights or c.num_weights in options.weights]
    if options.reference:
        options.out.mkdir(exist_ok=True)
        for case in cases:
            make_reference(case, options.folder, options.out)
        return
    print_header("Multinomial regressions with thousands of weights")
    print_row(_COLUMNS, _COLUMNS.values())
    for case in cases:
        case = case._replace(num_samples=options.num_samples or case.num_samples)
        command = [sys.executable, __file__, "--run", json.dumps(case)]
        command += ["--folder", str(options.folder)] if options.folder else []
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        found = json.loads(out.stdout.splitlines()[-1])
        print_row([found["cells"][c] for c in _COLUMNS], _COLUMNS.values())
        print("\n".join(f"    {note}" for note in found["notes"]), flush=True)


if __name__ == "__main__":
    main()
