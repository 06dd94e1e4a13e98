"""States of models that keep them beside keys and values: slots, which tables write which, where
snapshots are kept.
"""

from __future__ import annotations
