"""Faults in the APIs of the server: streams, OpenAI's, Anthropic's, Ollama's, llama.cpp's."""

from __future__ import annotations

from faults.fault import fault

_COMPAT = "tests/server/api/compat"
_CONTRACT = f"{_COMPAT}/test_contract.py"
_LLAMA_CPP = f"{_COMPAT}/test_llama_cpp.py"
_INFILL = f"{_COMPAT}/test_infill.py"
_ANTHROPIC = f"{_COMPAT}/test_anthropic.py"
_MARKED = f"{_COMPAT}/test_anthropic_cache.py"
_RESPONSES = f"{_COMPAT}/test_responses.py"
_COMPLETIONS = "tests/server/api/test_completion_requests.py"
_CHAT = "tests/server/api/test_chat_requests.py"
_ADMISSION = "tests/server/work/test_admission.py"
_STREAMS = "tests/server/work/test_streams.py"
_EMBEDDINGS = "tests/server/api/test_embeddings.py"

_STREAMING = (
    fault(
        "does not end a stream of chunks with [DONE]",
        "server/work/streams.py",
        "lambda error: event(error_body(error)), last=_DONE)",
        "lambda error: event(error_body(error)))",
        f"{_STREAMS}::test_chat_chunks_to_the_letter",
    ),
    fault(
        "omits the null usage from chunks before the last one",
        "server/work/streams.py",
        '            members.setdefault("usage", None)\n',
        "            pass\n",
        f"{_STREAMS}::test_usage_comes_last_and_alone",
    ),
    fault(
        "sends events without names",
        "server/work/streams.py",
        'kind = f"event: {name}\\n".encode() if name else b""',
        'kind = b""',
        f"{_CONTRACT}::test_a_whole_answer_and_a_stream_say_what_the_model_said",
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
        "            if num_open:\n                await stream.flush()\n",
        "            if not num_open:\n                await stream.flush()\n",
        f"{_ADMISSION}::test_a_stream_past_its_deadline_ends_with_an_error_event",
    ),
    fault(
        "does not cancel the requests of a disconnected client",
        "server/work/bridge.py",
        "    finally:\n        for handle in handles:\n            handle.cancel()\n",
        "    finally:\n        pass\n",
        f"{_COMPAT}/test_leaving.py::test_a_client_that_leaves_frees_all_within_a_step",
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
        "tests/server/api/test_logprobs.py::test_a_token_in_text_that_is_held_back_waits_for_it",
    ),
    fault(
        "Anthropic: sends no ping in a silent stream",
        "server/api/compat/anthropic/messages.py",
        "super().__init__(state, chat, pings=True)",
        "super().__init__(state, chat)",
        "tests/server/api/test_progress.py::test_a_silent_stream_of_messages_has_pings",
    ),
)

