"""A fake model that says what a test wrote, and a chat template with tools and reasoning."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.engine.fake_runner import EOS_ID, VOCAB_SIZE

__all__ = ["TEMPLATE", "Speaker"]

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

_TURN, _NO_THOUGHTS = "<|assistant|>", "<think>\n\n</think>\n\n"


class Speaker:
    """What the model says in its turn, byte by byte; beyond it the end. `openings`: what a turn begins behind."""

    def __init__(self, engine: Any) -> None:
        self._codec = engine.tokenizer.codec
        self.text = ""
        self.openings = [_TURN, _TURN + _NO_THOUGHTS]

    def logits(self, token_ids: Any) -> Any:
        ids = [int(i) for i in token_ids]
        begins = [self._behind(ids, self._codec.encode(text, False)) for text in self.openings]
        whole, done = self._codec.encode(self.text, False), len(ids) - max(begins)
        row = np.zeros(VOCAB_SIZE, np.float32)
        row[EOS_ID] = 5.0
        if done < len(whole):
            row[whole[done]] = 50.0
        return row

    def _behind(self, ids: list[int], marker: list[int]) -> int:
        """The position behind the last marker, 0 without one."""
        size = len(marker)
        return next((end for end in range(len(ids), size - 1, -1) if ids[end - size : end] == marker), 0)
