"""Conversations that have outgrown the context: whole turns are left out, the oldest first and many
at once, so that the turns after it find their beginning in the cache again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["ranges_to_drop"]


def ranges_to_drop(
    roles: Sequence[str], sizes: Sequence[int], num_tokens: int, limit: int
) -> list[range]:
    """Which messages to leave out of a prompt of `num_tokens` where `limit` fit: what to try, the
    fewest first.

    roles, sizes: of each message; its size in tokens, about, which must not depend on the other
    messages.

    System messages at the beginning and the last turn, from the last message of the user on, always
    stay. How much goes is a multiple of half the limit: while a conversation grows by as much, the
    same turns go, and what is left begins alike.
    """
    head = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), 0)
    begins = [at for at in range(head, len(roles)) if roles[at] == "user"]
    ends = begins[1:]  # where what is kept may begin
    if not ends:
        return []
    before = [0, *accumulate(sizes)]
    gone = {end: before[end] - before[head] for end in ends}
    step = max(1, limit // 2)
    least = -(-(num_tokens - limit) // step) * step
    most = gone[ends[-1]] + step
    found = [
        next((end for end in ends if gone[end] >= goal), ends[-1])
        for goal in range(least, most, step)
    ]
    return [range(head, end) for end in dict.fromkeys([*found, ends[-1]])]
