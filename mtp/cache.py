"""The key-value cache of a target or a drafter that reads trees.

A forward pass *stages* the keys and values of its tokens behind the committed ones; ``commit`` then keeps one path a
row and forgets the rest.  Rows may have different lengths:

    slot      0 ........ lengths[b] ........ start ............ start + staged
    row b     committed, | unused (garbage) | staged this round, same slots in all rows

Keys are stored as the model produced them, after the rotary embedding, so that moving one to another slot changes
nothing: its position was baked in when it was computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256  # slots by which a buffer that turned out too small grows at least


@dataclass(frozen=True)
class Window:
    """A part of the buffers that a pass reads whole, and where in it the pass writes; see ``mtp.graphs``.

    Attributes:
        slots: ``[T]`` on the device, of the pass's tokens.
        length: slots that are read.
    """

    slots: Tensor
    length: int


class TreeCacheLayer(CacheLayerMixin):
    """One layer's buffers, ``[B, heads, capacity, dim]``, allocated at the first update."""

    is_sliding = False

    def __init__(self, owner: TreeCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._buffer(states) for states in (key_states, value_states))
        self.is_initialized = True

    def _buffer(self, states: Tensor) -> Tensor:
        batch, heads, _, dim = states.shape
        # Zeros, not empty memory: slots that hold no token are masked, but 0 x NaN would still be NaN.
        return states.new_zeros(batch, heads, self.owner.capacity, dim)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        if self.keys.shape[2] < self.owner.capacity:
            self.keys, self.values = (self._grown(buffer) for buffer in (self.keys, self.values))
            self.owner.graphs.clear()
        if (window := self.owner.window) is not None:
            for buffer, states in ((self.keys, key_states), (self.values, value_states)):
                buffer.index_copy_(2, window.slots, states.to(buffer))
            return self.keys.narrow(2, 0, window.length), self.values.narrow(2, 0, window.length)
        end = self.owner.end
        count = key_states.shape[2]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.narrow(2, end - count, count).copy_(states)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    @property
    def staged(self) -> tuple[Tensor | None, Tensor | None]:
        """Its buffers, into which whoever has staged tokens may write their keys and values; None before there are any,
        and where they are too small."""
        if self.keys is None or self.keys.shape[2] < self.owner.capacity:
            return None, None
        return self.keys, self.values

    def _grown(self, buffer: Tensor) -> Tensor:
        grown = self._buffer(buffer)
        grown[:, :, : buffer.shape[2]] = buffer
        return grown

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source [B, A]`` to slots ``target [B, A]``."""
        for buffer in (self.keys, self.values):
            if buffer is None:
                continue
            if buffer.shape[0] == 1:
                buffer.index_copy_(2, target[0], buffer.index_select(2, source[0]))
            else:
                rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
                buffer[rows, :, target] = buffer[rows, :, source]

    def select_rows(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    # What Transformers may ask of a layer.
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.end, 0

    def get_seq_length(self) -> int:
        return self.owner.end

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5.2x


class TreeCache(Cache):
    """Committed prefixes plus the nodes staged since the last commit.

    Args:
        num_layers: attention layers of the model.
        batch_size: rows.
        capacity: slots to allocate at first use; grows if it turns out too small.
        device: where ``lengths`` lives.

    Attributes:
        lengths: ``[B]`` committed tokens of each row.
        start: first staged slot (the longest row's length).
        end: one past the last staged slot.
        window: what the pass at hand reads, where that is fixed.
        graphs: recorded passes over these very buffers (``mtp.graphs``).
        recordable: whether it is worth recording any: its rows are still those that it was made for.
    """

    def __init__(self, num_layers: int, batch_size: int, capacity: int = GROWTH, device: torch.device | str = "cpu"):
        self.tree_layers = [TreeCacheLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.capacity = capacity
        self.start = self.end = 0
        self.window: Window | None = None
        self.graphs: dict[Hashable, Any] = {}
        self.recordable = True

    @contextmanager
    def in_window(self, window: Window, place: int) -> Iterator[None]:
        """Read and write in ``window`` inside the block; nothing is staged by it.

        Args:
            place: what it says meanwhile of where staged tokens begin.
        """
        before = self.start, self.end
        self.window, self.start, self.end = window, place, place
        try:
            yield
        finally:
            self.window, (self.start, self.end) = None, before

    def clear(self) -> None:
        """Forget everything, to begin another text in the same buffers."""
        for layer in self.tree_layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    buffer.zero_()  # a number that is none, left in a slot, would be one in every window
        self.crop(0)

    def holds(self, length: int) -> bool:
        """Whether all layers have buffers of at least ``length`` slots."""
        return all(layer.keys is not None and layer.keys.shape[2] >= length for layer in self.tree_layers)

    @property
    def num_staged(self) -> int:
        return self.end - self.start

    def stage(self, count: int) -> None:
        """Make room for the ``count`` tokens of the next forward pass, behind what is staged already."""
        self.end += count
        if self.end > self.capacity:
            self.capacity = max(self.end, self.capacity + max(GROWTH, self.capacity // 2))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention layers; returns all keys and values up to ``end``."""
        return self.tree_layers[layer_idx].update(key_states, value_states)

    def commit(self, path: Tensor | None, counts: Tensor, longest: int) -> None:
        """Keep ``path[b, :counts[b]]`` of the staged nodes as row b's next tokens; forget the other staged nodes.

        Args:
            path: ``[B, A]`` indices of staged nodes; entries past ``counts`` may be any valid index.  None for the
                first ``counts[b]`` in order, which, where rows are not of different lengths, stay where they are.
            counts: ``[B]`` tokens to keep a row, at most A.
            longest: the largest committed length afterwards, known to the caller, which spares a device sync.
        """
        in_place = path is None and (len(self.lengths) == 1 or self.start == 0)
        if not in_place:
            offsets = torch.arange(self.num_staged if path is None else path.shape[1], device=self.lengths.device)
            source = self.start + (offsets.expand(len(self.lengths), -1) if path is None else path)
            # Entries past a row's count land beyond its new length: garbage where garbage already is.
            target = self.lengths[:, None] + offsets
            for layer in self.tree_layers:
                device = layer.keys.device if layer.keys is not None else source.device
                layer.move(source.to(device), target.to(device))
        self.lengths = self.lengths + counts
        self.start = self.end = longest

    def longest_with(self, counts: Tensor) -> int:
        """The largest length once the first ``counts [B]`` staged tokens of each row are kept.

        A single row keeps all that is staged, so that the device need not be asked.
        """
        return self.end if len(counts) == 1 else int((self.lengths + counts).max())

    def discard(self) -> None:
        """Forget all staged nodes."""
        self.end = self.start

    def crop(self, length: int) -> None:
        """Forget everything behind the first ``length`` tokens of every row; no row may be shorter."""
        self.lengths = torch.full_like(self.lengths, length)
        self.start = self.end = length

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` slots at the next pass, so that buffers grow once."""
        self.capacity = max(self.capacity, capacity)

    def select_rows(self, rows: Tensor, longest: int) -> None:
        """Keep only ``rows``; nothing may be staged.  ``longest`` is the largest committed length among them."""
        for layer in self.tree_layers:
            layer.select_rows(rows if layer.keys is None else rows.to(layer.keys.device))
        self.graphs.clear()  # these are other buffers now, and the next row to end will leave others again
        self.recordable = False
        self.lengths = self.lengths[rows]
        self.start = self.end = longest

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end
