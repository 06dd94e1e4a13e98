"""Reasoning budgets on a real model, through a template that opens a <think> block.

50 questions are answered greedily in batches, each with a budget of N tokens. The reasoning is
"cut" if exactly N tokens precede the forced end. It is "same" if these are the first N tokens of
the answer without a budget. "answered" counts answers with text after the reasoning. The next turn
repeats prompt and answer and adds a question. "cached" is the share of its full blocks that are
found in the cache.

    python benchmarks/quality/reasoning_budget.py --model FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.harness import parser, report
from kvboost_edge import CPUPagedEngine, GenerationResult, SamplingParams
from kvboost_edge.text.turns.thinking import reasoning_end

__all__ = ["MESSAGE", "TEMPLATE", "budget_row", "questions"]

TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
MESSAGE = "\nI have thought long enough and answer now.\n"
_RUNS = ((0, ""), (24, ""), (24, MESSAGE))
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma")
_THINGS = ("apples", "books", "coins", "stamps", "tickets")


def questions(count: int) -> Iterator[str]:
    """Yield questions that take several steps."""
    for number in range(count):
        name = _NAMES[number % len(_NAMES)]
        thing = _THINGS[number // len(_NAMES) % len(_THINGS)]
        had = 12 + 7 * number % 31
        yield (
            f"{name} has {had} {thing}, gets {3 + number % 9} more each day for {2 + number % 5} "
            f"days, and then gives half of them away. Explain step by step how many {thing} "
            f"{name} has left."
        )


def budget_row(
    engine: CPUPagedEngine, prompts: Sequence[list[int]], budget: int, message: str, most: int
) -> dict[str, Any]:
    """Return the figures of one budget.

    Args:
        engine: an engine with `TEMPLATE`.
        prompts: token ids of the prompts.
        budget: reasoning budget in tokens.
        message: text before the end of the reasoning.
        most: maximum number of tokens of an answer.
    """
    free = SamplingParams(max_new_tokens=max(budget, 1))
    bound = SamplingParams(
        max_new_tokens=most, reasoning_budget=budget, reasoning_budget_message=message
    )
    unlimited = engine.generate_batch(prompts, sampling=free)
    results = engine.generate_batch(prompts, sampling=bound)
    closing = reasoning_end(engine.tokenizer, message).with_message
    size = engine.config.block_size
    nexts = [
        [*prompt, *result.output_token_ids, *engine.tokenizer.encode("\nAnd then?", False)]
        for prompt, result in zip(prompts, results, strict=True)
    ]
    found = engine.generate_batch(nexts, sampling=SamplingParams(max_new_tokens=1))
    whole = [
        (len(prompt) + result.generated_tokens - 1) // size * size
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return {
        "budget": budget,
        "message": bool(message),
        "prompts": len(prompts),
        "cut": sum(_is_cut(result, budget, closing) for result in results),
        "same": sum(
            result.output_token_ids[:budget] == own.output_token_ids[:budget]
            for result, own in zip(results, unlimited, strict=True)
        ),
        "answered": sum(_answers(engine, result, budget + len(closing)) for result in results),
        "stop": sum(result.finish_reason == "stop" for result in results),
        "cached": sum(
            min(one.cached_tokens, tokens) for one, tokens in zip(found, whole, strict=True)
        )
        / sum(whole),
    }


def _is_cut(result: GenerationResult, budget: int, closing: Sequence[int]) -> bool:
    forced = result.output_token_ids[budget : budget + len(closing)]
    return forced == closing and result.reasoning_tokens == budget


def _answers(engine: CPUPagedEngine, result: GenerationResult, start: int) -> bool:
    return bool(engine.tokenizer.decode(result.output_token_ids[start:]).strip())


def _encoded(engine: CPUPagedEngine, texts: Iterator[str]) -> list[list[int]]:
    asked: list[list[Mapping[str, Any]]] = [[{"role": "user", "content": text}] for text in texts]
    return [engine.tokenizer.encode_chat(messages) for messages in asked]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", required=True, help="model directory or GGUF file")
    options.add_argument("--most", type=int, default=160, help="tokens of an answer (default: 160)")
    given = options.parse_args()
    count = 4 if given.quick else 50
    with CPUPagedEngine.from_pretrained(given.model, num_blocks=2048) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        prompts = _encoded(engine, questions(count))
        rows = []
        for budget, message in _RUNS[:2] if given.quick else _RUNS:
            rows.append(budget_row(engine, prompts, budget, message, given.most))
            print(rows[-1], flush=True)
    report("reasoning-budget", rows, options=given, model=Path(given.model).name)


if __name__ == "__main__":
    main()
