"""Prompt lookup: what followed the last words before, in the prompt, the answer, recent answers or a given corpus.

Saxena's prompt lookup decoding (2023) copies what follows the first place where the last few tokens stand.  Here the
longest match is found, at a cost that does not grow with the text (the suffix automaton of SAM decoding, Hu et al.,
arXiv 2411.10666), several continuations make one tree, sized by how sure each is (as in SuffixDecoding, Oliaro et al.,
arXiv 2411.04975), and a corpus may stand behind it (REST, He et al., arXiv 2311.08252).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from mtp.drafters.base import Budget, Drafter, Draw, TargetStates
from mtp.drafters.lookup import Place, grow, tree_of
from mtp.suffix import ROOT, SuffixAutomaton
from mtp.target import Target
from mtp.tree import TokenTree

LOOKED_UP = 32  # last tokens of a row that are looked up in texts of others; longer matches are no surer
STATES_KEPT = 8  # states a token of a row's text; with more, ends that were taken back are forgotten


class OutputStore:
    """Recent answers, shared by all rows and generations, within a bound.

    Two automata take turns: when the newer has read half of what is allowed, the older is dropped.  Rows add their
    answers while they are made, so rows that answer the same prompt help each other.

    What one caller was answered may be guessed for another.  No text depends on it, but times do: callers who must not
    learn about each other need a store each, and so do models that spell in other tokens.  Models that generate at the
    same time, in several threads, may share one: drafters read it and add to it in turn.

    Args:
        capacity: most tokens remembered; some 0.4 kB each.

    Attributes:
        lock: to be held while its texts are read or added to.
    """

    def __init__(self, capacity: int = 1 << 16):
        if capacity < 2:
            raise ValueError(f"A store of outputs holds at least 2 tokens; found capacity={capacity}.")
        self.capacity = capacity
        self.lock = threading.RLock()
        self.texts: tuple[SuffixAutomaton, ...] = (SuffixAutomaton(),)
        self._read = 0  # tokens in the newest

    def extend(self, end: tuple[SuffixAutomaton, int] | None, token: int) -> tuple[SuffixAutomaton, int]:
        """Read one more token of an answer.

        Args:
            end: where the answer ended so far, as the last call returned it; None at its beginning.
        """
        if self._read >= self.capacity // 2:
            self.texts = (SuffixAutomaton(), self.texts[0])
            self._read = 0
        newest = self.texts[0]
        state = end[1] if end is not None and end[0] is newest else ROOT
        self._read += 1
        return newest, newest.extend(state, token)


@dataclass(eq=False)
class Row:
    """One row's text.

    Attributes:
        tokens: whose states are known: all but the pending one.
        text: the same, to be looked into.
        ends: the state of ``text`` after each token.
        stored: where the answer ends in the store.
        answering: what is read next is the answer; before, it is the prompt.
    """

    tokens: list[int] = field(default_factory=list)
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    ends: list[int] = field(default_factory=list)
    stored: tuple[SuffixAutomaton, int] | None = None
    answering: bool = False

    def read(self, token: int) -> None:
        """Take in a token of the prompt or the answer."""
        self.tokens.append(token)
        self.ends.append(self.text.extend(self.ends[-1] if self.ends else ROOT, token))

    def rewind(self, length: int) -> None:
        """Go back to the first ``length`` tokens.  What followed stays known, until it is far more than the text."""
        del self.tokens[length:], self.ends[length:]
        self.stored, self.answering = None, False
        if len(self.text) > STATES_KEPT * max(len(self.tokens), 512):
            tokens, self.tokens, self.ends, self.text = self.tokens, [], [], SuffixAutomaton()
            for token in tokens:
                self.read(token)

    def places(self, pending: int) -> list[Place]:
        """Where the text and the pending token have stood before."""
        return [(self.text, self.text.advance(self.text.whole(self.ends[-1]), pending))]


class NgramDrafter(Drafter):
    """Guesses that what followed the longest matching phrases before follows again; nothing where nothing matches.

    Its guesses depend on no draws, so the walk decides about them, at any temperature.

    Args:
        corpus: texts to look into besides, as ids of the target's tokens; some 0.4 kB of memory a token.
        store: recent answers to look into besides, and to add to.

    Raises:
        ValueError: for a corpus of something else than rows of token ids.
    """

    runs_network = False
    state: Sequence[Row]

    def __init__(self, corpus: Iterable[Sequence[int]] = (), store: OutputStore | None = None):
        self.state = []
        self.store = store
        self._turn: AbstractContextManager[Any] = nullcontext() if store is None else store.lock
        texts = [token_ids(text, "corpus") for text in corpus]
        self._tokens = {token for text in texts for token in text}  # that may be guessed though no text has them
        self._corpus = (SuffixAutomaton.of(texts),) if texts else ()

    def attach(self, target: Target) -> Self:
        """Raise ``ValueError`` for a corpus or prediction that cannot be in the target's tokens."""
        vocab_size = target.vocab_size
        wrong = sorted(token for token in self._tokens if not 0 <= token < vocab_size)
        if wrong:
            raise ValueError(
                f"The drafter was given texts with token {wrong[0]}; this target has tokens 0 to {vocab_size - 1}. "
                "Texts to look into are to be spelt with the target's own tokenizer."
            )
        return self

    def start(self, states: TargetStates, capacity: int) -> None:
        self.state = self._new_rows(len(states.tokens))
        self.observe(states)

    def observe(self, states: TargetStates) -> None:
        for row, tokens, count in zip(self.state, states.tokens.tolist(), states.counts.tolist(), strict=True):
            for token in tokens[:count]:
                row.read(token)
            if row.answering and self.store is not None:
                with self._turn:
                    for token in tokens[:count]:
                        row.stored = self.store.extend(row.stored, token)
            row.answering = True

    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        rows = zip(self.state, pending.tolist(), strict=True)
        with self._turn:
            guesses = [grow(self._places(row, token), budget.nodes - 1) for row, token in rows]
        return tree_of(pending, guesses, budget)

    def select_rows(self, rows: Tensor) -> None:
        self.state = [self.state[row] for row in rows.tolist()]

    def rewind(self, length: int) -> int:
        """See ``Drafter.rewind``.  What followed stays known: a text that is asked for again mostly repeats it."""
        self.state[0].rewind(length)
        return len(self.state[0].tokens)

    def _new_rows(self, batch: int) -> Sequence[Row]:
        return [Row() for _ in range(batch)]

    def _places(self, row: Row, pending: int) -> list[Place]:
        """Where the row's text and its pending token stand, in every text that is looked into."""
        others = (*self._corpus, *(self.store.texts if self.store is not None else ()))
        last = [*row.tokens[1 - LOOKED_UP :], pending]
        return [*row.places(pending), *((text, text.find(last)) for text in others)]


def token_ids(text: Any, what: str) -> list[int]:
    """A row of token ids as plain numbers, whatever holds them.

    Args:
        what: the text belongs to, for the message.

    Raises:
        ValueError: for anything else.
    """
    found = text.tolist() if hasattr(text, "tolist") else text
    if not isinstance(found, list | tuple) or not all(isinstance(token, int) for token in found):
        raise ValueError(
            f"{what} holds a {type(text).__name__} where a row of token ids was expected. Spell texts with the "
            "target's tokenizer first: tokenizer(text, add_special_tokens=False).input_ids."
        )
    return list(found)
