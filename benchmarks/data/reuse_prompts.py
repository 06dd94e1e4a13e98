"""Prompts for `chunk_reuse.py`, the texts to warm before them, and their common parts."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.data.reuse_texts import (
    TOPICS,
    make_passages,
    make_questions,
    primer_text,
    prose,
    sections,
)
from kvboost_edge import CPUPagedEngine

sys.path.append(
    str(Path(__file__).parents[2] / "training")
)  # these facts are those of the bundled model

from demo_corpus import Sample, document_pieces, join, make_sample

__all__ = [
    "Asked",
    "Round",
    "agents",
    "chats",
    "docs",
    "facts_cut",
    "facts_moved",
    "passages",
    "passages_unjudged",
]

BLOCK_TOKENS = 16
PRIMER_TOKENS = 256
NUM_PASSAGES = 8
NUM_FACTS = 64
# At least 128 for the bundled model's documents: a block after each boundary is then an eighth.
CUT_TOKENS = 128
_SYSTEM = "You answer questions from the passages that you are given. Answer shortly."
_ROOT = Path(__file__).parents[2]


class Asked(NamedTuple):
    """A prompt of a round.

    Attributes:
        prompt: Token ids.
        other: The prompt with its documents in another order, or empty.
        before: Number of tokens before the first document.
        documents: Number of tokens that were warmed in another context.
        gold: Texts that a right answer contains. Empty if answers are not judged.
    """

    prompt: list[int]
    other: list[int]
    before: int
    documents: int
    gold: tuple[str, ...]


class Round(NamedTuple):
    """Prompts to ask, and the prompts that warm the cache before, by way of warming."""

    harvests: dict[str, list[list[int]]]
    asked: list[Asked]


def passages(engine: CPUPagedEngine, seed: str, number: int) -> Round:
    """Return ten questions on eight passages, each with its own order of passages.

    The tenth question needs two passages. This model answers none of those, so they are not judged.
    The passages are warmed one by one after a header and a primer, or all in one prompt in another
    order. The primer is two unused passages, prose, or a package's description.
    """
    rng = random.Random(f"{seed} {number}")
    encode = _encoder(engine)
    made = make_passages(rng, NUM_PASSAGES)
    parts = [encode(passage.text) for passage in made]
    head = _head(engine)
    like = "".join(
        passage.text for passage in make_passages(random.Random(f"{seed} primer {number}"), 3)
    )
    primers = {"like passages": like, "prose": prose(number), "descriptions": primer_text(number)}
    harvests = {
        name: [
            _primed(head, encode(text)[:PRIMER_TOKENS], part, primers["prose"], encode)
            for part in parts
        ]
        for name, text in primers.items()
    }
    served = rng.sample(parts, len(parts))
    harvests["one prompt"] = [_joined(head, *served, encode("Question: What do they say?"))]
    asked = []
    for index, question in enumerate(make_questions(rng, made, 10)):
        # The beginning is computed exactly and stored, so two consecutive prompts never begin
        # alike.
        first = parts[index % NUM_PASSAGES]
        order = [
            first,
            *rng.sample([part for part in parts if part is not first], NUM_PASSAGES - 1),
        ]
        tail = encode(f"Question: {question.text}<|im_end|>\n<|im_start|>assistant\n")
        prompts = [_joined(head, *each, tail) for each in (order, served)]
        gold = question.gold if len(question.gold) == 1 else ()
        asked.append(Asked(*prompts, len(head), sum(map(len, parts)), gold))
    return Round(harvests, asked)


def passages_unjudged(engine: CPUPagedEngine, seed: str, number: int) -> Round:
    """Return the same prompts as `passages`, but without judging answers to save time."""
    made = passages(engine, seed, number)
    return made._replace(asked=[asked._replace(gold=()) for asked in made.asked])


def docs(engine: CPUPagedEngine, seed: str, number: int) -> Round:
    """Return five sections of this package's documents in another order, with a question on one."""
    rng = random.Random(f"{seed} docs {number}")
    encode = _encoder(engine)
    chosen = rng.sample(sections([_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]), 5)
    parts = [encode(f"{heading}\n{body}\n\n") for heading, body in chosen]
    head = _head(engine)
    text = prose(number)
    asked = []
    for heading, _ in rng.sample(chosen, 2):
        orders = [rng.sample(parts, len(parts)) for _ in range(2)]
        tail = encode(
            f'Question: What does "{heading}" say? One sentence.<|im_end|>\n<|im_start|>assistant\n'
        )
        prompts = [_joined(head, *order, tail) for order in orders]
        asked.append(Asked(*prompts, len(head), sum(map(len, parts)), ()))
    primed = [_primed(head, encode(text)[:PRIMER_TOKENS], part, text, encode) for part in parts]
    return Round(
        {
            "prose": primed,
            "one prompt": [_joined(head, *parts, encode("Question: What do they say?"))],
        },
        asked,
    )


def agents(engine: CPUPagedEngine, seed: str, number: int) -> Round:
    """Return an agent's long prompts, whose first line changes with each call."""
    rng = random.Random(f"{seed} agents {number}")
    encode = _encoder(engine)
    files = rng.sample(sorted((_ROOT / "kvboost_edge" / "cli").glob("[a-z]*.py")), 3)
    source = "\n".join(file.read_text(encoding="utf-8")[:1500] for file in files)
    rest = encode(f"You are a careful programmer. These are the files you work on.\n\n{source}\n")
    task = rng.choice(
        [
            "What does the first function do?",
            "Name one function and what it returns.",
            "Write a test.",
        ]
    )
    tail = encode(f"<|im_end|>\n<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n")
    old, new = (
        encode(
            f"<|im_start|>system\nSession {rng.randint(100, 999)}, {day}, "
            f"{rng.randint(10, 23)}:15.\n"
        )
        for day in ("Monday", "the day after that, a Tuesday")
    )
    asked = Asked(_joined(new, rest, tail), [], len(new), len(rest), ())
    return Round({"one prompt": [_joined(old, rest, tail)]}, [asked])


