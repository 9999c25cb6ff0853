"""Several drafters' guesses in one tree: what one of them cannot see, another may.

A trained head knows the language, an n-gram drafter the text at hand.  Each proposes a tree of its own; the trees are
laid on top of each other, nodes on the same path are folded into one, and the likeliest nodes of all are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from mtp.cache import TreeCache
from mtp.drafters.base import Budget, Drafter, Draw, RoundCosts, TargetStates
from mtp.drafters.merging import Candidates, graft, merge
from mtp.drafters.reliability import Reliability, committed_text, held_against
from mtp.target import Target
from mtp.tree import TokenTree
from mtp.verify import Verdict

REMEMBER = 0.9  # of what rounds with a network were expected to bring, each time one is asked
YIELD = 0.3  # guesses that a drawn tree keeps more at e times the size (EAGLE-3, 16 nodes, temperature 1: 0.84 of 15)
HOPE = 1.01  # and what that grows by in each round in which none is: it is asked again when look-ups get no better


@dataclass(frozen=True)
class MixedState:
    """One generation: every part's state, and how many tokens it has seen beyond those that all have."""

    parts: tuple[Drafter, ...]
    states: tuple[Any, ...]
    ahead: tuple[int, ...]


class MixedDrafter(Drafter):
    """Merges the guesses of several drafters within one budget.

    How likely a node is to be accepted is learnt for every set of drafters that may agree on it, from what they promise
    and what becomes of their guesses (``Reliability``).  A drafter that promises too much loses its place in the tree,
    and goes on being watched.  So a mix is as good as its best part, but for what it takes to find out which that is.

    Look-ups are always asked.  Parts that run a network are asked in every round if the budget has no costs; with
    costs, in those rounds in which the look-ups' own tree is expected to commit fewer tokens a second than the rounds
    with a network were, of late.

    Under a rule for drawn children the first part that runs a network draws, and the others' guesses are put behind
    what it drew (``graft``).  How many nodes are drawn is settled before: by what the guesses are worth, and by what
    more nodes would add to a drawn tree.

    Args:
        parts: the drafters, two or more.

    Raises:
        ValueError: if there are fewer, or one is there twice.
    """

    def __init__(self, parts: Sequence[Drafter]):
        each = [leaf for part in parts for leaf in leaves(part)]
        if len(parts) < 2 or len({id(leaf) for leaf in each}) < len(each):
            names = ", ".join(type(leaf).__name__ for leaf in each) or "none"
            raise ValueError(f"A mix needs two or more drafters, each of them once; found {names}.")
        self.parts = tuple(parts)
        self.taps = tuple(sorted({layer for part in parts for layer in part.taps}))
        self.runs_network = any(part.runs_network for part in parts)
        # What measured costs are kept under: those of a head depend on its sizes.
        self.config = tuple(getattr(part, "config", type(part).__name__) for part in parts)
        self._ahead = (0,) * len(parts)
        self._is_ours = True
        self._candidates: Candidates | None = None
        self._learn_anew()

    def _learn_anew(self) -> None:
        self.reliability = Reliability(groups=2 ** len(self.parts))
        self._gain = torch.inf  # tokens expected in the time of a plain round, in rounds in which a network is asked

    def forget(self) -> None:
        self._learn_anew()
        for part in self.parts:
            part.forget()

    @property
    def state(self) -> MixedState:
        return MixedState(self.parts, tuple(part.state for part in self.parts), self._ahead)

    @state.setter
    def state(self, state: MixedState) -> None:
        """Go on from there; a state of other parts is of no use, and ``rewind`` will say so."""
        self._is_ours = state.parts == self.parts
        if self._is_ours:
            self._ahead = state.ahead
            for part, known in zip(self.parts, state.states, strict=True):
                part.state = known

    def attach(self, target: Target) -> Self:
        for part in self.parts:
            part.attach(target)
        return self

    @property
    def runs_as(self) -> str:
        return "+".join(part.runs_as for part in self.parts)

    def compile_parts(self) -> list[str]:
        return [reason for part in self.parts for reason in part.compile_parts()]

    def refresh(self) -> None:
        for part in self.parts:
            part.refresh()

    def share(self, cache: TreeCache) -> None:
        for part in self.parts:
            part.share(cache)

    def start(self, states: TargetStates, capacity: int) -> None:
        self._candidates, self._ahead, self._is_ours = None, (0,) * len(self.parts), True
        for part in self.parts:
            part.start(self._for(part, states), capacity)

    def observe(self, states: TargetStates) -> None:
        for part, ahead in zip(self.parts, self._ahead, strict=True):
            part.observe(self._for(part, states.without_first(ahead)))
        self._ahead = (0,) * len(self.parts)

    def select_rows(self, rows: Tensor) -> None:
        for part in self.parts:
            part.select_rows(rows)

    def rewind(self, length: int) -> int:
        """As far back as the part that remembers least; the others are not told again what they know."""
        self._candidates = None
        known = [part.rewind(length) for part in self.parts] if self._is_ours else [0]
        self._ahead = tuple(count - min(known) for count in known)
        return min(known)

    @torch.no_grad()
    def observe_tree(self, tree: TokenTree, logits: Tensor, verdict: Verdict) -> None:
        for part in self.parts:
            part.observe_tree(tree, logits, verdict)
        if (seen := self._candidates) is not None:
            tried, right = held_against(seen.tree, *committed_text(tree, verdict))
            self.reliability.learn(seen.promised, tried, right, seen.group)
        self._candidates = None

    def best_rule(self, temperature: float) -> str:
        """That of the part that draws."""
        return "walk" if self._drawing is None else self.parts[self._drawing].best_rule(temperature)

    @property
    def _drawing(self) -> int | None:
        """Which part draws: look-ups have no distribution to draw from."""
        return next((at for at, part in enumerate(self.parts) if part.runs_network), None)

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        if draw is not None and self._drawing is not None:
            return self._drawn(self._drawing, pending, budget, draw)
        unasked, free = TokenTree.root_only(pending), replace(budget, costs=None)
        trees = [unasked if part.runs_network else part.propose(pending, free) for part in self.parts]
        costs = budget.costs
        if costs is None:
            trees = self._with_networks(trees, pending, budget)
            self._candidates = merge(trees, self.reliability)
            return self._candidates.tree.worthiest(budget.nodes)
        self._candidates = merge(trees, self.reliability)
        size, gain = _best_size(self._candidates, replace(costs, first=0.0, level=0.0))
        self._gain *= HOPE
        if self.runs_network and gain < self._gain:
            trees = self._with_networks(trees, pending, budget)
            self._candidates = merge(trees, self.reliability)
            drawn = [tree for part, tree in zip(self.parts, trees, strict=True) if part.runs_network]
            size, gain = _best_size(self._candidates, costs, levels=max(int(tree.depths.max()) for tree in drawn))
            self._gain = gain if self._gain == torch.inf else REMEMBER * self._gain + (1 - REMEMBER) * gain
        return self._candidates.tree.worthiest(min(size, budget.nodes))

    def _drawn(self, drawing: int, pending: Tensor, budget: Budget, draw: Draw) -> TokenTree:
        """What part ``drawing`` draws, and the others' likeliest guesses in some of its places."""
        trees = [
            TokenTree.root_only(pending) if at == drawing else part.propose(pending, replace(budget, costs=None))
            for at, part in enumerate(self.parts)
        ]
        self._candidates = merge(trees, self.reliability)
        others = self._candidates.tree
        nodes = budget.nodes - _places(others, budget.nodes)
        tree = self.parts[drawing].propose(pending, replace(budget, nodes=nodes), draw)
        if tree.is_drawn:
            return graft(tree, others, budget.nodes)
        self._candidates = merge([*trees[:drawing], tree, *trees[drawing + 1 :]], self.reliability)
        return self._candidates.tree.worthiest(budget.nodes)

    def _with_networks(self, trees: list[TokenTree], pending: Tensor, budget: Budget) -> list[TokenTree]:
        """The look-ups' trees and, in the places that were left to them, the networks'."""
        return [
            part.propose(pending, budget) if part.runs_network else tree
            for part, tree in zip(self.parts, trees, strict=True)
        ]

    def _for(self, part: Drafter, states: TargetStates) -> TargetStates:
        """The states with those tapped layers that a part reads."""
        if part.taps == self.taps or states.taps is None:
            return states
        if not part.taps:
            return replace(states, taps=None)
        layers = states.taps.chunk(len(self.taps), dim=-1)
        return replace(states, taps=torch.cat([layers[self.taps.index(layer)] for layer in part.taps], dim=-1))


def leaves(drafter: Drafter) -> list[Drafter]:
    """The drafters that guess: of a mix within a mix its parts."""
    return [leaf for part in drafter.parts for leaf in leaves(part)] if isinstance(drafter, MixedDrafter) else [drafter]


def _places(guesses: TokenTree, nodes: int) -> int:
    """How many of ``nodes`` the likeliest guesses get, the others being drawn: while each is worth more than a draw.

    A drawn tree keeps as many guesses as the logarithm of its size, so that one more node brings ``YIELD / size``.
    """
    assert guesses.worth is not None
    worth = guesses.worth[:, 1:]
    count = min(nodes - 1, worth.shape[1])
    if count < 1:
        return 0
    best = worth.topk(count, dim=1).values.mean(0)
    drawn = nodes - torch.arange(count, device=best.device)
    return int((best > YIELD / drawn).sum())


def _best_size(candidates: Candidates, costs: RoundCosts, levels: int = 1) -> tuple[int, float]:
    """The size of tree with the most expected tokens a second, and how many in the time of a plain round."""
    worth = candidates.tree.worth
    assert worth is not None
    size, rate = costs.best(worth[:, 1:], levels)
    return size, rate * costs.plain
