"""Faults in the HTTP server: admission, keys, tenants, models, metrics, the cache report."""

from __future__ import annotations

from faults.fault import Fault, fault

_ADMISSION = "tests/server/work/test_admission.py"
_SHARES = "tests/server/work/test_tenant_shares.py"
_KEYS = "tests/server/http/test_keys.py"
_HOSTS = "tests/server/http/test_hosts.py"
_PROTOCOL = "tests/server/http/test_protocol.py"
_MODELS_OF = "tests/server/models/test_dialects.py"
_LIMITS = "tests/server/http/test_limits.py"
_TENANTS = "tests/server/http/test_tenants.py"
_CHANGES = "tests/server/models/test_changes.py"
_ON_DEMAND = "tests/server/models/test_on_demand.py"
_ROOM = "tests/server/models/test_room.py"
_DIAGNOSIS = "tests/server/cache_report/test_diagnosis.py"
_RECORDS = "tests/server/cache_report/test_recent_requests.py"
_LLAMA_CPP = "tests/server/api/compat/test_llama_cpp.py"
_EMBEDDINGS = "tests/server/api/test_embeddings.py"
_NORMALISE = "tests/server/cache_report/test_normalization.py"
_LEAVING = "tests/server/models/test_leaving.py"
_METRICS = "tests/server/test_metrics.py"
_SPEEDS = "tests/server/test_recent_throughput.py"

