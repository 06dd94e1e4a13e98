"""A renderer of the part of Helm's template language that our chart uses.

It renders the chart on machines without Helm. Where Helm's engine is installed, the tests compare the
two. An action, function or value that it does not know is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"\{\{(-)?\s*(.*?)\s*(-)?\}\}", flags=re.DOTALL)
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\(|\)|\||:=|[^\s()|]+)')


class TemplateError(ValueError):
    """A template that this renderer cannot render."""


class RequiredValueMissing(TemplateError):
    """A value that the chart requires and that is not set."""


@dataclass
class Block:
    """A list of texts and actions."""

    parts: list[str | Action] = field(default_factory=list)


@dataclass
class Action:
    """A pipeline, or `if`, `with` or `define` with its branches."""

    kind: str
    pipeline: str
    branches: list[tuple[str, Block]] = field(default_factory=list)


def _pieces(text: str) -> Iterator[tuple[bool, str]]:
    """Yield texts and actions (True), with white space trimmed at `{{-` and `-}}`."""
    at, trim = 0, False
    for match in _ACTION.finditer(text):
        before = text[at : match.start()]
        before = before.lstrip() if trim else before
        yield False, before.rstrip() if match[1] else before
        yield True, match[2]
        at, trim = match.end(), bool(match[3])
    rest = text[at:]
    yield False, rest.lstrip() if trim else rest


def parse(text: str) -> Block:
    """Parse a template file into a block."""
    root = Block()
    blocks: list[Block] = [root]
    open_actions: list[Action] = []
    for is_action, content in _pieces(text):
        word, _, rest = content.partition(" ")
        if not is_action:
            blocks[-1].parts.append(content)
        elif word in ("if", "with", "define"):
            action = Action(word, rest, [(rest, Block())])
            blocks[-1].parts.append(action)
            open_actions.append(action)
            blocks.append(action.branches[0][1])
        elif word == "else":
            condition = rest.removeprefix("if ") if rest else "true"
            open_actions[-1].branches.append((condition, Block()))
            blocks[-1] = open_actions[-1].branches[-1][1]
        elif word == "end":
            open_actions.pop()
            blocks.pop()
        elif not content.startswith("/*"):
            blocks[-1].parts.append(Action("pipeline", content))
    if open_actions:
        raise TemplateError(f"{open_actions[-1].kind} {open_actions[-1].pipeline} has no end")
    return root


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _to_yaml(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=False, sort_keys=True)
        .removesuffix("\n...\n")
        .rstrip("\n")
    )


def _nindent(width: int, text: str) -> str:
    return "\n" + "\n".join(" " * width + line for line in text.split("\n"))


def _required(message: str, value: Any) -> Any:
    if value in (None, ""):
        raise RequiredValueMissing(message)
    return value


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "contains": lambda part, whole: part in whole,
    "default": lambda otherwise, value: value or otherwise,
    "nindent": _nindent,
    "not": lambda value: not value,
    "printf": lambda pattern, *values: pattern % values,
    "quote": lambda value: json.dumps(_text(value)),
    "required": _required,
    "toYaml": _to_yaml,
    "trimSuffix": lambda suffix, text: text.removesuffix(suffix),
    "trunc": lambda length, text: text[:length],
}


class Renderer:
    """Renders the templates of a chart.

    Args:
        chart: folder of the chart.
        values: values that replace the defaults, merged into them as Helm does.
        release: name of the release.
        namespace: its namespace.
    """

    def __init__(
        self, chart: Path, values: Mapping[str, Any], *, release: str, namespace: str
    ) -> None:
        about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
        defaults = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
        self.values = merged(defaults, values)
        self._root = {
            "Chart": {name[0].upper() + name[1:]: value for name, value in about.items()},
            "Release": {"Name": release, "Namespace": namespace, "Service": "Helm"},
            "Values": self.values,
        }
        self._files = {
            path.name: parse(path.read_text(encoding="utf-8"))
            for path in sorted((chart / "templates").iterdir())
        }
        self._named = {
            json.loads(part.pipeline): part.branches[0][1]
            for block in self._files.values()
            for part in block.parts
            if isinstance(part, Action) and part.kind == "define"
        }

    def render(self) -> dict[str, str]:
        """Return the text of each file that is not a helper."""
        return {
            name: self._render(block, self._root, {})
            for name, block in self._files.items()
            if not name.startswith("_")
        }

    def _render(self, block: Block, dot: Any, variables: dict[str, Any]) -> str:
        return "".join(
            part if isinstance(part, str) else self._run(part, dot, variables)
            for part in block.parts
        )

    def _run(self, action: Action, dot: Any, variables: dict[str, Any]) -> str:
        if action.kind == "define":
            return ""
        if action.kind == "pipeline":
            name, assigned, value = action.pipeline.partition(" := ")
            if assigned:
                variables[name] = self._evaluate(value, dot, variables)
                return ""
            return _text(self._evaluate(action.pipeline, dot, variables))
        for condition, block in action.branches:
            value = self._evaluate(condition, dot, variables)
            if value:
                inner = value if action.kind == "with" else dot
                return self._render(block, inner, variables)
        return ""

    def _evaluate(self, pipeline: str, dot: Any, variables: Mapping[str, Any]) -> Any:
        tokens = _TOKEN.findall(pipeline)
        value, rest = self._pipeline(tokens, dot, variables)
        if rest:
            raise TemplateError(f"{pipeline!r} cannot be read from {rest[0]!r} on")
        return value

    def _pipeline(
        self, tokens: list[str], dot: Any, variables: Mapping[str, Any]
    ) -> tuple[Any, list[str]]:
        piped: list[Any] = []
        while True:
            words: list[Any] = []
            name = tokens[0] if tokens and tokens[0] in (*FUNCTIONS, "include") else None
            tokens = tokens[1:] if name else tokens
            while tokens and tokens[0] not in ("|", ")"):
                word, tokens = self._operand(tokens, dot, variables)
                words.append(word)
            words += piped
            if name == "include":
                template, context = words
                piped = [self._render(self._named[template], context, {})]
            elif name:
                piped = [FUNCTIONS[name](*words)]
            elif len(words) == 1:
                piped = words
            else:
                raise TemplateError(f"{words!r} is not a call of a known function")
            if not tokens or tokens[0] == ")":
                return piped[0], tokens
            tokens = tokens[1:]

    def _operand(
        self, tokens: list[str], dot: Any, variables: Mapping[str, Any]
    ) -> tuple[Any, list[str]]:
        word, *rest = tokens
        if word == "(":
            value, rest = self._pipeline(rest, dot, variables)
            return value, rest[1:]
        if word.startswith('"'):
            return json.loads(word), rest
        if re.fullmatch(r"-?\d+", word):
            return int(word), rest
        if word in ("true", "false"):
            return word == "true", rest
        if word.startswith(("$", ".")):
            start, _, path = word.partition(".")
            value = variables[start] if start else dot
            for name in filter(None, path.split(".")):
                value = value.get(name) if value is not None else None
            return value, rest
        raise TemplateError(f"{word!r} is neither a value nor a known function")


def merged(defaults: Any, values: Any) -> Any:
    """Merge values into the defaults, mapping by mapping; null removes a default."""
    if not isinstance(defaults, Mapping) or not isinstance(values, Mapping):
        return values
    both = {**defaults}
    for name, value in values.items():
        if value is None:
            both.pop(name, None)
        else:
            both[name] = merged(defaults.get(name), value)
    return both