_OPENAI = (
    fault(
        "counts the prompt once for each choice",
        "server/api/usage.py",
        "prompt = sum(result.prompt_tokens for result in firsts)",
        "prompt = sum(result.prompt_tokens for result in results)",
        f"{_COMPLETIONS}::test_figures_count_a_prompt_once_and_times_from_its_arrival",
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
        f"{_COMPLETIONS}::test_seeds_repeat_and_choices_of_a_seed_differ",
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
        f"{_COMPLETIONS}::test_sixteen_tokens_unless_told_otherwise",
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
        "room = min(context, pool + 1) - num_prompt_tokens",
        "room = min(context + 1, pool + 1) - num_prompt_tokens",
        f"{_CHAT}::test_without_a_limit_the_answer_may_fill_what_there_is",
    ),
    fault(
        "does not treat a developer's message as the system's",
        "server/api/schemas/chat.py",
        '"system" if self.role == "developer" else self.role',
        "self.role",
        "tests/server/api/test_schemas.py::test_a_developer_s_message_is_the_system_s",
    ),
    fault(
        "ignores top_logprobs without logprobs",
        "server/api/schemas/chat.py",
        "if self.top_logprobs and not self.logprobs:",
        "if self.top_logprobs and self.logprobs is False:",
        f"{_CONTRACT}::test_bad_fields_are_refused_by_name",
    ),
    # Responses.
    fault(
        "reports a truncated response as completed",
        "server/api/compat/responses/writer.py",
        'return "incomplete" if reason == "length" else "completed"',
        'return "completed"',
        f"{_CONTRACT}::test_an_answer_cut_short_says_so",
    ),
    fault(
        "stores a response although store is false",
        "server/api/routes/responses.py",
        "keep if body.store is not False else None",
        "keep",
        f"{_RESPONSES}::test_store_false_keeps_nothing",
    ),
    fault(
        "gives all events of a response the same number",
        "server/api/compat/responses/writer.py",
        "        self._number += 1\n",
        "",
        f"{_CONTRACT}::test_a_whole_answer_and_a_stream_say_what_the_model_said",
    ),
    fault(
        "has_more is true on the last page of a response's items",
        "server/api/routes/responses.py",
        '"has_more": len(items) > limit',
        '"has_more": len(items) >= limit',
        f"{_RESPONSES}::test_a_remembered_response_is_shown_and_forgotten",
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
        "tests/server/work/test_stored_responses.py::test_bytes_are_bounded_and_the_least_used_go_first",
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
        f"{_ANTHROPIC}::test_calls_results_and_thoughts",
    ),
    fault(
        "Anthropic: reports a message with a call as end_turn",
        "server/api/compat/anthropic/writer.py",
        'return {"stop_reason": "tool_use", "stop_sequence": None}',
        'return {"stop_reason": "end_turn", "stop_sequence": None}',
        f"{_CONTRACT}::test_a_whole_answer_and_a_stream_say_what_the_model_said",
    ),
    fault(
        "Anthropic: counts tokens after the last full block as cached",
        "server/api/compat/anthropic/writer.py",
        "max(0, length // size * size - cached)",
        "max(0, length - cached)",
        f"{_MARKED}::test_what_is_marked_is_pinned_and_counted",
    ),
    fault(
        "Anthropic: sends thinking to a client that asks to omit it",
        "server/api/compat/anthropic/writer.py",
        'body.thinking is None or body.thinking.display != "omitted"',
        "True",
        f"{_ANTHROPIC}::test_thoughts_can_be_left_out_of_what_is_shown",
    ),
    fault(
        "Anthropic: cache_control of 1h holds for 5 minutes",
        "server/api/compat/anthropic/blocks.py",
        '_SECONDS = {"5m": 300.0, "1h": 3600.0}',
        '_SECONDS = {"5m": 300.0, "1h": 300.0}',
        f"{_MARKED}::test_an_hour_and_five_minutes",
    ),
    # Ollama.
    fault(
        "Ollama: joins the lines of a stream",
        "server/api/compat/ollama/writer.py",
        'self._stream.add(dumps(line) + b"\\n")',
        "self._stream.add(dumps(line))",
        f"{_CONTRACT}::test_a_whole_answer_and_a_stream_say_what_the_model_said",
    ),
    fault(
        "Ollama: reports durations in milliseconds",
        "server/api/compat/ollama/writer.py",
        "return round(milliseconds * 1e6)",
        "return round(milliseconds)",
        f"{_CONTRACT}::test_a_whole_answer_and_a_stream_say_what_the_model_said",
    ),
    fault(
        "Ollama: treats num_predict -1 as a limit",
        "server/api/compat/ollama/translate.py",
        '"max_tokens": None if limit is None or limit <= 0 else limit,',
        '"max_tokens": limit,',
        f"{_CONTRACT}::test_fields_that_mean_nothing_here_are_taken",
    ),
    fault(
        "Ollama: keep_alive -1 unloads a model at once",
        "server/api/compat/ollama/durations.py",
        "return math.inf if seconds < 0 else float(seconds)",
        "return float(max(0, seconds))",
        "tests/server/models/test_dialects.py::test_the_last_request_says_how_long_a_model_stays",
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
        f"{_CONTRACT}::test_a_whole_answer_and_a_stream_say_what_the_model_said",
    ),
    # llama.cpp.
    fault(
        "llama.cpp: reports a stop string as the end token",
        "server/api/compat/llama_cpp/writer.py",
        '"limit" if reason == "length" else "word" if word else "eos"',
        '"limit" if reason == "length" else "eos"',
        f"{_LLAMA_CPP}::test_what_ended_an_answer_is_told",
    ),
    fault(
        "llama.cpp: repeats all earlier token ids in each piece",
        "server/api/compat/llama_cpp/writer.py",
        "begin = self._told_ids",
        "begin = 0",
        f"{_CONTRACT}::test_a_whole_answer_and_a_stream_say_what_the_model_said",
    ),
    fault(
        "llama.cpp: puts an infill's suffix first",
        "server/api/compat/llama_cpp/translate.py",
        '[[before], body.input_prefix + (body.prompt or ""), [between], body.input_suffix]',
        '[[before], body.input_suffix, [between], body.input_prefix + (body.prompt or "")]',
        f"{_LLAMA_CPP}::test_infill_is_prefix_suffix_and_middle",
    ),
    fault(
        "llama.cpp: drops an infill's last text instead of its first",
        "server/api/compat/llama_cpp/translate.py",
        "reversed(self._extra)",
        "self._extra",
        f"{_INFILL}::test_texts_that_do_not_fit_are_left_out",
    ),
    fault(
        "llama.cpp: shrinks the room for other texts with the local text",
        "server/api/compat/llama_cpp/translate.py",
        "max(len(local), min(_LOCAL, context // 2))",
        "len(local)",
        f"{_INFILL}::test_texts_that_do_not_fit_are_left_out",
    ),
    fault(
        "llama.cpp: encodes special tokens in files as special in an infill",
        "server/api/compat/llama_cpp/translate.py",
        'tokenizer.encode_framed("", piece, "")',
        "tokenizer.encode(piece, False)",
        f"{_INFILL}::test_special_tokens_in_files_are_text",
    ),
    fault(
        "llama.cpp: does not end an infill at a token of its layout",
        "server/api/compat/llama_cpp/translate.py",
        "None if body.ignore_eos else stop_ids",
        "None",
        f"{_INFILL}::test_a_token_of_the_layout_ends_the_answer",
    ),
    # Errors.
    fault(
        "uses OpenAI's error shape on subpaths of Anthropic's API",
        "server/error_shapes.py",
        "_BY_PATH.get(api, _openai)",
        "_BY_PATH.get(path, _openai)",
        "tests/server/test_error_shapes.py::test_an_error_has_the_shape_of_its_api",
    ),
)

FAULTS = (*_STREAMING, *_OPENAI, *_COMPAT_APIS)
