"""Memory counted instead of measured: every tensor that exists while some code runs, in bytes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedBytes(TorchDispatchMode):
    """Bytes of what is made inside of this context, the backward pass and what a checkpoint computes again included.

    Attributes:
        alive: bytes that exist now.
        peak: the most that existed at one time.
        largest: those of the largest tensor that was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for made in tree_leaves(results):
            if torch.is_tensor(made) and made.untyped_storage()._cdata not in inputs:
                self._enter(made.untyped_storage())
        return results

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if (name := storage._cdata) in self._known:
            return
        self._known.add(name)
        size = storage.nbytes()
        self.alive += size
        self.peak, self.largest = max(self.peak, self.alive), max(self.largest, size)
        weakref.finalize(storage, self._leave, name, size)

    def _leave(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.alive -= size
