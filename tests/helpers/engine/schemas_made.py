"""Generated JSON schemas with every supported keyword, whose values are all short enough to be
written out.
"""

from __future__ import annotations

import random
from typing import Any

_WORDS = ["red", "green", "blå", "a b", '"quoted"', "\\", "line\nbreak", "🙂", "", "null", "0"]
_NAMES = ["name", "size", "ü", "a-b", "x y", "_", "items"]
_PATTERNS = ["^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{2}:[0-9]{2}$", "^x?y+z$"]


def made_schema(seed: int) -> dict[str, Any]:
    """Make schema number `seed`: an object, an array, or sometimes a plain value."""
    rng = random.Random(seed)
    schema = _any(rng, 3) if seed % 7 == 0 else (_object(rng, 3) if seed % 2 else _array(rng, 3))
    if seed % 5 == 0:
        return {
            "$defs": {"part": _plain(rng)},
            "type": "array",
            "items": {"$ref": "#/$defs/part"},
            "maxItems": 2,
        }
    if seed % 11 == 0:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.5:
        return _plain(rng)
    return _object(rng, depth) if rng.random() < 0.5 else _array(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "additionalProperties": False,
    }
    if names:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        parts = [_any(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 1),
    }


def _plain(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    number = rng.choice([1, 2, 5])
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": rng.choice([*_WORDS, 7, -1.5, True, None])},
            {"enum": [*rng.sample(_WORDS, 3), rng.randint(0, 9)]},
            {"type": "string", "maxLength": rng.randint(0, 6)},
            {"type": "string", "minLength": 2, "maxLength": 2 + rng.randint(0, 4)},
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "string", "format": "date"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 60)},
            {
                "type": "integer",
                "exclusiveMinimum": low,
                "exclusiveMaximum": low + 9,
                "multipleOf": number,
            },
            {"type": "number", "minimum": 0, "maximum": number},
            {"type": ["string", "null"], "maxLength": 3},
            {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 9},
                    {"type": "string", "maxLength": 2},
                ]
            },
        ]
    )
