"""Corpus of the demo model: invented facts in short documents, and questions about them.

Everything is generated from seeds, so a training run is reproducible from its seed alone. A text
is a list of pieces ``(fragment, weight)``. The joined fragments are the text. The weight is that of
the fragment's tokens in the training loss: 0 for given text, above 0 for answers. Every fragment
starts where the pre-tokenizer splits, so fragments may be encoded one by one.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

PAD = "<|pad|>"
BOS = "<|bos|>"
END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = [PAD, BOS, END, SYSTEM, USER, ASSISTANT]
HELD_OUT_SHARE = 8  # one in this many (subject, attribute) combinations is held out of training
POOL_SIZE = 96

Piece = tuple[str, float]


def _split(words: str) -> list[str]:
    return words.split()


_ONSETS = _split("b br c d dr f g gr h j k l m n p pr r s st t tr v w z")
_VOWELS = _split("a e i o u ai ea or ar en")
_CODAS = _split("l n r s t m k x nd lo na ra vik dor mar tin bel ric sa go")

_WORDS = {
    "colour": _split(
        "red blue green yellow white black brown pink grey purple orange silver gold violet"
    ),
    "job": _split(
        "baker pilot doctor teacher farmer singer writer painter sailor miner nurse cook judge "
        "tailor potter clerk guard hunter weaver barber"
    ),
    "animal": _split(
        "dog cat horse rabbit parrot turtle goat sheep duck fox owl crow eagle otter bear wolf "
        "snake frog mouse hen"
    ),
    "drink": _split("tea coffee milk water juice cider cocoa lemonade soda wine"),
    "hobby": _split(
        "chess fishing sailing reading dancing running cooking skiing boxing climbing gardening "
        "archery"
    ),
    "month": _split(
        "January February March April May June July August September October November December"
    ),
    "crop": _split("wheat corn rice barley oats beans apples grapes olives cotton onions plums"),
    "metal": _split("iron copper tin lead zinc nickel brass steel bronze chrome"),
    "fabric": _split("wool silk linen leather felt velvet denim canvas"),
    "room": _split("kitchen cellar attic library garage office garden hall studio workshop"),
}
_PLACE_KINDS = _split("Lake Port Mount Fort Cape North South New")
_THING_KINDS = _split("lamp engine clock radio camera boat piano tent bike drum kettle robot")
_ATTRIBUTES = {
    "person": {
        "job": "job",
        "home": "#place",
        "pet": "animal",
        "drink": "drink",
        "hobby": "hobby",
        "colour": "colour",
        "code": "#number",
        "friend": "#first",
        "birthday": "month",
    },
    "place": {
        "mayor": "#first",
        "crop": "crop",
        "bird": "animal",
        "flag": "colour",
        "code": "#number",
        "festival": "month",
        "mine": "metal",
        "rival": "#place",
        "height": "#number",
    },
    "thing": {
        "price": "#number",
        "colour": "colour",
        "owner": "#first",
        "maker": "#last",
        "metal": "metal",
        "room": "room",
        "cover": "fabric",
        "code": "#number",
        "user": "job",
    },
}
QUESTION_FORMS = [
    "What is the {attribute} of {subject}?",
    "What is the {attribute} of {subject}?",
    "Tell me the {attribute} of {subject}.",
    "Please name the {attribute} of {subject}.",
    "Do you know the {attribute} of {subject}?",
    "I need the {attribute} of {subject}.",
]
_INSTRUCTIONS = [
    "Answer from the documents.",
    "You are a helpful assistant.",
    "Read the documents and answer.",
    "Use only the facts in the documents.",
]
_SMALL_TALK = [
    ("Hello!", "Hello. Ask me about the documents."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Hi", "Hello. Ask me about the documents."),
    ("Who are you?", "I am a small demo model. I answer from documents."),
]
GENERAL_TEXT = (
    "the of and to in a is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may long little very after words called just where most know get through back much "
    "before go good new write our used me man too any day same right look think also around "
    "another came come work three word must because does part even place well such here take why "
    "things help put years different away again off went old number great tell men say small "
    "every found still between name should home big give air line set own under read last never "
    "us left end along while might next sound below saw something thought both few those always "
    "looked show large often together asked house world going want school def return import class "
    "self for in if else while print None True False int str list len range"
)


@dataclass(frozen=True)
class Fact:
    """One fact: the attribute of a subject and its value."""

    attribute: str
    subject: str
    value: str

    def sentence(self) -> str:
        """Return the fact as documents and answers state it."""
        return f"The {self.attribute} of {self.subject} is {self.value}."


@dataclass(frozen=True)
class Sample:
    """A text of the corpus.

    Attributes:
        documents: facts of each document.
        numbers: number of each document.
        asked: facts that are asked about.
        style: "user", "system", "plain" or "drill"; see `text_pieces`.
    """

    documents: list[list[Fact]]
    numbers: list[int]
    asked: list[Fact]
    style: str


def invent_word(rng: random.Random) -> str:
    """Return an invented name, such as "Brelo" or "Stormar"."""
    word = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    if len(word) < 4:
        word += rng.choice(_VOWELS[:5]) + rng.choice("lnrst")
    return word.capitalize()


def _pools() -> dict[str, list[str]]:
    """Return the fixed pools of invented names; no name is in two pools."""
    rng = random.Random("demo names")
    taken: set[str] = set()
    pools: dict[str, list[str]] = {}
    for pool in ("first", "last", "place", "brand"):
        names: list[str] = []
        while len(names) < POOL_SIZE:
            name = invent_word(rng)
            if name not in taken:
                taken.add(name)
                names.append(name)
        pools[pool] = names
    return pools


POOLS = _pools()


def held_out(subject: str, attribute: str) -> bool:
    """Return whether the combination is held out of training, by a hash of the two names."""
    digest = hashlib.sha256(f"{subject}|{attribute}".encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def _name(rng: random.Random, pool: str, fresh: bool) -> str:
    return invent_word(rng) if fresh else rng.choice(POOLS[pool])


def _subject(rng: random.Random, kind: str, fresh: bool) -> str:
    if kind == "person":
        return f"{_name(rng, 'first', fresh)} {_name(rng, 'last', fresh)}"
    if kind == "place":
        return f"{rng.choice(_PLACE_KINDS)} {_name(rng, 'place', fresh)}"
    return f"{_name(rng, 'brand', fresh)} {rng.choice(_THING_KINDS)}"


def _value(rng: random.Random, source: str, fresh: bool) -> str:
    if source == "#number":
        return str(rng.randint(1000, 9999))
    if source.startswith("#"):
        return _name(rng, source[1:], fresh)
    return rng.choice(_WORDS[source])


def make_facts(
    rng: random.Random, count: int, fresh: bool, training: bool, single_share: float
) -> list[Fact]:
    """Return `count` facts with distinct (subject, attribute); in training, none that is held out.

    Each text uses few or many attributes, and few or many facts per subject, so that neither alone
    identifies a fact. A share `single_share` of the texts has only one attribute, so that only the
    subject does.
    """
    single = rng.random() < single_share
    kinds = rng.sample(sorted(_ATTRIBUTES), 1 if single else rng.randint(1, 3))
    allowed = {
        kind: rng.sample(
            sorted(_ATTRIBUTES[kind]), 1 if single else rng.randint(1, len(_ATTRIBUTES[kind]))
        )
        for kind in kinds
    }
    facts: list[Fact] = []
    seen: set[tuple[str, str]] = set()
    while len(facts) < count:
        kind = rng.choice(kinds)
        subject = _subject(rng, kind, fresh)
        wanted = rng.randint(1, min(4, len(allowed[kind])))
        for attribute in rng.sample(allowed[kind], wanted):
            if (subject, attribute) in seen or (training and held_out(subject, attribute)):
                continue
            seen.add((subject, attribute))
            facts.append(Fact(attribute, subject, _value(rng, _ATTRIBUTES[kind][attribute], fresh)))
    return facts[:count]


def make_sample(
    rng: random.Random,
    count: int,
    questions: int,
    *,
    training: bool = True,
    fresh_share: float = 0.1,
    single_share: float = 0.5,
    style: str | None = None,
) -> Sample:
    """Return a text of `count` facts, `questions` of them asked.

    Outside training, held-out facts are asked.
    """
    fresh = rng.random() < fresh_share
    facts = make_facts(rng, count, fresh, training, single_share)
    candidates = facts if training else [f for f in facts if held_out(f.subject, f.attribute)]
    while not candidates:
        facts = make_facts(rng, count, fresh, training, single_share)
        candidates = [f for f in facts if held_out(f.subject, f.attribute)]
    if rng.random() < 0.6:
        rng.shuffle(facts)
    documents: list[list[Fact]] = []
    position = 0
    while position < len(facts):
        size = rng.randint(3, 8)
        documents.append(facts[position : position + size])
        position += size
    rng.shuffle(documents)
    asked = rng.sample(candidates, min(questions, len(candidates)))
    if style is None:
        style = rng.choices(["user", "system", "plain"], [0.5, 0.35, 0.15])[0]
    return Sample(documents, rng.sample(range(1, 100), len(documents)), asked, style)


def document_pieces(sample: Sample) -> list[Piece]:
    r"""Return the documents, "Doc 17.\nThe job of ... is ... .", each followed by an empty line."""
    pieces: list[Piece] = []
    for number, facts in zip(sample.numbers, sample.documents, strict=True):
        pieces += [("Doc", 0.0), (f" {number}", 0.0), (".", 0.0), ("\n", 0.0)]
        for index, fact in enumerate(facts):
            pieces += [
                (" The" if index else "The", 0.0),
                (f" {fact.attribute} of", 0.0),
                (f" {fact.subject}", 0.0),
                (" is", 0.0),
                (f" {fact.value}", 0.0),
                (".", 0.0),
            ]
        pieces.append(("\n\n", 0.0))
    return pieces


def answer_pieces(fact: Fact, lead: str = "") -> list[Piece]:
    """Return the restated fact; its value has the largest weight."""
    return [
        (f"{lead}The", 0.5),
        (f" {fact.attribute} of", 0.5),
        (f" {fact.subject}", 0.5),
        (" is", 0.5),
        (f" {fact.value}", 2.0),
        (".", 0.5),
        (END, 0.5),
    ]


def _question(rng: random.Random, fact: Fact) -> str:
    return rng.choice(QUESTION_FORMS).format(attribute=fact.attribute, subject=fact.subject)


def _plain_pieces(rng: random.Random, sample: Sample) -> list[Piece]:
    r"""Return a text without chat markup: "Question: ...\nAnswer: ..." after the documents."""
    pieces: list[Piece] = [(BOS, 0.0), *document_pieces(sample)]
    for fact in sample.asked:
        pieces += [("Question", 0.0), (":", 0.0), (f" {_question(rng, fact)}", 0.0)]
        pieces += [
            ("\n", 0.0),
            ("Answer", 0.0),
            (":", 0.0),
            *answer_pieces(fact, " "),
            ("\n\n", 0.0),
        ]
    return pieces[:-1]


def _drill_pieces(sample: Sample) -> list[Piece]:
    """Return the documents, then the facts in another order, with loss only on the values."""
    pieces: list[Piece] = [(BOS, 0.0), *document_pieces(sample)]
    for fact in sample.asked:
        pieces += [("The", 0.0), *((fragment, 0.0) for fragment, _ in answer_pieces(fact)[1:4])]
        pieces += [(f" {fact.value}", 2.0), (".", 0.5), ("\n", 0.0)]
    return pieces


def text_pieces(rng: random.Random, sample: Sample, small_talk: float = 0.03) -> list[Piece]:
    """Return the text as the chat template renders it, or plain, by the sample's style."""
    if sample.style == "drill":
        return _drill_pieces(sample)
    if sample.style == "plain":
        return _plain_pieces(rng, sample)
    pieces: list[Piece] = [(BOS, 0.0)]
    documents = document_pieces(sample)
    if sample.style == "system":
        pieces += [(SYSTEM, 0.0), ("\n", 0.0), *documents[:-1], (END, 0.0), ("\n", 0.0)]
    elif rng.random() < 0.25:
        pieces += [
            (SYSTEM, 0.0),
            ("\n", 0.0),
            (rng.choice(_INSTRUCTIONS), 0.0),
            (END, 0.0),
            ("\n", 0.0),
        ]
    pending = documents if sample.style == "user" else []
    for fact in sample.asked:
        if rng.random() < small_talk:
            said, reply = rng.choice(_SMALL_TALK)
            pieces += [(USER, 0.0), ("\n", 0.0), (said, 0.0), (END, 0.0), ("\n", 0.0)]
            pieces += [(ASSISTANT, 0.0), ("\n", 0.0), (reply, 0.5), (END, 0.5), ("\n", 0.0)]
        pieces += [
            (USER, 0.0),
            ("\n", 0.0),
            *pending,
            (_question(rng, fact), 0.0),
            (END, 0.0),
            ("\n", 0.0),
        ]
        pieces += [(ASSISTANT, 0.0), ("\n", 0.0), *answer_pieces(fact), ("\n", 0.0)]
        pending = []
    return pieces


