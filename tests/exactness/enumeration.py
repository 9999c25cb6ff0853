"""Exact enumeration: every branch of the randomness, of drafter and verifier, is followed and weighed.

The statement to prove is that, whatever the drafter proposes, the first tokens (the committed path, the token after it,
and from there on the target itself) are distributed as the target's own.  No sampling is involved, so errors are
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_targets import LENGTH, ROOT, Table, Tokens

from mtp.drafters import Budget, Draw
from mtp.growth import BestFirstGrowth
from mtp.tree import TokenTree
from mtp.verify import Randomness

EXACT = 1e-9
ROUNDED = 1e-6  # where float32 softmaxes of the sampler are part of what is checked
WRONG = 1e-3  # what a control has to be off by

RowRule = Callable[..., tuple[list[int], int]]


class Branches(Randomness):
    """Follows every outcome of a random procedure, depth first, by running it again and again.

    The procedure's choices are replayed from a script whose last entry moves on to the next possible outcome after
    each run; ``weight`` is the probability of the run at hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.script: list[tuple[list[tuple[int, float]], int]] = []
        self.at = 0
        self.weight = 1.0

    def pick(self, weights: Sequence[float]) -> int:
        if self.at == len(self.script):
            total = sum(weights)
            self.script.append(([(index, weight / total) for index, weight in enumerate(weights) if weight > 0], 0))
        options, chosen = self.script[self.at]
        self.at += 1
        index, probability = options[chosen]
        self.weight *= probability
        return index

    def accept(self, probability: float) -> bool:
        return bool(self.pick([max(1 - probability, 0.0), min(probability, 1.0)]))

    def draw(self, weights: Tensor) -> int:
        return self.pick(weights.double().tolist())

    def outcomes(self, procedure: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        """Probability and result of every possible run of ``procedure``."""
        while True:
            self.at, self.weight = 0, 1.0
            result = procedure()
            yield self.weight, result
            while self.script and self.script[-1][1] + 1 == len(self.script[-1][0]):
                self.script.pop()
            if not self.script:
                return
            options, chosen = self.script[-1]
            self.script[-1] = (options, chosen + 1)


# ---- the drafter ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EveryDraw(Draw):
    """Children drawn without replacement, one after the other, by a ``Branches``."""

    branches: Branches | None = None

    def children(self, log_probs: Tensor, count: int) -> Tensor:
        assert self.branches is not None
        picked = []
        for weights in log_probs.exp().double().flatten(0, -2).tolist():
            picked += draw_without_replacement(self.branches, weights, count)
        return torch.tensor(picked).view(*log_probs.shape[:-1], count)


def draw_without_replacement(branches: Branches, weights: Sequence[float], count: int) -> list[int]:
    picked: list[int] = []
    for _ in range(count):
        picked.append(branches.pick([0.0 if token in picked else weight for token, weight in enumerate(weights)]))
    return picked


@dataclass(frozen=True)
class Guesses:
    """One row's tree as the row-wise rules see it, with the drafted tokens that lead to each node."""

    children: list[list[int]]
    contexts: list[Tokens]
    q: Sequence[Tensor] = ()
    fixed: Sequence[bool] = ()

    @classmethod
    def of(cls, tree: TokenTree, row: int = 0) -> Guesses:
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        contexts: list[Tokens] = [()]
        for node in range(1, tree.num_nodes):
            contexts.append((*contexts[parents[node]], tokens[node]))
        q = () if tree.q is None else tuple(tree.q[row].double())
        return cls(tree.children(row), contexts, q, () if tree.fixed is None else tree.fixed[row].tolist())

    @property
    def tokens(self) -> list[int]:
        return [context[-1] if context else ROOT for context in self.contexts]

    def drawn_from(self, node: int) -> Tensor:
        """What a node was drawn from: its parent's ``q``, or its own token alone."""
        if self.fixed and self.fixed[node]:
            return torch.zeros_like(self.q[0]).index_fill(0, torch.tensor(self.tokens[node]), 1.0)
        return self.q[next(parent for parent, below in enumerate(self.children) if node in below)]


Proposals = list[tuple[float, Guesses]]


def every(propose: Callable[[Branches], TokenTree | Guesses], row: int = 0) -> Proposals:
    """Every tree that a drafter may propose, with its probability."""
    branches = Branches()
    return [
        (chance, Guesses.of(drafted, row) if isinstance(drafted, TokenTree) else drafted)
        for chance, drafted in branches.outcomes(lambda: propose(branches))
    ]


def drawn_tree(q: Table, parents: Sequence[int]) -> Proposals:
    """All trees of one shape: every node's children drawn from ``q`` at that node, on their own."""
    children = [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]

    def propose(branches: Branches) -> Guesses:
        contexts: list[Tokens] = [()] * len(parents)
        for node, below in enumerate(children):
            drawn = draw_without_replacement(branches, q(contexts[node]).tolist(), len(below))
            for child, token in zip(below, drawn, strict=True):
                contexts[child] = (*contexts[node], token)
        return Guesses(children, contexts, tuple(q(context) for context in contexts))

    return every(propose)


CHAIN = (-1, 0, 1, 2)
SPLIT = (-1, 0, 0, 1, 1)  # two children, the first with two
BUSH = (-1, 0, 0, 1, 1, 2, 2)  # two children, each with two
LEFT = (-1, 0, 0, 1, 1, 3, 3)  # three deep, two children at the first node of every level
UNEVEN = (-1, 0, 0, 2, 2, 4)  # below the second child only, and one child at the end


def top_k_tree(q: Table, width: int = 2, depth: int = 2) -> TokenTree:
    """The drafter's likeliest children at every node, level by level."""
    tokens, parents, level = [ROOT], [-1], [(0, ())]
    for _ in range(depth):
        below = []
        for node, context in level:
            for token in q(context).topk(width).indices.tolist():
                below.append((len(tokens), (*context, token)))
                tokens.append(token)
                parents.append(node)
        level = below
    return TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]))


