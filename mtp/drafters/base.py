"""What a drafter is: any source of guesses about what the target says next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp.tree import TokenTree


@dataclass(frozen=True)
class TargetStates:
    """What the target computed about some consecutive tokens of each row.

    Attributes:
        tokens: ``[B, T]`` token ids, right-padded.
        hidden: ``[B, T, H]`` last hidden states, after the final norm, one a token.
        taps: ``[B, T, n * H]`` the tapped layers' states side by side, or None.
        counts: ``[B]`` real tokens of each row.
    """

    tokens: Tensor
    hidden: Tensor
    taps: Tensor | None
    counts: Tensor

    @property
    def valid(self) -> Tensor:
        """``[B, T]`` True at real tokens."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.counts[:, None]

    def select_rows(self, rows: Tensor) -> TargetStates:
        """The states of these rows only."""
        taps = None if self.taps is None else self.taps[rows]
        return TargetStates(self.tokens[rows], self.hidden[rows], taps, self.counts[rows])


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

    The round loop calls ``start`` once with the states of the prompts, then ``propose`` and ``observe`` in turn.

    Attributes:
        taps: ids of the hidden layers it reads (see ``Target.default_taps``); the target is asked for these.
        state: everything it knows of the generation at hand, and nothing else; whoever continues that generation later
            takes it out and puts it back.
    """

    taps: tuple[int, ...] = ()
    state: Any = None

    @abstractmethod
    def start(self, states: TargetStates, capacity: int) -> None:
        """Begin a batch.  ``capacity`` is the number of tokens the longest row may reach."""

    @abstractmethod
    def propose(self, pending: Tensor, nodes: int, draw: Draw | None = None) -> TokenTree:
        """Guess what follows each row's pending token.

        Args:
            pending: ``[B]`` tokens already chosen, whose states are not known yet.
            nodes: most nodes a row, the root included.
            draw: draw children at random instead of taking the most likely ones.
        """

    @abstractmethod
    def observe(self, states: TargetStates) -> None:
        """Learn what was committed: ``states`` of the tokens that were added to each row since the last call."""

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
