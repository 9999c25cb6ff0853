"""The drafter that never guesses: plain decoding with the same engine, the baseline of every comparison."""

from __future__ import annotations

from torch import Tensor

from mtp.drafters.base import Budget, Drafter, Draw, TargetStates
from mtp.tree import TokenTree


class PlainDrafter(Drafter):
    """Proposes the root alone, so that each pass of the target gives one token."""

    runs_network = False

    def start(self, states: TargetStates, capacity: int) -> None:
        pass

    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        return TokenTree.root_only(pending)

    def observe(self, states: TargetStates) -> None:
        pass

    def select_rows(self, rows: Tensor) -> None:
        pass

    def rewind(self, length: int) -> int:
        return length