_REQUESTS = (
    # Admission and the queue.
    fault(
        "leaves the last place of the queue empty",
        "server/work/tenant_shares.py",
        "self._growth(tenant, amount) <= self.limit",
        "self._growth(tenant, amount) < self.limit",
        f"{_SHARES}::test_a_single_tenant_may_use_everything",
    ),
    fault(
        "gives keys equal shares whatever their weights",
        "server/work/tenant_shares.py",
        "least + int(rest * weight / whole)",
        "least + int(rest / len(weights))",
        f"{_SHARES}::test_half_is_reserved_by_weight_and_half_is_shared",
    ),
    fault(
        "a key below its share takes the room of others",
        "server/work/tenant_shares.py",
        "return max(kept, used + amount) - max(kept, used)",
        "return amount",
        f"{_SHARES}::test_shares_hold_in_any_order_of_requests",
    ),
    fault(
        "answers a request that can never fit with a retryable error",
        "server/work/admission.py",
        (
            "        most_sequences = self._places.most(tenant)\n"
            "        most_tokens = self._tokens.most(tenant)\n"
        ),
        ("        most_sequences = self._places.limit\n        most_tokens = self._tokens.limit\n"),
        f"{_ADMISSION}::test_a_request_above_its_keys_share_is_400",
    ),
    fault(
        "keeps counting the tokens of a finished request",
        "server/work/admission.py",
        "        self._tokens.give_back(tenant, num_tokens)\n",
        "",
        f"{_ADMISSION}::test_the_deadline_ends_a_request_with_504_and_its_work",
    ),
    fault(
        "keeps an admission after its request ended",
        "server/work/admission.py",
        "        queue.admitted.discard(self)\n",
        "",
        f"{_ADMISSION}::test_the_deadline_ends_a_request_with_504_and_its_work",
    ),
    fault(
        "lets a stream whose prompt stands still go on forever",
        "server/work/admission.py",
        "        return self._num_computed > before\n",
        "        return True\n",
        f"{_ADMISSION}::test_the_deadline_of_a_stream_moves_while_its_prompt_advances",
    ),
    fault(
        "treats a deadline as a delay",
        "server/work/admission.py",
        "call_later(self.deadline - self._entered, self._expire)",
        "call_later(self.deadline, self._expire)",
        f"{_ADMISSION}::test_the_deadline_ends_a_request_with_504_and_its_work",
    ),
    fault(
        "ends a stream whose tokens still arrive at the first deadline",
        "server/api/generation.py",
        "                admission.progress()\n",
        "",
        f"{_ADMISSION}::test_the_deadline_of_a_stream_moves_with_each_token",
    ),
    fault(
        "the engine ends a stream at its first deadline",
        "server/work/bridge.py",
        "deadline=None if admission.streams else admission.deadline",
        "deadline=admission.deadline",
        f"{_ADMISSION}::test_the_deadline_of_a_stream_moves_with_each_token",
    ),
    fault(
        "does not count the time that a request waits for its model",
        "server/work/admission.py",
        ' - float(self.facts.get("load_wait_seconds", 0.0))',
        "",
        "tests/server/work/test_deadlines.py",
    ),
    fault(
        "groups requests of different keys in the batch window",
        "server/work/grouping.py",
        'hashlib.sha256((tenant or "").encode() + b"\\0" + first)',
        "hashlib.sha256(first)",
        f"{_ADMISSION}::test_the_batch_window_bounds_the_wait",
    ),
    fault(
        "a cancelled waiter in the batch window lets all others through",
        "server/work/grouping.py",
        "            self._drop(key)\n            raise\n",
        "            self.leave(key)\n            raise\n",
        f"{_ADMISSION}::test_a_cancelled_waiter_does_not_release_others",
    ),
    fault(
        "keeps counting a body's bytes after its request ended",
        "server/http/middleware.py",
        "            self._state.bodies.free(body.tenant, body.num_bytes)\n",
        "            pass\n",
        f"{_LIMITS}::test_total_body_bytes_are_bounded",
    ),
    fault(
        "applies the body size limit to each chunk separately",
        "server/http/middleware.py",
        "if self.num_bytes + size > self._limit:",
        "if size > self._limit:",
        "tests/server/http/test_bodies.py",
    ),
    fault(
        "refuses a body of exactly the largest size",
        "server/http/middleware.py",
        "int(value) > limit",
        "int(value) >= limit",
        f"{_LIMITS}::test_a_body_at_the_limit_is_read",
    ),
    fault(
        "counts the bytes of bodies for no key",
        "server/http/middleware.py",
        '_Body(receive, self._state, scope["kvboost"].get("tenant"), limit)',
        "_Body(receive, self._state, None, limit)",
        f"{_LIMITS}::test_total_body_bytes_are_shared_between_keys",
    ),
    fault(
        "lets a request pass those of other keys by its priority",
        "server/api/checks.py",
        "if priority < 0 and len(state.settings.all_keys) > 1:",
        "if priority < -1 and len(state.settings.all_keys) > 1:",
        f"{_ADMISSION}::test_priorities_across_tenants_are_refused",
    ),
    fault(
        "each of many inputs takes a place in the queue",
        "server/api/embedding_requests.py",
        "min(len(estimates), state.admission.batch)",
        "len(estimates)",
        f"{_EMBEDDINGS}::test_the_maximum_number_of_inputs_is_answered_in_order",
    ),
    # Connections.
    fault(
        "accepts Content-Length together with Transfer-Encoding",
        "server/http/protocol.py",
        'if b"transfer-encoding" in names and b"content-length" in names:',
        'if names.count(b"transfer-encoding") > 1:',
        f"{_PROTOCOL}::test_an_ambiguous_request_gets_400_and_is_closed",
    ),
    fault(
        "accepts a bare line feed as the end of a header",
        "server/http/protocol.py",
        're.compile(rb"(?<!\\r)\\n|\\n[ \\t]")',
        're.compile(rb"\\n[ \\t]")',
        f"{_PROTOCOL}::test_an_ambiguous_head_is_refused_at_any_split",
    ),
    Fault(
        "reads many long bodies at once",
        "kvboost_edge/server/api/bodies.py",
        (
            ("async with server_of(self).bodies.reading:", "if server_of(self).bodies:"),
            ("ThreadPoolExecutor(1,", "ThreadPoolExecutor(8,"),
        ),
        ("tests/server/test_loop_lag.py::test_long_bodies_are_parsed_one_at_a_time",),
    ),
    fault(
        "checks the length of integers only in UTF-8 bodies",
        "server/api/bodies.py",
        'b"\\0" in body or _TOO_LONG in',
        "_TOO_LONG in",
        "tests/server/api/test_endpoints.py::test_integers_of_up_to_20_digits_are_parsed",
    ),
    fault(
        "accepts two equal Content-Length headers",
        "server/http/protocol.py",
        "if len(lengths) > 1 or",
        "if",
        f"{_PROTOCOL}::test_an_ambiguous_request_gets_400_and_is_closed",
    ),
    fault(
        "takes a client that half-closes its connection for disconnected",
        "server/http/protocol.py",
        "if self.transport.is_closing() or not self._owes_answer():",
        "if self.transport.is_closing() or self._owes_answer():",
        f"{_ADMISSION}::test_a_half_closed_client_gets_its_answer",
    ),
    fault(
        "probes a half-closed connection only once",
        "server/http/protocol.py",
        "self._ask_timer = self.loop.call_later(seconds, self._ask, min(2 * seconds, _LONGEST_ASK))",
        "self._ask_timer = None",
        f"{_ADMISSION}::test_a_half_closed_clients_disconnect_is_noticed",
    ),
    fault(
        "a connection probe changes the length of a chunk",
        "server/http/protocol.py",
        'return b"0"\n',
        'return b"1"\n',
        f"{_ADMISSION}::test_a_half_closed_client_gets_its_answer",
    ),
    fault(
        "never drops a client that does not read",
        "server/http/protocol.py",
        "if waiting >= size > 0:",
        "if waiting > size > 0:",
        f"{_LIMITS}::test_a_client_that_does_not_read_is_dropped_and_cancelled",
    ),
    fault(
        "each byte extends the deadline of a request's arrival",
        "server/http/protocol.py",
        "if self._read_timer is None and self._between_requests():",
        "if self._between_requests():",
        f"{_LIMITS}::test_trickling_bytes_do_not_extend_the_deadline",
    ),
)

