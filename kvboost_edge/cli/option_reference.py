"""The reference page of all options, docs/reference/options.md.

python -m kvboost_edge.cli.option_reference            print it
python -m kvboost_edge.cli.option_reference --write    write it
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.options import options_of
from kvboost_edge.server.serve_options import command_options
from kvboost_edge.server.settings import ServerSettings

__all__ = ["PAGE", "option_page"]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
_HEAD = """# Options

`python -m kvboost_edge.cli.option_reference --write` generates this page from the declarations.
`serve` takes the options with a flag. Other commands take engine options as `-o NAME=VALUE` and
sampling parameters as `-s NAME=VALUE`.
"""
_SECTIONS = (
    ("Engine", "Keywords of `CPUPagedEngine`, fields of `EngineConfig`.", EngineConfig),
    (
        "Sampling",
        "Keywords of `generate` and `submit`, fields of `SamplingParams`.",
        SamplingParams,
    ),
    ("Request", "Further keywords of `generate` and `submit`.", Terms),
    ("Server", "Flags of `kvboost-edge serve` and `kvboost-server`.", ServerSettings),
)


def option_page() -> str:
    """Return the page: a table for each class of options."""
    flags = command_options()
    parts = [_HEAD]
    for title, text, cls in _SECTIONS:
        has_flags = cls in (EngineConfig, ServerSettings)
        names = ("option", "flag") if has_flags else ("option",)
        columns = (*names, "meaning", "allowed", "default")
        rows = [columns, ("---",) * len(columns)]
        for name, declared in options_of(cls).items():
            flag = ", ".join(f"`{one}`" for one in declared.flags(name)) if name in flags else ""
            cells = (f"`{name}`", flag) if has_flags else (f"`{name}`",)
            shown = declared.shown_default
            rows.append((*cells, declared.help, declared.allowed, shown))
        lines = "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)
        parts.append(f"\n## {title}\n\n{text}\n\n{lines}\n")
    return "".join(parts)


def main(arguments: list[str]) -> None:
    """Print the page, or write it."""
    if arguments not in ([], ["--write"]):
        raise SystemExit(__doc__)
    if arguments:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(option_page(), encoding="utf-8")
    else:
        sys.stdout.write(option_page())


if __name__ == "__main__":
    main(sys.argv[1:])
