"""Checks that need four devices: ``python -m tests.devices.checks NAME...``.

The process prints the outcome of each check as JSON: an empty string, or a traceback.
"""

import json
import sys
import time
import traceback

import jax

from tests.devices import invalid_shards, on_hosts, parallel, sharded

CHECKS = {
    name: fn
    for module in (sharded, on_hosts, invalid_shards, parallel)
    for name, fn in vars(module).items()
    if name.startswith("check_")
}
SLOW = {
    "check_blocks_of_rows_are_prefetched_on_a_separate_thread",
    "check_potential_of_uneven_rows_on_hosts_has_the_values_of_rows_on_devices",
    "check_another_mode_is_reported",
    "check_run_of_a_hierarchy_on_shards_has_block_arrow_coordinates",
    "check_passes_over_uneven_shards_give_the_values_of_one_device",
    "check_gradient_on_uneven_shards_uses_one_all_reduce",
    "check_posterior_of_sharded_rows_is_exact",
    "check_passes_over_even_shards_give_the_values_of_one_device",
    "check_gradient_on_even_shards_uses_one_all_reduce",
    "check_chains_along_a_second_axis_are_the_same_chains",
    "check_numpyro_functions_accept_a_sharded_run",
    "check_rows_on_hosts_have_the_draws_of_rows_on_devices",
    "check_rows_on_hosts_with_a_chain_axis_have_the_draws_of_rows_on_devices",
    "check_failing_source_raises_on_all_devices",
    "check_posterior_of_rows_on_hosts_is_exact",
    "check_parallel_chains_of_rows_on_the_host_have_the_draws_of_rows_in_memory",
    "check_parallel_chains_with_gibbs_have_the_exact_posterior",
    "check_parallel_chains_after_a_kill_resume_bitwise",
}

if __name__ == "__main__":
    # Devices that are threads deadlock where each has begun another program.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    outcomes = {}
    for name in sys.argv[1:] or CHECKS:
        start = time.perf_counter()
        try:
            CHECKS[name]()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        print(f"{time.perf_counter() - start:5.1f} s {name}", file=sys.stderr, flush=True)
    print(json.dumps(outcomes))
