"""A fake model that thinks until it is stopped, and then answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from helpers.engine import fake_runner
from helpers.engine.fake_runner import EOS_ID
from helpers.server.scripted_model import FORMATS, TEMPLATE, Format, scripted
from helpers.text.chat_templates import SWITCHED

ASK = [{"role": "user", "content": "Why?"}]
THOUGHT = "abcdefghijklmnopqrstuvwxyz"
ANSWER = "Because."

_THINK = ("<think>", "</think>")
_GENERATES = "{%- if add_generation_prompt %}<|assistant|>"
_ALWAYS = TEMPLATE[: TEMPLATE.index("{%- if enable_thinking")] + "{%- endif %}"
OPENED = _ALWAYS.replace(_GENERATES, _GENERATES + "<think>")
"""A template that writes the opener itself."""
LEVELS = _ALWAYS.replace(_GENERATES, _GENERATES + "{{ reasoning_effort or 'medium' }} effort:")
"""A template with levels of effort."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model's format of reasoning. `asks` are the ends of other roles' messages, `opening` the
    beginnings of its turn.
    """

    form: Format
    asks: tuple[str, ...]
    opening: tuple[str, ...]
    opener: str
    closer: str
    answer: str = "{}"


KINDS = {
    "letters": Kind(
        FORMATS["hermes"], ("<|user|>", "<|tool|>"), ("<|assistant|>",), "<think>", "</think>"
    ),
    "gemma": Kind(
        dataclasses.replace(FORMATS["gemma"], markers=("<|channel>", "<channel|>")),
        ("<|turn>user", "<|tool_response>"),
        ("<|turn>model\n", "<tool_response|>"),
        "<|channel>thought",
        "<channel|>",
    ),
    "harmony": Kind(
        FORMATS["harmony"],
        ("<|start|>user", "to=assistant"),
        ("<|start|>assistant",),
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        "<|channel|>final<|message|>{}",
    ),
}
KINDS["markers"] = dataclasses.replace(
    KINDS["letters"], form=dataclasses.replace(FORMATS["hermes"], markers=_THINK)
)
KINDS["opened"] = dataclasses.replace(
    KINDS["markers"], form=dataclasses.replace(FORMATS["hermes"], markers=_THINK, template=OPENED)
)
KINDS["levels"] = dataclasses.replace(
    KINDS["markers"],
    form=dataclasses.replace(FORMATS["hermes"], markers=_THINK, template=LEVELS),
    opening=("effort:",),
)
KINDS["closed only"] = dataclasses.replace(
    KINDS["markers"],
    form=dataclasses.replace(FORMATS["hermes"], markers=_THINK, template=SWITCHED),
    asks=("<|im_start|>user",),
    opening=("<|im_start|>assistant\n",),
)


class Thinker:
    """The texts that the model generates.

    Attributes:
        thought: its reasoning, repeated endlessly.
        thinks: number of letters of reasoning; None means without end.
        answers: texts after the reasoning, the most likely one first.
    """

    def __init__(self, engine: Any, kind: Kind) -> None:
        self._tokenizer = engine.tokenizer
        self._kind = kind
        self._ends = [self.ids(end)[0] for end in kind.form.ends] or [EOS_ID] * 2
        self.thought = THOUGHT
        self.thinks: int | None = None
        self.answers: Sequence[str] = [kind.answer.format(ANSWER)]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.codec.encode(text, False)
        return found

    def logits(self, token_ids: Any) -> Any:
        turn = self._turn(self._tokenizer.decode(np.asarray(token_ids).tolist(), False))
        row = np.zeros(fake_runner.VOCAB_SIZE, np.float32)
        row[self._ends[-1]] = 2.0
        for token_id, logit in self._wanted(turn):
            row[token_id] = max(row[token_id], logit)
        return row

    def _turn(self, text: str) -> str:
        asked = max(text.rfind(one) for one in self._kind.asks)
        begins = [text.find(one, asked) + len(one) for one in self._kind.opening if one in text]
        return text[max(begins, default=0) :]

    def _wanted(self, turn: str) -> Iterator[tuple[int, float]]:
        kind = self._kind
        if not turn.startswith(kind.opener):
            yield self.ids(kind.opener.removeprefix(turn))[0], 20.0
            return
        thought, closed, answer = turn.removeprefix(kind.opener).partition(kind.closer)
        if closed:
            for place, one in enumerate(self.answers):
                if one.lstrip().startswith(answer.lstrip()):
                    rest = one.lstrip().removeprefix(answer.lstrip())
                    yield self.ids(rest)[0] if rest else self._ends[-1], 20.0 - place
            return
        number = len(thought)
        if self.thinks is None or number < self.thinks:
            yield self.ids(self.thought[number % len(self.thought)])[0], 20.0
        else:
            written = thought[self.thinks :]
            yield self.ids(kind.closer.removeprefix(written))[0], 20.0


@contextmanager
def thinking(patch: Any, name: str = "markers", **options: Any) -> Iterator[tuple[Any, Thinker]]:
    """Yield an engine with a model that thinks, and its `Thinker`. The fakes stay patched until the
    test ends.
    """
    kind = KINDS[name]
    with scripted(patch, kind.form, **options) as (engine, _):
        thinker = Thinker(engine, kind)
        patch.setattr(fake_runner, "token_logits", thinker.logits)
        yield engine, thinker
