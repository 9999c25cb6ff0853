"""Passes over trees on a GPU, replayed from CUDA graphs.

A pass of a small target is some hundred kernels that each take less time than launching them.  A graph launches all of
them at once, but replays them as they were recorded: the same shapes, in the same memory.  So trees are filled up to
one of a few sizes, keys and values are written and read in a *window* of a few lengths (powers of two), and where in
it a tree begins is a number on the device, as is the mask.  A graph belongs to the buffers of one cache; caches are
therefore kept for the next generation (``CapturedPasses.take`` and ``give_back``).

Prompts, rounds of a batch that has lost rows, and whatever cannot be recorded run as without this module.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from mtp.attention import AttentionPass, Pattern
from mtp.cache import TreeCache, Window
from mtp.errors import first_line
from mtp.native import config_settings, configs_of, made_of

logger = logging.getLogger(__name__)

SHORTEST = 256  # slots of the smallest window
ROUND = 1024  # capacities are multiples of this, so that a cache serves generations of other lengths as well
Outputs = tuple[Tensor, ...]
#: From a function to what it gave, in memory that stays, and a function that does all of it again.
Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], object]]]


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def shape_of(start: int, nodes: int, capacity: int) -> tuple[int, int]:
    """Nodes and window of a recorded pass over a tree of ``nodes``, behind ``start`` of ``capacity`` slots."""
    size = power_of_two(nodes)
    return size, min(max(power_of_two(start + size), SHORTEST), capacity)


def modes(device: torch.device) -> Hashable:
    """What a pass depends on beside its model and its inputs."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return torch.is_inference_mode_enabled(), autocast


def signature(model: nn.Module) -> Any:
    """What a recorded pass of ``model`` has taken for granted: where its weights lie, its hooks and its settings."""
    tensors = [*model.parameters(), *model.buffers()]
    places = [(tensor.data_ptr(), tensor.dtype, str(tensor.device), tensor.shape) for tensor in tensors]
    hooks = [
        (tuple(part._forward_hooks), tuple(part._forward_pre_hooks), id(part.__dict__.get("forward")))
        for part in model.modules()
    ]
    return places, hooks, made_of(model), [config_settings(config) for config in configs_of(model)]


