"""Report awkward wording in all texts for users except Markdown paragraphs and docstrings.

    python tests/wording.py [--worst 20]

The script reads messages (errors, logs, help texts), the page's strings, and the headings, list
items and table cells of README, docs, CHANGELOG and CONTRIBUTING. For each kind it prints the
number of words, and per 1,000 words the long sentences, the phrases that read like a translation
and the terms that CONTRIBUTING.md says to avoid. Then it lists the worst places. It is a guide, not
a gate: a sentence that reads well may stay.
"""

from __future__ import annotations

import argparse
import ast
import html.parser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvboost_edge"
PAGE = PACKAGE / "server" / "http" / "static"
TERMS = ROOT / "CONTRIBUTING.md"
MARKDOWN = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
LONG_SENTENCE = 30  # words
LEAST_WORDS = 3  # of a string in code that counts as a text

PHRASES = re.compile(
    r"\b(?:behind|beside|whoever|whomever|nobody|somebody|so many|by heart|anew|stands?|lies?"
    r"|all the same|gives? up|given up|goes? (?:first|last)|(?:is|are) told|tells? of"
    r"|(?:is|are|was|were|has|have) none|(?<!there )(?:is|are|was|were) no(?! longer)"
    r"|(?-i:what) (?:of|is|was|it|they|a|the|came|comes|follows|others))\b",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")
CODE = re.compile(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)")
JS_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`')
JS_COMMENT = re.compile(r"^[ \t]*//[^\n]*|/\*.*?\*/", re.MULTILINE | re.DOTALL)
LIST_ITEM = re.compile(r"^\s*(?:[-*>]|\d+\.)\s+")


class Text(NamedTuple):
    """A text that users read, with its location."""

    path: Path
    line: int
    text: str


def avoided_terms(text: str) -> re.Pattern[str]:
    """Return a pattern of the terms in the first column of the table of terms to avoid."""
    rows = text.partition("## Terms to avoid")[2].partition("\n## ")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| ")][1:]
    terms = [term.strip() for cell in cells for term in cell.split(",")]
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, terms))})\b", re.IGNORECASE)


def _docstrings(tree: ast.Module) -> set[int]:
    """Return the identities of nodes that are docstrings, or strings that document a name."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def message_texts(path: Path) -> Iterator[Text]:
    """Yield the strings of a Python file that consist of words: errors, logs, help texts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) not in skipped and len(re.findall(r"\b[a-z]{2,}\b ", text)) >= LEAST_WORDS:
            yield Text(path, node.lineno, " ".join(text.split()))


class _PageTexts(html.parser.HTMLParser):
    """Collector of texts between tags and of attributes that are displayed or read aloud."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        self.found.append((self.getpos()[0], data))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep titles, labels and placeholders."""
        shown = {"title", "aria-label", "placeholder", "alt"}
        self.found += [
            (self.getpos()[0], value) for name, value in attrs if value and name in shown
        ]


def page_texts(path: Path) -> Iterator[Text]:
    """Yield the strings that the page shows, from HTML or JavaScript."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        parser = _PageTexts()
        parser.feed(source)
        parser.close()
        found = parser.found
    else:
        code = JS_COMMENT.sub(lambda match: "\n" * match[0].count("\n"), source)
        found = [
            (code.count("\n", 0, match.start()) + 1, match[1] or match[2] or "")
            for match in JS_STRING.finditer(code)
        ]
    for line, text in found:
        shown = " ".join(re.sub(r"\$\{[^}]*\}|<[^>]*>", "X", text).split())
        if len(re.findall(r"[A-Za-z]{2,}", shown)) >= LEAST_WORDS and " " in shown:
            yield Text(path, line, shown)


def markdown_texts(path: Path) -> Iterator[tuple[str, Text]]:
    """Yield kind ("headings" or "lists and tables") and text of everything except plain paragraphs."""
    is_code = False
    item: list[str] = []
    started = 0
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], start=1):
        is_code ^= line.lstrip().startswith("```")
        begins = bool(LIST_ITEM.match(line))
        if item and (begins or is_code or not line.startswith("  ")):
            yield "lists and tables", Text(path, started, " ".join(item))
            item = []
        if is_code:
            continue
        if line.startswith("#"):
            yield "headings", Text(path, number, line.lstrip("# "))
        elif line.startswith("|"):
            for cell in line.strip("|").split("|"):
                if len(cell.split()) > LEAST_WORDS:
                    yield "lists and tables", Text(path, number, cell.strip())
        elif begins:
            started = number
            item = [LIST_ITEM.sub("", line)]
        elif item:
            item.append(line.strip())


def all_texts() -> Iterator[tuple[str, Text]]:
    """Yield kind and text of everything that this script covers."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from (("messages", text) for text in message_texts(path))
    for path in sorted([*PAGE.glob("*.html"), *PAGE.glob("*.js")]):
        yield from (("page", text) for text in page_texts(path))
    for path in [*(ROOT / name for name in MARKDOWN), *sorted((ROOT / "docs").rglob("*.md"))]:
        yield from markdown_texts(path)


def findings(kind: str, text: str, avoided: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return the kind and the words of each finding in a text."""
    plain = CODE.sub(lambda match: match[1] or "X", text)
    found = [("phrases", match[0]) for match in PHRASES.finditer(plain)]
    found += [("avoided terms", match[0]) for match in avoided.finditer(plain)]
    lengths = [len(sentence.split()) for sentence in SENTENCE_END.split(plain)]
    if kind == "headings":
        found += [("long sentences", "a heading of a sentence")] * plain.endswith((".", "!"))
    found += [("long sentences", f"{words} words") for words in lengths if words > LONG_SENTENCE]
    return found


def main() -> None:
    """Print one line for each kind of text, then the worst places."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worst", type=int, default=20, help="places to print [20]")
    options = parser.parse_args()
    avoided = avoided_terms(TERMS.read_text(encoding="utf-8"))
    words: dict[str, int] = {}
    counts: dict[str, dict[str, int]] = {}
    places: list[tuple[int, str]] = []
    for kind, (path, line, text) in all_texts():
        words[kind] = words.get(kind, 0) + len(text.split())
        is_list_of_terms = path == TERMS and kind != "headings"
        found = [] if is_list_of_terms else findings(kind, text, avoided)
        for what, _ in found:
            of_kind = counts.setdefault(kind, {})
            of_kind[what] = of_kind.get(what, 0) + 1
        if found:
            named = ", ".join(match for _, match in found)
            place = f"{path.relative_to(ROOT)}:{line}: {named}\n    {text[:200]}"
            places.append((len(found), place))
    for kind, count in words.items():
        rates = ", ".join(
            f"{what} {1000 * counts.get(kind, {}).get(what, 0) / count:.1f}"
            for what in ("phrases", "avoided terms", "long sentences")
        )
        print(f"{kind}: {count:,} words; per 1,000 words: {rates}")
    for _, place in sorted(places, key=lambda one: -one[0])[: options.worst]:
        print(place)


if __name__ == "__main__":
    main()
