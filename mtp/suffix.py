"""A suffix automaton over token ids: every place where the end of a text has been seen before, in constant time.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).  A state stands for the phrases that
end at the same places of what was read; they are suffixes of the longest of them.  Reading one more token takes
amortised constant time, however long the text is, and so does finding the longest suffix that occurred before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

ROOT = 0  # the state of the empty phrase, which ends everywhere
COUNTED = 32  # phrases ending at a token that are counted, longest first: text that repeats one token has thousands


class Match(NamedTuple):
    """A phrase that was read: the automaton's state and the phrase's length in tokens."""

    state: int
    length: int


NOTHING = Match(ROOT, 0)


class SuffixAutomaton:
    """All phrases of one or several texts, with what followed them.

    A text is read token by token with ``extend``, from ``ROOT`` on.  Reading may go on from any state that ``extend``
    has returned, however long ago: a text that is taken back to some point and goes on differently costs nothing.

    Attributes:
        steps: elementary operations so far, for those who ask what a token costs.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = array("i", [-1])  # the state of the longest suffix that ends at more places
        self._longest = array("i", [0])  # tokens of the longest phrase of a state
        self._count = array("i", [0])  # how often its phrases were read
        self.steps = 0

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> SuffixAutomaton:
        """Of several texts, read one after the other."""
        automaton = cls()
        for text in texts:
            state = ROOT
            for token in text:
                state = automaton.extend(state, token)
        return automaton

    def __len__(self) -> int:
        """Number of states; at most two a token read."""
        return len(self._next)

    def extend(self, state: int, token: int) -> int:
        """Read ``token`` behind the text that ends in ``state``; returns the state of the longer text."""
        length = self._longest[state] + 1
        found = self._next[state].get(token)
        if found is not None:  # another text went on like this
            new = found if self._longest[found] == length else self._split(state, token, found)
        else:
            new = self._add({}, length, ROOT, 0)
            while state >= 0 and token not in self._next[state]:
                self._next[state][token] = new
                state = self._link[state]
                self.steps += 1
            if state >= 0:
                found = self._next[state][token]
                exact = self._longest[found] == self._longest[state] + 1
                self._link[new] = found if exact else self._split(state, token, found)
        self._count_phrases(new)
        return new

    def advance(self, match: Match, token: int) -> Match:
        """The longest phrase that ends in ``token``, is a suffix of ``match`` and that token, and was read before."""
        state, length = self._now(match)
        while token not in self._next[state]:
            if state == ROOT:
                return NOTHING
            state = self._link[state]
            length = self._longest[state]
            self.steps += 1
        return Match(self._next[state][token], length + 1)

    def find(self, tokens: Iterable[int]) -> Match:
        """The longest end of ``tokens`` that was read."""
        match = NOTHING
        for token in tokens:
            match = self.advance(match, token)
        return match

    def whole(self, state: int) -> Match:
        """The text that ends in a state which ``extend`` has returned."""
        return Match(state, self._longest[state])

    def shortened(self, match: Match, length: int) -> Match:
        """The last ``length`` tokens of a phrase, or the phrase where it is no longer."""
        return self._now(Match(match.state, min(length, match.length)))

    def further(self, match: Match, tokens: int) -> Match | None:
        """The phrase with the ``tokens`` tokens that last followed it for the first time; None at the end of a text."""
        state, length = self._now(match)
        for _ in range(tokens):
            if not self._next[state]:
                return None
            state = next(reversed(self._next[state].values()))
            self.steps += 1
        return Match(state, length + tokens)

    def contexts(self, match: Match) -> Iterator[Match]:
        """The suffixes of ``match``, longest first, that were followed by something; each by more than those before."""
        state, length = self._now(match)
        while state > ROOT:
            if self._next[state]:
                yield Match(state, length)
            state = self._link[state]
            length = self._longest[state]

    def followers(self, state: int) -> dict[int, int]:
        """The tokens that followed a state's phrases, and the states that they lead to; oldest first."""
        return self._next[state]

    def count(self, state: int) -> int:
        """How often a state's phrases were read; too few of phrases with more than ``COUNTED`` longer suffixes."""
        return self._count[state]

    def _now(self, match: Match) -> Match:
        """Where a phrase is today: texts read since may have given it a state of its own."""
        state, length = match
        while state > ROOT and self._longest[self._link[state]] >= length:
            state = self._link[state]
            self.steps += 1
        return Match(state, length)

    def _add(self, followers: dict[int, int], longest: int, link: int, count: int) -> int:
        self._next.append(followers)
        self._longest.append(longest)
        self._link.append(link)
        self._count.append(count)
        return len(self._next) - 1

    def _split(self, state: int, token: int, found: int) -> int:
        """Give the phrases of ``found`` that are no longer than ``state`` and ``token`` a state of their own."""
        clone = self._add(dict(self._next[found]), self._longest[state] + 1, self._link[found], self._count[found])
        self.steps += len(self._next[clone])
        self._link[found] = clone
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
            self.steps += 1
        return clone

    def _count_phrases(self, state: int) -> None:
        for _ in range(COUNTED):
            if state <= ROOT:
                return
            self._count[state] += 1
            state = self._link[state]
            self.steps += 1
