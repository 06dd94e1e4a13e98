"""Given answers of a model with random weights, which cannot answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvboost_edge.engine.schedule import sequence as running_state

__all__ = ["give_answers"]


def give_answers(find: Callable[[Sequence[int]], Sequence[int] | None]) -> None:
    """Make the sequences of this process generate given answers, whatever their logits are.

    A token is still sampled in each step, so that the computation and its time are the same.

    Args:
        find: returns the answer to a prompt, or None for a sequence that answers by itself. It is
            called with the prompt's token ids when the first token is sampled.
    """
    make_sampler = running_state.make_sampler

    def sampler(*given: Any, **more: Any) -> Any:
        own = make_sampler(*given, **more)
        answer: Sequence[int] | None = None
        is_known = False

        def sample(
            logits: Any, token_ids: Sequence[int], num_prompt: int, largest: int | None = None
        ) -> int:
            nonlocal answer, is_known
            if not is_known:
                answer = find(token_ids[:num_prompt])
                is_known = True
            chosen: int = own(logits, token_ids, num_prompt, largest)
            if answer is None:
                return chosen
            token = answer[len(token_ids) - num_prompt]
            if logits[token] == -float("inf"):
                raise RuntimeError(f"the token {token} of the given answer is not allowed here")
            return token

        return sample

    running_state.make_sampler = sampler  # type: ignore[assignment]
