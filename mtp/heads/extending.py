"""Heads that guess, beside their draft vocabulary, the tokens of the text at hand.

What the text adds is read by rows of the target's own output matrix; see ``mtp.heads.context_vocabulary``.  A family
says which hidden states its own output matrix reads, and these rows read the same, scaled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp.drafters.base import TargetStates
from mtp.heads.base import Head, HeadConfig, TrainingBatch
from mtp.heads.context_vocabulary import (
    UNKNOWN,
    BatchVocabulary,
    ContextTokens,
    ContextVocabulary,
    OutputRows,
    lacking,
)
from mtp.heads.layers import gather_positions
from mtp.support import UnsupportedTargetError
from mtp.target import Target


@dataclass(frozen=True)
class ExtendingConfig(HeadConfig):
    """Sizes of such a head.

    Attributes:
        context_vocabulary: it can also guess the tokens of the text so far that its draft vocabulary lacks.
    """

    context_vocabulary: bool = False

    @property
    def extends(self) -> bool:
        """Whether texts add anything to what it can guess."""
        return self.context_vocabulary and self.draft_vocab_size < self.vocab_size


@dataclass
class LastStates:
    """A generation of which a head reads no more than where its texts end.

    Attributes:
        hidden: ``[B, 1, H]`` the target's hidden states at each row's last committed token.
        context: what the texts add to the vocabulary; None where they add nothing.
    """

    hidden: Tensor
    context: ContextVocabulary | None

    def observe(self, states: TargetStates) -> None:
        """Go on to where ``states`` end."""
        self.hidden = last_of(states)
        if self.context is not None:
            self.context.observe(states.tokens, states.counts)

    def select_rows(self, rows: Tensor) -> None:
        self.hidden = self.hidden[rows]
        if self.context is not None:
            self.context.select_rows(rows)

    def rewind(self, length: int) -> int:
        if self.context is not None:
            self.context.rewind(length)
        return length


def last_of(states: TargetStates) -> Tensor:
    """``[B, 1, H]`` hidden states at each row's last token."""
    return gather_positions(states.hidden, (states.counts - 1)[:, None])


@dataclass(frozen=True)
class Added:
    """What the texts of a training batch add to a head's vocabulary.

    Attributes:
        tokens: that it lacks.
        rows: of the target's output matrix, for these.
    """

    tokens: ContextTokens
    rows: OutputRows


