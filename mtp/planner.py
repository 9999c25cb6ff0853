"""How large a tree to verify, round by round, and when not to draft at all.

Acceptance is not speed: a tree is worth the tokens it is expected to commit over the seconds it is expected to take.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace

from mtp.cost import Costs
from mtp.drafters.base import Budget, RoundCosts
from mtp.tree import TokenTree
from mtp.verify import Outcome, Verdict


@dataclass(frozen=True)
class RoundReport:
    """What a round came to.

    Attributes:
        drafted: whether the drafter was asked.
        committed: mean tokens committed a row, the target's own included.
        promised: mean accepted guesses a row that the drafter's confidences promised; None where it has none.
        seconds: wall time of the whole round.
        tree: what was verified.
        verdict: what was decided about it.
        outcome: both, as far as the host knows them: reading it does not wait for a device.
    """

    drafted: bool
    committed: float
    promised: float | None
    seconds: float
    tree: TokenTree
    verdict: Verdict
    outcome: Outcome

    @property
    def is_bare(self) -> bool:
        """Whether nothing was guessed."""
        return self.tree.num_nodes == 1


class Planner(ABC):
    """Decides before each round what the drafter may propose, and learns from how the round went.

    Attributes:
        is_fixed: what it decides depends on nothing that it learns, such as times.
        nodes: most nodes of a tree.
    """

    is_fixed: bool = False
    nodes: int

    @abstractmethod
    def prepare(self, batch: int) -> None:
        """Called before a generation of ``batch`` rows."""

    @abstractmethod
    def budget(self, context: int, batch: int) -> Budget | None:
        """For a round of ``batch`` rows, the longest of ``context`` tokens; None to decode plainly."""

    @abstractmethod
    def learn(self, report: RoundReport) -> None:
        """Take in how a round went."""


class FixedPlanner(Planner):
    """Trees of at most ``nodes`` nodes in every round."""

    is_fixed = True

    def __init__(self, nodes: int):
        self.nodes = nodes

    def prepare(self, batch: int) -> None:
        pass

    def budget(self, context: int, batch: int) -> Budget:
        return Budget(self.nodes)

    def learn(self, report: RoundReport) -> None:
        pass


FORGET = 0.9  # weight of what was known, a round later: about ten rounds count
MARGIN = 0.97  # drafting goes on while it is at least this fast as plain decoding
FIRST_ROUNDS = 2  # decoded plainly before anything else: what they take is what drafting has to beat
FIRST_REST, LONGEST_REST = 16, 128  # rounds decoded plainly before drafting is tried again
NEW_TEXT_REST = 0.25  # of the next rest: as much at most is carried over to a text ...
SHORT_PROMPT = 256  # ... of at most so many tokens, which a drafter reads in no time
TRIAL_TOKENS, TRIAL_TIME = 1.6, 1.0  # what a trial begins with: one bad round does not end it, two or three do
TRUST_RANGE = (0.1, 1.5)
FIRST_AHEAD = (8, 3)  # nodes and levels of the first tree that is sized ahead
FAITH = 2.0  # rounds' worth of the acceptance that was measured, before any is seen
SPIKE = 2.0  # times the usual: what a round takes beyond that is put down to the machine


class Pace:
    """Times of like rounds, without what the machine did beside them.

    One round that took five times as long as those before it says nothing about drafting; several do.
    """

    def __init__(self) -> None:
        self._last = deque([1.0] * 3, maxlen=5)  # over what was expected

    def count(self, time: float, expected: float) -> float:
        """How much of a round's time is to be held for or against it, knowing what the costs made expect."""
        limit = SPIKE * statistics.median(self._last) * expected
        self._last.append(time / expected)
        return min(time, limit)


