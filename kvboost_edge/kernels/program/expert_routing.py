"""Mixture of experts: selects each token's experts and lists the tokens of each expert.

B_CHOSEN is int64 [tokens, used] and holds each token's experts in ascending order. B_SHARES is
float32 of the same shape. The flat index of an entry, token * used + rank, is called its place.
B_DISPATCH is int64:

    numbers        content
    1              number of active experts, those that have tokens
    experts        the active experts, ascending
    experts + 1    first slot of each active expert, and the end of the last
    experts        counters
    tokens * used  slots: places of the first active expert, ascending, then of the next

Only these integers depend on the other tokens of a pass. A token's experts and shares depend only
on its own row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.table import RENORMS, SCORES, ExpertCounts, ProgramJob
from kvboost_edge.kernels.vectors import exp_f32, load_f32, load_i64, store_f32, store_i64

__all__ = [
    "active_expert",
    "count_active",
    "dispatch",
    "dispatch_numbers",
    "first_slot",
    "most_active",
    "place_at",
    "route",
    "sigmoid_f32",
]

_SIGMOID = SCORES["sigmoid"]
_CHOSEN = SCORES["chosen"]
_ADD = RENORMS["add"]
_LEAST = RENORMS["least"]
_MAX_EXPONENT = np.float32(88.0)
_LOWEST = np.float32(-np.inf)
_HIGHEST = np.float32(np.inf)


def dispatch_numbers(experts: int) -> int:
    """Return how many numbers precede the slots in B_DISPATCH."""
    return 2 + 3 * experts


@kernel
def count_active(job: ProgramJob) -> Any:
    """Return the number of experts that have tokens in this pass."""
    return load_i64(job.buffers[lt.B_DISPATCH])


@kernel
def active_expert(job: ProgramJob, index: int) -> Any:
    return load_i64(job.buffers[lt.B_DISPATCH] + 8 * (1 + index))


@kernel
def first_slot(job: ProgramJob, experts: int, index: int) -> Any:
    """Return the first slot of active expert `index`.

    If `index` equals the number of active experts, this is the end of all slots.
    """
    return load_i64(job.buffers[lt.B_DISPATCH] + 8 * (1 + experts + index))


@kernel
def place_at(job: ProgramJob, experts: int, slot: int) -> Any:
    """Return the place that a slot holds: token * used + rank."""
    return load_i64(job.buffers[lt.B_DISPATCH] + 8 * (2 + 3 * experts + slot))


@kernel
def most_active(job: ProgramJob, experts: ExpertCounts) -> Any:
    """Return the maximum number of experts that can have tokens."""
    # The result must not depend on the routing, because threads that join late also compute it.
    return min(experts.total, job.tokens * experts.used)


@kernel
def sigmoid_f32(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)), or NaN for NaN."""
    power = -x
    if power > _MAX_EXPONENT:  # min() could drop a NaN
        power = _MAX_EXPONENT
    return np.float32(1.0) / (np.float32(1.0) + exp_f32(power))


@kernel
def _softmax(row: int, count: int) -> None:
    """Compute the softmax of `count` float32 in place, summing in ascending order of index."""
    largest = load_f32(row)
    total = np.float32(0.0)
    for index in range(1, count):
        largest = max(largest, load_f32(row + 4 * index))
    for index in range(count):
        power = exp_f32(load_f32(row + 4 * index) - largest)
        store_f32(row + 4 * index, power)
        total += power
    for index in range(count):
        store_f32(row + 4 * index, load_f32(row + 4 * index) / total)


@kernel
def _wanted(scores: int, bias: int, index: int) -> Any:
    """Return the number that experts are ranked by: the score plus the bias, if there is one."""
    score = load_f32(scores + 4 * index)
    return score if bias == 0 else score + load_f32(bias + 4 * index)


@kernel
def _is_sound(scores: int, bias: int, experts: int) -> bool:
    """Return False if any score is NaN."""
    for index in range(experts):
        number = _wanted(scores, bias, index)
        if number != number:
            return False
    return True


@kernel
def _group_score(scores: int, bias: int, first: int, size: int) -> Any:
    """Return the sum of the two largest scores of the group that begins at expert `first`."""
    largest = _LOWEST
    second = _LOWEST
    for index in range(first, first + size):
        number = _wanted(scores, bias, index)
        if number > largest:
            second = largest
            largest = number
        elif number > second:
            second = number
    return largest + second