class ExtendingHead(Head):
    """See the module's text.

    Attributes:
        state: the generation at hand.  Families that keep more of it have a state of their own, with the same methods.
    """

    config: ExtendingConfig
    state: Any
    context_scale: nn.Parameter
    context_bias: nn.Parameter

    @classmethod
    def default_sizes(cls, target: Target, asked: Mapping[str, Any]) -> dict[str, Any]:
        if asked.get("context_vocabulary") and not target.output.has_rows:
            raise UnsupportedTargetError(
                "context_vocabulary=true: tokens of the text are guessed by their rows of the target's output matrix, "
                "which cannot be read one by one here (quantised, adapted or offloaded). Set it to false."
            )
        return {**super().default_sizes(target, asked), "context_vocabulary": target.output.has_rows}

    def add_context_weights(self, steps: int = 1) -> None:
        """Weights by which the target's rows are read beside an output matrix that is trained, one of ``steps``."""
        if self.config.extends:
            self.context_scale = nn.Parameter(torch.ones(steps))
            self.context_bias = nn.Parameter(torch.zeros(steps))

    @abstractmethod
    def guess(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Logits ``[..., Vd]`` over the draft vocabulary, from the hidden states ``[..., H]`` behind the head's layers.

        Args:
            step: of those that have an output matrix each.
        """

    def guess_context(self, hidden: Tensor, rows: OutputRows, step: int = 0) -> Tensor:
        """Logits ``[..., E]`` of further tokens, beside those of ``guess``.

        Args:
            rows: of these tokens in the target's output matrix.
        """
        # Of one dimension: under autocast a scalar would leave hidden states in half precision, and rows are not.
        own = slice(step, step + 1)
        return rows(hidden * self.context_scale[own]) + self.context_bias[own]

    @property
    def takes_up(self) -> bool:
        """Whether texts add anything, with this target."""
        return self.config.extends and self.target.output.has_rows

    # ---- training -------------------------------------------------------------------------------------------------

    def vocabulary(self, batch: TrainingBatch) -> BatchVocabulary:
        if not self.takes_up:
            return super().vocabulary(batch)
        tokens, valid = batch.states.tokens, batch.states.valid
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        none = ContextTokens.none(len(tokens), tokens.device)
        context = none.joined_by(tokens, positions, lacking(self.draft_ids, self.config.vocab_size)[tokens] & valid)
        return BatchVocabulary.of(torch.cat([self.draft_ids, context.ids]), self.config.vocab_size, context)

    def added_by(self, vocabulary: BatchVocabulary) -> Added | None:
        """What a batch's texts add, for ``joined``."""
        if vocabulary.context is None:
            return None
        rows = OutputRows.of(self.target, vocabulary.context.ids, next(self.parameters()))
        return Added(vocabulary.context, rows)

    def logits_of(self, hidden: Tensor, step: int, added: Added | None, rows: Tensor, at: Tensor) -> Tensor:
        """``[M, V']`` over a batch's vocabulary, from hidden states ``[M, H]``.

        Args:
            added: by the batch's texts.
            rows: ``[M]`` the text of each guess.
            at: ``[M]`` up to where it is known.
        """
        return self.joined(self.guess(hidden, step), hidden, step, added, rows, at)

    def joined(
        self, logits: Tensor, hidden: Tensor, step: int, added: Added | None, rows: Tensor, at: Tensor
    ) -> Tensor:
        """``logits [M, Vd]`` of the draft vocabulary with those of what texts add; see ``logits_of``."""
        if added is None:
            return logits
        further = self.guess_context(hidden, added.rows, step)
        return torch.cat([logits, further.masked_fill(added.tokens.unknown(rows, at), UNKNOWN).to(logits)], dim=-1)

    # ---- decoding -------------------------------------------------------------------------------------------------

    def read_text(self, states: TargetStates) -> ContextVocabulary | None:
        """What the texts of a generation that begins with ``states`` add; None where they add nothing."""
        if not self.takes_up:
            return None
        context = ContextVocabulary(self.target, self.draft_ids, states.tokens.shape[0], next(self.parameters()))
        context.observe(states.tokens, states.counts)
        return context

    def start(self, states: TargetStates, capacity: int) -> None:
        self.state = LastStates(last_of(states), self.read_text(states))

    def observe(self, states: TargetStates) -> None:
        self.state.observe(states)

    @torch.no_grad()
    def select_rows(self, rows: Tensor) -> None:
        self.state.select_rows(rows)

    @torch.no_grad()
    def rewind(self, length: int) -> int:
        return self.state.rewind(length)

    def read_pending(self, pending: Tensor) -> None:
        """Take in what texts add up to the tokens ``pending [B]``; before anything is guessed behind these."""
        if self.context is not None:
            self.context.read(pending)

    @property
    def context(self) -> ContextVocabulary | None:
        """What the texts of the generation at hand add."""
        return self.state.context

    @property
    def guessable(self) -> Tensor:
        """``[V']`` the tokens that the logits of the round at hand are of."""
        return self.draft_ids if self.context is None else self.context.ids

    def extended(self, logits: Tensor, hidden: Tensor, step: int = 0) -> Tensor:
        """``[B, W, V']`` logits of all that can be guessed: ``logits [B, W, Vd]`` and, from ``hidden [B, W, H]``, those
        of what the texts add."""
        context = self.context
        if context is None or not context.tokens.ids.numel():
            return logits
        added = context.mask(self.guess_context(hidden, context.rows, step).to(logits))
        return torch.cat([logits, added], dim=-1)
