"""What a drafter is: any source of guesses about what the target says next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from mtp.cache import TreeCache
from mtp.target import Target
from mtp.tree import TokenTree
from mtp.verify import Verdict


@dataclass(frozen=True)
class TargetStates:
    """What the target computed about some consecutive tokens of each row.

    Attributes:
        tokens: ``[B, T]`` token ids, right-padded.
        hidden: ``[B, T, H]`` last hidden states, after the final norm, one a token.
        taps: ``[B, T, n * H]`` the tapped layers' states side by side, or None.
        counts: ``[B]`` real tokens of each row; all T of a single one, which has no other row to be padded to.
    """

    tokens: Tensor
    hidden: Tensor
    taps: Tensor | None
    counts: Tensor

    @property
    def valid(self) -> Tensor:
        """``[B, T]`` True at real tokens."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.counts[:, None]

    @classmethod
    def joined(cls, pieces: Sequence[TargetStates]) -> TargetStates:
        """Consecutive pieces of the same rows as one, in which each row's real tokens lie one behind the other.

        Raises:
            ValueError: for no pieces, and for pieces of different numbers of rows.
        """
        rows = {len(piece.counts) for piece in pieces}
        if len(rows) != 1:
            raise ValueError(f"Expected consecutive states of the same rows; found pieces of {sorted(rows)} rows.")
        if len(pieces) == 1:
            return pieces[0]
        tokens = torch.cat([piece.tokens for piece in pieces], dim=1)
        hidden = torch.cat([piece.hidden for piece in pieces], dim=1)
        tapped = [piece.taps for piece in pieces if piece.taps is not None]
        taps = torch.cat(tapped, dim=1) if len(tapped) == len(pieces) else None
        counts = torch.stack([piece.counts for piece in pieces]).sum(0)
        if rows == {1}:
            return cls(tokens, hidden, taps, counts)
        real = torch.cat([piece.valid for piece in pieces], dim=1)
        order = (~real).byte().argsort(dim=1, stable=True)[:, : int(counts.max())]

        def in_order(states: Tensor) -> Tensor:
            return states.gather(1, order[..., None].expand(-1, -1, states.shape[2]))

        return cls(tokens.gather(1, order), in_order(hidden), None if taps is None else in_order(taps), counts)

    def without_first(self, count: int) -> TargetStates:
        """The states behind the first ``count`` tokens of each row."""
        if count == 0:
            return self
        taps = None if self.taps is None else self.taps[:, count:]
        return TargetStates(self.tokens[:, count:], self.hidden[:, count:], taps, self.counts - count)

    def select_rows(self, rows: Tensor) -> TargetStates:
        """The states of these rows only, no wider than the longest of them."""
        counts = self.counts[rows]
        width = int(counts.max())
        taps = None if self.taps is None else self.taps[rows, :width]
        return TargetStates(self.tokens[rows, :width], self.hidden[rows, :width], taps, counts)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of one round, for the batch and context at hand.

    Attributes:
        verify: of verifying n nodes a row, for n from 0 (which costs nothing and commits nothing) upwards.
        first: of the first pass of the drafter.
        level: of each further one.
        other: of everything else in a round.
        trust: accepted guesses over those that the drafter's confidences promised, of late.
    """

    verify: tuple[float, ...]
    first: float
    level: float
    other: float
    trust: float = 1.0

    @property
    def plain(self) -> float:
        """Of a round without drafting."""
        return self.verify[1] + self.other

    def best(self, worths: Tensor, levels: int) -> tuple[int, float]:
        """The size of tree with the most expected tokens a second after ``levels`` passes of the drafter.

        Args:
            worths: ``[B, C]`` the probability of each candidate to be accepted.

        Returns:
            nodes a row, the root included, and tokens a second of a row.
        """
        count = min(worths.shape[1], len(self.verify) - 2)
        return self.best_of(worths.topk(count, dim=1).values.mean(0).tolist() if count > 0 else [], levels)

    def best_of(self, worths: Sequence[float], levels: int) -> tuple[int, float]:
        """``best`` from the rows' mean worths, in falling order."""
        accepted = accumulate(worths[: len(self.verify) - 2])
        spent = self.first + self.level * (levels - 1) + self.other
        rates = [
            (1 + self.trust * kept) / (spent + self.verify[nodes])
            for nodes, kept in enumerate([0.0, *accepted], start=1)
        ]
        best = max(range(len(rates)), key=rates.__getitem__)
        return best + 1, rates[best]


