"""Command that writes or checks the generated reference pages.

python -m docs_site.reference --write    write every page that is out of date
python -m docs_site.reference --check    exit with 1 if a page is out of date
"""

from __future__ import annotations

import sys

from docs_site.reference.pages import ROOT, generated_pages


def main(arguments: list[str]) -> int:
    """Write or check the pages and return the exit code."""
    if arguments not in (["--write"], ["--check"]):
        raise SystemExit(__doc__)
    is_current = True
    for path, text in generated_pages().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        name = path.relative_to(ROOT)
        if arguments == ["--write"]:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
        else:
            is_current = False
            print(f"{name} is out of date: run make docs-reference", file=sys.stderr)
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
