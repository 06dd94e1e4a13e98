"""`python -m kvboost_edge` and the `kvboost-edge` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 fine, 1 error, 2 wrong usage, 130
    interrupted).
    """
    from kvboost_edge.cli.app import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
