"""Prompts whose answers repeat earlier text to different degrees, from copying to free chat."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness

__all__ = ["TASKS", "Task", "code_edited"]

_README = Path(__file__).parents[2] / "README.md"


class Task(NamedTuple):
    """A task for speculative decoding.

    Attributes:
        question: The user's request.
        answer: A good assistant's answer, for models that cannot answer.
        bar: Required speedup with drafts.
    """

    name: str
    question: str
    answer: str
    bar: float


def _paragraphs() -> str:
    text = _README.read_text(encoding="utf-8")
    return "\n\n".join(
        part for part in text.split("\n\n") if len(part) > 200 and part[0].isalpha()
    )[:2400]


def code_edited(source: str) -> str:
    """Return the requested edit: another name in a few places, and one more line."""
    return source.replace("seconds", "durations").replace(
        "return durations", "    # each round of each\n    return durations"
    )


_CODE = inspect.getsource(harness.alternate) + "\n\n" + inspect.getsource(harness.machine_card)
_DOCUMENT = _paragraphs()
_SENTENCES = [
    part.strip() for part in _DOCUMENT.replace("\n", " ").split(". ") if 60 < len(part) < 240
]

_FREE = (
    "A good loaf begins the evening before. Mix flour, water and a spoon of starter until no dry "
    "flour is left, cover the bowl and leave it on the counter overnight. In the morning the "
    "dough has doubled and smells faintly of apples. Fold it a few times with wet hands, wait an "
    "hour, shape it gently and let it rise once more in a basket. Heat the oven with a heavy pot "
    "inside until both are as hot as they get, then tip the loaf in, cut it across the top and "
    "close the lid. After twenty minutes take the lid off so that the crust can colour. It is "
    "done when the bottom sounds hollow. The hardest part is to let it cool before the first "
    "slice."
)
_MAIL = (
    "Hello Marta, the delivery for Lindenstrasse 14 arrived on Tuesday, but two of the six oak "
    "shelves are scratched and the box with the brass brackets (order number 20551-B) is missing. "
    "We open on the first of March, so we need the brackets by the twentieth at the latest. Could "
    "you send a replacement by express and tell me what to do with the scratched shelves? "
    "Regards, Jonas"
)
TASKS = (
    Task("echo", f"Repeat this text word for word:\n\n{_DOCUMENT}", _DOCUMENT, 2.5),
    Task(
        "code edit",
        f"Rename the variable `seconds` to `durations` and give me the whole code:\n\n{_CODE}",
        f"Here is the code with the variable renamed:\n\n{code_edited(_CODE)}",
        2.5,
    ),
    Task(
        "question over a document",
        f"{_DOCUMENT}\n\nWhat does the text say about speed and about memory? Quote it.",
        f'The text makes three points. On how it computes it says: "{_SENTENCES[0]}." '
        f'On memory one reads: "{_SENTENCES[2]}." This matters because a long prompt would '
        f'otherwise be read again at every turn. It also states: "{_SENTENCES[4]}." '
        "Taken together, what is repeated is not computed twice.",
        1.4,
    ),
    Task(
        "chat with quotes",
        f"{_MAIL}\n\nAnswer this mail. Repeat what he asks for so that nothing is missed.",
        "Hello Jonas, thank you for writing. I am sorry that two of the six oak shelves are "
        "scratched and that the box with the brass brackets (order number 20551-B) is missing. A "
        "replacement for the brackets leaves our warehouse by express tomorrow, so you will have "
        "them well before the twentieth. Please keep the scratched shelves for now: the driver "
        "takes them back when he brings the new ones to Lindenstrasse 14 next Tuesday. I wish "
        "you a good start on the first of March. Regards, Marta",
        1.2,
    ),
    Task("free chat", "How do I bake a good loaf of bread?", _FREE, 0.98),
)
