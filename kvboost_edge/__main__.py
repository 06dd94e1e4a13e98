"""Entry point of `python -m kvboost_edge` and of the `kvboost-edge` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    The code is 0 for success, 1 for an error, 2 for wrong usage or an invalid option, and 130 for
    an interrupt.
    """
    from kvboost_edge.cli.app import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
