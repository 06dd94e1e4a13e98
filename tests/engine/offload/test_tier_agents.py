"""An agent on a pool that holds little more than the head of its prompts: blocks that a tier can
restore are never recomputed.
"""

import dataclasses
import random

import pytest

from benchmarks.data.agent_turns import Turns, play
from helpers.engine.fake_runner import Bench, expected_tokens
from helpers.engine.hand_io_thread import DictTier

AGENT = Turns(head=160, chats=2, turns=3, message=20, answer=8, side=70, sides=3, vocab=250)


def run(bench, turns, seed):
    """Return the number of full blocks that were computed twice: in all, and the most of any
    request.

    With a `seed`, the I/O thread is randomly slow.
    """
    draw = random.Random(seed)

    def ask(prompt, count):
        handle = bench.submit(prompt, count)
        while not handle.done:
            worked = bench.step()
            if seed is None or draw.random() < 0.5:
                worked = bool(bench.io_thread.pump(1)) or worked
            if not worked:
                bench.core.tiering.save_more()
        result = handle.result(0)
        assert list(result.output_token_ids) == expected_tokens(prompt, count)
        return result.cached_tokens, list(result.output_token_ids)

    twice = play(turns, ask).twice
    bench.run()
    return sum(twice), max(twice)


@pytest.mark.parametrize("num_blocks", [18, 20, 22])
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.some(4)
def test_an_agent_computes_no_full_block_twice(num_blocks, seed):
    tier = DictTier()
    assert run(Bench(num_blocks, tiers=[tier]), AGENT, seed) == (0, 0)
    assert tier.num_read >= AGENT.head // 16


def test_without_a_tier_an_agent_recomputes_its_head():
    twice, _ = run(Bench(18), dataclasses.replace(AGENT, turns=2), None)
    assert twice > AGENT.head // 16
