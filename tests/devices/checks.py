"""What needs four devices: ``python -m tests.devices.checks NAME...`` in a process that has them.

It prints what each check ended with as JSON: nothing, or a traceback.
"""

import json
import sys
import time
import traceback

import jax

from tests.devices import on_hosts, parallel, refusals, sharded

CHECKS = {
    name: fn
    for module in (sharded, on_hosts, refusals, parallel)
    for name, fn in vars(module).items()
    if name.startswith("check_")
}
SLOW = {
    "check_another_mode_is_told",
    "check_passes_over_uneven_shards_are_those_of_one_device",
    "check_a_gradient_on_uneven_shards_takes_one_sum_and_no_exchange_of_rows",
    "check_the_posterior_is_that_of_all_rows",
    "check_passes_over_even_shards_are_those_of_one_device",
    "check_a_gradient_on_even_shards_takes_one_sum_and_no_exchange_of_rows",
    "check_chains_spread_over_a_second_axis_are_the_same_chains",
    "check_what_numpyro_does_with_a_run_works",
    "check_rows_on_hosts_give_the_draws_of_rows_on_devices",
    "check_rows_on_hosts_of_a_mesh_with_chains",
    "check_a_source_that_fails_is_told_by_all_devices",
    "check_the_posterior_of_rows_on_hosts_is_exact",
    "check_parallel_chains_of_rows_on_the_host",
    "check_parallel_chains_of_a_gibbs_sweep",
    "check_parallel_chains_that_are_killed_and_resumed",
}

if __name__ == "__main__":
    # Devices that are threads wait for each other for ever where each has begun another program.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    found = {}
    for name in sys.argv[1:] or CHECKS:
        start = time.perf_counter()
        try:
            CHECKS[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        print(f"{time.perf_counter() - start:5.1f} s {name}", file=sys.stderr, flush=True)
    print(json.dumps(found))
