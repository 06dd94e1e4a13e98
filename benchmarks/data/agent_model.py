"""A random model of a real shape that says one written answer, with thinking, text and a call, and
a chat template with tools: what a coding agent's session runs on, the same file for every server.

The answer is a chain of tokens, each in it once. Their embeddings are much longer than all that
random layers add, and the MLP of the first layer answers each with the embedding of the next one;
the time a token takes is that of the shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.data.agent_sessions import CALL, CONTENT, THOUGHT
from benchmarks.data.random_model import write_gguf
from benchmarks.data.shapes import Shape

__all__ = ["TEMPLATE", "Vocabulary", "write_agent_model"]

_LEARNED = 3000
_END = "<|im_end|>"
_CONTROL = ("<|im_start|>", _END)
# Whole in the text, as with Qwen; the pieces of a call each once, as a chain needs it.
_WHOLE = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "',
    '", "arguments": {"path": "',
    '"}}',
)
# How "qwen2" splits a text before it merges.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\\n\\nThese tools can be called:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nA call is written as ' }}
{{- '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>' }}
{%- endif %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set last = namespace(at=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and (loop.index0 > last.at or
   (preserve_thinking is defined and preserve_thinking)) %}
{{- '<think>' + m.reasoning_content + '</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""In Qwen's manner: tools behind the system prompt; thinking of past turns only where it is asked
for.
"""

# Lengths beside embeddings of length 1 and what a layer adds, about 30: of the chain's embeddings;
# of what the first layer answers, a hundred times it: silu(10) * 10, the key read at 10.
_TOKEN = 300.0
_NEXT = 30.0
_KEY = 10.0
_SLOTS = 64  # whole blocks of 32: what lies beside them in a row keeps its own scale


class Vocabulary:
    """Byte-level BPE learned from `texts`, with the tokens of the template and of the answer."""

    def __init__(self, texts: Sequence[str]) -> None:
        learner = tokenizers.Tokenizer(models.BPE())
        split = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated")
        learner.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        learner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=_LEARNED,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        # The answer's words are there often enough to be tokens of their own.
        said = [*texts, TEMPLATE, *[THOUGHT, CONTENT, "\n\n", *self._called()] * 50]
        whole = re.compile("|".join(map(re.escape, _WHOLE)))
        learner.train_from_iterator([part for text in said for part in whole.split(text)], trainer)
        learned = json.loads(learner.to_str())["model"]
        self.learned: list[str] = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
        self.merges = [
            pair if isinstance(pair, str) else " ".join(pair) for pair in learned["merges"]
        ]
        self.tokens = [*self.learned, *_CONTROL, *_WHOLE]
        learner.add_special_tokens(list(_CONTROL))
        learner.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in _WHOLE])
        self._learner = learner

    @staticmethod
    def _called() -> tuple[str, str]:
        """The words of the call: its name and its path."""
        return CALL[0], json.loads(CALL[1])["path"]

    @property
    def chain(self) -> list[int]:
        """The tokens of the answer, from the line end it stands behind to the end of the turn."""
        name, arguments = CALL
        call = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        ids = self._learner.encode(f"\n<think>{THOUGHT}</think>\n\n{CONTENT}{call}{_END}").ids
        assert len(set(ids)) == len(ids) <= _SLOTS, (
            "each token of the answer may be in it once, and so many fit"
        )
        return list(ids)

    def add_to(self, writer: gguf.GGUFWriter, size: int) -> None:
        """Write it, padded to `size` tokens."""
        assert len(self.tokens) <= size
        unused = size - len(self.tokens)
        kinds = [gguf.TokenType.NORMAL] * len(self.learned)
        kinds += [gguf.TokenType.CONTROL] * len(_CONTROL) + [gguf.TokenType.USER_DEFINED] * len(
            _WHOLE
        )
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([*self.tokens, *[f"<unused{i}>" for i in range(unused)]])
        writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * unused])
        writer.add_token_merges(self.merges)
        end = self.tokens.index(_END)
        writer.add_bos_token_id(end)
        writer.add_eos_token_id(end)
        writer.add_pad_token_id(end)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)


def write_agent_model(path: Path, shape: Shape, texts: Sequence[str], quant: str = "Q4_0") -> None:
    """Write the model; `texts` are what its tokenizer learns from."""
    vocabulary = Vocabulary(texts)
    chain = vocabulary.chain
    keys = np.random.default_rng(1).standard_normal((len(chain), shape.hidden)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)

    def teach(name: str, values: npt.NDArray[np.float32]) -> None:
        if name == "token_embd.weight":
            values[chain] = _TOKEN * keys
        elif name in ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"):
            values[:_SLOTS] = 0
            values[: len(chain) - 1] = keys[:-1] * (_KEY / shape.hidden**0.5)
        elif name == "blk.0.ffn_down.weight":
            values[:, :_SLOTS] = 0
            values[:, : len(chain) - 1] = _NEXT * keys[1:].T

    write_gguf(path, shape, quant, tokenizer=vocabulary.add_to, taught=teach)
