"""Builder for Lark grammars in llguidance's dialect.

It covers literal text with free whitespace and special tokens, JSON schemas, and reasoning blocks.
The right-hand side of a rule consists of atoms: a regular expression (str), the id of a special
token (int), or a rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.text.turns.formats import ID_SLOT, ReasoningFormat
from kvboost_edge.text.turns.schema_rewrite import rewritten, with_short_integers

__all__ = [
    "FREE",
    "JSON_OPTIONS",
    "JSON_SPACE",
    "SPACE",
    "Atom",
    "Lark",
    "Rule",
    "SpecialId",
    "escaped",
    "json_schema",
]

SpecialId = Callable[[str], int | None]

# JSON allows any amount of whitespace between tokens, and small models sometimes never stop
# writing it.
JSON_SPACE = r"( |\n[ \t]{0,16})?"
# Non-ASCII characters are written unescaped. llguidance allows \u only for control characters, so a
# model that starts to write \u00f6 would end up with another character.
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": JSON_SPACE,
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,  # prevents a schema from loosening its own keywords
}
"""llguidance options for the schemas of tool calls and of all other JSON output."""
SPACE = r"[ \t\r\n]{0,4}"
"""Pattern of the whitespace allowed between two pieces of a call."""
FREE = r"(?s:.*)"
_ID = "[A-Za-z0-9_-]{1,64}"
_LONGEST_MARKER = 64


class Rule(NamedTuple):
    """Reference to a rule or terminal by name."""

    name: str


Atom = str | int | Rule


class Lark:
    """A grammar under construction."""

    def __init__(self, special_id: SpecialId) -> None:
        """Start an empty grammar.

        Args:
            special_id: returns the id of the special token with this text, or None.
        """
        self._special_id = special_id
        self._lines = ["%llguidance {}", "WS: /[ \\t\\r\\n]{1,4}/"]

    def text(self) -> str:
        """Return the text of the grammar, which must have a rule named start."""
        return "\n".join(self._lines) + "\n"

    def add(self, name: str, *ways: Iterable[Atom]) -> Rule:
        """Add a rule with these alternatives and return a reference to it."""
        self._lines.append(f"{name}: " + " | ".join(_sequence(way) for way in ways))
        return Rule(name)

    def terminal(self, name: str, pattern: str, *, without: Sequence[str] = ()) -> Rule:
        """Add a terminal that matches one pattern and none of the others.

        Args:
            name: name in capitals.
            pattern: regular expression to match.
            without: regular expressions that must not match.
        """
        self._lines.append(f"{name}: /{pattern}/" + "".join(f" & ~/{other}/" for other in without))
        return Rule(name)

    def up_to(self, name: str, text: Rule, marker: str) -> Rule:
        """Add a rule for `text` up to and including the first marker.

        The marker may be a special token or spelled out.
        """
        self._lines.append(f"{name}_spelt[lazy]: {text.name} /{escaped(marker)}/")
        atoms = self.literal(marker)
        ways: list[list[Atom]] = [[Rule(f"{name}_spelt")]]
        if isinstance(atoms[0], int):
            ways.append([text, *atoms])
        return self.add(name, *ways)

    def ordered_items(
        self, name: str, items: Sequence[tuple[Sequence[Atom], bool]], comma: Sequence[Atom]
    ) -> Rule:
        """Add a rule for optional and required items in order, with separators.

        Args:
            name: prefix of the rule names.
            items: pairs of (atoms, whether the item is required).
            comma: atoms between two items.
        """
        first = self.add(f"{name}_first_end", [])
        more = self.add(f"{name}_more_end", [])
        for number, (one, required) in reversed(list(enumerate(items))):
            missing: list[list[Atom]] = [] if required else [[]]
            first = self.add(
                f"{name}_first{number}", [*one, more], *([*way, first] for way in missing)
            )
            more = self.add(
                f"{name}_more{number}", [*comma, *one, more], *([*way, more] for way in missing)
            )
        return first

    def json(self, name: str, schema: Mapping[str, Any]) -> Rule:
        """Add a rule for JSON that matches a schema."""
        self._lines.append(f"{name}: %json {json.dumps(json_schema(schema), ensure_ascii=False)}")
        return Rule(name)

    def literal(self, text: str) -> list[Atom]:
        """Convert a piece of a call to atoms.

        Special tokens become their ids, whitespace is optional, and id placeholders match any id.
        """
        atoms: list[Atom] = []
        at = done = 0
        while at < len(text):
            end, token_id = self._special_at(text, at)
            if token_id is not None:
                atoms += [_spaced(text[done:at]), token_id]
                done = end
            at = end
        return [atom for atom in [*atoms, _spaced(text[done:])] if atom != ""]

    def _special_at(self, text: str, at: int) -> tuple[int, int | None]:
        """Return the end and the id of the longest special token at a position.

        Without a special token, return the next position and None.
        """
        for end in range(min(len(text), at + _LONGEST_MARKER), at + 1, -1):
            token_id = self._special_id(text[at:end])
            if token_id is not None:
                return end, token_id
        return at + 1, None

    def reasoning(self, markers: ReasoningFormat, *, opened: bool) -> Rule:
        """Add a rule for a reasoning block, or for the rest of a block that is already open."""
        text = self.terminal("THOUGHT", FREE)
        rest = self.up_to("thought", text, markers.end)
        return rest if opened else self.add("block", [SPACE, *self.literal(markers.start), rest])


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that llguidance can compile, with limited whitespace and integers."""
    return {**with_short_integers(rewritten(schema)), "x-guidance": JSON_OPTIONS}


def escaped(text: str) -> str:
    """Return a regular expression, for use between slashes, that matches exactly this text."""
    return "".join(map(_escaped_letter, text))


def _escaped_letter(letter: str) -> str:
    if letter.isalnum() or not letter.isascii() or letter in "_<>\"'=:;,!%@` ":
        return letter
    return f"\\{letter}" if letter.isprintable() else f"\\x{ord(letter):02x}"


def _spaced(text: str) -> str:
    """Return a regular expression for a text with flexible whitespace."""
    parts = [escaped(part) if part.strip() else SPACE for part in re.split(r"(\s+)", text) if part]
    return "".join(parts).replace(escaped(ID_SLOT), _ID)


def _sequence(atoms: Iterable[Atom]) -> str:
    """Return a sequence of atoms as grammar text.

    Adjacent regular expressions are joined, which also merges their whitespace.
    """
    found: list[Atom] = []
    for atom in atoms:
        if isinstance(atom, str) and found and isinstance(found[-1], str):
            joined = found[-1] + atom
            found[-1] = joined.replace(SPACE + SPACE, SPACE)
        else:
            found.append(atom)
    return " ".join(map(_item, found)) or '""'


def _item(atom: Atom) -> str:
    if isinstance(atom, int):
        return f"<[{atom}]>"
    if isinstance(atom, Rule):
        return atom.name
    return "WS?" if atom == SPACE else f"/{atom}/"
