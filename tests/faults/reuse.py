"""Faults in reuse at other positions."""

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

FAULTS = faults(
    (
        "a hash suffices",
        _SCAN,
        "if may_be and _num_same(tables, search, block, place) == tables.block_size:",
        "if may_be:",
        _FINDING,
    ),
    (
        "roots are not told apart",
        _SCAN,
        " and load_i64(tables.roots + 8 * block) == search.root",
        "",
        _FINDING,
    ),
    (
        "a run reaches back before the start",
        _SCAN,
        "min(size, place - floor)",
        "min(size, place)",
        _FINDING,
    ),
    (
        "a run reaches back into the one before",
        _SCAN,
        "        floor = place = end",
        "        place = end",
        _FINDING,
    ),
    (
        "the shortest of the candidates wins",
        _SCAN,
        "if stop - begin > end - first or",
        "if best == NONE or",
        _FINDING,
    ),
    ("context decides nothing", _SCAN, "== end - first and stored > context)", "== 0)", _FINDING),
    (
        "no more than the newest block is tried",
        _SCAN,
        "        block = _link(tables.older, block)\n    return best",
        "        block = NONE\n    return best",
        _FINDING,
    ),
    (
        "only children that are tried go on",
        _SCAN,
        "if most < size and child != NONE and",
        "if most < 0 and",
        _FINDING,
    ),
    (
        "a run that is too short is kept",
        _SCAN,
        "end - first < search.min_tokens:",
        "end == first:",
        _FINDING,
    ),
    (
        "the last token is covered",
        "reuse/span_search.py",
        "stop = len(tokens) - 1",
        "stop = len(tokens)",
        _FINDING,
    ),
    (
        "delta of the wrong sign",
        "reuse/span_search.py",
        "prompt_start - context, context",
        "context - prompt_start, context",
        _FINDING,
    ),
    (
        "a withdrawn block stays findable",
        _SPANS,
        "        self._leave_group(block_id)\n",
        "",
        _FINDING,
        _OFFERED,
    ),
    (
        "a block that comes back forgets its children",
        _SPANS,
        "self._set_parent(self._orphans.get(serial, NONE), block_id)",
        "pass",
        _FINDING,
        _OFFERED,
    ),
    (
        "a sentence ends inside a number",
        _CUTTING,
        "end and (end[1] or space_left or space_right)",
        "end",
        _CUT,
    ),
    (
        "a paragraph is no better than a sentence",
        _CUTTING,
        '.count("\\n") >= 2',
        '.count("\\n") >= 99',
        _CUT,
    ),
    ("queries see no delta", _UNITS, "shift - item.delta", "shift", _TURNING),
    ("own block meets turned queries", _UNITS, "unit.query)", "unit.scores)", _TURNING),
    (
        "a shared block may be handed out",
        _POOL,
        "            self._pool.touch(block_id)\n        taken",
        "            pass\n        taken",
        _SHARING,
    ),
    (
        "a promise behind a span stays",
        _POOL,
        "            self._claims.drop(table, index)",
        "            pass",
        "tests/reuse/test_deviation_scoring.py",
    ),
    (
        "a stretch ends inside a block",
        _PLAN,
        "first += (position - first) % block_size",
        "pass",
        _SHARING,
    ),
    (
        "seams are not computed",
        _PLAN,
        "run.prompt_start + num_boundary_tokens",
        "run.prompt_start",
        "tests/reuse/test_span_plan.py",
    ),
    (
        "the least deviating blocks are computed",
        _PROBE,
        "(-self._weights[start], start)",
        "(self._weights[start], start)",
        "tests/reuse/test_deviation_scoring.py",
    ),
)
