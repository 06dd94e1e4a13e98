"""Faults in the APIs of the server: streams, OpenAI's, Anthropic's, Ollama's, llama.cpp's."""

from __future__ import annotations

from faults.fault import fault

_COMPAT = "tests/server/api/compat"
_CONTRACT = f"{_COMPAT}/test_contract.py"
_OLLAMA_CLI = "tests/server/models/test_ollama_cli.py"
_LLAMA_CPP = f"{_COMPAT}/test_llama_cpp.py"
_INFILL = f"{_COMPAT}/test_infill.py"
_ANTHROPIC = f"{_COMPAT}/test_anthropic.py"
_MARKED = f"{_COMPAT}/test_anthropic_cache.py"
_RESPONSES = f"{_COMPAT}/test_responses.py"
_COMPLETIONS = "tests/server/api/test_completion_requests.py"
_CHAT = "tests/server/api/test_chat_requests.py"
_DEFAULTS = "tests/server/api/test_model_defaults.py"
_ENDPOINTS = "tests/server/api/test_endpoints.py"
_OVERFLOW = "tests/server/api/test_overflow.py"
_ADMISSION = "tests/server/work/test_admission.py"
_STREAMS = "tests/server/work/test_streams.py"
_PROGRESS = "tests/server/api/test_progress.py"
_EMBEDDINGS = "tests/server/api/test_embeddings.py"

_STREAMING = (
    fault(
        "does not end a stream of chunks with [DONE]",
        "server/work/streams.py",
        "lambda error: event(error_body(error)), last=_DONE)",
        "lambda error: event(error_body(error)))",
        f"{_STREAMS}::test_chat_chunks_have_the_exact_format",
    ),
    fault(
        "omits the null usage from chunks before the last one",
        "server/work/streams.py",
        '            members.setdefault("usage", None)\n',
        "            pass\n",
        f"{_STREAMS}::test_usage_is_the_last_chunk_without_choices",
    ),
    fault(
        "sends events without names",
        "server/work/streams.py",
        'kind = f"event: {name}\\n".encode() if name else b""',
        'kind = b""',
        f"{_CONTRACT}::test_whole_and_streamed_answers_equal_the_models_output",
    ),
    fault(
        "drops the last piece of a large answer of whole pieces",
        "server/work/streams.py",
        "(len(body) - 1) // _SEND_BYTES",
        "len(body) // _SEND_BYTES",
        f"{_STREAMS}::test_a_large_answer_is_sent_in_pieces",
    ),
    fault(
        "does not report an error after the first chunk",
        "server/api/generation.py",
        "            await stream.fail(api_error)\n",
        "            await stream.end()\n",
        f"{_ADMISSION}::test_a_stream_past_its_deadline_ends_with_an_error_event",
    ),
    fault(
        "sends a stream only when it is complete",
        "server/api/generation.py",
        "            if num_open:\n                if stream.is_silent",
        "            if not num_open:\n                if stream.is_silent",
        f"{_ADMISSION}::test_a_stream_past_its_deadline_ends_with_an_error_event",
    ),
    fault(
        "sends pings only between tokens",
        "server/api/generation.py",
        "followed=prompts, silence=_PING_SECONDS)",
        "followed=prompts)",
        f"{_PROGRESS}::test_openai_client_waits_through_pings",
    ),
    fault(
        "sends pings only if no token arrives",
        "server/api/generation.py",
        "if stream.is_silent(_PING_SECONDS):",
        "if not batch and stream.is_silent(_PING_SECONDS):",
        f"{_PROGRESS}::test_pings_are_sent_while_text_is_held_back",
    ),
    fault(
        "does not cancel the requests of a disconnected client",
        "server/work/bridge.py",
        "    finally:\n        for handle in handles:\n            handle.cancel()\n",
        "    finally:\n        pass\n",
        f"{_COMPAT}/test_leaving.py::test_a_disconnect_frees_everything_within_one_step",
    ),
    fault(
        "sends a token's log probability before its text",
        "server/api/completion_requests.py",
        (
            "        count = (\n"
            "            len(self._ids)\n"
            "            if self._texts is None\n"
            "            else sum(start < self._shown for start in self._starts)\n"
            "        )\n"
        ),
        "        count = len(self._ids)\n",
        "tests/server/api/test_logprobs.py::test_logprobs_wait_for_withheld_text",
    ),
    fault(
        "Anthropic: sends no ping in a silent stream",
        "server/api/compat/anthropic/writer.py",
        'self._emit([{"type": "ping"}])',
        "pass",
        f"{_PROGRESS}::test_a_silent_stream_sends_pings",
    ),
)

