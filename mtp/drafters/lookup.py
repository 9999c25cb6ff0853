"""Guesses looked up in text: where what was just said stood before, and what followed it there.

Every text that is looked into is a ``SuffixAutomaton``.  From the places where the end of a row's text stands in them a
tree is grown best-first, with a confidence for every node.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from mtp.drafters.base import Budget
from mtp.suffix import Match, SuffixAutomaton
from mtp.tree import TokenTree

Place = tuple[SuffixAutomaton, Match]  # where a text stands in another

# The chance that one of the tokens which followed a phrase before follows it again, as a logistic curve over the
# logarithm of the phrase's length and of how often each of these tokens was seen; less where a longer phrase has just
# been wrong.  Fitted to answers of SmolLM2-135M-Instruct, prompts and answers looked into (docs/decisions.md).
BIAS, PER_LENGTH, PER_COUNT, AFTER_REFUSAL = -0.87, 1.19, 1.35, -0.76
NEWEST = 0.5  # how much more often the newest of several followers counts as seen
CONTEXTS = 4  # phrases asked at each node, longest first
WIDEST = 8  # of a phrase's followers, those looked at, newest first
LEAST_WORTH = 0.01  # chance of being accepted below which nothing is guessed


class Guess(NamedTuple):
    """A node below the root of one row's tree.

    Attributes:
        token: what is guessed.
        parent: the node that it follows; 0 is the root.
        depth: of the node; 1 below the root.
        chance: that the target says so, given the path above.
        worth: that it is accepted: the product of the chances down to here.
    """

    token: int
    parent: int
    depth: int
    chance: float
    worth: float


def followers(places: Sequence[Place], least: float = 0.0) -> list[tuple[int, float]]:
    """The tokens that may follow a text which stands at ``places``, with the probability of each.

    Prediction by partial matching (Cleary and Witten, 1984): the longest phrase is asked first, and what probability it
    leaves goes to shorter ones, for tokens that it does not know; as long as more than ``least`` is left.
    """
    found: list[tuple[int, float]] = []
    known: set[int] = set()
    left = 1.0
    for text, (state, length) in islice(_longest_first(places), CONTEXTS):
        newest = islice(reversed(text.followers(state).items()), WIDEST)
        counts = [(token, text.count(after)) for token, after in newest if token not in known]
        if not counts:
            continue
        seen = sum(count for _, count in counts)
        chance = left * confidence(length, seen / len(counts), first=not known)
        share = chance / (seen + NEWEST)
        found.append((counts[0][0], share * (counts[0][1] + NEWEST)))
        found += [(token, share * count) for token, count in counts[1:]]
        left -= chance
        if left < least:
            break
        known.update(token for token, _ in counts)
    return found


def _longest_first(places: Sequence[Place]) -> Iterator[Place]:
    """The phrases to ask at several places, each with the text that it was read in."""
    if len(places) == 1:
        return _phrases(places[0])
    return heapq.merge(*map(_phrases, places), key=lambda place: -place[1].length)


def _phrases(place: Place) -> Iterator[Place]:
    text, match = place
    return ((text, context) for context in text.contexts(match))


def confidence(length: int, count: float, first: bool) -> float:
    """The chance that what followed a phrase of ``length`` tokens before follows it again.

    Args:
        count: how often each different follower was seen, on average.
        first: no longer phrase was asked.
    """
    score = BIAS + PER_LENGTH * math.log(length) + PER_COUNT * math.log(max(count, 1.0))
    return 1 / (1 + math.exp(-score - (0.0 if first else AFTER_REFUSAL)))


def grow(places: Sequence[Place], most: int) -> list[Guess]:
    """The ``most`` likeliest continuations of a text which stands at ``places``, in falling order of worth."""
    nodes: list[Guess] = []
    heap: list[tuple[float, int, Guess, Sequence[Place]]] = []  # by worth; the older of equals first
    offered = 0
    parent, depth, worth = 0, 0, 1.0
    while len(nodes) < most:
        for token, chance in followers(places, LEAST_WORTH / worth):
            if worth * chance >= LEAST_WORTH:
                offered += 1
                guess = Guess(token, parent, depth + 1, chance, worth * chance)
                heapq.heappush(heap, (-guess.worth, offered, guess, places))
        if not heap:
            break
        _, _, guess, before = heapq.heappop(heap)
        nodes.append(guess)
        parent, depth, worth = len(nodes), guess.depth, guess.worth
        places = [(text, text.advance(match, guess.token)) for text, match in before]
    return nodes


def tree_of(pending: Tensor, rows: Sequence[Sequence[Guess]], budget: Budget) -> TokenTree:
    """The guesses of every row behind its pending token (``[B]``), cut to what pays where the budget knows costs.

    Cutting a row's guesses anywhere leaves a tree, since a node is worth no more than its parent and comes after it.
    """
    size = max(map(len, rows))
    if budget.costs is not None and size > 0:
        worths = torch.tensor([[guess.worth for guess in row] + [0.0] * (size - len(row)) for row in rows])
        size = min(budget.costs.best(worths, levels=1)[0] - 1, size)
    if size == 0:
        return TokenTree.root_only(pending)
    padding = Guess(token=0, parent=0, depth=1, chance=1.0, worth=0.0)
    fields = zip(*(guess for row in rows for guess in [*row[:size], *[padding] * (size - len(row))]), strict=True)
    tokens, parents, depths, chances, worth = (
        torch.tensor(values, device=pending.device).view(len(rows), size) for values in fields
    )
    counts = torch.tensor([[len(row)] for row in rows], device=pending.device)

    def below(root: float, nodes: Tensor) -> Tensor:
        return torch.cat([nodes.new_full((len(rows), 1), root), nodes], dim=1)

    return TokenTree(
        tokens=torch.cat([pending[:, None], tokens], dim=1),
        parents=below(-1, parents),
        depths=below(0, depths),
        valid=torch.arange(size + 1, device=pending.device) <= counts,
        log_q=below(0.0, chances.log()),
        worth=below(1.0, worth),
    )
