"""What a generation leaves to the next one over the same text: a conversation is not read again at every turn."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from mtp.cache import TreeCache
from mtp.drafters.base import Drafter
from mtp.target import Target


class Past:
    """Keys and values of one text, and what the drafter knows of it.

    ``generate(..., return_dict_in_generate=True)`` returns it as ``past``; given back to ``generate`` with a
    longer text, only what is new is read.  A text that differs from some token on is continued from there: nothing
    depends on how the caller's template spells an earlier turn.  Every generation that is given a ``Past`` brings it
    up to date; an interrupted one leaves it empty, which costs time and nothing else.

    Args:
        target: whose keys and values these are.
    """

    def __init__(self, target: Target):
        self.target = target
        self.ids: list[int] = []
        self._cache: TreeCache | None = None
        self._drafter: Drafter | None = None
        self._state: Any = None
        self._end: weakref.finalize[..., Past] | None = None

    def __len__(self) -> int:
        """Tokens that are known."""
        return len(self.ids)

    def keep(self, cache: TreeCache, ids: list[int], drafter: Drafter) -> None:
        """Take over what a generation computed: ``ids`` are the tokens in ``cache``."""
        self.ids, self._cache = ids, cache
        # When nobody can go on from here any more, another text may have the buffers.
        self._end = weakref.finalize(self, self.target.give_back, cache)
        self._end.atexit = False
        self._drafter, self._state = drafter, drafter.state

    def rewind(self, prompt: list[int], drafter: Drafter) -> TreeCache | None:
        """The cache, cut to what ``prompt`` shares with it, and the drafter put back to that point.

        At least one token is left to read.  None when nothing is shared, or another drafter has to read the whole text.
        """
        cache, self._cache = self._cache, None
        if self._end is not None:
            self._end.detach()
        shared = min(common_length(self.ids, prompt), len(prompt) - 1)
        self.ids = []
        if cache is None or shared == 0 or not self._is_from(drafter):
            return None
        drafter.state = self._state
        known = drafter.rewind(shared)
        if known == 0:
            return None
        cache.crop(known)
        self.target.refresh()
        return cache

    def _is_from(self, drafter: Drafter) -> bool:
        """Whether ``drafter`` can take over the state: it made it, or it is of the same kind and has no weights."""
        same_kind = type(drafter) is type(self._drafter) and not isinstance(drafter, nn.Module)
        return drafter is self._drafter or same_kind


def common_length(first: list[int], second: list[int]) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(first), len(second))
    return next((at for at in range(length) if first[at] != second[at]), length)
