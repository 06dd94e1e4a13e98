"""Faults in speculative decoding, mainly of models with recurrent state."""

from __future__ import annotations

from faults.fault import faults

_ACCEPTED = "engine/spec_decode/acceptance.py"
_STATES = "runners/native/recurrent_layers.py"
_BATCH = "engine/schedule/step_batch.py"
_CONV = "kernels/program/states/conv.py"
_SCAN = "kernels/program/states/scan.py"
_OF_MIXERS = "tests/kernels/program/states/test_mixers.py"
_LENGTHS = "engine/spec_decode/draft_lengths.py"
_OF_LENGTHS = "tests/engine/spec_decode/test_draft_lengths.py"
_OF_DRAFTS = "tests/engine/spec_decode/test_acceptance.py"
_OF_MODELS = "tests/engine/spec_decode/test_model_drafts.py"
_OF_HEADS = "tests/engine/spec_decode/test_mtp_head.py"
_OF_ASSISTANTS = "tests/engine/spec_decode/test_native_assistant.py"
_OF_SAVING = "tests/engine/offload/test_draft_saving.py"
_OF_BUDGET = "tests/engine/memory/test_state_budget.py"

FAULTS = faults(
    (
        "MTP head: loses its context where a draft crosses a block",
        "engine/spec_decode/mtp_head.py",
        "first = min(rows.start, rows.states.stop) // self.block_size",
        "first = rows.start // self.block_size",
        _OF_HEADS,
    ),
    (
        "MTP head: stays blind before the last tokens of an earlier request",
        "engine/spec_decode/mtp_head.py",
        "start = self._connected(table, (states.first + 1) // self.block_size)",
        "start = states.first + 1",
        _OF_HEADS,
    ),
    (
        "MTP head: does not fill prompts that are computed in advance",
        "engine/spec_decode/speculation.py",
        "else models.filling_of(request)",
        "else None",
        _OF_HEADS,
    ),
    (
        "MTP head: states of the last tokens of a warmed prompt wait for a draft",
        "engine/spec_decode/model_drafts.py",
        "most = 0 if draft.only_fills else _KEPT_STATES",
        "most = _KEPT_STATES",
        _OF_HEADS,
    ),
    (
        "MTP head: fills documents, for which it never drafts",
        "engine/tasks/documents.py",
        "fills_drafter=False,",
        "",
        "tests/engine/memory/test_mtp_plan.py::test_the_head_computes_kv_of_warmed_prompts",
    ),
    (
        "MTP head: computes KV that a tier is loading",
        "engine/spec_decode/mtp_head.py",
        " or self._drafted.awaits([block_id])",
        "",
        _OF_HEADS,
    ),
    (
        "MTP head: gives up a prompt of which another request fills a block",
        "engine/spec_decode/model_drafts.py",
        "runs = self._without(turn, runs, taken)",
        "pass",
        _OF_HEADS,
    ),
    (
        "MTP head: joins a token with the token's own state",
        "engine/spec_decode/token_states.py",
        "found[first - start + 1 :][: len(rows)] = rows",
        "found[first - start + 1 :][: len(rows) - 1] = rows[1:]",
        _OF_HEADS,
    ),
    (
        "MTP head: computes no KV of a pass's last token",
        "engine/spec_decode/model_drafts.py",
        "ModelTurn(work.sequence, draft, states.stop)",
        "ModelTurn(work.sequence, draft)",
        _OF_HEADS,
    ),
    (
        "MTP head: keeps hidden states of rejected draft tokens",
        "engine/spec_decode/token_states.py",
        "self.stop = min(stop, self.first + len(self._rows))",
        "self.stop = self.first + len(self._rows)",
        _OF_HEADS,
    ),
    (
        "assistant: sees a position more than its window",
        "models/config/mtp_spec.py",
        "window=max(layer.window - 1, 0)",
        "window=layer.window",
        "tests/runners/native/test_assistant.py",
    ),
    (
        "assistant: moves on by a position with each draft token",
        "engine/spec_decode/assistant.py",
        "dataclasses.replace(batch, positions=computed, layout=layout)",
        "dataclasses.replace(batch, layout=layout)",
        _OF_ASSISTANTS,
    ),
    (
        "assistant: drafts after a full block of a quantized pool",
        "engine/spec_decode/assistant.py",
        "if is_full and self._backend.spec.is_quantized:",
        "if False:",
        _OF_ASSISTANTS,
    ),
    (
        "assistant: keeps the hidden states of draft tokens alone",
        "engine/spec_decode/model_drafts.py",
        "return work.stop - work.certain_stop + 1 if is_last else 0",
        "return work.stop - work.certain_stop",
        _OF_ASSISTANTS,
    ),
    (
        "native runner: returns hidden states of other rows",
        "runners/native/runner.py",
        "self._buffers.normed(len(both))[np.searchsorted(both, states)]",
        "self._buffers.normed(len(both))[: len(states)]",
        "tests/runners/native/test_recurrent_layers.py::test_rows_may_want_logits_and_states",
    ),
    (
        "draft model: verifies a draft below the minimum length",
        "engine/spec_decode/speculation.py",
        "tokens = _long_enough(turn.sequence.request, turn.tokens)",
        "tokens = turn.tokens",
        _OF_MODELS,
    ),
    (
        "verifies a draft that the pool's room cuts below the minimum length",
        "engine/spec_decode/speculation.py",
        "_long_enough(sequence.request, tokens[:room])",
        "tokens[:room]",
        "tests/engine/spec_decode/test_speculation.py",
    ),
    (
        "drafts: recurrent state advances one row too many",
        _STATES,
        "pool, own.tolist(),",
        "pool, np.minimum(own + 1, drafted[which]).tolist(),",
        _OF_MIXERS,
    ),
    (
        "drafts: recurrent state advances one row too few",
        _STATES,
        "pool, own.tolist(),",
        "pool, (own - 1).tolist(),",
        _OF_MIXERS,
    ),
    (
        "drafts: recurrent state advances over another sequence's rows",
        _STATES,
        "pool, certain, drafts)",
        "pool, certain, drafts[::-1])",
        _OF_MIXERS,
    ),
    (
        "drafts: conv state includes unverified tokens",
        _CONV,
        "rows = ls.of_sequence(job, sequence, ls.S_CERTAIN)",
        "rows = ls.of_sequence(job, sequence, ls.S_ROWS)",
        _OF_MIXERS,
    ),
    (
        "drafts: recurrent state includes an unverified token",
        _SCAN,
        "if row == certain:",
        "if row == certain + 1:",
        _OF_MIXERS,
    ),
    (
        "drafts: stores the input instead of the gates",
        _CONV,
        "copy_floats(gates, num_gates",
        "copy_floats(row, num_gates",
        _OF_MIXERS,
    ),
    (
        "drafts: accepts one token too many",
        _ACCEPTED,
        "accepted[i] = stop - start",
        "accepted[i] = min(stop - start + 1, work.num_drafted)",
        _OF_DRAFTS,
    ),
    (
        "drafts: finishes a request before its recurrent state is complete",
        _ACCEPTED,
        "        return None\n",
        "        return reason\n",
        _OF_DRAFTS,
    ),
    (
        "drafts: saves snapshots one token early",
        _ACCEPTED,
        "[(i, rows, slot) for rows, slot in",
        "[(i, max(1, rows - 1), slot) for rows, slot in",
        _OF_DRAFTS,
    ),
    (
        "publishes drafts of requests that store nothing",
        "engine/schedule/scheduler.py",
        "publish=sequence.request.publishes",
        "publish=True",
        _OF_DRAFTS,
    ),
    (
        "publishes blocks of baseline requests",
        "engine/request/request.py",
        "if self.stores_nothing or self.mode is GenerationMode.BASELINE:",
        "if self.stores_nothing:",
        "tests/engine/schedule/test_random_schedules.py",
    ),
    (
        "proposes drafts from other requests' history to baseline requests",
        "engine/spec_decode/speculation.py",
        "reads_history=request.uses_cache",
        "reads_history=True",
        "tests/engine/spec_decode/test_prompt_lookup.py",
    ),
    (
        "draft model: keeps the record of its KV after an error",
        "engine/spec_decode/model_drafts.py",
        "            self.model.stop()\n",
        "",
        _OF_MODELS,
    ),
    (
        "draft model: a reassigned block keeps the KV of its old tokens",
        "kvcache/manager.py",
        "            self.drafted.empty(block_id)",
        "            pass",
        _OF_MODELS,
    ),
    (
        "draft model: restores KV of another draft model",
        "kvcache/drafted_blocks.py",
        "+ self._digest + prefix_hash",
        "+ prefix_hash",
        _OF_SAVING,
    ),
    (
        "draft model: loads KV into a block that holds other tokens",
        "kvcache/drafted_blocks.py",
        "        self.arriving.pop(block_id, None)\n",
        "",
        _OF_SAVING,
    ),
    (
        "draft model: a damaged record shifts the records after it",
        "engine/offload/draft_saving.py",
        "enumerate(blocks[place] for place in chunk.places)",
        "enumerate(blocks[: len(chunk.places)])",
        _OF_SAVING,
    ),
    (
        "draft model: never stores KV that is computed later",
        "engine/offload/draft_saving.py",
        "itertools.chain(block_ids, self._drafted.drain_full())",
        "itertools.chain(block_ids, self._drafted.drain_full()[:0])",
        _OF_SAVING,
    ),
    (
        "draft model: counts rejected tokens as filled",
        "engine/spec_decode/model_drafts.py",
        "stop = min(draft.stop, computed)",
        "stop = draft.stop",
        _OF_MODELS,
    ),
    (
        "drafts: treats all tokens of a pass as verified",
        _BATCH,
        "certain=np.array([one.certain_stop - one.start",
        "certain=np.array([one.stop - one.start",
        _OF_DRAFTS,
    ),
    (
        "drafts: proposes more tokens than there are draft rows",
        "engine/spec_decode/speculation.py",
        "budget = min(budget, self._manager.recurrent.num_draft_rows)",
        "pass",
        _OF_DRAFTS,
    ),
    (
        "drafts: leaves draft rows out of the state budget",
        "engine/memory/state_budget.py",
        "max(0, config.max_state_bytes - draft_bytes) // size",
        "config.max_state_bytes // size",
        _OF_BUDGET,
    ),
    (
        "drafts: refuses to start an engine whose draft rows do not fit",
        "engine/memory/state_budget.py",
        "range(DEFAULT_DRAFT_TOKENS, least - 1, -1)",
        "(DEFAULT_DRAFT_TOKENS,)",
        _OF_BUDGET,
    ),
    (
        "drafts: proposes more tokens than the state budget allows",
        "engine/spec_decode/speculation.py",
        "else min(asked, most)",
        "else asked",
        _OF_BUDGET,
    ),
    (
        "drafts: rejected tokens cost nothing",
        _LENGTHS,
        "credit.spend(float(added[best]))",
        "pass",
        _OF_LENGTHS,
    ),
    (
        "drafts: one sequence's gain counts for the whole batch",
        _LENGTHS,
        "np.exp(made / self.num_rows)",
        "np.exp(made)",
        _OF_LENGTHS,
    ),
    (
        "drafts: passes of the draft model cost nothing",
        _LENGTHS,
        "seconds[index] = added[num_rows.get(place, 0)]",
        "seconds[index] = 0.0",
        _OF_LENGTHS,
    ),
    (
        "drafts: never measures the time without draft tokens again",
        _LENGTHS,
        "credit.num_drafting >= _PLAIN_EVERY",
        "credit.num_drafting < 0",
        _OF_LENGTHS,
    ),
    (
        "drafts: counts a further row as the next one alone",
        _LENGTHS,
        "numbers[: len(seconds) - added - 1]).min()",
        "numbers[: len(seconds) - added - 1])[0]",
        _OF_LENGTHS,
    ),
    (
        "drafts: counts an interrupted pass at its full duration",
        "engine/spec_decode/pass_costs.py",
        "min(max(error, -_CLIP_LOW * deviation), _CLIP * deviation)",
        "error",
        "tests/engine/spec_decode/test_pass_costs.py",
    ),
)
