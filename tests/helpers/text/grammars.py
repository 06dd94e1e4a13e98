"""The demo model's vocabulary under a grammar: checks of texts, and random texts that match."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from llguidance import LLMatcher, LLTokenizer

import kvboost_edge
from kvboost_edge.text.codec import FastCodec

DEMO = Path(kvboost_edge.__path__[0]) / "assets" / "demo"


class Vocabulary:
    """The demo model's tokens and additional `special` or ordinary ones. The token `end` ends an
    answer.
    """

    def __init__(
        self, special: Sequence[str] = (), ordinary: Sequence[str] = (), end: str = "<|end|>"
    ) -> None:
        raw = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        raw.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ordinary])
        raw.add_special_tokens(
            [tokenizers.AddedToken(text, normalized=False) for text in (*special, end)]
        )
        self.codec = FastCodec(raw)
        self.end = raw.token_to_id(end)
        self.known = LLTokenizer(
            self.codec.to_json(), n_vocab=self.codec.vocab_size, eos_token=[self.end]
        )

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.known, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error() + grammar
        return matcher

    def takes(self, grammar: str, text: str) -> bool:
        """Return whether the grammar accepts this text as a complete answer."""
        matcher = self.matcher(grammar)
        ids = self.codec.encode(text, False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def sample(
        self,
        grammar: str,
        seed: int,
        wanted: Sequence[str],
        *,
        often: float = 0.3,
        ends: float = 0.3,
        most: int = 300,
    ) -> tuple[str, bool]:
        """Generate a random text that matches the grammar, and whether it ended.

        Args:
            often: probability of inserting one of the `wanted` texts where it is allowed.
            ends: probability of ending the text where it may end.
        """
        matcher = self.matcher(grammar)
        choose = random.Random(seed)
        ids: list[int] = []
        while len(ids) < most and not matcher.is_stopped():
            text = self.codec.encode(choose.choice(wanted), False)
            if choose.random() < often and matcher.validate_tokens(text) == len(text):
                step = text
            else:
                bits = int.from_bytes(matcher.compute_bitmask(), "little")
                allowed = [i for i in range(self.codec.vocab_size) if bits >> i & 1]
                step = [
                    self.end
                    if self.end in allowed and choose.random() < ends
                    else choose.choice(allowed)
                ]
            if step == [self.end]:
                return self.codec.decode(ids, False), True
            assert matcher.consume_tokens(step), matcher.get_error()
            ids += step
        return self.codec.decode(ids, False), matcher.is_stopped()