def chats(engine: CPUPagedEngine, seed: str, number: int) -> Round:
    """Return chats of three turns, warmed turn by turn and continued without the first."""
    rng = random.Random(f"{seed} chats {number}")
    encode = _encoder(engine)
    head = encode(
        "<|im_start|>system\nYou are a friendly assistant who likes to explain things.<|im_end|>\n"
    )
    turns: list[list[int]] = []
    for topic in rng.sample(TOPICS, 3):
        asked = encode(
            f"<|im_start|>user\nExplain {topic}, in a few "
            "sentences.<|im_end|>\n<|im_start|>assistant\n"
        )
        result = engine.generate(
            _joined(head, *turns, asked), max_new_tokens=120, cache_salt="chat"
        )
        turns.append([*asked, *result.output_token_ids, *encode("<|im_end|>\n")])
    last = encode("<|im_start|>user\nSum up what you told me.<|im_end|>\n<|im_start|>assistant\n")
    kept = _joined(*turns[1:])
    return Round(
        {"one prompt": [_joined(head, *turns)]},
        [Asked(head + kept + last, [], len(head), len(kept), ())],
    )


def facts_moved(engine: CPUPagedEngine, seed: str, number: int) -> Round:
    """Return fact documents for the bundled model, warmed in one order and asked in others."""
    head, documents, questions = _facts(engine, f"{seed} moved {number}")
    rng = random.Random(f"{seed} orders {number}")
    asked = []
    for tail, gold in rng.sample(questions, 6):
        orders = [rng.sample(documents, len(documents)) for _ in range(2)]
        prompts = [_joined(head, *order, tail) for order in orders]
        asked.append(Asked(*prompts, len(head), sum(map(len, documents)), (gold,)))
    return Round({"one prompt": [_joined(head, *documents, questions[0][0])]}, asked)


def facts_cut(engine: CPUPagedEngine, seed: str, number: int) -> Round:
    """Return the same documents in pieces of some 130 tokens, each computed after other facts.

    Each cut is between the first token of a subject and the end of its value. Only these facts are
    asked, because the answer needs both sides of the cut.
    """
    head, documents, questions = _facts(engine, f"{seed} cut {number}")
    primer = _joined(*_facts(engine, f"{seed} primer {number}")[1])[:PRIMER_TOKENS]
    text = _joined(*documents)
    rng = random.Random(f"{seed} cuts {number}")
    encode = _encoder(engine)
    asked = []
    cuts = [0]
    for tail, gold in questions:
        sentence = encode(" " + gold)[:-1]
        least = len(encode(" " + gold.split(" of ")[0] + " of"))
        starts = [
            at for at in range(cuts[-1], len(text)) if text[at : at + len(sentence)] == sentence
        ]
        places = [
            place for start in starts for place in range(start + least + 1, start + len(sentence))
        ]
        if places and places[0] >= cuts[-1] + CUT_TOKENS:
            cuts.append(rng.choice(places))
            asked.append(Asked(_joined(head, text, tail), [], len(head), len(text), (gold,)))
    pieces = [text[start:stop] for start, stop in pairwise([*cuts, len(text)])]
    return Round(
        {"facts": [_joined(head, primer, piece, primer[:BLOCK_TOKENS]) for piece in pieces]}, asked
    )


def _facts(
    engine: CPUPagedEngine, seed: str
) -> tuple[list[int], list[list[int]], list[tuple[list[int], str]]]:
    """Return the head, the documents, and for each fact the question and the right answer."""
    encode = _encoder(engine)
    sample = make_sample(
        random.Random(seed),
        NUM_FACTS,
        1,
        training=False,
        fresh_share=0.0,
        single_share=0.0,
        style="user",
    )
    pairs = zip(sample.numbers, sample.documents, strict=True)
    documents = [
        encode(join(document_pieces(Sample([facts], [number], [], "user"))))
        for number, facts in pairs
    ]
    questions = [
        (
            encode(f"What is the {fact.attribute} of {fact.subject}?<|end|>\n<|assistant|>\n"),
            fact.sentence(),
        )
        for fact in chain(*sample.documents)
    ]
    return encode("<|bos|><|user|>\n"), documents, questions


def _primed(
    head: list[int],
    primer: list[int],
    part: list[int],
    text: str,
    encode: Callable[[str], list[int]],
) -> list[int]:
    """Return a text after a primer.

    Only full blocks are stored, so a block of padding follows to keep the end of the text.
    """
    return _joined(head, primer, part, encode(text)[:BLOCK_TOKENS])


def _joined(*parts: Sequence[int]) -> list[int]:
    return list(chain(*parts))


def _encoder(engine: CPUPagedEngine) -> Callable[[str], list[int]]:
    """Return a function that encodes a piece of a prompt without BOS."""
    return functools.partial(engine.tokenizer.encode, add_special_tokens=False)


def _head(engine: CPUPagedEngine) -> list[int]:
    return _encoder(engine)(f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n")