_AUTHENTICATION = (
    fault(
        "serves /metrics without authentication",
        "server/app.py",
        "open_paths=health.OPEN_PATHS | _PAGE_PATHS,",
        'open_paths=health.OPEN_PATHS | _PAGE_PATHS | {"/metrics"},',
        f"{_KEYS}::test_every_route_except_the_public_ones_needs_a_key",
    ),
    fault(
        "a path that decodes to an open path needs no key",
        "server/http/middleware.py",
        'scope["raw_path"] not in self._open_paths',
        'scope["path"].encode() not in self._open_paths',
        f"{_KEYS}::test_path_variants_do_not_bypass_authentication",
    ),
    fault(
        "an escaped admin path needs no admin key",
        "server/http/middleware.py",
        'if scope["path"] in ADMIN_PATHS:',
        'if scope["raw_path"].decode() in ADMIN_PATHS:',
        f"{_KEYS}::test_shared_statistics_need_the_admin_key",
    ),
    fault(
        "makes each of two keys the admin's",
        "server/http/keys.py",
        "if len(self._digests) > 1 and tenant not in self._admins:",
        "if len(self._digests) > 2 and tenant not in self._admins:",
        f"{_KEYS}::test_shared_statistics_are_refused_without_an_admin_key",
    ),
    fault(
        "the time to check a key reveals which key it is",
        "server/http/keys.py",
        "found |= hmac.compare_digest(digest, known)",
        "found = found or hmac.compare_digest(digest, known)",
        f"{_KEYS}::test_all_keys_are_compared_in_constant_time",
    ),
    fault(
        "accepts a key's header twice",
        "server/http/keys.py",
        "if len(found_keys) != 1 or len(given) != len(dict(given)):",
        "if len(found_keys) != 1:",
        f"{_KEYS}::test_anything_but_one_valid_key_is_401",
    ),
    fault(
        "accepts a key under any scheme",
        "server/http/keys.py",
        'if scheme.lower() != b"bearer":',
        "if not scheme:",
        f"{_KEYS}::test_anything_but_one_valid_key_is_401",
    ),
    fault(
        "validates a host only up to its first invalid character",
        "server/http/hosts.py",
        "_HOST.fullmatch(host)",
        "_HOST.match(host)",
        f"{_HOSTS}::test_only_loopback_hosts_are_allowed_by_default",
    ),
    fault(
        "accepts a wildcard bind address as a host name",
        "server/http/hosts.py",
        "frozenset(named if bind in _WILDCARDS else named | {bind})",
        "frozenset(named | {bind})",
        f"{_HOSTS}::test_the_bind_address_and_allowed_hosts_are_accepted",
    ),
    fault(
        "allows pages of any origin unless origins are configured",
        "server/http/hosts.py",
        'for origin in _values(scope, b"origin"):',
        'for origin in _values(scope, b"origin") if self._origins else ():',
        f"{_HOSTS}::test_requests_of_other_origins_are_refused",
    ),
    fault(
        "CORS allows every origin",
        "server/app.py",
        "allow_origins=settings.cors_origins,",
        'allow_origins=["*"],',
        f"{_HOSTS}::test_cors_is_off_by_default",
    ),
    fault(
        "treats a private address as loopback",
        "server/settings.py",
        'ip_address(host.strip("[]")).is_loopback',
        'ip_address(host.strip("[]")).is_private',
        f"{_HOSTS}::test_a_non_loopback_bind_without_a_key_is_refused",
    ),
)