@kernel
def _limit_groups(scores: int, bias: int, size: int, groups: int, used: int) -> None:
    """Set all scores to -inf except those of the `used` groups with the largest group scores.

    Ties go to the lower group.
    """
    for group in range(groups):
        own = _group_score(scores, bias, group * size, size)
        # A group that was set to -inf is not counted. The groups above it are enough to exclude
        # each group below it.
        above = 0
        for other in range(groups):
            number = _group_score(scores, bias, other * size, size)
            if number > own or (number == own and other < group):
                above += 1
        if above >= used:
            for index in range(group * size, (group + 1) * size):
                store_f32(scores + 4 * index, _LOWEST)


@kernel
def _choose(scores: int, bias: int, experts: int, used: int, chosen: int) -> None:
    """Write the `used` experts with the largest scores to `chosen`, in ascending order.

    Ties go to the lower expert number.
    """
    last = _HIGHEST
    place = -1
    for rank in range(used):
        # Find the next largest score, in order of decreasing score and increasing index.
        best = _LOWEST
        found = -1
        for index in range(experts):
            number = _wanted(scores, bias, index)
            if (number < last or (number == last and index > place)) and (
                found < 0 or number > best
            ):
                best = number
                found = index
        last = best
        place = found
        at = rank
        while at > 0 and load_i64(chosen + 8 * (at - 1)) > found:
            store_i64(chosen + 8 * at, load_i64(chosen + 8 * (at - 1)))
            at -= 1
        store_i64(chosen + 8 * at, found)


@kernel
def route(job: ProgramJob, op: lt.RouteOp, token: int) -> None:
    """Compute a token's experts and shares; its row of logits is replaced by scores."""
    experts = op.experts.total
    used = op.experts.used
    row = job.buffers[lt.B_ROUTED] + 4 * token * op.step
    chosen = job.buffers[lt.B_CHOSEN] + 8 * token * used
    shares = job.buffers[lt.B_SHARES] + 4 * token * used
    one = np.float32(1.0)
    if op.score == _SIGMOID:
        for index in range(experts):
            store_f32(row + 4 * index, sigmoid_f32(load_f32(row + 4 * index)))
    elif op.score != _CHOSEN:
        _softmax(row, experts)
    is_sound = _is_sound(row, op.bias, experts)
    if is_sound:
        if op.used_groups < op.groups:
            _limit_groups(row, op.bias, experts // op.groups, op.groups, op.used_groups)
        _choose(row, op.bias, experts, used, chosen)
    else:
        for rank in range(used):
            store_i64(chosen + 8 * rank, rank)
    for rank in range(used):
        store_f32(shares + 4 * rank, load_f32(row + 4 * load_i64(chosen + 8 * rank)))
    if op.score == _CHOSEN:
        _softmax(shares, used)
    total = np.float32(0.0)
    for rank in range(used):
        total += load_f32(shares + 4 * rank)
    if op.renorm == _ADD:
        total += op.eps
    elif op.renorm == _LEAST:
        total = max(total, np.float32(op.eps))
    else:
        total = one
    for rank in range(used):
        share = load_f32(shares + 4 * rank) / total * op.factor
        if op.factors != 0:
            share *= load_f32(op.factors + 4 * load_i64(chosen + 8 * rank))
        store_f32(shares + 4 * rank, share if is_sound else np.float32(np.nan))


@kernel
def dispatch(job: ProgramJob, counts: ExpertCounts) -> None:
    """List the slots of each expert in token order, with a counting sort."""
    experts = counts.total
    places = job.tokens * counts.used
    chosen = job.buffers[lt.B_CHOSEN]
    base = job.buffers[lt.B_DISPATCH]
    active_at = base + 8
    first_at = base + 8 * (1 + experts)
    next_at = base + 8 * (2 + 2 * experts)
    slots = base + 8 * (2 + 3 * experts)
    for expert in range(experts):
        store_i64(next_at + 8 * expert, 0)
    for place in range(places):
        at = next_at + 8 * load_i64(chosen + 8 * place)
        store_i64(at, load_i64(at) + 1)
    active = 0
    slot = 0
    for expert in range(experts):
        count = load_i64(next_at + 8 * expert)
        if count > 0:
            store_i64(active_at + 8 * active, expert)
            store_i64(first_at + 8 * active, slot)
            active += 1
        store_i64(next_at + 8 * expert, slot)
        slot += count
    store_i64(first_at + 8 * active, slot)
    store_i64(base, active)
    for place in range(places):
        at = next_at + 8 * load_i64(chosen + 8 * place)
        slot = load_i64(at)
        store_i64(slots + 8 * slot, place)
        store_i64(at, slot + 1)
