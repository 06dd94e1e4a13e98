"""Faults in non-prefix KV reuse."""

from __future__ import annotations

from faults.fault import faults

_SCAN = "kernels/span_scan.py"
_SPANS = "reuse/span_index.py"
_CUTTING = "reuse/chunking.py"
_FINDING = "tests/reuse/test_span_search.py"
_OFFERED = "tests/reuse/test_span_index.py"
_CUT = "tests/reuse/test_chunking.py"
_TURNING = "tests/kernels/attention/test_turning.py"
_UNITS = "kernels/attention/units.py"
_POOL = "kvcache/table_spans.py"
_PLAN = "reuse/span_plan.py"
_PROBE = "reuse/deviation_scoring.py"
_SHARING = "tests/engine/test_reuse.py"
_WARMING = "tests/engine/tasks/test_documents.py"
_SCORING = "tests/engine/schedule/test_scoring_pace.py"

FAULTS = faults(
    (
        "accepts a chunk by its hash alone",
        _SCAN,
        "if may_be and _num_same(tables, search, block, place) == tables.block_size:",
        "if may_be:",
        _FINDING,
    ),
    (
        "matches blocks under another root",
        _SCAN,
        " and load_i64(tables.roots + 8 * block) == search.root",
        "",
        _FINDING,
    ),
    (
        "extends a run back before the start",
        _SCAN,
        "min(size, place - floor)",
        "min(size, place)",
        _FINDING,
    ),
    (
        "extends a run back into the previous run",
        _SCAN,
        "        floor = place = end",
        "        place = end",
        _FINDING,
    ),
    (
        "does not prefer the longest of several candidates",
        _SCAN,
        "if stop - begin > end - first or",
        "if best == NONE or",
        _FINDING,
    ),
    (
        "ignores context between candidates of equal length",
        _SCAN,
        "== end - first and stored > context)",
        "== 0)",
        _FINDING,
    ),
    (
        "tries only the newest block with a hash",
        _SCAN,
        "        block = _link(tables.older, block)\n    return best",
        "        block = NONE\n    return best",
        _FINDING,
    ),
    (
        "does not extend a run into a child block that was not a candidate",
        _SCAN,
        "if most < size and child != NONE and",
        "if most < 0 and",
        _FINDING,
    ),
    (
        "keeps a run below the minimum length",
        _SCAN,
        "end - first < search.min_tokens:",
        "end == first:",
        _FINDING,
    ),
    (
        "reuses the KV of a prompt's last token",
        "reuse/span_search.py",
        "stop = len(tokens) - 1",
        "stop = len(tokens)",
        _FINDING,
    ),
    (
        "rotates keys by a delta of the wrong sign",
        "reuse/span_search.py",
        "prompt_start - context, context",
        "context - prompt_start, context",
        _FINDING,
    ),
    (
        "leaves a withdrawn block in the span index",
        _SPANS,
        "        self._leave_group(block_id)\n",
        "",
        _FINDING,
        _OFFERED,
    ),
    (
        "a restored block loses its children",
        _SPANS,
        "self._set_parent(self._orphans.get(serial, NONE), block_id)",
        "pass",
        _FINDING,
        _OFFERED,
    ),
    (
        "ends a sentence inside a number",
        _CUTTING,
        "end and (end[1] or space_left or space_right)",
        "end",
        _CUT,
    ),
    (
        "ranks a paragraph's end no higher than a sentence's",
        _CUTTING,
        '.count("\\n") >= 2',
        '.count("\\n") >= 99',
        _CUT,
    ),
    ("does not rotate queries by the delta", _UNITS, "shift - item.delta", "shift", _TURNING),
    (
        "attends to a sequence's own block with rotated queries",
        _UNITS,
        "unit.query)",
        "unit.scores)",
        _TURNING,
    ),
    (
        "takes no reference to a shared block",
        _POOL,
        "            self._pool.touch(block_id)\n        taken",
        "            pass\n        taken",
        _SHARING,
    ),
    (
        "keeps claims on blocks after the start of a reused span",
        _POOL,
        "            self._claims.drop(table, index)",
        "            pass",
        "tests/reuse/test_deviation_scoring.py",
    ),
    (
        "ends a recomputed segment inside a block",
        _PLAN,
        "first += (position - first) % block_size",
        "pass",
        _SHARING,
    ),
    (
        "does not recompute chunk boundaries",
        _PLAN,
        "run.prompt_start + num_boundary_tokens",
        "run.prompt_start",
        "tests/reuse/test_span_plan.py",
    ),
    (
        "recomputes the blocks that deviate least",
        _PROBE,
        "(-self._weights[start], start)",
        "(self._weights[start], start)",
        "tests/reuse/test_deviation_scoring.py",
    ),
    (
        "scores reused spans beyond the step's limit",
        "engine/core.py",
        "self._prober.look(sequence, limit)",
        "self._prober.look(sequence, 1 << 20)",
        _SCORING,
    ),
    (
        "scores the spans of a request that is ending",
        "engine/core.py",
        "if self._is_ending(sequence):\n            return 0.0",
        "if False:\n            return 0.0",
        _SCORING,
    ),
    (
        "does not charge tenants for scoring",
        "engine/schedule/scheduler.py",
        "            self._fairness.charge_scoring(scored, num_scored)\n",
        "",
        _SCORING,
    ),
    (
        "queues all documents of a warm call at once",
        "engine/tasks/documents.py",
        "self._window = 2 * parts.max_num_seqs",
        "self._window = 1 << 30",
        _WARMING,
    ),
    (
        "puts inputs that are submitted later before requests that came first",
        "engine/tasks/blocking_calls.py",
        "submitted.append(self._builder.renumbered(request))",
        "submitted.append(request)",
        _WARMING,
    ),
    (
        "counts a warm call as one sequence",
        "server/api/routes/cache.py",
        "places = min(_num_chunks(engine.config, body, estimates), state.admission.batch)",
        "places = 1",
        "tests/server/api/test_warm_documents.py",
    ),
)
