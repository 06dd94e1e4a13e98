"""Relative distance between found and expected numbers."""

import numpy as np


def distance(found, expected):
    """Return the L2 norm of the difference, divided by that of the expected numbers."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
