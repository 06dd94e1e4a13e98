"""Faults in drafts of models with states."""

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
_OF_SAVING = "tests/engine/offload/test_draft_saving.py"
_OF_BUDGET = "tests/engine/memory/test_state_budget.py"

FAULTS = faults(
    (
        "a draft of a draft model that is too short is verified",
        "engine/spec_decode/speculation.py",
        "tokens = _long_enough(turn.sequence.request, turn.tokens)",
        "tokens = turn.tokens",
        _OF_MODELS,
    ),
    (
        "a draft that is cut to the pool may be too short",
        "engine/spec_decode/speculation.py",
        "_long_enough(sequence.request, tokens[:room])",
        "tokens[:room]",
        "tests/engine/spec_decode/test_speculation.py",
    ),
    (
        "drafts: one row too many is taken in",
        _STATES,
        "pool, own.tolist(),",
        "pool, np.minimum(own + 1, drafted[which]).tolist(),",
        _OF_MIXERS,
    ),
    (
        "drafts: one row too few is taken in",
        _STATES,
        "pool, own.tolist(),",
        "pool, (own - 1).tolist(),",
        _OF_MIXERS,
    ),
    (
        "drafts: rows of another sequence are taken in",
        _STATES,
        "pool, certain, drafts)",
        "pool, certain, drafts[::-1])",
        _OF_MIXERS,
    ),
    (
        "drafts: tails take in guesses",
        _CONV,
        "rows = ls.of_sequence(job, sequence, ls.S_CERTAIN)",
        "rows = ls.of_sequence(job, sequence, ls.S_ROWS)",
        _OF_MIXERS,
    ),
    (
        "drafts: matrices take in a guess",
        _SCAN,
        "if row == certain:",
        "if row == certain + 1:",
        _OF_MIXERS,
    ),
    (
        "drafts: gates are those of the input",
        _CONV,
        "copy_floats(gates, num_gates",
        "copy_floats(row, num_gates",
        _OF_MIXERS,
    ),
    (
        "drafts: one more is right",
        _ACCEPTED,
        "accepted[i] = stop - start",
        "accepted[i] = min(stop - start + 1, work.num_drafted)",
        _OF_DRAFTS,
    ),
    (
        "drafts: who is done ends before its state is",
        _ACCEPTED,
        "        return None\n",
        "        return reason\n",
        _OF_DRAFTS,
    ),
    (
        "drafts: states among them are kept one token early",
        _ACCEPTED,
        "[(i, rows, slot) for rows, slot in",
        "[(i, max(1, rows - 1), slot) for rows, slot in",
        _OF_DRAFTS,
    ),
    (
        "drafts: of who stores nothing are published",
        "engine/schedule/scheduler.py",
        "publish=sequence.request.publishes",
        "publish=True",
        _OF_DRAFTS,
    ),
    (
        "baseline: its blocks are published",
        "engine/request/request.py",
        "if self.stores_nothing or self.mode is GenerationMode.BASELINE:",
        "if self.stores_nothing:",
        "tests/engine/schedule/test_random_schedules.py",
    ),
    (
        "baseline: its drafts come from other requests",
        "engine/spec_decode/speculation.py",
        "reads_history=request.uses_cache",
        "reads_history=True",
        "tests/engine/spec_decode/test_drafting.py",
    ),
    (
        "draft model: a block keeps the KV of its former tokens",
        "kvcache/manager.py",
        "            self.drafted.empty(block_id)",
        "            pass",
        _OF_MODELS,
    ),
    (
        "draft model: KV of another one is restored",
        "kvcache/drafted_blocks.py",
        "+ self._digest + prefix_hash",
        "+ prefix_hash",
        _OF_SAVING,
    ),
    (
        "draft model: KV arrives in a block with other tokens",
        "kvcache/drafted_blocks.py",
        "        self.arriving.pop(block_id, None)\n",
        "",
        _OF_SAVING,
    ),
    (
        "draft model: a damaged record shifts those after it",
        "engine/offload/draft_saving.py",
        "enumerate(blocks[place] for place in chunk.places)",
        "enumerate(blocks[: len(chunk.places)])",
        _OF_SAVING,
    ),
    (
        "draft model: KV that is computed later is never stored",
        "engine/offload/draft_saving.py",
        "itertools.chain(block_ids, self._drafted.drain_full())",
        "itertools.chain(block_ids, self._drafted.drain_full()[:0])",
        _OF_SAVING,
    ),
    (
        "draft model: rejected tokens count as filled",
        "engine/spec_decode/model_drafts.py",
        "stop = min(draft.stop, computed)",
        "stop = draft.stop",
        _OF_MODELS,
    ),
    (
        "drafts: all tokens of a pass are certain",
        _BATCH,
        "certain=np.array([one.certain_stop - one.start",
        "certain=np.array([one.stop - one.start",
        _OF_DRAFTS,
    ),
    (
        "drafts: more than there are rows for",
        "engine/spec_decode/speculation.py",
        "budget = min(budget, self._manager.recurrent.num_draft_rows)",
        "pass",
        _OF_DRAFTS,
    ),
    (
        "drafts: their room does not count",
        "engine/memory/state_budget.py",
        "max(0, config.max_state_bytes - draft_bytes) // size",
        "config.max_state_bytes // size",
        _OF_BUDGET,
    ),
    (
        "drafts: they keep an engine from starting",
        "engine/memory/state_budget.py",
        "range(DEFAULT_DRAFT_TOKENS, -1, -1)",
        "(DEFAULT_DRAFT_TOKENS,)",
        _OF_BUDGET,
    ),
    (
        "drafts: more than there is room for are proposed",
        "engine/spec_decode/speculation.py",
        "else min(asked, most)",
        "else asked",
        _OF_BUDGET,
    ),
    (
        "drafts: rejected ones cost nothing",
        _LENGTHS,
        "credit.spend(float(added[best]))",
        "pass",
        _OF_LENGTHS,
    ),
    (
        "drafts: one sequence slows down the others",
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
        "drafts: an interrupted pass counts in full",
        "engine/spec_decode/pass_costs.py",
        "min(max(error, -_CLIP_LOW * deviation), _CLIP * deviation)",
        "error",
        "tests/engine/spec_decode/test_pass_costs.py",
    ),
)
