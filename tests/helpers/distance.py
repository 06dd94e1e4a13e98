"""How far numbers lie from those that are expected."""

import numpy as np


def distance(found, expected):
    """Return the L2 norm of the difference over that of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
