"""Agent traffic as token ids: chats that share a long head with tools, and other requests.

`play` sends the traffic to an engine and counts full blocks that are computed more than once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["AGENT", "Outcome", "Turns", "play"]


@dataclasses.dataclass(frozen=True)
class Turns:
    """Lengths of the traffic in tokens.

    Each of `chats` begins with the same head. Between two turns there are a title request, whose
    own instructions precede the chat's first message, and side requests that share nothing.
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
        """Return the tokens of text `number`, which are always the same."""
        return np.random.default_rng(number).integers(0, self.vocab, length).tolist()


AGENT = Turns(head=10_000, chats=2, turns=4, message=200, answer=48, side=1500, sides=3, vocab=1000)


@dataclasses.dataclass
class Outcome:
    """Requests, prompt tokens, computed prompt tokens, and recomputed blocks by request."""

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    twice: list[int] = dataclasses.field(default_factory=list)


def play(
    turns: Turns, ask: Callable[[list[int], int], tuple[int, Sequence[int]]], block_size: int = 16
) -> Outcome:
    """Send all requests. `ask(prompt, count)` generates and returns (cached tokens, output)."""
    known: set[bytes] = set()
    outcome = Outcome()

    def send(prompt: list[int], count: int) -> list[int]:
        cached, output = ask(prompt, count)
        chains = _chains(prompt + list(output)[:-1], block_size)
        outcome.twice.append(sum(chain in known for chain in chains[cached // block_size :]))
        # The last token of a fully cached prompt is recomputed into an existing block.
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
    """Return a key for each full block together with all blocks before it."""
    names = []
    parent = b""
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hashlib.sha256(
            parent + np.array(token_ids[end - block_size : end], "<u4").tobytes()
        ).digest()
        names.append(parent)
    return names
