"""Faults in the engine."""

from __future__ import annotations

from faults.fault import fault

_SAMPLING = ("tests/engine/test_sampling.py", "tests/engine/schedule/test_random_schedules.py")

FAULTS = (
    fault(
        "keeps an unloaded model's overhead in the process's memory limit",
        "server/models/loader.py",
        "            served.num_bytes = served.overhead = 0\n            served.num_unloads",
        "            served.num_bytes = 0\n            served.num_unloads",
        "tests/server/models/test_on_demand.py",
    ),
    fault(
        "sizes the pool beyond what max_memory leaves",
        "engine/memory/process.py",
        "    return min(beside, rest - _history(rest))\n",
        "    return beside\n",
        "tests/engine/memory/test_process.py",
    ),
    fault(
        "max_memory does not count the buffers of forward passes",
        "engine/memory/process.py",
        "return self.resident + self.buffers",
        "return self.resident",
        "tests/engine/memory/test_process.py",
    ),
    fault(
        "max_memory refusal suggests a context that does not fit",
        "engine/memory/process.py",
        "bounded = dataclasses.replace(info, max_context=num_blocks * block_size)",
        "bounded = dataclasses.replace(info, max_context=num_blocks)",
        "tests/engine/memory/test_process.py",
    ),
    fault(
        "accepts requests longer than max_model_len",
        "engine/build.py",
        "return dataclasses.replace(info, max_context=bounded_context(info.max_context, config))",
        "return info",
        "tests/engine/memory/test_check.py",
    ),
    fault(
        "logs a stall at every step",
        "engine/stall_watchdog.py",
        "            self._is_logged = True\n",
        "",
        "tests/engine/test_stall_watchdog.py",
    ),
    fault(
        "logs only the first stall",
        "engine/stall_watchdog.py",
        "        self._began = None\n        self._is_logged = False\n\n    def idled",
        "        self._began = None\n\n    def idled",
        "tests/engine/test_stall_watchdog.py",
    ),
    fault(
        "a failed grammar mask stops the engine during planning",
        "engine/grammar/masks.py",
        "        if self._pending is not None and self._pending.exception() is not None:\n"
        "            return []\n",
        "        self._settle()\n",
        "tests/engine/grammar/test_masks.py",
    ),
    fault(
        "reports a grammar that grows too large as a server error",
        "engine/grammar/masks.py",
        "            raise RequestError(\n                f\"the grammar's parser failed",
        "            raise ValueError(\n                f\"the grammar's parser failed",
        "tests/server/api/compat/test_contract.py::test_a_grammar_that_grows_too_large_is_an_error_of"
        "_its_request",
    ),
    fault(
        "computes slow masks at the priority of forward passes",
        "engine/grammar/compiler.py",
        ", initializer=_lower_priority",
        "",
        "tests/engine/grammar/test_masks.py",
    ),
    fault(
        "compiles each choice into an alternative of the parser",
        "engine/grammar/compiler.py",
        "return LLMatcher.grammar_from_lark(_choice_rules(grammar.text))",
        'return grammar_from("choice", grammar.text)',
        "tests/server/api/test_answer_format.py::test_as_many_choices_as_are_allowed",
    ),
    fault(
        "counts completed prefetches against more urgent requests",
        "engine/schedule/scheduler.py",
        "self.loads.num_arriving_besides(sequence)",
        "len(self.loads) - (self.loads.of(sequence) is not None)",
        "tests/engine/schedule/test_random_schedules.py",
    ),
    fault(
        "retention counts each sequence of a call as a separate call",
        "engine/schedule/retention.py",
        "known.began == began:",
        "False:",
        "tests/engine/schedule/test_retention.py",
    ),
    fault(
        "RoPE positions are off by one in later prefill chunks",
        "engine/schedule/step_batch.py",
        "positions += range(one.start, one.stop)",
        "positions += range(one.start + (one.start > 0), one.stop + (one.start > 0))",
        "tests/engine/test_end_to_end.py",
    ),
    fault(
        "ignores temperature",
        "engine/sampling.py",
        "/ temperature)",
        "/ 1.0)",
        *_SAMPLING,
    ),
    fault(
        "applies the first request's sampling to a whole batch",
        "engine/request_builder.py",
        "[resolve_sampling(item, options) for item in sampling]",
        "[resolve_sampling(sampling[0], options) for item in sampling]",
        "tests/engine/test_per_request.py",
    ),
    fault(
        "random numbers do not depend on the position",
        "engine/samplers/numbers.py",
        "np.array([seed, position], dtype=np.uint64)",
        "np.array([seed, 0], dtype=np.uint64)",
        *_SAMPLING,
    ),
    fault(
        "top_p keeps one token too many",
        "engine/sampling.py",
        'side="left")) + 1',
        'side="left")) + 2',
        *_SAMPLING,
    ),
    fault(
        "infill merges tokens into the shorter one",
        "engine/samplers/chain.py",
        "(long, short) if found[long] > found[short] else (short, long)",
        "(short, long)",
        "tests/engine/samplers/test_chain.py",
    ),
    fault(
        "infill does not end when no text candidate is left",
        "engine/samplers/chain.py",
        "        if not num_texts:\n            _end(left, ends)\n            return\n",
        "        if not num_texts:\n            return\n",
        "tests/engine/samplers/test_chain.py",
    ),
    fault(
        "ignores cancellation",
        "engine/core.py",
        'reason="cancelled")',
        'reason="cancelled") if self._closing else None',
        "tests/engine/test_lifecycle.py",
    ),
    fault(
        "computes equal in-flight prefixes twice",
        "engine/schedule/scheduler.py",
        "sequence.awaited_hash = awaited",
        "sequence.awaited_hash = None",
        "tests/engine/schedule/test_random_schedules.py",
    ),
    fault(
        "does not detect NaN in the logits",
        "engine/core.py",
        "if not all(map(",
        "if False and all(map(",
        "tests/engine/test_lifecycle.py",
    ),
    fault(
        "knows only the first EOS token",
        "engine/build.py",
        "eos = frozenset(defaults.eos_token_ids)",
        "eos = frozenset(defaults.eos_token_ids[:1])",
        "tests/engine/test_per_request.py",
    ),
    fault(
        "ignores deadlines",
        "engine/core.py",
        "        self._expire()\n",
        "",
        "tests/engine/test_terms.py",
    ),
    fault(
        "keeps the buffers of blocks that were freed while open",
        "engine/core.py",
        "self._backend.release_blocks([block for block in self._kept if block not in wanted])",
        "pass",
        "tests/engine/test_native_failures.py",
    ),
)
