"""Faults in serving on Ray that tests without a cluster notice; see also recurrent.py."""

from __future__ import annotations

from faults.fault import fault

_RESIDENCY = "tests/serve_ray/routing/test_residency.py"
_JOURNAL = "tests/serve_ray/routing/test_event_journal.py"
_STALL_DETECTION = "tests/serve_ray/watch/test_stall_detection.py"
_ROUTER = "tests/serve_ray/routing/test_router.py"
_COMPUTE = "tests/serve_ray/test_compute.py"
_METER = "tests/serve_ray/routing/test_load_meter.py"

FAULTS = (
    fault(
        "does not notice a missing batch of events",
        "serve_ray/routing/residency.py",
        "batch.serial != known.cursor.serial + 1:",
        "batch.serial < known.cursor.serial + 1:",
        f"{_RESIDENCY}::test_a_gap_in_events_is_detected_and_repaired",
    ),
    fault(
        "applies a batch of events that arrives late",
        "serve_ray/routing/residency.py",
        "elif batch.serial < known.cursor.serial or (",
        "elif (",
        f"{_RESIDENCY}::test_a_gap_in_events_is_detected_and_repaired",
    ),
    fault(
        "expires a renewed expectation at its old deadline",
        "serve_ray/routing/residency.py",
        (
            "                self._drop(\n"
            "                    slot,\n"
            "                    [\n"
            "                        key\n"
            "                        for key in (until if keys is None else keys)\n"
            "                        if until.get(key, _TOLD) <= now\n"
            "                    ],\n"
            "                )\n"
        ),
        "                self._drop(slot, [key for key in (until if keys is None else keys) if "
        "key in until])\n",
        f"{_RESIDENCY}::test_expected_blocks_are_renewed_and_expire",
    ),
    fault(
        "expects forever that a replica holds what it was sent",
        "serve_ray/routing/residency.py",
        "            self._hold(slot, new, at)\n",
        "            self._hold(slot, new, _TOLD)\n",
        f"{_RESIDENCY}::test_expected_blocks_are_renewed_and_expire",
    ),
    fault(
        "routes requests to a draining replica",
        "serve_ray/routing/replica_loads.py",
        "self.usable[slot] = not report.is_draining",
        "self.usable[slot] = True",
        f"{_ROUTER}::test_absent_and_draining_replicas_are_not_chosen",
    ),
    fault(
        "applies a load report that arrives late",
        "serve_ray/routing/replica_loads.py",
        "if report.serial <= self._serials[slot]:",
        "if report.serial == self._serials[slot]:",
        f"{_ROUTER}::test_routed_work_counts_until_reported_and_decays",
    ),
    fault(
        "dates new work of an idle replica back to when it became idle",
        "serve_ray/routing/replica_loads.py",
        "busy[slot] = max(busy[slot], now) + num_tokens",
        "busy[slot] = busy[slot] + num_tokens",
        f"{_ROUTER}::test_work_routed_to_an_idle_replica_counts_from_now",
    ),
    fault(
        "a fully cached prompt costs nothing",
        "serve_ray/routing/router.py",
        "most = chain.num_tokens - 1  #",
        "most = chain.num_tokens  #",
        f"{_ROUTER}::test_a_fully_cached_prompt_computes_its_last_token",
    ),
    fault(
        "does not prefer the replica that holds most among near equals",
        "serve_ray/routing/router.py",
        "near[held == held.max()]",
        "near",
        f"{_ROUTER}::test_the_replica_with_most_blocks_wins_among_nearly_equal_ones",
    ),
    fault(
        "equal cache keys of two tenants share a root",
        "serve_ray/routing/prompt_chain.py",
        'narrowed_root(root, "cache_key", prompt_cache_key)',
        'narrowed_root(b"", "cache_key", prompt_cache_key)',
        "tests/serve_ray/routing/test_prompt_chain.py::test_tenants_share_no_keys",
    ),
    fault(
        "measures a cancelled prompt as computed",
        "serve_ray/routing/load_meter.py",
        "            self._free_since = now  # The time of an incomplete prompt is not a measurement.\n",
        "",
        f"{_METER}::test_a_cancelled_prompt_is_not_measured",
    ),
    fault(
        "counts the queued tokens of a restarted request twice",
        "serve_ray/routing/load_meter.py",
        "        self._queued_tokens -= 0 if before is None else before[1]\n",
        "",
        f"{_METER}::test_queues_are_counted_for_any_sequence_of_events",
    ),
    fault(
        "counts weights in a shared file once per replica",
        "serve_ray/aggregation.py",
        "one.weights.get(name, one.replica)",
        "one.replica",
        "tests/serve_ray/test_aggregation.py::test_weights_that_replicas_share_count_once",
    ),
    fault(
        "counts blocks on a shared server once for each replica",
        "serve_ray/aggregation.py",
        "            summed[field] = _once_per_store(values)\n",
        "            summed[field] = sum(value for _, value in values)\n",
        "tests/serve_ray/test_aggregation.py::test_blocks_of_a_shared_server_are_counted_once",
    ),
    fault(
        "reports the readers of a directory as a problem",
        "serve_ray/aggregation.py",
        'if one["writable"] or store not in written',
        "if True",
        "tests/serve_ray/test_aggregation.py::test_a_directory_of_several_replicas_is_counted_once",
    ),
    fault(
        "assigns a replica CPUs of several machines",
        "serve_ray/cluster_cpus.py",
        "return sum(cpus // each for cpus in machines)",
        "return sum(machines) // each",
        "tests/serve_ray/test_cluster_cpus.py::test_a_replica_fits_on_one_machine",
    ),
    fault(
        "sends a request that was cancelled before it began",
        "serve_ray/in_flight.py",
        "            if self._is_cancelled:  # cancelled before this task began\n",
        "            if self._is_cancelled and self._has_begun:\n",
        "tests/serve_ray/test_in_flight.py::test_a_request_cancelled_before_its_start_is_never_sent",
    ),
    fault(
        "takes a slow engine for a stalled one",
        "serve_ray/watch/stall_detection.py",
        (
            "        if (\n"
            "            was_frozen\n"
            "            or not has_work\n"
            "            or figures != self._figures\n"
            "            or used > _CPU_SHARE * (now - self._since)\n"
            "        ):\n"
        ),
        "        if was_frozen or not has_work or figures != self._figures:\n",
        f"{_STALL_DETECTION}::test_a_stall_is_work_without_progress_or_cpu_time",
    ),
    fault(
        "reports a key as gone that was evicted and published again",
        "serve_ray/routing/event_journal.py",
        "(_keys(events.evicted, place) - published) & held",
        "_keys(events.evicted, place) & held",
        f"{_JOURNAL}::test_the_published_one_of_two_hashes_with_one_key_counts",
    ),
    fault(
        "does not cancel work again that survives its cancellation",
        "serve_ray/replicas.py",
        "        while tasks := list(self._tasks):",
        "        if tasks := list(self._tasks):",
        "tests/serve_ray/watch/test_health_checks.py",
    ),
    fault(
        "does not count embeddings that were sent since the last poll",
        "serve_ray/replicas.py",
        "                self.router.note_routed(choices[0], chain, time.monotonic())\n",
        "                pass\n",
        f"{_COMPUTE}::test_calls_between_two_polls_are_spread",
    ),
)
