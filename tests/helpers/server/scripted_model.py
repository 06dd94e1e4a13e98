"""A fake model that generates a test's text, in each format of reasoning and calls that chat
templates have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tokenizers import AddedToken

from helpers.engine import fake_runner
from helpers.engine.fake_runner import EOS_ID
from helpers.text.chat_templates import CHANNELS
from helpers.text.gemma_templates import GEMMA4
from helpers.text.hybrid_templates import LFM2_UNSHOWN
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.text.tokenizer import Tokenizer

Call = tuple[str, dict[str, Any]]

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "at": {"type": "array", "items": {"enum": ["noon", "night"]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK: dict[str, Any] = {"name": "clock"}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
ASK = [{"role": "user", "content": "And the weather?"}]
ARGUMENTS = {"city": 'Köln 🌧 "x", {a:1}<|"|', "days": 2, "at": ["noon"]}

TEMPLATE = """
{%- if tools %}<|system|>Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|end|>
{%- endif %}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}
{%- endif %}"""
_WORDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
_TURN = "<|assistant|>"
_NO_THOUGHTS = "<think>\n\n</think>\n\n"


def _hermes(calls: Sequence[Call]) -> str:
    made = [
        json.dumps({"name": name, "arguments": values}, ensure_ascii=False)
        for name, values in calls
    ]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in made)


def _gemma(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, list):
            return f"[{','.join(map(value, one))}]"
        return f'<|"|>{one}<|"|>' if isinstance(one, str) else str(one)

    made = [
        (name, ",".join(f"{key}:{value(one)}" for key, one in values.items()))
        for name, values in calls
    ]
    return "".join(f"<|tool_call>call:{name}{{{values}}}<tool_call|>" for name, values in made)


def _lfm2(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        return repr(one) if isinstance(one, str) else json.dumps(one)

    made = [
        f"{name}({','.join(f'{key}={value(one)}' for key, one in values.items())})"
        for name, values in calls
    ]
    return f"<|tool_call_start|>[{', '.join(made)}]<|tool_call_end|>"


def _harmony(calls: Sequence[Call]) -> str:
    ((name, values),) = calls
    arguments = json.dumps(values, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


@dataclasses.dataclass(frozen=True)
class Format:
    """A model's format of turns.

    Attributes:
        openings: texts after one of which its turn begins.
        call: text with which a call begins.
        markers: special tokens of its vocabulary.
        thought: format of reasoning; None if it has none.
        said: format of text before calls.
        text: format of text that ends a turn.
        most: largest number of calls in one turn.
        ends: token that ends a turn with calls, and token that ends one without; () for the fake
            tokenizer's own.
    """

    template: str
    openings: tuple[str, ...]
    calls: Callable[[Sequence[Call]], str]
    call: str
    markers: tuple[str, ...] = ()
    thought: str | None = "<think>\n{}\n</think>\n\n"
    said: str = "{}\n"
    text: str = "{}"
    most: int = 2
    ends: tuple[str, ...] = ()

    def turn(self, thought: str = "", text: str = "", calls: Sequence[Call] = ()) -> str:
        """Format a turn with these parts."""
        begin = (self.thought or "").format(thought) if thought else ""
        if not calls:
            return begin + (self.text.format(text) if text else "")
        return begin + (self.said.format(text) if text else "") + self.calls(calls)


FORMATS = {
    "hermes": Format(TEMPLATE, (_TURN, _TURN + _NO_THOUGHTS), _hermes, "<tool_call>"),
    # A template without tools: the system message describes them to the model.
    "words": Format(_WORDS, (_TURN,), _hermes, "<tool_call>", thought=None),
    "gemma": Format(
        GEMMA4,
        ("<|turn>model\n", "<tool_response|>"),
        _gemma,
        "<|tool_call>",
        thought="<|channel>thought\n{}\n<channel|>",
        said="{}",
    ),
    # A template that lists tools between markers but does not render calls.
    "lfm2": Format(
        LFM2_UNSHOWN,
        ("<|im_start|>assistant\n",),
        _lfm2,
        "<|tool_call_start|>",
        ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        thought=None,
    ),
    "harmony": Format(
        CHANNELS,
        ("<|start|>assistant",),
        _harmony,
        "<|channel|>commentary to=",
        (
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        said="<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
        text="<|channel|>final<|message|>{}",
        most=1,
        ends=("<|call|>", "<|return|>"),
    ),
}
CALL = _hermes([("weather", ARGUMENTS)])


class Speaker:
    """Model that generates its text token by token, followed by the end token. `seen` are the
    tokens of the last pass.
    """

    def __init__(self, engine: Any, form: Format = FORMATS["hermes"]) -> None:
        self._tokenizer = engine.tokenizer
        self.text = "Good day."
        self.openings: Sequence[str] = form.openings
        self.ends = [self._ids(end)[0] for end in form.ends] or [EOS_ID] * 2
        self.seen: list[int] = []
        self._spelled: dict[str, str] = {}

    def logits(self, token_ids: Any) -> Any:
        self.seen = np.asarray(token_ids).tolist()
        ids = self._letters(self.seen)
        whole = self._spell(self.text)
        ends = [end for opening in self.openings for end in _ends(ids, self._spell(opening))]
        # A turn may contain an opening. The turn begins where all the rest was generated.
        begin = min(
            (end for end in ends if whole.startswith(ids[end:])), default=max(ends, default=0)
        )
        done = len(ids) - begin
        row = np.zeros(fake_runner.VOCAB_SIZE, np.float32)
        row[self.ends[not self.text.endswith("}")]] = 5.0
        if done < len(whole):
            row[ord(whole[done])] = 50.0
        return row

    def _spell(self, text: str) -> str:
        """Encode a text with one letter per token."""
        if text not in self._spelled:
            self._spelled[text] = self._letters(self._ids(text))
        return self._spelled[text]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.codec.encode(text, False)
        return ids

    @staticmethod
    def _letters(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def _ends(text: str, marker: str) -> Iterator[int]:
    at = text.find(marker)
    while at >= 0:
        yield at + len(marker)
        at = text.find(marker, at + 1)


@contextmanager
def scripted(
    patch: Any, form: Format = FORMATS["hermes"], num_blocks: int = 1024, max_context: int = 8000
) -> Iterator[Any]:
    """Yield an engine with a model of this format, and its `Speaker`. The fakes stay patched until
    the test ends.
    """
    raw = fake_runner.fake_tokenizer().codec.to_json()
    patch.setattr(fake_runner, "fake_tokenizer", lambda: _with_markers(raw, form.markers))
    patch.setattr(fake_runner, "VOCAB_SIZE", 260 + len(form.markers))
    parts = fake_runner.fake_parts(num_blocks, max_context=max_context)
    ends = (
        frozenset(parts.tokenizer.encode(end, False)[0] for end in form.ends) or parts.eos_token_ids
    )
    config = EngineConfig.from_options(debug_checks=True, reuse_gate="off")
    with CPUPagedEngine._built_by(
        lambda _: dataclasses.replace(parts, eos_token_ids=ends), config
    ) as engine:
        engine.tokenizer.chat_template = form.template
        speaker = Speaker(engine, form)
        patch.setattr(fake_runner, "token_logits", speaker.logits)
        yield engine, speaker


def _with_markers(raw: str, markers: Sequence[str]) -> Tokenizer:
    backend = fake_runner.RawTokenizer.from_str(raw)
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in markers]
    )
    return fake_runner.FakeTokenizer.from_transformers(backend)
