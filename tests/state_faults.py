"""Faults of `make mutants` in states beside keys and values: (name, file, old, new, tests)."""

from __future__ import annotations

from draft_faults import DRAFT_FAULTS

_SLOTS, _TABLES, _LOOKUP = "kvcache/state_slots.py", "kvcache/table_states.py", "kvcache/lookup.py"
_BATCH, _BUDGET, _BORDERS = "engine/batch.py", "engine/state_budget.py", "text/borders.py"
_OF_SLOTS, _OF_TABLES = "tests/kvcache/test_state_slots.py", "tests/kvcache/test_table_states.py"
_OF_SCHEDULES, _OF_BUDGET = "tests/engine/test_state_schedules.py", "tests/engine/test_state_budget.py"
_OF_BORDERS, _OF_TIERS = "tests/text/test_borders.py", "tests/engine/test_state_tiers.py"
_MOVER, _TWINS, _OF_TWINS = "tiers/mover.py", "kvcache/twins.py", "tests/kvcache/test_twins.py"
_KERNELS = "kernels/program/states/"
_ROUTER, _OF_ROUTER = "serve_ray/routing/router.py", "tests/serve_ray/routing/test_router_states.py"
_OF_MIXERS, _OF_PIECES = "tests/kernels/program/states/test_mixers.py", "tests/models/weights/test_pieces.py"

STATE_FAULTS = (
    *DRAFT_FAULTS,
    ("state: one block ahead of its snapshot", _TABLES,
     "standing_for(table, position // self._size - 1, self._index) if",
     "standing_for(table, position // self._size - 2, self._index) if", _OF_TABLES),
    ("state: kept one token later", _TABLES, "tuple((position - start, slot)",
     "tuple((min(position + 1, stop) - start, slot)", _OF_SCHEDULES),
    ("state: published before its pass ended", _TABLES, "            state.saves.append((position, slot, reason))\n",
     "            state.saves.append((position, slot, reason))\n            self.slots._by_block[-position] = slot\n",
     _OF_TABLES),
    ("state: a failed pass leaves its state", _TABLES, "state.planned is None\n            and not state.awaited",
     "not state.awaited",
     _OF_TABLES),
    ("state: a snapshot is written into", _TABLES, "state.slot >= 0 and self.slots.is_own(state.slot))",
     "state.slot >= 0)", _OF_TABLES),
    ("state: evicted between lookup and pass", _SLOTS, "if self._refs[slot] == 1 and not (", "if not (", _OF_SLOTS),
    ("state: a flood takes every owner's part", _SLOTS, "snapshot.owner] <= self.num_slots",
     "snapshot.owner] < -self.num_slots", _OF_SLOTS),
    ("state: saves in the order of positions", _TABLES, "in sorted(points, reverse=True)", "in sorted(points)",
     _OF_TABLES),
    ("state: outlives its block", _TABLES, "        self.slots.drop(block_id)\n        self._kept",
     "        self._kept", _OF_TABLES),
    ("state: its end is not told", _SLOTS, "                watcher.dropped(block_id)\n", "                pass\n",
     "tests/kvcache/test_events.py"),
    ("state: not counted by the router", _ROUTER, "depths = self._state_ends(chain, Place.POOL, len(usable))", "pass",
     _OF_ROUTER),
    ("state: of a prompt that was sent not expected", _ROUTER, "        if chain.states:  #", "        if False:  #",
     _OF_ROUTER),
    ("state: not looked for on the server", _ROUTER, "if not chain.states:", "if True:", _OF_ROUTER),
    ("state: a junction is not kept", _TABLES, "wanted[matched] = JUNCTION", "pass", _OF_TABLES),
    ("state: who waits does not ask", "kvcache/manager.py", "self.states.ask(holder,", "(lambda *_: None)(holder,",
     _OF_TABLES),
    ("state: the backbone drives out ends", _SLOTS, "return REASONS[reason] * self.num_slots", "return 0", _OF_SLOTS),
    ("state: an answer keeps every block", _TABLES, "            self._drop_tail(state)\n        slot",
     "            pass\n        slot", _OF_TABLES),
    ("state: what a pass wrote is kept and written on", _TABLES, "            self.slots.hold(slot)\n",
     "            self.slots.hold(slot)\n            state.slot, state.following = state.following, state.slot\n",
     _OF_TABLES),
    ("state: an empty slot is kept for the pass's own", _TABLES, "state.following, slot = slot, state.slot",
     "state.following, slot = state.slot, slot", _OF_TABLES),
    ("state: none but the deepest is tried", _MOVER, "in itertools.chain([deepest], ends) if", "in [deepest] if",
     _OF_TIERS),
    ("state: taken without its blocks", _MOVER, "if 0 < end <= count)", "if 0 < end)", _OF_TIERS),
    ("state: put behind another block", _TABLES, "standing_for(table, num_blocks - 1,",
     "standing_for(table, num_blocks,", _OF_TIERS),
    ("twins: an evicted one is not put back", _TWINS, "self._index.restore(table.block_ids[index], entry)", "pass",
     _OF_TWINS),
    ("twins: who does without the cache shares", _TWINS, "or not table._shares", "", _OF_TWINS),
    ("state: blocks behind the state are shared", _LOOKUP, "return found if not beyond else",
     "return found if beyond else", _OF_TABLES),
    ("state: slots of two sequences swapped", _BATCH, "state_out=np.array([plan.write for plan in plans]",
     "state_out=np.array([plan.write for plan in plans[::-1]]", _OF_SCHEDULES),
    ("state: a budget one slot too small", _BUDGET, "if num_slots < num_seqs + 1:", "if num_slots < num_seqs:",
     _OF_BUDGET),
    ("borders: one token late", _BORDERS, "np.flatnonzero(found).tolist()", "(np.flatnonzero(found) + 1).tolist()",
     _OF_BORDERS),
    ("state space: steps of time without a limit", f"{_KERNELS}gates.py", "if is_ssd and first < least:",
     "if is_ssd and first < -least:", _OF_MIXERS),
    ("state space: values do not skip it", f"{_KERNELS}ssd.py", "emit_fma(b, own, one, emit_total(b, outs))",
     "emit_total(b, outs)", _OF_MIXERS),
    ("state space: B is read for C", f"{_KERNELS}scan.py", "(head < heads) != is_ssd", "head < heads", _OF_MIXERS),
    ("state space: groups take turns", f"{_KERNELS}scan.py", "head // (heads // shared)", "head % shared", _OF_MIXERS),
    ("state space: gates behind the norm", f"{_KERNELS}gate.py", "if stage != op[lt.F_GATE_FIRST]:",
     "if stage == op[lt.F_GATE_FIRST]:", _OF_MIXERS),
    ("state space: all groups have the first one's weights", f"{_KERNELS}gate.py",
     "4 * group * op[lt.F_WEIGHT_STEP]", "0 * group * op[lt.F_WEIGHT_STEP]", _OF_MIXERS),
    ("state space: pieces of a matrix in another order", "models/weights/ordered.py",
     "return {z: mixer.value_heads * mixer.value_dim, xbc: mixer.channels, dt: mixer.value_heads}",
     "return {xbc: mixer.channels, z: mixer.value_heads * mixer.value_dim, dt: mixer.value_heads}", _OF_PIECES),
)  # fmt: skip
