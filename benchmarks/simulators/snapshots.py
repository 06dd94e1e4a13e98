"""Simulator of state snapshots: replays conversations with a hybrid model on the block manager.

    python benchmarks/simulators/snapshots.py [--quick] [--out benchmarks/results/FILE.json]

Six conversations with assistants run at a time, with system prompts of 600 to 1,500 tokens. Their
requests run one by one in passes of 512 tokens, as in an engine. There is room for all KV and for a
limited number of states. `large` states are kept at selected positions (Qwen3.5, Granite 4 h),
`small` states after every block (LFM2).

    chat           turns of 30 to 200 tokens and answers of 50 to 400. 15% regenerate an answer, and
                   10% edit the last turn
    mixed          30% of the prompts are documents of 500 to 6,000 tokens without follow-up
    rewritten      clients send only the last third of an answer back, like clients that drop
                   thinking
    long answers   answers of 400 to 1,500 tokens

    computed       computed tokens as a share of all prompt tokens
    floor          the same if a state were stored after every block ever computed

Nothing is timed, so a run gives the same figures on every machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes

__all__ = ["TRAFFIC", "Replayed", "Traffic", "replay"]

_BLOCK = 16
_STEP = 512
_INTERVAL = 1024
_ASSISTANTS = 3
_AT_A_TIME = 6
_TURNS = 8
_SYSTEM = (600, 1500)
_TURN = (30, 200)
_DOCUMENT = (500, 6000)
_NUM_BLOCKS = 200_000  # so that only states are evicted
_SLOTS = {"large": (16, 32, 64), "small": (64, 128, 256)}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Length of answers in tokens, and shares of special prompts.

    Attributes:
        answer: Range of the answer length in tokens.
        again: Share of prompts that regenerate the last answer.
        edited: Share of prompts that edit the last turn.
        documents: Share of prompts that are documents.
        rewritten: Share of answers that clients send back changed.
    """

    answer: tuple[int, int] = (50, 400)
    again: float = 0.15
    edited: float = 0.1
    documents: float = 0.0
    rewritten: float = 0.0


TRAFFIC = {
    "chat": Traffic(),
    "mixed": Traffic(documents=0.3),
    "rewritten": Traffic(rewritten=1.0),
    "long answers": Traffic(answer=(400, 1500)),
}


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Counts of a replay: all prompt tokens, computed ones, and those without KV."""

    prompts: int
    computed: int
    missing: int


class _Conversation:
    """A conversation.

    Attributes:
        tokens: All tokens so far.
        borders: Positions where user messages begin. The last message can be taken back.
    """

    def __init__(self, system: list[int]) -> None:
        self.tokens = list(system)
        self.borders: list[int] = []
        self.message: list[int] = []
        self.turns = 0

    def ask(self, message: list[int]) -> None:
        self.borders.append(len(self.tokens))
        self.message = message
        self.turns = self.turns + 1
        self.tokens += message

    def take_back(self) -> None:
        del self.tokens[self.borders.pop() :]


class _Client:
    """Client that makes prompts and receives the answers."""

    def __init__(self, traffic: Traffic, seed: int) -> None:
        self._traffic = traffic
        self._random = random.Random(seed)
        self._fresh = itertools.count(1000)
        self._systems = [self.text(_SYSTEM) for _ in range(_ASSISTANTS)]
        self._live: list[_Conversation] = []

    def text(self, length: tuple[int, int]) -> list[int]:
        return list(itertools.islice(self._fresh, self._random.randint(*length)))

    def prompt(self) -> tuple[list[int], list[int], _Conversation | None]:
        """Return the next prompt, the positions where user messages begin, and its conversation."""
        system = self._random.choice(self._systems)
        if self._random.random() < self._traffic.documents:
            return system + self.text(_DOCUMENT), [len(system)], None
        if len(self._live) < _AT_A_TIME:
            self._live.append(_Conversation(system))
        one = self._random.choice(self._live)
        kind = self._random.random()
        message = one.message
        if one.turns and kind < self._traffic.again + self._traffic.edited:
            one.take_back()
        if not one.turns or kind >= self._traffic.again:
            message = self.text(_TURN)
        one.ask(message)
        return list(one.tokens), list(one.borders), one

    def take(self, one: _Conversation, answer: list[int]) -> None:
        rewritten = self._random.random() < self._traffic.rewritten
        one.tokens += answer[2 * len(answer) // 3 :] if rewritten else answer
        if one.turns >= _TURNS:
            self._live.remove(one)


def replay(
    traffic: Traffic, sizes: StateSizes, *, num_prompts: int = 150, seed: int = 0
) -> Replayed:
    """Replay one client's prompts in order."""
    client = _Client(traffic, seed)
    root = root_hash(model_fingerprint="random", kv_format="f16")
    manager = KVCacheManager(_NUM_BLOCKS, _BLOCK, state_sizes=sizes)
    prompts = computed = missing = 0
    for _ in range(num_prompts):
        tokens, borders, one = client.prompt()
        answer = client.text(traffic.answer)
        cached, matched = _run(manager, root, tokens, answer, borders)
        prompts += len(tokens)
        computed += len(tokens) - cached
        missing += len(tokens) - matched
        if one is not None:
            client.take(one, answer)
    manager.check_invariants(())
    return Replayed(prompts, computed, missing)


def _run(
    manager: KVCacheManager, root: bytes, prompt: list[int], answer: list[int], hints: Iterable[int]
) -> tuple[int, int]:
    """Run a prompt; return the tokens found with a state, and all tokens found."""
    assert manager.states is not None
    table = manager.open_table(prompt, root, hints=hints)
    cached = table.num_cached_tokens
    matched = table.num_matched_tokens
    tokens = prompt + answer
    # the last token of an answer is not computed
    start = cached
    end = len(tokens) - 1
    while start < end:
        # Committing an answer block by block keeps the same snapshots as token by token.
        stop = (
            min(start + _STEP, len(prompt))
            if start < len(prompt)
            else min(end, (start // _BLOCK + 1) * _BLOCK)
        )
        manager.states.prepare(table)
        manager.extend(table, stop)
        manager.states.plan(table, start, stop)
        manager.commit(table, tokens[:stop], stop)
        start = stop
    manager.free(table)
    return cached, matched


def rows_of(num_seeds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind, numbers in _SLOTS.items():
        for num_slots, (name, traffic) in itertools.product(numbers, TRAFFIC.items()):
            sizes = StateSizes(num_slots, _INTERVAL, every_block=kind == "small")
            runs = [replay(traffic, sizes, seed=seed) for seed in range(num_seeds)]
            tokens = sum(run.prompts for run in runs)
            computed = round(sum(run.computed for run in runs) / tokens, 4)
            floor = round(sum(run.missing for run in runs) / tokens, 4)
            rows.append(
                {
                    "states": kind,
                    "slots": num_slots,
                    "traffic": name,
                    "computed": computed,
                    "floor": floor,
                }
            )
    return rows


def main() -> None:
    options = harness.parser(__doc__ or "").parse_args()
    harness.report("snapshots", rows_of(1 if options.quick else 4), options=options)


if __name__ == "__main__":
    main()
