"""The batch window: requests that share a prefix which is being computed right now start together.

The engine computes a shared prefix once in any case: a later request waits for the blocks of the
first. What the window adds is that those who arrive meanwhile are handed over together, so that
their own suffixes fall into one step. A request without such company is never held.
"""

from __future__ import annotations

import array
import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence

__all__ = ["PrefixGroups"]


@dataclasses.dataclass(slots=True)
class _Group:
    """Requests with one first block whose prompts are not computed yet, and the gate where later
    ones wait.
    """

    members: int = 0
    gate: asyncio.Event | None = None
    timer: asyncio.TimerHandle | None = None


class PrefixGroups:
    """`join` before a prompt is submitted, `leave` at its first token or its end. Event loop's
    thread only.
    """

    def __init__(self, window_seconds: float, block_size: int) -> None:
        self.held = 0  # requests that waited, since the start
        self._window = window_seconds
        self._block_size = block_size
        self._groups: dict[bytes, _Group] = {}

    async def join(self, tenant: str | None, prompt_ids: Sequence[int]) -> bytes | None:
        """Wait while another member computes the same first block, at most the window from the
        first that waits. Returns the key to `leave` with; None when there is no full block to share
        or the window is off.
        """
        if not self._window or len(prompt_ids) <= self._block_size:
            return None
        first = array.array("Q", prompt_ids[: self._block_size]).tobytes()
        key = hashlib.sha256((tenant or "").encode() + b"\0" + first).digest()
        group = self._groups.setdefault(key, _Group())
        group.members += 1
        if group.members == 1:
            return key
        self.held += 1
        try:
            await self._wait(group)
        except BaseException:
            self._drop(key)  # one that waited computes nothing: the others wait on
            raise
        return key

    def leave(self, key: bytes) -> None:
        """This member's prompt is computed, or it ended: whoever waits behind it goes on."""
        self._open(self._groups[key])
        self._drop(key)

    def _drop(self, key: bytes) -> None:
        group = self._groups[key]
        group.members -= 1
        if not group.members:
            self._open(group)
            del self._groups[key]

    async def _wait(self, group: _Group) -> None:
        if group.gate is None:
            group.gate = asyncio.Event()
            group.timer = asyncio.get_running_loop().call_later(self._window, self._open, group)
        await group.gate.wait()

    @staticmethod
    def _open(group: _Group) -> None:
        if group.gate is not None and group.timer is not None:
            group.gate.set()
            group.timer.cancel()
            group.gate = group.timer = None
