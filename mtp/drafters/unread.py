"""Committed text that a drafter with a cache of its own has not read yet."""

from __future__ import annotations

from torch import Tensor

from mtp.drafters.base import TargetStates


class Unread:
    """Tokens, with the target's states, that wait for the next guess to be asked for.

    Pieces are joined once, when they are read: a round that is decoded plainly costs the same however much waits.

    Attributes:
        counts: ``[B]`` tokens of each row that wait; None where nothing does.
    """

    def __init__(self, *pieces: TargetStates):
        self._pieces: list[TargetStates] = []
        self.counts: Tensor | None = None
        for piece in pieces:
            self.add(piece)

    def add(self, states: TargetStates) -> None:
        """Let ``states`` wait behind the others."""
        self._pieces.append(states)
        self.counts = states.counts if self.counts is None else self.counts + states.counts

    def take(self) -> TargetStates:
        """All that waits, as one; then nothing does.  Something has to wait."""
        pieces, self._pieces, self.counts = self._pieces, [], None
        return TargetStates.joined(pieces)

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these rows."""
        if self._pieces:
            self.add(self.take().select_rows(rows))