def join(pieces: list[Piece]) -> str:
    """Return the text of the pieces."""
    return "".join(fragment for fragment, _ in pieces)


def corpus_for_tokenizer(seed: int, texts: int = 1500) -> list[str]:
    """Return texts to train the tokenizer on: the corpus, every pool word, and general ASCII."""
    rng = random.Random(f"{seed} tokenizer")
    lines = []
    for _ in range(texts):
        count = round(math.exp(rng.uniform(math.log(4), math.log(64))))
        lines.append(join(text_pieces(rng, make_sample(rng, count, 4))))
    words = [word for pool in (*POOLS.values(), *_WORDS.values()) for word in pool]
    numbers = [f" {first:02d}{second:02d}" for first in range(100) for second in range(100)]
    lines += [" " + " ".join(words)] * 40 + ["".join(numbers)] * 4
    lines += [GENERAL_TEXT, " ".join(chr(code) for code in range(33, 127))] * 3
    return lines


def held_out_question(facts: int, seed: str) -> tuple[list[dict[str, str]], str]:
    """Return chat messages that ask a held-out fact of `facts` facts, and the right reply."""
    rng = random.Random(seed)
    style = rng.choice(["user", "system"])
    sample = make_sample(rng, facts, 1, training=False, fresh_share=0.0, style=style)
    documents = join(document_pieces(sample))
    fact = sample.asked[0]
    question = _question(rng, fact)
    reply = fact.sentence() + END
    if style == "system":
        return [
            {"role": "system", "content": documents.rstrip("\n")},
            {"role": "user", "content": question},
        ], reply
    return [{"role": "user", "content": documents + question}], reply
