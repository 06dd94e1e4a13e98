"""Default limits of pulls."""

__all__ = ["MAX_PULL_BYTES"]

MAX_PULL_BYTES = 100 * 10**9
"""Default limit of the size of one model."""
