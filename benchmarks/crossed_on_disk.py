"""Crossed effects of users and items with rows on disk, compared with the exact posterior.

``python benchmarks/crossed_on_disk.py`` writes 10 million rows of 100,000 users and 20,000 items to
a temporary folder, and runs ``SGHMCSplit`` with no arguments but the minibatch size in a separate
process, whose largest resident memory is shown.

The rows are normal, so that effects and coefficients are normal given the three scales. The
reference takes one Newton step from the posterior means of the scales, with the gradient of their
marginal by Fisher's identity and its Hessian by Louis' identity, from exact draws of the effects
given the scales. Means and coefficients' SDs given the scales are solutions by conjugate gradients.

*off* is the error of the mean in posterior SDs, the scales as logarithms, *SD* the error of the SD.
*effects* are the root mean square of the errors of 1,000 users' means, in posterior SDs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC
from scipy import sparse
from timing import print_header, print_row

from numpyro_sgmcmc import HostArray, SGHMCSplit, bias_report, running_moments

_COLUMNS = {"user": np.int32, "item": np.int32, "x": np.float32, "y": np.float32}
_CHUNK = 1_000_000  # rows that are written at a time
_SCALES = {"user_scale": 0.5, "item_scale": 0.3, "sigma": 1.2}  # of the data
_NUM_DRAWS = 250  # of each of four chains
_NUM_REFERENCE_DRAWS = 100
_NUM_COMPARED_USERS = 1_000
_CG_TOLERANCE, _MAX_CG_ITERATIONS = 1e-6, 500  # relative residual


class Size(NamedTuple):
    num_users: int
    num_items: int
    num_rows: int
    batch_size: int


def write_rows(folder: Path, size: Size) -> None:
    """Write a file for each column; items have a power law of popularity."""
    rng = np.random.default_rng(3)
    user_effect = _SCALES["user_scale"] * rng.standard_normal(size.num_users)
    item_effect = _SCALES["item_scale"] * rng.standard_normal(size.num_items)
    weights = 1.0 / (np.arange(size.num_items) + size.num_items / 20.0)
    files = {name: (folder / name).open("wb") for name in _COLUMNS}
    for start in range(0, size.num_rows, _CHUNK):
        num_rows = min(_CHUNK, size.num_rows - start)
        user = rng.integers(0, size.num_users, num_rows)
        item = rng.choice(size.num_items, num_rows, p=weights / weights.sum())
        x = rng.standard_normal(num_rows)
        eta = 0.3 + 0.2 * x + user_effect[user] + item_effect[item]
        y = eta + _SCALES["sigma"] * rng.standard_normal(num_rows)
        for (name, file), values in zip(files.items(), (user, item, x, y), strict=True):
            values.astype(_COLUMNS[name]).tofile(file)
    for file in files.values():
        file.close()


def open_rows(folder: Path) -> list[np.memmap]:
    return [np.memmap(folder / name, dtype, "r") for name, dtype in _COLUMNS.items()]


def make_model(size: Size) -> Callable:
    def model(user: Any, item: Any, x: Any, y: Any, batch_size: int | None = None) -> None:
        coefficients = numpyro.sample("coefficients", dist.Normal(0, 2).expand([2]).to_event(1))
        scales = {name: numpyro.sample(name, dist.HalfNormal(1)) for name in _SCALES}
        with numpyro.plate("users", size.num_users):
            user_effect = numpyro.sample("user_effect", dist.Normal(0, scales["user_scale"]))
        with numpyro.plate("items", size.num_items):
            item_effect = numpyro.sample("item_effect", dist.Normal(0, scales["item_scale"]))
        with numpyro.plate("rows", size.num_rows, subsample_size=batch_size) as i:
            eta = coefficients[0] + coefficients[1] * x[i]
            eta = eta + user_effect[user[i]] + item_effect[item[i]]
            numpyro.sample("y", dist.Normal(eta, scales["sigma"]), obs=y[i])

    return model


def run(folder: Path, size: Size) -> dict[str, Any]:
    """Run the sampler and return moments of its draws and what it took."""
    columns = [HostArray(x, name=n) for n, x in zip(_COLUMNS, open_rows(folder), strict=True)]
    names = ["coefficients", *_SCALES]
    mcmc = MCMC(
        SGHMCSplit(make_model(size), collect_sites=names),
        num_warmup=_NUM_DRAWS // 4,
        num_samples=_NUM_DRAWS,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    mcmc.warmup(jax.random.key(0), *columns, batch_size=size.batch_size)
    warmup = time.perf_counter() - wall
    mcmc.run(jax.random.key(1), *columns, batch_size=size.batch_size)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    report = bias_report(mcmc)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    z = [np.asarray(draws[n], np.float64) for n in names]
    z = [z[0], *(np.log(x)[..., None] for x in z[1:])]
    z = np.concatenate(z, -1)
    moments = running_moments(mcmc)
    return {
        "warm-up s": f"{warmup:.0f}",
        "wall s": f"{wall:.0f}",
        "CPU s": f"{cpu:.0f}",
        "GiB": f"{peak:.1f}",
        "steps": int(np.max(np.asarray(mcmc.last_state.num_steps))),
        "ESS": f"{effective_sample_size(z).min():.0f}",
        "R-hat": f"{split_gelman_rubin(z).max():.3f}",
        "report": ", ".join(sorted({str(s.diagnosis) for s in report.sites})),
        "mean": z.mean((0, 1)).tolist(),
        "sd": z.std((0, 1)).tolist(),
        "effects": np.asarray(moments.mean["user_effect"])[:_NUM_COMPARED_USERS].tolist(),
    }


class NormalGivenScales:
    """Coefficients and effects, which are normal given the scales.

    :param scales: of users, items and rows.
    """

    def __init__(self, folder: Path, size: Size, scales: np.ndarray) -> None:
        user, item, x, y = open_rows(folder)
        self.scales, self.num_users = scales, size.num_users
        ones = np.ones(size.num_rows)
        rows = np.arange(size.num_rows, dtype=np.int32)
        columns = [sparse.csr_matrix(np.stack([ones, x], 1))]
        for group, num_groups in ((user, size.num_users), (item, size.num_items)):
            columns.append(sparse.csr_matrix((ones, (rows, group)), (size.num_rows, num_groups)))
        self.design, self.y = sparse.hstack(columns).tocsr(), np.asarray(y, np.float64)
        deviations = np.repeat([2.0, *scales[:2]], [2, size.num_users, size.num_items])
        self.prior_precisions = deviations**-2
        gram = (self.design.T @ self.design).tocsr() / scales[2] ** 2
        self.precision = (gram + sparse.diags(self.prior_precisions)).tocsr()

    def solve(self, right: np.ndarray) -> np.ndarray:
        diagonal = self.precision.diagonal()
        solution, status = sparse.linalg.cg(
            self.precision,
            right,
            rtol=_CG_TOLERANCE,
            maxiter=_MAX_CG_ITERATIONS,
            M=sparse.diags(1.0 / diagonal),
        )
        assert status == 0
        return np.asarray(solution)

    def compute_mean(self) -> np.ndarray:
        return self.solve(self.design.T @ self.y / self.scales[2] ** 2)

    def compute_coefficient_sds(self) -> np.ndarray:
        units = np.eye(2, self.precision.shape[0])
        return np.sqrt([self.solve(unit)[k] for k, unit in enumerate(units)])

    def sample(self, mean: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return an exact draw, by the solution for random rows and a random prior."""
        right = self.design.T @ rng.standard_normal(self.y.size) / self.scales[2]
        right += np.sqrt(self.prior_precisions) * rng.standard_normal(mean.size)
        return mean + self.solve(right)

    def compute_complete_score(self, draw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return gradient and negative second derivatives by the logarithms of the scales."""
        users, items = np.split(draw[2:], [self.num_users])
        residuals = self.y - self.design @ draw
        squares = np.array([np.sum(v**2) for v in (users, items, residuals)]) / self.scales**2
        counts = np.array([users.size, items.size, residuals.size])
        return squares - counts + 1.0 - self.scales**2, 2.0 * (squares + self.scales**2)


def compute_reference(folder: Path, size: Size, log_scales: np.ndarray) -> dict[str, np.ndarray]:
    """Return means and SDs of coefficients and logarithms of scales, and means of users' effects.

    :param log_scales: near their posterior means.
    """
    normal = NormalGivenScales(folder, size, np.exp(log_scales))
    mean, rng = normal.compute_mean(), np.random.default_rng(0)
    scores, curvatures = zip(
        *(
            normal.compute_complete_score(normal.sample(mean, rng))
            for _ in range(_NUM_REFERENCE_DRAWS)
        ),
        strict=True,
    )
    information = np.diag(np.mean(curvatures, 0)) - np.cov(np.array(scores).T)
    covariance = np.linalg.inv(information)
    step = covariance @ np.mean(scores, 0)
    error = covariance @ np.std(scores, 0) / np.sqrt(_NUM_REFERENCE_DRAWS)
    scale_sd = np.sqrt(np.diagonal(covariance))
    print(f"error of the reference: {np.abs(error / scale_sd).max():.3f} posterior SDs", flush=True)
    return {
        "mean": np.concatenate([mean[:2], log_scales + step]),
        "sd": np.concatenate([normal.compute_coefficient_sds(), scale_sd]),
        "effects": mean[2 : 2 + _NUM_COMPARED_USERS],
        "effect_sd": np.sqrt(1.0 / normal.precision.diagonal()[2 : 2 + _NUM_COMPARED_USERS]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", nargs=4, type=int, default=(100_000, 20_000, 10_000_000, 20_000))
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = Size(*options.size)
    if options.run is not None:
        print(json.dumps(run(options.run, size)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder), size)
        command = [sys.executable, __file__, "--run", folder, "--size", *map(str, size)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        mean, sd = np.array(found.pop("mean")), np.array(found.pop("sd"))
        effects = np.array(found.pop("effects"))
        print(found, flush=True)
        reference = compute_reference(Path(folder), size, mean[2:])
    off = (mean - reference["mean"]) / reference["sd"]
    ratios = sd / reference["sd"] - 1.0
    effects_off = (effects - reference["effects"]) / reference["effect_sd"]
    cells = {
        "users": f"{size.num_users:,}",
        "items": f"{size.num_items:,}",
        "rows": f"{size.num_rows:,}",
        "B": f"{size.batch_size:,}",
        **found,
        "means off": f"{np.abs(off).max():.2f}",
        "SDs off": f"{100 * ratios.min():+.0f} to {100 * ratios.max():+.0f}%",
        "effects": f"{np.sqrt(np.mean(effects_off**2)):.2f}",
    }
    widths = [max(len(str(x)), len(name)) + 2 for name, x in cells.items()]
    print_header("Crossed effects, rows on disk")
    print_row(list(cells), widths)
    print_row(list(cells.values()), widths)
    names = ["intercept", "slope", *_SCALES]
    print(
        {
            name: f"{a:+.2f} SD, SD {100 * b:+.0f}%"
            for name, a, b in zip(names, off, ratios, strict=True)
        }
    )


if __name__ == "__main__":
    main()
