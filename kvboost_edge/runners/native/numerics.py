"""The version of what the kernels compute, for keys and values that outlive the process."""

__all__ = ["NUMERICS_VERSION"]

NUMERICS_VERSION = 1
"""Raised with every change of the bits that any kernel or program gives: blocks that were stored under another number
are not found again. A test holds the bits of a small model against this number."""
