"""The token tree: what a drafter proposes and the target verifies in one pass.

Node 0 is the root, the *pending* token: already chosen, but not yet in the cache.  Every other node is a guess at the
token that follows its parent.  Parents come before children, so a node's ancestors have smaller indices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """A batch of token trees, one a row, padded to the same number of nodes.

    Attributes:
        tokens: ``[B, N]`` token ids.  ``tokens[:, 0]`` is the pending token.
        parents: ``[B, N]`` index of each node's parent; ``-1`` at the root.
        depths: ``[B, N]`` number of drafted tokens on the path from the root to the node, both ends included; the
            root has depth 0.
        valid: ``[B, N]``; False marks padding nodes, which are never accepted.
        worth: ``[B, N]`` how likely the drafter holds each node to be accepted, where it can tell; 1 at the root.
        log_q: ``[B, N]`` the drafter's log-probability of each node given its parent, where it has one.
        q: ``[B, N, V]`` for trees whose children were *drawn*: the distribution that each node's children were drawn
            from, without replacement, in index order, each node's on their own.  None means that the tree does not
            depend on random draws (top-k children), which is what the plain walk needs to be exact.
        fixed: ``[B, N]`` of a drawn tree, the guesses that were not drawn but chosen, by whatever was known, and stand
            behind their drawn siblings; None for none.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    valid: Tensor
    log_q: Tensor | None = None
    q: Tensor | None = None
    worth: Tensor | None = None
    fixed: Tensor | None = None

    @classmethod
    def root_only(cls, pending: Tensor) -> TokenTree:
        """The tree without guesses: verifying it is plain decoding.  ``pending`` is ``[B]``."""
        return cls.chain(pending, pending.new_empty(pending.shape[0], 0))

    @classmethod
    def chain(cls, pending: Tensor, drafts: Tensor, lengths: Tensor | None = None) -> TokenTree:
        """One path a row: ``pending [B]`` then ``drafts [B, K]``, of which the first ``lengths[b]`` count."""
        tokens = torch.cat([pending[:, None], drafts], dim=1)
        index = torch.arange(tokens.shape[1], device=tokens.device)
        depths = index.expand_as(tokens)
        valid = torch.ones_like(tokens, dtype=torch.bool) if lengths is None else depths <= lengths[:, None]
        return cls(tokens, parents=depths - 1, depths=depths, valid=valid)

    @classmethod
    def from_parents(cls, tokens: Tensor, parents: Tensor, **extra: Tensor | None) -> TokenTree:
        """A tree whose depths follow from ``parents [B, N]`` and whose nodes are all valid.

        Raises:
            ValueError: if the root is not node 0 or a node comes before its parent.
        """
        index = torch.arange(tokens.shape[1], device=tokens.device)
        if (parents[:, 0] != -1).any() or (parents[:, 1:] < 0).any() or (parents >= index).any():
            raise ValueError(
                "A token tree needs parents [B, N] with -1 at node 0 and, elsewhere, the index of an earlier node; "
                f"found {parents.tolist()}."
            )
        depths = ancestor_mask(parents).sum(-1) - 1
        return cls(tokens, parents, depths, torch.ones_like(tokens, dtype=torch.bool), **extra)

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """Nodes a row, root and padding included."""
        return self.tokens.shape[1]

    @property
    def is_drawn(self) -> bool:
        """Whether children were drawn at random (see ``q``)."""
        return self.q is not None

    def ancestor_mask(self) -> Tensor:
        """``[B, N, N]`` bool: entry ``[b, n, m]`` says that node m is node n or one of its ancestors."""
        return ancestor_mask(self.parents)

    def children(self, row: int) -> list[list[int]]:
        """For every node of one row, its valid children in index order (the order in which they were drawn)."""
        offspring: list[list[int]] = [[] for _ in range(self.num_nodes)]
        parents, valid = self.parents[row].tolist(), self.valid[row].tolist()
        for node in range(1, self.num_nodes):
            if valid[node]:
                offspring[parents[node]].append(node)
        return offspring

    def drawn_from(self, row: int, node: int) -> Tensor:
        """``[V]`` what a node of a drawn tree was drawn from before its siblings: a fixed one from its token alone."""
        assert self.q is not None
        if self.fixed is None or not self.fixed[row, node]:
            return self.q[row, self.parents[row, node]]
        return torch.zeros_like(self.q[row, node]).index_fill(0, self.tokens[row, node], 1.0)

    def path_tokens(self, row: int, node: int) -> list[int]:
        """Tokens from the root of one row to one of its nodes, both included."""
        tokens, parents = self.tokens[row].tolist(), self.parents[row].tolist()
        path = []
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        return path[::-1]

    def worthiest(self, nodes: int) -> TokenTree:
        """The ``nodes`` valid nodes of each row that are likeliest to be accepted, the root among them.

        Needs ``worth``, which must not rise from a node to its child: then what is kept is connected.
        """
        assert self.worth is not None
        nodes = min(nodes, int(self.valid.sum(1).max()))
        # Stable: a child that is worth as much as its parent stays behind it.
        order = torch.where(self.valid, self.worth, -1.0).sort(dim=1, descending=True, stable=True).indices
        return self._with_nodes(order[:, :nodes].sort(dim=1).values)

    def no_deeper_than(self, depth: int) -> TokenTree:
        """Without the nodes below ``depth``.  Drawn children stay as they were drawn: a node keeps all of its or none.

        Rows with fewer nodes than others are padded.
        """
        # A tree of N nodes is N - 1 deep at most: where that is no deeper, a device need not be asked.
        if self.num_nodes - 1 <= depth or int(self.depths.max()) <= depth:
            return self
        inside = self.depths <= depth
        kept = inside.sort(dim=1, descending=True, stable=True).indices[:, : int(inside.sum(1).max())]
        cut = self._with_nodes(kept)
        return replace(cut, depths=cut.depths.clamp_max(depth), valid=cut.valid & inside.gather(1, kept))

    def _with_nodes(self, kept: Tensor) -> TokenTree:
        """The nodes ``kept [B, M]`` of each row, the root first and parents before their children."""
        index = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        place = torch.zeros_like(self.tokens).scatter(1, kept, index)
        parents = place.gather(1, self.parents.gather(1, kept).clamp_min(0))
        parents[:, 0] = -1
        pick = lambda values: None if values is None else values.gather(1, kept)  # noqa: E731
        return TokenTree(
            self.tokens.gather(1, kept),
            parents,
            self.depths.gather(1, kept),
            self.valid.gather(1, kept),
            log_q=pick(self.log_q),
            q=None if self.q is None else self.q.gather(1, kept[..., None].expand(-1, -1, self.q.shape[2])),
            worth=pick(self.worth),
            fixed=pick(self.fixed),
        )

    def select_rows(self, rows: Tensor) -> TokenTree:
        """The same trees for a subset of rows."""
        pick = lambda tensor: None if tensor is None else tensor[rows]  # noqa: E731
        return TokenTree(
            self.tokens[rows],
            self.parents[rows],
            self.depths[rows],
            self.valid[rows],
            pick(self.log_q),
            pick(self.q),
            pick(self.worth),
            pick(self.fixed),
        )


def ancestor_mask(parents: Tensor) -> Tensor:
    """``[B, N, N]`` bool ancestor-or-self relation of ``parents [B, N]`` (parents before children)."""
    batch, nodes = parents.shape
    relation = torch.eye(nodes, device=parents.device).expand(batch, nodes, nodes).clone()
    if nodes > 1:
        relation[:, 1:].scatter_(2, parents[:, 1:, None], 1.0)
    # Squaring "self or parent" k times reaches 2^k generations: log N small products instead of a loop over nodes.
    for _ in range((nodes - 1).bit_length()):
        relation = (relation @ relation).clamp_(max=1.0)
    return relation > 0
