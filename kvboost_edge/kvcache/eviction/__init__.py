"""Which cached block goes first: the policy and its order, what was used again, and what is
pinned.
"""

from __future__ import annotations
