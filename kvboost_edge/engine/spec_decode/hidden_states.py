"""Hidden states of a sequence's last tokens, which an MTP head joins with the tokens after them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kvcache.block_table import BlockTable

__all__ = ["HiddenStates"]

Floats = npt.NDArray[np.float32]


class HiddenStates:
    """Hidden states of consecutive positions of one sequence, after the model's last norm.

    They end with states of draft tokens, first those of the model and later those of the head,
    until `confirm` or `keep`.

    Args:
        size: size of a hidden state.

    Attributes:
        first: first position.
        stop: position after the last token that is not a draft token.
    """

    def __init__(self, size: int) -> None:
        self.first = self.stop = 0
        self._rows: Floats = np.empty((0, size), np.float32)
        self._drafted: list[Floats] = []
        self._table: BlockTable | None = None

    def keep(self, table: BlockTable, start: int, rows: Floats, num_certain: int) -> None:
        """Add the model's states of a pass. States with a gap before these are dropped.

        Args:
            table: block table of the sequence. States of another table are dropped.
            start: position of the first row.
            rows: states [num_tokens, hidden_size].
            num_certain: number of leading rows that are not those of draft tokens.
        """
        self._drafted.clear()
        if table is self._table and start == self.stop:
            self._rows = np.concatenate([self._rows[: start - self.first], rows])
        else:
            self.first = start
            self._rows = rows
        self._table = table
        self.stop = start + num_certain

    def confirm(self, table: BlockTable, stop: int) -> None:
        """Drop the states from position `stop` on, which are those of rejected draft tokens."""
        if table is self._table:
            self.stop = min(stop, self.first + len(self._rows))
            self._rows = self._rows[: self.stop - self.first]

    def drop_before(self, position: int) -> None:
        """Drop the states of the positions before `position`."""
        if position > self.first:
            self._rows = self._rows[position - self.first :].copy()  # frees the others
            self.first = min(position, self.stop)

    def draft(self, row: Floats) -> None:
        """Add the head's own state of the token after the last one."""
        self._drafted.append(row)

    def has(self, table: BlockTable, position: int) -> bool:
        """Return whether the state of a position of the table is known."""
        return table is self._table and self.first <= position < self.stop

    def before(self, start: int, stop: int) -> Floats:
        """Return the states of the positions before each of [start, stop).

        Unknown ones are 0, such as that before the first token of a sequence.
        """
        found = np.zeros((stop - start, self._rows.shape[1]), np.float32)
        first = max(start - 1, self.first)
        last = min(stop - 1, self.stop)
        if first < last:
            rows = self._rows[first - self.first : last - self.first]
            found[first - start + 1 :][: len(rows)] = rows
        for position, row in enumerate(self._drafted, self.stop):
            if start - 1 <= position < stop - 1:
                found[position - start + 1] = row
        return found
