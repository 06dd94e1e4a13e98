"""Quality of a real model's answers with speculative decoding and with JSON schemas.

`speculation` answers each task of `speculation_tasks` greedily with and without drafts. It reports
the share of accepted draft tokens and whether anything else differs.

`schemas` asks 20 small questions with known answers. It reports how many finished answers are valid
and how many answers have only correct fields. For comparison, the same questions are asked with the
schema only described in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema_rs

from benchmarks.data.speculation_tasks import TASKS
from kvboost_edge import CPUPagedEngine, GenerationResult

__all__ = ["QUESTIONS", "Question", "is_sensible", "is_valid", "schema_rows", "speculation_rows"]

_MOST_DRAFTED_FOR = 200
_MOST_FITTED = 96


class Question(NamedTuple):
    """A question whose answer is a JSON object.

    Attributes:
        kind: Kind of question.
        text: Text that the question is about.
        asks: The question itself.
        properties: Properties of the answer's schema.
        right: Correct value of each field.
    """

    kind: str
    text: str
    asks: str
    properties: dict[str, Any]
    right: dict[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        names = list(self.properties)
        return {
            "type": "object",
            "properties": self.properties,
            "required": names,
            "additionalProperties": False,
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        fields = ", ".join(f'"{name}"' for name in self.properties)
        return [
            {
                "role": "user",
                "content": f"{self.text}\n\n{self.asks} Answer as a JSON object with {fields}.",
            }
        ]


def _questions() -> Iterator[Question]:
    feeling = {"sentiment": {"enum": ["positive", "negative"]}}
    for text, right in (
        ("I love this phone, the screen is wonderful.", "positive"),
        ("The soup was cold and the waiter was rude.", "negative"),
        ("What a fantastic concert, we had a great time!", "positive"),
        ("The train was late again and I am very angry.", "negative"),
        ("Terrible service, I will never come back.", "negative"),
    ):
        yield Question(
            "classify",
            text,
            "Is the sentiment positive or negative?",
            feeling,
            {"sentiment": right},
        )
    topic = {"topic": {"enum": ["sports", "cooking", "weather"]}}
    for text, right in (
        ("The team scored two goals in the last minute of the match.", "sports"),
        ("Chop the onions and fry them in butter until golden.", "cooking"),
        ("Tomorrow it will rain in the north, with strong wind.", "weather"),
        ("Heavy snow is expected over the weekend.", "weather"),
        ("She won the tennis tournament for the third time.", "sports"),
    ):
        yield Question("classify", text, "Which topic is this about?", topic, {"topic": right})
    word = {"type": "string", "maxLength": 30}
    number = {"type": "integer", "minimum": 0, "maximum": 9999}
    for text, asks, properties, values in (
        (
            "My name is Anna and I am 34 years old.",
            "What are name and age?",
            {"name": word, "age": number},
            ("Anna", 34),
        ),
        (
            "Peter lives in Berlin.",
            "Who lives where?",
            {"name": word, "city": word},
            ("Peter", "Berlin"),
        ),
        (
            "The book costs 12 dollars.",
            "What is sold, and for how many dollars?",
            {"item": word, "price": number},
            ("book", 12),
        ),
        (
            "Please send 5 chairs to Madrid.",
            "How many chairs, and to which city?",
            {"count": number, "city": word},
            (5, "Madrid"),
        ),
        (
            "Maria bought 3 apples.",
            "Who bought how many apples?",
            {"name": word, "count": number},
            ("Maria", 3),
        ),
        (
            "The meeting with John is on Monday.",
            "With whom, and on which day?",
            {"name": word, "day": word},
            ("John", "Monday"),
        ),
        (
            "Paris is the capital of France.",
            "Which city is the capital of which country?",
            {"city": word, "country": word},
            ("Paris", "France"),
        ),
        (
            "The dog is called Rex and is 7 years old.",
            "What are the dog's name and age?",
            {"name": word, "age": number},
            ("Rex", 7),
        ),
        (
            "Tom drives a red car.",
            "Who drives a car of which color?",
            {"name": word, "color": word},
            ("Tom", "red"),
        ),
        (
            "Lisa was born in 1990 in Rome.",
            "Who was born in which year and city?",
            {"name": word, "year": number, "city": word},
            ("Lisa", 1990, "Rome"),
        ),
    ):
        yield Question(
            "extract", text, asks, properties, dict(zip(properties, values, strict=True))
        )


QUESTIONS = tuple(_questions())


def speculation_rows(engine: CPUPagedEngine) -> list[dict[str, Any]]:
    """Return a row for each task."""
    rows = []
    for task in TASKS:
        results = {}
        for way in ("off", "auto"):
            engine.reset_cache()
            messages = [{"role": "user", "content": task.question}]
            results[way] = engine.generate(
                messages,
                max_new_tokens=_MOST_DRAFTED_FOR,
                temperature=0.0,
                logprobs=0,
                speculation=way,
            )
        plain = results["off"]
        drafted = results["auto"]
        share = (
            100 * drafted.accepted_tokens / drafted.drafted_tokens
            if drafted.drafted_tokens
            else None
        )
        rows.append(
            {
                "task": task.name,
                "tokens": drafted.generated_tokens,
                "drafted": drafted.drafted_tokens,
                "accepted %": share,
                "equal": _outcome(plain) == _outcome(drafted),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _outcome(result: GenerationResult) -> tuple[Any, ...]:
    return result.output_token_ids, result.output_text, result.finish_reason, result.logprobs


def schema_rows(engine: CPUPagedEngine) -> list[dict[str, Any]]:
    """Return rows for each kind of question, with an enforced schema and with one in words."""
    rows = []
    for kind in dict.fromkeys(question.kind for question in QUESTIONS):
        for enforced in (True, False):
            chosen = [question for question in QUESTIONS if question.kind == kind]
            results = [_asked(engine, question, enforced=enforced) for question in chosen]
            ended = [
                pair
                for pair in zip(chosen, results, strict=True)
                if pair[1].finish_reason == "stop"
            ]
            valid = sum(is_valid(question, result.output_text) for question, result in ended)
            right = sum(is_sensible(question, result.output_text) for question, result in ended)
            rows.append(
                {
                    "questions": kind,
                    "schema": "enforced" if enforced else "in words",
                    "asked": len(chosen),
                    "ended": len(ended),
                    "valid %": 100 * valid / len(ended) if ended else None,
                    "sensible %": 100 * right / len(chosen),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _asked(engine: CPUPagedEngine, question: Question, *, enforced: bool) -> GenerationResult:
    fits = {"json_schema": question.schema} if enforced else {}
    return engine.generate(question.messages, max_new_tokens=_MOST_FITTED, temperature=0.0, **fits)


def is_valid(question: Question, text: str) -> bool:
    """Return whether the whole text is JSON that matches the schema."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema_rs.is_valid(question.schema, value)


def is_sensible(question: Question, text: str) -> bool:
    """Return whether the text is valid and every field is correct, ignoring case."""
    if not is_valid(question, text):
        return False
    value = json.loads(text)
    return all(
        str(value[name]).strip().lower() == str(right).lower()
        for name, right in question.right.items()
    )
