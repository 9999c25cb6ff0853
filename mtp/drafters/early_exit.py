"""Layer skipping: the target drafts for itself with some of its layers left out, and needs no weights beside its own.

Self-speculative decoding (Zhang et al., arXiv 2309.08168; LayerSkip, arXiv 2404.16710; SWIFT, arXiv 2410.06916).  The
layers that stay read the target's own cache: its keys and values of the committed text, computed with all layers, are
better than the draft's own would be and cost nothing.  What the draft stages is discarded before verification, which
then writes the same slots with all layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.drafters.base import Budget, Drafter, Draw, TargetStates
from mtp.drafters.lm_tree import Reader, TreeShape, grow
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from mtp.tree import TokenTree

SHAPE = TreeShape(width=4, depth=5)


@dataclass(frozen=True)
class EarlyExitConfig:
    """What an early exit leaves out, and the trees it grows.

    Attributes:
        skip: the layers, counted from 0; None for ``default_skip`` of whatever target it is attached to.
        shape: of its trees.
    """

    skip: tuple[int, ...] | None = None
    shape: TreeShape = SHAPE


class EarlyExit(Drafter):
    """Drafts with the target's own layers but some.

    Which layers can be spared differs from model to model: ``mtp.calibrate_early_exit`` finds out.  Models that were
    not trained to exit early are rarely good at it; where drafting does not pay, the planner decodes plainly.

    Args:
        skip: layers to leave out, counted from 0; ``range(exit, num_layers)`` is an early exit in the narrow sense.
            None leaves out every other layer of the middle half.
        shape: of the trees.

    Raises:
        ValueError: for trees without nodes.
    """

    state: TreeCache | None = None

    def __init__(self, skip: Iterable[int] | None = None, shape: TreeShape = SHAPE):
        self.config = EarlyExitConfig(None if skip is None else tuple(sorted(set(skip))), shape)
        self._target: Target | None = None
        self._skip: tuple[int, ...] = ()

    @property
    def skip(self) -> tuple[int, ...]:
        """The layers that are left out of the target it is attached to."""
        return self._skip

    def attach(self, target: Target) -> Self:
        """Connect to the target.

        Raises:
            UnsupportedTargetError: if it cannot do without one of the layers.
            ValueError: if it has no such layer, or none would be left.
        """
        skip = default_skip(target) if self.config.skip is None else self.config.skip
        name, layers = type(target.causal_lm).__name__, target.num_layers
        if skip and not 0 <= skip[0] <= skip[-1] < layers:
            raise ValueError(f"An early exit is to skip layers {skip}; {name} has layers 0 to {layers - 1}.")
        if len(skip) == layers:
            raise ValueError(f"An early exit is to skip all {layers} layers of {name}; at least one has to stay.")
        if needed := sorted(target.needed_layers.intersection(skip)):
            raise UnsupportedTargetError(
                f"An early exit is to skip layers {skip}, but later layers of {name} read the keys and values of layer "
                f"{', '.join(map(str, needed))}. Leave these out of skip."
            )
        self._target, self._skip = target, skip
        return self

    def share(self, cache: TreeCache) -> None:
        self.state = cache

    def start(self, states: TargetStates, capacity: int) -> None:
        pass

    def observe(self, states: TargetStates) -> None:
        pass

    def select_rows(self, rows: Tensor) -> None:
        pass

    def rewind(self, length: int) -> int:
        return length

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        target, cache, skip = self._target, self.state, self._skip
        if target is None or cache is None:
            raise RuntimeError("This early exit is attached to no target, or was not shown its cache; see Drafter.")
        limit = target.max_positions
        shape = self.config.shape if limit is None else self.config.shape.within(limit - cache.start)
        if shape is None or budget.nodes < 2:
            return TokenTree.root_only(pending)

        def forward(ids: Tensor, attention: AttentionPass) -> Tensor:
            return target.forward(ids, cache, attention, skip=skip).logits

        logits = forward(pending[:, None], AttentionPass.over_chain(1, cache.lengths, cache.start))
        return grow(Reader(forward, cache, target.vocab_size), pending, logits, budget, shape, draw)


def default_skip(target: Target) -> tuple[int, ...]:
    """Every other layer of the middle half: neighbours can stand in for each other there better than at the ends."""
    first, last = target.num_layers // 4, target.num_layers - target.num_layers // 4
    return tuple(layer for layer in range(first + 1, last, 2) if layer not in target.needed_layers)