_ISOLATION = (
    fault(
        "runs a request without its tenant",
        "server/work/bridge.py",
        "            tenant=admission.tenant,\n            weight=admission.weight,\n",
        "            weight=admission.weight,\n",
        f"{_KEYS}::test_tenants_never_hit_each_others_cache",
    ),
    fault(
        "does not pass a key's weight to the scheduler",
        "server/work/bridge.py",
        "            weight=admission.weight,\n",
        "",
        f"{_ADMISSION}::test_a_keys_weight_applies_to_its_requests",
    ),
    fault(
        "embeddings hit the cached prompts of other keys",
        "server/api/embedding_requests.py",
        "                    tenant=admission.tenant,\n",
        "",
        f"{_TENANTS}::test_answers_reveal_nothing_of_other_keys_requests",
    ),
    fault(
        "lets any key end a pin by sending its text",
        "server/api/routes/cache.py",
        '"tenant": admission.tenant,',
        '"tenant": None,',
        "tests/server/api/test_endpoints.py::test_a_tenant_cannot_unpin_another_tenants_text",
    ),
    fault(
        "shows a stored response to any key that knows its id",
        "server/work/stored_responses.py",
        "        return self.kept.peek(tenant, name)\n",
        "        return next(filter(None, (self.kept.peek(t, name) for t in list(self.kept._roots))), None)\n",
        f"{_TENANTS}::test_requests_and_responses_of_other_keys_are_invisible",
    ),
    fault(
        "shows a cache report to any key that knows its id",
        "server/cache_report/recent_requests.py",
        "        found = self.kept.peek(tenant, request_id)\n",
        "        whoever = (self.kept.peek(one, request_id) for one in list(self.kept._roots))\n"
        "        found = next(filter(None, whoever), None)\n",
        f"{_TENANTS}::test_requests_and_responses_of_other_keys_are_invisible",
    ),
    fault(
        "forgets a request that times out before its first token",
        "server/cache_report/tracker.py",
        'if is_late or result.finish_reason == "timeout":',
        'if result.finish_reason == "timeout":',
        "tests/server/api/test_doctor.py::test_requests_that_time_out_before_a_token_are_listed",
    ),
    fault(
        "compares prompts with a request that never started",
        "server/cache_report/recent_requests.py",
        "            and kept.record.has_started\n        )\n        alike",
        "        )\n        alike",
        "tests/server/api/test_doctor.py::test_requests_that_time_out_before_a_token_are_listed",
    ),
    fault(
        "compares a prompt with prompts under another salt",
        "server/cache_report/recent_requests.py",
        "(kept.salt, kept.record.prefill) == (salt, record.prefill)",
        "kept.record.prefill == record.prefill",
        f"{_RECORDS}::test_the_closest_record_has_the_longest_prefix_of_the_same_tenant_and_salt",
    ),
    fault(
        "compares a prompt with prompts of the other prefill",
        "server/cache_report/recent_requests.py",
        "(kept.salt, kept.record.prefill) == (salt, record.prefill)",
        "kept.salt == salt",
        "tests/server/api/test_shareable.py",
    ),
    fault(
        "restores a session with the server's default prefill",
        "server/api/routes/sessions.py",
        'prefill=saved_prefill(state, found.info, "name"),',
        "prefill=None,",
        "tests/server/api/test_shareable.py",
    ),
    Fault(
        "reorders tools to the order that another key sent",
        "kvboost_edge/server/cache_report/normalization.py",
        (
            ("self._first.find(whose.root, key)", 'self._first.find(b"", key)'),
            (
                "self._first.keep(whose.owner, whose.root, key, value, size)",
                'self._first.keep(whose.owner, b"", key, value, size)',
            ),
        ),
        (f"{_NORMALISE}::test_equal_tools_keep_their_first_order",),
    ),
    fault(
        "tells each of several keys when a model was last used",
        "server/api/compat/ollama/models.py",
        " or len(server.settings.all_keys) > 1:",
        ":",
        f"{_MODELS_OF}::test_keep_alive_of_one_key_does_not_unload_another_keys_model",
    ),
    fault(
        "lets any key set how long a shared model stays loaded",
        "server/models/registry.py",
        "return served.source is not None and self._shared.settings.is_admin(tenant)",
        "return served.source is not None",
        f"{_MODELS_OF}::test_keep_alive_of_one_key_does_not_unload_another_keys_model",
    ),
    fault(
        "shows the memory of all models to every key",
        "server/models/shown.py",
        "memory_of(models) if server.settings.is_admin(tenant) else None",
        "memory_of(models)",
        f"{_CHANGES}::test_the_model_list_says_whether_changes_are_allowed",
    ),
    fault(
        "shows the slots of all keys to every key",
        "server/http/middleware.py",
        '"/metrics",\n        "/slots",',
        '"/metrics",',
        f"{_LLAMA_CPP}::test_slots_require_the_admin_key_if_there_are_several_keys",
    ),
)

