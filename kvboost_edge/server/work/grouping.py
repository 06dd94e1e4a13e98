"""Batch window, in which requests with the same uncomputed prefix start together.

The engine computes a shared prefix only once in any case, because later requests wait for the
blocks of the first. With the window, requests that arrive meanwhile are also submitted together,
and their suffixes run in one step. A request waits only while another request computes the same
prefix.
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
    """Requests with the same first block whose prompts are not computed yet.

    Attributes:
        members: number of requests that compute or wait.
        gate: event that later requests wait for; None if no request waits.
        timer: timer that sets the event when the window ends.
    """

    members: int = 0
    gate: asyncio.Event | None = None
    timer: asyncio.TimerHandle | None = None


class PrefixGroups:
    """Groups of requests by first block, used only by the event loop's thread.

    Call `join` before a prompt is submitted, and `leave` at its first token or its end.
    """

    def __init__(self, window_seconds: float, block_size: int) -> None:
        self.held = 0  # number of requests that waited since the server started
        self._window = window_seconds
        self._block_size = block_size
        self._groups: dict[bytes, _Group] = {}

    async def join(self, tenant: str | None, prompt_ids: Sequence[int]) -> bytes | None:
        """Wait while another request computes the same first block, at most until the window ends.

        The window starts when the first request waits.

        Returns:
            The key for `leave`. None if the prompt has no full block to share, or if the window is
            off.
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
            # A request that only waited computes nothing, so the others keep waiting.
            self._drop(key)
            raise
        return key

    def leave(self, key: bytes) -> None:
        """Release the waiting requests after a member's prompt is computed or its request has
        ended.
        """
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
