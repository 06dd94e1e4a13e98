"""What agents send, as token ids: a long head with tools, chats in turn, short requests of other
kinds between.

`play` sends it to an engine and counts the full blocks that are computed though they were computed
before.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["AGENT", "Outcome", "Turns", "play"]


@dataclasses.dataclass(frozen=True)
class Turns:
    """Lengths in tokens. Each of `chats` begins with the same head; between two turns come a
    request for a title, which has instructions of its own before the chat's first message, and side
    requests that share nothing.
    """

    head: int
    chats: int
    turns: int
    message: int
    answer: int
    side: int
    sides: int
    vocab: int

    def draw(self, number: int, length: int) -> list[int]:
        """The tokens of text `number`, always the same."""
        return np.random.default_rng(number).integers(0, self.vocab, length).tolist()


AGENT = Turns(head=10_000, chats=2, turns=4, message=200, answer=48, side=1500, sides=3, vocab=1000)


@dataclasses.dataclass
class Outcome:
    """requests; prompt tokens of all; those of them that were computed; full blocks computed once
    more, by request.
    """

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    twice: list[int] = dataclasses.field(default_factory=list)


def play(
    turns: Turns, ask: Callable[[list[int], int], tuple[int, Sequence[int]]], block_size: int = 16
) -> Outcome:
    """`ask(prompt, count)` generates and returns (cached tokens, output)."""
    known: set[bytes] = set()
    outcome = Outcome()

    def send(prompt: list[int], count: int) -> list[int]:
        cached, output = ask(prompt, count)
        chains = _chains(prompt + list(output)[:-1], block_size)
        outcome.twice.append(sum(chain in known for chain in chains[cached // block_size :]))
        # Of a prompt that is cached to its end the last token is computed again, into a block that
        # is there already.
        if cached % block_size:
            outcome.twice[-1] -= 1
        known.update(chains)
        outcome.requests += 1
        outcome.prompt_tokens += len(prompt)
        outcome.computed_tokens += len(prompt) - cached
        return list(output)

    numbers = iter(range(1, 1 << 30))
    head = turns.draw(0, turns.head)
    title = turns.draw(next(numbers), turns.message)
    chats = [head.copy() for _ in range(turns.chats)]
    for turn in range(turns.turns):
        for chat in chats:
            message = turns.draw(next(numbers), turns.message)
            chat += message
            chat += send(chat, turns.answer)
            if turn == 0:
                send(title + message, turns.answer)
            for _ in range(turns.sides):
                send(turns.draw(next(numbers), turns.side), turns.answer)
    return outcome


def _chains(token_ids: list[int], block_size: int) -> list[bytes]:
    """A name for each full block and all before it."""
    names = []
    parent = b""
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hashlib.sha256(
            parent + np.array(token_ids[end - block_size : end], "<u4").tobytes()
        ).digest()
        names.append(parent)
    return names
