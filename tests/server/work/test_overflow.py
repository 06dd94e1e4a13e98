"""Tests of the turns that are dropped when a conversation outgrows the context."""

import itertools

from kvboost_edge.server.api.chat_requests import ranges_to_drop

CHAT = ["system", *itertools.chain.from_iterable([["user", "assistant"]] * 10), "user"]


def drop(num_turns, limit, size=100):
    roles = ["system", *["user", "assistant"] * num_turns, "user"]
    return ranges_to_drop(roles, [size] * len(roles), size * len(roles), limit)


def test_truncation_drops_whole_turns_to_half_the_limit():
    # Of 22 messages of 100 tokens 2,000 fit. The five oldest turns (1,000 tokens) are dropped.
    assert drop(10, 2000)[0] == range(1, 11)


def test_the_dropped_turns_change_rarely_as_a_conversation_grows():
    gone = [drop(turns, 2000)[0].stop for turns in range(10, 40)]
    changes = sum(one != other for one, other in itertools.pairwise(gone))
    assert gone == sorted(gone)
    assert changes == 5  # 29 turns of 200 tokens are six times half the limit
    left = [
        100 * (2 * turns + 2 - (stop - 1)) for turns, stop in zip(range(10, 40), gone, strict=True)
    ]
    assert max(left) <= 2000
    assert min(left) >= 1000


def test_more_turns_are_dropped_if_estimates_were_low_but_never_the_last():
    tries = ranges_to_drop(CHAT, [50] * 22, 2200, 2000)
    assert [one.start for one in tries] == [1] * len(tries)
    assert [one.stop for one in tries] == sorted({one.stop for one in tries})
    assert tries[-1] == range(1, 21)
    assert drop(10, 1)[-1] == range(1, 21)


def test_tool_results_are_dropped_with_their_turn():
    roles = ["user", "assistant", "tool", "assistant", "user", "assistant", "tool", "tool", "user"]
    tries = ranges_to_drop(roles, [100] * 9, 900, 700)
    assert [one.stop for one in tries] == [4, 8]


def test_one_turn_cannot_be_cut():
    assert ranges_to_drop(["system", "user"], [10, 5000], 5010, 1000) == []
    assert ranges_to_drop(["user", "assistant", "tool"], [10, 10, 5000], 5020, 1000) == []
    assert ranges_to_drop([], [], 0, 10) == []
