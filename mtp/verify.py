"""Acceptance rules: which path of a tree to keep, and the token that follows it.

All rules here are exact: the tokens they commit are distributed as the target's own, which ``tests/exactness`` proves
by following every branch of their randomness.  ``mtp/rules.py`` gives them names.

``walk`` takes a batch at once.  The rules for one row share a signature, so that a caller need not know which it calls:

    children: of every node, in the order in which they were drawn, where they were.
    tokens: of every node.
    target_probs: ``[V]`` the target's processed distribution at a node; asked for at most once a node, and only at
        nodes where the answer matters, since processors may take as long as a pass over a small model.
    draft_probs: ``[V]`` what a node was drawn from, before any of its siblings were: all on its own token if it was not
        drawn.  Asked for only by rules for drawn children.
    randomness: the source of every random choice.

They return the path of nodes, root first, and the token that follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from mtp.tree import TokenTree

Distribution = Callable[[int], Tensor]  # ``[V]`` at a node
RowVerdict = tuple[list[int], int]


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided about a batch of trees.

    Attributes:
        path: ``[B, A]`` nodes to commit, the root first; entries past ``counts`` are padding, any valid index.
        counts: ``[B]`` nodes on each row's path, at least 1 (the root).
        next_token: ``[B]`` the token after the path: the correction of a refused guess, or the bonus behind a leaf.
    """

    path: Tensor
    counts: Tensor
    next_token: Tensor

    def narrowed(self, width: int) -> Verdict:
        """The same, with paths of ``width`` entries: the largest of ``counts``."""
        return replace(self, path=self.path[:, :width])


PARTS = 2**20  # worths are read back in parts of one, between the token ids


