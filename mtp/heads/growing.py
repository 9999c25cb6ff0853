"""Heads whose guess depends on the tokens drafted before it: their trees grow level by level.

Best-first as in EAGLE-2 (arXiv 2406.16858); or drawn, with a shape that does not depend on what is drawn.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp.drafters.base import Budget, Draw
from mtp.growth import BestFirstGrowth, drawn_widths
from mtp.heads.extending import ExtendingConfig, ExtendingHead
from mtp.heads.layers import gather_positions
from mtp.packing import PackedLinears
from mtp.tree import TokenTree


@dataclass(frozen=True)
class GrowingConfig(ExtendingConfig):
    """Sizes of a head whose trees grow.

    Attributes:
        depth: longest path of drafted tokens in a tree.
        width: nodes expanded a level.
        calibration: for each depth from 1 on, offset and slope of the logit of being accepted over the logit of the
            head's own probability, fitted to held-out text; empty where that was not measured.
    """

    depth: int = 6
    width: int = 6
    calibration: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(depth=1, width=1)


class GrowingHead(ExtendingHead):
    """A head that carries something from each drafted token to those behind it (``carry [B, W, C]``).

    A family says how the roots are read (``first``) and how a token is taken in (``then``).  Of the text it knows the
    tokens and the target's last hidden state, unless a family keeps more.
    """

    config: GrowingConfig

    @abstractmethod
    def first(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the pending tokens ``[B]``: what the roots carry ``[B, 1, C]`` and their logits ``[B, 1, V']``."""

    @abstractmethod
    def then(self, tokens: Tensor, carry: Tensor, seen: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Take in drafted tokens: what they carry, and their logits ``[B, W, V']``.

        Args:
            tokens: ``[B, W]``.
            carry: ``[B, W, C]`` what their parents carry.
            seen: ``[B, W, S]`` which of the S tokens taken in so far, these included, are on each one's own path.
            depth: of these tokens; the root's children have 1.
        """

    def confidence_of(self, carry: Tensor) -> Tensor | None:
        """``[B, W]`` what is added to the logits of the likeliest guesses' probabilities; see ``Prediction``."""
        return None

    def best_rule(self, temperature: float) -> str:
        """Likeliest guesses while the target is rather sure, draws where it is not; measured at 0.6 and at 1."""
        return "traversal" if temperature > 0.8 else "walk"

    def refresh(self) -> None:
        self._packed.refresh()  # some optimisers change weights without counting it

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        self.read_pending(pending)
        with self._packed.active():
            return self._best_first(pending, budget) if draw is None else self._drawn(pending, budget, draw)

    def _best_first(self, pending: Tensor, budget: Budget) -> TokenTree:
        growth = BestFirstGrowth(pending, budget, self.config.width, self._calibrated)
        carry, logits = self.first(pending)
        vocabulary = self.guessable
        growth.add(torch.log_softmax(logits.float(), dim=-1), vocabulary, confidence=self.confidence_of(carry))
        for depth in range(1, self.config.depth):
            if not growth.pays_to_go_on():
                break
            tokens, parents, seen = growth.frontier()
            carry, logits = self.then(tokens, gather_positions(carry, parents), seen, depth)
            growth.add(torch.log_softmax(logits.float(), dim=-1), vocabulary, confidence=self.confidence_of(carry))
        return growth.tree()

    def _drawn(self, pending: Tensor, budget: Budget, draw: Draw) -> TokenTree:
        # The shape of a drawn tree must not depend on what is drawn, so costs cannot cut it: it has the head's size.
        nodes = budget.nodes if budget.costs is None else min(budget.nodes, self.config.nodes)
        branching, expanded = drawn_widths(nodes, min(self.config.depth, budget.levels or self.config.depth))
        if not expanded:
            return TokenTree.root_only(pending)
        growth = BestFirstGrowth(pending, budget, width=branching)
        carry, logits = self.first(pending)
        vocabulary = self.guessable
        growth.add(draw.log_probs(logits), vocabulary, draw)
        for depth, width in enumerate(expanded[1:], start=1):
            tokens, parents, seen = growth.frontier(width)
            carry, logits = self.then(tokens, gather_positions(carry, parents), seen, depth)
            growth.add(draw.log_probs(logits), vocabulary, draw)
        return growth.drawn_tree(self.config.vocab_size)

    def _calibrated(self, log_q: Tensor, depth: int) -> Tensor:
        """Log-probability of being accepted, from the head's own; see ``GrowingConfig.calibration``."""
        if not self.config.calibration:
            return log_q
        offset, slope = self.config.calibration[min(depth, len(self.config.calibration)) - 1]
        return F.logsigmoid(offset + slope * torch.logit(log_q.exp(), eps=1e-6))

    def set_calibration(self, calibration: tuple[tuple[float, float], ...]) -> None:
        self.config = replace(self.config, calibration=calibration)

    @cached_property
    def _packed(self) -> PackedLinears:
        return PackedLinears(self)