_OPENAI = (
    fault(
        "counts the prompt once for each choice",
        "server/api/usage.py",
        "prompt = sum(result.prompt_tokens for result in firsts)",
        "prompt = sum(result.prompt_tokens for result in results)",
        f"{_COMPLETIONS}::test_metrics_count_a_prompt_once_and_measure_from_arrival",
    ),
    fault(
        "reports the cached tokens of the choice that found most",
        "server/api/usage.py",
        "min(group, key=lambda result: result.exact_cached_tokens)",
        "max(group, key=lambda result: result.exact_cached_tokens)",
        f"{_COMPLETIONS}::test_choices_share_the_prompt_in_flight",
    ),
    fault(
        "uses one seed for all choices",
        "server/api/schemas/shared.py",
        "(self.seed + choice) % 2**64",
        "self.seed % 2**64",
        f"{_COMPLETIONS}::test_a_seed_reproduces_answers_and_its_choices_differ",
    ),
    fault(
        "best_of returns the least likely answer",
        "server/api/completion_requests.py",
        (
            "        chosen += sorted(results[first : first + per_prompt], key=_mean_logprob, "
            "reverse=True)[\n"
            "            :keep\n"
            "        ]\n"
        ),
        "        chosen += sorted(results[first : first + per_prompt], key=_mean_logprob)[:keep]\n",
        f"{_COMPLETIONS}::test_best_of_takes_the_highest_mean_logprob",
    ),
    fault(
        "the default max_tokens of a completion is 17",
        "server/api/completion_requests.py",
        "_DEFAULT_MAX_TOKENS = 16",
        "_DEFAULT_MAX_TOKENS = 17",
        f"{_COMPLETIONS}::test_max_tokens_defaults_to_16",
    ),
    fault(
        "echoes the first prompt in every choice",
        "server/api/completion_requests.py",
        "run.prompts[index // body.num_choices] if body.echo",
        "run.prompts[0] if body.echo",
        f"{_COMPLETIONS}::test_each_choice_echoes_its_own_prompt",
    ),
    fault(
        "accepts a prompt one token longer than the context",
        "server/api/checks.py",
        "room = max_length(state) - num_prompt_tokens",
        "room = min(context + 1, pool + 1) - num_prompt_tokens",
        f"{_CHAT}::test_without_max_tokens_an_answer_may_fill_the_context",
    ),
    fault(
        "does not treat a developer's message as the system's",
        "server/api/schemas/chat.py",
        '"system" if self.role == "developer" else self.role',
        "self.role",
        "tests/server/api/test_schemas.py::test_developer_messages_become_system_messages",
    ),
    fault(
        "ignores top_logprobs without logprobs",
        "server/api/schemas/chat.py",
        "if self.top_logprobs and not self.logprobs:",
        "if self.top_logprobs and self.logprobs is False:",
        f"{_CONTRACT}::test_invalid_fields_are_refused_by_name",
    ),
    # Responses.
    fault(
        "reports a truncated response as completed",
        "server/api/compat/responses/writer.py",
        'return "incomplete" if reason == "length" else "completed"',
        'return "completed"',
        f"{_CONTRACT}::test_a_truncated_answer_has_finish_reason_length",
    ),
    fault(
        "stores a response although store is false",
        "server/api/routes/responses.py",
        "keep if body.store is not False else None",
        "keep",
        f"{_RESPONSES}::test_store_false_stores_nothing",
    ),
    fault(
        "gives all events of a response the same number",
        "server/api/compat/responses/writer.py",
        "        self._number += 1\n",
        "",
        f"{_CONTRACT}::test_whole_and_streamed_answers_equal_the_models_output",
    ),
    fault(
        "has_more is true on the last page of a list",
        "server/api/listing.py",
        '"has_more": len(found) > limit',
        '"has_more": len(found) >= limit',
        f"{_RESPONSES}::test_a_stored_response_is_retrieved_and_deleted",
    ),
    fault(
        "continues a conversation from its last turn alone",
        "server/work/stored_responses.py",
        "            at = turn.previous\n",
        "            at = None\n",
        "tests/server/work/test_stored_responses.py::test_a_conversation_is_its_turns_in_order",
    ),
    fault(
        "evicts recently used responses before unused ones",
        "server/work/stored_responses.py",
        "self.kept.find(tenant, at)",
        "self.kept.peek(tenant, at)",
        "tests/server/work/test_stored_responses.py::test_bytes_are_bounded_with_lru_eviction",
    ),
    fault(
        "takes an item from the turn that was used first",
        "server/work/stored_responses.py",
        "in reversed(self.kept.values(tenant) if missing else []):",
        "in self.kept.values(tenant) if missing else []:",
        "tests/server/work/test_stored_responses.py::test_items_are_found_in_the_turns_used_last",
    ),
    fault(
        "stores references to items instead of the items",
        "server/api/routes/responses.py",
        "answer, json.dumps(sent).encode(), body.previous_response_id, ids",
        "answer, json.dumps(body.input).encode(), body.previous_response_id, ids",
        f"{_RESPONSES}::test_references_stand_for_stored_items",
    ),
    # Embeddings and reranking.
    fault(
        "encodes base64 vectors in big-endian order",
        "server/api/embedding_responses.py",
        'row.astype("<f4")',
        'row.astype(">f4")',
        f"{_EMBEDDINGS}::test_openais_client_gets_the_vectors_of_the_engine",
    ),
    fault(
        "ranks the worst document first",
        "server/api/embedding_responses.py",
        "key=lambda index: -scores[index])",
        "key=lambda index: scores[index])",
        f"{_EMBEDDINGS}::test_documents_are_ranked_by_the_scores_of_the_engine",
    ),
    fault(
        "ignores top_n in a ranking",
        "server/api/routes/embeddings.py",
        "body.top_n or len(scores)",
        "len(scores)",
        f"{_EMBEDDINGS}::test_documents_are_ranked_by_the_scores_of_the_engine",
    ),
    fault(
        "returns ranked documents with the texts of other documents",
        "server/api/embedding_responses.py",
        '(texts or ())[item["index"]]',
        "(texts or ())[ranked.index(item)]",
        f"{_EMBEDDINGS}::test_documents_are_ranked_by_the_scores_of_the_engine",
    ),
)