@dataclass(frozen=True)
class Budget:
    """How much a drafter may propose.

    Attributes:
        nodes: most nodes a row, the root included.
        levels: most passes of the drafter, one after the other; None for as many as it finds useful.
        costs: what passes and nodes cost; the drafter then proposes what pays.  None makes trees as large as allowed.
    """

    nodes: int
    levels: int | None = None
    costs: RoundCosts | None = None


@dataclass(frozen=True)
class Draw:
    """How to draw children: without replacement, from the drafter's distribution.

    Attributes:
        temperature: of the drafter's distribution; best equal to the target's.
        generator: the source of randomness; None is torch's default one.
    """

    temperature: float = 1.0
    generator: torch.Generator | None = None

    def log_probs(self, logits: Tensor) -> Tensor:
        """The distribution ``[..., V]`` that children are drawn from."""
        return torch.log_softmax(logits.float() / self.temperature, dim=-1)

    def children(self, log_probs: Tensor, count: int) -> Tensor:
        """``[..., count]`` distinct entries in the order in which they were drawn.

        The Gumbel-top-k trick: the largest perturbed log-probabilities, in falling order, are distributed as draws
        without replacement (Kool et al., arXiv 1903.06059).
        """
        uniform = torch.rand(log_probs.shape, generator=self.generator, device=log_probs.device)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        return (log_probs + gumbel).topk(count, dim=-1).indices


class Drafter(ABC):
    """Guesses; the target decides.

    The round loop calls ``start`` once with the states of the prompts, then ``propose`` and ``observe`` in turn.  In
    rounds that are decoded plainly ``propose`` is left out.

    Attributes:
        taps: ids of the hidden layers it reads (see ``Target.default_taps``); the target is asked for these.
        state: everything it knows of the generation at hand, and nothing else; whoever continues that generation later
            takes it out and puts it back.
        runs_network: whether a proposal takes passes of a network, which have to pay for themselves, or only look-ups.
    """

    taps: tuple[int, ...] = ()
    state: Any = None
    runs_network: bool = True

    def attach(self, target: Target) -> Self:
        """Connect to the target that verifies: called before any drafting for it, perhaps more than once.

        Raises:
            ValueError: if this drafter cannot draft for it.
        """
        return self

    def share(self, cache: TreeCache) -> None:  # noqa: B027 - most drafters have no use for it
        """Be shown the target's own cache, before ``start`` or ``observe``.

        Whoever stages something in it has discarded that when ``propose`` returns.
        """

    def refresh(self) -> None:  # noqa: B027 - many have no weights
        """Notice weights that were changed since the last generation: copies of them may be kept, packed."""

    def forget(self) -> None:  # noqa: B027 - most drafters learn nothing while they draft
        """Be as new: drop what was learnt from one generation to the next."""

    @property
    def runs_as(self) -> str:
        """How its networks run on this machine: what its costs depend on beside its ``config``."""
        return ""

    def compile_parts(self) -> list[str]:
        """Compile what can be for this machine (see ``mtp.compiled_part``); returns why some parts could not."""
        return []

    def best_rule(self, temperature: float) -> str:
        """The exact acceptance rule (``mtp.rules``) under which the most of its guesses are kept when sampling."""
        return "walk"

    @abstractmethod
    def start(self, states: TargetStates, capacity: int) -> None:
        """Begin a batch.  ``capacity`` is the number of tokens the longest row may reach."""

    @abstractmethod
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        """Guess what follows each row's pending token.

        Args:
            pending: ``[B]`` tokens already chosen, whose states are not known yet.
            budget: how much to propose at most.
            draw: draw children at random instead of taking the most likely ones.
        """

    @abstractmethod
    def observe(self, states: TargetStates) -> None:
        """Learn what was committed: ``states`` of the tokens that were added to each row since the last call."""

    def observe_tree(self, tree: TokenTree, logits: Tensor, verdict: Verdict) -> None:  # noqa: B027 - few do
        """Learn from all that a pass said, at refused guesses too; called before ``observe``, in plain rounds as well.

        Args:
            tree: what was verified.
            logits: ``[B, N, V]`` of the target at every node.
            verdict: what was decided.  A row that ends may commit less.
        """

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keep only these rows of the batch; the others have ended."""

    def rewind(self, length: int) -> int:
        """Forget everything past the first ``length`` tokens of a single row, which then goes on differently.

        Returns:
            how many tokens are remembered, at most ``length``.  ``observe`` is called next with the states of those
            behind them; after 0, ``start`` with the states of the whole text, as if nothing had been.
        """
        return 0
