"""Trees that grow level by level from a drafter's own confidences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp.drafters.base import Budget, Draw
from mtp.tree import TokenTree


def may_ask(device: torch.device) -> bool:
    """Whether numbers may be read back for a decision that spares work, but is not needed.

    On a CPU they are at hand; elsewhere the host would wait until the device had done all that was asked of it so far,
    and the device would then wait for the host.
    """
    return device.type == "cpu"


class BestFirstGrowth:
    """A tree that grows level by level where the drafter is most confident (EAGLE-2, arXiv 2406.16858).

    A level's most likely candidates, by the joint probability of their path, are expanded; in the end the most likely
    ``nodes`` of all candidates make the tree.  A child is never likelier than its parent, so what is kept is connected.

    With costs in the budget, a level is added only while it is expected to pay for the pass it takes, and the tree is
    cut to the size that commits the most tokens a second.

    Args:
        pending: ``[B]`` the roots' tokens.
        budget: nodes and passes allowed, and what they cost.
        width: children looked at for each node, and nodes expanded a level.
        calibrate: turns a level's log-probabilities (and its depth, from 1 on) into those of being accepted.
    """

    def __init__(
        self,
        pending: Tensor,
        budget: Budget,
        width: int,
        calibrate: Callable[[Tensor, int], Tensor] | None = None,
    ):
        self.pending = pending
        self.budget = budget
        self.width = width
        self.calibrate = calibrate or (lambda log_q, depth: log_q)
        batch, device = pending.shape[0], pending.device
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._log_q: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._q: list[Tensor] = []  # drawn trees: distributions of the nodes expanded at each level
        self._q_nodes: list[Tensor] = []
        self._draft_ids: Tensor | None = None
        # The nodes expanded last: their index among all candidates (-1: the root), score, and view of staged nodes.
        self._open = torch.full((batch, 1), -1, dtype=torch.long, device=device)
        self._open_scores = torch.zeros(batch, 1, device=device)
        self._open_mask = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
        self._count = 0

    def add(
        self, log_probs: Tensor, draft_ids: Tensor, draw: Draw | None = None, confidence: Tensor | None = None
    ) -> None:
        """Take in what the expanded nodes predict: ``log_probs [B, W, Vd]`` over ``draft_ids [Vd]``.

        Args:
            confidence: ``[B, W]`` what the drafter adds to the logits of its likeliest children's probabilities, to
                say how far it believes them; their order stays.
        """
        count = min(self.width, log_probs.shape[-1])
        if draw is None:
            log_q, choice = log_probs.topk(count, dim=-1)
            if confidence is not None:
                log_q = F.logsigmoid(torch.logit(log_q.exp(), eps=1e-6) + confidence[..., None])
        else:
            choice = draw.children(log_probs, count)
            log_q = log_probs.gather(-1, choice)
            self._q.append(log_probs)
            self._q_nodes.append(self._open)
            self._draft_ids = draft_ids
        self.add_children(draft_ids[choice], log_q)

    def add_children(self, tokens: Tensor, log_q: Tensor) -> None:
        """Take in given children of the expanded nodes, ``[B, W, C]`` each; ``-inf`` in ``log_q`` stands for none."""
        scores = self._open_scores[..., None] + self.calibrate(log_q, len(self._scores) + 1)
        self._tokens.append(tokens.flatten(1))
        self._log_q.append(log_q.flatten(1))
        self._scores.append(scores.flatten(1))
        self._parents.append(self._open[..., None].expand_as(tokens).flatten(1))

    def is_settled(self) -> bool:
        """Whether it is known that no deeper node can enter the tree: open candidates score below enough others."""
        wanted = self.budget.nodes - 1
        if wanted < 1:
            return True
        if not may_ask(self.pending.device):
            return False
        scores = torch.cat(self._scores, dim=1)
        if scores.shape[1] < wanted:
            return False
        threshold = scores.topk(wanted, dim=1).values[:, -1]
        return bool((self._scores[-1].amax(1) <= threshold).all())

    def pays_to_go_on(self) -> bool:
        """Whether one more pass of the drafter is allowed, and expected to pay for itself."""
        levels = len(self._scores)
        if levels >= (self.budget.levels or levels + 1) or self.is_settled():
            return False
        costs = self.budget.costs
        if costs is None:
            return True
        worths = torch.cat(self._scores, dim=1).exp()
        # The next level is taken to fall off as this one did: each node's best child, then the second, and so on.
        last = self._scores[-1].unflatten(1, (self._open.shape[1], -1)).exp()
        share = (last / self._open_scores.exp().clamp_min(1e-9)[..., None]).mean(1)
        opened = self._scores[-1].exp().topk(min(self.width, self._scores[-1].shape[1]), dim=1).values
        below = (opened[:, :, None] * share[:, None]).flatten(1)
        return costs.best(torch.cat([worths, below], dim=1), levels + 1)[1] > costs.best(worths, levels)[1]

    def frontier(self, width: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The nodes to expand next.

        Returns:
            tokens: ``[B, W]``.
            parents: ``[B, W]`` index of each one's parent among the nodes expanded last.
            mask: ``[B, W, S]`` which of all nodes expanded so far, these included, each one sees.
        """
        last = self._scores[-1]
        scores, choice = last.topk(min(width or self.width, last.shape[1]), dim=1)
        parents = choice // (last.shape[1] // self._open.shape[1])
        self._open = self._count + choice
        self._count += last.shape[1]
        self._open_scores = scores
        seen = torch.gather(self._open_mask, 1, parents[..., None].expand(-1, -1, self._open_mask.shape[2]))
        itself = torch.eye(choice.shape[1], dtype=torch.bool, device=choice.device).expand(choice.shape[0], -1, -1)
        self._open_mask = torch.cat([seen, itself], dim=2)
        return self._tokens[-1].gather(1, choice), parents, self._open_mask

    def tree(self) -> TokenTree:
        """The most likely nodes of all candidates."""
        scores = torch.cat(self._scores, dim=1)
        # Stable: where the drafter is certain of a child, it scores as its parent, which came first and stays first.
        size = self.budget.nodes
        if self.budget.costs is not None:
            size = min(self.budget.costs.best(scores.exp(), len(self._scores))[0], size)
        size = min(size, 1 + scores.shape[1])
        if may_ask(scores.device):  # children that are none need not be verified either
            size = min(size, 1 + int((scores > -torch.inf).sum(1).max()))
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : size - 1]
        # In order of creation, parents come before children.
        return self._assemble(best.sort(dim=1).values)

    def drawn_tree(self, vocab_size: int) -> TokenTree:
        """All candidates.  Pruning them by value would bias what is left, so none is."""
        count = sum(tokens.shape[1] for tokens in self._tokens)
        batch = self.pending.shape[0]
        everything = torch.arange(count, device=self.pending.device).expand(batch, -1)
        assert self._draft_ids is not None
        q = self._q[0].new_zeros(batch, count + 1, vocab_size)
        rows = torch.arange(batch, device=q.device)[:, None]
        for nodes, log_probs in zip(self._q_nodes, self._q, strict=True):
            dense = q.new_zeros(*log_probs.shape[:2], vocab_size)
            dense[..., self._draft_ids] = log_probs.exp()
            q[rows, nodes + 1] = dense
        return self._assemble(everything, q)

    def _assemble(self, chosen: Tensor, q: Tensor | None = None) -> TokenTree:
        """The tree of candidates ``chosen [B, N - 1]`` (in order of creation) below the root."""
        batch, count = chosen.shape
        parents = torch.cat(self._parents, dim=1)
        place = torch.zeros(batch, parents.shape[1] + 1, dtype=torch.long, device=chosen.device)  # entry 0: the root
        place.scatter_(1, chosen + 1, torch.arange(1, count + 1, device=chosen.device).expand(batch, -1))
        root = chosen.new_full((batch, 1), -1)
        new_parents = place.gather(1, parents.gather(1, chosen) + 1)
        tokens = torch.cat(self._tokens, dim=1).gather(1, chosen)
        log_q = torch.cat(self._log_q, dim=1).gather(1, chosen)
        scores = torch.cat(self._scores, dim=1).gather(1, chosen)
        depth_of = torch.cat([torch.full_like(t, at + 1) for at, t in enumerate(self._tokens)], dim=1)
        depths = torch.cat([torch.zeros_like(root), depth_of.gather(1, chosen)], dim=1)
        worth = torch.cat([torch.ones_like(root, dtype=scores.dtype), scores.exp()], dim=1)
        return TokenTree(
            tokens=torch.cat([self.pending[:, None], tokens], dim=1),
            parents=torch.cat([root, new_parents], dim=1),
            depths=depths,
            # A row with fewer candidates than another is padded with children that are none.
            valid=torch.cat([root < 0, (scores > -torch.inf) | (q is not None)], dim=1),
            log_q=torch.cat([torch.zeros_like(log_q[:, :1]), log_q], dim=1) if count else None,
            q=q,
            worth=worth if q is None else None,
        )


def drawn_widths(nodes: int, depth: int) -> tuple[int, list[int]]:
    """Shape of a tree of drawn children: children a node, and nodes expanded at each level.

    The shape is fixed before anything is drawn, with at most ``nodes`` nodes, the root included.
    """
    branching = max(1, round(nodes**0.5) - 1)
    budget = max((nodes - 1) // branching, 0)
    levels = min(depth, budget)
    expanded: list[int] = []
    for level in range(levels):
        share = -(-(budget - sum(expanded)) // (levels - level))
        expanded.append(min(share, expanded[-1] * branching if expanded else 1))
    return branching, expanded
