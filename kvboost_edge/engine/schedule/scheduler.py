"""The scheduler, which admits and preempts sequences and plans each step.

It handles integers only and uses no tensors, text or clock. Prefill and decode are not separate
phases (chunked prefill). Each sequence counts its computed tokens, and each step has a budget in
tokens and in time (`StepPacing`):

- Decoding sequences, which lack one token, come first.
- Then prompts with the fewest pending tokens get the most, so that short prompts finish early. A
  quarter of the budget goes to the oldest prompt, so that a long prompt always advances.
- Sequences are admitted in order of arrival. When blocks run out, the latest arrival is preempted.

All rules serve lower priority numbers first. A sequence waits for a prefix that another one
computes, unless the other one has a higher priority number or waits for an idle engine. At equal
priority, tenants share the budget, the running slots and the preemptions (`Fairness`). The rules
then apply within each tenant.

Background sequences come after all others. They get the time that others leave in a step, and they
are preempted when another sequence waits for their place or their blocks.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from operator import attrgetter

from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.schedule.budget import Budget
from kvboost_edge.engine.schedule.fairness import Fairness
from kvboost_edge.engine.schedule.pacing import StepPacing
from kvboost_edge.engine.schedule.planners import DraftPlanner, Prefetcher, SpanPlacement
from kvboost_edge.engine.schedule.sequence import Sequence, SequenceStatus
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.errors import CacheCorruption, CapacityError
from kvboost_edge.kvcache.block_table import BlockTable, CopyOp
from kvboost_edge.kvcache.manager import KVCacheManager

__all__ = ["Scheduler", "StepPlan"]

_BY_RANK = attrgetter("rank")
_BY_PRIORITY = attrgetter("priority")


@dataclasses.dataclass(slots=True)
class StepPlan:
    """The plan of one step.

    Attributes:
        work: tokens to compute.
        copies: blocks to copy before the forward pass.
        copied_for: sequences that own the copies. They depend on the pass even if it computes none
            of their tokens.
        preparing: sequence for which a feature computes something before the forward pass, and the
            maximum number of tokens of this work. None if there is no such sequence.
        failed: sequences that failed during planning, with their errors.
    """

    work: list[ScheduledTokens[Sequence]] = dataclasses.field(default_factory=list)
    copies: list[CopyOp] = dataclasses.field(default_factory=list)
    copied_for: list[Sequence] = dataclasses.field(default_factory=list)
    preparing: tuple[Sequence, int] | None = None
    failed: list[tuple[Sequence, Exception]] = dataclasses.field(default_factory=list)

    @property
    def members(self) -> list[Sequence]:
        """The running sequences whose KV depends on this pass."""
        by_index = {s.index: s for s in (*(one.sequence for one in self.work), *self.copied_for)}
        return [s for s in by_index.values() if s.status is SequenceStatus.RUNNING]


class Scheduler:
    """The waiting and running sequences of an engine.

    Not thread-safe. Only the engine thread uses it.

    Args:
        pacing: time limit of each step. None limits steps only by `max_batch_tokens`.
        whole: whether each step must compute all tokens of a sequence at once.

    Attributes:
        waiting: sequences without blocks, ordered by priority, then arrival.
        running: sequences with blocks, in the same order.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        loads: Prefetcher | None = None,
        sharing: SpanPlacement | None = None,
        speculation: DraftPlanner | None = None,
        pacing: StepPacing | None = None,
        whole: bool = False,
    ) -> None:
        self.manager = manager
        self.speculation = DraftPlanner() if speculation is None else speculation
        self.loads = Prefetcher() if loads is None else loads
        self.sharing = SpanPlacement() if sharing is None else sharing
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.pacing = StepPacing() if pacing is None else pacing
        self._fairness = Fairness()
        budget = Budget(self._fairness)
        self._share = budget.share_whole if whole else budget.share

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def only_waits(self) -> bool:
        """True if there is nothing to compute until a prefetch makes progress."""
        return not self.running and self.loads.num_arriving > 0

    @property
    def awaits_features(self) -> bool:
        """True if all running sequences wait for features that work in other threads."""
        return bool(self.running) and not any(one.is_ready or one.prepares for one in self.running)

    def check_fits(self, request: Request) -> None:
        """Check that a request could run alone and that its prompt can be pinned.

        Raises:
            CapacityError: the request does not fit. The message shows the calculation.
        """
        manager = self.manager
        if request.terms.pin:
            manager.pins.check_size(len(request.shareable_ids), request.terms.pin_share)
        needed = manager.blocks_for(request.max_slots)
        if needed <= manager.usable_block_count:
            return
        shareable = request.shareable_ids if request.shares_prompt else ()
        if needed > manager.fitting_blocks(shareable, request.root):
            raise self._too_large(request)

    def _too_large(self, request: Request) -> CapacityError:
        block_size = self.manager.block_size
        num_blocks = self.manager.num_blocks
        needed = self.manager.blocks_for(request.max_slots)
        held = num_blocks - self.manager.usable_block_count
        room = f"but the pool has only {num_blocks}"
        if (
            held
            and request.terms.pin_share == 1
            and self.manager.pins.num_owned(request.tenant) == held
        ):
            room = f"but only {num_blocks - held} of {num_blocks} in the pool are not pinned"
        elif held and needed <= num_blocks:  # do not reveal how many blocks others pinned
            room = "more than pinned prompts leave free (max_pinned_blocks)"
        can_lower = request.max_tokens > request.num_prompt_tokens + 1
        advice = "lower max_new_tokens" if can_lower else "shorten the prompt"
        return CapacityError(
            f"the request needs {needed} blocks ({request.num_prompt_tokens} prompt tokens and "
            f"up to {request.max_tokens - request.num_prompt_tokens} new ones, {block_size} per "
            f"block), {room}; {advice}{', unpin' if held else ''} or enlarge "
            "max_cache_bytes or num_blocks"
        )

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue."""
        bisect.insort(self.waiting, sequence, key=_BY_RANK)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence in any status and free its blocks."""
        self.loads.end(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.finish()

    def schedule(self) -> StepPlan:
        """Plan the next step and reserve its blocks.

        Returns:
            The plan, which is empty if nothing can be computed.
        """
        plan = StepPlan()
        self._fairness.update(itertools.chain(self.waiting, self.running))
        if self.waiting:
            self._admit(plan)
        scored = self._next_to_score()
        running = [one for one in self.running if one is scored or not one.prepares]
        num_others = len(self.waiting) + len(self.running) - len(running)
        members, limit = self.pacing.limit(running, num_others, self.max_batch_tokens)
        wanted = self._share(members, limit)
        for sequence in members:
            if count := wanted.get(sequence.index, 0):
                wanted[sequence.index] = sequence.whole_query_blocks(count)
        num_scored = 0 if scored is None else wanted.pop(scored.index, 0)
        self._reserve(wanted, plan)
        budget = max(0, self.max_batch_tokens - sum(wanted.values()) - num_scored)
        reserve = functools.partial(self._reserve_spare, plan)
        # Draft tokens of background sequences would take time from the others.
        drafting = [one for one in self.running if one.index not in limit.spare]
        self.speculation.draft(drafting, wanted, budget, reserve)
        if scored is not None and num_scored and scored.prepares:  # it was not preempted
            plan.preparing = scored, num_scored
            self._fairness.charge_scoring(scored, num_scored)
        for sequence in self.running:
            count = wanted.get(sequence.index, 0)
            if count:
                for one in sequence.next_work(count):
                    plan.work.append(one)
                    self._fairness.charge(one)
        return plan

    def _next_to_score(self) -> Sequence | None:
        """Return the sequence whose reused spans the next step scores, or None.

        A step scores only one, because each scoring pass reads the weights once more.
        """
        able = [one for one in self.running if one.is_ready or one.prepares]
        is_idle = all(one.is_background for one in able)
        found = [one for one in able if one.prepares and (is_idle or not one.needs_idle)]
        if len(found) > 1 and self._fairness.is_shared:
            urgent = [one for one in found if one.priority == found[0].priority]
            return next(self._fairness.in_turn(urgent, ()))
        return found[0] if found else None

    # Admission.

    @property
    def _is_alone(self) -> bool:
        """True if no running sequence and no prefetch holds blocks."""
        return not self.running and not self.loads

    def _admit(self, plan: StepPlan) -> None:
        """Admit waiting sequences in order, up to the first one that does not fit."""
        manager = self.manager
        for sequence in self._by_turn():
            if sequence.needs_idle and not all(one.is_background for one in self.running):
                continue
            if not self._has_place(sequence) and self._who_makes_place(sequence) is None:
                return
            try:
                if not self._is_alone and self._awaits(sequence) and not self._overtakes(sequence):
                    # Another sequence or a prefetch brings the same prefix. Later sequences may be
                    # admitted first.
                    continue
                if not self._has_place(sequence):
                    # Preempt only for an admission. If the place stayed empty, the preempted
                    # sequence would be admitted and preempted again in turn.
                    if self.loads.is_awaited_by(sequence):
                        continue
                    self._make_place(sequence)
                if self.loads.bring(sequence, self._spare_blocks_of(sequence), self.sharing):
                    continue
                admitted = self._try_admit(sequence, plan)
                if not admitted and self.loads.make_room():
                    admitted = self._try_admit(sequence, plan)
                while not admitted and self._preempt_background(sequence):
                    admitted = self._try_admit(sequence, plan)
            except CacheCorruption:
                raise
            except Exception as error:
                plan.failed.append((sequence, error))
                continue
            if not admitted:
                sequence.blocked_at = manager.progress
                return

    def _by_turn(self) -> Iterator[Sequence]:
        """Yield the waiting sequences by priority, tenant share and arrival."""
        if not self._fairness.is_shared:
            yield from list(self.waiting)
            return
        for _, group in itertools.groupby(list(self.waiting), key=_BY_PRIORITY):
            yield from self._fairness.in_turn(group, self.running)

    def _last_background(self, sequence: Sequence) -> Sequence | None:
        """Return the last background sequence if a waiting one may preempt it, or None.

        Background sequences never preempt each other.
        """
        if sequence.is_background or not (self.running and self.running[-1].is_background):
            return None
        return self.running[-1]

    def _preempt_background(self, sequence: Sequence) -> bool:
        """Preempt the last background sequence for `sequence`, and return whether there was one."""
        other = self._last_background(sequence)
        if other is not None:
            self._preempt(other)
        return other is not None

    def _overtakes(self, sequence: Sequence) -> bool:
        """Return whether a sequence can compute a prefix itself that a less urgent one computes.

        The prompt of the less urgent one may wait for a long time. It is preempted, and its
        computed blocks stay in the cache.
        """
        while (awaited := sequence.awaited_hash) is not None:
            less_urgent = (one for one in self.running if self._runs_after(one, sequence))
            other = next(
                (one for one in less_urgent if self.manager.brings(one.blocks, awaited)), None
            )
            if other is None:
                return False
            self._preempt(other)
            self._awaits(sequence)
        return True

    def _runs_after(self, other: Sequence, sequence: Sequence) -> bool:
        """Return whether a running sequence is less urgent than a waiting one."""
        if other.priority > sequence.priority:
            return True
        # The waiting sequence does not need an idle engine, or it would not be admitted now.
        return other.needs_idle and not all(one.is_background for one in self.running)

    def _is_full(self, sequence: Sequence) -> bool:
        """Return whether other sequences have all places."""
        # A sequence whose prefix is being prefetched counts as running. After the prefetch it waits
        # like others. Otherwise it could block a more urgent request forever.
        arriving = self.loads.num_arriving_besides(sequence)
        return len(self.running) + arriving >= self.max_num_seqs

    def _has_place(self, sequence: Sequence) -> bool:
        """Return whether a sequence may be admitted without preempting another one."""
        is_blocked = bool(self.running) and sequence.blocked_at == self.manager.progress
        return not is_blocked and not self._is_full(sequence)

    def _who_makes_place(self, sequence: Sequence) -> Sequence | None:
        """Return the running sequence to preempt for a waiting one that has no place, or None.

        It is a background sequence, or one of a tenant that has more than its share.
        """
        if self._is_full(sequence) and (other := self._last_background(sequence)) is not None:
            return other
        if not self._fairness.is_shared:
            return None
        other = self._fairness.who_yields(sequence, self.running)
        if other is None:
            return None
        freed = sum(self.manager.ref_count(block_id) == 1 for block_id in other.blocks.block_ids)
        # Add one, because a shared block may have to be copied.
        needed = -(-sequence.num_tokens // self.manager.block_size) + 1
        return None if needed > self._spare_blocks_of(sequence) + freed else other

    def _make_place(self, sequence: Sequence) -> None:
        """Preempt another sequence for a waiting one that has no place."""
        other = self._who_makes_place(sequence)
        if other is not None:
            self._preempt(other)

    def _awaits(self, sequence: Sequence) -> bool:
        """Return whether to wait for shareable blocks.

        A running sequence or a prefetch will bring these blocks.
        """
        # Repeat the lookup only after the awaited block has arrived or can no longer arrive.
        if sequence.uses_cache and not self.manager.is_in_flight(sequence.awaited_hash):
            request = sequence.request
            awaited = self.manager.awaited_hash(
                sequence.cacheable_ids, request.root, request.prefix_hashes
            )
            sequence.awaited_hash = awaited
        return sequence.awaited_hash is not None

    def _spare_blocks_of(self, sequence: Sequence) -> int:
        """Return the number of free blocks that admitting a sequence may use."""
        if not self.running:
            return self.manager.free_block_count
        # Keep one block for each running sequence, or the admitted one would soon be preempted.
        # Also keep the protected blocks of other tenants.
        kept = self.manager.protected_block_count(sequence.tenant)
        return self.manager.free_block_count - len(self.running) - kept

    def _try_admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Open a block table and reserve blocks for all tokens of a sequence.

        Returns:
            False if too few blocks are free. Nothing has changed then.
        """
        sequence.look_up()
        # Prefetched blocks are in the cache now, and no other sequence is admitted before this one.
        self.loads.end(sequence)
        for use_cache, use_spans in self._ways(sequence):
            # After a preemption, a sequence finds its own blocks, which do not count as hits.
            first = not sequence.was_admitted
            table = self.manager.open_table(
                sequence.cacheable_ids,
                sequence.request.root,
                use_cache=use_cache,
                count=first,
                num_tokens=sequence.num_tokens if sequence.logits_from is None else None,
                owner=sequence.tenant,
                again=sequence.request.publishes and sequence.request.terms.is_kept_longer,
                known=sequence.request.prefix_hashes,
                hints=sequence.request.snapshot_hints,
                publish=sequence.request.publishes,
            )
            try:
                has_room = self._has_room(sequence, table, use_spans=use_spans)
                if has_room:
                    missed = self.loads.missed(table)
                    self._extend(sequence, table, sequence.num_tokens, plan)
                    sequence.admit(table, missed)
            except BaseException:
                self.manager.free(table)
                raise
            if has_room:
                self.waiting.remove(sequence)
                bisect.insort(self.running, sequence, key=_BY_RANK)
                self.loads.used(table)
                return True
            self.manager.free(table)
            if not self._is_alone:
                return False
            # The sequence is alone and still too large. Try again with less reuse, because a shared
            # block that must be copied takes an extra block. Reused spans take more blocks too,
            # because they start and end inside blocks.
        self.check_fits(sequence.request)
        if len(self.manager.pins):  # pins were added after it was queued
            raise self._too_large(sequence.request)
        raise CacheCorruption(
            f"request {sequence.index} fits the empty pool by its size but finds no free blocks"
        )

    def _ways(self, sequence: Sequence) -> Iterator[tuple[bool, bool]]:
        """Yield the ways to use the cache, as (prefix, spans), best first."""
        if sequence.uses_cache:
            if sequence.request.repair is not None:
                yield True, True
            yield True, False
        yield False, False

    def _has_room(self, sequence: Sequence, table: BlockTable, *, use_spans: bool) -> bool:
        """Return whether blocks for all tokens and a slot for the recurrent state are free.

        With spans, the blocks are allocated here.
        """
        if not self.manager.recurrent.has_room(table):
            return False
        spare = self._spare_blocks_of(sequence)
        if use_spans and (placed := self.sharing.place(sequence, table, spare)) is not None:
            return placed
        return self.manager.blocks_needed(table, sequence.num_tokens) <= spare

    # Block allocation.

    def _reserve(self, wanted: dict[int, int], plan: StepPlan) -> None:
        """Reserve slots for all wanted tokens, preempting sequences if too few blocks are free."""
        for sequence in list(self.running):
            if wanted.get(sequence.index, 0) and sequence.status is SequenceStatus.RUNNING:
                try:
                    self._reserve_one(sequence, sequence.stop_after(wanted[sequence.index]), plan)
                except CacheCorruption:
                    raise
                except Exception as error:
                    plan.failed.append((sequence, error))
                    wanted[sequence.index] = 0
        for sequence in self.waiting:
            if sequence.index in wanted:
                wanted[sequence.index] = 0

    def _reserve_one(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        while sequence.status is SequenceStatus.RUNNING:
            table = sequence.blocks
            needed = self.manager.blocks_needed(table, num_tokens)
            alone = len(self.running) == 1
            kept = 0 if alone or not needed else self.manager.protected_block_count(sequence.tenant)
            if not needed or needed <= self.manager.free_block_count - kept:
                self._extend(sequence, table, num_tokens, plan)
                return
            if self.loads.make_room():
                continue
            shared = self._fairness.is_shared and not alone
            self._preempt(
                self._fairness.who_is_preempted(self.running) if shared else self.running[-1]
            )

    def _reserve_spare(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve a sequence's slots up to `num_tokens` without preempting another sequence.

        Returns:
            False if too few blocks are spare. Nothing is reserved then.
        """
        table = sequence.blocks
        if self.manager.blocks_needed(table, num_tokens) > self._spare_blocks_of(sequence):
            return False
        self._extend(sequence, table, num_tokens, plan)
        return True

    def _extend(
        self, sequence: Sequence, table: BlockTable, num_tokens: int, plan: StepPlan
    ) -> None:
        copies = self.manager.extend(table, num_tokens)
        if copies:
            plan.copies.extend(copies)
            plan.copied_for.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's blocks and queue it again. Its tokens are kept and recomputed later."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.forget_computed()
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        table = sequence.blocks
        sequence.table = None
        self.manager.free(table)