_MODELS = (
    fault(
        "unloads a model that is in use",
        "server/models/served.py",
        'self.phase == "loaded" and not self.in_use',
        'self.phase == "loaded"',
        f"{_ROOM}::test_a_model_in_use_is_not_unloaded",
    ),
    fault(
        "unloads the most recently used model first",
        "server/models/loader.py",
        "sorted(idle, key=lambda one: one.idle_since)",
        "sorted(idle, key=lambda one: -one.idle_since)",
        f"{_ROOM}::test_the_least_recently_used_model_is_unloaded",
    ),
    fault(
        "unloads an idle model although that does not free enough",
        "server/models/loader.py",
        "if sum(_cost(one) for one in leaving) < missing:",
        "if not leaving:",
        f"{_ROOM}::test_no_model_is_unloaded_if_that_frees_too_little",
    ),
    fault(
        "keeps swapping two models that do not fit together",
        "server/models/served.py",
        "return self.loaded_at + self.load_seconds",
        "return self.loaded_at",
        f"{_ROOM}::test_a_model_stays_loaded_at_least_as_long_as_its_load_took",
    ),
    fault(
        "counts keep_alive from a model's loading",
        "server/models/served.py",
        "self.idle_since + self.keep_alive",
        "self.loaded_at + self.keep_alive",
        f"{_ROOM}::test_keep_alive_counts_from_the_last_request",
    ),
    fault(
        "keeps counting the memory of a model that failed to load",
        "server/models/loader.py",
        (
            "                served.num_bytes = served.overhead = 0\n            self._changed.set()\n"
        ),
        "            self._changed.set()\n",
        f"{_ROOM}::test_a_failed_load_takes_no_budget",
    ),
    fault(
        "tries to load a damaged model for each request",
        "server/models/registry.py",
        "if served.refusal is not None and time.monotonic() < served.refusal.again:",
        "if served.refusal is not None and time.monotonic() < 0:",
        f"{_ON_DEMAND}::test_a_damaged_model_returns_503_with_a_reason_until_repaired",
    ),
    fault(
        "never frees a place in the queue for a model",
        "server/models/registry.py",
        "            self._waiting.give_back(tenant, 1)\n",
        "",
        f"{_ON_DEMAND}::test_a_disconnect_leaves_the_load_queue",
    ),
    fault(
        "a failed request holds its model forever",
        "server/models/registry.py",
        "        finally:\n            served.in_use",
        "        except ApiError:\n            raise\n        else:\n            served.in_use",
        f"{_ROOM}::test_a_failed_request_releases_its_model",
    ),
    fault(
        "closes a model while it is being inspected",
        "server/models/loader.py",
        "        await state.looks.over()\n",
        "",
        f"{_LEAVING}::test_a_reset_reaches_all_models_during_an_unload",
    ),
    fault(
        "unloads a model that has pinned blocks",
        "server/models/loader.py",
        "        if pinned:  # keep the model, because its pinned blocks must stay in memory\n",
        "        if not pinned:\n",
        f"{_ROOM}::test_an_idle_model_stays_loaded_until_its_pins_expire",
    ),
)

