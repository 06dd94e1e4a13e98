"""Texts for `chunk_reuse.py`: passages with questions for a real model, facts for the bundled one.

All are generated from seeds. Development used other seeds than the reported figures.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import random
import re
from pathlib import Path

__all__ = [
    "TOPICS",
    "Passage",
    "Question",
    "make_passages",
    "make_questions",
    "primer_text",
    "prose",
    "sections",
]

_FIRST = (
    "Alma Bruno Celia Dmitri Edith Farid Greta Hugo Ines Jonas Katya Leon Mirela Nils Odette "
    "Pavel Rosa Stefan Thea Viktor"
).split()
_LAST = (
    "Abbott Brandt Castro Dahl Eriksen Fontaine Galvez Hollis Ibsen Jansen Keller Lindqvist "
    "Moretti Novak Okafor Prescott"
).split()
_TOWNS = (
    "Ashford Brenmoor Calloway Dunmere Eastwick Farrow Glenhaven Harlow Ivymouth Kestrel Larkspur "
    "Millbrook Northgate Oakley"
).split()
_NAMES = (
    "Amber Birch Cobalt Drift Ember Falcon Garnet Heron Indigo Juniper Kite Lantern Maple Nettle "
    "Opal Pebble Quill Raven"
).split()
_COLOURS = "red white green yellow blue orange black grey".split()
_STUFF = "granite oak copper brick marble iron cedar limestone".split()

# kind -> [(statement, question, source of the value)], and sentences without facts
_KINDS: dict[str, tuple[list[tuple[str, str, str]], list[str]]] = {
    "Lighthouse": (
        [
            (
                "For many years the light has been kept by {v}.",
                "Who keeps the light of {n}?",
                "person",
            ),
            ("Its tower was built of {v}.", "What was the tower of {n} built of?", "stuff"),
            ("It first shone in {v}.", "In which year did {n} first shine?", "year"),
            (
                "Supplies are brought by boat from {v}.",
                "From where are supplies brought to {n}?",
                "town",
            ),
        ],
        [
            "Storms reach it every winter.",
            "Gulls nest on the rocks below.",
            "On clear nights the beam is seen far away.",
        ],
    ),
    "Museum": (
        [
            (
                "The collection is cared for by {v}.",
                "Who cares for the collection of {n}?",
                "person",
            ),
            (
                "Visitors find it in the centre of {v}.",
                "In the centre of which town is {n}?",
                "town",
            ),
            (
                "The doors were opened to the public in {v}.",
                "In which year was {n} opened to the public?",
                "year",
            ),
            (
                "Its halls are painted {v}.",
                "In which colour are the halls of {n} painted?",
                "colour",
            ),
        ],
        [
            "School classes come on weekdays.",
            "A small shop sells postcards.",
            "Guided walks start at noon.",
        ],
    ),
    "Ferry": (
        [
            ("The captain's name is {v}.", "What is the name of the captain of {n}?", "person"),
            ("It carries passengers to {v}.", "To which town does {n} carry passengers?", "town"),
            ("The hull is {v}.", "Which colour is the hull of {n}?", "colour"),
            ("It was launched in {v}.", "In which year was {n} launched?", "year"),
        ],
        [
            "Crossings take less than an hour.",
            "Coffee is served on the upper deck.",
            "Bicycles travel free of charge.",
        ],
    ),
    "Bridge": (
        [
            ("It was designed by {v}.", "Who designed {n}?", "person"),
            ("Most of it is made of {v}.", "What is most of {n} made of?", "stuff"),
            (
                "The road over it leads to {v}.",
                "To which town does the road over {n} lead?",
                "town",
            ),
            ("Work on it ended in {v}.", "In which year did work on {n} end?", "year"),
        ],
        [
            "Lorries have to slow down there.",
            "Painters like the view from the bank.",
            "The river below runs fast in spring.",
        ],
    ),
    "Bakery": (
        [
            ("The owner is called {v}.", "What is the owner of {n} called?", "person"),
            (
                "Flour comes from a mill in {v}.",
                "From which town does the flour of {n} come?",
                "town",
            ),
            (
                "The family started the business in {v}.",
                "In which year was the business of {n} started?",
                "year",
            ),
            (
                "Bread is wrapped in {v} paper.",
                "In paper of which colour does {n} wrap bread?",
                "colour",
            ),
        ],
        [
            "The ovens are lit before dawn.",
            "People queue for the rolls on Sundays.",
            "Cakes have to be ordered ahead.",
        ],
    ),
    "Theatre": (
        [
            ("Plays are chosen by {v}.", "Who chooses the plays of {n}?", "person"),
            ("The curtain is {v}.", "Which colour is the curtain of {n}?", "colour"),
            ("The stage was laid with {v}.", "With what was the stage of {n} laid?", "stuff"),
            (
                "The first performance was given in {v}.",
                "In which year was the first performance of {n}?",
                "year",
            ),
        ],
        [
            "Tickets sell out within days.",
            "The foyer has tall mirrors.",
            "Amateurs may use the stage in summer.",
        ],
    ),
}

_MORE = (
    "A leaflet about it can be had in the town hall.",
    "Nothing of it has changed since last year.",
    "Local people like to bring their guests there.",
    "A newspaper wrote about it some weeks ago.",
    "It has been repaired twice, and both times it was cheaper than feared.",
    "Old photographs show it with a fence around.",
)
# Prose on other topics in the form of passages: a title, sentences and an empty line.
_PROSE = (
    "Salt\n"
    "People took it from the sea and from mines long before anyone wrote about it. Meat and fish "
    "kept for months when they were packed in it, so armies and sailors paid well. Some roads of "
    "Europe exist only because carts had to bring it inland. Today most of it goes into "
    "factories and onto icy streets.\n\n",
    "Honey\n"
    "A bee visits thousands of blossoms for one spoonful. In the hive the nectar is passed from "
    "mouth to mouth and fanned with wings until most of its water is gone. What remains does not "
    "spoil. Which plants grew near by can be tasted: heather gives a dark and bitter kind, "
    "acacia one that stays liquid.\n\n",
    "Glaciers\n"
    "Where more snow falls in a year than melts, the old layers are pressed to ice. Under its "
    "own weight that ice begins to flow, slowly, and takes stones with it. Valleys that it has "
    "left are wide and have steep sides. Much of what scientists know about the air of former "
    "times comes from bubbles in it.\n\n",
    "Paper\n"
    "Rags were the material until wood took their place. Fibres float in water, a sieve lifts "
    "them out, and what lies on it is pressed and dried. Good sheets hold for centuries, cheap "
    "ones turn yellow within a few summers, since acid is left in them. Old books are washed "
    "page by page to save them.\n\n",
    "Chess\n"
    "The game came from India by way of Persia. Its pieces once moved more slowly; the strong "
    "queen is a change of the fifteenth century. Strong players do not look at more moves than "
    "others, they know which ones are worth a look. Machines win against all of them now, and "
    "that has made the game more popular.\n\n",
    "Rice\n"
    "Half of mankind lives on it. Young plants are set into flooded fields by hand in many "
    "countries, because weeds drown there and it does not. Terraces on steep slopes share the "
    "water from the top to the bottom, which only works where neighbours agree. Brown grains "
    "keep the skin that polishing takes away.\n\n",
)
TOPICS = (
    "why the sky is blue",
    "how bread is made",
    "what a harbour pilot does",
    "how bees find flowers",
    "why ships float",
    "how paper is made",
    "what causes tides",
    "how to grow tomatoes",
    "why leaves turn red",
    "how glass is made",
)
_PLACES = (
    "{n} is well known in the region.",
    "Everybody around knows {n}.",
    "Few visitors have heard of {n}.",
    "{n} is worth a detour.",
)


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text about one subject, with (question, answer) pairs."""

    text: str
    asked: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question on passages, with the values that a right answer contains, one per passage."""

    text: str
    gold: tuple[str, ...]


def make_passages(rng: random.Random, count: int) -> list[Passage]:
    """Return passages of some 110 tokens, each about a different name."""
    kinds = list(_KINDS)
    names = rng.sample(_NAMES, count)
    return [_passage(rng, f"{name} {rng.choice(kinds)}") for name in names]


def _passage(rng: random.Random, name: str) -> Passage:
    facts, idle = _KINDS[name.split()[1]]
    asked = []
    said = []
    for sentence, question, source in facts:
        value = _value(rng, source)
        said.append(sentence.format(v=value))
        asked.append((question.format(n=f"the {name}"), value))
    said += [*rng.sample(idle, 2), *rng.sample(_MORE, 3)]
    rng.shuffle(said)
    opening = rng.choice(_PLACES).format(n=f"The {name}")
    return Passage(f"{name}\n{opening} {' '.join(said)}\n\n", tuple(asked))


def _value(rng: random.Random, source: str) -> str:
    if source == "person":
        return f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
    if source == "year":
        return str(rng.randint(1820, 1989))
    return rng.choice({"town": _TOWNS, "colour": _COLOURS, "stuff": _STUFF}[source])


def make_questions(rng: random.Random, passages: list[Passage], count: int) -> list[Question]:
    """Return questions. Every tenth question needs two passages."""
    made = []
    for number in range(count):
        chosen = rng.sample(passages, 2 if number % 10 == 9 else 1)
        pairs = [rng.choice(passage.asked) for passage in chosen]
        made.append(
            Question(
                " ".join(question for question, _ in pairs), tuple(answer for _, answer in pairs)
            )
        )
    return made


def prose(number: int) -> str:
    """Return some 280 tokens of titled paragraphs that differ from any passage.

    Each number gives another order.
    """
    rng = random.Random(f"prose {number}")
    return "".join(rng.sample(_PROSE, 4))


def primer_text(number: int) -> str:
    """Return a piece of a package's description, which differs from any passage.

    Numbers give different pieces until these are used up.
    """
    names = ("huggingface_hub", "httpx", "rich", "typer")
    found = importlib.metadata.metadata(names[number % len(names)])
    text = str(found.get_payload() or found["Description"])
    start = (number // len(names)) * 1200 % max(1, len(text) - 2400)
    return text[start : start + 2400]


def sections(paths: list[Path], least: int = 400, most: int = 900) -> list[tuple[str, str]]:
    """Return (heading, text) of Markdown sections of suitable size, cut at `most` characters."""
    found = []
    for path in paths:
        for part in re.split(r"\n(?=## )", path.read_text(encoding="utf-8"))[1:]:
            heading, _, body = part.partition("\n")
            if len(body.strip()) >= least:
                found.append((heading.removeprefix("## ").strip(), body.strip()[:most]))
    return found
