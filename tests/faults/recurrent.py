"""Faults in states beside keys and values."""

from __future__ import annotations

from faults.fault import faults

_SLOTS = "kvcache/recurrent/slots.py"
_SNAPSHOTS = "kvcache/recurrent/snapshots.py"
_LOOKUP = "kvcache/lookup.py"
_BATCH = "engine/schedule/step_batch.py"
_BUDGET = "engine/memory/state_budget.py"
_BORDERS = "text/message_boundaries.py"
_OF_SLOTS = "tests/kvcache/recurrent/test_slots.py"
_OF_SNAPSHOTS = "tests/kvcache/recurrent"
_OF_OWNERS = "tests/kvcache/recurrent/test_owners.py"
_OF_SCHEDULES = "tests/engine/schedule/test_random_schedules.py"
_OF_BUDGET = "tests/engine/memory/test_state_budget.py"
_OF_BORDERS = "tests/text/test_message_boundaries.py"
_OF_TIERS = "tests/engine/offload/test_state_tiers.py"
_MOVER = "tiers/io_thread.py"
_TWINS = "kvcache/duplicates.py"
_OF_TWINS = "tests/kvcache/test_duplicates.py"
_KERNELS = "kernels/program/states/"
_ROUTER = "serve_ray/routing/router.py"
_OF_ROUTER = "tests/serve_ray/routing/test_router_states.py"
_OF_MIXERS = "tests/kernels/program/states/test_mixers.py"
_OF_PIECES = "tests/models/weights/test_pieces.py"

