"""Download of models from the hub and other registries into the store of pulled models."""

__all__ = ["MAX_PULL_BYTES"]

MAX_PULL_BYTES = 100 * 10**9
"""Default limit of the size of one model."""