def grown(q: Table, branching: int, expanded: list[int], branches: Branches) -> TokenTree:
    """EAGLE-3's drawn growth (`_grow_drawn`) over a table: only the best of the drawn children are expanded."""
    growth = BestFirstGrowth(torch.tensor([ROOT]), Budget(64), width=branching)
    draw = EveryDraw(branches=branches)
    contexts: list[Tokens] = [()]
    for depth, width in enumerate(expanded):
        if depth > 0:
            tokens, parents, _ = growth.frontier(width)
            contexts = [
                (*contexts[parent], token)
                for token, parent in zip(tokens[0].tolist(), parents[0].tolist(), strict=True)
            ]
        growth.add(torch.stack([q(context).log() for context in contexts])[None], torch.arange(q.vocab), draw)
    return growth.drawn_tree(q.vocab)


def grown_tree(q: Table, branching: int, expanded: list[int]) -> Proposals:
    """Every tree that ``grown`` may give."""
    return every(lambda branches: grown(q, branching, expanded, branches))


def only(tree: TokenTree, row: int = 0) -> Proposals:
    """A drafter that always proposes the same tree."""
    return [(1.0, Guesses.of(tree, row))]


# ---- the law of the text --------------------------------------------------------------------------------------------


def verdicts(guesses: Guesses, verify_row: RowRule, p: Table) -> Iterator[tuple[float, list[int], int]]:
    """Every ``(probability, path, next token)`` of a rule on one tree."""
    branches = Branches()

    def verify() -> tuple[list[int], int]:
        return verify_row(
            guesses.children,
            guesses.tokens,
            lambda node: p(guesses.contexts[node]),
            guesses.drawn_from,
            branches,
        )

    for weight, (path, token) in branches.outcomes(verify):
        yield weight, path, token


def law_of(
    proposals: Proposals, verify_row: RowRule, p: Table, length: int = LENGTH, end: int | None = None
) -> dict[Tokens, float]:
    """The distribution of the first ``length`` tokens, or of those up to the end token, under an acceptance rule."""
    sums: dict[Tokens, float] = {}
    for chance, guesses in proposals:
        for weight, path, token in verdicts(guesses, verify_row, p):
            tokens = cut((*guesses.contexts[path[-1]], token), length, end)
            sums[tokens] = sums.get(tokens, 0.0) + chance * weight
    return continued(sums, p, length, end)


def cut(tokens: Tokens, length: int, end: int | None) -> Tokens:
    """What is left of a committed block at the end token (this included), as the decoder cuts it."""
    return tokens[: tokens.index(end) + 1][:length] if end in tokens else tokens[:length]


def continued(sums: dict[Tokens, float], p: Table, length: int = LENGTH, end: int | None = None) -> dict[Tokens, float]:
    """The law of ``length`` tokens when the target alone goes on behind what was committed."""
    law = dict.fromkeys(p.sequences(length=length, end=end), 0.0)
    for tokens, weight in sums.items():
        for sequence, rest in p.sequences(tokens, length, end).items():
            law[sequence] += weight * rest
    return law


def distance(law: dict[Tokens, float], p: Table, length: int = LENGTH, end: int | None = None) -> float:
    """The largest difference between a law and the target's own, over all texts."""
    truth = p.sequences(length=length, end=end)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    assert law.keys() == truth.keys()
    return max(abs(law[sequence] - truth[sequence]) for sequence in truth)


def error_of(
    proposals: Proposals, verify_row: RowRule, p: Table, length: int = LENGTH, end: int | None = None
) -> float:
    """How far the text under a drafter and a rule is from the target's own."""
    return distance(law_of(proposals, verify_row, p, length, end), p, length, end)


def expected_accepted(proposals: Iterable[tuple[float, Guesses]], verify_row: RowRule, p: Table) -> float:
    """The mean number of guesses that are kept."""
    return sum(
        chance * weight * (len(path) - 1)
        for chance, guesses in proposals
        for weight, path, _ in verdicts(guesses, verify_row, p)
    )