FAULTS = faults(
    (
        "state: one block ahead of its snapshot",
        _SNAPSHOTS,
        "published_equal(table, position // self._size - 1, self._index)",
        "published_equal(table, position // self._size - 2, self._index)",
        _OF_SNAPSHOTS,
    ),
    (
        "state: kept one token later",
        _SNAPSHOTS,
        "            (position - start, slot) for position, slot, _ in state.saves if position < "
        "stop\n",
        (
            "            (min(position + 1, stop) - start, slot)\n"
            "            for position, slot, _ in state.saves\n"
            "            if position < stop\n"
        ),
        _OF_SCHEDULES,
    ),
    (
        "state: published before its pass ended",
        _SNAPSHOTS,
        "            state.saves.append((position, slot, reason))\n",
        "            state.saves.append((position, slot, reason))\n            "
        "self.slots._by_block[-position] = slot\n",
        _OF_SNAPSHOTS,
    ),
    (
        "state: a failed pass leaves its state",
        _SNAPSHOTS,
        "state.planned is None\n            and not state.awaited",
        "not state.awaited",
        _OF_SNAPSHOTS,
    ),
    (
        "state: a snapshot is written into",
        _SNAPSHOTS,
        "state.slot >= 0 and self.slots.is_own(state.slot))",
        "state.slot >= 0)",
        _OF_SNAPSHOTS,
    ),
    (
        "state: evicted between lookup and pass",
        _SLOTS,
        "== 1 and not is_spared(",
        "< 9 and not is_spared(",
        _OF_SLOTS,
    ),
    (
        "state: a flood takes every owner's part",
        _SLOTS,
        "snapshot.owner] <= part",
        "snapshot.owner] < -part",
        _OF_SLOTS,
    ),
    (
        "state: who has none yet is no owner",
        _SLOTS,
        " + (owner not in self._num_owned)",
        "",
        _OF_SLOTS,
    ),
    (
        "state: a pinned backbone stays",
        _SLOTS,
        "return snapshot.reason != CHECKPOINT and snapshot.block_id",
        "return snapshot.block_id",
        _OF_SLOTS,
    ),
    (
        "state: who runs takes another owner's part",
        _SNAPSHOTS,
        "self.slots.take(owner=table.owner)",
        "self.slots.take()",
        _OF_OWNERS,
    ),
    (
        "state: what is kept is nobody's",
        _SNAPSHOTS,
        "reason, table.owner, moved=moved)",
        "reason, moved=moved)",
        _OF_OWNERS,
    ),
    (
        "state: saves in the order of positions",
        _SNAPSHOTS,
        (
            "            for position, reason in sorted(\n"
            "                points, key=lambda point: (point[1] != CHECKPOINT, point[0]), "
            "reverse=True\n"
            "            ):\n"
        ),
        "            for position, reason in sorted(points, key=lambda point: point[0]):\n",
        _OF_SNAPSHOTS,
    ),
    (
        "state: a backbone before ends",
        _SNAPSHOTS,
        "(point[1] != CHECKPOINT, point[0])",
        "point[0]",
        _OF_SNAPSHOTS,
    ),
    (
        "state: a backbone makes others old",
        _SLOTS,
        "counts and reason != CHECKPOINT",
        "counts",
        _OF_SLOTS,
    ),
    (
        "state: an answer that moves makes others old",
        _SLOTS,
        "counts=not moved",
        "counts=True",
        _OF_SLOTS,
    ),
    (
        "state: an answer of small states leaves ends behind",
        _SNAPSHOTS,
        "self.slots.demote(block_id)",
        "pass",
        _OF_SNAPSHOTS,
    ),
    (
        "state: what conversations begin with is not used",
        _SNAPSHOTS,
        "self.slots.use_first(match.block_ids[:-1])",
        "pass",
        _OF_SNAPSHOTS,
    ),
    (
        "state: a junction that more go on from is not used",
        _SLOTS,
        "in (BRANCH_POINT, HINT):",
        "in (HINT,):",
        _OF_SLOTS,
    ),
    (
        "state: a fork does not keep what its parent was to",
        _SNAPSHOTS,
        "wanted = dict(state.wanted)",
        "wanted: dict[int, str] = {}",
        _OF_SNAPSHOTS,
    ),
    (
        "state: an answer's goes with another prompt's block",
        _SNAPSHOTS,
        "entry.serial == serial and self.slots.is_passed",
        "self.slots.is_passed",
        _OF_SNAPSHOTS,
    ),
    (
        "state: borders take all slots",
        "kvcache/recurrent/snapshots.py",
        "if len(hints) <= most",
        "if True",
        _OF_SNAPSHOTS,
    ),
    (
        "state: outlives its block",
        _SNAPSHOTS,
        "        self.slots.drop(block_id)\n        self._kept",
        "        self._kept",
        _OF_SNAPSHOTS,
    ),
    (
        "state: its end is not told",
        _SLOTS,
        "                watcher.dropped(block_id)\n",
        "                pass\n",
        "tests/kvcache/test_events.py",
    ),
    (
        "state: not counted by the router",
        _ROUTER,
        "depths = self._state_ends(chain, Place.POOL, len(usable))",
        "pass",
        _OF_ROUTER,
    ),
    (
        "state: of a prompt that was sent not expected",
        _ROUTER,
        "        if chain.states:  #",
        "        if False:  #",
        _OF_ROUTER,
    ),
    (
        "state: not looked for on the server",
        _ROUTER,
        "if not chain.states:",
        "if True:",
        _OF_ROUTER,
    ),
    (
        "state: a junction is not kept",
        _SNAPSHOTS,
        "wanted[matched] = BRANCH_POINT",
        "pass",
        _OF_SNAPSHOTS,
    ),
    (
        "state: who waits does not ask",
        "kvcache/manager.py",
        "self.recurrent.ask(",
        "(lambda *_: None)(",
        _OF_SNAPSHOTS,
    ),
    (
        "state: the backbone drives out ends",
        _SLOTS,
        "return REASONS[reason] * self.num_slots",
        "return 0",
        _OF_SLOTS,
    ),
    (
        "state: an answer keeps every block",
        _SNAPSHOTS,
        "            self._drop_old_tail(state)\n        if slot < 0",
        "            pass\n        if slot < 0",
        _OF_SNAPSHOTS,
    ),
    (
        "state: an answer's goes before the next one is there",
        _SNAPSHOTS,
        "            if position == state.planned:\n",
        "            self._drop_old_tail(state)\n            if position == state.planned:\n",
        _OF_SNAPSHOTS,
    ),
    (
        "state: an answer's goes for the next one where slots are free",
        _SNAPSHOTS,
        (
            "            if (\n"
            "                not self.slots.num_free\n"
            "                and state.tail is not None\n"
            "                and self.slots.of_block(state.tail[0]) != state.slot\n"
            "            ):\n"
        ),
        "            if state.tail is not None and self.slots.of_block(state.tail[0]) != "
        "state.slot:\n",
        _OF_SNAPSHOTS,
    ),
    (
        "state: an answer's goes where that gives no slot",
        _SNAPSHOTS,
        (
            "            if (\n"
            "                not self.slots.num_free\n"
            "                and state.tail is not None\n"
            "                and self.slots.of_block(state.tail[0]) != state.slot\n"
            "            ):\n"
        ),
        "            if not self.slots.num_free and state.tail is not None:\n",
        _OF_SNAPSHOTS,
    ),
    (
        "state: what a pass wrote is kept and written on",
        _SNAPSHOTS,
        "            self.slots.hold(slot)\n",
        "            self.slots.hold(slot)\n            state.slot, state.following = "
        "state.following, state.slot\n",
        _OF_SNAPSHOTS,
    ),
    (
        "state: an empty slot is kept for the pass's own",
        _SNAPSHOTS,
        ("            state.following = slot\n            slot = state.slot\n"),
        ("            state.following = state.slot\n            slot = slot\n"),
        _OF_SNAPSHOTS,
    ),
    (
        "state: none but the deepest is tried",
        _MOVER,
        "in itertools.chain([deepest], ends) if",
        "in [deepest] if",
        _OF_TIERS,
    ),
    ("state: taken without its blocks", _MOVER, "if 0 < end <= count)", "if 0 < end)", _OF_TIERS),
    (
        "state: blocks in the pool are read again",
        "engine/offload/prefetch.py",
        "self._store.load(ticket, blocks[num_in_pool:],",
        "self._store.load(ticket, blocks,",
        _OF_TIERS,
    ),
    (
        "state: behind blocks in the pool it needs others",
        _MOVER,
        "else load.num_in_pool\n",
        "else 0\n",
        _OF_TIERS,
    ),
    (
        "state: asked for behind a lost block",
        _MOVER,
        "reach = max(asked) if all(found[: len(heads)]) else load.num_in_pool",
        "reach = max(asked)",
        _OF_TIERS,
    ),
    (
        "state: copied out whatever steps have to spare",
        "engine/offload/state_saving.py",
        (
            "        while (\n"
            "            self._unsaved\n"
            "            and self._credit >= size\n"
            "            and self._io_thread.stores\n"
            "            and self._io_thread.has_state_room\n"
            "        ):\n"
        ),
        "        while self._unsaved and self._io_thread.stores and self._io_thread.has_state_room:\n",
        "tests/engine/offload/test_state_saving.py",
    ),
    (
        "state: a runner that writes into a snapshot is not found out",
        "engine/debug_checks.py",
        "if self._snapshots.get((block, slot), checksum) != checksum:",
        "if False:",
        "tests/engine/schedule/test_state_schedules.py",
    ),
    (
        "state: put behind another block",
        _SNAPSHOTS,
        "published_equal(table, num_blocks - 1,",
        "published_equal(table, num_blocks,",
        _OF_TIERS,
    ),
    (
        "twins: an evicted one is not put back",
        _TWINS,
        "self._index.restore(table.block_ids[index], entry)",
        "pass",
        _OF_TWINS,
    ),
    ("twins: who does without the cache shares", _TWINS, "or not table._shares", "", _OF_TWINS),
    (
        "state: blocks behind the state are shared",
        _LOOKUP,
        "return found if not beyond else",
        "return found if beyond else",
        _OF_SNAPSHOTS,
    ),
    (
        "state: slots of two sequences swapped",
        _BATCH,
        "state_out=np.array([plan.write for plan in plans]",
        "state_out=np.array([plan.write for plan in plans[::-1]]",
        _OF_SCHEDULES,
    ),
    (
        "state: slots that two sequences read swapped",
        _BATCH,
        "state_in=np.array([plan.read for plan in plans]",
        "state_in=np.array([plan.read for plan in plans[::-1]]",
        _OF_SCHEDULES,
    ),
    (
        "state: of another block",
        _SNAPSHOTS,
        "slot = self.slots.of_block(match.block_ids[-1])\n                if",
        "slot = next(iter(self.slots.snapshots().values()))\n                if",
        _OF_SCHEDULES,
    ),
    (
        "state: a budget one slot too small",
        _BUDGET,
        "and num_slots < num_seqs + 1:",
        "and num_slots < num_seqs:",
        _OF_BUDGET,
    ),
    (
        "borders: of a chat are not told",
        "engine/request/prompts.py",
        "terms.snapshot_hints or user_starts(self._tokenizer, inputs.token_ids)",
        "terms.snapshot_hints",
        "tests/engine/test_hybrid_end_to_end.py::"
        "test_a_chat_goes_on_from_where_another_one_with_its_system_message_left_it",
    ),
    (
        "borders: one token late",
        _BORDERS,
        "np.flatnonzero(found).tolist()",
        "(np.flatnonzero(found) + 1).tolist()",
        _OF_BORDERS,
    ),
    (
        "state: doctor counts none",
        "engine/memory/check.py",
        "+ pools + self.states",
        "+ pools",
        "tests/engine/memory/test_check.py",
    ),
    (
        "state: weights are packed before its budget is looked at",
        "engine/memory/check.py",
        "plan_states(config, info, plan_num_blocks(config, info, beside), beside)",
        "plan_num_blocks(config, info, beside)",
        "tests/engine/memory/test_check.py",
    ),
    (
        "state: a graph without any runs",
        "runners/onnx/select_onnx.py",
        "if may_keep_states(model.config, model.onnx_layers)",
        "if False",
        "tests/runners/test_choice.py",
    ),
    (
        "convolution: no tail behind a pass",
        f"{_KERNELS}conv.py",
        "    _store_tail(job, conv, sequence, rows, first, out)\n",
        "    pass\n",
        _OF_MIXERS,
    ),
    (
        "convolution: no tail in what is kept",
        f"{_KERNELS}conv.py",
        "range(ls.of_sequence(job, sequence, ls.S_NUM_SAVES))",
        "range(0)",
        _OF_MIXERS,
    ),
    (
        "scan: kept one token later",
        f"{_KERNELS}scan.py",
        "if row + 1 == save:",
        "if row == save:",
        _OF_MIXERS,
    ),
    (
        "delta rule: value heads in tiles have the next one's keys",
        f"{_KERNELS}scan.py",
        "head % shared if op.heads.tiled != 0",
        "head // (heads // shared) if op.heads.tiled != 0",
        _OF_MIXERS,
    ),
    (
        "state space: steps of time without a limit",
        f"{_KERNELS}scan.py",
        "if is_ssd and first < op.least:",
        "if is_ssd and first < -op.least:",
        _OF_MIXERS,
    ),
    (
        "state space: values do not skip it",
        f"{_KERNELS}ssd.py",
        "emit_fma(b, own, one, emit_total(b, outs))",
        "emit_total(b, outs)",
        _OF_MIXERS,
    ),
    (
        "state space: B is read for C",
        f"{_KERNELS}scan.py",
        "(head < heads) != is_ssd",
        "head < heads",
        _OF_MIXERS,
    ),
    (
        "state space: groups take turns",
        f"{_KERNELS}scan.py",
        "head // (heads // shared)",
        "head % shared",
        _OF_MIXERS,
    ),
    (
        "state space: gates behind the norm",
        f"{_KERNELS}scan.py",
        "if stage != op.gate_first:",
        "if stage == op.gate_first:",
        _OF_MIXERS,
    ),
    (
        "state space: all groups have the first one's weights",
        f"{_KERNELS}scan.py",
        "4 * group * op.weight_step",
        "0 * group * op.weight_step",
        _OF_MIXERS,
    ),
    (
        "state space: pieces of a matrix in another order",
        "models/weights/reordered.py",
        "return {z: mixer.value_heads * mixer.value_dim, xbc: mixer.channels, dt: "
        "mixer.value_heads}",
        "return {xbc: mixer.channels, z: mixer.value_heads * mixer.value_dim, dt: "
        "mixer.value_heads}",
        _OF_PIECES,
    ),
)