_COMPAT_APIS = (
    # Anthropic.
    fault(
        "does not mark a failed tool's result as an error",
        "server/api/compat/anthropic/blocks.py",
        'return f"Error: {text}" if self.is_error else text',
        "return text",
        f"{_ANTHROPIC}::test_tool_calls_results_and_thinking_are_translated",
    ),
    fault(
        "Anthropic: drops turns to reserve a max_tokens above the context",
        "server/api/chat_requests.py",
        "(min(reserved, share) if self._fills else reserved)",
        "reserved",
        f"{_OVERFLOW}::test_messages_reserves_no_more_than_an_eighth_of_the_context",
    ),
    fault(
        "Anthropic: names a maximum that leaves no room for an answer",
        "server/api/compat/anthropic/messages.py",
        "max_length(self.state) - bool(self.body.max_tokens)",
        "max_length(self.state)",
        f"{_OVERFLOW}::test_messages_refuses_an_overlong_prompt_in_anthropics_words",
    ),
    fault(
        "Anthropic: reports a message with a call as end_turn",
        "server/api/compat/anthropic/writer.py",
        'return {"stop_reason": "tool_use", "stop_sequence": None}',
        'return {"stop_reason": "end_turn", "stop_sequence": None}',
        f"{_CONTRACT}::test_whole_and_streamed_answers_equal_the_models_output",
    ),
    fault(
        "Anthropic: counts tokens after the last full block as cached",
        "server/api/compat/anthropic/writer.py",
        "max(0, length // size * size - cached)",
        "max(0, length - cached)",
        f"{_MARKED}::test_cache_control_pins_and_counts_the_marked_prefix",
    ),
    fault(
        "Anthropic: sends thinking to a client that asks to omit it",
        "server/api/compat/anthropic/writer.py",
        'body.thinking is None or body.thinking.display != "omitted"',
        "True",
        f"{_ANTHROPIC}::test_thinking_is_omitted_on_request",
    ),
    fault(
        "Anthropic: cache_control of 1h holds for 5 minutes",
        "server/api/compat/anthropic/blocks.py",
        '_SECONDS = {"5m": 300.0, "1h": 3600.0}',
        '_SECONDS = {"5m": 300.0, "1h": 300.0}',
        f"{_MARKED}::test_ttl_of_5m_and_1h_expire_separately",
    ),
    # Ollama.
    fault(
        "Ollama: joins the lines of a stream",
        "server/api/compat/ollama/writer.py",
        'self._stream.add(dumps(line) + b"\\n")',
        "self._stream.add(dumps(line))",
        f"{_CONTRACT}::test_whole_and_streamed_answers_equal_the_models_output",
    ),
    fault(
        "Ollama: reports durations in milliseconds",
        "server/api/compat/ollama/writer.py",
        "return round(milliseconds * 1e6)",
        "return round(milliseconds)",
        f"{_CONTRACT}::test_whole_and_streamed_answers_equal_the_models_output",
    ),
    fault(
        "Ollama: treats num_predict -1 as a limit",
        "server/api/compat/ollama/translate.py",
        '"max_tokens": None if limit is None or limit <= 0 else limit,',
        '"max_tokens": limit,',
        f"{_CONTRACT}::test_fields_without_effect_are_accepted",
    ),
    fault(
        "Ollama: keep_alive -1 unloads a model at once",
        "server/api/compat/ollama/durations.py",
        "return math.inf if seconds < 0 else float(seconds)",
        "return float(max(0, seconds))",
        "tests/server/models/test_dialects.py::test_keep_alive_of_the_last_request_applies",
    ),
    fault(
        "Ollama: sends a call before its arguments are complete",
        "server/api/compat/ollama/writer.py",
        "            (part.index for part in parts if isinstance(part, CallStart)), "
        "default=self._calls_told\n",
        (
            "            (part.index + 1 for part in parts if isinstance(part, CallStart)),\n"
            "            default=self._calls_told,\n"
        ),
        f"{_CONTRACT}::test_whole_and_streamed_answers_equal_the_models_output",
    ),
    fault(
        "Ollama: refuses the empty names of its Go client",
        "server/api/compat/ollama/schemas.py",
        'BeforeValidator(lambda value: None if value == "" else value)',
        "BeforeValidator(lambda value: value)",
        f"{_OLLAMA_CLI}::test_models_are_created_copied_listed_stopped_and_deleted",
    ),
    fault(
        "Ollama: leaves the loading of the model out of total_duration",
        "server/api/compat/ollama/writer.py",
        '_nanoseconds(self._load_ms + spent["kvboost"]["total_ms"])',
        '_nanoseconds(spent["kvboost"]["total_ms"])',
        "tests/server/models/test_dialects.py::"
        "test_ollamas_durations_include_the_wait_for_the_model",
    ),
    fault(
        "Ollama: cuts off the end token of a text to embed",
        "server/api/embedding_requests.py",
        "return ids[: max(0, limit - len(end))] + end",
        "return ids[:limit]",
        f"{_EMBEDDINGS}::test_truncated_texts_keep_the_tokens_that_the_tokenizer_adds",
    ),
    fault(
        "Ollama: shows an embedding model as a chat model",
        "server/models/served.py",
        "if not engine.generates:",
        "if False:",
        f"{_EMBEDDINGS}::test_truncated_texts_keep_the_tokens_that_the_tokenizer_adds",
    ),
    # llama.cpp.
    fault(
        "llama.cpp: reports a stop string as the end token",
        "server/api/compat/llama_cpp/writer.py",
        '"limit" if reason == "length" else "word" if word else "eos"',
        '"limit" if reason == "length" else "eos"',
        f"{_LLAMA_CPP}::test_stop_type_and_stopping_word_name_the_end",
    ),
    fault(
        "llama.cpp: repeats all earlier token ids in each piece",
        "server/api/compat/llama_cpp/writer.py",
        "begin = self._told_ids",
        "begin = 0",
        f"{_CONTRACT}::test_whole_and_streamed_answers_equal_the_models_output",
    ),
    fault(
        "llama.cpp: refuses an n_predict above the room",
        "server/api/completion_requests.py",
        "fills=self._fills,",
        "fills=False,",
        f"{_LLAMA_CPP}::test_an_answer_whose_n_predict_exceeds_the_context_fills_it",
    ),
    fault(
        "llama.cpp: names the first prompt in all answers",
        "server/api/compat/llama_cpp/writer.py",
        "number = index // self.run.per_prompt",
        "number = 0",
        f"{_LLAMA_CPP}::test_several_prompts_are_answered_by_a_list",
    ),
    fault(
        "tokenizes messages without the default system message",
        "server/api/prompt_encoding.py",
        (
            "    body = with_defaults(state, body)\n"
            "    generates = body.add_generation_prompt is not False\n"
        ),
        "    generates = body.add_generation_prompt is not False\n",
        f"{_DEFAULTS}::test_tokenize_and_apply_template_yield_the_prompt_of_a_chat",
    ),
    fault(
        "parse_special=false still encodes special tokens",
        "server/api/prompt_encoding.py",
        'else tokenizer.encode_framed("", text, "")',
        "else tokenizer.encode(text, False)",
        f"{_ENDPOINTS}::test_parse_special_decides_whether_content_may_contain_special_tokens",
    ),
    fault(
        "llama.cpp: puts an infill's suffix first",
        "server/api/compat/llama_cpp/translate.py",
        '[[before], body.input_prefix + (body.prompt or ""), [between], body.input_suffix]',
        '[[before], body.input_suffix, [between], body.input_prefix + (body.prompt or "")]',
        f"{_LLAMA_CPP}::test_infill_uses_the_models_prefix_suffix_and_middle_tokens",
    ),
    fault(
        "llama.cpp: drops an infill's last text instead of its first",
        "server/api/compat/llama_cpp/translate.py",
        "reversed(self._extra)",
        "self._extra",
        f"{_INFILL}::test_the_oldest_extra_texts_are_dropped_if_they_do_not_fit",
    ),
    fault(
        "llama.cpp: shrinks the room for other texts with the local text",
        "server/api/compat/llama_cpp/translate.py",
        "max(len(local), min(_LOCAL, context // 2))",
        "len(local)",
        f"{_INFILL}::test_the_oldest_extra_texts_are_dropped_if_they_do_not_fit",
    ),
    fault(
        "llama.cpp: encodes special tokens in files as special in an infill",
        "server/api/compat/llama_cpp/translate.py",
        'tokenizer.encode_framed("", piece, "")',
        "tokenizer.encode(piece, False)",
        f"{_INFILL}::test_special_tokens_in_files_are_encoded_as_text",
    ),
    fault(
        "llama.cpp: does not end an infill at a token of its layout",
        "server/api/compat/llama_cpp/translate.py",
        "None if body.ignore_eos else stop_ids",
        "None",
        f"{_INFILL}::test_an_infill_token_ends_the_answer",
    ),
    # Errors.
    fault(
        "uses OpenAI's error shape on subpaths of Anthropic's API",
        "server/error_shapes.py",
        "_BY_PATH.get(api, _openai)",
        "_BY_PATH.get(path, _openai)",
        "tests/server/test_error_shapes.py::test_an_error_has_its_apis_format",
    ),
)

FAULTS = (*_STREAMING, *_OPENAI, *_COMPAT_APIS)
