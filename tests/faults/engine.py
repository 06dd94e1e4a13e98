"""Faults in the engine."""

from __future__ import annotations

from faults.fault import fault

_SAMPLING = ("tests/engine/test_sampling.py", "tests/engine/schedule/test_random_schedules.py")

FAULTS = (
    fault(
        "models that leave keep their overhead in the bound of the process",
        "server/models/loader.py",
        "            served.num_bytes = served.overhead = 0\n            served.num_unloads",
        "            served.num_bytes = 0\n            served.num_unloads",
        "tests/server/models/test_on_demand.py",
    ),
    fault(
        "the pool may exceed what max_memory leaves",
        "engine/memory/process.py",
        "    return min(beside, rest - _history(rest))\n",
        "    return beside\n",
        "tests/engine/memory/test_process.py",
    ),
    fault(
        "max_memory leaves out the buffers of passes",
        "engine/memory/process.py",
        "return self.resident + self.buffers",
        "return self.resident",
        "tests/engine/memory/test_process.py",
    ),
    fault(
        "a refusal of max_memory names a context that does not fit",
        "engine/memory/process.py",
        "bounded = dataclasses.replace(info, max_context=num_blocks * block_size)",
        "bounded = dataclasses.replace(info, max_context=num_blocks)",
        "tests/engine/memory/test_process.py",
    ),
    fault(
        "requests may be longer than max_model_len",
        "engine/build.py",
        "return dataclasses.replace(info, max_context=bounded_context(info.max_context, config))",
        "return info",
        "tests/engine/memory/test_check.py",
    ),
    fault(
        "a stall is logged at every step",
        "engine/stall_watchdog.py",
        "            self._is_logged = True\n",
        "",
        "tests/engine/test_stall_watchdog.py",
    ),
    fault(
        "only the first stall is logged",
        "engine/stall_watchdog.py",
        "        self._began = None\n        self._is_logged = False\n\n    def idled",
        "        self._began = None\n\n    def idled",
        "tests/engine/test_stall_watchdog.py",
    ),
    fault(
        "a mask that failed stops the engine while it plans",
        "engine/grammar/masks.py",
        "        if self._pending is not None and self._pending.exception() is not None:\n"
        "            return []\n",
        "        self._settle()\n",
        "tests/engine/grammar/test_masks.py",
    ),
    fault(
        "a grammar that grew too large is the server's error",
        "engine/grammar/masks.py",
        "            raise RequestError(\n                f\"the grammar's parser failed",
        "            raise ValueError(\n                f\"the grammar's parser failed",
        "tests/server/api/compat/test_contract.py::test_a_grammar_that_grows_too_large_is_an_error_of"
        "_its_request",
    ),
    fault(
        "slow masks compete with forward passes",
        "engine/grammar/compiler.py",
        ", initializer=_lower_priority",
        "",
        "tests/engine/grammar/test_masks.py",
    ),
    fault(
        "each choice is an alternative of the parser",
        "engine/grammar/compiler.py",
        "return LLMatcher.grammar_from_lark(_choice_rules(grammar.text))",
        'return grammar_from("choice", grammar.text)',
        "tests/server/api/test_answer_format.py::test_as_many_choices_as_are_allowed",
    ),
    fault(
        "prefixes that arrived keep places from more urgent requests",
        "engine/schedule/scheduler.py",
        "self.loads.num_arriving_besides(sequence)",
        "len(self.loads) - (self.loads.of(sequence) is not None)",
        "tests/engine/schedule/test_random_schedules.py",
    ),
    fault(
        "a second choice counts as a second call",
        "engine/schedule/retention.py",
        "known.began == began:",
        "False:",
        "tests/engine/schedule/test_retention.py",
    ),
    fault(
        "rope positions off by one after a cut",
        "engine/schedule/step_batch.py",
        "positions += range(one.start, one.stop)",
        "positions += range(one.start + (one.start > 0), one.stop + (one.start > 0))",
        "tests/engine/test_end_to_end.py",
    ),
    fault(
        "temperature ignored",
        "engine/sampling.py",
        "/ temperature)",
        "/ 1.0)",
        *_SAMPLING,
    ),
    fault(
        "in a batch the first request's sampling counts for all",
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
        "infill merges into the shorter token",
        "engine/samplers/chain.py",
        "(long, short) if found[long] > found[short] else (short, long)",
        "(short, long)",
        "tests/engine/samplers/test_chain.py",
    ),
    fault(
        "infill ends a text only where its end is among the candidates",
        "engine/samplers/chain.py",
        "        if not num_texts:\n            _end(left, ends)\n            return\n",
        "        if not num_texts:\n            return\n",
        "tests/engine/samplers/test_chain.py",
    ),
    fault(
        "cancel is not heard",
        "engine/core.py",
        'reason="cancelled")',
        'reason="cancelled") if self._closing else None',
        "tests/engine/test_lifecycle.py",
    ),
    fault(
        "equal prefixes in flight are computed twice",
        "engine/schedule/scheduler.py",
        "sequence.awaited_hash = awaited",
        "sequence.awaited_hash = None",
        "tests/engine/schedule/test_random_schedules.py",
    ),
    fault(
        "NaN in the logits goes unseen",
        "engine/core.py",
        "if not all(map(",
        "if False and all(map(",
        "tests/engine/test_lifecycle.py",
    ),
    fault(
        "only one EOS token is known",
        "engine/build.py",
        "eos = frozenset(defaults.eos_token_ids)",
        "eos = frozenset(defaults.eos_token_ids[:1])",
        "tests/engine/test_per_request.py",
    ),
    fault(
        "deadlines are not kept",
        "engine/core.py",
        "        self._expire()\n",
        "",
        "tests/engine/test_terms.py",
    ),
    fault(
        "blocks freed while they were open keep their buffers",
        "engine/core.py",
        "self._backend.release_blocks([block for block in self._kept if block not in wanted])",
        "pass",
        "tests/engine/test_native_failures.py",
    ),
)
