"""Measure the cost of a step of a model with a discrete site, by CPU seconds.

The ratio is the CPU time of an evaluation of the minibatch gradient of a normal mixture with K
components, to that of the same regression without the site. The target is K + 20%: a row is
evaluated in each of its states.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import make_model_potential

NUM_ROWS, DIM = 20_000, 20


def make_model(num_states: int) -> Any:
    """A regression of which the noise has ``num_states`` components; without a site for 0."""

    def model(x: Any, y: Any, batch_size: int) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM]).to_event(1))
        shifts = numpyro.sample("m", dist.Normal(0, 1).expand([max(num_states, 1)]).to_event(1))
        with numpyro.plate("rows", NUM_ROWS, subsample_size=batch_size) as i:
            shift = shifts[0]
            if num_states:
                probs = jnp.full(num_states, 1 / num_states)
                states = dist.Categorical(probs)
                shift = shifts[numpyro.sample("z", states, infer={"enumerate": "parallel"})]
            numpyro.sample("y", dist.StudentT(4.0, x[i] @ beta + shift, 1.0), obs=y[i])

    return model


def measure(num_states: int, batch_size: int, num_steps: int, repeats: int) -> float:
    """Return the smallest CPU time of a gradient, in seconds."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(NUM_ROWS, DIM)), jnp.float32)
    y = jnp.asarray(rng.normal(size=NUM_ROWS), jnp.float32)
    arguments = Arguments((x, y, batch_size))
    potential = make_model_potential(make_model(num_states), arguments, init_to_uniform)

    @jax.jit
    def loop(q: Any) -> Any:
        def step(q: Any, start: Any) -> tuple[Any, None]:
            indices = {"rows": (start * batch_size + jnp.arange(batch_size)) % NUM_ROWS}
            return q - 1e-9 * potential.gradient(q, indices, arguments), None

        return lax.scan(step, q, jnp.arange(num_steps))[0]

    q = jnp.linspace(-0.1, 0.1, potential.dim)
    loop(q).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        loop(q).block_until_ready()
        times.append((time.process_time() - start) / num_steps)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=1_000)
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    base = measure(0, args.batch_size, args.num_steps, args.repeats)
    print(f"without the site: {base * 1e6:.0f} µs of CPU time per gradient")
    for num_states in (2, 3, 5, 10):
        seconds = measure(num_states, args.batch_size, args.num_steps, args.repeats)
        print(f"{num_states} states: {seconds * 1e6:.0f} µs, {seconds / base:.2f} times")


if __name__ == "__main__":
    main()
