"""Random model of a real shape that generates one fixed answer with thinking, text and a call.

Its chat template has tools. Coding agent sessions run on this file, which is the same for every
server.

The answer is a chain of tokens that each occur once in it. Their embeddings are much longer than
anything that random layers add, and the first layer's MLP maps each to the embedding of the next
token. The time per token is that of the shape.
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
# Tags that are single tokens, as in Qwen, and the pieces of a call, each once, because the chain
# needs unique tokens.
_WHOLE = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "',
    '", "arguments": {"path": "',
    '"}}',
)
# Regular expression with which "qwen2" splits text before merging.
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

# Lengths relative to embeddings of length 1 and what a layer adds (about 30): the chain's
# embeddings, and the output of the first layer, a hundred times larger: silu(10) * 10, with the key
# read as 10.
_TOKEN = 300.0
_NEXT = 30.0
_KEY = 10.0
_SLOTS = 64  # whole blocks of 32, so that neighbors in a row keep their own scale


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
        # The answer's words are repeated, so that they become single tokens.
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
        """Return the words of the call: tool name and path."""
        return CALL[0], json.loads(CALL[1])["path"]

    @property
    def chain(self) -> list[int]:
        """Return the answer's tokens, from the newline before the answer to the end of the turn."""
        name, arguments = CALL
        call = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        ids = self._learner.encode(f"\n<think>{THOUGHT}</think>\n\n{CONTENT}{call}{_END}").ids
        assert len(set(ids)) == len(ids) <= _SLOTS, (
            f"the answer must have at most {_SLOTS} tokens, all different"
        )
        return list(ids)

    def add_to(self, writer: gguf.GGUFWriter, size: int) -> None:
        """Write the vocabulary, padded to `size` tokens."""
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
    """Write the model. Its tokenizer learns from `texts`."""
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
