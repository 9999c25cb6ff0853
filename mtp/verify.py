"""Acceptance rules: which path of a tree to keep, and the token that follows it.

All rules here are exact: the tokens they commit are distributed as the target's own (see ``tests/exactness``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp.tree import TokenTree


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided about a batch of trees.

    Attributes:
        path: ``[B, A]`` nodes to commit, the root first; entries past ``counts`` are padding.
        counts: ``[B]`` nodes on each row's path, at least 1 (the root).
        next_token: ``[B]`` the token after the path: the correction of a refused guess, or the bonus behind a leaf.
    """

    path: Tensor
    counts: Tensor
    next_token: Tensor


class Randomness:
    """The two random choices that rules make, in one place so that a proof can enumerate them."""

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator

    def accept(self, probability: Tensor) -> bool:
        """True with the given probability (a scalar tensor)."""
        uniform = torch.rand((), generator=self.generator, device=probability.device, dtype=probability.dtype)
        return bool(uniform < probability)

    def draw(self, weights: Tensor) -> int:
        """An index of ``weights [V]`` (non-negative, not necessarily summing to one) with proportional probability."""
        return int(torch.multinomial(weights, 1, generator=self.generator))


def walk(tree: TokenTree, choices: Tensor) -> Verdict:
    """Follow the target's own choices down the tree for as long as they were guessed.

    Exact for greedy decoding, and for sampling from any tree that does not depend on random draws of the drafter
    (top-k children): the token at a node is drawn from the target before anyone looks whether it was guessed.

    Args:
        choices: ``[B, N]`` the target's token at every node (its argmax, or a draw from its distribution there).
    """
    guessed = tree.valid & (choices.gather(1, tree.parents.clamp_min(0)) == tree.tokens)
    guessed[:, 0] = True
    ancestors = tree.ancestor_mask()
    reached = ~(ancestors & ~guessed[:, None]).any(-1)
    deepest = torch.where(reached, tree.depths, -1).argmax(1, keepdim=True)
    counts = tree.depths.gather(1, deepest)[:, 0] + 1
    # On a path, node indices rise with depth: sorting the indices of the ancestors puts the path in order.
    nodes = torch.arange(tree.num_nodes, device=choices.device)
    on_path = ancestors.gather(1, deepest[..., None].expand(-1, -1, tree.num_nodes))[:, 0]
    path = torch.where(on_path, nodes, tree.num_nodes).sort(1).values[:, : int(counts.max())]
    return Verdict(path.clamp_max(tree.num_nodes - 1), counts, choices.gather(1, deepest)[:, 0])


def walk_row(children: list[list[int]], tokens: list[int], choose: Callable[[int], int]) -> tuple[list[int], int]:
    """The walk for one row, asking for the target's choice only at the nodes that it reaches.

    Args:
        children: of every node.
        tokens: of every node.
        choose: the target's token at a node.

    Returns:
        The path of nodes, root first, and the token that follows it.
    """
    path = [0]
    while True:
        token = choose(path[-1])
        child = next((child for child in children[path[-1]] if tokens[child] == token), None)
        if child is None:
            return path, token
        path.append(child)


def reject_row(
    children: list[list[int]],
    tokens: list[int],
    target_probs: Callable[[int], Tensor],
    draft_probs: Callable[[int], Tensor],
    randomness: Randomness,
) -> tuple[list[int], int]:
    """Rejection sampling without replacement, for one row of a tree with drawn children.

    At a node with target distribution p and children drawn from q without replacement, in order: accept child x with
    probability min(1, p[x] / q[x]); after a refusal p becomes the normalised positive part of p - q, and q loses x.
    When all children are refused the next token is drawn from what is left of p.  (SpecInfer, arXiv 2305.09781, with
    the correction for draws without replacement of Yang et al., arXiv 2401.06706.)

    Args:
        target_probs: ``[V]`` the target's processed distribution at a node.
        draft_probs: ``[V]`` what a node's children were drawn from; asked for only at nodes that have children.

    Returns:
        The path of nodes, root first, and the token that follows it.
    """
    path = [0]
    while True:
        node = path[-1]
        p = target_probs(node).double()
        accepted = None
        q = draft_probs(node).double() if children[node] else p
        for child in children[node]:
            x = tokens[child]
            q = q / q.sum()
            if randomness.accept((p[x] / q[x]).clamp_max(1.0)):
                accepted = child
                break
            rest = (p - q).clamp_min(0.0)
            # Rounding can leave nothing over when p equals q; a refusal then had probability zero to begin with.
            p = rest / rest.sum() if rest.sum() > 0 else p
            q = q.clone()
            q[x] = 0.0
        if accepted is None:
            return path, randomness.draw(p)
        path.append(accepted)


def verdict_of(rows: list[tuple[list[int], int]], device: torch.device) -> Verdict:
    """Put the results of a row-wise rule into tensors."""
    longest = max(len(path) for path, _ in rows)
    return Verdict(
        path=torch.tensor([path + [0] * (longest - len(path)) for path, _ in rows], device=device),
        counts=torch.tensor([len(path) for path, _ in rows], device=device),
        next_token=torch.tensor([token for _, token in rows], device=device),
    )
