"""Faults in the recurrent state of hybrid models."""

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
        "snapshot: attached to the block before its own",
        _SNAPSHOTS,
        "published_equal(table, position // self._size - 1, self._index)",
        "published_equal(table, position // self._size - 2, self._index)",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: saved one token late",
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
        "snapshot: published before its pass ends",
        _SNAPSHOTS,
        "            state.saves.append((position, slot, reason))\n",
        "            state.saves.append((position, slot, reason))\n            "
        "self.slots._by_block[-position] = slot\n",
        _OF_SNAPSHOTS,
    ),
    (
        "recurrent state: kept after a failed pass",
        _SNAPSHOTS,
        "state.planned is None\n            and not state.awaited",
        "not state.awaited",
        _OF_SNAPSHOTS,
    ),
    (
        "recurrent state: a pass writes into a snapshot",
        _SNAPSHOTS,
        "state.slot >= 0 and self.slots.is_own(state.slot))",
        "state.slot >= 0)",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: evicted between lookup and pass",
        _SLOTS,
        "== 1 and not is_spared(",
        "< 9 and not is_spared(",
        _OF_SLOTS,
    ),
    (
        "state slots: one owner's flood takes every owner's share",
        _SLOTS,
        "snapshot.owner] <= part",
        "snapshot.owner] < -part",
        _OF_SLOTS,
    ),
    (
        "state slots: an owner without slots yet is left out of the shares",
        _SLOTS,
        " + (owner not in self._num_owned)",
        "",
        _OF_SLOTS,
    ),
    (
        "state slots: a pin also holds periodic checkpoints",
        _SLOTS,
        "return snapshot.reason != CHECKPOINT and snapshot.block_id",
        "return snapshot.block_id",
        _OF_SLOTS,
    ),
    (
        "state slots: a running sequence takes another owner's share",
        _SNAPSHOTS,
        "self.slots.take(owner=table.owner)",
        "self.slots.take()",
        _OF_OWNERS,
    ),
    (
        "snapshot: saved without its owner",
        _SNAPSHOTS,
        "reason, table.owner, moved=moved)",
        "reason, moved=moved)",
        _OF_OWNERS,
    ),
    (
        "snapshot: slots are assigned in order of position",
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
        "snapshot: checkpoints get slots before the ends of prompts",
        _SNAPSHOTS,
        "(point[1] != CHECKPOINT, point[0])",
        "point[0]",
        _OF_SNAPSHOTS,
    ),
    (
        "state slots: saving a checkpoint ages other snapshots",
        _SLOTS,
        "counts and reason != CHECKPOINT",
        "counts",
        _OF_SLOTS,
    ),
    (
        "state slots: moving an answer's snapshot ages other snapshots",
        _SLOTS,
        "counts=not moved",
        "counts=True",
        _OF_SLOTS,
    ),
    (
        "snapshot: an answer's passed snapshots are not demoted",
        _SNAPSHOTS,
        "self.slots.demote(block_id)",
        "pass",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: a hit does not count as use of the conversation's start",
        _SNAPSHOTS,
        "self.slots.use_first(match.block_ids[:-1])",
        "pass",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: a branch point that is continued again is not used",
        _SLOTS,
        "in (BRANCH_POINT, HINT):",
        "in (HINT,):",
        _OF_SLOTS,
    ),
    (
        "snapshot: a fork drops its parent's planned saves",
        _SNAPSHOTS,
        "wanted = dict(state.wanted)",
        "wanted: dict[int, str] = {}",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: an answer's is dropped with another prompt's block",
        _SNAPSHOTS,
        "entry.serial == serial and self.slots.is_passed",
        "self.slots.is_passed",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: message boundaries take all slots",
        "kvcache/recurrent/snapshots.py",
        "if len(hints) <= most",
        "if True",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: outlives its block",
        _SNAPSHOTS,
        "        self.slots.drop(block_id)\n        self._kept",
        "        self._kept",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: its watcher is not told that it was dropped",
        _SLOTS,
        "                watcher.dropped(block_id)\n",
        "                pass\n",
        "tests/kvcache/test_events.py",
    ),
    (
        "router: ignores recurrent state in the pool",
        _ROUTER,
        "depths = self._state_ends(chain, Place.POOL, len(usable))",
        "pass",
        _OF_ROUTER,
    ),
    (
        "router: does not expect snapshots of prompts that it sent",
        _ROUTER,
        "        if chain.states:  #",
        "        if False:  #",
        _OF_ROUTER,
    ),
    (
        "router: does not look for snapshots on the shared server",
        _ROUTER,
        "if not chain.states:",
        "if True:",
        _OF_ROUTER,
    ),
    (
        "snapshot: not saved at a branch point",
        _SNAPSHOTS,
        "wanted[matched] = BRANCH_POINT",
        "pass",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: not requested by a sequence that waits for a prefix",
        "kvcache/manager.py",
        "self.recurrent.ask(",
        "(lambda *_: None)(",
        _OF_SNAPSHOTS,
    ),
    (
        "state slots: checkpoints evict the ends of prompts",
        _SLOTS,
        "return REASONS[reason] * self.num_slots",
        "return 0",
        _OF_SLOTS,
    ),
    (
        "snapshot: an answer keeps one at every block",
        _SNAPSHOTS,
        "            self._drop_old_tail(state)\n        if slot < 0",
        "            pass\n        if slot < 0",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: an answer's is dropped before the next one is saved",
        _SNAPSHOTS,
        "            if position == state.planned:\n",
        "            self._drop_old_tail(state)\n            if position == state.planned:\n",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: an answer's is dropped although slots are free",
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
        "snapshot: an answer's is dropped where that frees no slot",
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
        "snapshot: a pass continues to write into a saved slot",
        _SNAPSHOTS,
        "            self.slots.hold(slot)\n",
        "            self.slots.hold(slot)\n            state.slot, state.following = "
        "state.following, state.slot\n",
        _OF_SNAPSHOTS,
    ),
    (
        "snapshot: an empty slot is saved instead of the pass's own",
        _SNAPSHOTS,
        ("            state.following = slot\n            slot = state.slot\n"),
        ("            state.following = state.slot\n            slot = slot\n"),
        _OF_SNAPSHOTS,
    ),
    (
        "state offload: tries only the deepest stored state",
        _MOVER,
        "in itertools.chain([deepest], ends) if",
        "in [deepest] if",
        _OF_TIERS,
    ),
    (
        "state offload: loads a state without its blocks",
        _MOVER,
        "if 0 < end <= count)",
        "if 0 < end)",
        _OF_TIERS,
    ),
    (
        "state offload: reads blocks that are already in the pool",
        "engine/offload/prefetch.py",
        "self._io_thread.load(ticket, blocks[num_in_pool:],",
        "self._io_thread.load(ticket, blocks,",
        _OF_TIERS,
    ),
    (
        "state offload: ignores that earlier blocks are in the pool",
        _MOVER,
        "else load.num_in_pool\n",
        "else 0\n",
        _OF_TIERS,
    ),
    (
        "state offload: requests states after a lost block",
        _MOVER,
        "reach = max(asked) if all(found[: len(heads)]) else load.num_in_pool",
        "reach = max(asked)",
        _OF_TIERS,
    ),
    (
        "state offload: copies out more than a step can spare",
        "engine/offload/state_saving.py",
        (
            "        while (\n"
            "            self._unsaved\n"
            "            and self._credit >= size\n"
            "            and self._io_thread.stores\n"
            "            and self._io_thread.room_for(size)\n"
            "        ):\n"
        ),
        "        while self._unsaved and self._io_thread.stores and self._io_thread.room_for(size):\n",
        "tests/engine/offload/test_state_saving.py",
    ),
    (
        "debug checks miss a runner that writes into a snapshot",
        "engine/debug_checks.py",
        "if self._snapshots.get((block, slot), checksum) != checksum:",
        "if False:",
        "tests/engine/schedule/test_state_schedules.py",
    ),
    (
        "state offload: attaches a restored state to the next block",
        _SNAPSHOTS,
        "published_equal(table, num_blocks - 1,",
        "published_equal(table, num_blocks,",
        _OF_TIERS,
    ),
    (
        "duplicate blocks: an evicted one is not restored",
        _TWINS,
        "self._index.restore(table.block_ids[index], entry)",
        "pass",
        _OF_TWINS,
    ),
    (
        "duplicate blocks: drafter KV of the freed block is lost",
        _TWINS,
        "self._drafted.merge(own, block_id)",
        "pass",
        _OF_TWINS,
    ),
    (
        "duplicate blocks: shared by a request that bypasses the cache",
        _TWINS,
        "or not table._shares",
        "",
        _OF_TWINS,
    ),
    (
        "lookup: shares blocks after the last snapshot",
        _LOOKUP,
        "return found if not beyond else",
        "return found if beyond else",
        _OF_SNAPSHOTS,
    ),
    (
        "step batch: swaps the state slots that sequences write",
        _BATCH,
        "state_out=np.array([plan.write for plan in plans]",
        "state_out=np.array([plan.write for plan in plans[::-1]]",
        _OF_SCHEDULES,
    ),
    (
        "step batch: swaps the state slots that sequences read",
        _BATCH,
        "state_in=np.array([plan.read for plan in plans]",
        "state_in=np.array([plan.read for plan in plans[::-1]]",
        _OF_SCHEDULES,
    ),
    (
        "snapshot: taken from another block",
        _SNAPSHOTS,
        "slot = self.slots.of_block(match.block_ids[-1])\n                if",
        "slot = next(iter(self.slots.snapshots().values()))\n                if",
        _OF_SCHEDULES,
    ),
    (
        "state budget: accepts one slot too few",
        _BUDGET,
        "and num_slots < num_seqs + 1:",
        "and num_slots < num_seqs:",
        _OF_BUDGET,
    ),
    (
        "message boundaries: missing for a chat",
        "engine/request/prompts.py",
        "terms.snapshot_hints or user_starts(self._tokenizer, inputs.token_ids)",
        "terms.snapshot_hints",
        "tests/engine/test_hybrid_end_to_end.py::"
        "test_chats_share_the_state_after_their_system_message",
    ),
    (
        "message boundaries: one token late",
        _BORDERS,
        "np.flatnonzero(found).tolist()",
        "(np.flatnonzero(found) + 1).tolist()",
        _OF_BORDERS,
    ),
    (
        "doctor does not count recurrent state",
        "engine/memory/check.py",
        "+ pools + self.states",
        "+ pools",
        "tests/engine/memory/test_check.py",
    ),
    (
        "packs weights before it checks the state budget",
        "engine/memory/check.py",
        "plan_states(config, info, plan_num_blocks(config, info, left), left)",
        "plan_num_blocks(config, info, left)",
        "tests/engine/memory/test_check.py",
    ),
    (
        "does not refuse an ONNX graph that may keep recurrent state",
        "runners/onnx/select_onnx.py",
        "if may_keep_states(model.config, model.onnx_layers)",
        "if False",
        "tests/runners/test_choice.py",
    ),
    (
        "convolution: stores no conv state after a pass",
        f"{_KERNELS}conv.py",
        "    _store_tail(job, conv, sequence, rows, first, out)\n",
        "    pass\n",
        _OF_MIXERS,
    ),
    (
        "convolution: stores no conv state in a snapshot",
        f"{_KERNELS}conv.py",
        "range(ls.of_sequence(job, sequence, ls.S_NUM_SAVES))",
        "range(0)",
        _OF_MIXERS,
    ),
    (
        "scan: saves the state one token late",
        f"{_KERNELS}scan.py",
        "if row + 1 == save:",
        "if row == save:",
        _OF_MIXERS,
    ),
    (
        "delta rule: tiled value heads use the next head's keys",
        f"{_KERNELS}scan.py",
        "head % shared if op.heads.tiled != 0",
        "head // (heads // shared) if op.heads.tiled != 0",
        _OF_MIXERS,
    ),
    (
        "state space: does not limit dt",
        f"{_KERNELS}scan.py",
        "if is_ssd and first < op.least:",
        "if is_ssd and first < -op.least:",
        _OF_MIXERS,
    ),
    (
        "state space: drops the skip connection",
        f"{_KERNELS}ssd.py",
        "emit_fma(b, own, one, emit_total(b, outs))",
        "emit_total(b, outs)",
        _OF_MIXERS,
    ),
    (
        "state space: reads B in place of C",
        f"{_KERNELS}scan.py",
        "(head < heads) != is_ssd",
        "head < heads",
        _OF_MIXERS,
    ),
    (
        "state space: interleaves groups over heads",
        f"{_KERNELS}scan.py",
        "head // (heads // shared)",
        "head % shared",
        _OF_MIXERS,
    ),
    (
        "state space: gates on the wrong side of the norm",
        f"{_KERNELS}scan.py",
        "if stage != op.gate_first:",
        "if stage == op.gate_first:",
        _OF_MIXERS,
    ),
    (
        "state space: all groups use the first group's norm weights",
        f"{_KERNELS}scan.py",
        "4 * group * op.weight_step",
        "0 * group * op.weight_step",
        _OF_MIXERS,
    ),
    (
        "state space: splits the input projection in the wrong order",
        "models/weights/reordered.py",
        "return {z: mixer.value_heads * mixer.value_dim, xbc: mixer.channels, dt: "
        "mixer.value_heads}",
        "return {xbc: mixer.channels, z: mixer.value_heads * mixer.value_dim, dt: "
        "mixer.value_heads}",
        _OF_PIECES,
    ),
)
