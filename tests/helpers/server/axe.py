"""Accessibility checks with axe-core in a page of the browser."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# The page's policy also applies in an isolated world: no code may be made from strings there.
_RUN = """async (tags) => {
  const found = await axe.run(document, {runOnly: tags, resultTypes: ['violations', 'incomplete']});
  const told = (one) => one.nodes.map((node) => `${one.id}: ${node.target.join(' ')}: ${node.failureSummary}`);
  return [found.violations.flatMap(told), found.incomplete.map((one) => one.id), found.passes.length];
}"""


def axe_findings(page: Any, undecided: set[str]) -> list[str]:
    """Return the violations on a page that has loaded `AXE`.

    Args:
        undecided: rules that axe may leave undecided on this page.
    """
    found, unsure, passed = page.evaluate(_RUN, TAGS)
    assert passed > 10, "axe checked too few rules"
    assert set(unsure) <= undecided, unsure
    return found
