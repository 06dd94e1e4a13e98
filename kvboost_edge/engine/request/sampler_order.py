"""Names and order of the samplers, which a request may choose as in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable

from kvboost_edge.errors import RequestError

__all__ = ["DEFAULT_ORDER", "SAMPLERS", "SAMPLER_LETTERS", "SAMPLER_SPELLINGS", "read_samplers"]

_MAX_SAMPLERS = 32

DEFAULT_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "temperature",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
)
"""Names of the samplers in their usual order."""

SAMPLERS = (*DEFAULT_ORDER, "infill")
"""Names of all samplers. Those outside the usual order run only if a request names them."""

SAMPLER_SPELLINGS = {
    "typical_p": "typ_p",
    "typical": "typ_p",
    "temp": "temperature",
    "top-n-sigma": "top_n_sigma",
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "min-p": "min_p",
}
"""Other names of samplers in llama.cpp."""

SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "t": "temperature",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "i": "infill",
}
"""Letters of llama.cpp's option --sampler-seq."""


def read_samplers(names: object) -> tuple[str, ...]:
    """Return the names of samplers, given as a list or in one string.

    Raises:
        RequestError: a name is unknown, or there are too many.
    """
    if isinstance(names, str):
        names = _split_samplers(names)
    if not isinstance(names, Iterable):
        raise RequestError(f"samplers={names!r} must be a list of names of samplers")
    found: list[str] = []
    for name in names:
        if len(found) == _MAX_SAMPLERS:
            raise RequestError(f"samplers holds more than {_MAX_SAMPLERS} names; leave some out")
        known = SAMPLER_SPELLINGS.get(name, name) if isinstance(name, str) else ""
        if known not in SAMPLERS:
            raise RequestError(
                f"samplers holds {str(name)[:64]!r}, which is not one of {', '.join(SAMPLERS)}"
            )
        found.append(known)
    return tuple(found)


def _split_samplers(text: str) -> list[str]:
    """Split names separated by semicolons, or a string of llama.cpp's letters."""
    names = [name.strip() for name in text.split(";") if name.strip()]
    if len(names) == 1 and not {names[0]} & {*SAMPLERS, *SAMPLER_SPELLINGS}:
        return [SAMPLER_LETTERS.get(letter, letter) for letter in names[0]]
    return names
