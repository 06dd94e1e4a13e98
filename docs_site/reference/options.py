"""Page of all options, docs/reference/options.md."""

from __future__ import annotations

from docs_site.reference.tables import table
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.options import options_of
from kvboost_edge.server.serve_options import command_options
from kvboost_edge.server.settings import ServerSettings

__all__ = ["option_page"]

_HEAD = """# Options

Every option of the engine, a request and the server: its meaning, allowed values, unit and default.
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
    """Return the page, with a table for each class of options and an anchor for each option."""
    flags = command_options()
    parts = [_HEAD]
    for title, text, cls in _SECTIONS:
        has_flags = cls in (EngineConfig, ServerSettings)
        rows = []
        for name, declared in options_of(cls).items():
            anchor = f"{title}-{name}".lower().replace("_", "-")
            shown = [f'<a id="{anchor}"></a>`{name}`']
            if has_flags and name in flags:
                shown += [f"`{flag}`" for flag in declared.flags(name)]
            cells = ("<br>".join(shown), declared.help, declared.allowed, declared.shown_default)
            rows.append(cells)
        columns = ("option, flags" if has_flags else "option", "meaning", "allowed", "default")
        parts.append(f"\n## {title}\n\n{text}\n\n{table(columns, rows)}")
    return "".join(parts)