@dataclass(frozen=True)
class Outcome:
    """A verdict and what the loop needs to know of its tree, on the host: read from the device in one transfer.

    Attributes:
        paths: nodes to commit of each row, without padding.
        tokens: their token ids, the root's first.
        next_tokens: what follows each path.
        drafted: valid guesses in each row's tree.
        worths: of each row's nodes; None where the drafter cannot tell.
        depths: of each row's nodes.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    next_tokens: list[int]
    drafted: list[int]
    worths: list[list[float]] | None
    depths: list[list[int]]

    @classmethod
    def of(cls, tree: TokenTree, verdict: Verdict) -> Outcome:
        """Wait for the device, once."""
        numbers = torch.stack([verdict.counts, verdict.next_token, tree.valid.sum(1) - 1], dim=1)
        parts = [numbers, verdict.path, tree.tokens.gather(1, verdict.path), tree.depths]
        if tree.worth is not None:
            parts.append((tree.worth * PARTS).round().long())
        ends = list(accumulate(part.shape[1] for part in parts))
        rows = torch.cat(parts, dim=1).tolist()

        def part(which: int) -> list[list[int]]:
            return [row[ends[which - 1] if which else 0 : ends[which]] for row in rows]

        counts, next_tokens, drafted = zip(*part(0), strict=True)
        return cls(
            paths=[path[:count] for path, count in zip(part(1), counts, strict=True)],
            tokens=[tokens[:count] for tokens, count in zip(part(2), counts, strict=True)],
            next_tokens=list(next_tokens),
            drafted=list(drafted),
            worths=None if tree.worth is None else [[worth / PARTS for worth in row] for row in part(4)],
            depths=part(3),
        )

    @property
    def promised(self) -> list[float] | None:
        """What each row's worths add up to, the root's 1 included."""
        return None if self.worths is None else [sum(row) for row in self.worths]


class Randomness:
    """The two random choices that rules make, in one place so that a proof can enumerate them."""

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator

    def accept(self, probability: float) -> bool:
        """True with the given probability."""
        device = "cpu" if self.generator is None else self.generator.device
        return float(torch.rand((), generator=self.generator, device=device, dtype=torch.float64)) < probability

    def draw(self, weights: Tensor) -> int:
        """An index of ``weights [V]`` (non-negative, not necessarily summing to one) with proportional probability."""
        return int(torch.multinomial(weights, 1, generator=self.generator))


def walk(tree: TokenTree, choices: Tensor) -> Verdict:
    """Follow the target's own choices down the tree for as long as they were guessed.

    Exact for greedy decoding, and for sampling from any tree that does not depend on random draws of the drafter
    (top-k children): the token at a node is drawn from the target before anyone looks whether it was guessed.

    Args:
        choices: ``[B, N]`` the target's token at every node (its argmax, or a draw from its distribution there).

    Returns:
        the verdict, with paths as wide as the tree has nodes: how long they are, only the device knows.
    """
    if tree.num_nodes == 1:  # a plain round
        return Verdict(torch.zeros_like(choices), torch.ones_like(choices[:, 0]), choices[:, 0])
    guessed = tree.valid & (choices.gather(1, tree.parents.clamp_min(0)) == tree.tokens)
    guessed[:, 0] = True
    ancestors = tree.ancestor_mask()
    reached = ~(ancestors & ~guessed[:, None]).any(-1)
    deepest = torch.where(reached, tree.depths, -1).argmax(1, keepdim=True)
    counts = tree.depths.gather(1, deepest)[:, 0] + 1
    # On a path, node indices rise with depth: sorting the indices of the ancestors puts the path in order.
    nodes = torch.arange(tree.num_nodes, device=choices.device)
    on_path = ancestors.gather(1, deepest[..., None].expand(-1, -1, tree.num_nodes))[:, 0]
    path = torch.where(on_path, nodes, tree.num_nodes).sort(1).values
    return Verdict(path.clamp_max(tree.num_nodes - 1), counts, choices.gather(1, deepest)[:, 0])


def walk_row(children: list[list[int]], tokens: list[int], choose: Callable[[int], int]) -> RowVerdict:
    """The walk for one row, asking for the target's choice only at the nodes that it reaches.

    Args:
        choose: the target's token at a node.
    """
    path = [0]
    while True:
        token = choose(path[-1])
        child = next((child for child in children[path[-1]] if tokens[child] == token), None)
        if child is None:
            return path, token
        path.append(child)


def sampled_walk_row(
    children: list[list[int]],
    tokens: list[int],
    target_probs: Distribution,
    draft_probs: Distribution,
    randomness: Randomness,
) -> RowVerdict:
    """The walk with the target's choices drawn from its distribution; for top-k children, as ``walk``."""
    return walk_row(children, tokens, lambda node: randomness.draw(target_probs(node)))


def reject_row(
    children: list[list[int]],
    tokens: list[int],
    target_probs: Distribution,
    draft_probs: Distribution,
    randomness: Randomness,
) -> RowVerdict:
    """Rejection sampling without replacement, for drawn children.

    At a node with target distribution p and children drawn from q without replacement, in order: accept child x with
    probability min(1, p[x] / q[x]); after a refusal p becomes the normalised positive part of p - q, and q loses x.
    When all children are refused the next token is drawn from what is left of p.  (SpecInfer, arXiv 2305.09781, with
    the correction for draws without replacement of Yang et al., arXiv 2401.06706.)

    Guesses that were not drawn stand behind a node's drawn children, each held against a q that is all on its own
    token.  They are accepted with what is left of p[x], as by the walk, and may be chosen in any way.
    """
    path = [0]
    while children[path[-1]]:
        here = _Odds.at_first(target_probs(path[-1]))
        for child in children[path[-1]]:
            here = here.facing(draft_probs(child))
            if randomness.accept(here.of_child(tokens[child])):
                path.append(child)
                break
            here = here.after_refusing(tokens[child])
        else:
            return path, randomness.draw(here.p)
    return path, randomness.draw(target_probs(path[-1]))