_REPORTING = (
    fault(
        "does not label an approximate default mode",
        "server/api/usage.py",
        "return False if default_mode is GenerationMode.CHUNK_KV_REUSE else None",
        "return None",
        "tests/server/api/test_default_mode.py",
    ),
    fault(
        "does not label models that compute in wide arithmetic",
        "server/models/shown.py",
        "else known.mode is GenerationMode.CHUNK_KV_REUSE or bool(known.approximations),",
        "else known.mode is GenerationMode.CHUNK_KV_REUSE,",
        "tests/server/api/test_default_mode.py",
    ),
    fault(
        "applies an approximate default to requests that need exact KV",
        "server/work/bridge.py",
        "if self.is_default_mode and is_approximate and needs_exact:",
        "if False:",
        "tests/server/api/test_default_mode.py",
    ),
    fault(
        "reports a disconnect during a body as an error",
        "server/http/middleware.py",
        'if message["type"] == "http.disconnect" and not self._is_complete:',
        "if False:",
        "tests/server/http/test_protocol.py::test_a_disconnect_during_a_body_is_not_an_error",
    ),
    fault(
        "extends the deadline of an upload that does not advance",
        "server/http/protocol.py",
        "if self._is_upload() and count - self._uploaded >= _UPLOAD_BYTES:",
        "if self._is_upload():",
        "tests/server/http/test_limits.py::test_a_slow_body_gets_408",
    ),
    fault(
        "lets clients retry an answer whose decoding takes too long",
        "server/api/generation.py",
        "if any(handle.progress().seconds_left == 0 for handle in handles):",
        "if False:",
        "tests/server/work/test_admission.py::"
        "test_clients_do_not_retry_an_answer_whose_decoding_takes_too_long",
    ),
    fault(
        "computes embeddings in the shared worker threads",
        "server/work/bridge.py",
        "asyncio.ensure_future(in_thread(run))",
        "asyncio.ensure_future(off_loop(run, size))",
        "tests/server/work/test_bridge.py::test_computing_work_delays_no_other_work",
    ),
    fault(
        "does not count cached blocks as occupied",
        "engine/stats.py",
        '"occupied_blocks": used + cached,',
        '"occupied_blocks": used,',
        "tests/engine/test_results.py",
    ),
    fault(
        "/metrics counts cancelled requests as finished",
        "server/metrics.py",
        '"cancelled": "abort", "timeout": "abort"}',
        '"cancelled": "stop", "timeout": "abort"}',
        f"{_ADMISSION}::test_the_deadline_ends_a_request_with_504_and_its_work",
    ),
    fault(
        "/metrics reports milliseconds as seconds",
        "server/metrics.py",
        "self._first_token.observe(result.ttft_ms / 1e3)",
        "self._first_token.observe(result.ttft_ms)",
        f"{_METRICS}::test_values_agree_with_the_requests",
    ),
    fault(
        "/metrics counts cached blocks as free",
        "server/metrics.py",
        '("free", stats["free_blocks"] - stats["cached_blocks"]),',
        '("free", stats["free_blocks"]),',
        f"{_METRICS}::test_pool_metrics_equal_the_engines",
    ),
    fault(
        "/metrics lists only one of two models",
        "server/models/exposition.py",
        "families[family.name].samples += family.samples",
        "families[family.name].samples = family.samples",
        f"{_ON_DEMAND}::test_stats_of_several_models_report_one_process_memory",
    ),
    fault(
        "counts cached tokens as computed",
        "server/recent_throughput.py",
        "sums.prompt_tokens += result.computed_prompt_tokens",
        "sums.prompt_tokens += result.prompt_tokens",
        f"{_SPEEDS}::test_throughput_excludes_cached_tokens",
    ),
    fault(
        "counts 61 seconds as the last minute",
        "server/recent_throughput.py",
        "self._recent[0].second <= second - _WINDOW_SECONDS",
        "self._recent[0].second < second - _WINDOW_SECONDS",
        f"{_SPEEDS}::test_requests_older_than_a_minute_count_in_totals_only",
    ),
    # The cache report.
    fault(
        "compares a prompt only with the one that shares most of it",
        "server/cache_report/diagnosis.py",
        "for other, length in _distinct(earlier)",
        "for other, length in earlier[:1]",
        f"{_DIAGNOSIS}::test_a_longer_prefix_of_another_prompt_does_not_hide_a_change",
    ),
    fault(
        "does not name a model's unloading as the cause of dropped blocks",
        "server/cache_report/diagnosis.py",
        "if record.loading != closest.loading else ()",
        "if record.loading == closest.loading else ()",
        f"{_DIAGNOSIS}::test_blocks_lost_by_an_unload_are_evicted",
    ),
    fault(
        "reports reordered tools as changed tools",
        "server/cache_report/diagnosis.py",
        '"tool_order" if sorted(mine.tools) == sorted(before.tools) else "tools"',
        '"tool_order" if mine.tools == before.tools else "tools"',
        f"{_DIAGNOSIS}::test_reordered_and_changed_tools_are_distinguished",
    ),
    fault(
        "does not detect stripped reasoning at its first token",
        "server/cache_report/diagnosis.py",
        "reasoned = other.num_prompt <= common <",
        "reasoned = other.num_prompt < common <",
        f"{_DIAGNOSIS}::test_stripped_reasoning_is_the_cause",
    ),
    fault(
        "keeps any number of a key's requests for the cache report",
        "server/cache_report/recent_requests.py",
        "            max_root_values=_MAX_REQUESTS,\n",
        "",
        f"{_RECORDS}::test_the_number_of_records_is_bounded",
    ),
    fault(
        "sends the cache report to clients that do not ask for it",
        "server/api/rendered_request.py",
        "self.explains = body.explain\n",
        "self.explains = True\n",
        "tests/server/api/test_doctor.py::test_no_diagnosis_is_sent_unless_requested",
    ),
)

FAULTS = (*_REQUESTS, *_AUTHENTICATION, *_ISOLATION, *_MODELS, *_REPORTING)
