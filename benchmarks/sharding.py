"""Sharded rows: the cost of a step on this machine, and the predicted cost on many hosts.

Every row of the first table is a separate process (or two, connected over loopback) with several
host devices. These share the cores of this machine, so that no further speed-up is possible. Times
are of the kernel's iterations, with four chains. Then the constants of the cost model

    T(H) = T_0 + t_row B / H + t_sum(H),    t_sum(H) = 2 log2(H) latency + 2 bytes / bandwidth

are estimated: T_0 and t_row by a line through the times of steps at several minibatch sizes on one
device, t_sum by a loop of sums alone. The model is printed for a network of given latency and
bandwidth, with the minibatch size at which the sum takes a tenth of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = (24, 8, 10, 12, 14)
CHAINS, NUM_STEPS, ITERATIONS = 4, 20, 25
BATCHES = (100, 400, 1_600, 6_400)


def worker(args: argparse.Namespace) -> None:
    """Steps and sums of one process among some, timed; the first prints them."""
    import jax

    # Devices that are threads wait for each other for ever where each has begun another program.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    import jax.numpy as jnp
    from jax import lax, random
    from jax.sharding import PartitionSpec
    from logistic_regression import DIM, logistic, make_data
    from timing import interleaved

    from numpyro_sgmcmc import SGHMCSplit, ShardedArray

    def seconds(run: Any) -> float:
        return float(np.median(interleaved({"": run}, args.repeats)[""]))

    X, y = (np.asarray(a) for a in make_data(random.key(0), args.num_rows, DIM))
    own = slice(*(args.num_rows * (args.process + k) // args.processes for k in (0, 1)))
    data: tuple = (X, y)
    if args.devices:
        data = tuple(ShardedArray(a[own]) for a in data)
    found: dict[str, Any] = {"steps": {}}
    for batch_size in args.batches:
        kernel = SGHMCSplit(
            logistic, step_size=0.3, num_steps=NUM_STEPS, gradient_estimator="control_variate"
        )
        keywords = {"batch_size": batch_size}
        state = kernel.init(random.split(random.key(1), CHAINS), 0, None, data, keywords)

        @jax.jit
        def loop(s: Any, kernel: Any = kernel, keywords: Any = keywords) -> Any:
            one = lambda s, _: (kernel.sample(s, data, keywords), None)  # noqa: E731
            return lax.scan(one, s, None, ITERATIONS)[0]

        found["steps"][batch_size] = seconds(lambda s=state, f=loop: f(s).z) / (
            NUM_STEPS * ITERATIONS
        )
    if args.devices:
        mesh = data[0].shards.mesh
        num = NUM_STEPS * ITERATIONS

        @jax.jit
        @jax.shard_map(
            mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        def sums(g: Any) -> Any:
            return lax.scan(lambda g, _: (0.25 * lax.psum(g, "rows"), None), g, None, num)[0]

        found["sum"] = seconds(lambda: sums(jnp.ones((CHAINS, DIM)))) / num
    if args.process == 0:
        print(json.dumps(found))


def measure(processes: int, devices: int, batches: tuple[int, ...], args: Any) -> dict[str, Any]:
    """Run the workers; ``devices`` per process, 0 for arrays that are not sharded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={max(devices, 1)}"
    running = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                *("--worker", "--process", str(process), "--processes", str(processes)),
                *("--devices", str(devices), "--port", str(port)),
                *("--num-rows", str(args.num_rows), "--repeats", str(args.repeats)),
                *("--batches", *map(str, batches)),
            ],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for process in range(processes)
    ]
    outputs = [p.communicate()[0] for p in running]
    if any(p.returncode for p in running):
        raise RuntimeError(f"A worker failed: {processes} processes, {devices} devices each.")
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num-rows", type=int, default=400_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latency", type=float, default=20.0, help="µs, of a network's message")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="GB/s")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name in ("--process", "--processes", "--devices", "--port"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if args.worker:
        worker(args)
        return
    import results
    from logistic_regression import DIM
    from timing import print_header, print_row

    print_header(f"Rows sharded over devices; D = {DIM}, N = {args.num_rows:,}, {CHAINS} chains")
    print_row(["rows on", "B", "µs a step", "ratio", "a sum alone"], WIDTHS)
    bare: dict[str, float] = {}
    for name, processes, devices in (
        ("one device, not sharded", 1, 0),
        ("1 device", 1, 1),
        ("2 devices", 1, 2),
        ("4 devices", 1, 4),
        ("2 processes, 2 each", 2, 2),
    ):
        found = measure(processes, devices, BATCHES, args)
        bare = bare or found["steps"]
        for batch_size, seconds in found["steps"].items():
            alone = f"{1e6 * found['sum']:.1f} µs" if "sum" in found else ""
            ratio = seconds / bare[batch_size]
            print_row([name, batch_size, f"{1e6 * seconds:.1f}", f"{ratio:.2f}", alone], WIDTHS)

    sizes = np.array(list(bare), float)
    t_row, fixed = 1e6 * np.polyfit(sizes, np.array(list(bare.values())), 1)
    message = 4 * CHAINS * DIM
    print(
        f"\nOne device: a step takes {fixed:.1f} µs + {t_row:.4f} µs a row of the minibatch "
        f"({CHAINS} chains). The sum is of {message} bytes.\n"
        f"A network of {args.latency:g} µs and {args.bandwidth:g} GB/s, B = 10,000 and 100,000:\n"
    )
    widths = (6, 10, 14, 14, 24)
    results.begin("Predicted times on a network of hosts")
    head = ["hosts", "sum, µs", "B = 1e4, µs", "B = 1e5, µs", "B for a tenth of a step"]
    print_row(head, widths)
    for hosts in (1, 2, 4, 8, 16, 64):
        stages = np.log2(hosts)
        total = 2 * stages * args.latency + (hosts > 1) * 2e-3 * message / args.bandwidth
        steps = [f"{fixed + t_row * b / hosts + total:.0f}" for b in (1e4, 1e5)]
        hidden = max(0.0, hosts * (9 * total - fixed) / t_row)
        print_row([hosts, f"{total:.0f}", *steps, f"{hidden:,.0f}"], widths)


if __name__ == "__main__":
    main()
