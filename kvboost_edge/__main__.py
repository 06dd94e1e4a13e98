"""`python -m kvboost_edge` and the `kvboost-edge` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    It is 0 after success, 1 after an error, 2 for wrong usage, and 130 after an interrupt.
    """
    from kvboost_edge.cli.app import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
