"""Measure the cost of a step of every kernel and integrator relative to its gradient.

As ``step_cost.py``, for all kernels: microseconds a step over those of the bare gradient loop, on
the logistic regression with iid random rows, minibatch gradients and control variates.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import jit, lax, random
from logistic_regression import BATCH_SIZE, DIM, logistic, make_data
from step_cost import NUM_STEPS, bare_loop
from timing import interleaved, print_header, print_row

from numpyro_sgmcmc import (
    SGHMC,
    SGLD,
    SGMGT,
    SGNHT,
    SGRHMC,
    SGRLD,
    SHMC,
    RecipeKernel,
    SGHMCSplit,
    SGLaplaceHMC,
)
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS

WIDTHS = (24, 12, 11, 17)

METRICS = {
    "scalar": lambda z: 1.0 + 0.1 * jnp.tanh(z["beta"].sum()),
    "diagonal": lambda z: 1.0 + 0.1 * jnp.tanh(z["beta"]),
    "dense": lambda z: jnp.eye(DIM) + 0.01 * jnp.outer(jnp.sin(z["beta"]), jnp.sin(z["beta"])),
}

RECIPE = {
    "diffusion": lambda z: jnp.repeat(jnp.array([0.0, 1.5]), z.size // 2),
    "curl": lambda z: jnp.kron(jnp.array([[0.0, -1.0], [1.0, 0.0]]), jnp.eye(z.size // 2)),
    "hamiltonian": lambda z: jnp.square(z[z.size // 2 :]).sum() / 2,
    "auxiliary": lambda key, dim: random.normal(key, (dim,)),
}


def variants() -> Iterator[tuple[str, str, type, dict[str, Any]]]:
    """Kernel, integrator, class and settings of each row."""
    for kernel in (SGHMCSplit, SGHMC, SGLD, SHMC):
        for integrator in kernel.integrators:
            yield kernel.__name__, integrator, kernel, {"integrator": integrator}
    yield "SGHMCSplit, compensated", "symmetric", SGHMCSplit, {"noise_compensation": True}
    for integrator in SGNHT.integrators:
        yield "SGNHT", integrator, SGNHT, {"integrator": integrator}
        yield (
            "SGNHT, shared",
            integrator,
            SGNHT,
            {"integrator": integrator, "per_coordinate": False},
        )
    for integrator in SGMGT.integrators:
        for a in (0.5, 1.0, 2.0):
            yield f"SGMGT, a = {a:g}", integrator, SGMGT, {"integrator": integrator, "a": a}
    yield "SGMGT, a = 1, D", "symmetric", SGMGT, {"sigma_theta": 0.1, "sigma_xi": 0.1}
    for integrator in SGLaplaceHMC.integrators:
        yield "SGLaplaceHMC", integrator, SGLaplaceHMC, {"integrator": integrator}
    for kernel in (SGRLD, SGRHMC):
        for integrator in kernel.integrators:
            yield f"{kernel.__name__}, potential", integrator, kernel, {"integrator": integrator}
            for name, metric in METRICS.items():
                settings = {"integrator": integrator, "inverse_metric": metric}
                yield f"{kernel.__name__}, {name}", integrator, kernel, settings
    yield "RecipeKernel", "euler", RecipeKernel, RECIPE


def loops_of(
    kernel_class: type, settings: dict[str, Any], data: Any, num_iterations: int
) -> dict[str, Callable[[], Any]]:
    """Compiled loops of the kernel's iterations, ten steps each, for both estimators."""
    dim, batch = data[0].shape[1], {"batch_size": BATCH_SIZE}
    kernel = kernel_class(
        logistic,
        num_steps=NUM_STEPS,
        step_size=0.01,
        subsampling="iid",
        inverse_mass_matrix=4.0 / len(data[1]) * np.eye(dim, dtype=np.float32),
        **settings,
    )
    state = kernel.init(random.key(1), 0, None, data, batch)

    def loop(estimator: str) -> Callable[[], Any]:
        chosen = kernel.adaptation._replace(estimator=GRADIENT_ESTIMATORS[estimator])
        variant = kernel.copy_with(adaptation=chosen)  # adapted once for both

        def iterate(_: int, state: Any) -> Any:
            return variant.sample(state, data, batch)

        compiled = jit(lambda state: lax.fori_loop(0, num_iterations, iterate, state))
        return lambda: compiled(state)

    return {estimator: loop(estimator) for estimator in ("minibatch", "control_variate")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-rows", type=float, default=1e5)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--only", default="", help="kernels whose name begins with this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    data = make_data(random.key(0), int(args.num_rows), DIM)
    rows = f"N = {int(args.num_rows):,}, B = {BATCH_SIZE}"
    print_header(f"Every kernel's step over the bare loop's, {rows}")
    print_row(["kernel", "integrator", "minibatch", "control variates"], WIDTHS)
    for name, integrator, kernel_class, settings in variants():
        if not name.startswith(args.only):
            continue
        bare = {"bare": lambda: bare_loop(random.key(0), *data, args.iterations, 1)}
        loops = loops_of(kernel_class, settings, data, args.iterations)
        times = interleaved({**bare, **loops}, args.repeats)
        base = times.pop("bare")
        print_row(
            [name, integrator, *(f"{np.median(t / base):.2f}" for t in times.values())], WIDTHS
        )


if __name__ == "__main__":
    main()