class CostPlanner(Planner):
    """Trees that commit the most tokens a second on this machine; plain decoding where none beats it.

    Two things are learnt as rounds go by, in one generation after the other.  ``trust`` compares accepted guesses with
    what the drafter's confidences promised: on text that the heads were not trained for they promise too much.  And
    the speed of drafted rounds is held against that of plain ones.  When drafting falls behind it rests, and is tried
    again after a while; every trial that fails doubles the rest.  Most of a rest ends with the text, since the next one
    may be of another kind, unless its prompt is so long that reading it for a trial would cost more than it may win.

    Times are counted in plain rounds of the same batch and context, so that rows that end and texts that grow change
    nothing.

    Args:
        costs: measured on this machine.
        nodes: most nodes of a tree.
        expected: mean accepted length that the drafter was measured to have.
        ahead: size each tree by the one before it, with which its numbers came to the host anyway, instead of letting
            the drafter look at its own: for devices that would have to be waited for.
    """

    def __init__(self, costs: Costs, nodes: int, expected: float = 2.0, ahead: bool = False):
        self.costs = costs
        self.ahead = ahead
        self._next_nodes, self._next_levels = FIRST_AHEAD
        self.nodes = nodes
        self.trust = 1.0
        self.resting = FIRST_ROUNDS
        self._next_rest = FIRST_REST
        self._plain = 1.0  # what a plain round takes, over what the table says
        self._plain_pace, self._drafted_pace = Pace(), Pace()
        self._tokens, self._time = FAITH * expected, FAITH
        self._weight = FAITH
        self._kept = self._promised = FAITH * (expected - 1)
        self._last: RoundCosts | None = None
        self._begins = True  # a text

    def prepare(self, batch: int) -> None:
        """Measure what is not known yet, before a generation begins."""
        self.costs.prepare(batch)
        self._begins = True

    def budget(self, context: int, batch: int) -> Budget | None:
        self._last = self.costs.table(batch).of_round(context, self.nodes)
        if self._begins and context <= SHORT_PROMPT:
            self.resting = min(self.resting, int(NEW_TEXT_REST * self._next_rest))
        self._begins = False
        if self.resting > 0:
            self.resting -= 1
            return None
        if self.ahead:
            return Budget(min(self._next_nodes, self.nodes), self._next_levels)
        return Budget(self.nodes, costs=replace(self._last, trust=self.trust))

    def learn(self, report: RoundReport) -> None:
        assert self._last is not None
        time = report.seconds / self._last.plain
        if not report.drafted:
            self._see_plain(time)
            if self.resting == 0 and self._weight == 0:
                self._begin_trial()
            return
        if report.is_bare:
            self._restore_faith()
            if self._last.first < (1 - MARGIN) * self._last.plain:
                # The drafter costs next to nothing and had no guess: this was a plain round, and says nothing of it.
                self._see_plain(time)
                return
        elif report.promised is not None:
            self._kept = FORGET * self._kept + (report.committed - 1)
            self._promised = FORGET * self._promised + report.promised
            self._set_trust()
            if self.ahead:
                self._size_next(report.outcome)
        self._tokens = FORGET * self._tokens + report.committed
        self._time = FORGET * self._time + self._drafted_pace.count(time, self._expected(report.tree))
        self._weight = FORGET * self._weight + 1
        if self._tokens * self._plain < MARGIN * self._time:
            self.resting, self._weight = self._next_rest, 0.0
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        elif self._weight > FAITH + 1:
            self._next_rest = FIRST_REST

    def _see_plain(self, time: float) -> None:
        """Take in a round without guesses: what drafting has to beat."""
        self._plain = FORGET * self._plain + (1 - FORGET) * self._plain_pace.count(time, expected=1.0)

    def _expected(self, tree: TokenTree) -> float:
        """What a round that drafts and verifies ``tree`` is expected to take at least, in plain rounds."""
        assert self._last is not None
        verify = self._last.verify[min(tree.num_nodes, len(self._last.verify) - 1)]
        return (self._last.first + verify + self._last.other) / self._last.plain

    def _restore_faith(self) -> None:
        """Nothing was found to guess, or nothing that pays: a drafter that is not believed would never be tried."""
        self._kept = FORGET * self._kept + (1 - FORGET)
        self._promised = FORGET * self._promised + (1 - FORGET)
        self._set_trust()

    def _size_next(self, outcome: Outcome) -> None:
        """What would have been the best tree this time; one size larger where the whole of it was, one level deeper.

        Sizes are powers of two, so that few shapes occur.
        """
        assert self._last is not None
        assert outcome.worths is not None
        rows = [
            sorted(zip(worths, depths, strict=True), reverse=True)
            for worths, depths in zip(outcome.worths, outcome.depths, strict=True)
        ]
        means = [sum(worth for worth, _ in rank) / len(rows) for rank in zip(*rows, strict=True)]
        levels = max(depth for row in rows for _, depth in row)
        nodes, _ = replace(self._last, trust=self.trust).best_of(means[1:], levels)
        deepest = max(depth for row in rows for _, depth in row[:nodes])
        wanted = 2 * nodes if nodes == len(rows[0]) else nodes
        self._next_nodes = min(max(1 << (wanted - 1).bit_length(), 2), self.nodes)
        self._next_levels = deepest + 1

    def _set_trust(self) -> None:
        low, high = TRUST_RANGE
        self.trust = min(max(self._kept / max(self._promised, 1e-6), low), high)

    def _begin_trial(self) -> None:
        """The next rounds are drafted in good faith, and judged nearly alone."""
        self._tokens, self._time = TRIAL_TOKENS, TRIAL_TIME * self._plain
        self._kept = self._promised = self.trust = 1.0