class CudaCapture:
    """``Capture`` into CUDA graphs, all of which share one pool of memory: they never run at the same time.

    Args:
        device: of the target.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None
        self._keeper: Any = None

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        # The inner stream context puts the stream back if ending a capture fails.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._keeper = self._graph(lambda: ())[0]  # a pool lives as long as any graph in it
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):  # libraries set themselves up at their first calls, not to be recorded
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(beside)
            graph, outputs = self._graph(run)
        return outputs, graph.replay

    def _graph(self, run: Callable[[], Outputs]) -> tuple[Any, Outputs]:
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the empty one
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = run()
        return graph, outputs


class WindowPass(AttentionPass):
    """A tree's pass whose mask is over a whole window, and a function of tensors alone.

    Args:
        lengths: ``[B]``; positions: ``[B, N]``; staged_mask: ``[B, N, N]``: as of ``AttentionPass``.
        slots: ``[N]`` of the nodes, one behind the other.
        length: of the window.
    """

    def __init__(self, lengths: Tensor, positions: Tensor, staged_mask: Tensor, slots: Tensor, length: int):
        super().__init__(lengths, length - positions.shape[1], positions, staged_mask, positions)
        self.slots = slots

    def opens_prefix(self, local_size: int | None, device: torch.device) -> bool:
        return False

    def mask(self, pattern: Pattern | None, device: torch.device) -> Tensor:
        """``[B, N, length]``."""
        batch, nodes = self.positions.shape
        slot = torch.arange(self.end, device=device)
        node = slot - self.slots[0]
        is_node = (node >= 0) & (node < nodes)
        node = node.clamp(0, nodes - 1).expand(batch, -1)
        staged = self.staged_mask.gather(2, node[:, None].expand(-1, nodes, -1))
        visible = torch.where(is_node, staged, slot < self.lengths[:, None, None])
        if pattern is None:
            return visible
        places = torch.where(is_node, self.positions.gather(1, node), slot)
        rows = torch.arange(batch, device=device)[:, None, None]
        head = torch.zeros((), dtype=torch.long, device=device)
        return visible & pattern(rows, head, self.positions[:, :, None], places[:, None])


@dataclass
class CapturedPass:
    """One recorded pass: what it reads, what it gives, and how to run it again."""

    ids: Tensor
    attention: WindowPass
    outputs: Outputs
    replay: Callable[[], object]

    def fill(self, ids: Tensor, attention: AttentionPass, start: int) -> None:
        """Put a tree, from slot ``start`` on, where the recorded one was; nodes that fill it up see themselves."""
        nodes, size = ids.shape[1], self.ids.shape[1]
        filling = size - nodes
        self.ids.copy_(F.pad(ids, (0, filling)))
        ours = self.attention
        ours.lengths.copy_(attention.lengths)
        ours.positions.copy_(F.pad(attention.positions, (0, filling)))
        ours.staged_mask.copy_(F.pad(attention.staged_mask, (0, filling, 0, filling)))
        ours.staged_mask.diagonal(dim1=1, dim2=2).fill_(True)
        torch.arange(start, start + size, out=ours.slots)


class CapturedPasses:
    """The passes of one target that are replayed, and the caches that they belong to.

    Args:
        model: the target's.
        run: an ordinary pass over ``ids`` under an attention, with taps: logits, hidden states and tapped states.
        capture: records it.

    Attributes:
        reason: why nothing is recorded any more; None as long as all goes well.
        count: graphs recorded so far.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[Tensor, TreeCache, AttentionPass, tuple[int, ...]], Outputs],
        capture: Capture,
    ):
        self._model, self._run, self._capture = model, run, capture
        self._spare: tuple[Hashable, TreeCache] | None = None
        self._signature, self._version = signature(model), 0
        self.reason: str | None = None
        self.count = 0

    def describe(self) -> str:
        if self.reason is not None:
            return f"passes are not replayed: {self.reason}"
        return f"{self.count} graphs recorded"

    def refresh(self) -> None:
        """Notice what was changed since the last generation: what was recorded before then is not replayed any more."""
        found = signature(self._model)
        if found != self._signature:
            self._signature, self._spare = found, None
            self._version += 1

    def take(self, num_layers: int, batch: int, capacity: int, device: torch.device) -> TreeCache:
        """An empty cache, if possible the one that was given back, whose graphs are there."""
        spare, self._spare = self._spare, None
        if spare is not None and spare[0] == modes(device):
            cache = spare[1]
            if len(cache.lengths) == batch and cache.capacity >= capacity and cache.lengths.device == device:
                cache.clear()
                return cache
        return TreeCache(num_layers, batch, ROUND * -(-capacity // ROUND), device)

    def give_back(self, cache: TreeCache) -> None:
        """A generation has ended, and nothing else will read its cache."""
        if self.reason is None and cache.recordable and cache.graphs:
            self._spare = (modes(cache.lengths.device), cache)

    def __call__(
        self, ids: Tensor, cache: TreeCache, attention: AttentionPass, taps: tuple[int, ...]
    ) -> Outputs | None:
        """Replay the pass over a tree, recording it first if its shape is new; None where it has to run as usual."""
        nodes = ids.shape[1]
        size, length = shape_of(attention.start, nodes, cache.capacity)
        fits = attention.start + size <= length and cache.holds(length)
        if self.reason is not None or not cache.recordable or not fits or cache.num_staged > 0:
            return None
        key = (len(ids), size, length, taps, self._version, modes(ids.device))
        if (captured := cache.graphs.get(key)) is None:
            captured = self._record(ids, cache, attention, taps, size, length)
            if captured is None:
                return None
            cache.graphs[key] = captured
        else:
            captured.fill(ids, attention, attention.start)
            captured.replay()
        cache.stage(nodes)
        # A copy: the next replay writes into the same memory.
        return tuple(output[:, :nodes].clone() for output in captured.outputs)

    def _record(
        self,
        ids: Tensor,
        cache: TreeCache,
        attention: AttentionPass,
        taps: tuple[int, ...],
        size: int,
        length: int,
    ) -> CapturedPass | None:
        """Record the pass at another place than its own, replay it there, and compare that with an ordinary pass.

        Where something in it depends on a number that Python knows, and a replay does not, the two differ.
        """
        batch, device = len(ids), ids.device
        fixed = WindowPass(
            attention.lengths.clone(),
            ids.new_zeros(batch, size),
            torch.zeros(batch, size, size, dtype=torch.bool, device=device),
            ids.new_zeros(size),
            length,
        )
        captured = CapturedPass(ids.new_zeros(batch, size), fixed, (), lambda: None)
        cache.stage(ids.shape[1])
        expected = self._run(ids, cache, attention, taps)
        cache.discard()
        start, elsewhere = attention.start, length - size  # behind all that is committed
        try:
            captured.fill(ids, attention, elsewhere)
            with cache.in_window(Window(fixed.slots, length), elsewhere if elsewhere != start else max(start - 1, 0)):

                def run() -> Outputs:
                    fixed.forget()
                    return self._run(captured.ids, cache, fixed, taps)

                captured.outputs, captured.replay = self._capture(run)
            captured.fill(ids, attention, start)
            for output in captured.outputs:
                output.fill_(torch.nan)  # so that a replay that does nothing is not taken for one
            captured.replay()
            self._compare(expected, captured.outputs)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            self.reason = first_line(error)
            logger.warning("passes are not replayed from graphs, and run one kernel at a time: %s", self.reason)
            return None
        self.count += 1
        return captured

    @staticmethod
    def _compare(expected: Outputs, found: Outputs) -> None:
        for ours, recorded in zip(expected, found, strict=True):
            recorded = recorded[:, : ours.shape[1]]
            scale = ours.float().abs().amax().clamp_min(1e-6)
            difference = float((ours.float() - recorded.float()).abs().amax() / scale)
            if not difference <= (1e-3 if ours.dtype == torch.float32 else 0.1):
                raise ValueError(
                    f"a recorded pass differs from an ordinary one by {difference:.1e} of its largest value"
                )
