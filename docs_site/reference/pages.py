"""All generated pages by path."""

from __future__ import annotations

from pathlib import Path

from docs_site.reference.boards import with_boards
from docs_site.reference.commands import command_page
from docs_site.reference.families import with_table
from docs_site.reference.http_api import http_page
from docs_site.reference.licences import licence_page
from docs_site.reference.metrics import metrics_page
from docs_site.reference.options import option_page
from docs_site.reference.python import python_page
from docs_site.reference.stats import stats_page

__all__ = ["ROOT", "generated_pages"]

ROOT = Path(__file__).parents[2]
_DOCS = ROOT / "docs"


def generated_pages() -> dict[Path, str]:
    """Return the text of each page that is generated completely or in part."""
    models = _DOCS / "models.md"
    boards = _DOCS / "how-to" / "raspberry-pi.md"
    return {
        _DOCS / "commands.md": command_page(),
        models: with_table(models.read_text(encoding="utf-8")),
        boards: with_boards(boards.read_text(encoding="utf-8")),
        _DOCS / "reference" / "http-api.md": http_page(),
        _DOCS / "reference" / "licences.md": licence_page(),
        _DOCS / "reference" / "metrics.md": metrics_page(),
        _DOCS / "reference" / "options.md": option_page(),
        _DOCS / "reference" / "python.md": python_page(),
        _DOCS / "reference" / "stats.md": stats_page(),
    }