def traverse_row(
    children: list[list[int]],
    tokens: list[int],
    target_probs: Distribution,
    draft_probs: Distribution,
    randomness: Randomness,
) -> RowVerdict:
    """Traversal verification, for drawn children: whole paths first, leaves up (Weng et al., arXiv 2505.12398).

    A path is worth what its tokens are worth together, so a token that the target likes less than the drafter did can
    be kept for a continuation that it likes more.  The weight a of a node is the probability of ending at it or below
    it, given the draws that led there: 1 at the root, and min(1, a p[x] / q[x]) at its child x.  A leaf is accepted
    with its weight.  A leaf that is refused is taken out and leaves its parent with r = (a p - q)+: p becomes
    r / sum(r), q loses x, and a becomes sum(r) / (sum(r) + 1 - a).  A node that has lost all its children is a leaf.
    The next token is drawn from what is left of p at the accepted one.

    On a chain this is block verification (Sun et al., arXiv 2403.10444).  Every node's children must have been drawn
    on their own: draws that one node shares with another are no longer random once a path through the other is refused.
    Guesses that were not drawn are held against a q that is all on their own token, as by rejection.
    """

    def end_below(node: int, weight: float) -> RowVerdict | None:
        """The path from ``node`` on; None if it is refused with all that is below it."""
        if weight == 0:  # so has everything below: the target need not be asked
            return None
        p = None
        if children[node]:
            here = _Odds.at_first(target_probs(node), weight)
            for child in children[node]:
                here = here.facing(draft_probs(child))
                found = end_below(child, here.of_child(tokens[child]))
                if found is not None:
                    return [node, *found[0]], found[1]
                here = here.after_refusing(tokens[child])
            weight, p = here.weight, here.p
        if not randomness.accept(weight):
            return None
        return [node], randomness.draw(target_probs(node) if p is None else p)

    found = end_below(0, 1.0)
    assert found is not None  # the root's weight is 1, whatever is refused below it
    return found


@dataclass(frozen=True)
class _Odds:
    """What a node's children are held against while one after the other is refused.

    Attributes:
        weight: probability of ending at the node or below it, given the draws above.
        p: ``[V]`` what is left of the target's distribution.
        refused: the children's tokens so far.
        q: ``[V]`` what the next child was drawn from, given these; zero once all that the drafter could draw is taken.
    """

    weight: float
    p: Tensor
    refused: tuple[int, ...]
    q: Tensor

    @classmethod
    def at_first(cls, p: Tensor, weight: float = 1.0) -> _Odds:
        """Before any child.  In float64: where p is near q, the difference of float32 numbers is mostly rounding."""
        p = _normalised(p.double())
        return cls(weight, p, (), torch.zeros_like(p))

    def facing(self, q: Tensor) -> _Odds:
        """With the next child, whose distribution was ``q`` before its siblings were drawn."""
        q = q.to(torch.float64, copy=True)
        q[list(self.refused)] = 0.0
        return replace(self, q=_normalised(q))

    def of_child(self, x: int) -> float:
        """The weight of the next child, ``x``; zero where the drafter had nothing left to draw."""
        drawn_from = float(self.q[x])
        return min(self.weight * float(self.p[x]) / drawn_from, 1.0) if drawn_from > 0 else 0.0

    def after_refusing(self, x: int) -> _Odds:
        rest = (self.weight * self.p - self.q).clamp_min(0.0)
        mass = float(rest.sum())
        ended = mass + (1.0 - self.weight)
        return replace(
            self,
            # Where nothing is left at weight 1, p equals q; the refusal then had probability zero to begin with.
            weight=mass / ended if ended > 0 else self.weight,
            p=rest / mass if mass > 0 else self.p,
            refused=(*self.refused, x),
        )


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum()
    return weights / total if total > 0 else weights


def verdict_of(rows: list[RowVerdict], device: torch.device) -> Verdict:
    """Put the results of a row-wise rule into tensors."""
    longest = max(len(path) for path, _ in rows)
    return Verdict(
        path=torch.tensor([path + [0] * (longest - len(path)) for path, _ in rows], device=device),
        counts=torch.tensor([len(path) for path, _ in rows], device=device),
        next_token=torch.tensor([token for _, token in rows], device=device),
    )
